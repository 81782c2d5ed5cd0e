"""Boxes of tensors: the parts that an island's ranks hold, and the parts of these that they exchange."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    def common(self, other: "Box") -> "Box | None":
        """Return the overlap; None if it is empty."""
        begins = np.maximum(self.offset, other.offset)
        lengths = np.minimum(np.add(self.offset, self.lengths), np.add(other.offset, other.lengths)) - begins
        return Box(tuple(begins.tolist()), tuple(lengths.tolist())) if (lengths > 0).all() else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in the tensor of `other`."""
        begins = np.subtract(self.offset, other.offset).tolist()
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.lengths, strict=True))

    def rows_in(self, rows: range) -> "Box":
        """Return the part whose rows are among `rows`, which may be empty."""
        begin, stop = self.offset[0], self.offset[0] + self.lengths[0]
        first = min(max(begin, rows.start), stop)
        return Box((first, *self.offset[1:]), (max(min(stop, rows.stop) - first, 0), *self.lengths[1:]))

    @property
    def size(self) -> int:
        return int(np.prod(self.lengths))


Boxes = dict[str, Box]
Tensors = dict[str, torch.Tensor]


def share_out(boxes_of_ranks: Sequence[Boxes]) -> list[Boxes]:
    """Return each rank's part of its boxes to exchange: ranks with the same box divide its rows."""
    pieces: list[Boxes] = [{} for _ in boxes_of_ranks]
    for name in boxes_of_ranks[0]:
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(boxes_of_ranks):
            holders.setdefault(boxes[name], []).append(rank)
        for (offset, lengths), ranks in holders.items():
            bounds = [lengths[0] * i // len(ranks) for i in range(len(ranks) + 1)]
            for i, rank in enumerate(ranks):
                first, last = bounds[i], bounds[i + 1]
                pieces[rank][name] = Box((offset[0] + first, *offset[1:]), (last - first, *lengths[1:]))
    return pieces


def complete(tensors: Mapping[str, torch.Tensor], locals_: Tensors, pieces: Boxes, boxes: Boxes) -> None:
    """Gather, within the island, the rows that replicas have divided by `share_out`. Every rank must call it together.

    `tensors` are the model's, `locals_` this rank's parts of them: only their `pieces` are valid before, all of them
    after.
    """
    groups: dict[str, tuple[dist.ProcessGroup, list[str]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        mesh, kinds = tensor.device_mesh, tensor.placements
        copies = [i for i, kind in enumerate(kinds) if kind.is_replicate() and mesh.size(i) > 1]
        assert len(copies) <= 1, kinds
        if copies:  # other ranks hold the same part
            group = mesh.get_group(copies[0])
            groups.setdefault(group.group_name, (group, []))[1].append(name)
    for group, names in groups.values():
        for name in names:
            whole, inside = locals_[name], pieces[name].within(boxes[name])
            kept = whole[inside].clone()
            whole.zero_()
            whole[inside] = kept
        # Offloaded parameters are on the host, and a group exchanges only tensors on its devices.
        device = cast(DTensor, tensors[names[0]]).device_mesh.device_type
        flat = torch.cat([locals_[name].reshape(-1) for name in names]).to(device)
        dist.all_reduce(flat, group=group)  # each element is one value plus zeros: exact
        for name, values in zip(names, flat.split([locals_[name].numel() for name in names]), strict=True):
            locals_[name].copy_(values.view_as(locals_[name]))
