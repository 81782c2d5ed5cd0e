"""This process among the ranks of its launch, as `composer`, `torchrun` or `srun` tell it. No torch."""

import ctypes
import os
import platform
import re
import socket
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple, NoReturn

from llmfoundry_lite.errors import ConfigError

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that say a process's place in its launch, in the order of `Rank`."""


class Rank(NamedTuple):
    """A process's place in its launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def set_environment(given: Mapping[str, str]) -> None:
    """Set the variables that torch reads when it is imported, unless the shell has set them.

    On a CPU its threads wait for each other in a loop before they sleep. Here the loop has a tenth of libgomp's rounds.
    Beside ten other programs on two cores a small model trains 7 times as fast by that, and as fast as before alone.
    """
    spins = {} if "OMP_WAIT_POLICY" in {*os.environ, *given} else {"GOMP_SPINCOUNT": "30000"}
    for name, value in {**spins, **given}.items():
        os.environ.setdefault(name, value)


def adopt_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Translate `srun`'s variables to torch's, unless another launcher has set these, or none.

    Raises ConfigError, on all of a node's ranks, when nodes have different numbers of tasks, or do not have consecutive
    ranks: local ranks, and which ranks share a node, are computed from both. SLURM_STEP_NUM_TASKS is set for the tasks
    of a step, not for the batch script around it, which would otherwise look like the first task of many.
    """
    if "RANK" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return
    check_srun(environment)
    num_tasks, num_nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks // num_nodes)))
    is_told = "MASTER_ADDR" in environment
    defaults = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[0]),
        "NODE_RANK": environment["SLURM_NODEID"],
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        # Steps of one job share its nodes, jobs may too: the port comes from both numbers. Linux gives programs that
        # ask for any port those from 32768.
        "MASTER_PORT": str(20000 + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])) % 12000),
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    if len(set(per_node)) > 1:
        raise ConfigError(
            f"srun: nodes with {', '.join(map(str, per_node))} tasks; every node must have as many as the others "
            "(--ntasks-per-node)"
        )
    rank, node, local = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "NODEID", "LOCALID"))
    expected = list(range(node * per_node[0], (node + 1) * per_node[0]))
    ranks = [int(text) for text in environment.get("SLURM_GTIDS", "").split(",") if text] or [rank]
    if rank != expected[0] + local or ranks not in (expected, [rank]):
        raise ConfigError(
            f"srun: node {node} has the ranks {', '.join(map(str, ranks))}, expected {', '.join(map(str, expected))}; "
            "give each node consecutive ranks, in the order of the nodes (--distribution=block)"
        )
    here = environment.get("SLURMD_NODENAME", environment["MASTER_ADDR"])
    if rank == 0 and not is_told and here != environment["MASTER_ADDR"]:
        raise ConfigError(
            f"srun: rank 0 is on {here}, and {environment['MASTER_ADDR']} is the first of SLURM's list of nodes; "
            f"set MASTER_ADDR={here}"
        )


def check_srun(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if SLURM's variables are not those that `srun` sets for a task, such as a rest of them."""
    numbers = ("STEP_NUM_TASKS", "PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID")
    for name in (*(f"SLURM_{number}" for number in numbers), "SLURM_STEP_NODELIST"):
        value = environment.get(name)
        if value is None:
            tasks = environment["SLURM_STEP_NUM_TASKS"]
            raise ConfigError(
                f"SLURM_STEP_NUM_TASKS is {tasks}, and {name} is not set; start the ranks with srun, or unset "
                "SLURM_STEP_NUM_TASKS"
            )
        if name != "SLURM_STEP_NODELIST" and not value.isdecimal():
            raise ConfigError(f"{name}: {value!r} given, expected a whole number, as srun sets it")


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a launcher's variables make this process no rank of a launch, such as a rest of them that a
    scheduler or a shell has set. A rank would wait for the others until its timeout."""
    numbers = rank_variables(0, 1)
    for name, alone in numbers.items():
        text = environment.get(name, alone)
        if not text.isdecimal():
            raise ConfigError(f"{name}: {text!r} given, expected a whole number; unset it, or use a launcher")
        numbers[name] = text
    rank, world_size, local_rank, local_world_size = (int(numbers[name]) for name in PLACE)

    def describe(name: str) -> str:
        return f"{name} is {environment[name]}" if name in environment else f"{name} is not set"

    def refuse(first: str, second: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{describe(first)}, and {describe(second)}; {remedy}")

    if world_size > 1 and "RANK" not in environment:
        refuse("WORLD_SIZE", "RANK", f"unset WORLD_SIZE, or start {world_size} ranks")
    if rank >= world_size:
        refuse("RANK", "WORLD_SIZE", "unset RANK, or set WORLD_SIZE to the number of ranks, which count from 0")
    if not 0 < local_world_size <= world_size:
        remedy = "unset LOCAL_WORLD_SIZE, or set it to the number of ranks on this machine"
        refuse("LOCAL_WORLD_SIZE", "WORLD_SIZE", remedy)
    if local_rank >= local_world_size:
        remedy = "unset LOCAL_RANK, or set LOCAL_WORLD_SIZE to the number of ranks on this machine"
        refuse("LOCAL_RANK", "LOCAL_WORLD_SIZE", remedy)
    if world_size == 1:
        return

    port = environment.get("MASTER_PORT", "29500")
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"MASTER_PORT: {port!r} given, expected a free port of rank 0's machine, up to 65535")
    if local_world_size < world_size:  # one machine has defaults
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                refuse("WORLD_SIZE", name, f"set {name} to that of rank 0, or unset WORLD_SIZE and RANK")


def step_over_nodes(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return an id of this try of SLURM's step, the same on all its nodes; None for one node or another scheduler. A
    requeued job keeps its number and counts its steps anew."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    here = this_rank()
    if here.world_size == here.local_world_size or "SLURM_STEP_ID" not in environment:
        return None
    return ".".join(environment.get(name) or "0" for name in names)


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's `8(x2),4` as 8, 8, 4."""
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(count[1]) for count in counts if count for _ in range(int(count[2] or 1))]


def first_host(node_list: str) -> str:
    """Return gpu003 of SLURM's `gpu[003-004,012],login`; names may have several brackets."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "")


def return_freed_memory() -> None:
    """Return freed memory to the system, so that for a while all resident memory is in use."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def count_usable_cores() -> int:
    """Count the cores that this process may use, fewer than the machine's in a container or a batch job."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_variables(rank: int, num_ranks: int, ranks_per_node: int | None = None) -> dict[str, str]:
    """Return the environment variables by which a process knows its rank, under torch's names. Default: one node."""
    per_node = ranks_per_node or num_ranks
    numbers = {"RANK": rank, "WORLD_SIZE": num_ranks, "NODE_RANK": rank // per_node}
    numbers |= {"LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    return {name: str(number) for name, number in numbers.items()}


def rendezvous() -> dict[str, str]:
    """Return the variables by which the ranks of this machine find each other: a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


def this_rank() -> Rank:
    """Read this process's rank from the environment; rank 0 of 1 without a launcher.

    What is no number, or no place on a machine, counts as not set, because errors are told by a machine's first rank.
    `check_launch` refuses both.
    """
    numbers = []
    for name in PLACE:
        text = os.environ.get(name, "")
        numbers.append(int(text if text.isdecimal() else rank_variables(0, 1)[name]))
    found = Rank(*numbers)
    if found.local_rank < found.local_world_size <= found.world_size:
        return found
    return found._replace(local_rank=0, local_world_size=1)
