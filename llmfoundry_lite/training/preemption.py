"""Reasons to leave early, and leaving in time: Ctrl-C, SIGTERM and similar signals, a deadline, a file named STOP.

Python's signal handlers do not run while the main thread is in a collective, so a thread listens. Signals reach it
through a pipe, into which the interpreter's C handler writes, and on rank 0 it looks for the file. The thread notes the
reason and starts a clock. At the next end of a batch, the main threads of all ranks agree on the reason, save and
leave. If they cannot in time, because a batch, a collective or a disk takes longer, the thread ends the process, and
the last periodic save is what remains.

A launcher sends SIGTERM to the other ranks when one has failed. The launch has failed then, and is not preempted.
A scheduler that sends a signal kills the process soon after. Nobody kills it after writing the file STOP, so that
reason allows the time of two more batches. A second Ctrl-C, more than two seconds after the first, ends the process at
once.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llmfoundry_lite.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from llmfoundry_lite.ranks.ending import (
    LAUNCHED_AT,
    CtrlC,
    announce_preemption,
    announced_preemption,
    describe_failure,
    exit_now,
    find_failure_of_other_rank,
)
from llmfoundry_lite.ranks.exchange import all_reduce_max
from llmfoundry_lite.ranks.identity import age_seconds, uptime
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, describe_reason_to_leave, handle_leaving_signals

REASONS = (
    "",
    *(signal.Signals(number).name for number in LEAVING_SIGNALS if number != signal.SIGINT),
    *("max_wall_time", "the file STOP", "SIGINT"),
)
"""Why a launch may leave early; the first stands for no reason. Ranks exchange indices of this tuple, and the highest
index that any rank has is the one they agree on."""
STOP_FILE = "STOP"
STOP_FILE_REASON = REASONS.index("the file STOP")
SIGINT_REASON = REASONS.index("SIGINT")
WALL_TIME_REASON = REASONS.index("max_wall_time")
EXTRA_BATCHES_AFTER_STOP_FILE = 2
"""Batches by whose time the file STOP extends the grace period: nobody kills the process soon, as a scheduler does."""
POLL_SECONDS = 1.0
"""Time after which the threads look again for the file, and for what other ranks have announced."""
SIGNALS_PER_READ = 64
"""Signals that are read from the pipe at once, a byte for each."""


@dataclass(eq=False)
class Preemption:
    """The reason for which this rank should leave early, if there is one, and the time by which it has to be gone.

    A reason is an index of `REASONS`. All ranks agree on one at the end of a batch. From `listen` on, two threads note
    reasons beside the main one, and end the process if it takes too long to leave. They run until the process ends or,
    in a program that goes on after `lf.train`, until that returns.
    """

    run_folder: Path
    grace_seconds: float
    """Time from the first reason until the process is ended."""
    max_wall_seconds: float | None
    """Time from the beginning of the launch until it leaves; None for no limit."""
    on_reason: Callable[[str], None]
    """Called with a new reason in words, from any thread."""
    on_leave: Callable[[str, str], None]
    """Called with a status and an explanation just before the process is ended: late, or after a second Ctrl-C."""
    reason: int = 0
    """The reason that this rank knows of; 0 if none."""
    agreed_reason: int = 0
    """The reason that all ranks have agreed on; 0 if none."""
    saved: str | None = None
    """On rank 0: the checkpoint that was published after the first reason to leave: `ba8`, or `ba8 in /local`."""
    describe_saves: Callable[[], str] = lambda: "nothing was trained yet"
    """Returns which batches no save holds and which checkpoint remains, if the process ends now. Called from any
    thread."""
    describe_failed_save: Callable[[], str] = lambda: ""
    """Returns why the last save failed; empty if it did not."""
    release_lease: Callable[[], None] = lambda: None
    """Lets another launch take over the run at once. Called just before the process is ended."""

    def __post_init__(self) -> None:
        """Set the deadline of `max_wall_seconds`, and the state that the main thread shares with two others.

        `listen` starts the threads. Any thread may set `reason`, `leave_by` and `failure`. Once set, they stay as they
        are, except that Ctrl-C replaces another reason.
        """
        # When this launch leaves, and whether it has failed.
        self.stop_file = self.run_folder / STOP_FILE
        self.deadline: float | None = None
        """Time at which `max_wall_seconds` is over, by the monotonic clock."""
        if self.max_wall_seconds is not None:
            self.deadline = time.monotonic() - age_of_launch() + self.max_wall_seconds
        self.leave_by: float | None = None
        """Time at which the process is ended, by the monotonic clock; None while there is no reason to leave."""
        self.failure: FirstError | None = None
        """The failure of another rank, because of which the launcher has sent SIGTERM to this one."""
        # How much time there is, and what the threads need.
        self._ctrl_c = CtrlC()
        self._grace_seconds = self.grace_seconds
        """Time between the reason and `leave_by`, including what the file STOP adds."""
        self._longest_batch_seconds = 0.0
        self._batch_ended_at: float | None = None
        self._is_main = False
        """This is rank 0, which looks for the file STOP."""
        self._has_ended = False
        """`train` has recorded how this launch ends, so no thread records another end."""
        self._has_failed = False
        """The recorded end is a failure, whose exit code no thread may replace."""
        self._may_poll = True
        self._store_lock = threading.Lock()
        """Held while a thread is in torch's store."""

    # ---------------------------------------------------------------------------------------------- the main thread

    def listen(self) -> None:
        """Start to listen for signals, the file STOP, the deadline, and other ranks' reasons, in two threads.

        Call this once, from the main thread, after Composer has installed its signal handlers: these replace them. From
        here on, a signal only notes a reason to leave, and does not interrupt the main thread.
        """
        self._is_main = dist.get_rank() == 0

        # The interpreter's C handler writes the number of each signal into this pipe, even while the main thread is in
        # a collective, where no Python handler runs.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A forked child must end when it is terminated, and must not write into its parent's pipe.
        _reset_signals_in_children()
        handle_leaving_signals(lambda number, frame: None)  # the thread reads the signal from the pipe

        threading.Thread(target=self._watch, args=(reader,), name="preemption", daemon=True).start()
        threading.Thread(target=self._poll_other_ranks, name="preemption-of-others", daemon=True).start()

    def agree_on_reason(self) -> str:
        """Return the reason to leave that any rank knows of, in words; empty if there is none. Collective."""
        highest = all_reduce_max([self.find_reason()])[0]
        return self.set_agreed(highest)

    def find_reason(self) -> int:
        """Return the reason that this rank knows of, as an index into `REASONS`; 0 if none.

        Call it once at the end of each batch, or of each batch of an evaluation: it also measures how long batches
        take, because the file STOP extends the grace period by the longest one.
        """
        now = time.monotonic()
        if self._batch_ended_at is not None:
            self._longest_batch_seconds = max(self._longest_batch_seconds, now - self._batch_ended_at)
        self._batch_ended_at = now
        self._look_for_stop_file()
        return self.reason

    def set_agreed(self, reason: int) -> str:
        """Note the reason that all ranks have agreed on, an index into `REASONS`, and return it in words.

        Without a reason (0), returns an empty text. A rank that knew of no reason itself starts its grace period here.
        """
        self.agreed_reason = reason
        if self.agreed_reason and not self.reason:
            self._note_reason(self.agreed_reason)
        return REASONS[self.agreed_reason]

    def describe_reason(self, agreed_reason: str) -> str:
        """Return why this launch leaves, for its exit message.

        `agreed_reason` is what the ranks have agreed on, in words. A launcher answers Ctrl-C by sending SIGTERM, and
        the kernel decides which of them a thread hears first. So Ctrl-C is named if this rank has heard of it, even if
        the ranks had agreed on SIGTERM before.
        """
        if self.reason == SIGINT_REASON:
            return describe_reason_to_leave(REASONS[SIGINT_REASON])
        return describe_reason_to_leave(agreed_reason)

    def note_saved(self, checkpoint: str) -> None:
        """Note, on rank 0 and from any thread, that a checkpoint has been published. `checkpoint` is as in `saved`."""
        if self.reason:
            self.saved = checkpoint

    def stop_polling_store(self) -> None:
        """Stop asking torch's store, because the process is about to end. Waits two seconds at most.

        Python ends daemon threads without unwinding them. One that is inside of torch's C++ then aborts the process.
        """
        self._may_poll = False
        if self._store_lock.acquire(timeout=2.0):
            self._store_lock.release()

    def note_end(self, *, has_failed: bool = False) -> None:
        """Note that `train` has recorded how this launch ends, and returns or raises.

        The process may live on for some seconds, for instance until an alert is delivered. From here on, no thread
        prints or records another end. A process that does not end by itself in time is still ended, unless the launch
        has failed: the exit code of a preemption would then hide the failure's.
        """
        self._has_ended = True
        self._has_failed = has_failed
        self._may_poll = False

    def remove_stop_file(self) -> None:
        """Remove the file STOP if this launch leaves, so that the next launch does not find it. Rank 0 removes it."""
        is_leaving = self.agreed_reason or self.reason
        if not self._is_main or not is_leaving:
            return
        try:
            self.stop_file.unlink(missing_ok=True)
        except OSError as error:
            # A folder of that name, or a disk that has become read-only. The run is saved by now, so this is no
            # failure.
            print(f"warning: {self.stop_file} cannot be removed: {error.strerror}", flush=True)

    # -------------------------------------------------------------------------------------------------- the threads

    def _watch(self, reader: int) -> None:
        """Handle signals, the file STOP and the two deadlines. Runs in a thread of its own.

        `reader` is the end of a pipe from which the numbers of signals are read. The thread ends with the process, or
        when the other end is closed because a program goes on after `lf.train`. Then it closes `reader`.

        The deadlines are `deadline`, after which the launch should leave, and `leave_by`, at which the process is ended
        although the main thread has not left.
        """
        while True:
            # Wait for a signal, but not longer than until the next deadline.
            ready, _, _ = select.select([reader], [], [], self._seconds_to_next_check())
            if ready:
                numbers = os.read(reader, SIGNALS_PER_READ)
                if not numbers:  # `signals_given_back` has closed it: the program goes on without this launch
                    os.close(reader)
                    return
                for number in numbers:
                    self._handle_signal(number)

            self._look_for_stop_file()
            now = time.monotonic()
            self._leave_if_late(now)
            if self.deadline is not None and now >= self.deadline:
                self._note_reason(WALL_TIME_REASON)

    def _seconds_to_next_check(self) -> float:
        """Return how many seconds to wait for a signal: until the next deadline, and `POLL_SECONDS` at most.

        Meanwhile another rank or the main thread may have learnt of a reason.
        """
        if self._has_failed:
            return POLL_SECONDS  # `leave_by` may be over, and nothing happens then
        next_deadline = self.leave_by if self.leave_by is not None else self.deadline
        if next_deadline is None:
            return POLL_SECONDS
        return min(max(0.0, next_deadline - time.monotonic()), POLL_SECONDS)

    def _handle_signal(self, number: int) -> None:
        """Note the reason that a signal stands for; a second Ctrl-C ends the process at once instead.

        `number` is a signal's number, read from the pipe. A launcher also sends SIGTERM when another rank has failed.
        So before the first reason, this looks for a failure of another rank and sets `failure`, and the launch then
        counts as failed. Signals that do not ask to leave are ignored.
        """
        if number == signal.SIGINT and self._ctrl_c.is_second_press():
            text = f"interrupted by Ctrl-C a second time: nothing more was saved; {self.describe_saves()}"
            self._leave("failed", text, EXIT_INTERRUPTED)
        if number not in LEAVING_SIGNALS:
            return
        if number != signal.SIGINT and not self.reason:
            self.failure = find_failure_of_other_rank()
        self._note_reason(REASONS.index(signal.Signals(number).name))

    def _leave_if_late(self, now: float) -> None:
        """End the process if the grace period is over. `now` is the monotonic time in seconds.

        The exit code tells a launcher what to do next. It is the other rank's code if one has failed; 1 if saves fail;
        and otherwise 75, which promises that the same command carries on from a save.
        """
        if self.leave_by is None or now < self.leave_by or self._has_failed:
            return
        if self.failure is not None:
            self._leave("failed", describe_failure(self.failure), self.failure.code)
            return

        because = describe_reason_to_leave(REASONS[self.reason])
        seconds = f"{self._grace_seconds:.3g} s"
        save_error = self.describe_failed_save()
        if self.saved is not None:
            # The main thread has saved in time, and hangs in what follows, such as closing wandb.
            text = f"{because}: saved as {self.saved}; closing the run took more than the rest of {seconds}"
        elif save_error:
            text = f"{because}, but saves fail: {save_error}; {self.describe_saves()}"
            self._leave("failed", text, EXIT_FAILURE)
            return
        else:
            text = f"{because}: nothing could be saved within {seconds}; {self.describe_saves()}"
        self._leave("preempted", text, EXIT_PREEMPTED)

    def _poll_other_ranks(self) -> None:
        """Note the reason that another rank has announced in torch's store. Ends once this rank has a reason.

        This has a thread of its own, because the store does not answer when rank 0, which keeps it, is frozen or gone.
        The thread that listens for signals must go on even then.
        """
        while not self.reason:
            with self._store_lock:
                if not self._may_poll:
                    return
                announced = announced_preemption()
            if announced:
                self._note_reason(REASONS.index(announced))
            time.sleep(POLL_SECONDS)

    def _look_for_stop_file(self) -> None:
        """Note the reason if rank 0 finds the file STOP in the run folder. It may be called from any thread."""
        if not self._is_main or self.reason:
            return
        # `Path.exists` would raise while somebody refuses access to the run folder, which must not end the run.
        if os.path.exists(self.stop_file):
            self._note_reason(STOP_FILE_REASON)

    def _note_reason(self, reason: int) -> None:
        """Note a reason to leave, start the grace period, and announce the reason to the other ranks.

        `reason` is an index into `REASONS`. It may be called from any thread, and more than once: the first reason
        counts, with one exception. A launcher answers Ctrl-C by sending SIGTERM, and the kernel runs the handler of the
        later of two waiting signals first. So Ctrl-C replaces another reason. Sets `reason` and `leave_by`.
        """
        is_later_ctrl_c = reason == SIGINT_REASON and self.reason != SIGINT_REASON
        if self.reason and not is_later_ctrl_c:
            return
        if reason == STOP_FILE_REASON:
            self._grace_seconds += EXTRA_BATCHES_AFTER_STOP_FILE * self._longest_batch_seconds
        if self.leave_by is None:
            self.leave_by = time.monotonic() + self._grace_seconds
        self.reason = reason

        # Tell the run folder and the other ranks, unless a rank has failed: then nobody is to call the launch
        # preempted.
        if self.failure is not None:
            return
        with suppress(Exception):
            self.on_reason(REASONS[reason])
        announce_preemption(REASONS[reason])

    def _leave(self, status: str, text: str, exit_code: int) -> None:
        """Record how this launch ends, give back the lease, and end the process without waiting for the main thread.

        Does not return. `status` is "failed" or "preempted", and `text` explains it. Nothing is recorded if `train` has
        recorded an end. Errors are ignored on the way, because the process must end.
        """
        with suppress(Exception):
            if not self._has_ended:
                self.on_leave(status, text)
            if self._is_main and status == "preempted" and self.reason == STOP_FILE_REASON:
                self.stop_file.unlink(missing_ok=True)  # so that the next launch does not find it
        with suppress(Exception):
            self.release_lease()
        exit_now(exit_code)


