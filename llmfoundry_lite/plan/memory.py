"""How much memory one device of a run needs: a first estimate, pure arithmetic, no torch.

Owns what the run adds to `plan/model_memory.py`: the optimizer's step, cuBLAS' workspaces, token ids, and what a rank
of a pipeline holds while it plays its schedule. Left out: the device's context and libraries, communication buffers,
and the allocator's fragmentation.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import ModelConfig, PipelineConfig, TrainConfig
from llmfoundry_lite.config.stages import Stage, stages_of
from llmfoundry_lite.hardware import MIB, Accelerator
from llmfoundry_lite.plan.model_memory import (
    FP32_BYTES,
    MemoryEstimate,
    estimate_memory,
    estimate_moments,
    rounding_bytes,
)
from llmfoundry_lite.plan.schedule import Pass, few_rounds, order_of

INT64_BYTES = 8
WORKSPACES_BYTES = 32 * MIB
"""Scratch memory of matrix products for each of the two threads that compute: the most that a device takes."""
SMALL_BYTES = 3 * MIB // 2
"""Of tensors too small to be counted, and of blocks that torch's allocator does not split; by rehearsals."""
ROUNDING = 1 / 300
"""By how much more torch's allocator gives, which rounds up; by rehearsals."""
GATHER_BYTES = 1 << 27
"""Of parameters that ZeRO-1 gathers at a time after a step."""
OPTIMIZER_SLOTS = {"lion": (1,), "decoupled_lionw": (1,), "muon": (1, 2)}
"""Numbers an optimizer keeps for each parameter of a block, and of what is outside of blocks if that differs."""
ADAMW_SLOTS = (2,)
"""One of a user's own is taken to keep as many."""
OPTIMIZER_SCRATCH = {"lion": 1, "decoupled_lionw": 1}
"""Numbers for each parameter that it needs during its step; torch's fused AdamW needs none."""


def estimate_training_memory(config: TrainConfig, layout: Layout, device: Accelerator | None = None) -> MemoryEstimate:
    """The estimate for a run on devices that are divided so; of a pipeline, for its fullest stage.

    Without `device` libraries take the most that they do on any.
    """
    if layout.pipeline == 1:
        return _estimate_part(config, layout, device)
    ranks: dict[Any, tuple[int, list[Stage]]] = {}
    for rank, stages in enumerate(stages_of(config.model, config.pipeline)):
        # Of ranks whose stages are alike, the first keeps the most.
        ranks.setdefault(tuple((len(s.blocks), s.is_first, s.is_last) for s in stages), (rank, stages))
    return max((_play(config, layout, *of, device) for of in ranks.values()), key=lambda estimate: estimate.total_bytes)


def estimate_stages(
    config: TrainConfig, layout: Layout, device: Accelerator | None = None
) -> list[tuple[list[Stage], MemoryEstimate]]:
    """For each rank of a pipeline its stages, and what a device of it needs: the most while it plays its schedule."""
    return [
        (stages, _play(config, layout, rank, stages, device))
        for rank, stages in enumerate(stages_of(config.model, config.pipeline))
    ]


class _Chunk(NamedTuple):
    """One stage of a rank that may have several. Bytes."""

    kept: int
    """Of a microbatch, from its forward pass to its backward pass."""
    in_forward: int
    """More than that, in the forward pass: the loss."""
    early: int
    """More than what is kept, when the backward pass begins."""
    late: int
    """When it ends, of the microbatch, whose activations are gone."""
    apart: int
    """Kept from the gradient of the inputs to that of the weights, where they are computed apart."""
    gradients: int
    """Whole, in the type in which they are summed."""
    loose: int
    """Those of the weights, computed apart, until the next backward pass adds them to the sum."""
    num_blocks: int


