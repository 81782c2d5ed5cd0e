"""The one rule that says by which metric a task is shown and compared: in tables, averages, gauntlets and `compare`.

A task with choices is scored by several accuracies and by the bits per byte of the right answer (`bpb`), which a record
has all of. `choose_metrics` picks one for each task of several results, and `by_metrics` returns the results with that
one as their main metric, so that everything that is computed from them agrees.

`acc_per_token`, the default of such tasks, divides an answer's log-probability by its number of tokens. With two
tokenizers, the same distribution over texts can then choose different answers. Models with different tokenizers are
shown and compared by `acc_norm` (per character) instead. `acc_per_byte` and `bpb` can be compared as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmfoundry_lite.config.task_types import BPB, METRICS
from llmfoundry_lite.errors import DataError, find_nearest
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.results import Results, read_others

PER_TOKEN = "acc_per_token"
PER_CHARACTER = "acc_norm"
LENGTHS = {
    "acc_per_token": ("num_tokens", "token"),
    "acc_norm": ("num_characters", "character"),
    "acc_per_byte": ("num_bytes", "byte"),
    BPB: ("num_bytes", "byte"),
}
"""Metric -> the key of the lengths by which it divides log-probabilities, and their unit."""


def has_other_tokenizer(first_results: Results, other_results: Results) -> bool:
    """Return whether two models are known to have different tokenizers. Logs of other tools may not record them."""
    are_known = bool(first_results.tokenizer and other_results.tokenizer)
    return are_known and first_results.tokenizer != other_results.tokenizer


def have_different_tokenizers(all_results: Sequence[Results]) -> bool:
    """Return whether any two of several models are known to have different tokenizers."""
    known = {results.tokenizer for results in all_results if results.tokenizer}
    return len(known) > 1


def choose_metrics(all_results: Sequence[Results], asked: str | None = None) -> dict[str, str]:
    """Choose the metric of each task that any of several results has. Returns task -> metric.

    asked: the metric that the user asks for, such as `acc_norm`. Tasks that do not have it, such as a held-out text,
        keep their own.

    The metric of a task is the one that is asked for, if all models have it; else the main metric of the first model's
    record, except that `acc_norm` takes the place of `acc_per_token` if tokenizers differ and all models have it.
    """
    tokenizers_differ = have_different_tokenizers(all_results)
    records_of_task: dict[str, list[Record]] = {}
    for results in all_results:
        for task, record in results.tasks.items():
            records_of_task.setdefault(task, []).append(record)

    metrics: dict[str, str] = {}
    for task, records in records_of_task.items():
        common_metrics = set.intersection(*(set(metrics_of(record)) for record in records))
        metric = str(records[0]["metric"])
        if metric == PER_TOKEN and tokenizers_differ and PER_CHARACTER in common_metrics:
            metric = PER_CHARACTER
        if asked is not None and asked in common_metrics:
            metric = asked
        metrics[task] = metric
    return metrics


def refuse_unknown_metric(all_results: Sequence[Results], asked: str | None) -> None:
    """Raise DataError if no task of several results has the metric that the user asks for.

    A comparison calls this. A table is made after an evaluation, which must not fail then, so it keeps each task's own.
    """
    known = {metric for results in all_results for record in results.tasks.values() for metric in metrics_of(record)}
    if asked is None or asked in known:
        return
    near = find_nearest(asked, sorted(known))
    hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(known))}"
    raise DataError(f"metric: no task has {asked!r}; {hint}")


def metrics_of(record: Record) -> list[str]:
    """Return the metrics by which a task's record can be shown and compared, from the values of its items.

    A log of another tool lists them in the record. This library's records have some of METRICS, or those of a text.
    """
    names = [record["metric"], *record.get("metrics", METRICS), *(record.get("own_metrics") or [])]
    return [name for name in dict.fromkeys(names) if name in record]


def by_metrics(all_results: Sequence[Results], metrics: Mapping[str, str]) -> list[Results]:
    """Return results whose main metrics are these, by task. Records that do not have theirs keep their own."""
    return [replace(results, tasks=_with_main_metrics(results.tasks, metrics)) for results in all_results]


def _with_main_metrics(records: Mapping[str, Record], metrics: Mapping[str, str]) -> dict[str, Record]:
    """Return the records of a model's tasks with other main metrics."""
    changed: dict[str, Record] = {}
    for task, record in records.items():
        metric = metrics.get(task, record["metric"])
        if metric == record["metric"] or metric not in record:
            changed[task] = record
            continue
        # Ties, and the means of categories, are recorded for the former main metric only.
        kept = {key: value for key, value in record.items() if key not in ("num_ties", "categories")}
        changed[task] = kept | {"metric": metric}
    return changed


