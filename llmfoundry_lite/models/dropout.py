"""Dropout of the residual stream, as a function of seed, row, position, site and channel.

Masks are hashes and not draws of a generator. Therefore a row drops the same numbers on every device, in any
microbatch, on any number of ranks, and again when a block is recomputed in the backward pass. The kernels of attention
have their own dropout, which torch's generator decides.

Seeds are hashed once for each step from a batch to a number of a mask:

    seed of the batch -> `seeds_of_rows` -> `seeds_of_tokens` -> `seeds_of_site` -> bits of each channel in `dropout`

Legend: b batch, t time, d model width, c pairs of channels. All seeds are int32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 1 << 16
"""Each channel gets a hash of 16 bits, so that a probability is rounded to a multiple of 1 / LEVELS."""

SITE_STRIDE = 0x1E35A7BD
"""An odd constant that spreads the small numbers of sites over all bits before they are hashed."""


def seeds_of_rows(tokens_bt: Tensor, seed: int) -> Tensor:
    """Hash the tokens of each row and their order: [b]. Equal rows of a batch drop the same numbers.

    `seed` is 0 to 2**31 - 1, and a new one for each batch.
    """
    indices_t = torch.arange(tokens_bt.size(1), dtype=torch.int32, device=tokens_bt.device)
    hashes_bt = _mix(_mix(indices_t + seed) ^ tokens_bt.to(torch.int32))
    # The sum is int64, and its lower half does not depend on the order of its terms.
    return _mix(hashes_bt.sum(dim=1).to(torch.int32))


def seeds_of_tokens(seeds_b: Tensor, positions_bt: Tensor) -> Tensor:
    """Hash the seed of each row with the positions of its tokens: [b, t]. `positions_bt` may have one row for all."""
    return _mix(seeds_b[:, None] ^ _mix(positions_bt.to(torch.int32)))


def seeds_of_site(seeds_bt: Tensor | None, site: int) -> Tensor | None:
    """Derive the seeds of one of the places in the model that drop numbers: [b, t]. None stays None."""
    if seeds_bt is None:
        return None
    return _mix(seeds_bt + (site * SITE_STRIDE) % (1 << 31))


def dropout(x_btd: Tensor, p: float, training: bool, seeds_bt: Tensor | None) -> Tensor:
    """In training, set a fraction `p` of the elements to zero and scale the others up, as `F.dropout` does.

    `seeds_bt` (int32) has a seed for each token, which decides which channels of that token are dropped: equal seeds
    drop the same ones. `p` is then rounded to a multiple of 1 / 65,536. With None, torch's generator decides.
    """
    if seeds_bt is None or not training or p == 0:
        return F.dropout(x_btd, p, training)

    num_channels = x_btd.size(-1)
    num_dropped_levels = min(round(p * LEVELS), LEVELS - 1)
    pairs_c = torch.arange((num_channels + 1) // 2, dtype=torch.int32, device=x_btd.device)
    hashes_btc = _mix(seeds_bt[..., None] ^ _mix(pairs_c))

    # Each 32-bit hash serves two channels: its upper 16 bits channel c, its lower 16 bits one in the second half of
    # the width. A channel is dropped if its 16 bits are among the lowest `num_dropped_levels` of 65,536 values. The
    # upper half is a signed number, so its lowest value is -LEVELS / 2.
    is_kept_btd = torch.cat(
        [
            (hashes_btc >> 16) >= num_dropped_levels - LEVELS // 2,
            (hashes_btc & 0xFFFF) >= num_dropped_levels,
        ],
        dim=-1,
    )
    return torch.where(is_kept_btd[..., :num_channels], x_btd * (LEVELS / (LEVELS - num_dropped_levels)), 0.0)


def _mix(x: Tensor) -> Tensor:
    """Hash each int32 by lowbias32 (Wellons 2018, "Prospecting for Hash Functions").

    Products wrap around. The masks make shifts to the right logical, as they are for the paper's unsigned integers. The
    second factor, 0x846CA68B, is written as the int32 with the same bits.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
