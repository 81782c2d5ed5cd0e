"""Division of a global batch's rows among islands of different speeds.

`Rate` smooths the measured speed of an island, `Pace` says how long it takes for some rows, and `divide` finds the
division whose slowest island is as fast as possible. This file does not import torch.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_lite.errors import ConfigError

SMOOTHING = 0.3
"""Weight of a new measurement in the smoothed rate."""
LARGE_CHANGE = 1.25
"""A measurement that is off by this factor twice in a row is not noise."""
MAX_MULTIPLES = 256
"""If an island can have no more different numbers of rows than this, all of them are tried."""
MIN_REACH = 16
"""Multiples that are tried on each side of an island's ideal number of rows, at least, for each island of the run."""
MAX_REACH = 256
"""Multiples that are tried on each side of the ideal numbers of rows, for all islands together."""


@dataclass
class Rate:
    """A smoothed rate, which follows a large change after two measurements."""

    value: float | None = None
    """The smoothed rate. None before the first measurement."""
    outlier: float | None = None
    """The last measurement if it was far from the value."""

    def add(self, measured: float) -> None:
        """Add a measurement.

        One that is near the value is averaged with it. One that is far away is kept as an outlier; if the next one is
        far away on the same side, the value becomes the mean of both.
        """
        previous_outlier = self.outlier
        self.outlier = None
        if self.value is None:
            self.value = measured
            return
        ratio = max(measured / self.value, self.value / measured)
        if ratio < LARGE_CHANGE:
            self.value = (1 - SMOOTHING) * self.value + SMOOTHING * measured
            return
        is_confirmed = previous_outlier is not None and (previous_outlier > self.value) == (measured > self.value)
        if previous_outlier is not None and is_confirmed:
            self.value = (previous_outlier + measured) / 2
        else:
            self.outlier = measured


class Pace(NamedTuple):
    """Speed and granularity of an island."""

    num_data_ranks: int
    microbatch: int
    """Rows of a data rank in one forward pass."""
    rate: float
    """Rows per second, or any number proportional to that."""
    multiple: int
    """The island's rows are a multiple of this number: data ranks need the same number of rows, and exact sums need
    whole microbatches on each."""

    def seconds(self, num_rows: int) -> float:
        """Return the time for a number of rows. A microbatch that is not full takes as long as a full one."""
        rows_per_step = self.num_data_ranks * self.microbatch
        num_steps = math.ceil(num_rows / rows_per_step)
        return num_steps * rows_per_step / self.rate


Choice = tuple[float, float, tuple[int, ...]]
"""A division of rows among the first islands. Of two with the same number of rows, the smaller tuple is better.

- Seconds of the slowest island, in whole microbatches
- Seconds of the slowest island if rows took time one by one: it decides between divisions with the same number of
  microbatches, for example if one microbatch holds all rows
- Rows of each island, in order of names
"""
WORST_CHOICE: Choice = (math.inf, 0.0, ())


def divide(num_rows: int, paces: Mapping[str, Pace]) -> dict[str, range]:
    """Return the row indices of each island, in order of names, so that the slowest island is as fast as possible.

    Every island gets rows, in multiples of `Pace.multiple`. Raises ConfigError if no multiples add up to `num_rows`.

    For example, 8 rows for a of rate 3 and b of rate 1 are divided into `{"a": range(0, 6), "b": range(6, 8)}`.

    Islands are added one by one. For each number of rows that the islands so far can have together, only the best
    choice is kept (dynamic programming).
    """
    names = sorted(paces)
    total_rate = sum(pace.rate for pace in paces.values())
    choices: dict[int, Choice] = {0: (0.0, 0.0, ())}  # rows of the islands so far -> the best choice
    for name in names:
        pace = paces[name]
        pairs: Iterable[tuple[int, int]]  # rows of the islands before, and of this one
        if name == names[-1]:  # it takes the remaining rows
            pairs = [(before, num_rows - before) for before in choices if (num_rows - before) % pace.multiple == 0]
        else:
            ideal = num_rows * pace.rate / total_rate
            pairs = itertools.product(choices, _candidates(num_rows, pace, ideal, len(names)))

        extended: dict[int, Choice] = {}
        for rows_before, rows in pairs:
            if not rows or rows_before + rows > num_rows:
                continue
            slowest, slowest_by_rows, row_counts = choices[rows_before]
            choice = (max(slowest, pace.seconds(rows)), max(slowest_by_rows, rows / pace.rate), (*row_counts, rows))
            if choice < extended.get(rows_before + rows, WORST_CHOICE):
                extended[rows_before + rows] = choice
        choices = extended

    if num_rows not in choices:
        multiples = ", ".join(f"{name} {paces[name].multiple}" for name in names)
        has_exact_sums = any(pace.multiple > pace.num_data_ranks for pace in paces.values())
        unit = "data ranks x microbatch, as exact_sums needs," if has_exact_sums else "data ranks"
        raise ConfigError(
            f"global_train_batch_size: {num_rows} rows are not a sum of multiples of the islands' {unit} "
            f"({multiples}); use another batch size or other numbers of ranks"
        )

    _, _, row_counts = choices[num_rows]
    row_indices = {}
    begin = 0
    for name, rows in zip(names, row_counts, strict=True):
        row_indices[name] = range(begin, begin + rows)
        begin += rows
    return row_indices


def latest_seconds(row_indices: Mapping[str, range], paces: Mapping[str, Pace]) -> float:
    """Return the time that the slowest island takes for its rows."""
    return max(paces[name].seconds(len(rows)) for name, rows in row_indices.items())


def _candidates(num_rows: int, pace: Pace, ideal: float, num_islands: int) -> Iterable[int]:
    """Return the numbers of rows that are tried for an island, in ascending order.

    They are multiples of `pace.multiple`: all of them if there are few, and else those around `ideal`, and the numbers
    of full microbatches nearest to it. The more islands there are, the fewer are tried for each.
    """
    num_multiples = num_rows // pace.multiple
    if num_multiples <= MAX_MULTIPLES:
        return range(pace.multiple, pace.multiple * num_multiples + 1, pace.multiple)

    # In multiples from here on. Rounding to whole microbatches may move an island's rows by two microbatches.
    middle = round(ideal / pace.multiple)
    wanted_reach = max(MIN_REACH, 2 * pace.microbatch) * num_islands
    reach = min(wanted_reach, max(MAX_REACH // num_islands, 2))
    around_ideal = range(middle - reach, middle + reach + 1)

    multiples_per_microbatch = max(1, pace.microbatch * pace.num_data_ranks // pace.multiple)
    nearest_microbatch = middle // multiples_per_microbatch
    full_microbatches = {multiples_per_microbatch * (nearest_microbatch + i) for i in range(-2, 3)}

    candidates = sorted({*around_ideal, *full_microbatches})
    return [pace.multiple * candidate for candidate in candidates if 1 <= candidate <= num_multiples]
