"""Logs of ranks: rotated when they are large, while several processes append to them."""

import errno
import os

import pytest

from llmfoundry_ops import rank_logs
from llmfoundry_ops.rank_logs import KEPT_LOGS, Rotation, make_room_for_logs, rotate


@pytest.fixture
def log(tmp_path):
    """A log that two processes have open for appending, as a rank and its data loader's worker have it."""
    path = tmp_path / "rank1.txt"
    writers = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)]
    yield path, writers
    for writer in writers:
        os.close(writer)


def test_no_line_is_lost_and_old_parts_are_removed(log):
    path, writers = log
    for number in range(KEPT_LOGS + 2):
        for writer in writers:
            os.write(writer, b"%d\n" % number)
        rotate(path)
    os.write(writers[0], b"last\n")
    assert path.read_text() == "last\n"
    kept = {file.name: file.read_text() for file in path.parent.iterdir() if file != path}
    assert kept == {"rank1.1.txt": "4\n4\n", "rank1.2.txt": "3\n3\n", "rank1.3.txt": "2\n2\n"}


def test_a_full_disk_cuts_nothing_off(log, monkeypatch):
    """It costs the oldest part at most, however often the copy fails."""
    path, writers = log
    os.write(writers[0], b"kept\n")
    for number in range(1, KEPT_LOGS + 1):
        path.with_suffix(f".{number}.txt").write_text(f"part {number}")

    def full(source, target):
        target.write(b"ke")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(rank_logs.shutil, "copyfileobj", full)
    for _ in range(KEPT_LOGS + 1):
        with pytest.raises(OSError, match="full"):
            rotate(path)
    kept = {file.name: file.read_text() for file in path.parent.iterdir()}
    assert kept == {"rank1.txt": "kept\n", "rank1.2.txt": "part 1", "rank1.3.txt": "part 2"}


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "other.txt").write_text("of somebody else")
    (tmp_path / "rank1.txt").symlink_to(tmp_path / "other.txt")
    (tmp_path / "rank1.1.txt").write_text("older")
    with pytest.raises(OSError):
        rotate(tmp_path / "rank1.txt")
    assert (tmp_path / "other.txt").read_text() == "of somebody else"
    assert (tmp_path / "rank1.1.txt").read_text() == "older"


def test_only_large_logs_are_rotated_when_it_is_time(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_logs, "MAX_LOG_BYTES", 10)
    for rank, text in ((1, "small"), (2, "larger than ten")):
        (tmp_path / f"rank{rank}.txt").write_text(text)
    Rotation(tmp_path, 4).rotate_large_logs()
    assert len(list(tmp_path.iterdir())) == 2

    monkeypatch.setattr(rank_logs, "ROTATION_SECONDS", 0.0)
    Rotation(tmp_path, 4).rotate_large_logs()
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {
        "rank1.txt": 5,
        "rank2.txt": 0,
        "rank2.1.txt": 15,
    }


def test_the_next_launch_sets_all_parts_aside(tmp_path):
    """Parts of launches before that one are removed, unless no later launch has written a log."""
    for name in ("rank1.txt", "rank1.1.txt", "rank1.3.before.txt", "rank2.before.txt"):
        (tmp_path / name).touch()
    for _ in range(2):
        make_room_for_logs(tmp_path)
        assert {file.name for file in tmp_path.iterdir()} == {"rank1.before.txt", "rank1.1.before.txt"}
