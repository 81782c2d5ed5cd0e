"""Compares the results of several models with those of the first, item by item.

`compare` checks that two models were asked the same questions, pairs their items, and tests the difference of each
task and of the mean of all tasks. `significance.py` has the tests, and `pairs.py` the resulting objects and their
output. The last part of this file writes notes on what may explain a difference.

A difference counts as significant if its p-value, corrected for the number of tests (Holm), is below 0.05. Its interval
is at the level that its p-value is compared with, so it excludes 0 exactly if the difference is significant.

Items, or clusters of them, count as independent. An item that several tasks ask (with other examples, prompts or
labels, but from the same data) is one item: in the mean, its differences in all tasks are added up first.

`metrics.py` says by which metric a task is compared: the same as in the tables.
"""

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmfoundry_lite.config.eval_schema import BPB
from llmfoundry_lite.data.spelling import percent
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.common_items import WeightedTask, collect_units
from llmfoundry_lite.evaluation.metrics import (
    by_metrics,
    choose_metrics,
    describe_choice,
    has_other_tokenizer,
    note_on_table,
    other_metrics,
    refuse_unknown_metric,
)
from llmfoundry_lite.evaluation.pairs import Comparison, MetricComparison
from llmfoundry_lite.evaluation.records import (
    BITS,
    BITS_METRICS,
    Record,
    bits_per_byte,
    by_document,
    items_with,
    label_of,
    limit_of_trial,
    lost_text_fraction,
    text_row,
    weights_of_tasks,
)
from llmfoundry_lite.evaluation.results import Results, load_any
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Counts, Floats

MISSING_BYTE_BITS = 8
"""The most bits that a byte of lost text could add: as many as a byte costs that is not predicted at all."""


def compare(
    results: Sequence[Results],
    *,
    skip: Sequence[str] = (),
    all_metrics: bool = False,
    metric: str | None = None,
    all_pairs: bool = False,
) -> list[Comparison]:
    """Compare each result with the first, and return one comparison for each of the others.

    results: two or more results, loaded with their items.
    skip: names of tasks to leave out.
    all_metrics: compare tasks by all their metrics, and not only by the one that tables show.
    metric: compare tasks that have this metric by it, such as `acc_norm`; None takes the one that tables show.
    all_pairs: compare each two results, not only each with the first. P-values are corrected for all of these tests.

    Raises DataError for results that cannot be compared, naming the task and the reason, and for a task in `skip` that
    no result has.
    """
    refuse_unknown_tasks(results, skip)

    # Choose the metrics by all results together, as for the table, and count the tests that this makes.
    refuse_unknown_metric(results, metric)
    metrics = choose_metrics(results, metric)
    notes = describe_choice(results, metrics, metric)
    if metric is None:
        notes += note_on_table(results, metrics)
    pairs = list(combinations(by_metrics(results, metrics), 2))
    if not all_pairs:
        pairs = pairs[: len(results) - 1]  # those of the first result come first
    common_tasks = [_find_common_tasks(first_results, other_results, skip) for first_results, other_results in pairs]
    num_tests = sum(map(len, common_tasks))

    comparisons: list[Comparison] = []
    for (first_results, other_results), tasks in zip(pairs, common_tasks, strict=True):
        comparison = _compare_two(
            first_results, other_results, tasks, all_metrics=all_metrics, smallest_level=significance.LEVEL / num_tests
        )
        comparison.notes = [*notes, *comparison.notes, *_note_on_skipped(skip)]
        comparisons.append(comparison)

    # With many tests, some p-values are small by chance, and a reader looks at the smallest. So they are corrected for
    # the number of tests, separately among the main metrics, the means and the other metrics.
    main_metrics: list[MetricComparison] = []
    means: list[MetricComparison] = []
    other_metrics: list[MetricComparison] = []
    for comparison in comparisons:
        main_metrics += comparison.tasks
        other_metrics += comparison.other_metrics
        if comparison.mean is not None:
            means.append(comparison.mean)
    for family in (main_metrics, means, other_metrics):
        p_corrected, levels = significance.holm([tested.p for tested in family])
        for tested, p, level in zip(family, p_corrected, levels, strict=True):
            tested.decide(p, level)
    for comparison in comparisons:
        comparison.notes += _notes_on_resolution(comparison.tasks)
    return comparisons


