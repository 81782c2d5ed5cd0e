"""Whatever the moment of a save and wherever it is carried on: the same state, and the same losses after it."""

import pytest
import torch
from composer.core import Callback

from llmfoundry_lite.checkpoint.store import open_checkpoint
from tests.helpers.resave import assert_same_state, resave_into
from tests.helpers.runs import attempt, carry_on, losses, metrics, run, saves
from tests.helpers.tiny import tiny_config, values

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}


class Freeze(Callback):
    """One weight is not trained, though the optimizer was built with it."""

    def fit_start(self, state, logger):
        frozen = [p for name, p in state.model.named_parameters() if name.endswith("blocks.0.ffn.up_proj.weight")]
        assert len(frozen) == 1
        frozen[0].requires_grad_(False)


POISON = {"python:tests.training.test_failures:PoisonGradient": {"rank": 1, "batch": 4}}


def callback(kind, **arguments):
    return {f"python:{__name__}:{kind.__name__}": arguments}


def assert_same_metrics(tmp_path, name, other):
    a, b = metrics(tmp_path, name), metrics(tmp_path, other)
    for key in ("loss/train/total", "data/digest", "lr", "grad_norm", "eval/loss", "time/token"):
        assert values(a, key) == values(b, key), key


def test_workers_dropout_an_evaluation_before_the_save_and_an_epochs_end_change_no_bit(tmp_path, data):
    config = tiny_config(
        data,
        autoresume=True,
        max_duration="15ba",
        eval_interval="2ba",
        global_train_batch_size=40,  # 12 batches an epoch
        train_loader__num_workers=2,
        model__resid_pdrop=0.1,
        fsdp_config__activation_checkpointing=True,
    )
    run(tmp_path, config, "whole", 2)
    for stop_after in ("8ba", "4ba", None):  # amid an epoch right after an evaluation; with the epoch's last batch
        run(tmp_path, config, "parts", 2, stop_after=stop_after)
    assert_same_metrics(tmp_path, "parts", "whole")
    assert_same_state(saves(tmp_path, "parts") / "ba15", saves(tmp_path, "whole") / "ba15")


def test_a_save_right_after_a_skipped_batch_carries_on_from_there(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="8ba", on_non_finite="skip", callbacks=POISON)
    run(tmp_path, config, "whole", 2)
    run(tmp_path, config, "parts", 2, stop_after="4ba")
    run(tmp_path, config, "parts", 2)
    assert [record["batch"] for record in metrics(tmp_path, "parts") if "skipped_batches" in record] == [4]
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")


@pytest.mark.slow
def test_a_frozen_weight_stays_as_it_was_and_needs_no_optimizer_state(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="6ba", save_interval="3ba", callbacks=callback(Freeze))
    run(tmp_path, config, "whole", 2)
    manifest = open_checkpoint(saves(tmp_path, "whole") / "ba3").manifest
    trained = {name.split("/")[1] for name in manifest.tensors if name.startswith("optim/")}
    untrained = {name.removeprefix("model/") for name in manifest.tensors if name.startswith("model/")} - trained
    assert len(untrained) == 1
    carry_on(tmp_path, config, "whole", 3, "same", 2)
    carry_on(tmp_path, config, "whole", 3, "other", 4, fsdp_config=HYBRID)
    assert losses(tmp_path, "same") == losses(tmp_path, "whole")[3:]
    assert losses(tmp_path, "other") == pytest.approx(losses(tmp_path, "whole")[3:], abs=1e-4)
    for name in ("same", "other"):
        assert_same_state(saves(tmp_path, "whole") / "ba3", tmp_path / f"resaved/{name}/ba3")


def test_a_save_before_the_first_batch_holds_no_step_and_leaves_the_run_alone(tmp_path, data):
    config = tiny_config(data, max_duration="3ba")
    run(tmp_path, config, "plain", 2)
    run(tmp_path, config, "saved", 2, callbacks=resave_into(tmp_path / "resaved"))
    manifest = open_checkpoint(tmp_path / "resaved/ba0").manifest
    assert manifest.optimizer is not None
    assert manifest.optimizer["groups"]
    assert manifest.optimizer["state"] == {}
    assert not [name for name in manifest.tensors if name.startswith("optim/")]
    assert losses(tmp_path, "saved") == losses(tmp_path, "plain")


def test_a_state_that_no_training_run_saved_gives_its_weights_and_no_more(tmp_path, data):
    config = tiny_config(data, max_duration="2ba")
    run(tmp_path, config, "run", callbacks=resave_into(tmp_path / "resaved"))
    config["load_path"] = str(tmp_path / "resaved/ba0")
    refused = attempt(tmp_path, config, "other")
    assert refused.exit_codes == [2]
    assert "was not saved by a training run; load_weights_only=true" in refused.output
    run(tmp_path, config, "other", load_weights_only=True)
    assert losses(tmp_path, "other") == losses(tmp_path, "run")


