"""What the layouts have in common: how each is described, and how config.json and ModelConfig are held against it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.model_schema import FFNActivation, FFNConfig, ModelConfig
from llmfoundry_lite.errors import ExportError

HFConfig = dict[str, Any]
"""What config.json holds."""

Options = dict[str, tuple[Any, ...]]
"""Dotted key -> the values it can have, the most usual one first."""


def keys(*lines: str) -> frozenset[str]:
    return frozenset(key for line in lines for key in line.split())


class Source(NamedTuple):
    """Where a tensor of a layout comes from."""

    names: tuple[str, ...]
    """Ours, one below the other; if the model has no such tensors, zeros stand for them."""
    rows: tuple[int, int] | None = None
    """First and last + 1 of ours; None for all."""
    is_transposed: bool = False
    """GPT-2's Conv1D keeps [in, out] where a linear layer keeps [out, in]."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    title: str
    """As it reads after "transformers'"."""
    can_be: Callable[[ModelConfig], Options]
    """Of the options that it cannot express freely, what they can be."""
    describe: Callable[[ModelConfig], HFConfig]
    """config.json, without dtype and special tokens."""
    sources: Callable[[ModelConfig], dict[str, Source]]
    """For every tensor of the layout, in order, where it comes from."""
    read_config: Callable[[HFConfig, Mapping[str, torch.Tensor], str], ModelConfig]
    """(config.json, its tensors, where it is) -> our model. Raises ExportError."""
    known: Mapping[str, frozenset[str]]
    """Block of config.json, "" for the whole -> its keys that are read, or change nothing that a model computes."""
    prefix: str = ""
    """Of every tensor but the output embedding; files of the bare model lack it."""
    buffers: tuple[str, ...] = ()
    """Ends of the names of tensors that old files hold and no model needs."""


# ----------------------------------------------------------------------------------------- ModelConfig -> config.json


ACTIVATIONS = {
    "gelu": FFNActivation(name="gelu"),
    "gelu_new": FFNActivation(name="gelu", approximate="tanh"),
    "gelu_pytorch_tanh": FFNActivation(name="gelu", approximate="tanh"),
    "quick_gelu": FFNActivation(name="quick_gelu"),
    "relu": FFNActivation(name="relu"),
    "silu": FFNActivation(name="silu"),
    "swish": FFNActivation(name="silu"),
}
"""transformers' name -> ours. Where two are the same function, the first is written."""


def activation_name(config: ModelConfig) -> str:
    ours = config.ffn_config.ffn_act_fn
    return next(
        name
        for name, activation in ACTIVATIONS.items()
        if activation.name == ours.name and (ours.name != "gelu" or activation.approximate == ours.approximate)
    )


def attention_types(config: ModelConfig) -> tuple[str, ...]:
    """For layouts where every head has its own keys and values."""
    is_plain = config.num_kv_heads == config.n_heads
    return (config.attn_config.attn_type,) if is_plain else ("multihead_attention",)


def find_inexpressible(config: ModelConfig, layout: Layout) -> str | None:
    """The first option that the layout cannot express, and what to do about it."""
    for key, values in layout.can_be(config).items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value not in values:
            instead = "without" if values[0] in (None, False, -1) else f"with {_yaml(values[0])}"
            return (
                f"model.{key}: {_yaml(value)} cannot be expressed in transformers' {layout.title}; "
                f"train {instead}, or keep the training checkpoint, which holds everything"
            )
    return None


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------- tensors -> the layout's


def qkv_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Ours, for a tensor that may be q, k and v in one."""
    if config.attn_config.fused_qkv or ".Wqkv." not in name:
        return (name,)
    return tuple(name.replace(".Wqkv.", f".W{part}.") for part in "qkv")


def layout_tensor(state_dict: Mapping[str, torch.Tensor], config: ModelConfig, source: Source) -> torch.Tensor:
    parts = [_own_tensor(state_dict, config, name) for name in source.names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.rows is not None:
        tensor = tensor[slice(*source.rows)]
    return tensor.t().contiguous() if source.is_transposed else tensor


def _own_tensor(state_dict: Mapping[str, torch.Tensor], config: ModelConfig, name: str) -> torch.Tensor:
    if name in state_dict:
        return state_dict[name]
    if name == "transformer.wpe.weight":
        return state_dict["transformer.wte.weight"].new_zeros(config.max_seq_len, config.d_model)
    weight = state_dict[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])


# ----------------------------------------------------------------------------------------- config.json -> ModelConfig


BESIDE_THE_MODEL = keys(
    # What wrote the file, and how it is kept.
    "model_type architectures transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash",
    "tokenizer_class tokenizer_name prefix transformers.js_config",
    # How to compute, not what.
    "use_cache use_bfloat16 torchscript tf_legacy_loss return_dict output_hidden_states output_attentions output_past",
    "_attn_implementation attn_implementation _attn_implementation_autoset _flash_attn_2_enabled",
    "chunk_size_feed_forward gradient_checkpointing is_decoder tie_encoder_decoder cross_attention_hidden_size",
    # Of special tokens and of generation.
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id",
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty",
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences",
    "encoder_no_repeat_ngram_size bad_words_ids output_scores return_dict_in_generate remove_invalid_values",
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens begin_suppress_tokens",
    # Of other tasks, and of training.
    "id2label label2id _num_labels num_labels problem_type finetuning_task task_specific_params initializer_range",
    "is_encoder_decoder add_cross_attention pruned_heads tie_word_embeddings",
)
"""Keys of any config.json of transformers; those of the last line are checked."""
NO_OTHER_KIND: Options = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({}, None)}


def check_keys(hf_config: HFConfig, layout: Layout, where: str) -> None:
    """Raises ExportError for a key that may change what the model computes in a way that is not known here."""
    for block, known in layout.known.items():
        content: Any = hf_config
        for part in filter(None, block.split(".")):
            content = content.get(part) or {}
            if not isinstance(content, dict):
                raise ExportError(f"{where}: {block} is {json.dumps(content)} in config.json; expected an object")
        for key, value in content.items():
            if value is not None and key not in known and key not in BESIDE_THE_MODEL:
                raise ExportError(
                    f"{where}: {block and block + '.'}{key} is {_short(value)} in config.json, which is not known "
                    "here and may change what the model computes; if it changes nothing, remove it there"
                )
    check_values(hf_config, NO_OTHER_KIND, where)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def check_values(hf_config: HFConfig, must_be: Options, where: str) -> None:
    """What config.json leaves out counts as the first of the values."""
    for key, allowed in must_be.items():
        value: Any = hf_config
        for part in key.split("."):
            value = value.get(part, allowed[0]) if isinstance(value, dict) else allowed[0]
        if value not in allowed:
            expected = " or ".join(json.dumps(option) for option in allowed)
            raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; this model only has {expected}")


def needed(hf_config: HFConfig, key: str, where: str) -> int:
    value = hf_config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; expected a whole number above 0")
    return value


def ffn_options(ffn_dim: int, d_model: int, **options: Any) -> dict[str, Any]:
    """The width as a ratio where that is a short number, as a YAML would have it; otherwise as a width."""
    ratio = ffn_dim // d_model if ffn_dim % d_model == 0 else round(ffn_dim / d_model, 4)
    if ratio * d_model == ffn_dim:
        return {"expansion_ratio": ratio, "ffn_config": FFNConfig(**options)}
    return {"ffn_config": FFNConfig(ffn_hidden_size=ffn_dim, **options)}
