"""When a run saves and whether it leaves, decided without training."""

from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import Timestamp

from llmfoundry_lite.training import preemption
from llmfoundry_lite.training.preemption import BY_FILE, BY_KEY, REASONS, Preemption
from llmfoundry_lite.training.save_policy import Decision, SavePolicy

SIGTERM = REASONS.index("SIGTERM")


def decide(batch, *, agreed=0, save_interval="100ba", stop_after=None, eval_interval=0, began=0):
    config: Any = SimpleNamespace(
        run_folder="runs/x",
        max_duration="10ba",
        save_interval=save_interval,
        stop_after=stop_after,
        eval_interval=eval_interval,
        validation={"": "val"},
        icl_tasks=[],
    )
    asked: Any = SimpleNamespace(agreed=agreed)
    policy = SavePolicy(config, asked, agreement=SimpleNamespace(save_is_due=False))  # type: ignore[arg-type]
    policy.start(Timestamp(batch=began))
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=batch), previous_timestamp=Timestamp(batch=batch - 1))
    return policy.decide(state)


NOTHING = Decision(saves=False, preempted_by="", stops=False, owes_evaluation=False)


@pytest.mark.parametrize(("batch", "saves"), [(2, False), (3, True), (4, False), (6, True), (10, True)])
def test_a_save_comes_at_each_interval_and_at_the_end(batch, saves):
    assert decide(batch, save_interval="3ba") == NOTHING._replace(saves=saves)


def test_a_run_that_is_asked_to_leave_saves_and_leaves():
    assert decide(4, agreed=SIGTERM) == NOTHING._replace(saves=True, preempted_by="SIGTERM")


def test_a_run_that_is_asked_after_its_last_batch_is_done():
    assert decide(10, agreed=SIGTERM) == NOTHING._replace(saves=True)


def test_a_run_that_is_asked_after_its_last_batch_still_owes_the_evaluation():
    decision = decide(10, agreed=SIGTERM, eval_interval="1ba")
    assert decision == NOTHING._replace(saves=True, preempted_by="SIGTERM", owes_evaluation=True)


@pytest.mark.parametrize(
    ("batch", "agreed", "stops"), [(5, 0, False), (6, 0, True), (6, SIGTERM, False), (10, 0, False)]
)
def test_a_launch_stops_after_its_span_unless_it_leaves_or_the_run_is_done(batch, agreed, stops):
    assert decide(batch, agreed=agreed, stop_after="4ba", began=2).stops == stops


@pytest.fixture
def asked(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(preemption, "announce_preemption", lambda reason: None)
    one = Preemption(tmp_path, 20.0, None, *[lambda reason: None] * 3)
    for _ in range(3):
        one.look()
        clock.now += 7.0
    one.look()
    return one, clock


def test_who_writes_a_file_gives_the_time_of_two_batches_more(asked):
    one, clock = asked
    one._request(BY_FILE)
    assert one.leave_by == clock.now + 20 + 2 * 7


def test_who_sends_a_signal_kills_soon(asked):
    one, clock = asked
    one._request(SIGTERM)
    assert one.leave_by == clock.now + 20


@pytest.mark.parametrize("reasons", [(SIGTERM, BY_KEY), (BY_KEY, SIGTERM)])
def test_whoever_pressed_ctrl_c_is_the_reason_whichever_came_first(asked, reasons):
    one, _ = asked
    for reason in reasons:
        one._request(reason)
    assert one.reason == BY_KEY
