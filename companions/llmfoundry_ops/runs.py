"""State of runs that may still be written, for `lf.runs` and `watch`. No torch.

`LiveRun` reads status.json, config.yaml and metrics.jsonl of a run folder on this machine. `SavedRun` describes a
folder that has only checkpoints, such as one in a bucket, by the newest one, the log that it carries, and the record of
the newest launch.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_lines_at_most
from llmfoundry_lite.checkpoint.commit import COMMITTED, Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.lease import WATCH_SECONDS, Holder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import INSIDE_A_RUN
from llmfoundry_lite.checkpoint.run_log import POSITIONS, Record, number_of, read_lines, validation_losses
from llmfoundry_lite.checkpoint.start import has_reached, training_done_at
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import TIME_UNITS, Duration
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, DataError, IncompleteCheckpointError
from llmfoundry_lite.ranks.identity import boot_id, is_alive
from llmfoundry_lite.ranks.status import SAVED_IN, STATUS, read_status
from llmfoundry_lite.report.log import LOSS
from llmfoundry_lite.report.reading import (
    METRICS,
    add_carried_log,
    find_checkpoint_folder,
    read_config,
    read_run_file,
    suggest_location,
)
from llmfoundry_ops.index import find_newest_head, parse_time, read_in_parallel
from llmfoundry_ops.published import (
    RUNNING,
    describe_early_end,
    describe_second_place,
    has_ended_early,
    look_for,
    read_newest_launch,
)

SAVED = "saved"
"""Status of a run that is known by its checkpoints alone, without a record of the launch that has the lease."""
LOOK_SECONDS = 1.0
"""Time between two looks at a log on this machine."""
BUCKET_SECONDS = 10.0
"""Time between two looks at checkpoints. A look at a bucket lists it and asks for each of them."""
PATIENCE_SECONDS = 1800.0
"""Time without a sign of a launch after which a run that is known by its checkpoints counts as ended. By default, a
launch that has lost its bucket trains on for as long (`max_unsaved`)."""


class RunState:
    """State of a run as of the last call of `look`, which reads what has been written since the one before.

    This is what `LiveRun` and `SavedRun` have in common.
    """

    look_seconds: float
    """Time between two looks while a run is watched."""

    def __init__(self, folder: Path | str, opened: Folder, status: str):
        """Describe a run before anything is read of it.

        folder: the run folder, or the path or URL of its checkpoints.
        opened: the same folder, open for reading.
        status: the status of the run before the first look.
        """
        self.folder = folder
        self.config: dict[str, Any] = {}
        """The run's YAML."""
        self.status: dict[str, Any] = {"status": status, "batch": 0, "reason": None}
        """Content of status.json, or the same keys as far as they follow from checkpoints."""
        self.last_record: Record = {}
        """Numbers in the newest line of the log."""
        self.validation: tuple[int, float] | None = None
        """The newest batch with a validation loss, and that loss."""
        self.max_duration: Duration | None = None
        """Length of the run, if the configuration could be read."""
        self.read_error: str | None = None
        """Why the last look could not read the checkpoints, or not the newest one."""
        self.idle_reason: str | None = None
        """Why it seems that no launch trains the run, if it is known by its checkpoints alone."""
        self._opened = opened

    def look(self) -> None:
        """Read what has been written since the last look, and update the attributes."""
        raise NotImplementedError

    def last_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint, such as `ba200`, or None if there is none."""
        raise NotImplementedError

    def __fspath__(self) -> str:
        """Return the folder, so that a run can be given in place of its path, as to `lf.load`."""
        return str(self.folder)

    def __repr__(self) -> str:
        """Return `<runs/tiny: done at batch 6, loss 2.1034, saved ba6>`."""
        facts = [f"{self.folder}: {self.describe_status()}"]
        if self.loss is not None:
            facts.append(f"loss {self.loss:.4f}")
        if self.validation is not None:
            batch, loss = self.validation
            facts.append(f"validation {loss:.4f} at batch {batch:,}")
        checkpoint = self.last_checkpoint()
        if checkpoint is not None:
            facts.append(f"saved {checkpoint}{self.second_place}")
        if self.failed_saves:
            facts.append(f"failed saves {self.failed_saves}: {self.save_error}")
        return f"<{', '.join(facts)}>"

    def describe_status(self) -> str:
        """Return the status with batch and reason: `done at batch 300` or `failed at batch 120: out of memory …`."""
        text = f"{self.status['status']} at batch {self.batch}"
        if self.status.get("reason"):
            text += f": {self.status['reason']}"
        return text

    @property
    def has_ended(self) -> bool:
        """Whether no launch trains the run any more."""
        return self.status["status"] != "running"

    @property
    def may_go_on(self) -> bool:
        """Whether the launch has ended, and another one may follow on a machine of which this one knows nothing."""
        return False

    @property
    def batch(self) -> int:
        """Batches that are trained, or if the run has ended, those that are trained and saved."""
        logged_batch = self.last_record.get("batch", 0)
        if self.has_ended and self.status["status"] != "unknown":
            logged_batch = 0  # the next launch trains batches again that were logged after the last save
        return max(self.status["batch"], logged_batch)

    @property
    def loss(self) -> float | None:
        """Training loss of the newest batch."""
        return self.last_record.get(LOSS)

    @property
    def progress(self) -> float | None:
        """Part of the run that is done, from 0.0 to 1.0, or None if the length of the run is unknown."""
        if self.status["status"] == "done":
            return 1.0
        if self.max_duration is None:
            return None
        key = POSITIONS[self.max_duration.unit]
        position = self.batch if key == "batch" else self.last_record.get(key, 0)
        return min(1.0, position / float(self.max_duration.value))

    @property
    def failed_saves(self) -> int:
        """Number of saves that have failed since the last one that did not."""
        count = self.status.get("failed_saves")
        return count if isinstance(count, int) else 0

    @property
    def second_place(self) -> str:
        """Where the newest save is if that is `save_fallback`, as ` in /nvme/mpt-1b`; empty if it is not.

        It follows the name of `last_checkpoint()`.
        """
        place = self.status.get(SAVED_IN)
        return f" in {place}" if isinstance(place, str) and place else ""

    @property
    def save_error(self) -> str:
        """Why the last of the failed saves failed."""
        return str(self.status.get("save_error") or "")

    def _note_record(self, record: Record) -> None:
        """Take a new record of the log. For subclasses that need each of them."""

    def _update_from_log(self, lines: Iterable[bytes]) -> None:
        """Update `last_record` and `validation` from new lines of the log. Lines that are not records are skipped."""
        for _, record in read_lines(lines):
            self._note_record(record)
            self.last_record = {key: value for key, value in record.items() if number_of(value) is not None}
            losses = list(validation_losses(self.last_record).values())
            if losses:
                self.validation = (record["batch"], losses[0])


class LiveRun(RunState):
    """State of a run whose run folder is on this machine, from its status.json, config.yaml and metrics.jsonl."""

    look_seconds = LOOK_SECONDS

    def __init__(self, folder: Path):
        """Open a run folder. Raises DataError if there is no run."""
        super().__init__(folder, open_folder(str(folder)), status="unknown")
        self._path = folder
        self._num_bytes_read = 0
        """Bytes of the log that earlier looks have read."""
        if not any((folder / name).is_file() for name in (STATUS, METRICS)):
            raise DataError(f"{folder}: no {STATUS} here; {suggest_location(folder)}")

    def look(self) -> None:
        """Read the status, the configuration if it is not known yet, and new lines of the log."""
        self.status = {"status": "unknown", "batch": 0, "reason": None, **(read_status(self._path) or {})}
        if self.max_duration is None:
            # The file may not be written yet, or may not be a configuration of this package.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                self.config = read_config(self._opened) or {}
                self.max_duration = Duration.parse(self.config["max_duration"], TIME_UNITS)
        with contextlib.suppress(OSError):
            self._update_from_log(self._read_new_lines())

    def _read_new_lines(self) -> Iterator[bytes]:
        """Yield new lines of the log since the last look. A line that is still being written is left for the next."""
        for line in read_lines_at_most(self._path / METRICS, MAX_LOG_BYTES, METRICS, begin=self._num_bytes_read):
            if line.endswith(b"\n"):
                self._num_bytes_read += len(line)
                yield line

    def read_time_of_save(self, name: str) -> float | None:
        """Return when a checkpoint was written, in seconds since 1970; None if it is not in a folder of this disk."""
        folder = find_checkpoint_folder(self._opened, self.config, allowed_protocols=())
        if folder is None or COMMITTED.fullmatch(name) is None:
            return None
        with contextlib.suppress(OSError, CheckpointError):
            head = find_newest_head(CheckpointStore(folder), [name], name)
            return None if head is None else parse_time(head.written_at)
        return None

    def last_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint, such as `ba200`, or None if there is none.

        If the checkpoints lie behind a URL, or if the newest is in `save_fallback`, it is the one that status.json
        names, and nothing is read from there.
        """
        name = self.status.get("last_saved")
        has_name = isinstance(name, str) and COMMITTED.fullmatch(name) is not None
        if has_name and self.status.get(SAVED_IN):
            return name
        checkpoint_folder = find_checkpoint_folder(self._opened, self.config, allowed_protocols=())
        if checkpoint_folder is not None:
            with contextlib.suppress(CheckpointError):  # the disk may not answer now
                for candidate in CheckpointStore(checkpoint_folder).candidates():
                    if candidate.head is not None:
                        return f"ba{candidate.batch}"
                return None  # there is a folder, but no checkpoint that can be read

        return name if has_name else None


