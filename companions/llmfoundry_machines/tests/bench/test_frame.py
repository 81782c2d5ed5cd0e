"""What all benches have in common: turns, ratios, reports."""

import io
import json
import re

import pytest
import torch.distributed as dist
from rich.console import Console

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.files import check_result_replaceable
from llmfoundry_machines.bench import frame, steps
from tests.helpers.interrupted import call_again_after_each_write


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
    parts = (table, ["a note"], "A paragraph.", [])
    frame.tell(report, *parts, name="name", heading="A heading", command="bench", out=tmp_path / "new")
    assert json.loads((tmp_path / "new/name.json").read_text())["found"] == [1.0, 1.5, 2.0]
    blocks = (tmp_path / "new/name.md").read_text().split("\n\n")
    assert re.fullmatch(
        r"`bench`, [\d-]{10}, .* cores, \d+ GiB, torch [\d.]+.*; load average before the run [\d.]+\.", blocks[1]
    )
    lines = ["| side | seconds | words |", "|---|---:|---|", "| ours | 1.5 | all |", "| peer |  | none |"]
    assert blocks[2:] == ["The rounds:", "\n".join(lines), "- a note", "A paragraph.\n"]
    said = io.StringIO()
    frame.show(Console(file=said, width=80), table, ["[a note]"], "A paragraph.")
    assert "[a note]" in said.getvalue() and "the rounds" in said.getvalue()
    assert "A paragraph" not in said.getvalue()


def test_a_bench_that_ended_midway_does_not_block_the_next_one(tmp_path):
    report = frame.describe_conditions()

    def tell(folder):
        check_result_replaceable(folder, "name")
        frame.tell(report, "A paragraph.", name="name", heading="A heading", command="bench", plot=draw, out=folder)

    def draw(report, path):
        with frame.drawn(path, 1, (1.0, 1.0)):
            pass

    assert call_again_after_each_write(tell, tmp_path) == 3


def test_what_was_measured_is_shown_where_it_cannot_be_written(tmp_path, capsys):
    (tmp_path / "name.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"name\.md: exists and was not written by this command"):
        frame.tell(frame.describe_conditions(), ["a note"], name="name", heading="", command="bench", out=tmp_path)
    assert "a note" in capsys.readouterr().out


def test_a_table_is_made_of_columns_and_rows_by_name():
    columns: list[frame.Column] = [
        ("side", "{side}"),
        ("seconds", "{seconds[median]:.2f}"),
        ("twice", lambda row: str(2 * row["n"])),
    ]
    rows = [
        {"side": "ours", "seconds": {"median": 1.234}, "n": 2},
        {"side": "theirs", "seconds": None, "n": 3},
        {"side": "peer", "error": "out of memory"},
    ]
    table = frame.tabulate("rounds", columns, rows)
    assert table.columns == ["side", "seconds", "twice"]
    assert table.rows == [["ours", "1.23", "4"], ["theirs", "", "6"], ["peer", "out of memory", ""]]


def test_cases_for_which_no_time_is_left_are_named():
    left_out: list[str] = []
    console = Console(file=io.StringIO())
    found = list(frame.within_minutes(1, [("a", 1)], console, left_out))
    assert [case for case, _ in found] == [1] and 0 < found[0][1] <= 60 and not left_out
    assert list(frame.within_minutes(0, [("a", 1), ("b", 2)], console, left_out)) == []
    assert frame.note_left_out(left_out) == ["no time for: a; b"] and frame.note_left_out([]) == []


def fail_on_the_second() -> int:
    if dist.get_rank():
        raise ValueError("no second")
    return dist.get_world_size()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_of_a_measurement_are_one_group_and_one_that_fails_ends_it():
    assert steps.measure_on_ranks(2, dist.get_world_size) == 2
    with pytest.raises(RuntimeError, match=r"^ValueError: no second$"):
        steps.measure_on_ranks(2, fail_on_the_second)


def test_a_shape_that_is_not_in_the_table_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"^--shape: '11m' given, expected one of tiny, 10m, 40m, 125m, 350m"):
        frame.check_names("--shape", ["10m", "11m"], steps.SHAPES)
