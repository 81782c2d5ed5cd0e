"""Tables: results by task, LLM Foundry's Eval Gauntlet, and comparisons.

A table of scores has a row for each model, that of a comparison one for each task.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.eval_schema import Benchmark, GauntletConfig
from llmfoundry_lite.data.spelling import describe_loss
from llmfoundry_lite.errors import mask_credentials, printable
from llmfoundry_lite.evaluation.compare import SEED, SIGNIFICANT, Pair, Paired, p_text
from llmfoundry_lite.evaluation.records import (
    ACCURACIES,
    BITS,
    RESULT,
    Record,
    cut_at,
    error_of_sum,
    lost_share,
    score_of,
)
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, NUM_RESAMPLES
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.report.tables import Table, markdown_list, markdown_text

WARNING = "warning: "
ODD = {
    "num_ties": "{} with a tie for the best, where the first counts",
    "num_duplicates": "{} that repeat a choice",
    "num_repeated": "{} that repeat an earlier item",
    "num_trimmed": "{} with a context cut to fit the model",
    "num_missing_examples": "{} with fewer examples than asked for, as their category has no more",
}

Point = tuple[float, float, float, bool]
"""A difference, its low and high end, and whether it is detected."""
Cell = tuple[str, str]
"""A number and its standard error, as text; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Models and their scores, with notes below."""

    title: str
    columns: dict[str, str]  # name of a column -> its heading, which may have several lines
    rows: list[tuple[str, list[Cell]]]  # (model, its scores)
    notes: list[str]

    def print(self, console: Console) -> None:
        rows = [[model, *("\n±".join(filter(None, cell)) for cell in cells)] for model, cells in self.rows]
        if self.columns:
            Table(self.title, ["model", *self.columns.values()], rows).print_blocks(console)
        print_notes(console, self.notes)

    def markdown(self) -> str:
        headings = [heading.replace("\n", " ") for heading in self.columns.values()]
        rows = [[model, *(" ± ".join(filter(None, cell)) for cell in cells)] for model, cells in self.rows]
        lines = Table(self.title, ["model", *headings], rows).markdown()
        return "\n".join([*lines, *(["", *markdown_list(self.notes)] if self.notes else []), ""])

    def write(self, path: Path) -> list[Path]:
        """Write PATH.md and PATH.csv, with the same numbers."""
        columns = ["model", *(part for name in self.columns for part in (name, f"{name} stderr"))]
        rows = [[model, *(part for cell in cells for part in cell)] for model, cells in self.rows]
        written = {".md": self.markdown(), ".csv": Table(self.title, columns, rows).csv()}
        for suffix, content in written.items():
            write_atomically(path.with_suffix(suffix), content)
        return [path.with_suffix(suffix) for suffix in written]


def print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        style = "yellow" if note.startswith(WARNING) else "dim"
        console.print(Padding(Text(printable(note), style=style), (0, 0, 0, 2)))


def cell_of(number: float | None, error: float | None = None) -> Cell:
    return "" if number is None else f"{number:.3f}", "" if error is None else f"{error:.3f}"


def only_of(some: Sequence[str], num_all: int) -> str:
    """Name models, unless a note is of all."""
    return "" if len(some) == num_all else f" ({', '.join(some)})"


# ---------------------------------------------------------------------------------------------------------- results


def results_table(all_results: Sequence[Results]) -> Scores:
    """Return every task that any model has, in order, and the average."""
    records = {name: record for results in reversed(all_results) for name, record in results.tasks.items()}
    names = list(dict.fromkeys(task for results in all_results for task in results.tasks))
    suite, rows = all_results[0].suite, []
    for results in all_results:
        cells = [cell(results.tasks[name]) if name in results.tasks else ("", "") for name in names]
        error = None if results.average is None else average_error(results.tasks, _averaged(results))
        rows.append((results.model, [*cells, cell_of(results.average, error)]))
    return Scores(
        title=suite if all_results[0].average is None else f"{suite}, accuracy ± standard error",
        columns={**{name: _heading(name, records[name]["metric"]) for name in names}, "average": "average"},
        rows=rows,
        notes=notes(all_results),
    )


def print_results(all_results: Sequence[Results], console: Console) -> None:
    """Print the table, with what guessing would score as the last row."""
    table, tasks = results_table(all_results), [item for r in reversed(all_results) for item in r.tasks.items()]
    chances = {name: f"{record['chance']:.3f}" for name, record in tasks if "chance" in record}
    row = ("chance", [(chances.get(name, ""), "") for name in table.columns])
    replace(table, rows=[*table.rows, row] if chances else table.rows).print(console)


def _heading(name: str, metric: str) -> str:
    """Return the task, its examples, and what the number is unless it is an accuracy."""
    label, _, shots = name.rpartition("/")
    return "\n".join(filter(None, (label, shots, "" if metric in ACCURACIES else metric.replace("_", " "))))


def cell(record: Record) -> Cell:
    number, error = score_of(record)
    if record["metric"] in ACCURACIES and (record.get("num_clusters") or record["n"]) == 1:
        error = None  # it is 0, and says nothing
    return cell_of(number, error)


def _averaged(results: Results) -> list[str]:
    return [name for name, record in results.tasks.items() if record["metric"] in ACCURACIES]


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Return the standard error of the mean of tasks; those on the same data ask the same items."""
    errors = [(tasks[name]["data_fingerprint"], score_of(tasks[name])[1] or 0.0) for name in names]
    return error_of_sum(errors) / len(names)


