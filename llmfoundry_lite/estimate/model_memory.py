"""Memory that a model takes on one device, at the moments when it may take the most. Arithmetic, no torch.

Counts what the tensors of `models`, `parallel` and the chunked loss hold at the same time.
"""

import math
from dataclasses import dataclass, replace

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import GIB, MIB

OPTIMIZER_SLOTS = {"lion": (1,), "decoupled_lionw": (1,), "muon": (1, 2)}
"""Numbers an optimizer keeps for each parameter of a block, and for each outside of blocks if that differs."""
ADAMW_SLOTS = (2,)
"""The same for AdamW; a user's own optimizer is assumed to keep as many."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

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
        return sum(map(self.__getattribute__, self.__slots__))

    def __str__(self) -> str:
        unit, unit_bytes = ("GiB", GIB) if self.total_bytes >= GIB else ("MiB", MIB)
        held = {name.removesuffix("_bytes"): getattr(self, name) / unit_bytes for name in self.__slots__}
        parts = [f"{name} {size:.2f}" for name, size in held.items()]
        if not self.gradients_bytes:
            parts[1] = "gradients none yet"  # the peak is in the loss of the only microbatch
        return f"about {self.total_bytes / unit_bytes:.2f} {unit} per device: {', '.join(parts)}"


def slots_of(config: TrainConfig) -> tuple[int, ...]:
    """Return numbers kept for each parameter of a block, and perhaps of those outside of blocks."""
    return OPTIMIZER_SLOTS.get(config.optimizer.name, ADAMW_SLOTS)


def knows_optimizer(config: TrainConfig) -> bool:
    """Return whether it is known what the optimizer keeps; of a user's own it is assumed."""
    return not config.optimizer.name.startswith("python:")


def estimate_moments(p: Portion) -> dict[str, MemoryEstimate]:
    """Estimate a device in the loss, and in the backward pass at its first block, its last, and the embeddings."""
    model = p.model
    outside, block = shapes_outside(p), shapes_of_block(p)
    share_bytes = FP32_BYTES * (share(outside, p.shard_degree) + model.n_layers * share(block, p.shard_degree))
    sums_bytes = share_bytes // FP32_BYTES * p.sum_bytes
    slots = slots_of(p.config)
    optimizer_bytes = slots[0] * share_bytes + (slots[-1] - slots[0]) * FP32_BYTES * share(outside, p.shard_degree)
    hidden_bytes = p.num_tokens * model.d_model * p.compute_bytes
    in_loss = MemoryEstimate(
        parameters_bytes=share_bytes,
        gradients_bytes=0 if p.has_one_microbatch else sums_bytes,
        optimizer_bytes=optimizer_bytes,
        unsharded_bytes=0,
        activations_bytes=count_activations(p),
        logits_bytes=count_logits(p) + hidden_bytes,
    )
    # At the first block its activations, the gradient of the widest ones and of one matrix. Its input was kept before.
    is_kept = not p.fsdp.activation_checkpointing
    block_bytes = p.num_tokens * count_block_per_token(p)
    stream_bytes = p.num_tokens * model.d_model * p.stream_bytes
    run_bytes = p.num_tokens // p.num_runs * model.d_model * p.stream_bytes
    widest_bytes = p.num_tokens * model.ffn_dim // p.layout.tensor * p.compute_bytes
    early_bytes = block_bytes + widest_bytes - (0 if is_kept else run_bytes)
    # The last norm's input and output are gone by then.
    before_bytes = in_loss.activations_bytes - is_kept * block_bytes - (run_bytes + stream_bytes)
    if p.config.fuses_loss and p.fsdp.activation_checkpointing == "selective":
        before_bytes -= p.num_tokens * count_products_per_token(p)  # they are parts of the block that is computed again
    estimate = _with_fsdp if p.has_fsdp else _without_fsdp
    return estimate(p, in_loss, before_bytes, early_bytes)


