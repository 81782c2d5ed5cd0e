"""Preparations whose output is in a bucket, on a local S3 server: the bytes are those of a folder."""

import contextlib
import itertools
import random
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry_engines import bucket_join, scratch
from llmfoundry_engines import prepare_part as prepare_part_module
from llmfoundry_engines.join import join, join_shards
from llmfoundry_engines.part import Part
from llmfoundry_engines.prepare_bucket import prepare_in_bucket
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_engines.scratch import Scratch, parse_scratch
from llmfoundry_engines.tests.buckets import copy_of, use_server
from llmfoundry_lite import retry
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import CheckpointError, ConfigError, DataError
from llmfoundry_lite.prepare import prepare as prepare_module
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.shards import ShardFormat
from llmfoundry_lite.prepare.token_files import TokenFiles
from tests.checkpoint.mounts import mounted
from tests.checkpoint.s3_server import ANSWER_LOST, UNHEARD, RefusingProxy
from tests.helpers.data import make_documents
from tests.helpers.launch import ROOT
from tests.helpers.numbered import numbers_of, open_data
from tests.helpers.preparing import SEQ_LEN, assert_same_result, request, write_jsonl

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.multiprocess


def test_one_command_gives_the_bytes_of_a_folder_and_a_run_reads_them(
    wanted: PrepareRequest, expected: Path, out: str, tmp_path: Path
) -> None:
    prepare_in_bucket(wanted, out, num_workers=1)
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)
    options = {"max_seq_len": SEQ_LEN, "global_batch_size": 4}
    remote_rows = numbers_of(open_data(tmp_path / "cache", remote=f"{out}/train", **options))
    assert remote_rows == numbers_of(open_data(expected / "train", **options))


@pytest.mark.parametrize("count", [3, pytest.param(16, marks=pytest.mark.long)])
def test_parts_in_any_order_give_the_bytes_of_a_folder(
    wanted: PrepareRequest, expected: Path, out: str, tmp_path: Path, count: int
) -> None:
    numbers = list(range(1, count + 1))
    random.Random(count).shuffle(numbers)
    for number in numbers:
        prepare_part(wanted, out, Part(number, count), num_workers=1)
    join_shards(out, Part(2, 3))
    join(out)
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)


@pytest.mark.slow
def test_the_commands_of_the_page_work_as_they_stand_there(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those with a bucket, whose name is replaced. After the first, the others find that the work is done."""
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    write_jsonl(Path("corpus/a.jsonl"), make_documents(700))
    page = (ROOT / "docs/large-data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^llmfoundry-lite (data .*s3://bucket/big.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        arguments = shlex.split(command.replace("s3://bucket/big", out).replace("train:32768", "train:400"))
        assert main.run([*arguments, *(["--num-workers", "1"] if "prepare corpus" in command else [])]) == 0, command
    shown = capsys.readouterr().out
    assert f"prepared in {out}" in shown and f"{out} is complete: its parts are joined" in shown
    assert str(tmp_path) not in shown


# Kills and repeats


@pytest.mark.slow
def test_a_killed_part_and_a_killed_join_go_on_where_they_were(
    wanted: PrepareRequest, expected: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is in the bucket is tokenised or written again."""
    monkeypatch.setattr(bucket_join, "RECORD_SECONDS", 0.0)
    write, tokenised = TokenFiles.write, []
    write_shard, shards = ShardFormat.write, []

    def write_five_units(self, number, unit):
        stop_after(5, tokenised, number)
        return write(self, number, unit)

    def write_six_shards(self, folder, index, tokens):
        stop_after(6, shards, (folder.name, index))
        return write_shard(self, folder, index, tokens)

    monkeypatch.setattr(TokenFiles, "write", write_five_units)
    monkeypatch.setattr(ShardFormat, "write", write_six_shards)
    num_kills = 0
    while True:
        try:
            prepare_in_bucket(wanted, out, num_workers=1)
            break
        except KeyboardInterrupt:
            num_kills += 1
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)
    assert num_kills >= 3
    for written in (tokenised, shards):
        done = [entry for entry in written if entry is not None]
        assert len(done) <= len(set(done)) + 2 * num_kills, "uploads on their way are lost with a kill"


def stop_after(count: int, written: list, entry: object) -> None:
    """Add an entry, but stop as by Ctrl-C after each `count` entries."""
    if len(written) % (count + 1) == count:
        written.append(None)
        raise KeyboardInterrupt
    written.append(entry)


