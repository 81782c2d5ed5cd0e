"""`llmfoundry-lite plan --check RUN`: the table of measured and predicted rates, a row for each segment of a run."""

import re
from dataclasses import dataclass, replace

import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.schema import as_dict
from tests.helpers.reported import H100, TOKENS, on_cpu, on_gpu, record, write_run

BATCH_SECONDS = 0.01
A100_PEAK_FLOPS = 312e12
PUBLISHED_A100_RATE = 142_830
"""Tokens/s of each of 8 A100 in LLM Foundry's table, with 2 microbatches of 40 samples of 2,048 tokens."""
ROW = re.compile(r" *(?P<batches>\S+)  (?P<devices>\d+ x \S+) +(?P<measured>[\d,]+) +(?P<predicted>[\d,]+)  [+-]\S+%")


@dataclass(kw_only=True)
class Row:
    """A segment's row of the table. Rates are tokens/s of each device."""

    batches: str
    devices: str
    measured_rate: int
    predicted_rate: int


def parse_row(line: str) -> Row:
    """Parse a row such as `      1-10  8 x A100-80GB       12,500    142,000  +1036.0%`."""
    match = ROW.fullmatch(line)
    assert match is not None, line
    return Row(
        batches=match["batches"],
        devices=match["devices"],
        measured_rate=int(match["measured"].replace(",", "")),
        predicted_rate=int(match["predicted"].replace(",", "")),
    )


def lines_of_check(run: str, capsys) -> list[str]:
    """Check a run and return what is printed below the title and the head of the table."""
    assert main.run(["plan", "--check", run]) == 0
    _title, _head, *lines = capsys.readouterr().out.splitlines()
    return lines


# ------------------------------------------------------------------------- a run that moved from GPUs to a CPU


@pytest.fixture
def moved_run(tmp_path) -> str:
    """MPT-125M: batches 1 to 10 on eight A100, 11 to 20 on a CPU."""
    settings = as_dict(load_train_config(["mpt-125m", "global_train_batch_size=640"]).config)
    mfu = 12.5e12 / A100_PEAK_FLOPS  # which tells that the log's devices are A100
    records = []
    for batch in range(1, 21):
        records.append(record(batch, num_devices=8, seconds=BATCH_SECONDS, throughput__device__mfu=mfu))

    segment_on_a100 = on_gpu(1, 10, 8, "NVIDIA A100-SXM4-80GB")
    segment_on_a100 = replace(segment_on_a100, device_train_microbatch_size=40, shard_degree=8)
    return write_run(tmp_path / "run", records, [segment_on_a100, on_cpu(11, 20)], **settings)


def test_a_segment_s_measured_rate_stands_beside_the_predicted_one(moved_run, capsys):
    row = parse_row(lines_of_check(moved_run, capsys)[0])
    assert row.batches == "1-10"
    assert row.devices == "8 x A100-80GB"
    assert row.measured_rate == TOKENS / BATCH_SECONDS / 8
    assert row.predicted_rate == pytest.approx(PUBLISHED_A100_RATE, rel=0.1)


def test_a_segment_on_an_unknown_device_is_left_out_with_the_reason(moved_run, capsys):
    assert lines_of_check(moved_run, capsys)[1] == "11-20: AMD EPYC is not in the table, no prediction"


def test_the_source_of_a_prediction_is_named_last(moved_run, capsys):
    assert lines_of_check(moved_run, capsys)[-1].startswith("predicted A100-80GB: software of 2023: ")


def test_a_run_without_its_configuration_is_refused(moved_run, tmp_path, capsys):
    (tmp_path / "run/config.yaml").unlink()
    assert main.run(["plan", "--check", moved_run]) == 2
    assert "config.yaml is not there; it says what was trained" in capsys.readouterr().err


