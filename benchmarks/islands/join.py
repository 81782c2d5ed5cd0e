"""Predict in which way two clusters best train one run over a link: exact sums, with overlap, or local steps.

    python -m benchmarks join --out docs/measurements

Nothing is measured. One table has the answer for several runs and links, the other the link that each way needs.
"""

import math
from pathlib import Path
from typing import Any

from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, tell
from llmfoundry_planner.plan.join import EVERY, EXACT, LOST, OVERLAP, Pair, in_gigabits, join, name_way
from llmfoundry_planner.plan.plan import hardware_named, make_plan

FIRST, SECOND = "a100-80gb", "mi250"
CASES = (("mpt-1b", 8), ("mpt-1b", 64), ("mpt-7b", 8), ("mpt-7b", 64), ("mpt-70b", 64), ("mpt-70b", 512))
"""A run, and the number of devices of each cluster."""
GIGABITS = (1, 10, 100)
"""Rates of the link."""
FORMATS = {"fp32": 4, "bf16": 2, "int8": 1}
"""Format in which local steps are exchanged -> bytes of a number."""
LOCAL = EVERY[2]
"""Batches between two exchanges of local steps, in the table of links."""
HOW = (
    "A cluster of A100-80GB and a cluster of as many halves of MI250 cards divide the run's own batch by their speed. "
    "Nothing here was measured: the rates are those of [`plan`](../plan.md), the formulas those of `plan/join.py`. "
    "Rates are multiples of the faster cluster's alone; `both` is the sum of both clusters, as if no link were needed. "
    "Local steps exchange fp32 at the shortest interval that hides the exchange. They are another algorithm "
    "([local steps](../local-steps.md)): after the same tokens the loss differs, which nothing here predicts."
)
NEEDS = (
    "For each way: the slowest link, in each direction, with which it is faster than the faster cluster alone "
    f"(pays), and with which it loses less than {LOST:.0%} of both. Local steps are every {LOCAL} batches in this "
    "table. `plan --join` chooses local steps on links that are too slow for exact sums with overlap to lose less "
    "than that."
)


def run(*, out: Path | None = None) -> dict[str, Any]:
    """Plan every case on every link, print both tables, and return the report. `out` gets join.md and join.json."""
    pairs = {case: plan_pair(*case) for case in CASES}
    report = describe_conditions() | {"pairs": [[*case, pair.rates] for case, pair in pairs.items()]}
    parts = HOW, table_of_answers(pairs), NEEDS, table_of_links(pairs)
    heading, command = "Two clusters and a link, predicted", "python -m benchmarks join"
    tell(report, *parts, name="join", heading=heading, command=command, out=out)
    return report


def plan_pair(model: str, num_devices: int) -> Pair:
    """Plan a run on both clusters, and return what is known of the pair."""
    plans = [make_plan([model], hardware_named(name), num_devices) for name in (FIRST, SECOND)]
    return join(*plans)


def table_of_answers(pairs: dict[tuple[str, int], Pair]) -> Table:
    """Return a table of how much each way gains over the faster cluster alone, and which one `plan --join` names."""
    columns = ["run", "devices", "batch, s", "Gbit/s", "both", EXACT, OVERLAP, "local steps", "every", "answer"]
    rows = []
    for (model, num_devices), pair in pairs.items():
        for gigabits in GIGABITS:
            link = gigabits * 1e9
            every = pair.local_steps(link)
            # Without a limit of the link, exact sums give what both clusters do together.
            gains = (pair.gain(EXACT, math.inf), *(pair.gain(way, link) for way in (EXACT, OVERLAP, every)))
            answer = name_way(pair.choose(link)).partition(" (")[0]
            first_cells = [model, f"{num_devices} + {num_devices}", f"{pair.compute_seconds:.1f}", str(gigabits)]
            rows.append([*first_cells, *(f"{gain:.2f}" for gain in gains), str(every), answer])
    return measured_table("the way that `plan --join` names", columns, rows)


def table_of_links(pairs: dict[tuple[str, int], Pair]) -> Table:
    """Return a table of the slowest link with which each way pays, and with which it loses little."""
    ways: dict[str, tuple[str | int, float | None]] = {EXACT: (EXACT, None), OVERLAP: (OVERLAP, None)}
    # Each way with the bytes of a number that it exchanges; None: those of exact sums.
    ways |= {f"local, {name}": (LOCAL, size) for name, size in FORMATS.items()}
    rows = []
    for (model, num_devices), pair in pairs.items():
        gain_of_both = sum(pair.rates) / max(pair.rates)
        # The gain over the faster cluster alone that the link has to allow.
        for purpose, gain in (("pays", 1.0), (f"loses under {LOST:.0%}", (1 - LOST) * gain_of_both)):
            links = [in_gigabits(pair.least_link(way, gain, size)) for way, size in ways.values()]
            rows.append([model, f"{num_devices} + {num_devices}", purpose, *links])
    return Table("links that each way needs", ["run", "devices", "from which on it", *ways], rows)
