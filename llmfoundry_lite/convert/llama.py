"""Llama: transformers' `LlamaForCausalLM`, for models with RoPE, RMSNorm and gated feed-forward layers."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, AttentionConfig, ModelConfig, RopeScaling
from llmfoundry_lite.convert.layout import (
    ACTIVATIONS,
    HFConfig,
    Layout,
    Options,
    Source,
    activation_name,
    check_values,
    ffn_options,
    keys,
    needed,
)
from llmfoundry_lite.errors import ExportError

SCALINGS = {"no_scaling": "default", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3"}
"""Our name -> transformers' rope_type."""


def can_be(config: ModelConfig) -> Options:
    return {
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.clip_qkv": (None,),
        "attn_config.softmax_scale": (None, config.head_dim**-0.5),
        "attn_config.sliding_window_size": (-1,),
        "ffn_config.ffn_type": ("mptglu",),
        "norm_type": ("low_precision_rmsnorm", "rmsnorm"),
        "logit_scale": (None,),
    }


def describe(config: ModelConfig) -> HFConfig:
    options = config.attn_config
    scaling, theta = options.rope_hf_config, float(options.rope_theta)
    if scaling.type == "ntk":
        # It is nothing but another theta (`attention.build_rotation`), which needs no name.
        theta, scaling = theta * scaling.factor ** (config.head_dim / max(config.head_dim - 2, 1)), RopeScaling()
    rope_type: dict[str, Any] = {"rope_type": SCALINGS[scaling.type]}
    if scaling.type != "no_scaling":
        rope_type["factor"] = scaling.factor
    if scaling.type == "llama3":
        rope_type |= {key: getattr(scaling, key) for key in LLAMA3_KEYS}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.n_layers,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "hidden_act": activation_name(config),
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {**rope_type, "rope_theta": theta},
        # The same as transformers 4 reads it.
        "rope_theta": theta,
        "rope_scaling": None if scaling.type == "no_scaling" else rope_type,
        "attention_bias": not config.no_bias,
        "mlp_bias": not config.no_bias,
        "attention_dropout": options.attn_pdrop,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        # Llama knows neither: its norm is in fp32, and a text is one document.
        "norm_type": config.norm_type,
        "attn_uses_sequence_id": options.attn_uses_sequence_id,
    }


def sources(config: ModelConfig) -> dict[str, Source]:
    q_end, k_end = config.d_model, config.d_model + config.num_kv_heads * config.head_dim
    rows = {"q": (0, q_end), "k": (q_end, k_end), "v": (k_end, 2 * k_end - q_end)}
    modules = {
        "self_attn.o_proj": "attn.out_proj",
        "mlp.gate_proj": "ffn.gate_proj",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
    }
    parts = ("weight",) if config.no_bias else ("weight", "bias")
    found = {"model.embed_tokens.weight": Source(("transformer.wte.weight",))}
    for i in range(config.n_layers):
        theirs, ours = f"model.layers.{i}", f"transformer.blocks.{i}"
        found[f"{theirs}.input_layernorm.weight"] = Source((f"{ours}.norm_1.weight",))
        for part in parts:
            for letter in "qkv":
                name = f"{theirs}.self_attn.{letter}_proj.{part}"
                if config.attn_config.fused_qkv:
                    found[name] = Source((f"{ours}.attn.Wqkv.{part}",), rows[letter])
                else:
                    found[name] = Source((f"{ours}.attn.W{letter}.{part}",))
            for their_module, our_module in modules.items():
                found[f"{theirs}.{their_module}.{part}"] = Source((f"{ours}.{our_module}.{part}",))
        found[f"{theirs}.post_attention_layernorm.weight"] = Source((f"{ours}.norm_2.weight",))
    found["model.norm.weight"] = Source(("transformer.norm_f.weight",))
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = Source(("lm_head.weight",))
    return found


MUST_BE: Options = {
    "architectures": (None, ["LlamaForCausalLM"], ["LlamaModel"]),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "hidden_act": ("silu", *(name for name in ACTIVATIONS if name != "silu")),
    "norm_type": ("rmsnorm", "low_precision_rmsnorm"),
}
ROPE_KEYS = keys("rope_type type factor rope_theta partial_rotary_factor", *LLAMA3_KEYS)
ROPE_MUST_BE: Options = {"rope_type": tuple(SCALINGS.values()), "partial_rotary_factor": (1.0, None)}


def read_config(hf_config: HFConfig, _state: Mapping[str, torch.Tensor], where: str) -> ModelConfig:
    check_values(hf_config, MUST_BE, where)
    d_model, n_heads = needed(hf_config, "hidden_size", where), needed(hf_config, "num_attention_heads", where)
    has_bias = hf_config.get("mlp_bias", False)
    same = {"attention_bias": (has_bias,), "head_dim": (d_model // n_heads, None)}
    check_values({"attention_bias": False, **hf_config}, same, where)
    num_kv_heads = hf_config.get("num_key_value_heads") or n_heads
    kinds = {n_heads: "multihead_attention", 1: "multiquery_attention"}
    attn_type = kinds.get(num_kv_heads, "grouped_query_attention")
    activation = ACTIVATIONS[hf_config.get("hidden_act", "silu")]
    ffn_dim = needed(hf_config, "intermediate_size", where)
    return ModelConfig(
        d_model=d_model,
        n_heads=n_heads,
        n_layers=needed(hf_config, "num_hidden_layers", where),
        **ffn_options(ffn_dim, d_model, ffn_type="mptglu", ffn_act_fn=activation),
        max_seq_len=needed(hf_config, "max_position_embeddings", where),
        vocab_size=needed(hf_config, "vocab_size", where),
        attn_config=AttentionConfig(
            attn_type=attn_type,
            kv_n_heads=num_kv_heads if attn_type == "grouped_query_attention" else None,
            attn_pdrop=hf_config.get("attention_dropout", 0.0),
            attn_uses_sequence_id=hf_config.get("attn_uses_sequence_id", False),
            rope=True,
            **_read_rope(hf_config, where),
        ),
        no_bias=not has_bias,
        norm_type=hf_config.get("norm_type", "rmsnorm"),
        norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=hf_config.get("tie_word_embeddings", False),
    )


def _read_rope(hf_config: HFConfig, where: str) -> dict[str, Any]:
    """From rope_parameters as transformers 5 writes them, or from rope_theta and rope_scaling."""
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
        "rope_impl": "dail" if ours == "no_scaling" else "hf",
        "rope_theta": rope.get("rope_theta", hf_config.get("rope_theta", 10_000)),
        "rope_hf_config": RopeScaling(type=ours, **{name: rope[name] for name in expected}),
    }


LAYOUT = Layout(
    title="Llama, the layout for RoPE",
    can_be=can_be,
    describe=describe,
    sources=sources,
    read_config=read_config,
    known={
        "": keys(
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim",
            "max_position_embeddings vocab_size hidden_act rms_norm_eps rope_parameters rope_scaling rope_theta",
            "attention_bias mlp_bias attention_dropout norm_type attn_uses_sequence_id partial_rotary_factor",
            # How transformers computes, and marks of who wrote the file.
            "pretraining_tp rope_interleaved is_llama_config",
        ),
        "rope_parameters": ROPE_KEYS,
        "rope_scaling": ROPE_KEYS,
    },
    prefix="model.",
    buffers=(".rotary_emb.inv_freq",),
)
