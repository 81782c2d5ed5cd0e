"""One run on several "clusters", and the same run switching between them: is it the same run?

    python -m benchmarks switch --out bench-switch     some 8 minutes on two quiet cores
    python -m benchmarks switch --precision amp_bf16 --rounding-seeds 1
    python -m benchmarks switch --layouts              the "clusters" divide the run differently, and nothing else
    python -m benchmarks switch --exact-sums           so too, and every run must have each bit of the others

A small MPT is trained on each cluster (see `workshop`) without interruption, through the real launcher; then once
switching every few batches, moved by a relay from one file. The switching run is compared with the band that the
uninterrupted ones span (see `band`). The same check is put to runs that were carried on wrongly (see `tamper`): it must
notice all of them, or it proves nothing. Last, how long a launch takes to its first batch.

In bf16 rounding takes runs several hundred times as far apart as in fp32. One run of each cluster is a small sample
of it. `--rounding-seeds N` adds N runs of each: after batch 1 every weight is moved by one fp32 number, or not, as the
seed draws. Data, weights and mathematics are otherwise the same. bf16 has its own control: weights rounded to bf16. Its
loss may miss that one, if the digest of the checkpoint's tensors does not. The last cluster's run is repeated in fp32
and under both torch releases, to tell the effect of the precision from that of the release. No instruction set is
emulated in bf16, because its products then take some ten times as long.

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
FIRST_BATCH = "first-batch"
SWITCHING = "switching"
UNTOUCHED = "untouched"
ROUNDED = "rounded"
"""The control of bf16 alone, whose loss may miss it."""

CONTROLS: dict[str, tuple[str, tamper.Change]] = {
    UNTOUCHED: ("published again as it was", lambda content: None),
    "moments": ("moments zeroed", tamper.zero_moments),
    "schedule": ("schedule one batch ahead", lambda content: None),
    "skipped": ("one batch skipped", tamper.move_data(1)),
    "repeated": ("one batch repeated", tamper.move_data(-1)),
    "steps": ("step counter reset", tamper.reset_steps),
    ROUNDED: ("weights rounded to bf16", tamper.round_weights),
}
"""Changes of the checkpoint at one switch. The first is sound, and must pass; the others must not."""


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
    """Train, check, print; with `out`, write switch.json, .md and .png there. Returns what the JSON holds.

    The runs themselves happen in `keep`, or in a folder that is removed; `jobs` of them at a time, which changes no
    digit. `only` names clusters (A,B,D). The last launches are timed, one at a time; `untimed` leaves them out. Raises
    UserError.
    """
    # Long because it is the story of the benchmark, told once from top to bottom.
    num_switches = -(-num_batches // every) - 1
    if num_switches < 2:
        raise UserError(f"--num-batches {num_batches}, --every {every}: need two switches; use a smaller --every")
    console, conditions = open_console(), describe_conditions()
    is_low = precision != "fp32" and rounding_seeds > 0
    if clusters is None:
        alike = exact_clusters() if exact_sums else layout_clusters() if layouts else None
        clusters = alike or default_clusters(precision, other_python)
    check_names("--only", only, [cluster.letter for cluster in clusters])
    clusters = [cluster for cluster in clusters if cluster.letter in (only or cluster.letter)]
    if len(clusters) < 2:
        raise UserError("--only: one cluster given, expected at least two; a run cannot switch otherwise")
    prepare_data(data)
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as folder:
        shop = Workshop(
            folder=Path(folder).resolve(),
            config=configuration(
                data.resolve(), num_batches, every, precision, seed, is_fused=not layouts, is_exact=exact_sums
            ),
            clusters=clusters,
        )
        shop.prepare()
        with ThreadPoolExecutor(jobs) as pool:
            machines = dict(zip((cluster.letter for cluster in clusters), pool.map(probe, clusters), strict=True))
        described = [describe_cluster(cluster, machines) for cluster in clusters]
        show(console, table_of_clusters(described))
        at = (num_switches + 1) // 2 * every
        # Four ranks on two cores take twice as long as one, and an emulated instruction set longer.
        is_native = layouts or exact_sums or is_low
        native = min(clusters, key=lambda cluster: cluster.num_ranks) if is_native else clusters[0]
        nudged = {f"{alone(c)}.{seed}": (c, seed) for seed in range(1, rounding_seeds + 1) for c in clusters}
        changed = change_precision(clusters[-1]) if is_low else {}
        controls = [name for name in CONTROLS if is_low or name != ROUNDED]
        if nudged:
            shop.launch(FIRST_BATCH, native, "stop_after=1ba")

        relay_ended = threading.Event()

        def train(name: str) -> list[Launch]:
            if name in CONTROLS:
                lost = partial(UserError, f"{SWITCHING}: ended before it saved batch {at}")
                wait_for(checkpoint(shop, at).is_dir, math.inf, lost, relay_ended.is_set)
                console.print(f"training: {name}", highlight=False)
                return [launch_control(shop, name, native, at, num_batches)]
            console.print(f"training: {name}", highlight=False)
            if name in nudged:
                cluster, nudging = nudged[name]
                first = shop.run_folder(FIRST_BATCH) / "checkpoints" / "ba1"
                tamper.republish(first, shop.run_folder(name) / "checkpoints", tamper.nudge(nudging))
                return [shop.launch(name, cluster)]
            if name in changed:
                cluster, *arguments = changed[name]
                return [shop.launch(name, cluster, *arguments)]
            if name != SWITCHING:
                return [shop.launch(name, next(c for c in clusters if alone(c) == name))]
            try:
                return shop.relay(name, every)
            finally:
                relay_ended.set()

        with ThreadPoolExecutor(jobs) as pool:
            names = [SWITCHING, *map(alone, clusters), *nudged, *changed, *controls]
            launches = dict(zip(names, pool.map(train, names), strict=True))
        late = () if is_low or untimed else (every, *LATE_BATCHES)
        resumes = [launch_late(shop, native, at, after, data) for after in late]
        report = conditions | {
            "layouts": layouts,
            "exact_sums": exact_sums,
            "precision": precision,
            "num_batches": num_batches,
            "every": every,
            "seed": seed,
            "rounding_seeds": rounding_seeds,
            "only": list(only),
            "tampered_at": at,
            "clusters": described,
            "uninterrupted": {c.letter: dataclasses.asdict(read(shop, alone(c))) for c in clusters}
            | {
                f"{c.letter}+{nudging}": dataclasses.asdict(read(shop, name, before=(FIRST_BATCH, 1)))
                for name, (c, nudging) in nudged.items()
            },
            "changed": {name: dataclasses.asdict(read(shop, name)) for name in changed},
            SWITCHING: dataclasses.asdict(read(shop, SWITCHING)),
            "controls": {name: dataclasses.asdict(read(shop, name, before=(SWITCHING, at))) for name in controls},
            "other_tensors": [
                name for name in controls if tensors_of(shop, name, at) != tensors_of(shop, SWITCHING, at)
            ],
            "launches": {name: [dataclasses.asdict(one) for one in launched] for name, launched in launches.items()},
            "resumes": [{"after_batch": one.first_batch - 1, **dataclasses.asdict(one)} for one in resumes],
        }
    evaluate(report)
    write(report, out)
    console.print("passed" if report["passed"] else "FAILED: see the verdicts", style="bold")
    return report


# ------------------------------------------------------------------------------------------------------- what is run


def default_clusters(precision: str, other_python: str | None) -> list[Cluster]:
    """Four ways to compute one run on this machine; a GPU, where there is one, is the second."""
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
    """Return launches of the last cluster with another release, precision or mixed precision: name -> how."""
    ours = dataclasses.replace(last, python=sys.executable)
    return {
        "ours": (ours,),
        "ours-fp32": (ours, "precision=fp32"),
        "fp32": (last, "precision=fp32"),
        "ours-full": (ours, "fsdp_config.mixed_precision=FULL"),
    }


def cluster_of(
    letter: str, num_ranks: int, microbatch: int, attention: str, fsdp: dict[str, Any], environment: dict[str, str]
) -> Cluster:
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
"""Overlay of clusters that divide one run, and compute alike."""


def layout_clusters() -> list[Cluster]:
    """Five ways to divide one run."""
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
        groups = num_ranks // math.prod(degrees_of(changes).values())
        overlay = ALIKE | changes | {"device_eval_batch_size": GLOBAL_BATCH // groups}
        clusters.append(Cluster(letter=letter, num_ranks=num_ranks, overlay=overlay))
    return clusters


def exact_clusters() -> list[Cluster]:
    """Four ways to divide one run that compute its microbatches alike."""
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
    """Return the degrees of layouts that have a block of their own, such as {"pipeline": 2}."""
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
    """Return the quickstart's run, smaller. With `is_fused`, queries, keys and values are one matrix. With `is_exact`,
    it has exact sums, and evaluates samples, not batches, which have other sizes on other ranks."""

    def dataset(split: str, **more: Any) -> dict[str, Any]:
        return {"name": "text", "dataset": {"local": str(data), "split": split, **more}}

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
    """Prepare the standard library's source, as in the quickstart, unless it is there."""
    if (data / "summary.json").is_file():
        return
    from llmfoundry_lite.prepare.prepare import prepare
    from llmfoundry_lite.prepare.request import PrepareRequest

    request = PrepareRequest(sources=("python-stdlib",), tokenizer=f"train:{VOCAB_SIZE}", max_seq_len=256)
    prepare(request, data, show_progress=True)


