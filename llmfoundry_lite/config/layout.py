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
from llmfoundry_lite.errors import ConfigError, either
from llmfoundry_lite.ranks.rank import this_rank


class Coordinates(NamedTuple):
    """A rank's place in each dimension, the last of which changes fastest from rank to rank."""

    pipeline: int
    """Stage: a run of consecutive blocks."""
    replicate: int
    """Copy of the model."""
    shard: int
    """Share of that copy."""
    context: int
    """Part of each sample's tokens."""
    tensor: int
    """Part of each layer. Neighbouring ranks, because they exchange the most."""


DIMENSIONS = Coordinates._fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """One rank from the data's point of view: ranks that see the same samples count as one data rank."""

    rank: int
    """Data rank of this process."""
    size: int
    """Number of data ranks, each with its share of the global batch."""
    is_counted: bool
    """Whether this process reports for its data rank, so that its samples count once."""

    @property
    def is_first(self) -> bool:
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
        """Layout of parameters. The ranks of a context group use the same parameters on different tokens, so they count
        as further shares of a copy, or as further copies."""
        dimension = "replicate" if self.has_whole_copies else "shard"
        return replace(self, context=1, **{dimension: getattr(self, dimension) * self.context})

    @property
    def num_data_ranks(self) -> int:
        """Number of shares of a global batch."""
        return self.replicate * self.shard

    @property
    def ranks_per_data_rank(self) -> int:
        """Number of ranks that see the same samples."""
        return self.world_size // self.num_data_ranks

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's place in each dimension. `rank_at` is the inverse."""
        from_the_innermost = []
        for degree in reversed(self.degrees):
            rank, index = divmod(rank, degree)
            from_the_innermost.append(index)
        return Coordinates(*reversed(from_the_innermost))

    def rank_at(self, coordinates: Coordinates) -> int:
        """Return the rank in this place."""
        rank = 0
        for degree, index in zip(self.degrees, coordinates, strict=True):
            rank = rank * degree + index
        return rank

    def group(self, rank: int, dimension: str) -> list[int]:
        """Return, in order, `rank` and the ranks that differ from it in this dimension alone."""
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
        """Return the data rank of a rank. The first of the ranks that see the same samples is counted."""
        place = self.coordinates(rank)
        return DataRanks(
            rank=place.replicate * self.shard + place.shard,
            size=self.num_data_ranks,
            is_counted=place.pipeline == place.context == place.tensor == 0,
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
    """Lay out `world_size` devices, `node_size` of them (default: all) in each node.

    NO_SHARD, ZERO_1: every data rank holds a copy of the model. HYBRID_SHARD: data_parallel_shard_degree of them, or
    those of a node, share one. Otherwise all share one. Raises ConfigError for degrees that do not divide the devices.
    """
    node_size = min(node_size or world_size, world_size)
    degrees = {"tensor": tensor, "context": context, "pipeline": pipeline}
    inner: dict[str, int] = {}
    for dimension, degree in degrees.items():
        num_inner = math.prod(inner.values())
        if world_size % (num_inner * degree):
            raise ConfigError(
                f"{DEGREE_KEYS[dimension]}: {degree} does not divide the {world_size // num_inner} "
                f"{_name_groups(inner)} of this launch; start a multiple of {num_inner * degree}, or change the degree"
            )
        inner[dimension] = degree

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
            f"{_name_groups(degrees)} of this launch; use {either(divisors(num_data_ranks))}"
        )
    return Layout(
        replicate=num_data_ranks // shard,
        shard=shard,
        node_size=node_size,
        has_whole_copies=has_whole_copies,
        **degrees,
    )


def layout_of(config: TrainConfig, world_size: int, node_size: int | None = None) -> Layout:
    """Lay out the devices of a run. Raises ConfigError, as `divide_devices` does."""
    return divide_devices(
        config.sharding,
        world_size,
        node_size,
        tensor=config.tensor_parallel_degree,
        context=config.context.context_parallel_degree,
        pipeline=config.pipeline.pipeline_parallel_degree,
    )


