"""Parts of tensors, and their transfer from the ranks that have them to those that want them."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

from llmfoundry_islands.tensors.boxes import Box, Redistribution, divide_replicas, parts_of
from llmfoundry_lite.checkpoint.planning import box_of
from llmfoundry_lite.config.layout import divide_stack
from llmfoundry_lite.training.muon import to_rank_order


def test_boxes_overlap_where_both_have_rows_and_columns():
    one = Box(offset=(4, 0), lengths=(6, 8))
    other = Box(offset=(6, 3), lengths=(7, 2))
    assert one.intersect(other) == Box(offset=(6, 3), lengths=(4, 2))
    assert one.intersect(Box(offset=(10, 0), lengths=(6, 8))) is None


# ----------------------------------------------------------- parts of a matrix that tensor parallelism divides

HEIGHTS = (8, 4, 4)
"""Rows of q, k and v, which one parameter stacks."""
FIRST_ROWS = {"w/0": 0, "w/1": 8, "w/2": 12}
"""Key of q, k and v -> the row of the parameter with which it begins."""
NUM_ROWS = sum(HEIGHTS)
NUM_COLUMNS = 3
STACKED = torch.arange(float(NUM_ROWS * NUM_COLUMNS)).view(NUM_ROWS, NUM_COLUMNS)
STACKED_BOX = Box((0, 0), (NUM_ROWS, NUM_COLUMNS))

NUM_SHARDS = 2
NUM_TENSOR_RANKS = 2
NUM_RANKS = NUM_SHARDS * NUM_TENSOR_RANKS
ROW_ORDER = divide_stack(HEIGHTS, NUM_TENSOR_RANKS)
"""Half of q, of k and of v, then their other halves: tensor parallelism divides the rows in this order."""


@contextmanager
def simulated_rank(rank):
    """Inside, `torch.distributed` takes this process for the given rank. Nothing can be exchanged."""
    dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def parts_and_rows_of(rank):
    """What `parts_of` says of STACKED on this rank, and the rows of it that the rank holds."""
    with simulated_rank(rank):
        mesh = init_device_mesh("cpu", (NUM_SHARDS, NUM_TENSOR_RANKS), mesh_dim_names=("shard", "tensor"))
        # Tensor parallelism divides the rows first, FSDP divides them again.
        placements = [_StridedShard(0, split_factor=NUM_TENSOR_RANKS), Shard(0)]
        local = torch.zeros(NUM_ROWS // NUM_RANKS, NUM_COLUMNS)
        parameter = DTensor.from_local(local, mesh, placements, run_check=False)
        parts = parts_of("w", parameter, HEIGHTS, ROW_ORDER)
        offset, lengths = box_of(parameter)

    first_row = offset[0]
    num_rows = lengths[0]
    return parts, to_rank_order(STACKED, ROW_ORDER)[first_row : first_row + num_rows]


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rank_has_one_box_of_each_matrix_though_heads_divide_them(rank):
    parts, local_rows = parts_and_rows_of(rank)
    for key, part in parts.items():
        matrix_index = int(key.removeprefix("w/"))
        first_row = FIRST_ROWS[key]
        assert first_row <= part.box.offset[0] < first_row + HEIGHTS[matrix_index]
        assert torch.equal(part.view_of(local_rows), STACKED[part.box.slices_in(STACKED_BOX)])


def test_the_parts_of_all_ranks_cover_a_matrix_once():
    times_covered = torch.zeros(NUM_ROWS, NUM_COLUMNS)
    for rank in range(NUM_RANKS):
        parts, _ = parts_and_rows_of(rank)
        for part in parts.values():
            times_covered[part.box.slices_in(STACKED_BOX)] += 1
    assert torch.equal(times_covered, torch.ones(NUM_ROWS, NUM_COLUMNS))


def test_a_rank_that_holds_a_whole_stack_has_each_of_its_matrices():
    parts = parts_of("w", STACKED, HEIGHTS, None)
    assert parts.keys() == FIRST_ROWS.keys()
    for key, part in parts.items():
        assert part.box.offset == (FIRST_ROWS[key], 0)
        assert torch.equal(part.view_of(STACKED), STACKED[part.box.slices_in(STACKED_BOX)])


# ----------------------------------------------------------------------------------- boxes of several ranks


def test_ranks_share_out_only_what_they_hold():
    """The first and the last stage both have the embedding."""
    embedding = Box((0, 0), (5, 2))
    block = Box((0,), (4,))
    first_rows = Box((0, 0), (2, 2))
    last_rows = Box((2, 0), (3, 2))
    pieces = divide_replicas([{"wte": embedding, "0": block}, {"1": block}, {"wte": embedding}])
    assert pieces == [{"wte": first_rows, "0": block}, {"1": block}, {"wte": last_rows}]


NUM_THREADS = 3


@pytest.fixture
def run_on_ranks(monkeypatch):
    """A function that runs a function of the rank on three ranks at once, and returns their results.

    The ranks are threads. Instead of torch's `all_to_all_single` they call one that passes tensors between threads.
    """
    parts_sent = {}  # sender -> its part for each receiver
    barrier = threading.Barrier(NUM_THREADS, timeout=30)
    current = threading.local()

    def all_to_all_single(received, sent, received_counts, sent_counts):
        parts_sent[current.rank] = sent.split(sent_counts)
        barrier.wait()  # every rank has sent
        parts = [parts_sent[sender][current.rank] for sender in range(NUM_THREADS)]
        assert [len(part) for part in parts] == received_counts
        received.copy_(torch.cat(parts))
        barrier.wait()  # every rank has received, and the next exchange may begin

    def run(function):
        def run_as(rank):
            current.rank = rank
            return function(rank)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return list(pool.map(run_as, range(NUM_THREADS)))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    return run


WHOLE = {"w": Box((0, 0), (5, 6)), "b": Box((0,), (3,))}
"""A matrix and a vector. The names below say how three ranks hold them."""
BY_ROWS = [
    {"w": Box((0, 0), (2, 6))},
    {"w": Box((2, 0), (2, 6))},
    {"w": Box((4, 0), (1, 6)), "b": WHOLE["b"]},
]
BY_COLUMNS = [
    {"w": Box((0, 0), (5, 3)), "b": Box((0,), (1,))},
    {"w": Box((0, 3), (5, 3))},
    {"b": Box((1,), (2,))},
]
WHOLE_COPIES = [WHOLE, WHOLE, WHOLE]


def parts_in(boxes, tensors):
    """Those parts of whole tensors that are in the boxes."""
    return {name: tensors[name][box.slices_in(WHOLE[name])] for name, box in boxes.items()}


@pytest.mark.parametrize(("held", "wanted"), [*itertools.permutations((BY_ROWS, BY_COLUMNS, WHOLE_COPIES), 2)])
def test_every_rank_gets_the_boxes_that_it_wants(run_on_ranks, held, wanted):
    pieces = divide_replicas(held)  # of copies, each rank gives some rows
    tensors = {name: torch.randn(box.lengths) for name, box in WHOLE.items()}

    def redistribute(rank):
        source = parts_in(pieces[rank], tensors)
        target = {name: torch.zeros(box.lengths) for name, box in wanted[rank].items()}
        Redistribution(pieces, wanted, rank).apply(source, target, torch.float32)
        return target

    for boxes, target in zip(wanted, run_on_ranks(redistribute), strict=True):
        expected = parts_in(boxes, tensors)
        assert target.keys() == expected.keys()
        for name in expected:
            assert torch.equal(target[name], expected[name]), name


def test_a_tensor_that_no_rank_has_is_skipped(run_on_ranks):
    """Muon has no second moment of a matrix: here "b" is in the plan, but in no rank's source or target."""
    pieces = divide_replicas(WHOLE_COPIES)

    def redistribute(rank):
        source = {"w": torch.ones(pieces[rank]["w"].lengths)}
        target = {"w": torch.zeros(WHOLE["w"].lengths)}
        Redistribution(pieces, WHOLE_COPIES, rank).apply(source, target, torch.float32)
        return target

    for target in run_on_ranks(redistribute):
        assert target.keys() == {"w"}
        assert torch.equal(target["w"], torch.ones(5, 6))
