"""Whole runs with real ranks: the same run on any world, in any precision, twice."""

import json
import time
from pathlib import Path

import pytest
import torch
from composer.core import Callback

from llmfoundry_lite.checkpoint.run_log import console_line
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.training.builders import find_separator
from tests.helpers.by_hand import assert_is_by_hand, train_by_hand
from tests.helpers.launch import train
from tests.helpers.present import needs
from tests.helpers.tiny import build_tokenizer, read_metrics, tiny_config, values, write_config

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 2}

pytestmark = pytest.mark.multiprocess


def run(tmp_path, config, name, num_ranks=1, **options):
    """Train `config` as run `name` and return its records."""
    path = write_config(tmp_path / f"{name}.yaml", {**config, "run_name": name})
    train([path], tmp_path, num_ranks, **options).check()
    return read_metrics(tmp_path / "runs" / name)


def losses(records):
    return values(records, "loss/train/total")


def test_every_world_computes_the_same_run(tmp_path, data):
    config = tiny_config(data, max_duration="50ba", eval_interval="25ba")
    one = run(tmp_path, config, "one")
    assert losses(one)[-1] < losses(one)[0] - 1.0, "it learns"
    assert_is_by_hand(one, train_by_hand(tmp_path, config, 50), relative=1e-4)
    worlds = {
        "two": run(tmp_path, config, "two", 2),
        "four": run(tmp_path, config, "four", 4),
        "unsharded": run(tmp_path, {**config, "fsdp_config": None}, "unsharded", 2),
        "hybrid": run(tmp_path, {**config, "fsdp_config": HYBRID}, "hybrid", 4),
    }
    for name, records in worlds.items():
        assert values(records, "data/digest") == values(one, "data/digest"), name
        assert losses(records) == pytest.approx(losses(one), abs=1e-4), name
        assert values(records, "grad_norm") == pytest.approx(values(one, "grad_norm"), rel=1e-3), name
        assert values(records, "eval/loss") == pytest.approx(values(one, "eval/loss"), abs=1e-4), name


def test_the_same_run_twice_is_bit_equal(tmp_path, data):
    config = tiny_config(data, model__resid_pdrop=0.1)
    assert losses(run(tmp_path, config, "first", 2)) == losses(run(tmp_path, config, "second", 2))


