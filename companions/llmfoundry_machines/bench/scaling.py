"""Speed-up and efficiency over counts of devices, with a fixed global batch (strong) and a fixed local one (weak).

llmfoundry-lite bench scaling --devices 1,2,4 fsdp_config.sharding_strategy=FULL_SHARD --out results
llmfoundry-lite bench scaling --runs runs/on-8,runs/on-16,runs/on-32 --out results

Without `--runs`, every point is a real launch on this machine, and the launches take turns. With `--runs`, nothing is
started: finished runs of any machine share one table if their batch, precision, model and layout are the same.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

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
"""Steps left out of each run."""
PUBLISHED = (
    "Published for comparison (MosaicML 2023, MPT-7B, 1,536 samples): 166 TFLOP/s a card on 4 MI250, 159 on 128: "
    "95.8 % of it, strong."
)


class Point(NamedTuple):
    """One run in a table of scaling."""

    where: str
    num_devices: int
    batch_size: int
    """Samples of a step, on all devices."""
    same: dict[str, Any]
    """Facts that must be equal in all runs of a table."""
    flops_per_step: int
    tokens_per_step: int
    seconds: float
    """The median step."""
    peak_flops: float | None
    """FLOP/s of one device, if the run knew it."""
    config: dict[str, Any]
    """Configuration that was trained, for `plan --calibrate`."""


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
    """Launch all points in turns, print the table, write scaling.json, .md and .png to `out`.

    Strong scaling has `batch_size` samples on all devices together; weak scaling has the largest count's share of them
    on each device. Raises ConfigError for counts that do not suit machine or batch, DataError when a launch fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    frame.check_names("--dtype", [dtype], DTYPES)
    counts = sorted(set(counts))
    check_counts(counts, batch_size)
    share = batch_size // counts[-1]
    points = dict.fromkeys([*((n, batch_size) for n in counts), *((n, n * share) for n in counts)])
    settings = {"shape": shape, "seq_len": seq_len, "num_steps": num_steps, "overrides": list(overrides)}
    if device_type() == "cpu":  # every rank of every count gets as many cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_usable_cores() // counts[-1])))
    sides: dict[str, Any] = {
        f"{n} devices, {size} samples": partial(launch, n, {**settings, "batch_size": size}, dtype)
        for n, size in points
    }
    products = {**settings, "side": f"matmul {dtype}", "batch_size": share}
    sides["matrix products"] = partial(measure_in_a_process, products)
    found, failed = frame.take_turns(sides, num_rounds, frame.open_console())
    if failed:
        raise DataError(f"bench scaling: {next(iter(failed.values()))}")
    products_flops = statistics.median(
        one["flops"] / statistics.median(one["step_seconds"]) for one in found.pop("matrix products")
    )
    measured = [
        rounds[0]._replace(seconds=statistics.median(point.seconds for point in rounds)) for rounds in found.values()
    ]
    measured.sort(key=lambda point: point.num_devices)
    strong = [point for point in measured if point.batch_size == batch_size]
    weak = [point for point in measured if point.batch_size == share * point.num_devices]
    options = {"devices": counts, "shape": shape, "seq_len": seq_len, "batch_size": batch_size, "dtype": dtype}
    command = frame.format_command(COMMAND, overrides, **options, num_steps=num_steps, num_rounds=num_rounds)
    return tell_points({STRONG: strong, WEAK: weak}, products_flops, num_rounds * num_steps, command, out)


def table_runs(places: Sequence[str], out: Path | None = None) -> dict[str, Any]:
    """Tabulate finished runs in the same way. Raises DataError for runs that do not fit into one table, and why."""
    points = sorted((read_point(place) for place in places), key=lambda point: point.num_devices)
    return tell_points({kind_of(points): points}, None, None, frame.format_command(COMMAND, runs=places), out)


