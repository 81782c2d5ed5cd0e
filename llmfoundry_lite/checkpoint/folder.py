"""The interface of a folder of checkpoints, and of its files while they are written and read. No torch.

`LocalFolder` and `RemoteFolder` implement it. Each also has what its own kind of commit needs (`commit.py`): `rename`
and `is_link` on a disk; `version`, `remove_version` and `abort_uploads` on an object store. Errors of the system pass
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
    """Whether writes may have any offset, and come from any thread. Otherwise they must follow each other."""

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the bytes of all buffers, one after the other, from `offset` on."""
        ...

    def close(self) -> None:
        """Make the file durable, and close it."""
        ...

    def abandon(self) -> None:
        """Close a file that will not be completed."""
        ...


class Source(Protocol):
    """A file being read, from any thread."""

    num_bytes: int

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers, one after the other, from `offset` on. Raises EOFError if the file ends before."""
        ...

    def close(self) -> None: ...


class Folder(Protocol):
    """A folder, and the files and folders in it by name."""

    url: str
    """Path or URL by which other ranks open this folder again."""
    path_here: Path | None
    """Path on this machine. None behind a URL."""
    max_open_files: int
    """How many of its files are worth reading at a time."""

    def child(self, name: str) -> "Folder":
        """Return the folder of this name in this folder. It need not exist."""
        ...

    def parent(self) -> "Folder":
        """Return the folder that this folder is in."""
        ...

    def names(self) -> list[str]:
        """Return the names of files and folders directly in this folder. Empty if it does not exist."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders directly in this folder, from one listing. Empty if it does not exist."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file directly in this folder, from one listing."""
        ...

    def tree_sizes(self) -> dict[str, int]:
        """Return the bytes of each file in this folder and in those within, by its path. Nothing behind a link."""
        ...

    def exists(self) -> bool:
        """Return whether there is a file or folder at this path."""
        ...

    def make(self, *, with_parents: bool = False) -> None:
        """Create this folder if it does not exist.

        Folders above it are created only `with_parents`, because one of them may be the mount point of a disk that is
        not mounted.
        """
        ...

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes of a file, so that the caller sees whether there are more. Raises
        FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file durably, whole or not at all.

        With `only_if_new`, raises FileExistsError if there is a file of this name. On a disk, an empty file then claims
        the name before the content is there.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_all(self) -> None:
        """Remove this folder and everything in it. If it is a link, only the link is removed."""
        ...

    def sink(self, name: str, num_bytes: int) -> Sink:
        """Open a file of `num_bytes` for writing. The folder must exist."""
        ...

    def source(self, name: str, *, bypass_cache: bool = False) -> Source:
        """Open a file for reading. With `bypass_cache`, what this machine has cached of it is dropped first, if that is
        possible."""
        ...
