"""Start of a launch's process group: over NCCL (RCCL on AMD) with accelerators, over gloo without.

The process group is torch's connection of all ranks. To start it, ranks meet at a store that rank 0 keeps (the
rendezvous). `start_process_group` does so, and turns ranks that do not meet into an error that names the cause.
`choose_device` gives each rank its device.
"""

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
"""Time for which a rank that is asked to leave still waits for others: they may have left without it."""

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = "29500"
"""torch's port of the rendezvous, where MASTER_PORT is not set."""


def start_process_group(device_type: str, timeout_seconds: float, exit_code: int | None = None) -> None:
    """Start the process group of all ranks, over NCCL for "cuda" and gloo otherwise, unless there is one.

    Collective: every rank calls this, and waits for the others. A process without a launcher is a world of one, and
    opens no connection.

    timeout_seconds: limit of the rendezvous, and of every collective afterwards.
    exit_code: code with which this process exits if rank 0 is frozen. torch then waits without an end, so the process
        exits after twice the timeout. None is the code of a fault that may pass.

    Raises ConfigError if a launcher's variables contradict each other or rank 0's address is unknown, and
    MissingRanksError if a rank is missing after the timeout.
    """
    if dist.is_initialized():
        return
    check_launch()
    backend = "nccl" if device_type == "cuda" else "gloo"

    # A process alone has a store in its memory.
    this = this_rank()
    if this.world_size == 1:
        for name, value in rank_variables(0, 1).items():
            os.environ.setdefault(name, value)  # Composer and StreamingDataset read these
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return

    # One of several ranks goes on. Prepare the error for a rank 0 that does not answer: once torch waits, in C++, only
    # the text can be printed.
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

    # Wait for the other ranks.
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

    `torch_error` is the text of torch's error. On rank 0, it says how many ranks have joined, as in "… 3/4 clients
    joined.", and the result says "3 of 4 ranks joined within 60 s at 10.0.0.3:29500". Other ranks only know that rank 0
    did not answer them. If the port is taken, that is the cause, and is all that the text says.
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
    the other ranks connect to it, so this waits for rank 0. If all ranks are on this node, gloo and NCCL are confined
    to loopback, too.

    Returns {"store": …, "rank": …, "world_size": …}. The options are empty if ranks are on several nodes, or if
    torchrun has opened a store already. Raises MissingRanksError on rank 0 if the port is taken.
    """
    this = this_rank()
    if this.local_world_size < this.world_size:
        return {}
    use_loopback()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return {}

    # Rank 0 listens on loopback itself, and passes the socket's descriptor to the store.
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
    """Raise ConfigError if the name of rank 0's node (MASTER_ADDR) does not resolve.

    torch would try for minutes, and print nothing. If the name server does not answer (EAI_AGAIN), it may do so later.
    That is only printed, and torch tries until its timeout.
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

    Also sets the number of torch's threads, unless OMP_NUM_THREADS is set: each rank gets an equal part of the node's
    cores. It is set with GPUs too, because a save computes checksums on the cores.

    Raises ConfigError, on all ranks of a node, if they see fewer GPUs than the node has ranks.
    """
    # Divide the cores.
    this = this_rank()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_usable_cores() // this.local_world_size))
    if device_type != "cuda":
        return torch.device("cpu")

    # Local rank N takes device N, so each rank must see all of them.
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
