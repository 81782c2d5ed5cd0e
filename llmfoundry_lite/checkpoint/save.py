"""Saving: a model and its optimizer -> safetensors shards, written by all ranks of a run behind the training.

Background threads never touch a collective: ranks learn of each other's progress in `Saver.poll`. A save of batch N:

    batch N                                  ranks plan and copy their state; each begins to write
    first later batch with no rank busy      ranks exchange reports of their files; rank 0 begins to publish
    next batch with no rank busy             `poll` returns `Saved`
"""

import contextlib
import copy
import datetime
import math
import mmap
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import state
from llmfoundry_lite.checkpoint.commit import lease_epoch_of
from llmfoundry_lite.checkpoint.grid import Chunk
from llmfoundry_lite.checkpoint.lease import LeaseRequest, Renewals
from llmfoundry_lite.checkpoint.local_folder import DIRECT_BYTES
from llmfoundry_lite.checkpoint.manifest import FileRecord, LogPart, Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.planning import SavePlan, agree_on_plan, boxes_of
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, hash_buffers, write_shard
from llmfoundry_lite.checkpoint.state import DTYPES, Tensors, local_tensor
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.codec import decode_value, encode_value

PINNED = "cuda"
POLL_SECONDS = 10.0
"""Time after which ranks that wait for a save meet again, long before a collective fails."""
NOTE_SECONDS = 30.0
"""Time after which the user is told that the training waits for a save; then after twice that, and so on."""
REPORT = struct.Struct("<QQ16s16sQ")
"""A rank's report: bytes of its file, bytes of the file's header, the file's digest, the digest of all that is not a
tensor, and the rank's part of the state's digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Fields of a `Manifest` besides tensors and optimizer. Rank 0's are used."""

    timestamp: Timestamp
    run_name: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    config: Any = None
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    log: Callable[[], bytes] | None = None
    """Returns the run's log so far; called in the background before the manifest is written. None: no log is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A published save and what it cost."""

    name: str
    save_id: str
    stall_seconds: float
    """Time that `save` took on this rank, including the wait for the save before it."""
    durable_seconds: float
    """From the beginning of `save` until it was known to be published."""
    num_bytes: int
    """Bytes of all ranks together."""
    state_digest: str
    """Digest of weights and moments; see `state_digest.py`."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A save between its beginning and its publication."""

    about: About
    plan: SavePlan
    state: state.State
    save_id: str
    started: float
    stall_seconds: float
    writing: Future[tuple[FileRecord, bytes, int]]
    """Writes this rank's file."""
    publishing: Future[None] | None = None
    """On rank 0, once all ranks have written."""
    manifest: Manifest | None = None
    """Without its log; None until all ranks have written."""

    @property
    def task(self) -> Future[Any]:
        """The newest thing to be done in the background."""
        return self.publishing or self.writing


