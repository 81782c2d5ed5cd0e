"""The folder for checkpoints: free space, rates of writing and reading, fsync; and the clocks that date its files.

Behind a URL: a file is put, read, listed and removed as a save does it, in a folder of its own that goes again.

Files of several machines are read beside each other, by their dates, so the file server's clock is compared with this
one's. (`collectives.py` compares the ranks' clocks.) No lease of a run depends on a wall clock.
"""

import contextlib
import ctypes
import errno
import os
import statistics
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status, make_finding

ENOUGH_BYTES = 36e9
"""Three checkpoints of 1 G parameters, at 12 bytes each: fp32 weights and two moments."""
SLOW_BYTES_PER_SECOND = 100e6
"""Below it a checkpoint of 1 G parameters takes longer than two minutes."""
TOO_SLOW = f"{SLOW_BYTES_PER_SECOND / 1e6:.0f} MB/s is the least"
SLOW_FSYNC_SECONDS = 0.1
"""A save syncs each file and folder that it makes; a turning disk needs 0.02 s."""
PIECE_BLOCKS = 32
"""MiB between two syncs."""
LIMIT_SECONDS = 10.0
"""Limit for writing, and for reading; the piece that was begun is finished."""
MEMORY_SYSTEMS = ("tmpfs", "ramfs")
NETWORK_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs", "wekafs"),
    *("pvfs2", "afs", "daos", "panfs"),
)
MAX_FILE_SECONDS = 2.0
"""Largest difference to a file server; FAT, the coarsest file system, counts in two seconds."""
STA_UNSYNC = 0x40
"""Bit of the kernel's clock status (adjtimex(2)): nothing keeps the clock right."""

SET_CLOCK = "timedatectl set-ntp true, or start chronyd (in a container or virtual machine: on its host)"
FASTER = "name a faster folder with save_folder: a local NVMe disk, or a parallel file system"


def file_system(folder: Path) -> str:
    """Return the type of the file system, such as ext4 or nfs4."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    return max(mounts[::-1], key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown file system"


def is_shared(folder: Path) -> bool:
    """Return whether another machine keeps the folder's files, and their times."""
    kind = file_system(folder)
    return kind.startswith("fuse.") or kind in NETWORK_SYSTEMS


# ---------------------------------------------------------------------------------------------------------- clocks


def check_clock(machine: CheckOptions) -> Iterator[Finding]:
    status = kernel_clock_status()
    if status is None:
        yield Finding("clock", Status.SKIP, detail="the kernel does not say whether it is kept right")
    else:
        problems = ["the kernel says that nothing keeps the clock right"] if status & STA_UNSYNC else []
        value = "not synchronised" if problems else "synchronised"
        yield make_finding(
            "clock", problems, SET_CLOCK, Status.WARN, value=value, pass_detail="by the kernel's own account"
        )
    yield check_server_clock(machine.folder)


def kernel_clock_status() -> int | None:
    """Return `status` of adjtimex(2), which is read without setting the clock; None where the kernel does not tell.

    struct timex of 64-bit Linux: unsigned modes; long offset, freq, maxerror, esterror; int status.
    """
    try:
        function = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return None
    buffer = ctypes.create_string_buffer(512)
    return None if function(buffer) < 0 else struct.unpack_from("@iqqqqi", buffer.raw)[5]


def check_server_clock(folder: Path | str) -> Finding:
    name = "clock of the folder"
    if isinstance(folder, str):
        return Finding(name, Status.SKIP, detail=f"nothing was compared: no clock counts for saves in {folder}")
    if not is_shared(folder):
        detail = f"nothing was compared: {folder.resolve()} gets its times from this machine's own clock"
        return Finding(name, Status.SKIP, detail=detail)
    before = time.time()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"now")
        file.flush()
        os.fsync(file.fileno())
        written = os.fstat(file.fileno()).st_mtime
    difference = written - before if written < before else max(0.0, written - time.time())
    detail = f"the file server's time of a new file in {folder.resolve()} against the local clock"
    problems = [f"expected at most {MAX_FILE_SECONDS:.0f} s"] if abs(difference) > MAX_FILE_SECONDS else []
    fix = f"synchronise this machine and the file server: {SET_CLOCK}"
    return make_finding(name, problems, fix, Status.WARN, value=difference * 1e3, unit="ms", detail=detail)


# ------------------------------------------------------------------------------------------------------------ disk


