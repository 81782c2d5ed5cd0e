"""Resharding over random meshes, one simulated rank after the other in this process.

torch's fake process group gives each simulated rank its place in a mesh; only the exchange of plans, which needs live
neighbours, is done by hand.
"""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry_lite.checkpoint import planning
from llmfoundry_lite.checkpoint.grid import Box, Grid
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Timestamp, decode, encode
from llmfoundry_lite.checkpoint.planning import box_of, boxes_of, check_local_tensors, describe_sharding, make_plan
from llmfoundry_lite.checkpoint.restore import enclosing_range, read_tensors
from llmfoundry_lite.checkpoint.save import as_bytes, file_name
from llmfoundry_lite.checkpoint.shards import build_header, write_shard
from llmfoundry_lite.checkpoint.state import DTYPES, local_tensor
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.config.layout import divide_stack
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.training.muon import to_parameter_order

SAVE_ID = "e1-ba1-0123456789ab"


@contextmanager
def rank_of(rank, world_size):
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def part_of(tensor, mesh, placements):
    """This rank's part of a whole tensor, cut as torch.chunk cuts, dimension after dimension."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = list(tensor.chunk(mesh.size(dim), placement.dim))
            empty = tensor.narrow(placement.dim, 0, 0)
            index = mesh.get_local_rank(dim)
            tensor = pieces[index] if index < len(pieces) else empty
    return tensor.contiguous()


def distribute(whole, layouts, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple(f"d{i}" for i in range(len(mesh_shape))))
    tensors = {}
    for name, tensor in whole.items():
        placements = layouts[name]
        if placements is None:
            tensors[name] = tensor.clone()
            continue
        local = part_of(tensor, mesh, placements)
        stride = tensor.stride()
        tensors[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)
    return tensors


def plan_simulated(whole, layouts, mesh_shape, absent=()):
    """Each rank's plan. `absent` are pairs of a rank and a tensor that it does not have."""
    world_size = math.prod(mesh_shape)
    tables = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            tensors = distribute(whole, layouts, mesh_shape)
            check_local_tensors(tensors)
            table = describe_sharding({name: t for name, t in tensors.items() if (rank, name) not in absent})
            same = next((ranks for known, ranks in tables if known == table), None)
            if same is None:
                tables.append((table, [rank]))
            else:
                same.append(rank)
    return [make_plan(tables, rank, world_size) for rank in range(world_size)]


def save_simulated(folder, whole, layouts, mesh_shape, absent=()):
    """Plan for each rank, then write for each rank."""
    plans = plan_simulated(whole, layouts, mesh_shape, absent)
    folder, files = LocalFolder(folder), []
    folder.make(with_parents=True)
    for rank, plan in enumerate(plans):
        with rank_of(rank, len(plans)):
            tensors = distribute(whole, layouts, mesh_shape)
            for box in plan.chunks_to_write.values():
                assert box_of(tensors[box.tensor]) == (box.offset, box.shape)
            pieces = [as_bytes(local_tensor(tensors[box.tensor]).contiguous()) for box in plan.chunks_to_write.values()]
        header = build_header(plan.chunks_to_write, {"save_id": SAVE_ID}, block_bytes=4096)
        files.append(write_shard(folder, file_name(rank), header, pieces, block_bytes=4096))
        assert plan.tensors == plans[0].tensors
    manifest = Manifest(save_id=SAVE_ID, timestamp=Timestamp(batch=1), tensors=plans[0].tensors, files=tuple(files))
    checkpoint = Checkpoint("ba1", folder, decode(encode(manifest), "m"))
    verify_checkpoint(checkpoint)
    return checkpoint, [plan.chunks_to_write for plan in plans]


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
mesh_shapes = st.sampled_from([(1,), (2,), (3,), (4,), (7,), (2, 2), (1, 3), (3, 2), (2, 1)])