@pytest.mark.slow
def test_another_precision_finds_the_same_state(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="12ba", save_interval="3ba")
    run(tmp_path, config, "fp32")
    carry_on(tmp_path, config, "fp32", 3, "bf16", precision="amp_bf16")
    carry_on(tmp_path, config, "bf16", 6, "fp16", precision="amp_fp16")
    carry_on(tmp_path, config, "fp16", 9, "back")
    for there, batch, here in (("fp32", 3, "bf16"), ("bf16", 6, "fp16"), ("fp16", 9, "back")):
        assert_same_state(saves(tmp_path, there) / f"ba{batch}", tmp_path / f"resaved/{here}/ba{batch}")
        whole = losses(tmp_path, "fp32")
        assert losses(tmp_path, here) == pytest.approx(whole[batch:], abs=0.06)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_takes_up_what_a_cpu_left_and_the_other_way_round(tmp_path, data):
    cpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    config = tiny_config(data, autoresume=True, max_duration="9ba", save_interval="3ba")
    run(tmp_path, config, "cpu", env=cpu)
    carry_on(tmp_path, config, "cpu", 3, "gpu")
    carry_on(tmp_path, config, "gpu", 6, "back", env=cpu)
    for there, batch, here in (("cpu", 3, "gpu"), ("gpu", 6, "back")):
        assert_same_state(saves(tmp_path, there) / f"ba{batch}", tmp_path / f"resaved/{here}/ba{batch}")
        assert losses(tmp_path, here) == pytest.approx(losses(tmp_path, "cpu")[batch:], abs=2e-3)


@pytest.mark.slow
def test_every_world_and_sharding_takes_up_what_the_one_before_left(tmp_path, data):
    config = tiny_config(
        data,
        autoresume=True,
        max_duration="16ba",
        global_train_batch_size=12,
        model__d_model=8,  # norms are smaller than four ranks' rows
        model__n_heads=2,
        model__no_bias=True,
    )
    run(tmp_path, config, "whole")
    launches = [
        (1, None),
        (3, {"sharding_strategy": "FULL_SHARD"}),
        (4, HYBRID),
        (2, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (4, {"sharding_strategy": "FULL_SHARD"}),
        (2, {"sharding_strategy": "NO_SHARD"}),
        (3, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (1, {"sharding_strategy": "FULL_SHARD"}),
    ]
    for number, (num_ranks, sharding) in enumerate(launches):
        resaved = tmp_path / f"resaved/{number}"
        changes = {"stop_after": "2ba", "fsdp_config": sharding, "callbacks": resave_into(resaved)}
        run(tmp_path, config, "moved", num_ranks, **changes)
        if number:
            assert_same_state(saves(tmp_path, "moved") / f"ba{2 * number}", resaved / f"ba{2 * number}")
    assert values(metrics(tmp_path, "moved"), "data/digest") == values(metrics(tmp_path, "whole"), "data/digest")
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), abs=1e-4)


def test_a_run_with_plain_parameters_goes_on_sharded_and_the_other_way_round(tmp_path, data):
    config = tiny_config(
        data,
        autoresume=True,
        max_duration="12ba",
        save_interval="3ba",
        eval_interval="2ba",
        precision="amp_bf16",
        device_train_microbatch_size=4,
        compile_config={"backend": "aot_eager"},
    )
    plain = {"plain_on_one_device": True}
    run(tmp_path, config, "whole")
    carry_on(tmp_path, config, "whole", 3, "plain", fsdp_config=plain)
    carry_on(tmp_path, config, "plain", 6, "shared", 2)
    # Sizes are tried with the first weights, before the checkpoint is read.
    carry_on(tmp_path, config, "shared", 9, "back", fsdp_config=plain, device_train_microbatch_size="auto")
    for there, batch, here in (("whole", 3, "plain"), ("plain", 6, "shared"), ("shared", 9, "back")):
        assert_same_state(saves(tmp_path, there) / f"ba{batch}", tmp_path / f"resaved/{here}/ba{batch}")
    whole = metrics(tmp_path, "whole")
    for key in ("loss/train/total", "grad_norm", "data/digest", "eval/loss"):
        assert values(metrics(tmp_path, "plain"), key) == values(whole[3:], key), key
    assert_same_state(saves(tmp_path, "plain") / "ba12", saves(tmp_path, "whole") / "ba12")
    for here, batch in (("shared", 6), ("back", 9)):
        assert values(metrics(tmp_path, here), "data/digest") == values(whole[batch:], "data/digest")
        assert losses(tmp_path, here) == pytest.approx(losses(tmp_path, "whole")[batch:], abs=0.03)
