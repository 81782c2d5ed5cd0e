"""Hardware, speed, energy and cost of each segment of a run: a span of batches on one kind of hardware.

The newest checkpoint's manifest says where the segments begin and end. Their numbers come from metrics.jsonl, from the
last line of each batch:

    tokens       differences of `time/token`
    tokens/s     tokens over the sum of `time/batch_seconds`: between ends of batches, without evaluation
    hours        `time/elapsed_seconds` of each launch, from the start of its first batch of the segment to the end of
                 its last: with evaluation and saves between them, without start-up
    MFU          tokens/s times `throughput/device/mfu` of a token; only if the run has computed it
    energy       the sum of `energy/joules`, if each batch has it (from the end of the batch before it on);
                 otherwise rated power of the device's row in `hardware.py` x devices x hours; hosts are not included
    cost         the user's price of a device-hour x devices x hours

A device counts as known if the run computed an MFU with the peak of its row. A slice of a card has the name of the
whole card. It has neither MFU nor a rated energy, and nor has a device that is not in the table.

`segment_facts` computes the facts of all segments, and `sum_segments` their totals. The functions below identify the
device of a segment, and describe segments for figures.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.config.changes import Change
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator
from llmfoundry_lite.report.figure import Span
from llmfoundry_lite.report.log import ELAPSED, FLOPS, JOULES, MFU, RATE, SECONDS, Log
from llmfoundry_lite.report.reading import Run

Facts = dict[str, Any]
"""Facts as report.json has them; None is unknown."""

JOULES_PER_KWH = 3.6e6
PEAK_TOLERANCE = 1e-3
"""Relative difference up to which a peak computed from a log counts as that of the table. It covers rounding."""


def segment_facts(run: Run, prices: Mapping[str, float]) -> list[Facts]:
    """Return the facts of each segment of a run, as report.json has them.

    The newest checkpoint's manifest says where batches ran. Batches that were trained after it form a last segment on
    unknown hardware: with a checkpoint of batch 50 and a log up to batch 53, its batches are 51 to 53. Without a
    checkpoint, there are no segments. `prices` maps a device's name to its price per hour.
    """
    segments = list(run.segments)
    last_batch = int(run.log.batch[-1])
    if segments and last_batch > segments[-1].last_batch:
        segments.append(Segment(first_batch=segments[-1].last_batch + 1, last_batch=last_batch))
    return [measure_segment(run.log, segment, prices) for segment in segments]


SEGMENT_FIELDS = (
    *("first_batch", "last_batch", "vendor", "device", "num_devices", "world_size", "sync", "precision"),
    *("attention", "torch", "runtime", "driver", "compile_config", "environment", "changes"),
)
"""Fields of a manifest's segment that report.json has under the same names."""


def measure_segment(log: Log, segment: Segment, prices: Mapping[str, float]) -> Facts:
    """Return the facts of one segment: what the manifest says of it, and what the log says of its batches.

    `prices` maps a device's name to its price per hour. A number that the log does not give is None. The module's
    docstring says how each number is computed.
    """
    rows = log.within(segment.first_batch, segment.last_batch)
    tokens = log.tokens[rows]
    batch_seconds = log.numbers(SECONDS)[rows]
    num_devices = segment.num_devices
    accelerator = accelerator_of(log, segment)

    # Speed, over the batches for which both the tokens and the time are known.
    is_timed = np.isfinite(tokens) & np.isfinite(batch_seconds)
    timed_seconds = batch_seconds[is_timed].sum()
    tokens_per_second_per_device = None
    mfu = None
    if num_devices and timed_seconds > 0:
        tokens_per_second_per_device = float(tokens[is_timed].sum() / timed_seconds) / num_devices
        mfu_per_token_per_second = mfu_per_token_rate(log, rows, num_devices)
        if tokens_per_second_per_device and accelerator and mfu_per_token_per_second is not None:
            mfu = tokens_per_second_per_device * mfu_per_token_per_second

    # Energy and cost, over all of the segment's time.
    hours = elapsed_hours(log, rows)
    device_hours = hours * num_devices if hours is not None and num_devices else None
    joules, energy_source = measure_energy(log, segment, accelerator, device_hours)
    known_prices = [prices[name] for name in price_names(segment, accelerator) if name in prices]
    cost = None
    if known_prices and device_hours is not None:
        cost = known_prices[0] * device_hours

    facts: Facts = {name: getattr(segment, name) for name in SEGMENT_FIELDS}
    facts |= {
        "computed_with": replace(segment, changes={}).computed_with,  # a report shows changes on lines of their own
        "sharding": segment.sharding_in_words,
        "microbatch_size": segment.device_train_microbatch_size,
        "tokens": int(np.nansum(tokens)) if np.isfinite(tokens).any() else None,
        "tokens_per_second_per_device": tokens_per_second_per_device,
        "mfu": mfu,
        "hours": hours,
        "device_hours": device_hours,
        "energy_kwh": None if joules is None else joules / JOULES_PER_KWH,
        "energy_source": energy_source,
        "cost": cost,
    }
    return add_ratios(facts)


