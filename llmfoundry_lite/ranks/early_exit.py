"""Signals that come while a program still imports: exit with code 75, where Python would exit with 143.

It imports nothing that takes time. `ranks.ending`, the launcher and the relay replace its handlers with their own.
"""

import os
import signal
from typing import Any

from llmfoundry_lite.errors import EXIT_PREEMPTED


def leave_with_75_when_asked() -> None:
    """Exit with code 75 on SIGINT, SIGTERM and SIGUSR1. For programs that the same command carries on."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, frame: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        because = "interrupted by Ctrl-C" if number == signal.SIGINT else f"preempted by {name}"
        os.write(2, f"{because} before anything had begun; run the same command again\n".encode())
    os._exit(EXIT_PREEMPTED)
