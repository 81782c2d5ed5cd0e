"""Checks of the folder for checkpoints: its clocks, free space, rates of writing and reading, and fsync.

A folder on this machine is checked by `check_disk`. A folder behind a URL is checked by `check_bucket`: it uploads,
reads, lists and removes files as a save does, in a folder of its own that it removes again.

`check_clock` compares this machine's clock with the file server's, because files of several machines are read together
and ordered by their dates. (`collectives.py` compares the ranks' clocks.) No lease of a run depends on a wall clock.
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

CHECKPOINT_BYTES = 12e9
"""A checkpoint of 1 G parameters, at 12 bytes each: fp32 weights and two moments."""
MIN_FREE_BYTES = 3 * CHECKPOINT_BYTES
MIN_BYTES_PER_SECOND = 100e6
"""Below this rate, a checkpoint of 1 G parameters takes longer than two minutes."""
TOO_SLOW = f"{MIN_BYTES_PER_SECOND / 1e6:.0f} MB/s is the least"
MAX_FSYNC_SECONDS = 0.1
"""A save syncs each file and folder that it makes; a turning disk needs 0.02 s."""
NUM_FSYNCS = 50
"""Number of timed fsyncs, if the time limit allows them."""
BLOCKS_PER_PIECE = 32
"""Number of blocks of 1 MiB that are written before each sync, or read in one request from a bucket."""
LIMIT_SECONDS = 10.0
"""Time limit of writing, and of reading. A piece that has begun is finished."""
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs", "wekafs"),
    *("pvfs2", "afs", "daos", "panfs"),
)
MAX_SERVER_SECONDS = 2.0
"""Largest difference to a file server's clock. FAT, the coarsest file system, stores times in steps of two seconds."""
STA_UNSYNC = 0x40
"""Bit of the kernel's clock status (adjtimex(2)): nothing keeps the clock right."""

CLOCK_FIX = "timedatectl set-ntp true, or start chronyd (in a container or virtual machine: on its host)"
FASTER_FOLDER_FIX = "name a faster folder with save_folder: a local NVMe disk, or a parallel file system"
NEARER_BUCKET_FIX = "name a bucket near this machine with save_folder"


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds the folder, such as ext4 or nfs4."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not mounts:
        return "unknown file system"
    # The innermost mount has the longest path. If several have it, the last one hides the others.
    innermost = max(reversed(mounts), key=lambda mount: len(mount.mountpoint))
    return innermost.fstype


def is_shared(folder: Path) -> bool:
    """Return whether another machine keeps the folder's files, and sets their times."""
    type_name = file_system(folder)
    return type_name.startswith("fuse.") or type_name in NETWORK_FILE_SYSTEMS


# ---------------------------------------------------------------------------------------------------------- clocks


def check_clock(options: CheckOptions) -> Iterator[Finding]:
    """Check that something keeps this machine's clock right, and that it agrees with the folder's file server."""
    status = kernel_clock_status()
    if status is None:
        yield Finding("clock", Status.SKIP, detail="the kernel does not say whether it is kept right")
    else:
        is_unsynchronised = bool(status & STA_UNSYNC)
        yield make_finding(
            "clock",
            ["the kernel says that nothing keeps the clock right"] if is_unsynchronised else [],
            CLOCK_FIX,
            Status.WARN,
            value="not synchronised" if is_unsynchronised else "synchronised",
            pass_detail="by the kernel's own account",
        )
    yield check_server_clock(options.folder)


def kernel_clock_status() -> int | None:
    """Return the bits of `status` from adjtimex(2), or None if the kernel does not tell. This does not set the clock.

    The call fills a struct timex, which on 64-bit Linux begins with: unsigned modes; long offset, freq, maxerror,
    esterror; int status. Zero `modes` means to read only.
    """
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return None
    timex = ctypes.create_string_buffer(512)
    if adjtimex(timex) < 0:
        return None
    _, _, _, _, _, status = struct.unpack_from("@iqqqqi", timex.raw)
    return status