def measure_energy(
    log: Log, segment: Segment, accelerator: Accelerator | None, device_hours: float | None
) -> tuple[float | None, str | None]:
    """Return a segment's energy in joules and its source, "measured" or "rated"; (None, None) if it is unknown.

    The energy is measured if the log has a measurement of every batch. An exception is a run that several islands
    (groups of ranks, each with a log of its own) trained together, because each log has the energy of its own island
    alone. Otherwise the energy is rated: the accelerator's power times the device-hours, of 400 W and 10 device-hours
    for example 400 * 10 * 3600 J.
    """
    rows = log.within(segment.first_batch, segment.last_batch)
    measured_joules = float(log.numbers(JOULES)[rows].sum())  # NaN if a batch has none
    if measured_joules > 0 and not segment.islands:
        return measured_joules, "measured"
    if accelerator and device_hours is not None:
        return accelerator.power_watts * device_hours * 3600, "rated"
    return None, None


def sum_segments(segments: Sequence[Facts]) -> Facts:
    """Return the totals of a run's segments: tokens, time, energy, cost, and the ratios of these.

    A total is None if the number is unknown for any segment, or if there are no segments. The source of the energy is
    "measured", "rated", or "measured and rated" if the segments differ.
    """
    totals: Facts = {}
    for name in ("tokens", "hours", "device_hours", "energy_kwh", "cost"):
        segment_values = [segment[name] for segment in segments]
        is_known = bool(segment_values) and None not in segment_values
        totals[name] = sum(segment_values) if is_known else None

    energy_sources = sorted({segment["energy_source"] for segment in segments} - {None})
    totals["energy_source"] = " and ".join(energy_sources) if totals["energy_kwh"] is not None else None
    return add_ratios(totals)


def add_ratios(facts: Facts) -> Facts:
    """Return `facts` with two more: joules per token, and the cost of a million tokens; each None if it is unknown."""
    tokens = facts["tokens"]
    kwh = facts["energy_kwh"]
    cost = facts["cost"]
    return {
        **facts,
        "joules_per_token": kwh * JOULES_PER_KWH / tokens if tokens and kwh is not None else None,
        "cost_per_million_tokens": cost * 1e6 / tokens if tokens and cost is not None else None,
    }


def elapsed_hours(log: Log, rows: slice) -> float | None:
    """Return the hours that `rows` of a log took, summed over launches; None if no launch logged its clock.

    A launch's clock (`time/elapsed_seconds`) starts with the launch and is logged at the end of each batch. So the time
    is the difference of the clock between the ends of the first and of the last batch in `rows`, plus the first batch's
    own seconds. A launch whose batches end at 70, 90 and 150 s, and whose first batch takes 10 s, takes 90 s: the
    start-up of 60 s does not count, and an evaluation after the second batch does.
    """
    launches = log.launch[rows]
    clock_seconds = log.numbers(ELAPSED)[rows]
    batch_seconds = log.numbers(SECONDS)[rows]

    hours = 0.0
    for launch in np.unique(launches):
        launch_clock = clock_seconds[launches == launch]
        launch_batch_seconds = batch_seconds[launches == launch]
        timed = np.flatnonzero(np.isfinite(launch_clock))
        if len(timed) and np.isfinite(launch_batch_seconds).any():
            first = timed[0]
            seconds = np.nanmax(launch_clock) - launch_clock[first] + np.nan_to_num(launch_batch_seconds[first])
            hours += seconds / 3600
    return float(hours) or None


