"""The Hugging Face layouts without RoPE: what each can express, its config.json, and the names of its tensors.

GPT-2: transformers' `GPT2LMHeadModel`, for models with learned positions or none. Its biases and positions travel as
zeros where the model has none.

MPT: transformers' `MptForCausalLM`, for models with ALiBi; and the folders that LLM Foundry writes for its own code.
Both say model_type mpt and use our tensors' names. transformers' model fixes or ignores most options (read at 5.23:
modeling_mpt.py), LLM Foundry's has them all; so more can be read than written.
"""

from typing import Any

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, FFNActivation, ModelConfig, RopeScaling
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
    attention_types,
    check_values,
    ffn_values,
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
GPT2_MUST_BE: Options = {
    "architectures": (None, ["GPT2LMHeadModel"], ["GPT2Model"]),
    # What config.json leaves out is transformers' default.
    "activation_function": ("gelu_new", *(name for name in ACTIVATIONS if name != "gelu_new")),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
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


def read_gpt2(values: Values, hf_config: HFConfig, state: State, where: str) -> None:
    wpe = state.get("transformer.wpe.weight")
    # Believe the two marks of our export only while the zeros they speak of are still zeros.
    values["no_bias"] = bool(hf_config.get("no_bias")) and not any(
        tensor.any() for name, tensor in state.items() if name.endswith(".bias")
    )
    values["learned_pos_emb"] = hf_config.get("learned_pos_emb", True) or (wpe is not None and bool(wpe.any()))
    values["attn_config.softmax_scale"] = None if hf_config.get("scale_attn_weights", True) else 1.0
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("activation_function", "gelu_new")]
    values |= ffn_values(hf_config.get("n_inner") or 4 * values["d_model"], values["d_model"])


GPT2 = Layout(
    title="GPT-2, the layout without ALiBi and RoPE",
    can_be=gpt2_can_be,
    fields=GPT2_FIELDS,
    must_be=GPT2_MUST_BE,
    sources=gpt2_sources,
    read_others=read_gpt2,
    known={
        "": keys(
            "n_embd n_head n_layer n_inner n_positions n_ctx vocab_size activation_function layer_norm_epsilon",
            "scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn",
            "attn_pdrop resid_pdrop embd_pdrop no_bias learned_pos_emb norm_type attn_uses_sequence_id",
            "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
            "predict_special_tokens",
        )
    },
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)

# --------------------------------------------------------------------------------------------------------------- MPT


def mpt_can_be(config: ModelConfig) -> Options:
    has_width = config.ffn_config.ffn_hidden_size is not None
    return {
        "no_bias": (True,),
        "attn_config.alibi_bias_max": (8,),
        "attn_config.rope": (False,),
        **plain_attention(config),
        "attn_config.attn_type": attention_types(config),
        "expansion_ratio": (config.expansion_ratio if has_width else 4,),
        "ffn_config.ffn_hidden_size": (None, 4 * config.d_model),
        "ffn_config.ffn_type": ("mptmlp",),
        "ffn_config.ffn_act_fn.name": ("gelu",),
        "ffn_config.ffn_act_fn.approximate": ("none",),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "logit_scale": (None,),
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
    for kind, name in (hf_config.get("auto_map") or {}).items():
        if kind.startswith("AutoTokenizer") or str(name).rpartition(".")[2] in theirs:
            continue
        raise ExportError(
            f"{where}: auto_map.{kind} is {name!r} in config.json; a folder's own code is not run, and only LLM "
            f"Foundry's {' and '.join(theirs)} are known here"
        )


MPT = Layout(
    title="MPT, the layout for ALiBi models",
    can_be=mpt_can_be,
    fields=MPT_FIELDS,
    also_read={key: Field(key, default) for key, default in MPT_READ.items()},
    must_be=MPT_MUST_BE,
    sources=mpt_sources,
    read_others=read_mpt,
    known={
        "": keys(
            "d_model n_heads n_layers expansion_ratio max_seq_len vocab_size head_dim attn_config ffn_config",
            "learned_pos_emb embedding_fraction logit_scale no_bias attention_bias norm_type norm_eps",
            "layer_norm_epsilon resid_pdrop emb_pdrop final_logit_softcapping residual_modification residual_coeff",
            "block_overrides auto_map",
            # How weights begin, and how LLM Foundry computes.
            "init_config init_device param_init_fn init_std fc_type use_pad_tok_in_ffn verbose loss_fn name",
        ),
        "attn_config": keys(
            "attn_type attn_impl attn_pdrop kv_n_heads kv_dim fused_qkv qk_ln qk_gn clip_qkv softmax_scale",
            "sliding_window_size attn_uses_sequence_id attn_logit_softcapping attn_temperature_tuning",
            "alibi alibi_bias_max rope rope_theta rope_impl rope_dail_config rope_hf_config nope prefix_lm fc_type",
            "norm_type norm_eps",
        ),
        "attn_config.rope_hf_config": keys("type factor", *LLAMA3_KEYS),
        "attn_config.rope_dail_config": keys("type pos_idx_in_fp32 xpos_scale_base"),
        "attn_config.attn_temperature_tuning": keys("attn_scale floor_scale"),
        "ffn_config": keys("ffn_type ffn_act_fn ffn_hidden_size fc_type"),
        "ffn_config.ffn_act_fn": keys("name approximate inplace"),
    },
)
