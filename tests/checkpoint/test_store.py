"""One writer, atomic publishing, careful removal: on a local disk and on an object store."""

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fsspec
import pytest

from llmfoundry_lite import retry
from llmfoundry_lite.checkpoint import commit, local_folder
from llmfoundry_lite.checkpoint import lease as leases
from llmfoundry_lite.checkpoint.grid import Grid
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import TensorRecord
from llmfoundry_lite.checkpoint.manifest_json import encode
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present, check_structure, verify_checkpoint
from llmfoundry_lite.cli.checkpoint_output import describe_row
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnreadableCheckpointError,
)
from llmfoundry_lite.ranks.codec import write_json
from llmfoundry_lite.ranks.identity import describe_this_process, start_ticks
from tests.checkpoint.mounts import mounted
from tests.checkpoint.saves import ROWS, flip, names, save, saved, write_draft


def test_what_is_published_can_be_found_and_verified(url):
    store, _ = saved(url, 3)
    found = store.newest_intact(verify_checkpoint)
    assert (found.checkpoint.name, found.notes) == ("ba3", [])
    checkpoint = open_checkpoint(f"{url}/ba3")
    verify_checkpoint(checkpoint)
    assert checkpoint.manifest.tensors["model/w"].shape == (100_000,)


def test_a_draft_is_not_a_checkpoint(url):
    store, lease = saved(url)
    write_draft(store, lease, 3)
    assert names(store) == []
    assert store.newest_intact().checkpoint is None


def test_the_same_batch_may_be_saved_again(url):
    store, lease = saved(url, 3)
    second = save(store, lease, 3)
    assert [c.checkpoint.manifest.save_id for c in store.candidates()] == [second.manifest.save_id]
    verify_checkpoint(open_checkpoint(f"{url}/ba3"))


def test_a_folder_copied_elsewhere_is_still_a_checkpoint(tmp_path):
    _store, _ = saved(tmp_path / "a", 3)
    os.rename(tmp_path / "a" / "ba3", tmp_path / "copy")
    verify_checkpoint(open_checkpoint(tmp_path / "copy"))


def test_opening_the_folder_above_says_which_one_was_meant(url):
    _store, _lease = saved(url, 9, 10)
    with pytest.raises(CheckpointError, match=r"no manifest.json here, so no checkpoint; did you mean .*/ba10"):
        open_checkpoint(url)


# -------------------------------------------------------------------------------------------------------- one writer


@pytest.mark.fault
def test_the_last_to_acquire_is_the_writer(url):
    store, old = saved(url)
    draft = write_draft(store, old, 3)
    new = CheckpointStore(url).acquire()
    assert new.epoch == old.epoch + 1
    with pytest.raises(CheckpointError, match=r"another launch .* has taken this run over; this one may not save"):
        store.publish(draft, old)
    with pytest.raises(CheckpointError, match="another launch"):
        prune(store, old, keep_newest=1)
    assert names(store) == []


@pytest.mark.fault
def test_a_zombie_that_slips_through_loses_to_the_new_writer(url, monkeypatch):
    store, old = saved(url, 200)
    zombie = write_draft(store, old, 400)

    new_store = CheckpointStore(url)
    new = leases.Lease(old.epoch + 1, {})
    new_store.leases.folder.put(leases._claim_name(new.epoch), b"{}", only_if_new=True)
    monkeypatch.setattr(store, "check", lambda lease: None)  # it looked just before
    store.publish(zombie, old)
    assert names(store) == ["ba400", "ba200"], "nothing newer yet: a sound state of the same run"

    save(new_store, new, 300)
    assert names(store) == ["ba300", "ba400", "ba200"]
    save(new_store, new, 400)
    assert names(store) == ["ba400", "ba300", "ba200"], "and its ba400 gives way"
    zombie = write_draft(store, old, 400)
    with pytest.raises(CheckpointError, match="saved there by a later launch"):
        store.publish(zombie, old)


def test_a_run_restarted_from_an_older_save_goes_its_own_way(url):
    store = CheckpointStore(url)
    first = store.acquire()
    for batch in (200, 400, 600):
        save(store, first, batch)
    second = store.acquire()
    save(store, second, 300)
    assert names(store) == ["ba300", "ba600", "ba400", "ba200"]


