"""Tables of scores with a row for each model: results by task, and LLM Foundry's Eval Gauntlet.

`Scores` is such a table: it is printed, or written as Markdown, LaTeX and CSV, with notes below it. `results_table`
makes one of the tasks' scores, and `gauntlet_table` one of the gauntlet's categories and averages, which `gauntlet.py`
computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.eval_schema import GauntletConfig
from llmfoundry_lite.config.task_types import ACCURACIES, BPB
from llmfoundry_lite.data.spelling import describe_lost_text
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.gauntlet import averages_of, run_gauntlet
from llmfoundry_lite.evaluation.means import error_of_sum, weights_of_tasks
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics, describe_choice
from llmfoundry_lite.evaluation.records import (
    Record,
    is_accuracy,
    limit_of_trial,
    lost_text_fraction,
    own_code_of,
    score_of,
)
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import LEVEL, MIN_DOCUMENTS, z_of
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table, markdown_list

WARNING = "warning: "
IRREGULAR_ITEMS = {
    "num_ties": "{} with a tie for the best, where the first counts",
    "num_duplicates": "{} that repeat a choice",
    "num_repeated": "{} that repeat an earlier item",
    "num_trimmed": "{} with a context cut to fit the model",
    "num_without_bpb": "{} whose right answer has no bits per byte, as it has no tokens or does not fit the model",
    "num_missing_examples": "{} with fewer examples than asked for, as their category has no more",
}
"""Key of a task's record that counts irregular items -> the note about them. {} is the count."""
MAX_NAMED_TASKS = 3
"""A note about more tasks than this names the first and counts them."""


class Cell(NamedTuple):
    """A score and its standard error. Each is None if there is none."""

    number: float | None = None
    error: float | None = None

    def as_texts(self) -> list[str]:
        """Return the score and its error with three decimals, as far as there are any: ["0.612", "0.011"]."""
        return [f"{value:.3f}" for value in self if value is not None]

    def as_exact_texts(self) -> list[str]:
        """Return the score and its error with all their digits. Each is an empty text if there is none."""
        return ["" if value is None else repr(float(value)) for value in self]


class Row(NamedTuple):
    """The scores of a model, one for each column."""

    model: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A table of models' scores, with notes for its reader."""

    title: str
    columns: dict[str, str]
    """Name of a column -> its heading, which may have several lines."""
    rows: list[Row]
    notes: list[str]
    trials: list[str] = field(default_factory=list)
    """Tasks of which only the first items were evaluated."""
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a column -> the metric of its scores, which the CSV names. Columns of a gauntlet have none."""

    def table(self, headings: Sequence[str], between: str) -> Table:
        """Return a table whose cells have a score and its error, such as "0.612 ± 0.011".

        `headings` are those of the columns after the model's. `between` is the text between score and error.
        """
        rows: list[list[str]] = []
        for model, cells in self.rows:
            rows.append([model, *(between.join(cell.as_texts()) for cell in cells)])
        return Table(self.title, ["model", *headings], rows)

    def print(self, console: Console) -> None:
        """Print the table, unless it has no columns, and the notes."""
        if self.columns:
            self.table([*self.columns.values()], "\n±").print_blocks(console)
        print_notes(console, self.notes)

    def write(self, path: Path) -> list[Path]:
        """Write the table as PATH.md, PATH.csv and PATH.tex, and return the paths.

        The Markdown has each score with its error in one cell, and the notes. So has the LaTeX, without the notes
        except on trials, and with models as columns if there are more tasks than models. The CSV has a column of its
        own for each score and for each error, and no notes.
        """
        # Headings have several lines on the console, and one line in files.
        headings = [heading.replace("\n", " ") for heading in self.columns.values()]
        table = self.table(headings, " ± ")
        lines = table.markdown()
        if self.notes:
            lines = [*lines, "", *markdown_list(self.notes)]
        markdown_path = path.with_suffix(".md")
        write_atomically(markdown_path, "\n".join([*lines, ""]))

        csv_path = path.with_suffix(".csv")
        write_atomically(csv_path, self._with_errors_apart().csv())
        # A page is higher than it is wide, so the longer side of the table goes downwards.
        if len(table.columns) > len(table.rows):
            table = table.transposed("")
        latex_path = path.with_suffix(".tex")
        write_atomically(latex_path, "\n".join([*table.latex(f"{self.title}.{caption_on_trials(self.trials)}"), ""]))
        return [markdown_path, csv_path, latex_path]

    def _with_errors_apart(self) -> Table:
        """Return a table with a column for each score, and one for its standard error.

        Columns are named after task and metric: "piqa/0-shot acc_norm" and "piqa/0-shot acc_norm stderr". Numbers have
        all their digits, because a CSV is read by programs.
        """
        columns = ["model"]
        for name in self.columns:
            heading = f"{name} {self.metrics[name]}" if name in self.metrics else name
            columns += [heading, f"{heading} stderr"]
        rows: list[list[str]] = []
        for model, cells in self.rows:
            rows.append([model, *(text for cell in cells for text in cell.as_exact_texts())])
        return Table(self.title, columns, rows)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes below a table, dim, and those that are warnings in yellow."""
    for note in notes:
        style = "yellow" if note.startswith(WARNING) else "dim"
        console.print(Padding(Text(printable(note), style=style), (0, 0, 0, 2)))


