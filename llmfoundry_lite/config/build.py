"""Values of a YAML -> the dataclasses of a schema, strictly: every key known, every value of its type and range.

`layers.py` has merged the files and the arguments. An error names the file, the key, what was given, what was expected
and the nearest valid key.
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
from llmfoundry_lite.config.fields import Key, Setting, is_number, join_key, keys_of, schema_keys
from llmfoundry_lite.config.layers import ConfigLayer, naming_source, source_of
from llmfoundry_lite.config.scalars import hint_at_number
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, find_nearest, join_with_or


def build_block(cls: type, values: Any, path: str = "", layers: Sequence[ConfigLayer] = ()) -> Any:
    """Build the dataclass `cls` of a configuration's block from its values in YAML files and arguments.

    `path` is the block's dotted key, empty for a whole configuration. `layers`, the files and arguments in order, let
    an error name the file of a bad key. Raises ConfigError for unknown keys and for values that the schema refuses.
    """
    refuse_unknown_keys(cls, values, path, layers)
    with naming_source(layers):
        return _fill(cls, values, path)


def refuse_unknown_keys(cls: type, values: Any, path: str = "", layers: Sequence[ConfigLayer] = ()) -> None:
    """Raise ConfigError, which names every key in `values`, at any depth, that the dataclass `cls` does not have.

    `path` is the dotted key of the block that `values` are, and `layers` are the files and arguments they come from. In
    a run's YAML, the block of a companion that is not installed is answered with the companion's name, unless the block
    is null.
    """
    is_run = cls is TrainConfig and isinstance(values, dict)
    absent = companions.find_missing("blocks") if is_run else {}
    for name, package in absent.items():
        if values.get(name) is not None:
            raise companions.missing(package, f"{source_of(name, layers)}: {name}")

    unknown = []
    for block, inside, name, _ in _walk(cls, values, path):
        is_absent_block = block is cls and name in absent
        if name not in keys_of(block) and not is_absent_block:
            unknown.append((join_key(inside, name), _suggest(str(name), inside, keys_of(block))))
    refuse_keys(unknown, layers, "unknown key; ", "unknown keys")


def refuse_keys(refused: Sequence[tuple[str, str]], layers: Sequence[ConfigLayer], one: str, several: str) -> None:
    """Raise ConfigError for keys that a configuration must not have, if there are any.

    `refused` has each dotted key and what to do instead. `one` and `several` are the words for a single key and for
    more: the message is `run.yaml: a: unknown key; …`, or `2 unknown keys: run.yaml: a (…), b (…)`.
    """
    if not refused:
        return
    if len(refused) == 1:
        key, hint = refused[0]
        raise ConfigError(f"{source_of(key, layers)}: {key}: {one}{hint}")

    by_source: dict[str, list[str]] = {}
    for key, hint in refused:
        by_source.setdefault(source_of(key, layers), []).append(f"{key} ({hint})")
    parts = [f"{source}: {', '.join(keys)}" for source, keys in by_source.items()]
    raise ConfigError(f"{len(refused)} {several}: {'; '.join(parts)}")


def refuse_other_kinds(values: Any) -> None:
    """Raise ConfigError for a `name` that this package does not have, such as that of an optimizer of LLM Foundry.

    This comes before the check for unknown keys, because such a block has keys of its own, and the error about its name
    is the helpful one.
    """
    for block, path, name, value in _walk(TrainConfig, values):
        key = keys_of(block).get(name)
        if key is not None and key.setting.instead and value is not None:
            _check_choice(join_key(path, name), value, key.setting)


def _walk(cls: type, values: Any, path: str = "") -> Iterator[tuple[type, str, str, Any]]:
    """Yield every key in the values of a configuration's block, at any depth.

    Each item is the dataclass of the block that the key is in, that block's dotted key, the key's name, and its value.
    """
    if not isinstance(values, dict):
        return
    for name, value in values.items():
        yield cls, path, name, value
        key = keys_of(cls).get(name)
        if key is not None:
            for inside, block in key.blocks(join_key(path, name), value):
                yield from _walk(typing.cast(type, key.block), block, inside)


# ------------------------------------------------------------------------------------------------- types


def _fill(cls: type, values: Any, path: str) -> Any:
    """Build the dataclass `cls` from the values of the block with the dotted key `path`. Raises ConfigError.

    All keys are known to `cls`, because `refuse_unknown_keys` has been called. Left-out keys get their defaults.
    """
    if not isinstance(values, dict):
        raise _wrong(path, values, "a block of `key: value` lines")

    arguments = {}
    for name, key in keys_of(cls).items():
        key_path = join_key(path, name)
        expected = key.setting.expected or _describe(key.hint)
        is_given = name in values and (values[name] is not None or key.allows_none)
        if is_given:
            value = _convert(key.hint, values[name], key_path, expected)
            _check(key_path, value, key.setting)
            arguments[name] = _parse(key_path, value, key.setting)
        elif key.default is dataclasses.MISSING:
            raise ConfigError(f"{key_path}: missing; expected {expected}")
        elif name in values and not isinstance(key.default, dict | list):
            # null where the type has none. An empty block or list means the default.
            is_readable = str(key.default).isprintable()
            default = key.default if is_readable else repr(key.default)
            raise ConfigError(
                f"{key_path}: nothing given, expected {expected}; remove the line for the default, {default}"
            )

    # Keys of companions are no fields of the dataclass, which holds them in one field.
    own_names = {field.name for field in dataclasses.fields(cls)}
    names_of_companions = [name for name in keys_of(cls) if name not in own_names]
    if names_of_companions:
        arguments["blocks"] = {name: arguments.pop(name, None) for name in names_of_companions}
    return cls(**arguments)


def _convert(hint: Any, value: Any, key_path: str, expected: str) -> Any:
    """Convert the value of the key at `key_path` to the type `hint` of its field, or raise ConfigError.

    The error says what was `expected`, in words. Blocks become dataclasses, and the values in lists and blocks are
    converted too.
    Numbers convert to each other where nothing is lost, and whole numbers to text. Text is never read as a number.
    """
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (value is None and type(None) in parameters):
        return value
    if origin in (types.UnionType, typing.Union):
        options = [option for option in parameters if option is not type(None)]
        return _convert_to_one_of(options, value, key_path, expected)
    if dataclasses.is_dataclass(hint):
        return _fill(typing.cast(type, hint), value, key_path)

    if origin is dict:
        if isinstance(value, dict):
            inner = parameters[1]
            return {name: _convert(inner, item, f"{key_path}.{name}", _describe(inner)) for name, item in value.items()}
    elif origin in (list, tuple):
        # A tuple has as many items as its type names. All items have the same type.
        if isinstance(value, list) and (origin is list or len(value) == len(parameters)):
            inner = parameters[0]
            items = []
            for index, item in enumerate(value):
                items.append(_convert(inner, item, f"{key_path}[{index}]", _describe(inner)))
            return origin(items)
    else:
        converted = _convert_scalar(hint, value)
        if converted is not None:
            return converted

    error = _wrong(key_path, value, expected)
    if isinstance(value, str) and hint in (int, float, bool):
        raise ConfigError(f"{error}{hint_at_number(value)}")
    raise error


def _convert_to_one_of(options: Sequence[Any], value: Any, key_path: str, expected: str) -> Any:
    """Convert a value to the first of several types that it can be converted to. Raises ConfigError if there is none.

    If one of the types is the value's own, it goes first.
    """
    if len(options) == 1:
        return _convert(options[0], value, key_path, _describe(options[0]))
    own_type_first = sorted(options, key=lambda option: option is not type(value))
    for option in own_type_first:
        with contextlib.suppress(ConfigError):
            return _convert(option, value, key_path, _describe(option))
    raise _wrong(key_path, value, expected)


def _convert_scalar(hint: type, value: Any) -> bool | int | float | str | None:
    """Convert a number, a truth value or text to the type `hint`; return None if nothing equal has that type."""
    is_whole_number = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and is_whole_number:
        try:
            return float(value)
        except OverflowError:
            return None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and is_whole_number:
        return str(value)
    if hint is str and isinstance(value, str):
        return value
    return value if type(value) is hint else None


def _describe(hint: Any) -> str:
    """Return in words, for a message, which values the type of a field takes: `a whole number or null`."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # A whole number is a number.
        return " or ".join(_describe(option) for option in options if not (option is int and float in options))
    if origin is tuple:
        return f"a list of {len(options)} numbers"
    if origin is list:
        return "a list"
    return "a block of `key: value` lines"


