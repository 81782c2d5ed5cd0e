"""Paired significance tests of two models on the same items, and the intervals that invert them.

The input is each independent unit's part of a difference; compare.py decides what the units are. At every level an
interval excludes 0 exactly when its test's p is below the level. Neither scipy nor statsmodels is a dependency, and
neither has a score interval of paired proportions, the continuity correction, or the cautious bootstrap.

Right and wrong answers: Tango's score interval for a difference of paired proportions (Statistics in Medicine 17, 1998)
and McNemar's test, which is its statistic at 0, both with half a continuity correction. Without it, up to 6.5 % of
equal models are called different (50 items, exact sums); with it, at most 4.9 % (6 to 1,000 items).

Real numbers: the studentised bootstrap (Hall, The Bootstrap and Edgeworth Expansion, 1992, section 3.6), the wider of
symmetric and equal tails. A few documents do not show a long tail, so p is multiplied by 1 + CAUTION / n. Without that,
8.8 % of equal models are called different from 20 log-normal differences, and 5.7 % from 200.
`python -m benchmarks intervals` measures these rates.

Legend: u independent units, d draws, k columns.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.05
"""Level below which the corrected p of a significant difference lies."""
SEED = 17
NUM_RESAMPLES = 10_000
RESAMPLED_AT_ONCE = 2_000_000
"""Rows that are drawn at a time, over several draws: 16 MB of counts."""
MAX_RESAMPLED = 5_000
"""Number of units above which the normal distribution replaces the bootstrap."""
MIN_UNITS = 6
"""Fewest independent items for any claim: even five wins of five have an exact p above 0.05. Units of different sizes
count as `num_effective`: an interval from 31 units, one of which holds 5 of 8 items, covers .50, not .95."""
MIN_DOCUMENTS = 20
"""MIN_UNITS for real numbers, because a few documents do not show their tails."""
CAUTION = 40
"""Strength of the correction for unseen tails, in documents. Fitted to log-normal differences with sigma 1, 20 to 200
documents."""
CORRECTION = 0.5
"""Continuity correction, in units won or lost: half of McNemar's usual one."""
NUM_BISECTIONS = 50
"""Halvings of an interval of at most 2 that reach the precision of float64."""
Z_POWER = NormalDist().inv_cdf(0.8)
"""Standard normal quantile for a power of 80 %."""


def z_of(level: float) -> float:
    """Return the standard normal quantile of a two-sided test: 1.96 for level 0.05."""
    return NormalDist().inv_cdf(1 - level / 2)


class Counts(NamedTuple):
    """Independent units on which one of two models did better or worse, and what each of them adds to the difference.

    Fields are numbers, or arrays for many comparisons at once.
    """

    wins: float | Floats
    losses: float | Floats
    num_units: int
    """All units, ties included."""
    jump: float | Floats
    """One win adds jump / num_units to the difference of the two means. 1 for units of equal weight."""
    num_effective: float = math.inf
    """Number of units of equal weight that would tell as much about the difference."""

    @property
    def variance(self) -> float | Floats:
        """Variance of the difference of the two means."""
        net_wins = self.wins - self.losses
        variance_of_wins = self.wins + self.losses - net_wins**2 / self.num_units
        return (self.jump / self.num_units) ** 2 * variance_of_wins


