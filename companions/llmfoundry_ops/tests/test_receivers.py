"""Delivery of messages: a receiver that is down, slow or wrong delays nothing, and no text of a run is interpreted."""

import json
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from llmfoundry_ops import receivers
from llmfoundry_ops.alerts import Facts, Messages
from llmfoundry_ops.receivers import LastingError, Receiver, UndeliveredError, notify, post, run_command
from llmfoundry_ops.tests.receiving import receiving

FACTS = Facts(batch=230, launch=3, last_saved="ba200", saved_at=1.0)
HOSTILE = "$(touch owned) `touch owned`; touch owned \x1b[2J \n"


@pytest.fixture
def server():
    with receiving() as server:
        yield server


@pytest.fixture
def alert(tmp_path):
    return Messages("tiny", tmp_path / "run", ["failed"]).tell("failed", FACTS, HOSTILE)


class Notes(list):
    """Entries of the record."""

    def __init__(self):
        super().__init__()
        self.has_changed = threading.Condition()

    def __call__(self, entry):
        with self.has_changed:
            self.append(entry)
            self.has_changed.notify_all()

    def wait(self, count=1):
        with self.has_changed:
            assert self.has_changed.wait_for(lambda: len(self) >= count, 60)
        return [entry["error"] for entry in self]


def test_a_webhook_gets_the_documented_keys(server, alert):
    post(server.url, alert)
    (content,) = server.alerts
    assert content["last_saved_age_seconds"] > 0
    content.pop("last_saved_age_seconds"), content.pop("time"), content.pop("text")
    assert content == {
        "event": "failed",
        "run": "tiny",
        "run_folder": alert.run_folder,
        "host": alert.host,
        "launch": 3,
        "batch": 230,
        "reason": "$(touch owned) `touch owned`; touch owned \\x1b[2J \\n",
        "last_saved": "ba200",
        "next": "remove the cause, then run the same command again",
    }


def test_a_server_that_is_down_for_a_moment_gets_the_message_later(server, alert, monkeypatch):
    monkeypatch.setattr(receivers, "PAUSES_SECONDS", (0.01,))
    server.codes = [503, 429]
    notes = Notes()
    Receiver("webhook", partial(post, server.url), notes).put(alert)
    assert notes.wait() == [None]
    assert server.events == ["failed"]


@pytest.mark.parametrize("code", [404, 301, 302])
def test_a_wrong_address_is_not_tried_again(server, alert, code):
    server.codes = [code]
    with pytest.raises(LastingError, match=f"the server answered {code}"):
        post(server.url, alert)
    assert server.alerts == []


def test_a_receiver_that_is_gone_ends_with_the_launch_and_is_recorded_without_its_address(alert):
    with receiving() as server:
        url = server.url
    notes = Notes()
    receiver = Receiver("webhook", partial(post, url), notes)
    receiver.put(alert)
    receiver.close(time.monotonic())
    receiver.join(30)
    (error,) = notes.wait()
    assert "Connection refused" in error and "hunter2path" not in error


def test_a_receiver_that_hangs_delays_no_other(server, alert, monkeypatch):
    monkeypatch.setattr(receivers, "ATTEMPT_SECONDS", 0.2)
    server.may_answer.clear()
    slow_notes, notes = Notes(), Notes()
    slow = Receiver("webhook", partial(post, server.url), slow_notes)
    slow.put(alert)
    Receiver("command", partial(run_command, ["true"]), notes).put(alert)
    assert notes.wait() == [None]
    slow.close(time.monotonic())
    slow.join(30)
    (error,) = slow_notes.wait()
    assert error.startswith("the server did not answer within 0.2 s, ") and error.endswith("; it may have arrived")


def test_a_server_that_answers_too_late_gets_a_message_three_times_and_then_the_next(server, alert, monkeypatch):
    monkeypatch.setattr(receivers, "ATTEMPT_SECONDS", 0.1)
    monkeypatch.setattr(receivers, "PAUSES_SECONDS", (0.01,))
    server.may_answer.clear()
    notes = Notes()
    receiver = Receiver("webhook", partial(post, server.url), notes)
    receiver.put(alert)
    receiver.put(alert)
    assert len(notes.wait(2)) == 2
    server.may_answer.set()
    with server.has_changed:
        assert server.has_changed.wait_for(lambda: len(server.alerts) >= 6, 60)
    assert len(server.alerts) == 6
    assert notes[0]["error"] == "the server did not answer within 0.1 s, 3 times; it may have arrived"


def test_after_the_end_old_messages_do_not_delay_the_last(alert, monkeypatch):
    monkeypatch.setattr(receivers, "PAUSES_SECONDS", (0.01,))
    monkeypatch.setattr(receivers, "OLD_SECONDS", 0.05)
    tried, notes = [], Notes()

    def send(alert):
        tried.append(alert.event)
        if alert.event != "ended":
            raise UndeliveredError("the server answered 503")

    receiver = Receiver("webhook", send, notes)
    for event in ("began", "failed_saves", "ended"):
        receiver.put(replace(alert, event=event))
    receiver.close(time.monotonic() + 60)
    receiver.join(30)
    first, second, last = notes.wait(3)
    assert first == "the server answered 503" and "left out for the messages after it" in second and last is None
    assert {*tried} == {"began", "ended"}


def test_a_program_gets_the_message_and_no_shell_reads_it(tmp_path, alert, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    lines = ("#!/bin/sh", "cat > stdin.json", 'printf %s "$LLMFOUNDRY_ALERT_TEXT" > text', 'echo "$# $RANK" > count')
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("RANK", "0")
    run_command([str(program), "$(touch owned)"], alert)
    assert json.loads((tmp_path / "stdin.json").read_text())["batch"] == 230
    assert (tmp_path / "text").read_text() == alert.text
    assert (tmp_path / "count").read_text() == "1 \n"
    assert not (tmp_path / "owned").exists()


def test_a_long_reason_is_cut_so_that_a_program_can_be_started(tmp_path):
    alert = Messages("tiny", tmp_path / "run", ["failed"]).tell("failed", FACTS, "x" * (1 << 20))
    assert alert is not None and len(alert.reason or "") == 2000
    run_command(["true"], alert)


def test_a_program_that_fails_or_hangs_or_is_missing_is_said(alert, monkeypatch):
    with pytest.raises(UndeliveredError, match="it ended with 3"):
        run_command(["sh", "-c", "exit 3"], alert)
    monkeypatch.setattr(receivers, "COMMAND_SECONDS", 0.2)
    with pytest.raises(UndeliveredError, match="was killed"):
        run_command(["sh", "-c", "sleep 60 & wait"], alert)
    with pytest.raises(OSError, match="No such file"):
        run_command(["no-such-program"], alert)


def test_apprise_knows_the_receiver_by_its_address(server, alert):
    pytest.importorskip("apprise")
    notify(server.url.replace("http://", "json://"), alert)
    assert server.alerts[0]["title"] == "tiny: failed" and alert.text in server.alerts[0]["message"]
    with pytest.raises(LastingError, match="does not know"):
        notify("nonsense", alert)
