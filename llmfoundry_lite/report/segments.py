"""Hardware, speed, energy and cost of each span of batches.

The spans are the segments of the newest checkpoint's manifest; their numbers come from metrics.jsonl, the last line of
each batch:

    tokens       differences of `time/token`
    tokens/s     these over the sum of `time/batch_seconds`: between ends of batches, evaluation left out
    hours        `time/elapsed_seconds` of each launch, from the start of its first batch of the segment to the end of
                 its last: evaluation and saves between them included, start-up not
    MFU          tokens/s times `throughput/device/mfu` of a token; only if the run has computed it
    energy       the sum of `energy/joules`, if each batch has it (from the end of the batch before it on);
                 else rated power of the device's row in `hardware.py` x devices x hours; hosts are not included
    cost         the user's price of a device-hour x devices x hours

A device counts as known when the run computed an MFU with the peak of its row. A slice of a card, which bears the name
of the whole, and a device that is not in the table have neither MFU nor a rated energy.
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
    unknown hardware. `prices` maps a device's name to its price per hour.
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
    seconds = log.numbers(SECONDS)[rows]
    num_devices = segment.num_devices
    accelerator = accelerator_of(log, segment)

    is_timed = np.isfinite(tokens) & np.isfinite(seconds)
    timed_seconds = seconds[is_timed].sum()
    tokens_per_second = None  # of one device
    mfu = None
    if num_devices and timed_seconds > 0:
        tokens_per_second = float(tokens[is_timed].sum() / timed_seconds) / num_devices
        mfu_of_one = mfu_per_token_rate(log, rows, num_devices)
        if tokens_per_second and accelerator and mfu_of_one is not None:
            mfu = tokens_per_second * mfu_of_one

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
        "tokens_per_second_per_device": tokens_per_second,
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
    """Return a segment's energy in joules and its source: "measured", "rated", or None if the energy is unknown.

    The log's measurements count if every batch has one. Those of a run that several islands trained together do not,
    because each island's log has its own energy alone. Rated energy is the accelerator's power over all device-hours.
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

    A total is None if the number is unknown for any segment, or if there are no segments.
    """
    totals: Facts = {}
    for name in ("tokens", "hours", "device_hours", "energy_kwh", "cost"):
        parts = [segment[name] for segment in segments]
        totals[name] = sum(parts) if parts and None not in parts else None

    energy_sources = sorted({segment["energy_source"] for segment in segments} - {None})
    totals["energy_source"] = " and ".join(energy_sources) if totals["energy_kwh"] is not None else None
    return add_ratios(totals)


def add_ratios(facts: Facts) -> Facts:
    """Return the facts with joules per token and the cost of a million tokens, each None where it is unknown."""
    tokens, kwh, cost = facts["tokens"], facts["energy_kwh"], facts["cost"]
    return {
        **facts,
        "joules_per_token": kwh * JOULES_PER_KWH / tokens if tokens and kwh is not None else None,
        "cost_per_million_tokens": cost * 1e6 / tokens if tokens and cost is not None else None,
    }


def elapsed_hours(log: Log, rows: slice) -> float | None:
    """Return the hours that `rows` of a log took, summed over launches; None if no launch logged its clock.

    A launch's clock (`time/elapsed_seconds`) starts with the launch and is logged at the end of each batch. So the time
    runs from its first batch in `rows`, whose own seconds are added, to its last.
    """
    launches = log.launch[rows]
    elapsed = log.numbers(ELAPSED)[rows]
    batch_seconds = log.numbers(SECONDS)[rows]

    hours = 0.0
    for launch in np.unique(launches):
        launch_elapsed = elapsed[launches == launch]
        launch_batch_seconds = batch_seconds[launches == launch]
        timed = np.flatnonzero(np.isfinite(launch_elapsed))
        if len(timed) and np.isfinite(launch_batch_seconds).any():
            first = timed[0]
            seconds = np.nanmax(launch_elapsed) - launch_elapsed[first] + np.nan_to_num(launch_batch_seconds[first])
            hours += seconds / 3600
    return float(hours) or None


# ----------------------------------------------------------------------------------------------- what a device is


def accelerator_of(log: Log, segment: Segment) -> Accelerator | None:
    """Find the row of the hardware table for the device that a segment ran on.

    The device's name must match the row, and so must the peak FLOP/s that the run computed its MFU with: a slice of a
    card has the name of the whole card, but not its peak. None if the log has no MFU, or no row matches.
    """
    rows = log.within(segment.first_batch, segment.last_batch)
    flops_per_second = log.numbers(FLOPS)[rows]
    mfu = log.numbers(MFU)[rows]
    known = np.flatnonzero(np.isfinite(flops_per_second) & np.isfinite(mfu) & (mfu > 0))
    if not len(known) or segment.device is None or segment.precision is None:
        return None

    peak = flops_per_second[known[-1]] / mfu[known[-1]]
    dtype = segment.precision.split()[0].removeprefix("amp_")
    for accelerator in ACCELERATORS.values():
        table_peak = accelerator.peak_flops(dtype) or 0
        is_same_peak = abs(table_peak / peak - 1) < PEAK_TOLERANCE
        if re.fullmatch(accelerator.pattern, segment.device) and is_same_peak:
            return accelerator
    return None


def mfu_per_token_rate(log: Log, rows: slice, num_devices: int) -> float | None:
    """Return the MFU that one token per second on each device is worth: the same for all batches of one model.

    It is computed from the last of `rows` with an MFU and a rate. None if no row has both, as in another program's log.
    """
    mfu = log.numbers(MFU)[rows]
    tokens_per_second = log.numbers(RATE)[rows]  # of all devices
    known = np.flatnonzero(np.isfinite(mfu) & (tokens_per_second > 0))
    if not len(known):
        return None
    return float(mfu[known[-1]] / (tokens_per_second[known[-1]] / num_devices))


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse texts such as `NVIDIA H100 80GB HBM3=2.5` into a dictionary from a device's name to its price per hour.

    Raises ConfigError if a name is missing, or a price is not a number from 0 on.
    """
    prices = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not name.strip() or not 0 <= price < float("inf"):
            raise ConfigError(
                f'--price: {text!r} given, expected DEVICE=PRICE per device-hour, as in --price "cpu=0.05"'
            )
        prices[name.strip()] = price
    return prices


