"""Compares the results of several models with those of the first, item by item.

`compare` checks that two models were asked the same questions (`same_questions.py`), pairs their items
(`common_items.py`), and tests the difference of each task and of the mean of all tasks. `significance.py` has the
tests, and `pairs.py` the resulting objects and their output. `comparison_notes.py` says what may explain a difference.

A difference counts as significant if its p-value, corrected for the number of tests (Holm), is below 0.05. Its interval
is at the level that its p-value is compared with, so it excludes 0 exactly if the difference is significant.

Items, or clusters of them, count as independent. An item that several tasks ask (with other examples, prompts or
labels, but from the same data) is one item: in the mean, its differences in all tasks are added up first.

`metrics.py` says by which metric a task is compared: the same as in the tables.
"""

import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.config.task_types import BITS, BPB
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.common_items import WeightedTask, collect_units, text_units
from llmfoundry_lite.evaluation.comparison_notes import note_on_skipped, notes_on, notes_on_resolution
from llmfoundry_lite.evaluation.means import bits_per_byte, is_named, label_of, weights_of_tasks
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
from llmfoundry_lite.evaluation.records import BITS_METRICS, is_own_metric, limit_of_trial, lost_text_fraction
from llmfoundry_lite.evaluation.results import Results, load_any
from llmfoundry_lite.evaluation.same_questions import check_same_questions
from llmfoundry_lite.evaluation.significance import MIN_DOCUMENTS, MIN_UNITS, Floats

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
    skip: names or labels of tasks to leave out.
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
        comparison.notes = [*notes, *comparison.notes, *note_on_skipped(skip)]
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
        comparison.notes += notes_on_resolution(comparison.tasks)
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
    """Raise DataError for a task in `skip`, given by its full name or its label, that no result has."""
    known_tasks = {task for result in results for task in result.items}
    for task in skip:
        if not any(is_named(known, [task]) for known in known_tasks):
            raise DataError(f"--skip {task}: no result has that task; they have {', '.join(sorted(known_tasks))}")


def _find_common_tasks(first_results: Results, other_results: Results, skip: Sequence[str]) -> list[str]:
    """Return the tasks that both results have, except those in `skip`.

    Raises DataError if there are none, or if the models were not asked the same in one of them.
    """
    common_tasks = [task for task in first_results.items if task in other_results.items]
    common_tasks = [task for task in common_tasks if not is_named(task, skip)]
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

    # Compare the mean of all accuracies or, if there are none, that of the bits per byte of answers. Numbers of the
    # user's own code may have any unit, and are in no mean.
    accuracies: list[tuple[str, str]] = []
    for task, metric in main_metrics.items():
        if metric not in BITS_METRICS and not is_own_metric(first_results.tasks[task], metric):
            accuracies.append((task, metric))
    tasks_in_bpb = [task for task, metric in main_metrics.items() if metric == BPB]
    mean = None
    if len(accuracies) > 1:
        mean = _compare_accuracies(accuracies, first_results, other_results)
    elif not accuracies and len(tasks_in_bpb) > 1:
        mean = _compare_means(tasks_in_bpb, BPB, first_results, other_results, smallest_level)
    return Comparison(
        first=first_results.name,
        other=other_results.name,
        tasks=comparisons,
        mean=mean,
        other_metrics=other_comparisons,
        notes=notes_on(first_results, other_results, comparisons),
        trials=[task for task in tasks if limit_of_trial(first_results.tasks[task])],
    )


def _compare_task(
    task: str, metric: str, first_results: Results, other_results: Results, smallest_level: float
) -> MetricComparison:
    """Compare one task by one metric: the score test for an accuracy, and a bootstrap for all others.

    `smallest_level` is the lowest level that the p-value may be compared with. The bootstrap makes enough draws for it.
    """
    if metric == BITS:
        return _compare_texts(task, first_results, other_results, smallest_level)
    if metric == BPB or is_own_metric(first_results.tasks[task], metric):
        return _compare_means([task], metric, first_results, other_results, smallest_level)
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
        is_tested=counts.num_effective >= MIN_UNITS and counts.num_units >= MIN_UNITS,
        error=math.sqrt(max(0.0, float(counts.variance))) * units.total_weight,
        interval=interval,
        counts=counts,
    )


def _compare_means(
    tasks: Sequence[str], metric: str, first_results: Results, other_results: Results, smallest_level: float
) -> MetricComparison:
    """Compare the mean of a metric over the items of a task, or its mean over several tasks, by a bootstrap.

    The metric is `bpb`, the bits per byte of right answers, or a number of the user's own code.
    Items, or clusters of them, are drawn, each with the difference of the two models. Where they differ in weight, the
    mean of a draw is the sum of its differences over the sum of its weights. `smallest_level` decides how many draws
    are made.
    """
    weights = weights_of_tasks(tasks)
    weighted_tasks = [WeightedTask(task, metric, weight) for task, weight in weights.items()]
    units = collect_units(weighted_tasks, first_results, other_results)
    name = tasks[0] if len(tasks) == 1 else _name_of_mean(tasks)

    counts = significance.count(units.differences_u, units.weights_u)
    generator = np.random.default_rng([significance.SEED, zlib.crc32(f"{name} {metric}".encode())])
    no_difference_u = np.zeros_like(units.differences_u)
    result = significance.difference_of_ratios(
        np.stack([no_difference_u, units.weights_u], axis=1),
        np.stack([units.differences_u, units.weights_u], axis=1),
        generator,
        smallest_level,
        num_effective=counts.num_effective,
    )
    is_tested = counts.num_effective >= MIN_DOCUMENTS
    return MetricComparison(
        task=name,
        metric=metric,
        first=units.first_sum,
        other=units.other_sum,
        difference=result.difference,
        **_count_won(-units.gains_i if metric in BITS_METRICS else units.gains_i),  # fewer bits are better
        **_describe_bootstrap(result, is_tested=is_tested),
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


def _describe_bootstrap(
    result: significance.BootstrapResult | significance.NormalResult, *, is_tested: bool
) -> dict[str, Any]:
    """Return the fields of a MetricComparison that say how its difference was tested, and with what result.

    `is_tested` says whether there are enough units for a test.
    """
    return {
        "p": result.p,
        "test": "studentised bootstrap",
        "is_tested": is_tested,
        "error": result.error,
        "interval": result.interval,
        "min_p": result.min_p if is_tested else 0.0,
    }


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

    is_tested = len(units.first) >= MIN_DOCUMENTS
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
        **_describe_bootstrap(result, is_tested=is_tested),
        lost_text=lost_text_bits,
    )
