"""Atomic writes, locks and checks of files that commands write. Checkpoints have their own: `checkpoint.commit`."""

import errno
import fcntl
import json
import os
import re
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from llmfoundry_lite.errors import ConfigError

ANSWERS = (".json", ".md", ".png", ".pdf", ".svg", ".csv")
"""Suffixes of the files that a command writes its answer to; the JSON is its record."""
MAX_RECORD_BYTES = 128 << 20
RECORDS = ({"schema", "bench"}, {"rows"}, {"runs", "comparisons"}, {"results", "comparisons"}, {"host", "findings"})
"""Keys of the records of a bench, `benchmarks memory`, `report`, `compare` and `doctor`."""


def check_is_path(path: Path) -> None:
    """Raise ConfigError for a URL: `s3://b/x` as a path is a folder `s3:` here, which nobody means."""
    if re.match(r"\w[\w+.-]+:/", str(path)):
        raise ConfigError(f"{path}: a URL given, expected a path of this machine")


def check_replaceable(record: Path, others: Iterable[Path] = ()) -> None:
    """Raise ConfigError if a file is there and `record`, the JSON among them, is no earlier answer of a command. A link
    is refused: the folder may be of a run that somebody else made, and the link lead anywhere."""
    check_is_path(record)
    there = [path for path in (record, *others) if os.path.lexists(path)]
    if link := next((path for path in there if path.is_symlink()), None):
        raise ConfigError(f"{link}: a link, which would be written through; name another folder, or remove it")
    if there and not _is_record(record):
        raise ConfigError(f"{there[0]}: exists and is no earlier answer of this command; name another, or remove it")


def check_answer_replaceable(folder: Path, name: str) -> None:
    """Check NAME.json, NAME.md, NAME.png and the like, as `check_replaceable` does."""
    check_replaceable(folder / f"{name}.json", [folder / f"{name}{suffix}" for suffix in ANSWERS])


def _is_record(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError), open(path, "rb", opener=open_regular) as file:
        content = json.loads(file.read(MAX_RECORD_BYTES))
        return isinstance(content, dict) and any(keys <= content.keys() for keys in RECORDS)
    return False


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file and return its descriptor; an `opener` for `open`. Raises IsADirectoryError for anything but a file:
    a pipe would make its reader wait for ever."""
    return _open_regular(path, flags, 0o666)


def open_own(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file in a folder that others write into, as `open_regular` does; a new one is this user's alone. Raises
    OSError for a link, which may lead anywhere, and PermissionError for another user's file."""
    descriptor = _open_regular(path, flags | os.O_NOFOLLOW, 0o600)
    if (owner := os.fstat(descriptor).st_uid) == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"belongs to user {owner}", str(path))


def _open_regular(path: str | Path, flags: int, mode: int) -> int:
    kind = 0
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
        if stat.S_ISREG(kind := os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
    what = os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "not a regular file"
    raise IsADirectoryError(errno.EISDIR, what, str(path))


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace `path` by `content`, as UTF-8, whole or not at all. Raises OSError."""
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


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it, where its file system can lock. Raises BlockingIOError if another process holds it.
    The lock ends with the descriptor that is returned, so however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # no locks there
        pass
    return descriptor


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
