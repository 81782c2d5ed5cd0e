"""Categories and averages of a gauntlet, compared by items."""

import math

import numpy as np
import pytest

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_eval import load_gauntlet
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.gauntlet import run_gauntlet
from llmfoundry_lite.evaluation.results import load_results
from llmfoundry_studies.gauntlet import add_gauntlet, add_gauntlet_to_sides
from llmfoundry_studies.seeds import Run, Side, compare_sides
from tests.helpers.results import choice, write_result

GAUNTLET = """
weighting: EQUAL
categories:
- name: knowledge
  benchmarks:
  - {name: arc, num_fewshot: 0, random_baseline: 0.25}
  - {name: piqa, num_fewshot: 0, random_baseline: 0.5}
- name: reading
  benchmarks:
  - {name: boolq, num_fewshot: 0, random_baseline: 0.5}
"""
SIZES = {"arc/0-shot": 80, "piqa/0-shot": 60, "boolq/0-shot": 100}


@pytest.fixture
def gauntlet_file(tmp_path):
    path = tmp_path / "gauntlet.yaml"
    path.write_text(GAUNTLET)
    return str(path)


def answers_of(generator, skill: float) -> dict:
    """Draw right and wrong answers of a model for each task."""
    return {task: (generator.random(size) < skill).astype(int) for task, size in SIZES.items()}


def write_model(folder, name: str, answers: dict, **data: str):
    """Write a model's result, whose tasks have data of their own."""
    return write_result(folder, name, {task: choice(own, data_fingerprint=task) for task, own in answers.items()})


def compare_two(folder, gauntlet_file: str, first: dict, other: dict):
    """Compare two models, with the gauntlet's composites. Returns the comparison and the loaded results."""
    loaded = load_results([write_model(folder, "base", first), write_model(folder, "ours", other)])
    comparisons = compare(loaded)
    add_gauntlet(gauntlet_file, loaded, comparisons, None)
    return comparisons[0], loaded


def test_a_composite_has_the_scores_of_the_gauntlet_and_paired_errors(tmp_path, gauntlet_file):
    generator = np.random.default_rng(0)
    first, other = answers_of(generator, 0.6), answers_of(generator, 0.8)
    pair, loaded = compare_two(tmp_path, gauntlet_file, first, other)

    config, _ = load_gauntlet(gauntlet_file)
    scores = [run_gauntlet(config, results.tasks).scores for results in loaded]
    knowledge, reading, average = pair.composites
    assert [knowledge.task, reading.task, average.task] == [
        "gauntlet: knowledge",
        "gauntlet: reading",
        "gauntlet: default_average",
    ]
    assert (average.first, average.other) == pytest.approx(
        (scores[0]["default_average"].score, scores[1]["default_average"].score)
    )

    # The variance of a sum over independent items, each of which has its weight and the scale of its task.
    gains = [
        (other["arc/0-shot"] - first["arc/0-shot"]) / 80 / 2 / 0.75,
        (other["piqa/0-shot"] - first["piqa/0-shot"]) / 60 / 2 / 0.5,
    ]
    contributions = np.concatenate(gains)
    assert knowledge.difference == pytest.approx(contributions.sum())
    variance = (contributions**2).sum() - contributions.sum() ** 2 / len(contributions)
    assert knowledge.error == pytest.approx(math.sqrt(variance))
    assert knowledge.low < knowledge.difference < knowledge.high


def test_a_category_of_one_task_is_decided_like_the_task(tmp_path, gauntlet_file):
    generator = np.random.default_rng(1)
    pair, _ = compare_two(tmp_path, gauntlet_file, answers_of(generator, 0.6), answers_of(generator, 0.7))
    [boolq] = [task for task in pair.tasks if task.task == "boolq/0-shot"]
    _, reading, _ = pair.composites
    assert reading.p == boolq.p
    assert reading.difference == pytest.approx(2 * boolq.difference)  # rescaled, because guessing is right in 50 %


def test_tasks_on_the_same_data_are_related(tmp_path, gauntlet_file):
    answers = (np.arange(60) % 3 > 0).astype(int)
    gains = (np.arange(60) % 5 == 0).astype(int)
    folder_of = {}
    for data in ("same", "apart"):
        paths = []
        for name, own in (("base", answers), ("ours", np.minimum(answers + gains, 1))):
            tasks = {}
            for task in SIZES:
                tasks[task] = choice(own, data_fingerprint="sha256:d" if data == "same" else task)
            paths.append(write_result(tmp_path / data, name, tasks))
        loaded = load_results(paths)
        [pair] = compare(loaded)
        add_gauntlet(gauntlet_file, loaded, [pair], None)
        folder_of[data] = pair.composites[0]
    assert folder_of["same"].difference == pytest.approx(folder_of["apart"].difference)
    assert folder_of["same"].error > 1.3 * folder_of["apart"].error


