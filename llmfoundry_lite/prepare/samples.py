"""Step 2 of `data prepare`: token files, in order, to samples and shards.

Owns which documents are held out for validation, the cutting of samples, and the MDS that holds them. It all depends on
the token files alone.
"""

import bz2
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.progress import Progress

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync_folder
from llmfoundry_lite.prepare.request import Request
from llmfoundry_lite.prepare.summary import SPLITS, SplitSummary
from llmfoundry_lite.prepare.token_files import load_unit
from llmfoundry_lite.prepare.units import SKIP_REASONS

SHARD_HASH = "xxh3_64"
"""Of every shard, kept in its index.json: readers find damage by it."""

MOST_NAMED = 20
"""Documents left out that the summary names."""


def pack(
    partial: Path, num_units: int, request: Request, dtype: np.dtype, bars: Progress
) -> tuple[dict[str, SplitSummary], dict[str, int], list[str]]:
    """Cut the samples of both splits and write their shards into `.partial`.

    Returns the splits, the documents left out by reason, and sentences that name the first of them.
    """
    units_folder = partial / "units"
    threshold = choose_threshold(units_folder, num_units, request)
    skipped = np.zeros(len(SKIP_REASONS), np.int64)
    named: list[str] = []
    writers = {split: SplitWriter(partial / split, request, dtype) for split in SPLITS}
    task = bars.add_task("writing shards", total=num_units)
    try:
        for number in range(num_units):
            unit = load_unit(units_folder, number)
            skipped += unit.skipped
            named += unit.named.tolist()[: MOST_NAMED - len(named)]
            held_out = unit.doc_keys < threshold
            for split, chosen in (("train", ~held_out), ("val", held_out)):
                if chosen.any():
                    tokens = unit.tokens[np.repeat(chosen, unit.doc_tokens)]
                    writers[split].add(tokens, int(chosen.sum()), int(unit.doc_bytes[chosen].sum()))
            bars.advance(task)
        counts: dict[str, int] = dict(zip(SKIP_REASONS, skipped.tolist(), strict=True))
        check_there_is_a_sample(request, writers["train"], counts)
        return {split: writer.finish() for split, writer in writers.items() if writer.documents}, counts, named
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise


