"""Retries: pauses and limits for faults that may pass, and a second reading of files that seem damaged.

`Budget` says how often and for how long, `keep_trying` calls a function within a budget, and `retry_transient_errors`
is the usual call for a single file. `as_os_errors` makes the errors of all storage clients OSErrors, which these retry.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmfoundry_lite.errors import DamagedCheckpointError

T = TypeVar("T")


class NoAnswerError(TimeoutError):
    """A server has not answered for so long that the user, who waits at a terminal, is told. It is not tried again."""


PAUSES_SECONDS = (0.2, 0.6, 1.8)
"""Pauses before the second, third and fourth attempt at a file: 2.6 s in all."""
LASTING_ERRORS = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    NoAnswerError,
)
"""Errors that another attempt a few seconds later would meet again."""


@dataclass
class Budget:
    """How many more attempts a failing operation gets, limited by their number, by time, or both.

    With pauses (1, 5) and 4 attempts, `pause()` returns 1, 5, 5, 5 and then None. A budget is never refilled: a
    caller that makes progress creates a new one.
    """

    pauses: Sequence[float]
    """Seconds before each further attempt. The last value repeats."""
    attempts: float = math.inf
    """Maximum number of further attempts."""
    seconds: float = math.inf
    """Maximum time from `began` to the last attempt."""
    began: float = 0.0
    """Time of the first failure in seconds, by the clock whose time is passed to `pause`: `time.monotonic()`."""
    num_paused: int = 0
    """Number of further attempts that `pause` has granted so far."""

    def pause(self, now: float = 0.0) -> float | None:
        """Grant one more attempt: return the seconds to wait before it, or None if the budget is used up.

        `now` is a time by the clock of `began`. Counts the attempt in `num_paused`. The caller does the waiting.
        """
        seconds_left = self.began + self.seconds - now
        if self.num_paused >= self.attempts or seconds_left <= 0:
            return None
        self.num_paused += 1
        index = min(self.num_paused, len(self.pauses)) - 1  # the last pause repeats
        return min(self.pauses[index], seconds_left)


def keep_trying(call: Callable[[], T], budget: Budget, may_pass: Callable[[OSError], bool]) -> T:
    """Call a function until it succeeds, with pauses, and return its result.

    It is called again after an OSError for which `may_pass` returns True. Other errors are raised at once, and so is
    the last OSError when the budget is used up.
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

    It is called again after an OSError of a disk or a network that may pass: any but LASTING_ERRORS, or with `only`,
    one whose errno is listed there. Raises the last error, and other errors at once.
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

    `read` takes `bypass_cache`, which is True at the second call, and returns what it has read. Raises
    DamagedCheckpointError if both calls find damage.
    """
    try:
        return read(False)
    except DamagedCheckpointError:
        return read(True)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn errors of object stores' clients into OSError, such as botocore's error for missing credentials.

    Use it as a context manager or as a decorator. Errors that callers handle by their type pass unchanged: a client
    without conditional writes, for example, raises TypeError, NotImplementedError or ValueError.
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
