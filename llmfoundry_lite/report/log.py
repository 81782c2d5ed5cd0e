"""The log of a run, metrics.jsonl, as columns of numbers for reports. No torch.

`parse_log` reads the lines, tells launches and trainings of a batch apart, and keeps the training of each batch that
counts. `reading.py` finds the file.
"""

import difflib
import math
from array import array
from bisect import bisect_left, insort
from dataclasses import InitVar, dataclass, field
from itertools import pairwise, repeat
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.checkpoint.run_log import (
    Record,
    number_of,
    read_lines,
    validation_losses,
)

MAX_NAMES = 1000
"""Most names of numbers that are read from a log. A run has some tens; each takes 8 bytes of memory for each line."""
LOSS = "loss/train/total"
TOKENS, SECONDS, ELAPSED = "time/token", "time/batch_seconds", "time/elapsed_seconds"
RATE, DEVICE_RATE = "throughput/tokens_per_sec", "throughput/device/tokens_per_sec"
FLOPS, MFU = "throughput/device/flops_per_sec", "throughput/device/mfu"
STALL, JOULES = "checkpoint/stall_seconds", "energy/joules"
Floats = NDArray[np.float64]
Columns = dict[str, "array[float]"]
"""Name of a number -> its value in each line of the log. A column ends at the last line that has the number."""


@dataclass(eq=False, repr=False, kw_only=True)
class Rows(dict[str, NDArray[Any]]):
    """Lines of a log, as columns: each number that some line of the file has, NaN in the others.

    `batch` and `launch` are int64. Launches are numbered again from 1 in the log's order: in several folders, they may
    have the same number. A dictionary, as pandas takes no other mapping for columns.
    """

    columns: InitVar[dict[str, NDArray[Any]]]

    def __post_init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self.update(columns)

    def __missing__(self, name: object) -> NoReturn:
        """Raise KeyError for a name that the log does not have, with the nearest name and all others."""
        similar = [other for other in self if other.endswith(f"/{name}")]
        if not similar:
            similar = difflib.get_close_matches(str(name), self, n=1)
        hint = f", did you mean {similar[0]}?" if similar else ""
        raise KeyError(f"the log has no {name}{hint}; it has {', '.join(self)}")

    def __repr__(self) -> str:
        batches = format_batch_span(self.batch[0], self.batch[-1]) if len(self.batch) else "no batch"
        return f"<{batches}: {', '.join(self)}>"

    def numbers(self, name: str) -> Floats:
        """Return a column, or one of NaN throughout if the log has none of that name."""
        return self[name] if name in self else np.full(len(self.batch), np.nan)

    @property
    def batch(self) -> NDArray[np.int64]:
        """The batch of each row, ascending."""
        return self["batch"]

    @property
    def launch(self) -> NDArray[np.int64]:
        """The number of the launch that trained each row, counted from 1."""
        return self["launch"]

    @property
    def num_devices(self) -> Floats:
        """Number of devices that trained each batch: tokens per second of all over those of one. NaN where unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.round(self.numbers(RATE) / self.numbers(DEVICE_RATE))

    @property
    def seconds(self) -> float:
        """Seconds that training took, summed over the rows that have a time."""
        return float(np.nansum(self.numbers(SECONDS)))

    def as_dict(self) -> dict[str, Any]:
        """Return launch, first and last batch, and seconds, as report.json has them of a dead branch."""
        return {
            "launch": int(self.launch[0]),
            "first_batch": int(self.batch[0]),
            "last_batch": int(self.batch[-1]),
            "seconds": self.seconds,
        }


@dataclass(eq=False, repr=False, kw_only=True)
class Log(Rows):
    """metrics.jsonl in order of batch: batches that the newest state comes from, the last line of each."""

    num_launches: int
    """Number of launches, including those whose every batch was lost."""
    launches_in_file: dict[int, int]
    """Number of each launch -> its number in the file, which launches that knew nothing of each other may share."""
    digest: list[str | None]
    validation: Floats
    """The loss of the first of eval_loaders."""
    tokens: Floats
    """Tokens of each batch; NaN if the log does not have the batch before it."""
    not_finite: list[int]
    """Batches whose loss is null in the file: not a number that fp32 holds."""
    num_unreadable: int
    """Lines that are not whole."""
    dead: list[Rows]
    """Branches that were trained and lost: a later launch carried on from before them."""
    lines: list[bytes]
    """Line of each batch, as in the file."""

    def within(self, first_batch: int, last_batch: int) -> slice:
        """Return the slice of rows whose batches lie from `first_batch` to `last_batch`, both included."""
        start, end = np.searchsorted(self.batch, (first_batch, last_batch + 1)).tolist()
        return slice(start, end)


def find_missing_batches(log: Log) -> list[str]:
    """Return the spans of batches up to the log's last one that have no record, as text such as `batches 3 to 5`."""
    batches = [0, *(int(batch) for batch in log.batch if batch > 0)]
    return [format_batch_span(before + 1, after - 1) for before, after in pairwise(batches) if after > before + 1]


