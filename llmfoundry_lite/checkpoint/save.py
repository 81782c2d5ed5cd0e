"""Saves a model and its optimizer as safetensors shards, written by all ranks in the background while training goes on.

A save of batch N passes through three phases:

    batch N                                  ranks plan and copy their state; each begins to write its file
    first later batch with no rank busy      ranks exchange reports of their files; rank 0 begins to publish
    next batch with no rank busy             `poll` returns `Saved`

The training loop calls `Saver.save` and `Saver.poll` after the same batches on all ranks, and only these calls
communicate. Background threads never take part in a collective, because its order among the loop's collectives would
differ between ranks. So ranks learn of each other's progress and errors in `poll`.

`state` and `planning` say what to write, `staging` copies it, `shards` writes a file, and `store` publishes. When to
save is the loop's.
"""

import copy
import datetime
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import state
from llmfoundry_lite.checkpoint.commit import lease_epoch_of
from llmfoundry_lite.checkpoint.launch_record import RecordWriter
from llmfoundry_lite.checkpoint.lease import RELEASE_SECONDS, WATCH_SECONDS, LeaseRequest, Renewals
from llmfoundry_lite.checkpoint.manifest import FileRecord, LogPart, Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.planning import SavePlan, agree_on_plan
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, hash_buffers, write_shard
from llmfoundry_lite.checkpoint.staging import Staging, as_bytes, chunk_values
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks import exchange
from llmfoundry_lite.ranks.codec import decode_value, encode_value

POLL_SECONDS = 10.0
"""How often ranks that wait for a save meet in a collective. Much shorter than the time after which one fails."""
NOTE_SECONDS = 30.0
"""Time after which the user is first told that training waits for a save. The time doubles with each further note."""
REPORT = struct.Struct("<QQ16s16sQ")
"""Binary form of a `RankReport`: 56 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMetadata:
    """Fields of a `Manifest` that the training loop supplies. The manifest takes those of rank 0."""

    timestamp: Timestamp
    run_name: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    config: Any = None
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    log: Callable[[], bytes] | None = None
    """Returns the run's log so far. Called on rank 0 in a background thread, before the manifest is written. None: the
    checkpoint has no copy of the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A published save and what it cost."""

    name: str
    save_id: str
    stall_seconds: float
    """Time that `Saver.save` took on this rank, including the wait for the previous save."""
    durable_seconds: float
    """Time from the beginning of `Saver.save` until this rank learned that the save is published."""
    num_bytes: int
    """Bytes of all ranks' files together."""
    state_digest: str
    """Digest of all saved tensors. It does not depend on how ranks divide them; see `state_digest.py`."""
    is_in_second: bool = False
    """Whether it is in the run's second place, `save_fallback`."""


class RankReport(NamedTuple):
    """Report of a rank about the file that it has written, which all ranks exchange before the save is published."""

    num_bytes: int
    """Size of the file."""
    header_bytes: int
    """Size of the file's safetensors header."""
    file_digest: bytes
    """Digest of the file's header and block hashes."""
    optimizer_digest: bytes
    """Digest of the optimizer's groups and numbers, and of the names of tied tensors."""
    state_sum: int
    """This rank's part of the state digest."""


@dataclass(slots=True, kw_only=True)
class SaveInFlight:
    """A save that has begun and that `poll` has not returned yet. `poll` sets the last two fields."""

    metadata: SaveMetadata
    plan: SavePlan
    state: state.State
    store: CheckpointStore
    """The place that it goes to: the store of the run, or its second."""
    save_id: str
    started: float
    """Monotonic clock at the beginning of `Saver.save`."""
    stall_seconds: float
    writing: Future[RankReport]
    """Writes this rank's file."""
    publishing: Future[None] | None = None
    """Publishes the save. Only on rank 0, once all ranks have written."""
    manifest: Manifest | None = None
    """The manifest, still without its log. None until all ranks have written."""

    @property
    def background_task(self) -> Future[Any]:
        """The task that this rank's background thread runs or has run last: publishing, or before that writing."""
        return self.publishing or self.writing


