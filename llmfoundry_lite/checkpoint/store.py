"""The store of one run's checkpoints, `<save_folder>/ba200`, on a disk or behind an fsspec URL. No torch."""

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
    SAVE_ID,
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
from llmfoundry_lite.checkpoint.lease import Lease, LeaseRequest, Leases
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, Head, Manifest, encode, read_head
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
KINDS = {
    DamagedCheckpointError: "damaged",
    IncompleteCheckpointError: "incomplete",
    UnreadableCheckpointError: "unreadable",
}


@dataclass(slots=True, eq=False)
class Candidate:
    """A folder that looks like a checkpoint. Its manifest is decoded when it is first asked for, and not to list it."""

    name: str
    folder: Folder
    head: Head | None = None
    """None: it cannot be read, so its order among the others is not known."""
    found: Checkpoint | CheckpointError | None = None
    """The checkpoint, or why it cannot be read; None until it is asked for."""

    def open(self) -> Checkpoint:
        """Return the checkpoint. Raises CheckpointError if it cannot be read, the same each time."""
        if self.error is not None:
            raise self.error
        assert isinstance(self.found, Checkpoint)
        return self.found

    @property
    def error(self) -> CheckpointError | None:
        if self.found is None:
            try:
                self.found = read_checkpoint(self.folder)
            except CheckpointError as error:
                self.found = error
        return self.found if isinstance(self.found, CheckpointError) else None

    @property
    def checkpoint(self) -> Checkpoint | None:
        return None if self.error else self.open()

    @property
    def order(self) -> tuple[int, int]:
        """Lease epoch and batch: the newest is highest. See `CheckpointStore`."""
        return (self.head.lease_epoch, self.head.batch) if self.head is not None else (1 << 62, batch_of(self.name))

    @property
    def batch(self) -> int:
        return self.order[1]


class Search(NamedTuple):
    """The checkpoint that `newest_intact` found, and those that it passed over."""

    checkpoint: Checkpoint | None
    passed: dict[str, str]
    """Name of each checkpoint that was passed over -> the line that says so."""

    @property
    def notes(self) -> list[str]:
        return [*self.passed.values()]


def refuse_newer(candidates: Sequence[Candidate]) -> None:
    """Raise NewerFormatError if a newer release has written one of them: the user cannot mean to carry on beside it."""
    for candidate in candidates:
        if candidate.head is None and isinstance(candidate.error, NewerFormatError):
            raise candidate.error


def is_checkpoint(url: str | os.PathLike[str]) -> bool:
    """Return whether `url` is a checkpoint, not a folder of them. Raises CheckpointError if it cannot be seen."""
    folder = open_folder(url)
    with _os_errors(f"{folder.url}: cannot be listed"):
        return MANIFEST in folder.names()


