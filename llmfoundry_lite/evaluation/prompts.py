"""Renders the rows of a task into texts: examples, contexts and answers, as LLM Foundry does.

Also decides what a question depends on besides its row: which rows are examples, which are related, and which settings
shape prompts and scores. No tokenizer; `encoding.py` makes token ids of these texts.
"""

import bisect
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.evaluation.items import GENERATION, fingerprint
from llmfoundry_lite.evaluation.task_files import Row

PUNCTUATION = string.punctuation + "‘’´`"
"""Characters that `clean` removes from an answer."""

# --------------------------------------------------------------------------------------------------------- one row


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a question. A task without choices has one."""

    contexts: list[str]
    answers: list[str]
    """One for each context. Empty texts where the model writes the answer."""
    gold: int
    """Index of the right option."""


def read_options(config: TaskConfig, row: Row) -> Options:
    """Return the options of a row: pairs of a context and an answer, of which the model should find the right one
    likeliest.

    A multiple-choice question has one context and several answers. A schema question has several contexts and one
    answer, which is likely only after the right context. Tasks of the other types have one context and one answer,
    which is empty where the model writes it.
    """
    match config.icl_task_type:
        case "multiple_choice":
            choices = row["choices"]
            return Options([row["query"]] * len(choices), choices, row["gold"])
        case "schema":
            contexts = row["context_options"]
            return Options(contexts, [row["continuation"]] * len(contexts), row["gold"])
        case "language_modeling":
            return Options([row["context"]], [row["continuation"]], gold=0)
        case _:  # generation
            return Options([row["context"]], [""], gold=0)


def render_example(config: TaskConfig, row: Row, *, is_first: bool) -> str:
    """Render a solved question, which stands as an example before the one that is asked."""
    options = read_options(config, row)
    if config.icl_task_type in GENERATION:
        answer = render_solution(config, row, row["answer"])
    else:
        answer = options.answers[options.gold]
    return render_context(config, options.contexts[options.gold], is_first=is_first) + answer


def render_context(config: TaskConfig, context: str, *, is_first: bool) -> str:
    """Render a question up to where its answer begins. The first text of a prompt has no delimiter before it."""
    delimiter = "" if is_first else config.example_delimiter
    return delimiter + config.prelimiter + context + config.continuation_delimiter


def render_solution(config: TaskConfig, row: Row, answer: str) -> str:
    """Render an answer as an example shows it.

    If the file has chains of thought, the delimiter precedes each answer, as in LLM Foundry: the model should write it
    too, and its own answer is read from what follows it.
    """
    if "chain_of_thought" not in row:
        return answer
    chain_of_thought = row["chain_of_thought"] or ""
    return f"{chain_of_thought}{config.cot_delimiter}{answer}"


def accepted_answers(row: Row) -> list[str]:
    """Return all texts that count as the right answer to a generation task's question."""
    aliases = row.get("aliases") or []
    return [row["answer"], *aliases]


def question_fingerprint(config: TaskConfig, row: Row) -> str:
    """Return a hash of a question and its options, which is equal for rows that ask the same."""
    options = read_options(config, row)
    return fingerprint([options.contexts, options.answers])


# ------------------------------------------------------------------------------------------------------ written answers


def clean(config: TaskConfig, text: str) -> str:
    """Return the part of an answer that is compared: in lower case, without punctuation, articles and double spaces.

    Without `do_normalization`, only white space around it is removed.
    """
    if not config.do_normalization:
        return text.strip()
    without_punctuation = "".join(" " if character in PUNCTUATION else character for character in text.lower())
    without_articles = re.sub(r"\b(a|an|the)\b", " ", without_punctuation)
    return " ".join(without_articles.split())


def is_correct(config: TaskConfig, text: str, answers: Sequence[str]) -> bool:
    """Return whether a text that the model wrote begins with one of the answers.

    Both are cleaned as LLM Foundry cleans them, which took the rule from TriviaQA. Of a text with chains of thought,
    only what follows the last delimiter counts.
    """
    if config.cot_delimiter:
        text = text.split(config.cot_delimiter)[-1]
    text = clean(config, text)
    cleaned_answers = [clean(config, answer) for answer in answers]
    return any(text.startswith(answer) for answer in cleaned_answers if answer)


# -------------------------------------------------------------------------------------------------------- among rows


