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

EPOCH_NUMBERS_PER_STAGE = 1 << 32
"""Epoch numbers reserved for each stage as keys of random numbers, so that no two stages shuffle alike."""


class StagedOrder:
    """The sample order of a run that trains on one data mixture (a stage) after another.

    Epochs and global batches of the run are both counted from 0 through all stages. A run without stages has one stage
    that never ends.
    """

    def __init__(self, orders: Sequence[SampleOrder], first_batches: Sequence[int]) -> None:
        """Take the sample order of each stage, and the global batch of the run at which each stage begins.

        The first stage begins at batch 0.
        """
        assert first_batches[0] == 0 and len(orders) == len(first_batches)
        self.orders = orders
        self.first_batches = list(first_batches)
        self.first_epochs = [0]
        """Epoch of the run with which each stage begins."""
        for order, (begin, end) in zip(orders, pairwise(first_batches), strict=False):
            num_epochs = ceil_divide(end - begin, order.num_batches)
            self.first_epochs.append(self.first_epochs[-1] + num_epochs)

    def _locate_epoch_in_stage(self, epoch: int) -> tuple[int, int]:
        """Return the index of the stage that an epoch of the run belongs to, and the epoch's index in this stage."""
        stage = bisect_right(self.first_epochs, epoch) - 1
        return stage, epoch - self.first_epochs[stage]

    def build_epoch(self, epoch: int) -> EpochOrder:
        """Compute the order of samples in an epoch of the run.

        The result may have more batches than `num_batches(epoch)`, because the next stage may begin before the epoch
        is complete. Callers must not read those.
        """
        stage, epoch_in_stage = self._locate_epoch_in_stage(epoch)
        return self.orders[stage].build_epoch(stage * EPOCH_NUMBERS_PER_STAGE + epoch_in_stage)

    def num_batches(self, epoch: int) -> int:
        """Return the number of global batches in an epoch. The last epoch of a stage ends where the next one begins."""
        stage, _ = self._locate_epoch_in_stage(epoch)
        batches_in_full_epoch = self.orders[stage].num_batches
        is_last_stage = stage == len(self.orders) - 1
        if is_last_stage:
            return batches_in_full_epoch
        batches_to_next_stage = self.first_batches[stage + 1] - self.batches_before(epoch, 0)
        return min(batches_in_full_epoch, batches_to_next_stage)

    def batches_before(self, epoch: int, step: int) -> int:
        """Return how many global batches the run has trained on before batch `step` of `epoch`; both count from 0."""
        stage, epoch_in_stage = self._locate_epoch_in_stage(epoch)
        return self.first_batches[stage] + epoch_in_stage * self.orders[stage].num_batches + step

    def locate_batch(self, batch: int) -> tuple[int, int]:
        """Return the epoch of a global batch of the run, and the batch's index in it. The inverse of `batches_before`.

        `batch` counts from 0 over the whole run.
        """
        stage = bisect_right(self.first_batches, batch) - 1
        epoch_in_stage, step = divmod(batch - self.first_batches[stage], self.orders[stage].num_batches)
        return self.first_epochs[stage] + epoch_in_stage, step

    def describe_begun_stages(self, num_batches: int) -> list[list[int | str]]:
        """Describe the stages that a run has read data of in its first `num_batches` global batches.

        Returns `[first batch, fingerprint of the stage's order]` for each, as checkpoints store it. A stage that begins
        exactly after these batches is left out, because none of its data has been read, so the user may still change
        it. The first stage is always included.
        """
        begun_stages: list[list[int | str]] = []
        for first_batch, order in zip(self.first_batches, self.orders, strict=True):
            if first_batch == 0 or first_batch < num_batches:
                begun_stages.append([first_batch, order.fingerprint])
        return begun_stages

    def num_streams_read(self, num_batches: int) -> int:
        """Return how many streams a run may have read from in its first `num_batches` global batches.

        Streams are numbered in the order in which stages introduce them, so these are the streams 0 to the result - 1.
        """
        begun_orders = self.orders[: len(self.describe_begun_stages(num_batches))]
        return max(len(order.shard_sizes_per_stream) for order in begun_orders)
