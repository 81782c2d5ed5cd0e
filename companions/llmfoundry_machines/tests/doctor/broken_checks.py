"""Checks that end badly, for other processes to run: no torch here, so that they begin at once."""

import ctypes
import signal
from collections.abc import Iterator

from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status


def answer(options: CheckOptions) -> Iterator[Finding]:
    yield Finding("fine", Status.PASS)


def crash(options: CheckOptions) -> Iterator[Finding]:
    yield Finding("before", Status.PASS)
    raise ValueError("two\nlines")


def segfault(options: CheckOptions) -> Iterator[Finding]:
    print("about to read nothing", flush=True)
    ctypes.string_at(0)
    yield Finding("after", Status.PASS)


def hang(options: CheckOptions) -> Iterator[Finding]:
    signal.pause()
    yield Finding("after", Status.PASS)
