"""Two results, item by item: the numbers, the words, and which results are not compared at all."""

import contextlib
import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from llmfoundry_lite.cli import main
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.data.spelling import KINDS
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import significance
from llmfoundry_lite.evaluation.compare import compare, compare_files
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.means import mean_and_error
from llmfoundry_lite.evaluation.models import TreeModel
from llmfoundry_lite.evaluation.pairs import MetricComparison, legend, panels, write_comparison
from llmfoundry_lite.evaluation.result_files import ResultFiles
from llmfoundry_lite.evaluation.results import Results, load_any, load_results, read_others, read_results
from llmfoundry_lite.evaluation.tables import results_table
from tests.helpers.interrupted import call_again_after_each_write
from tests.helpers.models import normal_model
from tests.helpers.present import leave_out_companions
from tests.helpers.results import choice, text, write_result

CPU, TINY = torch.device("cpu"), ModelConfig(d_model=16, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=384)
TEN = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]


def result_of(folder, first, other, **options):
    a, b = (write_result(folder, name, tasks) for name, tasks in (("base", first), ("ours", other)))
    (pair,) = compare(load_results([a, b]), **options)
    return pair


def on(data, answers, **changes):
    return choice(answers, data_fingerprint=f"sha256:{data}", **changes)


def settings(**changes):
    return {"icl_task_type": "multiple_choice", "prompt_string": "", "limit": None, **changes}


def test_a_task_by_hand(tmp_path):
    other = [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]  # 3 won, 1 lost
    (task,) = result_of(tmp_path, {"t/0-shot": TEN}, {"t/0-shot": other}).tasks
    assert (task.n, task.wins, task.losses, task.ties) == (10, 3, 1, 6)
    assert (task.first, task.other) == pytest.approx((0.4, 0.6)) and task.difference == pytest.approx(0.2)
    assert task.p == task.p_corrected == pytest.approx(math.erfc(1.5 / math.sqrt(2 * 4)))
    assert task.verdict == "no detectable difference"
    error = math.sqrt(0.4 - 0.2**2) / math.sqrt(10)
    assert task.detectable == pytest.approx(2.8016 * error, rel=1e-4)
    assert (task.low, task.high) == (pytest.approx(-0.269, abs=1e-3), pytest.approx(0.593, abs=1e-3))


def test_a_difference_is_called_one_when_it_outlasts_the_correction(tmp_path):
    half, better = [0, 1] * 40, [1, 1] * 10 + [0, 1] * 30  # 10 won, none lost
    p = math.erfc(9.5 / math.sqrt(2 * 10))
    alone = result_of(tmp_path, {"a/0-shot": half}, {"a/0-shot": better})
    assert alone.tasks[0].p == pytest.approx(p) and alone.tasks[0].confidence == 0.95
    assert alone.tasks[0].verdict == "better by 0.125" and alone.mean is None
    assert (
        compare(load_results([tmp_path / "ours.json", tmp_path / "base.json"]))[0].tasks[0].verdict.startswith("worse")
    )
    many = {f"t{i}/0-shot": half for i in range(30)}
    among = result_of(tmp_path, {"a/0-shot": half, **many}, {"a/0-shot": better, **many})
    assert among.tasks[0].p_corrected == pytest.approx(31 * p) and among.tasks[0].low < 0
    assert [task.verdict for task in among.tasks[:2]] == ["no detectable difference", "the same on every item"]


def test_several_results_are_corrected_together(tmp_path):
    half, better = [0, 1] * 40, [1, 1] * 10 + [0, 1] * 30
    paths = [write_result(tmp_path, name, {"a/0-shot": better if name == "b" else half}) for name in "abc"]
    first, second = compare(load_results(paths))
    assert (first.first, first.other, second.first, second.other) == ("a", "b", "a", "c")
    assert first.tasks[0].p_corrected == 2 * first.tasks[0].p
    assert first.tasks[0].confidence == 0.975 and second.tasks[0].confidence == 0.95


def test_the_mean_counts_each_task_the_same(tmp_path):
    rng = np.random.default_rng(0)
    a = {"small/0-shot": rng.random(100) < 0.5, "large/0-shot": rng.random(2000) < 0.5}
    b = {"small/0-shot": rng.random(100) < 0.5, "large/0-shot": rng.random(2000) < 0.6}
    pair = result_of(tmp_path, *({task: on(task, answers) for task, answers in model.items()} for model in (a, b)))
    differences = [b[task].astype(float) - a[task] for task in a]
    assert pair.mean.difference == pytest.approx(sum(d.mean() for d in differences) / 2)
    error = math.sqrt(sum(d.var() / len(d) for d in differences)) / 2
    assert pair.mean.high - pair.mean.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    normal_p = math.erfc(abs(pair.mean.difference) / error / math.sqrt(2))
    assert pair.mean.p == pytest.approx(normal_p, rel=0.2)
    assert pair.sentence == "ours is better than base by 0.083 [0.006, 0.161] on the mean of 2 tasks"
    pair = result_of(tmp_path, {"t/0-shot": TEN, "u/0-shot": TEN}, {"t/0-shot": TEN, "u/0-shot": [1] + [0] * 9})
    assert pair.sentence.startswith(
        "ours and base: no detectable difference on the mean of 2 tasks (p 0.15); a difference of 0.2"
    )


def test_the_same_items_with_more_examples_or_another_label_are_not_more_items(tmp_path):
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 500)) < 0.5
    once = result_of(tmp_path, {"t/0-shot": a}, {"t/0-shot": b}).tasks[0]
    for label in ("t/5-shot", "u/0-shot"):
        twice = result_of(tmp_path, {"t/0-shot": a, label: a}, {"t/0-shot": b, label: b}).mean
        assert (twice.low, twice.high, twice.p) == pytest.approx((once.low, once.high, once.p))
    apart = result_of(tmp_path, {"t/0-shot": a, "u/0-shot": on(2, a)}, {"t/0-shot": b, "u/0-shot": on(2, b)}).mean
    assert apart.high - apart.low == pytest.approx((once.high - once.low) / math.sqrt(2), rel=0.01)


