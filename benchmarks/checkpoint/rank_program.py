"""What each rank of the checkpoint benchmark does: build the model, let the savers take turns, and time them.

`checkpoint.py` starts NUM_RANKS processes which call `measure`. Every function here is collective unless it only reads
tensors or prints. Rank 0 prints the progress, and all ranks return the same figures.
"""

import os
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.checkpoint.interval import measure_interval
from benchmarks.checkpoint.meters import Limits, Memory, drop_from_cache, slowest, timed, warm_up
from benchmarks.checkpoint.report import ASYNC_SAVE, COMPOSER, OURS, SAVE, SIDES
from benchmarks.checkpoint.sides import Start, composer_save, dcp_async_save, dcp_save, our_save
from llmfoundry_lite.checkpoint import shards
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.state import local_tensor, read_state
from llmfoundry_lite.config.layout import divide_devices
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.devices import device_type
from llmfoundry_lite.files import sync
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.ranks import exchange
from llmfoundry_machines.bench.steps import model_of

NUM_RANKS = 2
LIMITS = "limits"
"""The turn in which the machine's limits are measured, beside those of the savers."""
ANY_HASH = mock.MagicMock(**{"__ne__.return_value": False, "hex.return_value": mock.ANY})
"""Equal to the hash of any bytes, so that a load runs without hashing."""


def measure(what: str, size: str, num_rounds: int, work: str) -> dict[str, Any]:
    """Run one part of the benchmark on this rank, and return its figures. Collective.

    `what` selects the part: "sides" compares all savers, "growth" times ours alone, and "interval" trains with a save
    after every batch. `size` names the model, and `work` is a scratch folder that all ranks share.
    """
    rank = dist.get_rank()
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": NUM_RANKS,
        "LOCAL_WORLD_SIZE": NUM_RANKS,
        "NODE_RANK": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})  # Composer reads all of these

    model, optimizer = build(size)
    interval = partial(measure_interval, size=size, say=_say)
    measures = {"sides": measure_sides, "growth": measure_growth, "interval": interval}
    figures = measures[what](model, optimizer, Path(work, f"{what}-{size}"), num_rounds)
    local_bytes = exchange.all_gather_json(sum(tensor.nbytes for tensor in local_tensors(model, optimizer)))
    return {"parameters": count_parameters(model_config(size)), "local_bytes": local_bytes, **figures}


def _say(progress: str) -> None:
    """Print a line of progress on rank 0."""
    if dist.get_rank() == 0:
        print(f"  {progress}", flush=True)


def model_config(size: str) -> ModelConfig:
    """Return the configuration of the model with this size's name, for sequences of 2048 tokens."""
    return model_of(size, 2048)


