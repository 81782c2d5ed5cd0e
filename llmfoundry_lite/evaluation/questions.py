"""Questions: reads a row of a task's file as what a model is asked, by the type of the task.

`read_question` is the function that others call. A class for each type reads the columns of a row, and
`config/task_types.py` has their addresses. `prompts.py` renders a question with its examples and delimiters.
"""

import functools
import importlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llmfoundry_lite.config.eval_schema import LETTERS, TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a model is asked by a row, without few-shot examples, and without the delimiters between texts.

    Its options are pairs of a context and an answer, whose probabilities are compared:

        multiple choice   "The sky is" + "blue",  "The sky is" + "green"
        schema            "The cup broke because the cup" + "fell",  "The cup broke because the table" + "fell"

    If the model generates its answer, there is one context, and the answers are all texts that count as right.
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
    """A type of question. It is built with the configuration of a task."""

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in a row of the task's file, whose columns and their types have been checked."""
        ...


def read_question(config: TaskConfig, row: Mapping[str, Any]) -> Question:
    """Return the question in a row of a task's file."""
    return build_question_type(config).read(row)


@functools.lru_cache(maxsize=64)  # asked for once for each row; a suite has fewer tasks
def build_question_type(config: TaskConfig) -> QuestionType:
    """Build the class that reads the rows of a task, by the address in the table of types.

    The types of questions have one, and held-out text has none.
    """
    reader = config.task_type.reader
    assert reader is not None, f"{config.label}: a text has no rows"
    module, _, name = reader.partition(":")
    question_type: QuestionType = getattr(importlib.import_module(module), name)(config)
    return question_type


# ------------------------------------------------------------------------------------------------------------ the types


class MultipleChoice:
    """One context and several answers.

    With the form "letters", the context lists the choices, and the answers are letters:

        "The sky is\\n A. blue\\n B. green" + "A",  "The sky is\\n A. blue\\n B. green" + "B"
    """

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

    def __init__(self, config: TaskConfig):
        """Take nothing of the configuration."""

    def read(self, row: Mapping[str, Any]) -> Question:
        """Return the question in the columns `context` and `continuation`."""
        continuation = row["continuation"]
        return Question(contexts=[row["context"]], answers=[continuation], text=row["context"], choices=(continuation,))


class Generation:
    """One context, after which the model writes its answer."""

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
