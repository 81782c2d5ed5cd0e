"""Readers of a run for reports: its log, its configuration, the hardware it ran on. No torch.

A run is a run directory (runs/mpt-1b), here or behind a URL, or a folder of checkpoints that carry the log with them.
"""

import difflib
import math
import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import InitVar, dataclass, field
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml
from numpy.typing import NDArray

from llmfoundry_lite.bounded import MAX_JSON_BYTES, MAX_LOG_BYTES, MAX_YAML_BYTES, TooLargeError, too_large
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.run_log import (
    METRICS,
    Record,
    merge_logs,
    number_of,
    read_lines,
    read_log,
    validation_losses,
)
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.yaml_text import block_in, read_record
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.ranks.status import LAUNCHES

CONFIG = "config.yaml"
OBJECT_STORES = ("abfs", "abfss", "az", "gcs", "gs", "hf", "s3", "s3a")
"""Protocols of a recorded `save_folder` that are opened without asking the user. They connect to the provider's
service, never to a server that the run's author has chosen."""
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
        """Seconds that training all rows took, those left out that have no time."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has left behind: its log, configuration, and the history in its newest checkpoint."""

    location: str
    """Run directory, URL or folder of checkpoints, as it was given."""
    folder: Folder
    name: str
    log: Log
    config: dict[str, Any] | None
    """The recorded configuration, which may be anybody's. None if there is none, or it is not YAML."""
    segments: tuple[Segment, ...]
    """Where each span of batches ran, by the newest checkpoint."""
    saved_in: str | None
    """Folder of its checkpoints; None where the recorded one is not opened."""
    segments_from: str | None
    """URL of the newest checkpoint, whose manifest has `segments`."""
    state_digest: str | None
    """Digest of that checkpoint's state."""
    launches: list[Record]
    """Lines of launches.jsonl: only launches that ran in this run directory."""
    notes: list[str]
    """A line for each thing that is missing or not whole. Whoever reads more of the run adds to it."""

    def __fspath__(self) -> str:
        return self.location

    def __repr__(self) -> str:
        return f"<{self.location}: {format_batch_span(self.log.batch[0], self.log.batch[-1])}>"


class NoBatchesError(DataError):
    """Raised for a run that has not trained a batch yet."""


def read_run(where: str | os.PathLike[str]) -> Run:
    """Read a run's log, configuration and history from its folder, its URL or a folder of its checkpoints.

    `log` is a dictionary of the numbers in metrics.jsonl: name -> column, with one number for each batch, or NaN if
    there is none. If a batch has several lines, the last one counts. `pandas.DataFrame(run.log)` makes a table of it.
    `log.digest` has the digests of the data, and `log.dead` the batches that a later launch trained again. `segments`
    say where each span of batches was trained. A run can be passed wherever a path is expected. Does not need torch.

    >>> run = lf.read_run("runs/tiny")
    >>> run
    <runs/tiny: batches 1 to 6>
    >>> run.log["loss/train/total"].round(1)
    array([...])
    >>> list(run.log)
    ['batch', 'launch', ...]
    >>> run.segments[0].first_batch, run.segments[0].last_batch, run.segments[0].world_size
    (1, 6, 1)

    Raises DataError if there is no log, CheckpointError if a URL cannot be reached.
    """
    return read_recorded(os.fspath(where))


