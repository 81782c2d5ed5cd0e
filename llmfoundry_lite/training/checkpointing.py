"""A run and its checkpoints: Composer's events <-> checkpoint package. Restores once, saves when it is time.

State is restored at AFTER_LOAD (the model is sharded by then, seeds and data are not yet touched) and saved at
BATCH_CHECKPOINT, after the batch's evaluation. Leaves when to save to `save_policy`, what a save holds besides tensors
to `run_state`, and how the log travels to `carried_log`.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint.manifest import Manifest, Segment, Timestamp, decode_segment, encode_segment
from llmfoundry_lite.checkpoint.restore import Restored, load, load_newest
from llmfoundry_lite.checkpoint.save import About, Saved, Saver, open_saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, is_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.checkpoint.where import folder_of_checkpoints, put_tokenizer
from llmfoundry_lite.config.changes import Change, find_changes, find_other_model
from llmfoundry_lite.config.schema import TrainConfig, as_dict, parse_seconds
from llmfoundry_lite.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, UserError, printable
from llmfoundry_lite.ranks.codec import Item, decode_value, encode_value
from llmfoundry_lite.ranks.ending import Preempted
from llmfoundry_lite.ranks.exchange import broadcast_json, raise_on_all_ranks
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.agreement import Agreement
from llmfoundry_lite.training.carried_log import CarriedLog
from llmfoundry_lite.training.gradients import GradientStep
from llmfoundry_lite.training.loggers import SAVED, RunLog
from llmfoundry_lite.training.preemption import Preemption
from llmfoundry_lite.training.run_state import RunState, chosen_options
from llmfoundry_lite.training.save_policy import SavePolicy
from llmfoundry_lite.training.segments import build_segment, find_differences
from llmfoundry_lite.training.start import Start, check_fit

PAUSE_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Before the last save is made again: the first time, the second, …; the last one from then on."""


class OtherIslands(Protocol):
    """What saving asks of a run that several islands train."""

    @property
    def this_one_saves(self) -> bool: ...

    @property
    def has_lost_the_others(self) -> bool: ...

    @property
    def trained(self) -> dict[str, dict[str, Any]]:
        """Each island that has trained since this one began: its machine, and its rows since then."""
        ...


