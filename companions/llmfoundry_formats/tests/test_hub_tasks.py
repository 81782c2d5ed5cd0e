"""Tasks of the Hub, from folders in its format."""

import datetime
import json
from dataclasses import replace

import datasets
import pytest

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.task_files import read_rows
from tests.evaluation.test_tasks import task


def test_a_hub_data_set_is_read_through_the_map_of_its_columns(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    row = {"title": "Ice.", "question": "Cold?", "options": ["yes", "no"], "label": 0}
    (folder / "test.jsonl").write_text(json.dumps(row))
    config = task(
        dataset_uri=f"hf://{folder}",
        hf_loading_vars={"split": "test"},
        hf_parsing_map={"query": ["title", "question"], "choices": ["options"], "gold": ["label"]},
    )
    assert read_rows(config) == [{"query": "Ice. Cold?", "choices": ["yes", "no"], "gold": 0}]
    with pytest.raises(DataError) as caught:
        read_rows(replace(config, hf_parsing_map={"query": ["tytle"]}))
    assert str(caught.value) == (
        f"t: hf_parsing_map: query: hf://{folder} has no column 'tytle'; there are: title, question, options, label"
    )
    with pytest.raises(DataError, match=r"has splits test; choose one: hf_loading_vars: \{split: …\}"):
        read_rows(replace(config, hf_loading_vars={}))


@pytest.mark.parametrize("name", ["set[1]", "set*", "set?"])
def test_a_folder_of_rows_is_read_and_no_other_that_its_name_matches_as_a_pattern(tmp_path, name):
    for folder, answer in ((name, "ours"), ("set1", "theirs"), ("set2", "theirs")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text(json.dumps({"context": "a", "continuation": answer}))
    where = {"dataset_uri": f"hf://{tmp_path / name}", "hf_loading_vars": {"split": "test"}}
    assert read_rows(task("language_modeling", **where)) == [{"context": "a", "continuation": "ours"}]


def test_dates_in_a_column_of_a_hub_data_set_are_text(tmp_path):
    (tmp_path / "set").mkdir()
    when = datetime.datetime(2024, 1, 2, 3)
    columns = {"context": ["a"], "continuation": ["b"], "when": [when], "day": [when.date()]}
    columns |= {"within": [{"days": [when.date()], "raw": b"\xff"}]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "set/test.parquet")
    where = {"dataset_uri": f"hf://{tmp_path}/set", "hf_loading_vars": {"split": "test"}}
    rows = read_rows(task("language_modeling", **where))
    expected = {"context": "a", "continuation": "b", "when": "2024-01-02 03:00:00", "day": "2024-01-02"}
    assert rows == [{**expected, "within": {"days": ["2024-01-02"], "raw": "b'\\xff'"}}]
    json.dumps(rows)  # as a fingerprint is made of
