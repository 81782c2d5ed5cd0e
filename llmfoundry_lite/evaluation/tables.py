"""Tables of scores with a row for each model: results by task, and LLM Foundry's Eval Gauntlet."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.eval_schema import Benchmark, GauntletConfig
from llmfoundry_lite.data.spelling import describe_lost_text
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.records import Record, cut_at, error_of_sum, is_accuracy, lost_share, score_of
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list

WARNING = "warning: "
ODD = {
    "num_ties": "{} with a tie for the best, where the first counts",
    "num_duplicates": "{} that repeat a choice",
    "num_repeated": "{} that repeat an earlier item",
    "num_trimmed": "{} with a context cut to fit the model",
    "num_missing_examples": "{} with fewer examples than asked for, as their category has no more",
}

Cell = tuple[str, str]
"""A number and its standard error, as text; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Numbers of models with notes on them."""

    title: str
    columns: dict[str, str]  # name of a column -> its heading, which may have several lines
    rows: list[tuple[str, list[Cell]]]  # (model, its numbers)
    notes: list[str]

    def table(self, headings: Sequence[str], between: str) -> Table:
        """Return a table with the text `between` between each number and its error."""
        rows = [[model, *(between.join(filter(None, cell)) for cell in cells)] for model, cells in self.rows]
        return Table(self.title, ["model", *headings], rows)

    def print(self, console: Console) -> None:
        if self.columns:
            self.table([*self.columns.values()], "\n±").print_blocks(console)
        print_notes(console, self.notes)

    def write(self, path: Path) -> list[Path]:
        """Write PATH.md and PATH.csv with the same numbers."""
        lines = self.table([heading.replace("\n", " ") for heading in self.columns.values()], " ± ").markdown()
        notes = ["", *markdown_list(self.notes)] if self.notes else []
        columns = ["model", *(part for name in self.columns for part in (name, f"{name} stderr"))]
        rows = [[model, *(part for cell in cells for part in cell)] for model, cells in self.rows]
        markdown, numbers = path.with_suffix(".md"), path.with_suffix(".csv")
        write_atomically(markdown, "\n".join([*lines, *notes, ""]))
        write_atomically(numbers, Table(self.title, columns, rows).csv())
        return [markdown, numbers]


def print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        style = "yellow" if note.startswith(WARNING) else "dim"
        console.print(Padding(Text(printable(note), style=style), (0, 0, 0, 2)))


def cell_of(number: float | None, error: float | None = None) -> Cell:
    return "" if number is None else f"{number:.3f}", "" if error is None else f"{error:.3f}"


def only_of(some: Sequence[str], num_all: int) -> str:
    """Name the models that a note is about; empty if it is about all."""
    return "" if len(some) == num_all else f" ({', '.join(some)})"


# ---------------------------------------------------------------------------------------------------------- results


def results_table(all_results: Sequence[Results]) -> Scores:
    """Return every task that any model has, in order, and the average."""
    # reversed: the first model's record wins
    records = {name: record for results in reversed(all_results) for name, record in results.tasks.items()}
    names = list(dict.fromkeys(task for results in all_results for task in results.tasks))
    suite, rows = all_results[0].suite, []
    has_average = any(results.average is not None for results in all_results)
    for results in all_results:
        cells = [cell(results.tasks[name]) if name in results.tasks else ("", "") for name in names]
        error = None if results.average is None else average_error(results.tasks, results.averaged)
        rows.append((results.model, [*cells, *([cell_of(results.average, error)] if has_average else [])]))
    return Scores(
        title=suite if all_results[0].average is None else f"{suite}, accuracy ± standard error",
        columns={name: _heading(name, records[name]) for name in names}
        | ({"average": "average"} if has_average else {}),
        rows=rows,
        notes=notes(all_results),
    )


def print_results(all_results: Sequence[Results], console: Console) -> None:
    """Print the table. The last row has the scores of guessing."""
    table, tasks = results_table(all_results), [item for r in reversed(all_results) for item in r.tasks.items()]
    chances = {name: f"{record['chance']:.3f}" for name, record in tasks if "chance" in record}
    row = ("chance", [(chances.get(name, ""), "") for name in table.columns])
    replace(table, rows=[*table.rows, row] if chances else table.rows).print(console)


def _heading(name: str, record: Record) -> str:
    """Return the task, its number of examples, and the metric unless it is an accuracy."""
    label, _, shots = name.rpartition("/")
    return "\n".join(filter(None, (label, shots, "" if is_accuracy(record) else record["metric"].replace("_", " "))))


def cell(record: Record) -> Cell:
    number, error = score_of(record)
    if is_accuracy(record) and (record.get("num_clusters") or record["n"]) == 1:
        error = None  # the error of one item is 0 and means nothing
    return cell_of(number, error)


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Return the standard error of the mean of tasks. Tasks on the same data ask the same items."""
    errors = [(tasks[name]["data_fingerprint"], score_of(tasks[name])[1] or 0.0) for name in names]
    return error_of_sum(errors) / len(names)


def notes(all_results: Sequence[Results]) -> list[str]:
    """Return notes on irregularities, because of which numbers may mislead."""
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
    kinds = {is_accuracy(record) for results in all_results for record in results.tasks.values()}
    if len(kinds) == 2:
        found.append("the average is of the accuracies")
    if len({tuple(sorted(results.averaged)) for results in all_results}) > 1:
        found.append("warning: not all models have all tasks; the averages are over different ones")
    return found


def _oddities(record: Record) -> Iterator[str]:
    n = f"of {record['n']:,} items"
    for key, text in ODD.items():
        if count := record.get(key):
            yield f"{text.format(f'{count:,}')}, {n}"
    if lost_share(record):
        yield f"bits per byte leave out text that its tokenizer loses: {describe_lost_text(record['lost_text'])}"
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
    missing: dict[str, list[str]]  # category that is left out -> the tasks that it lacks


class _Part(NamedTuple):
    weight: float  # weights of a category's parts add up to 1
    score: float
    error: float
    data: str


def run_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> Gauntlet:
    """Score a model's results: `tasks` has `arc_easy/3-shot` -> its record.

    A task's score is its accuracy above chance, relative to the highest one possible: (a - b) / (1 - b). A
    category is the weighted mean of its tasks; an average is the mean of its categories. As in LLM Foundry, a category
    that lacks a task is left out, and so is an average without categories.
    """
    parts: dict[str, list[_Part]] = {}
    missing: dict[str, list[str]] = {}
    for category in config.categories:
        found = {benchmark.task: tasks.get(benchmark.task) for benchmark in category.benchmarks}
        absent = [name for name, one in found.items() if one is None or not is_accuracy(one)]
        if absent:
            missing[category.name] = absent
            continue
        some = [_part(config, one, tasks[one.task]) for one in category.benchmarks]
        total = sum(part.weight for part in some)
        parts[category.name] = [part._replace(weight=part.weight / total) for part in some]
    scores = {}
    for name, categories in ({name: [name] for name in parts} | averages_of(config)).items():
        if there := [parts[category] for category in parts if category in categories]:
            some = [part for found in there for part in found]
            error = error_of_sum((part.data, part.weight * part.error) for part in some)
            score = sum(part.weight * part.score for part in some)
            scores[name] = Composite(score / len(there), error / len(there))
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
    """Return the categories and averages that any model has. A note names each category that is left out."""
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
