"""What `Checkpointing` asks of the store, the saver and the restore, with a real store and a real saver."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from composer.core import Time, Timestamp

from llmfoundry_lite.checkpoint import save as save_module
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.start import Start
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_lite.training import after_save, failed_saves
from llmfoundry_lite.training import checkpointing as checkpointing_module
from llmfoundry_lite.training import start as start_module
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.save_texts import describe_preemption, describe_saves
from llmfoundry_lite.training.second_place import describe_missing_save
from llmfoundry_lite.training.start import restore_tensors
from tests.checkpoint.ranks import about, build, save_now, step, whole_state
from tests.checkpoint.saves import names, save
from tests.helpers.tiny import tiny_config, write_config


def checkpointing(folder: Path, start: Start, model: Any = None, **changes: Any) -> Checkpointing:
    """A run's checkpointing, whose agreement has no batches to read."""
    changes = {"run_folder": str(folder / "run"), "save_folder": str(folder / "saves"), **changes}
    config = load_train_config([write_config(folder / "tiny.yaml", tiny_config(folder / "data", **changes))]).config
    preemption = Preemption(folder, 30.0, None, print, print)
    agreement = Agreement(SimpleNamespace(), preemption, lambda: None)  # type: ignore[arg-type]
    return Checkpointing(
        config,
        SimpleNamespace(model=model),
        SimpleNamespace(),
        preemption,
        agreement,
        start,
        LaunchRole(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("is_run_folder", "batch", "saved", "stands"),
    [
        (True, 4, "saved as ba4", "ba4 stands"),
        (
            False,
            4,
            "nothing to save yet",
            "nothing was saved yet, and the same command with autoresume=true starts over",
        ),
        (
            True,
            0,
            "nothing to save yet",
            "nothing was saved yet, and the same command with autoresume=true starts over",
        ),
    ],
    ids=["carries on", "begins from another run's state", "begins"],
)
def test_a_launch_that_leaves_at_once_names_only_a_checkpoint_of_its_own_folder(
    tmp_path, is_run_folder, batch, saved, stands
):
    parts = checkpointing(tmp_path, Start(is_run_folder=is_run_folder, url=str(tmp_path)))
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=batch))
    parts.begin(state)
    parts.was_preempted_by = "SIGTERM"
    again = "run the same command again with autoresume=true"
    assert describe_preemption(parts, state) == f"preempted by SIGTERM at batch {batch}, {saved}; {again}"
    assert parts.preemption.describe_saves() == stands
    assert describe_saves(parts)["last_saved"] == ("ba4" if saved == "saved as ba4" else None)
    assert not parts.has_unsaved_batches(state), "nothing was trained"
    assert parts.has_unsaved_batches(SimpleNamespace(timestamp=Timestamp(batch=batch + 1)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("published", "durable", "batch", "expected"),
    [
        (4, -1, 9, "batches 5 to 9 are in no save; ba4 stands"),
        (4, 8, 9, "batch 9 is in no save; ba8 stands"),
        (4, 8, 8, "ba8 stands"),
        (-1, -1, 9, "nothing was saved yet, and the same command with autoresume=true starts over"),
    ],
    ids=["a save of this launch", "one that the main thread does not know of", "the newest batch", "none"],
)
def test_a_launch_that_leaves_in_a_hang_names_the_batches_that_no_save_holds(
    tmp_path, monkeypatch, published, durable, batch, expected
):
    parts = checkpointing(tmp_path, Start())
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=0))
    parts.begin(state)
    parts.published_batch, parts.begun_batch = published, durable
    monkeypatch.setattr(parts.after_save, "finish", lambda lease, place: None)
    if durable > 0:
        parts._after_publish(Lease(1, {}), parts.store)
    state.timestamp = Timestamp(batch=batch)
    assert parts.preemption.describe_saves() == expected


