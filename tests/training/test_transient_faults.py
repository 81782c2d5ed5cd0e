"""Faults of the world that may pass, in the middle of a run: what goes on, what is tried again, which exit code."""

import errno
import json
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from composer.core import Callback, Timestamp

from llmfoundry_lite.checkpoint import local_folder
from llmfoundry_lite.checkpoint.run_log import FAILED_SAVES
from llmfoundry_lite.checkpoint.save import Saved
from llmfoundry_lite.config.spans import Time, parse_limit
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.ending import describe_error
from llmfoundry_lite.ranks.status import WAITS_FOR_SAVE, has_lost_batches
from llmfoundry_lite.training import checkpointing, failed_saves
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.failed_saves import FailedSaves
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.run_folder import RunFolder
from llmfoundry_lite.training.save_policy import Decision
from llmfoundry_lite.training.save_texts import describe_preemption, describe_saves
from llmfoundry_lite.training.second_place import SecondPlace
from scripts.slurm import was_preempted
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def not_written(cause: OSError | None = FULL) -> CheckpointError:
    error = CheckpointError("run/ba4: not written: No space left on device")
    error.__cause__ = cause
    return error


def published(batch: int) -> Saved:
    return Saved(
        name=f"ba{batch}", save_id="", stall_seconds=0.0, durable_seconds=0.0, num_bytes=0, state_digest="0" * 16
    )


