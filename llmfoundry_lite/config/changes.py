"""Changes in mid-run: the configuration in a checkpoint compared with that of the launch that carries the run on.

Each key's rule stands beside it in the schema. Fingerprints tell whether tokenizer and data are still the same.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llmfoundry_lite.config.blocks import missing_blocks
from llmfoundry_lite.config.fields import REQUIRED, Rule, join_key, keys_of, settings_along
from llmfoundry_lite.config.layers import find_value, leaf_keys
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig, keys_of_optimizer
from llmfoundry_lite.errors import CheckpointError


class Change(NamedTuple):
    """A key that differs between a checkpoint and the launch that carries the run on."""

    key: str
    before: Any
    """Value in the checkpoint."""
    after: Any
    """Value of the launch. None for a block that the launch leaves out."""

    def __str__(self) -> str:
        if self.after is None and isinstance(self.before, Mapping):
            return f"{self.key} left out"
        return f"{self.key} {in_words(self.before)} -> {in_words(self.after)}"


def find_changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> dict[Rule, list[Change]]:
    """Return all keys that differ between a checkpoint's configuration and a launch's, by their rules.

    Both are as `schema.as_dict` gives them. The `recorded` one may come from another release. A key that it lacks
    counts as the default. A key that is unknown to this release is ignored, except for the block of a companion that is
    missing here: that is a change, because the launch leaves the block out.
    """
    changes: dict[Rule, list[Change]] = {"freely": [], "logged": [], "never": []}
    changes["freely"] += [Change(name, recorded[name], None) for name in missing_blocks(recorded)]

    optimizer = recorded.get("optimizer")
    if isinstance(optimizer, dict):  # other releases recorded keys that a user's own optimizer is not given
        recorded = {**recorded, "optimizer": keys_of_optimizer(optimizer)}

    _, attention_dropout = find_value(config, "model.attn_config.attn_pdrop")
    for change in _compare(TrainConfig, recorded, config, ""):
        settings = settings_along(TrainConfig, change.key)
        shapes_dropout = any(setting.shapes_dropout for setting in settings)
        rule = "logged" if attention_dropout and shapes_dropout else rule_of(change.key)
        changes[rule].append(change)
    return changes


def find_model_changes(recorded: Mapping[str, Any], config: Mapping[str, Any]) -> list[Change]:
    """Return changes of the model with which the same weights would compute something else."""
    before, after = recorded.get("model"), config.get("model")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return []
    return [change for change in _compare(ModelConfig, before, after, "model") if rule_of(change.key) == "never"]


def refuse_changes(changes: list[Change]) -> None:
    """Raise CheckpointError if `changes` has any: these keys may never change."""
    if not changes:
        return
    differences = ", ".join(
        f"{change.key} is {as_text(change.after)} here and {as_text(change.before)} in the checkpoint"
        for change in changes
    )
    arguments = " ".join(f"{change.key}={as_text(change.before)}" for change in changes)
    raise CheckpointError(
        f"{differences}; a run carries on as the run it was: set {arguments}, or begin a new run with its weights "
        "(another run_name, load_path and load_weights_only=true)"
    )


def trained_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> value as text, for every key that may not change freely.

    Launches that train one run together must agree in these. `config` is as `schema.as_dict` gives it.
    """
    keys = [key for key in leaf_keys(dict(config)) if rule_of(key) != "freely"]
    return {key: as_text(find_value(config, key)[1]) for key in keys}


def rule_of(key: str) -> Rule:
    """Return the rule of a key: its own, or that of the nearest block with one. Raises KeyError for an unknown key."""
    if key == "optimizer.kwargs.weight_decay":  # arguments of a user's own optimizer have no schema
        return "logged"
    rules: list[Rule | None] = [setting.rule for setting in settings_along(TrainConfig, key)]
    for rule in reversed(rules):
        if rule is not None:
            return rule
    raise KeyError(key)


def as_text(value: Any) -> str:
    """Write a value as it stands after `key=`."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def in_words(value: Any) -> str:
    """Write a value for people: in its blocks, keys that are null or empty are left out."""
    return as_text(_without_empty_keys(value))


def _without_empty_keys(value: Any) -> Any:
    """Return `value` without keys of its blocks, at any depth, that are null or empty blocks."""
    if isinstance(value, Mapping):
        return {key: _without_empty_keys(inner) for key, inner in value.items() if inner is not None and inner != {}}
    if isinstance(value, list):
        return [_without_empty_keys(inner) for inner in value]
    return value


def _compare(block: type | None, before: Any, after: Any, path: str) -> Iterator[Change]:
    """Yield the changes in what stands at `path`. `block` is its dataclass; None for a value without a schema."""
    if before == after:
        return
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        yield Change(path, before, after)
        return
    if block is None:
        for name in {**before, **after}:
            yield from _compare(None, before.get(name), after.get(name), join_key(path, name))
        return

    for name, key in keys_of(block).items():
        default = None if key.default is REQUIRED else key.default
        value_before, value_after = before.get(name, default), after.get(name, default)
        place = join_key(path, name)
        if key.container and isinstance(value_before, Mapping) and isinstance(value_after, Mapping):
            for entry in {**value_before, **value_after}:
                yield from _compare(key.block, value_before.get(entry), value_after.get(entry), f"{place}.{entry}")
        else:
            yield from _compare(key.block, value_before, value_after, place)
