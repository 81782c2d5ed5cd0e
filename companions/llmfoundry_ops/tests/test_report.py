"""`llmfoundry-lite report` on runs that have failed, and on one that a relay has moved."""

import json
import re
import time
from xml.etree import ElementTree

import pytest

from llmfoundry_lite.report.report import report
from llmfoundry_ops.journal import append
from llmfoundry_ops.report import plot_time_line
from tests.helpers.reported import elapsed, on_cpu, record, write_run


def moved_by_a_relay(folder):
    """20 batches of 2 s: 5 at a, 5 at b after an allocation in vain, 5 at a, 5 that go on at b."""
    where = write_run(folder, [record(b) for b in range(1, 21)], [on_cpu(1, 20)])
    begun = {"turn": 0, "host": "h", "status_before": None}
    spans = [
        ("a", 0, 0, 20, 5),
        ("b", 20, 5, 10, 5),
        ("b", 40, 5, 20, 10),
        ("a", 70, 10, 20, 15),
        ("b", 90, 15, 20, None),
    ]
    for number, (site, began, from_batch, seconds, to_batch) in enumerate(spans, start=1):
        price = {"a": 36.0, "b": None if number == 2 else 18.0}[site]
        append(folder, number=number, site=site, began=1e9 + began, from_batch=from_batch, price=price, **begun)
        if to_batch is not None:
            ended, reason = ("failed", "no disk") if number == 2 else ("stopped", None)
            over = {"over": 1e9 + began + seconds, "to_batch": to_batch, "code": 0, "ended": ended, "reason": reason}
            append(folder, number=number, **over)
    return where


def test_a_relay_s_run_is_told_by_site_and_along_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time, "time", lambda: 1e9 + 110)
    (facts,) = report([moved_by_a_relay(tmp_path / "run")])["runs"]
    a, b = facts["relay"]["sites"]
    assert (a["num_allocations"], a["batches"], a["hours"] * 3600, a["training_hours"] * 3600) == pytest.approx(
        (2, 10, 40, 20)
    )
    assert a["utilisation"] == pytest.approx(0.5) and a["cost"] == pytest.approx(0.4)
    assert (b["num_allocations"], b["batches"], b["utilisation"], b["cost"]) == (3, 10, pytest.approx(20 / 50), None)
    assert facts["relay"]["idle_hours"] * 3600 == pytest.approx(20)  # 30 to 40, and 60 to 70
    output = capsys.readouterr().out
    assert re.search(r"^ *a +2 +10 +0:00:40 +0:00:20 +50% +0.4", output, re.M)
    assert re.search(r"^ *2 +b +- +0:00:20 +0:00:10 +failed: no disk", output, re.M)
    assert re.search(r"^ *5 +b +16-20 +0:01:30 +0:00:20 +running", output, re.M)
    assert "in 0:01:50 from the first launch on; no site had the run for 0:00:20\n" in output
    assert (tmp_path / "run/relay.png").stat().st_size > 10_000
    assert "![time line](relay.png)" in (tmp_path / "run/report.md").read_text()


def test_names_of_sites_are_drawn_as_text(tmp_path):
    name = "$x_{\x1b[31m\ud800"
    allocation = {"site": name, "began_hours": 0, "hours": 1, "first_batch": 1, "last_batch": 2}
    plot_time_line(tmp_path / "relay.svg", [allocation], title=name)
    ElementTree.parse(tmp_path / "relay.svg")
    assert "$x_{\\x1b[31m\\ud800" in (tmp_path / "relay.svg").read_text()


def event(status, batch, reason=None, has_begun=True):
    return {"time": 0.0, "status": status, "batch": batch, "reason": reason, "has_begun": has_begun, "host": "a"}


def failing(folder, events):
    """Saves after 10 and 20 that hold up for 1 s. Killed at 14, failed at 26, preempted after 24, done at 30: batches
    of 10 s, on two devices."""
    lines = []
    for launch, (first, last) in enumerate([(1, 14), (11, 26), (21, 24), (25, 30)], start=1):
        for b in range(first, last + 1):
            stall = {"checkpoint__stall_seconds": 1.0} if b % 10 == 0 else {}
            line = record(b, launch=launch, seconds=10.0, num_devices=2, **stall)
            lines.append(line | elapsed(b - first + 1, 10.0))
    where = write_run(folder, lines, save_interval="10ba")
    (folder / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    return where


def test_failures_are_counted_with_what_they_cost_and_how_often_to_save(tmp_path):
    events = [event("running", 0), event("running", 10), event("failed", 26, "cuda:1 is gone")]
    events += [
        event("failed", 26, "disk full", has_begun=False),
        event("running", 20),
        event("failed", 24, "SIGBUS"),
    ]
    events += [event("running", 24), event("done", 30)]
    facts = report([failing(tmp_path / "run", events)])["runs"][0]["failures"]
    assert [(x["first_batch"], x["last_batch"], x["ended"], x["batches_lost"]) for x in facts["launches"]] == [
        (1, 14, "killed without a word", 4),
        (11, 26, "failed", 6),
        (None, None, "never began", 0),
        (21, 24, "failed", 0),
        (25, 30, "done", 0),
    ]
    assert (facts["num_failures"], facts["batches_lost"]) == (3, 10)
    assert facts["device_hours_lost"] == pytest.approx(10 * 10 * 2 / 3600)
    assert facts["hours_between_failures"] == pytest.approx(400 / 3 / 3600)
    assert facts["save_every_seconds"] == pytest.approx(15.67, abs=0.01)
    assert facts["save_every_batches"] == 2
    page = (tmp_path / "run/report.md").read_text()
    assert "| 2 | 11-26 | 0:02:40 | failed: cuda:1 is gone | 6 | 0.0333 |" in page
    assert "5 launches: 1 killed without a word, 2 failed, 1 never began, 1 done; 10 batches and" in page
    assert "mean time between failures 0:02:13: 3 failures in 0:06:40 of training" in page
    assert "save every 0:00:16, 2 batches (Daly 2006); save_interval is 10ba" in page


def test_launches_that_ran_elsewhere_failed_if_they_lost_batches(tmp_path):
    facts = report([failing(tmp_path / "run", [])])["runs"][0]["failures"]
    assert facts["causes"] == {"not known here": 4}
    assert (facts["num_failures"], facts["batches_lost"]) == (2, 10)
    page = (tmp_path / "run/report.md").read_text()
    assert "- 2 failures in 0:06:40 of training\n" in page and "Daly" not in page, "two failures make no mean"
    assert (facts["hours_between_failures"], facts["save_every_seconds"]) == (None, None)
    lines = [record(1), record(2, launch=2) | elapsed(1, 2.0)]
    facts = report([write_run(tmp_path / "sound", lines)])["runs"][0]["failures"]
    assert (facts["num_failures"], facts["hours_between_failures"], facts["save_every_seconds"]) == (0, None, None)
    assert "no failure in 0:00:04 of training" in (tmp_path / "sound/report.md").read_text()
