"""Causal attention as batched matrix products over blocks of queries, one operation to autograd and to a compiler.

It is for CPUs in bf16, where matrix products run several times as fast as PyTorch's fused kernel. It keeps no scores
for the backward pass, computes none beyond a block's last key, and holds the scores of one sample and one block at a
time. Scores are rounded to the dtype of the inputs, as in LLM Foundry's `torch` implementation.

Legend: b batch, t queries, s keys (as many), h heads, g heads of keys and values, k head dimension. Tensors named
`..._block_...` hold the queries of one block, or the keys that these attend to.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_SIZE = 256
"""Queries in a block. The scores of 12 heads and 2048 keys then have 12 MB in bf16, which a cache can hold."""


@torch.library.custom_op("llmfoundry_lite::blocked_attention", mutates_args=())
def blocked_attention(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, bias_bhts: Tensor | None, scale: float, window: int
) -> Tensor:
    """Compute softmax(q k^T * scale + bias) v, [b, t, h, k], in the dtype of the inputs.

    Dimensions: b samples, t queries, s keys (as many as queries), h heads of queries, g heads of keys and values, k
    head dimension.

    bias_bhts: added to the scores, with -inf where a key is masked. b and h may be 1. None means causal attention
        without a bias.
    window: how many keys before its own position a query attends to; below 0, all of them. A bias must mask the others
        itself, because this only leaves out blocks of keys.
    """
    num_heads = q_bthk.size(2)
    out_bthk = torch.empty_like(q_bthk, memory_format=torch.contiguous_format)
    causal_bias_ts = _build_causal_bias(q_bthk)

    # One sample and one block of queries at a time, so that its scores stay in the cache.
    for b in range(q_bthk.size(0)):
        q_htk = _expand_heads(q_bthk[b], num_heads)
        k_hsk = _expand_heads(k_bsgk[b], num_heads)
        v_hsk = _expand_heads(v_bsgk[b], num_heads)
        for queries, keys in _iterate_blocks(q_htk.size(1), window):
            bias_hts = _bias_of_block(bias_bhts, causal_bias_ts, b, queries, keys)
            weights_hts = _compute_weights(q_htk[:, queries], k_hsk[:, keys], bias_hts, scale)
            out_bthk[b, queries] = torch.bmm(weights_hts, v_hsk[:, keys]).transpose(0, 1)
    return out_bthk


@torch.library.custom_op("llmfoundry_lite::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    grad_bthk: Tensor,
    q_bthk: Tensor,
    k_bsgk: Tensor,
    v_bsgk: Tensor,
    bias_bhts: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v from `grad_bthk`, the gradient of the output. The bias has none.

    The arguments after it are those of `blocked_attention`. Attention weights are computed again, block by block, as in
    the forward pass, which has kept none. Keys and values get gradients from several blocks of queries, which are
    summed in fp32.
    """
    num_heads = q_bthk.size(2)
    grad_q_bthk = torch.empty_like(q_bthk, memory_format=torch.contiguous_format)
    grad_k_bsgk = torch.empty_like(k_bsgk, memory_format=torch.contiguous_format)
    grad_v_bsgk = torch.empty_like(v_bsgk, memory_format=torch.contiguous_format)
    causal_bias_ts = _build_causal_bias(q_bthk)
    for b in range(q_bthk.size(0)):
        grad_htk = _expand_heads(grad_bthk[b], num_heads)
        q_htk = _expand_heads(q_bthk[b], num_heads)
        k_hsk = _expand_heads(k_bsgk[b], num_heads)
        v_hsk = _expand_heads(v_bsgk[b], num_heads)
        grad_k_hsk = torch.zeros_like(k_hsk, dtype=torch.float32)
        grad_v_hsk = torch.zeros_like(v_hsk, dtype=torch.float32)

        for queries, keys in _iterate_blocks(q_htk.size(1), window):
            # The block's attention weights again: w = softmax(q k^T * scale + bias).
            grad_block_htk = grad_htk[:, queries]
            q_block_htk = q_htk[:, queries]
            k_block_hsk = k_hsk[:, keys]
            bias_hts = _bias_of_block(bias_bhts, causal_bias_ts, b, queries, keys)
            weights_hts = _compute_weights(q_block_htk, k_block_hsk, bias_hts, scale)

            # The output is o = w v, so dv = w^T do and dw = do v^T. The softmax turns dw into the gradient of the
            # scores, from which q and k get theirs.
            grad_v_hsk[:, keys] += torch.bmm(weights_hts.transpose(1, 2), grad_block_htk)
            grad_weights_hts = torch.bmm(grad_block_htk, v_hsk[:, keys].transpose(1, 2))
            grad_scores_hts = torch._softmax_backward_data(grad_weights_hts, weights_hts, -1, weights_hts.dtype)
            grad_q_bthk[b, queries] = (torch.bmm(grad_scores_hts, k_block_hsk) * scale).transpose(0, 1)
            grad_k_hsk[:, keys] += torch.bmm(grad_scores_hts.transpose(1, 2), q_block_htk)

        grad_k_bsgk[b] = _sum_shared_heads(grad_k_hsk * scale, k_bsgk.size(2))
        grad_v_bsgk[b] = _sum_shared_heads(grad_v_hsk, v_bsgk.size(2))
    return grad_q_bthk, grad_k_bsgk, grad_v_bsgk


