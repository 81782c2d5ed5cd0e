"""Work of rank 0 after each published save: it copies the tokenizer, and removes old checkpoints.

The saver's thread does it, and a save counts as in flight until it is done. `checkpoint/retention.py` decides which
checkpoints are old.
"""

from collections.abc import Callable, Collection

from llmfoundry_lite.checkpoint import retention
from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.paths import put_tokenizer
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.tokenizer import load_tokenizer
from llmfoundry_lite.data.tokenizer_files import TOKENIZER_FILE
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

    def finish(self, lease: Lease, place: CheckpointStore) -> None:
        """Do what follows a save that is published in `place`. Raises CheckpointError if another launch saves now."""
        self.copy_tokenizer(place.root.url)
        if place is self.store:
            self.remove_old(lease)
        elif self.config.save_num_checkpoints_to_keep > 0:
            self._remove_old_in(place, lease, [])  # the first place does not answer, so nothing there counts

    def copy_tokenizer(self, place_url: str) -> None:
        """Copy the tokenizer beside the checkpoints, so that they can be evaluated or exported on another machine.

        It is tried after each save until it has succeeded once for that place. Does nothing if the tokenizer is not on
        this machine. A failure is printed, and the next save tries again.
        """
        if place_url in self._urls_with_tokenizer or not self.has_tokenizer:
            return
        try:
            put_tokenizer(place_url, load_tokenizer(self.config.tokenizer.name).files(), last=TOKENIZER_FILE)
            self._urls_with_tokenizer.add(place_url)
        except (OSError, UserError) as error:
            self.print_line(f"the tokenizer was not copied beside the checkpoints: {error}")

    def remove_old(self, lease: Lease) -> None:
        """Remove checkpoints that `save_num_checkpoints_to_keep` does not keep. It may be called from any thread.

        The checkpoints in `save_folder` and `save_fallback` count together. A failure is printed. Raises
        CheckpointError only if another launch has taken the lease in `save_folder`.
        """
        if self.config.save_num_checkpoints_to_keep < 0:
            return
        second = self.store.second
        if second is None:
            self._remove_old_in(self.store, lease, [])
            return
        try:
            in_second = second.candidates()
        except CheckpointError as error:
            # While one place is away, the other keeps as many as both would keep together.
            self.print_line(f"old checkpoints in save_fallback were not removed: {error}")
            self._remove_old_in(self.store, lease, [])
            return
        self._remove_old_in(self.store, lease, in_second)
        try:
            self._remove_old_in(second, lease, self.store.candidates())
        except CheckpointError as error:
            # The lease in save_folder decides who may write. It has just been checked, unless that place is away.
            self.print_line(f"old checkpoints in save_fallback were not removed: {error}")

    def _remove_old_in(self, place: CheckpointStore, lease: Lease, elsewhere: list[Candidate]) -> None:
        """Remove old checkpoints from one place, where `elsewhere` are those of the other that count as well."""
        try:
            retention.prune(
                place,
                lease,
                keep_newest=self.config.save_num_checkpoints_to_keep,
                keep_every_batches=self.config.save_keep_every_batches,
                keep_names=self.in_use,
                elsewhere=elsewhere,
                verify=check_present,
            )
        except CheckpointError as error:
            if not error.is_transient:
                place.check(lease)
            self.print_line(f"old checkpoints were not removed: {error}")
