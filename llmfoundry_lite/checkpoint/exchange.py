"""JSON between ranks, and one verdict for all of them.

torch's object collectives would pickle; plans, reports and errors are plain data, so they travel as JSON in a byte
tensor instead. Without a process group there is one rank and nothing travels. For main threads only: every rank must
come here in the same order.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry_lite import errors
from llmfoundry_lite.checkpoint.codec import write_json
from llmfoundry_lite.errors import CheckpointError, UserError

Group = dist.ProcessGroup | None
"""None is the default group, or a process alone."""


def rank_and_size(group: Group) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather_json(value: Any, group: Group = None, *, room_bytes: int | None = None) -> list[Any]:
    """What each rank passed, in order of rank, on every rank.

    Two collectives; with `room_bytes`, of which no rank's JSON needs more, a single one.
    """
    _, world_size = rank_and_size(group)
    raw = write_json(value)
    if world_size == 1:
        return [json.loads(raw)]
    device = _device(group)
    if room_bytes is None:
        length = torch.tensor([len(raw)], dtype=torch.int64, device=device)
        lengths = [torch.zeros_like(length) for _ in range(world_size)]
        dist.all_gather(lengths, length, group=group)
        longest = max(int(n) for n in lengths)
    else:
        assert len(raw) <= room_bytes
        longest = room_bytes
    padded = torch.frombuffer(bytearray(raw.ljust(longest)), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(bytes(part.cpu().numpy())) for part in gathered]


def tell_all(value: Any, group: Group = None) -> Any:
    """What rank 0 passed, on every rank."""
    rank, world_size = rank_and_size(group)
    raw = write_json(value) if rank == 0 else b""
    if world_size == 1:
        return json.loads(raw)
    device = _device(group)
    source = dist.get_global_rank(group, 0) if group is not None else 0
    length = torch.tensor([len(raw)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=source, group=group)
    content = torch.frombuffer(bytearray(raw.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(content, src=source, group=group)
    return json.loads(bytes(content.cpu().numpy()))


def max_of(values: list[int], group: Group = None) -> list[int]:
    """Each value's maximum over the ranks; a few dozen bytes, cheap enough for every batch."""
    if rank_and_size(group)[1] == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=_device(group))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def agree(error: Exception | None, group: Group = None) -> None:
    """Return on all ranks if none has an error; otherwise raise on all of them what the first had.

    Errors that are not a user's are raised as they are where they happened.
    """
    if not any(max_of([0 if error is None else 1], group)):
        return
    rank, _ = rank_and_size(group)
    reports = gather_json([type(error).__name__, str(error)] if error is not None else None, group)
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    first = next(i for i, report in enumerate(reports) if report is not None)
    if first == rank:
        assert error is not None
        raise error
    name, text = reports[first]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        raise kind(text)  # the same sentence everywhere, so that it is printed once
    raise CheckpointError(f"rank {first}: {name}: {text}")


def _device(group: Group) -> torch.device:
    """Where the group's backend wants its tensors."""
    uses_accelerator = "nccl" in dist.get_backend(group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if uses_accelerator else torch.device("cpu")
