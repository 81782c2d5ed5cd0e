import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Time, Timestamp
from composer.optim import CosineAnnealingWithWarmupScheduler

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.optimizer_schema import SchedulerConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training.schedule import LearningRate, elapsed, learning_rate_multiplier


def schedule_of(**options) -> SchedulerConfig:
    """Build a schedule from the words of a YAML."""
    return build_block(SchedulerConfig, options)


def at(t, max_duration="100ba", **options):
    return learning_rate_multiplier(schedule_of(**options), Duration.parse(max_duration), lambda unit: t)


def test_cosine_warms_up_from_zero_and_ends_at_alpha_f():
    options = {"name": "cosine_with_warmup", "t_warmup": "10ba", "alpha_f": 0.1}
    assert [at(t, **options) for t in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert at(55, **options) == pytest.approx(0.1 + 0.9 / 2)
    assert at(100, **options) == pytest.approx(0.1)
    assert at(130, **options) == pytest.approx(0.1)


def test_a_fraction_of_the_run_is_counted_in_the_unit_of_the_run():
    options = {"name": "cosine_with_warmup", "t_warmup": "0.1dur", "t_max": "0.5dur"}
    assert at(5e5, "1e7tok", **options) == pytest.approx(0.5)
    assert at(5e6, "1e7tok", **options) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("max_duration", "num_batches", "t_warmup", "batches"),
    [("4810ba", 1, "0.05dur", 240), ("100ba", 1, "0.29dur", 28), ("3ep", 37, "0.1dur", 11), ("1ep", 50, "0.29dur", 14)],
)
def test_a_fraction_of_the_run_is_cut_to_whole_batches_as_in_composer(max_duration, num_batches, t_warmup, batches):
    from composer.optim.scheduler import _convert_time

    state = SimpleNamespace(max_duration=Time.from_timestring(max_duration), dataloader_len=num_batches)
    assert _convert_time(t_warmup, state).value == batches  # pyright: ignore[reportArgumentType]
    schedule, run = schedule_of(name="constant_with_warmup", t_warmup=t_warmup), Duration.parse(max_duration)
    steps = num_batches if run.unit == "ep" else 1
    rates = [learning_rate_multiplier(schedule, run, lambda unit, t=t: t / steps, steps) for t in range(batches + 1)]
    assert rates == pytest.approx([t / batches for t in range(batches + 1)])


def test_linear_and_constant():
    linear = {"name": "linear_decay_with_warmup", "t_warmup": "10ba", "alpha_i": 2.0, "alpha_f": 0.5}
    assert [at(t, **linear) for t in (5, 10, 55, 100)] == pytest.approx([1.0, 2.0, 1.25, 0.5])
    constant = {"name": "constant_with_warmup", "t_warmup": "4ba"}
    assert [at(t, **constant) for t in (0, 1, 4, 90)] == [0.0, 0.25, 1.0, 1.0]


def test_inverse_square_root_decays_and_cools_down():
    options = {
        "name": "inv_sqrt_with_warmup",
        "t_warmup": "10ba",
        "t_scale": "10ba",
        "t_cooldown": "20ba",
        "alpha_f_decay": 0.1,
        "alpha_f_cooldown": 0.0,
    }

    def decayed(t):
        return 0.1 + 0.9 / math.sqrt((t - 10 + 10) / 10)

    assert [at(t, **options) for t in (0, 5, 10, 40, 80)] == pytest.approx([0, 0.5, 1.0, decayed(40), decayed(80)])
    assert at(90, **options) == pytest.approx(decayed(80) / 2)
    assert at(100, **options) == pytest.approx(0.0)


def test_the_rate_is_stable_between_warm_up_and_decay():
    options = {"name": "warmup_stable_decay", "t_warmup": "10ba", "t_decay": "20ba", "alpha_f": 0.1}
    assert [at(t, **options) for t in (0, 5, 9, 10, 11, 79, 80)] == [0.0, 0.5, 0.9, 1.0, 1.0, 1.0, 1.0]
    assert [at(t, **options) for t in (81, 90, 99, 100, 120)] == pytest.approx([0.955, 0.55, 0.145, 0.1, 0.1])
    assert at(5, **{**options, "t_warmup": "0ba", "t_decay": "1dur"}) == pytest.approx(0.955)


