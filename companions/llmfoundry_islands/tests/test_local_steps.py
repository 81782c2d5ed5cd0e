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

# ------------------------------------------------------------------------------------------- outer steps

LR = 0.7
MOMENTUM = 0.9


def random_start_and_changes() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights before the first outer step, and the mean change of each of five."""
    generator = torch.Generator().manual_seed(0)
    start, *changes = torch.randn(6, 1000, generator=generator)
    return start, changes


def take_outer_steps(start: torch.Tensor, changes: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the velocity after one outer step for each change."""
    weights = start.clone()
    velocity = torch.zeros_like(start)
    for change in changes:
        take_outer_step(weights, velocity, change, LR, MOMENTUM)
    return weights, velocity


def test_outer_steps_are_nesterov_s_bit_for_bit():
    """Beside numpy, of which each operation rounds once."""
    start, changes = random_start_and_changes()
    weights, velocity = take_outer_steps(start, changes)

    lr = np.float32(LR)
    momentum = np.float32(MOMENTUM)
    expected_weights = start.numpy()
    expected_velocity = np.zeros_like(expected_weights)
    for change in changes:
        expected_velocity = momentum * expected_velocity + change.numpy()
        expected_weights = expected_weights - lr * (momentum * expected_velocity + change.numpy())
    assert np.array_equal(weights.numpy(), expected_weights)
    assert np.array_equal(velocity.numpy(), expected_velocity)


def test_outer_steps_are_those_of_torch_s_sgd():
    """Up to rounding: torch may fuse two operations."""
    start, changes = random_start_and_changes()
    weights, _ = take_outer_steps(start, changes)

    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, nesterov=True)
    for change in changes:
        parameter.grad = change
        optimizer.step()
    assert torch.allclose(parameter, weights, atol=1e-5)


# ------------------------------------------------------------------------------------------- a round


def round_of_three_batches() -> Round:
    """Batches of the weights 2, 6 and 0 and of the losses 1, 3 and NaN: the last one is all padding."""
    largest_digest = (1 << 64) - 1
    batch = BatchCounts(True, num_samples=1, num_tokens=3, num_loss_tokens=2, num_loss_samples=1, digest=largest_digest)
    current = Round()
    current.add_batch(batch, weight=2, loss=1.0)
    current.add_batch(batch, weight=6, loss=3.0)
    current.add_batch(batch, weight=0, loss=float("nan"))
    return current


def test_a_round_s_loss_is_weighted_and_leaves_out_a_batch_of_padding():
    assert round_of_three_batches().loss == (2 * 1.0 + 6 * 3.0) / (2 + 6)


def test_a_round_adds_up_its_batches_and_their_digests_modulo_2_to_the_64():
    three_batches = round_of_three_batches()
    assert three_batches.steps == 3
    assert three_batches.weight == 8
    assert three_batches.digest == (1 << 64) - 3


# ------------------------------------------------------------------------------------------- lost rows


def test_rows_of_the_islands_that_are_gone_are_lost():
    row_indices = {"a": range(4), "b": range(4, 10), "c": range(10, 12)}
    trained = {"a": 40, "c": 20}
    assert count_lost_samples(row_indices, trained, steps=10) == {"b": 60}


ROWS_OF_OTHERS = {"a": range(4), "b": range(4, 12)}
"""What the others have anyway: b has twice as many rows as a."""


def test_lost_rows_are_divided_in_proportion_to_the_rows_of_the_others():
    shares = divide_lost_rows([20, 21, 22, 23, 24, 25], ROWS_OF_OTHERS, data_ranks={"a": 1, "b": 2})
    assert shares == {"a": [20, 21], "b": [22, 23, 24, 25]}


def test_lost_rows_go_to_the_island_that_can_divide_them_among_its_ranks():
    shares = divide_lost_rows([20, 21, 22], ROWS_OF_OTHERS, data_ranks={"a": 4, "b": 3})
    assert shares == {"b": [20, 21, 22]}


def test_lost_rows_that_no_island_can_divide_are_left():
    assert divide_lost_rows([20], ROWS_OF_OTHERS, data_ranks={"a": 2, "b": 2}) == {}


# ------------------------------------------------------------------------------------------- fragments

NUM_FRAGMENTS = 3
SMALLEST_BLOCK = 30
PARAMETER_SIZES = {"embedding": 100, **{f"block {i}": SMALLEST_BLOCK + i % 3 for i in range(9)}, "norm": 1}


def test_each_parameter_is_in_one_fragment():
    fragments = divide_into_fragments(PARAMETER_SIZES, NUM_FRAGMENTS)
    assert len(fragments) == NUM_FRAGMENTS
    names = [*fragments[0], *fragments[1], *fragments[2]]
    assert sorted(names) == sorted(PARAMETER_SIZES)


def test_fragments_are_of_like_size():
    """They differ by a block at most, though one parameter is larger than three blocks."""
    fragment_sizes = []
    for fragment in divide_into_fragments(PARAMETER_SIZES, NUM_FRAGMENTS):
        fragment_sizes.append(sum(PARAMETER_SIZES[name] for name in fragment))
    assert max(fragment_sizes) - min(fragment_sizes) <= SMALLEST_BLOCK


def test_fragments_do_not_depend_on_the_order_of_parameters():
    reversed_sizes = dict(reversed(PARAMETER_SIZES.items()))
    fragments = divide_into_fragments(PARAMETER_SIZES, NUM_FRAGMENTS)
    assert divide_into_fragments(reversed_sizes, NUM_FRAGMENTS) == fragments
