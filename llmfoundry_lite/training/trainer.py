"""Composer's Trainer, for ranks of which several may see the same samples."""

import datetime
from typing import Any

from composer import Trainer
from composer.utils import collect_env

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import DataRanks

# Composer's Trainer asks for the processor's name, on every rank and for nobody, and py-cpuinfo starts processes and
# times the processor to tell: more than a second of every launch.
collect_env.get_cpu_model = devices.device_name


class GroupedTrainer(Trainer):
    """Counts each sample and token once, although with tensor parallelism several ranks have them.

    Nothing else in Composer's loop needs to know: losses and gradients are means over ranks, of which each group has
    equally many.
    """

    def __init__(self, *, ranks: DataRanks, **options: Any):
        self.ranks = ranks
        super().__init__(**options)
        devices.set_tf32(options["model"].precision.tf32)  # Composer has allowed it on every GPU by now

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        counts = (num_samples, num_tokens) if self.ranks.speaks else (0, 0)
        return super()._accumulate_time_across_ranks(*counts, batch_time)
