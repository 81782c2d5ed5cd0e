"""Describes a Hugging Face model format, and converts with such a description between a model and its config.json.

An `HFFormat` says which options of our model the format can express, which keys its config.json has, and from which of
our tensors each of its tensors is made. A `ReadableHFFormat` also says what can be imported. `hf_formats.py` has the
formats. Here "ours" is this library's MPT (`ModelConfig` and its state dict), and "theirs" a model of transformers.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, FFNConfig, ModelConfig
from llmfoundry_lite.data.tokenizer_files import GENERATION_KEYS
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
"""Largest length of a value of config.json in an error."""


def split_keys(*lines: str) -> frozenset[str]:
    """Return the keys in several lines of text, in which they are separated by spaces."""
    return frozenset(key for line in lines for key in line.split())


class TensorSource(NamedTuple):
    """Says from which of our model's tensors a tensor of a format is made.

    For example, Llama's q_proj.weight of a model with fused q, k and v is made from the first rows of one matrix:
    `TensorSource(("transformer.blocks.0.attn.Wqkv.weight",), rows=(0, q_dim))`.
    """

    names: tuple[str, ...]
    """Names of our tensors, which are concatenated along the first dimension. A tensor that our model does not have
    counts as zeros."""
    rows: tuple[int, int] | None = None
    """The rows that are taken of the result, from the first number to before the second; None for all."""
    is_transposed: bool = False
    """The matrix is transposed: GPT-2's Conv1D stores [in, out] where a linear layer stores [out, in]."""


class ConfigField(NamedTuple):
    """A key of config.json whose value is an option of our model."""

    ours: str
    """Dotted key of ModelConfig, such as "attn_config.clip_qkv"."""
    default: Any = REQUIRED
    """The value that counts if config.json does not have the key."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HFFormat:
    """A Hugging Face model format into which our models can be exported."""

    title: str
    """Name, to be read after "transformers'"."""
    expressible_options: Callable[[ModelConfig], Options]
    """Returns the values that the format can express of each option, by dotted keys of ModelConfig. Options that are
    not in the result can have any value."""
    fields: Mapping[str, Any]
    """Dotted key of config.json -> its value: a ConfigField, a constant, or a function that returns the value for a
    ModelConfig. dtype and special tokens are not among them."""
    tensor_sources: Callable[[ModelConfig], dict[str, TensorSource]]
    """Returns the source of every tensor of the format except the output embedding, in the format's order."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ReadableHFFormat(HFFormat):
    """A format whose folders can be imported as our model."""

    read_only_fields: Mapping[str, ConfigField] = field(default_factory=dict)
    """Fields that are read and never written."""
    readable_values: Options
    """Dotted key of config.json -> the values that can be read, for keys that cannot have any value."""
    read_other_values: Callable[[Values, HFConfig, State, str], Values]
    """Reads the options that do not simply follow from one key. Takes the values read so far, config.json, the tensors,
    and their location for errors. Returns values that are added to those read so far or replace them. Raises
    ExportError."""
    other_known_keys: Iterable[str]
    """Further dotted keys that are read, or that change nothing that a model computes."""
    tensor_prefix: str = ""
    """Beginning of the name of every tensor except the output embedding. Files of the bare model do not have it."""
    buffer_suffixes: tuple[str, ...] = ()
    """Ends of the names of tensors that old files have and no model needs."""

    def with_their_keys(self, message: str) -> str:
        """Replace our options in an error's message by the keys of config.json that they were read from.

        For Llama, `model.n_heads` becomes `num_attention_heads`. An option that is not read from a single key is left
        unchanged.
        """
        key_of_option: dict[str, str] = {}
        for key, source in {**self.fields, **self.read_only_fields}.items():
            if isinstance(source, ConfigField):
                key_of_option[source.ours] = key

        # Qwen3's norm_type and norm_eps are also those of attn_config. A key of its own comes first.
        key_of_attention_option = {f"attn_config.{option}": key for option, key in key_of_option.items()}
        key_of_option = key_of_attention_option | key_of_option
        return re.sub(r"\bmodel\.([\w.]+)", lambda match: key_of_option.get(match[1], match[0]), message)

    @property
    def known_keys(self) -> set[str]:
        """Every dotted key that config.json may have, with the keys of the blocks that they are in.

        "attn_config.rope_hf_config.type" also gives "attn_config.rope_hf_config" and "attn_config".
        """
        known: set[str] = set()
        for key in (*self.fields, *self.read_only_fields, *self.readable_values, *self.other_known_keys):
            parts = key.split(".")
            for num_parts in range(1, len(parts) + 1):
                known.add(".".join(parts[:num_parts]))
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
"""transformers' name of an activation function -> ours. If two names mean the same function, the first is written."""