def notes(all_results: Sequence[Results]) -> list[str]:
    """Return what was odd, and why numbers may not be what they seem."""
    tasks_of: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(task for results in all_results for task in results.tasks):
        records = {results.model: results.tasks[name] for results in all_results if name in results.tasks}
        models_of: dict[str, list[str]] = {}
        for model, record in records.items():
            for text in _oddities(record):
                models_of.setdefault(text, []).append(model)
        for text, models in models_of.items():
            tasks_of.setdefault(("", f"{text}{only_of(models, len(records))}"), []).append(name)
        base = next(iter(records))
        asked = {model: record.get("fingerprint") for model, record in records.items()}
        if different := [model for model in records if asked[model] != asked[base]]:
            text = f"{', '.join(different)} not asked the same as {base}; these numbers do not compare"
            tasks_of.setdefault((WARNING, text), []).append(name)
    found = []
    for (begin, text), tasks in tasks_of.items():
        named = ", ".join(tasks) if len(tasks) < 4 else f"{len(tasks)} tasks, {tasks[0]} the first"
        found.append(f"{begin}{named}: {text}")
    if any(record["metric"] not in ACCURACIES for results in all_results for record in results.tasks.values()):
        found.append("the average is of the accuracies")
    if len({tuple(sorted(_averaged(results))) for results in all_results}) > 1:
        found.append("warning: not all models have all tasks; the averages are over different ones")
    return found


def _oddities(record: Record) -> Iterator[str]:
    n = f"of {record['n']:,} items"
    for key, text in ODD.items():
        if count := record.get(key):
            yield f"{text.format(f'{count:,}')}, {n}"
    if lost_share(record):
        yield f"bits per byte leave out text that its tokenizer loses: {describe_loss(record['lost_text'])}"
    for reason, count in (record.get("skipped") or {}).items():
        yield f"{count:,} skipped ({reason}); {record['n']:,} asked"
    if num_clusters := record.get("num_clusters"):
        yield f"{record['n']:,} items in {num_clusters:,} clusters, which its standard error counts"
    if 1 < record.get("num_documents", 0) < MIN_DOCUMENTS:
        yield f"a standard error from {record['num_documents']} documents alone is rough"
    if limit := cut_at(record):
        yield f"only the first {limit:,} items (limit): a try, not a result"


# --------------------------------------------------------------------------------------------------------- gauntlet


class Composite(NamedTuple):
    score: float
    error: float


class Gauntlet(NamedTuple):
    scores: dict[str, Composite]  # categories, then averages
    missing: dict[str, list[str]]  # category -> the tasks for want of which it is left out


class _Part(NamedTuple):
    weight: float
    score: float
    error: float
    data: str


