"""Where the checkpoints of one run live: `<save_folder>/ba200`, local or behind an fsspec URL. No torch.

    store = CheckpointStore("runs/mpt-1b/checkpoints")      any number of readers
    lease = store.acquire()                                 one writer; whoever acquires last
    save_id = store.new_save_id(lease, batch=200)
    place, prefix = store.open_draft(save_id)               every rank writes its shard here
    store.publish(manifest, lease)                          one rank; atomic
    store.prune(lease, keep_newest=3)
    store.newest_intact()                                   what to restore from

Publishing. On a local disk a save is written into `.tmp-<save_id>`, synced, and renamed to `ba<batch>`: what has that
name is whole. On an object store the shards go to `ba<batch>/<save_id>/`, a name no other save has, and putting
`ba<batch>/manifest.json` last commits them. Removal goes in reverse: first what commits, then the data. `latest.json`
is a hint for people and is never read here. A save of a batch that has one already moves the old one to `.replaced-…`
for the moment between two renames; a crash there leaves it the checkpoint of that batch, for readers too. A removal
looks again at what it has moved to `.deleting-…`, and gives back a save that took the name meanwhile.

Whose fault. Damaged is a file whose bytes were wrong twice; its checkpoint is passed over and, under a lease, renamed
to `.damaged-…` unless no other is left to read. Incomplete is a checkpoint that lacks a file: passed over where it
lies. A file that cannot be read stops the search: a mount or a permission can be mended.

One writer. Each launch that saves acquires a lease: the next number, claimed by creating `.leases/<number>.json`, which
must not exist. A writer looks there before it commits and stops when there is a higher number. Between that look and
the rename a stalled writer may still be overtaken, and neither a rename nor a put can be fenced; so readers order
saves by (lease epoch, batch), and a checkpoint never replaces one of a higher epoch. Hence a zombie's save counts as
the newest only until the new writer has committed its first; before that it is a sound state of the same run, and
after that it loses, whatever its batch or its clock says. The same rule lets a run that was deliberately restarted
from an older save go its own way. Clocks are not consulted.
"""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.folders import Folder, find_absent, retry_on_damage, unreadable
from llmfoundry_lite.checkpoint.lease import Lease, Leases
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.manifest_json import (
    HEAD_BYTES,
    MANIFEST,
    MAX_BYTES,
    Head,
    decode,
    encode,
    read_head,
    read_log_parts,
)
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    NewerFormatError,
    UnreadableCheckpointError,
)
from llmfoundry_lite.ranks.codec import write_json

