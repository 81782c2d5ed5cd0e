"""A process that imports the training code once. Each rank is a fork of it, and starts at once.

    python -m llmfoundry_ops.server DESCRIPTOR LAUNCHER MODULE IMPORTS PACKAGES

Server and ranks share one end of a socket, the launcher has the other: `Start` goes down, the rest comes up.
No process outlives the one that began it: Linux kills the server with the launcher, and the ranks with the server.
A fork inherits what the server has opened, so nothing here touches a device or starts a thread.
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
MESSAGE_BYTES = 1 << 20
"""More than Linux sends in one packet by default, so that the sender fails for arguments that are too long."""
PR_SET_PDEATHSIG = 1
"""A constant of Linux's <sys/prctl.h>."""


@dataclass(frozen=True)
class Start:
    """Begin this rank."""

    rank: int
    arguments: list[str]
    environment: dict[str, str]
    output: str | None
    """The file for its output; None: the launcher's own output."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank. The server sends the first one."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Left:
    """The end of a rank; a negative code is the signal that killed it."""

    pid: int
    code: int


Message = Start | Beat | Left
KINDS: dict[str, type[Start] | type[Beat] | type[Left]] = {kind.__name__: kind for kind in (Start, Beat, Left)}


def open_channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Message) -> None:
    channel.send(json.dumps([type(message).__name__, asdict(message)]).encode())


def receive(channel: socket.socket) -> Message | None:
    """Return the next message; None when no sender is left."""
    try:
        packet = channel.recv(MESSAGE_BYTES)
    except ConnectionError:  # the other side ended with messages unread
        return None
    if not packet:
        return None
    kind, fields = json.loads(packet)
    return KINDS[kind](**fields)


def main() -> None:
    descriptor, launcher, module, imports, *packages = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    die_with_parent(int(launcher))
    # Ctrl-C and SLURM's signals reach every process of a group. They are for the launcher and for the ranks, which get
    # those that come before they are ready as soon as they are.
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVING_SIGNALS)
    # Counting devices the usual way starts CUDA's driver, which does not survive a fork. NVML counts without it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with no_collection():
        import_lean(*packages)
        importlib.import_module(imports)
        entry = importlib.import_module(module).main
    # What has been imported stays: no rank looks through it, which would also copy the pages they share.
    gc.freeze()

    start = serve(channel)  # returns in each rank, never in the server

    become(start, channel)

    def run(arguments: Sequence[str]) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVING_SIGNALS)
        entry(arguments)

    sys.argv = [module, *start.arguments]
    ending.run_and_exit(run)


def die_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def serve(channel: socket.socket) -> Start:
    """Fork a rank for each `Start` and report each that ends, until the launcher closes the channel."""
    server, (ended, note) = os.getpid(), os.pipe()
    os.set_blocking(note, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([channel, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            with suppress(ChildProcessError):  # no rank is left
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    send(channel, Left(found[0], os.waitstatus_to_exitcode(found[1])))
        if channel not in ready:
            continue
        message = receive(channel)
        if message is None:
            os._exit(0)
        assert isinstance(message, Start)
        if pid := os.fork():
            send(channel, Beat(message.rank, pid))
            continue
        die_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(ended)
        os.close(note)
        return message


def become(start: Start, channel: socket.socket) -> None:
    """Make this process rank `start.rank`: set environment, heartbeat and output."""
    os.environ.update(start.environment)
    # First, because a busy disk may take longer to make a file than a rank may be silent.
    threading.Thread(target=beat, args=(channel, start.rank), name="heart", daemon=True).start()
    if start.output is not None:
        Path(start.output).parent.mkdir(parents=True, exist_ok=True)
        ending.launcher_stderr = open(os.dup(2), "w", errors="backslashreplace")  # noqa: SIM115 - for the rank's life
        file = open_no_link(start.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)


def beat(channel: socket.socket, rank: int) -> None:
    with suppress(OSError):  # nobody listens any more: this process ends with the server
        while True:
            time.sleep(BEAT_SECONDS)
            send(channel, Beat(rank, os.getpid()))


if __name__ == "__main__":
    main()
