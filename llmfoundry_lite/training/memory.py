"""Memory of a rank's device: `device_train_microbatch_size: auto`, and the message after running out of memory.

If one rank runs out of memory during a step, the others wait in a collective until it times out. So the search tries no
size that might not fit. It measures one sample, then doubles while every rank predicts that the next size fits: memory
grows linearly with the samples, so two measurements predict the rest. The choice changes only the gradient's last
digits.
"""

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
from llmfoundry_lite.config.counted_model import describe_unknown_parts
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
    """Return the number of samples in a microbatch: the configured one, or with `auto` the most that fit on every rank.

    Collective. Call it when the model and, after a restore, the optimizer's state are in place, because `auto`
    measures what they leave. Rank 0 prints the result of `auto`. Raises ConfigError if not even one sample fits.
    """
    layout = layout_here(config)
    is_main = dist.get_rank() == 0
    device_batch_size = config.global_train_batch_size // layout.num_data_ranks

    # A configured size, or none, which means all samples of a rank at once.
    configured = config.device_train_microbatch_size
    if configured != "auto":
        size = config.first_microbatch_size(device_batch_size)
        # LLM Foundry measures on GPUs; Composer cannot measure on a CPU.
        would_differ = configured is None and layout.pipeline == 1 and devices.device_type() != "cpu"
        if would_differ and is_main:
            print(
                f"device_train_microbatch_size: not given, so each device computes its {size} samples at once; auto, "
                "LLM Foundry's default, computes as many at a time as fit",
                flush=True,
            )
        return size

    # Exact sums need microbatches of one size, and a pipeline's schedule takes certain numbers of microbatches.
    sizes: Sequence[int] = range(1, device_batch_size + 1)
    if config.exact_sums:
        sizes = divisors(device_batch_size)
    if layout.pipeline > 1:
        sizes = [size for size in sizes if config.pipeline.takes_microbatches(math.ceil(device_batch_size / size))]

    advise = partial(advise_less_memory, config, layout, devices.device_type())
    num_parts = config.parts_of_largest_batch
    has_one_sample = device_batch_size * num_parts == 1
    accumulates = not config.reduces_every_microbatch and not has_one_sample
    search = Search(model, optimizer, device_batch_size, sizes, config.max_seq_len, accumulates, advise, num_parts)
    size, measured = search.run(optimizer_slots(config))
    if config.compile_config is not None or model.attn_impl == "flex":
        # Otherwise the sizes that the search has compiled count towards torch's limit, and make sizes dynamic.
        torch._dynamo.reset()
    if is_main:
        print(f"device_train_microbatch_size: auto is {size}: {measured}", flush=True)
    return size


