"""Renders the rows of a task as texts: few-shot examples, contexts and answers, as LLM Foundry does.

A prompt is `prompt_string`, then the examples, each a question with its right answer, then the question's context. With
`prelimiter` "Question: ", `continuation_delimiter` " Answer: " and one example, the prompt of a question is

    Question: 1 + 1? Answer: 2
    Question: 2 + 3? Answer:

The file begins with functions that render one row. Those that follow decide which rows are examples, which rows are
related, and which settings prompts and scores depend on. `encoding.py` turns the texts into token ids.
"""

import bisect
import random
import re
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmfoundry_lite.config.eval_schema import LETTERS, TaskConfig
from llmfoundry_lite.evaluation.items import fingerprint
from llmfoundry_lite.evaluation.questions import Question, answer_of, read_question
from llmfoundry_lite.evaluation.task_files import Row

PUNCTUATION = string.punctuation + "‘’´`"
"""Characters that `clean` removes from an answer."""

ANSWER_DELIMITER = "\nAnswer: "
"""Text between listed choices and the letter of the answer, if the task sets none: that of OLMES and of MMLU."""

# --------------------------------------------------------------------------------------------------------- one row


def render_prompt_string(config: TaskConfig, row: Row) -> str:
    """Return the text at the beginning of a question's prompt.

    If the task has categories, `{category}` in the text stands for the question's: "Questions about {category}." is
    rendered as `"Questions about anatomy."`.
    """
    if not config.has_categories:
        return config.prompt_string
    return config.prompt_string.replace("{category}", category_of(config, row))


def render_example(config: TaskConfig, row: Row, *, is_first: bool) -> str:
    """Return the text of a question with its right answer, for use as a few-shot example.

    `is_first` says that no text comes before it in the prompt; otherwise it begins with the delimiter between examples.
    With the default delimiters, the second example of a prompt may be `"\\nThe sky is blue"`.
    """
    question = read_question(config, row)
    context = render_context(config, question.contexts[question.gold], is_first=is_first)
    return context + render_solution(question, question.answers[question.gold])


def render_context(config: TaskConfig, context: str, *, is_first: bool) -> str:
    """Return the text of a question, up to where its answer begins.

    It begins with the delimiter between examples, unless it `is_first` in the prompt. With `example_delimiter` "\\n",
    `prelimiter` "Question: " and `continuation_delimiter` " Answer: ", the context "2 + 3?" that follows an example is
    rendered as `"\\nQuestion: 2 + 3? Answer: "`.
    """
    delimiter = "" if is_first else config.example_delimiter
    return delimiter + config.prelimiter + context + config.continuation_delimiter


def render_solution(question: Question, answer: str) -> str:
    """Return an answer as an example shows it: alone, or after the reasoning that leads to it."""
    return question.reasoning + answer


def question_fingerprint(config: TaskConfig, row: Row) -> str:
    """Return a hash of a question and its options. Rows with the same question have the same hash.

    Answers that a generated one is compared with are left out, because the model does not see them.
    """
    question = read_question(config, row)
    answers = [""] if answer_of(config) == "generation" else question.answers
    return fingerprint([question.contexts, answers])


# ------------------------------------------------------------------------------------------------------ written answers


def clean(config: TaskConfig, text: str) -> str:
    """Normalise an answer for comparison: lower case, without punctuation, articles and repeated spaces.

    `"The  Eiffel-Tower!"` becomes `"eiffel tower"`. If the task sets `do_normalization` to false, only white space
    around the answer is removed.
    """
    if not config.do_normalization:
        return text.strip()
    # Punctuation becomes a space, so that it still separates words.
    without_punctuation = "".join(" " if character in PUNCTUATION else character for character in text.lower())
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return " ".join(without_articles.split())


def is_correct(config: TaskConfig, text: str, answers: Sequence[str]) -> bool:
    """Return whether a generated text begins with one of the accepted answers.

    Both are normalised by `clean`, the rule of TriviaQA that LLM Foundry uses. If the task has a delimiter between
    reasoning and answer, only the text after the last delimiter counts. With the answer "Paris", `"The Paris of 1900"`
    is correct, and `"in Paris"` is not.
    """
    if config.cot_delimiter:
        text = text.split(config.cot_delimiter)[-1]
    text = clean(config, text)

    # An answer such as "The" is empty after normalisation, and every text begins with it, so it does not count.
    cleaned_answers = [clean(config, answer) for answer in answers]
    return any(text.startswith(answer) for answer in cleaned_answers if answer)


