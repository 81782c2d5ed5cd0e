"""Load optional packages, the companions, which add commands, blocks of a YAML, and other parts to this package.

The core does not import companions with `import`. If it needs a part of one of our companions, it names the part by its
address, `package.module:name`, in the line that uses it:

    build_context = companions.load("llmfoundry_layouts.context:build_context", "cp_config.context_parallel_degree")

If the companion is not installed, this raises an error of one line. Parts that a run can do without, such as energy
counters, are loaded by `load_if_installed`.

Any companion, also one of other authors, may add commands to `llmfoundry-lite`, blocks to a run's YAML, and short names
of parts such as norms and callbacks. It lists them in a `Companion`. Ours is in the module `companion.py` of each
package, and those of others are found by the entry point group `llmfoundry_lite.companions`. Our companions are in the
folder `companions/` of a clone, and in the wheel.
"""

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import ConfigError, find_nearest, join_with_or

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

PART_KEYS: Mapping[str, tuple[str, ...]] = {
    "norms": ("model.norm_type", "model.attn_config.norm_type"),
    "ffns": ("model.ffn_config.ffn_type",),
    "attention_classes": ("model.attn_config.attn_type",),
    "attention_implementations": ("model.attn_config.attn_impl",),
    "losses": ("model.loss_fn",),
    "optimizers": ("optimizer.name",),
    "schedulers": ("scheduler.name",),
    "tokenizers": ("tokenizer.name",),
    "dataloaders": ("train_loader.name", "eval_loader.name", "eval_loaders.*.name"),
    "callbacks": ("callbacks.*", "callbacks.extra.*"),
    "loggers": ("loggers.*", "loggers.extra.*"),
    "icl_datasets": ("icl_tasks.*.icl_task_type",),
    "metrics": ("icl_tasks.*.metric_names", "icl_tasks.*.metric", "icl_tasks.*.metric_kwargs.*"),
    "readers": (),
}
"""Kind of part, by the name of LLM Foundry's registry if it has one -> dotted keys of a YAML whose value may name such
a part. A `*` in the middle stands for any name, or for each entry of a list. At the end, the keys of the block are the
names. Readers are for `data prepare`, which reads no YAML; their names are suffixes of files, such as `.mbx`."""

SOURCE = Path(__file__).parents[1] / "companions"
"""Folder of our companions in a clone. An installed package has no such folder."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Companion:
    """Everything that a companion adds, each by its address, `module:name`."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """Name of a command of `llmfoundry-lite` -> its function, or a `typer.Typer` for a group of commands."""
    examples: tuple[str, ...] = ()
    """Command lines to show at the end of help texts."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Key of a run's YAML -> its `RunBlock` (`config/blocks.py`)."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Kind of part (`PART_KEYS`) -> short name -> address of the class or function, such as
    `{"norms": {"scalenorm": "tiny.norms:ScaleNorm"}}`. A YAML may then say `norm_type: scalenorm` instead of
    `norm_type: python:tiny.norms:ScaleNorm`, with the same meaning."""


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
    """Return the installed companions that add something: ours in the order of TABLES, then those of others by name.

    A companion of others is left out, with a warning, if it cannot be loaded. Of a companion that can be, names of
    commands, blocks and parts are left out, with a warning for each, if another companion has them already or if they
    or their addresses have another form.
    """
    our_packages: dict[str, None] = {}  # a set that keeps its order
    for package_by_name in TABLES.values():
        our_packages |= dict.fromkeys(package_by_name.values())
    companions = [import_address(f"{package}.companion:COMPANION") for package in our_packages if is_installed(package)]
    _left_out.clear()

    # Code of others may raise any error when it is loaded. That must not break commands which do not need it.
    # Their order decides which of two keeps a name, so it is not that of the folders in which they are found.
    for entry_point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            companion = entry_point.load()
            if not isinstance(companion, Companion):
                raise TypeError(f"{entry_point.value} is not a Companion")
            companion = _drop_refused_names(entry_point.name, companion, companions)
        except (Exception, SystemExit) as error:
            leave_out(entry_point.name, error)
            _left_out.append(entry_point.name)
        else:
            companions.append(companion)
    return companions


def _drop_refused_names(entry_point_name: str, companion: Companion, others: list[Companion]) -> Companion:
    """Return a companion without the names that cannot be used, and print a warning for each.

    Names are compared within each table: commands, blocks, and each kind of part. `others` are the companions that
    keep a name which this one has too.
    """
    tables: dict[str, dict[str, str]] = {}
    for table, addresses in _tables_of(companion).items():
        names_of_others = {name for other in others for name in _tables_of(other).get(table, {})}
        tables[table] = {}
        for name, address in addresses.items():
            refusal = _refuse_name(table, name, address, names_of_others)
            if refusal:
                leave_out(entry_point_name, ValueError(refusal))
            else:
                tables[table][name] = address

    # Nobody can ask for parts of a kind that this release does not know, so they may stay.
    for kind in companion.parts:
        if kind in TABLES:
            leave_out(entry_point_name, ValueError(f"its parts {kind!r}; give them to Companion({kind}=...)"))
        elif kind not in PART_KEYS:
            nearest = find_nearest(kind, PART_KEYS)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(PART_KEYS)}"
            message = f"its parts {kind!r}, which are of no kind that this release knows; {hint}"
            leave_out(entry_point_name, ValueError(message))

    parts = {kind: addresses for kind, addresses in tables.items() if kind not in TABLES}
    return replace(companion, commands=tables["commands"], blocks=tables["blocks"], parts=parts)


def _refuse_name(table: str, name: str, address: str, names_of_others: set[str]) -> str:
    """Return why a name in a table of a companion cannot be used, for a warning; empty if it can be."""
    if name in names_of_others:
        return f"its {table} {name}, which another companion has already"
    if table in TABLES:
        return ""
    if table == "readers" and not re.fullmatch(r"\.\w+", name):
        return f"its {table} {name!r}; expected a suffix of files, such as .mbx"
    if table != "readers" and not re.fullmatch(r"[A-Za-z_][\w\-]*", name):
        return f"its {table} {name!r}; expected letters, digits, _ and -"
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", address):
        return f"its {table} {name} at {address!r}; expected package.module:Thing"
    return ""


def _tables_of(companion: Companion) -> dict[str, Mapping[str, str]]:
    """Return the tables of a companion by name: "commands", "blocks", and each kind of part, such as "norms"."""
    parts = {kind: addresses for kind, addresses in companion.parts.items() if kind not in TABLES}
    return {**parts, **{table: getattr(companion, table) for table in TABLES}}


def find_parts(kind: str) -> dict[str, str]:
    """Return short name -> address of the parts of one kind that installed companions have. Imports none of them.

    `kind` is one of PART_KEYS.
    """
    addresses = {}
    for companion in find_companions():
        addresses |= companion.parts.get(kind, {})
    return addresses


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


_left_out: list[str] = []
"""Names of entry points whose companions `find_companions` has left out."""


def explain_unknown_name() -> str:
    """Return, for an error about an unknown short name or block, that a companion which is not here may have it."""
    find_companions()
    if _left_out:
        return f"a companion that is not installed may have it, or {join_with_or(_left_out)}, left out above"
    return "a companion that is not installed may have it"


def leave_out(name: str, error: Exception | SystemExit) -> None:
    """Print a warning that a companion, or a part of it, is left out because of an error."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        # The message of a SyntaxError has only the name of the file, without its folder.
        message = f"{error.msg} ({error.filename}, line {error.lineno})"
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
