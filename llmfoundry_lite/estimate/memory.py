"""Estimates the memory that one device of a run needs, and the settings that would save the most. Arithmetic, no torch.

`model_memory.py` estimates how much the model takes during forward and backward. This module adds the optimizer's step,
workspaces of libraries and token ids. A companion adds the memory of a pipeline's schedule. The device's context, the
code of its libraries, communication buffers and the allocator's fragmentation are not counted.

Sizes that no formula gives come from rehearsals: runs of the real code on simulated devices, whose allocations are
recorded (`llmfoundry-lite rehearse`).
"""

from collections.abc import Iterable
from dataclasses import replace

from llmfoundry_lite import companions
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.optimizers import estimated_optimizer
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.model_memory import MemoryEstimate, estimate_moments, optimizer_slots
from llmfoundry_lite.estimate.parameters import count_rounding
from llmfoundry_lite.estimate.portion import Portion
from llmfoundry_lite.hardware import GIB, MIB, Accelerator

INT64_BYTES = 8
NUM_PRODUCT_THREADS = 2
"""Number of threads that compute matrix products: Python's and autograd's."""
WORKSPACE_BYTES = 32 * MIB
"""Scratch memory of matrix products for each of these threads: the most on any device."""
TIMING_BYTES = 50 * MIB
"""Buffer with which a compiler clears the L2 cache between two timings of a kernel. It has the size of that cache on an
H100."""
SMALL_BYTES = 3 * MIB // 2
"""Tensors too small to be counted, and blocks that torch's allocator does not split; by rehearsals."""
ROUNDING = 1 / 300
"""Fraction of all memory that torch's allocator adds by rounding up; by rehearsals."""
GATHER_BYTES = 1 << 27
"""Bytes of parameters that ZeRO-1 gathers at a time after a step, as in `llmfoundry_layouts.zero`."""


def estimate_training_memory(config: TrainConfig, layout: Layout, device: Accelerator | None = None) -> MemoryEstimate:
    """Estimate the memory of one device of a run, at the moment when it needs the most.

    layout: how the run is divided among devices.
    device: the type of device, for the workspaces of its libraries; None assumes the most on any device.

    In a pipeline, whose ranks hold different blocks, the result is that of the rank that needs the most. Raises
    ConfigError if the companion for pipelines is needed and not installed.
    """
    if layout.pipeline > 1:
        key = "pp_config.pipeline_parallel_degree"
        estimate_fullest = companions.load("llmfoundry_layouts.stage_memory:estimate_fullest", key)
        return estimate_fullest(config, layout, device)
    portion = Portion(config, layout)
    return add_step_and_libraries(portion, largest(estimate_moments(portion).values()), device)


def with_cpu_attention(config: TrainConfig) -> TrainConfig:
    """Return a copy of a configuration whose estimate describes a CPU instead of a GPU.

    On a CPU every implementation of attention needs a bias tensor for masks and ALiBi. The estimate counts one for the
    implementation "sdpa", so the copy has that one.
    """
    attn_config = replace(config.model.attn_config, attn_impl="sdpa")
    return replace(config, model=replace(config.model, attn_config=attn_config))


def largest(estimates: Iterable[MemoryEstimate]) -> MemoryEstimate:
    """Return the estimate with the largest total; of equal ones, the first."""
    return max(estimates, key=lambda estimate: estimate.total_bytes)


