"""docs/tasks.md: it has every column and key of the code, and its example runs."""

import ast
import re

import pytest

from llmfoundry_lite import launch_eval
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.fields import keys_of
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.task_types import BITS, METRICS, TASK_TYPES
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.evaluation.questions import read_question
from llmfoundry_lite.own_code import PREFIX
from tests.helpers.launch import ROOT
from tests.helpers.models import normal_model
from tests.helpers.tasks_page import EXAMPLES, GROUPS, PAGE, SECTIONS, build, docstrings

READERS = ("task_files", "prompts", "tasks", "questions")
"""The modules that read the columns of a row."""


def test_the_page_is_made_from_the_schema():
    assert PAGE.read_text() == build(), "run: python -m tests.helpers.tasks_page"


@pytest.mark.parametrize("block", [block for _, block, _ in SECTIONS], ids=lambda block: block.__name__)
def test_every_key_has_a_docstring(block):
    assert keys_of(block).keys() == docstrings(block).keys()


def test_every_type_has_its_row_its_example_and_every_column_that_the_code_reads():
    assert [*TASK_TYPES] == [*EXAMPLES]
    assert keys_of(TaskConfig)["icl_task_type"].setting.choices == [*TASK_TYPES, PREFIX]
    read = set()
    for module in READERS:
        for node in ast.walk(ast.parse((ROOT / f"llmfoundry_lite/evaluation/{module}.py").read_text())):
            read |= columns_read_by(node)
    described = {column for task_type in TASK_TYPES.values() for column in columns_of(task_type)}
    assert read | {"text"} == described | GROUPS.keys()  # a held-out text is read as `row.get("text")`


def columns_of(task_type):
    return {**task_type.columns, **task_type.optional_columns}


def test_the_row_of_a_type_has_the_keys_that_only_it_uses():
    own_keys = {name: set() for name in TASK_TYPES}
    for name, key in keys_of(TaskConfig).items():
        users = [kind for kind in TASK_TYPES if has_effect(name, key, kind)]
        if len(users) == 1:
            own_keys[users[0]].add(name)
    assert own_keys == {name: set(task_type.keys) for name, task_type in TASK_TYPES.items()}


def has_effect(name, key, kind):
    """Whether a key may have an effect on a task of this type, beside keys with which it has one."""
    beside = {"form": "letters"} if name in ("choices_delimiter", "letter_prefix") else {}
    task = {"label": "t", "dataset_uri": "hf://x", "icl_task_type": kind, "num_fewshot": [1], **beside}
    if kind == "perplexity":
        task["num_fewshot"] = [0]
    if name == "form":
        task["form"] = "letters"
    try:
        (config,) = load_tasks([task], "evals")
    except ConfigError:
        return False
    return all(use.has_effect(config, config) for use in key.setting.uses)


def columns_read_by(node):
    """The column that an expression reads: `row["query"]`, `row.get("aliases")` or `"category" in row`."""
    match node:
        case ast.Subscript(value=ast.Name(id="row"), slice=ast.Constant(value=str(column))):
            return {column}
        case ast.Call(func=ast.Attribute(value=ast.Name(id="row"), attr="get"), args=[ast.Constant(value=column), *_]):
            return {column}
        case ast.Compare(left=ast.Constant(value=str(column)), comparators=[ast.Name(id="row")]):
            return {column}
    return set()


def test_optional_columns_may_be_absent():
    assert [*TASK_TYPES["generation_task_with_answers"].optional_columns] == ["aliases", "chain_of_thought"]
    config = TaskConfig(label="t", icl_task_type="generation_task_with_answers", dataset_uri="t.jsonl")
    question = read_question(config, {"context": "2 + 2 =", "answer": "4"})
    assert (question.answers, question.reasoning) == (["4"], "")


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    page = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"For example `(\w+\.jsonl)`:\n\n```json\n(.*?)```", page, re.S):
        (tmp_path / name).write_text(content)
    (suite,) = re.findall(r"this is `mine.yaml`:\n\n```yaml\n(.*?)```", page, re.S)
    (tmp_path / "mine.yaml").write_text(suite)

    tokenizer = train_tokenizer(["the capital of France is Paris"] * 3, 300)
    tokenizer.save("tokenizer")
    attention = AttentionConfig(alibi=True)
    config = ModelConfig(
        d_model=16, n_heads=2, n_layers=1, max_seq_len=128, vocab_size=384, no_bias=True, attn_config=attention
    )
    model = normal_model(config, std=0.2)
    (tmp_path / "runs").mkdir()
    export_model(model.state_dict(), model.config, "runs/mpt-1b", tokenizer_folder="tokenizer")

    (results,) = launch_eval.launch(["mine.yaml"])
    for record in results.tasks.values():
        assert [metric for metric in (*METRICS, BITS) if metric in record] == [
            metric for metric in (*METRICS, BITS) if metric in TASK_TYPES[record["type"]].metrics
        ]
        assert record["metric"] == TASK_TYPES[record["type"]].metrics[0]
    assert [*results.tasks] == [
        *("capitals/0-shot", "capitals/2-shot", "pronouns/0-shot", "endings/0-shot", "sums/1-shot", "story/0-shot")
    ]
    heading, row = (tmp_path / "results/mine/gauntlet.csv").read_text().splitlines()[:2]
    assert "knowledge" in heading and "language" in heading and "core_average" in heading and row.startswith("ours,")
