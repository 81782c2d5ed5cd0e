"""Folders that hold checkpoints, with just the operations a save needs: what any of them has, how often something is
tried, and what it means when a file is absent. Those of a local disk are `local_folder`'s, those behind an fsspec URL
`remote_folder`'s.

A local folder can be renamed and synced; an object store has neither and commits with its last put. Errors of the
operating system pass through as OSError. No torch.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from llmfoundry_lite.errors import (
    BRIEF_ERRNOS,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnreadableCheckpointError,
    UnsoundCheckpointError,
)

T = TypeVar("T")
Buffer = Any
"""Bytes that can be read (and, for `Source.read_into`, written): memoryview, numpy uint8 array."""

NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
PASSING = BRIEF_ERRNOS

ATTEMPTS = 4
PAUSE_SECONDS = 0.2
"""After the first attempt; three times as long after each further one."""


class Sink(Protocol):
    """A file being written. Local ones take any offset from any thread; remote ones only the next byte."""

    any_order: bool

    def write_at(self, offset: int, pieces: Sequence[Buffer]) -> None: ...

    def close(self) -> None:
        """Durable when this returns."""

    def abandon(self) -> None: ...


class Source(Protocol):
    """A file being read, from any thread."""

    num_bytes: int

    def read_into(self, offset: int, pieces: Sequence[Buffer]) -> None:
        """Fill `pieces` from `offset` on. Raises EOFError when the file ends before."""

    def close(self) -> None: ...


class Folder(Protocol):
    url: str
    is_local: bool

    def child(self, name: str) -> "Folder": ...

    def parent(self) -> "Folder": ...

    def names(self) -> list[str]:
        """Files and folders right in here; none if there is no such folder."""
        ...

    def sizes(self) -> dict[str, int]:
        """Of the files right in here; one listing, however many there are."""
        ...

    def exists(self) -> bool: ...

    def read(self, name: str, max_bytes: int) -> bytes:
        """At most `max_bytes` + 1 bytes, so that the reader can tell. Raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes, *, only_if_new: bool = False, is_durable: bool = True) -> None:
        """Whole or not at all, and durable unless said otherwise. Raises FileExistsError when it should have been
        new."""

    def remove(self, name: str) -> None: ...

    def remove_all(self) -> None:
        """This folder and what is in it."""

    def sink(self, name: str, num_bytes: int) -> Sink:
        """For a file of `num_bytes`. A local folder must be there: see `LocalPlace.make`."""
        ...

    def source(self, name: str, *, bypass_cache: bool = False) -> Source:
        """`bypass_cache`: past what this machine remembers of the file, as far as it lets us."""
        ...


def unreadable(folder: Folder, name: str, error: OSError) -> UnsoundCheckpointError:
    """What a file that cannot be read means: it is not there, or this machine cannot read it. Neither is damage."""
    reason = error.strerror or str(error)
    if error.errno in NO_FILE or isinstance(error, FileNotFoundError):
        is_missing = error.errno == errno.ENOENT or error.errno is None
        return IncompleteCheckpointError(f"{folder.url}/{name}: {'missing' if is_missing else reason}", name)
    host = socket.gethostname()
    return UnreadableCheckpointError(f"{folder.url}/{name}: cannot be read on host {host}: {reason}", name)


def retry_on_damage(look: Callable[[bool], T]) -> T:
    """What `look` finds. It is called again, with True, after damage: a bad transfer or a stale cache is none."""
    try:
        return look(False)
    except DamagedCheckpointError:
        return look(True)


def find_absent(folder: Folder, expected: dict[str, int]) -> tuple[str, int | None] | None:
    """The first file, name -> bytes, that is not there (None) or has another size; one listing of each folder.

    What the listing has otherwise is looked at itself: that of a network disk may be of a moment ago.
    """
    parents = {name.rpartition("/")[0] for name in expected}
    sizes = {parent: (folder.child(parent) if parent else folder).sizes() for parent in parents}
    for path, num_bytes in expected.items():
        parent, _, name = path.rpartition("/")
        if sizes[parent].get(name) != num_bytes:
            try:
                source = folder.source(path, bypass_cache=True)
            except (FileNotFoundError, IsADirectoryError):
                return path, None
            size = source.num_bytes
            source.close()
            if size != num_bytes:
                return path, size
    return None


# --------------------------------------------------------------------------------------------------------- attempts


def retry_transient_errors(call: Callable[[], T], passing: Sequence[int] | None = None) -> T:
    """Again after an error that may pass (any, without a list of them); only for calls that may be made twice."""
    for attempt in range(ATTEMPTS):
        try:
            with as_os_errors():
                return call()
        except (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError):
            raise
        except OSError as error:
            if attempt == ATTEMPTS - 1 or (passing is not None and error.errno not in passing):
                raise
            time.sleep(PAUSE_SECONDS * 3**attempt)
    raise AssertionError


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Clients of object stores have errors of their own (botocore's, say, without credentials or a network)."""
    try:
        yield
    except (OSError, EOFError, TypeError, NotImplementedError, ValueError):
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