def _without_fsdp(
    p: Portion, in_loss: MemoryEstimate, before_bytes: int, early_bytes: int
) -> dict[str, MemoryEstimate]:
    """Count copies in 16 bits, which autograd keeps until the backward pass, and the gradient of one matrix."""
    model, sums_bytes = p.model, in_loss.parameters_bytes // FP32_BYTES * p.sum_bytes
    num_outside, num_block = share(shapes_outside(p), 1), share(shapes_of_block(p), 1)
    num_copied = num_outside + num_block * (
        1 if p.fsdp.activation_checkpointing and not p.casts_once else model.n_layers
    )
    copy_bytes = p.stream_bytes if p.stream_bytes < FP32_BYTES else 0
    one_matrix_bytes = model.d_model * model.ffn_dim * (copy_bytes + FP32_BYTES + exact_copy_bytes(p))
    in_loss = replace(in_loss, unsharded_bytes=num_copied * copy_bytes + autocast_copies(p))
    at_first_block = replace(
        in_loss,
        gradients_bytes=p.embedding * p.sum_bytes if p.has_one_microbatch else sums_bytes,
        unsharded_bytes=in_loss.unsharded_bytes + one_matrix_bytes,
        activations_bytes=before_bytes + early_bytes,
        logits_bytes=p.embedding * (exact_copy_bytes(p) or p.compute_bytes)
        + p.num_tokens * model.d_model * p.compute_bytes,
    )
    at_last_block = replace(
        at_first_block,
        gradients_bytes=sums_bytes,
        unsharded_bytes=(num_copied if p.casts_once else num_outside + num_block) * copy_bytes + one_matrix_bytes,
        activations_bytes=early_bytes,
    )
    return {"in_loss": in_loss, "at_first_block": at_first_block, "at_last_block": at_last_block}


def _with_fsdp(p: Portion, in_loss: MemoryEstimate, before_bytes: int, early_bytes: int) -> dict[str, MemoryEstimate]:
    """Count gathered parameters. The embeddings and the last norm stay; of the blocks, the last one.

    In the backward pass the block in use is there, and the one that is fetched ahead.
    """
    model, sums_bytes = p.model, in_loss.parameters_bytes // FP32_BYTES * p.sum_bytes
    num_outside, num_block = share(shapes_outside(p), 1), share(shapes_of_block(p), 1)
    # FSDP divides rows, and gathers as many from each device.
    padded_outside = p.shard_degree * share(shapes_outside(p), p.shard_degree)
    padded_block = p.shard_degree * share(shapes_of_block(p), p.shard_degree)
    padded = padded_outside + model.n_layers * padded_block
    num_in_loss = num_in_backward = padded
    if p.reshards:
        num_in_loss = padded_outside + padded_block
        num_in_backward = padded_outside + min(2, model.n_layers) * padded_block
    elif p.shard_degree > 1 and p.layout.pipeline == 1:  # torch holds what it gathered last; blocks have copies of it
        num_in_loss += padded_block
    waiting_bytes = in_loss.gradients_bytes
    if not (p.config.reduces_every_microbatch or p.has_one_microbatch):
        waiting_bytes = (num_outside + model.n_layers * num_block) * p.sum_bytes
    hidden_bytes = p.num_tokens * model.d_model * p.compute_bytes
    early_bytes += model.d_model * model.ffn_dim // p.layout.tensor * (p.stream_bytes + exact_copy_bytes(p))
    # The gradients of all its matrices.
    late_bytes = num_block * (exact_copy_bytes(p) or p.stream_bytes) + 4 * hidden_bytes
    embedding_bytes = p.embedding * (exact_copy_bytes(p) or p.compute_bytes)
    in_loss = replace(
        in_loss,
        gradients_bytes=waiting_bytes,
        unsharded_bytes=num_in_loss * p.stream_bytes + autocast_copies(p),
    )
    at_first_block = replace(
        in_loss,
        unsharded_bytes=num_in_backward * p.stream_bytes + padded_block * p.reduction_bytes + autocast_copies(p),
        activations_bytes=before_bytes + max(early_bytes, late_bytes),
        logits_bytes=embedding_bytes + hidden_bytes,
    )
    at_last_block = replace(
        at_first_block,
        gradients_bytes=max(waiting_bytes, sums_bytes),
        activations_bytes=max(early_bytes, late_bytes),
    )
    num_left = padded_outside if p.reshards else padded
    embedding_gradients_bytes = 2 * embedding_bytes
    if p.config.exact_sums:
        # Both are added up, and one is left, before the reduction's buffer and a share of the sum are allocated.
        later_bytes = (padded_outside - padded_block) * p.reduction_bytes
        if waiting_bytes <= sums_bytes:
            later_bytes += share(shapes_outside(p), p.shard_degree) * p.sum_bytes
        embedding_gradients_bytes = max(embedding_bytes, 2 * embedding_bytes - later_bytes)
    at_embeddings = replace(
        at_last_block,
        unsharded_bytes=num_left * p.stream_bytes + padded_outside * p.reduction_bytes,
        activations_bytes=hidden_bytes,
        logits_bytes=embedding_gradients_bytes,
    )
    return {
        "in_loss": in_loss,
        "at_first_block": at_first_block,
        "at_last_block": at_last_block,
        "at_embeddings": at_embeddings,
    }


