"""MPT: transformers' `MptForCausalLM`, for models with ALiBi; and the folders that LLM Foundry writes for its own code.

Both say model_type mpt and use our tensors' names. transformers' model fixes or ignores most options (read at 5.23:
modeling_mpt.py), LLM Foundry's has them all; so more can be read than written.
"""

from collections.abc import Mapping
from typing import Any

import torch

from llmfoundry_lite.config.model_schema import (
    LLAMA3_KEYS,
    AttentionConfig,
    FFNActivation,
    FFNConfig,
    ModelConfig,
    RopeScaling,
)
from llmfoundry_lite.convert.layout import (
    HFConfig,
    Layout,
    Options,
    Source,
    attention_types,
    check_values,
    keys,
    needed,
    qkv_names,
)
from llmfoundry_lite.errors import ExportError


def can_be(config: ModelConfig) -> Options:
    has_width = config.ffn_config.ffn_hidden_size is not None
    return {
        "no_bias": (True,),
        "attn_config.alibi_bias_max": (8,),
        "attn_config.rope": (False,),
        "attn_config.sliding_window_size": (-1,),
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.attn_type": attention_types(config),
        "expansion_ratio": (config.expansion_ratio if has_width else 4,),
        "ffn_config.ffn_hidden_size": (None, 4 * config.d_model),
        "ffn_config.ffn_type": ("mptmlp",),
        "ffn_config.ffn_act_fn.name": ("gelu",),
        "ffn_config.ffn_act_fn.approximate": ("none",),
        "norm_type": ("low_precision_layernorm", "layernorm"),
        "logit_scale": (None,),
    }


def describe(config: ModelConfig) -> HFConfig:
    attention = config.attn_config
    return {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "d_model": config.d_model,
        "n_heads": config.n_heads,
        "n_layers": config.n_layers,
        "expansion_ratio": 4,
        "max_seq_len": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.norm_eps,
        "norm_type": config.norm_type,
        "learned_pos_emb": config.learned_pos_emb,
        "no_bias": True,
        "logit_scale": None,
        "attn_config": {
            "attn_type": "multihead_attention",
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "alibi": True,
            "alibi_bias_max": attention.alibi_bias_max,
            "clip_qkv": attention.clip_qkv,
            "softmax_scale": attention.softmax_scale,
            "attn_uses_sequence_id": attention.attn_uses_sequence_id,
            "qk_ln": False,
            "prefix_lm": False,
        },
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
    }


def sources(config: ModelConfig) -> dict[str, Source]:
    modules = ["norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"]
    names = ["transformer.wte.weight"]
    names += [f"transformer.blocks.{i}.{module}.weight" for i in range(config.n_layers) for module in modules]
    names += ["transformer.norm_f.weight"]
    names += [] if config.tie_word_embeddings else ["lm_head.weight"]
    return {name: Source(qkv_names(name, config)) for name in names}


# ------------------------------------------------------------------------------------------------------- reading


