"""Registration of the folders that data sets of this machine read, and clean-up after dead runs.

Each node of a run announces its folders in `/dev/shm/llmfoundry-lite-ID.json`. Every process that reads them holds a
shared lock (flock) on that file. The kernel frees the lock when the process ends, however it ends: a file whose lock is
free belongs to a dead run. Other users write into that folder too: only files of this user are read, and no links.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from llmfoundry_lite.errors import DataError, one_line
from llmfoundry_lite.files import open_own

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "llmfoundry-lite-"


def shared_memory_folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class Registration:
    """Note of the folders that a data set of this node reads, locked while any process that opened it is alive."""

    def __init__(self, path: Path) -> None:
        """Join the registration at `path`."""
        self.path = path
        self._file = open(path, "rb", opener=open_own)  # noqa: SIM115 (as long as this lives)
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @property
    def table_path(self) -> Path:
        """Path of the node's table of shards. It is removed as soon as all ranks have opened the table."""
        return self.path.with_suffix(".npy")

    def release(self) -> None:
        """Remove the files and the lock now, although an error may keep this object alive."""
        _remove_files(self.path, os.getpid())
        self._file.close()


def register_folders(folders: Sequence[str], launch_id: str) -> Registration:
    """Announce the folders that a data set reads, until this process ends or releases them."""
    path = shared_memory_folder() / f"{PREFIX}{secrets.token_hex(8)}.json"
    note = {"launch": launch_id, "pid": os.getpid(), "folders": list(map(os.path.realpath, folders))}
    hidden = path.with_suffix(".new")  # nobody looks for this name before it is locked
    with open(hidden, "x", opener=open_own) as file:
        json.dump(note, file)
    registration = Registration(hidden)
    registration.path = hidden.rename(path)
    weakref.finalize(registration, _remove_files, path, os.getpid())  # at the latest when this process ends
    return registration


def _remove_files(path: Path, pid: int) -> None:
    """Remove the files of a registration, but never from a forked worker."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
        path.with_suffix(".npy").unlink(missing_ok=True)


def _notes() -> Iterator[tuple[Path, BinaryIO]]:
    """Yield this user's registrations, each open as long as the caller looks at it."""
    for path in sorted(shared_memory_folder().glob(f"{PREFIX}*.json")):
        with contextlib.suppress(OSError), open(path, "rb", opener=open_own) as file:
            yield path, file


def _is_stale(file: BinaryIO) -> bool:
    """Return whether no living process holds the registration."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def find_stale_shared_memory() -> list[Path]:
    """Find this user's registrations that no living process holds."""
    return [path for path, file in _notes() if _is_stale(file)]


def clean_stale_shared_memory() -> list[str]:
    """Remove the files that dead runs of this user left, and return their names."""
    removed = []
    for path in find_stale_shared_memory():
        for name in (path, path.with_suffix(".npy")):
            with contextlib.suppress(FileNotFoundError, PermissionError):  # somebody else's clean-up was faster
                name.unlink()
                removed.append(name.name)
    return sorted(removed)


@contextmanager
def one_start_at_a_time(timeout_seconds: float = 30) -> Iterator[None]:
    """Keep runs of this machine apart between looking for a free folder and taking it.

    After the timeout a run goes on: two runs that start together on two nodes could otherwise wait for each other. It
    goes on too where somebody else has taken the lock's name.
    """
    path = Path(tempfile.gettempdir(), f"llmfoundry_lite_start_{os.geteuid()}.lock")
    try:
        lock = open(path, "ab", opener=open_own)  # noqa: SIM115 (held below)
    except OSError as error:
        log.warning("%s cannot be this user's lock (%s): starts are not kept apart", path, one_line(error))
        yield
        return
    deadline = time.monotonic() + timeout_seconds
    with lock:
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield


def wait_for_folders(folders: Sequence[str], launch_id: str = "", timeout_seconds: float = 45) -> None:
    """Wait until no other run of this user reads one of the folders. Raises DataError after the timeout.

    Two runs must not download into one folder: each would evict and overwrite what the other reads. Nodes of one launch
    may: they bring the same data. Two users need a `local` each: the notes of either are closed to the other, who could
    write anything there. The workers of a killed run end within seconds, and `composer` and `torchrun` leave
    the ranks beside one that died for 30 s.
    """
    deadline = time.monotonic() + timeout_seconds
    while found := _find_user(folders, launch_id):
        folder, pid = found
        if pid == os.getpid():
            raise DataError(
                f"two data sets of this run download into {folder}; give each its own `local`, "
                "or leave `remote` out if the folder is complete"
            )
        if time.monotonic() > deadline:
            raise DataError(
                f"another run (process {pid}) is downloading into {folder}; give this run a `local` of its own, "
                "end the other one, or leave `remote` out if the folder is complete"
            )
        log.info("Waiting for process %s to let go of %s", pid, folder)
        time.sleep(0.1)
        clean_stale_shared_memory()


def _find_user(folders: Sequence[str], launch_id: str) -> tuple[str, int] | None:
    """Find one of the folders that another launch reads, and the process that registered it."""
    for _, file in _notes() if folders else ():
        note = _read_note(file)
        if note is None or _is_stale(file) or (launch_id and note["launch"] == launch_id):
            continue
        for folder in folders:
            if any(are_one_place(folder, other) for other in note["folders"]):
                return folder, note["pid"]
    return None


def _read_note(file: BinaryIO) -> dict[str, Any] | None:
    """Return what a registration says; None for what no run has written."""
    try:
        note = json.load(file)
        is_sound = isinstance(note["launch"], str) and type(note["pid"]) is int and isinstance(note["folders"], list)
        return note if is_sound and all(isinstance(folder, str) for folder in note["folders"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def are_one_place(one: str, other: str) -> bool:
    """Return whether two paths lead to the same folder, by links, slashes or mounts of any kind."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False
