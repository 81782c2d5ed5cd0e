"""Two reports of one bench side by side, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from llmfoundry_lite.cli.main import app
from llmfoundry_lite.errors import DataError
from llmfoundry_machines.bench import compare, frame


def write(folder, rows, *, name="scaling", **changes):
    report = frame.describe_conditions() | {"dtype": "fp32", "torch": "2.13.0"} | changes
    table = frame.Table("the rounds", ["scaling", "devices", "seconds", "MFU"], rows, num_keys=2)
    frame.tell(report, table, name=name, heading="A heading", command="bench", asked=["dtype"], out=folder)
    return folder / f"{name}.json"


ROWS = [["strong", "1", "1,200.50", "40.0%"], ["strong", "2", "0.60 (0.50 to 0.80)", ""]]


def test_numbers_of_one_row_and_column_stand_side_by_side(tmp_path):
    other = [["strong", "2", "0.30", "20.0%"], ["strong", "1", "2,401", "30.0%"], ["weak", "2", "1", "1%"]]
    first, second = write(tmp_path / "a", ROWS), write(tmp_path / "b", other, torch="2.14.0")
    result = CliRunner().invoke(app, ["bench", "compare", str(first), str(second), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (table,) = compare.run(first, second)
    assert table.rows == [
        ["strong", "1", "seconds", "1,200.50", "2,401", "2.00"],
        ["strong", "1", "MFU", "40.0%", "30.0%", "0.75"],
        ["strong", "2", "seconds", "0.60 (0.50 to 0.80)", "0.30", "0.50"],
    ]
    text = (tmp_path / "compare-scaling.md").read_text()
    assert "- torch: 2.13.0 and 2.14.0" in text and "- in the second alone: weak, 2" in text


def test_one_machine_and_one_stack_are_said_to_be_so(tmp_path):
    first, second = write(tmp_path / "a", ROWS, load_average=1), write(tmp_path / "b", ROWS, load_average=1)
    assert compare.describe_differences(compare.read_report(first), compare.read_report(second)) == [
        "measured under the same conditions: one machine, the same versions"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bf16"}, r"dtype is fp32 in .* and bf16 in .*; measure one of them again"),
        ({"name": "block"}, "is of bench scaling, .* of bench block; compare one bench's"),
        ({"rows": [["weak", "8", "1", "1"]]}, "no row of one is in the other"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(changes, words, tmp_path):
    first, second = write(tmp_path / "a", ROWS), write(tmp_path / "b", **{"rows": ROWS, **changes})
    with pytest.raises(DataError, match=words):
        compare.run(first, second)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("no JSON", "is not JSON"),
        (
            json.dumps({"schema": 2, "bench": "mfu", "asked": {}, "tables": [{"rows": []}]}),
            "is not a bench report; measure mfu again",
        ),
        ("[1]", "is not a bench report; measure mfu again, with --out FOLDER$"),
        (
            json.dumps({"date": "2026-11-01", "rows": []}),
            "an older release's report, or none: it has no schema, bench, asked or tables; measure mfu again",
        ),
        (
            json.dumps({"schema": 99, "bench": "block", "asked": {}, "tables": []}),
            "has schema 99, this release reads 2; measure block again, with --out FOLDER$",
        ),
    ],
)
def test_files_that_are_no_reports_are_refused(content, words, tmp_path):
    path = tmp_path / "mfu.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        compare.read_report(path)
