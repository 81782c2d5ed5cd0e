"""The description of a Hugging Face model format, and its use: config.json from a model, a model from config.json."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, FFNConfig, ModelConfig
from llmfoundry_lite.data.tokenizer import GENERATION_KEYS
from llmfoundry_lite.errors import ExportError

HFConfig = dict[str, Any]
"""The content of config.json."""

Values = dict[str, Any]
"""Dotted key of ModelConfig -> value."""

State = Mapping[str, torch.Tensor]
"""Name of a tensor -> the tensor."""

Options = dict[str, tuple[Any, ...]]
"""Dotted key -> the values it can have, the most usual one first."""

REQUIRED = ...
"""Default of a ConfigField that config.json must have, as a whole number."""
MAX_VALUE_CHARACTERS = 60
"""Length of a value of config.json in an error."""


def split_keys(*lines: str) -> frozenset[str]:
    """Return the keys that are separated by spaces in some lines."""
    return frozenset(key for line in lines for key in line.split())


class TensorSource(NamedTuple):
    """Which of our model's tensors a tensor of a format is made from."""

    names: tuple[str, ...]
    """Names of our tensors, concatenated along the first dimension. Tensors that the model does not have are zeros."""
    rows: tuple[int, int] | None = None
    """First row, and last row + 1, that are taken of them; None for all."""
    is_transposed: bool = False
    """GPT-2's Conv1D keeps [in, out] where a linear layer keeps [out, in]."""


class ConfigField(NamedTuple):
    """A key of config.json whose value is an option of our model."""

    ours: str
    """Dotted key of ModelConfig."""
    default: Any = REQUIRED
    """The value that counts where config.json has none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HFFormat:
    """A Hugging Face model format, as it is written."""

    title: str
    """Name, to be read after "transformers'"."""
    expressible_options: Callable[[ModelConfig], Options]
    """Values of the options that it cannot express freely, by dotted keys of ModelConfig."""
    fields: Mapping[str, Any]
    """config.json, without dtype and special tokens, by dotted keys: a ConfigField, a value, or a function that returns
    the value for a ModelConfig."""
    tensor_sources: Callable[[ModelConfig], dict[str, TensorSource]]
    """For every tensor of the format but the output embedding, in order, where it comes from."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReadableHFFormat(HFFormat):
    """A format whose folders can be imported as our model."""

    read_only_fields: Mapping[str, ConfigField] = field(default_factory=dict)
    """Fields that are read and never written."""
    readable_values: Options
    """Values of config.json that can be read."""
    read_other_values: Callable[[Values, HFConfig, State, str], Values]
    """Returns values that are no plain ConfigField, to add to those read so far or to replace them. Takes the latter,
    config.json, its tensors, and where they are, for errors. Raises ExportError."""
    other_known_keys: Iterable[str]
    """Further dotted keys that are read, or change nothing that a model computes."""
    tensor_prefix: str = ""
    """Beginning of the name of every tensor but the output embedding; files of the bare model lack it."""
    buffer_suffixes: tuple[str, ...] = ()
    """Ends of the names of tensors that old files have and no model needs."""

    def with_their_keys(self, message: str) -> str:
        """Replace the options of ours in an error's message by the keys of config.json that they were read from.

        `model.n_heads` becomes `num_attention_heads` for Llama. An option that no key stands for is left as it is.
        """
        fields = {**self.fields, **self.read_only_fields}
        keys_by_option = {source.ours: key for key, source in fields.items() if isinstance(source, ConfigField)}
        # Qwen3's norm_type and norm_eps are also those of attn_config.
        attention_keys = {f"attn_config.{option}": key for option, key in keys_by_option.items()}
        keys_by_option = attention_keys | keys_by_option
        return re.sub(r"\bmodel\.([\w.]+)", lambda match: keys_by_option.get(match[1], match[0]), message)

    @property
    def known_keys(self) -> set[str]:
        """Every dotted key that config.json may have, and those of the blocks that they are in."""
        known: set[str] = set()
        for key in (*self.fields, *self.read_only_fields, *self.readable_values, *self.other_known_keys):
            parts = key.split(".")
            known.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return known


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
    """Return transformers' name of a model's activation function. Only gelu has an approximation."""
    ours = config.ffn_config.ffn_act_fn
    for name, activation in ACTIVATIONS.items():
        is_same_approximation = ours.name != "gelu" or activation.approximate == ours.approximate
        if activation.name == ours.name and is_same_approximation:
            return name
    raise AssertionError(f"{ours.name} has no name in transformers")


