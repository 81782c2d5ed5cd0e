"""Comparisons of models as objects, and their output: to the console, to files, and as points of a figure.

A `Comparison` has the results of one model against the first. Each of its rows is a `MetricComparison`, which compares
one metric on one task. `compare.py` computes both, and calls `MetricComparison.decide` when it knows the number of
tests.
"""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.config.task_types import BITS
from llmfoundry_lite.errors import mask_credentials, mask_urls, printable
from llmfoundry_lite.evaluation.records import BITS_METRICS, RESULT, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import LEVEL, NUM_RESAMPLES, SEED, Z_POWER, Counts, z_of
from llmfoundry_lite.evaluation.tables import caption_on_trials, print_notes
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list, markdown_text

SIGNIFICANT = "*"
"""Mark of a significant difference in LaTeX."""
NOT_TESTED = "-"
"""Stands in place of a p-value or a rank where no test was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencePoint:
    """Difference of a model from the first one, as a point of the comparison's figure."""

    difference: float
    low: float
    high: float
    """Ends of the interval."""
    is_detected: bool
    """The difference is statistically detected."""
    is_tested: bool
    """There were enough items to test it."""


@dataclass(slots=True, kw_only=True)
class MetricComparison:
    """A metric of two models on a task, over the items that both answered. Differences are `other` minus `first`."""

    task: str
    metric: str
    n: int
    """Number of items. For bits per byte, of documents or windows of text."""
    first: float
    """The first model's value of the metric."""
    other: float
    difference: float
    low: float | None = None
    """Lower end of the interval of the difference at `confidence`; None if there are too few independent items."""
    high: float | None = None
    confidence: float = 0.95
    wins: int
    """Number of items on which `other` did better."""
    losses: int
    ties: int
    p: float
    """Two-sided p-value, before the correction for the number of tests; 1 if no test was made."""
    test: str
    """Name of the test that gives `p`."""
    p_corrected: float = math.nan
    """`p` corrected for the number of tests, once `decide` knows it."""
    error: float
    """Standard error of the difference."""
    interval: Callable[[float], tuple[float, float] | None] = field(repr=False)
    """Function from a level, such as 0.05 for 95 %, to the interval of the difference."""
    counts: Counts | None = field(default=None, repr=False)
    """Independent units won and lost; None for a held-out text."""
    is_tested: bool = True
    """There are enough independent items or documents for a test."""
    is_detected: bool = False
    """The difference is significant, and text that a tokenizer loses cannot explain it."""
    lost_text: float = 0.0
    """The most that text which one of the tokenizers loses could add, in bits per byte."""
    is_comparable: bool = True
    """There is too little lost text to change the verdict."""
    min_p: float = 0.0
    """The smallest p-value that the test could give. A bootstrap has one because its draws are limited."""

    @property
    def is_resolved(self) -> bool:
        """Whether the test could find a difference at the level that decides. It could not if its draws are too few."""
        return self.min_p < 1 - self.confidence

    @property
    def detectable(self) -> float | None:
        """The smallest difference that these items detect with 80 % power at `confidence`.

        That is (z of the level + z of the power) times the standard error: 2.8 standard errors at 95 %. None if the
        standard error is 0, or if no test was made.
        """
        if not self.is_tested:
            return None
        level = 1 - self.confidence
        return (z_of(level) + Z_POWER) * self.error or None

    def decide(self, p_corrected: float, level: float) -> None:
        """Set the fields that depend on the number of tests: corrected p-value, interval, and whether it is detected.

        p_corrected: `p` corrected for the number of tests.
        level: the level that the uncorrected `p` is compared with; `significance.holm` returns both.

        Changes `p_corrected`, `confidence`, `low`, `high`, `is_comparable` and `is_detected`. `compare.compare` calls
        this once for each comparison, after all of them have been computed.
        """
        self.p_corrected = p_corrected
        self.confidence = 1 - level
        interval = self.interval(level)
        if interval is not None:
            self.low, self.high = interval
        is_significant = self.p < level

        # Lost text could add up to `lost_text` to one model's bits per byte. Find how much would change the verdict.
        low, high = interval or (self.difference, self.difference)
        if is_significant:
            margin = min(abs(low), abs(high))  # more could move the nearer end of the interval across 0
        else:
            margin = max(abs(self.difference), (high - low) / 2)  # more could hide a larger difference
        self.is_comparable = not self.lost_text or self.lost_text < margin
        self.is_detected = is_significant and self.is_comparable

    @property
    def is_better(self) -> bool:
        """Whether `other` has the better value. For bits per byte, that is the smaller one."""
        is_less = self.difference < 0
        return is_less if self.metric in BITS_METRICS else not is_less

    @property
    def margin(self) -> str:
        """The size of the difference with the interval that decides, such as "0.150 [0.103, 0.197]"."""
        text = self.format_value(abs(self.difference))
        if self.low is None or self.high is None:
            return text
        low, high = sorted((self.low, self.high) if self.difference >= 0 else (-self.low, -self.high))
        return f"{text} [{self.format_value(low)}, {self.format_value(high)}]"

    @property
    def verdict(self) -> str:
        """The result of the test in a few words, such as "better by 0.150" or "no detectable difference".

        "too few items" says that no test was made.
        """
        if not self.is_tested:
            return too_few(self.metric)
        if not self.is_comparable:
            return "not comparable: text is lost"
        if self.is_detected:
            direction = "better" if self.is_better else "worse"
            return f"{direction} by {self.format_value(abs(self.difference))}"
        if not self.is_resolved:
            return "not decided: too many tests"
        return "the same on every item" if self.ties == self.n else "no detectable difference"

    def format_value(self, number: float, sign: str = "") -> str:
        """Format a value of this metric: 4 decimals for bits per byte, 3 for an accuracy. `sign` "+" shows a plus."""
        digits = 4 if self.metric in BITS_METRICS else 3
        return format_number(number, digits, sign)

    def cells(self) -> list[str]:
        """Return the cells of this metric's row in the comparison's table, in the order of its columns.

        Columns are those of `Comparison.table`. The cells of a row are for instance

            arc/0-shot, acc, 100, 0.600, 0.750, +0.150 [+0.103, +0.197], <.001, better by 0.150, 20/5/75, 95 %
        """
        # If there are too few items for an interval, the difference stands alone.
        difference = self.format_value(self.difference, "+")
        if self.low is not None and self.high is not None:
            difference += f" [{self.format_value(self.low, '+')}, {self.format_value(self.high, '+')}]"
        return [
            self.task,
            "" if self.metric == "mean" else self.metric,
            f"{self.n:,}",
            self.format_value(self.first),
            self.format_value(self.other),
            difference,
            format_p(self.p_corrected) if self.is_tested else NOT_TESTED,
            self.verdict,
            f"{self.wins:,}/{self.losses:,}/{self.ties:,}",
            f"{100 * self.confidence:.4g} %",
        ]

    def as_json(self) -> Record:
        """Return the fields that JSON can hold, with `detectable` and `verdict`. Without a test, p-values are None."""
        facts = asdict(self)
        del facts["interval"], facts["counts"]
        if not self.is_tested:
            facts |= {"p": None, "p_corrected": None}
        return {**facts, "detectable": self.detectable, "verdict": self.verdict}


