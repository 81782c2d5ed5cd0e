"""The arithmetic of local steps: what an island counts between two exchanges, and the outer step that follows one.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each island trains its own rows for `every` batches. The mean of the
islands' changes of the weights, weighted by tokens, is the gradient of one outer step with Nesterov momentum. Streaming
DiLoCo (2025, arXiv 2501.18512): the weights are divided into fragments, which take their outer steps in turn.

This file has no sockets and no clock; `local_islands.py` decides when each function is called. Every floating-point
operation rounds once, in fp32 on the host and in a fixed order, so that all islands get the same bits.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from llmfoundry_islands.coordination.division import Pace, divide
from llmfoundry_lite.errors import ConfigError

if TYPE_CHECKING:
    from llmfoundry_lite.training.run_handle import BatchCounts


@dataclass(kw_only=True)
class Round:
    """What an island has trained since the last outer step. All counts are of the island's own rows."""

    steps: int = 0
    """Number of batches."""
    weight: int = 0
    """Weight of the island's change in the mean: tokens with a loss, or samples with a loss."""
    samples: int = 0
    tokens: int = 0
    losses: int = 0
    """Tokens with a loss."""
    digest: int = 0
    """Sum of the batches' data digests, modulo 2^64."""
    loss_sum: float = 0.0
    """Sum of the batches' losses, each multiplied by the batch's weight."""
    again: int = 0
    """Samples of the previous round that an island had lost, and that this island has trained again."""
    seconds: float = 0.0
    """Time spent computing, without exchanges, evaluations and saves."""

    def add_batch(self, batch: "BatchCounts", weight: int, loss: float, again: int = 0) -> None:
        """Add a batch that this island has trained.

        `weight` is the number of tokens or samples that `loss` is the mean over. It is 0 if all rows are padding. The
        loss is then NaN, and is left out. `again` is the number of retrained samples among those of the batch.
        """
        self.steps += 1
        self.weight += weight
        self.samples += batch.num_samples
        self.tokens += batch.num_tokens
        self.losses += batch.num_loss_tokens
        self.again += again
        self.digest = (self.digest + batch.digest) % (1 << 64)
        if weight:
            self.loss_sum += loss * weight

    @property
    def loss(self) -> float:
        """Mean loss of the round, weighted by the batches' weights. It is 0 if no batch has a weight."""
        return self.loss_sum / max(self.weight, 1)


def take_outer_step(
    outer_weights: torch.Tensor, velocity: torch.Tensor, mean_change: torch.Tensor, lr: float, momentum: float
) -> None:
    """Take one outer step with Nesterov momentum. Updates `outer_weights` and `velocity` in place.

    `outer_weights` are the weights after the last outer step. `mean_change` is the mean over islands of `outer_weights`
    minus the island's weights, so it plays the part of a gradient. With the formula of torch.optim.SGD:

        velocity = momentum * velocity + mean_change
        outer_weights = outer_weights - lr * (mean_change + momentum * velocity)
    """
    velocity.mul_(momentum).add_(mean_change)
    outer_weights.sub_(velocity.mul(momentum).add_(mean_change).mul_(lr))


def count_lost_samples(row_indices: Mapping[str, range], trained: Mapping[str, int], steps: int) -> dict[str, int]:
    """Return, by island, the samples that were lost because the island is not in the round's outer step.

    `row_indices` has the rows of each batch that every island began the round with, and `trained` the samples of the
    islands in the outer step. A round has `steps` batches. Rows of padding count as samples here.

    For example, island b has 6 rows of each batch and dies in a round of 10 batches: the result is `{"b": 60}`.
    """
    return {name: len(rows) * steps for name, rows in row_indices.items() if name not in trained}


def divide_into_fragments(sizes: Mapping[str, int], num_fragments: int) -> list[set[str]]:
    """Divide parameters into fragments of about the same number of elements.

    `sizes` maps parameter names to numbers of elements. Parameters are assigned from the largest to the smallest, each
    to the fragment that is smallest so far. The result does not depend on the order of `sizes`, so all islands and
    ranks get the same fragments.
    """
    fragments: list[set[str]] = [set() for _ in range(num_fragments)]
    fragment_sizes = [0] * num_fragments
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = fragment_sizes.index(min(fragment_sizes))
        fragments[smallest].add(name)
        fragment_sizes[smallest] += sizes[name]
    return fragments


class RetrainedRows(NamedTuple):
    """Rows of earlier batches that an island trains besides its own, because the island that had them died."""

    row_indices: Sequence[int] = ()
    """Indices of the rows in their batch."""
    num_batches_back: int = 0
    """How many batches ago the rows were due: the number of batches of the previous round."""


def divide_lost_rows(
    lost_rows: Sequence[int], row_indices: Mapping[str, range], data_ranks: Mapping[str, int]
) -> dict[str, list[int]]:
    """Divide the rows of a dead island among the others, in proportion to their own rows.

    `lost_rows` are the indices of rows in each batch, and `row_indices` those that the other islands have anyway.
    Shares are multiples of an island's data ranks, because data ranks need the same number of rows. If the rows cannot
    be divided that way among all islands, the first island that can take all of them gets them.

    Returns the rows of each island that gets some, and an empty dict if no island can take them.
    """
    paces = {}
    for name, rows in row_indices.items():
        paces[name] = Pace(data_ranks[name], 1, float(len(rows)), data_ranks[name])

    combinations = [list(paces), *([name] for name in paces)]
    for names in combinations:
        with suppress(ConfigError):  # these islands cannot divide the rows
            shares = divide(len(lost_rows), {name: paces[name] for name in names})
            return {name: [lost_rows[i] for i in share] for name, share in shares.items()}
    return {}
