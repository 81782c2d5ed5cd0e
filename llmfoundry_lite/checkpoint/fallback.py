"""Copies saves from a run's second place, `save_fallback`, to its first, `save_folder`, when that is back. No torch.

While saves to the first place fail, they go to the second (`save`). Both places have the same format, and the lease of
the first decides who may write to either. Its claim is copied to the second place, so that a launch that was replaced
is refused there, too. A save keeps the lease epoch of the launch that made it, wherever it lies, so that (lease epoch,
batch) orders the saves of both places.

`copy_checkpoint` copies one save. `CopyBack` copies a launch's saves in a background thread of rank 0.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from llmfoundry_lite.checkpoint.commit import LOG, Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.manifest import FileRecord, LogPart
from llmfoundry_lite.checkpoint.open_folder import unreadable_file_error
from llmfoundry_lite.checkpoint.paths import TOKENIZER, TOKENIZER_FILE
from llmfoundry_lite.checkpoint.run_log import read_log, write_log
from llmfoundry_lite.checkpoint.shards import TRANSFER_BYTES, verify_file
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore, condition_of
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnsoundCheckpointError,
    printable,
)

AGAIN_SECONDS = 60.0
"""Time after a failed copy until the next attempt."""
STALLED_SECONDS = 60.0
"""Time without progress after which a launch that ends does not wait for a copy."""
STOP_SECONDS = 5.0
"""The longest time that `CopyBack.stop` waits for its thread."""
MAX_TOKENIZER_FILE_BYTES = 1 << 30
"""Largest file of a tokenizer that is copied."""


# ------------------------------------------------------------------------------------------------------ one checkpoint


def copy_checkpoint(
    checkpoint: Checkpoint,
    target: CheckpointStore,
    lease: Lease | None = None,
    *,
    is_newest: bool = True,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Checkpoint:
    """Copy a checkpoint, its log and its tokenizer to another folder of the same run's checkpoints.

    lease: the run's lease, or None if a user copies.
    is_newest: whether the checkpoint is newer than all others in `target`.
    on_bytes: called with the number of bytes after each part of a file that was copied or verified, the latter in any
        thread. It may raise to end the copy.

    Every file is read back and verified by the manifest's hashes. The copy appears whole or not at all, as any save
    does, with the manifest last. It has the save_id and the lease epoch of the original. Returns the copy. Raises
    UnsoundCheckpointError if the original is damaged or cannot be read, and CheckpointError if `target` cannot be
    written.
    """
    manifest = checkpoint.manifest
    folder, prefix = target.commits.draft(manifest.save_id)
    if lease is not None:
        target.check(lease)
    try:
        folder.remove_all()  # what an interrupted copy has left
        folder.make()
        target.commits.begin_copy(manifest.save_id)
        files = []
        for file in manifest.files:
            _, _, name = file.name.rpartition("/")
            _copy_file(checkpoint.folder, file, folder, name, on_bytes)
            _verify_copy(checkpoint.folder, file, folder, name, on_bytes)
            files.append(replace(file, name=prefix + name))
        target.on_phase("files copied")

        log = read_log(checkpoint)
        log_parts = _write_whole_log(target, manifest.save_id, log.content)
        _copy_tokenizer(checkpoint.folder.parent(), target.root)
        copy = target.publish(replace(manifest, files=tuple(files), log=log_parts), lease, is_newest=is_newest)

        target.commits.end_copy(manifest.save_id)

        # Retention may have removed the part before the manifest referred to it.
        part_names = target.root.child(LOG).names()
        if any(part.name.removeprefix(f"{LOG}/") not in part_names for part in log_parts):
            _write_whole_log(target, manifest.save_id, log.content)
        return copy
    except OSError as error:
        _abandon_copy(target, manifest.save_id, lease)
        raise CheckpointError(f"{folder.url}: not copied: {error.strerror or error}") from error
    except CheckpointError:
        _abandon_copy(target, manifest.save_id, lease)
        raise


def _abandon_copy(target: CheckpointStore, save_id: str, lease: Lease | None) -> None:
    """Remove the draft of a failed copy, unless another launch has taken over.

    Other drafts have a name that no other launch uses. That of a copy has the original's, so the other launch may be
    copying the same save there.
    """
    if lease is not None:
        try:
            target.check(lease)
        except CheckpointError:
            return
    target.abandon(save_id)


def _write_whole_log(target: CheckpointStore, save_id: str, content: bytes | None) -> tuple[LogPart, ...]:
    """Write the log of a copied save as one part, and return the parts for its manifest. Raises OSError."""
    return write_log(target, save_id, content, ()) if content else ()


def _copy_file(
    source_folder: Folder, file: FileRecord, target: Folder, name: str, on_bytes: Callable[[int], None]
) -> None:
    """Copy a shard file into the folder `target`, under another name, a few MiB at a time.

    Raises UnsoundCheckpointError if the file is absent, cannot be read or has another size than recorded, and OSError
    if the copy cannot be written.
    """
    try:
        source = source_folder.source(file.name)
    except OSError as error:
        raise unreadable_file_error(source_folder, file.name, error) from error
    buffer = memoryview(bytearray(min(TRANSFER_BYTES, file.num_bytes)))
    sink = target.sink(name, file.num_bytes)
    try:
        for offset in range(0, file.num_bytes, TRANSFER_BYTES):
            part = buffer[: min(TRANSFER_BYTES, file.num_bytes - offset)]
            try:
                source.read_into(offset, [part])
            except EOFError as error:
                raise DamagedCheckpointError(f"{source_folder.url}/{file.name}: {error}", file.name) from None
            except OSError as error:
                raise unreadable_file_error(source_folder, file.name, error) from error
            sink.write_at(offset, [part])
            on_bytes(len(part))
    except BaseException:
        sink.abandon()
        raise
    finally:
        source.close()
    sink.close()


def _verify_copy(
    source_folder: Folder, file: FileRecord, target: Folder, name: str, on_bytes: Callable[[int], None]
) -> None:
    """Read a copied file back, and compare all its blocks with the manifest's hashes.

    Raises UnsoundCheckpointError if the original is at fault, and CheckpointError if only the copy is.
    """
    try:
        verify_file(target, replace(file, name=name), on_bytes)
    except UnsoundCheckpointError as error:
        verify_file(source_folder, file, on_bytes)
        raise CheckpointError(f"{target.url}/{name}: the copy is not what was written: {error}") from error


def _copy_tokenizer(source_root: Folder, target_root: Folder) -> None:
    """Copy the tokenizer beside the checkpoints of one place to another, unless it is there. Raises OSError."""
    source, target = source_root.child(TOKENIZER), target_root.child(TOKENIZER)
    missing_names = set(source.names()) - set(target.names())
    if missing_names:
        target.make()
    # TOKENIZER_FILE comes last, because its presence says that all files are there.
    for name in sorted(missing_names, key=lambda name: (name == TOKENIZER_FILE, name)):
        content = source.read(name, MAX_TOKENIZER_FILE_BYTES)
        if len(content) <= MAX_TOKENIZER_FILE_BYTES:
            target.put(name, content)


# ------------------------------------------------------------------------------------------------- a launch's saves


class CopyBack:
    """Copies saves from a run's second place to its first, in a background thread of rank 0.

        copy_back = CopyBack(store, lease, answers=…, note=print)
        copy_back.wake()                the first place may be back: look at once what there is to copy
        copy_back.is_worth_waiting()    at the end of the run: whether a copy makes progress
        copy_back.stop()                begin no other copy

    A save is copied unless the first place held a save of a later launch when this launch began. Then another launch
    has replaced the one that made it, so it is left where it is. Once a save is complete in the first place, it is
    removed from the second. A save whose copy fails does not prevent that of an older one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        lease: Lease,
        *,
        answers: Callable[[], bool],
        note: Callable[[str], None],
        on_copied: Callable[[str], None] = lambda name: None,
        before_copies: Callable[[Sequence[Candidate]], None] = lambda in_first: None,
        after_copies: Callable[[], None] = lambda: None,
        in_use: Collection[str] = (),
    ):
        """Begin to look for saves to copy, in a background thread.

        store: the store of the first place, whose `second` is the other.
        lease: the run's lease.
        answers: returns whether the first place seems to answer, without asking it.
        note: called with a line for the user.
        on_copied: called with the name of each checkpoint that is in the first place by now.
        before_copies: called with the checkpoints of the first place before it is seen what there is to copy, for
            instance to remove old ones from the second.
        after_copies: called when at least one save was copied, for instance to remove old ones from the first.
        in_use: names of checkpoints that a process reads. They are not removed from the second place meanwhile.
        """
        assert store.second is not None
        self.store = store
        self.second = store.second
        self.lease = lease
        self.answers = answers
        self.note = note
        self.on_copied = on_copied
        self.before_copies = before_copies
        self.after_copies = after_copies
        self.in_use = in_use
        self._epoch_at_start: int | None = None
        """Highest lease epoch of a save in the first place when this launch began, 0 if there was none; None until it
        is known."""
        self._damaged: set[str] = set()
        """save_id of saves in the second place that turned out to be damaged."""
        self._printed_failure = ""
        """The line of the last failure, which is printed once; empty if the last attempt succeeded."""
        self._progress_seconds = time.monotonic()
        """Monotonic time at which a copy made progress, or at which there was last something to do."""
        self._is_idle = threading.Event()
        self._is_over = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copy-back", daemon=True)
        self.wake()
        self._thread.start()

    def wake(self) -> None:
        """Look at once what there is to copy, instead of after AGAIN_SECONDS. It may be called from any thread."""
        self._progress_seconds = time.monotonic()
        self._is_idle.clear()
        self._wake.set()

    def stop(self) -> None:
        """Begin no other copy, and leave one that runs at its next part. Waits a few seconds for that at most."""
        was_over = self._is_over.is_set()
        self._is_over.set()
        self._wake.set()
        if not was_over and threading.current_thread() is not self._thread:
            self._thread.join(STOP_SECONDS)

    def is_worth_waiting(self) -> bool:
        """Return whether this thread is at work and makes progress, or has just been woken."""
        has_stalled = time.monotonic() - self._progress_seconds > STALLED_SECONDS
        return not self._is_idle.is_set() and self.answers() and not has_stalled

    def _run(self) -> None:
        """Copy what there is to copy whenever the first place seems to be back. Runs in the background thread."""
        while not self._is_over.is_set():
            self._wake.wait(AGAIN_SECONDS)
            self._wake.clear()
            if self._is_over.is_set() or not self.answers():
                self._is_idle.set()
                continue
            try:
                self._copy_all()
                self._printed_failure = ""
            except (CheckpointError, OSError) as error:
                line = printable(f"not copied to {self.store.root.url} yet: {error}")
                if line != self._printed_failure and not self._is_over.is_set():
                    self.note(line)
                    self._printed_failure = line
            finally:
                if not self._wake.is_set():
                    self._is_idle.set()

    def _copy_all(self) -> None:
        """Copy the saves of the second place that the first lacks, the newest first, and then remove the originals.

        Raises CheckpointError if either place fails, or if another launch has taken the lease. If only some copies
        fail, the others are made before the first of these errors is raised.
        """
        self.store.check(self.lease)
        in_first = self.store.candidates()
        if self._epoch_at_start is None:
            self._epoch_at_start = self._find_epoch_at_start(in_first)
        self.before_copies(in_first)

        failures: list[CheckpointError | OSError] = []
        has_copied = False
        for candidate in self.second.candidates():
            if candidate.head is None or candidate.head.save_id in self._damaged:
                continue
            try:
                has_copied |= self._bring(candidate, in_first)
            except (CheckpointError, OSError) as error:
                if self._is_over.is_set() or not self.answers():
                    raise
                failures.append(error)
        if has_copied:
            self.after_copies()
        if failures:
            raise failures[0]

    def _find_epoch_at_start(self, in_first: Sequence[Candidate]) -> int:
        """Return the highest lease epoch of a save of an earlier launch in the first place; 0 if there is none."""
        epochs = [candidate.head.lease_epoch for candidate in in_first if candidate.head is not None]
        return max((epoch for epoch in epochs if epoch < self.lease.epoch), default=0)

    def _bring(self, candidate: Candidate, in_first: list[Candidate]) -> bool:
        """Copy a save to the first place, unless it is there, and remove it from the second. Return whether it copied.

        candidate: the save in the second place. It stays there if it is damaged, or of a launch that was replaced.
        in_first: the saves of the first place, to which the copy is added.

        Raises CheckpointError and OSError.
        """
        assert candidate.head is not None and self._epoch_at_start is not None
        save_id = candidate.head.save_id
        present = [other for other in in_first if other.head is not None and other.head.save_id == save_id]
        copy: Checkpoint | None = None
        if present:
            copy = present[0].open()
        elif candidate.head.lease_epoch >= self._epoch_at_start:
            copy = self._copy(candidate, in_first)
        if copy is None:
            return False

        check_present(copy)  # a copier of an earlier launch may have removed the draft meanwhile
        self.on_copied(candidate.name)
        if candidate.name not in self.in_use and not self._is_over.is_set():
            self.second.remove(candidate.name, save_id)
        return not present

    def _copy(self, candidate: Candidate, in_first: list[Candidate]) -> Checkpoint | None:
        """Copy a save of the second place to the first. Returns None, with a line for the user, if it is damaged.

        in_first: the saves of the first place, to which the copy is added.
        """
        assert candidate.head is not None
        is_newest = all(candidate.recency > other.recency for other in in_first if other.head is not None)
        try:
            checkpoint = candidate.open()
            copy = copy_checkpoint(
                checkpoint, self.store, self.lease, is_newest=is_newest, on_bytes=self._note_progress
            )
        except UnsoundCheckpointError as error:
            if not isinstance(error, DamagedCheckpointError | IncompleteCheckpointError):
                raise
            self._damaged.add(candidate.head.save_id)
            self.note(printable(f"{candidate.folder.url} is {condition_of(error)} and was not copied: {error}"))
            return None
        in_first.append(candidate)
        self.note(printable(f"copied {candidate.name} to {self.store.root.url}"))
        self.store.on_phase("copied")
        return copy

    def _note_progress(self, num_bytes: int) -> None:
        """Note that a copy makes progress. Raises CheckpointError if this launch ends."""
        self._progress_seconds = time.monotonic()
        if self._is_over.is_set():
            raise CheckpointError("the launch ends")
