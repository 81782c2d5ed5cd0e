"""What runs leave in shared memory: cleaning up after dead ones without touching live ones.

StreamingDataset keeps its bookkeeping in blocks of fixed names (/dev/shm/000000_locals, …). A run killed with SIGKILL
leaves them, and the next run then reports "Reused local directory", or waits for ever at a barrier whose count is off.
Its own `clean_stale_shared_memory` removes every block it can find, those of running neighbours included. Here a block
goes only if it is ours and no living process has mapped or opened any block of the same number.

Our numbers are drawn, and none comes twice. Python removes blocks by their names, some long after their process has
ended; were a name used again, the block of another run would go.

What cannot be seen is a process in another PID namespace that shares this /dev/shm (containers with `--ipc=host` but
without `--pid=host`): give such containers a /dev/shm each.
"""

import contextlib
import logging
import os
import re
import secrets
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from llmfoundry_lite.errors import DataError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")

# As in streaming.base.constant, which takes seconds to import; a test compares them.
LOCALS, BARRIER_FILELOCK, CACHE_FILELOCK = "locals", "barrier_filelock", "cache_filelock"
SHM_TO_CLEAN = (
    *(LOCALS, "barrier", "next_epoch", "cache_usage", "shard_states", "shard_access_times", "resume"),
    *("epoch_shape", "epoch_data"),
)

SHARD_TABLE, VERIFIED, ELSEWHERE = "shard_table", "verified", "elsewhere"
"""Ours, beside StreamingDataset's."""

_BLOCK_NAME = re.compile(rf"(\d{{6,}})_(?:{'|'.join((*SHM_TO_CLEAN, SHARD_TABLE, VERIFIED, ELSEWHERE))})")
_LOCK_NAME = re.compile(rf"(\d{{6,}})_(?:{BARRIER_FILELOCK}|{CACHE_FILELOCK})")

_LAUNCH = "launch="
"""Begins the last name in our `locals` blocks."""

Inode = tuple[int, int]
"""Device and inode number: what tells a block from an unlinked one of the same name."""


def clean_stale_shared_memory() -> list[str]:
    """Remove blocks and file locks that dead runs of this user left; returns their names.

    Nothing is removed where /proc does not tell who is alive, nor when a process that may be using a block (one of
    this user's) cannot be looked into.
    """
    removed = []
    for path, inode in (find_stale_shared_memory() or {}).items():
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) == inode and status.st_uid == os.geteuid():
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:
            pass  # its owner, or somebody else's clean-up, was faster
    return sorted(removed)


def find_stale_shared_memory() -> dict[Path, Inode] | None:
    """Blocks and file locks of anybody that no living process has; None where that cannot be told of this user's.

    Those of a user one of whose processes may be using a block, and cannot be looked into, are not among them.
    """
    # In this order, a run that starts meanwhile is safe: it maps its blocks before it makes its locks.
    locks = _names_by_number(Path(tempfile.gettempdir()), _LOCK_NAME)
    blocks = _names_by_number(SHARED_MEMORY, _BLOCK_NAME)
    if not (locks or blocks):
        return {}
    if not PROC.joinpath("self/maps").exists():
        return None

    pids_by_inode, hidden_uids = _find_holders({inode for block in blocks.values() for inode in block.values()})
    if os.geteuid() in hidden_uids:
        return None
    stale = {}
    for number in blocks.keys() | locks.keys():
        files = blocks[number] | locks[number]
        is_held = any(inode in pids_by_inode for inode in blocks[number].values())
        if not is_held and not (hidden_uids and hidden_uids & _owners(files)):
            stale |= files
    return stale


def _owners(files: Iterable[Path]) -> set[int]:
    owners = set()
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            owners.add(path.stat().st_uid)
    return owners


@contextmanager
def one_start_at_a_time(timeout_seconds: float = 30) -> Iterator[None]:
    """Hold the runs of this machine apart while they look whether their folders are free and take them: two steps.

    Whoever waits too long goes on: two runs that start together on two nodes could otherwise wait for each other.
    """
    lock = FileLock(Path(tempfile.gettempdir()) / f"llmfoundry_lite_start_{os.getuid()}.lock")
    with contextlib.suppress(Timeout):
        lock.acquire(timeout=timeout_seconds)
    try:
        yield
    finally:
        lock.release()


def wait_for_folders(folders: Sequence[str], launch_id: str = "", timeout_seconds: float = 45) -> None:
    """Return when no living process caches a download in one of the folders; `DataError` if one goes on doing so.

    Two runs must not download into one folder: each would evict and overwrite what the other reads. Nodes of one launch
    may: each has the same data, and takes what the other has brought. What is left of a killed run is worth waiting
    for: workers look for their parent every 5 s, and `composer` and `torchrun` leave the ranks beside one that died
    30 s.
    """
    deadline = time.monotonic() + timeout_seconds
    while users := _pids_by_folder(folders, launch_id):
        folder, pids = next(iter(users.items()))
        processes = ", ".join(map(str, sorted(pids)))
        if os.getpid() in pids:
            raise DataError(
                f"two data sets of this run download into {folder}; give each its own `local`, "
                "or leave `remote` out if the folder is complete"
            )
        if time.monotonic() > deadline:
            raise DataError(
                f"another run (process {processes}) is downloading into {folder}; give this run a `local` of its own, "
                "end the other one, or leave `remote` out if the folder is complete"
            )
        log.info("Waiting for process %s to let go of %s", processes, folder)
        time.sleep(0.1)
        clean_stale_shared_memory()


