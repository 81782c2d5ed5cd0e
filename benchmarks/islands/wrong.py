"""A rank of an island that makes one deliberate mistake: the controls of `python -m benchmarks islands`.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.islands.wrong weights run.yaml a.yaml …

The product has no option for any of this. Each function of KINDS replaces methods of the class `Islands` in this
process, which then trains as any other rank.
"""

import os
import runpy
import signal
import sys
import time
from typing import Any

import torch

from llmfoundry_islands.tensors import summing
from llmfoundry_islands.tensors.exchange import scatter
from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean

DIES_AT = 20
"""Batches that are finished when the island dies which has to die. It has then sent its gradient of the next batch, but
not reported it."""
SECONDS_TO_ARRIVE = 1.0
"""Time that its gradient is given to arrive."""
LABELS_PER_BATCH = 64
"""Copied from `llmfoundry_islands.training.islands`, because importing that module imports Composer."""


def weights(islands: Any) -> None:
    """Count the share of the first island twice."""
    sum_weighted = summing.sum_weighted

    def add_up_wrongly(own_part: Any, own_name: str, other_parts: Any, shares: dict[str, float]) -> torch.Tensor:
        """Add up with the first island's share doubled, and the shares scaled to a sum of 1 again."""
        doubled = {name: share * (2 if name == min(shares) else 1) for name, share in shares.items()}
        return sum_weighted(
            own_part, own_name, other_parts, {name: share / sum(doubled.values()) for name, share in doubled.items()}
        )

    summing.sum_weighted = add_up_wrongly


def lost(islands: Any) -> None:
    """Pass over a batch that has to be repeated: the rows of the next batch are read instead."""
    batches = islands.batches

    def batches_less_one(self: Any) -> Any:
        """Return the iterator over batches, one batch further if a batch is being repeated."""
        iterator = batches(self)
        if self.num_repeats == 1:
            next(iterator)
        return iterator

    islands.batches = batches_less_one


def stale(islands: Any) -> None:
    """Count the old gradient of an island that has died, when its batch is repeated without it."""
    original_exchange, note_part = islands._exchange, summing.Summing._note_part
    gradients_of_islands: dict[str, dict[str, torch.Tensor]] = {}
    weights: dict[str, float] = {}

    def note_and_keep(self: Any, bucket_number: int, peer: Any, *args: Any) -> None:
        """Keep a copy of what each other island has sent, with its weight."""
        if peer is not None:
            bucket = self.plan.buckets[bucket_number]
            scatter(args[0], gradients_of_islands.setdefault(peer.island, {}), bucket.owned, bucket.summed_here[peer])
            weights[peer.island] = args[1]
        note_part(self, bucket_number, peer, *args)

    def exchange_with_stale(self: Any, loss: torch.Tensor) -> Any:
        """In a repeated batch, mix the kept gradients into this island's own before it is exchanged."""
        if self.num_repeats == 1 and gradients_of_islands:
            weights[self.name] = self.weight
            shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
            # The island's own part plus what is kept, with the weights that they would have had together.
            gradients = {name: self._gradient(parameter) for name, parameter in self.held.parameters.items()}
            for key, own_part in self.held.views(gradients)[1].items():
                kept_parts = {
                    island: tensors[key] for island, tensors in gradients_of_islands.items() if key in tensors
                }
                own_part.copy_(summing.sum_weighted(own_part, self.name, kept_parts, shares))
            gradients_of_islands.clear()
        return original_exchange(self, loss)

    summing.Summing._note_part = note_and_keep  # type: ignore[method-assign]
    islands._exchange = exchange_with_stale


def dies(islands: Any) -> None:
    """Kill this rank between its exchange and its report. Nothing that it computes is wrong."""
    original_exchange = islands._exchange

    def exchange_and_die(self: Any, loss: torch.Tensor) -> Any:
        """Exchange as usual, and die after the given batch, once its gradient has arrived."""
        label, report = self.summing.label, original_exchange(self, loss)
        if label == DIES_AT * LABELS_PER_BATCH:
            time.sleep(SECONDS_TO_ARRIVE)
            os.kill(os.getpid(), signal.SIGKILL)
        return report

    islands._exchange = exchange_and_die


KINDS = {kind.__name__: kind for kind in (weights, lost, stale, dies)}


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    import_lean(*HEAVY)
    from llmfoundry_islands.training.islands import Islands

    KINDS[kind](Islands)
    runpy.run_module("llmfoundry_lite.launch_train", run_name="__main__", alter_sys=True)
