"""YAML files and `key=value` arguments -> a checked, frozen `TrainConfig`.

Owns precedence (defaults < files in order < arguments), hardware overlays, the words of LLM Foundry that we
refuse or ignore, and every check that needs nothing but the configuration itself. Whether the data, the
tokenizer and the machine agree with it is `preflight`'s question. No torch here: a wrong key is answered
in well under a second.
"""

import dataclasses
import difflib
import itertools
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from llmfoundry_lite.config.schema import TIME_UNITS, Duration, LoaderConfig, ModelConfig, TrainConfig
from llmfoundry_lite.errors import ConfigError

Refuse = typing.Callable[[str, str], typing.NoReturn]
"""(key, what is wrong with it) -> ConfigError, with the file that has the key."""


class Layer(NamedTuple):
    source: str
    """A file's name, or `command line`."""
    values: dict[str, Any]


class Invocation(NamedTuple):
    config: TrainConfig
    dry_run: bool
    notes: list[str]
    """One line for each key that was accepted without effect, or that may not mean what it seems to."""


def load_train_config(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Invocation:
    """Read the arguments of `scripts/train.py`: YAML files, `key=value` pairs, `--dry-run`.

    Raises ConfigError, in one line: the file, the key, what was given, what was expected, the nearest valid key.
    """
    flags = [argument for argument in arguments if argument.startswith("-")]
    for flag in flags:
        if flag != "--dry-run":
            raise ConfigError(f"command line: unknown option {flag}; expected YAML files, key=value pairs or --dry-run")
    layers = read_layers([argument for argument in arguments if argument not in flags])
    values = merge_layers(layers)
    notes = _drop_keys_without_effect(values, layers)
    _refuse_left_out_keys(values, layers)
    _fill_in_names(values, layers, environ)
    _check_kinds(values, layers)
    config = _build(TrainConfig, _gather_extras(values), "", layers)
    check_config(config, layers)
    notes += _surprises(config, layers)
    return Invocation(config, dry_run=bool(flags), notes=notes)


def build_block(cls: type, values: dict[str, Any], key: str) -> Any:
    """A block that was resolved before, from the configuration a checkpoint or a run directory keeps."""
    return _build(cls, values, key, ())


def check_world_size(config: TrainConfig, world_size: int) -> None:
    """Check what depends on the number of devices. Raises ConfigError."""
    batch, microbatch = config.global_train_batch_size, config.device_train_microbatch_size
    if batch % world_size:
        divisors = [str(n) for n in range(1, min(batch, 4 * world_size) + 1) if batch % n == 0]
        raise ConfigError(
            f"global_train_batch_size: {batch} cannot be shared evenly by {world_size} devices; "
            f"start with a number of devices that divides it ({', '.join(divisors)}) or change the batch size"
        )
    if microbatch is not None and microbatch > batch // world_size:
        raise ConfigError(
            f"device_train_microbatch_size: {microbatch} is more than the {batch // world_size} samples "
            f"each device gets ({batch} / {world_size} devices); set it to {batch // world_size} or less"
        )


# ------------------------------------------------------------------------------------- files and arguments


def read_layers(arguments: Sequence[str]) -> list[Layer]:
    """Files first, then the `key=value` arguments as one last layer."""
    layers: list[Layer] = []
    dotlist: list[str] = []
    for argument in arguments:
        if re.match(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*=", argument):
            dotlist.append(argument)
        elif argument.endswith((".yaml", ".yml")):
            layers.append(_read_file(argument))
        else:
            raise ConfigError(f"command line: {argument!r} is neither a .yaml file nor key=value")
    if not layers:
        raise ConfigError("command line: no YAML file given; try yamls/pretrain/mpt-quickstart.yaml")
    for layer in layers:
        _check_overlay(layer, is_first=layer is layers[0])
    for argument in dotlist:
        try:
            OmegaConf.from_dotlist([argument])
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"command line: cannot read {argument}: {_one_line(error)}") from None
    if dotlist:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(dotlist))
        layers.append(Layer("command line", typing.cast(dict[str, Any], values)))
        if "overlay" in layers[-1].values:
            raise ConfigError("command line: overlay: belongs into a YAML file, whose keys it limits")
    return layers


def merge_layers(layers: Sequence[Layer]) -> dict[str, Any]:
    """Lay later layers over earlier ones and resolve `${…}`."""
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(layer.values) for layer in layers))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        where = f"{_source_of(key, layers)}: {key or 'configuration'}"
        missing = re.search(r"Interpolation key '(.+)' not found", str(error))
        if missing:
            raise ConfigError(f"{where}: ${{{missing[1]}}} names nothing{_near_variable(missing[1], layers)}") from None
        unset = re.search(r"Environment variable '(.+)' not found", str(error))
        if unset:
            raise ConfigError(f"{where}: the environment variable {unset[1]} is not set; export it") from None
        raise ConfigError(f"{where}: {_one_line(error)}") from None
    return typing.cast(dict[str, Any], values)


