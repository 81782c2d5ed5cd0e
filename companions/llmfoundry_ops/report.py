"""Launches, failures and a relay's allocations in `llmfoundry-lite report`: `launches.py` and the journal have them.

held            from the launch to its end, start-up and saves included
training        `time/batch_seconds` of the batches that count, those up to the save at which an allocation ended
utilisation     training over held
cost            hours held x the site's price, if relay.yaml names one
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.errors import printable
from llmfoundry_lite.report.canvas import fixed_settings
from llmfoundry_lite.report.figure import create_stacked_panels, curve_color, save_figure, style_panels
from llmfoundry_lite.report.log import SECONDS
from llmfoundry_lite.report.page import (
    Additions,
    Facts,
    Section,
    format_hours,
    format_number,
    format_short,
    format_span,
)
from llmfoundry_lite.report.reading import Run
from llmfoundry_lite.tables import Table
from llmfoundry_ops.journal import Allocation
from llmfoundry_ops.launches import MIN_FAILURES, describe_failures, find_allocations

MAX_LAUNCHES = 20
"""Launches in a table: the newest ones."""


class Launches(Additions):
    """Launches and failures of each run, and sites of a run that a relay has moved."""

    def __init__(self, runs: Sequence[Run], image_format: str):
        self.file_names, self.title = [f"relay.{image_format}"], runs[0].name
        self.run_facts = [{"failures": describe_failures(run), "relay": describe_relay(run)} for run in runs]
        self.relay = self.run_facts[0]["relay"] if len(runs) == 1 else None
        self.facts = {"relay_figure": None if self.relay is None else self.file_names[0]}

    def add_sections(self, run: Facts, sections: list[Section]) -> list[Section]:
        first, *rest = sections
        failures, relay = run["failures"], run["relay"]
        if failures["num_failures"] or len(failures["launches"]) > 1:
            rest.insert(0, launches(run))
        if relay is not None:
            rest.append(sites(run["name"], relay))
            rest.append(time_line(run["name"], relay["allocations"], self.facts["relay_figure"]))
        return [first, *rest]

    def draw(self, folder: Path) -> list[Path]:
        if self.relay is None:
            return []
        plot(folder / self.file_names[0], self.relay["allocations"], title=self.title)
        return [folder / self.file_names[0]]


def launches(run: Facts) -> Section:
    """Show how each launch ended, and the batches and device-hours lost with it."""
    facts = run["failures"]
    numbered = list(enumerate(facts["launches"], start=1))
    rows: list[Sequence[str]] = [
        (
            f"{number}",
            format_span(launch["first_batch"], launch["last_batch"]),
            format_hours(launch["hours"]),
            ending(launch["ended"], launch["reason"]),
            format_number(launch["batches_lost"]),
            format_short(launch["device_hours_lost"]),
        )
        for number, launch in numbered[-MAX_LAUNCHES:]
    ]
    lines = []
    if len(numbered) > MAX_LAUNCHES:
        lines.append(f"the {len(numbered) - MAX_LAUNCHES:,} launches before are in report.json")
    causes = ", ".join(f"{number} {ended}" for ended, number in facts["causes"].items())
    device_hours_lost = format_short(facts["device_hours_lost"])
    lost = f"{format_number(facts['batches_lost'])} batches and {device_hours_lost} device-hours lost"
    lines.append(f"{len(numbered)} launches: {causes}; {lost}")
    columns = ("launch", "batches", "time", "ended", "batches lost", "device-hours lost")
    return Section(Table(f"Launches of {run['name']}", columns, rows, (0, 2, 4, 5)), [*lines, *advise_saves(run)])


def advise_saves(run: Facts) -> list[str]:
    """Say how often the run failed, and after MIN_FAILURES, how often to save at that rate."""
    facts = run["failures"]
    num, between = facts["num_failures"], facts["hours_between_failures"]
    span = f" in {format_hours(facts['hours'])} of training" if facts["hours"] else ""
    text = f"{num or 'no'} failure{'s' * (num > 1)}{span}"
    if num < MIN_FAILURES:
        return [text]
    if between is None:
        return [f"{num} failures; the log has no time/elapsed_seconds, so no mean time between them"]
    text = f"mean time between failures {format_hours(between)}: {text}"
    if facts["save_every_seconds"] is None:
        return [text, "no interval of saves to suggest: no save was timed"]
    every = f"save every {format_hours(facts['save_every_seconds'] / 3600)}"
    if facts["save_every_batches"] is not None:
        every += f", {facts['save_every_batches']:,} batches"
    asked = f"; save_interval is {run['save_interval']}" if run["save_interval"] else ""
    return [text, f"a save holds training up for {facts['save_stall_seconds']:.3g} s: {every} (Daly 2006){asked}"]


def describe_relay(run: Run) -> Facts | None:
    """Return facts of a run's relay; None for a run that no relay has moved."""
    allocations = find_allocations(run)
    if not allocations:
        return None
    held = [hold(run, one, allocations[0].began) for one in allocations]
    sites = dict.fromkeys(one.site for one in allocations)
    last = max(one["began_hours"] + one["hours"] for one in held)
    return {
        "allocations": held,
        "sites": [{"site": site, **sums([one for one in held if one["site"] == site])} for site in sites],
        "total": sums(held),
        "hours": last,
        "idle_hours": max(0.0, last - sum(one["hours"] for one in held)),
    }


