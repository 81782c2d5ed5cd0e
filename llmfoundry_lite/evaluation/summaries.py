"""Summaries: builds the record of an item from its scores, and the record of a task from those of its items.

`scored_item` and `generated_item` build the record of an item, and `summarise` reduces the items of a task to its
record: the mean of each metric with its standard error. `check_items` does the same with items that are read from a
file, to find out whether they belong to a task's record. `records.py` lists the keys, and `means.py` has the formulas.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmfoundry_lite.config.task_types import ACCURACIES, BITS, BPB, METRICS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import Item, PreparedTask
from llmfoundry_lite.evaluation.means import (
    bits_per_byte,
    bits_per_byte_error,
    by_document,
    document_of,
    mean_and_error,
    ratio_error,
)
from llmfoundry_lite.evaluation.own_scores import list_own_numbers, score_by_own_code
from llmfoundry_lite.evaluation.records import (
    ITEM,
    MAX_MAGNITUDE,
    OF_OPTIONS,
    Record,
    has_categories,
    is_number_of_own_code,
    items_with,
)

if TYPE_CHECKING:  # reading results needs no torch
    from llmfoundry_lite.evaluation.scoring import Score


# -------------------------------------------------------------------------------------------------------------- writing


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
    if task.answer == "text":
        return record

    num_bytes = [request.num_bytes for request in item.requests]
    record |= {"num_bytes": num_bytes, BPB: bits_of_answer(log_probabilities[item.gold], num_bytes[item.gold])}
    if task.answer == "continuation":
        record["acc"] = int(scores[0].is_greedy)
    if task.answer == "choices":
        # Each accuracy divides an option's log-probability by its own measure of the option's length.
        lengths = {
            "acc_per_token": num_tokens,
            "acc": [1] * len(scores),
            "acc_norm": [max(characters, 1) for characters in num_characters],
            "acc_per_byte": [max(count, 1) for count in num_bytes],
        }
        record |= _choose(item, log_probabilities, lengths)
    return record | score_by_own_code(task, item, record, [score.is_greedy for score in scores])


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
    return record | score_by_own_code(task, item, record)


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
    if task.answer == "text":
        record |= _summarise_text(items)
    else:
        own_numbers = list_own_numbers(task.config, items) if task.config.own_code else []
        if own_numbers:
            record["own_metrics"] = own_numbers
        record |= _summarise_answers(task, items, own_numbers, has_categories(record))
        if record["metric"] not in record and record["metric"] not in METRICS:
            raise DataError(
                f"{task.name}: {task.kind} has the metric {record['metric']!r}, and its method score returns "
                f"{', '.join(own_numbers) or 'none'}"
            )
        if record["metric"] not in record:
            record["metric"] = "acc"  # no right answer of a generation task could be scored, so there is no `bpb`
    if has_categories(record):
        record["categories"] = _mean_by_category(items, record["metric"])

    # Count irregularities, which are recorded only if there are any.
    irregularities = {
        "num_trimmed": sum(bool(item["num_trimmed"]) for item in items),
        "num_missing_examples": sum(bool(item.num_missing_examples) for item in task.items),
        "num_repeated": task.num_repeated,
        "num_without_bpb": 0 if task.answer == "text" else len(items) - len(items_with(items, BPB)),
        "skipped": task.skipped,
        "beginning": task.beginning,
    }
    record |= {key: fact for key, fact in irregularities.items() if fact}
    record["seconds"] = round(seconds, 3)
    return record


def _summarise_answers(
    task: PreparedTask, items: Sequence[Record], own_numbers: Sequence[str], by_category: bool
) -> Record:
    """Return the scores in the record of a task of questions, computed from the records of its items.

    These are the mean of each accuracy with its standard error, and that of the bits per byte of the right answer; for
    tasks with choices also the accuracy of guessing (`chance`), and for language modelling the perplexity of an answer.
    `own_numbers` are the names of those that the user's own code has computed.
    With `by_category`, a mean is that of the categories' means, and `over_items` has the means over all items.
    """
    # Every task of questions has `acc`. Tasks with choices also have accuracies that take lengths into account.
    summary: Record = {}
    has_choices = task.answer == "choices"
    accuracies = ACCURACIES if has_choices else ("acc",)
    over_items: Record = {}
    for metric in (*accuracies, BPB, *own_numbers):
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
    if task.answer == "continuation":
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


# ------------------------------------------------------------------------------------------------------------- checking


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
        for name in record.get("own_metrics") or []:
            if not is_number_of_own_code(item[name]):
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
