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
    """Build an item's record from the scores of its options."""
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
        **_groups(item),
    }
    if task.kind == "language_modeling":
        record["acc"] = int(scores[0].is_greedy)
    if task.kind in CHOICES:
        # Each accuracy divides the log-probability of an option by another measure of its length.
        lengths = {
            "acc_per_token": num_tokens,
            "acc": [1] * len(scores),
            "acc_norm": [max(characters, 1) for characters in num_characters],
        }
        record |= _choose(item, log_probabilities, lengths)
    return record


def _choose(item: Item, log_probabilities: Sequence[float], lengths: Mapping[str, Sequence[int]]) -> Record:
    """Return which option each accuracy chooses, whether it is right, and whether another one is as good."""
    chosen: dict[str, int] = {}
    is_correct: dict[str, int] = {}
    is_tied: dict[str, bool] = {}
    for name, lengths_of_options in lengths.items():
        values = [total / length for total, length in zip(log_probabilities, lengths_of_options, strict=True)]
        best = max(values)
        chosen[name] = values.index(best)  # the first one of a tie, as in both other harnesses
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
    """Build the record of an item whose answer the model wrote."""
    return {
        "task": task.name,
        "index": item.index,
        "text": text,
        "answers": list(item.answers),
        "num_trimmed": item.requests[0].num_trimmed,
        **_groups(item),
        "acc": int(is_correct),
    }


def _groups(item: Item) -> Record:
    """Return the item's category and cluster, if it has them."""
    groups: Record = {}
    if item.category is not None:
        groups["category"] = item.category
    if item.cluster is not None:
        groups["cluster"] = item.cluster
    return groups


def summarise(task: PreparedTask, items: Sequence[Record], seconds: float) -> Record:
    """Build a task's record from its items: means with their standard errors, and counts of irregular items."""
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

    irregular = {
        "num_trimmed": sum(bool(item["num_trimmed"]) for item in items),
        "num_missing_examples": sum(bool(item.num_missing_examples) for item in task.items),
        "num_repeated": task.num_repeated,
        "skipped": task.skipped,
        "beginning": task.beginning,
    }
    record |= {key: value for key, value in irregular.items() if value}
    record["seconds"] = round(seconds, 3)
    return record


def _summarise_answers(task: PreparedTask, items: Sequence[Record], by_category: bool) -> Record:
    """Return the means of a task's accuracies, and what belongs to its type."""
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
    """Return perplexity per token and bits per byte of held-out text, over all its windows."""
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
    """Return exp(nats) and its standard error exp(nats) * error; empty if it overflows a float, as for long answers."""
    try:
        perplexity = math.exp(nats)
    except OverflowError:
        return {}
    if error is None:
        return {"perplexity": perplexity}
    return {"perplexity": perplexity, "perplexity_stderr": perplexity * error}


def hash_of(items: Sequence[Record]) -> str:
    """Return the hash of a task's items, as they are written."""
    return hash_of_lines([json.dumps(item) for item in items])


def hash_of_lines(lines: Sequence[str]) -> str:
    """Return the hash of the lines of a task's items."""
    content = "".join(f"{line}\n" for line in lines)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------------- checking


