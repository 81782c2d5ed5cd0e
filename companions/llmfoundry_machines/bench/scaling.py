"""Speed-up and efficiency over counts of devices, with a fixed global batch (strong) and a fixed local one (weak).

llmfoundry-lite bench scaling --devices 1,2,4 fsdp_config.sharding_strategy=FULL_SHARD --out results
llmfoundry-lite bench scaling --runs runs/on-8,runs/on-16,runs/on-32 --out results

Without `--runs` (`run`), every point is a real launch on this machine, and the launches take turns. With `--runs`
(`table_runs`), nothing is started: finished runs of any machine share one table if their batch, precision, model and
layout are the same. Both read each run's log into a `Point`, and report the points alike (`report_points`).

The global batch has the samples of a step on all devices together, the local batch those on one device.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmfoundry_lite.config.counted_model import counted_model, describe_told_parts, describe_unknown_parts
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.ranks.rank import count_usable_cores
from llmfoundry_lite.report.log import FLOPS, MFU, SECONDS
from llmfoundry_lite.report.reading import config_of, read_run
from llmfoundry_lite.tables import Table
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import DTYPES, SHAPES, measure_in_a_process, train_on_ranks, write_run

COMMAND = "llmfoundry-lite bench scaling"
STRONG, WEAK = "strong", "weak"
COLOURS = {STRONG: "#4c72b0", WEAK: "#dd8452"}
WARM_UP = 2
"""Steps at the beginning of each run that are left out."""
PUBLISHED = (
    "Published for comparison (MosaicML 2023, MPT-7B, 1,536 samples): 166 TFLOP/s a card on 4 MI250, 159 on 128: "
    "95.8 % of it, strong."
)


@dataclass(frozen=True)
class Point:
    """One run in a table of scaling, or the median of several launches of it."""

    run_folder: str
    num_devices: int
    batch_size: int
    """Samples of the global batch."""
    conditions: dict[str, Any]
    """Facts that must be equal in all runs of a table, such as `num_parameters` and `precision`."""
    flops_per_step: int
    tokens_per_step: int
    seconds: float
    """The median step's time."""
    peak_flops: float | None
    """Peak FLOP/s of one device, if the run knew it."""
    config: dict[str, Any]
    """Configuration that was trained, for `plan --calibrate`."""
    counted_alike: str = ""
    """Parts of the model that are the user's own code, with the layers of ours that they are counted like."""
    not_counted: str = ""
    """Parts of the model that are the user's own code, which parameters and FLOPs do not count."""


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
    """Launch a run for each point in turns, print the table, and return the report.

    `counts` are the numbers of devices. Strong scaling trains a global batch of `batch_size` samples on each of them;
    weak scaling trains the local batch that this is on the largest count. For example, `counts` of 1, 2 and 4 with 8
    samples are 1x8, 2x8, 4x8 (strong) and 1x2, 2x4, 4x8 (weak), which are five launches in each of `num_rounds` rounds.

    With `out`, writes scaling.json, .md and .png there. Raises ConfigError for counts that do not suit the machine or
    the batch, and DataError when a launch fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    frame.check_names("--dtype", [dtype], DTYPES)
    counts = sorted(set(counts))
    check_counts(counts, batch_size)
    if device_type() == "cpu":
        # Each rank gets as many cores as on the largest count, so that counts do not differ in them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cores() // counts[-1])))

    # The largest count's point belongs to both kinds of scaling. `sides` is a dict, so it is launched once.
    local_batch_size = batch_size // counts[-1]
    strong_points = [(count, batch_size) for count in counts]
    weak_points = [(count, count * local_batch_size) for count in counts]
    settings = {"shape": shape, "seq_len": seq_len, "num_steps": num_steps, "overrides": list(overrides)}
    sides: dict[str, Any] = {}
    for count, size in [*strong_points, *weak_points]:
        sides[f"{count} devices, {size} samples"] = partial(launch, count, {**settings, "batch_size": size}, dtype)
    products = {**settings, "side": f"matmul {dtype}", "batch_size": local_batch_size}
    sides["matrix products"] = partial(measure_in_a_process, products)

    rounds_by_side, failed = frame.take_turns(sides, num_rounds, frame.open_console())
    if failed:
        raise DataError(f"bench scaling: {next(iter(failed.values()))}")

    # Each round has a median over its steps. The report has the median over all rounds.
    products_flops = statistics.median(
        measurements["flops"] / statistics.median(measurements["step_seconds"])
        for measurements in rounds_by_side.pop("matrix products")
    )
    points = []
    for rounds in rounds_by_side.values():
        median_seconds = statistics.median(point.seconds for point in rounds)
        points.append(replace(rounds[0], seconds=median_seconds))
    points.sort(key=lambda point: point.num_devices)
    strong = [point for point in points if point.batch_size == batch_size]
    weak = [point for point in points if point.batch_size == local_batch_size * point.num_devices]

    options = {"devices": counts, "shape": shape, "seq_len": seq_len, "batch_size": batch_size, "dtype": dtype}
    command = frame.format_command(COMMAND, overrides, **options, num_steps=num_steps, num_rounds=num_rounds)
    return report_points({STRONG: strong, WEAK: weak}, products_flops, num_rounds * num_steps, command, out)


def table_runs(run_folders: Sequence[str], out: Path | None = None) -> dict[str, Any]:
    """Report finished runs in the same way. Raises DataError for runs that do not fit into one table, and says why."""
    points = sorted((read_point(run_folder) for run_folder in run_folders), key=lambda point: point.num_devices)
    command = frame.format_command(COMMAND, runs=run_folders)
    return report_points({determine_kind(points): points}, None, None, command, out)


def report_points(
    points_by_kind: dict[str, list[Point]],
    products_flops: float | None,
    num_steps: int | None,
    command: str,
    out: Path | None,
) -> dict[str, Any]:
    """Print the table and notes, write scaling.json, .md and .png to `out`, if given, and return the report.

    `points_by_kind` has the points of strong or weak scaling, or both, sorted by the number of devices.
    `products_flops` is the measured rate of matrix products in FLOP/s, and `num_steps` the number of timed steps of
    each point. Both are None for finished runs.
    """
    rows = []
    for kind, points in points_by_kind.items():
        rows += describe_points(kind, points)
    conditions = next(iter(points_by_kind.values()))[0].conditions
    report = frame.describe_conditions() | {
        **conditions,
        "num_steps": num_steps,
        "products_flops_per_sec": products_flops,
        "rows": rows,
    }
    all_points = [point for points in points_by_kind.values() for point in points]
    counted_alike = {point.counted_alike: None for point in all_points if point.counted_alike}
    if counted_alike:
        report["counted_alike"] = "; ".join(counted_alike)
    not_counted = {point.not_counted: None for point in all_points if point.not_counted}  # a set that keeps its order
    if not_counted:
        report["not_counted"] = "; ".join(not_counted)
    frame.tell(
        report,
        build_table(report),
        build_notes(report),
        name="scaling",
        heading="Scaling over devices",
        command=command,
        asked=[key for key in conditions if key != "device_name"],
        plot=plot,
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------- one point


def check_counts(counts: Sequence[int], batch_size: int) -> None:
    """Raise ConfigError unless this machine has the largest of `counts`, and each divides the batch.

    `counts` are sorted. On a CPU a device is a process, so any count will do.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus and counts[-1] > num_gpus:
        raise ConfigError(
            f"--devices: {counts[-1]} given, this machine has {num_gpus}; table runs of others with --runs"
        )
    for count in counts:
        if batch_size % count:
            raise ConfigError(f"--batch-size: {batch_size} samples do not divide over {count} devices")


