"""A learning rate, a weight decay, a schedule given when a run carries on are used, named and recorded."""

import pytest

from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers.runs import attempt, losses, metrics, run, saves, status
from tests.helpers.tiny import tiny_config, values

pytestmark = pytest.mark.multiprocess

CONSTANT = {"name": "constant_with_warmup", "t_warmup": "0ba"}


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """A folder in which `base` was saved at batch 4 and went on to 8, and its configuration."""
    folder = tmp_path_factory.mktemp("base")
    config = tiny_config(data, autoresume=True, max_duration="8ba", save_interval="4ba", scheduler=CONSTANT)
    config["optimizer"]["weight_decay"] = 1e-3
    run(folder, config, "base")
    return folder, config


def segment_of(folder, name, batch=8):
    return open_checkpoint(saves(folder, name) / f"ba{batch}").manifest.segments[-1]


def test_a_rate_and_a_decay_given_on_resume_are_used_named_and_recorded(tmp_path, data, base):
    folder, config = base
    run(tmp_path, config, "run", stop_after="4ba")
    optimizer = {**config["optimizer"], "lr": 1e-4, "weight_decay": 0.5}
    result = run(tmp_path, config, "run", optimizer=optimizer)
    assert "ba4 (optimizer.lr 0.01 -> 0.0001, optimizer.weight_decay 0.001 -> 0.5)" in result.output
    assert values(metrics(tmp_path, "run"), "lr") == [0.01] * 4 + [1e-4] * 4
    ours, theirs = losses(tmp_path, "run"), losses(folder, "base")
    assert ours[:5] == theirs[:5], "the fifth batch is read before its update"
    assert ours[5] != theirs[5]
    manifest = open_checkpoint(saves(tmp_path, "run") / "ba8").manifest
    assert manifest.config["optimizer"]["lr"] == 1e-4
    assert [segment.changes for segment in manifest.segments] == [
        {},
        {"optimizer.lr": [0.01, 1e-4], "optimizer.weight_decay": [0.001, 0.5]},
    ]
    options = manifest.optimizer["groups"][0]["options"]
    assert (options["initial_lr"], options["weight_decay"]) == (1e-4, 0.5 / 1e-4)


def test_with_load_path_too_and_a_run_folder_is_enough(tmp_path, base):
    folder, config = base
    changes = {
        "load_path": str(folder / "runs/base"),
        "optimizer": {**config["optimizer"], "lr": 2e-3},
        "scheduler": {"name": "linear_decay_with_warmup", "t_warmup": "0ba"},
        "max_duration": "10ba",
    }
    result = run(tmp_path, config, "other", **changes)
    assert "(run_name base -> other, optimizer.lr 0.01 -> 0.002" in result.output
    rates = values(metrics(tmp_path, "other"), "lr")[-2:]
    assert rates == pytest.approx([2e-3 * 0.2, 2e-3 * 0.1])
    changed = segment_of(tmp_path, "other", 10).changes
    assert changed["max_duration"] == ["8ba", "10ba"]
    assert changed["scheduler.name"] == ["constant_with_warmup", "linear_decay_with_warmup"]


@pytest.mark.slow
def test_a_stable_rate_decays_from_any_checkpoint(tmp_path, base):
    folder, config = base
    stable = {"name": "warmup_stable_decay", "t_warmup": "0ba", "t_decay": "4ba"}
    changes = {"load_path": str(saves(folder, "base") / "ba4"), "scheduler": stable, "max_duration": "8ba"}
    result = run(tmp_path, config, "decayed", **changes)
    assert (
        "scheduler.name constant_with_warmup -> warmup_stable_decay, scheduler.t_decay 0.1dur -> 4ba" in result.output
    )
    assert values(metrics(tmp_path, "decayed"), "lr") == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    assert losses(tmp_path, "decayed")[:2] == losses(folder, "base")[4:6], "the first batch has the whole rate"
    assert segment_of(tmp_path, "decayed").changes["scheduler.t_decay"] == ["0.1dur", "4ba"]


def test_what_may_not_change_is_refused_before_the_model_is_built(base):
    folder, config = base
    refused = attempt(folder, config, "base", 2, seed=5, optimizer={**config["optimizer"], "betas": [0.8, 0.9]})
    assert refused.exit_codes == [2, 2]
    assert refused.output == (
        "error: optimizer.betas is [0.8, 0.9] here and null in the checkpoint, seed is 5 here and 17 in the "
        "checkpoint; a run must resume with the values in its checkpoint: set optimizer.betas=null seed=17, or begin "
        "a new run with its weights (another run_name, load_path and load_weights_only=true)\n"
    )
    assert status(folder, "base")["status"] == "done"
