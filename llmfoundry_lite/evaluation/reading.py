"""Results, as `harness` writes them, read again: a model's JSON and its items, checked against each other."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.paired import Floats

Record = dict[str, Any]

Kinds = dict[str, tuple[type, ...]]
"""Key -> what its value may be."""

ACCURACIES = ("acc_per_token", "acc", "acc_norm")
BITS = "bits_per_byte"
LARGEST = 1e30
"""Nats or bytes, beyond which no sum of squares is to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A result and its items."""

    name: str
    path: Path
    facts: Record
    """The JSON."""
    items: dict[str, list[Record]]
    """Of each task, in the file's order."""


def cut_at(record: Record) -> int | None:
    """The `limit` that ended this task before its data did: what is found then is a try, not a result."""
    limit = (record.get("settings") or {}).get("limit")
    num_seen = record["n"] + sum((record.get("skipped") or {}).values())
    is_text = record.get("type") == "perplexity"  # whose limit is of windows
    return None if limit is None or (num_seen < limit and not is_text) else limit


def num_unasked(record: Record) -> int:
    """Items left when the difference to another result was decided: what the others give is no whole result."""
    return max(0, (record.get("sequential") or {}).get("num_items", 0) - record["n"])


def data_of(record: Record, name: str) -> str:
    """What tasks on the same data share, as of other examples, prompts or labels."""
    return record.get("data_fingerprint") or name.rpartition("/")[0]


def error_of_sum(errors: Iterable[tuple[str, float]]) -> float:
    """The standard error of a sum, from (data, standard error) of each part: parts on the same data are taken to err
    together, those on other data not at all."""
    found: dict[str, float] = {}
    for data, error in errors:
        found[data] = found.get(data, 0.0) + error
    return math.sqrt(sum(error**2 for error in found.values()))


def load_results(paths: Sequence[Path]) -> list[Loaded]:
    """Raises DataError for a file that is no result, or whose items are missing, torn or another evaluation's."""
    for i, path in enumerate(paths):
        if any(path.resolve() == earlier.resolve() for earlier in paths[:i]):
            raise DataError(f"{path} is given twice; name another result to compare it with")
    facts = [read_facts(path) for path in paths]
    names = [str(fact["model"]) for fact in facts]
    if len(set(names)) < len(names):
        names = _tell_apart(paths)
    return [
        Loaded(name=name, path=path, facts=fact, items=read_items(path, fact))
        for name, path, fact in zip(names, paths, facts, strict=True)
    ]


def read_facts(path: Path) -> Record:
    if path.is_dir():
        found = sorted(file.name for file in path.glob("*.json"))
        raise DataError(f"{path} is a folder; name a result in it: {', '.join(found) or 'it has none'}")
    if path.name.endswith(".jsonl"):
        raise DataError(f"{path}: name the result, MODEL.json; its items are found beside it")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; expected a MODEL.json that scripts/eval.py has written") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(facts, dict) or "model" not in facts or not isinstance(facts.get("tasks"), dict):
        raise DataError(
            f"{path} is no result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
        )
    _check_kinds(facts, FACTS, f"{path}: it")
    for task, record in facts["tasks"].items():
        metric = record.get("metric") if isinstance(record, dict) else None
        expected = ("n", "metric", "fingerprint", metric if isinstance(metric, str) else "metric")
        if missing := [key for key in expected if not isinstance(record, dict) or key not in record]:
            raise DataError(f"{path}: {task} has no {missing[0]!r}; evaluate it again with redo=true")
        _check_kinds(record, RECORD, f"{path}: {task}")
        numbers = {record["metric"], *(key for key in record if key.endswith("_stderr"))}
        _check_kinds(record, dict.fromkeys(numbers, (int, float)), f"{path}: {task}")
        _check_kinds(record.get("settings") or {}, {"limit": (int, NONE)}, f"{path}: {task}")
        if record.get("sequential") is not None:
            _check_kinds(record["sequential"], SEQUENTIAL, f"{path}: {task}")
    if not facts["tasks"]:
        raise DataError(f"{path} has no finished task")
    return facts


NONE = type(None)
FACTS: Kinds = {
    **dict.fromkeys(("model",), (str,)),
    **dict.fromkeys(("suite", "source", "save_id", "tokenizer", "precision"), (str, NONE)),
    **dict.fromkeys(("num_tokens_trained", "num_parameters"), (int, NONE)),
}
RECORD: Kinds = {
    "n": (int,),
    **dict.fromkeys(("metric", "fingerprint"), (str,)),
    **dict.fromkeys(("data_fingerprint", "type", "code"), (str, NONE)),
    **dict.fromkeys(("num_clusters", "num_documents"), (int, NONE)),
    **dict.fromkeys(("settings", "skipped", "sequential"), (dict, NONE)),
}
SEQUENTIAL: Kinds = {
    **dict.fromkeys(("against", "against_items", "spending"), (str,)),
    **dict.fromkeys(("num_items", "look", "seed"), (int,)),
    **dict.fromkeys(("level", "caution"), (float,)),
    **dict.fromkeys(("looks",), (list,)),
    **dict.fromkeys(("margin",), (float, NONE)),
}


