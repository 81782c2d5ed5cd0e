"""Find keys of a configuration that have no effect beside its other keys, and refuse or note them.

The condition under which a key has an effect (`fields.Use`) is stored with the key in its schema. This file applies the
conditions to a built configuration. For example, `max_skipped_batches: 5` has none unless `on_non_finite` is `skip`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from llmfoundry_lite.config.fields import Use, as_yaml, join_key, keys_of
from llmfoundry_lite.config.layers import ConfigLayer, find_value, source_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class Unused:
    """A key whose value has no effect."""

    key: str
    """Dotted key."""
    reason: str
    is_refused: bool


def refuse_unused_keys(config: TrainConfig) -> None:
    """Raise ConfigError for the first key without effect whose condition says `is_refused`.

    These are keys without which the run would be another than the user asks for, such as load_weights_only beside no
    load_path.
    """
    for unused in find_unused_keys(config, config):
        if unused.is_refused:
            raise ConfigError(f"{unused.key}: {unused.reason}")


def note_unused_keys(config: TrainConfig, layers: Sequence[ConfigLayer]) -> list[str]:
    """Return a note for each key without effect that a user wrote for this run.

    Keys of hardware overlays are not noted, because an overlay describes a machine for many runs. Keys of a recorded
    config.yaml are not noted either, because a record has every key.
    """
    layers_by_hand = [layer for layer in layers if not layer.is_overlay and not _is_record(layer)]
    notes = []
    for unused in find_unused_keys(config, config):
        is_written = any(find_value(layer.values, unused.key)[0] for layer in layers_by_hand)
        if is_written:
            source = source_of(unused.key, layers_by_hand)
            notes.append(f"{source}: {unused.key} has no effect: {unused.reason}")
    return notes


def _is_record(layer: ConfigLayer) -> bool:
    """Return whether a layer is the config.yaml that a run has recorded, which has every key of the schema."""
    return keys_of(TrainConfig).keys() <= layer.values.keys()


def find_unused_keys(
    block: Any, config: Any, path: str = "", extra_conditions: Mapping[str, Use] | None = None
) -> Iterator[Unused]:
    """Yield each key of `block`, and of the blocks inside it, whose value asks for an effect that it does not have.

    `config` is the whole configuration, and `path` is the dotted key of the block in it. `extra_conditions` maps dotted
    keys within the block to conditions that do not come from its own schema: `dataset.shuffle` has no effect in
    eval_loader, although it has one in train_loader.
    """
    extra_conditions = extra_conditions or {}
    for name, key in keys_of(type(block)).items():
        # The blocks of companions are not attributes of the configuration.
        value = getattr(block, name) if hasattr(block, name) else block.blocks.get(name)
        conditions = [*key.setting.uses]
        if name in extra_conditions:
            conditions.append(extra_conditions[name])

        # One reason is enough for a key.
        for condition in conditions:
            asks_for_effect = as_yaml(value) != key.default or condition.even_default
            if asks_for_effect and not condition.has_effect(block, config):
                reason = condition.reason.format(block=block, run=config, path=path, key=name)
                yield Unused(key=join_key(path, name), reason=reason, is_refused=condition.is_refused)
                break

        # Go into the blocks that this key holds, with the extra conditions for keys inside them.
        inner_conditions = {**key.setting.uses_inside}
        for inner_key, condition in extra_conditions.items():
            if inner_key.startswith(f"{name}."):
                inner_conditions[inner_key.removeprefix(f"{name}.")] = condition
        for inner_path, inner_block in key.blocks(join_key(path, name), value):
            if is_dataclass(inner_block):
                yield from find_unused_keys(inner_block, config, inner_path, inner_conditions)
