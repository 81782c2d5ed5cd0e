"""The legs of a relay in `llmfoundry-lite report`, by its journal.

held            from the launch to its end, start-up and saves included
training        `time/batch_seconds` of the batches that count, those up to the save at which a leg ended
utilisation     training over held
cost            hours held x the place's price, if relay.yaml names one
"""

import time
from typing import Any

import numpy as np

from llmfoundry_lite.report.reading import SECONDS, Run
from llmfoundry_ops.journal import Leg, read_legs


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
