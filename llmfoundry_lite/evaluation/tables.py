"""Tables of scores with a row for each model: results by task, and LLM Foundry's Eval Gauntlet."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.eval_schema import Benchmark, Category, GauntletConfig
from llmfoundry_lite.data.spelling import describe_lost_text
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.records import (
    Record,
    error_of_sum,
    is_accuracy,
    limit_of_trial,
    lost_text_fraction,
    score_of,
)
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list

WARNING = "warning: "
IRREGULAR_ITEMS = {
    "num_ties": "{} with a tie for the best, where the first counts",
    "num_duplicates": "{} that repeat a choice",
    "num_repeated": "{} that repeat an earlier item",
    "num_trimmed": "{} with a context cut to fit the model",
    "num_missing_examples": "{} with fewer examples than asked for, as their category has no more",
}
"""Count in a task's record -> the note about it."""
MAX_NAMED_TASKS = 3
"""A note about more tasks than this names the first and counts them."""


class Cell(NamedTuple):
    """A score and its standard error as text. A missing one is an empty text."""

    number: str = ""
    error: str = ""


class Row(NamedTuple):
    """The numbers of a model, one for each column."""

    model: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Numbers of models, with notes on them."""

    title: str
    columns: dict[str, str]
    """Name of a column -> its heading, which may have several lines."""
    rows: list[Row]
    notes: list[str]

    def table(self, headings: Sequence[str], between: str) -> Table:
        """Return a table with the text `between` between each number and its error."""
        rows: list[list[str]] = []
        for model, cells in self.rows:
            rows.append([model, *(between.join(part for part in cell if part) for cell in cells)])
        return Table(self.title, ["model", *headings], rows)

    def print(self, console: Console) -> None:
        """Print the table, unless it has no columns, and the notes."""
        if self.columns:
            self.table([*self.columns.values()], "\n±").print_blocks(console)
        print_notes(console, self.notes)

    def write(self, path: Path) -> list[Path]:
        """Write PATH.md and PATH.csv with the same numbers. Returns both."""
        headings = [heading.replace("\n", " ") for heading in self.columns.values()]
        lines = self.table(headings, " ± ").markdown()
        if self.notes:
            lines = [*lines, "", *markdown_list(self.notes)]
        markdown_path = path.with_suffix(".md")
        write_atomically(markdown_path, "\n".join([*lines, ""]))

        csv_path = path.with_suffix(".csv")
        write_atomically(csv_path, self._with_errors_apart().csv())
        return [markdown_path, csv_path]

    def _with_errors_apart(self) -> Table:
        """Return a table with a column for each number and one for its error."""
        columns = ["model"]
        for name in self.columns:
            columns += [name, f"{name} stderr"]
        rows: list[list[str]] = []
        for model, cells in self.rows:
            rows.append([model, *(part for cell in cells for part in cell)])
        return Table(self.title, columns, rows)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes below a table; warnings stand out."""
    for note in notes:
        style = "yellow" if note.startswith(WARNING) else "dim"
        console.print(Padding(Text(printable(note), style=style), (0, 0, 0, 2)))


def format_cell(number: float | None, error: float | None = None) -> Cell:
    """Format a score and its standard error with three decimals. None becomes an empty text."""
    number_text = "" if number is None else f"{number:.3f}"
    error_text = "" if error is None else f"{error:.3f}"
    return Cell(number_text, error_text)


def name_models_unless_all(models: Sequence[str], num_all: int) -> str:
    """Return " (base, ours)" for the models that a note is about, or an empty text if it is about all `num_all`."""
    return "" if len(models) == num_all else f" ({', '.join(models)})"


# ---------------------------------------------------------------------------------------------------------- results


