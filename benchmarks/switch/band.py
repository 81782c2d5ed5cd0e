"""Statistics of the switch benchmark: is a run that moved between clusters still the same run? No torch.

Runs of one configuration on different hardware see the same batches and differ only in rounding, which training
amplifies. How far apart that takes two runs is measured, not chosen: the measure is called the *band*. With l_i(t) the
loss of uninterrupted run i = 1..r at batch t, and m(t) the mean of these losses,

    distance_ij(t) = sqrt(1/t * sum over t' <= t of (l_i(t') - l_j(t'))^2)         between two of them, up to batch t
    band(t)        = max over i < j of distance_ij(t), but not less than ulp(t)
    deviation(t)   = sqrt(1/t * sum over t' <= t of (l(t') - m(t'))^2)             of the run in question

A run is inside the band if deviation(t) <= band(t) at every batch. ulp(t) is the distance between m(t) and the next
float32: losses are float32, so nothing finer can be distinguished. There is no other tolerance.

How large should the deviation of a sound run be? If the run is one more of the same kind, its expected squared
deviation from the mean of r runs is (1 + 1/r) s^2, and that of two runs from each other is 2 s^2. So it is expected at
sqrt((r + 1) / 2r) of an average distance (0.79 for four runs, 0.82 for three), and lower relative to the largest
distance. Still, a few sound runs lie outside the band of the others: `leave_one_out` counts how many of the
uninterrupted runs do. A ratio a little above 1 is therefore no proof of a mistake; compare the largest of those ratios
with the controls'.

Why root mean squares over batches, and not single batches? At a single batch the difference of two runs may pass
through zero. Whether |l(t) - m(t)| exceeds the largest |l_i(t) - l_j(t)| so far is a matter of chance for a sound run.
The share of such batches is reported (`share_outside`), but is not a criterion.

The validation loss is measured a few times. It is compared with the same two formulas over those measurements.

Arrays name their axes: `_t` is batches, `_r` is uninterrupted runs, `_p` is validations.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Losses and data digests of one run, one for each batch, and its validation losses."""

    losses: Sequence[float]
    digests: Sequence[str]
    """Hash of the samples of each batch."""
    learning_rates: Sequence[float]
    validation: Mapping[int, float] = field(default_factory=dict)
    """Batch -> validation loss. Empty for a run that was never validated."""


