"""Questions: reads a row of a task's file as what a model is asked, by the type of the task.

`read_question` is the function that others call. A class for each type reads the columns of a row, and
`config/task_types.py` has their addresses. A user's own type is such a class, too, and `check_question` checks what it
returns. `prompts.py` renders a question with its examples and delimiters.
"""

import copy
import functools
import importlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmfoundry_lite.config.eval_schema import LETTERS, TaskConfig
from llmfoundry_lite.config.task_types import METRICS, METRICS_OF_ANSWER, Answer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.own_code import call_object, is_own


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that a row asks a model, without few-shot examples, and without the delimiters between texts.

    Its options are pairs of a context and an answer, whose probabilities are compared:

        multiple choice   "The sky is" + "blue",  "The sky is" + "green"
        schema            "The cup broke because the cup" + "fell",  "The cup broke because the table" + "fell"

    If the model generates its answer, there is one context, and the answers are all texts that count as right. A
    question with one context and one answer asks whether the model would continue so.
    """

    contexts: Sequence[str]
    """One for each option; one alone if the model generates its answer."""
    answers: Sequence[str]
    """One for each context or, if the model generates its answer, the accepted answers. Examples show the first."""
    gold: int = 0
    """Index of the right option; 0 if the model generates its answer."""
    text: str
    """The text by which people recognise the question."""
    choices: Sequence[str] = ()
    """The texts by which they recognise its options; none if the model generates its answer."""
    reasoning: str = ""
    """If the model generates its answer: text before the answer of an example, with the delimiter between them."""


class QuestionType(Protocol):
    """A type of task. Ours are called as `Thing(config)`, and a user's own as `Thing(config, **kwargs)`.

    A user's own type has an attribute `answer`, which says how the model answers. It may also have

    - a method `score(outcome)`, which returns numbers of an item by name. More is better. They are recorded with the
      item, and their means with a standard error in the task's record. One of our accuracies is replaced.
    - an attribute `metric`, the name of the number that tables and averages show, in place of ours.
    """

    answer: Answer
    """choices, continuation or generation."""

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in a row of the task's file. It depends on the row alone, and is called several times."""
        ...


def read_question(config: TaskConfig, row: Mapping[str, Any]) -> Question:
    """Return the question in a row of a task's file.

    A user's own type gets a copy of the row, so that code that changes it changes no other question.
    """
    own_row = copy.deepcopy(row) if is_own(config.icl_task_type) else row
    return build_question_type(config).read(own_row)


def answer_of(config: TaskConfig) -> Answer:
    """Return how a model answers the questions of a task. A user's own type is imported to ask it."""
    return config.task_type.answer or build_question_type(config).answer


def main_metric_of(config: TaskConfig) -> str:
    """Return the name of the number that tables and averages show of a task. Defaults are LLM Foundry's."""
    if config.metric:
        return config.metric
    if config.form == LETTERS:
        return "acc"  # letters have the same length
    answer = answer_of(config)
    own_metric = None if answer == "text" else getattr(build_question_type(config), "metric", None)
    return own_metric or METRICS_OF_ANSWER[answer][0]


@functools.lru_cache(maxsize=64)  # asked for once for each row; a suite has fewer tasks
def build_question_type(config: TaskConfig) -> QuestionType:
    """Build the class that reads the rows of a task, by the address in the table of types, or the user's own.

    The types of questions have one, and held-out text has none. Raises ConfigError for a type of the user's own that
    cannot be imported or built, or does not say how the model answers.
    """
    reader = config.task_type.reader
    assert reader is not None, f"{config.label}: a text has no rows"
    if is_own(reader):
        own_type: QuestionType = call_object(
            reader, f"{config.label}: icl_task_type", f"{config.label}: kwargs", config.kwargs, config
        )
        _check_own_type(own_type, config)
        return own_type
    module, _, name = reader.partition(":")
    question_type: QuestionType = getattr(importlib.import_module(module), name)(config)
    return question_type


# -------------------------------------------------------------------------------------------- types of the user's own

ANSWERS_OF_QUESTIONS = ("choices", "continuation", "generation")
"""How a model may answer the questions of a user's own type."""


def _check_own_type(own_type: Any, config: TaskConfig) -> None:
    """Raise ConfigError unless an object of the user's own can read rows, and goes with the keys of its task."""
    key = f"{config.label}: icl_task_type: {config.icl_task_type}"
    if not callable(getattr(own_type, "read", None)):
        raise ConfigError(f"{key} has no method read(row), which returns a Question")
    answer = getattr(own_type, "answer", None)
    if answer not in ANSWERS_OF_QUESTIONS:
        raise ConfigError(f"{key} has answer {answer!r}, expected {', '.join(ANSWERS_OF_QUESTIONS[:2])} or generation")
    is_computed = config.metric in METRICS_OF_ANSWER[answer] or config.metric not in METRICS
    if not is_computed:
        raise ConfigError(
            f"{config.label}: metric: {config.metric} needs choices, and {config.icl_task_type} has answer {answer!r}"
        )


