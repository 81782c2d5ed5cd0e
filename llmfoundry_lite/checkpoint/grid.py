"""Grids: how a tensor is cut into chunks and which file holds which chunk, by arithmetic. No torch."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CHUNKS = 1 << 24
"""The most chunks that a tensor may have. A run on 16,384 ranks needs a thousandth of it."""
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""dtype, as safetensors spells it -> bytes of an element."""

Extra = dict[str, Any]
"""Fields that a later release has added, as JSON. They are written again."""


Cut = int | tuple[int, ...]
"""How a dimension is cut into chunks. A number is the length of a chunk; the last may be shorter. 0 means that the
dimension is not cut. A tuple lists the places of the cuts."""


class Box(NamedTuple):
    """A rectangular part of a tensor."""

    offset: tuple[int, ...]
    """Where it begins, in each dimension."""
    lengths: tuple[int, ...]


class Chunk(NamedTuple):
    """A rectangular part of a tensor that one file holds, row-major."""

    tensor: str
    dtype: str
    """A key of ITEM_BYTES."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The chunk's name inside the safetensors file, such as `model/w@25,0`."""
        return f"{self.tensor}@{','.join(map(str, self.offset))}"

    @property
    def num_bytes(self) -> int:
        """The chunk's size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunks of a tensor, and the file of each. Tensors that are cut alike share a grid.

    Files are named by their number in the manifest. A chunk's index is its place along each dimension of `chunks`.
    """

    chunks: tuple[Cut, ...]
    """How each of the first dimensions is cut. Further dimensions are not cut."""
    files: tuple[int, ...]
    """With `strides`, the file of the first chunk. Without, the file of every chunk, row-major."""
    strides: tuple[int, ...] | None = None
    """By how much the file's number grows with the chunk's index, in each dimension of `chunks`."""
    extra: Extra = field(default_factory=dict)

    def counts(self, shape: Sequence[int]) -> list[int]:
        """Return the number of chunks along each dimension of `chunks`, for a tensor of this shape."""
        return [_num_chunks(cut, length) for cut, length in zip(self.chunks, shape, strict=False)]

    def num_chunks(self, shape: Sequence[int]) -> int:
        """Return the number of chunks of a tensor of this shape. A tensor without elements has none."""
        return math.prod(self.counts(shape)) if math.prod(shape) else 0

    def overlapping(
        self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[int, Box]]:
        """Yield file and box of each chunk that overlaps a box, for a tensor of this shape.

        The work is proportional to the number of these chunks, not to that of all chunks.
        """
        if not math.prod(lengths):
            return
        counts = self.counts(shape)
        # The chunks overlap that do so in every dimension.
        ranges_of_chunks = [
            _chunks_between(cut, begin, begin + length)
            for cut, begin, length in zip(self.chunks, offset, lengths, strict=False)
        ]
        for index in itertools.product(*ranges_of_chunks):
            yield self._file_index(index, counts), self.box(shape, index)

    def box(self, shape: Sequence[int], index: Sequence[int]) -> Box:
        """Return the box of the chunk with this index, for a tensor of this shape."""
        offset = []
        lengths = []
        for cut, dim_length, i in zip(self.chunks, shape, index, strict=False):
            begin, end = _chunk_bounds(cut, dim_length, i)
            offset.append(begin)
            lengths.append(end - begin)
        uncut_lengths = shape[len(self.chunks) :]
        return Box((*offset, *(0 for _ in uncut_lengths)), (*lengths, *uncut_lengths))

    def has(self, shape: Sequence[int], file: int, box: Box) -> bool:
        """Return whether this box is a chunk of a tensor of this shape, and this file holds it."""
        if len(box.offset) != len(shape):
            return False
        is_inside = all(0 <= begin < length for begin, length in zip(box.offset, shape, strict=True))
        # If the box is a chunk, then it is the one chunk that overlaps the box's first element.
        return is_inside and next(self.overlapping(shape, box.offset, [1] * len(shape))) == (file, box)

    def indices_by_file(self, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """Return the indices of each file's chunks, for a tensor of this shape."""
        by_file: dict[int, list[tuple[int, ...]]] = {}
        if not math.prod(shape):
            return by_file
        counts = self.counts(shape)
        for index in itertools.product(*map(range, counts)):
            by_file.setdefault(self._file_index(index, counts), []).append(index)
        return by_file

    def problem(self, shape: Sequence[int], num_files: int) -> str | None:
        """Return why this cannot be the grid of a tensor of this shape in `num_files` files. None: it can.

        A manifest may come from anybody, so nothing about it is taken for granted.
        """
        # Lengths and places of cuts are positive, and places grow.
        for cut in self.chunks:
            places = (cut,) if isinstance(cut, int) else (0, *cut)
            if min(places) < 0 or any(second <= first for first, second in itertools.pairwise(places)):
                return f"chunks {self.chunks}"
        # The listed files exist. There is just one if strides give the others.
        if not self.files or not 0 <= min(self.files) <= max(self.files) < num_files:
            return f"file number {max(self.files, default=0)}, which is not there"
        if self.strides is not None and (len(self.files) != 1 or len(self.strides) != len(self.chunks)):
            return f"strides {self.strides} for chunks {self.chunks}"
        # The cuts lie inside the tensor.
        if len(self.chunks) > len(shape):
            return f"chunks {self.chunks} for shape {tuple(shape)}"
        for cut, length in zip(self.chunks, shape, strict=False):
            if not isinstance(cut, int) and cut and cut[-1] >= length:
                return f"chunks {self.chunks} reach out of {tuple(shape)}"

        # Every chunk has a file.
        num_chunks = self.num_chunks(shape)
        if num_chunks > MAX_CHUNKS:
            return f"{num_chunks:,} chunks, cut in a way no run produces"
        if self.strides is None:
            return None if len(self.files) >= num_chunks else f"{len(self.files)} files for {num_chunks} chunks"
        return self._problem_of_strides(self.strides, shape, num_files)

    def _problem_of_strides(self, strides: Sequence[int], shape: Sequence[int], num_files: int) -> str | None:
        """Return the problem if `strides` give a chunk a file number that is negative or not below `num_files`; else
        None. The lowest and the highest number belong to chunks at the corners of the grid."""
        if not self.num_chunks(shape):
            return None
        lowest = highest = self.files[0]
        for stride, count in zip(strides, self.counts(shape), strict=True):
            difference = stride * (count - 1)  # between the last chunk's file and the first one's
            lowest += min(difference, 0)
            highest += max(difference, 0)
        if lowest < 0:
            return f"chunk in file number {lowest}, which is not there"
        if highest >= num_files:
            return f"chunk in file number {highest}, which is not there"
        return None

    def _file_index(self, index: Sequence[int], counts: Sequence[int]) -> int:
        """Return the index of the file that holds a chunk.

        index: the chunk's position along each dimension.
        counts: the number of chunks along each dimension.

        With `strides`, `files` has one element, the file of the first chunk, and a step along a dimension adds its
        stride. Without, `files` lists the file of every chunk in row-major order.
        """
        if self.strides is not None:
            return self.files[0] + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        position = 0
        for i, count in zip(index, counts, strict=True):
            position = position * count + i
        return self.files[position]


def _num_chunks(cut: Cut, dim_length: int) -> int:
    """Return how many chunks a dimension has. `cut` is the length of its chunks (0: it is not cut), or the places where
    it is cut."""
    if not isinstance(cut, int):
        return len(cut) + 1
    return -(-dim_length // cut) if cut else 1


def _chunk_bounds(cut: Cut, dim_length: int, i: int) -> tuple[int, int]:
    """Return where chunk `i` of a dimension begins and ends. `cut` is the length of its chunks (0: it is not cut), or
    the places where it is cut."""
    if not isinstance(cut, int):
        begin = cut[i - 1] if i else 0
        end = cut[i] if i < len(cut) else dim_length
        return begin, end
    if not cut:
        return 0, dim_length
    return i * cut, min((i + 1) * cut, dim_length)


def _chunks_between(cut: Cut, begin: int, end: int) -> range:
    """Return the indices of a dimension's chunks that overlap [begin, end), which must not be empty. `cut` is the
    length of its chunks (0: it is not cut), or the places where it is cut."""
    if not isinstance(cut, int):
        return range(bisect_right(cut, begin), bisect_left(cut, end) + 1)
    if not cut:
        return range(1)
    return range(begin // cut, (end - 1) // cut + 1)
