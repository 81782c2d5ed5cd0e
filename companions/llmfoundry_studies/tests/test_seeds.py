"""Recipes that were trained several times."""

import json
import math

import numpy as np
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_studies.recipes import notes_on_sides, read_sides
from llmfoundry_studies.seeds import Run, Side, SideComparison, compare_sides, difference_of_sides
from tests.helpers.results import choice, text, write_result

TASK = "quiz/0-shot"


def answers_of_runs(generator, num_runs: int, num_items: int, *, skill: float, spread: float, difficulty) -> np.ndarray:
    """Return right (1) and wrong (0) answers [runs, items]. `spread` is the standard deviation of a run's skill."""
    skill_of_run = skill + generator.normal(0, spread, (num_runs, 1))
    return (difficulty + skill_of_run + generator.normal(0, 0.7, (num_runs, num_items)) > 0).astype(int)


def side_of(folder, name: str, answers_ri, task=TASK) -> Side:
    """Write a result for each run, and load them as a side."""
    paths = [
        write_result(folder / f"{name}-{number}", f"{name}{number}", {task: choice(answers)})
        for number, answers in enumerate(answers_ri)
    ]
    return Side(name, [Run([results]) for results in load_results(paths)])


def compare_two(first: Side, other: Side) -> SideComparison:
    """Compare two sides that have a single task."""
    [pair] = compare_sides([first, other])
    [row] = pair.rows
    return row


def test_the_error_is_that_of_runs_and_items_together(tmp_path):
    generator = np.random.default_rng(0)
    difficulty = generator.normal(0, 1.5, 40)
    first = answers_of_runs(generator, 3, 40, skill=0.0, spread=0.2, difficulty=difficulty)
    other = answers_of_runs(generator, 4, 40, skill=0.5, spread=0.2, difficulty=difficulty)
    found = compare_two(side_of(tmp_path, "a", first), side_of(tmp_path, "b", other))

    gains = other.mean(axis=0) - first.mean(axis=0)
    variance = first.mean(axis=1).var(ddof=1) / 3 + other.mean(axis=1).var(ddof=1) / 4 + gains.var(ddof=1) / 40
    assert found.first == pytest.approx(first.mean())
    assert found.estimate.difference == pytest.approx(gains.mean())
    assert found.estimate.error == pytest.approx(math.sqrt(variance))
    assert found.first_spread == pytest.approx(first.mean(axis=1).std(ddof=1))


def test_a_difference_between_seeds_is_not_one_between_recipes(tmp_path):
    # Every run of a side has the same answers but one, which is far better: two models differ, the recipes need not.
    weak_runs = [[1] * 30 + [0] * 70, [1] * 29 + [0] * 71, [1] * 31 + [0] * 69]
    strong = [1] * 90 + [0] * 10
    found = compare_two(side_of(tmp_path, "a", weak_runs), side_of(tmp_path, "b", [*weak_runs[:2], strong]))
    assert found.verdict == "no detectable difference"
    assert found.low < 0 < found.high


def test_a_difference_beyond_seeds_and_items_is_found(tmp_path):
    weak = [[1] * 30 + [0] * 70, [1] * 31 + [0] * 69, [0] + [1] * 30 + [0] * 69]
    strong = [[1] * 70 + [0] * 30, [1] * 71 + [0] * 29, [1] * 69 + [0] * 31]
    found = compare_two(side_of(tmp_path, "a", weak), side_of(tmp_path, "b", strong))
    assert found.verdict.startswith("better by")
    assert found.low > 0


def test_equal_recipes_are_called_different_at_most_as_often_as_the_level_says():
    generator = np.random.default_rng(4)
    num_draws, num_detected = 400, 0
    for _ in range(num_draws):
        difficulty = generator.normal(0, 1.5, 200)
        own_a, own_b = generator.normal(0, 0.5, (2, 200))
        first = answers_of_runs(generator, 3, 200, skill=0.0, spread=0.2, difficulty=difficulty + own_a) / 200
        other = answers_of_runs(generator, 3, 200, skill=0.0, spread=0.2, difficulty=difficulty + own_b) / 200
        num_detected += difference_of_sides(np.full(200, 1 / 200), first, other).p < 0.05
    assert num_detected / num_draws < 0.075  # 0.05 and two and a half standard errors


def test_bits_per_byte_count_documents_by_their_bytes(tmp_path):
    generator = np.random.default_rng(1)
    sizes = generator.integers(50, 500, 60)

    def documents(shift: float) -> list[list[tuple[float, int]]]:
        nats = sizes * (0.7 + shift + generator.normal(0, 0.05, 60))
        return [[(float(one), int(size))] for one, size in zip(nats, sizes, strict=True)]

    sides = []
    for name, shift in (("a", 0.0), ("b", -0.1)):
        tasks = [{"text/0-shot": text(documents(shift))} for _ in range(3)]
        paths = [write_result(tmp_path / f"{name}{i}", f"{name}{i}", task) for i, task in enumerate(tasks)]
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    found = compare_two(*sides)
    expected = [run.checkpoints[0].tasks["text/0-shot"]["bits_per_byte"] for run in sides[0].runs]
    assert found.runs[0] == pytest.approx(expected)
    assert found.verdict.startswith("better by")
    assert found.estimate.tail_correction == pytest.approx(1 + significance.CAUTION / found.estimate.num_effective)


