"""Run one check in a process of its own: whatever happens there becomes a finding here.

A driver that hangs, a library that cannot be loaded, a segmentation fault in the middle of a product: the process that
asks must outlive all of it. The processes are forks of a server that has imported torch once and has not touched a
device. Every process sets itself an alarm as well, so that none outlives its time when the one that watches it is gone.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from llmfoundry_lite.doctor.finding import INSTALL, Finding, Machine, Status

Check = Callable[[Machine], Iterable[Finding]]

forkserver = multiprocessing.get_context("forkserver")
PRELOAD = ["torch", "torch.distributed"]
DONE = "done"
REPORT_FIX = "run it again; if it stays, look at the driver's log (dmesg) and take the machine out"


def run_module(module: str, machine: Machine) -> Iterator[Finding]:
    """`check` of a module, imported where it runs: a torch that cannot be imported is one more thing to find."""
    yield from import_module(f"llmfoundry_lite.doctor.{module}").check(machine)


def run_alone(name: str, check: Check, machine: Machine) -> Iterator[Finding]:
    """The findings of a check as they come; one more that fails if it crashes, dies or exceeds `limit_seconds`."""
    with tempfile.NamedTemporaryFile(prefix="doctor_") as output:
        receiver, sender = forkserver.Pipe(duplex=False)
        process = start(_run_check, (name, check, machine, sender), machine.limit_seconds, output.name)
        sender.close()
        deadline = time.monotonic() + machine.limit_seconds
        try:
            while receiver.poll(max(0.0, deadline - time.monotonic())):
                finding = receiver.recv()
                if finding == DONE:
                    return
                yield finding
            yield Finding(
                check=name,
                status=Status.FAIL,
                detail=f"no answer within {machine.limit_seconds:.0f} s; ended",
                fix=REPORT_FIX,
                seconds=machine.limit_seconds,
            )
        except EOFError:
            process.join(5)
            words = f"its process {describe_end(process)}{last_words(output.name)}"
            yield Finding(check=name, status=Status.FAIL, detail=words, fix=REPORT_FIX)
        finally:
            process.kill()  # also after its last word: how a driver takes itself down is not waited for
            process.join(5)


def start(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    limit_seconds: float,
    output: str,
    context: ForkContext | ForkServerContext = forkserver,
) -> BaseProcess:
    """A process that calls `function(*arguments)`, prints into the file `output` and ends by itself in time."""
    process = context.Process(target=_run, args=(function, arguments, limit_seconds, output))
    process.start()
    return process


def describe_end(process: BaseProcess) -> str:
    """was killed by SIGSEGV, ended with code 1, …"""
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def last_words(output: str) -> str:
    """The last line a process printed, as the end of a sentence."""
    lines = [line.strip() for line in Path(output).read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


def reason(error: BaseException) -> str:
    """An exception in one line."""
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


def _run_check(name: str, check: Check, machine: Machine, sender: Connection) -> None:
    began = time.monotonic()
    try:
        for finding in check(machine):
            sender.send(finding.with_seconds(time.monotonic() - began))
            began = time.monotonic()
    except Exception as error:
        fix = INSTALL if isinstance(error, ImportError) else REPORT_FIX
        finding = Finding(check=name, status=Status.FAIL, detail=reason(error), fix=fix)
        sender.send(finding.with_seconds(time.monotonic() - began))
    sender.send(DONE)