def launch(num_devices: int, settings: dict[str, Any], dtype: str) -> Point:
    """Train on `num_devices` ranks of this machine, and read the run. Raises RuntimeError with the run's error.

    `settings` has the keys of `steps.write_run`, and `overrides` of the configuration.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), settings, dtype)
        train_on_ranks(num_devices, [str(path), *settings["overrides"]])
        return read_point(f"{folder}/run")


def read_point(run_folder: str) -> Point:
    """Read a run's configuration and log as a point. `run_folder` may be a URL.

    Raises DataError for a run without a configuration, for one whose batches differ in size, and for one
    whose batches ran on several numbers of devices.
    """
    finished_run = read_run(run_folder)
    config = config_of(finished_run)
    if config.parts_of_batches.largest > 1:
        raise DataError(f"{run_folder}: batch_size_schedule: a table needs runs whose batches have one size")
    log = finished_run.log

    # The log also has evaluations, which have no step's time. Batch 0 is an evaluation before training.
    is_timed = np.isfinite(log.numbers(SECONDS)) & (log.batch > 0)
    is_timed[np.flatnonzero(is_timed)[:WARM_UP]] = False
    counts = set(log.num_devices[is_timed].tolist())
    if len(counts) != 1 or not np.isfinite(list(counts)).all():
        known = ", ".join(f"{count:g}" for count in sorted(counts)) or "nobody knows how many"
        raise DataError(f"{run_folder}: {known} devices in its batches; a table needs runs on one count each")

    # The log has no peak. It follows from the rate and its share of the peak, and is not finite without them.
    with np.errstate(divide="ignore", invalid="ignore"):
        peaks = (log.numbers(FLOPS) / log.numbers(MFU))[is_timed]
    peak_flops = float(np.median(peaks)) if np.isfinite(peaks).all() else None

    # The last launch knows its device, and the microbatch size if the configuration says `auto`.
    microbatch_size = config.device_train_microbatch_size
    device_name = None
    if finished_run.segments:
        microbatch_size = finished_run.segments[-1].device_train_microbatch_size
        device_name = finished_run.segments[-1].device

    model = counted_model(config.model)
    tokens_per_step = config.global_train_batch_size * config.max_seq_len
    trained = replace(config, device_train_microbatch_size=microbatch_size, environment={}, run_folder="")
    return Point(
        run_folder=run_folder,
        num_devices=int(counts.pop()),
        batch_size=config.global_train_batch_size,
        conditions={
            "num_parameters": count_parameters(model),
            "seq_len": config.max_seq_len,
            "precision": config.precision,
            "sharding": name_layout(config),
            "device_name": device_name,
        },
        flops_per_step=count_flops_per_token(model, config.max_seq_len) * tokens_per_step,
        tokens_per_step=tokens_per_step,
        seconds=float(np.median(log.numbers(SECONDS)[is_timed])),
        peak_flops=peak_flops,
        config=as_dict(trained),
        counted_alike=describe_told_parts(config.model),
        not_counted=describe_unknown_parts(config.model),
    )


def name_layout(config: TrainConfig) -> str:
    """Name the sharding and the degrees above 1 that divide a model or a sample, as in
    `FULL_SHARD, tensor_parallel_degree 2`.

    The data-parallel degree is left out, because it is what a table of scaling varies.
    """
    degrees = {
        "tensor_parallel_degree": config.tensor_parallel_degree,
        "pipeline_parallel_degree": config.pipeline.pipeline_parallel_degree,
        "context_parallel_degree": config.context.context_parallel_degree,
    }
    divisions = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return ", ".join([config.sharding.sharding_strategy, *divisions])


def determine_kind(points: Sequence[Point]) -> str:
    """Return STRONG if all points have the same global batch, WEAK if they have the same local one.

    Raises DataError for other batches, for points whose conditions differ, and for two points on the same number of
    devices.
    """
    first = points[0]
    for point in points[1:]:
        for key, first_fact in first.conditions.items():
            fact = point.conditions[key]
            if fact != first_fact:
                raise DataError(
                    f"{key} is {first_fact} in {first.run_folder} and {fact} in {point.run_folder}: not one table"
                )

    counts = [point.num_devices for point in points]
    if len(set(counts)) < len(counts):
        raise DataError(f"runs on {', '.join(map(str, counts))} devices: a table needs one run for each count")

    if len({point.batch_size for point in points}) == 1:
        return STRONG
    if len({point.batch_size / point.num_devices for point in points}) == 1:
        return WEAK
    batches = ", ".join(f"{point.batch_size} on {point.num_devices}" for point in points)
    raise DataError(f"batches of {batches} devices: neither one batch (strong) nor one for each device (weak)")


# ------------------------------------------------------------------------------------------------------ the report


def describe_points(kind: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return a row for each point of one kind of scaling. The first point has the smallest number of devices.

    `speed_up` is a point's tokens/s over the first point's. `efficiency` is the share that this is of the ideal
    speed-up, by the number of devices: 3.2 times the tokens/s on 4 times the devices are an efficiency of 0.8.
    """
    base = points[0]
    base_tokens_per_second = base.tokens_per_step / base.seconds
    rows = []
    for point in points:
        tokens_per_second = point.tokens_per_step / point.seconds
        flops_per_device = point.flops_per_step / point.seconds / point.num_devices
        speed_up = tokens_per_second / base_tokens_per_second
        rows.append(
            {
                "kind": kind,
                "num_devices": point.num_devices,
                "batch_size": point.batch_size,
                "seconds": point.seconds,
                "tokens_per_second": tokens_per_second,
                "flops_per_device": flops_per_device,
                "mfu": flops_per_device / point.peak_flops if point.peak_flops else None,
                "speed_up": speed_up,
                "efficiency": speed_up * base.num_devices / point.num_devices,
                "config": point.config,
            }
        )
    return rows


