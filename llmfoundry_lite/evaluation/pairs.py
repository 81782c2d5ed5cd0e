"""Comparisons as data, and their output: to the console, as Markdown and JSON, and as points of a figure.

`compare.py` computes them. A `Comparison` is one model against the first; a `MetricComparison` is one of its numbers.
"""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.errors import mask_credentials, mask_urls, printable
from llmfoundry_lite.evaluation.records import BITS, RESULT, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import LEVEL, NUM_RESAMPLES, SEED, Z_POWER, Counts, z_of
from llmfoundry_lite.evaluation.tables import print_notes
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list, markdown_text


class FigurePoint(NamedTuple):
    """A point of the comparison's figure: a difference and its interval."""

    difference: float
    low: float
    high: float
    is_detected: bool


@dataclass(slots=True, kw_only=True)
class MetricComparison:
    """A metric of two models on a task, over the items that both answered. Differences are `other` less `first`."""

    task: str
    metric: str
    n: int
    """Items. For bits per byte, documents or windows of text."""
    first: float
    other: float
    difference: float
    low: float | None = None
    """Lower end of the interval of the difference at `confidence`; None if there are too few independent items."""
    high: float | None = None
    confidence: float = 0.95
    wins: int
    """Items on which `other` did better."""
    losses: int
    ties: int
    p: float
    test: str
    """Name of the test that gives `p`."""
    p_corrected: float = math.nan
    """`p` corrected for the number of tests, once `decide` knows it."""
    error: float
    """Standard error of the difference."""
    interval: Callable[[float], tuple[float, float] | None] = field(repr=False)
    """Function from a level, such as 0.05 for 95 %, to the interval of the difference."""
    counts: Counts | None = field(default=None, repr=False)
    """Independent units won and lost, for an accuracy; None for bits per byte."""
    is_detected: bool = False
    """The difference is significant, and text that a tokenizer loses cannot explain it."""
    lost_text: float = 0.0
    """The most that text which one of the tokenizers loses could add, in bits per byte."""
    is_comparable: bool = True
    """Lost text is too little to change the verdict."""

    @property
    def detectable(self) -> float | None:
        """Smallest difference that this many items detect with 80 % power at `confidence`; None without any error."""
        level = 1 - self.confidence
        return (z_of(level) + Z_POWER) * self.error or None

    def decide(self, p_corrected: float, level: float) -> None:
        """Set the fields that depend on the number of tests: corrected p-value, interval, and whether it is detected.

        `level` is the level that the uncorrected `p` is compared with, as `significance.holm` returns it.
        """
        self.p_corrected = p_corrected
        self.confidence = 1 - level
        interval = self.interval(level)
        if interval is not None:
            self.low, self.high = interval

        is_significant = self.p < level
        low, high = interval or (self.difference, self.difference)
        if is_significant:
            margin = min(abs(low), abs(high))  # more lost text than this could move the nearer end across 0
        else:
            margin = max(abs(self.difference), (high - low) / 2)  # more than this could hide a larger difference
        self.is_comparable = not self.lost_text or self.lost_text < margin
        self.is_detected = is_significant and self.is_comparable

    @property
    def is_better(self) -> bool:
        """Whether `other` has the better number: less is better for bits per byte."""
        is_less = self.difference < 0
        return is_less if self.metric == BITS else not is_less

    @property
    def margin(self) -> str:
        """The difference without its sign, and half the width of its interval."""
        text = self._format(abs(self.difference))
        if self.low is None or self.high is None:
            return text
        return f"{text} ± {self._format((self.high - self.low) / 2)}"

    @property
    def verdict(self) -> str:
        """Result of the test, in a few words."""
        if not self.is_comparable:
            return "not comparable: text is lost"
        if self.is_detected:
            direction = "better" if self.is_better else "worse"
            return f"{direction} by {self.margin}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"

    def _format(self, number: float, sign: str = "") -> str:
        """Format a value of this metric: 4 decimals for bits per byte, 3 for an accuracy. `sign` "+" shows a plus."""
        digits = 4 if self.metric == BITS else 3
        return f"{number:{sign}.{digits}f}"

    def cells(self) -> list[str]:
        """Return the cells of this metric's row in the comparison's table, in the order of its columns.

        The difference is written with its sign and its interval, such as "+0.150 [+0.103, +0.197]".
        """
        difference = self._format(self.difference, "+")
        if self.low is not None and self.high is not None:
            difference += f" [{self._format(self.low, '+')}, {self._format(self.high, '+')}]"
        return [
            self.task,
            "" if self.metric == "mean" else self.metric,
            f"{self.n:,}",
            self._format(self.first),
            self._format(self.other),
            difference,
            format_p(self.p_corrected),
            self.verdict,
            f"{self.wins:,}/{self.losses:,}/{self.ties:,}",
            f"{100 * self.confidence:.4g} %",
        ]

    def as_json(self) -> Record:
        """Return the fields that JSON can hold, with `detectable` and `verdict`."""
        facts = asdict(self)
        del facts["interval"], facts["counts"]
        return {**facts, "detectable": self.detectable, "verdict": self.verdict}


