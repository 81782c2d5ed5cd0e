"""Step 1 of `data prepare`: units of text to files of tokens, by any worker in any order.

Owns the token files, `.partial/units/NNNNNNNN.npz`, and the processes that write them. A unit whose file is there,
and made of this text by this tokenizer, is never done again. Leaves what is made of the files to `samples.py`.
"""

import contextlib
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from rich.progress import Progress

from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.prepare.documents import read_documents
from llmfoundry_lite.prepare.fast_encoder import WORTH_PROVING_BYTES, FastEncoder, Unequal, is_installed
from llmfoundry_lite.prepare.request import Request
from llmfoundry_lite.prepare.sources import Source
from llmfoundry_lite.prepare.units import SKIP_REASONS, Document, Skipped, Unit, place_of

ENCODE_BATCH_BYTES = 512 * 1024
DISTRUSTED = "distrusted-encoder.txt"
"""In `.partial`: why the fast encoder is not asked any more."""
KILLED = "killed-encoder"
"""In `.partial`: how often a process with the fast encoder was killed, and the token files there were then."""
MOST_DEATHS = 2
"""Then it is done without."""


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
    named: np.ndarray
    """Sentences that name the first of them; str."""
    made_of: np.ndarray
    """One str: the unit and the tokenizer, as `origin_of` names them."""


@dataclass(kw_only=True, slots=True)
class Work:
    """What the tokenising step did in this launch."""

    num_units: int = 0
    """Of the whole source, those of earlier launches included."""
    documents: int = 0
    text_bytes: int = 0


def tokenize(
    source: Source,
    request: Request,
    tokenizer: Tokenizer,
    partial: Path,
    num_workers: int,
    bars: Progress,
    notify: Callable[[str], None] = lambda line: None,
) -> Work:
    """Make the missing token files. On an error the one of the first unit that fails is raised.

    By the fast encoder where it is worth while. If it proves unequal, what it has made is made again without it, and
    it is not asked again in this folder.
    """
    fast = is_installed() and (source.total_bytes is None or source.total_bytes >= WORTH_PROVING_BYTES)
    if not (partial / DISTRUSTED).exists():
        try:
            if fast and num_deaths(partial) >= MOST_DEATHS:
                raise Unequal("a process that encodes by gigatoken was killed twice")
            return make_token_files(source, request, tokenizer, partial, num_workers, bars, fast=fast)
        except Unequal as error:
            distrust(partial, error)
            notify(f"{error}: tokenising by tokenizers alone, and again what was not")
    return make_token_files(source, request, tokenizer, partial, num_workers, bars, fast=False)


def make_token_files(
    source: Source,
    request: Request,
    tokenizer: Tokenizer,
    partial: Path,
    num_workers: int,
    bars: Progress,
    *,
    fast: bool,
) -> Work:
    """`tokenize`, by the fast encoder or without. Raises Unequal."""
    work = Work()
    units_folder = partial / "units"
    accepted = {origin_of_tokens(tokenizer), origin_of_tokens(tokenizer, fast=fast)}
    done = {path.name for path in units_folder.glob("*.npz")}
    total = source.total_bytes
    task = bars.add_task("tokenising", total=total)

    def missing_units() -> Iterator[tuple[int, Unit]]:
        nonlocal total
        for number, unit in enumerate(source.units()):
            work.num_units = number + 1
            path = unit_path(units_folder, number)
            if path.name not in done or stored_origin(path) not in {origin_of(unit, tokens) for tokens in accepted}:
                yield number, unit
            elif total is not None:  # shrink the work rather than advance, or the ETA believes the old speed
                total -= unit.num_bytes
                bars.update(task, total=total)

    def finished(unit: Unit, documents: int, text_bytes: int) -> None:
        work.documents += documents
        work.text_bytes += text_bytes
        bars.advance(task, unit.num_bytes)

    if num_workers == 1:
        with one_thread_per_process(), death_counted(partial) if fast else contextlib.nullcontext():
            encoder = FastEncoder(tokenizer) if fast else None
            if encoder:
                encoder.prove()
            for number, unit in missing_units():
                finished(unit, *tokenize_unit(tokenizer, encoder, request, units_folder, number, unit))
        return work

    workers = ProcessPoolExecutor(
        num_workers,
        # A forked child would inherit the tokenizer library's threads in an unknown state.
        mp_context=get_context("spawn"),
        initializer=start_worker,
        initargs=(partial / "tokenizer", request, units_folder, fast),
    )
    running: dict[Future[tuple[int, int]], tuple[int, Unit]] = {}
    proof: Future[None] | None = None

    def collect(at_most: int) -> None:
        """Wait until at most so many units are under way."""
        while len(running) > at_most:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            if proof and proof.done():
                proof.result()
            if any(future.exception() for future in ended):
                raise first_failure(running)
            for future in ended:
                _, unit = running.pop(future)
                finished(unit, *future.result())

    try:
        for number, unit in missing_units():
            if fast and proof is None:  # at the side: nothing is kept unless it succeeds
                proof = workers.submit(prove_encoder)
            running[workers.submit(work_on_unit, number, unit)] = number, unit
            collect(at_most=2 * num_workers)  # enough to keep all busy; pieces of streams wait in memory
        collect(at_most=0)
        if fast:  # here if an earlier launch has done all the rest
            (proof or workers.submit(prove_encoder)).result()
    except BrokenProcessPool as error:
        if fast:
            count_deaths(partial, num_deaths(partial) + 1)
            if num_deaths(partial) >= MOST_DEATHS:
                raise Unequal("a process that encodes by gigatoken was killed twice") from error
        raise DataError(
            "a worker process was killed, perhaps for want of memory; what is done is kept: run the same command "
            "again, with fewer --num-workers if it was memory"
        ) from error
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
    return work


