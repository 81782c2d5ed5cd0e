"""The benchmark of Emani et al. 2023, "A Comprehensive Performance Study of LLMs on Novel AI Accelerators", run here.

python -m benchmarks alcf --out results
python -m benchmarks alcf --shape 10m --seq-len 256 --batches 1,2,4 --accumulations 1,2,4,8 --devices 1,2 --out results

GPT-2 XL through the Trainer: batch sizes x precisions on one device, then gradient accumulation and weak scaling. A
device's microbatch stays one sample: the batch grows with the accumulated microbatches, and with the devices.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.block import all_devices
from llmfoundry_machines.bench.scaling import launch
from llmfoundry_machines.bench.steps import DTYPES, SHAPES, count_step_flops

PARTS = {
    "batch size": ("samples", "samples of a batch, one device"),
    "accumulation": ("num_microbatches", "accumulated microbatches"),
    "scaling": ("num_devices", "devices"),
}
"""Part of the benchmark -> key of what grows in it, and its name."""
KEYS = ("part", "dtype", "num_devices", "num_microbatches", "samples")
COLUMNS: list[frame.Column] = [
    *(("part", "{part}"), ("precision", "{dtype}"), ("devices", "{num_devices}")),
    *(("microbatches", "{num_microbatches}"), ("samples of a device", "{samples}"), ("seconds", "{seconds:.3f}")),
    ("samples/s", "{samples_per_second:,.2f}"),
    ("GFLOP/s a device", lambda row: f"{row['flops_per_device'] / 1e9:,.1f}"),
    ("over the first", "{gain:.2f}"),
    ("efficiency", "{efficiency:.1%}"),
]
PUBLISHED = [
    "Published for comparison (GPT-2 XL, 1,024 tokens): 4 accumulated microbatches reach 1.74 times the rate of one "
    "on 64 A100, 1.2 times on 4 MI250.",
    "Published for comparison: 75.8 % of the first device's throughput is left on 64 A100, about 80 % on 4 MI250.",
]


def run(
    shape: str = "gpt2-xl",
    seq_len: int = 1024,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    dtypes: Sequence[str] = ("fp32", "bf16"),
    accumulations: Sequence[int] = (1, 2, 4, 8, 16, 32),
    devices: Sequence[int] = (),
    num_steps: int = 3,
    num_rounds: int = 1,
    out: Path | None = None,
) -> dict[str, Any]:
    """Launch every point in turns, print the table, write alcf.json, .md and .png to `out`.

    Accumulation and scaling are in the last of `dtypes`. `devices`: by default one, and all that there are;
    accumulation runs on the most. Raises ConfigError for unknown names, DataError when a launch fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    frame.check_names("--dtypes", dtypes, DTYPES)
    devices = sorted(devices or all_devices())
    points = [("batch size", dtype, 1, 1, size) for dtype in dtypes for size in batches]
    points += [("accumulation", dtypes[-1], devices[-1], count, count) for count in accumulations]
    points += [("scaling", dtypes[-1], count, 1, 1) for count in devices]
    settings = {"shape": shape, "seq_len": seq_len, "num_steps": num_steps, "num_rounds": num_rounds}
    sides = {name_of(point): partial(measure, point, settings) for point in points}  # shared ones run once
    found, failed = frame.take_turns(sides, num_rounds, frame.open_console())
    if failed:
        raise DataError(f"alcf: {'; '.join(f'{name}: {why}' for name, why in failed.items())}")
    rows = [describe(point, settings, found[name_of(point)]) for point in points]
    add_gains(rows)
    lists = {"batches": batches, "dtypes": dtypes, "accumulations": accumulations, "devices": devices}
    report = frame.describe_conditions() | settings | {"rows": rows}
    frame.tell(
        report,
        frame.tabulate(build_title(report), COLUMNS, rows, num_keys=len(KEYS)),
        PUBLISHED,
        name="alcf",
        heading="ALCF's benchmark at this machine's size",
        command=frame.format_command("python -m benchmarks alcf", **settings, **lists),
        asked=("shape", "seq_len"),
        plot=plot,
        out=out,
    )
    return report


def name_of(point: Sequence[Any]) -> str:
    _, dtype, num_devices, count, size = point
    return f"{dtype}, {num_devices} devices x {size} samples in {count} microbatches"


def measure(point: Sequence[Any], settings: dict[str, Any]) -> float:
    _, dtype, num_devices, count, size = point
    overrides = [f"device_train_microbatch_size={size // count}"]
    return launch(num_devices, settings | {"batch_size": num_devices * size, "overrides": overrides}, dtype).seconds


def describe(point: Sequence[Any], settings: dict[str, Any], rounds: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(KEYS, point, strict=True))
    num_devices, seconds = row["num_devices"], frame.spread(rounds).median
    flops = count_step_flops(settings["shape"], settings["seq_len"], row["samples"])
    rate = num_devices * row["samples"] / seconds
    return row | {"seconds": seconds, "samples_per_second": rate, "flops_per_device": flops / seconds}


def add_gains(rows: Sequence[dict[str, Any]]) -> None:
    """Give rows their samples/s over those of the first of their part and precision; in scaling, also a device's."""
    firsts: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        first = firsts.setdefault((row["part"], row["dtype"]), row)
        row["gain"] = row["samples_per_second"] / first["samples_per_second"]
        if row["part"] == "scaling":
            row["efficiency"] = row["gain"] * first["num_devices"] / row["num_devices"]


def build_title(report: dict[str, Any]) -> str:
    return f"{report['shape']}, samples of {report['seq_len']:,} tokens, {report['device']}"


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw samples/s over batch sizes (a line for each precision), accumulated microbatches and devices."""
    with frame.drawn(path, len(PARTS), (12, 3.6), build_title(report)) as panels:
        for axes, (part, (key, label)) in zip(panels, PARTS.items(), strict=True):
            rows = [row for row in report["rows"] if row["part"] == part]
            for dtype in dict.fromkeys(row["dtype"] for row in rows):
                x, y = zip(
                    *((row[key], row["samples_per_second"]) for row in rows if row["dtype"] == dtype), strict=True
                )
                axes.plot(x, y, "o-", label=dtype)
            frame.label_axes(axes, sorted({row[key] for row in rows}), label, "samples/s")
            axes.set_ylim(0, 1.1 * max(row["samples_per_second"] for row in rows))
            axes.legend(frameon=False, fontsize=8)
