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
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Timestamp
from llmfoundry_lite.checkpoint.manifest_json import decode, encode
from llmfoundry_lite.checkpoint.planning import box_of, boxes_of, check_local_tensors, describe_sharding, make_plan
from llmfoundry_lite.checkpoint.restore import enclosing_range, read_tensors
from llmfoundry_lite.checkpoint.save import file_name
from llmfoundry_lite.checkpoint.shards import build_header, write_shard
from llmfoundry_lite.checkpoint.staging import as_bytes
from llmfoundry_lite.checkpoint.state import DTYPES, local_tensor
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.config.layout import divide_stack
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.training.muon import to_parameter_order

SAVE_ID = "e1-ba1-0123456789ab"
BLOCK_BYTES = 4096
FP32_BYTES = 4


# ------------------------------------------------------------------------------------------------ simulated ranks


@contextmanager
def simulated_rank(rank, world_size):
    """Inside, `torch.distributed` takes this process for the given rank. Nothing can be exchanged."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def part_of(tensor, mesh, placements):
    """This rank's part of a whole tensor, cut as torch.chunk cuts, dimension after dimension."""
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        pieces = tensor.chunk(mesh.size(mesh_dim), placement.dim)
        index = mesh.get_local_rank(mesh_dim)
        if index < len(pieces):
            tensor = pieces[index]
        else:  # there are fewer pieces than ranks
            tensor = tensor.narrow(placement.dim, 0, 0)
    return tensor.contiguous()


def as_dtensor(local, mesh, placements, shape):
    """A DTensor of the given whole shape, of which this rank holds `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def distribute(whole_tensors, layouts, mesh_shape):
    """This rank's tensors: DTensors, or whole copies where the layout is None.

    layouts: tensor name -> a placement for each dimension of the mesh, or None.
    """
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple(f"d{i}" for i in range(len(mesh_shape))))
    tensors = {}
    for name, whole in whole_tensors.items():
        placements = layouts[name]
        if placements is None:
            tensors[name] = whole.clone()
        else:
            tensors[name] = as_dtensor(part_of(whole, mesh, placements), mesh, placements, whole.shape)
    return tensors


def plan_simulated(whole_tensors, layouts, mesh_shape, absent=()):
    """Each rank's plan. `absent` are pairs of a rank and the name of a tensor that it does not have."""
    world_size = math.prod(mesh_shape)
    tables = []  # of pairs: what describe_sharding returns, and the ranks for which it is the same
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            tensors = distribute(whole_tensors, layouts, mesh_shape)
            check_local_tensors(tensors)
            present = {name: tensor for name, tensor in tensors.items() if (rank, name) not in absent}
            table = describe_sharding(present)

        for known_table, ranks in tables:
            if known_table == table:
                ranks.append(rank)
                break
        else:
            tables.append((table, [rank]))
    return [make_plan(tables, rank, world_size) for rank in range(world_size)]


def save_simulated(path, whole_tensors, layouts, mesh_shape, absent=()):
    """Plan for each rank, then write for each rank. Return the checkpoint, and for each rank the chunks it wrote."""
    plans = plan_simulated(whole_tensors, layouts, mesh_shape, absent)
    folder = LocalFolder(path)
    folder.make(with_parents=True)
    files = []
    for rank, plan in enumerate(plans):
        assert plan.tensors == plans[0].tensors, "every rank plans the same manifest"
        pieces = []
        with simulated_rank(rank, len(plans)):
            tensors = distribute(whole_tensors, layouts, mesh_shape)
            for chunk in plan.chunks_to_write.values():
                tensor = tensors[chunk.tensor]
                assert box_of(tensor) == (chunk.offset, chunk.shape)
                pieces.append(as_bytes(local_tensor(tensor).contiguous()))
        header = build_header(plan.chunks_to_write, {"save_id": SAVE_ID}, block_bytes=BLOCK_BYTES)
        files.append(write_shard(folder, file_name(rank), header, pieces, block_bytes=BLOCK_BYTES))

    manifest = Manifest(save_id=SAVE_ID, timestamp=Timestamp(batch=1), tensors=plans[0].tensors, files=tuple(files))
    checkpoint = Checkpoint("ba1", folder, decode(encode(manifest), "m"))
    verify_checkpoint(checkpoint)
    return checkpoint, [plan.chunks_to_write for plan in plans]


