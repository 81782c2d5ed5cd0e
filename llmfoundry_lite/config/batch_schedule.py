"""Numbers that change at given batches of a run, such as the size of a batch: pure functions of the batch's number.

`Steps` is what a YAML has, `{1000ba: 128, 3000ba: 256}`. `PerBatch` is the number of each batch of a run. Batches count
from 0 in both: `1000ba` is where 1,000 batches have been trained, so the next one, number 1001 in the log, is the first
with the new number.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from llmfoundry_lite.config.spans import Duration


class Step(NamedTuple):
    """A number, and where it begins to apply."""

    first_batch: int
    """Number of batches before the first one with this number."""
    value: int


class Stretch(NamedTuple):
    """Consecutive batches with one number."""

    first_batch: int
    """Batches before the first one of the stretch."""
    end_batch: int
    """Batches before the first one after it."""
    value: int

    @property
    def num_batches(self) -> int:
        """Return how many batches the stretch has."""
        return self.end_batch - self.first_batch


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of a schedule as a YAML has them: `{1000ba: 128, 3000ba: 256}`."""

    steps: tuple[Step, ...]
    """In the order of their batches. A schedule may have none."""

    @classmethod
    def parse(cls, written: Mapping[str, int | None]) -> "Steps":
        """Read a schedule. An entry that is null is left out, so that a later file can remove it.

        >>> Steps.parse({"3000ba": 256, "1000ba": 128}).steps
        (Step(first_batch=1000, value=128), Step(first_batch=3000, value=256))

        Raises ValueError, whose text says what was expected.
        """
        value_by_batch: dict[int, int] = {}
        if not isinstance(written, Mapping):  # a record may have anything
            raise ValueError("numbers by batches, such as {1000ba: 128, 3000ba: 256}")
        for name, value in written.items():
            if value is None:
                continue
            try:
                first_batch = int(Duration.parse(name, ("ba",)).value)
            except ValueError:
                raise ValueError("numbers by batches, such as {1000ba: 128, 3000ba: 256}") from None
            is_count = type(value) is int and value > 0
            if not is_count:
                raise ValueError(f"a whole number above 0 from {name} on")
            if first_batch in value_by_batch:
                raise ValueError(f"one number from {first_batch}ba on")
            value_by_batch[first_batch] = value
        return cls(tuple(Step(batch, value_by_batch[batch]) for batch in sorted(value_by_batch)))

    @property
    def written(self) -> dict[str, int]:
        """The schedule as a YAML has it."""
        return {f"{step.first_batch}ba": step.value for step in self.steps}


@dataclass(frozen=True, slots=True)
class PerBatch:
    """A number for each batch of a run, which counts its batches from 0."""

    steps: tuple[Step, ...]
    """In the order of their batches. The first one begins with batch 0."""

    @classmethod
    def build(cls, value: int, schedule: Steps | None) -> "PerBatch":
        """Return a number that is `value` until the first step of `schedule`, or for the whole run without one."""
        steps = () if schedule is None else schedule.steps
        has_first = bool(steps) and steps[0].first_batch == 0
        return cls(steps if has_first else (Step(0, value), *steps))

    @property
    def largest(self) -> int:
        """The largest number of any batch, however long the run is."""
        return max(step.value for step in self.steps)

    @property
    def smallest(self) -> int:
        """The smallest number of any batch."""
        return min(step.value for step in self.steps)

    def of(self, batch: int) -> int:
        """Return the number of a batch."""
        index = bisect_right(self.steps, batch, key=lambda step: step.first_batch) - 1
        return self.steps[index].value

    def stretches(self, num_batches: int) -> list[Stretch]:
        """Return the stretches of the first `num_batches` batches. Neighbours have different numbers."""
        ends = [step.first_batch for step in self.steps[1:]] + [num_batches]
        stretches: list[Stretch] = []
        for step, end in zip(self.steps, ends, strict=True):
            end_batch = min(end, num_batches)
            if end_batch <= step.first_batch:
                continue
            if stretches and stretches[-1].value == step.value:
                stretches[-1] = stretches[-1]._replace(end_batch=end_batch)
            else:
                stretches.append(Stretch(step.first_batch, end_batch, step.value))
        return stretches

    def sum_before(self, batch: int) -> int:
        """Return the sum of the numbers of all batches before a batch."""
        return sum(stretch.num_batches * stretch.value for stretch in self.stretches(batch))

    def count_batches(self, total: int) -> int:
        """Return the least number of first batches whose numbers add up to `total` or more.

        With batches of 64 samples, and of 128 from 1000ba on, 64,100 samples take 1,001 batches.
        """
        # The total is reached in the last step, unless it is reached before an earlier one ends.
        step_of_total = self.steps[-1]
        for step, following in pairwise(self.steps):
            if self.sum_before(following.first_batch) >= total:
                step_of_total = step
                break

        remaining = total - self.sum_before(step_of_total.first_batch)
        return step_of_total.first_batch + math.ceil(Fraction(remaining, step_of_total.value))

    def first_difference(self, other: "PerBatch", num_batches: int) -> int | None:
        """Return the earliest of the first `num_batches` batches whose number in `other` differs, or None."""
        for first_batch in sorted({step.first_batch for step in (*self.steps, *other.steps)}):
            if first_batch < num_batches and self.of(first_batch) != other.of(first_batch):
                return first_batch
        return None

    def divided_by(self, divisor: int) -> "PerBatch":
        """Return the numbers divided by a number that divides all of them."""
        return PerBatch(tuple(Step(step.first_batch, step.value // divisor) for step in self.steps))
