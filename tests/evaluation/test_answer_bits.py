"""Bits per byte of right answers: what is counted, and how tables and comparisons use it."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from llmfoundry_lite.config.eval_schema import Benchmark, Category, GauntletConfig, TaskConfig
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import harness
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.harness import DataRank, TaskRunner, run_task
from llmfoundry_lite.evaluation.means import mean_and_error
from llmfoundry_lite.evaluation.metrics import by_metrics, describe_choice
from llmfoundry_lite.evaluation.models import TreeModel
from llmfoundry_lite.evaluation.pairs import panels
from llmfoundry_lite.evaluation.results import Results, load_results
from llmfoundry_lite.evaluation.scoring import Score
from llmfoundry_lite.evaluation.tables import gauntlet_table, print_results, results_table
from llmfoundry_lite.evaluation.tasks import prepare_task
from tests.helpers.models import normal_model
from tests.helpers.pieces import Pieces
from tests.helpers.results import choice, write_result

LN2 = math.log(2)
TINY = ModelConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=384)
PIECES: Any = Pieces()
ROWS: dict[str, list[dict[str, Any]]] = {
    "multiple_choice": [{"query": "Drink?", "choices": ["tea", "café au lait"], "gold": 1}],
    "schema": [{"context_options": ["Ann saw Bob, so Ann", "Ann saw Bob, so Bob"], "continuation": "hid.", "gold": 0}],
    "language_modeling": [{"context": "One two", "continuation": "three"}],
    "generation_task_with_answers": [{"context": "2 + 2?", "answer": "four", "aliases": ["4"]}],
}
NUM_BYTES = {
    "multiple_choice": [4, 14],  # " tea" and " café au lait", whose é has two bytes
    "schema": [5, 5],
    "language_modeling": [6],
    "generation_task_with_answers": [5],
}


def prepare(kind, rows=None, tokenizer=PIECES, tokenization="separate", num_fewshot=0, **changes):
    config = TaskConfig(**{"label": "t", "icl_task_type": kind, "dataset_uri": "t.jsonl", **changes})
    rows = rows or ROWS[kind]
    return prepare_task(config, rows, num_fewshot, tokenizer, max_seq_len=60, tokenization=tokenization)


def run(task, monkeypatch, nats=()):
    """Run a task with log-probabilities of our choice, one for each request. Returns the record and the items."""
    given = iter(nats)

    def score_all(model, name, groups, *rest):
        return [Score(-next(given), True) for group in groups for _ in group]

    monkeypatch.setattr(harness, "score_all", score_all)

    def generate_answers(model, tokenizer, name, prompts, *rest):
        return ["4"] * len(prompts)

    monkeypatch.setattr(harness, "generate_answers", generate_answers)
    no_model: Any = None
    return run_task(TaskRunner(no_model, PIECES, 100, DataRank(0, 1), lambda *_: None), task)


# ------------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("tokenization", ["separate", "joint"])
def test_bytes_are_those_of_the_answer_with_the_space_before_it(kind, tokenization):
    [item] = prepare(kind, tokenization=tokenization).items
    requests = item.requests if item.gold_request is None else [item.gold_request]
    assert [request.num_bytes for request in requests] == NUM_BYTES[kind]


class Characters(Pieces):
    """A tokenizer for which ` a` is two tokens, so that no space is put before answers."""

    pattern = r"(?s)."


def test_a_tokenizer_that_adds_the_space_itself_divides_by_the_same_bytes():
    [item] = prepare("multiple_choice", tokenizer=Characters()).items
    assert [request.num_bytes for request in item.requests] == NUM_BYTES["multiple_choice"]
    assert len(item.requests[0].continuation) == len("tea")


def test_joint_tokens_take_the_white_space_of_the_delimiter():
    requests = prepare("multiple_choice", tokenization="joint", continuation_delimiter="\n\n").items[0].requests
    assert [request.num_bytes for request in requests] == [5, 15]
    requests = prepare("multiple_choice", tokenization="joint", continuation_delimiter="\nA:").items[0].requests
    assert [request.num_bytes for request in requests] == [3, 13]


# ----------------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("kind", "nats", "bits_per_byte"),
    [
        ("multiple_choice", [1, 14 * LN2], 1.0),
        ("schema", [10 * LN2, 1], 2.0),
        ("language_modeling", [3 * LN2], 0.5),
        ("generation_task_with_answers", [5 * LN2], 1.0),
    ],
)
def test_bits_per_byte_are_of_the_right_answer(kind, nats, bits_per_byte, monkeypatch):
    record, [item] = run(prepare(kind), monkeypatch, nats)
    assert item["bpb"] == pytest.approx(bits_per_byte)
    assert record["bpb"] == pytest.approx(bits_per_byte)
    assert item["num_bytes"] == NUM_BYTES[kind]


def test_the_option_with_most_probability_per_byte_is_chosen(monkeypatch):
    """Two options of 4 and 14 bytes and as many characters plus one."""
    record, [item] = run(prepare("multiple_choice"), monkeypatch, [4.0, 13.0])
    assert item["chosen"] == {"acc_per_token": 0, "acc": 0, "acc_norm": 1, "acc_per_byte": 1}
    assert (record["acc_per_byte"], record["acc"]) == (1.0, 0.0)


def test_the_score_is_the_mean_over_items_with_clusters_as_units(monkeypatch):
    words = ["a", "bb", "ccc", "dddd"]
    rows = [{"context": str(i), "continuation": word, "passage": i // 2} for i, word in enumerate(words)]
    record, items = run(prepare("language_modeling", rows, cluster="passage"), monkeypatch, [1.0, 2.0, 5.0, 9.0])
    expected = [1 / LN2 / 2, 2 / LN2 / 3, 5 / LN2 / 4, 9 / LN2 / 5]
    assert [item["bpb"] for item in items] == pytest.approx(expected)
    assert record["bpb"] == pytest.approx(np.mean(expected))
    assert (record["bpb"], record["bpb_stderr"]) == mean_and_error(items, "bpb")
    sums = np.array(expected).reshape(2, 2).sum(axis=1) - 2 * np.mean(expected)
    assert record["bpb_stderr"] == pytest.approx(math.sqrt(2 * (sums**2).sum()) / 4)


def test_bits_per_byte_may_be_the_metric_of_a_task_with_categories(monkeypatch):
    rows = [{**ROWS["multiple_choice"][0], "query": f"Drink {i}?", "category": "ab"[i > 0]} for i in range(3)]
    task = prepare("multiple_choice", rows, metric="bpb", has_categories=True)
    record, _ = run(task, monkeypatch, [1, 14 * LN2, 1, 28 * LN2, 1, 56 * LN2])
    assert record["metric"] == "bpb"
    assert record["categories"] == pytest.approx({"a": 1.0, "b": 3.0})
    assert record["bpb"] == pytest.approx(2.0), "both categories count the same"
    assert "num_ties" not in record


def test_an_answer_longer_than_the_model_has_no_bits_and_is_counted(monkeypatch):
    rows = [*ROWS["generation_task_with_answers"], {"context": "Count.", "answer": "one two " * 40, "aliases": ["4"]}]
    task = prepare("generation_task_with_answers", rows, max_new_tokens=3)
    record, items = run(task, monkeypatch, [5 * LN2])
    assert ["bpb" in item for item in items] == [True, False]
    assert (record["n"], record["acc"], record["num_without_bpb"]) == (2, 1.0, 1)
    assert record["bpb"] == pytest.approx(1.0)


def test_a_task_whose_answers_have_no_bits_at_all_is_shown_by_its_accuracy(monkeypatch):
    rows = [{"context": "Count.", "answer": "one two " * 40, "aliases": ["4"]}]
    record, _ = run(prepare("generation_task_with_answers", rows, metric="bpb", max_new_tokens=3), monkeypatch)
    assert (record["metric"], record["num_without_bpb"]) == ("acc", 1)
    assert Results(model="m", suite="s", source="", tasks={"t/0-shot": record}).average == 1.0


def test_a_generated_answer_is_scored_as_a_continuation_is(tokenizer_folder):
    """The same texts as a task of language modelling have the same log-probabilities."""
    tokenizer = load_tokenizer(tokenizer_folder)
    questions = [("the cat", "sat on a mat"), ("a mat", "sat"), ("on the mat", "the cat sat")]
    rows = {
        "generation_task_with_answers": [{"context": text, "answer": answer} for text, answer in questions],
        "language_modeling": [{"context": text, "continuation": answer} for text, answer in questions],
    }
    model = TreeModel(normal_model(TINY, 1, 0.2), torch.device("cpu"))
    runner = TaskRunner(model, tokenizer, 100, DataRank(0, 1), lambda *_: None)
    bits: list[list[float]] = []
    for kind, rows_of_kind in rows.items():
        _, items = run_task(runner, prepare(kind, rows_of_kind, tokenizer, num_fewshot=1))
        bits.append([item["bpb"] for item in items])
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
    assert min(bits[0]) > 0.1


# ---------------------------------------------------------------------------------------------- tables and gauntlets


def in_bits(values, answers=None, **changes):
    """Return a multiple-choice task, as `choice` does, whose items have these bits per byte as well."""
    record, items = choice(answers or [1, 0] * (len(values) // 2), **changes)
    for item, value in zip(items, values, strict=True):
        item["bpb"] = float(value)
    record["bpb"], record["bpb_stderr"] = mean_and_error(items, "bpb")
    return record, items


def load(tmp_path: Path, **models: dict[str, Any]) -> list[Results]:
    """Return results of models, each given as task -> (record, items)."""
    return load_results([write_result(tmp_path, model, tasks) for model, tasks in models.items()])


def drawn(shift=0.0, num_items=100, seed=3):
    """Return bits per byte of a model, which differ from those of `shift=0` by about the shift."""
    generator = np.random.default_rng(seed)
    difficulty = generator.lognormal(0, 0.5, num_items)
    noise = np.random.default_rng(int(abs(shift) * 1000)).normal(0, 0.05, num_items)
    return np.maximum(difficulty + shift + noise, 0).tolist()


def test_the_table_and_its_average_are_in_bits_per_byte(tmp_path):
    tasks = {"a/0-shot": in_bits([1.0, 2.0]), "b/0-shot": in_bits([3.0, 4.0])}
    table = results_table(load(tmp_path, base=tasks), "bpb")
    assert table.title == "s, bits per byte ± standard error"
    assert [*table.columns.values()] == ["a\n0-shot\nbpb", "b\n0-shot\nbpb", "average"]
    assert [cell.number for cell in table.rows[0].cells] == pytest.approx([1.5, 3.5, 2.5])
    assert table.rows[0].cells[0].error == pytest.approx(0.5)
    assert table.notes == []


def test_an_average_is_of_accuracies_where_any_task_shows_one(tmp_path):
    tasks = {"a/0-shot": in_bits([1.0, 2.0]), "b/0-shot": choice([1, 1, 0, 1])}
    table = results_table(load(tmp_path, base=tasks), "bpb")
    assert table.rows[0].cells[-1].number == 0.75
    assert table.notes == ["the average is of the accuracies"]


def test_averages_of_accuracies_and_of_bits_are_not_in_one_column(tmp_path):
    results = load(
        tmp_path,
        base={"a/0-shot": in_bits([1.0, 2.0]), "b/0-shot": choice([1, 1, 0, 1])},
        ours={"a/0-shot": in_bits([1.5, 2.0])},
    )
    for ordered in (results, results[::-1]):
        table = results_table(ordered, "bpb")
        averages = {row.model: row.cells[-1].number for row in table.rows}
        assert averages == {"base": 0.75, "ours": None}
        assert table.title == "s, accuracy ± standard error"


def test_bits_per_byte_have_no_chance_below_them(tmp_path):
    tasks = {"a/0-shot": in_bits([1.0, 2.0]), "b/0-shot": choice([1, 1, 0, 1])}
    results = load(tmp_path, base=tasks)
    chances: list[list[str]] = []
    for metric in ("bpb", None):
        output = io.StringIO()
        print_results(results, Console(width=80, file=output), metric)
        [line] = [line for line in output.getvalue().splitlines() if line.startswith("chance")]
        chances.append(line.split()[1:])
    assert chances == [["0.250"], ["0.250", "0.250"]]


def test_a_gauntlet_stays_with_accuracies_and_says_so(tmp_path):
    benchmarks = [Benchmark(name="a", num_fewshot=0, random_baseline=0.25)]
    gauntlet = GauntletConfig(categories=[Category(name="all", benchmarks=benchmarks)])
    results = load(tmp_path, base={"a/0-shot": in_bits([1.0, 2.0])})
    table = gauntlet_table(gauntlet, results, "bpb")
    assert table.rows[0].cells[0].number == pytest.approx((0.5 - 0.25) / 0.75)
    assert table.notes == ["eval gauntlet: bpb is no accuracy, so it has each task's own metric"]


# ---------------------------------------------------------------------------------------------------------- compare


def test_fewer_bits_per_byte_are_better(tmp_path):
    base, ours, worse = load(
        tmp_path,
        base={"a/0-shot": in_bits(drawn())},
        ours={"a/0-shot": in_bits(drawn(-0.1))},
        worse={"a/0-shot": in_bits(drawn(0.1))},
    )
    [better_pair, worse_pair] = compare([base, ours, worse], metric="bpb")
    [task] = better_pair.tasks
    assert task.verdict.startswith("better by 0.1")
    assert (task.metric, task.n, task.test) == ("bpb", 100, "studentised bootstrap")
    assert task.low is not None and task.high is not None
    assert task.low < task.difference < task.high < 0
    assert task.wins > 80
    assert task.difference == pytest.approx(ours.tasks["a/0-shot"]["bpb"] - base.tasks["a/0-shot"]["bpb"])
    assert worse_pair.tasks[0].verdict.startswith("worse by 0.09")


def test_the_mean_over_tasks_is_in_bits_per_byte(tmp_path):
    tasks = {"a/0-shot": 100, "b/0-shot": 40}
    models: dict[str, Any] = {}
    for model, shift in (("base", 0.0), ("ours", -0.1)):
        models[model] = {
            task: in_bits(drawn(shift, num_items), data_fingerprint=task) for task, num_items in tasks.items()
        }
    base, ours = load(tmp_path, **models)
    [pair] = compare([base, ours], metric="bpb")
    assert pair.mean is not None
    assert (pair.mean.metric, pair.mean.task, pair.mean.n) == ("bpb", "mean of 2 tasks", 140)
    expected = [(ours.tasks[task]["bpb"] - base.tasks[task]["bpb"]) / 2 for task in tasks]
    assert pair.mean.difference == pytest.approx(sum(expected))
    assert pair.sentence.startswith("ours is better than base by 0.0994 [")
    assert [*panels([pair])] == ["difference in bits per byte (left is better)"]


def test_clusters_are_drawn_as_wholes(tmp_path):
    """100 items in 10 clusters are too few units for a verdict, in 25 clusters they are enough."""
    for num_clusters, has_interval in ((10, False), (25, True)):
        models: dict[str, Any] = {}
        for name, shift in (("base", 0.0), ("ours", -0.1)):
            record, items = in_bits(drawn(shift))
            items = [{**item, "cluster": str(i % num_clusters)} for i, item in enumerate(items)]
            models[name] = {"a/0-shot": (record | {"num_clusters": num_clusters}, items)}
        [pair] = compare(load(tmp_path / str(num_clusters), **models), metric="bpb")
        assert (pair.tasks[0].low is not None) == has_interval
        if not has_interval:
            assert "a/0-shot: 10 clusters: no interval and no verdict below 20" in pair.notes


def test_an_item_without_bits_in_one_result_is_left_out(tmp_path):
    models: dict[str, Any] = {"base": in_bits(drawn()), "ours": in_bits(drawn(-0.1))}
    del models["ours"][1][0]["bpb"]
    [pair] = compare(load(tmp_path, **{name: {"a/0-shot": task} for name, task in models.items()}), metric="bpb")
    assert pair.tasks[0].n == 99
    assert "a/0-shot: 1 items that only one could be asked are left out" in pair.notes


def test_results_without_bits_per_byte_are_compared_by_their_own_metric(tmp_path):
    """They are of an older release."""
    base, ours = load(tmp_path, base={"a/0-shot": choice([1, 0] * 50)}, ours={"a/0-shot": in_bits(drawn())})
    [pair] = compare([base, ours], metric="bpb")
    assert pair.tasks[0].metric == "acc_per_token"
    [warning] = [note for note in pair.notes if note.startswith("warning")]
    assert warning == ("warning: base has no bpb of a/0-shot, which another metric shows; redo=true evaluates it again")
    assert warning in results_table([base, ours], "bpb").notes
    with pytest.raises(DataError, match="metric: no task has 'bpb'"):
        compare([base, replace(base, name="again")], metric="bpb")


def test_a_log_of_another_tool_without_the_metric_is_not_to_be_evaluated_again(tmp_path):
    base, ours = load(tmp_path, base={"a/0-shot": choice([1, 0])}, ours={"a/0-shot": in_bits([1.0, 2.0])})
    log = replace(base, tasks={"a/0-shot": base.tasks["a/0-shot"] | {"metrics": ["acc_norm"]}})
    [warning] = describe_choice([log, ours], {"a/0-shot": "acc_per_token"}, "bpb")
    assert warning == "warning: base has no bpb of a/0-shot, which another metric shows"


def test_counts_about_the_former_metric_are_not_shown_with_another(tmp_path):
    task = choice([1, 0], num_ties=1, categories={"x": 0.5})
    [shown] = by_metrics(load(tmp_path, base={"a/0-shot": task}), {"a/0-shot": "acc_norm"})
    assert shown.tasks["a/0-shot"]["metric"] == "acc_norm"
    assert not {"num_ties", "categories"} & shown.tasks["a/0-shot"].keys()


def test_models_of_different_tokenizers_are_compared_by_bytes_without_a_warning(tmp_path):
    base, ours = load(tmp_path, base={"a/0-shot": in_bits(drawn())}, ours={"a/0-shot": in_bits(drawn(-0.1))})
    [pair] = compare([base, replace(ours, tokenizer="sha256:2")], metric="bpb")
    assert pair.tasks[0].is_detected
    assert not [note for note in pair.notes if note.startswith("warning")]
