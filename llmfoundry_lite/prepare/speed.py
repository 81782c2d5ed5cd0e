"""The speed of a preparation, and how long the rest of it takes at this speed."""

import time
from collections.abc import Callable

from llmfoundry_lite.prepare.token_files import FinishedUnit

EARLY_SECONDS = 60.0
"""Time after which a preparation tells its speed. It includes starting the workers, which takes a few seconds."""


def describe_rest_of_work(new_bytes: int, core_seconds: float, left_bytes: int, num_cores: int) -> str:
    """Describe the speed of tokenising, and the time that the rest takes.

    new_bytes, core_seconds: bytes of the source that were tokenised, and the time that all cores together took.
    left_bytes: bytes of the source that are left.
    num_cores: number of cores that work now; 0 if none does.

    Returns for instance "1.90 MB/s a core; 0.50 core-hours left, 0.25 hours on the 2 cores that work now".
    """
    bytes_per_core_second = new_bytes / core_seconds
    core_hours_left = left_bytes / bytes_per_core_second / 3600
    line = f"{bytes_per_core_second / 1e6:.2f} MB/s a core; {core_hours_left:.2f} core-hours left"
    if num_cores:
        line += f", {core_hours_left / num_cores:.2f} hours on the {num_cores} cores that work now"
    return line


class EarlyEstimate:
    """Estimate of how long a preparation takes, which the user is told once, EARLY_SECONDS after the beginning."""

    def __init__(
        self,
        total_bytes: int | None,
        num_workers: int,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure. `total_bytes` are those of the source; nothing is told if they are unknown."""
        self._total_bytes = total_bytes
        self._num_workers = num_workers
        self._notify = notify
        self._clock = clock
        self._began = clock()
        self._done_bytes = 0
        self._new_bytes = 0
        self._has_told = False

    def add(self, finished: FinishedUnit) -> None:
        """Count a unit whose token file is complete, and tell the estimate when it is time."""
        self._done_bytes += finished.unit.num_bytes
        if finished.counts is not None:  # an earlier launch has not tokenised it
            self._new_bytes += finished.unit.num_bytes

        seconds = self._clock() - self._began
        is_time = seconds >= EARLY_SECONDS and self._new_bytes > 0
        if self._has_told or not is_time or not self._total_bytes:
            return
        self._has_told = True
        left_bytes = max(self._total_bytes - self._done_bytes, 0)
        rest = describe_rest_of_work(self._new_bytes, seconds * self._num_workers, left_bytes, self._num_workers)
        self._notify(f"{self._done_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB tokenised: {rest}")
