"""When a run saves, and whether a launch ends after the batch."""

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
"""With `auto`: training before the first save, which measures the cost of one."""
NUM_COSTS, NUM_BATCHES = 5, 50
"""Saves and batches whose costs and lengths are kept."""
PRINTED_CHANGE = 1.5
"""Print the interval when it has changed by this factor."""


class Decision(NamedTuple):
    saves: bool
    preempted_by: str
    """Why the launch leaves early; empty if it does not."""
    stops: bool
    """The launch has reached `stop_after` or `stop_at`, or is asked to stop, before the end of the run."""
    owes_evaluation: bool
    """The launch leaves without the evaluation that is due."""


class SavePolicy:
    """Saves at every `save_interval`, counted in training or by the clock; after the last batch of the run or the
    launch; and before leaving early."""

    def __init__(self, config: TrainConfig, preemption: Preemption, agreement: Agreement):
        self.config = config
        self.preemption = preemption
        self.agreement = agreement
        self.span = config.save_interval.span
        self.timer = SaveTimer(config.save_interval.seconds) if self.span is None else None
        """For intervals by the clock. Only rank 0's counts: `Agreement` broadcasts when a save is due."""
        self.digest_span = config.digest_interval
        self.stop_reason = ""
        """Why a callback asks for the end of this launch, on every rank; empty if none does."""

    def start(self, at: Timestamp) -> None:
        """Note that this launch begins `at` that time of the run."""
        self.started_at = at
        if self.timer is not None:
            self.timer.start()

    def is_last(self, state: State) -> bool:
        """Return whether the run ends with this batch."""
        return progress_of(state, self.config.max_duration) >= 1

    def is_launch_over(self, state: State) -> bool:
        """Return whether `stop_after` or `stop_at` is reached, or a callback has asked for the end."""
        span, point = self.config.stop_after, self.config.stop_at
        if self.stop_reason or (point is not None and elapsed(state, point.unit) >= point.value):
            return True
        if span is None:
            return False
        return elapsed(state, span.unit) - elapsed(state, span.unit, self.started_at) >= span.value

    def decide(self, state: State) -> Decision:
        """Decide after a batch. Returns the same on every rank."""
        is_last, is_launch_over = self.is_last(state), self.is_launch_over(state)
        is_due = self.agreement.save_is_due or (self.span is not None and has_passed(state, self.span))
        agreed = REASONS[self.preemption.agreed]
        owes_evaluation = bool(agreed) and is_evaluation_due(self.config, state)
        preempted_by = agreed if not is_last or owes_evaluation else ""
        return Decision(
            saves=is_due or is_last or is_launch_over or bool(preempted_by),
            preempted_by=preempted_by,
            stops=is_launch_over and not is_last and not preempted_by,
            owes_evaluation=owes_evaluation,
        )


class SaveTimer:
    """When to save by the clock. For `auto` the interval follows from the cost of a save.

    The cost is the time that training loses: the batches between a save's beginning and its publication, less the usual
    time of as many; at least the stall. Clocks are monotonic: the wall clock may step.
    """

    def __init__(self, seconds: float | None):
        """`seconds` None: auto."""
        self.is_auto = seconds is None
        self.seconds = FIRST_SECONDS if seconds is None else seconds
        """The interval between saves."""
        self.cost_seconds: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=NUM_BATCHES)
        self._disturbed: list[float] = []
        self._costs: deque[float] = deque(maxlen=NUM_COSTS)
        self._is_first = True
        self._printed_seconds: float | None = None
        self.start()

    def start(self) -> None:
        self._since = self._batch_ended_at = time.monotonic()

    def note_batch_end(self, is_saving: bool) -> bool:
        """Return whether a save is due. `is_saving`: a save was in progress during this batch."""
        before, self._batch_ended_at = self._batch_ended_at, time.monotonic()
        (self._disturbed if is_saving else self._undisturbed).append(self._batch_ended_at - before)
        return self._batch_ended_at - self._since >= self.seconds

    def note_begun(self) -> None:
        self._since = time.monotonic()

    def note_published(self, stall_seconds: float, durable_seconds: float) -> str | None:
        """Update cost and interval. Returns a line for the user if the interval has changed much."""
        usual = statistics.median(self._undisturbed) if self._undisturbed else float("inf")
        lost = sum(seconds - usual for seconds in self._disturbed)
        self._disturbed = []
        if self._is_first and self._costs:  # the first save of a launch also plans and allocates buffers
            self._costs.clear()
            self._is_first = False
        self._costs.append(max(stall_seconds, lost))
        self.cost_seconds = statistics.median(self._costs)
        if not self.is_auto:
            return None
        # A save may not begin before the one before is published.
        self.seconds = max(durable_seconds, self.cost_seconds / MAX_SAVE_FRACTION)
        printed = self._printed_seconds
        if printed is not None and 1 / PRINTED_CHANGE < self.seconds / printed < PRINTED_CHANGE:
            return None
        self._printed_seconds = self.seconds
        return (
            f"save_interval: auto is {duration_text(self.seconds)}: a save costs {self.cost_seconds:.3g} s of "
            f"training, {MAX_SAVE_FRACTION:.0%} at that interval"
        )