class SavedRun(RunState):
    """State of a run that this machine knows by its folder of checkpoints, such as a run in a bucket.

    Each `look` reads the newest checkpoint, if it is a new one, and the log that it carries, and the record of the
    newest launch. The status is

    - `done` if the newest checkpoint is the end of the run,
    - `ended` if the process that saved last ran on this machine and is gone, or if for `patience_seconds` the holder of
      the run's lease has neither renewed it nor saved, or nobody has held it and no launch has recorded its end,
    - the one that the newest launch has recorded: `running`, `stopped`, `preempted` or `failed`,
    - `saved` if no launch has recorded any.

    For `patience_seconds` after a launch has ended, another one may come, as between two sites of a relay.
    """

    look_seconds = BUCKET_SECONDS

    def __init__(self, opened: Folder, store: CheckpointStore):
        """Describe the run whose checkpoints are in `store`. `opened` is the folder that the user named."""
        super().__init__(opened.url, opened, status=SAVED)
        self.patience_seconds = PATIENCE_SECONDS
        self._store = store
        self._newest: Checkpoint | None = None
        """The checkpoint that the last look has read."""
        self._activity = ""
        """Text that changes whenever a launch claims or renews the lease, or saves."""
        self._activity_changed_at = 0.0
        """When it changed, in seconds of the monotonic clock."""
        self._has_patience = True
        """Whether another launch may still follow the last one."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is complete, or no launch seems to train it any more."""
        return self.status["status"] not in (SAVED, RUNNING)

    @property
    def may_go_on(self) -> bool:
        """Whether the newest launch has ended before the run, for less than `patience_seconds`."""
        return self.has_ended and self.status["status"] not in ("done", "ended") and self._has_patience

    def last_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint that could be read, such as `ba200`."""
        return self._newest.name if self._newest is not None else None

    @property
    def second_place(self) -> str:
        """The newest save, if that is in `save_fallback`, as ` here, and ba8 in /nvme/mpt-1b`; empty if it is not.

        It follows the name of `last_checkpoint()`, which is the newest in this folder.
        """
        place = super().second_place
        return f" here, and {self.status['last_saved']}{place}" if place else ""

    def look(self) -> None:
        """Read the newest checkpoint, and update the status.

        Raises CheckpointError or DataError if the first look finds no checkpoint that can be read. Later looks note the
        error in `read_error` instead, because a bucket that does not answer now may answer at the next look.
        """
        try:
            self._read_newest()
        except OSError as error:
            text = f"{self._opened.url}: cannot be read: {error.strerror or error}"
            if self._newest is None:
                raise DataError(text) from error
            self.read_error = text
        except (CheckpointError, DataError) as error:
            if self._newest is None:
                raise
            self.read_error = str(error)

    def _read_newest(self) -> None:
        """Read the newest checkpoint that is not damaged, unless the last look has read it, and update the status.

        A damaged one is noted in `read_error`, and the next older one is read, from which a launch would carry on.
        Raises DataError if there is none, CheckpointError and OSError if none can be read.
        """
        candidates = [candidate for candidate in self._store.candidates() if candidate.head is not None]
        if not candidates:
            raise DataError(f"{self._store.root.url}: no checkpoint here can be read")

        save_id_read = self._newest.manifest.save_id if self._newest is not None else None
        first_error: CheckpointError | None = None
        for candidate in candidates:
            assert candidate.head is not None
            if candidate.head.save_id == save_id_read:
                break
            try:
                newest = candidate.open()
            except (DamagedCheckpointError, IncompleteCheckpointError) as error:
                if first_error is None:
                    first_error = error
                continue
            self._read_config_and_log(newest)
            # Only now, so that the next look reads both again if the log could not be read.
            self._newest = newest
            break

        if first_error is not None and self._newest is None:
            raise first_error
        self.read_error = None if first_error is None else str(first_error)
        self.status = self._find_status()

    def _read_config_and_log(self, checkpoint: Checkpoint) -> None:
        """Update the configuration, the newest record and the validation loss from a checkpoint."""
        config = checkpoint.manifest.config
        self.config = config if isinstance(config, dict) else {}
        # The configuration may not be one of this package.
        with contextlib.suppress(ValueError, LookupError, TypeError):
            self.max_duration = Duration.parse(self.config["max_duration"], TIME_UNITS)

        content = b""
        if METRICS in self._opened.names():  # the folder is a copy of a run folder
            content = read_run_file(self._opened, METRICS, MAX_LOG_BYTES)
        self.last_record = {"batch": checkpoint.manifest.timestamp.batch}
        self._update_from_log(add_carried_log(content, checkpoint, []))

    def _find_status(self) -> dict[str, Any]:
        """Return the status from the newest checkpoint, the run's lease and the newest launch's record.

        Updates `idle_reason`.
        """
        assert self._newest is not None
        batch = self._newest.manifest.timestamp.batch
        if self.max_duration is not None and has_reached(self.max_duration, training_done_at(self._newest)):
            return {"status": "done", "batch": batch, "reason": None}

        record, early_end = read_newest_launch(self._store.root)
        saves: dict[str, Any] = {}
        if record is not None and describe_second_place(record, batch) is not None:
            saves = {"last_saved": record.last_saved, SAVED_IN: record.saved_in}

        holder = self._store.leases.current_holder()
        owner: Mapping[str, Any] = {}
        if holder is not None and not holder.is_released:
            owner = holder.owner
        # Several machines may have one host name, such as ubuntu, so the boot has to be this one too.
        is_of_this_machine = {"host", "pid"} <= owner.keys() and owner.get("boot") == boot_id()
        if is_of_this_machine and is_alive(owner) is False:
            reason = f"process {owner['pid']} of this machine, the last that saved here, is gone"
            return {"status": "ended", "batch": batch, "reason": reason, **saves}

        idle_seconds = self._measure_idle_seconds(holder)
        self.idle_reason = _describe_idle(holder, idle_seconds)
        self._has_patience = idle_seconds < self.patience_seconds
        end_of_patience = f"{self.idle_reason} (--patience)"

        if record is not None and holder is not None and holder.epoch > record.epoch:
            record = None  # another launch has taken the run since, and has not begun yet
        if early_end is not None:
            is_running = record is not None and record.status == RUNNING
            sighting = look_for(self._store.root, record) if record is not None and is_running else None
            if has_ended_early(sighting, early_end):
                record = replace(early_end, reason=describe_early_end(early_end))
        if record is None or (record.status == RUNNING and not self._has_patience):
            if not self._has_patience:
                return {"status": "ended", "batch": batch, "reason": end_of_patience, **saves}
            return {"status": SAVED, "batch": batch, "reason": None, **saves}

        reason = record.reason
        if not self._has_patience:
            reason = "; ".join(filter(None, (reason, end_of_patience)))
        saves |= {"failed_saves": record.failed_saves, "save_error": record.save_error}
        return {"status": record.status, "batch": max(record.batch, batch), "reason": reason, **saves}

    def _measure_idle_seconds(self, holder: Holder | None) -> float:
        """Return for how long the looks have found the same lease and the same checkpoint.

        `holder` is the lease that this look has found, or None.
        """
        assert self._newest is not None
        activity = self._newest.manifest.save_id
        if holder is not None:
            activity = f"{holder.activity_id} {holder.is_released} {activity}"

        now = time.monotonic()
        if activity != self._activity:
            self._activity = activity
            self._activity_changed_at = now
        return now - self._activity_changed_at


def _describe_idle(holder: Holder | None, idle_seconds: float) -> str | None:
    """Return why it seems that no launch trains a run, or None if its lease's holder may only be about to renew it."""
    if holder is None:
        return f"no launch holds this run, for {idle_seconds:.0f} s"
    if holder.is_released:
        return f"{holder.describe()} has released this run, and no launch has taken it for {idle_seconds:.0f} s"
    if idle_seconds < WATCH_SECONDS:
        return None
    return f"{holder.describe()} has not renewed its lease for {idle_seconds:.0f} s"


