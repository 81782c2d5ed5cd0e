"""Hardware, speed, energy and cost of each span of batches.

The spans are the segments of the newest checkpoint's manifest; their numbers come from metrics.jsonl, the last line of
each batch:

    tokens       differences of `time/token`
    tokens/s     these over the sum of `time/batch_seconds`: between ends of batches, evaluation left out
    hours        `time/elapsed_seconds` of each launch, from the start of its first batch here to the end of its last:
                 evaluation and saves between them included, start-up not
    MFU          tokens/s times `throughput/device/mfu` of a token; only if the run has computed it
    energy       the sum of `energy/joules`, if each batch has it (from the end of the batch before it on);
                 else rated power of the device's row in `hardware.py` x devices x hours; hosts are not in it
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
from llmfoundry_lite.report.reading import ELAPSED, FLOPS, JOULES, MFU, RATE, SECONDS, Log, Run

Facts = dict[str, Any]
"""Facts as report.json has them; None is unknown."""


def segment_facts(run: Run, prices: Mapping[str, float]) -> list[Facts]:
    """Return facts of each segment, and of the batches trained since the newest save, whose place is unknown."""
    segments = list(run.segments)
    if segments and run.log.batch[-1] > segments[-1].last_batch:
        segments.append(Segment(first_batch=segments[-1].last_batch + 1, last_batch=int(run.log.batch[-1])))
    return [measure(run.log, segment, prices) for segment in segments]


def measure(log: Log, segment: Segment, prices: Mapping[str, float]) -> Facts:
    """Return the facts of one segment."""
    here = log.within(segment.first_batch, segment.last_batch)
    tokens, seconds = log.tokens[here], log.numbers(SECONDS)[here]
    hours, num_devices = elapsed_hours(log, here), segment.num_devices
    timed = np.isfinite(tokens) & np.isfinite(seconds)
    rate = None
    if num_devices and timed.any() and seconds[timed].sum() > 0:
        rate = float(tokens[timed].sum() / seconds[timed].sum()) / num_devices
    row = accelerator_of(log, segment)
    price = next((prices[name] for name in names_of(segment, row) if name in prices), None)
    device_hours = hours * num_devices if hours is not None and num_devices else None
    joules, source = float(log.numbers(JOULES)[here].sum()), "measured"
    if not joules > 0 or segment.islands:  # NaN: some batch has none. The log has the energy of its own island alone.
        joules, source = None, None
        if row and device_hours is not None:
            joules, source = row.power_watts * device_hours * 3600, "rated"
    recorded = (
        *("first_batch", "last_batch", "vendor", "device", "num_devices", "world_size", "sync", "precision"),
        *("attention", "torch", "runtime", "driver", "compile_config", "environment", "changes"),
    )
    fact = {
        **{name: getattr(segment, name) for name in recorded},
        "computed_with": replace(segment, changes={}).computed_with,  # changes have a line of their own
        "sharding": segment.sharding_in_words,
        "microbatch_size": segment.device_train_microbatch_size,
        "tokens": int(np.nansum(tokens)) if np.isfinite(tokens).any() else None,
        "tokens_per_second_per_device": rate,
        "mfu": rate * mfu_per_rate(log, here, num_devices) if rate and num_devices and row else None,
        "hours": hours,
        "device_hours": device_hours,
        "energy_kwh": None if joules is None else joules / 3.6e6,
        "energy_source": source,
        "cost": price * device_hours if price is not None and device_hours is not None else None,
    }
    return per_token(fact)


def total(facts: Sequence[Facts]) -> Facts:
    """Return sums over the segments, None if a part is unknown, and what they come to for each token."""
    summed = ("tokens", "hours", "device_hours", "energy_kwh", "cost")
    columns = {name: [fact[name] for fact in facts] for name in summed}
    sums: Facts = {name: sum(parts) if parts and None not in parts else None for name, parts in columns.items()}
    sources = sorted({fact["energy_source"] for fact in facts} - {None})
    return per_token({**sums, "energy_source": " and ".join(sources) if sums["energy_kwh"] is not None else None})


def per_token(fact: Facts) -> Facts:
    """Add joules a token and the cost of a million tokens, where they are known."""
    tokens, kwh, cost = fact["tokens"], fact["energy_kwh"], fact["cost"]
    return {
        **fact,
        "joules_per_token": kwh * 3.6e6 / tokens if tokens and kwh is not None else None,
        "cost_per_million_tokens": cost * 1e6 / tokens if tokens and cost is not None else None,
    }


def elapsed_hours(log: Log, here: slice) -> float | None:
    """Sum the hours of each launch from the start of its first batch here; None where no clock was logged."""
    launches, elapsed, seconds = log.launch[here], log.numbers(ELAPSED)[here], log.numbers(SECONDS)[here]
    hours = 0.0
    for launch in np.unique(launches):
        clock, batches = elapsed[launches == launch], seconds[launches == launch]
        if np.isfinite(clock).any() and np.isfinite(batches).any():
            start = int(np.flatnonzero(np.isfinite(clock))[0])
            hours += (np.nanmax(clock) - clock[start] + np.nan_to_num(batches[start])) / 3600
    return float(hours) or None


# ----------------------------------------------------------------------------------------------- what a device is


def accelerator_of(log: Log, segment: Segment) -> Accelerator | None:
    """Find the row of the table by whose peak the run computed its MFU."""
    here = log.within(segment.first_batch, segment.last_batch)
    flops, mfu = log.numbers(FLOPS)[here], log.numbers(MFU)[here]
    known = np.flatnonzero(np.isfinite(flops) & np.isfinite(mfu) & (mfu > 0))
    if not len(known) or segment.device is None or segment.precision is None:
        return None
    peak = flops[known[-1]] / mfu[known[-1]]
    dtype = segment.precision.split()[0].removeprefix("amp_")
    for row in ACCELERATORS.values():
        if re.fullmatch(row.pattern, segment.device) and abs((row.peak_flops(dtype) or 0) / peak - 1) < 1e-3:
            return row
    return None


def mfu_per_rate(log: Log, here: slice, num_devices: int) -> float:
    """Return the MFU of one token per second and device: the same for all batches of a model on a device."""
    mfu, rate = log.numbers(MFU)[here], log.numbers(RATE)[here]
    known = np.flatnonzero(np.isfinite(mfu) & (rate > 0))
    return float(mfu[known[-1]] / (rate[known[-1]] / num_devices))


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NVIDIA H100 80GB HBM3=2.5` as its price per device-hour. Raises ConfigError."""
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


