import itertools
import math

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry_lite.config.layout import DIMENSIONS, Coordinates, Layout, describe_layout, divide_devices
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.parallel.mesh import build_mesh

degrees = st.tuples(*(st.integers(1, 3) for _ in DIMENSIONS)).map(lambda d: Coordinates(*d))
divisor = st.integers(1, 8)


def layout_with(degrees, node_size=1):
    return Layout(**degrees._asdict(), node_size=node_size)


def places(degrees):
    """Every rank's coordinates, in the order of ranks: the last dimension changes fastest."""
    return [Coordinates(*place) for place in itertools.product(*(range(degree) for degree in degrees))]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("NO_SHARD", (6, 1)), ("ZERO_1", (6, 1)), ("FULL_SHARD", (1, 6)), ("HYBRID_SHARD", (1, 6))],
)
def test_ranks_that_divide_samples_are_more_copies_or_more_shares_of_one(strategy, expected):
    """Three data ranks of two ranks each: all have whole copies, or all share one."""
    fsdp = FSDPConfig(sharding_strategy=strategy, data_parallel_shard_degree=3 if strategy == "HYBRID_SHARD" else None)
    parts = divide_devices(fsdp, 12, context=2, tensor=2).of_parameters
    assert (parts.replicate, parts.shard) == expected
    assert (parts.context, parts.tensor, parts.world_size) == (1, 2, 12)


@settings(deadline=None)
@given(degrees)
def test_every_rank_appears_once_and_comes_back_from_its_coordinates(degrees):
    layout = layout_with(degrees)
    assert layout.world_size == math.prod(degrees) == len(places(degrees))
    assert [layout.coordinates(rank) for rank in range(layout.world_size)] == places(degrees)
    assert [layout.rank_at(place) for place in places(degrees)] == list(range(layout.world_size))


@settings(deadline=None)
@given(degrees)
def test_a_group_is_the_ranks_that_differ_in_one_dimension_alone(degrees):
    layout, all_places = layout_with(degrees), places(degrees)
    for (rank, place), name in itertools.product(enumerate(all_places), DIMENSIONS):
        axis = DIMENSIONS.index(name)
        alike = [r for r, p in enumerate(all_places) if p[:axis] + p[axis + 1 :] == place[:axis] + place[axis + 1 :]]
        assert layout.group(rank, name) == alike


@settings(deadline=None)
@given(degrees, divisor)
def test_a_batch_is_shared_out_once_whatever_the_layout(degrees, share):
    layout = layout_with(degrees)
    batch = range(share * layout.num_data_ranks)
    ranks = [layout.data_ranks(rank) for rank in range(layout.world_size)]
    read = [[sample for sample in batch if sample // share == here.rank] for here in ranks]
    assert sorted(itertools.chain(*(rows for rows, here in zip(read, ranks, strict=True) if here.is_counted))) == list(
        batch
    )
    assert all(here.size == layout.num_data_ranks for here in ranks)
    for rank, name in itertools.product(range(layout.world_size), ("pipeline", "context", "tensor")):
        assert {ranks[other].rank for other in layout.group(rank, name)} == {ranks[rank].rank}
    assert sum(here.rank == 0 for here in ranks) == layout.ranks_per_data_rank


@settings(deadline=None)
@given(degrees, st.data())
def test_a_group_spans_nodes_where_its_ranks_lie_in_several(degrees, data):
    world_size = math.prod(degrees)
    node_size = data.draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    layout = layout_with(degrees, node_size)
    for name in DIMENSIONS:
        nodes = [{other // node_size for other in layout.group(rank, name)} for rank in range(world_size)]
        assert layout.spans_nodes(name) == any(len(some) > 1 for some in nodes)


@settings(deadline=None)
@given(
    st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]),
    st.sampled_from([None, 1, 2, 3, 4]),
    st.integers(1, 24),
    st.sampled_from([None, 1, 2, 4, 8]),
    st.integers(1, 4),
)
def test_devices_are_all_used_or_the_launch_is_refused_in_one_line(strategy, degree, world_size, node_size, tensor):
    fsdp = FSDPConfig(sharding_strategy=strategy, data_parallel_shard_degree=degree)
    try:
        layout = divide_devices(fsdp, world_size, node_size, tensor)
    except ConfigError as error:
        shard = (degree or max(1, min(node_size or world_size, world_size) // tensor)) * tensor
        assert world_size % tensor or (strategy == "HYBRID_SHARD" and world_size % shard)
        assert "\n" not in str(error)
        return
    assert layout.world_size == world_size and layout.tensor == tensor
    expected = {"NO_SHARD": 1, "HYBRID_SHARD": degree or layout.shard}.get(strategy, world_size // tensor)
    assert layout.shard == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 6, "tensor": 4}, "tp_config.tensor_parallel_degree: 4 does not divide the 6 devices of this "),
        (
            {"world_size": 6, "node_size": 4},
            "fsdp_config.data_parallel_shard_degree: 4, of one node, does not divide the 6 devices of this launch; "
            "use 1, 2, 3 or 6",
        ),
        (
            {"world_size": 10, "node_size": 5, "tensor": 2},
            "fsdp_config.data_parallel_shard_degree: 2, of one node, does not divide the 5 groups of 2 devices "
            "(tp_config) of this launch; use 1 or 5",
        ),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(options, message):
    with pytest.raises(ConfigError) as error:
        divide_devices(FSDPConfig(sharding_strategy="HYBRID_SHARD"), **options)
    assert str(error.value).startswith(message)


def test_a_copy_is_shared_by_the_data_ranks_that_fit_into_a_node():
    hybrid = FSDPConfig(sharding_strategy="HYBRID_SHARD")
    layout = divide_devices(hybrid, 32, 8, tensor=2, context=2)
    assert (layout.replicate, layout.shard, layout.context, layout.tensor) == (4, 2, 2, 2)
    assert not layout.spans_nodes("shard")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(shard=12),
        Layout(replicate=2, shard=3, tensor=2),
        Layout(shard=3, tensor=4),
        Layout(pipeline=2, replicate=3, tensor=2),
        Layout(pipeline=3, shard=4),
    ],
)
def test_the_mesh_of_torch_has_the_groups_of_the_layout(layout):
    for rank in (0, 7):
        dist.init_process_group("fake", rank=rank, world_size=12, store=FakeStore())
        try:
            mesh = build_mesh(layout, "cpu")
            for name in mesh.mesh_dim_names or ():
                assert dist.get_process_group_ranks(mesh.get_group(name)) == layout.group(rank, name)
        finally:
            dist.destroy_process_group()


def test_a_layout_is_explained_in_a_few_lines():
    assert describe_layout(Layout()) == ["1"]
    assert describe_layout(Layout(shard=8, node_size=8)) == ["8 = 8 shares of a copy (shard)"]
    assert describe_layout(Layout(replicate=2, shard=4, tensor=2, node_size=8)) == [
        "16 in nodes of 8 = 2 copies of the model (replicate) x 4 shares of a copy (shard) x "
        "2 parts of a layer (tensor)",
        "replicate: rank 0 with 8, across nodes",
        "shard: rank 0 with 2, 4, 6, within a node",
        "tensor: rank 0 with 1, within a node",
    ]
