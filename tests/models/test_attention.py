"""Attention against its definition, written out; ALiBi's slopes; dropout in training only.

Shapes: b rows, t queries, s keys, h heads of queries, g heads of keys and values, k numbers of a head.
`_v` is the vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, _ordered_to_dense, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmfoundry_lite.config.model_schema import AttentionConfig, ModelConfig
from llmfoundry_lite.models import flex_attention
from llmfoundry_lite.models.attention import Mask, build_mask
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.positions import compute_alibi_slopes

SMALL = ModelConfig(d_model=16, n_heads=2, n_layers=2, max_seq_len=16, vocab_size=31)


def random_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_documents(num_rows: int, num_tokens: int, share_of_ends: float, seed: int) -> torch.Tensor:
    """Each token's document, [rows, tokens]: a new one begins after about this share of the tokens."""
    draws = torch.rand(num_rows, num_tokens, generator=random_generator(seed))
    return (draws < share_of_ends).long().cumsum(1)


def with_random_weights(model: MPT, std: float = 1.0) -> MPT:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


# -------------------------------------------------------------------------------------- beside the definition


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def test_one_head_two_dimensions_three_tokens_by_hand():
    queries = [(1.0, 0.0), (0.5, 2.0), (-1.0, 1.0)]
    keys = [(0.3, 0.1), (1.0, -1.0), (0.2, 0.7)]
    values = [(1.0, 2.0), (3.0, 5.0), (7.0, 11.0)]
    alibi_slope = 0.25
    scale = 1 / math.sqrt(2)

    expected = []
    for t, query in enumerate(queries):
        scores = []
        for s in range(t + 1):  # the tokens up to this one
            product = query[0] * keys[s][0] + query[1] * keys[s][1]
            scores.append(scale * product - alibi_slope * (t - s))
        weights = softmax(scores)
        expected.append([sum(weights[s] * values[s][dim] for s in range(t + 1)) for dim in range(2)])

    q_bthk, k_bthk, v_bthk = (torch.tensor(vectors).view(1, 3, 1, 2) for vectors in (queries, keys, values))
    mask = build_mask(AttentionConfig(), "sdpa", torch.tensor([alibi_slope]), torch.arange(3)[None], 3)
    out_bthk = mask.attend(q_bthk, k_bthk, v_bthk)
    torch.testing.assert_close(out_bthk.view(3, 2), torch.tensor(expected))


def test_without_alibi_the_first_token_sees_itself_and_the_last_sees_all():
    """All scores are equal, so each token gets the mean of the values that it sees."""
    q_bthk = torch.zeros(1, 4, 1, 2)
    v_bthk = torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 4, 1, 1).expand(1, 4, 1, 2)
    out_bthk = Mask(implementation="sdpa").attend(q_bthk, q_bthk, v_bthk)
    torch.testing.assert_close(out_bthk[0, :, 0, 0], torch.tensor([1.0, 1.5, 2.0, 3.0]))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_on_a_gpu_the_last_queries_of_plain_text_need_no_bias(num_kv_heads):
    """8 queries at the end of 24 keys. The mask is built as for a GPU, and used on the CPU."""
    generator = random_generator()
    q_bthk = torch.randn(2, 8, 4, 16, generator=generator).requires_grad_()
    k_bsgk = torch.randn(2, 24, num_kv_heads, 16, generator=generator).requires_grad_()
    v_bsgk = torch.randn(2, 24, num_kv_heads, 16, generator=generator).requires_grad_()

    def output_and_gradients(mask: Mask) -> tuple[torch.Tensor, ...]:
        out_bthk = mask.attend(q_bthk, k_bsgk, v_bsgk)
        return out_bthk, *torch.autograd.grad(out_bthk.square().sum(), (q_bthk, k_bsgk, v_bsgk))

    reference = build_mask(AttentionConfig(), "reference", None, torch.arange(16, 24)[None], 24)
    with FakeTensorMode():
        mask = build_mask(AttentionConfig(), "sdpa", None, torch.arange(16, 24, device="cuda")[None], 24)
    assert mask.bias_bhts is None
    torch.testing.assert_close(output_and_gradients(mask), output_and_gradients(reference))


@pytest.mark.slow
def test_attention_of_the_last_queries_compiles_whole():
    x_bthk = torch.randn(1, 24, 2, 8)
    last_bthk = x_bthk[:, 16:]
    mask = Mask(implementation="sdpa", is_lower_right_causal=True)
    compiled: Any = torch.compile(Mask.attend, backend="aot_eager", fullgraph=True)
    expected = Mask.attend(mask, last_bthk, x_bthk, x_bthk)
    assert expected.shape == (1, 8, 2, 8)
    assert compiled(mask, last_bthk, x_bthk, x_bthk).shape == (1, 8, 2, 8)