COMMITTED = re.compile(r"ba(\d+)")
DRAFT = ".tmp-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
DAMAGED = ".damaged-"
SAVE_ID = re.compile(r"e(\d+)-ba(\d+)-[0-9a-f]+")
UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{32}")
"""Name that `LocalFolder.put` gives an unfinished file. A kill leaves one."""
HINT = "latest.json"
LOG = "log"
"""The folder of the parts of the run's log: see `log_parts`."""
READS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed save and where it lies."""

    name: str
    folder: Folder
    manifest: Manifest
    raw: bytes = field(default=b"", repr=False, compare=False)
    """The manifest as it was read."""

    @property
    def where(self) -> str:
        return self.folder.url


class Candidate:
    """A folder that looks like a checkpoint. Its manifest is decoded when it is first asked for, and not to list it."""

    def __init__(
        self, name: str, folder: Folder, head: Head | None, checkpoint: Checkpoint | None, error: CheckpointError | None
    ):
        self.name = name
        self.head = head
        """What the beginning of its manifest says; None: all of it had to be read."""
        self._place = folder
        self._found = checkpoint
        self._error = error

    @property
    def checkpoint(self) -> Checkpoint | None:
        """None: see `error`."""
        self._read()
        return self._found

    @property
    def error(self) -> CheckpointError | None:
        """Why it cannot be read."""
        self._read()
        return self._error

    @property
    def is_listed(self) -> bool:
        """Its place among the others is known."""
        return self.head is not None or self._found is not None

    @property
    def order(self) -> tuple[int, int]:
        if self.head is not None:
            return self.head.lease_epoch, self.head.batch
        if self._found is not None:
            return self._found.manifest.order
        return 1 << 62, _batch(self.name)

    @property
    def batch(self) -> int:
        return self.order[1]

    @property
    def save_id(self) -> str:
        """Of one that is listed."""
        if self.head is not None:
            return self.head.save_id
        assert self._found is not None
        return self._found.manifest.save_id

    def _read(self) -> None:
        if self._found is None and self._error is None:
            try:
                self._found = read_checkpoint(self._place)
            except CheckpointError as error:
                self._error = error


def refuse_newer(candidates: Sequence[Candidate]) -> None:
    """Raises NewerFormatError if a newer release has written one: to carry on beside it could not be meant."""
    for candidate in candidates:
        if not candidate.is_listed and isinstance(candidate.error, NewerFormatError):
            raise candidate.error


class Search(NamedTuple):
    checkpoint: Checkpoint | None
    notes: list[str]
    """A line for each checkpoint that was passed over."""
    passed: list[str]
    """And its name."""


def is_checkpoint(url: str | os.PathLike[str]) -> bool:
    """Whether `url` is one checkpoint itself, and not a folder of them. Raises CheckpointError if it cannot be seen."""
    folder = open_folder(url)
    with _os_errors(f"{folder.url}: cannot be listed"):
        return MANIFEST in folder.names()


def open_checkpoint(url: str | os.PathLike[str]) -> Checkpoint:
    """One checkpoint folder. Raises CheckpointError if there is none, UnsoundCheckpointError if it cannot be read."""
    return read_checkpoint(open_folder(url))


def read_checkpoint(folder: Folder) -> Checkpoint:
    return retry_on_damage(lambda bypass_cache: _read_once(folder))


def _read_once(folder: Folder) -> Checkpoint:
    try:
        raw = folder.read(MANIFEST, MAX_BYTES)
    except FileNotFoundError:
        others = [name for name in folder.names() if COMMITTED.fullmatch(name)]
        hint = f"; did you mean {folder.url}/{max(others, key=_batch)}?" if others else ""
        raise CheckpointError(f"{folder.url}: no {MANIFEST} here, so no checkpoint{hint}") from None
    except OSError as error:
        raise unreadable(folder, MANIFEST, error) from error
    manifest = decode(raw, f"{folder.url}/{MANIFEST}")
    return Checkpoint(folder.url.rstrip("/").rsplit("/", 1)[-1], folder, manifest, raw)


def kind_of(error: CheckpointError | None) -> str:
    """In a word, what is the matter with a checkpoint that is passed over."""
    words = {
        DamagedCheckpointError: "damaged",
        IncompleteCheckpointError: "incomplete",
        UnreadableCheckpointError: "unreadable",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "unusable")


class CheckpointStore:
    """See the module. Errors of disk and network surface as CheckpointError."""

    def __init__(self, url: str | os.PathLike[str], *, on_phase: Callable[[str], None] = lambda phase: None):
        self.root = open_folder(url)
        self.leases = Leases(self.root)
        self._logs: dict[str, set[str]] = {}
        """By save_id, the parts of the log that it has."""
        self.on_phase = on_phase
        """Called with the name of each step of a save that a crash could fall into; tests crash there."""

    # ------------------------------------------------------------------------------------------------------ lease

    def acquire(self, *, steal_from_live_writer: bool = False) -> Lease:
        """Become the writer of this run and clear away what dead writers left half done.

        Raises CheckpointError if the present writer still runs on this machine, but where it has been told that it is
        the writer no more: then the lease is taken `steal_from_live_writer` ones.
        """
        with _os_errors(f"{self.root.url}: no lease can be taken"):
            at_least = max(self._committed_epochs(), default=0) + 1
            lease = self.leases.acquire(at_least=at_least, steal_from_live_writer=steal_from_live_writer)
            self._clear_remains(lease)
        return lease

    def check(self, lease: Lease) -> None:
        """Raises CheckpointError when another writer has taken over, or when the folder has vanished."""
        with _os_errors(f"{self.root.url}: the lease cannot be read"):
            self.leases.check(lease)

    def _committed_epochs(self) -> list[int]:
        return [found.order[0] for found in self.candidates() if found.is_listed]

    def _clear_remains(self, lease: Lease) -> None:
        """Drafts, replaced and half-deleted saves of earlier leases; a save replaced by nothing is put back."""
        for name in self._only_replaced(self.root.names()):
            assert isinstance(self.root, LocalFolder)
            self.root.rename(name, _committed_name(name.removeprefix(REPLACED)))
        for name in self.root.names():
            save = SAVE_ID.search(name)
            if save is not None and int(save[1]) < lease.epoch and name.startswith((DRAFT, REPLACED)):
                self.root.child(name).remove_all()
        self._clear_litter(lease)
        if isinstance(self.root, RemoteFolder):
            self._clear_remote_drafts(lease)
            with contextlib.suppress(OSError):  # the right to list uploads is one of its own
                self.root.abort_uploads(lambda path: _is_of_dead_writer(path, lease))

    def _clear_litter(self, lease: Lease | None) -> None:
        """Removals that did not come to their end; under a lease, what a save replaced, and unfinished small files."""
        if not isinstance(self.root, LocalFolder):
            return
        names = self.root.names()
        for name in names:
            if name.startswith(DELETING):
                self._remove_or_put_back(name)
            elif lease is not None and name.startswith(REPLACED) and (save := name.removeprefix(REPLACED)):
                with contextlib.suppress(CheckpointError, OSError):
                    if SAVE_ID.fullmatch(save) and _save_id(self.root.child(_committed_name(save))) == save:
                        self.root.child(name).remove_all()
        if lease is None:
            return
        for folder in (self.root, self.root.child(LOG)):
            for name in folder.names():
                unfinished = UNFINISHED.fullmatch(name)
                if unfinished and (unfinished[1] == HINT or 0 < _epoch(unfinished[1]) < lease.epoch):
                    with contextlib.suppress(OSError):
                        folder.remove(name)

    def _only_replaced(self, names: Sequence[str]) -> list[str]:
        """Of each batch whose save was moved away and never replaced, what was moved."""
        if not self.root.is_local:
            return []
        found: dict[str, str] = {}
        for name in sorted(names, key=_epoch):
            if name.startswith(REPLACED) and SAVE_ID.fullmatch(name.removeprefix(REPLACED)):
                found[_committed_name(name.removeprefix(REPLACED))] = name
        return [moved for name, moved in found.items() if name not in names]

    def check_is_new(self) -> None:
        """Raises CheckpointError when the folder has held checkpoints, though there are no candidates now."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            left = [name for name in self.root.names() if name.startswith(DAMAGED)]
        if left:
            raise CheckpointError(
                f"{self.root.url} holds no checkpoint but {', '.join(left)}, set aside as damaged; rename one to its "
                "ba… to try it again, or move the folder away to start again from batch 1"
            )

    def _clear_remote_drafts(self, lease: Lease) -> None:
        for name in self.root.names():
            if not COMMITTED.fullmatch(name):
                continue
            folder = self.root.child(name)
            children = folder.names()
            drafts = [child for child in children if (m := SAVE_ID.fullmatch(child)) and int(m[1]) < lease.epoch]
            if len(drafts) < 1 + (MANIFEST in children):
                continue
            with contextlib.suppress(CheckpointError):  # a manifest that cannot be read: leave everything for a person
                used = read_checkpoint(folder).manifest.save_id if MANIFEST in children else None
                for child in drafts:
                    if child != used:
                        folder.child(child).remove_all()

    # ---------------------------------------------------------------------------------------------------- publish

    def new_save_id(self, lease: Lease, batch: int) -> str:
        return f"e{lease.epoch}-ba{batch}-{uuid.uuid4().hex[:12]}"

    def open_draft(self, save_id: str) -> tuple[Folder, str]:
        """`draft`, ready to be written to. Raises CheckpointError where this process doesn't see the run's folder.

        Makes the draft's folder and none above it.
        """
        folder, prefix = self.draft(save_id)
        if isinstance(folder, LocalFolder):
            with _os_errors(f"{folder.url}: not written"):
                self.leases.check_is_seen(_epoch(save_id))
                folder.make()
        return folder, prefix

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Where shards of this save are written, and what to put before their names in the manifest."""
        if self.root.is_local:
            return self.root.child(DRAFT + save_id), ""
        return self.root.child(_committed_name(save_id)).child(save_id), f"{save_id}/"

    def publish(self, manifest: Manifest, lease: Lease) -> Checkpoint:
        """Commit a draft whose shards are all durable. Raises CheckpointError, and then nothing has changed."""
        name = _committed_name(manifest.save_id)
        folder = self.root.child(name)
        assert manifest.lease_epoch == lease.epoch
        raw = encode(manifest)
        with _os_errors(f"{folder.url}: not published"):
            self.check(lease)
            self._check_files_are_here(manifest)
            self.on_phase("before manifest")
            if isinstance(self.root, LocalFolder):
                self._commit_by_rename(self.root, manifest, raw, lease)
            else:
                self.check(lease)
                self._check_not_newer(name, manifest)
                self.on_phase("before rename")
                folder.put(MANIFEST, raw)
            self.on_phase("after rename")
        self._logs[manifest.save_id] = {file.name.rpartition("/")[2] for file in manifest.log}
        with contextlib.suppress(OSError):
            self.root.put(HINT, write_json({"name": name, "save_id": manifest.save_id}) + b"\n", is_durable=False)
        return Checkpoint(name, folder, manifest)

    def _check_files_are_here(self, manifest: Manifest) -> None:
        folder, prefix = self.draft(manifest.save_id)
        files = (*manifest.files, *manifest.attachments)
        expected = {file.name.removeprefix(prefix): file.num_bytes for file in files}
        absent = find_absent(folder, expected)
        if absent is None:
            return
        name, size = absent
        if size is None:
            raise CheckpointError(
                f"{folder.url}/{name}: written by another rank but not to be seen from rank 0; save_folder must be "
                "on a disk that all nodes share, or a URL"
            )
        raise CheckpointError(f"{folder.url}/{name}: {size:,} bytes, written were {expected[name]:,}")

    def _commit_by_rename(self, root: LocalFolder, manifest: Manifest, raw: bytes, lease: Lease) -> None:
        draft = root.child(DRAFT + manifest.save_id)
        draft.put_last(MANIFEST, raw)
        name = _committed_name(manifest.save_id)
        self.check(lease)
        self._check_not_newer(name, manifest)
        self.on_phase("before rename")
        replaced, is_replaced = REPLACED + manifest.save_id, False
        with contextlib.suppress(FileNotFoundError):  # not there, or removed by a prune since it was
            root.rename(name, replaced)
            is_replaced = True
        try:
            root.rename(DRAFT + manifest.save_id, name)
        except OSError:
            if is_replaced:
                root.rename(replaced, name)
            raise
        if is_replaced:
            root.child(replaced).remove_all()

    def _check_not_newer(self, name: str, manifest: Manifest) -> None:
        folder = self.root.child(name)
        try:
            head = _head(folder)
            epoch = head.lease_epoch if head is not None else read_checkpoint(folder).manifest.lease_epoch
        except NewerFormatError as error:
            raise _Fenced(f"not published: {error}") from None
        except (CheckpointError, OSError):
            return
        else:
            if epoch > manifest.lease_epoch:
                raise _Fenced(f"{self.root.url}/{name}: saved there by a later launch; this one may not replace it")

    def abandon(self, save_id: str) -> None:
        """Remove a draft that will not be published; not if its manifest has arrived after all (an answer got lost)."""
        folder, _ = self.draft(save_id)
        with contextlib.suppress(OSError, CheckpointError):
            if not self.root.is_local:
                committed = self.root.child(_committed_name(save_id))
                if MANIFEST in committed.names() and read_checkpoint(committed).manifest.save_id == save_id:
                    return
            folder.remove_all()

    # ------------------------------------------------------------------------------------------------------- read

    def candidates(self) -> list[Candidate]:
        """All checkpoints, newest first; those whose manifest cannot be read come where their name puts them."""
        with _os_errors(f"{self.root.url}: cannot be listed"):
            names = self.root.names()
            names = [*filter(COMMITTED.fullmatch, names), *self._only_replaced(names)]
            with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="checkpoint-list") as pool:
                found = list(pool.map(self._candidate, names))
        return sorted((one for one in found if one is not None), key=lambda one: one.order, reverse=True)

    def _candidate(self, name: str) -> Candidate | None:
        folder = self.root.child(name)
        with contextlib.suppress(OSError):  # which reading all of it will name
            head = _head(folder)
            if head is not None and _committed_name(head.save_id) == _name_of_batch(name):
                return Candidate(name, folder, head, None, None)
        try:
            checkpoint = read_checkpoint(folder)
            name_inside = _committed_name(checkpoint.manifest.save_id)
        except CheckpointError as error:
            if MANIFEST in (names := folder.names()):
                return Candidate(name, folder, None, None, error)
            if not self.root.is_local or not names:
                return None  # not committed yet, or being removed
            return Candidate(name, folder, None, None, IncompleteCheckpointError(f"{folder.url}/{MANIFEST}: missing"))
        if name_inside != _name_of_batch(name):
            error = DamagedCheckpointError(f"{folder.url}: holds the manifest of {checkpoint.manifest.save_id}")
            return Candidate(name, folder, None, None, error)
        return Candidate(name, folder, None, checkpoint, None)

    def newest_intact(
        self,
        verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
        *,
        quarantine: Lease | None = None,
        skip: Collection[str] = (),
    ) -> Search:
        """The newest checkpoint that can be read, that `verify` does not object to, and whose name is not in `skip`.

        Damaged and incomplete ones are passed over with a line each; the damaged are moved out of the way under a
        lease. Anything else that is wrong with one (a newer format, a disk that does not answer) is raised: going back
        behind it could not be what the user wants.
        """
        notes, passed = [], []
        for candidate in self.candidates():
            if candidate.name in skip:
                continue
            try:
                if candidate.error is not None:
                    raise candidate.error
                assert candidate.checkpoint is not None
                verify(candidate.checkpoint)
                return Search(candidate.checkpoint, notes, passed)
            except (DamagedCheckpointError, IncompleteCheckpointError) as error:
                notes.append(self.set_aside(candidate.name, error, quarantine))
                passed.append(candidate.name)
        return Search(None, notes, passed)

    def set_aside(self, name: str, error: CheckpointError, lease: Lease | None) -> str:
        """Rename a checkpoint if it is damaged, under a lease and on a local disk; the line to tell the user, anyway.

        The last that can be listed stays where it is, whatever is wrong with it.
        """
        line = f"passed over {kind_of(error)} checkpoint"
        if lease is None or not isinstance(self.root, LocalFolder) or not isinstance(error, DamagedCheckpointError):
            return f"{line}: {error}"
        others = any(found.name != name and found.checkpoint is not None for found in self.candidates())
        target = f"{DAMAGED}{_name_of_batch(name)}-{uuid.uuid4().hex[:6]}"
        with contextlib.suppress(OSError):
            if others:
                self.root.rename(name, target)
                line += f", now {target}"
        return f"{line}: {error}"

    # ------------------------------------------------------------------------------------------------------ remove

    def remove(self, name: str, save_id: str) -> None:
        """First what commits it, then its data; not if another save has its name by now.

        If it is gone already, that is that. Where it is a link, the link goes. On an object store the name may hold the
        draft of another launch as well, which stays.
        """
        folder = self.root.child(name)
        with _os_errors(f"{folder.url}: cannot be removed"), contextlib.suppress(FileNotFoundError):
            version = None
            if MANIFEST in folder.names():
                version = folder.version(MANIFEST) if isinstance(folder, RemoteFolder) else None
                if _save_id(folder) != save_id:
                    return
            if isinstance(self.root, LocalFolder):
                doomed = f"{DELETING}{save_id}-{uuid.uuid4().hex[:6]}"
                self.root.rename(name, doomed)
                self.on_phase("mid-prune")
                self._remove_or_put_back(doomed)
            elif isinstance(folder, RemoteFolder) and folder.remove_version(MANIFEST, version):
                self.on_phase("mid-prune")
                names = folder.names()
                if MANIFEST in names:  # of a save that has come meanwhile: what is right in here may be that one's
                    names = [] if _save_id(folder) == save_id else [save_id]
                for child in names:  # files right in here were copied from a local disk
                    if child == save_id or not SAVE_ID.fullmatch(child):
                        folder.child(child).remove_all()

    def _remove_or_put_back(self, name: str) -> None:
        """Remove what `remove` has moved away, unless a save had taken its name in between, whose it is again then.

        Its name says which save was meant, so that after a crash the next launch can do the same.
        """
        assert isinstance(self.root, LocalFolder)
        doomed, save = self.root.child(name), SAVE_ID.search(name)
        if save is None:
            return
        is_meant = False
        with contextlib.suppress(CheckpointError, OSError):  # what cannot be read is put back
            is_meant = MANIFEST not in doomed.names() or _save_id(doomed) == save[0]
        if not is_meant:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.root.rename(name, _committed_name(save[0]))
                return
        if not doomed.is_link():
            doomed.remove(MANIFEST)
        doomed.remove_all()

    def prune(
        self,
        lease: Lease | None,
        *,
        keep_newest: int,
        keep_every_batches: int | None = None,
        verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
        dry_run: bool = False,
    ) -> list[str]:
        """Remove old checkpoints, and nothing that dead writers left (see `acquire`); returns their names.

        Kept are the newest `keep_newest`, every one whose batch is a multiple of `keep_every_batches`, those that can't
        be listed (for a person to look at), and, if none of the newest passes `verify`, the newest that does.
        Manifests are decoded for `verify` alone, from the newest on.
        """
        if lease is not None:
            self.check(lease)
        candidates = self.candidates()
        listed = [candidate for candidate in candidates if candidate.is_listed]
        doomed = [
            candidate
            for candidate in listed[max(keep_newest, 1) :]
            if not keep_every_batches or candidate.batch % keep_every_batches
        ]
        if not doomed:
            return []
        intact = next((one for one in listed if one.checkpoint is not None and _passes(verify, one.checkpoint)), None)
        if intact is None:
            return []
        doomed = [candidate for candidate in reversed(doomed) if candidate is not intact]
        if not dry_run:
            for candidate in doomed:
                self.remove(candidate.name, candidate.save_id)
            self._clear_litter(lease)
            if lease is not None:
                with _os_errors(f"{self.root.url}/{LOG}: cannot be cleared"):
                    self._remove_log([candidate for candidate in candidates if candidate not in doomed], lease)
        return [candidate.name for candidate in doomed]

    def _remove_log(self, kept: Sequence[Candidate], lease: Lease) -> None:
        """Parts of the log that no checkpoint has any more; none if a checkpoint cannot be asked."""
        folder = self.root.child(LOG)
        names = folder.names()
        used: set[str] = set()
        for candidate in kept if names else ():
            if not candidate.is_listed:
                return
            if candidate.save_id not in self._logs:
                parts = self._read_log_parts(candidate)
                if parts is None:
                    return
                self._logs[candidate.save_id] = parts
            used |= self._logs[candidate.save_id]
        for name in names:
            save = SAVE_ID.search(name)
            if save is not None and name not in used and int(save[1]) <= lease.epoch:
                folder.remove(name)

    def _read_log_parts(self, candidate: Candidate) -> set[str] | None:
        with contextlib.suppress(OSError):
            parts = read_log_parts(self.root.child(candidate.name).read(MANIFEST, MAX_BYTES))
            if parts is not None:
                return parts
        if candidate.checkpoint is None:
            return None
        return {file.name.rpartition("/")[2] for file in candidate.checkpoint.manifest.log}


class _Fenced(Exception):
    pass


@contextlib.contextmanager
def _os_errors(what: str) -> Any:
    try:
        yield
    except _Fenced as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def _passes(verify: Callable[[Checkpoint], None], checkpoint: Checkpoint) -> bool:
    try:
        verify(checkpoint)
    except CheckpointError:
        return False
    return True


def _committed_name(save_id: str) -> str:
    match = SAVE_ID.fullmatch(save_id)
    if match is None:
        raise DamagedCheckpointError(f"save_id {json.dumps(save_id)[:80]} is not one of ours")
    return f"ba{match[2]}"


def _name_of_batch(name: str) -> str:
    """`ba200`, of a checkpoint that has this name and of one that was moved away to be replaced."""
    return _committed_name(name.removeprefix(REPLACED)) if name.startswith(REPLACED) else name


def _batch(name: str) -> int:
    return int(_name_of_batch(name).removeprefix("ba"))


def _epoch(name: str) -> int:
    """Of a name that has a save_id in it; 0 of others."""
    save = SAVE_ID.search(name)
    return int(save[1]) if save else 0


def _is_of_dead_writer(path: str, lease: Lease) -> bool:
    """Whether only an earlier launch than `lease` can have begun to write this, by its path in the run's folder."""
    place = path.partition("/")[0]
    return (COMMITTED.fullmatch(place) is not None or place == LOG) and _epoch(path) < lease.epoch


def _save_id(folder: Folder) -> str:
    head = _head(folder)
    return head.save_id if head is not None else read_checkpoint(folder).manifest.save_id


def _head(folder: Folder) -> Head | None:
    return read_head(folder.read(MANIFEST, HEAD_BYTES))