def compare_files(
    first: str | os.PathLike[str] | Results,
    other: str | os.PathLike[str] | Results,
    *,
    skip: str | Sequence[str] = (),
    all_metrics: bool = False,
    metric: str | None = None,
    cluster: str | None = None,
) -> Comparison:
    """Compare two evaluation results item by item, as `llmfoundry-lite compare` does.

    Each is a path, or what `lf.evaluate` returned for a model.

    The result prints as the same table. Differences are `other` minus `first`. It says "better" only if a corrected
    test supports it.

    >>> pair = lf.compare("results/base.json", "results/ours.json")
    >>> pair.sentence
    'ours is better than base by 0.150 [0.107, 0.201] on the mean of 2 tasks'
    >>> task = pair.tasks[0]
    >>> task.task, task.n, task.wins, task.losses, task.verdict
    ('arc_easy/0-shot', 100, 20, 0, 'better by 0.200')

    Both may be logs of lm-evaluation-harness or of Inspect; `cluster` names a field that their related rows share. A
    folder may be given if it has only one result. `skip` names tasks to leave out. With a `metric`, such as `acc_norm`,
    tasks that have it are compared by it.

    Raises DataError for results that cannot be compared, with the task and the reason.
    """
    left_out = [skip] if isinstance(skip, str) else skip or ()
    if isinstance(first, Results) and isinstance(other, Results) and first.items and other.items:
        # As they are in memory, because the files may have been replaced since.
        names = [first.model, other.model]
        if first.model == other.model:
            names = [f"{first.model} (1)", f"{other.model} (2)"]
        loaded = [replace(results, name=name) for results, name in zip((first, other), names, strict=True)]
    else:
        paths = [result.path if isinstance(result, Results) else Path(result) for result in (first, other)]
        loaded = load_any(paths, cluster)
    return compare(loaded, skip=left_out, all_metrics=all_metrics, metric=metric)[0]


def refuse_unknown_tasks(results: Sequence[Results], skip: Sequence[str]) -> None:
    """Raise DataError for a task in `skip` that no result has."""
    known_tasks = {task for result in results for task in result.items}
    for task in skip:
        if task not in known_tasks:
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known_tasks))}")


def _find_common_tasks(first_results: Results, other_results: Results, skip: Sequence[str]) -> list[str]:
    """Return the tasks that both results have, except those in `skip`.

    Raises DataError if there are none, or if the models were not asked the same in one of them.
    """
    common_tasks = [task for task in first_results.items if task in other_results.items and task not in skip]
    if not common_tasks:
        raise DataError(
            f"{first_results.name} and {other_results.name} have no task in common: {', '.join(first_results.items)} "
            f"against {', '.join(other_results.items)}"
        )
    for task in common_tasks:
        check_same_questions(task, first_results, other_results)
    return common_tasks


