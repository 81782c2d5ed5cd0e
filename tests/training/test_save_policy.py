"""When a run saves and whether it leaves; saves by time, and the interval that a run chooses for itself."""

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from composer.core import Callback, Timestamp

from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import Duration, SaveInterval
from llmfoundry_lite.errors import CheckpointError, TransientError
from llmfoundry_lite.ranks.siblings import FirstError
from llmfoundry_lite.ranks.status import TRY_AGAIN, read_status, write_status
from llmfoundry_lite.training import preemption, save_policy
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.preemption import REASONS, SIGINT_REASON, STOP_FILE_REASON, Preemption
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.save_policy import FIRST_SECONDS, Decision, SavePolicy, SaveTimer
from llmfoundry_lite.training.train import publish_if_early, record_end
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

SIGTERM = REASONS.index("SIGTERM")


def decide(batch, *, agreed=0, save_interval="100ba", stop_after=None, stop_at=None, eval_interval=0, began=0):
    config: Any = SimpleNamespace(
        run_folder="runs/x",
        max_duration=Duration(10, "ba"),
        save_interval=SaveInterval.parse(save_interval),
        digest_interval=None,
        stop_after=stop_after and Duration.parse(stop_after),
        stop_at=stop_at and Duration.parse(stop_at),
        eval_interval=Duration.parse(eval_interval),
        evaluates=eval_interval != 0,
        validation={"": "val"},
        icl_tasks=[],
    )
    asked: Any = SimpleNamespace(agreed_reason=agreed)
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


@pytest.mark.parametrize(("batch", "stops"), [(5, False), (6, True), (7, True), (10, False)])
def test_a_launch_stops_at_a_point_of_the_run_wherever_it_began(batch, stops):
    assert decide(batch, stop_at="6ba", began=3).stops == stops