class Run:
    """`Checkpointing` after batch 4, whose saves come to `ends`, one after the other. Nobody sleeps."""

    def __init__(self, monkeypatch, *ends: Saved | CheckpointError | None, retry_for: str = "1m"):
        self.ends, self.pauses, self.saves, self.said, self.now = list(ends), [], [], [], 0.0
        parts = Checkpointing.__new__(Checkpointing)
        parts.config = SimpleNamespace(retry_for=Time.parse(retry_for), trains_alone=True)
        parts.saver = SimpleNamespace(wait=self._wait, next_is_second=False, second=None, url_in_flight="run")
        parts.policy = SimpleNamespace(timer=None)
        parts.failed_saves, parts.on_saves = FailedSaves(parse_limit("30m")), lambda saves: None
        parts.unlogged_digest, parts.waits_for_save = {}, ""
        parts.begun_batch, parts.published_batch, parts.role, parts.first_batch = 4, 2, LaunchRole(), 1
        parts.print_on_rank_0 = lambda *lines, **facts: self.said.extend(lines)
        parts.store = SimpleNamespace(root=SimpleNamespace(url="run"), second=None)
        parts.second_place = SecondPlace(parts.store, self.said.append)
        parts._save = lambda state, logger, **options: self.saves.append(4)
        self.parts, self.state = parts, SimpleNamespace(timestamp=SimpleNamespace(batch=4))
        monkeypatch.setattr(checkpointing, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _wait(self):
        end = self.ends.pop(0)
        if isinstance(end, CheckpointError):
            raise end
        return end

    def _sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def finish(self):
        self.parts.fit_end(self.state, SimpleNamespace(log_metrics=lambda metrics: None))


def test_a_save_that_meets_a_fault_that_may_pass_is_told_and_the_run_goes_on(monkeypatch):
    run = Run(monkeypatch, not_written())
    error = run.parts._advance_save(run.parts.saver.wait, run.state, None)
    assert error is not None and run.parts.begun_batch == run.parts.published_batch == 2
    text = "warning: run/ba4: not written: No space left on device; ba2 stands, and the next save tries again"
    assert run.said == [text]


def test_a_save_that_meets_another_error_ends_the_run_and_what_is_lost_is_told(monkeypatch):
    run = Run(monkeypatch, not_written(NotADirectoryError(errno.ENOTDIR, "Not a directory")))
    with pytest.raises(CheckpointError, match="not written"):
        run.parts._advance_save(run.parts.saver.wait, run.state, None)
    assert run.said == ["warning: batches 3 to 4 are in no save; ba2 stands"]


REFUSED = PermissionError(errno.EACCES, "Permission denied")


def test_a_save_that_this_machine_refuses_goes_on_as_one_that_a_bucket_refuses(monkeypatch):
    run = Run(monkeypatch, not_written(REFUSED))
    assert run.parts._advance_save(run.parts.saver.wait, run.state, None) is not None
    words = "give this user the right to write there; ba2 stands, and the next save tries again"
    assert run.said == [f"warning: run/ba4: not written: No space left on device; {words}"]


def test_a_last_save_that_this_machine_refuses_fails_the_run_and_is_no_mistake(monkeypatch):
    run = Run(monkeypatch, *[not_written(REFUSED) for _ in range(5)], retry_for="10s")
    with pytest.raises(CheckpointError) as caught:
        run.finish()
    caught.value.has_lost = run.parts.has_unsaved_batches(run.state)
    assert caught.value.exit_code == 1
    told = "; give this user the right to write there; this may pass: run the same command again"
    assert describe_error(caught.value).endswith(told)


def test_a_launch_that_waits_for_a_save_says_for_which_and_for_how_long(monkeypatch):
    run = Run(monkeypatch)
    run.parts._note_wait("ba4", 31.2)
    (line,) = run.said
    assert line.startswith("waiting for run: ba4 is not saved after 31 s; ")
    assert describe_saves(run.parts)[WAITS_FOR_SAVE] == "ba4 in run"


@pytest.mark.parametrize("outcome", [published(4), not_written(REFUSED)])
def test_a_save_that_has_ended_is_not_waited_for(monkeypatch, outcome):
    run = Run(monkeypatch, outcome)
    run.parts._note_wait("ba4", 31.2)
    logger = SimpleNamespace(log_metrics=lambda metrics: None)
    run.parts._advance_save(run.parts.saver.wait, run.state, logger)
    assert WAITS_FOR_SAVE not in describe_saves(run.parts)


def test_the_last_save_is_made_again_until_it_is_published(monkeypatch):
    run = Run(monkeypatch, not_written(), not_written(), not_written(), published(4))
    run.finish()
    assert run.pauses == [1.0, 2.0, 5.0] and run.saves == [4, 4, 4]
    assert run.parts.published_batch == 4 and run.said[-1] == "saved ba4"


def test_the_last_save_is_given_up_when_the_time_is_spent(monkeypatch):
    run = Run(monkeypatch, *[not_written() for _ in range(5)], retry_for="10s")
    with pytest.raises(CheckpointError, match="not written"):
        run.finish()
    assert run.pauses == [1.0, 2.0, 5.0, 2.0] and not run.ends


@pytest.mark.parametrize(
    ("batch", "published_batch", "expected"),
    [(4, 4, False), (4, 2, True), (4, -1, True), (0, -1, False)],
    ids=["all is saved", "an older save stands", "no save stands", "nothing was trained"],
)
def test_batches_are_lost_that_no_save_holds(monkeypatch, batch, published_batch, expected):
    run = Run(monkeypatch)
    run.parts.published_batch, run.state.timestamp.batch = published_batch, batch
    assert run.parts.has_unsaved_batches(run.state) is expected


def test_an_island_says_that_others_hold_its_batches(monkeypatch):
    """It may have saved nothing itself, and its next launch meets a fault: that one has lost nothing."""
    parts = Run(monkeypatch).parts
    assert "has_other_launches" not in describe_saves(parts)
    parts.config.trains_alone = False
    killed = {"status": "failed", "batch": 9, **describe_saves(parts)}
    assert killed["last_saved"] == "ba2" and not has_lost_batches(killed)


def test_a_launch_that_left_before_its_first_save_does_not_name_the_checkpoint_it_came_from(monkeypatch):
    run = Run(monkeypatch)
    run.parts.config.autoresume, run.parts.was_preempted_by = True, "SIGTERM"
    run.parts.preemption = SimpleNamespace(describe_reason=lambda reason: f"preempted by {reason}")
    run.parts.published_batch = -1
    text = "preempted by SIGTERM at batch 4, nothing to save yet; run the same command again"
    assert describe_preemption(run.parts, run.state) == text


def refused_by_s3(code: str) -> CheckpointError:
    answer = OSError("The provided token has expired.")
    answer.response = {"Error": {"Code": code}}  # type: ignore[attr-defined]
    return not_written(answer)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
def test_a_save_whose_credentials_are_refused_asks_for_new_ones_and_the_run_goes_on(monkeypatch, code):
    run = Run(monkeypatch, refused_by_s3(code))
    assert run.parts._advance_save(run.parts.saver.wait, run.state, None) is not None
    words = "renew the credentials; ba2 stands, and the next save tries again"
    assert run.said == [f"warning: run/ba4: not written: No space left on device; {words}"]


def test_a_last_save_whose_credentials_stay_refused_fails_the_run_and_is_no_mistake(monkeypatch):
    run = Run(monkeypatch, *[refused_by_s3("AccessDenied") for _ in range(5)], retry_for="10s")
    with pytest.raises(CheckpointError) as caught:
        run.finish()
    caught.value.has_lost = run.parts.has_unsaved_batches(run.state)
    assert caught.value.exit_code == 1
    assert describe_error(caught.value).endswith("; renew the credentials, then run the same command again")


def test_a_save_that_is_due_while_a_failing_one_goes_on_is_left_out_unless_it_is_the_last(monkeypatch):
    run = Run(monkeypatch)
    run.parts.saver = SimpleNamespace(
        has_save_in_flight=True, has_lease=True, next_is_second=False, poll=lambda all_idle: None
    )
    run.parts.agreement, run.parts.run_state = SimpleNamespace(all_idle=False), SimpleNamespace()
    begun, logger = [], SimpleNamespace(log_metrics=lambda metrics: None)
    run.parts._advance_save = lambda step, state, logger: begun.append(step)
    monkeypatch.setattr(checkpointing, "collect_metadata", lambda saving, state: None)
    run.parts.model, run.state.optimizers = SimpleNamespace(model=None), [None]
    run.parts.saver.save = begun.append
    del run.parts._save

    def begins_a_save(**decided: Any) -> bool:
        begun.clear()
        decision = Decision(saves=True, preempted_by="", stops=False, owes_evaluation=False)._replace(**decided)
        run.parts.policy = SimpleNamespace(
            timer=None, digest_span=None, decide=lambda state: decision, is_last=lambda state: False
        )
        run.state.stop_training = lambda: None
        run.parts.batch_checkpoint(run.state, logger)
        return len(begun) == 2  # `poll`, and then `save`

    assert begins_a_save()
    run.parts.failed_saves.note_failure(not_written(), Timestamp(batch=4))
    assert not begins_a_save()
    assert begins_a_save(stops=True)
    assert begins_a_save(preempted_by="SIGTERM")


@pytest.mark.parametrize(
    ("limit", "save_at", "is_over_at"),
    [("30m", [60, 120], 1800), ("90s", [60, 90], 90), ("10s", [10], 10), ("5ba", [60, 120], None)],
)
def test_saves_that_fail_are_made_again_each_minute_and_once_at_the_limit(monkeypatch, limit, save_at, is_over_at):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(failed_saves, "time", SimpleNamespace(monotonic=lambda: clock.now))
    failed, tried, over = FailedSaves(parse_limit(limit)), [], None
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=4))
    assert not failed.wants_save() and not failed.is_over_limit(state)
    failed.note_failure(not_written(), Timestamp(batch=4))
    while over is None and clock.now < 2000:
        clock.now += 1
        if failed.wants_save():
            tried.append(int(clock.now))
            failed.note_failure(not_written(), Timestamp(batch=4))
            if failed.is_over_limit(state):
                over = int(clock.now)
    assert tried[: len(save_at)] == save_at and over == is_over_at
    assert not failed.is_over_limit(state) or over
    if limit == "5ba":
        assert not failed.is_over_limit(SimpleNamespace(timestamp=Timestamp(batch=8)))  # type: ignore[arg-type]
        assert failed.is_over_limit(SimpleNamespace(timestamp=Timestamp(batch=9)))  # type: ignore[arg-type]
    failed.note_published()
    assert (failed.count, failed.wants_save(), failed.is_over_limit(state)) == (0, False, False)


