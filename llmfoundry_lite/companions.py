"""Companions: packages beside this one that add commands, blocks of YAML, readers and builders. The only seam.

Ours are in `companions/` of a clone, and installed with a wheel. Others announce themselves by an entry point of the
group `llmfoundry_lite.companions`. Each has a small `Companion` that names its parts, as `module:name`, and imports
none of them. The core imports no companion: it asks for a part here. A missing one is an error of one line; energy, a
fast encoder and a report's launches are done without. Any `commands` may be added. `readers` and `builders` answer
names that the core asks for: a new name needs a caller there.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import ConfigError

GROUP = "llmfoundry_lite.companions"
SLOTS = ("commands", "blocks", "readers", "builders")
OURS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "llmfoundry_islands": {"commands": ("islands",), "blocks": ("islands",)},
    "llmfoundry_planner": {"commands": ("plan", "fabric", "rehearse")},
    "llmfoundry_machines": {"commands": ("bench", "doctor")},
    "llmfoundry_formats": {
        "readers": (
            "causal models of other types",
            "folders of GPT-2, Llama, Mistral and Qwen",
            "checkpoints of Composer and DCP",
            "pytorch_model.bin",
            "tokenizers without tokenizer.json",
            "hf:// data sets of tasks",
            "hf: data sets of text",
            "hf: models to import",
            "hf: models to evaluate",
            "rows of CSV, parquet and arrow",
            "rows of parquet and arrow",
            "logs of lm-eval and Inspect",
        ),
        "builders": ("fast encoder of text: gigatoken",),
    },
    "llmfoundry_ops": {
        "commands": ("init", "train -n", "watch", "relay"),
        "readers": ("runs that are still written",),
        "builders": (
            "additions to a report",
            "energy counters",
            "callbacks.hf_checkpointer",
            "callbacks.generate_callback",
            "callbacks.early_stopper",
            "callbacks.kill_loss_spike",
        ),
    },
    "llmfoundry_layouts": {
        "builders": (
            "tp_config.tensor_parallel_degree",
            "tp_config.tensor_parallel_degree: the loss",
            "cp_config.context_parallel_degree",
            "pp_config.pipeline_parallel_degree",
            "fsdp_config.sharding_strategy: ZERO_1",
            "checks of tp_config, cp_config and pp_config",
            "check of a pipeline's microbatches",
            "dry run of tp_config, cp_config and pp_config",
            "memory of a pipeline's ranks",
        )
    },
}
"""Package -> slot -> names of its parts, so that an error can name a companion that is not here."""
SOURCE = Path(__file__).parents[1] / "companions"


@dataclass(kw_only=True, slots=True, frozen=True)
class Companion:
    """Parts of a companion, each as `module:name`."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """`plan` -> a function, or a `typer.Typer` for a group; `train -n` -> the function behind that option."""
    examples: tuple[str, ...] = ()
    """Command lines to show at the end of help texts."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """A key of a run's YAML -> its `Block`."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """A kind of foreign file -> the function that reads it."""
    builders: Mapping[str, str] = field(default_factory=dict)
    """A key or setting of a run, or what else the core asks for -> the function, class or table for it."""


@cache
def find_companions() -> list[Companion]:
    """Return the installed companions: ours in their order, then those of others.

    One of others that cannot be loaded, or names a part like an existing one, is left out with a line.
    """
    if SOURCE.is_dir():
        sys.path.insert(0, str(SOURCE))  # this clone's take precedence over installed ones
    found: list[Companion] = [
        importlib.import_module(f"{name}.companion").COMPANION for name in OURS if find_spec(name)
    ]
    for point in entry_points(group=GROUP):
        try:
            other = point.load()
            if not isinstance(other, Companion):
                raise TypeError(f"{point.value} is no Companion")
            for slot in SLOTS:
                taken = {name for one in found for name in getattr(one, slot)} & {*getattr(other, slot)}
                if taken:
                    raise ValueError(f"its {slot} {', '.join(sorted(taken))} are another's already")
        except Exception as error:
            leave_out(point.name, error)
        else:
            found.append(other)
    return found


def leave_out(name: str, error: Exception) -> None:
    """Print that a companion of others, or a part of it, is left out, and why."""
    words = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: companion {name}: left out: {words}", file=sys.stderr, flush=True)


def search_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return PYTHONPATH for a process that runs a module of this package or of a companion, by `python -P -m`.

    `-P` leaves out the working directory, from which a clone that is not installed is imported. So the clone is named.
    An empty entry would be the working directory.
    """
    folders = [str(SOURCE.parent), str(SOURCE)] if SOURCE.is_dir() else []
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, given)])}


def parts(slot: str, is_asked: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, Any]]:
    """Import and yield parts in a slot: `commands`, `blocks`, `readers` or `builders`."""
    for companion in find_companions():
        for name, where in getattr(companion, slot).items():
            if not is_asked(name):
                continue
            try:
                part = bring(where)
            except (ImportError, AttributeError) as error:
                if where.startswith(tuple(OURS)):
                    raise
                leave_out(name, error)
            else:
                yield name, part


def find(slot: str, name: str, where: str = "") -> Any:
    """Import the part of this name. Raises ConfigError, which names the missing companion, and `where` it is needed."""
    if (part := look_for(slot, name)) is None:
        raise missing(name, where)
    return part


def look_for(slot: str, name: str) -> Any:
    """Import the part of this name; return None if no companion has it."""
    given = next((there for one in find_companions() if name in (there := getattr(one, slot))), None)
    return None if given is None else bring(given[name])


def require(slot: str, name: str, where: str = "") -> None:
    """Raise ConfigError if no companion has this part, which one of ours would have. Imports no part."""
    if name in list_missing(slot):
        raise missing(name, where)


def missing(name: str, where: str = "") -> ConfigError:
    package = next((package for package, slots in OURS.items() if name in itertools.chain(*slots.values())), None)
    what = f"{where}: {name}" if where else name
    return ConfigError(f"{what}: needs the companion {package}" if package else f"{what}: no companion has it")


def list_missing(*slots: str) -> list[str]:
    """Return the parts of our companions that nobody has here, by name: those in `slots`, or in every slot."""
    found = find_companions()  # makes those of this clone importable
    absent = [ours for package, ours in OURS.items() if find_spec(package) is None]
    asked = [(slot, name) for ours in absent for slot in slots or SLOTS for name in ours.get(slot, ())]
    return [name for slot, name in asked if not any(name in getattr(one, slot) for one in found)]


def bring(where: str) -> Any:
    """Import a part, given as `module:name`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