@pytest.mark.fault
def test_a_writer_alive_on_this_machine_is_not_pushed_aside(tmp_path):
    code = (
        "import sys; from llmfoundry_lite.checkpoint.store import CheckpointStore; "
        f"CheckpointStore({str(tmp_path)!r}).acquire(); print('ready', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(CheckpointError, match=f"process {other.pid} on this machine is saving here; stop it"):
            CheckpointStore(tmp_path).acquire()
    finally:
        other.kill()
        other.communicate()
    assert CheckpointStore(tmp_path).acquire().epoch == 2


@pytest.mark.fault
def test_of_many_that_claim_the_lease_at_once_each_gets_a_number_of_its_own(tmp_path):
    start = threading.Barrier(8)

    def claim(_):
        start.wait()
        return CheckpointStore(tmp_path).acquire().epoch

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claim, range(8))) == list(range(1, 9))


@pytest.mark.fault
def test_a_reused_process_id_is_not_the_writer():
    mine = describe_this_process()
    owner = mine | {"pid": os.getppid(), "started": mine["started"] + 1}
    assert leases.is_alive_here(owner) is False


@pytest.mark.fault
def test_a_process_of_another_container_of_this_machine_is_not_certainly_the_writer():
    """Each counts its processes anew."""
    parent = describe_this_process() | {"pid": os.getppid(), "started": start_ticks(os.getppid())}
    assert leases.is_alive_here(parent) is True
    assert leases.is_alive_here(parent | {"namespace": "pid:[1]"}) is None


def test_leases_of_many_launches_do_not_pile_up(url):
    store = CheckpointStore(url)
    assert [store.acquire().epoch for _ in range(12)] == list(range(1, 13))
    assert len(store.leases.folder.names()) <= 8


def test_a_listing_that_misses_the_newest_claim_gives_no_number_twice(url, monkeypatch):
    store = CheckpointStore(url)
    for _ in range(3):
        store.acquire()
    list_names = store.leases.folder.names
    monkeypatch.setattr(store.leases.folder, "names", lambda: sorted(list_names())[:-1])
    assert store.acquire().epoch == 4


@pytest.mark.fault
def test_the_epoch_outlives_a_lost_lease_file(url):
    store = CheckpointStore(url)
    for _ in range(3):
        lease = store.acquire()
    save(store, lease, 1)
    store.leases.folder.remove_all()
    assert store.acquire().epoch == 4


@pytest.mark.fault
@pytest.mark.parametrize("change", ["absent", "foreign", "folder"])
def test_only_its_own_claim_tells_a_writer_that_it_may_write(url, change):
    store, lease = saved(url, 1)
    draft = write_draft(store, lease, 2)
    store.leases.folder.remove("00000001.json")
    if change == "foreign":  # of the same launch, for another folder
        store.leases.folder.put("00000001.json", write_json(lease.owner | {"claim": "another"}))
    elif change == "folder":
        store.leases.folder.remove_all()
    for attempt in (lambda: store.publish(draft, lease), lambda: prune(store, lease, keep_newest=1)):
        with pytest.raises(
            CheckpointError, match=r"does not find this launch's lease \(\.leases/00000001\.json\) any more; "
        ) as caught:
            attempt()
        may_come_back = change != "foreign" and store.root.path_here is not None
        assert caught.value.is_transient == may_come_back
    assert names(store) == ["ba1"]


@pytest.mark.fault
@pytest.mark.parametrize("inside", ["", "run/checkpoints"], ids=["the disk itself", "a folder on it"])
def test_when_the_disk_vanishes_nothing_is_written_beneath(tmp_path, inside):
    with mounted(tmp_path / "disk") as disk:
        store = CheckpointStore(disk.path / inside)
        lease = store.acquire()
        save(store, lease, 1)
        draft = write_draft(store, lease, 2)
        disk.take_away()
        for attempt in (lambda: store.publish(draft, lease), lambda: write_draft(store, lease, 3)):
            with pytest.raises(
                CheckpointError, match=r"does not find this launch's lease .* may have been unmounted"
            ) as e:
                attempt()
            assert "\n" not in str(e.value)
        assert os.listdir(disk.path) == []


@pytest.mark.fault
def test_acquiring_clears_away_what_dead_writers_left(url):
    store, old = saved(url, 1)
    write_draft(store, old, 2)
    save(store, store.acquire(), 3)
    left = [name for name in store.root.names() if name.startswith(".tmp")]
    inside = [name for name in store.root.child("ba2").names() if name.startswith("e1")]
    assert not left and not inside
    assert names(store) == ["ba3", "ba1"]


