import contextlib
import errno
import fcntl
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from llmfoundry_lite.cli import main
from llmfoundry_lite.data.spelling import LostText
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import best_fit, documents, out_folder, samples, sources
from llmfoundry_lite.prepare import prepare as prepare_module
from llmfoundry_lite.prepare.contents import read_lines
from llmfoundry_lite.prepare.documents import STDLIB_HASH_SEED, Unit, read_line_range, split_key
from llmfoundry_lite.prepare.out_folder import check_outside_sources
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.request import COMPRESSION_LEVELS, PrepareRequest
from llmfoundry_lite.prepare.samples import plan_splits, write_shards
from llmfoundry_lite.prepare.shards import ShardFormat, write_index
from llmfoundry_lite.prepare.splits import choose_threshold, initial_threshold, raise_threshold
from llmfoundry_lite.prepare.summary import load_summary
from llmfoundry_lite.prepare.token_files import TokenFiles, token_dtype
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import (
    TokenUnit,
    UnitNumber,
    UnitTable,
    count_splits,
    format_text_digest,
    load_documents,
    load_unit,
)
from tests.helpers.data import folder_bytes, make_documents, read_samples
from tests.helpers.preparing import (
    SEQ_LEN,
    assert_holds,
    assert_same_result,
    joined_tokens,
    plain,
    request,
    texts_of,
    write_jsonl,
)

# What is read, and that all of it arrives


def zipped(path: Path, content: bytes) -> Path:
    return plain(path.with_name(path.name + ".gz"), gzip.compress(content))


def zstd(path: Path, content: bytes) -> Path:
    half = len(content) // 2  # two frames, as `cat a.zst b.zst` and parallel compressors make them
    frames = [zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:])]
    return plain(path.with_name(path.name + ".zst"), b"".join(frames))


@pytest.mark.parametrize(
    ("suffix", "store"),
    [*itertools.product(("txt", "md", "jsonl", "json", "ndjson"), (plain, zipped, zstd))],
)
def test_every_format_gives_the_same_documents(
    suffix: str, store, tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    documents = make_documents(12)
    folder = tmp_path / "in"
    folder.mkdir()
    if suffix in ("txt", "md"):
        for index, document in enumerate(documents):
            store(folder / f"{index:02}.{suffix}", document.encode())
    else:
        write_jsonl(tmp_path / "lines", documents)
        store(folder / f"lines.{suffix}", (tmp_path / "lines").read_bytes())
    summary = prepare(request(folder, tokenizer_folder, val_fraction=0), tmp_path / "out", num_workers=1)
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents)


def test_folders_globs_and_several_paths_keep_their_order(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    documents = make_documents(30)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write_jsonl(tmp_path / "b.jsonl", documents[:10])
    write_jsonl(tmp_path / "deep" / "a.jsonl", documents[10:20])
    (tmp_path / "deep" / "er" / "a.txt").write_text(documents[20])
    (tmp_path / "deep" / "er" / "picture.png").write_bytes(b"\x89PNG")
    write_jsonl(tmp_path / "deep" / ".hidden.jsonl", documents)
    write_jsonl(tmp_path / "z1.jsonl", documents[21:25])
    write_jsonl(tmp_path / "z2.jsonl", documents[25:])
    given = (tmp_path / "b.jsonl", tmp_path / "deep", tmp_path / "z*.jsonl", tmp_path / "b.jsonl")
    whole = request("", tokenizer_folder, sources=tuple(map(str, given)), val_fraction=0)
    summary = prepare(whole, tmp_path / "out", num_workers=1)
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents)
    assert summary.ignored_files == 1


def test_documents_go_to_the_splits_by_their_text_and_none_is_lost(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 2000)
    documents = make_documents(300) + make_documents(20)  # some of them twice
    source = write_jsonl(tmp_path / "in.jsonl", documents)
    summary = prepare(request(source, tokenizer_folder, val_fraction=0.2), tmp_path / "out", num_workers=1)
    held_out = [split_key(document.encode()) < 0.2 * 2**64 for document in documents]
    assert 0.1 < np.mean(held_out) < 0.3
    train = [document for document, is_val in zip(documents, held_out, strict=True) if not is_val]
    val = [document for document, is_val in zip(documents, held_out, strict=True) if is_val]
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, train)
    assert_holds(tmp_path / "out" / "val", summary, tokenizer, val)


@pytest.mark.parametrize("unit_bytes", [1, 7, 50, 10_000])
def test_every_line_belongs_to_exactly_one_byte_range(unit_bytes: int, tmp_path: Path, monkeypatch) -> None:
    lines = [b"\n", b"ab\n", b"\n", b"c" * 60 + b"\n", b"defg\n", b"end without newline"]
    path = plain(tmp_path / "lines.jsonl", b"".join(lines))
    found = [item for part in ranges(path, path.stat().st_size, unit_bytes) for item in read_line_range(part)]
    assert [line for _, line in found] == lines
    assert [offset for offset, _ in found] == np.cumsum([0, *map(len, lines[:-1])]).tolist()


def ranges(path: Path, size: int, unit_bytes: int) -> list[Unit]:
    return [
        Unit(kind="lines", names=(str(path),), start=start, end=min(size, start + unit_bytes), num_bytes=0)
        for start in range(0, size, unit_bytes)
    ]


def test_a_long_line_is_read_once_not_once_for_each_range_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(io.BytesIO):
        num_bytes = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            Counting.num_bytes += len(line)
            return line

    content = b"c" * 10_000 + b"\nend"
    monkeypatch.setattr(documents, "open_input_file", lambda *arguments: Counting(content))
    parts = ranges(Path("lines.jsonl"), 10_000, 10)
    assert [offset for part in parts for offset, _ in read_line_range(part)] == [0]
    assert Counting.num_bytes < 3 * 10_000


