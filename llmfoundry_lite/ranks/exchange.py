"""Collectives over JSON and bytes, and errors that are raised on all ranks.

Nothing is pickled, as torch's object collectives would. For main threads only: all ranks must make the same calls in
the same order. Without a process group each function returns at once.
"""

import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from llmfoundry_lite import errors
from llmfoundry_lite.errors import CheckpointError, TransientError, UserError
from llmfoundry_lite.ranks.codec import write_json

Group = dist.ProcessGroup | None
"""None is all ranks, or a process alone."""
_host_group: Group = None

# torch 2.13 renamed it and warns when the old name is used.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rank_and_size(group: Group = None) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    """Return what each rank passed, in order of rank; two collectives."""
    raw = write_json(value)
    longest = all_reduce_max([len(raw)], group)[0]
    return [json.loads(part) for part in all_gather_bytes(raw.ljust(longest), group)]


def all_gather_bytes(raw: bytes, group: Group = None) -> list[bytes]:
    """Return what each rank passed, in order of rank; one collective. All must pass equally many bytes."""
    _, world_size = rank_and_size(group)
    if world_size == 1:
        return [raw]
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(_device(group))
    gathered = mine.new_empty(world_size * len(raw))
    all_gather_single(gathered, mine, group=group or _host_group)
    everything = gathered.cpu().numpy().tobytes()
    return [everything[i : i + len(raw)] for i in range(0, len(everything), len(raw))]


def all_gather_distinct(value: Any) -> list[tuple[Any, list[int]]]:
    """Return the different values that ranks passed, each with its ranks, in order of the first. Ranks compare digests,
    and one rank broadcasts each value: cheap when most have the same."""
    digests = all_gather_bytes(xxhash.xxh3_128_digest(write_json(value)))
    holders: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        holders.setdefault(digest, []).append(rank)
    if len(holders) == 1:
        return [(json.loads(write_json(value)), list(range(len(digests))))]
    return [(broadcast_json(value, source=ranks[0]), ranks) for ranks in holders.values()]


def broadcast_json(value: Any, group: Group = None, *, source: int = 0) -> Any:
    """Return on every rank what rank `source` passed."""
    rank, _ = rank_and_size(group)
    return json.loads(broadcast_bytes(write_json(value) if rank == source else b"", group, source=source))


def broadcast_bytes(raw: bytes, group: Group = None, *, source: int = 0) -> bytes:
    """Return on every rank what rank `source` passed."""
    rank, world_size = rank_and_size(group)
    if world_size == 1:
        return raw
    device = _device(group)
    global_source = dist.get_global_rank(group, source) if group is not None else source
    length = torch.tensor([len(raw)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=global_source, group=group or _host_group)
    content = torch.frombuffer(bytearray(raw.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(content, src=global_source, group=group or _host_group)
    return raw if rank == source else bytes(content.cpu().numpy())


def all_reduce_max(values: list[int], group: Group = None) -> list[int]:
    """Return each value's maximum over the ranks."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def all_reduce_sum(values: list[int]) -> list[int]:
    """Return each value's sum over the ranks, modulo 2**64, which is how 64-bit addition wraps around. Negative numbers
    and those from 2**63 on come back in either form."""
    return _reduce([(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in values], dist.ReduceOp.SUM, None)


def _reduce(values: list[int], operation: Any, group: Group) -> list[int]:
    if rank_and_size(group)[1] == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=_device(group))
    dist.all_reduce(tensor, op=operation, group=group or _host_group)
    return tensor.tolist()


@contextmanager
def raising_on_all_ranks(kind: type[Exception] = Exception) -> Iterator[None]:
    """Run a block that may fail on some ranks with an error of `kind`; then `raise_on_all_ranks`. Collective."""
    error = None
    try:
        yield
    except kind as caught:
        error = caught
    raise_on_all_ranks(error)


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on all ranks the error of the first rank that has one. A rank with another error raises its own, unless
    that is a CheckpointError."""
    if not any(all_reduce_max([0 if error is None else 1])):
        return
    may_pass = isinstance(error, UserError) and error.is_transient
    needs_credentials = isinstance(error, UserError) and error.needs_credentials
    lacks_permission = isinstance(error, UserError) and error.lacks_permission
    report = [type(error).__name__, str(error), may_pass, needs_credentials, lacks_permission]
    reports = all_gather_json(report if error is not None else None)
    first = next(i for i, report in enumerate(reports) if report is not None)
    if error is not None and (not isinstance(error, CheckpointError) or first == rank_and_size()[0]):
        raise error
    name, text, may_pass, needs_credentials, lacks_permission = reports[first]
    cause = TransientError(text) if may_pass else None
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        copy = kind(text)  # the same sentence everywhere, so that it is printed once
        copy.needs_credentials = needs_credentials
        copy.lacks_permission = lacks_permission
        raise copy from cause
    raise CheckpointError(f"rank {first}: {name}: {text}")


user_errors_on_all_ranks = partial(raising_on_all_ranks, UserError)


def open_host_group(timeout: datetime.timedelta) -> None:
    """Let calls without a group use gloo from now on, beside NCCL: they wait for no device."""
    global _host_group
    _host_group = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportAssignmentType]


def _device(group: Group) -> torch.device:
    """Return the device that the group's backend exchanges from."""
    uses_accelerator = "nccl" in dist.get_backend(group or _host_group) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if uses_accelerator else torch.device("cpu")
