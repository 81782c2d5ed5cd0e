"""Short names that installed companions of others give to their parts, such as `norm_type: scalenorm`.

`spell_out_names` replaces each by the import path that it stands for, `python:package.module:Thing`, when the files and
arguments of a launch are read. From there on, the part is code of the user's own like any other: the run records its
import path, and a record that somebody else wrote runs it only if it is trusted. A record never has a short name.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.callbacks_schema import CallbacksConfig, LoggersConfig
from llmfoundry_lite.config.fields import join_key, keys_of, settings_along
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import PREFIX


@cache
def find_names(kind: str) -> dict[str, str]:
    """Return short name -> import path for the parts of a kind, such as "norms", that installed companions have.

    `kind` is one of `companions.PART_KEYS`. A name that is one of ours is left out, with a warning.
    """
    names = {}
    for name, address in companions.find_parts(kind).items():
        if name in _names_of_ours(kind):
            companions.leave_out(f"parts, {kind}, {name}", ValueError("this package has one of that name"))
        else:
            names[name] = f"{PREFIX}{address}"
    return names


def _names_of_ours(kind: str) -> set[str]:
    """Return the names that this package itself has for parts of a kind."""
    names: set[str] = set()
    for key in companions.PART_KEYS[kind]:
        if key == "callbacks.*":
            names |= keys_of(CallbacksConfig).keys()
        elif key == "loggers.*":
            names |= keys_of(LoggersConfig).keys()
        else:
            names |= {*settings_along(TrainConfig, key)[-1].choices}
    return names


def names_for(key: str) -> list[str]:
    """Return the short names that may be the value of a dotted key, or a key in the block `callbacks` or `loggers`.

    For example, those of the kind "norms" for `model.norm_type`. An error suggests them.
    """
    names: list[str] = []
    for kind, patterns in companions.PART_KEYS.items():
        for pattern in patterns:
            expression = re.escape(pattern.removesuffix(".*")).replace(r"\*", r"[^.]+")
            if re.fullmatch(expression, key):
                names += find_names(kind)
    return names


def spell_out_names(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a launch with import paths in place of short names, and what was replaced.

    `{"model": {"norm_type": "scalenorm"}}` becomes `{"model": {"norm_type": "python:tiny.norms:ScaleNorm"}}`. What was
    replaced is import path -> what the YAML had, such as "model.norm_type: scalenorm". Raises ConfigError for a
    callback or a logger that is named both ways.
    """
    spelled_out = _copy_blocks(values)
    replaced: dict[str, str] = {}
    for kind, patterns in companions.PART_KEYS.items():
        names = find_names(kind)
        if not names:
            continue
        for pattern in patterns:
            *block_names, name_key = pattern.split(".")
            for path, block in _find_blocks(spelled_out, block_names):
                replaced |= _spell_out_in(block, name_key, path, names)
    return spelled_out, replaced


def _copy_blocks(value: Any) -> Any:
    """Return nested dictionaries as new ones, with the same values in them."""
    if not isinstance(value, dict):
        return value
    return {name: _copy_blocks(inner) for name, inner in value.items()}


def _find_blocks(values: Any, block_names: list[str], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the dictionary of each block that a list of names leads to; `*` stands for any name."""
    if not isinstance(values, dict):
        return
    if not block_names:
        yield path, values
        return
    first, *others = block_names
    for name in list(values) if first == "*" else [first]:
        yield from _find_blocks(values.get(name), others, join_key(path, name))


def _spell_out_in(block: dict[str, Any], name_key: str, path: str, names: dict[str, str]) -> dict[str, str]:
    """Replace short names in one block, in place. Returns import path -> what the YAML had.

    `name_key` is the key whose value is a name, or `*` if the keys of the block are names, which stay in their order.
    """
    if name_key != "*":
        name = block.get(name_key)
        if not isinstance(name, str) or name not in names:
            return {}
        block[name_key] = names[name]
        return {names[name]: f"{join_key(path, name_key)}: {name}"}

    replaced = {}
    items = list(block.items())
    block.clear()
    for name, value in items:
        import_path = names.get(name, name)
        if import_path in block:
            raise ConfigError(f"{path}: {name} and {import_path} are the same; keep one of them")
        block[import_path] = value
        if import_path != name:
            replaced[import_path] = f"{path}: {name}"
    return replaced