def common_attention_options(config: ModelConfig) -> Options:
    """Return the options of attention that most formats can express, for a model of this configuration."""
    return {
        "attn_config.head_dim": (None, config.d_model // config.n_heads),
        "attn_config.qkv_bias": (None, not config.no_bias),
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.sliding_window_size": (-1,),
    }


def multihead_attention_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the attention types that a format can express which has keys and values for each head.

    That is any type with which the model has as many key-value heads as heads.
    """
    if config.num_kv_heads == config.n_heads:
        return (config.attn_config.attn_type,)
    return ("multihead_attention",)


def describe_inexpressible_option(config: ModelConfig, hf_format: HFFormat) -> str | None:
    """Return an error's text for the first option of a model that a format cannot express; None if there is none."""
    for key, expressible_values in hf_format.expressible_options(config).items():
        value = attrgetter(key)(config)
        if value in expressible_values:
            continue
        usual_value = expressible_values[0]
        is_turned_off = usual_value in (None, False, -1)
        alternative = "without" if is_turned_off else f"with {_as_yaml(usual_value)}"
        return (
            f"model.{key}: {_as_yaml(value)} cannot be expressed in transformers' {hf_format.title}; "
            f"train {alternative}, or keep the training checkpoint, which holds everything"
        )
    return None


def _as_yaml(value: Any) -> str:
    """Write a scalar as a YAML file has it: true and false in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------- tensors -> the format's


def qkv_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of our tensors that form the tensor `name` of a model with fused q, k and v.

    They are three for the fused projection (`Wqkv`) if the model keeps q, k and v apart, else `name` itself.
    """
    if config.attn_config.fused_qkv or ".Wqkv." not in name:
        return (name,)
    return tuple(name.replace(".Wqkv.", f".W{part}.") for part in "qkv")


def build_hf_tensor(state_dict: State, config: ModelConfig, source: TensorSource) -> torch.Tensor:
    """Build a tensor of a format from the tensors of our model, in `state_dict`."""
    parts = [_own_tensor_or_zeros(state_dict, config, name) for name in source.names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.rows is not None:
        start, end = source.rows
        tensor = tensor[start:end]
    return tensor.t().contiguous() if source.is_transposed else tensor


def _own_tensor_or_zeros(state_dict: State, config: ModelConfig, name: str) -> torch.Tensor:
    """Return a tensor of our model, or zeros of its shape if it is a bias or the positions that the model lacks."""
    if name in state_dict:
        return state_dict[name]
    if name == "transformer.wpe.weight":
        return state_dict["transformer.wte.weight"].new_zeros(config.max_seq_len, config.d_model)
    weight = state_dict[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])


# ----------------------------------------------------------------------------------------- config.json -> ModelConfig


UNRELATED_KEYS = split_keys(
    # The writer of the file, and its form.
    "model_type architectures transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash",
    "tokenizer_class tokenizer_name prefix transformers.js_config",
    # How to compute, not what.
    "use_cache use_bfloat16 torchscript tf_legacy_loss return_dict output_hidden_states output_attentions output_past",
    "_attn_implementation attn_implementation _attn_implementation_autoset _flash_attn_2_enabled",
    "chunk_size_feed_forward gradient_checkpointing is_decoder tie_encoder_decoder cross_attention_hidden_size",
    # Of special tokens and of generation.
    "sep_token_id unk_token_id",
    *GENERATION_KEYS,
    # Of other tasks, and of training.
    "id2label label2id _num_labels num_labels problem_type finetuning_task task_specific_params initializer_range",
    "is_encoder_decoder add_cross_attention pruned_heads tie_word_embeddings",
)
"""Keys that any config.json of transformers may have, and that do not change what the model computes. Those of the last
line might; they are checked by DECODER_ONLY_VALUES, and by each format."""
DECODER_ONLY_VALUES: Options = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}


