"""Locks of the folders that data sets of this machine read: one launch at a time downloads into a folder.

A folder's lock is a file in `/dev/shm`, named after the folder's device and inode. Every process that reads the folder
holds it shared (flock). It names the launch that took it first. The kernel frees a lock when its process ends, however
that happens. The files stay: if one were removed, two runs could hold different files of one name. Other users write
into `/dev/shm` too, so only files of this user are opened, and no links.
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


def shared_memory_folder() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def lock_path(folder: str) -> Path:
    """Return the path of a folder's lock, which is the same for every path that leads to the folder."""
    status = os.stat(folder)
    return shared_memory_folder() / f"llmfoundry-lite-{os.geteuid()}-{status.st_dev:x}-{status.st_ino:x}.lock"


def hold_folder(folder: str, launch_id: str, *, alone: bool, timeout_seconds: float = 45) -> BinaryIO | None:
    """Hold a folder's lock until the returned file is closed, here and in forked workers.

    With `alone`, waits until no other launch of this user holds it, and raises DataError after the timeout. Warns and
    returns None where the lock cannot be opened.

    Two runs must not download into one folder, because each would evict and overwrite what the other reads. Nodes of
    one launch may: they bring the same data. Two users need a `local` each, since neither sees the other's locks. The
    workers of a killed run end within seconds, but `composer` and `torchrun` give its other ranks 30 s.
    """
    path = lock_path(folder)
    try:
        file = open(path, "a+b", opener=open_own)  # noqa: SIM115 (the caller's)
    except OSError as error:
        log.warning("%s cannot be this user's lock (%s): runs that share %s go unseen", path, one_line(error), folder)
        return None
    deadline = time.monotonic() + timeout_seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
            file.truncate(0)
            file.write(json.dumps({"launch": launch_id, "process": describe_this_process()}).encode())
            file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)  # waits only while another writes its note
        holder, process = _read_note(file)
        if not alone or holder == launch_id:
            return file
        fcntl.flock(file, fcntl.LOCK_UN)
        if process == describe_this_process() or time.monotonic() > deadline:
            file.close()
            raise _refused(folder, process)
        log.info("Waiting for process %s to let go of %s", _place(process), folder)
        time.sleep(0.1)


def check_not_held(folder: str) -> None:
    """Raise DataError if a run of this user reads a folder now."""
    if os.path.isdir(folder) and (file := hold_folder(folder, "data show", alone=True, timeout_seconds=0)):
        file.close()


def _refused(folder: str, process: dict[str, Any]) -> DataError:
    if process == describe_this_process():
        return DataError(
            f"two data sets of this run download into {folder}; give each its own `local`, "
            "or leave `remote` out if the folder is complete"
        )
    return DataError(
        f"another run (process {_place(process)}) is downloading into {folder}; give this run a `local` of its own, "
        "end the other one, or leave `remote` out if the folder is complete"
    )


def _place(process: dict[str, Any]) -> str:
    """Return a process's number and its container: those of one machine count anew, and may share its memory."""
    is_elsewhere = process.get("namespace", pid_namespace()) != pid_namespace()
    return f"{process.get('pid', 'unknown')}" + f" in another container, {process.get('host')}" * is_elsewhere


def _read_note(file: BinaryIO) -> tuple[str, dict[str, Any]]:
    """Return the launch that took a lock first, and its process; both empty if no run has written that."""
    file.seek(0)
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        note = json.loads(file.read(MAX_NOTE_BYTES))
        return str(note["launch"]), dict(note["process"])
    return "", {}