@dataclass(slots=True, kw_only=True, repr=False)
class Comparison:
    """Comparison of one result with the first."""

    first: str
    other: str
    tasks: list[MetricComparison]
    """Each task by its main metric."""
    mean: MetricComparison | None
    """The mean of the accuracies, in which each task counts the same; None for fewer than two."""
    other_metrics: list[MetricComparison]
    """The tasks by their other metrics, if those were asked for."""
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[MetricComparison]:
        """The tasks, and the mean if there is one."""
        return self.tasks if self.mean is None else [*self.tasks, self.mean]

    @property
    def sentence(self) -> str:
        """The verdict on the mean as a sentence; empty without a mean."""
        mean = self.mean
        if mean is None:
            return ""
        context = f"on the {mean.task} (p {format_p(mean.p_corrected)})"
        if mean.is_detected:
            direction = "better" if mean.is_better else "worse"
            return f"{self.other} is {direction} than {self.first} by {mean.margin} {context}"
        if mean.detectable is None:
            return f"{self.other} and {self.first}: the same answers {context}"
        power = f"one of {mean.detectable:.3f} would be found four times in five"
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
            "at",
        )
        rows = [number.cells() for number in [*self.rows, *self.other_metrics]]
        numeric_columns = {2, 3, 4, 6, 8, 9}
        return Table(f"{self.other} against {self.first}", columns, rows, right=numeric_columns)

    def __repr__(self) -> str:
        """Return what `llmfoundry-lite compare` prints."""
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as capture:
            print_comparison([self], console)
        return capture.get().rstrip()


def format_p(p: float) -> str:
    """Format a p-value: "<.001", three decimals below 0.1, two above."""
    if p < 0.001:
        return "<.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def print_comparison(pairs: Sequence[Comparison], console: Console) -> None:
    """Print the table, the sentence and the notes of each pair, and a legend for all."""
    for pair in pairs:
        pair.table().print_blocks(console)
        console.print()
        if pair.sentence:
            console.print(Text(printable(pair.sentence), style="bold"))
        print_notes(console, pair.notes)
        console.print()
    console.print(Text(legend(pairs), style="dim"))


def legend(pairs: Sequence[Comparison]) -> str:
    """Return the text below the tables: which tests were made, and for how many tests each p is corrected.

    Tasks by their main metric, by their other metrics, and the means are corrected separately.
    """
    num_tests = sum(len(pair.tasks) for pair in pairs)
    num_other_tests = sum(len(pair.other_metrics) for pair in pairs)
    num_means = sum(pair.mean is not None for pair in pairs)
    corrected_for = f"{num_tests} test{'' if num_tests == 1 else 's'}"
    if num_other_tests:
        corrected_for += f", and for {num_other_tests} by the other metrics"
    if num_means == 1:
        corrected_for += "; the mean's is one test more, not corrected"
    elif num_means:
        corrected_for += f"; the means' for {num_means} tests"
    return (
        f"p: score test, paired (McNemar's for a task), and for bits per byte a studentised bootstrap over documents; "
        f"corrected for {corrected_for} (Holm). Intervals are of the same tests, at the level that decides, 0.05 over "
        "the number of tests left, so that they exclude 0 exactly where a difference is found."
    )


def write_comparison(results: Sequence[Results], pairs: Sequence[Comparison], folder: Path) -> list[Path]:
    """Write compare.md and compare.json. Returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for pair in pairs:
        table = pair.table()
        notes = [pair.sentence, *pair.notes] if pair.sentence else pair.notes
        lines += [f"## {markdown_text(table.title)}", "", *table.markdown(), "", *markdown_list(notes), ""]
    lines += [legend(pairs), ""]

    markdown_path = folder / "compare.md"
    json_path = folder / "compare.json"
    # JSON first: by it the next comparison knows that the other files are its own.
    write_atomically(json_path, mask_urls(json.dumps(_as_json(results, pairs), indent=1)) + "\n")
    write_atomically(markdown_path, mask_credentials("\n".join(lines)))
    return [markdown_path, json_path]


def _as_json(results: Sequence[Results], pairs: Sequence[Comparison]) -> dict[str, Any]:
    """Return the content of compare.json: facts of the models, their comparisons, and how these were computed."""
    comparisons = [
        {
            "first": pair.first,
            "other": pair.other,
            "mean": None if pair.mean is None else pair.mean.as_json(),
            "tasks": [number.as_json() for number in pair.tasks],
            "other_metrics": [number.as_json() for number in pair.other_metrics],
            "notes": pair.notes,
        }
        for pair in pairs
    ]
    facts_of_models = [key for key in RESULT if key != "suite"]
    return {
        "results": {result.name: {key: getattr(result, key) for key in facts_of_models} for result in results},
        "comparisons": comparisons,
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": LEVEL, "correction": "Holm"},
    }


def panels(pairs: Sequence[Comparison]) -> dict[str, dict[str, dict[str, FigurePoint]]]:
    """Return the data of the comparison's figure: title of a panel -> task -> model -> point.

    Accuracies and bits per byte have a panel each.
    """
    found: dict[str, dict[str, dict[str, FigurePoint]]] = {}
    for pair in pairs:
        for number in pair.rows:
            if number.metric == BITS:
                title = "difference in bits per byte (left is better)"
            else:
                title = "difference in accuracy (right is better)"
            low = number.difference if number.low is None else number.low
            high = number.difference if number.high is None else number.high
            point = FigurePoint(number.difference, low, high, number.is_detected)
            found.setdefault(title, {}).setdefault(number.task, {})[pair.other] = point
    return {title: found[title] for title in sorted(found)}
