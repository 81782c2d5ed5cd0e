"""Lines of a log -> columns: launches told apart, and tokens where a batch is missing."""

import json
from collections.abc import Mapping

import numpy as np
import pytest

from llmfoundry_lite.bounded import MAX_YAML_BYTES, TooLargeError
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.report.log import MAX_NAMES, count_tokens, parse_log
from llmfoundry_lite.report.reading import OBJECT_STORES, find_checkpoint_folder, read_run
from tests.helpers.bombs import little_memory


def line(batch, elapsed, launch=1):
    return json.dumps({"batch": batch, "launch": launch, "time/elapsed_seconds": elapsed}).encode() + b"\n"


def test_tokens_of_a_batch_are_not_known_where_the_one_before_it_is_missing():
    np.testing.assert_array_equal(count_tokens([1, 2, 4], np.array([10.0, 20.0, 40.0])), [10, 10, np.nan])


def test_a_clock_that_starts_again_is_another_launch():
    """One that knew nothing of the others' log has numbered itself from 1 as they did."""
    log = parse_log([line(1, 5.0), line(2, 6.0), line(3, 1.0), line(4, 2.0)])
    assert log.launch.tolist() == [1, 1, 2, 2]


def test_a_launch_that_trains_batches_again_is_another_whatever_its_number_and_clock():
    """It came from a save after batch 1, with the clock of that save or of a slower machine."""
    for clock in (1.5, 9.0):
        log = parse_log([line(1, 1.0), line(2, 2.0), line(3, 3.0), line(2, clock), line(3, clock + 1)])
        assert log.launch.tolist() == [1, 2, 2] and [branch["batch"].tolist() for branch in log.dead] == [[2, 3]]


def test_a_launch_that_carries_on_is_another_by_its_number():
    log = parse_log([line(1, 1.0), line(2, 2.0), line(3, 3.0, launch=2), line(4, 4.0, launch=2)])
    assert log.launch.tolist() == [1, 1, 2, 2] and log.num_launches == 2


def test_a_line_that_adds_to_a_batch_is_of_the_same_launch():
    log = parse_log([line(1, 1.0), line(2, 2.0), line(2, 2.0)[:-2] + b', "eval/loss": 3.0}\n', line(3, 3.0)])
    assert log.launch.tolist() == [1, 1, 1] and log.num_launches == 1 and not log.dead


def record(batch, **numbers):
    return json.dumps({"batch": batch, "launch": 1, **numbers}).encode() + b"\n"


def test_a_log_is_a_mapping_of_every_number_to_its_column():
    digest = {"data/digest": "0f"}
    log = parse_log(
        [
            record(1, lr=0.1, **digest),
            record(2, lr=0.2, grad_norm=None),
            record(2, lr=0.3, grad_norm=5.0),  # a batch that was trained again, or written again
            record(3, **{"eval/loss": 2.5}),
        ]
    )
    assert isinstance(log, Mapping) and list(log) == ["batch", "launch", "lr", "grad_norm", "eval/loss"]
    assert len(log) == 5 and {len(column) for column in dict(log).values()} == {3} and "data/digest" not in log
    np.testing.assert_array_equal(log["lr"], [0.1, 0.3, np.nan])
    np.testing.assert_array_equal(log["grad_norm"], [np.nan, 5.0, np.nan])
    assert log["batch"].tolist() == [1, 2, 3] and log["batch"].dtype == np.int64
    assert log.digest == ["0f", None, None] and repr(log) == "<batches 1 to 3: batch, launch, lr, grad_norm, eval/loss>"


def test_a_loss_is_not_finite_where_the_file_has_null_and_not_where_it_has_none():
    """The line of an evaluation before the first batch has no training loss."""
    lines = [
        record(0, **{"eval/loss": 3.0}),
        record(1, **{"loss/train/total": None}),
        record(2, **{"loss/train/total": 2.0}),
    ]
    assert parse_log(lines).not_finite == [1]


