"""Pairs the items that two models answered, and adds up what each independent unit contributes to a score.

`collect_common_items` pairs the items of one task. `collect_units` does so for several tasks whose scores are added up,
such as those of a mean. A unit is an item, or a cluster of items. If several tasks ask the same item, it is one unit.
`text_units` pairs the documents of a held-out text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.means import by_document, text_row, weights_of
from llmfoundry_lite.evaluation.metrics import has_other_tokenizer
from llmfoundry_lite.evaluation.records import has_categories, items_with
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.significance import Floats

Unit = tuple[str, int | str]
"""An independent unit of a test: (fingerprint of the data, index of an item or name of a cluster)."""


@dataclass(frozen=True, slots=True)
class CommonItems:
    """The items of a task that both models answered, as arrays with one element for each item (i)."""

    items: list[Unit]
    """(fingerprint of the data, index) of each item, which is the same in every task that has this item."""
    weights_i: Floats
    """They add up to 1."""
    first_i: Floats
    """The metric of the first model on each item."""
    other_i: Floats
    cluster_of: dict[Unit, Unit]
    """Item -> its cluster, for items that have one."""


def collect_common_items(task: str, metric: str, first_results: Results, other_results: Results) -> CommonItems:
    """Collect the items of a task that both models answered, with both models' values of a metric.

    An item is identified by its index, the row of the task's file. Weights add up to 1 over the common items; in a task
    with categories, each category has the same weight. Raises DataError if no item is in both results, with the metric.
    """
    # Pair the items by index, in the order of the first result.
    other_items = {item["index"]: item for item in items_with(other_results.items[task], metric)}
    first_items = [item for item in items_with(first_results.items[task], metric) if item["index"] in other_items]
    if not first_items:
        raise DataError(f"{task}: {first_results.name} and {other_results.name} have no item in common")

    # Units have the data's fingerprint with them, so that an item is the same unit in every task on the same data.
    data = first_results.tasks[task]["data_fingerprint"]
    cluster_of: dict[Unit, Unit] = {}
    for item in first_items:
        if "cluster" in item:
            cluster_of[data, item["index"]] = (data, item["cluster"])
    return CommonItems(
        items=[(data, item["index"]) for item in first_items],
        weights_i=weights_of(first_items, has_categories(first_results.tasks[task])),
        first_i=np.array([item[metric] for item in first_items], np.float64),
        other_i=np.array([other_items[item["index"]][metric] for item in first_items], np.float64),
        cluster_of=cluster_of,
    )


class WeightedTask(NamedTuple):
    """A task's part in a weighted sum of scores."""

    task: str
    metric: str
    weight: float
    """Number that a score of 1 adds to the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedUnits:
    """Contributions of each independent unit (u) to the weighted mean of two models' scores."""

    weights_u: Floats
    """The largest part that a unit could have in a mean of accuracies. They add up to 1."""
    differences_u: Floats
    """A unit's part of the difference of the two means, `other` minus `first`. Those that cancel out are exactly 0."""
    gains_i: Floats
    """Difference of each item of each task, `other` minus `first`, without weights."""
    total_weight: float
    """Sum of the tasks' weights. The weighted sum of the scores is the mean times this."""
    first_sum: float
    """The weighted sum of the first model's scores."""
    other_sum: float


def collect_units(tasks: Sequence[WeightedTask], first_results: Results, other_results: Results) -> PairedUnits:
    """Collect the units of a weighted sum of the scores of several tasks, such as their mean.

    If several tasks ask the same item, it is one unit, whose parts are added up: in the mean of two tasks of 100 items,
    an item that only the other model solves in both adds 1/200 + 1/200. Raises DataError if the models have no item of
    a task in common.
    """
    common_items_of_task = [
        collect_common_items(task.task, task.metric, first_results, other_results) for task in tasks
    ]
    total_weight = sum(task.weight for task in tasks)

    # A cluster that one task names holds for all tasks on the same data.
    cluster_of: dict[Unit, Unit] = {}
    for common_items in common_items_of_task:
        cluster_of |= common_items.cluster_of

    # Add up the weighted differences of each unit, over its items and over tasks.
    difference_of: dict[Unit, float] = {}
    """Unit -> its part of the difference of the two means."""
    weight_of: dict[Unit, float] = {}
    first_sum = 0.0
    other_sum = 0.0
    for common_items, task in zip(common_items_of_task, tasks, strict=True):
        first_sum += task.weight * float(common_items.weights_i @ common_items.first_i)
        other_sum += task.weight * float(common_items.weights_i @ common_items.other_i)

        weights_i = common_items.weights_i * task.weight / total_weight
        differences_i = weights_i * (common_items.other_i - common_items.first_i)
        for item, difference, weight in zip(common_items.items, differences_i, weights_i, strict=True):
            unit = cluster_of.get(item, item)
            difference_of[unit] = difference_of.get(unit, 0.0) + difference
            weight_of[unit] = weight_of.get(unit, 0.0) + weight

    return PairedUnits(
        weights_u=np.array(list(weight_of.values())),
        differences_u=np.round(list(difference_of.values()), 15),
        gains_i=np.concatenate([items.other_i - items.first_i for items in common_items_of_task]),
        total_weight=total_weight,
        first_sum=first_sum,
        other_sum=other_sum,
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
