"""Division of the sum over islands: which island adds up which rows of the gradient. No torch, no sockets.

All to all, each of n islands sends its gradient n - 1 times. With owners it sends each row to the row's owner, which
adds up and sends the sum back. An island that owns the share f of N bytes sends and receives N (1 + (n - 2) f).
"""

import math
from collections.abc import Mapping

PARTS = 64
"""Shares are multiples of one part in so many, so that all islands compute the same rows."""


def divide_sum(rates: Mapping[str, float]) -> dict[str, int]:
    """Return each island's share, in PARTS, that makes the slowest link fastest. `rates`: bytes per second of each
    island's link, or numbers proportional to them.

    Links are busy for T = max (1 + (n - 2) f) / rate, and shares add up to 1. No link takes less than 1 / rate: an
    island on a slow one owns nothing. Two islands swap gradients without owners: the result is empty.
    """
    count = len(rates)
    if count < 3:
        return {}
    busy = max(1 / min(rates.values()), (2 * count - 2) / sum(rates.values()))
    room = {name: max(busy * rate - 1, 0.0) for name, rate in rates.items()}
    ideal = {name: PARTS * part / sum(room.values()) for name, part in room.items()}
    shares = {name: math.floor(part) for name, part in ideal.items()}
    by_rest = sorted(ideal, key=lambda name: (shares[name] - ideal[name], name))
    for name in by_rest[: PARTS - sum(shares.values())]:
        shares[name] += 1
    return shares


def busy_seconds(shares: Mapping[str, int], rates: Mapping[str, float]) -> float:
    """Return the time of the slowest link, for a gradient of one byte."""
    return max(sent_gradients(shares, name, len(rates)) / rate for name, rate in rates.items())


def sent_gradients(shares: Mapping[str, int], name: str, num_islands: int) -> float:
    """Return how many times its gradient's bytes an island sends, and receives."""
    return 1 + (num_islands - 2) * shares[name] / PARTS if shares else float(num_islands - 1)


def divide_rows(rows: range, shares: Mapping[str, int]) -> dict[str, range]:
    """Return the rows of a tensor that each island owns, in order of names."""
    owned, begin = {}, 0
    for name in sorted(shares):
        first, begin = begin, begin + shares[name]
        owned[name] = rows[len(rows) * first // PARTS : len(rows) * begin // PARTS]
    return owned
