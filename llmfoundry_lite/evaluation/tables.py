"""Tables of scores: models as rows, tasks or categories as columns; on a console, as Markdown and as CSV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.eval_schema import GauntletConfig
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.gauntlet import Gauntlet, averages_of, run_gauntlet
from llmfoundry_lite.evaluation.paired import MIN_DOCUMENTS
from llmfoundry_lite.evaluation.records import ACCURACIES, Record, cut_at, error_of_sum, num_unasked
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.report.tables import Table, markdown_list

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
    """Models and their scores, with notes below."""

    title: str
    columns: dict[str, str]
    """Name of a column -> its heading, which may have several lines."""
    rows: list[tuple[str, list[Cell]]]
    """(model, its scores)"""
    notes: list[str]

    def print(self, console: Console) -> None:
        rows = [[model, *("\n±".join(filter(None, cell)) for cell in cells)] for model, cells in self.rows]
        if self.columns:
            Table(self.title, ["model", *self.columns.values()], rows).print_blocks(console)
        print_notes(console, self.notes)

    def markdown(self) -> str:
        headings = [heading.replace("-\n", "").replace("\n", " ") for heading in self.columns.values()]
        rows = [
            [model.replace("\n", ", "), *(" ± ".join(filter(None, cell)) for cell in cells)]
            for model, cells in self.rows
        ]
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


# ---------------------------------------------------------------------------------------------------------- results


def results_table(all_results: Sequence[Results]) -> Scores:
    """Return every task that any model has, in order, and the average."""
    names = list(dict.fromkeys(task for results in all_results for task in results.tasks))
    suite = all_results[0].suite
    return Scores(
        title=suite if all_results[0].average is None else f"{suite}, accuracy ± standard error",
        columns={**{name: _heading(all_results, name) for name in names}, "average": "average"},
        rows=[
            (results.model, [*(cell(results.tasks.get(name)) for name in names), _average(results)])
            for results in all_results
        ],
        notes=notes(all_results),
    )


def print_results(all_results: Sequence[Results], console: Console) -> None:
    """Print the table, with what guessing would score as the last row."""
    table, tasks = results_table(all_results), [item for r in reversed(all_results) for item in r.tasks.items()]
    chances = {name: f"{record['chance']:.3f}" for name, record in tasks if "chance" in record}
    row = ("chance", [(chances.get(name, ""), "") for name in table.columns])
    replace(table, rows=[*table.rows, row] if chances else table.rows).print(console)


def _heading(all_results: Sequence[Results], name: str) -> str:
    """Return the task, its examples, and what the number is unless it is an accuracy."""
    label, _, shots = name.rpartition("/")
    metric = next(results.tasks[name]["metric"] for results in all_results if name in results.tasks)
    return "\n".join(filter(None, (label, shots, "" if metric in ACCURACIES else metric.replace("_", " "))))


def cell(record: Record | None) -> Cell:
    if record is None:
        return "", ""
    metric = record["metric"]
    error = record.get(f"{metric}_stderr")
    if metric in ACCURACIES and (record.get("num_clusters") or record["n"]) == 1:
        error = None  # it is 0, and says nothing
    return f"{record[metric]:.3f}", "" if error is None else f"{error:.3f}"


def _average(results: Results) -> Cell:
    if results.average is None:
        return "", ""
    return f"{results.average:.3f}", f"{average_error(results.tasks, _averaged(results)):.3f}"


def _averaged(results: Results) -> list[str]:
    return [name for name, record in results.tasks.items() if record["metric"] in ACCURACIES]


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Return the standard error of the mean of tasks; those on the same data ask the same items."""
    records = [tasks[name] for name in names]
    errors = [(record["data_fingerprint"], record.get(f"{record['metric']}_stderr", 0.0)) for record in records]
    return error_of_sum(errors) / len(names)


def notes(all_results: Sequence[Results]) -> list[str]:
    """Return what was odd, and why numbers may not be what they seem."""
    tasks_of: dict[str, list[str]] = {}
    for name in dict.fromkeys(task for results in all_results for task in results.tasks):
        models_of: dict[str, list[str]] = {}
        models = [results for results in all_results if name in results.tasks]
        for results in models:
            for text in _oddities(results.tasks[name]):
                models_of.setdefault(text, []).append(results.model)
        for text, those in models_of.items():
            of = "" if len(those) == len(models) else f" ({', '.join(those)})"
            tasks_of.setdefault(f"{text}{of}", []).append(name)
        first = models[0].tasks[name].get("fingerprint")
        if different := [results.model for results in models if results.tasks[name].get("fingerprint") != first]:
            warning = f"{', '.join(different)} not asked the same as {models[0].model}; these numbers do not compare"
            tasks_of.setdefault(f"{WARNING}{warning}", []).append(name)
    found = []
    for text, tasks in tasks_of.items():
        begin = WARNING if text.startswith(WARNING) else ""
        named = ", ".join(tasks) if len(tasks) < 4 else f"{len(tasks)} tasks, {tasks[0]} the first"
        found.append(f"{begin}{named}: {text.removeprefix(begin)}")
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
    for reason, count in (record.get("skipped") or {}).items():
        yield f"{count:,} skipped ({reason}); {record['n']:,} asked"
    if num_clusters := record.get("num_clusters"):
        yield f"{record['n']:,} items in {num_clusters:,} clusters, which its standard error counts"
    if 1 < record.get("num_documents", 0) < MIN_DOCUMENTS:
        yield f"a standard error from {record['num_documents']} documents alone is rough"
    if num_unasked(record):
        told = record["sequential"]
        yield (
            f"{record['n']:,} of {told['num_items']:,} items asked, until the difference to {told['against']} was "
            f"decided ({told['decision']}): no whole result, in no average"
        )
    if limit := cut_at(record):
        yield f"only the first {limit:,} items (limit): a try, not a result"


# --------------------------------------------------------------------------------------------------------- gauntlet


def gauntlet_table(config: GauntletConfig, all_results: Sequence[Results]) -> Scores:
    """Return the categories and averages that any model has; a note names each category that is left out."""
    found = [(results.model, run_gauntlet(config, results.tasks)) for results in all_results]
    names = [*(category.name for category in config.categories), *averages_of(config)]
    names = [name for name in names if any(name in gauntlet.scores for _, gauntlet in found)]

    def score(gauntlet: Gauntlet, name: str) -> Cell:
        found = gauntlet.scores.get(name)
        return ("", "") if found is None else (f"{found.score:.3f}", f"{found.error:.3f}")

    models_of: dict[str, list[str]] = {}
    for model, gauntlet in found:
        for category, tasks in gauntlet.missing.items():
            models_of.setdefault(f"{category} is left out: no accuracy of {', '.join(tasks)}", []).append(model)
    return Scores(
        title="eval gauntlet: share of what is left above chance ± standard error",
        columns={name: name.replace("_", "\n") for name in names},
        rows=[(model, [score(gauntlet, name) for name in names]) for model, gauntlet in found],
        notes=[
            f"eval gauntlet: {text}" + ("" if len(models) == len(found) else f" ({', '.join(models)})")
            for text, models in models_of.items()
        ],
    )


def write_tables(all_results: Sequence[Results], folder: Path, gauntlet: GauntletConfig | None = None) -> list[Path]:
    """Write table.md and table.csv; with a gauntlet its gauntlet.md and gauntlet.csv too."""
    folder.mkdir(parents=True, exist_ok=True)
    written = results_table(all_results).write(folder / "table")
    return written + (gauntlet_table(gauntlet, all_results).write(folder / "gauntlet") if gauntlet else [])
