"""The order of samples in an epoch, as a pure function of a few integers: streams, shuffling, batches, remainder.

Nodes, ranks, loader workers and files play no part. `dataset.py` asks for the slice that a worker needs. Read
`SampleOrder` first, which holds the settings, and then `EpochOrder`, which computes.

How an epoch is laid out:

1. Every shard becomes *units*: one whole unit for each full repeat of its stream, and a partial unit for what is
   left of the stream's share (a random subset of the shard, in file order).
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

Randomness is SplitMix64 (Steele, Lea, Flood 2014), evaluated at (seed, epoch, purpose, place). No generator state
depends on the order of calls, and whole blocks are one vectorised expression. `numpy.random.Generator` may change its
streams between releases (NEP 19), which would change the order of a run that moves to another numpy.

Letters behind array names: s steps, i row indices, k blocks of a span, b places in a block.
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
"""Most units in an epoch. Each takes about 70 bytes while the epoch is laid out, and 13 in every worker."""

NO_SAMPLE = -1
"""Stands where an epoch's last batch has no sample."""

_MAX_SLICE_ELEMENTS = 1 << 17
"""Most samples that are computed at once. Each takes about 64 bytes of working memory."""

# Purposes of random numbers. The purpose is part of a number's key, so that no two uses share a stream. These values
# are part of the order: another number changes every run's samples.
_SIZES_OF_PARTS = 0
_SAMPLES_OF_PARTS = 1
_ORDER_OF_UNITS = 2
_RING_OFFSET = 3
_ORDER_IN_BLOCKS = 4

