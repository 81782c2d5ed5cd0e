"""Files that are either not there or whole. (Checkpoints publish by rules of their own: `checkpoint.places`.)"""

import os
import threading
from pathlib import Path


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
