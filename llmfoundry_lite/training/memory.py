"""What to say when memory ran out: what was needed, what there was, and the advice of `plan`."""

import dataclasses
import re

import psutil
import torch

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import OutOfMemoryError
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_lite.plan.memory import advise_less_memory, estimate_training_memory
from llmfoundry_lite.ranks.rank import this_rank


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's, numpy's or Python's word for memory that could not be had."""
    is_cpu_allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_cpu_allocator or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(
    error: BaseException, config: TrainConfig, when: str, microbatch_size: int
) -> OutOfMemoryError:
    """`when`: what was being done."""
    layout = layout_here(config)
    as_run = dataclasses.replace(config, device_train_microbatch_size=microbatch_size)
    estimated = estimate_training_memory(as_run, layout)
    used, had = _used_and_had()
    advice = advise_less_memory(config, layout, devices.device_type(), microbatch_size)
    return OutOfMemoryError(
        f"out of memory on rank {this_rank().rank} {when}: {_asked_for(str(error))} asked for with "
        f"{used / GIB:.2f} of {had / GIB:.2f} GiB in use; by the estimate {microbatch_size} x {config.max_seq_len} "
        f"tokens at a time take {estimated.total_bytes / GIB:.2f} GiB{advice}"
    )


def _asked_for(text: str) -> str:
    """Torch "tried to allocate 2.00 GiB" on an accelerator, "8192 bytes" on a CPU; numpy was "unable to" have 2 GiB."""
    found = re.search(r"(?:ried|nable) to allocate ([\d.]+) ([A-Za-z]+)", text)
    if found is None:
        return "more was"
    if found[2] != "bytes":
        return f"{found[1]} {found[2]} more were"
    asked_bytes = int(found[1])
    return (
        f"{asked_bytes / GIB:,.2f} GiB more were" if asked_bytes >= GIB else f"{asked_bytes / MIB:,.2f} MiB more were"
    )


def _used_and_had() -> tuple[int, int]:
    """Bytes: in use by this process, and what it could have at most, others being as they are."""
    if devices.device_type() == "cuda":
        free, _ = torch.cuda.mem_get_info()
        used = torch.cuda.memory_reserved()
        return used, used + free
    used = psutil.Process().memory_info().rss
    return used, used + devices.available_memory_bytes()
