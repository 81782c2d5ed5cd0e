"""Two records side by side: what differs, and what differs on purpose."""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.golden.intended import INTENDED
from tests.golden.owners import OWNERS, owner_of

NUMBER = re.compile(r"[-+]?0x[01]\.[0-9a-f]+p[-+]\d+|[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
MACHINE_BOUND = ("runs/*/tensors", "eval/*/digest", "data/make-tasks/*", "commands/checkpoint/diff", "eval/*table*")
"""Nothing to compare on another machine."""
FLOATING = ("runs/*", "eval/*", "commands/report*")
"""On another machine, numbers agree to TOLERANCE."""
TOLERANCE = 1e-4
WORSE = 1.25
CONTEXT = 2


@dataclass
class Comparison:
    """Keys that differ, each with lines that show it."""

    different: dict[str, list[str]] = field(default_factory=dict)
    intended: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def compare(before: dict[str, Any], after: dict[str, Any]) -> Comparison:
    """Compare the jobs that both records have, by the keys of owners whose keys both have."""
    found = Comparison()
    same_machine = before["machine"] == after["machine"]
    if not same_machine:
        found.warnings.append(
            f"recorded on {before['machine']} and {after['machine']}: numbers compared to {TOLERANCE}"
        )
    for key, ours, theirs in pairs(before["jobs"], after["jobs"]):
        if not all(owner_of(key) in record.get("owners", OWNERS) for record in (before, after)):
            continue
        if key.startswith("costs/"):
            found.warnings += worse(key, ours or {}, theirs or {})
        elif ours == theirs or (not same_machine and same_elsewhere(key, ours, theirs)):
            continue
        elif reason := next((why for pattern, why in INTENDED.items() if fnmatch.fnmatchcase(key, pattern)), None):
            found.intended[key] = (reason, show(ours, theirs))
        else:
            found.different[key] = show(ours, theirs)
    return found


def pairs(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, what it is before, and after; None where it is not."""
    for job in sorted(before.keys() & after.keys()):
        for key in sorted({*before[job], *after[job]}):
            yield f"{job.partition('/')[0]}/{key}", before[job].get(key), after[job].get(key)


def worse(key: str, before: dict[str, float], after: dict[str, float]) -> list[str]:
    grown = [name for name in before.keys() & after.keys() if after[name] > WORSE * before[name]]
    return [f"{key}: {name} {before[name]} -> {after[name]}" for name in sorted(grown)]


def same_elsewhere(key: str, ours: Any, theirs: Any) -> bool:
    if any(fnmatch.fnmatchcase(key, pattern) for pattern in MACHINE_BOUND):
        return (ours is None) == (theirs is None)
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in FLOATING) and is_near(ours, theirs)


def is_near(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(is_near, ours, theirs))
    if isinstance(ours, str) and isinstance(theirs, str):
        numbers = zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=False)
        return NUMBER.sub("N", ours) == NUMBER.sub("N", theirs) and all(
            math.isclose(value_of(a), value_of(b), rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in numbers
        )
    return ours == theirs


def value_of(text: str) -> float:
    return float.fromhex(text) if "0x" in text else float(text)


def show(ours: Any, theirs: Any) -> list[str]:
    """A unified diff of texts and lists, entry by entry of dictionaries."""
    if ours is None or theirs is None:
        return ["only before" if theirs is None else "only after"]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        return [f"{key}: {ours.get(key)} -> {theirs.get(key)}" for key in keys]
    a, b = (
        [str(line) for line in (value if isinstance(value, list) else str(value).splitlines())]
        for value in (ours, theirs)
    )
    lines = difflib.unified_diff(a, b, lineterm="", n=CONTEXT)
    return list(lines)[2:]


def describe(found: Comparison) -> str:
    lines = []
    for key, (reason, shown) in found.intended.items():
        lines += [f"== {key}: differs on purpose: {reason}", *indent(shown)]
    for owner in OWNERS:
        keys = [key for key in found.different if owner_of(key) == owner]
        lines += [f"# {owner}: {len(keys)} keys differ"] if keys else []
        lines += [line for key in keys for line in (f"== {key}", *indent(found.different[key]))]
    lines += [f"warning: {warning}" for warning in found.warnings]
    lines.append(f"{len(found.different)} keys differ, {len(found.intended)} on purpose")
    return "\n".join(lines)


def indent(lines: list[str]) -> list[str]:
    return [f"   {line}" for line in lines]