def check_disk(machine: CheckOptions) -> Iterator[Finding]:
    folder = machine.folder
    if isinstance(folder, str):
        yield from check_bucket(open_folder(folder), machine.quick)
        return
    if not folder.is_dir():
        fix = f"mkdir -p {folder}, or name another one with --folder"
        yield Finding("disk", Status.FAIL, detail=f"{folder} is not a folder", fix=fix)
        return
    usage = os.statvfs(folder)
    free_bytes = usage.f_bavail * usage.f_frsize
    yield check_room(folder, free_bytes)
    num_blocks = max(1, min((1 if machine.quick else 16) * PIECE_BLOCKS, free_bytes // 10 // MIB))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name: nothing stays, however this ends
            seed = time.time_ns()
            num_written, finding = check_write(file.fileno(), num_blocks, seed)
            yield finding
            yield check_read(file.fileno(), num_written, seed)
            yield check_latency(file.fileno(), 1 if machine.quick else 5)
    except OSError as error:
        fix = f"look at dmesg and at the mount of {folder}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free space in {folder} (`llmfoundry-lite checkpoint prune`), or name another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"make {folder} writable for this user, or name another folder"
        detail = f"{error.strerror}, writing up to {num_blocks} MiB in {folder}"
        yield Finding("disk write", Status.FAIL, detail=detail, fix=fix)


def check_room(folder: Path, free_bytes: int) -> Finding:
    kind = file_system(folder)
    detail, value = f"{folder.resolve()} ({kind})", free_bytes / GIB
    problems, fixes = [], []
    if free_bytes < ENOUGH_BYTES:
        problems.append(f"three checkpoints of 1 G parameters take {ENOUGH_BYTES / 1e9:.0f} GB")
        fixes.append("free space, or keep fewer checkpoints (save_num_checkpoints_to_keep)")
    if kind in MEMORY_SYSTEMS:
        problems.append("it is memory, and gone after a restart")
        fixes.append("name a folder on a disk with --folder")
    return make_finding("disk free", problems, "; ".join(fixes), Status.WARN, value=value, unit="GiB", detail=detail)


def build_block(seed: int, index: int) -> bytes:
    """Return 1 MiB that does not compress and belongs to this examination and this place alone."""
    return np.random.default_rng((seed, index)).bytes(MIB)


def check_write(descriptor: int, num_blocks: int, seed: int) -> tuple[int, Finding]:
    """Write pieces that are each synced, as a checkpoint's shards are. Returns the number of blocks written."""
    count, seconds = 0, 0.0
    while count < num_blocks and seconds < LIMIT_SECONDS:
        piece = [build_block(seed, index) for index in range(count, min(count + PIECE_BLOCKS, num_blocks))]
        began = time.perf_counter()
        for block in piece:
            write_all(descriptor, block)
        os.fsync(descriptor)
        seconds += time.perf_counter() - began
        count += len(piece)
    rate = count * MIB / seconds
    detail = f"{count} MiB with fsync; 1 G parameters would take {ENOUGH_BYTES / 3 / rate:,.0f} s to save"
    problems = [TOO_SLOW] if rate < SLOW_BYTES_PER_SECOND else []
    return count, make_finding(
        "disk write", problems, FASTER, Status.WARN, value=rate / 1e6, unit="MB/s", detail=detail
    )


def check_read(descriptor: int, num_blocks: int, seed: int) -> Finding:
    """Read what was written, from the disk where the system lets go of its own copy."""
    wrong, count, seconds = [], 0, 0.0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    while count < num_blocks and seconds < LIMIT_SECONDS:
        began = time.perf_counter()
        data = read_all(descriptor, MIB)
        seconds += time.perf_counter() - began
        if len(data) < MIB:
            wrong.append(f"the file ends after {count} of {num_blocks} MiB")
            break
        if data != (right := build_block(seed, count)):
            first = next(i for i, (a, b) in enumerate(zip(data, right, strict=True)) if a != b)
            wrong.append(f"MiB {count} from byte {count * MIB + first:,} on")
        count += 1
    rate, unit = count * MIB / max(seconds, 1e-9) / 1e6, "MB/s"
    if wrong:
        detail = f"{len(wrong)} of {count} MiB are not what was written"
        fix = "do not save here; look at dmesg, SMART and the file server's log"
        return make_finding("disk read", wrong, fix, value=rate, unit=unit, detail=detail)
    detail, fix = f"{count} MiB, the bytes that were written", f"{FASTER}; a run reads its data and its checkpoints"
    problems = [TOO_SLOW] if rate * 1e6 < SLOW_BYTES_PER_SECOND else []
    return make_finding("disk read", problems, fix, Status.WARN, value=rate, unit=unit, detail=detail)


def check_latency(descriptor: int, limit_seconds: float) -> Finding:
    seconds, deadline = [], time.perf_counter() + limit_seconds
    while len(seconds) < 50 and time.perf_counter() < deadline:
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, bytes(4096))
        began = time.perf_counter()
        os.fsync(descriptor)
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds)
    detail = f"of 4 KiB, median of {len(seconds)}; the slowest took {max(seconds) * 1e3:,.1f} ms"
    problems = [f"{SLOW_FSYNC_SECONDS * 1e3:.0f} ms is the most"] if typical > SLOW_FSYNC_SECONDS else []
    return make_finding("disk fsync", problems, FASTER, Status.WARN, value=typical * 1e3, unit="ms", detail=detail)


