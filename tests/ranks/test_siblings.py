"""Ranks of one node tell each other how they end. The ranks here are forks, and their launcher is this process."""

import json
import os
import resource
import subprocess
import sys

import pytest

from llmfoundry_lite.ranks import siblings
from tests.helpers.launch import ROOT

TEXT = "error: optimizer.learning_rate: unknown key"


@pytest.fixture(autouse=True)
def one_node(tmp_path, monkeypatch):
    """Four ranks, whose notes lie in the test's folder."""
    monkeypatch.setattr(siblings.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(siblings, "_launch_id", None)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    launcher = os.getpid()
    monkeypatch.setattr(siblings.os, "getppid", lambda: launcher)
    become(0)
    siblings.register_rank()


def become(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))


def run_rank(rank, *ends, enrols=True):
    """Run a rank that enrols and notes these ends, to its end. Without `enrols` it has done so before."""
    pid = os.fork()
    if pid == 0:
        become(rank)
        if enrols:
            siblings.register_rank()
        for code, text in ends:
            siblings.record_end(code, text)
        os._exit(0)
    os.waitpid(pid, 0)


def test_a_rank_that_is_asked_to_leave_knows_who_has_failed_first():
    run_rank(2, (2, TEXT), (2, ""))
    run_rank(1, (1, "Traceback"))
    assert siblings.find_recorded_failure() == (2, 2, TEXT)


def test_the_first_to_fail_is_told_whoever_enrolled_or_ended_first():
    """Every rank is told the same one, so that it is printed once."""
    for rank in (1, 2, 3):
        run_rank(rank)
    run_rank(1, (0, ""), enrols=False)
    run_rank(3, (2, TEXT), enrols=False)
    run_rank(2, (1, "Traceback"), enrols=False)
    assert siblings.find_recorded_failure() == (3, 2, TEXT)
    assert siblings.record_end(1, "error: lost contact") == (3, 2, TEXT)


def test_a_rank_that_fails_a_second_time_keeps_its_place_and_its_first_text():
    for rank in (1, 2):
        run_rank(rank)
    run_rank(2, (2, TEXT), enrols=False)
    run_rank(1, (1, "Traceback"), enrols=False)
    run_rank(2, (2, "error: lost contact"), enrols=False)
    assert siblings.find_recorded_failure() == (2, 2, TEXT)


def test_one_rank_prints_what_all_meet():
    assert siblings.record_end(2, TEXT).rank == 0
    become(3)
    siblings.register_rank()
    assert siblings.record_end(2, TEXT) == (0, 2, TEXT)


def test_a_rank_that_was_killed_has_failed():
    run_rank(3)
    assert siblings.find_recorded_failure()[:2] == (3, 1)
    assert "rank 3 has ended without a message: it was killed" in siblings.find_recorded_failure().text


def test_a_rank_that_left_with_a_failure_s_code_has_failed():
    """It has printed why, where no process group was there to tell."""
    run_rank(2, (75, ""))
    run_rank(3, (1, ""))
    assert siblings.find_recorded_failure() == (3, 1, "error: rank 3 has left with exit code 1")


def test_a_note_of_a_failure_needs_no_room_on_a_disk_that_has_become_full(tmp_path):
    (notes,) = tmp_path.glob("llmfoundry_lite_ranks_*.json")
    was, room = notes.stat().st_blocks, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (notes.stat().st_size, room[1]))
    try:
        run_rank(2, (2, TEXT * 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert siblings.find_recorded_failure() == (2, 2, TEXT * 20)
    assert notes.stat().st_blocks == was > 0


def test_ranks_that_were_asked_too_or_are_done_have_not_failed():
    """Ctrl-C twice ends a rank with 130."""
    run_rank(1, (75, ""))
    run_rank(2, (0, ""))
    run_rank(3, (130, ""))
    assert siblings.find_recorded_failure() is None


def test_another_try_of_the_same_launcher_has_notes_of_its_own(monkeypatch):
    run_rank(1, (2, TEXT))
    monkeypatch.setenv("MASTER_PORT", "2")
    siblings.register_rank()
    assert siblings.find_recorded_failure() is None


def test_a_script_may_stand_between_launcher_and_rank(tmp_path):
    code = "from llmfoundry_lite.ranks import siblings; siblings.register_rank(); siblings.record_end(2, 'x')"
    here = os.environ | {"RANK": "1", "LOCAL_RANK": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-c", f'{sys.executable} -c "{code}"; true'], env=here, check=True)
    assert siblings.find_recorded_failure() == (1, 2, "x")


def test_notes_of_launches_that_are_over_are_dropped(tmp_path, monkeypatch):
    over = subprocess.Popen(["sleep", "60"])
    with monkeypatch.context() as patch:
        patch.setattr(siblings.os, "getppid", lambda: over.pid)
        siblings.register_rank()
    (notes,) = tmp_path.glob("*.json")
    assert len(json.loads(notes.read_text())) == 2
    over.kill()
    over.wait()
    siblings.register_rank()
    assert list(json.loads(notes.read_text())) == [siblings._launch_id]


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd"), lambda path: path.write_text("[")],
    ids=["pipe", "folder", "link", "torn"],
)
def test_a_file_that_cannot_be_ours_stops_nobody(tmp_path, make):
    (notes,) = tmp_path.glob("*.json")
    notes.unlink()
    make(notes)
    assert siblings.find_recorded_failure() is None
    assert siblings.record_end(2, TEXT).rank == 0
    become(1)
    assert siblings.record_end(2, TEXT).rank == 0


def test_a_process_without_a_launcher_notes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    siblings.register_rank()
    assert siblings.record_end(2, TEXT) == (0, 2, TEXT)
