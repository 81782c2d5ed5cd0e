"""Short names of companions' parts: what a launch makes of them, and that a record with one runs nothing."""

import json

import pytest

from llmfoundry_lite import companions
from llmfoundry_lite.companions import Companion
from llmfoundry_lite.config import part_names
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.config.fields import keys_of, schema_keys, settings_along
from llmfoundry_lite.config.load_tasks import find_available_tasks, list_available_tasks, load_tasks
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.replayed import select_recorded
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.own_code import PREFIX

TINY = Companion(
    parts={
        "norms": {"tilted": "tiny.norms:Tilted", "rmsnorm": "tiny.norms:Other"},
        "ffns": {"mixed": "tiny.ffns:Mixed"},
        "attention_classes": {"gated": "tiny.attention:Gated"},
        "attention_implementations": {"capped": "tiny.attention:capped"},
        "schedulers": {"triangle": "tiny.schedules:Triangle"},
        "optimizers": {"adalr_lion": "tiny.optimizers:AdaLRLion"},
        "dataloaders": {"books": "tiny.loaders:load"},
        "callbacks": {"heartbeat": "tiny.callbacks:Beat", "bound": "tiny.callbacks:Bound"},
        "loggers": {"tail": "tiny.loggers:Tail"},
        "icl_datasets": {"rhymes": "tiny.tasks:Rhymes", "schema": "tiny.tasks:Schema"},
        "metrics": {"lead": "tiny.tasks:lead", "acc": "tiny.tasks:acc"},
        "readers": {".mbx": "tiny.readers:read_mails"},
    }
)
TASK = {"label": "r", "icl_task_type": "rhymes", "dataset_uri": "r.jsonl", "least_lead": 0.5}
TASK |= {"metric_names": ["lead"], "metric": "lead", "metric_kwargs": {"lead": {"per_token": True}}}
GIVEN = {
    "max_seq_len": 8,
    "global_train_batch_size": 8,
    "max_duration": "4ba",
    "tokenizer": {"name": "folder"},
    "model": {
        "norm_type": "tilted",
        "norm_kwargs": {"tilt": 0.1},
        "ffn_config": {"ffn_type": "mixed", "depth": 2},
        "attn_config": {"attn_type": "gated", "attn_impl": "capped", "qk_ln": True, "norm_type": "tilted"},
    },
    "scheduler": {"name": "triangle", "peak": 0.5},
    "optimizer": {"name": "adalr_lion", "lr": 0.1, "slope": 3},
    "train_loader": {"name": "books", "shelf": "a"},
    "eval_loader": {"name": "books", "shelf": "b"},
    "callbacks": {"heartbeat": {"every": 3, "loud": True}, "bound": None},
    "loggers": {"tail": {"path": "x"}},
}


def forget() -> None:
    part_names.find_names.cache_clear()


@pytest.fixture(autouse=True)
def companion(monkeypatch):
    monkeypatch.setattr(companions, "find_companions", lambda: [TINY])
    forget()
    yield
    forget()


def load(*arguments, **given):
    return load_train_config(["mpt-125m", *arguments], {}, given or None)


def test_a_short_name_means_what_its_import_path_means(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({**GIVEN, "variables": {"norm": "tilted"}}))
    changes = ["model.norm_type=${variables.norm}", "callbacks.heartbeat.every=4"]
    loaded = load_train_config([str(run), *changes], {})
    config = loaded.config
    assert dict(config.own_code) == {
        "model.norm_type": "python:tiny.norms:Tilted",
        "model.attn_config.norm_type": "python:tiny.norms:Tilted",
        "model.attn_config.attn_type": "python:tiny.attention:Gated",
        "model.attn_config.attn_impl": "python:tiny.attention:capped",
        "model.ffn_config.ffn_type": "python:tiny.ffns:Mixed",
        "optimizer.name": "python:tiny.optimizers:AdaLRLion",
        "scheduler.name": "python:tiny.schedules:Triangle",
        "train_loader.name": "python:tiny.loaders:load",
        "eval_loader.name": "python:tiny.loaders:load",
        "callbacks": "python:tiny.callbacks:Bound",
        "loggers": "python:tiny.loggers:Tail",
    }
    assert config.model.ffn_config.kwargs == {"depth": 2} and config.optimizer.kwargs["slope"] == 3
    assert config.callbacks.extra["python:tiny.callbacks:Beat"] == {"every": 4, "loud": True}
    assert "tilted" not in str({key: value for key, value in as_dict(config).items() if key != "variables"})
    assert "scheduler.name: triangle is python:tiny.schedules:Triangle" in loaded.notes
    assert "callbacks: heartbeat is python:tiny.callbacks:Beat" in loaded.notes


