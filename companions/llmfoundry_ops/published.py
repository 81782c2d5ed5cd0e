"""Records of launches beside a run's checkpoints, as the core's `checkpoint/launch_record.py` writes them. No torch.

A record tells on every machine how a launch goes or has ended. Anybody may have written it, so it is read up to
MAX_RECORD_BYTES, and values of another type than a launch writes count as absent.

A launch that was killed leaves the status `running`, and its process can be looked for on its own machine alone. Other
machines know when it has last renewed its lease (`Sighting`), by its own clock.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import parse_json
from llmfoundry_lite.checkpoint.commit import COMMITTED, batch_of
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.launch_record import (
    EARLY_END,
    LEASE,
    RECORDS,
    describe_lease,
    find_epochs,
    list_records,
    record_name,
)
from llmfoundry_lite.checkpoint.lease import WATCH_SECONDS, Holder, Leases
from llmfoundry_lite.checkpoint.run_log import number_of
from llmfoundry_lite.ranks.identity import boot_id, is_alive
from llmfoundry_lite.ranks.status import SAVED_IN, is_sound
from llmfoundry_lite.report.log import LOSS, RATE

MAX_RECORD_BYTES = 1 << 16
"""The largest record that is read. A launch writes about a kilobyte."""
MAX_RECORDS = 1000
"""Number of records that are read of one run: the newest ones."""
READS_AT_ONCE = 16
"""Records, and runs, that are read at the same time."""
RUNNING = "running"
MAX_REASON_CHARACTERS = 2000
"""Characters of a reason that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """Facts that a launch has recorded about itself. None means that a fact is unknown."""

    epoch: int
    """Number of its lease. A higher one is of a later launch."""
    status: str
    """`running`, `done`, `stopped`, `preempted` or `failed`."""
    batch: int
    """Number of batches that were trained when the record was written."""
    reason: str | None
    """Why it has ended or, while it runs, why it was asked to leave."""
    last_saved: str | None
    """Name of the run's newest checkpoint, such as `ba200`."""
    saved_in: str | None
    """Path or URL of `save_fallback` while the newest save is there, and not beside this record."""
    failed_saves: int
    save_error: str | None
    run_name: str | None
    max_duration: str | None
    launch: int | None
    """Number of the launch in metrics.jsonl."""
    began_at: float | None
    """When it began to train. This and the following times are in seconds since 1970, by the clock of its machine."""
    began_at_batch: int | None
    saved_at: float | None
    """When it has published its newest save; None if it has saved nothing."""
    written_at: float | None
    loss: float | None
    tokens_per_second: float | None
    host: str | None
    process: dict[str, Any]
    """Identity of rank 0, for `is_alive`; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """When, and whether, a launch that its record calls running has been heard of."""

    heard_at: float | None
    """When it has last renewed its lease or written its record, by its own clock."""
    has_released: bool
    """It has given up its lease, so it has ended, although its record does not say how."""
    is_gone: bool
    """Its process was on this machine, and has ended."""

    @property
    def silent_seconds(self) -> float:
        """Time since it has been heard of; 0 if that is unknown."""
        return 0.0 if self.heard_at is None else time.time() - self.heard_at


def parse_record(epoch: int, content: bytes) -> LaunchRecord | None:
    """Parse a record; None if it is too large, or lacks a status or a batch of the right type."""
    try:
        facts = parse_json(content) if len(content) <= MAX_RECORD_BYTES else None
    except ValueError:
        return None
    if facts is None or not is_sound(facts):
        return None

    def text(key: str, limit: int = 200) -> str | None:
        """Return a text of the record, cut off at `limit` characters; None if it is none."""
        value = facts.get(key)
        return value[:limit] if isinstance(value, str) else None

    def number(key: str) -> float | None:
        """Return a finite number of the record; None if it is none."""
        value = facts.get(key)
        return None if isinstance(value, bool) else number_of(value)

    def count(key: str) -> int | None:
        """Return a whole number of the record that is not negative; None if it is none."""
        value = facts.get(key)
        return value if type(value) is int and 0 <= value < 1 << 53 else None

    last_saved = text("last_saved")
    if last_saved is not None and not COMMITTED.fullmatch(last_saved):
        last_saved = None
    process = facts.get("process", {})
    return LaunchRecord(
        epoch=epoch,
        status=facts["status"][:40],
        batch=facts["batch"],
        reason=text("reason", MAX_REASON_CHARACTERS),
        last_saved=last_saved,
        saved_in=text(SAVED_IN) or None,
        failed_saves=count("failed_saves") or 0,
        save_error=text("save_error", MAX_REASON_CHARACTERS),
        run_name=text("run_name"),
        max_duration=text("max_duration"),
        launch=count("launch"),
        began_at=number("began_at"),
        began_at_batch=count("began_at_batch"),
        saved_at=number("saved_at"),
        written_at=number("written_at"),
        loss=number(LOSS),
        tokens_per_second=number(RATE),
        host=process["host"][:200] if process else None,
        process=process,
    )


def read_record(root: Folder, epoch: int) -> LaunchRecord | None:
    """Read the record of the launch that held lease `epoch` of the run in folder `root`.

    Returns None if there is none that a launch has written. Raises OSError if it cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        return parse_record(epoch, root.child(RECORDS).read(record_name(epoch), MAX_RECORD_BYTES))
    return None


