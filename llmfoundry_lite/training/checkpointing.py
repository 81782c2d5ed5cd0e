"""Composer callback that restores a run from a checkpoint, and decides what happens between two batches.

`start.py` has chosen the checkpoint before the model was built. Tensors and the place in the data are checked once this
launch has the run's lease. `Checkpointing` restores the state at AFTER_LOAD: the model is sharded by then, but seeds
and data have not been used. After each batch, `batch_end` lets the ranks agree and evaluate, and `batch_checkpoint`
saves when `save_policy` decides so. `run_state` has the state besides tensors. `checkpoint/save.py` writes, and
`after_save.py` does what follows a save.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch.distributed as dist
from composer import core
from composer.core import Callback, Event, State
from composer.loggers import Logger

from llmfoundry_lite.checkpoint.manifest import Manifest, Segment
from llmfoundry_lite.checkpoint.run_log import FAILED_SAVES, SAVED, UNSAVED_BATCHES, Log, read_log
from llmfoundry_lite.checkpoint.save import Saved, Saver
from llmfoundry_lite.checkpoint.start import Start, find_microbatch, open_run_store
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.config.changes import Change, find_changes_to_record
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.errors import CheckpointError, UserError, printable
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.output import say
from llmfoundry_lite.retry import Budget
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.after_save import AfterSave
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.failed_saves import FailedSaves
from llmfoundry_lite.training.gradient_step import GradientStep
from llmfoundry_lite.training.in_context import InContext
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.run_state import (
    RunState,
    build_segment,
    chosen_options,
    with_references,
)
from llmfoundry_lite.training.save_metadata import collect_metadata, is_in_run_folder
from llmfoundry_lite.training.save_policy import SavePolicy
from llmfoundry_lite.training.save_texts import (
    describe_failed_saves,
    describe_newest_save,
    describe_preemption,
    describe_remaining,
    describe_saves,
    describe_unsaved,
)
from llmfoundry_lite.training.schedule import has_passed, is_evaluation_due
from llmfoundry_lite.training.second_place import IN_FALLBACK, SecondPlace
from llmfoundry_lite.training.start import describe_differences, describe_model_changes, lease_request, restore_tensors

RETRY_PAUSES_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses between attempts at the last save; the last pause repeats."""


