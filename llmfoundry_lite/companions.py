"""Load optional packages, the companions, which add commands, blocks of a YAML, and other parts to this package.

The core does not import companions with `import`. If it needs a part of one of our companions, it names the part by its
address, `package.module:name`, in the line that uses it:

    build_context = companions.load("llmfoundry_layouts.context:build_context", "cp_config.context_parallel_degree")

If the companion is not installed, this raises an error of one line. Parts that a run can do without, such as energy
counters, are loaded by `load_if_installed`.

Any companion, also one of other authors, may add commands to `llmfoundry-lite` and blocks to a run's YAML. It lists
them in a `Companion`. Ours is in the module `companion.py` of each package, and those of others are found by the entry
point group `llmfoundry_lite.companions`. Our companions are in the folder `companions/` of a clone, and in the wheel.
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
    "llmfoundry_studies",
    "llmfoundry_engines",
)
"""Names of our companions' packages."""

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
        "runs": "llmfoundry_ops",
    },
    "blocks": {"islands": "llmfoundry_islands"},
}
"""Field of a `Companion` -> names in it -> the companion of ours that has each. An error names the companion if it is
not installed."""

SOURCE = Path(__file__).parents[1] / "companions"
"""Folder of our companions in a clone. An installed package has no such folder."""


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
    """Import and return a part of one of our companions, such as "llmfoundry_layouts.context:build_context".

    `needed_for` is the key, file or option by which the user asked for it. Raises ConfigError, which begins with that,
    if the companion is not installed: `cp_config.context_parallel_degree: needs the companion llmfoundry_layouts`.
    """
    require(address.partition(".")[0], needed_for or address)
    return import_address(address)


def load_if_installed(address: str) -> Any:
    """Import and return a part of one of our companions, by its address; return None if it is not installed."""
    if not is_installed(address.partition(".")[0]):
        return None
    return import_address(address)


def require(package: str, needed_for: str) -> None:
    """Raise ConfigError if a companion is not installed. Nothing is imported, so that checks of a YAML stay fast.

    `package` is one of PACKAGES, and `needed_for` is as in `load`.
    """
    if not is_installed(package):
        raise missing(package, needed_for)


def missing(package: str, needed_for: str) -> ConfigError:
    """Return, but do not raise, the error that a companion is not installed. The arguments are those of `require`."""
    return ConfigError(f"{needed_for}: needs the companion {package}")


def is_installed(package: str) -> bool:
    """Return whether one of our companions can be imported, from this clone or as an installed package."""
    _search_clone()
    return find_spec(package) is not None


@cache
def _search_clone() -> None:
    """Add the folder of the companions in a clone to `sys.path`, once. They take precedence over installed ones."""
    if SOURCE.is_dir():
        sys.path.insert(0, str(SOURCE))


def import_address(address: str) -> Any:
    """Import and return what an address `module:name` names. Raises ImportError or AttributeError if it is missing."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


# ---------------------------------------------------------------------------------------------- commands and blocks


@cache
def find_companions() -> list[Companion]:
    """Return the installed companions that add commands or blocks: ours in the order of TABLES, then those of others.

    A companion of others is left out, with a warning, if it cannot be loaded or if it adds a command or block that
    exists already.
    """
    our_packages: dict[str, None] = {}  # a set that keeps its order
    for package_by_name in TABLES.values():
        our_packages |= dict.fromkeys(package_by_name.values())
    companions = [import_address(f"{package}.companion:COMPANION") for package in our_packages if is_installed(package)]

    # Code of others may raise any error when it is loaded. That must not break commands which do not need it.
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
    """Raise ValueError if a command or block of `companion` has the name of one in `others`."""
    for table in TABLES:
        names_of_others = {name for other in others for name in getattr(other, table)}
        names_in_both = names_of_others & {*getattr(companion, table)}
        if names_in_both:
            raise ValueError(f"its {table} {', '.join(sorted(names_in_both))} are already defined by another companion")


def parts(table: str) -> Iterator[tuple[str, Any]]:
    """Import all commands or blocks of installed companions. Yields the name of each, and what its address names.

    `table` is "commands" or "blocks". A part of others that cannot be imported is left out, with a warning. An error in
    one of ours is raised.
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
    """Return name -> package for our commands or blocks whose companion is not installed.

    `table` is "commands" or "blocks". Without llmfoundry_islands, the blocks are {"islands": "llmfoundry_islands"}.
    """
    installed_names = {name for companion in find_companions() for name in getattr(companion, table)}
    return {name: package for name, package in TABLES[table].items() if name not in installed_names}


def leave_out(name: str, error: Exception) -> None:
    """Print a warning that a companion, or a part of it, is left out because of an error."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: companion {name}: left out: {message}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- other processes


def search_path(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable PYTHONPATH for a process that runs a module of this package or of a companion.

    Such a process is started by `python -P -m`, and `-P` leaves out the working directory, from which a clone that is
    not installed is imported. So the clone's folders are named, before those of PYTHONPATH in `environment`. Empty
    entries are dropped, because they would mean the working directory.
    """
    clone_folders = [str(SOURCE.parent), str(SOURCE)] if SOURCE.is_dir() else []
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    named_folders = [entry for entry in entries if entry]
    return {"PYTHONPATH": os.pathsep.join([*clone_folders, *named_folders])}