def results_table(all_results: Sequence[Results]) -> Scores:
    """Return the table of results: a row for each model, and a column for each task that any model has.

    The last column has the average of each model's accuracies, if any model has one.
    """
    records = records_by_task(all_results)
    has_average = any(results.average is not None for results in all_results)
    columns = {name: _heading(name, record) for name, record in records.items()}
    if has_average:
        columns["average"] = "average"

    rows: list[Row] = []
    for results in all_results:
        cells = [score_cell(results.tasks[name]) if name in results.tasks else Cell() for name in records]
        if has_average:
            cells.append(_average_cell(results))
        rows.append(Row(results.model, cells))

    first = all_results[0]
    return Scores(
        title=first.suite if first.average is None else f"{first.suite}, accuracy ± standard error",
        columns=columns,
        rows=rows,
        notes=notes(all_results),
    )


def records_by_task(all_results: Sequence[Results]) -> dict[str, Record]:
    """Return each task that any model has, with the record of the first model that has it."""
    records: dict[str, Record] = {}
    for results in all_results:
        for name, record in results.tasks.items():
            records.setdefault(name, record)
    return records


def print_results(all_results: Sequence[Results], console: Console) -> None:
    """Print the table. Its last row has the scores of guessing, for tasks with choices."""
    table = results_table(all_results)
    records = records_by_task(all_results)
    chances = {name: record["chance"] for name, record in records.items() if "chance" in record}
    if chances:
        chance_row = Row("chance", [format_cell(chances.get(name)) for name in table.columns])
        table = replace(table, rows=[*table.rows, chance_row])
    table.print(console)


def _heading(name: str, record: Record) -> str:
    """Return the task, its number of examples, and the metric unless it is an accuracy, each on its own line."""
    label, _, shots = name.rpartition("/")
    metric = "" if is_accuracy(record) else record["metric"].replace("_", " ")
    return "\n".join(line for line in (label, shots, metric) if line)


def score_cell(record: Record) -> Cell:
    """Return the table cell of a task's record: its main metric and the standard error."""
    number, error = score_of(record)
    num_independent = record.get("num_clusters") or record["n"]
    if is_accuracy(record) and num_independent == 1:
        error = None  # the error of one item is 0, which means nothing
    return format_cell(number, error)


def _average_cell(results: Results) -> Cell:
    """Return the average of a model's accuracies and its standard error; empty if it has none."""
    if results.average is None:
        return Cell()
    return format_cell(results.average, average_error(results.tasks, results.averaged))


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Return the standard error of the mean of some tasks' scores. Tasks on the same data are fully correlated."""
    errors = [(tasks[name]["data_fingerprint"], score_of(tasks[name])[1] or 0.0) for name in names]
    return error_of_sum(errors) / len(names)


def notes(all_results: Sequence[Results]) -> list[str]:
    """Return notes for the reader of a table on irregularities that may make its numbers misleading.

    These are irregular items, tasks that not all models answered in the same way, and averages over different tasks. A
    note that several tasks have in common appears once, with their names.
    """
    tasks_of: dict[tuple[str, str], list[str]] = {}
    """(beginning of the line, text) -> the tasks that it is about."""
    for name in records_by_task(all_results):
        records = {results.model: results.tasks[name] for results in all_results if name in results.tasks}
        for text in _notes_on_items(records):
            tasks_of.setdefault(("", text), []).append(name)
        different = _asked_differently(records)
        if different:
            base = next(iter(records))
            text = f"{', '.join(different)} not asked the same as {base}; these numbers do not compare"
            tasks_of.setdefault((WARNING, text), []).append(name)

    lines: list[str] = []
    for (beginning, text), names in tasks_of.items():
        task_names = ", ".join(names)
        if len(names) > MAX_NAMED_TASKS:
            task_names = f"{len(names)} tasks, {names[0]} the first"
        lines.append(f"{beginning}{task_names}: {text}")

    kinds_of_numbers = {is_accuracy(record) for results in all_results for record in results.tasks.values()}
    if len(kinds_of_numbers) == 2:
        lines.append("the average is of the accuracies")
    averaged_tasks = {tuple(sorted(results.averaged)) for results in all_results}
    if len(averaged_tasks) > 1:
        lines.append("warning: not all models have all tasks; the averages are over different ones")
    return lines


