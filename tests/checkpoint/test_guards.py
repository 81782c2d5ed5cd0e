"""Rare events, a guard and a test for each: a prune beside a running save, litter, leases, roll-backs."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint import commit
from llmfoundry_lite.checkpoint import lease as leases
from llmfoundry_lite.checkpoint.lease import describe_this_process
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present, verify_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError
from tests.checkpoint.saves import names, save, saved, write_draft

# --------------------------------------------------------------------------------------- a prune beside a running save


def beside_compare(monkeypatch, happen):
    """Let `happen` run once, between a prune's look at what a name holds and its removal."""
    look, looks = commit.head_of, []

    def compared(folder):
        found = look(folder)
        if folder.url.endswith("ba1") and not looks:
            looks.append(folder)
            happen()
        return found

    monkeypatch.setattr(commit, "head_of", compared)
    return looks


@pytest.mark.fault
def test_a_prune_gives_back_the_save_that_took_the_name_meanwhile(tmp_path, monkeypatch):
    store, pruner = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    lease = store.acquire()
    for batch in (1, 2):
        save(store, lease, batch)
    saved = []
    looks = beside_compare(monkeypatch, lambda: saved.append(save(store, lease, 1)))
    prune(pruner, None, keep_newest=1)
    assert looks and names(store) == ["ba2", "ba1"]
    assert store.candidates()[1].head.save_id == saved[0].manifest.save_id
    verify_checkpoint(store.candidates()[1].checkpoint)
    assert prune(pruner, None, keep_newest=1) == ["ba1"] and names(store) == ["ba2"]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".del")] == []


@pytest.mark.fault
def test_a_prune_killed_before_it_gives_a_save_back_leaves_it_to_the_next_launch(tmp_path, monkeypatch):
    store, lease = saved(tmp_path, 1, 2)
    beside_compare(monkeypatch, lambda: save(store, lease, 1))

    def kill(phase):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(CheckpointStore(tmp_path, on_phase=kill), None, keep_newest=1)
    assert names(store) == ["ba2"]
    store.acquire()
    assert names(store) == ["ba2", "ba1"]


@pytest.mark.fault
def test_a_save_is_published_though_a_prune_takes_away_what_it_replaces(tmp_path, monkeypatch):
    store, lease = saved(tmp_path, 1, 2)
    draft, rename = write_draft(store, lease, 1), LocalFolder.rename

    def after_a_prune(folder, old, new):
        if old == "ba1" and new.startswith(".replaced"):
            prune(CheckpointStore(tmp_path), None, keep_newest=1)
        rename(folder, old, new)

    monkeypatch.setattr(LocalFolder, "rename", after_a_prune)
    store.publish(draft, lease)
    assert names(store) == ["ba2", "ba1"]


@pytest.mark.fault
@pytest.mark.parametrize("failing", ["unlink", "rmdir"])
def test_what_could_not_be_removed_is_removed_later(tmp_path, monkeypatch, failing):
    store, lease = saved(tmp_path, 1, 2, 3)

    def fail(*args, **kwargs):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as busy:
        busy.setattr(os, failing, fail)
        save(store, lease, 3)
        with contextlib.suppress(CheckpointError):
            prune(store, lease, keep_newest=2)
    assert [name for name in os.listdir(tmp_path) if name.startswith((".deleting", ".replaced"))]
    save(store, lease, 4)
    prune(store, lease, keep_newest=2)
    assert [name for name in os.listdir(tmp_path) if name.startswith((".deleting", ".replaced"))] == []
    assert names(store) == ["ba4", "ba3"]


@pytest.mark.fault
def test_claims_that_a_kill_left_unfinished_are_cleared_and_others_are_not(tmp_path):
    store, _lease = saved(tmp_path, 1)
    litter, theirs = ".leases/.00000001.json.1-2.unfinished", ".leases/.00000099.json.1-2.unfinished"
    for name in (litter, theirs):
        (tmp_path / name).write_bytes(b"x")
    for _ in range(9):
        store.acquire()
    assert [(tmp_path / name).exists() for name in (litter, theirs)] == [False, True]


# ------------------------------------------------------------------------------------------------ one guard, one test


@pytest.mark.fault
def test_a_zombie_process_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    try:
        assert leases.is_alive_here(describe_this_process() | {"pid": child.pid, "started": ticks}) is False
    finally:
        child.wait()