def open_checkpoint(url: str | os.PathLike[str]) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if there is none, UnsoundCheckpointError if it is unsound."""
    return read_checkpoint(open_folder(url))


def kind_of(error: CheckpointError | None) -> str:
    """Return `damaged`, `incomplete`, `unreadable` or `unusable`."""
    return next((word for kind, word in KINDS.items() if isinstance(error, kind)), "unusable")


class CheckpointStore:
    """The checkpoints of one run. Errors of disk and network surface as CheckpointError.

        store = CheckpointStore("runs/mpt-1b/checkpoints")      any number of readers
        store.newest_intact()                                   what to restore from
        lease = store.acquire()                                 one writer; whoever acquires last
        folder, prefix = store.open_draft(save_id)              every rank writes its shard here
        store.publish(manifest, lease)                          one rank; atomic
        store.prune(lease, keep_newest=3)

    A writer looks for a higher lease before it commits. Between that look and the commit a stalled writer may still be
    overtaken, and neither a rename nor a put can be fenced. So readers order saves by (lease epoch, batch), and a
    checkpoint never replaces one of a higher epoch: a late save from a launch believed dead ranks below its successor's
    first save. No clock is consulted.
    """

    def __init__(self, url: str | os.PathLike[str], *, on_phase: Callable[[str], None] = lambda phase: None):
        self.root = open_folder(url)
        self.leases = Leases(self.root)
        self.commits = commits_in(self.root, lambda phase: self.on_phase(phase))
        self._logs: dict[str, set[str]] = {}
        """Save_id -> the parts of the log that this save has."""
        self.on_phase = on_phase
        """Called with the name of each step of a save that a crash could fall into; tests crash there."""

    def wait_until_free(self, request: LeaseRequest) -> str:
        """See `Leases.wait_until_free`. Raises CheckpointError if another launch holds this run."""
        with _os_errors(f"{self.root.url}: the lease cannot be read"):
            return self.leases.wait_until_free(request)

    def acquire(self, *, steal_from_live_writer: bool = False, request: LeaseRequest | None = None) -> Lease:
        """Become the writer of this run and clear away what dead writers left half done. Raises CheckpointError if the
        present writer still runs, unless `steal_from_live_writer`: it has been told to stop."""
        with _os_errors(f"{self.root.url}: no lease can be taken"):
            at_least = max((found.order[0] for found in self.candidates() if found.head is not None), default=0) + 1
            lease = self.leases.acquire(
                at_least=at_least, steal_from_live_writer=steal_from_live_writer, request=request
            )
            self.commits.clear_remains(lease.epoch)
        return lease

    def release(self, lease: Lease) -> None:
        """Let another launch become the writer at once. Ignores errors: it watches this one for a while then."""
        with contextlib.suppress(OSError):
            self.leases.release(lease)

    def check(self, lease: Lease) -> None:
        """Raise CheckpointError when another writer has taken over, or when the folder has vanished."""
        with _os_errors(f"{self.root.url}: the lease cannot be read"):
            self.leases.check(lease)

    def check_is_new(self) -> None:
        """Raise CheckpointError when all that the folder held was set aside as damaged."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            left = [name for name in self.root.names() if name.startswith(DAMAGED)]
        if left:
            raise CheckpointError(
                f"{self.root.url} holds no checkpoint but {', '.join(left)}, set aside as damaged; rename one to its "
                "ba… to try it again, or move the folder away to start again from batch 1"
            )

    def set_aside_saves(self) -> list[str]:
        """Return the names of saves that were set aside as damaged, in order of batch."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            names = self.commits.set_aside_names()
        return sorted(names, key=batch_of_set_aside)

    def renamed_saves(self) -> list[str]:
        """Return the names of checkpoints that have no name of ours, such as `final`. No search finds these."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            names = [name for name in self.root.names() if not (name.startswith(".") or COMMITTED.fullmatch(name))]
            return sorted(name for name in names if name != LOG and self._has_manifest(name))

    def _has_manifest(self, name: str) -> bool:
        try:
            return MANIFEST in self.root.child(name).names()
        except OSError:  # a file
            return False

    # ---------------------------------------------------------------------------------------------------- publish

    def new_save_id(self, lease: Lease, batch: int) -> str:
        return f"e{lease.epoch}-ba{batch}-{uuid.uuid4().hex[:12]}"

    def open_draft(self, save_id: str) -> tuple[Folder, str]:
        """Return the draft's folder, ready to be written to, and what to put before its files' names in the manifest.
        Raises CheckpointError where this process does not see the run's folder."""
        folder, prefix = self.commits.draft(save_id)
        with _os_errors(f"{folder.url}: not written"):
            if not self.commits.drafts_in_place:
                self.leases.check_is_seen(lease_epoch_of(save_id))
            folder.make()
        return folder, prefix

    def publish(self, manifest: Manifest, lease: Lease) -> Checkpoint:
        """Commit a draft whose shards are all durable. Raises CheckpointError, and then nothing has changed."""
        name = committed_name(manifest.save_id)
        folder = self.root.child(name)
        assert manifest.lease_epoch == lease.epoch
        raw = encode(manifest)

        def check() -> None:
            self.check(lease)
            self._check_not_newer(folder, manifest)
            self.on_phase("before rename")

        with _os_errors(f"{folder.url}: not published"):
            self.check(lease)
            self._check_files_are_here(manifest)
            self.on_phase("before manifest")
            self.commits.commit(manifest.save_id, raw, check)
            self.on_phase("after rename")
        self._logs[manifest.save_id] = _log_files(manifest)
        with contextlib.suppress(OSError):
            self.root.put(HINT, write_json({"name": name, "save_id": manifest.save_id}) + b"\n")
        return Checkpoint(name, folder, manifest)

    def _check_files_are_here(self, manifest: Manifest) -> None:
        folder, prefix = self.commits.draft(manifest.save_id)
        try:
            check_files(folder, {file.name.removeprefix(prefix): file.num_bytes for file in manifest.files})
        except IncompleteCheckpointError as error:
            raise CheckpointError(
                f"{folder.url}/{error.file}: written by another rank but not to be seen from rank 0; save_folder must "
                "be on a disk that all nodes share, or a URL"
            ) from None

    def _check_not_newer(self, folder: Folder, manifest: Manifest) -> None:
        try:
            epoch = head_of(folder).lease_epoch
        except NewerFormatError as error:
            raise CheckpointError(f"not published: {error}") from None
        except (CheckpointError, OSError):
            return
        if epoch > manifest.lease_epoch:
            raise CheckpointError(f"{folder.url}: saved there by a later launch; this one may not replace it")

    def abandon(self, save_id: str) -> None:
        """Remove a draft that will not be published; not if its manifest has arrived after all (an answer got lost)."""
        committed = self.root.child(committed_name(save_id))
        with contextlib.suppress(OSError, CheckpointError):
            may_be_there = self.commits.drafts_in_place and MANIFEST in committed.names()
            if not may_be_there or read_checkpoint(committed).manifest.save_id != save_id:
                self.commits.draft(save_id)[0].remove_all()

    # ------------------------------------------------------------------------------------------------------- read

    def candidates(self) -> list[Candidate]:
        """Return all checkpoints, newest first; one that cannot be read is sorted by its name."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            names = self.commits.names()
            with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-list") as pool:
                found = list(pool.map(self._candidate, names))
        return sorted((one for one in found if one is not None), key=lambda one: one.order, reverse=True)

    def _candidate(self, name: str) -> Candidate | None:
        folder, expected = self.root.child(name), name_of_batch(name)
        with contextlib.suppress(OSError):  # reading the whole manifest names the error
            head = read_head(folder.read(MANIFEST, HEAD_BYTES))
            if head is not None and committed_name(head.save_id) == expected:
                return Candidate(name, folder, head)
        try:
            checkpoint = read_checkpoint(folder)
            if committed_name(checkpoint.manifest.save_id) == expected:
                return Candidate(name, folder, checkpoint.manifest.head, checkpoint)
            error = DamagedCheckpointError(f"{folder.url}: holds the manifest of {checkpoint.manifest.save_id}")
        except CheckpointError as caught:
            error = caught
            if MANIFEST not in (names := folder.names()):
                if self.commits.drafts_in_place or not names:
                    return None  # not committed yet, or being removed
                error = IncompleteCheckpointError(f"{folder.url}/{MANIFEST}: missing")
        return Candidate(name, folder, found=error)

    def newest_intact(
        self,
        verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
        *,
        quarantine: Lease | None = None,
        skip: Collection[str] = (),
    ) -> Search:
        """Find the newest checkpoint that can be read, that `verify` does not object to, and whose name is not in
        `skip`.

        Damaged and incomplete ones are passed over with a line each; the damaged are set aside under a lease. Anything
        else that is wrong with one (a newer format, a disk that does not answer) is raised: going back behind it could
        not be what the user requests.
        """
        passed: dict[str, str] = {}
        for candidate in self.candidates():
            if candidate.name in skip:
                continue
            try:
                verify(found := candidate.open())
                return Search(found, passed)
            except (DamagedCheckpointError, IncompleteCheckpointError) as error:
                passed[candidate.name] = self.set_aside(candidate.name, error, quarantine)
        return Search(None, passed)

    def set_aside(self, name: str, error: CheckpointError, lease: Lease | None) -> str:
        """Rename a checkpoint if it is damaged, under a lease and on a local disk; return the line to tell the user.
        The last that can be listed stays where it is, whatever is wrong with it."""
        line = f"passed over {kind_of(error)} checkpoint"
        if lease is not None and isinstance(error, DamagedCheckpointError):
            has_others = any(found.name != name and found.checkpoint is not None for found in self.candidates())
            if has_others and (target := self.commits.set_aside(name)):
                line += f", now {target}"
        return f"{line}: {error}"

    # ------------------------------------------------------------------------------------------------------ remove

    def remove(self, name: str, save_id: str) -> None:
        """Remove a save, its commit first and then its data; do nothing if another save has its name by now."""
        where = self.root.child(name).url
        with _os_errors(f"{where}: cannot be removed"), contextlib.suppress(FileNotFoundError):
            self.commits.remove(name, save_id)

    def prune(
        self,
        lease: Lease | None,
        *,
        keep_newest: int,
        keep_every_batches: int | None = None,
        keep_names: Collection[str] = (),
        verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
        on_unsound: Callable[[str, CheckpointError], None] = lambda name, error: None,
        dry_run: bool = False,
    ) -> list[str]:
        """Remove old checkpoints, unfinished removals and unused parts of the log; return the checkpoints' names.

        Drafts of dead writers wait for `acquire`.

        Kept are the newest `keep_newest`, every one whose batch is a multiple of `keep_every_batches`, `keep_names`,
        those that can't be listed (for a person to look at), and, if none of the newest passes `verify`, the newest
        that does. Saves that were set aside as damaged count as none of these. Each of them goes once all of the newest
        are of later batches.
        Manifests are decoded for `verify` alone, from the newest on, if there is anything to remove. `on_unsound` is
        called with the name of each that does not pass, and why. Nothing is removed if none passes.
        """
        if lease is not None:
            self.check(lease)
        candidates = self.candidates()
        listed = [candidate for candidate in candidates if candidate.head is not None]
        if not listed:
            return []
        newest = listed[: max(keep_newest, 1)]
        old = [
            candidate
            for candidate in listed[len(newest) :]
            if candidate.name not in keep_names and (not keep_every_batches or candidate.batch % keep_every_batches)
        ]
        set_aside = self.set_aside_saves()

        doomed: list[Candidate] = []
        doomed_set_aside: list[str] = []
        if old or set_aside:
            intact = _first_that_passes(verify, listed, on_unsound)
            if intact is None:
                return []
            doomed = [candidate for candidate in reversed(old) if candidate is not intact]
            first_batch = min(candidate.batch for candidate in (*newest, intact))
            doomed_set_aside = [name for name in set_aside if batch_of_set_aside(name) < first_batch]

        if not dry_run:
            for candidate in doomed:
                assert candidate.head is not None
                self.remove(candidate.name, candidate.head.save_id)
            for name in doomed_set_aside:
                with _os_errors(f"{self.root.url}/{name}: cannot be removed"):
                    self.root.child(name).remove_all()
            with _os_errors(f"{self.root.url}: what earlier removals left cannot be removed"):
                self.commits.clear_litter(has_lease=lease is not None, newest=listed[0].order)
            with _os_errors(f"{self.root.url}/{LOG}: cannot be cleared"):
                self._remove_log([candidate for candidate in candidates if candidate not in doomed], listed[0])
        return [*(candidate.name for candidate in doomed), *doomed_set_aside]

    def _remove_log(self, kept: Sequence[Candidate], newest: Candidate) -> None:
        """Remove parts of the log that no checkpoint has any more; none if a checkpoint cannot be read.

        Parts of saves after the `newest` stay: their manifests may be about to be published.
        """
        folder = self.root.child(LOG)
        names = folder.names()
        used: set[str] = set()
        for candidate in kept if names else ():
            if candidate.head is None:
                return
            save_id = candidate.head.save_id
            if save_id not in self._logs:
                if candidate.checkpoint is None:
                    return
                self._logs[save_id] = _log_files(candidate.checkpoint.manifest)
            used |= self._logs[save_id]
        for name in names:
            save = SAVE_ID.search(name)
            if save is not None and name not in used and (int(save[1]), int(save[2])) <= newest.order:
                folder.remove(name)


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def _first_that_passes(
    verify: Callable[[Checkpoint], None],
    candidates: Sequence[Candidate],
    on_unsound: Callable[[str, CheckpointError], None],
) -> Candidate | None:
    for candidate in candidates:
        try:
            verify(candidate.open())
        except CheckpointError as error:
            on_unsound(candidate.name, error)
        else:
            return candidate
    return None


def _log_files(manifest: Manifest) -> set[str]:
    return {file.name.rpartition("/")[2] for file in manifest.log}
