"""Saves by time, and the interval that a run chooses for itself."""

import json
import os

import pytest

from llmfoundry_lite.checkpoint.intervals import suggest_save_interval
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.schema import Duration, SaveInterval
from llmfoundry_lite.launch.status import LAUNCHES, seconds_between_failures
from llmfoundry_lite.training import save_timer
from llmfoundry_lite.training.save_timer import FIRST_SECONDS, SaveTimer
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def save(timer, *, stall=0.5, usual=10.0, disturbed=(), durable=3.0):
    for _ in range(4):
        timer.note_batch(usual, is_saving=False)
    for seconds in disturbed:
        timer.note_batch(seconds, is_saving=True)
    timer.note_begun()
    return timer.note_published(stall, durable)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1000ba", SaveInterval(span=Duration(1000, "ba"))),
        (2, SaveInterval(span=Duration(2, "ep"))),
        ("5m", SaveInterval(seconds=300)),
        ("90s", SaveInterval(seconds=90)),
        ("1h30m", SaveInterval(seconds=5400)),
        ("auto", SaveInterval()),
    ],
)
def test_an_interval_is_a_span_a_time_or_auto(text, parsed):
    assert SaveInterval.parse(text) == parsed


@pytest.mark.parametrize("text", ["5min", "0s", "0ba", "often", "0.1dur", "-5m", "30m1h"])
def test_what_is_none_of_them_is_refused(text):
    with pytest.raises(ValueError, match=r"a span such as 1000ba, a time such as 5m, 90s or 1h, or auto|more than 0"):
        SaveInterval.parse(text)


def test_a_save_is_due_when_the_time_since_the_last_one_has_passed():
    timer = SaveTimer(300.0, now=(clock := Clock()))
    clock.seconds = 299.0
    assert not timer.is_due()
    clock.seconds = 300.0
    assert timer.is_due()
    timer.note_begun()
    assert not timer.is_due()
    assert save(timer) is None and timer.seconds == 300.0


def test_auto_measures_a_save_first_and_then_lets_saves_cost_two_percent():
    timer = SaveTimer(None, now=Clock())
    assert timer.seconds == FIRST_SECONDS
    assert save(timer, disturbed=[12.0, 11.0]) == (
        "save_interval: auto is 2:30: a save costs 3 s of training, 2% at that interval"
    )
    assert timer.seconds == pytest.approx(3.0 / 0.02)


def test_auto_counts_the_stall_where_batches_are_no_slower_and_forgets_the_first_save():
    timer = SaveTimer(None, now=Clock())
    save(timer, stall=4.0)
    assert timer.seconds == pytest.approx(200)
    assert "auto is 0:25" in (save(timer, stall=0.5, disturbed=[10.0]) or "")
    assert save(timer, stall=0.52) is None, "hardly another interval"
    assert timer.seconds == pytest.approx(0.51 / 0.02)


def test_auto_never_begins_a_save_before_the_last_has_ended():
    timer = SaveTimer(None, now=Clock())
    save(timer, stall=0.01, durable=40.0)
    assert timer.seconds == 40.0


def test_auto_saves_more_often_in_a_run_that_fails_often():
    timer = SaveTimer(None, 600.0, now=Clock())
    assert "fails every 10:00" in (save(timer, stall=4.0) or "")
    assert timer.seconds == pytest.approx(suggest_save_interval(4.0, 600.0)) and timer.seconds < 200


def test_time_between_failures_is_that_of_launches_over_those_that_failed(tmp_path):
    assert seconds_between_failures(tmp_path) is None
    ends = [("running", 0), ("failed", 100), ("running", 150), ("preempted", 250), ("running", 300), ("running", 400)]
    events = [{"status": status, "time": at, "has_begun": True} for status, at in ends]
    (tmp_path / LAUNCHES).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert seconds_between_failures(tmp_path) == (100 + 100) / 2


class ClockOfRank0Counts:
    """Made before the timer is: rank 0 finds that it is time at once, rank 1 never."""

    def __new__(cls):
        from composer.core import Callback

        save_timer.FIRST_SECONDS = 0.0 if os.environ["RANK"] == "0" else 1e9
        return Callback()


@pytest.mark.multiprocess
def test_all_ranks_save_when_rank_0_says_so_and_the_choice_is_recorded(tmp_path):
    data = write_data(tmp_path / "data")
    callbacks = {"python:tests.training.test_save_timer:ClockOfRank0Counts": {}}
    config = tiny_config(
        data, max_duration="5ba", save_interval="auto", callbacks=callbacks, run_folder=str(tmp_path / "run")
    )
    result = train([write_config(tmp_path / "run.yaml", config)], tmp_path, 2).check()
    assert result.output.count("save_interval: auto is") >= 1 and "save_interval: auto" not in result.outputs[1]
    saved = {found.name: found.checkpoint for found in CheckpointStore(tmp_path / "run/checkpoints").candidates()}
    assert {"ba1", "ba5"} <= saved.keys()
    assert all(seconds > 0 for seconds in values(read_metrics(tmp_path / "run"), "checkpoint/interval_seconds"))
    assert saved["ba5"].manifest.segments[-1].save_interval_seconds > 0
