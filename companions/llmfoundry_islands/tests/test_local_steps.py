"""Arithmetic of local steps."""

import numpy as np
import torch

from llmfoundry_islands.training.local_steps import (
    Round,
    count_lost_samples,
    divide_into_fragments,
    divide_lost_rows,
    take_outer_step,
)
from llmfoundry_lite.training.run_handle import BatchCounts


def test_outer_steps_are_nesterov_s_bit_for_bit():
    """Beside numpy, of which each operation rounds once; and beside torch's SGD, which may fuse two."""
    generator = np.random.default_rng(0)
    start = generator.standard_normal(1000).astype(np.float32)
    velocity, tensors = np.zeros_like(start), (torch.from_numpy(start.copy()), torch.zeros(1000))
    parameter = torch.nn.Parameter(tensors[0].clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        change = generator.standard_normal(1000).astype(np.float32)
        take_outer_step(*tensors, torch.from_numpy(change), 0.7, 0.9)
        velocity = np.float32(0.9) * velocity + change
        start = start - np.float32(0.7) * (np.float32(0.9) * velocity + change)
        parameter.grad = torch.from_numpy(change)
        optimizer.step()
    assert np.array_equal(tensors[0].numpy(), start) and np.array_equal(tensors[1].numpy(), velocity)
    assert torch.allclose(parameter, tensors[0], atol=1e-5)


def test_a_round_s_loss_is_weighted_by_tokens_and_a_batch_of_padding_counts_nothing():
    here = Round()
    batch = BatchCounts(True, num_samples=1, num_tokens=3, num_loss_tokens=2, num_loss_samples=1, digest=(1 << 64) - 1)
    here.add_batch(batch, weight=2, loss=1.0)
    here.add_batch(batch, weight=6, loss=3.0)
    here.add_batch(batch, weight=0, loss=float("nan"))
    assert (here.steps, here.weight, here.digest) == (3, 8, (1 << 64) - 3)
    assert here.loss == 2.5


def test_rows_of_the_islands_that_are_gone_are_lost():
    row_indices = {"a": range(4), "b": range(4, 10), "c": range(10, 12)}
    assert count_lost_samples(row_indices, {"a": 40, "c": 20}, steps=10) == {"b": 60}


def test_fragments_are_of_like_size_and_the_same_in_any_order():
    sizes = {"embedding": 100, **{f"block {i}": 30 + i % 3 for i in range(9)}, "norm": 1}
    fragments = divide_into_fragments(sizes, 3)
    assert sorted(name for fragment in fragments for name in fragment) == sorted(sizes)
    filled = [sum(sizes[name] for name in fragment) for fragment in fragments]
    assert max(filled) - min(filled) <= 30 < max(sizes.values())
    assert divide_into_fragments(dict(reversed(sizes.items())), 3) == fragments


def test_lost_rows_are_divided_by_rows_in_multiples_of_data_ranks():
    view = {"a": range(4), "b": range(4, 12)}
    assert divide_lost_rows([20, 21, 22, 23, 24, 25], view, {"a": 1, "b": 2}) == {"a": [20, 21], "b": [22, 23, 24, 25]}
    assert divide_lost_rows([20, 21, 22], view, {"a": 4, "b": 3}) == {"b": [20, 21, 22]}, "a cannot divide its share"
    assert divide_lost_rows([20], view, {"a": 2, "b": 2}) == {}
