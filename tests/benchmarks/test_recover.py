"""the recover benchmark: how it counts, and one small run of it."""

import json

import pytest

from benchmarks import recover
from benchmarks.recover import Fault, Log, count_differing


def test_a_log_is_read_as_it_grows(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.path.write_text('{"batch": 1}\n{"bat')
    assert log.read() == [{"batch": 1}]
    with log.path.open("a") as file:
        file.write('ch": 2}\n')
    assert log.read() == [{"batch": 1}, {"batch": 2}]


def test_a_batch_differs_that_is_missing_or_has_another_last_bit():
    record = {"loss/train/total": 1.5, "grad_norm": 0.25, "data/digest": "ab"}
    alone = {1: record, 2: record, 3: record}
    assert count_differing(alone, alone) == 0
    assert count_differing({1: record, 2: {**record, "grad_norm": 0.25000000000000006}}, alone) == 2


def test_faults_are_told_by_launcher_and_kind(tmp_path):
    faults = [
        Fault(recover.KILL_RANK, 2.0, 1.5, 1),
        Fault(recover.KILL_RANK, 4.0, 3.5, 3),
        Fault(recover.FREEZE_LAUNCHER, 0.25, None, 0),
    ]
    conditions = {"date": "2026-11-22", "machine": "one", "torch": "2.13.0", "load_average": 0.0}
    report = conditions | {"shape": "tiny", "seq_len": 128}
    recover.tell_faults(report, {"ours": faults, "peer": []}, {"ours": 0}, ["peer"], "--num-faults 3", tmp_path)
    assert "peer: did not come back from fault 1" in (tmp_path / "recover.md").read_text()
    rows = json.loads((tmp_path / "recover.json").read_text())["tables"][0]["rows"]
    assert rows == [
        ["ours", "a rank killed", "2", "3.00 (2.00 to 4.00)", "2.50 (1.50 to 3.50)", "2 (1 to 3)"],
        ["ours", "the launcher frozen", "1", "0.25", "", "0 (0 to 0)"],
    ]


@pytest.mark.long
def test_a_small_run_of_it_comes_back_each_time_and_loses_no_digit(tmp_path):
    report = recover.run("tiny", 128, 8, num_faults=4, peer_faults=0, seed=17, out=tmp_path)
    assert {fault["kind"] for fault in report["faults"]} == set(recover.SHARES)
    assert report["differing"] == {"llmfoundry-lite train": 0}
