"""`llmfoundry-lite report` on a run that a relay has moved."""

import re
import time
from xml.etree import ElementTree

import pytest

from llmfoundry_lite.report.report import report
from llmfoundry_ops.journal import append
from llmfoundry_ops.report import plot
from tests.helpers.reported import on_cpu, record, write_run


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
    plot(tmp_path / "relay.svg", [allocation], title=name)
    ElementTree.parse(tmp_path / "relay.svg")
    assert "$x_{\\x1b[31m\\ud800" in (tmp_path / "relay.svg").read_text()