@dataclass
class Search:
    """Finds the largest microbatch that fits on every rank's device.

    All methods are collective, unless they say otherwise.
    """

    model: LanguageModel
    optimizer: Optimizer
    device_batch_size: int
    """Number of samples that this rank has of each batch, or of the smallest with `batch_size_schedule`."""
    sizes: Sequence[int]
    """Sizes that a microbatch may have, the smallest first."""
    seq_len: int
    accumulates: bool = False
    """Whole gradients stay on each device until the batch's last microbatch."""
    advise: Callable[[], str] = lambda: ""
    """Returns settings that need less memory, for the error."""
    num_parts: int = 1
    """How many times `device_batch_size` samples this rank has of the largest batch. A pipeline holds them at once."""

    def run(self, num_optimizer_slots: Sequence[float]) -> tuple[int, str]:
        """Return the number of samples in a microbatch, and what was measured, in words.

        Collective. The size is the same on every rank, and the text has this rank's numbers. `num_optimizer_slots` says
        how many numbers the optimizer keeps for a parameter: one for all groups, or one for each half of the groups.
        Sets `peaks`, `meter` and `available_bytes`, and leaves the gradients cleared. Raises ConfigError if not even
        the smallest size fits.
        """
        self.peaks: dict[int, int] = {}
        """Size -> peak in bytes, as it was measured."""
        self.meter = device_meter()
        self.available_bytes = self.meter.limit_bytes()

        # Memory that does not depend on the size. Offloaded parameters and optimizer state are in the host's memory,
        # which is not measured here. After a restore the optimizer has its state; otherwise its first step allocates
        # it, later than these measurements.
        is_offloaded = devices.device_type() == "cuda" and next(self.model.parameters()).device.type == "cpu"
        parameter_bytes = 0 if is_offloaded else _bytes(self.model.parameters())
        state_bytes = 0 if is_offloaded else _state_bytes(self.optimizer, num_optimizer_slots)
        missing_state_bytes = 0 if self.optimizer.state else state_bytes

        # The first step also allocates what stays: gradients, communication buffers. So its peak is not used, and the
        # limit is read again after it, without NCCL's buffers, which torch does not count.
        smallest = self.sizes[0]
        self.measure(smallest)
        if dist.is_initialized():  # a batch has this collective beside the model's own
            dist.all_reduce(torch.zeros(1, device=_device()))
        self.available_bytes = min(self.available_bytes, self.meter.limit_bytes())
        limit = int(self.available_bytes * MARGIN) - missing_state_bytes

        # Measure. Without a sample there would be parameters, gradients and optimizer state at least.
        bytes_without_sample = 2 * parameter_bytes + state_bytes - missing_state_bytes
        self.peaks = {0: bytes_without_sample, smallest: self.measure(smallest)}
        self._measure_larger_sizes(limit)
        clear_gradients(self.optimizer)

        # Choose the largest size that every rank expects to fit.
        sizes_that_fit = [size for size in self.sizes if self.expect(size) <= limit]
        largest_on_this_rank = max(sizes_that_fit, default=0)
        largest = -all_reduce_max([-largest_on_this_rank])[0]  # the least of all ranks
        if largest < 1:
            self.available_bytes = int(self.available_bytes * MARGIN)
            raise self.refuse(f"{(self.peaks[smallest] + missing_state_bytes) / GIB:.2f} GiB")
        num_microbatches = math.ceil(self.device_batch_size / largest)
        size = math.ceil(self.device_batch_size / num_microbatches)  # microbatches of about equal size

        expected_bytes = self.expect(size) + missing_state_bytes
        total_bytes = (limit + missing_state_bytes) / MARGIN
        return size, f"{expected_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB expected at the peak"

    def _measure_larger_sizes(self, limit: int) -> None:
        """Measure sizes, each about twice the one before, while every rank expects a peak of at most `limit` bytes.

        Collective. Adds to `peaks`, from which `expect` predicts the next size. For example, with sizes from 1 to 12
        it measures 2, 4, 8 and 12, if they fit.
        """
        size = self.sizes[0]
        while size < self.sizes[-1]:
            # The largest permitted size up to twice this one, or else the next one.
            larger = [candidate for candidate in self.sizes if candidate > size]
            next_size = max((candidate for candidate in larger if candidate <= 2 * size), default=larger[0])

            is_too_large = self.expect(next_size) > limit
            if all_reduce_max([is_too_large])[0]:
                return
            size = next_size
            self.peaks[size] = self.measure(size)

    def measure(self, num_samples: int) -> int:
        """Compute a gradient with microbatches of `num_samples`. Return the peak of this rank's memory in bytes.

        Collective. Raises ConfigError, on this rank alone, if it runs out of memory. That should not happen, because
        only sizes are measured that are expected to fit.
        """
        num_microbatches = math.ceil(self.num_parts * self.device_batch_size / num_samples)
        self.meter.reset()
        try:
            run_step(self.model, num_samples, num_microbatches, self.seq_len, accumulates=self.accumulates)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The smallest size does not fit at all, or memory did not grow as predicted.
            if num_samples == self.sizes[0]:
                peak = self.meter.peak_bytes() / GIB
                raise self.refuse(f"more than the {peak:.2f} GiB that it got") from None
            raise ConfigError(
                f"device_train_microbatch_size: auto: {num_samples} samples ran out of memory where "
                f"{self.expect(num_samples) / GIB:.2f} of {self.available_bytes / GIB:.2f} GiB were expected (does "
                f"another process use this device?); set it to {num_samples // 2}"
            ) from None
        return self.meter.peak_bytes()

    def expect(self, size: int) -> int:
        """Return the peak in bytes for microbatches of `size` samples, as measured or as predicted. Not collective.

        A size that was not measured is predicted by the line through the last two measurements. For example, after
        3 GiB for 1 sample and 4 GiB for 2, 4 samples are expected to take 6 GiB.
        """
        if size in self.peaks:
            return self.peaks[size]
        (earlier_size, earlier_peak), (last_size, last_peak) = list(self.peaks.items())[-2:]
        growth = max(0, last_peak - earlier_peak)
        return last_peak + growth * (size - last_size) // (last_size - earlier_size)

    def refuse(self, needed: str) -> ConfigError:
        """Return the error that one sample does not fit. `needed` says how much memory it needs. Not collective."""
        return ConfigError(
            f"device_train_microbatch_size: auto: one sample of {self.seq_len} tokens needs {needed}, and this device "
            f"can give {self.available_bytes / GIB:.2f} GiB{self.advise()}"
        )


def run_step(model: LanguageModel, num_samples: int, num_microbatches: int, seq_len: int, *, accumulates: bool) -> None:
    """Compute a gradient of made-up samples, so that its peak of memory can be measured. Collective.

    A microbatch has `num_samples` samples of `seq_len` tokens. One microbatch is enough, with two exceptions. If
    gradients stay whole between microbatches (`accumulates`), the second one finds those of the first in memory. A
    pipeline computes all `num_microbatches`, because its stages hold several at once. The gradients stay in
    `parameter.grad`; the caller clears them.
    """
    model.train()
    if model.exact_sums:
        model.exact_sums.begin_batch(model.parameters(), num_microbatches)
    is_pipeline = model.num_stages > 1
    num_rows = num_samples * num_microbatches if is_pipeline else num_samples
    batch = {"input_ids": torch.zeros((num_rows, seq_len), dtype=torch.int64, device=_device())}
    if is_pipeline:
        cast(Any, model).train_on(batch, num_samples, loss_divisor=1.0)
        return

    if accumulates and isinstance(model.model, FSDPModule):  # not on one device
        model.model.set_requires_gradient_sync(False)
        model.loss(model(batch), batch).backward()
        model.model.set_requires_gradient_sync(True)
    model.loss(model(batch), batch).backward()