# ------------------------------------------------------------------------------- masks by blocks: flex, blocked


class LargestTensor(TorchDispatchMode):
    """Inside, `num_elements` becomes the number of elements of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


def dense_blocks(block_mask: BlockMask, kind: str) -> torch.Tensor:
    """For each block of queries and of keys, whether the mask lists it under this kind."""
    num_blocks = getattr(block_mask, f"{kind}_num_blocks")
    indices = getattr(block_mask, f"{kind}_indices")
    return _ordered_to_dense(num_blocks, indices, indices.size(-1))


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [-1, 0, 200])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 500), (384, 384), (500, 640)])
def test_flex_computes_the_blocks_that_are_seen_and_holds_no_whole_mask(num_queries, num_keys, window, has_documents):
    num_rows = 3
    options = AttentionConfig(sliding_window_size=window)
    positions_1t = torch.arange(num_keys)[None, -num_queries:]
    documents_bs = random_documents(num_rows, num_keys, 0.005, seed=1) if has_documents else None
    flex_attention.causal_block_mask.cache_clear()
    with LargestTensor() as largest:
        mask = build_mask(options, "flex", None, positions_1t, num_keys, None, documents_bs).block_mask
    assert mask is not None
    assert largest.num_elements <= num_rows * num_keys

    # torch's own function evaluates the mask for every query and key.
    expected = create_block_mask(mask.mask_mod, mask.shape[0], mask.shape[1], num_queries, num_keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(dense_blocks(mask, kind), dense_blocks(expected, kind)), kind
    assert mask.seq_lengths == expected.seq_lengths


@pytest.mark.parametrize("window", [-1, 0, 5, 300])
@pytest.mark.parametrize("has_documents", [False, True])
def test_blocks_of_queries_see_the_keys_of_their_window_and_document(window, has_documents):
    generator = random_generator()
    options = AttentionConfig(sliding_window_size=window)
    q_bthk, k_bthk, v_bthk = (torch.randn(2, 600, 2, 8, generator=generator) for _ in range(3))
    documents_bs = random_documents(2, 600, 0.01, seed=1) if has_documents else None

    def attend(implementation: str) -> torch.Tensor:
        mask = build_mask(options, implementation, None, torch.arange(600)[None], 600, None, documents_bs)
        return mask.attend(q_bthk, k_bthk, v_bthk)

    torch.testing.assert_close(attend("blocked"), attend("reference"))


def test_flex_never_falls_back_to_all_scores(monkeypatch):
    """Beyond its limit of recompilations torch falls back to all scores, unless the graph may not be broken."""
    compile_options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_options.append(options))
    flex_attention.compile_to_one_operation.__wrapped__(None)
    assert compile_options[0]["fullgraph"]


def test_flex_raises_torch_s_limit_of_recompilations():
    """`auto`, then an evaluation and decoding reach torch's 8."""
    with torch._dynamo.config.patch(recompile_limit=8):
        flex_attention.raise_recompile_limit.cache_clear()
        build_mask(AttentionConfig(), "flex", None, torch.arange(8)[None], 8)
        assert torch._dynamo.config.recompile_limit >= 32


@pytest.mark.parametrize("alibi", [False, True])
def test_in_bf16_blocks_are_as_near_the_truth_as_plain_products(alibi):
    """Plain products, each rounded to bf16: what LLM Foundry's `torch` and transformers' eager attention do.

    The truth is attention in fp32 by the definition. Output and gradients of blocks may be 1.2 times as far from it.
    """
    generator = random_generator()
    q_bthk, k_bthk, v_bthk, out_gradient_bthk = (
        torch.randn(2, 600, 4, 16, generator=generator).bfloat16() for _ in range(4)
    )
    slopes_h = torch.tensor(compute_alibi_slopes(4)) if alibi else None

    def attend_by_plain_products(q_bthk, k_bthk, v_bthk, mask):
        if alibi:
            bias_bhts = mask.bias_bhts
        else:
            bias_bhts = torch.full((600, 600), -math.inf, dtype=q_bthk.dtype).triu(1)
        q_bhtk, k_bhtk, v_bhtk = (tensor.transpose(1, 2) for tensor in (q_bthk, k_bthk, v_bthk))
        scores_bhts = (q_bhtk @ k_bhtk.transpose(2, 3)) / math.sqrt(16) + bias_bhts
        return (scores_bhts.softmax(-1) @ v_bhtk).transpose(1, 2)

    def attend_by_mask(q_bthk, k_bthk, v_bthk, mask):
        return mask.attend(q_bthk, k_bthk, v_bthk)

    def output_and_gradients(attend, implementation, dtype=torch.bfloat16):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q_bthk, k_bthk, v_bthk)]
        mask = build_mask(AttentionConfig(), implementation, slopes_h, torch.arange(600)[None], 600).to(dtype)
        out_bthk = attend(*leaves, mask)
        out_bthk.backward(out_gradient_bthk.to(dtype))
        return [out_bthk.double(), *(leaf.grad.double() for leaf in leaves)]

    truth = output_and_gradients(attend_by_mask, "reference", torch.float32)
    by_blocks = output_and_gradients(attend_by_mask, "blocked")
    by_products = output_and_gradients(attend_by_plain_products, "sdpa")
    for exact, of_blocks, of_products in zip(truth, by_blocks, by_products, strict=True):
        error_of_blocks = (of_blocks - exact).norm()
        error_of_products = (of_products - exact).norm()
        assert error_of_blocks <= 1.2 * error_of_products
        assert 1.2 * error_of_products < 0.02 * exact.norm()


