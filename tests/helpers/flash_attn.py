"""flash-attn's interface, computed plainly from its documentation: what is tested is what we pass to it."""

import itertools
from typing import Any

import torch


def flash_attn_func(
    q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
) -> torch.Tensor:
    assert causal and not dropout_p and deterministic == torch.are_deterministic_algorithms_enabled()
    distance = torch.arange(q.size(1))[:, None] - torch.arange(k.size(1))[None] + (k.size(1) - q.size(1))
    seen = (distance >= 0) & ((distance <= window_size[0]) | torch.tensor(window_size[0] < 0))
    out = []
    for h in range(q.size(2)):
        g = h * k.size(2) // q.size(2)
        scores = q[:, :, h] @ k[:, :, g].transpose(1, 2) * (softmax_scale or q.size(-1) ** -0.5)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[h] * distance.abs()
        out.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, :, g])
    return torch.stack(out, dim=2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options: Any
) -> torch.Tensor:
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
    bounds = [itertools.pairwise(starts.tolist()) for starts in (cu_seqlens_q, cu_seqlens_k)]
    out = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0]
        for (a, b), (c, d) in zip(*bounds, strict=True)
        if b > a
    ]
    return torch.cat(out)