def tell_points(
    by_kind: dict[str, list[Point]],
    products_flops: float | None,
    num_steps: int | None,
    command: str,
    out: Path | None,
) -> dict[str, Any]:
    first = next(iter(by_kind.values()))[0]
    report = frame.describe_conditions() | {
        **first.same,
        "num_steps": num_steps,
        "products_flops_per_sec": products_flops,
        "rows": [row for kind, points in by_kind.items() for row in describe(kind, points)],
    }
    frame.tell(
        report,
        build_table(report),
        build_notes(report),
        name="scaling",
        heading="Scaling over devices",
        command=command,
        asked=[key for key in first.same if key != "device_name"],
        plot=plot,
        out=out,
    )
    return report


# ------------------------------------------------------------------------------------------------------- one point


def check_counts(counts: Sequence[int], batch_size: int) -> None:
    there = torch.cuda.device_count()
    if there and counts[-1] > there:
        raise ConfigError(f"--devices: {counts[-1]} given, this machine has {there}; table runs of others with --runs")
    odd = [n for n in counts if batch_size % n]
    if odd:
        raise ConfigError(f"--batch-size: {batch_size} samples do not divide over {odd[0]} devices")


def launch(num_devices: int, settings: dict[str, Any], dtype: str) -> Point:
    """Train on so many ranks of this machine. Raises RuntimeError with the run's error."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder), settings, dtype)
        train_on_ranks(num_devices, [str(path), *settings["overrides"]])
        return read_point(f"{folder}/run")


def read_point(place: str) -> Point:
    """Read a run. Raises DataError for one without a configuration, and one on several counts of devices."""
    found = read_run(place)
    config, log = config_of(found), found.log
    timed = np.isfinite(log.numbers(SECONDS)) & (log.batch > 0)
    timed[np.flatnonzero(timed)[:WARM_UP]] = False
    counts = set(log.num_devices[timed].tolist())
    if len(counts) != 1 or not np.isfinite(list(counts)).all():
        known = ", ".join(f"{count:g}" for count in sorted(counts)) or "nobody knows how many"
        raise DataError(f"{place}: {known} devices in its batches; a table needs runs on one count each")
    tokens = config.global_train_batch_size * config.max_seq_len
    with np.errstate(divide="ignore", invalid="ignore"):
        peaks = (log.numbers(FLOPS) / log.numbers(MFU))[timed]
    last = found.segments[-1] if found.segments else None
    size = last.device_train_microbatch_size if last else config.device_train_microbatch_size
    planned = replace(config, device_train_microbatch_size=size, environment={}, run_folder="")
    return Point(
        where=place,
        num_devices=int(counts.pop()),
        batch_size=config.global_train_batch_size,
        same={
            "num_parameters": count_parameters(config.model),
            "seq_len": config.max_seq_len,
            "precision": config.precision,
            "sharding": name_layout(config),
            "device_name": last and last.device,
        },
        flops_per_step=count_flops_per_token(config.model, config.max_seq_len) * tokens,
        tokens_per_step=tokens,
        seconds=float(np.median(log.numbers(SECONDS)[timed])),
        peak_flops=float(np.median(peaks)) if np.isfinite(peaks).all() else None,
        config=as_dict(planned),
    )


def name_layout(config: TrainConfig) -> str:
    """Return `FULL_SHARD, tensor_parallel_degree 2`: all degrees but the number of copies."""
    degrees = {
        "tensor_parallel_degree": config.tensor_parallel_degree,
        "pipeline_parallel_degree": config.pipeline.pipeline_parallel_degree,
        "context_parallel_degree": config.context.context_parallel_degree,
    }
    divided = (f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return ", ".join([config.sharding.sharding_strategy, *divided])


def kind_of(points: Sequence[Point]) -> str:
    """Return strong or weak. Raises DataError for neither, and where more than the count of devices differs."""
    first = points[0]
    for point in points[1:]:
        for key, value in first.same.items():
            if point.same[key] != value:
                raise DataError(
                    f"{key} is {value} in {first.where} and {point.same[key]} in {point.where}: not one table"
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


def describe(kind: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return rows. `speed_up` is over the smallest count, `efficiency` is its share of the ideal speed-up."""
    base = points[0]
    return [
        {
            "kind": kind,
            "num_devices": point.num_devices,
            "batch_size": point.batch_size,
            "seconds": point.seconds,
            "tokens_per_second": (rate := point.tokens_per_step / point.seconds),
            "flops_per_device": (flops := point.flops_per_step / point.seconds / point.num_devices),
            "mfu": point.peak_flops and flops / point.peak_flops,
            "speed_up": (speed_up := rate / (base.tokens_per_step / base.seconds)),
            "efficiency": speed_up * base.num_devices / point.num_devices,
            "config": point.config,
        }
        for point in points
    ]


