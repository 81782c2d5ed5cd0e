"""Division of the work of summing gradients: which island adds up which rows of each tensor.

If all islands send their gradient to all others, each of n islands sends it n - 1 times. With owners, an island sends
each row to the row's owner, which adds it up and sends the sum back. An island that owns the share f of the rows then
sends, and receives, 1 + (n - 2) f gradients:

    (1 - f)       of its own gradient, to the owners of these rows
    (n - 1) f     sums of the rows that it owns, to all other islands

The coordinator computes shares with `divide_sum`, and every rank the rows with `divide_rows`. `tensors.summing` carries
it out. This file has neither torch nor sockets.
"""

import math
from collections.abc import Mapping

PARTS = 64
"""Shares are integers that add up to this number, so that all islands compute the same rows from them."""


def divide_sum(rates: Mapping[str, float]) -> dict[str, int]:
    """Return each island's share of the rows, in PARTS, so that the slowest link is as fast as possible.

    `rates` are the bytes per second of each island's link, or numbers proportional to them. Two islands swap gradients
    without owners, and a single one sends none: the result is empty.

    An island with the share f keeps its link busy for (1 + (n - 2) f) / rate. The shares add up to 1, so the slowest
    link needs (2 n - 2) / (sum of rates) at least. It also needs 1 / rate at least, so an island on a slow link owns
    nothing. For example, the rates 10, 10 and 1 give the shares 32, 32 and 0.
    """
    num_islands = len(rates)
    if num_islands < 3:
        return {}
    busy_time = max(1 / min(rates.values()), (2 * num_islands - 2) / sum(rates.values()))

    # (n - 2) f, as large as the link allows in that time. A slow link leaves the others more room than they need.
    room = {name: max(busy_time * rate - 1, 0.0) for name, rate in rates.items()}
    total_room = sum(room.values())
    ideal = {name: PARTS * part / total_room for name, part in room.items()}

    # Round down, and give the remaining parts to the islands that have lost most by that.
    shares = {name: math.floor(part) for name, part in ideal.items()}
    by_loss = sorted(ideal, key=lambda name: (shares[name] - ideal[name], name))
    num_remaining = PARTS - sum(shares.values())
    for name in by_loss[:num_remaining]:
        shares[name] += 1
    return shares


def busy_seconds(shares: Mapping[str, int], rates: Mapping[str, float]) -> float:
    """Return the time that the slowest link needs for a gradient of one byte. `rates` are in bytes per second."""
    return max(sent_gradients(shares, name, len(rates)) / rate for name, rate in rates.items())


def sent_gradients(shares: Mapping[str, int], name: str, num_islands: int) -> float:
    """Return how many gradients an island sends, and receives: 1.5 means its gradient's bytes, one and a half times.

    `shares` is empty if there are no owners.
    """
    if not shares:
        return float(num_islands - 1)
    return 1 + (num_islands - 2) * shares[name] / PARTS


def divide_rows(rows: range, shares: Mapping[str, int]) -> dict[str, range]:
    """Return the rows of a tensor that each island owns, in order of names. `shares` are in PARTS, see `divide_sum`."""
    owned = {}
    begin = 0
    for name in sorted(shares):
        end = begin + shares[name]
        owned[name] = rows[len(rows) * begin // PARTS : len(rows) * end // PARTS]
        begin = end
    return owned
