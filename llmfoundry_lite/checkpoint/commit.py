"""Committing and removing saves atomically: by renames on a disk, by the last put on an object store. No torch."""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, MAX_BYTES, Head, Manifest, decode, read_head
from llmfoundry_lite.checkpoint.open_folder import unreadable
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.retry import retry_on_damage

COMMITTED = re.compile(r"ba(\d+)")
DRAFT = ".tmp-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
DAMAGED = ".damaged-"
SET_ASIDE = re.compile(r"\.damaged-ba(\d+)-[0-9a-f]+")
"""Name of a save that was set aside as damaged."""
SAVE_ID = re.compile(r"e(\d+)-ba(\d+)-[0-9a-f]+")
HINT = "latest.json"
"""Names the newest save, for people and scripts; nothing here reads it."""
LOG = "log"
"""The folder of the parts of the run's log: see `run_log.py`."""


# ---------------------------------------------------------------------------------------------- one checkpoint


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed save and its folder."""

    name: str
    folder: Folder
    manifest: Manifest
    raw: bytes = field(default=b"", repr=False, compare=False)
    """The manifest's bytes."""

    @property
    def url(self) -> str:
        return self.folder.url


def read_checkpoint(folder: Folder) -> Checkpoint:
    """Read one checkpoint. Raises CheckpointError if there is none, UnsoundCheckpointError if it is unsound."""
    return retry_on_damage(lambda bypass_cache: _read_once(folder))


def _read_once(folder: Folder) -> Checkpoint:
    try:
        raw = folder.read(MANIFEST, MAX_BYTES)
    except FileNotFoundError:
        others = [name for name in folder.names() if COMMITTED.fullmatch(name)]
        hint = f"; did you mean {folder.url}/{max(others, key=batch_of)}?" if others else ""
        raise CheckpointError(f"{folder.url}: no {MANIFEST} here, so no checkpoint{hint}") from None
    except OSError as error:
        raise unreadable(folder, MANIFEST, error) from error
    manifest = decode(raw, f"{folder.url}/{MANIFEST}")
    return Checkpoint(folder.url.rstrip("/").rsplit("/", 1)[-1], folder, manifest, raw)


def head_of(folder: Folder) -> Head:
    """Read no more of a manifest than is needed. Raises OSError and CheckpointError."""
    return read_head(folder.read(MANIFEST, HEAD_BYTES)) or read_checkpoint(folder).manifest.head


def committed_name(save_id: str) -> str:
    match = SAVE_ID.fullmatch(save_id)
    if match is None:
        raise DamagedCheckpointError(f"save_id {json.dumps(save_id)[:80]} is not one of ours")
    return f"ba{match[2]}"


def name_of_batch(name: str) -> str:
    """Return `ba200` for a checkpoint that has this name, and for one that was moved away to be replaced."""
    return committed_name(name.removeprefix(REPLACED)) if name.startswith(REPLACED) else name


def batch_of(name: str) -> int:
    return int(name_of_batch(name).removeprefix("ba"))


def batch_of_set_aside(name: str) -> int:
    match = SET_ASIDE.fullmatch(name)
    assert match is not None
    return int(match[1])


def lease_epoch_of(name: str) -> int:
    """Return the lease epoch of a name that has a save_id in it; 0 for others."""
    save = SAVE_ID.search(name)
    return int(save[1]) if save else 0


# ------------------------------------------------------------------------------------------------- commits


