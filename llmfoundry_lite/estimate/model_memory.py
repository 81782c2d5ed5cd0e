"""Memory that a model takes on one device, at the moments of a batch when it may take the most. Arithmetic, no torch.

Counts the bytes of the tensors that `models`, `parallel` and the chunked loss (`training/loss.py`) hold at the same
time. `memory.py` adds the optimizer's step and the libraries. Where a count says "by rehearsals", it follows from
allocations of the real code on simulated devices.

Read from the top: the moments, activations, the loss. In the formulas d is the model width and n the number of tokens.
Variables that begin with `num_` count elements of tensors, unless they name something else (`num_chunks`). Those that
end with `_bytes` count bytes.
"""

import math
from dataclasses import dataclass, replace

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizers import OPTIMIZERS, estimated_optimizer
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.own_optimizer import read_told_state
from llmfoundry_lite.estimate.parameters import count_share, shapes_of_block, shapes_outside_blocks
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_lite.own_code import is_own


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryEstimate:
    """Bytes on one device at one moment, by what they hold."""

    parameters_bytes: int
    """This device's share, fp32."""
    gradients_bytes: int
    """This device's share, fp32, or float64 for exact sums; with FSDP also all of them while they wait for the batch's
    last microbatch."""
    optimizer_bytes: int
    """This device's share, fp32."""
    unsharded_bytes: int
    """Parameters gathered or copied for use, in the compute precision, and gradients before they are reduced."""
    activations_bytes: int
    """Tensors kept for the backward pass, and the block that is recomputed in it."""
    logits_bytes: int
    """One chunk of logits and the gradients that the chunked loss computes with it, or those gradients alone."""
    workspaces_bytes: int = 0
    """Workspaces of matrix products; a buffer with which a compiler times kernels; token ids of a batch and of three
    microbatches."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts, which are the fields of this class."""
        return sum(getattr(self, name) for name in self.__slots__)

    def __str__(self) -> str:
        """Return the total and each part, such as "about 2.10 GiB per device: parameters 0.46, gradients 0.46, ...".

        The unit is GiB, or MiB for a total below 1 GiB.
        """
        unit = "MiB"
        unit_bytes = MIB
        if self.total_bytes >= GIB:
            unit = "GiB"
            unit_bytes = GIB

        parts: list[str] = []
        for field_name in self.__slots__:
            part = field_name.removesuffix("_bytes")
            part_bytes = getattr(self, field_name)
            if part == "gradients" and part_bytes == 0:
                parts.append("gradients none yet")  # a batch of one microbatch has its peak in the loss, before them
            else:
                parts.append(f"{part} {part_bytes / unit_bytes:.2f}")
        return f"about {self.total_bytes / unit_bytes:.2f} {unit} per device: {', '.join(parts)}"


def optimizer_slots(config: TrainConfig) -> tuple[float, ...]:
    """Return how many fp32 elements the optimizer keeps for each parameter: 2 for AdamW, which has two moments.

    The result has one count for all parameters, or two: one for matrices in blocks, and one for all other parameters.
    Muon keeps one element for the former and two for the latter, which it leaves to AdamW. A user's own optimizer keeps
    what its class says.
    """
    if is_own(config.optimizer.name):
        told_bytes = read_told_state(config.optimizer.name).bytes_per_parameter
        if told_bytes is not None:
            return (told_bytes / FP32_BYTES,)
    row = estimated_optimizer(config.optimizer.name)
    if row.slots_of_matrices is None:
        return (len(row.slots),)
    return len(row.slots_of_matrices), len(row.slots)


def knows_optimizer(config: TrainConfig) -> bool:
    """Return whether the state that the optimizer keeps is known, and not assumed to be as large as AdamW's."""
    name = config.optimizer.name
    return name in OPTIMIZERS or read_told_state(name).bytes_per_parameter is not None


# --------------------------------------------------------------------------------------------------- moments


