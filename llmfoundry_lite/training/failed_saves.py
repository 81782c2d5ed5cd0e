"""Saves that fail one after the other: how many, why, and when the launch has to leave because of them."""

import time
from dataclasses import dataclass

from composer.core import State, Timestamp

from llmfoundry_lite.config.spans import SaveInterval
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.training.schedule import elapsed

AGAIN_SECONDS = 60.0
"""Time after a failed save until the next one is made, if `save_interval` is longer."""


@dataclass(eq=False)
class FailedSaves:
    """The failed saves since the last published one. Ranks count the same; only rank 0's clock counts."""

    limit: SaveInterval
    """`max_unsaved`: how far the run may train, from the first of these on."""
    count: int = 0
    reason: str = ""
    """Why the last one failed."""
    needs_credentials: bool = False
    """New credentials may mend that."""
    _first_at: tuple[float, Timestamp] | None = None
    """When the first one failed, by the monotonic clock and in training."""
    _last_at: float = 0.0

    def note_failure(self, error: UserError, timestamp: Timestamp) -> None:
        self.count += 1
        self.reason = str(error)
        if error.lacks_permission:
            self.reason += "; give this user the right to write there"
        self.needs_credentials = error.needs_credentials
        self._last_at = time.monotonic()
        if self._first_at is None:
            self._first_at = (self._last_at, timestamp)

    def note_published(self) -> None:
        self.count, self.reason, self.needs_credentials = 0, "", False
        self._first_at = None

    def describe(self) -> str:
        """Return why the last one failed, and what mends it if that is known."""
        return f"{self.reason}; renew the credentials" if self.needs_credentials else self.reason

    def wants_save(self) -> bool:
        """Return whether to save now rather than at the next `save_interval`, by this rank's clock."""
        if self._first_at is None:
            return False
        now = time.monotonic()
        first, _ = self._first_at
        is_limit_reached = self.limit.seconds is not None and self._last_at < first + self.limit.seconds <= now
        return is_limit_reached or now - self._last_at >= AGAIN_SECONDS

    def is_over_limit(self, state: State) -> bool:
        """Return whether the run has trained for longer than `max_unsaved`, by this rank's clock."""
        if self._first_at is None:
            return False
        seconds, first = self._first_at
        if self.limit.seconds is not None:
            return time.monotonic() - seconds >= self.limit.seconds
        assert self.limit.span is not None
        unit = self.limit.span.unit
        return elapsed(state, unit) - elapsed(state, unit, first) >= self.limit.span.value
