"""Killed runs and live neighbours, with real processes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from llmfoundry_lite.data import folder_locks
from llmfoundry_lite.data.folder_locks import SHARED_MEMORY, check_not_held, hold_folder, lock_path
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.identity import describe_this_process
from tests.helpers.launch import ROOT
from tests.helpers.numbered import numbers_of, open_data, write_shards

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")

HOLD = """
import os, sys, time
from pathlib import Path
from llmfoundry_lite.data import folder_locks
folder_locks.SHARED_MEMORY = Path(sys.argv[1])
lock = folder_locks.hold_folder(sys.argv[2], "launch", exclusive=True)
worker = os.fork() if len(sys.argv) > 3 else 0
if worker or len(sys.argv) == 3:
    print(worker, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def locks(monkeypatch) -> Iterator[Path]:
    """A folder in shared memory of our own."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        monkeypatch.setattr(folder_locks, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.fixture
def cache(tmp_path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def other(locks, cache) -> Iterator[Callable[..., tuple[subprocess.Popen, int]]]:
    """Start a process of another launch that holds the folder; returns it with the id of its worker."""
    with ExitStack() as ended:

        def start(*arguments: str) -> tuple[subprocess.Popen, int]:
            command = [sys.executable, "-c", HOLD, str(locks), str(cache), *arguments]
            process = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            ended.callback(process.kill)
            assert process.stdout
            return process, int(process.stdout.readline())

        yield start


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def hold(folder: Path | str, launch_id: str = "ours", *, exclusive: bool = True, timeout_seconds: float = 0) -> None:
    """Hold a folder, and let go of it."""
    lock = hold_folder(str(folder), launch_id, exclusive=exclusive, timeout_seconds=timeout_seconds)
    assert lock is not None
    lock.close()


def test_a_worker_that_outlives_its_rank_keeps_the_folder_to_itself(other, cache):
    rank, worker = other("with a worker")
    kill(rank)
    with pytest.raises(DataError, match="is downloading into"):
        hold(cache)
    os.kill(worker, 9)
    hold(cache, timeout_seconds=60)


def test_a_data_set_lets_go_of_its_folders_and_leaves_no_table(locks, tmp_path):
    shards = write_shards(tmp_path / "mds")
    dataset = open_data(shards)
    assert list(locks.iterdir()) == [lock_path(str(shards))], "the table of shards has no name"
    assert len(numbers_of(dataset, num_workers=2)) == 8
    with pytest.raises(DataError, match="two data sets of this run download into"):
        hold(shards)
    dataset.itself = dataset  # a reference cycle, such as an error or a trainer leaves
    del dataset
    hold(shards, timeout_seconds=60)


def test_a_folder_that_another_run_downloads_into_is_refused_naming_the_process(other, cache, tmp_path):
    process, _ = other()
    hold(cache, "launch")  # another node of the same launch
    hold(cache, exclusive=False)  # only reads
    refused = rf"another run \(process {process.pid}\) is downloading into {tmp_path}"
    with pytest.raises(DataError, match=f"{refused}/cache;"):
        hold(cache)
    (tmp_path / "link").symlink_to(tmp_path)
    for refuse in (hold, check_not_held):
        with pytest.raises(DataError, match=f"{refused}/link/cache/;"):
            refuse(f"{tmp_path}/link/cache/")
    kill(process)
    check_not_held(str(cache))
    hold(cache)


def test_waiting_ends_as_soon_as_the_other_run_is_gone(other, cache):
    process, _ = other()
    Timer(0.3, process.kill).start()
    hold(cache, timeout_seconds=60)
    assert process.wait() < 0


def test_a_process_of_another_container_with_our_number_is_another(cache):
    ours = hold_folder(str(cache), "theirs", exclusive=True)
    theirs = describe_this_process() | {"namespace": "pid:[1]", "host": "theirs"}
    lock_path(str(cache)).write_text(json.dumps({"launch": "theirs", "process": theirs}))
    with pytest.raises(DataError, match=rf"another run \(process {os.getpid()} in another container, theirs\) is down"):
        hold(cache)
    assert ours
    ours.close()


# Other users of the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pipe", "link to a pipe", "link", "folder", "socket"])
@pytest.mark.timeout(60)
def test_a_start_neither_waits_for_what_lies_in_its_lock_s_place_nor_empties_it(cache, tmp_path, caplog, name):
    lock, kept = lock_path(str(cache)), tmp_path / "kept"
    kept.write_text("kept")
    put(name, lock, kept)
    assert hold_folder(str(cache), "ours", exclusive=True) is None
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
def test_a_start_passes_by_the_file_of_another_user_in_its_lock_s_place(cache, caplog):
    lock = lock_path(str(cache))
    lock.write_text("theirs")
    os.chown(lock, 12345, 12345)
    assert hold_folder(str(cache), "ours", exclusive=True) is None
    assert "belongs to user 12345" in caplog.text and lock.read_text() == "theirs"


def test_a_lock_is_this_user_s_alone(cache):
    hold(cache)
    assert lock_path(str(cache)).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 10_000, '{"launch": "a"}', "\0"], ids=range(7))
def test_a_note_that_no_run_has_written_ends_no_launch(cache, content):
    lock_path(str(cache)).write_text(content)
    hold(cache)


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
