"""Memory that a device of a pipeline needs while its rank plays the schedule. Arithmetic, no torch."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from llmfoundry_layouts.schedule import Pass, few_rounds, order_of
from llmfoundry_layouts.stages import Stage, stages_of
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.memory import add_step_and_libraries, largest
from llmfoundry_lite.estimate.model_memory import MemoryEstimate, count_autocast_copies, estimate_moments
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import Accelerator


class _Chunk(NamedTuple):
    """Bytes of one of a rank's stages."""

    kept: int
    """Kept for a microbatch from its forward pass to its backward pass."""
    in_forward: int
    """Needed beside `kept` in the forward pass, for the loss."""
    early: int
    """Needed beside `kept` when the backward pass begins."""
    late: int
    """Held for the microbatch at the end of the backward pass, when its activations are freed."""
    apart: int
    """Kept between the pass for gradients of inputs and the one for weights, if they are separate."""
    gradients: int
    """Whole gradients, in the dtype in which they are summed."""
    loose: int
    """Gradients from a separate pass for weights, until the next backward pass adds them to the sum."""
    num_blocks: int


def estimate_fullest(config: TrainConfig, layout: Layout, device: Accelerator | None) -> MemoryEstimate:
    """Estimate the rank of a pipeline that needs the most."""
    ranks: dict[Any, tuple[int, list[Stage]]] = {}
    for rank, stages in enumerate(stages_of(config.model, config.pipeline)):
        # Of ranks whose stages are alike, the first keeps the most.
        ranks.setdefault(tuple((len(s.blocks), s.is_first, s.is_last) for s in stages), (rank, stages))
    return largest(estimate_rank(config, layout, rank, stages, device) for rank, stages in ranks.values())


def estimate_stages(
    config: TrainConfig, layout: Layout, device: Accelerator | None = None
) -> list[tuple[list[Stage], MemoryEstimate]]:
    """Estimate each rank of a pipeline. Returns its stages, and its memory at the peak of the schedule."""
    return [
        (stages, estimate_rank(config, layout, rank, stages, device))
        for rank, stages in enumerate(stages_of(config.model, config.pipeline))
    ]


