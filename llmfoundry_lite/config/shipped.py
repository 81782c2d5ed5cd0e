"""YAML files and tasks that come with the package, found by name from any folder.

`mpt-1b` is `yamls/pretrain/mpt-1b.yaml`, `h100-8` is `yamls/hardware/h100-8.yaml`, `arc_easy` is `evals/arc_easy.yaml`.
They lie inside an installed package, and at the top of a clone. A file of the user's own always goes first. No torch.
"""

from pathlib import Path

from llmfoundry_lite.errors import find_nearest
from llmfoundry_lite.files import is_file

PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(kind: str) -> Path:
    """Return the folder of the package's `yamls` or `evals`."""
    inside = PACKAGE / kind
    return inside if inside.is_dir() else PACKAGE.parent / kind


def shipped_yamls() -> dict[str, Path]:
    """Return name -> file, for training runs, hardware overlays and evaluations."""
    return {path.stem: path for path in sorted(shipped_folder("yamls").glob("*/*.yaml"))}


def find_yaml(argument: str) -> Path | None:
    """Find the file that `argument` names: an existing one, or one of ours by its name or its path in a clone."""
    given = Path(argument)
    if given.suffix in (".yaml", ".yml"):
        if is_file(given):
            return given
        ours = shipped_folder("yamls").parent / given
        return ours if given.parts[:1] == ("yamls",) and is_file(ours) else None
    return shipped_yamls().get(argument)


def find_task_folder(folder: str) -> Path:
    """Return `folder`; for `evals`, where no such folder is here, the tasks that come with the package."""
    return Path(folder) if folder != "evals" or Path(folder).is_dir() else shipped_folder("evals")


def near_name(argument: str, cutoff: float = 0.6) -> str:
    """Return the shipped name nearest to `argument`, a name or file that does not exist; empty if none is near."""
    argument = Path(argument).stem if argument.endswith((".yaml", ".yml")) else argument
    return find_nearest(argument, shipped_yamls(), cutoff)
