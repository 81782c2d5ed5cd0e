"""The layout of a launch: how its devices are divided into five dimensions of parallelism.

`layout_of` derives the `Layout` from the configuration and the number of devices, and refuses degrees that do not
divide them. The layout tells for each rank which part of the model it holds, and which samples it sees. For example, 16
devices with tensor_parallel_degree 2 and HYBRID_SHARD over 4 are 2 copies x 4 shards x 2 parts of each layer:

    Layout(replicate=2, shard=4, tensor=2)        rank 5 = Coordinates(0, 0, 2, 0, 1)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from llmfoundry_lite.config.model_schema import divisors
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError, join_with_or
from llmfoundry_lite.ranks.rank import this_rank


class Coordinates(NamedTuple):
    """Index of a rank in each dimension of the layout. The last dimension changes fastest from rank to rank."""

    pipeline: int
    """Stage: which consecutive blocks of the model the rank computes."""
    replicate: int
    """Which copy of the model the rank has a part of."""
    shard: int
    """Which shard of that copy's parameters the rank stores."""
    context: int
    """Which part of each sample's tokens the rank computes."""
    tensor: int
    """Which part of each layer the rank computes. These are neighbouring ranks, because they exchange the most."""


DIMENSIONS = Coordinates._fields
MAX_RANKS_LISTED = 4
"""Most other ranks of a group that the description of a layout lists in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """Position of a process among the readers of data. Ranks that see the same samples have the same data rank."""

    rank: int
    """Data rank of this process."""
    size: int
    """Number of data ranks, which divide each global batch."""
    is_counted: bool
    """Whether this process reports for its data rank, so that its samples count once."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that reports for data rank 0."""
        return self.is_counted and self.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Number of ranks along each dimension. The world size is pipeline x replicate x shard x context x tensor."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    node_size: int = 1
    """Devices of each node."""
    has_whole_copies: bool = False
    """Whether each rank of a context group has a copy of the model (NO_SHARD, ZERO_1), instead of a shard of one."""

    @property
    def degrees(self) -> Coordinates:
        """Number of ranks in a group of each dimension."""
        return Coordinates(*(getattr(self, name) for name in DIMENSIONS))

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self.degrees)

    @property
    def of_parameters(self) -> "Layout":
        """The layout as the parameters see it, in which the context dimension is 1.

        The ranks of a context group use the same parameters for different tokens. They count as further shards of a
        copy of the model, or as further copies if each rank has a whole one: shard=4 and context=2 become shard=8.
        """
        dimension = "replicate" if self.has_whole_copies else "shard"
        degree = getattr(self, dimension) * self.context
        return replace(self, context=1, **{dimension: degree})

    @property
    def num_data_ranks(self) -> int:
        """Number of parts into which a global batch is divided: one for each copy's shard."""
        return self.replicate * self.shard

    @property
    def ranks_per_data_rank(self) -> int:
        """Number of ranks that see the same samples."""
        return self.world_size // self.num_data_ranks

    def coordinates(self, rank: int) -> Coordinates:
        """Return the index of a rank in each dimension. `rank_at` is the inverse.

        The rank is a number whose digits have the dimensions' degrees as bases, the innermost dimension last.
        """
        indices_from_innermost = []
        remaining = rank
        for degree in reversed(self.degrees):
            remaining, index = divmod(remaining, degree)
            indices_from_innermost.append(index)
        return Coordinates(*reversed(indices_from_innermost))

    def rank_at(self, coordinates: Coordinates) -> int:
        """Return the rank that has these indices in the layout's dimensions."""
        rank = 0
        for degree, index in zip(self.degrees, coordinates, strict=True):
            rank = rank * degree + index
        return rank

    def group(self, rank: int, dimension: str) -> list[int]:
        """Return the ranks of the group along a dimension that `rank` belongs to, itself included, in ascending order.

        Their coordinates differ only in this dimension. With shard=4 and tensor=2, the shard group of rank 3 is
        [1, 3, 5, 7], and its tensor group is [2, 3].
        """
        coordinates = self.coordinates(rank)
        degree = getattr(self, dimension)
        return [self.rank_at(coordinates._replace(**{dimension: index})) for index in range(degree)]

    def spans_nodes(self, dimension: str) -> bool:
        """Return whether the groups of a dimension extend across nodes, whose devices have slower links.

        A group and the groups of the dimensions inside it are a block of consecutive ranks, as many as the product of
        their degrees. All blocks lie within nodes if the size of a node is a multiple of that.
        """
        if self.world_size <= self.node_size or getattr(self, dimension) == 1:
            return False
        degrees_from_this = self.degrees[DIMENSIONS.index(dimension) :]
        num_consecutive_ranks = math.prod(degrees_from_this)
        return self.node_size % num_consecutive_ranks != 0

    def data_ranks(self, rank: int) -> DataRanks:
        """Return which samples a rank reads, and whether it is the first of the ranks that read the same ones."""
        coordinates = self.coordinates(rank)
        is_first_with_samples = coordinates.pipeline == coordinates.context == coordinates.tensor == 0
        return DataRanks(
            rank=coordinates.replicate * self.shard + coordinates.shard,
            size=self.num_data_ranks,
            is_counted=is_first_with_samples,
        )