# -------------------------------------------------------------------------------------------- damage and the way back


@pytest.mark.fault
def test_damaged_ones_are_passed_over_in_a_line_each_and_set_aside(tmp_path):
    store, lease = saved(tmp_path, 1, 2, 3)
    flip(tmp_path / "ba3" / "shard-00001.safetensors", 300_000)
    flip(tmp_path / "ba2" / "manifest.json", 700)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert found.checkpoint.name == "ba1"
    assert len(found.notes) == 2 and all("\n" not in note for note in found.notes)
    assert any("shard-00001.safetensors: bytes" in note and "model/w" in note for note in found.notes)
    assert any("manifest.json: the checksum" in note for note in found.notes)
    assert names(store) == ["ba1"]
    assert len([name for name in os.listdir(tmp_path) if name.startswith(".damaged-ba")]) == 2


@pytest.mark.fault
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model/w": ("F64", 2 * ROWS, ROWS)}, "model/w@0 is I64 [50000] in its header alone"),
        ({"model/w": ("I64", 2 * ROWS, 2 * ROWS)}, "model/w@0 is I64 [50000] in its header alone"),
        ({}, "model/w@0 is I64 [50000] in its header alone"),
        (
            {"model/w": ("I64", 2 * ROWS, ROWS), "model/v": ("U8", 2, 1)},
            "model/v has 2 chunks in the manifest and 0 in the files' headers",
        ),
    ],
    ids=["dtype", "shape", "unknown", "missing"],
)
def test_headers_that_are_not_the_manifest_s_are_named(tmp_path, tensors, words):
    store, lease = saved(tmp_path)
    records = {
        name: TensorRecord(dtype, (n,), Grid((chunk,), (0,), (1,))) for name, (dtype, n, chunk) in tensors.items()
    }
    checkpoint = store.publish(replace(write_draft(store, lease, 1), tensors=records), lease)
    with pytest.raises(DamagedCheckpointError, match=re.escape(words)):
        check_structure(checkpoint)


@pytest.mark.fault
def test_readers_without_the_lease_move_nothing(tmp_path):
    _store, _ = saved(tmp_path, 1)
    flip(tmp_path / "ba1" / "shard-00000.safetensors", 300_000)
    before = sorted(os.listdir(tmp_path))
    assert CheckpointStore(tmp_path).newest_intact(verify_checkpoint).checkpoint is None
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["header", "truncated", "deleted", "swapped", "other save", "no manifest"])
def test_every_damage_to_files_is_found_by_name(tmp_path, damage):
    store, _lease = saved(tmp_path, 1, 2)
    folder, one, two = tmp_path / "ba2", "shard-00000.safetensors", "shard-00001.safetensors"
    if damage == "header":
        flip(folder / one, 20)
    elif damage == "truncated":
        os.truncate(folder / one, 100)
    elif damage == "deleted":
        (folder / one).unlink()
    elif damage == "swapped":
        for old, new in ((one, "x"), (two, one), ("x", two)):
            os.rename(folder / old, folder / new)
    elif damage == "other save":
        (folder / one).write_bytes((tmp_path / "ba1" / one).read_bytes())
    else:
        (folder / "manifest.json").unlink()
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint.name == "ba1"
    assert ("manifest.json: missing" if damage == "no manifest" else f"ba2/{one}: ") in found.notes[0]


@pytest.mark.fault
@pytest.mark.parametrize("claim", [2**63, 1 << 40, 1, 10**9])
def test_a_header_that_lies_about_its_length_is_not_believed(tmp_path, claim):
    _store, _ = saved(tmp_path, 1)
    shard = tmp_path / "ba1" / "shard-00000.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[:8] = claim.to_bytes(8, "little")
    shard.write_bytes(raw)
    with pytest.raises(DamagedCheckpointError, match=r"ba1/shard-00000.safetensors: its header or its hashes"):
        check_structure(open_checkpoint(tmp_path / "ba1"))


@pytest.mark.fault
def test_a_manifest_of_a_terabyte_is_not_read(tmp_path):
    store, _lease = saved(tmp_path, 1, 2)
    os.truncate(tmp_path / "ba2" / "manifest.json", 1 << 40)  # a hole: it takes no disk
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint.name == "ba1"
    assert "bytes, more than the 67,108,864 a manifest may have" in found.notes[0]


