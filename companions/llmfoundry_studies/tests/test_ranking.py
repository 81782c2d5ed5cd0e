"""All pairs of several models or recipes, and their ranks."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_studies.ranking import Difference, only_common_tasks, rank, rank_models, rank_sides
from llmfoundry_studies.seeds import Run, Side, compare_sides
from tests.helpers.results import choice, write_result

TASK = "quiz/0-shot"


def difference(first: str, other: str, size: float, *, is_detected: bool, metric: str = "acc") -> Difference:
    """Return a difference of two models with values around 0.5."""
    return Difference(
        first=first,
        other=other,
        task=TASK,
        metric=metric,
        first_value=0.5,
        other_value=0.5 + size,
        difference=size,
        low=None,
        high=None,
        confidence=0.95,
        p=0.5,
        p_corrected=0.5,
        is_detected=is_detected,
        verdict="",
    )


def labels(ranking) -> dict[str, str]:
    """Return the rank of each model as a text."""
    return {one.name: one.label for one in ranking.ranks}


def test_models_that_cannot_be_told_apart_share_their_ranks():
    differences = [
        difference("a", "b", 0.02, is_detected=False),
        difference("a", "c", -0.2, is_detected=True),
        difference("b", "c", -0.22, is_detected=True),
    ]
    assert labels(rank(TASK, "acc", differences)) == {"b": "1-2", "a": "1-2", "c": "3"}


def test_a_model_between_two_others_may_be_like_both():
    differences = [
        difference("a", "b", 0.05, is_detected=False),
        difference("a", "c", 0.1, is_detected=True),
        difference("b", "c", 0.05, is_detected=False),
    ]
    assert labels(rank(TASK, "acc", differences)) == {"c": "1-2", "b": "1-3", "a": "2-3"}


@pytest.mark.parametrize("metric", ["bits_per_byte", "bpb"])
def test_fewer_bits_per_byte_rank_first(metric):
    differences = [difference("a", "b", -0.1, is_detected=True, metric=metric)]
    ranking = rank(TASK, metric, differences)
    assert [(one.name, one.label) for one in ranking.ranks] == [("b", "1"), ("a", "2")]


def test_models_without_a_test_have_no_rank():
    """They had the ranks 1-2 before, as if a test had found no difference."""
    untested = replace(difference("a", "b", 0.1, is_detected=False), p=None, p_corrected=None, verdict="too few items")
    ranking = rank(TASK, "acc", [untested])
    assert labels(ranking) == {"a": "-", "b": "-"}
    assert [(one.best, one.worst) for one in ranking.ranks] == [(None, None)] * 2

    # A model that was tested against one of the others has a rank among all of them.
    tested = difference("a", "c", 0.2, is_detected=True)
    also_untested = replace(untested, first="b", other="c")
    assert labels(rank(TASK, "acc", [untested, tested, also_untested])) == {"c": "1-2", "a": "2-3", "b": "-"}


def write_models(folder, answers_of_model: dict) -> list:
    """Write a result of two tasks for each model, and return their paths."""
    paths = []
    for name, answers in answers_of_model.items():
        tasks = {TASK: choice(answers), "b/0-shot": choice(answers, data_fingerprint="sha256:b")}
        paths.append(write_result(folder, name, tasks))
    return paths


def test_p_values_are_corrected_for_all_pairs_and_tasks(tmp_path):
    generator = np.random.default_rng(0)
    answers = {name: generator.random(60) < 0.5 for name in ("a", "b", "c", "d")}
    loaded = load_results(write_models(tmp_path, answers))
    comparisons = compare(loaded, all_pairs=True)
    assert [(one.first, one.other) for one in comparisons] == [
        ("a", "b"),
        ("a", "c"),
        ("a", "d"),
        ("b", "c"),
        ("b", "d"),
        ("c", "d"),
    ]
    tests = [row for one in comparisons for row in one.tasks]
    smallest = min(tests, key=lambda row: row.p)
    assert smallest.p_corrected == pytest.approx(min(1, 12 * smallest.p))


def test_rank_intervals_contain_the_true_ranks(tmp_path):
    # Models 0 and 1 are equal, and so are 2 and 3, so that their true ranks are 1 to 2 and 3 to 4.
    generator = np.random.default_rng(5)
    num_draws, num_wrong = 60, 0
    results = load_results(write_models(tmp_path, {f"m{index}": [1, 0] * 40 for index in range(4)}))
    for _ in range(num_draws):
        difficulty = generator.normal(0, 1, 80)
        for index, one in enumerate(results):
            skill = 0.4 if index < 2 else 0.0
            answers = (difficulty + skill + generator.normal(0, 1, 80) > 0).astype(int).tolist()
            for item, answer in zip(one.items[TASK], answers, strict=True):
                item["acc_per_token"] = answer
        [ranking, *_] = rank_models(compare(results, all_pairs=True, skip=["b/0-shot"])).rankings
        for one in ranking.ranks:
            true_best, true_worst = (1, 2) if one.name in ("m0", "m1") else (3, 4)
            if one.best > true_best or one.worst < true_worst:
                num_wrong += 1
                break
    assert num_wrong <= 7  # 3 are expected at most, with a standard deviation of 1.7


def test_a_task_that_one_model_lacks_is_left_out_of_all_pairs(tmp_path):
    paths = write_models(tmp_path, {"a": [1, 0] * 10, "b": [0, 1] * 10})
    paths.append(write_result(tmp_path, "c", {TASK: choice([1, 1] * 10)}))
    kept, notes = only_common_tasks(load_results(paths), [])
    assert [list(results.items) for results in kept] == [[TASK]] * 3
    assert notes == ["left out, since not all have them or as asked: b/0-shot"]


def test_the_command_ranks_models_and_writes_every_form(tmp_path, capsys):
    answers = {"weak_one": [1] * 20 + [0] * 80, "strong": [1] * 80 + [0] * 20, "like": [1] * 79 + [0] * 21}
    paths = [str(path) for path in write_models(tmp_path, answers)]
    out = tmp_path / "out"
    assert main.run(["compare", *paths, "--all-pairs", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "1-2 (0.800)" in printed
    assert "like against strong" in printed

    record = json.loads((out / "compare.json").read_text())
    mean = record["rankings"][0]
    assert mean["metric"] == "mean"
    assert [(one["name"], one["best"], one["worst"]) for one in mean["ranks"]] == [
        ("strong", 1, 2),
        ("like", 1, 2),
        ("weak_one", 3, 3),
    ]
    with (out / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3  # two tasks and their mean
    assert float(rows[0]["low"]) == record["comparisons"][0]["low"]
    latex = (out / "compare.tex").read_text()
    assert r"task & strong & like & weak\_one" in latex
    assert r"mean of 2 tasks & 1-2 (0.800) & 1-2 (0.790) & 3 (0.200)" in latex
    assert r"like against weak\_one & quiz/0-shot & $+$0.590*" in latex
    assert "| strong | 1-2 (0.800) |" in (out / "compare.md").read_text()

    # The same command may replace its files.
    assert main.run(["compare", *paths, "--all-pairs", "--out", str(out)]) == 0


def test_recipes_are_ranked(tmp_path):
    sides = []
    for name, share in (("weak", 20), ("strong", 80), ("like", 79)):
        runs = [[1] * (share + run) + [0] * (100 - share - run) for run in range(3)]
        paths = [write_models(tmp_path / f"{name}{run}", {f"{name}{run}": own})[0] for run, own in enumerate(runs)]
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    pairs = compare_sides(sides, all_pairs=True)
    assert [(pair.first.name, pair.other.name) for pair in pairs] == [
        ("weak", "strong"),
        ("weak", "like"),
        ("strong", "like"),
    ]
    assert labels(rank_sides(pairs).rankings[0]) == {"strong": "1-2", "like": "1-2", "weak": "3"}


@pytest.mark.parametrize("names", ["{0}/{1}.json", "{1}={0}/r1/{1}.json,{0}/r2/{1}.json"])
def test_a_task_to_skip_that_no_result_has_is_refused(tmp_path, capsys, names):
    for run, folder in enumerate([tmp_path, tmp_path / "r1", tmp_path / "r2"]):
        write_models(folder, {name: [1] * run + [0] * (20 - run) for name in ("a", "b")})
    arguments = [names.format(tmp_path, name) for name in ("a", "b")]
    assert main.run(["compare", *arguments, "--all-pairs", "--skip", "quizz/0-shot"]) == 2
    assert "--skip quizz/0-shot: no result has that task; they have b/0-shot, quiz/0-shot" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--all-metrics"], ["--overlap", "folder"]])
def test_options_of_a_baseline_are_refused_with_all_pairs(capsys, option):
    assert main.run(["compare", "a.json", "b.json", "--all-pairs", *option]) == 2
    assert "compares with the first result; leave it out with --all-pairs" in capsys.readouterr().err
