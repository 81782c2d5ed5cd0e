"""How often to save: arithmetic over what a save costs and how often a run fails. No torch."""

import math

MAX_SAVE_FRACTION = 0.02
"""Fraction of training time that saves may cost with `save_interval: auto`."""


def suggest_save_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Return how many seconds a run should train between two saves, so that saves and failures cost the least time.

    With d the seconds that a save delays training (`save_seconds`) and M the mean time between failures
    (`seconds_between_failures`), that is

        sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d   if d < 2M, else M

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006), equation 37. The first term is that of J. W. Young, "A first order
    approximation to the optimum checkpoint interval", CACM 17 (1974). Both assume that failures are independent, and
    that a restart costs the same however often a run saves.
    """
    d, m = save_seconds, seconds_between_failures
    if d >= 2 * m:
        return m
    ratio = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d