MUST_BE: Options = {
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
"""What transformers' own MPT computes, whatever else its config.json says."""
ROPE_MUST_BE: dict[str, Options] = {
    "hf": {"attn_config.rope_hf_config.type": ("no_scaling", "linear", "dynamic", "llama3")},
    "dail": {
        "attn_config.rope_dail_config.type": ("original",),
        "attn_config.rope_dail_config.pos_idx_in_fp32": (True,),
    },
}


def read_config(hf_config: HFConfig, _state: Mapping[str, torch.Tensor], where: str) -> ModelConfig:
    check_values(hf_config, MUST_BE, where)
    is_transformers = hf_config.get("architectures") == ["MptForCausalLM"]
    if is_transformers:
        check_values(hf_config, TRANSFORMERS_MUST_BE, where)
    _check_code(hf_config, where)
    d_model, n_heads = needed(hf_config, "d_model", where), needed(hf_config, "n_heads", where)
    no_bias = hf_config.get("no_bias", is_transformers)
    same = {"attention_bias": (None, not no_bias), "head_dim": (None, d_model // n_heads)}
    check_values(hf_config, same, where)
    default_eps = 1e-5 if is_transformers else hf_config.get("norm_eps", 1e-5)  # transformers knows no norm_eps
    norm_eps = hf_config.get("layer_norm_epsilon", default_eps)
    check_values(hf_config, {"norm_eps": (norm_eps,)}, where)
    ffn = hf_config.get("ffn_config") or {}
    return ModelConfig(
        d_model=d_model,
        n_heads=n_heads,
        n_layers=needed(hf_config, "n_layers", where),
        expansion_ratio=hf_config.get("expansion_ratio", 4),
        max_seq_len=needed(hf_config, "max_seq_len", where),
        vocab_size=needed(hf_config, "vocab_size", where),
        resid_pdrop=hf_config.get("resid_pdrop", 0.0),
        emb_pdrop=hf_config.get("emb_pdrop", 0.0),
        learned_pos_emb=hf_config.get("learned_pos_emb", True),
        embedding_fraction=hf_config.get("embedding_fraction", 1.0),
        attn_config=_read_attention(hf_config, where, has_alibi=is_transformers),
        ffn_config=FFNConfig(
            ffn_type=ffn.get("ffn_type", "mptmlp"),
            ffn_act_fn=_read_activation(ffn.get("ffn_act_fn") or {}),
            ffn_hidden_size=ffn.get("ffn_hidden_size"),
        ),
        logit_scale=hf_config.get("logit_scale"),
        no_bias=no_bias,
        norm_type=hf_config.get("norm_type", "low_precision_layernorm"),
        norm_eps=norm_eps,
        tie_word_embeddings=hf_config.get("tie_word_embeddings", True),
    )


def _check_code(hf_config: HFConfig, where: str) -> None:
    """LLM Foundry's folders name the code that they bring; what it computes is known, and it is not run."""
    theirs = ("MPTConfig", "MPTForCausalLM")
    for kind, name in (hf_config.get("auto_map") or {}).items():
        if kind.startswith("AutoTokenizer") or str(name).rpartition(".")[2] in theirs:
            continue
        raise ExportError(
            f"{where}: auto_map.{kind} is {name!r} in config.json; a folder's own code is not run, and only LLM "
            f"Foundry's {' and '.join(theirs)} are known here"
        )


def _read_attention(hf_config: HFConfig, where: str, *, has_alibi: bool) -> AttentionConfig:
    """`has_alibi`: unless config.json says otherwise."""
    attention = hf_config.get("attn_config") or {}
    attn_type = attention.get("attn_type", "multihead_attention")
    is_grouped = attn_type == "grouped_query_attention"
    rope = {}
    if attention.get("rope", False):
        impl = attention.get("rope_impl", "dail")
        check_values(hf_config, {"attn_config.rope_impl": ("dail", "hf"), **ROPE_MUST_BE.get(impl, {})}, where)
        # LLM Foundry's dail knows no scaling, whatever stands there.
        scaling = (attention.get("rope_hf_config") or {}) if impl == "hf" else {}
        rope = {
            "rope": True,
            "rope_theta": attention.get("rope_theta", 10_000),
            "rope_impl": impl,
            "rope_hf_config": RopeScaling(**{key: value for key, value in scaling.items() if value is not None}),
        }
    return AttentionConfig(
        attn_type=attn_type,
        kv_n_heads=needed(attention, "kv_n_heads", f"{where}: attn_config") if is_grouped else None,
        attn_pdrop=attention.get("attn_pdrop", 0.0),
        fused_qkv=attention.get("fused_qkv", True),
        qk_ln=attention.get("qk_ln", False),
        qk_gn=attention.get("qk_gn", False),
        norm_type=attention.get("norm_type", "low_precision_layernorm"),
        norm_eps=attention.get("norm_eps", 1e-5),
        clip_qkv=attention.get("clip_qkv"),
        softmax_scale=attention.get("softmax_scale"),
        sliding_window_size=attention.get("sliding_window_size", -1),
        attn_uses_sequence_id=attention.get("attn_uses_sequence_id", False),
        alibi=attention.get("alibi", has_alibi),
        alibi_bias_max=attention.get("alibi_bias_max", 8),
        **rope,
    )


def _read_activation(activation: dict[str, Any]) -> FFNActivation:
    return FFNActivation(name=activation.get("name", "gelu"), approximate=activation.get("approximate", "none"))


LAYOUT = Layout(
    title="MPT, the layout for ALiBi models",
    can_be=can_be,
    describe=describe,
    sources=sources,
    read_config=read_config,
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
