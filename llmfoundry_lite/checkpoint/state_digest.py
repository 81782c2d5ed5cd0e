"""A digest of tensors that does not depend on how ranks divide them.

Each element's bits are multiplied by an odd 64-bit key, which depends on the tensor's name and on the element's index
in the whole tensor. The digest is the sum of these products modulo 2^64, which does not depend on their order. So each
rank, pipeline stage or island calls `sum_keyed` for the boxes that it holds; the callers add the sums of all ranks, and
`format_digest` writes the total. Keys are odd because multiplication by an odd number modulo 2^64 loses no bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""Factors of elements, one for each row or column of a box; also packed elements and sums, modulo 2^64."""

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
    """Return one box's contribution to a state digest: the sum modulo 2^64 of its elements' bits times their keys.

    values: the box's elements, of any dtype of 1, 2, 4 or 8 bytes, on any device.
    offset: where the box begins in the whole tensor, in each dimension.
    name, shape: those of the whole tensor. Keys depend on the name, and on an element's index in the whole tensor.
    on_part: called with each part of `values`, as a matrix of the part's rows, before the part is summed. A caller that
        has to read the values too finds them in the processor's cache then.

    The tensor counts as a matrix: an element's row is its index in the first dimension, and its column the row-major
    index in all others. Its key is the product of a row key and a column key, so that a matrix of R rows and C columns
    needs R + C keys instead of R x C.
    """
    if not values.numel():
        return 0
    values = values.detach().contiguous()
    if not shape:  # a tensor without dimensions counts as one with a single element
        values = values.view(1)
        offset = (0,)
        shape = (1,)
    rows_for_caller = values.view(len(values), -1)
    if values.element_size() == 8:
        # An element of 8 bytes counts as two of 4, in two columns. Its product modulo 2^64 would lose the upper bits.
        values = values.view(torch.int32).view(*values.shape, 2)
        offset = (*offset, 0)
        shape = (*shape, 2)

    # Make the keys of the box's rows and columns, from their indices in the whole tensor.
    lengths = tuple(values.shape)
    rows = values.view(lengths[0], -1)
    row_keys = _make_keys(f"{name}/rows", np.arange(offset[0], offset[0] + lengths[0], dtype=np.uint64))
    column_keys = _make_keys(f"{name}/columns", _flat_indices(offset[1:], lengths[1:], shape[1:]))
    can_pair = rows.element_size() == 4 and rows.shape[1] % 2 == 0
    if rows.device.type != "cpu" or not can_pair:
        on_part(rows_for_caller)
        return _sum_elements(rows, row_keys, column_keys)

    # Elements of 4 bytes on a CPU, by far the most common ones, are multiplied two at a time: see `_sum_rows`. The
    # product of a pair with the lower element's key adds the upper element times that key, shifted by 32 bits, so the
    # upper element's key is reduced by as much.
    lower_keys = np.ascontiguousarray(column_keys[0::2])
    upper_keys = column_keys[1::2] - (lower_keys << HALF)
    num_rows_at_once = max(1, CHUNK_BYTES // (4 * rows.shape[1]))
    parts_for_caller = rows_for_caller.split(num_rows_at_once)
    parts = rows.view(torch.int32).split(num_rows_at_once)
    row_sums = []
    for part_for_caller, part in zip(parts_for_caller, parts, strict=True):
        on_part(part_for_caller)
        row_sums.append(_sum_rows(part.numpy().view(np.uint64), lower_keys, upper_keys))
    return int((np.concatenate(row_sums) * row_keys).sum(dtype=np.uint64))


def format_digest(total: int) -> str:
    """Write the sum over all ranks, of any size, modulo 2^64 as 16 hexadecimal digits: `255` is `00000000000000ff`."""
    return f"{total % (1 << 64):016x}"


def _sum_rows(pairs_rp: Keys, lower_keys_p: Keys, upper_keys_p: Keys) -> Keys:
    """Return each row's sum of elements times column keys, modulo 2^64: uint64 [row].

    pairs_rp: uint64 [row, pair]. Each number holds two elements of 4 bytes: `lower + 2^32 * upper`.
    lower_keys_p: the column key of each pair's lower element, [pair].
    upper_keys_p: the column key of each pair's upper element, minus `2^32 * lower key`, [pair].

    Reading two elements as one number of 64 bits is faster. But modulo 2^64, the upper element is then multiplied only
    modulo 2^32, where two flipped signs would cancel. So the upper element is multiplied once more, alone:

        pair * lower_key + upper * (upper_key - 2^32 * lower_key) = lower * lower_key + upper * upper_key
    """
    pairs_rp = np.require(pairs_rp, requirements="A")  # copies unaligned memory
    return np.einsum("rp,p->r", pairs_rp, lower_keys_p) + np.einsum("rp,p->r", pairs_rp >> HALF, upper_keys_p)


def _sum_elements(rows: torch.Tensor, row_keys: Keys, column_keys: Keys) -> int:
    """Return the sum modulo 2^64 of each element's bits times its row key and its column key, computed on the device.

    rows: [row, column], of any dtype of 1, 2 or 4 bytes.
    row_keys: [row].
    column_keys: [column].

    This is the general way: `_sum_rows` is faster, but only for pairs of elements of 4 bytes on a CPU. torch has no
    arithmetic for uint64, so everything is int64 here. Products and sums of int64 wrap around, and have the same bits.
    """
    element_bytes = rows.element_size()
    bits = rows.view(BITS[element_bytes])
    mask = (1 << 8 * element_bytes) - 1  # removes the copies of the sign bit that `long` adds
    row_keys_on_device = torch.from_numpy(row_keys.view(np.int64)).to(rows.device)
    column_keys_on_device = torch.from_numpy(column_keys.view(np.int64)).to(rows.device)

    # A few rows at a time, because their int64 copies take up to eight times the memory of the elements.
    num_rows_at_once = max(1, CHUNK_ELEMENTS // rows.shape[1])
    row_parts = bits.split(num_rows_at_once)
    key_parts = row_keys_on_device.split(num_rows_at_once)
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for row_part, key_part in zip(row_parts, key_parts, strict=True):
        row_sums = ((row_part.long() & mask) * column_keys_on_device).sum(1)
        total += (row_sums * key_part).sum()
    return int(total) % (1 << 64)


def _flat_indices(offset: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Keys:
    """Return the row-major index in a whole array of each element of a box: uint64 [number of the box's elements].

    The box begins at `offset` and has `lengths`; the whole array has this `shape`. With offset (1, 2), lengths (2, 2)
    and shape (4, 10), these are rows 1 and 2, columns 2 and 3: [12, 13, 22, 23]. Without dimensions it is [0].
    """
    indices: Any = np.zeros((), np.uint64)
    # Add one dimension at a time, as in Horner's method: multiply the indices so far by its size, and add its own.
    for dim_offset, dim_length, dim_size in zip(offset, lengths, shape, strict=True):
        index_along_dim = np.arange(dim_offset, dim_offset + dim_length, dtype=np.uint64)
        indices = indices[..., None] * np.uint64(dim_size) + index_along_dim
    return indices.reshape(-1)


def _make_keys(seed_name: str, indices: Keys) -> Keys:
    """Return a pseudorandom odd number of 64 bits for each index: uint64, in the shape of `indices`.

    An index's key is element `index` of the sequence that splitmix64 generates from a seed, which is the hash of
    `seed_name` (such as `model/w/rows`). The lowest bit is then set. The constants and shifts are those of
    https://prng.di.unimi.it/splitmix64.c.
    """
    seed = np.uint64(xxhash.xxh3_64_intdigest(seed_name.encode()))
    z = indices * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return z | np.uint64(1)
