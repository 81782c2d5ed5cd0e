"""Measure the seconds from the command to the first batch of a resumed run, under each launcher.

    python -m benchmarks start --num-rounds 5 --out results

The run has two ranks, or one for launchers that start a single process. The clock stops when the record of the first
batch after the save is written. In the same rounds, `import composer` alone is timed: imports are most of a start, and
their time depends on the machine. One round before the first is not timed; it compiles what is imported. Drawing the
initial weights is timed separately, with one thread and with one for each core.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Log, kill_with_children, last_lines, wait_for
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.models.initialise import draw_range
from llmfoundry_lite.ranks.rank import count_usable_cores
from llmfoundry_machines.bench import frame
from llmfoundry_machines.bench.steps import SHAPES, write_run

IMPORT = "import composer"
PYTHON = sys.executable
LAUNCHERS = {
    "composer -n 2": (str(Path(PYTHON).with_name("composer")), "-n", "2", "-m", "llmfoundry_lite.launch_train"),
    "torchrun --nproc-per-node 2": (
        *(PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("-m", "llmfoundry_lite.launch_train"),
    ),
    "llmfoundry-lite train -n 2": (PYTHON, "-m", "llmfoundry_lite", "train", "-n", "2"),
    "llmfoundry-lite train, 1 process": (PYTHON, "-m", "llmfoundry_lite", "train"),
    "python -m llmfoundry_lite.launch_train, 1 process": (PYTHON, "-m", "llmfoundry_lite.launch_train"),
}
BATCHES_SAVED = 2
"""Batches of the run that is resumed."""
NUM_WEIGHTS = 205_000_000
"""Weights that are drawn when that is timed."""
DEADLINE_SECONDS = 300.0
"""Longest wait for the first batch."""


def run(shape: str = "10m", seq_len: int = 128, num_rounds: int = 5, out: Path | None = None) -> dict[str, Any]:
    """Time all launchers in turns, print the table, write it into `out`, and return the report.

    Raises ConfigError for an unknown shape, and DataError for a launcher that fails.
    """
    frame.check_names("--shape", [shape], SHAPES)
    console, conditions = frame.open_console(), frame.describe_conditions()
    settings = {"shape": shape, "seq_len": seq_len, "batch_size": 2, "num_steps": 1000}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        # Train the batches that are resumed from. Each later launch starts at the same save, because it makes none.
        options = (str(write_run(Path(folder), settings, "fp32")), "autoresume=true", "save_interval=1000000ba")
        log, output = Log(Path(folder, "run/metrics.jsonl")), Path(folder, "output.txt")
        first_launch = [*LAUNCHERS["llmfoundry-lite train -n 2"], *options, f"stop_after={BATCHES_SAVED}ba"]
        first_result = subprocess.run(first_launch, env=environment, capture_output=True, text=True)
        if len(log.last_of_each_batch()) != BATCHES_SAVED:
            raise DataError(
                f"bench start: the run did not begin: {last_lines(first_result.stdout + first_result.stderr, 3, ' | ')}"
            )

        def first_batch(launcher: Sequence[str]) -> float:
            """Return the seconds from this launcher's command to the next record of the run."""
            num_records_before = len(log.read())
            return time_until(lambda: len(log.read()) > num_records_before, [*launcher, *options], environment, output)

        sides: dict[str, Callable[[], float]] = {IMPORT: partial(time_import, environment)}
        sides |= {name: partial(first_batch, launcher) for name, launcher in LAUNCHERS.items()}
        console.print("a round that is not timed", highlight=False)
        for measure in sides.values():
            measure()
        seconds_by_launcher, _ = frame.take_turns(sides, num_rounds, console)

    # The initial weights, without a launch.
    threads = sorted({1, count_usable_cores()})
    turns = {
        f"by {num_threads} thread{'s' * (num_threads > 1)}": partial(time_weights, num_threads)
        for num_threads in threads
    }
    weights_seconds, _ = frame.take_turns(turns, num_rounds, console)

    report = (
        conditions
        | settings
        | {"num_rounds": num_rounds, "seconds": seconds_by_launcher, "weights_seconds": weights_seconds}
    )
    table = frame.measured_table(
        "Time from the command to the first batch of a resumed run",
        ("", "seconds", "times the import"),
        [
            (name, str(frame.spread(seconds)), str(frame.ratios(seconds, seconds_by_launcher[IMPORT])))
            for name, seconds in seconds_by_launcher.items()
        ],
    )

    notes = [f"the run: {shape}, {seq_len} tokens a sample, from its save after {BATCHES_SAVED} batches"]
    weights = [f"{name} {frame.spread(seconds)} s" for name, seconds in weights_seconds.items()]
    weights += [f"{frame.ratios(*weights_seconds.values())} times as fast"] if len(weights_seconds) > 1 else []
    notes.append(f"initial weights of {NUM_WEIGHTS / 1e6:.0f} M parameters, without a launch: {', '.join(weights)}")
    heading, asked = "How long a launch takes", ("shape", "seq_len")
    command = f"python -m benchmarks start --shape {shape} --num-rounds {num_rounds}"
    frame.tell(report, table, notes, name="start", heading=heading, command=command, asked=asked, out=out)
    return report


def time_weights(num_threads: int) -> float:
    """Return the seconds in which `num_threads` draw NUM_WEIGHTS weights, as a rank does, without a model."""

    def draw(generator: np.random.Generator, part: np.ndarray) -> None:
        """Fill a part of the tensor with normal numbers."""
        generator.standard_normal(out=part, dtype=np.float32)

    out, started = np.empty(NUM_WEIGHTS, np.float32), time.monotonic()
    draw_range(draw, 17, "w", 0, out, num_threads)
    return time.monotonic() - started


def time_import(environment: dict[str, str]) -> float:
    """Return the seconds of a Python process that imports composer and does nothing else."""
    started = time.monotonic()
    subprocess.run([PYTHON, "-c", IMPORT], env=environment, check=True, capture_output=True)
    return time.monotonic() - started


def time_until(is_there: Callable[[], bool], command: list[str], environment: dict[str, str], output: Path) -> float:
    """Start a command, return the seconds until `is_there` is true, and kill the command with all its processes.

    `output` gets what the command prints. Raises DataError with its last lines if it ends before, or after
    DEADLINE_SECONDS.
    """

    def lost() -> DataError:
        """Build the error for a launch that never came to a batch."""
        words = last_lines(output, 3, " | ")
        return DataError(f"bench start: {' '.join(command[:4])} … came to no batch: {words}")

    with output.open("wb") as file:
        started = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        wait_for(is_there, DEADLINE_SECONDS, lost, lambda: process.poll() is not None)
        return time.monotonic() - started
    finally:
        kill_with_children(process)
