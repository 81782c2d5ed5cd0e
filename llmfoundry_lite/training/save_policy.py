"""Decides when a run saves, and whether a launch ends after a batch."""

import statistics
import time
from collections import deque
from typing import NamedTuple

from composer.core import State, Timestamp

from llmfoundry_lite.checkpoint.run_log import duration_text
from llmfoundry_lite.checkpoint.save_interval import MAX_SAVE_FRACTION
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.schedule import elapsed, has_passed, is_evaluation_due, progress_of

FIRST_SECONDS = 60.0
"""With `save_interval: auto`: training time before the first save, which measures the cost of one."""
NUM_COSTS, NUM_BATCHES = 5, 50
"""Number of newest saves and batches whose costs and lengths are kept; their medians count."""
PRINTED_CHANGE = 1.5
"""The interval that `auto` chooses is printed again when it has changed by this factor."""


class Decision(NamedTuple):
    """Decision on what follows a batch, the same on every rank."""

    saves: bool
    """The batch is saved."""
    preempted_by: str
    """Why the launch leaves early; empty if it does not."""
    stops: bool
    """The launch ends before the run does: it has reached `stop_after` or `stop_at`, or a callback has asked for
    that."""
    owes_evaluation: bool
    """The launch leaves without the evaluation that is due. The next launch runs it."""


class SavePolicy:
    """Decides whether a batch is saved, and whether the launch ends after it.

    It saves at every `save_interval`, counted in training or by the clock; after the last batch of the run or of the
    launch; and before leaving early.
    """

    def __init__(self, config: TrainConfig, preemption: Preemption, agreement: Agreement):
        """Prepare the policy of a launch. `start` sets where in the run it begins."""
        self.config = config
        self.preemption = preemption
        self.agreement = agreement
        self.span = config.save_interval.span
        """The interval between saves, counted in training; None if it is counted by the clock."""
        self.timer = SaveTimer(config.save_interval.seconds) if self.span is None else None
        """The interval by the clock; None if it is counted in training. Only rank 0's clock counts: `Agreement` tells
        the other ranks when a save is due."""
        self.digest_span = config.digest_interval
        """Interval between digests of the state in the log; None for none but those of saves."""
        self.stop_reason = ""
        """Why a callback asks for the end of this launch, on every rank; empty if none does."""

    def start(self, at: Timestamp) -> None:
        """Note that this launch begins at the time `at` of the run, and start the clock."""
        self.started_at = at
        if self.timer is not None:
            self.timer.start()

    def is_last(self, state: State) -> bool:
        """Return whether the run ends with the last batch."""
        return progress_of(state, self.config.max_duration) >= 1

    def is_launch_over(self, state: State) -> bool:
        """Return whether this launch ends after the last batch, although the run may not be done.

        It does if it has reached `stop_at`, which counts from the beginning of the run, or `stop_after`, which counts
        from the beginning of the launch, or if a callback has set `stop_reason`.
        """
        if self.stop_reason:
            return True
        stop_at = self.config.stop_at
        if stop_at is not None and elapsed(state, stop_at.unit) >= stop_at.value:
            return True
        stop_after = self.config.stop_after
        if stop_after is None:
            return False
        trained = elapsed(state, stop_after.unit) - elapsed(state, stop_after.unit, self.started_at)
        return trained >= stop_after.value

    def decide(self, state: State) -> Decision:
        """Decide what follows the last batch: a save, the end of this launch, or neither.

        Call it after `Agreement.end_batch`. All ranks have the same numbers by then, so they decide the same without an
        exchange.
        """
        is_last = self.is_last(state)
        is_launch_over = self.is_launch_over(state)

        # A save is due by rank 0's clock, on which the ranks have agreed, or because the run has reached a multiple of
        # the interval.
        is_save_due = self.agreement.save_is_due
        if self.span is not None and has_passed(state, self.span):
            is_save_due = True

        # A run that ends with this batch is done, and not preempted, unless its last evaluation is missing.
        reason = REASONS[self.preemption.agreed_reason]
        owes_evaluation = bool(reason) and is_evaluation_due(self.config, state)
        is_preempted = bool(reason) and (not is_last or owes_evaluation)
        return Decision(
            saves=is_save_due or is_last or is_launch_over or is_preempted,
            preempted_by=reason if is_preempted else "",
            stops=is_launch_over and not is_last and not is_preempted,
            owes_evaluation=owes_evaluation,
        )


