"""Standard output and error of our processes, on consoles that cannot take everything.

A character that the console's encoding lacks is replaced, so that no process ends because of it. If text cannot be
written at all (a full disk, a pipe without a reader, a closed terminal or descriptor), it depends on the process. A
run's records are in its files, so ranks, launchers and commands that change something drop the text and go on. A
command that only answers ends, with one line on standard error.

`prepare_output` replaces `sys.stdout` and `sys.stderr`: a text stream that replaces characters, above a buffer, above a
`StandardStream`, which decides what a failed write does. `ignore_output_errors` chooses to drop text.

With `console_format: json`, the companion `llmfoundry_ops` puts streams in their place that write each line as JSON.
`say` and `tell` hand them the facts of a line, which a console of text does not show.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from llmfoundry_lite.errors import EXIT_UNREAD, UserError

REPLACING_ERROR_HANDLERS = ("backslashreplace", "ignore", "namereplace", "replace", "xmlcharrefreplace")
"""Python's names of what to do with a character that an encoding lacks, without those that raise an error."""
STALL_SECONDS = 5.0
"""Time for which a process that drops text waits for a full pipe, or a terminal that Ctrl-S has stopped. Ranks wait for
each other, so one that waits for a reader delays all."""


labels: dict[str, Any] = {}
"""Facts about this process that each JSON line of its console has: rank, launch, the last batch."""


class OutputError(UserError):
    """Standard output cannot be written. `run` of `cli/main.py` prints it as one line, unless the reader has left."""

    def __init__(self, cause: OSError):
        super().__init__(f"standard output: {cause.strerror}; what this command prints is incomplete")
        self.__cause__ = cause
        if isinstance(cause, BrokenPipeError):
            self.exit_code = EXIT_UNREAD


class StandardStream(io.FileIO):
    """The file below `sys.stdout` or `sys.stderr`.

    The first write that fails raises OutputError, unless the attribute `drops` is set, which drops the text instead.
    After a failed write, `failure` is set, and content that cannot be written counts as written.
    """

    def __init__(self, descriptor: int, *, was_closed: bool):
        """Open a file on `descriptor`. If that `was_closed` when the process started, it leads to the null device by
        now, and each write fails."""
        super().__init__(descriptor, "w", closefd=False)
        self.drops = False
        """Whether text that cannot be written is dropped without an error."""
        self.failure: OSError | None = None
        """The first error of a write."""
        self._was_closed = was_closed
        self._has_stalled = False
        """Whether the last wait for the reader has ended without room. Then the next write does not wait."""

    def write(self, content, /) -> int:  # type: ignore[override]
        """Write `content`, or a part of it, and return the number of bytes that need not be written again.

        The first write that fails raises OutputError, unless the stream drops text. Content that a later write could
        not write counts as written, so that the buffer above does not keep it.
        """
        view = memoryview(content).cast("B")
        try:
            return self._write_part(view)
        except OSError as error:
            is_first_failure = self.failure is None
            if is_first_failure:
                self.failure = error
            if is_first_failure and not self.drops:
                raise OutputError(error) from error
        return len(view)

    def _write_part(self, view: memoryview) -> int:
        """Write as much of `view` as fits, and return the number of bytes. Raises OSError.

        A stream that drops text must not wait for its reader without a limit, because other ranks would wait for this
        one. It waits STALL_SECONDS, once, and writes at most PIPE_BUF bytes, which a pipe with room takes without
        waiting. Another stream waits as long as it takes.
        """
        if self._was_closed:
            raise OSError(errno.EBADF, "closed")
        if self.drops:
            self._wait_for_room(0.0 if self._has_stalled else STALL_SECONDS)
            view = view[: select.PIPE_BUF]
        num_written = super().write(view)
        while num_written is None:  # the pipe is full, and another process has set O_NONBLOCK on it
            self._wait_for_room(None)
            num_written = super().write(view)
        return num_written

    def _wait_for_room(self, seconds: float | None) -> None:
        """Wait until a write will not block. Raises BlockingIOError after `seconds`; None waits without a limit.

        Sets `_has_stalled`.
        """
        output = select.poll()
        output.register(self.fileno(), select.POLLOUT)
        timeout_milliseconds = None if seconds is None else 1000 * seconds
        self._has_stalled = not output.poll(timeout_milliseconds)
        if self._has_stalled:
            raise BlockingIOError(errno.EAGAIN, "its reader does not read")


