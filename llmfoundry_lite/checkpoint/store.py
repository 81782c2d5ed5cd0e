"""The store of one run's checkpoints, `<save_folder>/ba200`, on a disk or behind an fsspec URL. No torch.

`CheckpointStore` lists, publishes and removes checkpoints. It puts together what other modules do: `lease` decides
which launch may write, `commit` makes a save appear or disappear whole, and `manifest_json` reads and writes the JSON.
`run_log` keeps the run's log beside the checkpoints, and `retention` decides which of them are old. A listing gives
`Candidate`s, of which only a few bytes have been read. The functions in between open a single checkpoint.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from llmfoundry_lite.checkpoint.commit import (
    COMMITTED,
    DAMAGED,
    HINT,
    LOG,
    Checkpoint,
    batch_of,
    batch_of_set_aside,
    commits_in,
    committed_name,
    head_of,
    lease_epoch_of,
    name_of_batch,
    read_checkpoint,
)
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.launch_record import RECORDS, list_records
from llmfoundry_lite.checkpoint.lease import Lease, LeaseRequest, Leases
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, Head, Manifest
from llmfoundry_lite.checkpoint.manifest_json import encode, read_head
from llmfoundry_lite.checkpoint.open_folder import check_files, open_folder
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    NewerFormatError,
    UnreadableCheckpointError,
)
from llmfoundry_lite.ranks.codec import write_json

READS_AT_ONCE = 16
"""Manifests that a listing reads at the same time."""
UNKNOWN_EPOCH = 1 << 62
"""Stands for the lease epoch of a checkpoint that cannot be read. Above all others, so that it is listed first."""
CONDITIONS = {
    DamagedCheckpointError: "damaged",
    IncompleteCheckpointError: "incomplete",
    UnreadableCheckpointError: "unreadable",
}
"""Class of the error about a checkpoint -> the checkpoint's condition in a word, for messages."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A folder that looks like a checkpoint, in a listing of a run's folder.

    The listing reads only the head of the manifest. The first use of `open`, `error` or `checkpoint` reads the whole
    manifest, which is kept (`outcome`).
    """

    name: str
    folder: Folder
    head: Head | None = None
    """None if the manifest cannot be read, so that its place among the others is not known."""
    outcome: Checkpoint | CheckpointError | None = None
    """The checkpoint, or why it cannot be read. None until the whole manifest is read."""

    def open(self) -> Checkpoint:
        """Return the checkpoint. Raises CheckpointError if it cannot be read, the same error each time."""
        if self.error is not None:
            raise self.error
        assert isinstance(self.outcome, Checkpoint)
        return self.outcome

    @property
    def error(self) -> CheckpointError | None:
        """Why the checkpoint cannot be read. None if it can."""
        if self.outcome is None:
            try:
                self.outcome = read_checkpoint(self.folder)
            except CheckpointError as error:
                self.outcome = error
        return self.outcome if isinstance(self.outcome, CheckpointError) else None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint. None if it cannot be read."""
        return None if self.error else self.open()

    @property
    def recency(self) -> tuple[int, int]:
        """Lease epoch and batch. The newest checkpoint has the highest pair; see `CheckpointStore`."""
        if self.head is None:
            return UNKNOWN_EPOCH, batch_of(self.name)
        return self.head.lease_epoch, self.head.batch

    @property
    def batch(self) -> int:
        """The batch after which it was saved."""
        return self.recency[1]


class Search(NamedTuple):
    """The checkpoint that `newest_intact` found, and those that it passed over."""

    checkpoint: Checkpoint | None
    passed_over: dict[str, str]
    """URL of each checkpoint that was passed over -> the line that says why."""

    @property
    def notes(self) -> list[str]:
        """A line for each checkpoint that was passed over."""
        return [*self.passed_over.values()]


def refuse_newer(candidates: Sequence[Candidate]) -> None:
    """Raise NewerFormatError if a newer release has written one of the candidates.

    The user cannot mean to carry on from an older checkpoint beside it.
    """
    for candidate in candidates:
        if candidate.head is None and isinstance(candidate.error, NewerFormatError):
            raise candidate.error


def is_checkpoint(url: str | os.PathLike[str]) -> bool:
    """Return whether a folder has a manifest, so that it is a checkpoint and not a folder of checkpoints.

    The manifest is not read. Raises CheckpointError if the folder cannot be listed; one that does not exist is not a
    checkpoint.
    """
    folder = open_folder(url)
    with os_errors_as_checkpoint_errors(f"{folder.url}: cannot be listed"):
        return MANIFEST in folder.names()