def check_question(config: TaskConfig, row: Mapping[str, Any], place: str) -> None:
    """Raise DataError unless a user's own type reads a row as a question that can be asked.

    `place` names the row in errors, such as "rhymes: rhymes.jsonl, line 3". Other errors of the user's code keep their
    traceback.
    """
    name = config.icl_task_type
    try:
        question = read_question(config, row)
    except KeyError as error:
        column = error.args[0] if error.args else None
        if column in row:
            raise
        raise DataError(f"{place}: no column {column!r}, which {name} reads") from error
    if not isinstance(question, Question):
        raise DataError(f"{place}: {name} returns {type(question).__name__}, expected a Question")

    texts = [*question.contexts, *question.answers, *question.choices, question.text, question.reasoning]
    are_lists = not any(isinstance(value, str) for value in (question.contexts, question.answers, question.choices))
    if not are_lists or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{place}: {name} returns {question}, expected texts, and contexts and answers as lists of them"
        )

    num_contexts = len(question.contexts)
    num_answers = len(question.answers)
    counts = f"{num_contexts} contexts and {num_answers} answers"
    match answer_of(config):
        case "choices":
            is_sound = num_contexts == num_answers >= 2
            expected = "as many of both, two or more"
        case "continuation":
            is_sound = num_contexts == num_answers == 1
            expected = "one of both"
        case _:
            is_sound = num_contexts == 1 and num_answers >= 1
            expected = "one context, and the accepted answers"
    if not is_sound:
        raise DataError(f"{place}: {name} returns {counts}, expected {expected}")
    is_index = type(question.gold) is int and 0 <= question.gold < num_contexts
    if not is_index:
        raise DataError(f"{place}: {name} returns gold {question.gold!r}, expected 0 to {num_contexts - 1}")


# ------------------------------------------------------------------------------------------------------------ the types


class MultipleChoice:
    """One context and several answers.

    With the form "letters", the context lists the choices, and the answers are letters:

        "The sky is\\n A. blue\\n B. green" + "A",  "The sky is\\n A. blue\\n B. green" + "B"
    """

    answer: Answer = "choices"

    def __init__(self, config: TaskConfig):
        """Take the form of the question, and the delimiters of listed choices."""
        self.config = config

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in the columns `query`, `choices` and `gold`."""
        choices = row["choices"]
        context = row["query"]
        answers = choices
        if self.config.form == LETTERS:
            context += self.config.choices_delimiter + list_choices(self.config, choices)
            answers = list(string.ascii_uppercase[: len(choices)])
        # The context is repeated, so that each answer has its own.
        contexts = [context] * len(choices)
        return Question(contexts=contexts, answers=answers, gold=row["gold"], text=row["query"], choices=tuple(choices))


def list_choices(config: TaskConfig, choices: Sequence[str]) -> str:
    """Return the choices of a question, a line for each, after the letters A, B, C and so on.

    With the `letter_prefix` " ", the choices "blue" and "green" become `" A. blue\\n B. green"`.
    """
    letters = string.ascii_uppercase[: len(choices)]
    lines = [f"{config.letter_prefix}{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    return "\n".join(lines)


class Schema:
    """Several contexts and one answer, which is likely only after the right context."""

    answer: Answer = "choices"

    def __init__(self, config: TaskConfig):
        """Take nothing of the configuration."""

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in the columns `context_options`, `continuation` and `gold`."""
        contexts = row["context_options"]
        continuation = row["continuation"]
        # The answer is repeated, so that each context has its own. People see the contexts as choices.
        answers = [continuation] * len(contexts)
        return Question(
            contexts=contexts, answers=answers, gold=row["gold"], text=continuation, choices=tuple(contexts)
        )


class LanguageModeling:
    """One context, and the text that has to follow it."""

    answer: Answer = "continuation"

    def __init__(self, config: TaskConfig):
        """Take nothing of the configuration."""

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in the columns `context` and `continuation`."""
        continuation = row["continuation"]
        return Question(contexts=[row["context"]], answers=[continuation], text=row["context"], choices=(continuation,))


class Generation:
    """One context, after which the model writes its answer."""

    answer: Answer = "generation"

    def __init__(self, config: TaskConfig):
        """Take the delimiter between reasoning and answer."""
        self.cot_delimiter = config.cot_delimiter

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in the columns `context`, `answer`, `aliases` and `chain_of_thought`.

        If the rows have a column `chain_of_thought`, examples show the reasoning before the answer, with the delimiter
        `cot_delimiter` between them, as in LLM Foundry: `"2 + 3 is 5. #### 5"` with the delimiter " #### ". The model
        is expected to generate the delimiter as well, and the text after it is taken as its answer.
        """
        aliases = row.get("aliases") or []
        reasoning = ""
        if "chain_of_thought" in row:
            chain_of_thought = row["chain_of_thought"] or ""  # None in a row without reasoning
            reasoning = f"{chain_of_thought}{self.cot_delimiter}"
        return Question(
            contexts=[row["context"]], answers=[row["answer"], *aliases], text=row["context"], reasoning=reasoning
        )
