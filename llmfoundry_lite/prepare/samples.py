"""Step 2 of `data prepare`: token files, in order -> samples and shards.

Which documents are held out, the samples and the MDS files depend only on the token files. `plan_splits` computes which
tokens are in which shard, from the counts of the token files alone or, with `--pack best-fit`, from the lengths of
documents. By this plan, `write_shards` writes any of the shards, so that several machines can each write some.
`pack_samples` is the whole step on one machine. `splits.py` decides which documents are held out, `best_fit.py` which
documents share a sample, and `shards.py` writes a shard.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from llmfoundry_lite.config.data_schema import HELD_OUT_TEXT
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.best_fit import assign_samples, cut_documents, divide_into_windows, pack_documents
from llmfoundry_lite.prepare.documents import SKIP_REASONS
from llmfoundry_lite.prepare.request import BEST_FIT, PrepareRequest
from llmfoundry_lite.prepare.shards import ShardFormat, write_index
from llmfoundry_lite.prepare.splits import choose_threshold, initial_threshold
from llmfoundry_lite.prepare.summary import SPLITS, SplitSummary
from llmfoundry_lite.prepare.token_files import token_dtype
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import (
    COUNTS,
    UnitTable,
    count_splits,
    format_text_digest,
    is_of_split,
    load_documents,
    load_unit,
)

MAX_TEXT_BYTES = 1_000_000
"""Approximate limit of the file HELD_OUT_TEXT in bytes."""


class PackResult(NamedTuple):
    """The splits that `pack_samples` has written, and the documents that were skipped."""

    splits: dict[str, SplitSummary]
    """Split -> its summary, for splits with at least one document."""
    skipped: dict[str, int]
    """Reason in SKIP_REASONS -> number of skipped documents."""
    skipped_examples: list[str]
    """A sentence for each of the first skipped documents."""
    text_digest: str
    """Digest of the texts of all documents, see `token_unit.add_text_hashes`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitPlan:
    """Which tokens of which token files make the shards of a split."""

    split: str
    threshold: np.uint64
    """Threshold of split keys: documents with a key below it are in the validation split."""
    units: np.ndarray
    """Numbers of the units with documents of this split, in order: rows of `piece` and `unit`."""
    ends: np.ndarray
    """Number of tokens of the split up to the end of each of these units, so the last one is the number of all."""
    documents: int
    text_bytes: int
    sample_tokens: int
    samples_per_shard: int
    windows: "Windows | None" = None
    """The windows of units in which documents are packed by best fit. None if documents are concatenated."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the split, also of those at the end that are too few for a sample."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        if self.windows is not None:
            return int(self.windows.samples[-1])
        return self.tokens // self.sample_tokens

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens in all samples, without padding. If documents are concatenated, the others are dropped."""
        return min(self.tokens, self.num_samples * self.sample_tokens)

    @property
    def num_shards(self) -> int:
        """Number of shards. All but the last one are full."""
        return -(-self.num_samples // self.samples_per_shard)  # rounded up

    def samples_of_shard(self, index: int) -> int:
        """Return the number of samples in a shard."""
        return min(self.samples_per_shard, self.num_samples - index * self.samples_per_shard)

    def summary(self, units_folder: TokenFolder) -> SplitSummary:
        """Return the summary of the split. The token files in `units_folder` are read, without their tokens."""
        positions = self.num_samples * self.sample_tokens
        return SplitSummary(
            documents=self.documents,
            samples=self.num_samples,
            tokens=self.sampled_tokens,
            remainder_tokens=self.tokens - self.sampled_tokens,
            text_bytes=self.text_bytes,
            shards=self.num_shards,
            cut_fraction=count_cut_documents(self, units_folder) / self.documents,
            padding_fraction=(positions - self.sampled_tokens) / positions,
        )


class Windows(NamedTuple):
    """Groups of consecutive units whose documents share samples."""

    units: np.ndarray
    """Number of units up to the end of each window."""
    samples: np.ndarray
    """Number of samples up to the end of each window."""


def pack_samples(
    partial: Path, table: UnitTable, request: PrepareRequest, tokenizer: Tokenizer, bars: Progress
) -> PackResult:
    """Make samples of the tokens of all documents, and write the shards of both splits into `partial`.

    partial: the folder of work in progress, with the token files in its folder `units`.
    table: the counts of these token files.
    tokenizer: the one that made the tokens. It gives their type, and decodes the held-out text.

    The documents of a split are concatenated in the order of the token files, and cut into samples of
    `request.max_seq_len` tokens. With 4 tokens, the documents 5 6 7 0 and 8 9 0 and 1 2 0 make the samples 5 6 7 0 and
    8 9 0 1, and 2 0 is left over. With `request.pack` "best-fit", they are packed as `best_fit.py` describes.

    Raises DataError if the training split has less than one sample. After any error, the folders of both splits are
    removed.
    """
    units_folder = TokenFolder(partial / "units")
    shard_format = ShardFormat(request, token_dtype(tokenizer), tokenizer.eos_token_id)
    plans = plan_splits(table, units_folder, request, shard_format)
    task = bars.add_task("writing shards", total=sum(plan.num_shards for plan in plans))
    try:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)  # from an earlier launch
        for plan in plans:
            records = []
            folder = partial / plan.split
            for record in write_shards(plan, range(plan.num_shards), units_folder, folder, shard_format):
                records.append(record)
                bars.advance(task)
            finish_split(plan, records, units_folder, folder, tokenizer)
    except BaseException:
        for split in SPLITS:
            shutil.rmtree(partial / split, ignore_errors=True)
        raise
    return pack_result(plans, table, units_folder)


