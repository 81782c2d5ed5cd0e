"""Attention against its definition, written out; ALiBi's slopes; dropout in training only."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import _ordered_to_dense, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.models import flex_attention
from llmfoundry_lite.models.attention import Mask, build_mask
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.positions import compute_alibi_slopes

SMALL = ModelConfig(d_model=16, n_heads=2, n_layers=2, max_seq_len=16, vocab_size=31)


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def test_one_head_two_dimensions_three_tokens_by_hand():
    q, k = [(1.0, 0.0), (0.5, 2.0), (-1.0, 1.0)], [(0.3, 0.1), (1.0, -1.0), (0.2, 0.7)]
    v, slope, scale = [(1.0, 2.0), (3.0, 5.0), (7.0, 11.0)], 0.25, 1 / math.sqrt(2)
    expected = []
    for t in range(3):
        scores = [scale * (q[t][0] * k[s][0] + q[t][1] * k[s][1]) - slope * (t - s) for s in range(t + 1)]
        weights = softmax(scores)
        expected.append([sum(weights[s] * v[s][j] for s in range(t + 1)) for j in range(2)])

    q_bthk, k_bthk, v_bthk = (torch.tensor(x).view(1, 3, 1, 2) for x in (q, k, v))
    mask = build_mask(AttentionConfig(), "sdpa", torch.tensor([slope]), torch.arange(3)[None], 3)
    out_bthk = mask.attend(q_bthk, k_bthk, v_bthk)
    torch.testing.assert_close(out_bthk.view(3, 2), torch.tensor(expected))


def test_without_alibi_the_first_token_sees_itself_and_the_last_sees_all():
    q_bthk = torch.zeros(1, 4, 1, 2)
    v_bthk = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 4, 1, 1).expand(1, 4, 1, 2)
    out_bthk = Mask(implementation="sdpa").attend(q_bthk, q_bthk, v_bthk)
    torch.testing.assert_close(out_bthk[0, :, 0, 0], torch.tensor([1.0, 1.5, 2.0, 3.0]))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_on_a_gpu_the_last_queries_of_plain_text_see_what_is_before_them_without_a_bias(num_kv_heads):
    generator = torch.Generator().manual_seed(0)
    q_bthk = torch.randn(2, 8, 4, 16, generator=generator).requires_grad_()
    k_bsgk, v_bsgk = (torch.randn(2, 24, num_kv_heads, 16, generator=generator).requires_grad_() for _ in range(2))
    expected = build_mask(AttentionConfig(), "reference", None, torch.arange(16, 24)[None], 24)
    with FakeTensorMode():
        mask = build_mask(AttentionConfig(), "sdpa", None, torch.arange(16, 24, device="cuda")[None], 24)
    assert mask.bias_bhts is None
    found = []
    for one in (expected, mask):
        out_bthk = one.attend(q_bthk, k_bsgk, v_bsgk)
        found.append((out_bthk, *torch.autograd.grad(out_bthk.square().sum(), (q_bthk, k_bsgk, v_bsgk))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
def test_attention_of_the_last_queries_compiles_whole():
    x_bthk = torch.randn(1, 24, 2, 8)
    compiled: Any = torch.compile(Mask.attend, backend="aot_eager", fullgraph=True)
    mask = Mask(implementation="sdpa", is_lower_right_causal=True)
    for attend in (Mask.attend, compiled):
        assert attend(mask, x_bthk[:, 16:], x_bthk, x_bthk).shape == (1, 8, 2, 8)


class Largest(TorchDispatchMode):
    """The most numbers that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 200])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 500), (384, 384), (500, 640)])
def test_flex_computes_the_blocks_that_anybody_sees_and_never_holds_the_whole_mask(
    num_queries, num_keys, window, has_documents
):
    options, positions_1t = AttentionConfig(sliding_window_size=window), torch.arange(num_keys)[None, -num_queries:]
    draws = torch.rand(3, num_keys, generator=torch.Generator().manual_seed(1))
    documents_bs = (draws < 0.005).long().cumsum(1) if has_documents else None
    flex_attention.causal_block_mask.cache_clear()
    with Largest() as largest:
        mask = build_mask(options, "flex", None, positions_1t, num_keys, None, documents_bs).block_mask
    assert mask is not None and largest.numbers <= 3 * num_keys
    expected = create_block_mask(mask.mask_mod, mask.shape[0], mask.shape[1], num_queries, num_keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        dense = [
            _ordered_to_dense(getattr(m, f"{kind}_num_blocks"), x := getattr(m, f"{kind}_indices"), x.size(-1))
            for m in (mask, expected)
        ]
        assert torch.equal(*dense), kind
    assert mask.seq_lengths == expected.seq_lengths


@pytest.mark.parametrize("window", [-1, 0, 5, 300])
@pytest.mark.parametrize("has_documents", [False, True])
def test_blocks_of_queries_see_every_key_within_the_window_and_of_their_row_s_documents(window, has_documents):
    options, generator = AttentionConfig(sliding_window_size=window), torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 600, 2, 8, generator=generator) for _ in range(3)]
    documents_bs = (torch.rand(2, 600, generator=generator) < 0.01).long().cumsum(1) if has_documents else None
    expected, found = (
        build_mask(options, name, None, torch.arange(600)[None], 600, None, documents_bs).attend(*tensors)
        for name in ("reference", "blocked")
    )
    torch.testing.assert_close(found, expected)


