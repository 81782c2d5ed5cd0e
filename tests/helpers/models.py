"""Models of every kind in the family, small, with weights at no special value."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llmfoundry_lite.config.model_schema import AttentionConfig, FFNActivation, FFNConfig, ModelConfig, RopeScaling
from llmfoundry_lite.convert.hf_format import build_hf_tensor
from llmfoundry_lite.convert.huggingface import import_model, tensor_sources_of
from llmfoundry_lite.models.mpt import MPT

SMALL = ModelConfig(d_model=48, n_heads=4, n_layers=3, max_seq_len=32, vocab_size=97)


ALIBI = replace(SMALL, no_bias=True, attn_config=AttentionConfig(alibi=True))


LLAMA = replace(
    SMALL,
    no_bias=True,
    norm_type="rmsnorm",
    attn_config=AttentionConfig(attn_type="grouped_query_attention", kv_n_heads=2, rope=True),
    ffn_config=FFNConfig(ffn_type="mptglu", ffn_act_fn=FFNActivation(name="silu")),
    tie_word_embeddings=False,
)


QWEN2 = replace(LLAMA, attn_config=replace(LLAMA.attn_config, qkv_bias=True))


QWEN3 = replace(
    LLAMA, attn_config=replace(LLAMA.attn_config, qk_gn=True, norm_type=LLAMA.norm_type, norm_eps=LLAMA.norm_eps)
)


def random_model(config: ModelConfig, seed: int = 0) -> MPT:
    """Weights that leave nothing at a special value: norms and biases are off one and zero."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = MPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "_ln" in name
            parameter.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.2)
    return model


def to_hugging_face(model: MPT) -> dict[str, torch.Tensor]:
    """The tensors of a model under the names, and in the orientation, of the layout that fits it."""
    state = model.state_dict()
    return {
        name: build_hf_tensor(state, model.config, source) for name, source in tensor_sources_of(model.config).items()
    }


def normal_model(config: ModelConfig, seed: int = 0, std: float = 0.3, attn_impl: str = "sdpa") -> MPT:
    """For evaluation, with all weights drawn alike."""
    torch.manual_seed(seed)
    model = MPT(config, attn_impl).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


def random_tokens(config: ModelConfig, num_tokens: int = 29) -> torch.Tensor:
    return torch.randint(config.vocab_size, (3, num_tokens), generator=torch.Generator().manual_seed(1))


def assert_computes_the_same(theirs: Any, folder: Path) -> None:
    """A model of transformers, saved by it, and read here."""
    theirs.save_pretrained(folder)
    config, state_dict = import_model(folder)
    ours = MPT(config).eval()
    ours.load_state_dict(state_dict)
    tokens_bt = random_tokens(config)
    assert (ours(tokens_bt) - theirs(tokens_bt).logits).abs().max() < 1e-5


def with_activation(config: ModelConfig, **options) -> ModelConfig:
    return replace(config, ffn_config=replace(config.ffn_config, ffn_act_fn=FFNActivation(**options)))


def with_attention(config: ModelConfig, **options) -> ModelConfig:
    return replace(config, attn_config=replace(config.attn_config, **options))


def with_scaling(config: ModelConfig, **options) -> ModelConfig:
    return with_attention(config, rope_theta=500.0, rope_impl="hf", rope_hf_config=RopeScaling(**options))


BASE = ModelConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=32, vocab_size=97)


EOS = 5


def attention(**options) -> ModelConfig:
    return replace(BASE, attn_config=AttentionConfig(**options))


GQA = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}


FAMILY = {
    "learned": BASE,
    "alibi": attention(alibi=True),
    "rope": attention(rope=True),
    "rope linear": attention(rope=True, rope_hf_config=RopeScaling(type="linear", factor=2.0)),
    "rope ntk": attention(rope=True, rope_theta=500.0, rope_hf_config=RopeScaling(type="ntk", factor=4.0)),
    "rope llama3": attention(
        rope=True,
        rope_hf_config=RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=64),
    ),
    "no positions": replace(BASE, learned_pos_emb=False),
    "grouped": attention(**GQA),
    "multiquery": attention(attn_type="multiquery_attention", alibi=True),
    "grouped rope": attention(**GQA, rope=True),
    "window": attention(sliding_window_size=3),
    "window alibi grouped": attention(**GQA, sliding_window_size=5, alibi=True),
    "norm of q and k": attention(**GQA, qk_ln=True),
    "norm of heads": attention(**GQA, qk_gn=True),
    "heads of another width": attention(**GQA, head_dim=10, rope=True, qkv_bias=False),
    "wide heads, three matrices": replace(
        BASE, no_bias=True, attn_config=AttentionConfig(**GQA, head_dim=20, fused_qkv=False, qkv_bias=True, qk_ln=True)
    ),
    "clip and scale": attention(clip_qkv=0.5, softmax_scale=0.3),
    "three matrices": attention(**GQA, fused_qkv=False, clip_qkv=0.5),
    "gated": replace(BASE, ffn_config=FFNConfig(ffn_type="mptglu", ffn_act_fn=FFNActivation(name="silu"))),
    "hidden size": replace(BASE, ffn_config=FFNConfig(ffn_hidden_size=40, ffn_act_fn=FFNActivation(name="relu"))),
    "gelu by tanh": replace(BASE, ffn_config=FFNConfig(ffn_act_fn=FFNActivation(approximate="tanh"))),
    "quick gelu": replace(BASE, ffn_config=FFNConfig(ffn_act_fn=FFNActivation(name="quick_gelu"))),
    "rmsnorm": replace(BASE, norm_type="rmsnorm"),
    "low-precision rmsnorm": replace(BASE, norm_type="low_precision_rmsnorm", attn_config=AttentionConfig(qk_ln=True)),
    "norms of heads, not the model's": replace(
        BASE, norm_type="rmsnorm", attn_config=AttentionConfig(**GQA, qk_gn=True, norm_eps=1e-3)
    ),
    "rmsnorm of q and k": attention(qk_ln=True, norm_type="rmsnorm", norm_eps=1e-3),
    "untied": replace(BASE, tie_word_embeddings=False),
    "no bias": replace(BASE, no_bias=True, attn_config=AttentionConfig(**GQA, qk_ln=True)),
}


def with_implementation(model: MPT, attn_impl: str) -> MPT:
    other = MPT(model.config, attn_impl)
    other.load_state_dict(model.state_dict())
    return other.eval()
