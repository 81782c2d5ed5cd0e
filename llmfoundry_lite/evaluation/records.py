"""Records of results and of their items: how they are computed from scores, their JSON schema, and its validation.

`<suite>/<model>.json` has the keys of RESULT and under `tasks` those of TASK for each task. `<model>.items.jsonl` has a
line with the keys of ITEM for each item.

`scored_item` and `generated_item` build the record of an item, and `summarise` reduces the items of a task to its
record: the mean of each metric with its standard error. `check_result` and `check_items` validate records that are read
from files.
"""

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmfoundry_lite.config.eval_schema import ACCURACIES, BPB, METRICS
from llmfoundry_lite.data.spelling import KINDS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import CHOICES, Item, PreparedTask
from llmfoundry_lite.evaluation.significance import Floats

if TYPE_CHECKING:  # reading results needs no torch
    from llmfoundry_lite.evaluation.scoring import Score

Record = dict[str, Any]

BITS = "bits_per_byte"
"""Metric of a held-out text: all of its bits over all of its bytes."""
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
    "skipped": dict | None,
    "lost_text": dict | None,
    "over_items": dict | None,
}
"""Keys of a task's record that are checked when it is read.

- `n` counts items.
- `metric` names the number that tables and averages show. The number is under that key, its standard error under
  METRIC_stderr.
- `fingerprint` covers the questions and how they are asked, `data_fingerprint` only the rows or texts.
- `skipped` counts items by the reason why they could not be asked.
- `lost_text` counts characters that the model's tokens do not spell, which bits per byte therefore leave out.
- `over_items` has, for a task with categories, the mean of each accuracy over all items, and its standard error. The
  accuracy of the record itself is the mean of the categories.

A record also has `num_fewshot`, `tokenization`, `chance`, `perplexity`, `categories`, `beginning` (tokens before each
text), `seconds`, and counts of irregular items."""
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
- `log_probability` (nats) and `num_characters` (bytes, for a window) have a number for each option.
- `num_bytes` are the bytes in UTF-8 of each option with the white space before it, and `bpb` the bits per byte of the
  right one. For generation they are about the first right answer.

A record also has `task`, `num_tokens` and `num_trimmed`; for choices `chosen`, `tie` and `has_duplicates`."""
OF_OPTIONS = ("choices", "log_probability", "num_tokens", "num_characters", "num_bytes")
"""Keys of an item's record whose value has an element for each option."""


# ---------------------------------------------------------------------------------------------------------- writing


def scored_item(task: PreparedTask, item: Item, scores: "Sequence[Score]") -> Record:
    """Build the record of an item from the scores of its options, one for each request of the item.

    The record has the log-probability and the length of each option. Items of tasks with choices also have the accuracy
    by each metric (see `_choose`). Those of language modelling have `acc`, which is 1 if every token of the answer was
    the likeliest. Both have `bpb`, the bits per byte of the right answer. Windows of held-out text have neither.
    """
    log_probabilities = [score.log_probability for score in scores]
    num_tokens = [len(request.continuation) for request in item.requests]
    num_characters = [request.num_characters for request in item.requests]
    record: Record = {
        "task": task.name,
        "index": item.index,
        **_question_and_choices(item),
        "log_probability": log_probabilities,
        "num_tokens": num_tokens,
        "num_characters": num_characters,
        "num_trimmed": max(request.num_trimmed for request in item.requests),
        **_category_and_cluster(item),
    }
    if task.kind == "perplexity":
        return record

    num_bytes = [request.num_bytes for request in item.requests]
    record |= {"num_bytes": num_bytes, BPB: bits_of_answer(log_probabilities[item.gold], num_bytes[item.gold])}
    if task.kind == "language_modeling":
        record["acc"] = int(scores[0].is_greedy)
    if task.kind in CHOICES:
        # Each accuracy divides an option's log-probability by its own measure of the option's length.
        lengths = {
            "acc_per_token": num_tokens,
            "acc": [1] * len(scores),
            "acc_norm": [max(characters, 1) for characters in num_characters],
            "acc_per_byte": [max(count, 1) for count in num_bytes],
        }
        record |= _choose(item, log_probabilities, lengths)
    return record


