"""`console_format: json`: every line is one JSON object, whoever prints it."""

import json
import os
import subprocess
import sys
import threading
import traceback

import pytest

from llmfoundry_lite.config.load_train import is_console_json, read_unchecked
from llmfoundry_lite.ranks import output
from llmfoundry_ops import console
from llmfoundry_ops.console import (
    FACTS_LEFT_OUT,
    MAX_OBJECT_BYTES,
    JsonText,
    LineSource,
    MessageSplitter,
    build_object,
    level_of,
    text_of,
)
from tests.helpers.launch import PATHS

HEADER = "Traceback (most recent call last):"
TRACEBACK = [HEADER, "  File x", "KeyError: 1"]
SIZE_MISMATCH = f"{HEADER}\n  File x\nRuntimeError: Error(s) in loading:\n\tsize mismatch"


@pytest.fixture
def stream(tmp_path, monkeypatch):
    """A stream of JSON, and a function that returns the objects that were written."""
    monkeypatch.setattr(output, "labels", {"run": "mpt", "rank": 0})
    path = tmp_path / "console.txt"
    with path.open("ab", buffering=0) as file:
        stream = JsonText(file.fileno(), file.fileno())
        stream.written = lambda: [json.loads(line) for line in path.read_bytes().splitlines()]
        yield stream


def texts(objects):
    return [one["text"] for one in objects]


def test_a_line_has_its_time_level_and_labels(stream):
    print("warning: the disk is full", file=stream)
    (line,) = stream.written()
    assert line.pop("time").endswith("Z")
    assert line == {"level": "warning", "text": "warning: the disk is full", "run": "mpt", "rank": 0}


def test_an_event_brings_its_facts_and_numbers_that_json_lacks_are_null(stream):
    output.labels["batch"] = 3
    output.say("batch 4 · loss nan", "batch", {"batch": 4, "loss/train/total": float("nan"), "lr": 1e-3}, file=stream)
    (line,) = stream.written()
    assert (line["event"], line["batch"], line["loss/train/total"], line["lr"]) == ("batch", 4, None, 1e-3)


def test_events_print_text_where_the_console_is_text(capsys):
    output.say("saved ba4", "saved", {"batch": 4})
    output.tell("the run is done", "ended")
    assert capsys.readouterr().out == "saved ba4\n"


def test_a_traceback_is_one_object(stream):
    try:
        raise ValueError("no such batch")
    except ValueError:
        traceback.print_exc(file=stream)
    print("goes on", file=stream)
    first, second = stream.written()
    assert first["level"] == "error"
    assert first["text"].startswith("Traceback") and first["text"].endswith("\nValueError: no such batch")
    assert second["text"] == "goes on"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["a\nb", "\n"], ["a\nb"]),
        (["one ", "line", "\n", "\n", "another\n"], ["one line", "another"]),
        (["\r10 %", "\r20 %", "\n"], ["20 %"]),
        (["one\r\ntwo\r\n"], ["one\ntwo"]),
        ([SIZE_MISMATCH + "\n", "step 5\n"], [SIZE_MISMATCH, "step 5"]),
        ([f"{HEADER}\n  File x\n", "step 5\n"], [f"{HEADER}\n  File x", "step 5"]),
        ([*SIZE_MISMATCH.splitlines(keepends=True)[:2], "E: 1\n\tx\n", "5\n"], [f"{HEADER}\n  File x\nE: 1\n\tx", "5"]),
        ([f"  | {HEADER}\n", "  | File x\n", "  +-----\n", "5\n"], [f"  | {HEADER}\n  | File x\n  +-----", "5"]),
        ([f"[rank1]: {line}\n" for line in TRACEBACK], ["\n".join(f"[rank1]: {line}" for line in TRACEBACK)]),
        (["x" * 70_000, "y\n"], ["x" * 70_000, "y"]),
    ],
)
def test_text_is_divided_into_messages(written, expected):
    messages = MessageSplitter()
    found = [message for text in written for message in messages.add(text)]
    assert found == expected
    assert not messages.is_incomplete


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["\r10 %", "\r20 %", "\n", "done\n"], ["20 %", "done"]),
        (["10 %\r", "20 %\r", "\n", "done\n"], ["20 %", "done"]),
        (["\r10 %", "error: full", "\n"], ["10 %", "error: full"]),
        (["\r10 %", "\r    \r", "done\n"], ["done"]),
    ],
)
def test_a_progress_bar_that_is_flushed_is_one_object(stream, written, expected):
    for text in written:
        print(text, end="", file=stream, flush=True)
    assert texts(stream.written()) == expected