def run_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> Gauntlet:
    """Score a model's results: `tasks` has `arc_easy/3-shot` -> its record.

    A task's score is its accuracy, less what chance gives, over what is left above chance: (a - b) / (1 - b). A
    category is the weighted mean of its tasks; an average is the mean of its categories. As in LLM Foundry, a category
    that lacks a task is left out, and so is an average without categories.
    """
    parts: dict[str, list[_Part]] = {}
    missing: dict[str, list[str]] = {}
    for category in config.categories:
        found = {benchmark.task: tasks.get(benchmark.task) for benchmark in category.benchmarks}
        absent = [name for name, one in found.items() if one is None or one["metric"] not in ACCURACIES]
        if absent:
            missing[category.name] = absent
        else:
            parts[category.name] = [_part(config, one, tasks[one.task]) for one in category.benchmarks]
    scores = {}
    for name, categories in ({name: [name] for name in parts} | averages_of(config)).items():
        there = [parts[category] for category in parts if category in categories]
        totals = [len(there) * sum(part.weight for part in found) for found in there]
        of_all = [(p, p.weight / total) for found, total in zip(there, totals, strict=True) for p in found]
        if there:
            error = error_of_sum([(part.data, weight * part.error) for part, weight in of_all])
            scores[name] = Composite(sum(weight * part.score for part, weight in of_all), error)
    return Gauntlet(scores, missing)


def averages_of(config: GauntletConfig) -> dict[str, list[str]]:
    return config.averages or {"default_average": [category.name for category in config.categories]}


def _part(config: GauntletConfig, benchmark: Benchmark, record: Record) -> _Part:
    chance = benchmark.random_baseline if config.subtract_random_baseline else 0.0
    scale = 1.0 / (1.0 - benchmark.random_baseline) if config.rescale_accuracy else 1.0
    score, error = score_of(record)
    weight = {"EQUAL": 1.0, "SAMPLE_SZ": record["n"], "LOG_SAMPLE_SZ": max(math.log2(record["n"]), 1.0)}
    return _Part(weight[config.weighting], (score - chance) * scale, (error or 0.0) * scale, record["data_fingerprint"])


def gauntlet_table(config: GauntletConfig, all_results: Sequence[Results]) -> Scores:
    """Return the categories and averages that any model has; a note names each category that is left out."""
    found = {results.model: run_gauntlet(config, results.tasks) for results in all_results}
    names = [*(category.name for category in config.categories), *averages_of(config)]
    names = [name for name in names if any(name in gauntlet.scores for gauntlet in found.values())]
    models_of: dict[str, list[str]] = {}
    for model, gauntlet in found.items():
        for category, tasks in gauntlet.missing.items():
            text = f"eval gauntlet: {category} is left out: no accuracy of {', '.join(tasks)}"
            models_of.setdefault(text, []).append(model)
    return Scores(
        title="eval gauntlet: share of what is left above chance ± standard error",
        columns={name: name.replace("_", "\n") for name in names},
        rows=[(m, [cell_of(*gauntlet.scores.get(name, (None,))) for name in names]) for m, gauntlet in found.items()],
        notes=[f"{text}{only_of(models, len(found))}" for text, models in models_of.items()],
    )


def write_tables(all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None = None) -> list[Path]:
    """Write table.md and table.csv; with a gauntlet its gauntlet.md and gauntlet.csv too."""
    folder.mkdir(parents=True, exist_ok=True)
    written = results_table(all_results).write(folder / "table")
    return written + (gauntlet_table(gauntlet, all_results).write(folder / "gauntlet") if gauntlet else [])


# ------------------------------------------------------------------------------------------------------ comparisons


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    for pair in pairs:
        for title, rows in ((f"{pair.other} against {pair.first}", pair.rows), ("by the other metrics", pair.more)):
            if rows:
                names = map(fold, (pair.first, pair.other))
                columns = ["task", "items", *names, " difference [interval]", "p\nwon/lost"]
                console.print(Text(printable(title), style="italic"))
                table = Table(title, columns, [_console_row(paired, pair) for paired in rows], right={1, 2, 3, 5})
                table.print(console, unbroken={4})
                console.print()
        if pair.sentence:
            console.print(Text(printable(pair.sentence), style="bold"))
        print_notes(console, pair.notes)
        console.print()
    console.print(Text(legend(pairs), style="dim"))


def text_of(pairs: Sequence[Pair]) -> str:
    """Return what `print_comparison` prints, without colours."""
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        print_comparison(pairs, console)
    return capture.get().rstrip()


