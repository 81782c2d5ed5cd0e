"""How often to save: arithmetic over what a save costs and how often a run fails. No torch."""

import math

LARGEST_SHARE = 0.02
"""Share of training time that saves may cost with `save_interval: auto`."""


def choose_save_interval(cost_seconds: float, seconds_between_failures: float | None = None) -> float:
    """Seconds between saves that cost `LARGEST_SHARE` of training; fewer where failures make it worth its price."""
    interval = cost_seconds / LARGEST_SHARE
    if seconds_between_failures is None:
        return interval
    return min(interval, suggest_save_interval(cost_seconds, seconds_between_failures))


def suggest_save_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """Seconds of training between saves that lose least to saves and failures together.

    With d for what a save holds up and M for the mean time between failures: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 +
    (d / 2M) / 9) - d where d < 2M, and M beyond. J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", Future Generation Computer Systems 22 (2006), equation 37. The first term is that of
    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974). Both assume that
    failures are independent, and that a restart costs the same whenever one saves.
    """
    d, m = save_seconds, seconds_between_failures
    if d >= 2 * m:
        return m
    share = d / (2 * m)
    return math.sqrt(2 * d * m) * (1 + math.sqrt(share) / 3 + share / 9) - d