# SplitMix64 adds the first constant to its state at each step, and mixes the state with the other two ("Mix13").
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The settings that decide the order of all epochs of a run."""

    shard_sizes_per_stream: Sequence[Sequence[int] | Int64Array]
    """Number of samples in each shard of each stream. Sample ids count through all of them in this order."""

    choose_per_stream: Sequence[int]
    """Samples that an epoch takes from each stream, repeats included."""

    batch_size: int
    """The global batch size: a property of the run, never of the machines it runs on."""

    seed: int

    shuffle: bool

    drop_last: bool = True
    """False keeps the incomplete last batch; the places it lacks hold `NO_SAMPLE`."""

    max_samples: int | None = None
    """Number of first samples to use, in file order; None: all."""

    window_samples: int = DEFAULT_WINDOW_SAMPLES
    """Samples that batches are drawn from at any time. A larger window mixes better and reads more shards."""

    def __post_init__(self) -> None:
        assert self.batch_size > 0 and self.window_samples > 0 and self.seed >= 0
        assert len(self.shard_sizes_per_stream) == len(self.choose_per_stream)
        assert self.max_samples is None or not self.shuffle

    @cached_property
    def num_samples(self) -> int:
        """Samples in an epoch, before the remainder is dropped."""
        return min(int(sum(self.choose_per_stream)), self.max_samples or sys.maxsize)

    @property
    def max_units(self) -> int:
        """Upper limit of the units in an epoch: each shard counts as often as it is read, wholly or in part."""
        num_units = 0
        for sizes, choose in zip(self.shard_sizes_per_stream, self.choose_per_stream, strict=True):
            stream_samples = max(int(np.sum(sizes)), 1)
            num_units += len(sizes) * ceil_divide(choose, stream_samples)
        return num_units

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return ceil_divide(self.num_samples, self.batch_size)

    @property
    def block_samples(self) -> int:
        """Consecutive samples of one span that are shuffled together."""
        return max(1, self.window_samples // self.batch_size)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of shards and settings: equal ones mean the same order. Checkpoints store it."""
        digest = hashlib.blake2b(digest_size=8)
        for sizes in self.shard_sizes_per_stream:
            digest.update(np.array([len(sizes)], "<i8").tobytes())
            digest.update(np.asarray(sizes, "<i8").tobytes())

        window_samples = self.window_samples if self.shuffle else 0  # changes nothing where nothing is shuffled
        settings = [self.batch_size, self.seed, self.shuffle, self.drop_last, window_samples]
        digest.update(np.array([*self.choose_per_stream, *settings], "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def shard_sizes(self) -> Int64Array:
        """Samples of each shard, of all streams one after another [num_shards]."""
        sizes = [np.asarray(sizes, np.int64) for sizes in self.shard_sizes_per_stream]
        if len(sizes) == 1:
            return sizes[0]  # no copy, since the index of a large data set has millions of shards
        return np.concatenate(sizes)

    @cached_property
    def shard_begins(self) -> Int64Array:
        """The id of each shard's first sample [num_shards]."""
        return np.cumsum(self.shard_sizes) - self.shard_sizes

    def epoch(self, epoch: int) -> "EpochOrder":
        """Lay out an epoch, which takes time and memory for each unit. Epochs count from 0."""
        return EpochOrder(self, epoch)


class EpochOrder:
    """One epoch of a `SampleOrder`: units are laid out once, samples are computed when asked for."""

    def __init__(self, order: SampleOrder, epoch: int) -> None:
        """Lay out the units of an epoch: permute them, and turn the ring that they form."""
        self.order = order
        self.epoch = epoch
        self._random_key = (order.seed, epoch)

        unit_shards, unit_sizes = _lay_out_units(order, self._random_key)
        self._ring_offset = 0
        """Position among the units at which the epoch begins."""
        if order.shuffle:
            units = np.arange(len(unit_shards))
            permutation = _permutations_of_bits(_random_bits(*self._random_key, _ORDER_OF_UNITS, units))
            unit_shards = unit_shards[permutation]
            unit_sizes = unit_sizes[permutation]
            offset_bits = _random_bits(*self._random_key, _RING_OFFSET)
            self._ring_offset = int(offset_bits[0]) % max(order.num_samples, 1)

        self._unit_shards = unit_shards.astype(np.int32)  # small, because every worker keeps it
        self._unit_bounds = np.zeros(len(unit_sizes) + 1, np.int64)
        """Position of each unit's first sample among the samples of all units, and at the end their number."""
        np.cumsum(unit_sizes, out=self._unit_bounds[1:])
        self._unit_is_partial = unit_sizes < order.shard_sizes[unit_shards]

    def sample_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Compute the ids of the samples that the global batches `steps` have at `row_indices`.

        `steps` must ascend and stay below `num_batches`. Only the samples asked for are computed, or with shuffling the
        blocks that they lie in, in pieces of bounded size.

        Returns an array [len(steps), len(row_indices)]. It has `NO_SAMPLE` where there is none.
        """
        if not self.order.shuffle:
            batch_begins_s = np.asarray(steps, np.int64) * self.order.batch_size
            positions_si = batch_begins_s[:, None] + np.asarray(row_indices, np.int64)
            exists_si = positions_si < self.order.num_samples
            return np.where(exists_si, self._ids_at(np.where(exists_si, positions_si, 0)), NO_SAMPLE)

        # Only whole blocks can be shuffled. So a piece has as many row indices as fit with one block each, and if all
        # of them fit, as many blocks as fit with all of them.
        block_samples = self.order.block_samples
        rows_per_piece = max(1, _MAX_SLICE_ELEMENTS // block_samples)
        rows_in_first_piece = max(1, min(len(row_indices), rows_per_piece))
        blocks_per_piece = max(1, _MAX_SLICE_ELEMENTS // (block_samples * rows_in_first_piece))
        slices_of_steps = _cut_at_multiples(steps, block_samples * blocks_per_piece)

        ids_si = np.empty((len(steps), len(row_indices)), np.int64)
        for first_row in range(0, len(row_indices), rows_per_piece):
            rows = slice(first_row, first_row + rows_per_piece)
            for some_steps in slices_of_steps:
                ids_si[some_steps, rows] = self._shuffled_ids(row_indices[rows], steps[some_steps])
        return ids_si

    def _shuffled_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Compute the ids [len(steps), len(row_indices)] of shuffled samples, all at once.

        Shuffles every block from that of the first step to that of the last, and takes the steps' samples from them.
        """
        num_samples = self.order.num_samples
        batch_size = self.order.batch_size
        block_samples = self.order.block_samples
        blocks_k = np.arange(steps[0] // block_samples, steps[-1] // block_samples + 1)

        # Begins and ends of spans as positions in the ring. Their lengths differ by one sample at most.
        indices_i = np.asarray(row_indices, np.int64)
        span_begins_i = _floor_share(indices_i, num_samples, batch_size)
        span_ends_i = _floor_share(indices_i + 1, num_samples, batch_size)

        # Nothing is computed beyond the end of the longest span: the only block may be a small part of a full one.
        longest_span = ceil_divide(num_samples, batch_size)
        width = min(block_samples, longest_span - int(blocks_k[0]) * block_samples)
        places_b = np.arange(width)
        block_begins_ik = span_begins_i[:, None] + blocks_k * block_samples
        positions_ikb = block_begins_ik[:, :, None] + places_b
        exists_ikb = positions_ikb < span_ends_i[:, None, None]

        # Each block has random numbers of its own. The largest number sorts a place without a sample behind all others.
        block_key = (*self._random_key, _ORDER_IN_BLOCKS, indices_i[:, None, None], blocks_k[:, None])
        bits_ikb = _random_bits(*block_key, places_b)
        bits_ikb[~exists_ikb] = np.iinfo(np.uint64).max
        ids_ikb = self._ids_at((positions_ikb + self._ring_offset) % num_samples)
        ids_ikb[~exists_ikb] = NO_SAMPLE
        ids_ikb = np.take_along_axis(ids_ikb, _permutations_of_bits(bits_ikb), axis=-1)

        steps_s = np.asarray(steps, np.int64)
        return ids_ikb[:, steps_s // block_samples - blocks_k[0], steps_s % block_samples].T

    def _ids_at(self, positions: Int64Array) -> Int64Array:
        """Return the ids of the samples at positions among the samples of all units; same shape as `positions`."""
        units = np.searchsorted(self._unit_bounds, positions, side="right") - 1
        places_in_shards = positions - self._unit_bounds[units]

        # In a whole unit the n-th sample is the shard's n-th. In a partial one it is the n-th of the picked ones.
        is_partial = self._unit_is_partial[units]
        if is_partial.any():
            partial_units, which_unit = np.unique(units[is_partial], return_inverse=True)
            picked_samples = [self._pick_samples(unit) for unit in partial_units]
            first_picks = np.cumsum([0, *map(len, picked_samples)])
            picks = first_picks[which_unit] + places_in_shards[is_partial]
            places_in_shards[is_partial] = np.concatenate(picked_samples)[picks]
        return self.order.shard_begins[self._unit_shards[units]] + places_in_shards

    def _pick_samples(self, unit: int) -> Int64Array:
        """Pick the samples of its shard that a partial unit takes. Returns their places in the shard, ascending."""
        shard = int(self._unit_shards[unit])
        num_picks = self._unit_bounds[unit + 1] - self._unit_bounds[unit]
        places = np.arange(self.order.shard_sizes[shard])
        permutation = _permutations_of_bits(_random_bits(*self._random_key, _SAMPLES_OF_PARTS, shard, places))
        return np.sort(permutation[:num_picks])


def share_of_worker(
    order: SampleOrder,
    *,
    rank: int,
    world_size: int,
    worker: int = 0,
    num_workers: int = 1,
    first_batch: int = 0,
    num_batches: int | None = None,
) -> tuple[range, range]:
    """Return a rank's row indices, and the steps of one of its DataLoader workers from global batch `first_batch` on.

    `num_batches` are those of the epoch; None means all that the order has. The steps of a worker are `num_workers`
    apart, because torch's DataLoader takes batches from its workers in turn, beginning with worker 0.

    Worker 1 of 2 on rank 0 of 4, with global batches of 8 and an epoch of 10: rows 0 and 1 of batches 1, 3, 5, 7, 9.
    """
    assert order.batch_size % world_size == 0
    rows_per_rank = order.batch_size // world_size
    row_indices = range(rank * rows_per_rank, (rank + 1) * rows_per_rank)

    if num_batches is None:
        num_batches = order.num_batches
    return row_indices, range(first_batch + worker, num_batches, num_workers)


def _lay_out_units(order: SampleOrder, random_key: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Return the shard and the number of samples of every unit, in file order. Empty units are left out."""
    unit_shards = [np.empty(0, np.int64)]
    unit_sizes = [np.empty(0, np.int64)]
    num_shards_before = 0
    for stream, (sizes, choose) in enumerate(zip(order.shard_sizes_per_stream, order.choose_per_stream, strict=True)):
        sizes = np.asarray(sizes, np.int64)
        num_samples = int(sizes.sum())
        num_repeats, rest = divmod(int(choose), num_samples)

        # The partial repeat takes from every shard in proportion to its size. Systematic sampling, that is rounding
        # cumulative shares after a random shift, makes the counts add up to `rest` and gives every shard, however
        # small, its share on average over the epochs.
        shift = int(_random_bits(*random_key, _SIZES_OF_PARTS, stream)[0]) % num_samples
        cumulative_shares = _floor_share(np.cumsum(sizes), rest, num_samples, shift)
        partial_sizes = np.diff(cumulative_shares, prepend=0)

        # A row for each shard: its whole units, and then the partial one.
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


def _floor_share(parts: Int64Array, count: int, whole: int, shift: int = 0) -> Int64Array:
    """Return floor((parts * count + shift) / whole), exact even where the product exceeds 64 bits.

    For 0 <= parts <= whole, 0 <= shift < whole < 2**61: long division, with as many bits of `count` at a time as fit.
    """
    bits = 62 - whole.bit_length()
    num_digits = ceil_divide(count.bit_length(), bits)

    quotients = np.zeros_like(parts)
    remainders = np.zeros_like(parts)
    for place in reversed(range(num_digits)):
        digit = (count >> (place * bits)) & ((1 << bits) - 1)
        quotient_digits, remainders = np.divmod((remainders << bits) + parts * digit, whole)
        quotients = (quotients << bits) + quotient_digits
    return quotients + (remainders + shift) // whole


def _cut_at_multiples(steps: range, size: int) -> list[slice]:
    """Cut `steps` where its values pass a multiple of `size`. Returns the slices that are not empty.

    For `range(3, 20, 2)` and size 8, that is 3 5 7 | 9 11 13 15 | 17 19, it returns the slices 0:3, 3:7 and 7:9.
    """
    if not steps:
        return []
    bounds = range(steps[0] // size * size, steps[-1] + size + 1, size)
    indices = []
    for bound in bounds:
        first_at_or_above = ceil_divide(bound - steps.start, steps.step)
        indices.append(min(len(steps), max(0, first_at_or_above)))
    return [slice(begin, end) for begin, end in pairwise(indices) if begin < end]


def _permutations_of_bits(bits: Uint64Array) -> Int64Array:
    """Return a permutation of the last axis for each row of random bits.

    Sorts keys that carry their own index in the low bits: all keys differ, so any sorting algorithm gives the same
    answer, and sorting values is several times as fast as `argsort`.
    """
    length = bits.shape[-1]
    num_index_bits = max(length - 1, 0).bit_length()
    index_mask = np.uint64((1 << num_index_bits) - 1)
    keys = (bits & ~index_mask) | np.arange(length, dtype=np.uint64)
    keys.sort(axis=-1)
    return (keys & index_mask).astype(np.int64)


def _random_bits(*key: ArrayLike) -> Uint64Array:
    """Return 64 random bits for each key; array parts of a key broadcast against each other.

    Each part selects an output of the SplitMix64 stream that is seeded by the parts before it. Parts must be whole
    numbers of at least 0.
    """
    bits = np.zeros(1, np.uint64)
    for part in key:
        bits = bits + (np.atleast_1d(part).astype(np.uint64) + np.uint64(1)) * _GOLDEN_GAMMA
        bits = (bits ^ (bits >> np.uint64(30))) * _MIX_MULTIPLIER_1
        bits = (bits ^ (bits >> np.uint64(27))) * _MIX_MULTIPLIER_2
        bits = bits ^ (bits >> np.uint64(31))
    return bits
