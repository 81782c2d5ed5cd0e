"""What to say when memory does not suffice: what was needed, what there was, and which settings would help most."""

import dataclasses
import re
from typing import Any

import psutil
import torch

from llmfoundry_lite import devices
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import OutOfMemoryError
from llmfoundry_lite.hardware import GIB, MIB
from llmfoundry_lite.plan.memory import estimate_training_memory
from llmfoundry_lite.ranks.rank import this_rank


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's, numpy's or Python's word for memory that could not be had."""
    is_cpu_allocator = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_cpu_allocator or isinstance(error, torch.OutOfMemoryError | MemoryError)


def explain_out_of_memory(
    error: BaseException, config: TrainConfig, when: str, microbatch_size: int
) -> OutOfMemoryError:
    """`when`: what was being done."""
    here = this_rank()
    estimated = estimate_training_memory(
        dataclasses.replace(config, device_train_microbatch_size=microbatch_size),
        here.world_size,
        here.local_world_size,
    )
    used, had = _used_and_had()
    advice = advise_less_memory(
        config, here.world_size, here.local_world_size, devices.device_type(), microbatch_size=microbatch_size
    )
    return OutOfMemoryError(
        f"out of memory on rank {here.rank} {when}: {_asked_for(str(error))} asked for with "
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


def advise_less_memory(
    config: TrainConfig, world_size: int, local_world_size: int, device_type: str, microbatch_size: int = 1
) -> str:
    """The three settings that by the estimate of `plan.memory` save the most, the best first, with what they save."""
    config = dataclasses.replace(config, device_train_microbatch_size=microbatch_size)
    now = estimate_training_memory(config, world_size, local_world_size)
    changes: dict[str, dict[str, Any]] = {
        "fsdp_config.sharding_strategy: FULL_SHARD": {"sharding_strategy": "FULL_SHARD"},
        "fsdp_config.activation_checkpointing: true": {"activation_checkpointing": True},
        "fsdp_config.reduce_every_microbatch: true": {"reduce_every_microbatch": True},
        "fsdp_config.mixed_precision: PURE": {"mixed_precision": "PURE"},
    }
    options = {
        text: dataclasses.replace(config, fsdp_config=dataclasses.replace(config.sharding, **change))
        for text, change in changes.items()
    }
    options["precision: amp_bf16"] = dataclasses.replace(config, precision="amp_bf16")
    if microbatch_size > 1:
        half = microbatch_size // 2
        smaller = dataclasses.replace(config, device_train_microbatch_size=half)
        options[f"device_train_microbatch_size: {half}"] = smaller
    saved = {
        text: now.total_bytes - estimate_training_memory(option, world_size, local_world_size).total_bytes
        for text, option in options.items()
    }
    twice = estimate_training_memory(config, 2 * world_size, local_world_size).total_bytes
    saved["twice as many devices"] = now.total_bytes - twice
    if device_type == "cuda" and not config.sharding.offload_optimizer:
        saved["fsdp_config.offload_optimizer: true"] = now.parameters_bytes + now.optimizer_bytes
    best = sorted((text for text in saved if saved[text] > 0), key=lambda text: -saved[text])[:3]
    words = [f"{text} (saves about {saved[text] / GIB:.2f} GiB)" for text in best]
    return f"; what helps most: {', '.join(words)}" if words else ""
