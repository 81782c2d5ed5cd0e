"""Train one run on several "clusters", and the same run switching between them. Is it the same run?

    python -m benchmarks switch --out bench-switch     about 8 minutes on two quiet cores
    python -m benchmarks switch --precision amp_bf16 --rounding-seeds 1
    python -m benchmarks switch --layouts              the "clusters" only differ in how they divide the run
    python -m benchmarks switch --exact-sums           the same, and every run must equal the others in each bit

What happens, in this order:

- A small MPT is trained without interruption on each cluster (see `workshop.py`), through the real launcher.
- The same run is trained once switching clusters every few batches, moved by a relay from one file. It is compared with
  the band that the uninterrupted runs span (see `band.py`).
- Controls continue from one of its checkpoints with a deliberate mistake (see `tamper.py`). The same comparison has to
  notice each of them; otherwise it would prove nothing.
- Finally, the time from the command to the first batch is measured.

In bf16, rounding takes runs several hundred times as far apart as in fp32, and one run of each cluster is a small
sample of that. `--rounding-seeds N` adds N runs of each cluster: after batch 1 every weight is moved by one fp32
number, or not, as the seed draws. Data, weights and mathematics are otherwise the same. bf16 has a control of its own:
weights rounded to bf16. Its loss may look sound if the digest of the checkpoint's tensors does not. The last cluster's
run is repeated in fp32 and under both torch releases, which separates the effect of the precision from that of the
release. No instruction set is emulated in bf16, because its products then take about ten times as long.

Nothing here is measured on hardware that this machine does not have.
"""

import dataclasses
import json
import math
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import wait_for
from benchmarks.switch import band, tamper
from benchmarks.switch.band import Series, Verdict, leave_one_out, read_series
from benchmarks.switch.figure import plot_switch
from benchmarks.switch.workshop import INSTRUCTION_SETS, NO_GPU, Cluster, Launch, Machine, Workshop, probe
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.frame import (
    check_names,
    describe_conditions,
    measured_table,
    open_console,
    show,
    tabulate,
    tell,
)

GLOBAL_BATCH, SEQ_LEN, VOCAB_SIZE, WARMUP = 16, 128, 4096, 10
LATE_BATCHES = (10_000, 1_000_000)
"""Batches after which a resume is timed: late in a run that is not trained that long."""
# Names of runs. The run of one batch is where the runs with nudged weights start.
FIRST_BATCH = "first-batch"
SWITCHING = "switching"
UNTOUCHED = "untouched"
ROUNDED = "rounded"
"""The control that exists only in bf16, and whose loss may look sound."""

CONTROLS: dict[str, tuple[str, tamper.Change]] = {
    UNTOUCHED: ("published again as it was", lambda content: None),
    "moments": ("moments zeroed", tamper.zero_moments),
    "schedule": ("schedule one batch ahead", lambda content: None),
    "skipped": ("one batch skipped", tamper.move_data(1)),
    "repeated": ("one batch repeated", tamper.move_data(-1)),
    "steps": ("step counter reset", tamper.reset_steps),
    ROUNDED: ("weights rounded to bf16", tamper.round_weights),
}
"""Control -> (its name in words, change of the checkpoint at one switch). The first has no mistake and must be the same
run; the others must not. The change of "schedule" is an argument of its launch, see `launch_control`."""