def build_table(report: dict[str, Any]) -> Table:
    products, share = report["products_flops_per_sec"], list[frame.Column]()
    if any(row["mfu"] for row in report["rows"]):
        share = [("MFU", "{mfu:.1%}")]
    elif products:
        share = [("of its products", lambda row: f"{row['flops_per_device'] / products:.1%}")]
    columns: list[frame.Column] = [
        *(("scaling", "{kind}"), ("devices", "{num_devices:,}"), ("samples", "{batch_size:,}")),
        *(("seconds", "{seconds:.3f}"), ("tokens/s", "{tokens_per_second:,.0f}")),
        ("GFLOP/s a device", lambda row: f"{row['flops_per_device'] / 1e9:,.1f}"),
        *(*share, ("speed-up", "{speed_up:.2f}"), ("efficiency", "{efficiency:.1%}")),
    ]
    steps = f", the median of {report['num_steps']} steps" if report["num_steps"] else ""
    return frame.tabulate(f"{build_title(report)}{steps}", columns, report["rows"], num_keys=3)


def build_title(report: dict[str, Any]) -> str:
    return (
        f"{report['num_parameters']:,} parameters, sequences of {report['seq_len']:,}, {report['precision']}, "
        f"{report['sharding']}, {report['device_name'] or 'an unknown device'}"
    )


def build_notes(report: dict[str, Any]) -> list[str]:
    notes = [PUBLISHED]
    cores, most = count_usable_cores(), max(row["num_devices"] for row in report["rows"])
    if report["products_flops_per_sec"]:
        notes.append(f"One device multiplies at {report['products_flops_per_sec'] / 1e9:,.1f} GFLOP/s alone.")
        if device_type() == "cpu":
            threads = os.environ.get("OMP_NUM_THREADS")
            notes.append(f"A device is a rank over gloo with {threads} thread. {cores} cores may be used.")
            if most > cores:
                notes.append(f"{most} ranks share {cores} cores: their efficiency is at most {cores / most:.0%}.")
    return notes


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw each count's rate per device, with the efficiency (left), and the speed-up (right)."""
    counts = sorted({row["num_devices"] for row in report["rows"]})
    with frame.drawn(path, 2, (10, 3.8), build_title(report)) as (rates, ups):
        ups.plot(counts, [n / counts[0] for n in counts], "--", color="#8c8c8c", label="ideal")
        for kind in dict.fromkeys(row["kind"] for row in report["rows"]):
            rows = [row for row in report["rows"] if row["kind"] == kind]
            x, y = [row["num_devices"] for row in rows], [row["flops_per_device"] / 1e9 for row in rows]
            line = {"color": COLOURS[kind], "marker": "o", "label": f"{kind} scaling"}
            rates.plot(x, y, **line)
            ups.plot(x, [row["speed_up"] for row in rows], **line)
            offset, style = (0, 8 if kind == STRONG else -14), {"ha": "center", "fontsize": 8, "color": COLOURS[kind]}
            for row, *place in zip(rows, x, y, strict=True):
                rates.annotate(f"{row['efficiency']:.0%}", place, offset, textcoords="offset points", **style)
        frame.label_axes(rates, counts, "devices", "model GFLOP/s of a device")
        frame.label_axes(ups, counts, "devices", f"speed-up over {counts[0]} device(s)", from_zero=False)
        rates.set_ylim(0, 1.2 * max(row["flops_per_device"] for row in report["rows"]) / 1e9)
        ups.set_yscale("log", base=2)
        ups.set_yticks([n / counts[0] for n in counts], [f"{n / counts[0]:g}" for n in counts])
        ups.legend(frameon=False, fontsize=9)
