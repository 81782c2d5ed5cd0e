"""Counts of parameters and floating-point operations of an MPT, without torch."""

import math
from collections.abc import Mapping, Sequence

from llmfoundry_lite.config.model_schema import ModelConfig

TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models": about so many for a given budget of FLOPs."""


def count_parameters(model: ModelConfig) -> int:
    """Count parameters. The result equals `sum(p.numel())` of the built model, which a test asserts.

    With biases and learned positions this is V*d + s*d + L*(12*d^2 + 13*d) + 2*d, LLM Foundry's published counts.
    """
    d, f, q_dim, kv_dim = model.d_model, model.ffn_dim, model.q_dim, model.kv_dim
    has_bias = 0 if model.no_bias else 1
    norm_rows, qk_norm_rows = (
        1 if norm.norm_type.endswith("rmsnorm") else 1 + has_bias for norm in (model, model.attn_config)
    )
    attention = 2 * d * (q_dim + kv_dim) + has_bias * d + model.has_qkv_bias * (q_dim + 2 * kv_dim)
    if model.attn_config.qk_ln:
        attention += qk_norm_rows * (q_dim + kv_dim)
    elif model.attn_config.qk_gn:
        attention += qk_norm_rows * 2 * model.head_dim
    num_up = 2 if model.ffn_config.ffn_type == "mptglu" else 1
    feed_forward = (num_up + 1) * d * f + has_bias * (num_up * f + d)
    embeddings = model.vocab_size * d * (1 if model.tie_word_embeddings else 2)
    if model.uses_learned_positions:
        embeddings += model.max_seq_len * d
    return embeddings + model.n_layers * (attention + feed_forward + 2 * norm_rows * d) + norm_rows * d


MAX_EXCESS = 2
"""Times the size of its tensors at which a model is refused by size alone, where no tensor can be named."""


def find_excess(model: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Describe why a model is far larger than tensors of these shapes; None if it is not.

    A file of somebody else may describe any size: this is asked before anything of that size is built.
    """
    if model.n_layers > len(shapes):
        return f"it has {model.n_layers:,} layers, and there are {len(shapes):,} tensors"
    num_parameters, num_there = count_parameters(model), sum(math.prod(shape) for shape in shapes.values())
    if num_parameters > MAX_EXCESS * num_there:
        return f"it has {num_parameters:,} parameters, and there are {num_there:,} in its tensors"
    return None


def count_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Count model FLOPs to train on one token, forward and backward: 6*N + 12*L*q*s (PaLM, appendix B).

    q is the width of all heads together, d unless attn_config.head_dim says otherwise.

    This counts the whole attention square (with a sliding window, as many keys as it holds), and nothing recomputed. N
    leaves out an untied input embedding, which is looked up.
    """
    num_matmul = count_parameters(model)
    if not model.tie_word_embeddings:
        num_matmul -= model.vocab_size * model.d_model
    window = model.attn_config.sliding_window_size
    num_keys = seq_len if window < 0 else min(seq_len, window + 1)
    return 6 * num_matmul + 12 * model.n_layers * model.q_dim * num_keys
