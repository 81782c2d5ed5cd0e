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
    bias_bhts: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Causal softmax(q k^T * scale + bias) v, with PyTorch's scaled_dot_product_attention.

    `bias_bhts` is added to the scores and must hold the causal mask as well, as `alibi_bias` does; b and h may be 1.
    Without one, there are as many queries as keys. Returns [b, t, h, k].
    """
    q_bhtk, k_bhsk, v_bhsk = (x.transpose(1, 2) for x in (q_bthk, k_bshk, v_bshk))
    out_bhtk = F.scaled_dot_product_attention(
        q_bhtk,
        k_bhsk,
        v_bhsk,
        attn_mask=None if bias_bhts is None else bias_bhts.to(q_bthk.dtype),
        is_causal=bias_bhts is None,
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


def alibi_bias(slopes_h: torch.Tensor, positions_bt: torch.Tensor, may_see_bts: torch.Tensor) -> torch.Tensor:
    """ALiBi and a mask in one fp32 bias, [b, h, t, t]: -slope * distance back, -inf where a key may not be seen.

    Four dimensions, because with three torch falls back to keeping all scores.
    """
    distance_bts = positions_bt[:, :, None] - positions_bt[:, None, :]
    bias_bhts = -slopes_h[:, None, None] * distance_bts[:, None]
    return bias_bhts.masked_fill(~may_see_bts[:, None], float("-inf"))


def mask_bias(may_see_bts: torch.Tensor) -> torch.Tensor:
    """A mask as an fp32 bias, [b, 1, t, t]."""
    bias_bts = torch.zeros(may_see_bts.shape, device=may_see_bts.device)
    return bias_bts.masked_fill(~may_see_bts, float("-inf"))[:, None]


def causal(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Who may see whom in plain text, bool [1, t, t]."""
    return torch.ones((1, num_tokens, num_tokens), dtype=torch.bool, device=device).tril()
