"""Results beside published zero-shot accuracies: MosaicML, "Training LLMs at Scale with AMD MI250 GPUs" (October 2023),
Table 2, made with LLM Foundry's harness. Their items are not known, so nothing is tested pairwise: a row of the table
says what a difference must exceed to be more than noise.
"""

import csv
import math
from collections.abc import Sequence
from importlib.resources import files

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import Z_TWO_SIDED
from llmfoundry_lite.evaluation.records import Record, num_unasked
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import Scores, average_error

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


def published_table(results: Sequence[Results]) -> Scores:
    """Raises DataError when no task is among the published ones."""
    text = files("llmfoundry_lite.evaluation").joinpath("published.csv").read_text(encoding="utf-8")
    published: list[Record] = [
        {key: value if key in ("model", "source") else float(value) for key, value in row.items()}
        for row in csv.DictReader(text.splitlines())
    ]
    tasks = [task for task in TASKS if all(_is_whole(result, f"{task}/0-shot") for result in results)]
    if not tasks:
        raise DataError(
            f"--published: {' and '.join(result.name for result in results)} have none of the published tasks in "
            f"common, zero-shot: {', '.join(TASKS)}"
        )
    rows = []
    for row in published:
        numbers = [row[task] for task in tasks]
        cells = [(f"{number:.3f}", "") for number in (*numbers, sum(numbers) / len(numbers))]
        rows.append((f"{row['model']}\n{_size(row)}", cells))
    largest = [0.0] * (len(tasks) + 1)
    for result in results:
        names, records = [f"{task}/0-shot" for task in tasks], result.tasks
        numbers = [records[name][records[name]["metric"]] for name in names]
        errors = [records[name].get(f"{records[name]['metric']}_stderr", 0.0) for name in names]
        numbers, errors = [*numbers, sum(numbers) / len(numbers)], [*errors, average_error(records, names)]
        cells = [(f"{number:.3f}", f"{error:.3f}") for number, error in zip(numbers, errors, strict=True)]
        rows.append((f"{result.name}\n{_size(vars(result))}", cells))
        largest = list(map(max, largest, errors))
    rows.append(("noise (95 %)", [(f"{Z_TWO_SIDED * math.sqrt(2) * error:.3f}", "") for error in largest]))
    notes = ["under each model: parameters, tokens trained on"]
    notes += [warning for result in results for warning in _warnings(result, tasks, published)]
    if len(tasks) < len(TASKS):
        notes.append(f"not in all results, so in no average here: {', '.join(t for t in TASKS if t not in tasks)}")
    notes.append(
        "noise: what chance alone makes of the difference to a published number in 95 % of cases, if that is from "
        "as many items as ours; compare two results of your own to see smaller ones"
    )
    return Scores(
        title="beside published results, zero-shot accuracy ± standard error",
        columns={**{task: TASKS[task] for task in tasks}, "mean": f"mean\nof {len(tasks)}"},
        rows=rows,
        notes=[*notes, SOURCE],
    )


def _is_whole(result: Results, name: str) -> bool:
    record = result.tasks.get(name)
    return record is not None and not num_unasked(record)


def _size(facts: Record) -> str:
    return f"{_count(facts.get('num_parameters'))}, {_count(facts.get('num_tokens_trained'))}"


def _count(number: float | None) -> str:
    if not number:
        return "?"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _warnings(result: Results, tasks: Sequence[str], published: Sequence[Record]) -> list[str]:
    found = []
    for key, what in (("num_tokens_trained", "token budget"), ("num_parameters", "size")):
        number = getattr(result, key)
        if not number:
            found.append(f"warning: the {what} of {result.name} is not known; published rows may have another")
            continue
        others = [row for row in published if not 1 / TOLERANCE < row[key] / number < TOLERANCE]
        if others:
            told = ", ".join(f"{row['model']} ({_count(row[key])})" for row in others)
            found.append(f"warning: the {what} of {result.name} ({_count(number)}) is not that of {told}")
    records = {task: result.tasks[f"{task}/0-shot"] for task in tasks}
    if joint := [task for task, record in records.items() if record.get("tokenization") == "joint"]:
        found.append(
            f"warning: {result.name}: {', '.join(joint)} with tokenization joint; the published ones with separate"
        )
    if limited := [task for task, record in records.items() if record["settings"].get("limit")]:
        found.append(f"warning: {result.name}: {', '.join(limited)} on the first items alone (limit)")
    return found
