"""The Hugging Face layouts with RoPE, RMSNorm and gated feed-forward layers: Llama, and three near to it.

Mistral has a sliding window, Qwen2 biases of q, k and v alone, Qwen3 norms of each head of q and of k. Read at
transformers 5.23: modeling_llama.py, modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
"""

import json
from collections.abc import Mapping
from typing import Any

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, ModelConfig, RopeScaling
from llmfoundry_lite.convert.layout import (
    ACTIVATIONS,
    Field,
    HFConfig,
    Layout,
    Options,
    Source,
    State,
    Values,
    activation_name,
    check_values,
    ffn_values,
    keys,
    needed,
    plain_attention,
)
from llmfoundry_lite.errors import ExportError

# ----------------------------------------------------------------------------------------------------- what all have


def common_options(config: ModelConfig) -> Options:
    return {
        **plain_attention(config),
        "attn_config.head_dim": (config.attn_config.head_dim,),
        "attn_config.clip_qkv": (None,),
        "attn_config.softmax_scale": (None, config.head_dim**-0.5),
        "ffn_config.ffn_type": ("mptglu",),
        "norm_type": ("low_precision_rmsnorm", "rmsnorm"),
        "logit_scale": (None,),
    }


SCALINGS = {"no_scaling": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3"}
"""Our name -> transformers' rope_type."""


def write_rope(config: ModelConfig) -> HFConfig:
    """Return rope_parameters as transformers 5 reads them. NTK scaling is written as another theta, which it is."""
    scaling, theta = config.attn_config.rope_hf_config, float(config.attn_config.rope_theta)
    if scaling.type == "ntk":  # as `attention.build_rotation` has it
        theta, scaling = theta * scaling.factor ** (config.head_dim / max(config.head_dim - 2, 1)), RopeScaling()
    rope: HFConfig = {"rope_type": SCALINGS[scaling.type]}
    if scaling.type != "no_scaling":
        rope["factor"] = scaling.factor
    if scaling.type == "llama3":
        rope |= {key: getattr(scaling, key) for key in LLAMA3_KEYS}
    return {**rope, "rope_theta": theta}


def write_rope_scaling(config: ModelConfig) -> HFConfig | None:
    """Return the same as transformers 4 reads it, beside rope_theta."""
    rope = write_rope(config)
    del rope["rope_theta"]
    return None if rope["rope_type"] == "default" else rope


FIELDS: dict[str, Any] = {
    "hidden_size": Field("d_model"),
    "num_attention_heads": Field("n_heads"),
    "num_key_value_heads": lambda config: config.num_kv_heads,
    "head_dim": lambda config: config.head_dim,
    "num_hidden_layers": Field("n_layers"),
    "intermediate_size": lambda config: config.ffn_dim,
    "max_position_embeddings": Field("max_seq_len"),
    "vocab_size": Field("vocab_size"),
    "hidden_act": activation_name,
    "rms_norm_eps": Field("norm_eps", 1e-6),
    "rope_parameters": write_rope,
    "rope_theta": lambda config: write_rope(config)["rope_theta"],
    "rope_scaling": write_rope_scaling,
    "attention_dropout": Field("attn_config.attn_pdrop", 0.0),
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": Field("tie_word_embeddings", False),
    "use_cache": True,
    # transformers knows neither: its norm is in fp32, and a text is one document.
    "norm_type": Field("norm_type", "rmsnorm"),
    "attn_uses_sequence_id": Field("attn_config.attn_uses_sequence_id", False),
}
BLOCK = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}
MUST_BE: Options = {
    "partial_rotary_factor": (1.0, None),
    "hidden_act": ("silu", *(name for name in ACTIVATIONS if name != "silu")),
    "norm_type": ("rmsnorm", "low_precision_rmsnorm"),
}
KNOWN = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
    "max_position_embeddings vocab_size hidden_act rms_norm_eps rope_parameters rope_scaling rope_theta",
    "attention_dropout norm_type attn_uses_sequence_id partial_rotary_factor",
)
ROPE_KEYS = keys("rope_type type factor rope_theta partial_rotary_factor", *LLAMA3_KEYS)
ROPE_MUST_BE: Options = {"rope_type": tuple(SCALINGS.values()), "partial_rotary_factor": (1.0, None)}