def register_folders(folders: Sequence[str], launch_id: str) -> tuple[int, Any]:
    """Draw a number for a data set that reads these folders: the number and its `locals` block, to be kept."""
    from streaming.base.shared import SharedMemory

    number = 10**9 + secrets.randbelow(9 * 10**9)
    content = pack_folders(folders, launch_id, number)
    block = SharedMemory(f"{number}_{LOCALS}", True, len(content))
    block.buf[: len(content)] = content
    return number, block


def shard_table_path(number: int) -> Path:
    return (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"{number:06}_{SHARD_TABLE}"


def remove_at_exit(owner: object, path: Path) -> None:
    """Remove a file of shared memory when `owner` or this process ends, by a signal too; never from a child of it."""
    is_tracked = path.parent == Path("/dev/shm")
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            path.unlink(missing_ok=True)
            if is_tracked:
                resource_tracker.unregister(f"/{path.name}", "shared_memory")

    if is_tracked:
        resource_tracker.register(f"/{path.name}", "shared_memory")
    weakref.finalize(owner, remove)


def pack_folders(folders: Sequence[str], launch_id: str, number: int) -> bytes:
    """The content of a `locals` block, which StreamingDataset can read too."""
    text = "\0".join([*map(os.path.realpath, folders), _LAUNCH + launch_id, str(number)]).encode()
    return np.int32(4 + len(text)).tobytes() + text


def _pids_by_folder(folders: Sequence[str], launch_id: str) -> dict[str, set[int]]:
    """Which of the folders are registered in shared memory by another launch, and by which living processes."""
    if not folders:
        return {}
    places = {place: folder for folder in folders for place in _places(folder)}
    blocks = {
        path: inode
        for block in _names_by_number(SHARED_MEMORY, _BLOCK_NAME).values()
        for path, inode in block.items()
        if path.name.endswith(LOCALS)
    }
    used = {}
    for path in blocks:
        names = _read_locals(path)
        if not (launch_id and _LAUNCH + launch_id in names):
            used[path] = {places[place] for name in names for place in _places(name) if place in places}
    inodes = {blocks[path] for path in used if used[path]}
    pids_by_inode = _find_holders(inodes)[0] if inodes else {}
    return {
        folder: pids_by_inode[blocks[path]] for path in used if blocks[path] in pids_by_inode for folder in used[path]
    }


def _places(folder: str) -> list[str | Inode]:
    """What tells a folder under any of its names: its real path, and its inode if it is there."""
    places: list[str | Inode] = [os.path.realpath(folder)]
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        places.append((status.st_dev, status.st_ino))
    return places


def _read_locals(path: Path) -> list[str]:
    """The folders in a `locals` block: int32 size (0 once released), then NUL-separated names and the number."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, PermissionError):
        return []
    size = int(np.frombuffer(content[:4], np.int32)[0]) if len(content) >= 4 else 0
    return content[4:size].decode("utf-8", "replace").split("\0")[:-1]


def _names_by_number(folder: Path, pattern: re.Pattern[str]) -> defaultdict[str, dict[Path, Inode]]:
    """Files whose name matches the pattern, with their inodes, under the number in their name."""
    found: defaultdict[str, dict[Path, Inode]] = defaultdict(dict)
    if not folder.is_dir():
        return found
    for entry in os.scandir(folder):
        if match := pattern.fullmatch(entry.name):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found[match[1]][Path(entry.path)] = (status.st_dev, status.st_ino)
    return found


def _find_holders(inodes: set[Inode]) -> tuple[dict[Inode, set[int]], set[int]]:
    """Which living processes have mapped or opened the files; and whose processes could not be looked into."""
    pids_by_inode: defaultdict[Inode, set[int]] = defaultdict(set)
    hidden_uids: set[int] = set()
    for process in PROC.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            for inode in _mapped_inodes(process) | _opened_inodes(process):
                if inode in inodes:
                    pids_by_inode[inode].add(int(process.name))
        except PermissionError:
            hidden_uids |= _uids_that_may_share_memory(process)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    return pids_by_inode, hidden_uids


def _mapped_inodes(process: Path) -> set[Inode]:
    inodes = set()
    for line in process.joinpath("maps").read_text(errors="replace").splitlines():
        if _BLOCK_NAME.search(line):
            _address, _permissions, _offset, device, inode, _path = line.split(maxsplit=5)
            major, minor = device.split(":")
            inodes.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return inodes


def _opened_inodes(process: Path) -> set[Inode]:
    inodes = set()
    for descriptor in process.joinpath("fd").iterdir():
        try:
            # The name is looked at first: asking a file system that hangs about its files would hang us.
            if _BLOCK_NAME.search(os.readlink(descriptor)):
                status = descriptor.stat()
                inodes.add((status.st_dev, status.st_ino))
        except FileNotFoundError:
            continue
    return inodes


def _uids_that_may_share_memory(process: Path) -> set[int]:
    """User ids of a process that does not let us look into it, or none if it cannot be one that has a block.

    There is one on almost every machine (init, an agent of the login session), so its mere presence must not stop the
    clean-up. Its `status` is open to everybody: whoever has a StreamingDataset has torch in memory, which takes more
    than 256 MiB of address space, and shared memory, for every block is written to as it is made.
    """
    try:
        lines = process.joinpath("status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    has_torch = int(status.get("VmSize", ["0"])[0]) > 256 * 1024
    has_shared_memory = int(status.get("RssShmem", ["0"])[0]) > 0
    return set(map(int, status["Uid"])) if has_torch and has_shared_memory else set()
