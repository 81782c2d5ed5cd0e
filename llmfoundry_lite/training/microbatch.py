"""`device_train_microbatch_size: auto`: the most samples that fit, found without ever running out of memory.

When one rank runs out of memory in the middle of a step, the others wait for it in a collective that never ends. So
nothing is tried that might not fit: one sample is measured, then two, then twice as many as long as every rank expects
from its own measurements that its device has the room. What a step takes grows linearly with the samples, so the last
two measurements tell the rest. The gradient does not depend on the choice; its digits do, as with any microbatch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from llmfoundry_lite import devices
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import GIB
from llmfoundry_lite.ranks.exchange import max_of
from llmfoundry_lite.ranks.memory import return_freed_memory
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.adapter import LanguageModel, PipelinedLanguageModel
from llmfoundry_lite.training.memory import is_out_of_memory
from llmfoundry_lite.training.optimizers import clear_gradients, local

MARGIN = 0.95
"""Of the limit may be planned for: allocators fragment, and other ranks' buffers come and go."""


class Meter(Protocol):
    """Memory of this rank's device."""

    def reset(self) -> None:
        """Begin a measurement."""

    def peak_bytes(self) -> int:
        """The most that was in use since."""
        ...

    def limit_bytes(self) -> int:
        """The most that may be in use, given what other processes take."""
        ...