def sources(config: ModelConfig) -> dict[str, Source]:
    q_end, k_end = config.q_dim, config.q_dim + config.kv_dim
    rows = {"q": (0, q_end), "k": (q_end, k_end), "v": (k_end, k_end + config.kv_dim)}
    is_fused = config.attn_config.fused_qkv
    found = {"model.embed_tokens.weight": Source(("transformer.wte.weight",))}
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}", f"transformer.blocks.{i}"
        found[f"{theirs}.input_layernorm.weight"] = Source((f"{ours}.norm_1.weight",))
        for part in ("weight", "bias"):
            for letter in "qkv" if part == "weight" or config.has_qkv_bias else "":
                name = f"{ours}.attn.{'Wqkv' if is_fused else f'W{letter}'}.{part}"
                found[f"{theirs}.self_attn.{letter}_proj.{part}"] = Source((name,), rows[letter] if is_fused else None)
            for their_module, our_module in BLOCK.items() if part == "weight" or not config.no_bias else ():
                found[f"{theirs}.{their_module}.{part}"] = Source((f"{ours}.{our_module}.{part}",))
        for letter in "qk" if config.attn_config.qk_gn else "":
            found[f"{theirs}.self_attn.{letter}_norm.weight"] = Source((f"{ours}.attn.{letter}_ln.weight",))
        found[f"{theirs}.post_attention_layernorm.weight"] = Source((f"{ours}.norm_2.weight",))
    return found | {"model.norm.weight": Source(("transformer.norm_f.weight",))}


def read_common(values: Values, hf_config: HFConfig, where: str) -> None:
    """Read what is no plain Field. A width that config.json leaves out, and that is another one, shows in a shape."""
    d_model, n_heads = values["d_model"], values["n_heads"]
    head_dim = hf_config.get("head_dim") or d_model // n_heads
    num_kv_heads = hf_config.get("num_key_value_heads") or n_heads
    attn_type = {n_heads: "multihead_attention", 1: "multiquery_attention"}.get(num_kv_heads, "grouped_query_attention")
    values["attn_config.head_dim"] = None if head_dim * n_heads == d_model else head_dim
    values["attn_config.attn_type"] = attn_type
    values["attn_config.kv_n_heads"] = num_kv_heads if attn_type == "grouped_query_attention" else None
    values["no_bias"] = True
    values["ffn_config.ffn_type"] = "mptglu"
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("hidden_act", "silu")]
    values |= ffn_values(needed(hf_config, "intermediate_size", where), d_model)
    values |= {"attn_config.rope": True} | read_rope(hf_config, where)


def read_rope(hf_config: HFConfig, where: str) -> Values:
    """Read rope_parameters as transformers 5 writes them, or rope_theta and rope_scaling. Raises ExportError."""
    key = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    found = hf_config.get(key) or {}
    if contrary := [name for name, value in (hf_config.get("rope_scaling") or {}).items() if found.get(name) != value]:
        raise ExportError(f"{where}: rope_parameters and rope_scaling differ in {contrary[0]} in config.json")
    rope = {"rope_type": found.get("type", "default"), **found}
    check_values({key: rope}, {f"{key}.{name}": values for name, values in ROPE_MUST_BE.items()}, where)
    ours = next(ours for ours, theirs in SCALINGS.items() if theirs == rope["rope_type"])
    expected = () if ours == "no_scaling" else ("factor", *LLAMA3_KEYS) if ours == "llama3" else ("factor",)
    for name in ("factor", *LLAMA3_KEYS):
        if (name in expected) != (rope.get(name) is not None):
            wrong, does = (
                ("is missing", "needs") if name in expected else (f"is {json.dumps(rope[name])}", "does not have")
            )
            raise ExportError(f"{where}: {key}.{name} {wrong} in config.json; rope_type {rope['rope_type']} {does} it")
    return {
        "attn_config.rope_impl": "dail" if ours == "no_scaling" else "hf",
        "attn_config.rope_theta": rope.get("rope_theta", hf_config.get("rope_theta", 10_000)),
        "attn_config.rope_hf_config": RopeScaling(type=ours, **{name: rope[name] for name in expected}),
    }


