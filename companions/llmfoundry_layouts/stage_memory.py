"""Memory of each rank of a pipeline: its stages go through the schedule's passes by arithmetic, without torch.

`estimate/model_memory.py` estimates a model on one device. Here it is applied to a rank's stages as if they were a
model, and corrected for what pipeline stages do differently.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmfoundry_layouts.schedule import Pass, limit_rounds, list_passes
from llmfoundry_layouts.stages import Stage, assign_stages
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.memory import add_step_and_libraries, largest
from llmfoundry_lite.estimate.model_memory import MemoryEstimate, count_autocast_copies, estimate_moments
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import Accelerator

# Tests compare the estimates with the memory that `llmfoundry-lite rehearse` measures. The first four numbers count
# tensors of the size that stages send to each other.
NUM_SENT_IN_FORWARD = 2
"""Held by a later stage beside its activations in a forward pass, most of it gradients that wait to be sent."""
NUM_SENT_IN_SPLIT_FORWARD = 7
"""The same for schedules that split the backward pass."""
NUM_SENT_IN_BACKWARD = 2
"""Held by a stage beside its activations when a backward pass begins."""
NUM_NORM_OUTPUTS = 4
"""Kept by a block from its B pass to its W pass, for its norms."""

NUM_UNSUMMED_BLOCKS = 4
"""Blocks whose 16-bit gradients still exist at the peak of a B pass, which adds them to the fp32 sum block by block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageBytes:
    """Bytes that one of a rank's stages needs. Activations are those of one microbatch."""

    kept: int
    """Activations, from the microbatch's forward pass to the end of its backward pass."""
    extra_in_forward: int
    """Needed beside `kept` during the forward pass: by the loss, and by gradients that wait to be sent."""
    extra_in_backward: int
    """Needed beside `kept` when the backward pass begins."""
    at_end_of_backward: int
    """Needed at the end of the backward pass, when `kept` has been freed."""
    between_passes: int
    """Kept beside `kept` from the B pass, for gradients of inputs, to the W pass, for gradients of weights."""
    gradients: int
    """Gradients of the stage's parameters in the dtype in which they are summed, from the first backward pass on."""
    unsummed_gradients: int
    """16-bit gradients that a W pass leaves, and that the stage's next B pass adds to the sum."""
    num_blocks: int
    """Number of blocks in the stage."""


