"""Items of a page: what each model answered to each question, as the data of the page's list. `page.py` places it.

The list has an entry for each item that any of the models was asked. Entries are plain JSON, whose keys the page's
script reads:

    {"index": 17, "question": "…", "choices": ["…", "…"], "gold": 1,
     "scores": [0, 1], "chosen": [0, 1], "log_probabilities": [[-3.1, -4.2], [-5.0, -2.7]], "lengths": [[3, 4], [3, 4]]}

Lists with a value for each model are in the order of the models, with null for a model that was not asked. Prompts
that were recorded token by token (`keep_prompts=true`) are under `prompts`; a number there refers to the model whose
prompt is the same. Texts are those of somebody else. Their size is limited, and so is that of the whole list.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from llmfoundry_lite.config.task_types import BITS
from llmfoundry_lite.evaluation.means import document_of
from llmfoundry_lite.evaluation.metrics import LENGTHS
from llmfoundry_lite.evaluation.records import BITS_METRICS, Record
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_studies.page_texts import label_of_metric, shorten

MAX_BYTES = 24_000_000
"""Most bytes of all entries. A browser reads this much in a third of a second."""
MAX_CHOICES = 30
MAX_PROMPT_TOKENS = 1_000
"""Most tokens of the context that the choices of an item have in common, and of each choice: the last ones."""
LOG_PROBABILITY_DIGITS = 3
SCORE_DIGITS = 5


@dataclass(slots=True)
class ItemList:
    """Entries of the page's list, by task, and what was left out."""

    tasks: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: int = 0
    """Items that are not in the list."""
    num_without_prompt: int = 0
    """Items that are in the list without their prompt, which the results have."""

    @property
    def num_items(self) -> int:
        """Number of entries in the list."""
        return sum(len(task["items"]) for task in self.tasks)


def collect_items(all_results: Sequence[Results], max_bytes: int = MAX_BYTES) -> ItemList:
    """Collect the items of all tasks, as far as they fit into `max_bytes`.

    `all_results` have the metrics by which they are shown. Every task gets the same room, and what a small task does
    not need goes to the others. When room is short, prompts are left out first, and then items on which the models have
    the same score.
    """
    collected = ItemList()
    entries_of_task: dict[str, list[dict[str, Any]]] = {}
    for task, record in _records(all_results).items():
        entries_of_task[task] = _entries(task, record, all_results)

    # The smallest tasks come first, so that what they leave is divided among the larger ones.
    size_of_task = {task: sum(map(_size, entries)) for task, entries in entries_of_task.items()}
    kept_of_task: dict[str, list[dict[str, Any]]] = {}
    bytes_left = max_bytes
    num_tasks_left = len(size_of_task)
    for task in sorted(size_of_task, key=lambda task: size_of_task[task]):
        entries = entries_of_task[task]
        share = bytes_left // num_tasks_left
        has_prompts = any("prompts" in entry for entry in entries)
        loses_prompts = has_prompts and size_of_task[task] > share
        if loses_prompts:
            entries = [{key: value for key, value in entry.items() if key != "prompts"} for entry in entries]
        kept_of_task[task] = _within(entries, share)
        if loses_prompts:
            collected.num_without_prompt += len(kept_of_task[task])
        bytes_left -= sum(map(_size, kept_of_task[task]))
        num_tasks_left -= 1

    for task, record in _records(all_results).items():
        kept = kept_of_task[task]
        collected.num_left_out += len(entries_of_task[task]) - len(kept)
        metric = record["metric"]
        facts = {"name": shorten(task), "type": record["type"], "metric": metric, "unit": _length_of_choices(metric)[1]}
        facts["label"] = label_of_metric(metric)
        directions = {"is_text": metric == BITS, "less_is_better": metric in BITS_METRICS}
        collected.tasks.append({**facts, **directions, "items": kept})
    return collected


def _records(all_results: Sequence[Results]) -> dict[str, Record]:
    """Return each task that has items, with the record of the first model that has it."""
    records: dict[str, Record] = {}
    for results in all_results:
        for task in results.items:
            records.setdefault(task, results.tasks[task])
    return records


def _size(entry: dict[str, Any]) -> int:
    """Return the number of bytes of an entry in the page."""
    return len(json.dumps(entry)) + 1


def _within(entries: list[dict[str, Any]], max_bytes: int) -> list[dict[str, Any]]:
    """Return the entries that fit into a number of bytes, in their order.

    Those on which the models have different scores are chosen first.
    """
    sizes = [_size(entry) for entry in entries]
    positions = sorted(range(len(entries)), key=lambda position: not _differs(entries[position]))
    chosen: list[int] = []
    num_bytes = 0
    for position in positions:
        if num_bytes + sizes[position] > max_bytes:
            break
        chosen.append(position)
        num_bytes += sizes[position]
    return [entries[position] for position in sorted(chosen)]


def _differs(entry: dict[str, Any]) -> bool:
    """Return whether the models have different scores on an item."""
    return any(score != entry["scores"][0] for score in entry["scores"])


# ------------------------------------------------------------------------------------------------------------ entries


