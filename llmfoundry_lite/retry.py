"""When to try again what may pass: pauses, and where they end. Callers have the clock and sleep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Budget:
    """Further attempts after one that failed, so many or for so long. Progress begins a new one."""

    pauses: Sequence[float]
    """Seconds before each further attempt; the last one repeats."""
    attempts: float = math.inf
    """How many further attempts there are."""
    seconds: float = math.inf
    """How long after `began` the last one is."""
    began: float = 0.0
    num_paused: int = 0

    def pause(self, now: float = 0.0) -> float | None:
        """Return the seconds until the next attempt; None if there is none. `now` is of the clock of `began`."""
        left = self.began + self.seconds - now
        if self.num_paused >= self.attempts or left <= 0:
            return None
        self.num_paused += 1
        return min(self.pauses[min(self.num_paused, len(self.pauses)) - 1], left)