def add_step_and_libraries(portion: Portion, estimate: MemoryEstimate, device: Accelerator | None) -> MemoryEstimate:
    """Return the estimate for a whole batch, given the peak of its forward and backward passes.

    portion: the part of the run that the device computes.
    estimate: the memory at the peak of the forward and backward passes, without what this function adds.
    device: the type of device; None assumes the largest workspaces.

    The result describes either that peak or the optimizer's step, whichever needs more. It has in `workspaces_bytes`
    the workspaces of libraries, token ids, small tensors and the rounding of torch's allocator.
    """
    # With ZeRO-1 this many devices divide the optimizer's state and its step; otherwise each does its whole step.
    num_owners = portion.layout.of_parameters.replicate if portion.shares_optimizer else 1
    estimate = replace(estimate, optimizer_bytes=-(-estimate.optimizer_bytes // num_owners))

    # In the step, no activations are left, and every parameter has its gradient. The optimizer may need temporary
    # tensors. ZeRO-1 gathers the new parameters into a buffer for all owners' parts, beside the part that this device
    # sends.
    parameters_bytes = estimate.parameters_bytes
    num_scratch_per_parameter = estimated_optimizer(portion.config.optimizer.name).num_scratch
    scratch_bytes = parameters_bytes * num_scratch_per_parameter // num_owners
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

    # Add the token ids of a batch and of three microbatches.
    num_samples = portion.device_batch_size * portion.config.parts_of_largest_batch + 3 * portion.microbatch_size
    ids_bytes = portion.config.max_seq_len * num_samples * INT64_BYTES

    # Add what torch's allocator rounds up. The parameters and each slot of the optimizer's state are rounded up alike.
    rounded_bytes = int(estimate.total_bytes * ROUNDING)
    rounded_bytes += int((1 + optimizer_slots(portion.config)[0]) * count_rounding(portion))

    # Add the workspaces of libraries.
    workspace_bytes = WORKSPACE_BYTES if device is None else device.workspace_bytes
    libraries_bytes = NUM_PRODUCT_THREADS * workspace_bytes
    if portion.config.compile_config is not None:
        libraries_bytes += TIMING_BYTES
    return replace(estimate, workspaces_bytes=libraries_bytes + SMALL_BYTES + ids_bytes + rounded_bytes)


# ----------------------------------------------------------------------------------------------------- advice

MAX_ADVICE = 3
"""Largest number of settings that a message names."""


def advise_less_memory(config: TrainConfig, layout: Layout, device_type: str, microbatch_size: int = 1) -> str:
    """Name up to three settings that would save the most memory on a device, the best first.

    device_type: "cuda" or "cpu".
    microbatch_size: the number of samples that did not fit.

    Returns the end of a sentence, such as "; what helps most: precision: amp_bf16 (saves about 3.10 GiB)", or an empty
    text if no candidate saves anything.
    """
    config = replace(config, device_train_microbatch_size=microbatch_size)
    present_estimate = estimate_training_memory(config, layout)

    def estimate_saving(changed_config: TrainConfig, num_devices: int) -> int:
        """Return by how many bytes per device a changed configuration on this many devices needs less."""
        changed_layout = layout_of(changed_config, num_devices, layout.node_size)
        return present_estimate.total_bytes - estimate_training_memory(changed_config, changed_layout).total_bytes

    # Estimate each candidate in place of the present setting.
    saved_bytes: dict[str, int] = {}
    """Setting -> the bytes that it saves on a device; negative if it needs more."""
    for setting, changed_config in _settings_to_try(config, layout, microbatch_size).items():
        saved_bytes[setting] = estimate_saving(changed_config, layout.world_size)
    saved_bytes["twice as many devices"] = estimate_saving(config, 2 * layout.world_size)
    if device_type == "cuda" and _can_offload_optimizer(config, layout):
        # The estimate has no term for offloading. It moves parameters and optimizer state to the host.
        offloaded_bytes = present_estimate.parameters_bytes + present_estimate.optimizer_bytes
        saved_bytes["fsdp_config.offload_optimizer: true"] = offloaded_bytes

    # Name those that save the most.
    helpful_settings = [setting for setting in saved_bytes if saved_bytes[setting] > 0]
    helpful_settings.sort(key=lambda setting: -saved_bytes[setting])
    if not helpful_settings:
        return ""
    advice: list[str] = []
    for setting in helpful_settings[:MAX_ADVICE]:
        advice.append(f"{setting} (saves about {saved_bytes[setting] / GIB:.2f} GiB)")
    return f"; what helps most: {', '.join(advice)}"


def _settings_to_try(config: TrainConfig, layout: Layout, microbatch_size: int) -> dict[str, TrainConfig]:
    """Return changed configurations that may need less memory.

    The result maps the line of YAML by which the user makes the change, such as "precision: amp_bf16", to the changed
    configuration. It also has settings that the configuration has already, which save nothing. `microbatch_size` is the
    present one, and its half is tried.
    """
    # Change one setting of sharding at a time.
    fsdp = config.sharding
    changed_fsdp = {"fsdp_config.sharding_strategy: FULL_SHARD": replace(fsdp, sharding_strategy="FULL_SHARD")}
    # A pipeline's schedule that splits the backward pass refuses checkpointing.
    can_checkpoint = layout.pipeline == 1 or not config.pipeline.splits_backward
    if can_checkpoint:
        changed_fsdp["fsdp_config.activation_checkpointing: true"] = replace(fsdp, activation_checkpointing=True)
    changed_fsdp["fsdp_config.reduce_every_microbatch: true"] = replace(fsdp, reduce_every_microbatch=True)
    changed_fsdp["fsdp_config.mixed_precision: PURE"] = replace(fsdp, mixed_precision="PURE")
    changed_configs = {setting: replace(config, fsdp_config=changed) for setting, changed in changed_fsdp.items()}

    # Change the precision, and the size of microbatches.
    changed_configs["precision: amp_bf16"] = replace(config, precision="amp_bf16")
    half_size = microbatch_size // 2
    if half_size > 0:
        setting = _name_smaller_microbatch(config, layout, half_size)
        if setting is not None:
            changed_configs[setting] = replace(config, device_train_microbatch_size=half_size)
    return changed_configs


def _can_offload_optimizer(config: TrainConfig, layout: Layout) -> bool:
    """Return whether `fsdp_config.offload_optimizer` is off, and the rest of the configuration would allow it.

    Pipelines, Muon and ZeRO-1 do not allow it.
    """
    if config.sharding.offload_optimizer:
        return False
    is_ruled_out = layout.pipeline > 1 or estimated_optimizer(config.optimizer.name).multiplies_matrices
    return not is_ruled_out and config.sharding.sharding_strategy != "ZERO_1"


def _name_smaller_microbatch(config: TrainConfig, layout: Layout, microbatch_size: int) -> str | None:
    """Return the line of YAML that makes this run compute microbatches of `microbatch_size` samples.

    That is "device_train_microbatch_size: 4" or, for a pipeline whose number of microbatches is set, such as
    "pp_config.num_microbatches: 8". Returns None if the pipeline's schedule does not take the number of microbatches
    that this size makes.
    """
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    num_microbatches = -(-num_samples // microbatch_size)
    if layout.pipeline == 1:
        return f"device_train_microbatch_size: {microbatch_size}"

    # A schedule takes certain numbers of microbatches, which must divide the batch if their number is set.
    if not config.pipeline.takes_microbatches(num_microbatches):
        return None
    if config.pipeline.num_microbatches is None:
        return f"device_train_microbatch_size: {microbatch_size}"
    if num_samples % num_microbatches:
        return None
    return f"pp_config.num_microbatches: {num_microbatches}"
