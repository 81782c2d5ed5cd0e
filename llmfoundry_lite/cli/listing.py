"""`llmfoundry-lite list`: the YAML files and tasks that come with the package, by the names that commands take."""

import re
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from llmfoundry_lite.config.shipped import shipped_folder
from llmfoundry_lite.errors import UserError, either


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


def list_command(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help=f"{either(list(KINDS))} [all].")] = None,
) -> None:
    """List the YAML files and tasks that come with the package."""
    if kind not in (None, *KINDS):
        raise UserError(f"list: {kind!r} given, expected {either(list(KINDS))}")
    for number, name in enumerate([kind] if kind else KINDS):
        folder, _, pattern = KINDS[name].files.partition("/")
        files = sorted(shipped_folder(folder).glob(pattern))
        print(f"{chr(10) * (number > 0)}{name}: {KINDS[name].example}")
        width = max(len(path.stem) for path in files)
        for path in files:
            print(f"  {path.stem:{width}}  {first_sentence(path)}")


def first_sentence(path: Path) -> str:
    """Return the beginning of the comment that a file begins with, less the example of its use."""
    comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
    text = " ".join(re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.M).split())
    return re.split(r"[.:;](?:\s|$)|, laid over", text)[0]
