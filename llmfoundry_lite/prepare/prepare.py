"""Text to tokens to MDS shards: what `llmfoundry-lite data prepare` does.

    OUT/train, OUT/val     MDS: one column `tokens`, `ndarray:uint16:N` (uint32 for vocabularies above 65,536)
    OUT/tokenizer          the tokenizer, in Hugging Face layout
    OUT/summary.json       a `Summary`; written last, so where it is, the rest is whole
    OUT/.partial           work in progress: what was asked for, the tokenizer, one file of tokens per unit

It works in two steps. First each unit of the source becomes a file of tokens, in any order, by any worker; a unit
whose file exists is never done again. Then one pass over those files, in order, cuts samples and writes shards.
The second step depends on the files alone, so neither the number of workers nor a kill at any moment changes a byte
of the result. The price is disk space: the tokens are stored twice until the end.

A document is its tokens followed by the end-of-text token. Samples are cut from the documents, joined in the source's
order. Only the last piece of each split, which does not fill a sample, is dropped, and it is counted. The column has a
fixed shape, so MDS stores neither size nor shape with each sample.
"""

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import sync_folder
from llmfoundry_lite.prepare.documents import Document, Skipped, read_documents
from llmfoundry_lite.prepare.out_folder import (
    check_unchanged,
    discard,
    disk_errors_as_data_errors,
    find_finished,
    only_preparation_in,
    open_partial,
    publish,
    record_of,
    refuse_within_source,
)
from llmfoundry_lite.prepare.request import TRAIN_PREFIX, PrepareRequest
from llmfoundry_lite.prepare.samples import pack, raise_threshold, threshold_of
from llmfoundry_lite.prepare.sources import Source, open_source
from llmfoundry_lite.prepare.summary import FORMAT_VERSION, MAX_SHOWN, Summary, TokenizerSummary
from llmfoundry_lite.prepare.token_files import (
    MAX_LOST_TEXT,
    leave_if_imported_by_worker,
    origin_of_tokens,
    token_dtype,
    tokenize,
)
from llmfoundry_lite.ranks.rank import count_usable_cores

TOKENIZER_SAMPLE_BYTES = 128 * 1024 * 1024
"""Most text on which a tokenizer is trained, taken evenly from the source."""
RESERVED_BYTES_PER_TOKEN = 32
"""Bytes for a token: more than any tokenizer packs into one on average. See `sample_for_training`."""


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
    """Tokenise documents into samples and write them as MDS; carry on where a killed launch stopped.

    `num_workers` processes, by default one per core this process may use (a script that calls this needs the usual
    `if __name__ == "__main__":` unless it is 1). `max_lost_text` is the share of characters that the tokenizer may
    lose, as `data/spelling.py` counts them. `overwrite` discards what an earlier preparation left in `out`.
    `notify` gets a sentence when work is skipped or continued. Raises DataError for any fault of input, request or
    disk, and then nothing in `out` looks finished.
    """
    leave_if_imported_by_worker()
    started = time.monotonic()
    out = Path(out).expanduser()
    refuse_within_source(out, request.sources)
    source = open_source(request)
    if request.val_fraction is None:
        request = replace(request, val_fraction=source.val_fraction)
    given = None  # the tokenizer of the request, unless it is to be trained
    if not request.tokenizer.startswith(TRAIN_PREFIX):
        given = load_tokenizer(request.tokenizer)
    record = record_of(request, source, given)
    listing = source.listing

    with disk_errors_as_data_errors(out), only_preparation_in(out):
        if overwrite:
            discard(out)
        finished = find_finished(out, record, given)
        if finished:
            notify(f"{out} is complete: the same preparation finished there before")
            return finished
        tell_repeated(listing.repeated, notify)
        partial = open_partial(out, record, given, notify)
        with progress_bars(show_progress) as bars:
            tokenizer = provide_tokenizer(partial, given, request, source, bars)
            workers = num_workers or count_usable_cores()
            work = tokenize(source, request, tokenizer, partial, workers, bars, max_lost_text, notify)
            packed = pack(partial, work.num_units, request, tokenizer, bars)
        check_unchanged(source, record)

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
            splits=packed.splits,
            skipped=packed.skipped,
            ignored_files=listing.num_ignored,
            seconds=round(seconds, 3),
            documents_per_second=round(work.documents / seconds, 1),
            text_bytes_per_second=round(work.text_bytes / seconds, 1),
            skipped_examples=tuple(packed.named),
            unreadable=tuple(listing.unreadable),
            repeated=tuple(listing.repeated),
            lost_text=work.loss.as_json(),
        )
        publish(partial, out, summary)
    return summary


def tell_repeated(sentences: Sequence[str], notify: Callable[[str], None]) -> None:
    """Notify of files and folders that have several names; `sentences` are those of `Listing.repeated`."""
    for sentence in sentences[:MAX_SHOWN]:
        notify(f"{sentence}, so it is read once")
    if len(sentences) > MAX_SHOWN:
        notify(f"{len(sentences) - MAX_SHOWN:,} more names of what is read already")


def provide_tokenizer(
    partial: Path, given: Tokenizer | None, request: PrepareRequest, source: Source, bars: Progress
) -> Tokenizer:
    """Load the tokenizer in `.partial/tokenizer`. An earlier launch left it, or it is the given one, or trained now.

    It is loaded from there in any case, so that this process and its workers have the same.
    """
    folder = partial / "tokenizer"
    if folder.is_dir() and given:
        is_same = origin_of_tokens(load_tokenizer(folder)) == origin_of_tokens(given)
        if not is_same:
            shutil.rmtree(folder)

    if not folder.is_dir():
        tokenizer = given
        if tokenizer is None:
            task = bars.add_task("training the tokenizer", total=None)
            texts = sample_for_training(source, request)
            tokenizer = train_tokenizer(texts, int(request.tokenizer.removeprefix(TRAIN_PREFIX)))
            bars.remove_task(task)
        unfinished = partial / "tokenizer.unfinished"
        tokenizer.save(unfinished)
        sync_folder(unfinished)
        unfinished.rename(folder)
    return load_tokenizer(folder)


def sample_for_training(source: Source, request: PrepareRequest) -> list[str]:
    """Read documents of the training split to train a tokenizer on, at most TOKENIZER_SAMPLE_BYTES of them.

    A source of known size gives every n-th unit, a stream its beginning. If the validation fraction alone does not give
    one sample, `samples.choose_threshold` will hold out the documents with the next lowest split keys too. That is
    decided after tokenising, so enough of those stay out of the training sample here, by a safe guess of tokens per
    byte.
    """
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

    keys = np.array([document.split_key for document in documents], np.uint64)
    sizes = np.array([document.num_bytes for document in documents], np.int64)
    threshold = threshold_of(request)
    if threshold > 0:
        bytes_of_a_sample = request.max_seq_len * RESERVED_BYTES_PER_TOKEN
        threshold = raise_threshold(threshold, keys, sizes, bytes_of_a_sample)
    return [document.text for document, key in zip(documents, keys, strict=True) if key >= threshold]


def progress_bars(show: bool) -> Progress:
    """Build the progress display: a line for each step on standard error, with the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
        disable=not show,
    )
