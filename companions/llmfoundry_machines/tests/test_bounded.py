"""Readers of other people's files in this companion."""

from pathlib import Path

import pytest

from llmfoundry_machines import companion
from llmfoundry_machines.bench.compare import read_report
from tests.helpers.readers import find_whole_reads, give_brackets, give_pipe


@pytest.mark.timeout(60)
def test_a_pipe_and_endless_brackets_end_in_no_traceback(tmp_path):
    give_pipe(tmp_path / "pipe.json", read_report)
    give_brackets(tmp_path / "report.json", read_report)


def test_files_that_others_wrote_are_read_through_one_door():
    assert find_whole_reads(Path(companion.__file__).parent) == {
        *("bench/frame.py", "bench/profile.py", "bench/steps.py", "bench/turns.py"),
        *("doctor/collectives.py", "doctor/examine.py", "doctor/machine.py"),
    }