def run(
    *,
    data: Path = Path("data/python-stdlib"),
    num_batches: int = 100,
    every: int = 20,
    precision: str = "fp32",
    seed: int = 17,
    other_python: str | None = None,
    layouts: bool = False,
    exact_sums: bool = False,
    out: Path | None = None,
    keep: Path | None = None,
    jobs: int = 1,
    rounding_seeds: int = 0,
    only: Sequence[str] = (),
    untimed: bool = False,
    clusters: Sequence[Cluster] | None = None,
) -> dict[str, Any]:
    """Train all runs, compare them, print the tables, and return the report. `out` also gets it as .json, .md and .png.

    The options select the clusters: four ways to compute on this machine by default, `layouts` or `exact_sums` for
    other ways to divide the run, and `only` for some of them (A,B,D). `other_python` is an interpreter with another
    torch release, for the last cluster. The runs are trained in `keep`, or in a temporary folder, `jobs` at a time,
    which changes no digit of the result. The launches for timing come last, one at a time; `untimed` leaves them out.
    Raises UserError.
    """
    # This function is long because it is the whole benchmark from top to bottom. First, the options and the clusters.
    num_switches = -(-num_batches // every) - 1
    if num_switches < 2:
        raise UserError(f"--num-batches {num_batches}, --every {every}: need two switches; use a smaller --every")
    console, conditions = open_console(), describe_conditions()
    is_low = precision != "fp32" and rounding_seeds > 0
    if clusters is None:
        if exact_sums:
            clusters = exact_clusters()
        elif layouts:
            clusters = layout_clusters()
        else:
            clusters = default_clusters(precision, other_python)
    check_names("--only", only, [cluster.letter for cluster in clusters])
    clusters = [cluster for cluster in clusters if cluster.letter in (only or cluster.letter)]
    if len(clusters) < 2:
        raise UserError("--only: one cluster given, expected at least two; a run cannot switch otherwise")
    prepare_data(data)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(
            folder=Path(folder).resolve(),
            config=configuration(
                data.resolve(), num_batches, every, precision, seed, is_fused=not layouts, is_exact=exact_sums
            ),
            clusters=clusters,
        )
        workshop.prepare()
        with ThreadPoolExecutor(jobs) as pool:
            machines = dict(zip((cluster.letter for cluster in clusters), pool.map(probe, clusters), strict=True))
        cluster_descriptions = [describe_cluster(cluster, machines) for cluster in clusters]
        show(console, table_of_clusters(cluster_descriptions))

        # The controls start at the middle switch, on a cluster that is fast here: four ranks on two cores take twice as
        # long as one, and an emulated instruction set takes longer still.
        tampered_at = (num_switches + 1) // 2 * every
        is_native = layouts or exact_sums or is_low
        control_cluster = min(clusters, key=lambda cluster: cluster.num_ranks) if is_native else clusters[0]

        # Choose the runs: name -> how it is launched.
        nudged_runs = {f"{alone(c)}.{seed}": (c, seed) for seed in range(1, rounding_seeds + 1) for c in clusters}
        changed_runs = change_precision(clusters[-1]) if is_low else {}
        controls = [name for name in CONTROLS if is_low or name != ROUNDED]
        if nudged_runs:
            workshop.launch(FIRST_BATCH, control_cluster, "stop_after=1ba")

        relay_ended = threading.Event()

        def train(name: str) -> list[Launch]:
            """Train one run to its end, in a thread of the pool. Controls wait for the checkpoint they start from."""
            if name in CONTROLS:
                no_checkpoint_error = partial(UserError, f"{SWITCHING}: ended before it saved batch {tampered_at}")
                wait_for(checkpoint(workshop, tampered_at).is_dir, math.inf, no_checkpoint_error, relay_ended.is_set)
                console.print(f"training: {name}", highlight=False)
                return [launch_control(workshop, name, control_cluster, tampered_at, num_batches)]
            console.print(f"training: {name}", highlight=False)
            # Move every weight by a rounding step after the first batch, which these runs share.
            if name in nudged_runs:
                cluster, rounding_seed = nudged_runs[name]
                first = workshop.run_folder(FIRST_BATCH) / "checkpoints" / "ba1"
                tamper.republish(first, workshop.run_folder(name) / "checkpoints", tamper.nudge(rounding_seed))
                return [workshop.launch(name, cluster)]
            if name in changed_runs:
                cluster, *arguments = changed_runs[name]
                return [workshop.launch(name, cluster, *arguments)]
            if name != SWITCHING:
                return [workshop.launch(name, next(c for c in clusters if alone(c) == name))]
            # Controls stop waiting when the relay has ended, even if it has failed.
            try:
                return workshop.relay(name, every)
            finally:
                relay_ended.set()

        with ThreadPoolExecutor(jobs) as pool:
            names = [SWITCHING, *map(alone, clusters), *nudged_runs, *changed_runs, *controls]
            launches = dict(zip(names, pool.map(train, names), strict=True))

        # Nothing else runs now, so these launches can be timed.
        resume_batches = () if is_low or untimed else (every, *LATE_BATCHES)
        resumes = [launch_late(workshop, control_cluster, tampered_at, after, data) for after in resume_batches]

        report = conditions | {
            "layouts": layouts,
            "exact_sums": exact_sums,
            "precision": precision,
            "num_batches": num_batches,
            "every": every,
            "seed": seed,
            "rounding_seeds": rounding_seeds,
            "only": list(only),
            "tampered_at": tampered_at,
            "clusters": cluster_descriptions,
            "uninterrupted": {c.letter: dataclasses.asdict(read(workshop, alone(c))) for c in clusters}
            | {
                f"{c.letter}+{rounding_seed}": dataclasses.asdict(read(workshop, name, before=(FIRST_BATCH, 1)))
                for name, (c, rounding_seed) in nudged_runs.items()
            },
            "changed": {name: dataclasses.asdict(read(workshop, name)) for name in changed_runs},
            SWITCHING: dataclasses.asdict(read(workshop, SWITCHING)),
            "controls": {
                name: dataclasses.asdict(read(workshop, name, before=(SWITCHING, tampered_at))) for name in controls
            },
            "other_tensors": [
                name
                for name in controls
                if tensors_of(workshop, name, tampered_at) != tensors_of(workshop, SWITCHING, tampered_at)
            ],
            "launches": {
                name: [dataclasses.asdict(launch) for launch in launched] for name, launched in launches.items()
            },
            "resumes": [{"after_batch": launch.first_batch - 1, **dataclasses.asdict(launch)} for launch in resumes],
        }
    evaluate(report)
    write(report, out)
    console.print("passed" if report["passed"] else "FAILED: see the verdicts", style="bold")
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def default_clusters(precision: str, other_python: str | None) -> list[Cluster]:
    """Return four ways to compute one run on this machine. If it has a GPU, that is the second one.

    `other_python` is the interpreter of the last cluster.
    """
    import torch

    cpu = {"OMP_NUM_THREADS": "1", **NO_GPU}
    is_low = precision != "fp32"
    avx2, sse = (cpu | ({} if is_low else INSTRUCTION_SETS[name]) for name in ("avx2", "sse"))
    a = cluster_of("A", 2, 4, "sdpa", {"sharding_strategy": "FULL_SHARD"}, cpu)
    if torch.cuda.is_available():
        b = cluster_of("B", 1, 16, "sdpa", {"sharding_strategy": "FULL_SHARD"}, {})
    else:
        b = cluster_of("B", 1, 16, "blocked" if is_low else "reference", {"sharding_strategy": "NO_SHARD"}, avx2)
    c = cluster_of("C", 4, 2, "sdpa", {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}, sse)
    d = cluster_of("D", 2, 8, "reference", {"sharding_strategy": "SHARD_GRAD_OP"}, cpu)
    return [a, b, c, dataclasses.replace(d, python=other_python or sys.executable)]


def change_precision(last: Cluster) -> dict[str, tuple[Any, ...]]:
    """Return launches of the last cluster with another torch release, precision or mixed precision.

    The result maps a name to the cluster and further arguments of the launch.
    """
    this_release = dataclasses.replace(last, python=sys.executable)
    return {
        "ours": (this_release,),
        "ours-fp32": (this_release, "precision=fp32"),
        "fp32": (last, "precision=fp32"),
        "ours-full": (this_release, "fsdp_config.mixed_precision=FULL"),
    }


def cluster_of(
    letter: str, num_ranks: int, microbatch: int, attention: str, fsdp: dict[str, Any], environment: dict[str, str]
) -> Cluster:
    """Build a cluster from the settings that distinguish it from the others.

    `microbatch` is in samples, `attention` is an attn_impl, and `fsdp` is a whole fsdp_config.
    """
    overlay = {
        "device_train_microbatch_size": microbatch,
        "device_eval_batch_size": GLOBAL_BATCH // num_ranks,
        "model": {"attn_config": {"attn_impl": attention}},
        "fsdp_config": fsdp,
        "environment": environment,
    }
    return Cluster(letter=letter, num_ranks=num_ranks, overlay=overlay)


ALIKE: dict[str, Any] = {
    "device_train_microbatch_size": 2,
    "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
    "environment": {"OMP_NUM_THREADS": "1", **NO_GPU},
}
"""Overlay that clusters share which divide the run in different ways and otherwise compute alike."""


def layout_clusters() -> list[Cluster]:
    """Return five ways to divide one run: pipeline, tensor and context parallelism, and data parallelism alone."""
    pipeline, tensor = {"pp_config": {"pipeline_parallel_degree": 2}}, {"tp_config": {"tensor_parallel_degree": 2}}
    context = {"cp_config": {"context_parallel_degree": 2, "kind": "heads"}}
    layouts: list[tuple[int, dict[str, Any]]] = [
        (4, {}),
        (4, pipeline),
        (4, tensor | context),
        (1, {}),
        (4, {"pp_config": {"pipeline_parallel_degree": 4}}),
    ]
    clusters = []
    for letter, (num_ranks, changes) in zip("ABCDE", layouts, strict=True):
        data_parallel_degree = num_ranks // math.prod(degrees_of(changes).values())
        overlay = ALIKE | changes | {"device_eval_batch_size": GLOBAL_BATCH // data_parallel_degree}
        clusters.append(Cluster(letter=letter, num_ranks=num_ranks, overlay=overlay))
    return clusters


def exact_clusters() -> list[Cluster]:
    """Return four ways to divide one run which compute every microbatch alike, so that exact sums make them equal."""
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (1, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}}),
        (4, {"fsdp_config": hybrid}),
        (4, {"pp_config": {"pipeline_parallel_degree": 2}}),
    ]
    return [
        Cluster(letter=letter, num_ranks=num_ranks, overlay=ALIKE | changes | {"device_eval_batch_size": 4})
        for letter, (num_ranks, changes) in zip("ABCD", layouts, strict=True)
    ]