@pytest.mark.fault
def test_a_launch_sets_damaged_checkpoints_of_its_own_folder_aside(tmp_path, monkeypatch):
    """One whose file is too short is seen in the listing, one with a wrong byte when it is read."""
    model, optimizer = build("plain")
    parts = checkpointing(tmp_path, Start(is_run_folder=True, url=str(tmp_path / "saves")), model)
    parts.saver = saver = Saver(parts.store)
    expected = {}
    for batch in (1, 2, 3):
        step(model, optimizer, batch)
        save_now(saver, model, optimizer, batch)
        expected.setdefault(batch, {name: tensor.clone() for name, tensor in whole_state(model, optimizer).items()})
    shards = [tmp_path / f"saves/ba{batch}/shard-00000.safetensors" for batch in (2, 3)]
    content = bytearray(shards[0].read_bytes())
    content[-1] ^= 1
    shards[0].write_bytes(content)
    os.truncate(shards[1], shards[1].stat().st_size - 1)

    monkeypatch.setattr(start_module, "check_fit", lambda *arguments: None)
    state: Any = SimpleNamespace(optimizers=[optimizer])
    restored = restore_tensors(parts.config, parts.start, parts.model, state, saver, carries_on=True)
    assert restored is not None and restored.url == f"{tmp_path}/saves/ba1"
    assert all((expected[1][name] == tensor).all() for name, tensor in whole_state(model, optimizer).items())
    set_aside = sorted(name for name in os.listdir(tmp_path / "saves") if name.startswith(".damaged-"))
    assert [name.split("-")[1] for name in set_aside] == ["ba2", "ba3"]
    assert [f"now {name}" in note for name, note in zip(set_aside, reversed(restored.notes), strict=True)] == [True] * 2


def test_retention_keeps_what_a_process_of_this_launch_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_num_checkpoints_to_keep=1)
    lease = parts.store.acquire()
    for batch in (1, 2, 3):
        save(parts.store, lease, batch)
    monkeypatch.setattr(after_save, "check_present", lambda checkpoint: None)
    parts.in_use.add("ba1")
    parts.after_save.remove_old(lease)
    assert names(parts.store) == ["ba3", "ba1"]
    parts.in_use.clear()
    parts.after_save.remove_old(lease)
    assert names(parts.store) == ["ba3"]


def test_save_folder_keeps_its_newest_saves_whatever_is_in_the_second_place(tmp_path, monkeypatch):
    """A machine that does not see the second place resumes from one of them. Saves do not wait for the other place."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_num_checkpoints_to_keep=1, save_fallback=str(tmp_path / "second"))
    lease, second = parts.store.acquire(), parts.store.second
    assert second is not None
    second.follow(lease)
    for batch, place in ((1, parts.store), (2, parts.store), (3, second), (4, second)):
        save(place, lease, batch)
    with monkeypatch.context() as patch:
        patch.setattr(second, "candidates", lambda: pytest.fail("a place that may hang is asked"))
        patch.setattr(second, "check", lambda lease: pytest.fail("a place that may hang is asked"))
        parts.after_save.finish(lease, parts.store)
    assert (names(parts.store), names(second)) == (["ba2"], ["ba4", "ba3"])
    parts.after_save.finish(lease, second)
    assert (names(parts.store), names(second)) == (["ba2"], ["ba4"])


def test_the_second_place_keeps_what_is_among_the_newest_of_both(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_num_checkpoints_to_keep=2, save_fallback=str(tmp_path / "second"))
    lease, second = parts.store.acquire(), parts.store.second
    assert second is not None
    second.follow(lease)
    for batch, place in ((1, parts.store), (2, second), (3, second), (4, parts.store)):
        save(place, lease, batch)

    # The thread that copies removes the save that it would copy in vain, and counts again when it has copied.
    saver: Any = SimpleNamespace(second=second, lease=lease, first_answers=True)
    parts.second_place.begin_copying(saver, parts.after_save)
    copy_back = parts.second_place.copy_back
    assert copy_back is not None and copy_back._is_idle.wait(30)
    parts.second_place.stop()
    assert (names(parts.store), names(second)) == (["ba4", "ba3"], [])


def test_while_the_lease_is_not_renewed_saves_go_to_the_second_place_at_once(tmp_path, monkeypatch):
    """A bucket that does not answer would hold up a launch that has to leave."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model, optimizer = build("plain")
    parts = checkpointing(tmp_path, Start(), save_fallback=str(tmp_path / "second"))
    parts.saver = saver = Saver(parts.store, after_publish=parts._after_publish)
    saver.take_lease()
    saved = []
    for batch, watch_seconds in ((1, -1.0), (2, 30.0)):
        monkeypatch.setattr(save_module, "WATCH_SECONDS", watch_seconds)
        step(model, optimizer, batch)
        saver.save(model, optimizer, about(batch))
        saved.append(saver.wait())
    saver.release_lease()
    assert [save.is_in_second for save in saved if save is not None] == [True, False]
    assert names(CheckpointStore(tmp_path / "second")) == ["ba1"] and names(CheckpointStore(tmp_path / "saves")) == [
        "ba2"
    ]


