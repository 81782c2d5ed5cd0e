"""The division of a global batch's rows among islands of different speeds. No torch."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_lite.errors import ConfigError

SMOOTHING = 0.3
"""The weight of a new measurement."""
MAX_REACH = 256
"""Multiples of their steps, for all islands together, that are tried on each side of the ideal numbers of rows."""
LARGE_CHANGE = 1.25
"""A measurement that is off by this factor twice in a row is not noise."""


@dataclass
class Rate:
    """A smoothed rate, which follows a large change after two measurements."""

    value: float | None = None
    odd: float | None = None
    """The last measurement if it was far from the value."""

    def add(self, found: float) -> None:
        before, odd, self.odd = self.value, self.odd, None
        if before is None:
            self.value = found
        elif max(found / before, before / found) < LARGE_CHANGE:
            self.value = (1 - SMOOTHING) * before + SMOOTHING * found
        elif odd is not None and (odd > before) == (found > before):
            self.value = (odd + found) / 2
        else:
            self.odd = found


class Pace(NamedTuple):
    """Speed and granularity of an island."""

    num_ranks: int
    """Data ranks."""
    microbatch: int
    """Rows of a rank in one forward pass."""
    rate: float
    """Rows per second, or any number proportional to that."""
    step: int
    """Its rows are a multiple of this: data ranks need equally many rows, and exact sums whole microbatches on each."""

    def seconds(self, rows: int) -> float:
        """Return the time for `rows`. A microbatch that is not full takes as long as a full one."""
        microbatches = math.ceil(rows / (self.num_ranks * self.microbatch))
        return microbatches * self.num_ranks * self.microbatch / self.rate


Choice = tuple[float, float, tuple[int, ...]]
"""Seconds of the slowest island by microbatches, and by rows; and the rows of each."""


def divide(num_rows: int, paces: Mapping[str, Pace]) -> dict[str, range]:
    """Return the division whose slowest island is fastest: each island's row indices, in order of names.

    Divisions with equal times by microbatches, as where one microbatch holds all rows, are compared by rows. Every
    island gets rows. Raises ConfigError when no multiples of the islands' steps add up to `num_rows`.
    """
    names = sorted(paces)
    total_rate = sum(pace.rate for pace in paces.values())
    best: dict[int, Choice] = {0: (0.0, 0.0, ())}
    for name in names:
        pace = paces[name]
        found: dict[int, Choice] = {}
        if name == names[-1]:  # it takes the rest
            pairs = [(before, num_rows - before) for before in best if (num_rows - before) % pace.step == 0]
        else:
            near = _candidates(num_rows, pace, num_rows * pace.rate / total_rate, len(names))
            pairs = itertools.product(best, near)
        for before, rows in pairs:
            if before + rows <= num_rows and rows:
                latest, longest, shares = best[before]
                choice = (max(latest, pace.seconds(rows)), max(longest, rows / pace.rate), (*shares, rows))
                if choice < found.get(before + rows, (math.inf, 0.0, ())):
                    found[before + rows] = choice
        best = found
    if num_rows not in best:
        steps = ", ".join(f"{name} {paces[name].step}" for name in names)
        is_exact = any(paces[name].step > paces[name].num_ranks for name in names)
        raise ConfigError(
            f"global_train_batch_size: {num_rows} rows are no sum of multiples of the islands' "
            f"{'data ranks x microbatch, as exact_sums needs,' if is_exact else 'data ranks'} ({steps}); "
            "use another batch size or other numbers of ranks"
        )
    row_indices, begin = {}, 0
    for name, rows in zip(names, best[num_rows][-1], strict=True):
        row_indices[name] = range(begin, begin + rows)
        begin += rows
    return row_indices


def latest_seconds(row_indices: Mapping[str, range], paces: Mapping[str, Pace]) -> float:
    return max(paces[name].seconds(len(rows)) for name, rows in row_indices.items())


def _candidates(num_rows: int, pace: Pace, ideal: float, num_islands: int) -> Iterable[int]:
    """Return numbers of rows near the `ideal` one, in multiples of the step, and the full microbatches nearest to it;
    all multiples if there are few."""
    step, count = pace.step, num_rows // pace.step
    if count <= 256:
        return range(step, step * count + 1, step)
    reach = min(max(16, 2 * pace.microbatch) * num_islands, max(MAX_REACH // num_islands, 2))
    middle = round(ideal / step)
    full = max(1, pace.microbatch * pace.num_ranks // step)
    near = {full * (middle // full + i) for i in range(-2, 3)}
    return [step * i for i in sorted({*range(middle - reach, middle + reach + 1), *near}) if 1 <= i <= count]