def test_three_prompts_over_one_file_are_called_different_at_most_one_time_in_twenty(tmp_path):
    rng = np.random.default_rng(4)
    labels, num_called, num_trials = ("a/0-shot", "b/0-shot", "c/0-shot"), 0, 100
    for _ in range(num_trials):
        models = []
        for _ in range(2):  # four answers in five are the same whatever the prompt
            usual, drawn = rng.random(60) < 0.5, rng.random((3, 60)) < 0.5
            models.append(dict(zip(labels, np.where(rng.random((3, 60)) < 0.8, usual, drawn), strict=True)))
        num_called += result_of(tmp_path, *models).mean.is_detected
    # 5 are expected of 100, with a standard deviation of 2.2; were the three independent, it would be 17.
    assert num_called <= 10


def test_items_of_a_cluster_count_as_one(tmp_path):
    rng = np.random.default_rng(5)
    a, b = rng.random((2, 40)) < [[0.4], [0.6]]
    alone = result_of(tmp_path, {"t/0-shot": a}, {"t/0-shot": b}).tasks[0]

    def five_times(answers):
        record, items = choice(np.repeat(answers, 5))
        return record, [{**item, "cluster": str(item["index"] // 5)} for item in items]

    pair = result_of(tmp_path, {"t/0-shot": five_times(a)}, {"t/0-shot": five_times(b)})
    (task,) = pair.tasks
    assert (task.n, task.low, task.high, task.p) == pytest.approx((200, alone.low, alone.high, alone.p))
    assert pair.notes == ["t/0-shot: 200 items in 40 clusters, which are what is independent"]
    few = result_of(tmp_path, {"t/0-shot": five_times(a[:5])}, {"t/0-shot": five_times(b[:5])})
    assert few.tasks[0].low is None and few.notes == ["t/0-shot: 5 clusters: no interval and no verdict below 6"]


def test_a_mean_of_too_few_items_has_no_verdict(tmp_path):
    """The sentence was "no detectable difference on the mean of 2 tasks (p 1.00); one of 0.893 would be found …"."""
    first = {"a/0-shot": [1, 0, 0, 1], "b/0-shot": [0, 0, 0, 1]}
    pair = result_of(tmp_path, first, {"a/0-shot": [1, 1, 1, 1], "b/0-shot": [1, 0, 0, 1]})
    assert pair.sentence == "ours and base: no test on the mean of 2 tasks, too few items"
    assert [row.verdict for row in pair.rows] == ["too few items"] * 3


def test_a_task_with_categories_is_the_mean_of_them(tmp_path):
    def asked(answers):
        _, items = choice(answers)
        items = [{**item, "category": "large" if item["index"] < 90 else "small"} for item in items]
        record = choice(answers, settings=settings(has_categories=True))[0]
        return {
            **record,
            **dict(zip(("acc_per_token", "e"), mean_and_error(items, "acc_per_token", True), strict=True)),
        }, items

    (task,) = result_of(
        tmp_path, {"t/0-shot": asked([1] * 45 + [0] * 55)}, {"t/0-shot": asked([1] * 45 + [0] * 45 + [1] * 10)}
    ).tasks
    assert (task.first, task.other, task.wins) == pytest.approx((0.25, 0.75, 10))
    assert task.low < 0.5 < task.high and task.is_detected


def test_bits_per_byte_by_document(tmp_path):
    a = text([[(8.0, 10), (4.0, 10)], [(20.0, 30)], [(5.0, 10)]])
    b = text([[(6.0, 10), (4.0, 10)], [(21.0, 30)], [(4.0, 10)]])
    (task,) = result_of(tmp_path, {"x/0-shot": a}, {"x/0-shot": b}).tasks
    assert task.first == pytest.approx(37 / 60 / math.log(2)) and task.other == pytest.approx(35 / 60 / math.log(2))
    assert (task.n, task.wins, task.losses, task.ties) == (3, 2, 1, 0)
    assert task.is_better and task.difference < 0
    # Three documents are no evidence. "no detectable difference" stood here before, with p 1.00.
    assert (task.low, task.detectable, task.verdict) == (None, None, "too few documents")
    assert "1.00" not in task.cells() and task.cells()[6] == "-"
    rng = np.random.default_rng(3)
    sizes, nats = rng.integers(50, 500, 300), rng.normal(0.7, 0.1, 300)
    a = text([[(n * size, size)] for n, size in zip(nats, sizes.tolist(), strict=True)])
    b = text([[(n * size * 0.98, size)] for n, size in zip(nats, sizes.tolist(), strict=True)])
    (task,) = result_of(tmp_path, {"x/0-shot": a}, {"x/0-shot": b}).tasks
    assert task.difference == pytest.approx(-0.02 * task.first) and task.high < 0
    assert task.verdict.startswith("better by 0.02") and task.p < 0.001
    half_width = task.detectable / 2.8016 * 1.96
    assert (task.high - task.low) / 2 == pytest.approx(half_width, rel=0.08)


def test_one_document_is_resampled_by_window_or_not_at_all(tmp_path):
    a, b = text([[(8.0, 10), (4.0, 10)]]), text([[(7.0, 10), (4.5, 10)]])
    pair = result_of(tmp_path, {"x/0-shot": a}, {"x/0-shot": b})
    assert pair.tasks[0].n == 2
    assert pair.notes == ["x/0-shot: one document of 2 windows: no interval and no verdict below 20"]
    many = text([[(8.0 + i % 3, 10) for i in range(20)]])
    pair = result_of(tmp_path, {"x/0-shot": many}, {"x/0-shot": text([[(8.0, 10)] * 20])})
    assert pair.tasks[0].is_detected and "one document: its windows are resampled, as if" in pair.notes[0]
    pair = result_of(tmp_path, {"x/0-shot": text([[(8.0, 10)]])}, {"x/0-shot": text([[(9.0, 10)]])})
    assert (pair.tasks[0].low, pair.tasks[0].p) == (None, 1.0)
    assert pair.notes == ["x/0-shot: one document: no interval and no verdict below 20"]


def test_what_the_harness_writes_can_be_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "over", "a", "hill"]
    tokenizer = train_tokenizer([" ".join(words)] * 3, 300)
    rows = [{"query": words[i], "choices": [words[i - 1], words[i - 2]], "gold": i % 2} for i in range(13)]
    (tmp_path / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": word * 9}) + "\n" for word in words))
    tasks = [
        TaskConfig(label="choice", icl_task_type="multiple_choice", dataset_uri="choice.jsonl", num_fewshot=[0, 2]),
        TaskConfig(label="text", icl_task_type="perplexity", dataset_uri="text.jsonl"),
    ]

    def evaluated(name, seed, **options):
        subject, files = TreeModel(normal_model(TINY, seed, 0.2), CPU), ResultFiles(tmp_path, "s", name)
        evaluate(subject, tokenizer, tasks, Results(model=name, suite="s", source=name), files, **options)
        return tmp_path / f"s/{name}.json"

    first = evaluated("one", 1)
    (pair,) = compare(load_results([first, evaluated("two", 2)]), all_metrics=True)
    assert [(task.task, task.n) for task in pair.tasks] == [
        ("choice/0-shot", 13),
        ("choice/2-shot", 13),
        ("text/0-shot", 11),  # documents; two of 13 are there twice
    ]
    others = {metric.metric for metric in pair.other_metrics}
    assert others == {"acc", "acc_norm", "acc_per_byte", "bpb"}
    assert pair.notes == ["text/0-shot: 11 documents: no interval and no verdict below 20"]
    facts = json.loads(first.read_text())["tasks"]
    assert [task.first for task in pair.tasks] == pytest.approx([task[task["metric"]] for task in facts.values()])
    items = tmp_path / "s/two.items.jsonl"
    whole = items.read_text()
    items.write_text(whole.replace('"num_trimmed": 0', '"num_trimmed": 1', 1))
    with pytest.raises(DataError, match="the items of choice/0-shot are not those that the result was made from; ev"):
        load_results([first, tmp_path / "s/two.json"])
    items.write_text(whole)
    with pytest.raises(DataError, match=r"choice/0-shot: .*: tokenization 'separate' against 'joint'; "):
        compare(load_results([first, evaluated("joint", 1, tokenization="joint")]))
    with pytest.raises(
        DataError, match=r"choice/0-shot: .*: limit None against 5 \(13 items against 5\); evaluate both w"
    ):
        compare(load_results([first, evaluated("few", 1, limit=5)]))
    with pytest.raises(DataError, match=r"text/0-shot: .*: max_seq_len 64 against 32; "):
        compare(load_results([first, evaluated("short", 1, max_seq_len=32)]), skip=["choice/0-shot", "choice/2-shot"])


def test_bits_per_byte_of_a_text_are_compared_by_document_whatever_the_tokenizers(tmp_path):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "over", "a", "hill"]
    path, names = tmp_path / "text.jsonl", ("one", "two")
    path.write_text("".join(json.dumps({"text": f"{word} {' '.join(words)}" * 9}) + "\n" for word in words))
    task = TaskConfig(label="text", icl_task_type="perplexity", dataset_uri=str(path))
    windows = []
    for seed, (name, vocabulary) in enumerate(zip(names, (258, 300), strict=True)):
        tokenizer = train_tokenizer([" ".join(words)] * 3, vocabulary)
        results = Results(model=name, suite="s", source=name, tokenizer=f"sha256:{vocabulary}")
        files = ResultFiles(tmp_path, "s", name)
        evaluate(TreeModel(normal_model(TINY, seed, 0.2), CPU), tokenizer, [task], results, files)
        windows.append(results.tasks["text/0-shot"]["n"])
    assert windows[0] > windows[1] > 13
    (pair,) = compare(load_results([tmp_path / f"s/{name}.json" for name in names]))
    assert (pair.tasks[0].n, pair.tasks[0].metric) == (11, "bits_per_byte")


def test_a_limit_is_named_as_the_reason_and_not_the_data_or_the_tokens(tmp_path):
    """A text is counted in windows, and windows are a tokenizer's."""
    few = {"icl_task_type": "perplexity", "max_seq_len": 64, "limit": 2}
    whole = text([[(8.0, 10), (4.0, 10)], [(20.0, 30)]])
    cut = text([[(8.0, 10), (4.0, 10)]], settings=few, data_fingerprint="sha256:e", fingerprint="sha256:b")
    reason = r"asked the same: limit None against 2 \(3 items against 2\); evaluate both without limit, or leave"
    with pytest.raises(DataError, match=reason):
        result_of(tmp_path, {"x/0-shot": whole}, {"x/0-shot": cut})
    for document in ([(9.0, 13), (4.0, 12)], [(8.0, 10), (4.0, 10)]):
        other = text([document], settings=few, data_fingerprint="sha256:e", fingerprint="sha256:b")
        a = write_result(tmp_path, "base", {"x/0-shot": cut})
        b = write_result(tmp_path, "ours", {"x/0-shot": other}, tokenizer="sha256:2")
        with pytest.raises(
            DataError,
            match="asked the same: their tokenizers differ, so that limit 2, of windows, ends elsewhere in the text; ",
        ):
            compare(load_results([a, b]))
    other = text([[(8.0, 10), (4.0, 10)]], settings=few, data_fingerprint="sha256:f", fingerprint="sha256:c")
    with pytest.raises(DataError, match=r"the same: the data \(2 items against 2\); evaluate both with one task file"):
        result_of(tmp_path, {"x/0-shot": cut}, {"x/0-shot": other})


# --------------------------------------------------------------------------------------------- may we compare


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": settings(prompt_string="Q: "), "fingerprint": "b"}, "prompt_string '' against 'Q: '"),
        ({"data_fingerprint": "sha256:e", "fingerprint": "b"}, r"the data \(10 items against 10\)"),
        ({"num_fewshot": 5, "fingerprint": "b"}, "num_fewshot 0 against 5"),
        ({"tokenization": "joint", "fingerprint": "b"}, "tokenization 'separate' against 'joint'"),
        ({"settings": settings(limit=10), "fingerprint": "b"}, r"limit None against 10 \(10 items against 10\)"),
        ({"settings": settings(max_seq_len=64), "fingerprint": "b"}, "max_seq_len None against 64"),
        ({"fingerprint": "sha256:b"}, r"something that no setting shows \(fingerprint sha256:a against sha256:b\)"),
    ],
)
def test_what_was_asked_otherwise_is_not_compared(tmp_path, changes, reason):
    other = {"good/0-shot": TEN, "t/0-shot": choice(TEN, **changes)}
    with pytest.raises(
        DataError, match=f"^t/0-shot: base and ours were not asked the same: {reason}; .*--skip t/0-shot"
    ):
        result_of(tmp_path, {"good/0-shot": TEN, "t/0-shot": TEN}, other)
    pair = result_of(tmp_path, {"good/0-shot": TEN, "t/0-shot": TEN}, other, skip=["t/0-shot"])
    assert [task.task for task in pair.tasks] == ["good/0-shot"] and "left out, as asked: t/0-shot" in pair.notes


