"""The whole examination: the checks in order, the table, the JSON for fleets. No torch here, see `alone.py`.

llmfoundry-lite doctor --folder /checkpoints --json doctor.json
"""

import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmfoundry_lite.doctor.alone import PRELOAD, Check, forkserver, run_alone, run_module
from llmfoundry_lite.doctor.finding import Finding, Machine, Status
from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, UserError
from llmfoundry_lite.files import check_replaceable

MODULES = (
    *("versions", "devices", "limits", "shared_memory", "clock", "disk"),
    *("gemm", "memory", "bandwidth", "collectives"),
)
CHECKS: Mapping[str, Check] = {module: partial(run_module, module) for module in MODULES}

COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}


def doctor(machine: Machine, json_file: Path | None = None) -> int:
    """Check this machine, print the table, write the JSON; returns 0 when nothing failed, else 2.

    Raises UserError when the options cannot be.
    """
    if ":/" in str(machine.folder):  # s3://…, of which Path keeps one slash
        raise UserError(f"--folder: {machine.folder} is not a folder of this machine; name one that it has mounted")
    check_json_file(json_file)
    forkserver.set_forkserver_preload(PRELOAD)
    findings = examine(machine, tell=_progress())
    print_table(findings, Console())
    if json_file is not None:
        json_file.write_text(json.dumps(as_dict(findings), indent=1) + "\n")
    return exit_code(findings)


def check_json_file(path: Path | None) -> None:
    """Before minutes are spent on what would be written there. Raises UserError."""
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--json: {path.parent} is not a folder; make it first")
    if path is not None and path.is_dir():
        raise UserError(f"--json: {path} is a folder; name a file in it")
    if path is not None:
        check_replaceable(path)


def examine(
    machine: Machine, checks: Mapping[str, Check] = CHECKS, tell: Callable[[str | None], None] = lambda name: None
) -> list[Finding]:
    """Run the checks one after the other. `tell` hears the name of each before it starts, and None at the end."""
    findings: list[Finding] = []
    try:
        for name, check in checks.items():
            tell(name)
            findings += run_alone(name, check, machine)
    finally:
        tell(None)
    return findings


def exit_code(findings: Iterable[Finding]) -> int:
    """Warnings do not fail."""
    return EXIT_USER if any(finding.status is Status.FAIL for finding in findings) else EXIT_DONE


def as_dict(findings: Iterable[Finding]) -> dict[str, Any]:
    """What the table says, for programs: {host, time, versions, status, findings: [{check, status, value, …}]}."""
    findings = list(findings)
    return {
        "host": socket.gethostname(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            **{
                package: _version(package) for package in ("llmfoundry-lite", "torch", "mosaicml", "mosaicml-streaming")
            },
        },
        "status": Status.FAIL if exit_code(findings) else Status.PASS,
        "findings": [asdict(finding) for finding in findings],
    }


def print_table(findings: Iterable[Finding], console: Console) -> None:
    """A line for each finding; below what is not right, what to do about it."""
    findings = list(findings)
    table = Table(title=f"{socket.gethostname()}", title_justify="left", pad_edge=False, box=None, header_style="dim")
    for heading in ("check", "", "measured", ""):
        table.add_column(heading, overflow="fold", justify="right" if heading == "measured" else "left")
    for finding in findings:
        colour = COLOURS[finding.status]
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n→ {finding.fix}" if finding.detail else f"→ {finding.fix}", style=colour)
        table.add_row(finding.check, Text(finding.status, style=colour), describe_value(finding), detail)
    console.print(table)
    counts = Counter(finding.status for finding in findings)
    console.print(", ".join(f"{counts[status]} {status}" for status in Status if counts[status]))


def describe_value(finding: Finding) -> str:
    """12.3 GB/s, 2.13.0, or nothing."""
    if not isinstance(finding.value, int | float):
        return finding.value or ""
    number = finding.value
    digits = 0 if isinstance(number, int) or abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {finding.unit or ''}".rstrip()


def leave_without_waiting(code: int) -> None:
    """End this process although one that hangs in the kernel, and cannot be killed, would be waited for."""
    if any(process.is_alive() for process in forkserver.active_children()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _progress() -> Callable[[str | None], None]:
    """Which check is running: on a terminal a line that changes, elsewhere a line for each."""
    console = Console(stderr=True)
    status = console.status("")

    def tell(name: str | None) -> None:
        if name is None:
            status.stop()
        elif console.is_terminal:
            status.update(f"checking {name} …")
            status.start()
        else:
            print(f"checking {name}", file=sys.stderr, flush=True)

    return tell


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