# ------------------------------------------------------------------------------------------------ ALiBi's slopes


@pytest.mark.parametrize(("n_heads", "bias_max"), [(8, 8), (4, 4)])
def test_slopes_of_a_power_of_two_fall_geometrically(n_heads, bias_max):
    assert compute_alibi_slopes(n_heads, bias_max=bias_max) == [2.0**-i for i in range(1, n_heads + 1)]


def test_other_head_counts_take_every_second_slope_of_the_next_power_first():
    assert compute_alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


# -------------------------------------------------------------------------------------------- in a whole model


@pytest.mark.parametrize("alibi", [False, True])
def test_two_continuations_in_one_row_are_as_two_rows(alibi):
    """The context 3 4, then the continuations 5 6 and 7: positions and mask hide one continuation from the other."""
    torch.manual_seed(0)
    model = with_random_weights(MPT(replace(SMALL, attn_config=AttentionConfig(alibi=alibi))).eval(), std=0.3)
    together_bt = torch.tensor([[3, 4, 5, 6, 7]])
    positions_bt = torch.tensor([[0, 1, 2, 3, 2]])
    attention_mask_bts = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    attention_mask_bts[0, 4, 2:4] = False  # token 7 does not see 5 and 6
    logits_tv = model(together_bt, positions_bt=positions_bt, attention_mask_bts=attention_mask_bts)[0]

    first_alone_tv = model(torch.tensor([[3, 4, 5, 6]]))[0]
    second_alone_tv = model(torch.tensor([[3, 4, 7]]))[0]
    torch.testing.assert_close(logits_tv[:4], first_alone_tv)
    torch.testing.assert_close(logits_tv[[0, 1, 4]], second_alone_tv)


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
    model = with_random_weights(MPT(config))
    tokens_bt = torch.arange(12).view(1, 12)
    without_dropout = MPT(replace(SMALL, attn_config=AttentionConfig(alibi=config.attn_config.alibi)))
    without_dropout.load_state_dict(model.state_dict())

    model.eval()
    assert torch.equal(model(tokens_bt), without_dropout(tokens_bt))
    model.train()
    assert not torch.equal(model(tokens_bt), model(tokens_bt)), "a draw each time"


@pytest.fixture
def clipped() -> MPT:
    """A model that clips q, k and v to 0.3, and has them in one matrix."""
    torch.manual_seed(0)
    clipping = AttentionConfig(clip_qkv=0.3)
    config = ModelConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=8, vocab_size=11, attn_config=clipping)
    return with_random_weights(MPT(config), std=0.5)


def test_q_k_and_v_are_clipped_alike_in_one_matrix_and_in_three(clipped):
    weights = dict(clipped.state_dict())
    for kind in ("weight", "bias"):
        fused_name = f"transformer.blocks.0.attn.Wqkv.{kind}"
        parts = weights.pop(fused_name).chunk(3)
        for part_name, part in zip(("Wq", "Wk", "Wv"), parts, strict=True):
            weights[fused_name.replace("Wqkv", part_name)] = part
    config = clipped.config
    three_matrices = MPT(replace(config, attn_config=replace(config.attn_config, fused_qkv=False)))
    three_matrices.load_state_dict(weights)

    tokens_bt = torch.arange(8)[None]
    torch.testing.assert_close(three_matrices(tokens_bt), clipped(tokens_bt))


def test_clipping_q_k_and_v_changes_the_logits(clipped):
    unclipped = MPT(replace(clipped.config, attn_config=AttentionConfig()))
    unclipped.load_state_dict(clipped.state_dict())
    tokens_bt = torch.arange(8)[None]
    assert (unclipped(tokens_bt) - clipped(tokens_bt)).abs().max() > 1e-2