def assert_same_bits(loaded, expected, name):
    """NaNs are equal if their bits are."""
    assert loaded.dtype == expected.dtype, name
    assert loaded.shape == expected.shape, name
    loaded_bytes, expected_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (loaded, expected))
    assert torch.equal(loaded_bytes, expected_bytes), name


def bytes_written(chunks):
    return sum(chunk.num_bytes for chunk in chunks.values())


# ------------------------------------------------------------------------------------- any mesh, any sharding


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
mesh_shapes = st.sampled_from([(1,), (2,), (3,), (4,), (7,), (2, 2), (1, 3), (3, 2), (2, 1)])


@st.composite
def placements_of(draw, shape, mesh_shape):
    """A placement for each dimension of the mesh; for one tensor in five None, which is a whole copy on each rank."""
    if draw(st.integers(0, 4)) == 0:
        return None
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    return tuple(draw(st.sampled_from(choices)) for _ in mesh_shape)


@st.composite
def tensors_of_random_bits(draw):
    """Tensor name -> tensor: one to four of any dtype and shape, empty ones too."""
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            tensors[f"model/t{i}"] = torch.empty(shape, dtype=dtype)
            continue
        end = 2 if dtype == torch.bool else 256  # a bool's byte is 0 or 1
        raw = torch.randint(0, end, (num_bytes,), dtype=torch.uint8)
        tensors[f"model/t{i}"] = raw.view(dtype).reshape(shape)
    return tensors


@st.composite
def reshardings(draw):
    """Tensors, then the (mesh shape, layouts) with which they are saved, and those with which they are loaded."""
    whole_tensors = draw(tensors_of_random_bits())
    sides = []
    for _ in ("saved", "loaded"):
        mesh_shape = draw(mesh_shapes)
        layouts = {name: draw(placements_of(tensor.shape, mesh_shape)) for name, tensor in whole_tensors.items()}
        sides.append((mesh_shape, layouts))
    saved, loaded = sides
    return whole_tensors, saved, loaded


def from_columns_to_whole(num_rows):
    """A matrix that two ranks save by columns and one rank loads whole: the bytes of a file are not in one piece in
    the loaded tensor."""
    saved = ((2,), {"model/t0": (Shard(1),)})
    loaded = ((1,), {"model/t0": (Replicate(),)})
    return {"model/t0": torch.arange(6.0 * num_rows).reshape(num_rows, 6)}, saved, loaded


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reshardings())
@example(from_columns_to_whole(num_rows=5))
def test_any_tensors_survive_any_change_of_mesh_and_sharding(tmp_path_factory, resharding):
    whole_tensors, (saved_mesh, saved_layouts), (loaded_mesh, loaded_layouts) = resharding
    checkpoint, _ = save_simulated(tmp_path_factory.mktemp("save"), whole_tensors, saved_layouts, saved_mesh)

    world_size = math.prod(loaded_mesh)
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            expected = distribute(whole_tensors, loaded_layouts, loaded_mesh)
            loaded = read_tensors(checkpoint, expected)
            for name in whole_tensors:
                assert_same_bits(loaded[name], local_tensor(expected[name]), f"{name} on rank {rank}")


# --------------------------------------------------------------------------------------------- who writes what


def test_replicated_tensors_are_written_once_and_spread_evenly(tmp_path):
    whole_tensors = {f"model/t{i}": torch.randn(64, 8) for i in range(16)}
    tensor_bytes = 64 * 8 * FP32_BYTES
    layouts = dict.fromkeys(whole_tensors, (Replicate(), Shard(0)))
    checkpoint, chunks_by_rank = save_simulated(tmp_path, whole_tensors, layouts, (4, 1))

    assert [len(chunks) for chunks in chunks_by_rank] == [4, 4, 4, 4]
    assert [bytes_written(chunks) for chunks in chunks_by_rank] == [4 * tensor_bytes] * 4
    manifest_bytes = sum(record.num_bytes for record in checkpoint.manifest.tensors.values())
    assert manifest_bytes == 16 * tensor_bytes


def test_plain_tensors_are_written_once_and_spread_evenly(tmp_path):
    """Tensors that are not DTensors count as a copy on each rank."""
    whole_tensors = {f"model/t{i}": torch.randn(64, 8) for i in range(16)}
    _, chunks_by_rank = save_simulated(tmp_path, whole_tensors, dict.fromkeys(whole_tensors), (4,))
    assert [len(chunks) for chunks in chunks_by_rank] == [4, 4, 4, 4]


