"""Between backward and optimizer, without a run: which batches count, and how gradients are scaled."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Timestamp

from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.config.schema import GradientClippingConfig
from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.parallel.exact import ExactSums
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import BatchCounts, count_tokens
from llmfoundry_lite.training.gradient_step import GradientStep, LossScaler, measure
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.trainer import ParallelTrainer


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """Batches of one weight, whose gradient and loss each test gives. AdamW has moments since the first batch."""

    def __init__(self, on_non_finite="skip", max_skipped_batches=10, scaler=None, clipping=None):
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.model.model, self.model.num_stages, self.model.shared_parameters = self.model, 1, ()
        self.weight = self.model.weight
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step = GradientStep(
            model=self.model,
            clipping=clipping,
            on_non_finite=on_non_finite,
            max_skipped_batches=max_skipped_batches,
            scaler=scaler,
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


@pytest.mark.parametrize(
    ("clipping_type", "expected"),
    [("norm", {0.25: 0.25, -0.25: -0.25, 4.0: 1.0, -4.0: -1.0}), ("value", {0.25: 0.25, 4.0: 1.0, -4.0: -1.0})],
)
def test_a_gradient_within_the_threshold_is_not_clipped(clipping_type, expected):
    """Clipping makes gradients smaller, never larger. The logged norm is the one before clipping."""
    run = Run(clipping=GradientClippingConfig(clipping_type=clipping_type, clipping_threshold=1.0))
    for gradient, clipped in expected.items():
        run.train(gradient)
        assert run.weight.grad.item() == pytest.approx(clipped, rel=1e-5)
        assert run.logged["grad_norm"] == pytest.approx(abs(gradient))


def test_the_loss_scale_doubles_after_an_interval_of_sound_batches():
    scaler = LossScaler(scale=4.0)
    scaler.growth_interval = 3
    run = Run(scaler=scaler)  # which trains the first batch
    scales = [scaler.scale]
    for gradient in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0):
        run.train(gradient)
        scales.append(scaler.scale)
    # Each doubling begins the interval anew, and so does the overflow.
    assert scales == [4, 4, 8, 8, 8, 16, 16, 8, 8, 8, 16]
    assert LossScaler().growth_interval == 2000


def test_an_overflow_is_no_skipped_batch_and_a_loss_that_is_not_finite_is_no_overflow():
    run = Run(max_skipped_batches=0, scaler=LossScaler(scale=4.0))
    run.train(math.inf)
    assert (run.step.scaler.scale, run.logged["skipped_batches"]) == (2.0, 0)
    with pytest.raises(NonFiniteError, match="the loss is not finite"):
        run.train(math.nan, math.nan)
    assert run.step.scaler.scale == 2.0


class Scores(torch.nn.Module):
    """A model of one weight, whose loss is the sum of its products with the tokens that have one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens_bt, *, head, **_):
        return head(self.weight * tokens_bt, None)


def trainer_of(rows_bt, rank, num_ranks, by_tokens, part=0, num_parts=1, **of_step):
    """Return what stands in for the Trainer of a rank, with microbatches of one row; `of_step` goes to GradientStep."""
    mine_bt = rows_bt.chunk(num_ranks)[rank]
    context: Any = SimpleNamespace(
        size=num_parts, part=lambda x_bt: x_bt.chunk(num_parts, 1)[part], options=lambda *_: {}
    )
    model = LanguageModel(
        Scores(), PRECISIONS["amp_fp16", "DEFAULT"], context=context, by_rows=not by_tokens,
        sum_loss=lambda x_bt, _, labels_bt, weights_bt=1.0: (x_bt * (labels_bt >= 0) * weights_bt).sum(),
    )  # fmt: skip
    model.train()
    spec = SimpleNamespace(
        split_batch=lambda batch, size: [{"input_ids": rows} for rows in batch["input_ids"].split(size)],
        get_num_tokens_in_batch=lambda batch, kind: count_tokens(batch)[kind],
    )
    device = SimpleNamespace(_device=torch.device("cpu"), batch_to_device=lambda batch: batch)
    optimizer = SimpleNamespace(param_groups=[{"params": [model.model.weight], "lr": 0.1}])
    state = {"batch": {"input_ids": mine_bt}, "model": model, "optimizers": [optimizer], "device": device}
    return SimpleNamespace(
        state=SimpleNamespace(**state, device_train_microbatch_size=1, timestamp=Timestamp()),
        _train_data_spec=spec, engine=SimpleNamespace(run_event=lambda event: None), _original_model=model,
        gradient_step=GradientStep(model=model, on_non_finite="skip", max_skipped_batches=1, **of_step),
        agreement=SimpleNamespace(current=BatchCounts(True, 4, 11, 7, 3, 0), sample_length=None),
        accumulate_train_batch_on_tokens=by_tokens, role=LaunchRole(), batch_sizes=PerBatch.build(len(rows_bt), None),
        ranks=DataRanks(rank=rank, size=num_ranks, is_counted=True),
    )  # fmt: skip


