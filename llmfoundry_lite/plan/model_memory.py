"""How much memory one device needs for its part of an MPT, at the moments when it may need the most. Arithmetic, no
torch.

Counts what the tensors of `models`, `parallel` and the chunked loss must hold at the same time. `plan/memory.py` asks
for the whole of a run, or for a stage of a pipeline, and adds what is none of the model's.

Legend: n tokens of a microbatch, d model width, f feed-forward width, h heads, s sequence length.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.config.schema import ContextParallelConfig, ModelConfig
from llmfoundry_lite.hardware import GIB, MIB

FP32_BYTES = 4


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    parameters_bytes: int
    """This device's share, fp32."""
    gradients_bytes: int
    """Its share, fp32; with FSDP also all of them while they wait for the batch's last microbatch."""
    optimizer_bytes: int
    """Its share, fp32."""
    unsharded_bytes: int
    """Parameters gathered or copied for use, in the compute precision, and gradients before they are shared out."""
    activations_bytes: int
    """What the forward pass keeps for the backward pass, and the block that is recomputed in it."""
    logits_bytes: int
    """One chunk of logits and the gradients that the chunked loss computes with it; or those gradients alone."""
    workspaces_bytes: int = 0
    """Of the libraries that compute matrix products; and token ids: a batch's, three times a microbatch's."""

    @property
    def total_bytes(self) -> int:
        return sum(map(self.__getattribute__, self.__slots__))

    def __str__(self) -> str:
        unit, unit_bytes = ("GiB", GIB) if self.total_bytes >= GIB else ("MiB", MIB)
        held = {name.removesuffix("_bytes"): getattr(self, name) / unit_bytes for name in self.__slots__}
        parts = [f"{name} {size:.2f}" for name, size in held.items()]
        if not self.gradients_bytes:
            parts[1] = "gradients none yet"  # it holds the most in the loss of its only microbatch
        return f"about {self.total_bytes / unit_bytes:.2f} {unit} per device: {', '.join(parts)}"


def estimate_memory(model: ModelConfig, **options: Any) -> MemoryEstimate:
    """Bytes when one device holds the most. `options` are those of `estimate_moments`."""
    return max(estimate_moments(model, **options).values(), key=lambda moment: moment.total_bytes)


