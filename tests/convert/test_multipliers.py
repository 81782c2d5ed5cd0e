"""Multipliers of muP that cannot move into weights stay where they are."""

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.convert.multipliers import fold_multipliers, without_multipliers
from tests.helpers.models import random_model


def test_the_scale_of_scores_stays_if_queries_are_clipped_before_it():
    attention = AttentionConfig(clip_qkv=1.0, rope=True)
    mup = MupConfig(base_width=16, base_head_dim=4)
    config = ModelConfig(
        d_model=32, n_heads=4, n_layers=1, max_seq_len=8, vocab_size=11, attn_config=attention, mup=mup
    )
    assert without_multipliers(config).softmax_scale == config.softmax_scale == 0.25
    state = random_model(config).state_dict()
    name = "transformer.blocks.0.attn.Wqkv.weight"
    assert fold_multipliers(state, config)[name] is state[name]
