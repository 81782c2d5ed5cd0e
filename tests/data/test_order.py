"""The order as a pure function: no processes, no files, up to 64 simulated ranks."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_lite.data import order as order_module
from llmfoundry_lite.data.order import NO_SAMPLE, SampleOrder, rows_and_steps_of_worker
from tests.helpers.data import slices_of_workers


def make_order(shard_sizes=(40, 7, 1, 52), choose=None, batch_size=8, seed=17, shuffle=True, **settings) -> SampleOrder:
    return SampleOrder(
        shard_sizes_per_stream=[list(shard_sizes)],
        epoch_samples_per_stream=[sum(shard_sizes) if choose is None else choose],
        batch_size=batch_size,
        seed=seed,
        shuffle=shuffle,
        **settings,
    )


def whole_epoch(order: SampleOrder, epoch: int = 0) -> np.ndarray:
    """[num_batches, batch_size]"""
    return order.build_epoch(epoch).sample_ids(range(order.batch_size), range(order.num_batches))


def epoch_as_read(order: SampleOrder, epoch: int, world_size: int, num_workers: int, first_batch: int) -> np.ndarray:
    """The global batches that simulated ranks and DataLoader workers put together, each from its own slice."""
    ranks = []
    for rank in range(world_size):
        slices = slices_of_workers(order, epoch, rank, world_size, num_workers, first_batch)
        num_batches = order.num_batches - first_batch
        # The DataLoader takes from its workers in turn.
        batches = [next(slices[batch % len(slices)]) for batch in range(num_batches)]
        assert all(next(rest, None) is None for rest in slices)
        ranks.append(np.stack(batches) if batches else np.empty((0, order.batch_size // world_size), np.int64))
    return np.concatenate(ranks, axis=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_sample_at_most_once_and_drops_the_remainder(shuffle):
    order = make_order(batch_size=8, shuffle=shuffle)
    ids = whole_epoch(order).ravel()
    assert (order.num_batches, order.num_samples % order.batch_size) == (12, 4)
    assert len(ids) == len(set(ids)) == 96
    assert set(ids) <= set(range(100))


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_drop_last_nothing_is_dropped_or_repeated(shuffle):
    order = make_order(batch_size=8, shuffle=shuffle, drop_last=False)
    ids = whole_epoch(order)
    assert order.num_batches == 13
    assert sorted(ids[ids != NO_SAMPLE]) == list(range(100))
    assert (ids[:-1] != NO_SAMPLE).all()


def test_without_shuffling_samples_come_in_file_order():
    order = make_order(batch_size=8, shuffle=False, drop_last=False)
    assert whole_epoch(order).ravel().tolist() == [*range(100), *[NO_SAMPLE] * 4]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(4, 4), (3, 8), (1, 1), (1, 3), (6, 8), (2, 6), (12, 1)])
def test_every_layout_reads_the_same_global_batches(num_nodes, ranks_per_node, num_workers):
    order = make_order(shard_sizes=[53, 200, 17, 400, 330], batch_size=48, window_samples=480)
    for epoch, first_batch in [(0, 0), (0, 13), (1, 5), (3, order.num_batches - 1), (2, order.num_batches)]:
        expected = whole_epoch(order, epoch)[first_batch:]
        assert (epoch_as_read(order, epoch, num_nodes * ranks_per_node, num_workers, first_batch) == expected).all()


@st.composite
def orders(draw):
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
def test_any_order_survives_any_world_and_repeats_what_it_should(data, order, epoch, num_workers):
    world_size = data.draw(
        st.sampled_from([size for size in (1, 2, 3, 4, 6, 8, 12, 24) if order.batch_size % size == 0])
    )
    first_batch = data.draw(st.integers(0, order.num_batches))
    ids = whole_epoch(order, epoch)
    assert (epoch_as_read(order, epoch, world_size, num_workers, first_batch) == ids[first_batch:]).all()

    counts = Counter(ids[ids != NO_SAMPLE].tolist())
    num_dropped = order.num_samples % order.batch_size if order.drop_last else 0
    assert counts.total() == order.num_samples - num_dropped
    begin = 0
    for sizes, choose in zip(order.shard_sizes_per_stream, order.epoch_samples_per_stream, strict=True):
        of_stream = [counts[sample_id] for sample_id in range(begin, begin + sum(sizes))]
        assert max(of_stream) <= -(-choose // sum(sizes))
        assert min(of_stream) >= choose // sum(sizes) - num_dropped
        assert choose - num_dropped <= sum(of_stream) <= choose
        begin += sum(sizes)


@given(data=st.data(), epoch=st.integers(0, 50))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_units_add_up_to_what_was_asked_for_at_any_size(data, epoch):
    sizes = data.draw(st.lists(st.integers(1, 10 ** data.draw(st.integers(0, 15))), min_size=1, max_size=8))
    choose = data.draw(st.integers(0, 3 * sum(sizes)))
    order = make_order(shard_sizes=sizes, choose=choose, batch_size=data.draw(st.sampled_from([1, 8, 4096])))
    shards, unit_sizes = order_module._build_units(order, (order.seed, epoch))
    assert sum(map(int, unit_sizes)) == choose
    num_repeats, rest = divmod(choose, sum(sizes))
    for shard, size in enumerate(sizes):
        units = unit_sizes[shards == shard].tolist()
        assert units[:num_repeats] == [size] * num_repeats
        assert abs(sum(units[num_repeats:]) - size * rest / sum(sizes)) <= 1 + size * rest / sum(sizes) * 1e-15


@given(data=st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shares_are_exact_beyond_64_bits(data):
    whole = data.draw(st.integers(1, 10 ** data.draw(st.integers(0, 18))))
    part, shift = data.draw(st.integers(0, whole)), data.draw(st.integers(0, whole - 1))
    count = data.draw(st.integers(0, 10 ** data.draw(st.integers(0, 15))))
    if part * count // whole < 2**62:
        assert order_module._scale_and_floor(np.array([part]), count, whole, shift).tolist() == [
            (part * count + shift) // whole
        ]


def test_five_thousand_million_samples_and_a_half_are_all_there():
    """With 64 bits, a partial repeat above 3 thousand million samples used to lose whole shards."""
    order = make_order(shard_sizes=[50_000] * 100_000, choose=7_500_000_000, batch_size=65_536, window_samples=1 << 20)
    assert order.build_epoch(3)._unit_bounds[-1] == 7_500_000_000
    last = order.build_epoch(3).sample_ids(range(65_530, 65_536), range(order.num_batches - 1, order.num_batches))
    assert ((last >= 0) & (last < 5_000_000_000)).all()


def test_epochs_and_seeds_differ_and_the_dropped_samples_move():
    order, other = make_order(batch_size=7, seed=1), make_order(batch_size=7, seed=2)
    epochs = [whole_epoch(order, epoch) for epoch in range(20)]
    assert len({ids.tobytes() for ids in [*epochs, whole_epoch(other)]}) == 21
    dropped = [set(range(100)) - set(ids.ravel().tolist()) for ids in epochs]
    assert len(set().union(*dropped)) > 15  # two in each epoch


def test_a_slice_does_not_depend_on_what_was_asked_before():
    order = make_order(batch_size=8, window_samples=40)
    epoch_order = order.build_epoch(4)
    epoch_order.sample_ids(range(3, 5), range(7, 9))
    assert (epoch_order.sample_ids(range(8), range(12)) == whole_epoch(order, 4)).all()
    assert epoch_order.sample_ids(range(8), range(0)).shape == (0, 8)


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


def test_every_block_of_every_row_index_is_shuffled_in_its_own_way():
    order = make_order(shard_sizes=[64 * 16], batch_size=4, window_samples=4 * 16)
    places_bn = whole_epoch(order).T.reshape(-1, 16)
    assert len({tuple(np.argsort(block_n)) for block_n in places_bn}) == 64


def test_streams_are_mixed_in_proportion_from_the_first_batch_to_the_last():
    order = SampleOrder(
        shard_sizes_per_stream=[[100] * 60, [100] * 20],
        epoch_samples_per_stream=[2_000, 6_000],
        batch_size=40,
        seed=5,
        shuffle=True,
        window_samples=2_000,
    )
    from_second = whole_epoch(order) >= 6_000
    assert from_second.mean() == 0.75
    for part in np.array_split(from_second, 4):
        assert abs(part.mean() - 0.75) < 0.1


def test_a_partial_repeat_draws_every_sample_equally_often_over_the_epochs():
    sizes = [1, 1, 2, 30, 6]
    order = make_order(shard_sizes=sizes, choose=10, batch_size=1)
    counts = Counter(sample for epoch in range(2_000) for sample in whole_epoch(order, epoch).ravel().tolist())
    expected = 2_000 * 10 / sum(sizes)
    assert all(abs(counts[sample] - expected) < 0.15 * expected for sample in range(sum(sizes)))


def test_a_shuffled_epoch_looks_random():
    ids = whole_epoch(make_order(shard_sizes=[500] * 20, batch_size=10)).ravel()
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(ids, np.arange(len(ids)))[0, 1]) < 0.05


def test_a_worker_of_a_c4_sized_run_needs_little_memory():
    """17 M samples in 4,200 shards, a tenth of C4's, global batch 512, one of 8 workers of one of 8 ranks. All of their
    numbers would be 136 MB."""
    tracemalloc.start()
    order = make_order(shard_sizes=[4_050] * 4_200, batch_size=512)
    row_indices, steps = rows_and_steps_of_worker(order, rank=3, world_size=8, worker=2, num_workers=8)
    ids_si = order.build_epoch(1).sample_ids(row_indices, steps)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids_si)) == ids_si.size == len(steps) * 64
    assert peak_bytes - ids_si.nbytes < 12e6


def test_the_fingerprint_tells_orders_apart():
    orders = [
        make_order(),
        make_order(seed=18),
        make_order(batch_size=4),
        make_order(choose=99),
        make_order(shuffle=False),
        make_order(window_samples=99),
        make_order(drop_last=False),
        make_order(shard_sizes=(40, 1, 7, 52)),
    ]
    assert len({order.fingerprint for order in orders}) == len(orders)
    assert make_order().fingerprint == make_order().fingerprint
    unshuffled = [make_order(shuffle=False, window_samples=window) for window in (8, 400)]
    assert unshuffled[0].fingerprint == unshuffled[1].fingerprint, "a window without shuffling changes no order"


@pytest.mark.parametrize(("choose", "num_units"), [(5, 2), (6, 2), (7, 4), (13, 6)])
def test_an_epoch_has_each_shard_as_often_as_it_is_begun(choose, num_units):
    order = SampleOrder(
        shard_sizes_per_stream=[[3, 3]], epoch_samples_per_stream=[choose], batch_size=1, seed=1, shuffle=False
    )
    assert order.max_units == num_units