def test_a_program_s_own_mapping_stays_as_it_is():
    callbacks = {"heartbeat": {"every": 3}}
    assert "python:tiny.callbacks:Beat" in load(callbacks=callbacks, run_name="x").config.callbacks.extra
    assert callbacks == {"heartbeat": {"every": 3}}


def test_every_key_that_takes_code_takes_short_names():
    keys_of_code = [key for key in schema_keys(TrainConfig) if PREFIX in settings_along(TrainConfig, key)[-1].choices]
    keys_of_tasks = [name for name, key in keys_of(TaskConfig).items() if PREFIX in key.setting.choices]
    keys_of_code += [f"icl_tasks.*.{name}" for name in [*keys_of_tasks, "metric_names"]]
    keys = [key for keys in companions.PART_KEYS.values() for key in keys if not key.endswith(".*")]
    assert sorted([*keys_of_code, "tokenizer.name"]) == sorted(keys)  # which takes any name of the Hub, and no choices


def test_a_name_of_ours_stays_ours_and_that_is_said(capsys):
    assert load("model.norm_type=rmsnorm").config.model.norm_type == "rmsnorm"
    assert capsys.readouterr().err.splitlines() == [
        f"warning: companion parts, {name}: left out: this package has one of that name"
        for name in ("norms, rmsnorm", "icl_datasets, schema", "metrics, acc")
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("attention_implementations", "triton"),
        ("dataloaders", "finetuning"),
        ("callbacks", "run_timeout"),
        ("loggers", "mlflow"),
        ("metrics", "InContextLearningLMAccuracy"),
    ],
)
def test_words_of_llm_foundry_keep_their_meaning(kind, name, monkeypatch, capsys):
    monkeypatch.setattr(companions, "find_companions", lambda: [Companion(parts={kind: {name: "tiny.x:X"}})])
    assert part_names.find_names(kind) == {}
    assert f"{kind}, {name}: left out" in capsys.readouterr().err


def test_a_task_by_short_names_is_one_by_import_paths(tmp_path):
    notes: list[str] = []
    (task,) = load_tasks([TASK], "evals", notes=notes)
    assert task.icl_task_type == "python:tiny.tasks:Rhymes" and task.kwargs == {"least_lead": 0.5}
    assert task.metric == "python:tiny.tasks:lead" and task.metric_names == [task.metric]
    assert task.metric_kwargs == {task.metric: {"per_token": True}}
    assert "icl_tasks: r: icl_task_type: rhymes is python:tiny.tasks:Rhymes" in notes

    # A file, and a variant of the task in it.
    (tmp_path / "r.yaml").write_text(json.dumps(TASK))
    assert load_tasks(["r"], str(tmp_path)) == [task]
    (variant,) = load_tasks([{"label": "r", "least_lead": 0.7}], str(tmp_path))
    assert variant.kwargs == {"least_lead": 0.7} and variant.own_code == task.own_code


def test_a_run_records_the_import_paths_of_its_tasks():
    loaded = load(run_name="x", icl_tasks=[TASK])
    record = as_dict(loaded.config)["icl_tasks"][0]
    assert record["icl_task_type"] == "python:tiny.tasks:Rhymes" and record["metric_names"] == [record["metric"]]
    assert [*record["metric_kwargs"]] == ["python:tiny.tasks:lead"]
    assert "icl_tasks[0].icl_task_type: rhymes is python:tiny.tasks:Rhymes" in loaded.notes


def test_a_task_in_a_found_folder_that_has_a_short_name_is_left_out(tmp_path):
    (tmp_path / "r.jsonl").write_text("{}\n")
    (tmp_path / "r.yaml").write_text(json.dumps({**TASK, "dataset_uri": str(tmp_path / "r.jsonl")}))
    assert find_available_tasks(str(tmp_path)) == []


