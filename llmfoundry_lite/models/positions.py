"""Positions of tokens in attention: the slopes of ALiBi, and rotary positions (RoPE).

Legend: b batch, t position of a query, h heads, k head dimension.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry_lite.config.model_schema import AttentionConfig


def compute_alibi_slopes(num_heads: int, bias_max: int = 8) -> list[float]:
    """Return one slope for each head (Press et al. 2022, "Train Short, Test Long", with MPT's order of heads).

    Head i of n has the slope 2^(-bias_max * (i + 1) / n): 1/2, 1/4, ... 1/256 for eight heads. If the number of heads
    is not a power of two, the slopes of the next power are taken: every second one first, then the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * (i + 1) / power) for i in range(power)]
    if power == num_heads:
        return slopes
    return (slopes[1::2] + slopes[::2])[:num_heads]


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE's angles of every position, by cosine and sine. fp32, also where activations have 16 bits.

    The dimension of 1 is that of heads; j counts the k/2 pairs of dimensions of a head.
    """

    cos_bt1j: Tensor
    sin_bt1j: Tensor


def build_rotation(config: AttentionConfig, head_dim: int, max_seq_len: int, positions_bt: Tensor) -> Rotation:
    """Compute RoPE's angles, position * theta^(-2j/k) for pair j of k dimensions (Su et al. 2021, "RoFormer").

    Returns their cosines and sines, fp32 [b, t, 1, k/2], for `positions_bt` [batch, tokens].

    `rope_hf_config` scales them for rows longer than those of training:

    linear: positions are divided by the factor (Chen et al. 2023, "Extending Context Window").
    ntk: theta becomes theta * factor^(k/(k-2)), as proposed in r/LocalLLaMA and computed by transformers.
    dynamic: the same, with a factor that grows once the longest position exceeds `max_seq_len`.
    llama3: low frequencies, those with few turns within the original length, are divided by the factor; high ones are
        kept, and those between are blended (The Llama 3 Herd of Models, 2024; Llama 3.1's reference code).
    """
    # Scalings of positions, or of theta.
    scaling = config.rope_hf_config
    theta = config.rope_theta
    positions_bt = positions_bt.float()
    ntk_exponent = head_dim / (head_dim - 2) if head_dim > 2 else 1.0
    if scaling.type == "linear":
        positions_bt = positions_bt / scaling.factor
    elif scaling.type == "ntk":
        theta = theta * scaling.factor**ntk_exponent
    elif scaling.type == "dynamic":
        length = max(float(positions_bt.max()) + 1, float(max_seq_len))  # waits for the device to reach this point
        theta = theta * (scaling.factor * length / max_seq_len - (scaling.factor - 1)) ** ntk_exponent

    # The angle by which each pair of dimensions turns from one position to the next.
    exponents_j = torch.arange(0, head_dim, 2, device=positions_bt.device).float() / head_dim
    frequencies_j = 1.0 / theta**exponents_j
    if scaling.type == "llama3":
        # A pair keeps its frequency if it turns often within the original length. From `high` to `low` turns, the share
        # that is kept falls from 1 to 0.
        turns_j = scaling.original_max_position_embeddings * frequencies_j / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept_share_j = ((turns_j - low) / (high - low)).clamp(0, 1)
        frequencies_j = (kept_share_j + (1 - kept_share_j) / scaling.factor) * frequencies_j

    angles_btj = positions_bt[..., None] * frequencies_j
    return Rotation(angles_btj.cos()[:, :, None], angles_btj.sin()[:, :, None])


def rotate(x_bthk: Tensor, rotation: Rotation) -> Tensor:
    """Apply RoPE to queries or keys: turn each pair of dimensions j and j + k/2 by its angle, in fp32."""
    cos_bt1j, sin_bt1j = rotation.cos_bt1j, rotation.sin_bt1j
    first_bthj, second_bthj = x_bthk.float().chunk(2, dim=-1)
    turned_bthk = torch.cat(
        [
            first_bthj * cos_bt1j - second_bthj * sin_bt1j,
            second_bthj * cos_bt1j + first_bthj * sin_bt1j,
        ],
        dim=-1,
    )
    return turned_bthk.to(x_bthk.dtype)