class _Peak(NamedTuple):
    """The bytes of a rank at one moment of the schedule, without parameters, optimizer state and buffers."""

    activations_bytes: int
    gradients_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of both."""
        return self.activations_bytes + self.gradients_bytes


def estimate_fullest(config: TrainConfig, layout: Layout, device: Accelerator | None) -> MemoryEstimate:
    """Estimate the memory of the rank that needs the most in a run with pipeline parallelism.

    `device` decides how much the libraries take. Without it they are assumed to take the most of any device.
    """
    # Several ranks may have stages of the same kind and size. The first of them needs the most, because earlier ranks
    # keep the activations of more microbatches. So only that one is estimated.
    first_ranks: dict[tuple[tuple[int, bool, bool], ...], tuple[int, list[Stage]]] = {}
    for rank, stages in enumerate(assign_stages(config.model, config.pipeline)):
        shape = tuple((len(stage.blocks), stage.is_first, stage.is_last) for stage in stages)
        first_ranks.setdefault(shape, (rank, stages))

    return largest(estimate_rank(config, layout, rank, stages, device) for rank, stages in first_ranks.values())


def estimate_stages(
    config: TrainConfig, layout: Layout, device: Accelerator | None = None
) -> list[tuple[list[Stage], MemoryEstimate]]:
    """Return, for each rank of a pipeline, its stages and an estimate of its memory at the peak of the schedule."""
    return [
        (stages, estimate_rank(config, layout, rank, stages, device))
        for rank, stages in enumerate(assign_stages(config.model, config.pipeline))
    ]


def estimate_rank(
    config: TrainConfig, layout: Layout, rank: int, stages: list[Stage], device: Accelerator | None
) -> MemoryEstimate:
    """Estimate the memory of one rank of a pipeline at its peak, given its stages.

    Parameters and gradients stay whole on the rank until the schedule ends. Then gradients are reduced over devices,
    and the optimizer steps. The result describes the moment that needs the most: in the schedule, in that reduction, or
    in the step. Buffers to send and receive exist for every microbatch from the beginning to the end.

    `device` decides how much the libraries take. Without it they are assumed to take the most of any device.
    """
    pipeline = config.pipeline
    whole_model = Portion(config, layout)
    rank_portion = _select_stages(whole_model, stages)
    moments = estimate_moments(rank_portion)
    in_loss = moments["in_loss"]

    # The largest batch of the run has the most microbatches.
    num_samples = whole_model.device_batch_size * config.parts_of_largest_batch
    num_microbatches = -(-num_samples // whole_model.microbatch_size)

    # A stage exchanges activations and gradients with each of its neighbours. The first and the last have only one.
    num_neighbours = sum(2 - stage.is_first - stage.is_last for stage in stages)
    buffers_bytes = _count_sent_bytes(whole_model) * num_microbatches * num_neighbours

    # All schedules but gpipe, which runs all forward passes first, need no more memory after a few rounds.
    if pipeline.schedule == "gpipe":
        num_simulated = num_microbatches
    else:
        num_simulated = limit_rounds(pipeline.pipeline_parallel_degree, num_microbatches)
    passes = list_passes(pipeline.schedule, rank, pipeline.pipeline_parallel_degree, num_simulated, pipeline.num_runs)
    bytes_of_stages = {stage.index: _estimate_stage(whole_model, stage, pipeline.splits_backward) for stage in stages}
    peak = _find_peak(passes, bytes_of_stages, pipeline.splits_backward)

    in_schedule = replace(
        in_loss,
        gradients_bytes=peak.gradients_bytes,
        # The peak counts the 16-bit copies of weights among the activations of each microbatch.
        unsharded_bytes=in_loss.unsharded_bytes - _count_copies_bytes(rank_portion),
        activations_bytes=buffers_bytes + peak.activations_bytes,
        logits_bytes=0,
    )
    in_reduction = replace(
        moments.get("at_embeddings", in_loss),
        activations_bytes=buffers_bytes,
        logits_bytes=0,
    )
    return add_step_and_libraries(rank_portion, largest((in_schedule, in_reduction)), device)


def _find_peak(passes: Iterable[Pass], bytes_of_stages: dict[int, _StageBytes], splits_backward: bool) -> _Peak:
    """Go through the passes of a rank, and return its activations and gradients when their sum is largest.

    passes: what the rank runs, in order.
    bytes_of_stages: index of a stage in the model -> what the stage needs.
    splits_backward: whether the schedule has W passes, so that a B pass computes the gradients of inputs alone. The
        model's first stage (index 0) has no such gradients: its B passes do nothing, and its W passes compute all.
    """
    activations_bytes = 0
    summed_bytes = dict.fromkeys(bytes_of_stages, 0)  # of each stage: its sum of gradients
    unsummed_bytes = dict.fromkeys(bytes_of_stages, 0)  # of each stage: gradients that wait to be added to that sum
    peak = _Peak(0, 0)

    for kind, index, _ in passes:
        stage = bytes_of_stages[index]
        gradients_bytes = sum(summed_bytes.values()) + sum(unsummed_bytes.values())
        has_split_backward = splits_backward and index > 0

        if kind == "F":
            activations_bytes += stage.kept
            moments = [_Peak(activations_bytes + stage.extra_in_forward, gradients_bytes)]

        elif has_split_backward and kind == "B":
            activations_bytes += stage.between_passes
            extra_bytes = stage.extra_in_backward
            if summed_bytes[index] and not unsummed_bytes[index]:
                # B passes of this stage follow each other. The gradients of one stay allocated during the next, as
                # rehearsals show.
                extra_bytes += stage.unsummed_gradients

            # The gradients that the W pass before has left are now added to the sum, and freed, block by block.
            num_freed_blocks = max(0, stage.num_blocks - NUM_UNSUMMED_BLOCKS)
            freed_bytes = unsummed_bytes[index] * num_freed_blocks // stage.num_blocks
            moments = [_Peak(activations_bytes + extra_bytes, gradients_bytes - freed_bytes)]
            if unsummed_bytes[index]:
                summed_bytes[index] = stage.gradients
                unsummed_bytes[index] = 0

        elif has_split_backward:  # W
            moments = [_Peak(activations_bytes, gradients_bytes)]
            activations_bytes -= stage.kept + stage.between_passes
            if stage.unsummed_gradients:
                unsummed_bytes[index] = stage.unsummed_gradients
            else:
                summed_bytes[index] = stage.gradients
                unsummed_bytes[index] = 0

        elif splits_backward and kind == "B":
            continue  # the first stage has no earlier one that would need the gradient of its inputs

        else:  # a whole backward pass
            moments = [_Peak(activations_bytes + stage.extra_in_backward, gradients_bytes)]
            activations_bytes -= stage.kept
            summed_bytes[index] = stage.gradients
            gradients_bytes = sum(summed_bytes.values()) + sum(unsummed_bytes.values())
            moments.append(_Peak(activations_bytes + stage.at_end_of_backward, gradients_bytes))

        peak = max(peak, *moments, key=lambda moment: moment.total_bytes)
    return peak


def _select_stages(whole_model: Portion, stages: list[Stage]) -> Portion:
    """Return a portion whose model has only the blocks, the embeddings and the head that these stages have.

    It has no embedding and no head, to the accuracy of one row, unless the stages include the model's first or last.
    """
    model = whole_model.model
    is_first = stages[0].is_first
    is_last = stages[-1].is_last
    has_both_ends = is_first and is_last
    part = replace(
        model,
        n_layers=sum(len(stage.blocks) for stage in stages),
        vocab_size=model.vocab_size if is_first or is_last else 1,
        # One end of an untied model has one of its two matrices, as a tied model has.
        tie_word_embeddings=model.tie_word_embeddings or not has_both_ends,
        learned_pos_emb=model.learned_pos_emb and is_first,
    )
    return replace(whole_model, config=replace(whole_model.config, model=part))


def _count_copies_bytes(portion: Portion) -> int:
    """Return the bytes of 16-bit weights that one microbatch's forward pass has made and its backward pass frees.

    The estimate of the loss counts them in `unsharded_bytes`. There FSDP also has gathered parameters, which belong to
    no microbatch, so that only autocast's copies are returned.
    """
    if portion.has_fsdp:
        return count_autocast_copies(portion)
    return estimate_moments(portion)["in_loss"].unsharded_bytes


def _count_sent_bytes(portion: Portion) -> int:
    """Return the bytes of one microbatch's residual stream, which a stage sends to the next one."""
    num_tokens = portion.num_tokens // portion.num_stream_parts
    return num_tokens * portion.model.d_model * portion.stream_bytes


