"""Lossless packing of exact sums for the wire: each chunk of 256 integers takes the bytes that its largest one needs.

Exact sums are float64 multiples of 2^-bits below 2^(53 - bits). As integers they have up to 54 bits with their sign,
but most of them are small. They are packed piece by piece, so that a piece stays in the processor's cache:

    piece: [a width byte for each chunk] [chunks of width 1] [chunks of width 2] … [chunks of width 7]

Chunks of one width are stored as planes: first the low bytes of all of their elements, then the higher bytes. A width
of 3 bytes, for example, has a plane of 2 bytes and a plane of 1 byte, because numpy has integers of 4, 2 and 1 bytes.

This file has neither torch nor sockets.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmfoundry_islands.coordination.messages import BadMessageError

CHUNK = 256
"""Elements that have the same width."""
PIECE = 1 << 17
"""Elements that are packed at a time: 1 MiB, which fits into a processor's cache."""
LARGEST = 1 << 53
"""Largest magnitude of an integer. Above it, float64 cannot hold every integer."""
MAX_WIDTH = 7
"""Bytes that an integer of 53 bits and its sign takes."""
NOT_FINITE = 255
"""Width of a chunk with a number that is not finite. It takes no further bytes, and is unpacked as NaN."""
WIDTH_LIMITS = np.array([1 << (8 * width - 1) for width in range(1, MAX_WIDTH)])
"""The smallest positive integers that need 2, 3, … bytes: 2^7, 2^15, …"""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Plane(NamedTuple):
    """The bytes of an integer that are stored together."""

    size: int
    """Number of bytes: 4, 2 or 1."""
    shift: int
    """Number of bits of the integer below them."""


def most_bytes(count: int) -> int:
    """Return the largest number of bytes that `pack_sums` may return for `count` elements."""
    return MAX_WIDTH * count + math.ceil(count / CHUNK)


def pack_sums(values: Floats, bits: int) -> bytes:
    """Pack multiples of 2^-bits into bytes.

    A number that is too large for exact sums becomes the largest one. A chunk that has a number which is not finite is
    packed as NaN. A batch with such numbers does not count anyway.
    """
    packed = []
    largest_value = LARGEST * 2.0**-bits
    for begin in range(0, len(values), PIECE):
        piece = values[begin : begin + PIECE]
        is_finite = np.isfinite(piece)
        in_range = np.where(is_finite, piece, 0.0).clip(-largest_value, largest_value)
        integers = (in_range * 2.0**bits).astype(np.int64)

        blocks = _blocks(integers)
        is_chunk_finite = np.concatenate([block.all(axis=1) for block in _blocks(is_finite)])
        widths = np.concatenate([_widths(block) for block in blocks])
        widths = np.where(is_chunk_finite, widths, NOT_FINITE)
        packed.append(widths.astype(np.uint8).tobytes())
        for block, widths_of_block in zip(blocks, _split_by_block(widths, blocks), strict=True):
            for width in range(1, MAX_WIDTH + 1):
                packed += _split_into_planes(block[widths_of_block == width], width)
    return b"".join(packed)


def unpack_sums(raw: memoryview, count: int, bits: int) -> Floats:
    """Return the `count` multiples of 2^-bits that `pack_sums` has packed. Raises BadMessageError for other bytes."""
    values = np.empty(count)
    position = 0
    for begin in range(0, count, PIECE):
        piece = values[begin : begin + PIECE]
        num_chunks = math.ceil(len(piece) / CHUNK)
        widths = np.frombuffer(raw[position : position + num_chunks], np.uint8)
        position += num_chunks
        has_bad_width = ((widths > MAX_WIDTH) & (widths != NOT_FINITE)).any()
        if len(widths) < num_chunks or has_bad_width:
            raise BadMessageError("exact sums: a width that cannot be")

        blocks = _blocks(piece)  # views, so that writing to them fills `values`
        for block, widths_of_block in zip(blocks, _split_by_block(widths, blocks), strict=True):
            block[widths_of_block == 0] = 0.0
            block[widths_of_block == NOT_FINITE] = np.nan
            for width in range(1, MAX_WIDTH + 1):
                chunks = np.flatnonzero(widths_of_block == width)
                shape = (len(chunks), block.shape[1])
                num_bytes = width * math.prod(shape)
                block[chunks] = _join_planes(raw[position : position + num_bytes], shape, width) * 2.0**-bits
                position += num_bytes
    if position != len(raw):
        raise BadMessageError(f"exact sums: {len(raw)} bytes, expected {position}")
    return values


def _blocks(elements: NDArray) -> list[NDArray]:
    """Return views of the elements with one row for each chunk: a block of whole chunks, and one of a shorter last one.

    A block without elements is left out.
    """
    num_in_whole_chunks = len(elements) // CHUNK * CHUNK
    whole_chunks = elements[:num_in_whole_chunks].reshape(-1, CHUNK)
    last_chunk = elements[num_in_whole_chunks:].reshape(1, -1)
    return [block for block in (whole_chunks, last_chunk) if block.size]


def _split_by_block(widths: NDArray, blocks: list[NDArray]) -> list[NDArray]:
    """Return the widths of the chunks in each block. There are one or two blocks."""
    return np.split(widths, [len(blocks[0])])[: len(blocks)]


def _widths(chunks: Integers) -> NDArray:
    """Return the number of bytes that the elements of each chunk need in two's complement; 0 if all are zeros."""
    largest = chunks.max(axis=1)
    smallest = chunks.min(axis=1)
    # -128 fits into one byte as 127 does, and ~(-128) is 127.
    magnitudes = np.maximum(largest, ~smallest)
    widths = 1 + np.searchsorted(WIDTH_LIMITS, magnitudes, side="right")
    has_only_zeros = (largest == 0) & (smallest == 0)
    return np.where(has_only_zeros, 0, widths)


def _planes_of(width: int) -> list[Plane]:
    """Return the planes of integers with `width` bytes, low bytes first.

    For example, 7 bytes are planes of 4, 2 and 1 bytes, with 0, 32 and 48 bits below them.
    """
    planes = []
    shift = 0
    for size in (4, 2, 1):
        if width & size:
            planes.append(Plane(size, shift))
            shift += 8 * size
    return planes


def _split_into_planes(chunks: Integers, width: int) -> list[bytes]:
    """Return the bytes of each plane of these chunks. Converting to a smaller integer drops the higher bits."""
    return [(chunks >> plane.shift).astype(f"<u{plane.size}").tobytes() for plane in _planes_of(width)]


def _join_planes(raw: memoryview, shape: tuple[int, int], width: int) -> Integers:
    """Return the integers from which `_split_into_planes` has made these bytes.

    Raises BadMessageError if there are too few bytes, or an integer is larger than `pack_sums` can pack.
    """
    if len(raw) < width * math.prod(shape):
        raise BadMessageError("exact sums: fewer bytes than their widths say")
    integers = np.zeros(shape, np.int64)
    position = 0
    planes = _planes_of(width)
    for plane in planes:
        has_sign = plane == planes[-1]
        dtype = f"<i{plane.size}" if has_sign else f"<u{plane.size}"
        elements = np.frombuffer(raw, dtype, math.prod(shape), position).reshape(shape)
        integers |= elements.astype(np.int64) << plane.shift
        position += elements.nbytes
    if width == MAX_WIDTH and integers.size and max(integers.max(), -integers.min()) > LARGEST:
        raise BadMessageError("exact sums: an integer of more than 53 bits")
    return integers
