"""Lines of a log -> columns: launches told apart, and tokens where a batch is missing."""

import json

import numpy as np
import pytest

from llmfoundry_lite.report.reading import count_tokens, parse_log, read_run


def line(batch, elapsed, launch=1):
    return json.dumps({"batch": batch, "launch": launch, "time/elapsed_seconds": elapsed}).encode() + b"\n"


def test_tokens_of_a_batch_are_not_known_where_the_one_before_it_is_missing():
    np.testing.assert_array_equal(count_tokens([1, 2, 4], np.array([10.0, 20.0, 40.0])), [10, 10, np.nan])


def test_a_clock_that_starts_again_is_another_launch():
    """One that knew nothing of the others' log has numbered itself from 1 as they did."""
    log = parse_log([line(1, 5.0), line(2, 6.0), line(3, 1.0), line(4, 2.0)])
    assert log.launch.tolist() == [1, 1, 2, 2]


BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "content", [BOMB, "a: &a [*a]", "!!python/name:os.system", "[" * 5000, "a: !!int x"], ids=range(5)
)
def test_a_configuration_that_no_run_writes_is_passed_over(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "metrics.jsonl").write_bytes(line(1, 1.0))
    run = read_run(tmp_path)
    assert run.config is None and "config.yaml is not YAML: passed over" in run.notes


def test_checkpoints_in_a_place_that_is_not_resolved_are_not_looked_for(tmp_path):
    (tmp_path / "config.yaml").write_text("save_folder: http://127.0.0.1:9/${oc.env:SECRET}")
    (tmp_path / "metrics.jsonl").write_bytes(line(1, 1.0))
    notes = read_run(tmp_path).notes
    assert any("its checkpoints are in http://127.0.0.1:9/${oc.env:SECRET}; give that folder" in note for note in notes)
