"""Check what only a GPU can show, in parts that each end within 8 minutes and leave a proof.

    python scripts/gpu_check.py tests        the tests marked gpu, but for the switches between machines
    python scripts/gpu_check.py speed        memory beside the rehearsal; MFU of MPT-1B and MPT-125M
    python scripts/gpu_check.py switch       one run that switches between CPU and GPU; 20 batches, bit for bit

It runs with the interpreter that runs it: its own torch (2.11 or newer), and no package index. `ready` says what is
missing. Each part writes OUT/PART.json, after each of its steps; `llmfoundry-lite doctor --verified FILE…` draws the
table of such files. Without a GPU a part does what a CPU can: other tests of the same files, and a smaller model's MFU.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
"""Module -> its package, where it has another name."""
SWITCHES = "switches_between"
OVERLAYS = {"a100-40gb-8": "A100-40GB", "a100-80gb-8": "A100-80GB", "h100-8": "H100-80GB", "h200-8": "H200"}
"""CUDA's overlays -> their rows of the hardware table."""
MEASURED = {("h100-8", "mpt-125m", 1): 0.432, ("h100-8", "mpt-1b", 1): 0.559}
"""(overlay, model, devices) -> MFU, compiled: `benchmarks/results/h100/cases.jsonl`."""
NUM_EXACT = 20
"""Batches of the run whose digests and losses are kept."""
RESERVE_SECONDS = 25
"""For writing what was found, and for starting Python."""

FACTS = """
import json, torch
from llmfoundry_lite import devices
from llmfoundry_lite.bench.frame import describe_machine
row = devices.accelerator()
print(json.dumps({
    "device": devices.device_name(), "num_devices": torch.cuda.device_count(), "vendor": devices.vendor(),
    "row": row and row.name, "driver": devices.driver(), "runtime": devices.runtime(), "torch": torch.__version__,
    "machine": describe_machine(),
}))
"""


