"""Seconds of a training step: our Trainer beside a bare loop, its own matrix products, and its peers.

python -m benchmarks train --seq-len 512 --batch-size 4 --peer-python foundry/bin/python --out results

Every measurement is a process of its own, and the processes take turns, so that a machine that is slow for a while
is slow for all of them. The table has the median step, and its rate beside that of matrix products of the model's own
shapes, forward and backward, measured in the same turns.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.train import peer
from llmfoundry_lite.devices import device_type, keep_freed_memory, peak_memory_bytes
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import (
    DTYPES,
    SHAPES,
    count_step_flops,
    measure_in_a_process,
    model_of,
    random_batches,
    run_steps,
)

SIDES = {
    "matmul": "matrix products of the model's shapes",
    "foundry": "LLM Foundry's MPT, bare loop",
    "plain": "a plain SDPA model, bare loop",
    "bare": "our model, bare loop",
    "trainer": "our model, Trainer",
}
"""In the order of the table. LLM Foundry's and the plain model's bf16 is autocast."""


def run(
    shape: str = "125m",
    seq_len: int = 512,
    batch_size: int = 4,
    num_steps: int = 3,
    num_rounds: int = 2,
    *,
    peer_python: str | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure all sides, print a table, write train-SHAPE-LENGTH.json and .md to `out`, and return what the JSON holds.

    `overrides` (key=value) go to the Trainer's side.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console, report = frame.open_console(), frame.describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    tasks = {
        f"{side} {dtype}": {"side": f"{side} {dtype}", "overrides": list(overrides), **settings}
        for dtype in DTYPES
        for side in SIDES
        if side != "foundry" or peer_python
    }
    measures = {side: partial(measure_side, task, peer_python) for side, task in tasks.items()}
    results, failed = frame.take_turns(measures, num_rounds, console)
    flops = count_step_flops(shape, seq_len, batch_size)
    report |= {
        **settings,
        "num_rounds": num_rounds,
        "num_parameters": count_parameters(model_of(shape, seq_len)),
        "model_flops_per_step": flops,
        "sides": {
            side: summarise(rounds, flops, None if side.startswith("matmul") else batch_size * seq_len)
            for side, rounds in results.items()
            if rounds
        },
        "failed": failed,
    }
    frame.tell(
        report,
        table_of(report),
        notes_of(report),
        name=f"train-{shape}-{seq_len}",
        heading="A training step, compared with other tools and with its own matrix products",
        command="python -m benchmarks train",
        asked=("shape", "seq_len", "batch_size"),
        out=out,
    )
    return report


def summarise(rounds: Sequence[dict[str, Any]], flops: int, num_tokens: int | None) -> dict[str, Any]:
    """Summarise one side: the median of all its steps, and for ratios its rate and memory in each round."""
    seconds = statistics.median(value for result in rounds for value in result["step_seconds"])
    flops = rounds[0].get("flops", flops)
    return {
        "step_seconds": seconds,
        "tokens_per_sec": num_tokens and num_tokens / seconds,
        "flops_per_sec": flops / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in rounds),
        "rounds": [
            {"flops_per_sec": flops / statistics.median(one["step_seconds"]), "peak_bytes": one["peak_bytes"]}
            for one in rounds
        ],
    }


def compare(report: dict[str, Any]) -> list[tuple[str, frame.Spread, str]]:
    """Return (what, ratio, aim) for ratios of two sides, which compare between machines."""
    sides, found = report["sides"], []

    def ratio(what: str, key: str, above: str, below: str, aim: str) -> None:
        if above in sides and below in sides:
            rounds = ([one[key] for one in sides[side]["rounds"]] for side in (above, below))
            found.append((what, frame.ratios(*rounds), aim))

    rate, memory = "flops_per_sec", "peak_bytes"
    for dtype, faster, share in (("fp32", "1.3", "0.85"), ("bf16", "2.0", "0.70")):
        ratio(f"Trainer over LLM Foundry, {dtype}", rate, f"trainer {dtype}", f"foundry {dtype}", f"at least {faster}")
        ratio(
            f"Trainer over matrix products, {dtype}", rate, f"trainer {dtype}", f"matmul {dtype}", f"at least {share}"
        )
        ratio(f"Trainer over our bare loop, {dtype}", rate, f"trainer {dtype}", f"bare {dtype}", "at least 0.98")
        ratio(f"Trainer over a plain SDPA model, {dtype}", rate, f"trainer {dtype}", f"plain {dtype}", "")
        ratio(f"memory over LLM Foundry's, {dtype}", memory, f"trainer {dtype}", f"foundry {dtype}", "at most 0.6")
    ratio("Trainer in bf16 over LLM Foundry in fp32", rate, "trainer bf16", "foundry fp32", "at least 3.5")
    ratio("Trainer in bf16 over fp32", rate, "trainer bf16", "trainer fp32", "")
    return found


def table_of(report: dict[str, Any]) -> Table:
    rows = [
        result | {"step": f"{SIDES[name]}, {dtype}"}
        for side, result in report["sides"].items()
        for name, dtype in [side.split()]
    ]
    columns: list[frame.Column] = [
        ("step", "{step}"),
        ("seconds", "{step_seconds:.3f}"),
        ("tokens/s", "{tokens_per_sec:,.0f}"),
        ("GFLOP/s", lambda row: f"{row['flops_per_sec'] / 1e9:,.0f}"),
        ("peak memory, GiB", lambda row: f"{row['peak_bytes'] / GIB:.2f}" if row["tokens_per_sec"] else ""),
    ]
    title = (
        f"{report['num_parameters']:,} parameters, {report['batch_size']} x {report['seq_len']} tokens, "
        f"{report['device']}, {report['num_threads']} threads, the median of {report['num_rounds']} x "
        f"{report['num_steps']} steps"
    )
    return frame.tabulate(title, columns, rows)


def notes_of(report: dict[str, Any]) -> list[str]:
    lines = [f"{what}: {value}{f' ({aim})' if aim else ''}" for what, value, aim in compare(report)]
    return [*lines, *(f"not measured: {reason}" for reason in report["failed"].values())]


# ---------------------------------------------------------------------------------------------- one side, one process


def measure_side(settings: dict[str, Any], peer_python: str | None) -> dict[str, Any]:
    """Measure one side in a process: LLM Foundry's interpreter, this file for `bare`, `bench.steps` for the rest."""
    side, dtype = settings["side"].split()
    if side == "foundry":
        task = {**settings, "dtype": dtype, "model": SHAPES[settings["shape"]]}
        return measure_in_a_process(task, (str(peer_python), peer.__file__))
    if side == "bare":
        return measure_in_a_process(settings, (sys.executable, "-m", "benchmarks.train.train"))
    return measure_in_a_process(settings)


def measure_bare(settings: dict[str, Any]) -> dict[str, Any]:
    """Time our model and our loss without Composer. The first two steps are left out."""
    import torch.distributed as dist

    from llmfoundry_lite.config.layout import Layout
    from llmfoundry_lite.config.sharding_schema import FSDPConfig
    from llmfoundry_lite.parallel.fsdp import build_parallel_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS
    from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

    keep_freed_memory()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    fsdp = FSDPConfig(sharding_strategy="NO_SHARD")
    precision = PRECISIONS["fp32" if settings["side"].endswith("fp32") else "amp_bf16", fsdp.mixed_precision]
    config = model_of(settings["shape"], settings["seq_len"])
    model = build_parallel_model(config, fsdp, precision, build_mesh(Layout(), device_type()), seed=17)

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        labels_bt = next_token_labels(tokens_bt)
        return model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt)) / labels_bt.numel()

    steps = run_steps(model, compute_loss, random_batches(settings))
    return {"step_seconds": steps[2:], "peak_bytes": peak_memory_bytes()}


if __name__ == "__main__":
    print(json.dumps(measure_bare(json.loads(sys.argv[1]))))
