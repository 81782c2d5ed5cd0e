"""A folder of a local disk, or of a network disk that is mounted: files are written past the page cache, synced, and
renamed when whole. No torch.
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
MAX_VECTORS = 512
"""Pieces of one readv or writev; the kernel takes 1024."""
WRITE: Callable[[int, Any, int], int] = os.pwritev
"""(descriptor, buffers, offset) -> bytes taken; tests put failing disks here."""

DIRECT: int | None = getattr(os, "O_DIRECT", None)
"""Flag for writes past the page cache, which Linux has; else None."""
DIRECT_BYTES = 4096
"""Memory address, offset and length of such a write must be multiples of this."""


class LocalFolder:
    """A folder at a path of this machine; methods of `Folder`, and those by which `RenameCommits` commits."""

    max_open_files = 4

    def __init__(self, path: Path):
        self.path = path
        self.path_here: Path | None = path
        self.url = str(path)

    def child(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def parent(self) -> "LocalFolder":
        return LocalFolder(self.path.absolute().parent)

    def names(self) -> list[str]:
        try:
            return sorted(_retry(lambda: os.listdir(self.path)))
        except OSError as error:
            if error.errno in NO_FILE:  # a link that leads in a circle, too
                return []
            raise

    def sizes(self) -> dict[str, int]:
        def listed() -> dict[str, int]:
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

        try:
            return _retry(listed)
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def exists(self) -> bool:
        """Return whether anything has this name. A link counts, wherever it leads."""
        return os.path.lexists(self.path)

    def is_link(self) -> bool:
        return self.path.is_symlink()

    def make(self, *, with_parents: bool = False) -> None:
        self.path.mkdir(parents=with_parents, exist_ok=True)

    def read(self, name: str, max_bytes: int) -> bytes:
        def content() -> bytes:
            with open(self.path / name, "rb", opener=open_regular) as file:
                return file.read(max_bytes + 1)

        try:
            return _retry(content)
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from None

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        if only_if_new:  # claims the name first
            (self.path / name).touch(exist_ok=False)
        write_atomically(self.path / name, data)
        sync(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        # Where a link leads, someone has moved a checkpoint, which is theirs. `rmtree` waits for ever at a pipe.
        if self.is_link() or (self.path.exists() and not self.path.is_dir()):
            self.path.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def rename(self, old: str, new: str) -> None:
        """Rename atomically and durably. Raises FileExistsError when `new` is there."""
        if os.path.lexists(self.path / new):
            raise FileExistsError(f"{self.path / new} is there already")
        os.rename(self.path / old, self.path / new)
        sync(self.path)

    def sink(self, name: str, num_bytes: int) -> "LocalSink":
        return LocalSink(self.path / name)

    def source(self, name: str, *, bypass_cache: bool = False) -> "LocalSource":
        return LocalSource(self.path / name, bypass_cache)


class LocalSink:
    """A file whose aligned buffers are written to the disk past the page cache.

    Finding and filling pages of that cache takes more processor time than the rest of a save, and training needs that
    time. Unaligned bytes go through the cache, and so does everything on a disk without direct writes.
    """

    any_order = True

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        self._direct: int | None = None
        if DIRECT is not None:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | DIRECT)

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if self._direct is not None and _is_aligned(offset, buffers):
            # Some file systems cannot write directly, or not from pinned memory. A failing disk fails again below.
            with contextlib.suppress(OSError):
                self._write(self._direct, offset, buffers)
                return
        self._write(self._descriptor, offset, buffers)

    def _write(self, descriptor: int, offset: int, buffers: Sequence[Buffer]) -> None:
        _transfer(WRITE, descriptor, offset, buffers, OSError("the disk took no more bytes"))

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)  # syncs the file, whichever descriptor has written it
        finally:
            self.abandon()

    def abandon(self) -> None:
        os.close(self._descriptor)
        if self._direct is not None:
            os.close(self._direct)


def _is_aligned(offset: int, buffers: Sequence[Buffer]) -> bool:
    import numpy as np  # takes 0.1 s, which commands that read no shard save

    addresses = (np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers)
    return not any(n % DIRECT_BYTES for n in (offset, *map(len, buffers), *addresses))


class LocalSource:
    """A file open for reading. A stale descriptor is opened again."""

    def __init__(self, path: Path, bypass_cache: bool = False):
        self.path = path
        self._descriptor = _retry(lambda: open_regular(path))
        self.num_bytes = os.fstat(self._descriptor).st_size
        if bypass_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        attempts = itertools.count()

        def read() -> None:
            # A stale descriptor stays stale, and other threads read with it: a further attempt opens its own.
            descriptor = open_regular(self.path) if next(attempts) else self._descriptor
            try:
                _transfer(os.preadv, descriptor, offset, buffers, EOFError(f"{self.path}: ends before byte {offset}+"))
            finally:
                if descriptor != self._descriptor:
                    os.close(descriptor)

        _retry(read)

    def close(self) -> None:
        os.close(self._descriptor)


def _retry(call: Callable[[], T]) -> T:
    return retry_transient_errors(call, BRIEF_ERRNOS)


def _transfer(
    call: Callable[[int, Any, int], int], descriptor: int, offset: int, buffers: Sequence[Buffer], if_none: Exception
) -> None:
    """Write or read all of `buffers`, however few bytes each call moves. Raises `if_none` when one moves none."""
    rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while rest:
        done = call(descriptor, rest[:MAX_VECTORS], offset)
        if done == 0:
            raise if_none
        offset += done
        while done and done >= len(rest[0]):
            done -= len(rest.pop(0))
        if done:
            rest[0] = rest[0][done:]
