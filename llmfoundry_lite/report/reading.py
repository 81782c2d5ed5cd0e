"""Readers of a run for reports: its log (`log.py`), its configuration, the hardware it ran on. No torch.

A run is a run directory (runs/mpt-1b), on this disk or behind a URL, or a folder of checkpoints. Checkpoints carry a
copy of the log and the configuration, so such a folder is enough for a report.

`read_run` returns a `Run`. Whatever is missing, damaged or not read becomes a sentence in `Run.notes`, so that a report
is as complete as it can be. Only a run without a log or without a batch is an error.
"""

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
)
from llmfoundry_lite.checkpoint.store import Candidate, Checkpoint, CheckpointStore
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.yaml_text import block_in, read_record
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.ranks.status import LAUNCHES
from llmfoundry_lite.report.log import MAX_NAMES, Log, find_missing_batches, format_batch_span, parse_log

CONFIG = "config.yaml"
OBJECT_STORES = ("abfs", "abfss", "az", "gcs", "gs", "hf", "s3", "s3a")
"""Protocols of a recorded `save_folder` that are opened without asking the user. They connect to the provider's
service, never to a server that the run's author has chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recorded run: its log, its configuration, and the history in its newest checkpoint."""

    location: str
    """Run directory, URL or folder of checkpoints, as it was given."""
    folder: Folder
    name: str
    log: Log
    config: dict[str, Any] | None
    """The recorded configuration, which may be written by anybody. None if there is none, or it is not YAML."""
    segments: tuple[Segment, ...]
    """Where each span of batches ran, by the newest checkpoint."""
    saved_in: str | None
    """Path or URL of the folder of its checkpoints; None if the recorded one is not opened."""
    segments_from: str | None
    """URL of the newest checkpoint, whose manifest has `segments`."""
    state_digest: str | None
    """Digest of that checkpoint's state."""
    launches: list[Record]
    """Lines of launches.jsonl: only launches that ran in this run directory."""
    notes: list[str]
    """A sentence for each thing that is missing or not whole. Other modules that read a part of the run append to this
    list, although the object is frozen."""

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
    # Read the files of the run directory. Each may be missing.
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

    # Find the newest checkpoint. Without a log and a configuration, the location may be a folder of checkpoints.
    is_run_directory = METRICS in file_names or CONFIG in file_names
    saved_in = find_checkpoint_folder(folder, config, allowed_protocols) if is_run_directory else folder.url
    if saved_in is None:
        newest = None
        notes.append(f"where it ran is not known: {explain_unopened_folder(config)}")
    else:
        newest = find_newest_checkpoint(saved_in, notes)

    # The checkpoint carries the configuration, and the log of all machines that trained the run before it was saved.
    lines = content.splitlines(keepends=True)
    if newest is not None:
        if config is None:
            config = newest.manifest.config
        lines = add_carried_log(content, newest, notes)
    notes += describe_second_place(read_second_place(folder, config, allowed_protocols), newest)

    # Parse the log, and note what it lacks.
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
    """Return a note for each kind of number that a report lacks, although the run may have it.

    There are up to three notes: on batches without a record, such as "batches 3 to 5, and 2 later spans: metrics.jsonl
    has no record of them"; on validation sets after the first, whose losses are not shown; and on names of numbers
    beyond MAX_NAMES, which were not read.

    `config` is the run's recorded configuration, which names the validation sets. None if it is unknown.
    """
    notes = []
    missing_spans = find_missing_batches(log)
    if missing_spans:
        later_spans = f", and {len(missing_spans) - 1:,} later spans" if len(missing_spans) > 1 else ""
        notes.append(f"{missing_spans[0]}{later_spans}: {METRICS} has no record of them")

    # Tables and figures show the first validation set alone.
    labels = list(block_in(config, "eval_loaders"))
    if len(labels) > 1:
        other_losses = ", ".join(f"eval/{label}/loss" for label in labels[1:])
        notes.append(f"validation: eval/{labels[0]}/loss, the first of eval_loaders; {METRICS} has {other_losses} too")
    if len(log) >= MAX_NAMES:
        notes.append(f"{METRICS} has {MAX_NAMES:,} names of numbers or more: later ones are passed over")
    return notes


