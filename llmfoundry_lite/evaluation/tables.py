"""How results look: tasks as columns, models as rows, the average last.

On a console a table that is too wide continues in further blocks of columns. Markdown and CSV hold the same numbers.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from llmfoundry_lite.config.schema import GauntletConfig
from llmfoundry_lite.errors import printable
from llmfoundry_lite.evaluation.gauntlet import Gauntlet, averages_of, run_gauntlet
from llmfoundry_lite.evaluation.paired import MIN_DOCUMENTS
from llmfoundry_lite.evaluation.reading import ACCURACIES, Record, cut_at, data_of, error_of_sum, num_unasked
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.report.tables import lean_table, markdown_list, markdown_table

if TYPE_CHECKING:  # comparing needs no torch
    from llmfoundry_lite.evaluation.results import Results

ODD = {
    "num_ties": "{} with a tie for the best, where the first counts",
    "num_duplicates": "{} that repeat a choice",
    "num_repeated": "{} that repeat an earlier item",
    "num_trimmed": "{} with a context cut to fit the model",
    "num_missing_examples": "{} with fewer examples than asked for, as their category has no more",
}


def columns(all_results: Sequence["Results"]) -> list[str]:
    """Every task that any model has, in order."""
    return list(dict.fromkeys(task for results in all_results for task in results.tasks))


def cell(record: Record | None) -> tuple[str, str]:
    """(number, its standard error), as text."""
    if record is None:
        return "", ""
    metric = record["metric"]
    error = record.get(f"{metric}_stderr")
    if metric in ACCURACIES and (record.get("num_clusters") or record["n"]) == 1:
        error = None  # it is 0, and says nothing
    return f"{record[metric]:.3f}", "" if error is None else f"{error:.3f}"


def print_table(all_results: Sequence["Results"], console: Console) -> None:
    names = columns(all_results)
    headers = [*(_header(all_results, name) for name in names), "average"]
    rows = [
        (
            results.model,
            [
                "\n±".join(filter(None, pair))
                for pair in (*(cell(results.tasks.get(n)) for n in names), _average(results))
            ],
        )
        for results in all_results
    ]
    chances = [_chance(all_results, name) for name in names]
    if any(chances):
        rows.append(("chance", [*chances, ""]))
    title = f"{all_results[0].suite}, accuracy ± standard error" if all_results[0].average is not None else ""
    print_blocks(console, title or all_results[0].suite, headers, rows)
    for note in notes(all_results):
        print_note(console, note)


def print_note(console: Console, note: str) -> None:
    """Indented, in as many lines as it takes."""
    style = "yellow" if note.startswith("warning") else "dim"
    console.print(Padding(Text(printable(note), style=style), (0, 0, 0, 2)))


def print_blocks(
    console: Console, title: str, headers: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]
) -> None:
    """A table whose columns go on below where the console is too narrow; the first column is there each time."""
    title, headers = printable(title), [printable(header, keep="\n") for header in headers]
    rows = [(printable(name, keep="\n"), [printable(cell, keep="\n") for cell in cells]) for name, cells in rows]
    first = max(len(line) for name in ("model", *(name for name, _ in rows)) for line in name.split("\n"))
    first = min(first, max(12, console.width // 3))
    for number, block in enumerate(_blocks(headers, [cells for _, cells in rows], console.width - first)):
        if number:
            console.print()
        else:
            console.print(Text(title, style="italic"))  # not the table's, to whose width it would be folded
        table = lean_table()
        table.add_column("model", max_width=first, overflow="fold")
        for i in block:
            table.add_column(Text(headers[i]), justify="right")
        for name, cells in rows:
            table.add_row(Text(name), *(Text(cells[i]) for i in block), style="dim" if name == "chance" else None)
        console.print(table)


def _blocks(headers: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Iterator[list[int]]:
    """Numbers of the columns that fit side by side."""
    block, used = [], 0
    for i, header in enumerate(headers):
        texts = [header, *(cells[i] for cells in rows)]
        width = 1 + max(len(line) for text in texts for line in text.split("\n"))
        if block and used + width > room:
            yield block
            block, used = [], 0
        block.append(i)
        used += width
    yield block


def _header(all_results: Sequence["Results"], name: str) -> str:
    """The task, its examples, and what the number is if it is no accuracy."""
    label, _, shots = name.rpartition("/")
    metric = next(results.tasks[name]["metric"] for results in all_results if name in results.tasks)
    return "\n".join(filter(None, (label, shots, "" if metric in ACCURACIES else metric.replace("_", " "))))


def notes(all_results: Sequence["Results"]) -> list[str]:
    """What stands under the table: what was odd, and why numbers may not be what they seem."""
    tasks_of: dict[str, list[str]] = {}
    for name in columns(all_results):
        told: dict[str, list[str]] = {}
        models = [results for results in all_results if name in results.tasks]
        for results in models:
            for text in _oddities(results.tasks[name]):
                told.setdefault(text, []).append(results.model)
        for text, those in told.items():
            of = "" if len(those) == len(models) else f" ({', '.join(those)})"
            tasks_of.setdefault(f"{text}{of}", []).append(name)
        fingerprints = {results.model: results.tasks[name].get("fingerprint") for results in models}
        if different := [model for model, of in fingerprints.items() if of != fingerprints[models[0].model]]:
            warning = f"{', '.join(different)} not asked the same as {models[0].model}; these numbers do not compare"
            tasks_of.setdefault(f"{WARNING}{warning}", []).append(name)
    found = []
    for text, tasks in tasks_of.items():
        begin = WARNING if text.startswith(WARNING) else ""
        found.append(f"{begin}{_name_tasks(tasks)}: {text.removeprefix(begin)}")
    if any(results.tasks[n]["metric"] not in ACCURACIES for results in all_results for n in results.tasks):
        found.append("the average is of the accuracies")
    averaged = {tuple(sorted(_averaged(results))) for results in all_results}
    if len(averaged) > 1:
        found.append("warning: not all models have all tasks; the averages are over different ones")
    return found


WARNING = "warning: "


def _name_tasks(tasks: Sequence[str]) -> str:
    return ", ".join(tasks) if len(tasks) < 4 else f"{len(tasks)} tasks, {tasks[0]} the first"


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


def print_gauntlet(config: GauntletConfig, all_results: Sequence["Results"], console: Console) -> None:
    """The second table: categories and averages as columns."""
    names, found = _run_gauntlets(config, all_results)
    if names:
        rows = [
            (model, ["\n±".join(filter(None, _composite_cell(gauntlet, name))) for name in names])
            for model, gauntlet in found
        ]
        console.print()
        print_blocks(console, GAUNTLET_TITLE, [name.replace("_", "\n") for name in names], rows)
    for note in _gauntlet_notes(found):
        print_note(console, note)


GAUNTLET_TITLE = "eval gauntlet: share of what is left above chance ± standard error"


def _run_gauntlets(
    config: GauntletConfig, all_results: Sequence["Results"]
) -> tuple[list[str], list[tuple[str, Gauntlet]]]:
    """The scores that any model has, in the configuration's order, and each model's gauntlet."""
    found = [(results.model, run_gauntlet(config, results.tasks)) for results in all_results]
    names = [*(category.name for category in config.categories), *averages_of(config)]
    return [name for name in names if any(name in gauntlet.scores for _, gauntlet in found)], found


def _composite_cell(gauntlet: Gauntlet, name: str) -> tuple[str, str]:
    """(score, its standard error), as text."""
    if name not in gauntlet.scores:
        return "", ""
    return f"{gauntlet.scores[name].score:.3f}", f"{gauntlet.scores[name].error:.3f}"


def _gauntlet_notes(found: Sequence[tuple[str, Gauntlet]]) -> list[str]:
    """A line for each category that is left out, with the models that lack the same tasks."""
    models_of: dict[str, list[str]] = {}
    for model, gauntlet in found:
        for category, tasks in gauntlet.missing.items():
            models_of.setdefault(f"{category} is left out: no accuracy of {', '.join(tasks)}", []).append(model)
    return [
        f"eval gauntlet: {text}" + ("" if len(models) == len(found) else f" ({', '.join(models)})")
        for text, models in models_of.items()
    ]


def write_tables(all_results: Sequence["Results"], folder: Path, gauntlet: GauntletConfig | None = None) -> list[Path]:
    """table.md and table.csv, with the same numbers; gauntlet.md and gauntlet.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    names = columns(all_results)
    headers = {**{name: _header(all_results, name).replace("\n", " ") for name in names}, "average": "average"}
    rows = [
        (results.model, [*(cell(results.tasks.get(name)) for name in names), _average(results)])
        for results in all_results
    ]
    written = _write_table(folder / "table", headers, rows, notes(all_results))
    if gauntlet is not None:
        names, found = _run_gauntlets(gauntlet, all_results)
        rows = [(model, [_composite_cell(scores, name) for name in names]) for model, scores in found]
        written += _write_table(folder / "gauntlet", {n: n for n in names}, rows, _gauntlet_notes(found))
    return written


