"""Signals that ask a process to leave. It imports nothing that takes time."""

import signal
from collections.abc import Callable
from typing import Any

LEAVING_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),  # notices of batch systems
)
YIELDING = (signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)


def listened_to() -> list[int]:
    """Return the signals that ask this process to leave.

    `nohup` has a SIGHUP ignored; a library in C may use SIGUSR2 for itself, as a JVM does.
    """
    taken = (None, signal.SIG_IGN)
    return [number for number in LEAVING_SIGNALS if number not in YIELDING or signal.getsignal(number) not in taken]


def listen(handler: Callable[[int, Any], Any]) -> None:
    """Let `handler` hear the signals that ask to leave."""
    for number in listened_to():
        signal.signal(number, handler)


def leaving_because(reason: str) -> str:
    """Write why a process leaves, for the name of a signal or another reason."""
    if reason == "SIGINT":
        return "interrupted by Ctrl-C"
    return f"preempted by {reason}" + (" (its terminal has closed)" if reason == "SIGHUP" else "")
