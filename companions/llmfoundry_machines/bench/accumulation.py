"""Cost of microbatches: time and memory of one batch through the Trainer in 1, 2, 4 ... parts.

llmfoundry-lite bench accumulation --microbatches 1,2,4,8,16,32,64 --out results
"""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import DTYPES, SHAPES, count_step_flops, measure_in_a_process

COLUMNS: list[frame.Column] = [
    ("microbatches", "{num_microbatches}"),
    ("samples in each", "{microbatch_size}"),
    ("seconds", "{seconds:.3f}"),
    ("tokens/s", "{tokens_per_second:,.0f}"),
    ("GFLOP/s", lambda row: f"{row['flops_per_sec'] / 1e9:,.0f}"),
    ("over one part", "{times:.2f}"),
    ("peak memory, GiB", lambda row: f"{row['peak_bytes'] / GIB:.2f}"),
]


def run(
    counts: Sequence[int],
    shape: str,
    seq_len: int,
    batch_size: int,
    dtype: str,
    num_steps: int,
    num_rounds: int,
    overrides: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure all counts in turns, print a table, write accumulation.json, .md and .png to `out`.

    Raises ConfigError for counts that do not divide the batch.
    """
    frame.check_names("--shape", [shape], SHAPES)
    frame.check_names("--dtype", [dtype], DTYPES)
    counts = sorted(set(counts))
    if odd := [count for count in counts if batch_size % count]:
        raise ConfigError(f"--microbatches: {odd[0]} do not divide a batch of {batch_size} samples")
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    sides = {}
    for count in counts:
        size = f"device_train_microbatch_size={batch_size // count}"
        task = {**settings, "side": f"trainer {dtype}", "overrides": [*overrides, size]}
        sides[f"{count} microbatches"] = partial(measure_in_a_process, task)
    found, failed = frame.take_turns(sides, num_rounds, frame.open_console())
    base = next(iter(found.values()))
    rows = [describe(n, settings, rounds, base) for n, rounds in zip(counts, found.values(), strict=True) if rounds]
    options = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "dtype": dtype}
    options |= {"num_steps": num_steps, "num_rounds": num_rounds}
    report = frame.describe_conditions() | options | {"overrides": list(overrides), "rows": rows, "failed": failed}
    frame.tell(
        report,
        build_table(report),
        [f"{name}: not measured: {reason}" for name, reason in failed.items()],
        name="accumulation",
        heading="What microbatches cost",
        command=frame.format_command("llmfoundry-lite bench accumulation", overrides, microbatches=counts, **options),
        asked=("shape", "seq_len", "batch_size", "dtype", "overrides"),
        plot=plot,
        out=out if rows else None,
    )
    return report


def describe(
    count: int, settings: dict[str, Any], rounds: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Describe one count. `times`: its step time over that of the fewest parts, within each round that has both."""
    shape, seq_len, batch_size = (settings[key] for key in ("shape", "seq_len", "batch_size"))
    seconds, firsts = ([statistics.median(one["step_seconds"]) for one in side] for side in (rounds, base))
    return {
        "num_microbatches": count,
        "microbatch_size": batch_size // count,
        "seconds": statistics.median(seconds),
        "tokens_per_second": batch_size * seq_len / statistics.median(seconds),
        "flops_per_sec": count_step_flops(shape, seq_len, batch_size) / statistics.median(seconds),
        "times": frame.ratios(seconds, firsts).median if firsts else None,
        "peak_bytes": max(one["peak_bytes"] for one in rounds),
    }


def build_title(report: dict[str, Any]) -> str:
    size = f"{report['batch_size']} x {report['seq_len']} tokens"
    return f"{report['shape']}, {size}, {report['dtype']}, {report['device']}"


def build_table(report: dict[str, Any]) -> Table:
    steps = f"the median of {report['num_rounds']} x {report['num_steps']} steps through the Trainer"
    return frame.tabulate(f"{build_title(report)}, {steps}", COLUMNS, report["rows"], num_keys=2)


def plot(report: dict[str, Any], path: Path) -> None:
    x = [row["num_microbatches"] for row in report["rows"]]
    with frame.drawn(path, 2, (9, 3.4), build_title(report)) as (rates, memory):
        rates.plot(x, [row["tokens_per_second"] for row in report["rows"]], "o-", color="#4c72b0")
        memory.plot(x, [row["peak_bytes"] / GIB for row in report["rows"]], "o-", color="#dd8452")
        for axes, label in ((rates, "tokens/s"), (memory, "peak memory, GiB")):
            frame.label_axes(axes, x, "microbatches of one batch", label)