def _entries(task: str, record: Record, all_results: Sequence[Results]) -> list[dict[str, Any]]:
    """Return the entries of a task, in the order of their indices."""
    is_text = record["metric"] == BITS
    items_of_model: list[dict[int | str, Record]] = []
    for results in all_results:
        items = results.items.get(task, [])
        items_of_model.append(_documents(items) if is_text else {item["index"]: item for item in items})

    first_of_key: dict[int | str, Record] = {}
    for items_by_key in items_of_model:
        for key, item in items_by_key.items():
            first_of_key.setdefault(key, item)

    entries: list[dict[str, Any]] = []
    for key, item in sorted(first_of_key.items(), key=lambda pair: pair[1]["index"]):
        answers = [items_by_key.get(key) for items_by_key in items_of_model]
        entry = _question(item)
        entry["scores"] = [None if answer is None else _score(answer, record["metric"]) for answer in answers]
        if not is_text:
            entry |= _answers(answers, record["metric"])
        entries.append(entry)
    return entries


def _documents(items: Sequence[Record]) -> dict[int | str, Record]:
    """Return the documents of a held-out text by their keys, each with the bits per byte of its windows together."""
    documents: dict[int | str, Record] = {}
    sums: dict[int | str, list[float]] = {}
    for item in items:
        key = document_of(item)
        documents.setdefault(key, {"index": item["index"]})
        nats_and_bytes = sums.setdefault(key, [0.0, 0.0])
        nats_and_bytes[0] -= item["log_probability"][0]
        nats_and_bytes[1] += item["num_characters"][0]
    for key, (nats, num_bytes) in sums.items():
        documents[key][BITS] = nats / math.log(2) / max(num_bytes, 1)
    return documents


def _score(item: Record, metric: str) -> float | None:
    """Return an item's score by a metric, or None if it has none."""
    score = item.get(metric)
    return round(float(score), SCORE_DIGITS) if _is_finite(score) else None


def _length_of_choices(metric: str) -> tuple[str, str]:
    """Return the key of the lengths by which a metric ranks choices, and their unit; empty texts if it needs none.

    Bits per byte rank no choices, although they are divided by a length.
    """
    return ("", "") if metric in BITS_METRICS else LENGTHS.get(metric, ("", ""))


def _question(item: Record) -> dict[str, Any]:
    """Return what is the same for all models: index, question, choices and the right answer, as far as recorded."""
    entry: dict[str, Any] = {"index": item["index"]}
    if isinstance(item.get("question"), str):
        entry["question"] = shorten(item["question"])
    if _are_texts(item.get("choices")):
        entry["choices"] = [shorten(choice) for choice in item["choices"][:MAX_CHOICES]]
    if _are_texts(item.get("answers")):
        entry["answers"] = [shorten(answer) for answer in item["answers"][:MAX_CHOICES]]
    if type(item.get("gold")) is int:
        entry["gold"] = item["gold"]
    if isinstance(item.get("category"), str):
        entry["category"] = shorten(item["category"])
    return entry


def _answers(answers: Sequence[Record | None], metric: str) -> dict[str, Any]:
    """Return what each model answered, as lists with an element for each model. Keys that no model has are left out."""
    answered = {
        "chosen": [_chosen(answer, metric) for answer in answers],
        "log_probabilities": [_numbers(answer, "log_probability") for answer in answers],
        "lengths": [_numbers(answer, _length_of_choices(metric)[0]) for answer in answers],
        "texts": [_text(answer) for answer in answers],
        "prompts": _distinct_prompts(answers),
    }
    return {key: values for key, values in answered.items() if any(value is not None for value in values)}


def _chosen(answer: Record | None, metric: str) -> int | None:
    """Return the choice that a model made by a metric; None if it made none."""
    chosen = answer.get("chosen") if answer else None
    if not isinstance(chosen, dict) or type(chosen.get(metric)) is not int:
        return None
    return chosen[metric]


def _numbers(answer: Record | None, key: str) -> list[float] | None:
    """Return a list of numbers from an item's record, rounded; None if it has none under this key."""
    numbers = answer.get(key) if answer else None
    if not isinstance(numbers, list) or not all(map(_is_finite, numbers)):
        return None
    return [round(number, LOG_PROBABILITY_DIGITS) for number in numbers[:MAX_CHOICES]]


def _text(answer: Record | None) -> str | None:
    """Return the text that a model generated; None if it generated none."""
    text = answer.get("text") if answer else None
    return shorten(text) if isinstance(text, str) else None


def _distinct_prompts(answers: Sequence[Record | None]) -> list[dict[str, Any] | int | None]:
    """Return the prompt of each model in tokens, or the number of an earlier model that has the same prompt."""
    prompts: list[dict[str, Any] | int | None] = []
    for answer in answers:
        prompt = _prompt(answer)
        is_known = prompt is not None and prompt in prompts
        prompts.append(prompts.index(prompt) if is_known else prompt)
    return prompts


def _prompt(answer: Record | None) -> dict[str, Any] | None:
    """Return the recorded prompt of an item, cut to its last tokens; None if none was recorded."""
    tokens = answer.get("prompt_tokens") if answer else None
    if not isinstance(tokens, dict):
        return None
    num_left_out = max(len(tokens["shared"]) - MAX_PROMPT_TOKENS, 0)
    return {
        "num_left_out": num_left_out,
        "shared": _last_tokens(tokens["shared"]),
        "contexts": [_last_tokens(context) for context in tokens["contexts"][:MAX_CHOICES]],
        "answers": [_last_tokens(answer) for answer in tokens["answers"][:MAX_CHOICES]],
    }


def _last_tokens(tokens: Sequence[str]) -> list[str]:
    """Return the last MAX_PROMPT_TOKENS of the texts of tokens."""
    return [shorten(text) for text in tokens[-MAX_PROMPT_TOKENS:]]


def _is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number that JSON can hold, which NaN is not."""
    return isinstance(value, int | float) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
