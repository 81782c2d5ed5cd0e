"""The folder that checkpoints go to: room, write and fsync, what comes back, and how long a save would take.

A checkpoint takes 12 bytes for each parameter (fp32 weights and two moments): 12 GB for 1 G parameters. Every page
that is written names its place, so that bytes that come back from another place, or from an earlier examination, are
not taken for the right ones.
"""

import errno
import os
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.doctor.finding import Finding, Machine, Status, shorten
from llmfoundry_lite.hardware import GIB, MIB

CHECKPOINT_BYTES = 12e9
"""Of 1 G parameters."""


class Kind(NamedTuple):
    """What a folder lies on, and the slowest rates that are no reason to warn: a third or less of what is usual."""

    name: str
    write_bytes_per_second: float
    read_bytes_per_second: float


MEMORY = Kind("memory", 500e6, 500e6)
NVME = Kind("disk on NVMe", 200e6, 300e6)
SSD = Kind("solid-state disk", 100e6, 150e6)
TURNING = Kind("turning disk", 50e6, 50e6)
NETWORK = Kind("network file system", 100e6, 100e6)
OTHER = Kind("disk of unknown kind", 100e6, 100e6)

MEMORY_SYSTEMS = ("tmpfs", "ramfs")
NETWORK_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs", "wekafs"),
    *("pvfs2", "afs", "daos", "panfs"),
)
SLOW_FSYNC_SECONDS = 0.1
"""A save syncs every file and folder it makes; a disk that turns needs 0.02 s."""
ENOUGH_BYTES = 3 * CHECKPOINT_BYTES
"""A save is written beside the one it replaces."""
PIECE_BYTES = 32 * MIB
PAGE_BYTES = 4096
LIMIT_SECONDS = 10
"""Of writing, and of reading; the piece that was begun is finished."""

FASTER = "name a faster folder with save_folder: a local NVMe disk, or a parallel file system"


Read = Callable[[int, int], bytes]


