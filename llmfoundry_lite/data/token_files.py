"""Step 1 of `data prepare`: units of text to files of tokens, by any worker in any order.

Owns the token files, `.partial/units/NNNNNNNN.npz`, and the processes that write them. A unit whose file is there is
never done again. Leaves what is made of the files to `samples.py`.
"""

import contextlib
import importlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from io import BytesIO
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from rich.progress import Progress

from llmfoundry_lite.data.documents import SKIP_REASONS, Document, Unit, read_documents
from llmfoundry_lite.data.request import Request
from llmfoundry_lite.data.sources import Source
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically

ENCODE_BATCH_BYTES = 512 * 1024


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
    """Load what `samples.SplitWriter` needs, ahead of time."""
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


# In a worker


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


# The token files


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
