"""With `exact_sums` islands train the bits of one world, also where one dies and comes back."""

import pytest
import torch

from llmfoundry_islands.tests.world import (
    COPIES,
    ONE,
    SHARDS,
    STAGES,
    coordination,
    island,
    islands,
    metrics,
    train_with_a_death,
)
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, reading_texts, tiny_config, values, write_config, write_data, write_texts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

UNSHARDED = (2, {"fsdp_config": {"sharding_strategy": "NO_SHARD"}})
"""A layout besides those of `world`."""
NUM_SAMPLES = 20
EXACT_KEYS = ("loss/train/total", "grad_norm", "data/digest", "time/token")
"""What a run logs of a batch that must be the same to the last bit."""


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Data of 20 samples: every second batch of 12 has 8 of them and 4 rows of padding."""
    return write_data(tmp_path_factory.mktemp("padded"), num_train=NUM_SAMPLES)


def exact_settings(num_batches, **changes):
    """Settings of a run with exact sums, whose batches are six microbatches of two rows."""
    return {
        "exact_sums": True,
        "train_loader__drop_last": False,
        "global_train_batch_size": 12,
        "device_train_microbatch_size": 2,
        "max_duration": f"{num_batches}ba",
        **changes,
    }


# ------------------------------------------------------------------------------------------- bits of a run


def exact(value):
    return value.hex() if isinstance(value, float) else value


def bits_by_batch(records):
    return {record["batch"]: [exact(record[key]) for key in EXACT_KEYS] for record in records}


def bits_of_weights(save):
    return {name: tensor.view(torch.int32) for name, tensor in load_full_tensors(str(save)).items()}


def names_of_different(weights, others):
    """The names of the tensors that are not equal."""
    assert weights.keys() == others.keys()
    return [name for name, tensor in weights.items() if not torch.equal(tensor, others[name])]


def train_one_world(folder, data, settings):
    """Train as one world of one rank. Return the bits of each batch, and those of the weights at the end."""
    config = tiny_config(data, run_name="alone", **settings)
    train([write_config(folder / "alone.yaml", config)], folder, 1).check()
    records = read_metrics(folder / "runs/alone")
    num_batches = len(records)
    assert settings["max_duration"] == f"{num_batches}ba"

    # One world must be right itself. The rate of the first batch is 0, and the second has padding.
    is_fp32 = settings.get("precision", "fp32") == "fp32"
    if is_fp32:
        assert_is_by_hand(records[:2], train_by_hand(folder, config, 2))
    return bits_by_batch(records), bits_of_weights(folder / f"runs/alone/checkpoints/ba{num_batches}")


# ------------------------------------------------------------------------------------------- though one dies


def assert_islands_are_one_world(folder, data, settings, a, b, killed_at):
    """Train as one world, then as the islands a and b, and compare. Return the bits of each batch.

    a and b are layouts. b is killed in the batch `killed_at`, and comes back some batches later.
    """
    ranks_of_a, layout_of_a = a
    ranks_of_b, layout_of_b = b
    world_bits, world_weights = train_one_world(folder, data, settings)
    num_batches = len(world_bits)
    train_with_a_death(
        folder, data, killed_at, a=(ranks_of_a, settings | layout_of_a), b=(ranks_of_b, settings | layout_of_b)
    )

    assert bits_by_batch(metrics(folder, "a")) == world_bits
    bits_of_b = bits_by_batch(metrics(folder, "b"))
    assert num_batches in bits_of_b, "b came back"
    for batch, bits in bits_of_b.items():
        assert bits == world_bits[batch], f"batch {batch} of b"

    for name in ("a", "b"):
        drifts = values(metrics(folder, name), "islands/drifts")
        assert set(drifts) == {0}, name

    island_weights = bits_of_weights(folder / f"saves/ba{num_batches}")
    assert names_of_different(island_weights, world_weights) == []
    return world_bits


@pytest.mark.parametrize(("a", "b"), [(ONE, ONE), (SHARDS, UNSHARDED), (COPIES, STAGES)])
def test_islands_train_the_bits_of_one_world_though_one_dies(tmp_path, padded, a, b):
    assert_islands_are_one_world(tmp_path, padded, exact_settings(9), a, b, killed_at=3)


def test_islands_weigh_rows_of_unlike_length_in_16_bits_as_one_world(tmp_path):
    texts = write_texts(tmp_path / "texts")
    settings = exact_settings(9, accumulate_train_batch_on_tokens=False, precision="amp_bf16", **reading_texts(texts))
    assert_islands_are_one_world(tmp_path, texts, settings, STAGES, SHARDS, killed_at=3)


def test_one_rank_carries_on_from_a_save_of_stages_with_the_same_bits(tmp_path, padded):
    """An island of shards has died and come back meanwhile."""
    settings = exact_settings(9, save_interval="4ba")
    world_bits = assert_islands_are_one_world(tmp_path, padded, settings, STAGES, SHARDS, killed_at=3)

    config = tiny_config(padded, run_name="restored", load_path=str(tmp_path / "saves/ba8"), **settings)
    train([write_config(tmp_path / "restored.yaml", config)], tmp_path, 1).check()
    restored_bits = bits_by_batch(read_metrics(tmp_path / "runs/restored"))
    assert restored_bits[9] == world_bits[9]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize(("a", "b"), [(ONE, ONE), (ONE, SHARDS), (STAGES, SHARDS)])
def test_fifty_batches_are_those_of_one_world(tmp_path, padded, a, b, precision):
    assert_islands_are_one_world(tmp_path, padded, exact_settings(50, precision=precision), a, b, killed_at=20)


# ------------------------------------------------------------------------------------------- the sums

NUMBERS_EACH_WAY = 4 / 3
"""Numbers that one of three islands sends for each parameter of a batch, and as many that it receives: two thirds of
its gradient to the owners of these, and its own third of the sum to two islands."""
MIN_BYTES = 3
MAX_BYTES = 6
"""Of a packed number."""


def test_three_islands_that_own_parts_of_the_sum_train_the_bits_of_one_world(tmp_path, padded):
    settings = exact_settings(6)
    world_bits, world_weights = train_one_world(tmp_path, padded, settings)
    with coordination(tmp_path, num_islands=3) as running:
        for launch in islands(tmp_path, padded, running, a=(1, settings), b=(1, settings), c=(1, settings)):
            launch.check()

    assert "is repeated" not in running.lines
    num_parameters = sum(tensor.numel() for tensor in world_weights.values())
    for name in ("a", "b", "c"):
        records = metrics(tmp_path, name)
        assert bits_by_batch(records) == world_bits
        bytes_by_parameter = records[-1]["islands/bytes"] / num_parameters
        bytes_by_number = bytes_by_parameter / (2 * NUMBERS_EACH_WAY)
        assert MIN_BYTES < bytes_by_number < MAX_BYTES


def test_sums_that_travel_in_fp32_are_caught(tmp_path, padded):
    """They are caught by the weights: a loss is rounded, and may be the same by chance."""
    settings = exact_settings(4)
    _, world_weights = train_one_world(tmp_path, padded, settings)
    in_fp32 = {**settings, "callbacks": {"python:llmfoundry_islands.tests.faults:FloatWire": {}}}
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, padded, running, a=(1, in_fp32), b=(1, in_fp32)):
            launch.check()

    island_weights = bits_of_weights(tmp_path / "saves/ba4")
    assert names_of_different(island_weights, world_weights) != []


def test_islands_with_other_microbatches_are_refused(tmp_path, padded):
    """a waits for a second island. The first that comes is refused, the next one has a's settings."""
    settings = exact_settings(2)
    with coordination(tmp_path) as running:

        def launch_with_other_microbatches():
            running.wait_for("a is here")
            return island(tmp_path, padded, running, "b", 1, **{**settings, "device_train_microbatch_size": 3})

        def launch_with_the_same_settings():
            running.wait_for("refused")
            return island(tmp_path, padded, running, "b", 1, **settings)

        a, other, same = islands(
            tmp_path, padded, running, launch_with_other_microbatches, launch_with_the_same_settings, a=(1, settings)
        )
    assert other.exit_codes == [2]
    assert "b and a differ in device_train_microbatch_size; islands train one run" in other.output
    a.check()
    same.check()
