"""Readers of other people's files in this companion."""

from pathlib import Path

from llmfoundry_islands import companion
from tests.helpers.readers import find_whole_reads


def test_files_that_others_wrote_are_read_through_one_door():
    own = {"coordination/member.py"}  # reads what its own coordinator prints
    assert find_whole_reads(Path(companion.__file__).parent) == own
