"""Killed runs and live neighbours, with real processes and StreamingDataset's real blocks."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer

import pytest

from llmfoundry_lite.data import shared_memory
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.shared_memory import SHARED_MEMORY, clean_stale_shared_memory, wait_for_folders
from llmfoundry_lite.errors import DataError
from tests.helpers.numbered import numbers_of, open_data, write_shards

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")

# What StreamingDataset does, without the seconds it takes to import it: mapped blocks of one number, one with folders.
HOLD_BLOCKS = """
import mmap, sys, time
shared_memory, number, folder = sys.argv[1:]
folders = f"{folder}\\0{int(number)}".encode()
maps = []
for name in ("locals", "barrier", "shard_states"):
    with open(f"{shared_memory}/{number}_{name}", "w+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
maps[0][: 4 + len(folders)] = (4 + len(folders)).to_bytes(4, "little") + folders
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def blocks(monkeypatch, tmp_path_factory) -> Iterator[Path]:
    """A folder in shared memory of our own, and one of file locks: any run that starts on this machine cleans up the
    real ones. To a clean-up that looks for blocks here alone, the locks there of all runs that live would be stale."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        monkeypatch.setattr(shared_memory, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


@pytest.fixture
def hold_blocks(blocks) -> Iterator[Callable[[int, Path], subprocess.Popen]]:
    """Start a process that has the blocks of a number mapped."""
    processes = []

    def hold(number: int, folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD_BLOCKS, str(blocks), str(number), str(folder)]
        processes.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    yield hold
    for process in processes:
        kill(process)
        process.stdout.close()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def names(folder: Path, number: int) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{number}_*"))


def test_a_killed_run_is_cleaned_up_and_its_live_neighbour_is_not_touched(blocks, hold_blocks, tmp_path):
    killed, neighbour = hold_blocks(910001, tmp_path / "a"), hold_blocks(910002, tmp_path / "b")
    kill(killed)
    assert len(names(blocks, 910001)) == len(names(blocks, 910002)) == 3
    (blocks / "910001_shard_table").touch()

    removed = clean_stale_shared_memory()
    assert {"910001_barrier", "910001_locals", "910001_shard_states"} <= set(removed)
    assert not any(name.startswith("910002") for name in removed)
    assert names(blocks, 910001) == []
    assert names(blocks, 910002) == ["910002_barrier", "910002_locals", "910002_shard_states"]

    kill(neighbour)
    clean_stale_shared_memory()
    assert names(blocks, 910002) == []


def test_the_names_are_those_of_streaming():
    from streaming.base import constant

    for name in ("SHM_TO_CLEAN", "LOCALS", "BARRIER_FILELOCK", "CACHE_FILELOCK"):
        ours, theirs = getattr(shared_memory, name), getattr(constant, name)
        assert ours == (theirs if isinstance(theirs, str) else tuple(theirs))


def test_file_locks_go_with_the_run_that_made_them(hold_blocks, tmp_path):
    locks = Path(tempfile.gettempdir())
    hold_blocks(910003, tmp_path / "a")
    for name in ("910003_cache_filelock", "910004_cache_filelock", "910004_barrier_filelock", "notes_filelock"):
        (locks / name).touch()
    clean_stale_shared_memory()
    assert sorted(path.name for path in locks.iterdir()) == ["910003_cache_filelock", "notes_filelock"]


def test_clean_ups_of_these_tests_see_no_lock_of_a_run_that_lives(request, tmp_path):
    """Without a lock two processes would be in one place at once, and a barrier would lose count of them."""
    dataset = open_data(write_shards(tmp_path / "mds"))
    with dataset._lock_cache():
        lock = Path(dataset._cache_filelock_path)
        assert lock.exists()
        request.getfixturevalue("blocks")
        clean_stale_shared_memory()
        assert lock.exists()


def test_blocks_of_other_programs_are_left_alone(blocks):
    (blocks / "910005_somebody_elses").touch()
    (blocks / "psm_12345678").touch()
    clean_stale_shared_memory()
    assert len(list(blocks.iterdir())) == 2


def test_a_data_set_whose_blocks_were_removed_removes_none_of_another(tmp_path):
    """As by a clean-up that cannot see this process, from another PID namespace."""
    shards = write_shards(tmp_path / "mds")
    removed = open_data(shards)
    for path in blocks_of(removed):
        path.unlink()
    other = open_data(shards)
    theirs = blocks_of(other)
    removed.__del__()
    table = removed.table.path
    del removed
    gc.collect()
    assert not table.exists() and theirs and blocks_of(other) == theirs and len(numbers_of(other)) == 8


def blocks_of(dataset: TextDataset) -> set[Path]:
    """By their number, since other tests have blocks of theirs here."""
    number = dataset.table.path.name.split("_")[0]
    return set(SHARED_MEMORY.glob(f"{number}_*"))


@pytest.mark.parametrize(
    ("size_kb", "num_kept"),
    [(4_000_000, 3), (40_000, 0)],
    ids=["may be a run", "too small to have torch in memory: an init, a login agent"],
)
def test_a_process_that_cannot_be_looked_into_keeps_everything_if_it_could_hold_blocks(
    blocks, hold_blocks, tmp_path, monkeypatch, size_kb, num_kept
):
    kill(hold_blocks(910006, tmp_path))
    proc, uid = tmp_path / "proc", os.geteuid()
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "maps").touch()
    (proc / "4711").mkdir()
    status = f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nVmSize:\t{size_kb} kB\nRssShmem:\t12 kB\n"
    (proc / "4711" / "status").write_text(status)

    def refuse(process: Path):
        raise PermissionError(process)

    monkeypatch.setattr(shared_memory, "PROC", proc)
    monkeypatch.setattr(shared_memory, "_mapped_inodes", refuse)
    clean_stale_shared_memory()
    assert len(names(blocks, 910006)) == num_kept


def test_a_folder_that_another_run_downloads_into_is_refused_naming_the_process(hold_blocks, tmp_path):
    other = hold_blocks(910007, tmp_path / "cache")
    wait_for_folders([str(tmp_path / "elsewhere")], timeout_seconds=0)
    with pytest.raises(DataError, match=rf"another run \(process {other.pid}\) is downloading into {tmp_path}/cache;"):
        wait_for_folders([str(tmp_path / "cache")], timeout_seconds=0)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match=rf"is downloading into {tmp_path}/link/cache/;"):
        wait_for_folders([f"{tmp_path}/link/cache/"], timeout_seconds=0)
    kill(other)
    wait_for_folders([str(tmp_path / "cache")], timeout_seconds=0)


def test_waiting_ends_as_soon_as_the_other_run_is_gone(hold_blocks, tmp_path):
    other = hold_blocks(910008, tmp_path / "cache")
    Timer(0.3, other.kill).start()
    wait_for_folders([str(tmp_path / "cache")], timeout_seconds=60)
    assert other.wait() < 0


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
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    # Only the rank is killed: its workers, in the middle of things, have to notice.
    process.kill()
    process.wait()

    dataset = open_data(cache, remote=str(remote))  # or a DataError, after 45 s of waiting for those workers
    assert len(numbers_of(dataset)) == 8
