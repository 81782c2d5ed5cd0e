"""How many parameters and how many floating-point operations an MPT has: pure arithmetic, no torch."""

from llmfoundry_lite.config.schema import ModelConfig


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters; equals `sum(p.numel())` of the built model, which a test asserts.

    With biases and learned positions this is V*d + s*d + L*(12*d^2 + 13*d) + 2*d, LLM Foundry's published counts.
    """
    d, f = model.d_model, model.ffn_dim
    has_bias = 0 if model.no_bias else 1
    norm = d * (1 + has_bias)
    attention = 4 * d * d + has_bias * 4 * d + (2 * norm if model.attn_config.qk_ln else 0)
    feed_forward = 2 * d * f + has_bias * (f + d)
    embeddings = model.vocab_size * d + (model.max_seq_len * d if model.uses_learned_positions else 0)
    return embeddings + model.n_layers * (attention + feed_forward + 2 * norm) + norm


def count_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Model FLOPs to train on one token, forward and backward: 6*N + 12*L*d*s (PaLM, appendix B).

    Counts what the mathematics needs: the whole attention square, and nothing recomputed.
    """
    return 6 * count_parameters(model) + 12 * model.n_layers * model.d_model * seq_len
