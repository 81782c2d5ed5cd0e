"""Folders of data sets whose path the `datasets` library would take for a pattern."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def without_pattern(name: str) -> Iterator[str]:
    """Yield a name under which `datasets` finds exactly the folder `name`.

    `datasets` reads a folder's path as a glob, and one with `::` as a chain of URLs. For a folder such as `c4[en]`, it
    would read another folder or none. In its place, a temporary folder is yielded that has links to all of its files.
    Any other name, such as the name of a data set on the Hub, is yielded unchanged. Raises OSError.
    """
    folder = Path(name)
    path = os.path.realpath(folder)
    means_something_else = glob.has_magic(path) or "::" in path
    if not folder.is_dir() or not means_something_else:
        yield name
        return

    with TemporaryDirectory() as linked_folder:
        if glob.has_magic(os.path.realpath(linked_folder)):
            raise OSError(f"{linked_folder}, the folder of temporary files, is a pattern itself; set TMPDIR to another")
        for subfolder, _, files in os.walk(path):
            linked_subfolder = Path(linked_folder, os.path.relpath(subfolder, path))
            linked_subfolder.mkdir(exist_ok=True)
            for file in files:
                (linked_subfolder / file).symlink_to(Path(subfolder, file))
        yield linked_folder
