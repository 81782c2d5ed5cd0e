"""Any value under any key of a YAML is accepted, or refused in one line."""

import copy
import dataclasses
import errno
import os
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from llmfoundry_lite.config.eval_schema import EvalConfig, TaskConfig
from llmfoundry_lite.config.load_eval import load_eval_config
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.scalars import EVAL_SYNONYMS, TASK_SYNONYMS
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import ConfigError
from tests.helpers.tiny import tiny_config, write_config

VALUES: tuple[Any, ...] = ([], ["1ba"], [{}], {"a": 1}, None, 7, True, "x" * 5000)


def find_keys(schema: type) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of a schema, and of the blocks in it."""
    for name, hint in get_type_hints(schema).items():
        yield (name,)
        hints = [hint]
        while hints:
            one = hints.pop()
            hints += get_args(one)
            if dataclasses.is_dataclass(one) and isinstance(one, type):
                yield from ((name, *rest) for rest in find_keys(one))


def lay_in(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of the configuration with this value; in a list of blocks, in the first one."""
    changed = copy.deepcopy(config)
    block: Any = changed
    for key in keys[:-1]:
        if not isinstance(block.get(key), dict | list):
            block[key] = {}
        block = block[key]
        if isinstance(block, list):
            block = block[0]
    block[keys[-1]] = value
    return changed


def load_or_refuse(load, path, config) -> None:
    """Load a configuration, which may raise a ConfigError of one line and nothing else."""
    try:
        load([write_config(path, config)])
    except ConfigError as error:
        assert str(error).isprintable()


@pytest.fixture
def evaluation(tmp_path):
    task = {"label": "t", "icl_task_type": "language_modeling", "dataset_uri": "t.jsonl"}
    return {"models": {"a": str(tmp_path)}, "icl_tasks": [task]}


def test_a_precision_of_an_evaluation_that_is_no_word_is_refused(tmp_path, evaluation):
    for precision in ([], ["1ba"], {"a": 1}):
        path = write_config(tmp_path / "eval.yaml", evaluation | {"precision": precision})
        with pytest.raises(ConfigError, match=r"eval.yaml: precision: .* given, expected text"):
            load_eval_config([path])


def test_a_name_that_is_too_long_for_a_file_is_refused(tmp_path, evaluation):
    long = "x" * 5000
    for tasks in ([long], f"{long}.yaml", [f"{long}.yaml"]):
        with pytest.raises(ConfigError):
            load_eval_config([write_config(tmp_path / "eval.yaml", evaluation | {"icl_tasks": tasks})])
    task = evaluation["icl_tasks"][0] | {"dataset_uri": long}
    with pytest.raises(ConfigError, match="the data of every task"):
        load_eval_config(
            [write_config(tmp_path / "eval.yaml", evaluation | {"icl_tasks": [task], "skip_missing_tasks": True})]
        )


def test_a_disk_that_does_not_answer_is_not_taken_for_one_without_the_data(tmp_path, evaluation, monkeypatch):
    """Else a task would be left out on one rank of many."""
    path = write_config(tmp_path / "eval.yaml", evaluation | {"skip_missing_tasks": True})
    stat = os.stat

    def stat_on_a_lost_mount(name, **options):
        if str(name) == "t.jsonl":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(name, **options)

    monkeypatch.setattr(os, "stat", stat_on_a_lost_mount)
    with pytest.raises(OSError, match="Stale file handle"):
        load_eval_config([path])


@pytest.mark.slow
def test_any_value_of_an_evaluation_is_accepted_or_refused(tmp_path, evaluation):
    keys = [*find_keys(EvalConfig), *((name,) for name in EVAL_SYNONYMS), ("model",), ("model", "name")]
    keys += [("icl_tasks", *path) for path in find_keys(TaskConfig)] + [("icl_tasks", name) for name in TASK_SYNONYMS]
    for path in keys:
        for value in VALUES:
            load_or_refuse(load_eval_config, tmp_path / "eval.yaml", lay_in(evaluation, path, value))


@pytest.mark.slow
def test_any_value_of_a_run_is_accepted_or_refused(tmp_path, data):
    config = tiny_config(data)
    for path in find_keys(TrainConfig):
        for value in VALUES:
            load_or_refuse(load_train_config, tmp_path / "tiny.yaml", lay_in(config, path, value))
