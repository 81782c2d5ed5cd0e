"""The log of a run, metrics.jsonl, as columns of numbers for reports. No torch.

`parse_log` turns the lines of the file into a `Log`. It works in these steps:

1. `add_numbers` collects the numbers of each line in columns, and `parse_line` the rest, as a `Line`.
2. `LaunchNumbering` finds out which launch wrote each line.
3. `merge_lines` keeps one line for each training of a batch, if several lines are about it.
4. `split_branches` separates the batches from which the newest state comes from dead branches: batches that a launch
   trained, and that a later launch trained again because it resumed from a checkpoint before them.
5. `select_columns` takes the numbers of the lines that are left out of the columns.

`reading.py` finds the file.
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

# Names that Composer and this library give to numbers in a log.
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
        similar_names = [known_name for known_name in self if known_name.endswith(f"/{name}")]
        if not similar_names:
            similar_names = difflib.get_close_matches(str(name), self, n=1)
        hint = f", did you mean {similar_names[0]}?" if similar_names else ""
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
    """Return the spans of batches up to the log's last one that have no record, as texts.

    For a log with records of the batches 1, 2, 6 and 8, they are ["batches 3 to 5", "batch 7"].
    """
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
    """A launch in the log, with the batches that it is known to have trained."""

    number_in_file: int
    clocks: list[tuple[int, float]] = field(default_factory=list)
    """(batch, seconds since the launch began) of its lines, ascending."""

    def trained_before(self, batch: int, clock: float) -> float | None:
        """Return the batch that this launch trained last before `batch`, if it may have trained `batch` at `clock`.

        A launch trains each batch once, and its clock goes up with its batches. A launch that trained batch 4 at 40 s
        and batch 6 at 60 s may have trained batch 5 at 50 s, and the result is 4. It cannot have trained batch 5 at
        70 s, nor batch 6 again, and the result is None.

        Returns -1 if the launch trained no batch before, and None if it cannot have trained `batch`.
        """
        position = bisect_left(self.clocks, (batch, clock))
        batch_before = -1
        clock_before = -math.inf
        if position > 0:
            batch_before, clock_before = self.clocks[position - 1]
        batch_after = math.inf
        clock_after = math.inf
        if position < len(self.clocks):
            batch_after, clock_after = self.clocks[position]

        is_new_batch = batch_before < batch < batch_after
        is_clock_in_order = clock_before <= clock <= clock_after
        return batch_before if is_new_batch and is_clock_in_order else None


class LaunchNumbering:
    """Numbers launches from 1 on, in the order in which the log first names them.

    Each time a run moves, the logs of two folders are merged. So the lines of one launch may be apart, and two
    launches that knew nothing of each other may have the same number in the file. Launches are told apart by their
    clocks: if the file has launch 1 with batches 1 and 2 at 10 and 20 s, and then launch 1 with batch 2 at 5 s, the
    latter cannot be the same launch, and gets the number 2.
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
        """Return the number of the launch that wrote `line`. Must be called once for each line, in the file's order.

        Each call adds what it learns to this object, and the numbers of later lines depend on it: a launch that is
        new, the line's clock, and the line itself as the last one.
        """
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

        Only launches with the line's number in the file, and whose batches and clocks the line fits between, are
        possible. If there are several, it is the one that trained the nearest batch before. A line without a clock
        belongs to the launch of the line before it, if that has the same number in the file and no later batch.
        """
        if line.clock is None:
            if self._last is None:
                return None
            last_line, last_number = self._last
            is_of_last_launch = last_line.launch_in_file == line.launch_in_file and last_line.batch <= line.batch
            return last_number if is_of_last_launch else None

        possible_launches = []  # (last batch before the line's, number)
        for number in self._numbers_by_number_in_file.get(line.launch_in_file, []):
            batch_before = self.launches[number].trained_before(line.batch, line.clock)
            if batch_before is not None:
                possible_launches.append((batch_before, number))
        return max(possible_launches)[1] if possible_launches else None


def merge_lines(lines: list[Line]) -> list[Line]:
    """Return one line for each training of a batch: the one with most fields, in the place of the last one.

    A log that came with a checkpoint repeats lines of this machine's log. It may have them as they were before
    something was added, such as a validation loss. If lines a and c are about the same training, and b about another,
    then [a, b, c] becomes [b, c], or [b, a] if a has more fields than c.
    """
    fullest_lines: dict[tuple[Any, ...], Line] = {}  # identity of a training -> the line about it with most fields
    for line in lines:
        # An item that is removed and inserted again moves to the end of the dictionary.
        earlier_line = fullest_lines.pop(line.identity, line)
        fullest_lines[line.identity] = earlier_line if earlier_line.num_fields > line.num_fields else line
    return list(fullest_lines.values())


def parse_log(lines: list[bytes]) -> Log:
    """Parse the lines of metrics.jsonl into columns, with the batches that count apart from those that do not.

    The file is append-only. A launch that resumes from an older checkpoint trains batches again that an earlier
    launch had trained after that checkpoint. The earlier launch's are then a dead branch. Lines that are cut off are
    only counted.

    If launch 1 trains the batches 1 to 5, and launch 2 resumes from a checkpoint of batch 3 and trains 4 to 6, then the
    log has the batches 1 to 3 of launch 1 and 4 to 6 of launch 2. The batches 4 and 5 of launch 1 are in `dead`.
    """
    # Parse each line. From here on, lines are known by their position among the parsed ones.
    lines = [line for line in lines if line.strip()]
    columns: Columns = {}
    parsed: list[Line] = []
    for content, record in read_lines(lines):
        add_numbers(columns, len(parsed), record)
        parsed.append(parse_line(len(parsed), content, record))

    # Decide which launch wrote each line, and which lines count.
    numbering = LaunchNumbering()
    launches = [numbering.number_of(line) for line in parsed]
    live, dead = split_branches(merge_lines(parsed))
    dead.sort(key=lambda branch: launches[branch[0].index])

    # Take the numbers of these lines out of the columns.
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
    """Return a line of the log without its numbers.

    index: position among the readable lines of the file.
    content: the line's JSON, as in the file.
    record: the object that `content` was parsed into. Its values may be of any type, except that `batch` is an int.
    """
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

    A line whose batch is not above the last live one shows that a launch resumed from before that batch. The live lines
    from its batch on become a dead branch, and it becomes the last live line. Lines of the batches 1, 2, 3, 2', 3'
    (where 2' is another training of batch 2) have the live branch 1, 2', 3' and the dead branch 2, 3.

    If the line is about the same training as the live line of its batch, it replaces that line, which is in no dead
    branch.
    """
    live: list[Line] = []
    dead: list[list[Line]] = []
    for line in lines:
        # Find where the line belongs. Usually that is the end.
        position = len(live)
        if live and line.batch <= live[-1].batch:
            position = bisect_left(live, line.batch, key=lambda live_line: live_line.batch)

        # The live lines from there on are lost.
        lost_lines = live[position:]
        if lost_lines and line.training == lost_lines[0].training:
            lost_lines = lost_lines[1:]
        if lost_lines:
            dead.append(lost_lines)
        live[position:] = [line]
    return live, dead


