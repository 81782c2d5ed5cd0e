"""Files that a part leaves behind in its folder, for `data join` and `data prepare --status`.

    progress.json    a `Progress`, written again every few seconds while the part runs
    units.npy        a row of `UNIT_ROW` for each unit of the part
    report.json      a `PartReport`, written last: the part is complete

Other machines have written these files, so a file that is damaged or of another form counts as missing.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from llmfoundry_engines.part import Part, part_of_folder
from llmfoundry_engines.shared_folder import PARTS
from llmfoundry_lite.bounded import read_file_at_most
from llmfoundry_lite.data.spelling import LostText, load_lost_text
from llmfoundry_lite.files import open_regular, write_atomically
from llmfoundry_lite.prepare.documents import SKIP_REASONS
from llmfoundry_lite.prepare.listing import Listing, read_json_object
from llmfoundry_lite.prepare.token_files import DISTRUST_FILE, FinishedUnit, PieceRange, TokenizeCounts
from llmfoundry_lite.prepare.token_unit import UNIT_ROW, UnitNumber, format_text_digest, parse_text_digest

T = TypeVar("T", "Progress", "PartReport")

REPORT_FILE = "report.json"
ROWS_FILE = "units.npy"
PROGRESS_FILE = "progress.json"
PROGRESS_SECONDS = 5.0
"""Time between two writes of `progress.json`."""
MAX_ROWS_BYTES = 1 << 30
"""Maximum size of the rows of a part: those of 16 million units."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a part. Bytes are those of the source on disk."""

    part: str
    """The part as the option has it: `3/16`."""
    num_bytes: int
    """Bytes of all its pieces; 0 if they are unknown."""
    done_bytes: int = 0
    """Bytes that are tokenised."""
    new_bytes: int = 0
    """Bytes that this launch has tokenised."""
    seconds: float = 0.0
    """Duration of this launch so far."""
    workers: int
    """Number of processes that tokenise."""
    host: str
    written_at: float = 0.0
    """Time of the last write, in seconds since 1970 by the clock of that host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReport:
    """The report of a complete part."""

    part: str
    """The part as the option has it: `3/16`."""
    first_piece: int
    end_piece: int
    """Number of the piece after the last one of this part."""
    num_pieces: int
    """Number of pieces of the whole source."""
    num_units: int
    rows_digest: str
    """Hash of the rows in `units.npy`."""
    num_bytes: int
    """Bytes on disk of its pieces; 0 if they are unknown."""
    documents: int
    train_tokens: int
    val_tokens: int
    """Tokens of each split, if the threshold of split keys is the one of the request."""
    is_fast: bool
    """Whether the fast encoder has made tokens, which count only as long as no part finds a difference."""
    skipped: list
    """Number of skipped documents for each of SKIP_REASONS."""
    skipped_examples: list
    loss: dict
    """Lost text of all units: the fields of a `LostText`."""
    text_digest: str
    """Digest of the texts of all documents."""
    ignored_files: int
    unreadable: list
    repeated: list
    """The records of the listing, which are the same for all parts."""
    new_documents: int
    new_text_bytes: int
    new_bytes: int
    """Documents, bytes of text and bytes on disk that the last launch has tokenised."""
    seconds: float
    """Duration of the last launch."""
    workers: int
    host: str

    def listing(self) -> Listing:
        """Return what the listing of the source has recorded, without its files."""
        return Listing(num_ignored=self.ignored_files, unreadable=self.unreadable, repeated=self.repeated)

    def lost_text(self) -> LostText:
        """Return the lost text of all units of the part."""
        return load_lost_text(json.dumps(self.loss))


class ProgressFile:
    """Writer of a part's `progress.json`."""

    def __init__(
        self,
        folder: Path,
        part: Part,
        num_bytes: int,
        workers: int,
        store: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Write that the part has begun.

        num_bytes: bytes of its pieces.
        store: called with the path of the file when it is written, to put it where all machines see it.
        """
        self.path = folder / PROGRESS_FILE
        self.store = store
        self.progress = Progress(part=str(part), num_bytes=num_bytes, workers=workers, host=socket.gethostname())
        self.started = time.monotonic()
        self.last_written = self.started
        self.write()

    def add(self, finished: FinishedUnit) -> None:
        """Add a unit whose token file is complete, and write the file if the last time is some seconds ago."""
        self.progress.done_bytes += finished.unit.num_bytes
        if finished.counts is not None:
            self.progress.new_bytes += finished.unit.num_bytes
        if time.monotonic() >= self.last_written + PROGRESS_SECONDS:
            self.write()

    def restart(self) -> None:
        """Begin at 0 again, because units are tokenised once more."""
        self.progress.done_bytes = 0

    def write(self) -> None:
        """Write the file."""
        self.last_written = time.monotonic()
        self.progress.seconds = round(self.last_written - self.started, 3)
        self.progress.written_at = time.time()
        write_atomically(self.path, json.dumps(asdict(self.progress)))
        self.store(self.path)


def write_report(
    folder: Path,
    part: Part,
    pieces: PieceRange,
    num_pieces: int,
    counts: TokenizeCounts,
    listing: Listing,
    progress: Progress,
) -> PartReport:
    """Write the report of a part that is complete, and return it."""
    rows = counts.table.rows
    content = BytesIO()
    np.save(content, rows)
    write_atomically(folder / ROWS_FILE, content.getbuffer())
    report = PartReport(
        part=str(part),
        first_piece=pieces.first,
        end_piece=pieces.end,
        num_pieces=num_pieces,
        num_units=len(rows),
        rows_digest=digest_of_rows(rows),
        num_bytes=pieces.num_bytes,
        documents=int(rows["train_documents"].sum() + rows["val_documents"].sum()),
        train_tokens=int(rows["train_tokens"].sum()),
        val_tokens=int(rows["val_tokens"].sum()),
        is_fast=counts.is_fast,
        skipped=counts.table.skipped.tolist(),
        skipped_examples=counts.table.skipped_examples,
        loss=stored_loss(counts.table.loss),
        text_digest=format_text_digest(counts.table.text_hash),
        ignored_files=listing.num_ignored,
        unreadable=listing.unreadable,
        repeated=listing.repeated,
        new_documents=counts.documents,
        new_text_bytes=counts.text_bytes,
        new_bytes=progress.new_bytes,
        seconds=progress.seconds,
        workers=progress.workers,
        host=progress.host,
    )
    write_atomically(folder / REPORT_FILE, json.dumps(asdict(report), indent=2) + "\n")
    return report


def stored_loss(loss: LostText) -> dict[str, Any]:
    """Return all counts of a lost text in JSON, also those of rare characters, which `LostText.as_text` leaves out.

    Their order is kept, because it decides between equally frequent characters in the summary.
    """
    counts: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(LostText)}
    return counts | {"kinds": dict(loss.kinds), "examples": dict(loss.examples)}


def digest_of_rows(rows: np.ndarray) -> str:
    """Return a hash of the rows of a part."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).tobytes())


def load_report(folder: Path) -> PartReport | None:
    """Load the report of a part; None if the part is not complete."""
    report = build_if_valid(PartReport, read_json_object(folder / REPORT_FILE))
    if report is None or not is_consistent(report):
        return None
    is_distrusted = report.is_fast and (folder.parent.parent / DISTRUST_FILE).exists()
    return None if is_distrusted else report


def is_consistent(report: PartReport) -> bool:
    """Return whether the lists and counts of a report are of the form that `write_report` gives them."""
    sentences = [*report.skipped_examples, *report.unreadable, *report.repeated]
    if not all(isinstance(sentence, str) for sentence in sentences):
        return False
    has_counts = len(report.skipped) == len(SKIP_REASONS) and all(type(count) is int for count in report.skipped)
    if not has_counts or not 0 <= report.first_piece <= report.end_piece <= report.num_pieces:
        return False
    try:
        parse_text_digest(report.text_digest)
        return 0 <= report.lost_text().lost_fraction <= 1
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def load_progress(folder: Path) -> Progress | None:
    """Load the progress of a part; None if it has not begun."""
    return build_if_valid(Progress, read_json_object(folder / PROGRESS_FILE))


def build_if_valid(record_class: type[T], content: dict[str, Any]) -> T | None:
    """Build a record from JSON; None unless it has all fields, and only values of their types."""
    if set(content) != {field.name for field in fields(record_class)}:
        return None
    for field in fields(record_class):
        types = (int, float) if field.type is float else field.type
        if not isinstance(content[field.name], types):  # pyright: ignore[reportArgumentType]
            return None
    return record_class(**content)


def load_rows(folder: Path, report: PartReport) -> np.ndarray | None:
    """Load the rows of a part's units; None if they are missing, or are not those of the report."""
    path = folder / ROWS_FILE
    try:
        with open(path, "rb", opener=open_regular) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            content = read_file_at_most(file, MAX_ROWS_BYTES, str(path), "a list of units")
    except (OSError, ValueError, EOFError):
        return None
    # The size is compared before numpy allocates memory by the shape.
    if dtype != UNIT_ROW or shape != (report.num_units,) or len(content) != report.num_units * UNIT_ROW.itemsize:
        return None
    rows = np.frombuffer(content, UNIT_ROW)
    return rows if digest_of_rows(rows) == report.rows_digest else None


def find_parts(partial: Path) -> list[Part]:
    """Return all parts that have begun, in order of their numbers."""
    folder = partial / PARTS
    if not folder.is_dir():
        return []
    parts = [part_of_folder(path.name) for path in folder.iterdir()]
    return sorted(part for part in parts if part is not None)


def file_names(rows: np.ndarray) -> Iterator[str]:
    """Yield the names of the token files of some units."""
    for row in rows:
        yield UnitNumber(int(row["piece"]), int(row["unit"])).file_name
