"""A run that is stopped and carried on is the run that was not."""

import pytest
import torch
from composer.core import Callback

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.data.tokenizer import train_tokenizer
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, metrics, run, saved_names, saves, status
from tests.helpers.tiny import tiny_config, values, write_data

pytestmark = pytest.mark.multiprocess

RESTORE = "checkpoint/restore_seconds"
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}


class CountBatches(Callback):
    """A callback of a user's own, with a state."""

    def __init__(self):
        self.history: list[int] = []

    def batch_end(self, state, logger):
        self.history.append(int(state.timestamp.batch))
        logger.log_metrics({"counted": len(self.history)})

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


def test_on_the_same_ranks_the_losses_after_a_stop_are_bit_equal(tmp_path, data):
    callbacks = {f"python:{__name__}:CountBatches": {}}
    config = tiny_config(data, autoresume=True, max_duration="9ba", eval_interval="3ba", callbacks=callbacks)
    run(tmp_path, config, "whole", 2)
    run(tmp_path, config, "parts", 2, stop_after="4ba")
    assert status(tmp_path, "parts")["status"] == "stopped"
    run(tmp_path, config, "parts", 2)
    whole, parts = metrics(tmp_path, "whole"), metrics(tmp_path, "parts")
    for key in ("loss/train/total", "data/digest", "lr", "grad_norm", "eval/loss", "time/token", "counted"):
        assert values(parts, key) == values(whole, key), key
    restored = {record["batch"]: record[RESTORE] > 0 for record in parts if RESTORE in record}
    assert restored == {5: True} and not values(whole, RESTORE)


@pytest.mark.slow
def test_across_worlds_shardings_and_epochs_the_data_is_the_same_and_the_losses_agree(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="130ba", global_train_batch_size=8)
    run(tmp_path, config, "whole")
    launches = [
        (1, {"stop_after": "40ba"}),
        (4, {"stop_after": "22ba", "fsdp_config": HYBRID}),  # ends with the epoch's last batch, 62
        (2, {"stop_after": "30ba", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}),
        (2, {"fsdp_config": None, "device_train_microbatch_size": 1}),
    ]
    for num_ranks, changes in launches:
        output = run(tmp_path, config, "moved", num_ranks, **changes).output
    assert "carrying on from" in output
    assert "sharding SHARD_GRAD_OP -> NO_SHARD" in output
    whole, switched = metrics(tmp_path, "whole"), metrics(tmp_path, "moved")
    assert values(switched, "data/digest") == values(whole, "data/digest")
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "whole"), abs=1e-3)
    segments = open_checkpoint(saves(tmp_path, "moved") / "ba130").manifest.segments
    assert [(s.first_batch, s.last_batch, s.world_size) for s in segments] == [
        *((1, 40, 1), (41, 62, 4), (63, 92, 2), (93, 130, 2))
    ]


def test_a_finished_run_launched_again_is_done(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="3ba")
    run(tmp_path, config, "done")
    again = run(tmp_path, config, "done")
    assert "nothing is trained: the run is done at batch 3, with max_duration=3ba" in again.output
    saves = {"last_saved": "ba3", "saved_at": None, "failed_saves": 0, "save_error": None}
    assert status(tmp_path, "done") == {"status": "done", "batch": 3, "reason": None, **saves}
    assert len(metrics(tmp_path, "done")) == 3


def test_a_run_never_starts_over_on_top_of_another(tmp_path, data):
    config = tiny_config(data, max_duration="2ba")
    run(tmp_path, config, "one")
    refused = attempt(tmp_path, config, "one")
    assert refused.exit_codes == [2]
    assert "already holds ba2 of this run; carry on with autoresume=true, or choose another run_name" in refused.output