# ---------------------------------------------------------------------------------------------------------- bucket


def check_bucket(folder: Folder, is_quick: bool) -> Iterator[Finding]:
    """Check a folder behind a URL by what a save does there: upload, list, read, claim a lease, remove."""
    place = folder.child(f".doctor-{uuid.uuid4().hex}")
    num_blocks = PIECE_BLOCKS if is_quick else 4 * PIECE_BLOCKS
    seed = time.time_ns()
    name = "bucket write"
    try:
        num_written, finding = check_upload(place, num_blocks, seed)
        yield finding
        name = "bucket read"
        yield check_download(place, num_written, seed)
        name = "bucket lease"
        yield check_claim(place)
        name = "bucket remove"
        place.remove_all()
        left = place.names()
        fix = "let these credentials delete objects: retention and `checkpoint prune` remove old saves"
        problems = [f"{', '.join(left)} is still there"] if left else []
        yield make_finding(name, problems, fix, detail=f"what was written to {folder.url} was removed again")
    except OSError as error:
        fix = f"check the credentials, and that they may read, write, list and delete in {folder.url}"
        yield Finding(name, Status.FAIL, detail=f"{error.strerror or error}, in {place.url}", fix=fix)
        with contextlib.suppress(OSError):
            place.remove_all()


UPLOADED = "data"
"""Name of the file that is uploaded and read again."""


def check_upload(place: Folder, num_blocks: int, seed: int) -> tuple[int, Finding]:
    """Upload blocks until all are written or the time is up, as a save uploads a shard. Returns how many."""
    blocks = [build_block(seed, index) for index in range(PIECE_BLOCKS)]
    count = 0
    began = time.perf_counter()
    sink = place.sink(UPLOADED, num_blocks * MIB)
    try:
        while count < num_blocks and time.perf_counter() - began < LIMIT_SECONDS:
            sink.write_at(count * MIB, [blocks[count % PIECE_BLOCKS]])
            count += 1
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    rate = count * MIB / (time.perf_counter() - began)
    detail = f"{count} MiB in one upload; 1 G parameters would take {ENOUGH_BYTES / 3 / rate:,.0f} s to save"
    problems = [TOO_SLOW] if rate < SLOW_BYTES_PER_SECOND else []
    fix = "name a bucket near this machine with save_folder; each rank uploads its own part, so ranks add up"
    return count, make_finding("bucket write", problems, fix, Status.WARN, value=rate / 1e6, unit="MB/s", detail=detail)


def check_download(place: Folder, num_blocks: int, seed: int) -> Finding:
    """List the upload and read it again, in ranges, as a restore does."""
    num_bytes = place.sizes().get(UPLOADED)
    if num_bytes != num_blocks * MIB:
        detail = f"the listing shows {num_bytes} bytes right after an upload of {num_blocks * MIB}"
        fix = "do not save here: a save is only there when its listing shows it at once"
        return Finding("bucket read", Status.FAIL, detail=detail, fix=fix)

    blocks = [build_block(seed, index) for index in range(PIECE_BLOCKS)]
    source = place.source(UPLOADED)
    wrong: list[str] = []
    count = 0
    seconds = 0.0
    while count < num_blocks and seconds < LIMIT_SECONDS:
        buffer = bytearray(min(PIECE_BLOCKS, num_blocks - count) * MIB)
        began = time.perf_counter()
        source.read_into(count * MIB, [buffer])
        seconds += time.perf_counter() - began
        for offset in range(0, len(buffer), MIB):
            if buffer[offset : offset + MIB] != blocks[count % PIECE_BLOCKS]:
                wrong.append(f"MiB {count}")
            count += 1
    source.close()

    rate = count * MIB / max(seconds, 1e-9) / 1e6
    if wrong:
        detail = f"{len(wrong)} of {count} MiB are not what was written"
        return make_finding("bucket read", wrong, "do not save here", value=rate, unit="MB/s", detail=detail)
    problems = [TOO_SLOW] if rate * 1e6 < SLOW_BYTES_PER_SECOND else []
    detail = f"{count} MiB, the bytes that were written"
    fix = "name a bucket near this machine with save_folder"
    return make_finding("bucket read", problems, fix, Status.WARN, value=rate, unit="MB/s", detail=detail)


def check_claim(place: Folder) -> Finding:
    """Claim a name twice, as two launches do that want the same lease: the second must be refused."""
    place.put("claim", b"first", only_if_new=True)
    try:
        place.put("claim", b"second", only_if_new=True)
    except FileExistsError:
        return Finding("bucket lease", Status.PASS, detail="a name that is taken cannot be taken again")
    detail = "a name that was taken was taken again: two launches of a run could save at once"
    return Finding("bucket lease", Status.FAIL, detail=detail, fix="name another bucket with save_folder")


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_all(descriptor: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
