"""Build the dataclasses of a schema from the merged values of a YAML. Every key must be known, and every value valid.

`build_block` is the top function. `layers.py` has merged the files and the arguments into `values`, nested
dictionaries. First, all unknown keys are refused (`refuse_unknown_keys`). Then each block is filled: a value is
converted to the type of its key (`_convert`), checked against the key's choices and range (`_check`), and parsed
(`_parse`). An error names the file, the key, what was given, what was expected, and the nearest valid key or choice.
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
from llmfoundry_lite.config.optimizers import OPTIMIZERS
from llmfoundry_lite.config.part_names import names_for, takes_names
from llmfoundry_lite.config.scalars import hint_at_number
from llmfoundry_lite.config.schedules import SCHEDULES
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, find_nearest, join_with_or
from llmfoundry_lite.own_code import PREFIX, is_own


def build_block(cls: type, values: Any, path: str = "", layers: Sequence[ConfigLayer] = ()) -> Any:
    """Build the dataclass `cls` of a configuration, or of a block in it, from its merged values.

    >>> build_block(GradientClippingConfig, {"clipping_threshold": 2})
    GradientClippingConfig(clipping_type='norm', clipping_threshold=2.0)

    `path` is the block's dotted key, empty for a whole configuration. `layers`, the files and arguments in order, let
    an error name the file of a bad key. Raises ConfigError for unknown keys and for values that the schema refuses.
    """
    refuse_unknown_keys(cls, values, path, layers)
    with naming_source(layers):
        return _fill(cls, values, path)


def refuse_unknown_keys(cls: type, values: Any, path: str = "", layers: Sequence[ConfigLayer] = ()) -> None:
    """Raise ConfigError if `values` has keys, at any depth, that the schema does not have. The error lists all of them.

    The arguments are those of `build_block`. For the block of a companion that is not installed, the error says which
    companion to install, unless the block is null.
    """
    is_run = cls is TrainConfig and isinstance(values, dict)
    missing_companions = companions.find_missing("blocks") if is_run else {}
    for name, package in missing_companions.items():
        if values.get(name) is not None:
            raise companions.missing(package, f"{source_of(name, layers)}: {name}")

    unknown_keys = [(key, hint) for key, hint in find_unknown_keys(cls, values, path) if key not in missing_companions]
    refuse_keys(unknown_keys, layers, "unknown key; ", "unknown keys")


def find_unknown_keys(cls: type, values: Any, path: str = "") -> list[tuple[str, str]]:
    """Return the dotted keys in `values`, at any depth, that the schema does not have, each with what may be meant."""
    unknown_keys = []
    for block_class, block_path, name, _ in _walk(cls, values, path):
        if name not in keys_of(block_class):
            suggestion = _suggest(str(name), block_path, keys_of(block_class))
            unknown_keys.append((join_key(block_path, name), suggestion))
    return unknown_keys


def refuse_keys(refused: Sequence[tuple[str, str]], layers: Sequence[ConfigLayer], one: str, several: str) -> None:
    """Raise one ConfigError for all keys in `refused`; do nothing if there are none.

    `refused` has pairs of a dotted key and what to do instead. `one` and `several` are the words for one key and for
    more. With `("unknown key; ", "unknown keys")` the message is `run.yaml: a: unknown key; did you mean b?`, or
    `2 unknown keys: run.yaml: a (did you mean b?), c (did you mean d?)`.
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
    """Raise ConfigError for a choice that LLM Foundry has and this package lacks, such as one of its optimizers.

    These are keys whose `Setting.instead` gives advice. Call this before unknown keys are refused: the block of such an
    optimizer has keys of its own, and the error about its name helps more than errors about these.
    """
    for block_class, path, name, value in _walk(TrainConfig, values):
        key = keys_of(block_class).get(name)
        if key is not None and key.setting.instead and value is not None:
            _check_choice(join_key(path, name), value, key.setting)


def _walk(cls: type, values: Any, path: str = "") -> Iterator[tuple[type, str, str, Any]]:
    """Yield every key in `values`, at any depth, with the block that it is in.

    Each item is the dataclass of the block, the block's dotted key, the key's name in it, and its value. For
    `optimizer: {lr: 0.1}` these are (TrainConfig, "", "optimizer", {"lr": 0.1}) and (OptimizerConfig, "optimizer",
    "lr", 0.1).
    """
    if not isinstance(values, dict):
        return
    for name, value in values.items():
        yield cls, path, name, value
        key = keys_of(cls).get(name)
        if key is not None:
            for block_path, block_values in key.blocks(join_key(path, name), value):
                yield from _walk(typing.cast(type, key.block), block_values, block_path)


