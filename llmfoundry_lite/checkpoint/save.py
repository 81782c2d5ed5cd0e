"""A model and its optimizer -> safetensors shards: what all ranks of a run do together to save.

On every rank's main thread:

    saver = open_saver(CheckpointStore(url), parent_save_id=…)     takes the lease
    saver.save(model, optimizer, about)      returns once the state is copied to the host; the rest is in background
    saver.poll()                             at each later batch: None, or `Saved` when it has just been published
    saver.wait()                             the same, but waits

Restoring is in `restore`. `planning` decides which rank writes what (replicated tensors once, spread evenly), at the
first save and again only when a tensor has changed its shape or sharding. Later saves exchange a few dozen bytes a
rank. Background threads never touch a collective: ranks learn of each other's progress in `poll`.
"""

import contextlib
import copy
import datetime
import math
import mmap
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import state
from llmfoundry_lite.checkpoint.local_folder import DIRECT_BYTES
from llmfoundry_lite.checkpoint.log_parts import write_log
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.planning import Plan, agree_on_plan, boxes_of
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, hash_pieces, write_file, write_shard
from llmfoundry_lite.checkpoint.state import DTYPES, Tensors, local_part
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.config.layout import Runs
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.exchange import Group

PINNED = "cuda"
REPORT = struct.Struct("<QQ16s16s")
"""A `Report`, packed."""