@pytest.mark.fault
def test_a_checkpoint_under_another_name_is_not_taken_for_that(tmp_path):
    store, _ = saved(tmp_path, 1)
    os.rename(tmp_path / "ba1", tmp_path / "ba9")
    assert "holds the manifest of e1-ba1" in store.newest_intact().notes[0]


@pytest.mark.fault
@pytest.mark.parametrize("change", ["damaged", "of another release"])
def test_one_save_id_that_is_none_condemns_no_other_checkpoint(tmp_path, change):
    store, lease = saved(tmp_path, 1)
    damaged = save(store, lease, 2)
    if change == "damaged":
        flip(tmp_path / "ba2" / "manifest.json", damaged.folder.read("manifest.json", 9999).index(b"e1-ba2-") + 7, 0x40)
    else:
        raw = encode(replace(damaged.manifest, save_id="the second"))
        (tmp_path / "ba2" / "manifest.json").write_bytes(raw)
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint.name == "ba1"
    assert len(found.notes) == 1 and "passed over damaged checkpoint" in found.notes[0]


@pytest.mark.fault
@pytest.mark.parametrize("hint", [b"", b'{"name": "ba1"}', b'{"name": "ba77"}', b"\xff\xfe"])
def test_the_hint_names_the_newest_and_is_never_trusted(url, hint):
    store, _ = saved(url, 1, 2)
    assert json.loads(store.root.read("latest.json", 1000))["name"] == "ba2"
    store.root.put("latest.json", hint)
    assert store.newest_intact(verify_checkpoint).checkpoint.name == "ba2"


# ---------------------------------------------------------------------------------------------------------- retention


def test_old_ones_go_and_those_to_keep_stay(url):
    store, lease = saved(url, *range(1, 9))
    assert prune(store, lease, keep_newest=2, keep_every_batches=4, dry_run=True) == ["ba1", "ba2", "ba3", "ba5", "ba6"]
    assert len(names(store)) == 8
    prune(store, lease, keep_newest=2, keep_every_batches=4)
    assert names(store) == ["ba8", "ba7", "ba4"]
    assert not store.root.child("ba1").names()


def archive(tmp_path, name):
    """Move something of the store to another disk and leave a link to it; returns where it is."""
    moved = tmp_path / "archive" / name
    moved.parent.mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / name).rename(moved)
    (tmp_path / "checkpoints" / name).symlink_to(moved)
    return moved


@pytest.mark.fault
@pytest.mark.parametrize("how", ["pruned", "replaced"])
def test_of_a_checkpoint_that_was_moved_to_another_disk_the_link_goes_and_the_archive_stays(tmp_path, how):
    store, lease = saved(tmp_path / "checkpoints", 1, 2)
    moved = archive(tmp_path, "ba1")
    if how == "pruned":
        assert prune(store, lease, keep_newest=1, verify=verify_checkpoint) == ["ba1"]
        assert sorted(os.listdir(tmp_path / "checkpoints")) == [".leases", "ba2", "latest.json"]
    else:
        again = save(store, lease, 1)
        assert open_checkpoint(tmp_path / "checkpoints/ba1").manifest.save_id == again.manifest.save_id
        assert not (tmp_path / "checkpoints/ba1").is_symlink()
    verify_checkpoint(open_checkpoint(moved))


