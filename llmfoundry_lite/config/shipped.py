"""Find the YAML files and evaluation tasks that come with the package, by their names, from any working directory.

`mpt-1b` is `yamls/pretrain/mpt-1b.yaml`, `h100-8` is `yamls/hardware/h100-8.yaml`, `arc_easy` is `evals/arc_easy.yaml`.
The folders `yamls` and `evals` are inside an installed package, and at the top of a clone of the repository. A file of
the user's own takes precedence over a file of the package.
"""

from pathlib import Path

from llmfoundry_lite.errors import find_nearest
from llmfoundry_lite.files import is_file

PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(kind: str) -> Path:
    """Return the folder of the package's YAML files (`kind` is "yamls") or of its evaluation tasks ("evals")."""
    folder_in_package = PACKAGE / kind
    return folder_in_package if folder_in_package.is_dir() else PACKAGE.parent / kind


def shipped_yamls() -> dict[str, Path]:
    """Return name -> file of the package's YAMLs: training runs, hardware overlays and evaluations."""
    return {path.stem: path for path in sorted(shipped_folder("yamls").glob("*/*.yaml"))}


def find_yaml(argument: str) -> Path | None:
    """Return the YAML file that an argument names, or None if there is none.

    `my.yaml` is a file of the user. `mpt-1b`, and also `yamls/pretrain/mpt-1b.yaml` outside of a clone, is a file of
    the package.
    """
    path = Path(argument)
    if path.suffix not in (".yaml", ".yml"):
        return shipped_yamls().get(argument)
    if is_file(path):
        return path
    shipped_path = shipped_folder("yamls").parent / path
    is_shipped = path.parts[:1] == ("yamls",) and is_file(shipped_path)
    return shipped_path if is_shipped else None


def find_task_folder(folder: str) -> Path:
    """Return the path of a task folder. For the default, `evals`, it is the package's folder if none is here."""
    path = Path(folder)
    if folder == "evals" and not path.is_dir():
        return shipped_folder("evals")
    return path


def near_name(argument: str, cutoff: float = 0.6) -> str:
    """Return the shipped name nearest to an argument that names no file; empty if none is similar.

    `mpt-1bn` and `mpt-1bn.yaml` give `mpt-1b`. `cutoff` is the least similarity, from 0 to 1.
    """
    name = Path(argument).stem if argument.endswith((".yaml", ".yml")) else argument
    return find_nearest(name, shipped_yamls(), cutoff)
