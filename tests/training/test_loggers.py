import contextlib
import fcntl
import os
import struct
import sys
import termios

import pytest

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.launch.log_lines import console_line, duration_text, validation_losses
from llmfoundry_lite.training.mirrors import (
    ConsoleLine,
    ProgressBar,
    build_mirrors,
)
from llmfoundry_lite.training.run_folder import last_launch, log_until, take_over
from tests.helpers.reported import RECORD
from tests.helpers.tiny import tiny_config, write_config


def test_a_console_line_says_where_the_run_is():
    expected = "batch 20/800 · loss 4.1235 · lr 3.00e-04 · grad 0.50 · 12,346 tokens/s · ETA 1:02:05"
    assert console_line(RECORD, Duration.parse("800ba")) == expected
    assert console_line(RECORD, Duration.parse("1e6tok")).startswith("batch 20 · 8192/1000000tok · loss")
    assert duration_text(61) == "1:01"


def test_losses_of_tasks_are_no_validation_losses():
    record = {"eval/a/loss": 4.0, "eval/icl/jeopardy/loss": 3.0, "eval/loss": 2.0, "eval/a/bits_per_byte": 1.0}
    assert validation_losses(record) == {"a": 4.0, "": 2.0}


def test_the_console_speaks_at_its_interval_and_at_evaluations(capsys):
    console = ConsoleLine(Duration.parse("100ba"), Duration.parse("10ba"))
    for batch in range(1, 25):
        console({**RECORD, "batch": batch, **({"eval/loss": 3.0} if batch == 15 else {})})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["10/100", "15/100", "20/100"]


@pytest.fixture
def terminal():
    """Yield what a pseudo-terminal shows, its output, and a function that sets its width; it has none at first."""
    keyboard, descriptor = os.openpty()

    def set_width(columns):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    with open(keyboard, "rb", buffering=0) as shown, open(descriptor, "w", encoding="utf-8") as output:
        yield shown, output, set_width


def test_a_progress_bar_begins_where_the_run_does_and_lines_stand_above_it(terminal, monkeypatch, tmp_path):
    shown, output, set_width = terminal
    set_width(100)
    monkeypatch.setattr(sys, "stdout", output)
    bar = ProgressBar(Duration.parse("40ba"), lambda: 0.5)
    assert bar.bar.desc == "first batch"
    bar.bar.mininterval = 0
    bar.begin(tmp_path / "metrics.jsonl", [])
    bar(RECORD)
    print("saved ba8", flush=True)
    bar.close()
    assert sys.stdout is output
    output.close()
    content = b""
    with contextlib.suppress(OSError):  # EIO after all that was written
        while part := shown.read(4096):
            content += part
    *above, last, end = content.decode().split("\n")
    assert above[0].startswith("\r 50%|") and above[0].endswith(" \rsaved ba8\r") and len(above) == 1
    assert "| batch 20/40 · loss 4.1235" in last and ", batch" not in last and end == ""


def test_without_a_terminal_of_some_width_a_progress_bar_is_lines(tmp_path, data, terminal, monkeypatch):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(data, log_to_console=False, progress_bar=True))
    config = load_train_config([path], {}).config
    with open(tmp_path / "log", "w") as log:
        for output in (terminal[1], log):
            monkeypatch.setattr(sys, "stdout", output)
            assert isinstance(*build_mirrors(config, lambda: 0.0), ConsoleLine)


def test_a_torn_last_line_is_cut_off_before_more_is_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_launch(path) == 0
    path.write_text('{"batch": 1, "launch": 3}\n{"batch": 2, "lau')
    assert last_launch(path) == 3
    assert path.read_text() == '{"batch": 1, "launch": 3}\n'


def test_a_log_that_a_crash_has_torn_is_read_around(tmp_path):
    log = tmp_path / "metrics.jsonl"
    good = b'{"batch": 1, "launch": 1}\n'
    log.write_bytes(b"\0\0\0\n" + good + b'{"batch": 2, "launch": 2}\n[1]\n{"batch": 3, "lau')
    assert last_launch(log) == 2
    assert log_until(log, 1) == good
    assert take_over(log, good + b'{"batch": 2, "launch": 3}\n') == [{"batch": 2, "launch": 3}]


def test_a_log_that_came_along_voids_what_was_trained_here_instead(tmp_path):
    """Lines are taken over from the first that is not here, in order, so that the last line of a batch counts."""
    log = tmp_path / "metrics.jsonl"
    shared, ours = b'{"batch": 1, "launch": 1}\n', b'{"batch": 2, "launch": 2}\n{"batch": 3, "launch": 2}\n'
    log.write_bytes(shared + ours)
    theirs = [b'{"batch": 2, "launch": 2, "lr": 1}\n', ours.splitlines(keepends=True)[1]]
    assert take_over(log, shared + b"".join(theirs)) == [
        {"batch": 2, "launch": 2, "lr": 1},
        {"batch": 3, "launch": 2},
    ]
    assert log.read_bytes() == shared + ours + b"".join(theirs)
    assert take_over(log, shared + b"".join(theirs)) == []
