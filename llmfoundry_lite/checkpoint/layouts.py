"""How a tensor is cut into cells, and which file holds which cell: arithmetic that many tensors share. No torch."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CELLS = 1 << 24
"""A tensor's limit. A run on 16,384 ranks has a thousandth of it."""

Extra = dict[str, Any]
"""Fields that a later release has added, as JSON. They are written again."""


class Slice(NamedTuple):
    """A cell: a box of a tensor, row-major in one file."""

    file: int
    """Index into `Manifest.files`."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def key(self, tensor: str) -> str:
        """Return its name inside the safetensors file."""
        return f"{tensor}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True, slots=True)
class Grid:
    chunks: tuple[int | tuple[int, ...], ...]
    """For each of the first dimensions: the length of its chunks, of which the last may be short; 0: not cut; a tuple:
    where it is cut. Further dimensions are not cut."""
    files: tuple[int, ...]
    """The file of the first cell, with `strides`; else that of every cell, row-major."""
    strides: tuple[int, ...] | None = None
    """How much the file's number grows with the cell's index in each dimension of `chunks`."""
    extra: Extra = field(default_factory=dict)

    def counts(self, shape: Sequence[int]) -> list[int]:
        """Return the number of cells along each dimension of `chunks`."""
        return [_num_chunks(chunk, length) for chunk, length in zip(self.chunks, shape, strict=False)]

    def num_cells(self, shape: Sequence[int]) -> int:
        return math.prod(self.counts(shape)) if math.prod(shape) else 0

    def overlapping(self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> Iterator[Slice]:
        """Yield the cells that reach into a box; as much work as there are of them."""
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
        """Return offset and lengths of a cell, given its index along each dimension of `chunks`."""
        uncut = tuple(shape[len(self.chunks) :])
        ends = [_chunk_ends(chunk, length, i) for chunk, length, i in zip(self.chunks, shape, index, strict=False)]
        return (
            (*(begin for begin, _ in ends), *(0 for _ in uncut)),
            (*(end - begin for begin, end in ends), *uncut),
        )

    def at(self, shape: Sequence[int], offset: Sequence[int]) -> Slice | None:
        """Return the cell that begins there, if one does."""
        if len(offset) != len(shape) or any(not 0 <= begin < n for begin, n in zip(offset, shape, strict=True)):
            return None
        found = next(self.overlapping(shape, offset, [1] * len(shape)), None)
        return found if found is not None and found.offset == tuple(offset) else None

    def indices_by_file(self, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """Return the cells of each file."""
        counts = self.counts(shape)
        found: dict[int, list[tuple[int, ...]]] = {}
        for index in itertools.product(*map(range, counts)) if math.prod(shape) else ():
            found.setdefault(self._file(index, counts), []).append(index)
        return found

    def problem(self, shape: Sequence[int], num_files: int) -> str | None:
        """Return why it cannot be the layout of a tensor of this shape in so many files."""
        for chunk in self.chunks:
            cuts = (chunk,) if isinstance(chunk, int) else (0, *chunk)
            if min(cuts) < 0 or any(b <= a for a, b in itertools.pairwise(cuts)):
                return f"chunks {self.chunks}"
        if not self.files or not 0 <= min(self.files) <= max(self.files) < num_files:
            return f"file number {max(self.files, default=0)}, which is not there"
        if self.strides is not None and (len(self.files) != 1 or len(self.strides) != len(self.chunks)):
            return f"strides {self.strides} for chunks {self.chunks}"
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
        position = 0
        for i, count in zip(index, counts, strict=True):
            position = position * count + i
        return self.files[position]


def grid_of(cells: Sequence[Slice], shape: tuple[int, ...]) -> Grid | str:
    """Return the grid that listed cells form, or why they form none: format 1 lists cells, and always those of a
    grid."""
    for cell in cells:
        if len(cell.offset) != len(shape) or len(cell.shape) != len(shape):
            return f"slice at {cell.offset} of shape {cell.shape} in {shape}"
        if any(n <= 0 or begin + n > whole for begin, n, whole in zip(cell.offset, cell.shape, shape, strict=True)):
            return f"slice at {cell.offset} of shape {cell.shape} reaches out of {shape}"
    covered, whole = sum(math.prod(cell.shape) for cell in cells), math.prod(shape)
    if covered != whole:
        return f"{covered:,} of its {whole:,} values are there; a slice is missing or slices overlap"
    if not whole:
        return Grid((), (0,))
    cuts = [sorted({cell.offset[dim] for cell in cells}) for dim in range(len(shape))]
    files = {cell.offset: cell.file for cell in cells}
    if len(files) == len(cells) == math.prod(map(len, cuts)):
        grid = Grid(tuple(tuple(cut[1:]) for cut in cuts), tuple(files.get(at, -1) for at in itertools.product(*cuts)))
        if {*grid.overlapping(shape, (0,) * len(shape), shape)} == {*cells}:
            return grid
    return "slices overlap, or are not cut as a grid"


def _num_chunks(chunk: int | tuple[int, ...], length: int) -> int:
    if isinstance(chunk, int):
        return -(-length // chunk) if chunk else 1
    return len(chunk) + 1


def _chunk_ends(chunk: int | tuple[int, ...], length: int, i: int) -> tuple[int, int]:
    if isinstance(chunk, int):
        return (i * chunk, min((i + 1) * chunk, length)) if chunk else (0, length)
    return (chunk[i - 1] if i else 0, chunk[i] if i < len(chunk) else length)


def _chunks_between(chunk: int | tuple[int, ...], begin: int, end: int) -> range:
    """Return the chunks that reach into [begin, end)."""
    if isinstance(chunk, int):
        return range(begin // chunk, (end - 1) // chunk + 1) if chunk else range(1)
    return range(bisect_right(chunk, begin), bisect_left(chunk, end) + 1)
