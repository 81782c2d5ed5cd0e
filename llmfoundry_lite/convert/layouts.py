"""The Hugging Face layouts: what each can express, its config.json, and the names of its tensors.

A run's model is exported in one of the six, which its configuration decides (`layout_of`). MPT is read here, too; a
companion reads the others.

GPT-2: transformers' `GPT2LMHeadModel`, for models with learned positions or none. Its biases and positions travel as
zeros where the model has none.

MPT: transformers' `MptForCausalLM`, for models with ALiBi; and the folders that LLM Foundry writes for its own code.
Both say model_type mpt and use our tensors' names. transformers' model fixes or ignores most options (read at 5.23:
modeling_mpt.py), LLM Foundry's has them all; so more can be read than written.

Llama and three near to it, for models with RoPE, RMSNorm and gated feed-forward layers. Mistral has a sliding window,
Qwen2 biases of q, k and v alone, Qwen3 norms of each head of q and of k. Read at transformers 5.23: modeling_llama.py,
modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
"""

import json
from collections.abc import Callable
from typing import Any

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, FFNActivation, ModelConfig, RopeScaling
from llmfoundry_lite.convert.layout import (
    Field,
    HFConfig,
    Layout,
    Options,
    Readable,
    Source,
    State,
    Values,
    activation_name,
    attention_types,
    check_values,
    keys,
    needed,
    plain_attention,
    qkv_names,
)
from llmfoundry_lite.errors import ExportError

# ------------------------------------------------------------------------------------------------------------- GPT-2


def gpt2_can_be(config: ModelConfig) -> Options:
    return {
        **plain_attention(config),
        "attn_config.clip_qkv": (None,),
        # 1.0 is scale_attn_weights: false, which transformers 5 heeds, and 4 only with attn_implementation="eager".
        "attn_config.softmax_scale": (None, config.head_dim**-0.5, 1.0),
        "attn_config.attn_type": attention_types(config),
        "ffn_config.ffn_type": ("mptmlp",),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "logit_scale": (None,),
    }


GPT2_FIELDS: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": Field("d_model"),
    "n_head": Field("n_heads"),
    "n_layer": Field("n_layers"),
    "n_inner": lambda config: config.ffn_dim,
    "n_positions": Field("max_seq_len"),
    "vocab_size": Field("vocab_size"),
    "activation_function": activation_name,
    "layer_norm_epsilon": Field("norm_eps", 1e-5),
    "scale_attn_weights": lambda config: config.attn_config.softmax_scale != 1.0,
    "attn_pdrop": Field("attn_config.attn_pdrop", 0.1),
    "resid_pdrop": Field("resid_pdrop", 0.1),
    "embd_pdrop": Field("emb_pdrop", 0.1),
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": Field("tie_word_embeddings", True),
    "use_cache": True,
    # GPT-2 knows none of these; the first two say which of its tensors are zeros that we added.
    "no_bias": lambda config: config.no_bias,
    "learned_pos_emb": lambda config: config.uses_learned_positions,
    "norm_type": Field("norm_type", "low_precision_layernorm"),
    "attn_uses_sequence_id": Field("attn_config.attn_uses_sequence_id", False),
}
GPT2_BLOCK = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def gpt2_sources(config: ModelConfig) -> dict[str, Source]:
    found = {name: Source((name,)) for name in ("transformer.wte.weight", "transformer.wpe.weight")}
    for i in range(config.n_layers):
        for theirs, ours in GPT2_BLOCK.items():
            for part in ("weight", "bias"):
                names = qkv_names(f"transformer.blocks.{i}.{ours}.{part}", config)
                is_conv1d = part == "weight" and not theirs.startswith("ln")
                found[f"transformer.h.{i}.{theirs}.{part}"] = Source(names, is_transposed=is_conv1d)
    found |= {f"transformer.ln_f.{part}": Source((f"transformer.norm_f.{part}",)) for part in ("weight", "bias")}
    return found


GPT2 = Layout(
    title="GPT-2, the layout without ALiBi and RoPE",
    can_be=gpt2_can_be,
    fields=GPT2_FIELDS,
    sources=gpt2_sources,
)

