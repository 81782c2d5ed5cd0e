"""docs/tasks.md, made from the schema of evaluations and from example files: `python -m tests.helpers.tasks_page`."""

import ast
import inspect
import json
import textwrap
from dataclasses import MISSING
from typing import Any, NamedTuple

from llmfoundry_lite.config import eval_schema
from llmfoundry_lite.config.build import describe_type
from llmfoundry_lite.config.eval_schema import Benchmark, Category, EvalConfig, GauntletConfig, TaskConfig
from llmfoundry_lite.config.fields import Key, keys_of
from llmfoundry_lite.config.task_types import TASK_TYPES, TaskType
from tests.helpers.launch import ROOT

PAGE = ROOT / "docs/tasks.md"


class Example(NamedTuple):
    """A file of a type of task that the page shows."""

    file: str
    rows: list[dict[str, Any]]


EXAMPLES = {
    "multiple_choice": Example(
        "capitals.jsonl",
        [
            {"query": "The capital of France is", "choices": ["Lyon", "Paris"], "gold": 1},
            {"query": "The capital of Japan is", "choices": ["Tokyo", "Osaka"], "gold": 0},
            {"query": "The capital of Peru is", "choices": ["Lima", "Cusco"], "gold": 0},
        ],
    ),
    "schema": Example(
        "pronouns.jsonl",
        [
            {
                "context_options": [
                    "The trophy does not fit into the case because the trophy",
                    "The trophy does not fit into the case because the case",
                ],
                "continuation": "is too large.",
                "gold": 0,
            },
            {
                "context_options": ["Ann thanked Eve because Ann", "Ann thanked Eve because Eve"],
                "continuation": "had helped her.",
                "gold": 1,
            },
        ],
    ),
    "language_modeling": Example(
        "endings.jsonl",
        [
            {"context": "Ready, steady,", "continuation": "go"},
            {"context": "Monday, Tuesday,", "continuation": "Wednesday"},
        ],
    ),
    "generation_task_with_answers": Example(
        "sums.jsonl",
        [
            {"context": "2 + 2 =", "answer": "4", "aliases": ["four"]},
            {"context": "3 + 5 =", "answer": "8", "aliases": ["eight"]},
        ],
    ),
    "perplexity": Example(
        "story.jsonl",
        [{"text": "The old man rowed out before dawn. By noon he had caught nothing."}, {"text": "It rained again."}],
    ),
}
"""Type of a task -> an example of its file."""
GROUPS = {
    "category": "with `has_categories: true`: the item's category, a text or a whole number.",
    "split": "with `fewshot_split`: the text that tells rows for examples from rows for questions.",
}
"""Columns that any type of question may have, if a key of its task asks for them."""

TOP = """# Tasks, suites and gauntlets

This page lists every column of a task's file, and every key of a task, a suite and a gauntlet. Read
[Evaluation](evaluation.md) first: it explains how to run a suite and what the results mean. Look at prompts before you
spend hours on them: `llmfoundry-lite eval mine.yaml --show 3` prints the first three of each task.

The page is generated from the schema that checks a YAML, and the example at its end is a test.

## Types of tasks

These are the values of `icl_task_type`. A table of results shows a type by the first of its metrics, or by the one that
the key `metric` names.

"""
COLUMNS = """
## Columns of a task's file

A task of questions reads a file with a JSON object on each line. Other columns are allowed and ignored.
"""
EXAMPLE = """\
models:
  ours: runs/mpt-1b
icl_tasks:
- {label: capitals, icl_task_type: multiple_choice, dataset_uri: capitals.jsonl, num_fewshot: [0, 2]}
- {label: pronouns, icl_task_type: schema, dataset_uri: pronouns.jsonl}
- {label: endings, icl_task_type: language_modeling, dataset_uri: endings.jsonl}
- {label: sums, icl_task_type: generation_task_with_answers, dataset_uri: sums.jsonl, num_fewshot: [1]}
- {label: story, icl_task_type: perplexity, dataset_uri: story.jsonl}
eval_gauntlet:
  weighting: EQUAL
  subtract_random_baseline: true
  rescale_accuracy: true
  categories:
  - name: knowledge
    benchmarks:
    - {name: capitals, num_fewshot: 2, random_baseline: 0.5}
    - {name: sums, num_fewshot: 1, random_baseline: 0}
  - name: language
    benchmarks:
    - {name: pronouns, num_fewshot: 0, random_baseline: 0.5}
    - {name: endings, num_fewshot: 0, random_baseline: 0}
  averages:
    core_average: [knowledge, language]
"""
SECTIONS = (
    (
        "Keys of a task",
        TaskConfig,
        "These stand in a file of `task_folder`, or in an entry of `icl_tasks`. A key that has no effect on a task of "
        "its type is named in a note.",
    ),
    (
        "Keys of a suite",
        EvalConfig,
        "These stand at the top of the YAML that `llmfoundry-lite eval` is given, or are arguments: `limit=100`. A "
        "training YAML takes `icl_tasks` alone.",
    ),
    (
        "Keys of a gauntlet",
        GauntletConfig,
        "These stand under `eval_gauntlet`, or in a file of their own that it names.",
    ),
    ("Keys of a gauntlet's category", Category, "These stand in an entry of `categories`."),
    ("Keys of a gauntlet's benchmark", Benchmark, "These stand in an entry of a category's `benchmarks`."),
)


