"""Boxes: rectangular parts of tensors, by which islands of different layouts name what they hold and exchange.

`parts_of` finds the boxes that a rank holds, `divide_replicas` divides boxes that several ranks of an island hold, and
`Redistribution` moves numbers between the ranks of one island. `exchange.py` sends them to other islands.
"""

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
    """A rectangular part of a tensor. Its rows are the indices of the first dimension."""

    offset: tuple[int, ...]
    """Index of the first element in each dimension of the whole tensor."""
    lengths: tuple[int, ...]

    def intersect(self, other: "Box") -> "Box | None":
        """Return the overlap of two boxes of the same tensor, or None if they do not overlap."""
        begins = np.maximum(self.offset, other.offset)
        ends = np.minimum(np.add(self.offset, self.lengths), np.add(other.offset, other.lengths))
        lengths = ends - begins
        if (lengths <= 0).any():
            return None
        return Box(tuple(begins.tolist()), tuple(lengths.tolist()))

    def slices_in(self, other: "Box") -> tuple[slice, ...]:
        """Return the slices that select this box from a tensor of the box `other`, which contains it.

        For example, the box of rows 6 and 7 has the slice 2:4 in a box that begins at row 4.
        """
        begins = np.subtract(self.offset, other.offset).tolist()
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, self.lengths, strict=True))

    def limit_rows(self, rows: range) -> "Box":
        """Return the part of this box whose rows are in `rows`. It may have no rows."""
        begin = self.offset[0]
        end = begin + self.lengths[0]
        first = min(max(begin, rows.start), end)
        num_rows = max(min(end, rows.stop) - first, 0)
        return Box((first, *self.offset[1:]), (num_rows, *self.lengths[1:]))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.lengths))


Boxes = dict[str, Box]
"""Key of a tensor -> the box of it that a rank holds, or exchanges."""
Tensors = dict[str, torch.Tensor]
"""Key of a tensor -> the elements of a rank's box of it."""