def estimate_moments(portion: Portion) -> dict[str, MemoryEstimate]:
    """Estimate the memory of a device at the moments of a batch's last microbatch when it may take the most.

    Returns an estimate for each moment, by name. Nobody knows in advance which is the largest, because that depends on
    the sizes of the vocabulary, the model and the microbatch:

    in_loss: the forward pass has ended, and the loss computes a chunk of logits.
    at_first_block: the backward pass is in the first block that it reaches, which is the model's last one.
    at_last_block: the backward pass is in the model's first block, and all others have their gradients.
    at_embeddings: with FSDP, the gradients of embeddings and last norm are reduced.
    """
    model = portion.model
    outside = shapes_outside_blocks(portion)
    num_outside = count_share(outside, portion.shard_degree)
    num_parameters = num_outside + model.n_layers * count_share(shapes_of_block(portion), portion.shard_degree)

    # The optimizer may keep a different number of elements for parameters outside of blocks.
    slots = optimizer_slots(portion.config)
    num_slots = slots[0] * num_parameters + (slots[-1] - slots[0]) * num_outside

    # In the loss, all activations exist, and the gradient of the last norm's output beside the chunk of logits.
    hidden_bytes = portion.num_tokens * model.d_model * portion.compute_bytes
    in_loss = MemoryEstimate(
        parameters_bytes=FP32_BYTES * num_parameters,
        gradients_bytes=0 if portion.has_one_microbatch else num_parameters * portion.sum_bytes,
        optimizer_bytes=int(FP32_BYTES * num_slots),
        unsharded_bytes=0,
        activations_bytes=count_activations(portion),
        logits_bytes=count_logits(portion) + hidden_bytes,
    )

    # A block in its backward pass has its activations, kept or computed again, and the gradient of the widest one.
    is_checkpointed = bool(portion.fsdp.activation_checkpointing)
    block_bytes = portion.num_tokens * count_block_per_token(portion)
    widest_bytes = portion.num_tokens * model.ffn_dim // portion.layout.tensor * portion.compute_bytes
    input_bytes = portion.num_tokens // portion.num_stream_parts * model.d_model * portion.stream_bytes
    in_block_bytes = block_bytes + widest_bytes
    if is_checkpointed:
        in_block_bytes -= input_bytes  # it is among the activations that checkpointing has kept of all blocks

    # When the backward pass reaches the first block, activations of all others are kept, and the last norm's are gone.
    last_norm_bytes = input_bytes + portion.num_tokens * model.d_model * portion.stream_bytes
    other_blocks_bytes = in_loss.activations_bytes - last_norm_bytes
    if not is_checkpointed:
        other_blocks_bytes -= block_bytes
    elif portion.config.compiles_kernels and portion.fsdp.activation_checkpointing == "selective":
        # The products that it has kept are parts of the block that is computed again.
        other_blocks_bytes -= portion.num_tokens * count_products_per_token(portion)

    if portion.has_fsdp:
        return _estimate_with_fsdp(portion, in_loss, other_blocks_bytes, in_block_bytes)
    return _estimate_without_fsdp(portion, in_loss, other_blocks_bytes, in_block_bytes)