def check_server_clock(folder: Path | str) -> Finding:
    """Compare the time that the file server gives a new file with this machine's clock; skipped for local folders.

    The value is the file server's clock minus the local one, in ms. It is 0 if the file's time lies between the local
    times before and after writing.
    """
    check = "clock of the folder"
    if isinstance(folder, str):
        return Finding(check, Status.SKIP, detail=f"nothing was compared: no clock counts for saves in {folder}")
    if not is_shared(folder):
        detail = f"nothing was compared: {folder.resolve()} gets its times from this machine's own clock"
        return Finding(check, Status.SKIP, detail=detail)

    time_before = time.time()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"now")
        file.flush()
        os.fsync(file.fileno())
        file_time = os.fstat(file.fileno()).st_mtime
    time_after = time.time()

    difference_seconds = 0.0
    if file_time < time_before:
        difference_seconds = file_time - time_before
    elif file_time > time_after:
        difference_seconds = file_time - time_after

    is_apart = abs(difference_seconds) > MAX_SERVER_SECONDS
    return make_finding(
        check,
        [f"expected at most {MAX_SERVER_SECONDS:.0f} s"] if is_apart else [],
        f"synchronise this machine and the file server: {CLOCK_FIX}",
        Status.WARN,
        value=difference_seconds * 1e3,
        unit="ms",
        detail=f"the file server's time of a new file in {folder.resolve()} against the local clock",
    )


# ------------------------------------------------------------------------------------------------------------ disk


def check_disk(options: CheckOptions) -> Iterator[Finding]:
    """Check free space, writing, reading and fsync in the folder for checkpoints; or the bucket behind a URL.

    Writes up to 512 MiB, or 32 MiB if quick, but at most a tenth of the free space. Reading begins only after writing
    has succeeded; an OSError ends the check with a failed "disk write".
    """
    folder = options.folder
    if isinstance(folder, str):
        yield from check_bucket(open_folder(folder), options.quick)
        return
    if not folder.is_dir():
        fix = f"mkdir -p {folder}, or name another one with --folder"
        yield Finding("disk", Status.FAIL, detail=f"{folder} is not a folder", fix=fix)
        return

    usage = os.statvfs(folder)
    free_bytes = usage.f_bavail * usage.f_frsize
    yield check_free_space(folder, free_bytes)

    num_pieces = 1 if options.quick else 16
    tenth_of_free_blocks = free_bytes // 10 // MIB
    num_blocks = max(1, min(num_pieces * BLOCKS_PER_PIECE, tenth_of_free_blocks))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # has no name, so nothing stays behind after a crash
            seed = time.time_ns()
            num_written, finding = check_write(file.fileno(), num_blocks, seed)
            yield finding
            yield check_read(file.fileno(), num_written, seed)
            yield check_fsync(file.fileno(), 1 if options.quick else 5)
    except OSError as error:
        fix = f"look at dmesg and at the mount of {folder}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free space in {folder} (`llmfoundry-lite checkpoint prune`), or name another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"make {folder} writable for this user, or name another folder"
        detail = f"{error.strerror}, writing up to {num_blocks} MiB in {folder}"
        yield Finding("disk write", Status.FAIL, detail=detail, fix=fix)


def check_free_space(folder: Path, free_bytes: int) -> Finding:
    """Warn if three checkpoints do not fit into the folder, and if its files are in memory."""
    type_name = file_system(folder)
    problems = []
    fixes = []
    if free_bytes < MIN_FREE_BYTES:
        problems.append(f"three checkpoints of 1 G parameters take {MIN_FREE_BYTES / 1e9:.0f} GB")
        fixes.append("free space, or keep fewer checkpoints (save_num_checkpoints_to_keep)")
    if type_name in MEMORY_FILE_SYSTEMS:
        problems.append("it is memory, and gone after a restart")
        fixes.append("name a folder on a disk with --folder")

    return make_finding(
        "disk free",
        problems,
        "; ".join(fixes),
        Status.WARN,
        value=free_bytes / GIB,
        unit="GiB",
        detail=f"{folder.resolve()} ({type_name})",
    )


def build_block(seed: int, index: int) -> bytes:
    """Return 1 MiB of random bytes, which do not compress.

    They depend on the seed of this check and the block's index, so that neither an old file's bytes nor another block's
    are taken for right.
    """
    return np.random.default_rng((seed, index)).bytes(MIB)


def make_rate_finding(check: str, bytes_per_second: float, detail: str, fix: str) -> Finding:
    """Build the finding of a rate of writing or reading: a warning if it is below MIN_BYTES_PER_SECOND."""
    problems = [TOO_SLOW] if bytes_per_second < MIN_BYTES_PER_SECOND else []
    value = bytes_per_second / 1e6
    return make_finding(check, problems, fix, Status.WARN, value=value, unit="MB/s", detail=detail)