def read_recorded(location: str, allowed_protocols: Collection[str] = OBJECT_STORES) -> Run:
    """Read a run as `read_run` does, with a choice of where its checkpoints may be read from.

    The run's configuration records where its checkpoints are. Its author may have written any URL there, so it is
    opened only if its protocol is one of `allowed_protocols`, or if it is on this disk or inside the run's own URL.

    Raises DataError if there is no run, NoBatchesError if it has not trained a batch, and CheckpointError if a URL
    cannot be reached.
    """
    notes: list[str] = []
    folder = open_folder(location)
    try:
        file_names = folder.names()
        content = read_run_file(folder, METRICS, MAX_LOG_BYTES) if METRICS in file_names else b""
        launches_content = read_run_file(folder, LAUNCHES, MAX_JSON_BYTES) if LAUNCHES in file_names else b""
        config = read_config(folder) if CONFIG in file_names else None
    except TooLargeError:
        raise
    except OSError as error:
        raise DataError(f"{location}: cannot be read: {error.strerror or error}") from error
    if CONFIG in file_names and config is None:
        notes.append(f"{CONFIG} is not YAML: passed over")
    launches = read_launches(launches_content)

    # Without a log and a configuration, the location may be a folder of checkpoints, which carry both.
    is_run_directory = METRICS in file_names or CONFIG in file_names
    saved_in = find_checkpoint_folder(folder, config, allowed_protocols) if is_run_directory else folder.url
    if saved_in is None:
        newest = None
        notes.append(f"where it ran is not known: {explain_unopened_folder(config)}")
    else:
        newest = find_newest_checkpoint(saved_in, notes)
    lines = content.splitlines(keepends=True)
    if newest is not None:
        if config is None:
            config = newest.manifest.config
        lines = add_carried_log(content, newest, notes)

    if not is_run_directory and not lines and not launches:
        raise DataError(f"{location}: no {METRICS} here; {suggest_location(folder.path_here)}")
    log = parse_log(lines)
    if not len(log.batch):
        raise NoBatchesError(f"{location}: {METRICS} has no batch in it yet{describe_last_launch(launches)}")
    notes += describe_gaps(log, config)
    if CONFIG not in file_names:
        notes.append(f"no {CONFIG} here" + ("" if config is None else ": read from the newest checkpoint"))
    notes += describe_unused_lines(log)

    folder_name = folder.url.rstrip("/").rsplit("/", 1)[-1]
    return Run(
        location=location,
        folder=folder,
        name=str((config or {}).get("run_name") or folder_name),
        log=log,
        config=config,
        segments=newest.manifest.segments if newest is not None else (),
        saved_in=saved_in,
        segments_from=newest.url if newest is not None else None,
        state_digest=newest.manifest.state_digest if newest is not None else None,
        launches=launches,
        notes=notes,
    )


def describe_gaps(log: Log, config: dict[str, Any] | None) -> list[str]:
    """Return a note for each kind of number that a report lacks: missing batches, other validation sets, names.

    `config` is the run's recorded configuration, which names the validation sets.
    """
    notes = []
    missing = find_missing_batches(log)
    if missing:
        others = f", and {len(missing) - 1:,} later spans" if len(missing) > 1 else ""
        notes.append(f"{missing[0]}{others}: {METRICS} has no record of them")
    labels = list(block_in(config, "eval_loaders"))
    if len(labels) > 1:
        others = ", ".join(f"eval/{label}/loss" for label in labels[1:])
        notes.append(f"validation: eval/{labels[0]}/loss, the first of eval_loaders; {METRICS} has {others} too")
    if len(log) >= MAX_NAMES:
        notes.append(f"{METRICS} has {MAX_NAMES:,} names of numbers or more: later ones are passed over")
    return notes


def describe_unused_lines(log: Log) -> list[str]:
    """Return a note on the log's half-written lines, if there are any, and one on each dead branch."""
    notes = []
    if log.num_unreadable:
        notes.append(f"{log.num_unreadable} half-written line{'s' if log.num_unreadable > 1 else ''} passed over")
    for branch in log.dead:
        span = format_batch_span(branch.batch[0], branch.batch[-1])
        notes.append(
            f"{span} of launch {branch.launch[0]}: a dead branch; a later launch "
            f"carried on from before it, and its {branch.seconds:,.0f} s count in no rate, energy or cost"
        )
    return notes


def describe_last_launch(launches: list[Record]) -> str:
    """Say how the last launch of a run without batches ended, as the end of an error message.

    It may have been refused, for example. Returns an empty text if the launch still runs, or there is none.
    """
    if not launches or launches[-1]["status"] == "running":
        return ""
    reason = launches[-1].get("reason")
    explanation = f", {reason}" if reason else ""
    return f"; its last launch: {launches[-1]['status']}{explanation}; leave this run out, or launch it again"


LAUNCH_TYPES: dict[str, type] = {
    **dict.fromkeys(("status", "reason", "boot", "host"), str),
    "has_begun": bool,
    "batch": int,
}
"""Key in a line of launches.jsonl -> its type. The values of all other keys are numbers."""


def read_launches(content: bytes) -> list[Record]:
    """Parse launches.jsonl: records of the launches that ran in a run directory.

    The file may be anybody's, so a value of another type than a launch writes is left out, and so is a number that is
    not finite. A line without a status is left out too.
    """
    launches = []
    for _, record in read_lines(content):
        launch: Record = {}
        for key, value in record.items():
            has_right_type = isinstance(value, LAUNCH_TYPES.get(key, int | float))
            if has_right_type and (isinstance(value, str) or number_of(value) is not None):
                launch[key] = value
        if "status" in launch:
            launches.append(launch)
    return launches


