"""Events of a run: each is told once, by what the run folder says, and with what to do."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.callbacks_schema import EVENTS, AlertsConfig
from llmfoundry_lite.config.fields import as_yaml
from llmfoundry_lite.ranks.ending import LOST_CONTACT
from llmfoundry_lite.ranks.identity import describe_process
from llmfoundry_lite.ranks.status import LAUNCHES, STATUS, read_status, write_ended_early, write_status
from llmfoundry_lite.training.slow_ranks import MAX_RANKS_LISTED
from llmfoundry_ops.alerts import ALERTS, IN_A_ROW, STARTED, WAITING_STEP, WINDOW, LossSpikes, append_record
from llmfoundry_ops.faults import FaultRecord
from llmfoundry_ops.launch_observer import FALLBACK_SECONDS, TOLD_LATE, LaunchObserver
from llmfoundry_ops.rank_times import read_all_slow_ranks, read_rank_times, read_slow_ranks
from tests.checkpoint.saves import write_draft


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Launch:
    """A launch that a test plays, and its observer."""

    def __init__(self, folder, **alerts):
        self.folder = folder
        self.clock = Clock()
        self.told = []
        launches = folder / LAUNCHES
        description = {
            "run_name": "tiny",
            "run_folder": str(folder),
            "alerts": as_yaml(AlertsConfig(command=["true"], **{"events": [*EVENTS], **alerts})),
            "status_before": read_status(folder),
            "num_launch_bytes": launches.stat().st_size if launches.exists() else 0,
        }
        self.observer = LaunchObserver(description, self.told.append, self.clock)
        self.observer.begin()

    @property
    def events(self):
        return [alert.event for alert in self.told]

    def look(self):
        self.observer.look()
        return self.events

    def train(self, *batches, loss=2.0, **status):
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a") as file:
            for batch in batches:
                file.write(json.dumps({"batch": batch, "launch": 1, "loss/train/total": loss}) + "\n")
        self.write("running", batches[-1] if batches else 0, **status)

    def write(self, status, batch, reason=None, **more):
        self.folder.mkdir(exist_ok=True)
        write_status(self.folder, status, batch, reason, **more)

    def die(self):
        """Leave the status of a process that is gone, as SIGKILL does."""
        gone = subprocess.Popen([sys.executable, "-c", ""])
        process = describe_process(gone.pid)
        gone.wait()
        content = json.loads((self.folder / STATUS).read_text())
        (self.folder / STATUS).write_text(json.dumps(content | {"process": process}))

    def end(self):
        self.observer.end()
        return self.told[-1]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tiny"


def test_a_run_that_is_done_is_told_once_also_by_later_launches(folder):
    first = Launch(folder)
    first.train(1, 2, 3)
    first.look()
    first.write("done", 3, last_saved="ba3", saved_at=1.0)
    alert = first.end()
    assert first.events == ["began", "ended"]
    assert alert.text.startswith(f"tiny on {alert.host}: ended at batch 3: done; last save ba3, ")

    second = Launch(folder)
    second.write("running", 3)
    second.look()
    second.write("done", 3)
    second.end()
    assert second.events == ["began"]

    longer = Launch(folder)
    longer.write("running", 3)
    longer.train(4)
    longer.look()
    longer.write("done", 4)
    assert longer.end().batch == 4


def test_a_preempted_launch_says_to_run_the_command_again(folder):
    launch = Launch(folder)
    launch.train(1)
    launch.look()
    launch.write("preempted", 1, "preempted by SIGTERM at batch 1")
    alert = launch.end()
    assert (alert.event, alert.next) == ("preempted", "run the same command again")


def test_a_killed_launch_has_failed(folder):
    launch = Launch(folder)
    launch.train(1, 2, last_saved="ba1", saved_at=1.0)
    launch.look()
    launch.die()
    alert = launch.end()
    assert (alert.event, alert.batch, alert.last_saved) == ("failed", 2, "ba1")
    assert alert.reason is not None and "killed or aborted" in alert.reason


def test_a_refused_launch_has_failed_with_the_reason_of_the_refusal(folder):
    earlier = Launch(folder)
    earlier.write("running", 5)
    earlier.write("preempted", 5)
    earlier.end()
    launch = Launch(folder)
    write_ended_early(folder, "failed", "train_loader.dataset: data/c4 is missing")
    alert = launch.end()
    assert (alert.event, alert.reason, alert.batch) == ("failed", "train_loader.dataset: data/c4 is missing", 5)


def test_a_launch_that_leaves_no_word_has_failed(folder):
    alert = Launch(folder).end()
    assert alert.event == "failed" and "its output says why" in str(alert.reason)


def test_a_launch_that_is_asked_to_leave_before_it_trains_was_preempted(folder):
    launch = Launch(folder)
    launch.observer.end("preempted by SIGTERM")
    assert launch.events == ["began", "preempted"]
    assert launch.told[-1].reason == "preempted by SIGTERM"


def test_a_failed_launch_that_may_be_tried_again_says_so(folder):
    launch = Launch(folder)
    launch.train(1)
    launch.look()
    launch.write("failed", 1, "disk full", try_again=True)
    assert launch.end().next.startswith("run the same command again; the fault may have passed")


def test_failing_saves_are_told_once_in_a_row_and_again_when_one_is_well(folder):
    launch = Launch(folder)
    launch.train(1, last_saved=None, saved_at=None, failed_saves=1, save_error="token has expired")
    assert launch.look() == ["began", "failed_saves"]
    assert launch.told[-1].reason == "token has expired"
    launch.train(2, last_saved=None, saved_at=None, failed_saves=2, save_error="token has expired")
    assert launch.look() == ["began", "failed_saves"]
    launch.write("failed", 2, "max_unsaved", failed_saves=2)
    launch.end()

    # The next launch goes on failing, and then saves.
    launch = Launch(folder)
    launch.train(1, last_saved=None, saved_at=None, failed_saves=1, save_error="token has expired")
    assert launch.look() == ["began"]
    launch.train(2, last_saved="ba2", saved_at=1.0, failed_saves=0)
    assert launch.look() == ["began", "saves_recovered"]
    launch.train(3, last_saved="ba2", saved_at=1.0, failed_saves=1, save_error="disk full")
    assert launch.look() == ["began", "saves_recovered", "failed_saves"]


def test_saves_that_go_to_the_second_place_are_told_once(folder):
    folder.mkdir()
    (folder / "config.yaml").write_text("max_duration: 10ba\nsave_fallback: /nvme/tiny\n")
    launch = Launch(folder)
    full = {"save_error": "runs/tiny/checkpoints: no space left"}
    second = {**full, "last_saved_in": "/nvme/tiny", "failed_saves": 0}
    launch.train(1, last_saved=None, saved_at=None, failed_saves=1, **full)
    assert launch.look() == ["began"]  # the next save goes to the second place
    launch.train(2, last_saved="ba2", saved_at=1.0, **second)
    assert launch.look() == ["began", "failed_saves"]
    alert = launch.told[-1]
    assert alert.reason == "saves to save_folder fail: runs/tiny/checkpoints: no space left; ba2 is in /nvme/tiny"
    assert "save_fallback" in alert.next and "max_unsaved" not in alert.text
    assert launch.observer.is_saved_in_second

    # The first place is tried again at each save.
    for batch in (3, 4):
        launch.train(batch, last_saved="ba2", saved_at=1.0, **{**second, "failed_saves": 1})
        launch.look()
        launch.train(batch, last_saved=f"ba{batch}", saved_at=1.0, **second)
        launch.clock.seconds += 1000
        assert launch.look() == ["began", "failed_saves"]

    # Now both places fail. A save in the second place is no recovery.
    launch.train(5, last_saved="ba4", saved_at=1.0, **{**second, "failed_saves": 2})
    assert launch.look() == ["began", "failed_saves", "failed_saves"]
    assert "max_unsaved" in launch.told[-1].next
    launch.train(6, last_saved="ba6", saved_at=1.0, **second)
    assert launch.look() == ["began", "failed_saves", "failed_saves"]
    launch.train(7, last_saved="ba7", saved_at=1.0, failed_saves=0)
    assert launch.look()[3:] == ["saves_recovered"]
    assert not launch.observer.is_saved_in_second

    # A second place that takes no save within some time is told as well.
    launch.train(8, last_saved="ba7", saved_at=1.0, failed_saves=1, **full)
    assert launch.look()[4:] == []
    launch.clock.seconds += FALLBACK_SECONDS
    assert launch.look()[4:] == ["failed_saves"]


def test_a_launch_that_begins_from_the_second_place_has_no_failed_save(folder):
    launch = Launch(folder)
    launch.train(1, last_saved="ba1", saved_at=None, last_saved_in="/nvme/tiny", failed_saves=0, save_error=None)
    assert launch.look() == ["began"]


def test_the_age_of_a_save_is_known_after_a_restart(folder):
    launch = Launch(folder)
    launch.train(1, last_saved="ba1", saved_at=time.time() - 60)
    launch.look()
    launch.write("failed", 2, "CUDA error")
    launch.look()
    launch.write("running", 1, last_saved="ba1", saved_at=None)
    assert launch.look() == ["began", "restarted"]
    assert (launch.told[-1].last_saved_age_seconds or 0) >= 60
    launch.train(2, last_saved="ba2", saved_at=None)
    launch.look()
    assert launch.observer.saved_at is None

    # A launch that resumes from a save of an earlier one finds it on the disk.
    store = CheckpointStore(folder / "checkpoints")
    lease = store.acquire()
    store.publish(replace(write_draft(store, lease, 3), written_at="2026-11-30T09:15:00+00:00"), lease)
    resumed = Launch(folder)
    resumed.train(3, last_saved="ba3", saved_at=None)
    resumed.look()
    assert resumed.observer.saved_at == 1796030100.0


def test_training_that_waits_for_a_save_is_told_until_the_save_is_there(folder):
    launch = Launch(folder, no_progress_minutes=10)
    launch.train(1, last_saved="ba1", saved_at=1.0, failed_saves=0)
    launch.train(2, last_saved="ba1", saved_at=1.0, failed_saves=0, waits_for_save="ba2 in s3://bucket/tiny")
    assert launch.look() == ["began", "failed_saves"]
    told = launch.told[-1]
    assert told.reason == "training stands still, because it waits for a save: ba2 in s3://bucket/tiny"
    assert told.next == WAITING_STEP
    launch.clock.seconds += 601
    assert launch.look() == ["began", "failed_saves", "no_progress"]
    assert str(launch.told[-1].reason).endswith("; training waits for a save: ba2 in s3://bucket/tiny")
    launch.train(3, last_saved="ba2", saved_at=2.0, failed_saves=0)
    assert launch.look()[-1] == "saves_recovered"


def test_no_progress_is_told_once_until_a_batch_comes(folder):
    launch = Launch(folder, no_progress_minutes=10)
    launch.clock.seconds = 601
    assert launch.look() == ["began", "no_progress"]
    assert "has not begun to train" in str(launch.told[-1].reason)
    launch.train(1)
    launch.look()
    launch.clock.seconds += 599
    assert launch.look() == ["began", "no_progress"]
    launch.clock.seconds += 2
    assert launch.look() == ["began", "no_progress", "no_progress"]
    launch.clock.seconds += 10_000
    assert launch.look() == ["began", "no_progress", "no_progress"]
    assert "no new batch for 10:01" in launch.told[-1].text


def times_of_ranks(batch, *slow):
    times = {"stage": 0, "own_seconds": 0.4, "median_seconds": 0.2, "waiting_seconds": 0, "ratio": 1.8}
    ranks = [{"rank": rank, "host": f"gpu{rank}", **times} for rank in slow[:MAX_RANKS_LISTED]]
    slow_ranks = [{**rank, "text": f"rank {rank['rank']} is slow: 1.8 times; next: check it"} for rank in ranks]
    return {"rank_times": {"batch": batch, "ranks": ranks}, "slow_ranks": slow_ranks, "all_slow_ranks": [*slow]}


def test_a_slow_rank_is_told_once_with_what_to_do_and_that_it_has_recovered(folder):
    launch = Launch(folder)
    launch.train(100, **times_of_ranks(100))
    assert launch.look() == ["began"]
    launch.train(200, **times_of_ranks(200, 5))
    assert launch.look() == ["began", "slow_rank"]
    assert (launch.told[-1].reason, launch.told[-1].next) == ("rank 5 is slow: 1.8 times", "check it")
    launch.train(300, **times_of_ranks(300, 5, 6, 7))
    launch.look()
    assert launch.told[-1].reason == "rank 6 is slow: 1.8 times; and rank 7 on gpu7 (1.8 times the median)"
    launch.train(400, **times_of_ranks(400, 6, 7))
    assert launch.look() == ["began", "slow_rank", "slow_rank", "ranks_recovered"]
    assert launch.told[-1].reason == "rank 5 on gpu5"


def test_of_many_slow_ranks_each_is_told_once(folder):
    """The status describes those that were named last, so that others leave its list without having recovered."""
    launch = Launch(folder)
    launch.train(100, **times_of_ranks(100, *range(30)))
    launch.look()
    assert launch.told[-1].reason.endswith("rank 15 on gpu15 (1.8 times the median), 14 more")
    launch.train(200, **times_of_ranks(200, *reversed(range(30))))
    assert launch.look() == ["began", "slow_rank"] and len(launch.observer.slow_ranks) == 30
    launch.train(300, **times_of_ranks(300, 40, *range(1, 30)))
    assert launch.look() == ["began", "slow_rank", "slow_rank", "ranks_recovered"]
    assert [alert.reason for alert in launch.told[-2:]] == ["rank 40 is slow: 1.8 times", "rank 0 on gpu0"]
    launch.train(400, **times_of_ranks(400))
    launch.look()
    assert launch.told[-1].reason.endswith("rank 15 on gpu15 and 14 more")


def test_a_rank_that_is_started_again_has_not_recovered(folder):
    launch = Launch(folder)
    launch.train(200, **times_of_ranks(200, 5))
    launch.look()
    launch.write("failed", 200, "CUDA error", **times_of_ranks(200, 5))
    launch.look()
    launch.write("running", 200)
    launch.look()
    launch.train(300, **times_of_ranks(300))
    assert launch.look() == ["began", "slow_rank", "restarted"]


def test_times_of_ranks_that_nobody_has_measured_are_skipped(folder):
    (sound,) = times_of_ranks(100, 5)["slow_ranks"]
    wrong = [3, {}, {**sound, "rank": True}, {**sound, "ratio": "x"}, {**sound, "host": None}, {**sound, "stage": 1.0}]
    assert [time.rank for time in read_slow_ranks({"slow_ranks": [*wrong, sound]})] == [5]
    for times in (None, 3, {}, {"batch": "x"}):
        assert read_rank_times({"rank_times": times}) is None
    assert read_rank_times({"rank_times": {"batch": 1, "ranks": 7}}) == []
    assert len(read_slow_ranks({"slow_ranks": [sound] * 1000})) == MAX_RANKS_LISTED
    assert read_all_slow_ranks({"all_slow_ranks": 3}) == []
    assert read_all_slow_ranks({"all_slow_ranks": [3, "x", True, None, 5]}) == [3, 5]


def test_ranks_that_the_launcher_starts_again_are_a_restart_not_an_end(folder):
    launch = Launch(folder)
    launch.train(1, 2)
    launch.look()
    launch.write("failed", 2, "CUDA error")
    launch.look()
    launch.write("running", 1)
    assert launch.look() == ["began", "restarted"]
    assert launch.told[-1].reason == "CUDA error"


def test_the_launcher_knows_why_a_rank_had_to_start_again(folder):
    launch = Launch(folder)
    launch.observer._launch_process = {"pid": 1}
    faults = FaultRecord(folder)
    faults.begin_try()
    launch.train(1, 2)
    launch.look()
    assert launch.observer.state == "running"
    launch.die()
    launch.look()
    assert launch.observer.state == "restarting"
    faults.note("rank 1 was killed by SIGKILL", restarts=True, was_killed=True)
    launch.write("running", 1)
    assert launch.look() == ["began", "restarted"]
    assert launch.told[-1].reason == "rank 1 was killed by SIGKILL"
    assert "dmesg" in launch.told[-1].next

    # Rank 0 says itself why it fails the next time.
    faults.begin_try()
    launch.write("failed", 2, "CUDA error")
    faults.note("rank 0 left with exit code 1", restarts=True)
    launch.write("running", 1)
    launch.look()
    assert (launch.told[-1].reason, "dmesg" in launch.told[-1].next) == ("CUDA error", False)

    # A reason of the launcher that no restart has told does not stay.
    faults.begin_try()
    launch.die()
    faults.note("rank 1 is frozen", restarts=True)
    launch.write("failed", 2, "disk full")
    launch.look()
    launch.write("running", 1)
    launch.look()
    assert launch.told[-1].reason == "disk full"

    # The last time, it has only lost contact.
    faults.begin_try()
    launch.write("running", 1)
    launch.write("failed", 2, f"{LOST_CONTACT}, which has died")
    faults.note("rank 1 was killed by SIGKILL", restarts=False, was_killed=True)
    launch.look()
    assert launch.observer.state == "failed"
    alert = launch.end()
    assert (alert.event, alert.reason) == ("failed", "rank 1 was killed by SIGKILL") and "dmesg" in alert.next
    assert (read_status(folder) or {})["reason"] == "rank 1 was killed by SIGKILL"


def test_a_launcher_that_is_killed_is_named(folder):
    launch = Launch(folder)
    launch.observer._launch_process = {"pid": 1}
    launch.train(1)
    launch.look()
    launch.die()
    assert "the launcher of the ranks is gone" in str(launch.end().reason)


def test_the_end_of_a_launch_whose_observer_died_is_told_by_the_next(folder):
    container = Launch(folder)
    container.train(1, 2, 3, last_saved="ba2", saved_at=1.0)
    container.look()
    container.die()

    launch = Launch(folder)
    launch.write("running", 2)
    assert launch.look() == ["began", "failed"]
    late = launch.told[-1]
    assert (late.batch, late.last_saved, late.next) == (3, "ba2", "nothing: a launch has carried on")
    launch.write("done", 4)
    launch.end()

    launch = Launch(folder)
    launch.write("running", 4)
    assert launch.look() == ["began"]


def test_the_end_of_a_launch_that_was_recorded_before_its_observer_ran_is_told_once(folder):
    for event in (STARTED, "began"):
        append_record(folder, {"time": 1.0, "event": event, "batch": 0, "observer": "first"})
    launch = Launch(folder)
    launch.train(1)
    launch.look()
    assert launch.events == ["began", "failed"] and TOLD_LATE in str(launch.told[-1].reason)
    assert "more before it" not in launch.told[-1].text


def test_the_end_of_a_launch_is_told_also_if_a_refused_one_came_between(folder):
    killed = Launch(folder)
    killed.train(1, 2, 3, last_saved="ba2", saved_at=1.0)
    killed.look()
    killed.die()
    Launch(folder)  # it is killed before it begins to train
    refused = Launch(folder)
    write_ended_early(folder, "failed", "data/c4 is missing")
    refused.end()

    launch = Launch(folder)
    launch.write("running", 2)
    assert launch.look() == ["began", "failed"]
    late = launch.told[-1]
    assert (late.batch, late.last_saved) == (3, "ba2")
    assert late.reason == f"{TOLD_LATE}; 1 more before it ended in the same way"
    launch.write("preempted", 3, "preempted by SIGTERM")
    launch.look()  # and its observer is killed before it tells

    refused = Launch(folder)
    write_ended_early(folder, "failed", "data/c4 is missing")
    refused.end()
    launch = Launch(folder)
    launch.write("running", 3)
    assert launch.look() == ["began", "preempted"]
    assert launch.told[-1].reason == f"{TOLD_LATE}; preempted by SIGTERM"
    launch.write("done", 4)
    launch.end()
    launch = Launch(folder)
    launch.write("running", 4)
    assert launch.look() == ["began"]


def test_a_loss_spike_is_told_once_for_its_batches(folder):
    launch = Launch(folder)
    launch.train(*range(1, WINDOW + 1))
    launch.look()
    launch.train(*range(WINDOW + 1, WINDOW + 9), loss=9.0)
    assert launch.look() == ["began", "loss_spike"]
    launch.write("failed", WINDOW + 9)
    launch.end()

    # The next launch trains these batches again, from a checkpoint before them.
    launch = Launch(folder)
    launch.train(*range(WINDOW - 1, WINDOW + 1))
    launch.train(*range(WINDOW + 1, WINDOW + 4), loss=9.0)
    assert launch.look() == ["began"]


def test_a_loss_spike_in_the_log_of_another_machine_is_not_told_again(folder):
    launch = Launch(folder)
    launch.train(*range(1, WINDOW + 1), launch=2)
    launch.train(*range(WINDOW + 1, WINDOW + 9), loss=9.0, launch=2)  # records of launch 1, which a checkpoint carried
    assert launch.look() == ["began"]


def test_only_the_chosen_events_are_sent_and_all_are_recorded(folder):
    launch = Launch(folder, events=["failed"])
    launch.train(1)
    launch.look()
    launch.write("done", 1)
    launch.observer.end()
    assert launch.events == []
    entries = [json.loads(line) for line in (folder / ALERTS).read_text().splitlines()]
    assert [(entry["event"], entry["is_sent"]) for entry in entries] == [("began", False), ("ended", False)]


def test_a_link_in_place_of_the_record_is_not_written_through(folder):
    folder.mkdir()
    victim = folder.parent / "victim"
    victim.write_text("")
    (folder / ALERTS).symlink_to(victim)
    launch = Launch(folder)
    launch.train(1)
    launch.write("done", 1)
    assert launch.end().event == "ended"
    assert victim.read_text() == ""


def losses_of_run(num_batches, noise=0.05, seed=0):
    generator = random.Random(seed)
    return [2 + 9 / (1 + batch / 50) + generator.gauss(0, noise) for batch in range(num_batches)]


def add(spikes, losses, first_batch=1):
    return [batch for batch, loss in enumerate(losses, first_batch) if spikes.add(batch, loss) is not None]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_a_falling_and_noisy_loss_is_no_spike(noise):
    assert add(LossSpikes(8.0), losses_of_run(5000, noise)) == []


def test_one_odd_batch_is_no_spike_and_three_are_one():
    losses = losses_of_run(600)
    losses[300] = 50.0
    assert add(LossSpikes(8.0), losses) == []
    losses[400:420] = [6.0] * 20
    assert add(LossSpikes(8.0), losses) == [400 + IN_A_ROW]


def test_losses_that_are_not_finite_are_a_spike():
    assert add(LossSpikes(8.0), [*losses_of_run(200), None, None, None, None]) == [203]
