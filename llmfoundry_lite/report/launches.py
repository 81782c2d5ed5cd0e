"""Launches of a run, the cost of failures, the interval of saves that they suggest, and the legs of a relay.

A launch is known from its lines in metrics.jsonl, and from launches.jsonl, which only the run directory has where it
ran. They are matched by the batch where a launch began. A failure is a launch that had begun and ended as `failed`, or
without a record (killed, or its machine went down); of launches that ran elsewhere, one that lost batches.

    hours           `time/elapsed_seconds` of all launches, lost batches included, start-up not
    between         these over the number of failures
    lost            batches on dead branches, and their `time/batch_seconds` x devices

Only a relay's own run folder has its journal, relay.jsonl:

    held            from the launch to its end, start-up and saves included
    training        `time/batch_seconds` of the batches that count, those up to the save at which a leg ended
    utilisation     training over held
    cost            hours held x the place's price, if relay.yaml names one
"""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.intervals import suggest_save_interval
from llmfoundry_lite.launch.log_lines import Record
from llmfoundry_lite.launch.status import is_running, read_status
from llmfoundry_lite.report.reading import ELAPSED, SECONDS, STALL, Log, Rows, Run
from llmfoundry_ops.journal import Leg, read_legs

RUNNING, KILLED, NEVER_BEGAN = "running", "killed without a word", "never began"
FAILURES = ("failed", KILLED)
ELSEWHERE = "not known here"


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
    between = hours / len(failures) if failures and hours else None
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


def find_recorded(run: Run) -> list[tuple[Record, Record]]:
    """Return (beginning, end) of each launch in launches.jsonl. A launch that never began has only its end."""
    recorded: list[tuple[Record, Record]] = []
    begun: Record | None = None
    for event in run.launches:
        if event.get("status") == RUNNING:
            if begun is not None:
                recorded.append((begun, {"status": KILLED}))
            begun = event
        elif begun is None or not event.get("has_begun"):
            recorded.append((event, {**event, "status": NEVER_BEGAN}))
        else:
            recorded.append((begun, event))
            begun = None
    if begun is not None:
        path = run.folder.path_here
        lives = path is not None and is_running(read_status(path) or {})
        recorded.append((begun, {"status": RUNNING if lives else KILLED}))
    return recorded


def match(logged: list[Launch], recorded: list[tuple[Record, Record]]) -> list[Launch]:
    """Join both, in order: a recorded launch is the next of `logged` that began at the same batch."""
    launches, next_one = [], 0
    for begun, end in recorded:
        ended, reason = end["status"], end.get("reason")
        found = None
        if ended != NEVER_BEGAN:
            begins = (begun["batch"], begun["batch"] + 1)  # an evaluation before the first batch has a line too
            found = next((i for i in range(next_one, len(logged)) if logged[i].first_batch in begins), None)
        if found is None:
            launches.append(Launch(ended=ended, reason=reason))
            continue
        launches += logged[next_one:found]
        launch = logged[found]
        launch.ended, launch.reason = ended, reason
        launches.append(launch)
        next_one = found + 1
    return launches + logged[next_one:]


# ---------------------------------------------------------------------------------------------------- relays


def describe_relay(run: Run) -> dict[str, Any] | None:
    """Return None for a run that no relay has moved."""
    legs = read_legs(run.folder.path_here) if run.folder.path_here is not None else []
    if not legs:
        return None
    held = [hold(run, leg, legs[0].began) for leg in legs]
    places = dict.fromkeys(leg.place for leg in legs)
    last = max(leg["began_hours"] + leg["hours"] for leg in held)
    return {
        "legs": held,
        "places": [{"place": place, **sums([leg for leg in held if leg["place"] == place])} for place in places],
        "total": sums(held),
        "hours": last,
        "idle_hours": max(0.0, last - sum(leg["hours"] for leg in held)),
    }


def hold(run: Run, leg: Leg, start: float) -> dict[str, Any]:
    over = leg.over if leg.over is not None else max(time.time(), leg.began)
    newest = int(run.log.batch[-1]) if leg.to_batch is None else leg.to_batch
    last_batch = max(newest, leg.from_batch)
    here = run.log.within(leg.from_batch + 1, last_batch)
    hours = max(0.0, over - leg.began) / 3600  # a clock may have been set back
    return {
        "number": leg.number,
        "place": leg.place,
        "first_batch": leg.from_batch + 1,
        "last_batch": last_batch,  # before the first one if nothing came of it
        "began_hours": (leg.began - start) / 3600,
        "hours": hours,
        "training_hours": float(np.nansum(run.log.numbers(SECONDS)[here])) / 3600,
        "cost": None if leg.price is None else leg.price * hours,
        "ended": leg.ended,  # None: it runs
        "reason": leg.reason,
    }


def sums(legs: list[dict[str, Any]]) -> dict[str, Any]:
    costs = [leg["cost"] for leg in legs]
    hours, training_hours = (sum(leg[key] for leg in legs) for key in ("hours", "training_hours"))
    return {
        "num_legs": len(legs),
        "batches": sum(leg["last_batch"] - leg["first_batch"] + 1 for leg in legs),
        "hours": hours,
        "training_hours": training_hours,
        "utilisation": training_hours / hours if hours else None,
        "cost": None if None in costs else sum(filter(None, costs)),
    }