def exact_copy_bytes(p: Portion) -> int:
    """Return bytes of a number in the float64 copy of a gradient that is about to be added."""
    return p.sum_bytes if p.config.exact_sums else 0


def autocast_copies(p: Portion) -> int:
    """Count bytes of weights that autocast has cast; it keeps each copy until the backward pass has used it."""
    num_copies = (1 if p.fsdp.activation_checkpointing else p.model.n_layers) * p.has_autocast
    return p.compute_bytes * share(shapes_of_block(p), 1) * num_copies


def count_activations(p: Portion) -> int:
    """Count bytes that the forward pass keeps.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1, for these blocks. Their 34*n*d bytes of a
    block are 32*n*d here, without dropout's masks (n tokens, d model width). Their 5*h*s*n for the attention
    probabilities are gone: scaled_dot_product_attention recomputes them and keeps one number per query.
    """
    model, d = p.model, p.model.d_model
    input_bytes = p.num_tokens // p.num_runs * d * p.stream_bytes
    if p.fsdp.activation_checkpointing == "selective":
        blocks_bytes = model.n_layers * (input_bytes + p.num_tokens * count_products_per_token(p))
    elif p.fsdp.activation_checkpointing:
        blocks_bytes = 0 if p.fsdp.activation_cpu_offload else model.n_layers * input_bytes
    else:
        blocks_bytes = model.n_layers * p.num_tokens * count_block_per_token(p)
    # The last norm keeps its input and its output is the loss's.
    last_norm_bytes = input_bytes + p.num_tokens * d * p.stream_bytes
    dropout_bytes = p.num_tokens // p.num_runs * d if model.emb_pdrop else 0
    return blocks_bytes + last_norm_bytes + count_attention_bias(p) + count_flex_scratch(p) + dropout_bytes


def count_products_per_token(p: Portion) -> int:
    """Count bytes that selective checkpointing keeps of a token in a block, beside the block's input: queries, keys and
    values, attention, the feed-forward layer's products. Compiled, it leaves the block's last one out."""
    divided = 2 * (p.model.q_dim + p.model.kv_dim) + p.num_up * p.model.ffn_dim
    divided_bytes = divided * p.compute_bytes + p.model.n_heads * FP32_BYTES
    return divided_bytes // p.layout.tensor + (1 if p.config.fuses_loss else 2) * p.model.d_model * p.compute_bytes


def masks_in_kernel(model: ModelConfig) -> bool:
    """Return whether a GPU's kernels take ALiBi, windows and documents, as `models.attention` chooses them."""
    return model.attn_config.attn_impl in ("auto", "flex", "flash") and not model.flex_refusal


