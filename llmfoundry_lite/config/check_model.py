"""What of a model cannot be built, or makes no sense together, whoever asks for it: a YAML or an imported folder."""

from llmfoundry_lite.config.check_values import LLAMA3_KEYS, Refuse, either, is_number
from llmfoundry_lite.config.schema import FLEX_HEAD_DIM, ModelConfig, RopeScaling


def check_model(model: ModelConfig, refuse: Refuse) -> None:
    """What cannot be built or makes no sense together. `refuse` raises."""
    if model.d_model % model.n_heads:
        near = [n for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        nearest = min(near, key=lambda n: abs(n - model.n_heads))
        refuse(
            "model.n_heads",
            f"{model.n_heads} does not divide d_model, {model.d_model}; the nearest that does is {nearest}",
        )
    _check_attention(model, refuse)
    if not 0 < model.embedding_fraction <= 1:
        refuse("model.embedding_fraction", f"{model.embedding_fraction} given, expected a share, 0 < share <= 1")
    ffn_dim = model.d_model * model.expansion_ratio
    if model.ffn_config.ffn_hidden_size is None and ffn_dim != int(ffn_dim):
        refuse(
            "model.expansion_ratio",
            f"{model.expansion_ratio} x d_model, {model.d_model}, is no whole number; "
            f"the nearest that gives one is {max(1, round(ffn_dim)) / model.d_model}",
        )
    activation = model.ffn_config.ffn_act_fn
    if activation.approximate != "none" and activation.name != "gelu":
        refuse(
            "model.ffn_config.ffn_act_fn.approximate",
            f"{activation.approximate} given, but name is {activation.name}, and only gelu is approximated; remove it",
        )
    if isinstance(model.logit_scale, str) and model.logit_scale != "inv_sqrt_d_model":
        refuse("model.logit_scale", f"{model.logit_scale!r} given, expected a number or inv_sqrt_d_model")
    if model.logit_scale == 0:
        refuse(
            "model.logit_scale", "0 given, which makes every token as likely as any other; remove it or give a number"
        )
    init = model.init_config
    if init.name == "baseline_" and init.init_std is None:
        refuse("model.init_config.init_std", "missing; baseline_ draws weights from N(0, init_std)")
    divide = init.init_div_is_residual
    is_text = isinstance(divide, str) and not divide.replace(".", "", 1).isdecimal()
    if is_text or (not isinstance(divide, bool) and not float(divide) > 0):
        refuse("model.init_config.init_div_is_residual", f"{divide!r} given, expected true, false or a number above 0")
    for key in ("emb_init_std", "emb_init_uniform_lim"):
        if init.name == "default_" and getattr(init, key) is not None:
            refuse(
                f"model.init_config.{key}", "default_ draws embeddings from N(0, 1); remove it or use another scheme"
            )
    limit = init.emb_init_uniform_lim
    is_pair = isinstance(limit, list) and len(limit) == 2 and all(map(is_number, limit)) and limit[0] <= limit[1]
    is_width = not isinstance(limit, list) and is_number(limit) and limit >= 0
    if not (limit is None or is_width or is_pair):
        refuse(
            "model.init_config.emb_init_uniform_lim",
            f"{limit!r} given, expected a number of 0 or more, or the lower and the upper limit in a list",
        )


def _check_attention(model: ModelConfig, refuse: Refuse) -> None:
    options = model.attn_config
    is_grouped = options.attn_type == "grouped_query_attention"
    if is_grouped and options.kv_n_heads is None:
        refuse("model.attn_config.kv_n_heads", "missing; grouped_query_attention needs the number of heads of k and v")
    if options.kv_n_heads not in (None, model.num_kv_heads):
        refuse(
            "model.attn_config.kv_n_heads",
            f"{options.kv_n_heads} given, but {options.attn_type} has {model.num_kv_heads}; remove it, or use "
            "attn_type: grouped_query_attention",
        )
    if model.n_heads % model.num_kv_heads:
        divisors = [str(n) for n in range(1, model.n_heads + 1) if model.n_heads % n == 0]
        refuse(
            "model.attn_config.kv_n_heads",
            f"{model.num_kv_heads} does not divide n_heads, {model.n_heads}; use one of {either(divisors)}",
        )
    if options.qk_ln and options.qk_gn:
        refuse("model.attn_config.qk_gn", "both qk_ln and qk_gn given; use one of them")
    if options.alibi and options.rope:
        refuse("model.attn_config.rope", "both alibi and rope given; use one of them")
    if options.rope and model.head_dim % 2:
        refuse("model.attn_config.rope", f"turns pairs of dimensions, and d_model / n_heads is {model.head_dim}, odd")
    scaling = options.rope_hf_config
    if scaling.factor != 1.0 and scaling.type == "no_scaling":
        refuse(
            "model.attn_config.rope_hf_config.factor", "given without a type; add type: linear, dynamic, ntk or llama3"
        )
    if options.rope and options.rope_impl == "dail" and scaling.type != "no_scaling":
        refuse("model.attn_config.rope_impl", f"dail has no {scaling.type} scaling; use rope_impl: hf")
    if scaling.factor < 1:
        refuse("model.attn_config.rope_hf_config.factor", f"{scaling.factor} given, expected 1 or more")
    for key in LLAMA3_KEYS:
        if scaling.type != "llama3" and getattr(scaling, key) != getattr(RopeScaling(), key):
            refuse(f"model.attn_config.rope_hf_config.{key}", f"given for type {scaling.type}; only llama3 has it")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        refuse(
            "model.attn_config.rope_hf_config.high_freq_factor",
            f"{scaling.high_freq_factor} given, expected more than low_freq_factor, {scaling.low_freq_factor}",
        )
    if options.sliding_window_size < -1 or options.sliding_window_size == 0:
        refuse(
            "model.attn_config.sliding_window_size",
            f"{options.sliding_window_size} given, expected a number of tokens above 0, or -1 to see all",
        )
    if options.attn_impl in ("blocked", "flex") and options.attn_pdrop:
        refuse("model.attn_config.attn_impl", f"{options.attn_impl} has no attn_pdrop; use sdpa, or attn_pdrop: 0")
    if options.attn_impl == "flex" and model.head_dim < FLEX_HEAD_DIM:
        refuse(
            "model.attn_config.attn_impl",
            f"flex needs heads of {FLEX_HEAD_DIM} dimensions or more, and d_model / n_heads is {model.head_dim}; "
            "use auto or sdpa",
        )