def _play(
    config: TrainConfig, layout: Layout, rank: int, stages: list[Stage], device: Accelerator | None
) -> MemoryEstimate:
    """Gradients wait whole for the end of the schedule, and with them the parameters. There are buffers for what all
    microbatches send and receive."""
    pipeline, options = config.pipeline, _options_of(config, layout)
    device_batch_size = -(-config.global_train_batch_size // layout.num_data_ranks)
    num_microbatches = -(-device_batch_size // options["microbatch_size"])
    model = _model_of(config.model, stages)
    moments = estimate_moments(model, **options)
    in_loss = moments["in_loss"]
    num_runs = layout.tensor if config.sequence_parallel else 1
    hidden_bytes = _hidden_bytes(config, options["microbatch_size"], num_runs)
    buffers_bytes = hidden_bytes * num_microbatches * sum(2 - stage.is_first - stage.is_last for stage in stages)
    is_apart = pipeline.schedule in ("zero_bubble", "zbv")
    chunks = {stage.index: _measure_chunk(config, options, stage, hidden_bytes, is_apart) for stage in stages}

    held = 0
    summed, loose = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
    peak = 0, 0  # activations, gradients
    for kind, run, _ in _order(pipeline, rank, num_microbatches):
        chunk, gradients = chunks[run], sum(summed.values()) + sum(loose.values())
        if kind == "F":
            held += chunk.kept
            moments_of_pass = [(held + chunk.in_forward, gradients)]
        elif is_apart and run and kind == "B":
            held += chunk.apart
            # Block by block, the 16-bit gradients of the weights are added to the sum in fp32 now. Where such passes of
            # a run follow each other, rehearsals still hold as much of them as one pass gives.
            still_there = chunk.loose if summed[run] and not loose[run] else 0
            unsummed = gradients - loose[run] * max(0, chunk.num_blocks - 4) // chunk.num_blocks
            moments_of_pass = [(held + chunk.early + still_there, unsummed)]
            if loose[run]:
                summed[run], loose[run] = chunk.gradients, 0
        elif is_apart and run:
            moments_of_pass = [(held, gradients)]
            held -= chunk.kept + chunk.apart
            summed[run], loose[run] = (summed[run], chunk.loose) if chunk.loose else (chunk.gradients, 0)
        elif is_apart and kind == "B":
            continue  # nobody waits for the gradient of the first inputs
        else:
            moments_of_pass = [(held + chunk.early, gradients)]
            held -= chunk.kept
            summed[run] = chunk.gradients
            moments_of_pass += [(held + chunk.late, sum(summed.values()) + sum(loose.values()))]
        peak = max(peak, *moments_of_pass, key=sum)
    activations, waiting = peak
    playing = dataclasses.replace(
        in_loss,
        gradients_bytes=waiting,
        unsharded_bytes=in_loss.unsharded_bytes - _copies_bytes(model, options),
        activations_bytes=buffers_bytes + activations,
        logits_bytes=0,
    )
    sharing = dataclasses.replace(
        moments.get("at_embeddings", in_loss), activations_bytes=buffers_bytes, logits_bytes=0
    )
    estimate = max(playing, sharing, key=lambda moment: moment.total_bytes)
    return _with_the_rest(dataclasses.replace(config, model=model), layout, estimate, device)


def _order(pipeline: PipelineConfig, rank: int, num_microbatches: int) -> Sequence[Pass]:
    """Of a few rounds: after those nothing changes, but where all microbatches go forward first."""
    degree = pipeline.pipeline_parallel_degree
    if pipeline.schedule != "gpipe":
        num_microbatches = few_rounds(degree, num_microbatches)
    return order_of(pipeline.schedule, rank, degree, num_microbatches, pipeline.num_runs)


def _model_of(model: ModelConfig, stages: list[Stage]) -> ModelConfig:
    """What a rank, or a stage, has of it."""
    is_first, is_last = stages[0].is_first, stages[-1].is_last
    return dataclasses.replace(
        model,
        n_layers=sum(len(stage.blocks) for stage in stages),
        vocab_size=model.vocab_size if is_first or is_last else 1,
        tie_word_embeddings=model.tie_word_embeddings or not (is_first and is_last),
        learned_pos_emb=model.learned_pos_emb and is_first,
    )


def _copies_bytes(model: ModelConfig, options: dict[str, Any]) -> int:
    """Of `unsharded_bytes` in the loss: parameters that one microbatch's forward pass has cast."""
    if options["has_fsdp"] and (options["mixed_precision"] != "FULL" or options["precision"] in ("fp32", "tf32")):
        return 0
    whole_bytes = estimate_moments(model, **options)["in_loss"].unsharded_bytes
    if not options["has_fsdp"]:
        return whole_bytes
    half = estimate_moments(model, **{**options, "mixed_precision": "DEFAULT"})["in_loss"]
    return whole_bytes - FP32_BYTES // 2 * half.unsharded_bytes


def _hidden_bytes(config: TrainConfig, microbatch_size: int, num_runs: int = 1) -> int:
    """Of a microbatch, or of one of `num_runs` that divide the stream, as stages send it to each other."""
    is_whole = config.precision in ("fp32", "tf32") or config.sharding.mixed_precision == "FULL"
    stream_bytes = FP32_BYTES if is_whole else 2
    num_tokens = microbatch_size * config.max_seq_len // config.context.context_parallel_degree
    return num_tokens // num_runs * config.model.d_model * stream_bytes


def _measure_chunk(
    config: TrainConfig, options: dict[str, Any], stage: Stage, hidden_bytes: int, is_apart: bool
) -> _Chunk:
    model = _model_of(config.model, [stage])
    moments, longer = (
        estimate_moments(part, **options) for part in (model, dataclasses.replace(model, n_layers=model.n_layers + 1))
    )
    in_loss, at_end = moments["in_loss"], moments["at_last_block"]
    block_bytes = longer["in_loss"].activations_bytes - in_loss.activations_bytes
    kept_bytes = in_loss.activations_bytes
    whole_bytes = _hidden_bytes(config, options["microbatch_size"])
    embedding = -(-model.vocab_size // options["tensor_parallel_degree"]) * model.d_model
    is_input_kept = config.sharding.activation_checkpointing or model.norm_type.startswith("low_precision_")
    if not stage.is_first and is_input_kept:
        kept_bytes -= hidden_bytes  # it is in the buffer that has received it
    if not stage.is_last:
        kept_bytes -= whole_bytes  # no last norm, but what is sent
    # Autograd keeps each microbatch's copies in 16 bits.
    kept_bytes += _copies_bytes(model, options)
    gradients_bytes, late_bytes = in_loss.gradients_bytes, at_end.activations_bytes
    # Gradients of inputs wait here until they are sent.
    in_forward_bytes = 0 if stage.is_first else (7 if is_apart else 2) * hidden_bytes
    early_bytes = late_bytes - block_bytes + 2 * hidden_bytes
    if stage.is_last:
        loss_bytes = embedding * FP32_BYTES + whole_bytes
        in_forward_bytes += in_loss.logits_bytes - loss_bytes
        kept_bytes += loss_bytes
        # Its gradient is scaled, and computed with; where that runs twice, not in its place.
        early_bytes = max(early_bytes - loss_bytes, embedding * FP32_BYTES * is_apart)
        early_bytes += moments["at_first_block"].logits_bytes
    if stage.is_first:
        late_bytes = max(late_bytes, moments.get("at_embeddings", at_end).logits_bytes + hidden_bytes)
    apart_bytes = loose_bytes = 0
    if is_apart:
        tensor, d = options["tensor_parallel_degree"], model.d_model
        kv_dim, num_up = model.num_kv_heads * model.head_dim, 2 if model.ffn_config.ffn_type == "mptglu" else 1
        # Of what comes out of products and norms.
        width = (num_up * model.ffn_dim + d + 2 * kv_dim) // tensor
        apart_bytes = model.n_layers * (whole_bytes // d * width + 4 * hidden_bytes)
        if not stage.is_first:  # of the microbatch before, until Python has forgotten it
            early_bytes += apart_bytes // model.n_layers
        if options["has_fsdp"] and config.precision not in ("fp32", "tf32"):
            loose_bytes = gradients_bytes // 2
    return _Chunk(
        kept_bytes, in_forward_bytes, early_bytes, late_bytes, apart_bytes, gradients_bytes, loose_bytes, model.n_layers
    )


def _estimate_part(config: TrainConfig, layout: Layout, device: Accelerator | None) -> MemoryEstimate:
    """Of a model that is all on one stage."""
    return _with_the_rest(config, layout, estimate_memory(config.model, **_options_of(config, layout)), device)


def _options_of(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """Of `estimate_moments`."""
    fsdp = config.sharding
    stage_size = layout.world_size // layout.pipeline
    device_batch_size = -(-config.global_train_batch_size // layout.num_data_ranks)
    microbatch_size = config.first_microbatch_size(device_batch_size)
    return dict(  # noqa: C408
        seq_len=config.max_seq_len,
        microbatch_size=microbatch_size,
        reduces_every_microbatch=config.reduces_every_microbatch or microbatch_size == device_batch_size,
        has_one_microbatch=microbatch_size == device_batch_size,
        shard_degree=layout.of_parameters.shard,
        has_fsdp=stage_size > 1 or config.compile_config is not None or fsdp.offload_optimizer,
        tensor_parallel_degree=layout.tensor,
        sequence_parallel=config.sequence_parallel,
        context=config.context,
        precision=config.precision,
        mixed_precision=fsdp.mixed_precision,
        reshard_after_forward=fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and layout.pipeline == 1,
        activation_checkpointing=fsdp.activation_checkpointing,
        activation_cpu_offload=fsdp.activation_cpu_offload,
        logits_chunk_bytes=config.loss_chunk_mib * MIB,
        num_optimizer_slots=slots_of(config)[0],
        num_outside_slots=slots_of(config)[-1],
    )


def _with_the_rest(
    config: TrainConfig, layout: Layout, estimate: MemoryEstimate, device: Accelerator | None
) -> MemoryEstimate:
    """Or the optimizer's step, where that takes more; and what is small."""
    fsdp = config.sharding
    device_batch_size = -(-config.global_train_batch_size // layout.num_data_ranks)
    microbatch_size = config.first_microbatch_size(device_batch_size)
    share_bytes, num_owners = estimate.parameters_bytes, 1
    if fsdp.sharding_strategy == "ZERO_1":
        num_owners = layout.of_parameters.replicate
    estimate = dataclasses.replace(estimate, optimizer_bytes=-(-estimate.optimizer_bytes // num_owners))
    scratch_bytes = share_bytes * OPTIMIZER_SCRATCH.get(config.optimizer.name, 0) // num_owners
    in_step = dataclasses.replace(
        estimate,
        gradients_bytes=share_bytes + scratch_bytes,
        unsharded_bytes=min(share_bytes, GATHER_BYTES) * (1 + num_owners) // num_owners if num_owners > 1 else 0,
        activations_bytes=0,
        logits_bytes=0,
    )
    estimate = max(estimate, in_step, key=lambda moment: moment.total_bytes)
    ids_bytes = config.max_seq_len * (device_batch_size + 3 * microbatch_size) * INT64_BYTES
    rounded_bytes = int(estimate.total_bytes * ROUNDING) + (1 + slots_of(config)[0]) * rounding_bytes(
        config.model, layout.of_parameters.shard, layout.tensor
    )
    libraries_bytes = 2 * (device.workspace_bytes if device is not None else WORKSPACES_BYTES)
    return dataclasses.replace(estimate, workspaces_bytes=libraries_bytes + SMALL_BYTES + ids_bytes + rounded_bytes)


def slots_of(config: TrainConfig) -> tuple[int, ...]:
    """Numbers kept for each parameter of a block, and perhaps of what is outside of blocks."""
    return OPTIMIZER_SLOTS.get(config.optimizer.name, ADAMW_SLOTS)
