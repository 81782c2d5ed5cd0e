"""Device meshes and process groups of a layout."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmfoundry_lite.config.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Make the mesh: the dimension `shard`, and `pipeline`, `replicate` and `tensor` where the layout has them.

    FSDP treats the ranks of a context group like ranks that have different samples.
    """
    degrees = layout.of_parameters.degrees._asdict()
    sizes = {name: size for name, size in degrees.items() if name == "shard" or size > 1}
    return make_mesh(device_type, tuple(sizes.values()), tuple(sizes))


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def within_stage(mesh: DeviceMesh, *, without: tuple[str, ...] = ()) -> DeviceMesh:
    """Return the mesh of the ranks that have the same blocks as this one, less the dimensions `without`."""
    names = tuple(name for name in names_of(mesh) if name not in ("pipeline", *without))
    return mesh if names == names_of(mesh) else mesh[names]


def build_stage_group(layout: Layout, device_type: str) -> dist.ProcessGroup | None:
    """Make the group of ranks that have the same blocks as this one; None where all have."""
    if layout.pipeline == 1:
        return None
    shape = (layout.pipeline, layout.world_size // layout.pipeline)
    return make_mesh(device_type, shape, ("pipeline", "stage")).get_group("stage")


def make_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh whose groups have the world group's timeout (`dist_timeout`), not torch's default."""
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    options = getattr(_backend(dist.distributed_c10d._get_default_group(), device_type), "options", None)
    if options is not None:
        for name in names:
            _backend(mesh.get_group(name), device_type)._set_default_timeout(options._timeout)
    return mesh


def _backend(group: dist.ProcessGroup, device_type: str) -> Any:
    return group._get_backend(torch.device(device_type))
