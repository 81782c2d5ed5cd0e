"""Scratch space: a folder of this machine with what is on its way into a bucket, and a limit of its bytes."""

import errno
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmfoundry_lite.config.data_schema import SIZES
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.files import lock_folder

PREFIX = "llmfoundry-prepare."
"""Beginning of the names of scratch folders. The host and a random text follow."""
DEFAULT_LIMIT_BYTES = 4 << 30
"""Limit of scratch space if none is given, unless more is needed."""
MAX_FOLDERS_LOST = 100
"""Number of new scratch folders that launches which begin at the same moment may take from each other."""
MARGIN_BYTES = 4 << 20
"""Room for records of the preparation, such as its index and its held-out text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """The scratch space that a user asks for."""

    folder: str | None = None
    """Folder in which a scratch folder is made; None is the system's folder for temporary files."""
    limit_bytes: int | None = None
    """Maximum number of bytes in it. None is DEFAULT_LIMIT_BYTES, or what is needed if that is more."""


def parse_scratch(folder: str | None, limit: str | None) -> Scratch:
    """Build the scratch options from the values of `--scratch` and `--scratch-limit`. Raises ConfigError."""
    if limit is None:
        return Scratch(folder=folder)
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(SIZES)})?", limit.strip().lower())
    num_bytes = int(float(match[1]) * SIZES[match[2] or "b"]) if match else 0
    if num_bytes <= 0:
        raise ConfigError(f"--scratch-limit {limit}: expected a number of bytes above 0, such as 2gb or 500mb")
    return Scratch(folder=folder, limit_bytes=num_bytes)


@contextmanager
def scratch_folder(parent: str | None) -> Iterator[Path]:
    """Context manager: make a scratch folder in `parent`, and remove it at the end.

    Folders of launches on this host that were killed are removed first: nobody holds their locks. Raises DataError if
    no folder can be made.
    """
    root = Path(parent or tempfile.gettempdir()).expanduser()
    prefix = f"{PREFIX}{socket.gethostname()}."
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{prefix}*"):
            remove_unless_in_use(leftover)
        folder, lock = make_locked_folder(root, prefix)
    except OSError as error:
        raise DataError(f"--scratch {root}: no folder can be made there ({error.strerror}); choose another") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make_locked_folder(root: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder with a new name in `root`, and lock it. Returns its path, and the descriptor of the lock.

    Before it is locked, another launch may take it for that of a killed one, and remove it. Then another one is made.
    """
    for _ in range(MAX_FOLDERS_LOST):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            lock = lock_folder(folder)
        except (BlockingIOError, FileNotFoundError):
            continue
        if folder.exists():
            return folder, lock
        os.close(lock)
    raise OSError(errno.EBUSY, "other launches have removed each new folder")


def remove_unless_in_use(folder: Path) -> None:
    """Remove a scratch folder of this user, unless its process runs and so holds a lock on it."""
    with suppress(OSError):
        if folder.stat().st_uid != os.geteuid():
            return
        lock = lock_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


class Space:
    """Bytes of scratch space that are in use or reserved. Threads that upload files free them."""

    def __init__(self, limit_bytes: int | None) -> None:
        """Start with no bytes in use."""
        self.is_limit_given = limit_bytes is not None
        self.limit_bytes = limit_bytes or DEFAULT_LIMIT_BYTES
        self.used_bytes = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def require(self, needed_bytes: int, purpose: str) -> None:
        """Raise DataError if the limit is below what is needed. A limit that nobody has given is raised instead.

        `purpose` says in the message for what it is needed.
        """
        needed_bytes += MARGIN_BYTES
        if not self.is_limit_given:
            self.limit_bytes = max(self.limit_bytes, needed_bytes)
        if self.limit_bytes < needed_bytes:
            needed_mebibytes = -(-needed_bytes // (1 << 20))
            raise DataError(
                f"--scratch-limit of {self.limit_bytes:,} bytes: at least {needed_mebibytes}mb are needed for {purpose}"
            )

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes are free. Raises the error of a thread that has failed."""
        with self._changed:
            self._raise_failure()
            return self.used_bytes + num_bytes + MARGIN_BYTES <= self.limit_bytes

    def wait_for_room(self, num_bytes: int) -> None:
        """Wait until so many bytes are free, without reserving them. Raises the error of a thread that has failed."""
        with self._changed:
            while self._lacks(num_bytes):
                self._changed.wait()

    def reserve(self, num_bytes: int) -> None:
        """Wait until so many bytes are free, and reserve them. Raises the error of a thread that has failed."""
        with self._changed:
            while self._lacks(num_bytes):
                self._changed.wait()
            self.used_bytes += num_bytes

    def change(self, num_bytes: int) -> None:
        """Add bytes to those in use, or release some if the number is negative."""
        with self._changed:
            self.used_bytes += num_bytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record the error of a thread, so that whoever waits for it raises it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _lacks(self, num_bytes: int) -> bool:
        """Return whether too few bytes are free. Without any in use, nothing would free more."""
        self._raise_failure()
        return self.used_bytes > 0 and self.used_bytes + num_bytes + MARGIN_BYTES > self.limit_bytes

    def _raise_failure(self) -> None:
        """Raise the error of a thread that has failed."""
        if self._failure is not None:
            raise self._failure
