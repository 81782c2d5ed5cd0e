"""Messages of an evaluation while it works, and when its tables cannot be written."""

import sys

import pytest

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import suite
from llmfoundry_lite.evaluation.results import Results
from tests.helpers.results import choice


class Terminal:
    def __init__(self, is_terminal):
        self.is_terminal, self.written = is_terminal, ""

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass


@pytest.fixture
def told(monkeypatch):
    """Return the lines about 4,000 items of a task: a thousand take 20 minutes, and the last are told twice."""

    def tell(is_terminal):
        terminal = Terminal(is_terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        line = suite.ProgressLine("ours")
        for done, seconds in ((0, 0), (1000, 1200), (4000, 4800), (4000, 4801)):
            monkeypatch.setattr(suite.time, "monotonic", lambda seconds=seconds: float(seconds))
            line("piqa/0-shot", done, 4000)
        return terminal.written

    return tell


def test_on_a_terminal_a_bar_grows_and_says_when_it_will_be_full(told):
    empty, quarter, full = told(True).split("\r\033[K")[1:]
    assert empty == "ours · piqa/0-shot ──────────────────── 0/4,000"
    assert quarter == "ours · piqa/0-shot ━━━━━─────────────── 1,000/4,000 · ETA 1:00:00"
    assert full == "ours · piqa/0-shot ━━━━━━━━━━━━━━━━━━━━ 4,000/4,000 · 0.8 items/s · 4800 s\n"


def test_in_a_file_there_is_one_line_for_a_task(told):
    assert told(False) == "ours · piqa/0-shot · 4,000/4,000 · 0.8 items/s · 4800 s\n"


def test_tables_that_cannot_be_written_are_a_users_error(tmp_path):
    (tmp_path / "table.md").mkdir()
    results = Results(model="ours", suite="s", source="ours", tasks={"t/0-shot": choice([0, 1])[0]})
    with pytest.raises(DataError, match=r"the tables in .* cannot be written: Is a directory; the results are there"):
        suite.write_suite([results], tmp_path, None)
