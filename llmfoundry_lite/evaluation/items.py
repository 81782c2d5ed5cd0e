"""Tasks that are ready to be run on a model, with their items and the requests of each item, as token ids.

A `PreparedTask` has an `Item` for each question, and an item has a `Request` for each of its options. `tasks.py` and
`documents.py` make them, `packing.py` and `scoring.py` run the model on their requests, and `summaries.py` turns
the results into scores.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmfoundry_lite.config.eval_schema import TaskConfig, result_name
from llmfoundry_lite.config.task_types import Answer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.questions import answer_of, main_metric_of

SEPARATE = "separate"
"""The tokenization of context and answer by default, and in the evaluations during a training run."""


class EmptyTaskError(DataError):
    """A task has no item that this model can be asked. A gauntlet leaves such a task out."""


class Request(NamedTuple):
    """Token ids whose log-probability is asked for, and the ids before them.

    "The sky is" and " blue" may be the request with context (464, 6766, 318) and continuation (4171,).
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    """The tokens of the answer; empty if the model generates the answer."""
    num_characters: int
    """Characters of the answer's text. For a window of text, its bytes in UTF-8."""
    num_trimmed: int
    """Tokens of the context that did not fit into the model."""
    num_bytes: int = 0
    """Bytes in UTF-8 of the answer's text with the white space before it. Not set for a window of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question, with a request for each option. For held-out text, one window of a document."""

    index: int
    """The row of the task's file, counted from 0. For held-out text, the document's number."""
    requests: tuple[Request, ...]
    gold: int = 0
    """Index of the right option."""
    question: str | None = None
    """The text of the question as the row has it, without examples and delimiters; None for held-out text."""
    choices: tuple[str, ...] = ()
    """The texts of the options; none if the model generates the answer, and for held-out text."""
    examples: tuple[int, ...] = ()
    """Rows that are the prompt's few-shot examples, in the order in which it shows them."""
    category: str | None = None
    cluster: str | None = None
    """Items of one cluster are not independent of each other, so standard errors count clusters."""
    num_missing_examples: int = 0
    """Number of few-shot examples that the prompt lacks, because the item's category does not have as many."""
    answers: tuple[str, ...] = ()
    """For a generation task, the texts that count as right."""
    gold_request: Request | None = None
    """For a generation task, the request for the log-probability of its first right answer. None if that has no tokens,
    or does not fit into the model."""
    has_duplicates: bool = False
    """Two of its options have the same text."""
    row: Mapping[str, Any] | None = field(default=None, repr=False)
    """The row of the task's file, for tasks with code of the user's own; otherwise None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTask:
    """A task that is ready to be run on a model, for one tokenizer and one number of few-shot examples."""

    label: str
    kind: str
    """The task's `icl_task_type`."""
    num_fewshot: int
    items: tuple[Item, ...]
    fingerprint: str
    """Hash of the questions and of how they are asked. Only results with equal fingerprints can be compared."""
    settings: dict[str, Any]
    """The part of the configuration that the fingerprint covers, so that a comparison can name what differs."""
    data_fingerprint: str
    """Hash of the rows or texts alone."""
    beginning: list[int] = field(default_factory=list)
    """Token ids that the tokenizer puts before every text."""
    num_repeated: int = 0
    """Number of items that repeat the question of an earlier item. They are in the same cluster as that item."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of items that cannot be asked because of it."""
    lost_text: dict[str, Any] | None = None
    """Held-out text that its tokens do not spell, as `LostText.as_json` counts it."""
    config: TaskConfig

    @property
    def name(self) -> str:
        """The task's name in results, such as `arc_easy/3-shot`."""
        return result_name(self.label, self.num_fewshot, self.config.form)

    @property
    def metric(self) -> str:
        """Name of the main metric, which tables and averages show, such as "acc". Defaults are LLM Foundry's."""
        return main_metric_of(self.config)

    @property
    def answer(self) -> Answer:
        """How the model answers."""
        return answer_of(self.config)


def fingerprint(content: Any) -> str:
    """Return a hash of any content that JSON can hold, such as "sha256:0f3c…". The order of keys does not count."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
