"""Cost of the exchange: islands beside the same launches that share nothing, and over slower and slower links.

    python -m benchmarks islands-speed --out results                   some 6 minutes on two quiet cores

First A (2 ranks) and B (1 rank): both train at once, each for itself; then together, as islands. Three ranks share two
cores, so only what both do at once can be compared. Then one rank each, over links that a proxy holds to a rate: how
much faster the two train than the faster one alone, beside a formula. Gradients leave during the backward pass, or
after it. `overlap` measures the same without the cores, and bytes.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.islands.islands import build_shop, default_clusters
from benchmarks.islands.launches import Islands, last_batch, running
from benchmarks.islands.links import set_links
from benchmarks.recover import Log
from benchmarks.switch.legs import Cluster, Workshop, probe
from benchmarks.switch.switch import SEQ_LEN, describe_cluster, prepare_data, table_of_clusters
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.report.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, measured_table, open_console, show, tell

EARLY, WAITS = "", "waits"
"""Gradients leave during the backward pass, or after it."""
LONG_RUN = 100_000
"""Batches; every launch is ended before."""
WARM_UP = 4
"""Batches that are not counted: a launch's first, or those after a change."""
MOVES = 8
"""Batches after which rows have found their places."""
GRADIENT_BYTES = 4
"""Bytes of each parameter, each way: fp32."""
SHARE_BACKWARD = 2 / 3
"""Share of a microbatch's time that its backward pass takes, by its products. It hides nothing before its first block
has a gradient."""


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    rows: int = 64,
    num_batches: int = 10,
    rates: Sequence[float] = (200, 50),
    seed: int = 17,
    other_python: str | None = None,
    out: Path | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Train, print; with `out`, write islands-speed.json and .md there. `rates`: Mbit/s. Returns what the JSON holds.

    Raises UserError.
    """
    console, conditions = open_console(), describe_conditions()
    clusters = default_clusters(other_python)[:2]
    single = [Cluster(letter=letter, num_ranks=1, overlay=clusters[0].overlay) for letter in ("A1", "B1")]
    prepare_data(data)
    loads = [os.getloadavg()[0]]
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        shop = build_shop(Path(folder).resolve(), data, LONG_RUN, seed, [*clusters, *single])
        machines = {cluster.letter: probe(cluster) for cluster in shop.clusters}
        described = [describe_cluster(cluster, machines) for cluster in shop.clusters]
        show(console, table_of_clusters(described))
        before = train_apart(shop, "before", clusters, rows, num_batches, console)
        (together,) = train_linked(shop, "together", clusters, rows, num_batches, (None,), before, console)
        after = train_apart(shop, "after", clusters, rows, num_batches, console)
        # One microbatch a batch: its backward pass hides the most.
        whole: dict[str, Any] = {"device_train_microbatch_size": rows // 2}
        pair = train_apart(shop, "pair", single, rows, num_batches, console, **whole)
        linked = {}
        for way in (EARLY, WAITS):
            loads.append(os.getloadavg()[0])
            linked[way] = train_linked(
                *(shop, f"linked-{way or 'early'}", single, rows, num_batches, (None, *rates), pair, console),
                way=way,
                **whole,
            )
        num_parameters, num_outside = count_model(shop.config["model"])
    report = conditions | {
        "rows": rows,
        "num_batches": num_batches,
        "seed": seed,
        "clusters": described,
        "num_parameters": num_parameters,
        "num_outside_blocks": num_outside,
        "num_blocks": shop.config["model"]["n_layers"],
        "apart": [before, after],
        "together": together,
        "pair": pair,
        "linked": [{"way": way, **one} for way, found in linked.items() for one in found],
        "load_during": [min(loads), max(loads)],
    }
    evaluate(report)
    how = f"Batches of {rows} x {SEQ_LEN} tokens, fp32, {num_parameters:,} parameters; {num_batches} are timed."
    heading, command = "What the exchange between islands costs", "python -m benchmarks islands-speed"
    parts = (how, *tables_of(report), notes_of(report), table_of_clusters(described))
    tell(report, *parts, name="islands-speed", heading=heading, command=command, asked=("rows", "num_batches"), out=out)
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def train_apart(
    shop: Workshop,
    run: str,
    clusters: Sequence[Cluster],
    rows: int,
    num_batches: int,
    console: Console,
    **settings: Any,
) -> dict[str, float]:
    """Return rows per second of each cluster, while all train at once and share nothing.

    Each has a batch of its own; the slowest trains `num_batches` in the time that counts.
    """
    console.print(f"training: {' and '.join(c.letter for c in clusters)} at once, each for itself")
    share = rows // len(clusters)
    alone = [
        Islands(shop, f"{run}-{cluster.letter}", global_train_batch_size=share, **settings) for cluster in clusters
    ]
    try:
        for one, cluster in zip(alone, clusters, strict=True):
            one.start(cluster)
        logs = [one.log(cluster) for one, cluster in zip(alone, clusters, strict=True)]
        for one, log in zip(alone, logs, strict=True):
            one.wait_for(lambda log=log: last_batch(log) >= WARM_UP, "its first batches")
        begins = [last_batch(log) for log in logs]
        for one, log, begin in zip(alone, logs, begins, strict=True):
            one.wait_for(lambda log=log, begin=begin: last_batch(log) >= begin + num_batches, "batches to time")
        return {
            cluster.letter: share / typical(log.read()[begin:], "time/batch_seconds")
            for cluster, log, begin in zip(clusters, logs, begins, strict=True)
        }
    finally:
        for one in alone:
            one.end()


def train_linked(
    shop: Workshop,
    run: str,
    clusters: Sequence[Cluster],
    rows: int,
    num_batches: int,
    rates: Sequence[float | None],
    weights: dict[str, float],
    console: Console,
    way: str = EARLY,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train one run of islands, some batches at each rate of the links (Mbit/s; None: the machine's own rate).

    `way`: see `wrong`."""
    console.print(f"training: {' and '.join(c.letter for c in clusters)} as islands")
    links = shop.folder / f"{run}-links.json"
    set_links(links)
    found = []
    with running(shop, run, len(clusters), links, global_train_batch_size=rows, **settings) as islands:
        for cluster in clusters:
            islands.start(cluster, f"islands.weight={weights[cluster.letter]:.3f}", wrong=way)
        logs = [islands.log(cluster) for cluster in clusters]
        begin = MOVES
        for rate in rates:
            set_links(links, bits_per_second=rate and rate * 1e6)
            until = begin + WARM_UP + num_batches
            islands.wait_for(lambda until=until: all(last_batch(log) >= until for log in logs), "batches to time")
            found.append({"megabits": rate, **describe(logs, until - num_batches, until, rows)})
            begin = last_batch(logs[0])
    return found


