"""Pipeline schedules: the order in which each rank runs the passes of microbatches through its stages. No torch.

`pipeline.py` trains with torch's schedules. The lists here equal theirs, which the tests compare, and serve estimates
of memory and the planner's estimates of waiting time.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: str
    """F: forward. B: gradient of the inputs, or of everything if the schedule has no W. W: gradient of the weights."""
    stage: int
    """Index of the stage in the whole model."""
    microbatch: int
    """Index of the microbatch in the batch."""


def limit_rounds(num_stages: int, num_microbatches: int, max_rounds: int = 4) -> int:
    """Return how many of a batch's microbatches to simulate, because a schedule repeats itself after a few rounds.

    A round is about as many microbatches as the pipeline has ranks, which is `num_stages`. The result is the number of
    microbatches in `max_rounds` rounds, or `num_microbatches` if there are fewer.
    """
    num_rounds = max(1, num_microbatches // num_stages)
    round_size = num_microbatches // num_rounds
    return min(num_microbatches, max_rounds * round_size)


@cache
def list_passes(schedule: str, rank: int, num_stages: int, num_microbatches: int, num_runs: int = 1) -> Sequence[Pass]:
    """List the passes of one rank of a pipeline in the order in which torch's schedule of this name runs them.

    schedule: gpipe, 1f1b, interleaved, zero_bubble or zbv.
    num_stages: number of ranks in the pipeline.
    num_runs: number of stages on each rank, its virtual stages. Rank r has the stages r, r + num_stages, and so on. The
        schedule zbv always has two, and ignores this.
    """
    if schedule == "zbv":
        return _list_passes_of_zbv(rank, num_stages, num_microbatches)

    num_forward = num_microbatches * num_runs
    # A round of microbatches goes through a rank's first stage, then the same round through its second, and so on.
    round_size = num_microbatches // max(1, num_microbatches // num_stages)

    def forward(index: int) -> Pass:
        """Return the rank's forward pass of this index, counted from 0."""
        run, microbatch = _locate_pass(index, round_size, num_runs)
        return Pass("F", run * num_stages + rank, microbatch)

    def backward(index: int) -> Pass:
        """Return the rank's backward pass of this index. Backward passes begin in the rank's last stage."""
        run, microbatch = _locate_pass(index, round_size, num_runs)
        return Pass("B", (num_runs - 1 - run) * num_stages + rank, microbatch)

    if schedule == "gpipe":
        return [forward(index) for index in range(num_forward)] + [backward(index) for index in range(num_forward)]

    # Warm-up: forward passes before the first backward pass. Earlier ranks have more of them, because their first
    # backward pass waits for all later ranks.
    num_warmup = num_stages - 1 - rank
    if schedule == "interleaved":
        num_warmup *= 2
    num_warmup += (num_runs - 1) * round_size
    num_warmup = min(num_warmup, num_forward)
    passes = [forward(index) for index in range(num_warmup)]

    # Then forward and backward passes alternate, until only backward passes are left.
    delayed_weight_passes: list[Pass] = []
    for index in range(num_forward):
        if index + num_warmup < num_forward:
            passes.append(forward(index + num_warmup))
        backward_pass = backward(index)
        passes.append(backward_pass)

        if schedule == "zero_bubble":
            delayed_weight_passes.append(backward_pass._replace(kind="W"))
            # A rank delays its first W passes to fill the gap in which it would wait at the end.
            if index >= rank:
                passes.append(delayed_weight_passes.pop(0))
    return passes + delayed_weight_passes


def _locate_pass(index: int, round_size: int, num_runs: int) -> tuple[int, int]:
    """Return which of a rank's stages its pass of this index runs, counted from 0, and for which microbatch.

    A round of `round_size` microbatches goes through the rank's first stage, then through its second, and so on through
    `num_runs` stages, before the next round begins.
    """
    round_index, index_in_round = divmod(index, round_size * num_runs)
    run, index_in_run = divmod(index_in_round, round_size)
    return run, round_index * round_size + index_in_run


def _list_passes_of_zbv(rank: int, num_stages: int, num_microbatches: int) -> list[Pass]:
    """List the passes of one rank of the schedule ZBV, whose stages go through the p ranks and back in the form of a V.

    Rank r has an early stage, r, and a late one, 2p - 1 - r. The order is that of Qi et al. 2024, "Pipeline Parallelism
    with Controllable Memory", as torch implements it.
    """
    early = rank
    late = 2 * num_stages - 1 - rank
    # The order is defined for at least 2p - 1 microbatches. With fewer, the passes of the missing ones are left out.
    num_scheduled = max(num_microbatches, 2 * num_stages - 1)

    passes: list[Pass] = []
    num_done: Counter[tuple[str, int]] = Counter()

    def append(*kinds_and_stages: tuple[str, int]) -> None:
        """Append, for each kind and stage, the pass of the next microbatch, unless all microbatches have had theirs."""
        for kind, stage in kinds_and_stages:
            microbatch = num_done[kind, stage]
            if microbatch < num_scheduled:
                passes.append(Pass(kind, stage, microbatch))
                num_done[kind, stage] += 1

    # Warm-up
    append(*[("F", early)] * (2 * (num_stages - rank) - 1))
    append(*[("F", late), ("F", early)] * rank)
    append(*[("F", late), ("B", late), ("W", late)] * (num_stages - rank))

    # Steady state
    while num_done["F", early] < num_scheduled or num_done["F", late] < num_scheduled:
        append(("F", early), ("B", early), ("W", early))
        if num_done["F", late] < num_scheduled:
            append(("F", late), ("B", late), ("W", late))

    # Cool-down
    append(*[("B", early), ("B", late)] * rank)
    while num_done["B", early] < num_scheduled:
        append(("B", early), ("W", early))
    append(*[("W", late)] * num_scheduled)
    append(*[("W", early)] * num_scheduled)

    return [one_pass for one_pass in passes if one_pass.microbatch < num_microbatches]