@pytest.mark.fault
def test_no_removal_follows_a_link_whatever_is_one(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "checkpoints"
    (elsewhere / "root").mkdir(parents=True)
    folder.symlink_to(elsewhere / "root")
    store, lease = saved(folder, 1, 2)
    for name in ("shard-00000.safetensors", "manifest.json"):
        (folder / "ba1" / name).rename(elsewhere / name)
        (folder / "ba1" / name).symlink_to(elsewhere / name)
    for name in (".tmp-e1-ba7-abc", ".deleting-e0-ba7-abc", ".replaced-e1-ba2-abc"):
        (elsewhere / name).mkdir()
        (elsewhere / name / "theirs").write_text("")
        (folder / name).symlink_to(elsewhere / name)
    assert prune(store, lease, keep_newest=1, verify=verify_checkpoint) == ["ba1"]
    store.acquire()
    assert sorted(os.listdir(folder)) == [".leases", "ba2", "latest.json"]
    assert folder.is_symlink() and len(list(elsewhere.rglob("theirs"))) == 3
    assert all((elsewhere / name).stat().st_size for name in ("shard-00000.safetensors", "manifest.json"))


@pytest.mark.fault
def test_a_prune_finishes_an_interrupted_removal_though_it_removes_no_other_save(tmp_path):
    store, _ = saved(tmp_path / "checkpoints", 1, 2)
    save_id = open_checkpoint(f"{store.root.url}/ba1").manifest.save_id
    (tmp_path / "checkpoints/ba1").rename(tmp_path / f"checkpoints/.deleting-{save_id}")
    assert prune(store, None, keep_newest=1) == []
    assert sorted(name for name in os.listdir(tmp_path / "checkpoints") if name != ".leases") == ["ba2", "latest.json"]


@pytest.mark.fault
def test_a_prune_beside_another_puts_back_no_save_that_is_being_removed(tmp_path, monkeypatch):
    """Training removes `.deleting-…` at the same moment: its manifest is listed, and gone when it is read."""
    store, _ = saved(tmp_path / "checkpoints", 1, 2)
    save_id = open_checkpoint(f"{store.root.url}/ba1").manifest.save_id
    moved = tmp_path / f"checkpoints/.deleting-{save_id}"
    (tmp_path / "checkpoints/ba1").rename(moved)
    read_head = commit.head_of

    def remove_first(folder):
        if folder.path == moved:
            (moved / "manifest.json").unlink()
        return read_head(folder)

    monkeypatch.setattr(commit, "head_of", remove_first)
    assert prune(store, None, keep_newest=1) == []
    assert sorted(name for name in os.listdir(tmp_path / "checkpoints") if name != ".leases") == ["ba2", "latest.json"]


OTHERS = {
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link in a circle": lambda path: path.symlink_to(path.name),
    "a file": lambda path: path.write_text("a note"),
    "a pipe": os.mkfifo,
}


@pytest.mark.fault
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_has_a_checkpoint_s_name_and_is_none_hides_none_and_gives_way_to_a_save(tmp_path, make):
    store, lease = saved(tmp_path, 1)
    make(tmp_path / "ba2")
    assert names(store) == ["ba1"]
    save(store, lease, 2)
    verify_checkpoint(open_checkpoint(tmp_path / "ba2"))
    assert sorted(os.listdir(tmp_path)) == [".leases", "ba1", "ba2", "latest.json"]


@pytest.mark.fault
def test_a_part_of_the_log_that_cannot_be_removed_is_said_and_is_no_bug(tmp_path):
    store, lease = saved(tmp_path)
    for batch in (1, 2):
        log = write_log(store, f"e1-ba{batch}-00", b"x\n" * batch, ())
        store.publish(replace(write_draft(store, lease, batch), log=log), lease)
    (tmp_path / "log" / "e1-ba1-00.jsonl").unlink()
    (tmp_path / "log" / "e1-ba1-00.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"/log: cannot be cleared: "):
        prune(store, lease, keep_newest=1)
    assert names(store) == ["ba2"]


def test_retention_takes_all_of_a_checkpoint_that_was_copied_to_an_object_store_from_a_disk(tmp_path):
    local, remote = CheckpointStore(tmp_path), CheckpointStore(f"memory://{uuid.uuid4().hex}")
    save(local, local.acquire(), 1)
    for path in (tmp_path / "ba1").iterdir():
        remote.root.child("ba1").put(path.name, path.read_bytes())
    lease = remote.acquire()
    draft = write_draft(remote, lease, 1)
    save(remote, lease, 2)
    assert prune(remote, lease, keep_newest=1, verify=verify_checkpoint) == ["ba1"]
    assert remote.root.child("ba1").names() == [draft.save_id], "another launch's draft stays"


@pytest.mark.fault
def test_the_last_verified_one_is_never_removed(tmp_path):
    store, lease = saved(tmp_path, 1, 2, 3, 4)
    for batch in (3, 4):
        flip(tmp_path / f"ba{batch}" / "shard-00001.safetensors", 300_000)
    assert prune(store, lease, keep_newest=2, verify=verify_checkpoint) == ["ba1"]
    assert names(store) == ["ba4", "ba3", "ba2"]
    flip(tmp_path / "ba2" / "shard-00001.safetensors", 300_000)
    assert prune(store, lease, keep_newest=1, verify=verify_checkpoint) == []


@pytest.mark.fault
def test_retention_frees_a_save_that_was_set_aside_once_all_that_stay_are_newer(tmp_path):
    store, lease = saved(tmp_path, 1, 2)
    flip(tmp_path / "ba2" / "shard-00001.safetensors", 300_000)
    assert store.newest_intact(verify_checkpoint, quarantine=lease).checkpoint.name == "ba1"
    (set_aside,) = store.set_aside_saves()
    for batch in (2, 3):
        save(store, lease, batch)
        assert set_aside not in prune(store, lease, keep_newest=2)
    save(store, lease, 4)
    assert prune(store, lease, keep_newest=2, dry_run=True) == ["ba2", set_aside] and (tmp_path / set_aside).exists()
    assert prune(store, lease, keep_newest=2) == ["ba2", set_aside]
    assert store.set_aside_saves() == []


@pytest.mark.fault
def test_a_save_that_was_set_aside_stays_while_no_other_is_whole(tmp_path):
    store, lease = saved(tmp_path, 1, 2)
    (tmp_path / "ba1").rename(tmp_path / ".damaged-ba1-0a1b2c")
    flip(tmp_path / "ba2" / "shard-00001.safetensors", 300_000)
    faults = {}
    found = prune(store, lease, keep_newest=1, verify=verify_checkpoint, on_unsound=faults.__setitem__)
    assert found == [] and [*faults] == ["ba2"]
    assert store.set_aside_saves() == [".damaged-ba1-0a1b2c"]


@pytest.mark.fault
@pytest.mark.parametrize("has_lease", [True, False])
def test_pruning_leaves_what_another_launch_is_uploading(url, has_lease):
    store, old = saved(url)
    for batch in (10, 20, 30):
        save(store, old, batch)
    new = CheckpointStore(url).acquire()
    save(store, new, 15)  # restarted from ba10
    draft = write_draft(store, new, 20)
    doomed = ["ba10", "ba20", "ba30"]
    assert sorted(prune(store, new if has_lease else None, keep_newest=1, verify=verify_checkpoint)) == doomed
    assert names(store) == ["ba15"]
    store.publish(draft, new)
    verify_checkpoint(open_checkpoint(f"{url}/ba20"))


@pytest.mark.fault
def test_pruning_removes_what_it_decided_on_and_not_what_took_its_place(url):
    store, lease = saved(url, 1, 2)
    again = []

    def replace_meanwhile(checkpoint):
        if not again:
            again.append(save(store, lease, 1))

    prune(store, lease, keep_newest=1, verify=replace_meanwhile)
    assert open_checkpoint(f"{url}/ba1").manifest.save_id == again[0].manifest.save_id
    verify_checkpoint(open_checkpoint(f"{url}/ba1"))


def test_removal_takes_the_commit_first(url):
    store = CheckpointStore(url)
    once = save(store, store.acquire(), 1)
    seen = []
    store.on_phase = lambda phase: seen.append(names(store)) if phase == "mid-prune" else None
    store.remove("ba1", once.manifest.save_id)
    assert seen == [[]]


# -------------------------------------------------------------------------------------------------------- other edges


@pytest.mark.fault
def test_a_folder_that_cannot_be_written_is_said_in_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints: no lease can be taken: Not a directory"):
        CheckpointStore(blocked / "checkpoints").acquire()


@pytest.mark.fault
def test_a_shard_that_rank_0_cannot_see_stops_the_publication(url):
    store, lease = saved(url)
    draft = write_draft(store, lease, 1)
    folder, _ = store.commits.draft(draft.save_id)
    folder.remove("shard-00001.safetensors")
    with pytest.raises(
        CheckpointError, match="not to be seen from rank 0; save_folder must be on a disk that all nodes"
    ):
        store.publish(draft, lease)
    store.abandon(draft.save_id)
    assert names(store) == [] and not folder.names()


@pytest.mark.fault
def test_a_save_that_fails_beside_a_damaged_one_of_its_batch_leaves_nothing(tmp_path):
    store, lease = saved(tmp_path, 1)
    (tmp_path / "ba1" / "manifest.json").write_bytes(b"{}")
    store.abandon(write_draft(store, lease, 1).save_id)
    assert sorted(os.listdir(tmp_path)) == [".leases", "ba1", "latest.json"]


def test_all_of_a_save_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    store, lease = saved(tmp_path)
    draft = write_draft(store, lease, 1)
    events, fsync, rename = [], os.fsync, os.rename

    def note_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_rename(old, new):
        rename(old, new)
        events.append("renamed")

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    store.publish(draft, lease)
    assert events[0].startswith(".manifest.json.")
    assert events[1:4] == [f".tmp-{draft.save_id}", "renamed", tmp_path.name]


def test_a_launch_that_may_not_list_uploads_goes_on(monkeypatch):
    def refuse(self, is_dead):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(RemoteFolder, "abort_uploads", refuse)
    assert CheckpointStore(f"memory://{uuid.uuid4().hex}").acquire().epoch == 1


@pytest.mark.fault
@pytest.mark.parametrize("has_arrived", [True, False])
def test_when_the_answer_to_the_last_put_is_lost_what_arrived_decides(monkeypatch, has_arrived):
    store, lease = saved(f"memory://{uuid.uuid4().hex}", 1)
    draft = write_draft(store, lease, 2)
    put = RemoteFolder.put

    def lose_the_answer(self, name, data, **options):
        if has_arrived:
            put(self, name, data, **options)
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(RemoteFolder, "put", lose_the_answer)
    with pytest.raises(CheckpointError, match="not published: Connection reset by peer"):
        store.publish(draft, lease)
    store.abandon(draft.save_id)
    monkeypatch.undo()
    assert names(store) == (["ba2", "ba1"] if has_arrived else ["ba1"])
    for candidate in store.candidates():
        verify_checkpoint(candidate.checkpoint)


class Disk:
    """A disk of which `name`, in the checkpoint ba2, answers otherwise the first `count` times it is read."""

    def __init__(self, monkeypatch, name, count, answer):
        self.name, self.count, self.answer = name, count, answer
        self.pread, self.open = os.preadv, open
        monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * 3)
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(local_folder, "open", self.open_file, raising=False)

    def is_hit(self, path):
        hit = path.endswith(f"ba2/{self.name}") and self.count > 0
        self.count -= hit
        return hit

    def preadv(self, descriptor, pieces, offset):
        done = self.pread(descriptor, pieces, offset)
        if self.is_hit(os.readlink(f"/proc/self/fd/{descriptor}")):
            self.answer(pieces[-1])
        return done

    def open_file(self, path, mode, **options):
        content = bytearray(self.open(path, mode, **options).read())
        if self.is_hit(str(path)):
            self.answer(content)
        return io.BytesIO(content)


def refuse(error):
    def answer(content):
        raise OSError(error, os.strerror(error))

    return answer


def garble(content):
    content[-1] ^= 1


FILES = ["manifest.json", "shard-00001.safetensors"]
FOR_EVER = 1 << 30


@pytest.fixture
def two_saves(tmp_path):
    store, lease = saved(tmp_path, 1, 2)
    return store, lease


@pytest.mark.fault
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("answer", [refuse(errno.EIO), refuse(errno.ESTALE), garble], ids=["EIO", "ESTALE", "garbled"])
def test_what_a_disk_gets_wrong_once_is_asked_again(two_saves, monkeypatch, name, answer):
    store, lease = two_saves
    disk = Disk(monkeypatch, name, 1, answer)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert (found.checkpoint.name, found.notes, disk.count) == ("ba2", [], 0)
    assert names(store) == ["ba2", "ba1"]


@pytest.mark.fault
@pytest.mark.parametrize("call", ["listdir", "scandir", "open"])
def test_a_disk_that_refuses_once_to_list_or_to_open_is_asked_again(two_saves, tmp_path, monkeypatch, call):
    store, lease = two_saves
    real, refused = getattr(os, call), []

    def called(path, *options, **named):
        if str(path).startswith(str(tmp_path)) and not refused:
            refused.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *options, **named)

    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * 3)
    monkeypatch.setattr(os, call, called)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert refused and found.checkpoint is not None and (found.checkpoint.name, found.notes) == ("ba2", [])


