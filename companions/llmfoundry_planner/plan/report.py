"""A plan as text for people, and as plain values for programs. No torch.

`describe_plan` prints one plan, `describe_plans` a line for each of several, and `plan_facts` is the JSON of one. Only
the form is decided here: `plan.py` has made the plan.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmfoundry_lite.config.counted_model import counted_model, describe_told_parts, describe_unknown_parts
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.estimate.model_memory import knows_optimizer
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.models.flops import TOKENS_PER_PARAMETER, count_flops_per_token
from llmfoundry_lite.tables import Table
from llmfoundry_planner.plan.cost import (
    PREDICTED_DAYS,
    PUBLISHED_DAYS,
    PUBLISHED_RUN,
    STATE_BYTES,
    compute_optimal,
)
from llmfoundry_planner.plan.plan import Plan
from llmfoundry_planner.plan.search import Candidate, Rejected, usable_bytes

CANNOT_PROMISE = "not predicted: slow storage, the host's own time. `llmfoundry-lite rehearse` measures the memory"
DAYS = (
    f"days are of steps, saves and failures; all else comes on top: {PUBLISHED_RUN} took {PUBLISHED_DAYS:g}, and "
    f"{PREDICTED_DAYS:g} are predicted"
)
CHECKPOINTING = {False: "no", True: "yes", "selective": "selective"}
"""Value of `activation_checkpointing` -> its word in the column `recomputed`."""
COLUMNS = (
    "hardware",
    "devices",
    "samples",
    "layout",
    "micro",
    "recomputed",
    "GiB",
    "tokens/s",
    "MFU",
    "scaling",
    "days",
    "of it lost",
)
"""Columns of the table of several plans. With `--price`, dollars follow."""
DIMENSION_NAMES = {
    "pipeline": "stages",
    "replicate": "copies",
    "shard": "shards",
    "context": "context",
    "tensor": "tensor",
}
"""Dimension of a layout -> its name, in the table's head and in sentences alike."""
PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "norms, activations and loss",
    "optimizer": "the optimizer",
    "tensor": "tensor parallelism's collectives",
    "context": "context parallelism's collectives",
    "sharding": "FSDP's collectives, as far as they show",
    "pipeline": "sending between stages",
    "bubble": "waiting for other stages",
    "data": "waiting for data",
    "stragglers": "waiting for slow nodes and shared links",
    "saves": "saves",
}
"""Field of StepTime -> how a sentence names it."""
MIN_SHARE_SHOWN = 0.01
"""Parts of a step that take less than this share of it are left out of the text."""


def describe_plan(plan: Plan, num_shown: int = 5) -> str:
    """Return one plan as text: what was planned, the first `num_shown` layouts, what was rejected, and the cost."""
    config = plan.config
    accelerator = plan.hardware.accelerator
    node = plan.hardware.node
    efficiency = plan.hardware.efficiency
    num_tokens = f", {three_digits(plan.num_tokens / 1e9)} billion tokens" if plan.num_tokens else ""
    half_cards = " (half a card each)" if accelerator.devices_per_card == 2 else ""
    state_terabytes = {source: plan.num_parameters * size / 1e12 for source, size in STATE_BYTES.items()}
    lines = [
        f"plan      {config.run_name}: {three_digits(plan.num_parameters / 1e9)} billion parameters{num_tokens}, "
        f"{config.global_train_batch_size} x {config.max_seq_len} a batch, {config.precision}",
        f"hardware  {plan.num_devices} x {accelerator.name}{half_cards}, {node.num_devices} in a node; "
        f"{node.link_bytes_per_second / 1e9:.0f} GB/s in it for each device, "
        f"{node.adapter_bytes_per_second / 1e9:.0f} GB/s out of it ({node.source})",
        f"rates     products at {efficiency.products:.1%} of the peak, attention at {efficiency.attention:.1%} "
        f"({plan.hardware.origin(plan.num_devices)})",
        f"state     {state_terabytes['adam']:.3g} TB at 18 bytes a parameter "
        f"({state_terabytes['published']:.3g} TB at the 14 that papers count)",
        "",
    ]

    if plan.candidates:
        lines += _describe_layouts(plan, num_shown)
        lines.append("")
        lines += _explain_best(plan)
    else:
        alternative = f"; {plan.would_fit} devices would do" if plan.would_fit else ""
        lines.append(f"no layout of {plan.num_devices} {accelerator.name} fits{alternative}")

    lines.append("")
    lines += _describe_rejected(plan)
    if plan.cost is not None:
        lines += ["", *_describe_cost(plan), "", DAYS]
    lines += ["", CANNOT_PROMISE]
    return "\n".join(lines)


