"""The golden record: what the product does, before and after a change that shall change nothing.

    python -m tests.golden record OUT.json [--only PART ...] [--repo DIR]
    python -m tests.golden compare BEFORE.json AFTER.json
    python -m tests.golden moved REV [REV2] [--code-only]

Parts: commands, errors, data, runs, eval, costs; of a part one job, as in `--only runs/bf16`. `core` or a companion's
name takes its keys alone. Without --only, those of the core and of every companion in DIR are recorded.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.golden import commands, costs, data, errors, evaluation, runs
from tests.golden.compare import compare, describe
from tests.golden.lab import Lab
from tests.golden.moved import list_moved
from tests.golden.owners import OWNERS, owner_of, owners_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"commands": commands, "errors": errors, "data": data, "runs": runs, "eval": evaluation, "costs": costs}


def record(repo: Path, only: Sequence[str] = (), jobs_at_once: int = 2) -> dict[str, Any]:
    """Run everything that `only` selects, or all."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="golden-", ignore_cleanup_errors=True) as folder:
        lab = Lab(repo, Path(folder))
        here = [owner for owner in OWNERS if lab.has(owner)]
        if unknown := [name for name in only if name.partition("/")[0] not in (*PARTS, *here)]:
            raise SystemExit(
                f"{', '.join(unknown)}: expected one of {', '.join((*PARTS, *here))}, or such as runs/bf16"
            )
        owners, asked = [owner for owner in here if owner in only] or here, {*only} - {*here}
        for part, module in PARTS.items():
            jobs = {
                f"{part}/{name}": job
                for name, job in module.jobs(lab).items()
                if (not asked or asked & {part, f"{part}/{name}"}) and owners_of(f"{part}/{name}") & {*owners}
            }
            with ThreadPoolExecutor(1 if part == "costs" else jobs_at_once) as pool:
                for name, results in zip(jobs, pool.map(run_job, jobs, jobs.values()), strict=True):
                    found[name] = {key: results[key] for key in results if owner_of(f"{part}/{key}") in owners}
    return {"machine": machine(), "owners": owners, "jobs": dict(sorted(found.items()))}


def run_job(name: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A job that breaks is recorded as broken: the others go on."""
    begun = time.monotonic()
    try:
        found = job()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        found = {"broken": f"{type(error).__name__}: {error}"}
        print(f"{name}: broken: {error}", file=sys.stderr)
    print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return found


def machine() -> dict[str, str]:
    """Describe everything here that decides the last bits of a sum."""
    import torch

    return {
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
    }


def write(recorded: dict[str, Any], path: Path) -> None:
    """A line for each key, so that a diff of two records can be read."""
    texts = []
    for job, results in recorded["jobs"].items():
        lines = [
            f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(results.items())
        ]
        texts.append(f"{json.dumps(job)}: {{\n" + ",\n".join(lines) + "\n}")
    body = ",\n".join(texts)
    head = json.dumps({key: value for key, value in recorded.items() if key != "jobs"})
    path.write_text(f'{head[:-1]}, "jobs": {{\n{body}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(dest="action", required=True)
    recording = actions.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="PART")
    recording.add_argument("--repo", type=Path, default=ROOT)
    recording.add_argument("--jobs", type=int, default=2, help="commands at once")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    moving = actions.add_parser("moved")
    moving.add_argument("before", metavar="REV")
    moving.add_argument("after", metavar="REV2", nargs="?", help="default: the files as they lie there")
    moving.add_argument("--code-only", action="store_true", help="docstrings may differ")
    moving.add_argument("--repo", type=Path, default=ROOT)
    given = parser.parse_args()
    if given.action == "record":
        write(record(given.repo, given.only, given.jobs), given.out)
    elif given.action == "compare":
        found = compare(json.loads(given.before.read_text()), json.loads(given.after.read_text()))
        print(describe(found))
        sys.exit(1 if found.different else 0)
    else:
        lines = list_moved(given.repo, given.before, given.after, code_only=given.code_only)
        print("\n".join([*lines, f"{len(lines)} functions differ"]))
        sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
