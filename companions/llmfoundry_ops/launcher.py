"""`llmfoundry-lite train -n 8`: the launcher of one node.

A server imports the training code once, and forks the ranks; this process imports nothing heavy. When a rank dies or
freezes, the others, whose collectives can never complete, get a moment to report and are killed. Then all start again
from the newest save, and training goes on within seconds.

torch's agent (`torchrun`) would be less code. But it imports torch, which takes seconds; it makes 1 of every exit code;
it learns of a stopped process only when a collective times out. Launches on several nodes use it.
"""

import errno
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from llmfoundry_lite.companions import search_path
from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER,
    ConfigError,
    printable,
)
from llmfoundry_lite.ranks.ending import EXIT_RETRY, EXIT_RETRY_LOST, LAUNCHED_AT, RANK_LOGS
from llmfoundry_lite.ranks.identity import uptime
from llmfoundry_lite.ranks.output import ignore_output_errors
from llmfoundry_lite.ranks.rank import rank_variables, rendezvous
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS
from llmfoundry_lite.ranks.status import SAVES_STAND
from llmfoundry_ops.processes import Ending, is_running
from llmfoundry_ops.server import BEAT_SECONDS, Beat, Left, Start, open_channel, receive, send

PAUSE_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses before restarts in a row without progress; the last one repeats."""
CODES = {EXIT_RETRY: EXIT_PREEMPTED, EXIT_RETRY_LOST: EXIT_FAILURE}
"""Exit code of ranks that met a transient fault -> of the launch, when it is not tried again."""
LINES_QUOTED = 15
GRACE_SECONDS = {
    EXIT_USER: 10.0,
    EXIT_PREEMPTED: 60.0,
    EXIT_RETRY_LOST: 10.0,
    EXIT_RETRY: 10.0,
    EXIT_INTERRUPTED: 5.0,
    EXIT_FAILURE: 1.0,
}
"""Exit code of the first rank that leaves -> time for the others. The launch's own code is the first in this order that
any rank has: a user's error, which every try would repeat, goes before a preemption. A signal or any other code counts
as EXIT_FAILURE. Preempted ranks save, and end themselves when that takes too long."""
SILENCE_SECONDS = 10.0
"""Time without a beat and without CPU time after which a rank is frozen."""
LOOK_SECONDS = 0.5


class Program(NamedTuple):
    """The program of every rank."""

    module: str
    """Name of the module whose `main(arguments)` a rank runs."""
    imports: str
    """The module that takes long to import, which the server does once for all ranks."""
    packages: tuple[str, ...] = ()
    """Packages to import before that module, by `import_lean`."""


@dataclass
class Restarts:
    """Decides whether and when failed ranks start again.

    After a death: at most `max_restarts` times. After transient faults: within `retry_seconds`. Progress resets the
    pauses and that time.
    """

    max_restarts: int
    retry_seconds: float
    progress: Any
    num_restarts: int = 0
    has_progressed: bool = False
    """Whether there was progress since the launch began."""
    num_in_vain: int = 0
    failing_since: float | None = None

    def pause(self, is_transient: bool, progress: Any, now: float) -> float | None:
        """Return the seconds until the next try; None if there is none. `now`: seconds of a monotonic clock."""
        if progress != self.progress:
            self.progress, self.num_in_vain, self.failing_since = progress, 0, None
            self.has_progressed = True
        pauses = PAUSE_SECONDS[1:] if is_transient else PAUSE_SECONDS
        pause = pauses[min(self.num_in_vain, len(pauses) - 1)]
        if is_transient:
            self.failing_since = now if self.failing_since is None else self.failing_since
            left = self.failing_since + self.retry_seconds - now
            if left <= 0:
                return None
            pause = min(pause, left)
        elif self.num_restarts == self.max_restarts:
            return None
        else:
            self.num_restarts += 1
        self.num_in_vain += 1
        return pause


@dataclass
class Launcher:
    """One launch: `num_ranks` ranks of `program`, begun again as `Restarts` decides."""

    program: Program
    num_ranks: int
    max_restarts: int
    logs: Path
    """Folder of rank1.txt, rank2.txt, …, which cover all tries; rank1.before.txt is from the launch before."""
    progress: Callable[[], Any] = lambda: None
    """Returns any value that changes with the progress that a restart keeps, such as the newest save."""
    begun: Callable[[], Any] = lambda: None
    """Returns any value that changes once the program has begun its work."""
    retry_seconds: float = 0.0
    _server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
    _world: "World | None" = None
    _ending: Ending = field(init=False)

    def run(self, arguments: Sequence[str]) -> int:
        """Return the exit code of the launch.

        Ranks start again after EXIT_FAILURE and transient faults, unless a signal has asked them to leave. Raises
        ConfigError for a folder that takes no logs, and for arguments that are too long to be handed on.
        """
        make_room_for_logs(self.logs)
        ignore_output_errors()
        self._ending = Ending(self._forward)
        environment = {LAUNCHED_AT: str(uptime()), RANK_LOGS: str(self.logs)}
        restarts, again = Restarts(self.max_restarts, self.retry_seconds, self.progress()), []
        begun_before = self.begun()
        has_lost = False  # whether batches were trained since the newest save
        try:
            while True:
                outcome = self._try([*arguments, *again], {**environment, **rendezvous()})
                is_transient = outcome.code in CODES
                progress = self.progress()
                if progress != restarts.progress:
                    has_lost = False
                if outcome.code == EXIT_RETRY_LOST:
                    has_lost = True
                code = CODES.get(outcome.code, outcome.code)
                if is_transient and has_lost:  # also if a later try could not even begin
                    code = EXIT_FAILURE
                if (outcome.code != EXIT_FAILURE and not is_transient) or self._ending.num_asked:
                    if outcome.was_killed:
                        say(f"{outcome.culprit}; {SAVES_STAND}")
                    return code
                pause = restarts.pause(is_transient, progress, time.monotonic())
                if pause is None:
                    say(self._give_up(outcome, is_transient))
                    return code
                when = f" in {pause:.3g} s" if pause else ""
                if is_transient:
                    say(f"{outcome.culprit}; next try{when}, for {self.retry_seconds:g} s in all (retry_for)")
                else:
                    number = f"restart {restarts.num_restarts} of {self.max_restarts}"
                    say(f"{outcome.culprit}; {number}{when}, from the newest save")
                # If nothing has begun yet, a run that exists already must still be refused.
                if restarts.num_restarts or restarts.has_progressed or self.begun() != begun_before:
                    again = ["autoresume=true"]
                self._ending.sleep(pause)
                if self._ending.num_asked:
                    return code if is_transient else EXIT_PREEMPTED
        finally:
            self._stop_server()

    def _try(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "Outcome":
        server, channel = self._server = self._running_server()
        self._world = World(channel, lambda: server.poll() is not None, self.num_ranks)
        if self._ending.num_asked:  # meanwhile
            self._world.asked_by = signal.SIGTERM
        self._world.start(arguments, environment, self.logs)
        outcome = self._world.wait()
        if self._world.is_server_gone:
            self._stop_server()
        if self._ending.num_asked and not self._world.processes:
            say("asked to leave before the ranks had begun; run the same command again")
        return outcome

    def _running_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the server, a new one if the last has ended."""
        if self._server is not None:
            return self._server
        mine, its = open_channel()
        module, imports, packages = self.program
        names = [str(its.fileno()), str(os.getpid()), module, imports, *packages]
        command = [sys.executable, "-P", "-m", "llmfoundry_ops.server", *names]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING_SIGNALS)  # inherited: Ctrl-C reaches the server too
        try:
            environment = {**os.environ, **search_path()}
            process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        its.close()
        return process, mine

    def _stop_server(self) -> None:
        if self._server is None:
            return
        process, channel = self._server
        self._server = None
        channel.close()
        process.kill()  # it has no rank left, and nothing to lose
        process.wait()

    def _forward(self, number: int) -> None:
        if self._world is not None:
            self._world.ask_to_leave(number)

    def _give_up(self, outcome: "Outcome", is_transient: bool) -> str:
        """Return the reason, with the end of the culprit's log."""
        text = outcome.culprit
        if is_transient:
            text += f"; tried again for {self.retry_seconds:g} s (retry_for) without progress"
        elif self.max_restarts:
            text += f"; that was restart {self.max_restarts} of {self.max_restarts}"
        if not outcome.rank:
            return text
        log = log_of(self.logs, outcome.rank)
        with suppress(OSError):
            lines = log.read_text(errors="replace").splitlines()[-LINES_QUOTED:]
            text += f"; the end of {log}:" + "".join(f"\n  {line}" for line in lines)
        return text