@pytest.mark.fault
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_what_cannot_be_read_stops_the_search_and_is_never_damage(two_saves, monkeypatch, name, error):
    store, lease = two_saves
    Disk(monkeypatch, name, FOR_EVER, refuse(error))
    words = f"ba2/{name}: cannot be read on host {socket.gethostname()}: {os.strerror(error)}$"
    with pytest.raises(UnreadableCheckpointError, match=words):
        store.newest_intact(verify_checkpoint, quarantine=lease)
    assert {"ba1", "ba2"} <= set(store.root.names())


@pytest.mark.fault
@pytest.mark.parametrize("name", FILES)
def test_bytes_that_are_wrong_twice_are_damage(two_saves, monkeypatch, name):
    store, lease = two_saves
    Disk(monkeypatch, name, FOR_EVER, garble)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert found.checkpoint.name == "ba1" and "passed over damaged checkpoint, now .damaged-ba2-" in found.notes[0]


@pytest.mark.fault
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_that_lacks_a_file_is_passed_over_where_it_lies(two_saves, tmp_path, name):
    store, lease = two_saves
    (tmp_path / "ba2" / name).unlink()
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert found.checkpoint.name == "ba1"
    assert found.notes == [f"passed over incomplete checkpoint: {tmp_path}/ba2/{name}: missing"]
    assert (tmp_path / "ba2").is_dir()