@dataclass(eq=False)
class Checkpointing(Callback):
    """Restores what this launch starts from, and saves the run during training, at its end and before it leaves early.

    All ranks call each method together, unless it says otherwise.
    """

    config: TrainConfig
    model: LanguageModel
    gradient_step: GradientStep
    preemption: Preemption
    agreement: Agreement
    start: Start
    role: LaunchRole
    tasks: InContext | None = None
    """Tasks in context that are evaluated during training; None if there are none."""

    def __post_init__(self) -> None:
        """Prepare without any I/O, before the model is restored. Other methods change these attributes:

        `after_load` creates `saver` and restores the run; `begin` sets where this launch begins in the run; a save
        changes `begun_batch`, `published_batch`, `newest_url` and `failed_saves`; `batch_checkpoint` sets
        `was_preempted_by` and `was_stopped`, which `train` reads after the loop.
        """
        self.store = open_run_store(self.config)
        self.policy = SavePolicy(self.config, self.preemption, self.agreement)
        self.run_state = RunState(self.config, self.gradient_step)
        self.carries_on = self.start.is_run_folder or not self.config.load_weights_only
        """This launch continues the checkpoint's run. Otherwise it begins a new run with the checkpoint's weights."""
        self.saver: Saver

        # Where this launch is in the run.
        self.first_batch: int
        """The first batch that this launch trains."""
        self.started_at: core.Timestamp
        """The run's clock when this launch began to train."""
        self.segments: tuple[Segment, ...] = ()
        """Where earlier launches have run."""
        self.changes: list[Change] = []
        """Configuration keys whose values differ from the checkpoint's."""
        self.history: bytes | None = None
        """On rank 0: the log that the checkpoint holds."""
        self.wandb_run_id: str | None = None
        """Id of the run at wandb that this launch continues."""
        self.microbatch_of_run: int | None = None
        """Size of the run's microbatches, if exact sums require this launch to have the same; else None."""

        # How this launch ends.
        self.was_stopped = False
        """This launch ends before the run does, because `stop_after`, `stop_at` or a callback said so."""
        self.was_preempted_by = ""
        """Why this launch leaves early; empty if it does not."""

        # What is saved.
        self.begun_batch = -1
        """The newest batch whose save has begun; -1 if none has."""
        self.published_batch = -1
        """Batch of the newest checkpoint in the run's folder that all ranks know of; -1 if there is none."""
        self.durable_batch = -1
        """On rank 0: batch of the newest save, from the moment that it is published; -1 if there is none.
        `published_batch` follows at the end of a batch."""
        self.unlogged_digest: dict[str, Any] = {}
        """Metrics with the digest of a published save, for the next record that has no digest of its own."""
        self.waits_for_save = ""
        """The save in flight and its place while training waits long for it, such as `ba8 in s3://b`; else empty."""
        self.has_failed_save = False
        """The launch ends because a save has failed, so it tries no other save."""
        self.newest_url: str | None = None
        """The newest checkpoint that this launch has restored or saved."""
        self.second_place = SecondPlace(self.store, self.print_on_rank_0)
        """Whether the newest save is in `save_fallback`, and why."""
        self.failed_saves = FailedSaves(self.config.max_unsaved)
        self.on_saves: Callable[[dict[str, Any]], None] = lambda saves: None
        """Called with `describe_saves(self)` whenever that has changed."""
        self.in_use: set[str] = set()
        """On rank 0: names of checkpoints that a process of this launch reads. They are not removed meanwhile."""
        self.after_save = AfterSave(
            self.config,
            self.store,
            self.print_on_rank_0,
            in_use=self.in_use,
            has_tokenizer=bool(self.start.fingerprints),
        )

    # -------------------------------------------------------------------------------------------------- restore

    def after_load(self, state: State, logger: Logger) -> None:
        """Take the lease of the checkpoint folder, and restore the run. Collective.

        Composer calls this while its Trainer is constructed. The lease lets no other launch write into the folder.
        Creates `saver`. Raises CheckpointError on all ranks, after giving the lease back.
        """
        self.saver = Saver(self.store, after_publish=self._after_publish, note_wait=self._note_wait)
        self.preemption.release_lease = self._release_lease
        if self.role.takes_lease_at_start:
            self.saver.take_lease(request=lease_request(self.config, self.start.dead_holder))
        try:
            self._begin_from_start(state, logger)
        except BaseException:
            self.saver.release_lease()
            raise
        if self.saver.second_error:
            self.store.second = None  # it was read for the restore, and this launch may not write there
            self.print_on_rank_0(f"warning: save_fallback is not used by this launch: {self.saver.second_error}")
        self.second_place.begin_copying(self.saver, self.after_save)

    def _release_lease(self) -> None:
        """Copy no more saves, and let another launch take the lease at once."""
        self.second_place.stop()
        self.saver.release_lease()

    def _begin_from_start(self, state: State, logger: Logger) -> None:
        """Restore the checkpoint that this launch starts from, if there is one, and print where it starts.

        Collective. Changes the model, the optimizer and Composer's `state`; sets `changes`, `newest_url` and what
        `begin` and `_restore_run_state` set. Logs how long it took. Raises CheckpointError on all ranks.
        """
        # Restoring overwrites the optimizer's options, some of which the configuration may have changed.
        optimizer = state.optimizers[0]
        configured = [chosen_options(group) for group in optimizer.param_groups]
        restore_began_at = time.monotonic()
        restored = restore_tensors(self.config, self.start, self.model, state, self.saver, carries_on=self.carries_on)

        if restored is not None and restored.manifest is not None:
            manifest = restored.manifest
            logger.log_metrics({"checkpoint/restore_seconds": time.monotonic() - restore_began_at})
            if self.carries_on:
                self.changes = find_changes_to_record(manifest.config or {}, as_dict(self.config))
            else:
                restored.notes.extend(describe_model_changes(self.config, manifest))
            action = "carrying on from" if self.carries_on else "starting from the weights of"
            differences = describe_differences(
                self.config, self.model, state, manifest, self.changes, self.role.segment
            )
            self.print_on_rank_0(*restored.notes)
            line = f"{action} {restored.url}{differences}"
            self.print_on_rank_0(line, event="restored", facts={"checkpoint": restored.url})

            if self.carries_on:
                for group, options in zip(optimizer.param_groups, configured, strict=True):
                    group.update(options)
                self._restore_run_state(restored.url, manifest, state)
            self.saver.parent_save_id = manifest.save_id
            self.newest_url = restored.url
            self.second_place.note_restored(restored.url)

        if self.start.note:
            self.print_on_rank_0(self.start.note)
        self.begin(state)

    def begin(self, state: State) -> None:
        """Set where in the run this launch begins: at the batch after `state.timestamp`.

        Call this once the state is restored, and again if newer state of another launch replaces it. Sets
        `first_batch`, `begun_batch`, `published_batch` and `started_at`, and starts the clock of the save interval. The
        ranks exchange nothing.
        """
        last_batch = int(state.timestamp.batch)
        self.first_batch = last_batch + 1
        self.started_at = state.timestamp
        self.policy.start(state.timestamp)

        # The restored batch needs no save. It is in the run's folder only if it was restored from there.
        self.begun_batch = last_batch if last_batch > 0 else -1
        self.published_batch = self.begun_batch if self.start.is_run_folder else -1

        # From now on, exit messages and status.json can tell what is saved.
        self.preemption.describe_saves = partial(describe_remaining, self, state)
        self.preemption.describe_failed_save = self.failed_saves.describe
        self.on_saves(describe_saves(self))

    def _restore_run_state(self, url: str, manifest: Manifest, state: State) -> None:
        """Restore what a run has besides weights and optimizer state, from its checkpoint at `url`.

        Collective. Sets clocks, loss scale and the position in the data, in Composer's `state`, the data set and the
        gradient step. Sets `history` on rank 0 (the log), `segments` (which devices and settings trained which
        batches), `microbatch_of_run` and `wandb_run_id`. Raises CheckpointError on all ranks if the log cannot be read.
        """
        self.run_state.restore(manifest.scalars, state)

        # Only rank 0 writes the log, so only rank 0 reads it.
        log: Log | None = None
        with raising_on_all_ranks(CheckpointError):
            if dist.get_rank() == 0:
                log = read_log(open_checkpoint(url))
        if log is not None:
            self.history = log.content
            self.print_on_rank_0(*log.notes)
            # Later checkpoints in this folder may refer to parts of the log.
            if self.start.is_run_folder and not self.second_place.contains(url):
                self.saver.log_parts = log.parts

        # A run under another name is a copy, which gets a run of its own at wandb.
        if manifest.run_name == self.config.run_name:
            self.wandb_run_id = manifest.scalars.get("wandb_run_id")
        self.segments = with_references(manifest.segments, self.config)
        self.microbatch_of_run = find_microbatch(self.config, manifest)

    # ------------------------------------------------------------------------------------------ between two batches

    def fit_start(self, state: State, logger: Logger) -> None:
        """Check the states of the user's own callbacks, and drop the energy that was used before the first batch."""
        self.run_state.check_callbacks()
        self.agreement.meter.take()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Agree with the other ranks on what comes next, and evaluate the in-context tasks if they are due.

        Collective. Composer calls this when it has counted a batch. It evaluates the validation sets next, and then
        calls `batch_checkpoint`, which acts on what the ranks agree on here: a save that is due, a reason to leave.
        """
        assert state.max_duration is not None
        timer = self.policy.timer
        is_save_due = timer is not None and timer.note_batch_end(self.saver.has_save_in_flight)
        self.agreement.end_batch(
            is_last=state.timestamp >= state.max_duration,
            is_busy=self.saver.is_busy,
            wants_save=is_save_due or self.failed_saves.wants_save(),
        )

        if self.agreement.joules:  # 0 comes from counters that stand still, as those of some cards do
            logger.log_metrics({"energy/joules": self.agreement.joules})
        if self.evaluates_now(state):
            self.evaluate_tasks(state, logger)

    def evaluates_now(self, state: State, event: Event = Event.BATCH_END) -> bool:
        """Return whether to evaluate now. Composer asks at several events.

        An evaluation runs right after its batch, so that its metrics are in the batch's record. If the ranks have
        agreed to leave after this batch, the next launch evaluates instead.
        """
        is_leaving = self.preemption.agreed_reason != 0
        return event == Event.BATCH_END and not is_leaving and is_evaluation_due(self.config, state)

    def evaluate_tasks(self, state: State, logger: Logger) -> None:
        """Evaluate the tasks in context, if there are any. Raises Preempted if this launch must leave meanwhile."""
        if self.tasks is not None:
            self.tasks.evaluate(state, logger, self.leave_if_asked)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Leave between two batches of an evaluation, if a rank is asked to."""
        self.leave_if_asked(state, logger)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Read the energy counters, before one can wrap around twice during a long evaluation."""
        self.agreement.meter.sample()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Move the save in progress on, decide whether to save this batch and whether to end the launch, and do so.

        Collective. Composer calls this after a batch and its evaluation, before the loggers write the batch's record.
        Sets `was_preempted_by` and `was_stopped`. If the launch ends, Composer's loop ends after this event. Raises
        CheckpointError on all ranks if saves have failed for longer than `max_unsaved`.
        """
        # Publish a save that all ranks have written meanwhile.
        num_failed_before = self.failed_saves.count
        self._advance_save(partial(self.saver.poll, all_idle=self.agreement.all_idle), state, logger)
        is_digest_due = self.policy.digest_span is not None and has_passed(state, self.policy.digest_span)
        if is_digest_due:
            digest = self.saver.digest(self.model.model, state.optimizers[0])
            metrics: dict[str, Any] = {"state/digest": digest, "state/batch": int(state.timestamp.batch)}
            logger.log_metrics(metrics)

        # Decide what follows this batch, and save it.
        self._note_copies()
        decision = self.role.decide(self.policy.decide(state))
        self.run_state.owes_evaluation = decision.owes_evaluation  # the save records it
        ends_launch = decision.stops or bool(decision.preempted_by)
        is_last_batch = ends_launch or self.policy.is_last(state)
        if decision.saves or self.saver.next_is_second:
            # After a failed save, training waits for the next one only if there is no later chance.
            has_failed = self.failed_saves.count > 0 or self.second_place.first_fails
            self._save(state, logger, waits=is_last_batch or not has_failed)

        # Report failed saves in the batch's record, or give up. A save that tries the second place decides first.
        has_failed_again = self.failed_saves.count > num_failed_before
        if has_failed_again and not is_last_batch and not self.saver.next_is_second:
            self._leave_if_unsaved_for_too_long(state)
        if self.failed_saves.count:
            num_unsaved = int(state.timestamp.batch) - self.saved_batch
            logger.log_metrics({FAILED_SAVES: self.failed_saves.count, UNSAVED_BATCHES: num_unsaved})
        if not is_digest_due:  # a record has one digest, and this batch's own comes first
            self._log_digest_of_save(logger)

        self.was_preempted_by = decision.preempted_by
        self.was_stopped = decision.stops
        if ends_launch:
            state.stop_training()

    def leave_if_asked(self, state: State, logger: Logger) -> None:
        """Leave during an evaluation if any rank is asked to: record and save the batch, then raise Preempted.

        Collective: all ranks call this between the same two batches of an evaluation. The next launch repeats the
        evaluation. If this launch has trained nothing yet, there is nothing to record or to save.
        """
        preempted_by = self.preemption.agree_on_reason()
        if not preempted_by:
            return
        self.was_preempted_by = preempted_by
        has_trained = int(state.timestamp.batch) >= self.first_batch
        if has_trained:
            # The exception skips Composer's remaining events, so the loggers are told here to write the record.
            self.role.leave_early()
            for destination in logger.destinations:
                destination.batch_checkpoint(state, logger)
            self.run_state.owes_evaluation = True
            self.save_now(state, logger)
            for destination in logger.destinations:
                destination.fit_end(state, logger)
        raise Preempted(describe_preemption(self, state), orderly=True)

    @property
    def saved_batch(self) -> int:
        """The newest batch that a published save holds, or from which this launch began."""
        return max(self.published_batch, self.first_batch - 1)

    def has_unsaved_batches(self, state: State) -> bool:
        """Return whether this launch has trained batches that no save holds. The ranks exchange nothing."""
        return self.role.writes_checkpoints and int(state.timestamp.batch) > self.saved_batch

    @cached_property
    def saves_into_run_folder(self) -> bool:
        """Whether checkpoints are in the run folder, beside its log and its status.json.

        The disk is asked once, because it may hang later, and the thread that ends the launch must not wait for it.
        """
        return is_in_run_folder(self.store, self.config)

    @cached_property
    def has_second_in_run_folder(self) -> bool:
        """Whether the second place for checkpoints is in the run folder. The disk is asked once."""
        return self.store.second is not None and is_in_run_folder(self.store.second, self.config)

    def record_launch(self, record: dict[str, Any]) -> None:
        """Write a record of this launch beside checkpoints that are outside the run folder, in the background.

        Whoever finds the checkpoints learns from it how this launch goes or has ended. It may be called from any thread
        of rank 0.
        """
        if not self.saves_into_run_folder:
            self.saver.record_launch(record)

    # ----------------------------------------------------------------------------------------------------- save

    def save_now(self, state: State, logger: Logger) -> None:
        """Save this batch, unless its save has begun already, and wait until it is published."""
        if int(state.timestamp.batch) > self.begun_batch:
            self._save(state, logger)
        self.finish_saves(state, logger)

    def _save(self, state: State, logger: Logger, *, waits: bool = True) -> None:
        """Begin to save this batch, once the save before it is published.

        Collective. Returns when the state is copied to the host; writing goes on in the background, and
        `batch_checkpoint` or `finish_saves` publishes. Sets `begun_batch`. With `waits` false, this save is skipped if
        the one before is not published yet. It is also skipped if another launch saves, or if the lease cannot be
        taken. A failure of the save before is counted and printed, and does not prevent this one.
        """
        timer = self.policy.timer
        if self.saver.has_save_in_flight and not waits:
            return
        if not self.role.may_save():
            if timer is not None:  # another launch saves
                timer.note_begun()
            return
        if not self.saver.has_lease:
            take_lease = partial(self.saver.take_lease, steal_from_live_writer=True)
            if self._advance_save(take_lease, state, logger) is not None:
                return

        begin_save = partial(self.saver.save, self.model.model, state.optimizers[0], collect_metadata(self, state))
        # `Saver.save` first waits for the previous save. If that has failed, this one has not begun yet.
        previous_error = self._advance_save(begin_save, state, logger)
        if previous_error is not None:
            begin_save()
        self.begun_batch = int(state.timestamp.batch)
        if timer is not None:
            timer.note_begun()

    def _advance_save(self, step: Callable[[], Saved | None], state: State, logger: Logger) -> UserError | None:
        """Call `step`, a method of the saver that moves a save on, and record a save that is published or has failed.

        `step` returns the save that has been published meanwhile, or None. Returns the error of a failed save that the
        run survives, and None if there was none. A run survives an error that may pass, or that somebody can mend
        meanwhile with new credentials or permissions: it is counted in `failed_saves` and printed, and the next save
        tries again. Any other error is raised, and ends the launch.
        """
        try:
            saved = step()
            if saved is not None:
                self._note_published(saved, logger)
        except UserError as error:
            may_be_mended = error.is_transient or error.needs_credentials or error.lacks_permission
            if not may_be_mended:
                self.has_failed_save = True
                self._warn_of_unsaved_batches(state)
                raise

            # The save is lost, so the newest batch whose save has begun is the one that is published.
            self.failed_saves.note_failure(error, state.timestamp)
            next_step = "the next save tries again"
            if self.saver.next_is_second:
                self.second_place.note_failure(self.failed_saves.describe())
                next_step = f"the next save goes to {self.second_place.url}"
            line = f"warning: {describe_failed_saves(self)}, and {next_step}"
            self.print_on_rank_0(line, event="failed_save", facts={"failed_saves": self.failed_saves.count})
            self.begun_batch = self.published_batch
            self.waits_for_save = ""
            self.on_saves(describe_saves(self))
            return error
        return None

    def _warn_of_unsaved_batches(self, state: State) -> None:
        """Print which batches no save holds, if any, before the launch ends with an error."""
        if self.has_unsaved_batches(state):
            unsaved = describe_unsaved(state, self.saved_batch)
            self.print_on_rank_0(f"warning: {unsaved}; {describe_newest_save(self)}")

    def _leave_if_unsaved_for_too_long(self, state: State) -> None:
        """Raise CheckpointError on all ranks if the run has trained for longer than `max_unsaved` since saves fail.

        Collective: rank 0 decides by its clock, and broadcasts the decision.
        """
        if not broadcast_json(self.failed_saves.is_over_limit(state)):
            return
        self.has_failed_save = True
        raise self.failed_saves.limit_error(int(state.timestamp.batch) - self.saved_batch)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until the last save is published, and for copies. Composer calls this at the end of training."""
        self.finish_saves(state, logger)
        self.finish_copies()

    def finish_copies(self) -> None:
        """Wait for copies of saves that are in `save_fallback`, unless the launch was preempted.

        Collective. If the newest save is still there afterwards, rank 0 prints that.
        """
        if self.saver.second is None:
            return  # all ranks leave here
        if not self.was_preempted_by:
            self.second_place.wait_for_copies(lambda: bool(self.preemption.reason))
        self.second_place.stop()
        self._note_copies()
        if self.second_place.holds_newest:
            self.print_on_rank_0(self.second_place.describe_end(f"ba{self.published_batch}"))

    def _note_copies(self) -> None:
        """Note on rank 0 that the newest save was copied from `save_fallback` to `save_folder`."""
        if self.second_place.note_copies(self.published_batch):
            self.newest_url = f"{self.store.root.url}/ba{self.published_batch}"
            self.on_saves(describe_saves(self))

    def finish_saves(self, state: State, logger: Logger) -> None:
        """Wait until the last save is published. If it fails and the fault may pass, save again for up to `retry_for`.

        Collective. Each attempt saves the state of the moment, so nothing may train meanwhile. Raises CheckpointError
        on all ranks if no attempt has succeeded by then.
        """
        budget = Budget(RETRY_PAUSES_SECONDS, seconds=self.config.retry_for.seconds, began=time.monotonic())
        while self._advance_save(self.saver.wait, state, logger) is not None:
            if self.saver.next_is_second:  # on all ranks
                self._save(state, logger)
                continue
            # Rank 0's clock decides, so that all ranks pause equally long and give up together.
            pause_seconds = broadcast_json(budget.pause(time.monotonic()))  # None once `retry_for` is over
            if pause_seconds is None:
                self.has_failed_save = True
                raise self.failed_saves.last_error()
            self.print_on_rank_0(
                f"the next save is in {pause_seconds:.3g} s; retry_for is {self.config.retry_for.written}"
            )
            time.sleep(pause_seconds)
            self._save(state, logger)
        self._log_digest_of_save(logger)

    def post_close(self) -> None:
        """Release the run's lease, so that another launch can take over at once: nothing is saved any more."""
        self.preemption.release_lease()

    def _note_wait(self, name: str, seconds: float) -> None:
        """Print that training waits for the save `name`, which was begun `seconds` ago. status.json says so, too."""
        self.waits_for_save = f"{name} in {self.saver.url_in_flight}"
        self.on_saves(describe_saves(self))
        self.print_on_rank_0(
            f"waiting for {self.saver.url_in_flight}: {name} is not saved after {seconds:.0f} s; training goes on when "
            "it is, or when that save has failed"
        )

    def _note_published(self, saved: Saved, logger: Logger) -> None:
        """Record that a save is published: print it, log what it cost, and adapt `save_interval: auto` to the cost.

        All ranks call this; the ranks exchange nothing. Sets `published_batch`, `newest_url` and `unlogged_digest`, and
        resets `failed_saves`.
        """
        self.published_batch = int(saved.name.removeprefix("ba"))
        place_url = self.second_place.url if saved.is_in_second else self.store.root.url
        self.newest_url = f"{place_url}/{saved.name}"
        line = self.second_place.note_published(saved.name, is_in_second=saved.is_in_second)
        facts = {"batch": self.published_batch, "checkpoint": self.newest_url, "bytes": saved.num_bytes}
        self.print_on_rank_0(line, event="saved", facts=facts)
        self.failed_saves.note_published()
        self.waits_for_save = ""
        self.on_saves(describe_saves(self))

        # Stall: training waited for the copy to the host. Durable: from the beginning of the save to its publication.
        self.unlogged_digest = {"state/digest": saved.state_digest, "state/batch": self.published_batch}
        metrics: dict[str, Any] = {
            "checkpoint/stall_seconds": saved.stall_seconds,
            "checkpoint/durable_seconds": saved.durable_seconds,
            SAVED: saved.num_bytes,
        }
        if saved.is_in_second:
            metrics[IN_FALLBACK] = 1
        timer = self.policy.timer
        if timer is not None:
            change = timer.note_published(saved.stall_seconds, saved.durable_seconds)
            metrics["checkpoint/cost_seconds"] = timer.cost_seconds
            metrics["checkpoint/interval_seconds"] = timer.seconds
            if change is not None:
                self.print_on_rank_0(change)
        logger.log_metrics(metrics)

    def _log_digest_of_save(self, logger: Logger) -> None:
        """Log the digest of a save that was published since the last record, if any."""
        if self.unlogged_digest:
            logger.log_metrics(self.unlogged_digest)
            self.unlogged_digest = {}

    def segments_until(self, state: State) -> tuple[Segment, ...]:
        """Return where the run has been trained until now: a segment for each launch, this one last.

        A segment records the batches, the devices and the settings of a launch, so that a report can tell where results
        come from. The ranks exchange nothing.
        """
        seconds = (state.timestamp.total_wct - self.started_at.total_wct).total_seconds()
        num_tokens = int(state.timestamp.token) - int(self.started_at.token)
        timer = self.policy.timer

        # What the configuration does not tell: what `auto` has chosen, the speed, and which keys were changed.
        this_segment = build_segment(
            self.config,
            self.model,
            self.first_batch,
            int(state.timestamp.batch),
            device_train_microbatch_size=int(state.device_train_microbatch_size or 0),
            tokens_per_second=num_tokens / seconds if seconds else None,
            save_interval_seconds=timer.seconds if timer is not None else None,
            changes={change.key: [change.before, change.after] for change in self.changes},
            **self.role.segment,
        )
        return (*self.segments, this_segment)

    # ------------------------------------------------------------------ in the background, on rank 0, after each save

    def _after_publish(self, lease: Lease, place: CheckpointStore) -> None:
        """Note that a save is published, and do what follows it.

        The saver's thread calls this on rank 0 for each published save, with the store that has it.
        """
        self.second_place.holds_newest = place is not self.store
        self.durable_batch = self.begun_batch
        self.preemption.note_saved(f"ba{self.begun_batch}{self.second_place.suffix}")
        self.after_save.finish(lease, place)
        if place is self.store and self.second_place.copy_back is not None:
            self.second_place.copy_back.wake()

    def print_on_rank_0(self, *lines: str, event: str = "", facts: Mapping[str, Any] | None = None) -> None:
        """Print lines on rank 0, with characters escaped that a terminal could take for commands.

        `event` and `facts` of a line are shown by a console of JSON, as `output.say` describes.
        """
        if dist.get_rank() == 0:
            for line in lines:
                say(printable(line), event, facts)
