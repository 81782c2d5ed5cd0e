"""The epochs of a run whose data changes at some batches: a pure function, as in `order.py`.

Each stage has an order of its own, and as many epochs as it needs. A stage that ends within an epoch cuts it short. The
epochs of all stages are numbered consecutively. The first stage has the epochs of a run without stages, so stages can
be added to a run later.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from llmfoundry_lite.data.order import EpochOrder, SampleOrder

EPOCHS_OF_A_STAGE = 1 << 32
"""Epoch numbers reserved for each stage, so that no two stages share random numbers."""


class StagedOrder:
    """Epochs of a run, one stage after another."""

    def __init__(self, orders: Sequence[SampleOrder], first_batches: Sequence[int]) -> None:
        assert first_batches[0] == 0 and len(orders) == len(first_batches)
        self.orders = orders
        self.first_batches = list(first_batches)
        self.first_epochs = [0]
        for order, (begin, end) in zip(orders, pairwise(first_batches), strict=False):
            self.first_epochs.append(self.first_epochs[-1] - (begin - end) // order.num_batches)

    def _place(self, epoch: int) -> tuple[int, int]:
        """Return the stage of an epoch, and its number within that."""
        stage = bisect_right(self.first_epochs, epoch) - 1
        return stage, epoch - self.first_epochs[stage]

    def epoch(self, epoch: int) -> EpochOrder:
        stage, number = self._place(epoch)
        return self.orders[stage].epoch(stage * EPOCHS_OF_A_STAGE + number)

    def num_batches(self, epoch: int) -> int:
        """Return the global batches of an epoch."""
        stage, _ = self._place(epoch)
        full = self.orders[stage].num_batches
        ends = self.first_batches[stage + 1 : stage + 2]
        return min([full, *(end - self.batch_at(epoch, 0) for end in ends)])

    def batch_at(self, epoch: int, step: int) -> int:
        """Return the number of batches before one of an epoch."""
        stage, number = self._place(epoch)
        return self.first_batches[stage] + number * self.orders[stage].num_batches + step

    def locate(self, batch: int) -> tuple[int, int]:
        """Return the epoch of a batch, with so many before it, and its place in the epoch."""
        stage = bisect_right(self.first_batches, batch) - 1
        number, step = divmod(batch - self.first_batches[stage], self.orders[stage].num_batches)
        return self.first_epochs[stage] + number, step

    def begun(self, batch: int) -> list[list[int | str]]:
        """Return, for each stage that begins before this batch, its first batch and its order's fingerprint."""
        pairs = zip(self.first_batches, self.orders, strict=True)
        return [[begin, order.fingerprint] for begin, order in pairs if begin == 0 or begin < batch]

    def num_streams(self, batch: int) -> int:
        """Return the number of streams that the stages begun by this batch have."""
        return max(len(order.shard_sizes_per_stream) for order in self.orders[: len(self.begun(batch))])