def pack_result(plans: Sequence[SplitPlan], table: UnitTable, units_folder: TokenFolder) -> PackResult:
    """Return the result of the step, by its plan and the counts of the token files in `units_folder`."""
    splits = {plan.split: plan.summary(units_folder) for plan in plans}
    text_digest = format_text_digest(table.text_hash)
    return PackResult(splits, skipped_by_reason(table), table.skipped_examples, text_digest)


def skipped_by_reason(table: UnitTable) -> dict[str, int]:
    """Return reason -> number of skipped documents."""
    return dict(zip(SKIP_REASONS, table.skipped.tolist(), strict=True))


# The plan


def plan_splits(
    table: UnitTable, units_folder: TokenFolder, request: PrepareRequest, shard_format: ShardFormat
) -> list[SplitPlan]:
    """Plan the shards of each split that has documents, by adding up the tokens of the units in order.

    table: the counts of all token files in `units_folder`, which are read, without their tokens, only if the validation
        split needs more documents than the request's fraction, or to pack documents by best fit.

    Raises DataError if the training split has less than one sample.
    """
    # Decide which documents are held out. If that is not what the table has counted, count again.
    rows = table.rows
    paths = units_folder.paths(rows, without_tokens=True)
    threshold = choose_threshold(int(rows["train_tokens"].sum()), int(rows["val_tokens"].sum()), paths, request)
    if threshold != initial_threshold(request):
        rows = count_again(rows, units_folder, threshold)

    plans = []
    for split in SPLITS:
        rows_of_split = rows[rows[f"{split}_documents"] > 0]
        plan = SplitPlan(
            split=split,
            threshold=threshold,
            units=rows_of_split[["piece", "unit"]],
            ends=np.cumsum(rows_of_split[f"{split}_tokens"]),
            documents=int(rows_of_split[f"{split}_documents"].sum()),
            text_bytes=int(rows_of_split[f"{split}_text_bytes"].sum()),
            sample_tokens=shard_format.sample_tokens,
            samples_per_shard=shard_format.samples_per_shard,
        )
        if split == "train":
            check_has_sample(request, plan, skipped_by_reason(table))
        if not plan.documents:
            continue
        if request.pack == BEST_FIT:
            plan = replace(plan, windows=plan_windows(plan, units_folder))
        plans.append(plan)
    return plans


def plan_windows(plan: SplitPlan, units_folder: TokenFolder) -> Windows:
    """Divide the units of a split into windows, and count the samples that best fit makes of each."""
    units = divide_into_windows(plan.ends, plan.sample_tokens)
    samples = []
    lengths = read_lengths(plan, units_folder)
    for num_units in np.diff(units, prepend=0).tolist():
        doc_tokens = np.concatenate(list(islice(lengths, num_units)))
        pieces = cut_documents(doc_tokens, plan.sample_tokens)
        sample_of_piece = assign_samples(pieces, plan.sample_tokens)
        samples.append(int(sample_of_piece.max()) + 1)
    return Windows(units, np.cumsum(samples))


def count_cut_documents(plan: SplitPlan, units_folder: TokenFolder) -> int:
    """Count the documents of a split that are not whole in one sample. Concatenated ones that are dropped do not count.

    With samples of 4 tokens, the concatenated documents 5 6 7 0 and 8 9 0 and 1 2 0 have one cut document, the last.
    """
    num_cut = 0
    start = 0
    for lengths in read_lengths(plan, units_folder):
        if plan.windows is not None:
            num_cut += int((lengths > plan.sample_tokens).sum())
            continue
        ends = start + np.cumsum(lengths)
        first_samples = (ends - lengths) // plan.sample_tokens
        last_samples = (ends - 1) // plan.sample_tokens
        num_cut += int((first_samples < last_samples).sum())
        start += int(lengths.sum())
    return num_cut


