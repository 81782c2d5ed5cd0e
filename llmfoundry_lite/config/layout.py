"""The layout of a launch's devices: five dimensions, derived from the configuration and the number of devices.

It says which rank holds which part of the model, which ranks see the same samples, and what cannot be divided.
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
    """A process as a reader of data: all ranks that see the same samples have the same data rank."""

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
    """world = pipeline x replicate x shard x context x tensor."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    node_size: int = 1
    """Devices of each node."""
    has_whole_copies: bool = False
    """Each rank of a context group has its own copy of the model (NO_SHARD, ZERO_1), instead of a share of one."""

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
        """The layout as far as it divides parameters, in which the context dimension is 1.

        The ranks of a context group use the same parameters on different tokens. So they count as further shards of a
        copy of the model, or as further copies if each rank has a whole one.
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
        """Return the index of a rank in each dimension. `rank_at` is the inverse."""
        indices_from_innermost = []
        rest = rank
        for degree in reversed(self.degrees):
            rest, index = divmod(rest, degree)
            indices_from_innermost.append(index)
        return Coordinates(*reversed(indices_from_innermost))

    def rank_at(self, coordinates: Coordinates) -> int:
        """Return the rank that has these indices in the layout's dimensions."""
        rank = 0
        for degree, index in zip(self.degrees, coordinates, strict=True):
            rank = rank * degree + index
        return rank

    def group(self, rank: int, dimension: str) -> list[int]:
        """Return the ranks of the group along a dimension that `rank` is in, itself included, in ascending order.

        They differ in the index of this dimension alone.
        """
        coordinates = self.coordinates(rank)
        degree = getattr(self, dimension)
        return [self.rank_at(coordinates._replace(**{dimension: index})) for index in range(degree)]

    def spans_nodes(self, dimension: str) -> bool:
        """Return whether a group of this dimension has ranks in several nodes.

        Ranks of a group lie `math.prod(inner degrees)` apart, so a group is within a node if the nodes' size is a
        multiple of its own degree and all inner ones.
        """
        if self.world_size <= self.node_size or getattr(self, dimension) == 1:
            return False
        own_and_inner_degrees = self.degrees[DIMENSIONS.index(dimension) :]
        return self.node_size % math.prod(own_and_inner_degrees) != 0

    def data_ranks(self, rank: int) -> DataRanks:
        """Return the data rank of a rank. Of the ranks that see the same samples, the first one is counted."""
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
    sample. What remains are data ranks, between which the sharding strategy divides the parameters: with NO_SHARD and
    ZERO_1, every data rank holds a copy of the model. With HYBRID_SHARD, data_parallel_shard_degree data ranks, or
    those of a node, share one copy. Otherwise all of them share one.

    Raises ConfigError for degrees that do not divide the devices.
    """
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
    """Return the layout in which `world_size` devices train a run, with `node_size` (default: all) in each node.

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

    With `microbatch_size`, each data rank must also have whole microbatches of that many samples, and a pipeline must
    be able to run as many microbatches as that gives. If the configuration has a data_parallel_shard_degree, only
    multiples of it are returned.
    """
    batch_size = config.global_train_batch_size
    shard_degree = config.sharding.data_parallel_shard_degree or 1
    has_pipeline = config.pipeline.pipeline_parallel_degree > 1
    numbers = []
    for num_data_ranks in divisors(batch_size):
        if num_data_ranks % shard_degree:
            continue
        if microbatch_size is not None:
            num_microbatches, rest = divmod(batch_size // num_data_ranks, microbatch_size)
            if rest:
                continue
            if has_pipeline and not config.pipeline.takes_microbatches(num_microbatches):
                continue
        numbers.append(num_data_ranks)
    return numbers


def layout_here(config: TrainConfig) -> Layout:
    """Return the layout of the launch that this process is a rank of. Raises ConfigError, as `layout_of` does."""
    process = this_rank()
    return layout_of(config, process.world_size, process.local_world_size)


RowRanges = Sequence[Sequence[int]]
"""Ranges of a matrix's rows, each (first row, number of rows), in the order of a tensor group's ranks."""


def divide_stack(sizes: Sequence[int], tensor: int) -> RowRanges:
    """Divide a stack of matrices, such as q, k and v, between `tensor` ranks, so that each gets a part of every matrix.

    `sizes` are the matrices' numbers of rows. Returns ranges of the stack's rows in the order of the ranks: (first row,
    number of rows), as many for each rank as there are matrices.
    """
    ranges = []
    for rank in range(tensor):
        first_row = 0  # of a matrix within the stack
        for size in sizes:
            num_rows = size // tensor
            ranges.append((first_row + rank * num_rows, num_rows))
            first_row += size
    return ranges


def ranges_between(ranges: RowRanges, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return which rows of a matrix are at the positions `begin` to `end` when its rows are in the order of `ranges`.

    Each item is (first row in the matrix, number of rows, offset of the first one from `begin`).
    """
    parts = []
    position = 0  # of a range's first row, in this order
    for first_row, num_rows in ranges:
        low = max(begin, position)
        high = min(end, position + num_rows)
        if low < high:
            parts.append((first_row + low - position, high - low, low - begin))
        position += num_rows
    return parts


# ----------------------------------------------------------------------------------------------- in words


def _describe_groups(degrees: Mapping[str, int]) -> str:
    """Say for a message what divides a batch: `devices`, or groups of devices that see the same samples.

    `degrees` has the number of devices of each dimension along which a group extends.
    """
    blocks = [DEGREE_KEYS[name].partition(".")[0] for name, degree in degrees.items() if degree > 1]
    if not blocks:
        return "devices"
    return f"groups of {math.prod(degrees.values())} devices ({', '.join(reversed(blocks))})"


def describe_data_ranks(layout: Layout) -> str:
    """Say for a message what divides a batch in this layout: `devices`, or groups of devices with their keys."""
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

    The first line is the number of devices as a product of dimensions. With several dimensions, a line for each
    follows, with the ranks in rank 0's group, and whether the group extends across nodes.
    """
    divided = [name for name in WORDS if getattr(layout, name) > 1]
    product = " x ".join(f"{getattr(layout, name)} {WORDS[name]} ({name})" for name in divided)
    nodes = f" in nodes of {layout.node_size}" if layout.node_size < layout.world_size else ""
    equation = f" = {product}" if product else ""
    lines = [f"{layout.world_size}{nodes}{equation}"]
    if len(divided) < 2:
        return lines

    for name in divided:
        extent = "across nodes" if layout.spans_nodes(name) else "within a node"
        others = [str(rank) for rank in layout.group(0, name)[1:]]
        if len(others) > MAX_RANKS_LISTED:
            others = [f"{', '.join(others[:3])} ... {others[-1]}"]
        lines.append(f"{name}: rank 0 with {', '.join(others)}, {extent}")
    return lines
