"""`data prepare … --part 3/16`: tokenise the third of sixteen parts of a source, on any of several machines.

Every part lists the source, or takes the list of a bucket that the first part has stored. It compares the state of the
source with what the first part has stored, so that all parts read the same.
Then it tokenises its pieces into the folder that all parts share, and leaves a report. `join.py` makes the shards.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from llmfoundry_engines.bucket_tokens import BucketTokens
from llmfoundry_engines.part import Part, choose_pieces
from llmfoundry_engines.places import Place, naming, open_place
from llmfoundry_engines.reports import (
    REPORT_FILE,
    ROWS_FILE,
    PartReport,
    ProgressFile,
    file_names,
    load_report,
    load_rows,
    write_report,
)
from llmfoundry_engines.scratch import Scratch
from llmfoundry_engines.shared_folder import PARTS, only_this_part, open_shared
from llmfoundry_engines.stored_list import OBJECTS_FILE
from llmfoundry_lite.data.spelling import LostText, describe_lost_text
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.out_folder import PARTIAL, REQUEST_FILE, check_unchanged, find_finished
from llmfoundry_lite.prepare.prepare import (
    OpenedInput,
    notify_of_duplicates,
    open_input,
    progress_bars,
    provide_tokenizer,
)
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import MAX_UNIT_BYTES, TARGET_UNITS, choose_unit_bytes
from llmfoundry_lite.prepare.token_files import (
    DISTRUST_FILE,
    MAX_LOST_TEXT,
    PieceRange,
    TokenizeCounts,
    leave_if_imported_by_worker,
    token_dtype,
    tokenize_source,
)
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.ranks.rank import count_usable_cores

UNIT_MARGIN_BYTES = 1 << 20
"""Room in a token file for what it has beside its tokens: 24 bytes for each document."""


def prepare_part(
    request: PrepareRequest,
    out: str | Path,
    part: Part,
    *,
    num_workers: int | None = None,
    max_lost_text: float = MAX_LOST_TEXT,
    overwrite: bool = False,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
) -> PartReport | None:
    """Tokenise one part of a source. Resumes the work of a launch that was killed.

    request: the request, which must be the same for all parts.
    out: folder of the result, which all parts share, or its URL in a bucket.
    num_workers: number of processes that tokenise, by default one for each core that this process may use.
    max_lost_text: fraction of characters that the tokenizer may lose. A part that loses more is only reported, because
        `data join` decides by the whole text.
    overwrite: discard an earlier preparation in `out` once the input is open. No other part may have begun.
    notify: called with a sentence when work is skipped, or about lost text.
    scratch: where files on their way into a bucket are, and how many bytes of them.

    Returns the report of the part; None if all parts have been joined already. Raises DataError for any fault of the
    input, request or disk, and if parts of another request, input, tokenizer or release share the folder.
    """
    leave_if_imported_by_worker()
    with open_place(out, scratch) as place:
        check_outside_url_sources(str(out), request.sources)
        opened = open_input(request, place.out, place.out / PARTIAL / OBJECTS_FILE)
        source = opened.source
        return prepare_opened_part(
            opened,
            place,
            part,
            choose_pieces(source.pieces(), source.total_bytes or 0, part),
            num_workers=num_workers or count_usable_cores(),
            max_lost_text=max_lost_text,
            overwrite=overwrite,
            show_progress=show_progress,
            notify=naming(place, notify),
        )


def check_outside_url_sources(out: str, sources: Sequence[str]) -> None:
    """Raise DataError if `--out` is below the URL of a source, because the next launch would read it as input."""
    for source in sources:
        is_url = "://" in source
        if is_url and f"{out.rstrip('/')}/".startswith(f"{source.rstrip('/')}/"):
            raise DataError(
                f"--out {out} lies in the source {source}, which is read again by every launch; choose another --out"
            )


def prepare_opened_part(
    opened: OpenedInput,
    place: Place,
    part: Part,
    pieces: PieceRange,
    *,
    num_workers: int,
    max_lost_text: float,
    overwrite: bool = False,
    show_progress: bool,
    notify: Callable[[str], None],
) -> PartReport | None:
    """Tokenise some pieces of a source as one part. The arguments and the result are those of `prepare_part`."""
    source = opened.source
    out = place.out
    with place.in_use(is_shared=True):
        place.pull(part)
        if overwrite:
            place.discard()
            place.pull(part)
        if find_finished(out, opened.record, opened.existing_tokenizer, f"remove {out} first"):
            place.remove_partial()
            notify(f"{out} is complete: all parts were joined there before")
            return None
        partial = open_shared(out, opened)
        if place.share(REQUEST_FILE):
            open_shared(out, opened)  # another part was faster: compare with its request
        source.store_list(partial / OBJECTS_FILE)
        folder = partial / PARTS / part.folder_name

        with only_this_part(folder, part):
            # Leave if the part is complete.
            report = load_report(folder)
            has_tokenizer = (partial / "tokenizer").is_dir()
            if report is not None and has_tokenizer and has_token_files(folder, report, place.tokens):
                notify(f"part {part} is complete already")
                return report

            # Tokenise. If another part finds meanwhile that the fast encoder differs, do it again without that.
            notify_of_duplicates(source.listing.repeated, notify)
            progress = ProgressFile(folder, part, pieces.num_bytes, num_workers, place.store)
            with progress_bars(show_progress) as bars:
                tokenizer = provide_tokenizer(partial, opened.existing_tokenizer, opened.request, source, bars)
                if place.share_tokenizer():
                    tokenizer = load_tokenizer(partial / "tokenizer")  # another part was faster
                if isinstance(place.tokens, BucketTokens):
                    limit_scratch(place.tokens, pieces, opened, tokenizer, num_workers)

                def tokenize() -> TokenizeCounts:
                    progress.restart()
                    counts = tokenize_source(
                        source,
                        opened.request,
                        tokenizer,
                        partial,
                        num_workers,
                        bars,
                        1.0,  # `data join` rejects a tokenizer that loses text
                        notify,
                        pieces,
                        progress.add,
                        place.tokens,
                    )
                    place.tokens.flush()
                    return counts

                counts = tokenize()
                place.share_if_present(DISTRUST_FILE)
                if counts.is_fast and (partial / DISTRUST_FILE).exists():
                    counts = tokenize()
            check_unchanged(source, opened.record, f"remove {partial} and run all parts again")

            # Report.
            num_pieces = sum(1 for _ in source.pieces())
            progress.write()
            report = write_report(folder, part, pieces, num_pieces, counts, source.listing, progress.progress)
            place.store(folder / ROWS_FILE)
            place.store(folder / REPORT_FILE)
            notify_of_lost_text(part, counts.table.loss, opened.request, max_lost_text, notify)
    return report


def limit_scratch(
    tokens: BucketTokens, pieces: PieceRange, opened: OpenedInput, tokenizer: Tokenizer, num_workers: int
) -> None:
    """Reserve scratch space for units by their usual maximum. Raises DataError if the limit is below what is needed.

    A token has at least one byte of text, so that the tokens of a unit take at most its size times that of a token. A
    unit may be larger than usual if it ends with a long document.
    """
    unit_bytes = choose_unit_bytes(opened.source.total_bytes or MAX_UNIT_BYTES * TARGET_UNITS)
    tokens.pieces = pieces
    tokens.room_bytes = unit_bytes * token_dtype(tokenizer).itemsize + UNIT_MARGIN_BYTES
    tokens.space.require(num_workers * tokens.room_bytes, f"{num_workers} processes that tokenise (--num-workers)")


def has_token_files(folder: Path, report: PartReport, tokens: TokenFolder) -> bool:
    """Return whether all token files of a complete part are there."""
    rows = load_rows(folder, report)
    if rows is None:
        return False
    return tokens.names().issuperset(file_names(rows))


def notify_of_lost_text(
    part: Part, loss: LostText, request: PrepareRequest, max_lost_text: float, notify: Callable[[str], None]
) -> None:
    """Notify the user if the tokenizer loses more of a part's text than `data join` accepts of the whole."""
    if loss.lost_fraction > max_lost_text:
        notify(
            f"warning: part {part}: by tokenizer {request.tokenizer} {describe_lost_text(loss.as_json())}; "
            f"data join refuses the result if all parts together lose more than {100 * max_lost_text:g} %"
        )
