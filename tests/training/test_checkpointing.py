"""A run that is stopped and carried on is the run that was not."""

import json

import pytest

from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}


def losses(records):
    return values(records, "loss/train/total")


def run(tmp_path, config, name, num_ranks=1, **changes):
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name, **changes})
    return train([path], tmp_path, num_ranks).check()


def metrics(tmp_path, name):
    return read_metrics(tmp_path / "runs" / name)


@pytest.mark.parametrize("changes", [{}, {"model__resid_pdrop": 0.1}, {"train_loader__num_workers": 2}])
def test_on_the_same_ranks_the_losses_after_a_stop_are_bit_equal(tmp_path, data, changes):
    config = tiny_config(data, autoresume=True, max_duration="9ba", eval_interval="3ba", **changes)
    run(tmp_path, config, "whole", 2)
    run(tmp_path, config, "parts", 2, stop_after="4ba")
    assert json.loads((tmp_path / "runs/parts/status.json").read_text())["status"] == "stopped"
    run(tmp_path, config, "parts", 2)
    whole, parts = metrics(tmp_path, "whole"), metrics(tmp_path, "parts")
    for key in ("loss/train/total", "data/digest", "lr", "grad_norm", "eval/loss", "time/token"):
        assert values(parts, key) == values(whole, key), key


def test_across_worlds_shardings_and_epochs_the_data_is_the_same_and_the_losses_agree(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="130ba", global_train_batch_size=8)
    run(tmp_path, config, "whole")
    legs = [
        (1, {"stop_after": "40ba"}),
        (4, {"stop_after": "22ba", "fsdp_config": HYBRID}),  # ends with the epoch's last batch, 62
        (2, {"stop_after": "30ba", "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}),
        (2, {"fsdp_config": None, "device_train_microbatch_size": 1}),
    ]
    for num_ranks, changes in legs:
        output = run(tmp_path, config, "legs", num_ranks, **changes).output
    assert "carrying on from" in output
    assert "sharding SHARD_GRAD_OP -> NO_SHARD" in output
    whole, switched = metrics(tmp_path, "whole"), metrics(tmp_path, "legs")
    assert values(switched, "data/digest") == values(whole, "data/digest")
    assert losses(switched) == pytest.approx(losses(whole), abs=1e-3)
    manifest = json.loads((tmp_path / "runs/legs/checkpoints/ba130/manifest.json").read_text())
    text = json.dumps(manifest)
    assert text.count('"first_batch"') == 4


def test_a_finished_run_launched_again_is_done(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="3ba")
    run(tmp_path, config, "done")
    run(tmp_path, config, "done")
    assert json.loads((tmp_path / "runs/done/status.json").read_text()) == {
        "status": "done",
        "batch": 3,
        "reason": None,
    }
    assert len(metrics(tmp_path, "done")) == 3


def test_a_run_never_starts_over_on_top_of_another(tmp_path, data):
    config = tiny_config(data, max_duration="2ba")
    run(tmp_path, config, "one")
    result = train([str(tmp_path / "one.yaml")], tmp_path)
    assert result.exit_codes == [2]
    assert "already holds ba2 of this run; carry on with autoresume=true, or choose another run_name" in result.output


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="6ba", save_interval="2ba")
    run(tmp_path, config, "run", stop_after="4ba")
    shard = tmp_path / "runs/run/checkpoints/ba4/shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = run(tmp_path, config, "run").output
    assert "passed over damaged checkpoint" in output
    assert "carrying on from" in output
    assert "ba2" in output
    assert [record["batch"] for record in metrics(tmp_path, "run")] == [1, 2, 3, 4, 5, 6]


def test_retention_keeps_the_newest_and_every_kth(tmp_path, data):
    config = tiny_config(
        data, max_duration="9ba", save_interval="1ba", save_num_checkpoints_to_keep=2, save_keep_every_batches=4
    )
    run(tmp_path, config, "run")
    names = {path.name for path in (tmp_path / "runs/run/checkpoints").glob("ba*")}
    assert names == {"ba4", "ba8", "ba9"}


def test_another_model_tokenizer_data_or_batch_size_is_refused_by_name(tmp_path, data):
    config = tiny_config(data, max_duration="2ba")
    run(tmp_path, config, "base")
    load_path = str(tmp_path / "runs/base/checkpoints/ba2")
    for changes, words in (
        ({"model__d_model": 48}, "d_model"),
        ({"model__no_bias": True}, "no_bias"),
        ({"global_train_batch_size": 4}, "global_train_batch_size"),
        ({"train_loader__dataset__shuffle_seed": 4}, "shuffle_seed"),
    ):
        other = tiny_config(data, load_path=load_path, **changes)
        result = train([write_config(tmp_path / "other.yaml", {**other, "run_name": "other"})], tmp_path)
        assert result.exit_codes == [2], words
        assert words in result.output
        assert "Traceback" not in result.output


def test_weights_alone_begin_a_new_run(tmp_path, data):
    config = tiny_config(data, max_duration="20ba")
    run(tmp_path, config, "base")
    load_path = str(tmp_path / "runs/base/checkpoints")
    run(tmp_path, config, "fresh", load_path=load_path, load_weights_only=True, max_duration="2ba")
    assert losses(metrics(tmp_path, "fresh"))[0] < losses(metrics(tmp_path, "base"))[0] - 1


def test_fp16_carries_its_loss_scale(tmp_path, data):
    config = tiny_config(data, autoresume=True, max_duration="6ba", precision="amp_fp16")
    run(tmp_path, config, "whole")
    run(tmp_path, config, "parts", stop_after="3ba")
    run(tmp_path, config, "parts")
    assert losses(metrics(tmp_path, "parts")) == losses(metrics(tmp_path, "whole"))
