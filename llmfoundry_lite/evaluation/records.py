"""Records of a result and its items: their JSON schema, their computation and validation.

`<suite>/<model>.json` has the keys of RESULT and under `tasks` those of TASK for each task. `<model>.items.jsonl` has a
line with the keys of ITEM for each item.
"""

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite.config.eval_schema import ACCURACIES
from llmfoundry_lite.data.spelling import KINDS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.significance import Floats
from llmfoundry_lite.evaluation.tasks import CHOICES, Item, Prepared

if TYPE_CHECKING:  # reading results needs no torch
    from llmfoundry_lite.evaluation.scoring import Score

Record = dict[str, Any]

BITS = "bits_per_byte"
MAX_MAGNITUDE = 1e30
"""Nats or bytes beyond which sums of squares may overflow."""

RESULT = {
    **dict.fromkeys(("model", "suite", "source"), str),
    "save_id": str | None,
    "num_tokens_trained": int | None,
    "num_parameters": int | None,
    **dict.fromkeys(("tokenizer", "precision"), str),
}
"""Keys of a model's JSON, which also has `average` and `tasks`."""
TASK = {
    "n": int,
    "metric": str,
    "type": str,
    "settings": dict,
    "code": str,
    **dict.fromkeys(("fingerprint", "data_fingerprint", "items_hash"), str),
    **dict.fromkeys(("num_clusters", "num_documents"), int | None),
    **dict.fromkeys(("skipped", "lost_text"), dict | None),
}
"""Keys of a task. `n` counts items. `metric` names the number that tables and the average show; it is under that key,
its standard error under METRIC_stderr. `fingerprint` covers the questions and how they are asked, `data_fingerprint`
only the rows or texts. `skipped` counts items by the reason why they could not be asked. `lost_text` counts characters
that the model's tokens do not spell, which bits per byte therefore leave out. Other keys: `num_fewshot`,
`tokenization`, `chance`, `perplexity`, `categories`, `beginning` (tokens before each text), `seconds`, and counts of
irregular items."""
LOST_TEXT = {**dict.fromkeys(("characters", "text_bytes", "lost_bytes", *KINDS), int), "examples": list}
"""Keys of a task's `lost_text`, as in `data/spelling.py`."""
ITEM = {
    "index": lambda value: type(value) is int and value >= 0,
    **dict.fromkeys(ACCURACIES, lambda value: _is_within(value, 0, 1)),
    **dict.fromkeys(("category", "cluster"), lambda value: isinstance(value, str)),
    "log_probability": lambda value: (
        isinstance(value, list) and all(_is_within(v, -MAX_MAGNITUDE, MAX_MAGNITUDE) for v in value)
    ),
    "num_characters": lambda value: isinstance(value, list) and all(_is_within(v, 0, MAX_MAGNITUDE) for v in value),
}
"""Keys of an item that comparisons read. `index` is that of its row, or of a window's document. Items with the same
`cluster` are not independent. `log_probability` (nats) and `num_characters` (bytes, for a window) have a number for
each option. Other keys: `task`, `num_tokens`, `num_trimmed`; for choices `gold`, `chosen`, `tie`, `has_duplicates`; for
generation `text`, `answers`."""


