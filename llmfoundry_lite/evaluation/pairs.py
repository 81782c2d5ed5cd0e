"""Comparisons as data: two models by one number, and one model with the first by all. Output to console and files."""

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.errors import mask_credentials, mask_urls, printable
from llmfoundry_lite.evaluation.records import BITS, RESULT, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import LEVEL, NUM_RESAMPLES, SEED, Z_POWER, Counts, z_of
from llmfoundry_lite.evaluation.tables import print_notes
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list, markdown_text

Point = tuple[float, float, float, bool]
"""A difference, the low and high end of its interval, and whether it is detected."""


@dataclass(slots=True, kw_only=True)
class ComparedNumber:
    """One number of two models over the items that both were asked; differences are `other` less `first`."""

    task: str
    metric: str
    n: int  # items; documents or windows of text for bits per byte
    first: float
    other: float
    difference: float
    low: float | None = None  # interval at `confidence`; None where too few items are independent
    high: float | None = None
    confidence: float = 0.95
    wins: int  # items on which `other` did better
    losses: int
    ties: int
    p: float
    test: str
    p_corrected: float = math.nan
    error: float  # standard error of the difference
    interval: Callable[[float], tuple[float, float] | None] = field(repr=False)  # for a level, such as 0.05 for 95 %
    counts: Counts | None = field(default=None, repr=False)  # of accuracies
    is_detected: bool = False
    lost_text: float = 0.0  # most that text could add, in bits per byte, which one tokenizer does not spell
    is_comparable: bool = True

    @property
    def detectable(self) -> float | None:
        """Smallest difference that this many items detect with 80 % power at `confidence`."""
        return (z_of(1 - self.confidence) + Z_POWER) * self.error or None

    def decide(self, p_corrected: float, level: float) -> None:
        """Set the corrected p, and the interval at its level, once the number of tests is known."""
        self.p_corrected, self.confidence, self.is_detected = p_corrected, 1 - level, self.p < level
        if (found := self.interval(level)) is not None:
            self.low, self.high = found
        low, high = found or (self.difference, self.difference)
        # Lost text must not be able to undo a verdict: to move the nearer end across 0, or past what was seen.
        room = min(abs(low), abs(high)) if self.is_detected else max(abs(self.difference), (high - low) / 2)
        self.is_comparable = not self.lost_text or self.lost_text < room
        self.is_detected = self.is_detected and self.is_comparable

    @property
    def is_better(self) -> bool:
        """Whether `other` has the better number."""
        return (self.difference < 0) == (self.metric == BITS)

    @property
    def margin(self) -> str:
        """The difference without its sign, as text."""
        text = self._shown(abs(self.difference))
        return text if self.low is None or self.high is None else f"{text} ± {self._shown((self.high - self.low) / 2)}"

    @property
    def verdict(self) -> str:
        if not self.is_comparable:
            return "not comparable: text is lost"
        if self.is_detected:
            return f"{'better' if self.is_better else 'worse'} by {self.margin}"
        return "the same on every item" if self.ties == self.n else "no detectable difference"

    def _shown(self, number: float, sign: str = "") -> str:
        return f"{number:{sign}.{4 if self.metric == BITS else 3}f}"

    def cells(self) -> list[str]:
        """Return this number's row in the table of a pair."""
        difference = self._shown(self.difference, "+")
        if self.low is not None and self.high is not None:
            difference += f" [{self._shown(self.low, '+')}, {self._shown(self.high, '+')}]"
        return [
            *(self.task, "" if self.metric == "mean" else self.metric, f"{self.n:,}"),
            *(self._shown(self.first), self._shown(self.other), difference, p_text(self.p_corrected), self.verdict),
            *(f"{self.wins:,}/{self.losses:,}/{self.ties:,}", f"{100 * self.confidence:.4g} %"),
        ]

    def as_json(self) -> Record:
        known = {key: value for key, value in asdict(self).items() if key not in ("interval", "counts")}
        return {**known, "detectable": self.detectable, "verdict": self.verdict}


