"""A plan as text for people, and as plain values for programs. No torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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
COLUMNS = (
    *("hardware", "devices", "samples", "layout", "micro", "recomputed", "GiB", "tokens/s", "MFU"),
    *("scaling", "days", "of it lost"),
)
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


def describe_plan(plan: Plan, num_shown: int = 5) -> str:
    config, node, efficiency = plan.config, plan.hardware.node, plan.hardware.efficiency
    tokens = f", {three_digits(plan.num_tokens / 1e9)} billion tokens" if plan.num_tokens else ""
    half = " (half a card each)" if plan.hardware.accelerator.devices_per_card == 2 else ""
    lines = [
        f"plan      {config.run_name}: {three_digits(plan.num_parameters / 1e9)} billion parameters{tokens}, "
        f"{config.global_train_batch_size} x {config.max_seq_len} a batch, {config.precision}",
        f"hardware  {plan.num_devices} x {plan.hardware.accelerator.name}{half}, {node.num_devices} in a node; "
        f"{node.link_bytes_per_second / 1e9:.0f} GB/s in it for each device, "
        f"{node.adapter_bytes_per_second / 1e9:.0f} GB/s out of it ({node.source})",
        f"rates     products at {efficiency.products:.1%} of the peak, attention at {efficiency.attention:.1%} "
        f"({plan.hardware.origin(plan.num_devices)})",
        f"state     {plan.num_parameters * STATE_BYTES['adam'] / 1e12:.3g} TB at 18 bytes a parameter "
        f"({plan.num_parameters * STATE_BYTES['published'] / 1e12:.3g} TB at the 14 that papers count)",
        "",
    ]
    if plan.candidates:
        lines += _table(plan, num_shown)
        lines += ["", *_explain(plan)]
    else:
        on = f"; {plan.would_fit} devices would do" if plan.would_fit else ""
        lines.append(f"no layout of {plan.num_devices} {plan.hardware.accelerator.name} fits{on}")
    lines += ["", *_rejections(plan)]
    if plan.cost is not None:
        lines += ["", *_costs(plan), "", DAYS]
    return "\n".join([*lines, "", CANNOT_PROMISE])


def describe_plans(plans: Sequence[Plan]) -> str:
    """Return one line for each: its first layout, and the rate of a device relative to the first count's."""
    first, rows, base = plans[0], list[list[str]](), dict[str, float]()
    columns = [*COLUMNS, *(["dollars"] if any(plan.cost and plan.cost.dollars is not None for plan in plans) else [])]
    for plan in plans:
        name = plan.hardware.accelerator.name
        head = [name, f"{plan.num_devices:,}", f"{plan.config.global_train_batch_size:,}"]
        if not plan.candidates:
            rows.append([*head, "does not fit", *[""] * (len(columns) - len(head) - 1)])
            continue
        c = plan.candidates[0]
        rate = c.time.tokens_per_second / plan.num_devices
        cost = [three_digits(plan.cost.days), f"{plan.cost.lost_share:.1%}"] if plan.cost else []
        cost += [f"{plan.cost.dollars:,.0f}"] if plan.cost and plan.cost.dollars is not None else []
        rows.append(
            [
                *(*head, name_layout(c.layout, c.strategy)),
                *(str(c.microbatch_size), CHECKPOINTING[c.recomputed]),
                *(f"{c.memory.total_bytes / GIB:.1f}", f"{c.time.tokens_per_second:,.0f}", f"{c.mfu:.1%}"),
                f"{rate / base.setdefault(name, rate):.1%}",
                *(cost or [""] * (len(columns) - len(COLUMNS) + 2)),
            ]
        )
    about = (
        f"{first.config.run_name}: {three_digits(first.num_parameters / 1e9)} billion parameters, sequences of "
        f"{first.config.max_seq_len}, {first.config.precision}"
    )
    counts = dict[str, list[str]]()
    for plan in plans:
        if plan.candidates:
            counts.setdefault(describe_interval(plan), []).append(f"{plan.num_devices:,}")
    intervals = [f"interval  {', '.join(of)} x {interval}" for interval, of in counts.items()]
    days = ["", DAYS] if any(plan.cost is not None for plan in plans) else []
    return "\n".join([about, "", *Table(about, columns, rows).markdown(), "", *intervals, *days, "", CANNOT_PROMISE])


