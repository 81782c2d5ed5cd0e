"""One run, stopped and carried on again and again, on up to 64 ranks: the same batches, and no shard for nothing."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfoundry_lite.data.loader import batch_digest, format_digest
from llmfoundry_lite.data.order import NO_SAMPLE, SampleOrder, rows_and_steps_of_worker
from llmfoundry_lite.data.rows import PAD_TOKEN
from tests.helpers.data import slices_of_workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BATCH_SIZE = 192
LAYOUTS = [(1, 1), (1, 3), (2, 1), (3, 4), (2, 8), (3, 8), (4, 8), (6, 8), (8, 8), (64, 1), (1, 64), (16, 4), (12, 8)]
"""(nodes, ranks per node); each divides the 192 samples of the global batch."""


def digest_of_ids(ids: np.ndarray) -> int:
    """Compute the digest of these samples' rows, as a rank does."""
    tokens = np.where(ids == NO_SAMPLE, PAD_TOKEN, ids)[:, None] * np.ones(2, np.int64)
    return batch_digest(torch.from_numpy(tokens))


def global_digest(ids_of_ranks: list[np.ndarray]) -> str:
    return format_digest(sum(digest_of_ids(ids) for ids in ids_of_ranks))


def read_leg(order, epoch, first_batch, num_batches, world_size, num_workers):
    """Per rank: the sample ids of the batches of one launch (of one epoch), [num_batches, rows of the rank]."""
    ids_of_ranks = []
    for rank in range(world_size):
        slices = slices_of_workers(order, epoch, rank, world_size, num_workers, first_batch, num_batches)
        turns = itertools.islice(itertools.cycle(slices), num_batches)  # as the DataLoader takes from its workers
        ids_of_ranks.append(np.stack([next(turn) for turn in turns]))
    return ids_of_ranks


@st.composite
def mixtures(draw):
    sizes = draw(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=6), min_size=1, max_size=3))
    return SampleOrder(
        shard_sizes_per_stream=sizes,
        epoch_samples_per_stream=[BATCH_SIZE + draw(st.integers(0, 2 * sum(stream))) for stream in sizes],
        batch_size=BATCH_SIZE,
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        window_samples=draw(st.sampled_from([BATCH_SIZE, 1000, 10**6])),
    )


@pytest.mark.slow
@given(data=st.data(), order=mixtures())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_number_of_stops_on_any_layouts_across_epochs_gives_the_same_digests(data, order):
    whole = [order.build_epoch(epoch).sample_ids(range(BATCH_SIZE), range(order.num_batches)) for epoch in range(3)]
    expected = [global_digest([ids]) for epoch in whole for ids in epoch]
    found, seen = [], [Counter() for _ in whole]
    while len(found) < len(expected):
        epoch, first_batch = divmod(len(found), order.num_batches)
        nodes, ranks_per_node = data.draw(st.sampled_from(LAYOUTS))
        length = data.draw(st.integers(1, order.num_batches - first_batch))
        ranks = read_leg(
            order, epoch, first_batch, length, nodes * ranks_per_node, data.draw(st.sampled_from([0, 1, 2, 5]))
        )
        for ids_of_ranks in zip(*ranks, strict=True):
            found.append(global_digest(list(ids_of_ranks)))
            seen[epoch].update(itertools.chain.from_iterable(ids.tolist() for ids in ids_of_ranks))
    assert found == expected

    begin = 0
    for sizes, choose in zip(order.shard_sizes_per_stream, order.epoch_samples_per_stream, strict=True):
        for counts in seen:
            of_stream = [counts[sample] for sample in range(begin, begin + sum(sizes))]
            assert max(of_stream) <= -(-choose // sum(sizes))  # none more often than the mixture says
            assert choose - order.num_samples % order.batch_size <= sum(of_stream) <= choose
        begin += sum(sizes)


def test_a_skipped_a_repeated_and_a_torn_batch_each_change_the_digests():
    """The test above would notice each of these."""
    order = SampleOrder(
        shard_sizes_per_stream=[[500, 900]],
        epoch_samples_per_stream=[1400],
        batch_size=BATCH_SIZE,
        seed=1,
        shuffle=True,
    )
    ids = order.build_epoch(0).sample_ids(range(BATCH_SIZE), range(order.num_batches))
    digests = [global_digest([row]) for row in ids]
    assert len(set(digests)) == len(digests)
    torn = np.concatenate([ids[2][:100], ids[3][100:]])
    assert global_digest([torn]) not in digests


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(8, 8), (2, 8), (64, 1), (3, 8)])
def test_a_node_needs_its_share_of_the_shards_and_two_more(num_nodes, ranks_per_node):
    """C4-like: 1,920 shards of 500 samples. A node's rows are one span of the ring of shards: it reads the shards
    inside, and one at either end that it shares with its neighbour."""
    order = SampleOrder(
        shard_sizes_per_stream=[[500] * 1920],
        epoch_samples_per_stream=[500 * 1920],
        batch_size=BATCH_SIZE,
        seed=4,
        shuffle=True,
    )
    shards_of_nodes = []
    for node in range(num_nodes):
        indices = [
            rows_and_steps_of_worker(order, rank=node * ranks_per_node + local, world_size=num_nodes * ranks_per_node)[
                0
            ]
            for local in range(ranks_per_node)
        ]
        of_node = range(indices[0].start, indices[-1].stop)
        assert [index for part in indices for index in part] == list(of_node)
        ids = order.build_epoch(1).sample_ids(of_node, range(order.num_batches))
        shards_of_nodes.append(set((ids // 500).ravel().tolist()))
    assert max(map(len, shards_of_nodes)) <= 1920 / num_nodes + 2
    assert sum(map(len, shards_of_nodes)) <= 1920 + 2 * num_nodes


def test_stops_cost_a_node_few_shards_twice():
    """Stopped every 500 batches and carried on with other numbers of nodes, whose disks are empty each time.

    A row index that reads b batches in order of its shards, shuffled within blocks of w samples, touches at most
    (b + 2 w) / shard size + 2 of them: downloads follow what is read, however often the layout changes.
    """
    size, batches_per_launch, window = 500, 500, BATCH_SIZE * 100
    order = SampleOrder(
        shard_sizes_per_stream=[[size] * 1920],
        epoch_samples_per_stream=[size * 1920],
        batch_size=BATCH_SIZE,
        seed=4,
        shuffle=True,
        window_samples=window,
    )
    for first_batch, num_nodes in zip(range(0, order.num_batches, batches_per_launch), itertools.cycle([8, 2, 64, 3])):
        steps = range(first_batch, min(first_batch + batches_per_launch, order.num_batches))
        ids = order.build_epoch(0).sample_ids(range(BATCH_SIZE), steps)
        indices_per_node = BATCH_SIZE // num_nodes
        for node in range(num_nodes):
            shards = np.unique(ids[:, node * indices_per_node : (node + 1) * indices_per_node] // size)
            per_index = (len(steps) + 2 * window // BATCH_SIZE) / size + 2
            assert len(shards) <= indices_per_node * per_index


# Real data sets -----------------------------------------------------------------------------------------------------
