"""Schedules played by ranks that sleep: what stages wait, beside the formula."""

import json

import pytest
import torch

from benchmarks import pipeline
from benchmarks.__main__ import run_benchmark
from llmfoundry_lite.errors import ConfigError
from llmfoundry_planner.plan.bubble import simulate_bubble


@pytest.mark.long
def test_a_schedule_waits_no_less_than_its_formula_says(tmp_path):
    options = ["--stages", "2", "--microbatches", "2,4", "--milliseconds", "50", "--num-repeats", "1"]
    assert run_benchmark(["pipeline", *options, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "pipeline.json").read_text())
    names = [row["schedule"] for row in report["rows"]]
    assert sorted(names) == sorted([*pipeline.SCHEDULES] * 2)
    for row in report["rows"]:
        assert row["measured"]["least"] > (row["formula"] or 0) - 0.02
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000
    assert "| 1f1b | 2 | 4 | 1 |" in (tmp_path / "pipeline.md").read_text()


def test_a_stage_sleeps_once_for_each_of_its_passes(monkeypatch):
    slept = []
    monkeypatch.setattr(pipeline.time, "sleep", slept.append)
    stage, x = pipeline.SleepingStage(0.5), torch.zeros(1, 4, requires_grad=True)
    output = stage(x)
    assert len(slept) == 1
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert len(slept) == 2
    torch.autograd.grad(output.sum(), stage.weight, retain_graph=True)
    assert len(slept) == 3
    pipeline.SleepingStage(0.5)(torch.zeros(1, 4)).sum().backward()
    assert len(slept) == 6


def test_rows_and_figure_come_from_what_was_measured(tmp_path, monkeypatch):
    asked = []

    def measure(degree, cases, pass_seconds, num_repeats):
        asked.append((degree, [tuple(case) for case in cases]))
        return [[count * 3 * pass_seconds * 1.5] for _, _, count in cases]

    monkeypatch.setattr(pipeline, "measure", measure)
    report = pipeline.run([2, 4], [3, 4], ["1f1b", "zbv"], 10, 1, tmp_path)
    assert asked[1] == (4, [("1f1b", 1, 4), ("zbv", 2, 4)])
    assert report["left_out"] == [f"{name}: 3 microbatches do not suit 4 stages" for name in ("1f1b", "zbv")]
    rows = {(row["schedule"], row["num_stages"], row["num_microbatches"]): row for row in report["rows"]}
    assert rows["1f1b", 4, 4]["formula"] == rows["1f1b", 4, 4]["played"] == 0.75
    assert rows["zbv", 2, 4]["formula"] is None
    assert rows["zbv", 2, 4]["played"] == pytest.approx(1 / 24)
    assert all(row["measured"]["median"] == pytest.approx(0.5) for row in rows.values())
    options = "--stages 2,4 --microbatches 3,4 --schedules 1f1b,zbv --milliseconds 10 --num-repeats 1"
    assert f"`python -m benchmarks pipeline {options}`" in (tmp_path / "pipeline.md").read_text()
    assert (tmp_path / "pipeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("stages", "schedules", "words"),
    [([2], ["zb"], "--schedules: 'zb' given, expected one of gpipe, 1f1b"), ([1], ["1f1b"], "--stages: 1 given")],
)
def test_what_cannot_be_played_is_refused(stages, schedules, words):
    with pytest.raises(ConfigError, match=words):
        pipeline.run(stages, [4], schedules)


@pytest.mark.parametrize("schedule", pipeline.WITH_FORMULA)
def test_a_schedule_played_waits_as_long_as_its_formula_says(schedule):
    runs = (2, 4) if schedule == "interleaved" else (1,)
    for stages in (1, 2, 4, 8, 16):
        for microbatches in (stages, 2 * stages, 64):
            for virtual in runs:
                played = simulate_bubble(schedule, stages, microbatches, virtual)
                assert played == pytest.approx(pipeline.bubble(schedule, stages, microbatches, virtual)), stages


def test_zero_bubble_waits_half_as_long_with_two_runs_of_blocks_on_each_device():
    assert simulate_bubble("zero_bubble", 4, 16, 2) == pytest.approx(pipeline.bubble("zero_bubble", 4, 16) / 2)
    late = [1.0] * 4 + [3.0] * 4  # the second runs of all devices
    assert simulate_bubble("zero_bubble", 4, 16, 2, loads=late) > simulate_bubble("zero_bubble", 4, 16, 2)


def test_zbv_waits_half_as_long_as_zero_bubble():
    """Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": from 2p - 1 microbatches on."""
    assert simulate_bubble("zbv", 8, 32, 2) == pytest.approx(pipeline.bubble("zero_bubble", 8, 32) / 2)
