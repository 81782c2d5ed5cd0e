"""Runs that `benchmarks averages` trains, and its comparison of means with the last checkpoint."""

import math

import pytest

from benchmarks.ladder import averages, plan
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import UserError
from tests.helpers.results import text, write_result

SHAPE = plan.Shape(32, 2)


def write_texts_result(folder, model: str, bits_per_byte: float) -> None:
    """Write the result of a model on 30 documents of 100 bytes, some easier and some harder."""
    documents = [[(100 * math.log(2) * bits_per_byte * (1 + 0.01 * (i % 3)), 100)] for i in range(30)]
    record, items = text(documents)
    record["bits_per_byte_stderr"] = 0.1
    write_result(folder / "results" / averages.SUITE, model, {averages.TASK: (record, items)})


def test_means_are_compared_with_the_last_checkpoint_of_their_run(tmp_path):
    models = {"constant-last": "runs/constant", "constant-last-5": "averaged/constant-last-5"}
    for model, bits_per_byte in zip(models, (2.0, 1.9), strict=True):
        write_texts_result(tmp_path, model, bits_per_byte)
    last, mean = averages.compare_with_last(tmp_path, "constant", models)
    assert last == {
        "schedule": "constant",
        "model": "the last checkpoint",
        "bits": pytest.approx(2.02),
        "stderr": 0.1,
    }
    assert mean["model"] == "mean of the last 5"
    assert mean["difference"] == pytest.approx(-0.101)
    assert mean["low"] <= mean["difference"] <= mean["high"]
    assert (mean["wins"], mean["n"]) == (30, 30)
    assert "| constant | mean of the last 5 | 1.9190 ± 0.1000 | -0.1010 |" in "\n".join(
        averages.table_of([last, mean]).markdown()
    )


@pytest.mark.parametrize("schedule", averages.SCHEDULES)
def test_each_schedule_is_a_valid_run_that_keeps_the_checkpoints_to_average(schedule):
    settings = averages.settings_of(SHAPE, schedule, interval=14, num_kept=10, seed=17)
    files = [str(plan.HERE / "run.yaml"), str(plan.HERE / "A.yaml")]
    config = load_train_config([*files, *(f"{key}={value}" for key, value in settings.items())]).config
    assert config.scheduler.name == averages.SCHEDULES[schedule]["scheduler.name"]
    assert str(config.save_interval) == "14ba"
    assert config.save_num_checkpoints_to_keep == 10


def test_a_size_that_is_none_is_refused():
    with pytest.raises(UserError, match="--size: '32' given, expected a width of 16s x layers, such as 64x3"):
        averages.run(size="32")
