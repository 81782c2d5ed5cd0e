"""Comparison of the categories and averages of a gauntlet, by the items of their tasks: `compare … --gauntlet FILE`.

A category's score is a weighted sum of accuracies (`run_gauntlet`), so its difference between two models is a weighted
sum of their items' differences. It is tested as the mean of several tasks is: the independent units are items
or clusters, and an item that several tasks ask is one unit. Tasks on the same data therefore count as related by what
their items show, and an accuracy that is rescaled for guessing counts by its scale. In `gauntlet.md`, the standard
errors of two models say less, because both were asked the same items.

The composites are added to the comparisons of models or of recipes, which then show them beside the tasks. Categories
and averages are two families, each with Holm's correction for its own number of tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llmfoundry_lite.config.eval_schema import GauntletConfig
from llmfoundry_lite.config.load_eval import load_gauntlet
from llmfoundry_lite.config.task_types import BPB
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.compare import WeightedTask, compare_weighted
from llmfoundry_lite.evaluation.gauntlet import Part, divide_gauntlet
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics, describe_choice
from llmfoundry_lite.evaluation.pairs import Comparison, MetricComparison
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_studies.seeds import SideComparison, SidePair, compare_weighted_sides

GAUNTLET = "gauntlet"
"""Metric of composites, which are shares of what is left above guessing."""
NOTE_ON_BITS = f"gauntlet: {BPB} is no accuracy, so its tasks count by their own metric"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedScore:
    """A category or an average, as a weighted sum of accuracies less a constant."""

    name: str
    is_category: bool
    tasks: list[WeightedTask]
    offset: float
    """Number that is subtracted from the sum, because guessing has the score 0."""


def add_gauntlet(
    name: str, all_results: Sequence[Results], comparisons: Sequence[Comparison], metric: str | None
) -> None:
    """Add the composites of a gauntlet to comparisons of models, with notes on what is left out.

    name: the gauntlet's file.
    all_results: the results that were compared, with their items.
    comparisons: what `compare` returned for them. Tasks that it left out are left out here, too.
    metric: the metric that the user asks for, or None.

    Raises ConfigError if the file cannot be read, and DataError if no category has all of its tasks.
    """
    config, notes = load_gauntlet(name)
    metrics, notes_on_metrics = _choose_accuracies(all_results, metric)
    notes = [*notes, *notes_on_metrics]
    results_of = {results.name: results for results in by_metrics(all_results, metrics)}

    families = Families()
    for comparison in comparisons:
        first = results_of[comparison.first]
        other = results_of[comparison.other]
        scores, notes_on_missing = weigh_scores(config, {row.task: first.tasks[row.task] for row in comparison.tasks})
        for score in scores:
            row = compare_weighted(f"{GAUNTLET}: {score.name}", GAUNTLET, score.tasks, first, other)
            row = replace(row, first=row.first - score.offset, other=row.other - score.offset)
            comparison.composites.append(row)
            families.add(score, row)
        comparison.notes += [*notes, *notes_on_missing]
    families.decide(name)


def _choose_accuracies(all_results: Sequence[Results], metric: str | None) -> tuple[dict[str, str], list[str]]:
    """Choose the metric of each task in a gauntlet, which is of accuracies. Returns task -> metric, and notes.

    `metric` is the one that the user asks for, or None. Only with bits per byte do the metrics differ from those by
    which the tasks themselves are compared, so only then there are notes.
    """
    if metric != BPB:
        return choose_metrics(all_results, metric), []
    metrics = choose_metrics(all_results)
    return metrics, [NOTE_ON_BITS, *describe_choice(all_results, metrics, None)]


def add_gauntlet_to_sides(name: str, pairs: Sequence[SidePair], metric: str | None = None) -> None:
    """Add the composites of a gauntlet to comparisons of recipes, with notes on what is left out.

    `metric` is the one that the user asks for, or None. Raises the errors of `add_gauntlet`.
    """
    config, notes = load_gauntlet(name)
    sides = {side.name: side for pair in pairs for side in (pair.first, pair.other)}
    all_results = [results for side in sides.values() for results in side.all_results]
    metrics, notes_on_metrics = _choose_accuracies(all_results, metric)
    families = Families()
    for pair in pairs:
        records: dict[str, Record] = {}
        reference = pair.first.all_results[0]
        for row in pair.rows:
            if row.task in reference.tasks:  # the mean is no task
                records[row.task] = {**reference.tasks[row.task], "metric": metrics[row.task]}
        scores, notes_on_missing = weigh_scores(config, records)
        for score in scores:
            row = compare_weighted_sides(f"{GAUNTLET}: {score.name}", score.tasks, pair.first, pair.other, score.offset)
            row.metric = GAUNTLET
            pair.rows.append(row)
            families.add(score, row)
        pair.notes_on_metrics.extend([*notes, *notes_on_metrics, *notes_on_missing])
    families.decide(name)


class Families:
    """The categories and the averages of all comparisons, whose p-values are corrected apart."""

    def __init__(self) -> None:
        self.categories: list[MetricComparison | SideComparison] = []
        self.averages: list[MetricComparison | SideComparison] = []

    def add(self, score: WeightedScore, row: MetricComparison | SideComparison) -> None:
        """Add a comparison of a score to its family."""
        family = self.categories if score.is_category else self.averages
        family.append(row)

    def decide(self, name: str) -> None:
        """Correct the p-values of each family, and set all verdicts. Raises DataError if there are no comparisons."""
        if not self.categories:
            raise DataError(
                f"--gauntlet {name}: no category has all of its tasks, with an accuracy, in the results; evaluate its "
                "tasks, or leave the option out"
            )
        for family in (self.categories, self.averages):
            corrected, levels = significance.holm([row.p for row in family])
            for row, p_corrected, level in zip(family, corrected, levels, strict=True):
                row.decide(p_corrected, level)


def weigh_scores(config: GauntletConfig, records: Mapping[str, Record]) -> tuple[list[WeightedScore], list[str]]:
    """Return the categories and averages of a gauntlet as weighted sums, and a note for each category left out.

    `records` has the tasks that both models have, by their name in results, with the first model's numbers of items,
    which some gauntlets weight by.
    """
    divided = divide_gauntlet(config, records)
    scores: list[WeightedScore] = []
    for name, categories in divided.categories_of_score.items():
        weight_of: dict[str, float] = {}
        offset = 0.0
        for part in (part for category in categories for part in category):
            weight = _weight_in_mean(part, len(categories))
            weight_of[part.task] = weight_of.get(part.task, 0.0) + weight
            offset += weight * part.baseline
        tasks = [WeightedTask(task, str(records[task]["metric"]), weight) for task, weight in weight_of.items()]
        is_category = any(category.name == name for category in config.categories)
        scores.append(WeightedScore(name=name, is_category=is_category, tasks=tasks, offset=offset))

    notes = [
        f"gauntlet: {category} is left out: no accuracy of {', '.join(tasks)}"
        for category, tasks in divided.missing.items()
    ]
    return scores, notes


def _weight_in_mean(part: Part, num_categories: int) -> float:
    """Return what an accuracy of 1 in a task adds to the mean of several categories."""
    return part.weight * part.scale / num_categories
