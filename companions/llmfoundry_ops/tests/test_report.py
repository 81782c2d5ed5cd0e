"""`llmfoundry-lite report` on runs that have failed, and on one that a relay has moved."""

import io
import json
import re
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmfoundry_lite.report.report import report
from llmfoundry_ops.journal import append
from llmfoundry_ops.report import plot_time_line
from tests.helpers.reported import elapsed, on_cpu, record, write_run

NON_TRIVIAL_IMAGE_BYTES = 10_000


@dataclass(kw_only=True)
class ReportOnRun:
    """What a report on one run has written."""

    facts: dict[str, Any]
    """The run's part of report.json."""
    printed: str
    page: str
    """Content of report.md."""
    folder: Path


def report_on(run: str) -> ReportOnRun:
    with redirect_stdout(io.StringIO()) as printed:
        (facts,) = report([run])["runs"]
    folder = Path(run)
    return ReportOnRun(facts=facts, printed=printed.getvalue(), page=(folder / "report.md").read_text(), folder=folder)


# ------------------------------------------------------------------------------------ a run that a relay has moved

FIRST_LAUNCH = 1e9
"""Seconds since 1970. Other times of the relay are seconds after it."""
NOW = 110
DOLLARS_OF_A = 36.0
DOLLARS_OF_B = 18.0
"""Prices of an hour at each site."""


def begin_allocation(folder, number, site, *, seconds, from_batch, price):
    began = FIRST_LAUNCH + seconds
    unused = {"turn": 0, "host": "h", "status_before": None}
    append(folder, number=number, site=site, began=began, from_batch=from_batch, price=price, **unused)


def end_allocation(folder, number, *, seconds, to_batch, ended="stopped", reason=None):
    over = FIRST_LAUNCH + seconds
    append(folder, number=number, over=over, to_batch=to_batch, code=0, ended=ended, reason=reason)


def write_relayed_run(folder) -> str:
    """20 batches of 2 s: 5 at a, 5 at b after an allocation in vain, 5 at a, and 5 at b, which still runs."""
    run = write_run(folder, [record(batch) for batch in range(1, 21)], [on_cpu(1, 20)])
    begin_allocation(folder, 1, "a", seconds=0, from_batch=0, price=DOLLARS_OF_A)
    end_allocation(folder, 1, seconds=20, to_batch=5)
    begin_allocation(folder, 2, "b", seconds=20, from_batch=5, price=None)
    end_allocation(folder, 2, seconds=30, to_batch=5, ended="failed", reason="no disk")
    # From 30 to 40 no site has the run.
    begin_allocation(folder, 3, "b", seconds=40, from_batch=5, price=DOLLARS_OF_B)
    end_allocation(folder, 3, seconds=60, to_batch=10)
    # Nor from 60 to 70.
    begin_allocation(folder, 4, "a", seconds=70, from_batch=10, price=DOLLARS_OF_A)
    end_allocation(folder, 4, seconds=90, to_batch=15)
    begin_allocation(folder, 5, "b", seconds=90, from_batch=15, price=DOLLARS_OF_B)
    return run


@pytest.fixture(scope="module")
def relayed(tmp_path_factory) -> ReportOnRun:
    """The report on the run above, made while its last allocation has run for 20 s."""
    run = write_relayed_run(tmp_path_factory.mktemp("relayed") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: FIRST_LAUNCH + NOW)
        return report_on(run)


def test_the_hours_and_batches_of_a_site_are_added_up(relayed):
    site_a, _ = relayed.facts["relay"]["sites"]
    assert site_a["num_allocations"] == 2
    assert site_a["batches"] == 10
    assert site_a["hours"] * 3600 == pytest.approx(20 + 20)
    assert site_a["training_hours"] * 3600 == pytest.approx(10 * 2)


def test_the_utilisation_of_a_site_is_its_share_of_training(relayed):
    site_a, _ = relayed.facts["relay"]["sites"]
    assert site_a["utilisation"] == pytest.approx(20 / 40)


