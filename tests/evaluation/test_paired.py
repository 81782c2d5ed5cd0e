"""Statistics beside numbers worked out by hand, and beside what chance does."""

import math

import numpy as np
import pytest

from llmfoundry_lite.evaluation.paired import (
    NUM_EXACT,
    bootstrap_sums,
    documents_needed,
    flipped_sums,
    holm,
    interval,
    items_needed,
    mcnemar_p,
    sign_flip_p,
)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (2, 8, 0.109375),
        (6, 0, 2 / 64),
        (1299, 1201, 0.05238),  # (98 - 1) / sqrt(2500) = 1.94 standard deviations
    ],
)
def test_mcnemar(wins, losses, p):
    assert mcnemar_p(wins, losses) == pytest.approx(p, rel=1e-4)


def test_mcnemar_does_not_jump_where_the_exact_test_ends():
    exact = mcnemar_p(NUM_EXACT // 2 + 30, NUM_EXACT // 2 - 30)
    approximate = math.erfc(59 / math.sqrt(NUM_EXACT) / math.sqrt(2))
    assert exact == pytest.approx(approximate, rel=0.01)
    assert mcnemar_p(NUM_EXACT // 2 + 31, NUM_EXACT // 2 - 30) == pytest.approx(exact, rel=0.1)


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_bootstrap_gives_the_normal_interval_where_that_holds():
    generator = np.random.default_rng(1)
    differences = generator.choice([-1.0, 0.0, 1.0], 2000, p=[0.1, 0.75, 0.15])
    error = differences.std() / math.sqrt(2000)
    # The second is resampled item by item: no two values are equal.
    for values in (differences, differences + generator.normal(0, 1e-6, 2000)):
        low, high = interval(bootstrap_sums(values[:, None], generator)[:, 0] / 2000)
        assert (low + high) / 2 == pytest.approx(differences.mean(), abs=0.1 * error)
        assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.05)


def test_columns_are_resampled_together():
    values = np.random.default_rng(2).normal(size=(200, 1)) @ [[1.0, -3.0]]
    draws = bootstrap_sums(values, np.random.default_rng(3), 500)
    assert draws.shape == (500, 2)
    np.testing.assert_allclose(draws[:, 1], -3 * draws[:, 0], atol=1e-9)


def test_flipping_signs_gives_the_binomial_of_the_sign_test():
    draws = flipped_sums(np.array([1.0, 1, 1, -1, 0, 0]), np.random.default_rng(4), 40_000)
    shares = [(draws == value).mean() for value in (-4, -2, 0, 2, 4)]
    assert shares == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], abs=0.01)
    many = np.random.default_rng(5).normal(size=300)
    assert flipped_sums(many, np.random.default_rng(6)).std() == pytest.approx(math.sqrt((many**2).sum()), rel=0.03)


def test_what_is_equally_good_is_called_different_one_time_in_twenty():
    generator = np.random.default_rng(7)
    num_trials, n, tasks = 400, 500, 5
    counts = {"mcnemar": 0, "flips": 0, "interval": 0, "any of five": 0}
    for _ in range(num_trials):
        a, b = generator.random((2, tasks, n)) < 0.4
        differences = b.astype(float) - a
        ps = [mcnemar_p(int((row > 0).sum()), int((row < 0).sum())) for row in differences]
        low, high = interval(bootstrap_sums(differences[0][:, None], generator, 1000)[:, 0])
        counts["mcnemar"] += ps[0] < 0.05
        counts["flips"] += sign_flip_p(differences[0] + generator.normal(0, 0.1, n), generator, 500) < 0.05
        counts["interval"] += not low <= 0 <= high
        counts["any of five"] += min(holm(ps)) < 0.05
    # 20 are expected of 400, with a standard deviation of 4.4; McNemar's exact test is on the safe side.
    assert 8 <= counts["mcnemar"] <= 29, counts
    assert 8 <= counts["flips"] <= 33, counts
    assert 9 <= counts["interval"] <= 33, counts
    assert counts["any of five"] <= 29, counts


def test_the_items_needed_find_the_difference_four_times_in_five():
    assert items_needed(0.2, 0.1) == 155  # ((1.96 * 0.4472 + 0.8416 * 0.4359) / 0.1) ** 2
    n = items_needed(0.15, 0.03)
    draws = np.random.default_rng(8).multinomial(n, [0.09, 0.06, 0.85], 1500)
    power = np.mean([mcnemar_p(int(wins), int(losses)) < 0.05 for wins, losses, _ in draws])
    assert 0.74 < power < 0.84
    assert items_needed(0.0) == items_needed(0.01)
    assert documents_needed(0.1, 0.01) == 785  # (2.8016 * 10) ** 2