def describe_interval(plan: Plan) -> str:
    """Return `H100-80GB: 0.90 to 1.10 times the tokens/s in nine cases of ten`, and where its rates come from."""
    low, high = plan.interval
    times = f"{low:.2f} to {high:.2f} times the tokens/s in nine cases of ten"
    return f"{plan.hardware.accelerator.name}: {times} ({plan.hardware.origin(plan.num_devices)})"


def three_digits(number: float) -> str:
    """Format as 0.123, 12.3, 12,345: all digits of large numbers, and no exponent."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _table(plan: Plan, num_shown: int) -> list[str]:
    rows = [f"   {' '.join(DIMENSION_NAMES.values())}  micro  recomputed    GiB     tokens/s    MFU"]
    for number, c in enumerate(plan.candidates[:num_shown], 1):
        recomputed = CHECKPOINTING[c.recomputed]
        layout, rate = c.layout, f"{c.time.tokens_per_second:,.0f}"
        copies = f"{layout.replicate}{'*' if c.strategy == 'ZERO_1' else ''}"
        rows.append(
            f"{number:<3}{layout.pipeline:>6}{copies:>7}{layout.shard:>7}{layout.context:>8}{layout.tensor:>7}"
            f"{c.microbatch_size:>7}  {recomputed:<11}{c.memory.total_bytes / GIB:>6.1f}{rate:>13}{c.mfu:>7.1%}"
        )
    more = len(plan.candidates) - num_shown
    if more > 0:
        rows.append(f"   and {more} more that fit")
    if any(c.strategy == "ZERO_1" for c in plan.candidates[:num_shown]):
        rows.append("   *  ZERO_1: the copies divide the optimizer's state")
    return rows


def name_layout(layout: Layout, strategy: str) -> str:
    """Return `4 stages x 2 copies x 8 shards`; dimensions of one device are left out."""
    degrees = {name: getattr(layout, name) for name in DIMENSION_NAMES}
    parts = [f"{degree} {DIMENSION_NAMES[name]}" for name, degree in degrees.items() if degree > 1]
    return (" x ".join(parts) or "1 device") + (", ZERO_1" if strategy == "ZERO_1" else "")


def _explain(plan: Plan) -> list[str]:
    """Describe what fills the first candidate's memory and time, and what the next one lacks."""
    best = plan.candidates[0]
    memory = best.memory
    parts = {
        "parameters": memory.parameters_bytes + memory.unsharded_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "logits": memory.logits_bytes,
    }
    largest = sorted(parts.items(), key=lambda item: -item[1])[:2]
    limit = usable_bytes(plan.hardware.accelerator)
    lines = [
        f"memory    {memory.total_bytes / GIB:.1f} of {limit / GIB:.1f} GiB, most of it "
        + " and ".join(f"{name} ({num_bytes / GIB:.1f})" for name, num_bytes in largest),
        "time      "
        + ", ".join(f"{share:.0%} {PARTS[name]}" for name, share in best.time.parts().items() if share >= 0.01),
    ]
    if not knows_optimizer(plan.config):
        name = plan.config.optimizer.name
        lines.insert(1, f"          of it assumed: {name} keeps two numbers for each parameter, as AdamW does")
    low, high = plan.interval
    rate = best.time.tokens_per_second
    lines.append(f"interval  {low * rate:,.0f} to {high * rate:,.0f} tokens/s, in nine cases of ten (docs/plan.md)")
    fastest = min(c.time.seconds for c in plan.candidates)
    if best.time.seconds > fastest:
        lines.append(
            "choice    1 is within 1 % of the fastest, with the least memory among those; the others are by speed"
        )
    elif len(plan.candidates) > 1:
        lines.append(_against(best, plan.candidates[1]))
    else:
        lines.append("choice    the only one that fits")
    return lines


