"""Step 1 of `data prepare`: units of text to files of tokens, by any worker in any order.

A unit whose token file, `.partial/units/NNNNNNNN.npz`, is there and made of this text by this tokenizer is never done
again. `tokenize` is the whole step. `TokenFiles` makes one file; it exists once in this process, and once in each
worker.
"""

import math
import os
import signal
import sys
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
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
from llmfoundry_lite.data.spelling import LostText, Speller, describe_lost_text, load_lost_text
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.prepare.documents import SKIP_REASONS, Skipped, Unit, read_documents
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import Source

SPELLED_CHARACTERS = 16 * 1024
"""Characters of every unit, its first ones, that are looked up in their tokens."""
ENOUGH_CHARACTERS = 1024 * 1024
"""Characters after which a tokenizer that loses text is refused without reading the rest."""
MAX_LOST_TEXT = 0.01
"""Share of characters. Stray symbols of ordinary text are rarer; its capitals, or words of another script, are not."""
VERDICT = "distrusted-encoder.txt"
"""In `.partial`: why the fast encoder is not asked any more."""
IN_GIGATOKEN = " in gigatoken"
"""End of the origin of a token file that the fast encoder has made."""
MAX_TASKS_PER_WORKER = 2
"""Units under way for each worker, which keep it busy. More would only wait in memory, with their text."""
MAX_WAITING_PER_WORKER = 16
"""Units of a worker whose results may wait for an earlier unit's."""
MAX_UINT16_VOCAB = 1 << 16


class Unequal(Exception):
    """The two libraries made different tokens of one document, or the fast one failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUnit:
    """The tokens of one unit of text: the content of `.partial/units/NNNNNNNN.npz`."""

    tokens: np.ndarray = field(repr=False)
    """Tokens of all documents, each followed by the end-of-text token."""
    doc_tokens: np.ndarray
    """Tokens of each document, its end-of-text token included; int64."""
    doc_bytes: np.ndarray
    """UTF-8 bytes of each document; int64."""
    doc_keys: np.ndarray
    """The split key of each document; uint64."""
    skipped: np.ndarray
    """Documents left out, in the order of SKIP_REASONS; int64."""
    named: np.ndarray
    """Sentences that name the first of them; str."""
    made_of: np.ndarray
    """One str: the unit and the tokenizer."""
    loss: np.ndarray
    """One str: characters of the unit's beginning that the tokens do not spell, as `LostText.as_text` has it."""


class NumberedUnit(NamedTuple):
    """A unit of the source, before this launch's work on it."""

    number: int
    unit: Unit
    has_file: bool
    """Whether its token file is there already."""


class UnitCounts(NamedTuple):
    """What a unit holds."""

    documents: int
    text_bytes: int


class FinishedUnit(NamedTuple):
    """A unit whose token file is there."""

    number: int
    unit: Unit
    counts: UnitCounts | None
    """None where the file was there already."""


@dataclass(kw_only=True, slots=True)
class Work:
    """Counts of the tokenising step in this launch."""

    num_units: int = 0
    """Units of the whole source, those of earlier launches included."""
    documents: int = 0
    text_bytes: int = 0
    loss: LostText = field(default_factory=LostText)
    """Text of all units that the tokens do not spell."""


def tokenize(
    source: Source,
    request: PrepareRequest,
    tokenizer: Tokenizer,
    partial: Path,
    num_workers: int,
    bars: Progress,
    max_lost_text: float,
    notify: Callable[[str], None] = lambda line: None,
) -> Work:
    """Make the missing token files, by the tokenizer in `.partial`. On an error the first failing unit's is raised.

    The fast encoder is used where it is worth while. If it proves unequal, all it has made is made again without it.
    Raises DataError for a tokenizer that loses more than `max_lost_text` of the text.
    """
    fast_encoder = companions.load_if_installed("llmfoundry_formats.fast_encoder:FastEncoder")
    if fast_encoder and fast_encoder.may_be_used(source.total_bytes, partial / VERDICT):
        files = TokenFiles(request, partial, tokenizer, is_fast=True)
        try:
            return make_token_files(source, files, num_workers, bars, max_lost_text)
        except Unequal as error:
            notify(f"{error}: tokenising by tokenizers alone, and again what was not")
    files = TokenFiles(request, partial, tokenizer, is_fast=False)
    return make_token_files(source, files, num_workers, bars, max_lost_text)


def make_token_files(
    source: Source, files: "TokenFiles", num_workers: int, bars: Progress, max_lost_text: float
) -> Work:
    """Make the missing token files by the encoder that `files` has. Raises Unequal, and DataError for lost text.

    Units are counted in their order, those of earlier launches too, so that each launch refuses the same.
    """
    work = Work()
    bytes_to_do = source.total_bytes
    task = bars.add_task("tokenising", total=bytes_to_do)
    units = number_units(source, files)
    if num_workers == 1:
        finished_units = make_here(files, units)
    else:
        finished_units = make_in_processes(files, units, num_workers)

    for number, unit, counts in finished_units:
        work.num_units = number + 1
        if counts is not None:
            work.documents += counts.documents
            work.text_bytes += counts.text_bytes
            bars.advance(task, unit.num_bytes)
        elif bytes_to_do is not None:  # shrink the work rather than advance, or the ETA believes the old speed
            bytes_to_do -= unit.num_bytes
            bars.update(task, total=bytes_to_do)

        work.loss += files.loss(number)
        if work.loss.characters >= ENOUGH_CHARACTERS:
            refuse_lost_text(work.loss, files.request, max_lost_text)
    refuse_lost_text(work.loss, files.request, max_lost_text)
    return work


