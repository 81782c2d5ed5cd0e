"""`llmfoundry-lite rehearse --search`: find the largest microbatch that fits, by rehearsing several. No torch.

The sizes that are tried divide a device's batch. The first is the largest that fits by the estimate. From there
`bisect` narrows the sizes down.
"""

import dataclasses
import sys
from collections.abc import Callable

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.hardware import GIB
from llmfoundry_planner.plan.search import find_sizes
from llmfoundry_planner.rehearse.fork_server import ForkServer, Job, Outcome

UNREHEARSED_BYTES = 2 * GIB
"""Kept free for NCCL's buffers and the driver's context, which a rehearsal does not have."""


def search(server: ForkServer, job: Job, rank: int = 0) -> int:
    """Search for the largest microbatch of a rank. Print each trial, and the answer as a `key=value` setting.

    Returns the exit code: 0, or 2 if not even the smallest size fits. If a rehearsal fails in another way, its error
    output is printed and its exit code returned.
    """
    layout = layout_of(job.config, job.num_devices, job.per_node)
    device_batch_size = job.config.global_train_batch_size // layout.num_data_ranks
    sizes = find_sizes(job.config, device_batch_size)
    limit_bytes = job.device.free_bytes - UNREHEARSED_BYTES
    estimated_bytes: dict[int, int] = {}
    for size in sizes:
        config = dataclasses.replace(job.config, device_train_microbatch_size=size)
        estimated_bytes[size] = estimate_training_memory(config, layout, job.device).total_bytes
    first_size = max((size for size in sizes if estimated_bytes[size] <= limit_bytes), default=1)

    print(
        f"search         {job.config.run_name} on {job.num_devices} x {job.device.name}, as rank {rank}",
        f"batch          {device_batch_size} samples on this rank",
        f"memory         {limit_bytes / GIB:.2f} GiB for torch; {UNREHEARSED_BYTES / GIB:.0f} GiB are kept for NCCL "
        "and the driver",
        "microbatch   allocated    reserved    estimate, GiB    seconds",
        sep="\n",
        flush=True,
    )
    outcomes: list[Outcome] = []

    def attempt(size: int) -> bool | None:
        """Rehearse a size. Return whether it fits; None if the rehearsal fails for another reason than memory."""
        overrides = sized_batch(job.config, size, device_batch_size, layout.num_data_ranks)
        outcome = server.rehearse(
            [*job.arguments, *overrides],
            job.device,
            num_devices=job.num_devices,
            per_node=job.per_node,
            rank=rank,
            counts_operations=False,
            spare_bytes=UNREHEARSED_BYTES,
        )
        outcomes.append(outcome)
        fits = outcome.exit_code == EXIT_DONE
        if not fits and "is_out_of_memory" not in outcome.measurements:
            return None
        print(describe(size, outcome, estimated_bytes[size]), flush=True)
        return fits

    largest_size = bisect(sizes, first_size, attempt)
    if largest_size:
        print(f"answer         device_train_microbatch_size={largest_size}", flush=True)
        return EXIT_DONE
    last_outcome = outcomes[-1]
    print(last_outcome.stderr, end="", file=sys.stderr, flush=True)
    return last_outcome.exit_code if largest_size is None else EXIT_USER


def bisect(sizes: list[int], first: int, attempt: Callable[[int], bool | None]) -> int | None:
    """Return the largest of `sizes` that fits, or 0 if none does. Return None as soon as an attempt returns None.

    sizes: ascending. If one fits, all smaller ones do.
    first: one of them, which is tried first, because the estimate is seldom far off. For the same reason its neighbour
        follows, the larger one if it fits and else the smaller one. Then what remains is halved each time.
    attempt: returns whether a size fits.
    """
    largest_fitting = -1  # indices; -1 and len(sizes) mean that none is known yet
    smallest_failing = len(sizes)
    index = sizes.index(first)
    tries_neighbour = True
    while smallest_failing - largest_fitting > 1:
        fits = attempt(sizes[index])
        if fits is None:
            return None

        if fits:
            largest_fitting = index
            neighbour = index + 1
        else:
            smallest_failing = index
            neighbour = index - 1
        index = neighbour if tries_neighbour else (largest_fitting + smallest_failing) // 2
        tries_neighbour = False
    return sizes[largest_fitting] if largest_fitting >= 0 else 0


def sized_batch(config: TrainConfig, size: int, device_batch_size: int, num_data_ranks: int) -> list[str]:
    """Return the settings with which to rehearse a microbatch size: of a short batch, if its memory is the same.

    A pipeline keeps the activations of several microbatches at a time, so it needs its whole batch.
    """
    if config.pipeline.pipeline_parallel_degree > 1:
        return [f"device_train_microbatch_size={size}"]
    return short_batch(size, device_batch_size, num_data_ranks)


def short_batch(size: int, device_batch_size: int, num_data_ranks: int) -> list[str]:
    """Return the settings of a batch of two microbatches on each data rank, which take as much memory as many."""
    num_samples = min(2 * size, device_batch_size) * num_data_ranks
    return [f"device_train_microbatch_size={size}", f"global_train_batch_size={num_samples}"]


def describe(size: int, outcome: Outcome, estimated_bytes: int) -> str:
    """Return the line of one trial: the microbatch size, its memory in GiB, and the seconds that the trial took."""
    if outcome.exit_code == EXIT_DONE:
        allocated = f"{outcome.measurements['allocated_bytes'] / GIB:.2f}"
        reserved = f"{outcome.measurements['reserved_bytes'] / GIB:.2f}"
    else:
        allocated, reserved = "out of", "memory"
    return f"{size:10}{allocated:>12}{reserved:>12}{estimated_bytes / GIB:>12.2f}{outcome.seconds:>16.0f}"
