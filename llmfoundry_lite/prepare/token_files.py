"""Step 1 of `data prepare`: units of text -> token files, by any worker in any order.

A unit is a part of the source that one worker reads at a time. It is not tokenised again if its token file exists and
is of the same text and tokenizer. `token_unit.py` describes token files.

`tokenize_source` is the whole step. A `TokenFiles` writes single files; this process has one, and so does each worker.
There are two encoders with the same result: the tokenizers library, and a faster one in a companion, whose tokens are
compared with those of the library before and while it is used.
"""

import itertools
import math
import os
import signal
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from multiprocessing import current_process, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from llmfoundry_lite import companions
from llmfoundry_lite.data.spelling import LostText, Speller, describe_lost_text
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.own_code import trust_code
from llmfoundry_lite.prepare.documents import SKIP_REASONS, Skipped, Unit, read_documents
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import Piece, Source
from llmfoundry_lite.prepare.splits import initial_threshold
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import (
    TokenUnit,
    UnitNumber,
    UnitTable,
    add_text_hashes,
    format_text_digest,
    load_unit,
)

MAX_MEASURED_CHARACTERS = 16 * 1024
"""Number of characters at the beginning of every unit for which lost text is measured."""
MIN_CHARACTERS_TO_REJECT = 1024 * 1024
"""Number of measured characters from which on a tokenizer that loses text is rejected before all units are done."""
MAX_LOST_TEXT = 0.01
"""Fraction of characters that a tokenizer may lose by default. Rare symbols in ordinary text stay below it; capital
letters, or words in another script, exceed it."""
DISTRUST_FILE = "distrusted-encoder.txt"
"""File in `.partial` which says that, and why, the fast encoder must not be used any more."""
FAST_ENCODER_SUFFIX = " in gigatoken"
"""End of `TokenUnit.made_of` if the fast encoder has made the tokens."""
MAX_TASKS_PER_WORKER = 2
"""Units submitted for each worker, enough to keep it busy. More would only wait in memory, with their text."""
MAX_PENDING_PER_WORKER = 16
"""Finished units for each worker that may wait for the result of an earlier unit."""
MAX_UINT16_VOCAB = 1 << 16


class Unequal(Exception):
    """The fast encoder failed, or made other tokens of a document than the tokenizers library."""


class NumberedUnit(NamedTuple):
    """A unit of the source, and whether it has still to be tokenised."""

    number: UnitNumber
    unit: Unit
    has_file: bool
    """Whether an earlier launch has written its token file."""


class UnitCounts(NamedTuple):
    """Numbers of documents and of their UTF-8 bytes in a unit."""

    documents: int
    text_bytes: int