def names_of(segment: Segment, row: Accelerator | None) -> list[str]:
    """Return names by which a price may call a device: torch's, the table's, or `cpu`."""
    names = [segment.device, row.name if row else None, "cpu" if segment.vendor == "cpu" else None]
    return [name for name in names if name]


def unused_prices(runs: Sequence[Run], prices: Mapping[str, float]) -> list[str]:
    """Return devices with a price on which no segment ran: their names may be misspelt."""
    segments = [(run.log, segment) for run in runs for segment in run.segments]
    used = {name for log, segment in segments for name in names_of(segment, accelerator_of(log, segment))}
    return [name for name in prices if name not in used]


# -------------------------------------------------------------------------------------------------- what is drawn


def spans_of(facts: Sequence[Facts]) -> list[Span]:
    """Return the spans that the figure shades: neighbours of one kind are merged.

    A label is `8 x H100-80GB · FULL_SHARD · amp_bf16 PURE`, with details where two kinds would share one.
    """
    bases = [base_label(fact) for fact in facts]
    details = [
        [str(fact[name] or f"{name} not known") for name in ("device", "torch", "runtime", "attention")]
        + ["not compiled" if fact["compile_config"] is None else "compiled"]
        for fact in facts
    ]
    spans: list[Span] = []
    for fact, base, own in zip(facts, bases, details, strict=True):
        alike = [other for other, its_base in zip(details, bases, strict=True) if its_base == base]
        telling = [word for i, word in enumerate(own) if any(other[i] != word for other in alike)]
        label = " · ".join([base, *telling])
        if spans and spans[-1].label == label and spans[-1].last_batch + 1 == fact["first_batch"]:
            spans[-1] = replace(spans[-1], last_batch=fact["last_batch"])
        else:
            spans.append(Span(fact["first_batch"], fact["last_batch"], label))
    return spans


def changes_of(facts: Sequence[Facts]) -> list[tuple[int, str]]:
    """Return each first batch with other settings than before, and `optimizer.lr 0.0006 -> 1e-05`."""
    return [
        (fact["first_batch"], ", ".join(str(Change(key, *values)) for key, values in fact["changes"].items()))
        for fact in facts
        if fact["changes"]
    ]


def base_label(fact: Facts) -> str:
    if fact["vendor"] is None and fact["device"] is None:
        return "since the last save"
    rows = [row.name for row in ACCELERATORS.values() if re.fullmatch(row.pattern, fact["device"] or "")]
    device = rows[0] if len(rows) == 1 else fact["device"] or fact["vendor"]
    words = [
        "cpu" if fact["vendor"] == "cpu" else device,
        fact["sharding"],
        short_precision(fact["precision"]),
        fact["sync"],
    ]
    return f"{fact['num_devices'] or '?'} x {' · '.join(filter(None, words))}"


def short_precision(precision: str | None) -> str | None:
    """Drop the mode of fp32 and tf32, where all modes are the same."""
    first = precision.split()[0] if precision else None
    return first if first in ("fp32", "tf32") else precision
