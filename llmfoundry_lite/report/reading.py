"""What a run has left behind, as it is read for a report: its log, its configuration, where it ran.

A run is a run directory (runs/mpt-1b), here or behind a URL, or a folder of checkpoints that carry the log with them.
Owns what is made of half-written, missing and repeated lines; asks nothing of the training code and needs no torch.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from llmfoundry_lite.checkpoint.log_parts import read_log
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.checkpoint.places import LocalPlace, Place, open_place
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.errors import CheckpointError, DataError

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
MAX_BYTES = 4 << 30

LOSS, VALIDATION = "loss/train/total", "eval/loss"
TOKENS, SECONDS, ELAPSED = "time/token", "time/batch_seconds", "time/elapsed_seconds"
RATE, FLOPS, MFU = "throughput/tokens_per_sec", "throughput/device/flops_per_sec", "throughput/device/mfu"
COLUMNS = (LOSS, VALIDATION, TOKENS, SECONDS, ELAPSED, RATE, FLOPS, MFU)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Log:
    """metrics.jsonl as columns, of each batch its last line, in order of batch; NaN where a line has no number."""

    batch: NDArray[np.int64]
    launch: NDArray[np.int64]
    digest: list[str | None]
    columns: dict[str, Floats]
    tokens: Floats
    """In each batch; NaN where the log does not have the batch before it."""
    not_finite: list[int]
    """Batches whose loss was neither skipped over nor a number: null in the file."""
    num_unreadable: int
    """Lines that are not whole."""
    num_repeated: int
    """Lines of batches that a later launch trained again, after a restore from before them."""
    repeated_seconds: float

    def __getitem__(self, column: str) -> Floats:
        return self.columns[column]

    def within(self, first_batch: int, last_batch: int) -> slice:
        return slice(*np.searchsorted(self.batch, (first_batch, last_batch + 1)).tolist())


@dataclass(frozen=True, slots=True)
class Run:
    where: str
    place: Place
    name: str
    log: Log
    config: dict[str, Any] | None
    segments: tuple[Segment, ...]
    segments_from: str | None
    """The checkpoint whose manifest they stand in."""
    notes: list[str]
    """A line for each thing that was not there or not whole."""


def read_run(where: str) -> Run:
    """Raises DataError if there is no log of a run at `where`, CheckpointError if a URL cannot be reached."""
    notes: list[str] = []
    place = open_place(where)
    try:
        names = place.names()
        lines = place.read(METRICS, MAX_BYTES) if METRICS in names else b""
        config = read_config(place, notes) if CONFIG in names else None
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror or error}") from None
    is_run = METRICS in names or CONFIG in names
    newest = find_newest(folder_of_checkpoints(place, config) if is_run else place.url, notes)
    if newest is not None:
        config = config if config is not None else newest.manifest.config
        lines = add_carried_log(lines, newest, notes)
    if not is_run and not lines:
        raise DataError(f"{where}: no {METRICS} here; expected a run directory such as runs/mpt-quickstart")
    log = parse_log(lines.splitlines())
    if not len(log.batch):
        raise DataError(f"{where}: {METRICS} has no batch in it yet")
    if CONFIG not in names:
        notes.append(f"no {CONFIG} here" + ("" if config is None else ": read from the newest checkpoint"))
    if log.num_unreadable:
        notes.append(f"{log.num_unreadable} half-written line{'s' if log.num_unreadable > 1 else ''} passed over")
    if log.num_repeated:
        notes.append(
            f"{log.num_repeated:,} batches were trained twice, after restores from before them: the last time counts, "
            f"the {log.repeated_seconds:,.0f} s of the first are in no figure"
        )
    name = (config or {}).get("run_name") or place.url.rstrip("/").rsplit("/", 1)[-1]
    segments = newest.manifest.segments if newest is not None else ()
    return Run(where, place, name, log, config, segments, newest.where if newest is not None else None, notes)


def read_config(place: Place, notes: list[str]) -> dict[str, Any] | None:
    try:
        config = yaml.safe_load(place.read(CONFIG, MAX_BYTES))
    except yaml.YAMLError:
        config = None
    if isinstance(config, dict):
        return config
    notes.append(f"{CONFIG} is not YAML: passed over")
    return None


# ----------------------------------------------------------------------------------------------- checkpoints


def folder_of_checkpoints(place: Place, config: dict[str, Any] | None) -> str:
    """The `save_folder` of the configuration; else where a run directory has its own, wherever that was moved to."""
    return (config or {}).get("save_folder") or place.child("checkpoints").url


def find_newest(folder: str, notes: list[str]) -> Checkpoint | None:
    """The newest checkpoint whose manifest can be read. A report does without when there is none."""
    try:
        search = CheckpointStore(folder).newest_intact()
    except CheckpointError as error:
        notes.append(f"where it ran is not known: {error}")
        return None
    notes.extend(search.notes)
    if search.checkpoint is None:
        notes.append(f"where it ran is not known: no checkpoint in {folder}")
    return search.checkpoint


def add_carried_log(lines: bytes, newest: Checkpoint, notes: list[str]) -> bytes:
    """With the lines of batches that another machine trained, which travel with its checkpoints."""
    try:
        carried, _, lost = read_log(newest)
        notes.extend(lost)
    except CheckpointError as error:
        notes.append(f"the log that came with {newest.name} is damaged: {error}")
        return lines
    if carried is None:
        return lines
    last = max((record["batch"] for record in readable(lines.splitlines()) if record is not None), default=-1)
    more = [line for line in carried.splitlines() for record in readable([line]) if record and record["batch"] > last]
    if more and lines:
        notes.append(f"batches after {last:,} are from the log that came with {newest.name}")
    return b"\n".join([*lines.splitlines(), *more])


# ------------------------------------------------------------------------------------------------------ the log


def parse_log(lines: Iterable[bytes]) -> Log:
    latest: dict[int, tuple[Any, ...]] = {}
    num_unreadable, num_repeated, repeated_seconds = 0, 0, 0.0
    for record in readable(lines):
        if record is None:
            num_unreadable += 1
            continue
        batch, launch = record["batch"], record.get("launch", 0)
        before = latest.get(batch)
        if before is not None and before[0] < launch:  # the same launch writes a line anew to add to it
            num_repeated += 1
            repeated_seconds += before[3 + COLUMNS.index(SECONDS)] or 0.0
        is_not_finite = LOSS in record and record[LOSS] is None
        latest[batch] = (launch, record.get("data/digest"), is_not_finite, *(record.get(key) for key in COLUMNS))
    batches = sorted(latest)
    rows = [latest[batch] for batch in batches]
    values = np.array([row[3:] for row in rows], dtype=np.float64).reshape(len(rows), len(COLUMNS))
    columns = {key: values[:, i] for i, key in enumerate(COLUMNS)}
    return Log(
        batch=np.array(batches, np.int64),
        launch=np.array([row[0] for row in rows], np.int64),
        digest=[row[1] for row in rows],
        columns=columns,
        tokens=count_tokens(batches, columns[TOKENS]),
        not_finite=[batch for batch, row in zip(batches, rows, strict=True) if row[2]],
        num_unreadable=num_unreadable,
        num_repeated=num_repeated,
        repeated_seconds=repeated_seconds,
    )


def count_tokens(batches: list[int], so_far: Floats) -> Floats:
    counts = np.full(len(batches), np.nan)
    counts[1:] = np.where(np.diff(batches) == 1, np.diff(so_far), np.nan)
    if batches and batches[0] <= 1:
        counts[0] = so_far[0]
    return counts


def readable(lines: Iterable[bytes]) -> Iterable[dict[str, Any] | None]:
    """The record of each line; None for one that was cut off while it was written."""
    for line in lines:
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) and isinstance(record.get("batch"), int) else None


def is_local(place: Place) -> bool:
    return isinstance(place, LocalPlace)