class NewestLaunch(NamedTuple):
    """Records of the newest launch of a run."""

    record: LaunchRecord | None = None
    """The record of the newest launch that has begun to train; None if it cannot be used. Records of earlier launches
    do not stand in for it, because they tell nothing about the run's present state."""
    early_end: LaunchRecord | None = None
    """The record of a launch that ended before it trained, and after which no launch has touched the lease."""


def read_newest_launch(root: Folder) -> NewestLaunch:
    """Read the records of a run's newest launch. Raises OSError if they cannot be read."""
    names = root.child(RECORDS).names()
    epochs = find_epochs(names)
    record = read_record(root, epochs[-1]) if epochs else None
    early_end = _read_early_end(root, record) if EARLY_END in names else None
    is_run_done = record is not None and record.status == "done"  # a later mistake does not undo that
    return NewestLaunch(record, None if is_run_done else early_end)


def _read_early_end(root: Folder, record: LaunchRecord | None) -> LaunchRecord | None:
    """Read the record of a launch that ended before it trained; None if a launch has touched the lease since.

    None too if another launch seems to begin. `record` is that of the newest launch that has begun. Raises OSError.
    """
    try:
        content = root.child(RECORDS).read(EARLY_END, MAX_RECORD_BYTES)
        facts = parse_json(content) if len(content) <= MAX_RECORD_BYTES else None
    except (FileNotFoundError, ValueError):
        return None
    holder = Leases(root).current_holder()
    if not isinstance(facts, dict) or facts.get(LEASE) != describe_lease(holder):
        return None
    if holder is not None and _may_begin(holder, record):
        return None
    return parse_record(0 if holder is None else holder.epoch, content)


def _may_begin(holder: Holder, record: LaunchRecord | None) -> bool:
    """Return whether the holder of the lease may still restore the run, so that it has no record yet.

    It does not if its process was on this machine and is gone, or if it has renewed the lease before and no more.
    """
    has_begun = record is not None and record.epoch >= holder.epoch
    if has_begun or holder.is_released:
        return False
    is_of_this_machine = "pid" in holder.owner and holder.owner.get("boot") == boot_id()
    if is_of_this_machine and is_alive(holder.owner) is False:
        return False
    renewed_at = number_of(holder.renewed_at)
    return renewed_at is None or time.time() - renewed_at < WATCH_SECONDS


def describe_second_place(record: LaunchRecord | None, newest_batch: int) -> str | None:
    """Return where the newest save is if that is not beside the record, such as `its newest save, ba8, is in
    save_fallback, /nvme/mpt-1b`; else None.

    newest_batch: batch of the newest checkpoint beside the record; 0 if there is none. Nothing is said of a save that
    was copied there since.
    """
    if record is None or record.saved_in is None or record.last_saved is None:
        return None
    if batch_of(record.last_saved) <= newest_batch:
        return None
    return f"its newest save, {record.last_saved}, is in save_fallback, {record.saved_in}"


def describe_early_end(early_end: LaunchRecord) -> str:
    """Return the reason of a launch that ended before it trained: `did not begin: data/c4 is missing`."""
    return f"did not begin: {early_end.reason or 'the reason was not recorded'}"


def has_ended_early(sighting: Sighting | None, early_end: LaunchRecord | None) -> bool:
    """Return whether a run's state is that of a launch that ended before it trained.

    It is not while the launch that began last still trains, because then the other one was only a second start of the
    same run. `sighting` is what is known of a launch that its record calls running; None for any other.
    """
    if early_end is None or sighting is None:
        return early_end is not None
    return sighting.is_gone or sighting.has_released or sighting.silent_seconds >= WATCH_SECONDS


def read_all_records(root: Folder) -> list[LaunchRecord]:
    """Read the records of a run's launches, oldest first, and only the newest MAX_RECORDS. Raises OSError."""
    epochs = list_records(root)[-MAX_RECORDS:]
    with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="launch-records") as pool:
        records = list(pool.map(lambda epoch: read_record(root, epoch), epochs))
    return [record for record in records if record is not None]


def look_for(root: Folder, record: LaunchRecord) -> Sighting:
    """Look for a launch that its record calls running: by its lease, and by its process if that was on this machine.

    Raises OSError if the lease cannot be read.
    """
    holder = Leases(root).read_holder(record.epoch)
    times = [heard for heard in (record.written_at, number_of(holder.renewed_at)) if heard is not None]
    # Several machines may have one host name, such as ubuntu, so the boot has to be this one too.
    is_of_this_machine = "pid" in record.process and record.process.get("boot") == boot_id()
    is_gone = is_of_this_machine and is_alive(record.process) is False
    return Sighting(max(times, default=None), holder.is_released, is_gone)


def describe_silence(record: LaunchRecord, sighting: Sighting) -> str | None:
    """Say for how long nothing was heard of a launch that its record calls running.

    For example, `last heard of 12 min ago on gpu003`. None if it has renewed its lease within the time for which a new
    launch would watch it.
    """
    if sighting.silent_seconds < WATCH_SECONDS:
        return None
    host = f" on {record.host}" if record.host else ""
    return f"last heard of {format_age(sighting.silent_seconds)} ago{host}"


def format_age(seconds: float) -> str:
    """Format the time since something happened in its largest unit: `40 s`, `12 min`, `3.5 h`, `9 d`."""
    seconds = max(0.0, seconds)  # clocks of two machines differ
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} d"
