"""The measurements of a rehearsal as text, beside the estimates of the core. No torch.

`describe` is the entry. `measure.py` makes the measurements, and says what each of them is.
"""

import dataclasses
from collections import Counter
from typing import Any

from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_layouts.stages import Stage, assign_stages, describe_stages
from llmfoundry_lite.config.counted_model import counted_model, describe_told_parts, describe_unknown_parts
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.estimate.model_memory import MemoryEstimate
from llmfoundry_lite.hardware import FREE_FRACTION, GIB, Accelerator, format_bytes
from llmfoundry_lite.models.flops import count_flops_per_token
from llmfoundry_planner.rehearse.device import PREFERS_CUDNN, find_capability
from llmfoundry_planner.rehearse.fork_server import Job, Outcome

CANNOT_PROMISE = (
    "not rehearsed: numbers (nothing is computed), speed, overlap, deadlocks, NCCL's and the driver's own memory "
    "(0.5 to 2 GiB), sizes that depend on data"
)
CUDNN = "assumed: torch prefers cuDNN's there, which cannot be rehearsed; its workspace is not counted"
CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "activations", "logits")
"""Categories of memory that the core estimates."""


def describe(job: Job, rank: int, outcome: Outcome) -> str:
    """Return the report of one rehearsed rank: memory, FLOPs, kernels, collectives, and where the host waits.

    The rehearsal must have succeeded, with its operations counted.
    """
    measurements = outcome.measurements
    device = job.device
    config = dataclasses.replace(job.config, device_train_microbatch_size=measurements["microbatch_size"])
    layout = layout_of(config, job.num_devices, job.per_node)
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    lines = [
        f"rehearsed      {config.run_name} on {job.num_devices} x {device.name}, {job.per_node} in a node, "
        f"as rank {rank}, in {outcome.seconds:.0f} s"
    ]

    # A rank of a pipeline has one stage, or several virtual ones.
    pipeline_rank = layout.coordinates(rank).pipeline
    stages = assign_stages(config.model, config.pipeline)[pipeline_rank]
    if layout.pipeline == 1:
        estimate = estimate_training_memory(config, layout, device)
    else:
        _, estimate = estimate_stages(config, layout, device)[pipeline_rank]
        lines.append(
            f"stage          {pipeline_rank + 1} of {layout.pipeline}, {config.pipeline.schedule}: "
            f"{describe_stages(stages)}"
        )

    lines.append(f"batch          {num_samples} samples on this rank, {measurements['microbatch_size']} at a time")
    lines += _describe_memory(measurements, estimate, device)
    lines += describe_peak(measurements["at_peak_bytes"], estimate, is_stage=layout.pipeline > 1)
    for source_line, num_bytes in measurements["largest_bytes"].items():
        lines.append(f"               held by {source_line}: {format_bytes(num_bytes)}")

    measured_flops = sum(measurements["flops"].values())
    formula_flops = count_rank_flops(config, layout, stages) * num_samples * config.max_seq_len
    lines.append(
        f"FLOPs          {measured_flops / 1e12:,.2f} T in a batch on this rank, {measured_flops / formula_flops:.3f} "
        f"of the formula's {formula_flops / 1e12:,.2f} T (attention's backward pass computes its scores again)"
    )
    told_parts = describe_told_parts(config.model)
    if told_parts:
        lines.append(f"               the formula and the estimate of memory count {told_parts}")
    unknown_parts = describe_unknown_parts(config.model)
    if unknown_parts:
        lines.append(f"               the formula and the estimate of memory count nothing for {unknown_parts}")
    is_cudnn_preferred = device.vendor == "nvidia" and find_capability(device) in PREFERS_CUDNN
    lines += describe_kernels(
        measurements["attention"], measurements["compiled"], is_cudnn_preferred=is_cudnn_preferred
    )

    most_bytes_first = sorted(measurements["collectives"], key=lambda collective: -collective[4])
    for operation, group, dtype, num_calls, num_bytes in most_bytes_first:
        calls = "1 call" if num_calls == 1 else f"{num_calls:,} calls"
        lines.append(f"collective     {operation} {dtype}, {group}: {calls}, {format_bytes(num_bytes)} in a batch")
    reads = Counter(measurements["reads"])
    for source_line, num_reads in reads.most_common():
        lines.append(f"host waits     {source_line}: {num_reads} in a batch")

    lines.append(CANNOT_PROMISE)
    if device.vendor == "amd":
        lines.append(f"{device.name} is AMD's: its memory is rehearsed, on NVIDIA's runtime and kernels")
    return "\n".join(lines)


