"""The savers that the checkpoint benchmark compares: our `Saver`, and those of torch and Composer for sharded state.

Each saver is made by a function of the same form: it takes the model and the optimizer, makes once what a training run
would keep between saves, and returns a `Start`, which the benchmark calls for every save and times. Every function
here, and every function that they return, is collective.
"""

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
"""Waits until the save that has been started is written and synced."""
Start = Callable[[Path, int], Finish]
"""Starts a save of the given batch into a folder, and returns its `Finish`. Training would stall during this call."""


def our_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Start:
    """Make a saver that uses our `Saver`. It writes into `folder`, whatever folder its `Start` is given."""
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()

    def start(folder: Path, batch: int) -> Finish:
        saver.save(model, optimizer, SaveMetadata(timestamp=Timestamp(batch=batch)))
        return saver.wait

    return start


def dcp_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Make a saver that uses `torch.distributed.checkpoint.save`, which returns only when the files are written."""

    def start(folder: Path, batch: int) -> Finish:
        dcp.save(_torch_state(model, optimizer), checkpoint_id=folder)
        return lambda: sync(folder)

    return start


def dcp_async_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Make a saver that uses `torch.distributed.checkpoint.async_save`, which writes the files in the background.

    The stager is created once, so that its staging buffers are reused by later saves, as ours are.
    """
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
    """Collect the state in the form that torch's savers take. This is part of their stall."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def composer_save(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Make a saver that calls what Composer's CheckpointSaver calls, with a State that says: FSDP2, sharded.

    No Trainer is needed. `{rank}` in the path is a placeholder that Composer fills in.
    """
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
    """Fsync everything in a folder on rank 0, and return on all ranks when that is done. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (*folder.rglob("*"), folder, folder.parent):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()