def _is_within(value: Any, minimum: float, maximum: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


# ---------------------------------------------------------------------------------------------------------- writing


def scored_item(task: Prepared, item: Item, scores: "Sequence[Score]") -> Record:
    """Build an item's record from the scores of its options."""
    sums = [score.log_probability for score in scores]
    tokens = [len(request.continuation) for request in item.requests]
    characters = [request.num_characters for request in item.requests]
    record: Record = {
        "task": task.name,
        "index": item.index,
        "log_probability": sums,
        "num_tokens": tokens,
        "num_characters": characters,
        "num_trimmed": max(request.num_trimmed for request in item.requests),
        **_groups(item),
    }
    if task.kind == "language_modeling":
        record["acc"] = int(scores[0].is_greedy)
    if task.kind in CHOICES:
        scales = {"acc_per_token": tokens, "acc": [1] * len(sums), "acc_norm": [max(n, 1) for n in characters]}
        rated = {name: [s / n for s, n in zip(sums, scale, strict=True)] for name, scale in scales.items()}
        record["gold"] = item.gold
        # The first one of a tie, as in both other harnesses.
        record["chosen"] = {name: values.index(max(values)) for name, values in rated.items()}
        record |= {name: int(chosen == item.gold) for name, chosen in record["chosen"].items()}
        record["tie"] = {name: values.count(max(values)) > 1 for name, values in rated.items()}
        record["has_duplicates"] = item.has_duplicates
    return record


def generated_item(task: Prepared, item: Item, text: str, *, is_right: bool) -> Record:
    """Build the record of an item whose answer the model wrote."""
    record: Record = {"task": task.name, "index": item.index, "text": text, "answers": list(item.answers)}
    return {**record, "num_trimmed": item.requests[0].num_trimmed, **_groups(item), "acc": int(is_right)}


def _groups(item: Item) -> Record:
    named = {"category": item.category, "cluster": item.cluster}
    return {key: value for key, value in named.items() if value is not None}


def summarise(task: Prepared, items: Sequence[Record], seconds: float) -> Record:
    """Build a task's record: means with their standard errors, and counts of irregular items."""
    record: Record = {
        "type": task.kind,
        "n": len(task.items),
        "num_fewshot": task.num_fewshot,
        "tokenization": task.config.tokenization,
        "fingerprint": task.fingerprint,
        "data_fingerprint": task.data_fingerprint,
        "settings": task.settings,
        "metric": task.metric,
        **({} if task.lost_text is None else {"lost_text": task.lost_text}),
    }
    for name in ACCURACIES if task.kind in CHOICES else () if task.kind == "perplexity" else ("acc",):
        record[name], record[f"{name}_stderr"] = mean_and_error(items, name, has_categories(record))
    if task.kind != "perplexity" and any("cluster" in item for item in items):
        record["num_clusters"] = len({item["cluster"] for item in items})
    if task.kind in CHOICES:
        chances = [{**item, "chance": 1 / len(item["num_tokens"])} for item in items]
        record["chance"], _ = mean_and_error(chances, "chance", has_categories(record))
        record["num_ties"] = sum(item["tie"][record["metric"]] for item in items)
        record["num_duplicates"] = sum(item["has_duplicates"] for item in items)
    if task.kind == "language_modeling":
        answers = [{**item, "nats": -item["log_probability"][0]} for item in items]
        record |= _perplexity(*mean_and_error(answers, "nats"))
    if task.kind == "perplexity":
        rows = [(-item["log_probability"][0], item["num_tokens"][0]) for item in items]
        nats = sum(row[0] for row in rows)
        record |= _perplexity(nats / sum(row[1] for row in rows), ratio_error(items, rows))
        record["num_documents"] = len({document_of(item) for item in items})
        record[BITS] = nats / math.log(2) / float(by_document(items)[:, 1].sum())
        if (error := bits_per_byte_error(items)) is not None:
            record[f"{BITS}_stderr"] = error
    if has_categories(record):
        names = sorted({item["category"] for item in items})
        of_each = {name: [item for item in items if item["category"] == name] for name in names}
        record["categories"] = {name: mean_and_error(its, record["metric"])[0] for name, its in of_each.items()}
    odd = {
        "num_trimmed": sum(bool(item["num_trimmed"]) for item in items),
        "num_missing_examples": sum(bool(item.num_missing_examples) for item in task.items),
        "num_repeated": task.num_repeated,
        "skipped": task.skipped,
        "beginning": task.beginning,
    }
    return {**record, **{key: value for key, value in odd.items() if value}, "seconds": round(seconds, 3)}


def _perplexity(nats: float, error: float | None) -> Record:
    """Return exp(nats) ± exp(nats) error; empty where it overflows a float, as for long answers."""
    with contextlib.suppress(OverflowError):
        found = math.exp(nats)
        return {"perplexity": found, **({} if error is None else {"perplexity_stderr": found * error})}
    return {}


def hash_of(items: Sequence[Record]) -> str:
    return hash_of_lines([json.dumps(item) for item in items])


def hash_of_lines(lines: Sequence[str]) -> str:
    """Return the hash of the lines of a task's items."""
    return f"sha256:{hashlib.sha256(''.join(line + chr(10) for line in lines).encode()).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------------- checking


def check_result(facts: Any, path: object) -> None:
    """Raise DataError for content that no evaluation has written."""
    if not isinstance(facts, dict) or "model" not in facts or not isinstance(facts.get("tasks"), dict):
        raise DataError(
            f"{path} is no result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
        )
    _check_kinds(facts, RESULT, f"{path}: it")
    for task, record in facts["tasks"].items():
        record, whose = record if isinstance(record, dict) else {}, f"{path}: {task}"
        _check_kinds(record, TASK, whose)
        numbers = {record["metric"], *(key for key in record if key.endswith("_stderr"))}
        _check_kinds(record, dict.fromkeys(numbers, int | float), whose)
        _check_kinds(record["settings"], {"limit": int | None}, whose)
        if record.get("lost_text") is not None:
            _check_kinds(record["lost_text"], LOST_TEXT, whose)
    if not facts["tasks"]:
        raise DataError(f"{path} has no finished task")


def _check_kinds(values: Record, kinds: Mapping[Any, Any], whose: str) -> None:
    for key, expected in kinds.items():
        value = values.get(key)
        is_huge = isinstance(value, int | float) and not abs(value) <= MAX_MAGNITUDE  # NaN too
        if isinstance(value, bool) or not isinstance(value, expected) or is_huge:
            raise DataError(f"{whose} has {key} {value!r}, which no result has; evaluate it again with redo=true")


def check_items(record: Record, lines: Sequence[str], whose: str) -> list[Record]:
    """Return the items in a task's lines. Raises DataError unless the task's result was made from them."""
    items, metric, found = [json.loads(line) for line in lines], record["metric"], None
    with contextlib.suppress(KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
        found = _score_of(record, items) if record["items_hash"] == hash_of_lines(lines) else None
    if found is None:
        raise DataError(f"{whose} are not those that the result was made from; evaluate again with redo=true")
    if not math.isclose(found, record[metric], rel_tol=1e-4, abs_tol=1e-9):
        raise DataError(
            f"{whose} give {metric} {found:.4f}, the result says {record[metric]:.4f}; the two files are of different "
            "evaluations: evaluate again with redo=true"
        )
    return items


def _score_of(record: Record, items: Sequence[Record]) -> float | None:
    """Recompute the task's score from its items; None for items that no evaluation has written."""
    if not all(is_sound(item[key]) for item in items for key, is_sound in ITEM.items() if key in item):
        return None
    if 0 < sum("cluster" in item for item in items) < len(items):
        return None
    if record["metric"] == BITS:
        return float(bits_per_byte(by_document(items).sum(axis=0)))
    if len({item["index"] for item in items}) < len(items):
        return None
    for name in ACCURACIES:
        if name in record:
            mean_and_error(items, name)  # raises if an item lacks the metric
    return mean_and_error(items, record["metric"], has_categories(record))[0]


# ------------------------------------------------------------------------------------------------------------ tasks


def cut_at(record: Record) -> int | None:
    """Return the `limit` if it left items out, so that the task is a trial, not a result; else None."""
    limit = record["settings"].get("limit")
    num_seen = record["n"] + sum((record.get("skipped") or {}).values())
    is_text = record.get("type") == "perplexity"  # its limit counts windows
    return None if limit is None or (num_seen < limit and not is_text) else limit


def lost_share(record: Record) -> float:
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

    For independent items it is sd / sqrt(n), with n - 1 in the variance; by category where those count the same. For
    clusters, residuals are first added up within each (Miller, Adding Error Bars to Evals, 2024, arXiv 2411.00640,
    section 2.2), with G / (G - 1) for G clusters.
    """
    weights, values = weights_of(items, by_category), np.array([item[metric] for item in items], np.float64)
    mean = float(weights @ values) if by_category else float(values.mean())
    if "cluster" in items[0]:
        number_of = {group: number for number, group in enumerate(dict.fromkeys(item["cluster"] for item in items))}
        sums = np.bincount([number_of[item["cluster"]] for item in items], weights * (values - mean))
        return mean, math.sqrt(len(sums) / max(len(sums) - 1, 1) * float((sums**2).sum()))
    variance, labels = 0.0, [item["category"] if by_category else None for item in items]
    for label in dict.fromkeys(labels):
        own = values[[one == label for one in labels]]
        n = len(own)
        # A category of one item shows no spread, so that of all items is used.
        squares = float(((own - own.mean()) ** 2).sum()) * n / (n - 1) if n > 1 else float((own[0] - mean) ** 2)
        variance += float(weights[labels.index(label)]) ** 2 * squares
    return mean, math.sqrt(variance)


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
    sums: dict[int | str, Floats] = {}
    for item, row in zip(items, rows, strict=True):
        sums[document_of(item)] = sums.get(document_of(item), np.zeros(2)) + row
    return sums


def bits_per_byte(nats_and_bytes: Floats) -> Floats:
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
    error = ratio_error(items, list(map(text_row, items)))
    return None if error is None else error / math.log(2)
