"""One part of `gpu_check.py`: its time, its proof, and the programs that it runs and ends."""

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
"""Seconds reserved to end late steps and to write the findings."""
MANY_CORES = 8
NUM_AT_ONCE = 2
"""Number of steps that run at once. With enough cores, all do."""
MARK = "GPU_CHECK_STEP"
"""Variable by which the processes of a step are found."""


class Part:
    """Time, folder and proof of a part."""

    def __init__(self, name: str, minutes: float, out: Path):
        self.began = time.monotonic()
        self.deadline, self.out = self.began + 60 * minutes, out
        self.path = out / f"{name}.json"
        self.proof: dict[str, Any] = {"format": 1, "part": name, "minutes": minutes, "problems": [], "left_out": []}
        self.num_cores = len(os.sched_getaffinity(0))
        self.runs_at_once = self.num_cores >= MANY_CORES
        self._steps: list[Future[None]] = []
        self._writing = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)

    @property
    def is_cpu(self) -> bool:
        return self.proof["vendor"] == "cpu"

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def tell(self, text: str) -> None:
        minutes, seconds = divmod(max(0, int(self.left())), 60)
        show(f"[{minutes}:{seconds:02} left] {text}")

    def note(self, **found: Any) -> None:
        """Add findings of a step to the proof, and write it."""
        with self._writing:
            self.proof |= found | {"seconds": round(time.monotonic() - self.began, 1)}
            self.path.write_text(json.dumps(self.proof, indent=1) + "\n")

    def together(self, steps: Mapping[str, Callable[[], None]]) -> None:
        """Run steps in order, several at once as cores allow. A step that raises becomes a problem of the proof."""
        with ThreadPoolExecutor(len(steps) if self.runs_at_once else NUM_AT_ONCE) as pool:
            futures = {name: pool.submit(step) for name, step in steps.items()}
            self._steps += futures.values()
            for name, future in futures.items():
                if error := future.exception():
                    traceback.print_exception(error)
                    self.proof["problems"].append(f"{name}: {error!r}")

    def _waits(self) -> bool:
        """Return whether a step has not begun yet."""
        return any(not step.running() and not step.done() for step in self._steps)

    def end(self, number: int, frame: Any = None) -> None:
        """Handle a signal: no step has time any more, so each ends its processes."""
        self.deadline = 0.0
        self.proof["problems"].append(f"ended by {signal.Signals(number).name}")

    def run(
        self, name: str, arguments: Sequence[str], needs: float = 0, share: float | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in the clone's root and show its output. At the limit it is ended, with all that it started.

        The limit is `share` of the remaining time. By default that is two thirds while other steps wait, so that a step
        that hangs does not cost the others, else all. The step is left out if less than `needs` seconds remain.
        Failures become problems of the proof. The log is OUT/NAME.log.
        """
        command, mark = [sys.executable, "-u", *arguments], f"{os.getpid()} {name}"
        if self.left() - RESERVE_SECONDS <= needs:
            self.proof["left_out"].append(f"{name}: no time for it")
            return subprocess.CompletedProcess(command, 1, "", "")
        self.tell(f"{name}: {' '.join(' '.join(arguments).split())[:140]}")
        began, log = time.monotonic(), self.out / f"{name.replace(' ', '-')}.log"
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
                end_all(mark)
                process.wait()
        text = log.read_text(errors="replace")
        if code is None:
            self.proof["problems"].append(f"{name}: ended after {time.monotonic() - began:.0f} s, when its time was up")
        elif code:
            self.proof["problems"].append(f"{name}: exit code {code}: {last_line(text)}")
        self.note()
        return subprocess.CompletedProcess(command, 1 if code is None else code, text, "")

    def _wait(self, process: subprocess.Popen, name: str, log: Path, share: float | None) -> int | None:
        """Show the log's lines as it grows, until the end or the limit. Returns the exit code; None at the limit."""
        limit, shown = self.left() - (share or 2 / 3) * (self.left() - RESERVE_SECONDS), 0
        while True:
            code = process.poll()
            is_late = self.left() < (limit if share or self._waits() else RESERVE_SECONDS)
            is_over = code is not None or is_late
            text = log.read_bytes()
            until = len(text) if is_over else text.rfind(b"\n") + 1
            for line in text[shown:until].decode(errors="replace").splitlines():
                show(f"{name}: {line}")
            shown = max(shown, until)
            if is_over:
                return code
            time.sleep(0.5)


def show(line: str) -> None:
    """Print a line at once, in one piece: steps that run at once print too."""
    print(f"{line}\n", end="", flush=True)


def end_all(mark: str) -> None:
    """End all processes of a step, in any session, and wait for them, because a GPU's memory is free only then."""
    from llmfoundry_ops import processes

    deadline = time.monotonic() + RESERVE_SECONDS / 2
    while (found := processes.find(mark, MARK)) and time.monotonic() < deadline:
        processes.terminate(found, signal.SIGKILL)
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