def _wrong(key_path: str, value: Any, expected: Any) -> ConfigError:
    """Return the error for the value of the key at `key_path`: what was given, and what was expected."""
    return ConfigError(f"{key_path}: {value!r} given, expected {expected}")


# ------------------------------------------------------------------------------------------------ values


def _check(key_path: str, value: Any, setting: Setting) -> None:
    """Check a value, which has the right type, by its key's choices and range. Raises ConfigError.

    Numbers must be finite and have at most 64 bits, in lists too. The checks of a tuple hold for each of its items.
    """
    if value is None:
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_number(f"{key_path}[{index}]", item)
    else:
        _check_number(key_path, value)

    if setting.choices:
        _check_choice(key_path, value, setting)
    items = value if isinstance(value, tuple) else [value]
    for item in items:
        for check in setting.checks:
            try:
                check(item)
            except ValueError as error:
                raise _wrong(key_path, item, error) from None


def _check_number(key_path: str, value: Any) -> None:
    """Raise ConfigError for a number that is not finite, or that no 64 bits can hold."""
    if not is_number(value):
        return
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _wrong(key_path, value, "a whole number of 64 bits")
    if not math.isfinite(value):
        raise _wrong(key_path, value, "a finite number")


def _parse(key_path: str, value: Any, setting: Setting) -> Any:
    """Return the object that a configuration holds for a value of a YAML, such as a `Duration` for `100ba`.

    Most keys hold the value itself. Raises ConfigError for text that cannot be parsed.
    """
    if setting.parse is None or value is None:
        return value
    try:
        return setting.parse(value)
    except ValueError as error:
        raise _wrong(key_path, value, error) from None


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


