"""Optimizers: their steps beside those of Composer, of torch and of the paper on Lion."""

import pytest
import torch
from composer.optim import DecoupledAdamW

from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from tests.helpers.optimizers import build_small_optimizer

INITIAL_RATE = 0.1
RATES = (INITIAL_RATE, 0.05, 0.02)
"""The learning rate of each step."""
SHAPE = (4, 6)
ADAM_BETAS = (0.9, 0.95)
LION_BETAS = (0.9, 0.99)
"""The default of Chen et al. 2023."""


def new_parameter():
    """A parameter that always begins with the same numbers."""
    return torch.nn.Parameter(torch.linspace(-1, 1, 24).view(SHAPE))


def gradients_of_steps():
    """The same random gradients each time, one for each of `RATES`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator) for _ in RATES]


def train(optimizer, parameter):
    """Do a step for each of `RATES`. Return the parameter's numbers afterwards."""
    for rate, gradient in zip(RATES, gradients_of_steps(), strict=True):
        parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return parameter.detach()


# --------------------------------------------------------------------------------------------------------- steps


def test_decoupled_adamw_is_composers():
    options = {"lr": INITIAL_RATE, "betas": ADAM_BETAS, "eps": 1e-8, "weight_decay": 0.01}
    our_parameter = new_parameter()
    our_optimizer = build_small_optimizer([our_parameter], name="decoupled_adamw", **options)
    composers_parameter = new_parameter()
    composers_optimizer = DecoupledAdamW([composers_parameter], **options)

    ours = train(our_optimizer, our_parameter)
    composers = train(composers_optimizer, composers_parameter)
    torch.testing.assert_close(ours, composers, rtol=1e-5, atol=1e-6)


def test_adamw_is_torchs():
    options = {"lr": INITIAL_RATE, "betas": ADAM_BETAS, "weight_decay": 0.1}
    our_parameter = new_parameter()
    our_optimizer = build_small_optimizer([our_parameter], name="adamw", **options)
    torchs_parameter = new_parameter()
    torchs_optimizer = torch.optim.AdamW([torchs_parameter], **options)

    ours = train(our_optimizer, our_parameter)
    torchs = train(torchs_optimizer, torchs_parameter)
    torch.testing.assert_close(ours, torchs)


def train_lion_as_in_its_paper(shrinkages):
    """The parameter after a step of Chen et al. 2023, algorithm 2, for each of `RATES`.

    shrinkages: for each step, the share of itself that a weight loses to weight decay.
    """
    beta1, beta2 = LION_BETAS
    weight = new_parameter().detach()
    moment = torch.zeros(SHAPE)
    for rate, gradient, shrinkage in zip(RATES, gradients_of_steps(), shrinkages, strict=True):
        update = torch.sign(beta1 * moment + (1 - beta1) * gradient)
        weight = weight * (1 - shrinkage) - rate * update
        moment = beta2 * moment + (1 - beta2) * gradient
    return weight


def test_lion_follows_its_paper():
    """The paper multiplies weight decay by the learning rate."""
    decay = 0.1
    parameter = new_parameter()
    optimizer = build_small_optimizer([parameter], name="lion", lr=INITIAL_RATE, weight_decay=decay)
    expected = train_lion_as_in_its_paper([rate * decay for rate in RATES])
    torch.testing.assert_close(train(optimizer, parameter), expected)


def test_decoupled_lionw_multiplies_its_decay_by_the_schedule_alone():
    """The first step, which has the initial learning rate, shrinks weights by the whole weight decay."""
    decay = 0.01
    parameter = new_parameter()
    optimizer = build_small_optimizer([parameter], name="decoupled_lionw", lr=INITIAL_RATE, weight_decay=decay)
    expected = train_lion_as_in_its_paper([rate / INITIAL_RATE * decay for rate in RATES])
    torch.testing.assert_close(train(optimizer, parameter), expected)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_without_gradients_a_step_changes_nothing(name):
    """Weight decay does not shrink the parameter either."""
    parameter = new_parameter()
    optimizer = build_small_optimizer([parameter], name=name, lr=INITIAL_RATE, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(parameter, new_parameter())
    assert not optimizer.state


# ---------------------------------------------------------------------------------- weight decay that is not set


COMPOSERS_DECAY = 1e-5


def test_composers_default_decay_is_known():
    optimizer = DecoupledAdamW([new_parameter()], lr=INITIAL_RATE)
    assert optimizer.defaults["weight_decay"] == COMPOSERS_DECAY


@pytest.mark.parametrize(
    ("name", "expected_decay"),
    [("decoupled_adamw", COMPOSERS_DECAY), ("adamw", 0.0), ("lion", 0.0), ("decoupled_lionw", 0.0)],
)
def test_only_decoupled_adamw_has_a_default_decay(name, expected_decay):
    assert OptimizerConfig(name=name, lr=INITIAL_RATE).decay == expected_decay


@pytest.mark.parametrize(
    ("name", "torchs_decay"),
    [
        # torch multiplies weight decay by the learning rate, Composer only by the learning rate's schedule.
        ("decoupled_adamw", COMPOSERS_DECAY / INITIAL_RATE),
        ("adamw", 0.0),
        ("lion", 0.0),
        ("decoupled_lionw", 0.0),
    ],
)
def test_an_optimizer_is_built_with_the_default_decay(name, torchs_decay):
    optimizer = build_small_optimizer([new_parameter()], name=name, lr=INITIAL_RATE)
    assert optimizer.param_groups[0]["weight_decay"] == torchs_decay