class Report(NamedTuple):
    """What a rank says of its file."""

    num_bytes: int
    header_bytes: int
    digest: bytes
    numbers: bytes
    """The digest of all that is not a tensor."""

    def record(self, name: str) -> FileRecord:
        return FileRecord(
            name=name,
            num_bytes=self.num_bytes,
            block_bytes=BLOCK_BYTES,
            header_bytes=self.header_bytes,
            digest=self.digest.hex(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a manifest holds besides tensors and optimizer; rank 0's is used. Fields as in `Manifest`."""

    timestamp: Timestamp
    run_name: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    config: Any = None
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    attachments: Callable[[], dict[str, bytes]] = dict
    """File name -> content, asked for in the background just before the manifest is written."""
    log: Callable[[], bytes] | None = None
    """The run's log so far, asked for likewise; None: it does not travel with the checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    name: str
    save_id: str
    stall_seconds: float
    """How long `save` took on this rank, waiting for the one before included."""
    durable_seconds: float
    """From the beginning of `save` until it was known to be published."""
    num_bytes: int
    """Of all ranks together."""


# -------------------------------------------------------------------------------------------------------------- saving


def open_saver(
    store: CheckpointStore,
    *,
    parent_save_id: str | None = None,
    group: Group = None,
    num_threads: int = 4,
    after_publish: Callable[[Lease], None] = lambda lease: None,
    takes_lease: bool = True,
) -> "Saver":
    """Take the run's lease on rank 0, now or when `Saver.take_lease` is called. Raises CheckpointError on all ranks if
    it cannot be had.

    `after_publish` is called on rank 0 in the background, such as to remove old checkpoints; the save counts as in
    flight until it returns, and what it raises ends the run.
    """
    saver = Saver(
        store,
        None,
        parent_save_id=parent_save_id,
        group=group,
        num_threads=num_threads,
        after_publish=after_publish,
    )
    if takes_lease:
        saver.take_lease()
    return saver


class Saver:
    """One rank's part in saving. At most one save is in flight; host buffers are allocated once and reused."""

    def __init__(
        self,
        store: CheckpointStore,
        lease: Lease | None,
        *,
        parent_save_id: str | None = None,
        group: Group = None,
        num_threads: int = 4,
        after_publish: Callable[[Lease], None] = lambda lease: None,
    ):
        self.store = store
        self.after_publish = after_publish
        self.lease = lease
        """On rank 0; None elsewhere."""
        self.has_lease = lease is not None
        """Rank 0 has."""
        self.parent_save_id = parent_save_id
        self.log_parts: tuple[FileRecord, ...] = ()
        """On rank 0, of the last save; at first, those of the checkpoint of this store that the run carries on from."""
        self.group = group
        self.num_threads = num_threads
        self.rank, self.world_size = exchange.rank_and_size(group)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._signature: Any = None
        self._plan: Plan | None = None
        self._staged: Tensors = {}
        """By key in the file, in its order."""
        self._content = torch.empty(0, dtype=torch.uint8)
        """The memory of `_staged`: what the file has after its header."""
        self._flight: _Flight | None = None

    @property
    def is_saving(self) -> bool:
        return self._flight is not None

    @property
    def is_writing(self) -> bool:
        """This rank has something to write or to publish still."""
        return self._flight is not None and not self._flight.task.done()

    def take_lease(self, *, steal_from_live_writer: bool = False) -> None:
        """On rank 0. Raises CheckpointError on all ranks; see `CheckpointStore.acquire`."""
        error = None
        if self.rank == 0:
            try:
                self.lease = self.store.acquire(steal_from_live_writer=steal_from_live_writer)
            except CheckpointError as caught:
                error = caught
        exchange.raise_on_all_ranks(error, self.group)
        self.has_lease = True

    def save(self, model: nn.Module, optimizer: Optimizer | None, about: About) -> Saved | None:
        """Copy the state to the host and start writing it. Waits for the save in flight, if any, and returns it."""
        started = time.monotonic()
        earlier = self.wait()
        found = state.read_state(model, optimizer)
        lease_and_id = None
        if self.rank == 0:
            assert self.lease is not None, "rank 0 saves under a lease"
            lease_and_id = [self.lease.epoch, self.store.new_save_id(self.lease, about.timestamp.batch)]
        signature = _signature(found.tensors)
        if exchange.max_of([signature != self._signature], self.group)[0]:
            self._make_plan(found.tensors, found.row_orders)
            self._signature = signature
        epoch, save_id = exchange.broadcast_json(lease_and_id, self.group)
        self.store.on_phase("planned")
        self._stage(found.tensors, found.row_orders)
        about = replace(about, scalars=copy.deepcopy(about.scalars))  # of this moment too, though encoded later
        stall_seconds = time.monotonic() - started
        self._flight = _Flight(
            about=about,
            state=found,
            save_id=save_id,
            lease_epoch=epoch,
            started=started,
            stall_seconds=stall_seconds,
            task=self._background.submit(self._write, found, save_id),
        )
        return earlier

    def poll(self, *, all_written: bool | None = None) -> Saved | None:
        """Move the save in flight on. Returns it when it has been published since the last call.

        Every rank must call this at the same batches. `all_written`: no rank `is_writing`, where ranks have told each
        other already. Raises on all ranks when any could not write; the checkpoints published before are untouched.
        """
        flight = self._flight
        if flight is None:
            return None
        if all_written is None:
            all_written = not exchange.max_of([int(self.is_writing)], self.group)[0]
        if not all_written:
            return None
        try:
            exchange.raise_on_all_ranks(_error_of(flight.task), self.group)
            if not flight.is_publishing:
                reports = self._gather_reports(flight)
                optimizer, aliases = self._gather_numbers(flight.state)
                flight.is_publishing = True
                if self.rank == 0:
                    manifest = self._describe(flight, optimizer, aliases)
                    flight.task = self._background.submit(self._publish, manifest, reports, flight.about)
                return None
        except BaseException:
            self._flight = None
            if self.rank == 0 and flight.task.done():  # else interrupted while it is being published
                self.store.abandon(flight.save_id)
            raise
        self._flight = None
        self.parent_save_id = flight.save_id
        return Saved(
            name=f"ba{flight.about.timestamp.batch}",
            save_id=flight.save_id,
            stall_seconds=flight.stall_seconds,
            durable_seconds=time.monotonic() - flight.started,
            num_bytes=flight.num_bytes,
        )

    def wait(self) -> Saved | None:
        """Until the save in flight is published. Collective, and raises, as `poll`."""
        saved = None
        while self._flight is not None:
            wait_for([self._flight.task])
            saved = self.poll()
        return saved

    def _make_plan(self, tensors: Tensors, row_orders: Mapping[str, Runs]) -> None:
        self._plan = agree_on_plan(tensors, self.group, row_orders)
        boxes = self._plan.mine
        size = sum(box.entry.num_bytes for box in boxes)
        if size != self._content.numel():
            pinned = any(tensor.device.type == PINNED for tensor in tensors.values())
            self._staged, self._content = {}, torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self._content = aligned_memory(size, pinned)
        self._staged, begin = {}, 0
        for box in boxes:
            end = begin + box.entry.num_bytes
            self._staged[box.entry.key] = self._content[begin:end].view(DTYPES[box.dtype]).view(box.lengths)
            begin = end

    def _stage(self, tensors: Tensors, row_orders: Mapping[str, Runs]) -> None:
        assert self._plan is not None
        on_device = False
        with torch.no_grad():
            for box, staged in zip(self._plan.mine, self._staged.values(), strict=True):
                source = local_part(tensors[box.name])
                if box.name in row_orders:
                    mine = boxes_of(tensors[box.name], row_orders[box.name])
                    at = next(own.at for own in mine if own.offset == box.offset)
                    source = source.narrow(0, at, box.lengths[0])
                on_device |= source.device.type != "cpu"
                staged.copy_(source, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()

    def _write(self, found: state.State, save_id: str) -> tuple[FileRecord, bytes]:
        """In the background: this rank's file. Returns its record and the digest of all that is not a tensor."""
        assert self._plan is not None
        folder, _ = self.store.open_draft(save_id)
        name = file_name(self.rank)
        header, _ = build_header([box.entry for box in self._plan.mine], {"save_id": save_id}, block_bytes=BLOCK_BYTES)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-finite") as beside:
                poisoned = beside.submit(_non_finite, self._staged)
                record = write_shard(
                    folder,
                    name,
                    header,
                    [as_bytes(self._content)],
                    num_threads=self.num_threads,
                    on_phase=self.store.on_phase,
                )
        except OSError as error:
            raise CheckpointError(f"{folder.url}/{name}: not written: {error.strerror or error}") from error
        except EOFError as error:
            raise CheckpointError(f"not written: {error}") from error
        if poisoned.result():
            names = describe_some(poisoned.result())
            raise CheckpointError(f"not saved: non-finite values in {names}; older checkpoints stand")
        return record, hash_pieces([repr([found.optimizer, found.aliases]).encode()])

    def _publish(self, manifest: Manifest, reports: Sequence[Report], about: About) -> None:
        """In the background, on rank 0."""
        assert self.lease is not None
        folder, prefix = self.store.open_draft(manifest.save_id)
        records, log = [], ()
        try:
            for name, content in about.attachments().items():
                record = write_file(folder, name, content)
                records.append(replace(record, name=prefix + name))
            if about.log is not None:
                log = write_log(self.store, manifest.save_id, about.log(), self.log_parts)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{folder.url}: what goes with the tensors was not written: {error}") from error
        files = tuple(report.record(prefix + file_name(rank)) for rank, report in enumerate(reports))
        self.store.publish(replace(manifest, files=files, attachments=tuple(records), log=log), self.lease)
        self.log_parts = log
        self.after_publish(self.lease)

    def _gather_reports(self, flight: "_Flight") -> list[Report]:
        """What each rank has written: 48 bytes a rank."""
        assert self._plan is not None
        record, numbers = flight.task.result()
        mine = REPORT.pack(record.num_bytes, record.header_bytes, bytes.fromhex(record.digest), numbers)
        reports = [Report(*REPORT.unpack(raw)) for raw in exchange.gather_bytes(mine, self.group)]
        flight.num_bytes = sum(report.num_bytes for report in reports)
        for rank, table in enumerate(self._plan.table_of_rank):
            if reports[rank].numbers != reports[first := self._plan.first_ranks[table]].numbers:
                raise CheckpointError(
                    f"not saved: rank {rank} has other optimizer groups or steps than rank {first}; ranks have drifted "
                    "apart"
                )
        return reports

    def _describe(self, flight: "_Flight", optimizer: dict[str, Any] | None, aliases: dict[str, str]) -> Manifest:
        """All but the files."""
        assert self._plan is not None
        about = flight.about
        return Manifest(
            save_id=flight.save_id,
            parent_save_id=self.parent_save_id,
            lease_epoch=flight.lease_epoch,
            run_name=about.run_name,
            timestamp=about.timestamp,
            written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            fingerprints=about.fingerprints,
            config=about.config,
            segments=about.segments,
            scalars=about.scalars,
            optimizer=optimizer,
            aliases=aliases,
            tensors=self._plan.tensors,
            files=(),
        )

    def _gather_numbers(self, found: state.State) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """The optimizer's groups and steps of all ranks together, which differ only where ranks have other tensors."""
        assert self._plan is not None
        if len(self._plan.first_ranks) == 1:
            return found.optimizer, found.aliases
        mine = encode_value([found.optimizer, found.aliases])
        parts = [decode_value(exchange.broadcast_json(mine, self.group, source=r)) for r in self._plan.first_ranks]
        return state.join_optimizers([optimizer for optimizer, _ in parts]), {
            alias: name for _, aliases in parts for alias, name in aliases.items()
        }


def file_name(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def _signature(tensors: Tensors) -> list[Any]:
    """What a plan depends on."""
    return [(name, tensor.dtype, tensor.shape, getattr(tensor, "placements", None)) for name, tensor in tensors.items()]


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A save between its beginning and its publication."""

    about: About
    state: state.State
    save_id: str
    lease_epoch: int
    started: float
    stall_seconds: float
    task: Future[Any]
    """Writing this rank's file; then, on rank 0, publishing."""
    is_publishing: bool = False
    num_bytes: int = 0


def _error_of(task: Future[Any]) -> Exception | None:
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def _non_finite(tensors: Tensors) -> list[str]:
    return [key for key, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass, no copy: a nan or an infinity shows in the extremes."""
    if not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))


def aligned_memory(num_bytes: int, pinned: bool) -> torch.Tensor:
    """From which a disk takes bytes without a copy: see `LocalSink`. Pinned: to which a device copies without a wait.

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
            torch.zeros(1, device=PINNED)  # the next kernel would report the refusal as its own

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def describe_some(keys: Sequence[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
