"""Two places for saves: copies between them, retention that counts both, and launches that were replaced."""

import errno
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry_lite.checkpoint import fallback
from llmfoundry_lite.checkpoint.commit import COPYING, DRAFT
from llmfoundry_lite.checkpoint.fallback import CopyBack, copy_checkpoint
from llmfoundry_lite.checkpoint.lease import LeaseRequest
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import MANIFEST
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import TOKENIZER_FILE
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.checkpoint.retention import _find_unused_log_now, carry_out_removal, plan_removal, prune
from llmfoundry_lite.checkpoint.run_log import read_log, write_log
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present, verify_checkpoint
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.report.reading import read_recorded, read_second_place
from tests.checkpoint.saves import flip, names, save, saved, write_draft
from tests.helpers.reported import record, write_run


def open_places(tmp_path: Path, second: str = "second") -> CheckpointStore:
    return CheckpointStore(tmp_path / "first", second=CheckpointStore(tmp_path / second))


def launch(tmp_path: Path, second: str = "second") -> tuple[CheckpointStore, CheckpointStore, Lease]:
    """A launch of the run that takes the lease of the first place and follows it in the second."""
    store = open_places(tmp_path, second)
    lease = store.acquire(steal_from_live_writer=True)
    assert store.second is not None
    store.second.follow(lease)
    return store, store.second, lease


def copy_back(store: CheckpointStore, lease: Lease, **options) -> list[str]:
    """Let a launch copy once, and return the lines for the user."""
    lines: list[str] = []
    copier = CopyBack(store, lease, answers=lambda: True, note=lines.append, **options)
    copier._is_idle.wait(30)
    copier.stop()
    return lines


def test_the_newest_checkpoint_of_both_places_is_found_by_lease_and_batch(tmp_path):
    first, second, lease = launch(tmp_path)
    save(first, lease, 2)
    save(second, lease, 4)
    search = first.newest_intact()
    assert search.checkpoint is not None and search.checkpoint.url == f"{tmp_path}/second/ba4"

    flip(next((tmp_path / "second/ba4").glob("shard-00001*")), 9000)
    search = first.newest_intact(verify_checkpoint)
    assert search.checkpoint is not None and search.checkpoint.url == f"{tmp_path}/first/ba2"
    assert list(search.passed_over) == [f"{tmp_path}/second/ba4"]


