"""Dropout of the residual stream, as a function of seed, batch, row, place and channel.

Masks are hashes, not draws of a generator. A row drops the same on every device, in any microbatch, on any number of
ranks, and again when a block is recomputed. Attention's kernels have their own dropout.

Legend: b batch, t time, d model width, c pairs of channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 1 << 16
"""Steps of a probability: each number of a mask has 16 bits."""


def row_keys(tokens_bt: Tensor, seed: int) -> Tensor:
    """Hash each row's tokens and places: [b], int32. Equal rows of a batch drop the same.

    `seed` is 0 to 2**31 - 1, a new one for each batch.
    """
    places_t = torch.arange(tokens_bt.size(1), dtype=torch.int32, device=tokens_bt.device)
    hashed_bt = _mix(_mix(places_t + seed) ^ tokens_bt.to(torch.int32))
    return _mix(hashed_bt.sum(dim=1).to(torch.int32))  # the sum is int64; its low half is the same in any order


def place_keys(keys_b: Tensor, positions_bt: Tensor) -> Tensor:
    """Hash each token's row and position: [b, t], int32."""
    return _mix(keys_b[:, None] ^ _mix(positions_bt.to(torch.int32)))


def drop_keys_of_site(keys_bt: Tensor, site: int) -> Tensor:
    """Derive the keys of one of the places in the model that drop: [b, t], int32."""
    return _mix(keys_bt + (site * 0x1E35A7BD) % (1 << 31))


def drop(x_btd: Tensor, p: float, training: bool, keys_bt: Tensor | None) -> Tensor:
    """Zero a share `p` of the numbers and scale the others, while training. Without keys, torch's generator chooses."""
    if keys_bt is None or not (training and p):
        return F.dropout(x_btd, p, training)
    num_dropped = min(round(p * STEPS), STEPS - 1)  # of STEPS
    num_channels = x_btd.size(-1)
    channels_c = _mix(torch.arange((num_channels + 1) // 2, dtype=torch.int32, device=x_btd.device))
    bits_btc = _mix(keys_bt[..., None] ^ channels_c)
    # Two numbers of 16 bits each, from -32768 and from 0.
    keep_btd = torch.cat([(bits_btc >> 16) >= num_dropped - STEPS // 2, (bits_btc & 0xFFFF) >= num_dropped], dim=-1)
    return torch.where(keep_btd[..., :num_channels], x_btd * (STEPS / (STEPS - num_dropped)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """Mix bits of int32 by lowbias32 (Wellons 2018, "Prospecting for Hash Functions"); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
