"""Bytes that somebody else made: no reader takes more than it says, and none waits for a pipe."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import zstandard

from llmfoundry_lite import bounded, preflight
from llmfoundry_lite.bounded import TooLargeError, open_unpacked, read_at_most, read_lines_at_most
from llmfoundry_lite.checkpoint.manifest import FORMAT
from llmfoundry_lite.checkpoint.store import is_checkpoint
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.layers import read_layers
from llmfoundry_lite.convert.files import read_json
from llmfoundry_lite.data.index_files import IndexFiles
from llmfoundry_lite.data.recorded import shard_state
from llmfoundry_lite.data.shard_table import read_indexes
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.files import check_replaceable, open_own, open_regular
from llmfoundry_lite.prepare.listing import list_files, read_json_object
from llmfoundry_lite.prepare.summary import load_summary
from llmfoundry_lite.ranks.status import read_status
from llmfoundry_lite.report.reading import read_run
from scripts.make_tasks import is_replaceable
from tests.helpers.bombs import MIB, little_memory
from tests.helpers.readers import find_whole_reads, give_brackets, give_pipe


def test_a_file_is_read_up_to_its_limit_and_not_a_byte_further(tmp_path):
    (path := tmp_path / "a.json").write_bytes(bytes(64 * MIB))
    assert len(read_at_most(path, 64 * MIB, "a report")) == 64 * MIB
    with little_memory(32), pytest.raises(TooLargeError) as caught:
        read_at_most(path, MIB, "a report")
    reason = "has more than 1,048,576 bytes, the most that are read of a report"
    assert (str(caught.value), caught.value.strerror) == (f"{path} {reason}; give another file", reason)
    assert caught.value.exit_code == 2


def test_a_file_that_says_it_is_empty_has_its_limit_too():
    """Files of /proc have a size of 0, whatever they hold."""
    assert read_at_most("/proc/self/stat", MIB, "a note")
    with pytest.raises(DataError, match="/proc/self/stat has more than 5 bytes"):
        read_at_most("/proc/self/stat", 5, "a note")


def test_lines_and_their_sum_have_limits(tmp_path, monkeypatch):
    (path := tmp_path / "a.jsonl").write_bytes(b"one\n" + "zwei\u2028\n".encode() + b"torn")
    assert b"".join(read_lines_at_most(path, 16, "a log")) == path.read_bytes()
    assert list(read_lines_at_most(path, 16, "a log", begin=12)) == [b"torn"]
    with pytest.raises(DataError, match=r"a.jsonl has more than 15 bytes, the most that are read of a log"):
        list(read_lines_at_most(path, 15, "a log"))
    monkeypatch.setattr(bounded, "MAX_LINE_BYTES", 5)
    lines = read_lines_at_most(path, 16, "a log")
    assert next(lines) == b"one\n"
    with pytest.raises(DataError, match=r"a.jsonl, line 2 has more than 5 bytes, the most that are read of a line"):
        next(lines)


def test_a_window_of_gigabytes_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    packed = zstandard.ZstdCompressor(compression_params=parameters).stream_reader(io.BytesIO(bytes(MIB))).read()
    with open_unpacked(io.BytesIO(packed), "zstd") as content, pytest.raises(OSError, match="too much memory"):
        content.read()


READERS = {
    "status.json": [lambda path: read_status(path.parent)],
    "launches.jsonl": [lambda path: read_run(path.parent)],
    "metrics.jsonl": [lambda path: read_run(path.parent)],
    "config.yaml": [lambda path: read_run(path.parent), lambda path: read_layers([str(path)])],
    "manifest.json": [lambda path: is_checkpoint(str(path.parent))],
    "summary.json": [
        lambda path: load_summary(path.parent),
        preflight._read_summary,
    ],
    "index.json": [
        lambda path: read_indexes([IndexFiles(folder=path.parent)], [None]),
        preflight._count_samples,
        lambda path: shard_state(path.parent),
    ],
    "report.json": [check_replaceable, read_json, read_json_object],
    "task.jsonl": [
        lambda path: read_rows(TaskConfig(label="t", icl_task_type="language_modeling", dataset_uri=str(path))),
        lambda path: is_replaceable(path, {}),
        lambda path: list_files([str(path)], split="train", on_error="stop"),
    ],
    "tokenizer.json": [lambda path: load_tokenizer(path.parent)],
}


RIGHT = {
    "status.json": '{"status": "done", "batch": 1}',
    "launches.jsonl": '{"launch": 1, "status": "done", "batch": 1}',
    "metrics.jsonl": '{"batch": 1, "launch": 1}',
    "config.yaml": "seed: 1",
    "manifest.json": f'{{"format": "{FORMAT}"}}',
    "task.jsonl": '{"context": "a", "continuation": "b", "text": "c"}',
}
"""Files that each of their readers takes, so that it is not another fault that the next tests see."""


@pytest.mark.parametrize("name", RIGHT)
def test_a_reader_reads_a_right_file(tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text(RIGHT["metrics.jsonl"] + "\n")
    (path := tmp_path / name).write_text(RIGHT[name] + "\n")
    for read in READERS[name]:
        read(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(tmp_path, name):
    for read in READERS[name]:
        give_pipe(tmp_path / name, read)


@pytest.mark.parametrize("name", READERS)
def test_no_reader_ends_in_a_traceback_for_brackets_without_end(tmp_path, name):
    for read in READERS[name]:
        give_brackets(tmp_path / name, read)


def test_an_index_and_a_summary_of_anything_are_read_without_a_traceback(tmp_path):
    index, summary = tmp_path / "index.json", tmp_path / "summary.json"
    names = '"column_names": [%s] "column_encodings": ["int"]'
    for text in (names % "[" * 100_000, names % "{}", names % '"a"' + f' "samples": {"9" * 5000}'):
        index.write_text(text)
        with contextlib.suppress(ValueError):
            preflight._count_samples(index)
    for text in ("[1]", '{"max_seq_len": 1, "tokenizer": 3}', '{"max_seq_len": "x", "tokenizer": {"vocab_size": 1}}'):
        summary.write_text(text)
        assert preflight._read_summary(summary) == {}


def test_a_name_that_leads_to_no_file_of_this_user_is_not_opened(tmp_path):
    (file := tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(file)
    os.close(open_regular(tmp_path / "link"))
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "link", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert file.read_text() == "kept"
    os.close(open_own(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert Path(tmp_path, "new").stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
        with pytest.raises(PermissionError, match="belongs to user 12345"):
            open_own(file)


OURS_OR_THE_SYSTEM_S = {
    *("checkpoint/start.py", "cli/listing.py", "config/auto_hardware.py", "config/foundry.py", "devices.py"),
    "config/part_names.py",
    *("launch/replay.py", "models/products.py", "ranks/identity.py", "ranks/siblings.py", "release.py"),
    *("training/mirrors.py", "launch_replay.py", "training/run_folder.py"),
}
"""Modules that read files of the package, of the kernel, of their own temporary folders or of their own run."""


def test_files_that_others_wrote_are_read_through_one_door():
    found = find_whole_reads(Path(bounded.__file__).parent)
    assert found == OURS_OR_THE_SYSTEM_S, "read_at_most of bounded.py has a limit, and waits for no pipe"
