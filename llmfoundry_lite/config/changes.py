"""Changes in mid-run: the configuration in a checkpoint compared with that of the launch that carries the run on.

Each key's rule stands beside it in the schema. Fingerprints tell whether tokenizer and data are still the same.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from llmfoundry_lite.config.blocks import missing_blocks
from llmfoundry_lite.config.fields import REQUIRED, Rule, keys_of, settings_along
from llmfoundry_lite.config.layers import get, leaf_keys
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import TrainConfig, keys_of_optimizer
from llmfoundry_lite.errors import CheckpointError


class Change(NamedTuple):
    key: str
    there: Any
    """Value in the checkpoint; `here` is the launch's."""
    here: Any

    def __str__(self) -> str:
        if self.here is None and isinstance(self.there, Mapping):
            return f"{self.key} left out"
        return f"{self.key} {in_words(self.there)} -> {in_words(self.here)}"


def find_changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[Rule, list[Change]]:
    """Return all keys that differ between two configurations (as `schema.as_dict` gives them), by their rules.

    `there` may come from another release. A key that it lacks counts as the default; a key unknown here is ignored,
    but for a block of a companion that is missing here: it is left out.
    """
    absent = [Change(key, there[key], None) for key in missing_blocks(there)]
    found: dict[Rule, list[Change]] = {"freely": absent, "logged": [], "never": []}
    optimizer = there.get("optimizer")
    if isinstance(optimizer, dict):  # other releases recorded keys that a user's own optimizer is not given
        there = {**there, "optimizer": keys_of_optimizer(optimizer)}
    has_dropout = bool(get(here, "model.attn_config.attn_pdrop")[1])
    for change in _compare(TrainConfig, there, here, ""):
        is_drawn = has_dropout and any(one.shapes_dropout for one in settings_along(TrainConfig, change.key))
        found["logged" if is_drawn else rule_of(change.key)].append(change)
    return found


def find_model_changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[Change]:
    """Return changes of the model with which the same weights would compute something else."""
    then, now = there.get("model"), here.get("model")
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return []
    return [change for change in _compare(ModelConfig, then, now, "model") if rule_of(change.key) == "never"]


def refuse_changes(changes: list[Change]) -> None:
    """Raise CheckpointError if `changes` has any: these keys may never change."""
    if not changes:
        return
    differ = ", ".join(f"{c.key} is {as_text(c.here)} here and {as_text(c.there)} in the checkpoint" for c in changes)
    back = " ".join(f"{c.key}={as_text(c.there)}" for c in changes)
    raise CheckpointError(
        f"{differ}; a run carries on as the run it was: set {back}, or begin a new run with its weights (another "
        "run_name, load_path and load_weights_only=true)"
    )


def trained_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return key -> value as text, for every key that may not change freely. Launches that train one run together
    must agree in these. `config` is as `schema.as_dict` gives it."""
    return {key: as_text(get(config, key)[1]) for key in leaf_keys(dict(config)) if rule_of(key) != "freely"}


def rule_of(key: str) -> Rule:
    """Return the rule of a key: its own, or that of the nearest block with one. Raises KeyError for an unknown key."""
    if key == "optimizer.kwargs.weight_decay":  # arguments of a user's own optimizer have no schema
        return "logged"
    rules: list[Rule] = [one.rule for one in settings_along(TrainConfig, key) if one.rule is not None]
    if not rules:
        raise KeyError(key)
    return rules[-1]


def as_text(value: Any) -> str:
    """Write a value as it stands after `key=`."""
    return str(value) if isinstance(value, str) else json.dumps(value)


def in_words(value: Any) -> str:
    """Write a value for people: in its blocks, keys that are null or empty are left out."""

    def given(inner: Any) -> Any:
        if isinstance(inner, Mapping):
            return {key: given(one) for key, one in inner.items() if one is not None and one != {}}
        return list(map(given, inner)) if isinstance(inner, list) else inner

    return as_text(given(value))


def _compare(block: type | None, there: Any, here: Any, path: str) -> Iterator[Change]:
    if there == here:
        return
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        yield Change(path, there, here)
        return
    keys = keys_of(block) if block else dict.fromkeys({**there, **here})
    for name, key in keys.items():
        default = None if key is None or key.default is REQUIRED else key.default
        then, now = (side.get(name, default) for side in (there, here))
        place = f"{path}.{name}" if path else name
        if key and key.container and isinstance(then, Mapping) and isinstance(now, Mapping):
            for entry in {**then, **now}:
                yield from _compare(key.block, then.get(entry), now.get(entry), f"{place}.{entry}")
        else:
            yield from _compare(key.block if key else None, then, now, place)
