"""Launches of a run, the cost of failures, and the interval of saves that they suggest.

A launch is known from its lines in metrics.jsonl, which travel with checkpoints, and from launches.jsonl, which only
the run directory has where it ran. They are matched by the launch's number; in records of earlier releases, which have
none, by the batches where it began and ended. How a launch elsewhere ended, a relay's journal may know.

A failure is a launch that had begun and ended as `failed` or `lost`, or without a record (killed, or its machine went
down); of launches of which nothing is known here, one that lost batches.

    hours           `time/elapsed_seconds` of all launches, lost batches included, start-up not
    between         these over the number of failures, if there are MIN_FAILURES
    lost            batches on dead branches, and their `time/batch_seconds` x devices
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.save_interval import suggest_save_interval
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.status import is_running, read_status
from llmfoundry_lite.report.log import ELAPSED, SECONDS, STALL, Log, Rows
from llmfoundry_lite.report.reading import Run
from llmfoundry_ops.journal import FAILED, LOST, Allocation, read_allocations

RUNNING, KILLED, NEVER_BEGAN = "running", "killed without a word", "never began"
FAILURES = (FAILED, LOST, KILLED)
ELSEWHERE = "not known here"
MIN_FAILURES = 3
"""Failures from which on a mean time between them, and advice by it, are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A launch in launches.jsonl."""

    begun: int | None = None
    """Batch after which it began; None if it ended before."""
    number: int | None = None
    """Its number in metrics.jsonl; None in records of earlier releases."""
    last_batch: int | None = None
    """Batch at which it ended; None if it was killed."""
    ended: str
    reason: str | None = None


@dataclass(slots=True, kw_only=True)
class Logged:
    """A launch in metrics.jsonl."""

    launch: "Launch"
    number: int
    """Its number in the file."""
    num_batches: int
    """Batches that it trained, lost ones included."""

    def may_be(self, recorded: Recorded) -> bool:
        if recorded.number is not None and recorded.number != self.number:
            return False
        return self.began_after(recorded.begun)

    def began_after(self, batch: int | None) -> bool:
        # An evaluation before the first batch has a line too, under the batch that was restored.
        return batch is not None and self.launch.first_batch in (batch, batch + 1)

    @property
    def is_in_vain(self) -> bool:
        return self.launch.batches_lost == self.num_batches


@dataclass(slots=True, kw_only=True)
class Launch:
    """A launch; None is unknown."""

    first_batch: int | None = None
    """The first batch that it trained; None if it ended before."""
    last_batch: int | None = None
    ended: str = ELSEWHERE
    reason: str | None = None
    hours: float = 0.0
    batches_lost: int = 0
    device_hours_lost: float | None = 0.0

    @property
    def is_failure(self) -> bool:
        return self.ended in FAILURES or (self.ended == ELSEWHERE and self.batches_lost > 0)


def describe_failures(run: Run) -> dict[str, Any]:
    """Return each launch, what failures cost in all, and the interval of saves that they suggest."""
    logged = find_logged(run.log)
    note_ends_by_relay(logged, find_allocations(run))
    launches = match(logged, find_recorded(run))
    failures = [launch for launch in launches if launch.is_failure]
    hours = sum(launch.hours for launch in launches)
    between = hours / len(failures) if len(failures) >= MIN_FAILURES and hours else None
    stalls, seconds = run.log.numbers(STALL), run.log.numbers(SECONDS)
    save_seconds = float(np.nanmedian(stalls)) if np.isfinite(stalls).any() else None
    every = suggest_save_interval(save_seconds, between * 3600) if save_seconds and between else None
    batch_seconds = float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None
    lost = [launch.device_hours_lost for launch in launches]
    return {
        "launches": [asdict(launch) for launch in launches],
        "causes": dict(Counter(launch.ended for launch in launches)),
        "num_failures": len(failures),
        "batches_lost": sum(launch.batches_lost for launch in launches),
        "device_hours_lost": None if None in lost else sum(filter(None, lost)),
        "hours": hours,
        "hours_between_failures": between,
        "save_stall_seconds": save_seconds,
        "save_every_seconds": every,
        "save_every_batches": max(1, round(every / batch_seconds)) if every and batch_seconds else None,
    }


def find_allocations(run: Run) -> list[Allocation]:
    """Return the allocations of a run that a relay moves, in order. Notes why its journal cannot be read."""
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
    """Return each launch that logged batches, in order."""
    branches: list[Rows] = [log, *log.dead]
    batch, number = (np.concatenate([getattr(rows, name) for rows in branches]) for name in ("batch", "launch"))
    clock = np.concatenate([rows.numbers(ELAPSED) for rows in branches])
    devices = np.concatenate([rows.num_devices for rows in branches])
    device_seconds = devices * np.concatenate([rows.numbers(SECONDS) for rows in branches])
    is_lost = np.arange(len(batch)) >= len(log.batch)
    launches = []
    for launch_number in np.unique(number).tolist():
        here = number == launch_number
        lost = here & is_lost
        is_known = np.isfinite(devices[lost]).all()
        launch = Launch(
            first_batch=int(batch[here].min()),
            last_batch=int(batch[here].max()),
            hours=float(np.nanmax(clock[here])) / 3600 if np.isfinite(clock[here]).any() else 0.0,
            batches_lost=int(lost.sum()),
            device_hours_lost=float(np.nansum(device_seconds[lost])) / 3600 if is_known else None,
        )
        in_file = log.launches_in_file[launch_number]
        launches.append(Logged(launch=launch, number=in_file, num_batches=int(here.sum())))
    return launches


def find_recorded(run: Run) -> list[Recorded]:
    """Return each launch in launches.jsonl. A launch that never began has only an end."""
    recorded: list[Recorded] = []
    begun: Recorded | None = None
    """The launch that has begun and has no end yet."""
    for event in run.launches:
        reason = event.get("reason")
        if event["status"] == RUNNING:
            if begun is not None:
                recorded.append(begun)
            begun = Recorded(begun=event["batch"], number=_number_in(event), ended=KILLED)
        elif begun is None or not event.get("has_begun"):
            recorded.append(Recorded(ended=NEVER_BEGAN, reason=reason))
        else:
            recorded.append(replace(begun, ended=event["status"], reason=reason, last_batch=event["batch"]))
            begun = None
    if begun is not None:
        path = run.folder.path_here
        lives = path is not None and is_running(read_status(path) or {})
        recorded.append(replace(begun, ended=RUNNING) if lives else begun)
    return recorded


def _number_in(event: dict[str, Any]) -> int | None:
    number = event.get("launch")
    return number if type(number) is int else None


def match(logged: Sequence[Logged], recorded: Sequence[Recorded]) -> list[Launch]:
    """Join what the log and launches.jsonl say, in the log's order."""
    launches: list[Launch] = []
    left = list(logged)
    for record in recorded:
        place = _place_of(record, left)
        if place is None:
            launches.append(Launch(ended=record.ended, reason=record.reason))
            continue
        launches += [one.launch for one in left[:place]]
        launches.append(replace(left[place].launch, ended=record.ended, reason=record.reason))
        left = left[place + 1 :]
    return launches + [one.launch for one in left]


