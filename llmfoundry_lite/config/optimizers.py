"""Optimizers that companions bring: values of `optimizer.name`, keys of that block, and what the core must know."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.fields import Key, keys_of


@dataclass(kw_only=True, slots=True, frozen=True)
class AddedOptimizer:
    """An optimizer of a companion, which names it `optimizer.name: NAME` among its builders."""

    settings: type
    """Dataclass of the keys that it adds to the block, each with a default, with fields made by `fields.setting`."""
    build: str
    """`module:function` of (parameters by name, the block, the model's configuration, the ranks that have the same
    parameters or None for all, the order of their rows, fused=bool), which returns torch's optimizer. Imported when a
    run trains. Parameters are whole or sharded, or a rank's rows (ZeRO-1). Not `fused`: equal digits for any shards."""
    slots: tuple[int, ...]
    """Numbers that it keeps for each parameter of a block, and for each outside of blocks if that differs."""
    problems: Callable[[Any], Iterator[str]] = lambda settings: iter(())
    """Function of the settings that yields `key: what is wrong` for keys that do not go together."""
    refuses_offload: str = ""
    """Reason why `offload_optimizer` does not go with it; empty: it does."""


@cache
def find_optimizers() -> dict[str, AddedOptimizer]:
    """Return the optimizers of the companions that are here, by name."""
    return companions.checked_parts("builders", AddedOptimizer, "optimizer.name: ")


def keys_of_optimizers() -> dict[str, Key]:
    """Return the keys that they add to the block. Of a key of several optimizers, the first one's rules hold."""
    found: dict[str, Key] = {}
    for name, optimizer in find_optimizers().items():
        for key, own in keys_of(optimizer.settings).items():
            one = found.get(key, own)
            only = replace(one.setting, only=f"{one.setting.only} {name}".strip())
            found[key] = Key(one.hint | None, None, only, one.block, one.container)
    return found


def settings_of(name: str, given: Mapping[str, Any]) -> Any:
    """Return the settings of a companion's optimizer. Keys without a value in `given` have its defaults."""
    settings = find_optimizers()[name].settings
    return settings(**{key: given[key] for key in keys_of(settings) if given.get(key) is not None})
