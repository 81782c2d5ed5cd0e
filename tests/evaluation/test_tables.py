"""The table of results: what fits, what is averaged, what is told below."""

import csv
import io
import math

import pytest
from rich.console import Console

from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import average_error, notes, print_results, score_cell, write_tables
from tests.helpers.results import choice, text


def results(name="ours", **tasks):
    records = {label.replace("__", "/") + "-shot": task[0] for label, task in tasks.items()}
    return Results(model=name, suite="icl", source="", tasks=records)


def printed(all_results, width=80):
    console = Console(width=width, file=io.StringIO())
    print_results(all_results, console)
    return console.file.getvalue()


def test_many_tasks_continue_below_and_no_number_is_cut():
    many = {f"a_task_of_some_length_{i}__0": choice([1] * i + [0] * (20 - i)) for i in range(12)}
    shown = printed([results(**many), results("a_model_with_a_long_name", **many)])
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert all(
        shown.count(f"a_task_of_some_length_{i} ") + shown.count(f"a_task_of_some_length_{i}\n") for i in range(12)
    )
    assert [shown.count(f"{i / 20:.3f}") >= 2 for i in range(12)] == [True] * 12
    assert "…" not in shown
    wide = printed([results(**many)], width=400)
    assert wide.count("model") == 1 < shown.count("model")


def test_bits_per_byte_are_named_and_not_averaged():
    x = text([[(math.log(2) * 5, 10)]], bits_per_byte_stderr=0.0214)
    ours = results(a__0=choice([1, 0]), b__0=choice([1, 1]), x__0=x)
    shown = printed([ours])
    header = [line.split() for line in shown.splitlines()[1:4]]
    assert header[:2] == [["a", "b", "x"], ["0-shot", "0-shot", "0-shot"]]
    assert header[2] == ["model", *("acc", "per", "token") * 2, "bits", "per", "byte", "average"]
    assert ["ours", "0.500", "1.000", "0.500", "0.750"] in [line.split() for line in shown.splitlines()]
    assert "the average is of the accuracies" in shown
    assert ["±0.500", "±0.021", "±0.250"] in [line.split() for line in shown.splitlines()]


def test_text_alone_has_no_average():
    shown = printed([results(x__0=text([[(math.log(2) * 5, 10)]], bits_per_byte_stderr=0.0214))])
    assert "0.500" in shown and "average" not in shown


def test_the_error_of_the_average_adds_other_data_as_independent_and_the_same_as_not():
    def task(error, data):
        return {"metric": "acc", "acc": 0, "acc_stderr": error, "data_fingerprint": data}

    tasks = {"a/0-shot": task(0.03, "1"), "b/0-shot": task(0.04, "2"), "b/5-shot": task(0.02, "2")}
    tasks |= {"c/0-shot": task(0.02, "2")}
    assert average_error(tasks, ["a/0-shot", "b/0-shot"]) == pytest.approx(0.05 / 2)
    assert average_error(tasks, ["b/0-shot", "b/5-shot"]) == pytest.approx(0.06 / 2)
    assert average_error(tasks, ["b/0-shot", "c/0-shot"]) == pytest.approx(0.06 / 2)


def test_what_an_error_rests_on_is_told():
    found = notes([results(a__0=choice([1, 0], num_clusters=1), x__0=text([[(1.0, 10)]], num_documents=3))])
    assert "a/0-shot: 2 items in 1 clusters, which its standard error counts" in found
    assert "x/0-shot: a standard error from 3 documents alone is rough" in found


def test_of_a_single_item_or_cluster_no_error_is_claimed():
    record = {"metric": "acc", "acc": 1.0, "acc_stderr": 0.0}
    assert score_cell({**record, "acc": 0.5, "n": 2}) == (0.5, 0.0)
    assert score_cell({**record, "n": 1}) == score_cell({**record, "n": 9, "num_clusters": 1}) == (1.0, None)


def test_none_of_60_right_has_an_interval_and_no_error_of_zero():
    """The table had "0.000 ± 0.000"."""
    none_right = results(a__0=choice([0] * 60))
    assert "±0.000" not in printed([none_right])
    assert notes([none_right]) == [
        "a/0-shot: all of its 60 items are wrong, which gives no standard error; Wilson's 95 % interval is 0.000 to "
        "0.060"
    ]
    assert notes([results(a__0=choice([1] * 20))])[0].endswith("interval is 0.839 to 1.000")
    assert none_right.tasks["a/0-shot"]["acc_per_token_stderr"] == 0  # the record keeps what the formula gives


