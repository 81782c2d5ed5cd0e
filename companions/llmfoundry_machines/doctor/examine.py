"""The examination of one machine: each check in a process of its own, the table, the JSON. No torch here.

    llmfoundry-lite doctor --folder /checkpoints --json doctor.json
    llmfoundry-lite doctor --folder s3://bucket/checkpoints

A driver may hang and a library may crash, and this process must outlive both. The processes are forks of a server that
has imported torch once and has not touched a device. Each sets itself an alarm, in case this process dies first.
"""

import json
import multiprocessing
import os
import platform
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rich.console import Console

from llmfoundry_lite.errors import EXIT_DONE, EXIT_USER, UserError, mask_urls
from llmfoundry_lite.files import check_replaceable, write_atomically
from llmfoundry_lite.release import NAME, read_release
from llmfoundry_lite.tables import Table
from llmfoundry_machines.doctor.finding import INSTALL, Finding, Machine, Status

Check = Callable[[Machine], Iterable[Finding]]

forkserver = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed"]
DONE = "done"
REPORT_FIX = "run it again; if it stays, look at the driver's log (dmesg) and take the machine out"


def run_check(module: str, function: str, machine: Machine) -> Iterator[Finding]:
    """Import the check where it runs: a torch that cannot be imported becomes a finding."""
    yield from getattr(import_module(f"llmfoundry_machines.doctor.{module}"), function)(machine)


CHECKS: Mapping[str, Check] = {
    name: partial(run_check, module, f"check_{name.replace(' ', '_')}")
    for module, names in {
        "machine": ("versions", "devices", "limits", "shared memory"),
        "folder": ("clock", "disk"),
        "speed": ("gemm", "memory", "bandwidth"),
        "collectives": ("collectives",),
    }.items()
    for name in names
}


def doctor(machine: Machine, json_file: Path | None = None) -> int:
    """Check this machine, print the table, write the JSON; returns 0 when nothing failed, else 2.

    Raises UserError for a folder that is neither here nor a URL, and for a JSON file that cannot be written.
    """
    if isinstance(machine.folder, Path) and ":/" in str(machine.folder):
        raise UserError(
            f"--folder: {machine.folder} is not a folder of this machine; a URL begins with s3://, gs://, …"
        )
    check_json_file(json_file)
    forkserver.set_forkserver_preload(PRELOAD)
    findings = examine(machine)
    return report(findings, findings, json_file)


def check_json_file(path: Path | None) -> None:
    """Raise UserError if `path` cannot be written, before the minutes that the checks take."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"--json: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise UserError(f"--json: {path} is a folder; name a file in it")
    check_replaceable(path)


def examine(machine: Machine, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Run the checks one after the other, with a line on stderr before each."""
    findings: list[Finding] = []
    for name, check in checks.items():
        print(f"checking {name}", file=sys.stderr, flush=True)
        findings += run_alone(name, check, machine)
    return findings


def run_alone(name: str, check: Check, machine: Machine) -> Iterator[Finding]:
    """Yield a check's findings as they come; one more that fails if it crashes, dies or exceeds `limit_seconds`."""
    with tempfile.NamedTemporaryFile(prefix="doctor_") as output:
        receiver, sender = forkserver.Pipe(duplex=False)
        process = start(_send_findings, (name, check, machine, sender), machine.limit_seconds, output.name)
        sender.close()
        deadline = time.monotonic() + machine.limit_seconds
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                finding = receiver.recv()
                if finding == DONE:
                    return
                yield finding
            detail = f"no answer within {machine.limit_seconds:.0f} s; ended"
            yield Finding(name, Status.FAIL, detail=detail, fix=REPORT_FIX, seconds=machine.limit_seconds)
        except EOFError:
            process.join(5)
            detail = f"its process {describe_end(process, output.name)}"
            yield Finding(name, Status.FAIL, detail=detail, fix=REPORT_FIX)
        finally:
            process.kill()  # a driver may hang in its own clean-up
            process.join(5)


def start(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    limit_seconds: float,
    output: str,
    context: ForkContext | ForkServerContext = forkserver,
) -> BaseProcess:
    """Start a process that calls `function(*arguments)`, prints into the file `output` and ends itself in time."""
    process = context.Process(target=_run, args=(function, arguments, limit_seconds, output))
    process.start()
    return process


def describe_end(process: BaseProcess, output: str) -> str:
    """Say how a process ended, with the last line that it printed: was killed by SIGSEGV: about to read."""
    code = process.exitcode or 0
    words = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    lines = [line.strip() for line in Path(output).read_text(errors="replace").splitlines() if line.strip()]
    return f"{words}: {lines[-1][:300]}" if lines else words


def describe_error(error: BaseException) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], limit_seconds: float, output: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds + 5)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    function(*arguments)


def _send_findings(name: str, check: Check, machine: Machine, sender: Connection) -> None:
    began = time.monotonic()

    def send(finding: Finding) -> None:
        sender.send(replace(finding, seconds=round(time.monotonic() - began, 3)))

    try:
        for finding in check(machine):
            send(finding)
            began = time.monotonic()
    except Exception as error:
        fix = INSTALL if isinstance(error, ImportError) else REPORT_FIX
        send(Finding(name, Status.FAIL, detail=describe_error(error), fix=fix))
    sender.send(DONE)


# ---------------------------------------------------------------------------------------------------------- output


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 2 for a failure, else 0; warnings do not fail."""
    return EXIT_USER if any(finding.status is Status.FAIL for finding in findings) else EXIT_DONE


def find_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that compute; None for a package that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), NAME: read_release().version}
    for package in ("torch", "mosaicml", "mosaicml-streaming"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the JSON: {host, time, versions, status, findings: [{check, status, value, …}]}."""
    return {
        "host": socket.gethostname(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"kernel": platform.release(), **find_versions()},
        "status": Status.FAIL if exit_code(findings) else Status.PASS,
        "findings": [asdict(finding) for finding in findings],
    }


def report(findings: Sequence[Finding], shown: Sequence[Finding], json_file: Path | None) -> int:
    """Write the JSON of all findings, print the table of those that are `shown`, and return the exit code."""
    try:
        if json_file is not None:
            write_atomically(json_file, mask_urls(json.dumps(as_dict(findings), indent=1)) + "\n")
    finally:  # what was found is shown, whether or not it can be written
        print_table(shown, Console())
    return exit_code(findings)


def print_table(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding and, below what is not right, its fix."""
    rows = []
    for finding in findings:
        rows.append((finding.check, finding.status, describe_value(finding), finding.detail))
        if finding.fix:
            rows.append(("", "", "", f"→ {finding.fix}"))
    console.print(socket.gethostname(), highlight=False)
    Table("doctor", ("check", "status", "measured", "detail"), rows, right=(2,)).print(console)
    counts = Counter(finding.status for finding in findings)
    console.print(", ".join(f"{counts[status]} {status}" for status in Status if counts[status]))


def describe_value(finding: Finding) -> str:
    """Format the measurement: 12.3 GB/s, 2.13.0, or nothing."""
    if not isinstance(finding.value, int | float):
        return finding.value or ""
    number = finding.value
    digits = 0 if isinstance(number, int) or abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {finding.unit or ''}".rstrip()


def leave_without_waiting(code: int) -> None:
    """End this process even if a check hangs in the kernel, where it cannot be killed."""
    if any(process.is_alive() for process in forkserver.active_children()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