def launch_control(shop: Workshop, name: str, cluster: Cluster, at: int, num_batches: int) -> Launch:
    """Carry on from the switching run's checkpoint, changed, to the end."""
    _, change = CONTROLS[name]
    # The schedule is a function of the batch and is not saved, so it is the run that is tampered with here.
    shifted = [f"scheduler.t_warmup={WARMUP - 1}ba", f"scheduler.t_max={num_batches - 1}ba"]
    tamper.republish(checkpoint(shop, at), shop.run_folder(name) / "checkpoints", change)
    return shop.launch(name, cluster, *(shifted if name == "schedule" else []))


def launch_late(shop: Workshop, cluster: Cluster, at: int, batch: int, data: Path) -> Launch:
    """Train one batch after batch `batch`, from a checkpoint that is set to it."""
    index = json.loads((data / "train" / "index.json").read_text())
    batches_in_epoch = sum(shard["samples"] for shard in index["shards"]) // GLOBAL_BATCH
    name = f"after-{batch}"
    tamper.republish(
        checkpoint(shop, at), shop.run_folder(name) / "checkpoints", tamper.move_run(batch, batches_in_epoch, SEQ_LEN)
    )
    return shop.launch(name, cluster, f"max_duration={2 * LATE_BATCHES[-1]}ba", "stop_after=1ba", "eval_interval=0")


