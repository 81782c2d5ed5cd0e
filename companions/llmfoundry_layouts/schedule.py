"""Pipeline schedules: the passes of each device, one after the other. No torch."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


def few_rounds(num_stages: int, num_microbatches: int, rounds: int = 4) -> int:
    """Return so many microbatches that a schedule only repeats itself with more of them."""
    num_rounds = max(1, num_microbatches // num_stages)
    return min(num_microbatches, num_microbatches // num_rounds * rounds)


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
