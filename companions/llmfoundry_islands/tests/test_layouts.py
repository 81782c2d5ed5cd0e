"""Islands whose ranks divide the model in unlike ways train one world's run, in real processes."""

import json
from functools import partial
from typing import Any

import pytest

from llmfoundry_islands.tests.world import (
    COPIES,
    LAYERS,
    MUON,
    ONE,
    SAMPLES,
    SHARDS,
    STAGES,
    coordination,
    islands,
    metrics,
    train_with_a_death,
)
from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config

pytestmark = pytest.mark.multiprocess

AUTO = (1, {"device_train_microbatch_size": "auto"})
DROPOUT = {"model__resid_pdrop": 0.1, "model__emb_pdrop": 0.1}
FEWER_HEADS = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}


def both(one, other):
    """One layout inside the other."""
    return one[0] * other[0], one[1] | other[1]


PAIRS: dict[str, Any] = {
    "stages, shards": (STAGES, SHARDS, {}),
    "shards, parts of layers": (SHARDS, LAYERS, {}),
    "parts of samples, one rank": (SAMPLES, ONE, {}),
    "copies that share state, stages": (COPIES, STAGES, {}),
    "shards of Muon's matrices, one rank": (SHARDS, ONE, MUON),
    "stages that find their microbatch, one rank that does": (both(STAGES, AUTO), AUTO, {}),
    "stages with dropout, one rank": (STAGES, ONE, DROPOUT),
}
LARGE_PAIRS: dict[str, Any] = {
    "shards of parts of layers, stages of copies": (
        both(LAYERS, SHARDS),
        both(STAGES, COPIES),
        {"model__attn_config": FEWER_HEADS, "model__no_bias": False},
    ),
    "stages of parts of layers, copies of parts of layers": (both(STAGES, LAYERS), both(COPIES, LAYERS), MUON),
    "stages of shards in turn, stages of copies without bubbles": (
        both((2, {"pp_config": {"pipeline_parallel_degree": 2, "schedule": "zbv"}}), SHARDS),
        both((2, {"pp_config": {"pipeline_parallel_degree": 2, "schedule": "zero_bubble"}}), COPIES),
        {"model__n_layers": 4, "model__tie_word_embeddings": False},
    ),
}
"""An island that is there all the time, one that dies and comes back, and what they have in common."""


def train_alone(folder, data, common):
    """The same run as one world of one rank: batch -> its record."""
    config = tiny_config(data, run_name="alone", device_train_microbatch_size=1, **common)
    train([write_config(folder / "alone.yaml", config)], folder, 1).check()
    return {record["batch"]: record for record in read_metrics(folder / "runs/alone")}


def check_is_one_run(folder, name, alone, tolerance=1e-6):
    for record in metrics(folder, name):
        expected = alone[record["batch"]]
        assert record["data/digest"] == expected["data/digest"] and record["time/token"] == expected["time/token"]
        for key in ("loss/train/total", "grad_norm"):
            assert record[key] == pytest.approx(expected[key], abs=tolerance), (name, record["batch"], key)


def train_together(folder, data, a, b, common):
    """Two islands, and the run as one world at the same time, which is returned."""
    with coordination(folder) as running:
        alone = partial(train_alone, folder, data, common)
        of_a, of_b = (a[0], common | a[1]), (b[0], common | b[1])
        *launches, found = islands(folder, data, running, alone, a=of_a, b=of_b)
        for launch in launches:
            launch.check()
        assert "is repeated" not in running.lines
    return found


def test_stages_and_shards_train_one_run(tmp_path, data):
    alone = train_together(tmp_path, data, STAGES, SHARDS, {"max_duration": "4ba", "optimizer__lr": 1e-3})
    for name in ("a", "b"):
        assert len(metrics(tmp_path, name)) == 4
        check_is_one_run(tmp_path, name, alone)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*PAIRS, *(pytest.param(pair, marks=pytest.mark.long) for pair in LARGE_PAIRS)])
def test_islands_of_unlike_layouts_train_one_run_though_one_dies(tmp_path, data, pair):
    """The weights of both have the same digest after each batch."""
    a, b, common = (PAIRS | LARGE_PAIRS)[pair]
    common = {"max_duration": "8ba", "optimizer__lr": 1e-3, **common}
    alone = train_alone(tmp_path, data, common)
    train_with_a_death(tmp_path, data, 3, a=(a[0], common | a[1]), b=(b[0], common | b[1]))
    for name, first in (("a", 1), ("b", 7)):
        found = metrics(tmp_path, name)
        assert {*range(first, 9)} <= {*values(found, "batch")}
        assert values(found, "islands/drifts")[-1] == 0
        check_is_one_run(tmp_path, name, alone)
        check_left_early(tmp_path, name, *(a if name == "a" else b))


def check_left_early(folder, name, num_ranks, settings):
    """Check that all gradients leave before the backward pass ends. With stages on one device none leave early; the
    embeddings that two stages tie never do."""
    for late, pieces in map(json.loads, (folder / f"late-{name}.jsonl").read_text().splitlines()):
        if "pp_config" not in settings:
            assert not late
        elif num_ranks == 2:
            assert late == pieces
        else:
            assert late in ([], ["transformer.wte.weight"])


@pytest.mark.slow
def test_islands_in_fp16_lower_the_loss_scale_together(tmp_path, data):
    """Gradients times 2^24 are more than fp16 can hold, on one island or on both."""
    common = {"precision": "amp_fp16", "islands": {"check_weights_every": 1}}
    common["callbacks"] = {"python:tests.training.test_failures:LargeScale": {"scale": 2.0**24}}
    with coordination(tmp_path) as running:
        for launch in islands(tmp_path, data, running, a=(2, common), b=(1, common)):
            launch.check()
    found = metrics(tmp_path, "a")
    scales = values(found, "loss_scale")
    assert scales[0] == 2.0**24 > scales[-1] and values(metrics(tmp_path, "b"), "loss_scale") == scales
    assert values(found, "islands/drifts")[-1] == 0
    assert values(found, "loss/train/total")[-1] < values(found, "loss/train/total")[0]