class Part:
    """A part's time, its folder, and its proof."""

    def __init__(self, name: str, minutes: float, out: Path):
        self.deadline, self.out = time.monotonic() + 60 * minutes, out
        self.began = time.monotonic()
        self.path = out / f"{name}.json"
        self.proof: dict[str, Any] = {"format": 1, "part": name, "minutes": minutes, "problems": [], "left_out": []}
        out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def tell(self, text: str) -> None:
        minutes, seconds = divmod(max(0, int(self.left())), 60)
        print(f"[{minutes}:{seconds:02} left] {text}", flush=True)

    def run(
        self, name: str, arguments: Sequence[str], limit_seconds: float | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in the clone's root and show its output. What is too late is ended, with all that it started.

        Failures become problems of the proof. The log is OUT/NAME.log.
        """
        limit = min(limit_seconds or 1e9, self.left() - RESERVE_SECONDS / 2)
        command = [sys.executable, "-u", *arguments]
        self.tell(f"{name}: {' '.join(['python', *arguments])[:150]}")
        if limit <= 0:
            self.proof["problems"].append(f"{name}: no time for it")
            return subprocess.CompletedProcess(command, 1, "", "")
        log = self.out / f"{name.replace(' ', '-')}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=with_root() | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = self._wait(process, log, limit)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        if code is None:
            self.proof["problems"].append(f"{name}: ended after {limit:.0f} s, when the time was up")
        elif code:
            self.proof["problems"].append(f"{name}: exit code {code}: {last_line(text)}")
        self.save()
        return subprocess.CompletedProcess(command, 1 if code is None else code, text, "")

    def _wait(self, process: subprocess.Popen, log: Path, limit: float) -> int | None:
        """Show the log as it grows, until the end or the limit. Returns the exit code; None if there was none."""
        end, shown = time.monotonic() + limit, 0
        while True:
            code = process.poll()
            text = log.read_bytes()
            sys.stdout.buffer.write(text[shown:])
            sys.stdout.buffer.flush()
            shown = len(text)
            if code is not None or time.monotonic() > end:
                return code
            time.sleep(0.5)

    def save(self) -> None:
        self.proof["seconds"] = round(time.monotonic() - self.began, 1)
        self.path.write_text(json.dumps(self.proof, indent=1) + "\n")


def with_root() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    return os.environ | fixed | {"PYTHONPATH": os.pathsep.join(paths)}


def last_line(text: str) -> str:
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "no output")


def find_missing() -> list[str]:
    """Return what has to be brought before a part can run: modules, with their packages. Imports nothing."""
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


# ------------------------------------------------------------------------------------------------------- the parts


def check_tests(part: Part) -> None:
    run_tests(part, f"not {SWITCHES}")


def check_switch(part: Part) -> None:
    check_exact(part)
    if part.proof["vendor"] == "cpu":
        part.proof["left_out"].append("switching between machines: there is one kind")
        return
    run_tests(part, SWITCHES)


def run_tests(part: Part, expression: str) -> None:
    """Run the tests of the files that have tests of a GPU; without a GPU those that need none."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: (path.name != "test_gpu.py", path))
        if "pytest.mark.gpu" in path.read_text()
    ]
    marked = "gpu" if part.proof["vendor"] != "cpu" else "not gpu and not slow and not long"
    outcomes = part.out / f"{part.proof['part']}-outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    arguments = ["-m", "pytest", "-q", "-p", "tests.helpers.outcomes", "-p", "no:cacheprovider", "--durations=8"]
    num_workers = min(4, len(os.sched_getaffinity(0)) // 4)
    if num_workers > 1 and importlib.util.find_spec("xdist"):  # most of a test is starting processes
        arguments += ["-n", str(num_workers)]
    try:
        part.run("pytest", [*arguments, "-m", marked, "-k", expression, *files], OUTCOMES=str(outcomes.resolve()))
    finally:
        part.proof["tests"] = read_outcomes(outcomes)
        part.save()
    if not part.proof["tests"]:
        part.proof["problems"].append("pytest: no test has run")


def read_outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the outcome of every test that was collected: what did not end in time has `no time`."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        record = json.loads(line)
        if "collected" in record:
            found = {name: {"outcome": "no time"} for name in record["collected"]}
        else:
            found[record.pop("test")] = record
    return found


def check_speed(part: Part) -> None:
    """Measure MFU, then memory with what time is left."""
    is_cpu = part.proof["vendor"] == "cpu"
    shapes, more = ("10m", ["--seq-len", "512", "--batch-size", "8"]) if is_cpu else ("1b,125m", [])
    if is_cpu or is_large(part.proof["row"]):  # to find out a size takes minutes, compiled
        more = [*more, "device_train_microbatch_size=8"]
    minutes = max(0.5, (part.left() - (150 if is_cpu else 200)) / 60)
    command = ["-m", "llmfoundry_lite", "bench", "mfu", "--shapes", shapes, "--minutes", f"{minutes:.2f}", *more]
    reports = part.out / "bench"
    part.run("mfu", [*command, "--out", str(reports)])
    part.proof["mfu"] = list_mfu(reports / "mfu.json", part.proof["row"])
    part.save()
    for row in part.proof["mfu"]:
        print(describe_mfu(row), flush=True)
    if part.proof["row"] is None:
        part.proof["left_out"].append("memory beside the rehearsal: no GPU of the hardware table")
        return
    # A model takes less than a minute and a half, so that the last one to begin ends in time.
    minutes = max(0.1, (part.left() - 100) / 60)
    command = ["-m", "llmfoundry_lite", "bench", "memory", "--models", "mpt-1b,mpt-125m"]
    part.run("memory", [*command, "--minutes", f"{minutes:.2f}", "--out", str(reports)])
    part.proof["memory"] = list_memory(reports / "memory.json")


def is_large(row_name: str | None) -> bool:
    """Return whether MPT-1B trains 8 samples at a time on one such device."""
    from llmfoundry_lite.hardware import ACCELERATORS, GIB

    return row_name is not None and ACCELERATORS[row_name].memory_bytes >= 80 * GIB


def list_mfu(path: Path, row_name: str | None) -> list[dict[str, Any]]:
    """Return each step with its shares of the products' rate and of the datasheet's, and the share predicted."""
    if not path.is_file():
        return []
    report = json.loads(path.read_text())
    products = {row["shape"]: row.get("flops_per_sec") for row in report["rows"] if row["step"] == "matrix products"}
    found = []
    for row in report["rows"]:
        rate = row.get("flops_per_sec")
        found.append(
            {
                **{key: row.get(key) for key in ("shape", "step", "microbatch_size", "flops_per_sec", "error")},
                "share_of_products": rate / products[row["shape"]] if rate and products.get(row["shape"]) else None,
                "share_of_peak": rate / report["peak_flops"] if rate and report["peak_flops"] else None,
                "predicted_share_of_peak": predict(row["shape"], row_name, row["step"]),
            }
        )
    return found


def predict(shape: str, row_name: str | None, step: str) -> float | None:
    """Return the MFU that `plan` predicts of a model that ships, on one device of the hardware table."""
    if row_name is None or shape not in ("125m", "350m", "1b", "3b", "7b"):
        return None
    compiled = ["compile_config={}"] if step.endswith(", compiled") else []
    return predict_step(f"mpt-{shape}", row_name, 1, *compiled)[0]


def predict_step(
    model: str, row_name: str, num_devices: int, *overlays: str, published: bool = False
) -> tuple[float, dict[str, float]]:
    """Return the MFU of a step with two microbatches of 8 samples on each device, and the step's parts by share.

    `published`: by the rates of 2023's software.
    """
    from llmfoundry_lite.config.layout import layout_of
    from llmfoundry_lite.config.load_train import load_train_config
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_lite.plan.step import find_hardware, step_time

    sizes = ["device_train_microbatch_size=8", f"global_train_batch_size={16 * num_devices}"]
    config = load_train_config([model, *overlays, *sizes, "max_seq_len=2048", "precision=amp_bf16"], {}).config
    device, layout = ACCELERATORS[row_name], layout_of(config, num_devices, num_devices)
    step = step_time(config, layout, find_hardware(device, published=published))
    return step.mfu(config, layout, device), step.parts()


def list_predictions() -> list[str]:
    """Return the page of predictions, and of what was measured since."""
    from llmfoundry_lite.hardware import ACCELERATORS
    from llmfoundry_lite.plan.step import find_hardware

    lines = [
        "# MFU, predicted and measured",
        "",
        "Printed by `python scripts/gpu_check.py predict`. Two microbatches of 8 x 2,048 tokens on each device, bf16,",
        "compiled. The step's parts and rates are those of [`plan`](../plan.md): products and attention at the shares",
        "of the peak that stand in the row, all else at 85 % of the memory's bandwidth. `of 2023` was predicted before",
        "any GPU was measured, not compiled, by rates that were fitted to LLM Foundry's throughput of 2023. Rates of",
        "the H100 are now fitted to [what one measured](h100.md), with 16 and 64 samples a step: its two rows of one",
        "device prove little. The H200 takes the H100's; an A100 has no other rates than those of 2023.",
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


def describe_mfu(row: dict[str, Any]) -> str:
    if row["error"] or row["flops_per_sec"] is None:
        return f"{row['shape']}, {row['step']}: {row['error']}"
    text = f"{row['shape']}, {row['step']}: {row['flops_per_sec'] / 1e12:.2f} TFLOP/s"
    names = {"share_of_products": "of its products", "share_of_peak": "of the datasheet"}
    text += "".join(f", {row[key]:.1%} {words}" for key, words in names.items() if row[key] is not None)
    predicted = row["predicted_share_of_peak"]
    return text + (f"; predicted {predicted:.1%}" if predicted is not None and row["step"] != "matrix products" else "")


def list_memory(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [
        {
            **{key: row[key] for key in ("model", "microbatch_size", "estimated_bytes", "error")},
            **{f"{side}_bytes": row[side].get("allocated_bytes") for side in ("real", "rehearsed")},
        }
        for row in json.loads(path.read_text())["rows"]
    ]


def check_exact(part: Part) -> None:
    """Train 20 batches with exact sums: whole, stopped and carried on, and on two ranks where there is room."""
    from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

    folder = (part.out / "exact").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    more = {"max_duration": f"{NUM_EXACT}ba", "exact_sums": True, "autoresume": True, "device_train_microbatch_size": 1}
    more["log_to_console"] = False
    config = tiny_config(write_data(folder / "data"), **more)
    path = write_config(folder / "run.yaml", config)
    script = str(ROOT / "scripts/train.py")
    on_two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    launches = {"whole": [[script]], "carried on": [[script, path, "stop_after=10ba"], [script]]}
    if part.proof["vendor"] == "cpu" or part.proof["num_devices"] > 1:
        launches["on two ranks"] = [on_two]
    found = {}
    for name, commands in launches.items():
        run_folder = folder / name.replace(" ", "-")
        for command in commands:
            arguments = [*command, *([] if path in command else [path]), f"run_folder={run_folder}"]
            part.run(f"exact {name}", arguments, OMP_NUM_THREADS="1")
        if (run_folder / "metrics.jsonl").is_file():
            records = read_metrics(run_folder)
            losses = [loss.hex() for loss in values(records, "loss/train/total")]
            found[name] = {"digests": values(records, "data/digest"), "losses": losses}
    part.proof["exact"] = found
    for name, one in found.items():
        for key in ("digests", "losses"):
            if one[key] != found.get("whole", {}).get(key) or len(one[key]) != NUM_EXACT:
                part.proof["problems"].append(f"exact sums: {name} has other {key} than the run that never stopped")
    part.save()


PARTS: dict[str, Callable[[Part], None]] = {"tests": check_tests, "speed": check_speed, "switch": check_switch}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part. Returns 0, 1 where it found problems, or 2 where something that it needs is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ready", "predict", *PARTS])
    parser.add_argument("--minutes", type=float, default=8, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="[%(default)s]")
    parser.add_argument("--commit", help="of a copy without git")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    if options.part == "predict":
        print(*list_predictions(), sep="\n")
        return 0
    if missing := find_missing():
        print(f"missing: {', '.join(missing)}; docs/hardware.md says how to bring them where there is no index")
        return 2
    if options.part == "ready":
        return 0
    part = Part(options.part, options.minutes, options.out.resolve())
    facts = part.run("facts", ["-c", FACTS])
    if facts.returncode:
        return 1
    part.proof |= json.loads(facts.stdout.splitlines()[-1])
    part.proof |= {"commit": find_commit(options.commit), "python": platform.python_version()}
    part.proof["date"] = datetime.date.today().isoformat()
    if tuple(map(int, re.findall(r"\d+", part.proof["torch"])[:2])) < (2, 11):
        print(f"torch {part.proof['torch']} is older than 2.11, which training needs")
        return 2
    try:
        PARTS[options.part](part)
    finally:
        part.save()
        part.tell(f"written: {part.path}")
    print("\n".join(f"problem: {problem}" for problem in part.proof["problems"]) or "no problems", flush=True)
    return 1 if part.proof["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
