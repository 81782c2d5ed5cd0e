"""Memory that one device of a run needs, and the settings that would save the most of it. Arithmetic, no torch.

`model_memory.py` estimates what the model takes during forward and backward. This module adds the optimizer's step,
workspaces of libraries and token ids. A companion adds what a rank of a pipeline holds while it plays its schedule.
Left out are the device's context and libraries, communication buffers and the allocator's fragmentation.

Sizes that no formula gives come from rehearsals: runs of the real code on simulated devices, whose allocations are
recorded (`llmfoundry-lite rehearse`).
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
    optimizer_slots,
)
from llmfoundry_lite.estimate.portion import Portion
from llmfoundry_lite.hardware import GIB, MIB, Accelerator

INT64_BYTES = 8
NUM_PRODUCT_THREADS = 2
"""Threads that compute matrix products: Python's and autograd's."""
WORKSPACE_BYTES = 32 * MIB
"""Scratch memory of matrix products for each of these threads: the most on any device."""
TIMING_BYTES = 50 * MIB
"""Buffer with which a compiler clears the L2 cache between two timings of a kernel: that cache's size, on an H100."""
SMALL_BYTES = 3 * MIB // 2
"""Tensors too small to be counted, and blocks that torch's allocator does not split; by rehearsals."""
ROUNDING = 1 / 300
"""Share that torch's allocator adds by rounding up; by rehearsals."""
GATHER_BYTES = 1 << 27
"""Bytes of parameters that ZeRO-1 gathers at a time after a step, as `llmfoundry_layouts.zero` does."""
OPTIMIZER_SCRATCH = {"lion": 1, "decoupled_lionw": 1}
"""Temporary fp32 elements for each parameter during an optimizer's step. torch's fused AdamW needs none."""


def estimate_training_memory(config: TrainConfig, layout: Layout, device: Accelerator | None = None) -> MemoryEstimate:
    """Estimate the memory of one device of a run, at the moment when it needs the most.

    In a pipeline that is a device of the rank that needs the most. Without `device`, libraries are assumed to take the
    most that they take on any device.
    """
    if layout.pipeline > 1:
        key = "pp_config.pipeline_parallel_degree"
        estimate_fullest = companions.load("llmfoundry_layouts.stage_memory:estimate_fullest", key)
        return estimate_fullest(config, layout, device)
    portion = Portion(config, layout)
    return add_step_and_libraries(portion, largest(estimate_moments(portion).values()), device)


def with_cpu_attention(config: TrainConfig) -> TrainConfig:
    """Return a configuration whose estimate is that of a CPU, where every implementation of attention needs a bias.

    The estimate of any other configuration is that of a GPU.
    """
    attn_config = replace(config.model.attn_config, attn_impl="sdpa")
    return replace(config, model=replace(config.model, attn_config=attn_config))


def largest(estimates: Iterable[MemoryEstimate]) -> MemoryEstimate:
    """Return the estimate with the largest total; of equal ones, the first."""
    return max(estimates, key=lambda estimate: estimate.total_bytes)


