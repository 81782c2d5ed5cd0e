"""Check what only a GPU can show, in two parts that each end within 4 minutes and leave a proof.

    python scripts/gpu_check.py device   the tests marked gpu; memory beside the rehearsal; MFU of MPT-1B and MPT-125M
    python scripts/gpu_check.py runs     20 batches, bit for bit; a run that switches between CPU and GPU; a save and a
                                         restore of MPT-1B, with its energy; evaluation beside lm_eval

It uses the interpreter that runs it, with its torch (2.11 or newer), and needs no package index. `ready` lists missing
packages. Each part writes OUT/PART.json after each of its steps; `verified FILE…` prints the table of such files
(`gpu_proofs.py`). Steps (`gpu_steps.py`) are in order of importance, and run at once where there are cores for it
(`gpu_part.py`). Steps without time left are named. Without a GPU a part does what a CPU can: other tests of the same
files, and smaller models.
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {
    "torch": "2.11 or newer; the machine's own",
    "composer": "mosaicml==0.32.1",
    "streaming": "mosaicml-streaming==0.13.0",
    **dict.fromkeys(["omegaconf", "datasets", "zstandard", "safetensors", "transformers", "xxhash", "psutil"], ""),
    **dict.fromkeys(["typer", "rich", "matplotlib"], ""),
    **dict.fromkeys(["hypothesis", "pytest", "pytest_timeout"], "for the tests"),
}
"""Modules that a part imports -> the package, if it has another name, or a remark. Empty if there is neither."""
# A program of its own, so that torch is imported by a process that can be ended.
FACTS = """
import json, torch
from llmfoundry_lite import devices
from llmfoundry_machines.bench.frame import describe_machine
row = devices.accelerator()
print(json.dumps({
    "device": devices.device_name(), "num_devices": torch.cuda.device_count(), "vendor": devices.vendor(),
    "row": row and row.name, "driver": devices.driver_release(), "runtime": devices.runtime_release(),
    "torch": torch.__version__, "machine": describe_machine(),
}))
"""


def find_missing() -> list[str]:
    """Return the modules of NEEDED that are not installed, with their packages. Does not import any of them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return [f"{name} ({NEEDED[name]})" if NEEDED[name] else name for name in missing]


def find_commit(given_commit: str | None) -> str | None:
    """Return the commit of this clone, with a + if tracked files have changes.

    `given_commit` is what the user gave for a copy without git, and is returned unchanged. Returns None if it is not
    given, and this is such a copy or git is not installed.
    """
    if given_commit or shutil.which("git") is None:
        return given_commit
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    status = [*git, "status", "--porcelain", "--untracked-files=no"]
    changes = subprocess.run(status, capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+" if changes else "")


def tell_verified(paths: Sequence[Path]) -> int:
    """Print the table of proofs. Returns the exit code: 0, or 2 with a line on stderr if a file is not a proof."""
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
    """Parse a positive number of minutes. Raises ValueError, which argparse reports with the name of this function."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code: 0, or 1 if a part found problems, or 2 if something is missing for it.

    `arguments` are those of the command line by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ready", "predict", "verified", "device", "runs"])
    parser.add_argument("files", nargs="*", type=Path, help="proofs, for `verified`")
    parser.add_argument("--minutes", type=minutes, default=4, help="[%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="[%(default)s]")
    parser.add_argument("--commit", help="of a copy without git")
    options = parser.parse_args(arguments)

    # This clone's packages come before installed ones. They can only be imported from here on.
    sys.path[:0] = [str(ROOT), str(ROOT / "companions")]
    from llmfoundry_lite.ranks.output import prepare_output

    prepare_output()
    if bool(options.files) != (options.part == "verified"):
        parser.error("`verified` and the files that the parts have written belong together; give both")
    if options.part == "verified":
        return tell_verified(options.files)
    if options.part == "predict":
        from scripts.gpu_predictions import list_predictions

        print(*list_predictions(), sep="\n")
        return 0

    # The other commands need the packages.
    missing = find_missing()
    if missing:
        print(f"missing: {', '.join(missing)}; docs/hardware.md says how to bring them where there is no index")
        return 2
    if options.part == "ready":
        return 0
    return run_part(options.part, options.minutes, options.out.resolve(), options.commit)


def run_part(name: str, minutes: float, out: Path, given_commit: str | None) -> int:
    """Run one part: collect the facts of this machine, run the part's steps, write the proof, and print what is wrong.

    Returns the exit code, as `main` does. Changes how this process handles SIGINT and SIGTERM: they end the part's
    programs, and the proof is still written.
    """
    from scripts.gpu_part import Part

    part = Part(name, minutes, out)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, part.end)

    if name == "runs":
        # Its steps need this import, which takes seconds. It runs while the facts are collected.
        threading.Thread(target=importlib.import_module, args=("tests.helpers.tiny",), daemon=True).start()
    facts = part.run("facts", ["-c", FACTS])
    if facts.returncode == 0:
        part.proof |= json.loads(facts.stdout.splitlines()[-1])
        part.proof |= {"commit": find_commit(given_commit), "python": platform.python_version()}
        part.proof |= {"date": datetime.date.today().isoformat(), "load_average": round(os.getloadavg()[0], 1)}
        torch_release = tuple(map(int, re.findall(r"\d+", part.proof["torch"])[:2]))
        if torch_release < (2, 11):
            print(f"torch {part.proof['torch']} is older than 2.11, which training needs")
            return 2
        from scripts import gpu_steps

        gpu_steps.PARTS[name](part)

    # Without the facts the proof has the problem that `part.run` added.
    part.note()
    part.tell(f"written: {part.path}")
    problems = part.proof["problems"]
    for text in part.proof["left_out"]:
        print(f"left out: {text}")
    for text in problems:
        print(f"problem: {text}")
    load = f"load average {part.proof.get('load_average')} before it, {os.getloadavg()[0]:.1f} after"
    print(f"{name}: {part.proof['seconds']} s, {len(problems) or 'no'} problems; {load}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