def _compare_two(
    first_results: Results, other_results: Results, tasks: Sequence[str], *, all_metrics: bool, smallest_level: float
) -> Comparison:
    """Compare two models' results by the given tasks, which both have.

    Each task is compared by its main metric, with `all_metrics` also by its other metrics, and the mean of all
    accuracies, or of all tasks by `bpb`, if there are at least two. `smallest_level` is the lowest level that a p-value
    may be compared with. The verdicts are still open: `compare` corrects the p-values for the number of all tests, and
    then calls `decide` on each comparison.
    """
    # Compare each task by its main metric and, if asked for, by its other metrics.
    main_metrics = {task: str(first_results.tasks[task]["metric"]) for task in tasks}
    comparisons: list[MetricComparison] = []
    other_comparisons: list[MetricComparison] = []
    tokenizers_differ = has_other_tokenizer(first_results, other_results)
    for task, metric in main_metrics.items():
        comparisons.append(_compare_task(task, metric, first_results, other_results, smallest_level))
        if all_metrics:
            records = first_results.tasks[task], other_results.tasks[task]
            for other_metric in other_metrics(*records, tokenizers_differ=tokenizers_differ):
                other_comparisons.append(
                    _compare_task(task, other_metric, first_results, other_results, smallest_level)
                )

    # Compare the mean of all accuracies or, if there are none, that of the bits per byte of answers.
    accuracies = [(task, metric) for task, metric in main_metrics.items() if metric not in BITS_METRICS]
    tasks_in_bpb = [task for task, metric in main_metrics.items() if metric == BPB]
    mean = None
    if len(accuracies) > 1:
        mean = _compare_accuracies(accuracies, first_results, other_results)
    elif not accuracies and len(tasks_in_bpb) > 1:
        mean = _compare_answer_bits(tasks_in_bpb, first_results, other_results, smallest_level)
    return Comparison(
        first=first_results.name,
        other=other_results.name,
        tasks=comparisons,
        mean=mean,
        other_metrics=other_comparisons,
        notes=notes_on(first_results, other_results, comparisons),
    )


# ----------------------------------------------------------------------------------------------- equal questions


def check_same_questions(task: str, first_results: Results, other_results: Results) -> None:
    """Raise DataError unless both models answered the same questions of a task, asked in the same way.

    Records have a fingerprint of the data, and one of the data with all settings. The error explains a difference: it
    lists every setting that differs, and names the first question that does. Held-out text that models with different
    tokenizers read must also have the same number of bytes in each document.
    """
    first_record = first_results.tasks[task]
    other_record = other_results.tasks[task]
    is_text = first_record["type"] == "perplexity"
    tokenizers_differ = has_other_tokenizer(first_results, other_results)
    first_other_row = _first_different("row", task, first_results, other_results)

    # Compare the settings.
    differences = _different_settings(task, first_results, other_results, has_other_rows=bool(first_other_row))
    limit = first_record["settings"].get("limit")
    limit_differs = limit != other_record["settings"].get("limit")
    if is_text and tokenizers_differ and limit is not None and not limit_differs:
        differences.append(f"their tokenizers differ, so that limit {limit!r}, of windows, ends elsewhere in the text")
        limit_differs = True

    # Compare the data. The fingerprint covers a text only up to its limit, so different limits alone change it.
    has_same_data = first_record["data_fingerprint"] == other_record["data_fingerprint"]
    if not has_same_data and not (is_text and limit_differs):
        differences.append(f"the data ({first_record['n']:,} items against {other_record['n']:,}{first_other_row})")

    # Compare everything else that the fingerprint covers. Windows of a text depend on the tokenizer, so there it says
    # nothing about models with different tokenizers.
    has_same_fingerprint = first_record["fingerprint"] == other_record["fingerprint"]
    if not differences and not has_same_fingerprint and not (is_text and tokenizers_differ):
        fingerprints = f"{first_record['fingerprint']} against {other_record['fingerprint']}"
        differences.append(f"something that no setting shows (fingerprint {fingerprints})")

    if differences:
        remedy = "evaluate both with one task file"
        if limit_differs:
            remedy = "evaluate both without limit"
        elif has_same_data and first_record["settings"].get("max_seq_len") != other_record["settings"].get(
            "max_seq_len"
        ):
            remedy = f"evaluate both with max_seq_len={_common_length(first_record, other_record)}"
        raise DataError(
            f"{task}: {first_results.name} and {other_results.name} were not asked the same: "
            f"{'; '.join(differences)}; {remedy}, or leave the task out: --skip {task}"
        )
    if is_text and tokenizers_differ and has_same_fingerprint:
        _check_same_bytes(task, first_results, other_results)