def _place_of(record: Recorded, logged: Sequence[Logged]) -> int | None:
    """Return which of the launches in the log this is; None if it logged no batch."""
    places = [place for place, one in enumerate(logged) if one.may_be(record)]
    if record.last_batch is None:
        return places[0] if places else None

    assert record.begun is not None
    for place in places:
        if logged[place].launch.last_batch == record.last_batch:
            return place
    # The last batches of a launch that left in a hurry may have no line, but no line is of a batch after its end.
    for place in places:
        last_batch = logged[place].launch.last_batch
        if last_batch is not None and record.begun < last_batch < record.last_batch:
            return place
    return None


def note_ends_by_relay(logged: Sequence[Logged], allocations: Sequence[Allocation]) -> None:
    """Note how launches ended, as a relay's journal tells it.

    An allocation may have several launches, where ranks were started again. It ended as the last of them did; how those
    before ended is not known.
    """
    starts: list[tuple[int, Allocation]] = []
    place = 0
    for allocation in allocations:
        for start in range(place, len(logged)):
            one = logged[start]
            has_saved_more = allocation.is_in_vain and not one.is_in_vain
            if one.began_after(allocation.from_batch) and not has_saved_more:
                starts.append((start, allocation))
                place = start + 1
                break

    for number, (start, allocation) in enumerate(starts, start=1):
        if allocation.ended is None:
            continue
        end = starts[number][0] if number < len(starts) else len(logged)
        last_first_batch = max(allocation.to_batch or 0, allocation.from_batch + 1)
        its_own = [one for one in logged[start:end] if (one.launch.first_batch or 0) <= last_first_batch]
        its_own[-1].launch = replace(its_own[-1].launch, ended=allocation.ended, reason=allocation.reason)
