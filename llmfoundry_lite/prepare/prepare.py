"""`llmfoundry-lite data prepare`: text -> tokens -> MDS shards.

    OUT/train, OUT/val     MDS: one column `tokens`, `ndarray:uint16:N` (uint32 for vocabularies above 65,536)
    OUT/tokenizer          the tokenizer, in Hugging Face layout
    OUT/summary.json       a `Summary`; written last, so if it exists, everything else is complete
    OUT/.partial           work in progress: the request, the tokenizer, and one token file for each unit

There are two steps. First, each unit of the source becomes a token file, in any order, by any worker. A unit whose file
exists is not tokenised again. Then samples are cut from the token files, in order, and written into shards. The second
step depends only on the files, so neither the number of workers nor a kill at any moment changes a byte of the result.
The cost is disk space: the tokens are stored twice until the end. The companion `llmfoundry_engines` divides both steps
among machines.

Each document's tokens are followed by the end-of-text token. All documents of a split are concatenated in the order of
the source, and cut into samples. Only the last tokens of a split, too few for a sample, are dropped, and counted. The
column has a fixed shape, so MDS stores neither size nor shape with each sample.
"""

import itertools
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from llmfoundry_lite.data.spelling import LostText
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import check_is_path, rename_unless_present, sync_folder
from llmfoundry_lite.prepare.documents import Document, Skipped, read_documents
from llmfoundry_lite.prepare.listing import Listing
from llmfoundry_lite.prepare.out_folder import (
    build_request_record,
    check_outside_sources,
    check_unchanged,
    discard_preparation,
    disk_errors_as_data_errors,
    find_finished,
    only_preparation_in,
    open_partial,
    publish,
)
from llmfoundry_lite.prepare.request import TRAIN_PREFIX, PrepareRequest
from llmfoundry_lite.prepare.samples import PackResult, pack_samples
from llmfoundry_lite.prepare.sources import Source, open_source
from llmfoundry_lite.prepare.speed import EarlyEstimate
from llmfoundry_lite.prepare.splits import initial_threshold, raise_threshold
from llmfoundry_lite.prepare.summary import FORMAT_VERSION, MAX_SHOWN, Summary, TokenizerSummary
from llmfoundry_lite.prepare.token_files import (
    MAX_LOST_TEXT,
    leave_if_imported_by_worker,
    token_dtype,
    tokenize_source,
    tokenizer_identity,
)
from llmfoundry_lite.ranks.rank import count_usable_cores

TOKENIZER_SAMPLE_BYTES = 128 * 1024 * 1024
"""Limit of the text on which a tokenizer is trained, in UTF-8 bytes. It is taken evenly from the source."""
RESERVED_BYTES_PER_TOKEN = 32
"""Upper bound of a tokenizer's average bytes per token, by which `sample_for_training` reserves validation text."""


