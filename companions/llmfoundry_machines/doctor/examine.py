"""The examination of one machine: runs the checks, and prints the table and the JSON of their findings. No torch here.

    llmfoundry-lite doctor --folder /checkpoints --json doctor.json
    llmfoundry-lite doctor --folder s3://bucket/checkpoints

Each check runs in a process of its own, because a driver may hang and a library may crash, and this process has to
report it. The processes are forks of a server that has imported torch once and has not used a device. Each also sets an
alarm that ends it, in case this process dies first.

`doctor` is the whole command. `examine` runs the checks, `run_alone` runs one of them, and `report` prints the result.
The checks themselves are in the modules that `CHECK_MODULES` names.
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
from llmfoundry_machines.doctor.finding import INSTALL_FIX, CheckOptions, Finding, Status

Check = Callable[[CheckOptions], Iterable[Finding]]

forkserver = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed"]
"""Modules that the fork server imports."""
DONE = "done"
"""Sent by a check's process after its last finding."""
EXIT_SECONDS = 5.0
"""Time that a process has to exit, after its pipe was closed or it was killed."""
ALARM_EXTRA_SECONDS = 5
"""Time after its limit at which a process ends itself, if the process that started it has not ended it."""
MAX_LINE_LENGTH = 300
"""Characters of an error or of a process's output that a finding quotes."""
REPORT_FIX = "run it again; if it stays, look at the driver's log (dmesg) and take the machine out"

CHECK_MODULES = {
    "versions": "machine",
    "devices": "machine",
    "limits": "machine",
    "shared memory": "machine",
    "clock": "folder",
    "disk": "folder",
    "gemm": "speed",
    "memory": "speed",
    "bandwidth": "speed",
    "collectives": "collectives",
}
"""Name of each check, in the order in which they run -> the module that has its function."""


def run_check(module: str, name: str, options: CheckOptions) -> Iterator[Finding]:
    """Run the check `name` of a module of this package: "shared memory" of "machine" is machine.check_shared_memory.

    The module is imported here, in the check's own process. If torch cannot be imported, that becomes a finding of this
    check instead of an error of the whole command.
    """
    check_module = import_module(f"llmfoundry_machines.doctor.{module}")
    check = getattr(check_module, f"check_{name.replace(' ', '_')}")
    yield from check(options)


CHECKS: Mapping[str, Check] = {name: partial(run_check, module, name) for name, module in CHECK_MODULES.items()}


def doctor(options: CheckOptions, json_file: Path | None = None) -> int:
    """Check this machine, print the table and write the JSON. Returns 2 if a check failed, else 0.

    Raises UserError for a mistyped URL as the folder, and for a JSON file that cannot be written.
    """
    # "s3:/bucket" is a Path, because a URL needs two slashes.
    is_mistyped_url = isinstance(options.folder, Path) and ":/" in str(options.folder)
    if is_mistyped_url:
        raise UserError(
            f"--folder: {options.folder} is not a folder of this machine; a URL begins with s3://, gs://, …"
        )
    check_json_file(json_file)

    forkserver.set_forkserver_preload(PRELOAD)
    findings = examine(options)
    return report(findings, findings, json_file)


def check_json_file(path: Path | None) -> None:
    """Raise UserError if `path` cannot be written. Call it before the checks, which take minutes."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"--json: {path.parent} is not a folder; make it first")
    if path.is_dir():
        raise UserError(f"--json: {path} is a folder; name a file in it")
    check_replaceable(path)


def examine(options: CheckOptions, checks: Mapping[str, Check] = CHECKS) -> list[Finding]:
    """Run the checks one after the other and return all their findings. Prints a line on stderr before each check."""
    findings: list[Finding] = []
    for name, check in checks.items():
        print(f"checking {name}", file=sys.stderr, flush=True)
        findings += run_alone(name, check, options)
    return findings


def run_alone(name: str, check: Check, options: CheckOptions) -> Iterator[Finding]:
    """Run one check in a process of its own, and yield its findings as they arrive.

    If the process dies or takes longer than `options.limit_seconds`, a failed finding named after the check follows. An
    exception in the check is such a finding too, which the process itself sends. The process is killed at the end.
    """
    with tempfile.NamedTemporaryFile(prefix="doctor_") as output:
        receiver, sender = forkserver.Pipe(duplex=False)
        arguments = (name, check, options, sender)
        process = start_process(_send_findings, arguments, options.limit_seconds, output.name)
        # With only the process's own end of the pipe open, its death is an EOFError here.
        sender.close()

        deadline = time.monotonic() + options.limit_seconds
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                message = receiver.recv()
                if message == DONE:
                    return
                yield message
            detail = f"no answer within {options.limit_seconds:.0f} s; ended"
            yield Finding(name, Status.FAIL, detail=detail, fix=REPORT_FIX, seconds=options.limit_seconds)
        except EOFError:
            process.join(EXIT_SECONDS)
            detail = f"its process {describe_end(process, output.name)}"
            yield Finding(name, Status.FAIL, detail=detail, fix=REPORT_FIX)
        finally:
            process.kill()  # a driver may hang in its own clean-up
            process.join(EXIT_SECONDS)


def start_process(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    limit_seconds: float,
    output_file: str,
    context: ForkContext | ForkServerContext = forkserver,
) -> BaseProcess:
    """Start a process that calls `function(*arguments)` and writes its stdout and stderr to `output_file`.

    The process ends itself `ALARM_EXTRA_SECONDS` after the limit, in case this process has died and cannot end it.
    `context` decides how the process is made: by the fork server, or as a fork of this process.
    """
    process = context.Process(target=_run_with_alarm, args=(function, arguments, limit_seconds, output_file))
    process.start()
    return process


def describe_end(process: BaseProcess, output_file: str) -> str:
    """Describe how a process ended, with the last line of its output: "was killed by SIGSEGV: about to read"."""
    code = process.exitcode or 0
    if code < 0:
        end = f"was killed by {signal.Signals(-code).name}"
    else:
        end = f"ended with code {code}"

    output = Path(output_file).read_text(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{end}: {lines[-1][:MAX_LINE_LENGTH]}" if lines else end


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: "ValueError: message". Only the message's first paragraph is kept."""
    first_paragraph = str(error).split("\n\n")[0]
    message = " ".join(first_paragraph.split())
    error_type = type(error).__name__
    return f"{error_type}: {message[:MAX_LINE_LENGTH]}" if message else error_type


