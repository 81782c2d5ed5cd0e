"""Parameter and FLOP counts against the built model and against published rows."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llmfoundry_lite.config.schema import AttentionConfig, ModelConfig
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.mpt import MPT

SMALL = ModelConfig(d_model=24, n_heads=3, n_layers=2, max_seq_len=40, vocab_size=70)

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "mpt_throughput.csv"
"""MosaicML's published measurements, where they lie beside this checkout."""

SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""d_model, n_heads, n_layers of LLM Foundry's sizes."""


@pytest.mark.parametrize("no_bias", [False, True])
@pytest.mark.parametrize("qk_ln", [False, True])
@pytest.mark.parametrize("positions", ["learned", "alibi", "none"])
@pytest.mark.parametrize("expansion_ratio", [4, 2.5])
def test_the_count_is_that_of_the_built_model(no_bias, qk_ln, positions, expansion_ratio):
    config = replace(
        SMALL,
        no_bias=no_bias,
        expansion_ratio=expansion_ratio,
        learned_pos_emb=positions != "none",
        attn_config=AttentionConfig(qk_ln=qk_ln, alibi=positions == "alibi"),
    )
    with torch.device("meta"):
        model = MPT(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_flops_are_six_per_parameter_and_twelve_per_layer_width_and_token():
    assert count_flops_per_token(SMALL, 16) == 6 * count_parameters(SMALL) + 12 * 2 * 24 * 16


def test_what_is_not_computed_is_not_counted():
    """Keys beyond a window, and an input embedding that is only looked up."""
    window = replace(SMALL, attn_config=AttentionConfig(sliding_window_size=5))
    assert count_flops_per_token(window, 16) == 6 * count_parameters(SMALL) + 12 * 2 * 24 * 6
    assert count_flops_per_token(window, 4) == count_flops_per_token(SMALL, 4)
    untied = replace(SMALL, tie_word_embeddings=False)
    assert count_parameters(untied) == count_parameters(SMALL) + 70 * 24
    assert count_flops_per_token(untied, 16) == count_flops_per_token(SMALL, 16)


def published_rows() -> list[dict[str, str]]:
    with REFERENCE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def model_of(row: dict[str, str]) -> ModelConfig:
    d_model, n_heads, n_layers = SHAPES[row["model"]]
    return ModelConfig(d_model=d_model, n_heads=n_heads, n_layers=n_layers, max_seq_len=int(row["seq_len"]))


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the published table is not beside this checkout")
def test_published_parameter_counts_are_met_exactly():
    rows = published_rows()
    assert len(rows) >= 100
    for row in rows:
        assert count_parameters(model_of(row)) == int(row["n_params"]), row["row_index"]


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the published table is not beside this checkout")
def test_published_mfu_is_met_within_a_quarter_of_a_percent():
    for row in published_rows():
        flops_per_second = count_flops_per_token(model_of(row), int(row["seq_len"])) * float(
            row["tokens_per_sec_total"]
        )
        peak = ACCELERATORS[row["hardware"]].peak_flops(row["dtype"])
        mfu_percent = 100 * flops_per_second / (peak * int(row["num_gpus"]))
        assert mfu_percent == pytest.approx(float(row["mfu_percent"]), rel=0.0022), row["row_index"]
