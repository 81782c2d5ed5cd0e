"""Parameter and FLOP counts against the built model and against published rows."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_lite.models.mpt import MPT

SMALL = ModelConfig(d_model=24, n_heads=3, n_layers=2, max_seq_len=40, vocab_size=70)

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
@pytest.mark.parametrize("norms", [{}, {"qk_ln": True}, {"qk_gn": True}])
@pytest.mark.parametrize("positions", ["learned", "alibi", "none"])
@pytest.mark.parametrize("expansion_ratio", [4, 2.5])
def test_the_count_is_that_of_the_built_model(no_bias, norms, positions, expansion_ratio):
    config = replace(
        SMALL,
        no_bias=no_bias,
        expansion_ratio=expansion_ratio,
        learned_pos_emb=positions != "none",
        attn_config=AttentionConfig(**norms, alibi=positions == "alibi"),
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


class Row(NamedTuple):
    hardware: str
    dtype: str
    model: str
    seq_len: int
    num_gpus: int
    mfu_percent: float
    tokens_per_second: int
    num_parameters: int


PUBLISHED = (
    Row("A100-40GB", "bf16", "125m", 32768, 8, 47.27, 261208, 148904448),
    Row("A100-40GB", "bf16", "350m", 2048, 64, 46.27, 3372118, 355985408),
    Row("A100-80GB", "bf16", "760m", 16384, 8, 54.64, 114198, 782490624),
    Row("H100-80GB", "bf16", "1b", 2048, 256, 39.15, 10894207, 1315950592),
    Row("A100-80GB", "bf16", "3b", 65536, 8, 46.05, 14137, 2814366720),
    Row("H100-80GB", "bf16", "7b", 32768, 8, 30.94, 26550, 6784688128),
    Row("A100-40GB", "bf16", "13b", 8192, 8, 43.95, 11258, 12885411840),
    Row("H100-80GB", "bf16", "30b", 2048, 32, 43.92, 73860, 29975214080),
    Row("A100-80GB", "bf16", "70b", 2048, 64, 53.33, 26274, 64862437376),
    Row("H100-80GB", "fp8", "3b", 8192, 8, 23.28, 153174, 2667566080),
)
"""A row of each size from LLM Foundry's scripts/train/benchmarking/README.md, measured by MosaicML."""


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model}-{row.hardware}")
def test_published_counts_are_met_exactly_and_mfu_within_a_quarter_of_a_percent(row):
    d_model, n_heads, n_layers = SHAPES[row.model]
    model = ModelConfig(d_model=d_model, n_heads=n_heads, n_layers=n_layers, max_seq_len=row.seq_len)
    assert count_parameters(model) == row.num_parameters
    peak = ACCELERATORS[row.hardware].peak_flops(row.dtype)
    assert peak is not None
    flops_per_second = count_flops_per_token(model, row.seq_len) * row.tokens_per_second
    assert 100 * flops_per_second / (peak * row.num_gpus) == pytest.approx(row.mfu_percent, rel=0.0022)