@pytest.fixture
def asked(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(preemption, "announce_preemption", lambda reason: None)
    one = Preemption(tmp_path, 20.0, None, lambda reason: None, print)
    for _ in range(3):
        one.find_reason()
        clock.now += 7.0
    one.find_reason()
    return one, clock


def test_who_writes_a_file_gives_the_time_of_two_batches_more(asked):
    one, clock = asked
    one._note_reason(STOP_FILE_REASON)
    assert one.leave_by == clock.now + 20 + 2 * 7


def test_who_sends_a_signal_kills_soon(asked):
    one, clock = asked
    one._note_reason(SIGTERM)
    assert one.leave_by == clock.now + 20


def test_a_launcher_that_ends_this_rank_because_another_has_failed_does_not_preempt_it(asked, monkeypatch):
    one, clock = asked
    told, failure = [], FirstError(3, 2, "error: a shard is damaged")
    one.on_reason = one.on_leave = lambda *words: told.append(words)
    monkeypatch.setattr(preemption, "find_failure_of_other_rank", lambda: failure)
    one._handle_signal(signal.SIGTERM)
    assert (one.failure, told, one.leave_by) == (failure, [], clock.now + 20)
    monkeypatch.setattr(preemption, "exit_now", told.append)
    clock.now += 20
    one._leave_if_late(clock.now)
    assert told == [("failed", "rank 3: a shard is damaged"), 2]


def test_whoever_leaves_without_a_save_says_what_stands(asked):
    one, _ = asked
    assert one.describe_saves() == "nothing was trained yet"


@pytest.mark.parametrize("reasons", [(SIGTERM, SIGINT_REASON), (SIGINT_REASON, SIGTERM)])
def test_whoever_pressed_ctrl_c_is_the_reason_whichever_came_first(asked, reasons):
    one, _ = asked
    for reason in reasons:
        one._note_reason(reason)
    assert one.reason == SIGINT_REASON


@pytest.mark.parametrize(
    ("reason", "failure", "status"),
    [(0, None, "failed"), (SIGTERM, None, "preempted"), (SIGTERM, (3, 2, "error: a shard is damaged"), "failed")],
)
def test_a_lost_peer_is_no_preemption_unless_this_rank_was_asked_to_leave_and_no_rank_has_failed(
    reason, failure, status
):
    written, error = [], RuntimeError("Connection closed by peer")
    run = SimpleNamespace(fail=lambda *words, **options: written.append(words))
    asked = SimpleNamespace(reason=reason, failure=failure, describe_saves=lambda: "ba3 stands")
    launch: Any = SimpleNamespace(run_folder=run, preemption=asked, trainer=None, checkpointing=None)
    reported = record_end(error, launch)
    assert (reported is error) == (status == "failed")
    assert [words[0] for words in written] == [status]


def launch_without_a_run(tmp_path, folder, *, has_begun=False):
    config = SimpleNamespace(
        run_name="tiny", run_folder=str(tmp_path), checkpoint_folder=folder, max_duration=Duration(4, "ba")
    )
    run_folder = SimpleNamespace(is_main=True, trainer=object() if has_begun else None, folder=tmp_path)
    launch: Any = SimpleNamespace(run_folder=run_folder, config=config)
    return launch


@pytest.mark.parametrize(("has_begun", "files"), [(False, {"launches/early-end.json"}), (True, set())])
def test_a_launch_that_has_not_begun_records_its_early_end(tmp_path, has_begun, files):
    """One that has begun has a record of its own."""
    folder = f"memory://ends/{has_begun}"
    launch = launch_without_a_run(tmp_path, folder, has_begun=has_begun)
    publish_if_early(CheckpointError("another launch trains this run"), launch)
    assert open_folder(folder).tree_sizes().keys() == files


@pytest.mark.parametrize(("last_saved", "expected"), [("ba9", "preempted"), ("ba8", "failed")])
def test_the_record_of_an_early_end_calls_no_run_preempted_that_has_lost_batches(tmp_path, last_saved, expected):
    folder = f"memory://ends/{last_saved}"
    write_status(tmp_path, "failed", 9, "killed", last_saved=last_saved, failed_saves=0)
    error = CheckpointError("s3://b: cannot be listed")
    error.__cause__ = TransientError("SlowDown")
    publish_if_early(error, launch_without_a_run(tmp_path, folder))
    record = json.loads(open_folder(folder).child("launches").read("early-end.json", 1 << 20))
    assert record["status"] == expected


def test_a_fault_before_lost_batches_are_trained_again_is_no_preemption(tmp_path, monkeypatch):
    """A rank was killed with unsaved batches, and the bucket does not answer the next try."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    write_status(tmp_path, "failed", 9, "killed", last_saved="ba8", failed_saves=0)
    error = CheckpointError("s3://b: cannot be listed")
    error.__cause__ = TransientError("SlowDown")
    run = RunFolder(SimpleNamespace(run_folder=str(tmp_path)))  # type: ignore[arg-type]
    asked = SimpleNamespace(reason=0, failure=None)
    launch: Any = SimpleNamespace(run_folder=run, preemption=asked, trainer=None, checkpointing=None)
    assert record_end(error, launch) is error
    status = read_status(tmp_path)
    assert status is not None and (status["status"], status[TRY_AGAIN], error.exit_code) == ("failed", True, 1)


# --------------------------------------------------------------------------------------------------- saves by time


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(save_policy, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def save(timer, clock, *, stall=0.5, usual=10.0, disturbed=(), durable=3.0):
    for seconds, is_saving in [*[(usual, False)] * 4, *((each, True) for each in disturbed)]:
        clock.seconds += seconds
        timer.note_batch_end(is_saving)
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


def test_a_save_is_due_when_the_time_since_the_last_one_has_passed(clock):
    timer = SaveTimer(300.0)
    clock.seconds = 299.0
    assert not timer.note_batch_end(is_saving=False)
    clock.seconds = 300.0
    assert timer.note_batch_end(is_saving=False)
    timer.note_begun()
    assert not timer.note_batch_end(is_saving=False)
    assert save(timer, clock) is None and timer.seconds == 300.0


def test_auto_measures_a_save_first_and_then_lets_saves_cost_two_percent(clock):
    timer = SaveTimer(None)
    assert timer.seconds == FIRST_SECONDS
    assert save(timer, clock, disturbed=[12.0, 11.0]) == (
        "save_interval: auto is 2:30: a save costs 3 s of training, 2% at that interval"
    )
    assert timer.seconds == pytest.approx(3.0 / 0.02)


def test_auto_counts_the_stall_where_batches_are_no_slower_and_forgets_the_first_save(clock):
    timer = SaveTimer(None)
    save(timer, clock, stall=4.0)
    assert timer.seconds == pytest.approx(200)
    assert "auto is 0:25" in (save(timer, clock, stall=0.5, disturbed=[10.0]) or "")
    assert save(timer, clock, stall=0.52) is None, "hardly another interval"
    assert timer.seconds == pytest.approx(0.51 / 0.02)


def test_a_save_is_charged_for_its_own_batches_alone(clock):
    timer = SaveTimer(None)
    save(timer, clock, disturbed=[12.0, 11.0])
    assert timer.cost_seconds == pytest.approx(3.0)
    save(timer, clock, disturbed=[11.0])  # the first save's cost is forgotten
    assert timer.cost_seconds == pytest.approx(1.0)


def test_auto_never_begins_a_save_before_the_last_has_ended(clock):
    timer = SaveTimer(None)
    save(timer, clock, stall=0.01, durable=40.0)
    assert timer.seconds == 40.0


class ClockOfRank0Counts(Callback):
    """Rank 0 finds that it is time at once, rank 1 never."""

    def fit_start(self, state, logger):
        (timer,) = (callback.policy.timer for callback in state.callbacks if isinstance(callback, Checkpointing))
        timer.seconds = 0.0 if os.environ["RANK"] == "0" else 1e9


@pytest.mark.multiprocess
def test_all_ranks_save_when_rank_0_says_so_and_the_choice_is_recorded(tmp_path):
    data = write_data(tmp_path / "data")
    callbacks = {"python:tests.training.test_save_policy:ClockOfRank0Counts": {}}
    config = tiny_config(
        data, max_duration="5ba", save_interval="auto", callbacks=callbacks, run_folder=str(tmp_path / "run")
    )
    result = train([write_config(tmp_path / "run.yaml", config)], tmp_path, 2).check()
    assert result.output.count("save_interval: auto is") >= 1 and "save_interval: auto" not in result.outputs[1]
    saved = {found.name: found.checkpoint for found in CheckpointStore(tmp_path / "run/checkpoints").candidates()}
    assert {"ba1", "ba5"} <= saved.keys()
    assert all(seconds > 0 for seconds in values(read_metrics(tmp_path / "run"), "checkpoint/interval_seconds"))
    assert saved["ba5"].manifest.segments[-1].save_interval_seconds > 0
