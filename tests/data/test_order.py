"""The order as a pure function: no processes, no files, up to 64 simulated ranks."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_lite.data import order as order_module
from llmfoundry_lite.data.order import NO_SAMPLE, SampleOrder, ceil_divide, rows_and_steps_of_worker
from tests.helpers.data import slices_of_workers


def make_order(
    shard_sizes=(40, 7, 1, 52), epoch_samples=None, batch_size=8, seed=17, shuffle=True, **settings
) -> SampleOrder:
    """An order of one stream, of 100 samples unless told otherwise. By default an epoch has each sample once."""
    if epoch_samples is None:
        epoch_samples = sum(shard_sizes)
    return SampleOrder(
        shard_sizes_per_stream=[list(shard_sizes)],
        epoch_samples_per_stream=[epoch_samples],
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        **settings,
    )


def whole_epoch(order: SampleOrder, epoch: int = 0) -> np.ndarray:
    """The sample ids of all batches, [num_batches, batch_size]."""
    return order.build_epoch(epoch).sample_ids(range(order.batch_size), range(order.num_batches))


def batches_of_rank(
    order: SampleOrder, epoch: int, rank: int, world_size: int, num_workers: int, first_batch: int
) -> np.ndarray:
    """The batches that the DataLoader of a simulated rank takes from its workers, [num_batches, rows of this rank]."""
    workers = slices_of_workers(order, epoch, rank, world_size, num_workers, first_batch)
    batches = []
    for batch in range(order.num_batches - first_batch):
        worker = workers[batch % len(workers)]  # the DataLoader takes from its workers in turn
        batches.append(next(worker))
    for worker in workers:
        assert next(worker, None) is None, "a worker has read more batches than there are"

    if not batches:
        return np.empty((0, order.batch_size // world_size), np.int64)
    return np.stack(batches)


def epoch_as_read(order: SampleOrder, epoch: int, world_size: int, num_workers: int, first_batch: int) -> np.ndarray:
    """The global batches that simulated ranks put together, each from its own rows."""
    parts = [batches_of_rank(order, epoch, rank, world_size, num_workers, first_batch) for rank in range(world_size)]
    return np.concatenate(parts, axis=1)


# --------------------------------------------------------------------------------------------- what an epoch holds


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_samples_once_and_drops_the_remainder(shuffle):
    """100 samples are 12 batches of 8, and 4 samples are left."""
    order = make_order(batch_size=8, shuffle=shuffle)
    assert order.num_batches == 12
    ids = whole_epoch(order).ravel().tolist()
    assert len(ids) == 96
    assert len(set(ids)) == 96
    assert set(ids) <= set(range(100))


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_drop_last_nothing_is_dropped_or_repeated(shuffle):
    order = make_order(batch_size=8, shuffle=shuffle, drop_last=False)
    assert order.num_batches == 13
    ids = whole_epoch(order)
    assert sorted(ids[ids != NO_SAMPLE]) == list(range(100))
    all_but_the_last_batch = ids[:-1]
    assert (all_but_the_last_batch != NO_SAMPLE).all()


def test_without_shuffling_samples_come_in_file_order():
    order = make_order(batch_size=8, shuffle=False, drop_last=False)
    empty_places = [NO_SAMPLE] * 4
    assert whole_epoch(order).ravel().tolist() == [*range(100), *empty_places]


# ------------------------------------------------------------------------------------------ any ranks and workers


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(4, 4), (3, 8), (1, 1), (1, 3), (6, 8), (2, 6), (12, 1)])
def test_every_layout_reads_the_same_global_batches(num_nodes, ranks_per_node, num_workers):
    """From the beginning of an epoch, from its middle, its last batch, and its end."""
    world_size = num_nodes * ranks_per_node
    order = make_order(shard_sizes=[53, 200, 17, 400, 330], batch_size=48, window_samples=480)
    for epoch, first_batch in [(0, 0), (0, 13), (1, 5), (3, order.num_batches - 1), (2, order.num_batches)]:
        batches = epoch_as_read(order, epoch, world_size, num_workers, first_batch)
        assert np.array_equal(batches, whole_epoch(order, epoch)[first_batch:])


@st.composite
def orders(draw):
    """Orders of one to three streams, of which an epoch has up to three times all samples."""
    shard_sizes = draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3))
    return SampleOrder(
        shard_sizes_per_stream=shard_sizes,
        epoch_samples_per_stream=[draw(st.integers(0, 3 * sum(sizes))) for sizes in shard_sizes],
        batch_size=draw(st.sampled_from([1, 2, 4, 6, 12, 24])),
        seed=draw(st.integers(0, 2**62)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        window_samples=draw(st.sampled_from([1, 7, 50, 10**6])),
    )


@given(data=st.data(), order=orders(), epoch=st.integers(0, 50), num_workers=st.integers(0, 4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_order_is_the_same_for_any_ranks_and_workers(data, order, epoch, num_workers):
    world_sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 24) if order.batch_size % size == 0]
    world_size = data.draw(st.sampled_from(world_sizes))
    first_batch = data.draw(st.integers(0, order.num_batches))
    batches = epoch_as_read(order, epoch, world_size, num_workers, first_batch)
    assert np.array_equal(batches, whole_epoch(order, epoch)[first_batch:])


# ----------------------------------------------------------------------------------- how often an epoch has a sample


@given(order=orders(), epoch=st.integers(0, 50))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_epoch_has_each_stream_as_often_as_asked_for(order, epoch):
    """A stream that an epoch reads 2.3 times has each sample 2 or 3 times, less those dropped in the last batch."""
    num_dropped = order.num_samples % order.batch_size if order.drop_last else 0
    ids = whole_epoch(order, epoch)
    counts = Counter(ids[ids != NO_SAMPLE].tolist())
    assert counts.total() == order.num_samples - num_dropped

    first_id = 0
    for shard_sizes, epoch_samples in zip(order.shard_sizes_per_stream, order.epoch_samples_per_stream, strict=True):
        stream_size = sum(shard_sizes)
        counts_of_stream = [counts[sample_id] for sample_id in range(first_id, first_id + stream_size)]
        most_often = ceil_divide(epoch_samples, stream_size)
        least_often = epoch_samples // stream_size - num_dropped
        assert max(counts_of_stream) <= most_often
        assert min(counts_of_stream) >= least_often
        assert epoch_samples - num_dropped <= sum(counts_of_stream) <= epoch_samples
        first_id += stream_size


@given(data=st.data(), epoch=st.integers(0, 50))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_units_add_up_to_what_was_asked_for_at_any_size(data, epoch):
    """Of each shard an epoch has some whole units, and then about its share of the samples that are left."""
    max_size = 10 ** data.draw(st.integers(0, 15))
    shard_sizes = data.draw(st.lists(st.integers(1, max_size), min_size=1, max_size=8))
    stream_size = sum(shard_sizes)
    epoch_samples = data.draw(st.integers(0, 3 * stream_size))
    batch_size = data.draw(st.sampled_from([1, 8, 4096]))
    order = make_order(shard_sizes=shard_sizes, epoch_samples=epoch_samples, batch_size=batch_size)

    unit_shards, unit_sizes = order_module._build_units(order, (order.seed, epoch))
    assert sum(map(int, unit_sizes)) == epoch_samples
    num_repeats, rest = divmod(epoch_samples, stream_size)
    for shard, shard_size in enumerate(shard_sizes):
        sizes_of_units = unit_sizes[unit_shards == shard].tolist()
        assert sizes_of_units[:num_repeats] == [shard_size] * num_repeats
        partial_size = sum(sizes_of_units[num_repeats:])
        share_of_rest = shard_size * rest / stream_size
        rounding_error = share_of_rest * 1e-15  # of the float in the line above
        assert abs(partial_size - share_of_rest) <= 1 + rounding_error


@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shares_are_exact_beyond_64_bits(data):
    """A share is floor((value * multiplier + shift) / divisor). The product has up to 110 bits."""
    divisor = data.draw(st.integers(1, 10 ** data.draw(st.integers(0, 18))))
    value = data.draw(st.integers(0, divisor))
    shift = data.draw(st.integers(0, divisor - 1))
    multiplier = data.draw(st.integers(0, 10 ** data.draw(st.integers(0, 15))))

    share = order_module._scale_and_floor(np.array([value]), multiplier, divisor, shift)
    expected = (value * multiplier + shift) // divisor
    assert share.tolist() == [expected]


def test_five_thousand_million_samples_and_a_half_are_all_there():
    """With 64 bits, a partial repeat above 3 thousand million samples used to lose whole shards."""
    num_samples = 5_000_000_000
    epoch_samples = 7_500_000_000
    order = make_order(
        shard_sizes=[50_000] * 100_000, epoch_samples=epoch_samples, batch_size=65_536, window_samples=1 << 20
    )
    epoch_order = order.build_epoch(3)
    assert epoch_order._unit_bounds[-1] == epoch_samples

    last_batch = range(order.num_batches - 1, order.num_batches)
    last_ids = epoch_order.sample_ids(range(65_530, 65_536), last_batch)
    assert (last_ids >= 0).all()
    assert (last_ids < num_samples).all()


@pytest.mark.parametrize(("epoch_samples", "num_units"), [(5, 2), (6, 2), (7, 4), (13, 6)])
def test_an_epoch_has_each_shard_as_often_as_it_is_begun(epoch_samples, num_units):
    """Two shards of three samples: six samples are both once, and the seventh begins them again."""
    order = make_order(shard_sizes=[3, 3], epoch_samples=epoch_samples, batch_size=1, shuffle=False)
    assert order.max_units == num_units


def test_a_partial_repeat_draws_every_sample_equally_often():
    """Over many epochs, each of 10 of the 40 samples, whatever the size of a sample's shard."""
    num_epochs = 2_000
    order = make_order(shard_sizes=[1, 1, 2, 30, 6], epoch_samples=10, batch_size=1)
    counts = Counter()
    for epoch in range(num_epochs):
        counts.update(whole_epoch(order, epoch).ravel().tolist())
    counts_of_samples = [counts[sample_id] for sample_id in range(40)]
    assert counts_of_samples == pytest.approx([num_epochs * 10 / 40] * 40, rel=0.15)