def number_units(source: Source, files: "TokenFiles") -> Iterator[NumberedUnit]:
    """Yield the units of a source, and whether an earlier launch has left the token file of each."""
    left_names = {path.name for path in files.folder.glob("*.npz")}
    for number, unit in enumerate(source.units()):
        has_file = files.path(number).name in left_names and files.is_of(number, unit)
        yield NumberedUnit(number, unit, has_file)


def refuse_lost_text(loss: LostText, request: PrepareRequest, max_lost_text: float) -> None:
    """Raise DataError where a tokenizer loses more of the text than is allowed."""
    if loss.share > max_lost_text:
        raise DataError(
            f"{' '.join(request.sources)}: by tokenizer {request.tokenizer} {describe_lost_text(loss.as_json())}; "
            f"choose a tokenizer that spells the text, such as train:32768, or allow it with --max-lost-text "
            f"{allowing(loss.share):g}"
        )


def allowing(share: float) -> float:
    """Return a round number that allows this share: 0.02 for 0.0101."""
    return math.ceil(100 * share) / 100


def make_here(files: "TokenFiles", units: Iterator[NumberedUnit]) -> Iterator[FinishedUnit]:
    """Make the missing token files in this process. Yields all units in order."""
    files.prove()
    for number, unit, has_file in units:
        counts = None if has_file else files.make(number, unit)
        yield FinishedUnit(number, unit, counts)


def make_in_processes(files: "TokenFiles", units: Iterator[NumberedUnit], num_workers: int) -> Iterator[FinishedUnit]:
    """Make the missing token files in worker processes. Yields all units in order.

    Results are taken in order, so that every launch over the same input names the same bad document. Raises DataError
    where a worker process has ended, and what a worker raises.
    """
    workers = ProcessPoolExecutor(
        num_workers,
        # A forked child would inherit the tokenizer library's threads in an unknown state.
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(files.request, files.partial, files.is_fast),
    )
    # Units in order, whose results are yet to be taken. The future is None where the token file is there already.
    waiting: deque[tuple[int, Unit, Future[UnitCounts] | None]] = deque()

    def must_take_first() -> bool:
        _, _, first_future = waiting[0]
        if first_future is None:
            return True
        num_tasks = sum(future is not None for _, _, future in waiting)
        return num_tasks > MAX_TASKS_PER_WORKER * num_workers or len(waiting) > MAX_WAITING_PER_WORKER * num_workers

    def take_first() -> FinishedUnit:
        number, unit, future = waiting.popleft()
        counts = None if future is None else future.result()  # waits, and raises the worker's error
        return FinishedUnit(number, unit, counts)

    try:
        if files.is_fast:  # not here, where a crash of the library would end the command
            workers.submit(prove_in_worker).result()
        for number, unit, has_file in units:
            future = None if has_file else workers.submit(make_in_worker, number, unit)
            waiting.append((number, unit, future))
            while waiting and must_take_first():
                yield take_first()
        while waiting:
            yield take_first()
    except BrokenProcessPool as error:
        encoder = "; if it was not, uninstall gigatoken, which encodes there" if files.is_fast else ""
        raise DataError(
            "a worker process ended; if it said nothing, it was killed, perhaps for want of memory; what is done is "
            f"kept: run the same command again, with fewer --num-workers if it was memory{encoder}; "
            'a script that calls this needs `if __name__ == "__main__":`'
        ) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


# In a worker


def leave_if_imported_by_worker() -> None:
    """End this process in one line if it is a worker that runs the caller's script again, which starts with an import.

    Python imports the script into each worker under the name __mp_main__. Without a guard, the import prepares again.
    """
    if getattr(current_process(), "_inheriting", False):  # multiprocessing's own mark, as long as it imports
        raise SystemExit(
            f'{sys.argv[0]}: its worker processes run it again; put what it does under `if __name__ == "__main__":`, '
            "or pass num_workers=1"
        )


_files_of_worker: "TokenFiles"
"""Set by `start_worker`, in a worker process alone."""