def _notes_on_items(records: Mapping[str, Record]) -> list[str]:
    """Return notes on one task's irregularities, such as skipped items, cut contexts or ties.

    `records` maps each model to its record of the task. A note that does not hold for all models ends with the names of
    those that it holds for, such as "3 with a tie for the best (base)".
    """
    models_of: dict[str, list[str]] = {}
    for model, record in records.items():
        for text in _describe_irregularities(record):
            models_of.setdefault(text, []).append(model)
    return [f"{text}{name_models_unless_all(models, len(records))}" for text, models in models_of.items()]


def _asked_differently(records: Mapping[str, Record]) -> list[str]:
    """Return the models whose questions or settings differ from those of the first model.

    `records` maps each model to its record of one task. Fingerprints of questions and settings are compared.
    """
    fingerprints = {model: record.get("fingerprint") for model, record in records.items()}
    first = next(iter(fingerprints.values()))
    return [model for model, fingerprint in fingerprints.items() if fingerprint != first]


def _describe_irregularities(record: Record) -> Iterator[str]:
    """Yield a note for each kind of irregularity in a task's record, such as skipped items or a limit."""
    num_items = f"{record['n']:,}"
    for key, text in IRREGULAR_ITEMS.items():
        count = record.get(key)
        if count:
            yield f"{text.format(f'{count:,}')}, of {num_items} items"
    if lost_text_fraction(record):
        yield f"bits per byte leave out text that its tokenizer loses: {describe_lost_text(record['lost_text'])}"
    for reason, count in (record.get("skipped") or {}).items():
        yield f"{count:,} skipped ({reason}); {num_items} asked"

    num_clusters = record.get("num_clusters")
    if num_clusters:
        yield f"{num_items} items in {num_clusters:,} clusters, which its standard error counts"
    num_documents = record.get("num_documents", 0)
    if 1 < num_documents < MIN_DOCUMENTS:
        yield f"a standard error from {num_documents} documents alone is rough"
    limit = limit_of_trial(record)
    if limit:
        yield f"only the first {limit:,} items (limit): a try, not a result"


# --------------------------------------------------------------------------------------------------------- gauntlet


class Composite(NamedTuple):
    """The score of a category or an average in a gauntlet, with its standard error."""

    score: float
    error: float


class Gauntlet(NamedTuple):
    """A model's scores in a gauntlet."""

    scores: dict[str, Composite]
    """Categories, then averages."""
    missing: dict[str, list[str]]
    """Category that is left out -> the tasks that it lacks."""


class _Part(NamedTuple):
    """A task's part in the score of its category."""

    weight: float
    """Weights of a category's parts add up to 1."""
    score: float
    error: float
    data: str
    """Fingerprint of the task's data. Errors of tasks on the same data are correlated."""


def run_gauntlet(config: GauntletConfig, tasks: Mapping[str, Record]) -> Gauntlet:
    """Compute a model's scores in a gauntlet. `tasks` maps names such as `arc_easy/3-shot` to the model's records.

    A task's score is its accuracy a above the baseline b of guessing, relative to the best possible: (a - b) / (1 - b).
    A category is the weighted mean of its tasks, and an average is the mean of its categories. As in LLM Foundry, a
    category is left out if the model lacks one of its tasks, and an average if none of its categories is left.
    """
    parts: dict[str, list[_Part]] = {}
    missing: dict[str, list[str]] = {}
    for category in config.categories:
        absent = _missing_tasks(category, tasks)
        if absent:
            missing[category.name] = absent
        else:
            parts[category.name] = _parts_of(config, category, tasks)

    composites = {name: [name] for name in parts} | averages_of(config)
    scores: dict[str, Composite] = {}
    for name, categories in composites.items():
        present = [parts[category] for category in parts if category in categories]
        if present:
            scores[name] = _mean_of_categories(present)
    return Gauntlet(scores, missing)


