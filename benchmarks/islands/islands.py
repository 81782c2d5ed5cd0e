"""Two islands train one run at once, one of them dies and comes back: is it the run of one world?

    python -m benchmarks islands --out results                   some 8 minutes on two quiet cores
    python -m benchmarks islands --other-python other/bin/python

Three single worlds train a small MPT. Their losses span the band of the switch benchmark. Then two islands train it:
A, and B with other instructions, another sharding and perhaps another torch. B is killed and launched again. Digests
and losses are held against those of the single worlds. So are runs in which an island does something wrong (see
`wrong`): the check must catch all of them, or it proves nothing.

The launches are real (see `launches`).
"""

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.islands.figure import plot_islands
from benchmarks.islands.launches import Islands, last_batch, running
from benchmarks.islands.wrong import DIES_AT
from benchmarks.switch import band
from benchmarks.switch.band import read_series
from benchmarks.switch.switch import (
    GLOBAL_BATCH,
    SEQ_LEN,
    VERDICT_COLUMNS,
    cluster_of,
    configuration,
    describe_cluster,
    prepare_data,
    rows_of_verdicts,
    table_of_clusters,
)
from benchmarks.switch.workshop import INSTRUCTION_SETS, NO_GPU, Cluster, Workshop, probe
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import describe_conditions, open_console, show, tabulate, tell

ISLANDS, SOUND = "islands", "sound"
CONTROLS: dict[str, tuple[str, tuple[str, str]]] = {
    SOUND: ("B dies with its gradient sent", ("", "dies")),
    "weights": ("A's share weighted twice", ("weights", "weights")),
    "lost": ("B dies, A passes over the batch", ("lost", "dies")),
    "stale": ("B dies, A counts its old gradient", ("stale", "dies")),
}
"""Short runs, and what is wrong on A and on B. The first is sound, and must pass; the others must not."""
CONTROL_BATCHES = 2 * DIES_AT


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    num_batches: int = 120,
    kill_at: int = 30,
    seed: int = 17,
    other_python: str | None = None,
    out: Path | None = None,
    keep: Path | None = None,
    clusters: Sequence[Cluster] | None = None,
) -> dict[str, Any]:
    """Train, check, print; with `out`, write islands.json, .md and .png there. Returns what the JSON holds.

    The runs themselves happen in `keep`, or in a folder that is removed. Raises UserError.
    """
    if not 0 < kill_at < num_batches or num_batches < CONTROL_BATCHES:
        raise UserError(
            f"--num-batches {num_batches}, --kill-at {kill_at}: B is killed within the run, and controls take "
            f"{CONTROL_BATCHES} batches; use more batches"
        )
    console, conditions = open_console(), describe_conditions()
    clusters = clusters or default_clusters(other_python)
    prepare_data(data)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        shop = build_shop(Path(folder).resolve(), data, num_batches, seed, clusters)
        machines = {cluster.letter: probe(cluster) for cluster in clusters}
        described = [describe_cluster(cluster, machines) for cluster in clusters]
        show(console, table_of_clusters(described))
        with ThreadPoolExecutor(2) as pool:
            worlds = list(pool.map(lambda cluster: train_alone(shop, cluster, console), clusters))
        together, story = train_together(shop, kill_at, num_batches, console)
        controls = {name: train_control(shop, name, console) for name in CONTROLS}
    report = conditions | {
        "num_batches": num_batches,
        "kill_at": kill_at,
        "seed": seed,
        "clusters": described,
        "worlds": {cluster.letter: series_of(records) for cluster, records in zip(clusters, worlds, strict=True)},
        ISLANDS: series_of(together["A"]) | story,
        "controls": {name: series_of(records) for name, records in controls.items()},
        "rows": [record["islands/rows"] for record in together["A"]],
        "differing": count_differing(together["A"], together["B"]),
    }
    evaluate(report)
    write(report, out)
    console.print("passed" if report["passed"] else "FAILED: see the verdicts", style="bold")
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def default_clusters(other_python: str | None) -> list[Cluster]:
    """A and B are the islands; C is one more single world, for the band."""

    cpu = {"OMP_NUM_THREADS": "1", **NO_GPU}
    strategies = [{"sharding_strategy": name} for name in ("FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP")]
    b = cluster_of("B", 1, 2, "reference", strategies[1], cpu | INSTRUCTION_SETS["sse"])
    return [
        cluster_of("A", 2, 2, "sdpa", strategies[0], cpu),
        dataclasses.replace(b, python=other_python or b.python),
        cluster_of("C", 2, 4, "reference", strategies[2], cpu | INSTRUCTION_SETS["avx2"]),
    ]


def build_shop(folder: Path, data: Path, num_batches: int, seed: int, clusters: Sequence[Cluster]) -> Workshop:
    config = configuration(data.resolve(), num_batches, num_batches, "fp32", seed) | {"eval_interval": 0}
    shop = Workshop(folder=folder, config=config, clusters=clusters)
    shop.prepare()
    return shop


def train_alone(shop: Workshop, cluster: Cluster, console: Console) -> list[dict[str, Any]]:
    console.print(f"training: {cluster.letter} alone")
    world = Islands(shop, f"alone-{cluster.letter}")
    try:
        world.start(cluster).check()
    finally:
        world.end()
    return records_of(world, cluster)


