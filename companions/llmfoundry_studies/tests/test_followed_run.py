"""A look at a run says which checkpoints are next, and whether the training has ended."""

import json
import shutil
from dataclasses import replace

import pytest

from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import CheckpointError, ConfigError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_studies import followed_run
from llmfoundry_studies.followed_run import FollowedRun
from tests.checkpoint.saves import write_draft

PATIENCE = 600.0


def save(url, batch: int, lease: Lease | None = None) -> Lease:
    """Save a batch of a run of four batches, and return the lease."""
    store = CheckpointStore(str(url))
    lease = lease or store.acquire()
    store.publish(replace(write_draft(store, lease, batch), config={"max_duration": "4ba"}), lease)
    return lease


def follow(source) -> FollowedRun:
    """Return a run after its first look."""
    run = FollowedRun("base", str(source), PATIENCE)
    run.look()
    return run


def take_all(run: FollowedRun) -> list[str]:
    """Return the names of all checkpoints whose turn it is."""
    names = []
    while True:
        checkpoint = run.next_checkpoint()
        if checkpoint is None:
            return names
        names.append(checkpoint.model)


@pytest.fixture
def clock(monkeypatch):
    """A clock for the time without a sign of a launch; `clock.now` can be set."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(followed_run, "time", clock)
    return clock


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_each_checkpoint_is_next_once_in_order_of_batch(tmp_path, below):
    lease = save(tmp_path / below, 2)
    save(tmp_path / below, 1, lease)
    run = follow(tmp_path)
    assert take_all(run) == ["base-ba1", "base-ba2"]
    run.look()
    assert take_all(run) == []
    save(tmp_path / below, 3, lease)
    run.look()
    assert take_all(run) == ["base-ba3"]


def test_a_run_need_not_exist_yet(tmp_path):
    run = follow(tmp_path / "later")
    assert run.describe_wait()[0] == (f"base: waiting for its first checkpoint: {tmp_path}/later does not exist")
    save(tmp_path / "later/checkpoints", 1)
    run.look()
    assert take_all(run) == ["base-ba1"]


def test_the_batch_of_the_planned_end_ends_a_run_that_no_launch_trains_any_more(tmp_path):
    lease = save(tmp_path, 3)
    run = follow(tmp_path)
    assert not run.has_ended
    save(tmp_path, 4, lease)
    CheckpointStore(str(tmp_path)).release(lease)
    run.look()
    assert run.has_ended
    assert run.failure == ""
    assert run.describe_end() == "base: the last checkpoint is ba4: its training is done"


def test_a_run_that_is_trained_beyond_its_planned_end_has_not_ended(tmp_path, monkeypatch):
    save(tmp_path, 4)
    monkeypatch.setattr(followed_run, "is_alive_here", lambda owner: True)
    assert not follow(tmp_path).has_ended


def test_a_run_without_a_sign_of_a_launch_ends_after_the_patience(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(followed_run, "is_alive_here", lambda owner: None)  # as for another machine
    lease = save(tmp_path, 2)
    run = follow(tmp_path)
    assert run.describe_wait() == ("base: waiting for a checkpoint after ba2: it trains", "")

    # It renews its lease, then falls silent.
    clock.now += PATIENCE
    CheckpointStore(str(tmp_path)).leases.renew(lease, 7)
    run.look()
    assert not run.has_ended
    clock.now += PATIENCE - 1
    run.look()
    assert not run.has_ended
    reason, duration = run.describe_wait()
    assert reason.endswith("has not renewed its lease")
    assert duration == ", for 599 s of 600 s (follow_patience)"
    clock.now += 1
    run.look()
    assert run.has_ended
    assert run.failure.startswith(f"models.base: {tmp_path} is at ba2, which is not the end of its training, 4ba, and ")
    assert "waited 600 s (follow_patience). The same command carries on when it trains again" in run.failure


def test_a_launch_of_this_machine_that_is_alive_never_loses_patience(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(followed_run, "is_alive_here", lambda owner: True)
    save(tmp_path, 2)
    run = follow(tmp_path)
    clock.now += 10 * PATIENCE
    run.look()
    assert not run.has_ended


@pytest.mark.parametrize(("status", "fails"), [("stopped", False), ("failed", True), ("preempted", True)])
def test_the_status_of_a_launch_that_has_left_is_said(tmp_path, clock, status, fails):
    save(tmp_path / "checkpoints", 2)
    write_status(tmp_path, status, 2, "SIGTERM")
    run = follow(tmp_path)
    assert run.describe_wait()[0] == f"base: waiting for a checkpoint after ba2: {status} at batch 2 (SIGTERM)"
    clock.now += PATIENCE
    run.look()
    assert run.has_ended
    assert bool(run.failure) == fails


def test_a_reason_that_has_the_status_and_the_batch_is_said_once(tmp_path, clock):
    save(tmp_path / "checkpoints", 2)
    reason = "preempted by SIGTERM at batch 2, saved as ba2; run the same command again"
    write_status(tmp_path, "preempted", 2, reason)
    assert follow(tmp_path).describe_wait()[0] == f"base: waiting for a checkpoint after ba2: {reason}"


def test_a_done_run_whose_last_batch_is_not_the_planned_one_has_ended(tmp_path):
    save(tmp_path / "checkpoints", 3)
    write_status(tmp_path, "done", 3)
    run = follow(tmp_path)
    assert run.has_ended
    assert not run.failure


def test_a_checkpoint_that_is_removed_before_its_turn_is_named_once(tmp_path):
    lease = save(tmp_path, 1)
    save(tmp_path, 2, lease)
    run = follow(tmp_path)
    shutil.rmtree(tmp_path / "ba1")
    assert run.look() == [
        f"models.base-ba1: passed over {tmp_path}/ba1, which was removed before its turn",
    ]
    assert run.look() == []
    assert take_all(run) == ["base-ba2"]


def test_a_damaged_checkpoint_is_named_once_and_not_next(tmp_path):
    lease = save(tmp_path, 1)
    save(tmp_path, 2, lease)
    manifest = tmp_path / "ba1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    run = FollowedRun("base", str(tmp_path), PATIENCE)
    [note] = run.look()
    assert note.startswith("models.base-ba1: passed over damaged checkpoint: ")
    assert run.look() == []
    assert take_all(run) == ["base-ba2"]


def test_a_manifest_that_cannot_be_read_for_a_while_is_read_again(tmp_path, monkeypatch):
    lease = save(tmp_path, 1)
    save(tmp_path, 2, lease)
    candidates = CheckpointStore.candidates

    def with_error(store):
        """Return the checkpoints as a storage does that does not answer for the newest one."""
        newest, *others = candidates(store)
        newest.head = None
        newest.outcome = CheckpointError("timed out")
        return [newest, *others]

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "candidates", with_error)
        run = follow(tmp_path)
        assert take_all(run) == ["base-ba1"]
    run.look()
    assert take_all(run) == ["base-ba2"]


def test_a_batch_that_a_later_launch_saves_again_is_next_again(tmp_path):
    first_lease = save(tmp_path, 1)
    save(tmp_path, 2, first_lease)
    run = follow(tmp_path)
    assert take_all(run) == ["base-ba1", "base-ba2"]
    save(tmp_path, 2)
    run.look()
    assert take_all(run) == ["base-ba2"]


def test_a_look_at_an_unchanged_folder_reads_no_manifest(tmp_path, monkeypatch):
    save(tmp_path, 1)
    run = follow(tmp_path)
    monkeypatch.setattr(CheckpointStore, "candidates", lambda store: pytest.fail("manifests were read"))
    run.look()


def test_a_folder_that_cannot_be_read_for_a_while_is_waited_for(tmp_path, monkeypatch):
    save(tmp_path, 1)
    run = follow(tmp_path)

    def refuse(store):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(type(run._store.commits), "names", refuse)  # type: ignore[union-attr]
        run.look()
        assert "cannot be read: Input/output error" in run.describe_wait()[0]
        with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
            follow(tmp_path)
    run.look()
    assert "cannot be read" not in run.describe_wait()[0]


def test_what_is_no_run_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for source in (tmp_path / "ba1", tmp_path / "model"):
        with pytest.raises(ConfigError, match=f"models.base: {source} is not a run, and follow=true evaluates"):
            follow(source)


def test_a_file_is_refused_at_once_and_not_waited_for(tmp_path):
    file = tmp_path / "model.pt"
    file.touch()
    with pytest.raises(ConfigError, match=f"models.base: {file} is a file, and follow=true evaluates the checkpoints"):
        follow(file)


def test_a_run_folder_that_saves_behind_a_url_says_where(tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps({"save_folder": "s3://bucket/base"}))
    with pytest.raises(
        ConfigError, match=r"models.base: .*: its checkpoints are in s3://bucket/base, which is not opened"
    ):
        follow(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps({"save_folder": str(tmp_path / "elsewhere")}))
    save(tmp_path / "elsewhere", 1)
    assert take_all(follow(tmp_path)) == ["base-ba1"]