def _choose(item: Item, log_probabilities: Sequence[float], lengths: Mapping[str, Sequence[int]]) -> Record:
    """Choose an option of a multiple-choice or schema item by each accuracy, such as `acc_norm`.

    `lengths` maps the name of an accuracy to the length of each option, by which its log-probability is divided. The
    option with the largest quotient is chosen. For example, with the log-probabilities -4 and -6 of options of 2 and 6
    tokens, `acc` chooses the first option, and `acc_per_token` the second, because -6/6 is more than -4/2.

    Returns the part of the item's record that says which options were chosen, whether each choice is right (1 or 0,
    under the accuracy's name), and whether it was a tie.
    """
    chosen_options: dict[str, int] = {}
    is_correct: dict[str, int] = {}
    is_tied: dict[str, bool] = {}
    for metric, lengths_of_options in lengths.items():
        quotients = [total / length for total, length in zip(log_probabilities, lengths_of_options, strict=True)]
        largest = max(quotients)
        chosen_options[metric] = quotients.index(largest)  # in a tie the first option, as in lm_eval and LLM Foundry
        is_correct[metric] = int(chosen_options[metric] == item.gold)
        is_tied[metric] = quotients.count(largest) > 1
    return {
        "gold": item.gold,
        "chosen": chosen_options,
        **is_correct,
        "tie": is_tied,
        "has_duplicates": item.has_duplicates,
    }


def bits_of_answer(log_probability: float, num_bytes: int) -> float:
    """Return the bits per byte of an answer: minus its log-probability in bits, over its bytes.

    log_probability: that of the answer's tokens after the prompt, in nats.
    num_bytes: the bytes of its text in UTF-8, with the white space before it.

    An answer of probability 1/16 and 8 bytes has 4 / 8 = 0.5 bits per byte. OLMES divides by the same bytes
    (`bits_per_byte_corr`), and "Signal and Noise" (arXiv 2508.13144) compares models by the mean over questions.
    """
    return max(0.0, -log_probability) / math.log(2) / max(num_bytes, 1)


def generated_item(
    task: PreparedTask, item: Item, text: str, gold_score: "Score | None", *, is_correct: bool
) -> Record:
    """Build the record of an item for which the model generated `text` as its answer.

    `gold_score` is the score of the first right answer, if it can be asked for. It gives the record's `bpb`.
    """
    record: Record = {
        "task": task.name,
        "index": item.index,
        **_question_and_choices(item),
        "text": text,
        "answers": list(item.answers),
        "num_trimmed": item.requests[0].num_trimmed,
        **_category_and_cluster(item),
        "acc": int(is_correct),
    }
    if item.gold_request is not None and gold_score is not None:
        record |= {
            "log_probability": [gold_score.log_probability],
            "num_tokens": [len(item.gold_request.continuation)],
            "num_bytes": [item.gold_request.num_bytes],
            BPB: bits_of_answer(gold_score.log_probability, item.gold_request.num_bytes),
        }
    return record


def _question_and_choices(item: Item) -> Record:
    """Return the keys `question` and `choices` of an item's record: the texts of what was asked.

    A generation task has no choices, and a window of held-out text has neither.
    """
    record: Record = {}
    if item.question is not None:
        record["question"] = item.question
    if item.choices:
        record["choices"] = list(item.choices)
    return record


def _category_and_cluster(item: Item) -> Record:
    """Return the keys `category` and `cluster` of an item's record. An item without one has no such key."""
    record: Record = {}
    if item.category is not None:
        record["category"] = item.category
    if item.cluster is not None:
        record["cluster"] = item.cluster
    return record


def summarise(task: PreparedTask, items: Sequence[Record], seconds: float) -> Record:
    """Build the record of a task from the records of its items, in the same order as `task.items`.

    The record has the task's settings, the mean of each metric with its standard error, and counts of irregular items,
    such as those whose context was cut. `seconds` is how long the task took.
    """
    # Record what was asked, so that a comparison can check that two models were asked the same.
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

    # Add the scores.
    if task.kind == "perplexity":
        record |= _summarise_text(items)
    else:
        record |= _summarise_answers(task, items, has_categories(record))
    if has_categories(record):
        record["categories"] = _mean_by_category(items, record["metric"])

    # Count irregularities, which are recorded only if there are any.
    irregularities = {
        "num_trimmed": sum(bool(item["num_trimmed"]) for item in items),
        "num_missing_examples": sum(bool(item.num_missing_examples) for item in task.items),
        "num_repeated": task.num_repeated,
        "num_without_bpb": 0 if task.kind == "perplexity" else len(items) - len(items_with(items, BPB)),
        "skipped": task.skipped,
        "beginning": task.beginning,
    }
    record |= {key: fact for key, fact in irregularities.items() if fact}
    record["seconds"] = round(seconds, 3)
    return record


