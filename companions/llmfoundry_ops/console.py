"""`console_format: json`: each line that a process of a launch prints becomes a JSON object. No torch.

    {"time": "2026-11-30T16:20:05.123Z", "level": "info", "event": "saved", "text": "saved ba40", "run": "mpt-1b", …}

`JsonText` takes the place of `sys.stdout` and `sys.stderr`, so that all that Python code prints becomes JSON, and calls
of `output.say` bring their facts. C++ libraries and child processes print to the file descriptors instead. These lead
to a process of this module (`main`), which turns each line into an object, and outlives a rank that crashes.

A line that is such an object of this run already stays one: rank 0 of `train -n` prints through its launcher.
"""

import datetime
import io
import json
import math
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from llmfoundry_lite.errors import printable
from llmfoundry_lite.ranks import output
from llmfoundry_lite.ranks.output import OutputError, StandardStream

MAX_OBJECT_BYTES = select.PIPE_BUF
"""Length of a line, at most: 4,096 bytes on Linux. A pipe takes that many at once, also from several processes."""
MIN_TEXT_BYTES = 512
"""Room that a line's text gets. If the facts beside it leave less, they are left out."""
MAX_MESSAGE_CHARACTERS = 1 << 16
"""Characters that are collected of a line or a traceback. What follows becomes another object."""
READ_BYTES = 1 << 16
"""Bytes that are read from the pipe at once."""
PAUSE_SECONDS = 1.0
"""Time after which an incomplete line, or a traceback without its last line, is printed as it is."""
FINISH_SECONDS = 2.0
"""Time that the end of a process waits, at most, until the lines of its children are printed."""
BEGINNING = '{"time": "'
"""First characters of each object."""
FACTS_LEFT_OUT = "facts_left_out"
"""Key of an object that would have been too long with its facts."""

TRACEBACK = "Traceback (most recent call last):"
SPEAKER = r"(?:launcher: |rank \d+: |\[rank\d+\]: ?)*"
"""Texts that our programs and torch put in front of a line."""
IS_ERROR = re.compile(
    rf"{SPEAKER}(?:error: |fatal|Fatal|terminate called|Traceback|[\w.]+(?:Error|Exception)\b|\[?E\d{{4}} )"
    r"|.*\b(?:ERROR|CRITICAL|FATAL)\b"
)
IS_WARNING = re.compile(rf"{SPEAKER}(?:warning: |\[?W\d{{4}} )|.*\bWARN(?:ING)?\b|.*\b\w+Warning: ")
"""Beginnings of texts that tell of an error or a warning: of our own, of Python's, and those of logging libraries."""


def use_json(labels: Mapping[str, Any]) -> Callable[[], None]:
    """Turn each line that this process and its children print from now on into a JSON object.

    `labels` are facts that each object has, such as the run and the rank. Returns a function for a process to call at
    its end: it waits until the lines of its children are printed, FINISH_SECONDS at most.
    """
    from llmfoundry_ops.processes import start_module

    output.labels.update(labels)
    output.open_closed_descriptors()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, OutputError):
            stream.flush()

    # The other process inherits the real streams, and this one keeps copies of them.
    descriptors = [os.dup(1), os.dup(2)]
    pipes = [os.pipe(), os.pipe()]
    readers = [reader for reader, _ in pipes]
    process: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # no more processes: lines of C++ libraries stay text then
        command = ["llmfoundry_ops.console", json.dumps(labels), *map(str, readers)]
        process = start_module(command, stdin=subprocess.DEVNULL, pass_fds=readers, start_new_session=True)
        os.dup2(pipes[0][1], 1)
        os.dup2(pipes[1][1], 2)
    for descriptor in (*pipes[0], *pipes[1]):
        os.close(descriptor)
    sys.stdout = JsonText(descriptors[0], 1)
    sys.stderr = JsonText(descriptors[1], 2)

    def finish() -> None:
        """Wait until the lines of child processes are printed. Only JSON streams print after that."""
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(FINISH_SECONDS)

    return finish


