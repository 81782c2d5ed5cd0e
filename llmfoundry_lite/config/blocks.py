"""Blocks that companions add at the top level of a run's YAML, such as `islands:`.

An installed companion names its blocks (a `RunBlock` each) by the entry point `llmfoundry_lite.companions`. The core
knows the keys inside a block only by its dataclass. It calls the functions of the RunBlock to check and describe the
block, and adds the block's callback to the run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.config.fields import Key, Setting


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedRun:
    """Part of a block by which a launch becomes one of several launches that train one run together."""

    role: str
    """`module:function`, which returns the launch's `LaunchRole`. Imported when a run trains, and called with the
    TrainConfig of the run."""
    folder_key: str
    """Name of the block's key that gives this launch a folder of its own within the run's."""


def _accept(config: Any) -> None:
    """Accept every configuration."""


def _say_nothing(config: Any) -> str:
    """Return empty text for a dry run."""
    return ""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunBlock:
    """A block of a companion in a run's YAML: its keys, checks, and what it adds to the run.

    The functions are called with the TrainConfig of the run, in which `config.blocks["name"]` is the block, an object
    of the class `schema`. A run may have any number of blocks, but only one with a `shared_run`.
    """

    schema: type
    """The block's dataclass, frozen, with fields made by `fields.setting`."""
    rules: Setting = field(default_factory=lambda: Setting(change="logged"))
    """Rules of the key itself: whether hardware may set it, and how it may change in mid-run. By default, a change
    takes effect, and is printed and recorded. A replay leaves the block out."""
    check: Callable[[Any], None] = _accept
    """Function that raises ConfigError where the block does not go with the rest of the run."""
    check_here: Callable[[Any], Any] = _accept
    """Function that raises ConfigError for anything that this machine lacks."""
    describe: Callable[[Any], str] = _say_nothing
    """Function that returns what a dry run says of the block. Without a `shared_run`, this is a line of its own; with
    one, it is the end of the first line."""
    callback: str = ""
    """`module:function`, which returns a Composer callback, or none if it is empty. Imported when a run trains, and
    called with the TrainConfig. Checkpoints keep what the callback's `state_dict` returns."""
    shared_run: SharedRun | None = None
    """Set for a block by which several launches train one run together."""


@cache
def find_blocks() -> dict[str, RunBlock]:
    """Return key -> RunBlock for the blocks of all installed companions.

    A companion's part that is not a RunBlock is left out, with a note, so that it does not break launches without it.
    """
    blocks = {}
    for key, part in dict(companions.parts("blocks")).items():
        if isinstance(part, RunBlock):
            blocks[key] = part
        else:
            companions.leave_out(key, TypeError(f"{part!r} is no RunBlock"))
    return blocks


def given_blocks(values: Mapping[str, Any]) -> dict[str, RunBlock]:
    """Return key -> RunBlock for the blocks of companions that `values`, a configuration by its keys, sets."""
    return {key: block for key, block in find_blocks().items() if values.get(key) is not None}


def missing_blocks(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of blocks that `values` sets and whose companions are known but not installed."""
    return [key for key in companions.find_missing("blocks") if values.get(key) is not None]


def keys_of_blocks() -> dict[str, Key]:
    """Return the keys that installed companions add to TrainConfig. A block may be null: then the run is without it."""
    keys = {}
    for name, block in find_blocks().items():
        # A replay takes nothing of a block, because the record may be a stranger's, and a block brings its callback.
        rules = replace(block.rules, replay="left out")
        keys[name] = Key(block.schema | None, default=None, setting=rules, block=block.schema, container=None)
    return keys