# ------------------------------------------------------------------------------------------- one order, for ever


def test_no_two_epochs_or_seeds_have_one_order():
    order = make_order(batch_size=7, seed=1)
    other_seed = make_order(batch_size=7, seed=2)
    epochs = [whole_epoch(order, epoch).tobytes() for epoch in range(20)]
    epochs.append(whole_epoch(other_seed).tobytes())
    assert len(set(epochs)) == 21


def test_each_epoch_drops_other_samples():
    """100 samples are 14 batches of 7, and 2 samples are left."""
    order = make_order(batch_size=7, seed=1)
    dropped = set()
    for epoch in range(20):
        dropped |= set(range(100)) - set(whole_epoch(order, epoch).ravel().tolist())
    assert len(dropped) > 15


def test_a_slice_does_not_depend_on_what_was_asked_before():
    order = make_order(batch_size=8, window_samples=40)
    epoch_order = order.build_epoch(4)
    epoch_order.sample_ids(range(3, 5), range(7, 9))
    ids = epoch_order.sample_ids(range(8), range(order.num_batches))
    assert np.array_equal(ids, whole_epoch(order, 4))


def test_a_slice_of_no_batch_is_empty():
    assert make_order().build_epoch(4).sample_ids(range(8), range(0)).shape == (0, 8)


