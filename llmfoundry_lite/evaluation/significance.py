"""Paired significance tests of two models on the same items, and the intervals that invert them.

The input is each independent unit's part of a difference; `compare.py` decides what the units are. At every level an
interval excludes 0 exactly if its test's p-value is below the level. Neither scipy nor statsmodels is a dependency, and
neither has a score interval of paired proportions, the continuity correction, or the tail correction of the bootstrap.

Accuracies: `count` describes the units as wins and losses, `score_p` is McNemar's test, and `score_interval` is Tango's
score interval for a difference of paired proportions (Statistics in Medicine 17, 1998), whose statistic at 0 is
McNemar's. Both have half a continuity correction. Without it, up to 6.5 % of equal models are called different (50
items, exact sums); with it, at most 4.9 % (6 to 1,000 items).

Bits per byte: `difference_of_ratios` is a studentised bootstrap (Hall, The Bootstrap and Edgeworth Expansion, 1992,
section 3.6), with the wider of the intervals with symmetric and with equal tails. A few documents do not show a long
tail, so the p-value is multiplied by 1 + CAUTION / n. Without that, 8.8 % of equal models are called different from 20
log-normal differences, and 5.7 % from 200. `python -m benchmarks intervals` measures these rates.

Legend: u independent units, d draws, k columns.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVEL = 0.05
"""A difference is significant if its corrected p-value is below this level."""
SEED = 17
NUM_RESAMPLES = 10_000
"""Number of draws of the bootstrap, unless a comparison needs more for its level (`num_draws_for`)."""
DRAWS_BEYOND = 20
"""Number of draws that should lie beyond the ends of an interval. With fewer, its ends depend on chance."""
MAX_DRAWN_UNITS = 1_000_000_000
"""Number of units that the draws of all tests may draw together, which takes about a quarter of a minute."""
RESAMPLED_AT_ONCE = 2_000_000
"""Number of units that are drawn at a time, over several draws: 16 MB of counts."""
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
    """Independent units on which one of two models did better or worse, and how much each adds to the difference.

    Fields are numbers, or arrays for many comparisons at once. With items as units, wins and losses are whole numbers.
    """

    wins: float | Floats
    """Number of units on which the other model did better than the first."""
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
    McNemar's statistic is then Σa / √Σa², as in a test with randomly flipped signs.

    For 4 items of equal weight, of which the other model wins 2 and loses 1, the differences are [1/4, 1/4, -1/4, 0],
    and the result has wins 2, losses 1 and jump 1.
    """
    # The sums that the counts depend on.
    num_units = len(differences_u)
    total = float(differences_u.sum())
    total_absolute = float(np.abs(differences_u).sum())
    total_squares = float((differences_u**2).sum())
    squared_weights = float((weights_u**2).sum())

    # Kish's effective number of units (Survey Sampling, 1965, section 11.7). If one unit holds most of the items, the
    # others tell little about the error of the difference.
    num_effective = round(float(weights_u.sum() ** 2 / squared_weights), 6)

    # Both models did equally well on every unit. The jump is what it would be if all units differed by their weight.
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
    corrected_net_wins = max(0.0, abs(counts.wins - counts.losses) - CORRECTION)
    if corrected_net_wins == 0:
        return 1.0
    # If no difference is real, net wins have variance wins + losses. P(|Z| > z) = erfc(z / √2).
    return math.erfc(corrected_net_wins / math.sqrt(2 * (counts.wins + counts.losses)))


