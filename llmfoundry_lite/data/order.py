"""The order of samples in an epoch, as a pure function of a few integers: streams, shuffling, batches, remainder.

The order does not depend on nodes, ranks, loader workers or files. `dataset.py` requests the part that a worker needs.
Read `SampleOrder` first, which holds the settings, and then `EpochOrder`, which computes.

How the samples of an epoch are ordered:

1. Every shard becomes *units*: one whole unit for each full repeat of its stream, and a partial unit for the rest of
   the samples that the epoch takes from the stream (a random subset of the shard, in file order).
2. The units are permuted and stand one after another in a ring. A random offset turns it, so that each epoch drops
   other samples at its end.
3. The ring is cut into `batch_size` contiguous spans, one for each row index: an index within the global batch, from
   0. A row index therefore reads few shards, one after another, and its rank downloads only those.
4. Within a span, blocks of `window_samples // batch_size` samples are shuffled. Global batch k is the k-th sample of
   every span, so at any time the batches are drawn from a window of about `window_samples` samples.

Without shuffling, the sample with global index g is the g-th in file order, without steps 2 to 4.

An example: one stream has shards of 3 and 2 samples, and an epoch takes 8 samples from it. That is one full repeat and
a rest of 3. The units are shard 0 whole (3), a part of shard 0 (2), shard 1 whole (2) and a part of shard 1 (1). With
batches of 4, the ring of these 8 samples has four spans of 2, and the epoch has 2 batches.

Randomness is SplitMix64 (Steele, Lea, Flood 2014), evaluated at (seed, epoch, purpose, position). No generator state
depends on the order of calls, and whole blocks are one vectorised expression. `numpy.random.Generator` may change its
streams between releases (NEP 19), which would change the order of a run that moves to another numpy.

Suffixes of array names give the axes: s steps, i row indices, k blocks of a span, b positions in a block.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64Array = NDArray[np.int64]
Uint64Array = NDArray[np.uint64]

DEFAULT_WINDOW_SAMPLES = 4_000_000
"""StreamingDataset's default. StreamingDataset spreads it over canonical nodes; here it spans the whole world."""

ORDER_VERSION = 1
"""Version of the algorithm, kept in every checkpoint. A change of any epoch's order is a new version."""

MAX_UNITS = 1 << 24
"""Limit of units in an epoch. Each takes about 70 bytes while the epoch is computed, and 13 in every worker."""

NO_SAMPLE = -1
"""Sample id that fills up an incomplete last batch of an epoch."""

_MAX_SAMPLES_AT_ONCE = 1 << 17
"""Limit of samples that are computed at once. Each takes about 64 bytes of working memory."""

# Purposes of random numbers. The purpose is part of the key of each random number, so that no two uses get the same
# numbers. Changing one of these values changes the sample order of every run.
_PURPOSE_PARTIAL_SIZES = 0
_PURPOSE_PARTIAL_SAMPLES = 1
_PURPOSE_UNIT_ORDER = 2
_PURPOSE_RING_OFFSET = 3
_PURPOSE_BLOCK_ORDER = 4

