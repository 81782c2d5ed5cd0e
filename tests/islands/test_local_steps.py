"""Arithmetic of local steps."""

import numpy as np
import torch

from llmfoundry_lite.islands.local_steps import Round, lost_samples, take_outer_step


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
    counts = {"samples": 1, "tokens": 3, "losses": 2, "digest": (1 << 64) - 1}
    here.count(weight=2, loss=1.0, **counts)
    here.count(weight=6, loss=3.0, **counts)
    here.count(weight=0, loss=float("nan"), **counts)
    assert (here.steps, here.weight, here.digest) == (3, 8, (1 << 64) - 3)
    assert here.loss == 2.5


def test_rows_of_the_islands_that_are_gone_are_lost():
    lanes = {"a": range(4), "b": range(4, 10), "c": range(10, 12)}
    assert lost_samples(lanes, {"a": 40, "c": 20}, steps=10) == {"b": 60}