def _near_variable(name: str, layers: Sequence[Layer]) -> str:
    known = sorted({key for layer in layers for key in _leaf_keys(layer.values)})
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean ${{{near[0]}}}?" if near else ""


def _read_file(name: str) -> Layer:
    if not Path(name).is_file():
        names = [path.name for path in Path(name).parent.glob("*.y*ml")]
        near = difflib.get_close_matches(Path(name).name, names, n=1, cutoff=0.6)
        raise ConfigError(
            f"{name}: no such file" + (f"; did you mean {Path(name).with_name(near[0])}?" if near else "")
        )
    try:
        values = OmegaConf.to_container(OmegaConf.load(name))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {_one_line(error)}") from None
    if not values:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name}: expected `key: value` at the top level, found {type(values).__name__}")
    return Layer(name, typing.cast(dict[str, Any], values))


HARDWARE_KEYS = (
    "device_train_microbatch_size",
    "device_eval_batch_size",
    "precision",
    "fsdp_config",
    "compile_config",
    "dist_timeout",
    "model.attn_config.attn_impl",
    "model.init_device",
    "train_loader.num_workers",
    "train_loader.prefetch_factor",
    "train_loader.pin_memory",
    "eval_loader.num_workers",
    "eval_loader.prefetch_factor",
    "eval_loader.pin_memory",
)
"""What a hardware overlay may set: how the run is computed here, never what is computed."""


def _check_overlay(layer: Layer, *, is_first: bool) -> None:
    kind = layer.values.pop("overlay", None)
    if kind is None:
        return
    if kind != "hardware":
        raise ConfigError(f"{layer.source}: overlay: {kind!r} is not a kind of overlay; expected hardware")
    if is_first:
        raise ConfigError(f"{layer.source}: a hardware overlay needs a run to lie on; name the run's YAML before it")
    for key in _leaf_keys(layer.values):
        if not any(key == allowed or key.startswith(allowed + ".") for allowed in HARDWARE_KEYS):
            raise ConfigError(
                f"{layer.source}: {key}: a hardware overlay may not change what is trained; "
                f"set it in the run's YAML (an overlay may set {', '.join(HARDWARE_KEYS)})"
            )


# -------------------------------------------------------------------------------- LLM Foundry's other words

WITHOUT_EFFECT = {
    "log_config": "the resolved configuration is always written to config.yaml",
    "save_overwrite": "a checkpoint is never overwritten",
    "spin_dataloaders": "no batch is ever replayed to find one's place",
    "save_filename": "checkpoints have fixed names",
    "save_latest_filename": "checkpoints have fixed names",
    "save_ignore_keys": "a checkpoint is always whole",
    "load_strict_model_weights": "weights are always checked strictly; load_ignore_keys names exceptions",
    "icl_subset_num_batches": "nothing is evaluated in context before icl_tasks is set",
    "icl_seq_len": "nothing is evaluated in context before icl_tasks is set",
    "flatten_metadata": "metadata is logged as it is",
    "n_gpus": "the launcher knows",
    "model.use_cache": "training keeps no cache",
    "model.use_pad_tok_in_ffn": "samples have no padding",
    "model.verbose": "`--dry-run` shows the model",
    "model.init_config.verbose": "`--dry-run` shows the model",
    "model.attn_config.fused_qkv": "q, k and v are one matrix",
    "model.attn_config.rope_theta": "there is no rope",
    "model.attn_config.rope_impl": "there is no rope",
    "model.attn_config.rope_dail_config": "there is no rope",
    "model.attn_config.rope_hf_config": "there is no rope",
    "fsdp_config.limit_all_gathers": "FSDP2 always does",
    "fsdp_config.use_orig_params": "FSDP2 always does",
    "fsdp_config.sync_module_states": "every rank makes the same weights",
    "fsdp_config.state_dict_type": "state is always saved sharded and loads anywhere",
    "fsdp_config.backward_prefetch": "FSDP2 always prefetches",
    "fsdp_config.forward_prefetch": "FSDP2 always prefetches",
    "fsdp_config.verbose": "`--dry-run` shows the sharding",
    "fsdp_config.flatten_parameters": "FSDP2 keeps parameters apart",
    "fsdp_config.load_monolith_rank0_only": "weights are read by the ranks that need them",
    "*.dataset.num_canonical_nodes": "sample order does not depend on nodes",
    "*.dataset.shuffle_algo": "there is one order, for every world size",
    "*.dataset.partition_algo": "there is one order, for every world size",
    "*.dataset.batching_method": "streams are mixed in proportion in every batch",
}
"""Accepted, ignored, and said so."""

