"""Keys of the records of results and of their items, checks of those that are read from files, and facts of a record.

`<suite>/<model>.json` has the keys of RESULT and under `tasks` those of TASK for each task. `<model>.items.jsonl` has a
line with the keys of ITEM for each item. `summaries.py` builds these records, and `means.py` computes their scores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmfoundry_lite.config.task_types import ACCURACIES, BITS, BPB, METRICS, TEXT
from llmfoundry_lite.data.spelling import KINDS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.own_code import is_own

Record = dict[str, Any]

BITS_METRICS = (BITS, BPB)
"""Metrics in bits per byte, of which less is better. BPB is the mean over the right answers to questions."""
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
    "chance": int | float | None,
    "skipped": dict | None,
    "lost_text": dict | None,
    "over_items": dict | None,
    "own_metrics": list | None,
}
"""Keys of a task's record that are checked when it is read.

- `n` counts items.
- `metric` names the number that tables and averages show. The number is under that key, its standard error under
  METRIC_stderr.
- `fingerprint` covers the questions and how they are asked, `data_fingerprint` only the rows or texts.
- `chance` is the accuracy of a model that guesses; a task without options has none.
- `skipped` counts items by the reason why they could not be asked.
- `lost_text` counts characters that the model's tokens do not spell, which bits per byte therefore leave out.
- `own_metrics` names the numbers that code of the user's own has computed for each item. More is better.
- `over_items` has, for a task with categories, the mean of each accuracy over all items, and its standard error. The
  accuracy of the record itself is the mean of the categories.

A record may also have OTHER_TASK_KEYS."""
OTHER_TASK_KEYS = (
    *("num_fewshot", "tokenization", "perplexity", "categories", "beginning", "seconds"),
    *("num_trimmed", "num_missing_examples", "num_repeated", "num_without_bpb"),
)
"""Keys of a task's record that are not checked. `beginning` counts the tokens before each text; the last four count
irregular items."""
LOST_TEXT = {**dict.fromkeys(("characters", "text_bytes", "lost_bytes", *KINDS), int), "examples": list}
"""Keys of a task's `lost_text`, as in `data/spelling.py`."""


def _is_within(value: Any, minimum: float, maximum: float) -> bool:
    """Return whether a value from a file is a number in this range. NaN is in no range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and minimum <= value <= maximum


def _is_index(value: Any) -> bool:
    """Return whether a value is a whole number from 0 on. A bool does not count as a number."""
    return type(value) is int and value >= 0


def _is_score(value: Any) -> bool:
    """Return whether a value is a number from 0 to 1."""
    return _is_within(value, 0, 1)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _are_log_probabilities(value: Any) -> bool:
    """Return whether a value is a list of finite numbers whose squares can be added up."""
    return isinstance(value, list) and all(_is_within(number, -MAX_MAGNITUDE, MAX_MAGNITUDE) for number in value)


def _are_sizes(value: Any) -> bool:
    """Return whether a value is a list of finite numbers from 0 on whose squares can be added up."""
    return isinstance(value, list) and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    """Return whether a value is a finite number from 0 on whose square can be added up."""
    return _is_within(value, 0, MAX_MAGNITUDE)


def _are_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_prompt_tokens(value: Any) -> bool:
    """Return whether a value is the prompt of an item in tokens, as `token_texts.prompt_tokens` returns it."""
    if not isinstance(value, dict) or value.keys() != {"shared", "contexts", "answers"}:
        return False
    for tokens_of_options in (value["contexts"], value["answers"]):
        are_lists = isinstance(tokens_of_options, list) and all(map(_are_texts, tokens_of_options))
        if not are_lists:
            return False
    return _are_texts(value["shared"]) and len(value["contexts"]) == len(value["answers"])


ITEM: dict[str, Callable[[Any], bool]] = {
    "index": _is_index,
    "question": _is_text,
    "choices": _are_texts,
    "gold": _is_index,
    "text": _is_text,
    "answers": _are_texts,
    "prompt_tokens": _are_prompt_tokens,
    **dict.fromkeys(ACCURACIES, _is_score),
    "category": _is_text,
    "cluster": _is_text,
    "log_probability": _are_log_probabilities,
    "num_tokens": _are_sizes,
    "num_characters": _are_sizes,
    "num_bytes": _are_sizes,
    BPB: _is_size,
}
"""Keys of an item's record that comparisons and pages read, with the check of each. Older results lack some of them.

- `question` is the text of what was asked, without examples, and `choices` has the text of each option. A schema's
  options are contexts, and its question is the text that continues them. Language modelling has one option.
