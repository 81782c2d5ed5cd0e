"""Processes of this machine, for the launcher, the relay and rehearsals: starting, watching and ending them.

Ranks end with their launcher (`server.py`). A launch of the relay outlives the relay, and another relay finds it: a
shell runs the command and writes its exit code into a file. All its processes have the name of that file in their
environment, so that ranks that outlive their launcher are found too.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from llmfoundry_lite.bounded import MAX_NOTE_BYTES
from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS, handle_leaving_signals
from llmfoundry_lite.search_path import environment_of_user

LAUNCH = "LLMFOUNDRY_LITE_RELAY_LAUNCH"
JOB = "LLMFOUNDRY_LITE_JOB"
"""Variable of a process beside a run: the name of a function in `one_checkpoint`, and its arguments, as JSON."""
SHELL = """trap 'echo $? > "$2.part" && mv "$2.part" "$2"' EXIT; trap : TERM INT; (trap : TERM INT; eval "$1")"""
"""The shell outlives signals, to write the exit code. A copy of it runs the command, which may be `exec`."""
SLEEP_SECONDS = 0.05


class Answer(NamedTuple):
    code: int | None
    """The exit code; None: the command did not end in time."""
    output: str
    errors: str


def ask(command: str, seconds: float) -> Answer:
    """Run a short command, such as one that reads another machine's file.

    It has a session of its own: Ctrl-C is for the relay. Output goes to files, because a process that the command
    leaves behind, such as an ssh that keeps a connection, would hold a pipe open.
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
        for file in (output, errors):
            file.seek(0)
        return Answer(code, *(file.read(MAX_NOTE_BYTES).decode(errors="replace") for file in (output, errors)))


def begin(command: str, code_file: Path, output: Path) -> subprocess.Popen[bytes]:
    """Launch in a session of its own, with its output in a file."""
    for path in (code_file, code_file.with_name(f"{code_file.name}.part")):  # the shell would write through a link
        path.unlink(missing_ok=True)
    with open(output, "ab", opener=open_no_link) as file:
        return subprocess.Popen(
            ["sh", "-c", SHELL, "relay", command, str(code_file)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment_of_user() | {LAUNCH: str(code_file)},
        )


def find(mark: Path | str, variable: str = LAUNCH) -> list[psutil.Process]:
    """Return the running processes that have `mark` in their environment, the oldest first.

    A launch's mark is the name of its code file.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(variable) == str(mark) and is_running(process):
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda one: one[:2])]


def find_shell(code_file: Path) -> psutil.Process | None:
    """Return the process that writes the exit code; None when it has ended. Its copy is younger."""
    return next((process for process in find(code_file) if _is_shell(process, code_file)), None)


def find_launcher(shell: psutil.Process, code_file: Path) -> list[psutil.Process]:
    """Return the processes that a launch's shell has started, which pass signals on to their own children."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in shell.children():
            found += process.children() if _is_shell(process, code_file) else [process]
    return found


def _is_shell(process: psutil.Process, code_file: Path) -> bool:
    with suppress(psutil.Error):
        command = process.cmdline()
        return command[:2] == ["sh", "-c"] and command[-1] == str(code_file)
    return False


def is_running(process: psutil.Process | int) -> bool:
    """Return whether a process, or the one with this id, runs; a zombie does not."""
    with suppress(psutil.Error):
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def exit_code(code_file: Path) -> int | None:
    """Return the exit code; None when the shell was killed before it could write."""
    with suppress(OSError, ValueError):
        return int(code_file.read_text())
    return None


def terminate(processes: Sequence[psutil.Process], number: int = signal.SIGTERM) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


class Ending:
    """Counts signals that ask this process to end. As a context manager, it puts the former handlers back."""

    def __init__(
        self,
        forward: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.num_asked = self._num_seen = 0
        self._forward = forward
        self._handlers = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
        handle_leaving_signals(self._count)

    def __enter__(self) -> "Ending":
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    def sleep(self, seconds: float, process: psutil.Process | None = None) -> None:
        """Sleep until the time is over, the process has ended, or a signal comes; one since the last sleep counts."""
        end = time.monotonic() + seconds
        while self.num_asked == self._num_seen and (left := end - time.monotonic()) > 0:
            if process is not None and not is_running(process):
                return
            time.sleep(min(SLEEP_SECONDS, left))
        self._num_seen = self.num_asked

    def _count(self, number: int, frame: object) -> None:
        self.num_asked += 1  # an Event would deadlock: the handler runs in the thread that waits for it
        self._forward(number)
