"""Functions that the core's commands call: `data overlap`, `compare` with `--overlap` or `--html`, and of recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_tasks import find_available_tasks, load_tasks, trust_code_of
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError, printable
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.means import is_named
from llmfoundry_lite.evaluation.metrics import by_metrics, choose_metrics, metrics_of, refuse_unknown_metric
from llmfoundry_lite.evaluation.pairs import Comparison, print_comparison
from llmfoundry_lite.evaluation.records import RESULT
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import print_notes
from llmfoundry_lite.tables import Table, console
from llmfoundry_studies.clean import divide_results
from llmfoundry_studies.gauntlet import add_gauntlet, add_gauntlet_to_sides
from llmfoundry_studies.overlap import TaskOverlap, find_overlap, write_overlap
from llmfoundry_studies.page import write_page, write_page_of_recipes
from llmfoundry_studies.ranking import (
    AllPairs,
    only_common_tasks,
    print_all_pairs,
    rank_models,
    rank_sides,
    write_all_pairs,
)
from llmfoundry_studies.recipes import (
    LEGEND,
    notes_on_sides,
    paths_of_sides,
    read_sides,
    table_of_sides,
    write_sides,
)
from llmfoundry_studies.seeds import Run, Side, SidePair, compare_sides

TASK_FOLDER = "evals"


def run_overlap(
    data: Path, out: Path, task_names: Sequence[str], *, split: str, num_words: int, tokenizer_name: str | None
) -> None:
    """Find items of tasks in a split of prepared data, print a table and write the marks to `out`."""
    tasks = find_tasks(task_names)
    folder = data / split
    if not (folder / "index.json").is_file():
        raise DataError(f"{folder} has no index.json; expected a folder that `data prepare` wrote, or another --split")
    tokenizer = load_tokenizer(tokenizer_name or str(data / "tokenizer"))
    check_tokenizer(tokenizer, data)
    out.mkdir(parents=True, exist_ok=True)  # before the search, which may take hours

    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(f"searching {folder}")
        num_documents = 0
        num_characters = 0

        def show(new_documents: int, new_characters: int) -> None:
            nonlocal num_documents, num_characters
            num_documents += new_documents
            num_characters += new_characters
            progress.update(line, description=f"{num_documents:,} documents, {num_characters / 1e6:,.0f} MB of text")

        overlaps = find_overlap(tasks, folder, tokenizer, num_words=num_words, on_documents=show)

    write_overlap(overlaps, out, data=folder, num_words=num_words)
    table_of(overlaps, num_words).print(console())
    print(printable(f"{num_documents:,} documents searched for {num_words} words in a row; wrote {out}"))


def check_tokenizer(tokenizer: Tokenizer, data: Path) -> None:
    """Raise DataError unless the data was prepared with this tokenizer, whose tokens would be other texts.

    Data that was not written by `data prepare` does not say so, and is not checked.
    """
    summary_path = data / "summary.json"
    if not summary_path.is_file():
        return
    recorded = read_json(summary_path, "a summary").get("tokenizer")
    fingerprint = recorded.get("fingerprint") if isinstance(recorded, dict) else None
    if fingerprint not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{data} was prepared with another tokenizer ({fingerprint}) than {tokenizer.name} "
            f"({tokenizer.fingerprint}); leave --tokenizer out, or name that one"
        )


def find_tasks(names: Sequence[str]) -> list[TaskConfig]:
    """Return the tasks of these names, or all tasks whose data is on this machine if no name is given.

    Raises DataError if there are none, or if two have one label, by which the marks are found again.
    """
    tasks = load_tasks(list(names) or find_available_tasks(TASK_FOLDER), TASK_FOLDER)
    if names:
        trust_code_of(tasks)  # the user of this process has named them
    labels = [task.label for task in tasks]
    if not tasks:
        raise DataError(f"{TASK_FOLDER}: the data of no task is on this machine; name a task with --task")
    for label in labels:
        if labels.count(label) > 1:
            raise DataError(f"--task: two tasks have the label {label}; check them apart, or give one another label")
    return tasks


def table_of(overlaps: Sequence[TaskOverlap], num_words: int) -> Table:
    """Return a table with the number of marked items of each task."""
    rows = []
    for overlap in overlaps:
        num_items = len(overlap.items)
        num_marked = len(overlap.marked)
        num_with_answer = sum(item.has_answer(num_words) for item in overlap.marked)
        num_unchecked = sum(item.ngram_words(num_words) == 0 for item in overlap.items)
        share = f"{100 * num_marked / num_items:.1f} %" if num_items else ""
        rows.append(
            [overlap.label, f"{num_items:,}", f"{num_marked:,}", share, f"{num_with_answer:,}", f"{num_unchecked:,}"]
        )
    return Table("", ["task", "items", "in the data", "share", "with answer", "too short to check"], rows)


def print_parts(
    all_results: Sequence[Results], folder: Path, *, skip: Sequence[str], all_metrics: bool, metric: str | None
) -> None:
    """Compare clean and marked items apart, and print both.

    `folder` is the output of `data overlap`; the other options are those of `compare`. The metrics are chosen by all
    items together, so that both parts have those of the table above.
    """
    refuse_unknown_metric(all_results, metric)
    metrics = choose_metrics(all_results, metric)
    parts = divide_results(by_metrics(without_tasks(all_results, skip), metrics), folder)
    printer = Console()
    for heading, results in (
        ("Items that are not in the training data", parts.clean),
        ("Items that are in the training data", parts.marked),
    ):
        printer.print()
        printer.print(Text(heading, style="bold"))
        common_tasks = set.intersection(*(set(one.items) for one in results))
        if not common_tasks:
            printer.print("  none")
            continue
        # A part may lack the tasks that have the metric which the user asks for.
        has_metric = any(metric in metrics_of(record) for one in results for record in one.tasks.values())
        print_comparison(compare(results, all_metrics=all_metrics, metric=metric if has_metric else None), printer)
    print_notes(printer, parts.notes)


def write_html(
    all_results: Sequence[Results],
    comparisons: Sequence[Comparison],
    path: Path,
    *,
    skip: Sequence[str],
    metric: str | None,
) -> None:
    """Write the comparisons of results with the first of them as a page; the options are those of `compare`."""
    write_page(without_tasks(all_results, skip), comparisons, path, metric=metric)


def without_tasks(all_results: Sequence[Results], skip: Sequence[str]) -> list[Results]:
    """Return results without some tasks."""
    kept: list[Results] = []
    for results in all_results:
        tasks = {task: record for task, record in results.tasks.items() if not is_named(task, skip)}
        items = {task: records for task, records in results.items.items() if not is_named(task, skip)}
        kept.append(replace(results, tasks=tasks, items=items))
    return kept


# --------------------------------------------------------------------------------------------- all pairs, gauntlets


def compare_all_pairs(
    all_results: Sequence[Results],
    out: Path | None,
    *,
    skip: Sequence[str],
    metric: str | None,
    gauntlet: str | None,
    html: Path | None,
) -> None:
    """Compare each two of several models, and rank them; print tables and write them to `out`, and a page to `html`.

    `gauntlet` is a file, whose composites are compared too. Raises DataError for results that cannot be compared.
    """
    common_results, notes = only_common_tasks(all_results, skip)
    comparisons = compare(common_results, metric=metric, all_pairs=True)
    if gauntlet is not None:
        add_gauntlet(gauntlet, common_results, comparisons, metric)
    facts_of_model = {one.name: {key: getattr(one, key) for key in RESULT} for one in common_results}
    all_pairs = rank_models(comparisons, notes)
    _show_all_pairs(all_pairs, facts_of_model, out)
    if html is not None:
        write_page(common_results, comparisons, html, metric=metric, all_pairs=all_pairs)
        print(printable(str(html)))


def _show_all_pairs(all_pairs: AllPairs, facts: Mapping[str, Any], out: Path | None) -> None:
    """Print pairs and rankings, and write them to `out`. `facts` has those of each model or recipe, by its name."""
    print_all_pairs(all_pairs, Console())
    if out is not None:
        for path in write_all_pairs(all_pairs, facts, out):
            print(printable(str(path)))


# --------------------------------------------------------------------------------------------------------- recipes


def compare_recipes(
    arguments: Sequence[str],
    out: Path | None,
    *,
    metric: str | None,
    skip: Sequence[str],
    all_pairs: bool = False,
    gauntlet: str | None = None,
    html: Path | None = None,
) -> None:
    """Compare recipes, each given as NAME=RESULT,RESULT,…, with the first; print tables and write them to `out`.

    With `all_pairs`, compare each two, and rank them. `gauntlet` is a file, whose composites are compared too. `html`
    is the path of a page, if one is written.

    Raises ConfigError for arguments of another form, and DataError for results that cannot be compared.
    """
    sides = read_sides(arguments)
    if len(sides) < 2:
        raise ConfigError(f"compare: {sides[0].name} alone: name another recipe, NAME=RESULT,RESULT,…")
    pairs = compare_sides(sides, metric, skip, all_pairs=all_pairs)
    if gauntlet is not None:
        add_gauntlet_to_sides(gauntlet, pairs, metric)
    ranked = None
    if all_pairs:
        notes = [note for pair in pairs for note in notes_on_sides(pair)]
        ranked = rank_sides(pairs, notes)
        _show_all_pairs(ranked, paths_of_sides(sides), out)
    else:
        _show_sides(pairs, out)
    if html is not None:
        write_page_of_recipes(
            [_without_tasks(side, skip) for side in sides], pairs, html, metric=metric, all_pairs=ranked
        )
        print(printable(str(html)))


def _show_sides(pairs: Sequence[SidePair], out: Path | None) -> None:
    """Print the comparisons of recipes with the first, and write them to `out`."""
    printer = Console()
    for pair in pairs:
        table_of_sides(pair).print_blocks(printer)
        print_notes(printer, notes_on_sides(pair))
        printer.print()
    printer.print(Text(LEGEND, style="dim"))
    if out is not None:
        for path in write_sides(pairs, out):
            print(printable(str(path)))


def _without_tasks(side: Side, skip: Sequence[str]) -> Side:
    """Return a recipe whose results lack some tasks."""
    return replace(side, runs=[Run(without_tasks(run.checkpoints, skip)) for run in side.runs])
