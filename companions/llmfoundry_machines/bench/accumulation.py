"""Cost of microbatches: time and memory of one batch that the Trainer computes in 1, 2, 4 ... parts.

llmfoundry-lite bench accumulation --microbatches 1,2,4,8,16,32,64 --out results

The gradients of a batch's parts are accumulated before the optimizer steps. More parts need less memory, and take
longer. `steps.py` measures each number of parts in a process; `run` lets them take turns and reports them.
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
    """Measure each number of microbatches in turns, print a table, and return the report.

    `counts` are the numbers of microbatches into which the `batch_size` samples of a batch are divided. Each of
    `num_rounds` rounds measures all of them with `num_steps` steps. A count that fails, usually for lack of memory, is
    named below the table. With `out`, writes accumulation.json, .md and .png there.

    Raises ConfigError for counts that do not divide the batch.
    """
    frame.check_names("--shape", [shape], SHAPES)
    frame.check_names("--dtype", [dtype], DTYPES)
    counts = sorted(set(counts))
    for count in counts:
        if batch_size % count:
            raise ConfigError(f"--microbatches: {count} do not divide a batch of {batch_size} samples")

    settings = {"shape": shape, "seq_len": seq_len, "batch_size": batch_size, "num_steps": num_steps}
    sides = {}
    for count in counts:
        microbatch_size = f"device_train_microbatch_size={batch_size // count}"
        task = {**settings, "side": f"trainer {dtype}", "overrides": [*overrides, microbatch_size]}
        sides[f"{count} microbatches"] = partial(measure_in_a_process, task)
    rounds_by_side, failed = frame.take_turns(sides, num_rounds, frame.open_console())

    # Step times are compared with those of the fewest parts, which come first.
    base_rounds = next(iter(rounds_by_side.values()))
    rows = []
    for count, rounds in zip(counts, rounds_by_side.values(), strict=True):
        if rounds:
            rows.append(describe_count(count, settings, rounds, base_rounds))

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


def describe_count(
    count: int, settings: dict[str, Any], rounds: Sequence[dict[str, Any]], base_rounds: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the row of one number of microbatches.

    `rounds` are its results of `steps.measure`, one for each round, and `base_rounds` those of the smallest number of
    microbatches, which may be empty. `times` is the ratio of their step times, the median over the rounds that both
    have, or None if there is none.
    """
    batch_size = settings["batch_size"]
    seq_len = settings["seq_len"]
    round_seconds = [statistics.median(result["step_seconds"]) for result in rounds]
    base_seconds = [statistics.median(result["step_seconds"]) for result in base_rounds]
    seconds = statistics.median(round_seconds)
    return {
        "num_microbatches": count,
        "microbatch_size": batch_size // count,
        "seconds": seconds,
        "tokens_per_second": batch_size * seq_len / seconds,
        "flops_per_sec": count_step_flops(settings["shape"], seq_len, batch_size) / seconds,
        "times": frame.ratios(round_seconds, base_seconds).median if base_seconds else None,
        "peak_bytes": max(result["peak_bytes"] for result in rounds),
    }


def build_title(report: dict[str, Any]) -> str:
    """Return what all rows share: the model, the batch, the dtype and the device."""
    size = f"{report['batch_size']} x {report['seq_len']} tokens"
    return f"{report['shape']}, {size}, {report['dtype']}, {report['device']}"


def build_table(report: dict[str, Any]) -> Table:
    """Build the table, with a row for each number of microbatches that was measured."""
    steps = f"the median of {report['num_rounds']} x {report['num_steps']} steps through the Trainer"
    return frame.tabulate(f"{build_title(report)}, {steps}", COLUMNS, report["rows"], num_keys=2)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw tokens/s (left) and peak memory (right) over the number of microbatches."""
    rows = report["rows"]
    counts = [row["num_microbatches"] for row in rows]
    with frame.drawn(path, 2, (9, 3.4), build_title(report)) as (rate_axes, memory_axes):
        rate_axes.plot(counts, [row["tokens_per_second"] for row in rows], "o-", color="#4c72b0")
        memory_axes.plot(counts, [row["peak_bytes"] / GIB for row in rows], "o-", color="#dd8452")
        for axes, label in ((rate_axes, "tokens/s"), (memory_axes, "peak memory, GiB")):
            frame.label_axes(axes, counts, "microbatches of one batch", label)