def _estimate_stage(whole_model: Portion, stage: Stage, splits_backward: bool) -> _StageBytes:
    """Estimate what a stage needs in its passes, from the memory of a model that consists of the stage alone.

    `splits_backward`: whether the schedule computes gradients of inputs (B) and of weights (W) in separate passes.
    """
    portion = _select_stages(whole_model, [stage])
    model = portion.model
    moments = estimate_moments(portion)
    in_loss = moments["in_loss"]
    at_last_block = moments["at_last_block"]
    sent_bytes = _count_sent_bytes(portion)
    hidden_bytes = portion.num_tokens * model.d_model * portion.stream_bytes
    embedding_gradient_bytes = portion.num_embedding_elements * FP32_BYTES

    # Activations from forward to backward pass, with the 16-bit copies of weights that autograd keeps for each
    # microbatch.
    kept_bytes = in_loss.activations_bytes + _count_copies_bytes(portion)
    keeps_only_input = portion.fsdp.activation_checkpointing or model.norm_type.startswith("low_precision_")
    if not stage.is_first and keeps_only_input:
        kept_bytes -= sent_bytes  # the input stays in its receive buffer, which is counted apart
    if not stage.is_last:
        kept_bytes -= hidden_bytes  # there is no last norm: what it would read is sent

    extra_in_forward_bytes = 0
    if not stage.is_first:
        num_sent = NUM_SENT_IN_SPLIT_FORWARD if splits_backward else NUM_SENT_IN_FORWARD
        extra_in_forward_bytes = num_sent * sent_bytes

    extra_in_backward_bytes = at_last_block.activations_bytes - _count_block_activations(portion)
    extra_in_backward_bytes += NUM_SENT_IN_BACKWARD * sent_bytes
    if stage.is_last:
        # The forward pass computes the loss with the gradients of the embedding and of the hidden states, and keeps
        # both for the backward pass.
        loss_bytes = embedding_gradient_bytes + hidden_bytes
        extra_in_forward_bytes += in_loss.logits_bytes - loss_bytes
        kept_bytes += loss_bytes
        # The backward pass scales the embedding's gradient in place, unless it is split and needs that gradient twice.
        scaled_copy_bytes = embedding_gradient_bytes if splits_backward else 0
        extra_in_backward_bytes = max(extra_in_backward_bytes - loss_bytes, scaled_copy_bytes)
        extra_in_backward_bytes += moments["at_first_block"].logits_bytes

    at_end_bytes = at_last_block.activations_bytes
    if stage.is_first:
        at_embeddings = moments.get("at_embeddings", at_last_block)
        at_end_bytes = max(at_end_bytes, at_embeddings.logits_bytes + sent_bytes)

    between_passes_bytes = 0
    unsummed_gradients_bytes = 0
    if splits_backward:
        # A block keeps the gradients of the outputs of its products and norms.
        products_width = portion.num_up_matrices * model.ffn_dim + model.q_dim + 2 * model.kv_dim
        products_bytes = hidden_bytes // model.d_model * (products_width // portion.layout.tensor)
        block_bytes = products_bytes + NUM_NORM_OUTPUTS * sent_bytes
        between_passes_bytes = model.n_layers * block_bytes
        if not stage.is_first:
            extra_in_backward_bytes += block_bytes  # of the microbatch before, until Python frees it
        if portion.has_fsdp and not portion.is_fp32:
            unsummed_gradients_bytes = in_loss.gradients_bytes // 2

    return _StageBytes(
        kept=kept_bytes,
        extra_in_forward=extra_in_forward_bytes,
        extra_in_backward=extra_in_backward_bytes,
        at_end_of_backward=at_end_bytes,
        between_passes=between_passes_bytes,
        gradients=in_loss.gradients_bytes,
        unsummed_gradients=unsummed_gradients_bytes,
        num_blocks=model.n_layers,
    )


def _count_block_activations(portion: Portion) -> int:
    """Return the bytes that one more block adds to the activations of a microbatch."""
    longer_model = replace(portion.model, n_layers=portion.model.n_layers + 1)
    longer_portion = replace(portion, config=replace(portion.config, model=longer_model))
    longer_bytes = estimate_moments(longer_portion)["in_loss"].activations_bytes
    return longer_bytes - estimate_moments(portion)["in_loss"].activations_bytes
