"""State of a run that may still be written."""

import json

import pytest

import llmfoundry_lite as lf
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_ops.runs import LiveRun
from llmfoundry_ops.tests.buckets import save_with_log
from llmfoundry_ops.watch import line_of
from tests.checkpoint.saves import save as save_checkpoint
from tests.helpers.reported import record, write_run


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("run_name: tiny\nmax_duration: 4ba\n")
    write_status(tmp_path, "running", 0)
    return tmp_path


def save(folder, batch):
    store = CheckpointStore(folder / "checkpoints")
    save_checkpoint(store, store.acquire(), batch)


def test_the_last_save_is_the_one_a_launch_carries_on_from(run):
    """Not a leftover of `rm -r`, nor one of before the run was started again from an older save."""
    save(run, 4)
    save(run, 2)
    (run / "checkpoints/ba999").mkdir()
    (run / "checkpoints/ba999/manifest.json").write_text("{}")
    assert LiveRun(run).last_checkpoint() == "ba2"


def test_a_run_that_has_ended_is_as_far_as_its_status_says(run):
    """Batches after its last save were logged, and are trained again."""
    (run / "metrics.jsonl").write_text(json.dumps({"batch": 3, "loss/train/total": 4.5}) + "\n")
    write_status(run, "running", 2)
    found = LiveRun(run)
    found.look()
    assert (found.batch, found.progress) == (3, 0.75)
    write_status(run, "failed", 2, "out of memory")
    found.look()
    assert (found.batch, found.progress) == (2, 0.5)


def test_a_run_that_saves_to_a_bucket_says_its_last_save_and_those_that_failed(run):
    """Its status.json tells: nobody asks the bucket."""
    (run / "config.yaml").write_text("max_duration: 4ba\nsave_folder: s3://bucket/run\n")
    failed = {"failed_saves": 3, "save_error": "s3://bucket/run/ba3: not written: the token has expired"}
    write_status(run, "running", 3, last_saved="ba2", **failed)
    (run / "metrics.jsonl").write_text(json.dumps({"batch": 3, "loss/train/total": 4.5}) + "\n")
    found = LiveRun(run)
    found.look()
    assert found.last_checkpoint() == "ba2"
    assert repr(found).endswith(f", saved ba2, failed saves 3: {failed['save_error']}>")
    assert line_of(found).endswith(f" · saved ba2 · failed saves 3: {failed['save_error']}")
    write_status(run, "running", 3, last_saved="ba3", last_saved_in="/nvme/run")
    found.look()
    assert found.last_checkpoint() == "ba3" and line_of(found).endswith(" · saved ba3 in /nvme/run")
    write_status(run, "running", 3, last_saved="\x1b[2J", failed_saves="many")
    found.look()
    assert (found.last_checkpoint(), found.failed_saves) == (None, 0)


def test_checkpoints_of_a_run_that_saved_to_a_variable_are_looked_for_in_its_own_folder(run):
    (run / "config.yaml").write_text("max_duration: 4ba\nsave_folder: ${oc.env:SCRATCH}/run\n")
    save(run, 2)
    found = LiveRun(run)
    found.look()
    assert found.last_checkpoint() == "ba2"


def test_a_folder_of_islands_says_which_of_them_to_watch(tmp_path):
    write_run(tmp_path / "run/a", [record(1)])
    write_run(tmp_path / "run/b", [record(1), record(2)])
    with pytest.raises(DataError, match=f"no status.json here; its folders a, b are runs.* give {tmp_path}/run/b"):
        LiveRun(tmp_path / "run")


def test_runs_in_a_bucket_are_listed_by_their_checkpoints():
    save_with_log("memory://runs/list/one", 2)
    save_with_log("memory://runs/list/two", 4)
    open_folder("memory://runs/list/data").put("index.json", b"{}")
    first, second = lf.runs("memory://runs/list")
    assert (first.folder, first.batch, first.has_ended, first.last_checkpoint()) == (
        *("memory://runs/list/one", 2, False, "ba2"),
    )
    assert (second.batch, second.progress, second.status["status"]) == (4, 1.0, "done")
    assert repr(first) == "<memory://runs/list/one: saved at batch 2, loss 4.5000, saved ba2>"
    assert lf.runs("memory://runs/empty") == []


def test_a_folder_of_saves_on_a_shared_disk_is_listed_too(tmp_path):
    save_with_log(str(tmp_path / "saves/tiny"), 2)
    (tmp_path / "saves/notes.txt").write_text("")
    (found,) = lf.runs(tmp_path / "saves")
    assert (found.batch, found.last_checkpoint(), found.config["run_name"]) == (2, "ba2", "tiny")


def test_a_max_duration_that_is_not_a_run_s_is_not_read(run):
    (run / "config.yaml").write_text("max_duration: 0.5dur\n")
    found = LiveRun(run)
    found.look()
    assert found.progress is None