def test_the_first_row_that_differs_is_named(tmp_path):
    other = choice(TEN, data_fingerprint="sha256:e", fingerprint="b")
    for item in other[1][3:]:
        item["num_characters"] = [7, 8]
    with pytest.raises(DataError, match=r"same: the data \(10 items against 10; row 4 is the first with another quest"):
        result_of(tmp_path, {"t/0-shot": TEN}, {"t/0-shot": other})


def test_the_legend_says_whether_a_mean_is_corrected(tmp_path):
    tasks = {"a/0-shot": TEN, "b/0-shot": TEN}
    paths = [write_result(tmp_path, name, tasks) for name in "xyz"]
    one, two = (legend(compare(load_results(paths[:count]))) for count in (2, 3))
    assert "corrected for 2 tests; the mean's is one test more, not corrected (Holm)" in one
    assert "corrected for 4 tests; the means' for 2 tests (Holm)" in two
    assert "mean" not in legend(compare(load_results(paths[:2]), skip=["a/0-shot"]))


def test_tasks_of_one_alone_are_named_and_left_out(tmp_path):
    pair = result_of(tmp_path, {"a/0-shot": TEN, "b/0-shot": TEN}, {"b/0-shot": TEN, "c/0-shot": TEN})
    assert [task.task for task in pair.tasks] == ["b/0-shot"]
    assert pair.notes == ["only in base, left out: a/0-shot", "only in ours, left out: c/0-shot"]
    with pytest.raises(DataError, match="base and ours have no task in common: a/0-shot against c/0-shot"):
        result_of(tmp_path, {"a/0-shot": TEN}, {"c/0-shot": TEN})
    with pytest.raises(DataError, match="--skip z: no result has that task"):
        result_of(tmp_path, {"a/0-shot": TEN}, {"a/0-shot": TEN}, skip=["z"])