def choose_microbatch_size(
    model: LanguageModel,
    optimizer: Optimizer,
    device_batch_size: int,
    seq_len: int,
    num_optimizer_slots: Sequence[int],
    meter: Meter | None = None,
    *,
    accumulates: bool = False,
    advise: Callable[[], str] = lambda: "",
    takes: Callable[[int], bool] = lambda num_microbatches: True,
) -> tuple[int, str]:
    """(samples, what was measured in words), the same on every rank. Every rank must call this together.

    `num_optimizer_slots`: numbers that the optimizer keeps for each parameter of each of its groups, the last also for
    those that follow.
    `accumulates`: whole gradients stay on each device until the batch's last microbatch. `advise`: settings that take
    less memory, for the error. `takes`: whether a batch may have so many microbatches.
    Raises ConfigError when not even one sample fits.
    """
    meter = meter or (CudaMeter() if devices.device_type() == "cuda" else ResidentMeter())
    had = meter.limit_bytes()
    sizes = [size for size in range(1, device_batch_size + 1) if takes(-(-device_batch_size // size))]

    def measure(num_samples: int) -> int:
        try:
            count = -(-device_batch_size // num_samples)
            return _measure(model, num_samples, count, seq_len, meter, accumulates and device_batch_size > 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if num_samples == sizes[0]:
                needs = f"more than the {meter.peak_bytes() / GIB:.2f} GiB that it got"
                raise ConfigError(_does_not_fit(seq_len, needs, had, advise)) from None
            raise ConfigError(
                f"device_train_microbatch_size: auto: {num_samples} samples ran out of memory where "
                f"{_expect(peaks, num_samples) / GIB:.2f} of {had / GIB:.2f} GiB were expected (does another process "
                f"use this device?); set it to {num_samples // 2}"
            ) from None

    # Optimizer state and parameters may be kept in the host's memory, which is not what is measured here.
    parameters = 0 if _is_offloaded(model) else _bytes(model.parameters())
    state = 0 if _is_offloaded(model) else _state_bytes(optimizer, num_optimizer_slots)
    reserved = 0 if optimizer.state else state
    size = sizes[0]
    measure(size)  # the first step also allocates what stays: gradients, communication buffers
    _sum_over_all_ranks()
    had = min(had, meter.limit_bytes())  # NCCL's buffers, which are nobody's in torch's books, are there by now
    limit = int(had * MARGIN) - reserved
    # Without a sample there would be parameters, gradients and optimizer state at least.
    held = 2 * parameters + state - reserved
    peaks = {0: held, size: measure(size)}
    while size < sizes[-1]:
        larger = [following for following in sizes if following > size]
        following = max((one for one in larger if one <= 2 * size), default=larger[0])
        if max_of([_expect(peaks, following) > limit])[0]:
            break
        size = following
        peaks[size] = measure(size)
    most = _all_agree(_most_that_fits(peaks, limit, sizes))
    clear_gradients(optimizer)
    if most < 1:
        raise ConfigError(
            _does_not_fit(seq_len, f"{(peaks[sizes[0]] + reserved) / GIB:.2f} GiB", int(had * MARGIN), advise)
        )
    even = math.ceil(device_batch_size / math.ceil(device_batch_size / most))  # no small remainder at the end
    expected = (_expect(peaks, even) + reserved) / GIB
    return even, f"{expected:.2f} of {(limit + reserved) / MARGIN / GIB:.2f} GiB expected at the peak"


def _does_not_fit(seq_len: int, needs: str, had: int, advise: Callable[[], str]) -> str:
    return (
        f"device_train_microbatch_size: auto: one sample of {seq_len} tokens needs {needs}, and this device can give "
        f"{had / GIB:.2f} GiB{advise()}"
    )


def _measure(
    model: LanguageModel, num_samples: int, num_microbatches: int, seq_len: int, meter: Meter, accumulates: bool
) -> int:
    """Of one microbatch, or of all that a batch has where stages keep several."""
    device = _device()
    meter.reset()
    model.train()
    if isinstance(model, PipelinedLanguageModel):
        batch = {"input_ids": torch.zeros((num_microbatches * num_samples, seq_len), dtype=torch.int64, device=device)}
        model.train_on(batch, num_microbatches, num_samples, share=1.0)
        return meter.peak_bytes()
    batch = {"input_ids": torch.zeros((num_samples, seq_len), dtype=torch.int64, device=device)}
    parallel = model.model if accumulates and isinstance(model.model, FSDPModule) else None  # not on one device
    for is_last in (False, True) if parallel else (True,):
        if parallel:
            parallel.set_requires_gradient_sync(is_last)
        model.loss(model(batch), batch).backward()
    return meter.peak_bytes()


def _sum_over_all_ranks() -> None:
    """The collective that a batch has beside the model's own (`gradients.measure`): its buffers take memory too."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=_device()))


def _device() -> torch.device:
    is_cuda = devices.device_type() == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _expect(peaks: dict[int, int], size: int) -> int:
    """Along the line through the last two measurements."""
    if size in peaks:
        return peaks[size]
    *_, (before, lower), (last, peak) = peaks.items()
    return peak + max(0, peak - lower) * (size - last) // (last - before)


def _most_that_fits(peaks: dict[int, int], limit: int, sizes: Sequence[int]) -> int:
    return next((size for size in reversed(sizes) if _expect(peaks, size) <= limit), 0)


def _all_agree(size: int) -> int:
    """The smallest of all ranks."""
    return -max_of([-size])[0]


def _state_bytes(optimizer: Optimizer, num_slots: Sequence[int]) -> int:
    groups = itertools.zip_longest(optimizer.param_groups, num_slots[: len(optimizer.param_groups)])
    return sum(_bytes(group["params"]) * (num_slots[-1] if slots is None else slots) for group, slots in groups)


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Of this rank's parts."""
    return sum(local(p).numel() * p.element_size() for p in parameters)


def _is_offloaded(model: LanguageModel) -> bool:
    return devices.device_type() == "cuda" and next(model.parameters()).device.type == "cpu"


class CudaMeter:
    """What torch's allocator has taken from the device, fragments included."""

    def reset(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def limit_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()


class ResidentMeter:
    """Memory of a process on a CPU; what is free is shared evenly by the ranks of this machine."""

    def __init__(self, num_local_ranks: int | None = None):
        self.num_local_ranks = num_local_ranks or this_rank().local_world_size

    def reset(self) -> None:
        return_freed_memory()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak becomes what is resident now, says proc(5)

    def peak_bytes(self) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))

    def limit_bytes(self) -> int:
        return psutil.Process().memory_info().rss + devices.available_memory_bytes() // self.num_local_ranks
