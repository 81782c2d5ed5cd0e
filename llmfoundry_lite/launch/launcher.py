"""`llmfoundry-lite train -n 8`: the launcher of one node.

It imports nothing heavy itself. A server imports the training code once, where each rank of `composer` does so for
itself. When a rank dies or freezes, all start again from the newest save, and training goes on within seconds.

torch's own agent (`torchrun`) would be less code. But it needs torch in the launcher, which takes seconds; it makes 1
of every exit code; it learns of a stopped process only when a collective times out. Several nodes stay its work.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.errors import EXIT_BUG, EXIT_PREEMPTED, ConfigError, printable
from llmfoundry_lite.launch.server import MESSAGE_BYTES, open_channel
from llmfoundry_lite.launch.world import Outcome, World, log_of
from llmfoundry_lite.ranks.ending import EXIT_RETRY, EXIT_RETRY_LOST, LAUNCHED_AT, LEAVING_SIGNALS, RANK_LOGS
from llmfoundry_lite.ranks.identity import uptime
from llmfoundry_lite.ranks.output import ignore_output_errors

PAUSE_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Before the first restart in a row without progress, the second, …; the last one from then on."""
CODES = {EXIT_RETRY: EXIT_PREEMPTED, EXIT_RETRY_LOST: EXIT_BUG}
"""Exit code of ranks that met a transient fault -> of the launch, when it is not tried again."""
LINES_QUOTED = 15
LARGEST_ARGUMENTS = MESSAGE_BYTES // 4
"""Bytes. In a message each may take six, as JSON escapes; it also holds a few variables."""


class Program(NamedTuple):
    """What every rank runs."""

    module: str
    """Its `main(arguments)`."""
    imports: str
    """The module that takes long to import, which is done once for all ranks."""
    packages: tuple[str, ...] = ()
    """To be imported before it, lean."""


def places(num_ranks: int) -> dict[str, str]:
    """What all ranks of one node are told alike."""
    return {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}


