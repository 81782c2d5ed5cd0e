"""How the devices of a launch are divided: the mesh, and the ranks as the data has them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmfoundry_lite.config.schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """The ranks as the data has them. Tensor parallelism divides each layer among neighbouring ranks, which then see
    the same samples: wherever samples and tokens are shared out or added up, such a group counts as one."""

    rank: int
    """Of this process's group."""
    size: int
    """Number of groups, each with its share of the global batch."""
    speaks: bool
    """One process of each group counts what the group has seen."""

    @property
    def is_first(self) -> bool:
        return self.speaks and self.rank == 0


def data_ranks(tensor_parallel_degree: int) -> DataRanks:
    """Of the process group as it stands; a process alone is one."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group, place_in_group = divmod(rank, tensor_parallel_degree)
    return DataRanks(rank=group, size=world_size // tensor_parallel_degree, speaks=place_in_group == 0)


def build_mesh(
    fsdp: FSDPConfig, device_type: str, world_size: int, local_world_size: int, tensor_parallel_degree: int = 1
) -> DeviceMesh:
    """One dimension, `shard`; or two, `replicate` x `shard`, for HYBRID_SHARD and NO_SHARD. Tensor parallelism adds a
    last one, `tensor`: neighbouring ranks, because they exchange the most.

    Raises ConfigError when the devices cannot be divided that way.
    """
    num_groups = world_size // tensor_parallel_degree
    shape, names = (num_groups,), ("shard",)
    if fsdp.sharding_strategy in ("NO_SHARD", "HYBRID_SHARD"):
        shard_degree = 1
        if fsdp.sharding_strategy == "HYBRID_SHARD":
            in_node = max(1, local_world_size // tensor_parallel_degree)
            shard_degree = fsdp.data_parallel_shard_degree or in_node
        if num_groups % shard_degree:
            divided = f" / {tensor_parallel_degree} (tp_config)" if tensor_parallel_degree > 1 else ""
            raise ConfigError(
                f"fsdp_config.data_parallel_shard_degree: {shard_degree} does not divide the {world_size}{divided} "
                "devices of this launch"
            )
        shape, names = (num_groups // shard_degree, shard_degree), ("replicate", "shard")
    if tensor_parallel_degree > 1:
        shape, names = (*shape, tensor_parallel_degree), (*names, "tensor")
    return _make_mesh(device_type, shape, names)


def without_tensor(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]]


def with_tensor_as_shard(mesh: DeviceMesh) -> DeviceMesh:
    """For what is not divided by layer: a tensor group's ranks compute the same gradient of it, and the mean of equal
    numbers is that number; so they may share it out, and each keeps that much less."""
    *data_sizes, tensor_size = mesh.shape
    names = mesh.mesh_dim_names
    assert names is not None
    return _make_mesh(mesh.device_type, (*data_sizes[:-1], data_sizes[-1] * tensor_size), names[:-1])


def _make_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Its groups wait as long as the world's does (`dist_timeout`); torch would give them its own default."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    options = getattr(_backend(dist.distributed_c10d._get_default_group(), device_type), "options", None)
    if options is not None:
        for name in names:
            _backend(mesh.get_group(name), device_type)._set_default_timeout(options._timeout)
    return mesh


def _backend(group: dist.ProcessGroup, device_type: str) -> Any:
    return group._get_backend(torch.device(device_type))
