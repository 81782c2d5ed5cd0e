"""Composer callback that restores a run from a checkpoint, and orders what happens between two batches.

`find_start` chooses the checkpoint, checks its manifest, and refuses a run that another launch holds, before the model
is built. Tensors and the place in the data are checked after the lease is taken. State is restored at AFTER_LOAD: the
model is sharded by then, seeds and data are not used yet. A batch ends in `batch_end` and `batch_checkpoint`: ranks
agree, evaluate, and save when `save_policy` decides so. `run_state` has the state besides tensors.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from composer import core
from composer.core import Callback, Event, State
from composer.loggers import Logger

from llmfoundry_lite.checkpoint.lease import LeaseRequest
from llmfoundry_lite.checkpoint.manifest import Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.paths import put_tokenizer
from llmfoundry_lite.checkpoint.restore import Restored, load, load_newest
from llmfoundry_lite.checkpoint.run_log import FAILED_SAVES, METRICS, SAVED, UNSAVED_BATCHES, Log, read_log
from llmfoundry_lite.checkpoint.save import Saved, SaveMetadata, Saver
from llmfoundry_lite.checkpoint.start import Start, check_fit, choose_start, find_microbatch
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.config.changes import Change, find_changes, find_model_changes
from llmfoundry_lite.config.fields import as_yaml
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.tokenizer import TOKENIZER_FILE, find_fingerprints, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, DivergedError, TransientError, UserError, one_line, printable
from llmfoundry_lite.ranks.ending import Preempted, all_ranks_fail, is_lost_peer
from llmfoundry_lite.ranks.exchange import broadcast_json, raising_on_all_ranks
from llmfoundry_lite.retry import Budget
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.failed_saves import FailedSaves
from llmfoundry_lite.training.gradient_step import GradientStep
from llmfoundry_lite.training.in_context import InContext
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.run_folder import RunFolder, log_until
from llmfoundry_lite.training.run_state import (
    RunState,
    build_segment,
    chosen_options,
    find_differences,
    with_references,
)
from llmfoundry_lite.training.save_policy import SavePolicy
from llmfoundry_lite.training.schedule import has_passed, is_evaluation_due
from llmfoundry_lite.training.trainer import ParallelTrainer

RETRY_PAUSES_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses between attempts at the last save; the last pause repeats."""


