"""`llmfoundry-lite rehearse`: run the training code of one rank without the run's hardware. No torch in this process.

    llmfoundry-lite rehearse mpt-7b h100-8 --devices 16

Read the files of this folder in this order: here the run is checked and ranks are chosen. `fork_server.py` starts a
process whose CUDA is a library that computes nothing (`cuda.c`, which `build.py` compiles and `device.py` configures).
`child.py` trains two batches there, with other ranks and data replaced, and `measure.py` measures memory, FLOPs and
collectives. `report.py` prints them, and `search.py` looks for the largest microbatch.
"""

import sys
from collections.abc import Sequence

from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_lite import preflight
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_DONE, ConfigError
from llmfoundry_planner.plan.step import refuse_schedules
from llmfoundry_planner.rehearse.device import find_device
from llmfoundry_planner.rehearse.fork_server import ForkServer, Job
from llmfoundry_planner.rehearse.report import describe
from llmfoundry_planner.rehearse.search import search

MAX_COUNTS_APART = 64
"""How far to look for a number of devices that fits: nodes more or fewer, or devices if all are in one node."""


def rehearse(
    arguments: Sequence[str],
    *,
    num_devices: int,
    per_node: int = 8,
    rank: int | None = None,
    all_kinds: bool = False,
    num_batches: int = 2,
    hardware: str | None = None,
    searches: bool = False,
) -> int:
    """Rehearse ranks of a run one after the other and print what was measured. Return the exit code.

    It is 0, or that of the first rehearsal that fails, whose error output is printed.

    arguments: YAML files or names and `key=value` settings, as `train` takes them.
    per_node: devices in a node.
    rank: the only rank to rehearse. None: the first rank of each pipeline stage, which is rank 0 without a pipeline.
    all_kinds: rehearse the last rank of each stage too. It has the smallest shard if parameters do not divide evenly.
    num_batches: batches to train before memory is measured.
    hardware: name of the device. None: the one that the run's overlay is named after.
    searches: instead, search for the largest microbatch that fits, on `rank` or on the first rank of the stage that
        needs the most memory.

    Raises ConfigError for everything that can be refused before a process is started.
    """
    device = find_device(arguments, hardware)
    config = load_train_config(arguments).config
    refuse_schedules(config, "rehearse")
    check_count(config, num_devices, per_node)
    if rank is not None and not 0 <= rank < num_devices:
        raise ConfigError(f"--rank: {rank} given, expected 0 to {num_devices - 1}")
    preflight.check_installed("composer", "streaming")

    layout = layout_of(config, num_devices, per_node)
    if rank is not None:
        ranks = [rank]
    elif searches:
        ranks = [rank_of_fullest(config, layout)]
    else:
        ranks = find_kinds(layout, all_kinds)

    job = Job(list(arguments), config, device, num_devices, min(per_node, num_devices))
    with ForkServer() as server:
        if searches:
            return search(server, job, ranks[0])
        for rank in ranks:
            outcome = server.rehearse(
                job.arguments,
                device,
                num_devices=num_devices,
                per_node=job.per_node,
                rank=rank,
                num_batches=num_batches,
            )
            if outcome.exit_code != EXIT_DONE:
                print(outcome.stderr, end="", file=sys.stderr, flush=True)
                return outcome.exit_code
            print(describe(job, rank, outcome), flush=True)
    return EXIT_DONE


def find_kinds(layout: Layout, all_kinds: bool) -> list[int]:
    """Return the ranks whose memory differs: the first rank of each pipeline stage, in ascending order.

    `all_kinds` adds the last rank of each stage, which has the smallest shard. Example: 8 devices in 2 stages return
    [0, 4], or with `all_kinds` [0, 3, 4, 7].
    """
    stage_size = layout.world_size // layout.pipeline
    first_ranks = range(0, layout.world_size, stage_size)
    if not all_kinds:
        return list(first_ranks)
    last_ranks = [first_rank + stage_size - 1 for first_rank in first_ranks]
    return sorted({*first_ranks, *last_ranks})


def rank_of_fullest(config: TrainConfig, layout: Layout) -> int:
    """Return the first rank of the pipeline stage that needs the most memory, by the estimate. 0 without a pipeline."""
    if layout.pipeline == 1:
        return 0
    bytes_of_stages = [estimate.total_bytes for _, estimate in estimate_stages(config, layout)]
    fullest_stage = bytes_of_stages.index(max(bytes_of_stages))
    return layout.group(0, "pipeline")[fullest_stage]


def check_count(config: TrainConfig, num_devices: int, per_node: int) -> None:
    """Raise ConfigError for a number of devices that the run cannot be divided among.

    The error names the nearest smaller and the nearest larger number that the run accepts, if there are any within
    MAX_COUNTS_APART nodes.
    """
    error = find_refusal(config, num_devices, per_node)
    if error is None:
        return

    step = per_node if num_devices > per_node else 1
    start = num_devices // step * step
    smaller_counts = range(start, 0, -step)[: MAX_COUNTS_APART + 1]
    larger_counts = range(start + step, start + MAX_COUNTS_APART * step, step)
    nearest: list[str] = []
    for counts in (smaller_counts, larger_counts):
        for count in counts:
            if find_refusal(config, count, per_node) is None:
                nearest.append(str(count))
                break
    if not nearest:
        raise error
    raise ConfigError(f"--devices: {num_devices}: {error}; the nearest counts that fit: {' and '.join(nearest)}")


def find_refusal(config: TrainConfig, num_devices: int, per_node: int) -> ConfigError | None:
    """Return the error with which a launch on so many devices would refuse the run; None if it would accept it."""
    is_part_of_nodes = num_devices > per_node and num_devices % per_node != 0
    if is_part_of_nodes:
        return ConfigError(f"not a whole number of nodes of {per_node} (--per-node says how many devices a node has)")
    try:
        preflight.check(config, layout_of(config, num_devices, per_node), must_exist=False)
    except ConfigError as error:
        return error
    return None
