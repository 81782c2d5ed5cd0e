"""Where each span of batches of a run ran, how fast, and what it took: energy and cost.

The spans are the segments of the newest checkpoint's manifest; their numbers come from metrics.jsonl, of each batch
the last line:

    tokens       differences of `time/token`
    tokens/s     these over the sum of `time/batch_seconds`: between ends of batches, evaluation left out
    hours        `time/elapsed_seconds` of each launch, from the start of its first batch here to the end of its last:
                 evaluation and saves between them included, start-up not
    MFU          tokens/s times what `throughput/device/mfu` says of a token; only where the run has reckoned with it
    energy       rated power of the device's row in `hardware.py` x devices x hours; hosts are not in it
    cost         the user's price of a device-hour x devices x hours

A device counts as known when the run reckoned an MFU with the peak of its row: a slice of a card, which bears the name
of the whole, and a device that is not in the table have neither MFU nor energy.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator
from llmfoundry_lite.report.reading import ELAPSED, FLOPS, MFU, RATE, SECONDS, Log, Run
from llmfoundry_lite.report.run_figures import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFacts:
    """None is what is not known."""

    first_batch: int
    last_batch: int
    vendor: str | None = None
    device: str | None = None
    num_devices: int | None = None
    world_size: int | None = None
    sharding: str | None = None
    """With the shard degree of HYBRID_SHARD."""
    precision: str | None = None
    attention: str | None = None
    torch: str | None = None
    runtime: str | None = None
    driver: str | None = None
    compile_config: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    microbatch_size: int | None = None
    computed_with: list[str] = field(default_factory=list)
    """These, from torch on, in words."""
    tokens: int | None = None
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    hours: float | None = None
    energy_kwh: float | None = None
    cost: float | None = None


def segment_facts(run: Run, prices: Mapping[str, float]) -> list[SegmentFacts]:
    """One for each segment, and one for the batches trained since the newest save, whose place nobody knows."""
    facts = [measure(run.log, segment, prices) for segment in run.segments]
    last = facts[-1].last_batch if facts else 0
    if facts and run.log.batch[-1] > last:
        facts.append(measure(run.log, Segment(first_batch=last + 1, last_batch=int(run.log.batch[-1])), prices))
    return facts


def measure(log: Log, segment: Segment, prices: Mapping[str, float]) -> SegmentFacts:
    here = log.within(segment.first_batch, segment.last_batch)
    tokens, seconds = log.tokens[here], log[SECONDS][here]
    hours = elapsed_hours(log, here)
    num_devices = segment.num_devices
    timed = np.isfinite(tokens) & np.isfinite(seconds)
    rate = None
    if num_devices and timed.any() and seconds[timed].sum() > 0:
        rate = float(tokens[timed].sum() / seconds[timed].sum()) / num_devices
    row = accelerator_of(log, here, segment)
    price = price_of(segment, row, prices)
    device_hours = hours * num_devices if hours is not None and num_devices else None
    return SegmentFacts(
        first_batch=segment.first_batch,
        last_batch=segment.last_batch,
        vendor=segment.vendor,
        device=segment.device,
        num_devices=num_devices,
        world_size=segment.world_size,
        sharding=segment.sharding_in_words,
        precision=segment.precision,
        attention=segment.attention,
        torch=segment.torch,
        runtime=segment.runtime,
        driver=segment.driver,
        compile_config=segment.compile_config,
        environment=segment.environment,
        computed_with=segment.computed_with,
        microbatch_size=segment.device_train_microbatch_size,
        tokens=int(np.nansum(tokens)) if np.isfinite(tokens).any() else None,
        tokens_per_second_per_device=rate,
        mfu=rate * mfu_per_rate(log, here, num_devices) if rate and num_devices and row else None,
        hours=hours,
        energy_kwh=row.power_watts * device_hours / 1000 if row and device_hours is not None else None,
        cost=price * device_hours if price is not None and device_hours is not None else None,
    )


def total(facts: Sequence[SegmentFacts]) -> dict[str, Any]:
    """Sums over the segments; None where a part is not known, cost and energy included."""

    def add(name: str) -> Any:
        parts = [getattr(fact, name) for fact in facts]
        return sum(parts) if parts and None not in parts else None

    return {name: add(name) for name in ("tokens", "hours", "energy_kwh", "cost")}


def elapsed_hours(log: Log, here: slice) -> float | None:
    launches, elapsed, seconds = log.launch[here], log[ELAPSED][here], log[SECONDS][here]
    hours = 0.0
    for launch in np.unique(launches):
        clock, batches = elapsed[launches == launch], seconds[launches == launch]
        if np.isfinite(clock).any() and np.isfinite(batches).any():
            start = int(np.flatnonzero(np.isfinite(clock))[0])
            hours += (np.nanmax(clock) - clock[start] + np.nan_to_num(batches[start])) / 3600
    return float(hours) or None


# ----------------------------------------------------------------------------------------------- what a device is


def accelerator_of(log: Log, here: slice, segment: Segment) -> Accelerator | None:
    """The row of the table by whose peak the run's own MFU was reckoned."""
    flops, mfu = log[FLOPS][here], log[MFU][here]
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
    """What one token per second and device is worth: the same for all batches of a model on a device."""
    mfu, rate = log[MFU][here], log[RATE][here]
    known = np.flatnonzero(np.isfinite(mfu) & (rate > 0))
    return float(mfu[known[-1]] / (rate[known[-1]] / num_devices))


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """`NVIDIA H100 80GB HBM3=2.5` -> its price per device-hour. Raises ConfigError."""
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


