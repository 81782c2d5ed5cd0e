"""MDS shards: how samples of equal length are written into files, and the index of a split.

The files equal byte for byte those of StreamingDataset's writer, which is not used because its import takes seconds and
most of a gigabyte. `samples.py` decides which tokens are in which shard.
"""

import bz2
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmfoundry_lite.data.rows import UNPADDED_LENGTH
from llmfoundry_lite.files import sync_folder
from llmfoundry_lite.prepare.request import BEST_FIT, PrepareRequest

SHARD_HASH = "xxh3_64"
"""Hash algorithm of the shards in index.json, by which readers detect damage."""

LENGTH_DTYPE = np.dtype(np.uint32)
"""Type of the column UNPADDED_LENGTH."""

OFFSET_BYTES = 4
"""Size of each offset in an MDS shard, and of its number of samples: uint32."""


class ShardFormat:
    """The form of the shards of a preparation, which follows from its request and the type of its tokens.

    A shard consists of the number of samples, the offset of each sample and of the end (all uint32), a description in
    JSON, and the samples:

        number   offsets of samples   offset of the end   description            samples
        2        212, 8404            16596               {"column_encodings"…   8,192 bytes, 8,192 bytes

    A sample is the column `tokens`. If it may have padding, the column UNPADDED_LENGTH follows.
    """

    def __init__(self, request: PrepareRequest, dtype: np.dtype, padding: int) -> None:
        """Take the length of samples, the size limit of shards and their compression from the request.

        `dtype` is the type of tokens in shards, and `padding` the token that fills up samples.
        """
        self.compression = request.compression
        self.dtype = dtype
        self.padding = padding
        self.sample_tokens = request.max_seq_len

        columns = {"tokens": (f"ndarray:{dtype.name}:{self.sample_tokens}", self.sample_tokens * dtype.itemsize)}
        if request.pack == BEST_FIT:
            columns[UNPADDED_LENGTH] = (LENGTH_DTYPE.name, LENGTH_DTYPE.itemsize)
        sizes = [size for _, size in columns.values()]
        self.sample_bytes = sum(sizes)
        self.description = {
            "version": 2,
            "format": "mds",
            "compression": request.compression,
            "hashes": [SHARD_HASH],
            "size_limit": request.size_limit_bytes,
            "column_names": list(columns),
            "column_encodings": [encoding for encoding, _ in columns.values()],
            "column_sizes": sizes,
        }
        """The part of a shard's record in the index that is the same for all shards."""
        self.header = json.dumps(self.description, sort_keys=True).encode()

        # Compute how many samples fit. A shard has the number of samples, the offset of the end and the header, and for
        # each sample, an offset and its bytes.
        bytes_for_samples = request.size_limit_bytes - 2 * OFFSET_BYTES - len(self.header)
        self.samples_per_shard = bytes_for_samples // (self.sample_bytes + OFFSET_BYTES)

    def add_lengths(self, samples_nt: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return samples with both columns, as a structured array of n elements.

        samples_nt: n samples of t tokens, padding included.
        lengths: their lengths without padding.
        """
        sample_dtype = np.dtype([("tokens", self.dtype, self.sample_tokens), (UNPADDED_LENGTH, LENGTH_DTYPE)])
        samples = np.empty(len(lengths), sample_dtype)
        samples["tokens"] = samples_nt
        samples[UNPADDED_LENGTH] = lengths
        return samples

    def write(self, folder: Path, index: int, samples: np.ndarray) -> dict[str, Any]:
        """Write a shard into a folder, compressed if the request says so. Returns its record for the index.

        index: number of the shard in its split.
        samples: its samples: tokens [samples, tokens of a sample], or with padding what `add_lengths` returns.
        """
        # Lay out the content as the class describes it.
        num_samples = len(samples)
        first_offset = OFFSET_BYTES + OFFSET_BYTES * (num_samples + 1) + len(self.header)
        offsets = np.arange(num_samples + 1, dtype=np.uint32) * np.uint32(self.sample_bytes)
        offsets += np.uint32(first_offset)
        content = b"".join([np.uint32(num_samples).tobytes(), offsets.tobytes(), self.header, samples.tobytes()])

        # Compress it, and write the file. The index has sizes and hashes of both forms.
        raw_data = file_description(raw_name(index), content)
        zip_data = None
        if self.compression:
            content = compress(self.compression, content)
            zip_data = file_description(self.file_name(index), content)
        (folder / self.file_name(index)).write_bytes(content)
        return {"samples": num_samples, "raw_data": raw_data, "zip_data": zip_data} | self.description

    def file_name(self, index: int) -> str:
        """Return the name of a shard's file, such as `shard.00012.mds` or `shard.00012.mds.zstd`."""
        if not self.compression:
            return raw_name(index)
        algorithm, _, _ = self.compression.partition(":")
        return f"{raw_name(index)}.{algorithm}"


def raw_name(index: int) -> str:
    """Return the name of a shard that is not compressed."""
    return f"shard.{index:05}.mds"


def write_index(folder: Path, shards: Sequence[dict[str, Any]]) -> None:
    """Write the index of a split, whose shards have these records, and sync all files of the folder to disk."""
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    (folder / "index.json").write_text(index, encoding="utf-8")
    sync_folder(folder)


def file_description(name: str, content: bytes) -> dict[str, Any]:
    """Return the record of a shard's file for the index: its name, size and hash."""
    return {"basename": name, "bytes": len(content), "hashes": {SHARD_HASH: xxhash.xxh3_64_hexdigest(content)}}


def compress(compression: str, content: bytes) -> bytes:
    """Compress a shard to the same bytes as StreamingDataset does, with the same libraries.

    `compression` is an algorithm, alone or with a level, such as `zstd:9`. The default levels are StreamingDataset's.
    Libraries outside the standard library are imported only if they are needed.
    """
    name, _, level = compression.partition(":")
    match name:
        case "br":
            import brotli

            return brotli.compress(content, quality=int(level or 11))
        case "bz2":
            return bz2.compress(content, int(level or 9))
        case "gz":
            return gzip.compress(content, int(level or 9), mtime=0)
        case "snappy":
            import snappy

            return snappy.compress(content)
        case "zstd":
            import zstd

            return zstd.compress(content, int(level or 3))
    raise AssertionError(f"{compression}: PrepareRequest accepts no other")
