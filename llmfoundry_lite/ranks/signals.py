"""Signals that ask a process to leave, and what they do until it has begun. It imports nothing that takes time."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from llmfoundry_lite.errors import EXIT_PREEMPTED

LEAVING_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),  # notices of batch systems
)
YIELDING = (signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)


def listened_to() -> list[int]:
    """Return the signals that ask this process to leave. `nohup` has a SIGHUP ignored; a library in C may use SIGUSR2
    for itself, as a JVM does."""
    taken = (None, signal.SIG_IGN)
    return [number for number in LEAVING_SIGNALS if number not in YIELDING or signal.getsignal(number) not in taken]


def listen(handler: Callable[[int, Any], Any]) -> None:
    """Let `handler` hear the signals that ask to leave."""
    for number in listened_to():
        signal.signal(number, handler)


def leave_with_75_when_asked() -> None:
    """Exit with code 75 on a signal that comes while a program still imports, where Python would exit with 143. For
    programs that carry on when the same command is run again.

    Of several ranks, SIGTERM waits: a launcher sends it when one has failed, and a mistake in the configuration or the
    installation is the same on each. `ranks.ending.checks` ends the wait.
    """
    listen(leave_now)
    if _has_siblings():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if "RANK" in os.environ:  # `srun`'s variables are translated later
        from llmfoundry_lite.ranks import siblings

        siblings.enrol()  # from here on the other ranks notice if this one dies


def leave_now(number: int, frame: Any) -> None:
    """Handle a signal before anything has begun."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        because = leaving_because(signal.Signals(number).name)
        os.write(2, f"{because} before anything had begun; run the same command again\n".encode())
    with suppress(KeyError, AttributeError):  # siblings that are not imported yet have no notes
        siblings: Any = sys.modules["llmfoundry_lite.ranks.siblings"]
        siblings.note_end(EXIT_PREEMPTED)  # else the others would think that this rank was killed
    os._exit(EXIT_PREEMPTED)


def _has_siblings() -> bool:
    """Return whether a launcher has started other ranks, by the variables of `srun` or the others'."""
    num_ranks = os.environ.get("WORLD_SIZE" if "RANK" in os.environ else "SLURM_STEP_NUM_TASKS", "1")
    return num_ranks.isdecimal() and int(num_ranks) > 1


@contextmanager
def put_off(numbers: Sequence[int], then: Callable[[], None]) -> Iterator[None]:
    """Let signals wait until the end of a block, and of what comes `then`. They are dropped if the block raises."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
        then()
    except BaseException:
        for number in signal.sigpending() & {*numbers}:
            signal.sigwait([number])
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def leaving_because(reason: str) -> str:
    """Return the words for why a process leaves, given the name of a signal or another reason."""
    if reason == "SIGINT":
        return "interrupted by Ctrl-C"
    return f"preempted by {reason}" + (" (its terminal has closed)" if reason == "SIGHUP" else "")