def _expand_heads(x_tgk: Tensor, num_heads: int) -> Tensor:
    """Copy one sample to [h, t, k], and repeat heads that several heads of queries share.

    Products of contiguous matrices are faster by more than the copy takes.
    """
    return x_tgk.transpose(0, 1).repeat_interleave(num_heads // x_tgk.size(1), dim=0)


def _sum_shared_heads(x_hsk: Tensor, num_shared_heads: int) -> Tensor:
    """Undo `_expand_heads` for a gradient: sum over the heads that were copies of one. [s, g, k]"""
    return x_hsk.unflatten(0, (num_shared_heads, -1)).sum(dim=1).transpose(0, 1)


def _iterate_blocks(num_tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that at least one of them attends to."""
    for start in range(0, num_tokens, BLOCK_SIZE):
        end = min(start + BLOCK_SIZE, num_tokens)
        first_key = max(0, start - window) if window >= 0 else 0
        yield slice(start, end), slice(first_key, end)


def _build_causal_bias(q_bthk: Tensor) -> Tensor:
    """Build the causal bias of the last block, [BLOCK_SIZE, s]: 0, and -inf to the right of the diagonal.

    The diagonal ends in the lower right corner. Because the last key of every block is that of its last query,
    `_bias_of_block` cuts the bias of any block out of that corner.
    """
    num_tokens = q_bthk.size(1)
    bias_ts = torch.full((BLOCK_SIZE, num_tokens), -math.inf, dtype=q_bthk.dtype, device=q_bthk.device)
    return bias_ts.triu_(num_tokens - BLOCK_SIZE + 1)


def _bias_of_block(bias_bhts: Tensor | None, causal_bias_ts: Tensor, b: int, queries: slice, keys: slice) -> Tensor:
    """Return sample b's bias between some queries and some keys, [h or 1, t, s]; causal if there is no other."""
    if bias_bhts is not None:
        return bias_bhts[b % bias_bhts.size(0), :, queries, keys]
    num_queries = queries.stop - queries.start
    num_keys = keys.stop - keys.start
    return causal_bias_ts[None, -num_queries:, -num_keys:]


def _compute_weights(q_htk: Tensor, k_hsk: Tensor, bias_hts: Tensor, scale: float) -> Tensor:
    """Compute the attention weights of one block, softmax(q k^T * scale + bias): [h, t, s]."""
    scores_hts = torch.baddbmm(bias_hts, q_htk, k_hsk.transpose(1, 2), alpha=scale)
    return torch.softmax(scores_hts, dim=-1)


# What a compiler and autograd have to know of the two operations: shapes without values, and the backward pass.


@blocked_attention.register_fake
def _(q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, window):
    return torch.empty_like(q_bthk, memory_format=torch.contiguous_format)


@blocked_attention_backward.register_fake
def _(grad_bthk, q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_bthk, k_bsgk, v_bsgk))


def _keep_for_backward(ctx, inputs, output):
    q_bthk, k_bsgk, v_bsgk, bias_bhts, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q_bthk, k_bsgk, v_bsgk, bias_bhts)


def _backward(ctx, grad_bthk):
    grads = blocked_attention_backward(grad_bthk, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None  # none for the bias, the scale and the window


blocked_attention.register_autograd(_backward, setup_context=_keep_for_backward)