def alone(cluster: Cluster) -> str:
    return f"alone-{cluster.letter}"


def checkpoint(shop: Workshop, batch: int) -> Path:
    return shop.run_folder(SWITCHING) / "checkpoints" / f"ba{batch}"


def tensors_of(shop: Workshop, name: str, batch: int) -> str | None:
    """Return the digest of all tensors of a checkpoint."""
    return open_checkpoint(shop.run_folder(name) / "checkpoints" / f"ba{batch}").manifest.state_digest


def read(shop: Workshop, name: str, before: tuple[str, int] | None = None) -> Series:
    """Read a run's series; with `before`, another run's batches up to that one go before its own."""
    records = shop.records(name)
    if before is not None:
        other, until = before
        records = {batch: record for batch, record in shop.records(other).items() if batch <= until} | records
    return read_series([records[batch] for batch in sorted(records)])


# ------------------------------------------------------------------------------------------------------- what it says


def evaluate(report: dict[str, Any]) -> None:
    """Add to what was run what it shows: bands, verdicts, `passed`."""
    alone, runs = report["uninterrupted"].values(), {SWITCHING: report[SWITCHING], **report["controls"]}
    other_tensors = report.get("other_tensors", ())
    shown_by = {ROUNDED: "the digest of the checkpoint's tensors"} if ROUNDED in other_tensors else {}
    band.evaluate(report, runs, alone, sound=(SWITCHING, UNTOUCHED), shown_by=shown_by)
    report["passed"] &= UNTOUCHED not in other_tensors
    if report["exact_sums"]:
        same = [*alone, report[SWITCHING], report["controls"][UNTOUCHED]]
        report["passed"] &= all(run == same[0] for run in same)  # losses and evaluations, to the last bit
    report["leave_one_out"] = leave_one_out([band.as_series(series) for series in alone])