@st.composite
def placements_of(draw, shape, mesh_shape):
    if draw(st.integers(0, 4)) == 0:
        return None
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return tuple(draw(st.sampled_from(choices)) for _ in mesh_shape)


@st.composite
def worlds(draw):
    whole = {}
    for i in range(draw(st.integers(1, 4))):
        shape, dtype = draw(shapes), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        count = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        whole[f"model/t{i}"] = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    sides = []
    for _ in range(2):
        mesh_shape = draw(mesh_shapes)
        sides.append((mesh_shape, {n: draw(placements_of(t.shape, mesh_shape)) for n, t in whole.items()}))
    return whole, sides


def by_columns_and_whole(rows):
    """A matrix that two ranks save by columns and one loads whole: what it reads is not in one piece where it goes."""
    layouts = [((2,), {"model/t0": (Shard(1),)}), ((1,), {"model/t0": (Replicate(),)})]
    return {"model/t0": torch.arange(6.0 * rows).reshape(rows, 6)}, layouts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
@example(by_columns_and_whole(5))
def test_any_tensors_survive_any_change_of_mesh_and_sharding(tmp_path_factory, world):
    whole, ((saved_mesh, saved_layouts), (loaded_mesh, loaded_layouts)) = world
    checkpoint, _ = save_simulated(tmp_path_factory.mktemp("save"), whole, saved_layouts, saved_mesh)
    world_size = math.prod(loaded_mesh)
    for rank in range(world_size):
        with rank_of(rank, world_size):
            like = distribute(whole, loaded_layouts, loaded_mesh)
            loaded = read_tensors(checkpoint, like)
            for name, expected in like.items():
                assert same_bits(loaded[name], local_tensor(expected)), (name, rank)


def test_replicated_tensors_are_written_once_and_spread_evenly(tmp_path):
    whole = {f"model/t{i}": torch.randn(64, 8) for i in range(16)}
    layouts = dict.fromkeys(whole, (Replicate(), Shard(0)))
    checkpoint, plans = save_simulated(tmp_path, whole, layouts, (4, 1))
    assert [sum(box.num_bytes for box in plan.values()) for plan in plans] == [4 * 64 * 8 * 4] * 4
    assert sum(t.num_bytes for t in checkpoint.manifest.tensors.values()) == sum(len(p) for p in plans) * 64 * 8 * 4
    layouts = dict.fromkeys(whole, None)
    _, plans = save_simulated(tmp_path / "plain", whole, layouts, (4,))
    assert [len(plan) for plan in plans] == [4, 4, 4, 4]


def test_replicas_share_tensors_of_unlike_sizes_evenly():
    """The largest tensor is placed first, though its name comes last."""
    sizes = {"model/a": 1, "model/b": 1, "model/c": 2}
    whole = {name: torch.zeros(size, 8) for name, size in sizes.items()}
    plans = plan_simulated(whole, dict.fromkeys(whole, None), (2,))
    assert [sum(box.num_bytes for box in plan.chunks_to_write.values()) for plan in plans] == [2 * 8 * 4] * 2


def test_tensors_need_not_be_on_every_rank(tmp_path):
    """Under pipeline parallelism each stage has its own tensors, and two have the embedding."""
    whole = {"model/embed": torch.randn(12, 4), "model/first": torch.randn(6, 4), "model/last": torch.randn(5, 4)}
    layouts = {"model/embed": None, "model/first": None, "model/last": None}
    absent = {(rank, "model/last" if rank < 2 else "model/first") for rank in range(4)}
    checkpoint, plans = save_simulated(tmp_path, whole, layouts, (4,), absent)
    assert list(checkpoint.manifest.tensors) == list(whole)
    where = {box.tensor: rank for rank, boxes in enumerate(plans) for box in boxes.values()}
    assert where["model/first"] in (0, 1) and where["model/last"] in (2, 3)
    loaded = read_tensors(checkpoint, whole)
    assert all(same_bits(loaded[name], whole[name]) for name in whole)