# -------------------------------------------------------------------------------------------------------- among rows


def category_of(config: TaskConfig, row: Row) -> str:
    """Return the category of a row; an empty text for all rows of a task without categories."""
    return str(row["category"]) if config.has_categories else ""


def group_examples(config: TaskConfig, rows: list[Row]) -> dict[str, list[int]]:
    """Return the rows from which few-shot examples are drawn, by category, in the order of the file.

    A question's examples are drawn from its own category, as in LLM Foundry. With `fewshot_split`, only rows of that
    split are examples; otherwise all rows are.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if config.fewshot_split is None or row["split"] == config.fewshot_split:
            groups.setdefault(category_of(config, row), []).append(index)
    return groups


def find_question_rows(config: TaskConfig, rows: list[Row], num_fewshot: int) -> list[int]:
    """Return the indices of the rows that are used as questions: all except those that are only shown as examples.

    These are the rows of `fewshot_split`. Without such a split, they are fixed examples (`fewshot_fixed`): the first
    `num_fewshot` rows of the task, or of each of its categories.
    """
    if config.fewshot_split is None and not config.fewshot_fixed:
        return list(range(len(rows)))
    example_rows: set[int] = set()
    for group in group_examples(config, rows).values():
        example_rows.update(group if config.fewshot_split is not None else group[:num_fewshot])
    return [index for index in range(len(rows)) if index not in example_rows]


def choose_examples(config: TaskConfig, group: Sequence[int], index: int, num_fewshot: int) -> list[int]:
    """Choose the rows that are shown as few-shot examples before the question in row `index`.

    group: sorted row indices to choose from. `index` may be one of them, and is never chosen.
    num_fewshot: the number of examples. If the group has fewer other rows, all of them are chosen.

    Returns row indices in the order in which the prompt shows them. The choice depends only on the task's seed and on
    `index`, so it is the same on every rank and in whatever order items are prepared. With `fewshot_fixed`, every
    question has the first rows of its group as examples; `find_question_rows` then leaves those out of the questions.
    """
    if config.fewshot_fixed:
        return list(group[:num_fewshot])

    # Draw positions among the other rows of the group, as if the row of the question were taken out of it.
    generator = random.Random(f"{config.fewshot_random_seed}/{index}")
    question_position = bisect.bisect_left(group, index)
    is_in_group = question_position < len(group) and group[question_position] == index
    num_other_rows = len(group) - is_in_group
    drawn_positions = generator.sample(range(num_other_rows), min(num_fewshot, num_other_rows))

    # Translate them to positions in the whole group, which are one higher from the question's row on. In the group
    # [3, 5, 8] of question 5, position 1 among the others [3, 8] is position 2.
    examples: list[int] = []
    for position in drawn_positions:
        if is_in_group and position >= question_position:
            position += 1
        examples.append(group[position])
    return examples


def find_clusters(config: TaskConfig, rows: list[Row]) -> dict[int, str]:
    """Return the cluster of each row, by row index. Rows of one cluster are not independent, so errors count clusters.

    Rows are in the same cluster if they have the same question, or the same value in the column that the task's setting
    `cluster` names, such as `passage`. The cluster is named after its first row: by that row's value in the column, or
    without a column by its index. If the task has no such column and no repeated question, the result is empty.
    """
    column = config.cluster

    # Rows that have one of these keys in common are related, directly or through other rows.
    keys: list[list[tuple[str, str]]] = []
    for row in rows:
        row_keys = [("question", question_fingerprint(config, row))]
        if column is not None:
            row_keys.append(("cluster", str(row[column])))
        keys.append(row_keys)
    first_rows = find_connected_rows(keys)

    if column is not None:
        return {index: str(rows[first][column]) for index, first in enumerate(first_rows)}
    # Without a column, only repeated questions are related. If there are none, each row is a cluster of its own.
    has_repeated_questions = first_rows != list(range(len(rows)))
    if not has_repeated_questions:
        return {}
    return {index: str(first) for index, first in enumerate(first_rows)}


def find_connected_rows(keys: Sequence[Sequence[tuple[str, str]]]) -> list[int]:
    """Return, for each row, the index of the first row that it is connected with.

    `keys` has the keys of each row. Rows that have a key in common are connected, directly or through other rows. Here
    the third row connects the first two, and the fourth is connected with no other:

    >>> find_connected_rows([[("a", "1")], [("b", "2")], [("a", "1"), ("b", "2")], [("a", "3")]])
    [0, 0, 0, 3]

    This is a union-find (disjoint-set forest). The root of each set is its first row.
    """
    # `parents` leads from each row to an earlier one that it is connected with, and from the first row to itself.
    parents = list(range(len(keys)))
    first_with_key: dict[tuple[str, str], int] = {}
    """Key -> the first row that has it."""

    def find_first(index: int) -> int:
        """Return the first row that a row is connected with, as far as keys have been read."""
        while parents[index] != index:
            parents[index] = parents[parents[index]]  # halves the path for later calls
            index = parents[index]
        return index

    for index, row_keys in enumerate(keys):
        for key in row_keys:
            first_of_key = find_first(first_with_key.setdefault(key, index))
            first_of_row = find_first(index)
            # Join the two sets. The earlier of their first rows becomes the first row of both.
            parents[max(first_of_key, first_of_row)] = min(first_of_key, first_of_row)
    return [find_first(index) for index in range(len(keys))]


# ----------------------------------------------------------------------------------------------------------- settings


def resolve_settings(config: TaskConfig, num_fewshot: int, tokenization: str) -> TaskConfig:
    """Return a copy of the task's configuration with two settings filled in, for one number of few-shot examples.

    These are the tokenization ("separate" or "joint"), if the task does not set its own, and the delimiter between a
    context and its answer, which differs for a schema question without any text before it, and after listed choices.
    """
    tokenization = config.tokenization or tokenization
    delimiter = config.continuation_delimiter
    has_text_before = bool(num_fewshot or config.prompt_string)
    if config.icl_task_type == "schema" and not has_text_before:
        delimiter = _delimiter_of_lone_schema(config, tokenization)
    if config.form == LETTERS and not delimiter.strip():
        delimiter = ANSWER_DELIMITER  # a letter cannot follow the last choice on its line
    return replace(config, tokenization=tokenization, continuation_delimiter=delimiter)


def _delimiter_of_lone_schema(config: TaskConfig, tokenization: str) -> str:
    """Return the delimiter between context and answer of a schema question in a prompt without examples.

    LLM Foundry leaves the delimiter out there, and results can only be compared with its results if this library does
    so, too. A delimiter of white space may stay: "separate" tokenization strips the context and puts a space before the
    answer itself, unless `strip_dataset` is false. "joint" tokenization adds no space, so the delimiter must be one.
    """
    delimiter = config.continuation_delimiter
    is_white_space = not delimiter.strip()
    if tokenization == "joint":
        return delimiter if is_white_space else " "
    if is_white_space and config.strip_dataset:
        return delimiter
    return ""


def effective_limit(limit: int | None, num_items: int) -> int | None:
    """Return the limit on the number of items, or None if the limit leaves no item out.

    A limit without effect is not recorded, so that the result can be compared with one that had no limit: with 100
    items, limit 50 is recorded as 50 and limit 200 as None.
    """
    if limit is None or num_items <= limit:
        return None
    return limit


DECISIVE_SETTINGS = (
    "icl_task_type",
    "fewshot_random_seed",
    "fewshot_fixed",
    "prompt_string",
    "example_delimiter",
    "continuation_delimiter",
    "prelimiter",
    "strip_dataset",
    "max_new_tokens",
    "early_stopping_criteria",
    "do_normalization",
    "cot_delimiter",
    "metric",
)
"""Settings of a task on which prompts and scores depend. The names of the task and of its file are not among them."""
SETTINGS_IF_SET = ("fewshot_split", "has_categories", "cluster", "kwargs", "metric_kwargs")
"""Further such settings, which are recorded only if they are set, because recording them always would change the
fingerprints of older results."""
SETTINGS_OF_LETTERS = ("form", "choices_delimiter", "letter_prefix")
"""Further such settings, which are recorded only of tasks in the form "letters"."""


def fingerprinted_settings(config: TaskConfig, num_fewshot: int, limit: int | None) -> dict[str, Any]:
    """Return the settings that the task's fingerprint covers: all that prompts and scores depend on.

    `config` is the result of `resolve_settings`, and `limit` that of `effective_limit`.
    """
    settings = {name: getattr(config, name) for name in DECISIVE_SETTINGS}
    for name in SETTINGS_IF_SET:
        if getattr(config, name):
            settings[name] = getattr(config, name)
    if config.own_metrics:
        settings["metric_names"] = config.own_metrics
    if config.form == LETTERS:
        settings |= {name: getattr(config, name) for name in SETTINGS_OF_LETTERS}
    settings["num_fewshot"] = num_fewshot
    settings["tokenization"] = config.tokenization
    settings["limit"] = limit
    return settings
