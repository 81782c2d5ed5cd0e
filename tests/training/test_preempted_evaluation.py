"""A preempted evaluation is run by the next launch, so that a moved run's log lacks nothing."""

import os

import pytest

from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.training import in_context
from tests.helpers.runs import attempt, losses, metrics, run, status
from tests.helpers.signals import Signal, SignalInEvaluation, wait_until_told
from tests.helpers.tiny import tiny_config, values, write_data

pytestmark = pytest.mark.multiprocess


class SignalInTasks(Signal):
    """Sends the signal during the tasks after that batch; the rest of them is not run."""

    def fit_start(self, state, logger):
        score, num_scored = in_context.ModelInTraining.score, 0

        def signal_once(model, *arguments):
            nonlocal num_scored
            num_scored += self.is_here(state)
            assert num_scored < 2, "the evaluation went on"
            if num_scored == 1:
                os.kill(os.getpid(), self.number)
                wait_until_told(state)
            return score(model, *arguments)

        in_context.ModelInTraining.score = signal_once  # pyright: ignore[reportAttributeAccessIssue]


class SignalInManyRows(SignalInEvaluation):
    """Sends the signal when the first of two loaders has been evaluated."""

    def is_here(self, state) -> bool:
        return super().is_here(state) and state.dataloader_label == "eval/many"


def callback_of(kind, batch):
    """Return the callback for the evaluation after `batch`."""
    return {f"python:{kind.__module__}:{kind.__name__}": {"rank": 1, "batch": batch + 1}}


def assert_same_curves(tmp_path, keys=("loss/train/total", "data/digest", "eval/loss")):
    for key in keys:
        expected = {record["batch"]: record[key] for record in metrics(tmp_path, "whole") if key in record}
        assert {r["batch"]: r[key] for r in metrics(tmp_path, "moved") if key in r} == expected, key


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 6], ids=["between", "last"])
def test_a_validation_that_was_left_is_made_up(tmp_path, data, batch):
    config = tiny_config(data, autoresume=True, eval_interval="4ba", device_eval_batch_size=1, max_duration="6ba")
    run(tmp_path, config, "whole", 2)
    result = attempt(tmp_path, config, "moved", 2, callbacks=callback_of(SignalInEvaluation, batch))
    assert result.exit_codes == [75, 75]
    assert status(tmp_path, "moved")["batch"] == batch
    assert "eval/loss" not in metrics(tmp_path, "moved")[-1]
    run(tmp_path, config, "moved", 2)
    assert_same_curves(tmp_path)
    assert status(tmp_path, "moved")["status"] == "done"
    num_lines = len((tmp_path / "runs/moved/metrics.jsonl").read_text().splitlines())
    run(tmp_path, config, "moved", 2)  # done is done: not evaluated again
    assert len((tmp_path / "runs/moved/metrics.jsonl").read_text().splitlines()) == num_lines


@pytest.mark.slow
def test_preempted_in_the_last_batch_the_run_is_evaluated_later(tmp_path, data):
    config = tiny_config(data, autoresume=True, eval_interval="4ba", max_duration="6ba")
    run(tmp_path, config, "whole", 2)
    result = attempt(tmp_path, config, "moved", 2, callbacks=callback_of(Signal, 5))
    assert result.exit_codes == [75, 75]
    run(tmp_path, config, "moved", 2)
    assert_same_curves(tmp_path)


@pytest.mark.slow
def test_several_validations_are_made_up_though_the_first_was_made(tmp_path, data):
    loaders = [
        {"label": label, "dataset": {"local": str(data), "split": split}}
        for label, split in (("few", "val"), ("many", "train"))
    ]
    config = tiny_config(data, autoresume=True, eval_loader=loaders, eval_interval="4ba", max_duration="4ba")
    run(tmp_path, config, "whole", 2)
    result = attempt(tmp_path, config, "moved", 2, callbacks=callback_of(SignalInManyRows, 4))
    assert result.exit_codes == [75, 75]
    left = metrics(tmp_path, "moved")[-1]
    assert "eval/few/loss" in left and "eval/many/loss" not in left
    run(tmp_path, config, "moved", 2)
    assert_same_curves(tmp_path, ("loss/train/total", "eval/few/loss", "eval/many/loss"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 4], ids=["between", "last"])
def test_tasks_that_were_left_are_asked_later(tmp_path, batch):
    data = write_data(tmp_path / "data", num_val=500)
    train_tokenizer(["some words"] * 3, 300).save(str(tmp_path / "tokenizer"))
    task = {"label": "text", "icl_task_type": "perplexity", "dataset_uri": str(data / "val")}
    config = tiny_config(
        data,
        autoresume=True,
        tokenizer__name=str(tmp_path / "tokenizer"),
        model__vocab_size=384,
        icl_tasks=[task],
        eval_loader=None,
        eval_interval="2ba",
        max_duration="4ba",
    )
    run(tmp_path, config, "whole", 2)
    result = attempt(tmp_path, config, "moved", 2, callbacks=callback_of(SignalInTasks, batch))
    assert result.exit_codes == [75, 75], result.outputs
    assert f"preempted by SIGTERM at batch {batch}, saved as ba{batch}" in result.output
    run(tmp_path, config, "moved", 2)
    key = "eval/icl/text/0-shot/perplexity"
    assert len(values(metrics(tmp_path, "whole"), key)) == 2
    assert_same_curves(tmp_path, ("loss/train/total", key))
    assert len(losses(tmp_path, "moved")) == 4
