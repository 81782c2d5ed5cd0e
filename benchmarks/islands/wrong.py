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

from llmfoundry_lite.islands.exchange import Swapped
from llmfoundry_lite.training.lean_imports import HEAVY, import_lean

DIES_AT = 20
"""Batches that have been trained when the island that dies does, with its gradient sent and no word said of it."""
SECONDS_TO_ARRIVE = 1.0


def weights(islands: Any) -> None:
    """The first island's share counts twice what it is."""
    add_up = islands._sum_over_islands

    def add_up_wrongly(self: Any, inside: Any, swapped: Swapped, weight: int) -> None:
        first = min([self.name, *swapped.weights])
        doubled = {name: share * (2 if name == first else 1) for name, share in swapped.weights.items()}
        add_up(self, inside, swapped._replace(weights=doubled), weight * (2 if self.name == first else 1))

    islands._sum_over_islands = add_up_wrongly


def lost(islands: Any) -> None:
    """A batch that is to be repeated is passed over instead: the next one's rows are read."""
    batches = islands.batches

    def batches_less_one(self: Any, state: Any) -> Any:
        found = batches(self, state)
        if self.num_repeats == 1:
            next(found)
        return found

    islands.batches = batches_less_one


def stale(islands: Any) -> None:
    """When a batch is repeated without an island, what that one had sent before is counted all the same."""
    from llmfoundry_lite.islands.exchange import Exchange
    from llmfoundry_lite.training.optimizers import local

    exchange, swap = islands._exchange, Exchange.swap
    kept: list[Swapped] = []

    def swap_and_keep(self: Any, *arguments: Any) -> Swapped:
        swapped = swap(self, *arguments)
        kept[:] = [swapped] if swapped.tensors else kept
        return swapped

    def exchange_with_stale(self: Any, state: Any, weight: int, loss: torch.Tensor) -> Any:
        if self.num_repeats == 1 and kept:
            gradients = {name: local(self._gradient(parameter)) for name, parameter in self.parameters.items()}
            inside = {name: gradients[name][piece.within(self.boxes[name])] for name, piece in self.pieces.items()}
            self._sum_over_islands(inside, kept.pop(), weight)
        return exchange(self, state, weight, loss)

    Exchange.swap = swap_and_keep  # type: ignore[method-assign]
    islands._exchange = exchange_with_stale


def dies(islands: Any) -> None:
    """Ends between its exchange and its report. Nothing that it computes is wrong."""
    exchange = islands._exchange

    def exchange_and_die(self: Any, state: Any, weight: int, loss: torch.Tensor) -> Any:
        report = exchange(self, state, weight, loss)
        if int(state.timestamp.batch) == DIES_AT:
            time.sleep(SECONDS_TO_ARRIVE)
            os.kill(os.getpid(), signal.SIGKILL)
        return report

    islands._exchange = exchange_and_die


KINDS = {kind.__name__: kind for kind in (weights, lost, stale, dies)}


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    import_lean(*HEAVY)
    from llmfoundry_lite.training.islands import Islands

    KINDS[kind](Islands)
    runpy.run_module("llmfoundry_lite.train", run_name="__main__", alter_sys=True)
