"""The process that imports the training code once, and forks every rank, which starts at once.

    python -m llmfoundry_ops.server DESCRIPTOR LAUNCHER MODULE IMPORTS PACKAGES

DESCRIPTOR is an open socket and LAUNCHER the id of the process that started this one; the others are a `Program` of
`launcher.py`. Server and ranks share one end of the socket, and the launcher has the other: `Start` messages go to the
server, and `Beat` and `Left` go to the launcher.

No process outlives the one that started it: Linux kills the server with the launcher, and the ranks with the server. A
fork inherits what the server has opened, so nothing here touches a device or starts a thread before the fork.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llmfoundry_lite.files import open_no_link
from llmfoundry_lite.ranks import ending
from llmfoundry_lite.ranks.lean_imports import import_lean, no_collection
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS

BEAT_SECONDS = 1.0
"""Time between two signs of life of a rank."""
MESSAGE_BYTES = 1 << 20
"""More than Linux sends in one packet by default, so that the sender fails for arguments that are too long."""
STDOUT = 1
STDERR = 2
"""File descriptors of standard output and standard error."""
PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl that sets the signal a process gets when its parent ends (<sys/prctl.h>)."""


@dataclass(frozen=True)
class Start:
    """Request to start a rank."""

    rank: int
    arguments: list[str]
    environment: dict[str, str]
    output: str | None
    """The file for the rank's output; None for the launcher's own output."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank. The server sends the first one, and the rank itself the others."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Left:
    """The end of a rank, from the server."""

    pid: int
    code: int
    """The exit code. A negative one is the signal that killed the rank."""


Message = Start | Beat | Left
MESSAGE_TYPES: dict[str, type[Start] | type[Beat] | type[Left]] = {"Start": Start, "Beat": Beat, "Left": Left}


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket that keeps messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Message) -> None:
    """Send a message. Raises OSError, with EMSGSIZE for one that is too long for a packet."""
    channel.send(json.dumps([type(message).__name__, asdict(message)]).encode())


def receive(channel: socket.socket) -> Message | None:
    """Wait for the next message, and return it; None if the other side has no process any more."""
    try:
        packet = channel.recv(MESSAGE_BYTES)
    except ConnectionError:  # the other side ended with messages unread
        return None
    if not packet:
        return None
    type_name, fields = json.loads(packet)
    return MESSAGE_TYPES[type_name](**fields)


def main() -> None:
    """Import the training code, fork ranks on request, and run the program in each of them.

    The server never returns from `serve`, and ends with the launcher. What follows it runs in the ranks.
    """
    descriptor, launcher_pid, module, imports, *packages = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    die_with_parent(int(launcher_pid))
    # Ctrl-C and SLURM's signals reach every process of a group. The server must survive them, and a rank must get those
    # that come before it is ready. So they are blocked here, and a rank unblocks them.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING_SIGNALS)
    # Counting devices the usual way starts CUDA's driver, which does not survive a fork. NVML counts without it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with no_collection():
        import_lean(*packages)
        importlib.import_module(imports)
        entry = importlib.import_module(module).main
    # Imported objects are never freed. Without this, each rank's garbage collector would visit them all, and by that
    # copy the pages of memory that ranks share.
    gc.freeze()

    start = serve(channel)
    become_rank(start, channel)

    def run(arguments: Sequence[str]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVING_SIGNALS)
        entry(arguments)

    sys.argv = [module, *start.arguments]
    ending.run_and_exit(run)


def die_with_parent(parent_pid: int) -> None:
    """Let Linux kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before this call
        os._exit(1)


def serve(channel: socket.socket) -> Start:
    """Fork a rank for each `Start`, and report each rank that ends, until the launcher closes the channel.

    Returns only in the ranks, with the message that started them. The server itself exits here.
    """
    server_pid = os.getpid()
    # A signal cannot interrupt `select`, which Python resumes. So the end of a child writes a byte into a pipe.
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, wakeup_reader], [], [])
        if wakeup_reader in ready:
            os.read(wakeup_reader, 4096)
            report_ended_ranks(channel)
        if channel not in ready:
            continue

        message = receive(channel)
        if message is None:
            os._exit(0)
        assert isinstance(message, Start)
        rank_pid = os.fork()
        if rank_pid:
            send(channel, Beat(message.rank, rank_pid))
            continue

        # This is the new rank.
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(wakeup_reader)
        os.close(wakeup_writer)
        return message


def report_ended_ranks(channel: socket.socket) -> None:
    """Send a `Left` for every rank that has ended since the last call."""
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are no ranks
            return
        if pid == 0:  # all of them run
            return
        send(channel, Left(pid, os.waitstatus_to_exitcode(wait_status)))


def become_rank(start: Start, channel: socket.socket) -> None:
    """Turn this forked process into the rank that `start` asks for.

    Sets the rank's environment variables, starts the thread that sends its heartbeats to the launcher, and redirects
    its output to the file `start.output`, if there is one.
    """
    os.environ.update(start.environment)
    # The heartbeats start first, because a busy disk may take longer to make a file than a rank may be silent.
    heartbeats = threading.Thread(target=send_heartbeats, args=(channel, start.rank), name="heartbeats", daemon=True)
    heartbeats.start()
    if start.output is not None:
        redirect_output(Path(start.output))


def redirect_output(log: Path) -> None:
    """Append all that this process and libraries in it print to a file, from now on.

    Keeps the launcher's standard error open as `ending.launcher_stderr`, so that the rank can still show a mistake of
    the user there. Raises OSError if the file cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)

    # Duplicate the launcher's standard error before its descriptor is taken.
    launcher_stderr = os.dup(STDERR)
    ending.launcher_stderr = open(launcher_stderr, "w", errors="backslashreplace")  # noqa: SIM115 - for the rank's life

    # C++ libraries print to the descriptors, not to sys.stdout, so the descriptors themselves become the file.
    log_file = open_no_link(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_file, STDOUT)
    os.dup2(log_file, STDERR)
    os.close(log_file)


def send_heartbeats(channel: socket.socket, rank: int) -> None:
    """Send a `Beat` every BEAT_SECONDS. Runs in a thread of the rank until the launcher has closed the channel."""
    with suppress(OSError):  # the launcher is gone: this process ends with the server
        while True:
            time.sleep(BEAT_SECONDS)
            send(channel, Beat(rank, os.getpid()))


if __name__ == "__main__":
    main()
