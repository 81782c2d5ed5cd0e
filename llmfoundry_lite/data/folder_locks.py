"""Locks of the folders that data sets of this machine read: one launch at a time downloads into a folder.

A folder's lock is a file in `/dev/shm`, named after the folder's device and inode. Every process that reads the folder
holds it shared (flock). The file contains a note of the launch that holds the folder, and of the launch's first
process: `{"launch": …, "process": …}`. The kernel frees a lock when its process ends, however that happens. The files
are never removed, since otherwise two runs could hold different files of one name. Other users write into `/dev/shm`
too, so only regular files of this user are opened.
"""

import fcntl
import gc
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
    folder: str, launch_id: str, *, exclusive: bool, timeout_seconds: float = TIMEOUT_SECONDS
) -> BinaryIO | None:
    """Take the lock of a data folder, and hold it until the returned file is closed.

    The file stays open in forked workers too, so the lock lasts as long as any of these processes. `launch_id` is the
    same on all ranks of a launch. With `exclusive`, the function waits until no other launch of this user holds the
    lock, and raises DataError after `timeout_seconds`. If the lock file cannot be opened, it warns and returns None.

    Two runs must not download into one folder, because each would evict and overwrite shards that the other reads. The
    nodes of one launch may, since they download the same data. Two users need a `local` each, because neither sees the
    other's locks.
    """
    path = lock_path(folder)
    try:
        file = open(path, "a+b", opener=open_own)  # noqa: SIM115 (the caller closes it)
    except OSError as error:
        log.warning("%s cannot be this user's lock (%s): runs that share %s go unseen", path, one_line(error), folder)
        return None

    deadline = time.monotonic() + timeout_seconds
    has_collected = False
    while True:
        # The kernel grants an exclusive lock only if no process holds the folder. Then it belongs to this launch.
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_note(file, launch_id)
        fcntl.flock(file, fcntl.LOCK_SH)  # waits only while another process writes its note

        holding_launch, holding_process = _read_note(file)
        if not exclusive or holding_launch == launch_id:
            return file

        fcntl.flock(file, fcntl.LOCK_UN)
        is_held_by_us = holding_process == describe_this_process()
        if is_held_by_us and not has_collected:
            # An earlier run of this program may have left its data set in a reference cycle, and the lock with it.
            gc.collect()
            has_collected = True
            continue

        # If a data set of this process still uses the folder, waiting would never end.
        if is_held_by_us or time.monotonic() > deadline:
            file.close()
            raise _folder_in_use_error(folder, holding_process)
        log.info("Waiting for process %s to let go of %s", _describe_process(holding_process), folder)
        time.sleep(POLL_SECONDS)


def check_not_held(folder: str) -> None:
    """Raise DataError if a run of this user is reading a data folder. Does nothing for a folder that does not exist."""
    if not os.path.isdir(folder):
        return
    lock = hold_folder(folder, "data show", exclusive=True, timeout_seconds=0)
    if lock is not None:
        lock.close()


def _folder_in_use_error(folder: str, process: dict[str, Any]) -> DataError:
    """Return the error for a folder that `process`, of another run or of this one, already downloads into."""
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
    """Describe a process for an error: its id, and its host if it runs in another container.

    Containers of one machine may share `/dev/shm`, but each has process ids of its own, so an id without the container
    could be mistaken for another process.
    """
    pid = f"{process.get('pid', 'unknown')}"
    is_in_this_container = process.get("namespace", pid_namespace()) == pid_namespace()
    if is_in_this_container:
        return pid
    return f"{pid} in another container, {process.get('host')}"


def _write_note(file: BinaryIO, launch_id: str) -> None:
    """Write into a lock file which launch and process hold the folder. The caller must hold the lock exclusively."""
    note = {"launch": launch_id, "process": describe_this_process()}
    file.truncate(0)
    file.write(json.dumps(note).encode())
    file.flush()


def _read_note(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Read from a lock file which launch holds the folder, and its process. Both are empty if nothing was written."""
    file.seek(0)
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        note = json.loads(file.read(MAX_NOTE_BYTES))
        return str(note["launch"]), dict(note["process"])
    return "", {}