LEFT_OUT = {
    "save_weights_only": "use `llmfoundry-lite checkpoint export`",
    "icl_tasks": "in-context evaluation is not in this version; remove it",
    "icl_tasks_str": "in-context evaluation is not in this version; remove it",
    "eval_gauntlet": "in-context evaluation is not in this version; remove it",
    "eval_gauntlet_str": "in-context evaluation is not in this version; remove it",
    "tp_config": "use fsdp_config",
    "code_paths": "put the folder on PYTHONPATH and name the object: python:package.module:Thing",
    "profiler": "run torch's profiler from a callback: callbacks: {python:package.module:Thing: {}}",
    "device_train_grad_accum": "use device_train_microbatch_size",
    "device_train_batch_size": "use global_train_batch_size",
    "expandable_segments": "set PYTORCH_CUDA_ALLOC_CONF in the environment",
    "max_split_size_mb": "set PYTORCH_CUDA_ALLOC_CONF in the environment",
    "cuda_load_lazy": "set CUDA_MODULE_LOADING in the environment",
    "train_subset_num_batches": "use max_duration",
    "only_hf_checkpoint": "use export_at_end",
    "only_composer_checkpoint": "use export_at_end",
    "model.block_overrides": "every block has the same shape here",
    "model.fc_type": "layers are torch's; remove it",
    "model.attn_config.rope": "use learned_pos_emb or alibi",
    "model.attn_config.attn_uses_sequence_id": "documents in a sample see each other; remove it",
    "model.attn_config.sliding_window_size": "attention is full; remove it",
    "model.attn_config.kv_n_heads": "use attn_type: multihead_attention",
    "model.attn_config.qk_gn": "use qk_ln",
    "model.attn_config.nope": "use learned_pos_emb: false",
    "model.attn_config.kv_dim": "k and v are as wide as d_model; remove it",
    "model.attn_config.attn_logit_softcapping": "use qk_ln or clip_qkv",
    "model.attn_config.attn_temperature_tuning": "use softmax_scale",
    "model.head_dim": "it is d_model / n_heads; remove it",
    "model.attention_bias": "use no_bias",
    "model.final_logit_softcapping": "use logit_scale",
    "model.embedding_fraction": "use model.init_config.emb_init_std, or remove it",
    "eval_loaders": "use eval_loader",
    "algorithms.alibi": "use model.attn_config.alibi: true",
    "algorithms.gated_linear_units": "use model.ffn_config.ffn_type: mptmlp",
    "algorithms.low_precision_layernorm": "use model.norm_type: low_precision_layernorm",
    "callbacks.hf_checkpointer": "use export_at_end",
    "callbacks.nan_monitor": "use on_non_finite",
    "callbacks.system_metrics_monitor": "memory and throughput are always logged; remove it",
    "callbacks.optimizer_monitor": "the gradient norm is always logged; remove it",
    "train_loader.dataset.packing_ratio": "fine-tuning loaders are left out; pack with `llmfoundry-lite data prepare`",
}
"""Refused by name, with what to use instead, unless the value says what we do anyway."""

HARMLESS_VALUES = {
    "model.fc_type": ("torch", {"name": "torch"}),
    "model.attn_config.rope": (False,),
    "model.attn_config.attn_uses_sequence_id": (False,),
    "model.attn_config.sliding_window_size": (-1,),
    "model.attn_config.qk_gn": (False,),
    "model.attn_config.nope": (False,),
    "model.embedding_fraction": (1, 1.0),
    "train_subset_num_batches": (-1,),
    "save_weights_only": (False,),
    "only_hf_checkpoint": (False,),
    "only_composer_checkpoint": (False,),
}

ALTERNATIVES = {
    "model.name": "LLM Foundry's Hugging Face models cannot be training targets here; use mpt_causal_lm",
    "model.ffn_config.ffn_type": "mixture of experts, GLU and TransformerEngine layers are left out; use mptmlp",
    "model.attn_config.attn_type": "grouped-query attention is left out; use multihead_attention",
    "train_loader.name": "fine-tuning loaders are left out; prepare text with `llmfoundry-lite data prepare`",
    "eval_loader.name": "fine-tuning loaders are left out; prepare text with `llmfoundry-lite data prepare`",
    "precision": "expected fp32, amp_bf16 or amp_fp16; fp8 is left out",
}
"""Said when one of these has a value outside its list."""

