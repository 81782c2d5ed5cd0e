"""Devices that are not there, for tests of where tensors lie: such tensors have a device, and no numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend


@contextmanager
def offloaded(local_shape: Sequence[int], placement: Placement) -> Iterator[DTensor]:
    """A tensor of two GPUs whose part of this rank lies on the host, as FSDP keeps offloaded parameters."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cuda", (2,))
        with FakeTensorMode():
            whole = DTensor.from_local(torch.empty(*local_shape), mesh, [placement], run_check=False)
            yield cast(DTensor, whole.to("cpu"))
    finally:
        dist.destroy_process_group()
