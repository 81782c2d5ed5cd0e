"""Killed runs and live neighbours, with real processes."""

import fcntl
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from llmfoundry_lite.data import dataset as dataset_module
from llmfoundry_lite.data import shared_memory
from llmfoundry_lite.data.shared_memory import (
    SHARED_MEMORY,
    clean_stale_shared_memory,
    one_start_at_a_time,
    wait_for_folders,
)
from llmfoundry_lite.errors import DataError
from tests.helpers.launch import ROOT
from tests.helpers.numbered import numbers_of, open_data, write_shards

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")

REGISTER = """
import os, sys, time
from pathlib import Path
from llmfoundry_lite.data import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
registration = shared_memory.register_folders([sys.argv[2]], "launch")
registration.table_path.touch()
print(registration.path, flush=True)
worker = os.fork() if len(sys.argv) > 3 else 0
if worker:
    print(worker, flush=True)
time.sleep(600)
"""


@pytest.fixture
def blocks(monkeypatch) -> Iterator[Path]:
    """A folder in shared memory of our own: any run that starts on this machine cleans up the real one."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        monkeypatch.setattr(shared_memory, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.fixture
def register(blocks) -> Iterator[Callable[..., tuple[subprocess.Popen, Path]]]:
    """Start a process that reads a folder, and return it with the file that says so."""
    processes = []

    def start(folder: Path, *arguments: str) -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", REGISTER, str(blocks), str(folder), *arguments]
        processes.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert process.stdout
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in processes:
        kill(process)
        process.stdout.close()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def test_a_killed_run_is_cleaned_up_and_its_live_neighbour_is_not_touched(blocks, register, tmp_path):
    (killed, left), (neighbour, kept) = register(tmp_path / "a"), register(tmp_path / "b")
    (blocks / "somebody_elses").touch()
    kill(killed)
    assert clean_stale_shared_memory() == [left.name, left.with_suffix(".npy").name]
    assert set(blocks.iterdir()) == {kept, kept.with_suffix(".npy"), blocks / "somebody_elses"}
    kill(neighbour)
    clean_stale_shared_memory()
    assert set(blocks.iterdir()) == {blocks / "somebody_elses"}


def test_a_worker_that_outlives_its_rank_keeps_the_folder_to_itself(register, tmp_path):
    rank, path = register(tmp_path / "cache", "with a worker")
    worker = int(rank.stdout.readline())
    kill(rank)
    assert clean_stale_shared_memory() == [] and path.exists()
    with pytest.raises(DataError, match="is downloading into"):
        wait_for_folders([str(tmp_path / "cache")], timeout_seconds=0)
    os.kill(worker, 9)
    wait_for_folders([str(tmp_path / "cache")], timeout_seconds=60)


def test_a_data_set_leaves_nothing_and_shows_only_its_folders(blocks, tmp_path):
    dataset = open_data(write_shards(tmp_path / "mds"))
    assert [path.suffix for path in blocks.iterdir()] == [".json"], "the table of shards has no name any more"
    assert len(numbers_of(dataset, num_workers=2)) == 8
    del dataset
    gc.collect()
    assert not list(blocks.iterdir())


def test_a_folder_that_another_run_downloads_into_is_refused_naming_the_process(register, tmp_path):
    other, _ = register(tmp_path / "cache")
    wait_for_folders([str(tmp_path / "elsewhere")], timeout_seconds=0)
    wait_for_folders([str(tmp_path / "cache")], "launch", timeout_seconds=0)  # another node of the same launch
    with pytest.raises(DataError, match=rf"another run \(process {other.pid}\) is downloading into {tmp_path}/cache;"):
        wait_for_folders([str(tmp_path / "cache")], timeout_seconds=0)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match=rf"is downloading into {tmp_path}/link/cache/;"):
        wait_for_folders([f"{tmp_path}/link/cache/"], timeout_seconds=0)
    kill(other)
    wait_for_folders([str(tmp_path / "cache")], timeout_seconds=0)


def test_waiting_ends_as_soon_as_the_other_run_is_gone(register, tmp_path):
    other, _ = register(tmp_path / "cache")
    Timer(0.3, other.kill).start()
    wait_for_folders([str(tmp_path / "cache")], timeout_seconds=60)
    assert other.wait() < 0


def test_a_start_waits_for_another_s_and_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began = time.monotonic()
    with one_start_at_a_time(), one_start_at_a_time(timeout_seconds=0.2):
        assert time.monotonic() - began >= 0.2


# Other users of the machine -----------------------------------------------------------------------------------------

NOTE = {"launch": "another", "pid": 7, "folders": ["/"]}


@pytest.mark.parametrize("name", ["pipe", "link to a pipe", "link", "folder", "socket"])
@pytest.mark.timeout(60)
def test_a_start_neither_waits_for_what_lies_in_its_lock_s_place_nor_empties_it(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock, kept = tmp_path / f"llmfoundry_lite_start_{os.geteuid()}.lock", tmp_path / "kept"
    kept.write_text("kept")
    put(name, lock, kept)
    with one_start_at_a_time():
        assert f"{lock} cannot be this user's lock (" in caplog.text
    assert name != "link" or kept.read_text() == "kept"


def put(name: str, path: Path, file: Path) -> None:
    """Put something in a path that others might take for a file; a link leads to `file`."""
    if name == "folder":
        path.mkdir()
    elif name == "socket":
        folder = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path of a socket has at most 107 bytes
        os.close(folder)
    elif name == "pipe":
        os.mkfifo(path)
    else:
        if name == "link to a pipe":
            file.unlink()
            os.mkfifo(file)
        path.symlink_to(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_start_passes_by_the_file_of_another_user_in_its_lock_s_place(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = tmp_path / "llmfoundry_lite_start_0.lock"
    lock.write_text("theirs")
    os.chown(lock, 12345, 12345)
    with one_start_at_a_time():
        assert "belongs to user 12345" in caplog.text
    assert lock.read_text() == "theirs"


def test_the_lock_of_starts_is_this_user_s_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with one_start_at_a_time():
        [lock] = tmp_path.iterdir()
        assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", "[" * 10_000, '{"launch": "a", "folders": ["/"]}', json.dumps(NOTE | {"folders": [7]}), "\0"],
    ids=range(8),
)
def test_a_note_that_no_run_has_written_ends_no_launch(blocks, tmp_path, content):
    note = blocks / "llmfoundry-lite-malformed.json"
    note.write_text(content)
    with note.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # as a living run does
        wait_for_folders([str(tmp_path)], timeout_seconds=0)
    assert clean_stale_shared_memory() == [note.name]


@pytest.mark.parametrize("name", ["pipe", "link to a pipe", "link", "folder", "socket"])
@pytest.mark.timeout(60)
def test_what_is_no_note_in_shared_memory_is_passed_by(blocks, tmp_path, name):
    kept = tmp_path / "kept"
    kept.write_text(json.dumps(NOTE))
    put(name, blocks / "llmfoundry-lite-theirs.json", kept)
    wait_for_folders(["/"], timeout_seconds=0)
    assert clean_stale_shared_memory() == [] and kept.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_note_of_another_user_is_neither_believed_nor_removed(blocks):
    note = blocks / "llmfoundry-lite-theirs.json"
    note.write_text(json.dumps(NOTE))
    os.chown(note, 12345, 12345)
    with note.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        wait_for_folders(["/"], timeout_seconds=0)
    assert clean_stale_shared_memory() == [] and note.exists()


def test_files_in_shared_memory_are_this_user_s_alone_and_replace_nothing(blocks, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    register = dataset_module.register_folders

    def and_be_watched(*arguments):
        registration = register(*arguments)
        assert registration.path.stat().st_mode & 0o777 == 0o600
        registration.table_path.symlink_to(kept)  # somebody has read the name in the folder
        return registration

    monkeypatch.setattr(dataset_module, "register_folders", and_be_watched)
    with pytest.raises(DataError, match=r"\.npy is there already, and not this run's; try again"):
        open_data(write_shards(tmp_path / "mds"))
    assert kept.read_text() == "kept"


READ_FOR_EVER = """
import sys
from pathlib import Path
from llmfoundry_lite.data.loader import build_text_loader
from tests.helpers.numbered import open_data
loader = build_text_loader(open_data(Path(sys.argv[1]), remote=sys.argv[2]), num_workers=2)
while True:
    for batch in loader:
        print("ready", flush=True)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_started_after_a_kill_just_works(tmp_path):
    remote, cache = write_shards(tmp_path / "remote"), tmp_path / "cache"
    command = [sys.executable, "-c", READ_FOR_EVER, str(cache), str(remote)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    # Only the rank is killed: its workers, in the middle of things, have to notice.
    kill(process)
    dataset = open_data(cache, remote=str(remote))  # or a DataError, after 45 s of waiting for those workers
    assert len(numbers_of(dataset)) == 8
