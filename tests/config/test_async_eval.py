"""LLM Foundry's `callbacks.async_eval`: a launch says which command evaluates the checkpoints instead."""

import json
import shlex

import pytest

from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from tests.helpers.present import needs
from tests.helpers.tiny import tiny_config, write_config

TASKS = [
    {"label": "mine", "icl_task_type": "language_modeling", "dataset_uri": "my rows.jsonl", "num_fewshot": [0, 3]},
    "named",
]
ASYNC_EVAL = {"interval": "100ba", "compute": {"cluster": "r1z1", "gpus": 8}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the rows of two tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals").mkdir()
    row = json.dumps({"context": "a", "continuation": "b"})
    for name in ("my rows", "named"):
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n" * 5)
    named = {"label": "named", "icl_task_type": "language_modeling", "dataset_uri": "named.jsonl"}
    (tmp_path / "evals/named.yaml").write_text(json.dumps(named))
    return tmp_path


def load_run(folder, **changes):
    """Load a run with the callback, and return its configuration and notes."""
    changes = {"icl_tasks": TASKS, "eval_interval": "2ba", "callbacks__async_eval": ASYNC_EVAL, **changes}
    loaded = load_train_config([write_config(folder / "tiny.yaml", tiny_config(folder / "data", **changes))])
    return loaded.config, loaded.notes


@needs("llmfoundry_studies")
def test_the_note_is_the_command_that_evaluates_the_same_tasks(here):
    config, notes = load_run(here, run_name="tiny.2", save_folder="s3://bucket/{run_name}", icl_limit=4)
    [note] = [note for note in notes if "async_eval" in note]
    words, command = note.split("run: ", 1)
    assert words == (
        "tiny.yaml: callbacks.async_eval starts no evaluation here; on any machine that can read the checkpoints, "
    ).replace("tiny.yaml", str(here / "tiny.yaml"))
    program, subcommand, *arguments = shlex.split(command)
    assert (program, subcommand) == ("llmfoundry-lite", "eval")

    followed, tasks, *_ = load_eval_config(arguments)
    assert followed.follow
    assert followed.models == {"tiny_2": "s3://bucket/tiny.2"}
    assert followed.limit == 4
    assert [(task.label, task.num_fewshot) for task in tasks] == [("mine", [0, 3]), ("named", [0])]
    assert config.callbacks.async_eval is not None


def test_tasks_in_a_file_and_another_folder_are_named(here):
    (here / "evals").rename(here / "tasks")
    for norm, option in (("layernorm", ""), ("python:mine:Norm", " trust_code=true")):
        _, notes = load_run(here, icl_tasks="tasks/named.yaml", icl_task_folder="tasks", model__norm_type=norm)
        assert notes[-1].endswith(
            "run: llmfoundry-lite eval follow=true models.tiny=runs/tiny icl_tasks=tasks/named.yaml "
            f"task_folder=tasks{option}"
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"icl_tasks": []},
            "callbacks.async_eval: there are no icl_tasks that it could evaluate; name them, or remove",
        ),
        ({"callbacks__async_eval": {"intervals": "1ba"}}, "callbacks.async_eval.intervals: unknown key"),
    ],
)
def test_what_has_no_counterpart_is_refused(here, changes, message):
    with pytest.raises(ConfigError) as error:
        load_run(here, eval_interval=0, **changes)
    assert message in str(error.value)