class Saver:
    """Saves one rank's part of a model and its optimizer. Every rank of a run has a `Saver`.

        saver.take_lease()                         before the first save
        saver.save(model, optimizer, metadata)     returns when the state has been copied to host memory
        saver.poll()                               after each later batch; returns `Saved` once it is published
        saver.wait()                               does the same, but waits

    At most one save is in flight. Host memory is allocated at the first save and used again.

    If the store has a second place, a save goes there if the save before it failed in the first place, or while the
    first place does not take renewals of the lease. All files of a save are in one place, which rank 0 chooses.

    `after_publish` is called on rank 0 in a background thread, with the lease and the place of the save, for instance
    to remove old checkpoints. The save counts as in flight until it returns, and an error that it raises ends the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        parent_save_id: str | None = None,
        after_publish: Callable[[Lease, CheckpointStore], None] = lambda lease, place: None,
        note_wait: Callable[[str, float], None] = lambda name, seconds: None,
    ):
        """Prepare to save to a run's store, without reading or writing there. `parent_save_id` is the save that the run
        was restored from."""
        self.store = store
        self.second = store.second
        """The run's second place, until `take_lease` finds that it cannot be written. The same on all ranks."""
        self.second_error = ""
        """Why it cannot be written; empty if it can."""
        self.next_is_second = False
        """The last save failed in the first place, so that the next one goes to the second. True until that one is
        published or has failed. The same on all ranks."""
        self.after_publish = after_publish
        self.note_wait = note_wait
        """Called on each rank while it waits for a save, with the checkpoint's name and the seconds waited so far."""
        self.lease: Lease | None = None
        """The run's lease, on rank 0. None on all other ranks."""
        self.has_lease = False
        """Whether rank 0 has the lease. The same on all ranks."""
        self._renewals: Renewals | None = None
        """Renews the lease, on rank 0."""
        self._record_writer: RecordWriter | None = None
        """Writes the record of this launch beside the checkpoints, on rank 0."""
        self.parent_save_id = parent_save_id
        self.log_parts: tuple[LogPart, ...] = ()
        """On rank 0: the parts of the log that the last save in the first place has. Before the first save, those of
        the checkpoint in this store that the run carries on from."""
        self._second_log_parts: tuple[LogPart, ...] = ()
        """On rank 0: the same for the second place, from which all may have been removed once a save is published in
        the first."""
        self.rank, _ = exchange.rank_and_size()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._plan: SavePlan | None = None
        self._plan_signature: Any = None
        """The names, dtypes, shapes and placements that `_plan` was made for."""
        self._staging = Staging()
        """Copies of this rank's chunks in host memory."""
        self._in_flight: SaveInFlight | None = None

    @property
    def has_save_in_flight(self) -> bool:
        """Whether a save has begun that `poll` has not returned yet. The same on all ranks."""
        return self._in_flight is not None

    @property
    def url_in_flight(self) -> str:
        """Path or URL of the place that the save in flight goes to. There must be one."""
        assert self._in_flight is not None
        return self._in_flight.store.root.url

    @property
    def first_answers(self) -> bool:
        """Whether the lease has been renewed lately, so that the first place can be written. Only on rank 0."""
        return self._renewals is not None and self._renewals.silent_seconds < WATCH_SECONDS

    @property
    def is_busy(self) -> bool:
        """Whether this rank's background thread writes or publishes at this moment."""
        return self._in_flight is not None and not self._in_flight.background_task.done()

    def take_lease(self, *, steal_from_live_writer: bool = False, request: LeaseRequest | None = None) -> None:
        """Take the run's lease on rank 0, and renew it in the background until `release_lease`.

        Collective; comes before the first save. Sets `has_lease` on all ranks and `lease` on rank 0. The arguments are
        those of `CheckpointStore.acquire`. If the second place cannot be written, it is not used (`second` is None, and
        `second_error` says why). Raises CheckpointError on all ranks if rank 0 does not get the lease, or if a rank
        does not see the second place as rank 0 does.
        """
        with exchange.raising_on_all_ranks():
            if self.rank == 0:
                self.lease = self.store.acquire(steal_from_live_writer=steal_from_live_writer, request=request)
                self._renewals = Renewals(self.store.leases, self.lease)
                self._record_writer = RecordWriter(self.store.root, self.lease.epoch)
                # If this object is dropped without `release_lease`, the renewals must end, so that the lease expires.
                weakref.finalize(self, self._renewals.stop)
                weakref.finalize(self, self._record_writer.end)
        if self.second is not None:
            self._open_second(self.second)
        self.has_lease = True

    def _open_second(self, second: CheckpointStore) -> None:
        """Copy the lease's claim to the second place on rank 0, and check that all ranks see it there.

        Collective. Sets `second` to None if rank 0 cannot write there. Raises CheckpointError on all ranks if another
        rank does not see the claim, because its node has another disk there: such a place cannot hold a checkpoint.
        """
        epoch_and_error: tuple[int, str] = (0, "")
        if self.rank == 0:
            assert self.lease is not None
            epoch_and_error = self.lease.epoch, ""
            try:
                second.follow(self.lease)
            except CheckpointError as error:
                epoch_and_error = 0, str(error)
        epoch, self.second_error = exchange.broadcast_json(epoch_and_error)
        if self.second_error:
            self.second = None
            return
        if second.root.path_here is None:
            return  # a bucket is the same for all ranks
        with exchange.raising_on_all_ranks():
            try:
                second.check_is_seen(epoch)
            except CheckpointError as error:
                raise CheckpointError(
                    f"save_fallback: {error}. The ranks of all nodes save into one folder, so give one on a disk that "
                    "they share, a URL, or save_fallback=null"
                ) from None

    def release_lease(self) -> None:
        """Let another launch take the lease at once. Nothing can be saved or recorded afterwards.

        Waits for RELEASE_SECONDS at most, until the release and the record of this launch are written. Does nothing on
        ranks other than 0.
        """
        if self._renewals is None or self._record_writer is None:
            return
        began = time.monotonic()
        self._record_writer.end()
        self._renewals.release()
        self._record_writer.join(RELEASE_SECONDS - (time.monotonic() - began))

    def record_launch(self, record: dict[str, Any]) -> None:
        """Write a record of this launch beside the checkpoints, in the background; see `launch_record.py`.

        It may be called from any thread. Does nothing on ranks other than 0, and without the lease.
        """
        if self._record_writer is not None:
            self._record_writer.write(record)

    def save(self, model: nn.Module, optimizer: Optimizer | None, metadata: SaveMetadata) -> Saved | None:
        """Copy the state to host memory, and start to write it in the background.

        Collective; follow it with `poll` after each batch, or `wait`. Training may change model and optimizer as soon
        as this returns. `optimizer` None saves the weights alone; of `metadata`, the checkpoint gets what rank 0
        passes.

        If the previous save is still in flight, this waits for it first and returns it; otherwise it returns None.
        Raises CheckpointError on all ranks if that save has failed, or if the state cannot be saved.
        """
        assert self.has_lease, "take_lease comes before the first save"  # on all ranks, before any collective
        started = time.monotonic()
        previous_save = self.wait()  # also because its chunks are still in the host memory that is used again

        # All ranks agree on who writes what, and on the save's unique name.
        current_state = state.read_state(model, optimizer)
        id_and_place = None
        if self.rank == 0:
            assert self.lease is not None, "rank 0 saves under a lease"
            goes_to_second = self.second is not None and (self.next_is_second or not self.first_answers)
            id_and_place = self.store.new_save_id(self.lease, metadata.timestamp.batch), goes_to_second
        plan = self._agree_on_plan(current_state)
        save_id, goes_to_second = exchange.broadcast_json(id_and_place)
        store = self.store
        if goes_to_second:
            assert self.second is not None
            store = self.second
        store.on_phase("planned")

        # Copy what training will change. The scalars are encoded later, in the background.
        self._staging.copy_state(plan, current_state)
        metadata = replace(metadata, scalars=copy.deepcopy(metadata.scalars))
        self._in_flight = SaveInFlight(
            metadata=metadata,
            plan=plan,
            state=current_state,
            store=store,
            save_id=save_id,
            started=started,
            stall_seconds=time.monotonic() - started,
            writing=self._background.submit(self._write, plan, current_state, store, save_id),
        )
        return previous_save

    def digest(self, model: nn.Module, optimizer: Optimizer | None) -> str:
        """Return the state digest that a save at this moment would have: 16 hexadecimal digits, the same on all ranks.

        Collective. Nothing is copied or written, and a save in flight is not disturbed. Equal states have equal
        digests, however many ranks hold them, so that two runs can be compared by this.
        """
        current_state = state.read_state(model, optimizer)
        plan = self._agree_on_plan(current_state)

        # Each rank sums the chunks that it would write, so that replicas count once.
        state_sum = 0
        with torch.no_grad():
            for chunk, values in chunk_values(plan, current_state):
                whole_shape = current_state.tensors[chunk.tensor].shape
                state_sum += sum_keyed(chunk.tensor, values, chunk.offset, whole_shape)
        return format_digest(exchange.all_reduce_sum([state_sum])[0])

    def poll(self, *, all_idle: bool | None = None) -> Saved | None:
        """Move the save in flight to its next phase, unless a rank is still busy with the present one.

        Collective: every rank calls this after the same batches. It has three outcomes: nothing happens while a rank
        still writes or publishes; once all have written, ranks exchange reports and rank 0 starts to publish; once that
        is done, the save is returned and the next may begin.

        all_idle: whether no rank `is_busy`, if the ranks have exchanged that already (the same value on all of them).
            With None, this method exchanges it.

        Returns the save once it is published, else None. Raises on all ranks if any rank failed to write or publish;
        the save is then given up, and earlier checkpoints are untouched.
        """
        # Whether a save is in flight is the same on all ranks, so that all return here or none.
        in_flight = self._in_flight
        if in_flight is None:
            return None
        if all_idle is None:
            all_idle = not exchange.all_reduce_max([int(self.is_busy)])[0]
        if not all_idle:
            return None

        # Every rank's background task has ended. If one failed, all ranks raise; if all have written, publish.
        try:
            error = in_flight.background_task.exception()
            if error is not None and not isinstance(error, Exception):
                raise error  # such as SystemExit, on this rank alone
            exchange.raise_on_all_ranks(error)
            if in_flight.manifest is None:
                in_flight.manifest = self._gather_reports(in_flight)
                if self.rank == 0:
                    log = in_flight.metadata.log
                    in_flight.publishing = self._background.submit(
                        self._publish, in_flight.manifest, in_flight.store, log
                    )
                return None
        except BaseException:
            self._in_flight = None
            self.next_is_second = self.second is not None and in_flight.store is self.store
            # A signal may interrupt rank 0 while its thread publishes. The draft is still needed then.
            if self.rank == 0 and in_flight.background_task.done():
                self._abandon(in_flight.store, in_flight.save_id)
            raise

        # The save was published before this call.
        self._in_flight = None
        self.next_is_second = False
        self.parent_save_id = in_flight.save_id
        return Saved(
            name=f"ba{in_flight.metadata.timestamp.batch}",
            save_id=in_flight.save_id,
            stall_seconds=in_flight.stall_seconds,
            durable_seconds=time.monotonic() - in_flight.started,
            num_bytes=in_flight.manifest.num_bytes,
            state_digest=in_flight.manifest.state_digest or "",
            is_in_second=in_flight.store is not self.store,
        )

    def _abandon(self, store: CheckpointStore, save_id: str) -> None:
        """Remove the draft of a failed save. Only rank 0 calls this.

        Behind a URL, the background thread removes it. An object store that does not answer would otherwise hold up
        training once more, for as long as the save took to fail.
        """
        if store.root.path_here is None and self.second is None:
            self._background.submit(store.abandon, save_id)
        elif store.root.path_here is None:
            # The next save goes to the other place, and must not wait for this one.
            threading.Thread(target=store.abandon, args=(save_id,), name="abandon-save", daemon=True).start()
        else:
            store.abandon(save_id)

    def wait(self) -> Saved | None:
        """Wait until the save in flight is published, and return it; None if there is no save in flight.

        Collective, and raises as `poll` does. Calls `note_wait` if that takes longer than NOTE_SECONDS.

        Ranks wait for their own background thread for POLL_SECONDS at most, and then meet in `poll`. Otherwise, if a
        store does not answer one rank, the others would wait for it in a collective until that fails (`dist_timeout`).
        """
        saved = None
        began = time.monotonic()
        note_after_seconds = NOTE_SECONDS
        while self._in_flight is not None:
            batch = self._in_flight.metadata.timestamp.batch
            wait_for_futures([self._in_flight.background_task], timeout=POLL_SECONDS)
            saved = self.poll()  # ends the loop, by a save or an error, once all ranks are done

            waited_seconds = time.monotonic() - began
            if self._in_flight is not None and waited_seconds >= note_after_seconds:
                self.note_wait(f"ba{batch}", waited_seconds)
                note_after_seconds *= 2
        return saved

    # ------------------------------------------------------------------------------------------ planning and writing

    def _agree_on_plan(self, current_state: state.State) -> SavePlan:
        """Return the plan of which rank writes what, made anew only if it has to be.

        Collective. The plan of the previous save is used again unless names, dtypes, shapes or placements of tensors
        have changed on any rank. Sets `_plan` and `_plan_signature`.
        """
        signature = []
        for name, tensor in current_state.tensors.items():
            placements = getattr(tensor, "placements", None)
            signature.append((name, tensor.dtype, tensor.shape, placements))

        # All ranks make a new plan if one of them needs it, because that is collective, too.
        has_changed = exchange.all_reduce_max([signature != self._plan_signature])[0]
        if has_changed or self._plan is None:
            self._plan = agree_on_plan(current_state.tensors, current_state.row_orders)
            self._plan_signature = signature
        return self._plan

    def _write(self, plan: SavePlan, current_state: state.State, store: CheckpointStore, save_id: str) -> RankReport:
        """Write this rank's file into the save's draft in `store`, and return this rank's report of it.

        Runs in the background thread, and reads nothing that training changes: the chunks come from `_staging`,
        and of `current_state` only numbers and names are used. Raises CheckpointError if the file cannot be written, or
        if a value is NaN or infinite, because a run could not be carried on from it.
        """
        folder, _ = store.open_draft(save_id)
        name = file_name(self.rank)
        header = build_header(plan.chunks_to_write, {"save_id": save_id}, block_bytes=BLOCK_BYTES)

        # A second thread looks for values that are not finite, and sums the state digest, while this one writes.
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-finite") as second_thread:
                checking = second_thread.submit(self._staging.check_and_sum, plan)
                record = write_shard(folder, name, header, [as_bytes(self._staging.content)], on_phase=store.on_phase)
        except OSError as error:
            raise CheckpointError(f"{folder.url}/{name}: not written: {error.strerror or error}") from error

        non_finite_keys, state_sum = checking.result()
        if non_finite_keys:
            shown_keys = non_finite_keys[0]
            if len(non_finite_keys) > 1:
                shown_keys += f" and {len(non_finite_keys) - 1} more"
            raise CheckpointError(f"not saved: non-finite values in {shown_keys}; older checkpoints are not affected")

        numbers_and_names = repr([current_state.optimizer, current_state.aliases])
        return RankReport(
            num_bytes=record.num_bytes,
            header_bytes=record.header_bytes,
            file_digest=bytes.fromhex(record.digest),
            optimizer_digest=hash_buffers([numbers_and_names.encode()]),
            state_sum=state_sum,
        )

    # ---------------------------------------------------------------------------------------------------- publishing

    def _gather_reports(self, in_flight: SaveInFlight) -> Manifest:
        """Exchange the ranks' reports of their files, and make the save's manifest from them, still without its log.

        Collective; called when all ranks have written their files. Every rank returns a manifest, and rank 0 publishes
        its own. Raises CheckpointError on all ranks if ranks that hold the same parameters have different optimizer
        groups or steps.
        """
        plan = in_flight.plan
        packed_reports = exchange.all_gather_bytes(REPORT.pack(*in_flight.writing.result()))
        reports = [RankReport(*REPORT.unpack(packed_report)) for packed_report in packed_reports]
        _check_same_optimizers(reports, plan)  # raises on all ranks or on none, because all have the same reports

        _, name_prefix = in_flight.store.commits.draft(in_flight.save_id)
        files = []
        for rank, report in enumerate(reports):
            file = FileRecord(
                name=name_prefix + file_name(rank),
                num_bytes=report.num_bytes,
                block_bytes=BLOCK_BYTES,
                header_bytes=report.header_bytes,
                digest=report.file_digest.hex(),
            )
            files.append(file)

        # The manifest has the fields of the metadata under the same names, except for the log, which `_publish` adds.
        metadata_names = [
            metadata_field.name for metadata_field in fields(SaveMetadata) if metadata_field.name != "log"
        ]
        metadata = {name: getattr(in_flight.metadata, name) for name in metadata_names}
        optimizer, aliases = _join_optimizers_of_ranks(in_flight.state, plan)
        return Manifest(
            **metadata,
            save_id=in_flight.save_id,
            parent_save_id=self.parent_save_id,
            lease_epoch=lease_epoch_of(in_flight.save_id),
            written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            optimizer=optimizer,
            aliases=aliases,
            tensors=plan.tensors,
            state_digest=format_digest(sum(report.state_sum for report in reports)),
            files=tuple(files),
        )

    def _publish(self, manifest: Manifest, store: CheckpointStore, log: Callable[[], bytes] | None) -> None:
        """Write the run's log beside the checkpoint, publish the save, and call `after_publish`.

        Runs in the background thread of rank 0. `manifest` has everything but the log; `log` returns the log's bytes,
        and None leaves it out. Sets `log_parts`. Raises CheckpointError if the save is not published.
        """
        assert self.lease is not None
        folder, _ = store.open_draft(manifest.save_id)
        is_first = store is self.store
        log_parts: tuple[LogPart, ...] = ()
        try:
            if log is not None:
                previous_parts = self.log_parts if is_first else self._second_log_parts
                log_parts = write_log(store, manifest.save_id, log(), previous_parts)
        except OSError as error:
            raise CheckpointError(f"{folder.url}: what goes with the tensors was not written: {error}") from error

        store.publish(replace(manifest, log=log_parts), self.lease)
        if is_first:
            self.log_parts = log_parts
        self._second_log_parts = () if is_first else log_parts
        self.after_publish(self.lease, store)


