"""A layout -> torch's device mesh, of the dimensions that shard and divide a model."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmfoundry_lite.config.layout import DIMENSIONS, Layout
from llmfoundry_lite.errors import ConfigError


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The dimension `shard`, and before and after it `pipeline`, `replicate` and `tensor` where the layout has them.

    Raises ConfigError for what no model is divided by yet.
    """
    if layout.context != 1:
        raise ConfigError(
            f"layout: context: {layout.context} given, expected 1: context parallelism is not there yet; "
            "use fsdp_config, tp_config and pp_config"
        )
    names = [name for name in DIMENSIONS if name == "shard" or getattr(layout, name) > 1]
    return _make_mesh(device_type, tuple(getattr(layout, name) for name in names), tuple(names))


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def within_stage(mesh: DeviceMesh, *, without: tuple[str, ...] = ()) -> DeviceMesh:
    """The ranks that have the same blocks; of the dimensions that are left."""
    names = tuple(name for name in names_of(mesh) if name not in ("pipeline", *without))
    return mesh if names == names_of(mesh) else mesh[names]


def build_stage_group(layout: Layout, device_type: str) -> dist.ProcessGroup | None:
    """The ranks that have the same blocks as this one; None where all have."""
    if layout.pipeline == 1:
        return None
    shape = (layout.pipeline, layout.world_size // layout.pipeline)
    return _make_mesh(device_type, shape, ("pipeline", "stage")).get_group("stage")


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