@dataclass(slots=True, kw_only=True, repr=False)
class Comparison:
    """Comparison of one result with the first."""

    first: str
    other: str
    tasks: list[ComparedNumber]  # each by its main metric
    mean: ComparedNumber | None  # the mean of the accuracies, each task counting the same
    more: list[ComparedNumber]  # the other metrics, if they were asked for
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[ComparedNumber]:
        """The tasks, and the mean if there is one."""
        return [*self.tasks, *filter(None, [self.mean])]

    @property
    def sentence(self) -> str:
        if self.mean is None:
            return ""
        where = f"on the {self.mean.task} (p {p_text(self.mean.p_corrected)})"
        if not self.mean.is_detected:
            if self.mean.detectable is None:
                return f"{self.other} and {self.first}: the same answers {where}"
            least = f"one of {self.mean.detectable:.3f} would be found four times in five"
            return f"{self.other} and {self.first}: no detectable difference {where}; {least}"
        direction = "better" if self.mean.is_better else "worse"
        return f"{self.other} is {direction} than {self.first} by {self.mean.margin} {where}"

    def table(self) -> Table:
        columns = (
            "task",
            "metric",
            "items",
            self.first,
            self.other,
            *("difference", "p", "verdict", "won/lost/tied", "at"),
        )
        rows = [paired.cells() for paired in [*self.rows, *self.more]]
        return Table(f"{self.other} against {self.first}", columns, rows, right={2, 3, 4, 6, 8, 9})

    def __repr__(self) -> str:
        """Return the table that `llmfoundry-lite compare` prints."""
        console = Console(file=io.StringIO(), width=100)
        with console.capture() as capture:
            print_comparison([self], console)
        return capture.get().rstrip()


def p_text(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def print_comparison(pairs: Sequence[Comparison], console: Console) -> None:
    for pair in pairs:
        pair.table().print_blocks(console)
        console.print()
        if pair.sentence:
            console.print(Text(printable(pair.sentence), style="bold"))
        print_notes(console, pair.notes)
        console.print()
    console.print(Text(legend(pairs), style="dim"))


def legend(pairs: Sequence[Comparison]) -> str:
    num, num_more = sum(len(pair.tasks) for pair in pairs), sum(len(pair.more) for pair in pairs)
    more = f", and for {num_more} by the other metrics" if num_more else ""
    means = sum(pair.mean is not None for pair in pairs)
    if means:
        more += "; the mean's is one test more, not corrected" if means == 1 else f"; the means' for {means} tests"
    return (
        f"p: score test, paired (McNemar's for a task), and for bits per byte a studentised bootstrap over documents; "
        f"corrected for {num} test{'' if num == 1 else 's'}{more} (Holm). Intervals are of the same tests, at the "
        "level that decides, 0.05 over the number of tests left, so that they exclude 0 exactly where a difference "
        "is found."
    )


def write_comparison(results: Sequence[Results], pairs: Sequence[Comparison], folder: Path) -> list[Path]:
    """Write compare.md and compare.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = list[str]()
    for pair in pairs:
        table, notes = pair.table(), [*filter(None, [pair.sentence]), *pair.notes]
        lines += [f"## {markdown_text(table.title)}", "", *table.markdown(), "", *markdown_list(notes), ""]
    markdown, facts = folder / "compare.md", folder / "compare.json"
    # The record first: by it the next comparison knows that the other files are its own.
    write_atomically(facts, mask_urls(json.dumps(_as_json(results, pairs), indent=1)) + "\n")
    write_atomically(markdown, mask_credentials("\n".join([*lines, legend(pairs), ""])))
    return [markdown, facts]


def _as_json(results: Sequence[Results], pairs: Sequence[Comparison]) -> dict[str, Any]:
    keys = [key for key in RESULT if key != "suite"]
    return {
        "results": {result.name: {key: getattr(result, key) for key in keys} for result in results},
        "comparisons": [
            {
                "first": pair.first,
                "other": pair.other,
                "mean": pair.mean and pair.mean.as_json(),
                "tasks": [paired.as_json() for paired in pair.tasks],
                "other_metrics": [paired.as_json() for paired in pair.more],
                "notes": pair.notes,
            }
            for pair in pairs
        ],
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": LEVEL, "correction": "Holm"},
    }


def panels(pairs: Sequence[Comparison]) -> dict[str, dict[str, dict[str, Point]]]:
    """Return the data of a figure: measure -> task -> model -> (difference, low, high, whether detected)."""
    found: dict[str, dict[str, dict[str, Point]]] = {}
    for pair in pairs:
        for paired in pair.rows:
            better = "left is better" if paired.metric == BITS else "right is better"
            title = f"difference in {'bits per byte' if paired.metric == BITS else 'accuracy'} ({better})"
            low, high = (paired.difference if end is None else end for end in (paired.low, paired.high))
            point = (paired.difference, low, high, paired.is_detected)
            found.setdefault(title, {}).setdefault(paired.task, {})[pair.other] = point
    return {title: found[title] for title in sorted(found)}