def _check_choice(key_path: str, value: Any, setting: Setting) -> None:
    """Raise ConfigError for a value that is not among the choices of its key; it suggests the nearest one."""
    choices = setting.choices
    if value in choices:
        return
    if "python:" in choices and str(value).startswith("python:"):
        check_import_path(key_path, value)
        return

    hint = setting.instead or f"expected {join_with_or(choices)}"
    # A key with advice of its own suggests a choice only where the value is very much like it.
    likely = _nearest_choice(str(value), choices, cutoff=0.85 if setting.instead else 0.75)
    if likely and setting.instead:
        hint = f"did you mean {likely}?"
    elif likely:
        hint = f"did you mean {likely}? ({hint})"
    hint = hint.replace("python:", "python:package.module:Thing")
    raise ConfigError(f"{key_path}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str:
    """Return the choice that was probably meant; empty if none is near.

    Another library's word for a choice goes first, then a choice of which the value is the beginning, then similar
    spelling, from `cutoff` (of 1) on.
    """
    for choice in choices:
        if value.lower() in OTHER_WORDS.get(choice, ()):
            return choice
    begun = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    return begun[0] if len(begun) == 1 else find_nearest(value, choices, cutoff)


def check_import_path(key_path: str, value: str) -> None:
    """Raise ConfigError for text that is not of the form `python:package.module:Thing`."""
    if not re.fullmatch(r"python:\w+(\.\w+)*:\w+", value):
        raise _wrong(key_path, value, "an import path, python:package.module:Thing")


# ------------------------------------------------------------------------------------------ unknown keys


MAX_KEYS_LISTED = 24
"""Keys of a block that an error lists in full."""
NICKNAMES = {
    "learning_rate": "lr",
    "batch_size": "global_train_batch_size",
    "microbatch_size": "device_train_microbatch_size",
}
"""Words of other libraries -> our keys, where the spelling is too different to guess by."""


def _suggest(name: str, path: str, keys: Mapping[str, Key]) -> str:
    """Say which key was probably meant by the unknown `name` in the block at `path`, or list the block's `keys`.

    A key of this block is suggested before one of another block, unless only another block has exactly this name.
    """
    word = NICKNAMES.get(name, name)
    # Without the unknown key itself, which a training's YAML may have though an evaluation's has not.
    others = [other for other in _every_key() if other != join_key(path, name)]
    if path:
        others = [other for other in others if "." not in other or _section(other) == _section(path)]
    is_anothers = any(_last(other) == word for other in others)

    near = find_nearest(word, keys)
    if near and (near == word or not is_anothers):
        return f"did you mean {join_key(path, near)}?"
    if path == "callbacks":
        return "one of your own is named by its import path, python:package.module:Class"
    if path == "loggers":
        return f"valid keys here: {', '.join(keys)}; metrics.jsonl is always written"

    near = word if is_anothers else find_nearest(word, map(_last, others), cutoff=0.8)
    if near:
        of_this_name = [other for other in others if _last(other) == near]
        closest = min(of_this_name, key=lambda other: (-_num_shared_blocks(other, path), other.count(".")))
        return f"did you mean {closest}?"
    if len(keys) > MAX_KEYS_LISTED:
        return "nothing here is spelled like it; a value of your own, for ${…}, stands under variables"
    return f"valid keys here: {', '.join(keys) or 'none'}"


def _num_shared_blocks(key: str, path: str) -> int:
    """Return the number of outer blocks that two dotted keys have in common."""
    return len(commonprefix([key.split("."), path.split(".")]))  # noqa: RUF071 - of lists


def _section(key: str) -> str:
    """Return the top-level block of a key. All blocks named *_config count as one."""
    block = key.partition(".")[0]
    return "_config" if block.endswith("_config") else block


def _last(key: str) -> str:
    """Return the name of a dotted key in its own block."""
    return key.rsplit(".", 1)[-1]


def _every_key() -> list[str]:
    """Return the keys of a training YAML, each block before its own keys."""
    keys: dict[str, None] = {}
    for key in schema_keys(TrainConfig):
        parts = key.replace(".*", "").split(".")
        for length in range(1, len(parts) + 1):
            keys[".".join(parts[:length])] = None
    return list(keys)