def say(text: str) -> None:
    print(f"launcher: {printable(text, keep=chr(10))}", file=sys.stderr, flush=True)


def make_room_for_logs(folder: Path) -> None:
    """Rename the last launch's logs, which its ranks may still write. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("rank*[0-9].txt"):
            os.replace(path, path.with_suffix(".before.txt"))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder}: ranks cannot write their logs there: {error.strerror}; --log-dir") from error


# ----------------------------------------------------------------------------------------------------------- one try


@dataclass
class Process:
    """A rank as the launcher sees it."""

    rank: int
    pid: int
    heard_at: float
    """Monotonic time of its last sign of life."""
    cpu_seconds: float = 0.0
    """CPU time that it had used at its last sign of life."""
    code: int | None = None
    """None: it runs."""


@dataclass(frozen=True)
class Outcome:
    code: int
    """One of our exit codes, or EXIT_RETRY and EXIT_RETRY_LOST."""
    culprit: str = ""
    """The first thing that went wrong."""
    rank: int | None = None
    """The rank on which that went wrong, if it was one."""
    was_killed: bool = False
    """It was asked to leave and could not, such as a frozen rank."""


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
        """Start the ranks. Rank 0 prints where the launcher does, rank R into `logs`/rankR.txt. Raises ConfigError for
        arguments that are too long to be handed on."""
        for rank in range(self.num_ranks):
            own = {**environment, **rank_variables(rank, self.num_ranks)}
            output = str(log_of(logs, rank)) if rank else None
            try:
                send(self.channel, Start(rank, list(arguments), own, output))
            except ConnectionError:
                return  # `wait` finds that the server is gone
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                words = "the arguments are too long to be handed to ranks; put them into a YAML file, and name that"
                raise ConfigError(words) from error

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
        code = EXIT_FAILURE if self.is_server_gone else launch_code(codes)
        if code == EXIT_FAILURE and self.asked_by is not None and not any(code > EXIT_DONE for code in codes):
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
                self._end_by = min(self._end_by, now + GRACE_SECONDS[launch_code([message.code])])
        elif ready or self.server_has_ended():
            self.is_server_gone = True
            self._blame("the process that starts the ranks has ended", None)

    def _look_for_frozen(self) -> None:
        now = time.monotonic()
        was_stopped_myself = now - self._looked_at > SILENCE_SECONDS / 2  # by Ctrl-Z, until `fg`
        self._looked_at = now
        for process in self._alive():
            if was_stopped_myself:
                process.heard_at = now
            silence = now - process.heard_at
            if silence < BEAT_SECONDS:
                continue
            used = cpu_seconds(process.pid)
            if used > process.cpu_seconds:  # it computes, though something holds the interpreter's lock
                process.cpu_seconds, process.heard_at = used, now
            elif silence >= SILENCE_SECONDS and not is_running(process.pid):
                self.is_server_gone = True  # else it would have reported that
                self._blame("the process that starts the ranks is frozen: it does not tell of one that has ended", None)
                return
            elif silence >= SILENCE_SECONDS:
                frozen = f"rank {process.rank} is frozen: it has done nothing for {SILENCE_SECONDS:g} s"
                self._blame(frozen, process.rank)
                self._end_by = now

    def _blame(self, what: str, rank: int | None) -> None:
        """Note the first fault, which has caused the others."""
        if not self._first[0]:
            self._first = (what, rank)


def log_of(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.txt"


def launch_code(codes: Iterable[int]) -> int:
    """Return the launch's exit code for its ranks' codes; negative ones are signals."""
    known = {code if code in (EXIT_DONE, *GRACE_SECONDS) else EXIT_FAILURE for code in codes}
    return next((code for code in GRACE_SECONDS if code in known), EXIT_DONE)


def describe_end(rank: int, code: int) -> str:
    if code in (EXIT_RETRY, EXIT_RETRY_LOST):
        return f"rank {rank} met a fault that may pass"
    if code >= 0:
        return f"rank {rank} left with exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} was killed by signal {-code}"


def cpu_seconds(pid: int) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0