def _estimate_without_fsdp(
    portion: Portion, in_loss: MemoryEstimate, other_blocks_bytes: int, in_block_bytes: int
) -> dict[str, MemoryEstimate]:
    """Estimate a device without FSDP2, which has whole fp32 parameters (`parallel/one_device.py`).

    Autograd also keeps their 16-bit copies until the backward pass has used them, and in the backward pass the gradient
    of one matrix at a time.

    in_loss: the estimate for the loss, without these copies.
    other_blocks_bytes: activations of all blocks but one, when the backward pass begins.
    in_block_bytes: activations of the block in whose backward pass the device is.

    Returns the estimates for the loss, for the first block that the backward pass reaches, and for the last one.
    """
    model = portion.model
    num_outside_blocks = count_share(shapes_outside_blocks(portion), 1)
    num_in_block = count_share(shapes_of_block(portion), 1)
    all_gradients_bytes = in_loss.parameters_bytes // FP32_BYTES * portion.sum_bytes

    # Count 16-bit copies of parameters, if any. Checkpointing casts a block again when it computes it again, so only
    # one block's copies exist. At the end of the backward pass, only those of the block in use and of the embeddings
    # are left, unless they are kept for the next microbatch.
    recasts_blocks = bool(portion.fsdp.activation_checkpointing) and not portion.casts_once
    num_copied_blocks = 1 if recasts_blocks else model.n_layers
    num_copied = num_outside_blocks + num_copied_blocks * num_in_block
    copy_bytes = portion.stream_bytes if portion.stream_bytes < FP32_BYTES else 0
    copies_bytes = num_copied * copy_bytes
    copies_at_end_bytes = copies_bytes
    if not portion.casts_once:
        copies_at_end_bytes = (num_outside_blocks + num_in_block) * copy_bytes

    # The gradient of a matrix is computed in the dtype of the copies and then cast to that of the sum.
    num_in_matrix = model.d_model * model.ffn_dim
    one_gradient_bytes = num_in_matrix * (copy_bytes + FP32_BYTES + exact_copy_bytes(portion))
    embedding_gradient_bytes = portion.num_embedding_elements * (exact_copy_bytes(portion) or portion.compute_bytes)
    hidden_bytes = portion.num_tokens * model.d_model * portion.compute_bytes

    # Put the three moments together.
    loss_with_copies = replace(in_loss, unsharded_bytes=copies_bytes + count_autocast_copies(portion))
    if portion.has_one_microbatch:
        gradients_so_far_bytes = portion.num_embedding_elements * portion.sum_bytes  # from the output embedding
    else:
        gradients_so_far_bytes = all_gradients_bytes  # earlier microbatches have left a sum for every parameter
    at_first_block = replace(
        loss_with_copies,
        gradients_bytes=gradients_so_far_bytes,
        unsharded_bytes=loss_with_copies.unsharded_bytes + one_gradient_bytes,
        activations_bytes=other_blocks_bytes + in_block_bytes,
        logits_bytes=embedding_gradient_bytes + hidden_bytes,
    )
    at_last_block = replace(
        at_first_block,
        gradients_bytes=all_gradients_bytes,
        unsharded_bytes=copies_at_end_bytes + one_gradient_bytes,
        activations_bytes=in_block_bytes,
    )
    return {"in_loss": loss_with_copies, "at_first_block": at_first_block, "at_last_block": at_last_block}


