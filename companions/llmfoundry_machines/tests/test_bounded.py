"""Readers of other people's files in this companion."""

from pathlib import Path

import pytest

from llmfoundry_machines import companion
from llmfoundry_machines.bench.compare import read
from llmfoundry_machines.doctor.verified import read_proof
from tests.helpers.readers import find_whole_reads, give_brackets, give_pipe

READERS = [read, read_proof]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path, read):
    give_pipe(tmp_path / "pipe.json", read)
    give_brackets(tmp_path / "report.json", read)


def test_files_that_others_wrote_are_read_through_one_door():
    assert find_whole_reads(Path(companion.__file__).parent) == {
        *("bench/frame.py", "bench/profile.py", "bench/steps.py", "bench/turns.py"),
        *("doctor/collectives.py", "doctor/examine.py", "doctor/machine.py"),
    }
