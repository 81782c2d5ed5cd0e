"""Two runs, batch by batch: how far are their losses apart, and did they see the same data?"""

from dataclasses import dataclass

import numpy as np

from llmfoundry_lite.report.reading import LOSS, VALIDATION, Log, Run
from llmfoundry_lite.report.run_figures import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of `other` with `first`, over the batches that both have; None is what cannot be said. Differences that have a
    sign are `other` less `first`."""

    first: str
    other: str
    num_common: int
    num_compared: int
    """Of these, where both losses are finite."""
    not_finite_in_one: list[int]
    num_equal: int
    """Losses equal to the last bit."""
    max_absolute: float | None
    max_absolute_batch: int | None
    mean_absolute: float | None
    final_batch: int | None
    final_difference: float | None
    num_digests: int
    """Common batches of which both have the digest."""
    digests_part_at: int | None
    """The first batch whose digests differ."""
    validation_batch: int | None
    """The last one after which both were evaluated."""
    validation_difference: float | None


def compare(first: Run, other: Run, names: tuple[str, str]) -> tuple[Comparison, Difference]:
    a, b = first.log, other.log
    batches, in_a, in_b = np.intersect1d(a.batch, b.batch, assume_unique=True, return_indices=True)
    differences = b[LOSS][in_b] - a[LOSS][in_a]
    absolute = np.abs(differences)
    finite = np.flatnonzero(np.isfinite(absolute))
    at = finite[np.argmax(absolute[finite])] if len(finite) else None
    last = finite[-1] if len(finite) else None
    num_digests, parted_at = compare_digests(a, b, batches, in_a, in_b)
    validation = b[VALIDATION][in_b] - a[VALIDATION][in_a]
    evaluated = np.flatnonzero(np.isfinite(validation))
    comparison = Comparison(
        first=names[0],
        other=names[1],
        num_common=len(batches),
        num_compared=len(finite),
        not_finite_in_one=sorted((set(a.not_finite) ^ set(b.not_finite)) & set(batches.tolist())),
        num_equal=int((absolute == 0).sum()),
        max_absolute=None if at is None else float(absolute[at]),
        max_absolute_batch=None if at is None else int(batches[at]),
        mean_absolute=float(absolute[finite].mean()) if len(finite) else None,
        final_batch=None if last is None else int(batches[last]),
        final_difference=None if last is None else float(differences[last]),
        num_digests=num_digests,
        digests_part_at=parted_at,
        validation_batch=int(batches[evaluated[-1]]) if len(evaluated) else None,
        validation_difference=float(validation[evaluated[-1]]) if len(evaluated) else None,
    )
    return comparison, Difference(name=names[1], batches=batches, absolute=absolute, digests_part_at=parted_at)


def compare_digests(a: Log, b: Log, batches: np.ndarray, in_a: np.ndarray, in_b: np.ndarray) -> tuple[int, int | None]:
    """How many could be compared, and the first batch at which they differ."""
    num, parted_at = 0, None
    for batch, i, j in zip(batches.tolist(), in_a.tolist(), in_b.tolist(), strict=True):
        one, two = a.digest[i], b.digest[j]
        if one is not None and two is not None:
            num += 1
            if one != two and parted_at is None:
                parted_at = batch
    return num, parted_at
