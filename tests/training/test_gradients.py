"""What stands between backward and optimizer, without a run: which batches count, and by what gradients are scaled."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composer.core import Timestamp

from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.training.trainer import GradientStep, LossScaler


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """Batches of one weight, whose gradient and loss each test gives. AdamW has moments since the first batch."""

    def __init__(self, on_non_finite="skip", max_skipped_batches=10, scaler=None):
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.model.model, self.model.num_stages, self.model.shared_parameters = self.model, 1, ()
        self.weight = self.model.weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step = GradientStep(
            model=self.model, on_non_finite=on_non_finite, max_skipped_batches=max_skipped_batches, scaler=scaler
        )
        self.logged = {}
        self.batch = 0
        self.train(1.0)

    def train(self, gradient, loss=1.0):
        state = SimpleNamespace(optimizers=[self.optimizer], timestamp=Timestamp(batch=self.batch))
        self.step.begin(1, torch.device("cpu"))
        self.weight.grad = torch.full_like(self.weight, gradient * self.model.loss_scale)
        self.step.after_loss(torch.tensor(loss))
        self.step.finish(state, SimpleNamespace(log_metrics=self.logged.update), torch.tensor(loss), "digest")
        self.optimizer.step()
        self.batch += 1


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_skipped_batch_leaves_weights_and_moments_alone(gradient, loss):
    """A gradient of zeros would not: AdamW moves weights by its moments, and by weight decay."""
    run = Run()
    before = run.weight.detach().clone()
    moments = {name: value.clone() for name, value in run.optimizer.state[run.weight].items()}
    run.train(gradient, loss)
    assert torch.equal(run.weight, before)
    assert run.optimizer.state[run.weight] == moments
    assert run.logged["skipped_batches"] == 1
    run.train(1.0)
    assert not torch.equal(run.weight, before)


def test_as_many_batches_are_skipped_as_are_allowed():
    run = Run(max_skipped_batches=2)
    run.train(math.nan)
    run.train(1.0)
    run.train(math.nan)
    with pytest.raises(NonFiniteError, match=r"and 3 batches of this launch were skipped .* allows no more"):
        run.train(math.nan)


def test_a_loss_that_is_not_finite_stops_a_run_though_its_gradient_is_finite():
    run = Run("stop")
    with pytest.raises(NonFiniteError, match=r"batch 2 .*: the loss is not finite; the weights were not touched"):
        run.train(1.0, math.inf)


def test_a_gradient_is_unscaled_before_it_is_measured():
    run = Run(scaler=LossScaler(scale=1024.0))
    run.train(0.5)
    assert run.logged["grad_norm"] == pytest.approx(0.5)
    assert run.weight.grad.item() == pytest.approx(0.5)


def test_the_loss_scale_doubles_after_an_interval_of_sound_batches():
    scaler = LossScaler(scale=4.0)
    scaler.growth_interval = 3
    run = Run(scaler=scaler)  # which trains the first batch
    scales = [scaler.scale]
    for gradient in (1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0):
        run.train(gradient)
        scales.append(scaler.scale)
    assert scales == [4, 4, 8, 8, 4, 4, 4, 8]  # the overflow has begun the interval anew
    assert LossScaler().growth_interval == 2000


def test_an_overflow_is_no_skipped_batch_and_a_loss_that_is_not_finite_is_no_overflow():
    run = Run(max_skipped_batches=0, scaler=LossScaler(scale=4.0))
    run.train(math.inf)
    assert (run.step.scaler.scale, run.logged["skipped_batches"]) == (2.0, 0)
    with pytest.raises(NonFiniteError, match="the loss is not finite"):
        run.train(math.nan, math.nan)
    assert run.step.scaler.scale == 2.0