class Checkpointing(Callback):
    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        gradient_step: GradientStep,
        preemption: Preemption,
        agreement: Agreement,
        start: Start,
        islands: OtherIslands | None = None,
    ):
        self.islands = islands
        """Of which one saves; None: this launch trains alone."""
        self.config = config
        self.model = model
        self.preemption = preemption
        self.agreement = agreement
        self.store = CheckpointStore(config.checkpoint_folder)
        self.policy = SavePolicy(config, preemption, agreement)
        self.run_state = RunState(config, gradient_step)
        self.log = CarriedLog(config, self.store.root)
        self.begins = start
        self.check_fit = partial(check_fit, config, start.fingerprints)
        self.segments: tuple[Segment, ...] = ()
        self.changes: list[Change] = []
        """What this launch does otherwise than the one it carries on, by being told so."""
        self.has_tokenizer_there = False
        self.wandb_run_id: str | None = None
        self.was_stopped = False
        self.was_preempted_by = ""
        self.last_saved_batch = -1
        """Its save has begun at least."""
        self.published_batch = -1
        """Batch of the newest checkpoint that this launch knows of in the run's folder; -1 for none."""
        self.newest_lease: int | None = None
        """On rank 0: the store's when this island was told to save."""

    # -------------------------------------------------------------------------------------------------- restore

    def after_load(self, state: State, logger: Logger) -> None:
        self.saver: Saver = open_saver(self.store, after_publish=self._after_publish, takes_lease=self.islands is None)
        self.agreement.is_writing = lambda: self.saver.is_writing
        self.agreement.is_saving = lambda: self.saver.is_saving
        rates = [chosen_options(group) for group in state.optimizers[0].param_groups]
        restored = self._restore(state)
        if restored is not None and restored.manifest is not None:
            carries_on = self.begins.is_own or not self.config.load_weights_only
            there, here = restored.manifest.config or {}, as_dict(self.config)
            if carries_on:
                self.changes = find_changes(there, here)["by being said"]
            elif others := find_other_model(there, here):
                restored.notes.append(f"the checkpoint's model differs: {', '.join(map(str, others))}")
            self._say(*restored.notes, f"carrying on from {restored.url}" + self._differences(restored.manifest, state))
            if carries_on:
                for group, options in zip(state.optimizers[0].param_groups, rates, strict=True):
                    group.update(options)
                self._carry_on(restored.url, restored.manifest, state)
            self.saver.parent_save_id = restored.manifest.save_id
        if self.begins.note:
            self._say(self.begins.note)
        self._begin(state)

    def _begin(self, state: State) -> None:
        """With the batch after this one, the part of this launch begins."""
        self.first_batch = int(state.timestamp.batch) + 1
        self.last_saved_batch = int(state.timestamp.batch) if self.first_batch > 1 else -1
        self.published_batch = self.last_saved_batch if self.begins.is_own else -1
        self.started_at = state.timestamp
        self.policy.start(state.timestamp)

    def _carry_on(self, url: str, manifest: Manifest, state: State) -> None:
        self._say(*self.run_state.restore(manifest.scalars, state))
        log = self.log.restore(url)
        if log is not None:
            self._say(*log.notes)
            if self.begins.is_own:  # later checkpoints of this folder may refer to the log's parts
                self.saver.log_parts = log.parts
        if manifest.run_name == self.config.run_name:
            self.wandb_run_id = manifest.scalars.get("wandb_run_id")
        self.segments = manifest.segments

    def _differences(self, manifest: Manifest, state: State) -> str:
        if not manifest.segments:
            return ""
        batch, is_auto = manifest.timestamp.batch, self.config.device_train_microbatch_size == "auto"
        size = None if is_auto else int(state.device_train_microbatch_size or 0)
        here = build_segment(self.config, self.model, first_batch=batch, last_batch=batch, microbatch_size=size)
        changed = [*map(str, self.changes), *find_differences(manifest.segments[-1], here)]
        if manifest.run_name != self.config.run_name:
            changed.insert(0, f"run_name {manifest.run_name} -> {self.config.run_name}")
        return f" ({', '.join(changed)})" if changed else ""

    def _restore(self, state: State) -> Restored | None:
        optimizer = state.optimizers[0]
        if self.begins.is_own:
            restored = load_newest(
                self.store, self.model.model, optimizer, lease=self.saver.lease, check=self.check_fit
            )
            if restored.manifest is None:
                raise CheckpointError(
                    f"{self.store.root.url}: no checkpoint is intact ({'; '.join(restored.notes)}); "
                    "move the folder away to start again from batch 1"
                )
            return restored
        if self.config.load_path is None:
            return None
        return self._load_path(self.config.load_path, None if self.config.load_weights_only else optimizer)

    def _load_path(self, where: str, optimizer: Optimizer | None) -> Restored:
        """`where` is one checkpoint, or a folder or run whose newest intact one is meant."""
        options: dict[str, Any] = {"cast": self.config.load_cast, "ignore_keys": tuple(self.config.load_ignore_keys)}
        if not self.config.load_weights_only:
            options["check"] = self.check_fit
        found, error = None, None
        try:
            if dist.get_rank() == 0:
                found = [where, True] if is_checkpoint(where) else [folder_of_checkpoints(where), False]
        except CheckpointError as caught:
            error = caught
        raise_on_all_ranks(error)
        url, is_one = broadcast_json(found)
        if is_one:
            return Restored(load(url, self.model.model, optimizer, **options), url, [])
        restored = load_newest(CheckpointStore(url), self.model.model, optimizer, **options)
        if restored.manifest is None:
            raise CheckpointError(f"load_path: {url} holds no intact checkpoint ({'; '.join(restored.notes)})")
        return restored

    # ----------------------------------------------------------------------------------------------------- save

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._settle(partial(self.saver.poll, all_written=self.agreement.all_written), logger)
        decision = self.policy.decide(state)
        self.run_state.owes_evaluation = decision.owes_evaluation
        if decision.saves:
            self._save(state, logger)
        self.was_preempted_by, self.was_stopped = decision.preempted_by, decision.stops
        if decision.preempted_by or decision.stops:
            state.stop_training()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self.leave_if_asked(state, logger)

    def leave_if_asked(self, state: State, logger: Logger) -> None:
        """A long evaluation does not hold the exit: the batch before it is recorded and saved, and the run leaves.
        The next launch evaluates. Every rank must call this at the same places."""
        preempted_by = self.preemption.agree_on_reason()
        if not preempted_by:
            return
        self.was_preempted_by = preempted_by
        if int(state.timestamp.batch) >= self.first_batch:
            for destination in logger.destinations:
                if isinstance(destination, RunLog):
                    destination.write(state)
            self.run_state.owes_evaluation = True
            self._save(state, logger)
            self._finish(state, logger)
            for destination in logger.destinations:
                destination.fit_end(state, logger)
        raise Preempted(self.preempted_text(state), orderly=True)

    def preempted_text(self, state: State) -> str:
        saved = f"saved as ba{self.last_saved_batch}" if self.last_saved_batch > 0 else "nothing to save yet"
        if not self.saves_here:
            saved = "the other islands carry on"
        again = "run the same command again" + ("" if self.config.autoresume else " with autoresume=true")
        why = self.preemption.because(self.was_preempted_by)
        return f"{why} at batch {int(state.timestamp.batch)}, {saved}; {again}"

    def save_before_leaving(self, reason: str, state: State, logger: Logger) -> str:
        """In the middle of a batch, of which nothing has been trained yet; what to say when leaving."""
        saves = self.saves_here and not self._is_followed()
        try:
            if saves and int(state.timestamp.batch) > self.last_saved_batch:
                self._save(state, logger)
            self._finish(state, logger)
        except CheckpointError:
            if not self._is_followed():
                raise
            saves = False
        saved = f"saved as ba{self.last_saved_batch}" if saves else "another island saves"
        return f"{reason} after batch {int(state.timestamp.batch)}, {saved}; run the same command again"

    def fit_end(self, state: State, logger: Logger) -> None:
        self._finish(state, logger)

    def would_lose(self, state: State) -> bool:
        """Whether batches have been trained, and no checkpoint of this run stands to carry on from."""
        return self.saves_here and self.published_batch < 0 and int(state.timestamp.batch) >= self.first_batch

    @property
    def saves_here(self) -> bool:
        return self.islands is None or self.islands.this_one_saves

    def note_leases(self) -> None:
        """This island is told to save from now on."""
        if dist.get_rank() == 0:
            with suppress(OSError):
                self.newest_lease = self.store.leases.highest()

    def _is_followed(self) -> bool:
        """Whether another island has begun to save since: the others carry on without this one, and taking the lease
        from them would end them. Every rank must ask."""
        is_followed = False
        if dist.get_rank() == 0:
            known = self.saver.lease.epoch if self.saver.lease is not None else self.newest_lease
            with suppress(OSError):
                is_followed = known is not None and self.store.leases.highest() > known
        return broadcast_json(is_followed)

    def _is_left_behind(self, islands: OtherIslands) -> bool:
        """As `_is_followed`, of an island that has heard of its own loss already."""
        return broadcast_json(islands.has_lost_the_others) and self._is_followed()

    def _save(self, state: State, logger: Logger) -> None:
        if not self.saves_here or (self.islands is not None and self._is_left_behind(self.islands)):
            return
        if not self.saver.has_lease and self._settle(
            partial(self.saver.take_lease, steal_from_live_writer=True), logger
        ):
            return
        save = partial(self.saver.save, self.model.model, state.optimizers[0], self._about(state))
        if self._settle(save, logger) is not None:  # the one before failed, and this one has not begun
            save()
        self.last_saved_batch = int(state.timestamp.batch)
        if self.policy.timer is not None:
            self.policy.timer.note_begun()

    def _settle(self, step: Callable[[], Saved | None], logger: Logger) -> UserError | None:
        """Take a step of a save. A fault that may pass is told and returned: the run goes on, and saves later. Every
        rank must come here together."""
        try:
            self._log(step(), logger)
        except UserError as error:
            if not error.is_transient:
                raise
            stands = f"ba{self.published_batch} stands" if self.published_batch > 0 else "there is no save yet"
            self._say(f"warning: {error}; {stands}, and the next save tries again")
            self.last_saved_batch = self.published_batch
            return error
        return None

    def _finish(self, state: State, logger: Logger) -> None:
        """Until the save in flight is published. It is the last one: after a fault that may pass it is made again."""
        began = time.monotonic()
        for attempt in itertools.count():
            error = self._settle(self.saver.wait, logger)
            if error is None:
                return
            left = began + parse_seconds(self.config.retry_for) - time.monotonic()
            pause = broadcast_json(min(left, PAUSE_SECONDS[min(attempt, len(PAUSE_SECONDS) - 1)]))
            if pause <= 0:
                raise error
            self._say(f"the next save is in {pause:.3g} s; retry_for is {self.config.retry_for}")
            time.sleep(pause)
            self._save(state, logger)

    def _log(self, saved: Saved | None, logger: Logger) -> None:
        if saved is None:
            return
        metrics = {
            "checkpoint/stall_seconds": saved.stall_seconds,
            "checkpoint/durable_seconds": saved.durable_seconds,
            SAVED: saved.num_bytes,
        }
        self._say(f"saved {saved.name}")
        self.published_batch = int(saved.name.removeprefix("ba"))
        timer = self.policy.timer
        if timer is not None:
            news = timer.note_published(saved.stall_seconds, saved.durable_seconds)
            metrics["checkpoint/cost_seconds"] = timer.cost_seconds
            metrics["checkpoint/interval_seconds"] = timer.seconds
            self._say(*([news] if news else []))
        logger.log_metrics(metrics)

    def _after_publish(self, lease: Lease) -> None:
        """In the background, on rank 0, after each save."""
        self.preemption.note_saved(f"ba{self.last_saved_batch}")
        self._take_tokenizer_along()
        self._remove_old(lease)

    def _take_tokenizer_along(self) -> None:
        """Once: for those who evaluate or export in another folder or on another machine."""
        if self.has_tokenizer_there or not self.begins.fingerprints:
            return
        try:
            put_tokenizer(self.store.root.url, load_tokenizer(self.config.tokenizer.name).files(), last=TOKENIZER_FILE)
            self.has_tokenizer_there = True
        except (OSError, UserError) as error:
            print(f"the tokenizer was not copied beside the checkpoints: {error}", flush=True)

    def _remove_old(self, lease: Lease) -> None:
        """Another writer is an error, a file that stays is not."""
        if self.config.save_num_checkpoints_to_keep < 0:
            return
        try:
            self.store.prune(
                lease,
                keep_newest=self.config.save_num_checkpoints_to_keep,
                keep_every_batches=self.config.save_keep_every_batches,
                verify=check_present,
            )
        except CheckpointError as error:
            if not error.is_transient:
                self.store.check(lease)
            self._say(f"old checkpoints were not removed: {error}")

    def _about(self, state: State) -> About:
        stamp = state.timestamp
        return About(
            timestamp=Timestamp(
                epoch=int(stamp.epoch), batch=int(stamp.batch), sample=int(stamp.sample), token=int(stamp.token)
            ),
            run_name=self.config.run_name,
            fingerprints=self.begins.fingerprints,
            config=as_dict(self.config),
            segments=(*self.segments, self._segment(state)),
            scalars=self.run_state.collect(state),
            log=self.log.until(int(stamp.batch)),
        )

    def _segment(self, state: State) -> Segment:
        """Of this launch so far."""
        seconds = (state.timestamp.total_wct - self.started_at.total_wct).total_seconds()
        tokens = int(state.timestamp.token) - int(self.started_at.token)
        return build_segment(
            self.config,
            self.model,
            first_batch=self.first_batch,
            last_batch=int(state.timestamp.batch),
            microbatch_size=int(state.device_train_microbatch_size or 0),
            tokens_per_second=tokens / seconds if seconds else None,
            save_interval_seconds=self.policy.timer.seconds if self.policy.timer is not None else None,
            changes=self.changes,
            islands=self.islands.trained if self.islands is not None else None,
        )

    def _say(self, *lines: str) -> None:
        if dist.get_rank() == 0:
            for line in lines:
                print(printable(line), flush=True)

    # ------------------------------------------------------------------------------------------------ joining a run

    def tell(self, state: State) -> dict[str, Any]:
        """What a save holds besides tensors and optimizer, as JSON can hold it: for islands that join."""
        segments = (*self.segments, self._segment(state)) if int(state.timestamp.batch) >= self.first_batch else ()
        return {
            "scalars": encode_value(self.run_state.collect(state)),
            "segments": [encode_segment(segment) for segment in segments],
        }

    def take_over(self, told: dict[str, Any], state: State) -> None:
        """Carry on from what another island has told."""
        self._say(*self.run_state.restore(decode_value(told["scalars"]), state))
        self.segments = tuple(decode_segment(Item(one, "segment")) for one in told["segments"])
        self._begin(state)
