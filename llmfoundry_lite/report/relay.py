"""Which place had a run, from when to when, what came of that time and what it cost: from relay.jsonl.

    held            from the launch to its end, start-up and saves included
    training        `time/batch_seconds` of the batches that count, those up to the save at which a leg ended
    utilisation     training over held
    cost            hours held x the place's price, where relay.yaml names one

Only the run folder of the relay has the journal; a run elsewhere has none of this.
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.launch.journal import Leg, read_legs
from llmfoundry_lite.report.reading import SECONDS, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A leg, in a report's units."""

    number: int
    place: str
    first_batch: int
    last_batch: int
    """Before the first one where nothing came of it."""
    began_hours: float
    """Since the first leg began."""
    hours: float
    training_hours: float
    cost: float | None
    ended: str | None
    """None: it runs."""
    reason: str | None


def describe_relay(run: Run) -> dict[str, Any] | None:
    """None of a run that no relay has moved."""
    legs = read_legs(run.folder.path) if isinstance(run.folder, LocalFolder) else []
    if not legs:
        return None
    held = [hold(run, leg, legs[0].began) for leg in legs]
    places = dict.fromkeys(leg.place for leg in legs)
    last = max(leg.began_hours + leg.hours for leg in held)
    return {
        "legs": [asdict(leg) for leg in held],
        "places": [{"place": place, **sums([leg for leg in held if leg.place == place])} for place in places],
        "total": sums(held),
        "hours": last,
        "idle_hours": max(0.0, last - sum(leg.hours for leg in held)),
    }


def hold(run: Run, leg: Leg, start: float) -> Held:
    over = leg.over if leg.over is not None else max(time.time(), leg.began)
    newest = int(run.log.batch[-1]) if leg.to_batch is None else leg.to_batch
    last_batch = max(newest, leg.from_batch)
    here = run.log.within(leg.from_batch + 1, last_batch)
    hours = max(0.0, over - leg.began) / 3600  # a clock may have been set back
    return Held(
        number=leg.number,
        place=leg.place,
        first_batch=leg.from_batch + 1,
        last_batch=last_batch,
        began_hours=(leg.began - start) / 3600,
        hours=hours,
        training_hours=float(np.nansum(run.log[SECONDS][here])) / 3600,
        cost=None if leg.price is None else leg.price * hours,
        ended=leg.ended,
        reason=leg.reason,
    )


def sums(legs: list[Held]) -> dict[str, Any]:
    costs = [leg.cost for leg in legs]
    hours = sum(leg.hours for leg in legs)
    training_hours = sum(leg.training_hours for leg in legs)
    return {
        "num_legs": len(legs),
        "batches": sum(leg.last_batch - leg.first_batch + 1 for leg in legs),
        "hours": hours,
        "training_hours": training_hours,
        "utilisation": training_hours / hours if hours else None,
        "cost": None if None in costs else sum(filter(None, costs)),
    }
