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
from llmfoundry_lite.ranks.ending import describe_error, exit_code_of, limited_wait
from llmfoundry_lite.ranks.exchange import open_host_group
from llmfoundry_lite.ranks.rank import check_launch, count_usable_cores, rank_variables, this_rank

RENDEZVOUS_GRACE_SECONDS = 5.0
"""How long a rank that is asked to leave still waits for others: they may have left without it."""

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = "29500"
"""torch's port of the rendezvous, where MASTER_PORT is not set."""


def start_process_group(device_type: str, timeout_seconds: float, exit_code: int | None = None) -> None:
    """Start the process group of all ranks, over NCCL for "cuda" and gloo otherwise, unless there is one.

    Collective: every rank calls this, and waits for the others. A process without a launcher is a world of one, and
    opens no connection. `timeout_seconds` is the limit of the rendezvous, and of every collective afterwards.

    Raises ConfigError if a launcher's variables contradict each other or rank 0's address is unknown, and
    MissingRanksError if a rank is missing after the timeout. If rank 0 is frozen, torch waits without an end. So the
    process then exits after twice the timeout with `exit_code`, by default that of a fault that may pass.
    """
    if dist.is_initialized():
        return
    check_launch()
    backend = "nccl" if device_type == "cuda" else "gloo"
    this = this_rank()
    if this.world_size == 1:
        for name, value in rank_variables(0, 1).items():
            os.environ.setdefault(name, value)  # Composer and StreamingDataset read these
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return

    address = os.environ.get("MASTER_ADDR")
    if address:
        check_address(address)
    no_answer = MissingRanksError(
        f"rank {this.rank}: the ranks have not met in {2 * timeout_seconds:g} s, and rank 0 at "
        f"{os.environ.get('MASTER_ADDR', LOOPBACK)} does not answer: it is frozen, or its node is out of reach; "
        "look there, or unset RANK and WORLD_SIZE if this process is alone"
    )
    no_answer.__cause__ = TransientError()
    if exit_code is None:
        exit_code = exit_code_of(no_answer)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    with limited_wait(RENDEZVOUS_GRACE_SECONDS, 2 * timeout_seconds, describe_error(no_answer), exit_code):
        try:
            dist.init_process_group(backend, timeout=timeout, **loopback_store(timeout))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise MissingRanksError(describe_missing(str(error), timeout_seconds)) from TransientError(str(error))
        if backend != "gloo":
            open_host_group(timeout)


def describe_missing(torch_error: str, timeout_seconds: float) -> str:
    """Return the text of an error for ranks that have not met: how many have joined, or that rank 0 did not answer.

    torch says on rank 0 how many have joined, in `torch_error`. Other ranks only know that rank 0 did not answer them.
    """
    this = this_rank()
    address = f"{os.environ.get('MASTER_ADDR', LOOPBACK)}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}"
    if "EADDRINUSE" in torch_error or "already in use" in torch_error:
        return f"MASTER_PORT: {address} is in use by another program; end that, or set MASTER_PORT to another port"

    joined = re.search(r"(\d+)/\d+ clients joined|num_workers_joined=(\d+)", torch_error)
    problem = f"rank 0 did not answer within {timeout_seconds:g} s at {address}"
    if joined:
        num_joined = joined[1] or joined[2]
        problem = f"{num_joined} of {this.world_size} ranks joined within {timeout_seconds:g} s at {address}"
    return (
        f"RANK is {this.rank} and WORLD_SIZE is {this.world_size}, but {problem}; start the others at the same time, "
        "or unset RANK and WORLD_SIZE"
    )


def loopback_store(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return options for `init_process_group` with which ranks that are all on this node meet on loopback.

    torch's own store listens on all addresses, where others could write what ranks read. Rank 0 opens the store, and
    the other ranks connect to it. The options are empty if ranks are on several nodes, or if torchrun has opened a
    store already. Raises MissingRanksError on rank 0 if the port is taken.
    """
    this = this_rank()
    if this.local_world_size < this.world_size:
        return {}
    use_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}

    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    is_master = this.rank == 0
    listener: int | None = None
    if is_master:
        try:
            listener = socket.create_server((LOOPBACK, port)).detach()  # the store closes it
        except OSError as error:
            raise MissingRanksError(
                f"MASTER_PORT: {LOOPBACK}:{port} cannot be listened on: {os.strerror(error.errno or 0)}; end the "
                "program that does, or set MASTER_PORT to another port"
            ) from TransientError(str(error))
    store = dist.TCPStore(LOOPBACK, port, this.world_size, is_master, timeout, master_listen_fd=listener)
    return {"store": store, "rank": this.rank, "world_size": this.world_size}


def use_loopback() -> None:
    """Let gloo and NCCL (or RCCL) listen on loopback alone, unless the environment names another interface.

    For ranks that are all on this node.
    """
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")


def check_address(address: str) -> None:
    """Raise ConfigError if the name of rank 0's node (MASTER_ADDR) does not resolve. torch would try for minutes
    silently.

    If the name server does not answer, it may do so later. That is only printed, and torch tries until its timeout.
    """
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        problem = f"MASTER_ADDR: {address!r} does not resolve on {socket.gethostname()} ({error})"
        may_resolve_later = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        if may_resolve_later:
            print(f"{problem}; trying on", file=sys.stderr, flush=True)
            return
        raise ConfigError(f"{problem}; set it to a name or an address of rank 0's node that all nodes know") from None


def choose_device(device_type: str) -> torch.device:
    """Return this rank's device, "cpu" or the GPU of its local rank, and make it PyTorch's current one.

    torch gets an equal part of the node's cores for its threads, unless OMP_NUM_THREADS is set. With GPUs too, since
    a save checks and hashes on the cores. Raises ConfigError, on all ranks of a node, if they see fewer GPUs than the
    node has ranks.
    """
    this = this_rank()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // this.local_world_size))
    if device_type != "cuda":
        return torch.device("cpu")

    num_devices = torch.cuda.device_count()
    if num_devices < this.local_world_size:
        raise ConfigError(
            f"{this.local_world_size} ranks on {socket.gethostname()}, and rank {this.rank} sees {num_devices} "
            f"device{'s' * (num_devices > 1)}, expected {this.local_world_size}: each rank must see all devices of its "
            "node. Start no more ranks than devices; under srun use --gpus-per-node, not --gpus-per-task or --gpu-bind"
        )
    device = torch.device("cuda", this.local_rank)
    torch.cuda.set_device(device)
    return device
