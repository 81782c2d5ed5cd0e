"""status.json of a run under way, and the export at its end. A failed export does not undo the training."""

import datetime
import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer.core import Callback
from safetensors.torch import load_file

from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.status import read_status, write_status
from llmfoundry_lite.training import run_folder
from llmfoundry_lite.training import train as training
from tests.helpers.present import needs
from tests.helpers.runs import copy_save, run, saved_names, status
from tests.helpers.tiny import tiny_config

pytestmark = pytest.mark.multiprocess


class Export(Callback):
    """Collectives may take a second from now on, and rank 0 writes for longer; or its disk is full."""

    def __init__(self, fails: bool):
        self.fails = fails

    def fit_end(self, state, logger):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))
        write = training.export_model

        def export_model(*arguments, **options):
            assert os.environ["RANK"] == "0"
            if self.fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            threading.Event().wait(1.5)
            write(*arguments, **options)

        training.export_model = export_model


class Watch(Callback):
    def __init__(self):
        run_folder.STATUS_SECONDS = 0
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(read_status(Path("runs/run")))

    def fit_end(self, state, logger):
        Path("seen.json").write_text(json.dumps(self.seen))


def test_a_run_can_be_watched(tmp_path, data):
    run(tmp_path, tiny_config(data, max_duration="3ba", callbacks={f"python:{__name__}:Watch": {}}), "run")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [(found["status"], found["batch"], found["reason"]) for found in seen] == [
        ("running", 0, None),
        ("running", 1, None),
        ("running", 2, None),
    ]
    ended = status(tmp_path, "run")
    assert ended.pop("saved_at") > 0
    saves = {"last_saved": "ba3", "failed_saves": 0, "save_error": None}
    assert ended == {"status": "done", "batch": 3, "reason": None, **saves}


@pytest.mark.parametrize("fails", [False, True])
def test_neither_a_slow_nor_a_failed_export_is_the_failure_of_a_run(tmp_path, data, fails):
    callbacks = {f"python:{__name__}:Export": {"fails": fails}}
    config = tiny_config(data, max_duration="2ba", export_at_end=True, callbacks=callbacks)
    result = run(tmp_path, config, "run", 2)
    last = result.output.splitlines()[-1]
    if fails:
        assert last == (
            "not exported to runs/run/huggingface: [Errno 28] No space left on device; "
            "`llmfoundry-lite checkpoint export runs/run runs/run/huggingface` makes up for it"
        )
    else:
        assert last == "exported to runs/run/huggingface"
    assert (tmp_path / "runs/run/huggingface/config.json").exists() != fails
    ended = status(tmp_path, "run")
    assert ended.pop("saved_at") > 0
    saves = {"last_saved": "ba2", "failed_saves": 0, "save_error": None}
    assert ended == {"status": "done", "batch": 2, "reason": None, **saves}
    assert "Traceback" not in "".join(result.outputs)


STAGES = {"pp_config": {"pipeline_parallel_degree": 2}, "device_train_microbatch_size": 2}
LAYERS = {"tp_config": {"tensor_parallel_degree": 2}}
FINISHED_ON: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (2, {}),
    "optimizer sharded": (2, {"fsdp_config": {"sharding_strategy": "ZERO_1"}}),
    "layers": (4, LAYERS),
    "stages": (2, STAGES),
    "stages of shards, two runs each": (4, STAGES | {"pp_config": STAGES["pp_config"] | {"schedule": "interleaved"}}),
    "stages of layers": (4, STAGES | LAYERS),
}


@needs("llmfoundry_layouts")
@pytest.mark.slow
def test_a_run_that_finds_itself_done_is_exported_from_any_layout(tmp_path, data):
    config = tiny_config(data, max_duration="2ba", autoresume=True, export_at_end=True, model__n_layers=4)
    run(tmp_path, config, "whole")
    expected = load_file(tmp_path / "runs/whole/huggingface/model.safetensors")
    for name, (num_ranks, changes) in FINISHED_ON.items():
        folder = name.replace(", ", "-").replace(" ", "-")
        copy_save(tmp_path, "whole", 2, folder)
        said = run(tmp_path, config, folder, num_ranks, **changes).output
        assert f"exported to runs/{folder}/huggingface" in said, f"{name}: {said}"
        assert saved_names(tmp_path, folder) == {"ba2"}
        found = load_file(tmp_path / f"runs/{folder}/huggingface/model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name


@pytest.mark.parametrize("what", ["choose_device", "start_process_group"])
def test_a_launch_that_fails_before_its_process_group_is_on_record(tmp_path, monkeypatch, what):
    def fail(*arguments):
        raise ConfigError("no device")

    monkeypatch.setattr(training, what, fail)
    write_status(tmp_path, "preempted", 7)
    monkeypatch.setattr(training, "raise_when_interrupted", lambda: None)
    config: Any = replace(load_train_config(["mpt-quickstart"]).config, run_folder=str(tmp_path))
    with pytest.raises(ConfigError):
        training.train(config)
    assert read_status(tmp_path) == {"status": "failed", "batch": 7, "reason": "no device"}


def test_a_launch_that_leaves_while_it_exports_says_that_all_is_saved(monkeypatch):
    monkeypatch.setattr(training, "describe_export_problem", lambda model: "no layout holds it")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: SimpleNamespace(set=print))
    preemption, role = SimpleNamespace(saved=None), SimpleNamespace(writes_checkpoints=True)
    checkpointing: Any = SimpleNamespace(newest_url="a/checkpoints/ba2", preemption=preemption, role=role)
    config: Any = SimpleNamespace(model=None)
    run_folder: Any = SimpleNamespace(folder=Path("a"), is_main=True)
    training.export(config, run_folder, checkpointing)
    assert preemption.saved == "ba2"
