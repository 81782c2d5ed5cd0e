"""Model FLOPs utilisation on one device: shapes x attention x compiled or not, beside a plain compiled step.

llmfoundry-lite bench mfu --shapes 125m,350m,1b,3b,7b --minutes 8 --out results

MFU is held against the rate of matrix products of the model's own shapes, measured in the same run, and against the
datasheet where the device is in `hardware.py`. One device has nobody to talk to: these figures and those of a cluster
do not belong into one column. What matters most is measured first; what the time does not suffice for is named.
"""

import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.bench.frame import describe_conditions, measured_table, open_console, tell
from llmfoundry_lite.bench.steps import check_shapes, count_step_flops, measure_in_a_process
from llmfoundry_lite.devices import accelerator, device_type
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

    A process that still measures when the time is up is ended.
    """
    check_shapes("--shapes", shapes)
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
            report["rows"].append(_measure(report, shape, name, settings, overrides, left))
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
    """Name -> settings of one process, the most telling first."""
    attentions = ["sdpa", "blocked"]
    if device_type() == "cuda":
        attentions = ["sdpa", "flex", *(["flash"] if importlib.util.find_spec("flash_attn") else [])]
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
    """The plain model takes a batch of 4: it has no microbatches. Products are of as many tokens."""
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
    """By model, the products first."""
    products = {row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == PRODUCTS}
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"]))
    cells = []
    for row in sorted(report["rows"], key=lambda row: shapes.index(row["shape"])):
        if "error" in row:
            cells.append([row["shape"], f"{row['step']}: {row['error']}", *[""] * (len(COLUMNS) - 2)])
            continue
        rate, is_products = row["flops_per_sec"], row["step"] == PRODUCTS
        share = None if is_products or not products.get(row["shape"]) else rate / products[row["shape"]]
        peak_share = rate / report["peak_flops"] if report["peak_flops"] else None
        cells.append(
            [
                *(row["shape"], row["step"], "" if is_products else str(row["microbatch_size"])),
                *(
                    f"{row['seconds']:.3f}",
                    "" if is_products else f"{row['tokens_per_sec']:,.0f}",
                    f"{rate / 1e12:.2f}",
                ),
                *("" if value is None else f"{value:.1%}" for value in (share, peak_share)),
                "" if is_products else f"{row['peak_bytes'] / GIB:.1f}",
            ]
        )
    title = f"{report['device']}, bf16, {report['batch_size']} x {report['seq_len']} tokens, the median of "
    return measured_table(f"{title}{report['num_steps']} steps", COLUMNS, cells, num_keys=2)