SYNONYMS = {
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "amp": "amp_fp16",
    "float32": "fp32",
    "adam": "adamw",
    "decoupled_lion": "decoupled_lionw",
    "mpt": "mpt_causal_lm",
    "triton": "flash",
}
"""Other libraries' words for our values."""


def _drop_keys_without_effect(values: dict[str, Any], layers: Sequence[Layer]) -> list[str]:
    notes = []
    for pattern, reason in WITHOUT_EFFECT.items():
        blocks = ("train_loader", "eval_loader") if pattern.startswith("*.") else ("*",)
        for key in (pattern.replace("*", block) for block in blocks):
            if _get(values, key)[0]:
                _pop(values, key)
                notes.append(f"{_source_of(key, layers)}: {key} has no effect: {reason}")
    return notes


def _refuse_left_out_keys(values: dict[str, Any], layers: Sequence[Layer]) -> None:
    for key, instead in LEFT_OUT.items():
        found, value = _get(values, key)
        if not found:
            continue
        if value is None or value in HARMLESS_VALUES.get(key, ()):
            _pop(values, key)
            continue
        raise ConfigError(f"{_source_of(key, layers)}: {key}: LLM Foundry's option is left out here; {instead}")
    for key in ("device_train_microbatch_size", "device_eval_batch_size"):
        if values.get(key) == "auto":
            raise ConfigError(
                f"{_source_of(key, layers)}: {key}: auto is left out here; "
                f"give a number (`--dry-run` estimates the memory it needs)"
            )


def _check_kinds(values: dict[str, Any], layers: Sequence[Layer]) -> None:
    """A block of a kind we do not have is refused as such, before its keys are found unknown one by one."""
    for key in ALTERNATIVES:
        found, value = _get(values, key)
        if found and value is not None:
            _check_choice(key, value, layers)


def _fill_in_names(values: dict[str, Any], layers: Sequence[Layer], environ: Mapping[str, str]) -> None:
    """Every rank must come to the same names, so nothing here is random."""
    name = values.get("run_name") or environ.get("RUN_NAME") or Path(layers[0].source).stem
    if isinstance(name, bool) or not re.fullmatch(r"\w[\w.\-]*", str(name)):
        raise ConfigError(
            f"{_source_of('run_name', layers)}: run_name: {name!r} given, expected the name of a folder: "
            f"letters and digits, and . _ - after the first"
        )
    values["run_name"] = str(name)
    values["run_folder"] = str(values.get("run_folder") or "runs/{run_name}").replace("{run_name}", str(name))
    if values.get("save_folder"):
        values["save_folder"] = str(values["save_folder"]).replace("{run_name}", str(name))


def _gather_extras(values: dict[str, Any]) -> dict[str, Any]:
    """Move what belongs to a user's own `python:` object out of the way of the key checks."""
    for block in ("optimizer", "train_loader", "eval_loader"):
        section = values.get(block)
        if isinstance(section, dict) and str(section.get("name", "")).startswith("python:"):
            known = {"name", "lr", "dataset", "num_workers", "drop_last", "kwargs"}
            extra = {key: section.pop(key) for key in list(section) if key not in known}
            section["kwargs"] = {**section.get("kwargs", {}), **extra}
    callbacks = values.get("callbacks")
    if isinstance(callbacks, dict):
        extra = {key: callbacks.pop(key) or {} for key in list(callbacks) if key.startswith("python:")}
        if extra:
            callbacks["extra"] = {**callbacks.get("extra", {}), **extra}
    return values


# --------------------------------------------------------------------------------------- dict -> dataclass


def _build(cls: type, values: Any, path: str, layers: Sequence[Layer]) -> Any:
    """Fill a dataclass from a mapping, strictly."""
    if not isinstance(values, dict):
        raise _wrong_type(path, values, "a block of `key: value` lines", layers)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise _unknown_key(key, path, fields, layers)
    arguments = {}
    for name, field in fields.items():
        key = f"{path}.{name}" if path else name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in values or (values[name] is None and not _allows_none(hints[name])):
            if required:
                raise ConfigError(f"{_source_of(path, layers)}: {key}: missing; expected {_expected(key, hints[name])}")
            if name in values and field.default is not dataclasses.MISSING:
                raise ConfigError(
                    f"{_source_of(key, layers)}: {key}: nothing given, expected {_expected(key, hints[name])}; "
                    f"remove the line for the default, {field.default}"
                )
            continue
        arguments[name] = _convert(hints[name], values[name], key, layers)
    return cls(**arguments)


