"""Savers of the checkpoint benchmark: our `Saver`, and what torch and Composer offer for sharded state."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict

from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.devices import device_type

Finish = Callable[[], Any]
Start = Callable[[Path, int], Finish]
"""(folder, batch) -> a function that waits until all is written. The stall is the time of the first call."""


def our_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Start:
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()

    def start(folder: Path, batch: int) -> Finish:
        saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=batch)))
        return saver.wait

    return start


def dcp_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    def start(folder: Path, batch: int) -> Finish:
        dcp.save(_torch_state(model, optimizer), checkpoint_id=folder)
        return lambda: sync(folder)

    return start


def dcp_async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    is_cuda = device_type() == "cuda"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_cuda
        )
    )

    def start(folder: Path, batch: int) -> Finish:
        future: Any = dcp.async_save(_torch_state(model, optimizer), checkpoint_id=folder, async_stager=stager)

        def finish() -> None:
            future.result()
            sync(folder)

        return finish

    return start


def _torch_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, slots = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": slots}


def composer_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Call what Composer's CheckpointSaver calls, with a state that says: FSDP2, sharded."""
    from composer.core import State
    from composer.devices import DeviceCPU, DeviceGPU
    from composer.utils import checkpoint
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig

    state = State(
        model=model,
        rank_zero_seed=17,
        run_name="bench",
        device=DeviceGPU() if device_type() == "cuda" else DeviceCPU(),
        optimizers=optimizer,
        parallelism_config=ParallelismConfig(fsdp2=FSDP2Config(state_dict_type="sharded")),
    )

    def start(folder: Path, batch: int) -> Finish:
        checkpoint.save_checkpoint(state, f"{folder}/rank{{rank}}")
        return lambda: sync(folder)

    return start


def sync(folder: Path) -> None:
    """Let rank 0 fsync everything in a folder; all ranks return when it is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (*folder.rglob("*"), folder, folder.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()