def test_the_order_is_this_one_for_ever():
    """Runs are carried on by later versions of this package, on other machines, with other releases of numpy."""
    order = SampleOrder(
        shard_sizes_per_stream=[[5, 9], [11]], epoch_samples_per_stream=[14, 16], batch_size=6, seed=9176, shuffle=True
    )
    assert whole_epoch(order, 2).tolist() == [
        [17, 1, 2, 11, 12, 14],
        [19, 24, 3, 9, 13, 15],
        [20, 22, 5, 7, 16, 16],
        [18, 23, 6, 10, 18, 24],
        [21, 0, 4, 8, 14, 23],
    ]
    assert order.fingerprint == "374fb678fde92603"


def test_the_order_of_several_blocks_is_this_one_for_ever():
    order = make_order(shard_sizes=[12, 12, 12], batch_size=2, seed=9176, window_samples=8)
    assert order.block_samples == 4
    assert whole_epoch(order, 1).T.tolist() == [
        [35, 34, 12, 33, 15, 14, 13, 16, 20, 19, 18, 17, 23, 0, 22, 21, 1, 2],
        [3, 6, 4, 5, 8, 10, 7, 9, 11, 25, 24, 26, 29, 27, 28, 30, 32, 31],
    ]


# --------------------------------------------------------------------------------------------- how it is shuffled


