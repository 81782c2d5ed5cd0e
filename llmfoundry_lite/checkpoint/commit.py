"""Commits and removes saves atomically: by renames on a disk, by the last put on an object store. No torch."""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, MAX_BYTES, Head, Manifest, decode, read_head
from llmfoundry_lite.checkpoint.open_folder import unreadable_file_error
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.retry import retry_on_damage

COMMITTED = re.compile(r"ba(\d+)")
"""Name of a committed save; the number counts batches."""
DRAFT = ".tmp-"
REPLACED = ".replaced-"
DELETING = ".deleting-"
DAMAGED = ".damaged-"
SET_ASIDE = re.compile(r"\.damaged-ba(\d+)-[0-9a-f]+")
"""Name of a save that was set aside as damaged."""
SAVE_ID = re.compile(r"e(\d+)-ba(\d+)-[0-9a-f]+")
"""Unique name of a save: its lease epoch, its batch, and random digits."""
HINT = "latest.json"
"""Names the newest save, for people and scripts. Nothing here reads it."""
LOG = "log"
"""The folder of the parts of the run's log: see `run_log.py`."""


# ---------------------------------------------------------------------------------------------- one checkpoint


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed save and its folder."""

    name: str
    folder: Folder
    manifest: Manifest
    manifest_bytes: bytes = field(default=b"", repr=False, compare=False)
    """The manifest as it was read. Empty for a checkpoint that was made in memory."""

    @property
    def url(self) -> str:
        """Path or URL of its folder."""
        return self.folder.url


def read_checkpoint(folder: Folder) -> Checkpoint:
    """Read the manifest of one checkpoint, again if it seems damaged at first. Raises CheckpointError if there is none,
    and UnsoundCheckpointError if it is damaged or cannot be read."""
    return retry_on_damage(lambda bypass_cache: _read_once(folder))


def _read_once(folder: Folder) -> Checkpoint:
    """Read the manifest of one checkpoint, as `read_checkpoint`, once."""
    try:
        raw = folder.read(MANIFEST, MAX_BYTES)
    except FileNotFoundError:
        checkpoints = [name for name in folder.names() if COMMITTED.fullmatch(name)]
        hint = ""
        if checkpoints:
            hint = f"; did you mean {folder.url}/{max(checkpoints, key=batch_of)}?"
        raise CheckpointError(f"{folder.url}: no {MANIFEST} here, so no checkpoint{hint}") from None
    except OSError as error:
        raise unreadable_file_error(folder, MANIFEST, error) from error
    manifest = decode(raw, f"{folder.url}/{MANIFEST}")
    _, _, name = folder.url.rstrip("/").rpartition("/")
    return Checkpoint(name, folder, manifest, raw)


def head_of(folder: Folder) -> Head:
    """Read the head of a checkpoint's manifest: its first bytes, or all of it if these do not suffice. Raises OSError
    and CheckpointError."""
    return read_head(folder.read(MANIFEST, HEAD_BYTES)) or read_checkpoint(folder).manifest.head


def committed_name(save_id: str) -> str:
    """Return the name under which a save is committed, such as `ba200`. Raises DamagedCheckpointError if `save_id` is
    not one of ours."""
    match = SAVE_ID.fullmatch(save_id)
    if match is None:
        raise DamagedCheckpointError(f"save_id {json.dumps(save_id)[:80]} is not one of ours")
    return f"ba{match[2]}"


def name_of_batch(name: str) -> str:
    """Return `ba200` for a checkpoint that has this name, and for one that was moved away to be replaced."""
    return committed_name(name.removeprefix(REPLACED)) if name.startswith(REPLACED) else name


def batch_of(name: str) -> int:
    """Return the batch of a checkpoint, by its name: 200 for `ba200`, also if it was moved away to be replaced."""
    return int(name_of_batch(name).removeprefix("ba"))


def batch_of_set_aside(name: str) -> int:
    """Return the batch of a save that was set aside as damaged, by its name."""
    match = SET_ASIDE.fullmatch(name)
    assert match is not None
    return int(match[1])


def lease_epoch_of(name: str) -> int:
    """Return the lease epoch in a name that contains a save_id, or 0 if the name contains none."""
    save = SAVE_ID.search(name)
    return int(save[1]) if save else 0


# ------------------------------------------------------------------------------------------------- commits


class RenameCommits:
    """Commits on a disk. A folder with a checkpoint's name is complete, because it gets the name by a rename.

    A second save of a batch first renames the old one to `.replaced-<save_id>`, then itself into place. After a crash
    between the two, the old one is still read as that batch's checkpoint.
    """

    drafts_in_place = False
    """Whether a folder that has a checkpoint's name and no manifest is a save under way."""

    def __init__(self, root: LocalFolder, on_phase: Callable[[str], None]):
        self.root = root
        self.on_phase = on_phase

    def names(self) -> list[str]:
        """Return the names of committed saves, those included that were moved away and never replaced."""
        names = self.root.names()
        return [*filter(COMMITTED.fullmatch, names), *self._moved_away_only(names)]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Return the folder that shards of this save are written to, and the prefix of their names in the manifest."""
        return self.root.child(DRAFT + save_id), ""

    def commit(self, save_id: str, manifest_bytes: bytes, check: Callable[[], None]) -> None:
        """Write the manifest, and rename the draft to the checkpoint's name. An earlier save of this name is moved away
        first, and removed at the end.

        `check` is called just before the renames. If it raises, nothing is renamed. Raises OSError.
        """
        self.root.child(DRAFT + save_id).put(MANIFEST, manifest_bytes)
        name = committed_name(save_id)
        replaced = REPLACED + save_id
        is_replaced = False
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
        """Rename a damaged checkpoint and return its new name. Returns "" if it cannot be renamed."""
        new_name = f"{DAMAGED}{name_of_batch(name)}-{uuid.uuid4().hex[:6]}"
        with contextlib.suppress(OSError):
            self.root.rename(name, new_name)
            return new_name
        return ""

    def set_aside_names(self) -> list[str]:
        """Return the names of saves that were set aside."""
        return [*filter(SET_ASIDE.fullmatch, self.root.names())]

    def remove(self, name: str, save_id: str) -> None:
        """Remove a save, unless another save has its name by now. If the name is a link, remove only the link. Raises
        OSError."""
        folder = self.root.child(name)
        if MANIFEST in folder.names() and head_of(folder).save_id != save_id:
            return
        moved_name = f"{DELETING}{save_id}-{uuid.uuid4().hex[:6]}"
        self.root.rename(name, moved_name)
        self.on_phase("mid-prune")
        self._remove_or_put_back(moved_name)

    def clear_leftovers(self, epoch: int) -> None:
        """Remove what launches with a lease epoch below `epoch` have left behind: drafts, replaced saves, and saves
        whose removal was interrupted. Put back a save that was moved away and never replaced. Raises OSError."""
        for name in self._moved_away_only(self.root.names()):
            self.root.rename(name, committed_name(name.removeprefix(REPLACED)))
        for name in self.root.names():
            if 0 < lease_epoch_of(name) < epoch and name.startswith((DRAFT, REPLACED)):
                self.root.child(name).remove_all()
        self.finish_removals(has_lease=True, newest=(epoch, 0))

    def finish_removals(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Finish removals that a crash has interrupted (`.deleting-…`). Under a lease, also remove saves that have been
        replaced (`.replaced-<save_id of the new save>`), if the new save is in place.

        `newest` is not used; `PutCommits` needs it. Raises OSError.
        """
        for name in self.root.names():
            new_save_id = name.removeprefix(REPLACED)
            if name.startswith(DELETING):
                self._remove_or_put_back(name)
            elif has_lease and name.startswith(REPLACED) and SAVE_ID.fullmatch(new_save_id):
                with contextlib.suppress(CheckpointError, OSError):
                    if head_of(self.root.child(committed_name(new_save_id))).save_id == new_save_id:
                        self.root.child(name).remove_all()

    def _moved_away_only(self, names: Sequence[str]) -> list[str]:
        """Return, for each batch whose save was moved away to be replaced and never was, the save's present name.
        `names` are all names in the run's folder."""
        moved_names: dict[str, str] = {}
        for name in sorted(names, key=lease_epoch_of):
            if name.startswith(REPLACED) and SAVE_ID.fullmatch(name.removeprefix(REPLACED)):
                moved_names[name_of_batch(name)] = name
        return [moved_name for name, moved_name in moved_names.items() if name not in names]

    def _remove_or_put_back(self, moved_name: str) -> None:
        """Remove a save that `remove` has renamed, or put it back if it is another one.

        Another save may have taken the name just before the rename. The new name has the save_id of the save that was
        to be removed, so that after a crash the next launch can decide as well. Raises OSError.
        """
        folder = self.root.child(moved_name)
        save = SAVE_ID.search(moved_name)
        if save is None:
            return
        save_id = save[0]
        is_to_be_removed = False
        try:
            is_to_be_removed = MANIFEST not in folder.names() or head_of(folder).save_id == save_id
        except FileNotFoundError:
            is_to_be_removed = True  # another process removes it now
        except (CheckpointError, OSError):
            pass  # a save that cannot be read is put back
        if not is_to_be_removed:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.root.rename(moved_name, committed_name(save_id))
                return
        # The manifest goes first, so that what an interrupted removal leaves is no checkpoint. Through a link, it would
        # be removed from the checkpoint that the link leads to.
        if not folder.is_link():
            folder.remove(MANIFEST)
        folder.remove_all()