class RenameCommits:
    """Commits on a disk: a folder that has a checkpoint's name is complete.

    A second save of a batch first renames the old one to `.replaced-<save_id>`, then itself into place. After a crash
    between the two, the old one is still read as that batch's checkpoint.
    """

    drafts_in_place = False
    """A folder with a checkpoint's name and without a manifest is a save under way."""

    def __init__(self, root: LocalFolder, on_phase: Callable[[str], None]):
        self.root, self.on_phase = root, on_phase

    def names(self) -> list[str]:
        """Return the names of committed saves."""
        names = self.root.names()
        return [*filter(COMMITTED.fullmatch, names), *self._only_replaced(names)]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Return where shards of this save are written, and what to put before their names in the manifest."""
        return self.root.child(DRAFT + save_id), ""

    def commit(self, save_id: str, raw: bytes, check: Callable[[], None]) -> None:
        """Put a draft in its place, unless `check` objects at the last moment."""
        self.root.child(DRAFT + save_id).put(MANIFEST, raw)
        name, replaced, is_replaced = committed_name(save_id), REPLACED + save_id, False
        check()
        with contextlib.suppress(FileNotFoundError):  # absent, or removed by a prune since it was listed
            self.root.rename(name, replaced)
            is_replaced = True
        try:
            self.root.rename(DRAFT + save_id, name)
        except OSError:
            if is_replaced:
                self.root.rename(replaced, name)
            raise
        if is_replaced:
            self.root.child(replaced).remove_all()

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint and return its new name; "" if it stays where it is."""
        target = f"{DAMAGED}{name_of_batch(name)}-{uuid.uuid4().hex[:6]}"
        with contextlib.suppress(OSError):
            self.root.rename(name, target)
            return target
        return ""

    def set_aside_names(self) -> list[str]:
        """Return the names of saves that were set aside."""
        return [*filter(SET_ASIDE.fullmatch, self.root.names())]

    def remove(self, name: str, save_id: str) -> None:
        """Remove a save, unless another save has its name by now. If the name is a link, remove only the link."""
        folder = self.root.child(name)
        if MANIFEST in folder.names() and head_of(folder).save_id != save_id:
            return
        doomed = f"{DELETING}{save_id}-{uuid.uuid4().hex[:6]}"
        self.root.rename(name, doomed)
        self.on_phase("mid-prune")
        self._remove_or_put_back(doomed)

    def clear_remains(self, epoch: int) -> None:
        """Remove drafts, replaced and half-deleted saves of earlier leases; put back a save that nothing replaced."""
        for name in self._only_replaced(self.root.names()):
            self.root.rename(name, committed_name(name.removeprefix(REPLACED)))
        for name in self.root.names():
            if 0 < lease_epoch_of(name) < epoch and name.startswith((DRAFT, REPLACED)):
                self.root.child(name).remove_all()
        self.clear_litter(has_lease=True, newest=(epoch, 0))

    def clear_litter(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Finish interrupted removals; under a lease, remove replaced saves too."""
        for name in self.root.names():
            if name.startswith(DELETING):
                self._remove_or_put_back(name)
            elif has_lease and name.startswith(REPLACED) and SAVE_ID.fullmatch(save := name.removeprefix(REPLACED)):
                with contextlib.suppress(CheckpointError, OSError):
                    if head_of(self.root.child(committed_name(save))).save_id == save:
                        self.root.child(name).remove_all()

    def _only_replaced(self, names: Sequence[str]) -> list[str]:
        """Return, for each batch whose save was moved away and never replaced, the name that it has now."""
        found: dict[str, str] = {}
        for name in sorted(names, key=lease_epoch_of):
            if name.startswith(REPLACED) and SAVE_ID.fullmatch(name.removeprefix(REPLACED)):
                found[committed_name(name.removeprefix(REPLACED))] = name
        return [moved for name, moved in found.items() if name not in names]

    def _remove_or_put_back(self, name: str) -> None:
        """Remove the save that `remove` has moved away, or put it back if it is another save that had just taken the
        name. The new name has the save_id that was meant, so that after a crash the next launch can do the same."""
        doomed, save = self.root.child(name), SAVE_ID.search(name)
        if save is None:
            return
        is_meant = False
        with contextlib.suppress(CheckpointError, OSError):  # what cannot be read is put back
            is_meant = MANIFEST not in doomed.names() or head_of(doomed).save_id == save[0]
        if not is_meant:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.root.rename(name, committed_name(save[0]))
                return
        if not doomed.is_link():
            doomed.remove(MANIFEST)
        doomed.remove_all()


class PutCommits:
    """Commits on an object store: shards go to `ba<batch>/<save_id>/`, a name no other save has, and putting
    `ba<batch>/manifest.json` last commits them. The methods are those of `RenameCommits`."""

    drafts_in_place = True

    def __init__(self, root: RemoteFolder, on_phase: Callable[[str], None]):
        self.root, self.on_phase = root, on_phase

    def names(self) -> list[str]:
        return [*filter(COMMITTED.fullmatch, self.root.names())]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        return self.root.child(committed_name(save_id)).child(save_id), f"{save_id}/"

    def commit(self, save_id: str, raw: bytes, check: Callable[[], None]) -> None:
        check()
        self.root.child(committed_name(save_id)).put(MANIFEST, raw)

    def set_aside(self, name: str) -> str:
        return ""

    def set_aside_names(self) -> list[str]:
        return []

    def remove(self, name: str, save_id: str) -> None:
        """Remove a save. Another launch's draft below the same name stays."""
        folder, version = self.root.child(name), None
        if MANIFEST in folder.names():
            version = folder.version(MANIFEST)
            if head_of(folder).save_id != save_id:
                return
        if not folder.remove_version(MANIFEST, version):
            return
        self.on_phase("mid-prune")
        names = folder.names()
        if MANIFEST in names:  # a newer save's: files directly in this folder may be part of it
            names = [] if head_of(folder).save_id == save_id else [save_id]
        for child in names:  # files directly in this folder were copied from a local disk
            if child == save_id or not SAVE_ID.fullmatch(child):
                folder.child(child).remove_all()

    def clear_remains(self, epoch: int) -> None:
        for name in self.names():
            folder = self.root.child(name)
            children = folder.names()
            drafts = [child for child in children if SAVE_ID.fullmatch(child) and lease_epoch_of(child) < epoch]
            if len(drafts) < 1 + (MANIFEST in children):
                continue
            with contextlib.suppress(CheckpointError):  # a manifest that cannot be read: leave everything for a person
                used = read_checkpoint(folder).manifest.save_id if MANIFEST in children else None
                for child in drafts:
                    if child != used:
                        folder.child(child).remove_all()

        def is_dead(path: str) -> bool:
            """Return whether an earlier launch began this upload, by its path in the run's folder."""
            place = path.partition("/")[0]
            return (COMMITTED.fullmatch(place) is not None or place == LOG) and lease_epoch_of(path) < epoch

        with contextlib.suppress(OSError):  # listing uploads needs a permission of its own
            self.root.abort_uploads(is_dead)

    def clear_litter(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Finish removals that failed once the manifest was gone: remove the shards of saves without a manifest, if
        they are older than `newest`, by lease epoch and batch. A newer save may be about to be published.

        Under a lease this is left to the next launch (`clear_remains`), because it lists the folder of each save.
        """
        if has_lease:
            return
        for name in self.names():
            folder = self.root.child(name)
            children = folder.names()
            if MANIFEST in children:
                continue
            for child in children:
                save = SAVE_ID.fullmatch(child)
                if save is not None and (int(save[1]), int(save[2])) < newest:
                    folder.child(child).remove_all()


def commits_in(root: Folder, on_phase: Callable[[str], None]) -> RenameCommits | PutCommits:
    if isinstance(root, LocalFolder):
        return RenameCommits(root, on_phase)
    assert isinstance(root, RemoteFolder)
    return PutCommits(root, on_phase)
