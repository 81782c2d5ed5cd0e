"""Check what only a GPU can show, in two parts that each end within 4 minutes and leave a proof.

    python scripts/gpu_check.py device   the tests marked gpu; memory beside the rehearsal; MFU of MPT-1B and MPT-125M
    python scripts/gpu_check.py runs     20 batches, bit for bit; a run that switches between CPU and GPU; a save and a
                                         restore of MPT-1B, with its energy; evaluation beside lm_eval

It uses the interpreter that runs it, with its torch (2.11 or newer), and needs no package index. `ready` lists missing
packages. Each part writes OUT/PART.json after each of its steps; `verified FILE…` prints the table of such files
(`gpu_proofs.py`). Steps (`gpu_steps.py`) are in order of importance, and run at once where there are cores for it.
Steps without time left are named. Without a GPU a part does what a CPU can: other tests of the same files, and smaller
models.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import platform
import re
import shutil
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
NEEDED = {
    "torch": "2.11 or newer; the machine's own",
    "composer": "mosaicml==0.32.1",
    "streaming": "mosaicml-streaming==0.13.0",
    **dict.fromkeys(["omegaconf", "datasets", "zstandard", "safetensors", "transformers", "xxhash", "psutil"], ""),
    **dict.fromkeys(["typer", "rich", "matplotlib"], ""),
    **dict.fromkeys(["hypothesis", "pytest", "pytest_timeout"], "for the tests"),
}
"""Module -> name of its package."""
OVERLAYS = {"a100-40gb-8": "A100-40GB", "a100-80gb-8": "A100-80GB", "h100-8": "H100-80GB", "h200-8": "H200"}
"""Overlay for CUDA -> row of the hardware table."""
MEASURED = {("h100-8", "mpt-125m", 1): 0.432, ("h100-8", "mpt-1b", 1): 0.559}
"""(overlay, model, devices) -> MFU, compiled: `benchmarks/results/h100/cases.jsonl`."""
RESERVE_SECONDS = 8
"""Seconds reserved to end late steps and to write the findings."""
MANY_CORES = 8
NUM_AT_ONCE = 2
"""Number of steps that run at once. With enough cores, all do."""
MARK = "GPU_CHECK_STEP"
"""Variable by which the processes of a step are found."""

FACTS = """
import json, torch
from llmfoundry_lite import devices
from llmfoundry_machines.bench.frame import describe_machine
row = devices.accelerator()
print(json.dumps({
    "device": devices.device_name(), "num_devices": torch.cuda.device_count(), "vendor": devices.vendor(),
    "row": row and row.name, "driver": devices.driver(), "runtime": devices.runtime(), "torch": torch.__version__,
    "machine": describe_machine(),
}))
"""


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
    """Return the environment in which programs find this clone first, and `composer` where it is installed."""
    paths = [str(ROOT), str(ROOT / "companions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    programs = [f"{path}/bin" for path in paths] + [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    fixed = {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    # Bytecode is kept, because importing a step's packages without it takes 20 seconds of a core.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | fixed | {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(programs)}


def last_line(text: str) -> str:
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "no output")


def find_missing() -> list[str]:
    """Return the modules, with their packages, that must be installed before a part can run. Imports nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return [f"{name} ({NEEDED[name]})" if NEEDED[name] else name for name in missing]


def find_commit(given: str | None) -> str | None:
    """Return the commit, with a + if tracked files were changed; None for a copy without git that nobody named."""
    if given or shutil.which("git") is None:
        return given
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    status = [*git, "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(status, capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")


def predict(shape: str, row_name: str | None, step: str) -> float | None:
    """Return the MFU that `plan` predicts for one of our models, on one device of the hardware table."""
    if row_name is None or shape not in ("125m", "350m", "1b", "3b", "7b"):
        return None
    compiled = ["compile_config={}"] if step.endswith(", compiled") else []
    return predict_step(f"mpt-{shape}", row_name, 1, *compiled)[0]


def predict_step(
    model: str, row_name: str, num_devices: int, *overlays: str, published: bool = False
) -> tuple[float, dict[str, float]]:
    """Return the MFU of a step with two microbatches of 8 samples on each device, and each part's share of the step.

    `published`: by the rates of 2023's software.
    """
    from llmfoundry_lite.config.layout import layout_of
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_planner.plan.step import find_hardware, step_time

    sizes = ["device_train_microbatch_size=8", f"global_train_batch_size={16 * num_devices}"]
    config = load_train_config([model, *overlays, *sizes, "max_seq_len=2048", "precision=amp_bf16"], {}).config
    device, layout = ACCELERATORS[row_name], layout_of(config, num_devices, num_devices)
    step = step_time(config, layout, find_hardware(device, published=published))
    return step.mfu(config, layout, device), step.parts()