def test_replicas_share_tensors_of_unlike_sizes_evenly():
    """The largest tensor is placed first, though its name comes last."""
    num_rows = {"model/a": 1, "model/b": 1, "model/c": 2}
    whole_tensors = {name: torch.zeros(rows, 8) for name, rows in num_rows.items()}
    plans = plan_simulated(whole_tensors, dict.fromkeys(whole_tensors), (2,))
    assert [bytes_written(plan.chunks_to_write) for plan in plans] == [2 * 8 * FP32_BYTES] * 2


def test_tensors_need_not_be_on_every_rank(tmp_path):
    """Two stages of two ranks, as under pipeline parallelism: each has its own tensor, and both the embedding."""
    whole_tensors = {
        "model/embed": torch.randn(12, 4),
        "model/first": torch.randn(6, 4),
        "model/last": torch.randn(5, 4),
    }
    absent = {(0, "model/last"), (1, "model/last"), (2, "model/first"), (3, "model/first")}
    checkpoint, chunks_by_rank = save_simulated(tmp_path, whole_tensors, dict.fromkeys(whole_tensors), (4,), absent)

    assert list(checkpoint.manifest.tensors) == list(whole_tensors)
    writers = {}
    for rank, chunks in enumerate(chunks_by_rank):
        for chunk in chunks.values():
            writers[chunk.tensor] = rank
    assert writers["model/first"] in (0, 1)
    assert writers["model/last"] in (2, 3)
    loaded = read_tensors(checkpoint, whole_tensors)
    for name, whole in whole_tensors.items():
        assert_same_bits(loaded[name], whole, name)


def test_ranks_that_have_drifted_apart_are_refused():
    """Rank 0 has three elements of a weight, rank 1 has four."""

    def table_with(num_elements):
        return {"meshes": [], "tensors": [["model/w", "F32", [num_elements], None, [], None]]}

    tables = [(table_with(3), [0]), (table_with(4), [1])]
    with pytest.raises(CheckpointError, match=r"model/w is F32 \[3\] on rank 0 and F32 \[4\] on rank 1"):
        make_plan(tables, 0, 2)


# ------------------------------------------------------------------------------ FSDP over tensor parallelism


def mesh_of_shards_and_tensor(shard, tensor):
    return init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))


def shards_of_tensor_parallel_rows(split_factor):
    """The placements of a weight whose rows tensor parallelism divides first, and FSDP divides again."""
    return (_StridedShard(0, split_factor=split_factor), Shard(0))


def test_fsdp_over_tensor_parallelism_is_cut_by_tensor_parallelism_first():
    """24 rows on 3 shards x 2 tensor ranks: the tensor rank chooses a half, the shard 4 rows of that half."""
    whole = torch.randn(24, 2)
    for rank in range(6):
        shard_rank, tensor_rank = divmod(rank, 2)
        first_row = 12 * tensor_rank + 4 * shard_rank
        with simulated_rank(rank, 6):
            mesh = mesh_of_shards_and_tensor(3, 2)
            local = whole[first_row : first_row + 4].clone()
            weight = as_dtensor(local, mesh, shards_of_tensor_parallel_rows(2), whole.shape)
            check_local_tensors({"model/w": weight})
            plan = make_plan([(describe_sharding({"model/w": weight}), list(range(6)))], rank, 6)

            assert box_of(weight) == ((first_row, 0), (4, 2))
            (chunk,) = plan.chunks_to_write.values()
            assert (chunk.offset, chunk.shape) == ((first_row, 0), (4, 2))
            # In the order of rows: the first half is on ranks 0, 2 and 4, the second on 1, 3 and 5.
            assert plan.tensors["model/w"].grid == Grid(chunks=(4,), files=(0, 2, 4, 1, 3, 5))


def eight_rows_split_by(split_factor):
    """A weight of eight rows on a mesh of 2 x 2 whose placement says `split_factor`, where 2 would be right."""
    local = torch.zeros(2, 2)
    mesh = mesh_of_shards_and_tensor(2, 2)
    return {"model/w": as_dtensor(local, mesh, shards_of_tensor_parallel_rows(split_factor), (8, 2))}


@pytest.mark.parametrize("split_factor", [3, 4])
def test_a_stride_that_is_not_the_mesh_s_is_refused(split_factor):
    message = rf"a sharding strided by {split_factor} on a mesh of \[2, 2\] cannot be saved"
    with simulated_rank(1, 4), pytest.raises(CheckpointError, match=message):
        check_local_tensors(eight_rows_split_by(split_factor))