# ----------------------------------------------------------------------------------------------- what a device is


def accelerator_of(log: Log, segment: Segment) -> Accelerator | None:
    """Find the row of the hardware table for the device that a segment ran on.

    The device's name must match the row, and so must the peak FLOP/s with which the run computed its MFU, because a
    slice of a card has the name of the whole card, but not its peak. The peak follows from the log: a device that
    reaches 400 TFLOP/s at an MFU of 40 % has a peak of 1,000 TFLOP/s.

    Returns None if the log has no MFU, or if no row matches.
    """
    rows = log.within(segment.first_batch, segment.last_batch)
    flops_per_second = log.numbers(FLOPS)[rows]
    mfu = log.numbers(MFU)[rows]
    with_mfu = np.flatnonzero(np.isfinite(flops_per_second) & np.isfinite(mfu) & (mfu > 0))
    if not len(with_mfu) or segment.device is None or segment.precision is None:
        return None

    logged_peak = flops_per_second[with_mfu[-1]] / mfu[with_mfu[-1]]
    dtype = segment.precision.split()[0].removeprefix("amp_")  # "amp_bf16 PURE" -> "bf16"
    for accelerator in ACCELERATORS.values():
        table_peak = accelerator.peak_flops(dtype) or 0
        is_same_peak = abs(table_peak / logged_peak - 1) < PEAK_TOLERANCE
        if re.fullmatch(accelerator.pattern, segment.device) and is_same_peak:
            return accelerator
    return None


