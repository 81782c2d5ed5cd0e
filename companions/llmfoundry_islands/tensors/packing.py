"""Packing of exact sums for the wire: each chunk of integers takes as few bytes an element as its largest needs.

Exact sums are float64 multiples of 2^-bits below 2^(53-bits): integers of 54 bits with their sign, most of them small.
Numbers travel in pieces. A piece has the width of each of its chunks, then the chunks by width, low bytes first.
Nothing is lost. No torch, no sockets.
"""

import math

import numpy as np
from numpy.typing import NDArray

from llmfoundry_islands.coordination.messages import BadMessageError

CHUNK = 256
"""Elements with a width in common."""
PIECE = 1 << 17
"""Elements that are handled at a time, in the processor's cache."""
LARGEST = 1 << 53
MAX_WIDTH = 7
NOT_FINITE = 255
"""Width of a chunk with a number that is not finite. It has no bytes, and is unpacked as NaN."""
LIMITS = np.array([1 << (8 * width - 1) for width in range(1, MAX_WIDTH)])
"""The first integers that need 2, 3, … bytes."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def most_bytes(count: int) -> int:
    """Return the most bytes that `count` elements take."""
    return MAX_WIDTH * count + math.ceil(count / CHUNK)


def pack_sums(values: Floats, bits: int) -> bytes:
    """Pack multiples of 2^-bits. Numbers that exact sums cannot hold become the largest, or NaN: a batch that has them
    does not count."""
    packed = []
    for begin in range(0, len(values), PIECE):
        piece, limit = values[begin : begin + PIECE], LARGEST * 2.0**-bits
        is_finite = np.isfinite(piece)
        integers = (np.where(is_finite, piece, 0.0).clip(-limit, limit) * 2.0**bits).astype(np.int64)
        blocks = _blocks(integers)
        finite = np.concatenate([block.all(axis=1) for block in _blocks(is_finite)])
        widths = np.where(finite, np.concatenate([_widths(block) for block in blocks]), NOT_FINITE)
        packed.append(widths.astype(np.uint8).tobytes())
        for block, own in zip(blocks, _split(widths, blocks), strict=True):
            for width in range(1, MAX_WIDTH + 1):
                packed += _planes(block[own == width], width)
    return b"".join(packed)


def unpack_sums(raw: memoryview, count: int, bits: int) -> Floats:
    """Return the `count` numbers that `pack_sums` has packed. Raises BadMessageError."""
    values, place = np.empty(count), 0
    for begin in range(0, count, PIECE):
        piece = values[begin : begin + PIECE]
        num_chunks = math.ceil(len(piece) / CHUNK)
        widths = np.frombuffer(raw[place : place + num_chunks], np.uint8)
        place += num_chunks
        if len(widths) < num_chunks or ((widths > MAX_WIDTH) & (widths != NOT_FINITE)).any():
            raise BadMessageError("exact sums: a width that cannot be")
        blocks = _blocks(piece)
        for block, own in zip(blocks, _split(widths, blocks), strict=True):
            block[own == 0], block[own == NOT_FINITE] = 0.0, np.nan
            for width in range(1, MAX_WIDTH + 1):
                rows = np.flatnonzero(own == width)
                size = width * len(rows) * block.shape[1]
                block[rows] = _join(raw[place : place + size], (len(rows), block.shape[1]), width) * 2.0**-bits
                place += size
    if place != len(raw):
        raise BadMessageError(f"exact sums: {len(raw)} bytes, expected {place}")
    return values


def _blocks(elements: NDArray) -> list[NDArray]:
    """Divide elements into whole chunks and a shorter last one. Returns views with one row for each chunk."""
    whole = len(elements) // CHUNK * CHUNK
    return [block for block in (elements[:whole].reshape(-1, CHUNK), elements[whole:].reshape(1, -1)) if block.size]


def _split(widths: NDArray, blocks: list[NDArray]) -> list[NDArray]:
    return np.split(widths, [len(blocks[0])])[: len(blocks)]


def _widths(chunks: Integers) -> NDArray:
    """Return the bytes that each chunk's elements need; 0 if all are zeros."""
    largest, smallest = chunks.max(axis=1), chunks.min(axis=1)
    widths = 1 + np.searchsorted(LIMITS, np.maximum(largest, ~smallest), side="right")
    return np.where((largest == 0) & (smallest == 0), 0, widths)


def _parts(width: int) -> list[tuple[int, int]]:
    """Divide a width into 4, 2 and 1 bytes, which processors have: (size, bits below it)."""
    sizes = [size for size in (4, 2, 1) if width & size]
    return [(size, 8 * sum(sizes[:i])) for i, size in enumerate(sizes)]


def _planes(chunks: Integers, width: int) -> list[bytes]:
    return [(chunks >> shift).astype(f"<u{size}").tobytes() for size, shift in _parts(width)]


def _join(raw: memoryview, shape: tuple[int, int], width: int) -> Integers:
    """Return the integers of `_planes`. Raises BadMessageError."""
    if len(raw) < width * math.prod(shape):
        raise BadMessageError("exact sums: fewer bytes than their widths say")
    total, place = np.zeros(shape, np.int64), 0
    *_, last = parts = _parts(width)
    for size, shift in parts:
        kind = f"<{'i' if (size, shift) == last else 'u'}{size}"
        plane = np.frombuffer(raw, kind, math.prod(shape), place).reshape(shape)
        total |= plane.astype(np.int64) << shift
        place += plane.nbytes
    if width == MAX_WIDTH and total.size and max(total.max(), -total.min()) > LARGEST:
        raise BadMessageError("exact sums: an integer of more than 53 bits")
    return total
