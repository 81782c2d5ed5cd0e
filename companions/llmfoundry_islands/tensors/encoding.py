"""Changes of weights as they travel between islands: fp32, bf16, or int8 with a scale for each row.

All islands use the decoded numbers, the sender included, so their sums are the same bits. What rounding drops is kept
by the sender and added to its next change (error feedback). No sockets.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from llmfoundry_islands.tensors.boxes import Box, Boxes, Tensors

ITEMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""`islands.sync.dtype` -> the dtype of an element on the wire."""
LARGEST = 127


class Encoded(NamedTuple):
    """One rank's piece of a tensor."""

    items: torch.Tensor
    scales: torch.Tensor
    """For int8, one fp32 scale for each row, or one in all for a piece with one dimension. Else empty."""

    @property
    def values(self) -> torch.Tensor:
        """Numbers that every island uses, in fp32. The product with the scale rounds once."""
        values = self.items.float()
        return values * self.scales.view(-1, *[1] * (values.ndim - 1)) if self.scales.numel() else values


def encode(values: torch.Tensor, dtype: str) -> Encoded:
    """Round a piece in fp32 on the host to `dtype`."""
    if dtype != "int8" or not values.numel():
        return Encoded(values.to(ITEMS[dtype]), torch.empty(0))
    rows = values.reshape(_num_scales(values.shape), -1)
    scales = rows.abs().amax(1) / LARGEST
    items = (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().clamp(-LARGEST, LARGEST)
    # A row with a number that is not finite gets a scale that is not finite.
    return Encoded(items.nan_to_num(1.0).to(torch.int8).view(values.shape), scales)


def pack(pieces: Boxes, encoded: Mapping[str, Encoded], cuts: Mapping[str, Box]) -> torch.Tensor:
    """Return a peer's cuts of the pieces as bytes: for each, its scales and then its items."""
    parts = []
    for name, cut in cuts.items():
        inside, (items, scales) = cut.within(pieces[name]), encoded[name]
        if scales.numel():
            parts.append(scales[inside[0]] if items.ndim > 1 else scales)
        parts.append(items[inside])
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def unpack(raw: torch.Tensor, pieces: Boxes, cuts: Mapping[str, Box], dtype: str, into: Tensors) -> None:
    """Decode what `pack` has packed, into this rank's pieces. Allocates those that `into` lacks."""
    place = 0

    def take(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        nonlocal place
        part = torch.empty(shape, dtype=kind)
        flat = part.view(-1).view(torch.uint8)
        flat.copy_(raw[place : place + flat.numel()])
        place += flat.numel()
        return part

    for name, cut in cuts.items():
        scales = take((_num_scales(cut.lengths) if dtype == "int8" else 0,), torch.float32)
        whole = into.setdefault(name, torch.empty(pieces[name].lengths))
        whole[cut.within(pieces[name])] = Encoded(take(cut.lengths, ITEMS[dtype]), scales).values


def packed_bytes(cuts: Mapping[str, Box], dtype: str) -> int:
    scales = sum(_num_scales(cut.lengths) for cut in cuts.values()) if dtype == "int8" else 0
    return 4 * scales + ITEMS[dtype].itemsize * sum(cut.size for cut in cuts.values())


def _num_scales(lengths: tuple[int, ...] | torch.Size) -> int:
    return lengths[0] if len(lengths) > 1 else 1