def test_a_file_of_a_found_task_is_read_once(tmp_path):
    """What was checked is what is used, also if somebody writes another task into the file meanwhile."""
    (tmp_path / "r.jsonl").write_text("{}\n")
    ours = {"label": "r", "icl_task_type": "schema", "dataset_uri": str(tmp_path / "r.jsonl"), "metric_names": ["x"]}
    (tmp_path / "r.yaml").write_text(json.dumps(ours))
    layer = list_available_tasks({"task_folder": str(tmp_path), "models": {}})
    (tmp_path / "r.yaml").write_text(json.dumps({**TASK, "dataset_uri": str(tmp_path / "r.jsonl")}))
    notes: list[str] = []
    (task,) = load_tasks(layer.values["icl_tasks"], str(tmp_path), notes=notes)
    assert task.icl_task_type == "schema" and not task.own_code
    assert "x is not computed (r)" in notes[0]


def test_an_unknown_type_or_metric_is_answered_with_those_of_companions():
    with pytest.raises(ConfigError, match=r"icl_task_type: 'rhymse' is not known; did you mean rhymes\?"):
        load_tasks([{"label": "r", "dataset_uri": "r.jsonl", "icl_task_type": "rhymse"}], "evals")
    with pytest.raises(ConfigError, match=r"metric: 'leed' is not known; did you mean lead\?"):
        load_tasks([{**TASK, "metric": "leed"}], "evals")
    notes: list[str] = []
    load_tasks([{**TASK, "metric_names": ["leed", "lead"]}], "evals", notes=notes)
    assert any("leed is not computed" in note and note.endswith("bpb, lead") for note in notes)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("model.norm_type=tiltd", "model.norm_type: 'tiltd' is not known; did you mean tilted?"),
        ("model.norm_type=x", "model.norm_type: 'x' is not known; use rmsnorm or low_precision_rmsnorm, layernorm or"),
        ("model.norm_type=tdlt", "model.norm_type: 'tdlt' is not known; did you mean tilted?"),
        ("scheduler.name=x", "scheduler.name: 'x' is not known; expected constant_with_warmup, cosine_with_warmup,"),
        ("optimizer.name=adalr_loin", "optimizer.name: 'adalr_loin' is not known; did you mean adalr_lion?"),
        ("callbacks.heartbet={}", "callbacks.heartbet: unknown key; did you mean callbacks.heartbeat?"),
        ("loggers.file={}", "loggers.file: unknown key; valid keys here: wandb, tensorboard, tail, and python:"),
    ],
)
def test_an_unknown_name_is_answered_with_those_of_companions_too(given, refused):
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert str(caught.value).startswith(f"command line: {refused}")


@pytest.mark.parametrize("given", ["model.norm_type=x", "callbacks.my_own={}", "loggers.neptune={}", "loss_guard={}"])
def test_an_unknown_name_may_be_that_of_a_missing_companion(given):
    with pytest.raises(ConfigError, match=r"; a companion that is not installed may have it$"):
        load(given)


def test_one_callback_by_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"^callbacks: .* are the same; keep one of them$"):
        load(callbacks={"heartbeat": {}, "python:tiny.callbacks:Beat": {}})


@pytest.mark.parametrize("block", ["callbacks", "loggers"])
def test_one_in_extra_too_is_refused(block):
    name, path = (
        ("heartbeat", "python:tiny.callbacks:Beat") if block == "callbacks" else ("tail", "python:tiny.loggers:Tail")
    )
    for in_extra in (name, path):
        with pytest.raises(ConfigError, match=rf"^{block}: {path} is given twice, also in {block}.extra"):
            load(run_name="x", **{block: {name: {}, "extra": {in_extra: {}}}})


def test_an_overlay_may_not_name_code_by_a_short_name(tmp_path):
    overlay = tmp_path / "here.yaml"
    overlay.write_text("overlay: hardware\nmodel: {attn_config: {attn_impl: capped}}\n")
    with pytest.raises(
        ConfigError, match=r"here.yaml: model.attn_config.attn_impl: python:tiny.attention:capped given"
    ):
        load(str(overlay))


def test_a_record_with_a_short_name_runs_nothing():
    """A launch writes none, so that somebody has written it there by hand."""
    with pytest.raises(ConfigError, match=r"norm_type: 'tilted' is not known; use rmsnorm"):
        build_block(ModelConfig, {"norm_type": "tilted"})
    record = as_dict(load().config)
    record["model"]["norm_type"] = "tilted"
    record["optimizer"] = {"name": "adalr_lion", "lr": 0.1}
    with pytest.raises(ConfigError) as caught:
        select_recorded(record, [], trusts_code=False)
    for name in ("model.norm_type python:tiny.norms:Tilted", "optimizer.name python:tiny.optimizers:AdaLRLion"):
        assert name in str(caught.value)