def name_tasks(tasks: Sequence[str]) -> str:
    """Return the names of the tasks that a note is about; for many, the first and the number of the others."""
    if len(tasks) > MAX_NAMED_TASKS:
        return f"{tasks[0]} and {len(tasks) - 1} other tasks"
    return ", ".join(tasks)


def caption_on_trials(trials: Sequence[str]) -> str:
    """Return a sentence for a caption on tasks of which only the first items were evaluated; empty without any."""
    return f" A trial, not a result: {name_tasks(trials)} on the first items only." if trials else ""


def trials_of(all_results: Sequence[Results]) -> list[str]:
    """Return the tasks of which only the first items were evaluated, by any model."""
    trials: dict[str, None] = {}
    for results in all_results:
        trials |= dict.fromkeys(task for task, record in results.tasks.items() if limit_of_trial(record))
    return list(trials)


def name_models_unless_all(models: Sequence[str], num_all: int) -> str:
    """Return " (base, ours)" for the models that a note is about, or an empty text if it is about all `num_all`."""
    return "" if len(models) == num_all else f" ({', '.join(models)})"


# ---------------------------------------------------------------------------------------------------------- results


def results_table(all_results: Sequence[Results], metric: str | None = None, others: Sequence[Results] = ()) -> Scores:
    """Return the table of results: a row for each model, and a column for each task that any model has.

    all_results: at least one model's results.
    metric: the metric that the user asks for, such as `acc_norm`; None lets `metrics.choose_metrics` choose.
    others: results of the same suite that are not shown, but with which the metrics must be comparable, too.

    A cell has the task's metric and its standard error, and is empty if the model does not have the task. The last
    column has the average of each model's accuracies or, if no model has any, that of its bits per byte by `bpb`.
    """
    metrics = choose_metrics([*all_results, *others], metric)
    notes_on_metrics = describe_choice([*all_results, *others], metrics, metric)
    all_results = by_metrics(all_results, metrics)

    # Name the columns.
    first_records = records_by_task(all_results)
    columns = {task: _heading(task, record) for task, record in first_records.items()}
    metric_of_column: dict[str, str] = {task: record["metric"] for task, record in first_records.items()}
    averages = average_cells(all_results)
    has_average = any(cell.number is not None for cell in averages)
    if has_average:
        columns["average"] = "average"
        metric_of_column["average"] = "accuracy" if have_accuracies(all_results) else BPB

    # Fill the rows.
    rows: list[Row] = []
    for results, average in zip(all_results, averages, strict=True):
        cells: list[Cell] = []
        for task in first_records:
            record = results.tasks.get(task)
            cells.append(Cell() if record is None else score_cell(record))
        if has_average:
            cells.append(average)
        rows.append(Row(results.model, cells))

    return Scores(
        title=_title(all_results),
        columns=columns,
        rows=rows,
        notes=[*notes_on_metrics, *notes(all_results)],
        trials=trials_of(all_results),
        metrics=metric_of_column,
    )


