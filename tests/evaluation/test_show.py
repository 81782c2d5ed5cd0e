"""`eval --show`: the first prompts of each task, token by token, from folders without weights."""

import json
import re

import pytest
import typer

from llmfoundry_lite.cli import main, run
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation import models
from llmfoundry_lite.evaluation.show import MAX_CONTEXT_TOKENS, _join_tokens

ROWS = {
    "choice": [
        {"query": "the cat", "choices": ["sat", "on a\nmat"], "gold": 1},
        {"query": "a cat", "choices": ["sat", "on"], "gold": 0},
        {"query": "the mat", "choices": ["cat", "mat"], "gold": 0},
    ],
    "sides": [{"context_options": ["the cat", "the mat"], "continuation": "sat", "gold": 0}] * 2,
    "next": [{"context": "the cat", "continuation": "sat on"}] * 2,
    "riddle": [{"context": "cat?", "answer": "sat", "aliases": ["on \x1b[31ma mat"]}] * 2,
}
KINDS = {
    "choice": "multiple_choice",
    "sides": "schema",
    "next": "language_modeling",
    "riddle": "generation_task_with_answers",
}


@pytest.fixture
def here(tmp_path, folder, monkeypatch):
    """A folder with a tokenizer and a config.json, but no weights, and a file of each type of task."""
    monkeypatch.chdir(tmp_path)
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 24, "vocab_size": 384}
    (folder / "config.json").write_text(json.dumps({"model_type": "mpt", **sizes}))
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.txt").write_text("the cat sat on a mat")
    return tmp_path


def tasks_of(**changes):
    """The argument that names every task, with changes of some."""
    tasks = []
    for name, kind in KINDS.items():
        task = {"label": name, "icl_task_type": kind, "dataset_uri": f"{name}.jsonl", **changes.get(name, {})}
        tasks.append(task)
    tasks.append({"label": "text", "icl_task_type": "perplexity", "dataset_uri": "text.txt"})
    return f"icl_tasks={json.dumps(tasks)}"


def show(capsys, *arguments):
    from llmfoundry_lite import launch_eval

    launch_eval.main([*arguments])
    return capsys.readouterr().out


def test_prompts_of_every_type_by_hand(here, capsys, monkeypatch):
    monkeypatch.setattr(models, "import_model", None)  # no weights are read
    out = show(capsys, "models.a=model", "models.b=model", "suite=s", tasks_of(), "--show", "1")
    heading, *blocks = [block.strip("\n") for block in out.split("\n\n")]
    assert heading.startswith("Prompts of a, b, with a context of 24 tokens. │ divides tokens, ║ comes before")
    assert blocks == [
        "choice/0-shot, multiple_choice, tokenization separate",
        "  row 1\n"
        "  question: the cat\n"
        "  context of every option, 2 tokens:\n"
        "      the│ cat\n"
        "    option 1, 1 token:\n"
        "      ║ sat\n"
        "  * option 2, 4 tokens:\n"
        "      ║ on│ a│↵\n"
        "      │mat",
        "sides/0-shot, schema, tokenization separate",
        "  row 1\n"
        "  question: sat\n"
        "  context of every option, 1 token:\n"
        "      the\n"
        "  * option 1, 1 token:\n"
        "       cat║ sat\n"
        "    option 2, 1 token:\n"
        "       mat║ sat",
        "next/0-shot, language_modeling, tokenization separate",
        "  row 1\n  question: the cat\n  context, 2 tokens:\n      the│ cat\n    answer, 2 tokens:\n      ║ sat│ on",
        "riddle/0-shot, generation_task_with_answers, tokenization separate",
        "  row 1\n"
        "  question: cat?\n"
        "  context, 2 tokens:\n"
        "      cat│?\n"
        "  generated: 9 tokens at most\n"
        "  right answers: sat, on \\x1b[31ma mat\n"
        "  scored for bpb, 1 token:\n"
        "      ║ sat",
        "text/0-shot, perplexity",
        "  document 1, a window\n"
        "  context, 1 token:\n"
        "      <|endoftext|>\n"
        "    answer, 6 tokens:\n"
        "      ║the│ cat│ sat│ on│ a│ mat",
        "",
    ]
    assert not (here / "results").exists()


