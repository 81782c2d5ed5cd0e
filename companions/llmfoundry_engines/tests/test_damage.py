"""Files of parts that are damaged, lost or of another form are named, and made again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from llmfoundry_engines import reports, status
from llmfoundry_engines.join import join, join_shards
from llmfoundry_engines.join_plan import load_written, plan_join
from llmfoundry_engines.part import Part
from llmfoundry_engines.tests.part_runs import change_report, prepare_parts
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.token_folder import TokenFolder
from llmfoundry_lite.prepare.token_unit import UNIT_ROW
from tests.helpers.preparing import assert_same_result


def test_a_token_file_that_is_gone_is_made_again_by_its_part(
    wanted: PrepareRequest, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2, 3], 3)
    sorted((out / ".partial/units").iterdir())[-1].unlink()
    with pytest.raises(DataError, match=r"1 of 3 parts not complete: 3/3 lacks some of its token files; run these"):
        join(out)
    prepare_parts(wanted, out, [1, 2, 3], 3)
    join(out)
    assert_same_result(out, expected)


@pytest.mark.parametrize("name", ["tokenizer", "units"])
def test_a_folder_that_is_gone_is_made_again_by_a_part(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    shutil.rmtree(out / ".partial" / name)
    with pytest.raises(DataError, match=r"tokenizer|1/1 lacks some of its token files"):
        join(out)
    prepare_parts(wanted, out, [1], 1)
    join(out)
    assert_same_result(out, expected)


@pytest.mark.parametrize("change", [None, {"max_seq_len": "many"}, {"input": 7}])
def test_a_damaged_request_is_named(wanted: PrepareRequest, tmp_path: Path, change: dict | None) -> None:
    prepare_parts(wanted, tmp_path / "out", [1], 1)
    file = tmp_path / "out/.partial/request.json"
    file.write_text("{" if change is None else json.dumps(json.loads(file.read_text()) | change))
    message = r"request.json is damaged; remove .*partial and run all parts again"
    with pytest.raises(DataError, match=message):
        join(tmp_path / "out")
    with pytest.raises(DataError, match=message):
        status.print_status(tmp_path / "out", Console())


@pytest.mark.parametrize("is_of_another_unit", [False, True])
def test_a_token_file_that_is_damaged_is_named_and_made_again(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, is_of_another_unit: bool
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2], 2)
    damaged, other, *_ = sorted((out / ".partial/units").iterdir())
    damaged.write_bytes(other.read_bytes() if is_of_another_unit else damaged.read_bytes()[:-100])
    problem = r"has \d+ tokens of the split train, expected \d+" if is_of_another_unit else "is damaged"
    with pytest.raises(DataError, match=f"{damaged.name} {problem}"):
        join(out)
    damaged.write_bytes(b"other bytes")
    with pytest.raises(
        DataError, match=rf"{damaged.name} is damaged \(it is not a file of tokens\); remove it and run"
    ):
        join(out)
    damaged.unlink()
    prepare_parts(wanted, out, [1, 2], 2)
    join(out)
    assert_same_result(out, expected)


@pytest.mark.parametrize("name", [reports.REPORT_FILE, reports.ROWS_FILE])
@pytest.mark.parametrize("content", [b"", b"{}", b'{"part": 7}'])
def test_a_damaged_report_is_one_of_an_incomplete_part(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2], 2)
    (out / ".partial/parts" / Part(2, 2).folder_name / name).write_bytes(content)
    with pytest.raises(DataError, match="1 of 2 parts not complete: 2/2"):
        join(out)
    prepare_parts(wanted, out, [2], 2)
    join(out)
    assert_same_result(out, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"skipped": ["many"] * 5},
        {"unreadable": [7]},
        {"loss": {"characters": "many"}},
        {"first_piece": -1},
        {"num_units": 1 << 60},
    ],
)
def test_a_report_with_values_of_another_form_counts_as_missing(
    wanted: PrepareRequest, tmp_path: Path, change: dict
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    change_report(out, Part(1, 1), change)
    with pytest.raises(DataError, match="1 of 1 parts not complete: 1/1"):
        join(out)


def test_reports_of_other_pieces_are_refused(wanted: PrepareRequest, expected: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1, 2], 2)
    change_report(out, Part(2, 2), {"first_piece": 0})
    with pytest.raises(DataError, match=r"are not consecutive pieces of one source; remove .*parts and run all parts"):
        join(out)
    shutil.rmtree(out / ".partial/parts")
    prepare_parts(wanted, out, [1, 2], 2)
    join(out)
    assert_same_result(out, expected)


def test_rows_of_another_size_than_the_report_are_not_read(wanted: PrepareRequest, tmp_path: Path) -> None:
    prepare_parts(wanted, tmp_path / "out", [1], 1)
    folder = tmp_path / "out/.partial/parts" / Part(1, 1).folder_name
    report = reports.load_report(folder)
    assert report is not None and reports.load_rows(folder, report) is not None
    descr = np.lib.format.dtype_to_descr(UNIT_ROW)
    with open(folder / reports.ROWS_FILE, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (10**12,)})
        file.write(bytes(UNIT_ROW.itemsize))
    assert reports.load_rows(folder, replace(report, num_units=10**12)) is None


def test_shards_of_tokens_that_were_made_again_are_not_taken(wanted: PrepareRequest, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    join_shards(out, Part(1, 1))
    tokens = TokenFolder(out / ".partial/units")
    assert load_written(plan_join(out / ".partial", tokens))
    change_report(out, Part(1, 1), {"is_fast": True})
    assert not load_written(plan_join(out / ".partial", tokens)), "other tokens may have the same counts"


@pytest.mark.parametrize("record", [7, {}, {"raw_data": 7, "zip_data": None}, {"samples": 1}, {"hashes": []}])
def test_a_record_of_a_shard_that_is_not_of_the_plan_is_not_taken(
    wanted: PrepareRequest, expected: Path, tmp_path: Path, record: object
) -> None:
    out = tmp_path / "out"
    prepare_parts(wanted, out, [1], 1)
    join_shards(out, Part(1, 1))
    file = next((out / ".partial").rglob("shards.json"))
    content = json.loads(file.read_text())
    for row in content["shards"]:
        row[2] = row[2] | record if isinstance(record, dict) and record else record
    file.write_text(json.dumps(content))
    join(out)
    assert_same_result(out, expected)