def test_retention_keeps_the_newest_and_every_kth_and_each_save_is_measured(tmp_path, data):
    config = tiny_config(
        data, max_duration="9ba", save_interval="1ba", save_num_checkpoints_to_keep=2, save_keep_every_batches=4
    )
    run(tmp_path, config, "run")
    assert saved_names(tmp_path, "run") == {"ba4", "ba8", "ba9"}
    measured = [record for record in metrics(tmp_path, "run") if "checkpoint/bytes" in record]
    assert measured
    manifest = open_checkpoint(saves(tmp_path, "run") / "ba9").manifest
    for record in measured:
        assert 0 < record["checkpoint/stall_seconds"] < record["checkpoint/durable_seconds"]
        assert record["checkpoint/bytes"] == pytest.approx(manifest.num_bytes, rel=0.01)


def make_tokenizer(folder, text):
    train_tokenizer([text], 300).save(folder)
    return {"name": str(folder)}


def test_another_model_tokenizer_data_or_batch_size_is_refused_by_name(tmp_path, data):
    config = tiny_config(
        data, max_duration="2ba", tokenizer=make_tokenizer(tmp_path / "ours", "abcabcabd"), model__vocab_size=320
    )
    run(tmp_path, config, "base")
    config["max_duration"] = "3ba"
    config["load_path"] = str(saves(tmp_path, "base") / "ba2")

    def dataset(**changes):
        return {"train_loader": {"dataset": {**config["train_loader"]["dataset"], **changes}}}

    for words, changes in {
        "model.d_model is 48 here and 32 in the checkpoint": {"model": {**config["model"], "d_model": 48}},
        "model.no_bias is true here and false in the checkpoint": {"model": {**config["model"], "no_bias": True}},
        "tokenizer is 'sha256:": {"tokenizer": make_tokenizer(tmp_path / "theirs", "xyxyxz")},
        "global_train_batch_size is 4 here and 8": {"global_train_batch_size": 4},
        "the data is not what the checkpoint was trained with": dataset(
            local=str(write_data(tmp_path / "data", num_train=400))
        ),
        "shuffle_seed is 4": dataset(shuffle_seed=4),
    }.items():
        refused = attempt(tmp_path, config, "other", **changes)
        assert refused.exit_codes == [2], words
        assert words in refused.output
        assert "Traceback" not in refused.output
    run(tmp_path, config, "same")


def test_weights_alone_begin_a_new_run(tmp_path, data):
    config = tiny_config(data, max_duration="20ba")
    run(tmp_path, config, "base")
    fresh = {"load_path": str(saves(tmp_path, "base")), "load_weights_only": True, "max_duration": "2ba"}
    output = run(tmp_path, config, "fresh", **fresh).output
    assert f"starting from the weights of {saves(tmp_path, 'base')}/ba20" in output and "carrying on" not in output
    assert losses(tmp_path, "fresh")[0] < losses(tmp_path, "base")[0] - 1
    other = run(tmp_path, config, "other", **fresh, model=config["model"] | {"norm_eps": 0.1})
    assert "the checkpoint's model differs: model.norm_eps 1e-05 -> 0.1\n" in other.output


