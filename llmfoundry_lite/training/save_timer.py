"""Saves by time: rank 0's clock, and for `save_interval: auto` what a save costs and the interval that follows from it.

The cost of a save is what training loses to it: the batches from its beginning until it is published, less as many
undisturbed ones; never less than the stall. The other ranks hear from rank 0 when a save is due (`agreement`), so that
all of them save after the same batch, whatever their own clocks say.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from llmfoundry_lite.checkpoint.intervals import LARGEST_SHARE, choose_save_interval
from llmfoundry_lite.launch.log_lines import duration_text

FIRST_SECONDS = 60.0
"""Of training before the first save, which tells what one costs."""
NUM_COSTS, NUM_BATCHES = 5, 50
"""So many of the latest are remembered."""
WORTH_A_LINE = 1.5
"""Times longer or shorter is an interval that the user is told of again."""


class SaveTimer:
    def __init__(
        self,
        seconds: float | None,
        seconds_between_failures: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """`seconds` None: auto."""
        self.is_auto = seconds is None
        self.seconds = FIRST_SECONDS if seconds is None else seconds
        """The interval."""
        self.seconds_between_failures = seconds_between_failures
        self.cost_seconds: float | None = None
        self.now = now
        self._since = now()
        self._undisturbed: deque[float] = deque(maxlen=NUM_BATCHES)
        self._disturbed: list[float] = []
        self._costs: deque[float] = deque(maxlen=NUM_COSTS)
        self._is_first = True
        self._told_seconds: float | None = None

    def note_batch(self, seconds: float, is_saving: bool) -> None:
        """`is_saving`: a save went on behind it, or held it up."""
        (self._disturbed if is_saving else self._undisturbed).append(seconds)

    def is_due(self) -> bool:
        return self.now() - self._since >= self.seconds

    def note_begun(self) -> None:
        self._since = self.now()

    def note_published(self, stall_seconds: float, durable_seconds: float) -> str | None:
        """Choose anew. A line for the user when the choice is news."""
        usual = statistics.median(self._undisturbed) if self._undisturbed else float("inf")
        lost = sum(seconds - usual for seconds in self._disturbed)
        self._disturbed = []
        if self._is_first and self._costs:  # the first save of a launch makes its plan and its buffers
            self._costs.clear()
            self._is_first = False
        self._costs.append(max(stall_seconds, lost))
        self.cost_seconds = statistics.median(self._costs)
        if not self.is_auto:
            return None
        # A save that would begin before the last one has ended waits for it.
        self.seconds = max(durable_seconds, choose_save_interval(self.cost_seconds, self.seconds_between_failures))
        told, self._told_seconds = self._told_seconds, self._told_seconds or self.seconds
        if told is not None and 1 / WORTH_A_LINE < self.seconds / told < WORTH_A_LINE:
            return None
        self._told_seconds = self.seconds
        return f"save_interval: auto is {duration_text(self.seconds)}: {self._why()}"

    def _why(self) -> str:
        cost = f"a save costs {self.cost_seconds:.3g} s of training"
        between = self.seconds_between_failures
        if between is None:
            return f"{cost}, {LARGEST_SHARE:.0%} at that interval"
        return f"{cost}, and this run fails every {duration_text(between)}"