def start_worker(request: PrepareRequest, partial: Path, is_fast: bool) -> None:
    """Make this process a worker: load the tokenizer, and never outlive the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or each worker has a thread for every core, all of them idle
    parent = parent_process()
    assert parent is not None, "start_worker is for worker processes"

    def follow_parent() -> None:
        # After a kill -9 nobody closes the task queue, so without this workers would wait on it without end.
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    global _files_of_worker
    _files_of_worker = TokenFiles(request, partial, load_tokenizer(partial / "tokenizer"), is_fast=is_fast)


def prove_in_worker() -> None:
    """Compare the encoders of this worker. Raises Unequal."""
    _files_of_worker.prove()


def make_in_worker(number: int, unit: Unit) -> UnitCounts:
    """Write the token file of one unit, by the tokenizer of this worker."""
    return _files_of_worker.make(number, unit)


class TokenFiles:
    """The token files of a preparation, and one process's means to make them."""

    def __init__(self, request: PrepareRequest, partial: Path, tokenizer: Tokenizer, *, is_fast: bool) -> None:
        """Take the folder of work in progress, and the tokenizer in it. `is_fast` uses the fast encoder."""
        self.request = request
        self.partial = partial
        self.folder = partial / "units"
        self.tokenizer = tokenizer
        self.is_fast = is_fast

    @cached_property
    def encoder(self) -> Any:
        """The fast encoder if it is used, built by the first task, where an error can be reported; else None."""
        if not self.is_fast:
            return None
        encoder_class = companions.load("llmfoundry_formats.fast_encoder:FastEncoder")
        return encoder_class(self.tokenizer, self.partial / VERDICT)

    @cached_property
    def speller(self) -> Speller:
        """What finds the text that the tokenizer loses."""
        return Speller(self.tokenizer)

    def loss(self, number: int) -> LostText:
        """Return the text that the tokenizer loses at the beginning of a unit, from its token file."""
        with np.load(self.path(number)) as stored:
            return load_lost_text(str(stored["loss"]))

    def prove(self) -> None:
        """Compare the two encoders, if there are two. Raises Unequal."""
        if self.encoder:
            self.encoder.prove()

    def path(self, number: int) -> Path:
        """Return the path of a unit's token file."""
        return self.folder / f"{number:08}.npz"

    def is_of(self, number: int, unit: Unit) -> bool:
        """Return whether a token file is of this unit and tokenizer. The fast encoder's count only where it is used."""
        try:
            with np.load(self.path(number)) as stored:
                made_of = str(stored["made_of"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False
        origin = self.origin(unit)
        return made_of == origin or (self.is_fast and made_of == origin + IN_GIGATOKEN)

    def origin(self, unit: Unit) -> str:
        """Name what a token file is made of: the text of a unit, and the tokenizer."""
        return f"{unit.digest()} by {origin_of_tokens(self.tokenizer)}"

    def make(self, number: int, unit: Unit) -> UnitCounts:
        """Write the token file of one unit. Raises DataError for a document that cannot be read, and Unequal."""
        dtype = token_dtype(self.tokenizer)
        end_of_text = np.array([self.tokenizer.eos_token_id], dtype)
        skipped = Skipped()
        loss = LostText()
        pieces: list[np.ndarray] = []
        doc_tokens: list[int] = []
        doc_bytes: list[int] = []
        doc_keys: list[int] = []
        for document in read_documents(unit, self.request, skipped):
            if self.encoder:
                ids = self.encoder.encode(document)
            else:
                ids = self.tokenizer.encode_to_array(document.text)
            pieces.append(ids.astype(dtype))
            pieces.append(end_of_text)
            doc_tokens.append(len(ids) + 1)
            doc_bytes.append(document.num_bytes)
            doc_keys.append(document.split_key)
            if loss.characters < SPELLED_CHARACTERS:
                loss += self.speller.measure(document.text[: SPELLED_CHARACTERS - loss.characters])

        token_unit = TokenUnit(
            tokens=np.concatenate(pieces) if pieces else np.empty(0, dtype),
            doc_tokens=np.array(doc_tokens, np.int64),
            doc_bytes=np.array(doc_bytes, np.int64),
            doc_keys=np.array(doc_keys, np.uint64),
            skipped=np.array([skipped.counts[reason] for reason in SKIP_REASONS], np.int64),
            named=np.array(skipped.named, str),
            made_of=np.array(self.origin(unit) + IN_GIGATOKEN * self.is_fast),
            loss=np.array(loss.as_text()),
        )
        content = BytesIO()
        np.savez(content, **{name: getattr(token_unit, name) for name in TokenUnit.__slots__})
        write_atomically(self.path(number), content.getbuffer())
        return UnitCounts(documents=len(doc_tokens), text_bytes=sum(doc_bytes))


def load_unit(path: Path, *, without_tokens: bool = False) -> TokenUnit:
    """Read a token file, or only what it says about its documents."""
    with np.load(path) as stored:
        # An entry of an .npz file is read when it is asked for.
        values = {name: stored[name] for name in TokenUnit.__slots__ if name != "tokens"}
        values["tokens"] = np.empty(0, np.uint16) if without_tokens else stored["tokens"]
        return TokenUnit(**values)


def origin_of_tokens(tokenizer: Tokenizer) -> str:
    """Name what decides the tokens of a text: the tokenizer's fingerprint, and the id that ends a document."""
    return f"{tokenizer.fingerprint} {tokenizer.eos_token_id}"


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest type that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= MAX_UINT16_VOCAB else np.uint32)