def price_names(segment: Segment, accelerator: Accelerator | None) -> list[str]:
    """Return the names by which `--price` may call a segment's device: PyTorch's, that of the hardware table, or
    `cpu`."""
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

    A label is `8 x H100-80GB · FULL_SHARD · amp_bf16 PURE`. Where segments that differ would have the same label, it
    also has the details in which they differ. Adjacent segments with one label become one span.
    """
    labels = [hardware_label(segment) for segment in segments]
    details = [hardware_details(segment) for segment in segments]

    spans: list[Span] = []
    for segment, label, own_details in zip(segments, labels, details, strict=True):
        same_label = [other for other, other_label in zip(details, labels, strict=True) if other_label == label]
        words = [label]
        for i, word in enumerate(own_details):
            if any(other[i] != word for other in same_label):
                words.append(word)
        full_label = " · ".join(words)

        is_continued = bool(spans) and spans[-1].label == full_label
        if is_continued and spans[-1].last_batch + 1 == segment["first_batch"]:
            spans[-1] = replace(spans[-1], last_batch=segment["last_batch"])
        else:
            spans.append(Span(segment["first_batch"], segment["last_batch"], full_label))
    return spans


def changes_of(segments: Sequence[Facts]) -> list[tuple[int, str]]:
    """Return where settings of a run changed: the first batch with other settings, and these as text.

    A text is `optimizer.lr 0.0006 -> 1e-05`; several changes at one batch are joined by commas.
    """
    changes = []
    for segment in segments:
        if segment["changes"]:
            texts = [str(Change(key, *values)) for key, values in segment["changes"].items()]
            changes.append((segment["first_batch"], ", ".join(texts)))
    return changes


def hardware_label(segment: Facts) -> str:
    """Return a short label of a segment's devices, sharding and precision, such as `8 x H100-80GB · FULL_SHARD · fp32`.

    The device has its short name from the hardware table, if exactly one row matches its name.
    """
    vendor, device_name = segment["vendor"], segment["device"]
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
    """Return the properties that tell segments of one label apart: device, releases, attention, and compiled or not."""
    details = [str(segment[name] or f"{name} not known") for name in ("device", "torch", "runtime", "attention")]
    details.append("not compiled" if segment["compile_config"] is None else "compiled")
    return details


def short_precision(precision: str | None) -> str | None:
    """Shorten a precision such as `fp32 PURE` to `fp32`, because all modes of fp32 and tf32 are the same.

    Other precisions, such as `amp_bf16 PURE`, and None are returned as they are.
    """
    dtype = precision.split()[0] if precision else None
    return dtype if dtype in ("fp32", "tf32") else precision
