"""Compare the seconds of a training step: our Trainer, a bare loop of our model, its matrix products alone, and peers.

    python -m benchmarks train --seq-len 512 --batch-size 4 --peer-python foundry/bin/python --out results

Every measurement is a process of its own. The processes take turns, so that a machine that is slow for a while is slow
for all sides. The table has the median step of each side, and its FLOP/s beside those of matrix products of the model's
own shapes, forward and backward, measured in the same turns.

A side is named "SIDE DTYPE", such as "trainer bf16". `measure_side` says which program measures it.
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
"""Side -> its name in the table, in the table's order. In bf16, LLM Foundry's and the plain model use autocast."""


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
    """Measure all sides in turns, print a table, write train-SHAPE-LENGTH.json and .md to `out`, and return the report.

    `shape` names a model in SHAPES. `peer_python` is an interpreter that has LLM Foundry; without it, that side is left
    out. `overrides` are key=value settings for the Trainer's side. Each side takes `num_steps` timed steps in each of
    the rounds.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console, report = frame.open_console(), frame.describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}

    # Every side in every dtype, in a process of its own.
    tasks = {
        f"{side} {dtype}": {"side": f"{side} {dtype}", "overrides": list(overrides), **settings}
        for dtype in DTYPES
        for side in SIDES
        if side != "foundry" or peer_python
    }
    measures = {side: partial(measure_side, task, peer_python) for side, task in tasks.items()}
    results, failed = frame.take_turns(measures, num_rounds, console)

    model_flops = count_step_flops(shape, seq_len, batch_size)
    report |= {
        **settings,
        "num_rounds": num_rounds,
        "num_parameters": count_parameters(model_of(shape, seq_len)),
        "model_flops_per_step": model_flops,
        "sides": {
            side: summarise(rounds, model_flops, None if side.startswith("matmul") else batch_size * seq_len)
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
    """Summarise the rounds of one side: the median of all its steps, and the rate and memory of each round.

    `flops` are those of the model's step. A side that counts its own FLOPs, as the matrix products do, reports them
    instead. `num_tokens` are the tokens of a step, or None for a side without tokens. The rounds are kept because
    ratios of two sides are calculated within a round.
    """
    seconds = statistics.median(value for result in rounds for value in result["step_seconds"])
    flops = rounds[0].get("flops", flops)
    return {
        "step_seconds": seconds,
        "tokens_per_sec": num_tokens and num_tokens / seconds,
        "flops_per_sec": flops / seconds,
        "peak_bytes": max(result["peak_bytes"] for result in rounds),
        "rounds": [
            {"flops_per_sec": flops / statistics.median(result["step_seconds"]), "peak_bytes": result["peak_bytes"]}
            for result in rounds
        ],
    }


def compare(report: dict[str, Any]) -> list[tuple[str, frame.Spread, str]]:
    """Return the ratios of two sides as (what is compared, ratio with its spread, target in words or "").

    Ratios are comparable between machines, unlike seconds. A ratio is left out if one of its sides was not measured.
    """
    sides, comparisons = report["sides"], []

    def ratio(what: str, key: str, numerator: str, denominator: str, target: str) -> None:
        """Append the ratio of `key` for two sides, calculated within each round."""
        if numerator in sides and denominator in sides:
            rounds = (
                [round_result[key] for round_result in sides[side]["rounds"]] for side in (numerator, denominator)
            )
            comparisons.append((what, frame.ratios(*rounds), target))

    # The targets of the two dtypes differ only in the first two ratios.
    rate, memory = "flops_per_sec", "peak_bytes"
    for dtype, min_speedup, min_share_of_products in (("fp32", "1.3", "0.85"), ("bf16", "2.0", "0.70")):
        ratio(
            f"Trainer over LLM Foundry, {dtype}",
            rate,
            f"trainer {dtype}",
            f"foundry {dtype}",
            f"at least {min_speedup}",
        )
        ratio(
            f"Trainer over matrix products, {dtype}",
            rate,
            f"trainer {dtype}",
            f"matmul {dtype}",
            f"at least {min_share_of_products}",
        )
        ratio(f"Trainer over our bare loop, {dtype}", rate, f"trainer {dtype}", f"bare {dtype}", "at least 0.98")
        ratio(f"Trainer over a plain SDPA model, {dtype}", rate, f"trainer {dtype}", f"plain {dtype}", "")
        ratio(f"memory over LLM Foundry's, {dtype}", memory, f"trainer {dtype}", f"foundry {dtype}", "at most 0.6")
    ratio("Trainer in bf16 over LLM Foundry in fp32", rate, "trainer bf16", "foundry fp32", "at least 3.5")
    ratio("Trainer in bf16 over fp32", rate, "trainer bf16", "trainer fp32", "")
    return comparisons


def table_of(report: dict[str, Any]) -> Table:
    """Return a table with one row for each side and dtype. Matrix products have no tokens and no memory of interest."""
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
    """Return the ratios as lines, and the reasons for which sides could not be measured."""
    lines = [f"{what}: {value}{f' ({aim})' if aim else ''}" for what, value, aim in compare(report)]
    return [*lines, *(f"not measured: {reason}" for reason in report["failed"].values())]


# ---------------------------------------------------------------------------------------------- one side, one process


def measure_side(settings: dict[str, Any], peer_python: str | None) -> dict[str, Any]:
    """Measure one side in a process of its own, and return its `step_seconds` and `peak_bytes`.

    LLM Foundry runs in `peer_python` with `peer.py`, our bare loop in this file, and all other sides in `bench.steps`.
    """
    side, dtype = settings["side"].split()
    if side == "foundry":
        task = {**settings, "dtype": dtype, "model": SHAPES[settings["shape"]]}
        return measure_in_a_process(task, (str(peer_python), peer.__file__))
    if side == "bare":
        return measure_in_a_process(settings, (sys.executable, "-m", "benchmarks.train.train"))
    return measure_in_a_process(settings)


def measure_bare(settings: dict[str, Any]) -> dict[str, Any]:
    """Time steps of our model and our loss without Composer. The first two steps warm up and are left out.

    The loop is the one that all bare sides share. `settings` are those of `run` and the side's name.
    """
    import torch.distributed as dist

    from llmfoundry_lite.config.layout import Layout
    from llmfoundry_lite.config.sharding_schema import FSDPConfig
    from llmfoundry_lite.parallel.fsdp import build_parallel_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS
    from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

    keep_freed_memory()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)

    # The model is built as a run on one device would build it.
    fsdp = FSDPConfig(sharding_strategy="NO_SHARD")
    precision = PRECISIONS["fp32" if settings["side"].endswith("fp32") else "amp_bf16", fsdp.mixed_precision]
    config = model_of(settings["shape"], settings["seq_len"])
    model = build_parallel_model(config, fsdp, precision, build_mesh(Layout(), device_type()), seed=17)

    def compute_loss(tokens_bt: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each next token."""
        labels_bt = next_token_labels(tokens_bt)
        return model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt)) / labels_bt.numel()

    steps = run_steps(model, compute_loss, random_batches(settings))
    return {"step_seconds": steps[2:], "peak_bytes": peak_memory_bytes()}


if __name__ == "__main__":
    print(json.dumps(measure_bare(json.loads(sys.argv[1]))))