DEGREE_KEYS = {
    "tensor": "tp_config.tensor_parallel_degree",
    "context": "cp_config.context_parallel_degree",
    "pipeline": "pp_config.pipeline_parallel_degree",
}
"""Dimension -> key of its degree, for dimensions whose ranks see the same samples, from the innermost on."""


def divide_devices(
    fsdp: FSDPConfig,
    world_size: int,
    node_size: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> Layout:
    """Divide `world_size` devices into the dimensions of a layout. Each node has `node_size` of them, by default all.

    `tensor`, `pipeline` and `context` are the numbers of devices that divide each layer, the model's blocks, and each
    sample. The other two dimensions divide the rest of the devices, the data ranks, by the sharding strategy:

    - NO_SHARD and ZERO_1: each data rank holds a copy of the model (shard is 1).
    - HYBRID_SHARD: data_parallel_shard_degree data ranks share a copy, by default those of a node.
    - Others: all data ranks share one copy (replicate is 1).

    Raises ConfigError for degrees that do not divide the devices.
    """
    # Check the degrees from the innermost dimension outwards, so that the error names the first that does not fit.
    node_size = min(node_size or world_size, world_size)
    degrees = {"tensor": tensor, "context": context, "pipeline": pipeline}
    checked_degrees: dict[str, int] = {}
    for dimension, degree in degrees.items():
        group_size = math.prod(checked_degrees.values())
        if world_size % (group_size * degree):
            raise ConfigError(
                f"{DEGREE_KEYS[dimension]}: {degree} does not divide the {world_size // group_size} "
                f"{_describe_groups(checked_degrees)} of this launch; start a multiple of {group_size * degree}, or "
                "change the degree"
            )
        checked_degrees[dimension] = degree

    # Divide the data ranks into copies of the model and shards of each copy.
    num_data_ranks = world_size // math.prod(degrees.values())
    has_whole_copies = fsdp.sharding_strategy in ("NO_SHARD", "ZERO_1")
    if has_whole_copies:
        shard = 1
    elif fsdp.sharding_strategy == "HYBRID_SHARD":
        data_ranks_in_node = max(1, min(num_data_ranks, node_size // (tensor * context)))
        shard = fsdp.data_parallel_shard_degree or data_ranks_in_node
    else:
        shard = num_data_ranks
    if num_data_ranks % shard:
        origin = "" if fsdp.data_parallel_shard_degree else ", of one node,"
        raise ConfigError(
            f"fsdp_config.data_parallel_shard_degree: {shard}{origin} does not divide the {num_data_ranks} "
            f"{_describe_groups(degrees)} of this launch; use {join_with_or(divisors(num_data_ranks))}"
        )
    return Layout(
        replicate=num_data_ranks // shard,
        shard=shard,
        node_size=node_size,
        has_whole_copies=has_whole_copies,
        **degrees,
    )


def layout_of(config: TrainConfig, world_size: int, node_size: int | None = None) -> Layout:
    """Return the layout in which `world_size` devices train a run. Each node has `node_size` of them, by default all.

    Raises ConfigError for degrees that do not divide the devices.
    """
    return divide_devices(
        config.sharding,
        world_size,
        node_size,
        tensor=config.tensor_parallel_degree,
        context=config.context.context_parallel_degree,
        pipeline=config.pipeline.pipeline_parallel_degree,
    )


def find_data_ranks(config: TrainConfig, microbatch_size: int | None = None) -> list[int]:
    """Return all numbers of data ranks that can divide a global batch evenly, ascending.

    A batch of 6 samples can be divided among [1, 2, 3, 6] data ranks, and among [1, 3] in microbatches of 2 samples.

    With `microbatch_size`, each data rank must have whole microbatches of that many samples, and a pipeline must be
    able to run the number of microbatches that this gives. If the configuration has a data_parallel_shard_degree, only
    multiples of it are returned.
    """
    batch_size = config.global_train_batch_size
    shard_degree = config.sharding.data_parallel_shard_degree or 1
    has_pipeline = config.pipeline.pipeline_parallel_degree > 1
    fitting_numbers = []
    for num_data_ranks in divisors(batch_size):
        if num_data_ranks % shard_degree:
            continue
        if microbatch_size is not None:
            num_microbatches, num_left_over = divmod(batch_size // num_data_ranks, microbatch_size)
            if num_left_over:
                continue
            if has_pipeline and not config.pipeline.takes_microbatches(num_microbatches):
                continue
        fitting_numbers.append(num_data_ranks)
    return fitting_numbers


def layout_here(config: TrainConfig) -> Layout:
    """Return the layout of the launch to which this process belongs. Raises ConfigError, like `layout_of`."""
    process = this_rank()
    return layout_of(config, process.world_size, process.local_world_size)


RowRanges = Sequence[Sequence[int]]
"""Ranges of a matrix's rows, each (first row, number of rows), in the order of a tensor group's ranks."""


def divide_stack(sizes: Sequence[int], tensor: int) -> RowRanges:
    """Divide a stack of matrices, such as q, k and v, between `tensor` ranks, so that each gets a part of every matrix.

    `sizes` are the numbers of rows of the matrices, each a multiple of `tensor`. Returns (first row, number of rows) in
    the stack for each rank and each matrix, rank by rank.

    >>> divide_stack([8, 4, 4], tensor=2)
    [(0, 4), (8, 2), (12, 2), (4, 4), (10, 2), (14, 2)]
    """
    ranges = []
    for rank in range(tensor):
        first_row_of_matrix = 0
        for size in sizes:
            num_rows = size // tensor
            ranges.append((first_row_of_matrix + rank * num_rows, num_rows))
            first_row_of_matrix += size
    return ranges


def ranges_between(ranges: RowRanges, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return which rows of a matrix are at the positions `begin` to `end` when its rows are in the order of `ranges`.

    Each item is (first row in the matrix, number of rows, offset of the first row from `begin`).

    >>> ranges_between([(0, 4), (8, 2)], 3, 6)  # the order is rows 0, 1, 2, 3, 8, 9
    [(3, 1, 0), (8, 2, 1)]
    """
    parts = []
    range_begin = 0  # position of the first row of a range
    for first_row, num_rows in ranges:
        range_end = range_begin + num_rows
        overlap_begin = max(begin, range_begin)
        overlap_end = min(end, range_end)
        if overlap_begin < overlap_end:
            first_common_row = first_row + overlap_begin - range_begin
            parts.append((first_common_row, overlap_end - overlap_begin, overlap_begin - begin))
        range_begin = range_end
    return parts


# ----------------------------------------------------------------------------------------------- in words


def _describe_groups(degrees: Mapping[str, int]) -> str:
    """Return, for a message, what divides a batch: `devices`, or groups of devices that see the same samples.

    `degrees` maps each dimension of a group to its degree. {"tensor": 2, "context": 4} gives
    `groups of 8 devices (cp_config, tp_config)`.
    """
    divided_dimensions = [name for name, degree in degrees.items() if degree > 1]
    blocks = [DEGREE_KEYS[name].partition(".")[0] for name in divided_dimensions]
    if not blocks:
        return "devices"
    return f"groups of {math.prod(degrees.values())} devices ({', '.join(reversed(blocks))})"


def describe_data_ranks(layout: Layout) -> str:
    """Return, for a message, what divides a batch in this layout: `devices`, or `groups of 2 devices (tp_config)`."""
    degrees = {name: getattr(layout, name) for name in DEGREE_KEYS}
    return _describe_groups(degrees)


WORDS = {
    "pipeline": "stages of blocks",
    "replicate": "copies of the model",
    "shard": "shares of a copy",
    "context": "parts of a sample",
    "tensor": "parts of a layer",
}


def describe_layout(layout: Layout) -> list[str]:
    """Describe a layout in lines for a dry run.

    For 4 shards and 2 parts of each layer on one node, the lines are:

        8 = 4 shares of a copy (shard) x 2 parts of a layer (tensor)
        shard: rank 0 with 2, 4, 6, within a node
        tensor: rank 0 with 1, within a node

    The lines about groups are left out if at most one dimension has several ranks.
    """
    # The number of devices as a product of the dimensions.
    dimensions = [name for name in WORDS if getattr(layout, name) > 1]
    product = " x ".join(f"{getattr(layout, name)} {WORDS[name]} ({name})" for name in dimensions)
    nodes = f" in nodes of {layout.node_size}" if layout.node_size < layout.world_size else ""
    equation = f" = {product}" if product else ""
    lines = [f"{layout.world_size}{nodes}{equation}"]
    if len(dimensions) < 2:
        return lines

    # The group of rank 0 along each dimension.
    for name in dimensions:
        extent = "across nodes" if layout.spans_nodes(name) else "within a node"
        other_ranks = [str(rank) for rank in layout.group(0, name)[1:]]
        if len(other_ranks) > MAX_RANKS_LISTED:
            other_ranks = [f"{', '.join(other_ranks[:3])} ... {other_ranks[-1]}"]
        lines.append(f"{name}: rank 0 with {', '.join(other_ranks)}, {extent}")
    return lines