def describe_plans(plans: Sequence[Plan]) -> str:
    """Return a table of plans of one run, with a row for each: its first layout, or that none fits.

    The column `scaling` compares the rate of a device with the first row of the same hardware. Below the table stand
    the intervals of the predictions.
    """
    has_dollars = any(plan.cost is not None and plan.cost.dollars is not None for plan in plans)
    columns = [*COLUMNS, "dollars"] if has_dollars else list(COLUMNS)

    rows: list[list[str]] = []
    first_rates: dict[str, float] = {}  # by hardware: tokens/s of a device in its first row
    device_counts: dict[str, list[str]] = defaultdict(list)  # by text of the interval
    for plan in plans:
        hardware_name = plan.hardware.accelerator.name
        row = [hardware_name, f"{plan.num_devices:,}", f"{plan.config.global_train_batch_size:,}"]
        if plan.candidates:
            device_rate = plan.candidates[0].time.tokens_per_second / plan.num_devices
            first_rate = first_rates.setdefault(hardware_name, device_rate)
            row += _cells_of_best(plan, scaling=device_rate / first_rate)
            device_counts[describe_interval(plan)].append(f"{plan.num_devices:,}")
        else:
            row.append("does not fit")
        num_empty_cells = len(columns) - len(row)
        rows.append(row + [""] * num_empty_cells)

    first = plans[0]
    title = (
        f"{first.config.run_name}: {three_digits(first.num_parameters / 1e9)} billion parameters, sequences of "
        f"{first.config.max_seq_len}, {first.config.precision}"
    )
    lines = [title, "", *Table(title, columns, rows).markdown(), ""]
    for interval, counts in device_counts.items():
        lines.append(f"interval  {', '.join(counts)} x {interval}")
    if any(plan.cost is not None for plan in plans):
        lines += ["", DAYS]
    lines += ["", CANNOT_PROMISE]
    return "\n".join(lines)


def _cells_of_best(plan: Plan, scaling: float) -> list[str]:
    """Return the cells of a plan's row from the column of its layout on. `scaling` is the cell of that column.

    The last cells are missing if the cost or its dollars are not known.
    """
    best = plan.candidates[0]
    cells = [
        name_layout(best.layout, best.strategy),
        str(best.microbatch_size),
        CHECKPOINTING[best.recomputed],
        f"{best.memory.total_bytes / GIB:.1f}",
        f"{best.time.tokens_per_second:,.0f}",
        f"{best.mfu:.1%}",
        f"{scaling:.1%}",
    ]
    if plan.cost is not None:
        cells += [three_digits(plan.cost.days), f"{plan.cost.lost_share:.1%}"]
        if plan.cost.dollars is not None:
            cells.append(f"{plan.cost.dollars:,.0f}")
    return cells


def describe_interval(plan: Plan) -> str:
    """Return `H100-80GB: 0.90 to 1.10 times the tokens/s in nine cases of ten`, and where its rates come from."""
    low, high = plan.interval
    factors = f"{low:.2f} to {high:.2f} times the tokens/s in nine cases of ten"
    return f"{plan.hardware.accelerator.name}: {factors} ({plan.hardware.origin(plan.num_devices)})"


