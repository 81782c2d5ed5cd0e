"""Names and shapes of a model's parameters are known without building it."""

from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.parameters import parameter_shapes
from tests.helpers.models import ALIBI, LLAMA, QWEN2, QWEN3, SMALL, with_attention

CONFIGS = {
    "learned": SMALL,
    "alibi": ALIBI,
    "llama": replace(LLAMA, n_layers=12),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "untied": replace(SMALL, tie_word_embeddings=False),
    "parts": with_attention(SMALL, fused_qkv=False, qk_ln=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_those_of_the_built_model_in_its_order(name):
    with torch.device("meta"):
        model = MPT(CONFIGS[name])
    built = [(key, tensor.shape) for key, tensor in model.state_dict().items()]
    assert [*parameter_shapes(CONFIGS[name]).items()] == built
