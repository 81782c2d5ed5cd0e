"""A digest of tensors that does not depend on how ranks divide them.

Each element's bits are multiplied by an odd 64-bit key, which depends on the tensor's name and on the element's index
in the whole tensor. The digest is the sum modulo 2^64. Ranks, stages and islands sum what they hold, and then add their
sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

CHUNK_BYTES = 1 << 18
"""Bytes of whole rows that are multiplied at a time on a CPU. They stay in the processor's cache."""
CHUNK_ELEMENTS = 1 << 20
"""Elements that are multiplied at a time on other devices, and on a CPU where they are not taken in pairs."""
HALF = np.uint64(32)
"""Bits of half a 64-bit number."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> dtype of whole numbers of that size."""


def sum_keyed(
    name: str,
    values: torch.Tensor,
    offset: Sequence[int],
    shape: Sequence[int],
    on_part: Callable[[torch.Tensor], Any] = lambda part: None,
) -> int:
    """Return the sum modulo 2^64 of the keyed bits of a box of a tensor.

    `values` is the box, which begins at `offset` in the whole tensor of this `name` and `shape`. An element's key is
    the product of a key for its index in the first dimension (its row) and one for its place in the others (its
    column).

    `on_part` is called with each part of `values` before the part is summed, so that a caller who has to read them too
    finds them in the processor's cache.
    """
    if not values.numel():
        return 0
    values = values.detach().contiguous()
    if not shape:
        values = values.view(1)
        offset = (0,)
        shape = (1,)
    parts = values.view(len(values), -1)
    if values.element_size() == 8:
        # An element of 8 bytes counts as two of 4, in two columns. Its product modulo 2^64 would lose the upper bits.
        values = values.view(torch.int32).view(*values.shape, 2)
        offset = (*offset, 0)
        shape = (*shape, 2)

    lengths = tuple(values.shape)
    rows = values.view(lengths[0], -1)
    row_keys = _keys(f"{name}/rows", np.arange(offset[0], offset[0] + lengths[0], dtype=np.uint64))
    column_keys = _keys(f"{name}/columns", _flat_indices(offset[1:], lengths[1:], shape[1:]))
    has_pairs = rows.element_size() == 4 and rows.shape[1] % 2 == 0
    if rows.device.type != "cpu" or not has_pairs:
        on_part(parts)
        return _sum_elements(rows, row_keys, column_keys)

    # Elements of 4 bytes on a CPU, by far the most common ones, are multiplied two at a time: see `_sum_rows`.
    pair_keys = np.ascontiguousarray(column_keys[0::2])
    upper_keys = column_keys[1::2] - (pair_keys << HALF)  # without what the pair's product adds already
    rows_at_once = max(1, CHUNK_BYTES // (4 * rows.shape[1]))
    row_sums = []
    for part, chunk in zip(parts.split(rows_at_once), rows.view(torch.int32).split(rows_at_once), strict=True):
        on_part(part)
        row_sums.append(_sum_rows(chunk.numpy().view(np.uint64), pair_keys, upper_keys))
    return int((np.concatenate(row_sums) * row_keys).sum(dtype=np.uint64))


def format_digest(total: int) -> str:
    """Write a sum over all ranks as 16 hexadecimal digits."""
    return f"{total % (1 << 64):016x}"


def _sum_rows(pairs_rc: Keys, pair_keys_c: Keys, upper_keys_c: Keys) -> Keys:
    """Return the sum of each row's products, [row]. `pairs_rc` has two elements of 32 bits in each number, [row, pair].

    Reading two elements as one number of 64 bits is faster. But modulo 2^64, the upper element is then multiplied only
    modulo 2^32, where two flipped signs would cancel. So the upper element is multiplied once more, alone.
    """
    pairs_rc = np.require(pairs_rc, requirements="A")  # copies unaligned memory
    return np.einsum("rc,c->r", pairs_rc, pair_keys_c) + np.einsum("rc,c->r", pairs_rc >> HALF, upper_keys_c)


def _sum_elements(rows: torch.Tensor, row_keys: Keys, column_keys: Keys) -> int:
    """Return the keyed sum of `rows`, [row, column], of any dtype of up to 4 bytes, on their device, element by
    element.

    `row_keys` are [row] and `column_keys` [column].
    """
    element_bytes = rows.element_size()
    bits = rows.view(BITS[element_bytes])
    mask = (1 << 8 * element_bytes) - 1  # without the sign's copies that `long` adds
    row_keys_on_device = torch.from_numpy(row_keys.view(np.int64)).to(rows.device)
    column_keys_on_device = torch.from_numpy(column_keys.view(np.int64)).to(rows.device)
    rows_at_once = max(1, CHUNK_ELEMENTS // rows.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for part, keys in zip(bits.split(rows_at_once), row_keys_on_device.split(rows_at_once), strict=True):
        row_sums = ((part.long() & mask) * column_keys_on_device).sum(1)
        total += (row_sums * keys).sum()
    return int(total) % (1 << 64)


def _flat_indices(offset: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Keys:
    """Return the row-major index in the whole, of `shape`, of each element of a box: uint64 [product of `lengths`]."""
    indices: Any = np.zeros((), np.uint64)
    # One dimension after the other: each multiplies the indices so far by its size, and adds its own.
    for begin, length, size in zip(offset, lengths, shape, strict=True):
        along_dim = np.arange(begin, begin + length, dtype=np.uint64)
        indices = indices[..., None] * np.uint64(size) + along_dim
    return indices.reshape(-1)


def _keys(name: str, indices: Keys) -> Keys:
    """Return an odd number for each index: splitmix64, seeded by the name (https://prng.di.unimi.it/splitmix64.c)."""
    z = indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
