"""How a tensor is cut into cells, and which file holds which cell: arithmetic, without a list of the cells.

Owns the two kinds of layout and what must hold of them. A `Grid` cuts each dimension by a rule and numbers the files of
its cells by another; every sharding that torch's DTensor knows is one, and a few of them describe thousands of tensors
on thousands of ranks. `Boxes` lists each cell: format 1 did, and whatever is cut otherwise may. Where in its file a
cell lies is the file's own header's to say. No torch.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CELLS = 1 << 24
"""Of one tensor. A run on 16,384 ranks has a thousandth of it."""

Extra = dict[str, Any]
"""Fields that a later release has added, as JSON; written again as they came."""


class Slice(NamedTuple):
    """A cell: a box of a tensor, row-major in one file."""

    file: int
    """Index into `Manifest.files`."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def key(self, tensor: str) -> str:
        """Its name inside the safetensors file."""
        return f"{tensor}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True, slots=True)
class Grid:
    chunks: tuple[int | tuple[int, ...], ...]
    """For each dimension the length of its chunks, of which the last may be short; 0: not cut; a tuple: where it is
    cut. Dimensions that are not named are not cut."""
    files: tuple[int, ...]
    """With `strides` the file of the first cell; else that of every cell, row-major."""
    strides: tuple[int, ...] | None = None
    """How much the file's number grows with the cell's index in each of the dimensions named."""
    extra: Extra = field(default_factory=dict)

    def counts(self, shape: Sequence[int]) -> list[int]:
        """Cells along each of the dimensions named."""
        return [_num_chunks(chunk, length) for chunk, length in zip(self.chunks, shape, strict=False)]

    def num_cells(self, shape: Sequence[int]) -> int:
        return math.prod(self.counts(shape)) if math.prod(shape) else 0

    def overlapping(self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> Iterator[Slice]:
        """The cells that reach into a box; as much work as there are of them."""
        if not math.prod(lengths):
            return
        counts = self.counts(shape)
        spans = [
            _chunks_between(chunk, begin, begin + n)
            for chunk, begin, n in zip(self.chunks, offset, lengths, strict=False)
        ]
        for index in itertools.product(*spans):
            yield Slice(self._file(index, counts), *self.cell(shape, index))

    def cell(self, shape: Sequence[int], index: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and lengths of a cell, given its index along each of the dimensions named."""
        uncut = tuple(shape[len(self.chunks) :])
        ends = [_chunk_ends(chunk, length, i) for chunk, length, i in zip(self.chunks, shape, index, strict=False)]
        return (
            (*(begin for begin, _ in ends), *(0 for _ in uncut)),
            (*(end - begin for begin, end in ends), *uncut),
        )

    def at(self, shape: Sequence[int], offset: Sequence[int]) -> Slice | None:
        """The cell that begins there, if one does."""
        if len(offset) != len(shape) or any(not 0 <= begin < n for begin, n in zip(offset, shape, strict=True)):
            return None
        found = next(self.overlapping(shape, offset, [1] * len(shape)), None)
        return found if found is not None and found.offset == tuple(offset) else None

    def indices_by_file(self, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """The cells of each file."""
        counts = self.counts(shape)
        found: dict[int, list[tuple[int, ...]]] = {}
        for index in itertools.product(*map(range, counts)) if math.prod(shape) else ():
            found.setdefault(self._file(index, counts), []).append(index)
        return found

    def problem(self, num_files: int) -> str | None:
        """Why this is no layout of so many files, whatever the tensor."""
        for chunk in self.chunks:
            cuts = (chunk,) if isinstance(chunk, int) else (0, *chunk)
            if min(cuts) < 0 or any(b <= a for a, b in itertools.pairwise(cuts)):
                return f"chunks {self.chunks}"
        if not self.files or not 0 <= min(self.files) <= max(self.files) < num_files:
            return f"file number {max(self.files, default=0)}, which is not there"
        if self.strides is not None and (len(self.files) != 1 or len(self.strides) != len(self.chunks)):
            return f"strides {self.strides} for chunks {self.chunks}"
        return None

    def problem_with(self, shape: Sequence[int], num_files: int) -> str | None:
        """Why it cannot be the layout of a tensor of this shape."""
        if len(self.chunks) > len(shape):
            return f"chunks {self.chunks} for shape {tuple(shape)}"
        for chunk, length in zip(self.chunks, shape, strict=False):
            if not isinstance(chunk, int) and chunk and chunk[-1] >= length:
                return f"chunks {self.chunks} reach out of {tuple(shape)}"
        num_cells = self.num_cells(shape)
        if num_cells > MAX_CELLS:
            return f"{num_cells:,} slices, cut in a way no run produces"
        if self.strides is None:
            return None if len(self.files) >= num_cells else f"{len(self.files)} files for {num_cells} slices"
        reach = [stride * (count - 1) for stride, count in zip(self.strides, self.counts(shape), strict=True)]
        lowest = self.files[0] + sum(min(n, 0) for n in reach)
        highest = self.files[0] + sum(max(n, 0) for n in reach)
        if num_cells and not 0 <= lowest <= highest < num_files:
            return f"slice in file number {lowest if lowest < 0 else highest}, which is not there"
        return None

    def _file(self, index: Sequence[int], counts: Sequence[int]) -> int:
        if self.strides is not None:
            return self.files[0] + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        folder = 0
        for i, count in zip(index, counts, strict=True):
            folder = folder * count + i
        return self.files[folder]


@dataclass(frozen=True, slots=True)
class Boxes:
    cells: tuple[Slice, ...]
    extra: Extra = field(default_factory=dict)

    def num_cells(self, shape: Sequence[int]) -> int:
        return len(self.cells)

    def overlapping(self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> Iterator[Slice]:
        for cell in self.cells:
            if _overlap(cell.offset, cell.shape, offset, lengths):
                yield cell

    def at(self, shape: Sequence[int], offset: Sequence[int]) -> Slice | None:
        return next((cell for cell in self.cells if cell.offset == tuple(offset)), None)

    def problem(self, num_files: int) -> str | None:
        for cell in self.cells:
            if not 0 <= cell.file < num_files:
                return f"slice in file number {cell.file}, which is not there"
        return None

    def problem_with(self, shape: Sequence[int], num_files: int) -> str | None:
        """Cells must lie inside of the tensor, apart from each other, and cover it."""
        for cell in self.cells:
            if len(cell.offset) != len(shape) or len(cell.shape) != len(shape):
                return f"slice at {cell.offset} of shape {cell.shape} in {tuple(shape)}"
            for begin, length, whole in zip(cell.offset, cell.shape, shape, strict=True):
                if begin < 0 or length <= 0 or begin + length > whole:
                    return f"slice at {cell.offset} of shape {cell.shape} reaches out of {tuple(shape)}"
        volume, whole = sum(math.prod(cell.shape) for cell in self.cells), math.prod(shape)
        return self._overlap_among(shape) or (
            f"{volume:,} of its {whole:,} values are there; a slice is missing" if volume != whole else None
        )

    def _overlap_among(self, shape: Sequence[int]) -> str | None:
        """Sweep along the most divided dimension; cells cut one way are compared with their neighbour alone."""
        if len(self.cells) < 2:
            return None
        if not shape:
            return "slices overlap"
        cuts = [len({cell.offset[dim] for cell in self.cells}) for dim in range(len(shape))]
        dim = cuts.index(max(cuts))
        active: list[Slice] = []
        comparisons = 0
        for cell in sorted(self.cells, key=lambda cell: cell.offset[dim]):
            active = [other for other in active if other.offset[dim] + other.shape[dim] > cell.offset[dim]]
            comparisons += len(active)
            if any(_overlap(cell.offset, cell.shape, other.offset, other.shape) for other in active):
                return f"slices overlap at {cell.offset}"
            if comparisons > 20_000_000:
                return f"{len(self.cells)} slices, cut in a way no run produces"
            active.append(cell)
        return None


Layout = Grid | Boxes


def _num_chunks(chunk: int | tuple[int, ...], length: int) -> int:
    if isinstance(chunk, int):
        return -(-length // chunk) if chunk else 1
    return len(chunk) + 1


def _chunk_ends(chunk: int | tuple[int, ...], length: int, i: int) -> tuple[int, int]:
    if isinstance(chunk, int):
        return (i * chunk, min((i + 1) * chunk, length)) if chunk else (0, length)
    return (chunk[i - 1] if i else 0, chunk[i] if i < len(chunk) else length)


def _chunks_between(chunk: int | tuple[int, ...], begin: int, end: int) -> range:
    """Which chunks reach into begin to end."""
    if isinstance(chunk, int):
        return range(begin // chunk, (end - 1) // chunk + 1) if chunk else range(1)
    return range(bisect_right(chunk, begin), bisect_left(chunk, end) + 1)


def _overlap(a: Sequence[int], a_lengths: Sequence[int], b: Sequence[int], b_lengths: Sequence[int]) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a, a_lengths, b, b_lengths, strict=True))
