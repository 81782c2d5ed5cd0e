"""Files of the run folder that somebody removes, replaces or cuts off while the run trains."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from composer.core import Callback

from llmfoundry_lite.errors import TransientError, UserError
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.training.log_file import LogFile
from llmfoundry_lite.training.run_folder import (
    RunFolder,
    append_missing_records,
    disk_errors_as_user_errors,
    last_launch,
    log_until,
)
from tests.helpers.runs import attempt, metrics, run, status
from tests.helpers.tiny import tiny_config

FOLDER = Path("runs/run")
LOG = FOLDER / "metrics.jsonl"


class Lose(Callback):
    """Does something to files of the run folder when three batches are trained."""

    def __init__(self, what: str):
        self.what = what

    def batch_start(self, state, logger):
        if int(state.timestamp.batch) == 3:
            globals()[self.what]()


class LoseAtEnd(Lose):
    def close(self, state, logger):
        globals()[self.what]()

    def batch_start(self, state, logger):
        pass


def remove_log():
    LOG.unlink()


def replace_log():
    other = FOLDER / "edited"
    other.write_text(LOG.read_text().splitlines(keepends=True)[0])
    os.replace(other, LOG)


def cut_off_log():
    os.truncate(LOG, 0)


def remove_notes():
    for name in ("status.json", "launches.jsonl", "config.yaml"):
        (FOLDER / name).unlink()


def rename_folder():
    FOLDER.rename("runs/elsewhere")


def train_and_lose(tmp_path, data, what: str, kind: type = Lose) -> str:
    """Train six batches, with checkpoints outside the run folder, and return what the run printed."""
    config = tiny_config(
        data,
        max_duration="6ba",
        save_interval="2ba",
        save_folder=str(tmp_path / "saves"),
        callbacks={f"python:{__name__}:{kind.__name__}": {"what": what}},
    )
    output = run(tmp_path, config, "run").output
    ended = status(tmp_path, "run")
    assert (ended["status"], ended["batch"], ended["reason"]) == ("done", 6, None)
    return output


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("remove_log", Lose, "was removed or renamed while the run trained; 3 records were written again"),
        ("remove_log", LoseAtEnd, "was removed or renamed while the run trained; 7 records were written again"),
        pytest.param(
            *("replace_log", Lose, "was replaced while the run trained; 3 records were written again"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("rename_folder", Lose, "was removed or renamed while the run trained; 3 records were written again"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_log_that_was_removed_in_mid_run_is_whole_at_the_end(tmp_path, data, what, kind, said):
    output = train_and_lose(tmp_path, data, what, kind)
    assert output.count(f"warning: {LOG} {said}\n") == output.count(f"{LOG} was ") == 1
    assert [record["batch"] for record in metrics(tmp_path, "run")] == [1, 2, 3, 4, 5, 6]
    carried = b"".join(path.read_bytes() for path in (tmp_path / "saves/log").iterdir())
    assert {json.loads(line)["batch"] for line in carried.splitlines()} >= {1, 2, 3, 4}
    assert not [note for note in read_run(tmp_path / FOLDER).notes if "no record" in note]


@pytest.mark.multiprocess
def test_a_log_that_was_cut_off_in_mid_run_says_which_records_are_lost(tmp_path, data):
    output = train_and_lose(tmp_path, data, "cut_off_log")
    assert (
        f"warning: {LOG}: " in output
        and " bytes were cut off while the run trained; their records are lost\n" in output
    )
    shutil.rmtree(tmp_path / "saves")  # which hold the records up to batch 2
    notes = read_run(tmp_path / FOLDER).notes
    assert "batches 1 to 3: metrics.jsonl has no record of them" in notes


@pytest.mark.multiprocess
def test_other_files_that_were_removed_in_mid_run_are_written_again(tmp_path, data):
    output = train_and_lose(tmp_path, data, "remove_notes")
    for name in ("config.yaml", "launches.jsonl"):
        assert f"warning: {FOLDER / name} was removed while the run trained; it was written again\n" in output
    launches = (tmp_path / FOLDER / "launches.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in launches] == ["running", "done"]
    assert "max_duration: 6ba\n" in (tmp_path / FOLDER / "config.yaml").read_text()


# ------------------------------------------------------------------------------------------------- the log alone


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    log = LogFile(folder / "metrics.jsonl")
    yield log
    log.close()


def write(log: LogFile, *batches: int) -> None:
    for batch in batches:
        log.append(json.dumps({"batch": batch}))


def batches_in(path: Path) -> list[int]:
    return [json.loads(line)["batch"] for line in path.read_text().splitlines()]


def test_a_log_that_nobody_touches_needs_no_mending(log):
    for batch in (1, 2):
        assert log.mend() == ""
        write(log, batch)
    assert batches_in(log.path) == [1, 2]


def test_a_log_that_a_copy_replaces_is_carried_on_without_a_word(log):
    """Some file systems give a file another number while it is open."""
    write(log, 1, 2)
    shutil.copy(log.path, log.path.with_name("copy"))
    os.replace(log.path.with_name("copy"), log.path)
    assert log.mend() == ""
    write(log, 3)
    assert batches_in(log.path) == [1, 2, 3]


def test_nothing_is_written_in_place_of_an_unmounted_disk_and_it_is_said_once(log):
    write(log, 1)
    disk = log.path.parent.parent
    away = disk.with_name("away")
    disk.rename(away)
    assert log.mend() == f"{log.path}: its folder is gone; records are written when it is back"
    write(log, 2)
    assert log.mend() == "" and not disk.exists()
    away.rename(disk)
    assert log.mend() == ""
    write(log, 3)
    assert batches_in(log.path) == [1, 2, 3]


def test_a_log_is_cut_off_once_for_each_time_that_it_is(log):
    write(log, 1, 2)
    size = log.path.stat().st_size
    os.truncate(log.path, size // 2)
    said = f"{log.path}: {size // 2} bytes were cut off while the run trained; their records are lost"
    assert (log.mend(), log.mend()) == (said, "")
    write(log, 3)
    assert batches_in(log.path) == [1, 3] and log.mend() == ""


def test_a_log_that_cannot_be_opened_again_keeps_its_records_until_it_can(log):
    """Somebody has put a folder in its place: the next attempt, such as that of a last save, meets no closed file."""
    log.append('{"batch": 1}')
    log.path.unlink()
    log.path.mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            log.mend()

    log.path.rmdir()
    log.mend()
    log.append('{"batch": 2}')
    assert [json.loads(line)["batch"] for line in log.path.read_text().splitlines()] == [1, 2]


def test_a_log_that_was_moved_elsewhere_and_linked_is_written_again_in_its_place(log, tmp_path):
    """A launch would refuse the link; a run that trains leaves it, and the file that it leads to, alone."""
    log.append('{"batch": 1}')
    elsewhere = tmp_path / "scratch.jsonl"
    log.path.rename(elsewhere)
    log.path.symlink_to(elsewhere)
    with pytest.raises(TransientError):  # a save that reads it before the next record is tried again
        log_until(log.path, 1)
    assert log.mend().endswith("was replaced by a link while the run trained; 1 records were written again")
    log.append('{"batch": 2}')
    assert not log.path.is_symlink() and elsewhere.read_text() == '{"batch": 1}\n'
    assert [json.loads(line)["batch"] for line in log.path.read_text().splitlines()] == [1, 2]


def test_a_run_folder_into_which_nobody_may_look_ends_no_run(tmp_path, monkeypatch):
    """`chmod` while it trains: somebody may grant access again, and the log is open."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    folder = RunFolder(SimpleNamespace(run_folder=str(tmp_path / "run")))  # type: ignore[arg-type]
    folder.log_file = LogFile(folder.log_path)

    def refuse() -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folder.log_file, "mend", refuse)
    folder._append({"batch": 1})
    assert json.loads(folder.log_path.read_text()) == {"batch": 1}
    remedy = "Permission denied; ask for the right to write there, or set run_folder"
    with pytest.raises(UserError, match=remedy), disk_errors_as_user_errors(tmp_path):
        refuse()