class Saver:
    """One rank's part in saving. At most one save is in flight; host buffers are allocated once and reused.

        saver.take_lease()                       before the first save
        saver.save(model, optimizer, about)      returns once the state is copied to the host
        saver.poll()                             at each later batch: `Saved` when it has just been published
        saver.wait()                             the same, but waits

    `after_publish` is called on rank 0 in the background, such as to remove old checkpoints; the save counts as in
    flight until it returns, and what it raises ends the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        parent_save_id: str | None = None,
        after_publish: Callable[[Lease], None] = lambda lease: None,
        note_wait: Callable[[str, float], None] = lambda name, seconds: None,
    ):
        self.store = store
        self.after_publish = after_publish
        self.note_wait = note_wait
        """Called on each rank while it waits: with the name of the save, and for how long it has waited."""
        self.lease: Lease | None = None
        """None on all ranks but 0."""
        self.has_lease = False
        """Whether rank 0 has one; the same on all ranks."""
        self._renewals: Renewals | None = None
        """On rank 0, once it has the lease."""
        self.parent_save_id = parent_save_id
        self.log_parts: tuple[LogPart, ...] = ()
        """On rank 0: the last save's log; at first that of the checkpoint in this store that the run carries on
        from."""
        self.rank, _ = exchange.rank_and_size()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._signature: Any = None
        """Names, dtypes, shapes and placements, on which the plan depends."""
        self._plan: SavePlan | None = None
        self._staged_plan: SavePlan | None = None
        """The plan of `_staged`."""
        self._staged: Tensors = {}
        """Host copies of this rank's chunks by key, in the order of the file."""
        self._content = torch.empty(0, dtype=torch.uint8)
        """Memory of `_staged`: the content of the file after its header."""
        self._flight: Flight | None = None

    @property
    def has_flight(self) -> bool:
        """A save has begun and `poll` has not returned it; the same on all ranks."""
        return self._flight is not None

    @property
    def is_busy(self) -> bool:
        """This rank writes or publishes at this moment."""
        return self._flight is not None and not self._flight.task.done()

    def take_lease(self, *, steal_from_live_writer: bool = False, request: LeaseRequest | None = None) -> None:
        """Take the run's lease on rank 0, and renew it from then on. Raises CheckpointError on all ranks; see
        `CheckpointStore.acquire`."""
        with exchange.raising_on_all_ranks():
            if self.rank == 0:
                self.lease = self.store.acquire(steal_from_live_writer=steal_from_live_writer, request=request)
                self._renewals = Renewals(self.store.leases, self.lease)
                weakref.finalize(self, self._renewals.stop)
        self.has_lease = True

    def release_lease(self) -> None:
        """Let another launch take the lease at once, if this rank has one. Nothing is saved afterwards."""
        if self._renewals is not None:
            self._renewals.release()

    def save(self, model: nn.Module, optimizer: Optimizer | None, about: About) -> Saved | None:
        """Copy the state to the host and start writing it. Waits for the save in flight, if any, and returns it."""
        assert self.has_lease, "take_lease comes before the first save"  # on all ranks, before any collective
        started = time.monotonic()
        earlier = self.wait()
        found = state.read_state(model, optimizer)
        save_id = None
        if self.rank == 0:
            assert self.lease is not None, "rank 0 saves under a lease"
            save_id = self.store.new_save_id(self.lease, about.timestamp.batch)
        plan = self._agree_on_plan(found)
        save_id = exchange.broadcast_json(save_id)
        self.store.on_phase("planned")
        self._stage(plan, found)
        self._flight = Flight(
            about=replace(about, scalars=copy.deepcopy(about.scalars)),  # copied now, because it is encoded later
            plan=plan,
            state=found,
            save_id=save_id,
            started=started,
            stall_seconds=time.monotonic() - started,
            writing=self._background.submit(self._write, plan, found, save_id),
        )
        return earlier

    def digest(self, model: nn.Module, optimizer: Optimizer | None) -> str:
        """Return the digest that a save of this moment would have. Collective; a save in flight goes on."""
        found = state.read_state(model, optimizer)
        sources = _sources(self._agree_on_plan(found), found)
        with torch.no_grad():
            parts = [
                sum_keyed(one.tensor, source, one.offset, found.tensors[one.tensor].shape) for one, source in sources
            ]
        return format_digest(exchange.all_reduce_sum([sum(parts)])[0])

    def poll(self, *, all_idle: bool | None = None) -> Saved | None:
        """Move the save in flight to its next phase if no rank is busy. Returns it when it has been published.

        Collective: every rank must call this at the same batches. `all_idle`: no rank `is_busy`, if ranks have
        exchanged that already. Raises on all ranks when any could not write; the checkpoints published before are
        untouched.
        """
        flight = self._flight
        if flight is None:
            return None
        if all_idle is None:
            all_idle = not exchange.all_reduce_max([int(self.is_busy)])[0]
        if not all_idle:
            return None
        try:
            error = flight.task.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            exchange.raise_on_all_ranks(error)
            if flight.manifest is None:
                flight.manifest = self._gather_reports(flight)
                if self.rank == 0:
                    flight.publishing = self._background.submit(self._publish, flight.manifest, flight.about.log)
                return None
        except BaseException:
            self._flight = None
            if self.rank == 0 and flight.task.done():  # else interrupted while it is being published
                self._abandon(flight.save_id)
            raise
        self._flight = None
        self.parent_save_id = flight.save_id
        return Saved(
            name=f"ba{flight.about.timestamp.batch}",
            save_id=flight.save_id,
            stall_seconds=flight.stall_seconds,
            durable_seconds=time.monotonic() - flight.started,
            num_bytes=flight.manifest.num_bytes,
            state_digest=flight.manifest.state_digest or "",
        )

    def _abandon(self, save_id: str) -> None:
        """Remove a failed save's draft, in the background behind a URL: a store that is down would hold the training
        for as long as the save took to fail."""
        if self.store.root.path_here is None:
            self._background.submit(self.store.abandon, save_id)
        else:
            self.store.abandon(save_id)

    def wait(self) -> Saved | None:
        """Wait until the save in flight is published. Collective, and raises, as `poll`.

        The ranks meet every POLL_SECONDS. Otherwise, if a store does not answer one rank, the others would wait for it
        in a collective until that fails (`dist_timeout`).
        """
        saved = None
        began = time.monotonic()
        note_after_seconds = NOTE_SECONDS
        while self._flight is not None:
            batch = self._flight.about.timestamp.batch
            wait_for([self._flight.task], timeout=POLL_SECONDS)
            saved = self.poll()

            seconds = time.monotonic() - began
            if self._flight is not None and seconds >= note_after_seconds:
                self.note_wait(f"ba{batch}", seconds)
                note_after_seconds *= 2
        return saved

    # ------------------------------------------------------------------------------------------- copying and writing

    def _agree_on_plan(self, found: state.State) -> SavePlan:
        """Return who writes what; a new plan only if names, dtypes, shapes or placements have changed on any rank."""
        signature = [(name, t.dtype, t.shape, getattr(t, "placements", None)) for name, t in found.tensors.items()]
        if exchange.all_reduce_max([signature != self._signature])[0] or self._plan is None:
            self._plan = agree_on_plan(found.tensors, found.row_orders)
            self._signature = signature
        return self._plan

    def _stage(self, plan: SavePlan, found: state.State) -> None:
        if plan is not self._staged_plan:
            size = sum(one.num_bytes for one in plan.mine.values())
            self._staged = {}
            if size != self._content.numel():
                self._content = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
                is_pinned = any(tensor.device.type == PINNED for tensor in found.tensors.values())
                self._content = aligned_memory(size, is_pinned)
            parts = self._content.split([one.num_bytes for one in plan.mine.values()])
            for (key, one), part in zip(plan.mine.items(), parts, strict=True):
                self._staged[key] = part.view(DTYPES[one.dtype]).view(one.shape)
            self._staged_plan = plan
        on_device = False
        with torch.no_grad():
            for (_, source), staged in zip(_sources(plan, found), self._staged.values(), strict=True):
                on_device |= source.device.type != "cpu"
                staged.copy_(source, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()

    def _write(self, plan: SavePlan, found: state.State, save_id: str) -> tuple[FileRecord, bytes, int]:
        """Write this rank's file, in the background. Returns its record, the digest of all that is not a tensor, and
        this rank's part of the state's digest."""
        folder, _ = self.store.open_draft(save_id)
        name = file_name(self.rank)
        header = build_header(plan.mine, {"save_id": save_id}, block_bytes=BLOCK_BYTES)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-finite") as beside:
                checked = beside.submit(self._examine, plan)
                record = write_shard(folder, name, header, [as_bytes(self._content)], on_phase=self.store.on_phase)
        except OSError as error:
            raise CheckpointError(f"{folder.url}/{name}: not written: {error.strerror or error}") from error
        poisoned, digest = checked.result()
        if poisoned:
            more = f" and {len(poisoned) - 1} more" if len(poisoned) > 1 else ""
            raise CheckpointError(f"not saved: non-finite values in {poisoned[0]}{more}; older checkpoints stand")
        return record, hash_buffers([repr([found.optimizer, found.aliases]).encode()]), digest

    def _examine(self, plan: SavePlan) -> tuple[list[str], int]:
        """Return the staged chunks with a value that is not finite, and this rank's part of the state's digest."""
        poisoned, digest = [], 0
        for key, one in plan.mine.items():
            staged = self._staged[key]

            def look(part: torch.Tensor, key: str = key) -> None:
                if key not in poisoned and not _is_finite(part):
                    poisoned.append(key)

            digest += sum_keyed(one.tensor, staged, one.offset, plan.tensors[one.tensor].shape, look)
        return poisoned, digest % (1 << 64)

    # ---------------------------------------------------------------------------------------------------- publishing

    def _gather_reports(self, flight: Flight) -> Manifest:
        """Exchange what each rank has written, 56 bytes a rank. Returns the manifest without its log."""
        plan = flight.plan
        record, numbers, part = flight.writing.result()
        mine = REPORT.pack(record.num_bytes, record.header_bytes, bytes.fromhex(record.digest), numbers, part)
        reports = [REPORT.unpack(raw) for raw in exchange.all_gather_bytes(mine)]
        for rank, table in enumerate(plan.table_of_rank):
            if reports[rank][3] != reports[first := plan.first_ranks[table]][3]:
                raise CheckpointError(
                    f"not saved: rank {rank} has other optimizer groups or steps than rank {first}; ranks have drifted "
                    "apart"
                )
        _, prefix = self.store.commits.draft(flight.save_id)
        files = [
            replace(record, name=prefix + file_name(rank), num_bytes=n, header_bytes=m, digest=digest.hex())
            for rank, (n, m, digest, *_) in enumerate(reports)
        ]
        optimizer, aliases = flight.state.optimizer, flight.state.aliases
        if len(plan.first_ranks) > 1:  # ranks have different tensors, each with groups and steps of its own
            own = encode_value([optimizer, aliases])
            parts = [decode_value(exchange.broadcast_json(own, source=rank)) for rank in plan.first_ranks]
            optimizer = state.join_optimizers([its_optimizer for its_optimizer, _ in parts])
            aliases = {alias: name for _, its_aliases in parts for alias, name in its_aliases.items()}
        return Manifest(
            **{one.name: getattr(flight.about, one.name) for one in fields(About) if one.name != "log"},
            save_id=flight.save_id,
            parent_save_id=self.parent_save_id,
            lease_epoch=lease_epoch_of(flight.save_id),
            written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            optimizer=optimizer,
            aliases=aliases,
            tensors=plan.tensors,
            state_digest=format_digest(sum(report[4] for report in reports)),
            files=tuple(files),
        )

    def _publish(self, manifest: Manifest, log: Callable[[], bytes] | None) -> None:
        """Publish in the background, on rank 0."""
        assert self.lease is not None
        folder, _ = self.store.open_draft(manifest.save_id)
        parts = ()
        try:
            if log is not None:
                parts = write_log(self.store, manifest.save_id, log(), self.log_parts)
        except OSError as error:
            raise CheckpointError(f"{folder.url}: what goes with the tensors was not written: {error}") from error
        self.store.publish(replace(manifest, log=parts), self.lease)
        self.log_parts = parts
        self.after_publish(self.lease)


def _sources(plan: SavePlan, found: state.State) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield each chunk that this rank writes, and the tensor with its values."""
    for one in plan.mine.values():
        tensor = found.tensors[one.tensor]
        source = local_tensor(tensor)
        if one.tensor in found.row_orders:
            boxes = boxes_of(tensor, found.row_orders[one.tensor])
            at = next(at for (offset, _), at in boxes if offset == one.offset)
            source = source.narrow(0, at, one.shape[0])
        yield one, source


def file_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no value is nan or infinite, in one pass without a copy. The sum shows either, in half the time of
    minimum and maximum. These decide where the sum may have overflowed."""
    if not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return math.isfinite(float(tensor.sum())) or all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def aligned_memory(num_bytes: int, pinned: bool) -> torch.Tensor:
    """Return host memory from which a disk takes bytes without a copy (`LocalSink`) and, pinned, to which a device
    copies without a wait.

    torch's own pinned memory is rounded up to a power of two and never given back. This is pageable memory of the size
    that is asked for, which the driver is told to pin until it is freed. Where it refuses, copies wait.
    """
    if pinned and num_bytes:
        try:
            pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of host memory to copy a save to: {error.strerror}") from None
        pages.madvise(mmap.MADV_DONTFORK)  # a fork would leave the device with pages that are no longer this rank's
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        pages.pin(memory.data_ptr())
        return memory
    memory = torch.empty(num_bytes + DIRECT_BYTES, dtype=torch.uint8)
    begin = -memory.data_ptr() % DIRECT_BYTES
    return memory[begin : begin + num_bytes]


class _Pages(mmap.mmap):
    """Whole pages, pinned until they are freed if the driver can. HIP's functions have the names of CUDA's here."""

    unpin: Callable[[], Any] | None = None

    def pin(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(self), 0)) == 0:
            self.unpin = partial(runtime.cudaHostUnregister, address)
            return
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device=PINNED)  # clears the error, which the next kernel would report as its own

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