def test_a_second_place_that_cannot_be_written_is_left_out(tmp_path):
    (tmp_path / "file").write_text("")
    parts = checkpointing(tmp_path, Start(), save_fallback=str(tmp_path / "file/second"))
    saver = Saver(parts.store)
    saver.take_lease()
    saver.release_lease()
    assert saver.second is None and saver.second_error.startswith(f"{tmp_path}/file/second: cannot be written: ")


def test_a_second_place_that_loses_the_claim_does_not_end_a_launch_that_saves_in_the_first(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_num_checkpoints_to_keep=1, save_fallback=str(tmp_path / "second"))
    lease = parts.store.acquire()
    save(parts.store, lease, 1)
    save(parts.store, lease, 2)
    monkeypatch.setattr(after_save, "check_present", lambda checkpoint: None)
    parts.after_save.finish(lease, parts.store)
    assert names(parts.store) == ["ba2"] and capsys.readouterr().out == ""
    for _ in range(2):
        parts.after_save.remove_old_in_second(lease, parts.store.candidates())
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"old checkpoints in save_fallback were not removed: {tmp_path}/second: ")


def test_ranks_decide_alike_though_only_rank_0_knows_of_copies(tmp_path, monkeypatch):
    """Whether a save waits for the one before decides whether ranks meet in a collective."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    places = [checkpointing(tmp_path, Start(), save_fallback=str(tmp_path / "second")).second_place for _ in range(2)]
    for place in places:
        place.note_failure("away")
        place.note_published("ba4", is_in_second=True)
    places[0]._copied_names.add("ba4")
    assert [place.note_copies(4) for place in places] == [True, False]
    assert places[0].error == "" and [place.first_fails for place in places] == [True, True]
    for place in places:
        place.note_published("ba6", is_in_second=False)
    assert [place.first_fails for place in places] == [False, False]


def test_max_unsaved_ends_a_launch_whose_second_place_fails_while_the_first_is_away(tmp_path, monkeypatch):
    """A save is due at each batch, so that the next one is in flight whenever one has failed."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_interval="1ba", save_fallback=str(tmp_path / "second"))

    def fail(*, all_idle: bool) -> None:
        raise CheckpointError("second: full") from OSError(errno.ENOSPC, "full")

    saver: Any = SimpleNamespace(poll=fail, next_is_second=False, has_save_in_flight=True)
    parts.saver = saver
    state: Any = SimpleNamespace(
        timestamp=Timestamp(batch=4), previous_timestamp=Timestamp(batch=3), max_duration=Time(10, "ba")
    )
    parts.begin(state)
    monkeypatch.setattr(parts, "_save", lambda *arguments, **options: None)
    monkeypatch.setattr(parts.failed_saves, "is_over_limit", lambda state: True)
    logger: Any = SimpleNamespace(log_metrics=lambda metrics: None)
    with pytest.raises(CheckpointError, match="max_unsaved: saves have failed"):
        parts.batch_checkpoint(state, logger)
    saver.next_is_second = True  # a save to save_folder has failed: the one to save_fallback decides
    parts.batch_checkpoint(state, logger)


