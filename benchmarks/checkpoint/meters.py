"""Meters of the checkpoint benchmark: a clock for all ranks, the page cache, memory, and the machine's limits.

Everything here except `available_bytes` runs in a rank. `timed`, `slowest`, `Limits.measure` and `drop_from_cache` are
collective. Linux only, because posix_fadvise, mincore and /proc/self are used.
"""

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from llmfoundry_lite.checkpoint.staging import as_bytes
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.files import sync
from llmfoundry_lite.ranks import exchange

CHUNK_BYTES = 8 << 20
"""Bytes of one write or read call when the limits are measured."""


def timed(work: Callable[[], Any], needs_bytes: int) -> float:
    """Call `work` on all ranks at the same time, and return the seconds of the slowest rank. Collective.

    `needs_bytes` is the memory that `work` will allocate on this rank; see `warm_up`.
    """
    warm_up(needs_bytes)
    dist.barrier()
    started = time.perf_counter()
    work()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' seconds, to the microsecond. Collective."""
    return exchange.all_reduce_max([int(seconds * 1e6)])[0] / 1e6


def warm_up(num_bytes: int) -> None:
    """Touch and free the memory that a measurement will take, before its clock starts.

    A virtual machine returns free memory to its host, and getting it back takes longer than anything measured here.
    `num_bytes` is limited to this rank's share of half of the available memory.
    """
    num_bytes = min(num_bytes, available_bytes() // 2 // dist.get_world_size())
    if not num_bytes:
        return

    # One byte in each page is enough to make the kernel provide the page.
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            memory[page] = 1


def available_bytes() -> int:
    """Return the bytes of memory that programs can still take on this machine."""
    return psutil.virtual_memory().available


class Limits:
    """Measures how fast this machine can copy, write and read the bytes of the local state.

    All ranks work at the same time, each on one file of its own below `folder`. A checkpoint cannot be faster than
    that.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path):
        """`tensors` are this rank's part of the state. On a GPU, they are copied into pinned memory."""
        self.tensors = tensors
        is_cuda = device_type() == "cuda"
        self.buffer = torch.zeros(sum(t.nbytes for t in tensors), dtype=torch.uint8, pin_memory=is_cuda)
        self.folder = folder / f"limits-{dist.get_rank()}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self) -> dict[str, float]:
        """Return `copy_seconds`, `write_seconds` and `read_seconds` of the slowest rank. Collective.

        The best of three copies counts, and the memory copied into has been touched before. The read starts with a cold
        page cache. The file is removed afterwards.
        """
        path = self.folder / "bytes"
        seconds = {"copy_seconds": min(timed(self._copy, 0) for _ in range(3))}
        seconds["write_seconds"] = timed(lambda: self._write(path), self.buffer.numel())
        drop_from_cache(self.folder)
        seconds["read_seconds"] = timed(lambda: self._read(path), self.buffer.numel())
        path.unlink()
        sync(self.folder)
        return seconds

    def _copy(self) -> None:
        """Copy all tensors into the buffer, one behind the other, and wait until a GPU has done so."""
        begin = 0
        for tensor in self.tensors:
            target = self.buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            begin += tensor.nbytes
        if device_type() == "cuda":
            torch.cuda.synchronize()

    def _write(self, path: Path) -> None:
        """Write the buffer into a file in chunks, without Python's buffering, and fsync it."""
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.write(content[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        """Read the file back into the buffer in chunks, without Python's buffering."""
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("rb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.readinto(content[begin : begin + CHUNK_BYTES])


def drop_from_cache(folder: Path) -> float:
    """Drop a folder's files from the page cache, and return the share of their pages that stayed, from 0 to 1.
    Collective.

    The files must have been synced, because the kernel does not drop dirty pages. The share is the largest of all
    ranks.
    """
    dist.barrier()

    # Every rank drops all files, because more than one node may have them in its cache.
    num_resident = num_pages = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            resident = resident_pages(path)
            num_resident += sum(resident)
            num_pages += len(resident)
    return exchange.all_reduce_max([num_resident * 1_000_000 // max(num_pages, 1)])[0] / 1e6


def resident_pages(path: Path) -> bytes:
    """Return one byte for each page of a file: 1 if the page is in the page cache, otherwise 0.

    Uses mincore(2), which Python does not offer, on a mapping of the file. Raises OSError. The file must not be empty.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        residency = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), residency)
        del first  # a mapping cannot be closed while an object refers to its memory
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        # Only the lowest bit of each byte is defined.
        return bytes(byte & 1 for byte in residency.raw)


class Memory:
    """Meter of the peak memory that one saver needs on this rank, beyond what the rank held before its first save.

    `kept_bytes` is what the saver has allocated in earlier saves and not freed, such as staging buffers. `extra_bytes`
    is the result: the peak of the last save, including what was kept before it.
    """

    def __init__(self, local_bytes: int) -> None:
        """`local_bytes` is the size of this rank's part of the state."""
        self.local_bytes = local_bytes
        self.kept_bytes = 0
        self.extra_bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the block's peak memory. Sets `extra_bytes`, and adds to `kept_bytes` what the block did not free."""
        gc.collect()
        # Return freed memory to the system. Otherwise the block could allocate it again without a visible growth.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark VmHWM, see proc(5)
        before = _status_bytes("VmRSS")

        yield

        self.extra_bytes = self.kept_bytes + _status_bytes("VmHWM") - before
        self.kept_bytes += _status_bytes("VmRSS") - before


def _status_bytes(field: str) -> int:
    """Return the bytes of a field of /proc/self/status, which counts in KiB, such as VmRSS."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
