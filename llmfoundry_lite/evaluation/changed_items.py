"""Lists the items of a task that a model wins and loses against another one, with the scores of every option.

    llmfoundry-lite compare results/s/base.json results/s/ours.json --items arc_easy

`find_task` finds the task that the user names, and `find_changed_items` its items. `print_changed_items` prints some of
them, and `write_changed_items` writes all. Results of older releases have no texts of questions, and logs of other
tools have no scores of options; what an item lacks is left out.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from llmfoundry_lite.config.task_types import BITS, BPB
from llmfoundry_lite.errors import DataError, find_nearest, printable
from llmfoundry_lite.evaluation.means import is_named, label_of
from llmfoundry_lite.evaluation.metrics import LENGTHS
from llmfoundry_lite.evaluation.pairs import Comparison
from llmfoundry_lite.evaluation.records import BITS_METRICS, Record, items_with
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.tables import Table

MAX_QUESTION_CHARACTERS = 1_000
MAX_OPTION_CHARACTERS = 300
"""Longest texts that are printed. Of a longer one, the beginning is."""
MAX_OPTIONS = 20
LEGEND = (
    "* marks the right option, and < the one that a model chose. Of a language modelling task, < marks an answer whose "
    "tokens were all the likeliest."
)


class ChangedItem(NamedTuple):
    """An item on which two models have different scores, with the record that each of them has."""

    first: Record
    other: Record
    is_won: bool
    """The other model has the better score."""


class ChangedItems(NamedTuple):
    """The items of a task that the other model won and lost against the first, in the order of the file."""

    task: str
    metric: str
    first_name: str
    other_name: str
    items: list[ChangedItem]


def find_task(all_results: Sequence[Results], name: str, skip: Sequence[str] = ()) -> str:
    """Return the name in results of the task that the user names, by its full name or, if only one has it, its label.

    `skip` names tasks that are not compared. Raises DataError, with the nearest name, if not every result has the task,
    and for a held-out text.
    """
    common_tasks: list[str] = []
    for task in all_results[0].items:
        is_common = all(task in results.items for results in all_results)
        if is_common and not is_named(task, skip):
            common_tasks.append(task)

    matching = [task for task in common_tasks if name in (task, label_of(task))]
    if name in matching:
        matching = [name]
    if len(matching) > 1:
        raise DataError(f"--items {name}: there are {', '.join(matching)}; name one of them")
    if not matching:
        nearest = find_nearest(name, [*common_tasks, *map(label_of, common_tasks)])
        hint = f"did you mean {nearest}?" if nearest else f"they have {', '.join(common_tasks) or 'none in common'}"
        raise DataError(f"--items {name}: not a task that all results have; {hint}")

    (task,) = matching
    if all_results[0].tasks[task]["metric"] == BITS:
        raise DataError(f"--items {name}: a held-out text has no questions; name another task")
    return task


def find_changed_items(
    comparison: Comparison, task: str, first_results: Results, other_results: Results
) -> ChangedItems:
    """Return the items of a task on which two models have different scores, by the metric that they are compared by."""
    (metric,) = [row.metric for row in comparison.tasks if row.task == task]
    other_items = {item["index"]: item for item in other_results.items[task]}
    changed: list[ChangedItem] = []
    for first in items_with(first_results.items[task], metric):
        other = other_items.get(first["index"])
        if other is None or metric not in other or first[metric] == other[metric]:
            continue
        is_more = other[metric] > first[metric]
        is_won = not is_more if metric in BITS_METRICS else is_more
        changed.append(ChangedItem(first, other, is_won))
    return ChangedItems(task, metric, comparison.first, comparison.other, changed)


# ----------------------------------------------------------------------------------------------------------- printing


def print_changed_items(all_changed: Sequence[ChangedItems], console: Console, max_items: int) -> None:
    """Print for each pair of models up to `max_items` items that the other model won, and as many that it lost."""
    for changed in all_changed:
        _print_pair(changed, console, max_items)
    records = [item.first for changed in all_changed for item in changed.items]
    if any("row" in record for record in records):  # a hash, which items of logs have
        console.print("Logs of other tools are read without the texts of questions; the logs have them.")
    elif not all("question" in record for record in records):
        console.print("These results do not have the texts of questions; evaluate again with redo=true to record them.")
    console.print(Text(LEGEND, style="dim"))


def _print_pair(changed: ChangedItems, console: Console, max_items: int) -> None:
    """Print up to `max_items` items that were won, and as many that were lost, under a heading each."""
    _, unit = LENGTHS.get(changed.metric, ("", ""))
    scores = f"nats per {unit}" if unit else "nats"
    for is_won, verb in ((True, "won"), (False, "lost")):
        items = [item for item in changed.items if item.is_won == is_won]
        count = f"{len(items):,} item{'' if len(items) == 1 else 's'}"
        heading = (
            f"{changed.task} by {changed.metric}: {changed.other_name} {verb} {count} against {changed.first_name}"
        )
        if len(items) > max_items:
            heading += f", of which the first {max_items:,} follow"
        if items:
            heading += f" (scores in {scores})"
        console.print()
        console.print(Text(printable(heading), style="bold"))
        console.print()
        for item in items[:max_items]:
            _print_item(item, changed, console)


def _print_item(item: ChangedItem, changed: ChangedItems, console: Console) -> None:
    """Print one item: which row it is, its question, and a table of its options or of the generated answers."""
    name = item.first.get("id") or f"row {item.first['index'] + 1:,}"
    category = f", {item.first['category']}" if "category" in item.first else ""
    console.print(Text(printable(f"{name}{category}")))
    if "question" in item.first:
        question = _shorten(item.first["question"], MAX_QUESTION_CHARACTERS)
        console.print(Text(printable(question, keep="\n")))
    _table_of(item, changed).print(console)
    if changed.metric in BITS_METRICS:
        first_bits = f"{item.first[changed.metric]:.4f} for {changed.first_name}"
        other_bits = f"{item.other[changed.metric]:.4f} for {changed.other_name}"
        console.print(Text(printable(f"{changed.metric} of the right answer: {first_bits}, {other_bits}")))
    console.print()


def _table_of(item: ChangedItem, changed: ChangedItems) -> Table:
    """Return the table of an item: both models' scores of each option, or their answers, or else their results."""
    names = (changed.first_name, changed.other_name)
    records = (item.first, item.other)
    is_generated = all("text" in record for record in records)
    if is_generated and changed.metric != BPB:
        return _table_of_answers(item, names)

    have_scores = all("log_probability" in record for record in records)
    if have_scores and len(item.first["log_probability"]) == len(item.other["log_probability"]):
        return _table_of_options(item, changed, is_generated=is_generated)
    return Table("", names, [[f"{record[changed.metric]:.3f}" for record in records]], right=(0, 1))