def build(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build an MPT that is sharded over all ranks, and an AdamW whose state exists, because it has taken one step."""
    from llmfoundry_lite.parallel.fsdp import build_parallel_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS

    fsdp = FSDPConfig()
    mesh = build_mesh(divide_devices(fsdp, NUM_RANKS), device_type())
    model = build_parallel_model(model_config(size), fsdp, PRECISIONS["fp32", "DEFAULT"], mesh, seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    # Any gradient will do: only the step matters, because it allocates the moments.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def local_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's part of every tensor that a checkpoint holds, weights and optimizer state."""
    return [local_tensor(tensor) for tensor in read_state(model, optimizer).tensors.values()]


def measure_sides(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """Let all savers and the measurement of the limits take turns, in `num_rounds` rounds after a first, cold one.
    Collective.

    Our own side also loads what it has saved, with and without verification. Each checkpoint is removed after its turn.

    Returns {"rounds": [...], "resident_after_drop": ...}. A round has the figures of `measure_save` for each side, the
    seconds of the limits and those of the loads. The last value is the largest share of a file that stayed in the page
    cache before a load.
    """
    savers = {
        OURS: our_save(model, optimizer, work / "ours"),
        SAVE: dcp_save(model, optimizer),
        ASYNC_SAVE: dcp_async_save(model, optimizer),
        COMPOSER: composer_save(model, optimizer),
    }
    limits = Limits(local_tensors(model, optimizer), work)
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    memory = {side: Memory(local_bytes) for side in SIDES}
    rounds, max_share_resident = [], 0.0
    for round_number in range(num_rounds + 1):
        figures: dict[str, Any] = {}
        # Ours stands between the limits and async_save, because it is compared with these two. Every other round goes
        # backwards, so that no side always follows the same one.
        turns = (LIMITS, *SIDES)
        for side in turns if round_number % 2 == 0 else reversed(turns):
            if side == LIMITS:
                figures |= limits.measure()
                continue

            folder = work / side.replace(".", "-")
            saved = folder / f"ba{round_number}" if side == OURS else folder
            figures[side] = measure_save(savers[side], folder, round_number, memory[side])
            if side == OURS:
                loads, share_resident = measure_loads(model, optimizer, saved, round_number, 2 * local_bytes)
                figures |= loads
                max_share_resident = max(max_share_resident, share_resident)
            remove(saved)

        rounds.append(figures)
        seconds = ", ".join(f"{side} {figures[side]['durable_seconds']:.2f} s" for side in SIDES)
        _say(f"round {round_number} of {num_rounds}: {seconds}")
    return {"rounds": rounds, "resident_after_drop": max_share_resident}


def measure_growth(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """Time our own saves and verified loads of one model size, in `num_rounds` rounds after a first, cold one.
    Collective.

    Returns {"rounds": [...]}; each has the figures of `measure_save` and `load_verified_seconds`.
    """
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    start, memory, rounds = our_save(model, optimizer, work), Memory(local_bytes), []
    for round_number in range(num_rounds + 1):
        figures = measure_save(start, work, round_number, memory)
        saved = work / f"ba{round_number}"
        drop_from_cache(saved)
        figures["load_verified_seconds"] = timed(lambda saved=saved: load(saved, model, optimizer), 2 * local_bytes)
        remove(saved)
        rounds.append(figures)
        _say(f"save {round_number}/{num_rounds}: {figures['durable_seconds']:.2f} s")
    return {"rounds": rounds}


def measure_save(start: Start, folder: Path, batch: int, memory: Memory) -> dict[str, Any]:
    """Time one save, and return {stall_seconds, durable_seconds, extra_bytes} of the slowest or largest rank.
    Collective.

    Both times begin with the call of `start`; the stall ends when that call returns, and the save is durable when
    `finish` does. `memory` is the meter of this side, which keeps its state between saves.
    """
    warm_up(2 * memory.local_bytes)  # for the file's pages, and for the copy that the first save makes
    with memory.watched():
        dist.barrier()
        started = time.perf_counter()
        finish = start(folder, batch)
        stall_seconds = time.perf_counter() - started
        finish()
        durable_seconds = time.perf_counter() - started
    return {
        "stall_seconds": slowest(stall_seconds),
        "durable_seconds": slowest(durable_seconds),
        "extra_bytes": exchange.all_reduce_max([memory.extra_bytes])[0],
    }


def measure_loads(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, round_number: int, needs_bytes: int
) -> tuple[dict[str, Any], float]:
    """Time one load with verification and one without, from a cold page cache. Collective.

    Which one goes first alternates with the round's `number`. Returns the seconds under their names in the report, and
    the largest share of the files that was still in the page cache.
    """
    seconds, max_share_resident = {}, 0.0
    for verify in (True, False) if round_number % 2 == 0 else (False, True):
        max_share_resident = max(max_share_resident, drop_from_cache(folder))
        key = "load_verified_seconds" if verify else "load_unverified_seconds"
        hashing = nullcontext() if verify else mock.patch.object(shards, "hash_buffers", lambda buffers: ANY_HASH)
        with hashing:
            seconds[key] = timed(lambda: load(folder, model, optimizer), needs_bytes)
    return seconds, max_share_resident


def remove(folder: Path) -> None:
    """Remove a checkpoint, and return when the file system has freed its space. Collective.

    The space is freed when the file system's journal commits. That must not happen during the next measurement, so the
    folder's parent is synced.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        sync(folder.parent)
    dist.barrier()
