"""Companions: packages beside this one that add commands, blocks of YAML, readers and builders. The only seam.

Ours lie in `companions/` of a clone, and are installed with a wheel; others announce themselves by an entry point of
the group `llmfoundry_lite.companions`. Each has a small `Companion` that names its parts, as `module:name`, and imports
none of them. The core imports no companion: it asks here for a part, and a missing one is an error of one line.
"""

import importlib
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
OURS: Mapping[str, tuple[str, ...]] = {
    "llmfoundry_islands": ("islands",),
    "llmfoundry_planner": ("plan", "fabric", "rehearse"),
    "llmfoundry_machines": ("bench", "doctor"),
    "llmfoundry_formats": (
        "init",
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
        "callbacks.hf_checkpointer",
        "callbacks.generate_callback",
        "callbacks.early_stopper",
        "callbacks.kill_loss_spike",
    ),
    "llmfoundry_ops": ("train -n", "watch", "relay", "relay.jsonl"),
    "llmfoundry_layouts": (
        "tp_config.tensor_parallel_degree",
        "cp_config.context_parallel_degree",
        "pp_config.pipeline_parallel_degree",
        "fsdp_config.sharding_strategy: ZERO_1",
        "memory of a pipeline's ranks",
    ),
}
"""Package -> its commands, blocks, readers and builders: what a missing one is asked for."""
SLOTS = ("commands", "blocks", "readers", "builders")
SOURCE = Path(__file__).parents[1] / "companions"


@dataclass(kw_only=True, slots=True, frozen=True)
class Companion:
    """Parts of a companion, each as `module:name`."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """`plan` -> a function, or a `typer.Typer` for a group; `train -n` -> what that option of the core's calls."""
    examples: tuple[str, ...] = ()
    """Command lines, with which the help of commands ends."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """A key of a run's YAML -> its `Block`."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """A kind of foreign file -> the function that reads it."""
    builders: Mapping[str, str] = field(default_factory=dict)
    """A key or setting of a run -> the builder of what it asks for."""


@cache
def find_companions() -> list[Companion]:
    """Return the companions that are here: ours in their order, then others'.

    One of others' that cannot be loaded, or has a part of a name that is taken, is left out with a line.
    """
    if SOURCE.is_dir():
        sys.path.insert(0, str(SOURCE))  # those of this clone go before installed ones
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
    """Say that a companion of others', or a part of it, is left out, and why."""
    words = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: companion {name}: left out: {words}", file=sys.stderr, flush=True)


def search_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return PYTHONPATH for a process that runs a module of a companion."""
    given = environment.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE) if SOURCE.is_dir() else "", given]))}


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


def find(slot: str, name: str) -> Any:
    """Import the part of this name. Raises ConfigError that names the missing companion."""
    for companion in find_companions():
        if name in getattr(companion, slot):
            return bring(getattr(companion, slot)[name])
    raise missing(name)


def require(name: str) -> None:
    """Raise ConfigError where the companion of ours that has this part is not here. Imports none of its parts."""
    if name in list_missing():
        raise missing(name)


def missing(name: str) -> ConfigError:
    package = next((package for package, names in OURS.items() if name in names), None)
    return ConfigError(f"{name}: needs the companion {package}" if package else f"{name}: no companion has it")


def list_missing() -> list[str]:
    """Return the names that our companions would have, and that are not here."""
    find_companions()  # of this clone, too
    return [name for package, names in OURS.items() if find_spec(package) is None for name in names]


def bring(where: str) -> Any:
    """Import a part, given as `module:name`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