def test_a_site_costs_its_price_for_all_hours_that_it_had_the_run(relayed):
    site_a, _ = relayed.facts["relay"]["sites"]
    assert site_a["cost"] == pytest.approx(DOLLARS_OF_A * 40 / 3600)


def test_an_allocation_in_vain_and_one_that_runs_are_counted(relayed):
    _, site_b = relayed.facts["relay"]["sites"]
    assert site_b["num_allocations"] == 3
    assert site_b["batches"] == 10
    assert site_b["utilisation"] == pytest.approx(20 / (10 + 20 + 20))


def test_a_site_has_no_cost_if_one_of_its_allocations_has_no_price(relayed):
    _, site_b = relayed.facts["relay"]["sites"]
    assert site_b["cost"] is None


def test_time_in_which_no_site_had_the_run_is_idle(relayed):
    assert relayed.facts["relay"]["idle_hours"] * 3600 == pytest.approx(10 + 10)
    assert "in 0:01:50 from the first launch on; no site had the run for 0:00:20\n" in relayed.printed


def test_a_relay_s_sites_are_printed_as_a_table(relayed):
    assert re.search(r"^ *a +2 +10 +0:00:40 +0:00:20 +50% +0.4", relayed.printed, re.M)


def test_a_relay_s_allocations_are_printed_with_how_they_ended(relayed):
    assert re.search(r"^ *2 +b +- +0:00:20 +0:00:10 +failed: no disk", relayed.printed, re.M)
    assert re.search(r"^ *5 +b +16-20 +0:01:30 +0:00:20 +running", relayed.printed, re.M)


def test_the_page_shows_a_relay_along_time(relayed):
    assert "![time line](relay.png)" in relayed.page
    assert (relayed.folder / "relay.png").stat().st_size > NON_TRIVIAL_IMAGE_BYTES


def test_names_of_sites_are_drawn_as_text(tmp_path):
    """A name may hold a formula's beginning, an escape sequence and half of a surrogate pair."""
    name = "$x_{\x1b[31m\ud800"
    allocation = {"site": name, "began_hours": 0, "hours": 1, "first_batch": 1, "last_batch": 2}
    figure = tmp_path / "relay.svg"
    plot_time_line(figure, [allocation], title=name)
    ElementTree.parse(figure)
    assert "$x_{\\x1b[31m\\ud800" in figure.read_text()


# ------------------------------------------------------------------------------------- a run that failed and went on

BATCH_SECONDS = 10.0
NUM_DEVICES = 2
BATCHES_OF_LAUNCHES = [(1, 14), (11, 26), (21, 24), (25, 30)]
"""First and last batch. Each launch goes on from the newest save: after 10, after 20, and one at the end of 24."""
TRAINED_SECONDS = (14 + 16 + 4 + 6) * BATCH_SECONDS
BATCHES_LOST = [4, 6, 0, 0]
"""Batches that each launch trained after the save from which the next one goes on."""


def event(status, batch, reason=None, has_begun=True) -> dict[str, Any]:
    """A line of launches.jsonl, which a launch writes when it begins and when it ends."""
    return {"time": 0.0, "status": status, "batch": batch, "reason": reason, "has_begun": has_begun, "host": "a"}