def check(
    machine: Machine, fsync: Callable[[int], None] = os.fsync, read: Read = os.read, kind: Kind | None = None
) -> Iterator[Finding]:
    folder = machine.folder
    if not folder.is_dir():
        fix = f"mkdir -p {folder}, or name another one with --folder"
        yield Finding(check="disk", status=Status.FAIL, detail=f"{folder} is not a folder", fix=fix)
        return
    free_bytes = _free_bytes(folder)
    yield _check_room(folder, free_bytes)
    most = min((1 if machine.quick else 16) * PIECE_BYTES, free_bytes // 10)
    most = max(1, most // MIB) * MIB
    kind = kind or find_kind(folder)
    blocks = Blocks()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name: nothing stays, however this ends
            yield _check_write(file.fileno(), most, fsync, blocks, kind)
            yield _check_read(file.fileno(), read, blocks, kind)
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
    if kind in MEMORY_SYSTEMS:
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


def _check_write(descriptor: int, most: int, fsync: Callable[[int], None], blocks: "Blocks", kind: Kind) -> Finding:
    """Pieces that are each synced, as a checkpoint's shards are."""
    size = 0
    began = time.perf_counter()
    while size < most and time.perf_counter() - began < LIMIT_SECONDS:
        piece = min(PIECE_BYTES, most - size)
        for index in range(size // MIB, (size + piece) // MIB):
            _write_all(descriptor, blocks.build(index))
        fsync(descriptor)
        size += piece
    blocks.num_written = size // MIB
    rate = size / (time.perf_counter() - began)
    slow = rate < kind.write_bytes_per_second
    return Finding(
        check="disk write",
        status=Status.WARN if slow else Status.PASS,
        value=rate / 1e6,
        unit="MB/s",
        detail=f"{size / MIB:,.0f} MiB with fsync; 1 G parameters would take {CHECKPOINT_BYTES / rate:,.0f} s to save"
        + expected(kind, kind.write_bytes_per_second) * slow,
        fix=FASTER if slow else "",
    )


def _check_read(descriptor: int, read: Read, blocks: "Blocks", kind: Kind) -> Finding:
    """Read back what was written, from the disk as far as the system lets go of its own copy."""
    wrong, count, read_seconds = [], 0, 0.0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    while read_seconds < LIMIT_SECONDS:
        began = time.perf_counter()
        data = _read_all(descriptor, MIB, read)
        read_seconds += time.perf_counter() - began
        if not data:
            if count < blocks.num_written:
                wrong.append(f"the file ends after {count} of {blocks.num_written} MiB")
            break
        if data != blocks.build(count):
            wrong.append(f"MiB {count} {blocks.explain(data, count)}")
        count += 1
    rate = count * MIB / max(read_seconds, 1e-9)
    slow = rate < kind.read_bytes_per_second
    detail = f"{count} MiB, the bytes that were written" + expected(kind, kind.read_bytes_per_second) * slow
    fix = f"{FASTER}; a run reads its data and its checkpoints" if slow else ""
    if wrong:
        detail = f"{len(wrong)} of {count} MiB are not what was written: {shorten(wrong)}"
        fix = "do not save here; look at dmesg, SMART and the file server's log"
    return Finding(
        check="disk read",
        status=Status.FAIL if wrong else Status.WARN if slow else Status.PASS,
        value=rate / 1e6,
        unit="MB/s",
        detail=detail,
        fix=fix,
    )


def expected(kind: Kind, rate: float) -> str:
    return f"; {rate / 1e6:,.0f} MB/s is the least for a {kind.name}"


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


class Blocks:
    """Blocks of 1 MiB that do not compress, in which every page starts with this examination's name and its place."""

    def __init__(self) -> None:
        self.name = os.urandom(8)
        self.num_written = 0
        self.noise = random.Random(4).randbytes(MIB)

    def build(self, index: int) -> bytes:
        block = bytearray(self.noise)
        for page in range(0, MIB, PAGE_BYTES):
            struct.pack_into("<8sQ", block, page, self.name, index * MIB + page)
        return bytes(block)

    def explain(self, data: bytes, index: int) -> str:
        """Where bytes that are not those of block `index` belong, if they say so."""
        right = self.build(index)
        if len(data) < MIB:
            return f"ends after {len(data):,} bytes"
        page = next(at for at in range(0, MIB, PAGE_BYTES) if data[at : at + PAGE_BYTES] != right[at : at + PAGE_BYTES])
        name, place = struct.unpack_from("<8sQ", data, page)
        where = f"at byte {index * MIB + page:,}"
        if name == self.name and place != index * MIB + page:
            return f"{where} holds what was written to byte {place:,}"
        return f"{where} holds other bytes"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read_all(descriptor: int, size: int, read: Read) -> bytes:
    parts = []
    while size and (part := read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _free_bytes(folder: Path) -> int:
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize


def find_kind(folder: Path, root: Path = Path("/")) -> Kind:
    """By the file system, and below it the block device. A virtual disk does not tell what it is made of."""
    system = _file_system(folder)
    if system in MEMORY_SYSTEMS:
        return MEMORY
    if system.removeprefix("fuse.") in NETWORK_SYSTEMS or system.startswith("fuse."):
        return NETWORK
    number = folder.stat().st_dev
    device = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    while device != device.parent and not (device / "queue/rotational").is_file():
        device = device.parent  # a partition lies in its disk's folder
    if device == device.parent or device.name.startswith(("vd", "xvd", "loop", "dm-", "md")):
        return OTHER
    if device.name.startswith("nvme"):
        return NVME
    return TURNING if (device / "queue/rotational").read_text().strip() == "1" else SSD


def is_shared(folder: Path) -> bool:
    """Whether another machine keeps the folder's files, and their times."""
    return find_kind(folder) is NETWORK


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