- `gold` is the index of the right option, `text` a generated answer, and `answers` are those that count as right.
- `prompt_tokens`, with the setting `keep_prompts`, is the prompt in tokens, as `token_texts.prompt_tokens` returns it.
- `index` is the item's row, or the document of a window. Items of the same `cluster` are not independent.
- `log_probability` (nats), `num_tokens` and `num_characters` (bytes, for a window) have a number for each option.
- `num_bytes` are the bytes in UTF-8 of each option with the white space before it, and `bpb` the bits per byte of the
  right one. For generation they are about the first right answer.

A record also has `task` and `num_trimmed`; for choices `chosen`, `tie` and `has_duplicates`."""
ITEM_KEYS = {*ITEM, "task", "num_trimmed", "chosen", "tie", "has_duplicates"}
"""Keys of an item's record that are not numbers of the user's own code."""
OF_OPTIONS = ("choices", "log_probability", "num_tokens", "num_characters", "num_bytes")
"""Keys of an item's record whose value has an element for each option."""


# ------------------------------------------------------------------------------------------------------------- checking


def check_result(facts: Any, path: object) -> None:
    """Raise DataError unless the JSON content of a file is that of a result, as an evaluation writes it.

    facts: the content of the file, as `json.loads` returns it.
    path: the file, for errors.

    A result has facts of the model, with the types in RESULT, and a record for each task, with the types in TASK.
    """
    is_result = isinstance(facts, dict) and "model" in facts and isinstance(facts.get("tasks"), dict)
    if not is_result:
        raise DataError(
            f"{path} is not a result: expected a MODEL.json with 'model' and 'tasks', as scripts/eval.py writes"
        )
    _check_types(facts, RESULT, f"{path}: it")
    for task_name, record in facts["tasks"].items():
        if not isinstance(record, dict):
            record = {}  # which lacks every key, so that the error names the first of them
        _check_record(record, f"{path}: {task_name}")
    if not facts["tasks"]:
        raise DataError(f"{path} has no finished task")


def _check_record(record: Record, place: str) -> None:
    """Raise DataError unless the values of a task's record have the types that an evaluation writes.

    `place` names the record in errors, such as "results/base.json: arc_easy/0-shot".
    """
    _check_types(record, TASK, place)

    # The main metric and all standard errors must be numbers. `metric` names the former.
    number_keys = [record["metric"], *(key for key in record if key.endswith("_stderr") or key in METRICS)]
    own_metrics = record.get("own_metrics") or []
    if not _are_texts(own_metrics):
        raise DataError(
            f"{place} has own_metrics {own_metrics!r}, which no result has; evaluate it again with redo=true"
        )
    _check_types(record, dict.fromkeys([*number_keys, *own_metrics], int | float), place)

    # Only records of other tools, which are made when their logs are read, list their metrics.
    _check_types(record, {"metrics": type(None)}, place)

    # Parts of the record that are dicts themselves.
    _check_types(record["settings"], {"limit": int | None}, place)
    over_items = record.get("over_items") or {}
    _check_types(over_items, dict.fromkeys(over_items, int | float), f"{place}: over_items")
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


# ---------------------------------------------------------------------------------------------------------------- tasks


def limit_of_trial(record: Record) -> int | None:
    """Return the task's `limit` if it left items out, or None if the task was run on all of its items.

    A task with a limit that took effect is a trial and not a result.
    """
    limit = record["settings"].get("limit")
    if limit is None:
        return None
    if record.get("type") == TEXT:  # the limit counts windows, and is only recorded if it left some out
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


def is_own_metric(record: Record, metric: str) -> bool:
    """Return whether code of the user's own has computed a metric. It has no bounds, and more of it is better."""
    return metric in (record.get("own_metrics") or []) and metric not in METRICS


def is_number_of_own_code(value: Any) -> bool:
    """Return whether a value is a number as the user's own code may compute it for an item."""
    return _is_within(value, -MAX_MAGNITUDE, MAX_MAGNITUDE)


def own_code_of(record: Record) -> list[str]:
    """Return the import paths of the user's own code that has scored a task: its type and its metrics."""
    return [name for name in (record["type"], *(record.get("own_metrics") or [])) if is_own(name)]


def items_with(items: Sequence[Record], metric: str) -> list[Record]:
    """Return the items that have a metric. An answer that does not fit into the model has no bits per byte."""
    return [item for item in items if metric in item]


def has_categories(record: Record) -> bool:
    """Return whether the task's score is the mean of its categories' scores."""
    return bool(record["settings"].get("has_categories"))