def check_keys(hf_config: HFConfig, hf_format: ReadableHFFormat, location: str) -> None:
    """Raise ExportError if config.json has a key that is not known, and may change what the model computes.

    `location` is the folder, for errors. Keys in blocks are checked too, and so are DECODER_ONLY_VALUES.
    """
    known_keys = hf_format.known_keys
    known_blocks = {key.rpartition(".")[0] for key in known_keys}

    def check_block(block: HFConfig, prefix: str) -> None:
        """Check the keys of a block, of which each is `prefix` and a name, and those of the blocks in it."""
        for name, value in block.items():
            is_known = prefix + name in known_keys or name in UNRELATED_KEYS
            if value is not None and not is_known:
                text = json.dumps(value)
                if len(text) > MAX_VALUE_CHARACTERS:
                    text = f"{text[: MAX_VALUE_CHARACTERS - 1]}…"
                raise ExportError(
                    f"{location}: {prefix}{name} is {text} in config.json, which is not known here and may change what "
                    "the model computes; if it changes nothing, remove it there"
                )
        for name, value in block.items():
            if prefix + name in known_blocks and value:
                if not isinstance(value, dict):
                    raise ExportError(
                        f"{location}: {prefix}{name} is {json.dumps(value)} in config.json; expected an object"
                    )
                check_block(value, f"{prefix}{name}.")

    check_block(hf_config, "")
    check_values(hf_config, DECODER_ONLY_VALUES, location)


def check_values(hf_config: HFConfig, readable_values: Options, location: str) -> None:
    """Raise ExportError if config.json has a value that cannot be read.

    `readable_values` maps a dotted key to its allowed values. A key that config.json does not have counts as the first.
    """
    for key, allowed in readable_values.items():
        value = look_up(hf_config, key, allowed[0])
        if value not in allowed:
            expected = " or ".join(json.dumps(option) for option in allowed)
            text = json.dumps(value)
            raise ExportError(f"{location}: {key} is {text} in config.json; this model only has {expected}")


def look_up(hf_config: HFConfig, key: str, default: Any) -> Any:
    """Return the value of a dotted key, or `default` if config.json does not have it."""
    value: Any = hf_config
    for part in key.split("."):
        value = value.get(part, default) if isinstance(value, dict) else default
    return value


def read_positive_integer(hf_config: HFConfig, key: str, location: str) -> int:
    """Return the whole number above 0 under a key. Raises ExportError if it is missing or something else."""
    value = hf_config.get(key)
    if type(value) is not int or value <= 0:
        raise ExportError(f"{location}: {key} is {json.dumps(value)} in config.json; expected a whole number above 0")
    return value


def build_config_json(config: ModelConfig, hf_format: HFFormat) -> HFConfig:
    """Return the content of config.json for a model in a format, without dtype and special tokens."""
    content: HFConfig = {}
    for key, source in hf_format.fields.items():
        if isinstance(source, ConfigField):
            value = attrgetter(source.ours)(config)
        elif callable(source):
            value = source(config)
        else:
            value = source

        *blocks, name = key.split(".")
        innermost = content
        for block in blocks:
            innermost = innermost.setdefault(block, {})
        innermost[name] = value
    return content


def read_model_config(hf_config: HFConfig, state: State, hf_format: ReadableHFFormat, location: str) -> ModelConfig:
    """Build the model configuration that config.json describes in a format.

    `state` has the tensors of the folder at `location`, from which some options are read. Raises ExportError for a
    value that cannot be read, and an error of ModelConfig for one out of range.
    """
    check_values(hf_config, hf_format.readable_values, location)
    fields = {key: source for key, source in hf_format.fields.items() if isinstance(source, ConfigField)}
    values: Values = {}
    for key, source in {**fields, **hf_format.read_only_fields}.items():
        if source.default is REQUIRED:
            values[source.ours] = read_positive_integer(hf_config, key, location)
        else:
            values[source.ours] = look_up(hf_config, key, source.default)
    values |= hf_format.read_other_values(values, hf_config, state, location)

    blocks: dict[str, dict[str, Any]] = {"": {}, "attn_config": {}, "ffn_config": {}}
    for key, value in values.items():
        block, _, name = key.rpartition(".")
        blocks[block][name] = value
    return ModelConfig(
        **blocks[""],
        attn_config=AttentionConfig(**blocks["attn_config"]),
        ffn_config=FFNConfig(**blocks["ffn_config"]),
    )