def _common_length(first_record: Record, other_record: Record) -> int:
    """Return the context length with which both models can be asked the same: the smaller one of two records.

    A record has the length only if it had an effect, so one of them may lack it.
    """
    lengths = [record["settings"].get("max_seq_len") for record in (first_record, other_record)]
    return min(length for length in lengths if length is not None)


def _different_settings(
    task: str, first_results: Results, other_results: Results, *, has_other_rows: bool
) -> list[str]:
    """Describe each setting of a task that differs between two results, such as "num_fewshot 0 against 5".

    has_other_rows: the questions differ. Their prompts then differ as well, and are not listed.

    Returns an empty list if all settings are equal.
    """
    first_record = first_results.tasks[task]
    other_record = other_results.tasks[task]
    differences: list[str] = []

    # Compare facts that the record has outside its settings.
    different_facts: list[str] = []
    for key in ("type", "num_fewshot", "tokenization", "metric"):
        if first_record.get(key) != other_record.get(key):
            different_facts.append(key)
            differences.append(f"{key} {first_record.get(key)!r} against {other_record.get(key)!r}")

    # Compare every setting that either record has.
    first_settings = first_record["settings"]
    other_settings = other_record["settings"]
    for key in {**first_settings, **other_settings}:
        first_setting = first_settings.get(key)
        other_setting = other_settings.get(key)
        if first_setting == other_setting or key in different_facts:
            continue
        if key == "stop_tokens":  # a property of each model's tokenizer, not of the task
            continue

        # Logs of another tool have a hash of all prompts, which a reader cannot use. Name the first that differs.
        are_hashes = str(first_setting).startswith("sha256:") and str(other_setting).startswith("sha256:")
        if key == "prompts" and are_hashes:
            if not has_other_rows:
                differences.append(f"their prompts{_first_different('prompt', task, first_results, other_results)}")
            continue

        counts = f" ({first_record['n']:,} items against {other_record['n']:,})" if key == "limit" else ""
        differences.append(f"{key} {first_setting!r} against {other_setting!r}{counts}")
    return differences


def _check_same_bytes(task: str, first_results: Results, other_results: Results) -> None:
    """Raise DataError unless each document of a held-out text has the same number of bytes for both models.

    A data set of token ids is read as different texts by two tokenizers. Windows depend on the tokenizer, too, but the
    bytes of a document's windows add up to those of the document.
    """
    first_bytes = by_document(first_results.items[task])[:, 1]
    other_bytes = by_document(other_results.items[task])[:, 1]
    if not np.array_equal(first_bytes, other_bytes):
        raise DataError(
            f"{task}: the data are token ids, and {first_results.name} and {other_results.name} have different "
            f"tokenizers; evaluate both on a text file, or leave the task out: --skip {task}"
        )


def _first_different(compared_fact: str, task: str, first_results: Results, other_results: Results) -> str:
    """Name the first item of a task in which two results differ, to complete an error, or return an empty text.

    compared_fact: "row" compares the questions, and "prompt" the prompts.

    Returns for instance "; row 17 is the first with another question". Logs of other evaluation tools record hashes of
    both facts. Items of this library have the texts of their question and its options. Items of older releases lack
    these, and are compared by the right answer, the category, and the lengths or texts of the answers.
    """

    def read_fact(item: Record, *, has_question: bool) -> object:
        """Return what is compared: the hash of the compared fact, or the facts that make the item's question."""
        if compared_fact == "prompt" or "row" in item:
            return item.get(compared_fact)
        texts = ("question", "choices") if has_question else ("num_characters",)
        return [item.get(key) for key in (*texts, "gold", "answers", "category")]

    is_text = first_results.tasks[task]["type"] == "perplexity"
    other_items = {item["index"]: item for item in other_results.items.get(task, [])}
    for item in first_results.items.get(task, []):
        # An item that only one model was asked, or a window, which depends on the tokenizer, says nothing.
        other_item = other_items.get(item["index"])
        is_comparable = "row" in item or not is_text
        if other_item is None or not is_comparable:
            continue

        has_question = "question" in item and "question" in other_item
        fact = read_fact(item, has_question=has_question)
        other_fact = read_fact(other_item, has_question=has_question)
        if fact != other_fact:
            noun = "question" if compared_fact == "row" else "prompt"
            item_name = item.get("id") or f"row {item['index'] + 1}"
            return f"; {item_name} is the first with another {noun}"
    return ""


