"""Collectives over JSON and bytes, and errors that are raised on all ranks.

Nothing is pickled, as torch's object collectives would. For main threads only: all ranks must make the same calls in
the same order. Without a process group each function returns at once.

A function "for the group" takes `group`, a part of the ranks; None is all ranks. If several ranks may fail, they meet
in `raising_on_all_ranks`, because a rank that raises alone would leave the others waiting in the next collective.
"""

import datetime
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from llmfoundry_lite import errors
from llmfoundry_lite.errors import CheckpointError, TransientError, UserError
from llmfoundry_lite.ranks.codec import write_json

Group = dist.ProcessGroup | None
"""None is all ranks, or a process alone."""
_host_group: Group = None
"""The gloo group of all ranks that `open_host_group` has opened beside NCCL; None before, and where gloo is the
backend."""

# torch 2.13 renamed it and warns when the old name is used.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rank_and_size(group: Group = None) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size. (0, 1) without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_json(value: Any, group: Group = None) -> list[Any]:
    """Return on every rank what each rank passed, in order of rank. Values must be JSON, and may differ in size.

    If rank 0 passes [1] and rank 1 passes None, both get [[1], None].

    Collective: every rank of the group calls this. It makes two collectives: for the length of the longest text, to
    which all are padded, and for the texts.
    """
    content = write_json(value)
    (max_length,) = all_reduce_max([len(content)], group)
    contents = all_gather_bytes(content.ljust(max_length), group)  # JSON allows spaces at the end
    return [json.loads(content) for content in contents]


def all_gather_bytes(content: bytes, group: Group = None) -> list[bytes]:
    """Return on every rank what each rank passed, in order of rank. All must pass the same number of bytes.

    Collective: every rank of the group calls this. It makes one collective.
    """
    _, world_size = rank_and_size(group)
    if world_size == 1:
        return [content]

    # The collective concatenates the tensors of all ranks in one.
    num_bytes = len(content)
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_device(group))
    gathered = sent.new_empty(world_size * num_bytes)
    all_gather_single(gathered, sent, group=group or _host_group)
    contents = gathered.cpu().numpy().tobytes()
    return [contents[start : start + num_bytes] for start in range(0, len(contents), num_bytes)]


def all_gather_distinct(value: Any) -> list[tuple[Any, list[int]]]:
    """Return on every rank the different values that ranks passed, each with the ranks that passed it.

    Values are JSON, in the order of the lowest rank that passed them. If ranks 0 to 3 pass "a", "b", "a" and "a", all
    get [("a", [0, 2, 3]), ("b", [1])].

    Collective: every rank calls this. The ranks first compare digests, and then one rank of each digest broadcasts its
    value, so it is cheap if most ranks pass the same value.
    """
    digests = all_gather_bytes(xxhash.xxh3_128_digest(write_json(value)))
    ranks_by_digest: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks_by_digest.setdefault(digest, []).append(rank)

    if len(ranks_by_digest) == 1:
        # All ranks return here. The round trip through JSON gives the types that a broadcast would, such as list for
        # tuple.
        return [(json.loads(write_json(value)), list(range(len(digests))))]
    return [(broadcast_json(value, source=ranks[0]), ranks) for ranks in ranks_by_digest.values()]


def broadcast_json(value: Any, group: Group = None, *, source: int = 0) -> Any:
    """Return on every rank the JSON value that rank `source` of the group passed. Other ranks' values are ignored.

    Collective: every rank of the group calls this.
    """
    rank, _ = rank_and_size(group)
    content = write_json(value) if rank == source else b""
    return json.loads(broadcast_bytes(content, group, source=source))


