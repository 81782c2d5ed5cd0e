"""Model FLOPs utilisation on one device: shapes x attention x compiled or not, beside a plain compiled step.

llmfoundry-lite bench mfu --shapes 125m,350m,1b,3b,7b --minutes 8 --out results

MFU stands beside the rate of matrix products of the model's own shapes, measured in the same run, and beside the
datasheet's peak where `hardware.py` has the device. One device exchanges nothing: do not mix these figures with a
cluster's. The most telling variants come first; those without time are named.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.bench.block import available
from llmfoundry_lite.bench.frame import (
    check_names,
    describe_conditions,
    measured_table,
    open_console,
    tell,
)
from llmfoundry_lite.bench.steps import SHAPES, count_step_flops, measure_in_a_process
from llmfoundry_lite.devices import accelerator
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.report.tables import Table

PRODUCTS = "matrix products"
PLAIN = "a plain SDPA model, compiled"
COLUMNS = [
    *("model", "step", "microbatch", "seconds", "tokens/s", "TFLOP/s", "of its products", "of the datasheet"),
    "peak memory, GiB",
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
    console, deadline = open_console(), time.monotonic() + 60 * minutes
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
    for name, settings in variants().items():
        for shape in shapes:
            left = deadline - time.monotonic()
            if left <= 0:
                report["left_out"].append(f"{shape}, {name}")
                continue
            console.print(f"{shape}: {name}")
            report["rows"].append(_measure(report, shape, name, settings, overrides, left / 2))
    tell(
        report,
        build_table(report),
        notes=[f"no time for: {'; '.join(report['left_out'])}"] if report["left_out"] else [],
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
    report: dict[str, Any],
    shape: str,
    name: str,
    settings: dict[str, Any],
    overrides: Sequence[str],
    limit_seconds: float,
) -> dict[str, Any]:
    """Measure one variant. The plain model, which has no microbatches, and the products take at most 4 samples."""
    is_trainer = settings["side"].startswith("trainer")
    batch_size = report["batch_size"] if is_trainer else min(4, report["batch_size"])
    task = {"shape": shape, "seq_len": report["seq_len"], "batch_size": batch_size, "num_steps": report["num_steps"]}
    row: dict[str, Any] = {"shape": shape, "step": name, "batch_size": batch_size}
    try:
        changes = [*settings.get("overrides", ()), *(overrides if is_trainer else ())]
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
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"]))
    cells = []
    for row in sorted(report["rows"], key=lambda row: shapes.index(row["shape"])):
        if "error" in row:
            cells.append([row["shape"], f"{row['step']}: {row['error']}", *[""] * (len(COLUMNS) - 2)])
            continue
        rate = row["flops_per_sec"]
        share, peak_share = (
            f"{rate / whole:.1%}" if whole else "" for whole in (products.get(row["shape"]), report["peak_flops"])
        )
        size, tokens, memory = str(row["microbatch_size"]), row["tokens_per_sec"], f"{row['peak_bytes'] / GIB:.1f}"
        if row["step"] == PRODUCTS:
            size = share = memory = ""
        seconds, tokens = f"{row['seconds']:.3f}", f"{tokens:,.0f}" if tokens else ""
        cells.append(
            [row["shape"], row["step"], size, seconds, tokens, f"{rate / 1e12:.2f}", share, peak_share, memory]
        )
    title = f"{report['device']}, bf16, {report['batch_size']} x {report['seq_len']} tokens, the median of "
    return measured_table(f"{title}{report['num_steps']} steps", COLUMNS, cells, num_keys=2)