def activation_name(config: ModelConfig) -> str:
    """Return transformers' name of a model's activation function. Only gelu has an approximation."""
    ours = config.ffn_config.ffn_act_fn
    for name, activation in ACTIVATIONS.items():
        is_same_approximation = ours.name != "gelu" or activation.approximate == ours.approximate
        if activation.name == ours.name and is_same_approximation:
            return name
    raise AssertionError(f"{ours.name} has no name in transformers")


def common_attention_options(config: ModelConfig) -> Options:
    """Return the values of attention's options that most formats can express, for a model of this configuration."""
    return {
        "attn_config.head_dim": (None, config.d_model // config.n_heads),
        "attn_config.qkv_bias": (None, not config.no_bias),
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.sliding_window_size": (-1,),
    }


def multihead_attention_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the attention types of a model that a format without shared key-value heads can express.

    That is any type if the model has as many key-value heads as heads, and otherwise only "multihead_attention".
    """
    if config.num_kv_heads == config.n_heads:
        return (config.attn_config.attn_type,)
    return ("multihead_attention",)


def describe_inexpressible_option(config: ModelConfig, hf_format: HFFormat) -> str | None:
    """Return an error's text for the first option of a model that a format cannot express.

    The text says what to do, such as "model.logit_scale: 0.5 cannot be expressed in transformers' Llama, the format for
    RoPE; train without, or keep the training checkpoint, which holds everything". Returns None if the format can
    express the model.
    """
    for key, expressible_values in hf_format.expressible_options(config).items():
        option_value = attrgetter(key)(config)
        if option_value in expressible_values:
            continue

        # The first value is the most usual one.
        usual_value = expressible_values[0]
        is_turned_off = usual_value in (None, False, -1)
        alternative = "without" if is_turned_off else f"with {_as_yaml(usual_value)}"
        return (
            f"model.{key}: {_as_yaml(option_value)} cannot be expressed in transformers' {hf_format.title}; "
            f"train {alternative}, or keep the training checkpoint, which holds everything"
        )
    return None


def _as_yaml(value: Any) -> str:
    """Write a scalar as a YAML file has it: true and false in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------- tensors -> the format's


def qkv_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of our tensors that form the tensor `name` of a model with fused q, k and v.

    If the model keeps q, k and v apart, "….attn.Wqkv.weight" gives "….attn.Wq.weight", "….attn.Wk.weight" and
    "….attn.Wv.weight". Any other name gives itself.
    """
    if config.attn_config.fused_qkv or ".Wqkv." not in name:
        return (name,)
    return tuple(name.replace(".Wqkv.", f".W{part}.") for part in "qkv")


def build_hf_tensor(state_dict: State, config: ModelConfig, source: TensorSource) -> torch.Tensor:
    """Build a tensor of a format from the tensors of our model, as `source` says.

    `state_dict` has our model's tensors, which may be on the meta device, to learn the shape of the result. A tensor
    that is only renamed is returned without a copy.
    """
    parts = [_own_tensor_or_zeros(state_dict, config, name) for name in source.names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.rows is not None:
        start, end = source.rows
        tensor = tensor[start:end]
    if source.is_transposed:
        return tensor.t().contiguous()
    return tensor


def _own_tensor_or_zeros(state_dict: State, config: ModelConfig, name: str) -> torch.Tensor:
    """Return a tensor of our model, or zeros of its shape if the model does not have it.

    Only learned positions and biases may be missing.
    """
    if name in state_dict:
        return state_dict[name]
    if name == "transformer.wpe.weight":
        return state_dict["transformer.wte.weight"].new_zeros(config.max_seq_len, config.d_model)

    # A bias has one element for each row of its weight.
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
"""Keys that any config.json of transformers may have, and that do not change what the model computes. The keys in the
last line might; DECODER_ONLY_VALUES and each format check their values."""
DECODER_ONLY_VALUES: Options = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}


def check_keys(hf_config: HFConfig, hf_format: ReadableHFFormat, location: str) -> None:
    """Raise ExportError if config.json has a key that is not known, and may therefore change what the model computes.

    hf_format: the format whose keys are known.
    location: the folder, for errors.

    Keys in blocks, such as `attn_config`, are checked as well. A key whose value is null counts as absent. The values
    of DECODER_ONLY_VALUES are checked too.
    """
    known_keys = hf_format.known_keys
    known_blocks = {key.rpartition(".")[0] for key in known_keys}

    def check_block(block: HFConfig, prefix: str) -> None:
        """Check the keys of a block, and of the blocks in it. `prefix` is the block's dotted key and a dot."""
        for name, setting in block.items():
            is_known = prefix + name in known_keys or name in UNRELATED_KEYS
            if setting is not None and not is_known:
                text = json.dumps(setting)
                if len(text) > MAX_VALUE_CHARACTERS:
                    text = f"{text[: MAX_VALUE_CHARACTERS - 1]}…"
                raise ExportError(
                    f"{location}: {prefix}{name} is {text} in config.json, which is not known here and may change what "
                    "the model computes; if it changes nothing, remove it there"
                )

        # All keys of this block are known. Go on with the blocks in it.
        for name, setting in block.items():
            if prefix + name in known_blocks and setting:
                if not isinstance(setting, dict):
                    raise ExportError(
                        f"{location}: {prefix}{name} is {json.dumps(setting)} in config.json; expected an object"
                    )
                check_block(setting, f"{prefix}{name}.")

    check_block(hf_config, "")
    check_values(hf_config, DECODER_ONLY_VALUES, location)


def check_values(hf_config: HFConfig, readable_values: Options, location: str) -> None:
    """Raise ExportError if config.json has a value that cannot be read.

    `readable_values` maps a dotted key to its allowed values. A key that config.json does not have counts as the first
    of them. `location` is the folder, for errors.
    """
    for key, allowed in readable_values.items():
        value = look_up(hf_config, key, allowed[0])
        if value not in allowed:
            expected = " or ".join(json.dumps(option) for option in allowed)
            text = json.dumps(value)
            raise ExportError(f"{location}: {key} is {text} in config.json; this model only has {expected}")


def look_up(hf_config: HFConfig, key: str, default: Any) -> Any:
    """Return the value of a dotted key such as "attn_config.clip_qkv", or `default` if config.json does not have it."""
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
    """Return the content of config.json for a model in a format, without dtype and special tokens.

    Dotted keys become blocks: "attn_config.alibi" is the key `alibi` in the object `attn_config`.
    """
    content: HFConfig = {}
    for key, source in hf_format.fields.items():
        # A field says where its value comes from: an option, a function of the model, or a constant.
        if isinstance(source, ConfigField):
            value = attrgetter(source.ours)(config)
        elif callable(source):
            value = source(config)
        else:
            value = source

        # Write it into the innermost block, which is created if needed.
        *block_names, name = key.split(".")
        block = content
        for block_name in block_names:
            block = block.setdefault(block_name, {})
        block[name] = value
    return content


def read_model_config(hf_config: HFConfig, state: State, hf_format: ReadableHFFormat, location: str) -> ModelConfig:
    """Build the model configuration that config.json describes in a format.

    state: the tensors of the folder, because some options show only in their names and shapes.
    location: the folder, for errors.

    Raises ExportError for a value that cannot be read, and an error of ModelConfig for one out of range.
    """
    check_values(hf_config, hf_format.readable_values, location)

    # Read the options that follow from one key, then those that need more.
    options: Values = {}
    for key, source in {**hf_format.fields, **hf_format.read_only_fields}.items():
        if not isinstance(source, ConfigField):
            continue
        if source.default is REQUIRED:
            options[source.ours] = read_positive_integer(hf_config, key, location)
        else:
            options[source.ours] = look_up(hf_config, key, source.default)
    options |= hf_format.read_other_values(options, hf_config, state, location)

    # Divide dotted keys into the dataclasses that they belong to.
    blocks: dict[str, dict[str, Any]] = {"": {}, "attn_config": {}, "ffn_config": {}}
    for option, option_value in options.items():
        block_name, _, name = option.rpartition(".")
        blocks[block_name][name] = option_value
    return ModelConfig(
        **blocks[""],
        attn_config=AttentionConfig(**blocks["attn_config"]),
        ffn_config=FFNConfig(**blocks["ffn_config"]),
    )
