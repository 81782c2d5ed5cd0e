"""ZeRO-1: every replica has all parameters and gradients, and the optimizer state of some rows of each parameter.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 1. The optimizer
updates this rank's rows, which are views of the parameters; replicas then gather each other's rows. Any optimizer that
takes DTensors works. Checkpoints see a sharded state under the parameters' names.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from llmfoundry_lite.ranks.exchange import all_gather_single

REPLICATE = "replicate"
GATHER_BYTES = 1 << 27
"""Size of the parameters that are gathered in one collective."""


def share_optimizer(
    parameters: Mapping[str, nn.Parameter], build: Callable[[dict[str, nn.Parameter]], Optimizer]
) -> Optimizer:
    """Return the optimizer that `build` makes of this rank's rows of the named parameters, and that replicas share."""
    optimizer = build(dict(zip(parameters, rows_of(list(parameters.values())), strict=True)))
    step_together(optimizer)
    return optimizer


def rows_of(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the rows of each parameter that this rank updates, divided as torch.chunk does.

    A parameter without replicas, as on one device, is returned unchanged.
    """
    return [parameter if _replicate_dim(parameter) is None else _rows_of(parameter) for parameter in parameters]


def step_together(optimizer: Optimizer) -> None:
    """Make an optimizer over `rows_of` parameters take gradients' rows before each step, and gather rows after it."""
    rows = [row for group in optimizer.param_groups for row in group["params"] if hasattr(row, "share_of")]

    def before(*_: Any) -> None:
        for row in rows:
            gradient = row.share_of.grad
            row.grad = None if gradient is None else _cut(gradient)

    def after(*_: Any) -> None:
        trained = [row.share_of for row in rows if row.grad is not None]
        for row in rows:
            row.grad = None
        for bucket in _buckets(trained):
            _gather(bucket)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _replicate_dim(parameter: Tensor) -> int | None:
    """Return the dimension of a parameter's mesh along which it has replicas, if it has any."""
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if mesh is None or REPLICATE not in (mesh.mesh_dim_names or ()):
        return None
    dim = (mesh.mesh_dim_names or ()).index(REPLICATE)
    return dim if mesh.size(dim) > 1 else None


def _rows_of(parameter: nn.Parameter) -> nn.Parameter:
    rows = nn.Parameter(_cut(parameter.detach()))
    rows.share_of = parameter  # type: ignore[attr-defined]
    return rows


def _cut(tensor: Tensor) -> Tensor:
    """Return a view of this rank's rows."""
    tensor = cast(DTensor, tensor)
    mesh, dim, local = tensor.device_mesh, _replicate_dim(tensor), tensor.to_local()
    assert dim is not None
    chunk = math.ceil(local.size(0) / mesh.size(dim))
    begin = min(mesh.get_local_rank(dim) * chunk, local.size(0))
    # Replicas divide the rows that are left after other dimensions of the mesh have divided them.
    placed: list[Any] = list(tensor.placements)
    cuts = [mesh.size(i) for i, kind in enumerate(placed) if not kind.is_replicate() and kind.dim == 0]
    placements = list(tensor.placements)
    placements[dim] = _StridedShard(0, split_factor=math.prod(cuts)) if math.prod(cuts) > 1 else Shard(0)
    return DTensor.from_local(
        local[begin : begin + chunk], mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[DTensor]]:
    """Join successive parameters of one mesh, dtype and device, up to GATHER_BYTES. A larger parameter is alone."""
    bucket: list[DTensor] = []
    for parameter in cast(Sequence[DTensor], parameters):
        together = [*bucket, parameter]
        num_bytes = sum(one.to_local().numel() * one.element_size() for one in together)
        if bucket and (num_bytes > GATHER_BYTES or _kind(bucket[0]) != _kind(parameter)):
            yield bucket
            together = [parameter]
        bucket = together
    if bucket:
        yield bucket


def _kind(parameter: DTensor) -> tuple[Any, ...]:
    return id(parameter.device_mesh), parameter.dtype, parameter.device


@torch.no_grad()
def _gather(parameters: Sequence[DTensor]) -> None:
    """Gather all replicas' rows on every replica, in one collective. The last replicas' rows are padded."""
    mesh, dim = parameters[0].device_mesh, _replicate_dim(parameters[0])
    assert dim is not None
    num_replicas, rank = mesh.size(dim), mesh.get_local_rank(dim)
    wholes = [parameter.to_local() for parameter in parameters]
    sizes = [math.ceil(whole.size(0) / num_replicas) * whole[:1].numel() for whole in wholes]
    mine = torch.zeros(sum(sizes), dtype=wholes[0].dtype, device=wholes[0].device)
    for whole, place, size in zip(wholes, mine.split(sizes), sizes, strict=True):
        rows = whole.flatten()[rank * size : (rank + 1) * size]
        place[: rows.numel()] = rows
    everything = mine.new_empty(num_replicas, mine.numel())
    all_gather_single(everything.view(-1), mine, group=mesh.get_group(dim))
    for whole, part in zip(wholes, everything.split(sizes, dim=1), strict=True):
        whole.copy_(part.flatten()[: whole.numel()].view_as(whole))
