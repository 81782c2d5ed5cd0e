"""Staging: the copies of a rank's chunks in host memory, from which a save is written while training goes on.

`Staging` allocates the memory at the first save and uses it again. `chunk_values` finds the values of each chunk in the
state. `save` decides when to copy, and writes the file.
"""

import contextlib
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from llmfoundry_lite.checkpoint.grid import Chunk
from llmfoundry_lite.checkpoint.local_folder import DIRECT_BYTES
from llmfoundry_lite.checkpoint.planning import SavePlan, boxes_of
from llmfoundry_lite.checkpoint.state import DTYPES, State, Tensors, local_tensor
from llmfoundry_lite.checkpoint.state_digest import sum_keyed

PINNED = "cuda"
"""Type of the devices that copy to pinned host memory without a wait."""


class Staging:
    """Host memory that holds one rank's chunks while they are written. A save copies into it, one save at a time."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self.content = torch.empty(0, dtype=torch.uint8)
        """The memory of all chunks, in the order of the file: what the file holds after its header."""
        self._plan: SavePlan | None = None
        """The plan that `content` was allocated for."""
        self._chunks: Tensors = {}
        """A view of `content` for each chunk, by key, in the order of the file."""

    def copy_state(self, plan: SavePlan, current_state: State) -> None:
        """Copy this rank's chunks into host memory, and wait until the device has copied them.

        When this returns, training may go on to change the tensors. The memory of the previous save is used again if
        the plan is the same. Nothing may still write from it.
        """
        if plan is not self._plan:
            has_device_tensors = any(tensor.device.type == PINNED for tensor in current_state.tensors.values())
            self._allocate(plan, pinned=has_device_tensors)

        # Start all copies, and then wait once for all of them.
        has_async_copies = False
        with torch.no_grad():
            values_of_chunks = chunk_values(plan, current_state)
            for (_, values), staged_chunk in zip(values_of_chunks, self._chunks.values(), strict=True):
                has_async_copies |= values.device.type != "cpu"
                staged_chunk.copy_(values, non_blocking=True)
        if has_async_copies:
            torch.cuda.synchronize()

    def _allocate(self, plan: SavePlan, *, pinned: bool) -> None:
        """Allocate host memory for this rank's chunks: one block, `content`, with a view for each chunk.

        Sets `content`, `_chunks` and `_plan`. Chunks lie in the order of the file and without gaps, so that `content`
        is what the file has after its header. With `pinned`, a device copies there without a wait.
        """
        chunks = plan.chunks_to_write
        chunk_sizes = [chunk.num_bytes for chunk in chunks.values()]
        num_bytes = sum(chunk_sizes)
        self._chunks = {}
        if num_bytes != self.content.numel():
            self.content = torch.empty(0, dtype=torch.uint8)  # frees the old memory before more is allocated
            self.content = aligned_memory(num_bytes, pinned)

        byte_views = self.content.split(chunk_sizes)
        for (key, chunk), byte_view in zip(chunks.items(), byte_views, strict=True):
            self._chunks[key] = byte_view.view(DTYPES[chunk.dtype]).view(chunk.shape)
        self._plan = plan

    def check_and_sum(self, plan: SavePlan) -> tuple[list[str], int]:
        """Read the copied chunks once, to look for values that are NaN or infinite and to sum the state digest.

        Returns the keys of chunks that have such a value, and this rank's part of the state digest: the sum over its
        chunks modulo 2^64. Both look at a chunk part by part, so that each part enters the processor's cache only once.
        """
        non_finite_keys: list[str] = []
        state_sum = 0
        for key, chunk in plan.chunks_to_write.items():

            def check_part(part: torch.Tensor, key: str = key) -> None:
                """Note the chunk's key if this part of it has a value that is not finite."""
                if key not in non_finite_keys and not _is_finite(part):
                    non_finite_keys.append(key)

            # `sum_keyed` calls `check_part` for each part just before it sums the part.
            whole_shape = plan.tensors[chunk.tensor].shape
            state_sum += sum_keyed(chunk.tensor, self._chunks[key], chunk.offset, whole_shape, check_part)
        return non_finite_keys, state_sum % (1 << 64)


def chunk_values(plan: SavePlan, current_state: State) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield each chunk that this rank writes, in the order of its file, with the part of a local tensor that holds the
    chunk's values. The values are views, not copies."""
    for chunk in plan.chunks_to_write.values():
        tensor = current_state.tensors[chunk.tensor]
        values = local_tensor(tensor)
        if chunk.tensor in current_state.row_orders:
            # This rank holds the tensor's rows in another order, so that several chunks lie in its local tensor.
            boxes = boxes_of(tensor, current_state.row_orders[chunk.tensor])
            boxes_of_chunk = [box for box in boxes if box.offset == chunk.offset]
            values = values.narrow(0, boxes_of_chunk[0].first_row, chunk.shape[0])
        yield chunk, values


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value of a CPU tensor is NaN or infinite. Whole numbers are always finite."""
    if not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # torch cannot sum float8
        tensor = tensor.float()
    # If the sum is finite, so are all values. This takes half the time of `aminmax`, and needs no copy as `isfinite`
    # does.
    if math.isfinite(float(tensor.sum())):
        return True
    # The sum of finite values may have overflowed. Minimum and maximum are NaN if any value is.
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def aligned_memory(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Allocate uint8 host memory, aligned so that a disk takes its bytes without a copy (see `LocalSink`).

    With `pinned`, a device copies to it without a wait. torch's own pinned memory is not used, because it is rounded up
    to a power of two and never given back. This is pageable memory of exactly the size asked for, which the driver pins
    until it is freed. If the driver refuses, copies to it wait, and nothing else changes.

    Raises MemoryError if there is no memory to pin.
    """
    if pinned and num_bytes:
        # Memory-mapped pages are aligned. The tensor keeps them alive, and they are unpinned when it is freed.
        try:
            pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of host memory to copy a save to: {error.strerror}") from None
        pages.madvise(mmap.MADV_DONTFORK)  # after a fork, the device could write to pages of the child process
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        pages.pin(memory.data_ptr())
        return memory

    # Allocate more than is needed, and begin at the first aligned address.
    memory = torch.empty(num_bytes + DIRECT_BYTES, dtype=torch.uint8)
    first_aligned_byte = -memory.data_ptr() % DIRECT_BYTES
    return memory[first_aligned_byte : first_aligned_byte + num_bytes]


class _PinnedPages(mmap.mmap):
    """Whole pages of memory that the CUDA driver pins, if it can, until they are freed. On ROCm, torch gives HIP's
    functions the names of CUDA's."""

    unpin: Callable[[], Any] | None = None
    """Set by `pin` if the driver has pinned the pages."""

    def pin(self, address: int) -> None:
        """Ask the driver to pin the pages, which begin at `address`. Sets `unpin` if it has; otherwise they stay
        pageable."""
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(self), 0)) == 0:
            self.unpin = partial(runtime.cudaHostUnregister, address)
            return
        # The failed call leaves an error that the next kernel would report as its own. This kernel clears it.
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device=PINNED)

    def __del__(self) -> None:
        """Unpin the pages, unless the interpreter is shutting down and the driver may be gone."""
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous CPU tensor as a uint8 array, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