@pytest.mark.fault
def test_a_number_of_a_claim_that_no_checkpoint_can_record_is_refused(tmp_path):
    store, _lease = saved(tmp_path, 1)
    planted = tmp_path / ".leases" / f"{leases.MAX_EPOCH}.json"
    planted.write_text("{}")
    with pytest.raises(CheckpointError, match=rf"no checkpoint can record; remove .leases/{leases.MAX_EPOCH}.json"):
        store.acquire(steal_from_live_writer=True)  # without a watch of the unknown holder, which takes 30 s
    planted.unlink()
    lease = store.acquire()
    save(store, lease, 2)
    assert names(store) == ["ba2", "ba1"]


@pytest.mark.fault
def test_a_lease_that_is_lost_while_a_save_is_committed_stops_it(url):
    store, old = saved(url, 1)
    draft = write_draft(store, old, 2)

    def lose(seen):
        if seen == "before manifest":
            store.leases.folder.put(leases._claim_name(old.epoch + 1), b"{}", only_if_new=True)

    store.on_phase = lose
    with pytest.raises(CheckpointError, match="another launch"):
        store.publish(draft, old)
    assert names(store) == ["ba1"]


@pytest.mark.fault
def test_an_old_lease_clears_no_parts_of_the_log_that_newer_launches_wrote(url):
    store, old = saved(url)
    for batch in (1, 2):
        save(store, old, batch)
    for epoch in (1, 2):
        write_log(store, f"e{epoch}-ba1-0a1b2c3d4e5f", b"line\n", ())
    prune(store, old, keep_newest=1)
    assert store.root.child("log").names() == ["e2-ba1-0a1b2c3d4e5f.jsonl"]


@pytest.mark.parametrize("keep", [0, -3])
def test_a_prune_that_keeps_none_keeps_the_newest_though_it_is_not_intact(url, keep):
    store, lease = saved(url, 1, 2, 3)

    def refuse_newest(checkpoint):
        if checkpoint.name == "ba3":
            raise DamagedCheckpointError("damaged")

    assert prune(store, lease, keep_newest=keep, verify=refuse_newest) == ["ba1"]
    assert names(store) == ["ba3", "ba2"]
    assert main.run(["checkpoint", "prune", url, "--keep", str(keep)]) == 2
    assert names(store) == ["ba3", "ba2"]


@pytest.mark.fault
def test_verifying_compares_the_headers_with_the_manifest(tmp_path):
    store, lease = saved(tmp_path)
    draft = write_draft(store, lease, 1)
    other = replace(draft.tensors["model/w"], dtype="F64")  # as many bytes, and right hashes
    checkpoint = store.publish(replace(draft, tensors={"model/w": other}), lease)
    with pytest.raises(DamagedCheckpointError, match=r"model/w@0 is I64 \[50000\] in its header alone"):
        verify_checkpoint(checkpoint)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("name", ["shard-00001.safetensors", "manifest.json"])
def test_what_is_no_file_in_the_place_of_one_is_passed_over_and_not_waited_for(tmp_path, kind, name):
    store, lease = saved(tmp_path)
    for batch in (1, 2):
        newest = save(store, lease, batch)
    path = tmp_path / "ba2" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as end, contextlib.chdir(path.parent):
            end.bind(name)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert found.checkpoint.name == "ba1"
    assert f"{name}: " in found.notes[0] and "passed over incomplete checkpoint" in found.notes[0]
    with pytest.raises(IncompleteCheckpointError):
        check_present(newest) if name != "manifest.json" else verify_checkpoint(open_checkpoint(tmp_path / "ba2"))


@pytest.mark.fault
def test_a_lease_that_no_listing_shows_is_passed_over(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.acquire()
    monkeypatch.setattr(leases.Leases, "highest_epoch", lambda self: 0)
    assert store.acquire().epoch == 2


@pytest.mark.fault
def test_a_pipe_in_the_place_of_a_lease_is_nobody_s(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.acquire()
    monkeypatch.setattr(leases, "WATCH_SECONDS", 0)
    (tmp_path / ".leases" / "00000001.json").unlink()
    os.mkfifo(tmp_path / ".leases" / "00000001.json")
    assert store.acquire().epoch == 2
