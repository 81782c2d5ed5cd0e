"""The interface of a folder that holds checkpoints, retries, and errors for absent or unreadable files. No torch.

`LocalFolder` can rename and sync; `RemoteFolder`, behind an fsspec URL, commits with its last put. Errors of the
operating system pass through as OSError.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmfoundry_lite.errors import (
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnreadableCheckpointError,
    UnsoundCheckpointError,
)
from llmfoundry_lite.retry import Budget

T = TypeVar("T")
Buffer = Any
"""Bytes that can be read (and, for `Source.read_into`, written): memoryview, numpy uint8 array."""

NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)

PAUSES_SECONDS = (0.2, 0.6, 1.8)
"""Before each further attempt at a file."""


class Sink(Protocol):
    """A file being written."""

    any_order: bool
    """It takes any offset from any thread; else only the next byte."""

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None: ...

    def close(self) -> None:
        """Make the file durable."""

    def abandon(self) -> None: ...


class Source(Protocol):
    """A file being read, from any thread."""

    num_bytes: int

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill `buffers` from `offset` on. Raises EOFError when the file ends before."""

    def close(self) -> None: ...


class Folder(Protocol):
    """A folder of files on a disk or behind a URL."""

    url: str
    path_here: Path | None
    """Where it lies on this machine; None behind a URL."""
    max_open_files: int
    """How many of its files are worth reading at a time."""

    def child(self, name: str) -> "Folder": ...

    def parent(self) -> "Folder": ...

    def make(self, *, with_parents: bool = False) -> None:
        """Create this folder if folders need that. Those above it only when asked: one may be an unmounted disk."""

    def names(self) -> list[str]:
        """Return the files and folders right in here; none if there is no such folder."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file right in here, by one listing."""
        ...

    def exists(self) -> bool: ...

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes, so that the caller can tell. Raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file durably, whole or not at all. Raises FileExistsError when it should have been new."""

    def remove(self, name: str) -> None: ...

    def remove_all(self) -> None:
        """Remove this folder and what is in it."""

    def sink(self, name: str, num_bytes: int) -> Sink:
        """Open a file of `num_bytes` for writing. The folder must have been made."""
        ...

    def source(self, name: str, *, bypass_cache: bool = False) -> Source:
        """Open a file for reading. `bypass_cache`: drop what this machine has cached of it, where that is possible."""
        ...


def unreadable(folder: Folder, name: str, error: OSError) -> UnsoundCheckpointError:
    """Return the error for a file that is not there, or that this machine cannot read. Neither is damage."""
    reason = error.strerror or str(error)
    if error.errno in NO_FILE or isinstance(error, FileNotFoundError):
        is_missing = error.errno == errno.ENOENT or error.errno is None
        return IncompleteCheckpointError(f"{folder.url}/{name}: {'missing' if is_missing else reason}", name)
    host = socket.gethostname()
    return UnreadableCheckpointError(f"{folder.url}/{name}: cannot be read on host {host}: {reason}", name)


def check_files(folder: Folder, expected: Mapping[str, int]) -> None:
    """Check files by name -> bytes, with one listing a folder. Raises IncompleteCheckpointError for one that is not
    there, DamagedCheckpointError for one of another size, and OSError.

    A network disk may list what was there a moment ago, so a file that differs is opened.
    """
    parents = {name.rpartition("/")[0] for name in expected}
    sizes = {parent: (folder.child(parent) if parent else folder).sizes() for parent in parents}
    for path, num_bytes in expected.items():
        parent, _, name = path.rpartition("/")
        if sizes[parent].get(name) != num_bytes:
            try:
                source = folder.source(path, bypass_cache=True)
            except (FileNotFoundError, IsADirectoryError):
                raise IncompleteCheckpointError(f"{folder.url}/{path}: missing", path) from None
            source.close()
            if source.num_bytes != num_bytes:
                sizes = f"has {source.num_bytes:,} bytes, expected {num_bytes:,}"
                raise DamagedCheckpointError(f"{folder.url}/{path}: {sizes}", path)


def retry_on_damage(look: Callable[[bool], T]) -> T:
    """Call `look(bypass_cache=False)`, and after damage `look(True)`: it may be a bad transfer or a stale cache."""
    try:
        return look(False)
    except DamagedCheckpointError:
        return look(True)


def retry_transient_errors(call: Callable[[], T], only: Sequence[int] | None = None) -> T:
    """Repeat a call after an error that may pass: any OSError of disk or network, or with `only` those errnos."""
    budget = Budget(PAUSES_SECONDS, attempts=len(PAUSES_SECONDS))
    while True:
        try:
            with as_os_errors():
                return call()
        except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError):
            raise
        except OSError as error:
            if (only is not None and error.errno not in only) or (pause := budget.pause()) is None:
                raise
        time.sleep(pause)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn errors of object stores' clients, such as botocore's without credentials, into OSError."""
    try:
        yield
    except (OSError, EOFError, TypeError, NotImplementedError, ValueError):
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
