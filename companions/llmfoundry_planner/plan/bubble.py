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

    def wait(num_simulated: int) -> float:
        """Return the waiting time with so many microbatches, as a multiple of one microbatch's computing time."""
        return _simulate(schedule, num_stages, num_simulated, num_runs, run_loads) * num_simulated

    few = limit_rounds(num_stages, num_microbatches, 4)
    more = limit_rounds(num_stages, num_microbatches, 6)
    if not in_few_rounds or more == num_microbatches:
        return wait(num_microbatches) / num_microbatches
    wait_per_microbatch = (wait(more) - wait(few)) / (more - few)
    return (wait(more) + wait_per_microbatch * (num_microbatches - more)) / num_microbatches


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
                if kind == "F":
                    needed = ("F", run - 1, microbatch) if run > 0 else None
                elif kind == "B":
                    needed = ("B", run + 1, microbatch) if run < last_run else ("F", run, microbatch)
                else:
                    needed = ("B", run, microbatch)
                if needed is not None and needed not in end_times:
                    break

                start = max(device_times[rank], end_times[needed] if needed else 0.0)
                end = start + seconds_of_kind[kind] * run_loads[run] / num_runs
                end_times[kind, run, microbatch] = end
                device_times[rank] = end
                next_passes[rank] += 1
                num_remaining -= 1
        assert num_remaining < num_before, f"{schedule} waits for itself"

    compute_times = [
        sum(seconds_of_kind[step.kind] * run_loads[step.stage] for step in passes) for passes in passes_of_ranks
    ]
    longest_computing = max(compute_times) / num_runs
    return max(device_times) / longest_computing - 1


def check_schedule(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    """Raise ConfigError for an unknown schedule and for counts below 1."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: {schedule!r} is none of {', '.join(SCHEDULES)}")
    if virtual_stages < 1 or num_stages < 1 or num_microbatches < 1:
        raise ConfigError("stages, runs of blocks and microbatches are counted from 1")