@pytest.mark.parametrize("end", [[b"\n"], []])
def test_a_progress_bar_of_a_child_is_one_object(stream, end):
    source = LineSource(stream.fileno())
    for content in (b"\r10 %", b"\r20 %", *end):
        source.add(content)
        source.print_rest()
    source.end()
    assert texts(stream.written()) == ["20 %"]


def test_an_incomplete_line_waits_for_no_pause_of_the_other_pipe(tmp_path, monkeypatch):
    """Standard output is busy; a line without an end on standard error is printed in the midst of it."""
    monkeypatch.setattr(console, "PAUSE_SECONDS", 0.0)
    files = [os.open(tmp_path / "console.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND) for _ in range(2)]
    busy, quiet = os.pipe(), os.pipe()
    os.write(quiet[1], b"continue? ")
    os.write(busy[1], b"1\n2\n3\n4\n")
    os.close(busy[1])

    def read_a_line(descriptor, num_bytes, read=os.read):
        content = read(descriptor, 10 if descriptor == quiet[0] else 2)
        if descriptor == busy[0] and not content:
            os.close(quiet[1])
        return content

    monkeypatch.setattr(console.os, "read", read_a_line)
    console.print_lines({busy[0]: LineSource(files[0]), quiet[0]: LineSource(files[1])})
    assert texts(map(json.loads, (tmp_path / "console.txt").read_text().splitlines())) == [
        *("1", "continue? ", "2", "3", "4")
    ]


def test_programs_may_ask_the_stream_for_its_name_and_reconfigure_it(stream):
    stream.reconfigure(encoding="latin-1", line_buffering=True)
    print("é", file=stream)
    assert texts(stream.written()) == ["é"] and isinstance(stream.name, str)


def test_threads_do_not_mix_their_lines(stream):
    print("begun", end="", file=stream)
    other = threading.Thread(target=lambda: print("of another thread", file=stream))
    other.start()
    other.join()
    stream.flush()
    assert texts(stream.written()) == ["of another thread", "begun"]


@pytest.mark.parametrize("text", ["é" * 10_000, "\x1b[2J\x9b\udc80" * 3000, '"\\\n' * 5000, "short", ""])
@pytest.mark.parametrize("num_facts", [0, 40, 4000])
def test_a_line_is_bounded_and_valid_whatever_is_in_it(text, num_facts):
    line = build_object(text, "batch", {f"eval/{number}/loss": 1 / 3 for number in range(num_facts)})
    assert len(line) <= MAX_OBJECT_BYTES and line.count(b"\n") == 1 and b"\x1b" not in line
    content = json.loads(line)
    assert (FACTS_LEFT_OUT in content) == (num_facts == 4000)
    assert content["text"] == text or "characters left out" in content["text"]


def test_the_end_of_a_long_text_is_kept():
    content = json.loads(build_object("Traceback" + "x" * 10_000 + "\nKeyError: 'the cause'", "", {}))
    assert content["text"].startswith("Traceback") and content["text"].endswith("KeyError: 'the cause'")


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("error: data/c4: missing", "error"),
        ("rank 3: error: no space left", "error"),
        ("torch.OutOfMemoryError: CUDA out of memory", "error"),
        ("ERROR:composer.core: a callback failed", "error"),
        ("[E1130 12:00:00 ProcessGroupNCCL.cpp:616] timeout", "error"),
        ("[W1130 12:00:00 socket.cpp:752] no hostname", "warning"),
        ("/x/y.py:3: UserWarning: deprecated", "warning"),
        ("launcher: warning: slow", "warning"),
        ("batch 4/8 · loss 2.0 · failed saves 1", "info"),
        ("exported to runs/errors/huggingface", "info"),
    ],
)
def test_the_level_of_a_line_follows_from_its_text(text, level):
    assert level_of(text) == level