def read_lengths(plan: SplitPlan, units_folder: TokenFolder) -> Iterator[np.ndarray]:
    """Yield the number of tokens of each document of a split, for one unit after the other."""
    for path in units_folder.paths(plan.units, without_tokens=True):
        unit = load_unit(path, without_tokens=True)
        yield unit.doc_tokens[is_of_split(unit, plan.split, plan.threshold)]


def count_again(rows: np.ndarray, units_folder: TokenFolder, threshold: np.uint64) -> np.ndarray:
    """Return the rows of a table with the counts by another threshold, for which the token files are read."""
    columns = [f"{split}_{count}" for split in SPLITS for count in COUNTS]
    counted = rows.copy()
    for row, path in zip(counted, units_folder.paths(rows, without_tokens=True), strict=True):
        counts = count_splits(load_unit(path, without_tokens=True), threshold)
        for column, count in zip(columns, counts, strict=True):
            row[column] = count
    return counted


def check_has_sample(request: PrepareRequest, train: SplitPlan, skipped: dict[str, int]) -> None:
    """Raise DataError if the training split has less than one sample. The error counts skipped documents by reason."""
    if train.tokens >= request.max_seq_len:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
    raise DataError(
        f"{' '.join(request.sources)}: {train.documents} documents for training, {train.tokens} tokens in all, "
        f"which is less than one sample of --max-seq-len {request.max_seq_len}"
        + (f" (skipped: {reasons})" if reasons else "")
    )


# Writing


def write_shards(
    plan: SplitPlan, shards: range, units_folder: TokenFolder, folder: Path, shard_format: ShardFormat
) -> Iterator[dict[str, Any]]:
    """Write consecutive shards of a split, and yield the record of each for the index.

    shards: numbers of the shards; `range(plan.num_shards)` is all of them.
    folder: folder of the shards, which is created. Shards that are there are written again.

    Only the token files with tokens of these shards are read. At any time, the tokens of one shard and of one token
    file, or with best fit of one window, are in memory.
    """
    folder.mkdir(exist_ok=True)
    start = shards.start * plan.samples_per_shard
    end = min(shards.stop * plan.samples_per_shard, plan.num_samples)
    index = shards.start
    unwritten = []
    num_unwritten = 0
    read_samples = read_concatenated if plan.windows is None else read_packed
    for samples in read_samples(plan, units_folder, start, end, shard_format):
        unwritten.append(samples)
        num_unwritten += len(samples)

        # Arrays are joined only when there is enough for a shard, because joining copies all samples.
        if num_unwritten >= plan.samples_per_shard:
            joined = np.concatenate(unwritten)
            while len(joined) >= plan.samples_per_shard:
                yield shard_format.write(folder, index, joined[: plan.samples_per_shard])
                joined = joined[plan.samples_per_shard :]
                index += 1
            unwritten = [joined]
            num_unwritten = len(joined)

    # The last shard of a split may be smaller.
    if num_unwritten:
        yield shard_format.write(folder, index, np.concatenate(unwritten))


def read_concatenated(
    plan: SplitPlan, units_folder: TokenFolder, start: int, end: int, shard_format: ShardFormat
) -> Iterator[np.ndarray]:
    """Yield the samples [start, end) of a split whose documents are concatenated, as `ShardFormat.write` takes them."""
    incomplete = np.empty(0, shard_format.dtype)  # tokens that are too few for a sample
    first_token = start * plan.sample_tokens
    for tokens in read_tokens(plan, units_folder, first_token, end * plan.sample_tokens):
        joined = np.concatenate([incomplete, tokens])
        num_complete = len(joined) - len(joined) % plan.sample_tokens
        yield joined[:num_complete].reshape(-1, plan.sample_tokens)
        incomplete = joined[num_complete:]


