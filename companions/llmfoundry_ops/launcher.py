"""`llmfoundry-lite train -n 8`: the launcher of the ranks of one node.

A server (`server.py`) imports the training code once, and forks the ranks; this process imports nothing heavy. When a
rank dies or freezes, the collectives of the others can never complete. These get a moment to report, and are killed.
Then all ranks start again from the newest save, and training goes on within seconds.

`Launcher` runs tries until one ends for good, `Restarts` decides whether there is another, and `World` watches the
ranks of one try.

torch's agent (`torchrun`) would be less code. But it imports torch, which takes seconds; it turns every exit code of a
rank into 1; and it learns of a stopped process only when a collective times out. Launches on several nodes use it.
"""

import errno
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from llmfoundry_lite.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER,
    ConfigError,
    printable,
)
from llmfoundry_lite.ranks import output
from llmfoundry_lite.ranks.ending import EXIT_RETRY, EXIT_RETRY_LOST, LAUNCHED_AT, RANK_LOGS
from llmfoundry_lite.ranks.identity import uptime
from llmfoundry_lite.ranks.output import ignore_output_errors
from llmfoundry_lite.ranks.rank import rank_variables, rendezvous
from llmfoundry_lite.ranks.status import SAVES_STAND
from llmfoundry_ops.console import text_of
from llmfoundry_ops.faults import FaultRecord
from llmfoundry_ops.processes import Ending, is_running, start_module
from llmfoundry_ops.rank_logs import Rotation, log_of, make_room_for_logs
from llmfoundry_ops.server import BEAT_SECONDS, Beat, Left, Start, open_channel, receive, send

PAUSE_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses before restarts in a row without progress; the last one repeats."""
CODES = {EXIT_RETRY: EXIT_PREEMPTED, EXIT_RETRY_LOST: EXIT_FAILURE}
"""Exit code of ranks that met a transient fault -> of the launch, if it is not tried again."""
LINES_QUOTED = 15
"""Number of lines of a rank's log that the launcher prints when it gives up."""
GRACE_SECONDS = {
    EXIT_USER: 10.0,
    EXIT_PREEMPTED: 60.0,
    EXIT_RETRY_LOST: 10.0,
    EXIT_RETRY: 10.0,
    EXIT_INTERRUPTED: 5.0,
    EXIT_FAILURE: 1.0,
}
"""Exit code of the first rank that ends -> time after which the others are killed. A signal or any other code counts as
EXIT_FAILURE. Preempted ranks save, and end themselves if that takes too long.

The most important code comes first: the launch's exit code is the first of these that any rank has. A user's error
comes before a preemption, because every further try would meet it again."""
SILENCE_SECONDS = 10.0
"""Time without a heartbeat and without CPU time after which a rank is frozen."""
CHECK_SECONDS = 0.5
"""Longest time between two checks for frozen ranks."""


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

    After the death of a rank, they start again at most `max_restarts` times, at once if there was progress. After
    transient faults, they start again for `retry_seconds`, however often. Progress resets the pauses and that time, but
    not the number of restarts.
    """

    max_restarts: int
    retry_seconds: float
    progress: Any
    """The progress at the last failure, or at the beginning."""
    num_restarts: int = 0
    """Restarts after deaths."""
    has_progressed: bool = False
    """Whether there was progress since the launch began."""
    num_without_progress: int = 0
    """Number of tries in a row that were granted without progress between them."""
    failing_since: float | None = None
    """Time of the first transient fault since the last progress."""

    def pause(self, is_transient: bool, progress: Any, now: float) -> float | None:
        """Return the seconds until the next try after a failure; None if there is no further try.

        is_transient: whether the failure was a transient fault.
        progress: any value that has changed if there was progress.
        now: seconds of a monotonic clock.

        Counts the failure, so that it must be called once for each.
        """
        if progress != self.progress:
            self.progress = progress
            self.has_progressed = True
            self.num_without_progress = 0
            self.failing_since = None

        # A transient fault would be met again at once, so its first pause is not 0.
        pauses = PAUSE_SECONDS[1:] if is_transient else PAUSE_SECONDS
        pause = pauses[min(self.num_without_progress, len(pauses) - 1)]
        if is_transient:
            if self.failing_since is None:
                self.failing_since = now
            remaining_seconds = self.failing_since + self.retry_seconds - now
            if remaining_seconds <= 0:
                return None
            pause = min(pause, remaining_seconds)
        else:
            if self.num_restarts == self.max_restarts:
                return None
            self.num_restarts += 1
        self.num_without_progress += 1
        return pause


class Server(NamedTuple):
    """The running server, and the launcher's end of the socket to it."""

    process: subprocess.Popen[bytes]
    channel: socket.socket


