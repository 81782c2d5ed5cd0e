"""Islands whose ranks divide the model in unlike ways train one world's run, in real processes."""

from typing import Any

import pytest

from tests.helpers.launch import train
from tests.helpers.tiny import read_metrics, tiny_config, values, write_config
from tests.islands.world import metrics, train_with_a_death

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SHARDS: dict[str, Any] = {}
STAGES = {"pp_config": {"pipeline_parallel_degree": 2}}
LAYERS = {"tp_config": {"tensor_parallel_degree": 2}}
SAMPLES = {"cp_config": {"context_parallel_degree": 2}}
COPIES = {"fsdp_config": {"sharding_strategy": "ZERO_1"}}
AUTO = {"device_train_microbatch_size": "auto"}
MUON = {"optimizer": {"name": "muon", "lr": 1e-3, "ns_dtype": "fp32"}}
DROPOUT = {"model__resid_pdrop": 0.1, "model__emb_pdrop": 0.1}

PAIRS = {
    "stages, then shards": ((2, STAGES), (2, SHARDS), {}),
    "shards, then parts of layers": ((2, SHARDS), (2, LAYERS), {}),
    "parts of samples, then one": ((2, SAMPLES), (1, SHARDS), {}),
    "copies that share state, then stages": ((2, COPIES), (2, STAGES), {}),
    "shards of matrices for Muon, then one": ((2, SHARDS), (1, SHARDS), MUON),
    "microbatches that each island finds": ((2, STAGES | AUTO), (1, AUTO), {}),
    "dropout of the stream": ((2, STAGES), (1, SHARDS), DROPOUT),
    "parts of shards of layers, then stages of copies": (
        (4, LAYERS),
        (4, STAGES | COPIES),
        {"model__attn_config": {"kv_n_heads": 2, "attn_type": "grouped_query_attention"}, "model__no_bias": False},
    ),
    "stages of parts of layers, then copies of parts of layers, for Muon": (
        (4, STAGES | LAYERS),
        (4, COPIES | LAYERS),
        MUON,
    ),
}
"""An island that is there all the time, one that dies and comes back, and what they have in common."""


@pytest.mark.parametrize("pair", PAIRS)
def test_islands_of_unlike_layouts_train_one_run_though_one_dies(tmp_path, data, pair):
    (num_a, of_a), (num_b, of_b), common = PAIRS[pair]
    common = {"max_duration": "8ba", "optimizer__lr": 1e-3, **common}
    train([write_config(tmp_path / "alone.yaml", tiny_config(data, run_name="alone", **common))], tmp_path, 1).check()
    alone = {record["batch"]: record for record in read_metrics(tmp_path / "runs/alone")}
    train_with_a_death(tmp_path, data, 3, a=(num_a, common | of_a), b=(num_b, common | of_b))
    for name, first in (("a", 1), ("b", 7)):
        found = metrics(tmp_path, name)
        assert {*range(first, 9)} <= {*values(found, "batch")}
        assert values(found, "islands/drifts")[-1] == 0
        for record in found:
            expected = alone[record["batch"]]
            assert record["data/digest"] == expected["data/digest"] and record["time/token"] == expected["time/token"]
            for key in ("loss/train/total", "grad_norm"):
                assert record[key] == pytest.approx(expected[key], abs=1e-6), (name, record["batch"], key)