def _summarise_answers(task: PreparedTask, items: Sequence[Record], by_category: bool) -> Record:
    """Return the scores in the record of a task of questions, computed from the records of its items.

    These are the mean of each accuracy with its standard error, and that of the bits per byte of the right answer; for
    tasks with choices also the accuracy of guessing (`chance`), and for language modelling the perplexity of an answer.
    With `by_category`, a mean is that of the categories' means, and `over_items` has the means over all items.
    """
    # Every task of questions has `acc`. Tasks with choices also have accuracies that take lengths into account.
    summary: Record = {}
    has_choices = task.kind in CHOICES
    accuracies = ACCURACIES if has_choices else ("acc",)
    over_items: Record = {}
    for metric in (*accuracies, BPB):
        scored_items = items_with(items, metric)
        if not scored_items:
            continue
        mean, error = mean_and_error(scored_items, metric, by_category)
        summary[metric] = mean
        summary[f"{metric}_stderr"] = error
        if by_category:
            over_items[metric], over_items[f"{metric}_stderr"] = mean_and_error(scored_items, metric)
    if by_category:
        summary["over_items"] = over_items
    if any("cluster" in item for item in items):
        summary["num_clusters"] = len({item["cluster"] for item in items})

    if has_choices:
        # Guessing among n options is right with probability 1/n. Its mean is weighted in the same way as accuracies.
        items_with_chance = [{**item, "chance": 1 / len(item["num_tokens"])} for item in items]
        summary["chance"], _ = mean_and_error(items_with_chance, "chance", by_category)
        if task.metric in ACCURACIES:
            summary["num_ties"] = sum(item["tie"][task.metric] for item in items)
        summary["num_duplicates"] = sum(item["has_duplicates"] for item in items)
    if task.kind == "language_modeling":
        # This is the perplexity of whole answers, and not of their tokens.
        items_with_nats = [{**item, "nats": -item["log_probability"][0]} for item in items]
        mean_nats, error_nats = mean_and_error(items_with_nats, "nats")
        summary |= _perplexity(mean_nats, error_nats)
    return summary


def _summarise_text(items: Sequence[Record]) -> Record:
    """Return the scores in the record of a held-out text, computed from the records of its windows.

    These are the perplexity per token, the bits per byte, their standard errors, and the number of different documents.
    Sums over the whole text are divided, so that each token or byte counts the same. A text of 100 tokens and 400 bytes
    with a log-probability of -277.3 nats has perplexity exp(2.773) = 16 and 277.3 / ln 2 / 400 = 1 bit per byte.
    """
    # A window has a single option, the predicted text.
    nats_and_tokens = [(-item["log_probability"][0], item["num_tokens"][0]) for item in items]
    total_nats = sum(nats for nats, _ in nats_and_tokens)
    total_tokens = sum(tokens for _, tokens in nats_and_tokens)
    total_bytes = float(by_document(items)[:, 1].sum())  # a document without bytes counts one

    summary = _perplexity(total_nats / total_tokens, ratio_error(items, nats_and_tokens))
    summary["num_documents"] = len({document_of(item) for item in items})
    summary[BITS] = total_nats / math.log(2) / total_bytes
    error = bits_per_byte_error(items)
    if error is not None:  # None for a single window, which has no error to estimate
        summary[f"{BITS}_stderr"] = error
    return summary


def _mean_by_category(items: Sequence[Record], metric: str) -> dict[str, float]:
    """Return the mean of a metric in each category, by the category's name in alphabetical order."""
    means: dict[str, float] = {}
    for category in sorted({item["category"] for item in items}):
        members = items_with([item for item in items if item["category"] == category], metric)
        if not members:
            continue
        means[category], _ = mean_and_error(members, metric)
    return means


def _perplexity(nats: float, error: float | None) -> Record:
    """Return the keys `perplexity` and `perplexity_stderr` of a task's record.

    nats: the mean negative log-probability. The perplexity is exp(nats).
    error: the standard error of `nats`, or None. The perplexity's is exp(nats) * error, to first order (delta method).

    Returns an empty dict if one of them would exceed MAX_MAGNITUDE, because a record with such a number is refused when
    it is read. A model that is not trained yet exceeds it on answers of ten tokens.
    """
    if nats > math.log(MAX_MAGNITUDE):
        return {}
    perplexity = math.exp(nats)
    if error is None:
        return {"perplexity": perplexity}
    perplexity_error = perplexity * error
    if perplexity_error > MAX_MAGNITUDE:
        return {}
    return {"perplexity": perplexity, "perplexity_stderr": perplexity_error}