def hold(run: Run, allocation: Allocation, start: float) -> dict[str, Any]:
    over = allocation.over if allocation.over is not None else max(time.time(), allocation.began)
    newest = int(run.log.batch[-1]) if allocation.to_batch is None else allocation.to_batch
    last_batch = max(newest, allocation.from_batch)
    here = run.log.within(allocation.from_batch + 1, last_batch)
    hours = max(0.0, over - allocation.began) / 3600  # a clock may have been set back
    return {
        "number": allocation.number,
        "site": allocation.site,
        "first_batch": allocation.from_batch + 1,
        "last_batch": last_batch,  # one before `first_batch` if nothing was trained
        "began_hours": (allocation.began - start) / 3600,
        "hours": hours,
        "training_hours": float(np.nansum(run.log.numbers(SECONDS)[here])) / 3600,
        "cost": None if allocation.price is None else allocation.price * hours,
        "ended": allocation.ended,  # None: it still runs
        "reason": allocation.reason,
    }


def sums(allocations: list[dict[str, Any]]) -> dict[str, Any]:
    costs = [one["cost"] for one in allocations]
    hours, training_hours = (sum(one[key] for one in allocations) for key in ("hours", "training_hours"))
    return {
        "num_allocations": len(allocations),
        "batches": sum(one["last_batch"] - one["first_batch"] + 1 for one in allocations),
        "hours": hours,
        "training_hours": training_hours,
        "utilisation": training_hours / hours if hours else None,
        "cost": None if None in costs else sum(filter(None, costs)),
    }


def sites(name: str, facts: dict[str, Any]) -> Section:
    """Show what each site of a relay contributed."""
    rows = [
        (
            *(part["site"], format_number(part["num_allocations"]), format_number(part["batches"])),
            *(format_hours(part["hours"]), format_hours(part["training_hours"])),
            *(format_number(part["utilisation"], "{:.0%}"), format_short(part["cost"])),
        )
        for part in (*facts["sites"], {"site": "total", **facts["total"]})
    ]
    hours, idle_hours = format_hours(facts["hours"]), format_hours(facts["idle_hours"])
    lines = [
        f"in {hours} from the first launch on; no site had the run for {idle_hours}",
        "utilisation is the time of batches that count over the time held, start-up and saves included",
    ]
    if any(part["cost"] is not None for part in facts["sites"]):
        lines.append("cost is the time held x the price in relay.yaml")
    columns = ("site", "allocations", "batches", "held", "training", "utilisation", "cost")
    return Section(Table(f"Sites of {name}", columns, rows), lines)


def time_line(name: str, allocations: Sequence[dict[str, Any]], figure: str | None) -> Section:
    """Show the allocations of a relay in order of time."""
    rows = [
        (
            *(
                f"{allocation['number']}",
                allocation["site"],
                format_span(allocation["first_batch"], allocation["last_batch"]),
            ),
            *(
                format_hours(allocation["began_hours"]),
                format_hours(allocation["hours"]),
                ending(allocation["ended"] or "running", allocation["reason"]),
            ),
        )
        for allocation in allocations[-MAX_LAUNCHES:]
    ]
    more = len(allocations) - len(rows)
    lines = [f"the {more:,} allocations before are in report.json"] if more else []
    columns = ("allocation", "site", "batches", "began", "held", "ended")
    table = Table(f"Time line of {name}", columns, rows, (0, 2, 3, 4))
    return Section(table, lines, figure=f"![time line]({figure})" if figure else "")


def ending(ended: str, reason: str | None) -> str:
    """Format `preempted: SIGTERM`."""
    return f"{ended}: {reason}" if reason else ended


@fixed_settings()
def plot(path: Path, allocations: Sequence[dict[str, Any]], *, title: str) -> None:
    """Plot batches over hours since the first allocation began, and below which site had the run."""
    sites = list(dict.fromkeys(one["site"] for one in allocations))
    is_long = max(one["began_hours"] + one["hours"] for one in allocations) >= 1
    unit, per_hour = ("hours", 1) if is_long else ("seconds", 3600)
    figure, (progress, rows) = create_stacked_panels(
        (3, 0.4 * len(sites) + 0.4), (8, 3.4 + 0.4 * len(sites)), sharex=True
    )
    for allocation in allocations:
        start, end = allocation["began_hours"] * per_hour, (allocation["began_hours"] + allocation["hours"]) * per_hour
        number = sites.index(allocation["site"])
        look = {"color": curve_color(number), "linewidth": 2.2, "solid_capstyle": "butt"}
        progress.plot([start, end], [allocation["first_batch"] - 1, allocation["last_batch"]], **look)
        rows.barh(number, end - start, left=start, color=curve_color(number), height=0.7)
    progress.set_ylabel("batch")
    rows.set_yticks(range(len(sites)), list(map(printable, sites)))
    rows.invert_yaxis()
    rows.set_xlabel(f"{unit} since the first launch")
    style_panels([progress])
    rows.spines[["top", "right"]].set_visible(False)
    progress.set_title(title, fontsize=11)
    save_figure(figure, path)