def digests_by_record(
    monkeypatch, num_batches: int, digest_interval: int, save_at: list[int], polls_at: list[int] | None = None
) -> dict[int, int]:
    """Return batch of a record -> the batch whose digest it has. A save is published at the second poll."""
    run, records, polls = Run(monkeypatch), {}, [0, 0]

    def poll(all_idle):
        polls.append(run.state.timestamp.batch)
        return published(run.parts.begun_batch) if len(polls) == 2 else None

    run.parts.saver = SimpleNamespace(poll=poll, digest=lambda model, optimizer: "", next_is_second=False)
    run.parts.policy = SimpleNamespace(
        timer=None, digest_span=digest_interval, decide=lambda state: decision, is_last=lambda state: False
    )
    run.parts.published_batch = -1
    run.parts.agreement, run.parts.model = SimpleNamespace(all_idle=True), SimpleNamespace(model=None)
    run.parts.run_state, run.state.optimizers = SimpleNamespace(), [None]
    run.parts._save = lambda state, logger, waits: (
        polls.clear(),
        setattr(run.parts, "begun_batch", state.timestamp.batch),
    )
    monkeypatch.setattr(checkpointing, "has_passed", lambda state, span: state.timestamp.batch % span == 0)
    for batch in range(1, num_batches + 1):
        run.state.timestamp.batch, record = batch, {}
        decision = Decision(saves=batch in save_at, preempted_by="", stops=False, owes_evaluation=False)
        run.parts.batch_checkpoint(run.state, SimpleNamespace(log_metrics=record.update))
        records |= {batch: record["state/batch"]} if "state/batch" in record else {}
    if polls_at is not None:
        polls_at += polls
    return records


