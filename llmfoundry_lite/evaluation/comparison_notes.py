"""Notes on a comparison: what the reader has to know besides its numbers. `notes_on` collects them."""

from collections.abc import Iterator, Sequence

from llmfoundry_lite.config.task_types import BPB
from llmfoundry_lite.data.spelling import percent
from llmfoundry_lite.evaluation.common_items import TextUnits, text_units
from llmfoundry_lite.evaluation.metrics import has_other_tokenizer
from llmfoundry_lite.evaluation.pairs import MetricComparison
from llmfoundry_lite.evaluation.records import (
    is_own_metric,
    items_with,
    limit_of_trial,
    lost_text_fraction,
    own_code_of,
)
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Counts
from llmfoundry_lite.evaluation.tables import name_tasks

FACTS = {
    "num_tokens_trained": "warning: token budgets differ: {} {:,} tokens, {} {:,}; more training is one reason to be "
    "better",
    "num_parameters": "warning: sizes differ: {} {:,} parameters, {} {:,}",
    "precision": "precision differs: {} {}, {} {}",
}
"""Fact of a result -> the note if two results differ in it. The note has places for the name and the fact of the first
result, and for those of the other one."""
TASK_FACTS = {
    "beginning": ([], "prompts begin with tokens {1} for {0}, {3} for {2}"),
    "generation": (None, "warning: answers are generated with {1} by {0}, {3} by {2}"),
    "num_trimmed": (0, "contexts cut to fit: {1:,} of {0}, {3:,} of {2}"),
}
"""Fact of a task -> (the value that counts if a record does not have it, the note if two records differ in it)."""


def notes_on(first_results: Results, other_results: Results, tasks: Sequence[MetricComparison]) -> list[str]:
    """Return notes on what may explain the differences of two models, or limits what they mean.

    The notes are printed below the table. They are about differences between the models and their evaluations, tasks
    that only one of them has, and facts of each task. `tasks` has the comparison of each common task.
    """
    both_names = f"{first_results.name} and {other_results.name}"
    notes: list[str] = []

    # Compare facts of the models. A fact that one result does not record is not compared.
    for key, text in FACTS.items():
        first_fact = getattr(first_results, key)
        other_fact = getattr(other_results, key)
        are_known = first_fact is not None and other_fact is not None
        if are_known and first_fact != other_fact:
            notes.append(text.format(first_results.name, first_fact, other_results.name, other_fact))
    if first_results.save_id is not None and first_results.save_id == other_results.save_id:
        notes.append(f"{both_names} are the same checkpoint")

    # Compare the code that evaluated them.
    first_code = _code_of(first_results, tasks)
    other_code = _code_of(other_results, tasks)
    if first_code != other_code:
        notes.append(
            f"evaluated by different code: {first_results.name} by {first_code}, {other_results.name} by {other_code}"
        )

    # Name the tasks that are not compared.
    notes += _note_on_missing_tasks(first_results, other_results)
    notes += _note_on_missing_tasks(other_results, first_results)

    # Add notes on each task that is compared. A note that several tasks have in common appears once, with their names.
    tasks_of_note: dict[str, list[str]] = {}
    for comparison in tasks:
        for note in _notes_on_task(comparison, first_results, other_results):
            tasks_of_note.setdefault(note, []).append(comparison.task)
    return [*notes, *(f"{name_tasks(names)}: {note}" for note, names in tasks_of_note.items())]


def notes_on_resolution(tasks: Sequence[MetricComparison]) -> list[str]:
    """Return a note on each text whose bootstrap has too few draws for the level that its p-value is compared with."""
    return [
        f"warning: {comparison.task}: its bootstrap can show no p below {comparison.min_p:.1g}, and with so many tests "
        f"{1 - comparison.confidence:.1g} decides; compare fewer models or tasks at once"
        for comparison in tasks
        if not comparison.is_resolved
    ]


def note_on_skipped(skip: Sequence[str]) -> list[str]:
    """Return a note that names the tasks which the user left out; empty if there are none."""
    return [f"left out, as asked: {', '.join(skip)}"] if skip else []


def _code_of(results: Results, tasks: Sequence[MetricComparison]) -> str:
    """Return the versions of the code that evaluated the compared tasks, separated by commas."""
    versions = {results.tasks[comparison.task]["code"] for comparison in tasks}
    return ", ".join(sorted(versions))