@pytest.mark.fault
@pytest.mark.parametrize("names_damaged", [FILES[1:] * 2, FILES, FILES[::-1]], ids=["shards", "ba1's", "ba2's"])
def test_the_last_checkpoint_is_never_renamed(two_saves, tmp_path, names_damaged):
    store, lease = two_saves
    for batch, name in zip((1, 2), names_damaged, strict=True):
        flip(tmp_path / f"ba{batch}" / name, -1)
    found = store.newest_intact(verify_checkpoint, quarantine=lease)
    assert found.checkpoint is None and len(found.notes) == 2
    left = [name for name in os.listdir(tmp_path) if name.startswith("ba")]
    assert len(left) == 1
    for _ in range(2):
        store.newest_intact(verify_checkpoint, quarantine=lease)
    assert [name for name in os.listdir(tmp_path) if name.startswith("ba")] == left


@pytest.mark.fault
def test_a_folder_whose_checkpoints_were_all_set_aside_is_not_a_new_one(two_saves, tmp_path):
    store, _ = two_saves
    CheckpointStore(tmp_path / "new").check_is_new()
    os.rename(tmp_path / "ba1", tmp_path / ".damaged-ba1-0")
    os.rename(tmp_path / "ba2", tmp_path / ".damaged-ba2-1")
    assert store.candidates() == []
    with pytest.raises(
        CheckpointError, match=r"holds no checkpoint but \.damaged-ba1-0, \.damaged-ba2-1, set aside as"
    ):
        store.check_is_new()