# ---------------------------------------------------------------------------------------------------------- numbers


def _compare_task(
    task: str, metric: str, first_results: Results, other_results: Results, smallest_level: float
) -> MetricComparison:
    """Compare one task by one metric: a bootstrap for bits per byte, and the score test for an accuracy.

    `smallest_level` is the lowest level that the p-value may be compared with. The bootstrap makes enough draws for it.
    """
    if metric == BITS:
        return _compare_texts(task, first_results, other_results, smallest_level)
    if metric == BPB:
        return _compare_answer_bits([task], first_results, other_results, smallest_level)
    return _compare_accuracies([(task, metric)], first_results, other_results)


def _compare_accuracies(
    metrics: Sequence[tuple[str, str]], first_results: Results, other_results: Results
) -> MetricComparison:
    """Compare the accuracy of a task, or the mean accuracy of several tasks, in which every label counts the same.

    `metrics` has (task, metric) for each task.
    """
    weights = weights_of_tasks([task for task, _ in metrics])
    if len(metrics) == 1:
        name, metric = metrics[0]
    else:
        name, metric = _name_of_mean([*weights]), "mean"
    weighted_tasks = [WeightedTask(task, task_metric, weights[task]) for task, task_metric in metrics]
    return compare_weighted(name, metric, weighted_tasks, first_results, other_results)


def compare_weighted(
    name: str, metric: str, tasks: Sequence[WeightedTask], first_results: Results, other_results: Results
) -> MetricComparison:
    """Compare a weighted sum of the accuracies of several tasks, such as their mean.

    `name` and `metric` are those of the comparison. The independent unit of the test is an item, or a cluster of items,
    as `collect_units` says.
    """
    units = collect_units(tasks, first_results, other_results)
    # The test takes weights that add up to 1, so the weighted mean is tested in place of the sum.
    counts = significance.count(units.differences_u, units.weights_u)

    def interval(level: float) -> tuple[float, float] | None:
        """Return the interval of the difference of the sums."""
        ends = significance.score_interval(counts, level)
        return None if ends is None else (ends[0] * units.total_weight, ends[1] * units.total_weight)

    return MetricComparison(
        task=name,
        metric=metric,
        first=units.first_sum,
        other=units.other_sum,
        difference=units.other_sum - units.first_sum,
        **_count_won(units.gains_i),
        p=significance.score_p(counts),
        test="score",
        error=math.sqrt(max(0.0, float(counts.variance))) * units.total_weight,
        interval=interval,
        counts=counts,
    )


def _compare_answer_bits(
    tasks: Sequence[str], first_results: Results, other_results: Results, smallest_level: float
) -> MetricComparison:
    """Compare the bits per byte of the right answers of a task, or their mean over several tasks, by a bootstrap.

    Items, or clusters of them, are drawn, each with the difference of the two models. Where they differ in weight, the
    mean of a draw is the sum of its differences over the sum of its weights. `smallest_level` decides how many draws
    are made.
    """
    weights = weights_of_tasks(tasks)
    weighted_tasks = [WeightedTask(task, BPB, weight) for task, weight in weights.items()]
    units = collect_units(weighted_tasks, first_results, other_results)
    name = tasks[0] if len(tasks) == 1 else _name_of_mean(tasks)

    counts = significance.count(units.differences_u, units.weights_u)
    generator = np.random.default_rng([significance.SEED, zlib.crc32(f"{name} {BPB}".encode())])
    no_difference_u = np.zeros_like(units.differences_u)
    result = significance.difference_of_ratios(
        np.stack([no_difference_u, units.weights_u], axis=1),
        np.stack([units.differences_u, units.weights_u], axis=1),
        generator,
        smallest_level,
        num_effective=counts.num_effective,
    )
    return MetricComparison(
        task=name,
        metric=BPB,
        first=units.first_sum,
        other=units.other_sum,
        difference=result.difference,
        **_count_won(-units.gains_i),  # fewer bits are better
        p=result.p,
        test="studentised bootstrap",
        error=result.error,
        interval=result.interval,
        min_p=result.min_p if counts.num_effective >= MIN_DOCUMENTS else 0.0,
        counts=counts,
    )


