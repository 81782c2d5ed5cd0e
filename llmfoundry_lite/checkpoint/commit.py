"""Commits and removes saves atomically: by renames on a disk, by the last put on an object store. No torch.

A save is written to a draft, which no reader looks at, and is then committed as `ba<batch>` in the run's folder.
`RenameCommits` and `PutCommits` have the same methods; `commits_in` chooses one for a folder. They know nothing of
which checkpoint is newest or who may write, which `store` and `lease` decide. Names in the run's folder:

    ba200                        a committed save of batch 200 (on an object store, also a draft without a manifest)
    .tmp-<save_id>               a draft on a disk
    .replaced-<save_id>          the save of a batch that the save with this id replaces
    .deleting-<save_id>-…        the save with this id, while it is removed
    .damaged-ba200-…             a save that was found to be damaged, and is kept for a person
"""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import HEAD_BYTES, MANIFEST, MAX_BYTES, Head, Manifest
from llmfoundry_lite.checkpoint.manifest_json import decode, read_head
from llmfoundry_lite.checkpoint.open_folder import unreadable_file_error
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.retry import retry_on_damage

COMMITTED = re.compile(r"ba(\d+)")
"""Name of a committed save; the number counts batches."""
DRAFT = ".tmp-"
"""Prefix of a draft's name on a disk."""
REPLACED = ".replaced-"
"""Prefix of the name of a save that another one replaces."""
DELETING = ".deleting-"
"""Prefix of the name of a save that is being removed."""
DAMAGED = ".damaged-"
"""Prefix of the name of a save that was set aside as damaged."""
SET_ASIDE = re.compile(r"\.damaged-ba(\d+)-[0-9a-f]+")
"""Name of a save that was set aside as damaged."""
SAVE_ID = re.compile(r"e(\d+)-ba(\d+)-[0-9a-f]+")
"""Unique name of a save: its lease epoch, its batch, and random digits."""
HINT = "latest.json"
"""Names the newest save, for people and scripts. Nothing here reads it."""
COPYING = "copying"
"""Empty file in the draft of a copy on an object store. See `PutCommits.begin_copy`."""
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
    """Read the manifest of the checkpoint in a folder. If it seems damaged, it is read once more.

    Raises CheckpointError if there is no manifest, and UnsoundCheckpointError if it is damaged or cannot be read.
    """
    return retry_on_damage(lambda bypass_cache: _read_once(folder))


def _read_once(folder: Folder) -> Checkpoint:
    """Read the manifest of the checkpoint in a folder, without a second attempt; see `read_checkpoint`.

    If the folder is a run's folder, which has checkpoints and is not one, the error suggests its newest.
    """
    try:
        raw = folder.read(MANIFEST, MAX_BYTES)
    except FileNotFoundError:
        checkpoint_names = [name for name in folder.names() if COMMITTED.fullmatch(name)]
        hint = ""
        if checkpoint_names:
            hint = f"; did you mean {folder.url}/{max(checkpoint_names, key=batch_of)}?"
        raise CheckpointError(f"{folder.url}: no {MANIFEST} here, so no checkpoint{hint}") from None
    except OSError as error:
        raise unreadable_file_error(folder, MANIFEST, error) from error
    manifest = decode(raw, f"{folder.url}/{MANIFEST}")
    _, _, folder_name = folder.url.rstrip("/").rpartition("/")
    return Checkpoint(folder_name, folder, manifest, raw)


def head_of(folder: Folder) -> Head:
    """Read the facts for a listing from a checkpoint's manifest: from its first bytes, or from all of it if those do
    not suffice. Raises OSError and CheckpointError."""
    first_bytes = folder.read(MANIFEST, HEAD_BYTES)
    return read_head(first_bytes) or read_checkpoint(folder).manifest.head


def committed_name(save_id: str) -> str:
    """Return the name under which a save is committed: `ba200` for `e7-ba200-0123456789ab`.

    Raises DamagedCheckpointError if `save_id` has another form.
    """
    match = SAVE_ID.fullmatch(save_id)
    if match is None:
        raise DamagedCheckpointError(f"save_id {json.dumps(save_id)[:80]} is not one of ours")
    return f"ba{match[2]}"


def name_of_batch(name: str) -> str:
    """Return the name that a checkpoint has or had as a committed save: `ba200` for `ba200`, and for
    `.replaced-e7-ba200-0123456789ab`, which was moved away to be replaced."""
    if name.startswith(REPLACED):
        return committed_name(name.removeprefix(REPLACED))
    return name


def batch_of(name: str) -> int:
    """Return the batch of a checkpoint by its name: 200 for `ba200`, also if it was moved away to be replaced."""
    return int(name_of_batch(name).removeprefix("ba"))