def fold(name: str) -> str:
    """Break a name into lines of 9 characters or a little more, after its marks: never within a word of up to 16."""
    lines = [""]
    for part in re.findall(r"[^/_.:-]{1,16}[/_.:-]*|[/_.:-]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > 9:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _console_row(paired: Paired, pair: Pair) -> list[str]:
    name, _, shots = paired.task.rpartition("/")
    is_plain = paired is pair.mean or (paired in pair.tasks and paired.metric in ("acc_per_token", "acc"))
    under = filter(None, (shots if name else "", "" if is_plain else paired.metric.replace("_", " ")))
    return [
        "\n".join((name or paired.task, *under)),
        f"{paired.n:,}",
        *_numbers(paired),
        f" {_difference(paired)}\n {paired.verdict}",
        f"{p_text(paired.p_corrected)}\n{paired.wins:,}/{paired.losses:,}",
    ]


def _numbers(paired: Paired) -> list[str]:
    return [f"{number:.{paired.digits}f}" for number in (paired.first, paired.other)]


def _difference(paired: Paired) -> str:
    text = f"{paired.difference:+.{paired.digits}f}"
    if paired.low is None or paired.high is None:
        return text
    return f"{text} [{paired.low:+.{paired.digits}f}, {paired.high:+.{paired.digits}f}]"


def legend(pairs: Sequence[Pair]) -> str:
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


def write_comparison(results: Sequence[Results], pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Write compare.md and compare.json."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = list[str]()
    for pair in pairs:
        title, measured = f"{pair.other} against {pair.first}", ["difference", "at", "won/lost/tied", "p", "verdict"]
        columns = ["task", "metric", "items", pair.first, pair.other, *measured]
        table = Table(title, columns, [_markdown_row(paired) for paired in [*pair.rows, *pair.more]])
        notes = [*filter(None, (pair.sentence, *pair.notes))]
        lines += [f"## {markdown_text(title)}", "", *table.markdown(), "", *markdown_list(notes), ""]
    lines += [legend(pairs), ""]
    markdown, facts = folder / "compare.md", folder / "compare.json"
    markdown.write_text(mask_credentials("\n".join(lines)))
    facts.write_text(mask_credentials(json.dumps(_as_json(results, pairs), indent=1)) + "\n")
    return [markdown, facts]


def _markdown_row(paired: Paired) -> list[str]:
    return [
        paired.task,
        "" if paired.metric == "mean" else paired.metric,
        f"{paired.n:,}",
        *_numbers(paired),
        _difference(paired),
        f"{100 * paired.confidence:.4g} %",
        f"{paired.wins:,}/{paired.losses:,}/{paired.ties:,}",
        p_text(paired.p_corrected),
        paired.verdict,
    ]


def _as_json(results: Sequence[Results], pairs: Sequence[Pair]) -> Record:
    def as_record(paired: Paired) -> Record:
        known = {key: value for key, value in asdict(paired).items() if key not in ("interval", "counts")}
        return {**known, "detectable": paired.detectable, "verdict": paired.verdict}

    keys = [key for key in RESULT if key != "suite"]
    return {
        "results": {result.name: {key: getattr(result, key) for key in keys} for result in results},
        "comparisons": [
            {
                "first": pair.first,
                "other": pair.other,
                "mean": pair.mean and as_record(pair.mean),
                "tasks": [as_record(paired) for paired in pair.tasks],
                "other_metrics": [as_record(paired) for paired in pair.more],
                "notes": pair.notes,
            }
            for pair in pairs
        ],
        "method": {"num_resamples": NUM_RESAMPLES, "seed": SEED, "level": SIGNIFICANT, "correction": "Holm"},
    }


def panels(pairs: Sequence[Pair]) -> dict[str, dict[str, dict[str, Point]]]:
    """Return what a figure shows: what is measured -> task -> model -> (difference, low, high, whether detected)."""
    found: dict[str, dict[str, dict[str, Point]]] = {}
    for pair in pairs:
        for paired in pair.rows:
            better = "left is better" if paired.metric == BITS else "right is better"
            title = f"difference in {'bits per byte' if paired.metric == BITS else 'accuracy'} ({better})"
            low, high = (paired.difference if end is None else end for end in (paired.low, paired.high))
            point = (paired.difference, low, high, paired.is_detected)
            found.setdefault(title, {}).setdefault(paired.task, {})[pair.other] = point
    return {title: found[title] for title in sorted(found)}
