"""Meters of the checkpoint benchmark: a clock for all ranks, the page cache, memory, the machine's limits.

Everything here but `available_bytes` runs in a rank.
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

from llmfoundry_lite.checkpoint.save import as_bytes
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.files import sync
from llmfoundry_lite.ranks import exchange

CHUNK_BYTES = 8 << 20


def timed(work: Callable[[], Any], needs_bytes: int) -> float:
    """Do the work on all ranks at once; return the seconds of the slowest."""
    warm_up(needs_bytes)
    dist.barrier()
    started = time.perf_counter()
    work()
    return slowest(time.perf_counter() - started)


def slowest(seconds: float) -> float:
    return exchange.all_reduce_max([int(seconds * 1e6)])[0] / 1e6


def warm_up(num_bytes: int) -> None:
    """Touch and free as much memory as a measurement will take, before its clock starts.

    A virtual machine gives free memory back to its host, and getting it again takes longer than anything measured here.
    """
    num_bytes = min(num_bytes, available_bytes() // 2 // dist.get_world_size())
    if not num_bytes:
        return
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            memory[page] = 1


def available_bytes() -> int:
    return psutil.virtual_memory().available


class Limits:
    """Measure what this machine does with the bytes of the local state, all ranks at once, one file each."""

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path):
        self.tensors = tensors
        is_cuda = device_type() == "cuda"
        self.buffer = torch.zeros(sum(t.nbytes for t in tensors), dtype=torch.uint8, pin_memory=is_cuda)
        self.folder = folder / f"limits-{dist.get_rank()}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self) -> dict[str, float]:
        """Return seconds. Memory that is copied into has been touched before; the best of three copies counts."""
        path = self.folder / "bytes"
        found = {"copy_seconds": min(timed(self._copy, 0) for _ in range(3))}
        found["write_seconds"] = timed(lambda: self._write(path), self.buffer.numel())
        drop_from_cache(self.folder)
        found["read_seconds"] = timed(lambda: self._read(path), self.buffer.numel())
        path.unlink()
        sync(self.folder)
        return found

    def _copy(self) -> None:
        begin = 0
        for tensor in self.tensors:
            target = self.buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
            begin += tensor.nbytes
        if device_type() == "cuda":
            torch.cuda.synchronize()

    def _write(self, path: Path) -> None:
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("wb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.write(content[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        content: Any = memoryview(as_bytes(self.buffer))  # pyright: ignore[reportArgumentType]
        with path.open("rb", buffering=0) as file:
            for begin in range(0, len(content), CHUNK_BYTES):
                file.readinto(content[begin : begin + CHUNK_BYTES])


def drop_from_cache(folder: Path) -> float:
    """Drop synced files from the page cache; return the share of their pages that it kept nevertheless."""
    dist.barrier()
    kept = pages = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            resident = resident_pages(path)
            kept, pages = kept + sum(resident), pages + len(resident)
    return exchange.all_reduce_max([kept * 1_000_000 // max(pages, 1)])[0] / 1e6


def resident_pages(path: Path) -> bytes:
    """Return a byte for each page of a file, 1 if it is in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        found = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), found)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return bytes(byte & 1 for byte in found.raw)


class Memory:
    """Peak memory of a side beyond what the rank held before the side's first save."""

    def __init__(self, local_bytes: int) -> None:
        self.local_bytes = local_bytes
        self.kept_bytes = 0
        self.extra_bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what others have freed would hide what is allocated now
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew (proc(5))
        before = _status_bytes("VmRSS")
        yield
        self.extra_bytes = self.kept_bytes + _status_bytes("VmHWM") - before
        self.kept_bytes += _status_bytes("VmRSS") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10
