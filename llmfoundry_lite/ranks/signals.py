"""Signals that ask a process to leave, and how they are handled until the program has begun.

Programs call `leave_with_75_when_asked` before their imports, so this module imports nothing that takes time. Once a
program has begun, `ending.raise_when_interrupted` installs other handlers.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from llmfoundry_lite.errors import EXIT_PREEMPTED

LEAVING_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),  # notices of batch systems
)
"""Signals by which a user, a launcher or a scheduler asks a process to leave."""
before_leaving: Callable[[str], None] = lambda reason: None  # noqa: E731
"""Called with the reason by `leave_now`, just before the process exits. A launch with alerts sets it."""
SKIPPED_IF_HANDLED = (signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)
"""Those that keep their handler if they have one: `nohup` has SIGHUP ignored, and a C library may use SIGUSR2 for
itself, as a JVM does."""


def handled_leaving_signals() -> list[int]:
    """Return the LEAVING_SIGNALS that this process handles.

    Signals of SKIPPED_IF_HANDLED are left out if they are ignored, or if a C library has installed a handler.
    """
    handled = []
    for number in LEAVING_SIGNALS:
        has_foreign_handler = signal.getsignal(number) in (None, signal.SIG_IGN)  # None: set by a C library
        if not (has_foreign_handler and number in SKIPPED_IF_HANDLED):
            handled.append(number)
    return handled


def handle_leaving_signals(handler: Callable[[int, Any], Any]) -> None:
    """Install `handler(number, frame)` for the signals that ask this process to leave. For the main thread only."""
    for number in handled_leaving_signals():
        signal.signal(number, handler)


@contextmanager
def signals_given_back() -> Iterator[None]:
    """Give signals back at the end of the block to the program that calls the library, and that goes on afterwards.

    In the block, a launch installs handlers and a pipe into which Python writes the numbers of signals. Without this,
    Ctrl-C would do nothing after the block but to end the program later, as if it were still the launch. Closing the
    pipe ends the thread that reads it. Does nothing in threads other than the main one, which cannot handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    pipe_of_program = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        pipe_of_launch = signal.set_wakeup_fd(pipe_of_program)
        if pipe_of_launch != -1:
            os.close(pipe_of_launch)
        for number, handler in handlers.items():
            if handler is not None:  # None: set by C code, which Python cannot do again
                signal.signal(number, handler)


def leave_with_75_when_asked() -> None:
    """Exit with code 75 if a signal asks to leave while the program still imports its modules.

    Python's default would be code 143. 75 says that the same command carries on, so this is for programs that can.

    A rank with siblings delays SIGTERM instead: its launcher sends SIGTERM when another rank has failed, and a
    mistake in the configuration or the installation is the same on each, so this rank reports the same one.
    `sigterm_delayed` in `ranks.ending` ends the delay.
    """
    handle_leaving_signals(leave_now)
    if _has_other_ranks():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if "RANK" in os.environ:  # under `srun` this rank is registered later, when srun's variables have been translated
        from llmfoundry_lite.ranks import siblings

        siblings.register_rank()  # from here on the other ranks notice if this one is killed


def leave_now(number: int, frame: Any) -> None:
    """Exit with code 75 (EXIT_PREEMPTED). A handler for signals that come before the program has begun.

    Rank 0 prints the reason. It exits without cleaning up, because an import that it interrupts may swallow exceptions.
    """
    # Read the variable itself, since `ranks.rank` may not be imported yet.
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    reason = describe_reason_to_leave(signal.Signals(number).name)
    if rank == "0":
        os.write(2, f"{reason} before anything had begun; run the same command again\n".encode())
    # Without a record of this exit, the other ranks would believe that this one was killed. If the module is not
    # imported yet, this rank is not registered either.
    with suppress(KeyError, AttributeError):
        siblings: Any = sys.modules["llmfoundry_lite.ranks.siblings"]
        siblings.record_end(EXIT_PREEMPTED)
    before_leaving(reason)
    os._exit(EXIT_PREEMPTED)


def _has_other_ranks() -> bool:
    """Return whether a launcher has started other ranks too, by the variables of `srun` or of the other launchers."""
    variable = "WORLD_SIZE" if "RANK" in os.environ else "SLURM_STEP_NUM_TASKS"
    num_ranks = os.environ.get(variable, "1")
    return num_ranks.isdecimal() and int(num_ranks) > 1


@contextmanager
def signals_delayed(numbers: Sequence[int], then: Callable[[], None]) -> Iterator[None]:
    """Delay signals until the end of a block and of `then()`, which is called after it and may install handlers.

    Signals that came meanwhile are handled then, by the new handlers. If the block raises, they are dropped, and `then`
    is not called, so that the block's error is reported.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
        then()
    except BaseException:
        for number in signal.sigpending() & {*numbers}:
            signal.sigwait([number])  # takes the pending signal without handling it
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def describe_reason_to_leave(reason: str) -> str:
    """Return the words for why a process leaves, such as `preempted by SIGTERM`, for a signal's name or another
    reason."""
    if reason == "SIGINT":
        return "interrupted by Ctrl-C"
    if reason == "SIGHUP":
        return "preempted by SIGHUP (its terminal has closed)"
    return f"preempted by {reason}"
