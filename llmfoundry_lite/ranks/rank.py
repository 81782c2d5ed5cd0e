"""This process among the ranks of its launch, as `composer`, `torchrun` or `srun` tell it. No torch.

Launchers describe the launch in environment variables. `adopt_srun` translates those of `srun` into the ones that torch
reads, `check_launch` refuses contradictions, and `this_rank` reads the result. `rank_variables` and `rendezvous` are
for a program that starts ranks itself. Other functions are about the memory and the cores of this process.
"""

import ctypes
import os
import platform
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple, NoReturn

from llmfoundry_lite.errors import ConfigError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables that say which rank of its launch a process is, in the order of `Rank`."""
MAX_PORT = 65535
FIRST_SRUN_PORT, NUM_SRUN_PORTS = 20000, 12000
"""Range of the rendezvous port under srun. Linux gives programs that ask for any port those from 32768."""


class Rank(NamedTuple):
    """Which rank of its launch a process is: among all ranks, and among those on its node (local)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables that torch reads when it is imported, except those that the shell has set.

    GOMP_SPINCOUNT is set too, unless the user has chosen how threads wait (OMP_WAIT_POLICY). On a CPU, torch's threads
    wait for each other in a loop before they sleep. Here the loop has a tenth of libgomp's rounds. That makes a small
    model train 7 times as fast beside ten other programs on two cores, and as fast as before if it is alone.
    """
    defaults = dict(variables)
    if "OMP_WAIT_POLICY" not in os.environ and "OMP_WAIT_POLICY" not in variables:
        defaults.setdefault("GOMP_SPINCOUNT", "30000")  # a tenth of libgomp's default, 300,000
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def adopt_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables (RANK, WORLD_SIZE, MASTER_ADDR and so on) from those that `srun` sets for each task.

    Nothing is changed if another launcher has set RANK, or if this is not one of several tasks of srun. It is
    recognised by SLURM_STEP_NUM_TASKS, which srun sets for the tasks of a step. The batch script around them does not
    have it, and would otherwise look like the first of many tasks.

    The sixth of 8 tasks on the nodes gpu[003-004] gets RANK 5, WORLD_SIZE 8, LOCAL_RANK 1, LOCAL_WORLD_SIZE 4,
    NODE_RANK 1, MASTER_ADDR gpu003, and a MASTER_PORT that follows from the numbers of the job and the step.

    Raises ConfigError, on all ranks of a node, if nodes have different numbers of tasks, or do not have consecutive
    ranks: local ranks, and which ranks share a node, are computed from both. Raises it on rank 0 if that is not on
    the first node.
    """
    if "RANK" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return

    # Read srun's variables.
    check_srun(environment)
    num_tasks = int(environment["SLURM_STEP_NUM_TASKS"])
    num_nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    tasks_of_nodes = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks // num_nodes)))
    has_master_address = "MASTER_ADDR" in environment

    # Set torch's variables, except those that the user has set. Steps of one job share its nodes, and jobs may too, so
    # the port comes from the numbers of both. The factor keeps the first 31 steps of consecutive jobs apart.
    step_number = int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])
    defaults = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_of_nodes[0]),
        "NODE_RANK": environment["SLURM_NODEID"],
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(FIRST_SRUN_PORT + step_number % NUM_SRUN_PORTS),
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    check_srun_ranks(environment, tasks_of_nodes, has_master_address=has_master_address)