def _estimate_with_fsdp(
    portion: Portion, in_loss: MemoryEstimate, other_blocks_bytes: int, in_block_bytes: int
) -> dict[str, MemoryEstimate]:
    """Estimate a device with FSDP2, which gathers parameters for use and reduces gradients over devices.

    The embeddings and the last norm stay gathered, as one unit. Of the blocks, the last one is gathered during the
    loss, and during the backward pass the one in use and the one that is prefetched.

    in_loss: the estimate for the loss, without gathered parameters.
    other_blocks_bytes: activations of all blocks but one, when the backward pass begins.
    in_block_bytes: activations of the block in whose backward pass the device is.

    Returns the estimates for the loss, for the first block that the backward pass reaches, for the last one, and for
    the reduction of the embeddings' gradients.
    """
    model = portion.model
    shard_gradients_bytes = in_loss.parameters_bytes // FP32_BYTES * portion.sum_bytes
    num_outside_blocks = count_share(shapes_outside_blocks(portion), 1)
    num_in_block = count_share(shapes_of_block(portion), 1)

    # Count gathered parameters. FSDP divides rows, and gathers the same number of rows from each device, so the sizes
    # are padded to multiples of the number of devices. With resharding, a block's parameters exist only while it is in
    # use.
    num_padded_outside = portion.shard_degree * count_share(shapes_outside_blocks(portion), portion.shard_degree)
    num_padded_block = portion.shard_degree * count_share(shapes_of_block(portion), portion.shard_degree)
    if portion.reshards:
        num_in_loss = num_padded_outside + num_padded_block
        num_in_backward = num_padded_outside + min(2, model.n_layers) * num_padded_block
        num_at_embeddings = num_padded_outside
    else:
        num_padded_model = num_padded_outside + model.n_layers * num_padded_block
        num_in_loss = num_padded_model
        num_in_backward = num_padded_model
        num_at_embeddings = num_padded_model
        if portion.shard_degree > 1 and portion.layout.pipeline == 1:
            num_in_loss += num_padded_block  # torch keeps the buffer of its last gather, beside the block's copy of it

    # Count gradients of earlier microbatches. If they are reduced only after the last one, they wait as a whole until
    # then.
    waiting_bytes = in_loss.gradients_bytes
    if not portion.config.reduces_every_microbatch and not portion.has_one_microbatch:
        waiting_bytes = (num_outside_blocks + model.n_layers * num_in_block) * portion.sum_bytes

    # A block's backward pass takes the most either at its beginning, with the gradient of one matrix, or at its end,
    # with the gradients of all its matrices.
    hidden_bytes = portion.num_tokens * model.d_model * portion.compute_bytes
    num_in_matrix = model.d_model * model.ffn_dim // portion.layout.tensor
    early_bytes = in_block_bytes + num_in_matrix * (portion.stream_bytes + exact_copy_bytes(portion))
    late_bytes = num_in_block * (exact_copy_bytes(portion) or portion.stream_bytes) + 4 * hidden_bytes
    in_block_bytes = max(early_bytes, late_bytes)

    # Put the four moments together.
    embedding_gradient_bytes = portion.num_embedding_elements * (exact_copy_bytes(portion) or portion.compute_bytes)
    in_loss = replace(
        in_loss,
        gradients_bytes=waiting_bytes,
        unsharded_bytes=num_in_loss * portion.stream_bytes + count_autocast_copies(portion),
    )
    reduced_block_bytes = num_padded_block * portion.reduction_bytes
    at_first_block = replace(
        in_loss,
        unsharded_bytes=num_in_backward * portion.stream_bytes + reduced_block_bytes + count_autocast_copies(portion),
        activations_bytes=other_blocks_bytes + in_block_bytes,
        logits_bytes=embedding_gradient_bytes + hidden_bytes,
    )
    at_last_block = replace(
        at_first_block,
        gradients_bytes=max(waiting_bytes, shard_gradients_bytes),
        activations_bytes=in_block_bytes,
    )
    allocates_sum = waiting_bytes <= shard_gradients_bytes
    at_embeddings = replace(
        at_last_block,
        unsharded_bytes=num_at_embeddings * portion.stream_bytes + num_padded_outside * portion.reduction_bytes,
        activations_bytes=hidden_bytes,
        logits_bytes=_embedding_gradients_bytes(portion, allocates_sum),
    )
    return {
        "in_loss": in_loss,
        "at_first_block": at_first_block,
        "at_last_block": at_last_block,
        "at_embeddings": at_embeddings,
    }


def _embedding_gradients_bytes(portion: Portion, allocates_sum: bool) -> int:
    """Return bytes of the embedding's gradients while FSDP2 reduces the gradients of embeddings and last norm.

    allocates_sum: whether the reduction allocates this device's share of the sum of gradients.

    The embedding at the input and the one at the output have a gradient each, even if they are tied. Exact sums add
    both up, and free one of them, before they allocate the buffer of the reduction and this device's share of the sum.
    So the second gradient counts only as far as it is larger than what is allocated later.
    """
    one_gradient_bytes = portion.num_embedding_elements * (exact_copy_bytes(portion) or portion.compute_bytes)
    if not portion.config.exact_sums:
        return 2 * one_gradient_bytes

    # While both gradients exist, the buffer of the last block's reduction is there in place of the one for embeddings.
    shapes = shapes_outside_blocks(portion)
    num_padded_outside = portion.shard_degree * count_share(shapes, portion.shard_degree)
    num_padded_block = portion.shard_degree * count_share(shapes_of_block(portion), portion.shard_degree)
    later_bytes = (num_padded_outside - num_padded_block) * portion.reduction_bytes
    if allocates_sum:
        later_bytes += count_share(shapes, portion.shard_degree) * portion.sum_bytes
    return max(one_gradient_bytes, 2 * one_gradient_bytes - later_bytes)


def exact_copy_bytes(portion: Portion) -> int:
    """Return the bytes of an element in the float64 copy of a gradient that exact sums add, or 0 without exact sums."""
    return portion.sum_bytes if portion.config.exact_sums else 0


