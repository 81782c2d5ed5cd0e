"""The folder that checkpoints go to: room, write and fsync, what comes back, and how long a save would take.

A checkpoint takes 12 bytes for each parameter (fp32 weights and two moments): 12 GB for 1 G parameters.
"""

import errno
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.hardware import GIB, MIB

CHECKPOINT_BYTES = 12e9
"""Of 1 G parameters."""
SLOW_BYTES_PER_SECOND = 100e6
"""Two minutes for such a checkpoint."""
SLOW_FSYNC_SECONDS = 0.1
"""A save syncs every file and folder it makes; a disk that turns needs 0.02 s."""
ENOUGH_BYTES = 3 * CHECKPOINT_BYTES
"""A save is written beside the one it replaces."""
PIECE_BYTES = 32 * MIB
LIMIT_SECONDS = 10
"""Of writing, and of reading; the piece that was begun is finished."""

FASTER = "name a faster folder with save_folder: a local NVMe disk, or a parallel file system"


def check(machine: Machine, fsync: Callable[[int], None] = os.fsync) -> Iterator[Finding]:
    folder = machine.folder
    if not folder.is_dir():
        fix = f"mkdir -p {folder}, or name another one with --folder"
        yield Finding(check="disk", status=Status.FAIL, detail=f"{folder} is not a folder", fix=fix)
        return
    free_bytes = _free_bytes(folder)
    yield _check_room(folder, free_bytes)
    most = min((1 if machine.quick else 16) * PIECE_BYTES, free_bytes // 10)
    most = max(1, most // MIB) * MIB
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name: nothing stays, however this ends
            yield _check_write(file.fileno(), most, fsync)
            yield _check_read(file.fileno())
            yield _check_latency(file.fileno(), fsync, 1 if machine.quick else 5)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free space in {folder} (`llmfoundry-lite checkpoint prune`), or name another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"make {folder} writable for this user, or name another folder"
        else:
            fix = f"look at dmesg and at the mount of {folder}"
        words = f"{error.strerror}, writing up to {most / MIB:,.0f} MiB in {folder}"
        yield Finding(check="disk write", status=Status.FAIL, detail=words, fix=fix)


def _check_room(folder: Path, free_bytes: int) -> Finding:
    kind = _file_system(folder)
    problems, fixes = [], []
    if free_bytes < ENOUGH_BYTES:
        problems.append(f"three checkpoints of 1 G parameters take {ENOUGH_BYTES / 1e9:.0f} GB")
        fixes.append("free space, or keep fewer checkpoints (save_num_checkpoints_to_keep)")
    if kind in ("tmpfs", "ramfs"):
        problems.append("it is memory, and gone after a restart")
        fixes.append("name a folder on a disk with --folder")
    return Finding(
        check="disk free",
        status=Status.WARN if problems else Status.PASS,
        value=free_bytes / GIB,
        unit="GiB",
        detail="; ".join([f"{folder.resolve()} ({kind})", *problems]),
        fix="; ".join(fixes),
    )


def _check_write(descriptor: int, most: int, fsync: Callable[[int], None]) -> Finding:
    """Pieces that are each synced, as a checkpoint's shards are."""
    block, size = _block(), 0
    began = time.perf_counter()
    while size < most and time.perf_counter() - began < LIMIT_SECONDS:
        piece = min(PIECE_BYTES, most - size)
        for _ in range(piece // MIB):
            _write_all(descriptor, block)
        fsync(descriptor)
        size += piece
    rate = size / (time.perf_counter() - began)
    slow = rate < SLOW_BYTES_PER_SECOND
    return Finding(
        check="disk write",
        status=Status.WARN if slow else Status.PASS,
        value=rate / 1e6,
        unit="MB/s",
        detail=f"{size / MIB:,.0f} MiB with fsync; 1 G parameters would take {CHECKPOINT_BYTES / rate:,.0f} s to save",
        fix=FASTER if slow else "",
    )


def _check_read(descriptor: int) -> Finding:
    """Read back what was written, from the disk as far as the system lets go of its own copy."""
    block, wrong, count = _block(), [], 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    began = time.perf_counter()
    while time.perf_counter() - began < LIMIT_SECONDS and (data := _read_all(descriptor, MIB)):
        if data != block:
            wrong.append(count)
        count += 1
    rate = count * MIB / (time.perf_counter() - began)
    return Finding(
        check="disk read",
        status=Status.FAIL if wrong else Status.PASS,
        value=rate / 1e6,
        unit="MB/s",
        detail=f"{len(wrong)} of {count} MiB are not what was written, from MiB {wrong[0]} on"
        if wrong
        else "the bytes that were written",
        fix="do not save here; look at dmesg, SMART and the file server's log" if wrong else "",
    )


def _check_latency(descriptor: int, fsync: Callable[[int], None], limit_seconds: float) -> Finding:
    seconds, deadline = [], time.perf_counter() + limit_seconds
    while len(seconds) < 50 and time.perf_counter() < deadline:
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write_all(descriptor, b"x" * 4096)
        began = time.perf_counter()
        fsync(descriptor)
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds)
    slow = typical > SLOW_FSYNC_SECONDS
    return Finding(
        check="disk fsync",
        status=Status.WARN if slow else Status.PASS,
        value=typical * 1e3,
        unit="ms",
        detail=f"of 4 KiB, median of {len(seconds)}; the slowest took {max(seconds) * 1e3:,.1f} ms",
        fix=FASTER if slow else "",
    )


def _block() -> bytes:
    """1 MiB that does not compress, the same each time."""
    return random.Random(4).randbytes(MIB)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _free_bytes(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def _file_system(folder: Path) -> str:
    """Its type: ext4, nfs4, tmpfs, … as the longest mount point above the folder has it."""
    path, best, kind = str(folder.resolve()), "", "unknown file system"
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        point, name = line.split()[1:3]
        point = point.replace("\\040", " ")
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, name
    return kind
