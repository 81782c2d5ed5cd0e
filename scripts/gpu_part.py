"""One part of `gpu_check.py`: its time, its proof, and the programs that it runs and ends.

A part runs *steps* (`gpu_steps.py`), functions that start programs and add what these found to the part's *proof*, a
JSON file. A `Part` runs the steps at once as far as cores allow, ends each program at its limit, and records what
failed and what was left out. It does not know what the steps check.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESERVE_SECONDS = 8
"""Seconds reserved at the end of a part, to kill late programs and to write the proof."""
WAITING_SHARE = 2 / 3
"""Share of the remaining time that a program may take while other steps wait."""
MANY_CORES = 8
"""Number of cores with which all steps of a part run at once."""
NUM_AT_ONCE = 2
"""Number of steps that run at once with fewer cores."""
MARK = "GPU_CHECK_STEP"
"""Environment variable by which the processes of a step are found."""


class Part:
    """The time, the folder and the proof of one part. Its steps may call all methods from threads of their own.

    Attributes: `proof`, which steps extend, most of all its lists `problems` and `left_out`; `path`, the file that it
    is written to; `out`, the folder for that file, for logs and for what steps write; and `num_cores`.
    """

    def __init__(self, name: str, minutes: float, out: Path):
        """Begin a part that takes at most `minutes`, and make its folder."""
        self.began = time.monotonic()
        self.deadline = self.began + 60 * minutes
        self.out = out
        self.path = out / f"{name}.json"
        self.proof: dict[str, Any] = {"format": 1, "part": name, "minutes": minutes, "problems": [], "left_out": []}
        self.num_cores = len(os.sched_getaffinity(0))
        self.runs_at_once = self.num_cores >= MANY_CORES
        self._steps: list[Future[None]] = []
        self._writing = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)

    @property
    def is_cpu(self) -> bool:
        """Whether this machine has no GPU. Known as soon as the proof has the facts of the machine."""
        return self.proof["vendor"] == "cpu"

    def left(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()

    def tell(self, text: str) -> None:
        """Print a line that begins with the time that is left."""
        minutes, seconds = divmod(max(0, int(self.left())), 60)
        show(f"[{minutes}:{seconds:02} left] {text}")

    def note(self, **findings: Any) -> None:
        """Set keys of the proof, and write it with the seconds so far. Called after each step, so that a part which is
        killed still leaves what it has found."""
        with self._writing:
            self.proof |= findings | {"seconds": round(time.monotonic() - self.began, 1)}
            self.path.write_text(json.dumps(self.proof, indent=1) + "\n")

    def together(self, steps: Mapping[str, Callable[[], None]]) -> None:
        """Run steps, and wait for all. They start in their order, and as many run at once as the cores allow.

        A step that raises becomes a problem of the proof, and does not stop the others.
        """
        num_at_once = len(steps) if self.runs_at_once else NUM_AT_ONCE
        with ThreadPoolExecutor(num_at_once) as pool:
            futures = {name: pool.submit(step) for name, step in steps.items()}
            self._steps += futures.values()
            for name, future in futures.items():
                error = future.exception()
                if error:
                    traceback.print_exception(error)
                    self.proof["problems"].append(f"{name}: {error!r}")

    def _has_waiting_steps(self) -> bool:
        """Return whether any step has not started yet."""
        return any(not step.running() and not step.done() for step in self._steps)

    def end(self, number: int, frame: Any = None) -> None:
        """Handle a signal by setting the deadline to the past, so that each step ends its programs."""
        self.deadline = 0.0
        self.proof["problems"].append(f"ended by {signal.Signals(number).name}")

    def run(
        self, name: str, arguments: Sequence[str], needs: float = 0, share: float | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with `arguments` in the root of the clone, print its output line by line, and return its result.

        `share` is the share of the remaining time after which the program is killed, with all that it has started. By
        default that is WAITING_SHARE while other steps wait, so that a program that hangs does not cost the others, and
        else all of it. If no more than `needs` seconds remain, the program is left out. `environment` are variables
        beside those of `environment_of_steps`.

        The result has the exit code (1 if the program was killed or left out) and the output, which is also in
        OUT/NAME.log. A failure becomes a problem of the proof, and a program that was left out is named there.
        """
        command = [sys.executable, "-u", *arguments]
        if self.left() - RESERVE_SECONDS <= needs:
            self.proof["left_out"].append(f"{name}: no time for it")
            return subprocess.CompletedProcess(command, 1, "", "")

        words = " ".join(arguments).split()
        self.tell(f"{name}: {' '.join(words)[:140]}")
        began = time.monotonic()
        log = self.out / f"{name.replace(' ', '-')}.log"
        mark = f"{os.getpid()} {name}"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment_of_steps() | environment | {MARK: mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = self._wait(process, name, log, share)
            finally:
                # Also after the program's own end, since it may have left other processes.
                kill_step(mark)
                process.wait()

        text = log.read_text(errors="replace")
        if code is None:
            self.proof["problems"].append(f"{name}: ended after {time.monotonic() - began:.0f} s, when its time was up")
        elif code:
            self.proof["problems"].append(f"{name}: exit code {code}: {last_line(text)}")
        self.note()
        return subprocess.CompletedProcess(command, 1 if code is None else code, text, "")

    def _wait(self, process: subprocess.Popen, name: str, log: Path, share: float | None) -> int | None:
        """Print the lines of a program's log as it grows, until the program ends or its time is up.

        `share` is as in `run`. Returns the exit code, or None if the time is up. The program is then still running.
        """
        # Limits are in seconds that are left of the part, so that a signal, which leaves none, exceeds all of them.
        usable_seconds = self.left() - RESERVE_SECONDS
        left_at_limit = self.left() - (share or WAITING_SHARE) * usable_seconds
        num_printed_bytes = 0
        while True:
            code = process.poll()
            has_limit = share or self._has_waiting_steps()
            is_late = self.left() < (left_at_limit if has_limit else RESERVE_SECONDS)
            is_over = code is not None or is_late

            # A line that is not complete yet is printed later, unless nothing follows.
            text = log.read_bytes()
            end = len(text) if is_over else text.rfind(b"\n") + 1
            for line in text[num_printed_bytes:end].decode(errors="replace").splitlines():
                show(f"{name}: {line}")
            num_printed_bytes = max(num_printed_bytes, end)
            if is_over:
                return code
            time.sleep(0.5)


def show(line: str) -> None:
    """Print a line in one write, so that lines of steps which run at the same time do not mix."""
    print(f"{line}\n", end="", flush=True)


def kill_step(mark: str) -> None:
    """Kill all processes of a step, in any session, and wait for their end, because a GPU's memory is free only then.

    They are those whose environment has `mark` in the variable MARK. Gives up after half of RESERVE_SECONDS.
    """
    from llmfoundry_ops import processes

    deadline = time.monotonic() + RESERVE_SECONDS / 2
    while time.monotonic() < deadline:
        step_processes = processes.find(mark, MARK)
        if not step_processes:
            return
        processes.terminate(step_processes, signal.SIGKILL)
        time.sleep(0.05)


def environment_of_steps() -> dict[str, str]:
    """Return the environment of a step's programs.

    Python imports the packages of this clone before installed ones. Programs such as `composer` are found beside each
    folder of PYTHONPATH, where `pip install --target` puts them, and beside this Python.
    """
    inherited_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    import_folders = [str(ROOT), str(ROOT / "companions"), *filter(None, inherited_path)]
    program_folders = [f"{folder}/bin" for folder in import_folders]
    program_folders += [str(Path(sys.executable).parent), os.environ.get("PATH", "")]

    # Bytecode is kept, because importing a step's packages without it takes 20 seconds of a core.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["WANDB_MODE"] = "disabled"
    environment["PYTHONPATH"] = os.pathsep.join(import_folders)
    environment["PATH"] = os.pathsep.join(program_folders)
    return environment


def last_line(text: str) -> str:
    """Return the last line that is not empty, cut to 200 characters, or `no output`."""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "no output")
