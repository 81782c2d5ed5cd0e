"""The end of a run whose loss stands still or jumps, which all ranks decide alike and a later launch remembers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry_lite.config.callbacks_schema import EarlyStopperConfig, KillLossSpikeConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_ops.stoppers import EarlyStopper, KillLossSpike
from tests.helpers.runs import attempt, metrics, run, saved_names, status
from tests.helpers.tiny import tiny_config

HIGH = {"outlier_multiplier": 100.0}


@pytest.mark.multiprocess
def test_a_loss_that_stands_still_ends_the_run_saved_and_stays_ended(tmp_path, data):
    stopper = {"monitor": "loss", "dataloader_label": "eval", "patience": "2ba", "min_delta": 100.0}
    config = tiny_config(data, eval_interval="1ba", autoresume=True, callbacks={"early_stopper": stopper})
    first = run(tmp_path, config, "run", 2).output
    why = "early_stopper: eval/loss has not fallen for more than 2ba since batch 1"
    assert first.count(why) == 1
    told = status(tmp_path, "run")
    assert (told["status"], told["batch"], told["reason"], told["last_saved"]) == ("stopped", 4, None, "ba4")
    assert saved_names(tmp_path, "run") == {"ba4"}
    assert f"{why}: it is at batch 4\n" in run(tmp_path, config, "run", 2).output
    assert len(metrics(tmp_path, "run")) == 4
    stopper["patience"] = "4ba"
    run(tmp_path, config, "run", 2)
    assert status(tmp_path, "run")["batch"] == 6


@pytest.mark.multiprocess
def test_a_spike_ends_all_ranks_with_one_line_and_is_on_record(tmp_path, data):
    killer = {"log_only": False, "window_size": 2, "outlier_multiplier": 0.5, "patience": 1}
    launch = attempt(tmp_path, tiny_config(data, callbacks={"kill_loss_spike": killer}), "run", 2)
    assert launch.exit_codes == [2, 2]
    (line,) = [line for line in launch.output.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: kill_loss_spike: batch 4: the loss, ") and "for 2 batches; lower the" in line
    assert [record["batch"] for record in metrics(tmp_path, "run")] == [1, 2, 3, 4]


@pytest.mark.multiprocess
def test_a_label_that_no_validation_data_has_is_refused(tmp_path, data):
    stopper = {"monitor": "loss", "dataloader_label": "eval/wiki"}
    launch = attempt(tmp_path, tiny_config(data, eval_interval="1ba", callbacks={"early_stopper": stopper}), "run")
    assert "dataloader_label: 'eval/wiki' given, expected eval or train" in launch.output
    assert launch.exit_codes == [2]


def test_the_training_loss_is_a_mean_over_an_epoch_and_a_lost_log_is_none():
    block = EarlyStopperConfig(monitor="loss", dataloader_label="train", patience=Duration(1, "ep"))
    config: Any = SimpleNamespace(callbacks=SimpleNamespace(early_stopper=block), validation=[], evaluates=False)
    checkpointing: Any = SimpleNamespace(policy=SimpleNamespace(stop_reason=""))
    stopper = EarlyStopper(config, checkpointing)
    stopper._add_loss(101, 3, 2.5)  # carries on in an epoch before which nothing is on record
    assert math.isinf(stopper.best)
    for batch, epoch, loss in ((102, 3, 1.5), (103, 4, 9.0), (104, 5, 9.0), (105, 6, 9.0)):
        stopper._add_loss(batch, epoch, loss)
    assert stopper.best == 2.0 and "since batch 103" in checkpointing.policy.stop_reason


def test_a_perplexity_that_no_float_holds_ends_no_run():
    """A loss of one's own may be any number."""
    block = EarlyStopperConfig(monitor="LanguagePerplexity", dataloader_label="train", patience=Duration(9, "ba"))
    config: Any = SimpleNamespace(callbacks=SimpleNamespace(early_stopper=block), validation=[], evaluates=False)
    stopper = EarlyStopper(config, SimpleNamespace(policy=SimpleNamespace(stop_reason="")))  # type: ignore[arg-type]
    stopper._add_loss(1, 0, 2.0)
    stopper._add_loss(2, 1, 5000.0)
    stopper._add_loss(3, 2, 1.0)
    assert stopper.best == math.exp(2.0)
    assert stopper.checkpointing.policy.stop_reason == ""


def problems(losses: list[float], num_batches: int = 1000, **keys: Any) -> list[int]:
    """Return the batches at which there is a problem."""
    block = KillLossSpikeConfig(**keys)
    config: Any = SimpleNamespace(
        callbacks=SimpleNamespace(kill_loss_spike=block), max_duration=Duration(num_batches, "ba")
    )
    callback, found = KillLossSpike(config, SimpleNamespace()), []  # type: ignore[arg-type]
    for batch, loss in enumerate(losses, 1):
        stamp = SimpleNamespace(batch=batch, get=lambda unit, batch=batch: batch)
        callback._add_loss(SimpleNamespace(timestamp=stamp), batch, loss)  # type: ignore[arg-type]
        found += [batch] if callback.problem else []
    return found


def test_more_outliers_in_a_row_than_patience_are_a_spike():
    assert problems([1.0] * 10 + [9.0] * 2 + [1.0] + [9.0] * 4, window_size=10, patience=2) == [16]


def test_losses_are_high_when_half_a_window_is_above_the_cap():
    assert problems([2.0] * 40, window_size=10, loss_cap=1.0, **HIGH) == [*range(20, 41)]
    assert problems([2.0] * 10 + [2.5] * 30, window_size=10, **HIGH)[0] == 20, "the first window's highest is the cap"


def test_the_default_window_is_a_twentieth_of_the_run_and_losses_that_are_not_finite_do_not_count():
    assert problems([float("nan")] + [1.0] * 100 + [9.0] * 5, num_batches=1000) == [106]
    assert problems([1.0] * 100 + [9.0] * 9, num_batches=10_000) == []
