"""Comparison of two recipes, each of which was trained several times: the noise of runs and of items together.

    llmfoundry-lite compare base=s1.json,s2.json,s3.json ours=t1.json,t2.json,t3.json

`compare` of two results says whether two *models* differ on items like these. Trained again with another seed, both
would score otherwise, so that does not say whether the *recipes* differ. Here a difference is found only if it is
larger than what other seeds and other items together would explain.

The variance of the difference of the two means is the sum of three parts: the variance among the runs of each side,
divided by their number; and the variance among items (or clusters, or documents) of their mean differences, as in
`compare`. The noise that belongs to one run and one item is in all three, so the sum is a little too large rather than
too small. The degrees of freedom are Satterthwaite's (Biometrics Bulletin 2, 1946), and the interval and p-value those
of Student's t. Simulated for accuracies, three or more runs a side call equal recipes different in at most 5 % of
comparisons, and two in up to 6 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from llmfoundry_lite.config.task_types import BITS, BPB
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.compare import WeightedTask, refuse_unknown_tasks
from llmfoundry_lite.evaluation.means import document_of, is_named, label_of, text_row, weights_of, weights_of_tasks
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics, describe_choice, refuse_unknown_metric
from llmfoundry_lite.evaluation.pairs import too_few
from llmfoundry_lite.evaluation.records import BITS_METRICS, has_categories, is_own_metric, items_with
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.same_questions import check_same_questions
from llmfoundry_lite.evaluation.significance import MIN_UNITS, Floats
from llmfoundry_studies import student_t

MIN_DOCUMENTS = 50
"""Documents of a text below which nothing is claimed: fewer do not show how long the tail of their differences is.
Simulated with log-normal differences (sigma 1), equal recipes of five runs are called different from 20 documents in
9 % of comparisons, and from 50 in 6 %."""
MIN_RUNS = 2
"""Runs of a side below which nothing says how much its seeds scatter."""
POWER_TAIL = 0.2
"""Probability that a difference of the size `detectable` is missed."""

Unit = tuple[str, int | str]
"""(fingerprint of the data, index of an item or document, or name of a cluster). Units are independent."""


@dataclass(frozen=True, slots=True)
class Run:
    """A training run: the results of its last checkpoints, whose item scores are averaged. Usually there is one."""

    checkpoints: Sequence[Results]


@dataclass(frozen=True, slots=True)
class Side:
    """A recipe, with the runs that were trained by it."""

    name: str
    runs: Sequence[Run]

    @property
    def all_results(self) -> list[Results]:
        """The results of all runs and checkpoints."""
        return [results for run in self.runs for results in run.checkpoints]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A difference of two sides, and how sure it is."""

    difference: float
    error: float
    """Standard error, from runs and items together."""
    df: float
    """Degrees of freedom of the error."""
    num_effective: float
    """Number of units of equal weight that would tell as much (Kish, Survey Sampling, 1965, section 11.7)."""
    tail_correction: float = 1.0
    """The p-value is multiplied by this, because a few documents do not show a long tail (`significance.CAUTION`)."""

    @property
    def p(self) -> float:
        """Two-sided p-value of Student's t test."""
        if self.error == 0:
            return 1.0 if self.difference == 0 else 0.0
        return min(1.0, self.tail_correction * student_t.two_sided_p(self.difference / self.error, self.df))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval (low, high) of differences that the test does not reject at `level`."""
        half_width = student_t.quantile(level / self.tail_correction / 2, self.df) * self.error
        return self.difference - half_width, self.difference + half_width

    def detectable(self, level: float) -> float:
        """Return the smallest true difference that a test at `level` would find four times in five."""
        quantile = student_t.quantile(level / self.tail_correction / 2, self.df)
        return (quantile + student_t.quantile(POWER_TAIL, self.df)) * self.error


@dataclass(slots=True, kw_only=True)
class SideComparison:
    """Two sides by one metric. Differences are `other` minus `first`."""

    task: str
    metric: str
    n: int
    """Number of items, or of windows of a text."""
    num_units: int
    """Independent items, clusters or documents."""
    first: float
    """Mean over the runs of the first side."""
    other: float
    first_spread: float
    """Standard deviation of the metric among the runs of the first side."""
    other_spread: float
    estimate: Estimate
    p_corrected: float = 1.0
    confidence: float = 1 - significance.LEVEL
    is_detected: bool = False
    is_claimable: bool = True
    """Whether there are enough items or documents for any claim."""
    low: float | None = None
    """Lower end of the interval at `confidence`; None if there are too few items or documents."""
    high: float | None = None
    runs: list[list[float]] = field(default_factory=list)
    """The metric of each run of the first side, and of each run of the other."""

    @property
    def p(self) -> float:
        """Two-sided p-value, not corrected for the number of tests; 1 with too few items for any claim."""
        return self.estimate.p if self.is_claimable else 1.0

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that this study would find four times in five; None if no test was made."""
        if not self.is_claimable:
            return None
        return self.estimate.detectable(1 - self.confidence)

    def decide(self, p_corrected: float, level: float) -> None:
        """Set the fields that depend on the number of tests. `level` is what `p` is compared with."""
        self.p_corrected = p_corrected
        self.confidence = 1 - level
        if self.is_claimable:
            self.low, self.high = self.estimate.interval(level)
        self.is_detected = self.p < level

    @property
    def verdict(self) -> str:
        """Result of the test, in a few words."""
        if not self.is_claimable:
            return too_few(self.metric)
        if not self.is_detected:
            return "no detectable difference"
        is_less = self.estimate.difference < 0
        is_better = is_less if self.metric in BITS_METRICS else not is_less
        size = f"{abs(self.estimate.difference):.{4 if self.metric in BITS_METRICS else 3}f}"
        return f"better by {size}" if is_better else f"worse by {size}"