def build_table(report: dict[str, Any]) -> Table:
    """Build the table of all points. Rates are compared with the device's peak if that is known, and else with the rate
    of matrix products if that was measured."""
    products_flops = report["products_flops_per_sec"]
    share_columns: list[frame.Column] = []
    if any(row["mfu"] for row in report["rows"]):
        share_columns = [("MFU", "{mfu:.1%}")]
    elif products_flops:
        share_columns = [("of its products", lambda row: f"{row['flops_per_device'] / products_flops:.1%}")]

    columns: list[frame.Column] = [
        ("scaling", "{kind}"),
        ("devices", "{num_devices:,}"),
        ("samples", "{batch_size:,}"),
        ("seconds", "{seconds:.3f}"),
        ("tokens/s", "{tokens_per_second:,.0f}"),
        ("GFLOP/s a device", lambda row: f"{row['flops_per_device'] / 1e9:,.1f}"),
        *share_columns,
        ("speed-up", "{speed_up:.2f}"),
        ("efficiency", "{efficiency:.1%}"),
    ]
    steps = f", the median of {report['num_steps']} steps" if report["num_steps"] else ""
    return frame.tabulate(f"{build_title(report)}{steps}", columns, report["rows"], num_keys=3)


def build_title(report: dict[str, Any]) -> str:
    """Return the conditions that all rows share, as the title of the table and of the figure."""
    return (
        f"{report['num_parameters']:,} parameters, sequences of {report['seq_len']:,}, {report['precision']}, "
        f"{report['sharding']}, {report['device_name'] or 'an unknown device'}"
    )


