"""Group-sequential boundaries: how far a difference must be from 0 at each of several looks, so that looking often does
not raise the error.

Lan and DeMets (Biometrika 70, 1983): a function says how much of the error is spent by the time a share t of the
information is there. The boundary at a look is where exactly what is spent by then has been crossed, given that
nothing was crossed before. That chance is Armitage, McPherson and Rowe's recursion (Journal of the Royal Statistical
Society A 132, 1969): the density of a sum that is still inside, carried from look to look, here on Gauss-Legendre
nodes. Boundaries are two-sided and symmetric, with half of the error on each side.

Legend: i nodes of the look before, j of this one.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

OBRIEN_FLEMING, POCOCK = "obrien_fleming", "pocock"
NUM_NODES = 96
"""Enough for 20 looks at any level: more change no boundary by 1e-12."""
FARTHEST = 9.0
"""Standard deviations beyond which nothing is left to integrate."""
LEAST_SPENT = 1e-250
"""A look that may spend less than this decides nothing."""


def _spend_late(share: float, level: float) -> float:
    """O'Brien-Fleming-type: next to nothing at first, and nearly a single test's boundary at the end."""
    return 2 * math.erfc(-NormalDist().inv_cdf(level / 4) / math.sqrt(2 * share))


def _spend_evenly(share: float, level: float) -> float:
    """Pocock-type: nearly the same boundary at every look."""
    return level * math.log(1 + (math.e - 1) * share)


SPENDING: dict[str, Callable[[float, float], float]] = {OBRIEN_FLEMING: _spend_late, POCOCK: _spend_evenly}


@lru_cache(maxsize=1024)
def boundaries(shares: tuple[float, ...], level: float, spending: str = OBRIEN_FLEMING) -> tuple[float, ...]:
    """At looks with these shares of the information, ascending up to 1: the distance from 0, in standard errors, beyond
    which a difference is one. inf where a look may spend nothing yet."""
    found: list[float] = []
    nodes_i, mass_i = np.zeros(1), np.ones(1)
    spent = before = 0.0
    unit_nodes, unit_weights = np.polynomial.legendre.leggauss(NUM_NODES)
    for share in shares:
        to_spend = SPENDING[spending](share, level) - spent
        deviation = math.sqrt(share - before)
        limit = _crossed_with(to_spend, nodes_i, mass_i, deviation, math.sqrt(share))
        found.append(limit / math.sqrt(share))
        spent, before = spent + to_spend, share
        nodes_j = min(limit, FARTHEST * math.sqrt(share)) * unit_nodes
        weights_j = min(limit, FARTHEST * math.sqrt(share)) * unit_weights
        steps_ji = (nodes_j[:, None] - nodes_i) / deviation
        density_j = np.exp(-(steps_ji**2) / 2) @ mass_i / (deviation * math.sqrt(2 * math.pi))
        nodes_i, mass_i = nodes_j, weights_j * density_j
    return tuple(found)


def _crossed_with(chance: float, nodes_i: np.ndarray, mass_i: np.ndarray, deviation: float, whole: float) -> float:
    """The limit that a step of this deviation crosses, on either side, with `chance`; `whole` is the deviation of the
    sum. By Newton's method on the logarithm, which comes from outside and stays there: the tail is log-concave."""
    if chance < LEAST_SPENT:
        return math.inf
    limit = -NormalDist().inv_cdf(chance / 2) * whole
    for _ in range(100):
        distances = (limit - nodes_i) / deviation
        crossed = float(mass_i @ np.array([math.erfc(distance / math.sqrt(2)) for distance in distances.tolist()]))
        slope = -2 * float(mass_i @ np.exp(-(distances**2) / 2)) / (deviation * math.sqrt(2 * math.pi))
        step = math.log(crossed / chance) * crossed / slope
        limit -= step
        if abs(step) < 1e-10:
            break
    return limit


def nominal_level(shares: tuple[float, ...], level: float, spending: str = OBRIEN_FLEMING) -> float:
    """What a single test's p must be below at the last of these looks."""
    return math.erfc(boundaries(shares, level, spending)[-1] / math.sqrt(2))


def adjusted_p(p: float, shares: tuple[float, ...], spending: str = OBRIEN_FLEMING) -> float:
    """The smallest level at which a single test's `p` would be enough at the last of these looks: a p-value that
    stopping when it pleases does not spoil (Liu and Anderson, Journal of the American Statistical Association 103,
    2008)."""
    if p in (0.0, 1.0):
        return p

    def excess(log_level: float) -> float:
        return math.log(max(nominal_level(shares, math.exp(log_level), spending), LEAST_SPENT) / p)

    low, high = math.log(p), math.log(0.999)  # looking often never makes it smaller
    below, above = excess(low), excess(high)
    if above <= 0:
        return 1.0
    if below >= 0:
        return p  # a single look
    while high - low > 1e-9:  # the Illinois method: a secant that keeps the root between its ends
        middle = min(max((low * above - high * below) / (above - below), low), high)
        found = excess(middle)
        if abs(found) < 1e-10:
            return math.exp(middle)
        if found > 0:
            high, above, below = middle, found, below / 2
        else:
            low, below, above = middle, found, above / 2
    return math.exp(high)
