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
Z_POWER = NormalDist().inv_cdf(0.8)


def z_of(level: float) -> float:
    """Return the standard normal quantile of a two-sided test at `level`."""
    return NormalDist().inv_cdf(1 - level / 2)


class Counts(NamedTuple):
    """Units won, lost and asked, and the part of a difference that one of them adds. Numbers or arrays."""

    wins: float | Floats
    losses: float | Floats
    num_units: int
    jump: float | Floats
    num_effective: float = math.inf  # units of one size that would be worth as much

    @property
    def variance(self) -> float | Floats:
        """Variance of the difference."""
        wins, losses, n, jump, _ = self
        return (jump / n) ** 2 * (wins + losses - (wins - losses) ** 2 / n)


def count(added_u: Floats, share_u: Floats) -> Counts:
    """Count units of any weight and size as if each won or lost one jump, with the same sum and sum of squares.

    `added_u` is each unit's part of the difference, and `share_u` the most that it could be; shares add up to 1. Units
    of several items (clusters, or an item that several tasks ask) add several jumps, or parts of one. With j = n Σa² /
    Σ|a|, wins and losses are (Σ|a| ± Σa) Σ|a| / 2Σa². At 0 the statistic is Σa / √Σa², that of flipped signs.
    """
    n = len(added_u)
    total, absolute, squares = float(added_u.sum()), float(np.abs(added_u).sum()), float((added_u**2).sum())
    # Kish's effective number of units (Survey Sampling, 1965, section 11.7): where one unit holds most of the items,
    # the others tell little about the error of the difference.
    effective = round(float(share_u.sum() ** 2 / (share_u**2).sum()), 6)
    if squares == 0:
        return Counts(0.0, 0.0, n, n * float((share_u**2).sum()), effective)
    ratio = absolute / squares / 2
    return Counts((absolute + total) * ratio, (absolute - total) * ratio, n, n * squares / absolute, effective)


def score_p(counts: Counts) -> float:
    """Return the two-sided p of McNemar's test with half a continuity correction; 1 below MIN_UNITS."""
    wins, losses, n, _, effective = counts
    distance = max(0.0, abs(wins - losses) - CORRECTION)
    if min(n, effective) < MIN_UNITS or not distance:
        return 1.0
    return math.erfc(distance / math.sqrt(2 * (wins + losses)))


def score_interval(counts: Counts, level: float) -> tuple[float, float] | None:
    """Return the differences that `score_p` does not reject at `level` (0.05 for 95 %). None below MIN_UNITS."""
    wins, losses, n, jump, effective = counts
    if min(n, effective) < MIN_UNITS:
        return None
    z = z_of(level)
    low, high = -upper_limit(losses, wins, n, z), upper_limit(wins, losses, n, z)
    # With units of different sizes, a jump may exceed the largest difference of two accuracies.
    return max(-1.0, float(jump * low)), min(1.0, float(jump * high))


def upper_limit(wins: float | Floats, losses: float | Floats, num_units: int, z: float) -> Floats:
    """Return the difference, in jumps, that lies z standard deviations and the correction above the observed one.

    The standard deviation is that of the likeliest proportions with that difference (Tango's equation, in which q is
    the proportion lost). Numbers or arrays; found by bisection, to 1e-15.
    """
    wins, losses = np.asarray(wins, np.float64), np.asarray(losses, np.float64)
    low, high = (wins - losses) / num_units, np.ones_like(wins)
    for _ in range(50):
        middle = (low + high) / 2
        half_b = ((2 * num_units - wins + losses) * middle - wins - losses) / 2
        c = -losses * middle * (1 - middle)
        root = np.sqrt(np.maximum(half_b**2 - 2 * num_units * c, 0))
        # The form of the quadratic's root that has no cancellation.
        q = np.where(half_b > 0, -c / np.maximum(root + half_b, 1e-300), (root - half_b) / (2 * num_units))
        deviation = np.sqrt(np.maximum(num_units * (2 * q + middle * (1 - middle)), 0))
        is_beyond = num_units * middle - (wins - losses) - CORRECTION > z * deviation
        low, high = np.where(is_beyond, low, middle), np.where(is_beyond, middle, high)
    return high