@dataclass(slots=True, kw_only=True, repr=False)
class Comparison:
    """Comparison of one model's results with those of the first."""

    first: str
    """Name of the first result."""
    other: str
    """Name of the result that is compared with it. Differences are `other` minus `first`."""
    tasks: list[MetricComparison]
    """Each task by its main metric."""
    mean: MetricComparison | None
    """The mean of the accuracies, in which each task counts the same; None for fewer than two."""
    other_metrics: list[MetricComparison]
    """The tasks by their other metrics, if those were asked for."""
    composites: list[MetricComparison] = field(default_factory=list)
    """Categories and averages of a gauntlet, if one was asked for."""
    notes: list[str] = field(default_factory=list)
    trials: list[str] = field(default_factory=list)
    """Tasks of which only the first items were evaluated."""

    @property
    def rows(self) -> list[MetricComparison]:
        """The tasks, the composites of a gauntlet, and the mean if there is one."""
        rows = [*self.tasks, *self.composites]
        return rows if self.mean is None else [*rows, self.mean]

    @property
    def sentence(self) -> str:
        """The verdict on the mean of the accuracies as a sentence; an empty text if there is no mean.

        It has one of these forms:

            ours is better than base by 0.150 [0.103, 0.197] on the mean of 2 tasks
            ours and base: the same answers on the mean of 2 tasks (p 1.00)
            ours and base: no detectable difference on the mean of 2 tasks (p 0.41); a difference of 0.067 would be
            found four times in five
            ours and base: no test on the mean of 2 tasks, too few items
        """
        mean = self.mean
        if mean is None:
            return ""
        if mean.is_detected:
            direction = "better" if mean.is_better else "worse"
            return f"{self.other} is {direction} than {self.first} by {mean.margin} on the {mean.task}"
        if not mean.is_tested:
            return f"{self.other} and {self.first}: no test on the {mean.task}, {mean.verdict}"
        context = f"on the {mean.task} (p {format_p(mean.p_corrected)})"
        if mean.detectable is None:
            return f"{self.other} and {self.first}: the same answers {context}"

        # Say how large a difference would have been detected, because "no difference" means little with few items.
        power = f"a difference of {mean.format_value(mean.detectable)} would be found four times in five"
        return f"{self.other} and {self.first}: no detectable difference {context}; {power}"

    def table(self) -> Table:
        """Return the table that `llmfoundry-lite compare` prints."""
        columns = (
            "task",
            "metric",
            "items",
            self.first,
            self.other,
            "difference",
            "p",
            "verdict",
            "won/lost/tied",
            "confidence",
        )
        rows = [row.cells() for row in [*self.rows, *self.other_metrics]]
        numeric_columns = {2, 3, 4, 6, 8, 9}
        return Table(f"{self.other} against {self.first}", columns, rows, right=numeric_columns)

    def latex_table(self) -> Table:
        """Return the table for a paper, in which a mark shows which differences are significant.

        A metric that all tasks share is in the caption, and has no column.
        """
        columns = ("task", "metric", "items", self.first, self.other, "difference", "p")
        rows: list[list[str]] = []
        for row in [*self.rows, *self.other_metrics]:
            task, metric, items, first, other, difference, p, *_ = row.cells()
            mark = SIGNIFICANT if row.is_detected else ""
            rows.append([task, metric, items, first, f"{other}{mark}", difference, p])
        table = Table(f"{self.other} against {self.first}", columns, rows, right={2, 3, 4, 6})
        return table if self.common_metric is None else table.without(["metric"])

    @property
    def common_metric(self) -> str | None:
        """The metric of all tasks; None if they differ, or if tasks are compared by several."""
        metrics = {task.metric for task in [*self.tasks, *self.other_metrics]}
        return metrics.pop() if len(metrics) == 1 else None

    def __repr__(self) -> str:
        """Return what `llmfoundry-lite compare` prints."""
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as capture:
            print_comparison([self], console)
        return capture.get().rstrip()