@dataclass(frozen=True, slots=True)
class SidePair:
    """The comparison of one side with the first."""

    first: Side
    other: Side
    rows: list[SideComparison]
    """Each task, and the mean of the accuracies if there are several, or the composites of a gauntlet."""
    notes_on_metrics: list[str]
    """Notes on metrics that differ from those of the tasks, as `metrics.describe_choice` returns them."""


def compare_sides(
    sides: Sequence[Side], metric: str | None = None, skip: Sequence[str] = (), *, all_pairs: bool = False
) -> list[SidePair]:
    """Compare each side with the first, by each task that all results have and by the mean of the accuracies.

    With `all_pairs`, each two sides are compared, and p-values are corrected for all of these tests.
    `skip` names tasks to leave out. `metric` compares the tasks that have it by it; None takes the metric that tables
    show. P-values are corrected for the number of tasks and sides together by Holm's method, those of the means apart.

    Raises DataError for a side with fewer than MIN_RUNS runs, for a task in `skip` that no result has, and for results
    that have no task in common or were not asked the same.
    """
    for side in sides:
        _check_runs(side)

    # Choose the metrics by all results together, and the tasks that all of them have.
    all_results = [results for side in sides for results in side.all_results]
    refuse_unknown_tasks(all_results, skip)
    refuse_unknown_metric(all_results, metric)
    metrics = choose_metrics(all_results, metric)
    notes_on_metrics = describe_choice(all_results, metrics, metric)
    tasks = _find_common_tasks(by_metrics(all_results, metrics), skip)
    if not tasks:
        raise DataError(f"{', '.join(side.name for side in sides)}: the results have no task in common")

    # The mean is of the accuracies or, if there are none, of the bits per byte of answers.
    records = all_results[0].tasks
    averaged: list[str] = []
    for task in tasks:
        if metrics[task] not in BITS_METRICS and not is_own_metric(records[task], metrics[task]):
            averaged.append(task)
    if not averaged:
        averaged = [task for task in tasks if metrics[task] == BPB]
    weighted_tasks = [WeightedTask(task, metrics[task], weight) for task, weight in weights_of_tasks(averaged).items()]
    num_labels = len({label_of(task) for task in averaged})
    name_of_mean = f"mean of {num_labels} task{'' if num_labels == 1 else 's'}"

    # Compare each two sides by each task, and by the mean.
    two_sides = list(combinations(sides, 2))
    if not all_pairs:
        two_sides = two_sides[: len(sides) - 1]  # those of the first side come first
    pairs: list[SidePair] = []
    means: list[SideComparison] = []
    for first, other in two_sides:
        rows = []
        for task in tasks:
            rows.append(compare_weighted_sides(task, [WeightedTask(task, metrics[task], 1.0)], first, other))
        pairs.append(SidePair(first, other, rows, [*notes_on_metrics]))  # a list of its own, to which others add
        if len(averaged) > 1:
            means.append(compare_weighted_sides(name_of_mean, weighted_tasks, first, other))

    # Correct the p-values of tasks and of means for their own number of tests.
    for family in ([row for pair in pairs for row in pair.rows], means):
        corrected, levels = significance.holm([row.p for row in family])
        for row, p_corrected, level in zip(family, corrected, levels, strict=True):
            row.decide(p_corrected, level)
    for pair, mean in zip(pairs, means, strict=False):
        pair.rows.append(mean)
    return pairs