def describe_unused_lines(log: Log) -> list[str]:
    """Return a note on the log's half-written lines, if there are any, and one on each dead branch.

    A launch that is killed may leave a half-written line. A dead branch is a span of batches that a launch trained, and
    that a later launch trained again because it resumed from a checkpoint before them.
    """
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

    An example is "; its last launch: failed, no space left on the disk; leave this run out, or launch it again".
    `launches` are the records of launches.jsonl, oldest first. Returns an empty text if the last launch still runs, or
    if there is none.
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
    """Parse launches.jsonl: the beginning and the end of each launch that ran in a run directory, oldest first.

    The file may be written by anybody, so that no value in it is trusted. A value of another type than LAUNCH_TYPES is
    left out, and so is a number that is not finite. A line without a status is left out too. The line

        {"status": "done", "batch": 60, "uptime": NaN, "reason": 7}

    becomes {"status": "done", "batch": 60}.
    """
    launches = []
    for _, record in read_lines(content):
        launch: Record = {}
        for key, value in record.items():
            has_right_type = isinstance(value, LAUNCH_TYPES.get(key, int | float))
            is_text_or_finite = isinstance(value, str) or number_of(value) is not None
            if has_right_type and is_text_or_finite:
                launch[key] = value
        if "status" in launch:
            launches.append(launch)
    return launches


def suggest_location(folder: Path | None) -> str:
    """Say which location to give instead of a folder that has no log, as the end of an error message.

    If the folder contains runs, such as those of islands (groups of ranks that train one model, each with a run
    directory of its own), the one with the longest log is suggested. `folder` is None for a URL, behind which nothing
    is searched.
    """
    logs = [] if folder is None else folder.glob(f"*/{METRICS}")
    logs_longest_first = sorted(logs, key=lambda path: (-path.stat().st_size, path))
    if not logs_longest_first:
        return "expected a run directory such as runs/mpt-quickstart"
    names = ", ".join(sorted(path.parent.name for path in logs_longest_first))
    suggested_run = logs_longest_first[0].parent
    return f"its folders {names} are runs, such as islands of one; give {suggested_run}, which has the longest log"


def read_run_file(folder: Folder, name: str, max_bytes: int) -> bytes:
    """Read a file of a run. Raises TooLargeError if it has more than `max_bytes`, and OSError if it cannot be read."""
    content = folder.read(name, max_bytes)  # one byte more, if the file is larger
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


def read_config_if_there(folder: Folder) -> dict[str, Any] | None:
    """Read a run's config.yaml as `read_config` does; None if the folder has none, or if it cannot be read."""
    with contextlib.suppress(OSError):
        if folder.child(CONFIG).exists():
            return read_config(folder)
    return None


