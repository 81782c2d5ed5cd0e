"""Measurements that hold the device in turns, each in a process of its own. The next one gets ready meanwhile.

Importing the training code takes longer than the steps: more than 20 s where nothing is compiled yet. A server imports
it once, and the compiler's code too; its forks measure. Products need none of it, and do not wait for the server. While
steps are timed, all else that the bench has started stands still: it shares the processor's cores. No torch.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from llmfoundry_lite.errors import UserError

READY, STEPS, TIMED = "ready", "steps", "timed"
"""Stages of a measurement: it waits for the device, its first step begins, the step before the timed ones begins."""
WARM_UP = 2
"""Steps of each run that are not timed."""
Settings = dict[str, Any]
Mark = Callable[[str], None]
"""Called at each stage; the measurement goes on when it returns."""
Measure = Callable[[Settings, Mark], dict[str, Any]]

IMPORTS = ["llmfoundry_lite.ranks.preload", "llmfoundry_machines.bench.trainer", "llmfoundry_lite.training.train"]
IMPORTS += ["torch._inductor.compile_fx"]
"""Modules that the server imports. None of them starts a thread or asks for a device, which do not survive a fork."""
HANG_SECONDS = 60.0
"""Time that a process may always hold the device, however little is left to others."""
END_SECONDS = 10.0
"""How long a process that is done, or killed, may take to leave."""
FOUND, FAILED = "found", "failed"


class Turns:
    """Processes of a list of tasks, begun in its order, two at a time. As a context manager, it ends them.

    `measure`, such as that of `steps.py`, measures a task. A task has a `side`, and all else that `measure` asks for.
    """

    def __init__(self, measure: Measure, tasks: Sequence[Settings]):
        self._tasks, self._measure, self._cases = tasks, measure, list[Case]()

    def __enter__(self) -> "Turns":
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        # Without a handler, SIGTERM would leave stopped processes behind.
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        for case in self._cases:
            case.end()
        self._folder.cleanup()

    def measure(self, number: int, left_seconds: float) -> dict[str, Any]:
        """Give a task the device. Returns its measurements, `ready_seconds` and `steps_seconds`.

        Its first step ends the former and begins the latter; waiting for the device counts as neither. It may get ready
        for all of `left_seconds`, then hold the device for half of what is left, at least HANG_SECONDS.
        Raises RuntimeError, in a line, for one that fails or is ended.
        """
        if not self._cases and any(map(needs_server, self._tasks)):
            forkserver.set_forkserver_preload(IMPORTS)
            forkserver.ensure_running()
        for task in self._tasks[len(self._cases) : number + 2]:
            self._cases.append(Case(self._measure, task, Path(self._folder.name, f"{len(self._cases)}.txt")))
        case, end_by = self._cases[number], time.monotonic() + left_seconds
        still: list[psutil.Process] = []
        try:
            case.wait_for(READY, end_by)
            left_seconds = end_by - time.monotonic()
            end_by -= left_seconds - limit_of_turn(left_seconds)
            case.go_on()
            case.wait_for(TIMED, end_by)
            still = stop_others(case.process.pid)
            case.go_on()
            found = case.wait_for(FOUND, end_by)
            case.process.join(END_SECONDS)
            return found
        finally:
            for process in still:
                with contextlib.suppress(psutil.Error):
                    process.resume()
            case.end()


def limit_of_turn(left_seconds: float) -> float:
    """Return how long a process may hold the device, so that one that hangs does not cost all others."""
    return max(left_seconds / 2, min(left_seconds, HANG_SECONDS))


def needs_server(task: Settings) -> bool:
    return not task["side"].startswith("matmul")


class Case:
    """One process, and the channel to it."""

    def __init__(self, measure: Measure, task: Settings, log: Path):
        self.name, self.log = task["side"], log
        context: Any = multiprocessing.get_context("forkserver" if needs_server(task) else "spawn")
        self.channel, its = context.Pipe()
        self.process = context.Process(target=run_case, args=(measure, task, its, log, time.monotonic()))
        # The server answers when its imports are done.
        threading.Thread(target=self._start, args=(its,), daemon=True).start()

    def _start(self, its: Connection) -> None:
        with its, contextlib.suppress(OSError, EOFError):  # the server is gone
            self.process.start()

    def go_on(self) -> None:
        with contextlib.suppress(OSError):  # `wait_for` finds that it is gone
            self.channel.send(None)

    def wait_for(self, stage: str, end_by: float) -> Any:
        began = time.monotonic()
        try:
            while self.channel.poll(max(0.0, end_by - time.monotonic())):
                came, value = self.channel.recv()
                if came == FAILED:
                    raise RuntimeError(f"{self.name}: {value}")
                if came == stage:
                    return value
        except (EOFError, OSError):
            raise RuntimeError(f"{self.name}: {self._describe_end()}") from None
        raise RuntimeError(
            f"{self.name}: ended after {time.monotonic() - began:.0f} s without being {stage}, no time is left"
        )

    def _describe_end(self) -> str:
        """Say how a process that has reported nothing ended."""
        if self.process.pid is None:
            return "the server of the processes has ended"
        self.process.join(END_SECONDS)
        if self.process.exitcode == -signal.SIGKILL:
            return "killed, usually for lack of memory"
        said = self.log.read_text(errors="replace").split("\n") if self.log.is_file() else []
        last = next((f": {line}" for line in reversed(said) if line.strip()), "")
        return f"exit code {self.process.exitcode}{last}"

    def end(self) -> None:
        """End the process with all that it has started, and wait until the device is free of it."""
        self.channel.close()
        if self.process.pid is None:
            return  # if it still starts, it finds the channel closed
        for kill in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            with contextlib.suppress(ProcessLookupError):
                kill()
        self.process.join(END_SECONDS)


def stop_others(group: int) -> list[psutil.Process]:
    """Suspend all that this process has started, except one group of processes and its descendants. Return the
    suspended ones: one whose parent ends meanwhile could not be found again."""
    parent, spared, stopped = psutil.Process(), {group}, list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):  # its measurement says why it has ended
        spared |= {child.pid for child in psutil.Process(group).children(recursive=True)}
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.pid not in spared:
                child.suspend()
                stopped.append(child)
    return stopped


def run_case(measure: Measure, task: Settings, channel: Connection, log: Path, began: float) -> None:
    """Measure in this process. `began`: when it was asked for, by the monotonic clock."""
    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    came = dict[str, float]()

    def mark(stage: str) -> None:
        came[stage] = time.monotonic()
        if stage == STEPS:
            return
        channel.send((stage, None))
        channel.recv()
        came[f"{stage}, and went on"] = time.monotonic()

    try:
        found = measure(task, mark)
        waited = came[f"{READY}, and went on"] - came[READY]
        found["ready_seconds"] = came[STEPS] - began - waited
        found["steps_seconds"] = time.monotonic() - came[STEPS]
        channel.send((FOUND, found))
    except Exception as error:
        words = " ".join(str(error).split())
        channel.send((FAILED, words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"))
    sys.stdout.flush()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
