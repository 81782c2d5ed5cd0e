"""Retention: which checkpoints of a run are old, and their removal. No torch.

`plan_removal` decides without removing anything, `list_files` says what that would free, and `carry_out_removal`
removes it. `prune` plans and removes. Parts of the run's log that no checkpoint needs any more are removed, too.

`store` lists the checkpoints, and `commit` makes a single one disappear whole.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from llmfoundry_lite.checkpoint.commit import LOG, SAVE_ID, Checkpoint, batch_of_set_aside
from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.store import (
    Candidate,
    CheckpointStore,
    names_of_log,
    os_errors_as_checkpoint_errors,
)
from llmfoundry_lite.errors import CheckpointError


@dataclass(slots=True, eq=False)
class Removal:
    """Checkpoints and files that retention removes from a run's folder, as `plan_removal` has decided.

    It is empty if nothing may be removed.
    """

    old: list[Candidate] = field(default_factory=list)
    """Checkpoints to remove, the oldest first."""
    set_aside_names: list[str] = field(default_factory=list)
    """Names of saves to remove that were set aside as damaged."""
    kept: list[Candidate] = field(default_factory=list)
    """All other checkpoints, newest first, also those that cannot be read."""
    newest: Candidate | None = None
    """The newest checkpoint that can be read. None if nothing may be removed."""

    @property
    def names(self) -> list[str]:
        """Names of all saves to remove."""
        return [*(candidate.name for candidate in self.old), *self.set_aside_names]


def prune(
    store: CheckpointStore,
    lease: Lease | None,
    *,
    keep_newest: int,
    keep_every_batches: int | None = None,
    keep_names: Collection[str] = (),
    elsewhere: Sequence[Candidate] = (),
    verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
    on_unsound: Callable[[str, CheckpointError], None] = lambda name, error: None,
    dry_run: bool = False,
) -> list[str]:
    """Remove old checkpoints, the rest of interrupted removals, and parts of the log that no checkpoint needs.

    lease: the run's lease if the caller is its writer. None: a user's command, which may run beside a writer.
    dry_run: only find out what would be removed.

    The other arguments are those of `plan_removal`. Returns the names of the removed checkpoints, the oldest first.
    Raises CheckpointError if `lease` is no longer the highest, or if something cannot be removed.
    """
    if lease is not None:
        store.check(lease)
    removal = plan_removal(
        store,
        keep_newest=keep_newest,
        keep_every_batches=keep_every_batches,
        keep_names=keep_names,
        elsewhere=elsewhere,
        verify=verify,
        on_unsound=on_unsound,
    )
    if not dry_run:
        carry_out_removal(store, removal, has_lease=lease is not None)
    return removal.names


def plan_removal(
    store: CheckpointStore,
    *,
    keep_newest: int,
    keep_every_batches: int | None = None,
    keep_names: Collection[str] = (),
    removes_set_aside: bool = False,
    elsewhere: Sequence[Candidate] = (),
    verify: Callable[[Checkpoint], None] = lambda checkpoint: None,
    on_unsound: Callable[[str, CheckpointError], None] = lambda name, error: None,
) -> Removal:
    """Decide which checkpoints are old, without removing anything.

    keep_newest: number of newest checkpoints that stay, at least one.
    keep_every_batches: checkpoints whose batch is a multiple of it stay.
    keep_names: names of further checkpoints that stay.
    removes_set_aside: remove all saves that were set aside as damaged. Otherwise one is removed once all
        checkpoints that stay as the newest are of later batches.
    elsewhere: the run's checkpoints in its other place. They count among the newest, and nothing of them is
        removed.
    verify: raises CheckpointError for a checkpoint that a run could not carry on from. It is called only if there
        is something to remove, for the newest checkpoint first, until one passes. That one stays, too. If none
        passes, nothing is removed.
    on_unsound: called with the name and the error of each that does not pass.

    Checkpoints whose manifest cannot be read stay for a person. Drafts stay until the next `acquire`. Raises
    CheckpointError if the folder cannot be listed.
    """
    # Divide the readable checkpoints into the newest, those that stay for another reason, and old ones.
    candidates = store.candidates()
    readable = [candidate for candidate in candidates if candidate.head is not None]
    if not readable:
        return Removal()
    in_both_places = [*readable, *(candidate for candidate in elsewhere if candidate.head is not None)]
    in_both_places.sort(key=lambda candidate: candidate.recency, reverse=True)
    newest = _take_newest(in_both_places, max(keep_newest, 1))
    old = []
    for candidate in readable:
        is_kept_by_batch = keep_every_batches and candidate.batch % keep_every_batches == 0
        is_kept = candidate in newest or candidate.name in keep_names or is_kept_by_batch
        if not is_kept:
            old.append(candidate)

    # Old ones may go only if a checkpoint that stays is known to be intact.
    set_aside_names = store.set_aside_saves()
    removal = Removal(kept=candidates, newest=readable[0])
    if old or set_aside_names:
        intact = _first_that_passes(verify, in_both_places, on_unsound)
        if intact is None:
            return Removal()
        removal.old = [candidate for candidate in reversed(old) if candidate is not intact]
        removal.kept = [candidate for candidate in candidates if candidate not in removal.old]
        first_kept_batch = min(candidate.batch for candidate in (*newest, intact))
        for name in set_aside_names:
            if removes_set_aside or batch_of_set_aside(name) < first_kept_batch:
                removal.set_aside_names.append(name)
    return removal


def carry_out_removal(store: CheckpointStore, removal: Removal, *, has_lease: bool = False) -> None:
    """Remove what `plan_removal` has decided on, and what earlier removals have left behind when they were killed.

    Each checkpoint is compared with its save_id once more, and stays if another save has its name by now. Parts of
    the log go last, when no checkpoint refers to them any more. `has_lease`: the caller is the run's writer. Raises
    CheckpointError if something cannot be removed.
    """
    if removal.newest is None:
        return
    _remove_saves(store, removal.old, removal.set_aside_names)
    with os_errors_as_checkpoint_errors(f"{store.root.url}: what earlier removals left cannot be removed"):
        store.commits.finish_removals(has_lease=has_lease, newest=removal.newest.recency)
    with os_errors_as_checkpoint_errors(f"{store.root.url}/{LOG}: cannot be cleared"):
        for name in _find_unused_log_now(store, removal):
            store.root.child(LOG).remove(name)


def list_files(store: CheckpointStore, removal: Removal) -> dict[str, int]:
    """Return the path in this folder, and the bytes, of each file that `carry_out_removal` would remove. Raises
    CheckpointError if the folder cannot be listed."""
    if removal.newest is None:
        return {}
    with os_errors_as_checkpoint_errors(f"{store.root.url}: cannot be listed"):
        leftovers = store.commits.leftovers(newest=removal.newest.recency)
        files: dict[str, int] = {}
        for name in (*removal.names, *leftovers):
            for path, num_bytes in store.root.child(name).tree_sizes().items():
                files[f"{name}/{path}"] = num_bytes
        log_sizes = store.root.child(LOG).sizes()
        for name in _find_unused_log(store, removal):
            files[f"{LOG}/{name}"] = log_sizes.get(name, 0)
    return files


def _remove_saves(store: CheckpointStore, candidates: Sequence[Candidate], set_aside_names: Sequence[str]) -> None:
    """Remove checkpoints whose manifest can be read, and saves that were set aside as damaged, by name. Raises
    CheckpointError if one cannot be removed."""
    for candidate in candidates:
        assert candidate.head is not None
        store.remove(candidate.name, candidate.head.save_id)
    for name in set_aside_names:
        with os_errors_as_checkpoint_errors(f"{store.root.url}/{name}: cannot be removed"):
            store.root.child(name).remove_all()


def _find_unused_log(store: CheckpointStore, removal: Removal) -> list[str]:
    """Return the names of the parts of the run's log that no checkpoint refers to once `removal` is carried out.

    Returns none if a checkpoint that stays cannot be read, because it may refer to any part. Parts of saves after the
    newest checkpoint are left out, because their manifests may be about to be published.

    Remembers in `CheckpointStore.log_names` which parts a save refers to, so that its manifest is read only once.
    Raises OSError.
    """
    assert removal.newest is not None
    part_names = store.root.child(LOG).names()
    if not part_names:
        return []

    # Find the parts that are used.
    used_names: set[str] = set()
    for candidate in removal.kept:
        if candidate.head is None:
            return []  # unreadable, so it is not known what it refers to
        save_id = candidate.head.save_id
        if save_id not in store.log_names:
            if candidate.checkpoint is None:
                return []
            store.log_names[save_id] = names_of_log(candidate.checkpoint.manifest)
        used_names |= store.log_names[save_id]

    # A part is named by the save that wrote it.
    unused_names = []
    for name in part_names:
        save_id_match = SAVE_ID.search(name)
        if save_id_match is None or name in used_names:
            continue
        epoch_and_batch = int(save_id_match[1]), int(save_id_match[2])
        if epoch_and_batch <= removal.newest.recency:
            unused_names.append(name)
    return unused_names


def _find_unused_log_now(store: CheckpointStore, removal: Removal) -> list[str]:
    """Return the names of the parts of the run's log that no checkpoint refers to, or is about to refer to.

    A copy of an older save may have been published since the plan, by another thread of the writer or by a user's
    command. It refers to a part of the log, too. Raises OSError, and CheckpointError if the folder cannot be listed.
    """
    unused_names = _find_unused_log(store, removal)
    if not unused_names:
        return []

    # A copy writes its part of the log as long as it is a draft. Drafts are looked up before checkpoints are listed, so
    # that a copy which is published meanwhile is seen as one or the other.
    names_to_remove = set(unused_names)
    for name in unused_names:
        save_id_match = SAVE_ID.search(name)
        if save_id_match is not None and store.commits.has_copy_in_progress(save_id_match[0]):
            names_to_remove.remove(name)
    listed_again = replace(removal, kept=store.candidates())
    return [name for name in _find_unused_log(store, listed_again) if name in names_to_remove]


def _take_newest(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the first `count` saves of some candidates, which are sorted, newest first. Copies of a save count as
    one."""
    newest: list[Candidate] = []
    save_ids: set[str] = set()
    for candidate in candidates:
        assert candidate.head is not None
        save_ids.add(candidate.head.save_id)
        if len(save_ids) > count:
            break
        newest.append(candidate)
    return newest


def _first_that_passes(
    verify: Callable[[Checkpoint], None],
    candidates: Sequence[Candidate],
    on_unsound: Callable[[str, CheckpointError], None],
) -> Candidate | None:
    """Return the first of some candidates that can be read and passes `verify`; None if there is none.

    `on_unsound` is called with the name and the error of each candidate before it.
    """
    for candidate in candidates:
        try:
            verify(candidate.open())
        except CheckpointError as error:
            on_unsound(candidate.name, error)
        else:
            return candidate
    return None
