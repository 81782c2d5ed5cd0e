"""Means: computes the score of a task from the records of its items, with its standard error.

Accuracies are means over items, which may belong to clusters and categories. Bits per byte of a held-out text are a
ratio of sums over its documents. `weights_of_tasks` weights tasks in an average.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.significance import Floats

# ------------------------------------------------------------------------------------------------------- accuracies


def weights_of_tasks(names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each task in an average. Weights add up to 1.

    Every label counts the same, however many numbers of examples it has: of arc_easy/0-shot, arc_easy/5-shot and
    piqa/0-shot, the first two have 1/4 each, and the last one has 1/2.
    """
    num_of_label = Counter(label_of(name) for name in names)
    return {name: 1 / (len(num_of_label) * num_of_label[label_of(name)]) for name in names}


def error_of_sum(errors: Iterable[tuple[str, float]]) -> float:
    """Return the standard error of a sum of scores. `errors` has (fingerprint of the data, standard error) for each.

    Scores on the same data are assumed to be fully correlated, so their errors add up. Those on different data are
    independent, so the squares of their errors add up.
    """
    error_of_data: dict[str, float] = {}
    for data, error in errors:
        error_of_data[data] = error_of_data.get(data, 0.0) + error
    return math.sqrt(sum(error**2 for error in error_of_data.values()))


def label_of(name: str) -> str:
    """Return the label of a task's name in results: `arc_easy` for `arc_easy/5-shot`."""
    return name.rpartition("/")[0] or name


def is_named(task: str, names: Sequence[str]) -> bool:
    """Return whether a task is among these names, by its full name or by its label."""
    return task in names or label_of(task) in names


def weights_of(items: Sequence[Record], by_category: bool) -> Floats:
    """Return the weight of each item in the mean, [items]. Weights add up to 1.

    Items have equal weights or, with `by_category`, every category has the same total weight: of two categories with 1
    and 4 items, the first item has weight 1/2, and each of the others 1/8.
    """
    if not by_category:
        return np.full(len(items), 1 / len(items))
    category_sizes = Counter(item["category"] for item in items)
    return np.array([1 / (len(category_sizes) * category_sizes[item["category"]]) for item in items])


def mean_and_error(items: Sequence[Record], metric: str, by_category: bool = False) -> tuple[float, float]:
    """Return the mean of a metric over items, and its standard error, which is 0 for a single item or cluster.

    items: the records of a task's items. If the first has a `cluster`, all have one.
    metric: a key of the records whose value is a number, such as "acc".
    by_category: every category counts equally in the mean, whatever its number of items.

    For independent items the error is sd / sqrt(n), with n - 1 in the variance. Items in clusters are not independent:
    residuals are added up within each cluster first (Miller, Adding Error Bars to Evals, 2024, arXiv 2411.00640,
    section 2.2), and the variance has the factor G / (G - 1) for G clusters.
    """
    weights_i = weights_of(items, by_category)
    scores_i = np.array([item[metric] for item in items], np.float64)
    mean = float(weights_i @ scores_i) if by_category else float(scores_i.mean())

    if "cluster" in items[0]:
        clusters = [item["cluster"] for item in items]
        return mean, _error_of_clusters(clusters, weights_i * (scores_i - mean))

    # Without clusters, items are independent. All items of a category have the same weight.
    group_labels = [item["category"] if by_category else None for item in items]
    return mean, _error_of_groups(group_labels, scores_i, weights_i, mean)


def _error_of_clusters(clusters: Sequence[str], weighted_residuals_i: Floats) -> float:
    """Return the standard error of a weighted mean whose items are related within each cluster.

    clusters: the name of each item's cluster.
    weighted_residuals_i: each item's weight times its distance from the mean, [items].

    The error is sqrt(G / (G - 1) * sum of squares of the clusters' sums) for G clusters; 0 for a single cluster, whose
    residuals cancel out.
    """
    # Number the clusters in the order in which they appear, and add up the residuals of each.
    distinct_clusters = dict.fromkeys(clusters)
    cluster_number = {cluster: number for number, cluster in enumerate(distinct_clusters)}
    sums_c = np.bincount([cluster_number[cluster] for cluster in clusters], weighted_residuals_i)

    num_clusters = len(sums_c)
    small_sample_correction = num_clusters / max(num_clusters - 1, 1)
    return math.sqrt(small_sample_correction * float((sums_c**2).sum()))