def test_a_layer_that_says_what_it_is_like_is_predicted_as_that_layer(tmp_path, capsys, monkeypatch):
    (tmp_path / "alike_in_checks.py").write_text("raise SystemExit\nclass Ffn:\n    like = 'mptmlp'\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "python:alike_in_checks:Ffn"
    settings = as_dict(load_train_config(["mpt-125m", f"model.ffn_config.ffn_type={name}"]).config)
    run = write_run(tmp_path / "run", [record(1, num_devices=1, seconds=1.0)], [on_cpu(1, 1)], **settings)
    lines = lines_of_check(run, capsys)
    assert f"predicted with {name} (model.ffn_config.ffn_type) like mptmlp of width 3072, as the class says" in lines


def test_a_run_with_a_layer_of_its_own_is_refused_once(tmp_path, capsys):
    ffn = "model.ffn_config.ffn_type=python:mine:Ffn"
    settings = as_dict(load_train_config(["mpt-125m", ffn]).config)
    records = [record(batch, device=H100, num_devices=2, seconds=BATCH_SECONDS) for batch in range(1, 21)]
    run = write_run(tmp_path / "run", records, [on_gpu(1, 10), on_gpu(11, 20)], **settings)
    assert main.run(["plan", "--check", run]) == 2
    assert capsys.readouterr().err == (
        "error: plan: nothing is known of the time of python:mine:Ffn (model.ffn_config.ffn_type), which is code of "
        "your own; so there is no prediction to compare this run with\n"
    )


# ------------------------------------------------------------------------ a run that changed its layout on two H100


@pytest.fixture(scope="module")
def run_of_five_layouts(tmp_path_factory) -> str:
    """MPT-125M on two H100, with another layout for each ten batches."""
    settings = as_dict(load_train_config(["mpt-125m"]).config)
    settings["run_name"] = "${oc.env:HOME}"
    records = [record(batch, device=H100, num_devices=2, seconds=BATCH_SECONDS) for batch in range(1, 51)]
    layouts: list[dict[str, str]] = [
        {},
        {"pipeline": "2 stages, 1f1b"},
        {"context": "2, heads"},
        {"pipeline": "3 stages, gpipe"},
        {"pipeline": "\x1b[31m"},
    ]
    segments = []
    for index, layout in enumerate(layouts):
        segment = on_gpu(10 * index + 1, 10 * index + 10)
        segments.append(replace(segment, device_train_microbatch_size=16, sharding="NO_SHARD", **layout))
    return write_run(tmp_path_factory.mktemp("layouts") / "run", records, segments, **settings)


def test_variables_in_the_name_of_a_run_are_not_resolved(run_of_five_layouts, capsys):
    """The run may be somebody else's, so its name must not print what this environment holds."""
    assert main.run(["plan", "--check", run_of_five_layouts]) == 0
    assert capsys.readouterr().out.startswith("${oc.env:HOME}: ")


def test_a_segment_in_two_stages_is_predicted_with_what_stages_wait(run_of_five_layouts, capsys):
    """Each stage waits 1 of 17 microbatches' time, and more for the stage that has the head."""
    lines = lines_of_check(run_of_five_layouts, capsys)
    plain, in_stages = (parse_row(line) for line in lines[:2])
    assert in_stages.batches == "11-20"
    assert 0.6 < in_stages.predicted_rate / plain.predicted_rate < 16 / 17


def test_a_segment_of_divided_samples_is_predicted_with_their_exchange(run_of_five_layouts, capsys):
    lines = lines_of_check(run_of_five_layouts, capsys)
    plain, divided = parse_row(lines[0]), parse_row(lines[2])
    assert divided.batches == "21-30"
    assert 0.5 < divided.predicted_rate / plain.predicted_rate < 1


def test_a_segment_whose_layout_is_not_possible_has_no_prediction(run_of_five_layouts, capsys):
    reason = "pp_config.pipeline_parallel_degree: 3 does not divide the 2 "
    assert lines_of_check(run_of_five_layouts, capsys)[3].startswith(f"31-40: no prediction: {reason}")


def test_a_segment_whose_layout_is_not_readable_has_no_prediction(run_of_five_layouts, capsys):
    line = lines_of_check(run_of_five_layouts, capsys)[4]
    assert line.startswith("41-50: no prediction: ")
