"""Types of tasks and metrics of the user's own: results, resuming, comparisons, ranks, training, mistakes."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmfoundry_lite import launch_eval, own_code
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.load_tasks import load_tasks, trust_code_of
from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation import harness
from llmfoundry_lite.evaluation.compare import compare
from llmfoundry_lite.evaluation.harness import evaluate
from llmfoundry_lite.evaluation.models import locate_and_load_model
from llmfoundry_lite.evaluation.questions import Question
from llmfoundry_lite.evaluation.results import Results, load_results
from llmfoundry_lite.evaluation.task_files import read_rows
from llmfoundry_lite.own_code import trust_code
from tests.helpers.launch import ROOT, launch
from tests.helpers.models import normal_model
from tests.helpers.runs import metrics, run
from tests.helpers.tiny import tiny_config, write_data

HERE = f"python:{__name__}"
LINES = ["the cat sat on a", "a dog in the", "the sun and a", "see the hill in a"]
WORDS = [["mat", "hill"], ["fog", "sun"], ["run", "cat", "dog"], ["mill", "mat"]]
RHYMES = [{"line": LINES[i % 4], "words": WORDS[i % 4], "rhyme": WORDS[i % 4][i % 2]} for i in range(24)]
SUMS = [{"ask": f"{i} + 1 =", "sum": i + 1} for i in range(6)]


class Sums:
    """A number that is close counts in part."""

    answer = "generation"

    def __init__(self, task: TaskConfig, scale: float = 10.0):
        self.scale = scale

    def read(self, row: Any) -> Question:
        return Question(contexts=[row["ask"]], answers=[str(row["sum"])], text=row["ask"])

    def score(self, outcome: Any) -> dict[str, float]:
        numbers = [int(digits) for digits in re.findall(r"\d+", outcome.text)]
        distance = abs(numbers[0] - outcome.row["sum"]) if numbers else 1e9
        return {"acc": math.exp(-distance / self.scale), "length": -len(outcome.text)}


class Endings:
    """The last word of a line."""

    answer = "continuation"

    def __init__(self, task: TaskConfig):
        pass

    def read(self, row: Any) -> Question:
        context, _, last_word = row["line"].rpartition(" ")
        return Question(contexts=[context], answers=[last_word], text=row["line"], choices=[last_word])


class Bad(Sums):
    """Gives what a test asks for."""

    def __init__(self, task: TaskConfig, numbers: Any = None, **parts: Any):
        super().__init__(task)
        self.numbers = numbers
        self.parts = parts
        self.answer = parts.pop("answer", "generation")

    def read(self, row: Any) -> Question:
        facts = {"contexts": ["a"], "answers": ["b"], "text": "a", **self.parts}
        return Question(**facts) if self.parts.get("text") != "missing" else row["missing"]

    def score(self, outcome: Any) -> dict[str, float]:
        return self.numbers[outcome.row["sum"] % len(self.numbers)]


class Pairs(Sums):
    """Asks as many questions as its row has columns."""

    def read(self, row: Any) -> Question:
        columns = row["pair"].split("\t")
        return Question(contexts=columns, answers=["b"], text=row["pair"])


class Careless(Sums):
    """Changes the rows that it gets."""

    def read(self, row: Any) -> Question:
        return super().read({"ask": row.pop("ask"), "sum": row.pop("sum")})

    def score(self, outcome: Any) -> dict[str, float]:
        outcome.row.clear()
        return {"acc": 0.0}


def right_sum(outcome: Any) -> float:
    return outcome.row["sum"]


def surprise(outcome: Any) -> float:
    return outcome.metrics["bpb"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Two models, the page's example as a module and a task, in the working directory."""
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["the cat sat on a mat and the dog ran over a hill 1 2 3"] * 3, 300)
    tokenizer.save("tokenizer")
    sizes: Any = {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": 384}
    config = ModelConfig(**sizes, no_bias=True, attn_config=AttentionConfig(alibi=True))
    for seed, name in enumerate(("ours", "theirs")):
        torch.manual_seed(seed)
        model = normal_model(config, std=0.2)
        for parameter in model.parameters():
            parameter.data += seed * 0.05 * torch.randn_like(parameter)
        export_model(model.state_dict(), model.config, name, tokenizer_folder="tokenizer")

    page = (ROOT / "docs/own-parts.md").read_text().split("## Task types and metrics")[1]
    (settings,) = re.findall(r"```yaml\n(label.*?)```", page, re.DOTALL)
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = f"mine_tasks_{tmp_path.name.replace('-', '_')}"  # one for each test, so that each imports its own
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/rhymes.yaml").write_text(settings.replace("mine_tasks", module))
    for name, rows in (("rhymes", RHYMES), ("sums", SUMS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "_trusted_names", set())
    return tmp_path


def task(kind: str = "Bad", dataset: str = "sums", **changes: Any) -> dict[str, Any]:
    return {"label": "t", "icl_task_type": f"{HERE}:{kind}", "dataset_uri": f"{dataset}.jsonl", **changes}


def ask(*entries: Any, model: str = "ours") -> Results:
    tasks = load_tasks(list(entries), "evals")
    trust_code_of(tasks)
    subject = locate_and_load_model(model, device=torch.device("cpu"))
    return evaluate(subject.model, subject.tokenizer, tasks, Results(model=model, suite="s", source=model))


def rhymes() -> dict[str, Any]:
    return yaml.safe_load(Path("evals/rhymes.yaml").read_text())


def test_the_example_of_the_page_is_evaluated_resumed_and_compared_without_its_code(here, monkeypatch, capsys):
    models = ["models.ours=ours", "models.theirs=theirs"]
    launch_eval.launch([*models, "icl_tasks=[rhymes]", "suite=s"])
    (results,) = load_results([here / "results/s/ours.json"])
    kind = rhymes()["icl_task_type"]
    metric = rhymes()["metric_names"][0]
    record = results.tasks["rhymes/1-shot"]
    assert (record["type"], record["metric"], record["own_metrics"]) == (kind, "sure", ["sure", metric])
    assert record["settings"]["kwargs"] == {"least_lead": 0.5} and record["settings"]["metric_names"] == [metric]

    # The numbers are those of the page's code, and errors count clusters of repeated questions.
    for item in results.items["rhymes/1-shot"]:
        best_other = max(x for i, x in enumerate(item["log_probability"]) if i != item["gold"])
        assert item["sure"] == int(item["log_probability"][item["gold"]] - best_other >= 0.5)
        per_token = [x / n for x, n in zip(item["log_probability"], item["num_tokens"], strict=True)]
        best_other = max(x for i, x in enumerate(per_token) if i != item["gold"])
        assert item[metric] == pytest.approx(per_token[item["gold"]] - best_other)
    assert record["sure"] == pytest.approx(sum(item["sure"] for item in results.items["rhymes/1-shot"]) / 24)
    assert record["num_clusters"] == 4 and record[f"{metric}_stderr"] > 0 and 0 < record["chance"] < 0.5

    # A second launch asks nothing again, and other arguments are another task.
    capsys.readouterr()
    monkeypatch.setattr(harness, "run_task", None)
    launch_eval.launch([*models, "icl_tasks=[rhymes]", "suite=s"])
    assert "nothing was run" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"kwargs \{'least_lead': 0.5\}, not \{'least_lead': 0.1\}"):
        launch_eval.launch([*models, "icl_tasks=[{label: rhymes, least_lead: 0.1}]", "suite=s"])

    # Comparing needs no code: it is neither there nor trusted.
    sys.modules.pop(kind.split(":")[1])
    Path(f"{kind.split(':')[1]}.py").unlink()
    own_code._trusted_names.clear()
    both = load_results([here / f"results/s/{name}.json" for name in ("ours", "theirs")])
    (comparison,) = compare(both, all_metrics=True)
    assert {row.metric for row in comparison.tasks} == {"sure"} and comparison.mean is None
    assert all(row.test == "studentised bootstrap" for row in comparison.tasks)
    leads = [row for row in comparison.other_metrics if row.metric == metric]
    assert len(leads) == 2 and leads[0].wins + leads[0].losses + leads[0].ties == 24
    assert any(f"scored by {kind}, {metric}, code of its user's own" in note for note in comparison.notes)


def test_code_that_changes_its_row_changes_no_other_question(here):
    results = ask(task("Careless", max_new_tokens=1, num_fewshot=[2], metric_names=[f"{HERE}:right_sum"]))
    assert results.tasks["t/2-shot"]["n"] == len(SUMS)


def test_generated_answers_are_graded_by_the_users_own_code(here):
    results = ask(task("Sums", scale=5, max_new_tokens=4), task("Endings", "rhymes", label="e"))
    record = results.tasks["t/0-shot"]
    assert record["own_metrics"] == ["length"] and record["metric"] == "acc"
    assert 0 <= record["acc"] <= 1 and record["length"] < 0 and "bpb" in record
    assert results.average == pytest.approx((record["acc"] + results.tasks["e/0-shot"]["acc"]) / 2)
    assert results.tasks["e/0-shot"]["perplexity"] > 1


def test_a_metric_of_the_users_own_goes_with_a_type_of_ours(here):
    name = f"{HERE}:surprise"
    Path("next.jsonl").write_text(json.dumps({"context": "the cat", "continuation": "sat"}) + "\n")
    entry = {"label": "next", "icl_task_type": "language_modeling", "dataset_uri": "next.jsonl"}
    results = ask({**entry, "metric_names": ["InContextLearningLMAccuracy", name], "metric": name})
    record = results.tasks["next/0-shot"]
    assert record["metric"] == name and record[name] == record["bpb"] and results.average is None
    assert record["fingerprint"] != ask(entry).tasks["next/0-shot"]["fingerprint"]


def test_a_type_is_checked_with_the_row_that_it_is_asked_with(here):
    Path("pairs.jsonl").write_text(json.dumps({"pair": "a\t"}) + "\n")
    config = TaskConfig(label="t", icl_task_type=f"{HERE}:Pairs", dataset_uri="pairs.jsonl")
    trust_code([config.icl_task_type])
    assert read_rows(config) == [{"pair": "a"}]
    with pytest.raises(DataError, match="returns 2 contexts and 1 answers, expected one context"):
        read_rows(replace(config, strip_dataset=False))


def test_code_that_nobody_has_named_is_not_imported(here):
    tasks = load_tasks(["rhymes"], "evals")
    subject = locate_and_load_model("ours", device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"rhymes: icl_task_type: .* is code that is not trusted here"):
        evaluate(subject.model, subject.tokenizer, tasks, Results(model="ours", suite="s", source="ours"))
    assert rhymes()["icl_task_type"].split(":")[1] not in sys.modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numbers": [{"acc": 2}]}, "t: row 1: {kind} gives acc 2, expected 0 to 1, because it is an accuracy"),
        ({"numbers": [{"x": math.nan}]}, "t: row 1: {kind} gives x nan, expected a finite number"),
        ({"numbers": [{"x": "1"}]}, "t: row 1: {kind} gives x '1', expected a finite number"),
        ({"numbers": [{"gold": 1}]}, "t: row 1: {kind} names a number 'gold', which results use already"),
        ({"numbers": [{"settings": 1}]}, "t: row 1: {kind} names a number 'settings', which results use already"),
        ({"numbers": [{"seconds": 1}]}, "t: row 1: {kind} names a number 'seconds', which results use already"),
        ({"numbers": [{"x": 1, "x_stderr": 1}]}, "t: row 1: {kind} names a number 'x_stderr', which results use"),
        ({"numbers": [{"": 1}]}, "t: row 1: {kind} names a number '', expected a text of 1 to 60 characters"),
        ({"numbers": [{"y": 1}, {"x": 1}]}, "t: {kind} gives row 2 the numbers y, and row 1 x; expected the same"),
        ({"answers": []}, "t: sums.jsonl, line 1: {kind} returns 1 contexts and 0 answers, expected one context, and"),
        ({"answers": "b"}, "t: sums.jsonl, line 1: {kind} returns Question("),
        ({"gold": 1}, "t: sums.jsonl, line 1: {kind} returns gold 1, expected 0 to 0"),
        ({"answer": "choices"}, "t: sums.jsonl, line 1: {kind} returns 1 contexts and 1 answers, expected as many of"),
        ({"text": "missing"}, "t: sums.jsonl, line 1: no column 'missing', which {kind} reads"),
        (
            {"answer": "text"},
            "t: icl_task_type: {kind} has answer 'text', expected choices, continuation or",
        ),
        ({"metric": "acc_norm"}, "t: metric: acc_norm needs choices, and {kind} has answer 'generation'"),
        ({"form": "letters"}, "t: form: letters needs multiple_choice"),
        ({"metric": f"{HERE}:surprise"}, f"t: metric: {HERE}:surprise is not among metric_names; add it there"),
        ({"metric_names": ["python:x"]}, "t: metric_names: 'python:x' given, expected python:package.module:function"),
        ({"metric_names": [f"{HERE}:missing"]}, f"t: metric_names: {HERE}:missing: module {__name__} has no missing"),
        ({"icl_task_type": f"{HERE}:Sums", "skale": 2}, f"t: kwargs: {HERE}:Sums does not take these keys"),
    ],
)
def test_a_mistake_is_named(here, changes, message):
    with pytest.raises((DataError, ConfigError)) as error:
        ask(task(**{"max_new_tokens": 2, "numbers": [{"x": 1}], **changes}))
    assert message.format(kind=f"{HERE}:Bad") in str(error.value)


