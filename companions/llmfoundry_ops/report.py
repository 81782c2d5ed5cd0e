"""The legs of a relay in `llmfoundry-lite report`, by its journal.

held            from the launch to its end, start-up and saves included
training        `time/batch_seconds` of the batches that count, those up to the save at which a leg ended
utilisation     training over held
cost            hours held x the place's price, if relay.yaml names one
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.errors import printable
from llmfoundry_lite.report.figure import clean, color, stack, write
from llmfoundry_lite.report.page import MAX_LAUNCHES, Section, clock, ending, shown, small, span
from llmfoundry_lite.report.reading import SECONDS, Run
from llmfoundry_lite.report.tables import Table
from llmfoundry_ops.journal import Leg, read_legs


@dataclass(frozen=True)
class Relay:
    """A relay, for the report of its run."""

    facts: dict[str, Any]

    def sections(self, name: str, figure: str | None) -> list[Section]:
        return [places(name, self.facts), time_line(name, self.facts["legs"], figure)]

    def plot(self, path: Path, title: str) -> None:
        plot(path, self.facts["legs"], title=title)


def describe_relay(run: Run) -> Relay | None:
    """Return None for a run that no relay has moved."""
    legs = read_legs(run.folder.path_here) if run.folder.path_here is not None else []
    if not legs:
        return None
    held = [hold(run, leg, legs[0].began) for leg in legs]
    places = dict.fromkeys(leg.place for leg in legs)
    last = max(leg["began_hours"] + leg["hours"] for leg in held)
    facts = {
        "legs": held,
        "places": [{"place": place, **sums([leg for leg in held if leg["place"] == place])} for place in places],
        "total": sums(held),
        "hours": last,
        "idle_hours": max(0.0, last - sum(leg["hours"] for leg in held)),
    }
    return Relay(facts)


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


def places(name: str, facts: dict[str, Any]) -> Section:
    """Show what each place of a relay contributed."""
    rows = [
        (
            *(part["place"], shown(part["num_legs"]), shown(part["batches"])),
            *(clock(part["hours"]), clock(part["training_hours"])),
            *(shown(part["utilisation"], "{:.0%}"), small(part["cost"])),
        )
        for part in (*facts["places"], {"place": "total", **facts["total"]})
    ]
    lines = [
        f"in {clock(facts['hours'])} from the first launch on; no place had the run for {clock(facts['idle_hours'])}",
        "utilisation is the time of batches that count over the time held, start-up and saves included",
    ]
    if any(part["cost"] is not None for part in facts["places"]):
        lines.append("cost is the time held x the price in relay.yaml")
    columns = ("place", "legs", "batches", "held", "training", "utilisation", "cost")
    return Section(Table(f"Places of {name}", columns, rows), lines)


def time_line(name: str, legs: Sequence[dict[str, Any]], figure: str | None) -> Section:
    """Show the legs of a relay in order of time."""
    rows = [
        (
            *(f"{leg['number']}", leg["place"], span(leg["first_batch"], leg["last_batch"])),
            *(clock(leg["began_hours"]), clock(leg["hours"]), ending(leg["ended"] or "running", leg["reason"])),
        )
        for leg in legs[-MAX_LAUNCHES:]
    ]
    more = len(legs) - len(rows)
    lines = [f"the {more:,} legs before are in report.json"] if more else []
    columns = ("leg", "place", "batches", "began", "held", "ended")
    table = Table(f"Time line of {name}", columns, rows, (0, 2, 3, 4))
    return Section(table, lines, figure=f"![time line]({figure})" if figure else "")


def plot(path: Path, legs: Sequence[dict[str, Any]], *, title: str) -> None:
    """Plot batches over hours since the first leg began, and below which place had the run."""
    places = list(dict.fromkeys(leg["place"] for leg in legs))
    is_long = max(leg["began_hours"] + leg["hours"] for leg in legs) >= 1
    unit, per_hour = ("hours", 1) if is_long else ("seconds", 3600)
    figure, (progress, rows) = stack((3, 0.4 * len(places) + 0.4), (8, 3.4 + 0.4 * len(places)), sharex=True)
    for leg in legs:
        start, end = leg["began_hours"] * per_hour, (leg["began_hours"] + leg["hours"]) * per_hour
        number = places.index(leg["place"])
        look = {"color": color(number), "linewidth": 2.2, "solid_capstyle": "butt"}
        progress.plot([start, end], [leg["first_batch"] - 1, leg["last_batch"]], **look)
        rows.barh(number, end - start, left=start, color=color(number), height=0.7)
    progress.set_ylabel("batch")
    rows.set_yticks(range(len(places)), list(map(printable, places)))
    rows.invert_yaxis()
    rows.set_xlabel(f"{unit} since the first launch")
    clean([progress])
    rows.spines[["top", "right"]].set_visible(False)
    progress.set_title(title, fontsize=11)
    write(figure, path)
