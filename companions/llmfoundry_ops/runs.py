"""State of runs that may still be written, for `lf.runs` and `watch`. No torch.

Reads status.json, config.yaml and, at each look, what metrics.jsonl has since the last one. Of a folder of checkpoints,
such as one in a bucket, it reads the newest checkpoint and the log that travels with it.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_lines_at_most
from llmfoundry_lite.checkpoint.commit import COMMITTED, Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.lease import WATCH_SECONDS, Holder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import INSIDE_A_RUN
from llmfoundry_lite.checkpoint.run_log import POSITIONS, Record, number_of, read_lines, validation_losses
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import TIME_UNITS, Duration
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, DataError, IncompleteCheckpointError
from llmfoundry_lite.ranks.identity import boot_id, is_alive
from llmfoundry_lite.ranks.status import STATUS, read_status
from llmfoundry_lite.report.reading import (
    LOSS,
    METRICS,
    add_carried_log,
    find_checkpoint_folder,
    read_config,
    read_run_file,
    suggest_location,
)

SAVED = "saved"
"""Status of a run of which only the checkpoints are known: whether it still trains cannot be told from them."""
LOOK_SECONDS = 1.0
"""Time between two looks at a log on this machine."""
BUCKET_SECONDS = 10.0
"""Time between two looks at checkpoints. A look at a bucket lists it and asks for each of them."""
PATIENCE_SECONDS = 1800.0
"""Time without a sign of a launch after which a run that is known by its checkpoints counts as ended. By default a
launch that has lost its bucket trains on for as long (`max_unsaved`)."""


class LiveRun:
    """State of a run: each `look` reads what has been written since the last one.

    `status` is what `status.json` has, `last` the newest line of the log, `config` the run's YAML.
    """

    look_seconds = LOOK_SECONDS

    def __init__(self, folder: Path):
        """Raises DataError if there is no run."""
        self.folder: Path | str = folder
        """The run directory; of a `SavedRun`, the path or URL of its checkpoints."""
        self._path = folder
        self.config: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.last: Record = {}
        """Numbers in the newest line of the log."""
        self.validation: tuple[int, float] | None = None
        """(batch, loss)"""
        self.max_duration: Duration | None = None
        self.trouble: str | None = None
        """Why the last look could not read the checkpoints, or not the newest one."""
        self.idle: str | None = None
        """Why it seems that no launch trains the run, if it is known by its checkpoints alone."""
        self._offset = 0
        self._opened = open_folder(str(folder))
        if not any((folder / name).is_file() for name in (STATUS, METRICS)):
            raise DataError(f"{folder}: no {STATUS} here; {suggest_location(folder)}")

    def look(self) -> None:
        """Read the status, and what the log has since the last look."""
        self.status = {"status": "unknown", "batch": 0, "reason": None, **(read_status(self._path) or {})}
        if self.max_duration is None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not written yet, or not by us
                self.config = read_config(self._opened) or {}
                self.max_duration = Duration.parse(self.config["max_duration"], TIME_UNITS)
        with contextlib.suppress(OSError):
            self._take(self._new_lines())

    def _take(self, lines: Iterable[bytes]) -> None:
        """Note what lines of the log say."""
        for _, record in read_lines(lines):
            self.last = {key: value for key, value in record.items() if number_of(value) is not None}
            losses = [*validation_losses(self.last).values()]
            if losses:
                self.validation = (record["batch"], losses[0])

    def _new_lines(self) -> Iterator[bytes]:
        """Yield lines of the log since the last look. One that is being written is for the next."""
        for line in read_lines_at_most(self._path / METRICS, MAX_LOG_BYTES, METRICS, begin=self._offset):
            if line.endswith(b"\n"):
                self._offset += len(line)
                yield line

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        facts = [f"{self.folder}: {self.ending}"]
        if self.loss is not None:
            facts.append(f"loss {self.loss:.4f}")
        if self.validation is not None:
            facts.append(f"validation {self.validation[1]:.4f} at batch {self.validation[0]:,}")
        if saved := self.last_checkpoint():
            facts.append(f"saved {saved}")
        if self.failed_saves:
            facts.append(f"failed saves {self.failed_saves}: {self.save_error}")
        return f"<{', '.join(facts)}>"

    @property
    def ending(self) -> str:
        """Return `done at batch 300` or `failed at batch 120: out of memory …`."""
        reason = f": {self.status['reason']}" if self.status.get("reason") else ""
        return f"{self.status['status']} at batch {self.batch}{reason}"

    @property
    def loss(self) -> float | None:
        """Training loss of the newest batch."""
        return self.last.get(LOSS)

    @property
    def has_ended(self) -> bool:
        return self.status["status"] != "running"

    @property
    def batch(self) -> int:
        # Batches that were logged after the last save of a run that has ended are trained again.
        counts_log = not self.has_ended or self.status["status"] == "unknown"
        return max(self.status["batch"], self.last.get("batch", 0) if counts_log else 0)

    @property
    def progress(self) -> float | None:
        """Return the share of the run that is done."""
        if self.status["status"] == "done":
            return 1.0
        if self.max_duration is None:
            return None
        key = POSITIONS[self.max_duration.unit]
        done = self.batch if key == "batch" else self.last.get(key, 0)
        return min(1.0, done / float(self.max_duration.value))

    @property
    def failed_saves(self) -> int:
        """Number of saves that have failed since the last one that did not."""
        count = self.status.get("failed_saves")
        return count if isinstance(count, int) else 0

    @property
    def save_error(self) -> str:
        """Why the last of the failed saves failed."""
        return str(self.status.get("save_error") or "")

    def last_checkpoint(self) -> str | None:
        """Return `ba200`; None if there is none. If they lie behind a URL, it is the one that status.json names."""
        where = find_checkpoint_folder(self._opened, self.config, allowed_protocols=())
        with contextlib.suppress(CheckpointError):  # a disk that does not answer now
            candidates = CheckpointStore(where).candidates() if where is not None else []
            if where is not None:
                return next((f"ba{one.batch}" for one in candidates if one.head is not None), None)
        saved = self.status.get("last_saved")
        return saved if isinstance(saved, str) and COMMITTED.fullmatch(saved) else None


class SavedRun(LiveRun):
    """State of a run as its checkpoints tell it: each `look` reads the newest one, if that is another than before.

    The `status` is `done` when the newest checkpoint is the run's end, else `saved`: no checkpoint says how a launch
    ended. It is `ended` when the process that saved last is known to be gone. It is too when for `patience_seconds`
    nobody has held the lease, or its holder has neither renewed it nor saved: until then another launch may come, as
    between two sites of a relay.
    """

    look_seconds = BUCKET_SECONDS

    def __init__(self, opened: Folder, store: CheckpointStore):
        self.patience_seconds = PATIENCE_SECONDS
        self.folder = opened.url
        self.config = {}
        self.status = {"status": SAVED, "batch": 0, "reason": None}
        self.last = {}
        self.validation = None
        self.max_duration = None
        self.trouble = None
        self.idle = None
        self._last_sign = ""
        """Text that changes with each sign of a launch."""
        self._last_sign_at = 0.0
        """When that changed, by the monotonic clock."""
        self._opened = opened
        self._store = store
        self._newest: Checkpoint | None = None

    def look(self) -> None:
        """Read the newest checkpoint. Raises CheckpointError if the first look finds none that can be read; a later one
        notes the `trouble`, as a bucket that does not answer now may answer at the next look."""
        try:
            self._read_newest()
        except CheckpointError as error:
            if self._newest is None:
                raise
            self.trouble = str(error)
        except OSError as error:
            text = f"{self._opened.url}: cannot be read: {error.strerror or error}"
            if self._newest is None:
                raise DataError(text) from error
            self.trouble = text

    def _read_newest(self) -> None:
        before = self._newest.manifest.save_id if self._newest is not None else None
        listed = [candidate for candidate in self._store.candidates() if candidate.head is not None]
        if not listed:
            raise DataError(f"{self._store.root.url}: no checkpoint here can be read")
        damaged: CheckpointError | None = None
        for candidate in listed:
            assert candidate.head is not None
            if candidate.head.save_id == before:
                break
            try:
                newest = candidate.open()
            except (DamagedCheckpointError, IncompleteCheckpointError) as error:
                damaged = damaged or error  # the run would carry on from an older one, which tells of it
                continue
            self._read_log(newest)
            self._newest = newest  # if its log cannot be read now, the next look reads both again
            break
        if damaged is not None and self._newest is None:
            raise damaged
        self.trouble = str(damaged) if damaged is not None else None
        self.status = self._tell_status()

    def _read_log(self, newest: Checkpoint) -> None:
        config = newest.manifest.config
        self.config = config if isinstance(config, dict) else {}
        with contextlib.suppress(ValueError, LookupError, TypeError):  # a configuration that is not ours
            self.max_duration = Duration.parse(self.config["max_duration"], TIME_UNITS)
        content = b""
        if METRICS in self._opened.names():  # a run directory that was copied there
            content = read_run_file(self._opened, METRICS, MAX_LOG_BYTES)
        self.last = {"batch": newest.manifest.timestamp.batch}
        self._take(add_carried_log(content, newest, []))

    def _tell_status(self) -> dict[str, Any]:
        assert self._newest is not None
        stamp = self._newest.manifest.timestamp
        if self.max_duration is not None:
            position = {"ba": stamp.batch, "ep": stamp.epoch, "sp": stamp.sample, "tok": stamp.token}
            if position[self.max_duration.unit] >= self.max_duration.value:
                return {"status": "done", "batch": stamp.batch, "reason": None}
        holder = self._store.leases.current_holder()
        owner = holder.owner if holder is not None and not holder.is_released else {}
        # Several machines may have one host name, such as ubuntu, so the boot has to be this one too.
        is_of_this_machine = {"host", "pid"} <= owner.keys() and owner.get("boot") == boot_id()
        if is_of_this_machine and is_alive(owner) is False:
            reason = f"process {owner['pid']} of this machine, the last that saved here, is gone"
            return {"status": "ended", "batch": stamp.batch, "reason": reason}

        seconds = self._seconds_without_a_sign(holder)
        self.idle = _describe_idle(holder, seconds)
        if seconds >= self.patience_seconds:
            return {"status": "ended", "batch": stamp.batch, "reason": f"{self.idle} (--patience)"}
        return {"status": SAVED, "batch": stamp.batch, "reason": None}

    def _seconds_without_a_sign(self, holder: Holder | None) -> float:
        """Return for how long the looks have found the same lease and the same checkpoint."""
        assert self._newest is not None
        lease = f"{holder.activity_id} {holder.is_released}" if holder is not None else ""
        sign = f"{lease} {self._newest.manifest.save_id}"
        now = time.monotonic()
        if sign != self._last_sign:
            self._last_sign, self._last_sign_at = sign, now
        return now - self._last_sign_at

    @property
    def has_ended(self) -> bool:
        return self.status["status"] != SAVED

    def last_checkpoint(self) -> str | None:
        return self._newest.name if self._newest is not None else None


def _describe_idle(holder: Holder | None, seconds: float) -> str | None:
    """Return why it seems that no launch trains a run; None if its holder may only be about to renew its lease."""
    if holder is None:
        return f"no launch holds this run, for {seconds:.0f} s"
    if holder.is_released:
        return f"{holder.describe()} has released this run, and no launch has taken it for {seconds:.0f} s"
    if seconds < WATCH_SECONDS:
        return None
    return f"{holder.describe()} has not renewed its lease for {seconds:.0f} s"


def open_run(folder: str | os.PathLike[str]) -> LiveRun:
    """Open a run directory, or a folder of checkpoints: here, or behind a URL. Nothing is read before `look`.

    Raises DataError if there is no run, CheckpointError for a URL that cannot be opened.
    """
    opened = open_folder(folder)
    path = opened.path_here
    if path is not None and any(os.path.isfile(path / name) for name in (STATUS, METRICS)):
        return LiveRun(path)
    store = _store_in(opened)
    if store is not None:
        return SavedRun(opened, store)
    if path is not None:
        return LiveRun(path)  # which says what to give instead
    raise DataError(f"{opened.url}: no checkpoints here; expected a run's save_folder")


def _store_in(folder: Folder) -> CheckpointStore | None:
    """Return the checkpoints in a folder, or in a run directory; None if there are none."""
    for place in (folder, folder.child(INSIDE_A_RUN)):
        try:
            names = place.names()
        except OSError as error:
            if folder.path_here is not None:
                return None  # a folder into which this user may not look
            raise DataError(f"{folder.url}: cannot be read: {error.strerror or error}") from error
        if any(COMMITTED.fullmatch(name) for name in names):
            return CheckpointStore(place.url)
    return None


def list_runs(folder: str | os.PathLike[str]) -> list[LiveRun]:
    """List the runs in a folder by name. Raises DataError if there is no such folder."""
    opened = open_folder(folder)
    if opened.path_here is not None and not opened.path_here.is_dir():
        raise DataError(f"{os.fspath(folder)} is not a folder on this disk; expected one that contains run folders")
    try:
        names = sorted(opened.names())
    except OSError as error:
        raise DataError(f"{opened.url}: cannot be read: {error.strerror or error}") from error

    found = []
    for name in names:
        child = opened.child(name)
        if child.path_here is not None and not child.path_here.is_dir():
            continue
        with contextlib.suppress(DataError):  # not a run
            run = open_run(child.url)
            run.look()
            found.append(run)
    return found