def _name_of_mean(tasks: Sequence[str]) -> str:
    """Return the name of a mean over tasks, in which a label with several numbers of examples counts once."""
    num_labels = len({label_of(task) for task in tasks})
    return f"mean of {num_labels} task{'' if num_labels == 1 else 's'}"


def _count_won(gains: Floats) -> dict[str, Any]:
    """Count the items on which the other model did better, worse, or equally.

    `gains` has a number for each item, which is above 0 if the other model did better. Returns the fields `n`, `wins`,
    `losses` and `ties` of a MetricComparison, where `n` counts all items.
    """
    num_wins = int((gains > 0).sum())
    num_losses = int((gains < 0).sum())
    num_ties = len(gains) - num_wins - num_losses
    return {"n": len(gains), "wins": num_wins, "losses": num_losses, "ties": num_ties}


def _compare_texts(
    task: str, first_results: Results, other_results: Results, smallest_level: float
) -> MetricComparison:
    """Compare bits per byte of a held-out text by a bootstrap over its documents.

    A text of one document is divided into its windows instead. `smallest_level` decides how many draws are made. Raises
    DataError if the two models did not read the same documents.
    """
    units = text_units(task, first_results, other_results)
    nats_to_bits_2 = np.array([1 / math.log(2), 1.0])  # factors from [nats, bytes] to [bits, bytes]
    # The seed depends on the task alone, so that the first draws are the same whatever else is compared.
    generator = np.random.default_rng([significance.SEED, zlib.crc32(f"{task} {BITS}".encode())])
    result = significance.difference_of_ratios(
        units.first * nats_to_bits_2, units.other * nats_to_bits_2, generator, smallest_level
    )

    # Text that only one tokenizer loses counts for the other model alone. Equal tokenizers lose the same text.
    lost_text_bits = 0.0
    if has_other_tokenizer(first_results, other_results):
        lost_fraction = lost_text_fraction(first_results.tasks[task]) + lost_text_fraction(other_results.tasks[task])
        lost_text_bits = MISSING_BYTE_BITS * lost_fraction

    # Fewer nats per byte are better, so the other model's gain is the first model's ratio less its own.
    first_ratios_u = units.first[:, 0] / units.first[:, 1]
    other_ratios_u = units.other[:, 0] / units.other[:, 1]
    return MetricComparison(
        task=task,
        metric=BITS,
        first=float(bits_per_byte(units.first.sum(axis=0))),
        other=float(bits_per_byte(units.other.sum(axis=0))),
        difference=result.difference,
        **_count_won(first_ratios_u - other_ratios_u),
        p=result.p,
        test="studentised bootstrap",
        error=result.error,
        interval=result.interval,
        min_p=result.min_p if len(units.first) >= MIN_DOCUMENTS else 0.0,
        lost_text=lost_text_bits,
    )


class TextUnits(NamedTuple):
    """Independent units of a held-out text, with the nats and bytes of each for two models."""

    first: Floats
    """[units, 2] of the first model; the columns are nats and bytes."""
    other: Floats
    """The same of the other model."""
    are_windows: bool
    """The units are windows of a single document. Otherwise they are documents."""