def add_gradients(trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a rank's backward passes give: gradient and loss."""
    microbatches, divisor = ParallelTrainer._begin_batch(trainer, trainer.state.batch)
    loss = torch.zeros(())
    for trainer.state.batch in microbatches:
        loss = loss + ParallelTrainer._add_gradient(trainer, trainer.state.batch, divisor)
    return trainer.state.model.model.weight.grad, loss


ROWS_BT = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [2, -100, -100, -100], [3, 1, -100, -100]])
"""The third row has one token, and so no loss: 7 tokens and 3 rows have one, of 12 and 4 in a batch without padding."""
MEAN_LOSSES = [(True, (1 + 2 + 3 + 5 + 6 + 7 + 3) / 7), (False, ((1 + 2 + 3) / 3 + (5 + 6 + 7) / 3 + 3) / 3)]
"""Of these rows by `Scores`: over tokens, and over rows."""


@pytest.mark.parametrize(("by_tokens", "loss"), MEAN_LOSSES)
def test_what_overflows_in_fp16_and_the_loss_do_not_depend_on_the_number_of_ranks(by_tokens, loss):
    """The scale multiplies the mean over tokens, or over the rows that have a loss."""
    for num_ranks, num_parts in ((1, 1), (2, 1), (4, 1), (2, 2)):
        found = [
            add_gradients(trainer_of(ROWS_BT, rank, num_ranks, by_tokens, part, num_parts, scaler=LossScaler(1024.0)))
            for rank in range(num_ranks)
            for part in range(num_parts)
        ]
        assert sum(gradient.item() for gradient, _ in found) == pytest.approx(1024 * loss)
        assert sum(part.item() for _, part in found) / len(found) == pytest.approx(loss)


@pytest.mark.parametrize(("by_tokens", "loss"), MEAN_LOSSES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_exact_sums_of_an_incomplete_batch_are_means_over_what_it_has(num_ranks, by_tokens, loss):
    trainers, found = [], []
    for rank in range(num_ranks):
        trainer = trainer_of(ROWS_BT, rank, num_ranks, by_tokens, exact_sums=ExactSums())
        trainer.gradient_step.exact_sums.attach(trainer.state.model.model)
        trainers.append(trainer)
        found.append(add_gradients(trainer))

    first, logged = trainers[0], {}
    assert first.gradient_step.full_weight == (12 if by_tokens else 4)
    weight = first.state.model.model.weight
    weight.grad = torch.stack([gradient for gradient, _ in found]).sum(0)  # as the ranks' all-reduce
    loss_sum = torch.stack([part for _, part in found]).sum(0)
    logger = SimpleNamespace(log_metrics=logged.update)
    assert first.gradient_step.finish(first.state, logger, loss_sum, "digest") == pytest.approx(loss)
    assert (logged["loss/train/total"], logged["grad_norm"]) == pytest.approx((loss, loss))
    assert logged["step"] == int(first.state.timestamp.batch) + 1, "Composer counts the batch later"
    assert weight.grad.item() == pytest.approx(loss)


@pytest.mark.parametrize(("by_tokens", "full_weight"), [(True, 8 * (2 - 1)), (False, 8)])
def test_microbatches_keep_their_tokens_where_samples_are_cut(monkeypatch, by_tokens, full_weight):
    """Four samples of four tokens, of which each becomes two rows: a microbatch of one sample has both."""
    trainer = trainer_of(ROWS_BT.reshape(8, 2), 0, 1, by_tokens, exact_sums=ExactSums())
    trainer.gradient_step.exact_sums.attach(trainer.state.model.model)
    trainer.batch_sizes = PerBatch.build(4, None)
    trainer.agreement.sample_length = 4
    begun = []
    monkeypatch.setattr(trainer.gradient_step.exact_sums, "begin_batch", lambda _, number: begun.append(number))

    microbatches, _ = ParallelTrainer._begin_batch(trainer, trainer.state.batch)
    assert [tuple(batch["input_ids"].shape) for batch in microbatches] == [(2, 2)] * 4
    assert trainer.gradient_step.full_weight == full_weight
    assert begun == [4]


def test_tied_weights_on_two_stages_count_once_in_the_norm(monkeypatch):
    """Four ranks, two in each stage. Both stages have the whole gradient of the embeddings, and one of its own."""
    sums = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sums.append(tensor.clone()))
    tied, first, last = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    tied.grad, first.grad, last.grad = torch.tensor([4.0]), torch.tensor([3.0]), torch.tensor([1.0])
    for own, loss in ((first, 0.0), (last, 5.0)):
        measure([tied, own], torch.tensor(loss), torch.zeros(()), num_stages=2, shared=[tied])
    of_first_stage, of_last_stage = sums
    total = 2 * of_first_stage + 2 * of_last_stage  # each stage is on two ranks
    assert total.tolist() == [4.0**2 + 3.0**2 + 1.0**2, 2 * 5.0, 0.0]

    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.copy_(total))
    found = measure([tied, last], torch.tensor(5.0), torch.zeros(()), num_stages=2, shared=[tied])
    assert (found.norm, found.loss) == (math.sqrt(26), 5.0)
