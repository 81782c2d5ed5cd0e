"""`lf.runs` and `lf.batches`: what a run is at, and the samples it was trained on."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import llmfoundry_lite as lf
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.evaluation.loaded import model_of
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.ranks.status import write_status
from llmfoundry_lite.report.reading import read_run
from llmfoundry_lite.report.report import report
from llmfoundry_lite.report.sample_texts import load_earlier_models
from tests.helpers.launch import ROOT
from tests.helpers.present import leave_out_companions, needs

pytestmark = pytest.mark.multiprocess
watches = needs("llmfoundry_ops")


def test_without_the_companion_that_watches_runs_it_is_named(monkeypatch):
    leave_out_companions(monkeypatch)
    with pytest.raises(lf.UserError, match=r"^lf.runs: needs the companion llmfoundry_ops$"):
        lf.runs()


def test_a_report_without_the_reader_of_its_export_shows_texts_of_the_newest_checkpoint(here, tmp_path, monkeypatch):
    moved = shutil.copytree(here / "runs/tiny", tmp_path / "tiny")
    assert run_command(["checkpoint", "export", str(moved), str(moved / "huggingface")]) == 0
    assert json.loads((moved / "huggingface/config.json").read_text())["model_type"] == "gpt2"
    options: dict[str, Any] = {"prompts": ["def"], "temperature": 0.0}
    (told,) = report([str(moved)], **options)["samples"]
    leave_out_companions(monkeypatch)
    assert report([str(moved)], **options)["samples"] == [told]
    shutil.rmtree(moved / "checkpoints")
    without = report([str(moved)], **options)
    assert without["samples"] == [] and without["runs"][0]["notes"][-1].startswith("no texts: ")


def test_the_first_texts_are_of_the_run_s_own_initial_weights(here):
    """Which an exported model's configuration cannot tell."""
    own = model_of(locate_and_load_model("runs/tiny", device=torch.device("cpu"))).config
    other = replace(own, init_config=replace(own.init_config, name="baseline_", init_std=9.0))
    (batch, initial), *_ = load_earlier_models(read_run("runs/tiny"), MPT(other))
    assert batch == 0 and max(parameter.std() for parameter in initial.parameters() if parameter.ndim > 1) < 3.0


@watches
def test_a_run_that_is_still_written_stands_as_it_is_now(here, tmp_path):
    run = shutil.copytree(here / "runs/tiny", tmp_path / "runs/tiny")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:30])
    write_status(run, "running", 3)
    (found,) = lf.runs(tmp_path / "runs")
    assert (found.batch, found.has_ended) == (4, False)
    assert repr(found).startswith(f"<{run}: running at batch 4, loss ")
    assert [batch.batch for batch in lf.batches(run, 4, 5)] == [4, 5]  # the log does not have 5 yet
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    found.look()
    assert found.batch == 6


@watches
def test_a_folder_without_runs_has_none_and_no_folder_is_an_error(tmp_path):
    assert lf.runs(tmp_path) == []
    with pytest.raises(lf.UserError, match="nowhere is not a folder"):
        lf.runs(tmp_path / "nowhere")


def test_batches_across_the_end_of_an_epoch_have_the_digests_of_the_log(here, tmp_path):
    length = len(lf.open_dataset("data/mine", split="train", global_batch_size=8, max_seq_len=32))
    before = [batch.digest for batch in lf.batches("runs/tiny", 1, length + 2)]
    assert len(set(before)) == length + 2
    alone = [batch.digest for batch in lf.batches("runs/tiny", length, length + 2)]
    assert alone == before[-3:]
    assert before[:6] == lf.read_run("runs/tiny").log.digest


@watches
def test_a_run_is_taken_where_its_path_is(here):
    (watched,), read = lf.runs("runs"), lf.read_run("runs/tiny")
    assert repr(lf.load(watched)) == repr(lf.load(read)) == repr(lf.load("runs/tiny"))
    (batch,) = lf.batches(lf.read_run(watched), np.int64(3), shuffle_seed=np.int64(3))
    assert batch.digest == read.log.digest[2]


@pytest.mark.parametrize("wrong", ["3", 3.0, 0, None, [3, 4]])
def test_a_batch_that_is_no_whole_number_is_refused(here, wrong):
    with pytest.raises(lf.UserError, match=r"batches: first is .*, expected a whole number from 1 on"):
        lf.batches("runs/tiny", wrong)


def test_one_task_is_left_out_by_its_name(here):
    (task,) = lf.compare("results/base.json", Path("results/ours.json"), skip="piqa/0-shot").tasks
    assert task.task == "arc_easy/0-shot"


@pytest.mark.slow
def test_a_program_that_stops_amid_batches_ends_without_a_word(here):
    program = "import llmfoundry_lite as lf; batches = lf.batches('runs/tiny', 1, 5); print(next(batches).batch)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(
        command, cwd=here, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, check=True
    )
    assert (ended.stdout, ended.stderr) == (b"1\n", b"")


def test_samples_of_other_settings_or_data_are_never_passed_off_as_the_runs(here, tmp_path):
    with pytest.raises(lf.UserError, match="the order of the samples depends on it"):
        next(lf.batches("runs/tiny", 1, shuffle_seed=4))
    with pytest.raises(lf.UserError, match="gone/train does not hold its data here"):
        lf.batches("runs/tiny", 1, local=Path("gone"))
    with pytest.raises(lf.UserError, match=r"did you mean train_loader\.dataset\.shuffle_seed"):
        lf.batches("runs/tiny", 1, shuffle_sead=4)
    with pytest.raises(lf.UserError, match="batches 5 to 3 given"):
        lf.batches("runs/tiny", 5, 3)


def test_a_run_with_a_loader_of_the_users_own_is_refused(here, tmp_path):
    run = shutil.copytree(here / "runs/tiny", tmp_path / "tiny")
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"train_loader": {"name": "python:a:b"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(lf.UserError, match="is python:a:b, whose order only its own code knows"):
        lf.batches(run, 1)
