"""Multiple choice by letters: the choices are listed in the prompt, and the model answers A, B, C."""

import json
from typing import Any

import pytest

from llmfoundry_lite.config.eval_schema import Benchmark, TaskConfig, result_name
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_tasks import load_tasks
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.means import label_of
from llmfoundry_lite.evaluation.result_files import outline_tasks
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.evaluation.tasks import prepare_task
from tests.helpers.pieces import Pieces

ROWS = [
    {"query": "Is ice cold?", "choices": ["yes", "no way"], "gold": 0},
    {"query": "Is fire cold?", "choices": ["yes", "no way"], "gold": 1},
    {"query": "Who barks?", "choices": ["cats", "dogs", "some fish"], "gold": 1},
]
PIECES: Any = Pieces()
QUERY = "Is ice cold?\n A. yes\n B. no way\nAnswer:"


def letters(**changes):
    keys = {"label": "quiz", "icl_task_type": "multiple_choice", "dataset_uri": "quiz.jsonl", "form": "letters"}
    return TaskConfig(**{**keys, **changes})


def prepare(config, rows=ROWS, num_fewshot=0, tokenization="separate"):
    return prepare_task(config, rows, num_fewshot, PIECES, max_seq_len=200, tokenization=tokenization)


def texts_of(task, index=0):
    """Return the texts `context|answer` of an item's requests."""
    requests = task.items[index].requests
    return [f"{PIECES.decode(request.context)}|{PIECES.decode(request.continuation)}" for request in requests]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the task `quiz`, which does not say its form."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").mkdir()
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {"label": "quiz", "icl_task_type": "multiple_choice", "dataset_uri": "quiz.jsonl", "num_fewshot": [0, 1]}
    (tmp_path / "evals/quiz.yaml").write_text(json.dumps(task))
    return tmp_path


# --------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("tokenization", ["separate", "joint"])
def test_choices_are_listed_and_letters_scored(tokenization):
    task = prepare(letters(), tokenization=tokenization)
    assert texts_of(task) == [f"{QUERY}| A", f"{QUERY}| B"]
    assert texts_of(task, 2)[2].endswith("\n C. some fish\nAnswer:| C")
    assert [item.gold for item in task.items] == [0, 1, 1]


def test_examples_have_the_form_of_the_question():
    task = prepare(letters(fewshot_fixed=True, example_delimiter="\n\n"), num_fewshot=1)
    question = "Is fire cold?\n A. yes\n B. no way\nAnswer:"
    assert texts_of(task) == [f"{QUERY} A\n\n{question}| A", f"{QUERY} A\n\n{question}| B"]


def test_the_list_and_the_answer_can_be_written_as_elsewhere():
    """MMLU in lm-evaluation-harness has no space before a letter, and HellaSwag in OLMES a line before the list."""
    config = letters(letter_prefix="", choices_delimiter="\nChoose:\n", continuation_delimiter="\nLetter: ")
    assert texts_of(prepare(config))[0] == "Is ice cold?\nChoose:\nA. yes\nB. no way\nLetter:| A"


def test_equal_choices_are_noticed_though_letters_differ():
    rows = [ROWS[0], {"query": "Which?", "choices": ["a", "b", "a "], "gold": 0}]
    assert [item.has_duplicates for item in prepare(letters(), rows).items] == [False, True]


def test_more_choices_than_letters_are_refused(tmp_path):
    row = {"query": "Which?", "choices": [str(number) for number in range(27)], "gold": 0}
    path = tmp_path / "quiz.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match="line 1: 27 choices given, expected at most 26 for form: letters"):
        read_rows(letters(dataset_uri=str(path)))
    read_rows(letters(dataset_uri=str(path), form="cloze"))


# ------------------------------------------------------------------------------------------------ names and settings


def test_the_result_names_its_form():
    task = prepare(letters())
    assert (task.name, task.metric, label_of(task.name)) == ("quiz/0-shot-letters", "acc", "quiz")
    assert task.settings["form"] == "letters"
    cloze = prepare(letters(form="cloze"))
    assert (cloze.name, cloze.metric) == ("quiz/0-shot", "acc_per_token")
    assert cloze.fingerprint != task.fingerprint
    assert cloze.data_fingerprint == task.data_fingerprint


def test_cloze_keeps_its_fingerprint():
    """It is that of results from before there were forms."""
    for form in (None, "cloze"):
        task = prepare(letters(form=form, continuation_delimiter="\nAnswer: "), num_fewshot=2)
        assert task.fingerprint == "sha256:6079b581e19f77e0"
        assert "form" not in task.settings


def test_every_text_of_the_list_is_in_the_fingerprint():
    changes = ({}, {"letter_prefix": ""}, {"choices_delimiter": "\n\n"}, {"continuation_delimiter": "\n"})
    fingerprints = [prepare(letters(**change)).fingerprint for change in changes]
    assert len(set(fingerprints)) == 3
    assert fingerprints[3] == fingerprints[0], "white space stands for the delimiter of letters"


def test_an_outline_has_the_name_and_the_settings_of_the_task(folder):
    config = letters(dataset_uri=str(folder / "quiz.jsonl"))
    [outline] = outline_tasks([config], "separate", None)
    task = prepare(config)
    assert (outline.name, outline.settings) == (task.name, task.settings)


def test_a_gauntlet_names_the_form_of_a_benchmark():
    benchmark = Benchmark(name="quiz", num_fewshot=5, random_baseline=0.25, form="letters")
    assert benchmark.task == result_name("quiz", 5, "letters") == "quiz/5-shot-letters"


# ----------------------------------------------------------------------------------------------------- configuration


def names_of(entries, **options):
    tasks = load_tasks(entries, "evals", **options)
    return [result_name(task.label, number, task.form) for task in tasks for number in task.num_fewshot]


def test_a_suite_may_have_both_forms_of_a_task(folder):
    both = ["quiz", {"label": "quiz", "form": "letters"}]
    assert names_of(both) == ["quiz/0-shot", "quiz/1-shot", "quiz/0-shot-letters", "quiz/1-shot-letters"]
    with pytest.raises(ConfigError, match="icl_tasks: quiz/0-shot-letters is listed twice"):
        names_of(both, form="letters")


def test_the_form_of_an_evaluation_is_that_of_tasks_without_their_own(folder):
    assert names_of([{"label": "quiz", "form": "cloze"}], form="letters") == ["quiz/0-shot", "quiz/1-shot"]
    loaded = load_eval_config(["models.a=runs/a", "form=letters"])
    assert [task.form for task in loaded.tasks] == ["letters"]
    assert [task.form for task in load_eval_config(["models.a=runs/a"]).tasks] == [None]


def test_letters_need_choices(folder):
    task = {"label": "quiz", "icl_task_type": "schema", "dataset_uri": "quiz.jsonl", "form": "letters"}
    with pytest.raises(ConfigError, match="quiz: form: letters needs multiple_choice, and this is a schema task"):
        load_tasks([task], "evals")
    with pytest.raises(ConfigError, match=r"form: 'letter' is not known; did you mean letters\?"):
        load_tasks([{"label": "quiz", "form": "letter"}], "evals")