class Part(NamedTuple):
    """A box of a parameter that this rank holds, in the parameter's own order of rows."""

    name: str
    """The parameter."""
    box: Box
    first_local_row: int
    """Index of the box's first row among the rows of the parameter that the rank holds."""

    def view_of(self, local_tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this part's rows of `local_tensor`, which is all that the rank holds of the parameter."""
        return local_tensor[self.first_local_row : self.first_local_row + self.box.lengths[0]]


def parts_of(
    name: str, tensor: torch.Tensor, matrix_heights: Sequence[int], row_order: RowRanges | None
) -> dict[str, Part]:
    """Return the parts of a parameter that this rank holds: one for each of its matrices of which the rank has rows.

    `matrix_heights` has the number of rows of each matrix that the parameter stacks, such as q, k and v. `row_order` is
    the order in which ranks hold the rows, if it is not the parameter's own. With tensor parallelism, for example, a
    rank may hold half of q, half of k and half of v, one after the other.

    The keys are the parameter's name, or `name/0`, `name/1`, … if it stacks several matrices.
    """
    parts: dict[str, Part] = {}
    matrices = divide_stack(matrix_heights, 1)
    for offset, lengths, first_local_row in boxes_of(tensor, row_order):
        for matrix_index, (first_row, num_rows) in enumerate(matrices):
            matrix = Box((first_row, *[0] * (tensor.ndim - 1)), (num_rows, *tensor.shape[1:]))
            box = Box(offset, lengths).intersect(matrix)
            if box is None:
                continue
            key = f"{name}/{matrix_index}" if len(matrix_heights) > 1 else name
            assert key not in parts, f"{key}: this rank holds several boxes"
            rows_before_box = box.offset[0] - offset[0]
            parts[key] = Part(name, box, first_local_row + rows_before_box)
    return parts


def divide_replicas(boxes_of_ranks: Sequence[Boxes]) -> list[Boxes]:
    """Return each rank's piece of its boxes: ranks with the same box divide its rows, others keep theirs.

    The pieces of all ranks do not overlap, so that an island sends no element twice. A piece may have no rows.

    For example, two ranks that both hold 7 rows get the rows 0 to 2, and 3 to 6.
    """
    ranks_of_box: dict[tuple[str, Box], list[int]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for key, box in boxes.items():
            ranks_of_box.setdefault((key, box), []).append(rank)

    pieces: list[Boxes] = [{} for _ in boxes_of_ranks]
    for (key, (offset, lengths)), ranks in ranks_of_box.items():
        bounds = [lengths[0] * i // len(ranks) for i in range(len(ranks) + 1)]
        for rank, (begin, end) in zip(ranks, itertools.pairwise(bounds), strict=True):
            pieces[rank][key] = Box((offset[0] + begin, *offset[1:]), (end - begin, *lengths[1:]))
    return pieces


def rows_of(boxes_of_ranks: Sequence[Boxes]) -> dict[str, range]:
    """Return the range of rows of each tensor, from the boxes that the ranks hold of it."""
    rows: dict[str, range] = {}
    for boxes in boxes_of_ranks:
        for key, (offset, lengths) in boxes.items():
            begin = offset[0]
            end = begin + lengths[0]
            known = rows.get(key, range(begin, end))
            rows[key] = range(min(begin, known.start), max(end, known.stop))
    return rows


def overlapping_boxes(first: Boxes, second: Boxes) -> Boxes:
    """Return the overlaps of boxes of the same tensors, in order of keys. Tensors without an overlap are left out."""
    overlaps = {}
    for key in sorted(first.keys() & second.keys()):
        overlap = first[key].intersect(second[key])
        if overlap is not None:
            overlaps[key] = overlap
    return overlaps


class Redistribution:
    """A plan by which the ranks of an island exchange the boxes that they hold for boxes that they want.

    Every rank makes the plan from the same lists, so making it needs no communication. `apply` carries it out.
    """

    def __init__(self, held: Sequence[Boxes], wanted: Sequence[Boxes], rank: int):
        """Make the plan of one rank. `held` and `wanted` are in order of ranks. Boxes in `held` must not overlap."""
        self.rank = rank
        self.held = held[rank]
        self.wanted = wanted[rank]
        self.is_identity = list(held) == list(wanted)
        """Every rank wants what it holds, so that ranks need not communicate."""
        self._sent: list[Boxes] = []
        """What this rank sends to each rank. Nothing to itself."""
        self._received: list[Boxes] = []
        """What this rank receives from each rank."""
        if self.is_identity:
            return
        for other in range(len(held)):
            is_other_rank = other != rank
            self._sent.append(overlapping_boxes(self.held, wanted[other]) if is_other_rank else {})
            self._received.append(overlapping_boxes(held[other], self.wanted) if is_other_rank else {})

    def apply(self, source: Tensors, target: Tensors, dtype: torch.dtype) -> None:
        """Fill `target`, which has this rank's wanted boxes, from the held boxes in all ranks' `source`. Collective.

        Tensors are sent as numbers of `dtype`, through the ranks' devices. A tensor may be missing in `source` and
        `target` of all ranks, and is skipped then.
        """
        self._copy_own(source, target)
        if self.is_identity:
            return

        parts_to_send = self._views(source, self.held, self._sent)
        parts_to_fill = self._views(target, self.wanted, self._received)
        sent_counts = [sum(part.numel() for part in parts) for parts in parts_to_send]
        received_counts = [sum(part.numel() for part in parts) for parts in parts_to_fill]

        # Offloaded parameters are on the host, but a process group only exchanges tensors on its devices.
        empty = torch.empty(0, dtype=dtype, device=devices.device_type())
        flat_parts = [part.reshape(-1).to(empty) for parts in parts_to_send for part in parts]
        sent = torch.cat([empty, *flat_parts])
        received = sent.new_empty(sum(received_counts))
        dist.all_to_all_single(received, sent, received_counts, sent_counts)

        targets = [part for parts in parts_to_fill for part in parts]
        for part, values in zip(targets, received.split([part.numel() for part in targets]), strict=True):
            part.copy_(values.view_as(part))

    def _copy_own(self, source: Tensors, target: Tensors) -> None:
        """Copy what this rank both holds and wants."""
        for key, overlap in overlapping_boxes(self.held, self.wanted).items():
            if key in source and key in target:
                old = source[key][overlap.slices_in(self.held[key])]
                new = target[key][overlap.slices_in(self.wanted[key])]
                is_view_of_source = old.data_ptr() == new.data_ptr()
                if not is_view_of_source:
                    new.copy_(old)

    @staticmethod
    def _views(tensors: Tensors, boxes: Boxes, boxes_by_rank: Sequence[Boxes]) -> list[list[torch.Tensor]]:
        """Return the views of `tensors` that are the boxes of each rank. `boxes` are those of `tensors` themselves."""
        views_by_rank = []
        for boxes_of_rank in boxes_by_rank:
            views = []
            for key, box in boxes_of_rank.items():
                if key in tensors:
                    views.append(tensors[key][box.slices_in(boxes[key])])
            views_by_rank.append(views)
        return views_by_rank