def open_run(folder: str | os.PathLike[str]) -> RunState:
    """Open a run folder, or a folder of checkpoints, on this machine or behind a URL.

    Returns the run's state; nothing is read before `look`. Raises DataError if there is no run, and
    CheckpointError for a URL that cannot be opened.
    """
    opened = open_folder(folder)
    path = opened.path_here
    if path is not None and any(os.path.isfile(path / name) for name in (STATUS, METRICS)):
        return LiveRun(path)
    store = _find_checkpoints(opened)
    if store is not None:
        return SavedRun(opened, store)
    if path is not None:
        return LiveRun(path)  # raises a DataError that suggests another folder
    raise DataError(
        f"{opened.url}: no checkpoints here{_describe_newest_launch(opened)}; expected a run's save_folder; "
        f"`llmfoundry-lite runs ls {opened.url}` lists the runs below it"
    )


def _describe_newest_launch(folder: Folder) -> str:
    """Return how the newest launch of a run without checkpoints goes or has ended, after a comma; empty if unknown."""
    with contextlib.suppress(OSError):
        record, early_end = read_newest_launch(folder)
        place = describe_second_place(record, 0)
        second_place = f" ({place})" if place else ""
        if early_end is not None:
            return f", and its newest launch has {early_end.status}: {describe_early_end(early_end)}{second_place}"
        if record is not None:
            return f" yet, and its newest launch is {record.status}{second_place}"
    return ""


