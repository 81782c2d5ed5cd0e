"""Pipeline schedules: the time that stages wait, by playing the schedule. No torch.

p stages on p devices, m microbatches, v runs of blocks on each device. GPipe (Huang et al. 2019) and 1F1B (Narayanan et
al. 2019) wait (p - 1) / m of the time they compute; interleaving divides that by v (Narayanan et al. 2021, section
2.2). Zero bubble (Qi et al. 2024, ZB-H1) splits the backward pass into the part that the stage before waits for and
the weights' gradients, which fill the gaps: (p - 1) / 3 m, if each takes as long as the forward pass. ZBV has no
formula: it is played.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

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
        """In units of what one microbatch computes."""
        return _play(schedule, num_stages, count, num_runs, loads) * count

    few, more = (few_rounds(num_stages, num_microbatches, rounds) for rounds in (4, 6))
    if not in_few_rounds or more == num_microbatches:
        return wait(num_microbatches) / num_microbatches
    each = (wait(more) - wait(few)) / (more - few)
    return (wait(more) + each * (num_microbatches - more)) / num_microbatches


def few_rounds(num_stages: int, num_microbatches: int, rounds: int = 4) -> int:
    """Return so many microbatches that a schedule only repeats itself with more of them."""
    num_rounds = max(1, num_microbatches // num_stages)
    return min(num_microbatches, num_microbatches // num_rounds * rounds)


@cache
def _play(schedule: str, num_stages: int, num_microbatches: int, num_runs: int, loads: tuple[float, ...]) -> float:
    orders = [order_of(schedule, rank, num_stages, num_microbatches, num_runs) for rank in range(num_stages)]
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
    busiest = max(sum(seconds[one.kind] * loads[one.run] for one in order) for order in orders) / num_runs
    return max(clocks) / busiest - 1


class Pass(NamedTuple):
    kind: str
    """F; B, the gradient of the inputs, or of everything if the schedule has no W; W, of the weights."""
    run: int
    """Run of blocks, counted through the model."""
    microbatch: int


@cache
def order_of(schedule: str, rank: int, num_stages: int, num_microbatches: int, num_runs: int = 1) -> Sequence[Pass]:
    """Return a device's passes, one after the other, as in torch's schedules."""
    if schedule == "zbv":
        return _order_of_zbv(rank, num_stages, num_microbatches)
    total = num_microbatches * num_runs
    size = num_microbatches // max(1, num_microbatches // num_stages)

    def forward(index: int) -> Pass:
        run, microbatch = _interleaved(index, size, num_runs)
        return Pass("F", run * num_stages + rank, microbatch)

    def backward(index: int) -> Pass:
        run, microbatch = _interleaved(index, size, num_runs)
        return Pass("B", (num_runs - 1 - run) * num_stages + rank, microbatch)

    if schedule == "gpipe":
        return [forward(i) for i in range(total)] + [backward(i) for i in range(total)]
    ahead = num_stages - 1 - rank
    if schedule == "interleaved":
        ahead *= 2
    ahead = min(ahead + (num_runs - 1) * size, total)
    order = [forward(i) for i in range(ahead)]
    weights: list[Pass] = []
    for i in range(total):
        if i + ahead < total:
            order.append(forward(i + ahead))
        order.append(backward(i))
        if schedule == "zero_bubble":
            weights.append(order[-1]._replace(kind="W"))
            if i >= rank:  # the first gradients of weights wait for the gap at the end
                order.append(weights.pop(0))
    return order + weights


def _order_of_zbv(rank: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """Order by Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": device r has runs r and 2p - 1 - r."""
    here, back = rank, 2 * num_stages - 1 - rank
    count = max(num_microbatches, 2 * num_stages - 1)  # of fewer, those that are not there are left out
    order: list[Pass] = []
    done: Counter[tuple[str, int]] = Counter()

    def play(*passes: tuple[str, int]) -> None:
        for kind, run in passes:
            if done[kind, run] < count:
                order.append(Pass(kind, run, done[kind, run]))
                done[kind, run] += 1

    play(*[("F", here)] * (2 * (num_stages - rank) - 1))
    play(*[("F", back), ("F", here)] * rank)
    play(*[("F", back), ("B", back), ("W", back)] * (num_stages - rank))
    while done["F", here] < count or done["F", back] < count:
        play(("F", here), ("B", here), ("W", here))
        play(*[("F", back), ("B", back), ("W", back)] if done["F", back] < count else [])
    play(*[("B", here), ("B", back)] * rank)
    while done["B", here] < count:
        play(("B", here), ("W", here))
    play(*[("W", back)] * count)
    play(*[("W", here)] * count)
    return [one for one in order if one.microbatch < num_microbatches]


def _interleaved(index: int, size: int, num_runs: int) -> tuple[int, int]:
    """Return the i-th pass of a device: a round of microbatches through its first run of blocks, then its second, …"""
    round_, within = divmod(index, size * num_runs)
    return within // size, round_ * size + within % size


def check_schedule(schedule: str, num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: {schedule!r} is none of {', '.join(SCHEDULES)}")
    if virtual_stages < 1 or num_stages < 1 or num_microbatches < 1:
        raise ConfigError("stages, runs of blocks and microbatches are counted from 1")
