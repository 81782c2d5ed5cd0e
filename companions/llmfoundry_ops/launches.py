"""Launches of a run, the cost of failures, and the interval of saves that they suggest.

Four records know about launches:

- metrics.jsonl has the batches of every launch that logged any, and travels with checkpoints (`find_logged`).
- launches.jsonl says how launches ended, but is only in the run folder of the machine where they ran (`find_recorded`).
- records beside checkpoints say how launches on all machines ended, if the checkpoints are outside the run folder
  (`find_published`).
- a relay's journal says how launches on all of its sites ended (`find_allocations`).

`merge_recorded` joins the second and the third by the time at which a launch began. `join_launches` joins the result
with the log by the launch's number. Records of earlier releases have none, and are joined by the batches at which a
launch began and ended.

A failure is a launch that had begun and ended as `failed` or `lost`, or without a record (it was killed, or its machine
went down). A launch that only metrics.jsonl knows counts as a failure if it lost batches.

    hours           `time/elapsed_seconds` of all launches, lost batches included, start-up not
    between         these hours over the number of failures, if there are MIN_FAILURES
    lost            batches that were trained again, and their `time/batch_seconds` x devices
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.save_interval import suggest_save_interval
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.ranks.status import is_running, read_status
from llmfoundry_lite.report.log import ELAPSED, SECONDS, STALL, Log, Rows
from llmfoundry_lite.report.reading import Run
from llmfoundry_ops import published
from llmfoundry_ops.journal import FAILED, LOST, Allocation, read_allocations

RUNNING, KILLED, NEVER_BEGAN = "running", "killed without a word", "never began"
"""Ends of a launch that `journal.py` does not have."""
ELSEWHERE = "not known here"
"""End of a launch that ran on another machine and has left no record."""
FAILURES = (FAILED, LOST, KILLED)
MIN_FAILURES = 3
"""Number of failures from which on a mean time between them, and advice by it, are given. Fewer say little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A launch in launches.jsonl, or in a record beside checkpoints."""

    began_at_batch: int | None = None
    """Number of batches that were trained when it began; None if it ended before it began."""
    number: int | None = None
    """Its number in metrics.jsonl; None in records of earlier releases."""
    last_batch: int | None = None
    """Batch at which it ended; None if it was killed."""
    ended: str
    reason: str | None = None
    began_at: float | None = None
    """Time at which it began to train, in seconds since 1970; the same in both. None if it ended before."""


@dataclass(slots=True, kw_only=True)
class Logged:
    """A launch in metrics.jsonl."""

    launch: "Launch"
    number: int
    """Its number in the file."""
    num_batches: int
    """Number of batches that it trained, lost ones included."""

    def may_be(self, recorded: Recorded) -> bool:
        """Return whether a launch of launches.jsonl may be this one."""
        if recorded.number is not None and recorded.number != self.number:
            return False
        return self.began_at(recorded.began_at_batch)

    def began_at(self, num_batches_before: int | None) -> bool:
        """Return whether the launch began when this number of batches was trained. False for None."""
        # An evaluation before the first batch has a line too, under the batch that was restored.
        return num_batches_before is not None and self.launch.first_batch in (
            num_batches_before,
            num_batches_before + 1,
        )

    @property
    def saved_nothing(self) -> bool:
        """Whether all of its batches were lost."""
        return self.launch.batches_lost == self.num_batches


@dataclass(slots=True, kw_only=True)
class Launch:
    """A launch, as report.json has it. None means that a fact is unknown."""

    first_batch: int | None = None
    """The first batch that it trained; None if it ended before."""
    last_batch: int | None = None
    ended: str = ELSEWHERE
    reason: str | None = None
    hours: float = 0.0
    batches_lost: int = 0
    """Batches that a later launch trained again, because no save had them."""
    device_hours_lost: float | None = 0.0

    @property
    def is_failure(self) -> bool:
        """Whether the launch counts as a failure, as the module's description defines it."""
        return self.ended in FAILURES or (self.ended == ELSEWHERE and self.batches_lost > 0)


