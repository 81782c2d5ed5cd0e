"""A launch of the relay as processes of this machine: begun so that it outlives the relay, and found again.

A shell runs the command and leaves its exit code in a file, for whichever relay looks. All that comes of it carries
the name of that file in its environment; ranks that outlive their launcher are found by that. Nothing here knows what
is launched.
"""

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

LAUNCH = "LLMFOUNDRY_LITE_RELAY_LAUNCH"
SHELL = """trap 'echo $? > "$2.part" && mv "$2.part" "$2"' EXIT; trap : TERM INT; (trap : TERM INT; eval "$1")"""
"""Signals are for what the command starts; the shell stays to write down how that ended. It has a copy of itself run
the command, which may be `exec`."""


class Answer(NamedTuple):
    code: int | None
    """None: it did not end in time."""
    output: str
    errors: str


def ask(command: str, seconds: float) -> Answer:
    """Run a short command, such as one that reads another machine's file. Ctrl-C is the relay's, and what the command
    leaves behind, such as an ssh that keeps a connection, is not waited for: it would hold a pipe open."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (output, errors):
            file.seek(0)
        return Answer(code, output.read().decode(errors="replace"), errors.read().decode(errors="replace"))


def begin(command: str, code_file: Path, output: Path) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is the relay's. Its words go to a file, which does not end with the relay."""
    code_file.unlink(missing_ok=True)
    with output.open("ab") as file:
        return subprocess.Popen(
            ["sh", "-c", SHELL, "relay", command, str(code_file)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {LAUNCH: str(code_file)},
        )


def find(code_file: Path) -> list[psutil.Process]:
    """All that this launch has begun and that still runs, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(LAUNCH) == str(code_file) and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found, key=lambda one: one[:2])]


def shell_of(code_file: Path) -> int | None:
    """The process that writes the file of a launch that another relay has begun; None when it has ended."""
    shells = {process.pid: process for process in find(code_file) if _is_shell(process, code_file)}
    for process in shells.values():
        with suppress(psutil.Error):
            if process.ppid() not in shells:  # nor its copy
                return process.pid
    return None


def launcher_of(shell: int, code_file: Path) -> list[psutil.Process]:
    """What a launch's shell has started, which passes signals on to all that it starts itself."""
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for process in psutil.Process(shell).children():
            found += process.children() if _is_shell(process, code_file) else [process]
    return found


def _is_shell(process: psutil.Process, code_file: Path) -> bool:
    with suppress(psutil.Error):
        command = process.cmdline()
        return command[:2] == ["sh", "-c"] and command[-1] == str(code_file)
    return False


def exit_code(code_file: Path) -> int | None:
    """None when the shell was killed before it could write."""
    with suppress(OSError, ValueError):
        return int(code_file.read_text())
    return None


def terminate(processes: Sequence[psutil.Process], number: int = signal.SIGTERM) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


class Ending:
    """Signals to this process and ends of others, waited for together."""

    def __init__(self) -> None:
        self.num_asked = 0
        """How often this process was asked to end."""
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        self._writer = writer

    def __enter__(self) -> "Ending":
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before)
        os.close(self._pipe)
        os.close(self._writer)

    def wait(self, seconds: float | None, pid: int | None = None) -> bool:
        """Until that process has ended (True), a signal comes, or the time is over."""
        try:
            descriptor = os.pidfd_open(pid) if pid is not None else None
        except ProcessLookupError:
            return True
        try:
            watched = [self._pipe] if descriptor is None else [self._pipe, descriptor]
            ready, _, _ = select.select(watched, [], [], seconds)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if self._pipe in ready:
            os.read(self._pipe, 64)
        return descriptor in ready

    def _note(self, number: int, frame: object) -> None:
        self.num_asked += 1
