"""Retries: pauses and limits for faults that may pass, and a second reading of files that seem damaged."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmfoundry_lite.errors import DamagedCheckpointError

T = TypeVar("T")


class NoAnswerError(TimeoutError):
    """A server has not answered for so long that its user, who waits at a terminal, is told now. Not tried again."""


PAUSES_SECONDS = (0.2, 0.6, 1.8)
"""Pauses before each further attempt at a file."""
LASTING_ERRORS = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    NoAnswerError,
)
"""Errors that do not pass in a moment."""


@dataclass
class Budget:
    """How many more attempts a failing operation gets, limited by their number, by time, or both.

    A caller that makes progress creates a new budget.
    """

    pauses: Sequence[float]
    """Seconds before each further attempt. The last value repeats."""
    attempts: float = math.inf
    """Maximum number of further attempts."""
    seconds: float = math.inf
    """Maximum time from `began` to the last attempt."""
    began: float = 0.0
    """When the first attempt failed, by the clock that is passed to `pause`, such as `time.monotonic()`."""
    num_paused: int = 0
    """Number of further attempts that `pause` has granted so far."""

    def pause(self, now: float = 0.0) -> float | None:
        """Grant one more attempt: return the seconds to wait before it, or None if the budget is used up.

        `now` is a time by the clock of `began`. Counts the attempt in `num_paused`.
        """
        seconds_left = self.began + self.seconds - now
        if self.num_paused >= self.attempts or seconds_left <= 0:
            return None
        self.num_paused += 1
        index = min(self.num_paused, len(self.pauses)) - 1
        return min(self.pauses[index], seconds_left)


def keep_trying(call: Callable[[], T], budget: Budget, may_pass: Callable[[OSError], bool]) -> T:
    """Call a function until it succeeds, with pauses, and return its result.

    Raises an OSError that `may_pass` says will not pass, or the last one when the budget is used up.
    """
    while True:
        try:
            return call()
        except OSError as error:
            if not may_pass(error):
                raise
            pause = budget.pause(time.monotonic())
            if pause is None:
                raise
        time.sleep(pause)


def retry_transient_errors(call: Callable[[], T], only: Sequence[int] | None = None) -> T:
    """Call a function up to four times, with the pauses of PAUSES_SECONDS, and return its result.

    It is called again after any OSError of a disk or a network that may pass. With `only`, those are the errors whose
    errno is in it. Raises the last error, and other errors at once.
    """

    def may_pass(error: OSError) -> bool:
        is_lasting = isinstance(error, LASTING_ERRORS)
        is_listed = only is None or error.errno in only
        return is_listed and not is_lasting

    call_with_os_errors = as_os_errors()(call)
    budget = Budget(PAUSES_SECONDS, attempts=len(PAUSES_SECONDS))
    return keep_trying(call_with_os_errors, budget, may_pass)


def retry_on_damage(read: Callable[[bool], T]) -> T:
    """Read something, and read it a second time if it seems damaged, because a transfer or a cache may be at fault.

    `read` takes `bypass_cache`, which is True at the second call. Raises DamagedCheckpointError if both find damage.
    """
    try:
        return read(False)
    except DamagedCheckpointError:
        return read(True)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn errors of object stores' clients into OSError, such as botocore's error for missing credentials.

    Errors that callers handle by their type pass unchanged: a client without conditional writes, for example, raises
    TypeError, NotImplementedError or ValueError.
    """
    try:
        yield
    except (OSError, EOFError, TypeError, NotImplementedError, ValueError):
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has no message."""
    message = str(error).strip() or type(error).__name__
    return message.split("\n")[0]