class UnbufferedWriter(io.BufferedWriter):
    """A buffer that keeps nothing back, for `python -u` and PYTHONUNBUFFERED."""

    def write(self, buffer, /) -> int:  # type: ignore[override]
        """Write all of `buffer` to the file at once, and return its number of bytes."""
        num_bytes = super().write(buffer)
        self.flush()
        return num_bytes


def prepare_output() -> StandardStream | None:
    """Replace `sys.stdout` and `sys.stderr` by streams that take every character. Every program calls this first.

    Standard error drops text that it cannot write; standard output raises OutputError. Streams that somebody has
    replaced, as tests do, are left alone, and so are those that were prepared before.

    Returns the file below standard output, on which the caller may set `drops`; None if somebody has replaced it.
    """
    open_closed_descriptors()
    # Python keeps the streams with which the process started in `sys.__stdout__` and `sys.__stderr__`.
    if sys.stdout is sys.__stdout__ and _standard_stream_below(sys.stdout) is None:
        sys.stdout = _build_replacing_stream(sys.stdout, descriptor=1)
    if sys.stderr is sys.__stderr__ and _standard_stream_below(sys.stderr) is None:
        sys.stderr = _build_replacing_stream(sys.stderr, descriptor=2)

    error_file = _standard_stream_below(sys.stderr)
    if error_file is not None:
        error_file.drops = True
    return _standard_stream_below(sys.stdout)


def ignore_output_errors() -> None:
    """Drop text that standard output and error cannot write from now on, because this process has more to do than
    print."""
    output = prepare_output()
    if output is not None:
        output.drops = True


@contextmanager
def ignoring_output_errors() -> Iterator[None]:
    """Drop text that cannot be written during a block, which prints in somebody else's program. Its streams come
    back."""
    stdout_before, stderr_before = sys.stdout, sys.stderr
    ignore_output_errors()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = stdout_before, stderr_before


def _build_replacing_stream(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Build a text stream that writes to `descriptor` like `stream`, and replaces characters that its encoding lacks.

    stream: the stream to replace, which is flushed. None if the descriptor was closed when the process started, because
        Python then has no stream for it.
    descriptor: 1 for standard output, 2 for standard error.
    """
    # Take over the options of the stream, such as an encoding that PYTHONIOENCODING has set.
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}
    if stream is not None:
        with suppress(OSError):
            stream.flush()
        options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        if options["errors"] not in REPLACING_ERROR_HANDLERS:
            options["errors"] = "replace"

    file = StandardStream(descriptor, was_closed=stream is None)
    # With write_through, text must not stay in the buffer either: a process that is killed would lose it.
    buffer = UnbufferedWriter(file) if options.get("write_through") else io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, **options)


def _standard_stream_below(stream: Any) -> StandardStream | None:
    """Return the StandardStream that a text stream writes to; None if it is another kind of stream."""
    buffer = getattr(stream, "buffer", None)
    file = getattr(buffer, "raw", None)
    return file if isinstance(file, StandardStream) else None


def say(text: str, event: str = "", facts: Mapping[str, Any] | None = None, *, file: TextIO | None = None) -> None:
    """Print a line on `file`, by default standard output.

    A console whose lines are JSON also shows `event`, a name such as "saved", and `facts`: numbers and texts by name.
    """
    if not tell(text, event, facts, file=file):
        print(text, file=file, flush=True)


def tell(text: str, event: str, facts: Mapping[str, Any] | None = None, *, file: TextIO | None = None) -> bool:
    """Print a line as `say` does if the lines of `file` are JSON, and nothing otherwise. Returns whether it did."""
    stream = file or sys.stdout
    write_event = getattr(stream, "write_event", None)
    if write_event is None:
        return False
    write_event(text, event, facts or {})
    return True


def open_closed_descriptors() -> None:
    """Connect standard streams that are closed to the null device.

    Otherwise the next file or socket would get their descriptors, and child processes would write into it.
    """
    # The system always gives the lowest free descriptor.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