def test_a_save_is_moved_on_in_every_batch_though_each_has_a_digest(monkeypatch):
    polls: list[int] = []
    digests_by_record(monkeypatch, 6, 1, [], polls)
    assert polls == [0, 0, 1, 2, 3, 4, 5, 6]


def test_digests_between_saves_take_no_save_its_own(monkeypatch):
    """Saves of batches 3 and 8 are ready at batches 5 and 10, which have digests of their own."""
    assert digests_by_record(monkeypatch, 11, 5, [3, 8]) == {5: 5, 6: 3, 10: 10, 11: 8}
    assert digests_by_record(monkeypatch, 5, 1, [2]) == {batch: batch for batch in range(1, 6)}


# ------------------------------------------------------------------------------------------------ real ranks


class FullDisk(Callback):
    """The disk of one rank takes no shard of the saves of `batches`, so many times."""

    def __init__(self, rank: int, batches: list[int], times: int):
        if int(os.environ["RANK"]) == rank:
            self.drafts, self.times = [f"-ba{batch}-" for batch in batches], times
            self.sink = local_folder.LocalFolder.sink
            local_folder.LocalFolder.sink = lambda folder, name, num_bytes: self.full(folder, name, num_bytes)

    def full(self, folder, name, num_bytes):
        if self.times > 0 and any(draft in folder.url for draft in self.drafts):
            self.times -= 1
            raise FULL
        return self.sink(folder, name, num_bytes)


def run_with(tmp_path, data, num_ranks=1, *, disk, **changes):
    callbacks = {"python:tests.training.test_transient_faults:FullDisk": disk}
    changes = {"max_duration": "6ba", "save_interval": "2ba", "retry_for": "1m", "callbacks": callbacks, **changes}
    result = train([write_config(tmp_path / "tiny.yaml", tiny_config(data, **changes))], tmp_path, num_ranks)
    return result, json.loads((tmp_path / "runs/tiny/status.json").read_text())


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_a_save_and_no_batch(tmp_path, data):
    """On one rank of two; of the last save it takes the second try."""
    disk = {"rank": 1, "batches": [4, 6], "times": 2}
    result, status = run_with(tmp_path, data, 2, disk=disk)
    assert "No space left on device; ba2 stands, and the next save tries again" in result.check().output
    assert status["status"] == "done"
    assert (tmp_path / "runs/tiny/checkpoints/ba6").is_dir()
    assert len(values(read_metrics(tmp_path / "runs/tiny"), "loss/train/total")) == 6


