"""Boxes of tensors: the parts that an island's ranks hold, and the parts of these that they exchange."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.planning import boxes_of
from llmfoundry_lite.config.layout import RowRanges, divide_stack


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


class Part(NamedTuple):
    """A box of a parameter that this rank holds, in the parameter's own order of rows."""

    name: str
    box: Box
    at: int
    """Index of its first row among the rows that the rank holds."""

    def of(self, held: torch.Tensor) -> torch.Tensor:
        """Return this part's rows of what the rank holds."""
        return held[self.at : self.at + self.box.lengths[0]]


def parts_of(name: str, tensor: torch.Tensor, heights: Sequence[int], runs: RowRanges | None) -> dict[str, Part]:
    """Return this rank's parts by key: one box for each matrix that the parameter stacks, if the rank holds any of it.

    `heights`: rows of each matrix. `runs`: the order in which ranks have the rows, if not the parameter's.
    """
    parts: dict[str, Part] = {}
    for offset, lengths, first_row in boxes_of(tensor, runs):
        for number, (first, count) in enumerate(divide_stack(heights, 1)):
            matrix = Box((first, *[0] * (tensor.ndim - 1)), (count, *tensor.shape[1:]))
            box = Box(offset, lengths).common(matrix)
            if box is not None:
                key = f"{name}/{number}" if len(heights) > 1 else name
                assert key not in parts, f"{key}: this rank holds several boxes"
                parts[key] = Part(name, box, first_row + box.offset[0] - offset[0])
    return parts


def share_out(boxes_of_ranks: Sequence[Boxes]) -> list[Boxes]:
    """Return each rank's part of its boxes to exchange: ranks with the same box divide its rows."""
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for item in boxes.items():
            holders.setdefault(item, []).append(rank)
    pieces: list[Boxes] = [{} for _ in boxes_of_ranks]
    for (name, (offset, lengths)), ranks in holders.items():
        bounds = [lengths[0] * i // len(ranks) for i in range(len(ranks) + 1)]
        for rank, (first, last) in zip(ranks, itertools.pairwise(bounds), strict=True):
            pieces[rank][name] = Box((offset[0] + first, *offset[1:]), (last - first, *lengths[1:]))
    return pieces


def rows_of(boxes_of_ranks: Sequence[Boxes]) -> dict[str, range]:
    """Return the range of rows of each tensor, from the boxes that ranks hold."""
    rows: dict[str, range] = {}
    for name, (offset, lengths) in (item for boxes in boxes_of_ranks for item in boxes.items()):
        first, last = offset[0], offset[0] + lengths[0]
        known = rows.get(name, range(first, last))
        rows[name] = range(min(first, known.start), max(last, known.stop))
    return rows


def common_boxes(mine: Boxes, theirs: Boxes) -> Boxes:
    """Return the overlaps of boxes of the same tensors, in order of names."""
    names = sorted(mine.keys() & theirs.keys())
    return {name: cut for name in names if (cut := mine[name].common(theirs[name]))}


class Redistribution:
    """A plan by which the ranks of an island exchange the boxes that they have for those that they want.

    Every rank makes it from the same lists, by rank. Boxes that ranks have do not overlap.
    """

    def __init__(self, have: Sequence[Boxes], want: Sequence[Boxes], rank: int):
        self.rank, self.have, self.want = rank, have[rank], want[rank]
        self.is_idle = list(have) == list(want)
        """Every rank has what it wants."""
        others = range(0 if self.is_idle else len(have))
        self._sent = [common_boxes(self.have, want[other]) if other != rank else {} for other in others]
        self._received = [common_boxes(have[other], self.want) if other != rank else {} for other in others]

    def apply(self, source: Tensors, target: Tensors, dtype: torch.dtype) -> None:
        """Fill `target`, this rank's boxes, from all ranks' `source`. Tensors travel as numbers of `dtype`, on the
        ranks' devices. Tensors that are in neither are skipped. Every rank must call it together."""
        for name, cut in common_boxes(self.have, self.want).items():
            if name in source and name in target:
                mine, new = source[name][cut.within(self.have[name])], target[name][cut.within(self.want[name])]
                if mine.data_ptr() != new.data_ptr():  # else it is a view of it
                    new.copy_(mine)
        if self.is_idle:
            return
        sent = [[source[n][cut.within(self.have[n])] for n, cut in cuts.items() if n in source] for cuts in self._sent]
        places = [
            [target[n][cut.within(self.want[n])] for n, cut in cuts.items() if n in target] for cuts in self._received
        ]
        # Offloaded parameters are on the host, and a group exchanges only tensors on its devices.
        like = torch.empty(0, dtype=dtype, device=devices.device_type())
        flat = torch.cat([like, *(part.reshape(-1).to(like) for parts in sent for part in parts)])
        counts = [sum(part.numel() for part in parts) for parts in places]
        received = flat.new_empty(sum(counts))
        dist.all_to_all_single(received, flat, counts, [sum(part.numel() for part in parts) for parts in sent])
        flat_places = [place for parts in places for place in parts]
        for place, values in zip(flat_places, received.split([p.numel() for p in flat_places]), strict=True):
            place.copy_(values.view_as(place))
