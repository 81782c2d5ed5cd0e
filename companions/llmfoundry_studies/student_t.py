"""Student's t distribution: tail probabilities and quantiles, without scipy.

With t = sqrt(df) / tan(phi), the probability beyond t is the integral of sin(phi)^(df - 1) from 0 to phi, divided by
sqrt(pi) gamma(df / 2) / gamma((df + 1) / 2). Gauss-Legendre quadrature gives it to about ten digits.
"""

import math

import numpy as np

NUM_NODES = 256
MAX_DF = 2000.0
"""Degrees of freedom above which the distribution is replaced by a normal one with a corrected argument (Abramowitz and
Stegun 1964, 26.7.8), whose error is below 1e-7 there."""
NUM_BISECTIONS = 80
MAX_QUANTILE = 1e6

_nodes, _weights = np.polynomial.legendre.leggauss(NUM_NODES)
UNIT_NODES = (_nodes + 1) / 2
"""Nodes of the quadrature in [0, 1], and their weights."""
UNIT_WEIGHTS = _weights / 2


def upper_tail(t: float, df: float) -> float:
    """Return the probability that a t variable with `df` degrees of freedom (1 or more) is above `t`."""
    if t < 0:
        return 1 - upper_tail(-t, df)
    if df > MAX_DF:
        z = t * (1 - 1 / (4 * df)) / math.sqrt(1 + t**2 / (2 * df))
        return math.erfc(z / math.sqrt(2)) / 2

    # phi = end * s^4 makes the integrand smooth at 0 for a fractional df too.
    end = math.atan2(math.sqrt(df), t)
    phi = end * UNIT_NODES**4
    integral = float((UNIT_WEIGHTS * np.sin(phi) ** (df - 1) * 4 * end * UNIT_NODES**3).sum())
    log_total = 0.5 * math.log(math.pi) + math.lgamma(df / 2) - math.lgamma((df + 1) / 2)
    return integral / math.exp(log_total)


def two_sided_p(t: float, df: float) -> float:
    """Return the probability that the absolute value of a t variable is above |t|."""
    return min(1.0, 2 * upper_tail(abs(t), df))


def quantile(tail: float, df: float) -> float:
    """Return the value above which a t variable lies with probability `tail`, between 0 and 0.5. Found by bisection."""
    low = 0.0
    high = MAX_QUANTILE
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        if upper_tail(middle, df) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2