def count(differences_u: Floats, weights_u: Floats) -> Counts:
    """Describe units of any weight as wins and losses of one size, for the tests of paired proportions.

    differences_u: each unit's part of the difference of two means. For a single item of n, that is -1/n, 0 or 1/n. A
        unit of several items (a cluster, or an item that several tasks ask) has the sum of theirs.
    weights_u: the largest part that each unit could have; they add up to 1.

    The counts are chosen so that the sum and the sum of squares of the differences stay the same. With a for the
    differences and n units, one win adds j / n where j = n Σa² / Σ|a|, and wins and losses are (Σ|a| ± Σa) Σ|a| / 2Σa².
    McNemar's statistic is then Σa / √Σa², that of randomly flipped signs.
    """
    num_units = len(differences_u)
    total = float(differences_u.sum())
    total_absolute = float(np.abs(differences_u).sum())
    total_squares = float((differences_u**2).sum())
    squared_weights = float((weights_u**2).sum())

    # Kish's effective number of units (Survey Sampling, 1965, section 11.7). If one unit holds most of the items, the
    # others tell little about the error of the difference.
    num_effective = round(float(weights_u.sum() ** 2 / squared_weights), 6)
    if total_squares == 0:
        return Counts(0.0, 0.0, num_units, num_units * squared_weights, num_effective)

    ratio = total_absolute / total_squares / 2
    return Counts(
        wins=(total_absolute + total) * ratio,
        losses=(total_absolute - total) * ratio,
        num_units=num_units,
        jump=num_units * total_squares / total_absolute,
        num_effective=num_effective,
    )


def score_p(counts: Counts) -> float:
    """Return the two-sided p-value of McNemar's test, with half a continuity correction.

    The p-value is 1 below MIN_UNITS independent units, because so few cannot show a difference.
    """
    if min(counts.num_units, counts.num_effective) < MIN_UNITS:
        return 1.0
    distance = max(0.0, abs(counts.wins - counts.losses) - CORRECTION)
    if not distance:
        return 1.0
    return math.erfc(distance / math.sqrt(2 * (counts.wins + counts.losses)))


def score_interval(counts: Counts, level: float) -> tuple[float, float] | None:
    """Return the interval (low, high) of differences that `score_p` does not reject.

    `level` is the level of the test: 0.05 gives the 95 % interval. Returns None below MIN_UNITS independent units.
    """
    if min(counts.num_units, counts.num_effective) < MIN_UNITS:
        return None
    z = z_of(level)
    high_in_jumps = upper_limit(counts.wins, counts.losses, counts.num_units, z)
    low_in_jumps = -upper_limit(counts.losses, counts.wins, counts.num_units, z)
    # The difference of two accuracies is within -1 and 1. With units of different weights, jumps may exceed that.
    low = max(-1.0, float(counts.jump * low_in_jumps))
    high = min(1.0, float(counts.jump * high_in_jumps))
    return low, high


def upper_limit(wins: float | Floats, losses: float | Floats, num_units: int, z: float) -> Floats:
    """Return the upper end of Tango's score interval for (wins - losses) / num_units, in jumps.

    A jump is what one win adds to the difference, so this is the limit of the difference of two proportions. It is the
    largest difference d that the test does not reject: at d, the observed number of net wins lies z standard deviations
    and the continuity correction CORRECTION below its expectation, num_units * d.

    The standard deviation is that of the likeliest proportions with the difference d. By Tango (1998), the likeliest
    proportion q of losses solves 2 n q^2 + ((2 n - wins + losses) d - wins - losses) q - losses d (1 - d) = 0, and the
    variance of the net wins is n (2 q + d (1 - d)).

    Takes numbers or arrays. The limit is found by bisection, to 1e-15.
    """
    wins = np.asarray(wins, np.float64)
    losses = np.asarray(losses, np.float64)
    net_wins = wins - losses
    low = net_wins / num_units
    high = np.ones_like(wins)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        # The quadratic equation for q, written as 2 n q^2 + 2 half_b q + c = 0.
        half_b = ((2 * num_units - net_wins) * middle - wins - losses) / 2
        c = -losses * middle * (1 - middle)
        root = np.sqrt(np.maximum(half_b**2 - 2 * num_units * c, 0))
        # Of the two equivalent formulas for the root, each branch takes the one without cancellation. The first branch
        # is also evaluated where it is not used, and its denominator must not be 0 there.
        q = np.where(half_b > 0, -c / np.maximum(root + half_b, 1e-300), (root - half_b) / (2 * num_units))

        deviation = np.sqrt(np.maximum(num_units * (2 * q + middle * (1 - middle)), 0))
        is_beyond_limit = num_units * middle - net_wins - CORRECTION > z * deviation
        low = np.where(is_beyond_limit, low, middle)
        high = np.where(is_beyond_limit, middle, high)
    return high