def table_of(report: dict[str, Any]) -> Table:
    """Tabulate every run beside the uninterrupted ones."""
    names = {name: words for name, (words, _) in CONTROLS.items()} | {SWITCHING: SWITCHING}
    title = f"switching every {report['every']} batches, {report['precision']}"
    columns = list(VERDICT_COLUMNS.items())
    columns.insert(-1, ("validation / band", lambda row: times(row["validation_ratio"])))
    return tabulate(title, columns, rows_of_verdicts(report, names))


def table_of_changes(report: dict[str, Any]) -> Table:
    """Tabulate how far another release takes a run, and another precision, beside the band."""
    last = report["clusters"][-1]
    runs = report["changed"] | {"theirs": report["uninterrupted"][last["letter"]]}
    ours, theirs = (release.partition("+")[0] for release in (report["torch"], last["torch"]))
    pairs = [
        ("release", f"fp32 of torch {ours} and {theirs}", "ours-fp32", "fp32"),
        ("release", f"bf16 of torch {ours} and {theirs}", "ours", "theirs"),
        ("precision", f"fp32 and bf16 of torch {ours}", "ours-fp32", "ours"),
        ("precision", f"fp32 and bf16 of torch {theirs}", "fp32", "theirs"),
        ("mixed precision", f"DEFAULT and FULL in bf16 of torch {ours}", "ours", "ours-full"),
    ]
    rows = []
    for changed, between, a, b in pairs:
        distance_t = band.measure_deviation(runs[a]["losses"], [runs[b]["losses"]])
        largest = (distance_t / report["band"]).max()
        rows.append([changed, between, f"{distance_t[-1]:.1e}", times(largest)])
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
    """Return rows for VERDICT_COLUMNS, with the runs' `names` in words."""
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
    rows = [[c["letter"], c["words"], c["device"], c["torch"]] for c in clusters]
    return measured_table("the clusters", ["cluster", "", "device", "torch"], rows)


def times(ratio: float) -> str:
    return f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"


