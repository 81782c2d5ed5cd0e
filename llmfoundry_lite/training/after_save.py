"""Work of rank 0 after each published save: it copies the tokenizer, and removes old checkpoints.

The saver's thread does it, and a save counts as in flight until it is done, so that it asks no other place than that of
the save. `checkpoint/retention.py` decides which checkpoints are old.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence

from llmfoundry_lite.checkpoint import retention
from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.paths import put_tokenizer
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.tokenizer import load_configured_tokenizer
from llmfoundry_lite.errors import CheckpointError, UserError


class AfterSave:
    """The tokenizer beside a run's checkpoints, and the removal of those that are old. Only rank 0 uses it."""

    def __init__(
        self,
        config: TrainConfig,
        store: CheckpointStore,
        print_line: Callable[[str], None],
        *,
        in_use: Collection[str],
        has_tokenizer: bool,
    ):
        """Prepare without any I/O.

        store: the run's checkpoints, with those of its second place.
        print_line: prints a line for the user, from any thread.
        in_use: names of checkpoints that a process of this launch reads. They are not removed meanwhile.
        has_tokenizer: whether the run's tokenizer is on this machine.
        """
        self.config = config
        self.store = store
        self.print_line = print_line
        self.in_use = in_use
        self.has_tokenizer = has_tokenizer
        self._urls_with_tokenizer: set[str] = set()
        """Places that have the tokenizer beside the checkpoints."""
        self._printed_failure = ""
        """The line of the last failure in `save_fallback`, which is printed once; empty if there was none since."""

    def finish(self, lease: Lease, place: CheckpointStore) -> None:
        """Do what follows a save that is published in `place`. Raises CheckpointError if another launch saves now."""
        self.copy_tokenizer(place.root.url)
        self.remove_old(lease, place)

    def copy_tokenizer(self, place_url: str) -> None:
        """Copy the tokenizer beside the checkpoints, so that they can be evaluated or exported on another machine.

        It is tried after each save until it has succeeded once for that place. Does nothing if the tokenizer is not on
        this machine. A failure is printed, and the next save tries again.
        """
        if place_url in self._urls_with_tokenizer or not self.has_tokenizer:
            return
        try:
            put_tokenizer(place_url, load_configured_tokenizer(self.config.tokenizer).files())
            self._urls_with_tokenizer.add(place_url)
        except (OSError, UserError) as error:
            self.print_line(f"the tokenizer was not copied beside the checkpoints: {error}")

    def remove_old(self, lease: Lease, place: CheckpointStore | None = None) -> None:
        """Remove checkpoints of one place that `save_num_checkpoints_to_keep` does not keep, from any thread.

        place: the one of the two places; None: `save_folder`. The other is not looked at, because it may not answer,
            and because this one has to keep a checkpoint for a machine that does not see the other.

        A failure is printed. Raises CheckpointError only if another launch has taken the lease there.
        """
        if place is None:
            place = self.store
        try:
            self._prune(place, lease, [])
        except CheckpointError as error:
            if not error.is_transient:
                place.check(lease)
            self.print_line(f"old checkpoints were not removed: {error}")

    def remove_old_in_second(self, lease: Lease, in_first: Sequence[Candidate]) -> None:
        """Remove checkpoints in `save_fallback` that are not among the newest of both places.

        in_first: the checkpoints in `save_folder`.

        The thread that copies calls this, so that it copies none that would be removed at once. A failure is printed
        once, and nothing is raised: the lease in `save_folder` decides who may write.
        """
        assert self.store.second is not None
        line = ""
        try:
            self._prune(self.store.second, lease, in_first)
        except CheckpointError as error:
            line = f"old checkpoints in save_fallback were not removed: {error}"
        if line and line != self._printed_failure:
            self.print_line(line)
        self._printed_failure = line

    def remove_kept(self, lease: Lease, *, first_answers: bool) -> None:
        """Remove old checkpoints that were kept because a process read them, from both places, at the end of a launch.

        first_answers: whether `save_folder` seems to answer. If not, only `save_fallback` is looked at.

        A failure is printed. Raises CheckpointError only if another launch has taken the lease.
        """
        second = self.store.second
        if second is None:
            self.remove_old(lease)
        elif not first_answers:
            self.remove_old(lease, second)
        else:
            self.remove_old(lease)
            with contextlib.suppress(CheckpointError):  # `save_folder` cannot be listed, which is printed by now
                self.remove_old_in_second(lease, self.store.candidates())

    def _prune(self, place: CheckpointStore, lease: Lease, elsewhere: Sequence[Candidate]) -> None:
        """Remove old checkpoints from one place, where `elsewhere` are those of the other that count as well.

        Raises CheckpointError.
        """
        if self.config.save_num_checkpoints_to_keep < 0:
            return
        retention.prune(
            place,
            lease,
            keep_newest=self.config.save_num_checkpoints_to_keep,
            keep_every_batches=self.config.save_keep_every_batches,
            keep_names=self.in_use,
            elsewhere=elsewhere,
            verify=check_present,
        )