def check_write(descriptor: int, num_blocks: int, seed: int) -> tuple[int, Finding]:
    """Time writing blocks with a sync after each piece, as a checkpoint's shards are written.

    Stops at LIMIT_SECONDS. Returns the number of blocks written, and the finding.
    """
    num_written = 0
    seconds = 0.0
    while num_written < num_blocks and seconds < LIMIT_SECONDS:
        piece_end = min(num_written + BLOCKS_PER_PIECE, num_blocks)
        blocks = [build_block(seed, index) for index in range(num_written, piece_end)]
        began = time.perf_counter()
        for block in blocks:
            write_all(descriptor, block)
        os.fsync(descriptor)
        seconds += time.perf_counter() - began
        num_written = piece_end

    rate = num_written * MIB / seconds
    detail = f"{num_written} MiB with fsync; 1 G parameters would take {CHECKPOINT_BYTES / rate:,.0f} s to save"
    return num_written, make_rate_finding("disk write", rate, detail, FASTER_FOLDER_FIX)


def check_read(descriptor: int, num_blocks: int, seed: int) -> Finding:
    """Time reading the blocks that `check_write` has written, and compare every byte. Stops at LIMIT_SECONDS.

    The kernel is asked to drop its cached copy first, so that the bytes come from the disk if it does.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    problems = []
    num_read = 0
    seconds = 0.0
    while num_read < num_blocks and seconds < LIMIT_SECONDS:
        began = time.perf_counter()
        block = read_all(descriptor, MIB)
        seconds += time.perf_counter() - began

        if len(block) < MIB:
            problems.append(f"the file ends after {num_read} of {num_blocks} MiB")
            break
        expected_block = build_block(seed, num_read)
        if block != expected_block:
            is_different = np.frombuffer(block, np.uint8) != np.frombuffer(expected_block, np.uint8)
            first_byte = num_read * MIB + int(is_different.argmax())
            problems.append(f"MiB {num_read} from byte {first_byte:,} on")
        num_read += 1

    rate = num_read * MIB / max(seconds, 1e-9)
    if problems:
        detail = f"{len(problems)} of {num_read} MiB are not what was written"
        fix = "do not save here; look at dmesg, SMART and the file server's log"
        return make_finding("disk read", problems, fix, value=rate / 1e6, unit="MB/s", detail=detail)
    detail = f"{num_read} MiB, the bytes that were written"
    fix = f"{FASTER_FOLDER_FIX}; a run reads its data and its checkpoints"
    return make_rate_finding("disk read", rate, detail, fix)


def check_fsync(descriptor: int, limit_seconds: float) -> Finding:
    """Time the fsync of 4 KiB that overwrite the file's beginning, up to NUM_FSYNCS times; warn if the median is
    slow."""
    fsync_seconds: list[float] = []
    deadline = time.perf_counter() + limit_seconds
    while len(fsync_seconds) < NUM_FSYNCS and time.perf_counter() < deadline:
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, bytes(4096))
        began = time.perf_counter()
        os.fsync(descriptor)
        fsync_seconds.append(time.perf_counter() - began)

    median_seconds = statistics.median(fsync_seconds)
    slowest_ms = max(fsync_seconds) * 1e3
    is_slow = median_seconds > MAX_FSYNC_SECONDS
    return make_finding(
        "disk fsync",
        [f"{MAX_FSYNC_SECONDS * 1e3:.0f} ms is the most"] if is_slow else [],
        FASTER_FOLDER_FIX,
        Status.WARN,
        value=median_seconds * 1e3,
        unit="ms",
        detail=f"of 4 KiB, median of {len(fsync_seconds)}; the slowest took {slowest_ms:,.1f} ms",
    )


# ---------------------------------------------------------------------------------------------------------- bucket


def check_bucket(folder: Folder, is_quick: bool) -> Iterator[Finding]:
    """Check a folder behind a URL by doing what a save does there: upload, list, read, claim a lease, remove.

    All files are written into a new folder in it, which is removed at the end. An OSError ends the check with a failed
    finding of the step in which it was raised.
    """
    test_folder = folder.child(f".doctor-{uuid.uuid4().hex}")
    num_blocks = BLOCKS_PER_PIECE if is_quick else 4 * BLOCKS_PER_PIECE
    seed = time.time_ns()
    step = "bucket write"
    try:
        num_written, finding = check_upload(test_folder, num_blocks, seed)
        yield finding

        step = "bucket read"
        yield check_download(test_folder, num_written, seed)

        step = "bucket lease"
        yield check_claim(test_folder)

        step = "bucket remove"
        test_folder.remove_all()
        remaining_files = test_folder.names()
        problems = [f"{', '.join(remaining_files)} is still there"] if remaining_files else []
        fix = "let these credentials delete objects: retention and `checkpoint prune` remove old saves"
        yield make_finding(step, problems, fix, detail=f"what was written to {folder.url} was removed again")
    except OSError as error:
        fix = f"check the credentials, and that they may read, write, list and delete in {folder.url}"
        detail = f"{error.strerror or error}, in {test_folder.url}"
        yield Finding(step, Status.FAIL, detail=detail, fix=fix)
        with contextlib.suppress(OSError):
            test_folder.remove_all()


UPLOADED_FILE = "data"
"""Name of the file that is uploaded and read again."""


def check_upload(test_folder: Folder, num_blocks: int, seed: int) -> tuple[int, Finding]:
    """Time the upload of one file of up to `num_blocks` blocks, as a save uploads a shard. Stops at LIMIT_SECONDS.

    Block i of the file is block i modulo BLOCKS_PER_PIECE of the seed, since generating all of them would take longer
    than a fast upload. Returns the number of blocks uploaded, and the finding.
    """
    blocks = [build_block(seed, index) for index in range(BLOCKS_PER_PIECE)]
    num_written = 0
    began = time.perf_counter()
    sink = test_folder.sink(UPLOADED_FILE, num_blocks * MIB)
    try:
        while num_written < num_blocks and time.perf_counter() - began < LIMIT_SECONDS:
            block = blocks[num_written % BLOCKS_PER_PIECE]
            sink.write_at(num_written * MIB, [block])
            num_written += 1
        sink.close()
    except BaseException:
        sink.abandon()
        raise

    rate = num_written * MIB / (time.perf_counter() - began)
    detail = f"{num_written} MiB in one upload; 1 G parameters would take {CHECKPOINT_BYTES / rate:,.0f} s to save"
    fix = f"{NEARER_BUCKET_FIX}; each rank uploads its own part, so ranks add up"
    return num_written, make_rate_finding("bucket write", rate, detail, fix)


def check_download(test_folder: Folder, num_blocks: int, seed: int) -> Finding:
    """Look the upload up in the folder's listing, and time reading it in ranges, as a restore does.

    Every byte is compared with what `check_upload` wrote. Stops at LIMIT_SECONDS.
    """
    listed_bytes = test_folder.sizes().get(UPLOADED_FILE)
    if listed_bytes != num_blocks * MIB:
        detail = f"the listing shows {listed_bytes} bytes right after an upload of {num_blocks * MIB}"
        fix = "do not save here: a save is only there when its listing shows it at once"
        return Finding("bucket read", Status.FAIL, detail=detail, fix=fix)

    blocks = [build_block(seed, index) for index in range(BLOCKS_PER_PIECE)]
    source = test_folder.source(UPLOADED_FILE)
    problems: list[str] = []
    num_read = 0
    seconds = 0.0
    while num_read < num_blocks and seconds < LIMIT_SECONDS:
        num_blocks_in_range = min(BLOCKS_PER_PIECE, num_blocks - num_read)
        buffer = bytearray(num_blocks_in_range * MIB)
        began = time.perf_counter()
        source.read_into(num_read * MIB, [buffer])
        seconds += time.perf_counter() - began
        for offset in range(0, len(buffer), MIB):
            if buffer[offset : offset + MIB] != blocks[num_read % BLOCKS_PER_PIECE]:
                problems.append(f"MiB {num_read}")
            num_read += 1
    source.close()

    rate = num_read * MIB / max(seconds, 1e-9)
    if problems:
        detail = f"{len(problems)} of {num_read} MiB are not what was written"
        return make_finding("bucket read", problems, "do not save here", value=rate / 1e6, unit="MB/s", detail=detail)
    detail = f"{num_read} MiB, the bytes that were written"
    return make_rate_finding("bucket read", rate, detail, NEARER_BUCKET_FIX)


def check_claim(test_folder: Folder) -> Finding:
    """Create the same file twice, as two launches that want the same lease do. The second attempt must be refused."""
    test_folder.put("claim", b"first", only_if_new=True)
    try:
        test_folder.put("claim", b"second", only_if_new=True)
    except FileExistsError:
        return Finding("bucket lease", Status.PASS, detail="a name that is taken cannot be taken again")
    detail = "a name that was taken was taken again: two launches of a run could save at once"
    return Finding("bucket lease", Status.FAIL, detail=detail, fix="name another bucket with save_folder")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; os.write may write fewer than it is given."""
    remaining = memoryview(data)
    while remaining:
        num_written = os.write(descriptor, remaining)
        remaining = remaining[num_written:]


def read_all(descriptor: int, num_bytes: int) -> bytes:
    """Read `num_bytes`, or fewer at the file's end; os.read may return fewer than it is asked for."""
    parts = []
    while num_bytes:
        part = os.read(descriptor, num_bytes)
        if not part:
            break
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
