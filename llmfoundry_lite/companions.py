"""The seam to companions: packages beside this one that add to it. The core imports none of them.

Where the core needs a part of one of our companions, it names the part by its address, `package.module:name`, in the
line that uses it:

    build_context = companions.load("llmfoundry_layouts.context:build_context", "cp_config.context_parallel_degree")

Without the companion this raises an error of one line. What a run can do without, such as energy counters, is asked
for with `load_if_installed`.

Any companion, also somebody else's, may add commands to `llmfoundry-lite` and blocks to a run's YAML. It lists them in
a `Companion`: ours in their module `companion.py`, others in what an entry point of the group
`llmfoundry_lite.companions` names. Ours lie in `companions/` of a clone, and a wheel brings them.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import ConfigError

GROUP = "llmfoundry_lite.companions"

PACKAGES = (
    "llmfoundry_islands",
    "llmfoundry_planner",
    "llmfoundry_machines",
    "llmfoundry_formats",
    "llmfoundry_ops",
    "llmfoundry_layouts",
)
"""Our companions."""

TABLES: Mapping[str, Mapping[str, str]] = {
    "commands": {
        "islands": "llmfoundry_islands",
        "plan": "llmfoundry_planner",
        "fabric": "llmfoundry_planner",
        "rehearse": "llmfoundry_planner",
        "bench": "llmfoundry_machines",
        "doctor": "llmfoundry_machines",
        "init": "llmfoundry_ops",
        "watch": "llmfoundry_ops",
        "relay": "llmfoundry_ops",
    },
    "blocks": {"islands": "llmfoundry_islands"},
}
"""Table of a `Companion` -> name of each entry of ours -> its package, which an error names where it is missing."""

SOURCE = Path(__file__).parents[1] / "companions"


@dataclass(kw_only=True, slots=True, frozen=True)
class Companion:
    """Commands and blocks that a companion adds, each by its address, `module:name`."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """Name of a command of `llmfoundry-lite` -> its function, or a `typer.Typer` for a group of commands."""
    examples: tuple[str, ...] = ()
    """Command lines to show at the end of help texts."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Key of a run's YAML -> its `Block` (`config/blocks.py`)."""


# ------------------------------------------------------------------------------------------------ parts by address


def load(address: str, needed_for: str = "") -> Any:
    """Import a part of one of our companions, such as "llmfoundry_layouts.context:build_context".

    `needed_for` is what the user asked for: a key, a file, an option. Raises ConfigError, which begins with it, if the
    companion is not installed.
    """
    require(address.partition(".")[0], needed_for or address)
    return import_address(address)


def load_if_installed(address: str) -> Any:
    """Import a part of one of our companions; return None if the companion is not installed."""
    if not is_installed(address.partition(".")[0]):
        return None
    return import_address(address)


def require(package: str, needed_for: str) -> None:
    """Raise ConfigError if this companion is not installed. Imports nothing, so that a check answers quickly."""
    if not is_installed(package):
        raise missing(package, needed_for)


def missing(package: str, needed_for: str) -> ConfigError:
    """Return the error that names a companion which is not installed."""
    return ConfigError(f"{needed_for}: needs the companion {package}")


def is_installed(package: str) -> bool:
    """Return whether one of our companions lies in this clone or is installed."""
    _search_clone()
    return find_spec(package) is not None


@cache
def _search_clone() -> None:
    """Let Python find the companions of this clone, which take precedence over installed ones."""
    if SOURCE.is_dir():
        sys.path.insert(0, str(SOURCE))


def import_address(address: str) -> Any:
    """Import what an address names, `module:name`. Raises ImportError or AttributeError."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


# ---------------------------------------------------------------------------------------------- commands and blocks


@cache
def find_companions() -> list[Companion]:
    """Return the installed companions that add commands or blocks: ours in the order of `TABLES`, then those of others.

    One of others that cannot be loaded, or names a part like an existing one, is left out with a line.
    """
    ours = dict.fromkeys(package for table in TABLES.values() for package in table.values())
    companions = [import_address(f"{package}.companion:COMPANION") for package in ours if is_installed(package)]

    for entry_point in entry_points(group=GROUP):
        try:
            companion = entry_point.load()
            if not isinstance(companion, Companion):
                raise TypeError(f"{entry_point.value} is not a Companion")
            _check_names(companion, companions)
        except Exception as error:
            leave_out(entry_point.name, error)
        else:
            companions.append(companion)
    return companions


def _check_names(companion: Companion, others: list[Companion]) -> None:
    """Raise ValueError if a command or block of this companion has the name of another companion's."""
    for table in TABLES:
        names = {name for other in others for name in getattr(other, table)}
        taken = names & {*getattr(companion, table)}
        if taken:
            raise ValueError(f"its {table} {', '.join(sorted(taken))} are already defined by another companion")


def parts(table: str) -> Iterator[tuple[str, Any]]:
    """Import and yield the name and the part of each entry in a table: "commands" or "blocks".

    Where somebody else's part cannot be imported, it is left out with a line.
    """
    for companion in find_companions():
        for name, address in getattr(companion, table).items():
            try:
                part = import_address(address)
            except (ImportError, AttributeError) as error:
                if address.partition(".")[0] in PACKAGES:
                    raise
                leave_out(name, error)
            else:
                yield name, part


def find_missing(table: str) -> dict[str, str]:
    """Return the commands or blocks of ours that no installed companion has: name -> the package that would have it."""
    names = {name for companion in find_companions() for name in getattr(companion, table)}
    return {name: package for name, package in TABLES[table].items() if name not in names}


def leave_out(name: str, error: Exception) -> None:
    """Print that a companion of others, or a part of it, is left out, and why."""
    words = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: companion {name}: left out: {words}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- other processes


def search_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return PYTHONPATH for a process that runs a module of this package or of a companion, by `python -P -m`.

    `-P` leaves out the working directory, from which a clone that is not installed is imported. So the clone is named.
    An empty entry would be the working directory.
    """
    folders = [str(SOURCE.parent), str(SOURCE)] if SOURCE.is_dir() else []
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, given)])}
