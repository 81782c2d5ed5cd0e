"""Counts of parameters and of floating-point operations of an MPT, by arithmetic. No torch."""

import math
from collections.abc import Mapping, Sequence

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.own_code import is_own

TOKENS_PER_PARAMETER = 20
"""Tokens for each parameter that make the best model for a given budget of FLOPs, approximately (Hoffmann et al. 2022,
"Training Compute-Optimal Large Language Models")."""


def count_parameters(model: ModelConfig) -> int:
    """Count the parameters of a model, exactly as `sum(p.numel() for p in MPT(model).parameters())` does.

    Parts of the user's own (`ModelConfig.own_parts`) are not imported here, and count as nothing. A caller says so.

    For LLM Foundry's published models, which have biases and learned positions, this is V*d + s*d + L*(12*d^2 + 13*d) +
    2*d, where V is the vocabulary, d the width, s the sequence length and L the number of blocks.
    """
    d, q_dim, kv_dim = model.d_model, model.q_dim, model.kv_dim
    has_bias = 0 if model.no_bias else 1

    # Queries, keys, values and the output projection.
    attention = 2 * d * (q_dim + kv_dim) + has_bias * d
    if model.has_qkv_bias:
        attention += q_dim + 2 * kv_dim
    qk_norm_vectors = _count_norm_vectors(model.attn_config.norm_type, has_bias)
    if model.attn_config.qk_ln:
        attention += qk_norm_vectors * (q_dim + kv_dim)
    elif model.attn_config.qk_gn:
        attention += qk_norm_vectors * 2 * model.head_dim
    if is_own(model.attn_config.attn_type):
        attention = 0

    # The feed-forward layer: one matrix or, with a gate, two that widen, and one that narrows.
    num_up = 2 if model.ffn_config.ffn_type == "mptglu" else 1
    feed_forward = (num_up + 1) * d * model.ffn_dim + has_bias * (num_up * model.ffn_dim + d)
    if is_own(model.ffn_config.ffn_type):
        feed_forward = 0

    # Input and output embeddings, which are one matrix if they are tied, and learned positions.
    num_embeddings = 1 if model.tie_word_embeddings else 2
    embeddings = num_embeddings * model.vocab_size * d
    if model.uses_learned_positions:
        embeddings += model.max_seq_len * d

    # Two norms in each block, and one after the last.
    norm = _count_norm_vectors(model.norm_type, has_bias) * d
    return embeddings + model.n_layers * (attention + feed_forward + 2 * norm) + norm


def _count_norm_vectors(norm_type: str, has_bias: int) -> int:
    """Return how many vectors of parameters a norm has: a weight, and for a LayerNorm with biases (1) also a bias.

    What a norm of the user's own has is not known here, and counts as nothing.
    """
    if is_own(norm_type):
        return 0
    return 1 if norm_type.endswith("rmsnorm") else 1 + has_bias


MAX_PARAMETER_RATIO = 2
"""A model with more parameters than this many times those of a file is refused by its size alone, before any tensor is
compared by name."""


def find_size_mismatch(model: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Return why a model is far too large for tensors of these shapes, for an error message, or None if it is not.

    Call this before anything of the model's size is built, because a file from a stranger may claim any size. The exact
    comparison of names and shapes is `models.parameters.find_mismatch`.
    """
    if model.n_layers > len(shapes):
        return f"it has {model.n_layers:,} layers, and there are {len(shapes):,} tensors"
    num_expected = count_parameters(model)
    num_found = sum(math.prod(shape) for shape in shapes.values())
    if num_expected > MAX_PARAMETER_RATIO * num_found:
        return f"it has {num_expected:,} parameters, and there are {num_found:,} in its tensors"
    return None


def count_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Count the model FLOPs of training on one token, forward and backward: 6*N + 12*L*q*s (PaLM, appendix B).

    N are the parameters in matrix products: all but an untied input embedding, which is looked up. L are the layers, q
    the width of all heads together, and s the keys of a query, as if it attended to the whole row, or to the whole
    sliding window if there is one. Nothing that is computed a second time counts, and nothing of the user's own parts.
    """
    num_multiplied = count_parameters(model)
    if not model.tie_word_embeddings:
        num_multiplied -= model.vocab_size * model.d_model
    attention = model.attn_config
    if is_own(attention.attn_type) or is_own(attention.attn_impl):
        return 6 * num_multiplied
    num_keys = seq_len
    window = attention.sliding_window_size
    if window >= 0:
        num_keys = min(seq_len, window + 1)
    return 6 * num_multiplied + 12 * model.n_layers * model.q_dim * num_keys
