"""What commands print: helps, dry runs, plans, checkpoints, reports."""

import difflib
import json
import re
from collections.abc import Callable
from typing import Any

from tests.golden.lab import CASES, Lab, split
from tests.golden.owners import LISTED
from tests.golden.runs import need_run

SHOWN = 6


def jobs(lab: Lab) -> dict[str, Callable[[], dict[str, Any]]]:
    run_free: dict[str, Callable[[], dict[str, Any]]] = {
        "help": lambda: walk(lab, []),
        "dry-run": lambda: dry_runs(lab),
        "plan": lambda: plans(lab),
        "rehearse": lambda: {"rehearse": rehearse(lab)},
        "doctor": lambda: {"doctor/checks": doctor(lab)},
    }
    return {**run_free, "init": lambda: init(lab), "of-a-run": lambda: of_a_run(lab)}


def walk(lab: Lab, path: list[str]) -> dict[str, Any]:
    """The help of a command and of all below it."""
    said = lab.call(*path, "--help")
    found: dict[str, Any] = {f"help/{'.'.join(path) or 'top'}": str(said) if path else LISTED.sub("", str(said))}
    _, _, commands = said.out.partition("\nCommands:\n")
    for name in re.findall(r"^  ([a-z][\w-]*)  ", commands, re.M):
        found.update(walk(lab, [*path, name]))
    return found


def dry_runs(lab: Lab) -> dict[str, Any]:
    """Every YAML alone; with an overlay, the lines that it changes."""
    found: dict[str, Any] = {}
    for path in sorted((lab.repo / "yamls/pretrain").glob("*.yaml")):
        name = path.stem
        alone = LISTED.sub("", str(lab.call("train", name, "--dry-run=full")))
        found[f"dry-run/{name}"] = alone if name == "mpt-125m" else difference(found["dry-run/mpt-125m"], alone)
        if overlay := CASES["overlays"].get(name):
            laid_over = LISTED.sub("", str(lab.call("train", name, *split(overlay), "--dry-run=full")))
            found[f"dry-run/{name} {overlay}"] = difference(alone, laid_over)
    return found


def difference(before: str, after: str) -> str:
    if not after.startswith("exit code 0"):
        return after
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@"))) + "\n"


def plans(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, line in CASES["plans"].items():
        arguments = split(line)
        found[f"plan/{name}"] = str(lab.call("plan", *arguments))
        if name not in ("join", "several"):
            found[f"plan/{name}/json"] = compact(lab.call("plan", *arguments, "--json").out)
    found["plan/write"] = str(lab.call("plan", *split(CASES["plans"]["7b"]), "--write", "layout.yaml"))
    found["plan/layout.yaml"] = lab.plain((lab.folder / "layout.yaml").read_text())
    for name, line in CASES["fabrics"].items():
        found[f"fabric/{name}"] = str(lab.call("fabric", *split(line)))
    return found


def compact(text: str) -> list[str]:
    """A line for each entry: of the long lists of layouts the first, and how many there are."""
    lines = []
    for key, value in json.loads(text).items():
        rows = value if isinstance(value, list) else [value]
        lines += [f"{key}: {json.dumps(row)}" for row in rows[:SHOWN]]
        lines += [f"{key}: {len(rows)} in all"] if len(rows) > SHOWN else []
    return lines


def rehearse(lab: Lab) -> str:
    """Sizes, FLOPs and collectives; not the lines of the code that hold memory, which a move changes."""
    said = str(lab.call("rehearse", "mpt-125m", "h100-8", "--devices", 8, "global_train_batch_size=32"))
    passing = ("held by", "the peak is at", "host waits")
    return "\n".join(line for line in said.splitlines() if not line.strip().startswith(passing)) + "\n"


def doctor(lab: Lab) -> list[str]:
    lab.call("doctor", "--quick", "--json", "doctor.json")
    return [finding["check"] for finding in json.loads((lab.folder / "doctor.json").read_text())["findings"]]


def init(lab: Lab) -> dict[str, Any]:
    lab.need_data()
    found: dict[str, Any] = {}
    for size in ("quickstart", "125m"):
        found[f"init/{size}"] = str(lab.call("init", "data", "--size", size, "--out", f"new-{size}.yaml"))
        found[f"init/{size}.yaml"] = lab.plain((lab.folder / f"new-{size}.yaml").read_text())
    found["init/dry-run"] = str(lab.call("train", "new-quickstart.yaml", "--dry-run"))
    return found


def of_a_run(lab: Lab) -> dict[str, Any]:
    need_run(lab, "fp32")
    found: dict[str, Any] = {}
    for name, line in CASES["checkpoint"].items():
        found[f"checkpoint/{name}"] = without_clock(str(lab.call("checkpoint", name, *split(line))))
    exported = lab.folder / "exported"
    found["checkpoint/export/files"] = sorted(path.name for path in exported.iterdir())
    found["checkpoint/export/config.json"] = lab.plain((exported / "config.json").read_text())
    found["checkpoint/ls-imported"] = str(lab.call("checkpoint", "ls", "imported"))
    lab.copy("runs/fp32", "runs/told")
    found["report"] = without_speed(str(lab.call("report", "runs/told")))
    found["report/report.md"] = without_speed(lab.plain((lab.folder / "runs/told/report.md").read_text()))
    facts = json.loads((lab.folder / "runs/told/report.json").read_text())
    found["report/keys"] = sorted(set(keys_of(facts)))
    found["status.json"] = (lab.folder / "runs/told/status.json").read_text()
    found["config.yaml"] = LISTED.sub("", lab.plain((lab.folder / "runs/told/config.yaml").read_text()))
    return found


def without_clock(text: str) -> str:
    text = re.sub(r"(\S*_wct) .*", r"\1 …", text)
    return squeeze(re.sub(r"(fp32 DEFAULT) +[\d,]+", r"\1 N", text))


def without_speed(text: str) -> str:
    text = re.sub(r"[\d,]+( \|)?( +)(\S+)( \|)? +TIME", r"N\1 \3\4 TIME", text)
    return squeeze(text)


def squeeze(text: str) -> str:
    """The same with columns of no width: a rate has more digits today than tomorrow."""
    return re.sub(r" {2,}", "  ", re.sub(r"─+", "─", re.sub(r"-{3,}", "---", text)))


def keys_of(facts: Any, path: str = "") -> list[str]:
    if isinstance(facts, dict):
        return [key for name, value in facts.items() for key in keys_of(value, f"{path}.{name}")]
    if isinstance(facts, list):
        return [key for value in facts for key in keys_of(value, f"{path}[]")]
    return [path]