def _check_kinds(values: Record, kinds: Kinds, whose: str) -> None:
    for key, expected in kinds.items():
        value = values.get(key)
        is_huge = isinstance(value, int | float) and abs(value) > LARGEST
        if isinstance(value, bool) or not isinstance(value, expected) or is_huge:
            raise DataError(f"{whose} has {key} {value!r}, which no result has; evaluate it again with redo=true")


def read_items(path: Path, facts: Record) -> dict[str, list[Record]]:
    """The items of every task, checked against the numbers in the result."""
    beside = path.with_name(f"{path.stem}.items.jsonl")
    try:
        lines = beside.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise DataError(
            f"{beside} {reason}, and results are compared item by item; keep it beside {path.name}, or evaluate again"
        ) from error
    items: dict[str, list[Record]] = {task: [] for task in facts["tasks"]}
    texts: dict[str, list[str]] = {task: [] for task in facts["tasks"]}
    torn = 0
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            items.get(item["task"], []).append(item)
            texts.get(item["task"], []).append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            torn = torn or number
    for task, record in facts["tasks"].items():
        if len(items[task]) != record["n"]:
            hint = f" (line {torn} is torn)" if torn else ""
            raise DataError(
                f"{beside} has {len(items[task]):,} of the {record['n']:,} items of {task}{hint}; evaluate again: "
                "what is whole is not done twice"
            )
        _check_items(beside, task, record, items[task])
        if record.get("items_hash", hash_of(texts[task])) != hash_of(texts[task]):
            raise DataError(
                f"{beside}: the items of {task} are not those that the result was made from; evaluate again with "
                "redo=true"
            )
    return items


def hash_of(lines: Sequence[str]) -> str:
    """Of a task's items, as their file has them."""
    return f"sha256:{hashlib.sha256(''.join(line + chr(10) for line in lines).encode()).hexdigest()[:16]}"


def _check_items(beside: Path, task: str, record: Record, items: Sequence[Record]) -> None:
    metric = record["metric"]
    for name in ACCURACIES:
        if name in record and not all(name in item for item in items):
            raise DataError(f"{beside}: the items of {task} lack {name} or index; evaluate again with redo=true")
    odd = next(filter(None, map(_find_odd, items)), "")
    if not odd and metric != BITS:  # of a text each window is an item, with the index of its document
        index, count = Counter(item.get("index") for item in items).most_common(1)[0] if items else (0, 0)
        odd = f"index {index} {count} times" if count > 1 else ""
    if not odd and 0 < sum("cluster" in item for item in items) < len(items):
        odd = "cluster in some of them alone"
    if odd:
        raise DataError(f"{beside}: the items of {task} have {odd}, which no result has; evaluate again with redo=true")
    try:
        if metric == BITS:
            found = float(bits_per_byte(by_document(items).sum(axis=0)))
        else:
            values = [item[metric] for item in items if item["index"] >= 0]
            found = float(weights_of(items, has_categories(record)) @ np.array(values, np.float64))
    except (KeyError, TypeError, IndexError, ValueError, ZeroDivisionError):
        raise DataError(
            f"{beside}: the items of {task} lack {metric} or index; evaluate again with redo=true"
        ) from None
    if not math.isclose(found, record[metric], rel_tol=1e-4, abs_tol=1e-9):
        raise DataError(
            f"{beside}: the items of {task} give {metric} {found:.4f}, the result says {record[metric]:.4f}; the two "
            "files are of different evaluations: evaluate again with redo=true"
        )


def _find_odd(item: Record) -> str:
    """Name the first value that no evaluation writes; empty if there is none."""

    def is_number(value: Any, least: float, most: float) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    sound = {
        "index": lambda value: type(value) is int and value >= 0,
        **dict.fromkeys(ACCURACIES, lambda value: is_number(value, 0, 1)),
        **dict.fromkeys(("category", "cluster"), lambda value: isinstance(value, str)),
        "log_probability": lambda value: all(is_number(nats, -LARGEST, LARGEST) for nats in value),
        "num_characters": lambda value: all(is_number(count, 0, LARGEST) for count in value),
    }
    for key, is_sound in sound.items():
        try:
            if key in item and not is_sound(item[key]):
                return f"{key} {item[key]!r}"
        except TypeError:  # no list
            return f"{key} {item[key]!r}"
    return ""