def age_of_launch() -> float:
    """Return the seconds since this launch began, including those before a launcher started this rank again."""
    if LAUNCHED_AT in os.environ:  # our launcher's own time
        return max(0.0, uptime() - float(os.environ[LAUNCHED_AT]))
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    oldest_process = os.getppid() if is_torchrun else os.getpid()  # torchrun's agent, the parent, restarts ranks
    return age_seconds(oldest_process)


@cache
def _reset_signals_in_children() -> None:
    """Call `_reset_signals_in_child` in each child that this process forks from now on.

    Python has no way to take that back, so it happens once, however often a program calls `lf.train`.
    """
    os.register_at_fork(after_in_child=_reset_signals_in_child)


def _reset_signals_in_child() -> None:
    """Give signals their default meaning in a forked child, such as a data loader's worker. Runs in the child.

    Otherwise a child would write the signals that it gets into its parent's pipe, and would not end when it is
    terminated. SIGINT and SIGHUP are ignored instead. A terminal sends them to children too, but a worker must serve
    its parent until that has saved and left.
    """
    with suppress(ValueError):  # a child that another thread has forked has no Python handlers
        signal.set_wakeup_fd(-1)
        for number in LEAVING_SIGNALS:
            # Leave handlers alone that the child, or a library, has installed.
            handler: Any = signal.getsignal(number)
            is_ours = callable(handler) and getattr(handler, "__module__", "") == __name__
            if not is_ours:
                continue
            is_from_terminal = number in (signal.SIGINT, signal.SIGHUP)
            signal.signal(number, signal.SIG_IGN if is_from_terminal else signal.SIG_DFL)
