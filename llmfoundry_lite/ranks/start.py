"""Start of a launch's process group: over NCCL (RCCL on AMD) with accelerators, over gloo without."""

import datetime
import os
import re
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry_lite.errors import ConfigError, MissingRanksError, TransientError
from llmfoundry_lite.ranks.ending import describe, ending_in_time, exit_code_of
from llmfoundry_lite.ranks.exchange import open_host_group
from llmfoundry_lite.ranks.rank import check_launch, count_usable_cores, rank_variables, this_rank

RENDEZVOUS_GRACE_SECONDS = 5.0
"""How long a rank that is asked to leave still waits for others: they may have left without it."""

LOOPBACK = "127.0.0.1"


def start_process_group(device_type: str, timeout_seconds: float, exit_code: int | None = None) -> None:
    """Start the process group, unless there is one. A process without a launcher is a world of one, on no network.

    Raises ConfigError for variables that make no launch, and MissingRanksError when a rank is missing after the
    timeout. When rank 0 is frozen torch waits for ever: the process then ends after twice the timeout, with `exit_code`
    [that of a fault that may pass].
    """
    if dist.is_initialized():
        return
    check_launch()
    here, backend = this_rank(), "nccl" if device_type == "cuda" else "gloo"
    if here.world_size > 1:
        timeout = datetime.timedelta(seconds=timeout_seconds)
        if address := os.environ.get("MASTER_ADDR"):
            check_address(address)
        apart = MissingRanksError(
            f"rank {here.rank}: the ranks have not met in {2 * timeout_seconds:g} s, and rank 0 at "
            f"{os.environ.get('MASTER_ADDR', LOOPBACK)} does not answer: it is frozen, or its node is out of reach; "
            "look there, or unset RANK and WORLD_SIZE if this process is alone"
        )
        apart.__cause__ = TransientError()
        code = exit_code_of(apart) if exit_code is None else exit_code
        with ending_in_time(RENDEZVOUS_GRACE_SECONDS, 2 * timeout_seconds, describe(apart), code):
            try:
                dist.init_process_group(backend, timeout=timeout, **loopback_store(timeout))
            except (dist.DistStoreError, dist.DistNetworkError) as error:
                raise MissingRanksError(describe_missing(str(error), timeout_seconds)) from TransientError(str(error))
            if backend != "gloo":
                open_host_group(timeout)
        return
    for name, value in rank_variables(0, 1).items():
        os.environ.setdefault(name, value)  # Composer and StreamingDataset read these
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def describe_missing(said: str, timeout_seconds: float) -> str:
    """Say how many ranks joined, by torch's words on rank 0, or that rank 0 does not answer this one."""
    here = this_rank()
    address = f"{os.environ.get('MASTER_ADDR', LOOPBACK)}:{os.environ.get('MASTER_PORT', '29500')}"
    remedy = "start the others at the same time, or unset RANK and WORLD_SIZE"
    if "EADDRINUSE" in said or "already in use" in said:
        return f"MASTER_PORT: {address} is in use by another program; end that, or set MASTER_PORT to another port"
    if joined := re.search(r"(\d+)/\d+ clients joined|num_workers_joined=(\d+)", said):
        number = joined[1] or joined[2]
        return (
            f"RANK is {here.rank} and WORLD_SIZE is {here.world_size}, but {number} of {here.world_size} ranks joined "
            f"within {timeout_seconds:g} s at {address}; {remedy}"
        )
    return (
        f"RANK is {here.rank} and WORLD_SIZE is {here.world_size}, but rank 0 did not answer within "
        f"{timeout_seconds:g} s at {address}; {remedy}"
    )


def loopback_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the options by which the ranks of one node meet on loopback; none where ranks are on several nodes.
    torch's own store listens on every address, where others could write what ranks read."""
    here = this_rank()
    if here.local_world_size < here.world_size:
        return {}
    use_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}  # torchrun has opened it already
    port = int(os.environ.get("MASTER_PORT", "29500"))
    listener: int | None = None
    if here.rank == 0:
        try:
            listener = socket.create_server((LOOPBACK, port)).detach()  # the store closes it
        except OSError as error:
            raise MissingRanksError(
                f"MASTER_PORT: {LOOPBACK}:{port} cannot be listened on: {os.strerror(error.errno or 0)}; end the "
                "program that does, or set MASTER_PORT to another port"
            ) from TransientError(str(error))
    store = dist.TCPStore(LOOPBACK, port, here.world_size, here.rank == 0, timeout, master_listen_fd=listener)
    return {"store": store, "rank": here.rank, "world_size": here.world_size}


def use_loopback() -> None:
    """Let gloo and NCCL (or RCCL) listen on loopback alone, unless the environment names an interface: all ranks are on
    this node."""
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")


def check_address(address: str) -> None:
    """Raise ConfigError when rank 0's address does not resolve: torch would try for minutes, and say nothing. A name
    server that does not answer may answer later: torch then tries until its timeout."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        said = f"MASTER_ADDR: {address!r} does not resolve on {socket.gethostname()} ({error})"
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            print(f"{said}; trying on", file=sys.stderr, flush=True)
            return
        raise ConfigError(f"{said}; set it to a name or an address of rank 0's node that all nodes know") from None


def choose_device(device_type: str) -> torch.device:
    """Return this rank's device, and divide the cores among the node's ranks: with GPUs too, a save checks and hashes
    on them. Raises ConfigError, on all of a node's ranks, if they see too few devices."""
    here = this_rank()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // here.local_world_size))
    if device_type == "cuda":
        count = torch.cuda.device_count()
        if count < here.local_world_size:
            raise ConfigError(
                f"{here.local_world_size} ranks on {socket.gethostname()}, and rank {here.rank} sees {count} "
                f"device{'s' * (count > 1)}, expected {here.local_world_size}: each rank must see all devices of its "
                "node. Start no more ranks than devices; under srun use --gpus-per-node, not --gpus-per-task or "
                "--gpu-bind"
            )
        device = torch.device("cuda", here.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