def estimate_moments(
    model: ModelConfig,
    *,
    seq_len: int,
    microbatch_size: int,
    shard_degree: int = 1,
    has_fsdp: bool = True,
    tensor_parallel_degree: int = 1,
    sequence_parallel: bool = False,
    context: ContextParallelConfig | None = None,
    precision: str = "amp_bf16",
    mixed_precision: str = "DEFAULT",
    reshard_after_forward: bool = True,
    reduces_every_microbatch: bool = True,
    has_one_microbatch: bool = False,
    activation_checkpointing: bool | str = False,
    activation_cpu_offload: bool = False,
    num_optimizer_slots: int = 2,
    num_outside_slots: int | None = None,
    logits_chunk_bytes: int = 256 * MIB,
) -> dict[str, MemoryEstimate]:
    """Bytes of one device at the moments when it may hold the most: in the loss, and in the backward pass at its first
    block, its last, and the embeddings.

    `shard_degree` devices share one copy of parameters, gradients and optimizer state; with tensor parallelism each
    of them stands for a group whose devices divide each layer and the vocabulary, and each have the norms.
    `microbatch_size`: samples. `has_one_microbatch`: no gradients of earlier ones are there when the forward pass
    begins. Without FSDP, as on one device, parameters are used and gradients summed where they lie.
    `num_outside_slots`: the optimizer's, for what is outside of blocks, if that differs.
    """
    is_whole = precision in ("fp32", "tf32")
    has_autocast = not is_whole and mixed_precision == "FULL"
    compute_bytes = FP32_BYTES if is_whole else 2
    stream_bytes = FP32_BYTES if has_autocast else compute_bytes
    reduction_bytes = compute_bytes if mixed_precision == "PURE" else FP32_BYTES

    num_rows = -(-model.vocab_size // tensor_parallel_degree)
    outside, block = _shapes_outside(model, num_rows), _shapes_of_block(model, tensor_parallel_degree)
    share_bytes = FP32_BYTES * (_share(outside, shard_degree) + model.n_layers * _share(block, shard_degree))
    optimizer_bytes = num_optimizer_slots * share_bytes
    if num_outside_slots is not None:
        more = num_outside_slots - num_optimizer_slots
        optimizer_bytes += more * FP32_BYTES * _share(outside, shard_degree)
    num_outside, num_block = _share(outside, 1), _share(block, 1)
    num_parameters = num_outside + model.n_layers * num_block
    # FSDP divides rows, and gathers as many from each device.
    padded_outside = shard_degree * _share(outside, shard_degree)
    padded_block = shard_degree * _share(block, shard_degree)
    padded = padded_outside + model.n_layers * padded_block

    # The embeddings and the last norm stay; of the blocks, the last one, and in the backward pass the one in use and
    # the one that is fetched ahead.
    num_in_loss = padded if not reshard_after_forward else padded_outside + padded_block
    num_in_backward = padded if not reshard_after_forward else padded_outside + min(2, model.n_layers) * padded_block
    # Autocast keeps a copy of every weight it has cast until the backward pass has used it.
    copies = model.n_layers if has_autocast and not activation_checkpointing else int(has_autocast)
    copies_bytes = compute_bytes * num_block * copies

    waiting_bytes = 0 if has_one_microbatch else share_bytes
    if not reduces_every_microbatch:
        waiting_bytes = num_parameters * FP32_BYTES
    context = context or ContextParallelConfig()
    num_tokens = microbatch_size * seq_len // context.context_parallel_degree
    num_runs = tensor_parallel_degree if sequence_parallel else 1
    block_bytes = num_tokens * _block_bytes_per_token(
        model, compute_bytes, stream_bytes, tensor_parallel_degree, num_runs, context
    )
    kept_bytes = _activations_bytes(
        model,
        num_tokens,
        seq_len,
        compute_bytes,
        stream_bytes,
        tensor_parallel_degree=tensor_parallel_degree,
        num_runs=num_runs,
        context=context,
        checkpointing=activation_checkpointing,
        is_offloaded=activation_cpu_offload and activation_checkpointing is True,
    )
    hidden_bytes = num_tokens * model.d_model * compute_bytes
    logits_bytes = _logits_bytes(
        *(num_rows, model.d_model, num_tokens, compute_bytes, logits_chunk_bytes), is_divided=tensor_parallel_degree > 1
    )
    # Of a block in its backward pass: early its activations, the gradient of the widest and of one matrix; late the
    # gradients of all its matrices. Its input is among what was kept.
    is_kept = not activation_checkpointing
    widest_bytes = num_tokens * model.ffn_dim // tensor_parallel_degree * compute_bytes
    input_bytes = 0 if is_kept else num_tokens // num_runs * model.d_model * stream_bytes
    early_bytes = block_bytes + widest_bytes - input_bytes
    # The last norm's input and output are gone by then.
    last_norm_bytes = (num_tokens // num_runs + num_tokens) * model.d_model * stream_bytes
    before_bytes = kept_bytes - is_kept * block_bytes - last_norm_bytes
    if not has_fsdp:
        # Copies in 16 bits, which autograd keeps until the backward pass, and the gradient of one matrix.
        num_copied = num_outside + num_block if activation_checkpointing else num_parameters
        copy_bytes = stream_bytes if stream_bytes < FP32_BYTES else 0
        one_matrix_bytes = model.d_model * model.ffn_dim * (copy_bytes + FP32_BYTES)
        in_loss = MemoryEstimate(
            parameters_bytes=share_bytes,
            gradients_bytes=0 if has_one_microbatch else share_bytes,
            optimizer_bytes=optimizer_bytes,
            unsharded_bytes=num_copied * copy_bytes + copies_bytes,
            activations_bytes=kept_bytes,
            logits_bytes=logits_bytes + hidden_bytes,
        )
        embedding = num_rows * model.d_model
        at_first_block = dataclasses.replace(
            in_loss,
            gradients_bytes=embedding * FP32_BYTES if has_one_microbatch else share_bytes,
            unsharded_bytes=in_loss.unsharded_bytes + one_matrix_bytes,
            activations_bytes=before_bytes + early_bytes,
            logits_bytes=embedding * compute_bytes + hidden_bytes,
        )
        at_last_block = dataclasses.replace(
            at_first_block,
            gradients_bytes=share_bytes,
            unsharded_bytes=(num_outside + num_block) * copy_bytes + one_matrix_bytes,
            activations_bytes=early_bytes,
        )
        return {"in_loss": in_loss, "at_first_block": at_first_block, "at_last_block": at_last_block}
    in_loss = MemoryEstimate(
        parameters_bytes=share_bytes,
        gradients_bytes=waiting_bytes,
        optimizer_bytes=optimizer_bytes,
        unsharded_bytes=num_in_loss * stream_bytes + copies_bytes,
        activations_bytes=kept_bytes,
        logits_bytes=logits_bytes + hidden_bytes,
    )
    early_bytes += model.d_model * model.ffn_dim // tensor_parallel_degree * stream_bytes
    late_bytes = num_block * stream_bytes + 4 * hidden_bytes
    embedding_bytes = num_rows * model.d_model * compute_bytes
    at_first_block = dataclasses.replace(
        in_loss,
        unsharded_bytes=num_in_backward * stream_bytes + padded_block * reduction_bytes + copies_bytes,
        activations_bytes=before_bytes + max(early_bytes, late_bytes),
        logits_bytes=embedding_bytes + hidden_bytes,
    )
    at_last_block = dataclasses.replace(
        at_first_block,
        gradients_bytes=max(waiting_bytes, share_bytes),
        activations_bytes=max(early_bytes, late_bytes),
    )
    at_embeddings = dataclasses.replace(
        at_last_block,
        unsharded_bytes=(padded_outside if reshard_after_forward else padded) * stream_bytes
        + padded_outside * reduction_bytes,
        activations_bytes=hidden_bytes,
        logits_bytes=2 * embedding_bytes,
    )
    return {
        "in_loss": in_loss,
        "at_first_block": at_first_block,
        "at_last_block": at_last_block,
        "at_embeddings": at_embeddings,
    }


def _activations_bytes(
    model: ModelConfig,
    num_tokens: int,
    seq_len: int,
    compute_bytes: int,
    stream_bytes: int,
    *,
    tensor_parallel_degree: int,
    num_runs: int,
    context: ContextParallelConfig,
    checkpointing: bool | str,
    is_offloaded: bool,
) -> int:
    """What the forward pass keeps; of the stream, a run of each of the `num_runs` into which it is divided.

    Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1, for these blocks.
    Their 34*n*d bytes of a block are 32*n*d here, without dropout's masks; their 5*h*s*n for the attention
    probabilities are gone, since scaled_dot_product_attention recomputes them and keeps one number per query.
    """
    d = model.d_model
    input_bytes = num_tokens // num_runs * d * stream_bytes
    if checkpointing == "selective":
        kept_bytes = num_tokens * _product_bytes_per_token(model, compute_bytes, tensor_parallel_degree)
        blocks_bytes = model.n_layers * (input_bytes + kept_bytes)
    elif checkpointing:
        blocks_bytes = 0 if is_offloaded else model.n_layers * input_bytes
    else:
        block_bytes = _block_bytes_per_token(
            model, compute_bytes, stream_bytes, tensor_parallel_degree, num_runs, context
        )
        blocks_bytes = model.n_layers * num_tokens * block_bytes
    # The last norm keeps its input and its output is the loss's.
    last_norm_bytes = input_bytes + num_tokens * d * stream_bytes
    bias_bytes = 0
    options, degree = model.attn_config, context.context_parallel_degree
    is_gathered = degree > 1 and context.kind == "gather"
    if options.alibi or options.sliding_window_size >= 0 or options.attn_uses_sequence_id:
        # Where there is a kernel that needs none, `auto` takes it; this is the most it can be.
        # One bias for all blocks, unless autocast has to copy it into the compute precision for each.
        num_copies = model.n_layers if stream_bytes != compute_bytes and not checkpointing else 0
        num_heads = model.n_heads // tensor_parallel_degree if options.alibi else 1
        num_samples = num_tokens * degree // seq_len if options.attn_uses_sequence_id else 1
        scores = seq_len * seq_len
        if is_gathered:  # of two pieces, each with all tokens up to its end
            scores = (seq_len // (2 * degree)) ** 2 * (2 * degree + 1)
        elif options.alibi:
            num_heads //= degree
        bias_bytes = num_heads * num_samples * scores * (stream_bytes + num_copies * compute_bytes)
    dropout_bytes = num_tokens // num_runs * d if model.emb_pdrop else 0
    return blocks_bytes + last_norm_bytes + bias_bytes + dropout_bytes


Shapes = list[tuple[int, int]]
"""Rows, which FSDP divides, and columns."""


def _share(shapes: Shapes, degree: int) -> int:
    """Numbers that one of `degree` devices holds."""
    return sum(-(-rows // degree) * columns for rows, columns in shapes)


def rounding_bytes(model: ModelConfig, shard_degree: int, tensor_parallel_degree: int) -> int:
    """By how much torch's allocator rounds up the blocks' shares: from each 20 MiB that it cuts into tensors of 1 to 10
    MiB, it gives the last one up to 1 MiB more (c10/cuda/CUDACachingAllocator: kLargeBuffer, kSmallSize)."""
    shapes = _shapes_of_block(model, tensor_parallel_degree)
    shares = [FP32_BYTES * _share([shape], shard_degree) for shape in shapes]
    return model.n_layers * sum(share // 20 for share in shares if MIB < share < 10 * MIB)


def _shapes_outside(model: ModelConfig, num_rows: int) -> Shapes:
    """`num_rows`: of the vocabulary, on this device."""
    d = model.d_model
    shapes = [(num_rows, d)] * (1 if model.tie_word_embeddings else 2)
    if model.uses_learned_positions:
        shapes.append((model.max_seq_len, d))
    return shapes + _shapes_of_norm(model, d, model.norm_type)


def _shapes_of_block(model: ModelConfig, tensor_parallel_degree: int) -> Shapes:
    """On one device of a tensor group, which divides all but the norms and what is added to the stream."""
    d, kv_dim, f = model.d_model, model.num_kv_heads * model.head_dim, model.ffn_dim
    num_up = 2 if model.ffn_config.ffn_type == "mptglu" else 1
    qkv = [d + 2 * kv_dim] if model.attn_config.fused_qkv else [d, kv_dim, kv_dim]
    first = [rows // tensor_parallel_degree for rows in (*qkv, *(f,) * num_up)]
    shapes = [(rows, d) for rows in first]
    shapes += [(d, columns // tensor_parallel_degree) for columns in (d, f)]
    if not model.no_bias:
        shapes += [(rows, 1) for rows in (*first, d, d)]
    options = model.attn_config
    norms = [(d, model.norm_type)] * 2
    if options.qk_ln:
        norms += [(d, options.norm_type), (kv_dim, options.norm_type)]
    elif options.qk_gn:
        norms += [(model.head_dim, options.norm_type)] * 2
    return shapes + [shape for width, kind in norms for shape in _shapes_of_norm(model, width, kind)]


def _shapes_of_norm(model: ModelConfig, width: int, kind: str) -> Shapes:
    return [(width, 1)] * (1 if model.no_bias or kind.endswith("rmsnorm") else 2)


def _block_bytes_per_token(
    model: ModelConfig,
    compute_bytes: int,
    stream_bytes: int,
    tensor_parallel_degree: int,
    num_runs: int,
    context: ContextParallelConfig,
) -> int:
    """Matrices keep their input whole, also where a norm has computed a run of it alone."""
    d, f = model.d_model, model.ffn_dim
    # A norm in fp32 keeps an fp32 copy of an input that is not.
    norm_input = d * (
        max(stream_bytes, FP32_BYTES) if not model.norm_type.startswith("low_precision_") else stream_bytes
    )
    # RMSNorm as accelerators' fused kernel keeps it; torch's CPU computes it in steps that keep more.
    norm_statistics, qk_norm_statistics = (
        (1 if norm.norm_type.endswith("rmsnorm") else 2) * FP32_BYTES for norm in (model, model.attn_config)
    )
    kv_dim = model.num_kv_heads * model.head_dim
    norms = 2 * ((norm_input + norm_statistics) // num_runs + d * compute_bytes)
    attention = (2 * d + 2 * kv_dim) * compute_bytes + model.n_heads * FP32_BYTES
    degree = context.context_parallel_degree
    if degree > 1:  # what attention gives is rearranged before the matrix that follows
        attention += d * compute_bytes
    if context.kind == "gather":
        # This rank's own are kept with its queries, where one matrix has made them all.
        num_others = degree if model.attn_config.fused_qkv else degree - 1
        attention += num_others * 2 * kv_dim * compute_bytes
    if model.attn_config.clip_qkv is not None:
        attention += (d + 2 * kv_dim) * compute_bytes
    if model.attn_config.qk_ln or model.attn_config.qk_gn:
        attention += (d + kv_dim) * compute_bytes + 2 * qk_norm_statistics
    if model.attn_config.rope:
        attention += (d + kv_dim) * compute_bytes
    # mptglu keeps gate, act(gate), up, and their product; mptmlp up and act(up).
    feed_forward = (4 if model.ffn_config.ffn_type == "mptglu" else 2) * f * compute_bytes
    dropout = 2 * d // num_runs if model.resid_pdrop else 0
    return norms + (attention + feed_forward) // tensor_parallel_degree + dropout


def _product_bytes_per_token(model: ModelConfig, compute_bytes: int, tensor_parallel_degree: int) -> int:
    """What selective checkpointing keeps of a block: q, k and v, attention, and the feed-forward layer's products."""
    d, kv_dim = model.d_model, model.num_kv_heads * model.head_dim
    num_up = 2 if model.ffn_config.ffn_type == "mptglu" else 1
    divided = (2 * d + 2 * kv_dim + num_up * model.ffn_dim) * compute_bytes + model.n_heads * FP32_BYTES
    return divided // tensor_parallel_degree + 2 * d * compute_bytes


def _logits_bytes(
    num_rows: int, d_model: int, num_tokens: int, compute_bytes: int, chunk_bytes: int, *, is_divided: bool
) -> int:
    """One chunk of logits and of what the loss makes of it, and the embedding's gradient so far; of this device's rows
    of the vocabulary."""
    most = max(128, chunk_bytes // (FP32_BYTES * num_rows))
    chunk_tokens = min(num_tokens, math.ceil(num_tokens / math.ceil(num_tokens / most) / 128) * 128)
    embedding = num_rows * d_model
    # log_softmax has its input, a copy in fp32 of one that is not, and its output.
    logits_bytes = compute_bytes + FP32_BYTES + (FP32_BYTES if compute_bytes < FP32_BYTES else 0)
    if is_divided:  # logsumexp has an input in fp32 and as much beside it
        logits_bytes = 2 * FP32_BYTES
    # The embedding's gradient begins with the first chunk, after its softmax.
    gradient = embedding * FP32_BYTES if chunk_tokens < num_tokens else 0
    in_softmax = chunk_tokens * num_rows * logits_bytes + gradient
    in_product = chunk_tokens * num_rows * compute_bytes + embedding * (FP32_BYTES + compute_bytes)
    return max(in_softmax, in_product)