def _describe_memory(measurements: dict[str, Any], estimate: MemoryEstimate, device: Accelerator) -> list[str]:
    """Return lines that compare the allocator's peak with the device's memory and with the estimate."""
    allocated_bytes = measurements["allocated_bytes"]
    excess = estimate.total_bytes / allocated_bytes - 1
    return [
        f"memory         allocated {allocated_bytes / GIB:.2f}, reserved {measurements['reserved_bytes'] / GIB:.2f}, "
        f"of {device.free_bytes / GIB:.2f} GiB ({FREE_FRACTION:.0%} of what is sold)",
        f"               estimate {estimate.total_bytes / GIB:.2f} ({excess:+.1%}); "
        f"cuBLAS' workspaces are {measurements['workspaces_bytes'] / GIB:.2f} of the allocated",
        f"               the peak is at {measurements['peak_at']}",
    ]


def describe_peak(at_peak_bytes: dict[str, int], estimate: MemoryEstimate, *, is_stage: bool) -> list[str]:
    """Return a table of the memory at the peak: for each category the rehearsed GiB beside the estimated ones.

    at_peak_bytes: rehearsed bytes by category. Categories that the core does not estimate come last.
    is_stage: whether the rank is a stage of a pipeline, whose estimate counts logits among the activations.
    """
    rehearsed_bytes = Counter(at_peak_bytes)
    estimated_bytes = {category: getattr(estimate, f"{category}_bytes") for category in CATEGORIES}
    if is_stage:
        rehearsed_bytes["activations"] += rehearsed_bytes.pop("logits", 0)
        del estimated_bytes["logits"]

    indent = " " * 15
    lines = [f"{indent}GiB at the peak   rehearsed  estimate"]
    other_categories = sorted(rehearsed_bytes.keys() - estimated_bytes.keys())
    for category in [*estimated_bytes, *other_categories]:
        estimated = f"{estimated_bytes[category] / GIB:.2f}" if category in estimated_bytes else "-"
        lines.append(f"{indent}{category:<17}{rehearsed_bytes[category] / GIB:9.2f} {estimated:>9}")
    return lines


def count_rank_flops(config: TrainConfig, layout: Layout, stages: list[Stage]) -> float:
    """Return the model FLOPs that a rank with these stages computes for each token of its samples.

    They are those of a model with the blocks of the stages, and with the head if the rank has the last stage, divided
    among the ranks that share each sample.
    """
    model = dataclasses.replace(
        counted_model(config.model),
        n_layers=sum(len(stage.blocks) for stage in stages),
        vocab_size=config.model.vocab_size if stages[-1].is_last else 0,
    )
    return count_flops_per_token(model, config.max_seq_len) / (layout.context * layout.tensor)


def describe_kernels(eager_attention: list[str], compiled: dict[str, Any], *, is_cudnn_preferred: bool) -> list[str]:
    """Return lines about the attention kernels, and about what torch.compile made.

    eager_attention: kernels that ran outside of compiled code.
    compiled: as `measure.describe_compiled` returns it.
    is_cudnn_preferred: whether torch would take cuDNN's kernel on the real device.
    """
    attention = list(eager_attention)
    for kernel in compiled["attention"]:
        if kernel not in eager_attention:
            attention.append(f"{kernel}, compiled")
    attention_line = f"attention      {', '.join(attention) or 'no kernel of its own: products and softmax'}"
    lines = [attention_line]
    if is_cudnn_preferred and "of scaled_dot_product" in attention_line:
        lines.append(f"               {CUDNN}")
    if not compiled["functions"]:
        return lines

    before = f", {compiled['num_before']} of them while auto tried sizes" if compiled["num_before"] else ""
    kernels = ", ".join(f"{count} Triton kernels for {target}" for target, count in compiled["kernels"].items())
    num_breaks = sum(compiled["breaks"].values())
    num_recompilations = sum(compiled["again"].values())
    lines += [
        f"compiled       {compiled['num_graphs']} graphs of {', '.join(compiled['functions'])}{before}",
        f"               {kernels or 'no Triton kernels'}; FLOPs inside are not counted above",
        f"               {num_breaks} graph breaks, {num_recompilations} compiled again in a batch",
    ]
    lines += [f"graph break    {reason}: {count}" for reason, count in compiled["breaks"].items()]
    lines += [f"compiled again {reason}: {count}" for reason, count in compiled["again"].items()]
    return lines
