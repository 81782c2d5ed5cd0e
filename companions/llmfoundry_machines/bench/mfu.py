"""Model FLOPs utilisation on one device: shapes x attention x compiled or not, beside a plain compiled step.

llmfoundry-lite bench mfu --shapes 125m,350m,1b,3b,7b --minutes 8 --out results

MFU stands beside the rate of matrix products of the model's own shapes, measured in the same run, and beside the
datasheet's peak where `hardware.py` has the device. One device exchanges nothing: do not mix these figures with a
cluster's. The most telling variants come first; those without time are named. Rows of the Trainer have their
configuration, for `plan --calibrate`.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.devices import accelerator
from llmfoundry_lite.hardware import GIB, PRODUCTS
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench.block import available
from llmfoundry_machines.bench.frame import (
    Column,
    check_names,
    describe_conditions,
    note_left_out,
    open_console,
    tabulate,
    tell,
    within_minutes,
)
from llmfoundry_machines.bench.steps import SHAPES, count_step_flops, measure
from llmfoundry_machines.bench.turns import Turns

PLAIN = "a plain SDPA model, compiled"
COLUMNS: list[Column] = [
    ("model", "{shape}"),
    ("step", "{step}"),
    ("microbatch", "{microbatch_size}"),
    ("seconds", "{seconds:.3f}"),
    ("tokens/s", "{tokens_per_sec:,.0f}"),
    ("TFLOP/s", "{tflops:.2f}"),
    ("of its products", "{of_products:.1%}"),
    ("of the datasheet", "{of_peak:.1%}"),
    ("peak memory, GiB", "{peak_gib:.1f}"),
    ("ready in, s", "{ready_seconds:.1f}"),
    ("steps took, s", "{steps_seconds:.1f}"),
]


def run(
    shapes: Sequence[str],
    seq_len: int,
    batch_size: int,
    num_steps: int,
    minutes: float,
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure until all is done or `minutes` have passed, print a table, write mfu.json and mfu.md to `out`."""
    check_names("--shapes", shapes, SHAPES)
    known = accelerator()
    report: dict[str, Any] = describe_conditions() | {
        "seq_len": seq_len,
        "batch_size": batch_size,
        "num_steps": num_steps,
        "overrides": list(overrides),
        "peak_flops": known.peak_flops("bf16") if known else None,
        "rows": [],
        "left_out": [],
    }
    where = {"num_devices": 1, "hardware": known and known.name}
    cases = [(shape, name, settings) for name, settings in variants().items() for shape in shapes]
    tasks = [task_of(shape, settings, report) for shape, _, settings in cases]
    names = [(f"{shape}, {name}", number) for number, (shape, name, _) in enumerate(cases)]
    with Turns(measure, tasks) as turns:
        for number, left in within_minutes(minutes, names, open_console(), report["left_out"]):
            shape, name, _ = cases[number]
            row = {"shape": shape, "step": name, "batch_size": tasks[number]["batch_size"], **where}
            report["rows"].append(row | take_turn(turns, number, tasks[number], left))
    tell(
        report,
        build_table(report),
        note_left_out(report["left_out"]),
        name="mfu",
        heading="Model FLOPs utilisation of one device, without communication",
        command=" ".join(["llmfoundry-lite bench mfu", *overrides]),
        asked=("seq_len", "batch_size", "overrides"),
        out=out,
    )
    return report


def variants() -> dict[str, dict[str, Any]]:
    """Return name -> settings of one process, the most telling first. FlexAttention is measured with ALiBi."""
    first, *others = [name for name in available() if name != "reference"]
    order = [(first, True), (first, False), *((name, True) for name in others), (PLAIN, True)]
    found: dict[str, dict[str, Any]] = {PRODUCTS: {"side": "matmul bf16"}}
    for attention, compiled in [*order, *((name, False) for name in others)]:
        if attention == PLAIN:
            found[PLAIN] = {"side": "plain bf16", "compiled": True}
            continue
        changes = [f"model.attn_config.attn_impl={attention}", "device_train_microbatch_size=auto"]
        changes += ["compile_config={}"] if compiled else []
        changes += ["model.attn_config.alibi=true"] if attention == "flex" else []
        name = "flex with ALiBi" if attention == "flex" else attention
        found[f"{name}, {'compiled' if compiled else 'not compiled'}"] = {"side": "trainer bf16", "overrides": changes}
    return found


def task_of(shape: str, settings: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return settings of `steps.measure`. The plain model, which has no microbatches, and the products take at most 4
    samples."""
    task = {"shape": shape, "seq_len": report["seq_len"], "num_steps": report["num_steps"], **settings}
    if not settings["side"].startswith("trainer"):
        return {**task, "batch_size": min(4, report["batch_size"])}
    return {**task, "batch_size": report["batch_size"], "overrides": [*settings["overrides"], *report["overrides"]]}


def take_turn(turns: Turns, number: int, task: dict[str, Any], left_seconds: float) -> dict[str, Any]:
    """Return what one turn adds to its row: measurements, or an error."""
    try:
        found = turns.measure(number, left_seconds)
    except RuntimeError as error:
        return {"error": str(error)}
    seconds, num_tokens = statistics.median(found.pop("step_seconds")), task["batch_size"] * task["seq_len"]
    is_products = "flops" in found
    flops = found.pop("flops", None) or count_step_flops(task["shape"], task["seq_len"], task["batch_size"])
    return {
        "microbatch_size": task["batch_size"],
        "seconds": seconds,
        "tokens_per_sec": None if is_products else num_tokens / seconds,
        "flops_per_sec": flops / seconds,
        **found,
    }


def build_table(report: dict[str, Any]) -> Table:
    """Build the table: grouped by model, the products first."""
    products = {row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == PRODUCTS}
    shapes, rows = list(dict.fromkeys(row["shape"] for row in report["rows"])), []
    for row in sorted(report["rows"], key=lambda row: shapes.index(row["shape"])):
        if "error" in row:
            rows.append({"shape": row["shape"], "step": f"{row['step']}: {row['error']}"})
            continue
        rate, own, peak = row["flops_per_sec"], products.get(row["shape"]), report["peak_flops"]
        shown = {"tflops": rate / 1e12, "of_peak": peak and rate / peak}
        if row["step"] == PRODUCTS:
            shown["microbatch_size"] = None
        else:
            shown |= {"of_products": own and rate / own, "peak_gib": row["peak_bytes"] / GIB}
        rows.append(row | shown)
    title = f"{report['device']}, bf16, {report['batch_size']} x {report['seq_len']} tokens, the median of "
    return tabulate(f"{title}{report['num_steps']} steps", COLUMNS, rows, num_keys=2)
