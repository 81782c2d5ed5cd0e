"""Our model against transformers' six layouts of it, from the same weights: logits, loss, every gradient.

fp32: tolerances are relative to the largest entry of what is compared, LOGITS and GRADIENTS below; measured on the
models here: about 1e-6 for logits and 2e-6 for gradients. bf16: neither of two models is the truth, so both are held
against the fp32 result, and ours may be no further from it than 1.5 times theirs. Measured over six seeds: 0.84 to 1.02
times for logits, 0.80 to 1.02 for all gradients together, up to 1.09 for one matrix; a vector of 48 numbers alone has
too few to tell, so vectors count together.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MptConfig, MptForCausalLM
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.convert.hf_format import build_hf_tensor
from llmfoundry_lite.convert.huggingface import build_hf_config, tensor_sources_of
from llmfoundry_lite.models.mpt import MPT
from tests.helpers.models import (
    ALIBI,
    LLAMA,
    QWEN2,
    QWEN3,
    SMALL,
    random_model,
    random_tokens,
    to_hugging_face,
    with_activation,
    with_attention,
    with_scaling,
)

LOGITS = 1e-5
GRADIENTS = 1e-5


def build_theirs(model: MPT) -> torch.nn.Module:
    hf_config = build_hf_config(model.config)
    if model.config.attn_config.alibi:
        theirs = MptForCausalLM(MptConfig(**hf_config))
        # transformers reads alibi_bias_max and then forgets it (5.23); its own function knows how to use it.
        theirs.transformer.build_mpt_alibi_tensor = lambda heads, length, device: build_mpt_alibi_tensor(
            heads, length, model.config.attn_config.alibi_bias_max, device
        )
    elif model.config.attn_config.rope:
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config))
    else:
        theirs = GPT2LMHeadModel(GPT2Config(**hf_config))
    result = theirs.load_state_dict(to_hugging_face(model), strict=False)
    assert not result.unexpected_keys and result.missing_keys in ([], ["lm_head.weight"])
    theirs.tie_weights()
    return theirs


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < tolerance, f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ALIBI, id="mpt"),
        pytest.param(replace(ALIBI, n_heads=6), id="mpt-six-heads"),
        pytest.param(with_attention(ALIBI, clip_qkv=0.5), id="mpt-clip-qkv"),
        pytest.param(with_attention(ALIBI, alibi_bias_max=4), id="mpt-alibi-bias-max"),
        pytest.param(with_attention(ALIBI, softmax_scale=0.05), id="mpt-softmax-scale"),
        pytest.param(replace(ALIBI, norm_type="layernorm", norm_eps=1e-3), id="mpt-layernorm"),
        pytest.param(SMALL, id="gpt2"),
        pytest.param(replace(SMALL, no_bias=True), id="gpt2-no-bias"),
        pytest.param(replace(SMALL, expansion_ratio=2.5, norm_eps=1e-3), id="gpt2-expansion"),
        pytest.param(with_attention(SMALL, softmax_scale=1.0), id="gpt2-softmax-scale"),
        pytest.param(replace(SMALL, learned_pos_emb=False), id="gpt2-no-positions"),
        pytest.param(with_activation(SMALL, approximate="tanh"), id="gpt2-gelu-by-tanh"),
        pytest.param(with_activation(SMALL, name="quick_gelu"), id="gpt2-quick-gelu"),
        pytest.param(replace(with_attention(SMALL, fused_qkv=False), tie_word_embeddings=False), id="gpt2-untied"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(with_attention(LLAMA, attn_type="multihead_attention", kv_n_heads=None), id="llama-all-heads"),
        pytest.param(with_attention(LLAMA, attn_type="multiquery_attention", kv_n_heads=None), id="llama-one-kv-head"),
        pytest.param(replace(LLAMA, no_bias=False, tie_word_embeddings=True, norm_eps=1e-3), id="llama-bias-tied"),
        pytest.param(with_attention(LLAMA, fused_qkv=False), id="llama-three-matrices"),
        pytest.param(with_scaling(LLAMA, type="linear", factor=2.0), id="llama-linear"),
        pytest.param(replace(with_scaling(LLAMA, type="dynamic", factor=2.0), max_seq_len=16), id="llama-dynamic"),
        pytest.param(with_scaling(LLAMA, type="ntk", factor=4.0), id="llama-ntk"),
        pytest.param(with_activation(LLAMA, name="relu"), id="llama-relu"),
        pytest.param(with_attention(LLAMA, head_dim=16), id="llama-heads-of-another-width"),
        pytest.param(with_attention(LLAMA, sliding_window_size=8), id="mistral"),
        pytest.param(QWEN2, id="qwen2"),
        pytest.param(with_attention(QWEN3, head_dim=16), id="qwen3"),
    ],
)
def test_logits_loss_and_every_gradient_equal_transformers(config):
    ours = random_model(config)
    theirs = build_theirs(ours).eval()
    tokens_bt = random_tokens(config)

    logits_btv = ours(tokens_bt)
    loss = F.cross_entropy(logits_btv[:, :-1].flatten(0, 1), tokens_bt[:, 1:].flatten())
    loss.backward()
    reference = theirs(input_ids=tokens_bt, labels=tokens_bt)
    reference.loss.backward()

    assert_close(logits_btv, reference.logits, LOGITS, "logits")
    assert_close(loss, reference.loss, LOGITS, "loss")
    reference_gradients = gradients_of(theirs)
    gradients = in_their_layout(gradients_of(ours), config)
    for name, gradient in gradients.items():
        assert_close(gradient, reference_gradients[name], GRADIENTS, name)
    compared = {ours for name in gradients for ours in tensor_sources_of(config)[name].names}
    assert compared == {name for name, _ in ours.named_parameters()}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ALIBI, id="mpt"),
        pytest.param(replace(ALIBI, norm_type="layernorm"), id="mpt-layernorm"),
        pytest.param(SMALL, id="gpt2"),
        pytest.param(LLAMA, id="llama"),
        pytest.param(replace(LLAMA, norm_type="low_precision_rmsnorm"), id="llama-low-precision"),
    ],
)
def test_bf16_is_as_near_to_the_fp32_result_as_transformers_is(config):
    ours = random_model(config)
    theirs = build_theirs(ours).eval()
    tokens_bt = random_tokens(config)
    exact = backpropagate(ours(tokens_bt), tokens_bt) | in_their_layout(gradients_of(ours), config)
    exact = {name: tensor.clone() for name, tensor in exact.items()}

    for parameter in (*ours.parameters(), *theirs.parameters()):  # and no buffers: transformers keeps RoPE's in fp32
        parameter.grad, parameter.data = None, parameter.data.bfloat16()
    found = backpropagate(ours(tokens_bt), tokens_bt) | in_their_layout(gradients_of(ours), config)
    reference = backpropagate(theirs(input_ids=tokens_bt).logits, tokens_bt) | gradients_of(theirs)
    assert {tensor.dtype for tensor in (*found.values(), *reference.values())} == {torch.bfloat16}
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in exact.items():
        errors = [(other[name].float() - tensor).square().sum() for other in (found, reference)]
        groups.setdefault(name if tensor.dim() > 1 else "vectors", []).append(torch.stack(errors))
    for name, errors in groups.items():
        our_error, their_error = torch.stack(errors).sum(0).sqrt().tolist()
        assert 0 < our_error <= 1.5 * their_error, name


def backpropagate(logits_btv: torch.Tensor, tokens_bt: torch.Tensor) -> dict[str, torch.Tensor]:
    F.cross_entropy(logits_btv[:, :-1].float().flatten(0, 1), tokens_bt[:, 1:].flatten()).backward()
    return {"logits": logits_btv.detach()}


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def in_their_layout(gradients: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """transformers' name -> our gradient; without what theirs has and ours has not."""
    return {
        name: build_hf_tensor(gradients, config, source)
        for name, source in tensor_sources_of(config).items()
        if source.names[0] in gradients
    }


def test_a_head_sees_hidden_states_and_the_output_embedding():
    model = random_model(SMALL)
    tokens_bt = random_tokens(SMALL)
    logits_btv = model(tokens_bt, head=lambda hidden_btd, unembedding_vd: hidden_btd @ unembedding_vd.t())
    torch.testing.assert_close(logits_btv, model(tokens_bt))


@pytest.mark.parametrize("norm_type", ["layernorm", "low_precision_layernorm"])
def test_layernorm_in_fp32_only_when_asked_for(norm_type):
    model = random_model(replace(SMALL, norm_type=norm_type)).to(torch.bfloat16)
    norm = model.transformer.norm_f
    x_btd = torch.randn(2, 8, SMALL.d_model, dtype=torch.bfloat16) * 30
    exact_btd = F.layer_norm(x_btd.float(), (SMALL.d_model,), norm.weight.float(), norm.bias.float(), norm.eps)
    assert norm(x_btd).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x_btd).float(), exact_btd, rtol=2**-7, atol=2**-7)
    if norm_type == "layernorm":
        assert torch.equal(norm(x_btd), exact_btd.bfloat16())
