"""One fault of every kind while three islands train: the bench itself, which judges its own runs."""

import json

import pytest

from benchmarks.islands import faults

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def test_every_batch_counts_once_whatever_breaks_and_nothing_hangs(tmp_path):
    report = faults.run(num_faults=len(faults.SHARES), seed=1, out=tmp_path / "out", keep=tmp_path / "run")
    assert {fault["kind"] for fault in report["faults"]} == set(faults.SHARES)
    assert report["passed"], report
    assert json.loads((tmp_path / "out/islands-faults.json").read_text())["passed"]
