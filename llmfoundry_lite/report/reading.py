"""Readers of a run for reports: its log, its configuration, the hardware it ran on. No torch.

A run is a run directory (runs/mpt-1b), here or behind a URL, or a folder of checkpoints that carry the log with them.
"""

import difflib
import math
import os
from array import array
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import InitVar, dataclass
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
"""Protocols of a recorded `save_folder` that are opened unasked: only the service itself is asked, not a server of the
author's choice."""
MAX_NAMES = 1000
"""Names of numbers in a log. A run has some tens; each takes 8 bytes of memory for each line."""

LOSS = "loss/train/total"
TOKENS, SECONDS, ELAPSED = "time/token", "time/batch_seconds", "time/elapsed_seconds"
RATE, DEVICE_RATE = "throughput/tokens_per_sec", "throughput/device/tokens_per_sec"
FLOPS, MFU = "throughput/device/flops_per_sec", "throughput/device/mfu"
STALL, JOULES = "checkpoint/stall_seconds", "energy/joules"

Floats = NDArray[np.float64]


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
        near = [one for one in self if one.endswith(f"/{name}")] or difflib.get_close_matches(str(name), self, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise KeyError(f"the log has no {name}{hint}; it has {', '.join(self)}")

    def __repr__(self) -> str:
        return f"<{span(self.batch[0], self.batch[-1]) if len(self.batch) else 'no batch'}: {', '.join(self)}>"

    def numbers(self, name: str) -> Floats:
        """Return a column, NaN throughout if the log has none of that name."""
        return self[name] if name in self else np.full(len(self.batch), np.nan)

    @property
    def batch(self) -> NDArray[np.int64]:
        return self["batch"]

    @property
    def launch(self) -> NDArray[np.int64]:
        return self["launch"]

    @property
    def num_devices(self) -> Floats:
        """Devices of each batch: the rate of all over the rate of one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.round(self.numbers(RATE) / self.numbers(DEVICE_RATE))

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return float(np.nansum(self.numbers(SECONDS)))

    def as_dict(self) -> dict[str, Any]:
        first, last = int(self.batch[0]), int(self.batch[-1])
        return {"launch": int(self.launch[0]), "first_batch": first, "last_batch": last, "seconds": self.seconds}


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
        return slice(*np.searchsorted(self.batch, (first_batch, last_batch + 1)).tolist())


@dataclass(frozen=True, slots=True)
class Run:
    where: str
    folder: Folder
    name: str
    log: Log
    config: dict[str, Any] | None
    segments: tuple[Segment, ...]
    saved_in: str | None
    """Folder of its checkpoints; None where the recorded one is not opened."""
    segments_from: str | None
    """URL of the newest checkpoint, whose manifest has `segments`."""
    state_digest: str | None
    """Digest of that checkpoint's state."""
    launches: list[Record]
    """Lines of launches.jsonl: only launches that ran here."""
    notes: list[str]
    """A line for each thing that is missing or not whole."""

    def __fspath__(self) -> str:
        return self.where

    def __repr__(self) -> str:
        return f"<{self.where}: {span(self.log.batch[0], self.log.batch[-1])}>"


class NoBatchesError(DataError):
    """Raised for a run that has not trained a batch yet."""


def read_run(where: str | os.PathLike[str]) -> Run:
    """Read a run's log, configuration and history, from a run directory, its URL or a folder of its checkpoints.

    `log` is a dictionary of every number in metrics.jsonl: name -> column, with a number for each batch, NaN where
    there is none; the last line of a batch counts. `pandas.DataFrame(run.log)` is the table. `log.digest` has the
    digests of the data. Batches that a later launch trained again stand in `log.dead`. `segments` say where each span
    of batches ran. A run stands for its place wherever a path is asked for. No torch is needed.

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


def read_recorded(where: str, opens: Collection[str] = OBJECT_STORES) -> Run:
    """Read a run as `read_run` does. `opens` are the protocols of a recorded `save_folder` that may be opened."""
    notes: list[str] = []
    folder = open_folder(where)
    try:
        names = folder.names()
        content = read_part(folder, METRICS, MAX_LOG_BYTES) if METRICS in names else b""
        statuses = read_part(folder, LAUNCHES, MAX_JSON_BYTES) if LAUNCHES in names else b""
        config = read_config(folder, notes) if CONFIG in names else None
    except TooLargeError:
        raise
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror or error}") from error
    launches = [record for record in map(sound_launch, read_lines(statuses)) if "status" in record]
    lines = content.splitlines(keepends=True)
    is_run = METRICS in names or CONFIG in names
    saved_in = folder_of_checkpoints(folder, config, opens) if is_run else folder.url
    if saved_in is None:
        notes.append(f"where it ran is not known: {say_not_opened(config)}")
    newest = find_newest(saved_in, notes) if saved_in is not None else None
    if newest is not None:
        config = config if config is not None else newest.manifest.config
        lines = add_carried_log(content, newest, notes)
    if not is_run and not lines and not launches:
        raise DataError(f"{where}: no {METRICS} here; {what_to_give(folder.path_here)}")
    log = parse_log(lines)
    if not len(log.batch):
        raise NoBatchesError(f"{where}: {METRICS} has no batch in it yet{describe_last_launch(launches)}")
    if missing := find_missing_batches(log):
        others = f", and {len(missing) - 1:,} later spans" if len(missing) > 1 else ""
        notes.append(f"{missing[0]}{others}: {METRICS} has no record of them")
    if len(labels := [*block_in(config, "eval_loaders")]) > 1:
        others = ", ".join(f"eval/{label}/loss" for label in labels[1:])
        notes.append(f"validation: eval/{labels[0]}/loss, the first of eval_loaders; {METRICS} has {others} too")
    if len(log) >= MAX_NAMES:
        notes.append(f"{METRICS} has {MAX_NAMES:,} names of numbers or more: later ones are passed over")
    if CONFIG not in names:
        notes.append(f"no {CONFIG} here" + ("" if config is None else ": read from the newest checkpoint"))
    if log.num_unreadable:
        notes.append(f"{log.num_unreadable} half-written line{'s' if log.num_unreadable > 1 else ''} passed over")
    for branch in log.dead:
        notes.append(
            f"{span(branch.batch[0], branch.batch[-1])} of launch {branch.launch[0]}: a dead branch; a later launch "
            f"carried on from before it, and its {branch.seconds:,.0f} s count in no rate, energy or cost"
        )
    name = str((config or {}).get("run_name") or folder.url.rstrip("/").rsplit("/", 1)[-1])
    segments = newest.manifest.segments if newest is not None else ()
    segments_from = newest.url if newest is not None else None
    digest = newest.manifest.state_digest if newest is not None else None
    return Run(where, folder, name, log, config, segments, saved_in, segments_from, digest, launches, notes)


def describe_last_launch(launches: list[Record]) -> str:
    """Say how the last launch of a run without batches ended, such as one of a sweep that was refused; empty if that is
    not known."""
    if not launches:
        return ""
    status, reason = launches[-1]["status"], launches[-1].get("reason")
    if status == "running":
        return ""
    why = f", {reason}" if reason else ""
    return f"; its last launch: {status}{why}; leave this run out, or launch it again"


LAUNCH_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("status", "reason", "boot", "host"), str),
    "has_begun": bool,
    "batch": int,
}


def sound_launch(line: tuple[bytes, Record]) -> Record:
    """Return a line of launches.jsonl without values that no launch writes: the file may be anybody's."""
    _, record = line
    kept = {key: value for key, value in record.items() if isinstance(value, LAUNCH_KINDS.get(key, int | float))}
    return {key: value for key, value in kept.items() if isinstance(value, str) or number_of(value) is not None}


def what_to_give(instead_of: Path | None) -> str:
    """Say what to give instead. In a folder of runs, such as those of islands, name the one with the longest log."""
    logs = [] if instead_of is None else instead_of.glob(f"*/{METRICS}")
    found = sorted(logs, key=lambda path: (-path.stat().st_size, path))
    if not found:
        return "expected a run directory such as runs/mpt-quickstart"
    names = ", ".join(sorted(path.parent.name for path in found))
    return f"its folders {names} are runs, such as islands of one; give {found[0].parent}, which has the longest log"


def read_part(folder: Folder, name: str, max_bytes: int) -> bytes:
    """Read a file of a run. Raises TooLargeError, and OSError."""
    if len(content := folder.read(name, max_bytes)) > max_bytes:
        raise too_large(f"{folder.url}/{name}", max_bytes, name)
    return content


def read_config(folder: Folder, notes: list[str]) -> dict[str, Any] | None:
    try:
        config = read_record(read_part(folder, CONFIG, MAX_YAML_BYTES))
    except TooLargeError:  # a ValueError, too
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    if isinstance(config, dict):
        return config
    notes.append(f"{CONFIG} is not YAML: passed over")
    return None


def config_of(run: Run) -> TrainConfig:
    """Return the configuration of a run, which may be anybody's: nothing in it is resolved. Raises UserError."""
    if run.config is None:
        raise DataError(f"{run.where}/{CONFIG} is not there; it says what was trained")
    try:
        return build_block(TrainConfig, run.config, "")
    except ConfigError as error:
        raise ConfigError(f"{run.where}/{CONFIG}: {error}") from None


# ----------------------------------------------------------------------------------------------- checkpoints


def folder_of_checkpoints(folder: Folder, config: dict[str, Any] | None, opens: Collection[str]) -> str | None:
    """Return the configuration's `save_folder`, else the run directory's own, wherever that was moved to.

    A recorded URL is taken if its protocol is in `opens`, or if it lies inside the run's own URL. None if it is not
    taken and the run directory has no checkpoints.
    """
    own = folder.child("checkpoints")
    recorded = str((config or {}).get("save_folder") or own.url)
    protocol, separator, _ = recorded.partition("://")
    is_local = not separator or protocol in ("file", "local")
    may_open = is_local or protocol in opens or recorded.startswith(f"{folder.url.rstrip('/')}/")
    if may_open and "${" not in recorded and "\0" not in recorded:
        return recorded
    return own.url if own.exists() else None


def say_not_opened(config: dict[str, Any] | None) -> str:
    """Say why the recorded `save_folder` is not opened, and what to give."""
    recorded = str((config or {}).get("save_folder"))
    reason = "not resolved here" if "${" in recorded else "not opened unasked"
    return f"its checkpoints are in {recorded}, which is {reason}; give that folder instead"


def find_newest(folder: str, notes: list[str]) -> Checkpoint | None:
    """Find the newest checkpoint whose manifest can be read."""
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
    """Add lines of batches that another machine trained, which travel with its checkpoints."""
    lines = content.splitlines(keepends=True)
    carried, _, lost = read_log(newest)
    notes.extend(lost)
    if carried is None:
        return lines
    merged = merge_logs(content, carried)
    if lines and (more := {record["batch"] for _, record in read_lines(set(merged) - set(lines))}):
        notes.append(f"{span(min(more), max(more))}: from the log that came with {newest.name}")
    return merged


# ------------------------------------------------------------------------------------------------------ the log


def find_missing_batches(log: Log) -> list[str]:
    """Return the spans of batches up to the last one whose records are missing, in words."""
    batches = [0, *(int(batch) for batch in log.batch if batch > 0)]
    return [span(before + 1, after - 1) for before, after in pairwise(batches) if after > before + 1]


class Line(NamedTuple):
    """A line of the log, without its numbers."""

    index: int
    """Its place in their columns."""
    batch: int
    launch: int
    """Numbered as in `Rows`."""
    launch_in_file: int
    num_fields: int
    """A line that adds to an earlier one has all that that one has."""
    loss: Any
    digest: str | None
    clock: float | None
    validation: float | None
    is_not_finite: bool
    content: bytes

    @property
    def training(self) -> tuple[int, int, float | None]:
        """Identify one training of a batch. A line that adds to an earlier one has the same."""
        return self.batch, self.launch_in_file, self.clock

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identify one training of a batch wherever its lines stand. Without a clock only equal lines are."""
        if self.clock is None:
            return (self.content,)
        return (*self.training, repr(self.loss))


class LaunchNumbers:
    """Numbers launches from 1 on, in the order in which the log first names them.

    Logs of several folders are laid over each other each time the run moves, so that lines of one launch may stand
    apart, and two launches that knew nothing of each other may have the same number in the file. A launch trains each
    batch once, and its clock goes up with the batches.
    """

    def __init__(self) -> None:
        self.in_file: dict[int, int] = {}
        """Number -> the launch's number in the file."""
        self._same_number: dict[int, list[int]] = {}
        """Number in the file -> the launches that have it."""
        self._clocks: dict[int, list[tuple[int, float]]] = {}
        """Number -> (batch, clock) of its lines, by batch."""
        self._known: dict[tuple[Any, ...], int] = {}
        """Training of a batch -> number of its launch."""
        self._last: Line | None = None

    def number_of(self, line: Line) -> int:
        """Return the number of a line's launch. The lines are given in the file's order."""
        number = self._known.get(line.identity)
        if number is None:
            number = self._find(line)
            if number is None:
                number = len(self.in_file) + 1
                self.in_file[number] = line.launch_in_file
                self._same_number.setdefault(line.launch_in_file, []).append(number)
                self._clocks[number] = []
            if line.clock is not None:
                insort(self._clocks[number], (line.batch, line.clock))
            self._known[line.identity] = number
        self._last = line._replace(launch=number)
        return number

    def _find(self, line: Line) -> int | None:
        last = self._last
        if line.clock is None:  # only the order can tell
            is_next = last is not None and last.launch_in_file == line.launch_in_file and last.batch <= line.batch
            return last.launch if last is not None and is_next else None
        nearest: tuple[float, int] | None = None
        """(the batch that it trained before this one, number): of several launches that fit, the nearest is taken."""
        for number in self._same_number.get(line.launch_in_file, []):
            clocks = self._clocks[number]
            at = bisect_left(clocks, (line.batch, line.clock))
            before = clocks[at - 1] if at > 0 else (-1, -math.inf)
            after = clocks[at] if at < len(clocks) else (math.inf, math.inf)
            if before[0] < line.batch < after[0] and before[1] <= line.clock <= after[1]:
                nearest = max(nearest or (before[0], number), (before[0], number))
        return nearest[1] if nearest is not None else None


def merge_lines(lines: list[Line]) -> list[Line]:
    """Return one line for each training of a batch: the fullest, where the last one stands.

    A log that came with a checkpoint repeats lines of ours, and may have them as they were before something was added.
    """
    fullest: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        known = fullest.pop(line.identity, None)  # and set again, at the end
        fullest[line.identity] = known if known is not None and known.num_fields > line.num_fields else line
    return list(fullest.values())


def parse_log(lines: list[bytes]) -> Log:
    """Split lines into the live branch and the dead ones, from before which a later launch carried on."""
    lines = [line for line in lines if line.strip()]
    columns: dict[str, array[float]] = {}
    numbers = LaunchNumbers()
    whole: list[Line] = []
    for content, record in read_lines(lines):
        line = Line(
            index=len(whole),
            batch=record["batch"],
            launch=0,
            launch_in_file=record["launch"] if type(record.get("launch")) is int else 0,
            num_fields=len(record),
            loss=record.get(LOSS),
            digest=record.get("data/digest"),
            clock=number_of(record.get(ELAPSED)),
            validation=number_of(next(iter(validation_losses(record).values()), None)),
            is_not_finite=LOSS in record and number_of(record[LOSS]) is None,
            content=content,
        )
        add_numbers(columns, len(whole), record)
        whole.append(line._replace(launch=numbers.number_of(line)))

    live: list[Line] = []  # batches ascend
    dead: list[list[Line]] = []
    for line in merge_lines(whole):
        at = len(live)
        if live and line.batch <= live[-1].batch:
            at = bisect_left(live, line.batch, key=lambda other: other.batch)
        tail = live[at:]
        if tail and line.training == tail[0].training:
            tail = tail[1:]
        if tail:
            dead.append(tail)
        live[at:] = [line]
    found = columns_of(live, columns)
    return Log(
        columns=found,
        num_launches=len(numbers.in_file),
        launches_in_file=numbers.in_file,
        digest=[line.digest for line in live],
        validation=np.array([line.validation for line in live], np.float64),
        tokens=count_tokens(found["batch"].tolist(), found.get(TOKENS, np.full(len(live), np.nan))),
        not_finite=[line.batch for line in live if line.is_not_finite],
        num_unreadable=len(lines) - len(whole),
        dead=[Rows(columns=columns_of(branch, columns)) for branch in sorted(dead, key=lambda lines: lines[0].launch)],
        lines=[line.content for line in live],
    )


def add_numbers(columns: dict[str, "array[float]"], index: int, record: Record) -> None:
    """Add the numbers of line `index`. A column ends at the last line that has its number."""
    for name, value in record.items():
        is_number = value is None or isinstance(value, int | float)  # null was not finite
        if is_number and (name in columns or len(columns) < MAX_NAMES):
            column = columns.setdefault(name, array("d"))
            number = number_of(value)
            column.extend((*repeat(math.nan, index - len(column)), math.nan if number is None else number))


def columns_of(lines: list[Line], columns: dict[str, "array[float]"]) -> dict[str, NDArray[Any]]:
    """Return the columns of some lines."""
    at = np.array([line.index for line in lines], np.int64)
    found: dict[str, NDArray[Any]] = {"batch": np.array([line.batch for line in lines], np.int64)}
    found["launch"] = np.array([line.launch for line in lines], np.int64)
    for name, column in columns.items():
        if name not in found:
            values = np.frombuffer(column)
            is_there = at < len(values)
            found[name] = np.where(is_there, values[np.where(is_there, at, 0)], np.nan)
    return found


def count_tokens(batches: list[int], so_far: Floats) -> Floats:
    counts = np.full(len(batches), np.nan)
    counts[1:] = np.where(np.diff(batches) == 1, np.diff(so_far), np.nan)
    if batches and batches[0] <= 1:
        counts[0] = so_far[0]
    return counts


def span(first_batch: int, last_batch: int) -> str:
    if first_batch == last_batch:
        return f"batch {first_batch:,}"
    return f"batches {first_batch:,} to {last_batch:,}"
