"""The encoding of weight changes on the wire: fp32, bf16, or int8 with a scale for each row.

`encode` rounds a rank's piece, and `pack` and `unpack` turn overlaps with a peer's pieces into bytes and back. All
islands use the decoded numbers, the sender included, so that their sums have the same bits. The sender keeps what
rounding drops, and adds it to its next change (error feedback, in `training.outer_weights`). This file has no sockets.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from llmfoundry_islands.tensors.boxes import Box, Boxes, Tensors

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""`islands.sync.dtype` -> the dtype of an element on the wire."""
LARGEST_INT8 = 127
"""Magnitude to which the largest number of a row is scaled. -128 is not used, so that the range is symmetric."""
SCALE_BYTES = 4
"""A scale is an fp32 number."""


class Encoded(NamedTuple):
    """A rank's piece of a tensor as it is sent."""

    items: torch.Tensor
    """The elements, in the dtype of the wire and the shape of the piece."""
    scales: torch.Tensor
    """For int8, one fp32 factor for each row, or a single one if the piece has one dimension. Otherwise empty."""

    @property
    def values(self) -> torch.Tensor:
        """The decoded numbers, in fp32. Every island uses these. The product with the scale rounds once."""
        values = self.items.float()
        if not self.scales.numel():
            return values
        scale_shape = (-1, *[1] * (values.ndim - 1))
        return values * self.scales.view(scale_shape)


def encode(values: torch.Tensor, dtype: str) -> Encoded:
    """Round a piece, which is in fp32 on the host, to `dtype`: `fp32`, `bf16` or `int8`.

    With int8 each row is divided by a scale that maps its largest magnitude to 127. A row of zeros has the scale 0. A
    row with a number that is not finite decodes to numbers that are not finite.
    """
    if dtype != "int8" or not values.numel():
        return Encoded(values.to(WIRE_DTYPES[dtype]), torch.empty(0))
    rows = values.reshape(_num_scales(values.shape), -1)
    scales = rows.abs().amax(1) / LARGEST_INT8
    divisors = torch.where(scales > 0, scales, 1.0)
    items = (rows / divisors[:, None]).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    # int8 has no NaN. Any number but 0 may stand for it, because the scale of the row is not finite either.
    items = items.nan_to_num(1.0)
    return Encoded(items.to(torch.int8).view(values.shape), scales)


def pack(pieces: Boxes, encoded: Mapping[str, Encoded], overlaps: Mapping[str, Box]) -> torch.Tensor:
    """Return the overlaps of this rank's pieces with a peer's as bytes: the scales and then the items of each.

    `encoded` has the pieces, whose boxes are `pieces`. Scales are those of the overlap's rows.
    """
    parts = []
    for key, overlap in overlaps.items():
        slices = overlap.slices_in(pieces[key])
        items, scales = encoded[key]
        if scales.numel():
            has_rows = items.ndim > 1
            parts.append(scales[slices[0]] if has_rows else scales)
        parts.append(items[slices])
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(raw: torch.Tensor, pieces: Boxes, overlaps: Mapping[str, Box], dtype: str, into: Tensors) -> None:
    """Decode bytes that a peer has made with `pack`, and write the numbers into this rank's pieces.

    `pieces` are the boxes of this rank, and `overlaps` those with the peer. Pieces that are missing in `into` are
    allocated; their other elements are undefined until the other peers' bytes have been unpacked.
    """
    position = 0

    def read(shape: tuple[int, ...], wire_dtype: torch.dtype) -> torch.Tensor:
        """Return the next elements. They are copied, because bytes at any position may not be aligned for the dtype."""
        nonlocal position
        elements = torch.empty(shape, dtype=wire_dtype)
        element_bytes = elements.view(-1).view(torch.uint8)
        element_bytes.copy_(raw[position : position + element_bytes.numel()])
        position += element_bytes.numel()
        return elements

    for key, overlap in overlaps.items():
        num_scales = _num_scales(overlap.lengths) if dtype == "int8" else 0
        scales = read((num_scales,), torch.float32)
        items = read(overlap.lengths, WIRE_DTYPES[dtype])
        if key not in into:
            into[key] = torch.empty(pieces[key].lengths)
        into[key][overlap.slices_in(pieces[key])] = Encoded(items, scales).values


def packed_bytes(overlaps: Mapping[str, Box], dtype: str) -> int:
    """Return the number of bytes that `pack` returns for these overlaps."""
    num_items = sum(overlap.size for overlap in overlaps.values())
    num_scales = 0
    if dtype == "int8":
        num_scales = sum(_num_scales(overlap.lengths) for overlap in overlaps.values())
    return SCALE_BYTES * num_scales + WIRE_DTYPES[dtype].itemsize * num_items


def _num_scales(lengths: tuple[int, ...] | torch.Size) -> int:
    """Return the number of int8 scales: one for each row, or a single one for a vector."""
    return lengths[0] if len(lengths) > 1 else 1