def three_digits(number: float) -> str:
    """Format a number with three digits, or with all of them from 1,000 on: 0.123, 12.3, 12,345. Never an exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def name_layout(layout: Layout, strategy: str) -> str:
    """Return a layout as `4 stages x 2 copies x 8 shards`. Dimensions of one device are left out."""
    parts = []
    for dimension, dimension_name in DIMENSION_NAMES.items():
        degree = getattr(layout, dimension)
        if degree > 1:
            parts.append(f"{degree} {dimension_name}")
    name = " x ".join(parts) or "1 device"
    return f"{name}, ZERO_1" if strategy == "ZERO_1" else name


def _describe_layouts(plan: Plan, num_shown: int) -> list[str]:
    """Return the table of a plan's first `num_shown` candidates, one line each, numbered from 1."""
    shown = plan.candidates[:num_shown]
    lines = [f"   {' '.join(DIMENSION_NAMES.values())}  micro  recomputed    GiB     tokens/s    MFU"]
    for number, candidate in enumerate(shown, start=1):
        layout = candidate.layout
        footnote_mark = "*" if candidate.strategy == "ZERO_1" else ""
        copies = f"{layout.replicate}{footnote_mark}"
        recomputed = CHECKPOINTING[candidate.recomputed]
        gibibytes = candidate.memory.total_bytes / GIB
        rate = f"{candidate.time.tokens_per_second:,.0f}"
        lines.append(
            f"{number:<3}{layout.pipeline:>6}{copies:>7}{layout.shard:>7}{layout.context:>8}{layout.tensor:>7}"
            f"{candidate.microbatch_size:>7}  {recomputed:<11}{gibibytes:>6.1f}{rate:>13}{candidate.mfu:>7.1%}"
        )

    num_hidden = len(plan.candidates) - num_shown
    if num_hidden > 0:
        lines.append(f"   and {num_hidden} more that fit")
    if any(candidate.strategy == "ZERO_1" for candidate in shown):
        lines.append("   *  ZERO_1: the copies divide the optimizer's state")
    return lines


def _explain_best(plan: Plan) -> list[str]:
    """Return lines that say what fills the first candidate's memory and time, and why it comes first."""
    best = plan.candidates[0]
    memory = best.memory
    bytes_of_parts = {
        "parameters": memory.parameters_bytes + memory.unsharded_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "logits": memory.logits_bytes,
    }
    largest_first = sorted(bytes_of_parts, key=lambda name: -bytes_of_parts[name])
    largest = " and ".join(f"{name} ({bytes_of_parts[name] / GIB:.1f})" for name in largest_first[:2])
    limit_bytes = usable_bytes(plan.hardware.accelerator)
    lines = [f"memory    {memory.total_bytes / GIB:.1f} of {limit_bytes / GIB:.1f} GiB, most of it {largest}"]
    if not knows_optimizer(plan.config):
        name = plan.config.optimizer.name
        lines.append(f"          of it assumed: {name} keeps two numbers for each parameter, as AdamW does")
    told_parts = describe_told_parts(plan.config.model)
    if told_parts:
        lines.append(f"counted   {told_parts}, as the class says")
    unknown_parts = describe_unknown_parts(plan.config.model)
    if unknown_parts:
        lines.append(f"not known {unknown_parts}: counted neither in memory nor in time")

    shares = best.time.parts().items()
    shown_shares = [f"{share:.0%} {PARTS[name]}" for name, share in shares if share >= MIN_SHARE_SHOWN]
    lines.append(f"time      {', '.join(shown_shares)}")

    low, high = plan.interval
    rate = best.time.tokens_per_second
    lines.append(f"interval  {low * rate:,.0f} to {high * rate:,.0f} tokens/s, in nine cases of ten (docs/plan.md)")

    fastest_seconds = min(candidate.time.seconds for candidate in plan.candidates)
    if best.time.seconds > fastest_seconds:
        lines.append(
            "choice    1 is within 1 % of the fastest, with the least memory among those; the others are by speed"
        )
    elif len(plan.candidates) > 1:
        lines.append(_compare_with_next(best, plan.candidates[1]))
    else:
        lines.append("choice    the only one that fits")
    return lines


def _compare_with_next(best: Candidate, second: Candidate) -> str:
    """Return by how much the second candidate is slower, and the part of a step that makes most of the difference."""
    lost_seconds = {part: getattr(second.time, part) - getattr(best.time, part) for part in PARTS}
    largest_part = max(PARTS, key=lambda part: lost_seconds[part])
    slower = second.time.seconds / best.time.seconds - 1
    return f"choice    the next is {slower:.1%} slower, by {PARTS[largest_part]}"


