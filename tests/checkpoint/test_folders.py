import errno
import fcntl
import os
import re
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from llmfoundry_lite import retry
from llmfoundry_lite.checkpoint import local_folder, remote_folder, shards
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder, RenewingFilesystem, part_bytes
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, TRANSFER_BYTES, write_shard
from llmfoundry_lite.checkpoint.staging import aligned_memory, as_bytes
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.cli import main as cli_main
from llmfoundry_lite.errors import CheckpointError, UserError, is_transient
from llmfoundry_lite.launch_train import launch
from tests.checkpoint.ranks import build, save_now
from tests.checkpoint.saves import names, save
from tests.helpers.bombs import MIB, little_memory


@pytest.fixture
def is_direct(tmp_path: Path) -> Callable[[int], bool]:
    """Return a function that tells whether a descriptor bypasses the page cache."""
    sink = LocalFolder(tmp_path).sink("probe", 0)
    has_direct = sink._direct_descriptor is not None
    sink.abandon()
    if not has_direct:
        pytest.skip("this file system has no other way than through the page cache")
    return lambda descriptor: bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def test_a_save_goes_past_the_page_cache_but_for_its_two_ends(tmp_path, monkeypatch, is_direct):
    monkeypatch.setattr(shards, "TRANSFER_BYTES", BLOCK_BYTES)
    ways = {}

    def write(descriptor, pieces, offset):
        ways[offset // BLOCK_BYTES] = is_direct(descriptor)
        return os.pwritev(descriptor, pieces, offset)

    monkeypatch.setattr(local_folder, "WRITE", write)
    model = torch.nn.Linear(1000, 1200)
    saver = Saver(CheckpointStore(tmp_path / "run"))
    saver.take_lease()
    saver.save(model, None, SaveMetadata(timestamp=Timestamp(batch=1)))
    saver.wait()
    assert ways == {0: False, 1: True, 2: True, 3: True, 4: False}
    other = torch.nn.Linear(1000, 1200)
    load(tmp_path / "run" / "ba1", other)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


@pytest.mark.fault
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EFAULT, errno.EIO], ids=errno.errorcode.get)
def test_what_cannot_be_written_past_the_page_cache_goes_through_it(tmp_path, monkeypatch, is_direct, error):
    refused = []

    def write(descriptor, pieces, offset):
        if is_direct(descriptor):
            refused.append(offset)
            raise OSError(error, os.strerror(error))
        return os.pwritev(descriptor, pieces, offset)

    monkeypatch.setattr(local_folder, "WRITE", write)
    content = as_bytes(aligned_memory(3 * TRANSFER_BYTES, pinned=False))
    content[:] = np.arange(content.size) % 251
    write_shard(LocalFolder(tmp_path), "file", b"", [content])
    assert sorted(refused) == [0, TRANSFER_BYTES, 2 * TRANSFER_BYTES]
    assert (tmp_path / "file").read_bytes().startswith(content.tobytes())