def test_what_is_cut_and_which_rows_are_examples_is_said(here, capsys):
    examples = {"num_fewshot": [2], "prompt_string": "on a mat sat on a mat\n"}
    out = show(capsys, "models.a=model", tasks_of(choice=examples), "max_seq_len=14", "--show=1")
    assert "  row 1, after the examples in rows 2, 3\n" in out or "  row 1, after the examples in rows 3, 2\n" in out
    (cut,) = [line for line in out.splitlines() if "cut off" in line]
    assert re.fullmatch(r"  cut off: up to the first \d+ tokens, which do not fit", cut)
    assert "  the contexts of the options begin with different tokens\n" in out
    assert "with a context of 14 tokens" in out


def test_a_max_seq_len_above_the_models_is_said_to_be_lowered(here, capsys):
    out = show(capsys, "models.a=model", tasks_of(), "max_seq_len=64", "--show=1")
    assert "with a context of 24 tokens, the model's length, because max_seq_len=64 is longer. " in out


def test_a_task_with_too_few_rows_is_refused_before_prompts_are_printed(here, capsys):
    with pytest.raises(DataError, match=r"next: next\.jsonl has 2 rows, too few for 2 examples and a question"):
        show(capsys, "models.a=model", tasks_of(next={"num_fewshot": [2]}), "--show=1")
    assert capsys.readouterr().out == ""


def test_rows_that_cannot_be_asked_are_passed_over_and_named(here, capsys):
    rows = [{"context": "the cat", "continuation": "mat " * 40}] * 3 + ROWS["next"]
    (here / "next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = show(capsys, "models.a=model", tasks_of(), "--show=1")
    heading = "next/0-shot, language_modeling, tokenization separate, skipped so far: 3 with an answer longer than the"
    assert heading in out and "row 4\n  question: the cat" in out
    (here / "next.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert "next: no item can be asked of a model of 24 tokens: 3 with an answer longer" in show(
        capsys, "models.a=model", tasks_of(), "--show=1"
    )


def test_of_many_right_answers_the_first_are_printed(here, capsys):
    row = {"context": "cat?", "answer": "sat", "aliases": [f"mat {number}" for number in range(3_000)]}
    (here / "riddle.jsonl").write_text(json.dumps(row) + "\n")
    out = show(capsys, "models.a=model", tasks_of(), "--show=1")
    (answers,) = [line for line in out.splitlines() if "right answers" in line]
    assert answers.startswith("  right answers: sat, mat 0, ") and answers.endswith(", mat 8 and 2,991 more")


def test_a_long_context_is_shortened_in_the_middle():
    tokens = [f" {number}" for number in range(10_000)]
    text = _join_tokens(tokens, MAX_CONTEXT_TOKENS)
    assert text.startswith(" 0│ 1│") and text.endswith("│ 9998│ 9999")
    assert "│ … 9,600 tokens are not shown … │" in text and text.count("│") == MAX_CONTEXT_TOKENS
    assert _join_tokens(tokens[:MAX_CONTEXT_TOKENS], MAX_CONTEXT_TOKENS).count("│") == MAX_CONTEXT_TOKENS - 1


@pytest.mark.parametrize("option", [["--show"], ["--show", "0"], ["--show", "models.b=x"], ["--show=-1"]])
def test_a_number_of_prompts_that_is_none_is_refused(here, option):
    said = "^--show: '.*' given, expected a number of prompts of each task, such as --show 3$"
    with pytest.raises(ConfigError, match=said):
        load_eval_config(["models.a=model", tasks_of(), *option])


@pytest.mark.parametrize("option", [["--show", "1"], ["--show=1"]])
def test_the_command_starts_no_ranks_to_show_prompts(here, monkeypatch, option):
    started = []

    def run_here(module, main, arguments):
        started.append(arguments)
        raise typer.Exit

    monkeypatch.setattr(run, "_run_in_this_process", run_here)
    arguments = ["models.a=model", tasks_of(), *option]
    assert main.run(["eval", "-n", "2", *arguments]) == 0
    assert started == [arguments]
