"""Plain dictionaries -> the dataclasses of a schema, strictly: every key known, every value of its type and range.

An error names the file, the key, what was given, what was expected and the nearest valid key.
"""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.blocks import missing_blocks
from llmfoundry_lite.config.fields import Key, Setting, is_number, join, keys_of, schema_keys
from llmfoundry_lite.config.layers import Layer, naming_source, source_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.written import hint_at_number
from llmfoundry_lite.errors import ConfigError, either, nearest


def build_block(cls: type, values: Any, path: str = "", layers: Sequence[Layer] = ()) -> Any:
    """Fill the dataclass `cls` from a mapping that stands at `path`; `layers` name the files. Raises ConfigError."""
    refuse_unknown_keys(cls, values, path, layers)
    with naming_source(layers):
        return _fill(cls, values, path)


def refuse_unknown_keys(cls: type, values: Any, path: str = "", layers: Sequence[Layer] = ()) -> None:
    """Raise ConfigError that names every key, at any depth, that `cls` does not have.

    A block of a run that a companion would bring is answered with the companion's name; null leaves it out anywhere.
    """
    is_run = cls is TrainConfig and isinstance(values, dict)
    for name in missing_blocks(values) if is_run else ():
        raise ConfigError(f"{source_of(name, layers)}: {companions.missing(name)}")
    absent = companions.list_missing("blocks") if is_run else ()
    unknown = [
        (join(inside, name), _suggest(str(name), inside, keys_of(block)))
        for block, inside, name, _ in _walk(cls, values, path)
        if name not in keys_of(block) and not (block is cls and name in absent)
    ]
    refuse_keys(unknown, layers, "unknown key; ", "unknown keys")


def refuse_keys(found: Sequence[tuple[str, str]], layers: Sequence[Layer], one: str, several: str) -> None:
    """Raise ConfigError for the keys in `found`, each with what to do instead, if there are any.

    It reads `run.yaml: a: unknown key; …`, or `2 unknown keys: run.yaml: a (…), b (…)`, file by file.
    """
    if len(found) == 1:
        key, hint = found[0]
        raise ConfigError(f"{source_of(key, layers)}: {key}: {one}{hint}")
    by_source: dict[str, list[str]] = {}
    for key, hint in found:
        by_source.setdefault(source_of(key, layers), []).append(f"{key} ({hint})")
    if found:
        parts = [f"{source}: {', '.join(keys)}" for source, keys in by_source.items()]
        raise ConfigError(f"{len(found)} {several}: {'; '.join(parts)}")


def refuse_other_kinds(values: Any) -> None:
    """Raise ConfigError for a block of a kind that we do not have, instead of one for each of its unknown keys."""
    for block, path, name, value in _walk(TrainConfig, values):
        key = keys_of(block).get(name)
        if key is not None and key.setting.instead and value is not None:
            _check_choice(join(path, name), value, key.setting)


def _walk(cls: type, values: Any, path: str = "") -> Iterator[tuple[type, str, str, Any]]:
    """Yield the block, its path, the name and the value of each key, at any depth, wherever there is a block."""
    for name, value in values.items() if isinstance(values, dict) else ():
        yield cls, path, name, value
        if key := keys_of(cls).get(name):
            for inside, block in key.blocks(join(path, name), value):
                yield from _walk(typing.cast(type, key.block), block, inside)


# ------------------------------------------------------------------------------------------------- types


def _fill(cls: type, values: Any, path: str) -> Any:
    if not isinstance(values, dict):
        raise _wrong(path, values, "a block of `key: value` lines")
    arguments = {}
    for name, key in keys_of(cls).items():
        place = join(path, name)
        expected = key.setting.expected or _describe(key.hint)
        if name in values and (values[name] is not None or key.allows_none):
            value = _convert(key.hint, values[name], place, expected)
            _check(place, value, key.setting)
            arguments[name] = _parse(place, value, key.setting)
        elif key.default is dataclasses.MISSING:
            raise ConfigError(f"{place}: missing; expected {expected}")
        elif name in values and not isinstance(key.default, dict | list):
            default = f"remove the line for the default, {key.default}"
            raise ConfigError(f"{place}: nothing given, expected {expected}; {default}")
    own = {one.name for one in dataclasses.fields(cls)}
    brought = {name: arguments.pop(name, None) for name in keys_of(cls) if name not in own}
    return cls(**arguments, **({"blocks": brought} if brought else {}))


def _convert(hint: Any, value: Any, place: str, expected: str) -> Any:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (value is None and type(None) in parameters):
        return value
    if origin in (types.UnionType, typing.Union):
        options = [option for option in parameters if option is not type(None)]
        exact = [option for option in options if isinstance(option, type) and type(value) is option]
        for option in exact + options:
            try:
                return _convert(option, value, place, _describe(option))
            except ConfigError:
                if len(options) == 1:
                    raise
    elif dataclasses.is_dataclass(hint):
        return _fill(typing.cast(type, hint), value, place)
    elif origin is dict and isinstance(value, dict):
        inner = parameters[1]
        return {k: _convert(inner, v, f"{place}.{k}", _describe(inner)) for k, v in value.items()}
    elif origin in (list, tuple) and isinstance(value, list) and (origin is list or len(value) == len(parameters)):
        inner = parameters[0]
        return origin(_convert(inner, v, f"{place}[{i}]", _describe(inner)) for i, v in enumerate(value))
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    elif type(value) is hint or (hint is str and isinstance(value, str)):
        return value
    wrong = _wrong(place, value, expected)
    raise (
        ConfigError(f"{wrong}{hint_at_number(value)}")
        if isinstance(value, str) and hint in (int, float, bool)
        else wrong
    )


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    options = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_describe(option) for option in options if not (option is int and float in options))
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(options)} numbers"
    return "a list" if typing.get_origin(hint) is list else "a block of `key: value` lines"