def test_results_of_a_stranger_with_other_numbers_are_refused(here):
    launch_eval.launch(["models.ours=ours", "icl_tasks=[rhymes]", "suite=s"])
    path = here / "results/s/ours.json"
    written = json.loads(path.read_text())
    for own_metrics in (["question"], ["missing"], [1]):
        written["tasks"]["rhymes/0-shot"]["own_metrics"] = own_metrics
        path.write_text(json.dumps(written))
        with pytest.raises(DataError, match=r"which no result has|are not those|expected names"):
            load_results([path])


def test_a_task_with_code_that_is_only_found_in_a_folder_is_left_out(here):
    plain = {"label": "plain", "icl_task_type": "perplexity", "dataset_uri": "rhymes.txt"}
    Path("rhymes.txt").write_text("the cat sat on a mat")
    Path("evals/plain.yaml").write_text(json.dumps(plain))
    (results,) = launch_eval.launch(["models.ours=ours"])
    assert [*results.tasks] == ["plain/0-shot"] and rhymes()["icl_task_type"].split(":")[1] not in sys.modules


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_file_with_two_suffixes_does_not_bring_another_file_with_code(here, suffix):
    """The stem of a file in the folder, `evil.yaml`, is also the path of a file in the working directory."""
    plain = {"label": "plain", "icl_task_type": "perplexity", "dataset_uri": "rhymes.txt"}
    Path("rhymes.txt").write_text("the cat sat on a mat")
    Path(f"evals/evil.{suffix}.yaml").write_text(json.dumps(plain))
    Path("evals/rhymes.yaml").rename(f"evil.{suffix}")
    (results,) = launch_eval.launch(["models.ours=ours"])
    assert [*results.tasks] == ["plain/0-shot"]
    assert not any(name.startswith("mine_tasks_" + here.name.replace("-", "_")) for name in sys.modules)


