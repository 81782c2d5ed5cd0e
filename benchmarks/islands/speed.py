"""Cost of the exchange: islands beside the same launches that share nothing, and over slower and slower links.

    python -m benchmarks islands-speed --out results                   some 6 minutes on two quiet cores

First A (2 ranks) and B (1 rank): both train at once, each for itself; then together, as islands. Three ranks share two
cores, so only what both do at once can be compared. Then one rank each, over links that a proxy holds to a rate: how
much faster the two train than the faster one alone, beside what `plan` expects of these rates (`plan/join.py`).
"""

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
from llmfoundry_lite.bench.frame import describe_conditions, measured_table, open_console, show, tell
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.plan.join import EXACT, Pair
from llmfoundry_lite.report.tables import Table

LONG_RUN = 100_000
"""Batches; every launch is ended before."""
WARM_UP = 4
"""Batches that are not counted: a launch's first, or those after a change."""
MOVES = 20
"""Batches after which rows have found their places."""
GRADIENT_BYTES = 4
"""Bytes of each parameter, each way: fp32."""


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    rows: int = 64,
    num_batches: int = 10,
    rates: Sequence[float] = (1000, 200, 50),
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
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        shop = build_shop(Path(folder).resolve(), data, LONG_RUN, seed, [*clusters, *single])
        machines = {cluster.letter: probe(cluster) for cluster in shop.clusters}
        described = [describe_cluster(cluster, machines) for cluster in shop.clusters]
        show(console, table_of_clusters(described))
        before = train_apart(shop, "before", clusters, rows, num_batches, console)
        (together,) = train_linked(shop, "together", clusters, rows, num_batches, (None,), before, console)
        after = train_apart(shop, "after", clusters, rows, num_batches, console)
        pair = train_apart(shop, "pair", single, rows, num_batches, console)
        linked = train_linked(shop, "linked", single, rows, num_batches, (None, *rates), pair, console)
        num_parameters = count_parameters(ModelConfig(**{**shop.config["model"], "attn_config": AttentionConfig()}))
    report = conditions | {
        "rows": rows,
        "num_batches": num_batches,
        "seed": seed,
        "clusters": described,
        "num_parameters": num_parameters,
        "apart": [before, after],
        "together": together,
        "pair": pair,
        "linked": linked,
    }
    evaluate(report)
    how = f"Batches of {rows} x {SEQ_LEN} tokens, fp32, {num_parameters:,} parameters; {num_batches} are timed."
    heading, command = "What the exchange between islands costs", "python -m benchmarks islands-speed"
    parts = (how, *tables_of(report), notes_of(report), table_of_clusters(described))
    tell(report, *parts, name="islands-speed", heading=heading, command=command, asked=("rows", "num_batches"), out=out)
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def train_apart(
    shop: Workshop, run: str, clusters: Sequence[Cluster], rows: int, num_batches: int, console: Console
) -> dict[str, float]:
    """Return rows per second of each cluster, while all train at once and share nothing.

    Each has a batch of its own; the slowest trains `num_batches` in the time that counts.
    """
    console.print(f"training: {' and '.join(c.letter for c in clusters)} at once, each for itself")
    share = rows // len(clusters)
    alone = [Islands(shop, f"{run}-{cluster.letter}", global_train_batch_size=share) for cluster in clusters]
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
            cluster.letter: share / mean(log.read()[begin:], "time/batch_seconds")
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
) -> list[dict[str, Any]]:
    """Train one run of islands, some batches at each rate of the links (Mbit/s; None: the machine's own rate)."""
    console.print(f"training: {' and '.join(c.letter for c in clusters)} as islands")
    links = shop.folder / f"{run}-links.json"
    set_links(links)
    found = []
    with running(shop, run, len(clusters), links, global_train_batch_size=rows) as islands:
        for cluster in clusters:
            islands.start(cluster, f"islands.weight={weights[cluster.letter]:.3f}")
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
        "rows_per_second": rows / mean([records[0] for records in batches], "time/batch_seconds"),
        "compute_seconds": statistics.fmean(
            max(record["islands/compute_seconds"] for record in records) for records in batches
        ),
        "exchange_seconds": statistics.fmean(
            min(record["islands/exchange_seconds"] for record in records) for records in batches
        ),
        "shares": [
            round(statistics.fmean(records[i]["islands/rows"] for records in batches)) for i in range(len(logs))
        ],
    }


def mean(records: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(record[key] for record in records)


# ------------------------------------------------------------------------------------------------------ what it shows


def evaluate(report: dict[str, Any]) -> None:
    together, pair = report["together"], report["pair"]
    both = [sum(apart.values()) for apart in report["apart"]]
    report["throughput"] = [together["rows_per_second"] / rate for rate in both]
    report["compute_over_exchange"] = together["compute_seconds"] / together["exchange_seconds"]
    for one in report["linked"]:
        one["gain"] = one["rows_per_second"] / max(pair.values())
        one["expected"] = expected_gain(pair, report["rows"], report["num_parameters"], one["megabits"])


def expected_gain(pair: dict[str, float], rows: int, num_parameters: int, megabits: float | None) -> float:
    """S = (C / s1) / (C / (s1 + s2) + X), C the batch's work, X the time of the gradient on the link: `plan`'s."""
    first, second = (rate * SEQ_LEN for rate in pair.values())
    planned = Pair(rates=(first, second), batch_tokens=rows * SEQ_LEN, num_parameters=num_parameters)
    return planned.gain(EXACT, megabits * 1e6 if megabits else float("inf"))


def tables_of(report: dict[str, Any]) -> tuple[Table, Table]:
    together = report["together"]
    headings = ["each for itself", "A, rows/s", "B, rows/s", "both", "as islands", "islands / both"]
    first = []
    for when, apart, ratio in zip(("before", "after"), report["apart"], report["throughput"], strict=True):
        rates = (*apart.values(), sum(apart.values()), together["rows_per_second"])
        first.append([when, *(f"{rate:.1f}" for rate in rates), f"{ratio:.3f}"])
    rows = []
    for one in report["linked"]:
        rate = f"{one['megabits']:g} Mbit/s" if one["megabits"] else "as fast as the machine"
        exchange = 8 * GRADIENT_BYTES * report["num_parameters"] / (one["megabits"] * 1e6) if one["megabits"] else 0.0
        rows.append(
            [
                *(rate, f"{one['rows_per_second']:.1f}", f"{one['exchange_seconds']:.2f}", f"{exchange:.2f}"),
                *(f"{one['gain']:.2f}", f"{one['expected']:.2f}", f"{one['gain'] / one['expected']:.2f}"),
            ]
        )
    links = ["link", "rows/s", "exchange, s", "X, s", "gain", "S", "gain / S"]
    return (
        measured_table(
            "A and B at once, on two cores: each for itself, then as islands, then each for itself", headings, first
        ),
        measured_table("one rank each, over a link of that rate in each direction", links, rows),
    )


def notes_of(report: dict[str, Any]) -> list[str]:
    first, second = report["pair"].values()
    ratio = statistics.fmean(report["throughput"])
    return [
        f"computing took {report['compute_over_exchange']:.0f} times the exchange; 0.95 of both at once is asked for "
        f"where it takes 20 times: {'reached' if ratio >= 0.95 else 'MISSED'}, {ratio:.2f} over both measurements",
        f"one rank each, for itself: {first:.1f} and {second:.1f} rows/s; the gain is over the faster one",
        "S = (C / s1) / (C / (s1 + s2) + X), X the gradient's bits over the link's rate, as `plan --join` counts; the "
        "exchange of tensors, additions, verdicts and waiting for the slower island are in the measured gain alone",
    ]