def write_failing_run(folder, events) -> str:
    """30 batches in four launches, on two devices. A save after 10 and one after 20 hold training up for 1 s each."""
    lines = []
    for launch, (first, last) in enumerate(BATCHES_OF_LAUNCHES, start=1):
        for batch in range(first, last + 1):
            has_save = batch % 10 == 0
            stall = {"checkpoint__stall_seconds": 1.0} if has_save else {}
            line = record(batch, launch=launch, seconds=BATCH_SECONDS, num_devices=NUM_DEVICES, **stall)
            lines.append(line | elapsed(batch - first + 1, BATCH_SECONDS))
    run = write_run(folder, lines, save_interval="10ba")
    (folder / "launches.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in events))
    return run


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> ReportOnRun:
    """The report on the run above, of which five launches have told how they began and ended."""
    events = [
        event("running", 0),  # and it is killed without a word
        event("running", 10),
        event("failed", 26, "cuda:1 is gone"),
        event("failed", 26, "disk full", has_begun=False),
        event("running", 20),
        event("failed", 24, "SIGBUS"),
        event("running", 24),
        event("done", 30),
    ]
    return report_on(write_failing_run(tmp_path_factory.mktemp("failed") / "run", events))


@pytest.fixture(scope="module")
def failed_elsewhere(tmp_path_factory) -> ReportOnRun:
    """The report on the same run, on a machine where no launch has left a line."""
    return report_on(write_failing_run(tmp_path_factory.mktemp("elsewhere") / "run", events=[]))


def test_launches_are_listed_with_their_batches(failed):
    launches = failed.facts["failures"]["launches"]
    assert [launch["first_batch"] for launch in launches] == [1, 11, None, 21, 25]
    assert [launch["last_batch"] for launch in launches] == [14, 26, None, 24, 30]


def test_launches_are_listed_with_how_they_ended(failed):
    ends = [launch["ended"] for launch in failed.facts["failures"]["launches"]]
    assert ends == ["killed without a word", "failed", "never began", "failed", "done"]


def test_launches_are_listed_with_the_batches_that_were_lost(failed):
    failures = failed.facts["failures"]
    assert [launch["batches_lost"] for launch in failures["launches"]] == [4, 6, 0, 0, 0]
    assert failures["batches_lost"] == sum(BATCHES_LOST)


def test_batches_lost_cost_the_time_of_all_devices(failed):
    lost_hours = sum(BATCHES_LOST) * BATCH_SECONDS / 3600
    assert failed.facts["failures"]["device_hours_lost"] == pytest.approx(lost_hours * NUM_DEVICES)


def test_a_launch_that_never_began_is_no_failure_of_training(failed):
    """Three of five launches failed while they trained."""
    failures = failed.facts["failures"]
    assert failures["num_failures"] == 3
    assert failures["hours_between_failures"] == pytest.approx(TRAINED_SECONDS / 3 / 3600)


def test_the_best_interval_of_saves_follows_from_failures_and_stalls(failed):
    """Daly 2006, by hand: saves of 1 s and a failure every 133 s give 15.67 s, which is between one batch and two."""
    failures = failed.facts["failures"]
    assert failures["save_every_seconds"] == pytest.approx(15.67, abs=0.01)
    assert failures["save_every_batches"] == 2


def test_the_page_tells_what_failures_cost_and_how_often_to_save(failed):
    assert "| 2 | 11-26 | 0:02:40 | failed: cuda:1 is gone | 6 | 0.0333 |" in failed.page
    assert "5 launches: 1 killed without a word, 2 failed, 1 never began, 1 done; 10 batches and" in failed.page
    assert "mean time between failures 0:02:13: 3 failures in 0:06:40 of training" in failed.page
    assert "save every 0:00:16, 2 batches (Daly 2006); save_interval is 10ba" in failed.page


def test_launches_that_ran_elsewhere_failed_if_they_lost_batches(failed_elsewhere):
    failures = failed_elsewhere.facts["failures"]
    assert failures["causes"] == {"not known here": 4}
    assert failures["num_failures"] == 2
    assert failures["batches_lost"] == sum(BATCHES_LOST)


def test_two_failures_make_no_mean_and_no_advice(failed_elsewhere):
    failures = failed_elsewhere.facts["failures"]
    assert failures["hours_between_failures"] is None
    assert failures["save_every_seconds"] is None
    assert "- 2 failures in 0:06:40 of training\n" in failed_elsewhere.page
    assert "Daly" not in failed_elsewhere.page


def test_a_run_in_two_launches_without_a_loss_has_not_failed(tmp_path):
    lines = [record(1), record(2, launch=2) | elapsed(1, 2.0)]
    sound = report_on(write_run(tmp_path / "sound", lines))
    failures = sound.facts["failures"]
    assert failures["num_failures"] == 0
    assert failures["hours_between_failures"] is None
    assert failures["save_every_seconds"] is None
    assert "no failure in 0:00:04 of training" in sound.page