def _describe_rejected(plan: Plan) -> list[str]:
    """Return one line for each reason for which layouts were rejected.

    Layouts that need too much memory share a line, which shows the one that needs the least. So do those that are too
    slow. Other layouts share a line if the text of their reason is the same.
    """
    if not plan.rejected:
        return ["every layout fits"]

    groups: dict[str, list[Rejected]] = defaultdict(list)
    for rejected in plan.rejected:
        reason = rejected.reason
        if rejected.needed:
            reason = "memory"
        elif rejected.slower:
            reason = "speed"
        groups[reason].append(rejected)

    lines = []
    for group in groups.values():
        nearest = min(group, key=lambda rejected: (rejected.needed, rejected.slower))
        line = f"rejected  {name_layout(nearest.layout, nearest.strategy)}: {nearest.reason}"
        has_number = nearest.needed or nearest.slower
        if len(group) > 1 and has_number:
            line += f"; {len(group) - 1} more do no better"
        elif len(group) > 1:
            line += f"; {len(group)} in all"
        lines.append(line)
    return lines


def _describe_cost(plan: Plan) -> list[str]:
    """Return lines with days, energy and dollars of the run, its failures, and what its FLOPs are best spent on.

    The plan must have a cost.
    """
    cost = plan.cost
    assert cost is not None and plan.num_tokens is not None
    dollars = f", {cost.dollars:,.0f} dollars" if cost.dollars is not None else ""
    num_batches = round(cost.save_every_seconds / plan.candidates[0].time.seconds)
    interval = f"{num_batches:,} batches" if num_batches > 1 else "every batch"

    num_flops = count_flops_per_token(counted_model(plan.config.model), plan.config.max_seq_len) * plan.num_tokens
    best_parameters, best_tokens = compute_optimal(num_flops)
    best_tokens_for_model = TOKENS_PER_PARAMETER * plan.num_parameters
    return [
        f"run       {three_digits(cost.days)} days, {cost.device_hours:,.0f} device-hours, "
        f"at most {cost.energy_kwh:,.0f} kWh{dollars}",
        f"failures  one in {three_digits(cost.hours_between_failures)} h; saves every "
        f"{three_digits(cost.save_every_seconds / 60)} minutes ({interval}) lose least: "
        f"{cost.lost_share:.1%} of the time with restarts",
        f"budget    its {num_flops:.2e} FLOPs are best spent on {three_digits(best_parameters / 1e9)} billion "
        f"parameters and {three_digits(best_tokens / 1e9)} billion tokens; this model is best trained on "
        f"{three_digits(best_tokens_for_model / 1e9)} billion ({TOKENS_PER_PARAMETER} a parameter)",
    ]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return a plan as the plain values that `--json` prints."""

    def layout_facts(layout: Layout, strategy: str) -> dict[str, Any]:
        return {**layout.degrees._asdict(), "sharding_strategy": strategy}

    def candidate_facts(candidate: Candidate) -> dict[str, Any]:
        return {
            **layout_facts(candidate.layout, candidate.strategy),
            "overlay": candidate.overlay(plan.config),
            "memory_bytes": candidate.memory.total_bytes,
            "step_seconds": candidate.time.seconds,
            "tokens_per_second": candidate.time.tokens_per_second,
            "mfu": candidate.mfu,
            "shares": candidate.time.parts(),
        }

    return {
        "run": plan.config.run_name,
        "hardware": plan.hardware.accelerator.name,
        "num_devices": plan.num_devices,
        "num_parameters": plan.num_parameters,
        "num_tokens": plan.num_tokens,
        "usable_bytes": usable_bytes(plan.hardware.accelerator),
        "rates": {**asdict(plan.hardware.efficiency), "interval": plan.interval},
        "node": asdict(plan.hardware.node),
        "layouts": [candidate_facts(candidate) for candidate in plan.candidates],
        "would_fit": plan.would_fit,
        "rejected": [{**layout_facts(r.layout, r.strategy), "reason": r.reason} for r in plan.rejected],
        "cost": None if plan.cost is None else asdict(plan.cost),
    }