def test_the_latex_of_a_trial_says_so(tmp_path):
    """Without the sentence, it looked like a result."""
    tried = results(a__0=choice([1, 0], settings={"limit": 2}))
    _, _, latex = write_tables([tried], tmp_path)
    assert "A trial, not a result: a/0-shot on the first items only." in latex.read_text()
    _, _, latex = write_tables([results(a__0=choice([1, 0]))], tmp_path)
    assert "trial" not in latex.read_text()


def test_what_was_odd_is_told_once_and_with_names_where_it_is_not_of_all():
    odd = {"num_ties": 2, "num_duplicates": 1, "num_trimmed": 0, "skipped": {"an answer without tokens": 3}}
    ours = results(a__0=choice([1, 0], **odd))
    theirs = results("base", a__0=choice([1, 0], num_duplicates=1, settings={"limit": 2}), b__0=choice([1]))
    assert notes([ours, theirs]) == [
        "a/0-shot: 2 with a tie for the best, where the first counts, of 2 items (ours)",
        "a/0-shot: 1 that repeat a choice, of 2 items",
        "a/0-shot: 3 skipped (an answer without tokens); 2 asked (ours)",
        "a/0-shot: only the first 2 items (limit): a try, not a result (base)",
        "warning: not all models have all tasks; the averages are over different ones",
    ]
    assert notes([results(a__0=choice([1, 0], num_ties=0))]) == []
    a, b = (results(name, a__0=choice([1, 0], fingerprint=name)) for name in ("a", "b"))
    assert notes([a, b]) == ["warning: a/0-shot: b not asked the same as a; these numbers do not compare"]


def test_a_note_that_many_tasks_share_is_said_once_with_their_number():
    tried = {f"t{i}__0": choice([1, 0], settings={"limit": 2}) for i in range(27)}
    assert notes([results(**tried)]) == [
        "t0/0-shot and 26 other tasks: only the first 2 items (limit): a try, not a result"
    ]
    few = {name: tried[name] for name in ("t0__0", "t1__0")}
    assert notes([results(**few)]) == ["t0/0-shot, t1/0-shot: only the first 2 items (limit): a try, not a result"]


def test_files_hold_the_same_numbers(tmp_path):
    ours = results(a__0=choice([1, 0, 1, 1], num_ties=1), x__0=text([[(math.log(2) * 5, 10)]]))
    markdown, plain, _ = write_tables([ours], tmp_path / "new")
    assert markdown.read_text().splitlines() == [
        "| model | a 0-shot acc per token | x 0-shot bits per byte | average |",
        "|---|---:|---:|---:|",
        "| ours | 0.750 ± 0.250 | 0.500 | 0.750 ± 0.250 |",
        "",
        "- a/0-shot: 1 with a tie for the best, where the first counts, of 4 items",
        "- the average is of the accuracies",
    ]
    with plain.open() as file:
        assert list(csv.reader(file)) == [
            [
                *("model", "a/0-shot acc_per_token", "a/0-shot acc_per_token stderr"),
                *("x/0-shot bits_per_byte", "x/0-shot bits_per_byte stderr"),
                *("average accuracy", "average accuracy stderr"),
            ],
            ["ours", "0.75", "0.25", "0.5", "", "0.75", "0.25"],
        ]


def test_the_table_for_a_paper_has_its_longer_side_downwards(tmp_path):
    many = {f"task_{number}__0": choice([1] * number + [0] * (20 - number)) for number in range(6)}
    write_tables([results(**many), results("base", **many)], tmp_path / "wide")
    latex = (tmp_path / "wide/table.tex").read_text().splitlines()
    assert " & ours & base \\\\" in latex
    assert r"task\_5 0-shot acc per token & 0.250 $\pm$ 0.099 & 0.250 $\pm$ 0.099 \\" in latex

    write_tables([results(f"m{number}", a__0=choice([1, 0])) for number in range(5)], tmp_path / "long")
    latex = (tmp_path / "long/table.tex").read_text().splitlines()
    assert r"model & a 0-shot acc per token & average \\" in latex
