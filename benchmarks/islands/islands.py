"""Train one run on two islands at once, of which one dies and comes back. Is it the run of a single launch?

    python -m benchmarks islands --out results                   about 8 minutes on two quiet cores
    python -m benchmarks islands --other-python other/bin/python

What happens, in this order:

- Three clusters train a small MPT alone. Their losses span the band of the switch benchmark (`switch/band.py`).
- Two islands train the same run together: A, and B with other instructions, another sharding and perhaps another torch.
  B is killed and launched again. Digests and losses are compared with those of the runs alone.
- Controls are runs in which an island makes a deliberate mistake (see `wrong.py`). The comparison has to notice all of
  them; otherwise it would prove nothing.

The launches are real (see `launches.py`).
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
"""Control -> (its name in words, what is wrong on A and on B). The first is sound and must be the same run; the others
must not. The mistakes are functions of `wrong.py`."""
CONTROL_BATCHES = 2 * DIES_AT
"""Batches of a control: as many after the death of an island as before it."""


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
    """Train all runs, compare them, print the tables, and return the report. `out` gets islands.json, .md and .png.

    B is killed after batch `kill_at`. `other_python` is an interpreter with another torch release, for B. The runs are
    trained in `keep`, or in a temporary folder. Raises UserError.
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
        workshop = build_workshop(Path(folder).resolve(), data, num_batches, seed, clusters)
        machines = {cluster.letter: probe(cluster) for cluster in clusters}
        cluster_descriptions = [describe_cluster(cluster, machines) for cluster in clusters]
        show(console, table_of_clusters(cluster_descriptions))

        with ThreadPoolExecutor(2) as pool:
            worlds = list(pool.map(lambda cluster: train_alone(workshop, cluster, console), clusters))
        records_together, story = train_together(workshop, kill_at, num_batches, console)
        controls = {name: train_control(workshop, name, console) for name in CONTROLS}

    report = conditions | {
        "num_batches": num_batches,
        "kill_at": kill_at,
        "seed": seed,
        "clusters": cluster_descriptions,
        "worlds": {cluster.letter: series_of(records) for cluster, records in zip(clusters, worlds, strict=True)},
        ISLANDS: series_of(records_together["A"]) | story,
        "controls": {name: series_of(records) for name, records in controls.items()},
        "rows": [record["islands/rows"] for record in records_together["A"]],
        "differing": count_differing(records_together["A"], records_together["B"]),
    }
    evaluate(report)
    write(report, out)
    console.print("passed" if report["passed"] else "FAILED: see the verdicts", style="bold")
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def default_clusters(other_python: str | None) -> list[Cluster]:
    """Return three clusters on this machine: A and B are the islands, and C is one more for the band."""

    cpu = {"OMP_NUM_THREADS": "1", **NO_GPU}
    strategies = [{"sharding_strategy": name} for name in ("FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP")]
    b = cluster_of("B", 1, 2, "reference", strategies[1], cpu | INSTRUCTION_SETS["sse"])
    return [
        cluster_of("A", 2, 2, "sdpa", strategies[0], cpu),
        dataclasses.replace(b, python=other_python or b.python),
        cluster_of("C", 2, 4, "reference", strategies[2], cpu | INSTRUCTION_SETS["avx2"]),
    ]


def build_workshop(folder: Path, data: Path, num_batches: int, seed: int, clusters: Sequence[Cluster]) -> Workshop:
    """Write the YAML of the run and its clusters: the run of the switch benchmark, without evaluation."""
    config = configuration(data.resolve(), num_batches, num_batches, "fp32", seed) | {"eval_interval": 0}
    workshop = Workshop(folder=folder, config=config, clusters=clusters)
    workshop.prepare()
    return workshop


def train_alone(workshop: Workshop, cluster: Cluster, console: Console) -> list[dict[str, Any]]:
    """Train the whole run on one cluster, without islands, and return its records. Raises UserError if it fails."""
    console.print(f"training: {cluster.letter} alone")
    world = Islands(workshop, f"alone-{cluster.letter}")
    try:
        world.start(cluster).check()
    finally:
        world.end()
    return records_of(world, cluster)