def degrees_of(overlay: dict[str, Any]) -> dict[str, int]:
    """Return the degrees of the kinds of parallelism that an overlay has a block for, such as {"pipeline": 2}."""
    blocks = {"pipeline": "pp_config", "tensor": "tp_config", "context": "cp_config"}
    return {name: overlay[block][f"{name}_parallel_degree"] for name, block in blocks.items() if block in overlay}


def configuration(
    data: Path,
    num_batches: int,
    every: int,
    precision: str,
    seed: int,
    *,
    is_fused: bool = True,
    is_exact: bool = False,
) -> dict[str, Any]:
    """Return the run's YAML as a dictionary: the quickstart's run with a smaller model.

    `every` is the number of batches between saves, and between evaluations. With `is_fused`, queries, keys and values
    are one matrix. With `is_exact`, the run has exact sums.
    """

    def dataset(split: str, **options: Any) -> dict[str, Any]:
        """Return the loader of one split of the prepared data."""
        return {"name": "text", "dataset": {"local": str(data), "split": split, **options}}

    return {
        "run_name": "switch",
        "seed": seed,
        "max_seq_len": SEQ_LEN,
        "model": {
            "name": "mpt_causal_lm",
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": SEQ_LEN,
            "vocab_size": VOCAB_SIZE,
            "no_bias": True,
            "attn_config": {"fused_qkv": is_fused},
        },
        "tokenizer": {"name": str(data / "tokenizer")},
        "train_loader": dataset("train", shuffle=True, shuffle_seed=seed),
        "eval_loader": dataset("val"),
        "optimizer": {"name": "decoupled_adamw", "lr": 5e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
        "scheduler": {
            "name": "cosine_with_warmup",
            "t_warmup": f"{WARMUP}ba",
            "t_max": f"{num_batches}ba",
            "alpha_f": 0.1,
        },
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_duration": f"{num_batches}ba",
        "eval_interval": f"{every}ba",
        "eval_subset_num_batches": 4,
        "exact_sums": is_exact,
        "global_train_batch_size": GLOBAL_BATCH,
        "device_eval_batch_size": GLOBAL_BATCH,
        "precision": precision,
        "save_interval": f"{every}ba",
        "autoresume": True,
        "export_at_end": False,
    }


def prepare_data(data: Path) -> None:
    """Prepare the source of Python's standard library as in the quickstart, unless `data` is there already."""
    if (data / "summary.json").is_file():
        return
    from llmfoundry_lite.prepare.prepare import prepare
    from llmfoundry_lite.prepare.request import PrepareRequest

    request = PrepareRequest(sources=("python-stdlib",), tokenizer=f"train:{VOCAB_SIZE}", max_seq_len=256)
    prepare(request, data, show_progress=True)


def launch_control(workshop: Workshop, name: str, cluster: Cluster, batch: int, num_batches: int) -> Launch:
    """Continue from the switching run's checkpoint at `batch`, with the change of the control `name`, to the end."""
    _, change = CONTROLS[name]
    arguments = []
    if name == "schedule":
        # The schedule is a function of the batch and is not saved, so the run's arguments are changed instead.
        arguments = [f"scheduler.t_warmup={WARMUP - 1}ba", f"scheduler.t_max={num_batches - 1}ba"]
    tamper.republish(checkpoint(workshop, batch), workshop.run_folder(name) / "checkpoints", change)
    return workshop.launch(name, cluster, *arguments)


def launch_late(workshop: Workshop, cluster: Cluster, at: int, batch: int, data: Path) -> Launch:
    """Train one batch after batch number `batch`, from the checkpoint at batch `at`, whose counters are set to `batch`.

    This is how long a resume takes late in a run, without training that long.
    """
    index = json.loads((data / "train" / "index.json").read_text())
    batches_in_epoch = sum(shard["samples"] for shard in index["shards"]) // GLOBAL_BATCH
    name = f"after-{batch}"
    tamper.republish(
        checkpoint(workshop, at),
        workshop.run_folder(name) / "checkpoints",
        tamper.move_run(batch, batches_in_epoch, SEQ_LEN),
    )
    return workshop.launch(name, cluster, f"max_duration={2 * LATE_BATCHES[-1]}ba", "stop_after=1ba", "eval_interval=0")


def alone(cluster: Cluster) -> str:
    """Return the name of this cluster's uninterrupted run."""
    return f"alone-{cluster.letter}"


def checkpoint(workshop: Workshop, batch: int) -> Path:
    """Return the folder of the switching run's checkpoint at this batch."""
    return workshop.run_folder(SWITCHING) / "checkpoints" / f"ba{batch}"


def tensors_of(workshop: Workshop, name: str, batch: int) -> str | None:
    """Return the digest of all tensors in a run's checkpoint at this batch, or None if it has none."""
    return open_checkpoint(workshop.run_folder(name) / "checkpoints" / f"ba{batch}").manifest.state_digest


def read(workshop: Workshop, name: str, before: tuple[str, int] | None = None) -> Series:
    """Read the series of a run's losses from its metrics.

    A run that continued another's checkpoint has records only from there on. With `before`, the name of that other run
    and the batch of the checkpoint, the other run's records up to this batch are put in front.
    """
    records = workshop.records(name)
    if before is not None:
        earlier_run, last_batch = before
        records = {
            batch: record for batch, record in workshop.records(earlier_run).items() if batch <= last_batch
        } | records
    return read_series([records[batch] for batch in sorted(records)])


# ------------------------------------------------------------------------------------------------------- what it says


def evaluate(report: dict[str, Any]) -> None:
    """Compare the runs in a report, and add the results: `band`, `deviation`, `verdicts`, `leave_one_out`, `passed`.

    Takes a report that `run` has made, or one read from JSON. With exact sums, the runs without a mistake must also be
    equal in each bit of their losses and evaluations.
    """
    alone = report["uninterrupted"].values()
    runs = {SWITCHING: report[SWITCHING], **report["controls"]}

    # The rounded weights may show in the digest of the checkpoint's tensors only. The digest of the untouched copy must
    # not differ.
    other_tensors = report.get("other_tensors", ())
    shown_by = {ROUNDED: "the digest of the checkpoint's tensors"} if ROUNDED in other_tensors else {}
    band.evaluate(report, runs, alone, sound=(SWITCHING, UNTOUCHED), shown_by=shown_by)
    report["passed"] &= UNTOUCHED not in other_tensors

    if report["exact_sums"]:
        equal_runs = [*alone, report[SWITCHING], report["controls"][UNTOUCHED]]
        report["passed"] &= all(run == equal_runs[0] for run in equal_runs)  # losses and evaluations, to the last bit
    report["leave_one_out"] = leave_one_out([band.as_series(series) for series in alone])


def table_of(report: dict[str, Any]) -> Table:
    """Return a table of the switching run and the controls: data, deviation from the uninterrupted runs, verdict."""
    names = {name: description for name, (description, _) in CONTROLS.items()} | {SWITCHING: SWITCHING}
    title = f"switching every {report['every']} batches, {report['precision']}"
    columns = list(VERDICT_COLUMNS.items())
    columns.insert(-1, ("validation / band", lambda row: times(row["validation_ratio"])))
    return tabulate(title, columns, rows_of_verdicts(report, names))


def table_of_changes(report: dict[str, Any]) -> Table:
    """Return a table of how far another torch release, and another precision, takes a run, relative to the band."""
    last = report["clusters"][-1]
    runs = report["changed"] | {"theirs": report["uninterrupted"][last["letter"]]}
    ours, theirs = (release.partition("+")[0] for release in (report["torch"], last["torch"]))
    # What changed, its description, and the names of the two runs compared.
    pairs = [
        ("release", f"fp32 of torch {ours} and {theirs}", "ours-fp32", "fp32"),
        ("release", f"bf16 of torch {ours} and {theirs}", "ours", "theirs"),
        ("precision", f"fp32 and bf16 of torch {ours}", "ours-fp32", "ours"),
        ("precision", f"fp32 and bf16 of torch {theirs}", "fp32", "theirs"),
        ("mixed precision", f"DEFAULT and FULL in bf16 of torch {ours}", "ours", "ours-full"),
    ]

    rows = []
    for what_changed, compared, first, second in pairs:
        distance_t = band.measure_deviation(runs[first]["losses"], [runs[second]["losses"]])
        largest = (distance_t / report["band"]).max()
        rows.append([what_changed, compared, f"{distance_t[-1]:.1e}", times(largest)])
    columns = ["changed", "between", "distance, nats", "largest / band"]
    return measured_table(f"one thing changed on cluster {last['letter']}", columns, rows, num_keys=2)


VERDICT_COLUMNS: dict[str, Any] = {
    "run": "{name}",
    "same data": "{same_data}",
    "deviation, nats": "{final_deviation:.1e}",
    "largest / band": lambda row: times(row["largest_ratio"]),
    "verdict": "{words}",
}


def rows_of_verdicts(report: dict[str, Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return one row for each verdict, as VERDICT_COLUMNS takes them. `names` maps a run to its name in words."""
    verdicts = {name: Verdict(**values) for name, values in report["verdicts"].items()}
    return [
        {
            "name": names[name],
            "num_batches": len(report["deviation"][name]),
            "same_data": "yes" if verdict.same_data else "no",
            "words": verdict.words,
            **dataclasses.asdict(verdict),
        }
        for name, verdict in verdicts.items()
    ]


def table_of_clusters(clusters: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the clusters that were compared."""
    rows = [[cluster["letter"], cluster["words"], cluster["device"], cluster["torch"]] for cluster in clusters]
    return measured_table("the clusters", ["cluster", "", "device", "torch"], rows)


def times(ratio: float) -> str:
    """Format a ratio: with two decimals below 10, otherwise as an integer."""
    return f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"


def notes_of(report: dict[str, Any]) -> list[str]:
    """Return the notes below the table, one sentence or more each: band, relay, data, and how sound runs fare."""
    num_batches = report["num_batches"]
    # One digest for each batch, if all runs had the same data.
    digests = {digest for series in report["uninterrupted"].values() for digest in series["digests"]}
    uninterrupted = list(report["uninterrupted"].values())
    band_note = (
        f"band: {report['band'][-1]:.1e} nats per token after {num_batches} batches, the largest distance between two "
        f"of {len(uninterrupted)} uninterrupted runs (running root mean square)"
    )
    if report["exact_sums"]:
        num_unlike = sum(run != uninterrupted[0] for run in uninterrupted)
        does = "does" if report[SWITCHING] != uninterrupted[0] else "does not"
        band_note = (
            f"band: its width is 0. {num_unlike} of {len(uninterrupted)} uninterrupted runs differ from the first in a "
            f"bit of a loss; the switching run {does}. Ratios are to the distance of two neighbouring fp32 numbers, "
            f"{report['band'][-1]:.1e} nats"
        )
    notes = [
        band_note,
        f"moved by one relay, in {len(report['launches'][SWITCHING])} allocations: "
        f"`llmfoundry-lite relay {SWITCHING}.yaml`",
        f"data: {len(digests)} different digests for {num_batches} batches, over all runs that should have the same "
        "data",
    ]

    if report["leave_one_out"]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in report["leave_one_out"])
        num_outside = sum(ratio > 1 for ratio in report["leave_one_out"])
        notes.append(
            f"distance of each uninterrupted run from the others, divided by their band: {ratios}. Above 1, a run "
            f"without any mistake leaves the band of the others: {num_outside} of {len(uninterrupted)} do"
        )

    share = report["verdicts"][SWITCHING]["share_outside"]
    notes.append(f"share of batches at which the switching run is farther off than any two others so far: {share:.0%}")
    same_cluster, different_clusters = band.measure_pairs(report["uninterrupted"])
    if same_cluster:
        notes.append(
            "uninterrupted: a run on each cluster, and runs in which each weight was changed by at most one fp32 "
            f"number after batch 1. Median distance after {num_batches} batches: {median(same_cluster):.1e} between "
            f"two runs of one cluster, {median(different_clusters):.1e} between runs of different clusters. The runs "
            "with changed weights share their first batch"
        )

    resumes = [
        f"after batch {resume['after_batch']:,} {resume['seconds_to_first_batch']:.1f} s, "
        f"of which {resume['seconds_to_first_batch'] - (resume['seconds_to_restore'] or 0):.1f} s after the restore"
        for resume in report["resumes"]
    ]
    if resumes:
        notes.append(
            f"from the command to the end of the first batch: {'; '.join(resumes)} (mostly imports; the load average "
            f"was {report['load_average']:.0f})"
        )

    if any(cluster["emulated"] for cluster in report["clusters"]):
        notes.append("emulated: the same machine, limited to an older instruction set, in place of another vendor")
    return notes


def write(report: dict[str, Any], out: Path | None) -> None:
    """Print the report, and with `out`, write the JSON, the Markdown page and the figure.

    Builds the command that repeats the measurement from the report's options, and the name of the files: switch,
    switch-layouts or switch-exact, with the precision at the end if it was compared with another one.
    """
    # Options that differ from their defaults.
    options = "" if report["precision"] == "fp32" else f" --precision {report['precision']}"
    num_seeds = report["rounding_seeds"]
    options += f" --rounding-seeds {num_seeds}" if num_seeds else ""
    batches, every = report["num_batches"], report["every"]
    options += f" --num-batches {batches} --every {every}" if (batches, every) != (100, 20) else ""
    options += f" --only {','.join(report['only'])}" if report["only"] else ""
    options += " --other-python …" if len({cluster["torch"] for cluster in report["clusters"]}) > 1 else ""

    introduction = (
        f"{report['num_batches']} batches of {GLOBAL_BATCH} x {SEQ_LEN} tokens, {report['precision']}, switching every "
        f"{report['every']} batches; the controls get a deliberate mistake at batch {report['tampered_at']}."
    )

    # Name the files and the heading.
    name, compared = ("switch-layouts", "layouts") if report["layouts"] else ("switch", "clusters")
    if report["changed"]:
        low_precision = report["precision"].removeprefix("amp_")
        name, compared = f"{name}-{low_precision}", f"{compared}, in {low_precision}"
    options += " --layouts" if report["layouts"] else ""
    if report["exact_sums"]:
        name, compared, options = "switch-exact", "layouts, with exact sums", f"{options} --exact-sums"

    tell(
        report,
        *(introduction, table_of(report), notes_of(report), *([table_of_changes(report)] if report["changed"] else [])),
        table_of_clusters(report["clusters"]),
        name=name,
        heading=f"One run, switching between {compared}",
        command=f"python -m benchmarks switch{options}",
        asked=("precision", "num_batches", "every", "seed"),
        plot=partial(plot_switch, {control: words for control, (words, _) in CONTROLS.items()}),
        out=out,
    )


def describe_cluster(cluster: Cluster, machines: dict[str, Machine]) -> dict[str, Any]:
    """Describe a cluster for the report and the figure.

    `machines` has what `probe` found for each letter. A cluster is emulated if torch uses other instructions on it than
    on the first one, although both are this machine.
    """
    overlay, machine, first_machine = cluster.overlay, machines[cluster.letter], next(iter(machines.values()))
    fsdp, degrees = overlay["fsdp_config"], degrees_of(overlay)
    # Ranks that do not divide the model in another way shard its state.
    shards = cluster.num_ranks // math.prod(degrees.values())
    sharding = fsdp["sharding_strategy"]
    if degrees:
        degrees |= {"shard": shards} if shards > 1 else {}
        sharding = " x ".join(f"{name} {degree}" for name, degree in degrees.items())

    emulated = bool(machine.isa) and machine.isa != first_machine.isa
    isa_name = {"DEFAULT": "SSE"}.get(machine.isa, machine.isa)
    instructions = isa_name + (" (emulated)" if emulated else "")

    descriptions = [
        f"{cluster.num_ranks} rank{'s' if cluster.num_ranks > 1 else ''}",
        sharding,
        f"microbatch {overlay['device_train_microbatch_size']}",
        *([f"{overlay['model']['attn_config']['attn_impl']} attention"] if "model" in overlay else []),
        *([f"mixed precision {fsdp['mixed_precision']}"] if "mixed_precision" in fsdp else []),
        *([instructions] if isa_name else []),
    ]
    return {
        "letter": cluster.letter,
        "num_ranks": cluster.num_ranks,
        "sharding": sharding,
        "instructions": instructions or machine.device,
        "words": ", ".join(descriptions),
        "emulated": emulated,
        "device": machine.device,
        "torch": machine.torch,
        "overlay": overlay,
    }
