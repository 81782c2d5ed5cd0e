"""A folder of a local disk, or of a network disk that is mounted. No torch.

`LocalFolder` implements `Folder`; `LocalSink` writes a file and `LocalSource` reads one. Shards are written past the
page cache and synced. Small files are written under another name, synced, and renamed when they are whole.
"""

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.folder import Buffer
from llmfoundry_lite.errors import BRIEF_ERRNOS
from llmfoundry_lite.files import open_regular, sync, write_atomically
from llmfoundry_lite.retry import T, retry_transient_errors

NO_FILE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
"""Errors that mean that there is no file, or no folder, of a name. ELOOP: a link that leads in a circle."""
MAX_VECTORS = 512
"""Buffers that one readv or writev moves. The kernel takes at most 1024."""
WRITE: Callable[[int, Any, int], int] = os.pwritev
"""(descriptor, buffers, offset) -> number of bytes written. Tests replace it, to act as a failing disk."""

DIRECT: int | None = getattr(os, "O_DIRECT", None)
"""Flag for writes past the page cache. None: this system has none; Linux has it."""
DIRECT_BYTES = 4096
"""Memory address, offset and length of such a write must be multiples of this."""


class LocalFolder:
    """A folder at a path of this machine. It has the methods of `Folder`, and those by which `RenameCommits`
    commits."""

    max_open_files = 4

    def __init__(self, path: Path):
        """Use the folder at a path, which need not exist."""
        self.path = path
        self.path_here: Path | None = path
        self.url = str(path)

    def child(self, name: str) -> "LocalFolder":
        """Return the folder of this name in this folder. It need not exist."""
        return LocalFolder(self.path / name)

    def parent(self) -> "LocalFolder":
        """Return the folder that this folder is in."""
        return LocalFolder(self.path.absolute().parent)

    def names(self) -> list[str]:
        """Return the sorted names of files and folders directly in this folder. Empty if it does not exist."""
        try:
            return sorted(_retry(lambda: os.listdir(self.path)))
        except OSError as error:
            if error.errno in NO_FILE:
                return []
            raise

    def folders(self) -> list[str]:
        """Return the sorted names of the folders directly in this folder. Links to folders count."""

        def list_folders() -> list[str]:
            with os.scandir(self.path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())

        try:
            return _retry(list_folders)
        except OSError as error:
            if error.errno in NO_FILE:
                return []
            raise

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file directly in this folder, from one listing."""

        def list_sizes() -> dict[str, int]:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

        try:
            return _retry(list_sizes)
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def tree_sizes(self) -> dict[str, int]:
        """Return the bytes of each file in this folder and in those within, by its path. Nothing behind a link."""
        sizes: dict[str, int] = {}
        if self.is_link():
            return sizes
        for parent, _, names in os.walk(self.path):
            for name in names:
                path = Path(parent, name)
                with contextlib.suppress(FileNotFoundError):
                    sizes[str(path.relative_to(self.path))] = path.lstat().st_size
        return sizes

    def exists(self) -> bool:
        """Return whether anything has this path. A link counts, wherever it leads."""
        return os.path.lexists(self.path)

    def is_link(self) -> bool:
        """Return whether this path is a symbolic link."""
        return self.path.is_symlink()

    def make(self, *, with_parents: bool = False) -> None:
        """Create this folder if it does not exist, and those above it only `with_parents`."""
        self.path.mkdir(parents=with_parents, exist_ok=True)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes of a file, so that the caller sees whether there are more.

        Raises FileNotFoundError if there is none, and OSError for anything that is not a regular file, such as a pipe.
        """

        def read_start() -> bytes:
            with open(self.path / name, "rb", opener=open_regular) as file:
                return file.read(max_bytes + 1)

        try:
            return _retry(read_start)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from None

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file durably, whole or not at all. With `only_if_new`, raises FileExistsError if there is one."""
        if only_if_new:
            (self.path / name).touch(exist_ok=False)  # claims the name, in one step
        write_atomically(self.path / name, data)
        sync(self.path)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove this folder and everything in it, as far as the disk permits. A file of this name is removed, too.

        If it is a link, only the link is removed: the user has moved the checkpoint elsewhere, and keeps it there.
        """
        # A link is not followed, because it may lead to a disk that does not answer. What is not a folder is removed
        # before `rmtree`, which never returns from a pipe.
        if self.is_link() or (self.path.exists() and not self.path.is_dir()):
            self.path.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder in this folder atomically and durably. Raises FileExistsError if `new` is there."""
        if os.path.lexists(self.path / new):
            raise FileExistsError(f"{self.path / new} is there already")
        os.rename(self.path / old, self.path / new)
        sync(self.path)

    def sink(self, name: str, num_bytes: int) -> "LocalSink":
        """Open a file for writing. The folder must exist."""
        return LocalSink(self.path / name)

    def source(self, name: str, *, bypass_cache: bool = False) -> "LocalSource":
        """Open a file for reading. With `bypass_cache`, what the page cache has of it is dropped first."""
        return LocalSource(self.path / name, bypass_cache)


class LocalSink:
    """A file being written, in any order and from any thread. Aligned buffers go to the disk past the page cache.

    Finding and filling pages of that cache takes more processor time than the rest of a save, and training needs that
    time. Unaligned bytes go through the cache, and so does everything on a disk without direct writes. The file is open
    twice for this, and may be written through both descriptors.
    """

    any_order = True

    def __init__(self, path: Path):
        """Create or empty a file, and open it twice if the disk takes direct writes. Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        self._direct_descriptor: int | None = None
        if DIRECT is not None:
            with contextlib.suppress(OSError):
                self._direct_descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | DIRECT)

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the bytes of all buffers, one after the other, from `offset` on. Raises OSError."""
        if self._direct_descriptor is not None and _is_aligned(offset, buffers):
            # Some file systems cannot write directly, or not from pinned memory. The bytes then go through the cache.
            # If the disk itself fails, that fails, too.
            with contextlib.suppress(OSError):
                self._write(self._direct_descriptor, offset, buffers)
                return
        self._write(self._descriptor, offset, buffers)

    def _write(self, descriptor: int, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers through one of the two descriptors. Raises OSError."""
        _transfer(WRITE, descriptor, offset, buffers, OSError("the disk took no more bytes"))

    def close(self) -> None:
        """Make the file durable, and close it. Raises OSError."""
        try:
            os.fsync(self._descriptor)  # syncs what was written through either descriptor
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without making it durable. The caller removes it."""
        os.close(self._descriptor)
        if self._direct_descriptor is not None:
            os.close(self._direct_descriptor)


def _is_aligned(offset: int, buffers: Sequence[Buffer]) -> bool:
    """Return whether these buffers can be written at `offset` past the page cache: offset, lengths and memory addresses
    must be multiples of DIRECT_BYTES."""
    import numpy as np  # the import takes 0.1 s, which commands that write no shard are spared

    addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
    lengths = [len(buffer) for buffer in buffers]
    return all(number % DIRECT_BYTES == 0 for number in (offset, *lengths, *addresses))


class LocalSource:
    """A file open for reading, from any thread. If its descriptor becomes stale, the file is opened again."""

    def __init__(self, path: Path, bypass_cache: bool = False):
        """Open a regular file. With `bypass_cache`, drop what this machine's page cache has of it, so that reads go to
        the disk. Raises OSError."""
        self.path = path
        self._descriptor = _retry(lambda: open_regular(path))
        self.num_bytes = os.fstat(self._descriptor).st_size
        if bypass_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers, one after the other, with the bytes of the file from `offset` on.

        Any thread may call this. Raises EOFError if the file ends before the buffers are full, and OSError.
        """
        attempts = itertools.count()

        def read_once() -> None:
            """Fill the buffers. Called again after an error that passes in a moment."""
            # A stale descriptor stays stale, and other threads read with it, so each further attempt opens a new one.
            is_first_attempt = next(attempts) == 0
            descriptor = self._descriptor if is_first_attempt else open_regular(self.path)
            try:
                _transfer(os.preadv, descriptor, offset, buffers, EOFError(f"{self.path}: ends before byte {offset}+"))
            finally:
                if not is_first_attempt:
                    os.close(descriptor)

        _retry(read_once)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _retry(call: Callable[[], T]) -> T:
    """Call a function, and again a few times after errors that pass in a moment, such as a stale handle of a network
    file. Returns its result; raises its last error."""
    return retry_transient_errors(call, BRIEF_ERRNOS)


def _transfer(
    call: Callable[[int, Any, int], int],
    descriptor: int,
    offset: int,
    buffers: Sequence[Buffer],
    error_at_end: Exception,
) -> None:
    """Write or read all buffers, one after the other, from `offset` of a file on.

    call: `os.pwritev` or `os.preadv`, which may move fewer bytes than it is asked for. It is called until all are
    moved.
    error_at_end: raised when a call moves no bytes, because the disk is full or the file ends.
    """
    remaining = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while remaining:
        num_moved = call(descriptor, remaining[:MAX_VECTORS], offset)
        if num_moved == 0:
            raise error_at_end
        offset += num_moved

        # Drop the buffers that are done, and the beginning of one that is partly done.
        while num_moved and num_moved >= len(remaining[0]):
            num_moved -= len(remaining.pop(0))
        if num_moved:
            remaining[0] = remaining[0][num_moved:]
