"""The release of this package that is running, and its requirements.

They come from the metadata of the installed package. On a GPU machine without a package index, the package may only be
on PYTHONPATH, without metadata; then they come from the pyproject.toml of its source tree.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

NAME = "llmfoundry-lite"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


class Release(NamedTuple):
    """A release of this package, as its metadata describes it."""

    version: str
    """Such as "0.3.0", or "unknown"."""
    python: str
    """Specifier of the supported versions of Python, such as ">=3.11"; empty if unknown."""
    requirements: list[str]
    """Specifiers of the packages that it needs, such as "numpy>=2"; empty if unknown."""


def read_release() -> Release:
    """Read the release that is running. The version is "unknown" if neither metadata nor a source tree has it."""
    # Read the metadata of the installed package.
    try:
        package = metadata(NAME)
    except PackageNotFoundError:
        pass
    else:
        requirements = package.get_all("Requires-Dist") or []
        return Release(package["Version"], package["Requires-Python"] or "", requirements)

    # It is not installed. Read the source tree.
    try:
        project = tomllib.loads(PYPROJECT.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return Release("unknown", "", [])
    if project["name"] != NAME:  # another project that contains a copy of the package
        return Release("unknown", "", [])
    return Release(project["version"], project["requires-python"], project["dependencies"])