def test_prompts_of_a_type_of_the_users_own_are_shown(here, capsys):
    launch_eval.launch(["models.ours=ours", "icl_tasks=[rhymes]", "suite=s", "--show", "1"])
    output = capsys.readouterr().out
    assert f"rhymes/0-shot, {rhymes()['icl_task_type']}" in output and "* option 1" in output


def ask_on_rank(folder: str) -> None:
    import os

    os.chdir(folder)
    sys.path.insert(0, folder)
    launch_eval.launch(["models.ours=ours", "icl_tasks=[rhymes]", "suite=s", f"results_folder={os.environ['RESULTS']}"])


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_ranks_give_the_results_of_one(here):
    for num_ranks in (1, 2):
        launch(ask_on_rank, (str(here),), here, num_ranks, env={"RESULTS": f"on{num_ranks}"}).check()
    one, two = ((here / f"on{n}/s/ours.items.jsonl").read_text() for n in (1, 2))
    assert one == two and '"sure"' in one


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_evaluates_tasks_of_the_users_own_in_training(here):
    write_data(here / "data")
    entry = task("Sums", label="sums", dataset_uri=str(here / "sums.jsonl"), max_new_tokens=2)
    config = tiny_config(
        here / "data",
        icl_tasks=[{**entry, "metric_names": [f"{HERE}:surprise"]}],
        eval_loader=None,
        eval_interval="2ba",
        max_duration="2ba",
        tokenizer__name=str(here / "tokenizer"),
        model__vocab_size=384,
    )
    run(here, config, "two", 2)
    record = metrics(here, "two")[-1]
    assert 0 <= record["eval/icl/sums/0-shot/acc"] <= 1 and record["eval/icl/sums/0-shot/length"] <= 0
    assert record[f"eval/icl/sums/0-shot/{HERE}:surprise"] > 0
