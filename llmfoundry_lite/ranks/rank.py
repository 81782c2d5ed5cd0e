"""This process among the ranks of its launch, as `composer`, `torchrun` or `srun` tell it. No torch."""

import os
import re
from collections.abc import MutableMapping
from typing import NamedTuple

from llmfoundry_lite.errors import ConfigError


class Rank(NamedTuple):
    """This process in its launch, as `composer` and `torchrun` tell it; alone without them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def adopt_srun(environment: MutableMapping[str, str] = os.environ) -> None:
    """Say in torch's words what `srun` says in its own; nothing if another launcher has spoken, or none.

    Raises ConfigError when nodes have different numbers of tasks: a node's ranks are counted from those of the first.

    SLURM_STEP_NUM_TASKS is set for the tasks of a step, not for the batch script around it, which would otherwise
    look like the first task of many.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    num_tasks, num_nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks // num_nodes)))
    defaults = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[0]),
        "NODE_RANK": environment["SLURM_NODEID"],
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        # Steps of one job share its nodes, jobs may too: the port comes from both numbers.
        "MASTER_PORT": str(20000 + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])) % 20000),
    }
    for name, value in defaults.items():
        environment.setdefault(name, value)
    if len(set(per_node)) > 1:
        raise ConfigError(
            f"srun: nodes with {', '.join(map(str, per_node))} tasks; every node must have as many as the others "
            "(--ntasks-per-node)"
        )


def tasks_per_node(text: str) -> list[int]:
    """SLURM's `8(x2),4` is 8, 8, 4."""
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(count[1]) for count in counts if count for _ in range(int(count[2] or 1))]


def first_host(node_list: str) -> str:
    """The first of SLURM's `gpu[003-007,012],login` (gpu003); names may have several brackets."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def this_rank() -> Rank:
    names, alone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), (0, 1, 0, 1)
    return Rank(*(int(os.environ.get(name, default)) for name, default in zip(names, alone, strict=True)))