def open_checkpoint(url: str | os.PathLike[str]) -> Checkpoint:
    """Open one checkpoint, such as `runs/mpt/checkpoints/ba200`, by reading its manifest.

    Raises CheckpointError if there is none, and UnsoundCheckpointError if it is damaged or cannot be read.
    """
    return read_checkpoint(open_folder(url))


def condition_of(error: CheckpointError | None) -> str:
    """Return the condition of a checkpoint that an error is about: `damaged`, `incomplete`, `unreadable`, or `unusable`
    for any other reason."""
    for error_type, condition in CONDITIONS.items():
        if isinstance(error, error_type):
            return condition
    return "unusable"


class CheckpointStore:
    """The checkpoints of one run. Errors of disk and network surface as CheckpointError.

        store = CheckpointStore("runs/mpt-1b/checkpoints")      any number of readers
        store.newest_intact()                                   what to restore from
        lease = store.acquire()                                 one writer: the one that acquired last
        folder, prefix = store.open_draft(save_id)              every rank writes its shard here
        store.publish(manifest, lease)                          one rank; atomic
        prune(store, lease, keep_newest=3)                      retention.py

    A writer checks for a higher lease before it commits. Between that check and the commit, another launch may still
    take over a writer that stalls, and neither a rename nor a put can be made conditional on the lease. So readers
    order saves by (lease epoch, batch), and a save never replaces a checkpoint of a higher epoch. A late checkpoint
    from a launch believed dead ranks below its successor's first one. Times on clocks are not compared.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        second: "CheckpointStore | None" = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ):
        """Open a store at a path or URL, without reading or writing there. Raises CheckpointError for a URL that cannot
        be opened."""
        self.root = open_folder(url)
        self.second = second
        """The store of the run's second place, `save_fallback`; None if it has none. `all_candidates` and
        `newest_intact` look there, too, and its saves count for the lease's number. See `fallback.py`."""
        self.leases = Leases(self.root)
        self.commits = commits_in(self.root, lambda phase: self.on_phase(phase))
        self.log_names: dict[str, set[str]] = {}
        """Save_id -> names of the parts of the log that this save has, for saves that have been looked up."""
        self.on_phase = on_phase
        """Called with the name of each step of a save that a crash could fall into; tests crash there."""

    def wait_until_free(self, request: LeaseRequest) -> str:
        """Wait until the run's lease may be taken, as `Leases.wait_until_free`. Raises CheckpointError if another
        launch holds this run."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: the lease cannot be read"):
            return self.leases.wait_until_free(request)

    def acquire(self, *, steal_from_live_writer: bool = False, request: LeaseRequest | None = None) -> Lease:
        """Become the writer of this run: take its lease, and clear away what earlier writers have left behind.

        steal_from_live_writer: take the lease at once, although its holder may still run. The caller has told it to
            stop.
        request: how to ask for the lease; see `LeaseRequest`.

        The lease's epoch is higher than that of any lease or checkpoint, here and in the second place, and of any
        record of a launch here. Waits while the holder is watched, as `wait_until_free`. Raises CheckpointError if the
        holder still runs, or if the folder cannot be written.
        """
        with os_errors_as_checkpoint_errors(f"{self.root.url}: no lease can be taken"):
            # Somebody may have removed the claims, or copied checkpoints from elsewhere.
            used_epochs = [candidate.head.lease_epoch for candidate in self.all_candidates() if candidate.head]
            used_epochs += list_records(self.root)
            if self.second is not None:
                used_epochs.append(self.second.leases.highest_epoch())
            lease = self.leases.acquire(
                at_least=max(used_epochs, default=0) + 1,
                steal_from_live_writer=steal_from_live_writer,
                request=request,
            )
            self.commits.clear_leftovers(lease.epoch)
        return lease

    def follow(self, lease: Lease) -> None:
        """Let the holder of the lease of the run's first place write here too, in its second place.

        Its claim is copied here, so that a launch that it has replaced may not write here any more either. What earlier
        launches have left behind is cleared away. Raises CheckpointError.
        """
        with os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be written"):
            self.leases.copy_claim(lease)
            self.commits.clear_leftovers(lease.epoch)

    def check_is_seen(self, lease_epoch: int) -> None:
        """Raise CheckpointError unless this process sees the lease with this number, as `Leases.check_is_seen`."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: the lease cannot be read"):
            self.leases.check_is_seen(lease_epoch)

    def release(self, lease: Lease) -> None:
        """Let another launch become the writer at once. If that fails, nothing is raised: another launch then watches
        this one for a while before it takes over."""
        with contextlib.suppress(OSError):
            self.leases.release(lease)

    def check(self, lease: Lease) -> None:
        """Raise CheckpointError if another launch has taken over as the writer, or if the run's folder has vanished."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: the lease cannot be read"):
            self.leases.check(lease)

    def check_is_new(self) -> None:
        """Raise CheckpointError if checkpoints in this folder were set aside as damaged. Called if it has no others, so
        that a run is not started over silently."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be listed"):
            damaged_names = [name for name in self.root.names() if name.startswith(DAMAGED)]
        if damaged_names:
            raise CheckpointError(
                f"{self.root.url} holds no checkpoint but {', '.join(damaged_names)}, set aside as damaged; rename one "
                "to its ba… to try it again, or move the folder away to start again from batch 1"
            )

    def set_aside_saves(self) -> list[str]:
        """Return the names of saves that were set aside as damaged, in order of batch."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be listed"):
            names = self.commits.set_aside_names()
        return sorted(names, key=batch_of_set_aside)

    def renamed_saves(self) -> list[str]:
        """Return the names of checkpoints here that a user has renamed, such as `final`. `candidates` leaves them out,
        and nothing removes them."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be listed"):
            renamed = []
            for name in self.root.names():
                has_name_of_ours = name.startswith(".") or name in (LOG, RECORDS) or COMMITTED.fullmatch(name)
                if not has_name_of_ours and self._has_manifest(name):
                    renamed.append(name)
            return sorted(renamed)

    def _has_manifest(self, name: str) -> bool:
        """Return whether this name in the run's folder is a folder that holds a manifest."""
        try:
            return MANIFEST in self.root.child(name).names()
        except OSError:  # a file
            return False

    # ---------------------------------------------------------------------------------------------------- publish

    def new_save_id(self, lease: Lease, batch: int) -> str:
        """Return a unique name for a save, with its lease epoch and batch: `e7-ba200-0123456789ab`."""
        return f"e{lease.epoch}-ba{batch}-{uuid.uuid4().hex[:12]}"

    def open_draft(self, save_id: str) -> tuple[Folder, str]:
        """Create the folder that the files of a save are written to. Every rank calls this before it writes.

        Returns the folder, and the prefix of its files' names in the manifest. Raises CheckpointError if this process
        does not see the lease in the run's folder, for instance because its node has another disk.
        """
        folder, prefix = self.commits.draft(save_id)
        with os_errors_as_checkpoint_errors(f"{folder.url}: not written"):
            if not self.commits.drafts_in_place:
                self.leases.check_is_seen(lease_epoch_of(save_id))
            folder.make()
        return folder, prefix

    def publish(self, manifest: Manifest, lease: Lease | None, *, is_newest: bool = True) -> Checkpoint:
        """Commit a draft, so that readers see the save as the checkpoint of its batch. Returns that checkpoint.

        Called by one rank, the holder of the lease, when the files of all ranks are durable. For the copy of a save,
        `manifest` has the epoch of the launch that made the save, and without a lease, a user copies. `is_newest` says
        that the save is newer than all others here.

        Raises CheckpointError if the save cannot be committed, in which case readers see what they saw before.
        """
        name = committed_name(manifest.save_id)
        folder = self.root.child(name)
        assert lease is None or manifest.lease_epoch <= lease.epoch
        manifest_bytes = encode(manifest)

        def check_lease() -> None:
            """Raise CheckpointError if another launch has taken over."""
            if lease is not None:
                self.check(lease)

        def check_at_last_moment() -> None:
            """Raise CheckpointError if another launch has taken over, or has saved this batch, since the draft
            began."""
            check_lease()
            self._check_not_newer(folder, manifest)
            self.on_phase("before rename")

        with os_errors_as_checkpoint_errors(f"{folder.url}: not published"):
            check_lease()
            self._check_sees_all_files(manifest)
            self.on_phase("before manifest")
            self.commits.commit(manifest.save_id, manifest_bytes, check_at_last_moment)
            self.on_phase("after rename")

        # The save is committed, and nothing below may fail.
        self.log_names[manifest.save_id] = names_of_log(manifest)
        with contextlib.suppress(OSError):  # no program reads this file
            if is_newest:
                self.root.put(HINT, write_json({"name": name, "save_id": manifest.save_id}) + b"\n")
        return Checkpoint(name, folder, manifest)

    def _check_sees_all_files(self, manifest: Manifest) -> None:
        """Raise CheckpointError if this rank does not see every file of the draft, with its size.

        The ranks have reported their files as written, so the likely reason is that nodes do not share the disk.
        """
        folder, prefix = self.commits.draft(manifest.save_id)
        expected_bytes = {file.name.removeprefix(prefix): file.num_bytes for file in manifest.files}
        try:
            check_files(folder, expected_bytes)
        except IncompleteCheckpointError as error:
            raise CheckpointError(
                f"{folder.url}/{error.file}: written by another rank but not to be seen from rank 0; save_folder must "
                "be on a disk that all nodes share, or a URL"
            ) from None

    def _check_not_newer(self, folder: Folder, manifest: Manifest) -> None:
        """Raise CheckpointError if a later launch or a newer release has already saved this batch.

        `folder` is where the manifest is about to be committed. A checkpoint there that cannot be read may be replaced.
        """
        try:
            present_epoch = head_of(folder).lease_epoch
        except NewerFormatError as error:
            raise CheckpointError(f"not published: {error}") from None
        except (CheckpointError, OSError):
            return
        if present_epoch > manifest.lease_epoch:
            raise CheckpointError(f"{folder.url}: saved there by a later launch; this one may not replace it")

    def abandon(self, save_id: str) -> None:
        """Remove the draft of a save that has failed; do nothing if that fails, too.

        The next launch removes what is left (`acquire`).
        """
        folder = self.root.child(committed_name(save_id))
        with contextlib.suppress(OSError, CheckpointError):
            # On an object store, the manifest may have been put although the answer to that was lost. Then the save is
            # committed, and stays.
            may_be_committed = self.commits.drafts_in_place and MANIFEST in folder.names()
            if may_be_committed and read_checkpoint(folder).manifest.save_id == save_id:
                return
            draft_folder, _ = self.commits.draft(save_id)
            draft_folder.remove_all()

    # ------------------------------------------------------------------------------------------------------- read

    def candidates(self) -> list[Candidate]:
        """List all checkpoints of the run, newest first. Those that cannot be read come before all others.

        Reads the first bytes of each manifest, several at a time. Raises CheckpointError if the folder cannot be
        listed.
        """
        names = self.names()
        with (
            os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be listed"),
            ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-list") as pool,
        ):
            candidates_or_none = list(pool.map(self._read_candidate, names))
        candidates = [candidate for candidate in candidates_or_none if candidate is not None]
        return sorted(candidates, key=lambda candidate: candidate.recency, reverse=True)

    def names(self) -> list[str]:
        """List the names of the run's checkpoints. Raises CheckpointError if the folder cannot be listed."""
        with os_errors_as_checkpoint_errors(f"{self.root.url}: cannot be listed"):
            return self.commits.names()

    def all_candidates(self) -> list[Candidate]:
        """List the run's checkpoints here and in its second place, newest first, as `candidates` does.

        A checkpoint that was copied from one place to the other is listed twice. Raises CheckpointError if either place
        cannot be listed, because the newest checkpoint may be there.
        """
        candidates = self.candidates()
        if self.second is None:
            return candidates
        try:
            candidates += self.second.candidates()
        except CheckpointError as error:
            raise type(error)(
                f"save_fallback: {error}; the newest checkpoint may be there. save_fallback=null carries on without it"
            ) from error
        return sorted(candidates, key=lambda candidate: candidate.recency, reverse=True)

    def place_of(self, folder: Folder) -> "CheckpointStore":
        """Return the store in which a checkpoint's folder lies: this one, or that of the second place."""
        _, _, name = folder.url.rpartition("/")
        if self.second is not None and folder.url == self.second.root.child(name).url:
            return self.second
        return self

    def _read_candidate(self, name: str) -> Candidate | None:
        """Read as much of a checkpoint's manifest as a listing needs, and return the checkpoint as a candidate.

        Returns None if there is no save of this name yet, or if it is being removed. If the manifest is absent, damaged
        or of another batch, the candidate has the error. Raises OSError.
        """
        # The first bytes usually suffice. If they cannot be read, reading the whole manifest says why.
        folder = self.root.child(name)
        expected_name = name_of_batch(name)
        with contextlib.suppress(OSError):
            head = read_head(folder.read(MANIFEST, HEAD_BYTES))
            if head is not None and committed_name(head.save_id) == expected_name:
                return Candidate(name, folder, head)

        try:
            checkpoint = read_checkpoint(folder)
            if committed_name(checkpoint.manifest.save_id) == expected_name:
                return Candidate(name, folder, checkpoint.manifest.head, checkpoint)
            error = DamagedCheckpointError(f"{folder.url}: holds the manifest of {checkpoint.manifest.save_id}")
        except CheckpointError as caught:
            error = caught
            file_names = folder.names()
            if MANIFEST not in file_names:
                is_draft = self.commits.drafts_in_place
                is_removed = not file_names
                if is_draft or is_removed:
                    return None
                error = IncompleteCheckpointError(f"{folder.url}/{MANIFEST}: missing")
        return Candidate(name, folder, outcome=error)

    def newest_intact(
        self,
        verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
        *,
        quarantine: Lease | None = None,
        skip: Collection[str] = (),
        candidates: Sequence[Candidate] | None = None,
    ) -> Search:
        """Find the newest checkpoint of the run that can be read and that passes `verify`, in the second place too.

        verify: called with a checkpoint; raises CheckpointError if there is something wrong with it.
        quarantine: the run's lease. With it, damaged checkpoints are renamed (`set_aside`).
        skip: URLs of checkpoints that are not considered.
        candidates: what `all_candidates` has returned just now; None to list them here.

        Damaged and incomplete checkpoints are passed over, with a line each. Any other error is raised, for instance if
        a newer release has written the checkpoint or if the disk does not answer, because an older checkpoint would not
        be what the user asks for.
        """
        passed_over: dict[str, str] = {}
        if candidates is None:
            candidates = self.all_candidates()
        for candidate in candidates:
            url = candidate.folder.url
            if url in skip:
                continue
            try:
                checkpoint = candidate.open()
                verify(checkpoint)
                return Search(checkpoint, passed_over)
            except (DamagedCheckpointError, IncompleteCheckpointError) as error:
                place = self.place_of(candidate.folder)
                passed_over[url] = place.set_aside(candidate.name, error, quarantine)
        return Search(None, passed_over)

    def set_aside(self, name: str, error: CheckpointError, lease: Lease | None) -> str:
        """Rename a checkpoint that was found to be damaged, and return the line that tells the user about it.

        name: the checkpoint's.
        error: what is wrong with it. If it is not damaged but, for instance, incomplete, it is not renamed.
        lease: the run's lease. None: it is not renamed.

        It is renamed only on a disk, and only while another checkpoint can be read: the last one stays where it is,
        whatever is wrong with it. The line is `passed over damaged checkpoint, now <new name>: <error>`.
        """
        line = f"passed over {condition_of(error)} checkpoint"
        if lease is not None and isinstance(error, DamagedCheckpointError):
            other_candidates = [candidate for candidate in self.candidates() if candidate.name != name]
            has_other_checkpoint = any(candidate.checkpoint is not None for candidate in other_candidates)
            new_name = self.commits.set_aside(name) if has_other_checkpoint else ""
            if new_name:
                line += f", now {new_name}"
        return f"{line}: {error}"

    # ------------------------------------------------------------------------------------------------------ remove

    def remove(self, name: str, save_id: str) -> None:
        """Remove a checkpoint from the readers' sight, and then its data. Does nothing if it is gone, or if another
        save has its name by now. Raises CheckpointError if it cannot be removed."""
        url = self.root.child(name).url
        with os_errors_as_checkpoint_errors(f"{url}: cannot be removed"), contextlib.suppress(FileNotFoundError):
            self.commits.remove(name, save_id)


@contextlib.contextmanager
def os_errors_as_checkpoint_errors(prefix: str) -> Iterator[None]:
    """Turn an OSError in a `with` block into a CheckpointError with the text `<prefix>: <reason>`. Use it around every
    access to disk or network, whose errors are for the user."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{prefix}: {error.strerror or error}") from error


def names_of_log(manifest: Manifest) -> set[str]:
    """Return the file names, in the folder `log`, of the parts of the log that a checkpoint refers to."""
    names = set()
    for part in manifest.log:
        _, _, file_name = part.name.rpartition("/")
        names.add(file_name)
    return names