def count_autocast_copies(portion: Portion) -> int:
    """Count bytes of the 16-bit weights that autocast has made; it keeps each one until the backward pass has used it.

    With activation checkpointing only one block's copies exist at a time, because each block is cast again.
    """
    if not portion.has_autocast:
        return 0
    num_blocks = 1 if portion.fsdp.activation_checkpointing else portion.model.n_layers
    return portion.compute_bytes * count_share(shapes_of_block(portion), 1) * num_blocks


# ----------------------------------------------------------------------------------------------- activations


def count_activations(portion: Portion) -> int:
    """Count bytes of a microbatch that the forward pass keeps for the backward pass.

    This is Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1, for these blocks. Their 34*n*d
    bytes of a block are 32*n*d here, without dropout's masks. Their 5*h*s*n for attention probabilities are missing,
    because scaled_dot_product_attention recomputes them and keeps one fp32 for each query.
    """
    model = portion.model
    d = model.d_model

    # Count the blocks. With checkpointing, each keeps its input, and with "selective" also the results of its matrix
    # products.
    input_bytes = portion.num_tokens // portion.num_stream_parts * d * portion.stream_bytes
    if portion.fsdp.activation_checkpointing == "selective":
        blocks_bytes = model.n_layers * (input_bytes + portion.num_tokens * count_products_per_token(portion))
    elif portion.fsdp.activation_checkpointing:
        blocks_bytes = 0 if portion.fsdp.activation_cpu_offload else model.n_layers * input_bytes
    else:
        blocks_bytes = model.n_layers * portion.num_tokens * count_block_per_token(portion)

    # Count tensors outside of blocks. The last norm keeps its input, and the loss keeps the norm's output.
    last_norm_bytes = input_bytes + portion.num_tokens * d * portion.stream_bytes
    dropout_mask_bytes = portion.num_tokens // portion.num_stream_parts * d if model.emb_pdrop else 0
    return (
        blocks_bytes
        + last_norm_bytes
        + count_attention_bias(portion)
        + count_flex_scratch(portion)
        + dropout_mask_bytes
    )


def count_products_per_token(portion: Portion) -> int:
    """Count bytes of a token that selective checkpointing keeps in a block, beside the block's input.

    These are the results of matrix products: queries, keys and values, attention's output, and the products of the
    feed-forward layer. A compiler leaves the block's last product out.
    """
    model = portion.model

    # Results that a tensor group divides. Attention also keeps one fp32 for each head, its logsumexp.
    has_own_attention = is_own(model.attn_config.attn_type)  # nothing of it is known
    num_attention = 0 if has_own_attention else 2 * (model.q_dim + model.kv_dim)
    num_feed_forward = portion.num_up_matrices * model.ffn_dim
    divided_bytes = (num_attention + num_feed_forward) * portion.compute_bytes + model.n_heads * FP32_BYTES

    # Results that are added to the residual stream, which each device of the group has whole.
    num_outputs = 1 if portion.config.compiles_kernels else 2
    outputs_bytes = num_outputs * model.d_model * portion.compute_bytes
    return divided_bytes // portion.layout.tensor + outputs_bytes


def count_block_per_token(portion: Portion) -> int:
    """Count bytes of a token that a block keeps for its backward pass without checkpointing.

    These are the inputs of its norms and matrix products, and the results of attention and activation functions. Layers
    that a tensor group divides keep their input whole, even if a norm has computed only a part of it.
    """
    model = portion.model
    d = model.d_model
    is_compiled = portion.config.compiles_kernels

    # The first norm keeps its input. A norm in fp32 keeps an fp32 copy of it, unless a compiler casts it again.
    casts_again = is_compiled or model.norm_type.startswith("low_precision_")
    norm_input_bytes = d * (portion.stream_bytes if casts_again else max(portion.stream_bytes, FP32_BYTES))
    # So does the second, but a compiled block keeps attention's output instead, and adds it to the stream again.
    second_input_bytes = d * portion.compute_bytes if is_compiled else norm_input_bytes
    inputs_bytes = norm_input_bytes + second_input_bytes + 2 * _norm_statistics_bytes(model.norm_type)
    # The outputs of both norms are the inputs of matrix products.
    norms_bytes = inputs_bytes // portion.num_stream_parts + 2 * d * portion.compute_bytes

    # mptglu keeps gate, act(gate), up, and their product; mptmlp up and act(up). A compiler computes act(gate) again.
    num_kept = portion.num_up_matrices + 1 if is_compiled else 2 * portion.num_up_matrices
    feed_forward_bytes = num_kept * model.ffn_dim * portion.compute_bytes

    # Two masks of one byte for each element.
    dropout_mask_bytes = 2 * d // portion.num_stream_parts if model.resid_pdrop else 0
    divided_bytes = _count_attention_per_token(portion) + feed_forward_bytes
    return norms_bytes + divided_bytes // portion.layout.tensor + dropout_mask_bytes