# --------------------------------------------------------------------------------------------------------------- MPT


def mpt_can_be(config: ModelConfig) -> Options:
    has_width = config.ffn_config.ffn_hidden_size is not None
    return {
        **TRANSFORMERS_MUST_BE,
        **plain_attention(config),
        "attn_config.attn_type": attention_types(config),
        "expansion_ratio": (config.expansion_ratio if has_width else 4,),
        "ffn_config.ffn_hidden_size": (None, 4 * config.d_model),
    }


MPT_FIELDS: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "model_type": "mpt",
    "d_model": Field("d_model"),
    "n_heads": Field("n_heads"),
    "n_layers": Field("n_layers"),
    "expansion_ratio": 4,
    "max_seq_len": Field("max_seq_len"),
    "vocab_size": Field("vocab_size"),
    "layer_norm_epsilon": lambda config: config.norm_eps,
    "norm_type": Field("norm_type", "low_precision_layernorm"),
    "learned_pos_emb": Field("learned_pos_emb", True),
    "no_bias": True,
    "logit_scale": None,
    "attn_config.attn_type": "multihead_attention",
    "attn_config.attn_impl": "torch",
    "attn_config.attn_pdrop": 0,
    "attn_config.alibi": True,
    "attn_config.alibi_bias_max": Field("attn_config.alibi_bias_max", 8),
    "attn_config.clip_qkv": Field("attn_config.clip_qkv", None),
    "attn_config.softmax_scale": Field("attn_config.softmax_scale", None),
    "attn_config.attn_uses_sequence_id": Field("attn_config.attn_uses_sequence_id", False),
    "attn_config.qk_ln": False,
    "attn_config.prefix_lm": False,
    "tie_word_embeddings": Field("tie_word_embeddings", True),
    "use_cache": True,
}
MPT_READ = {
    "expansion_ratio": 4,
    "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
    "embedding_fraction": 1.0,
    "logit_scale": None,
    "attn_config.attn_type": "multihead_attention",
    "attn_config.attn_pdrop": 0.0,
    "attn_config.fused_qkv": True,
    "attn_config.qk_ln": False,
    "attn_config.qk_gn": False,
    "attn_config.norm_type": "low_precision_layernorm",
    "attn_config.norm_eps": 1e-5,
    "attn_config.sliding_window_size": -1,
    "ffn_config.ffn_type": "mptmlp",
    "ffn_config.ffn_hidden_size": None,
}
"""Key, theirs and ours -> LLM Foundry's default: what it has and transformers has not."""
MPT_MUST_BE: Options = {
    "architectures": (None, ["MptForCausalLM"], ["MPTForCausalLM"]),
    "attn_config.attn_type": ("multihead_attention", "grouped_query_attention", "multiquery_attention"),
    "attn_config.prefix_lm": (False,),
    "attn_config.attn_logit_softcapping": (None,),
    "attn_config.attn_temperature_tuning.attn_scale": (0.0,),
    "attn_config.kv_dim": (None,),
    "attn_config.nope": (False,),
    "attn_config.norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "ffn_config.ffn_type": ("mptmlp", "mptglu"),
    "ffn_config.ffn_act_fn.name": ("gelu", "quick_gelu", "relu", "silu"),
    "norm_type": ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"),
    "final_logit_softcapping": (None,),
    "residual_modification": (None,),
    "block_overrides": (None,),
}
TRANSFORMERS_MUST_BE: Options = {
    "attn_config.alibi": (True,),
    "attn_config.alibi_bias_max": (8,),
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.rope": (False,),
    "attn_config.qk_ln": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.sliding_window_size": (-1,),
    "ffn_config.ffn_type": ("mptmlp",),
    "ffn_config.ffn_act_fn.name": ("gelu",),
    "ffn_config.ffn_act_fn.approximate": ("none",),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "no_bias": (True,),
    "logit_scale": (None,),
}
"""The only values that transformers' own MPT computes with, whatever else its config.json says."""
MPT_ROPE_MUST_BE: dict[str, Options] = {
    "hf": {"attn_config.rope_hf_config.type": ("no_scaling", "linear", "dynamic", "llama3")},
    "dail": {
        "attn_config.rope_dail_config.type": ("original",),
        "attn_config.rope_dail_config.pos_idx_in_fp32": (True,),
    },
}


