"""Locks of the folders that data sets of this machine read: one launch at a time downloads into a folder.

A folder's lock is a file in `/dev/shm`, named after the folder's device and inode. Every process that reads the folder
holds it shared (flock). The file has a note of the launch that took it first: `{"launch": …, "process": …}`. The kernel
frees a lock when its process ends, however that happens. The files stay: if one were removed, two runs could hold
different files of one name. Other users write into `/dev/shm` too, so only files of this user are opened, and no links.
"""

import fcntl
import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from llmfoundry_lite.errors import DataError, one_line
from llmfoundry_lite.files import open_own
from llmfoundry_lite.ranks.identity import describe_this_process, pid_namespace

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MAX_NOTE_BYTES = 1000
TIMEOUT_SECONDS = 45
"""The workers of a killed run end within seconds, but `composer` and `torchrun` give its other ranks 30 s."""
POLL_SECONDS = 0.1


def shared_memory_folder() -> Path:
    """Return the folder for files in memory, or the one for temporary files on systems without it, such as macOS."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def lock_path(folder: str) -> Path:
    """Return the path of a folder's lock, which is the same for every path that leads to the folder."""
    status = os.stat(folder)
    return shared_memory_folder() / f"llmfoundry-lite-{os.geteuid()}-{status.st_dev:x}-{status.st_ino:x}.lock"


def hold_folder(
    folder: str, launch_id: str, *, alone: bool, timeout_seconds: float = TIMEOUT_SECONDS
) -> BinaryIO | None:
    """Hold a folder's lock until the returned file is closed, here and in forked workers.

    With `alone`, waits until no other launch of this user holds it, and raises DataError after the timeout. Warns and
    returns None where the lock cannot be opened.

    Two runs must not download into one folder, because each would evict and overwrite what the other reads. Nodes of
    one launch may: they download the same data. Two users need a `local` each, since neither sees the other's locks.
    """
    path = lock_path(folder)
    try:
        file = open(path, "a+b", opener=open_own)  # noqa: SIM115 (the caller's)
    except OSError as error:
        log.warning("%s cannot be this user's lock (%s): runs that share %s go unseen", path, one_line(error), folder)
        return None

    deadline = time.monotonic() + timeout_seconds
    while True:
        # An exclusive lock is granted only where no process holds the folder. Then this launch is the first.
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_note(file, launch_id)
        fcntl.flock(file, fcntl.LOCK_SH)  # waits only while another process writes its note

        first_launch, first_process = _read_note(file)
        if not alone or first_launch == launch_id:
            return file

        fcntl.flock(file, fcntl.LOCK_UN)
        is_held_by_us = first_process == describe_this_process()  # which would wait for itself
        if is_held_by_us or time.monotonic() > deadline:
            file.close()
            raise _refusal(folder, first_process)
        log.info("Waiting for process %s to let go of %s", _describe_process(first_process), folder)
        time.sleep(POLL_SECONDS)


def check_not_held(folder: str) -> None:
    """Raise DataError if a run of this user reads a folder now. A folder that does not exist is not held."""
    if not os.path.isdir(folder):
        return
    lock = hold_folder(folder, "data show", alone=True, timeout_seconds=0)
    if lock is not None:
        lock.close()


def _refusal(folder: str, process: dict[str, Any]) -> DataError:
    """Return the error for a folder that a process downloads into, of another run or of this one."""
    if process == describe_this_process():
        return DataError(
            f"two data sets of this run download into {folder}; give each its own `local`, "
            "or leave `remote` out if the folder is complete"
        )
    return DataError(
        f"another run (process {_describe_process(process)}) is downloading into {folder}; give this run a `local` of "
        "its own, end the other one, or leave `remote` out if the folder is complete"
    )


def _describe_process(process: dict[str, Any]) -> str:
    """Return a process's number, and its container if that is another one.

    Containers of one machine may share its memory, and each counts processes anew, so the number alone would mislead.
    """
    number = f"{process.get('pid', 'unknown')}"
    is_in_this_container = process.get("namespace", pid_namespace()) == pid_namespace()
    if is_in_this_container:
        return number
    return f"{number} in another container, {process.get('host')}"


def _write_note(file: BinaryIO, launch_id: str) -> None:
    """Note that this process of a launch took the lock first. The lock must be held exclusively."""
    note = {"launch": launch_id, "process": describe_this_process()}
    file.truncate(0)
    file.write(json.dumps(note).encode())
    file.flush()


def _read_note(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Return the launch that took a lock first, and its process; both empty if no run has written that."""
    file.seek(0)
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        note = json.loads(file.read(MAX_NOTE_BYTES))
        return str(note["launch"]), dict(note["process"])
    return "", {}
