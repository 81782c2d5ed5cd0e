"""`llmfoundry-lite list`: the YAML files and tasks that come with the package, by the names that commands take."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from llmfoundry_lite.config.auto_hardware import choose_overlay, find_devices
from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.errors import ConfigError, UserError, join_with_or
from llmfoundry_lite.hardware import GIB


class Kind(NamedTuple):
    """A kind of files that come with the package, as a section of `llmfoundry-lite list`."""

    files: str
    """Pattern of the files, beneath the folder that holds yamls/ and evals/."""
    example: str
    """Command that uses one of them."""


KINDS = {
    "models": Kind("yamls/pretrain/*.yaml", "llmfoundry-lite train -n 8 mpt-1b variables.data=data/mine"),
    "hardware": Kind("yamls/hardware/*.yaml", "llmfoundry-lite train -n 8 mpt-1b h100-8"),
    "layouts": Kind("yamls/layouts/*.yaml", "llmfoundry-lite train -n 8 mpt-13b h100-8 mpt-13b-8x80gb"),
    "suites": Kind("yamls/eval/*.yaml", "llmfoundry-lite eval icl-zero-shot models.ours=runs/mpt-1b"),
    "tasks": Kind("evals/*.yaml", "llmfoundry-lite eval icl_tasks=[arc_easy] models.ours=runs/mpt-1b"),
}

SIZES = {"m": 1e6, "b": 1e9, "t": 1e12}
"""Suffix of a model's name -> parameters: mpt-125m has 125 million."""


def list_command(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"What to list: {join_with_or(list(KINDS))} [default: all].")
    ] = None,
) -> None:
    """List the YAML files and tasks that come with the package.

    The hardware and layouts of this machine come first. Models are listed from small to large.
    """
    if kind not in (None, *KINDS):
        raise UserError(f"list: {kind!r} given, expected {join_with_or(list(KINDS))}")
    sort_key = sort_key_for_this_machine()
    kind_names = [kind] if kind else list(KINDS)
    for index, name in enumerate(kind_names):
        if index > 0:
            print()  # between two sections
        print(f"{name}: {KINDS[name].example}")
        folder, _, pattern = KINDS[name].files.partition("/")
        files = sorted(shipped_folder(folder).glob(pattern), key=sort_key)
        width = max(len(path.stem) for path in files)
        for path in files:
            print(f"  {path.stem:{width}}  {first_sentence(path)}")


def sort_key_for_this_machine() -> Callable[[Path], tuple[bool, float, int, str]]:
    """Return a key function that sorts YAML files for a listing.

    The overlay and the layouts for this machine's devices come first, then small models before large ones, and few
    devices before many. On 8 H100 of 80 GB, `h100-8` and all names that end with `x80gb` are for this machine.
    """
    overlay = ""
    layout_suffix = ""
    # With devices of two models, no file is for this machine.
    with contextlib.suppress(ConfigError):
        chosen = choose_overlay().values
        devices = find_devices()
        if isinstance(chosen, Path):
            overlay = chosen.stem
        if devices is not None and devices.row is not None:
            layout_suffix = f"x{devices.row.memory_bytes // GIB}gb"

    def sort_key(path: Path) -> tuple[bool, float, int, str]:
        """Return whether a file is for other devices, its model's size, its number of devices, and its name."""
        name = path.stem
        is_layout_here = layout_suffix != "" and name.endswith(layout_suffix)
        is_for_this_machine = name == overlay or is_layout_here

        size = re.match(r"mpt-(\d+)([mbt])\b", name)
        num_parameters = int(size[1]) * SIZES[size[2]] if size else 0.0
        devices = re.search(r"-(\d+)x\d+gb$", name)
        num_devices = int(devices[1]) if devices else 0
        return not is_for_this_machine, num_parameters, num_devices, name

    return sort_key


def first_sentence(path: Path) -> str:
    """Return the beginning of the comment at the top of a YAML file, up to the first `.`, `:` or `;`.

    `# MPT-1B on one node: llmfoundry-lite train mpt-1b` gives `MPT-1B on one node`. The words "laid over" begin an
    example too.
    """
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    lines = comment[0] if comment else ""
    text = re.sub(r"^# ?", "", lines, flags=re.M)
    text_in_one_line = " ".join(text.split())
    return re.split(r"[.:;](?:\s|$)|, laid over", text_in_one_line)[0]
