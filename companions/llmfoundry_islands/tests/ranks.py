"""Ranks of islands with unlike sharding, in threads of one process."""

from concurrent.futures import ThreadPoolExecutor

import torch

from llmfoundry_islands.tensors.boxes import Box, divide_replicas, rows_of
from llmfoundry_islands.tensors.exchange import Exchange, Ranks
from llmfoundry_islands.tensors.summing import Summing, SumPlan

SECRET = b"0123456789abcdef"
WHOLE = {"blocks.0.w": Box((0, 0), (7, 3)), "blocks.1.w": Box((0, 0), (70, 3)), "b": Box((0,), (5,))}
SHARDED = [
    {"blocks.0.w": Box((0, 0), (4, 3)), "blocks.1.w": Box((0, 0), (35, 3)), "b": Box((0,), (3,))},
    {"blocks.0.w": Box((4, 0), (3, 3)), "blocks.1.w": Box((35, 0), (35, 3)), "b": Box((3,), (2,))},
]
BOXES = {"a": SHARDED, "b": [WHOLE], "c": [WHOLE, WHOLE]}
"""Islands of two shards, of one rank, and of two copies."""


class Rank:
    def __init__(self, island, rank, host="127.0.0.1", boxes=BOXES, divide=divide_replicas):
        self.island, self.rank, self.boxes, self.divide = island, rank, boxes, divide
        self.exchange = Exchange(island, rank, host, SECRET)
        self.pieces = divide(boxes[island])[rank]

    def meet(self, epoch, ranks, shares=()):
        others = {}
        for name in sorted({other.island for other in ranks} - {self.island}):
            addresses = [other.exchange.address for other in ranks if other.island == name]
            others[name] = Ranks(addresses, self.divide(self.boxes[name]))
        self.exchange.connect(epoch, self.pieces, others)
        self.plan = SumPlan.of(self.island, self.pieces, self.exchange.overlaps, rows_of([WHOLE]), dict(shares))

    def cut(self, tensors):
        return {name: tensors[name][piece.slices_in(WHOLE[name])] for name, piece in self.pieces.items()}

    def begin(self, label=64, weight=1.0, *, is_exact=False):
        return Summing(self.exchange, self.plan, label, weight, is_exact=is_exact)

    def sum(self, pieces, label=64, weight=1.0, *, is_exact=False):
        """Return what `wait` has found."""
        summing = self.begin(label, weight, is_exact=is_exact)
        summing.wait(pieces)
        return summing


def make_ranks(boxes=BOXES, **options):
    return [Rank(island, rank, boxes=boxes, **options) for island in boxes for rank in range(len(boxes[island]))]


def at_once(function, ranks):
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(30) for future in [pool.submit(function, rank) for rank in ranks]]


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(box.lengths, generator=generator) for name, box in WHOLE.items()}
