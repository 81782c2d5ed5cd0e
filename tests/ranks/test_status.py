"""status.json tells the truth about the last launch, the refused ones included."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from llmfoundry_lite.errors import CheckpointError, ConfigError, TransientError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.ranks import siblings, status
from llmfoundry_lite.ranks.siblings import FirstError
from tests.helpers.launch import train
from tests.helpers.tiny import tiny_config, write_config, write_data


def told(folder):
    return json.loads((folder / "status.json").read_text())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"status": "failed", "batch": 0, "reason": "no"}),
        (("preempted", 7, "SIGTERM"), {"status": "failed", "batch": 7, "reason": "no"}),
        (("done", 7), {"status": "done", "batch": 7, "reason": None}),
    ],
)
def test_a_launch_that_ended_early_keeps_the_batch_and_a_finished_run(tmp_path, before, after):
    if before:
        status.write_status(tmp_path, *before)
    status.write_ended_early(tmp_path, "failed", "no")
    assert told(tmp_path) == after


SAVES = {"last_saved": "ba4", "failed_saves": 3, "save_error": "s3://b/ba6: not written"}


def test_a_launch_that_cannot_begin_makes_no_preemption_of_batches_that_no_save_holds(tmp_path):
    status.write_status(tmp_path, "failed", 9, "max_unsaved", **SAVES)
    status.write_ended_early(tmp_path, "preempted", "s3://b: cannot be listed")
    expected = {"status": "failed", "batch": 9, "reason": "s3://b: cannot be listed", **SAVES, "try_again": True}
    assert told(tmp_path) == expected


@pytest.mark.parametrize(
    ("before", "last_saved", "expected"),
    [
        ("failed", "ba8", "failed"),
        ("failed", None, "failed"),
        ("failed", "ba9", "preempted"),
        ("preempted", "ba8", "preempted"),
    ],
)
def test_a_launch_that_cannot_train_lost_batches_again_is_no_preemption(tmp_path, before, last_saved, expected):
    """A rank was killed in batch 10, and the bucket does not answer the next launch. Batch scripts launch again."""
    status.write_status(tmp_path, before, 9, "killed", last_saved=last_saved, failed_saves=0)
    island = told(tmp_path) | {"has_other_launches": True}
    assert not status.has_lost_batches(island), "other islands hold and save the same batches"
    error = CheckpointError("s3://b: cannot be listed")
    error.__cause__ = TransientError("SlowDown")
    published = []
    with (
        pytest.raises(CheckpointError),
        status.refusals_recorded(lambda: tmp_path, lambda *words: published.append(words)),
    ):
        raise error
    assert published == [(expected, told(tmp_path)["reason"])], "readers elsewhere learn what status.json says"
    assert (told(tmp_path)["status"], told(tmp_path).get("try_again", False)) == (expected, expected == "failed")
    assert error.exit_code == (1 if expected == "failed" else 75)


def test_what_a_killed_launch_has_said_of_its_saves_stands(tmp_path):
    status.write_status(tmp_path, "running", 9, **SAVES, waits_for_save="ba6 in s3://b")
    content = told(tmp_path)
    content["process"]["pid"] = 2**22 + 1
    (tmp_path / "status.json").write_text(json.dumps(content))
    found = status.read_status(tmp_path)
    assert found is not None and found["status"] == "failed" and SAVES.items() <= found.items()
    assert "waits_for_save" not in found


@pytest.mark.parametrize(
    ("failed_saves", "has_saved", "expected", "tries_again"),
    [
        (0, True, "preempted", False),
        (2, True, "failed", True),
        (2, False, "failed", False),  # an earlier launch has saved ba4: this one would only repeat itself
    ],
)
def test_a_launch_that_is_killed_while_it_leaves_and_saves_fail_is_no_preemption(
    tmp_path, failed_saves, has_saved, expected, tries_again
):
    more = SAVES | {"failed_saves": failed_saves, "has_saved": has_saved}
    status.write_status(tmp_path, "running", 9, "SIGTERM", **more)
    content = told(tmp_path)
    content["process"]["pid"] = 2**22 + 1
    (tmp_path / "status.json").write_text(json.dumps(content))
    found = status.read_status(tmp_path)
    assert found is not None and (found["status"], found.get("try_again", False)) == (expected, tries_again)
    assert found["reason"].startswith("SIGTERM: the process of rank 0 is gone without a word")


@pytest.mark.parametrize(("first", "expected"), [(1, "failed"), (0, "preempted")])
def test_the_first_rank_of_a_node_to_fail_records_why(tmp_path, monkeypatch, first, expected):
    """Rank 1 alone misses a mount, and its launcher then ends rank 0. The other way round, rank 0 records it."""
    monkeypatch.setenv("RANK", "1")
    failure = FirstError(first, 2, "error: no such mount")
    monkeypatch.setattr(status.ending.siblings, "record_end", lambda code, text: failure)
    status.write_status(tmp_path, "preempted", 7)
    with pytest.raises(ConfigError), status.refusals_recorded(lambda: tmp_path):
        raise ConfigError("no such mount")
    assert told(tmp_path)["status"] == expected


def test_every_beginning_and_end_of_a_launch_is_on_record_once(tmp_path):
    """A run that says how far it is does not begin anew; a killed launch leaves its beginning alone."""
    for batch in (0, 5, 9):
        status.write_status(tmp_path, "running", batch)
    content = told(tmp_path)
    content["process"]["started"] -= 60  # it was killed, and its number is ours now
    (tmp_path / "status.json").write_text(json.dumps(content))
    status.write_ended_early(tmp_path, "failed", "no disk")
    status.write_status(tmp_path, "running", 4)
    status.write_status(tmp_path, "done", 9)
    events = [json.loads(line) for line in (tmp_path / "launches.jsonl").read_text().splitlines()]
    assert [(event["status"], event["batch"], event["has_begun"]) for event in events] == [
        *(("running", 0, True), ("failed", 9, False), ("running", 4, True), ("done", 9, True)),
    ]
    assert all(event["time"] > 0 and event["host"] for event in events)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "running"),
        ({"started": 1}, "failed"),  # the number is another's by now
        ({"pid": 2**22 + 1}, "failed"),  # above what Linux gives
        ({"boot": "another"}, "failed"),  # this machine has started again since
        ({"boot": "another", "host": "elsewhere"}, "running"),  # cannot be asked
        ({"host": "elsewhere"}, "running"),  # this machine had another name
        ({"host": "elsewhere", "pid": 2**22 + 1}, "failed"),
        ({"namespace": "pid:[1]", "pid": 2**22 + 1}, "running"),  # a container of the same name: cannot be asked
    ],
)
def test_whether_a_run_runs_is_asked_of_its_process(tmp_path, change, expected):
    status.write_status(tmp_path, "running", 7)
    content = told(tmp_path)
    content["process"] |= change
    (tmp_path / "status.json").write_text(json.dumps(content))
    found = status.read_status(tmp_path)
    assert found is not None and found["status"] == expected
    status.write_ended_early(tmp_path, "failed", "no")
    assert told(tmp_path)["status"] == expected


def test_a_zombie_does_not_run(tmp_path):
    """Its parent has not asked yet how it ended, as a container's first process may never do."""
    code = (
        "from pathlib import Path\nfrom llmfoundry_lite.ranks import status\n"
        f"status.write_status(Path({str(tmp_path)!r}), "
    )
    child = subprocess.Popen([sys.executable, "-c", f"{code}'running', 7)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    found = status.read_status(tmp_path)
    assert told(tmp_path)["process"]["pid"] == child.pid and found is not None and found["status"] == "failed"
    child.wait()


def step_wall_clock(monkeypatch, seconds):
    """Set the wall clock, as NTP does: start dates of processes, computed from the boot's, move along."""
    real_time, real_boot = time.time, psutil._pslinux.boot_time  # type: ignore[attr-defined]
    monkeypatch.setattr(time, "time", lambda: real_time() + seconds)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real_boot() + seconds)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [2, -3600])