def _table_of_answers(item: ChangedItem, names: tuple[str, str]) -> Table:
    """Return a table with the answers that both models generated, and those that count as right."""
    answers = [(name, record["text"]) for name, record in zip(names, (item.first, item.other), strict=True)]
    answers.append(("accepted", ", ".join(item.first.get("answers", ()))))
    rows = [(name, _shorten(text, MAX_OPTION_CHARACTERS)) for name, text in answers]
    return Table("", ["", "answer"], rows, right=())


def _table_of_options(item: ChangedItem, changed: ChangedItems, *, is_generated: bool) -> Table:
    """Return a table with a row for each option, and with the score that each model gives it.

    Of many options, the first MAX_OPTIONS are shown, and the right one. Of a generated answer, the only option is the
    first answer that counts as right.
    """
    records = (item.first, item.other)
    scores_of_models = [_scores_of(record, changed.metric) for record in records]
    chosen_options = [_chosen_option(record, changed.metric) for record in records]
    gold = 0 if is_generated else item.first.get("gold")
    texts = item.first.get("choices") or item.first.get("answers") or []

    num_options = len(scores_of_models[0])
    rows: list[list[str]] = []
    for option in range(num_options):
        if option >= MAX_OPTIONS and option != gold:
            continue
        cells = ["*" if option == gold else ""]
        for scores, chosen in zip(scores_of_models, chosen_options, strict=True):
            mark = "<" if chosen == option else ""
            cells.append(f"{scores[option]:8.3f} {mark}")
        text = texts[option] if option < len(texts) else ""
        rows.append([*cells, _shorten(text, MAX_OPTION_CHARACTERS)])
    heading = "choice" if num_options > 1 else "answer"
    return Table("", ["", changed.first_name, changed.other_name, heading], rows, right=())


def _scores_of(record: Record, metric: str) -> list[float]:
    """Return the number of each option of an item by which a metric chooses: nats, or nats per token or character."""
    nats = record["log_probability"]
    length_key, _ = LENGTHS.get(metric, ("", ""))
    if length_key not in record:
        return nats
    return [total / max(length, 1) for total, length in zip(nats, record[length_key], strict=True)]


def _chosen_option(record: Record, metric: str) -> int | None:
    """Return the option that a model chose. A language modelling task has one, which is chosen if it is right."""
    if metric == BPB:  # which chooses nothing, so that the choice by the whole log-probability is shown
        metric = "acc"
    chosen = record.get("chosen")
    if isinstance(chosen, Mapping):
        return chosen.get(metric)
    return 0 if record[metric] else None


def _shorten(text: str, max_characters: int) -> str:
    """Return a text, or its beginning with an ellipsis if it is longer than `max_characters`."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"


# ------------------------------------------------------------------------------------------------------------ writing

KEYS_OF_QUESTION = ("index", "id", "category", "question", "choices", "gold", "answers")
KEYS_OF_ANSWER = ("log_probability", "num_tokens", "num_characters", "num_bytes", "chosen", "text")


def write_changed_items(all_changed: Sequence[ChangedItems], folder: Path) -> Path:
    """Write all items that were won or lost to `compare-items.jsonl` in a folder, one a line, and return its path."""
    lines = [json.dumps(_as_json(changed, item)) for changed in all_changed for item in changed.items]
    path = folder / "compare-items.jsonl"
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def _as_json(changed: ChangedItems, item: ChangedItem) -> dict[str, Any]:
    """Return the line of an item: what was asked, and the score and the answer of both models by their names."""
    answers: dict[str, Any] = {}
    for name, record in ((changed.first_name, item.first), (changed.other_name, item.other)):
        answer = {key: record[key] for key in KEYS_OF_ANSWER if key in record}
        answers[name] = {changed.metric: record[changed.metric], **answer}
    return {
        "task": changed.task,
        "metric": changed.metric,
        "won_by": changed.other_name if item.is_won else changed.first_name,
        **{key: item.first[key] for key in KEYS_OF_QUESTION if key in item.first},
        "answers_of": answers,
    }