@pytest.mark.slow
def test_of_parts_that_begin_together_all_have_the_request_and_tokenizer_of_one(
    wanted: PrepareRequest, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = replace(wanted, tokenizer="train:400")
    prepare(trained, tmp_path / "expected", num_workers=1)
    train, num_trained = prepare_module.train_tokenizer, itertools.count(1)

    def train_while_another_part_finishes(texts: list[str], vocab_size: int):
        if next(num_trained) == 1:
            prepare_part(trained, out, Part(2, 2), num_workers=1)
            return train(texts[:50], vocab_size)  # it came too late, so this one must not be used
        return train(texts, vocab_size)

    monkeypatch.setattr(prepare_module, "train_tokenizer", train_while_another_part_finishes)
    prepare_part(trained, out, Part(1, 2), num_workers=1)
    with pytest.raises(DataError, match=rf"{out}/\.partial holds parts of another preparation: max_seq_len was 32 and"):
        prepare_part(replace(trained, max_seq_len=16), out, Part(2, 2), num_workers=1)
    join(out)
    assert_same_result(copy_of(out, tmp_path / "copy"), tmp_path / "expected")


@pytest.mark.slow
def test_a_second_join_beside_the_first_changes_no_byte(
    wanted: PrepareRequest, expected: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one publishes while the first has written its shards, and finds its token files gone."""
    prepare_part(wanted, out, Part(1, 1), num_workers=1)
    publish_split = bucket_join.publish_split

    def join_meanwhile(*arguments) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(bucket_join, "publish_split", publish_split)
            join(out)
        publish_split(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(DataError):
        patch.setattr(bucket_join, "publish_split", join_meanwhile)
        join(out)
    said: list[str] = []
    join(out, notify=said.append)
    assert said == [f"{out} is complete: its parts were joined before"]
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)


# Local disk


@pytest.mark.slow
def test_what_is_on_this_machine_stays_below_the_limit(
    out: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are slow, and token files and shards together are several times the limit."""
    source = write_jsonl(tmp_path / "in.jsonl", make_documents(8000, words=60))
    wanted = request(source, tokenizer_folder, size_limit_bytes=300_000)
    num_workers = 2
    limit = scratch.MARGIN_BYTES + num_workers * (prepare_part_module.UNIT_MARGIN_BYTES + 600_000)
    put, largest, lock = RemoteFolder.put, [0], threading.Lock()

    def put_slowly(self, name, data, **options):
        with lock:
            folders = tmp_path.glob("llmfoundry-prepare.*/out/.partial")
            files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".npz", ".mds")]
            largest[0] = max(largest[0], sum(size_of(path) for path in files))
            return put(self, name, data, **options)

    monkeypatch.setattr(RemoteFolder, "put", put_slowly)
    prepare_in_bucket(wanted, out, num_workers=num_workers, scratch=Scratch(folder=str(tmp_path), limit_bytes=limit))
    assert 0 < largest[0] <= limit - scratch.MARGIN_BYTES
    assert not list(tmp_path.glob("llmfoundry-prepare.*")), "nothing is left"
    prepare(wanted, tmp_path / "expected", num_workers=1)
    assert_same_result(copy_of(out, tmp_path / "copy"), tmp_path / "expected")
    assert sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*.mds")) > 2 * largest[0]


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_limit_that_is_too_small_is_refused_with_the_number_that_is_needed(wanted: PrepareRequest, out: str) -> None:
    with pytest.raises(DataError, match=r"--scratch-limit of 1,000 bytes: at least \dmb are needed for 2 processes"):
        prepare_part(wanted, out, Part(1, 1), num_workers=2, scratch=Scratch(limit_bytes=1000))
    prepare_part(wanted, out, Part(1, 1), num_workers=1)
    with pytest.raises(
        DataError, match=r"--scratch-limit of 1,000 bytes: at least \dmb are needed for a shard \(--siz"
    ):
        join(out, scratch=Scratch(limit_bytes=1000))
    with pytest.raises(ConfigError, match=r"--scratch and --scratch-limit are for an --out in a bucket"):
        prepare_part(wanted, "folder", Part(1, 1), scratch=Scratch(limit_bytes=1000))
    with pytest.raises(ConfigError, match="a URL given, expected a path of this machine"):
        prepare(wanted, out)
    with pytest.raises(ConfigError, match=r"--scratch-limit 5xb: expected a number of bytes above 0, such as 2gb or"):
        parse_scratch(None, "5xb")
    assert parse_scratch("/fast", "1.5gb") == Scratch(folder="/fast", limit_bytes=3 << 29)


@pytest.mark.slow
def test_a_full_scratch_disk_is_one_line_and_loses_nothing(
    wanted: PrepareRequest, expected: Path, out: str, tmp_path: Path
) -> None:
    """The disk has room for the records of a part, but not for its token files; then for these, but for no shard."""
    for size in ("48k", "100k"):
        with mounted(tmp_path / size, size) as disk, pytest.raises(DataError, match=r"no space left for scratch files"):
            prepare_in_bucket(wanted, out, num_workers=1, scratch=Scratch(folder=str(disk.path)))
    prepare_in_bucket(wanted, out, num_workers=1)
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)


def test_scratch_folders_of_killed_launches_are_removed_and_others_kept(tmp_path: Path) -> None:
    with scratch.scratch_folder(str(tmp_path)) as killed:
        pass
    killed.mkdir()
    (killed / "shard").write_bytes(b"x")
    with scratch.scratch_folder(str(tmp_path)) as first, scratch.scratch_folder(str(tmp_path)) as second:
        assert not killed.exists() and first.is_dir() and second.is_dir()


