"""Sums of gradients, losses and squares are the same in any order and any grouping."""

import itertools
import math
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_lite.parallel.exact import (
    GRID_BITS,
    LARGEST_SUM,
    ExactSums,
    is_first_copy,
    norm_of_sum,
    round_embedding_gradient,
    round_loss,
    round_unembedding_gradient,
    split_sum,
    sum_squares,
)
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels
from tests.helpers.models import BASE, random_model, random_tokens


def gradients(count: int = 24, size: int = 4096) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    scales = torch.logspace(-9, 0, size)
    return [torch.randn(size, generator=generator) * scales for _ in range(count)]


def collected(parts: list[torch.Tensor], sums: ExactSums) -> torch.Tensor:
    """The gradient of a parameter whose microbatches have these gradients, in float64."""
    layer = torch.nn.Linear(len(parts[0]), 1, bias=False)
    sums.attach(layer)
    sums.begin_batch(layer.parameters(), len(parts))
    for part in parts:
        layer(part[None]).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float64
    return layer.weight.grad[0]


def test_microbatches_add_up_to_the_same_bits_in_any_order_and_grouping():
    parts = gradients()
    whole = collected(parts, ExactSums())
    backwards = collected(parts[::-1], ExactSums())
    by_ranks = sum((collected(parts[rank::3], ExactSums()) for rank in (2, 0, 1)), torch.zeros_like(whole))
    assert torch.equal(whole, backwards) and torch.equal(whole, by_ranks)
    exact = sum(map(torch.Tensor.double, parts), torch.zeros_like(whole))
    assert (whole - exact).abs().max() <= len(parts) * 2.0 ** -(GRID_BITS + 1)


GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_model_has_one_gradient_whatever_the_order_of_its_microbatches(device, num_microbatches):
    model, sums = random_model(BASE).to(device), ExactSums()
    sums.attach(model)
    rows_bt = random_tokens(BASE, 16).repeat(num_microbatches, 1)
    rows_bt = (rows_bt + torch.arange(len(rows_bt))[:, None]) % BASE.vocab_size  # no two alike
    found = []
    for order in itertools.islice(itertools.permutations(rows_bt.to(device).chunk(num_microbatches)), 6):
        model.zero_grad()
        sums.begin_batch(model.parameters(), len(order))
        for tokens_bt in order:
            loss = partial(cross_entropy_sum, labels_bt=next_token_labels(tokens_bt))
            (model(tokens_bt, head=loss) / rows_bt.numel()).backward()
        assert sums.count_out_of_range() == 0
        found.append([p.grad for p in model.parameters()])
    assert len(found) == min(6, math.factorial(num_microbatches))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_one_microbatch_that_is_not_rounded_breaks_it():
    parts = gradients()
    rest = collected(parts[1:], ExactSums())
    one = (parts[0] * math.pi).double() / math.pi  # more bits than the grid has
    assert not torch.equal(one + rest, collected(parts, ExactSums()))
    in_fp32 = sum(parts[::-1], torch.zeros_like(parts[0]))
    assert not torch.equal(sum(parts, torch.zeros_like(parts[0])), in_fp32)


def test_each_use_of_a_tied_weight_has_a_gradient_on_the_grid():
    """Another rank may hold the other use, and add its part after rounding it."""
    scale = math.pi * 1e-9  # not on the grid
    wte = torch.nn.Embedding(5, 3)
    round_embedding_gradient(wte)
    (wte(torch.tensor([1, 2])) * scale).sum().backward()
    unembedding_vd = torch.ones(5, 3, requires_grad=True)
    sum_loss = round_unembedding_gradient(lambda hidden_td, weight_vd: (hidden_td @ weight_vd.T).sum())
    sum_loss(torch.full((1, 3), scale), unembedding_vd).backward()
    for gradient in (wte.weight.grad, unembedding_vd.grad):
        assert gradient is not None and gradient.max() == pytest.approx(scale, rel=1e-5)
        units = gradient.double() * 2.0**GRID_BITS
        assert torch.equal(units, units.round())


@pytest.mark.parametrize("value", [40.0, -40.0, math.inf, math.nan])
def test_an_element_that_cannot_be_added_exactly_is_counted(value):
    parts, sums = [torch.full((3,), 0.5), torch.tensor([0.0, value, 0.0])], ExactSums()
    collected(parts[:1], sums)
    assert sums.count_out_of_range() == 0
    collected(parts, sums)
    assert sums.count_out_of_range() == 1


def test_one_batch_out_of_range_does_not_count_in_the_next():
    sums = ExactSums()
    for value, count in ((40.0, 1), (0.5, 0), (math.inf, 1), (0.5, 0)):
        collected([torch.tensor([0.0, value, 0.0])], sums)
        assert sums.count_out_of_range() == count


def test_the_most_that_an_element_may_be_follows_from_the_number_of_microbatches():
    sums = ExactSums()
    sums.begin_batch([], 1024)
    assert sums.element_limit * 1024 == LARGEST_SUM


def test_the_norm_is_the_root_of_an_exact_sum_however_it_is_divided():
    numbers = torch.cat(gradients(6))
    largest = numbers.abs().max()
    exponent = torch.frexp(largest).exponent
    whole = split_sum(sum_squares([numbers], exponent))
    pieces = [split_sum(sum_squares([piece], exponent)) for piece in (numbers[:7], numbers[7:5000], numbers[5000:])]
    norm = norm_of_sum(whole.tolist(), int(exponent))
    assert norm_of_sum(sum(pieces, torch.zeros(3).double()).tolist(), int(exponent)) == norm
    exact = math.sqrt(sum(Fraction(number) ** 2 for number in numbers.tolist()))
    assert norm == pytest.approx(exact, rel=2e-7)


def test_one_of_equal_parts_on_several_ranks_counts():
    """Of the four ranks, two have each part."""
    counted = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=dist.HashStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            gradient = DTensor.from_local(torch.zeros(3, 2), mesh, (Replicate(), Shard(0)), run_check=False)
            if is_first_copy(gradient):
                counted.append(rank)
        finally:
            dist.destroy_process_group()
    assert counted == [0, 1]
    assert is_first_copy(torch.zeros(1)) and not is_first_copy(None)


def test_small_elements_count_in_the_norm_beside_large_ones():
    numbers = torch.full((1 << 22,), 2.0**-20)
    numbers[0] = 1.0
    exponent = torch.frexp(numbers.max()).exponent
    norm = norm_of_sum(split_sum(sum_squares([numbers], exponent)).tolist(), int(exponent))
    assert norm**2 - 1 == pytest.approx((len(numbers) - 1) * 2.0**-40, rel=0.1)


def test_losses_add_up_in_any_order():
    losses = [torch.tensor(value) for value in (0.1, 7.3, 1e-4, 11.0)]
    rounded = [round_loss(loss) for loss in losses]
    assert sum(rounded) == sum(rounded[::-1])
    assert float(sum(rounded)) == pytest.approx(sum(map(float, losses)), abs=1e-8)
