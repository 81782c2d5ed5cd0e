"""The description of a layout, and its use: config.json from a model, a model from config.json."""

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


class Field(NamedTuple):
    """A key of config.json that is an option of ours."""

    ours: str
    """Dotted key of ModelConfig."""
    default: Any = ...
    """The value that counts where config.json has none; `...` for a whole number that has to be there."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    """A Hugging Face layout, as it is written."""

    title: str
    """Name, to be read after "transformers'"."""
    can_be: Callable[[ModelConfig], Options]
    """Values of the options that it cannot express freely."""
    fields: Mapping[str, Any]
    """config.json, without dtype and special tokens, by dotted keys: a Field, a value, or a function of our model."""
    sources: Callable[[ModelConfig], dict[str, Source]]
    """For every tensor of the layout but the output embedding, in order, where it comes from."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Readable(Layout):
    """A layout whose folders become our model."""

    also_read: Mapping[str, Field] = field(default_factory=dict)
    """Fields that are read and never written."""
    must_be: Options
    """Values of config.json that can be read."""
    read_others: Callable[[Values, HFConfig, State, str], None]
    """(values read so far, config.json, its tensors, where it is): adds what is no plain Field. Raises ExportError."""
    also_known: Iterable[str]
    """Further dotted keys that are read, or change nothing that a model computes."""
    prefix: str = ""
    """Beginning of the name of every tensor but the output embedding; files of the bare model lack it."""
    buffers: tuple[str, ...] = ()
    """Ends of the names of tensors that old files hold and no model needs."""

    def in_their_words(self, reason: str) -> str:
        """Name the key of config.json where an error names the option of ours that it was read into."""
        fields = {**self.fields, **self.also_read}
        theirs = {source.ours: key for key, source in fields.items() if isinstance(source, Field)}
        # One key of Qwen3 is read into two options.
        theirs = {f"attn_config.{ours}": key for ours, key in theirs.items()} | theirs
        return re.sub(r"\bmodel\.([\w.]+)", lambda found: theirs.get(found[1], found[0]), reason)

    @property
    def known(self) -> set[str]:
        """Every dotted key of config.json that may be there, and the blocks that they are in."""
        dotted = (*self.fields, *self.also_read, *self.must_be, *self.also_known)
        return {
            ".".join(parts[:end]) for key in dotted for parts in [key.split(".")] for end in range(1, len(parts) + 1)
        }


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


