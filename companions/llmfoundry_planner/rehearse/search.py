"""The largest microbatch that fits, found by rehearsing divisors of a device's batch, by bisection. No torch."""

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
    """Print each trial, and the answer as an override. Returns the exit code: 2 if not even one sample fits."""
    arguments, config, device, num_devices, per_node = job
    layout = layout_of(config, num_devices, per_node)
    num_ranks = layout.num_data_ranks
    device_batch_size = config.global_train_batch_size // num_ranks
    sizes = find_sizes(config, device_batch_size)
    limit = device.free_bytes - UNREHEARSED_BYTES
    estimates = {
        size: estimate_training_memory(
            dataclasses.replace(config, device_train_microbatch_size=size), layout, device
        ).total_bytes
        for size in sizes
    }
    first = max((size for size in sizes if estimates[size] <= limit), default=1)
    outcome: Outcome | None = None
    print(
        f"search         {config.run_name} on {num_devices} x {device.name}, as rank {rank}",
        f"batch          {device_batch_size} samples on this rank",
        f"memory         {limit / GIB:.2f} GiB for torch; {UNREHEARSED_BYTES / GIB:.0f} GiB are kept for NCCL and the "
        "driver",
        "microbatch   allocated    reserved    estimate, GiB    seconds",
        sep="\n",
        flush=True,
    )

    def attempt(size: int) -> bool | None:
        """Return whether a size fits; None if its rehearsal fails in another way."""
        nonlocal outcome
        outcome = server.rehearse(
            [*arguments, *sized_batch(config, size, device_batch_size, num_ranks)],
            device,
            num_devices=num_devices,
            per_node=per_node,
            rank=rank,
            counts_operations=False,
            spare_bytes=UNREHEARSED_BYTES,
        )
        fits = outcome.exit_code == EXIT_DONE
        if not fits and "is_out_of_memory" not in outcome.found:
            return None
        print(describe(size, outcome, estimates[size]), flush=True)
        return fits

    answer = bisect(sizes, first, attempt)
    if answer:
        print(f"answer         device_train_microbatch_size={answer}", flush=True)
        return EXIT_DONE
    assert outcome is not None
    print(outcome.said, end="", file=sys.stderr, flush=True)
    return outcome.exit_code if answer is None else EXIT_USER


def bisect(sizes: list[int], first: int, attempt: Callable[[int], bool | None]) -> int | None:
    """Find the largest of `sizes` (ascending) that fits, 0 if none does, None if an attempt has no answer.

    `first` is tried first, then its neighbour, since the estimate is seldom far off; then halves.
    """
    low, high = -1, len(sizes)  # the largest known to fit, the smallest known not to
    index = sizes.index(first)
    is_near = True
    while high - low > 1:
        fits = attempt(sizes[index])
        if fits is None:
            return None
        low, high = (index, high) if fits else (low, index)
        index = (low + 1 if fits else high - 1) if is_near else (low + high) // 2
        is_near = False
    return sizes[low] if low >= 0 else 0


def sized_batch(config: TrainConfig, size: int, device_batch_size: int, num_ranks: int) -> list[str]:
    """Return overrides for a short batch, or for a pipeline's whole one: it keeps several microbatches at a time."""
    if config.pipeline.pipeline_parallel_degree > 1:
        return [f"device_train_microbatch_size={size}"]
    return short_batch(size, device_batch_size, num_ranks)


def short_batch(size: int, device_batch_size: int, num_ranks: int) -> list[str]:
    """Return overrides for a batch of two microbatches, which take as much memory as many."""
    num_samples = min(2 * size, device_batch_size) * num_ranks
    return [f"device_train_microbatch_size={size}", f"global_train_batch_size={num_samples}"]


def describe(size: int, outcome: Outcome, estimated_bytes: int) -> str:
    if outcome.exit_code == EXIT_DONE:
        allocated, reserved = (f"{outcome.found[f'{name}_bytes'] / GIB:.2f}" for name in ("allocated", "reserved"))
    else:
        allocated, reserved = "out of", "memory"
    return f"{size:10}{allocated:>12}{reserved:>12}{estimated_bytes / GIB:>12.2f}{outcome.seconds:>16.0f}"
