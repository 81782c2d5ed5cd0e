"""Processes of this machine, for the launcher, the relay and rehearsals: starting, finding and ending them.

The relay's launches have to outlive the relay, so that another relay finds them. A shell runs the launch command and
writes its exit code into a file, the code file. The name of this file is in the environment of all processes of the
launch, so that `find` also finds ranks that outlive their launcher. (Ranks of `train -n` end with theirs: `server.py`.)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from llmfoundry_lite.bounded import MAX_NOTE_BYTES
from llmfoundry_lite.companions import search_path
from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, handle_leaving_signals
from llmfoundry_lite.search_path import environment_of_user

LAUNCH = "LLMFOUNDRY_LITE_RELAY_LAUNCH"
"""Variable of every process of a launch: the path of its code file."""
JOB = "LLMFOUNDRY_LITE_JOB"
"""Variable of a process beside a run: the name of a function in `one_checkpoint`, and its arguments, as JSON."""
SHELL = """trap 'echo $? > "$2.part" && mv "$2.part" "$2"' EXIT; trap : TERM INT; (trap : TERM INT; eval "$1")"""
"""The shell of a launch. Its arguments are the command and the code file. It ignores signals, because it has to write
the exit code. A copy of it, in parentheses, runs the command, which may begin with `exec`."""
SLEEP_SECONDS = 0.05
"""Time between two looks at a process, and at signals, while this process sleeps."""


class Answer(NamedTuple):
    """Exit code and output of a short command."""

    code: int | None
    """The exit code; None if the command did not end in time."""
    output: str
    errors: str


def ask(command: str, seconds: float) -> Answer:
    """Run a short shell command, such as one that reads another machine's file, for at most `seconds`.

    It has a session of its own, because Ctrl-C is for the relay. Its output goes to files, because a process that the
    command leaves behind, such as an ssh that keeps a connection, would hold a pipe open.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env=environment_of_user(),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Answer(code, _read_beginning(output), _read_beginning(errors))


def _read_beginning(file: IO[bytes]) -> str:
    """Return up to MAX_NOTE_BYTES from the beginning of a file."""
    file.seek(0)
    return file.read(MAX_NOTE_BYTES).decode(errors="replace")


def begin(command: str, code_file: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a launch in a session of its own, which appends to the file `output`. Returns its shell.

    The shell writes the exit code into `code_file`. Raises OSError.
    """
    # The shell would write through a link that somebody has put there.
    code_file.unlink(missing_ok=True)
    code_file.with_name(f"{code_file.name}.part").unlink(missing_ok=True)
    with open(output, "ab", opener=open_no_link) as file:
        return subprocess.Popen(
            ["sh", "-c", SHELL, "relay", command, str(code_file)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_of_user() | {LAUNCH: str(code_file)},
        )


def start_module(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m COMMAND`, which finds our packages, and which signals that ask to leave do not end.

    A terminal and a scheduler send these to all processes of a group or a job. The process inherits the mask that
    blocks them, so that it is safe from its first moment. The options are those of Popen. Raises OSError.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            env={**os.environ, **search_path()},
            stdin=stdin,
            stdout=stdout,
            pass_fds=pass_fds,
            start_new_session=start_new_session,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def find(value: Path | str, variable: str = LAUNCH) -> list[psutil.Process]:
    """Return the running processes that have `value` in a variable of their environment, the oldest first.

    By default the variable is LAUNCH, whose value is the launch's code file.
    """
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.environ().get(variable) == str(value) and is_running(process):
                processes.append((process.create_time(), process.pid, process))
    processes.sort(key=lambda entry: entry[:2])
    return [process for _, _, process in processes]


def find_shell(code_file: Path) -> psutil.Process | None:
    """Return the shell that writes a launch's exit code; None if it has ended.

    The copy of it that runs the command has the same arguments. It is younger, so the oldest one is returned.
    """
    return next((process for process in find(code_file) if _is_shell(process, code_file)), None)


def find_launcher(shell: psutil.Process, code_file: Path) -> list[psutil.Process]:
    """Return the processes that a launch's shell has started, which pass signals on to their own children."""
    launchers: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in shell.children():
            is_copy = _is_shell(process, code_file)
            launchers += process.children() if is_copy else [process]
    return launchers


def _is_shell(process: psutil.Process, code_file: Path) -> bool:
    """Return whether a process is the shell of the launch with this code file, or the shell's copy."""
    with suppress(psutil.Error):
        command = process.cmdline()
        return command[:2] == ["sh", "-c"] and command[-1] == str(code_file)
    return False


def is_running(process: psutil.Process | int) -> bool:
    """Return whether a process, or the one with this id, runs. A zombie has ended."""
    with suppress(psutil.Error):
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def exit_code(code_file: Path) -> int | None:
    """Return the exit code of a launch; None if its shell was killed before it could write, or still runs."""
    with suppress(OSError, ValueError):
        return int(code_file.read_text())
    return None


def terminate(processes: Sequence[psutil.Process], signal_number: int = signal.SIGTERM) -> None:
    """Send a signal to processes. Those that have ended are passed over."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal_number)


class Ending:
    """Counts signals that ask this process to end, from its creation on.

    As a context manager, it puts the former handlers back. `forward` is called with the number of each signal.
    """

    def __init__(self, forward: Callable[[int], None] = lambda number: None) -> None:
        self.num_asked = 0
        """Number of signals so far."""
        self._num_seen = 0
        """Number of signals that have ended a sleep."""
        self._forward = forward
        self._handlers = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
        handle_leaving_signals(self._count)

    def __enter__(self) -> "Ending":
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            if handler is not None:  # None: it was not set from Python
                signal.signal(number, handler)

    def sleep(self, seconds: float, process: psutil.Process | None = None) -> None:
        """Sleep until the time is over, `process` has ended, or a signal comes.

        A signal that has come since the last sleep ends this one at once.
        """
        end = time.monotonic() + seconds
        while self.num_asked == self._num_seen:
            remaining_seconds = end - time.monotonic()
            if remaining_seconds <= 0:
                break
            if process is not None and not is_running(process):
                return
            time.sleep(min(SLEEP_SECONDS, remaining_seconds))
        self._num_seen = self.num_asked

    def _count(self, number: int, frame: object) -> None:
        """Handle a signal."""
        # A threading.Event would deadlock, because the handler runs in the thread that waits for it.
        self.num_asked += 1
        self._forward(number)