def build_notes(report: dict[str, Any]) -> list[str]:
    """Return the lines below the table: a published result, and how this machine's devices were measured."""
    notes = [PUBLISHED]
    if "counted_alike" in report:
        notes.append(f"Parameters, FLOP/s and MFU count {report['counted_alike']}, as the class says.")
    if "not_counted" in report:
        notes.append(f"Parameters, FLOP/s and MFU are without {report['not_counted']}, so they are too low.")
    products_flops = report["products_flops_per_sec"]
    if not products_flops:
        return notes  # finished runs, perhaps of another machine

    notes.append(f"One device multiplies at {products_flops / 1e9:,.1f} GFLOP/s alone.")
    if device_type() == "cpu":
        num_cores = count_usable_cores()
        num_threads = os.environ.get("OMP_NUM_THREADS")
        most_ranks = max(row["num_devices"] for row in report["rows"])
        notes.append(f"A device is a rank over gloo with {num_threads} thread. {num_cores} cores may be used.")
        if most_ranks > num_cores:
            highest_efficiency = num_cores / most_ranks
            notes.append(
                f"{most_ranks} ranks share {num_cores} cores: their efficiency is at most {highest_efficiency:.0%}."
            )
    return notes


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each device's rate, labelled with the efficiency (left), and the speed-up beside the ideal one (right)."""
    all_rows = report["rows"]
    counts = sorted({row["num_devices"] for row in all_rows})
    ideal_speed_ups = [count / counts[0] for count in counts]
    with frame.drawn(path, 2, (10, 3.8), build_title(report)) as (rate_axes, speed_up_axes):
        speed_up_axes.plot(counts, ideal_speed_ups, "--", color="#8c8c8c", label="ideal")
        for kind in dict.fromkeys(row["kind"] for row in all_rows):
            rows = [row for row in all_rows if row["kind"] == kind]
            num_devices = [row["num_devices"] for row in rows]
            rates = [row["flops_per_device"] / 1e9 for row in rows]
            colour = COLOURS[kind]
            style = {"color": colour, "marker": "o", "label": f"{kind} scaling"}
            rate_axes.plot(num_devices, rates, **style)
            speed_up_axes.plot(num_devices, [row["speed_up"] for row in rows], **style)

            # Labels of strong scaling are above its points, those of weak scaling below, so that they do not meet.
            offset = (0, 8 if kind == STRONG else -14)
            for row, *point in zip(rows, num_devices, rates, strict=True):
                label = f"{row['efficiency']:.0%}"
                rate_axes.annotate(
                    label, point, offset, textcoords="offset points", ha="center", fontsize=8, color=colour
                )

        frame.label_axes(rate_axes, counts, "devices", "model GFLOP/s of a device")
        rate_axes.set_ylim(0, 1.2 * max(row["flops_per_device"] for row in all_rows) / 1e9)
        frame.label_axes(speed_up_axes, counts, "devices", f"speed-up over {counts[0]} device(s)", from_zero=False)
        speed_up_axes.set_yscale("log", base=2)
        speed_up_axes.set_yticks(ideal_speed_ups, [f"{speed_up:g}" for speed_up in ideal_speed_ups])
        speed_up_axes.legend(frameon=False, fontsize=9)