class PutCommits:
    """Commits on an object store, with the methods of `RenameCommits`.

    Shards go to `ba<batch>/<save_id>/`, a name that no other save has. Putting `ba<batch>/manifest.json` last commits
    them.
    """

    drafts_in_place = True

    def __init__(self, root: RemoteFolder, on_phase: Callable[[str], None]):
        self.root = root
        self.on_phase = on_phase

    def names(self) -> list[str]:
        """Return the names of saves, committed or under way."""
        return [*filter(COMMITTED.fullmatch, self.root.names())]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Return the folder that shards of this save are written to, and the prefix of their names in the manifest."""
        return self.root.child(committed_name(save_id)).child(save_id), f"{save_id}/"

    def commit(self, save_id: str, manifest_bytes: bytes, check: Callable[[], None]) -> None:
        """Put the manifest, which commits the save. `check` is called just before; if it raises, nothing is put. Raises
        OSError."""
        check()
        self.root.child(committed_name(save_id)).put(MANIFEST, manifest_bytes)

    def set_aside(self, name: str) -> str:
        """Do nothing, because an object store has no renames. Returns ""."""
        return ""

    def set_aside_names(self) -> list[str]:
        """Return the names of saves that were set aside: none."""
        return []

    def remove(self, name: str, save_id: str) -> None:
        """Remove a save: first its manifest, then its shards. Another launch's draft below the same name stays. Raises
        OSError."""
        folder = self.root.child(name)
        version = None
        if MANIFEST in folder.names():
            version = folder.version(MANIFEST)
            if head_of(folder).save_id != save_id:
                return
        if not folder.remove_version(MANIFEST, version):
            return  # another save has put its manifest since
        self.on_phase("mid-prune")

        # Shards lie in a folder of their save. Those of a save that was copied from a local disk lie beside its
        # manifest, so everything here that is not another save's folder is removed.
        children = folder.names()
        if MANIFEST in children:
            # Meanwhile a save has committed here, and files beside the manifest may be part of it. If it is the same
            # save again, all of it stays.
            children = [] if head_of(folder).save_id == save_id else [save_id]
        for child in children:
            if child == save_id or not SAVE_ID.fullmatch(child):
                folder.child(child).remove_all()

    def clear_leftovers(self, epoch: int) -> None:
        """Remove drafts and abort uploads of launches whose lease epoch is below `epoch`."""
        for name in self.names():
            folder = self.root.child(name)
            children = folder.names()
            drafts = [child for child in children if SAVE_ID.fullmatch(child) and lease_epoch_of(child) < epoch]
            # If there is a manifest, one of these folders is that of the committed save.
            num_committed = int(MANIFEST in children)
            if len(drafts) <= num_committed:
                continue
            # If the manifest cannot be read, everything is left for a person.
            with contextlib.suppress(CheckpointError):
                committed = read_checkpoint(folder).manifest.save_id if num_committed else None
                for child in drafts:
                    if child != committed:
                        folder.child(child).remove_all()

        def is_of_earlier_launch(path: str) -> bool:
            """Return whether an earlier launch began an upload, by the upload's path in the run's folder."""
            top = path.partition("/")[0]
            is_ours = COMMITTED.fullmatch(top) is not None or top == LOG
            return is_ours and lease_epoch_of(path) < epoch

        with contextlib.suppress(OSError):  # listing uploads needs a permission of its own
            self.root.abort_uploads(is_of_earlier_launch)

    def finish_removals(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Remove the shards of saves whose removal failed when their manifest was gone already.

        Only saves older than `newest`, a lease epoch and a batch, are removed: a newer one may be about to be
        published. Under a lease nothing is done, because this lists the folder of each save; the next launch removes
        the shards (`clear_leftovers`). Raises OSError.
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
    """Return the way to commit saves in a run's folder. `on_phase` is called with the name of each step that a crash
    could fall into."""
    if isinstance(root, LocalFolder):
        return RenameCommits(root, on_phase)
    assert isinstance(root, RemoteFolder)
    return PutCommits(root, on_phase)