def add_step_and_libraries(portion: Portion, estimate: MemoryEstimate, device: Accelerator | None) -> MemoryEstimate:
    """Return the estimate for a whole batch, given the peak of its forward and backward passes.

    If the optimizer's step needs more than those passes, the result describes the step instead. Either way it has in
    `workspaces_bytes` the workspaces of libraries, token ids, small tensors and the rounding of torch's allocator.
    """
    # ZeRO-1: this many devices share the optimizer's state and its step.
    num_owners = portion.layout.of_parameters.replicate if portion.shares_optimizer else 1
    estimate = replace(estimate, optimizer_bytes=-(-estimate.optimizer_bytes // num_owners))

    # In the step no activations are left. ZeRO-1 gathers parameters into a buffer for all owners' parts.
    parameters_bytes = estimate.parameters_bytes
    scratch_bytes = parameters_bytes * OPTIMIZER_SCRATCH.get(portion.config.optimizer.name, 0) // num_owners
    gathered_bytes = 0
    if num_owners > 1:
        gathered_bytes = min(parameters_bytes, GATHER_BYTES) * (1 + num_owners) // num_owners
    in_step = replace(
        estimate,
        gradients_bytes=parameters_bytes + scratch_bytes,
        unsharded_bytes=gathered_bytes,
        activations_bytes=0,
        logits_bytes=0,
    )
    estimate = largest((estimate, in_step))

    # Token ids of a batch and of three microbatches.
    ids_bytes = portion.config.max_seq_len * (portion.device_batch_size + 3 * portion.microbatch_size) * INT64_BYTES
    # Parameters and optimizer state are rounded up alike.
    rounded_bytes = int(estimate.total_bytes * ROUNDING)
    rounded_bytes += (1 + optimizer_slots(portion.config)[0]) * count_rounding(portion)
    workspace_bytes = WORKSPACE_BYTES if device is None else device.workspace_bytes
    libraries_bytes = NUM_PRODUCT_THREADS * workspace_bytes
    if portion.config.compile_config is not None:
        libraries_bytes += TIMING_BYTES
    return replace(estimate, workspaces_bytes=libraries_bytes + SMALL_BYTES + ids_bytes + rounded_bytes)


# ----------------------------------------------------------------------------------------------------- advice

MAX_ADVICE = 3
"""Settings that a message names."""


def advise_less_memory(config: TrainConfig, layout: Layout, device_type: str, microbatch_size: int = 1) -> str:
    """Name up to three settings that would save the most memory on a device, the best first.

    `microbatch_size` is the number of samples that did not fit. Each candidate is estimated in place of the present
    setting. Returns the end of a sentence, such as "; what helps most: precision: amp_bf16 (saves about 3.10 GiB)", or
    an empty text if no candidate saves anything.
    """
    config = replace(config, device_train_microbatch_size=microbatch_size)
    present = estimate_training_memory(config, layout)

    def estimate_saving(changed_config: TrainConfig, num_devices: int) -> int:
        """Return the bytes that a device needs less with this configuration on this many devices."""
        changed_layout = layout_of(changed_config, num_devices, layout.node_size)
        return present.total_bytes - estimate_training_memory(changed_config, changed_layout).total_bytes

    saved_bytes: dict[str, int] = {}
    for setting, changed_config in _settings_to_try(config, layout, microbatch_size).items():
        saved_bytes[setting] = estimate_saving(changed_config, layout.world_size)
    saved_bytes["twice as many devices"] = estimate_saving(config, 2 * layout.world_size)
    if device_type == "cuda" and _can_offload_optimizer(config, layout):
        # The estimate has no term for offloading. It moves parameters and optimizer state to the host.
        saved_bytes["fsdp_config.offload_optimizer: true"] = present.parameters_bytes + present.optimizer_bytes

    helpful = [setting for setting in saved_bytes if saved_bytes[setting] > 0]
    helpful.sort(key=lambda setting: -saved_bytes[setting])
    if not helpful:
        return ""
    advice = [f"{setting} (saves about {saved_bytes[setting] / GIB:.2f} GiB)" for setting in helpful[:MAX_ADVICE]]
    return f"; what helps most: {', '.join(advice)}"


def _settings_to_try(config: TrainConfig, layout: Layout, microbatch_size: int) -> dict[str, TrainConfig]:
    """Return changed configurations that may need less memory.

    Each key is the line of YAML by which the user makes the change, such as "precision: amp_bf16".
    """
    fsdp = config.sharding
    settings = {"fsdp_config.sharding_strategy: FULL_SHARD": replace(fsdp, sharding_strategy="FULL_SHARD")}
    # A pipeline's schedule that splits the backward pass refuses checkpointing.
    can_checkpoint = layout.pipeline == 1 or not config.pipeline.splits_backward
    if can_checkpoint:
        settings["fsdp_config.activation_checkpointing: true"] = replace(fsdp, activation_checkpointing=True)
    settings["fsdp_config.reduce_every_microbatch: true"] = replace(fsdp, reduce_every_microbatch=True)
    settings["fsdp_config.mixed_precision: PURE"] = replace(fsdp, mixed_precision="PURE")
    changed_configs = {setting: replace(config, fsdp_config=changed) for setting, changed in settings.items()}

    changed_configs["precision: amp_bf16"] = replace(config, precision="amp_bf16")
    half_size = microbatch_size // 2
    if half_size > 0:
        setting = _name_smaller_microbatch(config, layout, half_size)
        if setting is not None:
            changed_configs[setting] = replace(config, device_train_microbatch_size=half_size)
    return changed_configs


def _can_offload_optimizer(config: TrainConfig, layout: Layout) -> bool:
    """Return whether `fsdp_config.offload_optimizer` is off, and nothing else in the configuration rules it out."""
    if config.sharding.offload_optimizer:
        return False
    is_ruled_out = layout.pipeline > 1 or config.optimizer.name == "muon"
    return not is_ruled_out and config.sharding.sharding_strategy != "ZERO_1"


def _name_smaller_microbatch(config: TrainConfig, layout: Layout, microbatch_size: int) -> str | None:
    """Return the line of YAML that makes this run compute microbatches of `microbatch_size` samples.

    A pipeline has a schedule that takes certain numbers of microbatches. Returns None if it does not take the number
    that this size makes.
    """
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    num_microbatches = -(-num_samples // microbatch_size)
    if layout.pipeline == 1:
        return f"device_train_microbatch_size: {microbatch_size}"
    if not config.pipeline.takes_microbatches(num_microbatches):
        return None
    if config.pipeline.num_microbatches is None:
        return f"device_train_microbatch_size: {microbatch_size}"
    if num_samples % num_microbatches:
        return None
    return f"pp_config.num_microbatches: {num_microbatches}"