def suggest_location(folder: Path | None) -> str:
    """Say which location to give instead of a folder that has no log, as the end of an error message.

    If the folder contains runs, such as those of islands, it is the one with the longest log. `folder` is None behind a
    URL, where this is not searched.
    """
    logs = [] if folder is None else folder.glob(f"*/{METRICS}")
    longest_first = sorted(logs, key=lambda path: (-path.stat().st_size, path))
    if not longest_first:
        return "expected a run directory such as runs/mpt-quickstart"
    names = ", ".join(sorted(path.parent.name for path in longest_first))
    longest = longest_first[0].parent
    return f"its folders {names} are runs, such as islands of one; give {longest}, which has the longest log"


def read_run_file(folder: Folder, name: str, max_bytes: int) -> bytes:
    """Read a file of a run. Raises TooLargeError if it has more than `max_bytes`, and OSError if it cannot be read."""
    content = folder.read(name, max_bytes)
    if len(content) > max_bytes:
        raise too_large(f"{folder.url}/{name}", max_bytes, name)
    return content


def read_config(folder: Folder) -> dict[str, Any] | None:
    """Read a run's config.yaml as data, without resolving references; None if it is not a YAML mapping.

    Raises TooLargeError and OSError.
    """
    content = read_run_file(folder, CONFIG, MAX_YAML_BYTES)
    try:
        config = read_record(content)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def config_of(run: Run) -> TrainConfig:
    """Build the configuration of a run from its record, which may be anybody's: references in it are not resolved.

    Raises DataError if the run has none, and ConfigError for an unknown key or a value out of range.
    """
    if run.config is None:
        raise DataError(f"{run.location}/{CONFIG} is not there; it says what was trained")
    try:
        return build_block(TrainConfig, run.config, "")
    except ConfigError as error:
        raise ConfigError(f"{run.location}/{CONFIG}: {error}") from None


# ----------------------------------------------------------------------------------------------- checkpoints


def find_checkpoint_folder(
    folder: Folder, config: dict[str, Any] | None, allowed_protocols: Collection[str]
) -> str | None:
    """Return where a run's checkpoints are: the recorded `save_folder` if it may be opened, else a folder in the
    run's own.

    A recorded location may be opened if it is on this disk, inside the run directory's URL, or of one of
    `allowed_protocols`, and if it has no unresolved reference. The run directory may have been moved since, and its
    `checkpoints` with it. None if neither is there.
    """
    own = folder.child("checkpoints")
    recorded = str((config or {}).get("save_folder") or own.url)
    protocol, separator, _ = recorded.partition("://")
    is_local = not separator or protocol in ("file", "local")
    is_inside_run = recorded.startswith(f"{folder.url.rstrip('/')}/")
    is_resolved = "${" not in recorded and "\0" not in recorded
    if is_resolved and (is_local or is_inside_run or protocol in allowed_protocols):
        return recorded
    return own.url if own.exists() else None


def explain_unopened_folder(config: dict[str, Any] | None) -> str:
    """Say why the `save_folder` in a recorded configuration is not opened, and what to give instead."""
    recorded = str((config or {}).get("save_folder"))
    reason = "not resolved here" if "${" in recorded else "not opened unasked"
    return f"its checkpoints are in {recorded}, which is {reason}; give that folder instead"


def find_newest_checkpoint(folder: str, notes: list[str]) -> Checkpoint | None:
    """Return the newest checkpoint in a folder whose manifest can be read; None if there is none.

    What is missing or damaged is added to `notes`.
    """
    try:
        search = CheckpointStore(folder).newest_intact()
    except CheckpointError as error:
        notes.append(f"where it ran is not known: {error}")
        return None
    notes.extend(search.notes)
    if search.checkpoint is None:
        notes.append(f"where it ran is not known: no checkpoint in {folder}")
    return search.checkpoint


def add_carried_log(content: bytes, newest: Checkpoint, notes: list[str]) -> list[bytes]:
    """Return the lines of a run's log, with those that are only in the copy that its newest checkpoint carries.

    These are batches that another machine trained. `content` is this machine's metrics.jsonl. Parts of the copy that
    are lost, and the span of batches that come from it, are added to `notes`.
    """
    lines = content.splitlines(keepends=True)
    carried = read_log(newest)
    notes.extend(carried.notes)
    if carried.content is None:
        return lines

    merged = merge_logs(content, carried.content)
    added_batches = {record["batch"] for _, record in read_lines(set(merged) - set(lines))}
    if lines and added_batches:
        span = format_batch_span(min(added_batches), max(added_batches))
        notes.append(f"{span}: from the log that came with {newest.name}")
    return merged


# ------------------------------------------------------------------------------------------------------ the log


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
        """What lines about one training of a batch have in common. A batch that is trained again has another clock."""
        return self.batch, self.launch_in_file, self.clock

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells one training of a batch from all others in a merged log, wherever its lines are.

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