def check_result(facts: Any, path: object) -> None:
    """Raise DataError for content that no evaluation has written. `path` names the file in errors."""
    is_result = isinstance(facts, dict) and "model" in facts and isinstance(facts.get("tasks"), dict)
    if not is_result:
        raise DataError(
            f"{path} is no result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
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


def check_items(record: Record, lines: Sequence[str], subject: str) -> list[Record]:
    """Return the items in a task's lines. Raises DataError unless the task's result was made from them.

    `subject` names the items in errors.
    """
    items = [json.loads(line) for line in lines]
    metric = record["metric"]
    score = None
    if record["items_hash"] == hash_of_lines(lines):
        # Whatever else may be wrong with the items of a stranger, they are not those of this result.
        with contextlib.suppress(KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
            score = _recompute_score(record, items)
    if score is None:
        raise DataError(f"{subject} are not those that the result was made from; evaluate again with redo=true")
    if not math.isclose(score, record[metric], rel_tol=1e-4, abs_tol=1e-9):
        raise DataError(
            f"{subject} give {metric} {score:.4f}, the result says {record[metric]:.4f}; the two files are of "
            "different evaluations: evaluate again with redo=true"
        )
    return items


def _recompute_score(record: Record, items: Sequence[Record]) -> float | None:
    """Return the task's score by its items, or None for items that no evaluation has written."""
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
    """Return the task's `limit` if it left items out, so that the task is a trial and not a result; else None."""
    limit = record["settings"].get("limit")
    if limit is None:
        return None
    if record.get("type") == "perplexity":  # its limit counts windows, and is recorded only if it cuts
        return limit
    num_seen = record["n"] + sum((record.get("skipped") or {}).values())
    return limit if num_seen >= limit else None


def lost_text_fraction(record: Record) -> float:
    """Return the share of a text that its tokens do not spell: by bytes or by characters, whichever is more."""
    lost = record.get("lost_text")
    if lost is None:
        return 0.0
    changed = sum(lost[kind] for kind in KINDS) / max(lost["characters"], 1)
    return max(lost["lost_bytes"] / max(lost["text_bytes"], 1), changed)


def score_of(record: Record) -> tuple[float, float | None]:
    """Return the task's number, and its standard error if it has one."""
    return record[record["metric"]], record.get(f"{record['metric']}_stderr")


def is_accuracy(record: Record) -> bool:
    """Return whether the number that tables and averages show is an accuracy."""
    return record["metric"] in ACCURACIES


def has_categories(record: Record) -> bool:
    """Return whether the task's score is the mean of its categories' scores."""
    return bool(record["settings"].get("has_categories"))


def error_of_sum(errors: Iterable[tuple[str, float]]) -> float:
    """Return the standard error of a sum of (data, error). Errors on the same data are assumed fully correlated."""
    found: dict[str, float] = {}
    for data, error in errors:
        found[data] = found.get(data, 0.0) + error
    return math.sqrt(sum(error**2 for error in found.values()))


# ------------------------------------------------------------------------------------------------------- accuracies


def weights_of(items: Sequence[Record], by_category: bool) -> Floats:
    """Return each item's weight; weights add up to 1. With `by_category`, every category has the same weight."""
    if not by_category:
        return np.full(len(items), 1 / len(items))
    sizes = Counter(item["category"] for item in items)
    return np.array([1 / (len(sizes) * sizes[item["category"]]) for item in items])


def mean_and_error(items: Sequence[Record], metric: str, by_category: bool = False) -> tuple[float, float]:
    """Return a task's score and its standard error, which is 0 for a single item or cluster.

    For independent items the error is sd / sqrt(n), with n - 1 in the variance; by category, where those count the
    same. For clusters, residuals are first added up within each (Miller, Adding Error Bars to Evals, 2024, arXiv
    2411.00640, section 2.2), with G / (G - 1) for G clusters.
    """
    weights = weights_of(items, by_category)
    values = np.array([item[metric] for item in items], np.float64)
    mean = float(weights @ values) if by_category else float(values.mean())
    if "cluster" in items[0]:
        return mean, _error_of_clusters([item["cluster"] for item in items], weights * (values - mean))

    labels = [item["category"] if by_category else None for item in items]
    return mean, _error_of_groups(labels, values, weights, mean)


def _error_of_clusters(clusters: Sequence[str], weighted_residuals: Floats) -> float:
    """Return the standard error of a mean whose residuals are related within each cluster."""
    number_of = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    sums = np.bincount([number_of[cluster] for cluster in clusters], weighted_residuals)
    correction = len(sums) / max(len(sums) - 1, 1)
    return math.sqrt(correction * float((sums**2).sum()))


def _error_of_groups(labels: Sequence[str | None], values: Floats, weights: Floats, mean: float) -> float:
    """Return the standard error of a weighted mean of independent items, with a variance for each group of them.

    `labels` names the group of each item; the items of a group have the same weight.
    """
    variance = 0.0
    for label in dict.fromkeys(labels):
        members = values[[one == label for one in labels]]
        n = len(members)
        if n > 1:
            squares = float(((members - members.mean()) ** 2).sum()) * n / (n - 1)
        else:  # one item shows no spread by itself, so its distance from the mean of all is used
            squares = float((members[0] - mean) ** 2)
        variance += float(weights[labels.index(label)]) ** 2 * squares
    return math.sqrt(variance)


# ------------------------------------------------------------------------------------------------------------ texts


def text_row(item: Record) -> tuple[float, float]:
    """Return (nats, bytes) of a window."""
    return -item["log_probability"][0], item["num_characters"][0]


def document_of(item: Record) -> int | str:
    """Return the independent unit of a window: its document, or the cluster of equal ones."""
    return item.get("cluster", item["index"])


def by_document(items: Sequence[Record]) -> Floats:
    """Return (n, [nats, bytes]) of documents. Equal documents are one; a document without bytes counts 1 byte."""
    sums = _sum_by_document(items, map(text_row, items))
    found = [sums[document] for document in sorted(sums)]  # pyright: ignore[reportArgumentType]
    return np.maximum(found, [-math.inf, 1])


def _sum_by_document(items: Sequence[Record], rows: Iterable[tuple[float, float]]) -> dict[int | str, Floats]:
    """Return the sum of the rows of each document's windows. `rows` has (y, x) for each item."""
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