class FinishedUnit(NamedTuple):
    """A unit whose token file is complete."""

    number: UnitNumber
    unit: Unit
    counts: UnitCounts | None
    """None if an earlier launch wrote the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRange:
    """Consecutive pieces of a source, which one machine of several tokenises."""

    first: int
    """Number of the first piece; pieces of a source are counted from 0."""
    end: int
    """Number of the piece after the last one. If it equals `first`, there are no pieces."""
    num_bytes: int
    """Bytes on disk of these pieces."""


@dataclass(kw_only=True, slots=True)
class TokenizeCounts:
    """Result of the tokenising step. Documents and bytes are those of this launch alone."""

    table: UnitTable = field(default_factory=UnitTable)
    """Counts of all units, including those that earlier launches have tokenised."""
    documents: int = 0
    text_bytes: int = 0
    is_fast: bool = False
    """Whether the fast encoder was used, so that the files count only as long as it is not distrusted."""


def tokenize_source(
    source: Source,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    partial: Path,
    num_workers: int,
    bars: Progress,
    max_lost_text: float,
    notify: Callable[[str], None] = lambda line: None,
    pieces: PieceRange | None = None,
    on_unit: Callable[[FinishedUnit], None] = lambda unit: None,
    folder: TokenFolder | None = None,
) -> TokenizeCounts:
    """Write the token files of all units of a source, except those that earlier launches have written.

    partial: the folder of work in progress.
    tokenizer: the tokenizer in that folder.
    num_workers: number of processes that tokenise; 1 is this process.
    max_lost_text: fraction of characters that the tokenizer may lose.
    pieces: the pieces to tokenise; None is all of them.
    on_unit: called with each unit of these pieces, in order, when its token file is complete.
    folder: the folder of the token files; None is `units` in `partial`, where they stay.

    The fast encoder is used if it is installed and the source is large enough. If it makes other tokens than the
    tokenizers library, its files are made again without it, and `notify` is called with a sentence.

    Raises DataError for a tokenizer that loses more than the fraction `max_lost_text` of the characters, and the error
    of the first unit that fails.
    """
    folder = folder or TokenFolder(partial / "units")
    fast_encoder = companions.load_if_installed("llmfoundry_formats.fast_encoder:FastEncoder")
    if fast_encoder and fast_encoder.may_be_used(source.total_bytes, partial / DISTRUST_FILE):
        files = TokenFiles(request, partial, tokenizer, is_fast=True)
        try:
            return write_token_files(source, pieces, files, folder, num_workers, bars, max_lost_text, on_unit)
        except Unequal as error:
            notify(f"{error}: tokenising by tokenizers alone, and again what was not")
    files = TokenFiles(request, partial, tokenizer, is_fast=False)
    return write_token_files(source, pieces, files, folder, num_workers, bars, max_lost_text, on_unit)


def write_token_files(
    source: Source,
    pieces: PieceRange | None,
    files: "TokenFiles",
    folder: TokenFolder,
    num_workers: int,
    bars: Progress,
    max_lost_text: float,
    on_unit: Callable[[FinishedUnit], None],
) -> TokenizeCounts:
    """Write the missing token files with the encoder that `files` uses, in this process or in `num_workers` workers.

    Lost text is added up in the order of units, also for files of earlier launches, so that every launch rejects the
    tokenizer at the same unit. Raises DataError if too much text is lost, and Unequal if the fast encoder fails.
    """
    # Start the work. Units are tokenised while the loop below asks for them.
    counts = TokenizeCounts(is_fast=files.is_fast)
    threshold = initial_threshold(files.request)
    remaining_bytes = source.total_bytes if pieces is None else pieces.num_bytes
    task = bars.add_task("tokenising", total=remaining_bytes)
    units = number_units(source, pieces, files, folder)
    if num_workers == 1:
        finished_units = write_in_this_process(files, folder, units)
    else:
        finished_units = write_in_worker_processes(files, folder, units, num_workers)

    # Count what is finished, in the order of units.
    for finished in finished_units:
        if finished.counts is not None:
            counts.documents += finished.counts.documents
            counts.text_bytes += finished.counts.text_bytes
            bars.advance(task, finished.unit.num_bytes)
        elif remaining_bytes is not None:
            # Reduce the total instead of advancing, because the speed would count in the estimate of remaining time.
            remaining_bytes -= finished.unit.num_bytes
            bars.update(task, total=remaining_bytes)
        counts.table.add(finished.number, load_unit(files.path(finished.number), without_tokens=True), threshold)
        folder.finish(finished.number)
        on_unit(finished)

        # Reject the tokenizer as soon as enough text shows that it loses too much.
        if counts.table.loss.characters >= MIN_CHARACTERS_TO_REJECT:
            check_lost_text(counts.table.loss, files.request, max_lost_text)
    check_lost_text(counts.table.loss, files.request, max_lost_text)
    return counts


def number_units(
    source: Source, pieces: PieceRange | None, files: "TokenFiles", folder: TokenFolder
) -> Iterator[NumberedUnit]:
    """Yield the units of some pieces with their numbers, and whether an earlier launch has written each token file.

    `pieces` None is all pieces of the source.
    """
    existing_names = folder.names()
    numbered_pieces: Iterable[tuple[int, Piece]] = enumerate(source.pieces())
    if pieces is not None:
        numbered_pieces = itertools.islice(numbered_pieces, pieces.first, pieces.end)
    for piece_number, piece in numbered_pieces:
        for unit_number, unit in enumerate(piece.units()):
            number = UnitNumber(piece_number, unit_number)
            has_file = False
            if number.file_name in existing_names:
                folder.fetch(number)
                has_file = files.is_current(number, unit)
            if not has_file:
                folder.begin(number)
            yield NumberedUnit(number, unit, has_file)


def check_lost_text(loss: LostText, request: PrepareRequest, max_lost_text: float) -> None:
    """Raise DataError if a tokenizer loses more than the fraction `max_lost_text` of the characters."""
    if loss.lost_fraction > max_lost_text:
        raise DataError(
            f"{' '.join(request.sources)}: by tokenizer {request.tokenizer} {describe_lost_text(loss.as_json())}; "
            f"choose a tokenizer that spells the text, such as train:32768, or allow it with --max-lost-text "
            f"{round_up_to_percent(loss.lost_fraction):g}"
        )


def round_up_to_percent(fraction: float) -> float:
    """Round a fraction up to whole percents: 0.0101 to 0.02."""
    return math.ceil(100 * fraction) / 100


def write_in_this_process(
    files: "TokenFiles", folder: TokenFolder, units: Iterator[NumberedUnit]
) -> Iterator[FinishedUnit]:
    """Write the missing token files in this process. Yields all units in order, each when its file is complete.

    Raises Unequal if the fast encoder fails its check.
    """
    files.check_fast_encoder()
    for number, unit, has_file in units:
        counts = None if has_file else files.write(number, unit)
        yield FinishedUnit(number, unit, counts)
        folder.wait_for_room()


def write_in_worker_processes(
    files: "TokenFiles", folder: TokenFolder, units: Iterator[NumberedUnit], num_workers: int
) -> Iterator[FinishedUnit]:
    """Write the missing token files in worker processes. Yields all units in order, each when its file is complete.

    Results are taken in the order of units, so that every launch over the same input reports the same unreadable
    document. Units are submitted ahead of the one that is awaited, but only a few for each worker, because submitted
    units hold their text in memory (MAX_TASKS_PER_WORKER, MAX_PENDING_PER_WORKER).

    Raises the error of a worker, and DataError if a worker process has ended.
    """
    workers = ProcessPoolExecutor(
        num_workers,
        # A forked child would inherit the tokenizer library's threads in an unknown state.
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(files.request, files.partial, files.is_fast),
    )
    # Units that have not been yielded yet, in order. The future is None for units that have a token file already.
    pending: deque[tuple[UnitNumber, Unit, Future[UnitCounts] | None]] = deque()

    def must_wait_for_first() -> bool:
        """Return whether the first pending unit should be yielded before another unit is submitted."""
        _, _, first_future = pending[0]
        if first_future is None:  # it has a token file, so there is nothing to wait for
            return True
        num_tasks = sum(future is not None for _, _, future in pending)
        return num_tasks > MAX_TASKS_PER_WORKER * num_workers or len(pending) > MAX_PENDING_PER_WORKER * num_workers

    def take_first() -> FinishedUnit:
        """Remove the first pending unit, after waiting until its token file is complete."""
        number, unit, future = pending.popleft()
        counts = None if future is None else future.result()  # waits, and raises the worker's error
        return FinishedUnit(number, unit, counts)

    try:
        if files.is_fast:  # in a worker, because a crash of the library in this process would end the command
            workers.submit(check_fast_encoder_in_worker).result()
        for number, unit, has_file in units:
            future = None if has_file else workers.submit(write_in_worker, number, unit)
            pending.append((number, unit, future))
            while pending and (must_wait_for_first() or not folder.has_room()):
                yield take_first()
            folder.wait_for_room()
        while pending:
            yield take_first()
    except BrokenProcessPool as error:
        encoder = "; if it was not, uninstall gigatoken, which encodes there" if files.is_fast else ""
        raise DataError(
            "a worker process ended; if it said nothing, it was killed, perhaps for lack of memory; finished work is "
            f"kept: run the same command again, with fewer --num-workers if it was memory{encoder}; "
            'a script that calls this needs `if __name__ == "__main__":`'
        ) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


# In a worker


def leave_if_imported_by_worker() -> None:
    """Exit with a message of one line if this process is a worker that is importing the caller's script.

    Python imports the script into each worker process under the name __mp_main__. Without the usual guard,
    `if __name__ == "__main__":`, every worker would start a preparation of its own.
    """
    if getattr(current_process(), "_inheriting", False):  # set by multiprocessing during the import
        raise SystemExit(
            f'{sys.argv[0]}: its worker processes run it again; put what it does under `if __name__ == "__main__":`, '
            "or pass num_workers=1"
        )


_files_of_worker: "TokenFiles"
"""Writer of token files in a worker process, where `start_worker` sets it. It does not exist in other processes."""


def start_worker(request: PrepareRequest, partial: Path, is_fast: bool) -> None:
    """Initialize a worker process: load the tokenizer from `partial`, and make sure that it exits with its parent.

    The executor calls this in each worker process. Sets `_files_of_worker`, which the tasks of this process use.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends its workers
    # Otherwise each worker would start an idle thread for every core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None, "start_worker is for worker processes"

    def exit_with_parent() -> None:
        """Exit when the parent process ends. After a kill -9, workers would otherwise wait for a task forever."""
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    trust_code(request.reader_of_suffix.values())  # the parent has imported them before
    global _files_of_worker
    _files_of_worker = TokenFiles(request, partial, load_tokenizer(partial / "tokenizer"), is_fast=is_fast)


