"""Causal attention as batched matrix products over blocks of queries, one operation to autograd and to a compiler.

For CPUs in bf16, where products run several times as fast as PyTorch's fused kernel. It keeps no scores for the
backward pass, computes none beyond a block's last key, and holds those of one sample and one block at a time. Scores
are rounded to the dtype of the inputs, as in LLM Foundry's `torch`.

Legend: b batch, t queries, s keys (as many), h heads, g heads of keys and values, k head dimension.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""Queries at a time: the scores of 12 heads and 2048 keys are then 12 MB, which a cache can hold."""


@torch.library.custom_op("llmfoundry_lite::blocked_attention", mutates_args=())
def blocked_attention(
    q_bthk: Tensor, k_bsgk: Tensor, v_bsgk: Tensor, bias_bhts: Tensor | None, scale: float, window: int
) -> Tensor:
    """Compute softmax(q k^T * scale + bias) v, [b, t, h, k], in the dtype of the inputs.

    `bias_bhts` (b and h may be 1) has -inf where masked; without it attention is causal. No query attends further back
    than `window` keys; below 0 there is no limit.
    """
    out_bthk = torch.empty_like(q_bthk, memory_format=torch.contiguous_format)
    later_ts = _later(q_bthk)
    for b in range(q_bthk.size(0)):
        q_htk, k_hsk, v_hsk = (_heads_first(x[b], q_bthk.size(2)) for x in (q_bthk, k_bsgk, v_bsgk))
        for queries, keys in _blocks(q_htk.size(1), window):
            weights_hts = _weights(
                q_htk[:, queries], k_hsk[:, keys], _bias(bias_bhts, later_ts, b, queries, keys), scale
            )
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
    """Compute gradients of q, k and v. Those of keys and values are summed over blocks in fp32."""
    grads_bthk = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_bthk, k_bsgk, v_bsgk)]
    later_ts = _later(q_bthk)
    for b in range(q_bthk.size(0)):
        grad_htk, q_htk, k_hsk, v_hsk = (
            _heads_first(x[b], q_bthk.size(2)) for x in (grad_bthk, q_bthk, k_bsgk, v_bsgk)
        )
        grad_k_hsk, grad_v_hsk = (torch.zeros_like(x, dtype=torch.float32) for x in (k_hsk, v_hsk))
        for queries, keys in _blocks(q_htk.size(1), window):
            q_part_htk, grad_part_htk, k_part_hsk = q_htk[:, queries], grad_htk[:, queries], k_hsk[:, keys]
            weights_hts = _weights(q_part_htk, k_part_hsk, _bias(bias_bhts, later_ts, b, queries, keys), scale)
            grad_v_hsk[:, keys] += torch.bmm(weights_hts.transpose(1, 2), grad_part_htk)
            grad_weights_hts = torch.bmm(grad_part_htk, v_hsk[:, keys].transpose(1, 2))
            grad_scores_hts = torch._softmax_backward_data(grad_weights_hts, weights_hts, -1, weights_hts.dtype)
            grads_bthk[0][b, queries] = (torch.bmm(grad_scores_hts, k_part_hsk) * scale).transpose(0, 1)
            grad_k_hsk[:, keys] += torch.bmm(grad_scores_hts.transpose(1, 2), q_part_htk)
        grads_bthk[1][b] = _shared(grad_k_hsk * scale, k_bsgk.size(2))
        grads_bthk[2][b] = _shared(grad_v_hsk, v_bsgk.size(2))
    return grads_bthk[0], grads_bthk[1], grads_bthk[2]


def _heads_first(x_tgk: Tensor, num_heads: int) -> Tensor:
    """Copy to [h, t, k]: contiguous products gain more time than the copy takes."""
    return x_tgk.transpose(0, 1).repeat_interleave(num_heads // x_tgk.size(1), dim=0)


def _shared(x_hsk: Tensor, num_shared: int) -> Tensor:
    """Sum over the heads that share one: [s, g, k]."""
    return x_hsk.unflatten(0, (num_shared, -1)).sum(dim=1).transpose(0, 1)


def _blocks(num_tokens: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, and the keys that any of them attends to."""
    for start in range(0, num_tokens, BLOCK):
        end = min(start + BLOCK, num_tokens)
        yield slice(start, end), slice(max(0, start - window) if window >= 0 else 0, end)


def _bias(bias_bhts: Tensor | None, later_ts: Tensor, b: int, queries: slice, keys: slice) -> Tensor:
    """Cut the bias of one block, whose last key is its last query's own: [h or 1, t, s]."""
    if bias_bhts is not None:
        return bias_bhts[b % bias_bhts.size(0), :, queries, keys]
    return later_ts[None, queries.start - queries.stop :, keys.start - keys.stop :]


def _later(q_bthk: Tensor) -> Tensor:
    """Build -inf above the diagonal that ends in the lower right corner, from which a block of any size is cut."""
    num_tokens = q_bthk.size(1)
    later_ts = torch.full((BLOCK, num_tokens), -math.inf, dtype=q_bthk.dtype, device=q_bthk.device)
    return later_ts.triu_(num_tokens - BLOCK + 1)


def _weights(q_htk: Tensor, k_hsk: Tensor, bias_hts: Tensor, scale: float) -> Tensor:
    return torch.softmax(torch.baddbmm(bias_hts, q_htk, k_hsk.transpose(1, 2), alpha=scale), dim=-1)


@blocked_attention.register_fake
def _(q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, window):
    return torch.empty_like(q_bthk, memory_format=torch.contiguous_format)


@blocked_attention_backward.register_fake
def _(grad_bthk, q_bthk, k_bsgk, v_bsgk, bias_bhts, scale, window):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_bthk, k_bsgk, v_bsgk))


def _keep_for_backward(ctx, inputs, output):
    ctx.scale, ctx.window = inputs[4:]
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx, grad_bthk):
    grads = blocked_attention_backward(grad_bthk, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None


blocked_attention.register_autograd(_backward, setup_context=_keep_for_backward)