def layout(name: str, fields: Mapping[str, Any], must_be: Options, *known: str, **parts: Any) -> Layout:
    """Return the layout of transformers' `<name>ForCausalLM`."""
    classes = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    return Layout(
        fields={**classes, **FIELDS, **fields},
        must_be={"architectures": (None, [f"{name}ForCausalLM"], [f"{name}Model"]), **MUST_BE, **must_be},
        sources=sources,
        known={"": keys(*KNOWN, *known), "rope_parameters": ROPE_KEYS, "rope_scaling": ROPE_KEYS},
        prefix="model.",
        buffers=(".rotary_emb.inv_freq",),
        **parts,
    )


# --------------------------------------------------------------------------------------------------------- the four


def read_llama(values: Values, hf_config: HFConfig, _state: State, where: str) -> None:
    has_bias = hf_config.get("mlp_bias", False)
    check_values({"attention_bias": False, **hf_config}, {"attention_bias": (has_bias,)}, where)
    read_common(values, hf_config, where)
    values["no_bias"] = not has_bias


LLAMA = layout(
    "Llama",
    {"attention_bias": lambda config: not config.no_bias, "mlp_bias": lambda config: not config.no_bias},
    {"rope_interleaved": (False, None)},
    "attention_bias mlp_bias rope_interleaved",
    "pretraining_tp is_llama_config",  # how transformers computes, and a mark of who wrote the file
    title="Llama, the layout for RoPE",
    can_be=common_options,
    read_others=read_llama,
)


def read_mistral(values: Values, hf_config: HFConfig, _state: State, where: str) -> None:
    read_common(values, hf_config, where)
    window = hf_config.get("sliding_window", 4096)  # transformers' default, which no shape shows
    values["attn_config.sliding_window_size"] = -1 if window is None else max(0, window - 1)


MISTRAL = layout(
    "Mistral",
    {"sliding_window": lambda config: config.attn_config.sliding_window_size + 1 or None},  # a token and those before
    {},
    "sliding_window",
    title="Mistral, the layout for RoPE with a sliding window",
    can_be=lambda config: {
        **common_options(config),
        "no_bias": (True,),
        "attn_config.sliding_window_size": (config.attn_config.sliding_window_size,),
    },
    read_others=read_mistral,
)

QWEN_KEYS = "use_sliding_window sliding_window max_window_layers layer_types"


def read_qwen(values: Values, hf_config: HFConfig, where: str) -> None:
    layer_types = (None, ["full_attention"] * values["n_layers"])
    check_values(hf_config, {"use_sliding_window": (False, None), "layer_types": layer_types}, where)
    read_common(values, hf_config, where)


def read_qwen2(values: Values, hf_config: HFConfig, _state: State, where: str) -> None:
    read_qwen(values, hf_config, where)
    values["attn_config.qkv_bias"] = True


QWEN2 = layout(
    "Qwen2",
    {"use_sliding_window": False},
    {"use_mrope": (False, None)},
    f"{QWEN_KEYS} use_mrope",
    title="Qwen2, the layout for RoPE with biases of q, k and v alone",
    can_be=lambda config: {**common_options(config), "attn_config.qkv_bias": (True,)},
    read_others=read_qwen2,
)


def read_qwen3(values: Values, hf_config: HFConfig, _state: State, where: str) -> None:
    read_qwen(values, hf_config, where)
    values["attn_config.qk_gn"] = True
    values |= {f"attn_config.{key}": values[key] for key in ("norm_type", "norm_eps")}


QWEN3 = layout(
    "Qwen3",
    {"attention_bias": False, "use_sliding_window": False},
    {"attention_bias": (False,)},
    f"{QWEN_KEYS} attention_bias",
    title="Qwen3, the layout for RoPE with norms of each head of q and k",
    can_be=lambda config: {
        **common_options(config),
        "no_bias": (True,),
        "attn_config.qk_gn": (True,),
        "attn_config.norm_type": (config.norm_type,),
        "attn_config.norm_eps": (config.norm_eps,),
    },
    read_others=read_qwen3,
)


def layout_with_rope(config: ModelConfig) -> Layout:
    """Return the layout whose detail the model has."""
    options = config.attn_config
    if options.qk_gn:
        return QWEN3
    if config.no_bias and options.qkv_bias:
        return QWEN2
    return LLAMA if options.sliding_window_size < 0 else MISTRAL
