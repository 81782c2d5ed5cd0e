"""Keys that have no effect where they stand: refused or noted. The condition stands beside each key, in its schema."""

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
    """Raise ConfigError for a key without effect whose value says that the user expects one."""
    for unused in find_unused_keys(config, config):
        if unused.is_refused:
            raise ConfigError(f"{unused.key}: {unused.reason}")


def note_unused_keys(config: TrainConfig, layers: Sequence[ConfigLayer]) -> list[str]:
    """Return a note for each key without effect that a user wrote for this run.

    Overlays describe a machine for many runs, and a run folder's config.yaml has every key, so these are left out.
    """
    written = [layer for layer in layers if not layer.is_overlay and not _is_record(layer)]
    notes = []
    for unused in find_unused_keys(config, config):
        if any(find_value(layer.values, unused.key)[0] for layer in written):
            source = source_of(unused.key, written)
            notes.append(f"{source}: {unused.key} has no effect: {unused.reason}")
    return notes


def _is_record(layer: ConfigLayer) -> bool:
    """Return whether a layer is a recorded configuration: it has every key of a run."""
    return keys_of(TrainConfig).keys() <= layer.values.keys()


def find_unused_keys(
    block: Any, config: Any, path: str = "", uses_here: Mapping[str, Use] | None = None
) -> Iterator[Unused]:
    """Yield each key of `block`, which stands at `path`, and of the blocks inside it, whose value has no effect.

    `config` is the whole configuration. `uses_here` are further conditions, by dotted key within the block, which hold
    for a block in this place.
    """
    uses_here = uses_here or {}
    for name, key in keys_of(type(block)).items():
        # Blocks of companions are no attributes of the configuration.
        value = getattr(block, name) if hasattr(block, name) else block.blocks.get(name)
        uses = [*key.setting.uses]
        if name in uses_here:
            uses.append(uses_here[name])

        for use in uses:
            asks_for_effect = as_yaml(value) != key.default or use.even_default
            if asks_for_effect and not use.has_effect(block, config):
                reason = use.reason.format(block=block, run=config, path=path)
                yield Unused(key=join_key(path, name), reason=reason, is_refused=use.is_refused)
                break

        uses_inside = {**key.setting.uses_inside}
        for inner_key, use in uses_here.items():
            if inner_key.startswith(f"{name}."):
                uses_inside[inner_key.removeprefix(f"{name}.")] = use
        for inner_path, inner_block in key.blocks(join_key(path, name), value):
            if is_dataclass(inner_block):
                yield from find_unused_keys(inner_block, config, inner_path, uses_inside)
