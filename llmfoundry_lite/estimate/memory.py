"""Memory that one device of a run needs, and settings that would save the most of it. Arithmetic, no torch.

Adds to `model_memory.py` the optimizer's step, cuBLAS' workspaces and token ids. What a rank of a pipeline holds while
it plays its schedule, the companion with pipelines adds. Leaves out the device's context and libraries, communication
buffers, and the allocator's fragmentation.
"""

from collections.abc import Iterable
from dataclasses import replace

from llmfoundry_lite import companions
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.model_memory import (
    MemoryEstimate,
    count_rounding,
    estimate_moments,
    slots_of,
)
from llmfoundry_lite.estimate.portion import Portion
from llmfoundry_lite.hardware import GIB, MIB, Accelerator

INT64_BYTES = 8
WORKSPACES_BYTES = 32 * MIB
"""Scratch memory of matrix products for each of the two threads that compute: the most on any device."""
TIMING_BYTES = 50 * MIB
"""Buffer with which a compiler clears the L2 cache between two timings of a kernel: that cache's size, on an H100."""
SMALL_BYTES = 3 * MIB // 2
"""Tensors too small to be counted, and blocks that torch's allocator does not split; by rehearsals."""
ROUNDING = 1 / 300
"""Share that torch's allocator adds by rounding up; by rehearsals."""
GATHER_BYTES = 1 << 27
"""Bytes of parameters that ZeRO-1 gathers at a time after a step."""
OPTIMIZER_SCRATCH = {"lion": 1, "decoupled_lionw": 1}
"""Scratch numbers for each parameter during an optimizer's step; torch's fused AdamW needs none."""


def estimate_training_memory(config: TrainConfig, layout: Layout, device: Accelerator | None = None) -> MemoryEstimate:
    """Estimate one device of a run with this layout; of a pipeline, its fullest stage.

    Without `device`, libraries are assumed to take the most that they take on any.
    """
    if layout.pipeline > 1:
        key = "pp_config.pipeline_parallel_degree"
        estimate_fullest = companions.load("llmfoundry_layouts.stage_memory:estimate_fullest", key)
        return estimate_fullest(config, layout, device)
    moments = estimate_moments(Portion(config, layout)).values()
    return add_the_rest(Portion(config, layout), fullest(moments), device)


def as_on_cpu(config: TrainConfig) -> TrainConfig:
    """Name an attention as a CPU computes it, where every kernel needs a bias. Other estimates are for GPUs."""
    return replace(config, model=replace(config.model, attn_config=replace(config.model.attn_config, attn_impl="sdpa")))


def fullest(estimates: Iterable[MemoryEstimate]) -> MemoryEstimate:
    return max(estimates, key=lambda estimate: estimate.total_bytes)


def add_the_rest(p: Portion, estimate: MemoryEstimate, device: Accelerator | None) -> MemoryEstimate:
    """Take the optimizer's step instead if it needs more; add workspaces, token ids and small tensors."""
    share_bytes = estimate.parameters_bytes
    num_owners = p.layout.of_parameters.replicate if p.shares_optimizer else 1
    estimate = replace(estimate, optimizer_bytes=-(-estimate.optimizer_bytes // num_owners))
    scratch_bytes = share_bytes * OPTIMIZER_SCRATCH.get(p.config.optimizer.name, 0) // num_owners
    in_step = replace(
        estimate,
        gradients_bytes=share_bytes + scratch_bytes,
        unsharded_bytes=min(share_bytes, GATHER_BYTES) * (1 + num_owners) // num_owners if num_owners > 1 else 0,
        activations_bytes=0,
        logits_bytes=0,
    )
    estimate = fullest((estimate, in_step))
    ids_bytes = p.config.max_seq_len * (p.device_batch_size + 3 * p.microbatch_size) * INT64_BYTES
    rounded_bytes = int(estimate.total_bytes * ROUNDING)
    rounded_bytes += (1 + slots_of(p.config)[0]) * count_rounding(p)
    libraries_bytes = 2 * (device.workspace_bytes if device is not None else WORKSPACES_BYTES)
    libraries_bytes += TIMING_BYTES if p.config.compile_config is not None else 0
    return replace(estimate, workspaces_bytes=libraries_bytes + SMALL_BYTES + ids_bytes + rounded_bytes)


# ----------------------------------------------------------------------------------------------------- advice


def advise_less_memory(config: TrainConfig, layout: Layout, device_type: str, microbatch_size: int = 1) -> str:
    """Name the three settings that by the estimate save the most, the best first, with what they save."""
    config = replace(config, device_train_microbatch_size=microbatch_size)
    fsdp = config.sharding
    options = {
        f"fsdp_config.{key}: {str(value).lower() if value is True else value}": replace(
            config, fsdp_config=replace(fsdp, **{key: value})
        )
        for key, value in (
            ("sharding_strategy", "FULL_SHARD"),
            ("activation_checkpointing", True),
            ("reduce_every_microbatch", True),
            ("mixed_precision", "PURE"),
        )
        if not (key == "activation_checkpointing" and layout.pipeline > 1 and config.pipeline.splits_backward)
    }
    options["precision: amp_bf16"] = replace(config, precision="amp_bf16")
    half = microbatch_size // 2
    if half and (text := _smaller_microbatch(config, layout, half)) is not None:
        options[text] = replace(config, device_train_microbatch_size=half)

    def saved_by(changed: TrainConfig, times: int = 1) -> int:
        changed_layout = layout_of(changed, times * layout.world_size, layout.node_size)
        return now.total_bytes - estimate_training_memory(changed, changed_layout).total_bytes

    now = estimate_training_memory(config, layout)
    saved = {text: saved_by(option) for text, option in options.items()}
    saved["twice as many devices"] = saved_by(config, times=2)
    refuses_offload = layout.pipeline > 1 or config.optimizer.name == "muon" or fsdp.sharding_strategy == "ZERO_1"
    if device_type == "cuda" and not fsdp.offload_optimizer and not refuses_offload:
        saved["fsdp_config.offload_optimizer: true"] = now.parameters_bytes + now.optimizer_bytes
    best = sorted((text for text in saved if saved[text] > 0), key=lambda text: -saved[text])[:3]
    words = [f"{text} (saves about {saved[text] / GIB:.2f} GiB)" for text in best]
    return f"; what helps most: {', '.join(words)}" if words else ""


def _smaller_microbatch(config: TrainConfig, layout: Layout, microbatch_size: int) -> str | None:
    """Name the run's own key for microbatches of so many samples; None if its schedule does not take them."""
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    count, pipeline = -(-num_samples // microbatch_size), config.pipeline
    if layout.pipeline > 1 and not pipeline.takes_microbatches(count):
        return None
    if layout.pipeline == 1 or pipeline.num_microbatches is None:
        return f"device_train_microbatch_size: {microbatch_size}"
    return None if num_samples % count else f"pp_config.num_microbatches: {count}"