@pytest.mark.parametrize(
    ("saves", "status", "may_pass", "tries_again"),
    [
        ([(None, 0), ("ba2", 0), ("ba2", 1)], "failed", False, True),  # saves fail, also where a thread ends it
        ([(None, 0), ("ba2", 0)], "failed", True, True),  # another fault that may pass
        ([(None, 0), ("ba2", 0)], "failed", False, False),  # a bug
        ([("ba2", 0), ("ba2", 3)], "failed", True, False),  # an earlier launch has saved that: this one was in vain
        ([(None, 0), ("ba2", 0), ("ba2", 1)], "preempted", True, False),
    ],
)
def test_scripts_launch_again_after_a_fault_unless_the_launch_was_in_vain(
    tmp_path, monkeypatch, saves, status, may_pass, tries_again
):
    """They read status.json, because the exit code is 1, as for a bug."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    folder = RunFolder(SimpleNamespace(run_folder=str(tmp_path / "run")))  # type: ignore[arg-type]
    for last_saved, num_failed in saves:
        saves_now = {"last_saved": last_saved, "failed_saves": num_failed, "save_error": None}
        folder.note_saves({**saves_now, WAITS_FOR_SAVE: "ba4 in run"})
    folder.trainer = SimpleNamespace(state=SimpleNamespace(timestamp=Timestamp(batch=9)))  # type: ignore[assignment]
    folder.is_running = True
    folder._update_status()
    told = json.loads((tmp_path / "run/status.json").read_text())
    assert told.get("has_saved", False) == (saves[0] != saves[-1] and saves[0][0] is None)
    assert told[WAITS_FOR_SAVE] == "ba4 in run"
    folder.fail(status, "a reason", may_pass=may_pass)
    written = json.loads((tmp_path / "run/status.json").read_text())
    assert (written["status"], written.get("try_again", False)) == (status, tries_again)
    assert WAITS_FOR_SAVE not in written, "it waits no more"

    monkeypatch.setattr(was_preempted, "load_train_config", lambda arguments: SimpleNamespace(config=folder.config))
    assert was_preempted.is_to_go_on(0.0, []) == (status == "preempted" or tries_again)


@pytest.mark.multiprocess
def test_a_run_whose_saves_fail_for_too_long_says_so_and_leaves_as_failed(tmp_path, data):
    """A checkpoint stands, but it holds none of the last batches, so this is no preemption."""
    disk = {"rank": 0, "batches": list(range(4, 40, 2)), "times": 99}
    result, status = run_with(tmp_path, data, disk=disk, max_duration="40ba", max_unsaved="12ba")
    assert result.exit_codes == [1]
    assert (status["status"], status["last_saved"], status["try_again"]) == ("failed", "ba2", True)
    num_failed = status["failed_saves"]
    assert num_failed >= 2 and status["save_error"].endswith("not written: No space left on device")
    last = result.output.strip().splitlines()[-1]
    facts = f"unsaved batches {status['batch'] - 2}, failed saves {num_failed}"
    assert last.startswith(f"error: max_unsaved: saves have failed for 12ba; {facts}, the last one: ")
    assert f"; ba2 stands; {num_failed} saves in a row have failed, and the next save tries again\n" in result.output
    assert re.search(r"batch .*/40 .* failed saves 1 · unsaved batches \d+\n", result.output)
    failed = [record[FAILED_SAVES] for record in read_metrics(tmp_path / "runs/tiny") if FAILED_SAVES in record]
    assert failed and sorted(failed) == failed


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("batches", [[4, 6], [2, 4, 6]])
def test_a_disk_that_stays_full_to_the_end_is_no_preemption(tmp_path, data, batches):
    result, status = run_with(tmp_path, data, disk={"rank": 0, "batches": batches, "times": 9}, retry_for=0)
    assert result.exit_codes == [1]
    assert (status["status"], status["batch"]) == ("failed", 6)
    assert status["reason"].endswith("No space left on device; this may pass: run the same command again")
    assert (tmp_path / "runs/tiny/checkpoints/ba2").is_dir() == (2 not in batches)
