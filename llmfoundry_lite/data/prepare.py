"""Text to tokens to MDS shards: what `llmfoundry-lite data prepare` does.

Owns tokenising in parallel, the split into training and validation, packing into samples of fixed length, and
carrying on after a kill. Leaves to `sources.py` where documents come from, and to `text.py` how samples are read.

    OUT/train, OUT/val     MDS: one column `tokens`, `ndarray:uint16:N` (uint32 for vocabularies above 65,536)
    OUT/tokenizer          the tokenizer, in Hugging Face layout
    OUT/summary.json       a `Summary`; written last, so where it is, the rest is whole
    OUT/.partial           work in progress: what was asked for, the tokenizer, one file of tokens per unit

It works in two steps. First each unit of the source becomes a file of tokens, in any order, by any worker; a unit
whose file is there is never done again. Then one pass over those files, in order, cuts samples and writes shards.
Everything after the first step depends on the files alone, so neither the number of workers nor a kill at any
moment changes a byte of the result. The price is disk: the tokens are there twice until the end.

A document is its tokens followed by the end-of-text token; samples are cut from the documents joined in the
source's order. Nothing is dropped but the last piece of each split that does not fill a sample, and that is counted.

The column has a fixed shape because every sample has the same length: MDS then stores neither size nor shape with
each sample, and an LLM Foundry loader reads it like any other array of tokens.
"""

import contextlib
import errno
import fcntl
import importlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from llmfoundry_lite.data.documents import SKIP_REASONS, Document, Unit, read_documents
from llmfoundry_lite.data.sources import Source, open_source
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically

FORMAT_VERSION = 1
TRAIN_PREFIX = "train:"
SPLITS = ("train", "val")
PARTIAL = ".partial"
SUMMARY_FILE = "summary.json"
SHARD_HASH = "xxh3_64"
"""Of every shard, kept in its index.json: StreamingDataset finds damage when given `validate_hash`."""
COMPRESSION_LEVELS = {"br": range(12), "bz2": range(1, 10), "gz": range(10), "snappy": range(0), "zstd": range(1, 23)}
"""What StreamingDataset knows, as of 0.13; importing it to ask takes seconds, and to fail must not."""

ENCODE_BATCH_BYTES = 512 * 1024
TOKENIZER_SAMPLE_BYTES = 128 * 1024 * 1024
"""A tokenizer is trained on at most this much text, taken evenly from the source."""
RESERVED_BYTES_PER_TOKEN = 32
"""More than any tokenizer packs into a token on average; see `sample_for_training`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to prepare: everything that decides the result, nothing else. Raises DataError for what cannot be."""

    sources: tuple[str, ...]
    """`python-stdlib`, `hf:NAME[:CONFIG]`, or files, folders and globs; see `sources.open_source`."""
    tokenizer: str
    """A local folder, a Hub name, or `train:VOCAB_SIZE`."""
    max_seq_len: int
    """Tokens in a sample."""
    text_key: str = "text"
    """The field of a JSON object, or the column of a table, that holds the document."""
    split: str = "train"
    """The split of a Hub data set to read; means nothing elsewhere."""
    on_error: str = "stop"
    """At a document that cannot be read: `stop`, or `skip` and count it."""
    val_fraction: float | None = None
    """Share of the documents (modules, for the standard library) held out; None is 0.05 for the standard library and
    0.005 elsewhere. Raised until there is one validation sample, if the data allow that; 0 holds out nothing."""
    size_limit_bytes: int = 64 * 1024 * 1024
    """Of a shard, before compression."""
    compression: str | None = None
    """Of the shards, as StreamingDataset names it: `zstd`, `zstd:9`, `gz`, …"""

    def __post_init__(self) -> None:
        if self.max_seq_len < 1:
            raise DataError(f"--max-seq-len {self.max_seq_len}: expected a number of tokens, at least 1")
        if self.on_error not in ("stop", "skip"):
            raise DataError(f"--on-error {self.on_error}: expected stop or skip")
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise DataError(f"--val-fraction {self.val_fraction}: expected a fraction, at least 0 and below 1")
        smallest = 4096 + 8 * self.max_seq_len
        if not smallest <= self.size_limit_bytes < 2**32:
            raise DataError(
                f"--size-limit {self.size_limit_bytes} bytes: expected at least {smallest} (one sample of "
                f"{self.max_seq_len} tokens) and less than 4 GiB (what MDS can address)"
            )
        check_compression(self.compression)
        if self.tokenizer.startswith(TRAIN_PREFIX) and not self.tokenizer.removeprefix(TRAIN_PREFIX).isdecimal():
            raise DataError(f"--tokenizer {self.tokenizer}: expected train:VOCAB_SIZE, for example train:4096")


