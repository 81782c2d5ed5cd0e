"""How the keys of a model go together, whoever asks for it: a YAML or an imported folder."""

from llmfoundry_lite.config.layout import divisors
from llmfoundry_lite.config.model_schema import FLEX_HEAD_DIM, LLAMA3_KEYS, AttentionConfig, ModelConfig, RopeScaling
from llmfoundry_lite.errors import ConfigError, either


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for a model that cannot be built or makes no sense."""
    if model.d_model % model.n_heads:
        nearest = min(divisors(model.d_model), key=lambda n: abs(n - model.n_heads))
        raise ConfigError(
            f"model.n_heads: {model.n_heads} does not divide d_model, {model.d_model}; the nearest that does is "
            f"{nearest}"
        )
    _check_attention(model, model.attn_config)
    _check_rope(model, model.attn_config)
    ffn_dim = model.d_model * model.expansion_ratio
    if model.ffn_config.ffn_hidden_size is None and ffn_dim != int(ffn_dim):
        raise ConfigError(
            f"model.expansion_ratio: {model.expansion_ratio} x d_model, {model.d_model}, is no whole number; "
            f"the nearest that gives one is {max(1, round(ffn_dim)) / model.d_model}"
        )
    activation = model.ffn_config.ffn_act_fn
    if activation.approximate != "none" and activation.name != "gelu":
        raise ConfigError(
            f"model.ffn_config.ffn_act_fn.approximate: {activation.approximate} given, but name is {activation.name}, "
            "and only gelu is approximated; remove it"
        )
    if model.logit_scale == 0:
        raise ConfigError(
            "model.logit_scale: 0 given, which makes every token as likely as any other; remove it or give a number"
        )
    init = model.init_config
    if init.name == "baseline_" and init.init_std is None:
        raise ConfigError("model.init_config.init_std: missing; baseline_ draws weights from N(0, init_std)")
    for key in ("emb_init_std", "emb_init_uniform_lim"):
        if init.name == "default_" and getattr(init, key) is not None:
            raise ConfigError(
                f"model.init_config.{key}: default_ draws embeddings from N(0, 1); remove it or use another scheme"
            )


def _check_attention(model: ModelConfig, attention: AttentionConfig) -> None:
    block = "model.attn_config"
    if attention.attn_type == "grouped_query_attention" and attention.kv_n_heads is None:
        raise ConfigError(f"{block}.kv_n_heads: missing; grouped_query_attention needs the number of heads of k and v")
    if attention.kv_n_heads not in (None, model.num_kv_heads):
        raise ConfigError(
            f"{block}.kv_n_heads: {attention.kv_n_heads} given, but {attention.attn_type} has {model.num_kv_heads}; "
            "remove it, or use attn_type: grouped_query_attention"
        )
    if model.n_heads % model.num_kv_heads:
        raise ConfigError(
            f"{block}.kv_n_heads: {model.num_kv_heads} does not divide n_heads, {model.n_heads}; use one of "
            f"{either(divisors(model.n_heads))}"
        )
    if attention.qk_ln and attention.qk_gn:
        raise ConfigError(f"{block}.qk_gn: both qk_ln and qk_gn given; use one of them")
    if attention.attn_impl in ("blocked", "flex") and attention.attn_pdrop:
        raise ConfigError(f"{block}.attn_impl: {attention.attn_impl} has no attn_pdrop; use sdpa, or attn_pdrop: 0")
    if attention.attn_impl == "flex" and model.head_dim < FLEX_HEAD_DIM:
        raise ConfigError(
            f"{block}.attn_impl: flex needs heads of {FLEX_HEAD_DIM} dimensions or more, and d_model / n_heads is "
            f"{model.head_dim}; use auto or sdpa"
        )


def _check_rope(model: ModelConfig, attention: AttentionConfig) -> None:
    block, scaling = "model.attn_config.rope_hf_config", attention.rope_hf_config
    if attention.alibi and attention.rope:
        raise ConfigError("model.attn_config.rope: both alibi and rope given; use one of them")
    if attention.rope and model.head_dim % 2:
        raise ConfigError(
            f"model.attn_config.rope: turns pairs of dimensions, and d_model / n_heads is {model.head_dim}, odd"
        )
    if scaling.factor != 1.0 and scaling.type == "no_scaling":
        raise ConfigError(f"{block}.factor: given without a type; add type: linear, dynamic, ntk or llama3")
    if attention.rope and attention.rope_impl == "dail" and scaling.type != "no_scaling":
        raise ConfigError(f"model.attn_config.rope_impl: dail has no {scaling.type} scaling; use rope_impl: hf")
    for key in LLAMA3_KEYS:
        if scaling.type != "llama3" and getattr(scaling, key) != getattr(RopeScaling(), key):
            raise ConfigError(f"{block}.{key}: given for type {scaling.type}; only llama3 has it")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"{block}.high_freq_factor: {scaling.high_freq_factor} given, expected more than low_freq_factor, "
            f"{scaling.low_freq_factor}"
        )