def _write_table(
    path: Path, headers: Mapping[str, str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], found: Sequence[str]
) -> list[Path]:
    """As .md and as .csv. `headers` are names and what stands above them; a row is a model and (number, error)s."""
    lines = markdown_table(
        [
            ["model", *headers.values()],
            *([model, *(" ± ".join(filter(None, pair)) for pair in pairs)] for model, pairs in rows),
        ]
    )
    if found:
        lines += ["", *markdown_list(found)]
    content = io.StringIO(newline="")
    writer = csv.writer(content)
    writer.writerow(["model", *(part for name in headers for part in (name, f"{name} stderr"))])
    writer.writerows([model, *(part for pair in pairs for part in pair)] for model, pairs in rows)
    markdown, plain = path.with_suffix(".md"), path.with_suffix(".csv")
    write_atomically(markdown, "\n".join(lines) + "\n")
    write_atomically(plain, content.getvalue())
    return [markdown, plain]


def _averaged(results: "Results") -> list[str]:
    return [name for name, record in results.tasks.items() if record["metric"] in ACCURACIES]


def _average(results: "Results") -> tuple[str, str]:
    if results.average is None:
        return "", ""
    return f"{results.average:.3f}", f"{average_error(results.tasks, _averaged(results)):.3f}"


def average_error(tasks: dict[str, Record], names: Sequence[str]) -> float:
    """Of the mean of tasks. Those on the same data, with whatever examples, prompts or labels, ask the same items."""
    errors = ((data_of(tasks[name], name), tasks[name].get(f"{tasks[name]['metric']}_stderr", 0.0)) for name in names)
    return error_of_sum(errors) / len(names)


def _chance(all_results: Sequence["Results"], name: str) -> str:
    records = (results.tasks.get(name) for results in all_results)
    return next((f"{record['chance']:.3f}" for record in records if record and "chance" in record), "")
