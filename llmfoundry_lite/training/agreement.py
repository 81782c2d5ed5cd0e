"""The one exchange between two batches: all ranks agree on the next batch, on leaving and on saving.

It is a sum of integers in host memory, at the end of each batch. By then each rank has read the next batch, so the sum
includes its tokens and digest. An epoch's first batch needs a sum of its own. The other collective of a batch, on
devices, is `gradient_step.measure`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import batch_digest
from llmfoundry_lite.ranks.exchange import all_reduce_sum, raise_on_all_ranks
from llmfoundry_lite.training.preemption import REASONS, Preemption

DIGEST_MODULUS = 1 << 64
"""The digest of a global batch is the sum of its rows' digests modulo 2^64, so it does not depend on which rank has
which row."""
NO_ENERGY = (0, 1)
"""Millijoules, and the number of processes that could not measure theirs: what a rank without a meter reports."""


class BatchCounts(NamedTuple):
    """Counts of a batch: one rank's part of it, or, after a sum over ranks, the global batch."""

    is_complete: bool
    """Every rank has its part. False at the end of an epoch."""
    num_samples: int
    """Samples, without the rows of padding that fill up an epoch's last batch."""
    num_tokens: int
    num_loss_tokens: int
    """Tokens that have a loss: all but each row's first. A row is a sample, or a part of one (`seq_len_schedule`)."""
    num_loss_samples: int
    """Rows that have a loss. A row of a single token has none."""
    digest: int

    def weight(self, *, by_tokens: bool) -> int:
        """Return the number that the batch's loss is a mean over: tokens with a loss, or else samples with a loss."""
        return self.num_loss_tokens if by_tokens else self.num_loss_samples


NO_BATCH = BatchCounts(False, 0, 0, 0, 0, 0)


class Meter:
    """Meter of the energy that this rank's devices use. This one measures nothing; a companion has one that does."""

    def sample(self) -> None:
        """Read the counters in the middle of a batch, so that none wraps around twice between two readings."""

    def take(self) -> tuple[int, int]:
        """Return millijoules since the last call, and the number of processes that could not measure theirs: 0 or 1."""
        return NO_ENERGY


