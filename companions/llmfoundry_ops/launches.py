"""Launches of a run, the cost of failures, and the interval of saves that they suggest.

A launch is known from its lines in metrics.jsonl, and from launches.jsonl, which only the run directory has where it
ran. They are matched by the batch where a launch began. A failure is a launch that had begun and ended as `failed`, or
without a record (killed, or its machine went down); of launches that ran elsewhere, one that lost batches.

    hours           `time/elapsed_seconds` of all launches, lost batches included, start-up not
    between         these over the number of failures, if there are MIN_FAILURES
    lost            batches on dead branches, and their `time/batch_seconds` x devices
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.intervals import suggest_save_interval
from llmfoundry_lite.ranks.status import is_running, read_status
from llmfoundry_lite.report.reading import ELAPSED, SECONDS, STALL, Log, Rows, Run

RUNNING, KILLED, NEVER_BEGAN = "running", "killed without a word", "never began"
FAILURES = ("failed", KILLED)
ELSEWHERE = "not known here"
MIN_FAILURES = 3
"""Failures from which on a mean time between them, and advice by it, are given."""

Recorded = tuple[int | None, str, str | None]
"""(batch after which a launch began, how it ended, the reason)."""


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
    launches = match(find_logged(run.log), find_recorded(run))
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


def find_logged(log: Log) -> list[Launch]:
    """Return each launch that logged batches, in order."""
    branches: list[Rows] = [log, *log.dead]
    batch, number = (np.concatenate([getattr(rows, name) for rows in branches]) for name in ("batch", "launch"))
    clock = np.concatenate([rows.numbers(ELAPSED) for rows in branches])
    devices = np.concatenate([rows.num_devices for rows in branches])
    device_seconds = devices * np.concatenate([rows.numbers(SECONDS) for rows in branches])
    is_lost = np.arange(len(batch)) >= len(log.batch)
    launches = []
    for here in (number == launch for launch in np.unique(number)):
        lost = here & is_lost
        is_known = np.isfinite(devices[lost]).all()
        launches.append(
            Launch(
                first_batch=int(batch[here].min()),
                last_batch=int(batch[here].max()),
                hours=float(np.nanmax(clock[here])) / 3600 if np.isfinite(clock[here]).any() else 0.0,
                batches_lost=int(lost.sum()),
                device_hours_lost=float(np.nansum(device_seconds[lost])) / 3600 if is_known else None,
            )
        )
    return launches


def find_recorded(run: Run) -> list[Recorded]:
    """Return each launch in launches.jsonl. A launch that never began has only an end."""
    recorded: list[Recorded] = []
    begun: int | None = None
    for event in run.launches:
        if event["status"] == RUNNING:
            if begun is not None:
                recorded.append((begun, KILLED, None))
            begun = event["batch"]
        elif begun is None or not event.get("has_begun"):
            recorded.append((None, NEVER_BEGAN, event.get("reason")))
        else:
            recorded.append((begun, event["status"], event.get("reason")))
            begun = None
    if begun is not None:
        path = run.folder.path_here
        lives = path is not None and is_running(read_status(path) or {})
        recorded.append((begun, RUNNING if lives else KILLED, None))
    return recorded


def match(logged: list[Launch], recorded: list[Recorded]) -> list[Launch]:
    """Join both, in order: a recorded launch is the next of `logged` that began at the same batch."""
    launches, left = [], list(logged)
    for begun, ended, reason in recorded:
        begins = () if begun is None else (begun, begun + 1)  # an evaluation before the first batch has a line too
        at = next((i for i, launch in enumerate(left) if launch.first_batch in begins), None)
        if at is None:
            launches.append(Launch(ended=ended, reason=reason))
        else:
            launches += [*left[:at], replace(left[at], ended=ended, reason=reason)]
            left = left[at + 1 :]
    return launches + left
