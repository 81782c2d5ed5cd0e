"""Grids: how a tensor is cut into chunks and which file holds which chunk, by arithmetic. No torch.

A `Grid` cuts some of a tensor's dimensions, and its chunks are all combinations of the parts. It computes a chunk's
box and file from the chunk's index, so that a manifest stores a few numbers instead of a list of chunks. `planning`
makes grids from how ranks divide a tensor, and `manifest_json` writes and reads them. Files are known here only by
their position in the manifest's list of files.

Example: `Grid(chunks=(25, 0), files=(0,), strides=(1, 0))` for a tensor of shape (100, 8) has four chunks of 25 rows
and all 8 columns; file 0 holds rows 0 to 24, and file 3 rows 75 to 99.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CHUNKS = 1 << 24
"""The most chunks that a tensor may have: a thousand times what a run on 16,384 ranks produces."""
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""dtype, as safetensors spells it -> bytes of an element."""

Extra = dict[str, Any]
"""Fields of a JSON object that this release does not know, because a later one has added them. They are kept as they
were read, and written again."""

Cut = int | tuple[int, ...]
"""How one dimension is cut into chunks. A number is the length of a chunk; the last may be shorter. 0 means that the
dimension is not cut. A tuple lists the indices at which chunks other than the first begin: (3, 7) cuts a dimension of
10 into [0, 3), [3, 7) and [7, 10)."""


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
    """How tensors are cut into chunks, and which file holds each chunk. Tensors that are cut alike share a grid.

    A grid does not know the tensors' shape, so most methods take it. A chunk's index has its position along each
    dimension of `chunks`: index (2, 0) is the third chunk along the rows and the first along the columns. A file's
    index is its position in the manifest's list of files.
    """

    chunks: tuple[Cut, ...]
    """How each of the first dimensions is cut. Further dimensions are not cut."""
    files: tuple[int, ...]
    """With `strides`, only the index of the first chunk's file. Without, the index of every chunk's file, with the
    chunks in row-major order."""
    strides: tuple[int, ...] | None = None
    """By how much the file's index grows from a chunk to the next, along each dimension of `chunks`."""
    extra: Extra = field(default_factory=dict)

    def counts(self, shape: Sequence[int]) -> list[int]:
        """Return the number of chunks along each dimension of `chunks`, for a tensor of this shape."""
        return [_num_chunks(cut, dim_length) for cut, dim_length in zip(self.chunks, shape, strict=False)]

    def num_chunks(self, shape: Sequence[int]) -> int:
        """Return the number of chunks of a tensor of this shape. A tensor without elements has none."""
        return math.prod(self.counts(shape)) if math.prod(shape) else 0

    def overlapping(
        self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[int, Box]]:
        """Yield the file index and the box of each chunk that has elements in common with a given box.

        shape: the whole tensor's.
        offset, lengths: the given box, which lies inside the tensor. A box without elements overlaps no chunk.

        A restore asks this for every tensor on every rank, so the time is proportional to the number of chunks that
        overlap, not to the number of all chunks.
        """
        if not math.prod(lengths):
            return
        # A chunk overlaps the box if it does so along every dimension. Dimensions that are not cut always overlap.
        overlapping_by_dim = [
            _chunks_between(cut, begin, begin + length)
            for cut, begin, length in zip(self.chunks, offset, lengths, strict=False)
        ]
        counts = self.counts(shape)
        for index in itertools.product(*overlapping_by_dim):
            yield self._file_index(index, counts), self.box(shape, index)

    def box(self, shape: Sequence[int], index: Sequence[int]) -> Box:
        """Return the part of a tensor of this shape that the chunk with this index holds.

        With `chunks` (25,), the chunk with index (3,) of a tensor of shape (90, 8) begins at (75, 0) and has lengths
        (15, 8), because the last chunk ends with the tensor.
        """
        offset = []
        lengths = []
        for cut, dim_length, chunk_number in zip(self.chunks, shape, index, strict=False):
            begin, end = _chunk_bounds(cut, dim_length, chunk_number)
            offset.append(begin)
            lengths.append(end - begin)
        # Every chunk has all of the dimensions that the grid does not mention.
        uncut_lengths = shape[len(self.chunks) :]
        uncut_offset = [0] * len(uncut_lengths)
        return Box((*offset, *uncut_offset), (*lengths, *uncut_lengths))

    def has(self, shape: Sequence[int], file: int, box: Box) -> bool:
        """Return whether a box is exactly one chunk of a tensor of this shape, and the file with index `file` holds it.

        `box` comes from a file's header and may be anything. Verification compares each header with the manifest by
        this, without listing all chunks.
        """
        if len(box.offset) != len(shape):
            return False
        is_inside = all(0 <= begin < dim_length for begin, dim_length in zip(box.offset, shape, strict=True))
        if not is_inside:
            return False
        # Chunks cover a tensor once, so a single chunk holds the box's first element. The box must be that chunk.
        one_element = [1] * len(shape)
        file_and_box = next(self.overlapping(shape, box.offset, one_element))
        return file_and_box == (file, box)

    def indices_by_file(self, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """Return, for the index of each file, the indices of the chunks that it holds, for a tensor of this shape.

        Files that hold no chunk are left out, and all are if the tensor has no elements.
        """
        indices: dict[int, list[tuple[int, ...]]] = {}
        if not math.prod(shape):
            return indices
        counts = self.counts(shape)
        for index in itertools.product(*map(range, counts)):
            file = self._file_index(index, counts)
            indices.setdefault(file, []).append(index)
        return indices

    def problem(self, shape: Sequence[int], num_files: int) -> str | None:
        """Return why this grid cannot cut a tensor of this shape into chunks in `num_files` files; None if it can.

        The other methods rely on these checks and do none themselves. The checks leave nothing out, because a manifest
        may come from anybody. Each relies on the checks before it.
        """
        # Lengths of chunks are not negative. Listed cuts are positive, and each lies behind the one before.
        for cut in self.chunks:
            bounds = (cut,) if isinstance(cut, int) else (0, *cut)
            has_negative = min(bounds) < 0
            if has_negative or any(second <= first for first, second in itertools.pairwise(bounds)):
                return f"chunks {self.chunks}"

        # All files in the list exist. With strides, the list has one file, from which the others are computed.
        if not self.files or not 0 <= min(self.files) <= max(self.files) < num_files:
            return f"file number {max(self.files, default=0)}, which is not there"
        if self.strides is not None and (len(self.files) != 1 or len(self.strides) != len(self.chunks)):
            return f"strides {self.strides} for chunks {self.chunks}"

        # The tensor has the dimensions that are cut, and the cuts lie inside it.
        if len(self.chunks) > len(shape):
            return f"chunks {self.chunks} for shape {tuple(shape)}"
        for cut, dim_length in zip(self.chunks, shape, strict=False):
            if not isinstance(cut, int) and cut and cut[-1] >= dim_length:
                return f"chunks {self.chunks} reach out of {tuple(shape)}"

        # Every chunk has a file. A huge number of chunks would exhaust time or memory later.
        num_chunks = self.num_chunks(shape)
        if num_chunks > MAX_CHUNKS:
            return f"{num_chunks:,} chunks, cut in a way no run produces"
        if self.strides is not None:
            return self._problem_of_strides(self.strides, shape, num_files)
        if len(self.files) < num_chunks:
            return f"{len(self.files)} files for {num_chunks} chunks"
        return None

    def _problem_of_strides(self, strides: Sequence[int], shape: Sequence[int], num_files: int) -> str | None:
        """Return the problem if `strides` lead from the first chunk to a file that does not exist; else None.

        File indices run from 0 to `num_files` - 1. They grow evenly along each dimension, so the lowest and the highest
        index belong to chunks at corners of the grid, and no other chunk has to be looked at.
        """
        if not self.num_chunks(shape):
            return None
        lowest = self.files[0]
        highest = self.files[0]
        for stride, count in zip(strides, self.counts(shape), strict=True):
            last_minus_first = stride * (count - 1)  # difference of the file indices along this dimension
            lowest += min(last_minus_first, 0)
            highest += max(last_minus_first, 0)
        if lowest < 0:
            return f"chunk in file number {lowest}, which is not there"
        if highest >= num_files:
            return f"chunk in file number {highest}, which is not there"
        return None

    def _file_index(self, index: Sequence[int], counts: Sequence[int]) -> int:
        """Return the index of the file that holds a chunk.

        index: the chunk's position along each dimension of `chunks`.
        counts: the number of chunks along each of these dimensions.

        With strides (8, 1) and files (4,), the chunk with index (1, 2) is in file 4 + 1 * 8 + 2 * 1 = 14. Without
        strides and with counts [2, 3], its file is `files[1 * 3 + 2]`, because `files` lists chunks in row-major order.
        """
        if self.strides is not None:
            file_index = self.files[0]
            for chunk_number, stride in zip(index, self.strides, strict=True):
                file_index += chunk_number * stride
            return file_index
        row_major_index = 0
        for chunk_number, count in zip(index, counts, strict=True):
            row_major_index = row_major_index * count + chunk_number
        return self.files[row_major_index]


def _num_chunks(cut: Cut, dim_length: int) -> int:
    """Return how many chunks a dimension of this length has; see `Cut`."""
    if not isinstance(cut, int):
        return len(cut) + 1
    return -(-dim_length // cut) if cut else 1


def _chunk_bounds(cut: Cut, dim_length: int, chunk_number: int) -> tuple[int, int]:
    """Return the first index of a chunk along one dimension, and the index after its last; see `Cut`.

    With cut 4 and length 10, chunk 2 is [8, 10). With cut (3, 7) and length 10, chunk 1 is [3, 7).
    """
    if not isinstance(cut, int):
        begin = cut[chunk_number - 1] if chunk_number else 0
        end = cut[chunk_number] if chunk_number < len(cut) else dim_length
        return begin, end
    if not cut:
        return 0, dim_length
    return chunk_number * cut, min((chunk_number + 1) * cut, dim_length)


def _chunks_between(cut: Cut, begin: int, end: int) -> range:
    """Return the numbers of a dimension's chunks that overlap the indices [begin, end), which must not be empty.

    With cut 4, indices [5, 9) lie in chunks 1 and 2. With cut (3, 7), indices [3, 7) are chunk 1 alone. See `Cut`.
    """
    if not isinstance(cut, int):
        return range(bisect_right(cut, begin), bisect_left(cut, end) + 1)
    if not cut:
        return range(1)
    return range(begin // cut, (end - 1) // cut + 1)
