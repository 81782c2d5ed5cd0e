"""Layers divided among ranks: the run is the run it would be without, and its checkpoints go both ways."""

from pathlib import Path

import pytest

from tests.helpers.tiny import tiny_config, values, write_data
from tests.training.runs import metrics, run

TWO = {"tp_config": {"tensor_parallel_degree": 2}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def divisible(data: Path, **changes):
    options = {"model__attn_config__fused_qkv": False, "autoresume": True, "max_duration": "6ba"}
    return tiny_config(data, **{**options, **changes})


def same_run(tmp_path: Path, one: str, other: str, relative: float = 1e-4) -> None:
    ours, theirs = metrics(tmp_path, one), metrics(tmp_path, other)
    for key in ("data/digest", "time/sample", "time/token"):
        assert values(ours, key) == values(theirs, key)
    for key in ("loss/train/total", "grad_norm"):
        assert values(ours, key) == pytest.approx(values(theirs, key), rel=relative)


def test_a_divided_run_is_the_run_of_one_device(tmp_path, data):
    config = divisible(data, eval_interval="3ba", max_duration="3ba")
    run(tmp_path, config, "whole")
    run(tmp_path, config, "divided", 4, **TWO)
    same_run(tmp_path, "divided", "whole")
    assert values(metrics(tmp_path, "divided"), "eval/loss") == pytest.approx(
        values(metrics(tmp_path, "whole"), "eval/loss"), rel=1e-4
    )