def check_fast_encoder_in_worker() -> None:
    """Compare the fast encoder of this worker process with the tokenizers library. Raises Unequal."""
    _files_of_worker.check_fast_encoder()


def write_in_worker(number: UnitNumber, unit: Unit) -> UnitCounts:
    """Write the token file of one unit in this worker process. Returns the counts of its documents."""
    return _files_of_worker.write(number, unit)


class TokenFiles:
    """Reader and writer of the token files of a preparation, one object in each process."""

    def __init__(self, request: PrepareRequest, partial: Path, tokenizer: Tokenizer, *, is_fast: bool) -> None:
        """Take the folder of work in progress, and the tokenizer in it. `is_fast` selects the fast encoder."""
        self.request = request
        self.partial = partial
        self.folder = partial / "units"
        self.tokenizer = tokenizer
        self.is_fast = is_fast

    @cached_property
    def encoder(self) -> Any:
        """The fast encoder, or None if it is not used. It is built by the first task, which can report an error."""
        if not self.is_fast:
            return None
        encoder_class = companions.load("llmfoundry_formats.fast_encoder:FastEncoder")
        return encoder_class(self.tokenizer, self.partial / DISTRUST_FILE)

    @cached_property
    def speller(self) -> Speller:
        """Object that measures which text the tokenizer loses."""
        return Speller(self.tokenizer)

    def check_fast_encoder(self) -> None:
        """Compare the fast encoder, if it is used, with the tokenizers library. Raises Unequal if they differ."""
        if self.encoder:
            self.encoder.prove()

    def path(self, number: UnitNumber) -> Path:
        """Return the path of a unit's token file."""
        return self.folder / number.file_name

    def is_current(self, number: UnitNumber, unit: Unit) -> bool:
        """Return whether the token file of a unit was made from the same text by the same tokenizer.

        A file that the fast encoder has made is current only if the fast encoder is used, because it is made again by
        the tokenizers library once the fast encoder is distrusted. Returns False for a damaged or missing file.
        """
        try:
            with np.load(self.path(number)) as stored:
                made_of = str(stored["made_of"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False
        expected = self.identity(unit)
        return made_of == expected or (self.is_fast and made_of == expected + FAST_ENCODER_SUFFIX)

    def identity(self, unit: Unit) -> str:
        """Return a text that identifies the content of a unit and the tokenizer, stored as `TokenUnit.made_of`."""
        return f"{unit.digest()} by {tokenizer_identity(self.tokenizer)}"

    def write(self, number: UnitNumber, unit: Unit) -> UnitCounts:
        """Tokenise the documents of a unit and write its token file. Returns the numbers of documents and bytes.

        Raises DataError for a document that cannot be read, unless such documents are to be skipped, and Unequal if the
        fast encoder fails.
        """
        # Encode the documents. At the beginning of the unit, also measure how much text the tokenizer loses.
        dtype = token_dtype(self.tokenizer)
        end_of_text = np.array([self.tokenizer.eos_token_id], dtype)
        skipped = Skipped()
        loss = LostText()
        token_arrays: list[np.ndarray] = []
        doc_tokens: list[int] = []
        doc_bytes: list[int] = []
        doc_keys: list[int] = []
        text_hash = 0
        for document in read_documents(unit, self.request, skipped):
            if self.encoder:
                ids = self.encoder.encode(document)
            else:
                ids = self.tokenizer.encode_to_array(document.text)
            token_arrays.append(ids.astype(dtype))
            token_arrays.append(end_of_text)
            doc_tokens.append(len(ids) + 1)
            doc_bytes.append(document.num_bytes)
            doc_keys.append(document.split_key)
            text_hash = add_text_hashes(text_hash, document.text_hash)
            if loss.characters < MAX_MEASURED_CHARACTERS:
                loss += self.speller.measure(document.text[: MAX_MEASURED_CHARACTERS - loss.characters])

        # Write the file.
        token_unit = TokenUnit(
            tokens=np.concatenate(token_arrays) if token_arrays else np.empty(0, dtype),
            doc_tokens=np.array(doc_tokens, np.int64),
            doc_bytes=np.array(doc_bytes, np.int64),
            doc_keys=np.array(doc_keys, np.uint64),
            skipped=np.array([skipped.counts[reason] for reason in SKIP_REASONS], np.int64),
            named=np.array(skipped.examples, str),
            made_of=np.array(self.identity(unit) + FAST_ENCODER_SUFFIX * self.is_fast),
            loss=np.array(loss.as_text()),
            text_digest=np.array(format_text_digest(text_hash)),
        )
        content = BytesIO()
        np.savez(content, **{name: getattr(token_unit, name) for name in TokenUnit.__slots__})
        write_atomically(self.path(number), content.getbuffer())
        return UnitCounts(documents=len(doc_tokens), text_bytes=sum(doc_bytes))


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return a text that identifies everything that decides the tokens of a document.

    That is the tokenizer's fingerprint, and the id of the end-of-text token.
    """
    return f"{tokenizer.fingerprint} {tokenizer.eos_token_id}"


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest number type that can represent every token id: uint16 or uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= MAX_UINT16_VOCAB else np.uint32)
