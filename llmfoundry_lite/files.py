"""Files that are either not there or whole. (Checkpoints publish by rules of their own: `checkpoint.places`.)"""

import glob
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Whatever happens meanwhile, `path` has what it had or `content`, as UTF-8. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def without_magic(name: str) -> Iterator[str]:
    """`name`, or for a folder whose path is a pattern to `datasets` another one that holds links to its files.

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


def sync_folder(folder: Path) -> None:
    """Bring the files of a folder, and the folder itself, to disk before it is renamed."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