@pytest.mark.fault
def test_a_disk_that_takes_bytes_neither_way_is_heard_of_and_no_descriptor_stays_open(tmp_path, monkeypatch):
    def write(descriptor, pieces, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(local_folder, "WRITE", write)
    open_descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Input/output error"):
        write_shard(LocalFolder(tmp_path), "file", b"", [as_bytes(aligned_memory(TRANSFER_BYTES, pinned=False))])
    assert len(os.listdir("/proc/self/fd")) == open_descriptors


class ServerFiles(MemoryFileSystem):
    """A file system like sftp's and hdfs's: the host is not part of the path."""

    protocol = "server"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.split("://host")[-1].strip("/")


def test_an_url_stays_what_was_given_all_the_way_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("server", ServerFiles, clobber=True)
    url = f"server://host/{uuid.uuid4().hex}"
    store = CheckpointStore(url + "/")
    saved = save(store, store.acquire(), 1)
    assert saved.url == f"{url}/ba1"
    verify_checkpoint(CheckpointStore(saved.url.rsplit("/", 1)[0]).candidates()[0].checkpoint)  # type: ignore[arg-type]


@pytest.mark.fault
@pytest.mark.parametrize("num_bytes", [1, 156 << 30, 157 << 30, 1 << 40, 40 << 40])
def test_an_upload_has_no_more_parts_than_s3_takes_and_none_larger(num_bytes: int) -> None:
    size = part_bytes(num_bytes)
    assert -(-num_bytes // size) <= 10_000
    assert 16 << 20 <= size <= 5 << 30
    assert size == 16 << 20 or num_bytes > 156 << 30


class NoCredentials(Exception):
    """An error like botocore's: neither an OSError nor anything else that can be named here."""


def test_what_a_client_raises_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise NoCredentials("Unable to locate credentials\nand more")

    monkeypatch.setattr(retry, "PAUSES_SECONDS", ())
    for name in ("ls", "info", "open", "pipe_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    store = CheckpointStore("memory://bucket/run")
    for attempt in (store.candidates, store.acquire, lambda: store.remove("ba1", "e1-ba1-0")):
        with pytest.raises(CheckpointError, match=r"^memory://bucket/run.*: Unable to locate credentials$"):
            attempt()
    with pytest.raises(OSError, match=r"Unable to locate credentials$"):
        open_folder("memory://bucket/run").sink("shard", 1)


def test_home_may_be_written_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/runs").url == f"{tmp_path}/runs"


PATTERNS = {"sweep[1-3]": "sweep1", "run*": "run1", "run?": "run1", "**": "run1", "a\nb": "a", "{a,b}": "a"}
"""A folder's name -> another that it matches where it is taken for a pattern."""


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize(("name", "other"), PATTERNS.items(), ids=map(repr, PATTERNS))
def test_a_name_like_a_pattern_removes_its_own_files_and_no_others(tmp_path, kind, name, other):
    if kind == "memory" and "\n" in name:
        return  # refused: see below
    base = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4().hex}"
    store, beside = CheckpointStore(f"{base}/{name}"), CheckpointStore(f"{base}/{other}")
    for one in (store, beside):
        lease = one.acquire()
        for batch in (1, 2):
            save(one, lease, batch)
        one.root.child("ba1").put("extra", b"right in here, as in a folder copied from a local disk")
    prune(store, store.acquire(), keep_newest=1)
    assert names(store) == ["ba2"]
    assert "ba1" not in store.root.names()
    assert "extra" in beside.root.child("ba1").names()
    for candidate in (*store.candidates(), *beside.candidates()):
        verify_checkpoint(candidate.checkpoint)  # type: ignore[arg-type]
    beside.root.remove_all()
    assert not beside.root.exists()
    assert names(store) == ["ba2"]


@pytest.mark.fault
@pytest.mark.parametrize("name", ["run::y", "a\nb", "a\rb", "run?versionId=3", "memory://x::y", "/run", "a//run"])
def test_an_url_that_a_client_reads_as_another_folder_is_refused_in_a_line(name):
    with pytest.raises(CheckpointError, match=r"is not possible in the URL of a folder; give another name") as refused:
        open_folder(f"s3://bucket/{name}")
    assert "\n" not in str(refused.value)


class WholeFile(BaseHTTPRequestHandler):
    """A server that answers any range with the whole file, as many do."""

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(64 * MIB))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        with suppress(OSError):  # the reader has had enough
            for _ in range(64):
                self.wfile.write(bytes(MIB))

    def log_message(self, *arguments):
        pass


def test_an_answer_of_a_web_server_is_read_up_to_the_limit():
    with ThreadingHTTPServer(("127.0.0.1", 0), WholeFile) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        folder = open_folder(f"http://127.0.0.1:{server.server_port}")
        with little_memory(16):
            assert len(folder.read("manifest.json", MIB)) == MIB + 1
        server.shutdown()


@pytest.mark.fault
def test_a_link_is_removed_though_its_target_cannot_be_looked_up(tmp_path):
    """Such as one on a mount that has vanished. Here the target's name is too long for any file."""
    link = tmp_path / "link"
    link.symlink_to("x" * 300)
    LocalFolder(link).remove_all()
    assert not os.path.lexists(link)


class SlowAnswers:
    """A file system whose answers come when `answered` is set."""

    protocol = "slow"

    def __init__(self) -> None:
        self.answered = threading.Event()

    def invalidate_cache(self) -> None:
        pass

    def ls(self, path, detail):
        assert self.answered.wait(30)
        return []


def test_a_user_is_told_at_once_which_folder_does_not_answer_and_told_once(monkeypatch):
    slow, said = SlowAnswers(), []

    def note(line: str) -> None:
        said.append(line)
        slow.answered.set()

    monkeypatch.setattr(remote_folder, "WAIT_SECONDS", 0.01)
    folder = RemoteFolder(RenewingFilesystem(slow, "slow://b/run"), "b/run", "slow://b/run")
    slow.answered.set()
    folder.names()  # a library's caller has its own words
    slow.answered.clear()
    monkeypatch.setattr(remote_folder, "note_wait", note)
    assert folder.names() == []
    assert said == ["waiting for slow://b/run"]
    assert folder.names() == [] and len(said) == 1

    behind_training = threading.Thread(target=folder.names)
    folder.filesystem._has_noted = False
    behind_training.start()
    behind_training.join()
    assert len(said) == 1


class Silence:
    """A file system whose calls fail after a time in which no answer has come."""

    protocol = "silent"

    def __init__(self, clock: list[float]):
        self.clock = clock
        self.num_calls = 0

    def invalidate_cache(self) -> None:
        pass

    def ls(self, path, detail):
        self.num_calls += 1
        self.clock[0] += 90.0
        raise TimeoutError("Read timeout")


def test_a_command_gives_up_a_server_that_does_not_answer_and_a_launch_asks_on(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(remote_folder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * 3)
    silent = Silence(clock)
    url = "s3://b/run"
    folder = RemoteFolder(RenewingFilesystem(silent, url), "b/run", url)
    with pytest.raises(TimeoutError, match="Read timeout"):
        folder.names()
    assert silent.num_calls == 4

    monkeypatch.setattr(remote_folder, "patience_seconds", 120.0)
    silent.num_calls = 0
    folder = RemoteFolder(RenewingFilesystem(silent, url), "b/run", url)
    for _ in range(3):  # a command that asks again although it has got no answer
        with pytest.raises(OSError, match="no answer for 180 s") as caught:
            folder.names()
        assert is_transient(caught.value)
    assert silent.num_calls == 2
    clock[0] += 10.0  # the next look of `watch`
    with pytest.raises(OSError, match="no answer for 180 s"):
        folder.names()
    assert silent.num_calls == 4


def test_an_answer_begins_the_patience_anew(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(remote_folder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(remote_folder, "patience_seconds", 120.0)
    silent: Any = Silence(clock)
    silent.info = lambda path: {}
    filesystem = RenewingFilesystem(silent, "s3://b")
    for _ in range(5):
        with pytest.raises(TimeoutError, match="Read timeout"):
            filesystem.ls("b", detail=True)
        filesystem.info("b")


def test_a_user_of_a_command_is_told_again_that_it_still_waits(monkeypatch):
    """Its threads wait for the answer too, but only one of them tells."""
    slow, said = SlowAnswers(), []

    def note(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            slow.answered.set()

    monkeypatch.setattr(remote_folder, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(remote_folder, "WAIT_AGAIN_SECONDS", 0.3)
    monkeypatch.setattr(remote_folder, "note_wait", note)
    monkeypatch.setattr(remote_folder, "patience_seconds", 120.0)
    folder = RemoteFolder(RenewingFilesystem(slow, "slow://b/run"), "b/run", "slow://b/run")
    threads = [threading.Thread(target=folder.names) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == "waiting for slow://b/run"
    assert len(said) == 3 and all(re.fullmatch(r"still waiting for slow://b/run, for \d s", line) for line in said[1:])


@pytest.mark.parametrize("program", ["command", "launch"])
def test_programs_say_what_they_wait_for(monkeypatch, capfd, program):
    monkeypatch.setattr(remote_folder, "note_wait", None)
    monkeypatch.setattr(remote_folder, "patience_seconds", None if program == "command" else 1.0)
    with suppress(SystemExit, UserError):
        if program == "command":
            monkeypatch.setattr("sys.argv", ["llmfoundry-lite", "--version"])
            cli_main.main()
        else:
            launch(["no-such-file.yaml"])
    assert remote_folder.note_wait is not None
    remote_folder.note_wait("waiting for s3://b/run")
    assert "waiting for s3://b/run\n" in "".join(capfd.readouterr())
    is_command = program == "command"
    assert remote_folder.patience_seconds == (remote_folder.PATIENCE_SECONDS if is_command else None)


def test_the_draft_of_a_failed_save_is_removed_behind_the_training(monkeypatch):
    """A store that is down answers as late to this as to the save."""
    model, optimizer = build("plain")
    store, answers, removed = CheckpointStore(f"memory://{uuid.uuid4().hex}"), threading.Event(), []
    saver = Saver(store)
    saver.take_lease()

    def refuse(save_id: str) -> Any:
        raise CheckpointError(f"{save_id}: not written")

    def abandon(save_id: str) -> None:
        assert answers.wait(30)
        removed.append(save_id)

    monkeypatch.setattr(store, "abandon", abandon)
    with monkeypatch.context() as down:
        down.setattr(store, "open_draft", refuse)
        with pytest.raises(CheckpointError, match="not written"):
            save_now(saver, model, optimizer, 1)
    assert not removed
    answers.set()
    save_now(saver, model, optimizer, 2)
    assert len(removed) == 1 and names(store) == ["ba2"]