# ------------------------------------------------------------------------------------------------- types


def _fill(cls: type, values: Any, path: str) -> Any:
    """Build the dataclass `cls` from the values of the block with the dotted key `path`. Raises ConfigError.

    `refuse_unknown_keys` has been called, so all keys are known. Keys that are left out get their defaults. null asks
    for the default too, unless it is a value of the key; for a key with another default than a block or a list that is
    an error, because the user may have forgotten the value.
    """
    if not isinstance(values, dict):
        raise _wrong(path, values, "a block of `key: value` lines")

    arguments = {}
    for name, key in keys_of(cls).items():
        key_path = join_key(path, name)
        expected = key.setting.expected or describe_type(key.hint)
        is_given = name in values and (values[name] is not None or key.allows_none)
        if is_given:
            value = _convert(key.hint, values[name], key_path, expected)
            _check(key_path, value, key.setting)
            arguments[name] = _parse(key_path, value, key.setting)
        elif key.default is dataclasses.MISSING:
            raise ConfigError(f"{key_path}: missing; expected {expected}")
        elif name in values and not isinstance(key.default, dict | list):
            # `seed:` with nothing after it. Blocks and lists whose lines are all comments get here too, and are
            # allowed.
            is_readable = str(key.default).isprintable()
            default = key.default if is_readable else repr(key.default)
            raise ConfigError(
                f"{key_path}: nothing given, expected {expected}; remove the line for the default, {default}"
            )

    # The dataclass holds the blocks of companions in its field `blocks`.
    field_names = {field.name for field in dataclasses.fields(cls)}
    companion_keys = [name for name in keys_of(cls) if name not in field_names]
    if companion_keys:
        arguments["blocks"] = {name: arguments.pop(name, None) for name in companion_keys}
    return cls(**arguments)


def _convert(hint: Any, value: Any, key_path: str, expected: str) -> Any:
    """Convert the value of the key at `key_path` to the type `hint`, or raise ConfigError.

    2.0 becomes 2 for the type int, 2 becomes "2" for str, and {"lr": 0.1} becomes an OptimizerConfig for that. Numbers
    are converted if nothing is lost. Text is never read as a number. The items of lists and dictionaries are converted
    by their own types. `expected` says in words what the key takes, for the error.
    """
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (value is None and type(None) in parameters):
        return value
    if origin in (types.UnionType, typing.Union):
        alternatives = [alternative for alternative in parameters if alternative is not type(None)]
        return _convert_to_one_of(alternatives, value, key_path, expected)
    if dataclasses.is_dataclass(hint):
        return _fill(typing.cast(type, hint), value, key_path)

    # A value of another type than the container's falls through to the error at the end.
    if origin is dict:
        if isinstance(value, dict):
            item_type = parameters[1]
            items_by_name = {}
            for name, item in value.items():
                items_by_name[name] = _convert(item_type, item, f"{key_path}.{name}", describe_type(item_type))
            return items_by_name
    elif origin in (list, tuple):
        # A tuple has as many items as its type names. All items have the same type.
        if isinstance(value, list) and (origin is list or len(value) == len(parameters)):
            item_type = parameters[0]
            items = []
            for index, item in enumerate(value):
                items.append(_convert(item_type, item, f"{key_path}[{index}]", describe_type(item_type)))
            return origin(items)
    else:
        converted = _convert_scalar(hint, value)
        if converted is not None:
            return converted

    error = _wrong(key_path, value, expected)
    if isinstance(value, str) and hint in (int, float, bool):
        raise ConfigError(f"{error}{hint_at_number(value)}")
    raise error


def _convert_to_one_of(alternatives: Sequence[Any], value: Any, key_path: str, expected: str) -> Any:
    """Convert a value to the first of several types that it can be converted to. Raises ConfigError if there is none.

    If the value's own type is among them, it is tried first: for the types (str, int), 8 stays a number.
    """
    # With one type, its own error is more precise: it may name a key inside a block.
    if len(alternatives) == 1:
        return _convert(alternatives[0], value, key_path, describe_type(alternatives[0]))
    own_type_first = sorted(alternatives, key=lambda alternative: alternative is not type(value))
    for alternative in own_type_first:
        with contextlib.suppress(ConfigError):
            return _convert(alternative, value, key_path, describe_type(alternative))
    raise _wrong(key_path, value, expected)


