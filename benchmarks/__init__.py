"""Proofs, and races beside peers: `python -m benchmarks`."""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m benchmarks`: before anything else is imported from the working directory
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

LOOK_SECONDS = 0.02
END_SECONDS = 300.0
"""For processes that have been killed to be gone."""
ROOT = Path(__file__).parents[1]


def with_root(**changes: str) -> dict[str, str]:
    """This process's environment, in which programs find this clone before anything else."""
    paths = [str(ROOT), str(ROOT / "companions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def wait_for(
    is_there: Callable[[], Any],
    seconds: float,
    lost: Callable[[], Exception],
    is_over: Callable[[], Any] = lambda: False,
) -> Any:
    """Return what comes. Raises what `lost` makes after so many seconds, and once `is_over`: then nothing comes."""
    deadline = time.monotonic() + seconds
    while not (found := is_there()):
        if time.monotonic() > deadline or is_over():
            raise lost()
        time.sleep(LOOK_SECONDS)
    return found


def last_lines(output: Path | str, count: int = 20, between: str = "\n") -> str:
    """Return the last lines of a file, or of a text."""
    text = output.read_text(errors="replace") if isinstance(output, Path) else output
    return between.join(text.strip().splitlines()[-count:])


class Log:
    """A run's metrics.jsonl as it grows."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far. A line that a killed process left unfinished waits for its successor."""
        if self.path.exists():
            with self.path.open() as file:
                file.seek(self._offset)
                while (line := file.readline()).endswith("\n"):
                    self._offset = file.tell()
                    self.records.append(json.loads(line))
        return self.records

    def last_of_each_batch(self) -> dict[int, dict[str, Any]]:
        return {record["batch"]: record for record in self.read()}


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """Kill a launcher and its ranks, which outlive the launchers of composer and torchrun."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(family, END_SECONDS)