def read_series(records: Sequence[Mapping[str, Any]]) -> Series:
    """Build a run's series from the records of its metrics.jsonl, which must be in order of their batches."""
    return Series(
        losses=[record["loss/train/total"] for record in records],
        digests=[record["data/digest"] for record in records],
        learning_rates=[record["lr"] for record in records],
        validation={record["batch"]: record["eval/loss"] for record in records if "eval/loss" in record},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How one run compares with the uninterrupted ones. Batches count from 1; None means that it never happened."""

    first_other_digest: int | None
    """First batch that had other data."""
    first_other_learning_rate: int | None
    """First batch that had another learning rate."""
    first_outside: int | None
    """First batch at which its deviation was larger than the band."""
    largest_ratio: float
    """Largest ratio of deviation to band, over all batches."""
    final_deviation: float
    """Deviation at the last batch, in nats per token."""
    validation_ratio: float
    """Ratio of deviation to band over the validation losses, at the last one; 0 without validation."""
    validation_difference: float
    """Distance of the final validation loss from the mean of the uninterrupted runs, in nats per token."""
    share_outside: float
    """Share of batches further from the mean than any two uninterrupted runs were from each other so far."""
    shown_by: str | None = None
    """None for a sound run. For a control, another record that shows its mistake; empty if there is no such record."""

    @property
    def same_data(self) -> bool:
        """Whether every batch had the same samples as in the uninterrupted runs."""
        return self.first_other_digest is None

    @property
    def words(self) -> str:
        """The verdict as the tables show it: "the same run", "caught by loss, batch 61", or "not told apart by the
        loss"."""
        if self.is_the_same_run and self.shown_by is None:
            return "the same run"
        if self.is_the_same_run:
            return "not told apart by the loss" + (f"; caught by {self.shown_by}" if self.shown_by else "")

        # List what shows that this is not the same run. Validation is named only if no training loss is outside.
        signs = [] if self.same_data else [f"digest, batch {self.first_other_digest}"]
        signs += [f"loss, batch {self.first_outside}"] if self.first_outside else []
        signs += ["validation"] if self.validation_ratio > 1 and not self.first_outside else []
        return "caught by " + " and ".join(signs)

    @property
    def inside(self) -> bool:
        """Whether training losses and validation losses stayed within the band."""
        return self.largest_ratio <= 1 and self.validation_ratio <= 1

    @property
    def is_the_same_run(self) -> bool:
        """Whether data and losses show no difference from the uninterrupted runs, except rounding."""
        return self.same_data and self.inside


def evaluate(
    report: dict[str, Any],
    runs: Mapping[str, Any],
    alone: Iterable[Mapping[str, Any]],
    sound: Collection[str],
    shown_by: Mapping[str, str] | None = None,
) -> None:
    """Compare `runs` with the uninterrupted runs `alone`, and add the results to `report`.

    Sets `band`, `deviation`, `verdicts` and `passed` in the report. A run may be shorter than the uninterrupted ones;
    it is then compared with as many of their batches. `passed` becomes true if all runs named in `sound` are the same
    run, and no other is. A control whose loss and data look the same fails, unless `shown_by` names another record that
    shows its mistake.
    """
    uninterrupted = [as_series(run_record) for run_record in alone]
    report |= {"band": measure_band([series.losses for series in uninterrupted]).tolist()}
    report |= {"deviation": {}, "verdicts": {}, "passed": True}
    for name, run_record in runs.items():
        run = as_series(run_record)
        uninterrupted_so_far = [as_series(dataclasses.asdict(series), len(run.losses)) for series in uninterrupted]
        other_record = None if name in sound else (shown_by or {}).get(name, "")
        verdict = dataclasses.replace(judge(run, uninterrupted_so_far), shown_by=other_record)
        report["deviation"][name] = measure_deviation(
            run.losses, [series.losses for series in uninterrupted_so_far]
        ).tolist()
        report["verdicts"][name] = dataclasses.asdict(verdict)
        # A sound run has to be the same. A control has to differ here, or in another record.
        report["passed"] &= (verdict.is_the_same_run and not other_record) == (name in sound)


def as_series(content: Mapping[str, Any], count: int | None = None) -> Series:
    """Build a series from a report or from its JSON, where the batches of validations are text.

    `count` limits training losses, digests and learning rates to the first batches. Validation losses are all taken.
    """
    return Series(
        **{key: content[key][:count] for key in ("losses", "digests", "learning_rates")},
        validation={int(batch): loss for batch, loss in content.get("validation", {}).items()},
    )


def judge(run: Series, uninterrupted: Sequence[Series]) -> Verdict:
    """Compare a run with at least two uninterrupted ones of the same length. The formulas are in the module's
    docstring.

    Validation losses are compared at the batches that the run and the first uninterrupted run both have.
    """
    first = uninterrupted[0]
    losses_rt = np.array([series.losses for series in uninterrupted])
    deviation_t = measure_deviation(run.losses, losses_rt)
    band_t = measure_band(losses_rt)
    ratio_t = deviation_t / band_t

    validated_batches = sorted(set(first.validation) & set(run.validation))
    validation_rp = np.array([[series.validation[batch] for batch in validated_batches] for series in uninterrupted])
    validation_p = [run.validation[batch] for batch in validated_batches]
    validation_ratio_p = measure_deviation(validation_p, validation_rp) / measure_band(validation_rp)

    # Reported only: single batches, beside the widest spread of the uninterrupted runs so far, at least one ulp.
    distance_t = np.abs(np.array(run.losses) - losses_rt.mean(0))
    widest_spread_t = np.maximum(np.maximum.accumulate(np.ptp(losses_rt, 0)), measure_band(losses_rt[:1].repeat(2, 0)))

    return Verdict(
        first_other_digest=_first(np.array(run.digests) != np.array(first.digests)),
        first_other_learning_rate=_first(np.array(run.learning_rates) != np.array(first.learning_rates)),
        first_outside=_first(ratio_t > 1),
        largest_ratio=float(ratio_t.max()),
        final_deviation=float(deviation_t[-1]),
        validation_ratio=float(validation_ratio_p[-1]) if validated_batches else 0.0,
        validation_difference=float(abs(validation_p[-1] - validation_rp[:, -1].mean())) if validated_batches else 0.0,
        share_outside=float((distance_t > widest_spread_t).mean()),
    )


def measure_band(losses_rt: ArrayLike) -> Floats:
    """Return the band at each batch, [t], of the uninterrupted runs' losses [runs, t]. See the module's docstring."""
    losses_rt = np.asarray(losses_rt, np.float64)
    num_runs = len(losses_rt)
    assert num_runs > 1
    pairs = [(i, j) for i in range(num_runs) for j in range(i)]

    # Losses are recorded as float32, so a difference below one ulp cannot be seen.
    ulp_t = np.spacing(np.float32(losses_rt.mean(0))).astype(np.float64)
    return np.max([ulp_t, *(_running_rms(losses_rt[i] - losses_rt[j]) for i, j in pairs)], 0)


def measure_deviation(losses_t: ArrayLike, losses_rt: ArrayLike) -> Floats:
    """Return the deviation at each batch, [t], of one run's losses [t] from the mean of the others', [runs, t]."""
    return _running_rms(np.asarray(losses_t) - np.asarray(losses_rt).mean(0))


def measure_pairs(uninterrupted: Mapping[str, Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return final distances, in nats per token, between runs of the same cluster, and between runs of different ones.

    `uninterrupted` maps names to series; a name begins with its cluster's letter, as "A" and "A+1" do.
    """
    same_cluster, different_clusters = [], []
    for (a, first), (b, second) in combinations(uninterrupted.items(), 2):
        distance = measure_band([first["losses"], second["losses"]])[-1].item()
        if a[0] == b[0]:
            same_cluster.append(distance)
        else:
            different_clusters.append(distance)
    return same_cluster, different_clusters


def leave_one_out(uninterrupted: Sequence[Series]) -> list[float]:
    """Return, for each uninterrupted run, the largest ratio that `judge` finds when it is compared with all the others.

    This shows how sound runs fare. The list is empty for two runs, because the one other run spans no band.
    """
    if len(uninterrupted) < 3:
        return []
    largest_ratios = []
    for series in uninterrupted:
        others = [other for other in uninterrupted if other is not series]
        largest_ratios.append(judge(series, others).largest_ratio)
    return largest_ratios


def _running_rms(differences_t: Floats) -> Floats:
    """Return the root mean square of the first t differences, for each t."""
    return np.sqrt(np.cumsum(differences_t**2) / np.arange(1, len(differences_t) + 1))


def _first(where_t: NDArray[np.bool_]) -> int | None:
    """Return the first batch, from 1, at which the condition is true, or None."""
    return int(np.argmax(where_t)) + 1 if where_t.any() else None
