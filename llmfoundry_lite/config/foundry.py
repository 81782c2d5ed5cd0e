"""Handle keys of LLM Foundry's YAMLs that this package does not have, before the schema refuses them as unknown.

A key is either removed, with a note that says why it has no effect here, or refused, with an error that says what to
use instead. `foundry.table` lists the keys with their sentences. LLM Foundry's other names for keys that we do have are
handled where they are read: in `build.py`, `scalars.py`, `load_eval.py` and `load_tasks.py`.

`values` in this file are the merged values of a configuration, as nested dictionaries, which the functions change in
place. `layers` are the files and arguments that they come from, for messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.build import refuse_keys
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value, remove_key, source_of
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import is_own

TABLE = Path(__file__).with_name("foundry.table")


def _read_table() -> tuple[dict[str, dict[str, str]], dict[str, list[Any]]]:
    """Read `foundry.table`, whose lines are `key key=harmless_value … -> sentence`, in sections such as `[left out]`.

    Returns section -> key -> sentence, and key -> harmless values, with which the option does what we do anyway. For
    example, `scheduler.foo=false -> use bar` in [left out] gives `{"left out": {"scheduler.foo": "use bar"}}` and
    `{"scheduler.foo": [False]}`.
    """
    sections: dict[str, dict[str, str]] = {}
    harmless_values: dict[str, list[Any]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            words, _, sentence = line.partition(" -> ")
            for word in words.split():
                key, _, value = word.partition("=")
                section[key] = sentence
                if value:
                    harmless_values.setdefault(key, []).append(json.loads(value))
    return sections, harmless_values


_SECTIONS, HARMLESS = _read_table()
WITHOUT_EFFECT, EVAL_WITHOUT_EFFECT = _SECTIONS["without effect"], _SECTIONS["without effect in an evaluation"]
"""Dotted key -> why it has no effect, for the note about it. `*` stands for each loader's block."""
LEFT_OUT, EVAL_LEFT_OUT = _SECTIONS["left out"], _SECTIONS["left out in an evaluation"]
"""Dotted key -> what to use instead, for the error about it."""


def refuse_fine_tuning(values: dict[str, Any]) -> None:
    """Raise ConfigError for a YAML of LLM Foundry's fine-tuning, whose loaders are named `finetuning`.

    Call this before other checks, because correcting other keys would not make such a YAML run.
    """
    for key in _keys_of("*.name", values):
        _, name = find_value(values, key)
        if name in ("finetuning", "fine_tuning"):
            raise ConfigError(
                f"{key}: {name}: fine-tuning is absent here: no loader of "
                "prompts and responses, no loss on responses alone, no adapter. Export a checkpoint "
                "(`llmfoundry-lite checkpoint export`) and fine-tune that with LLM Foundry or TRL; "
                "`llmfoundry-lite init DATA --like hf:NAME` trains a Hugging Face model on plain text"
            )


def drop_variables(values: dict[str, Any], layers: Sequence[ConfigLayer], cls: type) -> None:
    """Remove the top-level keys that are variables: the schema `cls` does not have them, and a `${key}` names them.

    LLM Foundry's YAMLs from before 2024 have variables at the top level, such as `data_local: /data` for
    `local: ${data_local}`. The references are resolved already. Call this after LLM Foundry's options were refused or
    translated, because a reference may name an option too.
    """
    referenced_names = set(re.findall(r"\$\{(\w+)\}", str([layer.values for layer in layers])))
    for name in referenced_names - set(keys_of(cls)):
        values.pop(name, None)


def drop_keys(
    values: dict[str, Any], layers: Sequence[ConfigLayer], without_effect: Mapping[str, str] = WITHOUT_EFFECT
) -> list[str]:
    """Remove the keys that have no effect here from `values`. Returns a note for each, with its file and the reason.

    `without_effect` maps dotted keys to reasons, as in `foundry.table`.
    """
    notes = []
    for pattern, reason in without_effect.items():
        for key in _keys_of(pattern, values):
            if find_value(values, key)[0]:
                remove_key(values, key)
                notes.append(f"{source_of(key, layers)}: {key} has no effect: {reason}")
    return notes


