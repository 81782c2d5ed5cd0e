"""`compare --items`: the items of a task that one model wins and loses against another."""

import io
import json

import pytest
from rich.console import Console

from llmfoundry_lite.cli import main
from llmfoundry_lite.evaluation.changed_items import (
    MAX_OPTIONS,
    MAX_QUESTION_CHARACTERS,
    find_changed_items,
    print_changed_items,
)
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from tests.helpers.results import choice, text, write_result


def task_of(answers, **keys_of_items):
    """A task of choices between two options, of which the second is right, with a question for each item."""
    record, items = choice(answers)
    for number, (item, answer) in enumerate(zip(items, answers, strict=True)):
        item |= {"question": f"question {number}?", "choices": ["no", "yes, of course"], "gold": 1}
        item |= {"log_probability": [-3.0, -2.0 if answer else -8.0], "num_tokens": [1, 2], "num_characters": [2, 14]}
        item["chosen"] = {"acc_per_token": 1 if answer else 0}
        item |= keys_of_items
    return record, items


def write_pair(folder, first, other):
    return [write_result(folder, name, tasks) for name, tasks in (("base", first), ("ours", other))]


def printed(folder, first, other, max_items=10):
    results = load_results(write_pair(folder, {"t/0-shot": first}, {"t/0-shot": other}))
    (pair,) = compare(results)
    changed = find_changed_items(pair, "t/0-shot", *results)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        print_changed_items([changed], console, max_items)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_items_won_and_lost_by_hand(tmp_path):
    lines = printed(tmp_path, task_of([0, 1, 1, 0]), task_of([1, 1, 0, 0]))
    assert lines == [
        "",
        "t/0-shot by acc_per_token: ours won 1 item against base (scores in nats per token)",
        "",
        "row 1",
        "question 0?",
        "   base        ours        choice",
        "─────────────────────────────────────────",
        "     -3.000 <    -3.000    no",
        "*    -4.000      -1.000 <  yes, of course",
        "",
        "",
        "t/0-shot by acc_per_token: ours lost 1 item against base (scores in nats per token)",
        "",
        "row 3",
        "question 2?",
        "   base        ours        choice",
        "─────────────────────────────────────────",
        "     -3.000      -3.000 <  no",
        "*    -1.000 <    -4.000    yes, of course",
        "",
        "* marks the right option, and < the one that a model chose. Of a language modelling task, < marks an",
        "answer whose tokens were all the likeliest.",
    ]


def test_only_some_of_many_items_are_printed_and_texts_are_short(tmp_path):
    long = {"question": "\x1b[31mword " * 10_000, "choices": ["no\x1b[31m", "x" * 10_000]}
    out = "\n".join(printed(tmp_path, task_of([0] * 30, **long), task_of([1] * 30, **long), max_items=2))
    assert "ours won 30 items against base, of which the first 2 follow" in out and out.count("row ") == 2
    assert len(out) < 2 * MAX_QUESTION_CHARACTERS + 4_000 and "\x1b" not in out


def test_the_right_option_is_printed_however_many_there_are(tmp_path):
    num_options = 3 * MAX_OPTIONS
    many = {"choices": [f"option {i}" for i in range(num_options)], "gold": num_options - 1}
    many |= {"log_probability": [-1.0] * num_options, "num_tokens": [1] * num_options}
    first, other = task_of([0], **many), task_of([1], **many)
    for _, items in (first, other):
        del items[0]["num_characters"]
    lines = printed(tmp_path, first, other)
    options = [line for line in lines if "option " in line and "marks" not in line]
    assert (
        len(options) == MAX_OPTIONS + 1 and options[-1].startswith("*") and f"option {num_options - 1}" in options[-1]
    )


def test_generated_answers_stand_beside_the_accepted_ones(tmp_path):
    first, other = choice([0]), choice([1])
    for (_, items), answer in ((first, "5"), (other, "four")):
        items[0] |= {"question": "2 + 2?", "text": answer, "answers": ["4", "four"]}
    lines = printed(tmp_path, first, other)
    table = [line.split(maxsplit=1) for line in lines if line.startswith(("base", "ours ", "accepted"))]
    assert table == [["base", "5"], ["ours", "four"], ["accepted", "4, four"]]


def test_results_without_texts_are_listed_by_row(tmp_path):
    lines = printed(tmp_path, choice([0, 1]), choice([1, 1]))
    assert "row 1" in lines and ["0.000", "1.000"] in [line.split() for line in lines]
    assert any("These results do not have the texts of questions; evaluate again with redo=true" in s for s in lines)


def test_items_of_logs_are_not_to_be_evaluated_again(tmp_path):
    first, other = choice([0]), choice([1])
    for _, items in (first, other):
        items[0] |= {"id": "doc 7", "row": "sha256:a", "prompt": "sha256:b"}
    lines = printed(tmp_path, first, other)
    assert "doc 7" in lines
    assert "Logs of other tools are read without the texts of questions; the logs have them." in lines
    assert not any("redo=true" in line for line in lines)