def test_flex_never_falls_back_to_all_scores(monkeypatch):
    """torch does past its limit of recompilations, unless it may not break the graph. `auto`, then an evaluation and
    decoding reach 8 of them."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options))
    with torch._dynamo.config.patch(recompile_limit=8):
        flex_attention.compile_to_one_operation.__wrapped__(None)
        flex_attention.raise_recompile_limit.cache_clear()
        build_mask(AttentionConfig(), "flex", None, torch.arange(8)[None], 8)
        assert asked[0]["fullgraph"] and torch._dynamo.config.recompile_limit >= 32


@pytest.mark.parametrize("alibi", [False, True])
def test_in_bf16_blocks_are_as_near_the_truth_as_attention_by_plain_products(alibi):
    """Plain products, each rounded to bf16: what LLM Foundry's `torch` and transformers' eager attention do."""
    generator = torch.Generator().manual_seed(0)
    tensors_bthk = [torch.randn(2, 600, 4, 16, generator=generator).bfloat16() for _ in range(4)]
    slopes_h = torch.tensor(compute_alibi_slopes(4)) if alibi else None

    def plain(q_bthk, k_bthk, v_bthk, mask):
        bias_bhts = mask.bias_bhts if alibi else torch.full((600, 600), -math.inf, dtype=q_bthk.dtype).triu(1)
        q, k, v = (x.transpose(1, 2) for x in (q_bthk, k_bthk, v_bthk))
        return (((q @ k.transpose(2, 3)) / 4 + bias_bhts).softmax(-1) @ v).transpose(1, 2)

    def results(compute, implementation, dtype=torch.bfloat16):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors_bthk[:3])
        mask = build_mask(AttentionConfig(), implementation, slopes_h, torch.arange(600)[None], 600).to(dtype)
        out = compute(q, k, v, mask)
        out.backward(tensors_bthk[3].to(dtype))
        return [x.double() for x in (out, q.grad, k.grad, v.grad)]

    def attend(q_bthk, k_bthk, v_bthk, mask):
        return mask.attend(q_bthk, k_bthk, v_bthk)

    exact = results(attend, "reference", torch.float32)
    ours, theirs = results(attend, "blocked"), results(plain, "sdpa")
    for true, found, peer in zip(exact, ours, theirs, strict=True):
        assert (found - true).norm() <= 1.2 * (peer - true).norm() < 0.02 * true.norm()


def test_slopes_of_a_power_of_two_fall_geometrically():
    assert compute_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert compute_alibi_slopes(4, bias_max=4) == [2.0**-i for i in range(1, 5)]


def test_other_head_counts_take_every_second_slope_of_the_next_power_first():
    assert compute_alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize("alibi", [False, True])
def test_two_continuations_in_one_row_are_as_two_rows(alibi):
    """context a b, then c d, or e: positions and sight say that neither continuation knows of the other."""
    torch.manual_seed(0)
    model = MPT(replace(SMALL, attn_config=AttentionConfig(alibi=alibi))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    together = torch.tensor([[3, 4, 5, 6, 7]])
    positions = torch.tensor([[0, 1, 2, 3, 2]])
    attention_mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    attention_mask[0, 4, 2:4] = False
    logits = model(together, positions_bt=positions, attention_mask_bts=attention_mask)[0]
    torch.testing.assert_close(logits[:4], model(torch.tensor([[3, 4, 5, 6]]))[0])
    torch.testing.assert_close(logits[[0, 1, 4]], model(torch.tensor([[3, 4, 7]]))[0])


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, attn_config=AttentionConfig(attn_pdrop=0.5)),
        replace(SMALL, attn_config=AttentionConfig(attn_pdrop=0.5, alibi=True)),
        replace(SMALL, emb_pdrop=0.5),
        replace(SMALL, resid_pdrop=0.5),
    ],
    ids=["attention", "attention-alibi", "embedding", "residual"],
)
def test_dropout_acts_in_training_only(config):
    torch.manual_seed(0)
    model = MPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tokens_bt = torch.arange(12).view(1, 12)
    plain = MPT(SMALL if not config.attn_config.alibi else replace(config, attn_config=AttentionConfig(alibi=True)))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(tokens_bt), plain(tokens_bt))
    model.train()
    assert not torch.equal(model(tokens_bt), model(tokens_bt))


def test_q_k_and_v_are_clipped_alike_in_one_matrix_and_in_three():
    config = ModelConfig(
        d_model=32, n_heads=4, n_layers=1, max_seq_len=8, vocab_size=11, attn_config=AttentionConfig(clip_qkv=0.3)
    )
    torch.manual_seed(0)
    whole = MPT(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    weights = dict(whole.state_dict())
    for kind in ("weight", "bias"):
        name = "transformer.blocks.0.attn.Wqkv."
        parts = weights.pop(name + kind).chunk(3)
        weights |= {name.replace("Wqkv", part) + kind: x for part, x in zip(("Wq", "Wk", "Wv"), parts, strict=True)}
    apart = MPT(replace(config, attn_config=replace(config.attn_config, fused_qkv=False)))
    apart.load_state_dict(weights)
    unclipped = MPT(replace(config, attn_config=AttentionConfig()))
    unclipped.load_state_dict(whole.state_dict())
    tokens_bt = torch.arange(8)[None]
    torch.testing.assert_close(apart(tokens_bt), whole(tokens_bt))
    assert (unclipped(tokens_bt) - whole(tokens_bt)).abs().max() > 1e-2
