"""Limits on strangers: connections whose other end has not proved the token yet.

Anyone who reaches a port can open connections. Strangers must not keep peers out, use up the files that a process may
open, or fill its log. `Strangers` limits their number, and `ThrottledLog` the lines about them. The coordinator and the
ranks' listeners use both. This file does not import torch.
"""

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

REMARK_SECONDS = 10.0
"""Shortest time between two lines of a ThrottledLog."""

T = TypeVar("T", bound=Hashable)


class Strangers(Generic[T]):
    """The connections that are in their handshake. Any thread may call its methods.

    If there are too many, one is dropped: the oldest from the host that has the most, so that no host keeps others out.
    """

    def __init__(self, max_connections: int):
        """Keep at most `max_connections`, or half of the files that this process may open if that is fewer."""
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_connections = max(1, min(max_connections, max_files // 2))
        self._hosts: dict[T, str] = {}
        """Connection -> its host, in order of arrival."""
        self._lock = threading.Lock()

    def add(self, connection: T, host: str) -> T | None:
        """Add a connection. Returns a connection that is dropped and that the caller has to close, or None."""
        with self._lock:
            self._hosts[connection] = host
            if len(self._hosts) <= self.max_connections:
                return None
            [(busiest_host, _)] = Counter(self._hosts.values()).most_common(1)
            oldest = next(other for other, its_host in self._hosts.items() if its_host == busiest_host)
            del self._hosts[oldest]
            return oldest

    def remove(self, connection: T) -> bool:
        """Remove a connection after its handshake. Returns False if it is not here, because it was dropped before."""
        with self._lock:
            return self._hosts.pop(connection, None) is not None


class ThrottledLog:
    """A log that writes the first line, and then at most one line in REMARK_SECONDS.

    It leaves out the others, and the next line has their number.
    """

    def __init__(self, log: Callable[[str], None]):
        """Write lines with `log`."""
        self.log = log
        self._num_left_out = 0
        self._next_at = 0.0
        """Monotonic time from which the next line is written."""

    def __call__(self, line: str) -> None:
        """Write a line, or leave it out."""
        if time.monotonic() < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            line += f" (and {self._num_left_out} more since the last such line)"
        self.log(line)
        self._num_left_out = 0
        self._next_at = time.monotonic() + REMARK_SECONDS


def describe_refusal(error: OSError) -> str:
    """Return a line that says why no connection could be accepted, and what to do if too many files are open."""
    return f"cannot accept connections: {error.strerror}; those that are open go on; raise `ulimit -n` if it stays so"