def refuse_other_launchers(environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError inside of another launcher, each of whose ranks would begin as many again."""
    under_srun = int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    if under_srun or "RANK" in environment:
        other = "srun" if under_srun else "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "composer"
        raise ConfigError(f"-n: {other} has started this process as one of its ranks; leave out -n, or {other}")


class Restarts:
    """Whether ranks that have failed start again, and when: `max_restarts` times after they died, and as often as it
    takes, within `retry_seconds`, after a fault that may pass. Progress ends the waiting, and begins that time anew."""

    def __init__(self, max_restarts: int, retry_seconds: float, come_to: Any):
        self.max_restarts = max_restarts
        self.retry_seconds = retry_seconds
        self.num_restarts = 0
        self.has_progressed = False
        """Since the launch began."""
        self._come_to = come_to
        self._num_in_vain = 0
        self._failing_since: float | None = None

    def pause(self, is_transient: bool, come_to: Any, now: float) -> float | None:
        """Seconds until the next try; None if there is none. `now` is of a monotonic clock, `come_to` says how far the
        program has come, in any terms."""
        if come_to != self._come_to:
            self._come_to, self._num_in_vain, self._failing_since = come_to, 0, None
            self.has_progressed = True
        pauses = PAUSE_SECONDS[1:] if is_transient else PAUSE_SECONDS
        pause = pauses[min(self._num_in_vain, len(pauses) - 1)]
        if is_transient:
            self._failing_since = now if self._failing_since is None else self._failing_since
            left = self._failing_since + self.retry_seconds - now
            if left <= 0:
                return None
            pause = min(pause, left)
        elif self.num_restarts == self.max_restarts:
            return None
        else:
            self.num_restarts += 1
        self._num_in_vain += 1
        return pause


class Launcher:
    """One launch: `num_ranks` ranks of `program`, begun again as `Restarts` says."""

    def __init__(
        self,
        program: Program,
        num_ranks: int,
        max_restarts: int,
        logs: Path,
        progress: Callable[[], Any] = lambda: None,
        retry_seconds: float = 0.0,
    ):
        self.program = program
        self.num_ranks = num_ranks
        self.max_restarts = max_restarts
        self.retry_seconds = retry_seconds
        self.logs = logs
        """rank1.txt, rank2.txt, …: what ranks other than 0 say, of all tries of this launch. rank1.before.txt: of the
        launch before."""
        self.progress = progress
        """How far the program has come, in any terms. While that changes, restarts are not held back."""
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._world: World | None = None
        self._asked = threading.Event()

    def run(self, arguments: Sequence[str]) -> int:
        """Returns the exit code of the launch. Ranks that a signal asks to leave are not started again, nor are those
        that have left with a code of ours other than EXIT_BUG and those of `CODES`. Raises ConfigError for a folder
        that takes no logs, and for arguments too long to be handed on."""
        num_bytes = sum(len(os.fsencode(argument)) for argument in arguments)
        if num_bytes > LARGEST_ARGUMENTS:
            raise ConfigError(
                f"the arguments are {num_bytes:,} bytes long; ranks are handed {LARGEST_ARGUMENTS:,} at most: put them "
                "into a YAML file, and name that"
            )
        make_room_for_logs(self.logs)
        ignore_output_errors()
        for number in LEAVING_SIGNALS:
            signal.signal(number, self._hand_on)
        launched_at = {LAUNCHED_AT: str(uptime()), RANK_LOGS: str(self.logs)}
        environment = {**places(self.num_ranks), **launched_at, "MASTER_ADDR": "127.0.0.1"}
        restarts, again = Restarts(self.max_restarts, self.retry_seconds, self.progress()), []
        try:
            while True:
                outcome = self._try([*arguments, *again], {**environment, "MASTER_PORT": str(free_port())})
                is_transient = outcome.code in CODES
                code = CODES.get(outcome.code, outcome.code)
                if (outcome.code != EXIT_BUG and not is_transient) or self._asked.is_set():
                    if outcome.was_killed:
                        say(f"{outcome.culprit}; the newest save stands")
                    return code
                pause = restarts.pause(is_transient, self.progress(), time.monotonic())
                if pause is None:
                    say(self._give_up(outcome, is_transient))
                    return code
                when = f" in {pause:.3g} s" if pause else ""
                if is_transient:
                    say(f"{outcome.culprit}; next try{when}, for {self.retry_seconds:g} s in all (retry_for)")
                else:
                    number = f"restart {restarts.num_restarts} of {self.max_restarts}"
                    say(f"{outcome.culprit}; {number}{when}, from the newest save")
                # Where nothing had begun yet, a run that is there already is still to be refused.
                if restarts.num_restarts or restarts.has_progressed:
                    again = ["autoresume=true"]
                if self._asked.wait(pause):
                    return code if is_transient else EXIT_PREEMPTED
        finally:
            self._stop_server()

    def _try(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Outcome:
        server, channel = self._server = self._running_server()
        self._world = World(channel, lambda: server.poll() is not None, self.num_ranks)
        if self._asked.is_set():  # meanwhile
            self._world.asked_by = signal.SIGTERM
        self._world.start(arguments, environment, self.logs)
        outcome = self._world.wait()
        if self._world.is_server_gone:
            self._stop_server()
        if self._asked.is_set() and not self._world.processes:
            say("asked to leave before the ranks had begun; run the same command again")
        return outcome

    def _running_server(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The one there is; another if that has ended."""
        if self._server is not None:
            return self._server
        mine, its = open_channel()
        module, imports, packages = self.program
        names = [str(its.fileno()), str(os.getpid()), module, imports, *packages]
        command = [sys.executable, "-m", "llmfoundry_lite.launch.server", *names]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING_SIGNALS)  # inherited: Ctrl-C reaches the server too
        try:
            process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
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

    def _hand_on(self, number: int, frame: Any) -> None:
        self._asked.set()
        if self._world is not None:
            self._world.ask_to_leave(number)

    def _give_up(self, outcome: Outcome, is_transient: bool) -> str:
        """The reason, and the last words of the rank whose words are in a file."""
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
    """The last launch's logs get names of their own: its ranks may still write them. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("rank*[0-9].txt"):
            os.replace(path, path.with_suffix(".before.txt"))
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder}: ranks cannot write their logs there: {error.strerror}; --log-dir") from error


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