class Weights(torch.nn.Module):
    """Tensors under given names, dots and all."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(tensor))


@pytest.mark.slow
def test_weights_may_come_in_another_dtype_and_in_part_if_that_is_said(tmp_path, data):
    config = tiny_config(data, max_duration="20ba")
    run(tmp_path, config, "base")
    weights = {name: w.bfloat16() for name, w in load_full_tensors(saves(tmp_path, "base") / "ba20").items()}
    bias = next(name for name in weights if name.endswith("bias"))
    del weights[bias]
    saver = Saver(CheckpointStore(tmp_path / "halves"))
    saver.take_lease()
    saver.save(Weights(weights), None, SaveMetadata(timestamp=Timestamp(batch=1)))
    saver.wait()
    config |= {"load_path": str(tmp_path / "halves/ba1"), "load_weights_only": True, "max_duration": "1ba"}
    refused = attempt(tmp_path, config, "refused")
    assert refused.exit_codes == [2]
    assert f"this run has model/{bias}, which the checkpoint lacks" in refused.output
    assert "load_ignore_keys" in refused.output
    config["load_ignore_keys"] = [f"model/{bias}"]
    refused = attempt(tmp_path, config, "refused")
    assert refused.exit_codes == [2]
    assert "is BF16, this run keeps F32" in refused.output
    run(tmp_path, config, "taken", load_cast=True)
    assert losses(tmp_path, "taken")[0] < losses(tmp_path, "base")[0] - 1


def test_fp16_carries_its_loss_scale(tmp_path, data):
    poison = {"python:tests.training.test_failures:PoisonGradient": {"rank": 0, "batch": 2}}
    config = tiny_config(data, autoresume=True, max_duration="6ba", precision="amp_fp16", callbacks=poison)
    run(tmp_path, config, "whole")
    run(tmp_path, config, "parts", stop_after="3ba")
    run(tmp_path, config, "parts")
    assert values(metrics(tmp_path, "parts"), "loss_scale") == [2.0**16, 2.0**16, *[2.0**15] * 4]
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")


@needs("llmfoundry_layouts")
@pytest.mark.slow
def test_fp16_skips_the_same_batches_on_any_number_of_ranks(tmp_path, data):
    """Gradients times 2^24 overflow, and which lower scale they stand follows from the data alone."""
    large = {"python:tests.training.test_failures:LargeScale": {"scale": 2.0**24}}
    shape = {"device_train_microbatch_size": 1, "max_duration": "8ba"}
    config = tiny_config(data, precision="amp_fp16", callbacks=large, **shape)
    found = {}
    for name, (num_ranks, layout) in {
        "1": (1, {}),
        "2": (2, {}),
        "4": (4, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}}),
        "parts": (2, {"cp_config": {"context_parallel_degree": 2}}),
        "stages": (2, {"pp_config": {"pipeline_parallel_degree": 2}}),
    }.items():
        run(tmp_path, config, name, num_ranks, **layout)
        found[name] = values(metrics(tmp_path, name), "loss_scale"), losses(tmp_path, name)
    scales, expected = found["1"]
    assert scales[0] == 2.0**24 > scales[-1]
    for name, (its_scales, its_losses) in found.items():
        assert (its_scales, its_losses) == (scales, pytest.approx(expected, abs=2e-3)), name


def test_a_refused_launch_takes_no_lease_and_says_why(tmp_path, data):
    """Or else a mistyped command would stop the healthy run on another machine at its next save."""
    config = tiny_config(data, autoresume=True, max_duration="2ba", run_name="tiny")
    run(tmp_path, config, "tiny")
    before = sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints/.leases").iterdir())
    result = attempt(tmp_path, config, "tiny", 2, global_train_batch_size=16, max_duration="4ba")
    assert result.exit_codes == [2, 2]
    assert "global_train_batch_size is 16 here and 8 in the checkpoint" in result.output
    assert sorted(path.name for path in (tmp_path / "runs/tiny/checkpoints/.leases").iterdir()) == before


@pytest.mark.long
def test_a_subset_for_evaluation_is_of_the_same_samples_on_other_ranks_in_other_batches(tmp_path, data):
    changes = {"eval_interval": "2ba", "eval_subset_num_batches": 2, "global_train_batch_size": 12}
    config = tiny_config(data, autoresume=True, max_duration="6ba", **changes)
    run(tmp_path, config, "whole")
    for launch in ((1, "2ba", 4), (2, "2ba", 3), (3, None, 1)):
        run(tmp_path, config, "moved", launch[0], stop_after=launch[1], device_eval_batch_size=launch[2])
    whole, moved = (values(metrics(tmp_path, name), "eval/loss") for name in ("whole", "moved"))
    assert moved == pytest.approx(whole, abs=1e-5) and len(whole) == 3