@pytest.mark.parametrize("unit_bytes", [1, 50, 10_000])
def test_units_of_a_compressed_file_end_where_lines_end(unit_bytes: int, tmp_path: Path) -> None:
    content = "".join(make_documents(20)).encode() + b"end without newline"
    path = zipped(tmp_path / "lines.jsonl", content)
    units = list(sources.stream_units("lines", "a", read_lines(path, None), unit_bytes, path.stat().st_size))
    lines = [line for unit in units for line in unit.content or ()]
    assert lines == content.splitlines(keepends=True)
    assert [unit.first_number for unit in units] == [lines.index((unit.content or [b""])[0]) + 1 for unit in units]
    assert sum(unit.num_bytes for unit in units) == path.stat().st_size


def test_a_byte_order_mark_and_windows_line_ends_are_no_text_and_text(tmp_path: Path) -> None:
    assert texts_of(plain(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo")) == ["one\r\ntwo"]


# The standard library


def test_the_standard_library_holds_out_whole_modules() -> None:
    source = sources.open_source(request("python-stdlib", ""))
    threshold = source.val_fraction * 2**64
    bytes_of_split = {True: 0, False: 0}
    for unit in source.units():
        for name, module in zip(unit.names, unit.modules, strict=True):
            assert f"/{module}" in name and module != "encodings"  # tables of characters: nothing to learn from
            is_held_out = split_key(module.encode(), STDLIB_HASH_SEED) < threshold
            bytes_of_split[is_held_out] += Path(name).stat().st_size
    assert 0.03 < bytes_of_split[True] / sum(bytes_of_split.values()) < 0.08


def test_the_standard_library_reads_the_same_wherever_python_is_installed(tmp_path: Path, monkeypatch) -> None:
    first = tmp_path / "usr" / "lib"
    for name in ("json/__init__.py", "json/decoder.py", "abc.py", "test/bad.py", "site-packages/torch.py"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(f"# {name}\n")
    (first / "latin.py").write_bytes(b"# caf\xe9\n")
    found = []
    for folder in (first, shutil.copytree(first, tmp_path / "site-packages" / "test" / "lib")):
        monkeypatch.setattr("sysconfig.get_path", lambda name, folder=folder: str(folder))
        source = sources.open_standard_library()
        found.append((texts_of("python-stdlib"), [unit.modules for unit in source.units()], source.describe_state()))
    assert found[0] == found[1]
    assert found[0][0] == ["# abc.py\n", "# json/__init__.py\n", "# json/decoder.py\n"]


# Workers, kills and resuming


@pytest.fixture(scope="session")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a dozen units of text."""
    return write_jsonl(tmp_path_factory.mktemp("large") / "in.jsonl", make_documents(9000, words=60))


@pytest.fixture(scope="session")
def uninterrupted(large_file: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of one process that nothing interrupts."""
    out = tmp_path_factory.mktemp("uninterrupted")
    prepare(request(large_file, tokenizer_folder, size_limit_bytes=500_000), out, num_workers=1)
    return out


@pytest.mark.multiprocess
def test_two_workers_write_the_same_bytes_as_one(
    large_file: Path, uninterrupted: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    assert load_summary(uninterrupted).splits["train"].shards > 1
    prepare(request(large_file, tokenizer_folder, size_limit_bytes=500_000), tmp_path / "out", num_workers=2)
    assert_same_result(tmp_path / "out", uninterrupted)


PREPARE_THREE_UNITS = """
import signal, sys
from rich.progress import Progress
from llmfoundry_lite.cli.main import main

advance, num_done = Progress.advance, 0

def advance_to_three(*arguments):
    global num_done
    advance(*arguments)
    num_done += 1
    while num_done == 3:
        signal.pause()

Progress.advance = advance_to_three
main()
"""


@pytest.mark.slow  # a script of its own, and a worker that imports it
def test_a_script_without_a_guard_is_told_so_in_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    text, script = tmp_path / "text.txt", tmp_path / "script.py"
    text.write_text("a line of text\n" * 1000)
    script.write_text(
        "from llmfoundry_lite.cli.main import run\n"
        f"raise SystemExit(run(['data', 'prepare', '--source', {str(text)!r}, '--out', {str(tmp_path / 'out')!r}, "
        f"'--tokenizer', {str(tokenizer_folder)!r}, '--max-seq-len', '32', '--num-workers', '2']))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f'{script}: its worker processes run it again; put what it does under `if __name__ == "__main__":`' in (
        done.stderr
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_preparation_carries_on_and_nothing_is_done_twice_or_lost(
    large_file: Path, uninterrupted: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--source", large_file, "--out", out, "--tokenizer", tokenizer_folder, "--max-seq-len", SEQ_LEN]
    command = [sys.executable, "-c", PREPARE_THREE_UNITS, "data", "prepare", *options, "--size-limit", 500_000]
    process = subprocess.Popen([*map(str, command), "--num-workers", "2"], stderr=subprocess.DEVNULL)
    units = out / ".partial" / "units"
    wait_until(lambda: len(list(units.glob("*.npz"))) >= 3 or process.poll() is not None)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the preparation ended before it could be killed"
    assert workers
    wait_until(lambda: not any(is_running(worker) for worker in workers))  # or they would hold on to memory for good

    assert not (out / "summary.json").exists()
    assert not list(out.rglob("index.json"))
    before = {path.name: path.stat().st_mtime_ns for path in units.glob("*.npz")}
    total = len(list(sources.open_source(request(large_file, "")).units()))
    assert 3 <= len(before) < total
    again = PrepareRequest(
        sources=(str(large_file),), tokenizer=str(tokenizer_folder), max_seq_len=SEQ_LEN, size_limit_bytes=500_000
    )
    said: list[str] = []
    kept: dict[str, int] = {}
    publish = prepare_module.publish

    def remember_then_publish(partial: Path, *rest) -> None:
        kept.update({path.name: path.stat().st_mtime_ns for path in (partial / "units").glob("*.npz")})
        publish(partial, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "publish", remember_then_publish)
        prepare(again, out, num_workers=2, notify=said.append)
    assert said == [f"carrying on in {out / '.partial'}: {len(before)} pieces of the input are tokenised already"]
    assert len(kept) == total
    assert {name: kept[name] for name in before} == before
    assert_same_result(out, uninterrupted)


def wait_until(condition, timeout_seconds: float = 60) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.002)


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in children for child in file.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("step", ["pack", "publish", "rename", "summary"])
def test_an_end_at_any_late_moment_is_made_good(
    step: str, large_file: Path, uninterrupted: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    small = request(write_jsonl(tmp_path / "in.jsonl", make_documents(200)), tokenizer_folder, val_fraction=0.1)
    prepare(small, tmp_path / "expected", num_workers=1)

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    rename, write = Path.rename, out_folder.write_atomically
    place, name, stopping = {
        "pack": (samples, "write_index", stop),
        "publish": (prepare_module, "publish", stop),
        "rename": (Path, "rename", lambda path, to: stop() if to == out / "val" else rename(path, to)),
        "summary": (
            out_folder,
            "write_atomically",
            lambda path, content: stop() if path.name == "summary.json" else write(path, content),
        ),
    }[step]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(small, out, num_workers=1)
    assert not (out / "summary.json").exists()
    prepare(small, out, num_workers=1)
    assert_same_result(out, tmp_path / "expected")


# The output folder


@pytest.fixture
def small_request(tmp_path: Path, tokenizer_folder: Path) -> PrepareRequest:
    return request(write_jsonl(tmp_path / "in.jsonl", make_documents(60)), tokenizer_folder)


def test_the_same_request_again_is_no_work(small_request: PrepareRequest, tmp_path: Path) -> None:
    first = prepare(small_request, tmp_path / "out", num_workers=1)
    before = folder_bytes(tmp_path / "out")
    said: list[str] = []
    assert prepare(small_request, tmp_path / "out", num_workers=2, notify=said.append) == first
    assert said == [f"{tmp_path / 'out'} is complete: the same preparation finished there before"]
    assert folder_bytes(tmp_path / "out") == before


def test_another_request_is_refused_by_naming_the_difference(small_request: PrepareRequest, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(small_request, out, num_workers=1)
    with pytest.raises(DataError, match=r"max_seq_len was 32 and is 64 now; choose another --out, or pass --overwrite"):
        prepare(replace(small_request, max_seq_len=64), out)
    write_jsonl(tmp_path / "in.jsonl", make_documents(61))
    with pytest.raises(DataError, match=r"the input has changed \(files 1, bytes \d+, digest \w+ then, files 1,"):
        prepare(small_request, out)
    assert prepare(small_request, out, num_workers=1, overwrite=True).splits != load_summary(out).request
    assert load_summary(out).splits["train"].documents + load_summary(out).splits["val"].documents == 61


def stop_before_packing(wanted: PrepareRequest, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(prepare_module, "pack_samples", lambda *args: 1 / 0)
        prepare(wanted, out, num_workers=1)


def test_unfinished_work_in_units_of_another_size_loses_nothing(small_request: PrepareRequest, tmp_path: Path) -> None:
    prepare(small_request, tmp_path / "expected", num_workers=1)
    for unit_bytes in (4000, 2500, 8000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sources, "MIN_UNIT_BYTES", unit_bytes)
            stop_before_packing(small_request, tmp_path / "out")
    prepare(small_request, tmp_path / "out", num_workers=1)
    assert_same_result(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_overwrite_that_ended_while_it_removed_does_not_block_the_next(
    small_request: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    out, remove = tmp_path / "out", shutil.rmtree
    prepare(small_request, out, num_workers=1)

    def stop(path: Path, **options: bool) -> None:
        if path == out / "val":
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", stop)
        prepare(small_request, out, num_workers=1, overwrite=True)
    assert (out / "val").exists() and not (out / "train").exists() and not (out / "summary.json").exists()
    assert prepare(small_request, out, num_workers=1, overwrite=overwrite) == load_summary(out)
    assert not (out / ".partial").exists()


def test_a_torn_request_of_unfinished_work_is_named(small_request: PrepareRequest, tmp_path: Path) -> None:
    (tmp_path / "out/.partial").mkdir(parents=True)
    (tmp_path / "out/.partial/request.json").write_text("{")
    with pytest.raises(DataError, match=r"request.json cannot be read, .* --overwrite to discard it"):
        prepare(small_request, tmp_path / "out", num_workers=1)
    assert prepare(small_request, tmp_path / "out", num_workers=1, overwrite=True)


def test_unfinished_work_for_another_request_or_of_another_release_is_refused(
    small_request: PrepareRequest, tmp_path: Path, monkeypatch
) -> None:
    stop_before_packing(small_request, tmp_path / "out")
    with pytest.raises(DataError, match=r"unfinished preparation of something else: text_key was 'text' and is 'body'"):
        prepare(replace(small_request, text_key="body"), tmp_path / "out")
    monkeypatch.setattr(out_folder, "PARTIAL_VERSION", out_folder.PARTIAL_VERSION + 1)
    with pytest.raises(DataError, match=r"it was begun by another release, which keeps unfinished work in another way"):
        prepare(small_request, tmp_path / "out", num_workers=1)


@pytest.mark.parametrize("damage", ["cut short", "empty", "of another unit"])
def test_a_damaged_token_file_is_made_again(
    damage: str, small_request: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 2000)
    prepare(small_request, tmp_path / "expected", num_workers=1)
    stop_before_packing(small_request, tmp_path / "out")
    first, second = sorted((tmp_path / "out" / ".partial" / "units").iterdir())[:2]
    content = first.read_bytes()
    second.write_bytes({"cut short": content[: len(content) // 2], "empty": b"", "of another unit": content}[damage])
    prepare(small_request, tmp_path / "out", num_workers=1)
    assert_same_result(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize(
    ("fingerprint", "eos_token_id", "name", "is_same"),
    [("sha256:1", 0, "a", True), ("sha256:2", 0, "a", False), ("sha256:1", 5, "a", False), ("sha256:1", 0, "b", False)],
)
def test_a_token_file_counts_for_its_unit_and_tokenizer_alone(
    small_request: PrepareRequest, tmp_path: Path, fingerprint: str, eos_token_id: int, name: str, is_same: bool
) -> None:
    """A tokenizer that ends documents with another token is another one."""

    def files(fingerprint: str, eos_token_id: int) -> TokenFiles:
        tokenizer: Any = SimpleNamespace(fingerprint=fingerprint, eos_token_id=eos_token_id)
        return TokenFiles(small_request, tmp_path, tokenizer, is_fast=False)

    number = UnitNumber(0, 0)
    made = files("sha256:1", 0)
    made.folder.mkdir()
    np.savez(made.path(number), made_of=made.identity(Unit(kind="lines", names=("a",), num_bytes=9)))
    asked = Unit(kind="lines", names=(name,), num_bytes=9)
    assert files(fingerprint, eos_token_id).is_current(number, asked) == is_same


def test_a_tokenizer_that_changes_between_two_launches_is_noticed(
    small_request: PrepareRequest, tokenizer_folder: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(tokenizer_folder, tmp_path / "own")
    wanted, config = replace(small_request, tokenizer=str(own)), own / "special_tokens_map.json"
    prepare(wanted, tmp_path / "expected", num_workers=1)
    stop_before_packing(wanted, tmp_path / "out")
    train_tokenizer(make_documents(9), 300).save(tmp_path / "out" / ".partial" / "tokenizer")  # somebody's mistake
    prepare(wanted, tmp_path / "out", num_workers=1)
    assert_same_result(tmp_path / "out", tmp_path / "expected")

    stop_before_packing(wanted, tmp_path / "out2")
    config.write_text(config.read_text().replace("<|endoftext|>", "a"))
    for out in ("out", "out2"):
        with pytest.raises(
            DataError, match=r"preparation.*: eos_token was '<\|endoftext\|>' and is 'a' now; choose an"
        ):
            prepare(wanted, tmp_path / out, num_workers=1)
    train_tokenizer(make_documents(9), 300).save(own)
    with pytest.raises(DataError, match=r"tokenizer_fingerprint was 'sha256:\w+' and is 'sha256:\w+' now"):
        prepare(wanted, tmp_path / "out2", num_workers=1)


def test_a_mistake_in_the_first_piece_does_not_spoil_the_folder(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    documents = make_documents(30)
    path = write_jsonl(tmp_path / "in.jsonl", documents, key="body")
    wrong = request(path, tokenizer_folder, val_fraction=0)
    with pytest.raises(DataError, match="choose one with --text-key"):
        prepare(wrong, tmp_path / "out", num_workers=1)
    said: list[str] = []
    summary = prepare(replace(wrong, text_key="body"), tmp_path / "out", num_workers=1, notify=said.append)
    assert said[0].startswith(f"beginning anew in {tmp_path / 'out' / '.partial'}: text_key was 'text' and is 'body' n")
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents)


def test_on_error_skip_carries_on_where_stop_stopped(
    small_request: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 2000)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match="--on-error skip"):
        prepare(small_request, tmp_path / "out", num_workers=1)
    units = tmp_path / "out" / ".partial" / "units"
    kept = len(list(units.iterdir()))
    assert kept > 1
    said: list[str] = []
    skipping = replace(small_request, on_error="skip")
    summary = prepare(skipping, tmp_path / "out", num_workers=1, notify=said.append)
    assert said == [f"carrying on in {units.parent}: {kept} pieces of the input are tokenised already"]
    assert summary.skipped["invalid_json"] == 1 and summary.request["on_error"] == "skip"
    prepare(skipping, tmp_path / "expected", num_workers=1)
    assert_same_result(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize(
    ("place", "summary", "message"),
    [
        ("train", "", "already contains train, not written by this command; choose another --out"),
        ("train", '{"accuracy": 0.9}', "is not a summary that this version of `data prepare` wrote"),
        (".partial", "", r"\.partial is not of this command: it has no request\.json; choose another --out"),
    ],
)
def test_folders_that_are_not_ours_are_left_alone(
    place: str, summary: str, message: str, small_request: PrepareRequest, tmp_path: Path
) -> None:
    precious = plain(tmp_path / "out" / place / "precious", b"mine")
    if summary:
        plain(tmp_path / "out" / "summary.json", summary.encode())
    for overwrite in (False, True):
        with pytest.raises(DataError, match=message):
            prepare(small_request, tmp_path / "out", overwrite=overwrite)
    assert precious.read_text() == "mine"
    assert not summary or (tmp_path / "out" / "summary.json").read_text() == summary


def test_what_appears_in_the_folder_meanwhile_is_left_alone(
    small_request: PrepareRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, publish = tmp_path / "out" / "train" / "precious", out_folder.publish

    def publish_late(*arguments) -> None:
        precious.parent.mkdir()
        precious.write_text("mine")
        publish(*arguments)

    monkeypatch.setattr(prepare_module, "publish", publish_late)
    with pytest.raises(DataError, match="already contains train, not written by this command"):
        prepare(small_request, tmp_path / "out", num_workers=1)
    with pytest.raises(DataError, match="already contains train, not written by this command"):
        prepare(small_request, tmp_path / "out", num_workers=1, overwrite=True)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    ("out", "reason"), [("/proc/x/y", "No such file"), ("file/out", "Not a directory"), ("file", "File exists")]
)
def test_a_folder_that_cannot_be_made_is_named(
    out: str, reason: str, small_request: PrepareRequest, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=rf"--out {tmp_path / out} is not a folder and cannot become one: {reason}.*; cho"
    ):
        prepare(small_request, tmp_path / out)


def test_two_preparations_do_not_share_a_folder(small_request: PrepareRequest, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another preparation is running in"):
        prepare(small_request, tmp_path / "out")
    os.close(descriptor)


def test_a_disk_that_is_full_at_last_is_one_sentence_too(tokenizer_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """When nothing but the tokenizer is left to copy."""

    def fail(*names: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    wanted = request(write_jsonl(tmp_path / "in.jsonl", make_documents(60)), tokenizer_folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(DataError, match=r"no space left for .*same command again to carry on, or remove"):
            prepare(wanted, tmp_path / "out", num_workers=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    prepare(wanted, tmp_path / "out", num_workers=1)


@pytest.mark.multiprocess
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_sentence_and_leaves_nothing_that_looks_whole(
    large_file: Path, uninterrupted: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    wanted = request(large_file, tokenizer_folder, size_limit_bytes=500_000)
    out = tmp_path / "out"
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", out], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        for size, num_workers in (("1m", 2), ("5m", 1)):  # full while tokenising, full while writing shards
            subprocess.run(["mount", "-o", f"remount,size={size}", out], check=True)
            with pytest.raises(DataError, match=r"no space left for .*same command again to carry on, or remove"):
                prepare(wanted, out, num_workers=num_workers)
            assert sorted(path.name for path in out.iterdir()) == [".partial"]
            assert not list(out.rglob("*.mds")) and not list(out.rglob("*.unfinished"))
        subprocess.run(["mount", "-o", "remount,size=50m", out], check=True)
        prepare(wanted, out, num_workers=1)
        assert_same_result(out, uninterrupted)
    finally:
        subprocess.run(["umount", out], check=True)


# The validation split, the type of the tokens, a tokenizer of one's own


def test_one_validation_sample_is_held_out_if_the_data_allow(
    small_request: PrepareRequest, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents = make_documents(60)
    summary = prepare(replace(small_request, val_fraction=1e-9), tmp_path / "out", num_workers=1)
    val = summary.splits["val"]
    by_key = sorted(documents, key=lambda document: split_key(document.encode()))
    assert val.samples >= 1
    assert_holds(tmp_path / "out" / "val", summary, tokenizer, [d for d in documents if d in by_key[: val.documents]])
    assert len(joined_tokens(tokenizer, by_key[: val.documents - 1])) < SEQ_LEN


def test_held_out_documents_are_there_as_text_up_to_a_size(
    small_request: PrepareRequest, tmp_path: Path, monkeypatch
) -> None:
    half = replace(small_request, val_fraction=0.5)
    prepare(half, tmp_path / "out", num_workers=1)
    texts = [json.loads(line)["text"] for line in (tmp_path / "out/val/text.jsonl").read_text().splitlines()]
    assert texts == [text for text in make_documents(60) if split_key(text.encode()) < 2**63]
    monkeypatch.setattr(samples, "MAX_TEXT_BYTES", len(texts[0].encode()) + 11)
    prepare(half, tmp_path / "short", num_workers=1)
    cut = [json.loads(line)["text"] for line in (tmp_path / "short/val/text.jsonl").read_text().splitlines()]
    assert cut == [texts[0], texts[1].encode()[:10].decode(errors="ignore")]


@pytest.mark.parametrize(
    ("threshold", "at_least", "raised"),
    [
        (1, 10, 6),  # the document with key 5, and no other
        (5, 0, 5),  # enough already; key 5 is not held out
        (5, 10, 6),
        (6, 10, 6),
        (6, 11, 10),  # both documents with key 9
        (6, 30, 10),
        (1, 31, 10),  # the next would be more than half
    ],
)
def test_more_is_held_out_in_the_order_of_the_keys(threshold: int, at_least: int, raised: int) -> None:
    keys = np.array([20, 9, 5, 9, 30, 40], np.uint64)
    assert raise_threshold(np.uint64(threshold), keys, np.full(6, 10), at_least) == raised
    largest = np.array([2**64 - 1] * 2, np.uint64)
    assert raise_threshold(np.uint64(1), largest, np.array([1, 0]), 1) == 1, "the largest key is never held out"


def threshold_of(folder: Path, keys: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """The threshold for one token file with documents of these keys and numbers of tokens, and samples of 8 tokens."""
    wanted = request("", "", val_fraction=0.25, max_seq_len=8)
    unit = dict.fromkeys(TokenUnit.__slots__, np.array(sizes)) | {"doc_keys": np.array(keys, np.uint64)}
    np.savez(folder / "unit.npz", allow_pickle=False, **unit)
    counts = count_splits(load_unit(folder / "unit.npz"), initial_threshold(wanted))
    train_tokens, val_tokens = counts[1], counts[4]
    return int(choose_threshold(train_tokens, val_tokens, [folder / "unit.npz"], wanted))


@pytest.mark.parametrize(("keys", "expected"), [((2**62 - 1, 2**62), 2**62), ((2**62, 2**62 + 1), 2**62 + 1)])
def test_a_document_at_the_threshold_is_for_training(tmp_path, keys, expected) -> None:
    assert threshold_of(tmp_path, keys, (8, 8)) == expected


@pytest.mark.parametrize(("sizes", "expected"), [((20, 7), 0), ((7, 20), 0), ((8, 8), 2**62)])
def test_nothing_is_held_out_where_one_of_the_splits_would_have_no_sample(tmp_path, sizes, expected) -> None:
    assert threshold_of(tmp_path, (2**62 - 1, 2**63), sizes) == expected


def test_a_single_document_is_all_for_training(tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path) -> None:
    wanted = request(write_jsonl(tmp_path / "in.jsonl", ["word " * 200]), tokenizer_folder)
    summary = prepare(wanted, tmp_path / "out", num_workers=1)
    assert list(summary.splits) == ["train"]
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, ["word " * 200])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_two_bytes_a_token_hold_every_id_below_65536(vocab_size, dtype) -> None:
    assert token_dtype(SimpleNamespace(vocab_size=vocab_size)) == dtype  # type: ignore[arg-type]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    words = {f"w{index}": index for index in range(70_000)}
    content = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    source = write_jsonl(tmp_path / "in.jsonl", ["w69999 w5 w7"])
    summary = prepare(request(source, folder, max_seq_len=4), tmp_path / "out", num_workers=1)
    assert summary.token_dtype == "uint32"
    assert read_samples(tmp_path / "out" / "train").tolist() == [[69999, 5, 7, 1]]
    index = json.loads((tmp_path / "out" / "train" / "index.json").read_text())["shards"][0]
    assert (index["column_encodings"], index["column_sizes"]) == (["ndarray:uint32:4"], [16])
    assert set(index["raw_data"]["hashes"]) == {"xxh3_64"}


def test_a_tokenizer_is_trained_on_the_training_documents_alone(small_request: PrepareRequest, tmp_path: Path) -> None:
    trained = replace(small_request, tokenizer="train:400", val_fraction=0.3)
    seen = prepare_module.sample_for_training(sources.open_source(trained), trained)
    held_out = [d for d in make_documents(60) if split_key(d.encode()) < 0.3 * 2**64]
    assert sorted(seen + held_out) == sorted(make_documents(60))

    summary = prepare(trained, tmp_path / "out", num_workers=1)
    assert (summary.tokenizer.name, summary.tokenizer.vocab_size) == ("train:400", 400)
    assert load_tokenizer(tmp_path / "out" / "tokenizer").fingerprint == summary.tokenizer.fingerprint


def test_what_becomes_validation_to_make_up_a_sample_was_not_trained_on_either(
    small_request: PrepareRequest, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    trained = replace(small_request, tokenizer="train:400", val_fraction=1e-9)
    seen = prepare_module.sample_for_training(sources.open_source(trained), trained)
    summary = prepare(trained, tmp_path / "out", num_workers=1)
    by_key = sorted(make_documents(60), key=lambda document: split_key(document.encode()))
    assert not set(seen) & set(by_key[: summary.splits["val"].documents])


def test_a_large_source_is_sampled_evenly(small_request: PrepareRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 1000)
    monkeypatch.setattr(prepare_module, "TOKENIZER_SAMPLE_BYTES", 4000)
    wanted = replace(small_request, val_fraction=0.0)
    seen = prepare_module.sample_for_training(sources.open_source(wanted), wanted)
    numbers = [int(document.split(":")[0]) for document in seen]
    assert sum(map(len, seen)) < 6000
    assert max(numbers) > 40


# Bad input

GOOD_LINE = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            GOOD_LINE + b'{"text": "half\n',
            r"a.jsonl, line 2 does not parse as JSON \(.*\); .*--on-error skip",
        ),
        ("a.jsonl", GOOD_LINE + b'{"text": "\xff"}\n', r"a.jsonl, line 2 is not valid UTF-8 \(byte 10 of the line\)"),
        ("a.jsonl", b'\n{"text": "\\ud800"}\n', "a.jsonl, line 2: its text contains half of a surrogate pair"),
        ("a.jsonl", GOOD_LINE + b'"text"\n', "a.jsonl, line 2 holds a JSON str, expected an object"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            r"line 1 has no 'text'; there are: body, id \(choose one with --text-k",
        ),
        ("a.jsonl", b'{" text": "x", "n o": 1}\n', r"line 1 has no 'text'; there are: ' text', 'n o' \(choose"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl, line 1: text is null, expected a string"),
        ("a.jsonl", b'{"text": ["x"]}\n', "a.jsonl, line 1: text is a list, expected a string"),
        ("a.txt", b"caf\xe9", r"a.txt is not valid UTF-8 \(byte 3\)"),
        ("a.jsonl.gz", gzip.compress(GOOD_LINE + b"{\n", mtime=0), "a.jsonl.gz, line 2 does not parse as JSON"),
        ("a.jsonl.gz", gzip.compress(GOOD_LINE * 99, mtime=0)[:-12], "a.jsonl.gz is cut short"),
        ("a.jsonl.zst", zstandard.compress(GOOD_LINE * 99)[:-4], "a.jsonl.zst is cut short"),
        ("a.txt.gz", b"not gzip", "a.txt.gz is damaged: it does not decompress"),
        ("a.txt.zst", b"not zstd", "a.txt.zst is damaged: it does not decompress"),
        # A frame with a window of 2 GiB, as zstd --long=31 writes it, and one block of 5 bytes.
        ("a.txt.zst", b"\x28\xb5\x2f\xfd\0\xa8\x29\0\0hello", "a.txt.zst was compressed with a longer window than"),
        ("a.pdf", b"%PDF", r"a.pdf: nothing here can be read; expected \{.txt, .md"),
        ("a.txt", b"", r"0 documents for training, 0 tokens in all.*less than one sample.*\(skipped: 1 empty\)"),
    ],
)
def test_bad_input_is_named(name: str, content: bytes, message: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    path = plain(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as raised:
        prepare(request(path, tokenizer_folder), tmp_path / "out", num_workers=1)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "out").rglob("index.json"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: no such file or folder"),
        ("no*.jsonl", r"no\*.jsonl: no file matches"),
        ("empty", "empty is an empty folder; expected files: .*parquet"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, message: str, tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        prepare(request(tmp_path / source, tokenizer_folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_documents_are_counted_by_reason_when_skipped(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_folder: Path
) -> None:
    documents = make_documents(10)
    bad = [b"{", b"[1]", b'{"text": "\xff"}', b'{"body": "x"}', b'{"text": 3}', b'{"text": ""}', b"", b" \r"]
    good = [json.dumps({"text": document}).encode() for document in documents]
    path = plain(tmp_path / "a.jsonl", b"\n".join(good[:5] + bad + good[5:]))
    wanted = request(path, tokenizer_folder, on_error="skip", val_fraction=0)
    summary = prepare(wanted, tmp_path / "out", num_workers=1)
    assert_holds(tmp_path / "out" / "train", summary, tokenizer, documents)
    counts = {"empty": 1, "invalid_utf8": 1, "invalid_json": 2, "missing_text_key": 1, "not_text": 1}
    assert summary.skipped == {**counts, "invalid_csv": 0, "too_large": 0, "unreadable": 0}
    assert [sentence.removeprefix(f"{path}, ") for sentence in summary.skipped_examples] == [
        "line 6 does not parse as JSON (Expecting property name enclosed in double quotes, column 1); expected one "
        "object per line",
        "line 7 holds a JSON list, expected an object",
        "line 8 is not valid UTF-8 (byte 10 of the line); --encoding names another encoding",
        "line 9 has no 'text'; there are: body (choose one with --text-key)",
        "line 10: text is a int, expected a string",
    ]


@pytest.mark.multiprocess
def test_with_several_workers_the_first_bad_document_is_the_one_named(
    large_file: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    lines = large_file.read_bytes().splitlines(keepends=True)
    for number in (2000, 5000, 8000):
        lines[number] = b"{\n"
    path = plain(tmp_path / "in.jsonl", b"".join(lines))
    with pytest.raises(DataError, match=r"in.jsonl, line 2001 does not parse as JSON"):
        prepare(request(path, tokenizer_folder), tmp_path / "out", num_workers=2)


def test_the_compressions_are_those_of_the_library(small_request: PrepareRequest) -> None:
    from streaming.base.compression import get_compressions

    for name in get_compressions():
        assert replace(small_request, compression=name).compression == name
    ours = {f"{name}:{level}" for name, levels in COMPRESSION_LEVELS.items() for level in levels}
    assert ours | set(COMPRESSION_LEVELS) == get_compressions()


@pytest.mark.parametrize("compression", [None, "br:5", "bz2", "snappy", "zstd", "zstd:9"])
def test_shards_and_index_are_those_of_the_librarys_own_writer(compression: str | None, tmp_path: Path) -> None:
    from tests.helpers.mds_writer import MDSWriter

    samples = np.random.default_rng(3).integers(0, 50_000, (700, SEQ_LEN)).astype(np.uint16)
    wanted = request("", "", size_limit_bytes=10_000, compression=compression)
    options = {"compression": compression, "hashes": ["xxh3_64"], "size_limit": wanted.size_limit_bytes}
    with MDSWriter(columns={"tokens": f"ndarray:uint16:{SEQ_LEN}"}, out=str(tmp_path / "theirs"), **options) as theirs:
        for sample in samples:
            theirs.write({"tokens": sample})
    shard_format = ShardFormat(wanted, samples.dtype, padding=0)
    parts = np.split(samples, range(shard_format.samples_per_shard, len(samples), shard_format.samples_per_shard))
    (tmp_path / "ours").mkdir()
    records = [shard_format.write(tmp_path / "ours", index, part) for index, part in enumerate(parts)]
    write_index(tmp_path / "ours", records)
    assert len(records) == len(theirs.shards) > 3
    assert folder_bytes(tmp_path / "ours") == folder_bytes(tmp_path / "theirs")


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_shard_is_as_full_as_the_limit_allows_to_the_byte(spare: int, tmp_path: Path) -> None:
    sample, dtype = SEQ_LEN * 2 + 4, np.dtype(np.uint16)  # its tokens, and where they begin
    header = len(ShardFormat(request("", "", size_limit_bytes=9_000), dtype, padding=0).header)
    limit = 8 + header + sample * ((9_000 - 8 - header) // sample) + spare
    shard_format = ShardFormat(request("", "", size_limit_bytes=limit), dtype, padding=0)
    shard_format.write(tmp_path, 0, np.zeros((shard_format.samples_per_shard, SEQ_LEN), dtype))
    size = (tmp_path / "shard.00000.mds").stat().st_size
    assert len(str(limit)) == 4
    assert limit - sample < size <= limit


def write_units(folder: Path, units: list[list[int]], threshold: np.uint64) -> UnitTable:
    """Write token files of documents with these numbers of tokens. Every third document is held out."""
    table = UnitTable()
    folder.mkdir()
    tokens = itertools.count()
    for piece, sizes in enumerate(units):
        keys = [0 if (piece + index) % 3 == 0 else 2**63 for index in range(len(sizes))]
        unit = TokenUnit(
            tokens=np.array([next(tokens) for _ in range(sum(sizes))], np.uint16),
            doc_tokens=np.array(sizes, np.int64),
            doc_bytes=np.array(sizes, np.int64),
            doc_keys=np.array(keys, np.uint64),
            skipped=np.zeros(len(documents.SKIP_REASONS), np.int64),
            named=np.array([], str),
            made_of=np.array(""),
            loss=np.array(LostText().as_text()),
            text_digest=np.array(format_text_digest(0)),
        )
        number = UnitNumber(piece, 0)
        np.savez(folder / number.file_name, **{name: getattr(unit, name) for name in TokenUnit.__slots__})
        table.add(number, unit, threshold)
    return table


@pytest.mark.parametrize("num_wanted", [1, 3, 19, 20])
def test_few_documents_are_read_without_the_others_of_their_file(tmp_path: Path, num_wanted: int) -> None:
    sizes = np.array([*range(1, 20), 70_000])
    tokens = np.arange(sizes.sum()).astype(np.uint32)
    np.savez(tmp_path / "unit.npz", doc_tokens=sizes, tokens=tokens, made_of=np.array("x"))
    is_wanted = np.zeros(20, bool)
    is_wanted[-num_wanted:] = True
    expected = tokens[-sizes[-num_wanted:].sum() :]
    assert load_documents(tmp_path / "unit.npz", sizes, is_wanted).tolist() == expected.tolist()


@pytest.mark.parametrize("pack", ["concat", "best-fit"])
def test_any_range_of_shards_is_written_by_the_plan_alone(tmp_path: Path, monkeypatch, pack: str) -> None:
    """Units of no document, of none of a split, and of more than a shard; the end of a unit is the end of a shard."""
    monkeypatch.setattr(best_fit, "WINDOW_TOKENS", 50)
    monkeypatch.setattr(best_fit, "WINDOW_SAMPLES", 1)
    wanted = request("", "", max_seq_len=4, size_limit_bytes=4200, val_fraction=0.25, pack=pack)
    shard_format = ShardFormat(wanted, np.dtype(np.uint16), padding=0)
    per_shard = 4 * shard_format.samples_per_shard
    units = [[7, per_shard], [], [3, 5, 9], [2, 3 * per_shard + 1], [per_shard], [1, 1], [per_shard, 6]]
    table = write_units(tmp_path / "units", units, initial_threshold(wanted))
    units_folder = TokenFolder(tmp_path / "units")
    plans = plan_splits(table, units_folder, wanted, shard_format)
    assert [plan.split for plan in plans] == ["train", "val"]
    for plan in plans:
        assert plan.num_shards >= 2
        whole = tmp_path / plan.split
        records = list(write_shards(plan, range(plan.num_shards), units_folder, whole, shard_format))
        for first in range(plan.num_shards):
            for end in range(first + 1, plan.num_shards + 1):
                folder = tmp_path / f"{plan.split}-{first}-{end}"
                written = list(write_shards(plan, range(first, end), units_folder, folder, shard_format))
                assert written == records[first:end]
                for path in folder.iterdir():
                    assert path.read_bytes() == (whole / path.name).read_bytes()


def test_a_preparation_imports_neither_torch_nor_streaming(small_request: PrepareRequest, tmp_path: Path) -> None:
    options = ["--out", tmp_path / "out", "--tokenizer", small_request.tokenizer, "--max-seq-len", SEQ_LEN]
    program = (
        "import sys; from llmfoundry_lite.cli import main\n"
        "code = main.run(sys.argv[1:])\n"
        "print(code, set(sys.modules) & {'torch', 'streaming', 'transformers', 'pyarrow'})"
    )
    command = [sys.executable, "-c", program, "data", "prepare", *small_request.sources, *options, "--num-workers", 1]
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 set()"


# The command


def run_cli(*arguments: object) -> int:
    return main.run(["data", "prepare", *map(str, arguments)])


def test_the_command_takes_several_sources_and_ends_with_a_table(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", make_documents(30), key="body")
    second = write_jsonl(tmp_path / "b.jsonl", make_documents(30, seed=2), key="body")
    options = ["--tokenizer", tokenizer_folder, "--max-seq-len", SEQ_LEN, "--text-key", "body", "--num-workers", 1]
    assert run_cli(first, second, "--out", tmp_path / "out", *options) == 0
    summary = load_summary(tmp_path / "out")
    assert sum(split.documents for split in summary.splits.values()) == 60
    printed = capsys.readouterr().out
    assert summary.tokenizer.fingerprint in printed
    assert f"{summary.splits['train'].tokens:,}" in printed
    assert run_cli("--source", first, second, "--out", tmp_path / "out", *options) == 0
    assert "is complete: the same preparation finished there before" in capsys.readouterr().out


STDLIB = "python-stdlib --tokenizer train:300 --max-seq-len"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.txt --tokenizer train:300 --max-seq-len 8", "nowhere.txt: no such file"),
        ("--source python-stdlib --tokenizer train:x --max-seq-len 8", "expected train:VOCAB_SIZE, for"),
        (f"{STDLIB} 0", "--max-seq-len 0: expected a nu"),
        (
            f"{STDLIB} 100000000000",
            "--max-seq-len 100000000000: expected a number of tokens, at least 1 and at most 536870399",
        ),
        (f"{STDLIB} 8 more.txt", "cannot be prepared"),
        (
            f"{STDLIB} 8 --compression zstd:23",
            "--compression zstd:23: expected one of br, br:0 to br:11, bz2, bz2:1 to bz2:9",
        ),
        (f"{STDLIB} 8 --size-limit 100", "--size-limit 100 bytes: expected at least 4160 (one sample"),
        (
            f"{STDLIB} 8 --encoding klingon",
            "--encoding klingon: Python knows no text encoding of this name; expected utf-8",
        ),
        (f"{STDLIB} 8 --on-error panic", "Invalid value"),
        ("--tokenizer train:300 --max-seq-len 8", "no source given; expected python-stdlib, hf:NAME, or"),
        ("--source python-stdlib --tokenizer train:300", "Missing option '--max-seq-len'"),
        ("--sauce python-stdlib", "No such option: --sauce"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("--out", tmp_path / "out", *arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and message in printed.err
    assert printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_an_out_folder_in_the_source_is_refused_before_anything_is_discarded(tmp_path, tokenizer_folder, prefix):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_jsonl(corpus / "a.jsonl", make_documents(3))
    wanted = request(f"{prefix}{corpus}", tokenizer_folder)
    for out in (corpus, corpus / "out"):
        with pytest.raises(DataError, match=r"lies in the source .*corpus, .*; choose another --out"):
            prepare(wanted, out, num_workers=1, overwrite=True)
    assert os.listdir(corpus) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "out", "is_refused"),
    [
        ("*", "out", True),  # the folder is read
        ("*", "more/out", True),  # the folder around it is
        ("*.jsonl", "out", False),
        ("**", "out", True),
        ("**/*.jsonl", "out", False),
        ("**/*.txt", "more/out", True),  # the merges of a tokenizer
        ("*/*.jsonl", "out", False),
        ("*/*/*.json", "out", True),
        ("*", "../out", False),
        ("*", ".out", False),  # hidden from patterns that do not begin with a dot
        ("**/*.txt", "more/.out", False),
        (".*", ".out", True),
        ("missing/*", "out", False),
    ],
)
def test_an_out_folder_that_a_glob_reads_is_refused(tmp_path, pattern, out, is_refused):
    (tmp_path / "corpus").mkdir()
    expected = pytest.raises(DataError, match="lies in the source") if is_refused else contextlib.nullcontext()
    with expected:
        check_outside_sources(tmp_path / "corpus" / out, [str(tmp_path / "corpus" / pattern)])