def test_a_log_that_finds_no_room_to_be_written_again_keeps_its_records(log):
    for batch in range(1, 200):
        log.append(json.dumps({"batch": batch}))
    log.path.unlink()
    size_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, size_limit[1]))
        with pytest.raises(OSError, match="File too large"):
            log.mend()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, size_limit)

    log.mend()
    assert [json.loads(line)["batch"] for line in log.path.read_text().splitlines()] == [*range(1, 200)]


def test_a_log_that_is_a_link_or_a_pipe_is_neither_read_nor_written(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine, without an end of line")
    os.mkfifo(tmp_path / "pipe")
    for place, message in (("kept.txt", "a link, which would be written through; remove it"), ("pipe", "a link")):
        log = tmp_path / f"{place}.jsonl"
        log.symlink_to(tmp_path / place)
        for write in (last_launch, LogFile, lambda path: append_missing_records(path, b'{"batch": 1}\n')):
            with pytest.raises(OSError, match=message):
                write(log)
    with pytest.raises(OSError, match="not a regular file"):
        last_launch(tmp_path / "pipe")
    assert kept.read_text() == "mine, without an end of line"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_resumed_run_writes_nothing_through_links_of_its_folder(tmp_path, data):
    config = tiny_config(data, max_duration="2ba", save_interval="2ba", autoresume=True)
    run(tmp_path, config, "run")
    kept, log = tmp_path / "kept.txt", tmp_path / LOG
    log.rename(kept)
    log.symlink_to(kept)
    before = kept.read_bytes()
    launch = attempt(tmp_path, config, "run", max_duration="4ba")
    assert launch.exit_codes == [2]
    expected = f"error: {LOG} cannot be written: a link, which would be written through; remove it\n"
    assert expected in launch.output
    assert kept.read_bytes() == before
