"""The order of samples in an epoch, as a pure function of a few integers: streams, shuffling, batches, remainder.

Nodes, ranks, loader workers and files play no part. `dataset.py` asks for the slice that a worker needs.

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

Randomness is SplitMix64 (Steele, Lea, Flood 2014), evaluated at (seed, epoch, purpose, place). No generator state
depends on the order of calls, and whole blocks are one vectorised expression. `numpy.random.Generator` may change its
streams between releases (NEP 19), which would change the order of a run that moves to another numpy.
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

_MAX_SLICE_ELEMENTS = 1 << 17
"""Most samples that are computed at once. Each takes about 64 bytes of working memory."""

# The purpose of a random number is part of its key, so that no two uses share a stream.
_SHARES, _PICKS, _UNITS, _OFFSET, _BLOCKS = range(5)


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
        """Upper limit of the units in an epoch: each shard counts as often as it is read."""
        return sum(
            len(sizes) * -(-choose // max(int(np.sum(sizes)), 1))
            for sizes, choose in zip(self.shard_sizes_per_stream, self.choose_per_stream, strict=True)
        )

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

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
        window_samples = self.window_samples if self.shuffle else 0
        settings = [self.batch_size, self.seed, self.shuffle, self.drop_last, window_samples]
        digest.update(np.array([*self.choose_per_stream, *settings], "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def shard_sizes(self) -> Int64Array:
        """Samples of each shard, of all streams one after another."""
        sizes = [np.asarray(sizes, np.int64) for sizes in self.shard_sizes_per_stream]
        return sizes[0] if len(sizes) == 1 else np.concatenate(sizes)

    @cached_property
    def shard_begins(self) -> Int64Array:
        """The first sample of each shard."""
        return np.cumsum(self.shard_sizes) - self.shard_sizes

    def epoch(self, epoch: int) -> "EpochOrder":
        return EpochOrder(self, epoch)


class EpochOrder:
    """One epoch of a `SampleOrder`: units are laid out once, samples are computed when asked for."""

    def __init__(self, order: SampleOrder, epoch: int) -> None:
        self.order = order
        self.epoch = epoch
        self._key = (order.seed, epoch)

        unit_shards, unit_sizes = _lay_out_units(order, self._key)
        self._ring_offset = 0
        if order.shuffle:
            permutation = _permutations(_random_bits(*self._key, _UNITS, np.arange(len(unit_shards))))
            unit_shards, unit_sizes = unit_shards[permutation], unit_sizes[permutation]
            self._ring_offset = int(_random_bits(*self._key, _OFFSET)[0]) % max(order.num_samples, 1)
        self._unit_shards = unit_shards.astype(np.int32)  # small, because every worker keeps it
        self._unit_bounds = np.zeros(len(unit_sizes) + 1, np.int64)
        np.cumsum(unit_sizes, out=self._unit_bounds[1:])
        self._unit_is_partial = unit_sizes < order.shard_sizes[unit_shards]

    def sample_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Return the ids of samples [len(steps), len(row_indices)] at steps; `NO_SAMPLE` where there is none.

        Computes only these (in shuffled order: the blocks that `steps` touches), in pieces of bounded size. `steps`
        must ascend and stay below `num_batches`.
        """
        if not self.order.shuffle:
            places = np.asarray(steps, np.int64)[:, None] * self.order.batch_size + np.asarray(row_indices, np.int64)
            exists = places < self.order.num_samples
            return np.where(exists, self._ids_at(np.where(exists, places, 0)), NO_SAMPLE)

        ids_si = np.empty((len(steps), len(row_indices)), np.int64)
        block_samples = self.order.block_samples
        num_at_once = max(1, _MAX_SLICE_ELEMENTS // block_samples)
        for first in range(0, len(row_indices), num_at_once):
            some_indices = slice(first, first + num_at_once)
            num_steps_at_once = block_samples * max(
                1, _MAX_SLICE_ELEMENTS // (block_samples * min(len(row_indices), num_at_once))
            )
            for some_steps in _cut_at_multiples(steps, num_steps_at_once):
                ids_si[some_steps, some_indices] = self._shuffled_ids(row_indices[some_indices], steps[some_steps])
        return ids_si

    def _shuffled_ids(self, row_indices: Sequence[int], steps: range) -> Int64Array:
        """Return the ids [len(steps), len(row_indices)], after shuffling whole blocks (k blocks of b samples)."""
        order, block_samples = self.order, self.order.block_samples
        blocks_k = np.arange(steps[0] // block_samples, steps[-1] // block_samples + 1)

        indices_i = np.asarray(row_indices, np.int64)
        # Begin and end in the ring. Lengths of spans differ by one sample at most.
        span_begins_i, span_ends_i = (_floor_share(indices_i + i, order.num_samples, order.batch_size) for i in (0, 1))
        begins_ik = span_begins_i[:, None] + blocks_k * block_samples
        # Nothing is computed beyond the end of the longest span: the only block may be a small part of a full one.
        longest_span = -(-order.num_samples // order.batch_size)
        width = min(block_samples, longest_span - int(blocks_k[0]) * block_samples)
        places_b = np.arange(width)
        positions_ikb = begins_ik[:, :, None] + places_b
        exists_ikb = positions_ikb < span_ends_i[:, None, None]

        bits_ikb = _random_bits(*self._key, _BLOCKS, indices_i[:, None, None], blocks_k[:, None], places_b)
        bits_ikb[~exists_ikb] = np.iinfo(np.uint64).max  # sorts behind everything that exists
        ids_ikb = self._ids_at((positions_ikb + self._ring_offset) % order.num_samples)
        ids_ikb[~exists_ikb] = NO_SAMPLE
        ids_ikb = np.take_along_axis(ids_ikb, _permutations(bits_ikb), axis=-1)

        steps_s = np.asarray(steps, np.int64)
        return ids_ikb[:, steps_s // block_samples - blocks_k[0], steps_s % block_samples].T

    def _ids_at(self, positions: Int64Array) -> Int64Array:
        """Return sample ids at positions in the sequence of units; same shape as `positions`."""
        units = np.searchsorted(self._unit_bounds, positions, side="right") - 1
        within_unit = positions - self._unit_bounds[units]
        is_partial = self._unit_is_partial[units]
        if is_partial.any():
            partial_units, which = np.unique(units[is_partial], return_inverse=True)
            picks = [self._picks(unit) for unit in partial_units]
            pick_begins = np.cumsum([0, *map(len, picks)])
            within_unit[is_partial] = np.concatenate(picks)[pick_begins[which] + within_unit[is_partial]]
        return self.order.shard_begins[self._unit_shards[units]] + within_unit

    def _picks(self, unit: int) -> Int64Array:
        """Return the samples of its shard that a partial unit takes, in file order."""
        shard = int(self._unit_shards[unit])
        num_picks = self._unit_bounds[unit + 1] - self._unit_bounds[unit]
        permutation = _permutations(_random_bits(*self._key, _PICKS, shard, np.arange(self.order.shard_sizes[shard])))
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
    """Return a rank's row indices and the steps of one of its DataLoader workers, from global batch `first_batch` on.

    `num_batches` are those of the epoch, all of the order's by default.

    torch's DataLoader takes batches from its workers in turn, beginning with worker 0; hence the stride.
    """
    assert order.batch_size % world_size == 0
    size = order.batch_size // world_size
    steps = range(first_batch + worker, order.num_batches if num_batches is None else num_batches, num_workers)
    return range(rank * size, (rank + 1) * size), steps


def _lay_out_units(order: SampleOrder, key: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Return shard and number of samples of every unit, in file order."""
    unit_shards, unit_sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    num_shards_before = 0
    for stream, (sizes, choose) in enumerate(zip(order.shard_sizes_per_stream, order.choose_per_stream, strict=True)):
        sizes = np.asarray(sizes, np.int64)
        num_samples = int(sizes.sum())
        num_repeats, rest = divmod(int(choose), num_samples)
        # The partial repeat takes from every shard in proportion to its size. Systematic sampling, that is rounding
        # cumulative shares after a random shift, makes the counts add up to `rest` and gives every shard, however
        # small, its share on average over the epochs.
        shift = int(_random_bits(*key, _SHARES, stream)[0]) % num_samples
        shares = np.diff(_floor_share(np.cumsum(sizes), rest, num_samples, shift), prepend=0)
        sizes_of_units = np.column_stack([*[sizes] * num_repeats, shares]).ravel()
        shards_of_units = np.repeat(np.arange(len(sizes)) + num_shards_before, num_repeats + 1)
        unit_shards.append(shards_of_units[sizes_of_units > 0])
        unit_sizes.append(sizes_of_units[sizes_of_units > 0])
        num_shards_before += len(sizes)
    return np.concatenate(unit_shards), np.concatenate(unit_sizes)


def _floor_share(parts: Int64Array, count: int, whole: int, shift: int = 0) -> Int64Array:
    """Return floor((parts * count + shift) / whole), exact even where the product exceeds 64 bits.

    For 0 <= parts <= whole, 0 <= shift < whole < 2**61: long division, with as many bits of `count` at a time as fit.
    """
    bits = 62 - whole.bit_length()
    quotients, rests = np.zeros_like(parts), np.zeros_like(parts)
    for place in range(-(-count.bit_length() // bits) - 1, -1, -1):
        digit = (count >> (place * bits)) & ((1 << bits) - 1)
        more, rests = np.divmod((rests << bits) + parts * digit, whole)
        quotients = (quotients << bits) + more
    return quotients + (rests + shift) // whole


def _cut_at_multiples(steps: range, size: int) -> list[slice]:
    """Return slices of `steps` whose values lie between successive multiples of `size`."""
    if not steps:
        return []
    bounds = range(steps[0] // size * size, steps[-1] + size + 1, size)
    indices = [min(len(steps), max(0, -(-(bound - steps.start) // steps.step))) for bound in bounds]
    return [slice(begin, end) for begin, end in pairwise(indices) if begin < end]


def _permutations(bits: Uint64Array) -> Int64Array:
    """Return a permutation of the last axis for each row of random bits.

    Sorts keys that carry their own index in the low bits: all keys differ, so any sorting algorithm gives the same
    answer, and sorting values is several times as fast as `argsort`.
    """
    low_bits = np.uint64((1 << max(bits.shape[-1] - 1, 0).bit_length()) - 1)
    keys = (bits & ~low_bits) | np.arange(bits.shape[-1], dtype=np.uint64)
    keys.sort(axis=-1)
    return (keys & low_bits).astype(np.int64)


def _random_bits(*key: ArrayLike) -> Uint64Array:
    """Return 64 random bits for each key; array parts of a key broadcast against each other.

    Each part selects an output of the SplitMix64 stream that is seeded by the parts before it.
    """
    bits = np.zeros(1, np.uint64)
    for part in key:
        bits = bits + (np.atleast_1d(part).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits
