"""MMLU as lm-evaluation-harness asks it: examples of a split and a category of their own, and two means."""

import json
from dataclasses import replace
from typing import Any

import pytest

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.summaries import summarise
from llmfoundry_lite.evaluation.tables import results_table
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from tests.helpers.launch import ROOT
from tests.helpers.pieces import Pieces


def question(query, category, split, gold=1):
    return {
        "query": query,
        "choices": ["nothing", "a cell", "a bone", "a nerve"],
        "gold": gold,
        "category": category,
        "split": split,
    }


ROWS = [
    question("What grows?", "anatomy", "dev"),
    question("What breaks?", "anatomy", "dev", gold=2),
    question("What adds? ", "abstract algebra", "dev", gold=0),
    question("What hurts?", "anatomy", "test", gold=3),
    question("What divides?", "anatomy", "test"),
    question("What vanishes? ", "abstract algebra", "test", gold=0),
]
LISTED = "\nA. nothing\nB. a cell\nC. a bone\nD. a nerve\nAnswer:"
# Written by lm_eval 0.4.13's `mmlu_anatomy` and `mmlu_abstract_algebra`, for these rows in its format.
ANATOMY = (
    "The following are multiple choice questions (with answers) about anatomy.\n\n"
    f"What grows?{LISTED} B\n\nWhat breaks?{LISTED} C\n\nWhat hurts?{LISTED}"
)
ALGEBRA = (
    "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
    f"What adds?{LISTED} A\n\nWhat vanishes?{LISTED}"
)


@pytest.fixture
def mmlu(tmp_path) -> TaskConfig:
    """The suite's task, on the rows of this file."""
    (task,) = load_eval_config([str(ROOT / "yamls/eval/mmlu.yaml"), "models.ours=runs/mpt-1b"]).tasks
    path = tmp_path / "mmlu.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return replace(task, dataset_uri=str(path))


def ask(task, num_fewshot=2):
    tokenizer: Any = Pieces()
    prepared = prepare_task(task, read_rows(task), num_fewshot, tokenizer, max_seq_len=400, tokenization="separate")
    texts = [
        [f"{tokenizer.decode(request.context)}|{tokenizer.decode(request.continuation)}" for request in item.requests]
        for item in prepared.items
    ]
    return prepared, texts


def test_a_prompt_of_mmlu_is_that_of_lm_eval(mmlu):
    prepared, texts = ask(mmlu)
    assert mmlu.num_fewshot == [5]
    assert texts[0] == [f"{ANATOMY}| {letter}" for letter in "ABCD"]
    assert texts[2] == [f"{ALGEBRA}| {letter}" for letter in "ABCD"]
    assert [item.gold for item in prepared.items] == [3, 1, 0]
    assert prepared.name == "mmlu/2-shot-letters"
    assert prepared.metric == "acc"


@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("num_fewshot", [0, 1, 2])
def test_rows_of_the_split_of_examples_are_never_asked(mmlu, num_fewshot, is_fixed):
    prepared, texts = ask(replace(mmlu, fewshot_fixed=is_fixed), num_fewshot)
    assert [item.index for item in prepared.items] == [3, 4, 5]
    shown = [text[0].count("What ") - 1 for text in texts]
    assert shown == [num_fewshot, num_fewshot, min(num_fewshot, 1)]
    other_questions = [text[0].count("hurts") + text[0].count("divides") for text in texts]
    assert other_questions == [1, 1, 0]


def test_more_examples_than_the_split_has_are_refused(mmlu):
    with pytest.raises(DataError) as caught:
        ask(mmlu, 3)
    assert str(caught.value).endswith("2 rows of the split dev in its largest category, too few for 3 examples")


def test_the_split_is_part_of_what_was_asked(mmlu):
    prepared, _ = ask(mmlu, 1)
    assert prepared.settings["fewshot_split"] == "dev"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[3:], "has rows of the split test alone; fewshot_split: dev needs some of that split and some of another"),
        (ROWS[:3], "has rows of the split dev alone; fewshot_split: dev needs some of that split and some of another"),
        ([{**ROWS[0], "split": 3}], "line 1: split is 3, expected a text, because fewshot_split asks for this column"),
    ],
)
def test_a_file_without_the_splits_is_refused(mmlu, tmp_path, rows, words):
    (tmp_path / "mmlu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        read_rows(mmlu)
    assert str(caught.value).endswith(words)


def test_a_table_has_the_mean_of_the_subjects_and_names_that_of_the_questions(mmlu):
    prepared, _ = ask(mmlu)
    records = []
    for item, is_right in zip(prepared.items, (1, 0, 0), strict=True):
        records.append(
            {
                "index": item.index,
                "category": item.category,
                "num_trimmed": 0,
                "num_tokens": [1] * 4,
                "tie": {"acc": False},
                "has_duplicates": False,
                **dict.fromkeys(("acc", "acc_norm", "acc_per_token"), is_right),
            }
        )
    record = summarise(prepared, records, seconds=0.0)
    assert record["acc"] == pytest.approx((1 / 2 + 0) / 2)
    assert record["categories"] == {"abstract algebra": 0.0, "anatomy": 0.5}
    assert record["over_items"]["acc"] == pytest.approx(1 / 3)

    results = Results(model="ours", suite="mmlu", source="ours", tasks={prepared.name: record})
    (note,) = [note for note in results_table([results]).notes if "categories" in note]
    assert note == "mmlu/2-shot-letters: the mean of its categories; over its 3 items 0.333 ± 0.333"