def build() -> str:
    """Return the content of the page."""
    parts = [TOP, _types(), COLUMNS]
    for name, task_type in TASK_TYPES.items():
        example = EXAMPLES[name]
        parts.append(f"\n### {name}\n\n{_wrapped(task_type.scored)}\n\n{_columns(task_type)}\n")
        parts.append(f"\nFor example `{example.file}`:\n\n```json\n{_lines(example)}```\n")
    parts.append("\nRows of questions may have more columns, if a key of their task asks for them:\n\n")
    parts += [f"- `{column}`, {text}\n" for column, text in GROUPS.items()]
    parts.append("- any column that the task's key `cluster` names: a text or a whole number.\n")

    for heading, block, introduction in SECTIONS:
        parts.append(f"\n## {heading}\n\n{_wrapped(introduction)}\n\n{_keys(block)}")
    parts.append("\n## An example\n\nWith the five files above, this is `mine.yaml`:\n\n")
    parts.append(f"```yaml\n{EXAMPLE}```\n\n```\nllmfoundry-lite eval mine.yaml\n```\n\n")
    parts.append("The gauntlet is printed below the table of tasks, and written to `results/mine/gauntlet.md`.\n")
    return "".join(parts)


def _wrapped(paragraph: str) -> str:
    """A paragraph in lines as long as those of other pages."""
    return textwrap.fill(paragraph, 128, break_on_hyphens=False)


def _lines(example: Example) -> str:
    """The content of an example's file."""
    return "".join(json.dumps(row) + "\n" for row in example.rows)


def _types() -> str:
    """A table of the types, with LLM Foundry's metric of each, and the keys that no other type uses."""
    rows = ["| type | metrics | LLM Foundry's metric | keys of its own |", "|---|---|---|---|"]
    for name, task_type in TASK_TYPES.items():
        metrics = ", ".join(f"`{metric}`" for metric in task_type.metrics)
        foundry_metric = f"`{task_type.foundry_metric}`" if task_type.foundry_metric else ""
        keys = ", ".join(f"`{key}`" for key in task_type.keys)
        rows.append(f"| `{name}` | {metrics} | {foundry_metric} | {keys} |")
    return "\n".join(rows) + "\n"


def _columns(task_type: TaskType) -> str:
    """A table of the columns of a type's rows."""
    rows = ["| column | value |", "|---|---|"]
    rows += [f"| `{column}` | {text} |" for column, text in task_type.columns.items()]
    rows += [f"| `{column}` | Optional. {text} |" for column, text in task_type.optional_columns.items()]
    return "\n".join(rows)


def docstrings(block: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, in one line."""
    source = ast.parse(inspect.getsource(eval_schema))
    (definition,) = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == block.__name__]
    found: dict[str, str] = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _keys(block: type) -> str:
    """A table of the keys of a block, with their defaults and docstrings."""
    texts = docstrings(block)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, key in keys_of(block).items():
        meaning = _escaped(texts.get(name, ""))
        rows.append(f"| `{name}` | {_value(key)} | {_default(block, name, key)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _value(key: Key) -> str:
    """The values that a key takes: its choices, or its type."""
    if key.setting.choices:
        return ", ".join(f"`{choice}`" for choice in key.setting.choices)
    hint = key.setting.written or key.hint
    return describe_type(hint).replace(" or null", "").replace(" of `key: value` lines", "")


def _default(block: type, name: str, key: Key) -> str:
    if block is EvalConfig and name == "suite":
        return ""  # the name of the file, as its docstring says
    if key.default is MISSING:
        return "required"
    if key.default is None:
        return ""
    return f"`{json.dumps(key.default)}`"


def _escaped(text: str) -> str:
    """Text in a cell of a table, where `|` would end it, and `<` would be taken for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(build())