def in_one_line(notes: Sequence[str]) -> str:
    """Combine the notes of `drop_keys` and `drop_values_without_effect` into one, which only lists the keys.

    `run.yaml: log_config has no effect: …` and another such note become `2 keys have no effect (log_config, …)`.
    """
    keys = [note.partition(": ")[2].partition(" has no effect")[0] for note in notes]
    return f"{len(keys)} keys have no effect ({', '.join(keys)}); --dry-run says why"


def _keys_of(pattern: str, values: dict[str, Any]) -> list[str]:
    """Return the dotted keys that a key of the table stands for.

    `*.name` stands for `train_loader.name`, `eval_loader.name`, and `eval_loaders.wiki.name` for each label in
    `values`. A key without `*` stands for itself.
    """
    if not pattern.startswith("*"):
        return [pattern]
    blocks = ["train_loader", "eval_loader"]
    named_loaders = values.get("eval_loaders")
    if isinstance(named_loaders, dict):
        blocks += [f"eval_loaders.{label}" for label in named_loaders]
    return [pattern.replace("*", block) for block in blocks]


def drop_values_without_effect(values: dict[str, Any], layers: Sequence[ConfigLayer]) -> list[str]:
    """Remove keys of ours from `values` whose value has no effect in LLM Foundry, and which our schema would refuse.

    These are a shard degree of -1, which asks for the default; attn_impl triton, which LLM Foundry no longer has; and
    rope_hf_config where LLM Foundry ignores it, because rope_impl is dail. Returns a note for each but the first.
    """
    shard_degree_key = "fsdp_config.data_parallel_shard_degree"
    if find_value(values, shard_degree_key)[1] == -1:
        remove_key(values, shard_degree_key)

    notes: list[str] = []
    _, attention = find_value(values, "model.attn_config")
    if not isinstance(attention, dict):
        return notes
    if attention.get("attn_impl") == "triton":
        key = "model.attn_config.attn_impl"
        remove_key(values, key)
        notes.append(f"{source_of(key, layers)}: {key} triton has no effect: LLM Foundry has removed it; auto chooses")

    scaling = attention.get("rope_hf_config")
    scales_positions = isinstance(scaling, dict) and scaling.get("type", "no_scaling") != "no_scaling"
    is_dail = attention.get("rope") and attention.get("rope_impl", "dail") == "dail"
    if scales_positions and is_dail:
        key = "model.attn_config.rope_hf_config"
        remove_key(values, key)
        notes.append(
            f"{source_of(key, layers)}: {key} has no effect: rope_impl is dail; rope_impl: hf scales positions"
        )
    return notes


def refuse_left_out_keys(
    values: dict[str, Any], layers: Sequence[ConfigLayer], left_out: Mapping[str, str] = LEFT_OUT
) -> None:
    """Raise ConfigError for the options of LLM Foundry that are left out here. The error lists all of them.

    `left_out` maps dotted keys to what to use instead, as in `foundry.table`. Keys that are null, or whose value asks
    for what we do anyway (`HARMLESS`), are removed from `values` instead.
    """
    refuse_keys(
        find_left_out_keys(values, left_out),
        layers,
        one="LLM Foundry's option is left out here; ",
        several="options of LLM Foundry are left out here",
    )
    # LLM Foundry has `auto` for evaluation, too. The key itself is not left out, so it is not in the table.
    if values.get("device_eval_batch_size") == "auto":
        key = "device_eval_batch_size"
        raise ConfigError(f"{source_of(key, layers)}: {key}: auto is for training; give a number of samples")


def find_left_out_keys(values: dict[str, Any], left_out: Mapping[str, str] = LEFT_OUT) -> list[tuple[str, str]]:
    """Return the dotted keys in `values` that are left out here, each with what to use instead.

    Those that `refuse_left_out_keys` accepts are removed from `values`.
    """
    refused = []
    for pattern, instead in left_out.items():
        for key in _keys_of(pattern, values):
            is_given, value = find_value(values, key)
            # A user's own `python:` optimizer or loader may have arguments of any name. The block of a key is its first
            # part, such as `optimizer`, or `eval_loaders.wiki`.
            block = re.sub(r"^((?:eval_loaders\.)?[^.]+).*", r"\1", key)
            _, name_of_block = find_value(values, f"{block}.name")
            is_own_object = is_own(name_of_block)
            if not is_given or is_own_object:
                continue
            if value is None or value in HARMLESS.get(pattern, ()):
                remove_key(values, key)
            else:
                refused.append((key, instead))
    return refused
