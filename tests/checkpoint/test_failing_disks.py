"""A disk that fails at any point of a save: nothing is published, the save before stands, and the next one is made."""

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest
import torch

from llmfoundry_lite.checkpoint import local_folder
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError
from tests.checkpoint.mounts import mounted
from tests.checkpoint.ranks import about, build, save_now, step, whole_state
from tests.checkpoint.saves import names

pytestmark = pytest.mark.fault


def failing(call, error, count=1):
    """Return `call`, changed to raise the `count`th time."""
    calls = itertools.count(1)  # counts for all threads, of which a save has several

    def called(*args, **kwargs):
        if next(calls) == count:
            raise OSError(error, os.strerror(error))
        return call(*args, **kwargs)

    return called


SYNCS = ["the shard", "the manifest", "the draft's folder", "the folder after the rename"]


def save_while_it_fails(folder, patch):
    """A save, one that must fail, and one after the disk has been mended. Returns what was said."""
    model, optimizer = build("plain")
    step(model, optimizer, 0)
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()
    save_now(saver, model, optimizer, 1)
    first = whole_state(model, optimizer)
    step(model, optimizer, 1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        saver.save(model, optimizer, about(2))
        with pytest.raises(CheckpointError) as caught:
            saver.wait()
    for candidate in CheckpointStore(folder).candidates():
        assert candidate.checkpoint is not None
        verify_checkpoint(candidate.checkpoint)
    other, other_optimizer = build("plain", seed=5)
    load(Path(folder) / "ba1", other, other_optimizer)
    found = whole_state(other, other_optimizer)
    assert all(torch.equal(found[name], first[name]) for name in first)
    assert not [name for name in os.listdir(folder) if name.startswith(".tmp")]
    save_now(saver, model, optimizer, 3)
    verify_checkpoint(open_checkpoint(Path(folder) / "ba3"))
    return str(caught.value)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_writing_a_shard(tmp_path, error):
    said = save_while_it_fails(tmp_path, lambda p: p.setattr(local_folder, "WRITE", failing(os.pwritev, error)))
    assert said.endswith(f"shard-00000.safetensors: not written: {os.strerror(error)}")


@pytest.mark.parametrize("count", [1, 2, 3, 4], ids=SYNCS)
def test_syncing(tmp_path, count):
    said = save_while_it_fails(tmp_path, lambda p: p.setattr(os, "fsync", failing(os.fsync, errno.EIO, count)))
    assert said.endswith("Input/output error")
    assert "\n" not in said


@pytest.mark.parametrize("name", ["rename", "open"])
def test_creating_and_renaming(tmp_path, name):
    """The two calls rename the draft, and create the shard."""
    broken = failing(getattr(os, name), errno.ENOSPC)
    said = save_while_it_fails(tmp_path, lambda p: p.setattr(os, name, broken))
    assert said.endswith("No space left on device")


def test_a_write_cut_short_for_good(tmp_path):
    said = save_while_it_fails(tmp_path, lambda p: p.setattr(local_folder, "WRITE", lambda *arguments: 0))
    assert said.endswith("shard-00000.safetensors: not written: the disk took no more bytes")


def test_a_full_disk_that_is_cleared(tmp_path):
    with mounted(tmp_path / "disk", "256k") as disk:
        model, optimizer = build("plain")
        step(model, optimizer, 0)
        saver = Saver(CheckpointStore(disk.path))
        saver.take_lease()
        save_now(saver, model, optimizer, 1)
        ballast, free = disk.path / "ballast", os.statvfs(disk.path)
        ballast.write_bytes(bytes(free.f_bavail * free.f_bsize))
        saver.save(model, optimizer, about(2))
        with pytest.raises(CheckpointError, match="not written: No space left on device"):
            saver.wait()
        verify_checkpoint(open_checkpoint(disk.path / "ba1"))
        ballast.unlink()
        save_now(saver, model, optimizer, 3)
        assert names(CheckpointStore(disk.path)) == ["ba3", "ba1"]


def test_a_disk_that_fills_up_while_a_hint_is_written_has_published(tmp_path, monkeypatch):
    model, optimizer = build("plain")
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saver.take_lease()
    put = local_folder.LocalFolder.put

    def full(self, name, data, **options):
        if name == "latest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, name, data, **options)

    monkeypatch.setattr(local_folder.LocalFolder, "put", full)
    save_now(saver, model, optimizer, 1)
    found = store.newest_intact(verify_checkpoint).checkpoint
    assert found is not None and found.name == "ba1"


def test_a_disk_that_may_only_be_read(tmp_path):
    model, optimizer = build("plain")
    step(model, optimizer, 0)
    with mounted(tmp_path / "disk") as disk:
        saver = Saver(CheckpointStore(disk.path))
        saver.take_lease()
        save_now(saver, model, optimizer, 1)
        disk.make_read_only()
        saver.save(model, optimizer, about(2))
        with pytest.raises(CheckpointError, match=r"ba2-[0-9a-f]+: not written: Read-only file system"):
            saver.wait()
        with pytest.raises(CheckpointError, match="no lease can be taken: Read-only file system"):
            Saver(CheckpointStore(disk.path)).take_lease()
        other, other_optimizer = build("plain", seed=5)
        load(disk.path / "ba1", other, other_optimizer)
        found, expected = whole_state(other, other_optimizer), whole_state(model, optimizer)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_disk_that_is_mounted_again_takes_the_next_save(tmp_path):
    """In between nothing is written where it was, and the error may pass."""
    folder, away = tmp_path / "checkpoints", tmp_path / "away"
    model, optimizer = build("plain")
    saver = Saver(CheckpointStore(folder))
    save_now(saver, model, optimizer, 1)
    os.rename(folder, away)
    for leftover in ("no folder", "an empty folder"):
        if leftover == "an empty folder":
            folder.mkdir()
        saver.save(model, optimizer, about(2))
        with pytest.raises(CheckpointError, match="may have been unmounted") as caught:
            saver.wait()
        assert caught.value.is_transient
    folder.rmdir()

    os.rename(away, folder)
    save_now(saver, model, optimizer, 3)
    assert names(saver.store) == ["ba3", "ba1"]


def test_a_wait_for_a_store_that_does_not_answer_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("llmfoundry_lite.checkpoint.save.POLL_SECONDS", 0.01)
    monkeypatch.setattr("llmfoundry_lite.checkpoint.save.NOTE_SECONDS", 0.0)
    answers, told = threading.Event(), []

    def note(name, seconds):
        told.append(name)
        answers.set()

    def wait_for_answer(phase):
        if phase == "before manifest":
            assert answers.wait(60)

    saver = Saver(CheckpointStore(tmp_path, on_phase=wait_for_answer), note_wait=note)
    save_now(saver, *build("plain"), 1)
    assert told[0] == "ba1"
    assert names(saver.store) == ["ba1"]