def batch_of_set_aside(name: str) -> int:
    """Return the batch of a save that was set aside as damaged, by its name: 200 for `.damaged-ba200-a1b2c3`."""
    match = SET_ASIDE.fullmatch(name)
    assert match is not None
    return int(match[1])


def lease_epoch_of(name: str) -> int:
    """Return the lease epoch in a name that contains a save_id, or 0: 7 for `.tmp-e7-ba200-0123456789ab`, 0 for
    `ba200`."""
    save_id = SAVE_ID.search(name)
    return int(save_id[1]) if save_id else 0


# ------------------------------------------------------------------------------------------------- commits


class RenameCommits:
    """Commits on a disk. A folder with a checkpoint's name is complete, because it gets the name by a rename.

    A second save of a batch first renames the old one to `.replaced-<save_id of the new one>`, then itself into place.
    After a crash between the two, the old one is still read as that batch's checkpoint.
    """

    drafts_in_place = False
    """Whether a folder that has a checkpoint's name and no manifest may be a draft."""

    def __init__(self, root: LocalFolder, on_phase: Callable[[str], None]):
        self.root = root
        self.on_phase = on_phase

    def names(self) -> list[str]:
        """Return the names of committed saves. Those that were moved away to be replaced, and never were, count too."""
        names = self.root.names()
        committed_names = [name for name in names if COMMITTED.fullmatch(name)]
        return [*committed_names, *self._moved_away_only(names)]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Return the folder that the files of a save are written to, and the prefix of their names in the manifest."""
        return self.root.child(DRAFT + save_id), ""

    def commit(self, save_id: str, manifest_bytes: bytes, check: Callable[[], None]) -> None:
        """Write the manifest into a draft, and rename the draft to the checkpoint's name.

        If there is a save of this name, it is moved away before and removed afterwards. `check` is called just before
        the renames; if it raises, nothing is renamed. Raises OSError; the earlier save is then in its place again, or
        is put back by the next launch.
        """
        self.root.child(DRAFT + save_id).put(MANIFEST, manifest_bytes)
        name = committed_name(save_id)
        moved_name = REPLACED + save_id
        check()

        # Move an earlier save away.
        has_moved_earlier = False
        with contextlib.suppress(FileNotFoundError):  # there is none, or a prune has just removed it
            self.root.rename(name, moved_name)
            has_moved_earlier = True
        try:
            self.root.rename(DRAFT + save_id, name)
        except OSError:
            if has_moved_earlier:
                self.root.rename(moved_name, name)
            raise

        # The save is committed now.
        if has_moved_earlier:
            self.root.child(moved_name).remove_all()

    def begin_copy(self, save_id: str) -> None:
        """Do nothing: a draft on a disk has a name by which it is known. `PutCommits` needs this."""

    def end_copy(self, save_id: str) -> None:
        """Do nothing, as `begin_copy`."""

    def has_copy_in_progress(self, save_id: str) -> bool:
        """Return whether a draft of this save is here, which may be a copy that is not committed yet. Raises
        OSError."""
        return self.root.child(DRAFT + save_id).exists()

    def set_aside(self, name: str) -> str:
        """Rename a damaged checkpoint so that readers no longer find it, and return its new name. Returns "" if it
        cannot be renamed."""
        new_name = f"{DAMAGED}{name_of_batch(name)}-{uuid.uuid4().hex[:6]}"
        with contextlib.suppress(OSError):
            self.root.rename(name, new_name)
            return new_name
        return ""

    def set_aside_names(self) -> list[str]:
        """Return the names of saves that were set aside as damaged."""
        return [name for name in self.root.names() if SET_ASIDE.fullmatch(name)]

    def remove(self, name: str, save_id: str) -> None:
        """Remove the save with this id, which has this name; do nothing if another save has the name by now.

        It is renamed first, so that readers see all of it or nothing. If the name is a link, only the link is removed.
        Raises OSError.
        """
        folder = self.root.child(name)
        if MANIFEST in folder.names() and head_of(folder).save_id != save_id:
            return
        moved_name = f"{DELETING}{save_id}-{uuid.uuid4().hex[:6]}"
        self.root.rename(name, moved_name)
        self.on_phase("mid-prune")
        self._remove_or_put_back(moved_name)

    def clear_leftovers(self, epoch: int) -> None:
        """Clear up after launches whose lease epoch is below `epoch`, which have ended or may no longer write.

        Their drafts and replaced saves are removed, and interrupted removals finished. A save that was moved away to be
        replaced, and never was, gets its name back. Raises OSError.
        """
        # First put saves back, so that the only save of a batch is not removed as a replaced one.
        for name in self._moved_away_only(self.root.names()):
            self.root.rename(name, committed_name(name.removeprefix(REPLACED)))
        for name in self.root.names():
            is_of_earlier_launch = 0 < lease_epoch_of(name) < epoch
            if is_of_earlier_launch and name.startswith((DRAFT, REPLACED)):
                self.root.child(name).remove_all()
        self.finish_removals(has_lease=True, newest=(epoch, 0))

    def finish_removals(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Finish removals that a crash has interrupted (`.deleting-…`).

        has_lease: whether the caller holds the run's lease. It then also removes saves that have been replaced
            (`.replaced-<save_id of the new save>`), if the new save is in place.
        newest: not used here; `PutCommits` needs it.

        Raises OSError.
        """
        for name in self.root.names():
            if name.startswith(DELETING):
                self._remove_or_put_back(name)
                continue
            new_save_id = name.removeprefix(REPLACED)
            is_replaced_save = name.startswith(REPLACED) and SAVE_ID.fullmatch(new_save_id)
            if has_lease and is_replaced_save:
                new_folder = self.root.child(committed_name(new_save_id))
                # If the new save cannot be read, the old one stays.
                with contextlib.suppress(CheckpointError, OSError):
                    if head_of(new_folder).save_id == new_save_id:
                        self.root.child(name).remove_all()

    def leftovers(self, *, newest: tuple[int, int]) -> list[str]:
        """Return the names of folders that `finish_removals` removes. `newest` is not used here. Raises OSError."""
        return [name for name in self.root.names() if name.startswith(DELETING) and SAVE_ID.search(name)]

    def _moved_away_only(self, names: Sequence[str]) -> list[str]:
        """Return the present names of saves that were moved away to be replaced, and never were.

        `names` are all names in the run's folder. With `.replaced-e7-ba200-…` and no `ba200`, a launch has crashed
        between the two renames of `commit`, so this is the save of batch 200. If there are several, the one that was
        moved by the latest launch counts.
        """
        moved_names: dict[str, str] = {}  # name of the committed save -> name after it was moved
        for name in sorted(names, key=lease_epoch_of):
            if name.startswith(REPLACED) and SAVE_ID.fullmatch(name.removeprefix(REPLACED)):
                moved_names[name_of_batch(name)] = name
        return [moved_name for name, moved_name in moved_names.items() if name not in names]

    def _remove_or_put_back(self, moved_name: str) -> None:
        """Remove a save that `remove` has renamed to `.deleting-<save_id>-…`, or put it back if it is another save.

        Another save may have taken the name just before the rename. The new name has the save_id of the save that was
        to be removed, so that after a crash the next launch can decide as well. Raises OSError.
        """
        folder = self.root.child(moved_name)
        match = SAVE_ID.search(moved_name)
        if match is None:
            return  # not a name that `remove` gives
        save_id = match[0]

        # Compare the id in the name with the id in the manifest. A save that cannot be read is put back.
        is_to_be_removed = False
        try:
            is_to_be_removed = MANIFEST not in folder.names() or head_of(folder).save_id == save_id
        except FileNotFoundError:
            is_to_be_removed = True  # another process removes it now
        except (CheckpointError, OSError):
            pass
        if not is_to_be_removed:
            # If there is a save of this name by now, this one has been replaced, and is removed.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self.root.rename(moved_name, committed_name(save_id))
                return

        # The manifest goes first, so that what an interrupted removal leaves is not a checkpoint. Through a link, it
        # would be removed from the checkpoint that the link leads to.
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
        """Return the names of saves. A name without a manifest in it is a draft, or the rest of a removed save."""
        return [name for name in self.root.names() if COMMITTED.fullmatch(name)]

    def draft(self, save_id: str) -> tuple[Folder, str]:
        """Return the folder that the files of a save are written to, and the prefix of their names in the manifest."""
        return self.root.child(committed_name(save_id)).child(save_id), f"{save_id}/"

    def commit(self, save_id: str, manifest_bytes: bytes, check: Callable[[], None]) -> None:
        """Put the manifest, which commits the save and replaces an earlier one of its batch.

        `check` is called just before; if it raises, nothing is put. Raises OSError, in which case the manifest may have
        been put although the answer was lost.
        """
        check()
        self.root.child(committed_name(save_id)).put(MANIFEST, manifest_bytes)

    def begin_copy(self, save_id: str) -> None:
        """Mark a draft as that of a copy, before its first file, so that a user's command does not remove it.

        The copied save may be older than the newest one here, as only the rest of an interrupted removal is otherwise
        (`leftovers`). The mark of a copy that was killed goes with its draft, when the next launch begins. Raises
        OSError.
        """
        folder, _ = self.draft(save_id)
        folder.put(COPYING, b"")

    def end_copy(self, save_id: str) -> None:
        """Remove the mark from a copy that is committed. It does no harm, so a mark that cannot be removed stays."""
        folder, _ = self.draft(save_id)
        with contextlib.suppress(OSError):
            folder.remove(COPYING)

    def has_copy_in_progress(self, save_id: str) -> bool:
        """Return whether a draft of this save has the mark of `begin_copy`. Raises OSError."""
        folder, _ = self.draft(save_id)
        return COPYING in folder.names()

    def set_aside(self, name: str) -> str:
        """Do nothing, because an object store has no renames. Returns ""."""
        return ""

    def set_aside_names(self) -> list[str]:
        """Return the names of saves that were set aside: none."""
        return []

    def remove(self, name: str, save_id: str) -> None:
        """Remove the save with this id, which has this name; do nothing if another save has the name by now.

        The manifest goes first and the files after it, so that an interrupted removal leaves no checkpoint. The draft
        of another launch below the same name stays. Raises OSError.
        """
        # Remove the manifest only in the version that was compared, because another save may be committed meanwhile.
        folder = self.root.child(name)
        version = None
        if MANIFEST in folder.names():
            version = folder.version(MANIFEST)
            if head_of(folder).save_id != save_id:
                return
        if not folder.remove_version(MANIFEST, version):
            return  # another save has put its manifest since
        self.on_phase("mid-prune")

        # Shards lie in a folder named by the save's id. Those of a save that was copied from a local disk lie beside
        # the manifest, so everything here that is not another save's folder is removed.
        children = folder.names()
        if MANIFEST in children:
            # Meanwhile a save has committed here, and files beside the manifest may be part of it. If it is the same
            # save again, all of it stays.
            children = [] if head_of(folder).save_id == save_id else [save_id]
        for child in children:
            is_folder_of_other_save = child != save_id and SAVE_ID.fullmatch(child)
            if not is_folder_of_other_save:
                folder.child(child).remove_all()

    def clear_leftovers(self, epoch: int) -> None:
        """Clear up after launches whose lease epoch is below `epoch`, which have ended or may no longer write.

        Their drafts are removed and their unfinished uploads aborted. A draft is a folder `ba200/<save_id>` that the
        manifest of `ba200` does not refer to. Raises OSError.
        """
        for name in self.names():
            folder = self.root.child(name)
            children = folder.names()
            old_folders = [child for child in children if SAVE_ID.fullmatch(child) and lease_epoch_of(child) < epoch]

            # Most saves have a manifest and one folder. Their manifests need not be read.
            num_committed = int(MANIFEST in children)
            if len(old_folders) <= num_committed:
                continue
            # If the manifest cannot be read, everything is left for a person.
            with contextlib.suppress(CheckpointError):
                committed_save_id = read_checkpoint(folder).manifest.save_id if num_committed else None
                for child in old_folders:
                    if child != committed_save_id:
                        folder.child(child).remove_all()

        def is_of_earlier_launch(path: str) -> bool:
            """Return whether an earlier launch began an upload, by the upload's path in the run's folder."""
            first_part, _, _ = path.partition("/")
            is_ours = COMMITTED.fullmatch(first_part) is not None or first_part == LOG
            return is_ours and lease_epoch_of(path) < epoch

        with contextlib.suppress(OSError):  # listing uploads needs another permission than the rest
            self.root.abort_uploads(is_of_earlier_launch)

    def finish_removals(self, *, has_lease: bool, newest: tuple[int, int]) -> None:
        """Remove the shards of saves whose removal was interrupted when their manifest was gone already.

        has_lease: whether the caller holds the run's lease. Then nothing is done, because this lists the folder of each
            save; the next launch removes the shards (`clear_leftovers`).
        newest: lease epoch and batch of the newest checkpoint. Only older saves are removed, because a newer one
            without a manifest may be about to be published.

        Raises OSError.
        """
        if has_lease:
            return
        for path in self.leftovers(newest=newest):
            self.root.child(path).remove_all()

    def leftovers(self, *, newest: tuple[int, int]) -> list[str]:
        """Return the paths of folders whose removal was interrupted when their manifest was gone already.

        `newest` is as in `finish_removals`. Drafts of copies are left out. Raises OSError.
        """
        paths = []
        for name in self.names():
            folder = self.root.child(name)
            children = folder.names()
            if MANIFEST in children:
                continue
            for child in children:
                save_id = SAVE_ID.fullmatch(child)
                if save_id is None:
                    continue
                epoch_and_batch = int(save_id[1]), int(save_id[2])
                if epoch_and_batch >= newest or COPYING in folder.child(child).names():
                    continue
                # A copy removes its mark after it has put the manifest, so that one of them is seen here.
                if MANIFEST not in folder.names():
                    paths.append(f"{name}/{child}")
        return paths


def commits_in(root: Folder, on_phase: Callable[[str], None]) -> RenameCommits | PutCommits:
    """Return the object that commits and removes saves in a run's folder.

    `on_phase` is called with the name of a step, so that tests can crash there.
    """
    if isinstance(root, LocalFolder):
        return RenameCommits(root, on_phase)
    assert isinstance(root, RemoteFolder)
    return PutCommits(root, on_phase)
