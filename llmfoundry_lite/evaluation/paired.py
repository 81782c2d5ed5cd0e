"""The statistics of two models that answered the same items: intervals, tests, and how many items a point would take.

Arithmetic on arrays of differences, one number for each item; what they are differences of is left to compare.py.
Where the differences take few values, as those of right and wrong answers do, drawing items with replacement is drawing
from a multinomial, and flipping signs from binomials: the same distribution, in a fraction of the time.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_RESAMPLES = 10_000
NUM_EXACT = 1_000
"""Discordant items up to which McNemar's test is computed exactly."""
FEW_VALUES = 64
Z_TWO_SIDED, Z_POWER = 1.959964, 0.841621
"""Standard normal quantiles of 0.975 and 0.8."""


def bootstrap_sums(values_nk: Floats, generator: np.random.Generator, num: int = NUM_RESAMPLES) -> Floats:
    """(num, k): the column sums of n rows that were drawn from `values_nk` with replacement, `num` times."""
    n, k = values_nk.shape
    rows_uk, counts_u = np.unique(values_nk, axis=0, return_counts=True)
    if len(rows_uk) <= FEW_VALUES:
        return generator.multinomial(n, counts_u / n, num) @ rows_uk
    chunk = max(1, 4_000_000 // (n * k))
    parts = [
        values_nk[generator.integers(0, n, (min(chunk, num - start), n))].sum(axis=1) for start in range(0, num, chunk)
    ]
    return np.concatenate(parts)


def flipped_sums(values_n: Floats, generator: np.random.Generator, num: int = NUM_RESAMPLES) -> Floats:
    """(num,): the sum with the sign of every value drawn anew, as chance gives it when the models are equally good."""
    sizes_u, counts_u = np.unique(np.abs(values_n), return_counts=True)
    if len(sizes_u) <= FEW_VALUES:
        flipped_nu = 2 * generator.binomial(counts_u, 0.5, (num, len(sizes_u))) - counts_u
        return (flipped_nu @ sizes_u).astype(np.float64)
    chunk = max(1, 4_000_000 // len(values_n))
    parts = [
        (2.0 * generator.integers(0, 2, (min(chunk, num - start), len(values_n)), dtype=np.int8) - 1) @ values_n
        for start in range(0, num, chunk)
    ]
    return np.concatenate(parts)


def interval(draws: Floats) -> tuple[float, float]:
    """The middle 95 % (percentile bootstrap)."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(values_n: Floats, generator: np.random.Generator, num: int = NUM_RESAMPLES) -> float:
    """Two-sided p of a sum this far from zero; at least 1 / (num + 1), as the data are one of the draws."""
    return p_among(flipped_sums(values_n, generator, num), float(values_n.sum()))


def p_among(draws: Floats, found: float) -> float:
    as_far = np.abs(draws) >= abs(found) * (1 - 1e-9)
    return (1 + int(as_far.sum())) / (1 + len(draws))


def mcnemar_p(wins: int, losses: int) -> float:
    """Two-sided p of McNemar's test: exact binomial, or chi-square with continuity correction where many differ."""
    num = wins + losses
    if num == 0:
        return 1.0
    if num <= NUM_EXACT:
        tail = sum(math.comb(num, i) for i in range(min(wins, losses) + 1))
        return min(1.0, 2 * tail / 2**num)
    chi_square = max(0, abs(wins - losses) - 1) ** 2 / num
    return math.erfc(math.sqrt(chi_square / 2))


def holm(values: Sequence[float]) -> list[float]:
    """Each p, corrected for there being several (Holm 1979): the chance that any is below 0.05 by luck is 5 %."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def items_needed(discordance: float, difference: float = 0.01) -> int:
    """Items that McNemar's test at 0.05 needs to find `difference` with 80 % power, when the share `discordance` of
    items is right in one model alone (Connor 1987); that share cannot be smaller than the difference itself."""
    share = max(discordance, difference)
    root = Z_TWO_SIDED * math.sqrt(share) + Z_POWER * math.sqrt(share - difference**2)
    return math.ceil((root / difference) ** 2)


def documents_needed(deviation: float, difference: float = 0.01) -> int:
    """As items_needed, for differences that are numbers with this standard deviation."""
    return max(2, math.ceil(((Z_TWO_SIDED + Z_POWER) * deviation / difference) ** 2))