class Line(NamedTuple):
    """A line of the log, without its numbers."""

    index: int
    """Position among the readable lines of the file, and so in the columns of numbers."""
    batch: int
    launch_in_file: int
    """The launch as the line names it. Two launches may have the same number."""
    num_fields: int
    """A line that adds to an earlier line of the batch repeats all of its fields, so it has more."""
    loss: Any
    digest: str | None
    clock: float | None
    """Seconds since the launch began."""
    validation: float | None
    is_not_finite: bool
    content: bytes

    @property
    def training(self) -> tuple[int, int, float | None]:
        """Key that all lines about one training of a batch have in common.

        A batch that is trained again has another clock.
        """
        return self.batch, self.launch_in_file, self.clock

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key that tells one training of a batch from all others in a merged log, wherever its lines are.

        With the loss, two launches of the same number and clock are told apart. Without a clock, only equal lines are
        the same training.
        """
        if self.clock is None:
            return (self.content,)
        return (*self.training, repr(self.loss))


@dataclass(slots=True)
class NumberedLaunch:
    """A launch in the log."""

    number_in_file: int
    clocks: list[tuple[int, float]] = field(default_factory=list)
    """(batch, seconds since the launch began) of its lines, ascending."""

    def trained_before(self, batch: int, clock: float) -> float | None:
        """Return the batch that this launch trained last before `batch`, if it may have trained `batch` too; else None.

        A launch trains each batch once, and its clock goes up with its batches. -1 if it trained none before.
        """
        position = bisect_left(self.clocks, (batch, clock))
        before = self.clocks[position - 1] if position > 0 else (-1, -math.inf)
        after = self.clocks[position] if position < len(self.clocks) else (math.inf, math.inf)
        fits = before[0] < batch < after[0] and before[1] <= clock <= after[1]
        return before[0] if fits else None


class LaunchNumbering:
    """Numbers launches from 1 on, in the order in which the log first names them.

    Each time a run moves, the logs of two folders are merged. So the lines of one launch may be apart, and two
    launches that knew nothing of each other may have the same number in the file. Launches are told apart by their
    clocks.
    """

    def __init__(self) -> None:
        """Begin without launches."""
        self.launches: dict[int, NumberedLaunch] = {}
        """Number -> launch."""
        self._numbers_by_number_in_file: dict[int, list[int]] = {}
        self._number_by_identity: dict[tuple[Any, ...], int] = {}
        self._last: tuple[Line, int] | None = None
        """The last line that was numbered, and its number."""

    def number_of(self, line: Line) -> int:
        """Return the number of the launch that wrote `line`. Must be called once for each line, in the file's order."""
        number = self._number_by_identity.get(line.identity)
        if number is None:
            number = self._find_known_launch(line) or self._add_launch(line.launch_in_file)
            if line.clock is not None:
                insort(self.launches[number].clocks, (line.batch, line.clock))
            self._number_by_identity[line.identity] = number
        self._last = (line, number)
        return number

    def _add_launch(self, number_in_file: int) -> int:
        """Add a launch, and return its number."""
        number = len(self.launches) + 1
        self.launches[number] = NumberedLaunch(number_in_file)
        self._numbers_by_number_in_file.setdefault(number_in_file, []).append(number)
        return number

    def _find_known_launch(self, line: Line) -> int | None:
        """Return the number of the known launch that trained the line's batch; None if it must be a new launch.

        Of several that fit, it is the one that trained the nearest batch before. A line without a clock belongs to the
        launch of the line before it, if that has the same number in the file and no later batch.
        """
        if line.clock is None:
            if self._last is None:
                return None
            last_line, last_number = self._last
            continues = last_line.launch_in_file == line.launch_in_file and last_line.batch <= line.batch
            return last_number if continues else None

        candidates = []
        for number in self._numbers_by_number_in_file.get(line.launch_in_file, []):
            batch_before = self.launches[number].trained_before(line.batch, line.clock)
            if batch_before is not None:
                candidates.append((batch_before, number))
        return max(candidates)[1] if candidates else None


def merge_lines(lines: list[Line]) -> list[Line]:
    """Return one line for each training of a batch: the one with most fields, in the place of the last one.

    A log that came with a checkpoint repeats lines of this machine's log. It may have them as they were before
    something was added, such as a validation loss.
    """
    fullest: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        known = fullest.pop(line.identity, line)  # inserted again, at the end of the dictionary
        fullest[line.identity] = known if known.num_fields > line.num_fields else line
    return list(fullest.values())