def test_items_whose_options_do_not_fit_together_are_listed_by_their_results(tmp_path):
    two = {"choices": ["no", "yes"], "log_probability": [-1.0, -2.0], "num_tokens": [1, 1], "num_characters": [2, 3]}
    three = {key: [*values, values[0]] for key, values in two.items()}
    lines = printed(tmp_path, task_of([0], **two), task_of([1], **three))
    assert ["0.000", "1.000"] in [line.split() for line in lines]

    # Two options of which only one has a text.
    first, other = task_of([0]), task_of([1])
    for _, items in (first, other):
        del items[0]["choices"]
        items[0]["answers"] = ["yes"]
    lines = printed(tmp_path, first, other)
    assert ["-3.000", "<", "-3.000", "yes"] in [line.split() for line in lines]


def test_the_command_prints_items_and_writes_all_of_them(tmp_path, capsys):
    first = {"t/0-shot": task_of([0, 1, 1, 0]), "u/0-shot": choice([1, 0]), "u/2-shot": choice([1, 0])}
    other = {**first, "t/0-shot": task_of([1, 1, 0, 0])}
    paths = [str(path) for path in write_pair(tmp_path / "results", first, other)]
    assert main.run(["compare", *paths, "--items", "t", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "ours won 1 item against base" in " ".join(out.split()) and "compare-items.jsonl" in out
    won, lost = map(json.loads, (tmp_path / "out/compare-items.jsonl").read_text().splitlines())
    assert (won["won_by"], won["index"], lost["won_by"], lost["index"]) == ("ours", 0, "base", 2)
    assert won["question"] == "question 0?" and won["choices"][won["gold"]] == "yes, of course"
    assert won["answers_of"]["base"]["log_probability"] == [-3.0, -8.0]
    assert won["answers_of"]["ours"]["acc_per_token"] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fact", "--items fact: not a task that all results have; did you mean facts?"),
        ("facts/1-shot", "--items facts/1-shot: not a task that all results have; did you mean facts/0-shot?"),
        ("u", "--items u: there are u/0-shot, u/2-shot; name one of them"),
        (
            "xyz",
            "--items xyz: not a task that all results have; they have facts/0-shot, u/0-shot, u/2-shot, text/0-shot",
        ),
        ("text", "--items text: a held-out text has no questions; name another task"),
    ],
)
def test_a_task_that_cannot_be_listed_is_one_line_before_anything_is_compared(tmp_path, capsys, name, said):
    tasks = {"facts/0-shot": task_of([0, 1]), "u/0-shot": choice([1, 0]), "u/2-shot": choice([1, 0])}
    tasks["text/0-shot"] = text([[(3.0, 4)]])
    paths = [str(path) for path in write_pair(tmp_path, tasks, tasks)]
    assert main.run(["compare", *paths, "--items", name]) == 2
    output = capsys.readouterr()
    assert output.err == f"error: {said}\n" and output.out == ""


def test_a_task_that_is_left_out_is_not_listed(tmp_path, capsys):
    tasks = {"t/0-shot": task_of([0, 1]), "v/0-shot": choice([1, 0])}
    paths = [str(path) for path in write_pair(tmp_path, tasks, tasks)]
    assert main.run(["compare", *paths, "--items", "t", "--skip", "t/0-shot"]) == 2
    assert "--items t: not a task that all results have" in capsys.readouterr().err
    assert main.run(["compare", *paths, "--items", "t", "--all-pairs"]) == 2
    assert "--items compares with the first result; leave it out with --all-pairs" in capsys.readouterr().err


def test_by_bits_per_byte_an_item_with_fewer_is_won(tmp_path):
    options = {"choices": ["tea", "milk"], "gold": 0, "num_bytes": [4, 5], "chosen": {"acc": 0}}
    first = task_of([1, 1], **options, log_probability=[-4.0, -5.0])
    other = task_of([1, 1], **options, log_probability=[-2.0, -5.0])
    for (record, items), bits in ((first, [1.4, 1.0]), (other, [0.7, 1.2])):
        for item, value in zip(items, bits, strict=True):
            item["bpb"] = value
        record["bpb"] = sum(bits) / 2
    all_results = load_results(write_pair(tmp_path, {"t/0-shot": first}, {"t/0-shot": other}))
    [pair] = compare(all_results, metric="bpb")
    changed = find_changed_items(pair, "t/0-shot", *all_results)
    assert [item.is_won for item in changed.items] == [True, False]
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        print_changed_items([changed], console, 10)
    printed_text = capture.get()
    assert "won 1 item" in printed_text and "(scores in nats per byte)" in printed_text
    assert "-0.500 <" in printed_text, "-2 nats over 4 bytes, and the choice by the whole log-probability"


def test_bits_per_byte_are_won_by_the_lower_number_and_printed(tmp_path):
    tasks = []
    for bits in (1.5, 1.25):
        record, items = task_of([1, 1], num_bytes=[3, 15], bpb=bits)
        tasks.append(({**record, "metric": "bpb", "bpb": bits, "bpb_stderr": 0.0}, items))
    lines = printed(tmp_path, *tasks)
    assert "t/0-shot by bpb: ours won 2 items against base (scores in nats per byte)" in lines
    assert lines.count("bpb of the right answer: 1.5000 for base, 1.2500 for ours") == 2
