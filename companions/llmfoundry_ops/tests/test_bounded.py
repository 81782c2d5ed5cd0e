"""Readers of other people's files in this companion."""

from pathlib import Path

import pytest

from llmfoundry_ops import companion
from llmfoundry_ops.journal import JOURNAL, read_allocations
from llmfoundry_ops.runs import LiveRun
from llmfoundry_ops.starter import check_places
from tests.helpers.readers import find_whole_reads, give_brackets, give_pipe

RIGHT = '{"number": 1, "site": "a", "turn": 0, "began": 1.0, "from_batch": 0, "host": "b"}'


@pytest.mark.timeout(60)
def test_no_reader_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path):
    (path := tmp_path / JOURNAL).write_text(RIGHT + "\n")
    assert len(read_allocations(tmp_path)) == 1
    give_brackets(path, lambda path: read_allocations(path.parent))
    path.unlink()
    give_pipe(path, lambda path: read_allocations(path.parent))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["status.json", "metrics.jsonl"])
def test_no_reader_of_a_live_run_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path, name):
    give_pipe(tmp_path / name, lambda path: LiveRun(path.parent))
    (tmp_path / "folder").mkdir()
    give_brackets(tmp_path / "folder" / name, lambda path: LiveRun(path.parent))


@pytest.mark.timeout(60)
def test_no_reader_of_prepared_data_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path):
    def read(path):
        check_places(path.parent, path.parent / "out")

    give_pipe(tmp_path / "summary.json", read)
    (tmp_path / "folder").mkdir()
    give_brackets(tmp_path / "folder/summary.json", read)


def test_files_that_others_wrote_are_read_through_one_door():
    """Exempt are files of our own: the launcher reads its ranks' logs, `processes` what its shell has written,
    `starter` its template, `energy` the kernel's counters."""
    assert find_whole_reads(Path(companion.__file__).parent) == {
        "energy.py",
        "launcher.py",
        "processes.py",
        "starter.py",
    }