def test_a_stride_by_which_torch_cuts_otherwise_is_refused(monkeypatch):
    """Another release of torch may place the rows of a strided sharding elsewhere than this code does."""
    message = r"model/w: this rank holds \(2, 2\) at \(2, 0\) of it, not \(2, 2\) at"
    with simulated_rank(1, 4):
        tensors = eight_rows_split_by(2)
        check_local_tensors(tensors)
        monkeypatch.setattr(planning, "compute_local_shape_and_global_offset", lambda *_: ((2, 2), (2, 0)))
        with pytest.raises(CheckpointError, match=message):
            check_local_tensors(tensors)


Q_K_V_ROWS = (16, 8, 8)
"""Heights of the matrices of grouped heads that are stacked in one weight of 32 rows."""


@pytest.mark.parametrize("tensor", [2, 4])
def test_rows_in_the_order_of_ranks_go_back_to_the_order_of_the_weight(tensor):
    whole = torch.arange(32)[:, None].expand(32, 3)
    runs = divide_stack(Q_K_V_ROWS, tensor)
    in_rank_order = torch.cat([whole[first : first + count] for first, count in runs])
    assert torch.equal(to_parameter_order(in_rank_order, runs), whole)


@pytest.mark.parametrize(("shard", "tensor"), [(1, 2), (3, 2), (2, 4)])
def test_stacked_matrices_divided_by_heads_are_saved_in_the_order_of_rows(shard, tensor):
    """Each rank writes the rows that it holds under their places in the whole weight, and every row is some rank's."""
    world_size = shard * tensor
    whole = torch.arange(32)[:, None].expand(32, 3)
    runs = divide_stack(Q_K_V_ROWS, tensor)
    in_rank_order = torch.cat([whole[first : first + count] for first, count in runs])

    written_rows = set()
    for rank in range(world_size):
        shard_rank, tensor_rank = divmod(rank, tensor)
        held = in_rank_order.chunk(tensor)[tensor_rank].chunk(shard)[shard_rank].contiguous()
        with simulated_rank(rank, world_size):
            mesh = mesh_of_shards_and_tensor(shard, tensor)
            weight = as_dtensor(held, mesh, shards_of_tensor_parallel_rows(tensor), (32, 3))
            table = describe_sharding({"model/w": weight}, {"model/w": runs})
            plan = make_plan([(table, list(range(world_size)))], rank, world_size)
            boxes = boxes_of(weight, runs)

        chunks = {(chunk.offset, chunk.shape) for chunk in plan.chunks_to_write.values()}
        assert chunks == {(offset, lengths) for offset, lengths, _ in boxes}
        for (first_row, _), (num_rows, _), first_held_row in boxes:
            rows = held[first_held_row : first_held_row + num_rows]
            assert torch.equal(rows, whole[first_row : first_row + num_rows])
            written_rows.update(range(first_row, first_row + num_rows))
    assert written_rows == set(range(32))


# -------------------------------------------------------------------------------------- manifests and ranges


@pytest.fixture(scope="module")
def manifest_of_512_ranks():
    """50 matrices of 4,096 rows, each on 512 ranks with 8 rows in a file."""
    num_ranks = 512
    whole_tensors = {f"model/t{i}": torch.empty(4096, 64, device="meta") for i in range(50)}
    with simulated_rank(0, num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))
        tensors = {name: as_dtensor(whole[:8], mesh, [Shard(0)], whole.shape) for name, whole in whole_tensors.items()}
        plan = make_plan([(describe_sharding(tensors), list(range(num_ranks)))], 0, num_ranks)
    sizes = {"num_bytes": 1 << 20, "block_bytes": BLOCK_BYTES, "header_bytes": 4096}
    files = tuple(FileRecord(name=file_name(rank), digest="0" * 32, **sizes) for rank in range(num_ranks))
    return Manifest(save_id=SAVE_ID, timestamp=Timestamp(batch=1), tensors=plan.tensors, files=files)


def test_tensors_that_are_cut_alike_share_a_grid(manifest_of_512_ranks):
    grids = [record.grid for record in manifest_of_512_ranks.tensors.values()]
    assert all(grid is grids[0] for grid in grids)
    assert grids[0] == Grid(chunks=(8,), files=(0,), strides=(1,))