class BootstrapResult(NamedTuple):
    """A difference of two ratios with its standard error, and the draws of its studentised bootstrap."""

    difference: float
    error: float
    """Standard error of the difference."""
    deviations_d: Floats
    """Deviation of each draw from the difference, in units of the draw's own standard error, sorted. Empty where there
    are too few units for any claim."""
    tail_correction: float = 1.0
    """The p-value is multiplied by this, because a few documents do not show a long tail."""

    @property
    def p(self) -> float:
        """Two-sided p-value: the larger one of that of symmetric tails and that of equal tails.

        The data themselves count as one of the draws, so the p-value is never 0.
        """
        draws = self.deviations_d
        if not len(draws) or not self.difference:
            return 1.0
        if self.error:
            observed = self.difference / self.error
        else:
            observed = math.copysign(math.inf, self.difference)
        num_farther = int((np.abs(draws) >= abs(observed)).sum())
        num_above = int((draws >= observed).sum())
        num_below = int((draws <= observed).sum())
        num_in_equal_tails = 2 * min(num_above, num_below) + 1
        num_as_extreme = 1 + max(num_farther, num_in_equal_tails)
        return min(1.0, self.tail_correction * num_as_extreme / (1 + len(draws)))

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return the interval (low, high) of differences that `p` does not reject at `level`, which is 0.05 for 95 %.

        It inverts `p`: with at most `num_allowed` draws beyond its ends, p stays at or above the level. Since p is the
        larger one of two, the interval is the wider one of two: that of symmetric tails, whose ends are equally far
        from the difference, and that of equal tails, beyond each of which half as many draws lie.

        None where nothing is claimed, or there are too few draws for such a level.
        """
        draws = self.deviations_d
        # As a fraction, less a little, so that rounding does not allow one draw too many.
        num_allowed = level / self.tail_correction * (1 + len(draws)) * (1 - 1e-12)
        num_beyond_both = math.ceil(num_allowed - 1) - 1
        num_beyond_each = math.ceil(num_allowed / 2 - 1) - 1
        if num_beyond_each < 0:
            return None

        half_width = np.sort(np.abs(draws))[-1 - num_beyond_both]
        highest = max(half_width, draws[-1 - num_beyond_each])
        lowest = min(-half_width, draws[num_beyond_each])
        # A draw far above the difference means that the true one may lie far below it.
        low = self.difference - float(highest) * self.error
        high = self.difference - float(lowest) * self.error
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        return low, high


def difference_of_ratios(first_u2: Floats, other_u2: Floats, generator: np.random.Generator) -> BootstrapResult:
    """Return the difference of two ratios, `other` less `first`, with its bootstrap.

    Each argument is [u independent units, 2 columns]; a ratio is that of the sums of the columns over all units, such
    as bits over bytes. Both have the same units, which are resampled together.

    The standard error is that of the linearised ratios (Cochran, Sampling Techniques, 3rd edition, 1977, chapter 6).
    With fewer than MIN_DOCUMENTS units nothing is claimed. With more than MAX_RESAMPLED, the normal distribution
    replaces the bootstrap.
    """
    columns_u4 = np.concatenate([first_u2, other_u2], axis=1)
    products_u16 = (columns_u4[:, :, None] * columns_u4[:, None, :]).reshape(-1, 16)
    num_units = len(columns_u4)
    all_sums_14 = columns_u4.sum(axis=0)[None]
    all_products_116 = products_u16.sum(axis=0)[None]
    difference_1, error_1 = _estimate_differences(all_sums_14, all_products_116, num_units)
    difference, error = float(difference_1[0]), float(error_1[0])
    if num_units < MIN_DOCUMENTS:
        return BootstrapResult(difference, error, np.zeros(0))

    tail_correction = 1 + CAUTION / num_units
    if num_units > MAX_RESAMPLED:
        quantiles = (np.arange(NUM_RESAMPLES) + 0.5) / NUM_RESAMPLES
        normal_d = np.array([NormalDist().inv_cdf(quantile) for quantile in quantiles])
        return BootstrapResult(difference, error, normal_d, tail_correction)

    sums_d20 = bootstrap_sums(np.concatenate([columns_u4, products_u16], axis=1), generator)
    differences_d, errors_d = _estimate_differences(sums_d20[:, :4], sums_d20[:, 4:], num_units)
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations_d = np.nan_to_num((differences_d - difference) / errors_d, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return BootstrapResult(difference, error, np.sort(deviations_d), tail_correction)


def _estimate_differences(sums_d4: Floats, products_d16: Floats, num_units: int) -> tuple[Floats, Floats]:
    """Return the difference of two ratios and its standard error, each [d draws].

    `sums_d4` has the sums over all units of (numerator, denominator) of the first and of the other ratio,
    `products_d16` those of all products of two of these four columns. The linearised difference of a unit is a weighted
    sum of its four columns, so the sum of its squares over units follows from the sums of the products.
    """
    first_numerator_d, first_denominator_d, other_numerator_d, other_denominator_d = sums_d4.T
    first_ratio_d = first_numerator_d / first_denominator_d
    other_ratio_d = other_numerator_d / other_denominator_d
    weights_d4 = np.stack(
        [
            -1 / first_denominator_d,
            first_ratio_d / first_denominator_d,
            1 / other_denominator_d,
            -other_ratio_d / other_denominator_d,
        ],
        axis=1,
    )
    squares_d = np.einsum("di,dij,dj->d", weights_d4, products_d16.reshape(-1, 4, 4), weights_d4)
    errors_d = np.sqrt(np.maximum(squares_d, 0) * num_units / max(num_units - 1, 1))
    return other_ratio_d - first_ratio_d, errors_d


def bootstrap_sums(values_uk: Floats, generator: np.random.Generator, num_draws: int = NUM_RESAMPLES) -> Floats:
    """Return the column sums of resampled units, [num_draws, k].

    Each draw takes as many rows as `values_uk` has, with replacement. How often a draw takes each row is counted, and
    the counts are multiplied with the values, for some draws at a time to bound the memory.
    """
    num_units = len(values_uk)
    draws_at_once = max(1, RESAMPLED_AT_ONCE // num_units)
    sums: list[Floats] = []
    for start in range(0, num_draws, draws_at_once):
        num_here = min(draws_at_once, num_draws - start)
        chosen_du = generator.integers(0, num_units, (num_here, num_units))
        # Every draw counts in a range of its own, so that one call counts for all of them.
        first_of_draw_d1 = np.arange(num_here)[:, None] * num_units
        counts = np.bincount((chosen_du + first_of_draw_d1).ravel(), minlength=num_here * num_units)
        sums.append(counts.reshape(num_here, num_units) @ values_uk)
    return np.concatenate(sums)


def holm(p_values: Sequence[float], level: float = LEVEL) -> tuple[list[float], list[float]]:
    """Correct p-values for the number of tests by Holm's method (Scandinavian Journal of Statistics 6, 1979).

    If no difference is real, the probability that any corrected p-value is below `level` is at most `level`. The
    smallest of n p-values is compared with level / n, the next one with level / (n - 1), and so on, until one is not
    below its level. That one and all larger ones are compared with its level.

    Returns two lists in the order of `p_values`: the corrected p-values, and the levels that the p-values themselves
    are compared with. corrected < level is true exactly where p < its own level.
    """
    corrected = [0.0] * len(p_values)
    levels = [level] * len(p_values)
    largest_corrected = 0.0
    own_level = level
    all_rejected_so_far = True
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for num_before, index in enumerate(ascending):
        num_left = len(p_values) - num_before
        if all_rejected_so_far:
            own_level = level / num_left
            all_rejected_so_far = p_values[index] < own_level
        largest_corrected = max(largest_corrected, min(1.0, num_left * p_values[index]))
        corrected[index] = largest_corrected
        levels[index] = own_level
    return corrected, levels