@dataclass(eq=False)
class Checkpointing(Callback):
    """Restores this launch's start, and saves the run during training, at its end and before leaving early. Every rank
    calls every method together, unless it says otherwise."""

    config: TrainConfig
    model: LanguageModel
    gradient_step: GradientStep
    preemption: Preemption
    agreement: Agreement
    start: Start
    partners: Partners
    tasks: InContext | None = None

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.config.checkpoint_folder)
        self.policy = SavePolicy(self.config, self.preemption, self.agreement)
        self.run_state = RunState(self.config, self.gradient_step)
        self.carries_on = self.start.is_run_folder or not self.config.load_weights_only
        """This launch carries on the checkpoint's run; else it starts a new run with its weights."""
        self.saver: Saver
        """Made by `after_load`, like all that `begin` sets."""
        self.first_batch: int
        """The first batch that this launch trains, from `begin` on."""
        self.started_at: core.Timestamp
        """Where the run was then."""
        self.segments: tuple[Segment, ...] = ()
        self.changes: list[Change] = []
        """Configuration keys whose values differ from the checkpoint's."""
        self.history: bytes | None = None
        """On rank 0: the log that the checkpoint holds."""
        self.has_tokenizer_there = False
        self.wandb_run_id: str | None = None
        self.was_stopped = False
        self.was_preempted_by = ""
        self.begun_batch = -1
        """The newest batch of which a save has begun."""
        self.digest_of_save: dict[str, Any] = {}
        """What the log is to say of a published save's digest, in the next record that has none of its own."""
        self.published_batch = -1
        """Batch of the newest checkpoint in the run's folder that this launch knows of; -1 if none."""
        self.durable_batch = -1
        """On rank 0: batch of the last save that was published, from that moment on. The main thread, which sets
        `published_batch`, learns of it at the end of a batch."""
        self.has_failed_save = False
        """The launch ends because a save has failed, so that it tries no other one."""
        self.microbatch_of_run: int | None = None
        """Size of the run's microbatches, if exact sums require this launch to have the same."""
        self.newest_url: str | None = None
        """The newest checkpoint that this launch has restored or saved."""
        self.failed_saves = FailedSaves(self.config.max_unsaved)
        self.on_saves: Callable[[dict[str, Any]], None] = lambda saves: None
        """Called with `describe_saves` when that has changed."""
        self.in_use: set[str] = set()
        """On rank 0: names of checkpoints that a process of this launch reads, and that are not removed meanwhile."""

    # -------------------------------------------------------------------------------------------------- restore

    def after_load(self, state: State, logger: Logger) -> None:
        self.saver = Saver(self.store, after_publish=self._after_publish, note_wait=self._note_wait)
        self.preemption.release_lease = self.saver.release_lease
        if self.partners.takes_lease_at_start:
            self.saver.take_lease(request=lease_request(self.config, self.start.dead_holder))
        try:
            self._begin_from_start(state, logger)
        except BaseException:
            self.saver.release_lease()
            raise

    def _begin_from_start(self, state: State, logger: Logger) -> None:
        """Restore the start, and begin there."""
        chosen = [chosen_options(group) for group in state.optimizers[0].param_groups]
        began = time.monotonic()
        restored = self._restore(state)
        if restored is not None and restored.manifest is not None:
            there, here = restored.manifest.config or {}, as_dict(self.config)
            if self.carries_on:
                self.changes = find_changes(there, here)["logged"]
            elif others := find_model_changes(there, here):
                restored.notes.append(f"the checkpoint's model differs: {', '.join(map(str, others))}")
            logger.log_metrics({"checkpoint/restore_seconds": time.monotonic() - began})
            how = "carrying on from" if self.carries_on else "starting from the weights of"
            differences = self._differences(restored.manifest, state)
            self.print_on_rank_0(*restored.notes, f"{how} {restored.url}{differences}")
            if self.carries_on:
                for group, options in zip(state.optimizers[0].param_groups, chosen, strict=True):
                    group.update(options)
                self._carry_on(restored.url, restored.manifest, state)
            self.saver.parent_save_id = restored.manifest.save_id
            self.newest_url = restored.url
        if self.start.note:
            self.print_on_rank_0(self.start.note)
        self.begin(state)

    def begin(self, state: State) -> None:
        """Note that this launch trains from the batch after `state.timestamp` on."""
        self.first_batch = int(state.timestamp.batch) + 1
        self.begun_batch = int(state.timestamp.batch) if self.first_batch > 1 else -1
        self.published_batch = self.begun_batch if self.start.is_run_folder else -1
        self.started_at = state.timestamp
        self.policy.start(state.timestamp)
        self.preemption.describe_saves = partial(self.what_stands, state)
        self.preemption.describe_failed_save = self.failed_saves.describe
        self.on_saves(self.describe_saves())

    def announce_stop(self, state: State) -> bool:
        """Print why there is nothing to train for this launch, if so. Returns whether the run is not done even so."""
        if self.policy.is_last(state):
            max_duration = self.config.max_duration.written
            self.print_on_rank_0(
                f"nothing is trained: the run is done at batch {int(state.timestamp.batch)}, with "
                f"max_duration={max_duration}"
            )
            return False

        is_there = self.policy.is_launch_over(state)
        if is_there:
            why = self.policy.stop_reason or f"the run has reached stop_at, {as_yaml(self.config.stop_at)}"
            self.print_on_rank_0(f"{why}: it is at batch {int(state.timestamp.batch)}")
        return is_there

    def what_stands(self, state: State) -> str:
        """Say what is left of the run when this launch leaves without a save of its last batches. For any thread of
        rank 0, whose main thread may hang."""
        if not self.partners.saves_here:
            return "what was saved stands"
        newest = max(self.published_batch, self.durable_batch)
        if newest <= 0:
            again = "" if self.config.autoresume else " with autoresume=true"
            return f"nothing was saved yet, and the same command{again} starts over"
        lost = self._describe_unsaved(state, max(newest, self.first_batch - 1))
        return f"{lost}; ba{newest} stands" if lost else f"ba{newest} stands"

    def _describe_unsaved(self, state: State, saved_batch: int) -> str:
        """Return `batches 5 to 8 are in no save`; empty if all are in one."""
        first, last = saved_batch + 1, int(state.timestamp.batch)
        if first > last:
            return ""
        return f"batch {last} is in no save" if first == last else f"batches {first} to {last} are in no save"

    def _restore(self, state: State) -> Restored | None:
        url, is_run_folder = self.start.url, self.start.is_run_folder
        if url is None:
            return None
        optimizer = state.optimizers[0] if self.carries_on else None
        check = partial(check_fit, self.config, self.start.fingerprints)
        options: dict[str, Any] = {"check": check} if self.carries_on else {}
        if is_run_folder:
            options["lease"] = self.saver.lease
        else:
            options |= {"cast": self.config.load_cast, "ignore_keys": tuple(self.config.load_ignore_keys)}
        if self.start.is_single_checkpoint:
            return Restored(load(url, self.model.model, optimizer, **options), url, [])
        store = self.store if is_run_folder else CheckpointStore(url)
        restored = load_newest(store, self.model.model, optimizer, **options)
        if restored.manifest is None:
            why = "; ".join(restored.notes)
            raise CheckpointError(
                f"{url}: no checkpoint is intact ({why}); move the folder away to start again from batch 1"
                if is_run_folder
                else f"load_path: {url} holds no intact checkpoint ({why})"
            )
        return restored

    def _carry_on(self, url: str, manifest: Manifest, state: State) -> None:
        self.run_state.restore(manifest.scalars, state)
        log: Log | None = None
        with raising_on_all_ranks(CheckpointError):
            log = read_log(open_checkpoint(url)) if dist.get_rank() == 0 else None
        if log is not None:
            self.history = log.content
            self.print_on_rank_0(*log.notes)
            if self.start.is_run_folder:  # later checkpoints in this folder may refer to parts of the log
                self.saver.log_parts = log.parts
        if manifest.run_name == self.config.run_name:
            self.wandb_run_id = manifest.scalars.get("wandb_run_id")
        self.segments = with_references(manifest.segments, self.config)
        self.microbatch_of_run = find_microbatch(self.config, manifest)

    def _differences(self, manifest: Manifest, state: State) -> str:
        """Return how this launch differs from the checkpoint's, in parentheses; empty if it does not."""
        if not manifest.segments:
            return ""
        batch, is_auto = manifest.timestamp.batch, self.config.device_train_microbatch_size == "auto"
        size = None if is_auto else int(state.device_train_microbatch_size or 0)
        measured = {"device_train_microbatch_size": size, **self.partners.segment}
        here = build_segment(self.config, self.model, batch, batch, **measured)
        changed = [*map(str, self.changes), *find_differences(manifest.segments[-1], here)]
        if manifest.run_name != self.config.run_name:
            changed.insert(0, f"run_name {manifest.run_name} -> {self.config.run_name}")
        return f" ({', '.join(changed)})" if changed else ""

    # ------------------------------------------------------------------------------------------ between two batches

    def fit_start(self, state: State, logger: Logger) -> None:
        self.agreement.meter.take()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Agree with the other ranks on what comes next; then evaluate. Composer evaluates the validation loss next."""
        assert state.max_duration is not None
        timer = self.policy.timer
        wants_save = timer is not None and timer.note_batch_end(self.saver.has_save_in_flight)
        self.agreement.end_batch(
            is_last=state.timestamp >= state.max_duration,
            is_busy=self.saver.is_busy,
            wants_save=wants_save or self.failed_saves.wants_save(),
        )
        if self.agreement.joules:  # the counters of some cards stand still
            logger.log_metrics({"energy/joules": self.agreement.joules})
        if self.evaluates_now(state):
            self.evaluate_tasks(state, logger)

    def evaluates_now(self, state: State, event: Event = Event.BATCH_END) -> bool:
        """Return whether to evaluate: right after a batch, so that the numbers are in its record. If the ranks have
        agreed to leave after this batch, the next launch evaluates."""
        return event == Event.BATCH_END and not self.preemption.agreed and is_evaluation_due(self.config, state)

    def evaluate_tasks(self, state: State, logger: Logger) -> None:
        if self.tasks is not None:
            self.tasks.evaluate(state, logger, self.leave_if_asked)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self.leave_if_asked(state, logger)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.agreement.meter.sample()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        num_failed = self.failed_saves.count
        self._advance_save(partial(self.saver.poll, all_idle=self.agreement.all_idle), state, logger)
        is_digest_due = self.policy.digest_span is not None and has_passed(state, self.policy.digest_span)
        if is_digest_due:
            digest = self.saver.digest(self.model.model, state.optimizers[0])
            metrics: dict[str, Any] = {"state/digest": digest, "state/batch": int(state.timestamp.batch)}
            logger.log_metrics(metrics)
        decision = self.partners.decide(self.policy.decide(state))
        self.run_state.owes_evaluation = decision.owes_evaluation
        is_last = decision.stops or bool(decision.preempted_by) or self.policy.is_last(state)
        if decision.saves:
            self._save(state, logger, waits=is_last or not self.failed_saves.count)
        if self.failed_saves.count > num_failed and not is_last:
            self._leave_if_unsaved_for_too_long(state)
        if self.failed_saves.count:
            unsaved = int(state.timestamp.batch) - self.saved_batch
            logger.log_metrics({FAILED_SAVES: self.failed_saves.count, UNSAVED_BATCHES: unsaved})
        if not is_digest_due:
            self._log_digest_of_save(logger)
        self.was_preempted_by, self.was_stopped = decision.preempted_by, decision.stops
        if decision.preempted_by or decision.stops:
            state.stop_training()

    def leave_if_asked(self, state: State, logger: Logger) -> None:
        """Leave during a long evaluation if any rank is asked to: record and save the batch, then raise Preempted. The
        next launch repeats the evaluation. Every rank must call this at the same places."""
        preempted_by = self.preemption.agree_on_reason()
        if not preempted_by:
            return
        self.was_preempted_by = preempted_by
        if int(state.timestamp.batch) >= self.first_batch:
            self.partners.leave_early()
            for destination in logger.destinations:
                destination.batch_checkpoint(state, logger)
            self.run_state.owes_evaluation = True
            self.save_now(state, logger)
            for destination in logger.destinations:
                destination.fit_end(state, logger)
        raise Preempted(self.preempted_text(state), orderly=True)

    def keep_batches(self, error: Exception, trainer: ParallelTrainer, run: RunFolder) -> None:
        """Record and save the batches that no save holds yet, before the launch ends with `error`.

        This is possible where every rank has met an error while the state was that of a whole batch: a task's file has
        changed, validation data or the next shard are missing, a callback has failed. A rank that fails alone saves
        nothing, because the others wait for it in a collective. Where the weights may be the cause, nothing is saved.
        """
        state = trainer.state
        batch = int(state.timestamp.batch)
        is_unsaved = self.first_batch <= batch and self.published_batch < batch
        is_whole = trainer.last_stepped_batch <= batch and self.config.trains_alone
        is_possible = not (self.has_failed_save or isinstance(error, DivergedError) or is_lost_peer(error))
        if not (is_unsaved and is_whole and is_possible) or not all_ranks_fail(batch):
            return
        try:
            with suppress(UserError):  # the log may be the cause, or its disk
                run.write_once(state)
            self.run_state.owes_evaluation = is_evaluation_due(self.config, state)
            self.save_now(state, trainer.logger)
            with suppress(UserError):
                run.fit_end(state, trainer.logger)
        except Exception as failure:
            self.print_on_rank_0(f"warning: batch {batch} was not saved: {one_line(failure)}")

    def preempted_text(self, state: State) -> str:
        """Return the message of a launch that leaves early."""
        saved = f"saved as ba{self.published_batch}" if self.published_batch > 0 else "nothing to save yet"
        if not self.partners.saves_here:
            saved = self.partners.instead_of_saving
        again = "run the same command again" + ("" if self.config.autoresume else " with autoresume=true")
        why = self.preemption.describe_reason(self.was_preempted_by)
        return f"{why} at batch {int(state.timestamp.batch)}, {saved}; {again}"

    @property
    def saved_batch(self) -> int:
        """The newest batch that is in a save, or from which this launch began."""
        return max(self.published_batch, self.first_batch - 1)

    def would_lose(self, state: State) -> bool:
        """Return whether batches have been trained that no save holds."""
        return self.partners.saves_here and int(state.timestamp.batch) > self.saved_batch

    def describe_saves(self) -> dict[str, Any]:
        """Return what status.json says of saves."""
        return {
            "last_saved": f"ba{self.published_batch}" if self.published_batch > 0 else None,
            "failed_saves": self.failed_saves.count,
            "save_error": self.failed_saves.reason or None,
        }

    # ----------------------------------------------------------------------------------------------------- save

    def save_now(self, state: State, logger: Logger) -> None:
        """Save this batch, unless its save has begun, and wait until it is published."""
        if int(state.timestamp.batch) > self.begun_batch:
            self._save(state, logger)
        self.fit_end(state, logger)

    def _save(self, state: State, logger: Logger, *, waits: bool = True) -> None:
        """Begin a save. Without `waits`, leave it out if the one before still goes on."""
        if self.saver.has_save_in_flight and not waits:
            return
        if not self.partners.may_save():
            if self.policy.timer is not None:  # another launch saves
                self.policy.timer.note_begun()
            return
        if not self.saver.has_lease and self._advance_save(
            partial(self.saver.take_lease, steal_from_live_writer=True), state, logger
        ):
            return
        save = partial(self.saver.save, self.model.model, state.optimizers[0], self._about(state))
        if self._advance_save(save, state, logger) is not None:  # the save before failed, so this one has not begun
            save()
        self.begun_batch = int(state.timestamp.batch)
        if self.policy.timer is not None:
            self.policy.timer.note_begun()

    def _advance_save(self, step: Callable[[], Saved | None], state: State, logger: Logger) -> UserError | None:
        """Take a step of a save. Prints and returns an error that may pass, also one that somebody can mend meanwhile,
        with new credentials or permissions: the run carries on, and the next save retries. Raises other errors."""
        try:
            self._log(step(), logger)
        except UserError as error:
            may_be_mended = error.is_transient or error.needs_credentials or error.lacks_permission
            if not may_be_mended:
                self.has_failed_save = True
                self._tell_what_is_lost(state)
                raise
            self.failed_saves.note_failure(error, state.timestamp)
            self.print_on_rank_0(f"warning: {self._describe_failed_save()}, and the next save tries again")
            self.begun_batch = self.published_batch
            self.on_saves(self.describe_saves())
            return error
        return None

    def _tell_what_is_lost(self, state: State) -> None:
        """Say which batches no save holds, before the launch ends with an error."""
        if self.would_lose(state):
            lost = self._describe_unsaved(state, self.saved_batch)
            self.print_on_rank_0(f"warning: {lost}; {self._newest_save()}")

    def _newest_save(self) -> str:
        return f"ba{self.published_batch} stands" if self.published_batch > 0 else "there is no save yet"

    def _describe_failed_save(self) -> str:
        parts = [self.failed_saves.describe()]
        parts.append(self._newest_save())
        if self.failed_saves.count > 1:
            parts.append(f"{self.failed_saves.count} saves in a row have failed")
        return "; ".join(parts)

    def _leave_if_unsaved_for_too_long(self, state: State) -> None:
        """Raise an error that may pass if saves have failed for longer than `max_unsaved`. Collective."""
        if not broadcast_json(self.failed_saves.is_over_limit(state)):
            return
        num_batches = int(state.timestamp.batch) - self.saved_batch
        text = (
            f"max_unsaved: saves have failed for {self.config.max_unsaved.written}; unsaved batches {num_batches}, "
            f"failed saves {self.failed_saves.count}, the last one: {self.failed_saves.reason}"
        )
        raise self._unsaved_error(text)

    def _unsaved_error(self, text: str) -> CheckpointError:
        """Return an error that may pass: saves succeeded before, or the lease could not have been taken."""
        self.has_failed_save = True
        error = CheckpointError(text)
        error.__cause__ = TransientError(text)
        error.needs_credentials = self.failed_saves.needs_credentials
        return error

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until the last save is published. After a transient error, save again for up to `retry_for`."""
        budget = Budget(RETRY_PAUSES_SECONDS, seconds=self.config.retry_for.seconds, began=time.monotonic())
        while self._advance_save(self.saver.wait, state, logger) is not None:
            pause = broadcast_json(budget.pause(time.monotonic()))
            if pause is None:
                raise self._unsaved_error(self.failed_saves.reason)
            self.print_on_rank_0(f"the next save is in {pause:.3g} s; retry_for is {self.config.retry_for.written}")
            time.sleep(pause)
            self._save(state, logger)
        self._log_digest_of_save(logger)

    def post_close(self) -> None:
        """Let another launch carry on at once: nothing is saved any more."""
        self.preemption.release_lease()

    def _note_wait(self, name: str, seconds: float) -> None:
        """Say that the training stands still."""
        self.print_on_rank_0(
            f"waiting for {self.store.root.url}: {name} is not saved after {seconds:.0f} s; training goes on when "
            "it is, or when that save has failed"
        )

    def _log(self, saved: Saved | None, logger: Logger) -> None:
        if saved is None:
            return
        self.print_on_rank_0(f"saved {saved.name}")
        self.published_batch = int(saved.name.removeprefix("ba"))
        self.failed_saves.note_published()
        self.on_saves(self.describe_saves())
        self.digest_of_save = {"state/digest": saved.state_digest, "state/batch": self.published_batch}
        metrics: dict[str, Any] = {
            "checkpoint/stall_seconds": saved.stall_seconds,
            "checkpoint/durable_seconds": saved.durable_seconds,
            SAVED: saved.num_bytes,
        }
        self.newest_url = f"{self.store.root.url}/{saved.name}"
        timer = self.policy.timer
        if timer is not None:
            news = timer.note_published(saved.stall_seconds, saved.durable_seconds)
            metrics["checkpoint/cost_seconds"] = timer.cost_seconds
            metrics["checkpoint/interval_seconds"] = timer.seconds
            self.print_on_rank_0(*([news] if news else []))
        logger.log_metrics(metrics)

    def _log_digest_of_save(self, logger: Logger) -> None:
        if self.digest_of_save:
            logger.log_metrics(self.digest_of_save)
            self.digest_of_save = {}

    def _about(self, state: State) -> SaveMetadata:
        stamp = state.timestamp
        run_folder = Path(self.config.run_folder)
        path = self.store.root.path_here
        has_log = path is not None and path.resolve().is_relative_to(run_folder.resolve())
        return SaveMetadata(
            timestamp=Timestamp(
                epoch=int(stamp.epoch), batch=int(stamp.batch), sample=int(stamp.sample), token=int(stamp.token)
            ),
            run_name=self.config.run_name,
            fingerprints=self.start.fingerprints,
            config=as_dict(self.config),
            segments=self.segments_until(state),
            scalars=self.run_state.collect(state),
            # Checkpoints inside the run folder have the log beside them; others must hold a copy. It is read when
            # published: loggers write this batch's record after this callback.
            log=None if has_log else partial(log_until, run_folder / METRICS, int(stamp.batch)),
        )

    def segments_until(self, state: State) -> tuple[Segment, ...]:
        """Return the segments of the launches before this one, and of this one so far."""
        seconds = (state.timestamp.total_wct - self.started_at.total_wct).total_seconds()
        tokens = int(state.timestamp.token) - int(self.started_at.token)
        here = build_segment(
            self.config,
            self.model,
            self.first_batch,
            int(state.timestamp.batch),
            device_train_microbatch_size=int(state.device_train_microbatch_size or 0),
            tokens_per_second=tokens / seconds if seconds else None,
            save_interval_seconds=self.policy.timer.seconds if self.policy.timer is not None else None,
            changes={change.key: [change.before, change.after] for change in self.changes},
            **self.partners.segment,
        )
        return (*self.segments, here)

    # ------------------------------------------------------------------ in the background, on rank 0, after each save

    def _after_publish(self, lease: Lease) -> None:
        self.durable_batch = self.begun_batch
        self.preemption.note_saved(f"ba{self.begun_batch}")
        self._copy_tokenizer()
        self.remove_old(lease)

    def _copy_tokenizer(self) -> None:
        """Copy the tokenizer beside the checkpoints once, for evaluation or export elsewhere."""
        if self.has_tokenizer_there or not self.start.fingerprints:
            return
        try:
            put_tokenizer(self.store.root.url, load_tokenizer(self.config.tokenizer.name).files(), last=TOKENIZER_FILE)
            self.has_tokenizer_there = True
        except (OSError, UserError) as error:
            print(f"the tokenizer was not copied beside the checkpoints: {error}", flush=True)

    def remove_old(self, lease: Lease) -> None:
        """Remove old checkpoints. Prints failures; raises only if another launch has the lease."""
        if self.config.save_num_checkpoints_to_keep < 0:
            return
        try:
            self.store.prune(
                lease,
                keep_newest=self.config.save_num_checkpoints_to_keep,
                keep_every_batches=self.config.save_keep_every_batches,
                keep_names=self.in_use,
                verify=check_present,
            )
        except CheckpointError as error:
            if not error.is_transient:
                self.store.check(lease)
            self.print_on_rank_0(f"old checkpoints were not removed: {error}")

    def print_on_rank_0(self, *lines: str) -> None:
        """Print lines, with what a terminal could take for commands escaped."""
        if dist.get_rank() == 0:
            for line in lines:
                print(printable(line), flush=True)


# ----------------------------------------------------------------------------------------- where a launch starts


def find_start(config: TrainConfig, *, takes_lease: bool = True) -> Start:
    """Choose on rank 0 where this launch starts, and broadcast it. Raises CheckpointError on all ranks, also if this
    launch `takes_lease` and another one holds it."""
    found = Start()
    with raising_on_all_ranks(CheckpointError):
        if dist.get_rank() == 0:
            found = choose_start(config, find_fingerprints(config.tokenizer.name))
            if takes_lease:
                store = CheckpointStore(config.checkpoint_folder)
                found = found._replace(dead_holder=store.wait_until_free(lease_request(config)))
    return Start(*broadcast_json(found))


def lease_request(config: TrainConfig, watched: str = "") -> LeaseRequest:
    """Return how this launch asks for the run's lease. `watched`: a holder that was watched in vain before."""
    return LeaseRequest(
        run_name=config.run_name,
        takes_over=config.takeover,
        note=lambda line: print(printable(line), flush=True),
        watched=watched,
    )