def test_a_result_that_may_be_unfinished_is_named(tmp_path):
    """An evaluation that was killed after some tasks had the note "only in base, left out: …" alone."""
    pair = result_of(tmp_path, {"a/0-shot": TEN, "b/0-shot": TEN, "c/0-shot": TEN}, {"b/0-shot": TEN})
    assert pair.notes == [
        "warning: ours has 1 of the 3 tasks of base; if its evaluation was stopped, run the same command again to "
        "finish it; only in base, left out: a/0-shot, c/0-shot"
    ]


def test_different_tokenizers_are_compared_by_text(tmp_path):
    """Each answer's number of tokens is the tokenizer's doing, its number of characters is not."""
    per_character = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    first = {"t/0-shot": choice(TEN, per_character=TEN), "x/0-shot": text([[(8.0, 10)], [(3.0, 9)]])}
    other = {
        "t/0-shot": choice([0] * 10, per_character=per_character),
        "x/0-shot": text([[(3.0, 4), (4.0, 6)], [(3.5, 9)]], fingerprint="sha256:b"),
    }
    a = write_result(tmp_path, "base", first)
    b = write_result(tmp_path, "ours", other, tokenizer="sha256:2")
    (pair,) = compare(load_results([a, b]), all_metrics=True)
    assert [(task.metric, task.n) for task in pair.tasks] == [("acc_norm", 10), ("bits_per_byte", 2)]
    assert pair.tasks[0].difference == pytest.approx(0.2) and pair.other_metrics == []
    assert any("different tokenizers: acc_norm (per character) stands for acc_per_token" in note for note in pair.notes)
    with pytest.raises(DataError, match=r"x/0-shot: .* \(fingerprint sha256:a against sha256:b"):
        compare(load_results([a, write_result(tmp_path, "same", other)]))
    token_ids = {"x/0-shot": text([[(8.0, 11)], [(3.0, 9)]])}
    with pytest.raises(DataError, match="x/0-shot: the data are token ids, and base and ids have different tokenizers"):
        compare(load_results([a, write_result(tmp_path, "ids", token_ids, tokenizer="sha256:2")]))


