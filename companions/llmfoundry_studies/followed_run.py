"""One run that is followed: which of its checkpoints are still to be evaluated, and whether its training has ended.

A run is known by its checkpoints, by the lease that the launch which trains it renews, and on this machine by its
status.json. A look lists the folder of checkpoints and reads the lease. Manifests are only read when that has changed,
so that a look at a bucket is a handful of requests. No torch.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.lease import WATCH_SECONDS, Holder, is_alive_here
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import INSIDE_A_RUN
from llmfoundry_lite.checkpoint.start import has_reached, training_done_at
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore, condition_of, is_checkpoint, refuse_newer
from llmfoundry_lite.config.spans import TIME_UNITS, Duration
from llmfoundry_lite.errors import CheckpointError, ConfigError, DamagedCheckpointError, NewerFormatError, mask_urls
from llmfoundry_lite.ranks.identity import is_alive
from llmfoundry_lite.ranks.status import read_status
from llmfoundry_lite.report.reading import explain_unopened_folder, find_checkpoint_folder, read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointToEvaluate:
    """A checkpoint whose turn it is."""

    model: str
    """Its name in the results: `base-ba200`."""
    url: str
    save_id: str


class FollowedRun:
    """Knowledge of a run as of the last `look`."""

    def __init__(self, name: str, source: str, patience_seconds: float):
        """Describe a run before anything is read of it.

        name: the run's name in the results.
        source: the run folder, or the path or URL of its checkpoints. It need not exist yet.
        patience_seconds: time without a sign of a launch after which a run that is not done counts as ended.
        """
        self.name = name
        self.source = source
        self.patience_seconds = patience_seconds
        self._store: CheckpointStore | None = None
        """Its checkpoints. None until there is one."""
        self._listing: Any = None
        """Names of checkpoints and the lease's number at the last look. None: read the manifests at the next one."""
        self._candidates: list[Candidate] = []
        """The checkpoints, newest first."""
        self._handled: set[str] = set()
        """Ids of saves that were evaluated or passed over."""
        self._waiting: dict[str, str] = {}
        """Id of a save that was still to be evaluated at the last listing -> its URL."""
        self._unsound: set[str] = set()
        """Names of unreadable checkpoints that were named already."""
        self._notes: list[str] = []
        self._status: Mapping[str, Any] | None = None
        """Content of status.json. None if there is none on this machine."""
        self._holder: Holder | None = None
        """Launch that holds the run's lease."""
        self._read_error = ""
        """Why the last look could not read the checkpoints."""
        self._activity = ""
        """Text that changes with every sign of a launch."""
        self._activity_changed_at = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ look

    def look(self) -> list[str]:
        """Look at the run, and return lines for the user about what has happened to its checkpoints.

        Raises ConfigError for a source that is no run, and CheckpointError for a checkpoint of a newer release. If the
        folder cannot be read, looks raise CheckpointError until there is a checkpoint. After that, they note the error,
        and the next look tries again.
        """
        self._status = self._read_status()  # first: a run that is done has published its last checkpoint
        self._read_error = ""
        try:
            self._read_checkpoints()
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if not self._candidates:
                raise
            self._read_error = str(error)
        self._measure_activity()
        return self.take_notes()

    def _read_checkpoints(self) -> None:
        """Find the checkpoints if that has not been done, and list them. Raises ConfigError or CheckpointError."""
        try:
            if self._store is None:
                self._store = self._find_store()
            if self._store is not None:
                self._list(self._store)
        except OSError as error:
            raise CheckpointError(f"{self.source}: cannot be read: {error.strerror or error}") from error

    def take_notes(self) -> list[str]:
        """Return the lines for the user that have not been returned yet."""
        notes = self._notes
        self._notes = []
        return notes

    def _read_status(self) -> Mapping[str, Any] | None:
        """Read the status.json of a run folder on this machine; None if there is none."""
        if "://" in self.source:
            return None
        path = Path(self.source)
        folder = path.parent if path.name == INSIDE_A_RUN else path
        return read_status(folder)

    def _find_store(self) -> CheckpointStore | None:
        """Return the run's checkpoints, or None if there are none yet.

        Raises ConfigError if the source is a model of another kind, or if the run saves its checkpoints somewhere else
        that is not opened without asking.
        """
        if "://" not in self.source and Path(self.source).is_file():
            raise ConfigError(
                f"models.{self.name}: {self.source} is a file, and follow=true evaluates the checkpoints of runs; "
                "expected a run folder, or the folder or URL of its checkpoints"
            )
        opened = open_folder(self.source)
        is_exported = opened.path_here is not None and (opened.path_here / "config.json").is_file()
        if is_exported or is_checkpoint(self.source):
            raise ConfigError(
                f"models.{self.name}: {self.source} is not a run, and follow=true evaluates the checkpoints of runs; "
                "evaluate it by a command of its own, in the same suite"
            )
        for folder in (opened, opened.child(INSIDE_A_RUN)):
            store = CheckpointStore(folder.url)
            if store.commits.names():
                return store

        # A run folder on this machine says where its checkpoints go.
        if opened.path_here is None or not (opened.path_here / "config.yaml").is_file():
            return None
        config = read_config(opened)
        save_folder = find_checkpoint_folder(opened, config, allowed_protocols=())
        if save_folder is not None:
            store = CheckpointStore(save_folder)
            return store if store.commits.names() else None
        if "://" in str((config or {}).get("save_folder")):
            raise ConfigError(f"models.{self.name}: {self.source}: {mask_urls(explain_unopened_folder(config))}")
        return None

    def _list(self, store: CheckpointStore) -> None:
        """List the checkpoints, if their names or the lease have changed, and update what is to be evaluated.

        A save of a batch that is there already comes from a new launch, which has another lease.
        """
        names = sorted(store.commits.names())
        self._holder = store.leases.current_holder()
        epoch = 0 if self._holder is None else self._holder.epoch
        listing = (names, epoch)
        if listing == self._listing:
            return
        self._candidates = store.candidates()
        refuse_newer(self._candidates)

        # A save that is being written or removed, or that cannot be read now, may be there at the next look.
        num_final = sum(candidate.head is not None or _is_damaged(candidate) for candidate in self._candidates)
        self._listing = listing if num_final == len(names) else None
        self._note_unsound()
        self._note_removed()

    def _note_unsound(self) -> None:
        """Note each checkpoint whose manifest cannot be read, once."""
        for candidate in self._candidates:
            if candidate.head is None and candidate.name not in self._unsound:
                self._unsound.add(candidate.name)
                self._notes.append(
                    f"models.{self.name}-{candidate.name}: passed over {condition_of(candidate.error)} checkpoint: "
                    f"{candidate.error}"
                )

    def _note_removed(self) -> None:
        """Note the checkpoints that were seen before and removed before their turn, and update those that wait."""
        present = {candidate.head.save_id: candidate for candidate in self._candidates if candidate.head is not None}
        for save_id, url in self._waiting.items():
            if save_id not in present and save_id not in self._handled:
                self._handled.add(save_id)
                name = url.rpartition("/")[2]
                self._notes.append(f"models.{self.name}-{name}: passed over {url}, which was removed before its turn")
        self._waiting = {
            save_id: candidate.folder.url for save_id, candidate in present.items() if save_id not in self._handled
        }

    def _measure_activity(self) -> None:
        """Note the time if there is a sign of a launch since the last look: a save, a renewed lease, or a status."""
        activity = f"{self._status} {[candidate.name for candidate in self._candidates]}"
        if self._holder is not None:
            activity += f" {self._holder.activity_id} {self._holder.is_released}"
        if activity != self._activity:
            self._activity = activity
            self._activity_changed_at = time.monotonic()

    # --------------------------------------------------------------------------------------------- what is next

    def next_checkpoint(self) -> CheckpointToEvaluate | None:
        """Return the earliest checkpoint that is still to be evaluated, or None if there is none now.

        It counts as handled from here on.
        """
        for candidate in sorted(self._candidates, key=lambda candidate: candidate.batch):
            if candidate.head is None or candidate.head.save_id in self._handled:
                continue
            save_id = candidate.head.save_id
            self._handled.add(save_id)
            model = f"{self.name}-ba{candidate.batch}"
            return CheckpointToEvaluate(model=model, url=candidate.folder.url, save_id=save_id)
        return None

    # ------------------------------------------------------------------------------------------- has it ended?

    @property
    def idle_seconds(self) -> float:
        """For how long the looks have found no sign of a launch."""
        return time.monotonic() - self._activity_changed_at

    @property
    def is_alive_here(self) -> bool | None:
        """Whether the launch that trains the run is a process of this machine that is alive. None if it is unknown.

        It is unknown for a launch on another machine, which may share the run folder.
        """
        if self._status is not None and self._status["status"] == "running":
            is_running = is_alive(self._status["process"])
            if is_running is not None:
                return is_running
        if self._holder is None or self._holder.is_released:
            return None
        return is_alive_here(self._holder.owner)

    @property
    def is_trained(self) -> bool:
        """Whether a launch trains the run now, as far as that is known."""
        if self.is_alive_here is not None:
            return self.is_alive_here
        has_holder = self._holder is not None and not self._holder.is_released
        return has_holder and self.idle_seconds < WATCH_SECONDS

    @property
    def is_done(self) -> bool:
        """Whether the training has come to its end."""
        if self._status is not None and self._status["status"] == "done":
            return True
        newest = self._newest()
        if newest is None or self.is_trained:  # a launch may train it beyond the end that was planned before
            return False
        max_duration = max_duration_of(newest)
        return max_duration is not None and has_reached(max_duration, training_done_at(newest))

    @property
    def has_ended(self) -> bool:
        """Whether no more checkpoints are expected: the training is done, or it shows no sign of a launch."""
        has_lost_patience = self.idle_seconds >= self.patience_seconds and not self.is_alive_here
        return self.is_done or has_lost_patience

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose manifest can be read; None if there is none."""
        for candidate in self._candidates:
            if candidate.head is not None and candidate.checkpoint is not None:
                return candidate.checkpoint
        return None

    @property
    def failure(self) -> str:
        """Why the run ended before its training was done. Empty if it did not, or if it was told to stop there."""
        is_stopped = self._status is not None and self._status["status"] == "stopped"
        if self.is_done or (is_stopped and self._candidates):
            return ""
        patience = f"waited {self.patience_seconds:g} s (follow_patience)"
        newest = self._newest()
        if newest is None:
            return f"models.{self.name}: {self.source} {self._describe_absence()}; {patience}"
        return (
            f"models.{self.name}: {self.source} is at {newest.name}, which is not the end of its training"
            f"{self._describe_length(newest)}, and {self._describe_sign()}; {patience}. The same command carries on "
            "when it trains again"
        )

    def describe_end(self) -> str:
        """Return the line about a run that has ended."""
        newest = self._newest()
        batch = "no checkpoint" if newest is None else f"the last checkpoint is {newest.name}"
        ending = "its training is done" if self.is_done else self._describe_sign()
        return f"{self.name}: {batch}: {ending}"

    def describe_wait(self) -> tuple[str, str]:
        """Return what is waited for, and how long without a sign of a launch; the latter is empty while it trains."""
        newest = self._newest()
        if newest is None:
            reason = f"{self.name}: waiting for its first checkpoint: {self.source} {self._describe_absence()}"
        else:
            reason = f"{self.name}: waiting for a checkpoint after {newest.name}: {self._describe_sign()}"
        if self.is_trained:
            return reason, ""
        return reason, f", for {self.idle_seconds:.0f} s of {self.patience_seconds:g} s (follow_patience)"

    def _describe_absence(self) -> str:
        """Say that a run has no checkpoint that can be read."""
        is_missing = "://" not in self.source and not Path(self.source).exists()
        return "does not exist" if is_missing else "holds no checkpoint that can be read"

    def _describe_sign(self) -> str:
        """Say what is known about the launch that trains the run, or that trained it last."""
        if self._read_error:
            return self._read_error
        if self.is_trained:
            return "it trains"
        if self._status is not None and self._status["status"] != "running":
            status, batch, reason = self._status["status"], self._status["batch"], self._status["reason"]
            text = f"{status} at batch {batch}"
            if not reason:
                return text
            # A reason such as "preempted by SIGTERM at batch 12, saved as ba12" has both already.
            says_both = reason.startswith(status) and f"at batch {batch}" in reason
            return reason if says_both else f"{text} ({reason})"
        if self._holder is None:
            return "no launch holds it"
        if self._holder.is_released:
            return f"{self._holder.describe()} has released it"
        return f"{self._holder.describe()} has not renewed its lease"

    def _describe_length(self, newest: Checkpoint) -> str:
        """Return `, 1000ba` with the planned length of the run; empty if it is not known."""
        max_duration = max_duration_of(newest)
        return "" if max_duration is None else f", {max_duration.written}"


def max_duration_of(checkpoint: Checkpoint) -> Duration | None:
    """Return the planned length of a run by the configuration that a checkpoint records. None if it has none."""
    with contextlib.suppress(ValueError, LookupError, TypeError):  # anybody may have written it
        return Duration.parse(checkpoint.manifest.config["max_duration"], TIME_UNITS)
    return None


def _is_damaged(candidate: Candidate) -> bool:
    """Return whether a checkpoint whose manifest could not be read is damaged, which does not pass."""
    return isinstance(candidate.error, DamagedCheckpointError)