class JsonText(io.TextIOBase):
    """A text stream that writes a JSON object for each line, for each text of several lines that is written at once,
    and for each traceback."""

    encoding = "utf-8"  # type: ignore[assignment]
    errors = "replace"  # type: ignore[assignment]

    def __init__(self, descriptor: int, pipe_descriptor: int):
        """Write objects to `descriptor`.

        pipe_descriptor: descriptor of a pipe, for code that asks for a descriptor or a file for bytes.
        """
        self.name = f"<json on descriptor {descriptor}>"
        self._file = ObjectFile(descriptor)
        self._pipe_descriptor = pipe_descriptor
        self._of_thread = threading.local()
        """Each thread has its own incomplete line, so that none needs a lock, which a fork could leave locked."""

    @property
    def buffer(self) -> io.FileIO:
        """Return a file for bytes. They become objects as the lines of C++ libraries do."""
        return io.FileIO(self._pipe_descriptor, "w", closefd=False)

    def fileno(self) -> int:
        return self._pipe_descriptor

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: Any) -> None:
        """Accept the options of `io.TextIOWrapper.reconfigure`, and change nothing: objects are UTF-8, and whole."""

    def write(self, text: str, /) -> int:
        for message in self._messages.add(text):
            self._file.write(message)
        return len(text)

    def flush(self) -> None:
        """Write the text that is incomplete, such as `print(…, end="", flush=True)`, but not a progress bar."""
        message = self._messages.take()
        if message:
            self._file.write(message)

    def write_event(self, text: str, event: str, facts: Mapping[str, Any]) -> None:
        """Write the object of a line with its event and facts. `output.say` calls this."""
        self.flush()
        self._file.write(text, event, facts)

    @property
    def _messages(self) -> "MessageSplitter":
        """The text of this thread that is not written yet."""
        if not hasattr(self._of_thread, "messages"):
            self._of_thread.messages = MessageSplitter()
        return self._of_thread.messages


class MessageSplitter:
    """Divides text into messages: the lines that are written at once, or a traceback, which is written line by line.

    A progress bar, which is drawn again after each carriage return, becomes one message: its last state.
    """

    def __init__(self) -> None:
        self._line = ""
        """Text without a line end so far."""
        self._progress = ""
        """State of a progress bar that was flushed, with its carriage returns. It waits for the next state."""
        self._traceback = ""
        """Lines of a traceback whose last line has not come yet."""

    @property
    def is_incomplete(self) -> bool:
        """Whether there is text for `take` to return."""
        return bool(self._line or self._traceback)

    def add(self, text: str) -> list[str]:
        """Add a text and return the messages that it completes: none, one, or a progress bar and one."""
        messages = []
        if self._progress and text:
            messages = self._end_progress(text)

        self._line += text
        is_too_long = len(self._line) > MAX_MESSAGE_CHARACTERS
        if not self._line.endswith("\n") and not is_too_long:
            return messages

        lines = _last_state(self._line)
        self._line = ""
        is_in_traceback = bool(self._traceback) or TRACEBACK in lines
        self._traceback = f"{self._traceback}\n{lines}" if self._traceback else lines
        has_more = is_in_traceback and _is_within_traceback(lines)
        if has_more and len(self._traceback) <= MAX_MESSAGE_CHARACTERS:
            return messages
        message = self.take()
        return [*messages, message] if message else messages

    def take(self) -> str:
        """Return the text that waits for its end, which is then none. A progress bar goes on to wait."""
        if "\r" in self._line:
            self._progress = self._line
            self._line = ""
        return self._take_text()

    def take_all(self) -> str:
        """Return the text that waits, also a progress bar, because no more will come."""
        self._line = _last_state(self._progress + self._line)
        self._progress = ""
        return self._take_text()

    def _end_progress(self, text: str) -> list[str]:
        """Return the last state of a progress bar if `text` begins another line, and nothing if it draws the bar again.

        Bars return to the beginning of the line either before they are drawn (tqdm), or after.
        """
        is_line_end = not text.strip("\r\n") and "\n" in text
        is_drawn_again = self._progress.endswith("\r") or text.startswith("\r")
        state = _last_state(self._progress)
        self._progress = ""
        if not state.strip() or (is_drawn_again and not is_line_end):
            return []
        return [state]

    def _take_text(self) -> str:
        """Return the lines of a traceback and the incomplete line."""
        parts = [part for part in (self._traceback, self._line) if part.strip()]
        self._line = ""
        self._traceback = ""
        return "\n".join(parts)