def test_microbatches_that_do_not_divide_the_batch_give_the_same_gradient(tmp_path, data):
    whole = run(tmp_path, tiny_config(data), "whole")
    parts = run(tmp_path, tiny_config(data, device_train_microbatch_size=3), "parts")
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-5)
    assert values(parts, "grad_norm") == pytest.approx(values(whole, "grad_norm"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_summed_over_ranks_once_or_after_each_microbatch_are_the_same(tmp_path, data, sharding):
    runs = {}
    for every in (False, True):
        fsdp = {"sharding_strategy": sharding, "reduce_every_microbatch": every}
        config = tiny_config(data, device_train_microbatch_size=1, fsdp_config=fsdp)
        runs[every] = run(tmp_path, config, f"every-{every}", 2)
    assert losses(runs[True]) == pytest.approx(losses(runs[False]), abs=1e-5)
    assert values(runs[True], "grad_norm") == pytest.approx(values(runs[False], "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "mixed_precision", "band"),
    [
        pytest.param("amp_bf16", "PURE", 0.06, marks=pytest.mark.long),
        pytest.param("amp_bf16", "DEFAULT", 0.05, marks=pytest.mark.slow),
        pytest.param("amp_bf16", "FULL", 0.03, marks=pytest.mark.long),
        pytest.param("amp_fp16", "DEFAULT", 0.02, marks=pytest.mark.long),
    ],
)
def test_low_precision_stays_in_a_band_of_fp32(tmp_path, data, precision, mixed_precision, band):
    config = tiny_config(data, max_duration="30ba")
    reference = losses(run(tmp_path, config, "fp32", 2))
    low = {**config, "precision": precision, "fsdp_config": {"mixed_precision": mixed_precision}}
    assert losses(run(tmp_path, low, "low", 2)) == pytest.approx(reference, abs=band)


@pytest.mark.slow
def test_activation_checkpointing_and_sharding_strategy_change_nothing(tmp_path, data):
    reference = losses(run(tmp_path, tiny_config(data), "reference", 2))
    for name, fsdp in {
        "checkpointed": {"activation_checkpointing": True},
        "selectively": {"activation_checkpointing": "selective"},
        "offloaded": {"activation_checkpointing": True, "activation_cpu_offload": True},
        "grad-op": {"sharding_strategy": "SHARD_GRAD_OP"},
    }.items():
        assert losses(run(tmp_path, tiny_config(data, fsdp_config=fsdp), name, 2)) == pytest.approx(reference, abs=1e-6)


class TellsHowItComputes(Callback):
    def __init__(self, path: str):
        self.path = path

    def fit_start(self, state, logger):
        Path(self.path).write_text(str(torch.are_deterministic_algorithms_enabled()))


@pytest.mark.slow
def test_a_deterministic_run_uses_deterministic_kernels_alone(tmp_path, data):
    """On a CPU they are what they always are, so the losses are those of any run."""
    said = {}
    for deterministic in (False, True):
        path = tmp_path / f"deterministic-{deterministic}"
        tells = {"python:tests.training.test_train:TellsHowItComputes": {"path": str(path)}}
        config = tiny_config(data, deterministic=deterministic, callbacks=tells)
        said[deterministic] = losses(run(tmp_path, config, path.name, 2))
        assert path.read_text() == str(deterministic)
    assert said[True] == said[False]


def test_documents_packed_in_a_sample_are_kept_apart_on_every_world(tmp_path, data):
    build_tokenizer(tmp_path / "tokenizer")  # whose end of text is a token of the data
    config = tiny_config(data, tokenizer__name=str(tmp_path / "tokenizer"), max_duration="3ba")
    together = losses(run(tmp_path, config, "together"))
    config["model"]["attn_config"] = {"attn_uses_sequence_id": True}
    records = run(tmp_path, config, "apart")
    assert_is_by_hand(records, train_by_hand(tmp_path, config, 3, separator=2))
    apart = losses(records)
    assert all(abs(a - b) > 1e-5 for a, b in zip(apart, together, strict=True))
    assert losses(run(tmp_path, config, "apart-two", 2)) == pytest.approx(apart, abs=1e-4)


def test_the_loaders_words_say_which_token_divides_documents(tmp_path, data):
    config = tiny_config(data, tokenizer__name=str(tmp_path / "tokenizer"))
    build_tokenizer(tmp_path / "tokenizer")
    config["model"]["attn_config"] = {"attn_uses_sequence_id": True}
    for given, expected in (({}, (2, False)), ({"eos_token_id": 5}, (5, False)), ({"bos_token_id": 6}, (6, True))):
        path = write_config(tmp_path / "run.yaml", config)
        arguments = [f"train_loader.dataset.{key}={value}" for key, value in given.items()]
        assert find_separator(load_train_config([path, *arguments], {}).config) == expected
    config["model"]["attn_config"] = {}
    assert find_separator(load_train_config([write_config(tmp_path / "run.yaml", config)], {}).config) == (None, False)


@pytest.mark.parametrize("duration", ["1ep", "2000tok", "70sp", "9ba"])
def test_a_run_ends_when_its_duration_is_reached(tmp_path, data, duration):
    config = tiny_config(data, max_duration=duration, eval_interval="1ep", scheduler__t_warmup="0.2dur")
    records = run(tmp_path, config, "short")
    batches = {"1ep": 500 // 8, "2000tok": 8, "70sp": 9, "9ba": 9}[duration]
    assert sorted({record["batch"] for record in records}) == list(range(1, batches + 1))
    assert "eval/loss" in records[-1]
    status = json.loads((tmp_path / "runs/short/status.json").read_text())
    saves = {"last_saved": f"ba{batches}", "failed_saves": 0, "save_error": None}
    assert 0 <= time.time() - status.pop("saved_at") < 600
    assert status == {"status": "done", "batch": batches, "reason": None, **saves}


@pytest.mark.slow
def test_evaluation_counts_each_sample_once_on_every_world(tmp_path, data):
    config = tiny_config(data, max_duration="2ba", eval_interval="2ba", eval_first=True)
    one = run(tmp_path, config, "one")
    four = run(tmp_path, config, "four", 4)
    assert [record["batch"] for record in one] == [0, 1, 2]
    assert values(four, "eval/loss") == pytest.approx(values(one, "eval/loss"), rel=1e-5)


def test_each_of_several_validation_loaders_is_logged_by_its_label(tmp_path, data):
    config = tiny_config(data, max_duration="2ba", eval_interval="2ba", eval_first=True)
    one, loaders = run(tmp_path, config, "one"), two_loaders(data)
    two = run(tmp_path, config | {"eval_loader": loaders}, "two")
    assert values(two, "eval/wiki/loss") == values(one, "eval/loss")
    assert len(values(two, "eval/more/loss")) == 2 and not values(two, "eval/loss")
    assert "validation wiki " in console_line(two[-1], Duration(2, "ba"))


@needs("llmfoundry_layouts")
@pytest.mark.slow
def test_several_validation_loaders_lose_the_same_in_a_pipeline(tmp_path, data):
    config = tiny_config(data, max_duration="2ba", eval_interval="2ba", eval_loader=two_loaders(data))
    one = run(tmp_path, config, "one")
    stages = {"pp_config": {"pipeline_parallel_degree": 2}, "device_train_microbatch_size": 2}
    staged = run(tmp_path, config | stages, "staged", 2)
    for label in ("wiki", "more"):
        assert values(staged, f"eval/{label}/loss") == pytest.approx(values(one, f"eval/{label}/loss"), rel=1e-5)


def two_loaders(data):
    return [
        {"label": label, "name": "text", "dataset": {"local": str(data), "split": split}}
        for label, split in (("wiki", "val"), ("more", "train"))
    ]


@pytest.mark.slow
def test_an_epoch_has_another_order_and_the_same_batches_on_every_world(tmp_path, data):
    config = tiny_config(data, max_duration="2ep", scheduler__t_warmup="0.1dur")
    one, two = run(tmp_path, config, "one"), run(tmp_path, config, "two", 2)
    digests = values(one, "data/digest")
    assert digests == values(two, "data/digest")
    assert digests[:62] != digests[62:]


def test_a_second_launch_is_counted_and_appended(tmp_path, data):
    config = tiny_config(data, max_duration="6ba", autoresume=True)
    run(tmp_path, {**config, "stop_after": "3ba"}, "again")
    records = run(tmp_path, config, "again")
    last = {record["batch"]: record["launch"] for record in records}
    assert last == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}