def text_units(task: str, first_results: Results, other_results: Results) -> TextUnits:
    """Return the independent units of a held-out text, with the nats and bytes of each for both models.

    Units are documents. If there is only one document, and both models read it in the same windows, its windows are the
    units. Raises DataError if the two models did not read the same documents.
    """
    first_documents = {item["index"] for item in first_results.items[task]}
    other_documents = {item["index"] for item in other_results.items[task]}
    if first_documents != other_documents:
        raise DataError(f"{task}: {first_results.name} and {other_results.name} did not read the same documents")

    # (nats, bytes) of each window. Windows are the same if their bytes are.
    first_windows = [text_row(item) for item in first_results.items[task]]
    other_windows = [text_row(item) for item in other_results.items[task]]
    first_window_bytes = [num_bytes for _, num_bytes in first_windows]
    other_window_bytes = [num_bytes for _, num_bytes in other_windows]
    have_same_bytes = first_window_bytes == other_window_bytes
    have_same_windows = have_same_bytes and not has_other_tokenizer(first_results, other_results)

    if len(first_documents) == 1 and have_same_windows:
        minimum_2 = [-math.inf, 1]  # of [nats, bytes]: a window without bytes counts as one byte
        return TextUnits(np.maximum(first_windows, minimum_2), np.maximum(other_windows, minimum_2), are_windows=True)
    return TextUnits(by_document(first_results.items[task]), by_document(other_results.items[task]), are_windows=False)


# ------------------------------------------------------------------------------------------------------------ notes


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

    # Add notes on each task that is compared.
    for comparison in tasks:
        notes += [f"{comparison.task}: {note}" for note in _notes_on_task(comparison, first_results, other_results)]
    return notes


def _notes_on_resolution(tasks: Sequence[MetricComparison]) -> list[str]:
    """Return a note on each text whose bootstrap has too few draws for the level that its p-value is compared with."""
    return [
        f"warning: {comparison.task}: its bootstrap can show no p below {comparison.min_p:.1g}, and with so many tests "
        f"{1 - comparison.confidence:.1g} decides; compare fewer models or tasks at once"
        for comparison in tasks
        if not comparison.is_resolved
    ]


def _note_on_skipped(skip: Sequence[str]) -> list[str]:
    """Return a note that names the tasks which the user left out; empty if there are none."""
    return [f"left out, as asked: {', '.join(skip)}"] if skip else []


def _code_of(results: Results, tasks: Sequence[MetricComparison]) -> str:
    """Return the versions of the code that evaluated the compared tasks, separated by commas."""
    versions = {results.tasks[comparison.task]["code"] for comparison in tasks}
    return ", ".join(sorted(versions))


def _note_on_missing_tasks(results: Results, other_results: Results) -> list[str]:
    """Return a note that names the tasks which only `results` has; empty if there are none."""
    missing_tasks = [task for task in results.items if task not in other_results.items]
    if not missing_tasks:
        return []
    return [f"only in {results.name}, left out: {', '.join(missing_tasks)}"]


def _notes_on_task(comparison: MetricComparison, first_results: Results, other_results: Results) -> Iterator[str]:
    """Yield notes on the comparison of one task, in the order in which they are printed.

    They say whether the task was only a trial, in which facts its two records differ, how much text a tokenizer loses,
    and whether there are too few independent items or documents for a verdict.
    """
    task = comparison.task
    limit = limit_of_trial(first_results.tasks[task])
    if limit:
        yield f"only its first {limit:,} items (limit): a try, not a result"

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
    which is smaller if units differ in weight. There is no verdict with fewer than MIN_UNITS or, for bits per byte,
    MIN_DOCUMENTS.
    """
    # Items that only one model has been asked, for instance because they did not fit into the other one's context.
    task = comparison.task
    first_indices = {item["index"] for item in items_with(first_results.items[task], comparison.metric)}
    other_indices = {item["index"] for item in items_with(other_results.items[task], comparison.metric)}
    num_left_out = len(first_indices ^ other_indices)
    if num_left_out:
        yield f"{num_left_out:,} items that only one could be asked are left out"

    min_units = MIN_DOCUMENTS if comparison.metric == BPB else MIN_UNITS
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