def _check_same_optimizers(reports: Sequence[RankReport], plan: SavePlan) -> None:
    """Raise CheckpointError if ranks that hold the same parameters have different optimizer groups or steps.

    `reports` has the report of each rank. Only the first of these ranks contributes to the manifest, so a difference
    would otherwise be lost silently.
    """
    for rank, table_index in enumerate(plan.table_of_rank):
        first_rank = plan.first_ranks[table_index]
        if reports[rank].optimizer_digest != reports[first_rank].optimizer_digest:
            raise CheckpointError(
                f"not saved: rank {rank} has other optimizer groups or steps than rank {first_rank}; ranks have "
                "drifted apart"
            )


def _join_optimizers_of_ranks(rank_state: state.State, plan: SavePlan) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the whole model's optimizer record and aliases of tied tensors, for the manifest.

    rank_state: this rank's state, whose `optimizer` and `aliases` are joined with those of other ranks.

    Collective. Without pipeline parallelism every rank has all of it, and nothing is exchanged. With it, each stage has
    an optimizer for its own parameters, and one rank of each stage broadcasts its record. Raises CheckpointError on all
    ranks if these do not fit together.
    """
    if len(plan.first_ranks) == 1:  # the same on all ranks
        return rank_state.optimizer, rank_state.aliases

    part_of_this_rank = encode_value([rank_state.optimizer, rank_state.aliases])
    optimizers = []
    aliases: dict[str, str] = {}
    for source_rank in plan.first_ranks:
        part = exchange.broadcast_json(part_of_this_rank, source=source_rank)
        optimizer, aliases_of_part = decode_value(part)
        optimizers.append(optimizer)
        aliases |= aliases_of_part
    return state.join_optimizers(optimizers), aliases


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes: `shard-00003.safetensors` for rank 3."""
    return f"shard-{rank:05d}.safetensors"
