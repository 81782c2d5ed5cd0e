"""All pairs of several models or recipes, and a ranking that says which of them cannot be told apart.

    llmfoundry-lite compare results/s/a.json results/s/b.json results/s/c.json --all-pairs

Each two are compared, and the p-values of all pairs and tasks together are corrected by Holm's method (1979), those of
the means apart. Holm's method holds for tests that depend on each other in any way, as those of pairs do, which share
models and items. Methods for pairs alone, such as Tukey's studentised range, find more, but they need scores that are
independent between models and have equal variances. Scores on the same items are neither.

A model's rank is an interval: from one more than the number of models that are significantly better, to the number of
all models less those that are significantly worse. If all decisions are right, each interval contains the true rank, so
all intervals of a family hold together with a probability of at least 95 % (Al Mohamad, Goeman and van Zwet, Biometrics
78, 2022). Models whose intervals overlap need not be equal: this many items, or runs, do not show their order.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.errors import DataError, mask_credentials, mask_urls
from llmfoundry_lite.evaluation.compare import refuse_unknown_tasks
from llmfoundry_lite.evaluation.means import is_named
from llmfoundry_lite.evaluation.pairs import (
    CAPTION_ON_NOT_TESTED,
    NOT_TESTED,
    SIGNIFICANT,
    Comparison,
    MetricComparison,
    format_number,
    format_p,
)
from llmfoundry_lite.evaluation.records import BITS_METRICS
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import caption_on_trials, name_models_unless_all, print_notes, trials_of
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list
from llmfoundry_studies.gauntlet import GAUNTLET
from llmfoundry_studies.seeds import SideComparison, SidePair


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tested difference of two models or recipes by one task or composite: `other` minus `first`."""

    first: str
    other: str
    task: str
    metric: str
    first_value: float
    other_value: float
    difference: float
    low: float | None
    """Lower end of the interval at `confidence`; None if there are too few items for one."""
    high: float | None
    confidence: float
    p: float | None
    """None if no test was made."""
    p_corrected: float | None
    """Corrected for all pairs and tasks."""
    is_detected: bool
    verdict: str

    @property
    def is_tested(self) -> bool:
        """Whether there are enough items or documents for a test."""
        return self.p is not None

    @property
    def is_other_better(self) -> bool:
        """Whether `other` has the better value. For bits per byte, that is the smaller one."""
        return (self.difference < 0) == (self.metric in BITS_METRICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The rank of a model or recipe, as an interval."""

    name: str
    value: float
    best: int | None
    """One more than the number of those that are significantly better; None if no pair of this model was tested."""
    worst: int | None
    """The number of all, less those that are significantly worse."""

    @property
    def label(self) -> str:
        """The interval as a text: "2", or "1-3"; "-" if no test was made."""
        if self.best is None or self.worst is None:
            return NOT_TESTED
        return str(self.best) if self.best == self.worst else f"{self.best}-{self.worst}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The ranks by one task, by the mean of the accuracies, or by a composite of a gauntlet."""

    task: str
    metric: str
    ranks: list[Rank]
    """In the order of the values, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPairs:
    """All pairs of several models or recipes, with rankings by each task."""

    differences: list[Difference]
    """Each pair by each task, by the mean, and by the composites of a gauntlet."""
    rankings: list[Ranking]
    """The mean first, if there is one, then the composites and the tasks."""
    notes: list[str]
    trials: list[str]
    """Tasks of which only the first items were evaluated."""

    def differences_by(self, task: str) -> list[Difference]:
        """Return the differences of all pairs by one task."""
        return [difference for difference in self.differences if difference.task == task]


def only_common_tasks(all_results: Sequence[Results], skip: Sequence[str]) -> tuple[list[Results], list[str]]:
    """Return results with the tasks that all of them have, so that each pair is compared by the same ones.

    Returns also a note on the tasks that are left out. `skip` names tasks to leave out, too. Raises DataError if no
    task is left, or if no result has a task of `skip`.
    """
    refuse_unknown_tasks(all_results, skip)
    names = list(dict.fromkeys(task for results in all_results for task in results.items))
    common = [task for task in names if all(task in results.items for results in all_results)]
    common = [task for task in common if not is_named(task, skip)]
    if not common:
        raise DataError(f"{', '.join(results.name for results in all_results)} have no task in common")
    kept: list[Results] = []
    for results in all_results:
        tasks = {task: results.tasks[task] for task in results.tasks if task in common}
        items = {task: results.items[task] for task in results.items if task in common}
        kept.append(replace(results, tasks=tasks, items=items))

    left_out = [task for task in names if task not in common]
    notes = [f"left out, since not all have them or as asked: {', '.join(left_out)}"] if left_out else []
    return kept, notes


def rank_models(comparisons: Sequence[Comparison], notes: Sequence[str] = ()) -> AllPairs:
    """Return the pairs and rankings of models. `comparisons` has each pair, from `compare(…, all_pairs=True)`."""
    differences: list[Difference] = []
    all_notes = list(notes)
    tasks: set[str] = set()
    for comparison in comparisons:
        tasks |= {row.task for row in comparison.tasks}
        for row in comparison.rows:
            differences.append(difference_of(comparison.first, comparison.other, row, row.difference))
        all_notes += comparison.notes
    trials = [task for comparison in comparisons for task in comparison.trials]
    return _rank_all(differences, tasks, all_notes, trials)


def rank_sides(pairs: Sequence[SidePair], notes: Sequence[str] = ()) -> AllPairs:
    """Return the pairs and rankings of recipes. `pairs` has each pair, from `compare_sides(…, all_pairs=True)`."""
    differences: list[Difference] = []
    tasks: set[str] = set()
    for pair in pairs:
        tasks |= pair.first.all_results[0].tasks.keys()
        for row in pair.rows:
            differences.append(difference_of(pair.first.name, pair.other.name, row, row.estimate.difference))
    trials = [task for pair in pairs for task in trials_of(pair.first.all_results)]
    return _rank_all(differences, tasks, notes, trials)


def difference_of(first: str, other: str, row: MetricComparison | SideComparison, difference: float) -> Difference:
    """Return a row of a comparison of `first` and `other` as a difference."""
    is_tested = row.is_claimable if isinstance(row, SideComparison) else row.is_tested
    return Difference(
        first=first,
        other=other,
        task=row.task,
        metric=row.metric,
        first_value=row.first,
        other_value=row.other,
        difference=difference,
        low=row.low,
        high=row.high,
        confidence=row.confidence,
        p=row.p if is_tested else None,
        p_corrected=row.p_corrected if is_tested else None,
        is_detected=row.is_detected,
        verdict=row.verdict,
    )


def _rank_all(
    differences: list[Difference], tasks: Collection[str], notes: Sequence[str], trials: Sequence[str]
) -> AllPairs:
    """Rank by the mean, by the composites, and by each task. Notes that several pairs have in common are kept once.

    `tasks` has the names of tasks, among which the mean and the composites are not. `trials` has those of which only
    the first items were evaluated.
    """
    metric_of = {difference.task: difference.metric for difference in differences}
    composites = [name for name, metric in metric_of.items() if metric == GAUNTLET]
    means = [name for name in metric_of if name not in tasks and name not in composites]
    names = dict.fromkeys([*means, *composites, *metric_of])
    rankings = [rank(name, metric_of[name], differences) for name in names]
    notes = [*notes, *_notes_on_not_ranked(differences, rankings)]
    compared_trials = [task for task in dict.fromkeys(trials) if task in metric_of]
    return AllPairs(
        differences=differences, rankings=rankings, notes=list(dict.fromkeys(notes)), trials=compared_trials
    )


def _notes_on_not_ranked(differences: Sequence[Difference], rankings: Sequence[Ranking]) -> list[str]:
    """Return a note for each task by which some models have no rank, because no pair of theirs was tested."""
    verdict_of = {difference.task: difference.verdict for difference in differences if not difference.is_tested}
    notes: list[str] = []
    for ranking in rankings:
        not_ranked = [one.name for one in ranking.ranks if one.best is None]
        if not_ranked:
            models = name_models_unless_all(not_ranked, len(ranking.ranks))
            notes.append(f"{ranking.task}: no ranks, {verdict_of[ranking.task]}{models}")
    return notes


def rank(task: str, metric: str, differences: Sequence[Difference]) -> Ranking:
    """Rank all models that the differences by `task` are about.

    A model's value is that of its first pair. Pairs may have slightly different ones, if some items could not be asked
    of all models.
    """
    of_task = [difference for difference in differences if difference.task == task]
    value_of: dict[str, float] = {}
    for difference in of_task:
        value_of.setdefault(difference.first, difference.first_value)
        value_of.setdefault(difference.other, difference.other_value)

    num_better = dict.fromkeys(value_of, 0)
    num_worse = dict.fromkeys(value_of, 0)
    for difference in of_task:
        if difference.is_detected:
            better, worse = difference.other, difference.first
            if not difference.is_other_better:
                better, worse = worse, better
            num_better[worse] += 1
            num_worse[better] += 1

    names_tested: set[str] = set()
    for difference in of_task:
        if difference.is_tested:
            names_tested |= {difference.first, difference.other}
    ranks: list[Rank] = []
    for name, value in value_of.items():
        best = worst = None
        if name in names_tested:
            best = 1 + num_better[name]
            worst = len(value_of) - num_worse[name]
        ranks.append(Rank(name=name, value=value, best=best, worst=worst))
    ranks.sort(key=lambda one: one.value, reverse=metric not in BITS_METRICS)
    return Ranking(task=task, metric=metric, ranks=ranks)


# ------------------------------------------------------------------------------------------------------------ tables

LEGEND = (
    "A rank is an interval: 1-2 means that the results do not show whether the model is first or second, and - that "
    "no test was made. The intervals "
    "of all tasks hold together in 95 % of studies, and so do those of the means, because p-values are corrected for "
    "all pairs and tasks (Holm)."
)
"""Text below the tables."""
PAIRS_CAPTION = (
    f"All pairs. {SIGNIFICANT} marks differences that are significant: p < 0.05 after Holm's correction, for all pairs "
    "and tasks. Intervals are at the level that decides."
)
MAX_PAIRS_SHOWN = 45
"""Number of pairs above which the console shows none of them: those of ten models."""


def _format(value: float, metric: str, sign: str = "") -> str:
    """Return a value or difference of a metric: 4 decimals for bits per byte, 3 otherwise."""
    return format_number(value, 4 if metric in BITS_METRICS else 3, sign)


def ranking_table(all_pairs: AllPairs) -> Table:
    """Return the table of ranks: a row for each model, in the order of the first ranking, a column for each ranking."""
    names = [one.name for one in all_pairs.rankings[0].ranks]
    columns = ["model"]
    rows = [[name] for name in names]
    for ranking in all_pairs.rankings:
        columns.append(ranking.task if ranking.metric in ("mean", GAUNTLET) else f"{ranking.task} {ranking.metric}")
        rank_of = {one.name: one for one in ranking.ranks}
        for name, row in zip(names, rows, strict=True):
            one = rank_of[name]
            row.append(f"{one.label} ({_format(one.value, ranking.metric)})")
    return Table("Ranks, and scores", columns, rows)


def pairs_table(all_pairs: AllPairs, task: str | None = None, mark: str = "") -> Table:
    """Return a table of all pairs by one task, or by every task. `mark` follows differences that are significant."""
    differences = all_pairs.differences if task is None else all_pairs.differences_by(task)
    rows: list[list[str]] = []
    for one in differences:
        text = _format(one.difference, one.metric, "+") + (mark if one.is_detected else "")
        if one.low is not None and one.high is not None:
            text += f" [{_format(one.low, one.metric, '+')}, {_format(one.high, one.metric, '+')}]"
        p = NOT_TESTED if one.p_corrected is None else format_p(one.p_corrected)
        rows.append([f"{one.other} against {one.first}", one.task, text, p, one.verdict])
    title = "All pairs" if task is None else f"All pairs by {task}"
    return Table(title, ["pair", "task", "difference", "p", "verdict"], rows, right={3})


def numbers_table(all_pairs: AllPairs) -> Table:
    """Return a table of all pairs, whose numbers have all their digits."""
    records = [asdict(difference) for difference in all_pairs.differences]
    rows = [["" if value is None else str(value) for value in record.values()] for record in records]
    return Table("", list(records[0]), rows)


def write_all_pairs(all_pairs: AllPairs, results: Mapping[str, Any], out: Path) -> list[Path]:
    """Write compare.json, .md, .csv and .tex into a folder, and return their paths.

    `results` has the facts of each model, or the results of each recipe, by its name.
    """
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "results": results,
        "comparisons": [asdict(difference) for difference in all_pairs.differences],
        "rankings": [asdict(ranking) for ranking in all_pairs.rankings],
        "notes": all_pairs.notes,
    }
    ranks = ranking_table(all_pairs)
    pairs = pairs_table(all_pairs)
    lines = [f"## {ranks.title}", "", *ranks.markdown(), "", *markdown_list(all_pairs.notes), ""]
    lines += [f"## {pairs.title}", "", *pairs.markdown(), "", LEGEND, ""]
    ranks_by_task = ranks.transposed("task").latex(f"Ranks, and scores. {LEGEND}{caption_on_trials(all_pairs.trials)}")
    caption = PAIRS_CAPTION + caption_on_trials(all_pairs.trials)
    if not all(difference.is_tested for difference in all_pairs.differences):
        caption += f" {CAPTION_ON_NOT_TESTED}"
    pairs_for_paper = pairs_table(all_pairs, mark=SIGNIFICANT).without(["verdict"]).latex(caption)
    latex_lines = [*ranks_by_task, "", *pairs_for_paper, ""]

    # The JSON comes first, because the next comparison recognises by it that the other files may be replaced too.
    texts = {
        "json": mask_urls(json.dumps(record, indent=1)) + "\n",
        "md": mask_credentials("\n".join(lines)),
        "csv": mask_credentials(numbers_table(all_pairs).csv()),
        "tex": mask_credentials("\n".join(latex_lines)),
    }
    paths: list[Path] = []
    for suffix, text in texts.items():
        path = out / f"compare.{suffix}"
        write_atomically(path, text)
        paths.append(path)
    return paths


def print_all_pairs(all_pairs: AllPairs, console: Console) -> None:
    """Print the ranks, the pairs by the first ranking, the notes, and a legend."""
    ranking_table(all_pairs).print_blocks(console)
    console.print()
    first_task = all_pairs.rankings[0].task
    if len(all_pairs.differences_by(first_task)) <= MAX_PAIRS_SHOWN:
        pairs_table(all_pairs, first_task).print_blocks(console)
        console.print()
    print_notes(console, all_pairs.notes)
    console.print(Text(LEGEND, style="dim"))
