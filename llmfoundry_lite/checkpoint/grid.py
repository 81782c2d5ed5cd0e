"""Grids: how a tensor is cut into chunks, and which file holds which chunk, by arithmetic. No torch."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_CHUNKS = 1 << 24
"""A tensor's limit. A run on 16,384 ranks has a thousandth of it."""
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""dtype, as safetensors spells it -> bytes of an element."""

Extra = dict[str, Any]
"""Fields that a later release has added, as JSON. They are written again."""


class Chunk(NamedTuple):
    """A rectangular part of a tensor, which one file holds, row-major."""

    tensor: str
    dtype: str
    """A key of ITEM_BYTES."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The chunk's name inside the safetensors file."""
        return f"{self.tensor}@{','.join(map(str, self.offset))}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and lengths of a rectangular part."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunks of a tensor, for tensors that are cut alike."""

    chunks: tuple[int | tuple[int, ...], ...]
    """How each of the first dimensions is cut: a number is the length of a chunk, of which the last may be shorter; 0
    means not cut; a tuple lists the cuts. Further dimensions are not cut."""
    files: tuple[int, ...]
    """With `strides`, the file of the first chunk; without, the file of every chunk, row-major."""
    strides: tuple[int, ...] | None = None
    """How much the file's number grows with the chunk's index in each dimension of `chunks`."""
    extra: Extra = field(default_factory=dict)

    def counts(self, shape: Sequence[int]) -> list[int]:
        """Return the number of chunks along each dimension of `chunks`."""
        return [_num_chunks(chunk, length) for chunk, length in zip(self.chunks, shape, strict=False)]

    def num_chunks(self, shape: Sequence[int]) -> int:
        return math.prod(self.counts(shape)) if math.prod(shape) else 0

    def overlapping(
        self, shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[int, Box]]:
        """Yield file and box of each chunk that reaches into a box. The work is proportional to their number."""
        if not math.prod(lengths):
            return
        counts = self.counts(shape)
        spans = [
            _chunks_between(chunk, begin, begin + n)
            for chunk, begin, n in zip(self.chunks, offset, lengths, strict=False)
        ]
        for index in itertools.product(*spans):
            yield self._file(index, counts), self.box(shape, index)

    def box(self, shape: Sequence[int], index: Sequence[int]) -> Box:
        """Return the box of a chunk, given its index along each dimension of `chunks`."""
        uncut = tuple(shape[len(self.chunks) :])
        ends = [_chunk_ends(chunk, length, i) for chunk, length, i in zip(self.chunks, shape, index, strict=False)]
        return (
            (*(begin for begin, _ in ends), *(0 for _ in uncut)),
            (*(end - begin for begin, end in ends), *uncut),
        )

    def has(self, shape: Sequence[int], file: int, box: Box) -> bool:
        """Return whether this box is a chunk that this file holds."""
        offset, _ = box
        is_inside = len(offset) == len(shape) and all(0 <= at < n for at, n in zip(offset, shape, strict=True))
        return is_inside and next(self.overlapping(shape, offset, [1] * len(shape))) == (file, box)

    def indices_by_file(self, shape: Sequence[int]) -> dict[int, list[tuple[int, ...]]]:
        """Return each file's chunks, by their index along each dimension of `chunks`."""
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
        num_chunks = self.num_chunks(shape)
        if num_chunks > MAX_CHUNKS:
            return f"{num_chunks:,} chunks, cut in a way no run produces"
        if self.strides is None:
            return None if len(self.files) >= num_chunks else f"{len(self.files)} files for {num_chunks} chunks"
        reach = [stride * (count - 1) for stride, count in zip(self.strides, self.counts(shape), strict=True)]
        lowest = self.files[0] + sum(min(n, 0) for n in reach)
        highest = self.files[0] + sum(max(n, 0) for n in reach)
        if num_chunks and not 0 <= lowest <= highest < num_files:
            return f"chunk in file number {lowest if lowest < 0 else highest}, which is not there"
        return None

    def _file(self, index: Sequence[int], counts: Sequence[int]) -> int:
        if self.strides is not None:
            return self.files[0] + sum(i * stride for i, stride in zip(index, self.strides, strict=True))
        position = 0
        for i, count in zip(index, counts, strict=True):
            position = position * count + i
        return self.files[position]


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
