"""Readers of Hugging Face layouts that other families have: folders of GPT-2, Llama, Mistral, Qwen2 and Qwen3.

The core writes these layouts for models of its own (`llmfoundry_lite/convert/hf_formats.py`). Here is what a folder of
others' may say besides, and what of it changes what a model computes. Read at transformers 5.23: modeling_gpt2.py,
modeling_llama.py, modeling_mistral.py, modeling_qwen2.py, modeling_qwen3.py.
"""

import json
from typing import Any

from llmfoundry_lite.config.model_schema import LLAMA3_KEYS, RopeScaling
from llmfoundry_lite.convert import hf_formats
from llmfoundry_lite.convert.hf_format import (
    ACTIVATIONS,
    HFConfig,
    HFFormat,
    Options,
    ReadableHFFormat,
    State,
    Values,
    check_values,
    read_positive_integer,
    split_keys,
)
from llmfoundry_lite.convert.hf_formats import ROPE_TYPES
from llmfoundry_lite.errors import ExportError


def find_format(kind: str) -> ReadableHFFormat:
    """Return the layout of a config.json's model_type."""
    return LAYOUTS[kind]


def readable(layout: HFFormat, **parts: Any) -> ReadableHFFormat:
    """Return a layout of the core's with what reads it."""
    written = {
        "title": layout.title,
        "expressible_options": layout.expressible_options,
        "fields": layout.fields,
        "tensor_sources": layout.tensor_sources,
    }
    return ReadableHFFormat(**written, **parts)


def given_or(hf_config: HFConfig, key: str, default: int, where: str) -> int:
    """Return a whole number above 0, or `default` for none. Raises ExportError."""
    return default if hf_config.get(key) is None else read_positive_integer(hf_config, key, where)


def ffn_values(ffn_dim: int, d_model: int) -> Values:
    """Return the width as a ratio where that is a short number, as in a YAML; otherwise as a width."""
    ratio = ffn_dim // d_model if ffn_dim % d_model == 0 else round(ffn_dim / d_model, 4)
    return {"expansion_ratio": ratio} if ratio * d_model == ffn_dim else {"ffn_config.ffn_hidden_size": ffn_dim}


# ------------------------------------------------------------------------------------------------------------- GPT-2


GPT2_MUST_BE: Options = {
    "architectures": (None, ["GPT2LMHeadModel"], ["GPT2Model"]),
    # What config.json leaves out is transformers' default.
    "activation_function": ("gelu_new", *(name for name in ACTIVATIONS if name != "gelu_new")),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}


def read_gpt2(values: Values, hf_config: HFConfig, state: State, where: str) -> Values:
    wpe = state.get("transformer.wpe.weight")
    # Believe the two marks of our export only while the zeros they speak of are still zeros.
    values["no_bias"] = bool(hf_config.get("no_bias")) and not any(
        tensor.any() for name, tensor in state.items() if name.endswith(".bias")
    )
    values["learned_pos_emb"] = hf_config.get("learned_pos_emb", True) or (wpe is not None and bool(wpe.any()))
    values["attn_config.softmax_scale"] = None if hf_config.get("scale_attn_weights", True) else 1.0
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("activation_function", "gelu_new")]
    values |= ffn_values(given_or(hf_config, "n_inner", 4 * values["d_model"], where), values["d_model"])
    return values


GPT2 = readable(
    hf_formats.GPT2,
    readable_values=GPT2_MUST_BE,
    read_other_values=read_gpt2,
    other_known_keys=split_keys(
        "n_ctx reorder_and_upcast_attn predict_special_tokens",
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
    ),
    tensor_prefix="transformer.",
    buffer_suffixes=(".attn.bias", ".attn.masked_bias"),
)

# -------------------------------------------------------------------------------------- what all with RoPE have


LLAMA_MUST_BE: Options = {
    "partial_rotary_factor": (1.0, None),
    "hidden_act": ("silu", *(name for name in ACTIVATIONS if name != "silu")),
    "norm_type": ("rmsnorm", "low_precision_rmsnorm"),
}
ROPE_KEYS = ("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", *LLAMA3_KEYS)
ROPE_MUST_BE: Options = {"rope_type": tuple(ROPE_TYPES.values()), "partial_rotary_factor": (1.0, None)}


def read_common(values: Values, hf_config: HFConfig, where: str) -> None:
    """Read what is no plain ConfigField. A wrong width that config.json leaves out shows in a tensor's shape."""
    d_model, n_heads = values["d_model"], values["n_heads"]
    head_dim = given_or(hf_config, "head_dim", d_model // n_heads, where)
    num_kv_heads = given_or(hf_config, "num_key_value_heads", n_heads, where)
    attn_type = {n_heads: "multihead_attention", 1: "multiquery_attention"}.get(num_kv_heads, "grouped_query_attention")
    values["attn_config.head_dim"] = None if head_dim * n_heads == d_model else head_dim
    values["attn_config.attn_type"] = attn_type
    values["attn_config.kv_n_heads"] = num_kv_heads if attn_type == "grouped_query_attention" else None
    values["no_bias"] = True
    values["ffn_config.ffn_type"] = "mptglu"
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("hidden_act", "silu")]
    values |= ffn_values(read_positive_integer(hf_config, "intermediate_size", where), d_model)
    values |= {"attn_config.rope": True} | read_rope(hf_config, where)


