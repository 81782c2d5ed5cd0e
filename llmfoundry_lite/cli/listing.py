"""`llmfoundry-lite list`: the YAML files and tasks that come with the package, by the names that commands take."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from llmfoundry_lite.config.auto_hardware import choose_overlay, find_devices
from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.errors import ConfigError, UserError, either
from llmfoundry_lite.hardware import GIB


class Kind(NamedTuple):
    files: str
    """Pattern of the files, beneath the folder that holds yamls/ and evals/."""
    example: str


KINDS = {
    "models": Kind("yamls/pretrain/*.yaml", "llmfoundry-lite train -n 8 mpt-1b variables.data=data/mine"),
    "hardware": Kind("yamls/hardware/*.yaml", "llmfoundry-lite train -n 8 mpt-1b h100-8"),
    "layouts": Kind("yamls/layouts/*.yaml", "llmfoundry-lite train -n 8 mpt-13b h100-8 mpt-13b-8x80gb"),
    "suites": Kind("yamls/eval/*.yaml", "llmfoundry-lite eval icl-zero-shot models.ours=runs/mpt-1b"),
    "tasks": Kind("evals/*.yaml", "llmfoundry-lite eval icl_tasks=[arc_easy] models.ours=runs/mpt-1b"),
}

SIZES = {"m": 1e6, "b": 1e9, "t": 1e12}


def list_command(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"What to list: {either(list(KINDS))} [default: all].")
    ] = None,
) -> None:
    """List the YAML files and tasks that come with the package.

    The hardware and layouts of this machine come first. Models are listed from small to large.
    """
    if kind not in (None, *KINDS):
        raise UserError(f"list: {kind!r} given, expected {either(list(KINDS))}")
    order = order_here()
    for number, name in enumerate([kind] if kind else KINDS):
        folder, _, pattern = KINDS[name].files.partition("/")
        files = sorted(shipped_folder(folder).glob(pattern), key=order)
        print(f"{chr(10) * (number > 0)}{name}: {KINDS[name].example}")
        width = max(len(path.stem) for path in files)
        for path in files:
            print(f"  {path.stem:{width}}  {first_sentence(path)}")


def order_here() -> Callable[[Path], tuple[bool, float, int, str]]:
    """Return a sort key: overlay and layouts of this machine's devices first, then small models and few devices."""
    overlay, memory = "", ""
    with contextlib.suppress(ConfigError):  # devices of two kinds
        chosen, found = choose_overlay().values, find_devices()
        overlay = chosen.stem if isinstance(chosen, Path) else ""
        memory = f"x{found.row.memory_bytes // GIB}gb" if found is not None and found.row is not None else ""

    def key(path: Path) -> tuple[bool, float, int, str]:
        name = path.stem
        size, devices = re.match(r"mpt-(\d+)([mbt])\b", name), re.search(r"-(\d+)x\d+gb$", name)
        is_here = name == overlay or bool(memory and name.endswith(memory))
        return not is_here, int(size[1]) * SIZES[size[2]] if size else 0.0, int(devices[1]) if devices else 0, name

    return key


def first_sentence(path: Path) -> str:
    """Return the beginning of the comment that a file begins with, less the example of its use."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.M).split())
    return re.split(r"[.:;](?:\s|$)|, laid over", text)[0]
