"""Measurements that use the device one after another, each in its own process. The next one gets ready meanwhile.

Importing the training code takes longer than the steps: more than 20 s if Python has not compiled it yet. A fork server
imports it once, with the compiler's code, and each measurement is a fork of it. Matrix products need none of it, so
they are in new processes, which do not wait for the server.

A measurement passes three stages. It stops at READY, before it uses the device, and at TIMED, before its timed steps,
until the bench lets it continue; at STEPS it only notes the time.

    bench (Turns.measure)                               process (run_measurement)
                                                        imports, reads its configuration, marks READY
    waits for READY, lets it continue            ->     builds the model, marks STEPS, runs the first step, marks TIMED
    waits for TIMED, suspends all other processes,
    lets it continue                             ->     runs the timed steps, sends its measurements
    resumes the others, ends the process

The others are suspended because they share the processor's cores with the timed steps. This module does not import
torch.
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
"""Stages of a measurement: ready to use the device, at its first step, and at its last step before the timed ones."""
WARM_UP = 2
"""Steps at the beginning of each run that are not timed."""
Settings = dict[str, Any]
Mark = Callable[[str], None]
"""A function that a measurement calls with each stage, and that may wait before it returns."""
Measure = Callable[[Settings, Mark], dict[str, Any]]

IMPORTS = ["llmfoundry_lite.ranks.preload", "llmfoundry_machines.bench.trainer", "llmfoundry_lite.training.train"]
IMPORTS += ["torch._inductor.compile_fx"]
"""Modules that the fork server imports. None starts a thread or uses a device, neither of which survives a fork."""
HANG_SECONDS = 60.0
"""Time that a process may use the device even if this leaves less than half of the remaining time to the others."""
END_SECONDS = 10.0
"""Time to wait for the end of a process that has finished or was killed."""
MEASURED, FAILED = "measured", "failed"
"""Messages of a process beside its stages: its measurements, and the error that ended it."""


class Turns:
    """Processes that measure a list of tasks, started in the list's order, two at a time.

    Use it as a context manager, which ends the processes that are left. Between its begin and its end, SIGTERM raises
    SystemExit in this process, so that they are ended then too.

        with Turns(steps.measure, tasks) as turns:
            measurements = turns.measure(0, left_seconds=60)

    `measure` is called in each process with a task and a `mark`. A task is a dict with a `side`, such as `matmul bf16`,
    and all else that `measure` needs.
    """

    def __init__(self, measure: Measure, tasks: Sequence[Settings]):
        self._measure = measure
        self._tasks = tasks
        self._measurements: list[Measurement] = []

    def __enter__(self) -> "Turns":
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        # Without a handler, SIGTERM would leave suspended processes behind.
        self._previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._previous_handler)
        for measurement in self._measurements:
            measurement.end()
        self._folder.cleanup()

    def measure(self, index: int, left_seconds: float) -> dict[str, Any]:
        """Let the task at `index` use the device, and return its measurements with `ready_seconds` and `steps_seconds`.

        `ready_seconds` end and `steps_seconds` begin with the first step. The time that the task waits for the device
        is in neither. It has all of `left_seconds` to get ready, and may then use the device for as long as
        `limit_of_turn` says. The process of the next task is started too.

        Raises RuntimeError with one line if the task fails, or is ended because its time is up. Call this once for each
        task, in the order of the list.
        """
        if not self._measurements and any(map(needs_server, self._tasks)):
            forkserver.set_forkserver_preload(IMPORTS)
            forkserver.ensure_running()
        # Start this task's process, if it is not running yet, and the next one's.
        for task in self._tasks[len(self._measurements) : index + 2]:
            log = Path(self._folder.name, f"{len(self._measurements)}.txt")
            self._measurements.append(Measurement(self._measure, task, log))

        measurement = self._measurements[index]
        deadline = time.monotonic() + left_seconds
        suspended: list[psutil.Process] = []
        try:
            measurement.wait_for(READY, deadline)
            now = time.monotonic()
            deadline = now + limit_of_turn(deadline - now)
            measurement.let_continue()
            measurement.wait_for(TIMED, deadline)
            suspended = suspend_others(measurement.process.pid)
            measurement.let_continue()
            result = measurement.wait_for(MEASURED, deadline)
            measurement.process.join(END_SECONDS)
            return result
        finally:
            for other in suspended:
                with contextlib.suppress(psutil.Error):
                    other.resume()
            measurement.end()


def limit_of_turn(left_seconds: float) -> float:
    """Return for how many seconds a process may use the device: half of what is left, or HANG_SECONDS if that is more.

    A process that hangs then does not take the time of all others.
    """
    return max(left_seconds / 2, min(left_seconds, HANG_SECONDS))


def needs_server(task: Settings) -> bool:
    """Return whether a task uses the training code, which the fork server has imported."""
    return not task["side"].startswith("matmul")


class Measurement:
    """The process that measures one task, and the channel between it and the bench.

    Over the channel the process sends pairs: a stage that it has reached and None, or MEASURED and its measurements, or
    FAILED and an error. The bench sends None to let it continue. `log` takes what the process prints.
    """

    def __init__(self, measure: Measure, task: Settings, log: Path):
        """Start the process of a task, in a thread, and return at once.

        measure: function that the process calls with the task's settings.
        task: settings of the task, with the name of its `side`.
        log: file for what the process prints.
        """
        self.name = task["side"]
        self.log = log
        # A server that has imported the modules already forks a process in a moment. A spawned one imports them itself.
        context: Any = multiprocessing.get_context("forkserver" if needs_server(task) else "spawn")
        # The bench keeps one end of the channel, and the process gets the other.
        self.channel, process_end = context.Pipe()
        arguments = (measure, task, process_end, log, time.monotonic())
        self.process = context.Process(target=run_measurement, args=arguments)
        # Starting blocks until the server has imported its modules. Meanwhile another task may be measured.
        threading.Thread(target=self._start, args=(process_end,), daemon=True).start()

    def _start(self, process_end: Connection) -> None:
        """Start the process, and close our copy of its end of the channel, so that we notice when it ends."""
        # If the server has ended, nothing starts, and `wait_for` finds the channel closed.
        with process_end, contextlib.suppress(OSError, EOFError):
            self.process.start()

    def let_continue(self) -> None:
        """Let the process continue after a stage at which it waits."""
        with contextlib.suppress(OSError):  # if it has ended, `wait_for` says so
            self.channel.send(None)

    def wait_for(self, message: str, deadline: float) -> Any:
        """Wait until the process sends `message`, a stage or MEASURED, and return what it sends with it.

        `deadline` is a time of the monotonic clock. Raises RuntimeError if the process fails or ends before, or if the
        time is up.
        """
        began = time.monotonic()
        try:
            while self.channel.poll(max(0.0, deadline - time.monotonic())):
                received_message, content = self.channel.recv()
                if received_message == FAILED:
                    raise RuntimeError(f"{self.name}: {content}")
                if received_message == message:
                    return content
        except (EOFError, OSError):
            raise RuntimeError(f"{self.name}: {self._describe_end()}") from None
        waited_seconds = time.monotonic() - began
        raise RuntimeError(
            f"{self.name}: ended after {waited_seconds:.0f} s without being {message}, and no time is left"
        )

    def _describe_end(self) -> str:
        """Say how a process ended that did not report an error: by a signal, or with an exit code and a last line."""
        if self.process.pid is None:
            return "the server of the processes has ended"
        self.process.join(END_SECONDS)
        if self.process.exitcode == -signal.SIGKILL:
            return "killed, usually for lack of memory"

        printed = self.log.read_text(errors="replace") if self.log.is_file() else ""
        lines = [line for line in printed.split("\n") if line.strip()]
        last_line = f": {lines[-1]}" if lines else ""
        return f"exit code {self.process.exitcode}{last_line}"

    def end(self) -> None:
        """Kill the process with all that it has started, and wait until it has left the device. May be called twice."""
        self.channel.close()
        if self.process.pid is None:
            return  # if it starts later, it finds the channel closed
        # The group first, which is its own. It has none yet if it has just been started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(END_SECONDS)


def suspend_others(process_id: int) -> list[psutil.Process]:
    """Suspend all descendants of this process, except one process and its own descendants.

    Returns the suspended processes, for the caller to resume. They could not be found again later if their parent ended
    meanwhile, because they would no longer be descendants of this process.
    """
    spared_ids = {process_id}
    with contextlib.suppress(psutil.NoSuchProcess):  # if it has ended, `wait_for` says why
        spared_ids |= {child.pid for child in psutil.Process(process_id).children(recursive=True)}

    suspended = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.pid not in spared_ids:
                child.suspend()
                suspended.append(child)
    return suspended


def run_measurement(measure: Measure, task: Settings, channel: Connection, log: Path, started: float) -> None:
    """Measure a task in this process, and send the stages and the measurements to the bench (Measurement).

    `started` is the time of the monotonic clock at which the bench asked for the process. What it prints goes to `log`.
    """
    # A group of its own, so that it can be killed with its children. They end with the bench in any case.
    os.setsid()
    threading.Thread(target=end_with_parent, daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for standard_stream in (1, 2):
        os.dup2(output, standard_stream)

    reached: dict[str, float] = {}  # stage -> when it was reached
    continued: dict[str, float] = {}  # stage -> when the bench let this process continue

    def mark(stage: str) -> None:
        """Note the time of a stage. At READY and TIMED, wait for the bench."""
        reached[stage] = time.monotonic()
        if stage == STEPS:
            return
        channel.send((stage, None))
        channel.recv()
        continued[stage] = time.monotonic()

    try:
        result = measure(task, mark)
        waited_seconds = continued[READY] - reached[READY]
        result["ready_seconds"] = reached[STEPS] - started - waited_seconds
        result["steps_seconds"] = time.monotonic() - reached[STEPS]
        channel.send((MEASURED, result))
    except Exception as error:
        # In one line. Messages to users need no type of the error.
        message = " ".join(str(error).split())
        if not isinstance(error, UserError):
            message = f"{type(error).__name__}: {message}"
        channel.send((FAILED, message))
    sys.stdout.flush()


def end_with_parent() -> None:
    """Wait for the end of the bench, then kill this process and all of its group."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
