"""Plain dictionaries -> the dataclasses of `schema`, strictly: every key known, every value of its type.

Our own rather than OmegaConf's structured merge, so that an error can name the file, the key, what was given, what
was expected and the nearest valid key.
"""

import contextlib
import dataclasses
import difflib
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmfoundry_lite.config.changes import schema_keys
from llmfoundry_lite.config.check_values import DURATIONS
from llmfoundry_lite.config.layers import Layer, source_of
from llmfoundry_lite.config.schema import describe_span
from llmfoundry_lite.errors import ConfigError


def build_block(cls: type, values: Any, path: str = "", layers: Sequence[Layer] = ()) -> Any:
    """Fill the dataclass `cls` from a mapping that stands at `path`; `layers` say where. Raises ConfigError."""
    refuse_unknown_keys(cls, values, path, layers)
    return _fill(cls, values, path, layers)


def refuse_unknown_keys(cls: type, values: Any, path: str = "", layers: Sequence[Layer] = ()) -> None:
    """Raises ConfigError that names every key, at any depth, that `cls` does not have."""
    unknown = list(_find_unknown_keys(cls, values, path))
    if len(unknown) == 1:
        (key, hint) = unknown[0]
        raise ConfigError(f"{source_of(key, layers)}: {key}: unknown key; {hint}")
    if unknown:
        raise ConfigError(name_all(unknown, layers, "unknown keys"))


def name_all(found: Sequence[tuple[str, str]], layers: Sequence[Layer], what: str) -> str:
    """`run.yaml: 2 unknown keys: a (…), b (…)`, for (key, what to do instead) of each, file by file."""
    by_source: dict[str, list[str]] = {}
    for key, hint in found:
        by_source.setdefault(source_of(key, layers), []).append(f"{key} ({hint})")
    parts = [f"{source}: {', '.join(keys)}" for source, keys in by_source.items()]
    return f"{len(found)} {what}: {'; '.join(parts)}"


def _find_unknown_keys(cls: type, values: Any, path: str) -> Iterator[tuple[str, str]]:
    """(key, what was probably meant). A block of a wrong type is for `_fill` to refuse."""
    if not isinstance(values, dict):
        return
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        full = f"{path}.{key}" if path else str(key)
        if key not in hints:
            yield full, _suggest(str(key), path, hints)
            continue
        for option in (hints[key], *typing.get_args(hints[key])):
            if dataclasses.is_dataclass(option):
                for path_inside, block in _blocks(hints[key], value, full):
                    yield from _find_unknown_keys(typing.cast(type, option), block, path_inside)


def _blocks(hint: Any, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, block) of each of a block of blocks, of a list of them, or of the one that `value` is."""
    if typing.get_origin(hint) is dict and isinstance(value, dict):
        yield from ((f"{path}.{name}", block) for name, block in value.items())
    elif typing.get_origin(hint) is list and isinstance(value, list):
        yield from ((f"{path}[{number}]", block) for number, block in enumerate(value))
    else:
        yield path, value


def _fill(cls: type, values: Any, path: str, layers: Sequence[Layer]) -> Any:
    if not isinstance(values, dict):
        raise _wrong_type(path, values, "a block of `key: value` lines", layers)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments = {}
    for name, field in fields.items():
        key = f"{path}.{name}" if path else name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in values or (values[name] is None and not _allows_none(hints[name])):
            if required:
                raise ConfigError(f"{source_of(path, layers)}: {key}: missing; expected {_expected(key, hints[name])}")
            if name in values and field.default is not dataclasses.MISSING:
                raise ConfigError(
                    f"{source_of(key, layers)}: {key}: nothing given, expected {_expected(key, hints[name])}; "
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
        return _fill(typing.cast(type, hint), value, key, layers)
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(key, value, "a block of `key: value` lines", layers)
        return {k: _convert(parameters[1], v, f"{key}.{k}", layers) for k, v in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(parameters)):
            raise _wrong_type(key, value, _describe(hint), layers)
        return origin(_convert(parameters[0], item, f"{key}[{i}]", layers) for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if type(value) is hint:
        return value
    raise _wrong_type(key, value, _describe(hint), layers)


def _expected(key: str, hint: Any) -> str:
    return describe_span(DURATIONS[key]) if key in DURATIONS else _describe(hint)


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
    return ConfigError(f"{source_of(key, layers)}: {key}: {value!r} given, expected {expected}")


NICKNAMES = {
    "learning_rate": "lr",
    "batch_size": "global_train_batch_size",
    "microbatch_size": "device_train_microbatch_size",
}
"""Other libraries' words, too far from ours for spelling to find."""


def _suggest(key: str, path: str, fields: Mapping[str, Any]) -> str:
    full = f"{path}.{key}" if path else key
    word = NICKNAMES.get(key, key)
    everywhere = [other for other in _every_key() if other != full]  # a training's word in an evaluation
    elsewhere = [other for other in everywhere if _last(other) == word]
    near = difflib.get_close_matches(word, fields, n=1, cutoff=0.6)
    far = difflib.get_close_matches(word, [_last(other) for other in everywhere], n=1, cutoff=0.8)
    if near and (near[0] == word or not elsewhere):
        return f"did you mean {path + '.' if path else ''}{near[0]}?"
    if path == "callbacks":
        return "one of your own is named by its import path, python:package.module:Class"
    if path == "loggers":
        return f"valid keys here: {', '.join(fields)}; metrics.jsonl is always written"
    if elsewhere:
        return f"did you mean {max(elsewhere, key=lambda other: (_num_shared_parts(other, full), -other.count('.')))}?"
    if far:
        return f"did you mean {next(other for other in everywhere if _last(other) == far[0])}?"
    return f"valid keys here: {', '.join(fields) or 'none'}"


def _last(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _num_shared_parts(key: str, other: str) -> int:
    pairs = zip(key.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _every_key() -> list[str]:
    """Of a training YAML, blocks before what is in them."""
    found: dict[str, None] = {}
    for key in schema_keys():
        parts = key.replace(".*", "").split(".")
        found |= dict.fromkeys(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return list(found)
