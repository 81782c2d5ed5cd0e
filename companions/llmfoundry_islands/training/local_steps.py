"""Arithmetic of local steps: what an island trains between two exchanges, and the step that follows one.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each island trains its own rows for `every` batches. The islands' mean
change of the weights, weighted by tokens, is the gradient of one outer step with Nesterov momentum. Streaming DiLoCo
(2025, arXiv 2501.18512): fragments of the weights take their outer steps in turn. No sockets, no clock. Every operation
rounds once, in fp32 on the host and in one order, so all islands get the same bits.
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
    """An island's batches since the last outer step, counted over its own rows."""

    steps: int = 0
    weight: int = 0
    """Weight of its change: tokens with a loss, or samples."""
    samples: int = 0
    tokens: int = 0
    losses: int = 0
    digest: int = 0
    loss_sum: float = 0.0
    """Losses of the batches, each times its weight."""
    again: int = 0
    """Samples that the round before had lost, trained again."""
    seconds: float = 0.0
    """Time of computing."""

    def count(self, batch: "BatchCounts", weight: int, loss: float, again: int = 0) -> None:
        self.steps += 1
        self.weight += weight
        self.samples += batch.num_samples
        self.tokens += batch.num_tokens
        self.losses += batch.num_loss_tokens
        self.again += again
        self.digest = (self.digest + batch.digest) % (1 << 64)
        self.loss_sum += loss * weight if weight else 0.0

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.weight, 1)


def take_outer_step(
    start: torch.Tensor, velocity: torch.Tensor, change: torch.Tensor, lr: float, momentum: float
) -> None:
    """Update the weights of the last outer step, `start`, and the momentum in place. `change`: the mean of start less
    the islands' weights.

    v = momentum v + change; start = start - lr (change + momentum v). torch.optim.SGD's Nesterov, for this gradient.
    """
    velocity.mul_(momentum).add_(change)
    start.sub_(velocity.mul(momentum).add_(change).mul_(lr))


def lost_samples(row_indices: Mapping[str, range], trained: Mapping[str, int], steps: int) -> dict[str, int]:
    """Return the samples of islands that began the round and were not in its outer step; padding rows count."""
    return {name: len(rows) * steps for name, rows in row_indices.items() if name not in trained}


def divide_into_fragments(sizes: Mapping[str, int], count: int) -> list[set[str]]:
    """Divide parameters into fragments of like size: the largest first, each into the smallest fragment so far."""
    fragments: list[set[str]] = [set() for _ in range(count)]
    filled = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = filled.index(min(filled))
        fragments[smallest].add(name)
        filled[smallest] += sizes[name]
    return fragments


class Again(NamedTuple):
    """Rows of earlier batches that an island trains beside its own, because the island that had them is gone."""

    row_indices: Sequence[int] = ()
    back: int = 0
    """Number of batches since then."""


def share_lost(
    lost: Sequence[int], all_rows: Mapping[str, range], data_ranks: Mapping[str, int]
) -> dict[str, list[int]]:
    """Divide lost rows among islands in proportion to their own, in multiples of their data ranks. If that does not
    come out even, the first island that can takes all. Returns nothing if none can."""
    paces = {name: Pace(data_ranks[name], 1, float(len(rows)), data_ranks[name]) for name, rows in all_rows.items()}
    for names in (list(paces), *([name] for name in paces)):
        with suppress(ConfigError):
            shares = divide(len(lost), {name: paces[name] for name in names})
            return {name: [lost[i] for i in share] for name, share in shares.items()}
    return {}
