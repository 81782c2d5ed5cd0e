"""What all benches have in common: turns, ratios, reports."""

import io
import json
import re

import pytest
from rich.console import Console

from llmfoundry_lite.bench import frame, steps
from llmfoundry_lite.errors import ConfigError


def test_sides_take_turns_and_one_that_fails_is_left_out_with_its_reason():
    said: list[str] = []

    def fail():
        said.append("broken")
        raise RuntimeError("side failed:\nCUDA out of memory.")

    sides = {"ours": lambda: said.append("ours"), "broken": fail, "peer": lambda: said.append("peer")}
    found, failed = frame.take_turns(sides, 2, Console(file=io.StringIO()))
    assert said == ["ours", "broken", "peer", "ours", "peer"]
    assert {name: len(rounds) for name, rounds in found.items()} == {"ours": 2, "broken": 0, "peer": 2}
    assert failed == {"broken": "CUDA out of memory."}


def test_ratios_are_taken_within_rounds_so_that_a_slow_one_is_slow_for_both():
    assert frame.ratios([2.0, 20.0, 3.0], [1.0, 10.0, 2.0]) == (1.5, 2.0, 2.0)
    assert str(frame.ratios([2.0, 3.0, 8.0], [1.0, 1.0, 2.0])) == "3.00 (2.00 to 4.00)"
    assert str(frame.ratios([2.0], [1.0])) == "2.00"


def test_a_report_says_where_it_was_measured_and_puts_numbers_to_the_right(tmp_path):
    report = frame.describe_conditions() | {"found": frame.spread([1.0, 2.0])}
    table = frame.measured_table(
        "the rounds", ["side", "seconds", "words"], [["ours", "1.5", "all"], ["peer", "", "none"]]
    )
    frame.write_report(tmp_path / "new", "name", "A heading", "bench", report, table, ["a note"], "A paragraph.", [])
    assert json.loads((tmp_path / "new/name.json").read_text())["found"] == [1.0, 1.5, 2.0]
    blocks = (tmp_path / "new/name.md").read_text().split("\n\n")
    assert re.fullmatch(
        r"`bench`, [\d-]{10}, .* cores, \d+ GiB, torch [\d.]+.*; load average before it [\d.]+\.", blocks[1]
    )
    lines = ["| side | seconds | words |", "|---|---:|---|", "| ours | 1.5 | all |", "| peer |  | none |"]
    assert blocks[2:] == ["The rounds:", "\n".join(lines), "- a note", "A paragraph.\n"]
    console = Console(file=io.StringIO(), width=80)
    frame.show(console, table, notes=["[a note]"])
    assert "[a note]" in console.file.getvalue() and "the rounds" in console.file.getvalue()


def test_a_shape_that_is_not_in_the_table_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"^--shape: '11m' given, expected one of tiny, 10m, 40m, 125m, 350m"):
        frame.check_names("--shape", ["10m", "11m"], steps.SHAPES)
    assert steps.model_of("10m", 32).max_seq_len == 32