def _count_attention_per_token(portion: Portion) -> int:
    """Count bytes of a token that a block's attention keeps, from the product that makes its queries to its output.

    The bytes are those of all heads; a tensor group divides them. Nothing is known of attention of the user's own.
    """
    model = portion.model
    if is_own(model.attn_config.attn_type):
        return 0
    q_dim = model.q_dim
    kv_dim = model.kv_dim
    attn_config = model.attn_config
    context_degree = portion.layout.context
    gathers_keys = portion.config.context.kind == "gather"

    num_kept = 2 * q_dim + 2 * kv_dim  # queries, keys, values and the output

    # Add what context parallelism keeps.
    if context_degree > 1:
        num_kept += q_dim  # the output is rearranged before the next matrix
    if gathers_keys:
        # This rank's own keys and values are kept with its queries, if one matrix has made them all.
        num_gathered = context_degree if attn_config.fused_qkv else context_degree - 1
        num_kept += num_gathered * 2 * kv_dim
    if context_degree > 1 and not model.has_plain_attention and kernels_take_masks(model):
        # FlexAttention keeps copies of the tensors that ranks have exchanged; by rehearsals.
        num_kept += 2 * kv_dim * context_degree if gathers_keys else q_dim + 2 * kv_dim

    # Steps between the product and attention keep their input.
    if attn_config.clip_qkv is not None and not portion.config.compiles_kernels:
        num_kept += q_dim + 2 * kv_dim
    has_qk_norm = attn_config.qk_ln or attn_config.qk_gn
    num_kept += (q_dim + kv_dim) * (has_qk_norm + attn_config.rope)

    attention_bytes = num_kept * portion.compute_bytes + model.n_heads * FP32_BYTES
    if has_qk_norm:
        attention_bytes += 2 * _norm_statistics_bytes(attn_config.norm_type)
    return attention_bytes


def _norm_statistics_bytes(norm_type: str) -> int:
    """Return the bytes of the statistics that a norm keeps of each token: one fp32 for RMSNorm, two for LayerNorm.

    This holds for RMSNorm's fused kernel on accelerators. On a CPU, torch computes it in steps that keep more. What a
    norm of the user's own keeps is not known, and counts as nothing.
    """
    if is_own(norm_type):
        return 0
    return FP32_BYTES if norm_type.endswith("rmsnorm") else 2 * FP32_BYTES


def kernels_take_masks(model: ModelConfig) -> bool:
    """Return whether the attention kernels that `models.attention` chooses on a GPU take ALiBi, windows and documents.

    Other kernels need a bias tensor for them (`count_attention_bias`).
    """
    return model.attn_config.attn_impl in ("auto", "flex", "flash") and not model.flex_refusal


def count_flex_scratch(portion: Portion) -> int:
    """Count bytes that FlexAttention takes beyond plain attention, once for all blocks; by rehearsals.

    Returns 0 if the model has plain attention, or if its kernels do not take masks.
    """
    model = portion.model
    if model.has_plain_attention or not kernels_take_masks(model):
        return 0

    num_per_token = 2 * model.q_dim
    is_gathered = portion.layout.context > 1 and portion.config.context.kind == "gather"
    if is_gathered:
        # Gathered keys and values have gradients that are as large as those of all ranks together.
        num_per_token = 2 * model.kv_dim * portion.layout.context
    return portion.num_tokens * num_per_token // portion.layout.tensor * portion.compute_bytes