def _title(all_results: Sequence[Results]) -> str:
    """Return the title of a table of results, which names the unit of its average: "s, accuracy ± standard error"."""
    suite = all_results[0].suite
    if have_accuracies(all_results):
        return f"{suite}, accuracy ± standard error"
    if any(results.averaged for results in all_results):
        return f"{suite}, bits per byte ± standard error"
    return suite


def have_accuracies(all_results: Sequence[Results]) -> bool:
    """Return whether any task of any model is shown by an accuracy."""
    return any(is_accuracy(record) for results in all_results for record in results.tasks.values())


def records_by_task(all_results: Sequence[Results]) -> dict[str, Record]:
    """Return each task that any model has, with the record of the first model that has it."""
    records: dict[str, Record] = {}
    for results in all_results:
        for name, record in results.tasks.items():
            records.setdefault(name, record)
    return records


def print_results(
    all_results: Sequence[Results], console: Console, metric: str | None = None, others: Sequence[Results] = ()
) -> None:
    """Print the table of results by a metric; the arguments are those of `results_table`.

    For tasks with choices that are shown by an accuracy, a last row "chance" has the accuracy of guessing.
    """
    table = results_table(all_results, metric, others)

    # The row is only printed. Files would otherwise have a row that is not a model.
    metrics = choose_metrics([*all_results, *others], metric)
    chance_of_task: dict[str, float] = {}
    for task, record in records_by_task(all_results).items():
        if "chance" in record and metrics[task] in ACCURACIES:
            chance_of_task[task] = record["chance"]
    if chance_of_task:
        chance_row = Row("chance", [Cell(chance_of_task.get(column)) for column in table.columns])
        table = replace(table, rows=[*table.rows, chance_row])
    table.print(console)


def _heading(name: str, record: Record) -> str:
    """Return a column's heading of up to three lines: the task's label, its number of examples, and its metric.

    `name` is that of the task in results. The heading of "arc_easy/3-shot" is "arc_easy" above "3-shot" above
    "acc per token".
    """
    label, _, shots = name.rpartition("/")
    metric = record["metric"].replace("_", " ")
    return "\n".join(line for line in (label, shots, metric) if line)


def score_cell(record: Record) -> Cell:
    """Return the table cell of a task's record: its main metric and the standard error.

    A single item, or items that are all right or all wrong, have no standard error here. The record has 0, as the
    formula gives, but 0 of 60 right is not an accuracy of exactly 0.
    """
    number, error = score_of(record)
    if is_accuracy(record) and (_num_independent(record) == 1 or number in (0, 1)):
        error = None
    return Cell(number, error)


def _num_independent(record: Record) -> int:
    """Return the number of a task's items or, if they are in clusters, of its clusters."""
    return record.get("num_clusters") or record["n"]


def _note_on_extreme(record: Record) -> str:
    """Return a note on a task whose items are all right or all wrong, with the interval of its accuracy.

    Wilson's interval (Journal of the American Statistical Association 22, 1927) of 0 of n ends at z² / (n + z²).
    """
    num_independent = _num_independent(record)
    z = z_of(LEVEL)
    far_end = z**2 / (num_independent + z**2)
    number, _ = score_of(record)
    verb, low, high = ("wrong", 0.0, far_end) if number == 0 else ("right", 1 - far_end, 1.0)
    return (
        f"all of its {record['n']:,} items are {verb}, which gives no standard error; Wilson's 95 % interval is "
        f"{low:.3f} to {high:.3f}"
    )


