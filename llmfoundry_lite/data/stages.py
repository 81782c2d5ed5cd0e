"""The epochs of a run whose data changes at some batches: a pure function, as in `order.py`.

Each stage has an order of its own, and as many epochs as it needs. A stage that ends within an epoch cuts it short. The
epochs of all stages are numbered consecutively. The first stage has the epochs of a run without stages, so stages can
be added to a run later.

An example: the stages begin after batches 0 and 25, and their epochs have 10 and 7 batches. Then epochs 0 and 1 have 10
batches each, epoch 2 has the 5 that are left of the first stage, and epochs from 3 on have 7.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from llmfoundry_lite.data.order import EpochOrder, SampleOrder, ceil_divide

EPOCHS_OF_A_STAGE = 1 << 32
"""Epoch numbers reserved for each stage, so that no two stages share random numbers."""


class StagedOrder:
    """The epochs of a run, one stage after another. A run without stages has one stage that never ends."""

    def __init__(self, orders: Sequence[SampleOrder], first_batches: Sequence[int]) -> None:
        """Take the order of each stage, and the number of batches before each; the first has 0."""
        assert first_batches[0] == 0 and len(orders) == len(first_batches)
        self.orders = orders
        self.first_batches = list(first_batches)
        self.first_epochs = [0]
        """Number of epochs before each stage."""
        for order, (begin, end) in zip(orders, pairwise(first_batches), strict=False):
            num_epochs = ceil_divide(end - begin, order.num_batches)
            self.first_epochs.append(self.first_epochs[-1] + num_epochs)

    def _locate_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the stage of an epoch, and the number of epochs of this stage before it."""
        stage = bisect_right(self.first_epochs, epoch) - 1
        return stage, epoch - self.first_epochs[stage]

    def epoch(self, epoch: int) -> EpochOrder:
        """Lay out an epoch of the run. It may have more batches than `num_batches`, which must not be read."""
        stage, epoch_in_stage = self._locate_epoch(epoch)
        return self.orders[stage].epoch(stage * EPOCHS_OF_A_STAGE + epoch_in_stage)

    def num_batches(self, epoch: int) -> int:
        """Return the global batches of an epoch. The last epoch of a stage ends where the next stage begins."""
        stage, _ = self._locate_epoch(epoch)
        full_epoch = self.orders[stage].num_batches
        is_last_stage = stage == len(self.orders) - 1
        if is_last_stage:
            return full_epoch
        return min(full_epoch, self.first_batches[stage + 1] - self.batch_at(epoch, 0))

    def batch_at(self, epoch: int, step: int) -> int:
        """Return the number of global batches in the run before batch `step` of an epoch."""
        stage, epoch_in_stage = self._locate_epoch(epoch)
        return self.first_batches[stage] + epoch_in_stage * self.orders[stage].num_batches + step

    def locate_batch(self, batch: int) -> tuple[int, int]:
        """Return the epoch and the step in it of the batch that follows `batch` others. Undoes `batch_at`."""
        stage = bisect_right(self.first_batches, batch) - 1
        epoch_in_stage, step = divmod(batch - self.first_batches[stage], self.orders[stage].num_batches)
        return self.first_epochs[stage] + epoch_in_stage, step

    def stages_begun(self, batch: int) -> list[list[int | str]]:
        """Describe the stages that a run has begun after `batch` batches, in the form that checkpoints keep.

        Returns for each its first batch and the fingerprint of its order. A stage that begins exactly after these
        batches is left out, unless it is the first: none of its data has been read, so it may still be changed.
        """
        stages: list[list[int | str]] = []
        for first_batch, order in zip(self.first_batches, self.orders, strict=True):
            if first_batch == 0 or first_batch < batch:
                stages.append([first_batch, order.fingerprint])
        return stages

    def num_streams(self, batch: int) -> int:
        """Return the number of streams that the stages begun after `batch` batches read from."""
        orders = self.orders[: len(self.stages_begun(batch))]
        return max(len(order.shard_sizes_per_stream) for order in orders)