def read_rope(hf_config: HFConfig, where: str) -> Values:
    """Read rope_parameters as transformers 5 writes them, or rope_theta and rope_scaling. Raises ExportError."""
    key = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    found = hf_config.get(key) or {}
    if contrary := [name for name, value in (hf_config.get("rope_scaling") or {}).items() if found.get(name) != value]:
        raise ExportError(f"{where}: rope_parameters and rope_scaling differ in {contrary[0]} in config.json")
    rope = {"rope_type": found.get("type", "default"), **found}
    check_values({key: rope}, {f"{key}.{name}": values for name, values in ROPE_MUST_BE.items()}, where)
    ours = next(ours for ours, theirs in ROPE_TYPES.items() if theirs == rope["rope_type"])
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


def with_rope(layout: HFFormat, must_be: Options, *known: str, **parts: Any) -> ReadableHFFormat:
    """Return a layout of transformers' `<name>ForCausalLM` with what reads it."""
    name = layout.fields["architectures"][0].removesuffix("ForCausalLM")
    return readable(
        layout,
        readable_values={"architectures": (None, [f"{name}ForCausalLM"], [f"{name}Model"]), **LLAMA_MUST_BE, **must_be},
        other_known_keys=split_keys(
            *known, *(f"{block}.{key}" for block in ("rope_parameters", "rope_scaling") for key in ROPE_KEYS)
        ),
        tensor_prefix="model.",
        buffer_suffixes=(".rotary_emb.inv_freq",),
        **parts,
    )


# -------------------------------------------------------------------------------- Llama, Mistral, Qwen2 and Qwen3


BIASES = ("attention_bias", "mlp_bias")


def read_llama(values: Values, hf_config: HFConfig, state: State, where: str) -> Values:
    check_values(hf_config, dict.fromkeys(BIASES, (False, True)), where)
    has_biases = {key for key in BIASES if hf_config.get(key)}
    output_biases = [tensor for name, tensor in state.items() if name.endswith(".self_attn.o_proj.bias")]
    if has_biases == {"attention_bias"} and output_biases and not any(tensor.any() for tensor in output_biases):
        # Our export writes Qwen2's biases of q, k and v so where the tokenizer is not Qwen2's.
        values["attn_config.qkv_bias"] = True
        has_biases = set()
    if len(has_biases) == 1:
        (key,), (other,) = has_biases, set(BIASES) - has_biases
        raise ExportError(f"{where}: {key} is true in config.json and {other} is not; this model has both or neither")
    read_common(values, hf_config, where)
    values["no_bias"] = not has_biases
    return values


def read_mistral(values: Values, hf_config: HFConfig, _state: State, where: str) -> Values:
    read_common(values, hf_config, where)
    window = {"sliding_window": 4096, **hf_config}  # transformers' default, which no shape shows
    values["attn_config.sliding_window_size"] = given_or(window, "sliding_window", 0, where) - 1
    return values


QWEN_KEYS = "sliding_window max_window_layers layer_types"


def read_qwen(values: Values, hf_config: HFConfig, where: str) -> None:
    layer_types = (None, ["full_attention"] * values["n_layers"])
    check_values(hf_config, {"use_sliding_window": (False, None), "layer_types": layer_types}, where)
    read_common(values, hf_config, where)


def read_qwen2(values: Values, hf_config: HFConfig, _state: State, where: str) -> Values:
    read_qwen(values, hf_config, where)
    values["attn_config.qkv_bias"] = True
    return values


def read_qwen3(values: Values, hf_config: HFConfig, _state: State, where: str) -> Values:
    read_qwen(values, hf_config, where)
    values["attn_config.qk_gn"] = True
    values |= {f"attn_config.{key}": values[key] for key in ("norm_type", "norm_eps")}
    return values


LLAMA = with_rope(
    hf_formats.LLAMA,
    {"rope_interleaved": (False, None)},
    "pretraining_tp is_llama_config",  # how transformers computes, and a mark of who wrote the file
    read_other_values=read_llama,
)
MISTRAL = with_rope(hf_formats.MISTRAL, {}, read_other_values=read_mistral)
QWEN2 = with_rope(hf_formats.QWEN2, {"use_mrope": (False, None)}, QWEN_KEYS, read_other_values=read_qwen2)
QWEN3 = with_rope(hf_formats.QWEN3, {"attention_bias": (False,)}, QWEN_KEYS, read_other_values=read_qwen3)
LAYOUTS = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