@pytest.mark.parametrize(
    ("decay", "quarter", "half"), [("linear", 3 / 4, 1 / 2), ("cosine", 0.853553, 1 / 2), ("1-sqrt", 1 / 2, 0.292893)]
)
def test_a_stable_rate_decays_in_three_shapes(decay, quarter, half):
    options = {"name": "warmup_stable_decay", "t_decay": "0.4dur", "decay": decay}
    assert [at(t, **options) for t in (0, 60, 70, 80, 100)] == pytest.approx([1.0, 1.0, quarter, half, 0.0])


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"name": "cosine_with_warmup", "alpha_f": 0.1}, 0.1),
        ({"name": "linear_decay_with_warmup", "alpha_f": 0.1}, 0.1),
        ({"name": "constant_with_warmup"}, 1.0),
        ({"name": "warmup_stable_decay", "t_decay": "20ba", "decay": "linear", "alpha_f": 0.1}, 0.1),
        ({"name": "warmup_stable_decay", "t_decay": "20ba", "decay": "cosine", "alpha_f": 0.1}, 0.1),
        ({"name": "warmup_stable_decay", "t_decay": "20ba", "decay": "1-sqrt", "alpha_f": 0.1}, 0.1),
        ({"name": "inv_sqrt_with_warmup", "t_scale": "10ba", "t_cooldown": "20ba", "alpha_f_cooldown": 0.1}, 0.1),
        ({"name": "inv_sqrt_with_warmup", "t_scale": "10ba", "t_cooldown": "0ba", "alpha_f_decay": 0.0}, 1 / 3),
    ],
    ids=lambda value: f"{value['name']} {value.get('decay', '')}".strip() if isinstance(value, dict) else None,
)
def test_beyond_its_end_a_schedule_stands_still(options, end):
    """A run may be longer than its schedule: t_max is a choice of its own."""
    rates = [at(t, "200ba", **options, t_warmup="10ba", t_max="90ba") for t in (90, 91, 130, 200)]
    assert rates == pytest.approx([end] * 4)


def test_a_share_of_a_short_run_that_is_no_whole_batch_is_no_error():
    assert [at(t, "5ba", name="warmup_stable_decay", alpha_f=0.5) for t in range(6)] == [1.0] * 5 + [0.5]
    rates = [at(t, "50ba", name="inv_sqrt_with_warmup", t_scale="0.01dur") for t in (0, 1, 4)]
    assert rates == pytest.approx([1, 3**-0.5, 1 / 3])


def test_before_its_decay_a_stable_rate_does_not_depend_on_the_run_s_end():
    options = {"name": "warmup_stable_decay", "t_warmup": "10ba", "t_decay": "20ba"}
    rates = [[at(t, end, **options) for t in range(41)] for end in ("60ba", "1000ba")]
    assert rates[0] == rates[1]
    assert at(41, "60ba", **options) == pytest.approx(0.95)


