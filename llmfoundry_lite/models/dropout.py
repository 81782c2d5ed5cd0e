"""Dropout of the residual stream, as a function of seed, batch, row, place and channel.

Owns the masks. They are hashes and not draws of a generator: a row drops the same on every device, in whichever
microbatch, on however many ranks, and again when a block is recomputed. Dropout of attention is its kernels' own.

Legend: b batch, t time, d model width, c pairs of channels.
"""

import torch
import torch.nn.functional as F

STEPS = 1 << 16
"""Resolution of a probability: a mask takes 16 bits for each number."""


def row_keys(tokens_bt: torch.Tensor, seed: int) -> torch.Tensor:
    """A number for each row [b], int32, of its tokens and places. Rows alike in one batch drop alike.

    `seed`: 0 to 2**31 - 1, another for each batch.
    """
    places_t = torch.arange(tokens_bt.size(1), dtype=torch.int32, device=tokens_bt.device)
    hashed_bt = _mix(_mix(places_t + seed) ^ tokens_bt.to(torch.int32))
    return _mix(hashed_bt.sum(dim=1).to(torch.int32))  # the sum is int64; its low half is the same in any order


def place_keys(keys_b: torch.Tensor, positions_bt: torch.Tensor) -> torch.Tensor:
    """A number for each token [b, t], int32."""
    return _mix(keys_b[:, None] ^ _mix(positions_bt.to(torch.int32)))


def drop_keys_of_site(keys_bt: torch.Tensor, site: int) -> torch.Tensor:
    """Those of one of the places in the model where numbers are dropped."""
    return _mix(keys_bt + (site * 0x1E35A7BD) % (1 << 31))


def drop(x_btd: torch.Tensor, p: float, training: bool, keys_bt: torch.Tensor | None) -> torch.Tensor:
    """Zero a share `p` of the numbers and scale the others, while training; without keys as torch's generator says."""
    if keys_bt is None or not (training and p):
        return F.dropout(x_btd, p, training)
    most = min(round(p * STEPS), STEPS - 1)
    num_channels = x_btd.size(-1)
    channels_c = _mix(torch.arange((num_channels + 1) // 2, dtype=torch.int32, device=x_btd.device))
    bits_btc = _mix(keys_bt[..., None] ^ channels_c)
    # Two numbers of 16 bits each, from -32768 and from 0.
    keep_btd = torch.cat([(bits_btc >> 16) >= most - STEPS // 2, (bits_btc & 0xFFFF) >= most], dim=-1)
    return torch.where(keep_btd[..., :num_channels], x_btd * (STEPS / (STEPS - most)), 0.0)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Wellons 2018, "Prospecting for Hash Functions": lowbias32. int32, of which products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
