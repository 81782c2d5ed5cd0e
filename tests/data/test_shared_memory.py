"""Killed runs and live neighbours, with real processes."""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

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
