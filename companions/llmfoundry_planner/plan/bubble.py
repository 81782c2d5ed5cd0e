"""The time that a pipeline's stages wait, by playing the schedule. No torch.

p stages on p devices, m microbatches, v runs of blocks on each device. GPipe (Huang et al. 2019) and 1F1B (Narayanan et
al. 2019) wait (p - 1) / m of the time they compute; interleaving divides that by v (Narayanan et al. 2021, section
2.2). Zero bubble (Qi et al. 2024, ZB-H1) splits the backward pass into the part that the stage before waits for and
the weights' gradients, which fill the gaps: (p - 1) / 3 m, if each takes as long as the forward pass. ZBV has no
formula: it is played.
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
    """Return the time that a device waits over the time that it computes, without time for sending.

    `loads`: time of each run of blocks, through the model, as a multiple of one unit. The result is for the device that
    computes the longest. `in_few_rounds`: only the first microbatches are played, twice. Once all devices are busy,
    each round waits as long as the one before: not at all where runs are even.
    """
    check_schedule(schedule, num_stages, num_microbatches, virtual_stages)
    num_runs = {"interleaved": virtual_stages, "zero_bubble": virtual_stages, "zbv": 2}.get(schedule, 1)
    loads = tuple(loads or [1.0] * num_stages * num_runs)

    def wait(count: int) -> float:
        """Return the wait, in units of one microbatch's computing."""
        return _play(schedule, num_stages, count, num_runs, loads) * count

    few, more = (limit_rounds(num_stages, num_microbatches, rounds) for rounds in (4, 6))
    if not in_few_rounds or more == num_microbatches:
        return wait(num_microbatches) / num_microbatches
    each = (wait(more) - wait(few)) / (more - few)
    return (wait(more) + each * (num_microbatches - more)) / num_microbatches


@cache
def _play(schedule: str, num_stages: int, num_microbatches: int, num_runs: int, loads: tuple[float, ...]) -> float:
    orders = [list_passes(schedule, rank, num_stages, num_microbatches, num_runs) for rank in range(num_stages)]
    seconds = {"F": 1.0, "B": 1.0 if schedule in ("zero_bubble", "zbv") else 2.0, "W": 1.0}
    last_run = num_stages * num_runs - 1
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * num_stages
    positions = [0] * num_stages
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                kind, run, microbatch = order[positions[rank]]
                needs = {
                    "F": ("F", run - 1, microbatch) if run else None,
                    "B": ("B", run + 1, microbatch) if run < last_run else ("F", run, microbatch),
                    "W": ("B", run, microbatch),
                }[kind]
                if needs is not None and needs not in ends:
                    break
                start = max(clocks[rank], ends[needs] if needs else 0.0)
                clocks[rank] = ends[kind, run, microbatch] = start + seconds[kind] * loads[run] / num_runs
                positions[rank] += 1
                remaining -= 1
        assert remaining < before, f"{schedule} waits for itself"
    busiest = max(sum(seconds[one.kind] * loads[one.stage] for one in order) for order in orders) / num_runs
    return max(clocks) / busiest - 1


def check_schedule(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: {schedule!r} is none of {', '.join(SCHEDULES)}")
    if virtual_stages < 1 or num_stages < 1 or num_microbatches < 1:
        raise ConfigError("stages, runs of blocks and microbatches are counted from 1")