def _find_common_tasks(all_results: Sequence[Results], skip: Sequence[str]) -> list[str]:
    """Return the tasks that all results have, without those in `skip`.

    Raises DataError if not all models were asked the same in one of them.
    """
    reference, *others = all_results
    tasks: list[str] = []
    for task in reference.items:
        if not is_named(task, skip) and all(task in results.items for results in others):
            tasks.append(task)
    for results in others:
        for task in tasks:
            check_same_questions(task, reference, results)
    return tasks


def _check_runs(side: Side) -> None:
    """Raise DataError if a side has too few runs, or if two of them are the same one.

    The scores of equal runs would seem not to scatter.
    """
    if len(side.runs) < MIN_RUNS:
        raise DataError(
            f"{side.name}: {len(side.runs)} run given, expected at least {MIN_RUNS}, since one run does not show "
            "how much its score depends on the seed"
        )
    seen: set[tuple[object, ...]] = set()
    for results in side.all_results:
        identity = tuple(record.get("items_hash") for record in results.tasks.values())
        if identity in seen:
            raise DataError(
                f"{side.name}: {results.path} has the same answers as another of its runs; give different runs"
            )
        seen.add(identity)


def compare_weighted_sides(
    name: str, tasks: Sequence[WeightedTask], first: Side, other: Side, offset: float = 0.0
) -> SideComparison:
    """Compare two sides by one task, or by a weighted sum of the scores of several, less `offset`."""
    # The weighted mean is tested in place of the sum, because weights of units add up to 1.
    total_weight = sum(task.weight for task in tasks)
    weights_u, first_ru, other_ru = _collect(tasks, first, other)
    is_in_bits = tasks[0].metric in BITS_METRICS
    is_sum_of_accuracies = len(tasks) > 1 and not is_in_bits
    found = difference_of_sides(weights_u, first_ru, other_ru, is_text=is_in_bits)
    first_means_r = first_ru.sum(axis=1) * total_weight - offset
    other_means_r = other_ru.sum(axis=1) * total_weight - offset
    has_enough_units = len(weights_u) >= (MIN_DOCUMENTS if is_in_bits else MIN_UNITS)
    return SideComparison(
        task=name,
        metric="mean" if is_sum_of_accuracies else tasks[0].metric,
        n=sum(len(_common_items(task.task, task.metric, first, other)) for task in tasks),
        num_units=len(weights_u),
        first=float(first_means_r.mean()),
        other=float(other_means_r.mean()),
        first_spread=float(first_means_r.std(ddof=1)),
        other_spread=float(other_means_r.std(ddof=1)),
        estimate=replace(found, difference=found.difference * total_weight, error=found.error * total_weight),
        is_claimable=has_enough_units and found.num_effective >= MIN_UNITS,
        runs=[first_means_r.tolist(), other_means_r.tolist()],
    )


def difference_of_sides(weights_u: Floats, first_ru: Floats, other_ru: Floats, *, is_text: bool = False) -> Estimate:
    """Estimate the difference of two sides, with the error that runs and items give it together.

    weights_u: weight of each independent unit; they add up to 1.
    first_ru, other_ru: what each unit contributes to the score of each run, [r runs, u units]. A run's score is the sum
        over its units.
    is_text: the units have bits per byte, whose differences may have long tails.
    """
    num_units = len(weights_u)
    # If one unit holds most of the weight, the others tell little about the error of the difference.
    num_effective = float(weights_u.sum() ** 2 / (weights_u**2).sum())
    first_means_r = first_ru.sum(axis=1)
    other_means_r = other_ru.sum(axis=1)
    difference = float(other_means_r.mean() - first_means_r.mean())

    # Variance among items: each unit's part of the difference, less what its weight alone would give.
    residuals_u = other_ru.mean(axis=0) - first_ru.mean(axis=0) - difference * weights_u
    unit_df = max(min(num_units, num_effective) - 1, 1)
    correction = num_units / max(num_units - 1, 1)
    variances = [
        (float(first_means_r.var(ddof=1)) / len(first_means_r), len(first_means_r) - 1),
        (float(other_means_r.var(ddof=1)) / len(other_means_r), len(other_means_r) - 1),
        (float((residuals_u**2).sum()) * correction, unit_df),
    ]
    variance = sum(part for part, _ in variances)
    squared_by_df = sum(part**2 / df for part, df in variances)
    df = variance**2 / squared_by_df if squared_by_df else 1.0
    return Estimate(
        difference=difference,
        error=math.sqrt(variance),
        df=df,
        num_effective=num_effective,
        tail_correction=1 + significance.CAUTION / num_effective if is_text else 1.0,
    )