def prepare(
    request: PrepareRequest,
    out: str | Path,
    *,
    num_workers: int | None = None,
    max_lost_text: float = MAX_LOST_TEXT,
    overwrite: bool = False,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Tokenise documents into samples and write them as MDS shards. Resumes the work of a launch that was killed.

    request: the sources, the tokenizer, and everything else that decides the result.
    out: folder of the result, which is created. The companion's `prepare_in_bucket` takes a URL.
    num_workers: number of processes that tokenise, by default one for each core that this process may use. A script
        that calls this function with more than one needs the usual `if __name__ == "__main__":`.
    max_lost_text: fraction of characters that the tokenizer may lose; `data/spelling.py` defines what is lost.
    overwrite: discard an earlier preparation in `out`. Without it, a finished preparation of the same request is
        returned, and one of another request is an error.
    notify: called with a sentence when work is skipped or resumed.

    Returns the summary, which is also in `out`. Raises DataError for any fault of the input, request or disk. A
    preparation that fails writes no summary.
    """
    leave_if_imported_by_worker()
    started = time.monotonic()
    check_is_path(out)
    out = Path(out).expanduser()
    opened = open_input(request, out)

    with disk_errors_as_data_errors(out), only_preparation_in(out):
        # Return a finished preparation of the same request.
        if overwrite:
            discard_preparation(out)
        finished = find_finished(out, opened.record, opened.existing_tokenizer)
        if finished:
            notify(f"{out} is complete: the same preparation finished there before")
            return finished

        # Do the work, in the folder of work in progress: tokenise (step 1), then pack samples into shards (step 2).
        request, source = opened.request, opened.source
        notify_of_duplicates(source.listing.repeated, notify)
        partial = open_partial(out, opened.record, opened.existing_tokenizer, notify)
        with progress_bars(show_progress) as bars:
            tokenizer = provide_tokenizer(partial, opened.existing_tokenizer, request, source, bars)
            workers = num_workers or count_usable_cores()
            estimate = EarlyEstimate(source.total_bytes, workers, notify)
            counts = tokenize_source(
                source, request, tokenizer, partial, workers, bars, max_lost_text, notify, on_unit=estimate.add
            )
            packed = pack_samples(partial, counts.table, request, tokenizer, bars)
        check_unchanged(source, opened.record)

        # Publish the result.
        summary = build_summary(
            opened.record,
            request,
            tokenizer,
            source.listing,
            packed,
            counts.table.loss,
            seconds=time.monotonic() - started,
            documents=counts.documents,
            text_bytes=counts.text_bytes,
        )
        publish(partial, out, summary)
    return summary


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedInput:
    """The input of a preparation: its sources and tokenizer, opened."""

    request: PrepareRequest
    """The request, with the source's default as `val_fraction` if it had none."""
    source: Source
    existing_tokenizer: Tokenizer | None
    """The tokenizer that the request names; None if it is to be trained."""
    record: dict[str, Any]
    """The request with the current state of the input, see `build_request_record`."""


def open_input(request: PrepareRequest, out: Path, stored_list: Path | None = None) -> OpenedInput:
    """Open the sources and the tokenizer of a request. Nothing is written. Raises DataError if one is not there.

    `stored_list` is that of `open_source`.
    """
    check_outside_sources(out, request.sources)
    source = open_source(request, stored_list)
    if request.val_fraction is None:
        request = replace(request, val_fraction=source.val_fraction)
    existing_tokenizer = None
    if not request.tokenizer.startswith(TRAIN_PREFIX):
        existing_tokenizer = load_tokenizer(request.tokenizer)
    record = build_request_record(request, source, existing_tokenizer)
    return OpenedInput(request=request, source=source, existing_tokenizer=existing_tokenizer, record=record)


def build_summary(
    record: dict[str, Any],
    request: PrepareRequest,
    tokenizer: Tokenizer,
    listing: Listing,
    packed: PackResult,
    loss: LostText,
    *,
    seconds: float,
    documents: int,
    text_bytes: int,
) -> Summary:
    """Build the summary of a preparation.

    record: the request with the state of its input.
    listing: which files were not read.
    packed, loss: the result of step 2, and the lost text of all units.
    seconds, documents, text_bytes: duration of the work, and the documents that were tokenised in that time.
    """
    return Summary(
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
        splits=packed.splits,
        skipped=packed.skipped,
        ignored_files=listing.num_ignored,
        seconds=round(seconds, 3),
        documents_per_second=round(documents / seconds, 1),
        text_bytes_per_second=round(text_bytes / seconds, 1),
        skipped_examples=tuple(packed.skipped_examples),
        unreadable=tuple(listing.unreadable),
        repeated=tuple(listing.repeated),
        lost_text=loss.as_json(),
        text_digest=packed.text_digest,
    )


def notify_of_duplicates(sentences: Sequence[str], notify: Callable[[str], None]) -> None:
    """Notify the user of files and folders that have several names and are read only once.

    `sentences` are those of `Listing.repeated`. The first MAX_SHOWN are passed on, and then the number of others.
    """
    for sentence in sentences[:MAX_SHOWN]:
        notify(f"{sentence}, so it is read once")
    if len(sentences) > MAX_SHOWN:
        notify(f"{len(sentences) - MAX_SHOWN:,} more names of what is read already")


def provide_tokenizer(
    partial: Path, existing_tokenizer: Tokenizer | None, request: PrepareRequest, source: Source, bars: Progress
) -> Tokenizer:
    """Put the tokenizer of a preparation into the folder `tokenizer` in `partial`, and load it from there.

    existing_tokenizer: the tokenizer that the request names, which is saved. If it is None, a tokenizer is trained on
        texts of `source`, with the size of the vocabulary in `request.tokenizer`, such as train:32768.

    If an earlier launch has put the tokenizer there, it is kept. Of several parts that train it at the same time, the
    first one to finish puts it there, and all use that one. The result is loaded from the folder in any case, because
    worker processes load it from there too, and must have the same.
    """
    # Discard the tokenizer of an earlier launch if the one that the request names has changed since.
    folder = partial / "tokenizer"
    if folder.is_dir() and existing_tokenizer:
        is_same = tokenizer_identity(load_tokenizer(folder)) == tokenizer_identity(existing_tokenizer)
        if not is_same:
            shutil.rmtree(folder)

    # Save the tokenizer under a name of this process first, so that a folder of the right name is always complete.
    if not folder.is_dir():
        tokenizer = existing_tokenizer
        if tokenizer is None:
            task = bars.add_task("training the tokenizer", total=None)
            texts = sample_for_training(source, request)
            tokenizer = train_tokenizer(texts, int(request.tokenizer.removeprefix(TRAIN_PREFIX)))
            bars.remove_task(task)
        unfinished = partial / f"tokenizer.{socket.gethostname()}-{os.getpid()}.unfinished"
        tokenizer.save(unfinished)
        sync_folder(unfinished)
        rename_unless_present(unfinished, folder)
    return load_tokenizer(folder)


def sample_for_training(source: Source, request: PrepareRequest) -> list[str]:
    """Read texts of the training split on which to train a tokenizer, about TOKENIZER_SAMPLE_BYTES of them.

    They are from every n-th unit if the size of the source is known, and from the beginning of a stream otherwise. A
    source of 500 MiB is read from every fourth unit.

    Documents of the validation split are left out, so that they do not influence the tokenizer. Which these are is
    decided only after tokenising: if the validation fraction does not give one sample, `samples.choose_threshold` holds
    out more documents. So this leaves out enough of them by a safe estimate, RESERVED_BYTES_PER_TOKEN.

    Raises DataError if there is no document.
    """
    # Read documents from units that are evenly spread.
    total_bytes = source.total_bytes or 0
    step = max(1, -(-total_bytes // TOKENIZER_SAMPLE_BYTES))  # rounded up
    documents: list[Document] = []
    num_bytes = 0
    for unit in itertools.islice(source.units(), 0, None, step):
        for document in read_documents(unit, request, Skipped()):
            documents.append(document)
            num_bytes += document.num_bytes
        if num_bytes >= TOKENIZER_SAMPLE_BYTES:
            break
    if not documents:
        raise DataError(f"{' '.join(request.sources)}: no document to train a tokenizer on")

    # Leave out those that may be held out for validation: documents with a split key below the threshold.
    keys = np.array([document.split_key for document in documents], np.uint64)
    sizes = np.array([document.num_bytes for document in documents], np.int64)
    threshold = initial_threshold(request)
    if threshold > 0:
        bytes_of_a_sample = request.max_seq_len * RESERVED_BYTES_PER_TOKEN
        threshold = raise_threshold(threshold, keys, sizes, bytes_of_a_sample)
    return [document.text for document, key in zip(documents, keys, strict=True) if key >= threshold]


def progress_bars(show: bool) -> Progress:
    """Build the progress display, a line for each step on standard error. If not `show`, nothing is displayed."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        disable=not show,
    )
