"""The table of the types of evaluation tasks, and the names of their metrics.

`TASK_TYPES` has a row for each type that the key `icl_task_type` names, and `find_task_type` looks a name up. All that
depends on the type of a task asks its row: the schema's choices, the checks of a task's keys and of its file's rows,
prompts, scores, and docs/tasks.md. The class that reads a row of the file is imported by its address (`reader`), so
that nothing here imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmfoundry_lite.own_code import is_own

ACCURACIES = ("acc_per_token", "acc", "acc_norm", "acc_per_byte")
BPB = "bpb"
"""Bits per byte of the right answer to a question. Less is better."""
METRICS = (*ACCURACIES, BPB)
"""Metrics by which a task of questions can be shown and compared."""
BITS = "bits_per_byte"
"""Metric of a held-out text: all of its bits over all of its bytes. Less is better."""

Answer = Literal["choices", "continuation", "generation", "text"]
"""How a model answers.

- choices: the probabilities of several options choose one of them.
- continuation: one text has to follow another, and is right if each of its tokens is the likeliest.
- generation: the model writes a text, which is compared with accepted ones.
- text: there is no question; the probability of a whole text is computed.
"""

METRICS_OF_ANSWER: Mapping[Answer, tuple[str, ...]] = {
    "choices": METRICS,
    "continuation": ("acc", BPB),
    "generation": ("acc", BPB),
    "text": (BITS,),
}
"""How a model answers -> the metrics that the library computes. The first is the one that tables show."""

_QUESTIONS = "llmfoundry_lite.evaluation.questions"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskType:
    """A type of task: a row of the table."""

    name: str
    """The value of `icl_task_type`, which LLM Foundry's registry `icl_datasets` has as well, except perplexity."""
    answer: Answer | None
    """How a model answers; None if only a user's own class knows it."""
    scored: str = ""
    """The question to a model, and what decides whether an answer is right, for docs/tasks.md."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column that each row must have -> its meaning."""
    optional_columns: Mapping[str, str] = field(default_factory=dict)
    """Column that a row may lack -> its meaning."""
    foundry_metric: str | None = None
    """LLM Foundry's metric for the type, which is one of ours by another name."""
    keys: tuple[str, ...] = ()
    """Keys of a task that only this type uses."""
    reader: str | None = None
    """Address of the class that reads a row of the task's file (`evaluation/questions.py`), or the import path of the
    user's own; None for a text, which has no rows."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics in its results. The first is the one that tables show, unless the task's key `metric` names another.

        Of a user's own class, these are all that it may have.
        """
        return METRICS if self.answer is None else METRICS_OF_ANSWER[self.answer]


_ALL_TYPES = (
    TaskType(
        name="multiple_choice",
        answer="choices",
        scored="The model chooses among several answers to a question. The probability of each answer after the "
        "question decides.",
        columns={
            "query": "The question, as a text.",
            "choices": "Two or more texts, one for each answer.",
            "gold": "Number of the right choice, counted from 0.",
        },
        foundry_metric="InContextLearningMultipleChoiceAccuracy",
        keys=("form", "choices_delimiter", "letter_prefix"),
        reader=f"{_QUESTIONS}:MultipleChoice",
    ),
    TaskType(
        name="schema",
        answer="choices",
        scored="The model chooses among several contexts before one continuation. The probability of the continuation "
        "after each context decides. Winograd and Winogrande have this form.",
        columns={
            "context_options": "Two or more texts, of which one is the right context.",
            "continuation": "The text that follows the context.",
            "gold": "Number of the right context, counted from 0.",
        },
        foundry_metric="InContextLearningMultipleChoiceAccuracy",
        reader=f"{_QUESTIONS}:Schema",
    ),
    TaskType(
        name="language_modeling",
        answer="continuation",
        scored="The model continues a text. The answer is right if each of its tokens is the likeliest one. LAMBADA "
        "has this form.",
        columns={"context": "The text that is given.", "continuation": "The text that has to follow."},
        foundry_metric="InContextLearningLMAccuracy",
        reader=f"{_QUESTIONS}:LanguageModeling",
    ),
    TaskType(
        name="generation_task_with_answers",
        answer="generation",
        scored="The model writes an answer. It is right if it begins with one of the accepted answers, both in lower "
        "case and without punctuation and articles, unless `do_normalization` is false.",
        columns={
            "context": "The question, as a text.",
            "answer": "An accepted answer. The examples in a prompt show it.",
        },
        optional_columns={
            "aliases": "More accepted answers, as a list of texts.",
            "chain_of_thought": "Reasoning that an example shows before its answer, with `cot_delimiter` between them.",
        },
        foundry_metric="InContextLearningGenerationExactMatchAccuracy",
        keys=("max_new_tokens", "early_stopping_criteria", "do_normalization", "cot_delimiter"),
        reader=f"{_QUESTIONS}:Generation",
    ),
    TaskType(
        name="perplexity",
        answer="text",
        scored="Held-out text, scored by its bits per byte. Each line is a document. The file may also be plain text, "
        "which is one document, or the folder of a split that `data prepare` wrote.",
        columns={"text": "The document."},
    ),
)
TASK_TYPES = {task_type.name: task_type for task_type in _ALL_TYPES}
"""Name -> its row."""
MULTIPLE_CHOICE = "multiple_choice"
"""The type whose choices can be asked by letters."""
TEXT = "perplexity"
"""The type that reads a held-out text, which has no rows, examples or categories."""


def find_task_type(name: str) -> TaskType:
    """Return the row of a type. That of a user's own type, `python:…`, has its name, and nothing else is known.

    Raises KeyError for another name, which the schema refuses.
    """
    if is_own(name):
        return TaskType(name=name, answer=None, reader=name)
    return TASK_TYPES[name]
