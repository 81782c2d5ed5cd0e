"""Causal attention over heads: one function, and the biases that go with it.

Legend: b batch, t position of a query, s position of a key, h heads, k head dimension.
"""

import math

import torch
import torch.nn.functional as F


def attend(
    q_bthk: torch.Tensor,
    k_bshk: torch.Tensor,
    v_bshk: torch.Tensor,
    *,
    bias_hts: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Causal softmax(q k^T * scale + bias) v, with PyTorch's scaled_dot_product_attention.

    `bias_hts` is added to the scores and must hold the causal mask as well, as `alibi_bias` does; without one,
    there are as many queries as keys. Returns [b, t, h, k].
    """
    q_bhtk, k_bhsk, v_bhsk = (x.transpose(1, 2) for x in (q_bthk, k_bshk, v_bshk))
    # With three dimensions torch falls back to keeping all scores; with four, its fused kernels take the bias.
    bias_1hts = None if bias_hts is None else bias_hts[None].to(q_bthk.dtype)
    out_bhtk = F.scaled_dot_product_attention(
        q_bhtk,
        k_bhsk,
        v_bhsk,
        attn_mask=bias_1hts,
        is_causal=bias_1hts is None,
        dropout_p=dropout_p,
        scale=softmax_scale,
    )
    return out_bhtk.transpose(1, 2)


def alibi_slopes(num_heads: int, bias_max: int = 8) -> list[float]:
    """One slope per head (Press et al. 2022, "Train Short, Test Long", with MPT's order of heads).

    For a number of heads that is no power of two, the slopes of the next power are taken: every second one
    first, then the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * (i + 1) / power) for i in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def alibi_bias(slopes_h: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """ALiBi and the causal mask in one fp32 bias, [h, t, s]: -slope * distance back, -inf ahead."""
    queries_t = torch.arange(num_keys - num_queries, num_keys, device=slopes_h.device)
    keys_s = torch.arange(num_keys, device=slopes_h.device)
    distance_ts = queries_t[:, None] - keys_s[None, :]
    bias_hts = -slopes_h[:, None, None] * distance_ts
    return bias_hts.masked_fill(distance_ts < 0, float("-inf"))