@pytest.mark.parametrize("name", ["cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup"])
@pytest.mark.parametrize(
    ("max_duration", "t_warmup", "t_max"),
    [("1ep", "10ba", "1dur"), ("2ep", "10ba", "2ep"), ("3ep", "1ep", "120ba"), ("100ba", "1ep", "3ep")],
)
def test_batches_and_epochs_are_mixed_as_in_composer(name, max_duration, t_warmup, t_max):
    from composer import optim
    from composer.core import Time, Timestamp

    spans: Any = {"t_warmup": t_warmup, "t_max": t_max}
    theirs = {
        "cosine_with_warmup": optim.CosineAnnealingWithWarmupScheduler,
        "linear_decay_with_warmup": optim.LinearWithWarmupScheduler,
        "constant_with_warmup": optim.ConstantWithWarmupScheduler,
    }[name](**spans)
    run, length = Duration.parse(max_duration), 37
    num_batches = int(run.value) * (length if run.unit == "ep" else 1)
    for t in range(0, num_batches, 3):
        state: Any = SimpleNamespace(
            timestamp=Timestamp(epoch=t // length, batch=t, batch_in_epoch=t % length),
            max_duration=Time.from_timestring(max_duration),
            dataloader_len=length,
            train_dataloader=None,
        )
        schedule = schedule_of(name=name, **spans, alpha_f=0.0)
        ours = learning_rate_multiplier(schedule, run, lambda unit, state=state: elapsed(state, unit), length)
        assert ours == pytest.approx(theirs(state), abs=1e-12), t


def test_a_schedule_written_for_llm_foundry_gives_the_same_rates():
    options = {"t_warmup": "3ba", "alpha_f": 0.1}
    ours = LearningRate(schedule_of(name="cosine_with_warmup", **options), Duration(10, "ba"))
    name = "python:composer.optim:CosineAnnealingWithWarmupScheduler"
    theirs = LearningRate(
        schedule_of(name=name, kwargs=options), Duration(10, "ba"), CosineAnnealingWithWarmupScheduler(**options)
    )
    theirs.fit_start(SimpleNamespace(dataloader_len=None), None)  # pyright: ignore[reportArgumentType]
    rates = []
    for rate in (ours, theirs):
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
        for batch in range(11):
            state: Any = SimpleNamespace(
                timestamp=Timestamp(batch=batch),
                max_duration=Time.from_timestring("10ba"),
                dataloader_len=20,
                optimizers=[optimizer],
            )
            rate.batch_start(state, None)  # pyright: ignore[reportArgumentType]
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:11] == pytest.approx(rates[11:]) and rates[3] == 0.5


@pytest.mark.parametrize("answer", [None, -0.1, math.nan, "1", torch.ones(1), torch.tensor(-0.5)])
def test_a_schedule_of_ones_own_must_return_a_factor(answer):
    schedule = schedule_of(name="python:mine:Schedule")
    rate = LearningRate(schedule, Duration(10, "ba"), lambda state, ssr: answer)  # pyright: ignore[reportArgumentType]
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=4))
    with pytest.raises(ConfigError) as caught:
        rate.batch_start(state, None)  # pyright: ignore[reportArgumentType]
    shown = answer.item() if getattr(answer, "ndim", 1) == 0 else answer
    assert str(caught.value) == (
        f"scheduler.name: python:mine:Schedule returns {shown!r} for batch 5, expected a finite number of 0 or more, "
        "such as a float"
    )


@pytest.mark.parametrize("answer", [torch.tensor(0.5), np.float32(0.5), np.array(0.5), 0.5])
def test_a_schedule_of_ones_own_may_return_a_number_of_torch_or_numpy(answer):
    schedule = schedule_of(name="python:mine:Schedule")
    rate = LearningRate(schedule, Duration(10, "ba"), lambda state, ssr=1.0: answer)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=4), optimizers=[optimizer])
    rate.batch_start(state, None)  # pyright: ignore[reportArgumentType]
    assert type(optimizer.param_groups[0]["lr"]) is float and optimizer.param_groups[0]["lr"] == 0.25


def test_a_span_that_needs_an_unknown_length_of_an_epoch_is_refused_in_one_line():
    rate = LearningRate(schedule_of(name="cosine_with_warmup", t_warmup="100ba"), Duration(1, "ep"))
    state: Any = SimpleNamespace(dataloader_len=None)
    with pytest.raises(ConfigError) as caught:
        rate.fit_start(state, None)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "scheduler.t_warmup: 100ba of a run of 1ep needs the number of batches in an epoch, and train_loader does not "
        "tell it; write both in ba"
    )
    state.dataloader_len = 7
    rate.fit_start(state, None)  # pyright: ignore[reportArgumentType]


def test_each_epoch_of_data_with_stages_has_a_length_of_its_own():
    dataset: Any = TextDataset.__new__(TextDataset)
    dataset.joins_batches = False
    dataset.stages = SimpleNamespace(num_batches=[10, 4].__getitem__)
    state: Any = SimpleNamespace(
        timestamp=Timestamp(epoch=1, batch=11, batch_in_epoch=1),
        dataloader_len=None,
        train_dataloader=SimpleNamespace(dataset=dataset),
    )
    assert elapsed(state, "ep") == 1.25
    assert elapsed(state, "ep", Timestamp(epoch=0, batch=1, batch_in_epoch=1)) == 0.1
