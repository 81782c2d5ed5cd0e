"""Resharding through DCP's planners over random meshes, one simulated rank after the other in this process.

torch's fake process group gives each simulated rank its place in a mesh; only the exchange of plans, which needs live
neighbours, is done by hand.
"""

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry_lite.checkpoint import exchange
from llmfoundry_lite.checkpoint.format import as_bytes
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Timestamp, decode, encode
from llmfoundry_lite.checkpoint.places import LocalPlace
from llmfoundry_lite.checkpoint.planning import StagedPlanner, agree_on_plans, box_of, file_name, layout, tensor_records
from llmfoundry_lite.checkpoint.restore import hull, read_tensors
from llmfoundry_lite.checkpoint.shards import write_shard
from llmfoundry_lite.checkpoint.state import DTYPES, local_part
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint

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


def save_simulated(folder, whole, layouts, mesh_shape):
    """What each rank's plan is, then what each rank writes."""
    world_size = math.prod(mesh_shape)
    boxes = []
    for rank in range(world_size):
        with rank_of(rank, world_size):
            plan = StagedPlanner(distribute(whole, layouts, mesh_shape), rank == 0).create_local_plan()
            boxes.append([box_of(item) for item in plan.items])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "gather_json", lambda mine, group: boxes)
        plans = agree_on_plans(StagedPlanner({}, True), None)
    place, files = LocalPlace(folder), []
    for rank, mine in enumerate(plans):
        with rank_of(rank, world_size):
            tensors = distribute(whole, layouts, mesh_shape)
            header, ranges = layout(mine, SAVE_ID)
            pieces = [as_bytes(local_part(tensors[box.name]).contiguous()) for box, _, _ in ranges]
        files.append(write_shard(place, file_name(rank), [header, *pieces], block_bytes=4096))
    manifest = Manifest(
        save_id=SAVE_ID,
        timestamp=Timestamp(batch=1),
        tensors=tensor_records(plans, SAVE_ID, whole),
        files=tuple(FileRecord(f.name, f.num_bytes, f.algorithm, f.block_bytes, f.block_hashes) for f in files),
    )
    checkpoint = Checkpoint("ba1", place, decode(encode(manifest), "m"))
    verify_checkpoint(checkpoint)
    return checkpoint, plans


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_any_tensors_survive_any_change_of_mesh_and_sharding(tmp_path_factory, world):
    whole, ((saved_mesh, saved_layouts), (loaded_mesh, loaded_layouts)) = world
    checkpoint, _ = save_simulated(tmp_path_factory.mktemp("save"), whole, saved_layouts, saved_mesh)
    world_size = math.prod(loaded_mesh)
    for rank in range(world_size):
        with rank_of(rank, world_size):
            like = distribute(whole, loaded_layouts, loaded_mesh)
            loaded = read_tensors(checkpoint, like)
            for name, expected in like.items():
                assert same_bits(loaded[name], local_part(expected)), (name, rank)


def test_replicated_tensors_are_written_once_and_spread_evenly(tmp_path):
    whole = {f"model/t{i}": torch.randn(64, 8) for i in range(16)}
    layouts = dict.fromkeys(whole, (Replicate(), Shard(0)))
    checkpoint, plans = save_simulated(tmp_path, whole, layouts, (4, 1))
    assert [sum(box.entry.num_bytes for box in plan) for plan in plans] == [4 * 64 * 8 * 4] * 4
    assert sum(t.num_bytes for t in checkpoint.manifest.tensors.values()) == sum(len(p) for p in plans) * 64 * 8 * 4
    layouts = dict.fromkeys(whole, None)
    _, plans = save_simulated(tmp_path / "plain", whole, layouts, (4,))
    assert [len(plan) for plan in plans] == [4, 4, 4, 4]


def test_a_rank_reads_and_verifies_only_what_it_needs(tmp_path):
    whole = {"model/t": torch.randn(4096, 64)}
    shard = {"model/t": (Shard(0),)}
    checkpoint, _ = save_simulated(tmp_path, whole, shard, (2,))
    (tmp_path / file_name(1)).unlink()
    with rank_of(0, 3):
        like = distribute(whole, shard, (3,))
        assert same_bits(read_tensors(checkpoint, like)["model/t"], local_part(like["model/t"]))


@given(st.data())
def test_the_hull_of_a_box_is_the_run_that_holds_it(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offset = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (begin, length) in enumerate(zip(offset, lengths, strict=True)):
        numbers = numbers.narrow(dim, begin, length)
    first, count = hull(shape, offset, lengths)
    assert (first, first + count - 1) == (int(numbers.min()), int(numbers.max()))
