"""Standard output and error of our processes, on consoles that cannot take everything.

A character that the console's encoding lacks is replaced: nothing ends because of it. What cannot be written at all (a
full disk, a pipe without a reader, a closed terminal or descriptor) depends on the process. A run's records are in its
files, so ranks, launchers and commands that change something drop the text and go on. A command that only answers ends,
with one line on standard error.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llmfoundry_lite.errors import EXIT_UNREAD, UserError

REPLACING = ("backslashreplace", "ignore", "namereplace", "replace", "xmlcharrefreplace")
"""Error handlers of Python that write something for every character."""
STALL_SECONDS = 5.0
"""How long a process that drops text waits for a full pipe, or a terminal that Ctrl-S has stopped. Ranks wait for each
other, so that one which waits for a reader would hold up all."""


class OutputError(UserError):
    """Standard output cannot be written. `run` of `cli/main.py` says so in a line, unless its reader has left."""

    def __init__(self, cause: OSError):
        super().__init__(f"standard output: {cause.strerror}; what this command prints is incomplete")
        self.__cause__ = cause
        if isinstance(cause, BrokenPipeError):
            self.exit_code = EXIT_UNREAD


class StandardStream(io.FileIO):
    """The file below `sys.stdout` or `sys.stderr`. Its first write that fails raises OutputError, unless it `drops`."""

    def __init__(self, descriptor: int, *, was_closed: bool):
        super().__init__(descriptor, "w", closefd=False)
        self.drops = False
        """Whether text that cannot be written is dropped without an error."""
        self.failure: OSError | None = None
        """The first error of a write."""
        self._was_closed = was_closed  # at the start, so that the descriptor now leads to the null device
        self._has_stalled = False

    def write(self, content, /) -> int:  # type: ignore[override]
        """Write a piece and return its size, which is that of `content` if it is dropped."""
        view = memoryview(content).cast("B")
        try:
            return self._write_piece(view)
        except OSError as error:
            is_first = self.failure is None
            self.failure = self.failure or error
            if is_first and not self.drops:
                raise OutputError(error) from error
        return len(view)

    def _write_piece(self, view: memoryview) -> int:
        if self._was_closed:
            raise OSError(errno.EBADF, "closed")
        if self.drops:
            self._wait_for_room(0.0 if self._has_stalled else STALL_SECONDS)
            view = view[: select.PIPE_BUF]  # a pipe that has room takes so many bytes without waiting
        while (written := super().write(view)) is None:  # another process has set O_NONBLOCK, and the pipe is full
            self._wait_for_room(None)
        return written

    def _wait_for_room(self, seconds: float | None) -> None:
        """Wait until a write will not block. Raises BlockingIOError after `seconds`; None waits without a limit."""
        output = select.poll()
        output.register(self.fileno(), select.POLLOUT)
        self._has_stalled = not output.poll(None if seconds is None else 1000 * seconds)
        if self._has_stalled:
            raise BlockingIOError(errno.EAGAIN, "its reader does not read")


class UnbufferedWriter(io.BufferedWriter):
    """A buffer that keeps nothing back, for `python -u` and PYTHONUNBUFFERED."""

    def write(self, buffer, /) -> int:  # type: ignore[override]
        num_bytes = super().write(buffer)
        self.flush()
        return num_bytes


def prepare_output() -> StandardStream | None:
    """Let standard output and error of this process take every character from now on, and standard error drop what it
    cannot write. Every program of ours calls this first. Streams that were replaced, as in tests, are left alone.

    Returns the file below standard output.
    """
    open_closed_descriptors()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and _file_of(stream) is None:
            setattr(sys, name, _replacing_stream(stream, descriptor))
    if (errors := _file_of(sys.stderr)) is not None:
        errors.drops = True
    return _file_of(sys.stdout)


def ignore_output_errors() -> None:
    """Drop what cannot be written to standard output and error from now on: this process has more to do than print."""
    output = prepare_output()
    if output is not None:
        output.drops = True


@contextmanager
def ignoring_output_errors() -> Iterator[None]:
    """Ignore output errors in a block, which prints in somebody else's program."""
    before = sys.stdout, sys.stderr
    ignore_output_errors()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _replacing_stream(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return a stream like `stream`, which writes to the same descriptor; None is one that was closed at the start."""
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}
    if stream is not None:
        with suppress(OSError):
            stream.flush()
        options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        if options["errors"] not in REPLACING:
            options["errors"] = "replace"
    file = StandardStream(descriptor, was_closed=stream is None)
    # Text that is written through would otherwise stay in the buffer, and a process that is killed would lose it.
    buffer = UnbufferedWriter(file) if options.get("write_through") else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, **options)


def _file_of(stream: Any) -> StandardStream | None:
    file = getattr(getattr(stream, "buffer", None), "raw", None)
    return file if isinstance(file, StandardStream) else None


def open_closed_descriptors() -> None:
    """Connect closed standard streams to the null device. Otherwise the next file or socket would get their
    descriptors, and children would write into it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
