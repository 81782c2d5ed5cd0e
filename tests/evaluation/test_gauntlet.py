"""The Eval Gauntlet: LLM Foundry's YAMLs load unchanged, and give its numbers."""

import csv
import math
import statistics

import pytest
import yaml

from llmfoundry_lite.config.eval_schema import Benchmark, Category, GauntletConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.evaluation.gauntlet import run_gauntlet
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.evaluation.tables import write_tables

EVALUATION = """
variables:
  model_name_or_path: EleutherAI/gpt-neo-125m
  precision: amp_bf16
precision: ${variables.precision}
max_seq_len: 1024
seed: 1
models:
-
  model_name: ${variables.model_name_or_path}
  model:
    name: hf_causal_lm
    pretrained_model_name_or_path: ${variables.model_name_or_path}
    init_device: mixed
    pretrained: true
  tokenizer:
    name: ${variables.model_name_or_path}
    kwargs:
      model_max_length: 1024
-
  model_name: mpt_test
  model: {name: mpt_causal_lm, d_model: 768}
  tokenizer: {name: EleutherAI/gpt-neox-20b}
  load_path: runs/mpt
device_eval_batch_size: 4
fsdp_config:
  sharding_strategy: FULL_SHARD
icl_tasks: "eval/yamls/tasks.yaml"
eval_gauntlet: "eval/yamls/gauntlet.yaml"
"""
TASKS = """
icl_tasks:
-
  label: arc
  dataset_uri: eval/arc.jsonl
  num_fewshot: [0, 3]
  icl_task_type: multiple_choice
-
  label: gone
  dataset_uri: eval/gone.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
"""
GAUNTLET = """
eval_gauntlet:
  weighting: EQUAL
  subtract_random_baseline: true
  rescale_accuracy: true
  averages:
    core:
    - knowledge
  categories:
  - name: knowledge
    benchmarks:
    - name: arc
      num_fewshot: 3
      random_baseline: 0.25
  - name: reading
    benchmarks:
    - name: gone
      num_fewshot: 0
      random_baseline: 0
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Files in the `scripts` folder of somebody who comes from LLM Foundry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eval/yamls").mkdir(parents=True)
    (tmp_path / "eval/yamls/hf_eval.yaml").write_text(EVALUATION)
    (tmp_path / "eval/yamls/tasks.yaml").write_text(TASKS)
    (tmp_path / "eval/yamls/gauntlet.yaml").write_text(GAUNTLET)
    (tmp_path / "eval/arc.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}\n')
    return tmp_path


def test_an_evaluation_of_llm_foundry_loads_unchanged(checkout):
    config, tasks, notes, _ = load_eval_config(["eval/yamls/hf_eval.yaml"])
    assert config.models == {"gpt-neo-125m": "hf:EleutherAI/gpt-neo-125m", "mpt_test": "runs/mpt"}
    assert (config.precision, config.max_seq_len, config.fsdp) == ("bf16", 1024, False)
    assert [task.label for task in tasks] == ["arc", "gone"]
    assert config.eval_gauntlet == GauntletConfig(
        categories=[
            Category(name="knowledge", benchmarks=[Benchmark(name="arc", num_fewshot=3, random_baseline=0.25)]),
            Category(name="reading", benchmarks=[Benchmark(name="gone", num_fewshot=0, random_baseline=0.0)]),
        ],
        averages={"core": ["knowledge"]},
    )
    assert [note.split(" has no effect")[0] for note in notes] == [
        "eval/yamls/hf_eval.yaml: seed",
        "eval/yamls/hf_eval.yaml: device_eval_batch_size",
        "eval/yamls/hf_eval.yaml: fsdp_config",
        "eval/yamls/hf_eval.yaml: models[1].tokenizer 'EleutherAI/gpt-neox-20b'",
    ]


def test_an_older_evaluation_of_llm_foundry_has_one_model(checkout):
    old = yaml.safe_load(EVALUATION)
    model = old["variables"] | old["models"][0] | {"load_path": None}
    kept = {key: old[key] for key in ("max_seq_len", "seed", "icl_tasks")}
    for key in ("model", "tokenizer"):
        model[key] = yaml.safe_load(yaml.safe_dump(model[key]).replace("variables.", ""))
    names = ("model_name_or_path", "precision", "model", "tokenizer", "load_path")
    (checkout / "old.yaml").write_text(yaml.safe_dump(kept | {key: model[key] for key in names}))
    assert load_eval_config(["old.yaml"]).config.models == {"gpt-neo-125m": "hf:EleutherAI/gpt-neo-125m"}
    assert load_eval_config(["old.yaml", "model_name_or_path=a/b"]).config.models == {"b": "hf:a/b"}
    assert load_eval_config(["old.yaml", "load_path=runs/mpt"]).config.models == {"mpt": "runs/mpt"}
    assert load_eval_config(["old.yaml", "tokenizer=mine"]).config.tokenizer == "mine"
    named = ["old.yaml", "load_path=runs/mpt", "suite=${run_name}", "run_name=ours"]
    with pytest.raises(ConfigError, match="command line: run_name: LLM Foundry's option is left out here; use suite"):
        load_eval_config(named)
    named[2:] = ["results_folder=${load_path}/results"]
    assert load_eval_config(named).config.models == {"mpt": "runs/mpt"}


def test_an_evaluation_of_llm_foundry_is_read_from_another_folder(checkout, tmp_path_factory, monkeypatch):
    there = load_eval_config(["eval/yamls/hf_eval.yaml"])
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(ConfigError, match=r"icl_tasks: eval/yamls/tasks.yaml does not exist; data_root="):
        load_eval_config([str(checkout / "eval/yamls/hf_eval.yaml")])
    here = load_eval_config([str(checkout / "eval/yamls/hf_eval.yaml"), f"data_root={checkout}"])
    assert [task.dataset_uri for task in here.tasks] == [str(checkout / task.dataset_uri) for task in there.tasks]
    assert here.config.eval_gauntlet == there.config.eval_gauntlet
    shipped = load_eval_config(["models.a=b", "icl_tasks=yamls/eval/icl-zero-shot.yaml", "task_folder=evals"])
    assert "arc_easy" in [task.label for task in shipped.tasks]


def test_a_category_that_lacks_a_task_is_named_before_anything_starts(checkout):
    (checkout / "eval/yamls/tasks.yaml").write_text(TASKS.replace("[0, 3]", "[0]"))
    assert load_eval_config(["eval/yamls/hf_eval.yaml"]).notes[-1] == (
        "eval_gauntlet: knowledge needs arc/3-shot, not asked for now; without an earlier result it is left out"
    )


def test_a_folder_of_a_model_is_read_where_it_is(checkout):
    (checkout / "EleutherAI/gpt-neo-125m").mkdir(parents=True)
    assert load_eval_config(["eval/yamls/hf_eval.yaml"]).config.models["gpt-neo-125m"] == "EleutherAI/gpt-neo-125m"


def test_a_task_without_its_data_is_left_out_by_name_when_asked_to(checkout):
    loaded = load_eval_config(["eval/yamls/hf_eval.yaml", "skip_missing_tasks=true"])
    assert [task.label for task in loaded.tasks] == ["arc"]
    assert loaded.notes[-1] == "gone is left out: eval/gone.jsonl is not here"
    (checkout / "eval/arc.jsonl").unlink()
    with pytest.raises(
        ConfigError, match=r"skip_missing_tasks: the data of every task is missing here; eval/arc.jsonl is the"
    ):
        load_eval_config(["eval/yamls/hf_eval.yaml", "skip_missing_tasks=true"])


def test_an_average_is_without_categories_that_are_not_there(checkout):
    gauntlet = yaml.safe_load(GAUNTLET)["eval_gauntlet"] | {"averages": {"core": ["programming", "reading"]}}
    (checkout / "eval/yamls/gauntlet.yaml").write_text(yaml.safe_dump({"eval_gauntlet": gauntlet}))
    notes = load_eval_config(["eval/yamls/hf_eval.yaml"]).notes
    assert "eval_gauntlet: core is without 'programming', which is no category here" in notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weighting": "SAMPLES"}, r"eval_gauntlet.weighting: 'SAMPLES' is not known; did you mean SAMPLE_SZ\? \(exp"),
        ({"subtract_random_baseline": False}, r"rescale_accuracy: true given, which needs subtract_random_baseline"),
        ({"averages": {"reading": []}}, r"averages: reading is a category's name; choose another"),
        ({"averages": {"core": ["maths"]}}, r"averages.core: no category 'maths'; there are: knowledge, reading"),
        ({"wieghting": "EQUAL"}, r"eval_gauntlet.wieghting: unknown key; did you mean eval_gauntlet.weighting\?"),
        ({"categories": [{"name": "a", "benchmarks": []}]}, r"categories: a has no benchmark"),
        (
            {"categories": [{"name": "a", "benchmarks": [{"name": "b", "num_fewshot": 0, "random_baseline": 1}]}]},
            r"benchmarks\[0\].random_baseline: 1.0 given, expected a number from 0 to less than 1",
        ),
        (
            {"categories": [{"name": "a", "benchmarks": [{"name": "b", "num_fewshto": 0}]}]},
            r"eval_gauntlet.categories\[0\].benchmarks\[0\].num_fewshto: unknown key; did you mean",
        ),
    ],
)
def test_a_wrong_gauntlet_is_one_line(checkout, change, message):
    gauntlet = yaml.safe_load(GAUNTLET)["eval_gauntlet"] | change
    (checkout / "eval/yamls/gauntlet.yaml").write_text(yaml.safe_dump({"eval_gauntlet": gauntlet}))
    with pytest.raises(ConfigError, match=message) as raised:
        load_eval_config(["eval/yamls/hf_eval.yaml"])
    assert "\n" not in str(raised.value)


def record(accuracy, n, data, error=0.02):
    return {"metric": "acc", "acc": accuracy, "acc_stderr": error, "n": n, "data_fingerprint": data}


TASKS_DONE = {
    "arc/3-shot": record(0.40, 2000, "arc"),
    "piqa/0-shot": record(0.70, 1800, "piqa"),
    "copa/0-shot": record(0.45, 100, "copa"),
    "squad/3-shot": record(0.31, 10570, "squad"),
}


def category(name, *benchmarks):
    return Category(
        name=name,
        benchmarks=[Benchmark(name=n, num_fewshot=shots, random_baseline=chance) for n, shots, chance in benchmarks],
    )


SENSE = category("sense", ("piqa", 0, 0.5), ("copa", 0, 0.5))
READING = category("reading", ("squad", 3, 0.0))
KNOWLEDGE = category("knowledge", ("arc", 3, 0.25), ("mmlu", 5, 0.25))


@pytest.mark.parametrize(
    ("weighting", "sense"),
    [
        # llm-foundry 0.22's EvalGauntlet on the same accuracies and sizes
        ("EQUAL", 0.15),
        ("SAMPLE_SZ", 0.37368421052631573),
        ("LOG_SAMPLE_SZ", 0.20971491030599893),
    ],
)
def test_scores_are_those_of_llm_foundry(weighting, sense):
    found = run_gauntlet(GauntletConfig(categories=[SENSE, READING, KNOWLEDGE], weighting=weighting), TASKS_DONE)
    assert {name: score.score for name, score in found.scores.items()} == pytest.approx(
        {"sense": sense, "reading": 0.31, "default_average": (sense + 0.31) / 2}
    )
    assert found.missing == {"knowledge": ["mmlu/5-shot"]}


def test_chance_may_stay_in_and_scores_unscaled():
    plain = GauntletConfig(categories=[SENSE], subtract_random_baseline=False, rescale_accuracy=False)
    assert run_gauntlet(plain, TASKS_DONE).scores["sense"].score == pytest.approx((0.70 + 0.45) / 2)
    less_chance = GauntletConfig(categories=[SENSE], rescale_accuracy=False)
    assert run_gauntlet(less_chance, TASKS_DONE).scores["sense"].score == pytest.approx((0.20 - 0.05) / 2)


def test_the_error_of_a_category_is_that_of_its_tasks_rescaled():
    found = run_gauntlet(GauntletConfig(categories=[SENSE]), TASKS_DONE).scores["sense"]
    assert found.error == pytest.approx(math.hypot(0.04, 0.04) / 2)
    same_items = {name: {**facts, "data_fingerprint": "one"} for name, facts in TASKS_DONE.items()}
    assert run_gauntlet(GauntletConfig(categories=[SENSE]), same_items).scores["sense"].error == pytest.approx(0.04)


def test_an_average_of_categories_that_are_left_out_is_left_out():
    config = GauntletConfig(categories=[SENSE, KNOWLEDGE], averages={"core": ["knowledge"], "all": ["sense"]})
    found = run_gauntlet(config, TASKS_DONE)
    assert list(found.scores) == ["sense", "all"]


def test_a_perplexity_is_no_accuracy():
    done = {**TASKS_DONE, "squad/3-shot": {"metric": "bits_per_byte", "bits_per_byte": 1.0, "n": 3}}
    assert run_gauntlet(GauntletConfig(categories=[READING]), done).missing == {"reading": ["squad/3-shot"]}


def test_the_tables_hold_every_model(tmp_path):
    def done(model, tasks):
        record = {"type": "language_modeling", "num_fewshot": 0, "fingerprint": "f", "settings": {}}
        return Results(
            model=model, suite="s", source=model, tasks={name: {**record, **task} for name, task in tasks.items()}
        )

    less = {name: task for name, task in TASKS_DONE.items() if name != "copa/0-shot"}
    config = GauntletConfig(categories=[SENSE, READING])
    written = write_tables([done("ours", TASKS_DONE), done("base", less)], tmp_path, config)
    assert [path.name for path in written] == [
        "table.md",
        "table.csv",
        "table.tex",
        "gauntlet.md",
        "gauntlet.csv",
        "gauntlet.tex",
    ]
    heading = (tmp_path / "table.csv").read_text().splitlines()[0].split(",")
    assert heading[:3] == ["model", "arc/3-shot acc", "arc/3-shot acc stderr"]
    assert heading[-2:] == ["average accuracy", "average accuracy stderr"]
    with (tmp_path / "gauntlet.csv").open() as file:
        columns, ours, base = csv.reader(file)
    assert columns == [
        *("model", "sense", "sense stderr", "reading", "reading stderr"),
        *("default_average", "default_average stderr"),
    ]
    average = statistics.mean([0.15, 0.31])
    assert list(map(float, ours[1:])) == pytest.approx([0.15, 0.028, 0.31, 0.02, average, 0.017], abs=5e-4)
    assert base == ["base", "", "", "0.31", "0.02", "0.31", "0.02"]
    assert "sense is left out: no accuracy of copa/0-shot (base)" in (tmp_path / "gauntlet.md").read_text()