def hash_of(items: Sequence[Record]) -> str:
    """Return the hash of a task's item records, as the lines of JSON that they are written as."""
    return hash_of_lines([json.dumps(item) for item in items])


def hash_of_lines(lines: Sequence[str]) -> str:
    """Return the hash of lines, each with the newline that ends it in the file."""
    content = "".join(f"{line}\n" for line in lines)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------------- checking


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
    _check_types(record, dict.fromkeys(number_keys, int | float), place)

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


def check_items(record: Record, lines: Sequence[str], description: str) -> list[Record]:
    """Parse the lines of a task's items, and check that the task's record was computed from them.

    record: the task's record, with the hash of the items' lines and the scores.
    lines: the lines of the task in the file of items, in its order.
    description: names the items in errors, such as "base.items.jsonl: the items of arc_easy".

    Returns the records of the items. Raises DataError if their hash differs from the one in the record, or if the score
    that follows from them does.
    """
    items = [json.loads(line) for line in lines]
    metric = record["metric"]

    # The score stays None if the hash differs, or if the items are not what an evaluation writes.
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
    """Compute a task's main metric again from its items, which come from a file and may be anything.

    Returns None if an item has a value that no evaluation writes, if only some items have a cluster, or if two items
    have the same index. Raises KeyError and other errors of this kind if an item lacks a value.
    """
    # Each value of an item must pass the check of its key.
    for item in items:
        for key, is_sound in ITEM.items():
            if key in item and not is_sound(item[key]):
                return None
        if not _has_consistent_options(item):
            return None
    num_with_cluster = sum("cluster" in item for item in items)
    if 0 < num_with_cluster < len(items):
        return None

    # Windows of held-out text may share an index, which is their document's.
    if record["metric"] == BITS:
        return float(bits_per_byte(by_document(items).sum(axis=0)))

    num_distinct_indices = len({item["index"] for item in items})
    if num_distinct_indices < len(items):
        return None
    for metric in ACCURACIES:
        if metric in record:
            mean_and_error(items, metric)  # raises KeyError if an item lacks the metric
    scored_items = items_with(items, BPB) if record["metric"] == BPB else items
    score, _ = mean_and_error(scored_items, record["metric"], has_categories(record))
    return score


def _has_consistent_options(item: Record) -> bool:
    """Return whether all lists of an item's options have the same length, and its right option is one of them."""
    lengths = {len(item[key]) for key in OF_OPTIONS if key in item}
    if len(lengths) > 1:
        return False
    return not lengths or item.get("gold", 0) < min(lengths)


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


def items_with(items: Sequence[Record], metric: str) -> list[Record]:
    """Return the items that have a metric. An answer that does not fit into the model has no bits per byte."""
    return [item for item in items if metric in item]


def has_categories(record: Record) -> bool:
    """Return whether the task's score is the mean of its categories' scores."""
    return bool(record["settings"].get("has_categories"))


def error_of_sum(errors: Iterable[tuple[str, float]]) -> float:
    """Return the standard error of a sum of scores. `errors` has (fingerprint of the data, standard error) for each.

    Scores on the same data are assumed to be fully correlated, so their errors add up. Those on different data are
    independent, so the squares of their errors add up.
    """
    error_of_data: dict[str, float] = {}
    for data, error in errors:
        error_of_data[data] = error_of_data.get(data, 0.0) + error
    return math.sqrt(sum(error**2 for error in error_of_data.values()))


# ------------------------------------------------------------------------------------------------------- accuracies


def weights_of_tasks(names: Sequence[str]) -> dict[str, float]:
    """Return the weight of each task in an average. Weights add up to 1.

    Every label counts the same, however many numbers of examples it has: of arc_easy/0-shot, arc_easy/5-shot and
    piqa/0-shot, the first two have 1/4 each, and the last one has 1/2.
    """
    num_of_label = Counter(label_of(name) for name in names)
    return {name: 1 / (len(num_of_label) * num_of_label[label_of(name)]) for name in names}


def label_of(name: str) -> str:
    """Return the label of a task's name in results: `arc_easy` for `arc_easy/5-shot`."""
    return name.rpartition("/")[0] or name


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