def test_ranks_that_have_drifted_apart_are_refused():
    tables = [({"meshes": [], "tensors": [["model/w", "F32", [n], None, [], None]]}, [n - 3]) for n in (3, 4)]
    with pytest.raises(CheckpointError, match=r"model/w is F32 \[3\] on rank 0 and F32 \[4\] on rank 1"):
        make_plan(tables, 0, 2)


def test_fsdp_over_tensor_parallelism_is_cut_by_tensor_parallelism_first():
    whole = {"model/w": torch.randn(24, 2)}
    placements = {"model/w": (_StridedShard(0, split_factor=2), Shard(0))}
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
            begin = 12 * (rank % 2) + 4 * (rank // 2)
            local = whole["model/w"][begin : begin + 4].clone()
            tensor = DTensor.from_local(
                local, mesh, placements["model/w"], run_check=False, shape=(24, 2), stride=(2, 1)
            )
            check_local_tensors({"model/w": tensor})
            assert box_of(tensor) == ((begin, 0), (4, 2))
            plan = make_plan([(describe_sharding({"model/w": tensor}), list(range(6)))], rank, 6)
            assert [(box.offset, box.shape) for box in plan.chunks_to_write.values()] == [((begin, 0), (4, 2))]
            assert plan.tensors["model/w"].grid == Grid((4,), (0, 2, 4, 1, 3, 5))


def strided(mesh_shape, factor):
    """Eight rows over a mesh, said to be cut with `factor`, and as much of them as a rank has."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("shard", "tensor"))
    placements = (_StridedShard(0, split_factor=factor), Shard(0))
    local = torch.zeros(8 // math.prod(mesh_shape), 2)
    return {"model/w": DTensor.from_local(local, mesh, placements, run_check=False, shape=(8, 2), stride=(2, 1))}


@pytest.mark.parametrize("factor", [3, 4])
def test_a_stride_that_is_not_the_mesh_s_is_refused(factor):
    with (
        rank_of(1, 4),
        pytest.raises(CheckpointError, match=rf"a sharding strided by {factor} on a mesh of \[2, 2\] cannot be saved"),
    ):
        check_local_tensors(strided((2, 2), factor))


def test_a_stride_by_which_torch_cuts_otherwise_is_refused(monkeypatch):
    with rank_of(1, 4):
        check_local_tensors(tensors := strided((2, 2), 2))
        monkeypatch.setattr(planning, "compute_local_shape_and_global_offset", lambda *_: ((2, 2), (2, 0)))
        with pytest.raises(
            CheckpointError, match=r"model/w: this rank holds \(2, 2\) at \(2, 0\) of it, not \(2, 2\) at"
        ):
            check_local_tensors(tensors)


@pytest.mark.parametrize(("shard", "tensor"), [(1, 2), (3, 2), (2, 4)])
def test_a_stack_of_matrices_divided_by_heads_is_saved_in_its_own_rows_order(shard, tensor):
    """q, k and v of grouped heads, one upon the other: every rank's rows are its own, and all rows are some rank's."""
    sizes, world_size = (16, 8, 8), shard * tensor
    runs, whole = divide_stack(sizes, tensor), torch.arange(32)[:, None].expand(32, 3)
    in_order = torch.cat([whole[first : first + count] for first, count in runs])
    assert torch.equal(to_parameter_order(in_order, runs), whole)
    cells = set()
    for rank in range(world_size):
        with rank_of(rank, world_size):
            mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
            strided = [_StridedShard(0, split_factor=tensor), Shard(0)]
            held = in_order.chunk(tensor)[rank % tensor].chunk(shard)[rank // tensor].contiguous()
            weight = DTensor.from_local(held, mesh, strided, run_check=False, shape=(32, 3), stride=(3, 1))
            table = describe_sharding({"model/w": weight}, {"model/w": runs})
            plan = make_plan([(table, list(range(world_size)))], rank, world_size)
            own = boxes_of(weight, runs)
        assert {(box.offset, box.shape) for box in plan.chunks_to_write.values()} == {box[:2] for box in own}
        for (first, *_), (count, *_), at in own:
            assert torch.equal(held[at : at + count], whole[first : first + count])
            cells |= set(range(first, first + count))
    assert cells == set(range(32))


def test_a_few_layouts_describe_many_tensors_on_many_ranks():
    whole = {f"model/t{i}": torch.empty(4096, 64, device="meta") for i in range(50)}
    with rank_of(0, 512):
        mesh = init_device_mesh("cpu", (512,))
        like = {
            n: DTensor.from_local(t[:8], mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride())
            for n, t in whole.items()
        }
        plan = make_plan([(describe_sharding(like), list(range(512)))], 0, 512)
    files = tuple(
        FileRecord(name=file_name(i), num_bytes=1 << 20, block_bytes=4096, header_bytes=4096, digest="0" * 32)
        for i in range(512)
    )
    raw = encode(Manifest(save_id=SAVE_ID, timestamp=Timestamp(batch=1), tensors=plan.tensors, files=files))
    assert {id(record.grid) for record in plan.tensors.values()} == {id(plan.tensors["model/t0"].grid)}
    assert plan.tensors["model/t0"].grid == Grid((8,), (0,), (1,))
    assert len(raw) < 50_000, "a list of all chunks has 1.2 MB"
    assert [file for file, _ in decode(raw, "m").overlapping("model/t7", (15, 0), (10, 64))] == [1, 2, 3]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_and_verifies_only_what_it_needs(tmp_path, rank):
    """That holds at the edges, too, where the neighbouring files begin."""
    whole, shard = {"model/t": torch.randn(64, 4)}, {"model/t": (Shard(0),)}
    checkpoint, _ = save_simulated(tmp_path, whole, shard, (4,))
    for other in {0, 1, 2, 3} - {rank}:
        (tmp_path / file_name(other)).unlink()
    with rank_of(rank, 4):
        like = distribute(whole, shard, (4,))
        assert same_bits(read_tensors(checkpoint, like)["model/t"], local_tensor(like["model/t"]))


@given(st.data())
def test_the_enclosing_range_of_a_box_is_the_shortest_one_that_holds_it(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offset = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (begin, length) in enumerate(zip(offset, lengths, strict=True)):
        numbers = numbers.narrow(dim, begin, length)
    first, count = enclosing_range(shape, offset, lengths)
    assert (first, first + count - 1) == (int(numbers.min()), int(numbers.max()))


BOXES = {(0, 2): [7], (1, 3): [7, 8], (2, 5): [8], (2, 6): [8, 9], (5, 6): [9], (0, 6): [7, 8, 9]}
"""First row and last + 1 -> the files of rows 0-1, 2-4 and 5 that are read."""


def test_chunks_of_uneven_cuts_are_those_that_reach_into_a_box():
    grid = Grid(((2, 5),), (7, 8, 9))
    files = {(at, end): [file for file, _ in grid.overlapping((6, 3), (at, 0), (end - at, 3))] for at, end in BOXES}
    assert files == BOXES
    chunks = [(7, Box((0, 0), (2, 3))), (8, Box((2, 0), (3, 3))), (9, Box((5, 0), (1, 3)))]
    assert all(grid.has((6, 3), file, box) for file, box in chunks)
    others = [(8, chunks[0][1]), (8, Box((4, 0), (1, 3))), (9, Box((5, 0), (1, 2))), (9, Box((6, 0), (1, 3)))]
    others += [(7, Box((0,), (2,))), (9, Box((6, 0), (0, 3))), (7, Box((-1, 0), (2, 3)))]
    assert not any(grid.has((6, 3), file, box) for file, box in others)
    assert not Grid((2,), (0,), (1,)).has((6,), 3, Box((6,), (0,)))
    assert not Grid((2,), (2,), (-1,)).has((6,), 3, Box((-2,), (2,)))