def lost(lost_bytes: int, *, text_bytes: int = 1000, **kinds: int) -> dict[str, object]:
    counts = dict.fromkeys(KINDS, 0) | {"no_token": lost_bytes // 2} | kinds
    return {"characters": text_bytes, "text_bytes": text_bytes, "lost_bytes": lost_bytes, "examples": [], **counts}


@pytest.mark.parametrize(
    ("first_lost", "other_lost", "verdict"),
    [
        (None, None, "better by 1.4"),
        (None, lost(480), "not comparable: text is lost"),
        (lost(480), None, "not comparable: text is lost"),
        (None, lost(0, case=200), "not comparable: text is lost"),
        (None, lost(10), "better by 1.4"),  # even if each lost byte takes 8 bits
    ],
)
def test_a_model_is_not_called_better_for_text_that_its_tokenizer_loses(tmp_path, first_lost, other_lost, verdict):
    sizes, paths, losing = range(90, 110), [], {"base": first_lost, "ours": other_lost}
    for nats, (name, loss) in zip((2.0, 1.0), losing.items(), strict=True):
        task = text(
            [[(nats * size + size % (2 + nats), size)] for size in sizes], lost_text=loss, fingerprint=f"sha256:{name}"
        )
        paths.append(write_result(tmp_path, name, {"x/0-shot": task}, tokenizer=f"sha256:{name}"))
    (pair,) = compare(load_results(paths))
    assert pair.tasks[0].verdict.startswith(verdict) and pair.tasks[0].is_detected == verdict.startswith("better")
    shares = {name: loss and f"{max(loss['lost_bytes'], loss['case']) / 10:.2g}" for name, loss in losing.items()}
    expected = [f"the tokenizer of {name} loses {share} % of the text" for name, share in shares.items() if share]
    assert [note.removeprefix("x/0-shot: warning: ") for note in pair.notes if "loses" in note] == expected
    (comparison,) = json.loads(write_comparison([], [pair], tmp_path)[1].read_text())["comparisons"]
    assert comparison["tasks"][0]["verdict"].startswith(verdict)


@pytest.mark.parametrize(
    ("difference", "p", "lost", "verdict"),
    [
        (-0.5, 0.01, 0.29, "better by"),  # the interval's nearer end is at -0.3
        (-0.5, 0.01, 0.31, "not comparable"),
        (0.5, 0.01, 0.29, "worse by"),
        (0.5, 0.01, 0.31, "not comparable"),
        (0.1, 0.5, 0.15, "no detectable difference"),  # within the interval of +-0.2, which hides as much
        (0.1, 0.5, 0.21, "not comparable"),
        (0.3, 0.5, 0.25, "no detectable difference"),  # less than the difference that was seen
        (0.3, 0.5, 0.31, "not comparable"),
    ],
)
def test_lost_text_counts_from_where_it_could_undo_a_verdict(difference, p, lost, verdict):
    number = MetricComparison(
        task="x/0-shot",
        metric="bits_per_byte",
        n=20,
        first=2.0,
        other=2.0 + difference,
        difference=difference,
        wins=10,
        losses=10,
        ties=0,
        p=p,
        test="t",
        error=0.1,
        interval=lambda level: (difference - 0.2, difference + 0.2),
        lost_text=lost,
    )
    number.decide(p, level=0.05)
    assert number.verdict.startswith(verdict)


def test_no_difference_is_claimed_where_lost_text_may_hide_one(tmp_path):
    first = {"x/0-shot": text([[(100.0 + i % 3, 100)] for i in range(20)], fingerprint="sha256:1")}
    other = {"x/0-shot": text([[(100.0 + i % 5, 100)] for i in range(20)], lost_text=lost(300))}
    a = write_result(tmp_path, "base", first)
    (pair,) = compare(load_results([a, write_result(tmp_path, "ours", other, tokenizer="sha256:2")]))
    assert pair.tasks[0].verdict == "not comparable: text is lost"
    b = write_result(tmp_path, "alike", {"x/0-shot": other["x/0-shot"]})  # one tokenizer loses the same
    (pair,) = compare(load_results([b, write_result(tmp_path, "ours", other)]))
    assert pair.tasks[0].verdict == "the same on every item"


def test_what_a_reader_must_know_is_said(tmp_path):
    limited = settings(limit=10)
    first = {"t/0-shot": choice(TEN, settings=limited, num_trimmed=3)}
    record, items = choice(TEN, settings=limited, beginning=[1])
    other = {"t/0-shot": ({**record, "n": 9, "acc_per_token": 4 / 9}, items[:9])}
    a = write_result(tmp_path, "base", first, num_tokens_trained=2000, num_parameters=10, save_id="s")
    facts = {"num_tokens_trained": 1000, "num_parameters": 20, "precision": "bf16", "save_id": "s"}
    (pair,) = compare(load_results([a, write_result(tmp_path, "ours", other, **facts)]))
    assert pair.tasks[0].n == 9
    assert pair.notes == [
        "warning: token budgets differ: base 2,000 tokens, ours 1,000; more training is one reason to be better",
        "warning: sizes differ: base 10 parameters, ours 20",
        "precision differs: base fp32, ours bf16",
        "base and ours are the same checkpoint",
        "t/0-shot: only the first 10 items (limit): a try, not a result",
        "t/0-shot: prompts begin with tokens [] for base, [1] for ours",
        "t/0-shot: contexts cut to fit: 3 of base, 0 of ours",
        "t/0-shot: 1 items that only one could be asked are left out",
    ]


def test_a_difference_of_zero_has_no_sign(tmp_path):
    """A mean of equal scores was printed as -0.000."""
    pair = result_of(tmp_path, {"a/0-shot": TEN}, {"a/0-shot": TEN})
    pair.tasks[0].difference = -0.0001
    assert pair.tasks[0].cells()[5].startswith("0.000 [")


def test_a_task_is_left_out_by_its_label(tmp_path):
    """Before, `--items a` was understood, and `--skip a` refused."""
    tasks = {"a/0-shot": TEN, "a/5-shot": TEN, "b/0-shot": TEN}
    pair = result_of(tmp_path, tasks, tasks, skip=["a"])
    assert [task.task for task in pair.tasks] == ["b/0-shot"]


def test_a_note_on_many_tasks_is_printed_once(tmp_path):
    """A trial of ten tasks had this note ten times, and its LaTeX said nothing."""
    tried = {f"t{number}/0-shot": choice(TEN, settings=settings(limit=10)) for number in range(10)}
    pair = result_of(tmp_path, tried, tried)
    assert pair.notes == ["t0/0-shot and 9 other tasks: only the first 10 items (limit): a try, not a result"]
    latex = write_comparison([], [pair], tmp_path / "out")[3].read_text()
    assert "A trial, not a result: t0/0-shot and 9 other tasks on the first items only." in latex


# ------------------------------------------------------------------------------------------------------ files


def error_of(capsys, *arguments):
    assert main.run(["compare", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_files_that_are_no_results(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = write_result(tmp_path, "good", {"t/0-shot": TEN})
    facts = json.loads(good.read_text())
    assert "good.json is given; name another result" in error_of(capsys, good)
    assert "good.json is given twice" in error_of(capsys, good, "good.json")
    assert "none.json does not exist" in error_of(capsys, good, "none.json")
    assert "cannot be read as JSON: [Errno 21] Is a directory" in error_of(capsys, good, _empty(tmp_path))
    assert "cannot be read as JSON: Extra data" in error_of(capsys, good, "good.items.jsonl")
    for content, reason in (
        ("{", "cannot be read as JSON"),
        ("[]", "is not a result"),
        ('{"model": "m", "tasks": {}}', "it has suite None, which no result has"),
        (json.dumps({**facts, "tasks": {"t": {"n": 1}}}), "t has metric None, which no result has"),
        (json.dumps({**facts, "tasks": {"t": 1}}), "t has n None, which no result has"),
        (json.dumps({**facts, "tasks": {}}), "has no finished task"),
    ):
        (tmp_path / "bad.json").write_text(content)
        assert re.search(f"bad.json:? {re.escape(reason)}", error_of(capsys, good, "bad.json"))


def _empty(folder):
    (folder / "empty").mkdir()
    return folder / "empty"


def test_items_that_are_missing_torn_or_another_evaluations(tmp_path, capsys):
    good = write_result(tmp_path, "good", {"t/0-shot": TEN})
    other = write_result(tmp_path, "other", {"t/0-shot": TEN})
    items = tmp_path / "other.items.jsonl"
    whole = items.read_text()
    items.write_text(whole[:-20])
    assert "other.items.jsonl has 9 of the 10 items of t/0-shot; evaluate again" in error_of(capsys, good, other)
    items.write_text(whole.replace('"acc_per_token": 1', '"acc_per_token": 0'))
    assert "the items of t/0-shot are not those that the result was made from" in error_of(capsys, good, other)
    items.write_text(whole)
    told = other.read_text()
    other.write_text(told.replace('"acc_per_token": 0.4', '"acc_per_token": 0.6'))
    message = error_of(capsys, good, other)
    assert "give acc_per_token 0.4000, the result says 0.6000; the two files are of different evaluations" in message
    other.write_text(told)
    items.unlink()
    assert "other.items.jsonl is missing, and results are compared item by item" in error_of(capsys, good, other)


def test_comparing_needs_no_torch():
    code = "import llmfoundry_lite.evaluation.compare, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_copies_are_the_same_on_every_item_and_names_are_told_apart(tmp_path):
    paths = [write_result(tmp_path / run / "icl", "ours", {"t/0-shot": TEN, "u/0-shot": TEN}) for run in ("a", "b")]
    (pair,) = compare(load_results(paths))
    assert (pair.first, pair.other) == ("a/icl/ours", "b/icl/ours")
    assert {task.verdict for task in pair.tasks} == {"the same on every item"} and pair.mean.p == 1
    assert pair.sentence.startswith("b/icl/ours and a/icl/ours: the same answers on the mean of 2 tasks")


def test_the_command_prints_writes_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 1000)) < [[0.3], [0.6]]
    paths = [
        write_result(tmp_path, name, {"arc_easy/0-shot": answers, "piqa/0-shot": a, "x/0-shot": bits})
        for name, answers, bits in (
            ("base", a, text([[(8.0, 10)], [(9.0, 11)]])),
            ("ours", b, text([[(8.5, 10)], [(9.0, 11)]])),
        )
    ]
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    assert main.run(["compare", *map(str, paths), "--all-metrics", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert "by the other metrics" in " ".join(printed.split())
    assert max(len(line.rstrip()) for line in lines if str(tmp_path) not in line) <= 80
    (sentence,) = [line for line in lines if line.startswith("ours is better than base by 0.1")]
    assert sentence.endswith("[0.155, 0.196] on the mean of 2 tasks")
    facts = json.loads((tmp_path / "out/compare.json").read_text())
    (told,) = facts["comparisons"]
    assert [task["task"] for task in told["tasks"]] == ["arc_easy/0-shot", "piqa/0-shot", "x/0-shot"]
    assert told["tasks"][0]["difference"] == pytest.approx(b.mean() - a.mean())
    written = (tmp_path / "out/compare.md").read_text()
    assert all(f"| {task['verdict']} |" in written for task in [*told["tasks"], *told["other_metrics"]])
    with (tmp_path / "out/compare.csv").open(newline="") as file:
        by_task = {(row["task"], row["metric"]): row for row in csv.DictReader(file)}
    arc = by_task["arc_easy/0-shot", "acc_per_token"]
    assert (arc["first_model"], arc["other_model"], arc["verdict"]) == ("base", "ours", "better by 0.351")
    assert float(arc["low"]) == told["tasks"][0]["low"]  # to the last digit
    latex = (tmp_path / "out/compare.tex").read_text()
    assert r"\caption{ours against base on the same items." in latex
    assert r"p \textless{} 0.05 after Holm's correction, for 3 tests of tasks." in latex
    marked = [line.partition(" &")[0] for line in latex.splitlines() if "* & $+$" in line]
    assert marked == [r"arc\_easy/0-shot", "mean of 2 tasks", r"arc\_easy/0-shot"]

    # Two documents are too few for a test. Every form had p 1.00 and "no detectable difference" before, the picture
    # "none to be told from chance".
    untested = by_task["x/0-shot", "bits_per_byte"]
    assert (untested["p"], untested["p_corrected"], untested["verdict"]) == ("", "", "too few documents")
    assert told["tasks"][2]["p"] is None and told["tasks"][2]["is_tested"] is False
    assert "| - | too few documents |" in written
    assert r"& - \\" in latex
    assert "Where p is -, there are too few items or documents for a test" in latex
    [key] = figures[0].legends
    labels = [text.get_text() for text in key.get_texts()]
    assert labels[1:] == ["no detectable difference", "not tested: too few items"]
    accuracy, bits = figures[0].axes
    assert [line.get_marker() for line in bits.lines if line.get_marker() in ("o", "x")] == ["x"]
    assert accuracy.get_title() == "ours against base, intervals at the level that decides"
    assert [label.get_text() for label in accuracy.get_yticklabels()] == [
        "arc_easy/0-shot",
        "piqa/0-shot",
        "mean of 2 tasks",
    ]
    assert bits.get_xlabel() == "difference in bits per byte (left is better)"
    markers = [line for line in accuracy.lines if line.get_marker() in ("o", "D")]
    assert [line.get_markerfacecolor() != "white" for line in markers] == [True, False, True]
    assert panels(compare(load_results(paths))).keys() == {axes.get_xlabel() for axes in (accuracy, bits)}
    plt.close("all")


def test_a_comparison_that_ended_midway_does_not_block_the_next_one(tmp_path):
    paths = [str(write_result(tmp_path, name, {"x/0-shot": choice([1, 0] * 50)})) for name in ("base", "ours")]

    def compare_into(folder):
        assert main.run(["compare", *paths, "--out", str(folder)]) == 0

    assert call_again_after_each_write(compare_into, tmp_path) == 5


def test_results_of_ours_need_no_companion_and_others_name_it(tmp_path, monkeypatch):
    leave_out_companions(monkeypatch)
    path = write_result(tmp_path / "out/suite", "ours", {"t/0-shot": TEN})
    (tmp_path / "out/suite/compare.json").write_text("{}")
    for where in (path, tmp_path / "out", tmp_path / "out/suite"):
        assert load_any([where])[0].model == "ours"
    write_result(tmp_path / "out/suite", "more", {"t/0-shot": TEN})
    needs = "; logs of lm-eval and Inspect: needs the companion llmfoundry_formats"
    for where, said in ((tmp_path / "no.json", "does not exist"), (tmp_path / "out", "cannot be read as JSON: ")):
        with pytest.raises(DataError) as error:
            load_any([path, where])
        assert str(error.value).startswith(f"{where} {said}") and str(error.value).endswith(needs)


@pytest.mark.parametrize("change", [{"model": 3}, {"save_id": []}, {"num_parameters": "x"}])
def test_a_result_of_odd_facts_is_refused_in_one_line(change, tmp_path):
    path = write_result(tmp_path, "odd", {"t/0-shot": TEN})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=f"it has {next(iter(change))} .*, which no result has"):
        load_results([path])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": None}, "t/0-shot has n None, which no result has; evaluate it again with redo=true"),
        ({"n": True}, "t/0-shot has n True, which no result has"),
        ({"metric": []}, "t/0-shot has metric \\[\\], which no result has"),
        ({"metrics": 5}, "t/0-shot has metrics 5, which no result has"),
        ({"acc_per_token": "x"}, "t/0-shot has acc_per_token 'x', which no result has"),
        ({"acc_per_token": 10**400}, "t/0-shot has acc_per_token 1000*, which no result has"),
        ({"chance": 10**400}, "t/0-shot has chance 1000*, which no result has"),
        ({"chance": "0.25"}, "t/0-shot has chance '0.25', which no result has"),
        ({"acc_per_token_stderr": None}, "t/0-shot has acc_per_token_stderr None, which no result has"),
        ({"settings": 3}, "t/0-shot has settings 3, which no result has"),
        ({"settings": {"limit": "x"}}, "t/0-shot has limit 'x', which no result has"),
        ({"skipped": "x"}, "t/0-shot has skipped 'x', which no result has"),
        ({"code": []}, "t/0-shot has code \\[\\], which no result has"),
        ({"acc": 0.5}, "the items of t/0-shot are not those that the result was made from; evaluate again with"),
    ],
)
def test_what_no_evaluation_writes_is_refused_in_one_line_wherever_results_are_read(change, said, tmp_path):
    record, items = choice(TEN)
    path = write_result(tmp_path, "odd", {"t/0-shot": ({**record, **change}, items)})
    with pytest.raises(DataError, match=said) as error:
        load_results([path])
    assert "\n" not in str(error.value)
    found, notes = read_others(tmp_path, [])
    assert (found and "acc" in change) or said[:9] in notes[0]


def test_depth_is_no_reason_for_a_traceback(tmp_path):
    path = write_result(tmp_path, "deep", {"t/0-shot": TEN})
    with (tmp_path / "deep.items.jsonl").open("a") as file:
        file.write("[" * 100_000)
    assert load_results([path])[0].name == "deep"  # a line more is nobody's item
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read as JSON"):
        load_results([path])


@pytest.mark.parametrize(
    "change",
    [
        {"acc_per_token": 2},
        *({"acc_norm": value} for value in (-0.5, True, "1")),
        *({"index": value} for value in (3, -1, 2.0)),
        *({"cluster": value} for value in ("a", ["a"])),
    ],
    ids=str,
)
def test_an_item_that_no_evaluation_writes_is_refused(tmp_path, change):
    record, items = choice(TEN)
    items[2] |= change
    values = [item["acc_per_token"] for item in items]
    with contextlib.suppress(TypeError):  # as if the result agreed
        record["acc_per_token"] = float(np.mean(values))
    refuse_items(tmp_path, record, items)


def test_an_item_that_is_no_number_is_refused_by_the_score_that_it_gives(tmp_path):
    record, items = choice(TEN)
    items[2]["acc_per_token"] = math.nan
    record["acc_per_token"] = math.nan
    path = write_result(tmp_path, "ours", {"t/0-shot": (record, items)})
    with pytest.raises(DataError, match="t/0-shot has acc_per_token nan, which no result has; evaluate it again"):
        load_results([path])


@pytest.mark.parametrize(
    "change",
    [{"log_probability": [-1e308]}, {"log_probability": [math.inf]}, {"num_characters": [-4]}, {"num_characters": 4}],
    ids=str,
)
def test_a_window_that_no_evaluation_writes_is_refused(tmp_path, change):
    record, items = text([[(2.0, 4)]] * 25)
    items[2] |= change
    refuse_items(tmp_path, record, items)


def refuse_items(folder, record, items):
    """Their hash is the one that the result names, as if both were made up."""
    path = write_result(folder, "ours", {"t/0-shot": (record, items)})
    with pytest.raises(DataError, match="the items of t/0-shot are not those that the result was made from; evaluate"):
        load_results([path])


# ------------------------------------------------------------------------------------------------- many comparisons


def texts_of(generator: np.random.Generator, num_documents: int, shift: float):
    """Return a text task whose documents all have `shift` nats per byte more than the base's, with a little noise."""
    rates = 0.7 + shift + generator.normal(0, 0.002, num_documents)
    return text([[(200 * rate, 200)] for rate in rates])


@pytest.mark.parametrize(
    ("num_models", "num_resamples"),
    [(6, 1_000), pytest.param(12, significance.NUM_RESAMPLES, marks=pytest.mark.slow)],
)
def test_a_large_difference_is_found_among_many_tests(tmp_path, monkeypatch, num_models, num_resamples):
    """The draws of a single comparison would be too few for all of them."""
    monkeypatch.setattr(significance, "NUM_RESAMPLES", num_resamples)
    generator = np.random.default_rng(0)
    names = [f"text{number}/0-shot" for number in range(num_models)]
    paths = []
    for model in range(num_models):
        shift = 0.0 if model == 0 else -0.1
        tasks = {name: texts_of(generator, significance.MIN_DOCUMENTS, shift) for name in names}
        paths.append(write_result(tmp_path / str(model), f"m{model}", tasks))
    comparisons = compare(load_results(paths))
    assert sum(len(pair.tasks) for pair in comparisons) == (num_models - 1) * num_models
    for pair in comparisons:
        for row in pair.tasks:
            assert row.verdict.startswith("better by"), row
            assert row.low is not None


def test_draws_that_are_too_few_for_so_many_tests_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(significance, "MAX_DRAWN_UNITS", 1)  # no more than the 10,000 of any comparison
    generator = np.random.default_rng(0)
    names = [f"text{number}/0-shot" for number in range(200)]
    models = [{name: texts_of(generator, 20, shift) for name in names} for shift in (0.0, -0.1)]
    pair = result_of(tmp_path, *models)
    assert pair.tasks[0].verdict == "not decided: too many tests"
    assert "its bootstrap can show no p below 0.0006" in pair.notes[-1]


# ------------------------------------------------------------------------------------------------------ one metric


def models_with_two_tokenizers(folder):
    """Write two results whose order by acc_per_token is the other way round by acc_norm (per character)."""
    base = choice([1] * 10 + [0] * 30, per_character=[1] * 25 + [0] * 15)
    ours = choice([1] * 20 + [0] * 20, per_character=[1] * 15 + [0] * 25)
    return [
        write_result(folder, "base", {"quiz/0-shot": base}, tokenizer="sha256:1"),
        write_result(folder, "ours", {"quiz/0-shot": ours}, tokenizer="sha256:2"),
    ]


def test_table_average_and_comparison_have_one_metric(tmp_path):
    loaded = load_results(models_with_two_tokenizers(tmp_path))
    scores = results_table(loaded)
    [pair] = compare(loaded)
    [row] = pair.tasks
    assert scores.columns["quiz/0-shot"].endswith("acc norm")
    assert [row.first, row.other] == pytest.approx([0.625, 0.375])
    assert [model.cells[0].number for model in scores.rows] == [0.625, 0.375]
    assert [model.cells[1].number for model in scores.rows] == [0.625, 0.375]  # the average
    warning = "warning: the models have different tokenizers: acc_norm (per character) stands for acc_per_token"
    assert scores.notes[0].startswith(warning)
    assert pair.notes[0].startswith(warning)


def test_a_metric_that_is_asked_for_holds_everywhere(tmp_path):
    loaded = load_results(models_with_two_tokenizers(tmp_path))
    scores = results_table(loaded, "acc_per_token")
    [pair] = compare(loaded, metric="acc_per_token")
    assert [model.cells[0].number for model in scores.rows] == [pair.tasks[0].first, pair.tasks[0].other] == [0.25, 0.5]
    assert "depends on how a tokenizer divides an answer" in scores.notes[0]


@pytest.mark.parametrize("metric", ["acc_nrom", "n", "perplexity"])
def test_a_metric_that_no_task_has_is_refused(tmp_path, metric):
    with pytest.raises(DataError, match=f"metric: no task has '{metric}'; "):
        compare(load_results(models_with_two_tokenizers(tmp_path)), metric=metric)


def test_a_table_keeps_the_metrics_of_tasks_that_lack_the_one_asked_for(tmp_path):
    loaded = load_results([write_result(tmp_path, "base", {"text/0-shot": text([[(7.0, 10)]])})])
    assert results_table(loaded, "acc_norm").columns["text/0-shot"].endswith("bits per byte")


def test_several_numbers_of_examples_of_one_task_count_once_in_the_mean(tmp_path):
    right, wrong = choice([1] * 20), choice([0] * 20)
    ours = {"quiz/0-shot": right, "quiz/5-shot": right, "other/0-shot": wrong}
    base = {"quiz/0-shot": wrong, "quiz/5-shot": wrong, "other/0-shot": wrong}
    for task in (ours, base):
        for number, name in enumerate(task):
            record, items = task[name]
            task[name] = ({**record, "data_fingerprint": f"sha256:{number}"}, items)
    pair = result_of(tmp_path, base, ours)
    assert pair.mean is not None
    assert (pair.mean.task, pair.mean.other) == ("mean of 2 tasks", pytest.approx(0.5))


def test_results_of_a_program_are_compared_like_their_files(tmp_path):
    paths = models_with_two_tokenizers(tmp_path)
    loaded = load_results(paths)
    assert compare_files(*loaded).tasks[0].difference == compare_files(*paths).tasks[0].difference


def test_other_windows_of_one_text_name_the_length_that_fits_both(tmp_path):
    record, items = text([[(7.0, 10)]] * 30)
    settings_of = {length: {**record["settings"], "max_seq_len": length} for length in (256, 512)}
    base = {"text/0-shot": ({**record, "settings": settings_of[256], "fingerprint": "sha256:a"}, items)}
    ours = {"text/0-shot": ({**record, "settings": settings_of[512], "fingerprint": "sha256:b"}, items)}
    with pytest.raises(DataError, match=r"max_seq_len 256 against 512; evaluate both with max_seq_len=256, or leave"):
        result_of(tmp_path, base, ours)


def test_a_table_with_another_metric_than_the_comparison_is_named(tmp_path):
    paths = [write_result(tmp_path, name, {"x/0-shot": choice([1, 0] * 10)}) for name in ("base", "ours")]
    write_result(tmp_path, "third", {"x/0-shot": choice([1, 0] * 10)}, tokenizer="sha256:2")
    [pair] = compare(load_results(paths))
    assert pair.tasks[0].metric == "acc_per_token"
    [note] = [note for note in pair.notes if "the table" in note]
    assert note == (
        "the table of the suite s shows acc_norm instead, because it has models with other tokenizers; "
        "--metric acc_norm compares by it"
    )
    [pair] = compare(load_results(paths), metric="acc_norm")
    assert not any("the table" in note for note in pair.notes)


def test_results_are_read_again_from_another_folder(tmp_path, monkeypatch):
    for name in ("base", "ours"):
        write_result(tmp_path / "s", name, {"x/0-shot": choice([1, 0] * 10)})
    monkeypatch.chdir(tmp_path)
    first, other = read_results(Path("s/base.json")), read_results(Path("s/ours.json"))  # without their items
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert compare_files(first, other).tasks[0].n == 20