def _tell_apart(paths: Sequence[Path]) -> list[str]:
    """Paths without what they have in common."""
    parts = [path.resolve().with_suffix("").parts for path in paths]
    shortest = min(len(part) for part in parts)
    common = next((i for i in range(shortest) if len({part[i] for part in parts}) > 1), shortest - 1)
    return ["/".join(part[common:]) for part in parts]


# -------------------------------------------------------------------------------------------------------- accuracies


def has_categories(record: Record) -> bool:
    """Whether the task's score is the mean of its categories' scores."""
    return bool((record.get("settings") or {}).get("has_categories"))


def weights_of(items: Sequence[Record], by_category: bool) -> Floats:
    """What each item counts; they add up to 1. By category, every category counts the same."""
    if not by_category:
        return np.full(len(items), 1 / len(items))
    sizes = Counter(item["category"] for item in items)
    return np.array([1 / (len(sizes) * sizes[item["category"]]) for item in items])


def mean_and_error(items: Sequence[Record], metric: str, by_category: bool = False) -> tuple[float, float]:
    """The task's score and its standard error; 0 where there is one item alone, or one cluster.

    Of independent items sd / sqrt(n), with n - 1 in the variance, within each category where they count the same. Of
    items in clusters the residuals are added up within each first (Miller, Adding Error Bars to Evals, 2024, arXiv
    2411.00640, section 2.2), with G / (G - 1) for G clusters.
    """
    weights, values = weights_of(items, by_category), np.array([item[metric] for item in items], np.float64)
    mean = float(weights @ values) if by_category else float(values.mean())
    if "cluster" in items[0]:
        groups = list({item["cluster"]: None for item in items})
        number_of = {group: number for number, group in enumerate(groups)}
        numbers = [number_of[item["cluster"]] for item in items]
        sums = np.bincount(numbers, weights * (values - mean))
        return mean, math.sqrt(len(groups) / max(len(groups) - 1, 1) * float((sums**2).sum()))
    variance = 0.0
    labels = [item["category"] for item in items] if by_category else [None] * len(items)
    for _, of_label in groupby(sorted(range(len(items)), key=lambda i: str(labels[i])), key=lambda i: labels[i]):
        its = list(of_label)
        n, own = len(its), values[its]
        # A category of one item shows no spread; that of all stands for it.
        squares = float(((own - own.mean()) ** 2).sum()) * n / (n - 1) if n > 1 else float((own[0] - mean) ** 2)
        variance += float(weights[its[0]]) ** 2 * squares
    return mean, math.sqrt(variance)


# ------------------------------------------------------------------------------------------------------------- texts


def text_row(item: Record) -> tuple[float, float]:
    return -item["log_probability"][0], max(item["num_characters"][0], 1)


def by_document(items: Sequence[Record]) -> Floats:
    """(n, [nats, bytes]) of documents; equal ones are one."""
    sums: dict[int | str, list[float]] = {}
    for item in items:
        nats, num_bytes = text_row(item)
        known = sums.setdefault(document_of(item), [0.0, 0.0])
        known[0] += nats
        known[1] += num_bytes
    return np.array([sums[document] for document in sorted(sums)])  # pyright: ignore[reportArgumentType]


def document_of(item: Record) -> int | str:
    """Return the independent unit of a window of text: its document, or the cluster of equal ones."""
    return item.get("cluster", item["index"])


def bits_per_byte(nats_and_bytes: Floats) -> Floats:
    return nats_and_bytes[..., 0] / nats_and_bytes[..., 1] / math.log(2)


def ratio_error(items: Sequence[Record], rows: Sequence[tuple[float, float]]) -> float | None:
    """Standard error of sum(y) / sum(x) over a text's windows, each with its `rows` (y, x); None for a single window.

    The units are documents, as windows of one document are not independent; of a single document there is nothing
    but its windows. For small errors R - R0 = sum(y - R x) / sum(x), whose variance is n / (n - 1) sum((y - R x)²) /
    sum(x)²: the linearised ratio estimator of Cochran, Sampling Techniques (3rd edition, 1977), chapter 6, without its
    finite-population correction.
    """
    sums: dict[int | str, Floats] = {}
    for item, row in zip(items, rows, strict=True):
        sums[document_of(item)] = sums.get(document_of(item), np.zeros(2)) + row
    units = np.array(list(sums.values()) if len(sums) > 1 else rows)
    n = len(units)
    if n == 1:
        return None
    sum_y, sum_x = units.sum(axis=0)
    residuals = units[:, 0] - sum_y / sum_x * units[:, 1]
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / float(sum_x)


def bits_per_byte_error(items: Sequence[Record]) -> float | None:
    error = ratio_error(items, [text_row(item) for item in items])
    return None if error is None else error / math.log(2)
