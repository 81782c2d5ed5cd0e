"""Readers of the Hugging Face formats of other model families: folders of GPT-2, Llama, Mistral, Qwen2 and Qwen3.

The core owns how these formats are written (`llmfoundry_lite/convert/hf_formats.py`), because a model of ours is
exported in one of them. Files that others wrote may say more: older keys, values that an export never has, defaults
left out. This module adds to each format what is needed to read such a folder, and refuses what our model cannot do.

A reader (`read_gpt2`, `read_llama`, …) gets the options that a plain ConfigField has already read, adds those that
need a computation, and returns them. The sources are modeling_gpt2.py, modeling_llama.py, modeling_mistral.py,
modeling_qwen2.py and modeling_qwen3.py of transformers 5.23.
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


def find_format(model_type: str) -> ReadableHFFormat:
    """Return the readable format of a `model_type` in config.json. The core itself reads `mpt`."""
    return READABLE_FORMATS[model_type]


def make_readable(hf_format: HFFormat, **reading_fields: Any) -> ReadableHFFormat:
    """Add the fields of ReadableHFFormat that describe reading to a format that the core can only write."""
    writing_fields = {
        "title": hf_format.title,
        "expressible_options": hf_format.expressible_options,
        "fields": hf_format.fields,
        "tensor_sources": hf_format.tensor_sources,
    }
    return ReadableHFFormat(**writing_fields, **reading_fields)


def read_integer_or(hf_config: HFConfig, key: str, default: int, location: str) -> int:
    """Return the positive integer under a key of config.json, or `default` if the key is absent or null.

    Raises ExportError, with `location` in front, for any other value.
    """
    if hf_config.get(key) is None:
        return default
    return read_positive_integer(hf_config, key, location)


def ffn_width_options(ffn_dim: int, d_model: int) -> Values:
    """Return the option of our model that sets the width of its feed-forward layers.

    That is `expansion_ratio` if the ratio is exact with at most 4 decimals, because people write it so in a YAML, and
    otherwise `ffn_config.ffn_hidden_size`. A width of 3072 in a model of 768 gives {"expansion_ratio": 4}.
    """
    if ffn_dim % d_model == 0:
        ratio = ffn_dim // d_model
    else:
        ratio = round(ffn_dim / d_model, 4)

    if ratio * d_model == ffn_dim:
        return {"expansion_ratio": ratio}
    return {"ffn_config.ffn_hidden_size": ffn_dim}


# ------------------------------------------------------------------------------------------------------------- GPT-2


GPT2_READABLE_VALUES: Options = {
    "architectures": (None, ["GPT2LMHeadModel"], ["GPT2Model"]),
    # What config.json leaves out is transformers' default.
    "activation_function": ("gelu_new", *(name for name in ACTIVATIONS if name != "gelu_new")),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}


def read_gpt2(values: Values, hf_config: HFConfig, state: State, location: str) -> Values:
    """Add the options of a GPT-2 model that need more than one key: biases, positions, the scale of softmax, the FFN.

    Our export writes zeros for biases and learned positions that a model does not have, and marks them in config.json
    with `no_bias` and `learned_pos_emb`. Raises ExportError.
    """
    # If somebody has trained the exported model further, the zeros have changed and a mark no longer holds.
    is_marked_without_bias = bool(hf_config.get("no_bias"))
    biases = (tensor for name, tensor in state.items() if name.endswith(".bias"))
    values["no_bias"] = is_marked_without_bias and not any(tensor.any() for tensor in biases)
    values["learned_pos_emb"] = hf_config.get("learned_pos_emb", True)
    position_table = state.get("transformer.wpe.weight")
    if not values["learned_pos_emb"]:
        values["learned_pos_emb"] = position_table is not None and bool(position_table.any())

    values["attn_config.softmax_scale"] = None if hf_config.get("scale_attn_weights", True) else 1.0

    d_model = values["d_model"]
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("activation_function", "gelu_new")]
    ffn_dim = read_integer_or(hf_config, "n_inner", 4 * d_model, location)
    values |= ffn_width_options(ffn_dim, d_model)
    return values


GPT2 = make_readable(
    hf_formats.GPT2,
    readable_values=GPT2_READABLE_VALUES,
    read_other_values=read_gpt2,
    other_known_keys=split_keys(
        "n_ctx reorder_and_upcast_attn predict_special_tokens",
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout",
    ),
    tensor_prefix="transformer.",
    buffer_suffixes=(".attn.bias", ".attn.masked_bias"),
)

# ------------------------------------------------------------------------------------------- formats with RoPE


LLAMA_READABLE_VALUES: Options = {
    "partial_rotary_factor": (1.0, None),
    "hidden_act": ("silu", *(name for name in ACTIVATIONS if name != "silu")),
    "norm_type": ("rmsnorm", "low_precision_rmsnorm"),
}
ROPE_KEYS = ("rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", *LLAMA3_KEYS)
ROPE_READABLE_VALUES: Options = {"rope_type": tuple(ROPE_TYPES.values()), "partial_rotary_factor": (1.0, None)}


def read_common_options(values: Values, hf_config: HFConfig, location: str) -> None:
    """Add to `values` the options that Llama, Mistral and Qwen share and that no plain ConfigField reads.

    config.json may leave out widths that follow from others. A default that is wrong for the model shows later, when
    the shapes of its tensors are compared with those of our model. Raises ExportError.
    """
    d_model = values["d_model"]
    n_heads = values["n_heads"]
    head_dim = read_integer_or(hf_config, "head_dim", d_model // n_heads, location)
    values["attn_config.head_dim"] = None if head_dim * n_heads == d_model else head_dim

    num_kv_heads = read_integer_or(hf_config, "num_key_value_heads", n_heads, location)
    special_types = {n_heads: "multihead_attention", 1: "multiquery_attention"}
    attn_type = special_types.get(num_kv_heads, "grouped_query_attention")
    values["attn_config.attn_type"] = attn_type
    values["attn_config.kv_n_heads"] = num_kv_heads if attn_type == "grouped_query_attention" else None

    values["no_bias"] = True
    values["ffn_config.ffn_type"] = "mptglu"
    values["ffn_config.ffn_act_fn"] = ACTIVATIONS[hf_config.get("hidden_act", "silu")]
    ffn_dim = read_positive_integer(hf_config, "intermediate_size", location)
    values |= ffn_width_options(ffn_dim, d_model)

    values["attn_config.rope"] = True
    values |= read_rope(hf_config, location)


def read_rope(hf_config: HFConfig, location: str) -> Values:
    """Return our options of rotary positions.

    transformers 5 writes one block, `rope_parameters`. Older releases write `rope_theta` and, for models that scale
    positions, a block `rope_scaling`. Example of the former:

        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

    Raises ExportError if both blocks are there and differ, or if a key is missing or does not belong to the rope_type.
    """
    block_name = "rope_parameters" if hf_config.get("rope_parameters") else "rope_scaling"
    block = hf_config.get(block_name) or {}
    older_block = hf_config.get("rope_scaling") or {}
    differing_keys = [key for key, value in older_block.items() if block.get(key) != value]
    if differing_keys:
        raise ExportError(f"{location}: rope_parameters and rope_scaling differ in {differing_keys[0]} in config.json")

    # The oldest files name the type `type`, and a block without either does not scale.
    rope = {"rope_type": block.get("type", "default"), **block}
    readable_values = {f"{block_name}.{key}": values for key, values in ROPE_READABLE_VALUES.items()}
    check_values({block_name: rope}, readable_values, location)
    scaling_type = next(ours for ours, theirs in ROPE_TYPES.items() if theirs == rope["rope_type"])

    expected_keys: tuple[str, ...] = ("factor",)
    if scaling_type == "no_scaling":
        expected_keys = ()
    elif scaling_type == "llama3":
        expected_keys = ("factor", *LLAMA3_KEYS)
    for key in ("factor", *LLAMA3_KEYS):
        is_given = rope.get(key) is not None
        in_config = f"in config.json; rope_type {rope['rope_type']}"
        if key in expected_keys and not is_given:
            raise ExportError(f"{location}: {block_name}.{key} is missing {in_config} needs it")
        if key not in expected_keys and is_given:
            raise ExportError(f"{location}: {block_name}.{key} is {json.dumps(rope[key])} {in_config} does not have it")

    return {
        "attn_config.rope_impl": "dail" if scaling_type == "no_scaling" else "hf",
        "attn_config.rope_theta": rope.get("rope_theta", hf_config.get("rope_theta", 10_000)),
        "attn_config.rope_hf_config": RopeScaling(type=scaling_type, **{key: rope[key] for key in expected_keys}),
    }


def with_rope(
    hf_format: HFFormat, readable_values: Options, *known_keys: str, **reading_fields: Any
) -> ReadableHFFormat:
    """Make a format with rotary positions readable. Its class in transformers is `<name>ForCausalLM`.

    readable_values: values of config.json that this family alone restricts. LLAMA_READABLE_VALUES are added.
    known_keys: keys that change nothing that the model computes, separated by spaces.
    reading_fields: further fields of ReadableHFFormat.
    """
    name = hf_format.fields["architectures"][0].removesuffix("ForCausalLM")
    architectures = (None, [f"{name}ForCausalLM"], [f"{name}Model"])
    rope_keys = [f"{block}.{key}" for block in ("rope_parameters", "rope_scaling") for key in ROPE_KEYS]
    return make_readable(
        hf_format,
        readable_values={"architectures": architectures, **LLAMA_READABLE_VALUES, **readable_values},
        other_known_keys=split_keys(*known_keys, *rope_keys),
        tensor_prefix="model.",
        buffer_suffixes=(".rotary_emb.inv_freq",),
        **reading_fields,
    )


# -------------------------------------------------------------------------------- Llama, Mistral, Qwen2 and Qwen3


BIAS_KEYS = ("attention_bias", "mlp_bias")


def read_llama(values: Values, hf_config: HFConfig, state: State, location: str) -> Values:
    """Add the options of a Llama model. Our model has biases in attention and FFN, in neither, or in q, k and v alone.

    Raises ExportError for any other combination.
    """
    check_values(hf_config, dict.fromkeys(BIAS_KEYS, (False, True)), location)
    keys_with_bias = {key for key in BIAS_KEYS if hf_config.get(key)}

    # Our export writes a model with biases in q, k and v alone as a Llama if its tokenizer is not Qwen2's. Llama cannot
    # say that, so the file has attention_bias, and zeros as the biases of the output projection.
    output_biases = [tensor for name, tensor in state.items() if name.endswith(".self_attn.o_proj.bias")]
    are_all_zero = not any(tensor.any() for tensor in output_biases)
    if keys_with_bias == {"attention_bias"} and output_biases and are_all_zero:
        values["attn_config.qkv_bias"] = True
        keys_with_bias = set()

    if len(keys_with_bias) == 1:
        (true_key,) = keys_with_bias
        (false_key,) = set(BIAS_KEYS) - keys_with_bias
        raise ExportError(
            f"{location}: {true_key} is true in config.json and {false_key} is not; this model has both or neither"
        )
    read_common_options(values, hf_config, location)
    values["no_bias"] = not keys_with_bias
    return values


MISTRAL_WINDOW_TOKENS = 4096
"""transformers' default of `sliding_window`. No tensor's shape would show another one."""


def read_mistral(values: Values, hf_config: HFConfig, _state: State, location: str) -> Values:
    """Add the options of a Mistral model. Raises ExportError."""
    read_common_options(values, hf_config, location)
    # A window that is null in config.json means none, unlike one that is left out.
    hf_config = {"sliding_window": MISTRAL_WINDOW_TOKENS, **hf_config}
    # transformers counts the token itself. Our window is the number of tokens before it, and -1 for no window.
    values["attn_config.sliding_window_size"] = read_integer_or(hf_config, "sliding_window", 0, location) - 1
    return values


QWEN_KEYS = "sliding_window max_window_layers layer_types"


def read_qwen(values: Values, hf_config: HFConfig, location: str) -> None:
    """Add to `values` the options that Qwen2 and Qwen3 share. Raises ExportError for layers with a sliding window."""
    layer_types = (None, ["full_attention"] * values["n_layers"])
    check_values(hf_config, {"use_sliding_window": (False, None), "layer_types": layer_types}, location)
    read_common_options(values, hf_config, location)


def read_qwen2(values: Values, hf_config: HFConfig, _state: State, location: str) -> Values:
    """Add the options of a Qwen2 model, whose q, k and v alone have biases. Raises ExportError."""
    read_qwen(values, hf_config, location)
    values["attn_config.qkv_bias"] = True
    return values


def read_qwen3(values: Values, hf_config: HFConfig, _state: State, location: str) -> Values:
    """Add the options of a Qwen3 model, which normalizes each head of q and k as its blocks. Raises ExportError."""
    read_qwen(values, hf_config, location)
    values["attn_config.qk_gn"] = True
    values["attn_config.norm_type"] = values["norm_type"]
    values["attn_config.norm_eps"] = values["norm_eps"]
    return values


LLAMA = with_rope(
    hf_formats.LLAMA,
    {"rope_interleaved": (False, None)},
    "pretraining_tp is_llama_config",  # how transformers splits a product, and which program wrote the file
    read_other_values=read_llama,
)
MISTRAL = with_rope(hf_formats.MISTRAL, {}, read_other_values=read_mistral)
QWEN2 = with_rope(hf_formats.QWEN2, {"use_mrope": (False, None)}, QWEN_KEYS, read_other_values=read_qwen2)
QWEN3 = with_rope(hf_formats.QWEN3, {"attention_bias": (False,)}, QWEN_KEYS, read_other_values=read_qwen3)
READABLE_FORMATS = {"gpt2": GPT2, "llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
