"""the start benchmark: what it waits for, and one small round of it."""

import json
import os
import sys

import psutil
import pytest

from benchmarks import Log, start
from llmfoundry_lite.errors import DataError


def test_a_log_is_read_as_it_grows(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.path.write_text('{"batch": 1}\n{"bat')
    assert log.read() == [{"batch": 1}]
    with log.path.open("a") as file:
        file.write('ch": 2}\n')
    assert log.read() == [{"batch": 1}, {"batch": 2}]


def test_the_clock_stops_when_it_is_there_and_no_process_is_left(tmp_path):
    sign = tmp_path / "child"
    begin_child = "import subprocess; child = subprocess.Popen(['sleep', '1000'])"
    program = f"{begin_child}; open({str(sign)!r}, 'w').write(str(child.pid)); child.wait()"
    command = [sys.executable, "-c", program]
    seconds = start.time_until(
        lambda: sign.exists() and bool(sign.read_text()), command, dict(os.environ), tmp_path / "out"
    )
    assert seconds > 0
    assert not psutil.pid_exists(int(sign.read_text()))


def test_a_launcher_that_ends_before_is_an_error_with_its_last_words(tmp_path):
    command = [sys.executable, "-c", "print('no such run')"]
    with pytest.raises(DataError, match="came to no batch: no such run"):
        start.time_until(lambda: False, command, dict(os.environ), tmp_path / "out")


@pytest.mark.long
def test_each_launcher_carries_the_run_on(tmp_path):
    start.run("tiny", 64, num_rounds=1, out=tmp_path)
    rows = json.loads((tmp_path / "start.json").read_text())["tables"][0]["rows"]
    assert [row[0] for row in rows] == [start.IMPORT, *start.LAUNCHERS]