def test_a_disk_that_hangs_later_is_not_asked_where_checkpoints_are(tmp_path, monkeypatch):
    parts = checkpointing(tmp_path, Start())
    records: list[dict[str, Any]] = []
    parts.saver = SimpleNamespace(record_launch=records.append)  # type: ignore[assignment]
    parts.record_launch({"status": "running"})
    monkeypatch.setattr(checkpointing_module, "is_in_run_folder", lambda place, config: pytest.fail("asked again"))
    parts.record_launch({"status": "preempted"})
    assert [record["status"] for record in records] == ["running", "preempted"]


def test_a_launch_says_where_the_newest_save_is_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    parts = checkpointing(tmp_path, Start(), save_fallback=str(tmp_path / "second"))
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=9))
    parts.begin(state)
    parts.published_batch, parts.was_preempted_by = 9, "SIGTERM"
    parts.second_place.note_failure("saves: away")
    line = parts.second_place.note_published("ba9", is_in_second=True)
    assert line == f"saved ba9 in {tmp_path}/second, because saves to {tmp_path}/saves fail: saves: away"
    assert f" at batch 9, saved as ba9 in {tmp_path}/second; " in describe_preemption(parts, state)
    assert parts.preemption.describe_saves() == f"ba9 stands in {tmp_path}/second"
    told = describe_saves(parts)
    assert (told["last_saved"], told["last_saved_in"], told["failed_saves"]) == ("ba9", f"{tmp_path}/second", 0)
    assert told["save_error"] == "saves: away"
    parts.preemption.reason, parts.begun_batch = 1, 9
    parts._after_publish(Lease(1, {}), parts.store.second)
    assert parts.preemption.saved == f"ba9 in {tmp_path}/second"  # for the line of a launch that leaves late

    # The next launch, on a machine that does not have this place.
    (tmp_path / "run").mkdir(exist_ok=True)
    write_status(tmp_path / "run", "failed", 9, "killed", **told)
    note = describe_missing_save(parts.config, Start(checkpoint_name="ba4", training_done={"ba": 4}))
    assert f"the last launch saved ba9 in {tmp_path}/second, which is not found" in note and "begins from ba4" in note
    assert describe_missing_save(parts.config, Start(checkpoint_name="ba9", training_done={"ba": 9})) == ""
    assert "begins at batch 1;" in describe_missing_save(parts.config, Start())
    assert "begins from load_path, s3://b/ba4;" in describe_missing_save(parts.config, Start(url="s3://b/ba4"))


def test_a_failed_save_is_made_again_before_the_next_interval(tmp_path, monkeypatch):
    """By rank 0's clock, on which ranks agree at the end of a batch."""
    parts, asked = checkpointing(tmp_path, Start(), save_interval="1000ba"), []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(failed_saves, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def end_batch(*, is_last: bool, is_busy: bool, wants_save: bool) -> None:
        asked.append(wants_save)
        parts.agreement.save_is_due = wants_save

    monkeypatch.setattr(parts.agreement, "end_batch", end_batch)
    parts.saver = SimpleNamespace(is_busy=False)  # type: ignore[assignment]
    state: Any = SimpleNamespace(
        timestamp=Timestamp(batch=4), previous_timestamp=Timestamp(batch=3), max_duration=Time(10, "ba")
    )
    monkeypatch.setattr(parts, "evaluates_now", lambda state: False)
    parts.begin(state)
    parts.failed_saves.note_failure(CheckpointError("s3://b/ba2: not written"), Timestamp(batch=2))
    for clock.now in (59.0, 60.0):
        parts.batch_end(state, SimpleNamespace())  # type: ignore[arg-type]
        assert parts.policy.decide(state).saves == asked[-1]
    assert asked == [False, True]
