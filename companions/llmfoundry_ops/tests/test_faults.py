"""The launcher's record of failed tries: it says what rank 0 cannot know, and leaves what rank 0 has said."""

import json

import pytest

from llmfoundry_lite.ranks.ending import LOST_CONTACT
from llmfoundry_lite.ranks.identity import describe_process
from llmfoundry_lite.ranks.status import LAUNCHES, STATUS, read_status, write_status
from llmfoundry_ops.faults import LAUNCHER, WAS_KILLED, FaultRecord

KILLED = "rank 1 was killed by SIGKILL"
GONE = {**describe_process(1), "pid": (1 << 22) + 1}


def last_line(folder):
    return json.loads((folder / LAUNCHES).read_text().splitlines()[-1])


def begin(folder, batch=7):
    """Leave the status of a rank 0 that is gone."""
    write_status(folder, "running", batch, last_saved="ba5", saved_at=1.0)
    content = json.loads((folder / STATUS).read_text())
    (folder / STATUS).write_text(json.dumps(content | {"process": GONE}))


@pytest.fixture
def faults(tmp_path):
    write_status(tmp_path, "failed", 3, "of the launch before")
    faults = FaultRecord(tmp_path)
    faults.begin_try()
    return faults


def test_a_rank_0_that_said_nothing_gets_the_launchers_reason(faults, tmp_path):
    begin(tmp_path)
    faults.note(KILLED, restarts=True)
    assert read_status(tmp_path) == {
        "status": "failed",
        "batch": 7,
        "reason": KILLED,
        "last_saved": "ba5",
        "saved_at": 1.0,
    }
    *_, end, line = map(json.loads, (tmp_path / LAUNCHES).read_text().splitlines())
    assert (end["status"], end["reason"], end["batch"]) == ("failed", KILLED, 7)
    assert (line[LAUNCHER], line["restarts"], line[WAS_KILLED]) == (KILLED, True, False)


def test_a_rank_0_that_lost_contact_gets_it_too_in_one_end(faults, tmp_path):
    begin(tmp_path)
    write_status(tmp_path, "failed", 7, f"rank 2: {LOST_CONTACT}", last_saved="ba5", extra=1)
    faults.note(KILLED, restarts=False)
    content = read_status(tmp_path) or {}
    assert (content["reason"], content["extra"], content["last_saved"]) == (KILLED, 1, "ba5")
    assert last_line(tmp_path)[LAUNCHER] == KILLED
    assert (tmp_path / LAUNCHES).read_text().count('"status": "failed"') == 2


def test_an_error_that_rank_0_knows_stays(faults, tmp_path):
    begin(tmp_path)
    write_status(tmp_path, "failed", 7, "rank 1: CUDA error")
    faults.note("rank 0 left with exit code 1", restarts=False)
    assert (read_status(tmp_path) or {})["reason"] == "rank 1: CUDA error"
    assert (last_line(tmp_path)[LAUNCHER], last_line(tmp_path)["restarts"]) == (None, False)


def test_a_try_that_did_not_begin_leaves_the_status_of_the_launch_before(faults, tmp_path):
    faults.note(KILLED, restarts=False, was_killed=True)
    assert (read_status(tmp_path) or {})["reason"] == "of the launch before"
    assert (last_line(tmp_path)[LAUNCHER], last_line(tmp_path)[WAS_KILLED]) == (KILLED, True)
    FaultRecord(tmp_path / "new").note(KILLED, restarts=False)
    assert not (tmp_path / "new").exists()