def test_a_few_layouts_describe_many_tensors_on_many_ranks(manifest_of_512_ranks):
    raw = encode(manifest_of_512_ranks)
    assert len(raw) < 50_000, "a list of all chunks has 1.2 MB"


def test_a_manifest_read_again_says_which_files_have_a_tensors_rows(manifest_of_512_ranks):
    """Rows 15 to 24: the last of file 1, all of file 2, and the first of file 3."""
    manifest = decode(encode(manifest_of_512_ranks), "m")
    files = [file for file, _ in manifest.overlapping("model/t7", (15, 0), (10, 64))]
    assert files == [1, 2, 3]


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_reads_and_verifies_only_what_it_needs(tmp_path, rank):
    """The other ranks' files are gone. That holds at the edges, too, where the neighbouring files begin."""
    whole_tensors = {"model/t": torch.randn(64, 4)}
    layouts = {"model/t": (Shard(0),)}
    checkpoint, _ = save_simulated(tmp_path, whole_tensors, layouts, (4,))
    for other_rank in {0, 1, 2, 3} - {rank}:
        (tmp_path / file_name(other_rank)).unlink()

    with simulated_rank(rank, 4):
        expected = distribute(whole_tensors, layouts, (4,))
        loaded = read_tensors(checkpoint, expected)
        assert_same_bits(loaded["model/t"], local_tensor(expected["model/t"]), "model/t")


@given(st.data())
def test_the_enclosing_range_of_a_box_is_the_shortest_one_that_holds_it(data):
    """Beside a tensor whose elements are their own places in memory."""
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    offset = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = [data.draw(st.integers(1, size - begin)) for size, begin in zip(shape, offset, strict=True)]
    box = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (begin, length) in enumerate(zip(offset, lengths, strict=True)):
        box = box.narrow(dim, begin, length)

    first, count = enclosing_range(shape, offset, lengths)
    assert first == int(box.min())
    assert first + count - 1 == int(box.max())


# --------------------------------------------------------------------------------------------- uneven chunks


UNEVEN_SHAPE = (6, 3)
UNEVEN = Grid(chunks=((2, 5),), files=(7, 8, 9))
"""Rows 0 and 1 are in file 7, rows 2 to 4 in file 8, and row 5 in file 9."""


@pytest.mark.parametrize(
    ("first_row", "end_row", "files"),
    [(0, 2, [7]), (1, 3, [7, 8]), (2, 5, [8]), (2, 6, [8, 9]), (5, 6, [9]), (0, 6, [7, 8, 9])],
)
def test_chunks_of_uneven_cuts_are_those_that_reach_into_a_box(first_row, end_row, files):
    overlapping = UNEVEN.overlapping(UNEVEN_SHAPE, (first_row, 0), (end_row - first_row, 3))
    assert [file for file, _ in overlapping] == files


@pytest.mark.parametrize(
    ("file", "chunk"),
    [(7, Box((0, 0), (2, 3))), (8, Box((2, 0), (3, 3))), (9, Box((5, 0), (1, 3)))],
)
def test_a_grid_has_its_chunks_in_their_files(file, chunk):
    assert UNEVEN.has(UNEVEN_SHAPE, file, chunk)


@pytest.mark.parametrize(
    ("file", "box"),
    [
        pytest.param(8, Box((0, 0), (2, 3)), id="the chunk of another file"),
        pytest.param(8, Box((4, 0), (1, 3)), id="a part of a chunk"),
        pytest.param(9, Box((5, 0), (1, 2)), id="too few columns"),
        pytest.param(9, Box((6, 0), (1, 3)), id="beyond the last row"),
        pytest.param(9, Box((6, 0), (0, 3)), id="no row"),
        pytest.param(7, Box((0,), (2,)), id="one dimension"),
        pytest.param(7, Box((-1, 0), (2, 3)), id="before the first row"),
    ],
)
def test_a_grid_has_no_other_boxes(file, box):
    assert not UNEVEN.has(UNEVEN_SHAPE, file, box)


def test_a_grid_of_even_cuts_has_no_box_outside_the_tensor():
    assert not Grid(chunks=(2,), files=(0,), strides=(1,)).has((6,), 3, Box((6,), (0,)))
    assert not Grid(chunks=(2,), files=(2,), strides=(-1,)).has((6,), 3, Box((-2,), (2,)))
