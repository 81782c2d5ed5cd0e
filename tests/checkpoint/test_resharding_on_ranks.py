"""Saved on some ranks under some sharding, restored on others under another: the same bits, and the same losses."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError
from tests.checkpoint.ranks import (
    build_stages,
    load_all,
    load_and_continue,
    load_another_stage,
    save_and_load_stages,
    save_at_odd_moments,
    train_and_save,
    whole_state,
)
from tests.helpers.launch import launch

EVERYWHERE = [(1, "plain"), (2, "SHARD_GRAD_OP"), (3, "FULL_SHARD"), (4, "NO_SHARD"), (4, "HYBRID_SHARD")]
CHANGES = [
    (2, "FULL_SHARD", "adamw", [(1, "plain"), (3, "FULL_SHARD")]),
    (4, "HYBRID_SHARD", "lion", [(2, "SHARD_GRAD_OP")]),
    *(
        pytest.param(num_ranks, sharding, optimizer, EVERYWHERE, marks=pytest.mark.slow)
        for num_ranks, sharding, optimizer in [
            *((1, "FULL_SHARD", "adamw"), (2, "NO_SHARD", "adamw"), (3, "SHARD_GRAD_OP", "lion")),
            *((3, "FULL_SHARD", "adamw"), (4, "HYBRID_SHARD", "adamw"), (4, "FULL_SHARD", "adamw")),
        ]
    ),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_ranks", "sharding", "optimizer", "others"), CHANGES)
def test_a_save_is_restored_bit_for_bit_on_other_ranks_and_shardings(tmp_path, num_ranks, sharding, optimizer, others):
    folder = tmp_path / "checkpoints"
    launch(train_and_save, (str(folder), sharding, optimizer), tmp_path, num_ranks).check()
    verify_checkpoint(open_checkpoint(folder / "ba3"))
    saved = load_file(folder / "saved.safetensors")
    for number, (other_ranks, other_sharding) in enumerate(others):
        out = tmp_path / f"out{number}"
        out.mkdir()
        arguments = (str(folder), "ba3", other_sharding, optimizer, str(out))
        launch(load_and_continue, arguments, tmp_path, other_ranks).check()
        loaded = load_file(out / "loaded.safetensors")
        assert loaded.keys() == saved.keys()
        different = [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert not different
        expected = json.loads((folder / "losses.json").read_text())
        assert json.loads((out / "losses.json").read_text()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.multiprocess
def test_saves_before_a_step_after_an_evaluation_and_with_gradients_are_of_the_state_alone(tmp_path):
    folder = tmp_path / "checkpoints"
    launch(save_at_odd_moments, (str(folder), "FULL_SHARD"), tmp_path, 2).check()
    launch(load_all, (str(folder), "FULL_SHARD", ["ba0", "ba1", "ba2"], str(tmp_path)), tmp_path, 3).check()
    for batch in range(3):
        saved, loaded = (
            load_file(p) for p in (folder / f"saved{batch}.safetensors", tmp_path / f"ba{batch}.safetensors")
        )
        assert saved.keys() == loaded.keys()
        assert not [name for name in saved if not torch.equal(saved[name], loaded[name])]
    nothing_trained = open_checkpoint(folder / "ba0").manifest
    assert nothing_trained.optimizer is not None
    assert nothing_trained.optimizer["state"] == {}, "no step counted, by a dummy step or otherwise"


@pytest.mark.multiprocess
def test_whole_tensors_need_no_process_group(tmp_path):
    folder = tmp_path / "checkpoints"
    launch(train_and_save, (str(folder), "FULL_SHARD"), tmp_path, 3).check()
    saved = load_file(folder / "saved.safetensors")
    weights = load_full_tensors(folder / "ba3")
    assert torch.equal(weights["embed.weight"], saved["model/embed.weight"])
    assert weights["head.weight"] is weights["embed.weight"]
    assert {f"model/{name}" for name in weights} == {n for n in saved if n.startswith("model/")} | {"model/head.weight"}


@pytest.mark.multiprocess
def test_ranks_may_hold_different_tensors_of_one_model(tmp_path):
    """Two pipeline stages save; another number of stages restores."""
    folder = tmp_path / "checkpoints"
    launch(save_and_load_stages, (str(folder),), tmp_path, 2).check()
    verify_checkpoint(open_checkpoint(folder / "ba1"))
    expected, found = build_stages([0, 1]), build_stages([0, 1], seed=1)
    load(folder / "ba1", *found)
    expected, found = whole_state(*expected), whole_state(*found)
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    launch(load_another_stage, (str(folder / "ba1"),), tmp_path, 2).check()
    half, half_optimizer = build_stages([0])
    with pytest.raises(CheckpointError, match=r"the checkpoint has model/layers.1.bias"):
        load(folder / "ba1", half, half_optimizer)