def describe_failures(run: Run) -> dict[str, Any]:
    """Return facts for report.json: each launch, what failures cost in all, and the interval of saves they suggest."""
    logged = find_logged(run.log)
    for index, allocation in find_last_launches(logged, find_allocations(run)).items():
        if allocation.ended is not None:
            last = logged[index]
            last.launch = replace(last.launch, ended=allocation.ended, reason=allocation.reason)
    launches = join_launches(logged, merge_recorded(find_recorded(run), find_published(run)))

    num_failures = sum(launch.is_failure for launch in launches)
    hours = sum(launch.hours for launch in launches)
    hours_between = None
    if num_failures >= MIN_FAILURES and hours:
        hours_between = hours / num_failures

    save_seconds = _median(run.log.numbers(STALL))
    batch_seconds = _median(run.log.numbers(SECONDS))
    every_seconds = None
    if save_seconds and hours_between:
        every_seconds = suggest_save_interval(save_seconds, hours_between * 3600)
    every_batches = None
    if every_seconds and batch_seconds:
        every_batches = max(1, round(every_seconds / batch_seconds))

    device_hours_lost = [launch.device_hours_lost for launch in launches]
    return {
        "launches": [asdict(launch) for launch in launches],
        "causes": dict(Counter(launch.ended for launch in launches)),
        "num_failures": num_failures,
        "batches_lost": sum(launch.batches_lost for launch in launches),
        "device_hours_lost": None if None in device_hours_lost else sum(filter(None, device_hours_lost)),
        "hours": hours,
        "hours_between_failures": hours_between,
        "save_stall_seconds": save_seconds,
        "save_every_seconds": every_seconds,
        "save_every_batches": every_batches,
    }


def _median(numbers: np.ndarray) -> float | None:
    """Return the median of the numbers that were logged; None if all are NaN."""
    return float(np.nanmedian(numbers)) if np.isfinite(numbers).any() else None


def find_allocations(run: Run) -> list[Allocation]:
    """Return the allocations of a run that a relay moves, in order; none for any other run.

    If the journal cannot be read, adds a note to the run, which the report prints, and returns none.
    """
    if run.folder.path_here is None:
        return []
    try:
        return read_allocations(run.folder.path_here)
    except (ConfigError, OSError) as error:
        note = f"no sites and no allocations: {error}"
        if note not in run.notes:
            run.notes.append(note)
        return []


def find_logged(log: Log) -> list[Logged]:
    """Return each launch that logged batches, in order, with the batches that were lost.

    `log` has the rows of batches that count, and `log.dead` has branches of rows that were trained again.
    """
    branches: list[Rows] = [log, *log.dead]
    batches = np.concatenate([rows.batch for rows in branches])
    launch_numbers = np.concatenate([rows.launch for rows in branches])
    elapsed_seconds = np.concatenate([rows.numbers(ELAPSED) for rows in branches])
    num_devices = np.concatenate([rows.num_devices for rows in branches])
    device_seconds = num_devices * np.concatenate([rows.numbers(SECONDS) for rows in branches])
    is_lost = np.arange(len(batches)) >= len(log.batch)

    logged = []
    for launch_number in np.unique(launch_numbers).tolist():
        in_launch = launch_numbers == launch_number
        is_lost_here = in_launch & is_lost
        has_time = np.isfinite(elapsed_seconds[in_launch]).any()
        has_device_counts = np.isfinite(num_devices[is_lost_here]).all()
        lost_device_seconds = float(np.nansum(device_seconds[is_lost_here]))
        launch = Launch(
            first_batch=int(batches[in_launch].min()),
            last_batch=int(batches[in_launch].max()),
            hours=float(np.nanmax(elapsed_seconds[in_launch])) / 3600 if has_time else 0.0,
            batches_lost=int(is_lost_here.sum()),
            device_hours_lost=lost_device_seconds / 3600 if has_device_counts else None,
        )
        number_in_file = log.launches_in_file[launch_number]
        logged.append(Logged(launch=launch, number=number_in_file, num_batches=int(in_launch.sum())))
    return logged


def find_recorded(run: Run) -> list[Recorded]:
    """Return each launch in launches.jsonl, in order.

    A launch writes an event with the status `running` when it begins, and one with how it ended. A launch that was
    killed has only the first event, and one that ended before it began only the second.
    """
    recorded: list[Recorded] = []
    current: Recorded | None = None
    """The launch that has begun and has no end yet."""
    for event in run.launches:
        reason = event.get("reason")
        if event["status"] == RUNNING:
            if current is not None:
                recorded.append(current)
            number = event.get("launch")
            current = Recorded(
                began_at_batch=event["batch"],
                number=number if type(number) is int else None,
                ended=KILLED,
                began_at=event.get("time"),
            )
        elif current is None or not event.get("has_begun"):
            recorded.append(Recorded(ended=NEVER_BEGAN, reason=reason))
        else:
            recorded.append(replace(current, ended=event["status"], reason=reason, last_batch=event["batch"]))
            current = None

    # The last launch may be running still.
    if current is not None:
        path = run.folder.path_here
        is_alive = path is not None and is_running(read_status(path) or {})
        recorded.append(replace(current, ended=RUNNING) if is_alive else current)
    return recorded