@dataclass(eq=False)
class Agreement:
    """Reads this rank's batches one ahead, and agrees with the other ranks at the end of each batch.

    One sum over ranks has the counts of the next batch, the reasons to leave, whether a save is due, the energy, and on
    some batches each rank's own time.
    """

    ranks: DataRanks
    preemption: Preemption
    end_batch_of_role: Callable[[], Iterator[Any] | None]
    """`LaunchRole.end_batch`: lets other launches join and leave. Returns the batches to continue with if this rank
    reads other rows from the next batch on; else None."""
    sample_length: int | None = None
    """Tokens of a sample of the data. A batch has samples in rows of equal length, which may be shorter. None: a row is
    a sample, of any length."""
    meter: Meter = field(default_factory=Meter)
    take_own_times: Callable[[], list[int]] = list
    """`RankTimes.take`: returns further numbers to add up, as many on every rank. They are the times that ranks need by
    themselves; none on most batches."""

    def __post_init__(self) -> None:
        """Begin without a batch. `begin_epoch` reads the first one.

        The public attributes are results of the last sum over ranks, the same on all ranks. Call order in an epoch:
        `begin_epoch`; `next_batch` and `end_batch` for each batch; `end_epoch`.
        """
        # What the ranks have agreed on.
        self.current = NO_BATCH
        """Counts of the global batch that is being trained."""
        self.upcoming = NO_BATCH
        """Counts of the global batch after it."""
        self.all_idle = True
        """No rank was writing or publishing a save at the last sum."""
        self.save_is_due = False
        """Rank 0 asked for a save at the last sum."""
        self.joules: float | None = None
        """Energy of all devices between the last two ends of batches; None if a device has no counter."""
        self.own_times: list[int] = []
        """Sums of what ranks passed by `take_own_times` at the last end of a batch."""
        # Clocks of this rank at the last end of a batch, for `RankTimes`.
        self.arrived_at = 0.0
        """Time at which `end_batch` was called, by `time.perf_counter`."""
        self.read_seconds = 0.0
        """Time that reading the next batch has taken."""
        # What this rank has read ahead.
        self._batches: Iterator[Any] | None = None
        """This epoch's batches on this rank; None between epochs."""
        self._batch: Any = None
        """This rank's part of the upcoming batch."""
        self._error: Exception | None = None
        """The error with which this rank could not read the upcoming batch."""
        self._has_failed = False
        """Some rank could not read it."""

    def begin_epoch(self, batches: Iterator[Any]) -> None:
        """Read this rank's part of an epoch's first batch, and agree on its counts. Collective."""
        self._batches = batches
        self._agree(self._read_ahead())

    def next_batch(self) -> Any:
        """Return this rank's part of the next batch, or None on all ranks at the end of the epoch. Sets `current`.

        The batch has been read ahead, and the ranks have agreed on it. If a rank could not read its part, raises its
        error on all ranks, so that they can save what they have trained.
        """
        error = self._error
        self._error = None
        if self._has_failed:
            raise_on_all_ranks(error)
        batch = self._batch
        self._batch = None
        self.current = self.upcoming
        return batch if self.current.is_complete else None

    def end_epoch(self) -> None:
        """Forget the epoch's remaining batches, and an error that the next of them has met."""
        self._batches = self._batch = self._error = None

    def end_batch(self, *, is_last: bool, is_busy: bool, wants_save: bool) -> None:
        """Read the next batch, unless this one `is_last`, and agree with the other ranks. Collective.

        `is_busy` says that this rank is writing or publishing a save, `wants_save` that a save is due after this batch.
        Only rank 0's `wants_save` counts, because it follows from a clock. Sets `upcoming`, `all_idle`, `save_is_due`,
        `joules`, `own_times` and this rank's clocks, and tells `preemption` the highest reason to leave that any rank
        has.
        """
        self.arrived_at = time.perf_counter()

        # Find the reason first: it is also where `preemption` measures how long a batch takes.
        reason = self.preemption.find_reason()

        # Other launches may have left or joined, so that this rank reads other rows from now on.
        changed_batches = self.end_batch_of_role()
        if changed_batches is not None:
            self._batches = changed_batches

        read_began_at = time.perf_counter()
        counted = NO_BATCH if is_last else self._read_ahead()
        self.read_seconds = time.perf_counter() - read_began_at
        is_save_due = wants_save and self.ranks.is_first
        agreed_reason = self._agree(
            counted, reason, is_busy, is_save_due, self.meter.take(), own_times=self.take_own_times()
        )
        self.preemption.set_agreed(agreed_reason)

    def _read_ahead(self) -> BatchCounts:
        """Read this rank's part of the next batch, and return its counts.

        Keeps the batch in `_batch`, or the loader's error in `_error`, for `next_batch`. At the end of the epoch both
        are None, and `is_complete` of the result is False.
        """
        assert self._batches is not None
        try:
            self._batch = next(self._batches, None)
        except Exception as error:  # `next_batch` raises it: the batch before must still be recorded and saved
            self._error = error
        if self._batch is None:
            # If no rank has a batch, the epoch has ended. A rank with an error says that it has one, so that the error
            # is not taken for the end of the epoch.
            return NO_BATCH._replace(is_complete=self._error is not None)

        # A sample may be cut into several rows. It is counted, and hashed, as a whole.
        samples = self._batch
        if self.sample_length is not None:
            samples = {"input_ids": self._batch["input_ids"].reshape(-1, self.sample_length)}

        tokens = count_tokens(self._batch)
        return BatchCounts(
            is_complete=True,
            num_samples=count_filled(samples),
            num_tokens=tokens["total"],
            num_loss_tokens=tokens["loss_generating"],
            num_loss_samples=count_rows(self._batch),
            digest=batch_digest(samples["input_ids"]),
        )

    def _agree(
        self,
        counted: BatchCounts,
        reason: int = 0,
        is_busy: bool = False,
        wants_save: bool = False,
        energy: tuple[int, int] = NO_ENERGY,
        own_times: Sequence[int] = (),
    ) -> int:
        """Sum over all ranks what each passes here, and store the results in attributes. Collective.

        `counted` are this rank's counts of the next batch, and `reason` its index into `REASONS`. `energy` is the
        millijoules that its devices have used, and 1 if it could not measure them, else 0. `is_busy` and `wants_save`
        are explained by `end_batch`. All ranks must pass the same number of `own_times`.

        Sets `upcoming`, `all_idle`, `save_is_due`, `joules` and `own_times`. Returns the highest reason to leave that
        any rank has, 0 if none. A sum is enough for that, because each reason has its own place in the summed list.
        """
        # What this rank contributes: integers alone, so that one sum in host memory does for everything.
        counts = [int(count) for count in counted[1:]]  # all fields but `is_complete`
        if not self.ranks.is_counted:  # another rank has the same samples, and counts them
            counts = [0] * len(counts)
        flags = [int(not counted.is_complete), int(self._error is not None), int(is_busy), int(wants_save)]
        has_reason = [int(reason == index) for index in range(1, len(REASONS))]

        # Take the sums apart in the order in which the list was put together.
        sums = iter(all_reduce_sum([*counts, *flags, *energy, *own_times, *has_reason]))
        num_samples, num_tokens, num_loss_tokens, num_loss_samples, digest = (next(sums) for _ in counts)
        num_without_batch, num_failed, num_busy, num_wanting_save = (next(sums) for _ in flags)
        millijoules, num_unmeasured = next(sums), next(sums)
        self.own_times = [next(sums) for _ in own_times]
        ranks_with_reason = list(sums)  # for each reason from 1 on, the number of ranks that have it

        # Store what all ranks know now.
        is_complete = num_without_batch == 0
        self.upcoming = BatchCounts(
            is_complete, num_samples, num_tokens, num_loss_tokens, num_loss_samples, digest % DIGEST_MODULUS
        )
        self._has_failed = num_failed > 0
        self.all_idle = num_busy == 0
        self.save_is_due = num_wanting_save > 0
        self.joules = None if num_unmeasured else millijoules / 1000
        known_reasons = [index for index, num_ranks in enumerate(ranks_with_reason, 1) if num_ranks > 0]
        return max(known_reasons, default=0)


def count_tokens(batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """Count a batch's tokens on the host, so that the device is not waited for. Ids below 0 are padding.

    Returns `total`, and `loss_generating`: the tokens that have a loss, which are all but each sample's first.
    """
    is_real_bt = _find_tokens(batch)
    return {"total": int(is_real_bt.sum()), "loss_generating": int(is_real_bt[:, 1:].sum())}


def count_filled(batch: dict[str, torch.Tensor]) -> int:
    """Count, on the host, the samples of a batch that have a token, and are not rows of padding alone."""
    return int(_find_tokens(batch).any(1).sum())


def count_rows(batch: dict[str, torch.Tensor]) -> int:
    """Count, on the host, the samples of a batch that have a loss: those with a token after their first."""
    return int(_find_tokens(batch)[:, 1:].any(1).sum())


def _find_tokens(batch: dict[str, torch.Tensor]) -> Any:
    """Return where a batch has tokens, and not padding, as a NumPy array of booleans: [samples, tokens]."""
    return batch["input_ids"].cpu().numpy() >= 0
