"""Our results beside published ones: zero-shot accuracies of MosaicML's "Training LLMs at Scale with AMD MI250 GPUs"
(October 2023), Table 2, which LLM Foundry's harness gave. Of those no items are known, so nothing is tested pairwise:
the table shows what a difference must exceed to be more than noise."""

import csv
import math
from collections.abc import Sequence
from importlib.resources import files

from rich.console import Console

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import Z_TWO_SIDED
from llmfoundry_lite.evaluation.reading import Loaded, Record, num_unasked
from llmfoundry_lite.evaluation.tables import average_error, print_blocks, print_note
from llmfoundry_lite.report.tables import markdown_list, markdown_table

TASKS = {
    "arc_challenge": "ARC-c",
    "arc_easy": "ARC-e",
    "boolq": "BoolQ",
    "hellaswag": "Hella-\nSwag",
    "piqa": "PIQA",
    "winograd": "Wino-\ngrad",
    "winogrande": "Wino-\ngrande",
}
SOURCE = 'published: MosaicML, "Training LLMs at Scale with AMD MI250 GPUs", October 2023, Table 2, zero-shot'
TOLERANCE = 1.25
"""Parameters and token budgets are called different beyond this ratio: published ones are rounded."""

Rows = list[tuple[str, list[str]]]


def read_published() -> list[Record]:
    """One row for each model: name, size, token budget, an accuracy for each of TASKS."""
    text = files("llmfoundry_lite.evaluation").joinpath("published.csv").read_text(encoding="utf-8")
    words = ("model", "source")
    return [
        {key: value if key in words else float(value) for key, value in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]


def published_table(results: Sequence[Loaded]) -> tuple[list[str], Rows, list[str]]:
    """(headers, rows, notes). Raises DataError when no task is among the published ones."""
    published = read_published()
    tasks = [task for task in TASKS if all(_is_whole(result, f"{task}/0-shot") for result in results)]
    if not tasks:
        raise DataError(
            f"--published: {' and '.join(result.name for result in results)} have none of the published tasks in "
            f"common, zero-shot: {', '.join(TASKS)}"
        )
    rows: Rows = []
    for row in published:
        numbers = [row[task] for task in tasks]
        cells = [f"{number:.3f}" for number in (*numbers, sum(numbers) / len(numbers))]
        rows.append((f"{row['model']}\n{_size(row)}", cells))
    for result in results:
        numbers, errors = _ours(result, tasks)
        cells = [f"{number:.3f}\n±{error:.3f}" for number, error in zip(numbers, errors, strict=True)]
        rows.append((f"{result.name}\n{_size(result.facts)}", cells))
    worst = [max(errors) for errors in zip(*(_ours(result, tasks)[1] for result in results), strict=True)]
    noise = [f"{Z_TWO_SIDED * math.sqrt(2) * error:.3f}" for error in worst]
    rows.append(("noise (95 %)", noise))
    headers = [*(TASKS[task] for task in tasks), f"mean\nof {len(tasks)}"]
    notes = ["under each model: parameters, tokens trained on"]
    notes += [warning for result in results for warning in _warnings(result, tasks, published)]
    if len(tasks) < len(TASKS):
        notes.append(f"not in all results, so in no average here: {', '.join(t for t in TASKS if t not in tasks)}")
    notes.append(
        "noise: what chance alone makes of the difference to a published number in 95 % of cases, if that is from "
        "as many items as ours; compare two results of your own to see smaller ones"
    )
    return headers, rows, [*notes, SOURCE]


def _is_whole(result: Loaded, name: str) -> bool:
    record = result.facts["tasks"].get(name)
    return record is not None and not num_unasked(record)


def print_published(results: Sequence[Loaded], console: Console) -> None:
    headers, rows, notes = published_table(results)
    print_blocks(console, "beside published results, zero-shot accuracy ± standard error", headers, rows)
    for note in notes:
        print_note(console, note)
    console.print()


def published_markdown(results: Sequence[Loaded]) -> str:
    headers, rows, notes = published_table(results)
    table = [["model", *(header.replace("-\n", "").replace("\n", " ") for header in headers)]]
    table += [[text.replace("\n", " ") for text in (name.replace("\n", ", "), *cells)] for name, cells in rows]
    return "\n".join([*markdown_table(table), "", *markdown_list(notes), ""])


def _ours(result: Loaded, tasks: Sequence[str]) -> tuple[list[float], list[float]]:
    """(numbers, standard errors), the average last."""
    names = [f"{task}/0-shot" for task in tasks]
    records = [result.facts["tasks"][name] for name in names]
    numbers = [record[record["metric"]] for record in records]
    errors = [record.get(f"{record['metric']}_stderr", 0.0) for record in records]
    average = sum(numbers) / len(numbers)
    return [*numbers, average], [*errors, average_error(result.facts["tasks"], names)]


def _size(facts: Record) -> str:
    parameters, tokens = facts.get("num_parameters"), facts.get("num_tokens_trained")
    return f"{_count(parameters)}, {_count(tokens)}"


def _count(number: float | None) -> str:
    if not number:
        return "?"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _warnings(result: Loaded, tasks: Sequence[str], published: Sequence[Record]) -> list[str]:
    found = []
    for key, what in (("num_tokens_trained", "token budget"), ("num_parameters", "size")):
        number = result.facts.get(key)
        if not number:
            found.append(f"warning: the {what} of {result.name} is not known; published rows may have another")
            continue
        others = [row for row in published if not 1 / TOLERANCE < row[key] / number < TOLERANCE]
        if others:
            told = ", ".join(f"{row['model']} ({_count(row[key])})" for row in others)
            found.append(f"warning: the {what} of {result.name} ({_count(number)}) is not that of {told}")
    records = {task: result.facts["tasks"][f"{task}/0-shot"] for task in tasks}
    if joint := [task for task, record in records.items() if record.get("tokenization") == "joint"]:
        found.append(
            f"warning: {result.name}: {', '.join(joint)} with tokenization joint; the published ones with separate"
        )
    if limited := [task for task, record in records.items() if (record.get("settings") or {}).get("limit")]:
        found.append(f"warning: {result.name}: {', '.join(limited)} on the first items alone (limit)")
    return found
