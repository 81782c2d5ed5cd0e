"""A digest of tensors that does not depend on how ranks divide them.

Each element's bits are multiplied by an odd 64-bit key of the tensor's name and of the element's index in the whole
tensor. The digest is the sum, modulo 2^64. Ranks, stages and islands add up what they hold, and then their sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

CHUNK_BYTES = 1 << 18
"""Bytes of whole rows that are multiplied at a time: they stay in a processor's cache."""
CHUNK_ELEMENTS = 1 << 20
"""Elements that are multiplied at a time on other devices."""
HALF = np.uint64(32)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> whole numbers of that size."""


def sum_keyed(
    name: str,
    values: torch.Tensor,
    offset: Sequence[int],
    shape: Sequence[int],
    look: Callable[[torch.Tensor], Any] = lambda part: None,
) -> int:
    """Return the sum, modulo 2^64, over a box of a tensor: `values`, that begin at `offset` in the whole of `shape`.

    An element's key is the product of one for its index in the first dimension and one for its place in the others.
    `look` is called with each part of `values` before it is summed: the part enters the processor's cache only once.
    """
    if not values.numel():
        return 0
    values = values.detach().contiguous()
    if not shape:
        values, offset, shape = values.view(1), (0,), (1,)
    parts = values.view(len(values), -1)
    if values.element_size() == 8:  # as two of 32 bits: a product would lose the upper bits
        values = values.view(torch.int32).view(*values.shape, 2)
        offset, shape = (*offset, 0), (*shape, 2)
    lengths = tuple(values.shape)
    rows, columns = values.view(lengths[0], -1), _places(offset[1:], lengths[1:], shape[1:])
    row_keys = _keys(f"{name}/rows", np.arange(offset[0], offset[0] + lengths[0], dtype=np.uint64))
    column_keys = _keys(f"{name}/columns", columns)
    is_paired = rows.element_size() == 4 and rows.shape[1] % 2 == 0
    if rows.device.type != "cpu" or not is_paired:
        look(parts)
        return _sum_elements(rows, row_keys, column_keys)
    of_pairs = np.ascontiguousarray(column_keys[0::2])
    of_upper = column_keys[1::2] - (of_pairs << HALF)  # minus what the pair's product adds
    step, sums = max(1, CHUNK_BYTES // (4 * rows.shape[1])), []
    for part, chunk in zip(parts.split(step), rows.view(torch.int32).split(step), strict=True):
        look(part)
        sums.append(_sum_rows(chunk.numpy().view(np.uint64), of_pairs, of_upper))
    return int((np.concatenate(sums) * row_keys).sum(dtype=np.uint64))


def format_digest(total: int) -> str:
    """Write a sum over all ranks as 16 hexadecimal digits."""
    return f"{total % (1 << 64):016x}"


def _sum_rows(pairs: Keys, of_pairs: Keys, of_upper: Keys) -> Keys:
    """Return the sum of each row's products [R], of pairs of uint32 [R, C] and keys [C], by two products.

    For speed, two numbers are read as one of 64 bits. Modulo 2^64, the upper number is then multiplied only modulo
    2^32, where two flipped signs would cancel. So the upper number is multiplied once more, alone.
    """
    pairs = np.require(pairs, requirements="A")  # copies unaligned memory
    return np.einsum("rc,c->r", pairs, of_pairs) + np.einsum("rc,c->r", pairs >> HALF, of_upper)


def _sum_elements(rows: torch.Tensor, row_keys: Keys, column_keys: Keys) -> int:
    """Return the same sum for rows [R, C] of any dtype, on their device, element by element."""
    size = rows.element_size()
    bits, mask = rows.view(BITS[size]), (1 << 8 * size) - 1
    by_row, by_column = (torch.from_numpy(keys.view(np.int64)).to(rows.device) for keys in (row_keys, column_keys))
    total, step = torch.zeros((), dtype=torch.int64, device=rows.device), max(1, CHUNK_ELEMENTS // rows.shape[1])
    for part, keys in zip(bits.split(step), by_row.split(step), strict=True):
        total += (((part.long() & mask) * by_column).sum(1) * keys).sum()
    return int(total) % (1 << 64)


def _places(offset: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Keys:
    """Return the index of each element of a box in the whole, row by row: uint64 [product of `lengths`]."""
    places: Any = np.zeros((), np.uint64)
    for begin, length, size in zip(offset, lengths, shape, strict=True):
        axis = np.arange(begin, begin + length, dtype=np.uint64)
        places = places[..., None] * np.uint64(size) + axis
    return places.reshape(-1)


def _keys(name: str, places: Keys) -> Keys:
    """Return an odd number for each place: splitmix64, seeded by the name (https://prng.di.unimi.it/splitmix64.c)."""
    z = places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
