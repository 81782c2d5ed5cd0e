"""Model FLOPs utilisation on one device: shapes x attention x compiled or not, beside a plain compiled step.

llmfoundry-lite bench mfu --shapes 125m,350m,1b,3b,7b --minutes 8 --out results

MFU stands beside the rate of matrix products of the model's own shapes, measured in the same run, and beside the
datasheet's peak where `hardware.py` has the device. One device exchanges nothing: do not mix these figures with a
cluster's. The most telling variants come first; those without time are named.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.devices import accelerator
from llmfoundry_lite.hardware import GIB, PRODUCTS
from llmfoundry_lite.report.tables import Table
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
from llmfoundry_machines.bench.steps import SHAPES, count_step_flops, measure_in_a_process

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
    """Measure until all is done or `minutes` have passed, print a table, write mfu.json and mfu.md to `out`.

    A process may take half of the time that is left, so that one that hangs does not cost all others; then it is ended.
    """
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
    cases = [(f"{shape}, {name}", (shape, name, settings)) for name, settings in variants().items() for shape in shapes]
    for case, left in within_minutes(minutes, cases, open_console(), report["left_out"]):
        report["rows"].append(_measure(report, *case, left / 2))
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
    """Return name -> settings of one process, the most telling first."""
    attentions = [name for name in available() if name != "reference"]
    found: dict[str, dict[str, Any]] = {PRODUCTS: {"side": "matmul bf16"}}
    for attention in attentions:
        for compiled in (True, False):
            changes = [f"model.attn_config.attn_impl={attention}", "device_train_microbatch_size=auto"]
            changes += ["compile_config={}"] if compiled else []
            name = f"{attention}, {'compiled' if compiled else 'not compiled'}"
            found[name] = {"side": "trainer bf16", "overrides": changes}
        found.setdefault(PLAIN, {"side": "plain bf16", "compiled": True})
    return found


def _measure(
    report: dict[str, Any], shape: str, name: str, settings: dict[str, Any], limit_seconds: float
) -> dict[str, Any]:
    """Measure one variant. The plain model, which has no microbatches, and the products take at most 4 samples."""
    is_trainer = settings["side"].startswith("trainer")
    batch_size = report["batch_size"] if is_trainer else min(4, report["batch_size"])
    task = {"shape": shape, "seq_len": report["seq_len"], "batch_size": batch_size, "num_steps": report["num_steps"]}
    row: dict[str, Any] = {"shape": shape, "step": name, "batch_size": batch_size}
    try:
        changes = [*settings.get("overrides", ()), *(report["overrides"] if is_trainer else ())]
        result = measure_in_a_process({**task, **settings, "overrides": changes}, limit_seconds=limit_seconds)
    except RuntimeError as error:
        return row | {"error": str(error).strip().splitlines()[-1]}
    seconds = statistics.median(result["step_seconds"])
    flops = result.get("flops", count_step_flops(shape, report["seq_len"], batch_size))
    return row | {
        "microbatch_size": result.get("microbatch_size", batch_size),
        "seconds": seconds,
        "tokens_per_sec": None if name == PRODUCTS else batch_size * report["seq_len"] / seconds,
        "flops_per_sec": flops / seconds,
        "peak_bytes": result["peak_bytes"],
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
