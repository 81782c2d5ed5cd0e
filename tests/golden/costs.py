"""What starting costs: seconds, memory and modules."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from tests.golden.lab import Lab

STARTED = {
    "--help": ["-m", "llmfoundry_lite", "--help"],
    "dry-run": ["-m", "llmfoundry_lite", "train", "mpt-1b", "--dry-run"],
    "plan": ["-m", "llmfoundry_lite", "plan", "mpt-1b", "--hardware", "h100-80gb", "--devices", "8"],
    "import": ["-c", "import llmfoundry_lite"],
    "import config": ["-c", "import llmfoundry_lite.config.load_train"],
    "import training": ["-c", "import llmfoundry_lite.training.train"],
}
TIMES = 3


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    return {name: lambda name=name: {name: measure(lab, STARTED[name])} for name in STARTED}


def measure(lab: Lab, arguments: list[str]) -> dict[str, float]:
    start(lab, arguments)  # compiles what is new
    wall, cpu, memory = zip(*(start(lab, arguments) for _ in range(TIMES)), strict=True)
    modules = subprocess.run(
        [lab.python, "-X", "importtime", *arguments],
        cwd=lab.folder,
        env=lab.environment,
        capture_output=True,
        check=True,
    ).stderr.count(b"import time:")
    return {
        "wall_seconds": round(median(wall), 3),
        "cpu_seconds": round(median(cpu), 3),
        "peak_mib": round(median(memory), 1),
        "modules": modules,
    }


def start(lab: Lab, arguments: list[str]) -> tuple[float, float, float]:
    """Seconds, seconds of a processor, MiB."""
    with tempfile.TemporaryFile() as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [lab.python, *arguments], cwd=lab.folder, env=lab.environment, stdout=output, stderr=output
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
