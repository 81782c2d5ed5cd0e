"""Blocks that companions add at the top level of a run's YAML, such as `islands:`.

An installed companion names its blocks (a `Block` each) by the entry point `llmfoundry_lite.companions`. The core knows
the keys inside a block only by its dataclass, and calls the functions of the Block to check and describe it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.fields import Key, Setting


@dataclass(kw_only=True, slots=True, frozen=True)
class Block:
    """A block of a companion, by which a launch becomes one of several launches that train one run together.

    The functions are called with the TrainConfig of the run.
    """

    schema: type
    """The block's dataclass, with fields made by `fields.setting`."""
    rules: Setting
    """Rules of the key itself: whether hardware may set it, how it may change in mid-run, whether `replay` uses it."""
    partners: str
    """`module:function`, which returns the run's `Partners`. Imported when a run trains."""
    check: Callable[[Any], None]
    """Function that raises ConfigError where the block does not go with the rest of the run."""
    check_here: Callable[[Any], Any]
    """Function that raises ConfigError for anything that this machine lacks."""
    describe: Callable[[Any], str]
    """Function that returns the end of the dry run's first line."""
    folder_key: str
    """Name of the field that gives this launch a folder of its own within the run's."""


@cache
def find_blocks() -> dict[str, Block]:
    """Return key -> Block for the blocks of all installed companions.

    A companion's part that is not a Block is left out, with a note, so that it does not break launches without it.
    """
    blocks = {}
    for key, part in dict(companions.parts("blocks")).items():
        if isinstance(part, Block):
            blocks[key] = part
        else:
            companions.leave_out(key, TypeError(f"{part!r} is no Block"))
    return blocks


def given_blocks(values: Mapping[str, Any]) -> dict[str, Block]:
    """Return key -> Block for the blocks of installed companions that `values`, a configuration by its keys, sets."""
    return {key: block for key, block in find_blocks().items() if values.get(key) is not None}


def missing_blocks(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of blocks that `values` sets and whose companions are known but not installed."""
    return [key for key in companions.find_missing("blocks") if values.get(key) is not None]


def keys_of_blocks() -> dict[str, Key]:
    """Return the keys that installed companions add to TrainConfig. A block may be null: then the run is without it."""
    keys = {}
    for name, block in find_blocks().items():
        keys[name] = Key(block.schema | None, default=None, setting=block.rules, block=block.schema, container=None)
    return keys
