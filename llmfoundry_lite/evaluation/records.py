"""Records of a result and its items: their JSON schema, their computation and validation.

`<suite>/<model>.json` has the keys of RESULT and under `tasks` those of TASK for each task. `<model>.items.jsonl` has a
line with the keys of ITEM for each item.
"""

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite.config.eval_schema import ACCURACIES
from llmfoundry_lite.data.spelling import KINDS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import CHOICES, Item, PreparedTask
from llmfoundry_lite.evaluation.significance import Floats

if TYPE_CHECKING:  # reading results needs no torch
    from llmfoundry_lite.evaluation.scoring import Score

Record = dict[str, Any]

BITS = "bits_per_byte"
MAX_MAGNITUDE = 1e30
"""Nats or bytes beyond which sums of squares may overflow."""

RESULT = {
    "model": str,
    "suite": str,
    "source": str,
    "save_id": str | None,
    "num_tokens_trained": int | None,
    "num_parameters": int | None,
    "tokenizer": str,
    "precision": str,
}
"""Keys of a model's JSON, which also has `average` and `tasks`."""
TASK = {
    "n": int,
    "metric": str,
    "type": str,
    "settings": dict,
    "code": str,
    "fingerprint": str,
    "data_fingerprint": str,
    "items_hash": str,
    "num_clusters": int | None,
    "num_documents": int | None,
    "skipped": dict | None,
    "lost_text": dict | None,
}
"""Keys of a task's record that are checked when it is read.

- `n` counts items.
- `metric` names the number that tables and averages show. The number is under that key, its standard error under
  METRIC_stderr.
- `fingerprint` covers the questions and how they are asked, `data_fingerprint` only the rows or texts.
- `skipped` counts items by the reason why they could not be asked.
- `lost_text` counts characters that the model's tokens do not spell, which bits per byte therefore leave out.

A record also has `num_fewshot`, `tokenization`, `chance`, `perplexity`, `categories`, `beginning` (tokens before each
text), `seconds`, and counts of irregular items."""
LOST_TEXT = {**dict.fromkeys(("characters", "text_bytes", "lost_bytes", *KINDS), int), "examples": list}
"""Keys of a task's `lost_text`, as in `data/spelling.py`."""


def _is_within(value: Any, minimum: float, maximum: float) -> bool:
    """Return whether a value from a file is a number in this range. NaN is in no range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and minimum <= value <= maximum


def _is_index(value: Any) -> bool:
    """Return whether a value is a whole number from 0 on; a bool is none."""
    return type(value) is int and value >= 0


def _is_score(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return _is_within(value, 0, 1)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _are_log_probabilities(value: Any) -> bool:
    """Return whether a value is a list of finite numbers whose squares can be added up."""
    return isinstance(value, list) and all(_is_within(one, -MAX_MAGNITUDE, MAX_MAGNITUDE) for one in value)


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of finite numbers from 0 on whose squares can be added up."""
    return isinstance(value, list) and all(_is_within(one, 0, MAX_MAGNITUDE) for one in value)


ITEM: dict[str, Callable[[Any], bool]] = {
    "index": _is_index,
    **dict.fromkeys(ACCURACIES, _is_score),
    "category": _is_text,
    "cluster": _is_text,
    "log_probability": _are_log_probabilities,
    "num_characters": _are_sizes,
}
"""Keys of an item's record that comparisons read, with the check of each.

- `index` is the item's row, or the document of a window. Items of the same `cluster` are not independent.
- `log_probability` (nats) and `num_characters` (bytes, for a window) have a number for each option.

A record also has `task`, `num_tokens` and `num_trimmed`; for choices `gold`, `chosen`, `tie` and `has_duplicates`; for
generation `text` and `answers`."""


# ---------------------------------------------------------------------------------------------------------- writing


def scored_item(task: PreparedTask, item: Item, scores: "Sequence[Score]") -> Record:
    """Build the record of an item from the scores of its options, one for each request of the item.

    The record has the log-probability and length of each option and, depending on the type of the task, its accuracies.
    """
    log_probabilities = [score.log_probability for score in scores]
    num_tokens = [len(request.continuation) for request in item.requests]
    num_characters = [request.num_characters for request in item.requests]
    record: Record = {
        "task": task.name,
        "index": item.index,
        "log_probability": log_probabilities,
        "num_tokens": num_tokens,
        "num_characters": num_characters,
        "num_trimmed": max(request.num_trimmed for request in item.requests),
        **_category_and_cluster(item),
    }
    if task.kind == "language_modeling":
        record["acc"] = int(scores[0].is_greedy)
    if task.kind in CHOICES:
        # Each accuracy divides an option's log-probability by its own measure of the option's length.
        lengths = {
            "acc_per_token": num_tokens,
            "acc": [1] * len(scores),
            "acc_norm": [max(characters, 1) for characters in num_characters],
        }
        record |= _choose(item, log_probabilities, lengths)
    return record