def test_a_new_scratch_folder_that_another_launch_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not locked yet, as that of a killed launch. The other launch removes it before, or after it is opened."""
    lock_folder, num_calls = scratch.lock_folder, itertools.count()

    def lock_too_late(folder: Path) -> int:
        call = next(num_calls)
        if call == 0:
            folder.rmdir()
        if call == 1:
            raise BlockingIOError
        lock = lock_folder(folder)
        if call == 2:
            folder.rmdir()
        return lock

    monkeypatch.setattr(scratch, "lock_folder", lock_too_late)
    with scratch.scratch_folder(str(tmp_path)) as folder:
        assert folder.is_dir() and next(num_calls) == 4


# Faults and refusals


def test_a_tokenizer_in_the_bucket_that_is_damaged_is_named(out: str) -> None:
    damaged = [b"", b"[]", b'{"a": 1}', b'{"": ""}', b'{"../a": ""}', b'{"a\\u0000b": ""}', b'{"a": "\\ud800"}']
    for content in damaged:
        s3fs.S3FileSystem().pipe_file(f"{out}/.partial/tokenizer.json", content)
        with pytest.raises(DataError, match=rf"{out}/\.partial/tokenizer\.json is damaged; remove {out}/\.partial and"):
            join(out)


@pytest.mark.slow
def test_faults_of_the_bucket_are_tried_again_and_one_that_stays_is_one_line(
    wanted: PrepareRequest, expected: Path, out: str, s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of the requests fails or loses its answer; then all fail in the middle of the work."""
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.01, 0.02, 0.05))
    generator, num_requests = random.Random(3), itertools.count()
    proxy = RefusingProxy(s3_port)
    try:
        use_server(monkeypatch, proxy.port)
        proxy.refuses = lambda *request: "AccessDenied" if next(num_requests) > 40 else None
        with pytest.raises(DataError, match=rf"^{out} cannot be read or written \(.*\); the same command resumes"):
            prepare_in_bucket(wanted, out, num_workers=1)
        kinds = ["SlowDown", "InternalError", UNHEARD, ANSWER_LOST]
        proxy.refuses = lambda *request: generator.choice(kinds) if generator.random() < 0.05 else None
        prepare_in_bucket(wanted, out, num_workers=1)
        assert proxy.num_refused > 5
    finally:
        proxy.close()
    use_server(monkeypatch, s3_port)
    assert_same_result(copy_of(out, tmp_path / "copy"), expected)


@pytest.mark.slow
def test_other_content_and_other_preparations_are_left_alone_unless_overwritten(
    wanted: PrepareRequest, corpus: Path, out: str, tmp_path: Path
) -> None:
    filesystem, root = s3fs.S3FileSystem(), out.removeprefix("s3://")
    filesystem.pipe_file(f"{root}/train/precious", b"mine")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=rf"{out} already contains train, not written by this command"):
            prepare_in_bucket(wanted, out, num_workers=1, overwrite=overwrite)
    filesystem.rm_file(f"{root}/train/precious")
    filesystem.pipe_file(f"{root}/.partial/precious", b"mine")
    with pytest.raises(DataError, match=rf"{out}/\.partial is not of this command: it has no request\.json"):
        prepare_in_bucket(wanted, out, num_workers=1, overwrite=True)
    filesystem.rm_file(f"{root}/.partial/precious")
    filesystem.pipe_file(f"{root}/notes.txt", b"mine")

    prepare_in_bucket(wanted, out, num_workers=1)
    with pytest.raises(DataError, match=r"nowhere: no such file or folder"):
        prepare_in_bucket(replace(wanted, sources=("nowhere",)), out, num_workers=1, overwrite=True)
    other = replace(wanted, max_seq_len=16)
    with pytest.raises(DataError, match=r"holds another preparation: max_seq_len was 32 and is 16 now; choose another"):
        prepare_in_bucket(other, out, num_workers=1)
    prepare_in_bucket(other, out, num_workers=1, overwrite=True)
    assert filesystem.cat_file(f"{root}/notes.txt") == b"mine"
    filesystem.rm_file(f"{root}/notes.txt")
    prepare(other, tmp_path / "expected", num_workers=1)
    assert_same_result(copy_of(out, tmp_path / "copy"), tmp_path / "expected")
    with pytest.raises(DataError, match=rf"--out {out} lies in the source {out}, which is read again by every launch"):
        prepare_in_bucket(replace(wanted, sources=(out,)), out, num_workers=1)


def test_secrets_of_a_url_are_in_no_file_and_no_message(
    wanted: PrepareRequest, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = out.replace("s3://", "s3://user:password@")
    said: list[str] = []
    with contextlib.suppress(DataError, CheckpointError):
        prepare_in_bucket(wanted, url, num_workers=1, notify=said.append)
    assert "password" not in " ".join(said)
    for path in copy_of(out, tmp_path / "copy").rglob("*.json"):
        assert "password" not in path.read_text()