def score_interval(counts: Counts, level: float) -> tuple[float, float] | None:
    """Return the interval (low, high) of differences that `score_p` does not reject.

    `level` is the level of the test: 0.05 gives the 95 % interval. Returns None if there are fewer than MIN_UNITS
    independent units.
    """
    if min(counts.num_units, counts.num_effective) < MIN_UNITS:
        return None

    # The lower limit is the upper limit of the opposite difference, with wins and losses exchanged.
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

    wins, losses: counts of units, as numbers or as arrays for many comparisons at once.
    z: standard normal quantile of the level, as `z_of` returns it.

    The limit is found by bisection, to 1e-15.
    """
    wins = np.asarray(wins, np.float64)
    losses = np.asarray(losses, np.float64)
    net_wins = wins - losses

    # The limit lies between the observed difference, which is never rejected, and the largest possible one.
    low = net_wins / num_units
    high = np.ones_like(wins)
    for _ in range(NUM_BISECTIONS):
        difference = (low + high) / 2
        # The likeliest proportion q of losses solves a quadratic equation, written as 2 n q^2 + 2 half_b q + c = 0.
        half_b = ((2 * num_units - net_wins) * difference - wins - losses) / 2
        c = -losses * difference * (1 - difference)
        root = np.sqrt(np.maximum(half_b**2 - 2 * num_units * c, 0))
        # There are two equivalent formulas for the root, and each branch takes the one without cancellation. The first
        # branch is also evaluated where it is not used, and its denominator must not be 0 there.
        q = np.where(half_b > 0, -c / np.maximum(root + half_b, 1e-300), (root - half_b) / (2 * num_units))

        # Go on in the half that has the limit.
        deviation = np.sqrt(np.maximum(num_units * (2 * q + difference * (1 - difference)), 0))
        is_rejected = num_units * difference - net_wins - CORRECTION > z * deviation
        low = np.where(is_rejected, low, difference)
        high = np.where(is_rejected, difference, high)
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
        """Two-sided p-value: the fraction of draws that deviate at least as much as the data do from no difference.

        There are two ways to count them, and the larger p-value is taken. Symmetric tails count the draws that deviate
        as much in either direction. Equal tails count the draws that deviate as much in one direction, twice. The data
        themselves count as one of the draws, so the p-value is never 0. It is 1 if nothing is claimed.
        """
        deviations_d = self.deviations_d
        if not len(deviations_d) or not self.difference:
            return 1.0

        # The observed difference in standard errors. Without any error, it is farther than every draw.
        if self.error:
            observed = self.difference / self.error
        else:
            observed = math.copysign(math.inf, self.difference)

        num_in_symmetric_tails = int((np.abs(deviations_d) >= abs(observed)).sum())
        num_above = int((deviations_d >= observed).sum())
        num_below = int((deviations_d <= observed).sum())
        num_in_equal_tails = 2 * min(num_above, num_below) + 1
        num_as_extreme = 1 + max(num_in_symmetric_tails, num_in_equal_tails)
        return min(1.0, self.tail_correction * num_as_extreme / (1 + len(deviations_d)))

    @property
    def min_p(self) -> float:
        """The smallest p-value that this many draws can give: the data themselves and one draw are as extreme."""
        return min(1.0, 2 * self.tail_correction / (1 + len(self.deviations_d)))

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return the interval (low, high) of differences that `p` does not reject at `level`, which is 0.05 for 95 %.

        It inverts `p`: a difference is in the interval if at least a fraction `level` of the draws deviate as much as
        the data do from it. Since the p-value is the larger one of two, the interval is the wider one of two. With
        symmetric tails, its ends are equally far from the observed difference. With equal tails, the same number of
        draws lies beyond each end.

        Returns None if nothing is claimed, or if there are too few draws for such a level.
        """
        # Find how many draws may lie beyond the ends. The factor keeps rounding errors from allowing one draw too many.
        deviations_d = self.deviations_d
        num_allowed = level / self.tail_correction * (1 + len(deviations_d)) * (1 - 1e-12)
        num_beyond_both = math.ceil(num_allowed - 1) - 1
        num_beyond_each = math.ceil(num_allowed / 2 - 1) - 1
        if num_beyond_each < 0:
            return None

        # Take the wider of the two intervals at each end, in standard errors. The deviations are sorted.
        half_width = np.sort(np.abs(deviations_d))[-1 - num_beyond_both]
        highest = max(half_width, deviations_d[-1 - num_beyond_each])
        lowest = min(-half_width, deviations_d[num_beyond_each])

        # A draw far above the observed difference means that the true one may lie far below it.
        low = self.difference - float(highest) * self.error
        high = self.difference - float(lowest) * self.error
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        return low, high


