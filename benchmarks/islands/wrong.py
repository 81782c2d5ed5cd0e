"""A rank of an island that does one thing wrong, on purpose: the controls of `python -m benchmarks islands`.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.islands.wrong weights run.yaml a.yaml …

The product has no option for any of this: methods are changed in this process alone, which then trains as any other.
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
"""Batches that have been trained when the island that dies does, with its gradient sent and no word said of it."""
SECONDS_TO_ARRIVE = 1.0
LABELS_PER_BATCH = 64
"""Equal to that of `llmfoundry_islands.training.islands`, which imports Composer."""


def weights(islands: Any) -> None:
    """The first island's share counts twice what it is."""
    add_up = summing.sum_weighted

    def add_up_wrongly(mine: Any, own: str, theirs: Any, shares: dict[str, float]) -> torch.Tensor:
        doubled = {name: share * (2 if name == min(shares) else 1) for name, share in shares.items()}
        return add_up(mine, own, theirs, {name: share / sum(doubled.values()) for name, share in doubled.items()})

    summing.sum_weighted = add_up_wrongly


def lost(islands: Any) -> None:
    """A batch that is to be repeated is passed over instead: the next one's rows are read."""
    batches = islands.batches

    def batches_less_one(self: Any) -> Any:
        found = batches(self)
        if self.num_repeats == 1:
            next(found)
        return found

    islands.batches = batches_less_one


def stale(islands: Any) -> None:
    """When a batch is repeated without an island, what that one had sent before is counted all the same."""
    exchange, note = islands._exchange, summing.Summing._note_part
    kept: dict[str, dict[str, torch.Tensor]] = {}
    weights: dict[str, float] = {}

    def note_and_keep(self: Any, number: int, peer: Any, *given: Any) -> None:
        if peer is not None:
            bucket = self.plan.buckets[number]
            scatter(given[0], kept.setdefault(peer.island, {}), bucket.owned, bucket.summed_here[peer])
            weights[peer.island] = given[1]
        note(self, number, peer, *given)

    def exchange_with_stale(self: Any, loss: torch.Tensor) -> Any:
        if self.num_repeats == 1 and kept:
            weights[self.name] = self.weight
            shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
            gradients = {name: self._gradient(parameter) for name, parameter in self.held.parameters.items()}
            for key, part in self.held.views(gradients)[1].items():
                theirs = {island: tensors[key] for island, tensors in kept.items() if key in tensors}
                part.copy_(summing.sum_weighted(part, self.name, theirs, shares))
            kept.clear()
        return exchange(self, loss)

    summing.Summing._note_part = note_and_keep  # type: ignore[method-assign]
    islands._exchange = exchange_with_stale


def dies(islands: Any) -> None:
    """Ends between its exchange and its report. Nothing that it computes is wrong."""
    exchange = islands._exchange

    def exchange_and_die(self: Any, loss: torch.Tensor) -> Any:
        label, report = self.summing.label, exchange(self, loss)
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