def _note_on_missing_tasks(results: Results, other_results: Results) -> list[str]:
    """Return a note that names the tasks which only `results` has; empty if there are none.

    It is a warning if `other_results` has no task of its own, as after an evaluation that was stopped.
    """
    missing_tasks = [task for task in results.items if task not in other_results.items]
    if not missing_tasks:
        return []
    note = f"only in {results.name}, left out: {', '.join(missing_tasks)}"
    is_subset = all(task in results.items for task in other_results.items)
    if is_subset and results.suite == other_results.suite:
        num_present = len(other_results.items)
        return [
            f"warning: {other_results.name} has {num_present} of the {len(results.items)} tasks of {results.name}; if "
            f"its evaluation was stopped, run the same command again to finish it; {note}"
        ]
    return [note]


def _notes_on_task(comparison: MetricComparison, first_results: Results, other_results: Results) -> Iterator[str]:
    """Yield notes on the comparison of one task, in the order in which they are printed.

    They say whether the task was only a trial, in which facts its two records differ, how much text a tokenizer loses,
    and whether there are too few independent items or documents for a verdict.
    """
    task = comparison.task
    limit = limit_of_trial(first_results.tasks[task])
    if limit:
        yield f"only the first {limit:,} items (limit): a try, not a result"

    own_code = own_code_of(first_results.tasks[task])
    if own_code:
        yield f"scored by {', '.join(own_code)}, code of its user's own whose version is not recorded"

    # Compare facts of the task. Tokens at the beginning of prompts follow from the tokenizer, which has a note already.
    for key, (default, text) in TASK_FACTS.items():
        first_fact = first_results.tasks[task].get(key, default)
        other_fact = other_results.tasks[task].get(key, default)
        follows_from_tokenizer = key == "beginning" and has_other_tokenizer(first_results, other_results)
        if first_fact != other_fact and not follows_from_tokenizer:
            yield text.format(first_results.name, first_fact, other_results.name, other_fact)

    for results in (first_results, other_results):
        lost_fraction = lost_text_fraction(results.tasks[task])
        if lost_fraction:
            yield f"warning: the tokenizer of {results.name} loses {percent(lost_fraction)} of the text"

    # Counts of wins and losses exist for questions, and not for held-out text.
    if comparison.counts is None:
        yield from _notes_on_documents(text_units(task, first_results, other_results))
    else:
        yield from _notes_on_items(comparison, comparison.counts, first_results, other_results)


def _notes_on_documents(units: TextUnits) -> Iterator[str]:
    """Yield a note if a held-out text has too few documents for a verdict, or if windows stand in for documents."""
    num_units = len(units.first)
    if num_units < MIN_DOCUMENTS:
        noun = _count(num_units, "document")
        if units.are_windows and num_units > 1:
            noun = f"one document of {num_units} windows"
        yield f"{noun}: no interval and no verdict below {MIN_DOCUMENTS}"
    elif units.are_windows:
        yield "one document: its windows are resampled, as if they were independent"


def _notes_on_items(
    comparison: MetricComparison, counts: Counts, first_results: Results, other_results: Results
) -> Iterator[str]:
    """Yield notes on items that only one model was asked, and on how many items are independent.

    `counts` has the number of independent units, which are clusters if the items have any, and the effective number,
    which is smaller if units differ in weight. There is no verdict with fewer than MIN_UNITS or, for a bootstrap,
    MIN_DOCUMENTS.
    """
    # Items that only one model has been asked, for instance because they did not fit into the other one's context.
    task = comparison.task
    first_indices = {item["index"] for item in items_with(first_results.items[task], comparison.metric)}
    other_indices = {item["index"] for item in items_with(other_results.items[task], comparison.metric)}
    num_left_out = len(first_indices ^ other_indices)
    if num_left_out:
        yield f"{num_left_out:,} items that only one could be asked are left out"

    is_bootstrap = comparison.metric == BPB or is_own_metric(first_results.tasks[task], comparison.metric)
    min_units = MIN_DOCUMENTS if is_bootstrap else MIN_UNITS
    has_clusters = "cluster" in first_results.items[task][0]
    if counts.num_effective < min_units:
        noun = _count(counts.num_units, "cluster" if has_clusters else "item")
        if counts.num_units >= min_units:
            noun += f", of such different weight that they are worth {counts.num_effective:.1f} equal ones"
        yield f"{noun}: no interval and no verdict below {min_units}"
    elif has_clusters:
        yield f"{comparison.n:,} items in {counts.num_units:,} clusters, which are what is independent"


def _count(number: int, noun: str) -> str:
    """Return a number with its noun: "one document", "3 documents"."""
    return f"one {noun}" if number == 1 else f"{number} {noun}s"
