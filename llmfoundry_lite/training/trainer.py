"""Composer's Trainer, for ranks of which several may see the same samples."""

import datetime
from typing import Any

from composer import Trainer

from llmfoundry_lite.parallel import DataRanks


class GroupedTrainer(Trainer):
    """Counts each sample and token once, although with tensor parallelism several ranks have them.

    Nothing else in Composer's loop needs to know: losses and gradients are means over ranks, of which each group has
    equally many.
    """

    def __init__(self, *, ranks: DataRanks, **options: Any):
        self.ranks = ranks
        super().__init__(**options)

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        counts = (num_samples, num_tokens) if self.ranks.speaks else (0, 0)
        return super()._accumulate_time_across_ranks(*counts, batch_time)