def count_flex_scratch(p: Portion) -> int:
    """Count bytes that FlexAttention takes beyond plain attention, once for all blocks; by rehearsals.

    Gathered keys and values have gradients that are as large as all ranks' together.
    """
    if p.model.has_plain_attention or not masks_in_kernel(p.model):
        return 0
    is_gathered = p.layout.context > 1 and p.config.context.kind == "gather"
    numbers = 2 * p.model.kv_dim * p.layout.context if is_gathered else 2 * p.model.q_dim
    return p.num_tokens * numbers // p.layout.tensor * p.compute_bytes


def count_attention_bias(p: Portion) -> int:
    """Count bytes of the attention bias, which flex and flash do without.

    One bias serves all blocks, unless autocast copies it into the compute precision for each.
    """
    options, degree = p.model.attn_config, p.layout.context
    if p.model.has_plain_attention or masks_in_kernel(p.model):
        return 0
    num_copies = p.model.n_layers if p.stream_bytes != p.compute_bytes and not p.fsdp.activation_checkpointing else 0
    num_heads = p.model.n_heads // p.layout.tensor if options.alibi else 1
    num_samples = p.num_tokens * degree // p.config.max_seq_len if options.attn_uses_sequence_id else 1
    scores = p.config.max_seq_len * p.config.max_seq_len
    if degree > 1 and p.config.context.kind == "gather":  # of two pieces, each with all tokens up to its end
        scores = (p.config.max_seq_len // (2 * degree)) ** 2 * (2 * degree + 1)
    elif options.alibi:
        num_heads //= degree
    return num_heads * num_samples * scores * (p.stream_bytes + num_copies * p.compute_bytes)


def count_block_per_token(p: Portion) -> int:
    """Count bytes that a block keeps of a token. Matrices keep their input whole, also if a norm computed a part."""
    model, d, q_dim, kv_dim = p.model, p.model.d_model, p.model.q_dim, p.model.kv_dim
    options, degree = model.attn_config, p.layout.context
    # A norm in fp32 keeps an fp32 copy of an input that is not, unless a compiler casts it again.
    casts_again = p.config.fuses_loss or model.norm_type.startswith("low_precision_")
    norm_input = d * (p.stream_bytes if casts_again else max(p.stream_bytes, FP32_BYTES))
    # RMSNorm as accelerators' fused kernel keeps it; torch's CPU computes it in steps that keep more.
    norm_statistics, qk_norm_statistics = (
        (1 if norm.norm_type.endswith("rmsnorm") else 2) * FP32_BYTES for norm in (model, options)
    )
    # A compiled block keeps attention's output between its two additions, and adds it again.
    other_input = d * p.compute_bytes if p.config.fuses_loss else norm_input
    norms = (norm_input + other_input + 2 * norm_statistics) // p.num_runs + 2 * d * p.compute_bytes
    numbers = 2 * q_dim + 2 * kv_dim
    numbers += q_dim * (degree > 1)  # attention's output is rearranged before the next matrix
    if p.config.context.kind == "gather":
        # This rank's own keys and values are kept with its queries, if one matrix has made them all.
        numbers += (degree if options.fused_qkv else degree - 1) * 2 * kv_dim
    if degree > 1 and not model.has_plain_attention and masks_in_kernel(model):
        # FlexAttention keeps copies of what ranks have exchanged; by rehearsals.
        numbers += 2 * kv_dim * degree if p.config.context.kind == "gather" else q_dim + 2 * kv_dim
    numbers += (q_dim + 2 * kv_dim) * (options.clip_qkv is not None and not p.config.fuses_loss)
    has_qk_norm = options.qk_ln or options.qk_gn
    numbers += (q_dim + kv_dim) * (has_qk_norm + options.rope)
    attention = numbers * p.compute_bytes + model.n_heads * FP32_BYTES + 2 * qk_norm_statistics * has_qk_norm
    # mptglu keeps gate, act(gate), up, and their product; mptmlp up and act(up). A compiler computes act(gate) again.
    num_kept = p.num_up + 1 if p.config.fuses_loss else 2 * p.num_up
    feed_forward = num_kept * model.ffn_dim * p.compute_bytes
    dropout = 2 * d // p.num_runs if model.resid_pdrop else 0
    return norms + (attention + feed_forward) // p.layout.tensor + dropout


def count_logits(p: Portion) -> int:
    """Count bytes of one chunk of logits, of what the loss makes of it, and of the embedding's gradient so far."""
    most = max(128, p.config.loss_chunk_mib * MIB // (FP32_BYTES * p.num_vocab_rows))
    chunk_tokens = min(p.num_tokens, math.ceil(p.num_tokens / math.ceil(p.num_tokens / most) / 128) * 128)
    # log_softmax has its input, a copy in fp32 of one that is not, and its output.
    logits_bytes = p.compute_bytes + FP32_BYTES + (FP32_BYTES if p.compute_bytes < FP32_BYTES else 0)
    if p.config.fuses_loss:
        logits_bytes = 2 * p.compute_bytes  # they and their gradient
    if p.layout.tensor > 1:  # logsumexp has an input in fp32 and as much beside it
        logits_bytes = 2 * FP32_BYTES
    # The embedding's gradient begins with the first chunk, after its softmax.
    gradient = p.embedding * FP32_BYTES if chunk_tokens < p.num_tokens else 0
    in_softmax = chunk_tokens * p.num_vocab_rows * logits_bytes + gradient
    in_product = chunk_tokens * p.num_vocab_rows * p.compute_bytes + p.embedding * (FP32_BYTES + p.compute_bytes)
    return max(in_softmax, in_product)


# ------------------------------------------------------------------------------------------------- parameters

Shapes = list[tuple[int, int]]
"""Rows, which FSDP divides, and columns."""


def share(shapes: Shapes, degree: int) -> int:
    """Count numbers that one of `degree` devices holds."""
    return sum(-(-rows // degree) * columns for rows, columns in shapes)


def count_rounding(p: Portion) -> int:
    """Count bytes by which torch's allocator rounds up the blocks' shares.

    From each 20 MiB that it cuts into tensors of 1 to 10 MiB, it gives the last one up to 1 MiB more
    (c10/cuda/CUDACachingAllocator: kLargeBuffer, kSmallSize).
    """
    shares = [FP32_BYTES * share([shape], p.shard_degree) for shape in shapes_of_block(p)]
    return p.model.n_layers * sum(size // 20 for size in shares if MIB < size < 10 * MIB)


def shapes_outside(p: Portion) -> Shapes:
    model, d = p.model, p.model.d_model
    shapes = [(p.num_vocab_rows, d)] * (1 if model.tie_word_embeddings else 2)
    if model.uses_learned_positions:
        shapes.append((model.max_seq_len, d))
    return shapes + _shapes_of_norm(model, d, model.norm_type)


def shapes_of_block(p: Portion) -> Shapes:
    """Return shapes on one device of a tensor group, which divides all but norms and what is added to the stream."""
    model, d, f, q_dim, kv_dim = p.model, p.model.d_model, p.model.ffn_dim, p.model.q_dim, p.model.kv_dim
    options = model.attn_config
    qkv = [rows // p.layout.tensor for rows in ([q_dim + 2 * kv_dim] if options.fused_qkv else [q_dim, kv_dim, kv_dim])]
    up = [f // p.layout.tensor] * p.num_up
    shapes = [(rows, d) for rows in (*qkv, *up)]
    shapes += [(d, columns // p.layout.tensor) for columns in (q_dim, f)]
    if model.has_qkv_bias:
        shapes += [(rows, 1) for rows in qkv]
    if not model.no_bias:
        shapes += [(rows, 1) for rows in (*up, d, d)]
    norms = [(d, model.norm_type)] * 2
    if options.qk_ln:
        norms += [(q_dim, options.norm_type), (kv_dim, options.norm_type)]
    elif options.qk_gn:
        norms += [(model.head_dim, options.norm_type)] * 2
    return shapes + [shape for width, kind in norms for shape in _shapes_of_norm(model, width, kind)]


def _shapes_of_norm(model: ModelConfig, width: int, kind: str) -> Shapes:
    return [(width, 1)] * (1 if model.no_bias or kind.endswith("rmsnorm") else 2)
