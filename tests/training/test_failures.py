"""Failures in a run, and what its user sees."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from composer.core import Callback

from llmfoundry_lite.data.folder_locks import hold_folder
from llmfoundry_lite.training.optimizers import local
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config, write_data

pytestmark = pytest.mark.multiprocess


class PoisonGradient(Callback):
    """Makes one rank's gradient of one batch not a number."""

    def __init__(self, rank: int, batch: int):
        self.rank, self.batch = rank, batch

    def after_backward(self, state, logger):
        if int(os.environ["RANK"]) == self.rank and int(state.timestamp.batch) + 1 == self.batch:
            parameter = next(p for p in state.model.parameters() if p.grad is not None)
            local(parameter.grad).fill_(float("nan"))


class LargeScale(Callback):
    """The loss scale is so large at first that gradients overflow."""

    def __init__(self, scale: float):
        self.scale = scale

    def fit_start(self, state, logger):
        checkpointing = next(one for one in state.callbacks if hasattr(one, "gradient_step"))
        checkpointing.gradient_step.scaler.scale = self.scale


class KillRank(Callback):
    def __init__(self, rank: int, batch: int):
        self.rank, self.batch = rank, batch

    def batch_start(self, state, logger):
        if int(os.environ["RANK"]) == self.rank and int(state.timestamp.batch) + 1 == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


class RaiseOnRank(KillRank):
    def batch_start(self, state, logger):
        if int(os.environ["RANK"]) == self.rank and int(state.timestamp.batch) + 1 == self.batch:
            raise ValueError("the disk of this rank is on fire")


def callback(kind: type, **arguments):
    return {f"python:tests.training.test_failures:{kind.__name__}": arguments}


def status(tmp_path: Path):
    return json.loads((tmp_path / "runs/tiny/status.json").read_text())


def check_let_go(data):
    """Raise DataError unless all processes that read the data end: a killed rank's workers soon notice."""
    lock = hold_folder(str(data / "train"), "another", exclusive=True, timeout_seconds=120)
    assert lock is not None
    lock.close()


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_names_the_batch(tmp_path, data):
    config = tiny_config(data, callbacks=callback(PoisonGradient, rank=1, batch=4))
    result = train([write_config(tmp_path / "tiny.yaml", config)], tmp_path, 2)
    assert result.exit_codes == [2, 2]
    digest = values(read_metrics(tmp_path / "runs/tiny"), "data/digest")
    assert len(digest) == 3, "the poisoned batch is not recorded as trained"
    assert "batch 4 (data/digest " in result.output
    assert "the gradient's norm is nan; the weights were not touched" in result.output
    assert "Traceback" not in "".join(result.outputs)
    assert status(tmp_path)["status"] == "failed"


def test_skipping_leaves_the_weights_alone_and_goes_on(tmp_path, data):
    config = tiny_config(data, on_non_finite="skip", callbacks=callback(PoisonGradient, rank=0, batch=4))
    train([write_config(tmp_path / "tiny.yaml", config)], tmp_path, 2).check()
    records = read_metrics(tmp_path / "runs/tiny")
    assert len(records) == 10
    assert [record["batch"] for record in records if "skipped_batches" in record] == [4]
    assert all(np.isfinite(values(records, "loss/train/total")))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (KillRank, "error: lost contact with another rank", "its own output has the reason: composer prints it"),
        (RaiseOnRank, "the disk of this rank is on fire", "rank 1: ValueError: the disk of this rank is on fire"),
    ],
)
def test_when_a_rank_dies_the_others_stop_soon_and_say_why(tmp_path, data, kind, text, reason):
    config = tiny_config(data, max_duration="1000ba", callbacks=callback(kind, rank=1, batch=5))
    path = write_config(tmp_path / "tiny.yaml", config)
    result = train([path], tmp_path, 4)  # which waits for them half as long as a collective may take
    assert 0 not in result.exit_codes
    assert text in result.output
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["batch"] == 4
    assert reason in status(tmp_path)["reason"]
    after = train([path, "max_duration=2ba", "callbacks=null", "autoresume=true"], tmp_path, 2)
    assert "has batches of this run up to 4, none of them saved yet: they are trained again" in after.check().output
    check_let_go(data)


def test_a_run_killed_outright_leaves_nothing_in_the_way_of_the_next(tmp_path, data):
    config = tiny_config(data, callbacks=callback(KillRank, rank=0, batch=3), train_loader__num_workers=2)
    path = write_config(tmp_path / "tiny.yaml", config)
    train([path], tmp_path)
    train([path, "callbacks=null", "autoresume=true"], tmp_path).check()
    check_let_go(data)


def test_a_token_beyond_the_vocabulary_is_named_by_shard(tmp_path, data):
    config = tiny_config(data, model__vocab_size=90)
    result = train([write_config(tmp_path / "tiny.yaml", config)], tmp_path, 2)
    assert result.exit_codes == [2, 2]
    assert "vocab" in result.output
    assert "Traceback" not in result.output


def test_a_damaged_shard_is_named(tmp_path):
    folder = write_data(tmp_path / "data", num_train=200)
    shard = sorted((folder / "train").glob("shard.*"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    config = tiny_config(folder, max_duration="20ba", train_loader__num_workers=1)
    result = train([write_config(tmp_path / "tiny.yaml", config)], tmp_path, 2)
    assert set(result.exit_codes) == {2} or 2 in result.exit_codes
    assert shard.name in result.output
    assert "Traceback" not in result.output


def test_missing_data_is_an_error_before_any_process_group(tmp_path):
    config = tiny_config(tmp_path / "nowhere")
    result = train([write_config(tmp_path / "tiny.yaml", config)], tmp_path, 2)
    assert result.exit_codes == [2, 2]
    assert sorted(result.outputs) == [
        "",
        f"error: train_loader.dataset: {tmp_path}/nowhere/train/index.json does not exist; "
        "make it with `llmfoundry-lite data prepare`\n",
    ]
    assert not (tmp_path / "runs").exists()