def describe_choice(all_results: Sequence[Results], metrics: Mapping[str, str], asked: str | None) -> list[str]:
    """Return notes for the reader on tasks that are shown by another metric than their own, or by a misleading one.

    `metrics` is what `choose_metrics` returned for these results.
    """
    notes = _notes_on_lacking(all_results, asked)
    if not have_different_tokenizers(all_results):
        return notes
    depends_on_tokenizer = [task for task, metric in metrics.items() if metric == PER_TOKEN]
    if asked == PER_TOKEN and depends_on_tokenizer:
        return [
            *notes,
            f"warning: the models have different tokenizers, and {PER_TOKEN}, as asked for, depends on how a tokenizer "
            f"divides an answer; {PER_CHARACTER} (per character) does not",
        ]
    is_replaced = any(
        record["metric"] == PER_TOKEN and metrics[task] == PER_CHARACTER
        for results in all_results
        for task, record in results.tasks.items()
    )
    if asked is None and is_replaced:
        return [
            *notes,
            f"warning: the models have different tokenizers: {PER_CHARACTER} (per character) stands for {PER_TOKEN}, "
            "which depends on how a tokenizer divides an answer",
        ]
    return notes


def _notes_on_lacking(all_results: Sequence[Results], asked: str | None) -> list[str]:
    """Return a note on each model without the metric that the user asks for, in tasks where another model has it.

    Results of older releases have fewer metrics. Such a task is shown by its own metric.
    """
    tasks_with_metric: set[str] = set()
    for results in all_results:
        tasks_with_metric.update(task for task, record in results.tasks.items() if asked in metrics_of(record))

    notes: list[str] = []
    for results in all_results:
        lacking = [task for task in results.tasks if task in tasks_with_metric and asked not in results.tasks[task]]
        if lacking:
            tasks = lacking[0] if len(lacking) == 1 else f"{lacking[0]} and {len(lacking) - 1} more"
            is_other_tools = "metrics" in results.tasks[lacking[0]]
            remedy = "" if is_other_tools else "; redo=true evaluates it again"
            name = results.name or results.model
            notes.append(f"warning: {name} has no {asked} of {tasks}, which another metric shows{remedy}")
    return notes


def note_on_table(all_results: Sequence[Results], metrics: Mapping[str, str]) -> list[str]:
    """Return a note on each suite whose table shows tasks by another metric than that by which they are compared.

    A table has all models of a suite, and one with another tokenizer changes its metrics. A comparison of models with
    equal tokenizers has the metrics that suit them. `metrics` is what `choose_metrics` returned for these results.
    """
    notes: list[str] = []
    folders = dict.fromkeys(results.path.parent for results in all_results if results.path.name)
    for folder in folders:
        compared = [results for results in all_results if results.path.parent == folder]
        others, _ = read_others(folder, [results.path.stem for results in compared])
        metrics_of_table = choose_metrics([*compared, *others])
        is_replaced = any(
            metrics.get(task) == PER_TOKEN and metric == PER_CHARACTER for task, metric in metrics_of_table.items()
        )
        if is_replaced:
            notes.append(
                f"the table of the suite {compared[0].suite} shows {PER_CHARACTER} instead, because it has models with "
                f"other tokenizers; --metric {PER_CHARACTER} compares by it"
            )
    return notes


def other_metrics(record: Record, other_record: Record, *, tokenizers_differ: bool) -> list[str]:
    """Return the metrics, besides the main one, by which two models can be compared on a task.

    Both records must have the metric. `acc_per_token` is left out for models with different tokenizers.
    """
    metrics: list[str] = []
    for metric in metrics_of(record):
        both_have_it = metric in metrics_of(other_record)
        depends_on_tokenizer = metric == PER_TOKEN and tokenizers_differ
        if metric != record["metric"] and both_have_it and not depends_on_tokenizer:
            metrics.append(metric)
    return metrics