def broadcast_bytes(content: bytes, group: Group = None, *, source: int = 0) -> bytes:
    """Return on every rank the bytes that rank `source` of the group passed. Other ranks' may be of any length.

    Collective: every rank of the group calls this.
    """
    rank, world_size = rank_and_size(group)
    if world_size == 1:
        return content
    device = _device(group)
    global_source = dist.get_global_rank(group, source) if group is not None else source

    # Two broadcasts: the length, so that every rank has room for the content, then the content.
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=global_source, group=group or _host_group)
    buffer = torch.frombuffer(bytearray(content.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, src=global_source, group=group or _host_group)
    return content if rank == source else bytes(buffer.cpu().numpy())


def all_reduce_max(values: list[int], group: Group = None) -> list[int]:
    """Return on every rank the maximum over the ranks of each value. All must pass the same number of values.

    Collective: every rank of the group calls this.
    """
    return _all_reduce(values, dist.ReduceOp.MAX, group)


def all_reduce_sum(values: list[int]) -> list[int]:
    """Return on every rank the sum over all ranks of each value, modulo 2**64. All must pass the same number of values.

    64-bit addition wraps around, so a number that is negative, or 2**63 or more, may come back as another one that is
    equal modulo 2**64. Collective: every rank calls this.
    """
    as_int64 = [(value + (1 << 63)) % (1 << 64) - (1 << 63) for value in values]
    return _all_reduce(as_int64, dist.ReduceOp.SUM, None)


def _all_reduce(values: list[int], operation: Any, group: Group) -> list[int]:
    """Reduce each value over the ranks by one collective, with an operation of `dist.ReduceOp`."""
    _, world_size = rank_and_size(group)
    if world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=_device(group))
    dist.all_reduce(tensor, op=operation, group=group or _host_group)
    return tensor.tolist()


@contextmanager
def raising_on_all_ranks(kind: type[Exception] = Exception) -> Iterator[None]:
    """Run a block, and raise on all ranks if it has failed on any with an error of class `kind`.

    Collective: every rank runs the block, and at its end they meet in `raise_on_all_ranks`, which says what each
    raises. The block must make no collective after a line that may fail, because a rank that has failed would not
    join it. An error of another class is raised at once, by the rank that met it alone.
    """
    error = None
    try:
        yield
    except kind as caught:
        error = caught
    raise_on_all_ranks(error)


class ErrorReport(NamedTuple):
    """An error as its rank reports it to the others."""

    class_name: str
    text: str
    is_transient: bool
    needs_credentials: bool
    lacks_permission: bool

    @classmethod
    def of(cls, error: Exception) -> "ErrorReport":
        """Report an error. Only a UserError can be transient or be about credentials or permissions."""
        is_user_error = isinstance(error, UserError)
        return cls(
            class_name=type(error).__name__,
            text=str(error),
            is_transient=is_user_error and error.is_transient,
            needs_credentials=is_user_error and error.needs_credentials,
            lacks_permission=is_user_error and error.lacks_permission,
        )


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on every rank if any rank has met an error; return on every rank if none has.

    Collective: every rank passes the error that it met, or None. A rank that met an error raises that, unless it is a
    CheckpointError: then it raises, like the ranks that met none, the error of the lowest rank that met one. That is a
    UserError of the same class and text, or a CheckpointError that names the rank if the class is not one of ours.

    The error of the lowest rank is also transient, or about credentials or permissions, on all ranks that raise it,
    because they decide by that whether to go on and try again.
    """
    (any_failed,) = all_reduce_max([0 if error is None else 1])
    if not any_failed:
        return

    # All ranks go on from here, and all of them raise. Some raise their own error.
    reports = all_gather_json(None if error is None else ErrorReport.of(error))
    first_rank = next(rank for rank, report in enumerate(reports) if report is not None)
    rank, _ = rank_and_size()
    if error is not None:
        is_replaced = isinstance(error, CheckpointError) and rank != first_rank
        if not is_replaced:
            raise error

    # The other ranks go on: those without an error, and those whose CheckpointError is replaced. They raise a copy of
    # the lowest rank's error.
    report = ErrorReport(*reports[first_rank])
    error_class = getattr(errors, report.class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, UserError):
        copy = error_class(report.text)  # the same text on all ranks, so that it is printed once
        copy.needs_credentials = report.needs_credentials
        copy.lacks_permission = report.lacks_permission
        raise copy from TransientError(report.text) if report.is_transient else None
    raise CheckpointError(f"rank {first_rank}: {report.class_name}: {report.text}")


user_errors_on_all_ranks = partial(raising_on_all_ranks, UserError)


def open_host_group(timeout: datetime.timedelta) -> None:
    """Open a gloo group of all ranks, which this module's functions use from now on if they are called without a group.

    For a launch over NCCL: with gloo, an exchange of JSON does not wait for work that is queued on a GPU. Sets
    `_host_group`. A collective of the group fails after `timeout`.

    Collective: every rank calls this once, after the process group has started.
    """
    global _host_group
    _host_group = dist.new_group(backend="gloo", timeout=timeout)  # pyright: ignore[reportAssignmentType]


def _device(group: Group) -> torch.device:
    """Return the device whose tensors the group's backend exchanges: this rank's GPU for NCCL, the CPU for gloo."""
    backend = dist.get_backend(group or _host_group)
    if "nccl" in backend and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
