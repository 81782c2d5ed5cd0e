"""Model FLOPs utilisation (MFU) on one device: shapes x attention x compiled or not, beside a plain compiled step.

llmfoundry-lite bench mfu --shapes 125m,350m,1b,3b,7b --minutes 8 --out results

A row's FLOP/s are shown as a share of two rates: that of matrix products of the model's own shapes, measured in the
same run, and the datasheet's peak, if `hardware.py` has the device. One device exchanges nothing with others, so do not
mix these figures with a cluster's.

`run` measures each of `variants()` for each shape, the most telling first, until the time is up. What it had no time
for is named. `turns.py` runs the measurements in processes, and `steps.py` is what they run. Rows of the Trainer have
their configuration, for `plan --calibrate`.
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
MOST_SAMPLES_AT_ONCE = 4
"""Samples that a batch without microbatches may have, so that it fits into the memory of one device."""
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
    """Measure all variants of all shapes until `minutes` have passed, print a table, and return the report.

    `batch_size` is in samples of `seq_len` tokens, and `overrides` are changes of the Trainer's configuration. With
    `out`, writes mfu.json and mfu.md there. A variant that fails has its error in its row.
    """
    check_names("--shapes", shapes, SHAPES)
    device = accelerator()
    report: dict[str, Any] = describe_conditions() | {
        "seq_len": seq_len,
        "batch_size": batch_size,
        "num_steps": num_steps,
        "overrides": list(overrides),
        "peak_flops": device.peak_flops("bf16") if device else None,
        "rows": [],
        "left_out": [],
    }

    # `Turns` knows a task by its index, and prepares the next one while it measures.
    tasks = []
    rows = []
    for variant_name, settings in variants().items():
        for shape in shapes:
            task = build_task(shape, settings, report)
            tasks.append(task)
            rows.append(
                {
                    "shape": shape,
                    "step": variant_name,
                    "batch_size": task["batch_size"],
                    "num_devices": 1,
                    "hardware": device.name if device else None,
                }
            )
    cases = [(f"{row['shape']}, {row['step']}", index) for index, row in enumerate(rows)]
    with Turns(measure, tasks) as turns:
        for index, left_seconds in within_minutes(minutes, cases, open_console(), report["left_out"]):
            report["rows"].append(rows[index] | measure_task(turns, index, tasks[index], left_seconds))

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
    """Return the steps to measure, the most telling first: name -> its part of the settings of `steps.measure`.

    The matrix products come first, since other rows are compared with them. Compiled steps and the plain model come
    before the steps that only tell what compiling gains.
    """
    first, *others = [name for name in available() if name != "reference"]
    ordered = [
        (PRODUCTS, {"side": "matmul bf16"}),
        trainer_variant(first, is_compiled=True),
        trainer_variant(first, is_compiled=False),
        *(trainer_variant(attention, is_compiled=True) for attention in others),
        (PLAIN, {"side": "plain bf16", "compiled": True}),
        *(trainer_variant(attention, is_compiled=False) for attention in others),
    ]
    return dict(ordered)


def trainer_variant(attention: str, *, is_compiled: bool) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of the Trainer's step with one implementation of attention.

    FlexAttention is measured with ALiBi, which its name says.
    """
    overrides = [f"model.attn_config.attn_impl={attention}", "device_train_microbatch_size=auto"]
    if is_compiled:
        overrides.append("compile_config={}")
    name = attention
    if attention == "flex":
        overrides.append("model.attn_config.alibi=true")
        name = "flex with ALiBi"
    compiled = "compiled" if is_compiled else "not compiled"
    return f"{name}, {compiled}", {"side": "trainer bf16", "overrides": overrides}


def build_task(shape: str, settings: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of `steps.measure` for one shape and variant. The report has those that all tasks share.

    Only the Trainer divides the batch into microbatches. The plain model and the products compute their batch at once,
    so they take at most MOST_SAMPLES_AT_ONCE. Their FLOP/s are compared, not their seconds.
    """
    task = {"shape": shape, "seq_len": report["seq_len"], "num_steps": report["num_steps"], **settings}
    if settings["side"].startswith("trainer"):
        task["batch_size"] = report["batch_size"]
        task["overrides"] = [*settings["overrides"], *report["overrides"]]
    else:
        task["batch_size"] = min(MOST_SAMPLES_AT_ONCE, report["batch_size"])
    return task


def measure_task(turns: Turns, index: int, task: dict[str, Any], left_seconds: float) -> dict[str, Any]:
    """Measure a task in its turn. Return what this adds to its row: measurements, or the `error` that ended it."""
    try:
        measurements = turns.measure(index, left_seconds)
    except RuntimeError as error:
        return {"error": str(error)}

    seconds = statistics.median(measurements.pop("step_seconds"))
    # Products count their own FLOPs, and have no tokens/s because they leave out most of a step.
    flops = measurements.pop("flops", None)
    tokens_per_sec = None
    if flops is None:
        flops = count_step_flops(task["shape"], task["seq_len"], task["batch_size"])
        tokens_per_sec = task["batch_size"] * task["seq_len"] / seconds
    return {
        "microbatch_size": task["batch_size"],  # the Trainer measures its own
        "seconds": seconds,
        "tokens_per_sec": tokens_per_sec,
        "flops_per_sec": flops / seconds,
        **measurements,
    }


def build_table(report: dict[str, Any]) -> Table:
    """Build the table from the report's rows, grouped by shape, each with the rows in the order of measurement."""
    products_rates = {row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == PRODUCTS}
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"]))
    peak_flops = report["peak_flops"]
    rows = []
    for row in sorted(report["rows"], key=lambda row: shapes.index(row["shape"])):
        if "error" in row:
            rows.append({"shape": row["shape"], "step": f"{row['step']}: {row['error']}"})
            continue

        # The cell of a value that is None stays empty.
        rate = row["flops_per_sec"]
        cells = {"tflops": rate / 1e12, "of_peak": rate / peak_flops if peak_flops else None}
        if row["step"] == PRODUCTS:
            cells["microbatch_size"] = None
        else:
            products_rate = products_rates.get(row["shape"])
            cells["of_products"] = rate / products_rate if products_rate else None
            cells["peak_gib"] = row["peak_bytes"] / GIB
        rows.append(row | cells)

    size = f"{report['batch_size']} x {report['seq_len']} tokens"
    title = f"{report['device']}, bf16, {size}, the median of {report['num_steps']} steps"
    return tabulate(title, COLUMNS, rows, num_keys=2)
