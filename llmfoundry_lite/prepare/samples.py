"""Step 2 of `data prepare`: token files, in order -> samples and shards.

Held-out documents, samples and MDS files depend on the token files alone.
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

MAX_NAMED = 20
"""Number of left-out documents that the summary names."""


def pack(
    partial: Path, num_units: int, request: PrepareRequest, tokenizer: Tokenizer, bars: Progress
) -> tuple[dict[str, SplitSummary], dict[str, int], list[str]]:
    """Cut the samples of both splits and write their shards into `.partial`.

    Returns the splits, the number of left-out documents by reason, and sentences that name the first of them.
    """
    paths = [partial / "units" / f"{number:08}.npz" for number in range(num_units)]
    threshold = choose_threshold(paths, request)
    skipped = np.zeros(len(SKIP_REASONS), np.int64)
    named: list[str] = []
    writers = {split: SplitWriter(partial / split, request, token_dtype(tokenizer)) for split in SPLITS}
    texts = HeldOutText()
    task = bars.add_task("writing shards", total=num_units)
    try:
        for path in paths:
            unit = load_unit(path)
            skipped += unit.skipped
            named += unit.named.tolist()[: MAX_NAMED - len(named)]
            held_out = unit.doc_keys < threshold
            for split, chosen in (("train", ~held_out), ("val", held_out)):
                if chosen.any():
                    tokens = unit.tokens[np.repeat(chosen, unit.doc_tokens)]
                    writers[split].add(tokens, int(chosen.sum()), int(unit.doc_bytes[chosen].sum()))
                    if split == "val":
                        texts.add(tokens, unit.doc_tokens[chosen], tokenizer)
            bars.advance(task)
        counts: dict[str, int] = dict(zip(SKIP_REASONS, skipped.tolist(), strict=True))
        check_there_is_a_sample(request, writers["train"], counts)
        texts.write(partial / "val" / HELD_OUT_TEXT)
        return {split: writer.finish() for split, writer in writers.items() if writer.documents}, counts, named
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise


class HeldOutText:
    """The first held-out documents as text, cut at MAX_TEXT_BYTES: a task for any model, whatever its tokenizer."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.room = MAX_TEXT_BYTES

    def add(self, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> None:
        """Add documents with `lengths` tokens, the last of which is the end of text."""
        for end, length in zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            if self.room <= 0:
                return
            text = tokenizer.decode(tokens[end - length : end - 1][:MAX_TEXT_BYTES].tolist())
            kept = text.encode()[: self.room].decode(errors="ignore")
            self.room -= len(kept.encode()) + 1
            self.rows.append(json.dumps({"text": kept}, ensure_ascii=False))

    def write(self, path: Path) -> None:
        if self.rows:
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(f"{row}\n" for row in self.rows), encoding="utf-8")


class SplitWriter:
    """Joins the documents of one split, cuts them into samples and writes MDS shards and their index.

    The files are byte for byte those of StreamingDataset's own writer, whose import takes seconds and most of a
    gigabyte. A shard consists of the number of samples, the offset of each and of the end (all uint32), a description
    in JSON, and the samples.
    """

    def __init__(self, folder: Path, request: PrepareRequest, dtype: np.dtype) -> None:
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
        self.header = json.dumps(self.description, sort_keys=True).encode()
        room = request.size_limit_bytes - 8 - len(self.header)
        self.tokens_per_shard = room // (self.sample_bytes + 4) * self.length
        self.waiting = [np.empty(0, dtype)]
        self.num_waiting = self.tokens = self.documents = self.text_bytes = 0
        self.shards: list[dict[str, Any]] = []
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append whole documents, end-of-text tokens included."""
        self.waiting.append(tokens)
        self.num_waiting += len(tokens)
        self.tokens += len(tokens)
        self.documents += documents
        self.text_bytes += text_bytes
        if self.num_waiting >= self.tokens_per_shard + self.length:  # a full shard is kept until the next sample
            joined = np.concatenate(self.waiting)
            while len(joined) >= self.tokens_per_shard + self.length:
                self.write_shard(joined[: self.tokens_per_shard])
                joined = joined[self.tokens_per_shard :]
            self.waiting, self.num_waiting = [joined], len(joined)

    def write_shard(self, tokens: np.ndarray) -> None:
        num_samples = len(tokens) // self.length
        offsets = np.arange(num_samples + 1, dtype=np.uint32) * np.uint32(self.sample_bytes)
        offsets += np.uint32(4 + 4 * (num_samples + 1) + len(self.header))
        content = b"".join([np.uint32(num_samples).tobytes(), offsets.tobytes(), self.header, tokens.tobytes()])
        name = f"shard.{len(self.shards):05}.mds"
        shard = {"samples": num_samples, "raw_data": file_description(name, content), "zip_data": None}
        if self.compression:
            name = f"{name}.{self.compression.partition(':')[0]}"
            content = compress(self.compression, content)
            shard["zip_data"] = file_description(name, content)
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        self.shards.append(shard | self.description)

    def finish(self) -> SplitSummary:
        """Write the last shard and the index, and sync all files to disk."""
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
    """Choose the split key below which a document of these token files is held out for validation."""
    threshold = threshold_of(request)
    if threshold == 0:
        return threshold
    enough = request.max_seq_len
    train_tokens = val_tokens = 0
    for path in paths:
        unit = load_unit(path, without_tokens=True)
        held_out = unit.doc_keys < threshold
        val_tokens += int(unit.doc_tokens[held_out].sum())
        train_tokens += int(unit.doc_tokens[~held_out].sum())
        if val_tokens >= enough and train_tokens >= enough:
            return threshold
    # A rare case of little data: one split has less than one sample. A split too small to use is no gain.
    if train_tokens < enough:
        return np.uint64(0)
    units = [load_unit(path, without_tokens=True) for path in paths]
    keys = np.concatenate([unit.doc_keys for unit in units])
    tokens = np.concatenate([unit.doc_tokens for unit in units])
    threshold = raise_threshold(threshold, keys, tokens, enough)
    return threshold if tokens[keys < threshold].sum() >= enough else np.uint64(0)


def threshold_of(request: PrepareRequest) -> np.uint64:
    """Return the split key below which the validation fraction lies, since keys are uniform over 64 bits."""
    assert request.val_fraction is not None, "prepare fills in the source's own"
    return np.uint64(int(request.val_fraction * 2**64))


def raise_threshold(threshold: np.uint64, keys: np.ndarray, sizes: np.ndarray, at_least: int) -> np.uint64:
    """Raise the threshold, in the order of the keys, until `at_least` is held out, but never more than half of all."""
    order = np.argsort(keys, kind="stable")
    last_of_key = np.append(keys[order][1:] != keys[order][:-1], True) if len(keys) else np.empty(0, bool)
    for key, held_out in zip(keys[order][last_of_key], np.cumsum(sizes[order])[last_of_key], strict=True):
        if key < threshold:
            continue
        if sizes[keys < threshold].sum() >= at_least or held_out > sizes.sum() / 2 or key == 2**64 - 1:
            break
        threshold = np.uint64(key + np.uint64(1))
    return threshold


def check_there_is_a_sample(request: PrepareRequest, train: SplitWriter, skipped: dict[str, int]) -> None:
    if train.tokens >= request.max_seq_len:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    raise DataError(
        f"{' '.join(request.sources)}: {train.documents} documents for training, {train.tokens} tokens in all, "
        f"which is less than one sample of --max-seq-len {request.max_seq_len}"
        + (f" (skipped: {reasons})" if reasons else "")
    )