def _run_with_alarm(
    function: Callable[..., Any], arguments: tuple[Any, ...], limit_seconds: float, output_file: str
) -> None:
    """Call `function(*arguments)` in a started process, after setting its alarm and redirecting its output."""
    # The kernel ends the process at the alarm, also while it hangs in a library's C code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_seconds + ALARM_EXTRA_SECONDS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    # Libraries in C write to the descriptors 1 and 2, and Python to its own file objects.
    descriptor = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)

    function(*arguments)


def _send_findings(name: str, check: Check, options: CheckOptions, sender: Connection) -> None:
    """Run a check in this process and send each finding with its seconds, then DONE. An exception becomes a finding."""
    began = time.monotonic()

    def send(finding: Finding) -> None:
        sender.send(replace(finding, seconds=round(time.monotonic() - began, 3)))

    try:
        for finding in check(options):
            send(finding)
            began = time.monotonic()
    except Exception as error:
        fix = INSTALL_FIX if isinstance(error, ImportError) else REPORT_FIX
        send(Finding(name, Status.FAIL, detail=describe_error(error), fix=fix))
    sender.send(DONE)


# ---------------------------------------------------------------------------------------------------------- output


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 2 if any finding failed, else 0. Warnings do not count."""
    has_failed = any(finding.status is Status.FAIL for finding in findings)
    return EXIT_USER if has_failed else EXIT_DONE


def find_versions() -> dict[str, str | None]:
    """Return the versions of Python, this package, torch, Composer and Streaming. A missing package has None."""
    versions: dict[str, str | None] = {"python": platform.python_version(), NAME: read_release().version}
    for package in ("torch", "mosaicml", "mosaicml-streaming"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the content of the JSON file: {host, time, versions, status, findings: [{check, status, value, …}]}."""
    return {
        "host": socket.gethostname(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"kernel": platform.release(), **find_versions()},
        "status": Status.FAIL if exit_code(findings) else Status.PASS,
        "findings": [asdict(finding) for finding in findings],
    }


def report(findings: Sequence[Finding], shown: Sequence[Finding], json_file: Path | None) -> int:
    """Write the JSON of all findings, print the table of those in `shown`, and return the exit code.

    `json_file` is None if no JSON was asked for. If it cannot be written, the OSError is raised after the table is
    printed.
    """
    try:
        if json_file is not None:
            content = json.dumps(as_dict(findings), indent=1)
            write_atomically(json_file, mask_urls(content) + "\n")
    finally:  # the findings took minutes, so print them in any case
        print_table(shown, Console())
    return exit_code(findings)


def print_table(findings: Sequence[Finding], console: Console) -> None:
    """Print the host, a row for each finding with its fix below it, and how many findings have each status."""
    rows = []
    for finding in findings:
        rows.append((finding.check, finding.status, describe_value(finding), finding.detail))
        if finding.fix:
            rows.append(("", "", "", f"→ {finding.fix}"))

    console.print(socket.gethostname(), highlight=False)
    Table("doctor", ("check", "status", "measured", "detail"), rows, right=(2,)).print(console)

    num_findings = Counter(finding.status for finding in findings)
    totals = [f"{num_findings[status]} {status}" for status in Status if num_findings[status]]
    console.print(", ".join(totals))


def describe_value(finding: Finding) -> str:
    """Format the measurement with its unit: 1,234 MB/s, 12.3 GB/s, 1.23 ms, or 2.13.0. Empty if there is none."""
    value = finding.value
    if not isinstance(value, int | float):
        return value or ""

    # About three significant digits.
    if isinstance(value, int) or abs(value) >= 100:
        num_decimals = 0
    elif abs(value) >= 10:
        num_decimals = 1
    else:
        num_decimals = 2
    return f"{value:,.{num_decimals}f} {finding.unit or ''}".rstrip()


def leave_without_waiting(code: int) -> None:
    """Exit at once with `code` if the process of a check is still alive. Otherwise return.

    A process that hangs in the kernel cannot be killed, and Python would wait for it at its own exit.
    """
    if any(process.is_alive() for process in forkserver.active_children()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