class SaveTimer:
    """Decides by the clock when to save. With `save_interval: auto`, the interval follows from the cost of a save.

    The cost is the time that training loses: how much longer than usual the batches take between the beginning of a
    save and its publication, and at least the stall, while training waits for the copy. Clocks are monotonic, because
    the wall clock may be set.
    """

    def __init__(self, seconds: float | None):
        """Start a timer whose interval is `seconds`, or None for `auto`.

        With `auto`, the first save comes after FIRST_SECONDS, and `note_published` sets `seconds` from then on.
        """
        self.is_auto = seconds is None
        self.seconds = FIRST_SECONDS if seconds is None else seconds
        """The interval between saves."""
        # Measurements, from which the cost of a save follows.
        self.cost_seconds: float | None = None
        """Median cost of the newest saves; None before the first."""
        self._undisturbed: deque[float] = deque(maxlen=NUM_BATCHES)
        """Seconds of batches without a save in progress."""
        self._disturbed: list[float] = []
        """Seconds of the batches during the current save."""
        self._costs: deque[float] = deque(maxlen=NUM_COSTS)
        """Cost in seconds of the newest saves."""
        self._has_only_first_cost = True
        """`_costs` has no save but the launch's first."""
        self._printed_seconds: float | None = None
        """The interval that was printed last; None if none was."""
        self.start()

    def start(self) -> None:
        """Begin to count the interval, and the first batch."""
        self._began_at = time.monotonic()
        self._batch_ended_at = self._began_at

    def note_batch_end(self, is_saving: bool) -> bool:
        """Note the length of the batch that ends now, and return whether a save is due. Call it once a batch.

        `is_saving` says that a save was in progress during the batch. Those batches take longer, and how much longer is
        the cost of the save.
        """
        now = time.monotonic()
        batch_seconds = now - self._batch_ended_at
        self._batch_ended_at = now
        if is_saving:
            self._disturbed.append(batch_seconds)
        else:
            self._undisturbed.append(batch_seconds)
        return now - self._began_at >= self.seconds

    def note_begun(self) -> None:
        """Note that a save has begun, so that the interval counts from now."""
        self._began_at = time.monotonic()

    def note_published(self, stall_seconds: float, durable_seconds: float) -> str | None:
        """Update the cost of a save and, with `auto`, the interval, after a save was published.

        `stall_seconds` is how long training waited for it, and `durable_seconds` how long it took from its beginning to
        its publication. With `auto`, the interval is so long that saves cost MAX_SAVE_FRACTION of the time. Sets
        `cost_seconds` and `seconds`. Returns a line for the user if the interval has changed much, else None.
        """
        # The cost is how much longer the batches during the save took than usual.
        usual_seconds = statistics.median(self._undisturbed) if self._undisturbed else float("inf")
        lost_seconds = sum(batch_seconds - usual_seconds for batch_seconds in self._disturbed)
        self._disturbed = []

        # The first save also planned and allocated buffers. Its cost is forgotten once there is another one.
        if self._has_only_first_cost and self._costs:
            self._costs.clear()
            self._has_only_first_cost = False
        self._costs.append(max(stall_seconds, lost_seconds))
        self.cost_seconds = statistics.median(self._costs)
        if not self.is_auto:
            return None

        # A save cannot begin before the previous one is published.
        self.seconds = max(durable_seconds, self.cost_seconds / MAX_SAVE_FRACTION)
        if self._printed_seconds is not None:
            change = self.seconds / self._printed_seconds
            if 1 / PRINTED_CHANGE < change < PRINTED_CHANGE:
                return None
        self._printed_seconds = self.seconds
        return (
            f"save_interval: auto is {duration_text(self.seconds)}: a save costs {self.cost_seconds:.3g} s of "
            f"training, {MAX_SAVE_FRACTION:.0%} at that interval"
        )
