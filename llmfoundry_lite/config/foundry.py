"""LLM Foundry's keys that have no counterpart: ignored with a note, or refused with what to use instead.

`foundry.table` has those of a run. Other names and spellings are where they are read: `build.py`, `scalars.py` and
`load_eval.py`.
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

TABLE = Path(__file__).with_name("foundry.table")


def _read_table() -> tuple[dict[str, dict[str, str]], dict[str, list[Any]]]:
    """Read `foundry.table`, which explains its form.

    Returns section -> key -> sentence, and key -> values that change nothing, because we do the same anyway.
    """
    sections: dict[str, dict[str, str]] = {}
    harmless: dict[str, list[Any]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            words, _, sentence = line.partition(" -> ")
            for word in words.split():
                key, _, value = word.partition("=")
                section[key] = sentence
                if value:
                    harmless.setdefault(key, []).append(json.loads(value))
    return sections, harmless


_SECTIONS, HARMLESS = _read_table()
WITHOUT_EFFECT, EVAL_WITHOUT_EFFECT = _SECTIONS["without effect"], _SECTIONS["without effect in an evaluation"]
"""Key -> why it is ignored, for the note about it. `*` stands for the loaders."""
LEFT_OUT, EVAL_LEFT_OUT = _SECTIONS["left out"], _SECTIONS["left out in an evaluation"]
"""Key -> what to use instead, which the error names."""


def refuse_fine_tuning(values: dict[str, Any]) -> None:
    """Raise ConfigError for a YAML of fine-tuning, before any other error: no other change would make it run."""
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
    """Remove keys that the schema lacks and that `${key}` elsewhere refers to, in place.

    LLM Foundry's YAMLs of before 2024 have their variables at the top: data_local, global_seed. Call this after its
    options were refused or translated, because a `${key}` may refer to an option too.
    """
    used = set(re.findall(r"\$\{(\w+)\}", str([layer.values for layer in layers])))
    for name in used - set(keys_of(cls)):
        values.pop(name, None)


def drop_keys(
    values: dict[str, Any], layers: Sequence[ConfigLayer], without_effect: Mapping[str, str] = WITHOUT_EFFECT
) -> list[str]:
    """Remove keys that are ignored, in place. Returns a note for each."""
    notes = []
    for pattern, reason in without_effect.items():
        for key in _keys_of(pattern, values):
            if find_value(values, key)[0]:
                remove_key(values, key)
                notes.append(f"{source_of(key, layers)}: {key} has no effect: {reason}")
    return notes


def in_one_line(notes: Sequence[str]) -> str:
    """Return one note for all that `drop_keys` and `drop_values_without_effect` return."""
    keys = [note.partition(": ")[2].partition(" has no effect")[0] for note in notes]
    return f"{len(keys)} keys have no effect ({', '.join(keys)}); --dry-run says why"


def _keys_of(pattern: str, values: dict[str, Any]) -> list[str]:
    """Return the keys that a pattern of the table stands for: `*` is each block of a loader."""
    if not pattern.startswith("*"):
        return [pattern]
    named_loaders = values.get("eval_loaders")
    labels = named_loaders if isinstance(named_loaders, dict) else ()
    blocks = ["train_loader", "eval_loader", *(f"eval_loaders.{label}" for label in labels)]
    return [pattern.replace("*", block) for block in blocks]


def drop_values_without_effect(values: dict[str, Any], layers: Sequence[ConfigLayer]) -> list[str]:
    """Remove values that change nothing, in place. Returns a note for each but the first.

    These are a shard degree of -1, which asks for the default; attn_impl triton, which LLM Foundry no longer has; and
    rope_hf_config where LLM Foundry ignores it, because rope_impl is dail.
    """
    if find_value(values, "fsdp_config.data_parallel_shard_degree")[1] == -1:
        remove_key(values, "fsdp_config.data_parallel_shard_degree")

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
    """Raise ConfigError that names every key that has no counterpart here; remove those whose value is harmless.

    A user's own `python:` object may have arguments of any name.
    """
    refused = []
    for pattern, instead in left_out.items():
        for key in _keys_of(pattern, values):
            is_given, value = find_value(values, key)
            block = re.sub(r"^((?:eval_loaders\.)?[^.]+).*", r"\1", key)
            _, name = find_value(values, f"{block}.name")
            if not is_given or str(name).startswith("python:"):
                continue
            if value is None or value in HARMLESS.get(pattern, ()):
                remove_key(values, key)
            else:
                refused.append((key, instead))
    refuse_keys(
        refused,
        layers,
        one="LLM Foundry's option is left out here; ",
        several="options of LLM Foundry are left out here",
    )
    if values.get("device_eval_batch_size") == "auto":
        key = "device_eval_batch_size"
        raise ConfigError(f"{source_of(key, layers)}: {key}: auto is for training; give a number of samples")