def test_the_shown_average_is_corrected_and_named(tmp_path, gauntlet_file, capsys):
    generator = np.random.default_rng(2)
    paths = [
        str(write_model(tmp_path, name, answers_of(generator, skill))) for name, skill in (("base", 0.5), ("ours", 0.9))
    ]
    assert main.run(["compare", *paths, "--gauntlet", gauntlet_file, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "categories and averages of the gauntlet apart, 3 tests" in " ".join(printed.split())
    [line] = [line for line in (tmp_path / "out/compare.md").read_text().splitlines() if "default_average" in line]
    assert "better by" in line


def test_recipes_are_compared_by_the_gauntlet_too(tmp_path, gauntlet_file):
    generator = np.random.default_rng(3)
    sides = []
    for name, skill in (("base", 0.5), ("ours", 0.8)):
        paths = [
            write_model(tmp_path / f"{name}{run}", f"{name}{run}", answers_of(generator, skill)) for run in range(3)
        ]
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    pairs = compare_sides(sides)
    add_gauntlet_to_sides(gauntlet_file, pairs)
    *_, reading, average = pairs[0].rows
    [boolq] = [row for row in pairs[0].rows if row.task == "boolq/0-shot"]
    assert reading.p == pytest.approx(boolq.p)
    assert reading.estimate.error == pytest.approx(2 * boolq.estimate.error)  # rescaled, as guessing is right in 50 %

    config, _ = load_gauntlet(gauntlet_file)
    scores = [run_gauntlet(config, run.checkpoints[0].tasks).scores["default_average"].score for run in sides[1].runs]
    assert average.task == "gauntlet: default_average"
    assert average.runs[1] == pytest.approx(scores)
    assert average.estimate.difference == pytest.approx(average.other - average.first)
    assert average.other_spread == pytest.approx(np.std(scores, ddof=1))
    assert average.verdict.startswith("better by")


def test_with_bits_per_byte_the_gauntlet_of_recipes_has_accuracies_that_compare(tmp_path, gauntlet_file):
    """Tokenizers differ, so that accuracy per character takes the place of that per token."""
    generator = np.random.default_rng(4)
    sides = []
    for name in ("base", "ours"):
        paths = []
        for run in range(3):
            per_token, per_character = generator.integers(0, 2, (2, 100)).tolist()
            record, items = choice(per_token, per_character=per_character)
            bits = generator.lognormal(0, 1, 100).tolist()
            items = [item | {"bpb": value} for item, value in zip(items, bits, strict=True)]
            task = (record | {"bpb": float(np.mean(bits)), "bpb_stderr": 0.1}, items)
            folder = tmp_path / f"{name}{run}"
            paths.append(write_result(folder, f"{name}{run}", {"boolq/0-shot": task}, tokenizer=f"sha256:{name}"))
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))

    [pair] = compare_sides(sides, "bpb")
    add_gauntlet_to_sides(gauntlet_file, [pair], "bpb")
    task, reading, _ = pair.rows
    assert (task.metric, reading.task) == ("bpb", "gauntlet: reading")
    for runs, side in zip(reading.runs, sides, strict=True):
        accuracies = [run.checkpoints[0].tasks["boolq/0-shot"]["acc_norm"] for run in side.runs]
        assert runs == pytest.approx([(accuracy - 0.5) / 0.5 for accuracy in accuracies])
    assert any(note.startswith("warning: the models have different tokenizers") for note in pair.notes_on_metrics)


def test_notes_on_several_recipes_are_not_repeated(tmp_path, gauntlet_file):
    generator = np.random.default_rng(5)
    sides = []
    for name in ("a", "b", "c"):
        paths = []
        for run in range(2):
            tasks = {"boolq/0-shot": choice(generator.integers(0, 2, 50))}
            paths.append(write_result(tmp_path / f"{name}{run}", f"{name}{run}", tasks))
        sides.append(Side(name, [Run([results]) for results in load_results(paths)]))
    pairs = compare_sides(sides)
    add_gauntlet_to_sides(gauntlet_file, pairs)
    assert [len(pair.notes_on_metrics) for pair in pairs] == [1, 1]


def test_a_category_that_lacks_a_task_is_left_out_with_a_note(tmp_path, gauntlet_file):
    loaded = []
    for name in ("base", "ours"):
        loaded.append(write_result(tmp_path, name, {"boolq/0-shot": choice([1, 0] * 10), "x/0-shot": choice([1] * 9)}))
    loaded = load_results(loaded)
    [pair] = compare(loaded)
    add_gauntlet(gauntlet_file, loaded, [pair], None)
    assert [row.task for row in pair.composites] == ["gauntlet: reading", "gauntlet: default_average"]
    assert "gauntlet: knowledge is left out: no accuracy of arc/0-shot, piqa/0-shot" in pair.notes


def test_a_gauntlet_without_any_task_is_refused(tmp_path, gauntlet_file):
    loaded = load_results([write_result(tmp_path, name, {"x/0-shot": choice([1] * 9)}) for name in ("base", "ours")])
    with pytest.raises(DataError, match=r"--gauntlet .*gauntlet.yaml: no category has all of its tasks"):
        add_gauntlet(gauntlet_file, loaded, compare(loaded), None)


def test_a_gauntlet_may_be_named_by_the_yaml_of_an_evaluation(tmp_path, gauntlet_file):
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"icl_tasks: [arc]\neval_gauntlet: {gauntlet_file}\n")
    config, _ = load_gauntlet(str(suite))
    assert [category.name for category in config.categories] == ["knowledge", "reading"]


def test_a_file_that_is_no_gauntlet_is_named(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("optimizer: {lr: 1}\n")
    with pytest.raises(ConfigError, match=r"other.yaml: no gauntlet; expected a YAML with `categories`, or"):
        load_gauntlet(str(path))
