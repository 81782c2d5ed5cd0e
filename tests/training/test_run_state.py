"""Records of a launch, and which differences between two launches change the last digits."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Callback, Timestamp

from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.training import run_state
from llmfoundry_lite.training.gradient_step import LossScaler
from llmfoundry_lite.training.run_state import RunState, _collect_data_state, find_differences


def test_each_setting_that_changes_digits_is_named():
    words = {
        "device": ("device", "H100", "MI250"),
        "num_devices": ("devices", 8, 4),
        "runtime": ("runtime", "CUDA 13", "ROCm 7"),
        "torch": ("torch", "2.13", "2.11"),
        "sharding": ("sharding", "FULL_SHARD", "NO_SHARD"),
        "shard_degree": ("shard degree", None, 2),
        "tensor_parallel_degree": ("tensor parallel degree", 2, None),
        "context": ("context parallel", None, "2, heads"),
        "pipeline": ("pipeline", "2 stages, 1f1b", None),
        "device_train_microbatch_size": ("microbatch", 4, 1),
        "precision": ("precision", "amp_bf16 DEFAULT", "fp32 DEFAULT"),
        "attention": ("attention", "sdpa", "flex"),
        "reduction": ("reduction after", "each batch", "each microbatch"),
        "num_threads": ("threads of a rank", 1, 2),
    }
    first = Segment(first_batch=1, last_batch=2, **{field: before for field, (_, before, _) in words.items()})
    assert find_differences(first, replace(first, first_batch=3, last_batch=9, driver="other")) == []
    for field, (name, before, now) in words.items():
        said = f"{name} {'none' if before is None else before} -> {'none' if now is None else now}"
        assert find_differences(first, replace(first, **{field: now})) == [said]
    here = replace(first, device_train_microbatch_size=None, compile_config={"mode": "default"}, environment={"A": "1"})
    assert find_differences(first, here) == ['compile_config none -> {"mode": "default"}', "A none -> 1"]


def test_the_place_in_the_data_counts_the_padding_of_an_epoch_s_last_batch(monkeypatch):
    """Composer counts samples; the next epoch begins behind the whole batch."""
    dataset: Any = TextDataset.__new__(TextDataset)
    dataset.global_batch_size = 8
    dataset.joins_batches = False
    monkeypatch.setattr(TextDataset, "state_dict", lambda self, num_samples, *_: {"samples": num_samples})
    timestamp = Timestamp(batch=13, batch_in_epoch=3, sample_in_epoch=21)
    state: Any = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=dataset), timestamp=timestamp)
    assert _collect_data_state(state) == {"samples": 24}
    others = SimpleNamespace(state_dict=lambda num_samples, *_: {"samples": num_samples})
    state.train_dataloader.dataset = others
    assert _collect_data_state(state) == {"samples": 21}


def test_restored_scalars_are_those_that_were_collected(tmp_path):
    config: Any = SimpleNamespace(run_folder=str(tmp_path), seed=17, callbacks=SimpleNamespace(extra={}))

    def state_at(timestamp: Timestamp) -> Any:
        return SimpleNamespace(timestamp=timestamp, train_dataloader=None, callbacks=[])

    step: Any = SimpleNamespace(scaler=LossScaler(scale=8.0, num_sound_batches=3))
    saved = RunState(config, step, owes_evaluation=True).collect(state_at(Timestamp(batch=13, sample=104)))
    scaler, state = LossScaler(), state_at(Timestamp())
    next_step: Any = SimpleNamespace(scaler=scaler)
    next_launch = RunState(config, next_step)
    next_launch.restore(json.loads(json.dumps(saved)), state)
    assert next_launch.owes_evaluation
    assert (scaler.scale, scaler.num_sound_batches) == (8.0, 3)
    assert (int(state.timestamp.batch), int(state.timestamp.sample)) == (13, 104)


class Counter(Callback):
    count = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_state_of_a_callback_is_found_by_the_name_of_an_earlier_release_and_the_rest_is_told(tmp_path, capsys):
    """Earlier checkpoints name the module that defines a class, a YAML the package that hands it out."""
    config: Any = SimpleNamespace(run_folder=str(tmp_path), seed=17, callbacks=SimpleNamespace(extra={}))
    step: Any = SimpleNamespace(scaler=None)
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=2), train_dataloader=None, callbacks=[])
    saved = RunState(config, step).collect(state)
    defined_as = f"{Counter.__module__}:Counter"
    for states, count, told in (
        ({defined_as: {"count": 3}}, 3, ""),
        ({"package:Counter": {"count": 4}}, 4, ""),
        ({"package:Counter": {"count": 5}, "gone:Other": {"a": 1}, "gone:Empty": {}}, 5, "the state of gone:Other,"),
    ):
        counter = Counter()
        RunState(config, step, callbacks={"package:Counter": counter}).restore({**saved, "callbacks": states}, state)
        written = capsys.readouterr().err
        assert counter.count == count and told in written and bool(written) == bool(told)


class Average(Callback):
    def __init__(self, value: Any):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


def test_a_callback_s_state_that_no_checkpoint_holds_is_refused():
    sound: Any = RunState(*[SimpleNamespace()] * 2, callbacks={"mine:Average": Average([1.5, (None, b"a")])})
    sound.check_callbacks()
    unsound: Any = RunState(*[SimpleNamespace()] * 2, callbacks={"mine:Average": Average(torch.ones(1))})
    message = r"^scalars.callbacks.mine:Average.value: torch.Tensor given, expected None, bool, int, float, str, bytes"
    with pytest.raises(CheckpointError, match=message):
        unsound.check_callbacks()


def test_a_save_keeps_the_wandb_id_of_a_folder_that_refuses_access(tmp_path, monkeypatch):
    """`chmod` while it trains: checkpoints elsewhere can be written, and another machine continues the run at wandb."""

    def refuse(folder: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "wandb_id").write_text("1a2b3c4d\n")
    config: Any = SimpleNamespace(run_folder=str(tmp_path), seed=17, callbacks=SimpleNamespace(extra={}))
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=2), train_dataloader=None, callbacks=[])
    records = RunState(config, SimpleNamespace(scaler=None))  # type: ignore[arg-type]
    ids = [records.collect(state)["wandb_run_id"]]
    monkeypatch.setattr(run_state, "wandb_run_id", refuse)
    ids.append(records.collect(state)["wandb_run_id"])
    assert ids == ["1a2b3c4d", "1a2b3c4d"]
