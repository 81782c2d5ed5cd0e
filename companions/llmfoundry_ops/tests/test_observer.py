"""The process beside a launch: it outlives a kill of rank 0, ends with the launch, and shows no secret."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llmfoundry_lite import launch_train
from llmfoundry_lite.config.callbacks_schema import AlertsConfig
from llmfoundry_lite.config.load_train import Observed
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks import status
from llmfoundry_lite.ranks.ending import raise_when_interrupted
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS
from llmfoundry_lite.ranks.status import read_status, write_status
from llmfoundry_ops.observer import MAX_DESCRIPTION_BYTES, _describe, describe_undelivered
from llmfoundry_ops.tests.receiving import receiving
from tests.helpers.launch import PATHS, ROOT
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

DEADLINE_SECONDS = 240
ALL = ["began", "restarted", "failed_saves", "no_progress", "loss_spike", "preempted", "failed", "ended"]


@pytest.fixture
def server():
    with receiving() as server:
        yield server


def begin(server, folder: Path, end: str, **options) -> subprocess.Popen[str]:
    arguments = [json.dumps(options), str(folder), end]
    return subprocess.Popen(
        [sys.executable, "-m", "llmfoundry_ops.tests.observed_launch", *arguments],
        env={**os.environ, "PYTHONPATH": PATHS, "HOOK": server.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_kill_of_the_launch_is_told_and_the_observer_ends(server, tmp_path):
    launch = begin(server, tmp_path / "tiny", "wait", events=ALL)
    server.wait_for("began")
    (observer,) = psutil.Process(launch.pid).children()
    assert os.getsid(observer.pid) != os.getsid(launch.pid)
    assert "hunter2" not in json.dumps(observer.cmdline())
    assert launch.stdout is not None and launch.stdout.readline() == "began\n"

    launch.send_signal(signal.SIGKILL)
    launch.communicate(timeout=DEADLINE_SECONDS)  # the observer does not keep the launch's output open
    alert = server.wait_for("failed")
    assert (alert["batch"], alert["last_saved"], alert["run"]) == (7, "ba5", "tiny")
    wait_until(lambda: not observer.is_running())
    assert server.events == ["began", "failed"]
    assert "hunter2" not in (tmp_path / "tiny/alerts.jsonl").read_text()


def test_what_the_observer_gets_fits_into_a_pipe(tmp_path):
    """A status.json of a megabyte, which anybody may have written, would otherwise block the launch."""
    strange = {"last_saved": "ba" + "1" * 300_000, "saved_at": "now", "notes": ["x" * 1000] * 100}
    write_status(tmp_path, "failed", 5, "out of memory " + "\N{SNOWMAN}" * 100_000, **strange)
    alerts = AlertsConfig(command=["true"])
    description = json.loads(_describe(Observed("tiny", tmp_path, alerts, None, "")))
    before = description["status_before"]
    assert (before["status"], before["batch"], before["last_saved"], before["saved_at"]) == ("failed", 5, None, None)
    assert before["reason"].startswith("out of memory ")
    assert len(json.dumps(description)) < MAX_DESCRIPTION_BYTES
    too_long = AlertsConfig(command=["true", "x" * MAX_DESCRIPTION_BYTES])
    with pytest.raises(OSError, match=r"alerts: the block has 7.* bytes as JSON, expected at most 65,536"):
        _describe(Observed("tiny", tmp_path, too_long, None, ""))


def test_the_end_is_told_before_the_launch_exits_and_sigterm_does_not_prevent_it(server, tmp_path):
    launch = begin(server, tmp_path / "tiny", "done", events=ALL)
    for child in psutil.Process(launch.pid).children():
        child.terminate()
    _, errors = launch.communicate(timeout=DEADLINE_SECONDS)
    assert (launch.returncode, errors) == (0, "")
    assert server.events == ["began", "ended"]


def test_a_receiver_that_refuses_is_told_on_the_console(server, tmp_path):
    server.codes = [404, 404]
    launch = begin(server, tmp_path / "tiny", "done", events=ALL)
    _, errors = launch.communicate(timeout=DEADLINE_SECONDS)
    assert errors.startswith("warning: alerts: 2 of 2 messages to webhook not delivered: the server answered 404; see ")
    assert launch.returncode == 0 and "hunter2" not in errors


def test_a_launch_that_leaves_during_its_imports_was_preempted(server, tmp_path):
    launch = begin(server, tmp_path / "tiny", "leave", events=ALL)
    launch.communicate(timeout=DEADLINE_SECONDS)
    assert launch.returncode == 75
    assert server.events == ["began", "preempted"]
    assert server.alerts[-1]["reason"] == "preempted by SIGTERM"


@pytest.mark.slow
def test_metrics_are_served_while_the_launch_runs_and_a_taken_port_is_one_line(server, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    launch = begin(server, tmp_path / "first", "wait", metrics_port=port)
    text = ""

    def is_answered() -> bool:
        nonlocal text
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        return "llmfoundry_batch" in text

    wait_until(is_answered)
    wait_until(lambda: is_answered() and 'llmfoundry_batch{run="first"} 7.0' in text)

    second = begin(server, tmp_path / "second", "wait", metrics_port=port)
    assert second.stderr is not None
    line = second.stderr.readline()
    assert re.fullmatch(rf"warning: no metrics: metrics_port: 127.0.0.1:{port}: .+; the run goes on\n", line)
    for process in (launch, second):
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)


@pytest.mark.slow
def test_a_receiver_that_hangs_delays_the_exit_by_seconds_alone(server, tmp_path):
    server.may_answer.clear()
    began_at = time.monotonic()
    launch = begin(server, tmp_path / "tiny", "done")
    launch.communicate(timeout=DEADLINE_SECONDS)
    assert launch.returncode == 0
    assert time.monotonic() - began_at < 60
    server.may_answer.set()
    server.wait_for("ended")


def test_messages_that_were_not_delivered_are_one_line_without_an_address(tmp_path):
    record = tmp_path / "alerts.jsonl"
    assert describe_undelivered(record, 0, is_late=False) == ""
    before = '{"receiver": "webhook", "of": "began", "error": "the server answered 500"}\n'
    ours = [{"event": "began"}, {"receiver": "webhook", "error": "the server answered 404"}]
    ours += [{"receiver": "webhook", "error": None}, {"receiver": "command", "error": None}]
    record.write_text(before + "".join(json.dumps(entry) + "\n" for entry in ours))
    line = describe_undelivered(record, len(before), is_late=False)
    assert line == f"alerts: 1 of 2 messages to webhook not delivered: the server answered 404; see {record}"
    record.write_text("")
    assert "is tried for another minute" in describe_undelivered(record, 0, is_late=True)


class SignalledObserver:
    """An observer of a launch that is asked to leave while it waits for the last alert."""

    def __init__(self, launch):
        pass

    def close(self, reason_to_leave=""):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_the_last_alert_is_sent_does_not_replace_the_error(monkeypatch):
    monkeypatch.setattr(launch_train, "read_unchecked", lambda *arguments, **named: {})
    monkeypatch.setattr(launch_train, "find_observed", lambda values: object())
    monkeypatch.setattr(launch_train.companions, "load", lambda *arguments: SignalledObserver)
    handlers_before = {number: signal.getsignal(number) for number in LEAVING_SIGNALS}
    raise_when_interrupted()
    try:
        with pytest.raises(ConfigError, match="unknown key"), launch_train.observed([], is_launcher=True):
            assert status.is_observed
            raise ConfigError("unknown key")
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
    assert launch_train.OBSERVED not in os.environ
    assert not status.is_observed


# ----------------------------------------------------------------------------------------------- real launches


def run(folder: Path, server, *arguments: str, num_ranks: int = 0) -> subprocess.Popen[str]:
    ranks = ("-n", str(num_ranks)) if num_ranks else ()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOOK": server.url}
    return subprocess.Popen(
        [sys.executable, "-m", "llmfoundry_lite", "train", *ranks, "run.yaml", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    changes = {"max_duration": "2000ba", "save_interval": "5ba", "save_num_checkpoints_to_keep": 2, "eval_interval": 0}
    config = tiny_config(write_data(folder / "data"), autoresume=True, **changes)
    write_config(folder / "run.yaml", {**config, "alerts": {"webhook": "${oc.env:HOOK}", "events": ALL}})
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_refused_and_resumed_tells_each_once(folder, server):
    run_folder = folder / "runs/tiny"
    launch = run(folder, server)
    wait_until(lambda: (read_status(run_folder) or {}).get("last_saved") is not None)
    launch.kill()
    launch.communicate(timeout=DEADLINE_SECONDS)
    alert = server.wait_for("failed")
    assert "killed or aborted" in alert["reason"] and alert["last_saved"].startswith("ba")
    assert alert["last_saved_age_seconds"] < 60

    # A wrong key is refused before anything starts, and a new run has no status yet.
    for number, arguments in enumerate((["model.d_modle=3"], ["model.d_modle=3", "run_name=new"])):
        launch = run(folder, server, *arguments)
        output, _ = launch.communicate(timeout=DEADLINE_SECONDS)
        assert launch.returncode == 2, output
        assert len(server.alerts) == 4 + 2 * number
        assert server.alerts[-1]["event"] == "failed" and "model.d_modle: unknown key" in server.alerts[-1]["reason"]

    launch = run(folder, server, "max_duration=60ba")
    output, _ = launch.communicate(timeout=DEADLINE_SECONDS)
    assert launch.returncode == 0, output
    assert server.events == ["began", "failed"] * 3 + ["began", "ended"]
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"hunter2" not in written and "hunter2" not in output
    assert b"${oc.env:HOOK}" in (run_folder / "config.yaml").read_bytes()


@pytest.mark.long
def test_a_rank_that_the_launcher_starts_again_is_a_restart(folder, server):
    run_folder = folder / "runs/pair"
    launch = run(folder, server, "run_name=pair", "max_duration=100ba", num_ranks=2)
    wait_until(lambda: (run_folder / "metrics.jsonl").exists() and len(read_metrics(run_folder)) > 8)
    running = json.loads((run_folder / "status.json").read_text())
    os.kill(running["process"]["pid"], signal.SIGKILL)
    output, _ = launch.communicate(timeout=DEADLINE_SECONDS)
    assert launch.returncode == 0, output
    assert server.events == ["began", "restarted", "ended"]
    assert len(values(read_metrics(run_folder), "loss/train/total")) == 100