def averages_of(config: GauntletConfig) -> dict[str, list[str]]:
    """Return the averages of a gauntlet, each with the names of its categories. The default is one over all."""
    return config.averages or {"default_average": [category.name for category in config.categories]}


def _missing_tasks(category: Category, tasks: Mapping[str, Record]) -> list[str]:
    """Return the tasks of a category that have no accuracy."""
    missing: list[str] = []
    for benchmark in category.benchmarks:
        record = tasks.get(benchmark.task)
        if record is None or not is_accuracy(record):
            missing.append(benchmark.task)
    return missing


def _parts_of(config: GauntletConfig, category: Category, tasks: Mapping[str, Record]) -> list[_Part]:
    """Return the part of each task in a category's score, with weights that add up to 1."""
    parts = [_score_part(config, benchmark, tasks[benchmark.task]) for benchmark in category.benchmarks]
    total_weight = sum(part.weight for part in parts)
    return [part._replace(weight=part.weight / total_weight) for part in parts]


def _score_part(config: GauntletConfig, benchmark: Benchmark, record: Record) -> _Part:
    """Return a task's part in its category's score. The weights of a category do not add up to 1 yet."""
    chance = benchmark.random_baseline if config.subtract_random_baseline else 0.0
    scale = 1.0 / (1.0 - benchmark.random_baseline) if config.rescale_accuracy else 1.0
    weights = {"EQUAL": 1.0, "SAMPLE_SZ": record["n"], "LOG_SAMPLE_SZ": max(math.log2(record["n"]), 1.0)}
    score, error = score_of(record)
    return _Part(
        weight=weights[config.weighting],
        score=(score - chance) * scale,
        error=(error or 0.0) * scale,
        data=record["data_fingerprint"],
    )


def _mean_of_categories(categories: Sequence[Sequence[_Part]]) -> Composite:
    """Return the mean of several categories' scores with its standard error. Categories count equally."""
    parts = [part for category in categories for part in category]
    score = sum(part.weight * part.score for part in parts)
    error = error_of_sum((part.data, part.weight * part.error) for part in parts)
    return Composite(score / len(categories), error / len(categories))


def gauntlet_table(config: GauntletConfig, all_results: Sequence[Results]) -> Scores:
    """Return the table of a gauntlet: a row for each model, a column for each category and average that any model has.

    A note names each category that is left out, with the tasks that are missing.
    """
    gauntlets = {results.model: run_gauntlet(config, results.tasks) for results in all_results}
    names: list[str] = []
    for name in [*(category.name for category in config.categories), *averages_of(config)]:
        if any(name in gauntlet.scores for gauntlet in gauntlets.values()):
            names.append(name)

    rows: list[Row] = []
    models_of: dict[str, list[str]] = {}
    for model, gauntlet in gauntlets.items():
        scores = [gauntlet.scores.get(name) for name in names]
        rows.append(Row(model, [Cell() if score is None else format_cell(*score) for score in scores]))
        for category, missing in gauntlet.missing.items():
            text = f"eval gauntlet: {category} is left out: no accuracy of {', '.join(missing)}"
            models_of.setdefault(text, []).append(model)
    return Scores(
        title="eval gauntlet: share of what is left above chance ± standard error",
        columns={name: name.replace("_", "\n") for name in names},
        rows=rows,
        notes=[f"{text}{name_models_unless_all(models, len(gauntlets))}" for text, models in models_of.items()],
    )


def write_tables(all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None = None) -> list[Path]:
    """Write table.md and table.csv; with a gauntlet gauntlet.md and gauntlet.csv too. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = results_table(all_results).write(folder / "table")
    if gauntlet:
        written += gauntlet_table(gauntlet, all_results).write(folder / "gauntlet")
    return written