def _choose(item: Item, log_probabilities: Sequence[float], lengths: Mapping[str, Sequence[int]]) -> Record:
    """Choose an option of a multiple-choice or schema item by each accuracy, such as `acc_norm`.

    `lengths` maps the name of an accuracy to the length of each option, by which its log-probability is divided. The
    option with the largest quotient is chosen. Returns the part of the item's record that says which options were
    chosen, whether each choice is right (1 or 0, under the accuracy's name), and whether it was a tie.
    """
    chosen: dict[str, int] = {}
    is_correct: dict[str, int] = {}
    is_tied: dict[str, bool] = {}
    for name, lengths_of_options in lengths.items():
        values = [total / length for total, length in zip(log_probabilities, lengths_of_options, strict=True)]
        best = max(values)
        chosen[name] = values.index(best)  # a tie goes to the first option, as in lm_eval and LLM Foundry
        is_correct[name] = int(chosen[name] == item.gold)
        is_tied[name] = values.count(best) > 1
    return {
        "gold": item.gold,
        "chosen": chosen,
        **is_correct,
        "tie": is_tied,
        "has_duplicates": item.has_duplicates,
    }


def generated_item(task: PreparedTask, item: Item, text: str, *, is_correct: bool) -> Record:
    """Build the record of an item for which the model generated `text` as its answer."""
    return {
        "task": task.name,
        "index": item.index,
        "text": text,
        "answers": list(item.answers),
        "num_trimmed": item.requests[0].num_trimmed,
        **_category_and_cluster(item),
        "acc": int(is_correct),
    }


def _category_and_cluster(item: Item) -> Record:
    """Return the keys `category` and `cluster` of an item's record. An item without one has no such key."""
    record: Record = {}
    if item.category is not None:
        record["category"] = item.category
    if item.cluster is not None:
        record["cluster"] = item.cluster
    return record


def summarise(task: PreparedTask, items: Sequence[Record], seconds: float) -> Record:
    """Build the record of a task from the records of its items.

    It has the task's settings, the mean of each metric with its standard error, and counts of irregular items, such as
    those whose context was cut. `seconds` is how long the task took.
    """
    record: Record = {
        "type": task.kind,
        "n": len(task.items),
        "num_fewshot": task.num_fewshot,
        "tokenization": task.config.tokenization,
        "fingerprint": task.fingerprint,
        "data_fingerprint": task.data_fingerprint,
        "settings": task.settings,
        "metric": task.metric,
    }
    if task.lost_text is not None:
        record["lost_text"] = task.lost_text

    if task.kind == "perplexity":
        record |= _summarise_text(items)
    else:
        record |= _summarise_answers(task, items, has_categories(record))
    if has_categories(record):
        record["categories"] = _mean_by_category(items, record["metric"])

    irregular_counts = {
        "num_trimmed": sum(bool(item["num_trimmed"]) for item in items),
        "num_missing_examples": sum(bool(item.num_missing_examples) for item in task.items),
        "num_repeated": task.num_repeated,
        "skipped": task.skipped,
        "beginning": task.beginning,
    }
    record |= {key: value for key, value in irregular_counts.items() if value}
    record["seconds"] = round(seconds, 3)
    return record


def _summarise_answers(task: PreparedTask, items: Sequence[Record], by_category: bool) -> Record:
    """Return the part of a task's record that comes from its questions.

    That is the mean of each accuracy with its standard error; for choices also the accuracy of guessing; for language
    modelling also the perplexity of an answer.
    """
    summary: Record = {}
    for name in ACCURACIES if task.kind in CHOICES else ("acc",):
        summary[name], summary[f"{name}_stderr"] = mean_and_error(items, name, by_category)
    if any("cluster" in item for item in items):
        summary["num_clusters"] = len({item["cluster"] for item in items})

    if task.kind in CHOICES:
        chances = [{**item, "chance": 1 / len(item["num_tokens"])} for item in items]
        summary["chance"], _ = mean_and_error(chances, "chance", by_category)
        summary["num_ties"] = sum(item["tie"][task.metric] for item in items)
        summary["num_duplicates"] = sum(item["has_duplicates"] for item in items)
    if task.kind == "language_modeling":
        answers = [{**item, "nats": -item["log_probability"][0]} for item in items]
        summary |= _perplexity(*mean_and_error(answers, "nats"))
    return summary