def estimate_rank(
    config: TrainConfig, layout: Layout, rank: int, stages: list[Stage], device: Accelerator | None
) -> MemoryEstimate:
    """Estimate a rank of a pipeline. Gradients and parameters stay whole until the schedule ends.

    Send and receive buffers exist for all microbatches.
    """
    pipeline, whole = config.pipeline, Portion(config, layout)
    num_microbatches = -(-whole.device_batch_size // whole.microbatch_size)
    portion = _portion_of(whole, stages)
    moments = estimate_moments(portion)
    in_loss = moments["in_loss"]
    num_links = sum(2 - stage.is_first - stage.is_last for stage in stages)
    buffers_bytes = _sent_bytes(whole) * num_microbatches * num_links
    is_apart = pipeline.splits_backward
    chunks = {stage.index: _measure_chunk(whole, stage, is_apart) for stage in stages}
    degree = pipeline.pipeline_parallel_degree
    if pipeline.schedule != "gpipe":  # after a few rounds nothing changes, unless all microbatches go forward first
        num_microbatches = few_rounds(degree, num_microbatches)
    order = order_of(pipeline.schedule, rank, degree, num_microbatches, pipeline.num_runs)
    activations, gradients = _play(order, chunks, is_apart)
    playing = replace(
        in_loss,
        gradients_bytes=gradients,
        unsharded_bytes=in_loss.unsharded_bytes - _copies_bytes(portion),
        activations_bytes=buffers_bytes + activations,
        logits_bytes=0,
    )
    sharing = replace(moments.get("at_embeddings", in_loss), activations_bytes=buffers_bytes, logits_bytes=0)
    return add_step_and_libraries(portion, largest((playing, sharing)), device)


def _play(order: Iterable[Pass], chunks: dict[int, _Chunk], is_apart: bool) -> tuple[int, int]:
    """Return bytes of activations and of gradients at the moment when their sum is largest."""
    held = 0
    summed, loose = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
    peak = 0, 0
    for kind, run, _ in order:
        chunk, gradients = chunks[run], sum(summed.values()) + sum(loose.values())
        if kind == "F":
            held += chunk.kept
            moments = [(held + chunk.in_forward, gradients)]
        elif is_apart and run and kind == "B":
            held += chunk.apart
            # Block by block, the 16-bit gradients of the weights are now added to the fp32 sum. If such passes of a run
            # follow each other, the gradients of one pass stay allocated, as rehearsals show.
            still_there = chunk.loose if summed[run] and not loose[run] else 0
            unsummed = gradients - loose[run] * max(0, chunk.num_blocks - 4) // chunk.num_blocks
            moments = [(held + chunk.early + still_there, unsummed)]
            if loose[run]:
                summed[run], loose[run] = chunk.gradients, 0
        elif is_apart and run:
            moments = [(held, gradients)]
            held -= chunk.kept + chunk.apart
            summed[run], loose[run] = (summed[run], chunk.loose) if chunk.loose else (chunk.gradients, 0)
        elif is_apart and kind == "B":
            continue  # no stage waits for the gradient of the first inputs
        else:
            moments = [(held + chunk.early, gradients)]
            held -= chunk.kept
            summed[run] = chunk.gradients
            moments += [(held + chunk.late, sum(summed.values()) + sum(loose.values()))]
        peak = max(peak, *moments, key=sum)
    return peak


def _portion_of(whole: Portion, stages: list[Stage]) -> Portion:
    """Return the portion of the model in these stages: a rank's, or only one."""
    model, is_first, is_last = whole.model, stages[0].is_first, stages[-1].is_last
    part = replace(
        model,
        n_layers=sum(len(stage.blocks) for stage in stages),
        vocab_size=model.vocab_size if is_first or is_last else 1,
        tie_word_embeddings=model.tie_word_embeddings or not (is_first and is_last),
        learned_pos_emb=model.learned_pos_emb and is_first,
    )
    return replace(whole, config=replace(whole.config, model=part))


def _copies_bytes(portion: Portion) -> int:
    """Count those of the loss's `unsharded_bytes` that the forward pass of one microbatch has cast."""
    return count_autocast_copies(portion) if portion.has_fsdp else estimate_moments(portion)["in_loss"].unsharded_bytes


def _sent_bytes(portion: Portion) -> int:
    """Count bytes of a microbatch that stages send to each other."""
    return portion.num_tokens // portion.num_stream_parts * portion.model.d_model * portion.stream_bytes


def _measure_chunk(whole: Portion, stage: Stage, is_apart: bool) -> _Chunk:
    portion = _portion_of(whole, [stage])
    model, d = portion.model, portion.model.d_model
    moments = estimate_moments(portion)
    longer = estimate_moments(
        replace(portion, config=replace(portion.config, model=replace(model, n_layers=model.n_layers + 1)))
    )
    in_loss, at_end = moments["in_loss"], moments["at_last_block"]
    block_bytes = longer["in_loss"].activations_bytes - in_loss.activations_bytes
    sent_bytes, hidden_bytes = _sent_bytes(portion), portion.num_tokens * d * portion.stream_bytes
    kept_bytes = in_loss.activations_bytes
    if not stage.is_first and (portion.fsdp.activation_checkpointing or model.norm_type.startswith("low_precision_")):
        kept_bytes -= sent_bytes  # the input stays in its receive buffer
    if not stage.is_last:
        kept_bytes -= hidden_bytes  # no last norm, but what is sent
    # Autograd keeps the 16-bit copies of each microbatch.
    kept_bytes += _copies_bytes(portion)
    late_bytes = at_end.activations_bytes
    # Gradients of inputs wait here until they are sent.
    in_forward_bytes = 0 if stage.is_first else (7 if is_apart else 2) * sent_bytes
    early_bytes = late_bytes - block_bytes + 2 * sent_bytes
    if stage.is_last:
        loss_bytes = portion.num_embedding_elements * FP32_BYTES + hidden_bytes
        in_forward_bytes += in_loss.logits_bytes - loss_bytes
        kept_bytes += loss_bytes
        # The embedding's gradient is scaled in place, unless the backward pass is apart and needs it twice.
        early_bytes = max(early_bytes - loss_bytes, portion.num_embedding_elements * FP32_BYTES * is_apart)
        early_bytes += moments["at_first_block"].logits_bytes
    if stage.is_first:
        late_bytes = max(late_bytes, moments.get("at_embeddings", at_end).logits_bytes + sent_bytes)
    apart_bytes = loose_bytes = 0
    if is_apart:
        # The outputs of products and norms.
        width = (portion.num_up_matrices * model.ffn_dim + model.q_dim + 2 * model.kv_dim) // portion.layout.tensor
        apart_bytes = model.n_layers * (hidden_bytes // d * width + 4 * sent_bytes)
        if not stage.is_first:  # the microbatch before, until Python frees it
            early_bytes += apart_bytes // model.n_layers
        if portion.has_fsdp and not portion.is_fp32:
            loose_bytes = in_loss.gradients_bytes // 2
    return _Chunk(
        kept=kept_bytes,
        in_forward=in_forward_bytes,
        early=early_bytes,
        late=late_bytes,
        apart=apart_bytes,
        gradients=in_loss.gradients_bytes,
        loose=loose_bytes,
        num_blocks=model.n_layers,
    )