@dataclass
class Launcher:
    """One launch: `num_ranks` ranks of `program`, which are started again as `Restarts` decides."""

    program: Program
    num_ranks: int
    max_restarts: int
    logs: Path
    """Folder of rank1.txt, rank2.txt, …, which cover all tries. rank1.before.txt is from the launch before."""
    progress: Callable[[], Any] = lambda: None
    """Returns any value that changes with the progress that a restart keeps, such as the newest save."""
    begun: Callable[[], Any] = lambda: None
    """Returns any value that changes once the program has begun its work."""
    retry_seconds: float = 0.0
    faults: FaultRecord | None = None
    """Records in the run folder why tries have failed."""
    _server: Server | None = None
    _world: "World | None" = None
    """The ranks of the current try."""
    _ending: Ending = field(init=False)

    def run(self, arguments: Sequence[str]) -> int:
        """Run the program with these arguments on all ranks, and return the exit code of the launch.

        Ranks start again after EXIT_FAILURE and transient faults, unless a signal has asked them to leave. Each turn of
        the loop is one try: it runs the ranks, decides by their outcome whether there is another, and prepares that.

        Raises ConfigError if the folder of logs cannot be written, and for arguments that are too long to be sent to
        the server.
        """
        make_room_for_logs(self.logs)
        ignore_output_errors()
        self._ending = Ending(self._forward)
        environment = {LAUNCHED_AT: str(uptime()), RANK_LOGS: str(self.logs)}
        restarts = Restarts(self.max_restarts, self.retry_seconds, self.progress())
        begun_before = self.begun()
        resume_arguments: list[str] = []
        has_lost_batches = False
        try:
            while True:
                if self.faults is not None:
                    self.faults.begin_try()
                outcome = self._try([*arguments, *resume_arguments], {**environment, **rendezvous()})
                is_transient = outcome.code in CODES

                # Find the exit code in case this try is the last. Batches that a try has lost are lost until there is a
                # newer save, even if a later try could not begin.
                progress = self.progress()
                if progress != restarts.progress:
                    has_lost_batches = False
                if outcome.code == EXIT_RETRY_LOST:
                    has_lost_batches = True
                exit_code = CODES.get(outcome.code, outcome.code)
                if is_transient and has_lost_batches:
                    exit_code = EXIT_FAILURE

                # Decide whether there is another try.
                may_pass = is_transient or outcome.code == EXIT_FAILURE
                if not may_pass or self._ending.num_asked:
                    if may_pass:
                        self._note_fault(outcome, restarts=False)
                    if outcome.was_killed:
                        say(f"{outcome.fault}; {SAVES_STAND}", "ended")
                    return exit_code
                pause = restarts.pause(is_transient, progress, time.monotonic())
                self._note_fault(outcome, restarts=pause is not None)
                if pause is None:
                    say(self._reason_to_give_up(outcome, is_transient), "ended", "error")
                    return exit_code

                # Prepare it, and say what follows.
                when = f" in {pause:.3g} s" if pause else ""
                if is_transient:
                    say(
                        f"{outcome.fault}; next try{when}, for {self.retry_seconds:g} s in all (retry_for)", "restarted"
                    )
                else:
                    count = f"restart {restarts.num_restarts} of {self.max_restarts}"
                    say(f"{outcome.fault}; {count}{when}, from the newest save", "restarted")
                # If nothing has begun yet, the next try must not resume: a run that exists already must still be
                # refused.
                if restarts.num_restarts or restarts.has_progressed or self.begun() != begun_before:
                    resume_arguments = ["autoresume=true"]
                self._ending.sleep(pause)
                if self._ending.num_asked:
                    return exit_code if is_transient else EXIT_PREEMPTED
        finally:
            self._stop_server()

    def _try(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "Outcome":
        """Start all ranks, and wait until they have ended. Sets `_world`, and `_server` if there was none."""
        if self._server is None:
            self._server = start_server(self.program)
        server = self._server
        self._world = World(server.channel, lambda: server.process.poll() is not None, self.num_ranks)
        if self._ending.num_asked:  # a signal came before `_forward` could pass it to this world
            self._world.leaving_signal = signal.SIGTERM
        self._world.start(arguments, environment, self.logs)
        outcome = self._world.wait()
        if self._world.is_server_gone:
            self._stop_server()
        if self._ending.num_asked and not self._world.processes:
            say("asked to leave before the ranks had begun; run the same command again")
        return outcome

    def _note_fault(self, outcome: "Outcome", *, restarts: bool) -> None:
        """Record how a try has failed, for readers of the run folder. `restarts` says whether there is another."""
        if self.faults is None:
            return
        fault = outcome.fault
        rank_code = outcome.rank_code
        has_failed_by_itself = rank_code is not None and rank_code > EXIT_DONE and rank_code not in CODES
        if outcome.rank and has_failed_by_itself:
            fault += f"; {log_of(self.logs, outcome.rank)} has its output"
        self.faults.note(fault, restarts=restarts, was_killed=rank_code == -signal.SIGKILL)

    def _stop_server(self) -> None:
        """Kill the server, if there is one. It has no ranks any more, and nothing to lose."""
        if self._server is None:
            return
        process, channel = self._server
        self._server = None
        channel.close()
        process.kill()
        process.wait()

    def _forward(self, signal_number: int) -> None:
        """Pass a signal that this process got on to the ranks."""
        if self._world is not None:
            self._world.ask_to_leave(signal_number)

    def _reason_to_give_up(self, outcome: "Outcome", is_transient: bool) -> str:
        """Return why there is no further try, with the end of the log of the rank at fault."""
        reason = outcome.fault
        if is_transient:
            reason += f"; tried again for {self.retry_seconds:g} s (retry_for) without progress"
        elif self.max_restarts:
            reason += f"; that was restart {self.max_restarts} of {self.max_restarts}"
        if not outcome.rank:  # rank 0 has printed to this terminal
            return reason
        log = log_of(self.logs, outcome.rank)
        with suppress(OSError):
            lines = log.read_text(errors="replace").splitlines()[-LINES_QUOTED:]
            reason += f"; the end of {log}:" + "".join(f"\n  {text_of(line)}" for line in lines)
        return reason


def start_server(program: Program) -> Server:
    """Start the process that imports a program's modules and then forks its ranks. `server.py` runs there."""
    channel, server_channel = open_channel()
    arguments = [str(server_channel.fileno()), str(os.getpid()), program.module, program.imports, *program.packages]
    process = start_module(
        ["llmfoundry_ops.server", *arguments],
        pass_fds=[server_channel.fileno()],
        stdin=subprocess.DEVNULL,
    )

    # The server has its own copy of this end. If it kept open here, the end of the server would not close the channel.
    server_channel.close()
    return Server(process, channel)


def say(text: str, event: str = "", level: str = "warning") -> None:
    """Print a message of the launcher to stderr. It may have several lines. A console of JSON has event and level."""
    line = f"launcher: {printable(text, keep=chr(10))}"
    output.say(line, event, {"level": level}, file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- one try


@dataclass
class Process:
    """A rank as the launcher sees it."""

    rank: int
    pid: int
    heard_at: float
    """Monotonic time of its last sign of life: a heartbeat, or a use of CPU time."""
    cpu_seconds: float = 0.0
    """CPU time that it had used then."""
    code: int | None = None
    """Exit code, or minus the signal that killed it; None while it runs."""


@dataclass(frozen=True)
class Outcome:
    """The end of a try."""

    code: int
    """One of our exit codes, or EXIT_RETRY and EXIT_RETRY_LOST."""
    fault: str = ""
    """The first thing that went wrong."""
    rank: int | None = None
    """The rank on which that went wrong, if it was one."""
    rank_code: int | None = None
    """Exit code of that rank, or minus the signal that ended it; None if it had not ended by then."""
    was_killed: bool = False
    """Whether ranks were asked to leave and had to be killed, such as frozen ones."""


@dataclass
class World:
    """The ranks of one try, which the server on the other side of `channel` forks."""

    channel: socket.socket
    server_has_ended: Callable[[], bool]
    num_ranks: int
    processes: dict[int, Process] = field(default_factory=dict)
    """By process id, from their first sign of life on."""
    leaving_signal: int | None = None
    """The signal that asks the ranks to leave; None as long as nobody asks."""
    is_server_gone: bool = False
    """Whether the server has ended or is frozen, so that it cannot report the end of ranks."""
    _fault: str = ""
    _faulty_rank: int | None = None
    _faulty_code: int | None = None
    """The first fault, which has caused the others, the rank that had it, and that rank's exit code if it has ended."""
    _kill_at: float = math.inf
    """Monotonic time at which the remaining ranks are killed."""
    _rotation: Rotation | None = None
    """Keeps the logs of the ranks small, once they are started."""
    _checked_at: float = field(default_factory=lambda: time.monotonic())
    """Monotonic time of the last check for frozen ranks."""

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        """Ask the server to start the ranks.

        Rank 0 prints to the launcher's terminal, and rank R into rankR.txt in `logs`. Raises ConfigError for arguments
        that are too long to be sent.
        """
        self._rotation = Rotation(logs, self.num_ranks)
        for rank in range(self.num_ranks):
            rank_environment = {**environment, **rank_variables(rank, self.num_ranks)}
            log = str(log_of(logs, rank)) if rank else None
            try:
                send(self.channel, Start(rank, list(arguments), rank_environment, log))
            except ConnectionError:
                return  # `wait` finds that the server is gone
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                raise ConfigError(
                    "the arguments are too long to be handed to ranks; put them into a YAML file, and name that"
                ) from error

    def ask_to_leave(self, signal_number: int) -> None:
        """Send a signal to the ranks, and to those that start later. If none has started, `wait` ends."""
        self.leaving_signal = signal_number
        self.signal(signal_number)

    def signal(self, signal_number: int) -> None:
        """Send a signal to the ranks that run."""
        for process in self._running():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal_number)

    def wait(self) -> Outcome:
        """Wait until every rank has ended. Kills ranks that are frozen, or that stay too long after another's end."""
        while not self._has_ended():
            self._receive_message()
            self._find_frozen()
            if self._rotation is not None:
                self._rotation.rotate_large_logs()
            if time.monotonic() >= self._kill_at:
                self.signal(signal.SIGKILL)

        # Find how the try has ended.
        if self.leaving_signal is not None and not self.processes:
            return Outcome(EXIT_PREEMPTED)
        codes = [process.code or EXIT_DONE for process in self.processes.values()]
        code = EXIT_FAILURE if self.is_server_gone else launch_code(codes)
        # Ranks that were asked to leave and were killed count as preempted, unless one of them failed by itself.
        has_failed_rank = any(rank_code > EXIT_DONE for rank_code in codes)
        if code == EXIT_FAILURE and self.leaving_signal is not None and not has_failed_rank:
            return Outcome(EXIT_PREEMPTED, self._fault, self._faulty_rank, self._faulty_code, was_killed=True)
        return Outcome(code, self._fault, self._faulty_rank, self._faulty_code)

    def _has_ended(self) -> bool:
        """Return whether there is nothing to wait for any more."""
        if self.is_server_gone:
            return True
        if not self.processes:
            return self.leaving_signal is not None
        return len(self.processes) == self.num_ranks and not self._running()

    def _running(self) -> list[Process]:
        """Return the ranks that have not ended, as far as the server has reported."""
        return [process for process in self.processes.values() if process.code is None]

    def _receive_message(self) -> None:
        """Wait for one message, at most CHECK_SECONDS, and update `processes` by it.

        If the channel is closed instead, or the server has ended, sets `is_server_gone`.
        """
        ready, _, _ = select.select([self.channel], [], [], CHECK_SECONDS)
        message = receive(self.channel) if ready else None
        is_channel_closed = bool(ready) and message is None
        if isinstance(message, Beat):
            self._note_heartbeat(message)
        elif isinstance(message, Left):
            self._note_end(message)
        elif is_channel_closed or self.server_has_ended():
            self.is_server_gone = True
            self._note_fault("the process that starts the ranks has ended", None)

    def _note_heartbeat(self, beat: Beat) -> None:
        """Note that a rank is alive. Adds it to `processes` if this is its first sign of life."""
        if beat.pid not in self.processes:
            self.processes[beat.pid] = Process(beat.rank, beat.pid, heard_at=0.0)
            # A signal that came before this rank was known has not reached it.
            if self.leaving_signal is not None:
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, self.leaving_signal)
        process = self.processes[beat.pid]
        process.heard_at = time.monotonic()
        process.cpu_seconds = cpu_seconds(beat.pid)

    def _note_end(self, left: Left) -> None:
        """Note that a rank has ended. If it has failed, the others are killed after a time of grace (`_kill_at`)."""
        process = self.processes[left.pid]
        process.code = left.code
        if left.code == EXIT_DONE:
            return
        self._note_fault(describe_end(process.rank, left.code), process.rank, left.code)
        grace_seconds = GRACE_SECONDS[launch_code([left.code])]
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)

    def _find_frozen(self) -> None:
        """Find frozen ranks: those without a sign of life for SILENCE_SECONDS. Lets `wait` kill them at once.

        Sets `_kill_at`. If a rank has ended and the server has not reported it, the server itself is frozen: then sets
        `is_server_gone`.
        """
        now = time.monotonic()
        # If this launcher was stopped itself, by Ctrl-Z until `fg`, it has not listened. So silence counts from now on.
        was_stopped_itself = now - self._checked_at > SILENCE_SECONDS / 2
        self._checked_at = now
        if was_stopped_itself:
            for process in self._running():
                process.heard_at = now

        for process in self._running():
            silence_seconds = now - process.heard_at
            if silence_seconds < BEAT_SECONDS:
                continue

            # A rank that computes is alive, even if something holds the interpreter's lock and stops its heartbeat.
            used_seconds = cpu_seconds(process.pid)
            if used_seconds > process.cpu_seconds:
                process.cpu_seconds = used_seconds
                process.heard_at = now
            elif silence_seconds >= SILENCE_SECONDS and not is_running(process.pid):
                # The rank has ended, and the server has not reported it.
                self.is_server_gone = True
                self._note_fault(
                    "the process that starts the ranks is frozen: it does not tell of one that has ended", None
                )
                return
            elif silence_seconds >= SILENCE_SECONDS:
                self._note_fault(
                    f"rank {process.rank} is frozen: it has done nothing for {SILENCE_SECONDS:g} s", process.rank
                )
                self._kill_at = now

    def _note_fault(self, fault: str, rank: int | None, code: int | None = None) -> None:
        """Keep the first fault. Later ones are its consequences.

        rank: the rank that had it, if it was one.
        code: the rank's exit code, or minus the signal that ended it; None if it has not ended.
        """
        if not self._fault:
            self._fault = fault
            self._faulty_rank = rank
            self._faulty_code = code


def launch_code(codes: Iterable[int]) -> int:
    """Return the launch's exit code for its ranks' codes: the first in the order of GRACE_SECONDS that any rank has.

    Negative codes are signals, and count as EXIT_FAILURE, as do unknown ones. EXIT_DONE if all ranks are done.
    """
    known_codes = {code if code in (EXIT_DONE, *GRACE_SECONDS) else EXIT_FAILURE for code in codes}
    return next((code for code in GRACE_SECONDS if code in known_codes), EXIT_DONE)


def describe_end(rank: int, code: int) -> str:
    """Say how a rank has ended, by its exit code or minus the signal that killed it."""
    if code in (EXIT_RETRY, EXIT_RETRY_LOST):
        return f"rank {rank} met a fault that may pass"
    if code >= 0:
        return f"rank {rank} left with exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    return f"rank {rank} was killed by signal {-code}"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used; 0.0 if it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0