def check_compression(compression: str | None) -> None:
    if compression is None:
        return
    names = set(COMPRESSION_LEVELS)
    names |= {f"{name}:{level}" for name, levels in COMPRESSION_LEVELS.items() for level in levels}
    if compression not in names:
        known = ", ".join(
            f"{name}, {name}:{levels[0]} to {name}:{levels[-1]}" if levels else name
            for name, levels in COMPRESSION_LEVELS.items()
        )
        raise DataError(f"--compression {compression}: expected one of {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSummary:
    """One split. Tokens include the end-of-text token of each document."""

    documents: int
    samples: int
    """Each of `max_seq_len` tokens."""
    tokens: int
    """In samples."""
    remainder_tokens: int
    """The last ones, too few to fill a sample: the only tokens of the documents that are not in the shards."""
    text_bytes: int
    """UTF-8 bytes of the documents, which became `tokens + remainder_tokens` tokens."""
    shards: int

    @property
    def tokens_per_byte(self) -> float:
        """Turns a loss in nats per token into bits per byte: `loss / ln 2 * tokens_per_byte`."""
        return (self.tokens + self.remainder_tokens) / self.text_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSummary:
    """The tokenizer that made the tokens."""

    name: str
    """As given to `--tokenizer`."""
    fingerprint: str
    vocab_size: int
    """The largest id plus one; a trained tokenizer may have fewer than were asked for."""
    eos_token_id: int
    eos_token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What `summary.json` holds; `load_summary` reads it."""

    format_version: int
    request: dict[str, Any]
    """The `Request`, the state of its input, the tokenizer's fingerprint: the same again is no work."""
    max_seq_len: int
    token_dtype: str
    """`uint16` or `uint32`."""
    tokenizer: TokenizerSummary
    splits: dict[str, SplitSummary]
    """`train`, and `val` unless nothing could be held out."""
    skipped: dict[str, int]
    """Documents left out, by reason: `empty`, `invalid_utf8`, `invalid_json`, `missing_text_key`, `not_text`."""
    ignored_files: int
    """Files in the folders given that are of no kind we read."""
    seconds: float
    """Of the launch that finished the work; the two rates, too, leave out what earlier launches had done."""
    documents_per_second: float
    text_bytes_per_second: float


def prepare(
    request: Request,
    out: str | Path,
    *,
    num_workers: int | None = None,
    overwrite: bool = False,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Tokenise documents into samples and write them as MDS; carry on where a killed launch stopped.

    `num_workers` processes, by default one per core this process may use (a script that calls this needs the usual
    `if __name__ == "__main__":` unless it is 1). `overwrite` discards what an earlier preparation left in `out`.
    `notify` gets a sentence when work is skipped or taken up again. Raises DataError for everything that is wrong
    with input, request or disk, and then `out` holds nothing that looks finished.
    """
    started = time.monotonic()
    out = Path(out).expanduser()
    source = open_source(request.sources, text_key=request.text_key, split=request.split)
    if request.val_fraction is None:
        request = replace(request, val_fraction=source.val_fraction)
    given = None if request.tokenizer.startswith(TRAIN_PREFIX) else load_tokenizer(request.tokenizer)
    record = record_of(request, source, given)

    with clear_disk_errors(out), only_preparation_in(out):
        if overwrite:
            discard(out)
        finished = find_finished(out, record)
        if finished:
            notify(f"{out} is complete: the same preparation finished there before")
            return finished
        partial = open_partial(out, record, notify)
        with progress_bars(show_progress) as bars:
            tokenizer = provide_tokenizer(partial, given, request, source, bars)
            work = tokenize(source, request, tokenizer, partial, num_workers or usable_cores(), bars)
            splits, skipped = pack(partial, work.num_units, request, token_dtype(tokenizer), bars)
        seconds = time.monotonic() - started
        summary = Summary(
            format_version=FORMAT_VERSION,
            request=record,
            max_seq_len=request.max_seq_len,
            token_dtype=token_dtype(tokenizer).name,
            tokenizer=TokenizerSummary(
                name=request.tokenizer,
                fingerprint=tokenizer.fingerprint,
                vocab_size=tokenizer.vocab_size,
                eos_token_id=tokenizer.eos_token_id,
                eos_token=tokenizer.eos_token,
            ),
            splits=splits,
            skipped=skipped,
            ignored_files=source.num_ignored_files,
            seconds=round(seconds, 3),
            documents_per_second=round(work.documents / seconds, 1),
            text_bytes_per_second=round(work.text_bytes / seconds, 1),
        )
        publish(partial, out, summary)
    return summary


def load_summary(folder: str | Path) -> Summary:
    """Read `summary.json` of a prepared folder. Raises DataError when it is missing or not one of ours."""
    path = Path(folder) / SUMMARY_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["tokenizer"] = TokenizerSummary(**content["tokenizer"])
        content["splits"] = {split: SplitSummary(**counts) for split, counts in content["splits"].items()}
        return Summary(**content)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: nothing was prepared in {folder}, or not to the end") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a summary that this version of `data prepare` wrote ({error})") from error


def print_summary(summary: Summary, out: str | Path, console: Console | None = None) -> None:
    """The short table a preparation ends with."""
    table = Table(title=f"prepared in {out}", title_justify="left")
    table.add_column("split")
    for name in ("documents", "samples", "tokens", "left over", "text", "shards"):
        table.add_column(name, justify="right")
    for name, split in summary.splits.items():
        counts = (split.documents, split.samples, split.tokens, split.remainder_tokens)
        table.add_row(name, *(f"{count:,}" for count in counts), f"{split.text_bytes / 1e6:.2f} MB", f"{split.shards}")
    tokenizer = summary.tokenizer
    console = console or Console()
    console.print(table)
    lines = [f"tokenizer {tokenizer.name}: {tokenizer.vocab_size:,} ids, {tokenizer.fingerprint}"]
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items() if count)
    if skipped:
        lines.append(f"documents skipped: {skipped}")
    if summary.ignored_files:
        lines.append(f"files ignored, being of no kind we read: {summary.ignored_files:,}")
    if "val" not in summary.splits:
        lines.append("no validation split: none was asked for, or too little text to hold out a sample")
    lines.append(
        f"{summary.seconds:.1f} s, {summary.documents_per_second:,.0f} documents/s, "
        f"{summary.text_bytes_per_second / 1e6:.2f} MB/s"
    )
    for line in lines:
        console.print(line, highlight=False, markup=False)


# Step 0: the tokenizer


def provide_tokenizer(
    partial: Path, given: Tokenizer | None, request: Request, source: Source, bars: Progress
) -> Tokenizer:
    """The tokenizer in `.partial/tokenizer`: left by an earlier launch, or the one given, or trained now."""
    folder = partial / "tokenizer"
    if not folder.is_dir():
        tokenizer = given
        if tokenizer is None:
            bars.add_task("training the tokenizer", total=None)
            sample = sample_for_training(source, request)
            tokenizer = train_tokenizer(sample, int(request.tokenizer.removeprefix(TRAIN_PREFIX)))
            bars.remove_task(bars.task_ids[-1])
        unfinished = partial / "tokenizer.unfinished"
        tokenizer.save(unfinished)
        sync_folder(unfinished)
        unfinished.rename(folder)
    return load_tokenizer(folder)


def sample_for_training(source: Source, request: Request) -> list[str]:
    """Documents of the training split to train a tokenizer on, at most TOKENIZER_SAMPLE_BYTES of them.

    Of a source whose size is known, every n-th unit; of a stream, the beginning. When the validation fraction alone
    would not give one sample, `choose_threshold` will take the documents with the next lowest split keys, but only
    after tokenising; so enough of those stay out of the training sample here, by a safe guess at tokens per byte.
    """
    step = max(1, -(-(source.total_bytes or 0) // TOKENIZER_SAMPLE_BYTES))
    documents: list[Document] = []
    num_bytes = 0
    for unit in itertools.islice(source.units(), 0, None, step):
        for document in read_documents(unit, text_key=request.text_key, on_error=request.on_error, skipped=Counter()):
            documents.append(document)
            num_bytes += document.num_bytes
        if num_bytes >= TOKENIZER_SAMPLE_BYTES:
            break
    if not documents:
        raise DataError(f"{' '.join(request.sources)}: no document to train a tokenizer on")
    keys = np.array([document.split_key for document in documents], np.uint64)
    sizes = np.array([document.num_bytes for document in documents], np.int64)
    threshold = threshold_of(request)
    if threshold > 0:
        threshold = raise_threshold(threshold, keys, sizes, request.max_seq_len * RESERVED_BYTES_PER_TOKEN)
    return [document.text for document, held_out in zip(documents, keys < threshold, strict=True) if not held_out]


# Step 1: units of text to files of tokens, by any worker in any order


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUnit:
    """The tokens of one unit of text: what lies in `.partial/units/NNNNNNNN.npz`."""

    tokens: np.ndarray = field(repr=False)
    """Of all documents, each followed by the end-of-text token."""
    doc_tokens: np.ndarray
    """Tokens of each document, its end-of-text token included; int64."""
    doc_bytes: np.ndarray
    """UTF-8 bytes of each document; int64."""
    doc_keys: np.ndarray
    """The split key of each document; uint64."""
    skipped: np.ndarray
    """Documents left out, in the order of SKIP_REASONS; int64."""


@dataclass(kw_only=True, slots=True)
class Work:
    """What the tokenising step did in this launch."""

    num_units: int = 0
    """Of the whole source, those of earlier launches included."""
    documents: int = 0
    text_bytes: int = 0


def tokenize(
    source: Source, request: Request, tokenizer: Tokenizer, partial: Path, num_workers: int, bars: Progress
) -> Work:
    """Make the missing token files. On an error the one of the first unit that fails is raised."""
    work = Work()
    units_folder = partial / "units"
    done = {path.name for path in units_folder.glob("*.npz")}
    total = source.total_bytes
    task = bars.add_task("tokenising", total=total)

    def missing_units() -> Iterator[tuple[int, Unit]]:
        nonlocal total
        for number, unit in enumerate(source.units()):
            work.num_units = number + 1
            if unit_path(units_folder, number).name not in done:
                yield number, unit
            elif total is not None:  # shrink the work rather than advance, or the ETA believes the old speed
                total -= unit.num_bytes
                bars.update(task, total=total)

    def finished(unit: Unit, documents: int, text_bytes: int) -> None:
        work.documents += documents
        work.text_bytes += text_bytes
        bars.advance(task, unit.num_bytes)

    if num_workers == 1:
        with one_thread_per_process():
            for number, unit in missing_units():
                finished(unit, *tokenize_unit(tokenizer, request, units_folder, number, unit))
        return work

    workers = ProcessPoolExecutor(
        num_workers,
        # A forked child would inherit the tokenizer library's threads in an unknown state.
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(partial / "tokenizer", request, units_folder),
    )
    running: dict[Future[tuple[int, int]], tuple[int, Unit]] = {}
    writer_import = threading.Thread(target=import_writer)

    def collect(at_most: int) -> None:
        """Wait until at most so many units are under way."""
        while len(running) > at_most:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            if any(future.exception() for future in ended):
                raise first_failure(running)
            for future in ended:
                _, unit = running.pop(future)
                finished(unit, *future.result())
            # The next step needs this import, which takes as long as tokenising 30 MB: have it done meanwhile. Not
            # before a unit is finished, because most mistakes show in the first, and an import cannot be called off.
            if writer_import.ident is None:
                writer_import.start()

    try:
        for number, unit in missing_units():
            running[workers.submit(work_on_unit, number, unit)] = number, unit
            collect(at_most=2 * num_workers)  # enough to keep all busy; pieces of streams wait in memory
        collect(at_most=0)
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, perhaps for want of memory; what is done is kept: run the same command "
            "again, with fewer --num-workers if it was memory"
        ) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
    return work


def import_writer() -> None:
    """Load what `SplitWriter` needs, ahead of time."""
    # When the program ends meanwhile, this fails and nobody cares; when the package is broken, SplitWriter says so.
    with contextlib.suppress(Exception):
        importlib.import_module("streaming")


def first_failure(running: dict[Future[tuple[int, int]], tuple[int, Unit]]) -> BaseException:
    """The error of the earliest unit that failed, so that every run over the same input names the same document.

    Units start in order; so when one has failed, every earlier one has at least started, and is waited for.
    """
    for future in running:
        future.cancel()
    wait(running)
    failed = {
        number: error
        for future, (number, _) in running.items()
        if not future.cancelled() and (error := future.exception()) is not None
    }
    return failed[min(failed)]


def start_worker(tokenizer_folder: Path, request: Request, units_folder: Path) -> None:
    """Make this process a worker: load the tokenizer, and never outlive the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None, "start_worker runs in worker processes only"

    def follow_parent() -> None:
        # After a kill -9 nobody closes the task queue: without this, workers would wait on it forever.
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    global _worker_context
    _worker_context = load_tokenizer(tokenizer_folder), request, units_folder


_worker_context: tuple[Tokenizer, Request, Path] | None = None


def work_on_unit(number: int, unit: Unit) -> tuple[int, int]:
    """`tokenize_unit` in a worker process."""
    assert _worker_context is not None, "the pool runs start_worker first"
    tokenizer, request, units_folder = _worker_context
    return tokenize_unit(tokenizer, request, units_folder, number, unit)


def tokenize_unit(
    tokenizer: Tokenizer, request: Request, units_folder: Path, number: int, unit: Unit
) -> tuple[int, int]:
    """Write the token file of one unit. Returns its documents and their bytes."""
    dtype = token_dtype(tokenizer)
    skipped: Counter[str] = Counter()
    doc_tokens: list[int] = []
    doc_bytes: list[int] = []
    doc_keys: list[int] = []
    pieces: list[np.ndarray] = []
    documents = read_documents(unit, text_key=request.text_key, on_error=request.on_error, skipped=skipped)
    end_of_text = np.array([tokenizer.eos_token_id], dtype)
    for batch in batches(documents):
        encoded = tokenizer.encode_to_arrays([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            pieces += ids.astype(dtype), end_of_text
            doc_tokens.append(len(ids) + 1)
            doc_bytes.append(document.num_bytes)
            doc_keys.append(document.split_key)
    made = TokenUnit(
        tokens=np.concatenate(pieces) if pieces else np.empty(0, dtype),
        doc_tokens=np.array(doc_tokens, np.int64),
        doc_bytes=np.array(doc_bytes, np.int64),
        doc_keys=np.array(doc_keys, np.uint64),
        skipped=np.array([skipped[reason] for reason in SKIP_REASONS], np.int64),
    )
    content = BytesIO()
    np.savez(content, **{name: getattr(made, name) for name in TokenUnit.__slots__})
    write_atomically(unit_path(units_folder, number), content.getbuffer())
    return len(doc_tokens), sum(doc_bytes)


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in runs of about ENCODE_BATCH_BYTES, which bounds what encodings take in memory."""
    batch: list[Document] = []
    batch_bytes = 0
    for document in documents:
        batch.append(document)
        batch_bytes += document.num_bytes
        if batch_bytes >= ENCODE_BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


# Step 2: token files, in order, to samples and shards


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


# The output folder


def record_of(request: Request, source: Source, given: Tokenizer | None) -> dict[str, Any]:
    """The request with the state of its input and tokenizer, as it is compared and stored."""
    record = asdict(request) | {
        "input": source.identity,
        "tokenizer_fingerprint": given.fingerprint if given else None,
        "format_version": FORMAT_VERSION,
    }
    return json.loads(json.dumps(record))


def difference(stored: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first thing in which two requests differ, as a sentence; None when they are the same."""
    for key in now:
        if stored.get(key) == now[key]:
            continue
        if key == "input":
            return f"the input has changed ({describe_input(stored.get(key))} then, {describe_input(now[key])} now)"
        return f"{key} was {stored.get(key)!r} and is {now[key]!r} now"
    return None


def describe_input(identity: Any) -> str:
    if not isinstance(identity, dict):
        return "unknown"
    return ", ".join(f"{key} {value}" for key, value in identity.items())


def find_finished(out: Path, record: dict[str, Any]) -> Summary | None:
    """The summary in `out` when this very request was finished there; an error when another one was."""
    if not (out / SUMMARY_FILE).is_file():
        return None
    summary = load_summary(out)
    changed = difference(summary.request, record)
    if changed:
        raise DataError(f"{out} holds another preparation: {changed}; choose another --out, or pass --overwrite")
    shutil.rmtree(out / PARTIAL, ignore_errors=True)  # killed between the summary and this
    return summary


def open_partial(out: Path, record: dict[str, Any], notify: Callable[[str], None]) -> Path:
    """The folder of work in progress, new or with what a killed launch of the same request left.

    Of another request, too, nothing stands in the way before its first unit is finished; and units made with
    `on_error` stop are what skip makes of them, because no document in them was bad.
    """
    partial = out / PARTIAL
    request_file = partial / "request.json"
    if request_file.is_file():
        stored = json.loads(request_file.read_text(encoding="utf-8"))
        num_done = len(list((partial / "units").glob("*.npz")))
        if stored.get("on_error") == "stop" and record["on_error"] == "skip":
            stored["on_error"] = "skip"
        changed = difference(stored, record)
        if not changed:
            write_atomically(request_file, json.dumps(record, indent=2).encode())
            notify(f"carrying on in {partial}: {num_done} pieces of the input are tokenised already")
            return partial
        if num_done:
            raise DataError(
                f"{partial} holds an unfinished preparation of something else: {changed}; "
                "choose another --out, or pass --overwrite to discard it"
            )
        notify(f"beginning anew in {partial}: {changed}, and no piece of the input was tokenised yet")
    present = [name for name in (*SPLITS, "tokenizer") if (out / name).exists()]
    if present:
        raise DataError(
            f"{out} already contains {', '.join(present)}, not written by this command; choose another --out"
        )
    if partial.exists():
        shutil.rmtree(partial)
    (partial / "units").mkdir(parents=True)
    write_atomically(request_file, json.dumps(record, indent=2).encode())
    return partial


def publish(partial: Path, out: Path, summary: Summary) -> None:
    """Move the finished parts into place; the summary goes last and makes it official."""
    shutil.copytree(partial / "tokenizer", partial / "tokenizer.copy", dirs_exist_ok=True)
    sync_folder(partial / "tokenizer.copy")
    for source, target in (("train", "train"), ("val", "val"), ("tokenizer.copy", "tokenizer")):
        shutil.rmtree(out / target, ignore_errors=True)  # of a launch that was killed right here
        if (partial / source).is_dir():
            (partial / source).rename(out / target)
    write_atomically(out / SUMMARY_FILE, (json.dumps(asdict(summary), indent=2) + "\n").encode())
    shutil.rmtree(partial)


def discard(out: Path) -> None:
    """Remove an earlier preparation, finished or not, and nothing that does not look like one."""
    if not (out / SUMMARY_FILE).is_file() and not (out / PARTIAL / "request.json").is_file():
        return
    (out / SUMMARY_FILE).unlink(missing_ok=True)  # first, so that a half-removed folder does not look finished
    for name in (*SPLITS, "tokenizer", PARTIAL):
        shutil.rmtree(out / name, ignore_errors=True)


@contextlib.contextmanager
def only_preparation_in(out: Path) -> Iterator[None]:
    """Hold a lock on the output folder, which ends with this process however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(f"--out {out} is no folder and cannot become one: {error.strerror}; choose another") from error
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another preparation is running in {out}; wait for it, or choose another --out") from error
        except OSError:
            pass  # a file system without locks; all writes are atomic, two launches would only waste work
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def clear_disk_errors(out: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left for {out}; nothing there looks finished. Free some space and run the same command "
                f"again to carry on, or remove {out / PARTIAL}"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise DataError(f"{error.filename or out} cannot be read or written: {error.strerror}") from error
        raise


# Small things


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32)


def unit_path(units_folder: Path, number: int) -> Path:
    return units_folder / f"{number:08}.npz"


def load_unit(units_folder: Path, number: int, *, without_tokens: bool = False) -> TokenUnit:
    """Read a token file, or only what it says about its documents."""
    with np.load(unit_path(units_folder, number)) as stored:
        tokens = np.empty(0, np.uint16) if without_tokens else stored["tokens"]
        return TokenUnit(tokens=tokens, **{name: stored[name] for name in TokenUnit.__slots__ if name != "tokens"})


def sync_folder(folder: Path) -> None:
    """Bring the files of a folder, and the folder itself, to disk before it is renamed."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def usable_cores() -> int:
    """The cores this process may run on, which in a container or a batch job are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_thread_per_process() -> Iterator[None]:
    """Keep the tokenizer library from starting a thread per core: one worker means one core."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def progress_bars(show: bool) -> Progress:
    """One line per step on standard error, with the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        disable=not show,
    )