def num_deaths(partial: Path) -> int:
    """In a row, without a token file made in between: a user who stops the command twice is no fault of the encoder."""
    path = partial / KILLED
    deaths, num_done = map(int, path.read_text().split()) if path.exists() else (0, 0)
    return deaths if num_token_files(partial) == num_done else 0


def count_deaths(partial: Path, number: int) -> None:
    write_atomically(partial / KILLED, f"{number} {num_token_files(partial)}")


def num_token_files(partial: Path) -> int:
    return sum(1 for _ in (partial / "units").glob("*.npz"))


@contextlib.contextmanager
def death_counted(partial: Path) -> Iterator[None]:
    """A crash of the encoder takes this very process down: its death is on disk before, and taken back if none came."""
    before = num_deaths(partial)
    count_deaths(partial, before + 1)
    try:
        yield
    finally:
        count_deaths(partial, before)


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


def start_worker(tokenizer_folder: Path, request: Request, units_folder: Path, fast: bool) -> None:
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
    _worker_context = load_tokenizer(tokenizer_folder), request, units_folder, fast


_worker_context: tuple[Tokenizer, Request, Path, bool] | None = None


@cache
def fast_encoder_of_worker() -> FastEncoder | None:
    """Made by the first task, where an error can be reported."""
    assert _worker_context is not None, "the pool runs start_worker first"
    tokenizer, _, _, fast = _worker_context
    return FastEncoder(tokenizer) if fast else None


def prove_encoder() -> None:
    """`FastEncoder.prove` in a worker process."""
    with remembered():
        encoder = fast_encoder_of_worker()
        assert encoder is not None, "asked only where there is one"
        encoder.prove()


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """A difference that a worker finds is on disk before anybody hears of it: another unit's error, or a kill, may come
    first."""
    assert _worker_context is not None, "the pool runs start_worker first"
    try:
        yield
    except Unequal as error:
        distrust(_worker_context[2].parent, error)
        raise


def distrust(partial: Path, error: Unequal) -> None:
    write_atomically(partial / DISTRUSTED, f"{error}\n")


def work_on_unit(number: int, unit: Unit) -> tuple[int, int]:
    """`tokenize_unit` in a worker process."""
    assert _worker_context is not None, "the pool runs start_worker first"
    tokenizer, request, units_folder, _ = _worker_context
    with remembered():
        return tokenize_unit(tokenizer, fast_encoder_of_worker(), request, units_folder, number, unit)


def tokenize_unit(
    tokenizer: Tokenizer,
    encoder: FastEncoder | None,
    request: Request,
    units_folder: Path,
    number: int,
    unit: Unit,
) -> tuple[int, int]:
    """Write the token file of one unit. Returns its documents and their bytes."""
    dtype = token_dtype(tokenizer)
    skipped = Skipped()
    doc_tokens: list[int] = []
    doc_bytes: list[int] = []
    doc_keys: list[int] = []
    pieces: list[np.ndarray] = []
    documents = read_documents(
        unit, text_keys=request.text_keys, on_error=request.on_error, skipped=skipped, encoding=request.encoding
    )
    end_of_text = np.array([tokenizer.eos_token_id], dtype)
    for batch in batches(documents):
        if encoder:
            encoded = encoder.encode(batch)
        else:
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
        skipped=np.array([skipped.counts[reason] for reason in SKIP_REASONS], np.int64),
        named=np.array(skipped.named, str),
        made_of=np.array(origin_of(unit, origin_of_tokens(tokenizer, fast=encoder is not None))),
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


def origin_of(unit: Unit, tokens: str) -> str:
    """What decides the content of a token file: a unit of text, and `origin_of_tokens`."""
    return f"{place_of(unit)} by {tokens}"


def origin_of_tokens(tokenizer: Tokenizer, *, fast: bool = False) -> str:
    return f"{tokenizer.fingerprint} {tokenizer.eos_token_id}{' in gigatoken' if fast else ''}"


def stored_origin(path: Path) -> str | None:
    """What a token file was made of; None for a file that cannot be read, which has to be made again."""
    try:
        with np.load(path) as stored:
            return str(stored["made_of"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def load_unit(units_folder: Path, number: int, *, without_tokens: bool = False) -> TokenUnit:
    """Read a token file, or only what it says about its documents."""
    with np.load(unit_path(units_folder, number)) as stored:
        tokens = np.empty(0, np.uint16) if without_tokens else stored["tokens"]
        return TokenUnit(tokens=tokens, **{name: stored[name] for name in TokenUnit.__slots__ if name != "tokens"})
