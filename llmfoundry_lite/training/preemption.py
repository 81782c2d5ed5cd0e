"""Reasons to leave early, and leaving in time: Ctrl-C, SIGTERM and its like, a deadline, a file named STOP.

Python's signal handlers do not run while the main thread sits in a collective, so a thread listens: signals reach it
through a pipe that the interpreter's C handler writes into, and on rank 0 it looks for the file. It notes the reason
and starts the clock. The main threads of all ranks agree at the next end of a batch, save, and leave; if they cannot
in time, because a batch, a collective or a disk takes longer, the thread ends the process and the last periodic save
stands. A launcher sends SIGTERM too, when another rank has failed: then the launch has failed, and is not preempted.
A scheduler that sends a signal kills soon after. Nobody kills after writing the file, so it allows the time of
two batches more. A second Ctrl-C, more than two seconds after the first, ends the process at once.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llmfoundry_lite.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from llmfoundry_lite.ranks.ending import (
    LAUNCHED_AT,
    announce_preemption,
    announced_preemption,
    describe_failure,
    is_second_press,
    known_failure,
    leave,
)
from llmfoundry_lite.ranks.exchange import all_reduce_max
from llmfoundry_lite.ranks.identity import age_seconds, uptime
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, leaving_because, listen

REASONS = (
    "",
    *(signal.Signals(number).name for number in LEAVING_SIGNALS if number != signal.SIGINT),
    *("max_wall_time", "the file STOP", "SIGINT"),
)
"""Ranks exchange an index of these; the highest wins."""
STOP = "STOP"
BY_FILE = REASONS.index("the file STOP")
BY_KEY = REASONS.index("SIGINT")


@dataclass(eq=False)
class Preemption:
    """`reason` is what this rank knows of; `agreed` is what all ranks have agreed on."""

    run_folder: Path
    grace_seconds: float
    max_wall_seconds: float | None
    on_request: Callable[[str], None]
    """Called with a new reason, from any thread."""
    on_leave: Callable[[str, str], None]
    """Called with a status and why, just before the process is ended: late, or because Ctrl-C was pressed again."""
    reason: int = 0
    agreed: int = 0
    saved: str | None = None
    """On rank 0: the save that was published after the first reason to leave."""
    has_saved: bool = False
    """On rank 0: this launch has published a save."""
    what_stands: Callable[[], str] = lambda: "nothing was trained yet"
    """Says what is left of a run that leaves without a save, where this launch has published none."""
    why_unsaved: Callable[[], str] = lambda: ""
    """Says why the last save failed, if it did."""
    release_lease: Callable[[], None] = lambda: None
    """Lets another launch carry on at once, just before the process is ended."""

    def __post_init__(self) -> None:
        self.stop_file, wall = self.run_folder / STOP, self.max_wall_seconds
        self.deadline = time.monotonic() - age_of_launch() + wall if wall is not None else None
        self.leave_by: float | None = None
        self.failure: FirstError | None = None
        """The failure of another rank, because of which the launcher has asked this one to leave."""
        self._pressed_at: list[float] = []
        self._seconds_left = self.grace_seconds
        self._longest_step_seconds = 0.0
        self._last_step: float | None = None
        self._is_main = False
        self._may_ask = True
        self._asking = threading.Lock()

    # ---------------------------------------------------------------------------------------------- the main thread

    def listen(self) -> None:
        """Start the threads, for the rest of the process's life; after Composer has installed its handlers."""
        self._is_main = dist.get_rank() == 0
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A forked child that is terminated must neither survive nor tell its parent's thread.
        os.register_at_fork(after_in_child=_forget)
        listen(lambda number, frame: None)  # the thread reads it from the pipe
        threading.Thread(target=self._listen, name="preemption", daemon=True).start()
        threading.Thread(target=self._ask, name="preemption-of-others", daemon=True).start()

    def agree_on_reason(self) -> str:
        """Return the reason to leave that any rank knows of, or "". Every rank must call this at the same places."""
        return self.set_agreed(all_reduce_max([self.look()])[0])

    def look(self) -> int:
        """Return what this rank knows of, at the end of a batch or of a part of an evaluation."""
        now = time.monotonic()
        if self._last_step is not None:
            self._longest_step_seconds = max(self._longest_step_seconds, now - self._last_step)
        self._last_step = now
        self._look_for_file()
        return self.reason

    def set_agreed(self, reason: int) -> str:
        """Take over the reason that all ranks have agreed on."""
        self.agreed = reason
        if self.agreed and not self.reason:
            self._request(self.agreed)
        return REASONS[self.agreed]

    def because(self, agreed: str) -> str:
        """Say why the run leaves. Ctrl-C is named even if the ranks had agreed on the SIGTERM that a launcher sent
        after it: which of two signals a thread hears first is the kernel's choice."""
        return leaving_because(REASONS[BY_KEY] if self.reason == BY_KEY else agreed)

    def note_saved(self, name: str) -> None:
        """Note from any thread that `name` has been published."""
        self.has_saved = True
        if self.reason:
            self.saved = name

    def stands(self) -> str:
        return "what was saved stands" if self.has_saved else self.what_stands()

    def stop_polling_store(self) -> None:
        """Stop asking torch: the process is about to end. Python ends daemon threads without unwinding them, and one
        that is inside of C++ then takes the process down with an abort."""
        self._may_ask = False
        if self._asking.acquire(timeout=2.0):
            self._asking.release()

    def consume_stop_file(self) -> None:
        """Remove the file: the next launch must not find it."""
        if self._is_main and (self.agreed or self.reason):
            try:
                self.stop_file.unlink(missing_ok=True)
            except OSError as error:  # all is saved and said; a folder of that name, a disk that is read-only by now
                print(f"warning: {self.stop_file} cannot be removed: {error.strerror}", flush=True)

    # -------------------------------------------------------------------------------------------------- the threads

    def _listen(self) -> None:
        while True:
            wake_at = self.leave_by if self.leave_by is not None else self.deadline
            # At least once a second: another rank, or our own main thread, may have learnt of a reason.
            timeout = 1.0 if wake_at is None else min(max(0.0, wake_at - time.monotonic()), 1.0)
            ready, _, _ = select.select([self._pipe], [], [], timeout)
            for number in os.read(self._pipe, 64) if ready else b"":
                self._hear(number)
            self._look_for_file()
            now = time.monotonic()
            self._leave_if_late(now)
            if self.deadline is not None and now >= self.deadline:
                self._request(REASONS.index("max_wall_time"))

    def _hear(self, number: int) -> None:
        if number == signal.SIGINT and is_second_press(self._pressed_at):
            text = f"interrupted by Ctrl-C a second time: nothing more was saved; {self.stands()}"
            self._leave("failed", text, EXIT_INTERRUPTED)
        if number in LEAVING_SIGNALS:
            if number != signal.SIGINT and not self.reason:
                self.failure = known_failure()
            self._request(REASONS.index(signal.Signals(number).name))

    def _leave_if_late(self, now: float) -> None:
        if self.leave_by is None or now < self.leave_by:
            return
        if self.failure is not None:
            self._leave("failed", describe_failure(self.failure), self.failure.code)
            return
        because, seconds = leaving_because(REASONS[self.reason]), f"{self._seconds_left:.3g} s"
        why_unsaved = self.why_unsaved()
        if why_unsaved and self.saved is None:  # 75 would promise that the state is saved
            text = f"{because}, but saves fail: {why_unsaved}; {self.stands()}"
            self._leave("failed", text, EXIT_FAILURE)
            return
        text = f"{because}: nothing could be saved within {seconds}; {self.stands()}"
        if self.saved is not None:
            text = f"{because}: saved as {self.saved}; closing the run took more than the rest of {seconds}"
        self._leave("preempted", text, EXIT_PREEMPTED)

    def _ask(self) -> None:
        """Poll what other ranks have announced. In a thread of its own: when the rank that keeps the store is frozen
        or gone, the store never answers, and the other thread must go on listening."""
        while not self.reason:
            with self._asking:
                if not self._may_ask:
                    return
                announced = announced_preemption()
            if announced:
                self._request(REASONS.index(announced))
            time.sleep(1.0)

    def _look_for_file(self) -> None:
        if self._is_main and not self.reason and self.stop_file.exists():
            self._request(BY_FILE)

    def _request(self, reason: int) -> None:
        # A launcher answers Ctrl-C with SIGTERM. Of two signals that wait for a process, the kernel runs the handler of
        # the later one first: Ctrl-C is the reason, whichever came in first.
        if self.reason and (reason != BY_KEY or self.reason == BY_KEY):
            return
        if reason == BY_FILE:
            self._seconds_left += 2 * self._longest_step_seconds
        if self.leave_by is None:
            self.leave_by = time.monotonic() + self._seconds_left
        self.reason = reason
        if self.failure is not None:
            return
        with suppress(Exception):
            self.on_request(REASONS[reason])
        announce_preemption(REASONS[reason])

    def _leave(self, status: str, text: str, exit_code: int) -> None:
        with suppress(Exception):
            self.on_leave(status, text)
            if self._is_main and status == "preempted" and self.reason == BY_FILE:
                self.stop_file.unlink(missing_ok=True)
        with suppress(Exception):
            self.release_lease()
        leave(exit_code)


def age_of_launch() -> float:
    """Return the seconds of the launch, restarts of ranks included: torchrun's agent, their parent, restarts them."""
    if LAUNCHED_AT in os.environ:
        return max(0.0, uptime() - float(os.environ[LAUNCHED_AT]))
    return age_seconds(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


def _forget() -> None:
    """Reset signals in a forked child to their defaults, except those that a terminal sends to children too: the parent
    leaves, and loader workers must serve it until then."""
    with suppress(ValueError):  # forked from another thread than the main one, which has no handlers to lose
        signal.set_wakeup_fd(-1)
        for number in LEAVING_SIGNALS:
            handler: Any = signal.getsignal(number)
            if callable(handler) and getattr(handler, "__module__", "") == __name__:
                is_for_all = number in (signal.SIGINT, signal.SIGHUP)
                signal.signal(number, signal.SIG_IGN if is_for_all else signal.SIG_DFL)