def config_of(run: Run) -> TrainConfig:
    """Build the configuration of a run from its record.

    References in it are not resolved, because anybody may have written it. Raises DataError if the run has none, and
    ConfigError for an unknown key or a value out of range.
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
    """Return the path or URL of the folder with a run's checkpoints.

    That is the `save_folder` in the run's recorded configuration, if it may be opened: if it is on this disk, inside
    the run directory's URL, or of one of `allowed_protocols`, and if it has no unresolved reference such as
    `${run_name}`. Otherwise it is the folder `checkpoints` in the run directory `folder`, because a run directory may
    have been moved or copied together with its checkpoints.

    Returns None if the recorded folder may not be opened, and there is no folder `checkpoints`.
    """
    default_folder = folder.child("checkpoints")
    save_folder = str((config or {}).get("save_folder") or default_folder.url)
    if may_open(save_folder, folder, allowed_protocols):
        return save_folder
    return default_folder.url if default_folder.exists() else None


def find_recorded_folder(location: str) -> str | None:
    """Return the folder with the checkpoints of the run in a folder or URL, by its recorded configuration.

    The rule is that of `find_checkpoint_folder`, as for a report. Returns None if no configuration is recorded there,
    or if it cannot be read. Raises CheckpointError, which names the folder, if that may not be opened unasked.
    """
    folder = open_folder(location)
    config = read_config_if_there(folder)
    if config is None:
        return None
    checkpoint_folder = find_checkpoint_folder(folder, config, OBJECT_STORES)
    if checkpoint_folder is None:
        raise CheckpointError(f"{location}: {explain_unopened_folder(config)}")
    return checkpoint_folder


def may_open(location: str, folder: Folder, allowed_protocols: Collection[str]) -> bool:
    """Return whether a place that the recorded configuration of the run in `folder` names may be opened unasked.

    `find_checkpoint_folder` has the rule.
    """
    protocol, separator, _ = location.partition("://")
    is_local = not separator or protocol in ("file", "local")
    is_inside_run = location.startswith(f"{folder.url.rstrip('/')}/")
    is_resolved = "${" not in location and "\0" not in location
    return is_resolved and (is_local or is_inside_run or protocol in allowed_protocols)


def explain_unopened_folder(config: dict[str, Any] | None) -> str:
    """Say why the `save_folder` in a recorded configuration is not opened, and what to give instead."""
    save_folder = str((config or {}).get("save_folder"))
    return (
        f"its checkpoints are in {save_folder}, which is {_reason_not_to_open(save_folder)}; give that folder instead"
    )


def _reason_not_to_open(location: str) -> str:
    """Return why a place that a recorded configuration names is not opened."""
    return "not resolved here" if "${" in location else "not opened unasked"


@dataclass(frozen=True, slots=True)
class RecordedFallback:
    """The `save_fallback` of a recorded configuration: where saves went while those to `save_folder` failed."""

    location: str
    candidates: list[Candidate]
    """Checkpoints there, newest first. Some may not be readable."""
    problem: str
    """Why they are not known; empty if they are."""


def read_second_place(
    folder: Folder, config: dict[str, Any] | None, allowed_protocols: Collection[str] = OBJECT_STORES
) -> RecordedFallback | None:
    """List the checkpoints in a run's second place; None if its recorded configuration names none.

    Anybody may have written the configuration of the run in `folder`, so the place is opened by the same rule as its
    `save_folder` (`find_checkpoint_folder`).
    """
    location = (config or {}).get("save_fallback")
    if not isinstance(location, str) or not location:
        return None
    if not may_open(location, folder, allowed_protocols):
        return RecordedFallback(location, [], f"{_reason_not_to_open(location)}; give that folder to list its saves")
    try:
        opened = open_folder(location)
        if opened.path_here is not None and not opened.exists():
            return RecordedFallback(location, [], "not on this machine")
        return RecordedFallback(location, CheckpointStore(location).candidates(), "")
    except (CheckpointError, OSError) as error:
        return RecordedFallback(location, [], f"not readable here: {error}")


def describe_second_place(place: RecordedFallback | None, newest: Checkpoint | None) -> list[str]:
    """Return notes on a run's second place: its saves, and whether one is newer than `newest`, the newest of the first.

    There are none if the run has no second place, or no save is there.
    """
    if place is None:
        return []
    if place.problem:
        return [f"saves in save_fallback are not known: {place.location} is {place.problem}"]
    if not place.candidates:
        return []
    names = ", ".join(candidate.name for candidate in place.candidates)
    note = f"save_fallback {place.location} holds {names}"
    readable = [candidate for candidate in place.candidates if candidate.head is not None]
    head = newest.manifest.head if newest is not None else None
    if readable and (head is None or readable[0].recency > (head.lease_epoch, head.batch)):
        note += f"; {readable[0].name} is newer than what save_folder has; `checkpoint copy` copies it there"
    return [note]


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

    Such lines are about batches that another machine trained before the run was moved. If a run trained its batches 1
    to 50 elsewhere, and 51 to 80 here, then `content`, this machine's metrics.jsonl, has the latter, and the copy in
    checkpoint ba80 has all of them. The note is "batches 1 to 50: from the log that came with ba80".

    Appends to `notes` which parts of the copy are lost, and which span of batches comes from it.
    """
    lines = content.splitlines(keepends=True)
    carried_log = read_log(newest)
    notes.extend(carried_log.notes)
    if carried_log.content is None:
        return lines

    merged_lines = merge_logs(content, carried_log.content)
    if not lines:  # in a folder of checkpoints, all lines come from the copy, which needs no note
        return merged_lines
    added_batches = {record["batch"] for _, record in read_lines(set(merged_lines) - set(lines))}
    if added_batches:
        span = format_batch_span(min(added_batches), max(added_batches))
        notes.append(f"{span}: from the log that came with {newest.name}")
    return merged_lines