def group_rows(config: TaskConfig, rows: list[Row]) -> list[list[int]]:
    """Return groups of row indices. An item's examples come from its own group.

    A group is a category, as in LLM Foundry. Without categories, all rows are one group.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        category = str(row["category"]) if config.has_categories else ""
        groups.setdefault(category, []).append(index)
    return list(groups.values())


def find_question_rows(config: TaskConfig, rows: list[Row], num_fewshot: int) -> list[int]:
    """Return the indices of rows that are asked: all except those that serve as fixed examples."""
    if not config.fewshot_fixed:
        return list(range(len(rows)))
    examples = {index for group in group_rows(config, rows) for index in group[:num_fewshot]}
    return [index for index in range(len(rows)) if index not in examples]


def choose_examples(config: TaskConfig, group: Sequence[int], index: int, num_fewshot: int) -> list[int]:
    """Return the rows of a sorted `group` to show before row `index`, which is never among them.

    If the group has fewer rows, all others are shown. The choice depends on the seed and the index alone, and not on
    ranks or on the order in which items are prepared.
    """
    if config.fewshot_fixed:
        return list(group[:num_fewshot])

    generator = random.Random(f"{config.fewshot_random_seed}/{index}")
    num_others = len(group) - 1
    drawn = generator.sample(range(num_others), min(num_fewshot, num_others))
    # Numbers are drawn for the group without the row itself, so those from its place on are one further.
    own_place = bisect.bisect_left(group, index)
    return [group[number if number < own_place else number + 1] for number in drawn]


def find_clusters(config: TaskConfig, rows: list[Row]) -> dict[int, str]:
    """Return the cluster of each row index.

    Rows are in one cluster if they share a value of the column `cluster`, or ask the same question. Without such a
    column and without repeated questions, the result is empty.
    """
    column = config.cluster
    keys: list[list[tuple[str, str]]] = []
    for row in rows:
        row_keys = [("question", question_fingerprint(config, row))]
        if column is not None:
            row_keys.append(("cluster", str(row[column])))
        keys.append(row_keys)
    first_rows = find_connected_rows(keys)

    if column is not None:
        return {index: str(rows[first][column]) for index, first in enumerate(first_rows)}
    has_repeated = first_rows != list(range(len(rows)))
    return {index: str(first) for index, first in enumerate(first_rows)} if has_repeated else {}


def find_connected_rows(keys: Sequence[Sequence[tuple[str, str]]]) -> list[int]:
    """Return, for each row, the first row of its group, where rows that share any of their keys are in one group.

    This is a union-find: `parents` leads from each row to an earlier one of its group, and the first leads to itself.

    >>> find_connected_rows([[("a", "1")], [("b", "2")], [("a", "1"), ("b", "2")], [("a", "3")]])
    [0, 0, 0, 3]
    """
    parents = list(range(len(keys)))
    first_with_key: dict[tuple[str, str], int] = {}

    def find_first(index: int) -> int:
        """Return the first row of a row's group, as far as groups are joined by now."""
        while parents[index] != index:
            parents[index] = parents[parents[index]]  # halves the path for later calls
            index = parents[index]
        return index

    for index, row_keys in enumerate(keys):
        for key in row_keys:
            one = find_first(first_with_key.setdefault(key, index))
            other = find_first(index)
            parents[max(one, other)] = min(one, other)
    return [find_first(index) for index in range(len(keys))]


# ----------------------------------------------------------------------------------------------------------- settings


def resolve_settings(config: TaskConfig, num_fewshot: int, tokenization: str) -> TaskConfig:
    """Return the task with the settings that follow from the number of examples and the evaluation's tokenization.

    These are the tokenization, if the task does not say, and the delimiter between a context and its answer.
    """
    tokenization = config.tokenization or tokenization
    delimiter = config.continuation_delimiter
    has_text_before = bool(num_fewshot or config.prompt_string)
    if config.icl_task_type == "schema" and not has_text_before:
        delimiter = _delimiter_of_lone_schema(config, tokenization)
    return replace(config, tokenization=tokenization, continuation_delimiter=delimiter)


def _delimiter_of_lone_schema(config: TaskConfig, tokenization: str) -> str:
    """Return the delimiter before the answer of a schema question that has no text before it.

    LLM Foundry leaves the delimiter out there, so results are comparable only if we do so, too. It strips the context,
    and its tokenizer adds the space before the answer, so a delimiter of white space makes no difference unless
    `strip_dataset` is false. In "joint" tokenization nothing adds that space, so a space stays.
    """
    delimiter = config.continuation_delimiter
    is_white_space = not delimiter.strip()
    if tokenization == "joint":
        return delimiter if is_white_space else " "
    if is_white_space and config.strip_dataset:
        return delimiter
    return ""


def effective_limit(limit: int | None, num_items: int) -> int | None:
    """Return the limit, or None if all items fit into it, so that the evaluation is the same without it."""
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
"""Settings of a task that shape prompts and scores. The names of task and file do not."""
SETTINGS_IF_SET = ("has_categories", "cluster")
"""The same, for settings that are recorded only where they are set: otherwise older results would differ."""


def fingerprinted_settings(config: TaskConfig, num_fewshot: int, limit: int | None) -> dict[str, Any]:
    """Return the settings of a resolved task that its fingerprint covers."""
    settings = {name: getattr(config, name) for name in DECISIVE_SETTINGS}
    for name in SETTINGS_IF_SET:
        if getattr(config, name):
            settings[name] = getattr(config, name)
    settings["num_fewshot"] = num_fewshot
    settings["tokenization"] = config.tokenization
    settings["limit"] = limit
    return settings