def plain_attention(config: ModelConfig) -> Options:
    """Return what most layouts have of attention."""
    return {
        "attn_config.head_dim": (None, config.d_model // config.n_heads),
        "attn_config.qkv_bias": (None, not config.no_bias),
        "attn_config.qk_ln": (False,),
        "attn_config.qk_gn": (False,),
        "attn_config.sliding_window_size": (-1,),
    }


def attention_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the types that a layout can express where every head has its own keys and values."""
    is_plain = config.num_kv_heads == config.n_heads
    return (config.attn_config.attn_type,) if is_plain else ("multihead_attention",)


def find_inexpressible(config: ModelConfig, layout: Layout) -> str | None:
    """Describe the first option that the layout cannot express, and what to do about it; None if there is none."""
    for key, values in layout.can_be(config).items():
        value = attrgetter(key)(config)
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
    """Return our names for a tensor that may be q, k and v in one."""
    if config.attn_config.fused_qkv or ".Wqkv." not in name:
        return (name,)
    return tuple(name.replace(".Wqkv.", f".W{part}.") for part in "qkv")


def layout_tensor(state_dict: State, config: ModelConfig, source: Source) -> torch.Tensor:
    """Build a tensor of a layout from ours."""
    parts = [_own_tensor(state_dict, config, name) for name in source.names]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if source.rows is not None:
        tensor = tensor[slice(*source.rows)]
    return tensor.t().contiguous() if source.is_transposed else tensor


def _own_tensor(state_dict: State, config: ModelConfig, name: str) -> torch.Tensor:
    if name in state_dict:
        return state_dict[name]
    if name == "transformer.wpe.weight":
        return state_dict["transformer.wte.weight"].new_zeros(config.max_seq_len, config.d_model)
    weight = state_dict[name.removesuffix("bias") + "weight"]
    return weight.new_zeros(weight.shape[0])


# ----------------------------------------------------------------------------------------- config.json -> ModelConfig


BESIDE_THE_MODEL = keys(
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
"""Keys of any config.json of transformers; those of the last line are checked."""
NO_OTHER_KIND: Options = {"is_encoder_decoder": (False,), "add_cross_attention": (False,), "pruned_heads": ({}, None)}


def check_keys(hf_config: HFConfig, layout: Readable, where: str) -> None:
    """Raise ExportError for a key that may change what the model computes in a way that is not known here."""
    known = layout.known
    blocks = {key.rpartition(".")[0] for key in known}

    def check(content: HFConfig, start: str) -> None:
        for name, value in content.items():
            if value is not None and start + name not in known and name not in BESIDE_THE_MODEL:
                text = json.dumps(value)
                text = text if len(text) <= 60 else f"{text[:59]}…"
                raise ExportError(
                    f"{where}: {start}{name} is {text} in config.json, which is not known here and may change what the "
                    "model computes; if it changes nothing, remove it there"
                )
        for name, value in content.items():
            if start + name in blocks and value:
                if not isinstance(value, dict):
                    raise ExportError(
                        f"{where}: {start}{name} is {json.dumps(value)} in config.json; expected an object"
                    )
                check(value, f"{start}{name}.")

    check(hf_config, "")
    check_values(hf_config, NO_OTHER_KIND, where)


def check_values(hf_config: HFConfig, must_be: Options, where: str) -> None:
    """Raise ExportError for another value. A key that config.json leaves out counts as the first of the values."""
    for key, allowed in must_be.items():
        if (value := look_up(hf_config, key, allowed[0])) not in allowed:
            expected = " or ".join(json.dumps(option) for option in allowed)
            raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; this model only has {expected}")


def look_up(hf_config: HFConfig, key: str, default: Any) -> Any:
    """Return the value of a dotted key, or `default` if config.json leaves it out."""
    value: Any = hf_config
    for part in key.split("."):
        value = value.get(part, default) if isinstance(value, dict) else default
    return value


def needed(hf_config: HFConfig, key: str, where: str) -> int:
    value = hf_config.get(key)
    if type(value) is not int or value <= 0:
        raise ExportError(f"{where}: {key} is {json.dumps(value)} in config.json; expected a whole number above 0")
    return value


def write_config(config: ModelConfig, layout: Layout) -> HFConfig:
    """Describe the model as config.json does, without dtype and special tokens."""
    written: HFConfig = {}
    for key, source in layout.fields.items():
        if isinstance(source, Field):
            source = attrgetter(source.ours)
        *blocks, name = key.split(".")
        block = written
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = source(config) if callable(source) else source
    return written


def read_config(hf_config: HFConfig, state: State, layout: Readable, where: str) -> ModelConfig:
    """Read the model that config.json describes. Raises ExportError."""
    check_values(hf_config, layout.must_be, where)
    fields = {**{key: source for key, source in layout.fields.items() if isinstance(source, Field)}, **layout.also_read}
    values: Values = {}
    for key, source in fields.items():
        is_needed = source.default is ...
        values[source.ours] = needed(hf_config, key, where) if is_needed else look_up(hf_config, key, source.default)
    layout.read_others(values, hf_config, state, where)
    blocks: dict[str, dict[str, Any]] = {"": {}, "attn_config": {}, "ffn_config": {}}
    for key, value in values.items():
        block, _, name = key.rpartition(".")
        blocks[block][name] = value
    attention, ffn = AttentionConfig(**blocks["attn_config"]), FFNConfig(**blocks["ffn_config"])
    return ModelConfig(**blocks[""], attn_config=attention, ffn_config=ffn)