def check_srun(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if variables that `srun` sets for a task are missing, or are not numbers.

    That happens if a shell has kept some variables of an earlier task. `environment` has SLURM_STEP_NUM_TASKS.
    """
    number_names = ("STEP_NUM_TASKS", "PROCID", "LOCALID", "NODEID", "JOB_ID", "STEP_ID")
    for name in (*(f"SLURM_{number}" for number in number_names), "SLURM_STEP_NODELIST"):
        value = environment.get(name)
        if value is None:
            num_tasks = environment["SLURM_STEP_NUM_TASKS"]
            raise ConfigError(
                f"SLURM_STEP_NUM_TASKS is {num_tasks}, and {name} is not set; start the ranks with srun, or unset "
                "SLURM_STEP_NUM_TASKS"
            )
        if name != "SLURM_STEP_NODELIST" and not value.isdecimal():
            raise ConfigError(f"{name}: {value!r} given, expected a whole number, as srun sets it")


def check_srun_ranks(
    environment: Mapping[str, str], tasks_of_nodes: Sequence[int], *, has_master_address: bool
) -> None:
    """Raise ConfigError if srun has not placed ranks as torch expects them.

    Each node must have the same number of ranks, and consecutive ones: with two nodes of four tasks, node 1 has the
    ranks 4 to 7, and its local rank 2 is rank 6. Unless the user has set MASTER_ADDR (`has_master_address`), rank 0
    must be on the first node, whose name `adopt_srun` has taken for MASTER_ADDR.

    `tasks_of_nodes` has the number of tasks of each node. SLURM_GTIDS lists the ranks of this node, if srun has set it.
    """
    # Each node must have the same number of ranks.
    if len(set(tasks_of_nodes)) > 1:
        raise ConfigError(
            f"srun: nodes have {', '.join(map(str, tasks_of_nodes))} tasks; every node must have the same number "
            "(--ntasks-per-node)"
        )

    # This node's ranks must be consecutive, in the order of the nodes.
    num_local_ranks = tasks_of_nodes[0]
    rank = int(environment["SLURM_PROCID"])
    node = int(environment["SLURM_NODEID"])
    local_rank = int(environment["SLURM_LOCALID"])
    expected_ranks = list(range(node * num_local_ranks, (node + 1) * num_local_ranks))
    listed_ranks = environment.get("SLURM_GTIDS", "").split(",")
    known_ranks = [int(text) for text in listed_ranks if text] or [rank]
    is_this_rank_expected = rank == expected_ranks[0] + local_rank
    if not is_this_rank_expected or known_ranks not in (expected_ranks, [rank]):
        raise ConfigError(
            f"srun: node {node} has the ranks {', '.join(map(str, known_ranks))}, expected "
            f"{', '.join(map(str, expected_ranks))}; give each node consecutive ranks, in the order of the nodes "
            "(--distribution=block)"
        )

    # Rank 0 must be where the others will look for it.
    first_node = environment["MASTER_ADDR"]
    this_node = environment.get("SLURMD_NODENAME", first_node)
    if rank == 0 and not has_master_address and this_node != first_node:
        raise ConfigError(
            f"srun: rank 0 is on {this_node}, and {first_node} is the first of SLURM's list of nodes; "
            f"set MASTER_ADDR={this_node}"
        )


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a launcher's variables contradict each other, or are not numbers.

    A scheduler or a shell may have kept some of an earlier launch. Without this check, a rank would wait for ranks
    that do not exist until its timeout. An example is WORLD_SIZE 8 without RANK: "WORLD_SIZE is 8, and RANK is not set;
    unset WORLD_SIZE, or start 8 ranks".
    """
    # Read the numbers. A variable that is not set has the value of a process without a launcher.
    texts = rank_variables(0, 1)
    for name, default in texts.items():
        text = environment.get(name, default)
        if not text.isdecimal():
            raise ConfigError(f"{name}: {text!r} given, expected a whole number; unset it, or use a launcher")
        texts[name] = text
    rank, world_size, local_rank, local_world_size = (int(texts[name]) for name in RANK_VARIABLES)

    def describe_variable(name: str) -> str:
        return f"{name} is {environment[name]}" if name in environment else f"{name} is not set"

    def refuse(first: str, second: str, remedy: str) -> NoReturn:
        """Raise ConfigError for two variables that contradict each other."""
        raise ConfigError(f"{describe_variable(first)}, and {describe_variable(second)}; {remedy}")

    # Compare the numbers with each other.
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

    # Check the address at which the ranks meet.
    port = environment.get("MASTER_PORT", "29500")
    if not (port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise ConfigError(f"MASTER_PORT: {port!r} given, expected a free port of rank 0's machine, up to {MAX_PORT}")
    is_over_nodes = local_world_size < world_size
    if is_over_nodes:  # on one machine, both have defaults
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                refuse("WORLD_SIZE", name, f"set {name} to that of rank 0, or unset WORLD_SIZE and RANK")


def step_over_nodes(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return an id of this attempt at a SLURM step over several nodes, the same on all its nodes, such as "4711.0.2.0".

    It consists of the job's number, the number of its restarts, the step's number, and torchrun's number of restarts. A
    requeued job keeps its number and counts its steps anew, so the first two alone would not do.

    Returns None for a launch on one node or by another scheduler.
    """
    this = this_rank()
    is_on_one_node = this.world_size == this.local_world_size
    if is_on_one_node or "SLURM_STEP_ID" not in environment:
        return None
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    return ".".join(environment.get(name) or "0" for name in names)


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's number of tasks on each node.

    "8(x2),4" is [8, 8, 4]: two nodes with 8 tasks each, and one with 4. Parts that cannot be parsed are left out.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            num_nodes = int(match[2] or 1)
            counts += [int(match[1])] * num_nodes
    return counts


def first_host(node_list: str) -> str:
    """Return the first name in SLURM's list of nodes, such as "gpu003" for "gpu[003-004,012],login".

    A name may have several brackets, each with numbers and ranges. The first number of each is taken, so that
    "rack[1-2]n[07,09]" is "rack1n07".
    """
    first_entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)  # up to a comma outside brackets
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first_entry[0] if first_entry else "")


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the system, so that its resident memory is what it uses.

    glibc keeps freed memory otherwise. With another C library nothing is done.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def count_usable_cores() -> int:
    """Count the cores that this process may use, fewer than the machine's in a container or a batch job."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_variables(rank: int, num_ranks: int, ranks_per_node: int | None = None) -> dict[str, str]:
    """Return the environment variables by which a process knows its rank, under torch's names.

    Rank 5 of 8 with 4 ranks on a node has RANK 5, WORLD_SIZE 8, NODE_RANK 1, LOCAL_RANK 1 and LOCAL_WORLD_SIZE 4.
    Without `ranks_per_node`, all ranks are on one node.
    """
    ranks_per_node = ranks_per_node or num_ranks
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "NODE_RANK": rank // ranks_per_node,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
    }
    return {name: str(number) for name, number in numbers.items()}


def rendezvous() -> dict[str, str]:
    """Return the environment variables by which ranks on this machine find each other: loopback, and a free port.

    The port is free now, and may be taken by another program before rank 0 listens on it.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


def this_rank() -> Rank:
    """Read this process's rank from the environment; rank 0 of 1 without a launcher.

    This never fails, because the code that reports an error needs a rank too. A variable that is not a number counts as
    not set. If the local rank is impossible, the process counts as alone on its node. `check_launch` refuses both.
    """
    defaults = rank_variables(0, 1)
    numbers = []
    for name in RANK_VARIABLES:
        text = os.environ.get(name, "")
        numbers.append(int(text if text.isdecimal() else defaults[name]))
    rank = Rank(*numbers)
    if rank.local_rank < rank.local_world_size <= rank.world_size:
        return rank
    return rank._replace(local_rank=0, local_world_size=1)
