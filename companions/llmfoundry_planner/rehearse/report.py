"""A rehearsal's measurements as text. No torch."""

import dataclasses
from collections import Counter
from typing import Any

from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_layouts.stages import Stage, assign_stages, describe_stages
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.estimate.model_memory import MemoryEstimate
from llmfoundry_lite.hardware import FREE_FRACTION, GIB, format_bytes
from llmfoundry_lite.models.flops import count_flops_per_token
from llmfoundry_planner.rehearse.device import PREFERS_CUDNN, find_capability
from llmfoundry_planner.rehearse.fork_server import Job, Outcome

CANNOT_PROMISE = (
    "not rehearsed: numbers (nothing is computed), speed, overlap, deadlocks, NCCL's and the driver's own memory "
    "(0.5 to 2 GiB), sizes that depend on data"
)
CUDNN = "assumed: torch prefers cuDNN's there, which cannot be rehearsed; its workspace is not counted"
NAMES = ("parameters", "gradients", "optimizer", "unsharded", "activations", "logits")


def describe(job: Job, rank: int, outcome: Outcome) -> str:
    found, device = outcome.found, job.device
    config = dataclasses.replace(job.config, device_train_microbatch_size=found["microbatch_size"])
    layout = layout_of(config, job.num_devices, job.per_node)
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    place = layout.coordinates(rank).pipeline
    stages, stage_lines = assign_stages(config.model, config.pipeline)[place], []
    if layout.pipeline == 1:
        estimate = estimate_training_memory(config, layout, device)
    else:
        estimate = estimate_stages(config, layout, device)[place][1]
        stage_lines = [
            f"stage          {place + 1} of {layout.pipeline}, {config.pipeline.schedule}: {describe_stages(stages)}"
        ]
    expected_bytes, allocated_bytes = estimate.total_bytes, found["allocated_bytes"]
    lines = [
        f"rehearsed      {config.run_name} on {job.num_devices} x {device.name}, {job.per_node} in a node, "
        f"as rank {rank}, in {outcome.seconds:.0f} s",
        *stage_lines,
        f"batch          {num_samples} samples on this rank, {found['microbatch_size']} at a time",
        f"memory         allocated {allocated_bytes / GIB:.2f}, reserved {found['reserved_bytes'] / GIB:.2f}, "
        f"of {device.free_bytes / GIB:.2f} GiB ({FREE_FRACTION:.0%} of what is sold)",
        f"               estimate {expected_bytes / GIB:.2f} ({expected_bytes / allocated_bytes - 1:+.1%}); "
        f"cuBLAS' workspaces are {found['workspaces_bytes'] / GIB:.2f} of the allocated",
        f"               the peak is at {found['peak_at']}",
    ]
    lines += describe_peak(found["at_peak_bytes"], estimate, is_stage=layout.pipeline > 1)
    lines += [f"               held by {place}: {format_bytes(size)}" for place, size in found["largest_bytes"].items()]
    formula = count_rank_flops(config, layout, stages) * num_samples * config.max_seq_len
    total_flops = sum(found["flops"].values())
    lines.append(
        f"FLOPs          {total_flops / 1e12:,.2f} T in a batch on this rank, {total_flops / formula:.3f} of the "
        f"formula's {formula / 1e12:,.2f} T (attention's backward pass computes its scores again)"
    )
    is_cudnn_preferred = device.vendor == "nvidia" and find_capability(device) in PREFERS_CUDNN
    lines += describe_kernels(found["attention"], found["compiled"], is_cudnn_preferred=is_cudnn_preferred)
    for kind, group, dtype, calls, num_bytes in sorted(found["collectives"], key=lambda row: -row[4]):
        times = "1 call" if calls == 1 else f"{calls:,} calls"
        lines.append(f"collective     {kind} {dtype}, {group}: {times}, {format_bytes(num_bytes)} in a batch")
    for place, count in sorted(found["reads"].items(), key=lambda item: -item[1]):
        lines.append(f"host waits     {place}: {count} in a batch")
    lines.append(CANNOT_PROMISE)
    if device.vendor == "amd":
        lines.append(f"{device.name} is AMD's: its memory is rehearsed, on NVIDIA's runtime and kernels")
    return "\n".join(lines)


def describe_peak(at_peak_bytes: dict[str, int], estimate: MemoryEstimate, *, is_stage: bool) -> list[str]:
    """List categories. For a stage of a pipeline the estimate counts logits among the activations."""
    found, expected = Counter(at_peak_bytes), {name: getattr(estimate, f"{name}_bytes") for name in NAMES}
    if is_stage:
        found["activations"] += found.pop("logits", 0)
        del expected["logits"]
    lines = ["GiB at the peak   rehearsed  estimate"]
    lines += [f"{name:<17}{found[name] / GIB:9.2f} {size / GIB:9.2f}" for name, size in expected.items()]
    lines += [f"{name:<17}{found[name] / GIB:9.2f}         -" for name in sorted({*found} - {*expected})]
    return [" " * 15 + line for line in lines]


def count_rank_flops(config: TrainConfig, layout: Layout, stages: list[Stage]) -> float:
    """Count model FLOPs of one token on a rank, which computes its stages' share of the layers."""
    part = dataclasses.replace(
        config.model,
        n_layers=sum(len(stage.blocks) for stage in stages),
        vocab_size=config.model.vocab_size if stages[-1].is_last else 0,
    )
    return count_flops_per_token(part, config.max_seq_len) / (layout.context * layout.tensor)


def describe_kernels(eager: list[str], compiled: dict[str, Any], *, is_cudnn_preferred: bool) -> list[str]:
    attention = [*eager, *(f"{name}, compiled" for name in compiled["attention"] if name not in eager)]
    lines = [f"attention      {', '.join(attention) or 'no kernel of its own: products and softmax'}"]
    if is_cudnn_preferred and "of scaled_dot_product" in lines[0]:
        lines.append(f"               {CUDNN}")
    if not compiled["functions"]:
        return lines
    before = f", {compiled['num_before']} of them while auto tried sizes" if compiled["num_before"] else ""
    kernels = ", ".join(f"{count} Triton kernels for {target}" for target, count in compiled["kernels"].items())
    num_again, num_breaks = (sum(compiled[name].values()) for name in ("again", "breaks"))
    lines += [
        f"compiled       {compiled['num_graphs']} graphs of {', '.join(compiled['functions'])}{before}",
        f"               {kernels or 'no Triton kernels'}; FLOPs inside are not counted above",
        f"               {num_breaks} graph breaks, {num_again} compiled again in a batch",
    ]
    lines += [f"graph break    {reason}: {count}" for reason, count in compiled["breaks"].items()]
    lines += [f"compiled again {reason}: {count}" for reason, count in compiled["again"].items()]
    return lines
