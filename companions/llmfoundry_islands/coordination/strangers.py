"""Connections that have not proved the token yet: how many a listener keeps, and how often it speaks of them. No torch.

Whoever reaches a port can open connections. They must neither keep peers out, nor use up the files that a process may
open, nor fill its log.
"""

import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

REMARK_SECONDS = 10.0
"""Time between two lines of one sort."""

T = TypeVar("T", bound=Hashable)


class Strangers(Generic[T]):
    """Connections in their handshake. If there are too many, the oldest from the host that has most is dropped, so that
    no host keeps others out."""

    def __init__(self, most: int):
        """Keep at most `most` connections, or half of the files that this process may open if that is fewer."""
        self.most = max(1, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._hosts: dict[T, str] = {}
        self._lock = threading.Lock()

    def add(self, connection: T, host: str) -> T | None:
        """Note a connection. Returns the one to close for it, if there is one."""
        with self._lock:
            self._hosts[connection] = host
            if len(self._hosts) <= self.most:
                return None
            crowd = Counter(self._hosts.values()).most_common(1)[0][0]
            oldest = next(one for one, where in self._hosts.items() if where == crowd)
            del self._hosts[oldest]
            return oldest

    def remove(self, connection: T) -> bool:
        """Forget a connection. Returns False if it had been dropped."""
        with self._lock:
            return self._hosts.pop(connection, None) is not None


class Remarks:
    """Prints the first line, then at most one in REMARK_SECONDS, with the number of lines left out."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self._num_unsaid = 0
        self._next_at = 0.0

    def __call__(self, line: str) -> None:
        if time.monotonic() < self._next_at:
            self._num_unsaid += 1
            return
        self.say(line + (f" (and {self._num_unsaid} more since the last such line)" if self._num_unsaid else ""))
        self._num_unsaid, self._next_at = 0, time.monotonic() + REMARK_SECONDS


def describe_refusal(error: OSError) -> str:
    """Say why no connection could be accepted and, if too many files are open, what to do."""
    return f"cannot accept connections: {error.strerror}; those that are open go on; raise `ulimit -n` if it stays so"
