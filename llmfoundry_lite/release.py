"""The running release and its requirements, from the installed metadata or from pyproject.toml of a source tree.

A GPU machine without a package index may have the package only on PYTHONPATH, without metadata.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

NAME = "llmfoundry-lite"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class Release(NamedTuple):
    version: str
    python: str
    """The specifier of supported versions; empty if unknown."""
    requirements: list[str]


def read_release() -> Release:
    """Read the release; its version is `unknown` where neither the metadata nor the source tree tells it."""
    try:
        ours = metadata(NAME)
        return Release(ours["Version"], ours["Requires-Python"] or "", ours.get_all("Requires-Dist") or [])
    except PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(PYPROJECT.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return Release("unknown", "", [])
    if project["name"] != NAME:  # another project that contains a copy of the package
        return Release("unknown", "", [])
    return Release(project["version"], project["requires-python"], project["dependencies"])