class SplitWriter:
    """Joins the documents of one split and cuts them into samples; the shards appear in `folder`."""

    def __init__(self, folder: Path, request: Request, dtype: np.dtype) -> None:
        self.request = request
        self.dtype = dtype
        self.rest = np.empty(0, dtype)
        self.documents = self.samples = self.text_bytes = 0
        self.shards = ShardWriter(folder, request, dtype)

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append whole documents, end-of-text tokens included."""
        length = self.request.max_seq_len
        joined = np.concatenate([self.rest, tokens])
        whole = len(joined) // length * length
        self.shards.write(joined[:whole].reshape(-1, length))
        self.rest = joined[whole:]
        self.samples += whole // length
        self.documents += documents
        self.text_bytes += text_bytes

    def finish(self) -> SplitSummary:
        """Write the last shard and the index, and make sure that all of it is on disk."""
        return SplitSummary(
            documents=self.documents,
            samples=self.samples,
            tokens=self.samples * self.request.max_seq_len,
            remainder_tokens=len(self.rest),
            text_bytes=self.text_bytes,
            shards=self.shards.finish(),
        )


class ShardWriter:
    """Samples of one length to MDS shards and their index, byte for byte as StreamingDataset's own writer makes them.

    Written here because importing that writer takes seconds and most of a gigabyte. A shard is the number of samples,
    the offset of each and of the end (all uint32), its description as JSON, and the samples.
    """

    def __init__(self, folder: Path, request: Request, dtype: np.dtype) -> None:
        sample_bytes = request.max_seq_len * dtype.itemsize
        self.folder = folder
        self.compression = request.compression
        self.description = {
            "version": 2,
            "format": "mds",
            "compression": request.compression,
            "hashes": [SHARD_HASH],
            "size_limit": request.size_limit_bytes,
            "column_names": ["tokens"],
            "column_encodings": [f"ndarray:{dtype.name}:{request.max_seq_len}"],
            "column_sizes": [sample_bytes],
        }
        self.header = json.dumps(self.description, sort_keys=True).encode()
        self.sample_bytes = sample_bytes
        self.samples_per_shard = (request.size_limit_bytes - 8 - len(self.header)) // (sample_bytes + 4)
        self.waiting: list[np.ndarray] = []
        self.num_waiting = 0
        self.shards: list[dict[str, Any]] = []
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, samples: np.ndarray) -> None:
        """Append samples: one row each."""
        while self.num_waiting + len(samples) > self.samples_per_shard:  # a full shard waits for the next sample
            room = self.samples_per_shard - self.num_waiting
            self.keep(samples[:room])
            samples = samples[room:]
            self.flush()
        self.keep(samples)

    def keep(self, samples: np.ndarray) -> None:
        self.waiting.append(samples)
        self.num_waiting += len(samples)

    def flush(self) -> None:
        """Write the shard of the samples that wait."""
        num_samples = self.num_waiting
        offsets = np.arange(num_samples + 1, dtype=np.uint32) * np.uint32(self.sample_bytes)
        offsets += np.uint32(4 + 4 * (num_samples + 1) + len(self.header))
        content = b"".join(
            [np.uint32(num_samples).tobytes(), offsets.tobytes(), self.header, *(part.data for part in self.waiting)]
        )
        self.waiting, self.num_waiting = [], 0
        name = f"shard.{len(self.shards):05}.mds"
        shard = {"samples": num_samples, "raw_data": file_description(name, content), "zip_data": None}
        if self.compression:
            name = f"{name}.{self.compression.partition(':')[0]}"
            content = compress(self.compression, content)
            shard["zip_data"] = file_description(name, content)
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        self.shards.append(shard | self.description)

    def finish(self) -> int:
        """Write the last shard and the index, all of it to disk. Returns the number of shards."""
        if self.num_waiting:
            self.flush()
        self.folder.mkdir(exist_ok=True)
        index = json.dumps({"version": 2, "shards": self.shards}, sort_keys=True)
        (self.folder / "index.json").write_text(index, encoding="utf-8")
        sync_folder(self.folder)
        return len(self.shards)


def file_description(name: str, content: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(content), "hashes": {SHARD_HASH: xxhash.xxh3_64_hexdigest(content)}}


def compress(compression: str, content: bytes) -> bytes:
    """As StreamingDataset does, by the same libraries, so to the same bytes."""
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
    raise AssertionError(f"{compression}: Request lets no other through")


def choose_threshold(units_folder: Path, num_units: int, request: Request) -> np.uint64:
    """The split key below which a document is held out for validation."""
    threshold = threshold_of(request)
    if threshold == 0:
        return threshold
    enough = request.max_seq_len
    train_tokens = val_tokens = 0
    for number in range(num_units):
        unit = load_unit(units_folder, number, without_tokens=True)
        held_out = unit.doc_keys < threshold
        val_tokens += int(unit.doc_tokens[held_out].sum())
        train_tokens += int(unit.doc_tokens[~held_out].sum())
        if val_tokens >= enough and train_tokens >= enough:
            return threshold
    # Rare and small: one of the splits has less than one sample. Nothing is gained by a split too small to use.
    units = [load_unit(units_folder, number, without_tokens=True) for number in range(num_units)]
    if train_tokens < enough or not units:
        return np.uint64(0)
    keys = np.concatenate([unit.doc_keys for unit in units])
    tokens = np.concatenate([unit.doc_tokens for unit in units])
    threshold = raise_threshold(threshold, keys, tokens, enough)
    return threshold if tokens[keys < threshold].sum() >= enough else np.uint64(0)


def threshold_of(request: Request) -> np.uint64:
    """Split keys are uniform over 64 bits, so the share of them below this is the validation fraction."""
    assert request.val_fraction is not None, "prepare fills in the source's own"
    return np.uint64(int(request.val_fraction * 2**64))


def raise_threshold(threshold: np.uint64, keys: np.ndarray, sizes: np.ndarray, at_least: int) -> np.uint64:
    """Hold out more, in the order of the keys, until `at_least` is held out, but never more than half of all."""
    order = np.argsort(keys, kind="stable")
    last_of_key = np.append(keys[order][1:] != keys[order][:-1], True) if len(keys) else np.empty(0, bool)
    for key, held_out in zip(keys[order][last_of_key], np.cumsum(sizes[order])[last_of_key], strict=True):
        if key < threshold:
            continue
        if sizes[keys < threshold].sum() >= at_least or held_out > sizes.sum() / 2 or key == 2**64 - 1:
            break
        threshold = np.uint64(key + np.uint64(1))
    return threshold


def check_there_is_a_sample(request: Request, train: SplitWriter, skipped: dict[str, int]) -> None:
    if train.samples:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    raise DataError(
        f"{' '.join(request.sources)}: {train.documents} documents for training, {len(train.rest)} tokens in all, "
        f"which is less than one sample of --max-seq-len {request.max_seq_len}"
        + (f" (skipped: {reasons})" if reasons else "")
    )