def find_published(run: Run) -> list[Recorded]:
    """Return each launch that has a record beside the run's checkpoints, in order.

    A launch whose record says that it runs was killed if a later launch has a record, or if it has released its lease
    or its process is gone. If the records cannot be read, adds a note to the run, and returns none.
    """
    if run.saved_in is None:
        return []
    launches = []
    try:
        root = open_folder(run.saved_in)
        records = published.read_all_records(root)
        for index, record in enumerate(records):
            launch = Recorded(
                began_at_batch=record.began_at_batch,
                number=record.launch,
                last_batch=record.batch,
                ended=record.status,
                reason=record.reason,
                began_at=record.began_at,
            )
            if record.status == RUNNING:
                is_newest = index == len(records) - 1
                sighting = published.look_for(root, record) if is_newest else None
                may_run = sighting is not None and not (sighting.is_gone or sighting.has_released)
                launch = replace(launch, ended=RUNNING if may_run else KILLED, reason=None, last_batch=None)
            if launch.began_at_batch is not None:
                launches.append(launch)
    except (OSError, CheckpointError) as error:
        run.notes.append(f"how launches elsewhere ended is not known: {error}")
        return []
    return launches


def merge_recorded(recorded: Sequence[Recorded], elsewhere: Sequence[Recorded]) -> list[Recorded]:
    """Return all launches of launches.jsonl, and those of other machines, in the order of time.

    Both are in that order. A launch that is in both is the one with the same beginning, and launches.jsonl decides how
    it ended. A launch that only launches.jsonl has, such as one that never began, follows the one before it there.
    """
    merged: list[Recorded] = []
    remaining = list(elsewhere)
    for launch in recorded:
        times = [other.began_at for other in remaining]
        if launch.began_at is not None and launch.began_at in times:
            index = times.index(launch.began_at)
            merged += remaining[:index]
            remaining = remaining[index + 1 :]
        merged.append(launch)
    return merged + remaining


def join_launches(logged: Sequence[Logged], recorded: Sequence[Recorded]) -> list[Launch]:
    """Join what the log and records say about launches, both of which are in the order of time.

    A recorded launch that logged no batch comes where the records have it. A logged launch that is not recorded ran on
    another machine, and keeps its end.
    """
    launches: list[Launch] = []
    remaining = list(logged)
    for record in recorded:
        index = _index_in_log(record, remaining)
        if index is None:
            launches.append(Launch(ended=record.ended, reason=record.reason))
            continue
        launches += [logged_launch.launch for logged_launch in remaining[:index]]
        launches.append(replace(remaining[index].launch, ended=record.ended, reason=record.reason))
        remaining = remaining[index + 1 :]
    return launches + [logged_launch.launch for logged_launch in remaining]


def _index_in_log(record: Recorded, logged: Sequence[Logged]) -> int | None:
    """Return the index of the logged launch that a recorded one is; None if it logged no batch."""
    candidates = [index for index, logged_launch in enumerate(logged) if logged_launch.may_be(record)]
    if record.last_batch is None:
        return candidates[0] if candidates else None

    # Several launches may have begun at the same batch. The one that also ended at the same one is it.
    assert record.began_at_batch is not None
    for index in candidates:
        if logged[index].launch.last_batch == record.last_batch:
            return index
    # The last batches of a launch that left in a hurry may have no line, but no line is of a batch after its end.
    for index in candidates:
        last_batch = logged[index].launch.last_batch
        if last_batch is not None and record.began_at_batch < last_batch < record.last_batch:
            return index
    return None


def find_last_launches(logged: Sequence[Logged], allocations: Sequence[Allocation]) -> dict[int, Allocation]:
    """Return index of a logged launch -> the allocation of a relay of which it was the last launch.

    An allocation may have several launches, if ranks were started again. It ended as the last of them did; how those
    before ended is not known. Allocations of which nothing was logged are left out.
    """
    # Find the first launch of each allocation: the next one that began at the allocation's batch.
    first_launches: list[tuple[int, Allocation]] = []
    next_index = 0
    for allocation in allocations:
        for index in range(next_index, len(logged)):
            logged_launch = logged[index]
            has_saved_more = allocation.saved_nothing and not logged_launch.saved_nothing
            if logged_launch.began_at(allocation.from_batch) and not has_saved_more:
                first_launches.append((index, allocation))
                next_index = index + 1
                break

    # Its launches reach up to the first one of the next allocation, without any that began after its last save.
    last_launches: dict[int, Allocation] = {}
    end_indices = [first_index for first_index, _ in first_launches[1:]] + [len(logged)]
    for (first_index, allocation), end_index in zip(first_launches, end_indices, strict=False):
        last_first_batch = max(allocation.to_batch or 0, allocation.from_batch + 1)
        last_index = first_index
        for index in range(first_index, end_index):
            if (logged[index].launch.first_batch or 0) <= last_first_batch:
                last_index = index
        last_launches[last_index] = allocation
    return last_launches
