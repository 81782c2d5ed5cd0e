"""Step 2 of `data prepare`: token files, in order -> samples and shards.

Held-out documents, samples and MDS files depend on the token files alone. `pack` is the whole step: it asks
`choose_threshold` which documents are held out, and gives those of each split to a `SplitWriter`.
"""

import bz2
import gzip
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from rich.progress import Progress

from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync_folder
from llmfoundry_lite.prepare.documents import SKIP_REASONS
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import SPLITS, SplitSummary
from llmfoundry_lite.prepare.token_files import load_unit, token_dtype

SHARD_HASH = "xxh3_64"
"""Algorithm of the hash of every shard in index.json, by which readers find damage."""

MAX_TEXT_BYTES = 1_000_000
"""Approximate size of HELD_OUT_TEXT in bytes."""

OFFSET_BYTES = 4
"""Bytes of each offset in an MDS shard, and of its number of samples: uint32."""

MAX_NAMED = 20
"""Number of left-out documents that the summary names."""


class Packed(NamedTuple):
    """What `pack` has written, and what was left out."""

    splits: dict[str, SplitSummary]
    """Without a split that has no document."""
    skipped: dict[str, int]
    """Reason in SKIP_REASONS -> number of left-out documents."""
    named: list[str]
    """Sentences that name the first of them."""


def pack(partial: Path, num_units: int, request: PrepareRequest, tokenizer: Tokenizer, bars: Progress) -> Packed:
    """Cut the samples of both splits and write their shards into `.partial`.

    Raises DataError if the training split has less than one sample. After any error, neither split's folder is left.
    """
    paths = [partial / "units" / f"{number:08}.npz" for number in range(num_units)]
    threshold = choose_threshold(paths, request)
    skipped = np.zeros(len(SKIP_REASONS), np.int64)
    named: list[str] = []
    writers = {split: SplitWriter(partial / split, request, token_dtype(tokenizer)) for split in SPLITS}
    held_out_text = HeldOutText()
    task = bars.add_task("writing shards", total=num_units)
    try:
        for path in paths:
            unit = load_unit(path)
            skipped += unit.skipped
            named += unit.named.tolist()[: MAX_NAMED - len(named)]

            is_held_out = unit.doc_keys < threshold
            for split, is_of_split in (("train", ~is_held_out), ("val", is_held_out)):
                if not is_of_split.any():
                    continue
                tokens = unit.tokens[np.repeat(is_of_split, unit.doc_tokens)]
                num_documents = int(is_of_split.sum())
                text_bytes = int(unit.doc_bytes[is_of_split].sum())
                writers[split].add(tokens, num_documents, text_bytes)
                if split == "val":
                    held_out_text.add(tokens, unit.doc_tokens[is_of_split], tokenizer)
            bars.advance(task)

        counts: dict[str, int] = dict(zip(SKIP_REASONS, skipped.tolist(), strict=True))
        check_there_is_a_sample(request, writers["train"], counts)
        held_out_text.write(partial / "val" / HELD_OUT_TEXT)
        splits = {split: writer.finish() for split, writer in writers.items() if writer.documents}
        return Packed(splits, counts, named)
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise


