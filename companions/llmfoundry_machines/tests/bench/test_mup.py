"""The coordinate check: what layers compute is flat over the width with muP, and grows without it."""

import json

import pytest

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_machines.bench.mup import FLAT, growth, run, scale_model
from tests.helpers.tiny import tiny_config, write_config

ATTENTION = AttentionConfig(attn_type="grouped_query_attention", kv_n_heads=2)
MODEL = ModelConfig(d_model=64, n_heads=4, n_layers=2, attn_config=ATTENTION, ffn_config=FFNConfig(ffn_hidden_size=96))
OPTIMIZERS = {
    "decoupled_adamw": {"name": "decoupled_adamw", "lr": 0.01},
    "lion": {"name": "decoupled_lionw", "lr": 0.01},
    "muon": {"name": "muon", "lr": 0.05, "adamw_lr": 0.01, "ns_dtype": "fp32"},
    "muon, original": {"name": "muon", "lr": 0.03, "adamw_lr": 0.01, "ns_dtype": "fp32", "adjust_lr_fn": "original"},
}


def test_a_wider_model_has_more_heads_or_wider_ones():
    more = scale_model(MODEL, 256, 64, "heads", has_mup=True)
    assert (more.n_heads, more.head_dim, more.num_kv_heads, more.ffn_dim) == (16, 16, 8, 384)
    assert more.softmax_scale is None and more.width_mult == 4
    wider = scale_model(MODEL, 256, 64, "head_dim", has_mup=True)
    assert (wider.n_heads, wider.head_dim, wider.num_kv_heads) == (4, 64, 2)
    assert wider.softmax_scale == 1 / 16
    assert scale_model(MODEL, 256, 64, "head_dim", has_mup=False).mup is None
    with pytest.raises(ConfigError, match="--widths: 72 has no whole number of heads of 16"):
        scale_model(MODEL, 72, 64, "heads", has_mup=True)


def test_growth_is_the_exponent():
    assert growth([16, 32, 64], [4.0, 8.0, 16.0]) == pytest.approx(1.0)
    assert growth([16, 64], [3.0, 3.0]) == pytest.approx(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "grow"), [("decoupled_adamw", "head_dim"), *((name, "heads") for name in OPTIMIZERS)]
)
def test_activations_are_flat_with_mup_and_grow_without(optimizer, grow, tmp_path):
    config = tiny_config(tmp_path / "data", optimizer=OPTIMIZERS[optimizer])
    path = write_config(tmp_path / "run.yaml", config)
    report = run([str(path)], [64, 256], grow, num_steps=4, seq_len=16, out=tmp_path / "out")
    rows = {row["kind"]: row for row in report["rows"]}
    assert [kind for kind, row in rows.items() if row["muP last"] > FLAT] == []
    growth_without = min(rows[kind]["without last"] for kind in ("attention", "feed-forward", "last block"))
    if optimizer != "muon, original":  # whose updates have the right size for every width
        assert growth_without > 3 * FLAT
    if grow == "head_dim":
        assert rows["scores"]["without last"] > 3 * FLAT
    assert json.loads((tmp_path / "out" / "mup.json").read_text())["rows"] == report["rows"]
    assert (tmp_path / "out" / "mup.png").exists()
