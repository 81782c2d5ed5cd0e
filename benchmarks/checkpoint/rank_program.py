"""One rank's part of the checkpoint benchmark: it builds the model, has the sides save in turns, and times them.

Started by `checkpoint.py`. Rank 0 prints how it goes.
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
ANY_HASH = mock.MagicMock(**{"__ne__.return_value": False, "hex.return_value": mock.ANY})
"""Equal to the hash of any bytes."""


def measure(what: str, size: str, num_rounds: int, work: str) -> dict[str, Any]:
    """One rank's part."""
    rank = dist.get_rank()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()})  # Composer asks for all of them
    model, optimizer = build(size)
    interval = partial(measure_interval, size=size, say=_say)
    measures = {"sides": measure_sides, "growth": measure_growth, "interval": interval}
    found = measures[what](model, optimizer, Path(work, f"{what}-{size}"), num_rounds)
    local_bytes = exchange.all_gather_json(sum(tensor.nbytes for tensor in local_tensors(model, optimizer)))
    return {"parameters": count_parameters(model_config(size)), "local_bytes": local_bytes, **found}


def _say(progress: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {progress}", flush=True)


def model_config(size: str) -> ModelConfig:
    return model_of(size, 2048)


def build(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A sharded MPT and an AdamW that has taken a step."""
    from llmfoundry_lite.parallel.fsdp import build_parallel_model
    from llmfoundry_lite.parallel.mesh import build_mesh
    from llmfoundry_lite.parallel.precision import PRECISIONS

    fsdp = FSDPConfig()
    mesh = build_mesh(divide_devices(fsdp, NUM_RANKS), device_type())
    model = build_parallel_model(model_config(size), fsdp, PRECISIONS["fp32", "DEFAULT"], mesh, seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def local_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [local_tensor(tensor) for tensor in read_state(model, optimizer).tensors.values()]


def measure_sides(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """All sides and limits in turns; in every other round in reverse, so that none always follows the same one."""
    starts = {
        OURS: our_save(model, optimizer, work / "ours"),
        SAVE: dcp_save(model, optimizer),
        ASYNC_SAVE: dcp_async_save(model, optimizer),
        COMPOSER: composer_save(model, optimizer),
    }
    limits = Limits(local_tensors(model, optimizer), work)
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    memory = {side: Memory(local_bytes) for side in SIDES}
    rounds, resident = [], 0.0
    for number in range(num_rounds + 1):
        found: dict[str, Any] = {}
        turns = (LIMITS, *SIDES)  # ours is compared with its neighbours, the limits and async_save
        for side in turns if number % 2 == 0 else reversed(turns):
            if side == LIMITS:
                found |= limits.measure()
                continue
            folder = work / side.replace(".", "-")
            saved = folder / f"ba{number}" if side == OURS else folder
            found[side] = measure_save(starts[side], folder, number, memory[side])
            if side == OURS:
                loads, stayed = measure_loads(model, optimizer, saved, number, 2 * local_bytes)
                found |= loads
                resident = max(resident, stayed)
            remove(saved)
        rounds.append(found)
        seconds = ", ".join(f"{side} {found[side]['durable_seconds']:.2f} s" for side in SIDES)
        _say(f"round {number} of {num_rounds}: {seconds}")
    return {"rounds": rounds, "resident_after_drop": resident}


def measure_growth(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int
) -> dict[str, Any]:
    """Ours alone."""
    local_bytes = sum(tensor.nbytes for tensor in local_tensors(model, optimizer))
    start, memory, rounds = our_save(model, optimizer, work), Memory(local_bytes), []
    for number in range(num_rounds + 1):
        found = measure_save(start, work, number, memory)
        saved = work / f"ba{number}"
        drop_from_cache(saved)
        found["load_verified_seconds"] = timed(lambda saved=saved: load(saved, model, optimizer), 2 * local_bytes)
        remove(saved)
        rounds.append(found)
        _say(f"save {number}/{num_rounds}: {found['durable_seconds']:.2f} s")
    return {"rounds": rounds}


def measure_save(start: Start, folder: Path, batch: int, memory: Memory) -> dict[str, Any]:
    """{stall_seconds, durable_seconds, extra_bytes}, of the slowest or largest rank."""
    warm_up(2 * memory.local_bytes)  # pages for the file, and a copy at the first save
    with memory.watched():
        dist.barrier()
        started = time.perf_counter()
        finish = start(folder, batch)
        stall = time.perf_counter() - started
        finish()
        durable = time.perf_counter() - started
    return {
        "stall_seconds": slowest(stall),
        "durable_seconds": slowest(durable),
        "extra_bytes": exchange.all_reduce_max([memory.extra_bytes])[0],
    }


def measure_loads(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, number: int, needs_bytes: int
) -> tuple[dict[str, Any], float]:
    """Verified and not, in turns who goes first; and the largest share of the files that was still cached."""
    found, resident = {}, 0.0
    for verify in (True, False) if number % 2 == 0 else (False, True):
        resident = max(resident, drop_from_cache(folder))
        key = "load_verified_seconds" if verify else "load_unverified_seconds"
        without = nullcontext() if verify else mock.patch.object(shards, "hash_buffers", lambda buffers: ANY_HASH)
        with without:
            found[key] = timed(lambda: load(folder, model, optimizer), needs_bytes)
    return found, resident


def remove(folder: Path) -> None:
    """And have it done with: the file system frees the space when its journal commits, which must not fall into the
    next measurement."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        sync(folder.parent)
    dist.barrier()