def test_a_step_of_the_wall_clock_neither_ends_a_launch_nor_begins_one(tmp_path, monkeypatch, seconds):
    status.write_status(tmp_path, "running", 7)
    step_wall_clock(monkeypatch, seconds)
    assert status.read_status(tmp_path) == told(tmp_path)
    status.write_status(tmp_path, "running", 9)
    assert len((tmp_path / "launches.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("pid", "expected"), [(os.getpid(), "running"), (2**22 + 1, "failed")], ids=["alive", "gone"])
def test_a_status_of_an_earlier_release_is_asked_of_its_process_too(tmp_path, pid, expected):
    process = {"host": socket.gethostname(), "pid": pid, "started": 1.5}
    content = {"status": "running", "batch": 7, "reason": None, "process": process}
    (tmp_path / "status.json").write_text(json.dumps(content))
    found = status.read_status(tmp_path)
    assert found is not None and found["status"] == expected


@pytest.mark.parametrize(("asked_by", "expected"), [(None, "failed"), ("SIGTERM", "preempted")])
def test_of_a_process_that_is_gone_without_a_word_readers_say_how_it_ended(tmp_path, asked_by, expected):
    """An abort, as by NCCL's watchdog, and the out-of-memory killer leave no time to write anything."""
    code = f"""
import os
from pathlib import Path
from llmfoundry_lite.ranks import status
status.write_status(Path({str(tmp_path)!r}), "running", 7, {asked_by!r})
os.abort()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGABRT
    found = status.read_status(tmp_path)
    assert found is not None and (found["status"], found["batch"]) == (expected, 7)
    assert "the process of rank 0 is gone without a word, killed or aborted" in found["reason"]


def test_a_file_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a", "before")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", b"after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


@pytest.fixture
def preempted(tmp_path):
    """A run of two batches."""
    config = tiny_config(write_data(tmp_path / "data"), stop_after="2ba")
    train([write_config(tmp_path / "tiny.yaml", config)], tmp_path).check()
    return tmp_path


@pytest.mark.multiprocess
def test_a_relaunch_that_is_refused_is_not_called_preempted_any_more(preempted):
    """Otherwise a script that launches preempted runs again would do so for ever."""
    for refused, reason in (
        (["model.d_modle=3"], "model.d_modle"),  # by the configuration
        (["train_loader.dataset.local=nowhere"], "nowhere"),  # by the world around it
        ([], "carry on with autoresume=true"),  # by its checkpoints
    ):
        status.write_status(preempted / "runs/tiny", "preempted", 2, "SIGTERM")
        assert train(["tiny.yaml", *refused], preempted).exit_codes == [2]
        found = told(preempted / "runs/tiny")
        assert (found["status"], found["batch"]) == ("failed", 2)
        assert reason in found["reason"]
    status.write_status(preempted / "runs/tiny", "preempted", 2, "SIGTERM")
    train(["tiny.yaml", "train_loader.dataset.local=nowhere", "--dry-run"], preempted).check()
    assert told(preempted / "runs/tiny")["status"] == "preempted"


def become(monkeypatch, tmp_path, rank):
    """Become a rank of one of two nodes, each of two tasks."""
    values = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    values |= {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURMD_NODENAME": f"n{rank // 2}"}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(siblings.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(siblings, "_launch_id", None)


def test_a_rank_that_srun_ends_has_the_exit_code_of_the_rank_of_another_node_that_failed(tmp_path, monkeypatch):
    """75, the highest code, would requeue the job for ever. A requeued job does not take the last try's failure."""
    monkeypatch.setattr(siblings, "find_failure_on_other_nodes", siblings.find_failure_on_other_nodes)
    folder = tmp_path / "run"
    become(monkeypatch, tmp_path, 0)
    with pytest.raises(ConfigError), status.refusals_recorded(lambda: folder):
        raise ConfigError("no such mount")
    become(monkeypatch, tmp_path, 3)
    assert siblings.find_recorded_failure() is None
    status.watch_for_failures_on_other_nodes(folder)
    failure = siblings.find_recorded_failure()
    assert failure == (0, 2, "error: no such mount")
    before = (folder / "launches.jsonl").read_text()
    with pytest.raises(status.ending.AnotherFailedError), status.refusals_recorded(lambda: folder):
        raise status.ending.AnotherFailedError(failure)
    assert (folder / "launches.jsonl").read_text() == before
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert siblings.find_recorded_failure() is None


def test_no_launch_is_recorded_through_a_link(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (status.STATUS, status.LAUNCHES):
        (folder / name).symlink_to(kept)
    with pytest.raises(OSError, match="a link, which would be written through; remove it"):
        status.write_status(folder, "preempted", 0)
    assert kept.read_text() == ""
    (folder / status.LAUNCHES).unlink()
    (tmp_path / "linked").symlink_to(folder)
    status.write_status(tmp_path / "linked", "preempted", 0)
    assert (folder / status.LAUNCHES).exists(), "a folder that is a link is the user's own"