def _summarise_text(items: Sequence[Record]) -> Record:
    """Return the part of a task's record that comes from held-out text: perplexity per token and bits per byte."""
    nats_and_tokens = [(-item["log_probability"][0], item["num_tokens"][0]) for item in items]
    total_nats = sum(nats for nats, _ in nats_and_tokens)
    total_tokens = sum(tokens for _, tokens in nats_and_tokens)
    total_bytes = float(by_document(items)[:, 1].sum())

    summary = _perplexity(total_nats / total_tokens, ratio_error(items, nats_and_tokens))
    summary["num_documents"] = len({document_of(item) for item in items})
    summary[BITS] = total_nats / math.log(2) / total_bytes
    error = bits_per_byte_error(items)
    if error is not None:
        summary[f"{BITS}_stderr"] = error
    return summary


def _mean_by_category(items: Sequence[Record], metric: str) -> dict[str, float]:
    """Return the mean of a metric in each category, by the category's name in alphabetical order."""
    means: dict[str, float] = {}
    for category in sorted({item["category"] for item in items}):
        members = [item for item in items if item["category"] == category]
        means[category], _ = mean_and_error(members, metric)
    return means


def _perplexity(nats: float, error: float | None) -> Record:
    """Return the keys `perplexity`, which is exp(nats), and `perplexity_stderr`, which is exp(nats) * error.

    Returns no keys if exp(nats) overflows a float, which long answers can cause.
    """
    try:
        perplexity = math.exp(nats)
    except OverflowError:
        return {}
    if error is None:
        return {"perplexity": perplexity}
    return {"perplexity": perplexity, "perplexity_stderr": perplexity * error}


def hash_of(items: Sequence[Record]) -> str:
    """Return the hash of a task's item records, as the lines of JSON that they are written as."""
    return hash_of_lines([json.dumps(item) for item in items])


def hash_of_lines(lines: Sequence[str]) -> str:
    """Return the hash of lines, each with the newline that ends it in the file."""
    content = "".join(f"{line}\n" for line in lines)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------------- checking


def check_result(facts: Any, path: object) -> None:
    """Raise DataError unless `facts`, the JSON content of a file, is what an evaluation writes.

    `path` names the file in errors.
    """
    is_result = isinstance(facts, dict) and "model" in facts and isinstance(facts.get("tasks"), dict)
    if not is_result:
        raise DataError(
            f"{path} is not a result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
        )
    _check_types(facts, RESULT, f"{path}: it")
    for name, record in facts["tasks"].items():
        _check_record(record if isinstance(record, dict) else {}, f"{path}: {name}")
    if not facts["tasks"]:
        raise DataError(f"{path} has no finished task")


def _check_record(record: Record, place: str) -> None:
    """Raise DataError unless a task's record has the kinds of values that an evaluation writes."""
    _check_types(record, TASK, place)
    numbers = [record["metric"], *(key for key in record if key.endswith("_stderr"))]
    _check_types(record, dict.fromkeys(numbers, int | float), place)
    _check_types(record["settings"], {"limit": int | None}, place)
    if record.get("lost_text") is not None:
        _check_types(record["lost_text"], LOST_TEXT, place)


def _check_types(record: Record, expected_types: Mapping[Any, Any], place: str) -> None:
    """Raise DataError unless each key of a record has a value of its expected type, and no number is too large.

    `expected_types` maps a key to a type, or to a union of types. A missing key counts as None. `place` names the
    record in the error.
    """
    for key, expected in expected_types.items():
        value = record.get(key)
        has_type = isinstance(value, expected) and not isinstance(value, bool)  # Python's bool is an int
        # Written so that NaN, which compares as false, counts as too large.
        is_too_large = isinstance(value, int | float) and not abs(value) <= MAX_MAGNITUDE
        if not has_type or is_too_large:
            raise DataError(f"{place} has {key} {value!r}, which no result has; evaluate it again with redo=true")


