"""Numbers that the user's own code computes of an item: by its type of task, and by metrics of the user's own.

`score_by_own_code` is the function that others call. An `Outcome` is what the user's code gets. `docs/own-parts.md` is
the page for users.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.fields import is_number
from llmfoundry_lite.config.task_types import ACCURACIES, METRICS
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.items import Item, PreparedTask
from llmfoundry_lite.evaluation.questions import Question, build_question_type, read_question
from llmfoundry_lite.evaluation.records import BITS_METRICS, ITEM_KEYS, MAX_MAGNITUDE, OTHER_TASK_KEYS, TASK, Record
from llmfoundry_lite.own_code import call_object, import_object

MAX_NAME_CHARACTERS = 60
"""Maximum number of characters in the name of a number, because names are headings of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An item that a model has answered, as code of the user's own gets it."""

    row: Mapping[str, Any]
    """A copy of the row of the task's file."""
    question: Question
    log_probabilities: Sequence[float]
    """Log-probability of each option's answer after its context, in nats. If the model generates its answer, that of
    the first accepted answer; empty if that does not fit into the model."""
    num_tokens: Sequence[int]
    """Number of tokens of each of these answers."""
    num_bytes: Sequence[int]
    """Bytes in UTF-8 of each of these answers, with the white space before it."""
    are_likeliest: Sequence[bool]
    """For each option, whether all tokens of its answer are the likeliest. Empty if the model generates its answer."""
    text: str | None
    """The text that the model has generated; None if it generates nothing."""
    metrics: Mapping[str, float]
    """Numbers that are known already: those of the library, such as `acc`, and for a metric those of the type of task
    and of metrics before it."""


class Metric(Protocol):
    """A metric, called as `function(outcome, **metric_kwargs)`."""

    def __call__(self, outcome: Outcome, **metric_kwargs: Any) -> float:
        """Return a finite number for an item. More is better, so return minus a distance."""
        ...


def score_by_own_code(
    task: PreparedTask, item: Item, record: Record, are_likeliest: Sequence[bool] = ()
) -> dict[str, float]:
    """Return the numbers of an item that code of the user's own computes, by name; none for a task without such code.

    record: the item's record so far, with its log-probabilities and the metrics of the library.
    are_likeliest: for each option, whether all tokens of its answer are the likeliest.

    A type of task gives names to its numbers. The number of a metric has the metric's import path as its name. Raises
    DataError for a value that is no finite number, and for a name that the record uses for something else.
    """
    if item.row is None:
        return {}
    config = task.config
    place = f"{config.label}: row {item.index + 1}"
    outcome = Outcome(
        row=copy.deepcopy(item.row),  # own code may change it, and other items have the same row as an example
        question=read_question(config, item.row),
        log_probabilities=tuple(record.get("log_probability", ())),
        num_tokens=tuple(record.get("num_tokens", ())),
        num_bytes=tuple(record.get("num_bytes", ())),
        are_likeliest=tuple(are_likeliest),
        text=record.get("text"),
        metrics={name: float(record[name]) for name in METRICS if name in record},
    )

    # The type's numbers come first, so that metrics see them. They may replace an accuracy of the library.
    numbers: dict[str, float] = {}
    score = getattr(build_question_type(config), "score", None)
    if score is not None:
        for name, value in score(outcome).items():
            _check_name(name, config.icl_task_type, place)
            numbers[name] = _checked_number(value, name, config.icl_task_type, place)

    for name in config.own_metrics:
        seen = replace(outcome, row=copy.deepcopy(item.row), metrics={**outcome.metrics, **numbers})
        key = f"{config.label}: metric_names"
        value = call_object(name, key, f"{config.label}: metric_kwargs", config.metric_kwargs.get(name, {}), seen)
        numbers[name] = _checked_number(value, name, name, place)
    return numbers


def import_metrics(config: TaskConfig) -> None:
    """Import the metrics of the user's own that a task names, so that a mistake shows before a model is asked.

    Raises ConfigError for one that is not there.
    """
    for name in config.own_metrics:
        import_object(name, f"{config.label}: metric_names")


def list_own_numbers(config: TaskConfig, items: Sequence[Record]) -> list[str]:
    """Return the names of the numbers that code of the user's own has computed for the items of a task.

    Raises DataError if an item lacks one that others have, because their means would be of different items.
    """
    names = [name for name in items[0] if name not in ITEM_KEYS]
    for item in items:
        names_of_item = [name for name in item if name not in ITEM_KEYS]
        if set(names_of_item) != set(names):
            raise DataError(
                f"{config.label}: {config.icl_task_type} gives row {item['index'] + 1} the numbers "
                f"{', '.join(names_of_item) or 'none'}, and row {items[0]['index'] + 1} {', '.join(names) or 'none'}; "
                "expected the same for each row"
            )
    return names


def _check_name(name: Any, type_name: str, place: str) -> None:
    """Raise DataError unless a type of task may give this name to a number."""
    is_text = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME_CHARACTERS
    if not is_text:
        raise DataError(
            f"{place}: {type_name} names a number {name!r}, expected a text of 1 to {MAX_NAME_CHARACTERS} characters"
        )
    is_used = name in ITEM_KEYS or name in TASK or name in OTHER_TASK_KEYS or name in BITS_METRICS
    is_derived = name.endswith("_stderr")  # a standard error stands beside each number
    if is_derived or (is_used and name not in ACCURACIES):
        raise DataError(f"{place}: {type_name} names a number {name!r}, which results use already; choose another name")


def _checked_number(value: Any, name: str, source: str, place: str) -> float:
    """Return a value that the user's own code has computed. Raises DataError unless it is a finite number.

    An accuracy is from 0 to 1. `source` is the import path of the code.
    """
    if hasattr(value, "item"):  # numbers of numpy and torch
        value = value.item()
    if isinstance(value, bool):
        value = int(value)
    is_finite = is_number(value) and math.isfinite(value) and abs(value) <= MAX_MAGNITUDE
    if not is_finite:
        raise DataError(f"{place}: {source} gives {name} {value!r}, expected a finite number")
    if name in ACCURACIES and not 0 <= value <= 1:
        raise DataError(f"{place}: {source} gives {name} {value!r}, expected 0 to 1, because it is an accuracy")
    return value
