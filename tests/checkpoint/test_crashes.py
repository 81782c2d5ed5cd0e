"""Killed at any moment of a save or a removal, what is found afterwards is exactly what was committed."""

import os
import signal
import sys

import numpy as np
import pytest
import torch

from llmfoundry_lite.checkpoint.restore import load_newest
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.shards import ReadRequest, open_shard
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli import main
from tests.checkpoint.saves import ROWS, flip, names, save, saved, values_of

pytestmark = [pytest.mark.fault, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

PHASES = ["half a shard", "shard synced", "before manifest", "before rename", "after rename", "mid-prune"]


def run_until_killed(folder, phase, batches):
    """A child process that saves, keeps two, and kills itself at the second `phase` it comes to."""
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def kill(now):
                nonlocal count
                count += now == phase
                if count == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

            store = CheckpointStore(folder, on_phase=kill)
            lease = store.acquire()
            for batch in batches:
                save(store, lease, batch)
                prune(store, lease, keep_newest=2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def read_values(checkpoint):
    manifest, halves = checkpoint.manifest, []
    for file, chunk in manifest.overlapping("model/w", (0,), manifest.tensors["model/w"].shape):
        with open_shard(checkpoint.folder, manifest.files[file]) as shard:
            begin, target = shard.begin_of(chunk), np.empty(chunk.num_bytes, np.uint8)
            shard.read([ReadRequest(begin, begin + chunk.num_bytes, target, "model/w")])
        halves.append(target.view(np.int64))
    return np.concatenate(halves)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_any_phase_a_committed_state_is_found_and_the_run_goes_on(tmp_path, phase):
    for launch in range(3):
        start = 10 * launch
        assert run_until_killed(tmp_path, phase, range(start + 1, start + 9)), f"never came to {phase}"
        found = CheckpointStore(tmp_path).newest_intact(verify_checkpoint)
        assert not found.notes, "a crash damages nothing that was committed"
        if found.checkpoint is None:
            continue
        assert found.checkpoint.manifest.lease_epoch in (launch, launch + 1)
        assert np.array_equal(read_values(found.checkpoint), values_of(found.checkpoint.manifest.timestamp.batch))
    store, _lease = saved(tmp_path, 99)
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint is not None and found.checkpoint.name == "ba99"
    left = [name for name in os.listdir(tmp_path) if not name.startswith("ba")]
    assert sorted(left) == [".leases", "latest.json"], "nothing half done is left"


@pytest.fixture
def half_replaced(tmp_path):
    """A store that was killed between moving its only checkpoint away and putting the next in its place."""
    store, lease = saved(tmp_path, 1)
    child = os.fork()
    if child == 0:
        rename, count = os.rename, 0

        def stop_after_one(old, new):
            nonlocal count
            if count:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            rename(old, new)

        os.rename = stop_after_one
        save(store, lease, 1)
        os._exit(1)
    os.waitpid(child, 0)
    assert not (tmp_path / "ba1").exists()
    return CheckpointStore(tmp_path)


def check_found(store, name):
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint is not None and found.checkpoint.name.startswith(name) and not found.notes
    assert ROWS and np.array_equal(read_values(found.checkpoint), values_of(1))


def test_killed_between_replacing_and_renaming_the_replaced_save_is_found_and_comes_back(half_replaced, tmp_path):
    check_found(half_replaced, ".replaced-e1-ba1-")
    half_replaced.acquire()
    check_found(half_replaced, "ba1")
    assert sorted(os.listdir(tmp_path)) == [".leases", "ba1", "latest.json"]


def test_a_half_replaced_save_is_read_without_a_lease(half_replaced, tmp_path, capsys):
    before = sorted(os.listdir(tmp_path))
    for command in ("ls", "inspect", "verify"):
        assert main.run(["checkpoint", command, str(tmp_path)]) == 0
        assert "ba1" in capsys.readouterr().out
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2 * ROWS, dtype=torch.int64), requires_grad=False)
    assert load_newest(half_replaced, model).manifest.timestamp.batch == 1
    assert model.w[5] == 6
    assert prune(half_replaced, None, keep_newest=1) == []
    assert sorted(os.listdir(tmp_path)) == before


def test_a_half_replaced_save_that_is_damaged_is_not_cleared_away(half_replaced, tmp_path):
    (replaced,) = tmp_path.glob(".replaced-*")
    flip(replaced / "manifest.json", 700)
    half_replaced.acquire()
    assert (tmp_path / "ba1" / "manifest.json").exists()
    assert names(half_replaced) == ["ba1"]


def test_what_was_replaced_is_no_checkpoint_beside_what_replaced_it(half_replaced, tmp_path):
    (replaced,), (draft,) = tmp_path.glob(".replaced-*"), tmp_path.glob(".tmp-*")
    draft.rename(tmp_path / "ba1")
    assert names(half_replaced) == ["ba1"]
    half_replaced.acquire()
    assert not replaced.exists()