def _against(best: Candidate, second: Candidate) -> str:
    lost = {name: getattr(second.time, name) - getattr(best.time, name) for name in PARTS}
    where = max(lost, key=lambda name: lost[name])
    return f"choice    the next is {second.time.seconds / best.time.seconds - 1:.1%} slower, by {PARTS[where]}"


def _rejections(plan: Plan) -> list[str]:
    """Return a line for each reason; those that differ in a number alone share one."""
    if not plan.rejected:
        return ["every layout fits"]
    groups: dict[str, list[Rejected]] = {}
    for rejected in plan.rejected:
        kind = "memory" if rejected.needed else "speed" if rejected.slower else rejected.reason
        groups.setdefault(kind, []).append(rejected)
    lines = []
    for group in groups.values():
        nearest = min(group, key=lambda one: (one.needed, one.slower))
        first = name_layout(nearest.layout, nearest.strategy)
        more = f"{len(group) - 1} more do no better" if nearest.needed or nearest.slower else f"{len(group)} in all"
        lines.append(f"rejected  {first}: {nearest.reason}{f'; {more}' if len(group) > 1 else ''}")
    return lines


def _costs(plan: Plan) -> list[str]:
    cost, config = plan.cost, plan.config
    assert cost is not None and plan.num_tokens is not None
    dollars = f", {cost.dollars:,.0f} dollars" if cost.dollars is not None else ""
    flops = count_flops_per_token(config.model, config.max_seq_len) * plan.num_tokens
    num_parameters, num_tokens = compute_optimal(flops)
    own_tokens = TOKENS_PER_PARAMETER * plan.num_parameters
    batches = round(cost.save_every_seconds / plan.candidates[0].time.seconds)
    after = f"{batches:,} batches" if batches > 1 else "every batch"
    return [
        f"run       {three_digits(cost.days)} days, {cost.device_hours:,.0f} device-hours, "
        f"at most {cost.energy_kwh:,.0f} kWh{dollars}",
        f"failures  one in {three_digits(cost.hours_between_failures)} h; saves every "
        f"{three_digits(cost.save_every_seconds / 60)} minutes ({after}) lose least: "
        f"{cost.lost_share:.1%} of the time with restarts",
        f"budget    its {flops:.2e} FLOPs are best spent on {three_digits(num_parameters / 1e9)} billion parameters "
        f"and {three_digits(num_tokens / 1e9)} billion tokens; this model is best trained on "
        f"{three_digits(own_tokens / 1e9)} billion ({TOKENS_PER_PARAMETER} a parameter)",
    ]


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of `--json`."""

    def degrees(of: Candidate | Rejected) -> dict[str, Any]:
        return of.layout.degrees._asdict() | {"sharding_strategy": of.strategy}

    def facts(c: Candidate) -> dict[str, Any]:
        return {
            **degrees(c),
            "overlay": c.overlay(plan.config),
            "memory_bytes": c.memory.total_bytes,
            "step_seconds": c.time.seconds,
            "tokens_per_second": c.time.tokens_per_second,
            "mfu": c.mfu,
            "shares": c.time.parts(),
        }

    return {
        "run": plan.config.run_name,
        "hardware": plan.hardware.accelerator.name,
        "num_devices": plan.num_devices,
        "num_parameters": plan.num_parameters,
        "num_tokens": plan.num_tokens,
        "usable_bytes": usable_bytes(plan.hardware.accelerator),
        "rates": asdict(plan.hardware.efficiency) | {"interval": plan.interval},
        "node": asdict(plan.hardware.node),
        "layouts": [facts(c) for c in plan.candidates],
        "would_fit": plan.would_fit,
        "rejected": [degrees(r) | {"reason": r.reason} for r in plan.rejected],
        "cost": plan.cost and asdict(plan.cost),
    }