# SplitMix64 adds the first constant to its state at each step, and mixes the state with the other two ("Mix13").
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The settings that decide the order of all epochs of a run."""

    shard_sizes_per_stream: Sequence[Sequence[int] | Int64Array]
    """Number of samples in each shard, by stream. Sample ids are consecutive through all shards in this order."""

    epoch_samples_per_stream: Sequence[int]
    """Samples that an epoch takes from each stream. Above the stream's size, samples are repeated."""

    batch_size: int
    """The global batch size: a property of the run, never of the machines it runs on."""

    seed: int

    shuffle: bool

    drop_last: bool = True
    """Whether an incomplete last batch is dropped. Otherwise it is filled up with `NO_SAMPLE`."""

    max_samples: int | None = None
    """Limit of an epoch to this many samples, the first in file order; None for all. Only without shuffling."""

    window_samples: int = DEFAULT_WINDOW_SAMPLES
    """Number of samples in the shuffle window, from which batches are drawn at any time. A larger window mixes better,
    and reads more shards at once."""

    def __post_init__(self) -> None:
        assert self.batch_size > 0 and self.window_samples > 0 and self.seed >= 0
        assert len(self.shard_sizes_per_stream) == len(self.epoch_samples_per_stream)
        assert self.max_samples is None or not self.shuffle

    @cached_property
    def num_samples(self) -> int:
        """Samples in an epoch, including those of an incomplete last batch."""
        return min(int(sum(self.epoch_samples_per_stream)), self.max_samples or sys.maxsize)

    @property
    def max_units(self) -> int:
        """Upper bound of the number of units in an epoch.

        A unit is a shard, or a part of one, that is read once, so each shard counts once for every full or partial
        repeat of its stream.
        """
        num_units = 0
        for sizes, epoch_samples in zip(self.shard_sizes_per_stream, self.epoch_samples_per_stream, strict=True):
            stream_samples = max(int(np.sum(sizes)), 1)
            num_units += len(sizes) * ceil_divide(epoch_samples, stream_samples)
        return num_units

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return ceil_divide(self.num_samples, self.batch_size)

    @property
    def block_samples(self) -> int:
        """Samples in a block of consecutive samples that are shuffled among each other.

        Each of the `batch_size` rows of a global batch reads one such block at a time, so that all blocks together make
        up the shuffle window.
        """
        return max(1, self.window_samples // self.batch_size)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the shard sizes and settings, as 16 hex digits, which checkpoints store.

        Two orders with the same fingerprint have the same samples in every epoch.
        """
        digest = hashlib.blake2b(digest_size=8)
        for sizes in self.shard_sizes_per_stream:
            digest.update(np.array([len(sizes)], "<i8").tobytes())
            digest.update(np.asarray(sizes, "<i8").tobytes())

        window_samples = self.window_samples if self.shuffle else 0  # has no effect without shuffling
        settings = [self.batch_size, self.seed, self.shuffle, self.drop_last, window_samples]
        digest.update(np.array([*self.epoch_samples_per_stream, *settings], "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def shard_sizes(self) -> Int64Array:
        """Number of samples in each shard, with the shards of all streams one after another [num_shards]."""
        sizes = [np.asarray(sizes, np.int64) for sizes in self.shard_sizes_per_stream]
        if len(sizes) == 1:
            return sizes[0]  # no copy, since the index of a large data set has millions of shards
        return np.concatenate(sizes)

    @cached_property
    def first_sample_of_shard(self) -> Int64Array:
        """Sample id of the first sample in each shard [num_shards]."""
        return np.cumsum(self.shard_sizes) - self.shard_sizes

    def build_epoch(self, epoch: int) -> "EpochOrder":
        """Compute the order of an epoch (from 0). Takes time and memory for each unit, not for each sample."""
        return EpochOrder(self, epoch)


class EpochOrder:
    """The order of samples in one epoch.

    The constructor orders the units, which are shards or parts of shards. `sample_ids` then computes the ids of any
    batches from them.
    """

    def __init__(self, order: SampleOrder, epoch: int) -> None:
        """Order the units of an epoch: permute them, and choose at which sample the epoch begins.

        Units form a ring, so the samples before that point come last. Without shuffling, units keep their file order.
        """
        self.order = order
        self.epoch = epoch
        self._random_key = (order.seed, epoch)

        unit_shards, unit_sizes = _build_units(order, self._random_key)
        self._ring_offset = 0
        """Position of the epoch's first sample among the samples of all units."""
        if order.shuffle:
            units = np.arange(len(unit_shards))
            permutation = _permutations_from_bits(_random_bits(*self._random_key, _PURPOSE_UNIT_ORDER, units))
            unit_shards = unit_shards[permutation]
            unit_sizes = unit_sizes[permutation]
            offset_bits = _random_bits(*self._random_key, _PURPOSE_RING_OFFSET)
            self._ring_offset = int(offset_bits[0]) % max(order.num_samples, 1)

        self._unit_shards = unit_shards.astype(np.int32)  # small, because every worker keeps it
        self._unit_bounds = np.zeros(len(unit_sizes) + 1, np.int64)
        """Position of each unit's first sample among the samples of all units, and the total as the last element."""
        np.cumsum(unit_sizes, out=self._unit_bounds[1:])
        self._unit_is_partial = unit_sizes < order.shard_sizes[unit_shards]

    def sample_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Compute the sample ids of some rows of some global batches.

        `steps` are indices of global batches in this epoch, ascending and below `num_batches`. `row_indices` are
        indices within a global batch, from 0 to `batch_size - 1`. Only the requested samples are computed, or with
        shuffling the blocks that contain them. Working memory is bounded, because large requests are cut into pieces.

        Returns an array [len(steps), len(row_indices)], with `NO_SAMPLE` where an incomplete last batch has no sample.
        Suffixes of names are its axes: s for steps, i for row indices.
        """
        if not self.order.shuffle:
            batch_begins_s = np.asarray(steps, np.int64) * self.order.batch_size
            positions_si = batch_begins_s[:, None] + np.asarray(row_indices, np.int64)
            exists_si = positions_si < self.order.num_samples
            ids_si = self._sample_ids_at(np.where(exists_si, positions_si, 0))
            return np.where(exists_si, ids_si, NO_SAMPLE)

        # A block can only be shuffled as a whole. So a piece has as many rows as fit into working memory with one block
        # each. If all rows fit, a piece has as many blocks as fit for all rows.
        block_samples = self.order.block_samples
        rows_per_piece = max(1, _MAX_SAMPLES_AT_ONCE // block_samples)
        rows_in_first_piece = max(1, min(len(row_indices), rows_per_piece))
        blocks_per_piece = max(1, _MAX_SAMPLES_AT_ONCE // (block_samples * rows_in_first_piece))
        step_slices = _split_steps_at_multiples(steps, block_samples * blocks_per_piece)

        ids_si = np.empty((len(steps), len(row_indices)), np.int64)
        for first_row in range(0, len(row_indices), rows_per_piece):
            rows = slice(first_row, first_row + rows_per_piece)
            for step_slice in step_slices:
                ids_si[step_slice, rows] = self._shuffled_sample_ids(row_indices[rows], steps[step_slice])
        return ids_si

    def _shuffled_sample_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Compute the ids [len(steps), len(row_indices)] of shuffled samples, all at once.

        Each row index has a span of the epoch's samples, which is cut into blocks of `block_samples` consecutive
        samples. Step s of the row is sample `s % block_samples` of its shuffled block `s // block_samples`. This
        shuffles every block that the steps fall into, and selects the samples of the steps.

        Suffixes of names are axes: s steps, i row indices, k blocks, b positions in a block.
        """
        num_samples = self.order.num_samples
        batch_size = self.order.batch_size
        block_samples = self.order.block_samples
        blocks_k = np.arange(steps[0] // block_samples, steps[-1] // block_samples + 1)

        # The span of row i is the positions from i * num_samples // batch_size on, counted from the epoch's first
        # sample, to where the span of row i + 1 begins. The lengths of spans differ by at most one sample.
        indices_i = np.asarray(row_indices, np.int64)
        span_begins_i = _scale_and_floor(indices_i, num_samples, batch_size)
        span_ends_i = _scale_and_floor(indices_i + 1, num_samples, batch_size)

        # Nothing is computed beyond the end of the longest span, which may be much shorter than a full block.
        longest_span = ceil_divide(num_samples, batch_size)
        width = min(block_samples, longest_span - int(blocks_k[0]) * block_samples)
        offsets_b = np.arange(width)
        block_begins_ik = span_begins_i[:, None] + blocks_k * block_samples
        positions_ikb = block_begins_ik[:, :, None] + offsets_b
        exists_ikb = positions_ikb < span_ends_i[:, None, None]

        # Every position has its own random number, and the block is sorted by them. The largest possible number puts
        # positions beyond the end of the span last.
        block_key = (*self._random_key, _PURPOSE_BLOCK_ORDER, indices_i[:, None, None], blocks_k[:, None])
        bits_ikb = _random_bits(*block_key, offsets_b)
        bits_ikb[~exists_ikb] = np.iinfo(np.uint64).max
        ids_ikb = self._sample_ids_at((positions_ikb + self._ring_offset) % num_samples)
        ids_ikb[~exists_ikb] = NO_SAMPLE
        ids_ikb = np.take_along_axis(ids_ikb, _permutations_from_bits(bits_ikb), axis=-1)

        steps_s = np.asarray(steps, np.int64)
        return ids_ikb[:, steps_s // block_samples - blocks_k[0], steps_s % block_samples].T

    def _sample_ids_at(self, positions: Int64Array) -> Int64Array:
        """Return the ids of the samples at some positions, in an array of the same shape as `positions`.

        A position is an index among the samples of all units, one unit after another. The random offset at which the
        epoch begins in this ring is not part of it.
        """
        units = np.searchsorted(self._unit_bounds, positions, side="right") - 1
        offsets_in_unit = positions - self._unit_bounds[units]

        # The n-th sample of a whole unit is the n-th of its shard. In a partial unit it is the n-th picked sample.
        offsets_in_shard = offsets_in_unit.copy()
        is_partial = self._unit_is_partial[units]
        if is_partial.any():
            partial_units, index_of_unit = np.unique(units[is_partial], return_inverse=True)
            picks_of_units = [self._pick_samples(unit) for unit in partial_units]
            first_picks = np.cumsum([0, *map(len, picks_of_units)])
            picks = first_picks[index_of_unit] + offsets_in_unit[is_partial]
            offsets_in_shard[is_partial] = np.concatenate(picks_of_units)[picks]
        return self.order.first_sample_of_shard[self._unit_shards[units]] + offsets_in_shard

    def _pick_samples(self, unit: int) -> Int64Array:
        """Choose at random which samples of its shard a partial unit consists of.

        Returns their offsets from the shard's first sample, ascending. A unit always gets the same samples in an epoch.
        """
        shard = int(self._unit_shards[unit])
        num_picks = self._unit_bounds[unit + 1] - self._unit_bounds[unit]
        offsets = np.arange(self.order.shard_sizes[shard])
        bits = _random_bits(*self._random_key, _PURPOSE_PARTIAL_SAMPLES, shard, offsets)
        permutation = _permutations_from_bits(bits)
        return np.sort(permutation[:num_picks])


def rows_and_steps_of_worker(
    order: SampleOrder,
    *,
    rank: int,
    world_size: int,
    worker: int = 0,
    num_workers: int = 1,
    first_batch: int = 0,
    num_batches: int | None = None,
) -> tuple[range, range]:
    """Return which rows of which global batches one DataLoader worker of a rank has to read.

    Every rank reads an equal part of the rows of each global batch. Its workers divide the batches, from `first_batch`
    to the end of the epoch, among each other: a worker's steps are `num_workers` apart, because torch's DataLoader
    takes batches from its workers in turn, beginning with worker 0. `num_batches` is the length of the epoch; None
    means all batches of the order.

    Returns the row indices within a global batch, and the indices of the batches in the epoch. For worker 1 of 2 on
    rank 0 of 4, with global batches of 8 and an epoch of 10 batches, these are rows 0 and 1 of batches 1, 3, 5, 7, 9.
    """
    assert order.batch_size % world_size == 0
    rows_per_rank = order.batch_size // world_size
    row_indices = range(rank * rows_per_rank, (rank + 1) * rows_per_rank)

    if num_batches is None:
        num_batches = order.num_batches
    return row_indices, range(first_batch + worker, num_batches, num_workers)


def _build_units(order: SampleOrder, random_key: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Build the units of an epoch, in file order: shards or parts of shards that are read once.

    A stream that an epoch reads 2.3 times has three units for each shard: two of the whole shard, and a partial one
    with about 0.3 of its samples. `random_key` is (seed, epoch).

    Returns the shard index of every unit, and its number of samples. Units without samples are left out.
    """
    unit_shards = [np.empty(0, np.int64)]
    unit_sizes = [np.empty(0, np.int64)]
    num_shards_before = 0
    streams = zip(order.shard_sizes_per_stream, order.epoch_samples_per_stream, strict=True)
    for stream, (sizes, epoch_samples) in enumerate(streams):
        sizes = np.asarray(sizes, np.int64)
        num_samples = int(sizes.sum())
        num_repeats, rest = divmod(int(epoch_samples), num_samples)

        # The partial repeat takes `rest` samples, from every shard in proportion to its size. Systematic sampling
        # rounds the cumulative counts down after a random shift. So the counts add up to `rest`, and on average over
        # many epochs every shard, however small, contributes in proportion.
        shift = int(_random_bits(*random_key, _PURPOSE_PARTIAL_SIZES, stream)[0]) % num_samples
        cumulative_counts = _scale_and_floor(np.cumsum(sizes), rest, num_samples, shift)
        partial_sizes = np.diff(cumulative_counts, prepend=0)

        # One row for each shard: the sizes of its whole units, then of its partial unit.
        stream_sizes = np.column_stack([*[sizes] * num_repeats, partial_sizes]).ravel()
        stream_shards = np.repeat(np.arange(len(sizes)) + num_shards_before, num_repeats + 1)
        has_samples = stream_sizes > 0
        unit_shards.append(stream_shards[has_samples])
        unit_sizes.append(stream_sizes[has_samples])
        num_shards_before += len(sizes)
    return np.concatenate(unit_shards), np.concatenate(unit_sizes)


def ceil_divide(dividend: int, divisor: int) -> int:
    """Divide whole numbers and round up: 7 samples in batches of 4 are 2 batches."""
    return -(-dividend // divisor)


def _scale_and_floor(values: Int64Array, multiplier: int, divisor: int, shift: int = 0) -> Int64Array:
    """Return floor((values * multiplier + shift) / divisor), exact even where the product exceeds 64 bits.

    Requires 0 <= values <= divisor and 0 <= shift < divisor < 2**61. It is a long division that takes as many bits of
    `multiplier` at a time as fit into 64 bits together with `values`.
    """
    bits_per_digit = 62 - divisor.bit_length()
    num_digits = ceil_divide(multiplier.bit_length(), bits_per_digit)
    digit_mask = (1 << bits_per_digit) - 1

    quotients = np.zeros_like(values)
    remainders = np.zeros_like(values)
    for digit_index in reversed(range(num_digits)):
        digit = (multiplier >> (digit_index * bits_per_digit)) & digit_mask
        quotient_digits, remainders = np.divmod((remainders << bits_per_digit) + values * digit, divisor)
        quotients = (quotients << bits_per_digit) + quotient_digits
    return quotients + (remainders + shift) // divisor


def _split_steps_at_multiples(steps: range, size: int) -> list[slice]:
    """Split a range of steps where its values pass a multiple of `size`.

    Returns the slices of `steps` that are not empty. For `range(3, 20, 2)` and size 8 the groups are 3 5 7,
    9 11 13 15 and 17 19, so it returns the slices 0:3, 3:7 and 7:9.
    """
    if not steps:
        return []
    bounds = range(steps[0] // size * size, steps[-1] + size + 1, size)
    indices = []
    for bound in bounds:
        first_at_or_above = ceil_divide(bound - steps.start, steps.step)
        indices.append(min(len(steps), max(0, first_at_or_above)))
    return [slice(begin, end) for begin, end in pairwise(indices) if begin < end]


def _permutations_from_bits(bits: Uint64Array) -> Int64Array:
    """Turn random 64-bit numbers into random permutations of the last axis, one for each row.

    Returns indices of the same shape as `bits`. The low bits of each number are replaced by its index before sorting.
    So all values differ, any sorting algorithm gives the same result, and no `argsort` is needed, which would be
    several times slower.
    """
    length = bits.shape[-1]
    num_index_bits = max(length - 1, 0).bit_length()
    index_mask = np.uint64((1 << num_index_bits) - 1)
    keys = (bits & ~index_mask) | np.arange(length, dtype=np.uint64)
    keys.sort(axis=-1)
    return (keys & index_mask).astype(np.int64)


def _random_bits(*key: ArrayLike) -> Uint64Array:
    """Return a random 64-bit number for each key, the same one whenever the function is called with this key.

    A key consists of whole numbers of at least 0, such as (seed, epoch, purpose, index). A part may be an array; parts
    broadcast against each other as in numpy, and so the result has a number for each combination. Each part selects an
    output of the SplitMix64 generator that is seeded by the parts before it.
    """
    bits = np.zeros(1, np.uint64)
    for part in key:
        bits = bits + (np.atleast_1d(part).astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX_MULTIPLIER_1
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX_MULTIPLIER_2
        bits = bits ^ (bits >> np.uint64(31))
    return bits