def mpt_sources(config: ModelConfig) -> dict[str, Source]:
    modules = ["norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"]
    names = ["transformer.wte.weight"]
    names += [f"transformer.blocks.{i}.{module}.weight" for i in range(config.n_layers) for module in modules]
    return {name: Source(qkv_names(name, config)) for name in [*names, "transformer.norm_f.weight"]}


def read_mpt(values: Values, hf_config: HFConfig, _state: State, where: str) -> None:
    is_transformers = hf_config.get("architectures") == ["MptForCausalLM"]
    if is_transformers:
        check_values(hf_config, TRANSFORMERS_MUST_BE, where)
    check_code(hf_config, where)
    values["no_bias"] = no_bias = hf_config.get("no_bias", is_transformers)
    same = {"attention_bias": (None, not no_bias), "head_dim": (None, values["d_model"] // values["n_heads"])}
    check_values(hf_config, same, where)
    default_eps = 1e-5 if is_transformers else hf_config.get("norm_eps", 1e-5)  # transformers knows no norm_eps
    values["norm_eps"] = hf_config.get("layer_norm_epsilon", default_eps)
    check_values(hf_config, {"norm_eps": (values["norm_eps"],)}, where)
    activation = (hf_config.get("ffn_config") or {}).get("ffn_act_fn") or {}
    values["ffn_config.ffn_act_fn"] = FFNActivation(
        name=activation.get("name", "gelu"), approximate=activation.get("approximate", "none")
    )
    attention = hf_config.get("attn_config") or {}
    values["attn_config.alibi"] = attention.get("alibi", is_transformers)
    if values["attn_config.attn_type"] == "grouped_query_attention":
        values["attn_config.kv_n_heads"] = needed(attention, "kv_n_heads", f"{where}: attn_config")
    if attention.get("rope", False):
        impl = attention.get("rope_impl", "dail")
        rope_must_be = MPT_ROPE_MUST_BE.get(impl, {})
        check_values(hf_config, {"attn_config.rope_impl": ("dail", "hf"), **rope_must_be}, where)
        # LLM Foundry's dail knows no scaling, whatever stands there.
        scaling = (attention.get("rope_hf_config") or {}) if impl == "hf" else {}
        scaling = RopeScaling(**{key: value for key, value in scaling.items() if value is not None})
        values |= {"attn_config.rope": True, "attn_config.rope_impl": impl, "attn_config.rope_hf_config": scaling}
        values["attn_config.rope_theta"] = attention.get("rope_theta", 10_000)


def check_code(hf_config: HFConfig, where: str) -> None:
    """Raise ExportError for a folder that brings code, except LLM Foundry's, which is known and not run."""
    theirs = ("MPTConfig", "MPTForCausalLM")
    found = hf_config.get("auto_map") or {}
    if not isinstance(found, dict):
        raise ExportError(f"{where}: auto_map is {json.dumps(found)[:60]} in config.json; expected an object")
    for kind, name in found.items():
        if kind.startswith("AutoTokenizer") or str(name).rpartition(".")[2] in theirs:
            continue
        raise ExportError(
            f"{where}: auto_map.{kind} is {name!r} in config.json; a folder's own code is not run, and only LLM "
            f"Foundry's {' and '.join(theirs)} are known here"
        )


MPT = Readable(
    title="MPT, the layout for ALiBi models",
    can_be=mpt_can_be,
    fields=MPT_FIELDS,
    also_read={"layer_norm_epsilon": Field("norm_eps", 1e-5)}
    | {key: Field(key, default) for key, default in MPT_READ.items()},
    must_be=MPT_MUST_BE,
    sources=mpt_sources,
    read_others=read_mpt,
    also_known=keys(
        "head_dim attention_bias norm_eps residual_coeff auto_map",
        "attn_config.kv_n_heads attn_config.rope attn_config.rope_theta attn_config.rope_impl",
        *(f"attn_config.rope_hf_config.{key}" for key in ("type", "factor", *LLAMA3_KEYS)),
        *(f"attn_config.rope_dail_config.{key}" for key in ("type", "pos_idx_in_fp32", "xpos_scale_base")),
        "attn_config.attn_temperature_tuning.floor_scale",
        "ffn_config.ffn_act_fn.approximate ffn_config.ffn_act_fn.inplace",
        # How weights begin, and how LLM Foundry computes.
        "init_config init_device param_init_fn init_std fc_type use_pad_tok_in_ffn verbose loss_fn name",
        "attn_config.fc_type ffn_config.fc_type",
    ),
)

# -------------------------------------------------------------------------------------- what all with RoPE have


def rope_can_be(config: ModelConfig) -> Options:
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


ROPE_FIELDS: dict[str, Any] = {
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
LLAMA_BLOCK = {
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}


def rope_sources(config: ModelConfig) -> dict[str, Source]:
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
            for their_module, our_module in LLAMA_BLOCK.items() if part == "weight" or not config.no_bias else ():
                found[f"{theirs}.{their_module}.{part}"] = Source((f"{ours}.{our_module}.{part}",))
        for letter in "qk" if config.attn_config.qk_gn else "":
            found[f"{theirs}.self_attn.{letter}_norm.weight"] = Source((f"{ours}.attn.{letter}_ln.weight",))
        found[f"{theirs}.post_attention_layernorm.weight"] = Source((f"{ours}.norm_2.weight",))
    return found | {"model.norm.weight": Source(("transformer.norm_f.weight",))}


def rope_layout(
    name: str,
    title: str,
    can_be: Callable[[ModelConfig], Options],
    sources: Callable[[ModelConfig], dict[str, Source]] = rope_sources,
    **fields: Any,
) -> Layout:
    """Return the layout of transformers' `<name>ForCausalLM`."""
    classes = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    return Layout(title=title, can_be=can_be, fields={**classes, **ROPE_FIELDS, **fields}, sources=sources)


# -------------------------------------------------------------------------------- Llama, Mistral, Qwen2 and Qwen3


def llama_sources(config: ModelConfig) -> dict[str, Source]:
    """Name the sources of Llama's tensors. With biases of q, k and v it has one of the output, which may be zeros."""
    found = rope_sources(config)
    if config.no_bias and config.has_qkv_bias:
        for i in range(config.n_layers):
            name = f"transformer.blocks.{i}.attn.out_proj.bias"
            found[f"model.layers.{i}.self_attn.o_proj.bias"] = Source((name,))
    return found


LLAMA = rope_layout(
    "Llama",
    "Llama, the layout for RoPE",
    rope_can_be,
    llama_sources,
    attention_bias=lambda config: config.has_qkv_bias,
    mlp_bias=lambda config: not config.no_bias,
)
MISTRAL = rope_layout(
    "Mistral",
    "Mistral, the layout for RoPE with a sliding window",
    lambda config: {
        **rope_can_be(config),
        "no_bias": (True,),
        "attn_config.sliding_window_size": (config.attn_config.sliding_window_size,),
    },
    sliding_window=lambda config: config.attn_config.sliding_window_size + 1 or None,  # a token and those before
)
QWEN2 = rope_layout(
    "Qwen2",
    "Qwen2, the layout for RoPE with biases of q, k and v alone",
    lambda config: {**rope_can_be(config), "attn_config.qkv_bias": (True,)},
    use_sliding_window=False,
)
QWEN3 = rope_layout(
    "Qwen3",
    "Qwen3, the layout for RoPE with norms of each head of q and k",
    lambda config: {
        **rope_can_be(config),
        "no_bias": (True,),
        "attn_config.qk_gn": (True,),
        "attn_config.norm_type": (config.norm_type,),
        "attn_config.norm_eps": (config.norm_eps,),
    },
    attention_bias=False,
    use_sliding_window=False,
)


def layout_of(config: ModelConfig) -> Layout:
    """Return the layout that a model's positions, and the details of its attention, ask for."""
    options = config.attn_config
    if options.alibi:
        return MPT
    if not options.rope:
        return GPT2
    if options.qk_gn:
        return QWEN3
    if config.no_bias and options.qkv_bias:
        return QWEN2
    return LLAMA if options.sliding_window_size < 0 else MISTRAL
