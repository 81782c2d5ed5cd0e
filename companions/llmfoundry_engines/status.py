"""`data prepare --status OUT`: what each part has done, how fast, and what is left. Also finds the complete parts."""

import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from llmfoundry_engines.part import Part
from llmfoundry_engines.places import open_place
from llmfoundry_engines.reports import (
    PartReport,
    Progress,
    file_names,
    find_parts,
    load_progress,
    load_report,
    load_rows,
)
from llmfoundry_engines.shared_folder import PARTS, load_shared
from llmfoundry_lite.errors import DataError, mask_urls, printable
from llmfoundry_lite.prepare.out_folder import PARTIAL
from llmfoundry_lite.prepare.speed import describe_rest_of_work
from llmfoundry_lite.prepare.summary import SUMMARY_FILE
from llmfoundry_lite.tables import Table

SILENT_SECONDS = 120
"""Age of the progress of a part from which on it counts as stopped. It is written every few seconds, but one unit with
a long document may take longer."""
MAX_NAMED = 5
"""Number of parts that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartStatus:
    """State of one part."""

    part: Part
    report: PartReport | None
    """Its report, if it is complete."""
    progress: Progress | None
    """Its progress, if it has begun."""
    age_seconds: float
    """Time since the progress was written; 0 if the part has not begun."""

    @property
    def is_running(self) -> bool:
        """Whether the part is being tokenised, as far as one can tell from the age of its progress."""
        return self.report is None and self.progress is not None and self.age_seconds < SILENT_SECONDS

    @property
    def done_bytes(self) -> int:
        """Bytes of the source that are tokenised."""
        if self.report is not None:
            return self.report.num_bytes
        return self.progress.done_bytes if self.progress else 0

    def describe(self) -> str:
        """Describe the state: "complete", "running", "stopped" or "not begun"."""
        if self.report is not None:
            return "complete"
        if self.progress is None:
            return "not begun"
        return "running" if self.is_running else "stopped"


def find_complete(partial: Path, existing_names: set[str]) -> list[tuple[PartReport, np.ndarray]]:
    """Return the report and the rows of each part, in order. Raises DataError, which names them, if parts are missing.

    `existing_names` are those of all token files.

    All parts must be of one number of parts. If there are parts of several, that number is taken of which the fewest
    are missing.
    """
    parts = choose_parts(partial)
    if not parts:
        raise DataError(
            f"{partial.parent} has no parts to join; prepare them there first, with `data prepare … --part 1/N`"
        )
    complete: list[tuple[PartReport, np.ndarray]] = []
    reasons: list[str] = []
    for part in parts:
        status = load_status(partial, part)
        report = status.report
        rows = None if report is None else load_rows(partial / PARTS / part.folder_name, report)
        if report is None or rows is None:
            reasons.append(f"{part} {describe_incomplete(status)}")
        elif not existing_names.issuperset(file_names(rows)):
            reasons.append(f"{part} lacks some of its token files")
        else:
            complete.append((report, rows))
    if reasons:
        named = "; ".join(reasons[:MAX_NAMED])
        others = f"; and {len(reasons) - MAX_NAMED} more" if len(reasons) > MAX_NAMED else ""
        raise DataError(
            f"{partial.parent} cannot be joined: {len(reasons)} of {len(parts)} parts not complete: {named}{others}; "
            "run these with `data prepare … --part`, then join"
        )
    check_pieces(partial.parent, [report for report, _ in complete])
    return complete


def check_pieces(out: Path, reports: Sequence[PartReport]) -> None:
    """Raise DataError unless the pieces of all parts, in order, are those of the source."""
    firsts = [report.first_piece for report in reports]
    ends = [report.end_piece for report in reports]
    if [*firsts, reports[-1].num_pieces] != [0, *ends]:
        raise DataError(
            f"{out} cannot be joined: by their reports, its parts are not consecutive pieces of one source; remove "
            f"{out / PARTIAL / PARTS} and run all parts again, which keep what is tokenised"
        )


def describe_incomplete(status: PartStatus) -> str:
    """Describe how far a part is that is not complete, for an error: "is 43 % done, as of 12 s ago"."""
    if status.progress is None:
        return "has not begun"
    share = share_text(status.progress.done_bytes, status.progress.num_bytes)
    return f"is {share} done, as of {status.age_seconds:.0f} s ago"


def choose_parts(partial: Path) -> list[Part]:
    """Return all parts of the number of parts of which the fewest are missing; empty if no part has begun."""
    begun = find_parts(partial)
    if not begun:
        return []
    num_complete: Counter[int] = Counter()
    for part in begun:
        num_complete[part.count] += load_report(partial / PARTS / part.folder_name) is not None
    count = min(num_complete, key=lambda count: (count - num_complete[count], count))
    return [Part(number, count) for number in range(1, count + 1)]


def load_status(partial: Path, part: Part) -> PartStatus:
    """Load the state of a part."""
    folder = partial / PARTS / part.folder_name
    progress = load_progress(folder)
    age_seconds = 0.0 if progress is None else max(0.0, time.time() - progress.written_at)
    return PartStatus(part=part, report=load_report(folder), progress=progress, age_seconds=age_seconds)


# The command


def print_status(out: str | Path, console: Console) -> None:
    """Print a table of the parts of a preparation, and a line with its speed and the time that is left."""
    with open_place(out) as place, place.errors():
        place.pull()
        if (place.out / SUMMARY_FILE).is_file():
            line = place.text(f"{place.out} is complete: its parts are joined")
            console.print(printable(line), highlight=False, markup=False)
            return
        partial = place.out / PARTIAL
        input_state = load_shared(partial).record["input"]
        statuses = [load_status(partial, part) for part in choose_parts(partial)]
        if not statuses:
            raise DataError(f"{place.out} has no parts; begin one with `data prepare … --part 1/N`")
    table_of(statuses).print(console)
    console.print(
        "\n".join(describe_rest(statuses, input_state.get("bytes", 0), str(out))), highlight=False, markup=False
    )


def table_of(statuses: list[PartStatus]) -> Table:
    """Build the table of parts."""
    rows = []
    for status in statuses:
        record = status.report or status.progress
        row = [str(status.part), status.describe(), "", "", "", ""]
        if record is not None:
            is_complete = status.report is not None
            share = "100 %" if is_complete else share_text(status.done_bytes, record.num_bytes)
            row[2:] = [share, f"{record.num_bytes / 1e6:,.1f} MB", speed_text(record), printable(record.host)]
        rows.append(row)
    return Table("", ["part", "state", "done", "of", "MB/s a core", "host"], rows, (2, 3, 4))


def share_text(done_bytes: int, num_bytes: int) -> str:
    """Format the share of bytes that are done. The size of a stream is unknown."""
    return f"{100 * done_bytes / num_bytes:.0f} %" if num_bytes else "?"


def speed_of(record: PartReport | Progress) -> float | None:
    """Return the bytes of the source that one core tokenises in a second; None if nothing was measured."""
    core_seconds = record.seconds * record.workers
    return record.new_bytes / core_seconds if core_seconds and record.new_bytes else None


def speed_text(record: PartReport | Progress) -> str:
    """Format the speed of a part."""
    speed = speed_of(record)
    return "" if speed is None else f"{speed / 1e6:.2f}"


def describe_rest(statuses: list[PartStatus], total_bytes: int, out: str) -> list[str]:
    """Return lines that say how much is done, how fast, and how long the rest takes on the machines that run now.

    total_bytes: size of the source; 0 if it is unknown.
    out: the path or URL that was given.
    """
    done_bytes = sum(status.done_bytes for status in statuses)
    num_complete = sum(status.report is not None for status in statuses)
    lines = [
        f"{num_complete} of {len(statuses)} parts are complete; {share_text(done_bytes, total_bytes)} of "
        f"{total_bytes / 1e6:,.1f} MB is tokenised"
    ]
    if num_complete == len(statuses):
        lines.append(f"next: {describe_join(out)}")

    # The speed is that of all cores of all launches, so long parts count for more.
    records = [status.report or status.progress for status in statuses]
    measured = [record for record in records if record is not None and speed_of(record) is not None]
    if not measured:
        return lines
    core_seconds = sum(record.seconds * record.workers for record in measured)
    new_bytes = sum(record.new_bytes for record in measured)
    num_cores = sum(s.progress.workers for s in statuses if s.progress is not None and s.is_running)
    lines.append(describe_rest_of_work(new_bytes, core_seconds, total_bytes - done_bytes, num_cores))
    return lines


def describe_join(out: str) -> str:
    """Return the command that joins the parts in `out`, to be typed into a shell. Credentials in a URL are masked."""
    return f"llmfoundry-lite data join {shlex.quote(mask_urls(out))}"
