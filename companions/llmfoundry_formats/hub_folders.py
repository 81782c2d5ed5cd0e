"""Folders in the format of the Hub's data sets, whose path `datasets` would take for a pattern."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def without_magic(name: str) -> Iterator[str]:
    """Yield `name`; for a folder whose path is a pattern to `datasets`, another folder with links to its files.

    `datasets` takes the path of a folder for a glob, and one with `::` for a chain of URLs: it reads another folder.
    Raises OSError.
    """
    folder = Path(name)
    path = os.path.realpath(folder)
    if not folder.is_dir() or not (glob.has_magic(path) or "::" in path):
        yield name
        return
    with TemporaryDirectory() as place:
        if glob.has_magic(os.path.realpath(place)):
            raise OSError(f"{place}, the folder of temporary files, is a pattern itself; set TMPDIR to another")
        for here, _, files in os.walk(path):
            there = Path(place, os.path.relpath(here, path))
            there.mkdir(exist_ok=True)
            for file in files:
                (there / file).symlink_to(Path(here, file))
        yield place