def _wrong(place: str, value: Any, expected: Any) -> ConfigError:
    return ConfigError(f"{place}: {value!r} given, expected {expected}")


# ------------------------------------------------------------------------------------------------ values


def _check(place: str, value: Any, setting: Setting) -> None:
    """Check a value by the metadata of its key, and that its numbers are finite and fit. Raises ConfigError."""
    if value is None:
        return
    for index, number in enumerate(value) if isinstance(value, list | tuple) else [(None, value)]:
        where = place if index is None else f"{place}[{index}]"
        if is_number(number) and isinstance(number, int) and abs(number) >= 2**63:
            raise _wrong(where, number, "a whole number of 64 bits")
        if is_number(number) and not math.isfinite(number):
            raise _wrong(where, number, "a finite number")
    if setting.choices:
        _check_choice(place, value, setting)
    for item in value if isinstance(value, tuple) else [value]:
        for check in setting.checks:
            try:
                check(item)
            except ValueError as error:
                raise _wrong(place, item, error) from None


def _parse(place: str, value: Any, setting: Setting) -> Any:
    """Return what the configuration holds for a value of a YAML, such as a `Duration` for text. Raises ConfigError."""
    if setting.parse is None or value is None:
        return value
    try:
        return setting.parse(value)
    except ValueError as error:
        raise _wrong(place, value, error) from None


OTHER_WORDS = {
    "amp_bf16": ("bf16", "bfloat16"),
    "amp_fp16": ("fp16", "float16", "amp"),
    "fp32": ("float32",),
    "adamw": ("adam",),
    "decoupled_lionw": ("decoupled_lion",),
    "mpt_causal_lm": ("mpt",),
    "flash": ("triton",),
    "ZERO_1": ("zero1", "zero-1"),
    "SHARD_GRAD_OP": ("zero2", "zero-2", "zero_2"),
    "FULL_SHARD": ("zero3", "zero-3", "zero_3"),
    "warmup_stable_decay": ("wsd",),
}
"""Value here -> words of other libraries for it."""


def _check_choice(place: str, value: Any, setting: Setting) -> None:
    choices, instead = setting.choices, setting.instead
    if value in choices:
        return
    if "python:" in choices and str(value).startswith("python:"):
        check_import_path(place, value)
        return
    hint = instead or f"expected {either(choices)}"
    if nearest := _nearest_choice(str(value), choices, cutoff=0.85 if instead else 0.75):
        hint = f"did you mean {nearest}?" + ("" if instead else f" ({hint})")
    hint = hint.replace("python:", "python:package.module:Thing")
    raise ConfigError(f"{place}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str:
    for ours in choices:
        if value.lower() in OTHER_WORDS.get(ours, ()):
            return ours
    begun = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    return begun[0] if len(begun) == 1 else nearest(value, choices, cutoff)


def check_import_path(place: str, value: str) -> None:
    if not re.fullmatch(r"python:\w+(\.\w+)*:\w+", value):
        raise _wrong(place, value, "an import path, python:package.module:Thing")


# ------------------------------------------------------------------------------------------ unknown keys


MAX_KEYS_LISTED = 24
NICKNAMES = {
    "learning_rate": "lr",
    "batch_size": "global_train_batch_size",
    "microbatch_size": "device_train_microbatch_size",
}
"""Words of other libraries -> our keys, where the spelling is too different to guess by."""


def _suggest(name: str, path: str, keys: Mapping[str, Key]) -> str:
    """Suggest the key that was probably meant, or list the valid ones."""
    full, word = join(path, name), NICKNAMES.get(name, name)
    everywhere = [other for other in _every_key() if other != full]  # without a training's key in an evaluation
    if path:
        everywhere = [other for other in everywhere if "." not in other or _section(other) == _section(path)]
    elsewhere = [other for other in everywhere if _last(other) == word]
    near = nearest(word, keys)
    if near and (near == word or not elsewhere):
        return f"did you mean {join(path, near)}?"
    if path == "callbacks":
        return "one of your own is named by its import path, python:package.module:Class"
    if path == "loggers":
        return f"valid keys here: {', '.join(keys)}; metrics.jsonl is always written"
    far = word if elsewhere else nearest(word, map(_last, everywhere), cutoff=0.8)
    if far:
        found = [other for other in everywhere if _last(other) == far]
        shared = [len(commonprefix([other.split("."), path.split(".")])) for other in found]  # noqa: RUF071 - of lists
        return f"did you mean {min(zip(shared, found, strict=True), key=lambda one: (-one[0], one[1].count('.')))[1]}?"
    if len(keys) > MAX_KEYS_LISTED:
        return "nothing here is spelled like it; a value of your own, for ${…}, stands under variables"
    return f"valid keys here: {', '.join(keys) or 'none'}"


def _section(key: str) -> str:
    """Return the top-level block of a key. All blocks named *_config count as one."""
    block = key.partition(".")[0]
    return "_config" if block.endswith("_config") else block


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _every_key() -> list[str]:
    """Return the keys of a training YAML, each block before its own keys."""
    keys = (key.replace(".*", "").split(".") for key in schema_keys(TrainConfig))
    return list(dict.fromkeys(".".join(key[: end + 1]) for key in keys for end in range(len(key))))