def notes_of(report: dict[str, Any]) -> list[str]:
    batches = report["num_batches"]
    digests = {digest for series in report["uninterrupted"].values() for digest in series["digests"]}
    runs = list(report["uninterrupted"].values())
    found = (
        f"band: {report['band'][-1]:.1e} nats per token after {batches} batches, the largest distance between two of "
        f"{len(runs)} uninterrupted runs (running root mean square)"
    )
    if report["exact_sums"]:
        num_unlike = sum(run != runs[0] for run in runs)
        found = f"band: its width is 0. {num_unlike} of {len(runs)} uninterrupted runs differ from the first in a bit"
        found += f" of a loss; the switching run {'does' if report[SWITCHING] != runs[0] else 'does not'}. Ratios are "
        found += f"to the distance of two neighbouring fp32 numbers, {report['band'][-1]:.1e} nats"
    notes = [
        found,
        f"moved by one relay, in {len(report['launches'][SWITCHING])} allocations: "
        f"`llmfoundry-lite relay {SWITCHING}.yaml`",
        f"data: {len(digests)} different digests for {batches} batches, over all runs that should have the same data",
    ]
    if report["leave_one_out"]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in report["leave_one_out"])
        num_outside = sum(ratio > 1 for ratio in report["leave_one_out"])
        notes.append(
            f"distance of each uninterrupted run from the others, divided by their band: {ratios}. Above 1, a run "
            f"without any mistake leaves the band of the others: {num_outside} of {len(runs)} do"
        )
    share = report["verdicts"][SWITCHING]["share_outside"]
    notes.append(f"share of batches at which the switching run is farther off than any two others so far: {share:.0%}")
    alike, unlike = band.measure_pairs(report["uninterrupted"])
    if alike:
        notes.append(
            "uninterrupted: a run on each cluster, and runs in which each weight was changed by at most one fp32 "
            f"number after batch 1. Median distance after {batches} batches: {median(alike):.1e} between two runs of "
            f"one cluster, {median(unlike):.1e} between runs of different clusters. The runs with changed weights "
            "share their first batch"
        )
    resumes = [
        f"after batch {r['after_batch']:,} {r['seconds_to_first_batch']:.1f} s, "
        f"of which {r['seconds_to_first_batch'] - (r['seconds_to_restore'] or 0):.1f} s after the restore"
        for r in report["resumes"]
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
    """Show what was found; with `out`, write switch.json (everything), switch.md (the tables), switch.png."""
    options = "" if report["precision"] == "fp32" else f" --precision {report['precision']}"
    seeds = report["rounding_seeds"]
    options += f" --rounding-seeds {seeds}" if seeds else ""
    batches, every = report["num_batches"], report["every"]
    options += f" --num-batches {batches} --every {every}" if (batches, every) != (100, 20) else ""
    options += f" --only {','.join(report['only'])}" if report["only"] else ""
    options += " --other-python …" if len({c["torch"] for c in report["clusters"]}) > 1 else ""
    how = (
        f"{report['num_batches']} batches of {GLOBAL_BATCH} x {SEQ_LEN} tokens, {report['precision']}, switching every "
        f"{report['every']} batches; the controls get a deliberate mistake at batch {report['tampered_at']}."
    )
    name, kind = ("switch-layouts", "layouts") if report["layouts"] else ("switch", "clusters")
    if report["changed"]:
        low = report["precision"].removeprefix("amp_")
        name, kind = f"{name}-{low}", f"{kind}, in {low}"
    options += " --layouts" if report["layouts"] else ""
    if report["exact_sums"]:
        name, kind, options = "switch-exact", "layouts, with exact sums", f"{options} --exact-sums"
    tell(
        report,
        *(how, table_of(report), notes_of(report), *([table_of_changes(report)] if report["changed"] else [])),
        table_of_clusters(report["clusters"]),
        name=name,
        heading=f"One run, switching between {kind}",
        command=f"python -m benchmarks switch{options}",
        asked=("precision", "num_batches", "every", "seed"),
        plot=partial(plot_switch, {control: words for control, (words, _) in CONTROLS.items()}),
        out=out,
    )


def describe_cluster(cluster: Cluster, machines: dict[str, Machine]) -> dict[str, Any]:
    """Describe a cluster for report and figure. Emulated: torch may not use all the instructions of the first one."""
    overlay, machine, first = cluster.overlay, machines[cluster.letter], next(iter(machines.values()))
    fsdp, degrees = overlay["fsdp_config"], degrees_of(overlay)
    shards = cluster.num_ranks // math.prod(degrees.values())
    sharding = fsdp["sharding_strategy"]
    if degrees:
        degrees |= {"shard": shards} if shards > 1 else {}
        sharding = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    emulated = bool(machine.isa) and machine.isa != first.isa
    isa = {"DEFAULT": "SSE"}.get(machine.isa, machine.isa)
    instructions = isa + (" (emulated)" if emulated else "")
    words = [
        f"{cluster.num_ranks} rank{'s' if cluster.num_ranks > 1 else ''}",
        sharding,
        f"microbatch {overlay['device_train_microbatch_size']}",
        *([f"{overlay['model']['attn_config']['attn_impl']} attention"] if "model" in overlay else []),
        *([f"mixed precision {fsdp['mixed_precision']}"] if "mixed_precision" in fsdp else []),
        *([instructions] if isa else []),
    ]
    return {
        "letter": cluster.letter,
        "num_ranks": cluster.num_ranks,
        "sharding": sharding,
        "instructions": instructions or machine.device,
        "words": ", ".join(words),
        "emulated": emulated,
        "device": machine.device,
        "torch": machine.torch,
        "overlay": overlay,
    }
