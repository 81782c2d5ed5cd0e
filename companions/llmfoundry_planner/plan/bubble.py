"""Time in which the stages of a pipeline wait for each other, by simulating the schedule. No torch.

p stages on p devices, m microbatches, v virtual stages (runs of consecutive blocks) on each device. Relative to the
time that a device computes, it waits:

- GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019): (p - 1) / m;
- interleaved (Narayanan et al. 2021, section 2.2): (p - 1) / (v m);
- zero bubble (Qi et al. 2024, ZB-H1): (p - 1) / (3 m). The backward pass is split into the gradient of the inputs,
  for which the stage before waits, and the gradient of the weights, which fills gaps. Each takes as long as the forward
  pass;
- ZBV has no formula.

These hold for stages that compute equally long. The simulation also covers stages that do not.
"""

from collections.abc import Sequence
from functools import cache

from llmfoundry_layouts.schedule import limit_rounds, list_passes
from llmfoundry_lite.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
FIRST_ROUNDS = 4
SECOND_ROUNDS = 6
"""Rounds of microbatches in the two simulations from which `in_few_rounds` extrapolates. A round has about as many
microbatches as the pipeline has stages. After 4 rounds all devices are busy; tests compare the result with a simulation
of all rounds."""


def simulate_bubble(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    loads: Sequence[float] | None = None,
    *,
    in_few_rounds: bool = False,
) -> float:
    """Return the time that the busiest device waits in a step, as a multiple of the time that it computes.

    Sending takes no time here. Example: 1F1B with 4 stages and 12 microbatches returns 3 / 12.

    num_stages: devices of the pipeline.
    virtual_stages: runs of consecutive blocks on each device, for schedules that have several. ZBV always has two.
    loads: computing time of each run in the model's order, in any unit. None: all take equally long.
    in_few_rounds: simulate the first microbatches only, and extrapolate. Once all devices are busy, each further
        microbatch adds the same waiting time, which is 0 for equal loads.

    Raises ConfigError for an unknown schedule and for counts below 1.
    """
    check_schedule(schedule, num_stages, num_microbatches, virtual_stages)
    num_runs = 1
    if schedule in ("interleaved", "zero_bubble"):
        num_runs = virtual_stages
    elif schedule == "zbv":
        num_runs = 2
    run_loads = tuple(loads or [1.0] * num_stages * num_runs)

    def simulate_waiting(num_simulated: int) -> float:
        """Return the waiting time with this number of microbatches, in the computing time of one microbatch."""
        return _simulate(schedule, num_stages, num_simulated, num_runs, run_loads) * num_simulated

    first_count = limit_rounds(num_stages, num_microbatches, FIRST_ROUNDS)
    second_count = limit_rounds(num_stages, num_microbatches, SECOND_ROUNDS)
    if not in_few_rounds or second_count == num_microbatches:
        return simulate_waiting(num_microbatches) / num_microbatches

    # The waiting time is a line through the two simulations. Follow it to the number of microbatches of the step.
    first_wait = simulate_waiting(first_count)
    second_wait = simulate_waiting(second_count)
    wait_per_microbatch = (second_wait - first_wait) / (second_count - first_count)
    total_wait = second_wait + wait_per_microbatch * (num_microbatches - second_count)
    return total_wait / num_microbatches


@cache
def _simulate(
    schedule: str, num_stages: int, num_microbatches: int, num_runs: int, run_loads: tuple[float, ...]
) -> float:
    """Run all passes of a step in the order of the schedule. Return the busiest device's waiting / computing time.

    A pass starts as soon as its device has finished the pass before and the pass whose result it needs has ended. The
    unit of time is the forward pass of a device whose runs have load 1.
    """
    passes_of_ranks = [
        list_passes(schedule, rank, num_stages, num_microbatches, num_runs) for rank in range(num_stages)
    ]
    # Without W passes, a backward pass computes the gradients of the inputs and of the weights.
    splits_backward = schedule in ("zero_bubble", "zbv")
    seconds_of_kind = {"F": 1.0, "B": 1.0 if splits_backward else 2.0, "W": 1.0}
    last_run = num_stages * num_runs - 1

    end_times: dict[tuple[str, int, int], float] = {}  # by kind, run and microbatch of a pass
    device_times = [0.0] * num_stages  # when each device has finished its passes so far
    next_passes = [0] * num_stages  # index of each device's next pass
    num_remaining = sum(map(len, passes_of_ranks))
    while num_remaining:
        num_before = num_remaining
        for rank, passes in enumerate(passes_of_ranks):
            # Run this device's passes until one needs a result that does not exist yet.
            while next_passes[rank] < len(passes):
                kind, run, microbatch = passes[next_passes[rank]]
                needed_pass = _find_needed_pass(kind, run, microbatch, last_run)
                if needed_pass is not None and needed_pass not in end_times:
                    break

                start = device_times[rank]
                if needed_pass is not None:
                    start = max(start, end_times[needed_pass])
                end = start + seconds_of_kind[kind] * run_loads[run] / num_runs
                end_times[kind, run, microbatch] = end
                device_times[rank] = end
                next_passes[rank] += 1
                num_remaining -= 1
        assert num_remaining < num_before, f"{schedule} waits for itself"

    # The step lasts until the last device has finished. The busiest device waits in the rest of that time.
    compute_times = [
        sum(seconds_of_kind[step.kind] * run_loads[step.stage] for step in passes) for passes in passes_of_ranks
    ]
    longest_computing = max(compute_times) / num_runs
    return max(device_times) / longest_computing - 1


def _find_needed_pass(kind: str, run: int, microbatch: int, last_run: int) -> tuple[str, int, int] | None:
    """Return the pass whose result a pass needs, as (kind, run, microbatch); None for the first forward pass.

    A forward pass (F) needs the one of the run before it, and a backward pass (B) the one of the run after it. The
    backward pass of the last run follows its own forward pass. A W pass needs the backward pass of its run.
    """
    if kind == "F":
        return ("F", run - 1, microbatch) if run > 0 else None
    if kind == "B" and run < last_run:
        return ("B", run + 1, microbatch)
    if kind == "B":
        return ("F", run, microbatch)
    return ("B", run, microbatch)


def check_schedule(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    """Raise ConfigError for an unknown schedule and for counts below 1."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: {schedule!r} is none of {', '.join(SCHEDULES)}")
    if virtual_stages < 1 or num_stages < 1 or num_microbatches < 1:
        raise ConfigError("stages, runs of blocks and microbatches are counted from 1")