def test_every_block_of_every_row_index_is_shuffled_in_its_own_way():
    """Each of 4 row indices has 16 blocks of 16 samples."""
    order = make_order(shard_sizes=[4 * 16 * 16], batch_size=4, window_samples=4 * 16)
    blocks_bn = whole_epoch(order).T.reshape(4 * 16, 16)
    permutations = {tuple(np.argsort(block_n)) for block_n in blocks_bn}
    assert len(permutations) == 4 * 16


def test_streams_are_mixed_in_proportion_from_the_first_batch_to_the_last():
    """The second stream's ids begin after the 6,000 of the first; three samples in four are of the second."""
    order = SampleOrder(
        shard_sizes_per_stream=[[100] * 60, [100] * 20],
        epoch_samples_per_stream=[2_000, 6_000],
        batch_size=40,
        seed=5,
        shuffle=True,
        window_samples=2_000,
    )
    is_from_second = whole_epoch(order) >= 6_000
    assert is_from_second.mean() == 0.75
    for quarter in np.array_split(is_from_second, 4):
        assert quarter.mean() == pytest.approx(0.75, abs=0.1)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    return np.corrcoef(first, second)[0, 1]


def test_a_shuffled_epoch_looks_random():
    """A sample's id says nothing about the next sample's, or about the place in the epoch."""
    ids = whole_epoch(make_order(shard_sizes=[500] * 20, batch_size=10)).ravel()
    assert abs(correlation(ids[:-1], ids[1:])) < 0.05
    assert abs(correlation(ids, np.arange(len(ids)))) < 0.05


def test_a_worker_of_a_c4_sized_run_needs_little_memory():
    """17 M samples in 4,200 shards, a tenth of C4's, global batch 512, one of 8 workers of one of 8 ranks.

    The ids of all samples would be 136 MB.
    """
    tracemalloc.start()
    order = make_order(shard_sizes=[4_050] * 4_200, batch_size=512)
    row_indices, steps = rows_and_steps_of_worker(order, rank=3, world_size=8, worker=2, num_workers=8)
    ids_si = order.build_epoch(1).sample_ids(row_indices, steps)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    rows_per_rank = 512 // 8
    assert ids_si.shape == (len(steps), rows_per_rank)
    assert len(np.unique(ids_si)) == ids_si.size
    bytes_beside_result = peak_bytes - ids_si.nbytes
    assert bytes_beside_result < 12e6


# ------------------------------------------------------------------------------------------------- the fingerprint


def test_orders_of_other_settings_have_other_fingerprints():
    orders = [
        make_order(),
        make_order(seed=18),
        make_order(batch_size=4),
        make_order(epoch_samples=99),
        make_order(shuffle=False),
        make_order(window_samples=99),
        make_order(drop_last=False),
        make_order(shard_sizes=(40, 1, 7, 52)),
    ]
    fingerprints = {order.fingerprint for order in orders}
    assert len(fingerprints) == len(orders)


def test_orders_of_equal_settings_have_one_fingerprint():
    assert make_order().fingerprint == make_order().fingerprint


def test_without_shuffling_the_window_is_not_in_the_fingerprint():
    """It changes no order then."""
    small_window = make_order(shuffle=False, window_samples=8)
    large_window = make_order(shuffle=False, window_samples=400)
    assert small_window.fingerprint == large_window.fingerprint