def _last_state(text: str) -> str:
    """Return the lines of a text as a terminal shows them: a carriage return begins its line again."""
    lines = text.rstrip("\r\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _is_within_traceback(lines: str) -> bool:
    """Return whether more lines of a traceback follow these, which were written at once.

    The exception comes last and is not indented. Its further lines may be, as those of `Error(s) in loading state_dict
    for Model:`. Python writes them together with the first.
    """
    _, header, following = lines.rpartition(TRACEBACK)
    if not following.strip():
        return True
    was_written_at_once = bool(header)
    return not was_written_at_once and all(map(_is_indented, following.split("\n")))


def _is_indented(line: str) -> bool:
    """Return whether a line of a traceback is not its exception."""
    content = re.sub(rf"^{SPEAKER}", "", line)
    is_end_of_group = set(content.strip()) == {"+", "-"}  # the last line of an ExceptionGroup
    return not is_end_of_group and (not content.strip() or content.startswith((" ", "\t")))


class ObjectFile:
    """Writes objects to a descriptor, each in one call, so that those of several processes stay apart."""

    def __init__(self, descriptor: int):
        self._stream = StandardStream(descriptor, was_closed=False)
        self._stream.drops = True
        self._was_cut = False
        """Whether a disk that was full has taken only a part of the last line."""

    def write(self, text: str, event: str = "", facts: Mapping[str, Any] | None = None) -> None:
        """Write the object of a text."""
        self.write_line(build_object(text, event, facts or {}))

    def write_line(self, line: bytes) -> None:
        """Write an object that is built already, with its line end."""
        if self._was_cut:
            line = b"\n" + line
        num_written = self._stream.write(line)
        self._was_cut = num_written < len(line)


def build_object(text: str, event: str, facts: Mapping[str, Any]) -> bytes:
    """Build the line for a text: an object with its time, level, event, text, this process's labels and the facts.

    Control characters are escaped and credentials masked. If the line would be longer than MAX_OBJECT_BYTES, the middle
    of the text is left out, and also the facts if they leave no room for it.
    """
    text = printable(text, keep="\n\t").encode(errors="replace").decode()
    now = datetime.datetime.now(datetime.UTC)
    fields: dict[str, Any] = {
        "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level_of(text),
    }
    if event:
        fields["event"] = event
    fields["text"] = ""
    fields |= output.labels
    complete = fields | {key: _as_json_value(value) for key, value in facts.items()}

    room = MAX_OBJECT_BYTES - len(_encode(complete)) - len("\n")
    if room < MIN_TEXT_BYTES:
        complete = fields | {FACTS_LEFT_OUT: True}
        room = MAX_OBJECT_BYTES - len(_encode(complete)) - len("\n")
    complete["text"] = shorten_middle(text, room)
    return _encode(complete) + b"\n"


def shorten_middle(text: str, num_bytes: int) -> str:
    """Return a text that takes at most `num_bytes` within JSON, without a part of its middle if it is too long.

    A third of what stays is the beginning, because a traceback's end says more.
    """
    shortened = text
    num_kept = len(text)
    while True:
        size = len(_encode(shortened)) - len('""')
        if size <= num_bytes:
            return shortened
        if num_kept == 0:
            return ""
        num_kept = min(num_kept * num_bytes // size, num_kept - 1) - len(" … 12345 characters left out … ")
        num_kept = max(num_kept, 0)
        num_first = num_kept // 3
        num_last = num_kept - num_first
        left_out = f" … {len(text) - num_kept} characters left out … "
        shortened = text[:num_first] + left_out + text[len(text) - num_last :]


def level_of(text: str) -> str:
    """Return `error`, `warning` or `info` for a line, by its beginning and by the names that libraries give levels."""
    if IS_ERROR.match(text):
        return "error"
    return "warning" if IS_WARNING.match(text) else "info"


def text_of(line: str) -> str:
    """Return the text of a line that may be an object of this module."""
    content = _read_object(line)
    return line if content is None else content["text"]


def _read_object(line: str) -> dict[str, Any] | None:
    """Return the keys and values of a line that is an object of this module; None for any other line."""
    if not line.startswith(BEGINNING):
        return None
    with suppress(ValueError, RecursionError):
        content = json.loads(line)
        if isinstance(content.get("text"), str):
            return content
    return None


def rebuild_object(line: str) -> bytes:
    """Return the line of an object that another process of this run has built; empty for any other line.

    Anybody may print such a line, so credentials in it are masked as in other lines.
    """
    content = _read_object(line)
    if content is None or content.get("run") != output.labels.get("run"):
        return b""
    text = printable(content["text"], keep="\n\t").encode(errors="replace").decode()
    masked = {_as_json_value(key): _as_json_value(value) for key, value in content.items()} | {"text": text}
    rebuilt = _encode(masked) + b"\n"
    return rebuilt if len(rebuilt) <= MAX_OBJECT_BYTES else b""


def _as_json_value(value: Any) -> Any:
    """Return a fact as JSON can hold it: null for infinity and NaN, text without credentials, text for other types."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    return printable(str(value)).encode(errors="replace").decode()


def _encode(value: Any) -> bytes:
    """Return a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


# ------------------------------------------------------------------------------------- the process beside this one


def main() -> None:
    """Print an object for each line that comes through two pipes, until no process can write to them any more.

    The arguments are a JSON object of labels, and the descriptors of the pipes: for standard output, and for standard
    error.
    """
    labels, output_pipe, error_pipe = sys.argv[1:]
    output.labels.update(json.loads(labels))
    print_lines({int(output_pipe): LineSource(1), int(error_pipe): LineSource(2)})


def print_lines(sources: dict[int, "LineSource"]) -> None:
    """Print the lines that come through each pipe, until all of them are closed. `sources` is empty then."""
    while sources:
        is_waiting = any(source.is_incomplete for source in sources.values())
        ready, _, _ = select.select([*sources], [], [], PAUSE_SECONDS if is_waiting else None)
        for descriptor in ready:
            content = os.read(descriptor, READ_BYTES)
            if content:
                sources[descriptor].add(content)
            else:
                sources.pop(descriptor).end()

        # Each pipe has its own pause, because the other one may never have any.
        for source in sources.values():
            if source.is_incomplete and time.monotonic() - source.read_at >= PAUSE_SECONDS:
                source.print_rest()


class LineSource:
    """Lines of processes, on their way from a pipe to a standard stream."""

    def __init__(self, descriptor: int):
        """Print the objects to `descriptor`."""
        self._file = ObjectFile(descriptor)
        self._messages = MessageSplitter()
        self._rest = b""
        """Bytes of a line that has no end yet."""
        self.read_at = -math.inf
        """Time of the monotonic clock when the last bytes came."""

    @property
    def is_incomplete(self) -> bool:
        """Whether text waits for what follows."""
        return bool(self._rest) or self._messages.is_incomplete

    def add(self, content: bytes) -> None:
        """Print the lines that `content` completes."""
        self.read_at = time.monotonic()
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            self._print_line(line)
        if len(self._rest) > MAX_MESSAGE_CHARACTERS:
            self.print_rest()

    def print_rest(self) -> None:
        """Print text that waits for what follows, but not a progress bar."""
        self._add_rest()
        self._print(self._messages.take())

    def end(self) -> None:
        """Print all that waits, because no more will come."""
        self._add_rest()
        self._print(self._messages.take_all())

    def _add_rest(self) -> None:
        """Count a line without its end as text."""
        text = self._rest.decode(errors="replace")
        self._rest = b""
        for message in self._messages.add(text):
            self._print(message)

    def _print_line(self, line: bytes) -> None:
        """Print a line as an object, unless it is one."""
        text = line.decode(errors="replace")
        rebuilt = rebuild_object(text)
        if rebuilt:
            self._print(self._messages.take())
            self._file.write_line(rebuilt)
            return
        for message in self._messages.add(text + "\n"):
            self._print(message)

    def _print(self, message: str) -> None:
        """Print the object of a message, unless that is empty."""
        if message:
            self._file.write(message)


if __name__ == "__main__":
    main()