def _device() -> torch.device:
    """Return this rank's device."""
    is_cuda = devices.device_type() == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _state_bytes(optimizer: Optimizer, num_slots: Sequence[float]) -> int:
    """Return the bytes of this rank's optimizer state.

    `num_slots` are the numbers that it keeps for a parameter: one for all groups, or one for the first half of the
    groups and one for the second, as Muon has them.
    """
    groups_of_each = len(optimizer.param_groups) // len(num_slots)
    total = 0.0
    for index, group in enumerate(optimizer.param_groups):
        total += _bytes(group["params"]) * num_slots[index // groups_of_each]
    return int(total)


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the bytes of this rank's parts of parameters."""
    return sum(local(parameter).numel() * parameter.element_size() for parameter in parameters)


class CudaMeter:
    """Memory that torch's allocator has taken from this rank's device, fragments included."""

    def reset(self) -> None:
        """Return free memory to the device, and let the peak count from now."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most memory since `reset`. Waits for the device."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    def limit_bytes(self) -> int:
        """Return how much memory this process can have: what it has, and what is free."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()


class ResidentMeter:
    """Resident memory of this process, for training on a CPU."""

    def reset(self) -> None:
        """Return free memory to the system, and let the peak count from now."""
        return_freed_memory()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak becomes what is resident now, says proc(5)

    def peak_bytes(self) -> int:
        """Return the most memory since `reset`."""
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024  # the kernel counts in KiB
        raise AssertionError("/proc/self/status has no VmHWM")

    def limit_bytes(self) -> int:
        """Return how much memory this process can have: what it has, and its part of what is free on this machine."""
        free_for_this_rank = devices.available_memory_bytes() // this_rank().local_world_size
        return psutil.Process().memory_info().rss + free_for_this_rank


def device_meter() -> CudaMeter | ResidentMeter:
    """Return the meter of this rank's device."""
    return CudaMeter() if devices.device_type() == "cuda" else ResidentMeter()


# ------------------------------------------------------------------------------------------------- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch, numpy or Python."""
    is_cpu_allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_cpu_allocator or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(error: BaseException, config: TrainConfig, when: str, size: int) -> OutOfMemoryError:
    """Return an error that says what was asked for, how much memory there is, and which settings need less.

    `error` is torch's, NumPy's or Python's. `when` names the moment, such as "in batch 3", and `size` is the number of
    samples in a microbatch. Not collective: a rank may run out of memory alone.
    """
    # What the estimate says of the run as it is, with the microbatch size that `auto` may have chosen.
    layout = layout_here(config)
    as_run = replace(config, device_train_microbatch_size=size)
    if devices.device_type() == "cpu":
        as_run = with_cpu_attention(as_run)
        used_bytes, free_bytes = psutil.Process().memory_info().rss, devices.available_memory_bytes()
    else:
        used_bytes, free_bytes = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    estimated_bytes = estimate_training_memory(as_run, layout).total_bytes
    unknown_parts = describe_unknown_parts(config.model)
    not_counted = f", and what {unknown_parts} takes" if unknown_parts else ""

    return OutOfMemoryError(
        f"out of memory on rank {this_rank().rank} {when}: {_asked_for(str(error))} asked for with "
        f"{used_bytes / GIB:.2f} of {(used_bytes + free_bytes) / GIB:.2f} GiB in use; by the estimate {size} x "
        f"{config.max_seq_len} tokens at a time take {estimated_bytes / GIB:.2f} GiB{not_counted}"
        f"{advise_less_memory(config, layout, devices.device_type(), size)}"
    )


def _asked_for(text: str) -> str:
    """Return the amount that could not be allocated, with a verb, for a sentence about memory.

    `text` is the message of an out-of-memory error. torch's "tried to allocate 2.00 GiB" becomes "2.00 GiB more were",
    "allocate 8388608 bytes" becomes "8.00 MiB more were", and a message without an amount becomes "more was".
    """
    match = re.search(r"(?:ried|nable) to allocate ([\d.]+) ([A-Za-z]+)", text)
    if match is None:
        return "more was"
    amount, unit = match.groups()
    if unit != "bytes":
        return f"{amount} {unit} more were"

    # torch's allocator of the CPU gives plain bytes.
    num_bytes = int(amount)
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB more were"
    return f"{num_bytes / MIB:,.2f} MiB more were"