def check_items(record: Record, lines: Sequence[str], description: str) -> list[Record]:
    """Parse the lines of a task's items, and check that the task's record was computed from them.

    `record` is the task's. `description` names the items in errors, such as "base.items.jsonl: the items of arc_easy".
    Returns the records of the items. Raises DataError if their hash or their score is not that of the record.
    """
    items = [json.loads(line) for line in lines]
    metric = record["metric"]
    score = None
    if record["items_hash"] == hash_of_lines(lines):
        # The file may come from a stranger. Any error in its items means that they do not belong to this record.
        with contextlib.suppress(KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
            score = _recompute_score(record, items)
    if score is None:
        raise DataError(f"{description} are not those that the result was made from; evaluate again with redo=true")
    if not math.isclose(score, record[metric], rel_tol=1e-4, abs_tol=1e-9):
        raise DataError(
            f"{description} give {metric} {score:.4f}, the result says {record[metric]:.4f}; the two files are of "
            "different evaluations: evaluate again with redo=true"
        )
    return items


def _recompute_score(record: Record, items: Sequence[Record]) -> float | None:
    """Compute a task's score again from its items. Returns None if an item has a value that no evaluation writes."""
    for item in items:
        for key, is_sound in ITEM.items():
            if key in item and not is_sound(item[key]):
                return None
    num_with_cluster = sum("cluster" in item for item in items)
    if 0 < num_with_cluster < len(items):
        return None

    if record["metric"] == BITS:
        return float(bits_per_byte(by_document(items).sum(axis=0)))
    num_distinct = len({item["index"] for item in items})
    if num_distinct < len(items):
        return None
    for name in ACCURACIES:
        if name in record:
            mean_and_error(items, name)  # raises KeyError if an item lacks the metric
    score, _ = mean_and_error(items, record["metric"], has_categories(record))
    return score


# ------------------------------------------------------------------------------------------------------------ tasks


def limit_of_trial(record: Record) -> int | None:
    """Return the task's `limit` if it left items out, or None if the task was run on all of its items.

    A task with a limit that took effect is a trial and not a result.
    """
    limit = record["settings"].get("limit")
    if limit is None:
        return None
    if record.get("type") == "perplexity":  # the limit counts windows, and is only recorded if it left some out
        return limit
    num_seen = record["n"] + sum((record.get("skipped") or {}).values())
    return limit if num_seen >= limit else None


def lost_text_fraction(record: Record) -> float:
    """Return the fraction of a held-out text that the tokenizer loses, because no token stands for it.

    Characters may be lost or replaced by others, so that is the larger one of the fraction of bytes that are lost and
    the fraction of characters that are lost or replaced.
    """
    lost_text = record.get("lost_text")
    if lost_text is None:
        return 0.0
    fraction_of_bytes = lost_text["lost_bytes"] / max(lost_text["text_bytes"], 1)
    fraction_of_characters = sum(lost_text[kind] for kind in KINDS) / max(lost_text["characters"], 1)
    return max(fraction_of_bytes, fraction_of_characters)


def score_of(record: Record) -> tuple[float, float | None]:
    """Return the value of the task's main metric, and its standard error, or None if it has none."""
    return record[record["metric"]], record.get(f"{record['metric']}_stderr")


def is_accuracy(record: Record) -> bool:
    """Return whether the task's main metric is an accuracy, and not bits per byte."""
    return record["metric"] in ACCURACIES


def has_categories(record: Record) -> bool:
    """Return whether the task's score is the mean of its categories' scores."""
    return bool(record["settings"].get("has_categories"))


def error_of_sum(errors: Iterable[tuple[str, float]]) -> float:
    """Return the standard error of a sum of scores. `errors` has (fingerprint of the data, standard error) for each.

    Scores on the same data are assumed to be fully correlated, so their errors add up. Those on different data are
    independent, so the squares of their errors add up.
    """
    error_by_data: dict[str, float] = {}
    for data, error in errors:
        error_by_data[data] = error_by_data.get(data, 0.0) + error
    return math.sqrt(sum(error**2 for error in error_by_data.values()))


# ------------------------------------------------------------------------------------------------------- accuracies


def weights_of(items: Sequence[Record], by_category: bool) -> Floats:
    """Return the weight of each item in the mean. Weights add up to 1.

    Items have equal weights or, with `by_category`, every category has the same total weight.
    """
    if not by_category:
        return np.full(len(items), 1 / len(items))
    sizes = Counter(item["category"] for item in items)
    return np.array([1 / (len(sizes) * sizes[item["category"]]) for item in items])


def mean_and_error(items: Sequence[Record], metric: str, by_category: bool = False) -> tuple[float, float]:
    """Return the mean of a metric over items, and its standard error, which is 0 for a single item or cluster.

    With `by_category`, every category counts equally. For independent items the error is sd / sqrt(n), with n - 1 in
    the variance. Items in clusters are not independent: residuals are added up within each cluster first (Miller,
    Adding Error Bars to Evals, 2024, arXiv 2411.00640, section 2.2), and the variance has the factor G / (G - 1) for G
    clusters.
    """
    weights = weights_of(items, by_category)
    values = np.array([item[metric] for item in items], np.float64)
    mean = float(weights @ values) if by_category else float(values.mean())
    if "cluster" in items[0]:
        return mean, _error_of_clusters([item["cluster"] for item in items], weights * (values - mean))

    labels = [item["category"] if by_category else None for item in items]
    return mean, _error_of_groups(labels, values, weights, mean)


def _error_of_clusters(clusters: Sequence[str], weighted_residuals: Floats) -> float:
    """Return the standard error of a weighted mean whose items are related within each cluster.

    `clusters` names the cluster of each item, and `weighted_residuals` are its weight times its distance from the mean.
    """
    distinct_clusters = dict.fromkeys(clusters)  # in order of appearance
    index_of = {cluster: index for index, cluster in enumerate(distinct_clusters)}
    sums = np.bincount([index_of[cluster] for cluster in clusters], weighted_residuals)
    num_clusters = len(sums)
    correction = num_clusters / max(num_clusters - 1, 1)
    return math.sqrt(correction * float((sums**2).sum()))


def _error_of_groups(labels: Sequence[str | None], values: Floats, weights: Floats, mean: float) -> float:
    """Return the standard error of a weighted mean of independent items, with a variance of its own for each group.

    `labels` names the group of each item, such as its category. All items of a group have the same weight. `mean` is
    the weighted mean of all items, which serves as the centre of a group with a single item.
    """
    variance = 0.0
    for label in dict.fromkeys(labels):
        members = values[[one == label for one in labels]]
        n = len(members)
        if n > 1:
            squares = float(((members - members.mean()) ** 2).sum()) * n / (n - 1)
        else:
            squares = float((members[0] - mean) ** 2)
        variance += float(weights[labels.index(label)]) ** 2 * squares
    return math.sqrt(variance)


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
    """Return, for each document, the sum of the rows of its windows. `rows` has a row (y, x) for each of `items`."""
    sums: dict[int | str, Floats] = {}
    for item, row in zip(items, rows, strict=True):
        sums[document_of(item)] = sums.get(document_of(item), np.zeros(2)) + row
    return sums


def bits_per_byte(nats_and_bytes: Floats) -> Floats:
    """Return bits per byte of texts; the last dimension of the argument is [nats, bytes]."""
    return nats_and_bytes[..., 0] / nats_and_bytes[..., 1] / math.log(2)


def ratio_error(items: Sequence[Record], rows: Sequence[tuple[float, float]]) -> float | None:
    """Return the standard error of sum(y) / sum(x) over windows, each with its row (y, x); None for a single window.

    The units are documents, because windows of one document are not independent. A single document is divided into its
    windows. For small errors R - R0 = sum(y - R x) / sum(x), whose variance is n / (n - 1) sum((y - R x)²) / sum(x)².
    This is the linearised ratio estimator of Cochran, Sampling Techniques (3rd edition, 1977), chapter 6, without its
    finite-population correction.
    """
    sums = _sum_by_document(items, rows)
    units = np.array(list(sums.values()) if len(sums) > 1 else rows)
    n = len(units)
    if n == 1:
        return None
    sum_y, sum_x = units.sum(axis=0)
    residuals = units[:, 0] - sum_y / sum_x * units[:, 1]
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / float(sum_x)


def bits_per_byte_error(items: Sequence[Record]) -> float | None:
    """Return the standard error of a text's bits per byte; None for a text of a single window."""
    error = ratio_error(items, list(map(text_row, items)))
    return None if error is None else error / math.log(2)