def count_attention_bias(portion: Portion) -> int:
    """Count bytes of the bias that is added to attention's scores: ALiBi, and -inf where a mask hides a key.

    Implementations that take masks and ALiBi without a bias (flex, flash) need none. One bias serves all blocks, but
    autocast makes a copy in the compute precision for each block, unless checkpointing frees it.
    """
    attn_config = portion.model.attn_config
    if portion.model.has_plain_attention or kernels_take_masks(portion.model):
        return 0

    # Only ALiBi differs between heads, and only documents differ between samples.
    seq_len = portion.config.max_seq_len
    context_degree = portion.layout.context
    num_heads = portion.model.n_heads // portion.layout.tensor if attn_config.alibi else 1
    num_samples = 1
    if attn_config.attn_uses_sequence_id:
        num_samples = portion.num_tokens * context_degree // seq_len

    if context_degree > 1 and portion.config.context.kind == "gather":
        # A sample is cut into 2 * context_degree pieces. A rank has two of them, one from each end, and each attends to
        # all tokens up to its own end. Together that makes 2 * context_degree + 1 squares of a piece's length.
        piece_len = seq_len // (2 * context_degree)
        num_scores = piece_len**2 * (2 * context_degree + 1)
    else:
        num_scores = seq_len**2
        if attn_config.alibi:
            num_heads //= context_degree  # each context-parallel rank computes some of the heads over the whole sample

    # The bias itself, and the copies that autocast makes.
    bytes_per_score = portion.stream_bytes
    if portion.stream_bytes != portion.compute_bytes and not portion.fsdp.activation_checkpointing:
        bytes_per_score += portion.model.n_layers * portion.compute_bytes
    return num_heads * num_samples * num_scores * bytes_per_score


# -------------------------------------------------------------------------------------------------- the loss

CHUNK_MULTIPLE = 128
"""The chunked loss computes a multiple of this many tokens at a time."""


def count_logits(portion: Portion) -> int:
    """Return the bytes at the peak of the chunked loss, which handles a part of the tokens at a time.

    Two moments may be the peak. In the softmax, the device holds a chunk of logits, the softmax's own copies of it, and
    the gradient of the output embedding that earlier chunks have begun. In the matrix product that adds to that
    gradient, it holds one 16-bit or fp32 copy of the chunk, the gradient, and the chunk's part of it.
    """
    # As training/loss.py does: equal chunks below the limit, rounded up to a multiple of CHUNK_MULTIPLE tokens.
    max_chunk_tokens = max(CHUNK_MULTIPLE, portion.config.loss_chunk_mib * MIB // (FP32_BYTES * portion.num_vocab_rows))
    num_chunks = math.ceil(portion.num_tokens / max_chunk_tokens)
    chunk_tokens = math.ceil(portion.num_tokens / num_chunks / CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    chunk_tokens = min(portion.num_tokens, chunk_tokens)

    # Count the bytes of one logit in the softmax, with its copies.
    if portion.layout.tensor > 1:
        logit_bytes = 2 * FP32_BYTES  # logsumexp has an input in fp32, and as much beside it
    elif portion.config.fuses_loss:
        logit_bytes = 2 * portion.compute_bytes  # logits and their gradient
    else:
        logit_bytes = portion.compute_bytes + FP32_BYTES  # the input of log_softmax and its output
        if portion.compute_bytes < FP32_BYTES:
            logit_bytes += FP32_BYTES  # a copy of the input in fp32

    # The first chunk has no gradient beside its softmax. If it is the only one, no chunk has.
    num_logits = chunk_tokens * portion.num_vocab_rows
    has_several_chunks = chunk_tokens < portion.num_tokens
    gradient_bytes = portion.num_embedding_elements * FP32_BYTES if has_several_chunks else 0
    in_softmax_bytes = num_logits * logit_bytes + gradient_bytes

    # In the product, the gradient is in fp32, and the chunk's part of it in the compute precision.
    gradient_and_part_bytes = portion.num_embedding_elements * (FP32_BYTES + portion.compute_bytes)
    in_product_bytes = num_logits * portion.compute_bytes + gradient_and_part_bytes
    return max(in_softmax_bytes, in_product_bytes)
