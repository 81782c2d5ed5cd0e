"""A model and its optimizer -> safetensors shards: what all ranks of a run do together to save.

On every rank's main thread:

    saver = open_saver(CheckpointStore(url), parent_save_id=…)     takes the lease
    saver.save(model, optimizer, about)      returns once the state is copied to the host; the rest is in background
    saver.poll()                             at each later batch: None, or `Saved` when it has just been published
    saver.wait()                             the same, but waits

Restoring is in `restore`. DCP's planners decide which rank writes what (replicated tensors once, spread evenly). They
are called in the documented order rather than through `dcp.save`, whose collectives pickle every plan; plans go as
JSON, and only when they have changed since the last save. Background threads never touch a collective: ranks learn of
each other's progress in `poll`.
"""

import copy
import datetime
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import exchange, state
from llmfoundry_lite.checkpoint.exchange import Group
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.places import Place
from llmfoundry_lite.checkpoint.planning import (
    Box,
    StagedPlanner,
    agree_on_plans,
    box_of,
    file_name,
    layout,
    tensor_records,
)
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, hash_pieces, write_shard
from llmfoundry_lite.checkpoint.state import DTYPES, Tensors, local_part
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.errors import CheckpointError

PINNED = "cuda"


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


class ShardWriter(StorageWriter):
    """DCP's view of one rank's file of one save. The manifest is the coordinator's, who publishes."""

    def __init__(
        self,
        place: Place,
        name: str,
        save_id: str,
        num_threads: int = 4,
        on_phase: Callable[[str], None] = lambda p: None,
    ):
        self.place, self.name, self.save_id = place, name, save_id
        self.num_threads = num_threads
        self.on_phase = on_phase
        self.record: FileRecord | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.record = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Hash and write. Raises here, in the caller's thread, whatever went wrong in any other."""
        items = {box_of(item).entry.key: item for item in plan.items}
        header, ranges = layout([box_of(item) for item in plan.items], self.save_id)
        resolved = [planner.resolve_data(items[box.entry.key]) for box, _, _ in ranges]
        pieces = [header, *(as_bytes(tensor) for tensor in resolved if isinstance(tensor, torch.Tensor))]
        self.record = write_shard(
            self.place, self.name, pieces, num_threads=self.num_threads, block_bytes=BLOCK_BYTES, on_phase=self.on_phase
        )
        results: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        results.set_result(
            [WriteResult(items[box.entry.key].index, end - begin, self.name) for box, begin, end in ranges]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def open_saver(
    store: CheckpointStore,
    *,
    parent_save_id: str | None = None,
    group: Group = None,
    num_threads: int = 4,
    after_publish: Callable[[Lease], None] = lambda lease: None,
) -> "Saver":
    """Take the run's lease on rank 0. Raises CheckpointError on all ranks if it cannot be had.

    `after_publish` is called on rank 0 in the background, such as to remove old checkpoints; the save counts as in
    flight until it returns, and what it raises ends the run.
    """
    lease, error = None, None
    if exchange.rank_and_size(group)[0] == 0:
        try:
            lease = store.acquire()
        except CheckpointError as caught:
            error = caught
    exchange.agree(error, group)
    return Saver(
        store,
        lease,
        parent_save_id=parent_save_id,
        group=group,
        num_threads=num_threads,
        after_publish=after_publish,
    )


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
        self.parent_save_id = parent_save_id
        self.group = group
        self.num_threads = num_threads
        self.rank, self.world_size = exchange.rank_and_size(group)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._signature: Any = None
        self._plans: list[list[Box]] = []
        self._planner: StagedPlanner | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._flight: _Flight | None = None

    @property
    def is_saving(self) -> bool:
        return self._flight is not None

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
        agreed = exchange.gather_json([signature != self._signature, lease_and_id], self.group, room_bytes=256)
        epoch, save_id = agreed[0][1]
        if any(is_new for is_new, _ in agreed):
            self._plan(found.tensors)
            self._signature = signature
        self.store.on_phase("planned")
        assert self._planner is not None
        self._stage(found.tensors)
        about = replace(about, scalars=copy.deepcopy(about.scalars))  # of this moment too, though encoded later
        stall_seconds = time.monotonic() - started
        self._flight = _Flight(
            about=about,
            state=found,
            save_id=save_id,
            lease_epoch=epoch,
            started=started,
            stall_seconds=stall_seconds,
            task=self._background.submit(self._write, self._planner, found, save_id),
        )
        return earlier

    def poll(self) -> Saved | None:
        """Move the save in flight on. Returns it when it has been published since the last call.

        Every rank must call this at the same batches. Raises on all ranks when any could not write; the checkpoints
        published before are untouched.
        """
        flight = self._flight
        if flight is None or exchange.max_of([0 if flight.task.done() else 1], self.group)[0]:
            return None
        try:
            exchange.agree(_error_of(flight.task), self.group)
            if not flight.is_publishing:
                manifest = self._gather_manifest(flight)
                flight.num_bytes = manifest.num_bytes
                flight.is_publishing = True
                if self.rank == 0:
                    flight.task = self._background.submit(self._publish, manifest, flight.about)
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

    def _plan(self, tensors: Tensors) -> None:
        self._planner = StagedPlanner(tensors, self.rank == 0)
        self._plans = agree_on_plans(self._planner, self.group)
        self._planner.state_dict = {}  # or the tensors of this save would be kept alive until the plan changes
        boxes = [box for box, _, _ in layout(self._plans[self.rank], "")[1]]
        size = sum(box.entry.num_bytes for box in boxes)
        if size > self._buffer.numel():
            pinned = any(tensor.device.type == PINNED for tensor in tensors.values())
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        begin = 0
        for box in boxes:
            end = begin + box.entry.num_bytes
            staged = self._buffer[begin:end].view(DTYPES[box.dtype]).view(box.lengths)
            self._planner.staged[box.entry.key] = staged
            begin = end

    def _stage(self, tensors: Tensors) -> None:
        assert self._planner is not None
        on_device = False
        with torch.no_grad():
            for box in self._plans[self.rank]:
                source = local_part(tensors[box.name])
                on_device |= source.device.type != "cpu"
                self._planner.staged[box.entry.key].copy_(source, non_blocking=True)
        if on_device:
            torch.cuda.synchronize()

    def _write(self, planner: StagedPlanner, found: state.State, save_id: str) -> dict[str, Any]:
        """In the background: this rank's file. Returns what rank 0 needs for the manifest."""
        place, prefix = self.store.open_draft(save_id)
        name = file_name(self.rank)
        writer = ShardWriter(place, name, save_id, self.num_threads, self.store.on_phase)
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-finite") as beside:
                poisoned = beside.submit(_non_finite, planner.staged)
                writer.write_data(planner.plan, planner)
        except OSError as error:
            raise CheckpointError(f"{place.url}/{name}: not written: {error.strerror or error}") from error
        except EOFError as error:
            raise CheckpointError(f"not written: {error}") from error
        if poisoned.result():
            names = describe_some(poisoned.result())
            raise CheckpointError(f"not saved: non-finite values in {names}; older checkpoints stand")
        assert writer.record is not None
        record = asdict(writer.record) | {"name": prefix + name}
        return {"file": record, "numbers": _digest([found.optimizer, found.aliases])}

    def _publish(self, manifest: Manifest, about: About) -> None:
        """In the background, on rank 0."""
        assert self.lease is not None
        place, prefix = self.store.open_draft(manifest.save_id)
        records = []
        try:
            for name, content in about.attachments().items():
                record = write_shard(place, name, [content], num_threads=1)
                records.append(replace(record, name=prefix + name))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{place.url}: what goes with the tensors was not written: {error}") from error
        self.store.publish(replace(manifest, attachments=tuple(records)), self.lease)
        self.after_publish(self.lease)

    def _gather_manifest(self, flight: "_Flight") -> Manifest:
        reports = exchange.gather_json(flight.task.result(), self.group)
        odd = [rank for rank, report in enumerate(reports) if report["numbers"] != reports[0]["numbers"]]
        if odd:
            raise CheckpointError(
                f"not saved: rank {odd[0]} has other optimizer groups or steps than rank 0; ranks have drifted apart"
            )
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
            optimizer=flight.state.optimizer,
            aliases=flight.state.aliases,
            tensors=tensor_records(self._plans, flight.save_id, flight.state.tensors),
            files=tuple(FileRecord(**report["file"]) for report in reports),
        )


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


def _digest(value: Any) -> str:
    return hash_pieces([repr(value).encode()])


def describe_some(keys: Sequence[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def as_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