class NormalResult(NamedTuple):
    """A difference of two ratios with its standard error, whose deviations are normally distributed.

    It has the p-value and the intervals of a `BootstrapResult` with infinitely many draws.
    """

    difference: float
    error: float
    tail_correction: float

    @property
    def p(self) -> float:
        """Two-sided p-value."""
        if not self.difference:
            return 1.0
        if not self.error:
            return 0.0
        return min(1.0, self.tail_correction * math.erfc(abs(self.difference) / self.error / math.sqrt(2)))

    @property
    def min_p(self) -> float:
        """The smallest p-value: 0, because nothing is drawn."""
        return 0.0

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval (low, high) of differences that `p` does not reject at `level`."""
        half_width = z_of(level / self.tail_correction) * self.error
        return self.difference - half_width, self.difference + half_width


def num_draws_for(num_units: int, tail_correction: float, smallest_level: float) -> int:
    """Return how many draws a bootstrap needs, so that a difference can be found at `smallest_level`.

    The p-value of N draws is at least 2 tail_correction / (N + 1), so a comparison of many models, whose levels are
    small, needs more than NUM_RESAMPLES: with 132 tests of 32 documents, 118,800. MAX_DRAWN_UNITS bounds the time.
    """
    num_needed = math.ceil(DRAWS_BEYOND * tail_correction / smallest_level)
    num_tests = LEVEL / smallest_level
    num_affordable = int(MAX_DRAWN_UNITS / num_tests / num_units)
    return max(NUM_RESAMPLES, min(num_needed, num_affordable))


def difference_of_ratios(
    first_u2: Floats,
    other_u2: Floats,
    generator: np.random.Generator,
    smallest_level: float = LEVEL,
    num_effective: float | None = None,
) -> BootstrapResult | NormalResult:
    """Return the difference of two ratios, `other` minus `first`, with its standard error and its bootstrap.

    first_u2, other_u2: numerator and denominator of each independent unit, such as the bits and bytes of a document.
        A ratio is the sum of the numerators over the sum of the denominators. Both arrays have the same units, which
        are resampled together, because two models tend to find the same documents difficult.
    generator: source of the random draws.
    smallest_level: the lowest level that the p-value may be compared with, which decides the number of draws.
    num_effective: the number of units of equal weight that would tell as much; None for the number of units.

    The standard error is that of the linearised ratios (Cochran, Sampling Techniques, 3rd edition, 1977, chapter 6).
    With fewer than MIN_DOCUMENTS units there are no draws, and nothing is claimed. With more than MAX_RESAMPLED, the
    normal distribution replaces the bootstrap.
    """
    # The difference and its standard error follow from sums over units: of the 4 columns, and of the 16 products of two
    # of them. So only these sums are needed, for the data and for each draw.
    columns_u4 = np.concatenate([first_u2, other_u2], axis=1)
    products_u16 = (columns_u4[:, :, None] * columns_u4[:, None, :]).reshape(-1, 16)
    num_units = len(columns_u4)

    # The data count as a single draw.
    sums_14 = columns_u4.sum(axis=0)[None]
    products_116 = products_u16.sum(axis=0)[None]
    difference_1, error_1 = _estimate_differences(sums_14, products_116, num_units)
    difference = float(difference_1[0])
    error = float(error_1[0])
    num_effective = num_units if num_effective is None else num_effective
    if num_effective < MIN_DOCUMENTS:
        return BootstrapResult(difference, error, np.zeros(0))

    # With many units, the deviations are nearly normal, and drawing would take long.
    tail_correction = 1 + CAUTION / num_effective
    if num_units > MAX_RESAMPLED:
        return NormalResult(difference, error, tail_correction)

    # The studentised bootstrap divides the deviation of each draw by the draw's own standard error. A draw without
    # deviation and error counts as 0, and one with a deviation but no error as infinitely far.
    columns_and_products_u20 = np.concatenate([columns_u4, products_u16], axis=1)
    num_draws = num_draws_for(num_units, tail_correction, smallest_level)
    deviations: list[Floats] = []
    for sums_d20 in bootstrap_sums(columns_and_products_u20, generator, num_draws):
        differences_d, errors_d = _estimate_differences(sums_d20[:, :4], sums_d20[:, 4:], num_units)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios_d = (differences_d - difference) / errors_d
        deviations.append(np.nan_to_num(ratios_d, nan=0.0, posinf=np.inf, neginf=-np.inf))
    return BootstrapResult(difference, error, np.sort(np.concatenate(deviations)), tail_correction)


def _estimate_differences(sums_d4: Floats, products_d16: Floats, num_units: int) -> tuple[Floats, Floats]:
    """Estimate the difference of two ratios, and its standard error, for each of several draws of the units.

    sums_d4: sums over the units of a draw: numerator and denominator of the first ratio, then of the other ratio.
    products_d16: sums over the units of all products of two of these four columns, row by row of a 4 x 4 matrix.
    num_units: the number of units in each draw.

    Returns the differences, `other` minus `first`, and their standard errors, each [d draws]. The linearised difference
    of a unit is a weighted sum w·x of its four columns x, so the sum of its squares over units is w' (Σ x x') w, which
    follows from the sums of the products.
    """
    first_numerator_d, first_denominator_d, other_numerator_d, other_denominator_d = sums_d4.T
    first_ratio_d = first_numerator_d / first_denominator_d
    other_ratio_d = other_numerator_d / other_denominator_d

    # Weights of the four columns: the derivatives of the difference with respect to the four sums.
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

    # Rounding may make a sum of squares that is 0 slightly negative.
    errors_d = np.sqrt(np.maximum(squares_d, 0) * num_units / max(num_units - 1, 1))
    return other_ratio_d - first_ratio_d, errors_d


def bootstrap_sums(values_uk: Floats, generator: np.random.Generator, num_draws: int) -> Iterator[Floats]:
    """Yield the column sums of resampled units, some draws at a time, [draws, k], until there are `num_draws`.

    Each draw takes as many rows as `values_uk` has, with replacement, and adds them up. A draw of rows 0, 0 and 2 from
    three rows has the counts [2, 0, 1], and its sums are these counts times the rows.
    """
    num_units = len(values_uk)
    max_draws_at_once = max(1, RESAMPLED_AT_ONCE // num_units)  # bounds the memory
    for start in range(0, num_draws, max_draws_at_once):
        num_draws_at_once = min(max_draws_at_once, num_draws - start)
        chosen_du = generator.integers(0, num_units, (num_draws_at_once, num_units))

        # Count how often each draw takes each row. Every draw has a separate range of numbers, so that one call counts
        # for all of them.
        range_start_d1 = np.arange(num_draws_at_once)[:, None] * num_units
        counts = np.bincount((chosen_du + range_start_d1).ravel(), minlength=num_draws_at_once * num_units)
        counts_du = counts.reshape(num_draws_at_once, num_units)
        yield counts_du @ values_uk


def holm(p_values: Sequence[float], level: float = LEVEL) -> tuple[list[float], list[float]]:
    """Correct p-values for the number of tests by Holm's method (Scandinavian Journal of Statistics 6, 1979).

    If no difference is real, the probability that any corrected p-value is below `level` is at most `level`. The
    smallest of n p-values is compared with level / n, the next one with level / (n - 1), and so on, until one is not
    below its level. That one and all larger ones are compared with its level.

    Returns two lists in the order of `p_values`: the corrected p-values, and the levels that the p-values themselves
    are compared with. A corrected p-value is below `level` exactly if the p-value is below its own level.

    For the p-values 0.01, 0.03 and 0.04, the corrected p-values are 0.03, 0.06 and 0.06, and the levels 0.05 / 3,
    0.05 / 2 and 0.05 / 2. Only the first difference is significant.
    """
    corrected_p_values = [0.0] * len(p_values)
    levels = [level] * len(p_values)
    largest_corrected = 0.0
    step_level = level
    all_rejected_so_far = True
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for num_before, index in enumerate(ascending):
        num_left = len(p_values) - num_before

        # The level grows from test to test until one is not below it, and then stays.
        if all_rejected_so_far:
            step_level = level / num_left
            all_rejected_so_far = p_values[index] < step_level

        # A corrected p-value is at least as large as those before it, so that their order stays the same.
        largest_corrected = max(largest_corrected, min(1.0, num_left * p_values[index]))
        corrected_p_values[index] = largest_corrected
        levels[index] = step_level
    return corrected_p_values, levels