def test_a_full_disk_never_puts_two_objects_on_one_line(tmp_path, monkeypatch):
    """A disk may take a part of a line. The next one begins on a line of its own."""
    stream = JsonText(os.open(tmp_path / "console.txt", os.O_CREAT | os.O_WRONLY), 2)
    write_all = output.StandardStream.write
    monkeypatch.setattr(output.StandardStream, "write", lambda self, line: write_all(self, line[:20]))
    print("lost", file=stream)
    monkeypatch.undo()
    print("kept", file=stream)
    lines = (tmp_path / "console.txt").read_text().splitlines()
    assert len(lines) == 2 and text_of(lines[1]) == "kept"


def test_objects_of_this_run_pass_the_process_beside_a_launcher(stream):
    """Their credentials are masked. Objects of other runs, and what only begins as one, are text."""
    source = LineSource(stream.fileno())
    line = build_object("rank 0 speaks\n\tof é", "saved", {"batch": 4, "checkpoint": "a\\nb", "seconds": float("inf")})
    others = [
        b'{"time": "", "text": "ended", "run": "other"}',
        b'{"time": "' + b"[" * 2000,
        b'{"time": "", "x": ' + b"[" * 60_000,
    ]
    leaking = b'{"time": "", "text": "https://me:secret@host", "run": "mpt", "url": "s3://me:secret@host"}'
    source.add(line + b"\n".join([leaking, *others, b""]))
    first, second, *foreign = stream.written()
    assert first == json.loads(line) and not source.is_incomplete
    assert second["text"] == "https://me:***@host" and second["url"] == "s3://me:***@host"
    assert [one["run"] for one in foreign] == ["mpt"] * len(others)
    assert foreign[0]["text"] == others[0].decode()


PRINTS = """
import os, subprocess, sys, warnings
from llmfoundry_ops.console import use_json
finish = use_json({"run": "mpt"})
print("from Python")
os.write(1, b"[W1130 from C++\\nand another line\\n")
subprocess.run(["sh", "-c", "echo from a child >&2"])
sys.stdout.buffer.write(b"bytes\\n")
warnings.warn("from a module")
print("the rest", end="")
sys.stdout.flush()
%s
"""


@pytest.mark.parametrize("end", ["finish()", "os.abort()"])
def test_lines_of_libraries_and_children_are_json_too(end):
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-X", "faulthandler", "-c", PRINTS % end]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in (result.stdout + result.stderr).splitlines()]
    assert {line["run"] for line in lines} == {"mpt"}
    assert sorted(texts(map(json.loads, result.stdout.splitlines()))) == [
        *("[W1130 from C++", "and another line", "bytes", "from Python", "the rest")
    ]
    errors = texts(map(json.loads, result.stderr.splitlines()))
    assert "from a child" in errors and any("UserWarning: from a module" in text for text in errors)
    assert any("Aborted" in text for text in errors) == (end == "os.abort()")


def test_a_rank_that_ends_waits_until_the_lines_of_libraries_are_printed(tmp_path):
    """If it is the first process of a container, the process beside it ends with it."""
    program = """
import atexit, os
from llmfoundry_lite.launch_train import use_json_console
use_json_console("mpt", is_launcher=False)
atexit.register(os.write, 1, b"from an exit handler")
"""
    path = tmp_path / "console.txt"
    with path.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": PATHS}, stdout=file, check=True
        )
    assert json.loads(path.read_text())["text"] == "from an exit handler"


def test_the_format_is_found_also_where_another_key_is_refused():
    for argument, is_json in {"console_format=json": True, "seed=1": False, "console_format=jsn": False}.items():
        values = read_unchecked(["mpt-quickstart", argument, "no_such_key=1"], {})
        assert values is not None and is_console_json(values) == is_json
    assert read_unchecked(["no-such-file", "console_format=json"], {}) is None