def read_packed(
    plan: SplitPlan, units_folder: TokenFolder, start: int, end: int, shard_format: ShardFormat
) -> Iterator[np.ndarray]:
    """Yield the samples [start, end) of a split that is packed by best fit, as `ShardFormat.write` takes them."""
    windows = plan.windows
    assert windows is not None
    if start >= end:
        return
    first_window = int(np.searchsorted(windows.samples, start, side="right"))
    num_units = int(windows.units[first_window - 1]) if first_window else 0
    num_samples = int(windows.samples[first_window - 1]) if first_window else 0
    units = read_split(plan, units_folder, num_units)
    for window in range(first_window, len(windows.units)):
        # Read the units of the window, and pack their documents.
        units_of_window = list(islice(units, int(windows.units[window]) - num_units))
        num_units = int(windows.units[window])
        tokens = np.concatenate([tokens for tokens, _ in units_of_window])
        packing = pack_documents(np.concatenate([lengths for _, lengths in units_of_window]), plan.sample_tokens)
        samples_nt = packing.arrange(tokens, plan.sample_tokens, shard_format.padding)
        samples = shard_format.add_lengths(samples_nt, packing.sample_lengths)

        yield samples[max(0, start - num_samples) : end - num_samples]
        num_samples += len(samples)
        if num_samples >= end:
            return


def read_tokens(plan: SplitPlan, units_folder: TokenFolder, start: int, end: int) -> Iterator[np.ndarray]:
    """Yield the tokens [start, end) of a split, from one token file after the other."""
    if start >= end:
        return
    first = int(np.searchsorted(plan.ends, start, side="right"))
    unit_start = int(plan.ends[first - 1]) if first else 0
    for tokens, _ in read_split(plan, units_folder, first):
        yield tokens[max(0, start - unit_start) : end - unit_start]
        unit_start += len(tokens)
        if unit_start >= end:
            return


def read_split(plan: SplitPlan, units_folder: TokenFolder, first: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens of a split in each of its units, and the number of tokens of each document.

    first: position in `plan.units` of the unit to begin with.
    """
    sizes = np.diff(plan.ends, prepend=0)[first:]
    for path, size in zip(units_folder.paths(plan.units[first:]), sizes, strict=True):
        unit = load_unit(path, without_tokens=True)
        documents = is_of_split(unit, plan.split, plan.threshold)
        tokens = load_documents(path, unit.doc_tokens, documents) if documents.any() else np.empty(0, np.uint16)
        if len(tokens) != size:
            raise DataError(
                f"{path} has {len(tokens)} tokens of the split {plan.split}, expected {size}, so it has changed since "
                "they were counted; remove it and run the command that tokenises again, which makes it anew"
            )
        yield tokens, unit.doc_tokens[documents]


def finish_split(
    plan: SplitPlan, records: Sequence[dict[str, Any]], units_folder: TokenFolder, folder: Path, tokenizer: Tokenizer
) -> None:
    """Write what a split has beside its shards: the index and, of the validation split, documents as text.

    `records` are those of all shards. All files of the folder are synced to disk.
    """
    if plan.split == "val":
        write_held_out_text(plan, units_folder, folder / HELD_OUT_TEXT, tokenizer)
    write_index(folder, records)


def write_held_out_text(plan: SplitPlan, units_folder: TokenFolder, path: Path, tokenizer: Tokenizer) -> None:
    """Write the first documents of the validation split as text, up to MAX_TEXT_BYTES."""
    held_out_text = HeldOutText()
    for tokens, lengths in read_split(plan, units_folder):
        held_out_text.add(tokens, lengths, tokenizer)
        if held_out_text.bytes_left <= 0:
            break
    held_out_text.write(path)


class HeldOutText:
    """The first held-out documents as text, to evaluate models with any tokenizer. At most MAX_TEXT_BYTES."""

    def __init__(self) -> None:
        """Start without documents."""
        self.rows: list[str] = []
        """Lines of JSON, one for each document."""
        self.bytes_left = MAX_TEXT_BYTES

    def add(self, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Tokenizer) -> None:
        """Decode documents and add their texts, until MAX_TEXT_BYTES are reached. The last text may be cut.

        tokens: the concatenated documents.
        lengths: the number of tokens of each document, with its end-of-text token, which is not decoded.

        Texts are decoded because token files do not contain them. Adds to `rows`, and reduces `bytes_left`.
        """
        start = 0
        for length in lengths.tolist():
            if self.bytes_left <= 0:
                return
            document_tokens = tokens[start : start + length - 1]
            start += length

            # Only as many tokens are decoded as could be needed if each were a single byte.
            text = tokenizer.decode(document_tokens[:MAX_TEXT_BYTES].tolist())
            kept_text = text.encode()[: self.bytes_left].decode(errors="ignore")  # without half a character
            self.bytes_left -= len(kept_text.encode()) + 1  # and a line end
            self.rows.append(json.dumps({"text": kept_text}, ensure_ascii=False))

    def write(self, path: Path) -> None:
        """Write the texts as lines of JSON. If there is none, no file is written."""
        if not self.rows:
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{row}\n" for row in self.rows), encoding="utf-8")
