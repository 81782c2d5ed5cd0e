"""Standard output and error of a process that must not fail when no one reads them.

A run's records are in its files. Its screen may be lost: Ctrl-C ends `| tee` before the run has saved, a log's disk is
full, a terminal closes (EIO), a batch system closes all three. Neither the run nor its exit code may change for that.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Lossy(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, content, /):  # type: ignore[override]
        try:
            return super().write(content)
        except OSError:
            return len(memoryview(content).cast("B"))


def ignore_output_errors() -> None:
    """Drop what cannot be written to standard output and error from now on, unless they have been replaced, as in
    tests."""
    open_closed_descriptors()
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
        if stream is not None:
            with suppress(OSError):
                stream.flush()
            options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        file = Lossy(number if stream is not None else os.devnull, "w", closefd=stream is None)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), **options))


def open_closed_descriptors() -> None:
    """Connect closed standard streams to the null device. Otherwise the next file or socket would get their
    descriptors, and children would write into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
