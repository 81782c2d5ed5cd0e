"""Device meshes and process groups of a layout. Every function that makes one is collective over all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmfoundry_lite.config.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Make the mesh of a layout. Collective: every rank calls this together.

    It always has the dimension `shard`, and `pipeline`, `replicate` and `tensor` if the layout divides by them. Context
    parallelism has no dimension of its own, because FSDP treats its ranks like ranks that have different samples.
    """
    degrees = layout.of_parameters.degrees._asdict()
    sizes = {name: size for name, size in degrees.items() if name == "shard" or size > 1}
    return make_mesh(device_type, tuple(sizes.values()), tuple(sizes))


def dimensions_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions, from the outermost to the innermost."""
    return mesh.mesh_dim_names or ()


def mesh_of_stage(mesh: DeviceMesh, *, without: tuple[str, ...] = ()) -> DeviceMesh:
    """Return the mesh of the ranks that have the same blocks as this one: `mesh` without `pipeline`.

    The dimensions in `without` are left out as well.
    """
    names = dimensions_of(mesh)
    kept_names = tuple(name for name in names if name not in ("pipeline", *without))
    return mesh if kept_names == names else mesh[kept_names]


def build_stage_group(layout: Layout, device_type: str) -> dist.ProcessGroup | None:
    """Make the group of the ranks that have the same blocks as this one; None if all ranks have all blocks.

    Collective: every rank calls this together.
    """
    if layout.pipeline == 1:
        return None
    shape = (layout.pipeline, layout.world_size // layout.pipeline)
    return make_mesh(device_type, shape, ("pipeline", "stage")).get_group("stage")


def make_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh. Collective: every rank calls this together.

    Its groups get the timeout of the world group (`dist_timeout`), because torch would give them its default.
    """
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    world_backend = _backend_of(dist.distributed_c10d._get_default_group(), device_type)
    options = getattr(world_backend, "options", None)  # not every backend has them
    if options is not None:
        for name in names:
            _backend_of(mesh.get_group(name), device_type)._set_default_timeout(options._timeout)
    return mesh


def _backend_of(group: dist.ProcessGroup, device_type: str) -> Any:
    """Return the backend (NCCL, gloo) by which a group communicates tensors of a device."""
    return group._get_backend(torch.device(device_type))
