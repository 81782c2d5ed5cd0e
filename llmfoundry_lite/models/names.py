"""Names and shapes of an MPT's parameters, by arithmetic. No torch.

`models.parameters.parameter_shapes` builds a model for the same answer, and so knows parts of the user's own too.
"""

from collections.abc import Iterator

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.own_code import is_own

NamedShape = tuple[str, tuple[int, ...]]
"""Name of a parameter, and its shape."""


def list_parameters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, in the order of `MPT.named_parameters()`.

    The names are those of checkpoints, such as "transformer.blocks.0.norm_1.weight". Parameters of the user's own parts
    (`ModelConfig.own_parts`) are left out, because nothing is imported here.
    """
    d = model.d_model
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (model.vocab_size, d)}
    if model.uses_learned_positions:
        shapes["transformer.wpe.weight"] = (model.max_seq_len, d)
    for block in range(model.n_layers):
        for name, shape in _list_block(model):
            shapes[f"transformer.blocks.{block}.{name}"] = shape
    for name, shape in _list_norm("norm_f", d, model.norm_type, model):
        shapes[f"transformer.{name}"] = shape
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, d)
    return shapes


def is_matrix_of_block(name: str, num_dimensions: int) -> bool:
    """Return whether a parameter is a matrix of a block, which Muon updates."""
    return num_dimensions == 2 and "blocks" in name.split(".")


def _list_block(model: ModelConfig) -> Iterator[NamedShape]:
    """Yield the parameters of a block."""
    d = model.d_model
    yield from _list_norm("norm_1", d, model.norm_type, model)
    if not is_own(model.attn_config.attn_type):
        yield from _list_attention(model)
    yield from _list_norm("norm_2", d, model.norm_type, model)
    if not is_own(model.ffn_config.ffn_type):
        has_bias = not model.no_bias
        yield from _list_linear("ffn.up_proj", d, model.ffn_dim, has_bias=has_bias)
        yield from _list_linear("ffn.down_proj", model.ffn_dim, d, has_bias=has_bias)
        if model.ffn_config.ffn_type == "mptglu":
            yield from _list_linear("ffn.gate_proj", d, model.ffn_dim, has_bias=has_bias)


def _list_attention(model: ModelConfig) -> Iterator[NamedShape]:
    """Yield the parameters of a block's attention."""
    config = model.attn_config
    widths = {"Wq": model.q_dim, "Wk": model.kv_dim, "Wv": model.kv_dim}
    if config.fused_qkv:
        widths = {"Wqkv": model.q_dim + 2 * model.kv_dim}
    for name, width in widths.items():
        yield from _list_linear(f"attn.{name}", model.d_model, width, has_bias=model.has_qkv_bias)
    yield from _list_linear("attn.out_proj", model.q_dim, model.d_model, has_bias=not model.no_bias)

    # Norms of queries and keys: over all heads, or over each.
    if config.qk_ln:
        yield from _list_norm("attn.q_ln", model.q_dim, config.norm_type, model)
        yield from _list_norm("attn.k_ln", model.kv_dim, config.norm_type, model)
    elif config.qk_gn:
        yield from _list_norm("attn.q_ln", model.head_dim, config.norm_type, model)
        yield from _list_norm("attn.k_ln", model.head_dim, config.norm_type, model)


def _list_linear(name: str, num_inputs: int, num_outputs: int, *, has_bias: bool) -> Iterator[NamedShape]:
    """Yield the parameters of a linear layer."""
    yield f"{name}.weight", (num_outputs, num_inputs)
    if has_bias:
        yield f"{name}.bias", (num_outputs,)


def _list_norm(name: str, width: int, norm_type: str, model: ModelConfig) -> Iterator[NamedShape]:
    """Yield the parameters of a norm. A norm of the user's own yields none."""
    if is_own(norm_type):
        return
    yield f"{name}.weight", (width,)
    if not model.no_bias and not norm_type.endswith("rmsnorm"):
        yield f"{name}.bias", (width,)
