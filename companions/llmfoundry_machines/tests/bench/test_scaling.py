"""Scaling over counts of devices: what is launched, tabled, and refused."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

from llmfoundry_lite.cli.main import app, run
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_machines.bench import scaling
from llmfoundry_machines.bench.scaling import Point
from llmfoundry_planner.plan.calibrate import read_steps
from llmfoundry_planner.plan.plan import hardware_named
from tests.helpers.reported import record, write_run
from tests.helpers.tiny import tiny_config, write_config

SAME = {"num_parameters": 10, "seq_len": 64, "precision": "fp32", "sharding": "FULL_SHARD", "device_name": "A100"}


def point(num_devices, batch_size, seconds, **changes):
    tokens = batch_size * 64
    same = SAME | changes
    return Point(f"runs/{num_devices}", num_devices, batch_size, same, 60 * tokens, tokens, seconds, 1e6, {})


def test_one_batch_on_more_devices_is_strong_scaling():
    """4 devices take 8 s for 100 samples, 16 take 2.5 s: 3.2 times as fast on 4 times as many."""
    points = [point(4, 100, 8.0), point(16, 100, 2.5)]
    rows = scaling.describe_points(scaling.determine_kind(points), points)
    assert [row["kind"] for row in rows] == ["strong", "strong"]
    assert [row["tokens_per_second"] for row in rows] == [800, 2560]
    assert [row["flops_per_device"] for row in rows] == [12_000, 9_600]
    assert [row["mfu"] for row in rows] == pytest.approx([0.012, 0.0096])
    assert (rows[1]["speed_up"], rows[1]["efficiency"]) == pytest.approx((3.2, 0.8))


def test_a_batch_that_grows_with_the_devices_is_weak_scaling():
    points = [point(1, 4, 1.0), point(4, 16, 1.25)]
    assert scaling.determine_kind(points) == "weak"
    assert [row["efficiency"] for row in scaling.describe_points("weak", points)] == [1.0, 0.8]


def test_a_run_s_first_two_batches_are_no_part_of_its_time(tmp_path):
    """The line of an evaluation before the first batch has no time, and takes the place of none."""
    seconds = [100.0, 50.0, 2.0, 3.0, 4.0]
    records = [record(batch, seconds=one, num_devices=2) for batch, one in enumerate(seconds, start=1)]
    lines = [{"batch": 0, "eval/loss": 5.0}, *records]
    config = load_train_config([write_config(tmp_path / "run.yaml", tiny_config(tmp_path))]).config
    found = scaling.read_point(write_run(tmp_path / "run", lines, **as_dict(config)))
    assert (found.num_devices, found.batch_size, found.seconds) == (2, 8, 3.0)


def test_a_run_whose_batches_differ_in_size_is_no_point_of_a_table(tmp_path):
    """One time of a batch would stand for all of them."""
    records = [record(batch, seconds=1.0, num_devices=1) for batch in (1, 2, 3)]
    values = tiny_config(tmp_path, batch_size_schedule={"2ba": 16})
    config = load_train_config([write_config(tmp_path / "run.yaml", values)]).config
    run = write_run(tmp_path / "run", records, **as_dict(config))
    with pytest.raises(DataError, match="batch_size_schedule: a table needs runs whose batches have one size"):
        scaling.read_point(run)


def test_a_table_says_which_layers_it_counts_parts_like(tmp_path, capsys, monkeypatch):
    (tmp_path / "alike_in_tables.py").write_text("raise SystemExit\nclass Ffn:\n    like = 'mptmlp'\n")
    monkeypatch.syspath_prepend(tmp_path)
    records = [record(batch, seconds=1.0, num_devices=1) for batch in (1, 2, 3)]
    name = "python:alike_in_tables:Ffn"
    points = []
    for folder, words in {"own": [f"model.ffn_config.ffn_type={name}"], "ours": []}.items():
        path = write_config(tmp_path / "run.yaml", tiny_config(tmp_path))
        run = write_run(tmp_path / folder, records, **as_dict(load_train_config([path, *words]).config))
        points.append(scaling.read_point(run))
    own, ours = points
    assert own.flops_per_step == ours.flops_per_step
    assert own.conditions["num_parameters"] == ours.conditions["num_parameters"]
    report = scaling.table_runs([tmp_path / "own"])
    printed = capsys.readouterr().out
    assert (
        f"count {name} (model.ffn_config.ffn_type) like mptmlp of width" in printed
        and ", as the class says." in printed
    )
    assert "not_counted" not in report and not ours.counted_alike


def test_a_table_says_which_parts_it_does_not_count(tmp_path, capsys):
    records = [record(batch, seconds=1.0, num_devices=1) for batch in (1, 2, 3)]
    config = load_train_config(
        [write_config(tmp_path / "run.yaml", tiny_config(tmp_path)), "model.ffn_config.ffn_type=python:mine:Ffn"]
    ).config
    report = scaling.table_runs([write_run(tmp_path / "run", records, **as_dict(config))])
    part = "python:mine:Ffn (model.ffn_config.ffn_type)"
    assert report["not_counted"] == part
    assert f"Parameters, FLOP/s and MFU are without {part}, so they are too low." in capsys.readouterr().out
    assert "not_counted" not in scaling.report_points({"strong": [point(1, 4, 1.0)]}, None, None, "", None)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (point(2, 16, 1.0, precision="amp_bf16"), "precision is fp32 in runs/1 and amp_bf16 in runs/2: not one table"),
        (point(2, 16, 1.0, seq_len=128), "seq_len is 64 in runs/1 and 128 in runs/2"),
        (point(2, 24, 1.0), r"batches of 16 on 1, 24 on 2 devices: neither one batch \(strong\) nor one for each"),
        (point(1, 16, 1.0), "runs on 1, 1 devices: a table needs one run for each count"),
    ],
)
def test_runs_that_differ_in_more_than_their_devices_are_refused(other, words):
    with pytest.raises(DataError, match=words):
        scaling.determine_kind([point(1, 16, 1.0), other])


@pytest.mark.parametrize("block", ["tp_config.tensor", "pp_config.pipeline", "cp_config.context"])
def test_runs_whose_layers_blocks_or_samples_are_divided_otherwise_are_refused(block):
    plain, divided = (
        scaling.name_layout(load_train_config(["mpt-125m", "h100-8", *overrides]).config)
        for overrides in ([], [f"{block}_parallel_degree=2"])
    )
    words = f"sharding is FULL_SHARD in runs/1 and FULL_SHARD, {block[10:]}_parallel_degree 2 in runs/2"
    with pytest.raises(DataError, match=words):
        scaling.determine_kind([point(1, 16, 1.0, sharding=plain), point(2, 16, 1.0, sharding=divided)])


def test_finished_runs_take_no_option_of_a_launch(capsys):
    assert run(["bench", "scaling", "--runs", "a,b", "--devices", "1,2", "precision=fp32", "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert "--runs: finished runs say what they were, nothing is launched; leave out --devices, precision" in error


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_launched():
    with pytest.raises(ConfigError, match="--batch-size: 6 samples do not divide over 4 devices"):
        scaling.run([1, 4], "tiny", 32, 6, "fp32", 1, 1)
    with pytest.raises(ConfigError, match="--dtype: 'fp8' given, expected one of fp32, bf16"):
        scaling.run([1, 4], "tiny", 32, 8, "fp8", 1, 1)


def test_of_a_launch_that_is_refused_the_rank_s_own_word_is_told(monkeypatch):
    said = "warning: one\nerror: model.d_model: 7 given\nE1123 failed\n=====\n"
    failed = subprocess.CompletedProcess([], 2, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    settings = {"shape": "tiny", "seq_len": 32, "batch_size": 2, "num_steps": 1, "overrides": []}
    with pytest.raises(RuntimeError, match=r"^model.d_model: 7 given$"):
        scaling.launch(1, settings, "fp32")


def test_every_point_is_launched_once_a_round_and_all_of_it_is_told(tmp_path, monkeypatch):
    launched = []

    def launch(num_devices, settings, dtype):
        launched.append((num_devices, settings["batch_size"]))
        return point(num_devices, settings["batch_size"], 1.0 / num_devices)

    monkeypatch.setattr(scaling, "launch", launch)
    monkeypatch.setattr(scaling, "measure_in_a_process", lambda task: {"step_seconds": [1.0], "flops": 1e6})
    report = scaling.run([2, 1, 4], "tiny", 64, 8, "fp32", 1, 2, out=tmp_path)
    assert sorted(set(launched)) == [(1, 2), (1, 8), (2, 4), (2, 8), (4, 8)] and len(launched) == 10
    assert [(row["kind"], row["num_devices"]) for row in report["rows"]] == [
        *(("strong", n) for n in (1, 2, 4)),
        *(("weak", n) for n in (1, 2, 4)),
    ]
    assert json.loads((tmp_path / "scaling.json").read_text())["asked"]["precision"] == "fp32"
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    options = "--devices 1,2,4 --shape tiny --seq-len 64 --batch-size 8 --dtype fp32 --num-steps 1 --num-rounds 2"
    assert f"`llmfoundry-lite bench scaling {options}`" in (tmp_path / "scaling.md").read_text()


def test_a_launch_that_fails_ends_the_bench_with_its_last_words(monkeypatch):
    def launch(num_devices, settings, dtype):
        raise RuntimeError("2 devices: exit code 2\nmodel.d_model: 7 given")

    monkeypatch.setattr(scaling, "launch", launch)
    monkeypatch.setattr(scaling, "measure_in_a_process", lambda task: {"step_seconds": [1.0], "flops": 1e6})
    with pytest.raises(DataError, match=r"^bench scaling: model.d_model: 7 given$"):
        scaling.run([1, 2], "tiny", 64, 8, "fp32", 1, 1)


@pytest.mark.long
def test_real_launches_on_one_and_two_ranks_and_their_table(tmp_path):
    options = ["--shape", "tiny", "--seq-len", "32", "--batch-size", "4", "--dtype", "fp32", "--num-steps", "2"]
    command = ["bench", "scaling", "--devices", "1,2", *options, "--num-rounds", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["kind"], row["num_devices"], row["batch_size"]) for row in report["rows"]] == [
        *(("strong", 1, 4), ("strong", 2, 4), ("weak", 1, 2), ("weak", 2, 4)),
    ]
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])
    steps = list(read_steps(report["rows"], hardware_named("h100")).values())
    assert [(step.layout.world_size, step.config.global_train_batch_size) for step in steps] == [(1, 4), (2, 4), (1, 2)]
    assert steps[0].config.model.d_model == 64 and isinstance(steps[0].config.device_train_microbatch_size, int)
