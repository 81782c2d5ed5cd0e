"""Memory of a rank's device: `device_train_microbatch_size: auto`, and the message after running out of memory.

If one rank runs out of memory during a step, the others wait in a collective for ever. So the search tries no size
that might not fit. It measures one sample, then doubles while every rank predicts that the next size fits: memory grows
linearly with the samples, so two measurements predict the rest. The choice changes only the gradient's last digits.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import divisors, layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError, OutOfMemoryError
from llmfoundry_lite.estimate.memory import (
    advise_less_memory,
    estimate_training_memory,
    optimizer_slots,
    with_cpu_attention,
)
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_lite.ranks.exchange import all_reduce_max
from llmfoundry_lite.ranks.rank import return_freed_memory, this_rank
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.optimizers import clear_gradients, local

MARGIN = 0.95
"""Fraction of the limit to fill: allocators fragment, and other ranks' buffers vary."""


def choose_microbatch(config: TrainConfig, model: LanguageModel, optimizer: Optimizer) -> int:
    """Return the samples of a microbatch. Call it when model and optimizer state are in place; every rank must. Raises
    ConfigError when not even one sample fits."""
    layout, is_main, is_cpu = layout_here(config), dist.get_rank() == 0, devices.device_type() == "cpu"
    device_batch_size = config.global_train_batch_size // layout.num_data_ranks
    size = config.first_microbatch_size(device_batch_size)
    if config.device_train_microbatch_size == "auto":
        sizes = range(1, device_batch_size + 1)
        if config.exact_sums:
            sizes = divisors(device_batch_size)
        if layout.pipeline > 1:
            sizes = [n for n in sizes if config.pipeline.takes_microbatches(-(-device_batch_size // n))]
        advise = partial(advise_less_memory, config, layout, devices.device_type())
        search = Search(
            model, optimizer, device_batch_size, sizes, config.max_seq_len, not config.reduces_every_microbatch, advise
        )
        size, measured = search.run(optimizer_slots(config))
        if config.compile_config is not None or model.attn_impl == "flex":
            torch._dynamo.reset()  # sizes compiled in the search count towards its limit, and make sizes dynamic
        if is_main:
            print(f"device_train_microbatch_size: auto is {size}: {measured}", flush=True)
    elif config.device_train_microbatch_size is None and is_main and layout.pipeline == 1 and not is_cpu:
        print(  # LLM Foundry measures on GPUs; Composer cannot on a CPU
            f"device_train_microbatch_size: not given, so each device computes its {size} samples at once; auto, "
            "LLM Foundry's default, computes as many at a time as fit",
            flush=True,
        )
    return size


@dataclass
class Search:
    """Finds the most samples that fit. Every rank must call its methods together."""

    model: LanguageModel
    optimizer: Optimizer
    device_batch_size: int
    sizes: Sequence[int]
    """Sizes that a microbatch may have, in order."""
    seq_len: int
    accumulates: bool = False
    """Whole gradients stay on each device until the batch's last microbatch."""
    advise: Callable[[], str] = lambda: ""
    """Settings that take less memory, for the error."""

    def run(self, num_optimizer_slots: Sequence[int]) -> tuple[int, str]:
        """Return samples, and what was measured in words; the same on every rank. `num_optimizer_slots`: numbers that
        the optimizer keeps per parameter, by group; the last also for groups after it. Raises ConfigError."""
        self.peaks: dict[int, int] = {}
        self.meter, sizes = device_meter(), self.sizes
        self.had = self.meter.limit_bytes()
        # Offloaded parameters and optimizer state lie in the host's memory, which is not what is measured here.
        is_offloaded = devices.device_type() == "cuda" and next(self.model.parameters()).device.type == "cpu"
        parameters = 0 if is_offloaded else _bytes(self.model.parameters())
        state = 0 if is_offloaded else _state_bytes(self.optimizer, num_optimizer_slots)
        reserved = 0 if self.optimizer.state else state
        size = sizes[0]
        self.measure(size)  # the first step also allocates what stays: gradients, communication buffers
        if dist.is_initialized():  # and so does the collective that a batch has beside the model's own
            dist.all_reduce(torch.zeros(1, device=_device()))
        self.had = min(self.had, self.meter.limit_bytes())  # by now without NCCL's buffers, which torch does not count
        limit = int(self.had * MARGIN) - reserved
        # Without a sample there would be parameters, gradients and optimizer state at least.
        self.peaks = {0: 2 * parameters + state - reserved, size: self.measure(size)}
        while size < sizes[-1]:
            larger = [following for following in sizes if following > size]
            following = max((one for one in larger if one <= 2 * size), default=larger[0])
            if all_reduce_max([self.expect(following) > limit])[0]:
                break
            size = following
            self.peaks[size] = self.measure(size)
        most = -all_reduce_max([-next((size for size in reversed(sizes) if self.expect(size) <= limit), 0)])[0]
        clear_gradients(self.optimizer)
        if most < 1:
            self.had = int(self.had * MARGIN)
            raise self.refuse(f"{(self.peaks[sizes[0]] + reserved) / GIB:.2f} GiB")
        num_microbatches = math.ceil(self.device_batch_size / most)
        even = math.ceil(self.device_batch_size / num_microbatches)  # no small remainder at the end
        expected = (self.expect(even) + reserved) / GIB
        return even, f"{expected:.2f} of {(limit + reserved) / MARGIN / GIB:.2f} GiB expected at the peak"

    def measure(self, num_samples: int) -> int:
        count, accumulates = -(-self.device_batch_size // num_samples), self.accumulates and self.device_batch_size > 1
        self.meter.reset()
        try:
            run_step(self.model, num_samples, count, self.seq_len, accumulates=accumulates)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if num_samples == self.sizes[0]:
                got = self.meter.peak_bytes() / GIB
                raise self.refuse(f"more than the {got:.2f} GiB that it got") from None
            raise ConfigError(
                f"device_train_microbatch_size: auto: {num_samples} samples ran out of memory where "
                f"{self.expect(num_samples) / GIB:.2f} of {self.had / GIB:.2f} GiB were expected (does another process "
                f"use this device?); set it to {num_samples // 2}"
            ) from None
        return self.meter.peak_bytes()

    def expect(self, size: int) -> int:
        """Predict the peak along the line through the last two measurements."""
        if size in self.peaks:
            return self.peaks[size]
        *_, (before, lower), (last, peak) = self.peaks.items()
        return peak + max(0, peak - lower) * (size - last) // (last - before)

    def refuse(self, needs: str) -> ConfigError:
        what = f"device_train_microbatch_size: auto: one sample of {self.seq_len} tokens needs {needs}"
        return ConfigError(f"{what}, and this device can give {self.had / GIB:.2f} GiB{self.advise()}")


def run_step(model: LanguageModel, num_samples: int, num_microbatches: int, seq_len: int, *, accumulates: bool) -> None:
    """Compute the gradient of one microbatch, or of all that a batch has where stages keep several."""
    model.train()
    if model.exact_sums:
        model.exact_sums.begin_batch(model.parameters(), num_microbatches)
    is_pipeline = model.num_stages > 1
    num_rows = num_samples * num_microbatches if is_pipeline else num_samples
    batch = {"input_ids": torch.zeros((num_rows, seq_len), dtype=torch.int64, device=_device())}
    if is_pipeline:
        cast(Any, model).train_on(batch, num_samples, loss_divisor=1.0)
        return
    parallel = model.model if accumulates and isinstance(model.model, FSDPModule) else None  # not on one device
    for is_last in (False, True) if parallel else (True,):
        if parallel:
            parallel.set_requires_gradient_sync(is_last)
        model.loss(model(batch), batch).backward()


def _device() -> torch.device:
    is_cuda = devices.device_type() == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _state_bytes(optimizer: Optimizer, num_slots: Sequence[int]) -> int:
    groups = itertools.zip_longest(optimizer.param_groups, num_slots[: len(optimizer.param_groups)])
    return sum(_bytes(group["params"]) * (num_slots[-1] if slots is None else slots) for group, slots in groups)


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Count the bytes of this rank's parts."""
    return sum(local(p).numel() * p.element_size() for p in parameters)


class CudaMeter:
    """Memory that torch's allocator has taken from the device, fragments included."""

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
    """Memory of a process on a CPU; the ranks of a machine share evenly what is free."""

    def reset(self) -> None:
        return_freed_memory()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak becomes what is resident now, says proc(5)

    def peak_bytes(self) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))

    def limit_bytes(self) -> int:
        return psutil.Process().memory_info().rss + devices.available_memory_bytes() // this_rank().local_world_size


def device_meter() -> CudaMeter | ResidentMeter:
    return CudaMeter() if devices.device_type() == "cuda" else ResidentMeter()


# ------------------------------------------------------------------------------------------------- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch, numpy or Python."""
    is_cpu_allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_cpu_allocator or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(error: BaseException, config: TrainConfig, when: str, size: int) -> OutOfMemoryError:
    """Return an error with the memory asked for, the memory available, and advice. `when` names the moment."""
    layout = layout_here(config)
    as_run, is_cpu = replace(config, device_train_microbatch_size=size), devices.device_type() == "cpu"
    estimated = estimate_training_memory(with_cpu_attention(as_run) if is_cpu else as_run, layout)
    if not is_cpu:
        used, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    else:
        used, free = psutil.Process().memory_info().rss, devices.available_memory_bytes()
    return OutOfMemoryError(
        f"out of memory on rank {this_rank().rank} {when}: {_asked_for(str(error))} asked for with "
        f"{used / GIB:.2f} of {(used + free) / GIB:.2f} GiB in use; by the estimate {size} x {config.max_seq_len} "
        f"tokens at a time take {estimated.total_bytes / GIB:.2f} GiB"
        f"{advise_less_memory(config, layout, devices.device_type(), size)}"
    )


def _asked_for(text: str) -> str:
    """Read torch's "tried to allocate 2.00 GiB" or "8192 bytes", or numpy's "unable to allocate 2 GiB"."""
    found = re.search(r"(?:ried|nable) to allocate ([\d.]+) ([A-Za-z]+)", text)
    if found is None:
        return "more was"
    if found[2] != "bytes":
        return f"{found[1]} {found[2]} more were"
    asked_bytes = int(found[1])
    unit, name = (GIB, "GiB") if asked_bytes >= GIB else (MIB, "MiB")
    return f"{asked_bytes / unit:,.2f} {name} more were"