@pytest.mark.fault
def test_a_save_that_cannot_take_its_place_leaves_the_one_that_has_it(tmp_path, monkeypatch):
    store, lease = saved(tmp_path)
    first = save(store, lease, 1)
    draft = write_draft(store, lease, 1)
    rename = LocalFolder.rename

    def fail(self, old, new):
        if old.startswith(".tmp-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(self, old, new)

    monkeypatch.setattr(LocalFolder, "rename", fail)
    with pytest.raises(CheckpointError, match="ba1: not published: No space left on device"):
        store.publish(draft, lease)
    assert store.newest_intact(verify_checkpoint).checkpoint.manifest.save_id == first.manifest.save_id


def test_what_someone_else_has_removed_is_removed(url):
    store = CheckpointStore(url)
    once = save(store, store.acquire(), 1)
    for _ in range(2):
        store.remove("ba1", once.manifest.save_id)
    assert names(store) == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    def refuse(url, **options):
        raise ImportError("Install s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(CheckpointError, match=r"pip install 'llmfoundry-lite\[s3\]'"):
        open_folder("s3://bucket/run")


def test_listing_and_retention_decode_no_manifest_but_the_newest(tmp_path, monkeypatch):
    _store, lease = saved(tmp_path, *range(1, 9))
    decoded = []
    real = commit.decode
    monkeypatch.setattr(commit, "decode", lambda raw, where: decoded.append(where) or real(raw, where))
    rows = [describe_row(candidate) for candidate in CheckpointStore(tmp_path).candidates()]
    assert [row[0] for row in rows if row] == [str(batch) for batch in range(8, 0, -1)] and not decoded
    assert prune(CheckpointStore(tmp_path), lease, keep_newest=3, verify=check_present) == [
        f"ba{n}" for n in range(1, 6)
    ]
    assert decoded == [f"{tmp_path}/ba8/manifest.json"]