def test_the_saves_of_the_second_place_are_listed_and_reported(tmp_path, capsys):
    run = tmp_path / "run"
    write_run(run, [record(1), record(2)], save_fallback=str(tmp_path / "second"))
    assert main.run(["checkpoint", "ls", str(run)]) == 2
    out, err = capsys.readouterr()
    assert f"saves in save_fallback are not known: {tmp_path}/second is not on this machine" in out
    assert "no checkpoints here" in err

    saved(tmp_path / "second", 4)
    assert main.run(["checkpoint", "ls", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out.split()[:2] == ["save_fallback", f"{tmp_path}/second"] and "ba4" in out and "no checkpoints here" in err
    saved(run / "checkpoints", 2)
    assert main.run(["checkpoint", "ls", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " MB " in line] == ["ba2", "ba4"]
    assert f"save_fallback {tmp_path}/second holds ba4; ba4 is newer than what save_folder has; " in " ".join(
        read_recorded(str(run)).notes
    )


def test_a_second_place_that_a_stranger_may_have_written_is_not_opened(tmp_path):
    folder = open_folder(tmp_path)
    for location in ("http://10.0.0.1/saves", "sftp://host/saves", "memory://second/saves"):
        place = read_second_place(folder, {"save_fallback": location})
        assert place is not None and place.problem == "not opened unasked; give that folder to list its saves"
    for location in ("${oc.env:HOME}/saves", "/tmp/\0"):
        place = read_second_place(folder, {"save_fallback": location})
        assert place is not None and place.problem.startswith("not ")
    assert [read_second_place(folder, {"save_fallback": value}) for value in (None, 7, [], "")] == [None] * 4


def test_a_place_that_cannot_be_listed_is_no_empty_place(tmp_path):
    """Its saves may be the newest, so a launch may not begin from an older one."""
    (tmp_path / "second").write_text("a file")
    store = open_places(tmp_path)

    def fails():
        raise OSError(errno.EIO, "Input/output error")

    assert store.second is not None
    store.second.root.names = fails  # type: ignore[method-assign]
    with pytest.raises(
        CheckpointError, match=r"save_fallback: .*cannot be listed.*save_fallback=null carries on"
    ) as at:
        store.acquire()
    assert at.value.is_transient


def test_saves_are_copied_the_newest_first_and_then_removed_from_the_second(tmp_path):
    first, second, lease = launch(tmp_path)
    originals = {batch: save(second, lease, batch) for batch in (2, 4)}
    assert copy_back(first, lease) == [f"copied ba{batch} to {tmp_path}/first" for batch in (4, 2)]
    assert names(second) == [] and names(first) == ["ba4", "ba2"]
    for batch, original in originals.items():
        copy = open_checkpoint(tmp_path / f"first/ba{batch}")
        verify_checkpoint(copy)
        assert copy.manifest.save_id == original.manifest.save_id
    assert b'"name":"ba4"' in (tmp_path / "first/latest.json").read_bytes()


def test_log_and_tokenizer_go_with_a_copy(tmp_path, monkeypatch):
    first, second, lease = launch(tmp_path)
    draft = write_draft(second, lease, 2)
    log = b'{"batch": 1}\n{"batch": 2}\n'
    second.publish(replace(draft, log=write_log(second, draft.save_id, log, ())), lease)
    (tmp_path / "second/tokenizer").mkdir()
    for name in (TOKENIZER_FILE, "tokenizer_config.json"):
        (tmp_path / "second/tokenizer" / name).write_text("{}")
    put, written = LocalFolder.put, []

    def put_and_note(folder: LocalFolder, name: str, content: bytes, **options: bool) -> None:
        written.append(name)
        put(folder, name, content, **options)

    monkeypatch.setattr(LocalFolder, "put", put_and_note)
    copy_back(first, lease)
    assert read_log(open_checkpoint(tmp_path / "first/ba2")).content == log
    assert (tmp_path / "first/tokenizer/tokenizer.json").read_text() == "{}"
    in_order = [name for name in written if name.startswith("tokenizer")]
    assert in_order == ["tokenizer_config.json", TOKENIZER_FILE], "it says that all files are there"


@pytest.mark.fault
@pytest.mark.parametrize("phase", ["files copied", "before manifest", "before rename", "copied", "mid-prune"])
def test_a_copy_that_is_interrupted_leaves_a_whole_checkpoint_in_one_place(tmp_path, phase):
    class Killed(BaseException):
        pass

    first, second, lease = launch(tmp_path)
    save(first, lease, 2)
    save(second, lease, 4)

    def die(reached: str) -> None:
        if reached == phase:
            raise Killed

    dying = open_places(tmp_path)
    assert dying.second is not None
    dying.on_phase = dying.second.on_phase = die
    copier = CopyBack.__new__(CopyBack)
    copier.store, copier.second, copier.lease = dying, dying.second, lease
    copier._epoch_at_start, copier._damaged = None, set()
    copier.note = copier.on_copied = copier.before_copies = lambda argument: None
    copier.answers, copier.after_copies = lambda: True, lambda: None
    copier.in_use, copier._is_over, copier._progress_seconds = (), threading.Event(), 0.0
    with pytest.raises(Killed):
        copier._copy_all()

    # The next launch finds it, and ends what was begun.
    first, second, lease = launch(tmp_path)
    found = first.newest_intact(check_present).checkpoint
    assert found is not None and found.name == "ba4"
    verify_checkpoint(found)
    copy_back(first, lease)
    assert names(first) == ["ba4", "ba2"] and names(second) == []
    assert not [path for path in (tmp_path / "first").iterdir() if path.name.startswith(DRAFT)]
    verify_checkpoint(open_checkpoint(tmp_path / "first/ba4"))


def test_a_damaged_save_is_not_copied_and_stays(tmp_path):
    first, second, lease = launch(tmp_path)
    save(second, lease, 2)
    flip(next((tmp_path / "second/ba2").glob("shard-00000*")), 9000)
    (line,) = copy_back(first, lease)
    assert line.startswith(f"{tmp_path}/second/ba2 is damaged and was not copied: ")
    assert names(second) == ["ba2"] and names(first) == []


def test_a_launch_that_was_replaced_may_write_to_neither_place(tmp_path):
    _, second, lease = launch(tmp_path)
    launch(tmp_path)
    with pytest.raises(CheckpointError, match="has taken this run over"):
        save(second, lease, 4)


def test_saves_of_a_launch_that_was_replaced_never_win(tmp_path):
    """Its successor, on another machine, did not see them, and began from an older save."""
    first, second, lease = launch(tmp_path)
    save(first, lease, 2)
    other, _, later_lease = launch(tmp_path, second="elsewhere")
    save(other, later_lease, 3)
    save(second, lease, 8)  # the first place is away, so that this launch does not know yet

    assert "has taken this run over" in copy_back(first, lease)[0]
    first, second, lease = launch(tmp_path)
    found = first.newest_intact().checkpoint
    assert found is not None and found.url == f"{tmp_path}/first/ba3"
    assert copy_back(first, lease) == []
    assert names(second) == ["ba8"] and names(first) == ["ba3", "ba2"]


def test_older_saves_of_the_launch_before_are_copied_too(tmp_path):
    """It was killed between a save to the first place, which was back, and the copies."""
    first, second, lease = launch(tmp_path)
    save(second, lease, 2)
    save(second, lease, 4)
    save(first, lease, 6)
    first, second, lease = launch(tmp_path)
    assert copy_back(first, lease) == [f"copied ba{batch} to {tmp_path}/first" for batch in (4, 2)]
    assert names(first) == ["ba6", "ba4", "ba2"] and names(second) == []


@pytest.mark.fault
def test_a_copier_that_was_replaced_leaves_the_draft_to_its_successor(tmp_path):
    """Both copy the same save, so that their drafts have the same name."""
    first, second, lease = launch(tmp_path)
    original = save(second, lease, 2)
    drafts: list[Path] = []

    def take_over(num_bytes: int) -> None:
        if not drafts:
            launch(tmp_path)
            folder, _ = first.commits.draft(original.manifest.save_id)
            folder.make()
            folder.put("of-the-successor", b"")
            assert folder.path_here is not None
            drafts.append(folder.path_here)

    with pytest.raises(CheckpointError):
        copy_checkpoint(original, first, lease, on_bytes=take_over)
    assert (drafts[0] / "of-the-successor").exists()
    with pytest.raises(CheckpointError, match="has taken this run over"):
        copy_checkpoint(original, first, lease)
    assert (drafts[0] / "of-the-successor").exists()


def test_a_copy_makes_progress_while_it_is_verified(tmp_path):
    first, second, lease = launch(tmp_path)
    original = save(second, lease, 2)
    num_bytes: list[int] = []
    copy_checkpoint(original, first, lease, on_bytes=num_bytes.append)
    assert sum(num_bytes) > 1.9 * original.manifest.num_bytes


def test_a_lease_is_above_those_of_both_places(tmp_path):
    CheckpointStore(tmp_path / "second").leases.acquire(at_least=7)
    _, second, lease = launch(tmp_path)
    assert lease.epoch == 8 and second.leases.highest_epoch() == 8
    second.check(lease)


def test_retention_counts_both_places_and_copies_once(tmp_path):
    first, second, lease = launch(tmp_path)
    for batch in (1, 2, 3):
        save(first, lease, batch)
    for batch in (4, 5):
        save(second, lease, batch)
    copy_checkpoint(open_checkpoint(tmp_path / "second/ba5"), first, lease)

    def prune_place(place: CheckpointStore, other: CheckpointStore, keep: int) -> None:
        prune(place, lease, keep_newest=keep, elsewhere=other.candidates(), verify=check_present)

    prune_place(first, second, 3)
    prune_place(second, first, 3)
    assert (names(first), names(second)) == (["ba5", "ba3"], ["ba5", "ba4"])
    prune_place(second, first, 1)
    prune_place(first, second, 1)
    assert (names(first), names(second)) == (["ba5"], ["ba5"])


@pytest.mark.fault
@pytest.mark.parametrize("url", ["local", "memory"])
@pytest.mark.parametrize("moment", ["before", "while drafts are looked up", "after"])
def test_retention_beside_a_copy_keeps_the_log_of_the_copied_save(tmp_path, monkeypatch, url, moment):
    """A copy of an older save is published after the writer has decided what to remove."""
    first = CheckpointStore(tmp_path / "first" if url == "local" else f"memory://{uuid.uuid4().hex}")
    second, lease = saved(tmp_path / "second")
    manifest = write_draft(second, lease, 1)
    log = b'{"batch": 1}\n'
    original = second.publish(replace(manifest, log=write_log(second, manifest.save_id, log, ())), lease)
    lease = first.acquire()
    for batch in (2, 3):
        save(first, lease, batch)
    removal = plan_removal(first, keep_newest=1)

    unused_parts: list[str] = []

    def look_before_manifest(phase: str) -> None:
        if phase == "before manifest":
            unused_parts.extend(_find_unused_log_now(first, removal))

    def copy_and_look(save_id: str) -> bool:
        copy_checkpoint(original, first, lease, is_newest=False)
        return False

    first.on_phase = look_before_manifest
    if moment == "while drafts are looked up":
        write_log(first, manifest.save_id, log, ())
        first.on_phase = lambda phase: None
        monkeypatch.setattr(first.commits, "has_copy_in_progress", copy_and_look)
    else:
        copy_checkpoint(original, first, lease, is_newest=False)
    if moment != "before":
        carry_out_removal(first, removal, has_lease=True)
    assert unused_parts == [] and read_log(open_checkpoint(first.root.child("ba1").url)).content == log


def test_retention_removes_nothing_here_if_the_newest_elsewhere_is_not_whole(tmp_path):
    first, second, lease = launch(tmp_path)
    save(first, lease, 1)
    save(first, lease, 2)
    save(second, lease, 3)
    next((tmp_path / "second/ba3").glob("shard-00000*")).unlink()
    prune(first, lease, keep_newest=1, elsewhere=second.candidates(), verify=check_present)
    assert names(first) == ["ba2"], "the newest that is whole"


def test_a_launch_is_told_of_a_second_place_on_the_machine_of_a_dead_one(tmp_path):
    lines: list[str] = []
    store = CheckpointStore(tmp_path / "first")
    dead = store.acquire(request=LeaseRequest(fallback="/nvme/saves"))
    claim = tmp_path / f"first/.leases/{dead.epoch:08d}.json"
    claim.write_text(claim.read_text().replace('"boot"', '"other"'))
    store.acquire(request=LeaseRequest(takes_over=True, note=lines.append))
    assert len(lines) == 2 and " has saves of this run in /nvme/saves if save_folder was away" in lines[1]


def test_a_user_copies_the_newest_save_unless_the_run_has_gone_on(tmp_path, capsys):
    first, second, lease = launch(tmp_path)
    save(first, lease, 2)
    save(second, lease, 4)
    command = ["checkpoint", "copy", f"{tmp_path}/second", f"{tmp_path}/first"]
    assert main.run(command) == 0
    assert capsys.readouterr().out == f"copied {tmp_path}/second/ba4 to {tmp_path}/first/ba4\n"
    assert main.run(command) == 0
    assert "is this checkpoint already" in capsys.readouterr().out
    save(first, lease, 5)
    assert main.run(command) == 0, "the same save is there, and newer ones do not matter"
    save(second, lease, 3)
    assert main.run([*command[:2], f"{tmp_path}/second/ba3", command[3]]) == 2
    assert "so the run has gone on; to begin another run" in capsys.readouterr().err


@pytest.mark.fault
def test_a_save_that_cannot_be_copied_does_not_hold_up_older_ones(tmp_path, monkeypatch):
    first, second, lease = launch(tmp_path)
    save(second, lease, 2)
    save(second, lease, 4)
    copy = fallback.copy_checkpoint

    def fails_for_the_newest(checkpoint, *arguments, **options):
        if checkpoint.name == "ba4":
            raise OSError(errno.EFBIG, "File too large")
        return copy(checkpoint, *arguments, **options)

    monkeypatch.setattr(fallback, "copy_checkpoint", fails_for_the_newest)
    after_copies: list[str] = []
    lines = copy_back(first, lease, after_copies=lambda: after_copies.append("pruned"))
    assert lines[0] == f"copied ba2 to {tmp_path}/first"
    assert lines[1].startswith(f"not copied to {tmp_path}/first yet: ") and "File too large" in lines[1]
    assert (names(first), names(second)) == (["ba2"], ["ba4"]) and after_copies == ["pruned"]


def test_what_retention_does_not_keep_is_not_copied(tmp_path):
    first, second, lease = launch(tmp_path)
    for batch in (2, 4):
        save(second, lease, batch)
    save(first, lease, 6)

    def keep_two(in_first: Sequence[Candidate]) -> None:
        prune(second, lease, keep_newest=2, elsewhere=in_first, verify=check_present)

    assert copy_back(first, lease, before_copies=keep_two) == [f"copied ba4 to {tmp_path}/first"]
    assert (names(first), names(second)) == (["ba6", "ba4"], [])


@pytest.mark.fault
@pytest.mark.parametrize("phase", ["files copied", "before rename", "after rename"])
def test_a_user_s_prune_beside_a_copy_to_a_bucket_leaves_its_draft(tmp_path, phase):
    """The copied save is older than the newest one there, as is the rest of an interrupted removal."""
    bucket = CheckpointStore(f"memory://{uuid.uuid4().hex}", second=CheckpointStore(tmp_path / "second"))
    lease = bucket.acquire()
    assert bucket.second is not None
    bucket.second.follow(lease)
    original = save(bucket.second, lease, 2)
    save(bucket, lease, 4)

    def prune_meanwhile(reached: str) -> None:
        if reached == phase:
            assert prune(CheckpointStore(bucket.root.url), None, keep_newest=2) == []

    bucket.on_phase = prune_meanwhile
    copy = copy_checkpoint(original, bucket, lease, is_newest=False)
    verify_checkpoint(open_checkpoint(copy.url))
    assert names(bucket) == ["ba4", "ba2"]
    assert COPYING not in copy.folder.child(copy.manifest.save_id).names()

    # A copy that is killed leaves its draft to the next launch.
    draft, _ = bucket.commits.draft("e1-ba3-0123456789ab")
    bucket.commits.begin_copy("e1-ba3-0123456789ab")
    draft.put("shard", b"x")
    prune(bucket, None, keep_newest=1)
    assert names(bucket) == ["ba4"] and draft.names() == [COPYING, "shard"]
    bucket.acquire(steal_from_live_writer=True)
    assert draft.names() == []


def test_a_copy_that_is_committed_while_a_prune_looks_is_no_leftover(monkeypatch):
    bucket = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    save_id = "e1-ba2-0123456789ab"
    draft, _ = bucket.commits.draft(save_id)
    bucket.commits.begin_copy(save_id)
    draft.put("shard", b"x")
    list_names = RemoteFolder.names

    def commit_meanwhile(folder: RemoteFolder) -> list[str]:
        if folder.url == draft.url and COPYING in list_names(folder):
            draft.parent().put(MANIFEST, b"{}")
            bucket.commits.end_copy(save_id)
        return list_names(folder)

    monkeypatch.setattr(RemoteFolder, "names", commit_meanwhile)
    assert bucket.commits.leftovers(newest=(1, 4)) == []
    assert draft.names() == ["shard"]


@pytest.mark.fault
def test_a_copy_that_the_first_place_refuses_is_tried_again_later(tmp_path, monkeypatch):
    first, second, lease = launch(tmp_path)
    save(second, lease, 2)
    attempts = []

    def fails_once(*arguments, **options):
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return verify(*arguments, **options)

    verify = fallback.verify_file
    monkeypatch.setattr(fallback, "verify_file", fails_once)
    lines: list[str] = []
    copier = CopyBack(first, lease, answers=lambda: True, note=lines.append)
    copier._is_idle.wait(30)
    assert names(first) == [] and names(second) == ["ba2"]
    copier.wake()
    copier._is_idle.wait(30)
    copier.stop()
    assert names(first) == ["ba2"] and names(second) == []
    assert lines[0].startswith(f"not copied to {tmp_path}/first yet: ")
    assert lines[0].endswith(": not copied: No space left on device")