def average_cells(all_results: Sequence[Results]) -> list[Cell]:
    """Return the average of each model with its standard error. All of them are in one unit.

    They are averages of accuracies or, if no model has any, of bits per byte by `bpb`. A cell is empty if its model has
    no task in that unit.
    """
    are_accuracies = have_accuracies(all_results)
    cells: list[Cell] = []
    for results in all_results:
        # The tasks in a model's average are all accuracies, or none is.
        has_unit = bool(results.averaged) and is_accuracy(results.tasks[results.averaged[0]]) == are_accuracies
        if has_unit:
            cells.append(Cell(results.average, average_error(results.tasks, results.averaged) or None))
        else:
            cells.append(Cell())
    return cells


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Return the standard error of the mean of several tasks' scores. `names` are keys of `tasks`.

    The scores of tasks on the same data are taken as fully correlated, and all others as independent.
    """
    errors: list[tuple[str, float]] = []
    for name, weight in weights_of_tasks(names).items():
        _, error = score_of(tasks[name])
        errors.append((tasks[name]["data_fingerprint"], weight * (error or 0.0)))
    return error_of_sum(errors)


def notes(all_results: Sequence[Results]) -> list[str]:
    """Return notes for the reader of a table on irregularities that may make its numbers misleading.

    These are irregular items, tasks that not all models answered in the same way, and averages over different tasks. A
    note that several tasks have in common appears once, with their names:

        arc_easy/0-shot, piqa/0-shot: 3 with a tie for the best, where the first counts, of 100 items (base)
        warning: arc_easy/0-shot: ours not asked the same as base; these numbers do not compare
    """
    # Collect the notes on each task, and the tasks of each note.
    tasks_of_note: dict[tuple[str, str], list[str]] = {}
    """(beginning of the line, note) -> the tasks that it is about."""
    for task in records_by_task(all_results):
        records = {results.model: results.tasks[task] for results in all_results if task in results.tasks}
        for note in _notes_on_items(records):
            tasks_of_note.setdefault(("", note), []).append(task)

        models_asked_differently = _asked_differently(records)
        if models_asked_differently:
            first_model = next(iter(records))
            differing = ", ".join(models_asked_differently)
            note = f"{differing} not asked the same as {first_model}; these numbers do not compare"
            tasks_of_note.setdefault((WARNING, note), []).append(task)

    # Write each note once.
    lines: list[str] = []
    for (beginning, note), tasks in tasks_of_note.items():
        lines.append(f"{beginning}{name_tasks(tasks)}: {note}")

    # Add notes on the average.
    all_records = [record for results in all_results for record in results.tasks.values()]
    num_accuracies = sum(is_accuracy(record) for record in all_records)
    has_both_metrics = 0 < num_accuracies < len(all_records)
    if has_both_metrics:
        lines.append("the average is of the accuracies")
    has_both_bits = not num_accuracies and {record["metric"] for record in all_records} > {BPB}
    if has_both_bits:
        lines.append(f"the average is of {BPB}, without held-out text")
    averaged_tasks = {tuple(sorted(results.averaged)) for results in all_results}
    if len(averaged_tasks) > 1:
        lines.append("warning: not all models have all tasks; the averages are over different ones")
    return lines


def _notes_on_items(records: Mapping[str, Record]) -> list[str]:
    """Return notes on one task's irregularities, such as skipped items, cut contexts or ties.

    `records` maps each model to its record of the task. A note that does not hold for all models ends with the names of
    those that it holds for, such as "3 that repeat a choice, of 100 items (base)".
    """
    models_of_note: dict[str, list[str]] = {}
    for model, record in records.items():
        for note in _describe_irregularities(record):
            models_of_note.setdefault(note, []).append(model)
    return [f"{note}{name_models_unless_all(models, len(records))}" for note, models in models_of_note.items()]


def _asked_differently(records: Mapping[str, Record]) -> list[str]:
    """Return the models whose questions or settings differ from those of the first model.

    `records` maps each model to its record of one task. Fingerprints of questions and settings are compared.
    """
    fingerprint_of_model = {model: record.get("fingerprint") for model, record in records.items()}
    first_fingerprint = next(iter(fingerprint_of_model.values()))
    return [model for model, fingerprint in fingerprint_of_model.items() if fingerprint != first_fingerprint]


def _describe_irregularities(record: Record) -> Iterator[str]:
    """Yield a note for each kind of irregularity in one model's record of a task.

    They are about items that count in another way than a reader expects, items or text that are left out, and standard
    errors or scores that mean less than others.
    """
    num_items = f"{record['n']:,}"
    for key, note in IRREGULAR_ITEMS.items():
        num_irregular = record.get(key)
        if num_irregular:
            yield f"{note.format(f'{num_irregular:,}')}, of {num_items} items"

    own_code = own_code_of(record)
    if own_code:
        yield f"scored by {', '.join(own_code)}, code of its user's own"

    # Name items or text that the scores leave out.
    if lost_text_fraction(record):
        yield f"bits per byte leave out text that its tokenizer loses: {describe_lost_text(record['lost_text'])}"
    for reason, num_skipped in (record.get("skipped") or {}).items():
        yield f"{num_skipped:,} skipped ({reason}); {num_items} asked"

    # Give the other mean of a task with categories. Results of older versions do not have it.
    over_items = record.get("over_items") or {}
    if record["metric"] in over_items:
        cell = Cell(over_items[record["metric"]], over_items.get(f"{record['metric']}_stderr"))
        yield f"the mean of its categories; over its {num_items} items {' ± '.join(cell.as_texts())}"

    # Name facts that limit what standard errors and scores mean.
    is_extreme = is_accuracy(record) and score_of(record)[0] in (0, 1)
    if is_extreme and _num_independent(record) > 1:
        yield _note_on_extreme(record)
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


def gauntlet_table(
    config: GauntletConfig,
    all_results: Sequence[Results],
    metric: str | None = None,
    others: Sequence[Results] = (),
) -> Scores:
    """Return the table of a gauntlet: a row for each model, a column for each category and average that any model has.

    A cell is empty if the model lacks the category. A note names each category that is left out, the tasks that are
    missing, and the models, unless it is left out for all of them.
    """
    notes_on_metrics: list[str] = []
    if metric == BPB:
        # A gauntlet rescales what is above chance, and guessing has no bits per byte.
        metric = None
        notes_on_metrics.append(f"eval gauntlet: {BPB} is no accuracy, so it has each task's own metric")
    metrics = choose_metrics([*all_results, *others], metric)
    notes_on_metrics += describe_choice([*all_results, *others], metrics, metric)
    all_results = by_metrics(all_results, metrics)
    gauntlet_of_model = {results.model: run_gauntlet(config, results.tasks) for results in all_results}

    # Choose the columns: the categories, then the averages, as far as any model has them.
    category_names = [category.name for category in config.categories]
    columns: list[str] = []
    for name in [*category_names, *averages_of(config)]:
        if any(name in gauntlet.scores for gauntlet in gauntlet_of_model.values()):
            columns.append(name)

    # Fill the rows, and collect the models that each note is about.
    rows: list[Row] = []
    models_of_note: dict[str, list[str]] = {}
    for model, gauntlet in gauntlet_of_model.items():
        cells: list[Cell] = []
        for name in columns:
            composite = gauntlet.scores.get(name)
            cells.append(Cell() if composite is None else Cell(composite.score, composite.error or None))
        rows.append(Row(model, cells))

        for category, missing_tasks in gauntlet.missing.items():
            note = f"eval gauntlet: {category} is left out: no accuracy of {', '.join(missing_tasks)}"
            models_of_note.setdefault(note, []).append(model)

    num_models = len(gauntlet_of_model)
    notes_on_categories = [
        f"{note}{name_models_unless_all(models, num_models)}" for note, models in models_of_note.items()
    ]
    return Scores(
        title="eval gauntlet: share of what is left above chance ± standard error",
        columns={name: name.replace("_", "\n") for name in columns},
        rows=rows,
        notes=[*notes_on_metrics, *notes_on_categories],
        trials=trials_of(all_results),
    )


def write_tables(
    all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None = None, metric: str | None = None
) -> list[Path]:
    """Write table.md, .csv and .tex, and with a gauntlet also gauntlet.md, .csv and .tex, and return their paths.

    `metric` is the one that the user asks for, or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = results_table(all_results, metric).write(folder / "table")
    if gauntlet:
        written += gauntlet_table(gauntlet, all_results, metric).write(folder / "gauntlet")
    return written