def too_few(metric: str) -> str:
    """Return the verdict where no test was made, because there are too few items, or documents of a held-out text."""
    return "too few documents" if metric == BITS else "too few items"


def format_number(number: float, digits: int, sign: str = "") -> str:
    """Format a number with some decimals. One that is rounded to zero has no sign: "0.000" and not "-0.000"."""
    text = f"{number:{sign}.{digits}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def format_p(p: float) -> str:
    """Format a p-value: "<.001", three decimals below 0.1, two above."""
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def print_comparison(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print the table, the sentence and the notes of each comparison, and a legend for all of them."""
    for comparison in comparisons:
        comparison.table().print_blocks(console)
        console.print()
        if comparison.sentence:
            console.print(Text(printable(comparison.sentence), style="bold"))
        print_notes(console, comparison.notes)
        console.print()
    console.print(Text(legend(comparisons), style="dim"))


def legend(comparisons: Sequence[Comparison]) -> str:
    """Return the text below the tables: which tests were made, and for how many tests each p-value is corrected.

    `comparisons` are all comparisons that are shown together. The p-values of tasks by their main metric, of tasks by
    their other metrics, and of means are three families, each of which is corrected for its own number of tests.
    """
    num_tests = sum(len(comparison.tasks) for comparison in comparisons)
    num_other_tests = sum(len(comparison.other_metrics) for comparison in comparisons)
    num_means = sum(comparison.mean is not None for comparison in comparisons)

    corrected_for = f"{num_tests} test{'' if num_tests == 1 else 's'}"
    if num_other_tests:
        corrected_for += f", and for {num_other_tests} by the other metrics"
    num_composites = sum(len(comparison.composites) for comparison in comparisons)
    if num_composites:
        corrected_for += f"; categories and averages of the gauntlet apart, {num_composites} tests"
    if num_means == 1:
        corrected_for += "; the mean's is one test more, not corrected"
    elif num_means > 1:
        corrected_for += f"; the means' for {num_means} tests"
    return (
        "p: score test, paired (McNemar's for a task), and for bits per byte a studentised bootstrap over documents or "
        f"items; corrected for {corrected_for} (Holm). Intervals are of the same tests, at the level that decides, "
        "0.05 over the number of tests left, so that they exclude 0 exactly where a difference is found. The column "
        "`confidence` has 1 less that level."
    )


def write_comparison(results: Sequence[Results], comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Write compare.md, .json, .csv and .tex into a folder, which is created if needed, and return their paths.

    The CSV has all numbers with all their digits. The LaTeX has a table for each comparison.

    results: the results of all models, whose facts are written to the JSON.
    comparisons: the comparisons of these results with the first of them.
    """
    folder.mkdir(parents=True, exist_ok=True)

    # The same content as on the console, as Markdown: for each comparison the table, then the sentence and the notes.
    lines: list[str] = []
    for comparison in comparisons:
        table = comparison.table()
        notes = list(comparison.notes)
        if comparison.sentence:
            notes.insert(0, comparison.sentence)
        lines += [f"## {markdown_text(table.title)}", "", *table.markdown(), "", *markdown_list(notes), ""]
    lines += [legend(comparisons), ""]

    # The JSON comes first, because the next comparison recognises by it that the other files may be replaced too.
    markdown_path = folder / "compare.md"
    json_path = folder / "compare.json"
    write_atomically(json_path, mask_urls(json.dumps(_as_json(results, comparisons), indent=1)) + "\n")
    write_atomically(markdown_path, mask_credentials("\n".join(lines)))
    csv_path = folder / "compare.csv"
    write_atomically(csv_path, mask_credentials(table_of_numbers(comparisons).csv()))

    num_tests = sum(len(comparison.tasks) for comparison in comparisons)
    latex_lines: list[str] = []
    for comparison in comparisons:
        latex_lines += [*comparison.latex_table().latex(caption_of(comparison, num_tests)), ""]
    latex_path = folder / "compare.tex"
    write_atomically(latex_path, mask_credentials("\n".join(latex_lines)))
    return [markdown_path, json_path, csv_path, latex_path]


def caption_of(comparison: Comparison, num_tests: int) -> str:
    """Return the caption of a comparison's table for a paper. `num_tests` is the number of tests of tasks."""
    noun = "test" if num_tests == 1 else "tests"
    by_metric = "" if comparison.common_metric is None else f", by {comparison.common_metric}"
    first, other = comparison.first, comparison.other
    on_gauntlet = ""
    if comparison.composites:
        on_gauntlet = " Scores of the gauntlet are shares of what is left above guessing."
    not_tested = ""
    if not all(row.is_tested for row in [*comparison.rows, *comparison.other_metrics]):
        not_tested = f" {CAPTION_ON_NOT_TESTED}"
    return (
        f"{other} against {first} on the same items{by_metric}. The difference is {other} minus {first}, with its "
        f"interval at the level that decides. {SIGNIFICANT} marks differences that are significant: p < {LEVEL} after "
        f"Holm's correction, for {num_tests} {noun} of tasks.{on_gauntlet}{not_tested}"
        f"{caption_on_trials(comparison.trials)}"
    )


CAPTION_ON_NOT_TESTED = (
    f"Where p is {NOT_TESTED}, there are too few items or documents for a test, and the difference shows nothing."
)
"""Sentence in the caption of a table for a paper that has a difference without a test."""
NUMBERS = (
    "metric",
    "n",
    "first",
    "other",
    "difference",
    "low",
    "high",
    "confidence",
    "error",
    "p",
    "p_corrected",
    "wins",
    "losses",
    "ties",
    "verdict",
)
"""Columns of a comparison's CSV after the names, which are attributes of `MetricComparison`."""


def table_of_numbers(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with a row for each metric of each comparison, whose numbers have all their digits."""
    rows: list[list[str]] = []
    for comparison in comparisons:
        for row in [*comparison.rows, *comparison.other_metrics]:
            facts = row.as_json()
            numbers = [facts[name] for name in NUMBERS]
            cells = ["" if number is None else str(number) for number in numbers]
            rows.append([comparison.first, comparison.other, row.task, *cells])
    return Table("", ["first_model", "other_model", "task", *NUMBERS], rows)


def _as_json(results: Sequence[Results], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the content of compare.json.

    It has the facts of each model (`results`), its comparison with the first (`comparisons`), and the constants by
    which these were computed (`method`).
    """
    comparisons_json: list[dict[str, Any]] = []
    for comparison in comparisons:
        comparisons_json.append(
            {
                "first": comparison.first,
                "other": comparison.other,
                "mean": None if comparison.mean is None else comparison.mean.as_json(),
                "tasks": [task.as_json() for task in comparison.tasks],
                "other_metrics": [metric.as_json() for metric in comparison.other_metrics],
                "composites": [composite.as_json() for composite in comparison.composites],
                "notes": comparison.notes,
            }
        )

    keys_of_facts = [key for key in RESULT if key != "suite"]
    results_json = {result.name: {key: getattr(result, key) for key in keys_of_facts} for result in results}
    return {
        "results": results_json,
        "comparisons": comparisons_json,
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": LEVEL, "correction": "Holm"},
    }


def panels(comparisons: Sequence[Comparison]) -> dict[str, dict[str, dict[str, DifferencePoint]]]:
    """Return the data of the comparison's figure: title of a panel -> task -> model -> point.

    Accuracies and bits per byte have a panel each, because they have different units, and the better side differs. A
    difference without an interval becomes a point whose ends are the difference itself.
    """
    points: dict[str, dict[str, dict[str, DifferencePoint]]] = {}
    for comparison in comparisons:
        for row in comparison.rows:
            if row.metric in BITS_METRICS:
                title = "difference in bits per byte (left is better)"
            else:
                title = "difference in accuracy (right is better)"
            low = row.difference if row.low is None else row.low
            high = row.difference if row.high is None else row.high
            point = DifferencePoint(
                difference=row.difference, low=low, high=high, is_detected=row.is_detected, is_tested=row.is_tested
            )
            points.setdefault(title, {}).setdefault(row.task, {})[comparison.other] = point
    return {title: points[title] for title in sorted(points)}
