"""One try of a launch: N ranks from beginning to end, and its exit code.

A rank that fails leaves the others in collectives that can never complete. They get a moment to report, then they are
killed, and the last save stands. A frozen rank counts as failed.
"""

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llmfoundry_lite.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER
from llmfoundry_lite.launch.server import BEAT_SECONDS, Beat, Left, Start, receive, send
from llmfoundry_lite.ranks.ending import EXIT_RETRY, EXIT_RETRY_LOST

GRACE_SECONDS = {
    EXIT_USER: 10.0,
    EXIT_PREEMPTED: 60.0,
    EXIT_RETRY_LOST: 10.0,
    EXIT_RETRY: 10.0,
    EXIT_INTERRUPTED: 5.0,
    EXIT_BUG: 1.0,
}
"""Time for the other ranks, once one has left with that code. The first of these codes that any rank has is the
launch's: a mistake comes again with every try, then a wish to leave. A signal or any other code counts as EXIT_BUG.
Preempted ranks save, and end themselves when that takes too long."""
SILENCE_SECONDS = 10.0
"""Time without a beat and without CPU time after which a rank is frozen."""
LOOK_SECONDS = 0.5


@dataclass
class Process:
    """A rank as the launcher sees it."""

    rank: int
    pid: int
    heard_at: float
    """Monotonic time of its last sign of life."""
    cpu_seconds: float = 0.0
    """CPU time that it had used by then."""
    code: int | None = None
    """None: it runs."""


@dataclass(frozen=True)
class Outcome:
    code: int
    """One of our exit codes, or EXIT_RETRY and EXIT_RETRY_LOST."""
    culprit: str = ""
    """The first thing that went wrong."""
    rank: int | None = None
    """The rank that it went wrong on, if there is one."""
    was_killed: bool = False
    """It was asked to leave and could not, as a frozen rank cannot."""


@dataclass
class World:
    """The ranks of one try, as forks of the server on the other side of `channel`."""

    channel: socket.socket
    server_has_ended: Callable[[], bool]
    num_ranks: int
    processes: dict[int, Process] = field(default_factory=dict)
    """By process id, from their first sign of life."""
    asked_by: int | None = None
    """The signal that asks the ranks to leave."""
    is_server_gone: bool = False
    _first: tuple[str, int | None] = ("", None)
    _end_by: float = math.inf
    _looked_at: float = field(default_factory=lambda: time.monotonic())

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        """Start the ranks. Rank 0 prints where the launcher does, rank R into `logs`/rankR.txt."""
        for rank in range(self.num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = str(log_of(logs, rank)) if rank else None
            with suppress(ConnectionError):  # `wait` finds that the server is gone
                send(self.channel, Start(rank, list(arguments), {**environment, **place}, output))

    def ask_to_leave(self, number: int) -> None:
        """Send the signal to the ranks, later ones included; where none has begun, `wait` ends."""
        self.asked_by = number
        self.signal(number)

    def signal(self, number: int) -> None:
        for process in self._alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def wait(self) -> Outcome:
        """Wait until every rank has ended."""
        while not self._has_ended():
            self._listen()
            self._look_for_frozen()
            if time.monotonic() >= self._end_by:
                self.signal(signal.SIGKILL)
        if self.asked_by is not None and not self.processes:
            return Outcome(EXIT_PREEMPTED)
        codes = [process.code or EXIT_DONE for process in self.processes.values()]
        code = EXIT_BUG if self.is_server_gone else verdict(codes)
        if code == EXIT_BUG and self.asked_by is not None and not any(code > EXIT_DONE for code in codes):
            return Outcome(EXIT_PREEMPTED, *self._first, was_killed=True)
        return Outcome(code, *self._first)

    def _has_ended(self) -> bool:
        if self.is_server_gone or not self.processes:
            return self.is_server_gone or self.asked_by is not None
        return len(self.processes) == self.num_ranks and not self._alive()

    def _alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.code is None]

    def _listen(self) -> None:
        ready, _, _ = select.select([self.channel], [], [], LOOK_SECONDS)
        now = time.monotonic()
        message = receive(self.channel) if ready else None
        if isinstance(message, Beat):
            if message.pid not in self.processes:
                self.processes[message.pid] = Process(message.rank, message.pid, now)
                if self.asked_by is not None:
                    with suppress(ProcessLookupError):
                        os.kill(message.pid, self.asked_by)
            process = self.processes[message.pid]
            process.heard_at, process.cpu_seconds = now, cpu_seconds(message.pid)
        elif isinstance(message, Left):
            process = self.processes[message.pid]
            process.code = message.code
            if message.code != EXIT_DONE:
                self._blame(describe_end(process.rank, message.code), process.rank)
                self._end_by = min(self._end_by, now + GRACE_SECONDS[verdict([message.code])])
        elif ready or self.server_has_ended():
            self.is_server_gone = True
            self._blame("the process that starts the ranks has ended", None)

    def _look_for_frozen(self) -> None:
        now = time.monotonic()
        was_stopped_myself = now - self._looked_at > SILENCE_SECONDS / 2  # Ctrl-Z, and some time later `fg`
        self._looked_at = now
        for process in self._alive():
            if was_stopped_myself:
                process.heard_at = now
            silence = now - process.heard_at
            if silence < BEAT_SECONDS:
                continue
            used = cpu_seconds(process.pid)
            if used > process.cpu_seconds:  # since its last beat; or something long holds the interpreter's lock
                process.cpu_seconds, process.heard_at = used, now
            elif silence >= SILENCE_SECONDS and has_ended(process.pid):  # and the server, with which all end, is mute
                self.is_server_gone = True
                self._blame("the process that starts the ranks is frozen: it does not tell of one that has ended", None)
                return
            elif silence >= SILENCE_SECONDS:
                frozen = f"rank {process.rank} is frozen: it has done nothing for {SILENCE_SECONDS:g} s"
                self._blame(frozen, process.rank)
                self._end_by = now

    def _blame(self, what: str, rank: int | None) -> None:
        """Note the first fault, which causes the others."""
        if not self._first[0]:
            self._first = (what, rank)


def log_of(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.txt"


def verdict(codes: Iterable[int]) -> int:
    """Return the launch's exit code for its ranks' codes; negative ones are signals."""
    known = {code if code in (EXIT_DONE, *GRACE_SECONDS) else EXIT_BUG for code in codes}
    return next((code for code in GRACE_SECONDS if code in known), EXIT_DONE)


def describe_end(rank: int, code: int) -> str:
    if code in (EXIT_RETRY, EXIT_RETRY_LOST):
        return f"rank {rank} met a fault that may pass"
    if code >= 0:
        return f"rank {rank} left with exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} was killed by signal {-code}"


def has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def cpu_seconds(pid: int) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0