def find_data_ranks(config: TrainConfig, microbatch_size: int | None = None) -> list[int]:
    """Return all numbers of data ranks that can share a batch evenly, ascending.

    With `microbatch_size`, each of these ranks must also have whole microbatches of that size.
    """
    batch, pipeline = config.global_train_batch_size, config.pipeline
    shard_degree = config.sharding.data_parallel_shard_degree or 1
    counts = [count for count in divisors(batch) if count % shard_degree == 0]
    if microbatch_size is None:
        return counts

    counts = [count for count in counts if batch // count % microbatch_size == 0]
    if pipeline.pipeline_parallel_degree == 1:
        return counts
    return [count for count in counts if pipeline.takes_microbatches(batch // count // microbatch_size)]


def layout_here(config: TrainConfig) -> Layout:
    """Lay out the launch that this process is a rank of."""
    here = this_rank()
    return layout_of(config, here.world_size, here.local_world_size)


RowRanges = Sequence[Sequence[int]]
"""Ranges of a matrix's rows, each (first row, number of rows), in the order of a tensor group's ranks."""


def divide_stack(sizes: Sequence[int], tensor: int) -> RowRanges:
    """Divide a stack of matrices with `sizes` rows, such as q, k and v: each rank gets its part of every matrix."""
    ranges = []
    for rank in range(tensor):
        first_row = 0
        for size in sizes:
            part = size // tensor
            ranges.append((first_row + rank * part, part))
            first_row += size
    return ranges


def runs_between(runs: RowRanges, begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return the rows from `begin` to `end` in the ranks' order: (first row, number of rows, offset from `begin`)."""
    parts = []
    position = 0  # of a run's first row, in the ranks' order
    for first_row, num_rows in runs:
        low = max(begin, position)
        high = min(end, position + num_rows)
        if low < high:
            parts.append((first_row + low - position, high - low, low - begin))
        position += num_rows
    return parts


# ----------------------------------------------------------------------------------------------- in words


def _name_groups(degrees: Mapping[str, int]) -> str:
    """Name the devices that get one share of the batch together, in the user's words."""
    blocks = [DEGREE_KEYS[name].partition(".")[0] for name, degree in degrees.items() if degree > 1]
    if not blocks:
        return "devices"
    return f"groups of {math.prod(degrees.values())} devices ({', '.join(reversed(blocks))})"


def name_data_ranks(layout: Layout) -> str:
    """Name the receivers of a share of the batch, in the user's words."""
    return _name_groups({name: getattr(layout, name) for name in DEGREE_KEYS})


WORDS = {
    "pipeline": "stages of blocks",
    "replicate": "copies of the model",
    "shard": "shares of a copy",
    "context": "parts of a sample",
    "tensor": "parts of a layer",
}


def describe_layout(layout: Layout) -> list[str]:
    """Return lines: the product of dimensions, and for each dimension the ranks in rank 0's group."""
    divided = [name for name in WORDS if getattr(layout, name) > 1]
    product = " x ".join(f"{getattr(layout, name)} {WORDS[name]} ({name})" for name in divided)
    nodes = f" in nodes of {layout.node_size}" if layout.node_size < layout.world_size else ""
    equation = f" = {product}" if product else ""
    lines = [f"{layout.world_size}{nodes}{equation}"]
    if len(divided) < 2:
        return lines
    for name in divided:
        across = "across nodes" if layout.spans_nodes(name) else "within a node"
        ranks = [str(rank) for rank in layout.group(0, name)[1:]]
        shown = ", ".join(ranks) if len(ranks) <= 4 else f"{', '.join(ranks[:3])} ... {ranks[-1]}"
        lines.append(f"{name}: rank 0 with {shown}, {across}")
    return lines
