"""Sections on launches, failures and a relay's sites in `llmfoundry-lite report`.

`Launches` is what the core's report calls. It collects facts for report.json first (`describe_failures` of
`launches.py`, and `describe_relay`), and then makes sections and a figure of them. Facts of a relay:

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
from llmfoundry_lite.report.canvas import create_stacked_panels, curve_color, fixed_settings, save_figure, style_panels
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
"""Number of rows in a table of launches or allocations, which are the newest ones."""


class Launches(Additions):
    """Adds launches and failures of each run, and the sites of a run that a relay has moved."""

    def __init__(self, runs: Sequence[Run], names: Sequence[str], image_format: str, results_folder: Path):
        """Collect the facts of `runs`. The figure, of the format png, pdf or svg, is for a report on one run."""
        self.title = runs[0].name
        figure_name = f"relay.{image_format}"
        self.file_names = [figure_name]
        self.run_facts = []
        for run in runs:
            self.run_facts.append({"failures": describe_failures(run), "relay": describe_relay(run)})
        self.relay = self.run_facts[0]["relay"] if len(runs) == 1 else None
        """Facts of the relay that the figure shows; None without a figure."""
        self.facts = {"relay_figure": None if self.relay is None else figure_name}

    def add_sections(self, run: Facts, sections: list[Section]) -> list[Section]:
        """Return a run's sections with its launches after the first one, and its sites at the end."""
        first, *others = sections
        failures = run["failures"]
        if failures["num_failures"] or len(failures["launches"]) > 1:
            others.insert(0, build_launches_section(run))

        relay = run["relay"]
        if relay is not None:
            others.append(build_sites_section(run["name"], relay))
            others.append(build_time_line_section(run["name"], relay["allocations"], self.facts["relay_figure"]))
        return [first, *others]

    def draw(self, folder: Path) -> list[Path]:
        """Draw the time line of the relay into `folder`, if there is one. Returns the paths of figures."""
        if self.relay is None:
            return []
        path = folder / self.file_names[0]
        plot_time_line(path, self.relay["allocations"], title=self.title)
        return [path]


def build_launches_section(run: Facts) -> Section:
    """Show how each launch of a run ended, and the batches and device-hours lost with it."""
    failures = run["failures"]
    launches = failures["launches"]
    rows: list[Sequence[str]] = []
    for number, launch in list(enumerate(launches, start=1))[-MAX_LAUNCHES:]:
        rows.append(
            (
                f"{number}",
                format_span(launch["first_batch"], launch["last_batch"]),
                format_hours(launch["hours"]),
                format_ending(launch["ended"], launch["reason"]),
                format_number(launch["batches_lost"]),
                format_short(launch["device_hours_lost"]),
            )
        )
    columns = ("launch", "batches", "time", "ended", "batches lost", "device-hours lost")
    table = Table(f"Launches of {run['name']}", columns, rows, (0, 2, 4, 5))

    lines = []
    if len(launches) > MAX_LAUNCHES:
        lines.append(f"the {len(launches) - MAX_LAUNCHES:,} launches before are in report.json")
    causes = ", ".join(f"{count} {ended}" for ended, count in failures["causes"].items())
    device_hours_lost = format_short(failures["device_hours_lost"])
    lost = f"{format_number(failures['batches_lost'])} batches and {device_hours_lost} device-hours lost"
    lines.append(f"{len(launches)} launches: {causes}; {lost}")
    return Section(table, [*lines, *advise_saves(run)])


def advise_saves(run: Facts) -> list[str]:
    """Say how often the run failed and, after MIN_FAILURES, how often to save at that rate."""
    failures = run["failures"]
    num_failures = failures["num_failures"]
    hours_between = failures["hours_between_failures"]
    plural = "s" if num_failures > 1 else ""
    text = f"{num_failures or 'no'} failure{plural}"
    if failures["hours"]:
        text += f" in {format_hours(failures['hours'])} of training"
    if num_failures < MIN_FAILURES:
        return [text]
    if hours_between is None:
        return [f"{num_failures} failures; the log has no time/elapsed_seconds, so no mean time between them"]

    text = f"mean time between failures {format_hours(hours_between)}: {text}"
    if failures["save_every_seconds"] is None:
        return [text, "no interval of saves to suggest: no save was timed"]
    advice = f"save every {format_hours(failures['save_every_seconds'] / 3600)}"
    if failures["save_every_batches"] is not None:
        advice += f", {failures['save_every_batches']:,} batches"
    advice += " (Daly 2006)"
    if run["save_interval"]:
        advice += f"; save_interval is {run['save_interval']}"
    return [text, f"a save holds training up for {failures['save_stall_seconds']:.3g} s: {advice}"]


def describe_relay(run: Run) -> Facts | None:
    """Return facts of a run's relay for report.json: of allocations, of sites and of all together.

    None for a run that no relay has moved. Hours are counted from the beginning of the first allocation.
    """
    allocations = find_allocations(run)
    if not allocations:
        return None
    described = [describe_allocation(run, allocation, allocations[0].began) for allocation in allocations]

    site_facts = []
    for site in dict.fromkeys(allocation.site for allocation in allocations):
        of_site = [facts for facts in described if facts["site"] == site]
        site_facts.append({"site": site, **add_up(of_site)})
    total_hours = max(facts["began_hours"] + facts["hours"] for facts in described)
    held_hours = sum(facts["hours"] for facts in described)
    return {
        "allocations": described,
        "sites": site_facts,
        "total": add_up(described),
        "hours": total_hours,
        "idle_hours": max(0.0, total_hours - held_hours),
    }