def list_predictions() -> list[str]:
    """Return the page of predictions, with measurements made since."""
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_planner.plan.step import find_hardware

    lines = [
        "# MFU, predicted and measured",
        "",
        "Printed by `python scripts/gpu_check.py predict`. Two microbatches of 8 x 2,048 tokens on each device, bf16,",
        "compiled. The step's parts and rates are those of [`plan`](../plan.md): products and attention at the shares",
        "of the peak that stand in the row, all else at 85 % of the memory's bandwidth. `of 2023` was predicted before",
        "any GPU was measured, not compiled, by rates that were fitted to LLM Foundry's throughput of 2023. Rates of",
        "the H100 are now fitted to [what one measured](h100.md), with 16 and 64 samples a step: its two rows of one",
        "device prove little. The H200 takes the H100's; an A100 has no other rates than those of 2023, and what it",
        "gains by compiling is the H100's, too: a prediction that nothing has tried.",
        "",
        "| overlay | model | devices | products, attention at | MFU of 2023 | MFU predicted | measured | parts |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for overlay, row_name in OVERLAYS.items():
        efficiency = find_hardware(ACCELERATORS[row_name]).efficiency
        for model in ("mpt-125m", "mpt-1b"):
            for num_devices in (1, 8):
                before, _ = predict_step(model, row_name, num_devices, overlay, "compile_config=null", published=True)
                mfu, parts = predict_step(model, row_name, num_devices, overlay, "compile_config={}")
                words = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
                rates = f"{efficiency.products:.0%}, {efficiency.attention:.0%}"
                measured = MEASURED.get((overlay, model, num_devices))
                cells = [overlay, model, str(num_devices), rates, f"{before:.1%}", f"{mfu:.1%}"]
                lines.append(f"| {' | '.join([*cells, f'{measured:.1%}' if measured else '', words])} |")
    return lines


def tell_verified(paths: Sequence[Path]) -> int:
    """Print the table of proofs. Returns 0, or 2 with a line on stderr if a file is no proof."""
    from llmfoundry_lite.errors import ConfigError, printable
    from scripts.gpu_proofs import describe_proofs

    try:
        lines = describe_proofs(paths)
    except ConfigError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    print(*lines, sep="\n")
    return 0


def minutes(text: str) -> float:
    """Parse a number of minutes. Raises ValueError, which argparse reports."""
    if not 0 < (number := float(text)) < math.inf:
        raise ValueError
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part. Returns 0, or 1 if it found problems, or 2 if something that it needs is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ready", "predict", "verified", "device", "runs"])
    parser.add_argument("files", nargs="*", type=Path, help="proofs, for `verified`")
    parser.add_argument("--minutes", type=minutes, default=4, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="[%(default)s]")
    parser.add_argument("--commit", help="of a copy without git")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(ROOT), str(ROOT / "companions")]
    if bool(options.files) != (options.part == "verified"):
        parser.error("`verified` and the files that the parts have written belong together; give both")
    if options.part == "verified":
        return tell_verified(options.files)
    if options.part == "predict":
        print(*list_predictions(), sep="\n")
        return 0
    if missing := find_missing():
        print(f"missing: {', '.join(missing)}; docs/hardware.md says how to bring them where there is no index")
        return 2
    if options.part == "ready":
        return 0
    part = Part(options.part, options.minutes, options.out.resolve())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, part.end)
    if options.part == "runs":  # imports while the facts are collected
        threading.Thread(target=importlib.import_module, args=("tests.helpers.tiny",), daemon=True).start()
    facts = part.run("facts", ["-c", FACTS])
    if facts.returncode == 0:
        part.proof |= json.loads(facts.stdout.splitlines()[-1])
        part.proof |= {"commit": find_commit(options.commit), "python": platform.python_version()}
        part.proof |= {"date": datetime.date.today().isoformat(), "load_average": round(os.getloadavg()[0], 1)}
        if tuple(map(int, re.findall(r"\d+", part.proof["torch"])[:2])) < (2, 11):
            print(f"torch {part.proof['torch']} is older than 2.11, which training needs")
            return 2
        from scripts import gpu_steps

        gpu_steps.PARTS[options.part](part)
    part.note()
    part.tell(f"written: {part.path}")
    problems = part.proof["problems"]
    for line in [f"left out: {text}" for text in part.proof["left_out"]] + [f"problem: {text}" for text in problems]:
        print(line)
    load = f"load average {part.proof.get('load_average')} before it, {os.getloadavg()[0]:.1f} after"
    print(f"{options.part}: {part.proof['seconds']} s, {len(problems) or 'no'} problems; {load}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