def _collect(tasks: Sequence[WeightedTask], first: Side, other: Side) -> tuple[Floats, Floats, Floats]:
    """Collect what each independent unit contributes to the weighted mean of each run.

    Returns the weight of each unit [u], and the contributions to the runs of both sides, [r, u] each. Weights add up to
    1, and a run's contributions to its score. Only items that every model answered count.
    """
    weight_of: dict[Unit, float] = {}
    columns: dict[Unit, list[float]] = {}
    runs = [*first.runs, *other.runs]
    total_weight = sum(task.weight for task in tasks)
    cluster_of = _find_clusters(tasks, first.all_results[0])
    for task, metric, weight_of_task in tasks:
        task_share = weight_of_task / total_weight
        common = _common_items(task, metric, first, other)
        if not common:
            raise DataError(f"{task}: the models have no item in common")
        for number, run in enumerate(runs):
            for results in run.checkpoints:
                share = task_share / len(run.checkpoints)
                for own_unit, weight, value in _contributions(results, task, metric, common):
                    unit = cluster_of.get(own_unit, own_unit)
                    columns.setdefault(unit, [0.0] * len(runs))[number] += share * value
                    is_first_result = number == 0 and results is run.checkpoints[0]
                    if is_first_result:
                        weight_of[unit] = weight_of.get(unit, 0.0) + weight * task_share

    # Rounding makes contributions that are equal exactly equal, so that no difference of 1e-16 is called one.
    values_ur = np.round([columns[unit] for unit in weight_of], 15)
    num_first = len(first.runs)
    return np.array(list(weight_of.values())), values_ur[:, :num_first].T, values_ur[:, num_first:].T


def _find_clusters(tasks: Sequence[WeightedTask], results: Results) -> dict[Unit, Unit]:
    """Return the cluster of each item that has one. What one task says holds for all tasks on the same data."""
    cluster_of: dict[Unit, Unit] = {}
    for task in tasks:
        data = results.tasks[task.task]["data_fingerprint"]
        for item in results.items[task.task]:
            if "cluster" in item:
                cluster_of[data, item["index"]] = (data, item["cluster"])
    return cluster_of


def _common_items(task: str, metric: str, first: Side, other: Side) -> set[int]:
    """Return the indices of the items of a task that every model of both sides answered, and that have the metric."""
    indices: list[set[int]] = []
    for results in [*first.all_results, *other.all_results]:
        items = results.items[task]
        if metric != BITS:  # windows of a text have it only together
            items = items_with(items, metric)
        indices.append({item["index"] for item in items})
    return set.intersection(*indices)


def _contributions(results: Results, task: str, metric: str, common: set[int]) -> list[tuple[Unit, float, float]]:
    """Return (unit, weight, contribution to the score) of each item of a task, or of each window of a text.

    An item is a unit of its own here. A window belongs to its document; its weight is its share of the text's bytes, so
    that the contributions add up to the bits per byte.
    """
    data = results.tasks[task]["data_fingerprint"]
    items = [item for item in results.items[task] if item["index"] in common]
    if metric == BITS:
        rows = np.array([text_row(item) for item in items])
        total_bytes = rows[:, 1].sum()
        bits = rows[:, 0] / math.log(2) / total_bytes
        units: list[Unit] = [(data, document_of(item)) for item in items]
        return list(zip(units, (rows[:, 1] / total_bytes).tolist(), bits.tolist(), strict=True))

    weights = weights_of(items, has_categories(results.tasks[task]))
    contributions = []
    for item, weight in zip(items, weights.tolist(), strict=True):
        contributions.append(((data, item["index"]), weight, weight * item[metric]))
    return contributions
