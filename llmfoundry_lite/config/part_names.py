"""Short names that installed companions of others give to their parts, such as `norm_type: scalenorm`.

`spell_out_names` replaces each by the import path that it stands for, `python:package.module:Thing`, when the files and
arguments of a launch are read. From there on, the part is code of the user's own like any other: the run records its
import path, and a record that somebody else wrote runs it only if it is trusted. A record never has a short name.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.callbacks_schema import CallbacksConfig, LoggersConfig
from llmfoundry_lite.config.fields import join_key, keys_of, settings_along
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.task_types import BITS, METRICS, TASK_TYPES
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import PREFIX

WORDS_OF_FOUNDRY: Mapping[str, Collection[str]] = {
    "attention_implementations": {"triton"},
    "dataloaders": {"finetuning", "fine_tuning"},
    "metrics": {task_type.foundry_metric for task_type in TASK_TYPES.values() if task_type.foundry_metric},
}
"""Kind of part -> names of LLM Foundry that are no choices here, but are understood: dropped with a note, or refused
with advice."""
FOUNDRY_TABLE = Path(__file__).with_name("foundry.table")


@cache
def find_names(kind: str) -> dict[str, str]:
    """Return short name -> import path for the parts of a kind, such as "norms", that installed companions have.

    `kind` is one of `companions.PART_KEYS`, but not "readers". A name that this package has, or that is a word of LLM
    Foundry which this package understands, is left out, with a warning.
    """
    return find_names_beside(kind, names_of_ours(kind))


def find_names_beside(kind: str, names_of_ours: Collection[str]) -> dict[str, str]:
    """Return short name -> import path for the parts of a kind that installed companions have.

    Names in `names_of_ours` are left out, with a warning.
    """
    names = {}
    for name, address in companions.find_parts(kind).items():
        if name in names_of_ours:
            companions.leave_out(f"parts, {kind}, {name}", ValueError("this package has one of that name"))
        else:
            names[name] = f"{PREFIX}{address}"
    return names


def names_of_ours(kind: str) -> set[str]:
    """Return the names for parts of a kind that this package itself has or understands."""
    names = {*WORDS_OF_FOUNDRY.get(kind, ())}
    if kind in ("callbacks", "loggers"):
        schema = CallbacksConfig if kind == "callbacks" else LoggersConfig
        # The table of LLM Foundry's other keys has lines such as `callbacks.run_timeout -> use dist_timeout`.
        names_in_table = re.findall(rf"(?<!\S){kind}\.(\w+)", FOUNDRY_TABLE.read_text(encoding="utf-8"))
        return names | keys_of(schema).keys() | {*names_in_table}
    if kind == "icl_datasets":
        return names | TASK_TYPES.keys()
    if kind == "metrics":
        return names | {*METRICS, BITS}
    for key in companions.PART_KEYS[kind]:
        names |= {*settings_along(TrainConfig, key)[-1].choices}
    return names


def names_for(key: str) -> list[str]:
    """Return the short names that may be the value of a dotted key, or a key in the block `callbacks` or `loggers`.

    For example, those of the kind "norms" for `model.norm_type`. An error suggests them.
    """
    return [name for kind in _kinds_for(key) for name in find_names(kind)]


def takes_names(key: str) -> bool:
    """Return whether the value of a dotted key, or a key in that block, may be a short name of a companion's part."""
    return bool(_kinds_for(key))


def _kinds_for(key: str) -> list[str]:
    """Return the kinds of parts, by the names in `companions.PART_KEYS`, that a dotted key may name."""
    kinds = []
    key = re.sub(r"\[(\d+)\]", r".\1", key)  # an entry of a list, such as icl_tasks[0]
    for kind, patterns in companions.PART_KEYS.items():
        for pattern in patterns:
            expression = re.escape(pattern.removesuffix(".*")).replace(r"\*", r"[^.]+")
            if re.fullmatch(expression, key):
                kinds.append(kind)
    return kinds


def spell_out_names(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a launch with import paths in place of short names, and what was replaced.

    `{"model": {"norm_type": "scalenorm"}}` becomes `{"model": {"norm_type": "python:tiny.norms:ScaleNorm"}}`. What was
    replaced is import path -> what the YAML had, such as "model.norm_type: scalenorm". Raises ConfigError for a
    callback or a logger that is named both ways.
    """
    spelled_out = _copy_blocks(values)
    replaced: dict[str, str] = {}
    for kind, patterns in companions.PART_KEYS.items():
        names = find_names(kind) if patterns else {}
        if not names:
            continue
        for pattern in patterns:
            *block_names, name_key = pattern.split(".")
            for path, block in _find_blocks(spelled_out, block_names):
                replaced |= _spell_out_in(block, name_key, path, names)
    return spelled_out, replaced


def _copy_blocks(value: Any) -> Any:
    """Return nested dictionaries and lists as new ones, with the same values in them."""
    if isinstance(value, list):
        return [_copy_blocks(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _copy_blocks(inner) for name, inner in value.items()}


def _find_blocks(values: Any, block_names: list[str], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the dictionary of each block that a list of names leads to.

    `*` stands for any name, or for each entry of a list.
    """
    if isinstance(values, list) and block_names and block_names[0] == "*":
        for index, entry in enumerate(values):
            yield from _find_blocks(entry, block_names[1:], f"{path}[{index}]")
        return
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

    `name_key` is the key whose value is a name or a list of names, or `*` if the keys of the block are names, which
    stay in their order.
    """
    replaced = {}
    if name_key != "*":
        value = block.get(name_key)
        given_names = value if isinstance(value, list) else [value]
        spelled_out = []
        for name in given_names:
            import_path = names.get(name) if isinstance(name, str) else None
            if import_path is not None:
                replaced[import_path] = f"{join_key(path, name_key)}: {name}"
            spelled_out.append(import_path or name)
        if replaced:
            block[name_key] = spelled_out if isinstance(value, list) else spelled_out[0]
        return replaced

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
