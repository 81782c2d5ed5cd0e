"""Saves that fail one after the other: how many, why, and when the launch has to leave because of them."""

import time
from dataclasses import dataclass

from composer.core import State, Timestamp

from llmfoundry_lite.config.spans import SaveInterval
from llmfoundry_lite.errors import CheckpointError, TransientError, UserError
from llmfoundry_lite.training.schedule import elapsed

AGAIN_SECONDS = 60.0
"""Time after a failed save until the next one is made, if `save_interval` is longer."""


@dataclass(eq=False)
class FailedSaves:
    """The failed saves since the last published one. All ranks count the same ones, but only rank 0's clock counts."""

    limit: SaveInterval
    """`max_unsaved`: how far the run may train after the first of these, in seconds or in training."""
    count: int = 0
    reason: str = ""
    """Why the last save failed; empty if none did."""
    needs_credentials: bool = False
    """The last save failed because credentials are wrong or have expired."""
    _first_seconds: float | None = None
    """Monotonic time at which the first one failed; None if none did."""
    _first_timestamp: Timestamp | None = None
    """The run's clock at that moment."""
    _last_seconds: float = 0.0
    """Monotonic time at which the last one failed."""

    def note_failure(self, error: UserError, timestamp: Timestamp) -> None:
        """Note that a save has failed with `error`, at the time `timestamp` of the run."""
        self.count += 1
        self.reason = str(error)
        if error.lacks_permission:
            self.reason += "; give this user the right to write there"
        self.needs_credentials = error.needs_credentials
        self._last_seconds = time.monotonic()
        if self._first_seconds is None:
            self._first_seconds = self._last_seconds
            self._first_timestamp = timestamp

    def note_published(self) -> None:
        """Note that a save is published, and forget the failed ones."""
        self.count = 0
        self.reason = ""
        self.needs_credentials = False
        self._first_seconds = None
        self._first_timestamp = None

    def describe(self) -> str:
        """Return why the last save failed, and what to do about it if that is known; empty if none failed."""
        return f"{self.reason}; renew the credentials" if self.needs_credentials else self.reason

    def wants_save(self) -> bool:
        """Return whether to save now, before the next `save_interval`, because saves have failed. Not collective.

        This rank's clock decides: some time after the last failure, and once more when `max_unsaved` is reached, as the
        last attempt before the launch has to leave.
        """
        if self._first_seconds is None:
            return False
        now = time.monotonic()
        if now - self._last_seconds >= AGAIN_SECONDS:
            return True
        if self.limit.seconds is None:
            return False
        deadline = self._first_seconds + self.limit.seconds
        has_failed_since_deadline = self._last_seconds >= deadline
        return now >= deadline and not has_failed_since_deadline

    def is_over_limit(self, state: State) -> bool:
        """Return whether the run has trained for longer than `max_unsaved` since the first failed save.

        Not collective. If that limit is in seconds, this rank's clock decides, so the answer may differ between ranks.
        """
        if self._first_seconds is None:
            return False
        if self.limit.seconds is not None:
            return time.monotonic() - self._first_seconds >= self.limit.seconds

        assert self.limit.span is not None
        unit = self.limit.span.unit
        trained = elapsed(state, unit) - elapsed(state, unit, self._first_timestamp)
        return trained >= self.limit.span.value

    def limit_error(self, num_unsaved: int) -> CheckpointError:
        """Return the error that ends a launch at `max_unsaved`, with `num_unsaved` batches that no save holds."""
        return self._error(
            f"max_unsaved: saves have failed for {self.limit.written}; unsaved batches {num_unsaved}, failed saves "
            f"{self.count}, the last one: {self.reason}"
        )

    def last_error(self) -> CheckpointError:
        """Return the error that ends a launch whose last save has failed."""
        return self._error(self.reason)

    def _error(self, text: str) -> CheckpointError:
        """Return an error that ends a launch whose saves fail.

        The fault may pass, so a launcher may try again: an earlier save succeeded, or this launch could not have taken
        the lease.
        """
        error = CheckpointError(text)
        error.__cause__ = TransientError(text)
        error.needs_credentials = self.needs_credentials
        return error