def describe(logs: Sequence[Log], begin: int, until: int, rows: int) -> dict[str, Any]:
    """Measure batches `begin` + 1 to `until`. The island that comes last to an exchange does not wait in it."""
    batches = [[log.last_of_each_batch()[batch] for log in logs] for batch in range(begin + 1, until + 1)]
    return {
        "rows_per_second": rows / typical([records[0] for records in batches], "time/batch_seconds"),
        "compute_seconds": statistics.median(max(compute_seconds(records)) for records in batches),
        "uneven_seconds": statistics.median(
            max(compute_seconds(records)) - statistics.fmean(compute_seconds(records)) for records in batches
        ),
        "exchange_seconds": statistics.median(
            min(record["islands/exchange_seconds"] for record in records) for records in batches
        ),
        "bytes": statistics.median(records[0]["islands/bytes"] for records in batches),
        "shares": [
            round(statistics.fmean(records[i]["islands/rows"] for records in batches)) for i in range(len(logs))
        ],
    }


def compute_seconds(records: Sequence[dict[str, Any]]) -> list[float]:
    return [record["islands/compute_seconds"] for record in records]


def typical(records: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median: others use the machine, too."""
    return statistics.median(record[key] for record in records)


def count_model(model: dict[str, Any]) -> tuple[int, int]:
    """Return the parameters of a model, and those outside of its blocks, whose gradients come last."""
    config = {**model, "attn_config": AttentionConfig()}
    whole, deeper = (
        count_parameters(ModelConfig(**{**config, "n_layers": config["n_layers"] + more})) for more in (0, 1)
    )
    return whole, whole - config["n_layers"] * (deeper - whole)


# ------------------------------------------------------------------------------------------------------ what it shows


def evaluate(report: dict[str, Any]) -> None:
    together, pair = report["together"], report["pair"]
    both = [sum(apart.values()) for apart in report["apart"]]
    report["throughput"] = [together["rows_per_second"] / rate for rate in both]
    report["compute_over_exchange"] = together["compute_seconds"] / together["exchange_seconds"]
    fastest, together = max(pair.values()), sum(pair.values())
    report["pair_throughput"] = report["linked"][0]["rows_per_second"] / together
    step = report["rows"] / together
    for one in report["linked"]:
        one |= expected(step, report, one)
        one["gain"] = one["rows_per_second"] / fastest
        one["expected"] = report["rows"] / one["step_seconds"] / fastest


def expected(step: float, report: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """Return X, H, X_last and the step's time by the formula. A step computes for `step` seconds."""
    per_parameter = 8 * GRADIENT_BYTES / (one["megabits"] * 1e6) if one["megabits"] else 0.0
    found = {
        "gradient_seconds": per_parameter * report["num_parameters"],
        "hidden_seconds": SHARE_BACKWARD * step * (1 - 1 / report["num_blocks"]) if one["way"] == EARLY else 0.0,
        "last_seconds": per_parameter * report["num_outside_blocks"],
    }
    left = max(found["gradient_seconds"] - found["hidden_seconds"], found["last_seconds"])
    return {**found, "step_seconds": step + left}


def tables_of(report: dict[str, Any]) -> tuple[Table, ...]:
    together = report["together"]
    headings = ["each for itself", "A, rows/s", "B, rows/s", "both", "as islands", "islands / both"]
    first = []
    for when, apart, ratio in zip(("before", "after"), report["apart"], report["throughput"], strict=True):
        rates = (*apart.values(), sum(apart.values()), together["rows_per_second"])
        first.append([when, *(f"{rate:.1f}" for rate in rates), f"{ratio:.3f}"])
    rows = []
    for one in report["linked"]:
        rate = f"{one['megabits']:g} Mbit/s" if one["megabits"] else "as fast as the machine"
        leaves = "during the backward pass" if one["way"] == EARLY else "after it"
        seconds = ("exchange_seconds", "gradient_seconds", "hidden_seconds", "last_seconds")
        rows.append(
            [
                *(leaves, rate, f"{one['rows_per_second']:.1f}", *(f"{one[key]:.2f}" for key in seconds)),
                *(f"{one['gain']:.2f}", f"{one['expected']:.2f}", f"{one['gain'] / one['expected']:.2f}"),
            ]
        )
    links = ["gradients leave", "link", "rows/s", "exchange, s", "X, s", "H, s", "X_last, s", "gain", "S", "gain / S"]
    return (
        measured_table(
            "A and B at once, on two cores: each for itself, then as islands, then each for itself", headings, first
        ),
        measured_table("one rank each, over a link of that rate in each direction", links, rows),
    )


def notes_of(report: dict[str, Any]) -> list[str]:
    first, second = report["pair"].values()
    ratio, together = statistics.fmean(report["throughput"]), report["together"]
    batch = report["rows"] / together["rows_per_second"]
    overlapped = min(one["gain"] / one["expected"] for one in report["linked"] if one["way"] == EARLY)
    fp32 = report["linked"][0]["bytes"] / (2 * report["num_parameters"])
    return [
        f"computing took {report['compute_over_exchange']:.0f} times the exchange; 0.95 of both at once is asked for "
        f"where it takes 20 times: {verdict(ratio)}, {ratio:.2f} over both measurements",
        f"of that, a batch waits {together['uneven_seconds'] / batch:.2f} of its time for the island that computes "
        f"longest; without the third rank two islands on two cores reach {report['pair_throughput']:.2f} of both",
        f"one rank each, for itself: {first:.1f} and {second:.1f} rows/s; the gain is over the faster one",
        f"0.95 of S with overlap: {verdict(overlapped)}, {overlapped:.2f} at least; ranks, exchange and proxy "
        "share cores, unlike in `islands-overlap`",
        "S is by a step of C / (s1 + s2) + max(X - H, X_last): X the gradient's bits over the link's rate, H the "
        "backward pass of the last microbatch (two thirds of its time) after its first block, X_last what is outside "
        "of blocks and comes last; H is 0 where gradients leave after the backward pass",
        f"measured bytes of each parameter, each way: {fp32:.3f}",
        "medians of the batches; load average during the runs "
        f"{report['load_during'][0]:.0f} to {report['load_during'][1]:.0f}",
    ]


def verdict(ratio: float) -> str:
    return "reached" if ratio >= 0.95 else "MISSED"
