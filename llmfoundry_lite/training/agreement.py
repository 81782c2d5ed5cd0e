"""The one collective between two batches: a sum of integers in host memory.

It takes place at the end of each batch. By then the next batch has been read, so its tokens and digest are in the sum.
An epoch's first batch needs a sum of its own. A batch's other collective, on devices, is `gradient_step.measure`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import batch_digest
from llmfoundry_lite.ranks.exchange import all_reduce_sum, raise_on_all_ranks
from llmfoundry_lite.training.preemption import REASONS, Preemption


class Upcoming(NamedTuple):
    """The next global batch, summed over ranks."""

    is_there: bool
    """Every rank has its share."""
    num_filled: int
    """Samples, without the rows of padding that fill up an epoch's last batch."""
    num_tokens: int
    num_losses: int
    """Tokens that have a loss."""
    num_rows_with_loss: int
    """Samples that have a loss. One with a single token has none."""
    digest: int

    def weight(self, *, by_tokens: bool) -> int:
        """Return what the batch's loss is a mean over: tokens or samples."""
        return self.num_losses if by_tokens else self.num_rows_with_loss


NOTHING = Upcoming(False, 0, 0, 0, 0, 0)


class Meter:
    """Meter of this rank's energy. A companion has one that measures; this one cannot."""

    def sample(self) -> None:
        """Read the counters amid a batch, before one can wrap around twice."""

    def take(self) -> tuple[int, int]:
        """Return millijoules since the last call, and the number of processes that could not measure theirs: 0 or 1."""
        return 0, 1


@dataclass(eq=False)
class Agreement:
    """Reads batches one ahead. One sum over ranks agrees on the next batch, on leaving and on saving.

    The energy of all devices is in the same sum."""

    ranks: DataRanks
    preemption: Preemption
    other_batches: Callable[[], Iterator[Any] | None]
    """Returns other batches to go on with if this rank's rows have changed; else None."""
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.current = NOTHING
        """The batch that is being trained."""
        self.upcoming = NOTHING
        self.all_idle = True
        """No rank was writing or publishing at the last sum."""
        self.save_is_due = False
        self.joules: float | None = None
        """Energy of all devices between the last two ends of batches; None if a device has no counter."""
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None
        self._error: Exception | None = None
        """Why this rank could not read the next batch."""
        self._has_failed = False
        """Some rank could not read it."""

    def begin_epoch(self, batches: Iterator[Any]) -> None:
        """Read the first batch. Every rank must call this together."""
        self._batches = batches
        self._agree(self._read_ahead())

    def take(self) -> Any:
        """Return this rank's share of the next batch; None at the end of the epoch, which all ranks reach together.
        Raises the loader's error, on all ranks, so that they can save what they have trained."""
        error, self._error = self._error, None
        if self._has_failed:
            raise_on_all_ranks(error)
        batch, self._batch = self._batch, None
        self.current = self.upcoming
        return batch if self.current.is_there else None

    def end_epoch(self) -> None:
        self._batches = self._batch = self._error = None

    def end_batch(self, *, is_last: bool, is_busy: bool, wants_save: bool) -> None:
        """Read the next batch, unless this one `is_last`, and agree. `is_busy`: this rank writes or publishes a save.
        `wants_save`: save after this batch; only rank 0's counts."""
        reason = self.preemption.find_reason()
        self._batches = self.other_batches() or self._batches
        counted = NOTHING if is_last else self._read_ahead()
        wants_save = wants_save and self.ranks.is_first
        self.preemption.set_agreed(self._agree(counted, reason, is_busy, wants_save, self.meter.take()))

    def _read_ahead(self) -> Upcoming:
        """Read this rank's share of the next batch, and count it."""
        assert self._batches is not None
        try:
            self._batch = next(self._batches, None)
        except Exception as error:  # raised with the next batch: this one must still be recorded and saved
            self._error = error
        if self._batch is None:
            return NOTHING._replace(is_there=self._error is not None)
        batch, count = self._batch, count_tokens(self._batch)
        tokens, losses, digest = count["total"], count["loss_generating"], batch_digest(batch["input_ids"])
        return Upcoming(True, count_filled(batch), tokens, losses, count_rows(batch), digest)

    def _agree(
        self,
        counted: Upcoming,
        reason: int = 0,
        is_busy: bool = False,
        wants_save: bool = False,
        energy: tuple[int, int] = (0, 1),
    ) -> int:
        """Sum over ranks. Returns the highest reason to leave that any rank has."""
        counts = [int(number) if self.ranks.is_counted else 0 for number in counted[1:]]
        reasons = [int(reason == index) for index in range(1, len(REASONS))]
        flags = [not counted.is_there, self._error is not None, is_busy, wants_save]
        sums = all_reduce_sum([*counts, *map(int, flags), *energy, *reasons])
        filled, tokens, losses, rows, digest = sums[: len(counts)]
        missing, failed, busy, wanting, millijoules, unmetered, *having = sums[len(counts) :]
        self._has_failed = failed > 0
        self.upcoming = Upcoming(missing == 0, filled, tokens, losses, rows, digest % (1 << 64))
        self.all_idle, self.save_is_due = busy == 0, wanting > 0
        self.joules = None if unmetered else millijoules / 1000
        return max((index for index, count in enumerate(having, 1) if count), default=0)


def count_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Count all tokens, and those with a loss: all but each sample's first. Computes on the host."""
    is_real_bt = batch["input_ids"].cpu().numpy() >= 0
    return {"total": int(is_real_bt.sum()), "loss_generating": int(is_real_bt[:, 1:].sum())}


def count_filled(batch: dict[str, torch.Tensor]) -> int:
    """Count the samples that are not all padding. Computes on the host."""
    return int((batch["input_ids"].cpu().numpy() >= 0).any(1).sum())


def count_rows(batch: dict[str, torch.Tensor]) -> int:
    """Count the samples that have a loss. Computes on the host."""
    return int((batch["input_ids"].cpu().numpy()[:, 1:] >= 0).any(1).sum())
