"""Retries: pauses and limits for faults that may pass, and a second reading of files that seem damaged."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from llmfoundry_lite.errors import DamagedCheckpointError

T = TypeVar("T")

PAUSES_SECONDS = (0.2, 0.6, 1.8)
"""Pauses before each further attempt at a file."""
LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors of a disk that do not pass in a moment."""


@dataclass
class Budget:
    """Budget of further attempts after a failed one, by number or by time. Progress begins a new budget."""

    pauses: Sequence[float]
    """Seconds before each further attempt; the last one repeats."""
    attempts: float = math.inf
    """Number of further attempts."""
    seconds: float = math.inf
    """Time from `began` to the last attempt."""
    began: float = 0.0
    num_paused: int = 0

    def pause(self, now: float = 0.0) -> float | None:
        """Return the seconds until the next attempt; None if there is none. `now` is by the clock of `began`."""
        left = self.began + self.seconds - now
        if self.num_paused >= self.attempts or left <= 0:
            return None
        self.num_paused += 1
        return min(self.pauses[min(self.num_paused, len(self.pauses)) - 1], left)


def keep_trying(call: Callable[[], T], budget: Budget, may_pass: Callable[[OSError], bool]) -> T:
    """Repeat a call until it succeeds. Raises an error that does not pass, or the last error of the budget."""
    while True:
        try:
            return call()
        except OSError as error:
            if not may_pass(error) or (pause := budget.pause(time.monotonic())) is None:
                raise
        time.sleep(pause)


def retry_transient_errors(call: Callable[[], T], only: Sequence[int] | None = None) -> T:
    """Repeat a call after an error that may pass: any OSError of disk or network, or with `only` those errnos."""

    def may_pass(error: OSError) -> bool:
        return not isinstance(error, LASTING) and (only is None or error.errno in only)

    return keep_trying(as_os_errors()(call), Budget(PAUSES_SECONDS, attempts=len(PAUSES_SECONDS)), may_pass)


def retry_on_damage(look: Callable[[bool], T]) -> T:
    """Call `look(bypass_cache=False)`; if it finds damage, `look(True)`, as a transfer or a cache may be at fault."""
    try:
        return look(False)
    except DamagedCheckpointError:
        return look(True)


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Raise OSError for errors of object stores' clients, such as botocore's without credentials."""
    try:
        yield
    except (OSError, EOFError, TypeError, NotImplementedError, ValueError):
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
