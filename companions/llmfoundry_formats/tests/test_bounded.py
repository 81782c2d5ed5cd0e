"""Readers of other people's files in this companion."""

import pytest

from llmfoundry_formats.starter import check_places
from tests.helpers.readers import give_brackets, give_pipe


@pytest.mark.timeout(60)
def test_no_reader_waits_for_a_pipe_or_ends_in_a_traceback(tmp_path):
    def read(path):
        check_places(path.parent, path.parent / "out")

    give_pipe(tmp_path / "summary.json", read)
    (tmp_path / "folder").mkdir()
    give_brackets(tmp_path / "folder/summary.json", read)
