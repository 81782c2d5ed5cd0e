"""The interface of a folder of checkpoints, and of its files as they are written and read. No torch.

`LocalFolder` and `RemoteFolder` have it. Beside it each has what its own kind of commit needs (`commit.py`): `rename`
and `is_link` on a disk, `version`, `remove_version` and `abort_uploads` on an object store. Errors of the system pass
through as OSError.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

Buffer = Any
"""Bytes that can be read (and, for `Source.read_into`, written): memoryview, numpy uint8 array."""


class Sink(Protocol):
    """A file being written."""

    any_order: bool
    """Whether writes may have any offset, from any thread; else they must follow each other."""

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None: ...

    def close(self) -> None:
        """Make the file durable."""
        ...

    def abandon(self) -> None:
        """Let go of a file that is not whole."""
        ...


class Source(Protocol):
    """A file being read, from any thread."""

    num_bytes: int

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill `buffers` from `offset` on. Raises EOFError when the file ends before."""
        ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A folder, and the files and folders in it by name."""

    url: str
    """Path or URL by which other ranks open this folder again."""
    path_here: Path | None
    """Path on this machine; None behind a URL."""
    max_open_files: int
    """How many of its files are worth reading at a time."""

    def child(self, name: str) -> "Folder": ...

    def parent(self) -> "Folder": ...

    def names(self) -> list[str]:
        """Return the files and folders directly in this folder; none if it does not exist."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file directly in this folder, from one listing."""
        ...

    def exists(self) -> bool: ...

    def make(self, *, with_parents: bool = False) -> None:
        """Create this folder. Those above it only when asked: one may be an unmounted disk."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes, to tell the caller if there are more. Raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file durably, whole or not at all. With `only_if_new`, raise FileExistsError if its name is taken; on
        a disk the name is claimed first, by an empty file."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_all(self) -> None:
        """Remove this folder and all that is in it. Of a link, only the link."""
        ...

    def sink(self, name: str, num_bytes: int) -> Sink:
        """Open a file of `num_bytes` for writing. The folder must have been made."""
        ...

    def source(self, name: str, *, bypass_cache: bool = False) -> Source:
        """Open a file for reading. `bypass_cache`: drop what this machine has cached of it, where that is possible."""
        ...
