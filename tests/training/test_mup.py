"""Runs with muP: learning rates of each kind, on other ranks, resumed, in stages and with divided layers."""

import pytest
import torch

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors, open_checkpoint
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, run, saves
from tests.helpers.tiny import tiny_config, write_data

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MUP = {"base_width": 16, "base_head_dim": 4, "embedding_mult": 2.0}
"""The tiny model's width is 32, and its heads have 8 dimensions."""
SHARDED = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
LAYOUTS = {
    "sharded": (2, SHARDED),
    "ZeRO-1": (3, {"fsdp_config": {"sharding_strategy": "ZERO_1"}}),
    "stages": (2, {"pp_config": {"pipeline_parallel_degree": 2}}),
}
DIVIDED = {
    "tensor": (2, {"tp_config": {"tensor_parallel_degree": 2}}),
    "context": (2, {"cp_config": {"context_parallel_degree": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `whole`, a run of 6 batches on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data")
    run(folder, config(folder), "whole")
    return folder


def config(folder, **changes):
    options = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    options |= {"save_interval": "2ba", "autoresume": True, "exact_sums": True, "model__mup": MUP}
    optimizer = {"name": "decoupled_adamw", "lr": 1e-2, "weight_decay": 1e-3, "eps": 1e-6}
    return tiny_config(folder / "data", **{**options, "optimizer": optimizer, **changes})


def weights(folder, name):
    return load_full_tensors(str(saves(folder, name) / "ba6"))


def assert_bit_equal(folder, name, expected="whole"):
    assert losses(folder, name) == losses(folder, expected) and len(losses(folder, name)) == 6
    there, here = weights(folder, expected), weights(folder, name)
    assert [key for key in there if not torch.equal(there[key], here[key])] == []


@pytest.mark.parametrize("layout", [*LAYOUTS])
@needs("llmfoundry_layouts")
def test_it_carries_on_on_other_ranks_bit_equal(folder, layout):
    num_ranks, options = LAYOUTS[layout]
    run(folder, config(folder), f"to-{layout}", stop_at="4ba")
    run(folder, config(folder), f"to-{layout}", num_ranks, **options)
    assert_bit_equal(folder, f"to-{layout}")
    run(folder, config(folder), f"from-{layout}", num_ranks, stop_at="4ba", **options)
    run(folder, config(folder), f"from-{layout}")
    assert_bit_equal(folder, f"from-{layout}")


@pytest.mark.parametrize("layout", [*DIVIDED])
@needs("llmfoundry_layouts")
def test_divided_layers_and_samples_train_the_same(folder, layout):
    num_ranks, options = DIVIDED[layout]
    run(folder, config(folder, exact_sums=False), layout, num_ranks, **options)
    assert losses(folder, layout) == pytest.approx(losses(folder, "whole"), rel=1e-4)


def test_a_checkpoint_has_the_rates_of_both_groups(folder):
    groups = open_checkpoint(saves(folder, "whole") / "ba6").manifest.optimizer["groups"]
    base, hidden = (group["options"] for group in groups)
    assert base["initial_lr"] == 1e-2 and hidden["initial_lr"] == 5e-3
    # A step shrinks all weights by weight_decay * lr / initial lr.
    assert base["weight_decay"] * 1e-2 == pytest.approx(hidden["weight_decay"] * 5e-3) == pytest.approx(1e-3)
    assert base["eps"] == hidden["eps"] == 5e-7
    assert all("blocks" in name and name.endswith("weight") for name in groups[1]["params"])
    assert len(groups[1]["params"]) == 8


@pytest.mark.parametrize(("adjust_lr_fn", "factor"), [("match_rms_adamw", 0.5**0.5), ("original", 1.0)])
def test_muon_has_a_rate_of_its_own_for_matrices(folder, adjust_lr_fn, factor):
    name = f"muon-{adjust_lr_fn}"
    muon = {"name": "muon", "lr": 2e-2, "adamw_lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr_fn}
    run(folder, config(folder, optimizer=muon), f"{name}-whole")
    run(folder, config(folder, optimizer=muon), name, stop_at="2ba")
    run(folder, config(folder, optimizer=muon), name, 2, **SHARDED)
    assert_bit_equal(folder, name, f"{name}-whole")
    matrices, others, _ = open_checkpoint(saves(folder, name) / "ba6").manifest.optimizer["groups"]
    assert matrices["options"]["initial_lr"] == pytest.approx(2e-2 * factor)
    assert matrices["options"]["weight_decay"] == pytest.approx(0.1 / factor)
    assert others["options"]["initial_lr"] == 1e-2 and others["options"]["weight_decay"] == 0.1


@pytest.mark.parametrize("optimizer", ["decoupled_adamw", "muon"])
def test_at_the_base_width_nothing_changes(folder, optimizer):
    options = {"optimizer": {"name": optimizer, "lr": 1e-2, "weight_decay": 0.01}}
    plain = config(folder, **options)
    del plain["model"]["mup"]
    run(folder, plain, f"plain-{optimizer}", 2)
    run(folder, config(folder, model__mup={"base_width": 32}, **options), f"base-{optimizer}", 2)
    assert_bit_equal(folder, f"base-{optimizer}", f"plain-{optimizer}")


def test_another_base_in_mid_run_is_refused(folder):
    name = "changed"
    run(folder, config(folder), name, stop_at="2ba")
    refused = attempt(folder, config(folder, model__mup={**MUP, "base_width": 8}), name)
    assert refused.exit_codes == [2]
    assert "model.mup.base_width is 8 here and 16 in the checkpoint" in refused.output
    plain = config(folder)
    del plain["model"]["mup"]
    assert "model.mup is null here and" in attempt(folder, plain, name).output


def test_another_learning_rate_in_mid_run_scales_both_groups(folder):
    name = "another-rate"
    run(folder, config(folder), name, stop_at="2ba")
    optimizer = {**config(folder)["optimizer"], "lr": 2e-2}
    run(folder, config(folder, optimizer=optimizer), name)
    groups = open_checkpoint(saves(folder, name) / "ba6").manifest.optimizer["groups"]
    assert [group["options"]["initial_lr"] for group in groups] == [2e-2, 1e-2]