class Studentised(NamedTuple):
    """A difference, its standard error, and the bootstrap's deviations in units of that error."""

    difference: float
    error: float
    deviations_d: Floats  # sorted; empty where nothing is claimed
    caution: float = 1.0  # p is multiplied by it

    @property
    def p(self) -> float:
        """Two-sided p: the larger one of symmetric and of equal tails. The data count as one of the draws."""
        draws = self.deviations_d
        if not len(draws) or not self.difference:
            return 1.0
        found = self.difference / self.error if self.error else math.copysign(math.inf, self.difference)
        num_farther = int((np.abs(draws) >= abs(found)).sum())
        num_in_tail = 2 * min(int((draws >= found).sum()), int((draws <= found).sum())) + 1
        return min(1.0, self.caution * (1 + max(num_farther, num_in_tail)) / (1 + len(draws)))

    def interval(self, level: float) -> tuple[float, float] | None:
        """Return the differences that p does not reject at `level`. None if nothing is claimed or draws are too few."""
        draws = self.deviations_d
        room = level / self.caution * (1 + len(draws)) * (1 - 1e-12)
        both, each = math.ceil(room - 1) - 1, math.ceil(room / 2 - 1) - 1  # draws that may be farther out
        if each < 0:
            return None
        half_width = np.sort(np.abs(draws))[-1 - both]
        above, below = max(half_width, draws[-1 - each]), min(-half_width, draws[each])
        low, high = self.difference - float(above) * self.error, self.difference - float(below) * self.error
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def difference_of_ratios(first_u2: Floats, other_u2: Floats, generator: np.random.Generator) -> Studentised:
    """Return `other` less `first`, each the ratio of the sums of its two columns over the same units.

    The standard error is of the linearised ratios (Cochran, Sampling Techniques, 3rd edition, 1977, chapter 6). Nothing
    is claimed below MIN_DOCUMENTS units.
    """
    columns_uk = np.concatenate([first_u2, other_u2], axis=1)
    n, k = columns_uk.shape
    products_uk = (columns_uk[:, :, None] * columns_uk[:, None, :]).reshape(n, k * k)

    def estimate(sums_dk: Floats, products_dk: Floats) -> tuple[Floats, Floats]:
        nats_a, size_a, nats_b, size_b = sums_dk.T
        ratio_a, ratio_b = nats_a / size_a, nats_b / size_b
        # A unit's deviation from what the ratios predict for its size.
        residual_dk = np.stack([-1 / size_a, ratio_a / size_a, 1 / size_b, -ratio_b / size_b], axis=1)
        squares_d = np.einsum("di,dij,dj->d", residual_dk, products_dk.reshape(-1, k, k), residual_dk)
        return ratio_b - ratio_a, np.sqrt(np.maximum(squares_d, 0) * n / max(n - 1, 1))

    difference, error = estimate(columns_uk.sum(axis=0)[None], products_uk.sum(axis=0)[None])
    found, its_error = float(difference[0]), float(error[0])
    if n < MIN_DOCUMENTS:
        return Studentised(found, its_error, np.zeros(0))
    if n > MAX_RESAMPLED:
        ranks = (np.arange(NUM_RESAMPLES) + 0.5) / NUM_RESAMPLES
        return Studentised(found, its_error, np.array([NormalDist().inv_cdf(rank) for rank in ranks]), 1 + CAUTION / n)
    draws = bootstrap_sums(np.concatenate([columns_uk, products_uk], axis=1), generator)
    differences_d, errors_d = estimate(draws[:, :k], draws[:, k:])
    with np.errstate(divide="ignore", invalid="ignore"):
        deviations_d = np.nan_to_num((differences_d - found) / errors_d, nan=0.0, posinf=np.inf, neginf=-np.inf)
    return Studentised(found, its_error, np.sort(deviations_d), 1 + CAUTION / n)


def bootstrap_sums(values_uk: Floats, generator: np.random.Generator, num: int = NUM_RESAMPLES) -> Floats:
    """Return (num, k): the column sums of u rows drawn from `values_uk` with replacement, `num` times."""
    n = len(values_uk)
    parts, chunk = [], max(1, 2_000_000 // n)
    for start in range(0, num, chunk):
        rows = min(chunk, num - start)
        drawn = generator.integers(0, n, (rows, n)) + np.arange(rows)[:, None] * n
        parts.append(np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n) @ values_uk)
    return np.concatenate(parts)


def holm(values: Sequence[float], level: float = LEVEL) -> tuple[list[float], list[float]]:
    """Return (p corrected for the number of tests, the level that p itself was compared with), each as a list, after
    Holm (Scandinavian Journal of Statistics 6, 1979): the chance that luck puts any below `level` is `level`.

    The smallest p is compared with level / n, the next with level / (n - 1), and so on. From the first that is not
    below its level, all are compared with that one. So corrected < level exactly where p < its own level.
    """
    corrected, levels = [0.0] * len(values), [level] * len(values)
    largest, own_level, is_open = 0.0, level, True
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        num_left = len(values) - rank
        if is_open:
            own_level = level / num_left
            is_open = values[i] < own_level
        largest = max(largest, min(1.0, num_left * values[i]))
        corrected[i], levels[i] = largest, own_level
    return corrected, levels
