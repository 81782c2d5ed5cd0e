"""Statistics beside numbers worked out by hand, beside each other, and beside what chance does."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.__main__ import run_benchmark
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.significance import (
    MAX_RESAMPLED,
    BootstrapResult,
    Counts,
    count,
    difference_of_ratios,
    holm,
    score_interval,
    score_p,
    upper_limit,
)
from tests.helpers.present import needs


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (8, 2, 0.0820),  # 5.5 / sqrt(10) = 1.739 standard deviations
        (2, 8, 0.0820),
        (4, 0, 0.0801),  # without the correction 0.0455, where chance does this one time in eight
        (1299, 1201, 0.0512),
    ],
)
def test_a_score_test_by_hand(wins, losses, p):
    assert score_p(Counts(wins, losses, 5000, 1.0)) == pytest.approx(p, rel=2e-3)


def test_the_limits_are_tangos():
    """At the limit the distance is z deviations of the likeliest proportions, which are sought here one by one."""
    for wins, losses, n in ((8, 2, 100), (0, 0, 20), (30, 0, 40), (3, 9, 12)):
        limit = float(upper_limit(wins, losses, n, 1.96))
        q = np.linspace(max(0, -limit), (1 - limit) / 2, 2_000_001)
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = sum(
                number * np.log(share)
                for number, share in ((wins, q + limit), (losses, q), (n - wins - losses, 1 - 2 * q - limit))
                if number
            )
        likeliest = float(q[np.nanargmax(likelihood)])
        deviation = math.sqrt(n * (2 * likeliest + limit - limit**2))
        assert n * limit - (wins - losses) - 0.5 == pytest.approx(1.96 * deviation, rel=1e-3)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=6, max_size=60), st.floats(1e-4, 0.2))
def test_an_interval_excludes_0_exactly_where_the_test_says_so(values, level):
    added = np.array(values, np.float64) / 200
    counts = count(added, np.full(len(added), 1 / len(added)))
    difference = float(counts.jump * (counts.wins - counts.losses) / counts.num_units)
    assert difference == pytest.approx(added.sum(), abs=1e-12)
    low, high = score_interval(counts, level)
    assert low <= added.sum() + 1e-12 and added.sum() - 1e-12 <= high
    p = score_p(counts)
    if not math.isclose(p, level, rel_tol=1e-9):
        assert (low > 0 or high < 0) == (p < level)


def test_units_of_whole_items_are_counted_and_others_weighed():
    assert count(np.array([1, 1, -1, 0, 0, 0]) / 6, np.full(6, 1 / 6)) == pytest.approx((2, 1, 6, 1, 6))
    counts = count(np.array([3, 1, -1, 0, 0, 0]) / 18, np.full(6, 1 / 6))
    assert (counts.wins - counts.losses) / math.sqrt(counts.wins + counts.losses) == pytest.approx(3 / math.sqrt(11))
    # Nothing won or lost: (20 h - 1/2)² = 1.96² 20 h (1 - h).
    low, high = score_interval(count(np.zeros(20), np.full(20, 1 / 20)), 0.05)
    assert high == -low == pytest.approx(0.2005, abs=1e-4)


def test_a_cluster_that_holds_most_items_leaves_no_evidence():
    share = np.array([50.0] + [1.0] * 30) / 80
    counts = significance.count(share, share)
    assert counts.num_effective == pytest.approx(2.53, abs=0.01)
    assert significance.score_p(counts) == 1 and significance.score_interval(counts, 0.05) is None
    equal = np.full(6, 1 / 6)
    assert significance.score_interval(significance.count(equal, equal), 0.05) is not None


def test_accuracies_of_unlike_clusters_differ_by_1_at_most():
    counts = Counts(wins=3.9, losses=0.1, num_units=14, jump=2.7, num_effective=6.1)
    low, high = score_interval(counts, 0.05)
    difference = 2.7 * 3.8 / 14
    assert -1 < low < difference < high == 1
    low, high = score_interval(counts._replace(wins=0.1, losses=3.9), 0.05)
    assert -1 == low < -difference < high < 1


def test_one_document_that_differs_of_many_has_no_interval_instead_of_an_endless_one():
    texts = np.stack([np.arange(50.0, 80), np.arange(100.0, 130)], axis=1)
    found = difference_of_ratios(texts, texts + np.eye(30, 2) * [3, 0], np.random.default_rng(0))
    assert (found.p, found.interval(0.05)) == (1, None) and found.difference > 0


def test_too_few_are_no_evidence():
    assert score_p(Counts(5, 0, 5, 1.0)) == 1 and score_interval(Counts(5, 0, 5, 1.0), 0.05) is None
    few = np.stack([np.arange(1.0, 20), np.ones(19)], axis=1)
    found = difference_of_ratios(few, few * [2, 1], np.random.default_rng(0))
    assert (found.difference, found.p, found.interval(0.05)) == (10, 1, None)


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    corrected, levels = holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert levels == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])
    assert holm([0.6, 0.7]) == ([1.0, 1.0], [0.025, 0.025])
    assert holm([]) == ([], [])


def test_of_ratios_the_interval_is_students_where_that_holds():
    generator, sizes, widths = np.random.default_rng(1), np.full(30, 100.0), []
    for _ in range(20):
        first, other = (np.stack([sizes * generator.normal(mean, 0.1, 30), sizes], axis=1) for mean in (1, 1.02))
        found = difference_of_ratios(first, other, generator)
        differences = (other - first)[:, 0] / 100
        assert found.difference == pytest.approx(differences.mean())
        assert found.error == pytest.approx(differences.std(ddof=1) / math.sqrt(30))
        low, high = found.interval(0.05)
        widths.append((high - low) / 2 / found.error)
    # Student's t with 29 degrees of freedom at 0.05 / (1 + 40 / 30); a normal number's would be 2.30.
    assert 2.432 < np.mean(widths) < 1.08 * 2.432
    many = np.tile(first, (MAX_RESAMPLED, 1))
    low, high = difference_of_ratios(many, many * [1.01, 1], generator).interval(0.05)
    assert (low + high) / 2 == pytest.approx(0.01 * first[:, 0].mean() / 100) and low > 0


def test_equal_models_on_a_few_skewed_texts_are_called_different_one_time_in_twenty(monkeypatch):
    monkeypatch.setattr(significance, "num_draws_for", lambda num_units, tail_correction, smallest_level: 600)
    generator, num_claimed, num_draws = np.random.default_rng(3), 0, 1500
    for _ in range(num_draws):
        sizes, rates = generator.lognormal(6, 0.7, 20), 1 + generator.normal(0, 0.3, 20)
        more = 0.05 * (generator.lognormal(0, 1, 20) - math.exp(0.5))
        first, other = (np.stack([sizes * (rates + extra), sizes], axis=1) for extra in (0, more))
        num_claimed += difference_of_ratios(first, other, generator).p < 0.05
    assert 0.03 < num_claimed / num_draws < 0.067, num_claimed  # 0.088 without caution


@settings(max_examples=100, deadline=None)
@given(st.floats(-5, 5), st.floats(1e-2, 0.9), st.sampled_from([1.0, 1.4, 3.0]))
def test_the_bootstraps_interval_and_p_are_one_statistic(difference, level, caution):
    skewed = np.sort(np.random.default_rng(2).lognormal(size=999) - 1.6)
    found = BootstrapResult(difference, 1.0, skewed, caution)
    interval = found.interval(level)
    excludes = interval is not None and (interval[0] > 0 or interval[1] < 0)
    if not math.isclose(found.p, level, rel_tol=1e-6):
        assert excludes == (found.p < level)


@pytest.mark.parametrize(
    ("difference", "p"),
    [
        (100.0, 2 / 8),  # none as far; the data are one of the draws, and of two tails
        (2.5, 4 / 8),  # one beyond it, twice
        (2.0, 6 / 8),  # a draw as far counts as farther: two, twice
        (-2.0, 6 / 8),
        (0.0, 1.0),
    ],
)
def test_a_bootstraps_p_by_hand(difference, p):
    assert BootstrapResult(difference, 1.0, np.arange(-3.0, 4)).p == p


def test_a_p_of_the_longer_tail_counts_both_ways():
    skewed = np.array([-5.0, -4, -3, -2, -1, 0, 1])
    assert BootstrapResult(1.5, 1.0, skewed).p == 5 / 8  # four are as far on either side
    assert BootstrapResult(2.0, 1.0, np.array([-2.0, -2, -2, 0, 1, 1.5])).p == 4 / 7  # as far on the other side alone
    assert BootstrapResult(1.5, 1.0, skewed, tail_correction=1.4).p == 1.4 * 5 / 8


def test_a_bootstraps_interval_by_hand():
    """With 199 draws at 0.1, the 19th farthest is at 90, the 9th of a tail at 91. The wider of the two counts."""
    draws = np.arange(-99.0, 100)
    assert BootstrapResult(10.0, 0.5, draws).interval(0.1) == (10 - 45.5, 10 + 45.5)
    skewed = np.where(draws > 0, 2 * draws, draws)
    assert BootstrapResult(10.0, 0.5, skewed).interval(0.1) == (10 - 91, 10 + 81)
    assert BootstrapResult(10.0, 0.5, draws).interval(0.005) is None


def test_a_p_that_equals_its_level_is_no_difference_and_ends_the_looking():
    assert holm([0.025, 0.03]) == ([0.05, 0.05], [0.025, 0.025])
    assert holm([0.0249, 0.03])[1] == [0.025, 0.05]


def test_what_is_equally_good_is_called_different_at_most_one_time_in_twenty():
    generator = np.random.default_rng(7)
    num_trials, n, tasks = 2000, 300, 5
    one, any_of_five = 0, 0
    for _ in range(num_trials):
        draws = generator.multinomial(n, [0.1, 0.1, 0.8], tasks)
        ps = [score_p(Counts(float(wins), float(losses), n, 1.0)) for wins, losses, _ in draws]
        one += ps[0] < 0.05
        any_of_five += min(holm(ps)[0]) < 0.05
    # 100 are expected of 2,000, with a standard deviation of 9.7.
    assert 60 <= one <= 125 and any_of_five <= 125, (one, any_of_five)


@needs("llmfoundry_machines")
def test_the_bench_writes_its_table_and_finds_no_contradiction(tmp_path, capsys):
    assert run_benchmark(["intervals", "--num-draws", "20", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "intervals.md").read_text()
    rows = [
        line.split(" | ") for line in written.splitlines() if line.startswith(("| one", "| mean", "| clus", "| bits"))
    ]
    assert len(rows) > 40 and {row[5] for row in rows} == {"0"}
