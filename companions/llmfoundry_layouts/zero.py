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
"""Name of the mesh dimension along which parameters have replicas."""
GATHER_BYTES = 1 << 27
"""Parameters are gathered in collectives of up to this size. `estimate/memory.py` counts on it."""


def share_optimizer(
    parameters: Mapping[str, nn.Parameter], build: Callable[[dict[str, nn.Parameter]], Optimizer]
) -> Optimizer:
    """Build an optimizer whose state and step replicas divide among themselves.

    parameters: name -> whole parameter.
    build: makes an optimizer of named parameters. It gets this rank's rows of each.

    Returns the optimizer. Its `step` is collective over the replicas, and updates the whole parameters.
    """
    rows = rows_of(list(parameters.values()))
    optimizer = build(dict(zip(parameters, rows, strict=True)))
    step_together(optimizer)
    return optimizer


def rows_of(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the rows of each parameter that this rank updates, as new parameters which share its memory.

    The whole parameter is an attribute of its rows, `share_of`. Replicas divide the rows as `torch.chunk` does. A
    parameter without replicas, as on one device, is returned itself.
    """
    all_rows: list[nn.Parameter] = []
    for parameter in parameters:
        if _replicate_dim(parameter) is None:
            all_rows.append(parameter)
        else:
            rows = nn.Parameter(_cut_rows(parameter.detach()))
            rows.share_of = parameter  # type: ignore[attr-defined]
            all_rows.append(rows)
    return all_rows


def step_together(optimizer: Optimizer) -> None:
    """Make the steps of an optimizer of `rows_of` parameters update the whole parameters on all replicas.

    Hooks give each of the rows its part of the whole gradient before a step, and gather the new rows of all replicas
    after it. From then on, every replica must call `step` together.
    """
    all_rows: list[Any] = []
    for group in optimizer.param_groups:
        all_rows += [rows for rows in group["params"] if hasattr(rows, "share_of")]

    def set_gradients(*_: Any) -> None:
        """Make the gradients of rows views of the whole gradients."""
        for rows in all_rows:
            gradient = rows.share_of.grad
            rows.grad = None if gradient is None else _cut_rows(gradient)

    def gather_parameters(*_: Any) -> None:
        """Gather the parameters that have changed, and drop the views, which would keep the gradients' memory alive."""
        changed = [rows.share_of for rows in all_rows if rows.grad is not None]
        for rows in all_rows:
            rows.grad = None
        for bucket in _divide_into_buckets(changed):
            _gather_rows(bucket)

    optimizer.register_step_pre_hook(set_gradients)
    optimizer.register_step_post_hook(gather_parameters)


def _replicate_dim(parameter: Tensor) -> int | None:
    """Return the index of the mesh dimension along which a DTensor has replicas, or None if there is only one copy."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if REPLICATE not in names:
        return None
    dim = names.index(REPLICATE)
    return dim if mesh.size(dim) > 1 else None


def _cut_rows(tensor: Tensor) -> Tensor:
    """Return the rows of a DTensor that this replica updates, as a DTensor which is a view of the same memory.

    Other dimensions of the mesh, such as tensor parallelism, may have divided the tensor before. The replicas divide
    what this rank has of it.
    """
    tensor = cast(DTensor, tensor)
    mesh = tensor.device_mesh
    dim = _replicate_dim(tensor)
    assert dim is not None
    local = tensor.to_local()
    num_rows = math.ceil(local.size(0) / mesh.size(dim))
    begin = min(mesh.get_local_rank(dim) * num_rows, local.size(0))

    # If rows are divided twice, a rank has a part of a part. torch describes this by a strided shard, whose split
    # factor is the number of parts into which the other dimensions of the mesh divide the rows.
    placements: list[Any] = list(tensor.placements)
    split_factor = 1
    for mesh_dim, placement in enumerate(placements):
        divides_rows = not placement.is_replicate() and placement.dim == 0
        if divides_rows:
            split_factor *= mesh.size(mesh_dim)
    placements[dim] = Shard(0) if split_factor == 1 else _StridedShard(0, split_factor=split_factor)

    rows = local[begin : begin + num_rows]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def _divide_into_buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[DTensor]]:
    """Yield lists of successive parameters that one collective can gather.

    The parameters of a bucket have the same mesh, dtype and device, and up to GATHER_BYTES on this rank together. A
    larger parameter is in a bucket of its own.
    """
    bucket: list[DTensor] = []
    bucket_bytes = 0
    for parameter in cast(Sequence[DTensor], parameters):
        num_bytes = parameter.to_local().numel() * parameter.element_size()
        fits = bucket_bytes + num_bytes <= GATHER_BYTES
        if bucket and not (fits and _can_join(bucket[0], parameter)):
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(parameter)
        bucket_bytes += num_bytes
    if bucket:
        yield bucket


def _can_join(a: DTensor, b: DTensor) -> bool:
    """Return whether one collective can gather both parameters: on the same mesh and device, and of one dtype."""
    return a.device_mesh is b.device_mesh and a.dtype == b.dtype and a.device == b.device


@torch.no_grad()
def _gather_rows(parameters: Sequence[DTensor]) -> None:
    """Replace the rows that other replicas have updated, in place. One collective over the replicas.

    All replicas send equally many elements, so the rows of the last ones are padded with zeros.
    """
    mesh = parameters[0].device_mesh
    dim = _replicate_dim(parameters[0])
    assert dim is not None
    num_replicas = mesh.size(dim)
    rank = mesh.get_local_rank(dim)
    wholes = [parameter.to_local() for parameter in parameters]

    # Copy this replica's rows of all parameters into one buffer, one parameter after the other.
    sizes: list[int] = []
    for whole in wholes:
        num_rows = math.ceil(whole.size(0) / num_replicas)
        elements_per_row = whole[:1].numel()
        sizes.append(num_rows * elements_per_row)
    sent = torch.zeros(sum(sizes), dtype=wholes[0].dtype, device=wholes[0].device)
    for whole, size, sent_part in zip(wholes, sizes, sent.split(sizes), strict=True):
        rows = whole.flatten()[rank * size : (rank + 1) * size]
        sent_part[: rows.numel()] = rows

    received = sent.new_empty(num_replicas, sent.numel())
    all_gather_single(received.view(-1), sent, group=mesh.get_group(dim))

    # For each parameter, the replicas' rows follow each other, and the padding is at the end.
    for whole, received_part in zip(wholes, received.split(sizes, dim=1), strict=True):
        elements = received_part.flatten()[: whole.numel()]
        whole.copy_(elements.view_as(whole))