def price_of(segment: Segment, row: Accelerator | None, prices: Mapping[str, float]) -> float | None:
    for name in names_of(segment, row):
        if name in prices:
            return prices[name]
    return None


def names_of(segment: Segment | SegmentFacts, row: Accelerator | None = None) -> list[str]:
    """What a price may call a device: as torch does, as the table does, or `cpu`."""
    names = [segment.device, row.name if row else None, "cpu" if segment.vendor == "cpu" else None]
    return [name for name in names if name]


def unused_prices(runs: Sequence[Run], prices: Mapping[str, float]) -> list[str]:
    """The prices that no segment had a use for: a misspelt name must not pass in silence."""
    used = set()
    for run in runs:
        for segment in run.segments:
            row = accelerator_of(run.log, run.log.within(segment.first_batch, segment.last_batch), segment)
            used.update(names_of(segment, row))
    return [name for name in prices if name not in used]


# -------------------------------------------------------------------------------------------------- what is drawn


def spans_of(facts: Sequence[SegmentFacts]) -> list[Span]:
    """What the figure shades: neighbours of one kind are one span, and two kinds never bear one label."""
    labels = label_kinds([kind_of(fact) for fact in facts])
    spans: list[Span] = []
    for fact in facts:
        label = labels[kind_of(fact)]
        if spans and spans[-1].label == label and spans[-1].last_batch + 1 == fact.first_batch:
            spans[-1] = replace(spans[-1], last_batch=fact.last_batch)
        else:
            spans.append(Span(fact.first_batch, fact.last_batch, label))
    return spans


Kind = tuple[tuple[str, Any], ...]


def kind_of(fact: SegmentFacts) -> Kind:
    names = ("vendor", "num_devices", "sharding", "precision", "device", "torch", "runtime", "attention")
    compiled = "not compiled" if fact.compile_config is None else "compiled"
    return (*((name, getattr(fact, name)) for name in names), ("compiled", compiled))


def label_kinds(kinds: Sequence[Kind]) -> dict[Kind, str]:
    """`8 x H100-80GB · FULL_SHARD · amp_bf16 PURE`, and of kinds that are alike so far, what tells them apart."""
    labels = {}
    for kind in dict.fromkeys(kinds):
        alike = [dict(other) for other in set(kinds) if base_label(dict(other)) == base_label(dict(kind))]
        telling = [
            str(dict(kind)[name])
            for name in ("device", "torch", "runtime", "attention", "compiled")
            if len({other[name] for other in alike}) > 1
        ]
        labels[kind] = " · ".join([base_label(dict(kind)), *telling])
    return labels


def base_label(kind: Mapping[str, Any]) -> str:
    if kind["vendor"] is None and kind["device"] is None:
        return "since the last save"
    words = [kind["sharding"], short_precision(kind["precision"])]
    return " · ".join([f"{kind['num_devices'] or '?'} x {short_device(kind)}", *(word for word in words if word)])


def short_device(kind: Mapping[str, Any]) -> str:
    if kind["vendor"] == "cpu":
        return "cpu"
    rows = [row.name for row in ACCELERATORS.values() if re.fullmatch(row.pattern, kind["device"] or "")]
    return rows[0] if len(rows) == 1 else kind["device"] or kind["vendor"]


def short_precision(precision: str | None) -> str | None:
    """fp32 and tf32 are the same in every mode."""
    first = precision.split()[0] if precision else None
    return first if first in ("fp32", "tf32") else precision
