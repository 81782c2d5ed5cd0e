"""Parts of tensors, and their transfer from the ranks that have them to those that want them."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

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

HEIGHTS = (8, 4, 4)
"""q, k and v."""


def held_by(rank, whole, runs):
    """Return the rows of a matrix that a rank holds: one of two shards of one of two parts of the layers."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        like = DTensor.from_local(
            torch.zeros(len(whole) // 4, 3), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False
        )
        (first, _), (count, _) = box_of(like)
        return parts_of("w", like, HEIGHTS, runs), to_rank_order(whole, runs)[first : first + count]
    finally:
        dist.destroy_process_group()


def test_a_rank_has_one_box_of_each_matrix_though_heads_divide_them():
    whole, runs = torch.arange(48.0).view(16, 3), divide_stack(HEIGHTS, 2)
    covered = torch.zeros(16, 3)
    for rank in range(4):
        parts, held = held_by(rank, whole, runs)
        for key, part in parts.items():
            first = {"w/0": 0, "w/1": 8, "w/2": 12}[key]
            assert first <= part.box.offset[0] < first + HEIGHTS[int(key[-1])]
            place = part.box.slices_in(Box((0, 0), (16, 3)))
            assert torch.equal(part.view_of(held), whole[place])
            covered[place] += 1
    assert torch.equal(covered, torch.ones(16, 3)), "every element once"


def test_ranks_share_out_only_what_they_hold():
    """The first and the last stage both have the embedding."""
    embedding, block = Box((0, 0), (5, 2)), Box((0,), (4,))
    assert divide_replicas([{"wte": embedding, "0": block}, {"1": block}, {"wte": embedding}]) == [
        {"wte": Box((0, 0), (2, 2)), "0": block},
        {"1": block},
        {"wte": Box((2, 0), (3, 2))},
    ]


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks, which are threads; returns a function that runs one function on all of them."""
    sent, barrier, here = {}, threading.Barrier(3, timeout=30), threading.local()

    def all_to_all(received, flat, counts, sizes):
        sent[here.rank] = flat.split(sizes)
        barrier.wait()
        parts = [sent[other][here.rank] for other in range(3)]
        assert [len(part) for part in parts] == counts
        received.copy_(torch.cat(parts))
        barrier.wait()

    def run(function):
        def work(rank):
            here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(work, range(3)))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return run


ROWS = [{"w": Box((0, 0), (2, 6))}, {"w": Box((2, 0), (2, 6))}, {"w": Box((4, 0), (1, 6)), "b": Box((0,), (3,))}]
COLUMNS = [{"w": Box((0, 0), (5, 3)), "b": Box((0,), (1,))}, {"w": Box((0, 3), (5, 3))}, {"b": Box((1,), (2,))}]
COPIES = [{"w": Box((0, 0), (5, 6)), "b": Box((0,), (3,))}] * 3
WHOLE = COPIES[0]


@pytest.mark.parametrize(("have", "want"), [*itertools.permutations((ROWS, COLUMNS, COPIES), 2)])
def test_every_rank_gets_the_boxes_that_it_wants(ranks, have, want):
    have = divide_replicas(have)
    tensors = {"w": torch.randn(5, 6), "b": torch.randn(3)}

    def work(rank):
        source = {name: tensors[name][box.slices_in(WHOLE[name])] for name, box in have[rank].items()}
        target = {name: torch.zeros(box.lengths) for name, box in want[rank].items()}
        Redistribution(have, want, rank).apply(source, target, torch.float32)
        return target

    for target, boxes in zip(ranks(work), want, strict=True):
        assert target.keys() == boxes.keys()
        assert all(torch.equal(target[name], tensors[name][box.slices_in(WHOLE[name])]) for name, box in boxes.items())


def test_tensors_that_no_rank_gives_stay_as_they_are(ranks):
    """Muon has no second moment of a matrix."""

    def work(rank):
        target = {"w": torch.zeros(5, 6)}
        source = {name: torch.ones(box.lengths) for name, box in divide_replicas(COPIES)[rank].items() if name == "w"}
        Redistribution(divide_replicas(COPIES), COPIES, rank).apply(source, target, torch.float32)
        return target["w"]

    assert all(torch.equal(found, torch.ones(5, 6)) for found in ranks(work))