def test_dead_branches_have_the_same_columns():
    log = parse_log([record(1, lr=0.1), record(2, lr=0.2), record(3, lr=0.3), record(2, lr=0.4, launch=2)])
    assert log["lr"].tolist() == [0.1, 0.4]
    assert [branch["lr"].tolist() for branch in log.dead] == [[0.2, 0.3]]


def test_a_name_that_no_line_has_is_answered_with_the_nearest_and_all_others():
    log = parse_log([record(1, lr=0.1, **{"loss/train/total": None, "throughput/device/mfu": 0.5})])
    with pytest.raises(
        KeyError, match=r"no train/loss.*; it has batch, launch, lr, loss/train/total, throughput/device/mfu"
    ):
        log["train/loss"]
    with pytest.raises(KeyError, match="did you mean loss/train/total"):
        log["loss/train"]
    with pytest.raises(KeyError, match=r"did you mean throughput/device/mfu"):
        log["mfu"]
    assert log.get("train/loss") is None and np.isnan(log["loss/train/total"]).all()


def test_pandas_takes_a_log_for_a_table():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(parse_log([record(1, lr=0.1), record(2, grad_norm=2.0)]))
    assert list(frame.columns) == ["batch", "launch", "lr", "grad_norm"] and len(frame) == 2


def test_a_small_log_of_ever_new_names_takes_little_memory(tmp_path):
    lines = [record(batch, **{f"x{batch}": 1}) for batch in range(1, 4 * MAX_NAMES)]
    with little_memory(64):
        log = parse_log(lines)
    assert len(log) == MAX_NAMES and len(log.batch) == len(lines)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:MAX_NAMES]))
    run = read_run(tmp_path)
    assert "metrics.jsonl has 1,000 names of numbers or more: later ones are passed over" in run.notes


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
    assert any("in http://127.0.0.1:9/${oc.env:SECRET}, which is not resolved here; give" in note for note in notes)


def test_a_configuration_that_is_too_large_is_called_so(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"#" * (MAX_YAML_BYTES + 1))
    (tmp_path / "metrics.jsonl").write_bytes(line(1, 1.0))
    with pytest.raises(TooLargeError, match=r"config\.yaml has more than 4,194,304 bytes"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("recorded", "is_opened"),
    [
        ("s3://bucket/run", True),
        ("/scratch/run", True),
        ("file:///scratch/run", True),
        ("http://127.0.0.1:9/run", False),
        ("sftp://host/run", False),
        ("simplecache::http://127.0.0.1:9", False),
        ("${oc.env:SCRATCH}/run", False),
        ("s3://${oc.env:BUCKET}", False),
    ],
)
def test_a_recorded_url_is_opened_only_in_an_object_store(tmp_path, recorded, is_opened):
    folder, config = open_folder(tmp_path), {"save_folder": recorded}
    assert find_checkpoint_folder(folder, config, OBJECT_STORES) == (recorded if is_opened else None)
    (tmp_path / "checkpoints").mkdir()
    assert find_checkpoint_folder(folder, config, OBJECT_STORES) == (
        recorded if is_opened else folder.url + "/checkpoints"
    )


def test_a_recorded_url_is_opened_where_the_run_was_given_by_it():
    folder = open_folder("memory://read/far")
    inside, beside = "memory://read/far/saves", "memory://read/farther"
    assert find_checkpoint_folder(folder, {"save_folder": inside}, ()) == inside
    assert find_checkpoint_folder(folder, {"save_folder": beside}, ()) is None


def test_a_url_of_the_authors_choice_is_named_and_not_opened(tmp_path):
    (tmp_path / "config.yaml").write_text("save_folder: http://127.0.0.1:9/run")
    (tmp_path / "metrics.jsonl").write_bytes(line(1, 1.0))
    run = read_run(tmp_path)
    expected = "its checkpoints are in http://127.0.0.1:9/run, which is not opened unasked; give that folder instead"
    assert f"where it ran is not known: {expected}" in run.notes and run.saved_in is None
