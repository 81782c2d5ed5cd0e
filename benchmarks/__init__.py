"""Benchmarks that prove the claims of docs/claims.md and compare with other tools: `python -m benchmarks`.

This file has the helpers that several benchmarks share for the processes they start: the environment of such a process,
waiting for what it produces, its metrics log, and killing it. Read `__main__.py` next: it lists the benchmarks.
"""

import sys

# With `python -m benchmarks`, Python puts the working directory first on its search path. It is taken out here, before
# anything else could be imported from it.
if sys.argv[:1] == ["-m"]:
    from llmfoundry_lite.search_path import leave_out_working_directory

    leave_out_working_directory()

import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

POLL_SECONDS = 0.02
"""Time between two checks of a condition that is waited for."""
KILLED_PROCESS_TIMEOUT_SECONDS = 300.0
"""Longest wait for processes to disappear after they have been killed."""
ROOT = Path(__file__).parents[1]
"""The checkout that this file is part of."""


def with_root(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment in which Python imports this checkout before anything else.

    `changes` are variables to set in the copy. Entries that PYTHONPATH already has stay, after the checkout's.
    """
    paths = [str(ROOT), str(ROOT / "companions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def wait_for(
    is_there: Callable[[], Any],
    seconds: float,
    lost: Callable[[], Exception],
    is_over: Callable[[], Any] = lambda: False,
) -> Any:
    """Call `is_there` until it returns something truthy, and return that.

    `is_over` tells that waiting has become pointless, for example because the awaited process has ended.

    Raises the exception that `lost` builds once `seconds` have passed or `is_over` is true. `is_there` is checked
    first, so a result that arrives together with the end is still returned.
    """
    deadline = time.monotonic() + seconds
    while not (result := is_there()):
        if time.monotonic() > deadline or is_over():
            raise lost()
        time.sleep(POLL_SECONDS)
    return result


def last_lines(output: Path | str, count: int = 20, between: str = "\n") -> str:
    """Return the last `count` lines of a file or a text, joined by `between`. Used to quote a failed process."""
    text = output.read_text(errors="replace") if isinstance(output, Path) else output
    return between.join(text.strip().splitlines()[-count:])


class Log:
    """Reader of a run's metrics.jsonl that can be called again while the run is still writing.

    `records` has every complete record read so far. Each call of `read` continues where the previous one ended.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the records added since the last call, and return all records so far.

        A line without a newline is still being written, or was cut off when the process was killed. It is not read
        until it is complete.
        """
        if self.path.exists():
            with self.path.open() as file:
                file.seek(self._offset)
                while (line := file.readline()).endswith("\n"):
                    self._offset = file.tell()
                    self.records.append(json.loads(line))
        return self.records

    def last_of_each_batch(self) -> dict[int, dict[str, Any]]:
        """Return batch number -> its newest record. A resumed run may log a batch a second time."""
        return {record["batch"]: record for record in self.read()}


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """Kill a launcher and all processes below it, and wait until they are gone.

    The ranks have to be killed one by one, because they outlive a killed `composer` or `torchrun` launcher.
    """
    # The children must be listed first: once the launcher is dead, they have another parent.
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()
    psutil.wait_procs(descendants, KILLED_PROCESS_TIMEOUT_SECONDS)
