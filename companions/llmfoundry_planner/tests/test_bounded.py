"""Readers of other people's files in this companion."""

from pathlib import Path

import pytest

from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_planner import companion
from llmfoundry_planner.plan.calibrate import read_report
from llmfoundry_planner.plan.step import find_hardware
from tests.helpers.readers import find_whole_reads, give_brackets, give_pipe

READERS = [lambda path: read_report(path, find_hardware(ACCELERATORS["H100-80GB"]))]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path, read):
    give_pipe(tmp_path / "pipe.json", read)
    give_brackets(tmp_path / "report.json", read)


def test_files_that_others_wrote_are_read_through_one_door():
    assert find_whole_reads(Path(companion.__file__).parent) == {
        "plan/plan.py",
        *("rehearse/build.py", "rehearse/child.py", "rehearse/fork_server.py", "rehearse/measure.py"),
    }