class HeldOutText:
    """The first held-out documents as text, cut at MAX_TEXT_BYTES: a task for any model, whatever its tokenizer."""

    def __init__(self) -> None:
        """Begin without any text."""
        self.rows: list[str] = []
        """Lines of JSON, one for each document."""
        self.bytes_left = MAX_TEXT_BYTES

    def add(self, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> None:
        """Add documents that stand one after another in `tokens`. Each has one of `lengths`, the end of text included.

        The text is decoded from the tokens, because a token file does not keep it. Once MAX_TEXT_BYTES are reached,
        this does nothing.
        """
        begin = 0
        for length in lengths.tolist():
            if self.bytes_left <= 0:
                return
            document_tokens = tokens[begin : begin + length - 1]
            begin += length
            text = tokenizer.decode(document_tokens[:MAX_TEXT_BYTES].tolist())
            kept = text.encode()[: self.bytes_left].decode(errors="ignore")  # a character that is cut is dropped
            self.bytes_left -= len(kept.encode()) + 1
            self.rows.append(json.dumps({"text": kept}, ensure_ascii=False))

    def write(self, path: Path) -> None:
        """Write the texts as lines of JSON; no file without any."""
        if not self.rows:
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{row}\n" for row in self.rows), encoding="utf-8")


class SplitWriter:
    """Joins the documents of one split, cuts them into samples and writes MDS shards and their index.

    The files are byte for byte those of StreamingDataset's own writer, whose import takes seconds and most of a
    gigabyte. A shard consists of the number of samples, the offset of each and of the end (all uint32), a description
    in JSON, and the samples.
    """

    def __init__(self, folder: Path, request: PrepareRequest, dtype: np.dtype) -> None:
        """Remove what an earlier launch left in `folder`. `dtype` is the type of tokens in the shards."""
        self.folder = folder
        self.compression = request.compression
        self.length = request.max_seq_len
        self.sample_bytes = self.length * dtype.itemsize
        self.description = {
            "version": 2,
            "format": "mds",
            "compression": request.compression,
            "hashes": [SHARD_HASH],
            "size_limit": request.size_limit_bytes,
            "column_names": ["tokens"],
            "column_encodings": [f"ndarray:{dtype.name}:{self.length}"],
            "column_sizes": [self.sample_bytes],
        }
        """What all records of shards in the index have in common."""
        self.header = json.dumps(self.description, sort_keys=True).encode()
        # The size limit holds the number of samples, the end, the header, and for each sample its offset and bytes.
        bytes_for_samples = request.size_limit_bytes - 2 * OFFSET_BYTES - len(self.header)
        self.tokens_per_shard = bytes_for_samples // (self.sample_bytes + OFFSET_BYTES) * self.length
        self.waiting = [np.empty(0, dtype)]
        """Tokens that are not in a shard yet, in pieces; `num_waiting` together."""
        self.num_waiting = 0
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self.shards: list[dict[str, Any]] = []
        """Records of the shards that have been written, for the index."""
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append the tokens of whole documents, end-of-text tokens included, and write the shards that are full."""
        self.waiting.append(tokens)
        self.num_waiting += len(tokens)
        self.tokens += len(tokens)
        self.documents += documents
        self.text_bytes += text_bytes
        # StreamingDataset's writer ends a full shard when the next sample comes, so the last shard is never empty.
        enough_tokens = self.tokens_per_shard + self.length
        if self.num_waiting >= enough_tokens:
            joined = np.concatenate(self.waiting)
            while len(joined) >= enough_tokens:
                self.write_shard(joined[: self.tokens_per_shard])
                joined = joined[self.tokens_per_shard :]
            self.waiting = [joined]
            self.num_waiting = len(joined)

    def write_shard(self, tokens: np.ndarray) -> None:
        """Write the next shard, of the samples that `tokens` are, and compress it if the request says so."""
        num_samples = len(tokens) // self.length
        first_offset = OFFSET_BYTES + OFFSET_BYTES * (num_samples + 1) + len(self.header)
        offsets = np.arange(num_samples + 1, dtype=np.uint32) * np.uint32(self.sample_bytes)
        offsets += np.uint32(first_offset)
        content = b"".join([np.uint32(num_samples).tobytes(), offsets.tobytes(), self.header, tokens.tobytes()])

        name = f"shard.{len(self.shards):05}.mds"
        shard = {"samples": num_samples, "raw_data": file_description(name, content), "zip_data": None}
        if self.compression:
            algorithm, _, _ = self.compression.partition(":")
            name = f"{name}.{algorithm}"
            content = compress(self.compression, content)
            shard["zip_data"] = file_description(name, content)
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        self.shards.append(shard | self.description)

    def finish(self) -> SplitSummary:
        """Write the last shard and the index, and sync all files to disk.

        Tokens that do not fill a sample are dropped, and counted as `remainder_tokens`.
        """
        num_samples, remainder = divmod(self.tokens, self.length)
        joined = np.concatenate(self.waiting)
        if len(joined) > remainder:
            self.write_shard(joined[: len(joined) - remainder])
        self.folder.mkdir(exist_ok=True)
        index = json.dumps({"version": 2, "shards": self.shards}, sort_keys=True)
        (self.folder / "index.json").write_text(index, encoding="utf-8")
        sync_folder(self.folder)
        return SplitSummary(
            documents=self.documents,
            samples=num_samples,
            tokens=num_samples * self.length,
            remainder_tokens=remainder,
            text_bytes=self.text_bytes,
            shards=len(self.shards),
        )


def file_description(name: str, content: bytes) -> dict[str, Any]:
    """Describe a file of a shard as the index does."""
    return {"basename": name, "bytes": len(content), "hashes": {SHARD_HASH: xxhash.xxh3_64_hexdigest(content)}}


def compress(compression: str, content: bytes) -> bytes:
    """Compress to the same bytes as StreamingDataset, with the same libraries."""
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
    raise AssertionError(f"{compression}: PrepareRequest lets no other through")


# The validation split


def choose_threshold(paths: list[Path], request: PrepareRequest) -> np.uint64:
    """Choose the split key below which a document of these token files is held out for validation.

    That is the request's fraction of all keys, if both splits then have a sample. Otherwise more is held out until the
    validation split has one. Returns 0, which holds nothing out, if the data do not suffice for that.
    """
    threshold = threshold_of(request)
    if threshold == 0:
        return threshold
    one_sample = request.max_seq_len
    train_tokens = 0
    val_tokens = 0
    for path in paths:
        unit = load_unit(path, without_tokens=True)
        is_held_out = unit.doc_keys < threshold
        val_tokens += int(unit.doc_tokens[is_held_out].sum())
        train_tokens += int(unit.doc_tokens[~is_held_out].sum())
        if val_tokens >= one_sample and train_tokens >= one_sample:
            return threshold

    # A rare case of little data: one split has less than one sample. A split too small to use is no gain.
    if train_tokens < one_sample:
        return np.uint64(0)
    units = [load_unit(path, without_tokens=True) for path in paths]
    keys = np.concatenate([unit.doc_keys for unit in units])
    tokens = np.concatenate([unit.doc_tokens for unit in units])
    threshold = raise_threshold(threshold, keys, tokens, one_sample)
    has_sample = tokens[keys < threshold].sum() >= one_sample
    return threshold if has_sample else np.uint64(0)


def threshold_of(request: PrepareRequest) -> np.uint64:
    """Return the split key below which the validation fraction lies, since keys are uniform over 64 bits."""
    assert request.val_fraction is not None, "prepare fills in the source's own"
    return np.uint64(int(request.val_fraction * 2**64))


def raise_threshold(threshold: np.uint64, keys: np.ndarray, sizes: np.ndarray, at_least: int) -> np.uint64:
    """Raise the threshold, in the order of the keys, until `at_least` is held out, but never more than half of all.

    `keys` are the split keys of all documents, and `sizes` their tokens or bytes, in which `at_least` counts.
    """
    if not len(keys):
        return threshold
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    is_last_of_key = np.append(sorted_keys[1:] != sorted_keys[:-1], True)  # documents of one text have one key
    sizes_up_to_key = np.cumsum(sizes[order])[is_last_of_key]
    half_of_all = sizes.sum() / 2
    for key, size_up_to_key in zip(sorted_keys[is_last_of_key], sizes_up_to_key, strict=True):
        if key < threshold:
            continue
        is_enough = sizes[keys < threshold].sum() >= at_least
        would_be_too_much = size_up_to_key > half_of_all
        is_largest_key = key == 2**64 - 1  # no threshold lies above it
        if is_enough or would_be_too_much or is_largest_key:
            break
        threshold = np.uint64(key + np.uint64(1))
    return threshold


def check_there_is_a_sample(request: PrepareRequest, train: SplitWriter, skipped: dict[str, int]) -> None:
    """Raise DataError if the training split has less than one sample, with the reasons why documents were left out."""
    if train.tokens >= request.max_seq_len:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    raise DataError(
        f"{' '.join(request.sources)}: {train.documents} documents for training, {train.tokens} tokens in all, "
        f"which is less than one sample of --max-seq-len {request.max_seq_len}"
        + (f" (skipped: {reasons})" if reasons else "")
    )
