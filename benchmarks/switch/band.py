"""Statistics of the switch benchmark: is a run that moved still the same run? No torch.

Runs of one configuration on different hardware see the same batches and differ in rounding alone, which training
amplifies. How far that takes two runs apart is measured, not chosen: the *band*. With l_i(t) the loss of uninterrupted
run i = 1..r at batch t, and m(t) their mean,

    distance_ij(t) = sqrt(1/t * sum over t' <= t of (l_i(t') - l_j(t'))^2)         between two of them, up to batch t
    band(t)        = max over i < j of distance_ij(t), but not less than ulp(t)
    deviation(t)   = sqrt(1/t * sum over t' <= t of (l(t') - m(t'))^2)             of the run in question

and a run is inside when deviation(t) <= band(t) at every batch. ulp(t) is the distance of one float32 to the next at
m(t): losses are float32, and nothing finer can be told from them. There is no other slack in this, and none is needed:
if the run is one more of their kind, its expected squared deviation from the mean of r is (1 + 1/r) s^2, and that
between two of them 2 s^2, so that it stands at sqrt((r + 1) / 2r) of an average distance (0.79 for four, 0.82 for
three), and lower beside the largest. Root mean squares over batches are compared, not single batches, because at a
single batch the difference of two runs passes through zero: whether |l(t) - m(t)| exceeds the largest
|l_i(t) - l_j(t)| seen so far is a matter of chance for a sound run. The share of such batches is reported beside
(`share_outside`), and is no criterion.

The validation loss, measured a few times, is compared with the same two formulas over those measurements.
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
    """Losses and digests of one run, batch after batch."""

    losses: Sequence[float]
    digests: Sequence[str]
    learning_rates: Sequence[float]
    validation: Mapping[int, float] = field(default_factory=dict)
    """Batch -> loss; empty for a run that was never validated."""


def read_series(records: Sequence[Mapping[str, Any]]) -> Series:
    """Take a run's series from its records, in order of their batches."""
    return Series(
        losses=[record["loss/train/total"] for record in records],
        digests=[record["data/digest"] for record in records],
        learning_rates=[record["lr"] for record in records],
        validation={record["batch"]: record["eval/loss"] for record in records if "eval/loss" in record},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One run beside the uninterrupted ones. Batches count from 1; None: never."""

    first_other_digest: int | None
    first_other_learning_rate: int | None
    first_outside: int | None
    """The first batch at which its deviation was larger than the band."""
    largest_ratio: float
    """Largest ratio of deviation to band, over all batches."""
    final_deviation: float
    """Nats per token, at the last batch."""
    validation_ratio: float
    validation_difference: float
    """Distance of the final validation loss from the mean of the uninterrupted runs, nats per token."""
    share_outside: float
    """Share of batches further from the mean than any two uninterrupted runs were from each other so far."""
    shown_by: str | None = None
    """Record besides these that tells a wrong run apart. "": none was looked at; None: the run is sound."""

    @property
    def same_data(self) -> bool:
        return self.first_other_digest is None

    @property
    def words(self) -> str:
        if self.is_the_same_run and self.shown_by is None:
            return "the same run"
        if self.is_the_same_run:
            return "not told apart by the loss" + (f"; caught by {self.shown_by}" if self.shown_by else "")
        caught = [] if self.same_data else [f"digest, batch {self.first_other_digest}"]
        caught += [f"loss, batch {self.first_outside}"] if self.first_outside else []
        caught += ["validation"] if self.validation_ratio > 1 and not self.first_outside else []
        return "caught by " + " and ".join(caught)

    @property
    def inside(self) -> bool:
        return self.largest_ratio <= 1 and self.validation_ratio <= 1

    @property
    def is_the_same_run(self) -> bool:
        return self.same_data and self.inside


def evaluate(
    report: dict[str, Any],
    runs: Mapping[str, Any],
    alone: Iterable[Mapping[str, Any]],
    sound: Collection[str],
    shown_by: Mapping[str, str] | None = None,
) -> None:
    """Add to a report what its runs show beside those `alone`, the uninterrupted ones: band, verdicts, `passed`.

    It passes if those in `sound` are the same run, and all others are not. A short run stands beside as many batches.
    Loss and data may miss a wrong run only where `shown_by` names another record that tells it apart.
    """
    uninterrupted = [as_series(content) for content in alone]
    report |= {"band": measure_band([series.losses for series in uninterrupted]).tolist()}
    report |= {"deviation": {}, "verdicts": {}, "passed": True}
    for name, content in runs.items():
        run = as_series(content)
        others = [as_series(dataclasses.asdict(series), len(run.losses)) for series in uninterrupted]
        record = None if name in sound else (shown_by or {}).get(name, "")
        verdict = dataclasses.replace(judge(run, others), shown_by=record)
        report["deviation"][name] = measure_deviation(run.losses, [series.losses for series in others]).tolist()
        report["verdicts"][name] = dataclasses.asdict(verdict)
        report["passed"] &= (verdict.is_the_same_run and not record) == (name in sound)


def as_series(content: Mapping[str, Any], count: int | None = None) -> Series:
    """Build a series, of so many batches, from a report or its JSON, whose keys are text."""
    return Series(
        **{key: content[key][:count] for key in ("losses", "digests", "learning_rates")},
        validation={int(batch): loss for batch, loss in content.get("validation", {}).items()},
    )


def judge(run: Series, uninterrupted: Sequence[Series]) -> Verdict:
    """Compare `run` with at least two uninterrupted ones of the same length."""
    first = uninterrupted[0]
    losses_rt = np.array([series.losses for series in uninterrupted])
    deviation_t, band_t = measure_deviation(run.losses, losses_rt), measure_band(losses_rt)
    points = sorted(set(first.validation) & set(run.validation))
    validation_rp = np.array([[series.validation[p] for p in points] for series in uninterrupted])
    validation_p = [run.validation[p] for p in points]
    ratio_t = deviation_t / band_t
    validation_ratio_p = measure_deviation(validation_p, validation_rp) / measure_band(validation_rp)
    single_t = np.abs(np.array(run.losses) - losses_rt.mean(0))
    widest_t = np.maximum(np.maximum.accumulate(np.ptp(losses_rt, 0)), measure_band(losses_rt[:1].repeat(2, 0)))
    return Verdict(
        first_other_digest=_first(np.array(run.digests) != np.array(first.digests)),
        first_other_learning_rate=_first(np.array(run.learning_rates) != np.array(first.learning_rates)),
        first_outside=_first(ratio_t > 1),
        largest_ratio=float(ratio_t.max()),
        final_deviation=float(deviation_t[-1]),
        validation_ratio=float(validation_ratio_p[-1]) if points else 0.0,
        validation_difference=float(abs(validation_p[-1] - validation_rp[:, -1].mean())) if points else 0.0,
        share_outside=float((single_t > widest_t).mean()),
    )


def measure_band(losses_rt: ArrayLike) -> Floats:
    """Return the band [t] of losses [runs, t]: see the module."""
    losses_rt = np.asarray(losses_rt, np.float64)
    num_runs = len(losses_rt)
    assert num_runs > 1
    pairs = [(i, j) for i in range(num_runs) for j in range(i)]
    ulp_t = np.spacing(np.float32(losses_rt.mean(0))).astype(np.float64)
    return np.max([ulp_t, *(_running_rms(losses_rt[i] - losses_rt[j]) for i, j in pairs)], 0)


def measure_deviation(losses_t: ArrayLike, losses_rt: ArrayLike) -> Floats:
    """Return the deviation [t] of one run from the mean of the others: see the module."""
    return _running_rms(np.asarray(losses_t) - np.asarray(losses_rt).mean(0))


def measure_pairs(uninterrupted: Mapping[str, Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return final distances of two runs of one cluster, and of unlike ones. Names begin with a cluster's letter."""
    alike, unlike = [], []
    for (a, first), (b, second) in combinations(uninterrupted.items(), 2):
        (alike if a[0] == b[0] else unlike).append(measure_band([first["losses"], second["losses"]])[-1].item())
    return alike, unlike


def leave_one_out(uninterrupted: Sequence[Series]) -> list[float]:
    """Return the largest ratio that `judge` finds for each uninterrupted run beside the others: how sound runs fare.

    Empty for two runs, because one other run spans no band.
    """
    if len(uninterrupted) < 3:
        return []
    others = [[s for s in uninterrupted if s is not series] for series in uninterrupted]
    return [judge(series, rest).largest_ratio for series, rest in zip(uninterrupted, others, strict=True)]


def _running_rms(differences_t: Floats) -> Floats:
    return np.sqrt(np.cumsum(differences_t**2) / np.arange(1, len(differences_t) + 1))


def _first(where_t: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(where_t)) + 1 if where_t.any() else None