def add_numbers(columns: Columns, index: int, record: Record) -> None:
    """Append the numbers in the record of line `index` to `columns`. Must be called in the order of lines.

    A column is as long as the last line that has the number requires, and NaN for lines before it without the number:

        record 0: {"batch": 1, "loss": 7.1}    batch [1]         loss [7.1]
        record 1: {"batch": 2}                 batch [1, 2]      loss [7.1]
        record 2: {"batch": 3, "loss": 6.8}    batch [1, 2, 3]   loss [7.1, NaN, 6.8]

    null in the file is NaN: the number was not finite. A name beyond the first MAX_NAMES gets no column.
    """
    for name, value in record.items():
        is_number = value is None or isinstance(value, int | float)
        has_column = name in columns or len(columns) < MAX_NAMES
        if is_number and has_column:
            column = columns.setdefault(name, array("d"))
            column.extend(repeat(math.nan, index - len(column)))
            number = number_of(value)
            column.append(math.nan if number is None else number)


def select_columns(lines: list[Line], columns: Columns, launches: list[int]) -> dict[str, NDArray[Any]]:
    """Return the columns of some lines: `batch` and `launch` as int64, and every number of the log, NaN where missing.

    lines: the lines to select, in the order of the result.
    columns: the columns of all lines, which `add_numbers` has collected.
    launches: the number of each line's launch, by the line's index.

    For lines of the indices 2 and 0, a column [7.1, NaN, 6.8] becomes [6.8, 7.1].
    """
    indices = np.array([line.index for line in lines], np.int64)
    selected: dict[str, NDArray[Any]] = {
        "batch": np.array([line.batch for line in lines], np.int64),
        "launch": np.array([launches[line.index] for line in lines], np.int64),
    }
    for name, column in columns.items():
        if name not in selected:
            values = np.frombuffer(column)
            has_value = indices < len(values)  # a column ends at the last line that has its number
            valid_indices = np.where(has_value, indices, 0)
            selected[name] = np.where(has_value, values[valid_indices], np.nan)
    return selected


def count_tokens(batches: list[int], tokens_so_far: Floats) -> Floats:
    """Return the tokens of each batch, from the totals after each. NaN where the batch before it is missing.

    The first batch of a log has no batch before it, so its tokens are known only if it is the run's first (or record 0,
    an evaluation before training). For the batches 1, 2 and 4 with the totals 100, 200 and 400, the result is 100, 100
    and NaN.
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