def test_checkpoints_of_one_run_are_averaged_and_are_not_runs(tmp_path):
    results = [run.checkpoints[0] for run in side_of(tmp_path, "a", [[1, 0] * 20, [1, 1] * 20, [0, 0] * 20]).runs]
    smoothed = Side("a", [Run(results[:2]), Run(results[2:])])
    found = compare_two(smoothed, smoothed)
    assert found.runs[0] == pytest.approx([0.75, 0.0])


def test_p_values_are_corrected_for_the_tests_of_all_recipes(tmp_path):
    generator = np.random.default_rng(7)
    sides = [side_of(tmp_path, name, generator.integers(0, 2, (2, 40))) for name in ("a", "b", "c")]
    rows = [row for pair in compare_sides(sides) for row in pair.rows]
    corrected, _ = significance.holm([row.p for row in rows])
    assert [row.p_corrected for row in rows] == corrected
    assert rows[0].p_corrected > rows[0].p


def test_one_run_says_nothing_about_seeds(tmp_path):
    side = side_of(tmp_path, "a", [[1, 0] * 20])
    with pytest.raises(DataError, match="a: 1 run given, expected at least 2, since one run does not show"):
        compare_sides([side, side])


def test_the_command_compares_recipes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weak = [[1] * 30 + [0] * 70, [1] * 31 + [0] * 69, [0] + [1] * 30 + [0] * 69]
    strong = [[1] * 70 + [0] * 30, [1] * 71 + [0] * 29, [1] * 69 + [0] * 31]
    sides = []
    for name, runs in (("base", weak), ("ours", strong)):
        paths = [
            write_result(tmp_path / f"{name}-{i}", f"{name}{i}", {TASK: choice(answers), "b/0-shot": choice(answers)})
            for i, answers in enumerate(runs)
        ]
        sides.append(f"{name}={','.join(map(str, paths))}")
    assert main.run(["compare", *sides, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "better by 0.397" in printed
    assert "3 runs a side" in printed
    record = json.loads((tmp_path / "out/compare.json").read_text())
    assert record["results"]["base"] == ["base-0/base0.json", "base-1/base1.json", "base-2/base2.json"]
    [pair] = record["comparisons"]
    assert [row["task"] for row in pair["rows"]] == [TASK, "b/0-shot", "mean of 2 tasks"]
    assert "| quiz/0-shot |" in (tmp_path / "out/compare.md").read_text()


def test_runs_and_checkpoints_are_read_from_an_argument(tmp_path):
    paths = [write_result(tmp_path / str(i), f"m{i}", {TASK: choice([1, 0] * 10)}) for i in range(3)]
    [side] = read_sides([f"ours={paths[0]}+{paths[1]},{paths[2]}"])
    assert [len(run.checkpoints) for run in side.runs] == [2, 1]


@pytest.mark.parametrize(("num_runs", "num_tasks", "warns"), [(3, 10, True), (3, 9, False), (5, 10, False)])
def test_few_runs_with_many_tests_are_warned_about(tmp_path, num_runs, num_tasks, warns):
    sides = []
    for name in ("a", "b"):
        paths = []
        for run in range(num_runs):
            answers = [1] * (10 + run) + [0] * (10 - run)
            tasks = {f"t{number}/0-shot": choice(answers, data_fingerprint=str(number)) for number in range(num_tasks)}
            paths.append(write_result(tmp_path / f"{name}{run}", f"{name}{run}", tasks))
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    [pair] = compare_sides(sides)
    warnings = [note for note in notes_on_sides(pair) if "with 10 tests or more" in note]
    assert bool(warnings) == warns


def test_the_last_checkpoints_of_a_run_are_named_by_their_number(tmp_path):
    for batch in (90, 100, 200, 1000):
        write_result(tmp_path, f"ours-ba{batch}", {TASK: choice([1, 0] * 10)})
    [side] = read_sides([f"ours={tmp_path}/ours@last3"])
    [run] = side.runs
    assert [results.model for results in run.checkpoints] == ["ours-ba100", "ours-ba200", "ours-ba1000"]

    with pytest.raises(DataError, match="ours@last5: there are results of 4 checkpoints"):
        read_sides([f"ours={tmp_path}/ours@last5"])


@pytest.mark.parametrize("sign", [",", "+"])
def test_a_path_with_a_separator_is_refused_by_name(tmp_path, sign):
    path = write_result(tmp_path / f"lr{sign}wd", "m", {TASK: choice([1, 0] * 10)})
    with pytest.raises(DataError, match=r"ours: .*/lr does not exist; runs are separated by commas, and checkpoints"):
        read_sides([f"ours={path}"])


@pytest.mark.parametrize("arguments", [["a=x.json,y.json", "z.json"], ["a=x.json,y.json"]])
def test_sides_and_single_results_are_not_mixed(tmp_path, capsys, arguments):
    assert main.run(["compare", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_units_of_which_one_has_most_of_the_weight_claim_nothing(tmp_path):
    # Of 100 items, 95 are one cluster, which the sides answer differently.
    clusters = ["big"] * 95 + [f"small {number}" for number in range(5)]
    sides = []
    for name, answer in (("a", 0), ("b", 1)):
        paths = []
        for run in range(3):
            small_answers = [0, 0, 0, 0, 0]
            small_answers[run] = 1
            record, items = choice([answer] * 95 + small_answers)
            items = [{**item, "cluster": cluster} for item, cluster in zip(items, clusters, strict=True)]
            paths.append(write_result(tmp_path / f"{name}{run}", f"{name}{run}", {TASK: (record, items)}))
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    found = compare_two(*sides)
    assert found.num_units == 6
    assert found.verdict == "too few items"
    assert (found.low, found.high) == (None, None)


def test_recipes_with_too_few_documents_have_neither_p_nor_rank(tmp_path, capsys):
    """p was 1.00 in every form, JSON and CSV had an interval, and all ranks were 1-3, without a note."""
    arguments = []
    for number, name in enumerate(("base", "low", "wide")):
        runs = []
        for run in range(2):
            document_bits = [[(8.0 + number + run / 10 + document % 3, 10)] for document in range(32)]
            runs.append(write_result(tmp_path / name, f"{name}{run}", {"text/0-shot": text(document_bits)}))
        arguments.append(f"{name}={','.join(map(str, runs))}")
    note = "text/0-shot: 32 documents: no interval and no verdict below 50"

    assert main.run(["compare", *arguments, "--out", str(tmp_path / "first")]) == 0
    printed = capsys.readouterr().out
    assert "too few documents" in printed and "1.00" not in printed and note in printed
    row = json.loads((tmp_path / "first/compare.json").read_text())["comparisons"][0]["rows"][0]
    assert [row[key] for key in ("p", "p_corrected", "low", "high", "finds")] == [None] * 5
    assert "1.00" not in (tmp_path / "first/compare.tex").read_text()
    assert ",nan," not in (tmp_path / "first/compare.csv").read_text()

    assert main.run(["compare", *arguments, "--all-pairs", "--out", str(tmp_path / "ranks")]) == 0
    printed = capsys.readouterr().out
    assert "1-3" not in printed and "- (1.3" in printed
    assert note in printed and "text/0-shot: no ranks, too few documents" in printed
    record = json.loads((tmp_path / "ranks/compare.json").read_text())
    assert {one["best"] for one in record["rankings"][0]["ranks"]} == {None}
    assert "1.00" not in (tmp_path / "ranks/compare.tex").read_text()


def test_clusters_that_one_task_names_hold_for_all_tasks_on_the_same_data(tmp_path):
    generator = np.random.default_rng(6)
    sides = []
    for name in ("a", "b"):
        paths = []
        for run in range(2):
            record, items = choice(generator.integers(0, 2, 60))
            clustered = [{**item, "cluster": str(item["index"] // 10)} for item in items]
            tasks = {"quiz/0-shot": (record, items), "by_passage/0-shot": (record, clustered)}
            paths.append(write_result(tmp_path / f"{name}{run}", f"{name}{run}", tasks))
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    [pair] = compare_sides(sides)
    assert {row.task: row.num_units for row in pair.rows} == {
        "quiz/0-shot": 60,
        "by_passage/0-shot": 6,
        "mean of 2 tasks": 6,
    }


def test_copies_of_one_run_are_refused(tmp_path):
    side = side_of(tmp_path, "a", [[1, 0] * 20, [1, 0] * 20])
    with pytest.raises(DataError, match="has the same answers as another of its runs"):
        compare_sides([side, side])


def test_equal_scores_are_no_difference_of_rounding(tmp_path):
    answers = [[1] * 8, [1] * 7 + [0]]
    first = side_of(tmp_path / "a", "a", answers)
    other = side_of(tmp_path / "b", "b", answers)
    assert compare_two(first, other).verdict == "no detectable difference"


@pytest.mark.parametrize("option", [["--all-metrics"], ["--cluster", "x"], ["--overlap", "folder"]])
def test_options_of_single_results_are_refused_for_recipes(capsys, option):
    assert main.run(["compare", "a=x.json,y.json", "b=z.json,w.json", *option]) == 2
    assert "is for results of single models" in capsys.readouterr().err