def _convert(hint: Any, value: Any, key: str, layers: Sequence[Layer]) -> Any:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in parameters:
            return None
        options = [option for option in parameters if option is not type(None)]
        exact = [option for option in options if isinstance(option, type) and type(value) is option]
        for option in exact + options:
            try:
                return _convert(option, value, key, layers)
            except ConfigError:
                if len(options) == 1:
                    raise
        raise _wrong_type(key, value, _expected(key, hint), layers)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, key, layers)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(key, value, "a block of `key: value` lines", layers)
        return {k: _convert(parameters[1], v, f"{key}.{k}", layers) for k, v in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(parameters)):
            raise _wrong_type(key, value, _describe(hint), layers)
        return origin(_convert(parameters[0], item, f"{key}[{i}]", layers) for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value == int(value):
        return int(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if type(value) is hint:
        return value
    raise _wrong_type(key, value, _describe(hint), layers)


def _expected(key: str, hint: Any) -> str:
    return _expected_duration(key) if key in DURATIONS else _describe(hint)


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if not (option is int and float in typing.get_args(hint))]
        return " or ".join(_describe(option) for option in options)
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(typing.get_args(hint))} numbers"
    if typing.get_origin(hint) is list:
        return "a list"
    return "a block of `key: value` lines"


def _allows_none(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _wrong_type(key: str, value: Any, expected: str, layers: Sequence[Layer]) -> ConfigError:
    return ConfigError(f"{_source_of(key, layers)}: {key}: {value!r} given, expected {expected}")


NICKNAMES = {
    "learning_rate": "lr",
    "batch_size": "global_train_batch_size",
    "microbatch_size": "device_train_microbatch_size",
}
"""Other libraries' words, too far from ours for spelling to find."""


def _unknown_key(key: str, path: str, fields: Mapping[str, Any], layers: Sequence[Layer]) -> ConfigError:
    full = f"{path}.{key}" if path else key
    word = NICKNAMES.get(key, key)
    everywhere = _schema_keys(TrainConfig)
    elsewhere = [other for other in everywhere if _last(other) == word]
    near = difflib.get_close_matches(word, fields, n=1, cutoff=0.6)
    far = difflib.get_close_matches(word, [_last(other) for other in everywhere], n=1, cutoff=0.8)
    if near and (near[0] == word or not elsewhere):
        hint = f"did you mean {path + '.' if path else ''}{near[0]}?"
    elif path == "callbacks":
        hint = "one of your own is named by its import path, python:package.module:Class"
    elif path == "loggers":
        hint = f"valid keys here: {', '.join(fields)}; metrics.jsonl is always written"
    elif elsewhere:
        hint = f"did you mean {max(elsewhere, key=lambda other: _num_shared_parts(other, full))}?"
    elif far:
        hint = f"did you mean {next(other for other in everywhere if _last(other) == far[0])}?"
    else:
        hint = f"valid keys here: {', '.join(fields) or 'none'}"
    return ConfigError(f"{_source_of(full, layers)}: {full}: unknown key; {hint}")


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _num_shared_parts(key: str, other: str) -> int:
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _schema_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        keys.append(prefix + name)
        for option in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(option):
                keys += _schema_keys(typing.cast(type, option), f"{prefix}{name}.")
    return keys


# ------------------------------------------------------------------------------- checks within the configuration

CHOICES = {
    "model.name": ("mpt_causal_lm",),
    "model.norm_type": ("low_precision_layernorm", "layernorm"),
    "model.loss_fn": ("auto", "fused_crossentropy", "torch_crossentropy"),
    "model.init_device": ("meta", "cpu", "mixed"),
    "model.attn_config.attn_type": ("multihead_attention",),
    "model.attn_config.attn_impl": ("auto", "sdpa", "torch", "flash"),
    "model.ffn_config.ffn_type": ("mptmlp",),
    "model.init_config.name": (
        *("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
        *("small_init_", "neox_init_", "baseline_", "default_"),
    ),
    "model.init_config.fan_mode": ("fan_in", "fan_out"),
    "model.init_config.init_nonlinearity": ("relu", "leaky_relu", "linear", "tanh", "sigmoid", "selu"),
    "train_loader.name": ("text", "python:"),
    "eval_loader.name": ("text", "python:"),
    "optimizer.name": ("decoupled_adamw", "adamw", "lion", "decoupled_lionw", "python:"),
    "scheduler.name": (
        *("constant_with_warmup", "cosine_with_warmup"),
        *("linear_decay_with_warmup", "inv_sqrt_with_warmup"),
    ),
    "algorithms.gradient_clipping.clipping_type": ("norm", "value"),
    "fsdp_config.sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"),
    "fsdp_config.mixed_precision": ("PURE", "DEFAULT", "FULL"),
    "precision": ("fp32", "amp_bf16", "amp_fp16"),
    "on_non_finite": ("stop", "skip"),
    "python_log_level": ("debug", "info", "warning", "error", "critical"),
}

POSITIVE = (
    *("model.d_model", "model.n_heads", "model.n_layers", "model.expansion_ratio", "model.max_seq_len"),
    *("model.vocab_size", "model.norm_eps", "model.attn_config.clip_qkv", "model.attn_config.softmax_scale"),
    *("model.attn_config.alibi_bias_max", "max_seq_len", "global_train_batch_size", "device_eval_batch_size"),
    *("device_train_microbatch_size", "optimizer.lr", "optimizer.eps", "dist_timeout", "max_skipped_batches"),
    *("algorithms.gradient_clipping.clipping_threshold", "callbacks.speed_monitor.window_size"),
    *("model.init_config.init_std", "train_loader.prefetch_factor", "eval_loader.prefetch_factor"),
    *("fsdp_config.data_parallel_shard_degree", "train_loader.dataset.max_seq_len", "eval_loader.dataset.max_seq_len"),
)

NON_NEGATIVE = (
    *("seed", "optimizer.weight_decay", "model.init_config.emb_init_std", "model.init_config.init_gain"),
    *("scheduler.alpha_i", "scheduler.alpha_f", "scheduler.alpha_f_decay", "scheduler.alpha_f_cooldown"),
    *("train_loader.num_workers", "train_loader.timeout", "train_loader.dataset.shuffle_seed"),
    *("eval_loader.num_workers", "eval_loader.timeout", "eval_loader.dataset.shuffle_seed"),
)

PROBABILITIES = ("model.attn_config.attn_pdrop", "model.resid_pdrop", "model.emb_pdrop")

DURATIONS = {
    "max_duration": TIME_UNITS,
    "eval_interval": TIME_UNITS,
    "save_interval": TIME_UNITS,
    "stop_after": TIME_UNITS,
    "console_log_interval": ("ba", "ep"),
    "scheduler.t_warmup": (*TIME_UNITS, "dur"),
    "scheduler.t_max": (*TIME_UNITS, "dur"),
    "scheduler.t_scale": (*TIME_UNITS, "dur"),
    "scheduler.t_cooldown": (*TIME_UNITS, "dur"),
}

MAY_BE_ZERO = ("scheduler.t_warmup", "scheduler.t_cooldown")


def _expected_duration(key: str) -> str:
    return f"a number with a unit, {_or(DURATIONS[key])}, such as 100ba"


def check_config(config: TrainConfig, layers: Sequence[Layer] = ()) -> None:
    """Check everything that the configuration alone can tell. Raises ConfigError."""

    def refuse(key: str, message: str) -> typing.NoReturn:
        raise ConfigError(f"{_source_of(key, layers)}: {key}: {message}")

    for key in CHOICES:
        value = _attribute(config, key)
        if value is not None:
            _check_choice(key, value, layers)
    for key in POSITIVE:
        value = _attribute(config, key)
        if value is not None and not value > 0:
            refuse(key, f"{value!r} given, expected a number above 0")
    for key in NON_NEGATIVE:
        value = _attribute(config, key)
        if value is not None and value < 0:
            refuse(key, f"{value!r} given, expected 0 or more")
    for key in PROBABILITIES:
        value = _attribute(config, key)
        if not 0 <= value < 1:
            refuse(key, f"{value!r} given, expected a probability, 0 <= p < 1")
    for key in DURATIONS:
        value = _attribute(config, key)
        if value is not None and not (key == "eval_interval" and value == 0):
            _check_duration(key, value, refuse)

    _check_model(config.model, refuse)
    if config.max_seq_len > config.model.max_seq_len:
        refuse("max_seq_len", f"{config.max_seq_len} is more than model.max_seq_len, {config.model.max_seq_len}")
    for block in ("train_loader", "eval_loader"):
        loader = getattr(config, block)
        if loader is not None and loader.name == "text":
            _check_loader(loader, block, config, refuse)
    model_max_length = config.tokenizer.kwargs.get("model_max_length")
    if isinstance(model_max_length, int) and model_max_length < config.max_seq_len:
        refuse(
            "tokenizer.kwargs.model_max_length", f"{model_max_length} is less than max_seq_len, {config.max_seq_len}"
        )
    if config.eval_subset_num_batches < -1 or config.eval_subset_num_batches == 0:
        refuse("eval_subset_num_batches", f"{config.eval_subset_num_batches} given, expected -1 (all) or a count")
    for beta in config.optimizer.betas or ():
        if not 0 <= beta < 1:
            refuse("optimizer.betas", f"{beta} given, expected 0 <= beta < 1")
    microbatch, batch = config.device_train_microbatch_size, config.global_train_batch_size
    if microbatch is not None and microbatch > batch:
        refuse("device_train_microbatch_size", f"{microbatch} is more than global_train_batch_size, {batch}")
    fsdp = config.fsdp_config
    if fsdp and fsdp.data_parallel_shard_degree is not None and fsdp.sharding_strategy != "HYBRID_SHARD":
        refuse(
            "fsdp_config.data_parallel_shard_degree",
            f"only HYBRID_SHARD uses it, and sharding_strategy is {fsdp.sharding_strategy}; change that or remove this",
        )
    for path in config.callbacks.extra:
        _check_import_path("callbacks", path, layers)
    warmup, end = Duration.parse(config.scheduler.t_warmup), Duration.parse(config.scheduler.t_max)
    if warmup.unit == end.unit and warmup.value > end.value:
        refuse("scheduler.t_warmup", f"{warmup} is more than t_max, {end}; the warm-up is part of the schedule")


def _check_duration(key: str, value: str | int, refuse: Refuse) -> None:
    try:
        duration = Duration.parse(value, DURATIONS[key])
    except ValueError as error:
        refuse(key, f"{value!r} given, expected {error}")
    if duration.value == 0 and key not in MAY_BE_ZERO:
        never = ", or 0 to never evaluate" if key == "eval_interval" else ""
        refuse(key, f"{value!r} given, expected more than 0{never}")


def _surprises(config: TrainConfig, layers: Sequence[Layer]) -> list[str]:
    """What is allowed, and perhaps not meant."""
    notes = []
    for key in ("max_duration", "eval_interval"):
        value = _attribute(config, key)
        given = any(_get(layer.values, key)[0] for layer in layers)
        if given and isinstance(value, int) and value > 0:
            notes.append(f"{_source_of(key, layers)}: {key}: {value} counts epochs; {value} batches are {value}ba")
    run = Duration.parse(config.max_duration)
    for key, meaning in (("t_warmup", "the learning rate never reaches lr"), ("t_max", "the schedule does not end")):
        span = Duration.parse(getattr(config.scheduler, key))
        if span.value > (1 if span.unit == "dur" else run.value if span.unit == run.unit else math.inf):
            key = f"scheduler.{key}"
            notes.append(f"{_source_of(key, layers)}: {key}: {span} is longer than the run, {run}: {meaning}")
    return notes


def _check_choice(key: str, value: Any, layers: Sequence[Layer]) -> None:
    choices = CHOICES[key]
    if value in choices:
        return
    if "python:" in choices and str(value).startswith("python:"):
        _check_import_path(key, value, layers)
        return
    hint = ALTERNATIVES.get(key) or f"expected {_or(choices)}"
    nearest = _nearest_choice(str(value), choices, cutoff=0.85 if key in ALTERNATIVES else 0.75)
    if nearest:
        hint = f"did you mean {nearest}?" + ("" if key in ALTERNATIVES else f" ({hint})")
    hint = hint.replace("python:", "python:package.module:Thing")
    raise ConfigError(f"{_source_of(key, layers)}: {key}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str | None:
    if SYNONYMS.get(value.lower()) in choices:
        return SYNONYMS[value.lower()]
    begun = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    near = begun if len(begun) == 1 else difflib.get_close_matches(value, choices, n=1, cutoff=cutoff)
    return near[0] if near else None


def _or(options: Sequence[str]) -> str:
    *others, last = options
    return f"{', '.join(others)} or {last}" if others else last


def _check_import_path(key: str, value: str, layers: Sequence[Layer]) -> None:
    if not re.fullmatch(r"python:\w+(\.\w+)*:\w+", value):
        raise ConfigError(
            f"{_source_of(key, layers)}: {key}: {value!r} given, expected an import path, python:package.module:Thing"
        )


def _check_model(model: ModelConfig, refuse: Refuse) -> None:
    if model.d_model % model.n_heads:
        near = [n for n in range(1, model.d_model + 1) if model.d_model % n == 0]
        nearest = min(near, key=lambda n: abs(n - model.n_heads))
        refuse(
            "model.n_heads",
            f"{model.n_heads} does not divide d_model, {model.d_model}; the nearest that does is {nearest}",
        )
    if not model.tie_word_embeddings:
        refuse(
            "model.tie_word_embeddings", "false is left out here: input and output embeddings are one matrix; remove it"
        )
    ffn_dim = model.d_model * model.expansion_ratio
    if ffn_dim != int(ffn_dim):
        refuse(
            "model.expansion_ratio",
            f"{model.expansion_ratio} x d_model, {model.d_model}, is no whole number; "
            f"the nearest that gives one is {round(ffn_dim) / model.d_model}",
        )
    if isinstance(model.logit_scale, str) and model.logit_scale != "inv_sqrt_d_model":
        refuse("model.logit_scale", f"{model.logit_scale!r} given, expected a number or inv_sqrt_d_model")
    if model.logit_scale == 0:
        refuse(
            "model.logit_scale", "0 given, which makes every token as likely as any other; remove it or give a number"
        )
    init = model.init_config
    if init.name == "baseline_" and init.init_std is None:
        refuse("model.init_config.init_std", "missing; baseline_ draws weights from N(0, init_std)")
    divide = init.init_div_is_residual
    is_text = isinstance(divide, str) and not divide.replace(".", "", 1).isdigit()
    if is_text or (not isinstance(divide, bool) and not float(divide) > 0):
        refuse("model.init_config.init_div_is_residual", f"{divide!r} given, expected true, false or a number above 0")
    for key in ("emb_init_std", "emb_init_uniform_lim"):
        if init.name == "default_" and getattr(init, key) is not None:
            refuse(
                f"model.init_config.{key}", "default_ draws embeddings from N(0, 1); remove it or use another scheme"
            )
    limit = init.emb_init_uniform_lim
    is_pair = isinstance(limit, list) and len(limit) == 2 and all(map(_is_number, limit)) and limit[0] <= limit[1]
    if not (limit is None or _is_number(limit) or is_pair):
        refuse(
            "model.init_config.emb_init_uniform_lim",
            f"{limit!r} given, expected a number, or the lower and the upper limit in a list",
        )


def _check_loader(loader: LoaderConfig, block: str, config: TrainConfig, refuse: Refuse) -> None:
    dataset = loader.dataset
    if dataset.streams and (dataset.local or dataset.remote):
        refuse(
            f"{block}.dataset", "both streams and local/remote given; put each folder under streams, or use no streams"
        )
    if not dataset.streams and not dataset.local:
        refuse(
            f"{block}.dataset.local", "missing; expected the folder of an MDS data set (a remote one is cached there)"
        )
    for name, stream in dataset.streams.items():
        if not stream.local:
            refuse(
                f"{block}.dataset.streams.{name}.local", "missing; expected the folder this stream is read or cached in"
            )
        given = {key: getattr(stream, key) for key in ("proportion", "repeat", "choose")}
        given = {key: value for key, value in given.items() if value is not None}
        if len(given) > 1:
            refuse(f"{block}.dataset.streams.{name}", f"{' and '.join(given)} given, expected one of them at most")
        for key, value in given.items():
            if not value > 0:
                refuse(f"{block}.dataset.streams.{name}.{key}", f"{value!r} given, expected a number above 0")
    if len({stream.proportion is None for stream in dataset.streams.values()}) == 2:
        refuse(f"{block}.dataset.streams", "some streams have a proportion and some do not; give it to all or to none")
    if dataset.max_seq_len is not None and dataset.max_seq_len > config.model.max_seq_len:
        refuse(
            f"{block}.dataset.max_seq_len",
            f"{dataset.max_seq_len} is more than model.max_seq_len, {config.model.max_seq_len}",
        )
    for key, units, example in (("epoch_size", "kmb", "100k"), ("cache_limit", "kmgt", "100gb")):
        value = getattr(dataset, key)
        is_text = isinstance(value, str) and re.fullmatch(rf"[0-9][0-9_.]*[{units}]?b?", value.lower())
        if not (value is None or is_text or (isinstance(value, int) and value > 0)):
            refuse(f"{block}.dataset.{key}", f"{value!r} given, expected a number above 0, such as {example}")


# ---------------------------------------------------------------------------------------------- small tools


def _source_of(key: str, layers: Sequence[Layer]) -> str:
    """The last layer that has `key`, or the nearest block around it."""
    parts = re.sub(r"\[\d+\]", "", key).split(".") if key else []
    for length in range(len(parts), 0, -1):
        for layer in reversed(layers):
            if _get(layer.values, ".".join(parts[:length]))[0]:
                return layer.source
    return layers[0].source if layers else "configuration"


def _get(values: Any, key: str) -> tuple[bool, Any]:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False, None
        values = values[part]
    return True, values


def _pop(values: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        values = values[part]
    values.pop(last)


def _leaf_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            keys += _leaf_keys(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + key)
    return keys


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _attribute(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part, None)
    return config


def _one_line(error: BaseException) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split("full_key")[0].split())