def train_together(
    shop: Workshop, kill_at: int, num_batches: int, console: Console
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Records of A and of B, and when what happened to B."""
    console.print(f"training: A and B; B is killed after batch {kill_at} and launched again")
    a, b = shop.clusters[:2]
    with running(shop, ISLANDS, 2) as islands:
        first, second = islands.start(a), islands.start(b)
        log, their_log = islands.log(a), islands.log(b)
        islands.wait_for(lambda: last_batch(log) >= kill_at, f"batch {kill_at}")
        killed_at, killed_after = time.monotonic(), last_batch(log)
        second.kill()
        islands.wait_for(lambda: last_batch(log) > killed_after, "a batch without B")
        seconds_to_go_on = time.monotonic() - killed_at
        again_at, their_last = time.monotonic(), last_batch(their_log)
        third = islands.start(b)
        islands.wait_for(lambda: last_batch(their_log) > their_last or last_batch(log) == num_batches, "B to be back")
        if last_batch(their_log) == their_last:
            raise UserError(f"bench islands: B is not back before batch {num_batches}; use a larger --num-batches")
        seconds_to_come_back = time.monotonic() - again_at
        for one in (first, third):
            one.check()
        together = {"A": records_of(islands, a), "B": records_of(islands, b)}
    alone = [record["batch"] for record in together["A"] if record["islands/members"] == 1]
    story = {
        "killed_after": min(alone) - 1,
        "back_from": max(alone) + 1,
        "seconds_to_go_on": seconds_to_go_on,
        "seconds_to_come_back": seconds_to_come_back,
        "drifts": together["A"][-1]["islands/drifts"],
    }
    return together, story


def train_control(shop: Workshop, name: str, console: Console) -> list[dict[str, Any]]:
    """A's records of a short run."""
    what, wrong = CONTROLS[name]
    console.print(f"training: {what}")
    with running(shop, name, 2, stop_after=f"{CONTROL_BATCHES}ba") as islands:
        launched = [islands.start(cluster, wrong=kind) for cluster, kind in zip(shop.clusters[:2], wrong, strict=True)]
        launched[1].dies = wrong[1] == "dies"
        launched[0].check()
        return records_of(islands, shop.clusters[0])


def records_of(islands: Islands, cluster: Cluster) -> list[dict[str, Any]]:
    return [record for _, record in sorted(islands.log(cluster).last_of_each_batch().items())]


def series_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return dataclasses.asdict(read_series(records))


def count_differing(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> int:
    """Batches that both have recorded, with another loss, norm or digest to the bit."""
    by_batch = {record["batch"]: record for record in first}
    keys = ("loss/train/total", "grad_norm", "data/digest")
    return sum(any(record[key] != by_batch[record["batch"]][key] for key in keys) for record in second)


# ------------------------------------------------------------------------------------------------------ what it shows


def evaluate(report: dict[str, Any]) -> None:
    """Add to what was run what it shows: the band, verdicts, `passed`."""
    runs = {ISLANDS: report[ISLANDS], **report["controls"]}
    band.evaluate(report, runs, report["worlds"].values(), sound=(ISLANDS, SOUND))
    report["passed"] &= report["differing"] == 0


def table_of(report: dict[str, Any]) -> Table:
    names = {name: words for name, (words, _) in CONTROLS.items()} | {ISLANDS: "A and B, B dies and comes back"}
    columns = list(VERDICT_COLUMNS.items())
    columns.insert(1, ("batches", "{num_batches}"))
    return tabulate("compared with a single launch", columns, rows_of_verdicts(report, names))


def notes_of(report: dict[str, Any]) -> list[str]:
    story = report[ISLANDS]
    return [
        f"band: {report['band'][-1]:.1e} nats per token after {report['num_batches']} batches, the largest distance "
        f"between two of {len(report['worlds'])} single launches (running root mean square)",
        f"B was killed after batch {story['killed_after']}, and trained again from batch {story['back_from']}",
        f"time from the kill to the next finished batch: {story['seconds_to_go_on']:.1f} s; time from B's command to "
        f"its first batch: {story['seconds_to_come_back']:.1f} s (mostly imports, while A trains)",
        f"batches that both islands recorded and that differ in any bit of loss, norm or digest: {report['differing']}",
        f"islands whose weights differed when they were compared, every 100 batches: {story['drifts']}. Different "
        "kernels round differently; the weights of the island that saves then replace the other's",
        f"runs with a wrong exchange end after {CONTROL_BATCHES} batches; if B dies in them, it dies in batch "
        f"{DIES_AT + 1}",
    ]


def write(report: dict[str, Any], out: Path | None) -> None:
    """Show what was found; with `out`, write islands.json, .md and .png."""
    other = " --other-python …" if len({c["torch"] for c in report["clusters"]}) > 1 else ""
    how = (
        f"{report['num_batches']} batches of {GLOBAL_BATCH} x {SEQ_LEN} tokens, fp32. A and B are the islands. A, B "
        "and C alone span the band."
    )
    tell(
        report,
        *(how, table_of(report), notes_of(report), table_of_clusters(report["clusters"])),
        name="islands",
        heading="One run on two islands at once",
        command=f"python -m benchmarks islands{other}",
        asked=("num_batches", "kill_at", "seed"),
        plot=plot_islands,
        out=out,
    )
