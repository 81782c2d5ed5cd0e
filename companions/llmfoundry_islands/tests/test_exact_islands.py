"""With `exact_sums` islands train the bits of one world, also where one dies and comes back."""

import pytest
import torch

from llmfoundry_islands.tests.world import coordination, island, islands, metrics, train_with_a_death
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, reading_texts, tiny_config, values, write_config, write_data, write_texts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

KEYS = ("loss/train/total", "grad_norm", "data/digest", "time/token")


def settings(num_batches, **more):
    """Microbatches of two rows; every second batch has 8 rows and 4 of padding (of 20 samples)."""
    batches = {"global_train_batch_size": 12, "device_train_microbatch_size": 2, "max_duration": f"{num_batches}ba"}
    return {"exact_sums": True, "train_loader__drop_last": False, **batches, **more}


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("padded"), num_train=20)


def bits(records):
    exact = {record["batch"]: [record[key] for key in KEYS] for record in records}
    return {batch: [v.hex() if isinstance(v, float) else v for v in found] for batch, found in exact.items()}


def weights(save):
    return {name: tensor.view(torch.int32) for name, tensor in load_full_tensors(str(save)).items()}


def train_alone(folder, data, changes):
    """The same run as one world of one rank."""
    config = tiny_config(data, run_name="alone", **changes)
    train([write_config(folder / "alone.yaml", config)], folder, 1).check()
    alone = folder / "runs/alone"
    if changes.get("precision", "fp32") == "fp32":  # the rate of the first batch is 0, and the second has padding
        assert_is_by_hand(read_metrics(alone)[:2], train_by_hand(folder, config, 2))
    return bits(read_metrics(alone)), weights(alone / "checkpoints" / f"ba{changes['max_duration'][:-2]}")


def check_is_one_world(folder, data, a, b, num_batches, killed_at, **more):
    changes = settings(num_batches, **more)
    recorded, trained = train_alone(folder, data, changes)
    train_with_a_death(folder, data, killed_at, a=(a[0], changes | a[1]), b=(b[0], changes | b[1]))
    assert bits(metrics(folder, "a")) == recorded
    back = bits(metrics(folder, "b"))
    assert back == {batch: recorded[batch] for batch in back} and num_batches in back
    assert {*values(metrics(folder, "a"), "islands/drifts"), *values(metrics(folder, "b"), "islands/drifts")} == {0}
    saved = weights(folder / "saves" / f"ba{num_batches}")
    assert saved.keys() == trained.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, trained[name])] == []
    return changes, recorded


ONE, SHARDS = (1, {}), (2, {})
STAGES = (2, {"pp_config": {"pipeline_parallel_degree": 2}})
COPIES = (2, {"fsdp_config": {"sharding_strategy": "ZERO_1"}})
UNSHARDED = (2, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}})


@pytest.mark.parametrize(("a", "b"), [(ONE, ONE), (SHARDS, UNSHARDED), (COPIES, STAGES)])
def test_islands_train_the_bits_of_one_world_though_one_dies(tmp_path, padded, a, b):
    check_is_one_world(tmp_path, padded, a, b, num_batches=9, killed_at=3)


def test_islands_weigh_rows_of_unlike_length_in_16_bits_as_one_world_does(tmp_path):
    texts = write_texts(tmp_path / "texts")
    by_rows = {**reading_texts(texts), "accumulate_train_batch_on_tokens": False, "precision": "amp_bf16"}
    check_is_one_world(tmp_path, texts, STAGES, SHARDS, num_batches=9, killed_at=3, **by_rows)


def test_one_rank_carries_on_from_a_save_of_stages_with_the_same_bits(tmp_path, padded):
    """An island of shards has died and come back meanwhile."""
    every = {"save_interval": "4ba"}
    changes, recorded = check_is_one_world(tmp_path, padded, STAGES, SHARDS, num_batches=9, killed_at=3, **every)
    config = tiny_config(padded, run_name="restored", load_path=str(tmp_path / "saves/ba8"), **changes)
    train([write_config(tmp_path / "restored.yaml", config)], tmp_path, 1).check()
    assert bits(read_metrics(tmp_path / "runs/restored"))[9] == recorded[9]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize(("a", "b"), [(ONE, ONE), (ONE, SHARDS), (STAGES, SHARDS)])
def test_fifty_batches_are_those_of_one_world(tmp_path, padded, a, b, precision):
    check_is_one_world(tmp_path, padded, a, b, num_batches=50, killed_at=20, precision=precision)


def test_three_islands_that_own_parts_of_the_sum_train_the_bits_of_one_world(tmp_path, padded):
    changes = settings(6)
    recorded, _ = train_alone(tmp_path, padded, changes)
    with coordination(tmp_path, num_islands=3) as running:
        for launch in islands(tmp_path, padded, running, a=(1, changes), b=(1, changes), c=(1, changes)):
            launch.check()
    assert "is repeated" not in running.lines
    for name in "abc":
        assert bits(metrics(tmp_path, name)) == recorded
        num_parameters = sum(tensor.numel() for tensor in load_full_tensors(str(tmp_path / "saves/ba6")).values())
        sent_and_received = values(metrics(tmp_path, name), "islands/bytes")[-1] / num_parameters
        assert 2 * 4 / 3 * 3 < sent_and_received < 2 * 4 / 3 * 6, "of each gradient 4/3, in 3 to 6 bytes"


def test_sums_that_travel_in_fp32_are_caught(tmp_path, padded):
    """They are caught by the weights: a loss is rounded, and may be the same by chance."""
    changes = settings(4)
    _, trained = train_alone(tmp_path, padded, changes)
    changes |= {"callbacks": {"python:llmfoundry_islands.tests.faults:FloatWire": {}}}
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, padded, running, a=(1, changes), b=(1, changes)):
            launch.check()
    saved = weights(tmp_path / "saves/ba4")
    assert any(not torch.equal(tensor, trained[name]) for name, tensor in saved.items())


def test_islands_with_other_microbatches_are_refused(tmp_path, padded):
    changes = settings(2)
    with coordination(tmp_path) as running:

        def refused():
            running.wait_for("a is here")
            return island(tmp_path, padded, running, "b", 1, **changes | {"device_train_microbatch_size": 3})

        def then_another():
            running.wait_for("refused")
            return island(tmp_path, padded, running, "b", 1, **changes)

        a, other, another = islands(tmp_path, padded, running, refused, then_another, a=(1, changes))
    assert other.exit_codes == [2]
    assert "b and a differ in device_train_microbatch_size; islands train one run" in other.output
    for launch in (a, another):
        launch.check()
