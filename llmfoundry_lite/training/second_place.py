"""Messages of a launch about saves in its second place, `save_fallback`, and their copies to `save_folder`.

`checkpoint/save.py` decides where a save goes, and `checkpoint/fallback.py` copies. This module knows, on all ranks,
whether the newest save is in the second place, and why saves to the first fail.
"""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.commit import COMMITTED, batch_of
from llmfoundry_lite.checkpoint.fallback import CopyBack
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.start import Start
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.ranks.exchange import broadcast_json
from llmfoundry_lite.ranks.status import SAVED_IN, read_status
from llmfoundry_lite.training.after_save import AfterSave

IN_FALLBACK = "checkpoint/in_save_fallback"
"""Key in the record of a batch, 1 where a save was found to be published in `save_fallback`."""
POLL_SECONDS = 0.5
"""Time between two collectives of ranks that wait for a copy at the end of the run."""
NOT_RENEWED = "the lease there cannot be renewed"
"""Reason for which saves go to the second place before one has failed in the first."""


def describe_missing_save(config: TrainConfig, start: Start) -> str:
    """Return a line if the run folder says that a newer save is in a second place where this launch does not find it.

    That is so if the place is a disk of another machine. Returns an empty text if the newest save was found, or if the
    run folder does not know of such a save.
    """
    status = read_status(Path(config.run_folder)) or {}
    place = status.get(SAVED_IN)
    name = status.get("last_saved")
    if not isinstance(place, str) or not isinstance(name, str):
        return ""
    is_save = COMMITTED.fullmatch(name) is not None
    if not is_save or batch_of(name) <= start.training_done.get("ba", 0):
        return ""
    beginning = "at batch 1"
    if start.checkpoint_name:
        beginning = f"from {start.checkpoint_name}"
    elif start.url is not None:
        beginning = f"from load_path, {start.url}"
    return (
        f"warning: the last launch saved {name} in {place}, which is not found on this machine, so this one begins "
        f"{beginning}; `llmfoundry-lite checkpoint copy`, on a machine that has it, brings it to save_folder"
    )


class SecondPlace:
    """The second place for saves of one launch. A launch without one has an object that does nothing."""

    def __init__(self, store: CheckpointStore, print_line: Callable[[str], None]):
        """Prepare without any I/O. `print_line` prints a line for the user on rank 0, from any thread."""
        self.store = store
        self.url = "" if store.second is None else store.second.root.url
        """Path or URL of the second place; empty if there is none."""
        self.print_line = print_line
        self.holds_newest = False
        """The newest save is there, and not in the first place."""
        self.error = ""
        """Why saves to the first place fail; empty if they do not. On rank 0, it is also emptied by a copy."""
        self.first_fails = False
        """The last save that was published or has failed is not in the first place. The same on all ranks."""
        self.copy_back: CopyBack | None = None
        """Copies saves to the first place, on rank 0."""
        self._copied_names: set[str] = set()
        """Names of saves that are in the first place by now. The thread of `copy_back` adds to it."""

    @property
    def suffix(self) -> str:
        """Where the newest save is, for a message that names it: ` in /local/saves`; empty for the first place."""
        return f" in {self.url}" if self.holds_newest else ""

    def contains(self, url: str) -> bool:
        """Return whether a checkpoint is in the second place."""
        return bool(self.url) and url.startswith(f"{self.url}/")

    def describe(self) -> dict[str, Any]:
        """Return the fields of status.json that say where the newest save is."""
        return {SAVED_IN: self.url} if self.holds_newest else {}

    # ------------------------------------------------------------------------------------------------------- events

    def note_restored(self, url: str) -> None:
        """Note from which checkpoint this launch begins."""
        self.holds_newest = self.contains(url)

    def note_failure(self, reason: str) -> None:
        """Note that a save to the first place has failed."""
        if self.url:
            self.error = reason
            self.first_fails = True

    def note_published(self, name: str, *, is_in_second: bool) -> str:
        """Note that a save is published. Returns the line for the user. The same on all ranks."""
        self.holds_newest = is_in_second
        self.first_fails = is_in_second
        if not is_in_second:
            self.error = ""
            return f"saved {name}"
        self.error = self.error or NOT_RENEWED
        return f"saved {name} in {self.url}, because saves to {self.store.root.url} fail: {self.error}"

    # ------------------------------------------------------------------------------------------------------ copying

    def begin_copying(self, saver: Saver, after_save: AfterSave) -> None:
        """Begin to copy saves to the first place whenever that answers, on rank 0.

        `after_save` removes old checkpoints in both places, and knows which may not be removed.
        """
        lease = saver.lease
        if saver.second is None or lease is None:
            return
        self.copy_back = CopyBack(
            self.store,
            lease,
            answers=lambda: saver.first_answers,
            note=self.print_line,
            on_copied=self._copied_names.add,
            before_copies=lambda in_first: after_save.remove_old_in_second(lease, in_first),
            after_copies=lambda: after_save.remove_old(lease),
            in_use=after_save.in_use,
        )

    def note_copies(self, newest_batch: int) -> bool:
        """Note on rank 0 whether the save of `newest_batch` is in the first place by now. Returns whether it is news.

        Other ranks say nothing of where saves are.
        """
        if self.holds_newest and f"ba{newest_batch}" in self._copied_names:
            self.holds_newest = False
            self.error = ""
            return True
        return False

    def wait_for_copies(self, must_leave: Callable[[], bool]) -> None:
        """Wait at the end of the run as long as a copy makes progress, unless this launch must leave. Collective.

        Rank 0 copies and decides. The others must not wait for it in a collective of what follows.
        """
        if self.copy_back is not None:
            self.copy_back.wake()
        while broadcast_json(self._is_copying() and not must_leave()):
            time.sleep(POLL_SECONDS)

    def _is_copying(self) -> bool:
        """Return whether there is something to wait for: a copy that makes progress. False on ranks other than 0."""
        return self.copy_back is not None and self.copy_back.is_worth_waiting()

    def describe_end(self, name: str) -> str:
        """Return the line for a launch whose newest save, `name`, is in the second place when it ends."""
        command = shlex.join(["llmfoundry-lite", "checkpoint", "copy", self.url, self.store.root.url])
        reason = f", because saves to {self.store.root.url} fail: {self.error}" if self.error else ""
        return f"{name} is in {self.url}{reason}; the next launch on a machine that sees both copies it, or: {command}"

    def stop(self) -> None:
        """Copy nothing more, because the launch ends."""
        if self.copy_back is not None:
            self.copy_back.stop()