def parse_log(lines: list[bytes]) -> Log:
    """Parse the lines of metrics.jsonl into columns, with the batches that count apart from those that do not.

    The file is append-only. A launch that resumes from an older checkpoint trains batches again that an earlier
    launch had trained after that checkpoint. The earlier launch's are then a dead branch. Lines that are cut off are
    only counted.
    """
    lines = [line for line in lines if line.strip()]
    columns: Columns = {}
    parsed: list[Line] = []
    for content, record in read_lines(lines):
        add_numbers(columns, len(parsed), record)
        parsed.append(parse_line(len(parsed), content, record))

    numbering = LaunchNumbering()
    launches = [numbering.number_of(line) for line in parsed]
    live, dead = split_branches(merge_lines(parsed))
    dead.sort(key=lambda branch: launches[branch[0].index])

    live_columns = select_columns(live, columns, launches)
    tokens_so_far = live_columns.get(TOKENS, np.full(len(live), np.nan))
    return Log(
        columns=live_columns,
        num_launches=len(numbering.launches),
        launches_in_file={number: launch.number_in_file for number, launch in numbering.launches.items()},
        digest=[line.digest for line in live],
        validation=np.array([line.validation for line in live], np.float64),
        tokens=count_tokens(live_columns["batch"].tolist(), tokens_so_far),
        not_finite=[line.batch for line in live if line.is_not_finite],
        num_unreadable=len(lines) - len(parsed),
        dead=[Rows(columns=select_columns(branch, columns, launches)) for branch in dead],
        lines=[line.content for line in live],
    )


def parse_line(index: int, content: bytes, record: Record) -> Line:
    """Return line number `index` of the log, with the record that its `content` is the JSON of."""
    launch = record.get("launch")
    first_validation_loss = next(iter(validation_losses(record).values()), None)
    return Line(
        index=index,
        batch=record["batch"],
        launch_in_file=launch if type(launch) is int else 0,
        num_fields=len(record),
        loss=record.get(LOSS),
        digest=record.get("data/digest"),
        clock=number_of(record.get(ELAPSED)),
        validation=number_of(first_validation_loss),
        is_not_finite=LOSS in record and number_of(record[LOSS]) is None,
        content=content,
    )


def split_branches(lines: list[Line]) -> tuple[list[Line], list[list[Line]]]:
    """Split lines, in the file's order, into those of the live branch, by ascending batch, and those of dead branches.

    A line whose batch is not above the last one shows that a launch carried on from before that batch: the line and
    all batches after it that were live become a dead branch. If it is about the same training of its batch, it only
    replaces that batch's line.
    """
    live: list[Line] = []
    dead: list[list[Line]] = []
    for line in lines:
        position = len(live)
        if live and line.batch <= live[-1].batch:
            position = bisect_left(live, line.batch, key=lambda other: other.batch)
        replaced = live[position:]
        if replaced and line.training == replaced[0].training:
            replaced = replaced[1:]
        if replaced:
            dead.append(replaced)
        live[position:] = [line]
    return live, dead


def add_numbers(columns: Columns, index: int, record: Record) -> None:
    """Append the numbers in the record of line `index` to `columns`, and NaN for the lines since each was last given.

    null in the file is NaN: the number was not finite. A name beyond the first MAX_NAMES gets no column.
    """
    for name, value in record.items():
        is_number = value is None or isinstance(value, int | float)
        if is_number and (name in columns or len(columns) < MAX_NAMES):
            column = columns.setdefault(name, array("d"))
            column.extend(repeat(math.nan, index - len(column)))
            number = number_of(value)
            column.append(math.nan if number is None else number)


def select_columns(lines: list[Line], columns: Columns, launches: list[int]) -> dict[str, NDArray[Any]]:
    """Return the columns of some lines: `batch` and `launch` as int64, and every number of the log, NaN where missing.

    `launches` has the number of each line's launch, by the line's index.
    """
    indices = np.array([line.index for line in lines], np.int64)
    selected: dict[str, NDArray[Any]] = {
        "batch": np.array([line.batch for line in lines], np.int64),
        "launch": np.array([launches[line.index] for line in lines], np.int64),
    }
    for name, column in columns.items():
        if name not in selected:
            values = np.frombuffer(column)
            has_value = indices < len(values)
            selected[name] = np.where(has_value, values[np.where(has_value, indices, 0)], np.nan)
    return selected


def count_tokens(batches: list[int], tokens_so_far: Floats) -> Floats:
    """Return the tokens of each batch, from the totals after each. NaN where the batch before it is missing.

    The first batch of a log has no batch before it, so its tokens are known only if it is the run's first (or record 0,
    an evaluation before training).
    """
    counts = np.full(len(batches), np.nan)
    counts[1:] = np.where(np.diff(batches) == 1, np.diff(tokens_so_far), np.nan)
    if batches and batches[0] <= 1:
        counts[0] = tokens_so_far[0]
    return counts


def format_batch_span(first_batch: int, last_batch: int) -> str:
    """Format a span of batches as `batch 3` or `batches 3 to 1,000`."""
    if first_batch == last_batch:
        return f"batch {first_batch:,}"
    return f"batches {first_batch:,} to {last_batch:,}"