def mfu_per_token_rate(log: Log, rows: slice, num_devices: int) -> float | None:
    """Return the MFU of a device that trains one token per second, by which a rate is converted into an MFU.

    It is the same for all batches of one model, because MFU is proportional to the rate. So it is computed from the
    last of `rows` that has both: an MFU of 0.4 at 160,000 tokens/s on 8 devices gives 0.4 / 20,000. None if no row has
    both, as in another program's log.
    """
    mfu = log.numbers(MFU)[rows]
    tokens_per_second = log.numbers(RATE)[rows]  # of all devices
    with_both = np.flatnonzero(np.isfinite(mfu) & (tokens_per_second > 0))
    if not len(with_both):
        return None
    return float(mfu[with_both[-1]] / (tokens_per_second[with_both[-1]] / num_devices))


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse the values of `--price` into a dictionary from a device's name to its price per hour.

    ["NVIDIA H100 80GB HBM3=2.5", "cpu = 0.05"] becomes {"NVIDIA H100 80GB HBM3": 2.5, "cpu": 0.05}. A name may contain
    "=": the last one separates it from the price. Raises ConfigError if a name is missing, or if a price is not a
    finite number of at least 0.
    """
    prices = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0  # refused below, like a negative price
        if not name.strip() or not 0 <= price < float("inf"):
            raise ConfigError(
                f'--price: {text!r} given, expected DEVICE=PRICE per device-hour, as in --price "cpu=0.05"'
            )
        prices[name.strip()] = price
    return prices


def price_names(segment: Segment, accelerator: Accelerator | None) -> list[str]:
    """Return the names by which `--price` may call a segment's device, in the order in which they are looked up.

    For an H100 they are PyTorch's name and the one in the hardware table: ["NVIDIA H100 80GB HBM3", "H100-80GB"]. Any
    CPU is also called "cpu".
    """
    names = [segment.device]
    if accelerator is not None:
        names.append(accelerator.name)
    if segment.vendor == "cpu":
        names.append("cpu")
    return [name for name in names if name]


def unused_prices(runs: Sequence[Run], prices: Mapping[str, float]) -> list[str]:
    """Return the devices that have a price and on which no segment of any run ran, because a name may be misspelt."""
    names_in_use: set[str] = set()
    for run in runs:
        for segment in run.segments:
            names_in_use.update(price_names(segment, accelerator_of(run.log, segment)))
    return [name for name in prices if name not in names_in_use]


# -------------------------------------------------------------------------------------------------- what is drawn


def visible_spans(segments: Sequence[Facts]) -> list[Span]:
    """Return the spans of batches that a figure shades in different colours, each with its label.

    A label is `8 x H100-80GB · FULL_SHARD · amp_bf16 PURE`. If segments that differ would have the same label, it also
    has the details in which they differ. Two segments on one CPU, with torch 2.7.0 and 2.8.0, have the labels
    `1 x cpu · fp32 · 2.7.0` and `1 x cpu · fp32 · 2.8.0`. Adjacent segments with one label become one span.
    """
    labels = [hardware_label(segment) for segment in segments]
    details = [hardware_details(segment) for segment in segments]

    spans: list[Span] = []
    for segment, label, segment_details in zip(segments, labels, details, strict=True):
        # Complete the label by each detail that is different in some segment with the same label.
        details_with_label = [
            other_details for other_details, other_label in zip(details, labels, strict=True) if other_label == label
        ]
        words = [label]
        for i, detail in enumerate(segment_details):
            if any(other_details[i] != detail for other_details in details_with_label):
                words.append(detail)
        full_label = " · ".join(words)

        # Extend the last span, or begin another one.
        has_same_label = bool(spans) and spans[-1].label == full_label
        if has_same_label and spans[-1].last_batch + 1 == segment["first_batch"]:
            spans[-1] = replace(spans[-1], last_batch=segment["last_batch"])
        else:
            spans.append(Span(segment["first_batch"], segment["last_batch"], full_label))
    return spans


def changes_of(segments: Sequence[Facts]) -> list[tuple[int, str]]:
    """Return the batches at which settings of a run changed, each with a description of the changes.

    An item is for instance (101, "optimizer.lr 0.0006 -> 1e-05"): batch 101 was the first with the new learning rate.
    Several changes at one batch are joined by commas.
    """
    changes = []
    for segment in segments:
        if segment["changes"]:
            texts = [str(Change(key, *values)) for key, values in segment["changes"].items()]
            changes.append((segment["first_batch"], ", ".join(texts)))
    return changes


def hardware_label(segment: Facts) -> str:
    """Return a short label of a segment's devices, sharding and precision, such as `8 x H100-80GB · FULL_SHARD · fp32`.

    The device has its short name from the hardware table, if exactly one row matches its name. The batches after the
    newest checkpoint, whose hardware is unknown, have the label "since the last save".
    """
    vendor = segment["vendor"]
    device_name = segment["device"]
    if vendor is None and device_name is None:
        return "since the last save"

    matches = [row.name for row in ACCELERATORS.values() if re.fullmatch(row.pattern, device_name or "")]
    if vendor == "cpu":
        device = "cpu"
    elif len(matches) == 1:
        device = matches[0]
    else:
        device = device_name or vendor
    words = [device, segment["sharding"], short_precision(segment["precision"]), segment["sync"]]
    return f"{segment['num_devices'] or '?'} x {' · '.join(filter(None, words))}"


def hardware_details(segment: Facts) -> list[str]:
    """Return the properties that tell segments of one label apart, in a fixed order.

    These are the device, the releases of torch and of CUDA or ROCm, the attention implementation, and whether the model
    was compiled. An unknown property is for instance "torch not known".
    """
    details = [str(segment[name] or f"{name} not known") for name in ("device", "torch", "runtime", "attention")]
    details.append("not compiled" if segment["compile_config"] is None else "compiled")
    return details


def short_precision(precision: str | None) -> str | None:
    """Shorten a precision such as `fp32 PURE` to `fp32`, because all modes of fp32 and tf32 are the same.

    Other precisions, such as `amp_bf16 PURE`, and None are returned as they are.
    """
    dtype = precision.split()[0] if precision else None
    return dtype if dtype in ("fp32", "tf32") else precision