def train_together(
    workshop: Workshop, kill_at: int, num_batches: int, console: Console
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Train the run on A and B, kill B after batch `kill_at`, and launch it again.

    Returns the records of both, and the story of B: the last batch with it, the first batch with it again, the seconds
    until A finished a batch without B, the seconds from B's second command to its first batch, and the number of
    drifts.

    Raises UserError if B does not come back before the last batch.
    """
    console.print(f"training: A and B; B is killed after batch {kill_at} and launched again")
    a, b = workshop.clusters[:2]
    with running(workshop, ISLANDS, 2) as islands:
        launch_of_a, first_launch_of_b = islands.start(a), islands.start(b)
        log_of_a, log_of_b = islands.log(a), islands.log(b)
        islands.wait_for(lambda: last_batch(log_of_a) >= kill_at, f"batch {kill_at}")

        # Kill B, and wait for a batch that A finishes without it.
        killed_at, killed_after = time.monotonic(), last_batch(log_of_a)
        first_launch_of_b.kill()
        islands.wait_for(lambda: last_batch(log_of_a) > killed_after, "a batch without B")
        seconds_to_go_on = time.monotonic() - killed_at

        # Launch B again, and wait for its first new batch.
        launched_again_at, last_batch_of_b = time.monotonic(), last_batch(log_of_b)
        second_launch_of_b = islands.start(b)
        islands.wait_for(
            lambda: last_batch(log_of_b) > last_batch_of_b or last_batch(log_of_a) == num_batches, "B to be back"
        )
        if last_batch(log_of_b) == last_batch_of_b:
            raise UserError(f"bench islands: B is not back before batch {num_batches}; use a larger --num-batches")
        seconds_to_come_back = time.monotonic() - launched_again_at

        for launch in (launch_of_a, second_launch_of_b):
            launch.check()
        together = {"A": records_of(islands, a), "B": records_of(islands, b)}

    # Batches that A trained alone show when B was away.
    alone = [record["batch"] for record in together["A"] if record["islands/members"] == 1]
    story = {
        "killed_after": min(alone) - 1,
        "back_from": max(alone) + 1,
        "seconds_to_go_on": seconds_to_go_on,
        "seconds_to_come_back": seconds_to_come_back,
        "drifts": together["A"][-1]["islands/drifts"],
    }
    return together, story


def train_control(workshop: Workshop, name: str, console: Console) -> list[dict[str, Any]]:
    """Train a short run whose islands make the mistakes of this control, and return A's records."""
    description, mistakes = CONTROLS[name]
    console.print(f"training: {description}")
    with running(workshop, name, 2, stop_after=f"{CONTROL_BATCHES}ba") as islands:
        launched = [
            islands.start(cluster, wrong=mistake)
            for cluster, mistake in zip(workshop.clusters[:2], mistakes, strict=True)
        ]
        launched[1].dies = mistakes[1] == "dies"
        launched[0].check()
        return records_of(islands, workshop.clusters[0])


def records_of(islands: Islands, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the newest record of each batch of an island, in order of the batches."""
    return [record for _, record in sorted(islands.log(cluster).last_of_each_batch().items())]


def series_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses and digests of a run as a dictionary for the report."""
    return dataclasses.asdict(read_series(records))


def count_differing(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> int:
    """Count the batches that both islands have recorded with another loss, gradient norm or digest, to the bit."""
    record_of_batch = {record["batch"]: record for record in first}
    keys = ("loss/train/total", "grad_norm", "data/digest")
    return sum(any(record[key] != record_of_batch[record["batch"]][key] for key in keys) for record in second)


# ------------------------------------------------------------------------------------------------------ what it shows


def evaluate(report: dict[str, Any]) -> None:
    """Compare the runs in a report, and add the results: `band`, `deviation`, `verdicts` and `passed`."""
    runs = {ISLANDS: report[ISLANDS], **report["controls"]}
    band.evaluate(report, runs, report["worlds"].values(), sound=(ISLANDS, SOUND))
    report["passed"] &= report["differing"] == 0


def table_of(report: dict[str, Any]) -> Table:
    """Return a table of the run on both islands and of the controls, compared with a single launch."""
    names = {name: description for name, (description, _) in CONTROLS.items()} | {
        ISLANDS: "A and B, B dies and comes back"
    }
    columns = list(VERDICT_COLUMNS.items())
    columns.insert(1, ("batches", "{num_batches}"))
    return tabulate("compared with a single launch", columns, rows_of_verdicts(report, names))


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the table."""
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
    """Print the report, and with `out`, write islands.json, .md and .png."""
    other_python_option = " --other-python …" if len({cluster["torch"] for cluster in report["clusters"]}) > 1 else ""
    introduction = (
        f"{report['num_batches']} batches of {GLOBAL_BATCH} x {SEQ_LEN} tokens, fp32. A and B are the islands. A, B "
        "and C alone span the band."
    )
    tell(
        report,
        *(introduction, table_of(report), notes_of(report), table_of_clusters(report["clusters"])),
        name="islands",
        heading="One run on two islands at once",
        command=f"python -m benchmarks islands{other_python_option}",
        asked=("num_batches", "kill_at", "seed"),
        plot=plot_islands,
        out=out,
    )
