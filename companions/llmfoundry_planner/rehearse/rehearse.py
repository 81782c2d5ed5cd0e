"""Rehearse a run without its hardware: one rank's real code, on devices that are not there. No torch."""

import sys
from collections.abc import Sequence

from llmfoundry_layouts.stage_memory import estimate_stages
from llmfoundry_lite import preflight
from llmfoundry_lite.config.layout import Layout, layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_DONE, ConfigError
from llmfoundry_planner.rehearse.device import find_device
from llmfoundry_planner.rehearse.fork_server import ForkServer, Job
from llmfoundry_planner.rehearse.report import describe
from llmfoundry_planner.rehearse.search import search

MAX_COUNTS_APART = 64
"""A count that fits is looked for among so many nodes (or devices of one node) more, and as many fewer."""


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
    """Rehearse ranks in turn and print what was measured, or search for the largest microbatch of one.

    `rank`: that one alone. By default the first rank, and in a pipeline that of each stage; with `all_kinds` also the
    last one of each. A search takes the first rank of the fullest stage. Returns the exit code: 0, or that of the first
    rehearsal that fails. Raises ConfigError for what can be refused before anything starts.
    """
    device = find_device(arguments, hardware)
    config = load_train_config(arguments).config
    check_count(config, num_devices, per_node)
    if rank is not None and not 0 <= rank < num_devices:
        raise ConfigError(f"--rank: {rank} given, expected 0 to {num_devices - 1}")
    preflight.check_installed("composer", "streaming")
    layout = layout_of(config, num_devices, per_node)
    if rank is not None:
        ranks = [rank]
    else:
        ranks = [rank_of_fullest(config, layout)] if searches else find_kinds(layout, all_kinds)
    job = Job(list(arguments), config, device, num_devices, min(per_node, num_devices))
    with ForkServer() as server:
        if searches:
            return search(server, job, ranks[0])
        for rank in ranks:
            outcome = server.rehearse(
                *(job.arguments, device),
                num_devices=num_devices,
                per_node=job.per_node,
                rank=rank,
                num_batches=num_batches,
            )
            if outcome.exit_code != EXIT_DONE:
                print(outcome.said, end="", file=sys.stderr, flush=True)
                return outcome.exit_code
            print(describe(job, rank, outcome), flush=True)
    return EXIT_DONE


def find_kinds(layout: Layout, all_kinds: bool) -> list[int]:
    """Return the first rank of each stage; with `all_kinds` also the last one, which has the smallest share."""
    stage_size = layout.world_size // layout.pipeline
    firsts = range(0, layout.world_size, stage_size)
    return sorted({*firsts, *(first + stage_size - 1 for first in firsts)}) if all_kinds else list(firsts)


def rank_of_fullest(config: TrainConfig, layout: Layout) -> int:
    """Return the first rank of the stage that needs the most."""
    if layout.pipeline == 1:
        return 0
    sizes = [estimate.total_bytes for _, estimate in estimate_stages(config, layout)]
    return layout.group(0, "pipeline")[sizes.index(max(sizes))]


def check_count(config: TrainConfig, num_devices: int, per_node: int) -> None:
    """Raise ConfigError for a number of devices that nodes, batch or mesh do not divide, with the nearest that fit."""
    error = find_refusal(config, num_devices, per_node)
    if error is None:
        return
    step = per_node if num_devices > per_node else 1
    start = num_devices // step * step
    below = range(start, 0, -step)[: MAX_COUNTS_APART + 1]
    above = range(start + step, start + MAX_COUNTS_APART * step, step)
    nearest = [
        next((n for n in counts if find_refusal(config, n, per_node) is None), None) for counts in (below, above)
    ]
    fitting = " and ".join(str(n) for n in nearest if n is not None)
    if not fitting:
        raise error
    raise ConfigError(f"--devices: {num_devices}: {error}; the nearest counts that fit: {fitting}")


def find_refusal(config: TrainConfig, num_devices: int, per_node: int) -> ConfigError | None:
    if num_devices > per_node and num_devices % per_node:
        return ConfigError(f"not a whole number of nodes of {per_node} (--per-node says how many devices a node has)")
    try:
        preflight.check(config, layout_of(config, num_devices, per_node), must_exist=False)
    except ConfigError as error:
        return error
    return None