def _convert_scalar(hint: type, value: Any) -> bool | int | float | str | None:
    """Convert a scalar to the type `hint` (bool, int, float or str), or return None if that would change its value.

    An int converts to float and str, and a whole float to int: 2.0 -> 2. A bool is not a number here.
    """
    is_whole_number = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and is_whole_number:
        try:
            return float(value)
        except OverflowError:  # more than 1.8e308
            return None
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and is_whole_number:
        return str(value)
    if hint is str and isinstance(value, str):
        return value
    return value if type(value) is hint else None


def describe_type(hint: Any) -> str:
    """Return in words, for a message, which values a type takes: `a whole number or null` for `int | None`."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # `int | float` is just a number.
        alternatives = [option for option in parameters if not (option is int and float in parameters)]
        return " or ".join(map(describe_type, alternatives))
    if origin is tuple:
        return f"a list of {len(parameters)} numbers"
    if origin is list:
        return "a list"
    return "a block of `key: value` lines"


def _wrong(key_path: str, value: Any, expected: Any) -> ConfigError:
    """Return the error for a bad value: `seed: 'x' given, expected a whole number`."""
    return ConfigError(f"{key_path}: {value!r} given, expected {expected}")


# ------------------------------------------------------------------------------------------------ values


def _check(key_path: str, value: Any, setting: Setting) -> None:
    """Raise ConfigError for a value, already of the right type, that the choices or checks of its key refuse.

    Numbers must be finite and have at most 64 bits, in lists too. The checks of a tuple apply to each of its items.
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
    """Return what a configuration holds for the value of a YAML: a `Duration` for `100ba`, most values unchanged.

    Raises ConfigError for text that cannot be parsed.
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
    "mpt_causal_lm": ("mpt",),
    "flash": ("triton",),
    "ZERO_1": ("zero1", "zero-1"),
    "SHARD_GRAD_OP": ("zero2", "zero-2", "zero_2"),
    "FULL_SHARD": ("zero3", "zero-3", "zero_3"),
    **{name: row.other_words for name, row in OPTIMIZERS.items()},
    **{name: row.other_words for name, row in SCHEDULES.items()},
}
"""Choice -> names that other libraries have for it, for suggestions."""


def _check_choice(key_path: str, value: Any, setting: Setting) -> None:
    """Raise ConfigError, which suggests the nearest choice, for a value that is not among the choices of its key."""
    if value in setting.choices:
        return
    # Short names were replaced in the files of a launch. One that is left is in a record, where none is valid.
    short_names = [name for name in names_for(key_path) if name != value]
    choices = [*setting.choices, *short_names]
    if PREFIX in choices and is_own(value):
        check_import_path(key_path, value)
        return

    hint = setting.instead or f"expected {join_with_or(choices)}"
    # If the key has advice of its own, suggest a choice only for a value that is very similar to it.
    nearest = _nearest_choice(str(value), choices, cutoff=0.85 if setting.instead else 0.75)
    if not nearest:  # no advice is about short names, so a less similar one is suggested
        nearest = find_nearest(str(value), short_names)
    if nearest and setting.instead:
        hint = f"did you mean {nearest}?"
    elif nearest:
        hint = f"did you mean {nearest}? ({hint})"
    elif setting.instead and short_names:
        hint += f"; companions have {', '.join(short_names)}"
    if takes_names(key_path) and not nearest:
        hint += f"; {companions.explain_unknown_name()}"
    hint = hint.replace(PREFIX, f"{PREFIX}package.module:Thing")
    raise ConfigError(f"{key_path}: {value!r} is not known; {hint}")


def _nearest_choice(value: str, choices: Sequence[str], cutoff: float) -> str:
    """Return the choice that was probably meant by `value`; empty if none is similar.

    In this order: a choice for which another library has this word (`bf16` -> `amp_bf16`), the only choice that begins
    with the value (`cosine` -> `cosine_with_warmup`), the choice that is spelt most like it. `cutoff` is the least
    similarity of the spelling, from 0 to 1.
    """
    for choice in choices:
        if value.lower() in OTHER_WORDS.get(choice, ()):
            return choice
    completions = [choice for choice in choices if value and choice.lower().startswith(value.lower())]
    return completions[0] if len(completions) == 1 else find_nearest(value, choices, cutoff)


def is_import_path(value: str) -> bool:
    """Return whether a text has the form `python:package.module:Thing`."""
    return re.fullmatch(r"python:\w+(\.\w+)*:\w+", value) is not None


def check_import_path(key_path: str, value: str) -> None:
    """Raise ConfigError for text that is not of the form `python:package.module:Thing`."""
    if not is_import_path(value):
        raise _wrong(key_path, value, "an import path, python:package.module:Thing")


# ------------------------------------------------------------------------------------------ unknown keys


MAX_KEYS_LISTED = 24
"""An error lists the keys of a block only if there are at most this many."""
NICKNAMES = {
    "learning_rate": "lr",
    "batch_size": "global_train_batch_size",
    "microbatch_size": "device_train_microbatch_size",
}
"""Names that other libraries have for our keys -> our keys, if their spelling is too different to guess by."""


def _suggest(name: str, path: str, keys: Mapping[str, Key]) -> str:
    """Return, for an error, which key was probably meant by an unknown one: `did you mean optimizer.lr?`

    `name` is the unknown key, `path` the dotted key of its block, and `keys` are the valid keys of the block. A similar
    key of this block is suggested before one of another block, unless another block has a key of exactly this name. If
    nothing is similar, the valid keys are listed.
    """
    word = NICKNAMES.get(name, name)
    # Keys of other blocks. Within a block, only those of the same section are suggested. The unknown key itself is left
    # out: a training's YAML may have it, although an evaluation's has not.
    other_keys = [key for key in _every_key() if key != join_key(path, name)]
    if path:
        other_keys = [key for key in other_keys if "." not in key or _section(key) == _section(path)]
    is_key_elsewhere = any(_last(key) == word for key in other_keys)

    names = names_for(path)  # of companions' callbacks and loggers
    nearest = find_nearest(word, [*keys, *names])
    if nearest and (nearest == word or not is_key_elsewhere):
        return f"did you mean {join_key(path, nearest)}?"
    if path == "callbacks":
        return (
            "one of your own is named by its import path, python:package.module:Class; "
            f"{companions.explain_unknown_name()}"
        )
    if path == "loggers":
        names = [name for name in [*keys, *names] if name != "extra"]  # `extra` has loggers of the user's own
        return (
            f"valid keys here: {', '.join(names)}, and python:package.module:Class for one of your own; metrics.jsonl "
            f"is always written; {companions.explain_unknown_name()}"
        )

    # The key may stand in the wrong block. Several blocks may have one of this name: prefer the one nearest to `path`.
    nearest = word if is_key_elsewhere else find_nearest(word, map(_last, other_keys), cutoff=0.8)
    if nearest:
        candidates = [key for key in other_keys if _last(key) == nearest]
        closest = min(candidates, key=lambda key: (-_num_shared_blocks(key, path), key.count(".")))
        return f"did you mean {closest}?"
    if len(keys) > MAX_KEYS_LISTED:
        hint = "nothing here is spelled like it; a value of your own, for ${…}, stands under variables"
        return f"{hint}; {companions.explain_unknown_name()}" if not path else hint
    return f"valid keys here: {', '.join(keys) or 'none'}"


def _num_shared_blocks(key: str, path: str) -> int:
    """Return the number of outer blocks that two dotted keys share: 1 for `model.d_model` and `model.attn_config`."""
    return len(commonprefix([key.split("."), path.split(".")]))  # noqa: RUF071 - of lists


def _section(key: str) -> str:
    """Return the top-level block of a dotted key; `_config` for blocks such as fsdp_config, which users confuse."""
    block = key.partition(".")[0]
    return "_config" if block.endswith("_config") else block


def _last(key: str) -> str:
    """Return the name of a dotted key in its own block: `lr` for `optimizer.lr`."""
    return key.rsplit(".", 1)[-1]


def _every_key() -> list[str]:
    """Return the dotted keys of a training YAML, blocks included: `model`, `model.d_model`, ... Each occurs once."""
    keys: dict[str, None] = {}  # a set that keeps its order
    for key in schema_keys(TrainConfig):
        parts = key.replace(".*", "").split(".")
        for length in range(1, len(parts) + 1):
            keys[".".join(parts[:length])] = None
    return list(keys)