def _error_of_groups(group_labels: Sequence[str | None], scores_i: Floats, weights_i: Floats, mean: float) -> float:
    """Return the standard error of a weighted mean of independent items, with a separate variance for each group.

    group_labels: the name of each item's group, such as its category.
    scores_i, weights_i: the score and the weight of each item, [items]. All items of a group have the same weight.
    mean: the weighted mean of all items. For a group with a single item, which has no variance of its own, the distance
        of that item from the mean stands in for the standard deviation.

    A group of n items with weight w and sample variance s² adds w² n s² to the variance of the mean.
    """
    variance_of_mean = 0.0
    for label in dict.fromkeys(group_labels):  # each group once, in order of appearance
        group_scores = scores_i[[item_label == label for item_label in group_labels]]
        n = len(group_scores)
        if n > 1:
            squares = float(((group_scores - group_scores.mean()) ** 2).sum()) * n / (n - 1)
        else:
            squares = float((group_scores[0] - mean) ** 2)
        group_weight = float(weights_i[group_labels.index(label)])
        variance_of_mean += group_weight**2 * squares
    return math.sqrt(variance_of_mean)


# ------------------------------------------------------------------------------------------------------------ texts


def text_row(item: Record) -> tuple[float, float]:
    """Return (nats, bytes) of a window: minus its log-probability, and the bytes of its text."""
    return -item["log_probability"][0], item["num_characters"][0]


def document_of(item: Record) -> int | str:
    """Return a key that is the same for all windows of a document, and of documents with the same text."""
    return item.get("cluster", item["index"])


def by_document(items: Sequence[Record]) -> Floats:
    """Return nats and bytes of each document, [documents, 2], from the records of its windows.

    Documents with the same text count as one. A document without bytes counts one byte, so that its bits per byte are
    defined.
    """
    sums = _sum_by_document(items, map(text_row, items))
    rows = [sums[document] for document in sorted(sums)]  # pyright: ignore[reportArgumentType]
    return np.maximum(rows, [-math.inf, 1])


def _sum_by_document(items: Sequence[Record], rows: Iterable[tuple[float, float]]) -> dict[int | str, Floats]:
    """Return the sum [2] of the rows of each document's windows, by the document's key.

    `rows` has a pair of numbers for each window of `items`, such as its nats and bytes.
    """
    sums: dict[int | str, Floats] = {}
    for item, row in zip(items, rows, strict=True):
        document = document_of(item)
        sums[document] = sums.get(document, np.zeros(2)) + row
    return sums


def bits_per_byte(nats_and_bytes: Floats) -> Floats:
    """Return bits per byte of texts; the last dimension of the argument is [nats, bytes]."""
    return nats_and_bytes[..., 0] / nats_and_bytes[..., 1] / math.log(2)


def ratio_error(items: Sequence[Record], rows: Sequence[tuple[float, float]]) -> float | None:
    """Return the standard error of the ratio R = sum(y) / sum(x) over the windows of a text.

    `rows` has (y, x) for each window of `items`, such as its nats and bytes. The independent units are documents,
    because windows of one document are related. A single document is divided into its windows. Returns None for a
    single window.

    The variance of R is n / (n - 1) sum((y - R x)²) / sum(x)² for n units. This is the linearised ratio estimator of
    Cochran, Sampling Techniques (3rd edition, 1977), chapter 6, without its finite-population correction.
    """
    # Choose the units.
    sums = _sum_by_document(items, rows)
    has_several_documents = len(sums) > 1
    units_n2 = np.array(list(sums.values()) if has_several_documents else rows)
    n = len(units_n2)
    if n == 1:
        return None

    # The residual of a unit is the distance of its y from the common ratio.
    sum_y, sum_x = units_n2.sum(axis=0)
    residuals_n = units_n2[:, 0] - sum_y / sum_x * units_n2[:, 1]
    return math.sqrt(n / (n - 1) * float((residuals_n**2).sum())) / float(sum_x)


def bits_per_byte_error(items: Sequence[Record]) -> float | None:
    """Return the standard error of a text's bits per byte; None for a text of a single window."""
    error = ratio_error(items, list(map(text_row, items)))
    return None if error is None else error / math.log(2)