def _find_checkpoints(folder: Folder) -> CheckpointStore | None:
    """Return the checkpoints in a folder, or in the run folder that it is, or None if there are none.

    Raises DataError for a URL that cannot be read.
    """
    for checkpoint_folder in (folder, folder.child(INSIDE_A_RUN)):
        try:
            names = checkpoint_folder.names()
        except OSError as error:
            if folder.path_here is not None:
                return None  # this user may not list the folder
            raise DataError(f"{folder.url}: cannot be read: {error.strerror or error}") from error
        if any(COMMITTED.fullmatch(name) for name in names):
            return CheckpointStore(checkpoint_folder.url)
    return None


def list_runs(folder: str | os.PathLike[str]) -> list[RunState]:
    """List the runs in a folder by name, each with its present state. Entries that are not runs are skipped.

    If none of them is a run and the folder itself is one, that is returned. Raises DataError if there is no such
    folder.
    """
    opened = open_folder(folder)
    if opened.path_here is not None and not opened.path_here.is_dir():
        raise DataError(f"{os.fspath(folder)} is not a folder on this disk; expected one that contains run folders")
    try:
        names = opened.folders()
    except OSError as error:
        raise DataError(f"{opened.url}: cannot be read: {error.strerror or error}") from error

    def look_at(child: Folder) -> RunState | None:
        """Return the run in a folder, with its present state; None if it is not a run."""
        with contextlib.suppress(DataError):
            run = open_run(child.url)
            run.look()
            return run
        return None

    runs = [run for run in read_in_parallel(look_at, [opened.child(name) for name in names]) if run is not None]
    if not runs:
        run = look_at(opened)
        runs = [] if run is None else [run]
    return runs