def describe_allocation(run: Run, allocation: Allocation, start: float) -> dict[str, Any]:
    """Return the facts of an allocation for report.json. `start` is when the first one began, in seconds since 1970.

    An allocation that has no end yet is described up to now, and up to the newest batch in the log.
    """
    over = allocation.over if allocation.over is not None else max(time.time(), allocation.began)
    hours = max(0.0, over - allocation.began) / 3600  # a clock may have been set back
    newest_batch = int(run.log.batch[-1]) if allocation.to_batch is None else allocation.to_batch
    last_batch = max(newest_batch, allocation.from_batch)
    in_allocation = run.log.within(allocation.from_batch + 1, last_batch)
    return {
        "number": allocation.number,
        "site": allocation.site,
        "first_batch": allocation.from_batch + 1,
        "last_batch": last_batch,  # one before `first_batch` if nothing was trained
        "began_hours": (allocation.began - start) / 3600,
        "hours": hours,
        "training_hours": float(np.nansum(run.log.numbers(SECONDS)[in_allocation])) / 3600,
        "cost": None if allocation.price is None else allocation.price * hours,
        "ended": allocation.ended,  # None: it still runs
        "reason": allocation.reason,
    }


def add_up(allocations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over described allocations. The cost is None if one of them has no price."""
    costs = [allocation["cost"] for allocation in allocations]
    hours = sum(allocation["hours"] for allocation in allocations)
    training_hours = sum(allocation["training_hours"] for allocation in allocations)
    return {
        "num_allocations": len(allocations),
        "batches": sum(allocation["last_batch"] - allocation["first_batch"] + 1 for allocation in allocations),
        "hours": hours,
        "training_hours": training_hours,
        "utilisation": training_hours / hours if hours else None,
        "cost": None if None in costs else sum(filter(None, costs)),
    }


def build_sites_section(name: str, relay: Facts) -> Section:
    """Show what each site of a relay contributed, and all of them together. `name` is the run's."""
    rows = []
    for site_facts in (*relay["sites"], {"site": "total", **relay["total"]}):
        rows.append(
            (
                site_facts["site"],
                format_number(site_facts["num_allocations"]),
                format_number(site_facts["batches"]),
                format_hours(site_facts["hours"]),
                format_hours(site_facts["training_hours"]),
                format_number(site_facts["utilisation"], "{:.0%}"),
                format_short(site_facts["cost"]),
            )
        )
    columns = ("site", "allocations", "batches", "held", "training", "utilisation", "cost")

    hours = format_hours(relay["hours"])
    idle_hours = format_hours(relay["idle_hours"])
    lines = [
        f"in {hours} from the first launch on; no site had the run for {idle_hours}",
        "utilisation is the time of batches that count over the time held, start-up and saves included",
    ]
    if any(site_facts["cost"] is not None for site_facts in relay["sites"]):
        lines.append("cost is the time held x the price in relay.yaml")
    return Section(Table(f"Sites of {name}", columns, rows), lines)


def build_time_line_section(name: str, allocations: Sequence[dict[str, Any]], figure: str | None) -> Section:
    """Show the newest allocations of a relay in order of time.

    `name` is the run's, and `figure` the file name of its time line, if one is drawn.
    """
    rows = []
    for allocation in allocations[-MAX_LAUNCHES:]:
        rows.append(
            (
                f"{allocation['number']}",
                allocation["site"],
                format_span(allocation["first_batch"], allocation["last_batch"]),
                format_hours(allocation["began_hours"]),
                format_hours(allocation["hours"]),
                format_ending(allocation["ended"] or "running", allocation["reason"]),
            )
        )
    columns = ("allocation", "site", "batches", "began", "held", "ended")
    table = Table(f"Time line of {name}", columns, rows, (0, 2, 3, 4))
    num_left_out = len(allocations) - len(rows)
    lines = [f"the {num_left_out:,} allocations before are in report.json"] if num_left_out else []
    return Section(table, lines, figure=f"![time line]({figure})" if figure else "")


def format_ending(ended: str, reason: str | None) -> str:
    """Format how a launch ended, as in `preempted: SIGTERM`."""
    return f"{ended}: {reason}" if reason else ended


@fixed_settings()
def plot_time_line(path: Path, allocations: Sequence[dict[str, Any]], *, title: str) -> None:
    """Plot batches over the time since the first allocation began and, below, which site had the run."""
    sites = list(dict.fromkeys(allocation["site"] for allocation in allocations))
    total_hours = max(allocation["began_hours"] + allocation["hours"] for allocation in allocations)
    unit = "hours" if total_hours >= 1 else "seconds"
    units_per_hour = 1 if total_hours >= 1 else 3600

    # The lower panel, and so the figure, grows with the number of sites.
    sites_height = 0.4 * len(sites)
    figure, (batch_panel, site_panel) = create_stacked_panels(
        (3, sites_height + 0.4), (8, 3.4 + sites_height), sharex=True
    )
    for allocation in allocations:
        start = allocation["began_hours"] * units_per_hour
        end = (allocation["began_hours"] + allocation["hours"]) * units_per_hour
        site_index = sites.index(allocation["site"])
        color = curve_color(site_index)
        batches = [allocation["first_batch"] - 1, allocation["last_batch"]]
        batch_panel.plot([start, end], batches, color=color, linewidth=2.2, solid_capstyle="butt")
        site_panel.barh(site_index, end - start, left=start, color=color, height=0.7)

    batch_panel.set_ylabel("batch")
    site_panel.set_yticks(range(len(sites)), list(map(printable, sites)))
    site_panel.invert_yaxis()
    site_panel.set_xlabel(f"{unit} since the first launch")
    style_panels([batch_panel])
    site_panel.spines[["top", "right"]].set_visible(False)
    batch_panel.set_title(title, fontsize=11)
    save_figure(figure, path)
