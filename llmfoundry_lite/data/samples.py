"""Step 2 of `data prepare`: token files, in order, to samples and shards.

Owns which documents are held out for validation, the cutting of samples, and the MDS that holds them. It all depends on
the token files alone.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from llmfoundry_lite.data.documents import SKIP_REASONS
from llmfoundry_lite.data.request import Request
from llmfoundry_lite.data.summary import SPLITS, SplitSummary
from llmfoundry_lite.data.token_files import load_unit
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync_folder

SHARD_HASH = "xxh3_64"
"""Of every shard, kept in its index.json: readers find damage by it."""


def pack(
    partial: Path, num_units: int, request: Request, dtype: np.dtype, bars: Progress
) -> tuple[dict[str, SplitSummary], dict[str, int]]:
    """Cut the samples of both splits and write their shards into `.partial`. Returns splits and skipped counts."""
    units_folder = partial / "units"
    threshold = choose_threshold(units_folder, num_units, request)
    skipped = np.zeros(len(SKIP_REASONS), np.int64)
    writers = {split: SplitWriter(partial / split, request, dtype) for split in SPLITS}
    task = bars.add_task("writing shards", total=num_units)
    try:
        for number in range(num_units):
            unit = load_unit(units_folder, number)
            skipped += unit.skipped
            held_out = unit.doc_keys < threshold
            for split, chosen in (("train", ~held_out), ("val", held_out)):
                if chosen.any():
                    tokens = unit.tokens[np.repeat(chosen, unit.doc_tokens)]
                    writers[split].add(tokens, int(chosen.sum()), int(unit.doc_bytes[chosen].sum()))
            bars.advance(task)
        counts: dict[str, int] = dict(zip(SKIP_REASONS, skipped.tolist(), strict=True))
        check_there_is_a_sample(request, writers["train"], counts)
        return {split: writer.finish() for split, writer in writers.items() if writer.documents}, counts
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise


class SplitWriter:
    """Joins the documents of one split and cuts them into samples; the shards appear in `folder`."""

    def __init__(self, folder: Path, request: Request, dtype: np.dtype) -> None:
        self.folder = folder
        self.request = request
        self.dtype = dtype
        self.rest = np.empty(0, dtype)
        self.documents = self.samples = self.text_bytes = 0
        self.writer: Any = None

    def add(self, tokens: np.ndarray, documents: int, text_bytes: int) -> None:
        """Append whole documents, end-of-text tokens included."""
        length = self.request.max_seq_len
        joined = np.concatenate([self.rest, tokens])
        whole = len(joined) // length * length
        for sample in joined[:whole].reshape(-1, length):
            self.open().write({"tokens": sample})
        self.rest = joined[whole:]
        self.samples += whole // length
        self.documents += documents
        self.text_bytes += text_bytes

    def open(self) -> Any:
        """The MDS writer, made for the first sample."""
        if self.writer is None:
            from streaming import MDSWriter  # takes seconds, for it brings torch and transformers along

            shutil.rmtree(self.folder, ignore_errors=True)
            self.writer = MDSWriter(
                columns={"tokens": f"ndarray:{self.dtype.name}:{self.request.max_seq_len}"},
                out=str(self.folder),
                compression=self.request.compression,
                hashes=[SHARD_HASH],
                size_limit=self.request.size_limit_bytes,
            )
        return self.writer

    def finish(self) -> SplitSummary:
        """Write the last shard and the index, and make sure that all of it is on disk."""
        self.open().finish()
        sync_folder(self.folder)
        return SplitSummary(
            documents=self.documents,
            samples=self.samples,
            tokens=self.samples * self.request.max_seq_len,
            remainder_tokens=len(self.rest),
            text_bytes=self.text_bytes,
            shards=len(self.writer.shards),
        )


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
