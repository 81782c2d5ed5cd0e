"""When a run saves, what it saves besides tensors, and how it carries on: Composer's events <-> checkpoint package.

State is restored at AFTER_LOAD (the model is sharded by then, seeds and data are not yet touched) and saved at
BATCH_CHECKPOINT, after the batch's evaluation. No generator's state is saved: everything random is a function of
seed and position.
"""

import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State, Timestamp
from composer.loggers import Logger
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import manifest as portable
from llmfoundry_lite.checkpoint.folders import Folder, LocalFolder
from llmfoundry_lite.checkpoint.log_parts import read_log
from llmfoundry_lite.checkpoint.manifest import Manifest, Segment
from llmfoundry_lite.checkpoint.restore import Restored, load, load_newest
from llmfoundry_lite.checkpoint.save import About, Saved, Saver, open_saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, is_checkpoint, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.checkpoint.where import folder_of_checkpoints, put_tokenizer
from llmfoundry_lite.config.changes import Change, find_changes
from llmfoundry_lite.config.schema import Duration, TrainConfig, as_dict
from llmfoundry_lite.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from llmfoundry_lite.errors import CheckpointError, UserError, printable
from llmfoundry_lite.ranks.ending import Preempted, leaving_because
from llmfoundry_lite.ranks.exchange import agree, tell_all
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.gradients import GradientStep
from llmfoundry_lite.training.loggers import METRICS, SAVED, RunLog, log_until, wandb_run_id
from llmfoundry_lite.training.preemption import REASONS, Preemption
from llmfoundry_lite.training.schedule import elapsed, is_evaluation_due
from llmfoundry_lite.training.segments import build_segment, find_differences
from llmfoundry_lite.training.start import Start, check_fit

COUNTS = ("iteration", "epoch", "batch", "sample", "token")
COUNTS_WITHIN = (
    *("epoch_in_iteration", "token_in_iteration"),
    *("batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
)
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")


class Checkpointing(Callback):
    """Restores once, saves at every `save_interval` and at the end of a launch."""

    def __init__(
        self,
        config: TrainConfig,
        model: LanguageModel,
        gradient_step: GradientStep,
        preemption: Preemption,
        start: Start,
    ):
        self.config = config
        self.model = model
        self.gradient_step = gradient_step
        self.preemption = preemption
        self.store = CheckpointStore(config.checkpoint_folder)
        self.interval = Duration.parse(config.save_interval)
        self.end = Duration.parse(config.max_duration)
        self.stop_after = Duration.parse(config.stop_after) if config.stop_after is not None else None
        self.begins = start
        self.check_fit = partial(check_fit, config, start.fingerprints)
        self.segments: tuple[Segment, ...] = ()
        self.changes: list[Change] = []
        """What this launch does otherwise than the one it carries on, by being told so."""
        self.has_tokenizer_there = False
        self.log_path = Path(config.run_folder) / METRICS
        self.carries_log = not is_inside(self.store.root, Path(config.run_folder))
        """Checkpoints that lie elsewhere than the log take it along, for the machine that carries on."""
        self.history: bytes | None = None
        """The log that came with the checkpoint, on rank 0."""
        self.wandb_run_id: str | None = None
        self.was_stopped = False
        self.was_preempted_by = ""
        self.last_saved_batch = -1
        self.eval_subset_samples: int | None = None
        """What the run has evaluated on elsewhere; None: what the configuration says here."""
        self.owes_evaluation = False
        """The evaluation that was due after the batch of the checkpoint was not made, or not to its end."""

    # -------------------------------------------------------------------------------------------------- restore

    def after_load(self, state: State, logger: Logger) -> None:
        self.saver: Saver = open_saver(self.store, after_publish=self._after_publish)
        rates = [chosen_options(group) for group in state.optimizers[0].param_groups]
        restored = self._restore(state)
        if restored is not None and restored.manifest is not None:
            carries_on = self.begins.is_own or not self.config.load_weights_only
            if carries_on:
                self.changes = find_changes(restored.manifest.config, as_dict(self.config))["by being said"]
            self._say(*restored.notes, f"carrying on from {restored.url}" + self._differences(restored.manifest, state))
            if carries_on:
                for group, options in zip(state.optimizers[0].param_groups, rates, strict=True):
                    group.update(options)
                self._restore_scalars(restored.manifest, state)
                self._restore_log(restored, self.begins.is_own)
                self.segments = restored.manifest.segments
            self.saver.parent_save_id = restored.manifest.save_id
        if self.begins.note:
            self._say(self.begins.note)
        self.first_batch = int(state.timestamp.batch) + 1
        self.last_saved_batch = int(state.timestamp.batch) if self.first_batch > 1 else -1
        self.started_at = state.timestamp

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
        agree(error)
        url, is_one = tell_all(found)
        if is_one:
            return Restored(load(url, self.model.model, optimizer, **options), url, [])
        restored = load_newest(CheckpointStore(url), self.model.model, optimizer, **options)
        if restored.manifest is None:
            raise CheckpointError(f"load_path: {url} holds no intact checkpoint ({'; '.join(restored.notes)})")
        return restored

    def _restore_scalars(self, manifest: Manifest, state: State) -> None:
        scalars = manifest.scalars
        clocks = {name: datetime.timedelta(seconds=scalars["timestamp"][name]) for name in CLOCKS}
        counts = {name: scalars["timestamp"][name] for name in (*COUNTS, *COUNTS_WITHIN)}
        state.timestamp = Timestamp(**counts, **clocks)  # pyright: ignore[reportArgumentType]
        dataset = getattr(state.train_dataloader, "dataset", None)
        if scalars["data"] is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(scalars["data"])  # type: ignore[union-attr]
            # Without this the Trainer would skip the batches that the data set has skipped already.
            state.dataset_resumption["train"] = True
        self.owes_evaluation = scalars["owes_evaluation"]
        self._restore_eval_subset(scalars["eval_subset"], state)
        if self.gradient_step.scaler is not None and scalars["loss_scaler"] is not None:
            self.gradient_step.scaler.load_state_dict(scalars["loss_scaler"])
        for callback in self._users_callbacks(state):
            saved = scalars["callbacks"].get(_name(callback))
            if saved:
                callback.load_state_dict(saved)

    def _restore_eval_subset(self, saved: list[int] | None, state: State) -> None:
        """As many samples as before, though a batch of evaluation has as many more as there are devices."""
        here = self._eval_subset(state)
        if saved is None or here is None or saved[0] != here[0]:  # the user has asked for something else now
            return
        (count, num_samples), batch_size = saved, here[1] // here[0]
        self.eval_subset_samples = num_samples
        num_batches = max(1, round(num_samples / batch_size))
        state.evaluators[0].subset_num_batches = num_batches
        if num_batches * batch_size != num_samples:
            self._say(
                f"eval_subset_num_batches: {count} were {num_samples} samples, here {num_batches * batch_size} are "
                f"evaluated, until device_eval_batch_size x devices divides {num_samples}"
            )

    def _eval_subset(self, state: State) -> list[int] | None:
        """[eval_subset_num_batches, samples of so many batches]; None if all are evaluated."""
        count = self.config.eval_subset_num_batches
        loader = getattr(state.evaluators[0].dataloader, "dataloader", None) if state.evaluators else None
        batch_size = getattr(getattr(loader, "dataset", None), "global_batch_size", None)
        return [count, self.eval_subset_samples or count * batch_size] if count > 0 and batch_size else None

    def _restore_log(self, restored: Restored, is_own: bool) -> None:
        """`is_own`: from this run's folder, where later checkpoints may refer to the log's parts."""
        assert restored.manifest is not None
        error = None
        try:
            if dist.get_rank() == 0:
                log = read_log(open_checkpoint(restored.url))
                self.history = log.content
                self._say(*log.notes)
                if is_own:
                    self.saver.log_parts = log.parts
        except CheckpointError as caught:
            error = caught
        agree(error)
        if restored.manifest.run_name == self.config.run_name:
            self.wandb_run_id = restored.manifest.scalars.get("wandb_run_id")

    # ----------------------------------------------------------------------------------------------------- save

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._log(self.saver.poll(), logger)
        is_last = elapsed(state, self.end.unit) >= self.end.value
        stops = self.stop_after is not None and self._elapsed_in_launch(state) >= self.stop_after.value
        before = elapsed(state, self.interval.unit, state.previous_timestamp) // self.interval.value
        due = elapsed(state, self.interval.unit) // self.interval.value > before
        agreed = REASONS[self.preemption.agreed]
        self.owes_evaluation = bool(agreed) and is_evaluation_due(self.config, state)
        preempted_by = agreed if not is_last or self.owes_evaluation else ""
        if due or is_last or stops or preempted_by:
            self._save(state, logger)
        if preempted_by:
            self.was_preempted_by = preempted_by
            state.stop_training()
        elif stops and not is_last:
            self.was_stopped = True
            state.stop_training()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self.leave_if_asked(state, logger)

    def leave_if_asked(self, state: State, logger: Logger) -> None:
        """A long evaluation does not hold the exit: the batch before it is recorded and saved, and the run leaves.
        The next launch evaluates. Every rank must call this at the same places."""
        preempted_by = self.preemption.agree()
        if not preempted_by:
            return
        self.was_preempted_by = preempted_by
        if int(state.timestamp.batch) >= self.first_batch:
            for destination in logger.destinations:
                if isinstance(destination, RunLog):
                    destination.write(state)
            self.owes_evaluation = True
            self._save(state, logger)
            self._finish(logger)
            for destination in logger.destinations:
                destination.fit_end(state, logger)
        raise Preempted(self.preempted_text(state), orderly=True)

    def preempted_text(self, state: State) -> str:
        saved = f"saved as ba{self.last_saved_batch}" if self.last_saved_batch > 0 else "nothing to save yet"
        again = "run the same command again" + ("" if self.config.autoresume else " with autoresume=true")
        why = leaving_because(self.was_preempted_by)
        return f"{why} at batch {int(state.timestamp.batch)}, {saved}; {again}"

    def fit_end(self, state: State, logger: Logger) -> None:
        self._finish(logger)

    def _save(self, state: State, logger: Logger) -> None:
        self._log(self.saver.save(self.model.model, state.optimizers[0], self._about(state)), logger)
        self.last_saved_batch = int(state.timestamp.batch)

    def _finish(self, logger: Logger) -> None:
        self._log(self.saver.wait(), logger)

    def _log(self, saved: Saved | None, logger: Logger) -> None:
        if saved is None:
            return
        logger.log_metrics(
            {
                "checkpoint/stall_seconds": saved.stall_seconds,
                "checkpoint/durable_seconds": saved.durable_seconds,
                SAVED: saved.num_bytes,
            }
        )
        self._say(f"saved {saved.name}")

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
            self.store.check(lease)
            self._say(f"old checkpoints were not removed: {error}")

    def _about(self, state: State) -> About:
        stamp = state.timestamp
        scalars = {
            "timestamp": {
                **{name: int(getattr(stamp, name)) for name in (*COUNTS, *COUNTS_WITHIN)},
                **{name: getattr(stamp, name).total_seconds() for name in CLOCKS},
            },
            "data": self._data_state(state),
            "loss_scaler": self.gradient_step.scaler.state_dict() if self.gradient_step.scaler else None,
            "seed": self.config.seed,
            "owes_evaluation": self.owes_evaluation,
            "eval_subset": self._eval_subset(state),
            "wandb_run_id": wandb_run_id(Path(self.config.run_folder)),
            "callbacks": {_name(c): c.state_dict() for c in self._users_callbacks(state)},
        }
        return About(
            timestamp=portable.Timestamp(
                epoch=int(stamp.epoch), batch=int(stamp.batch), sample=int(stamp.sample), token=int(stamp.token)
            ),
            run_name=self.config.run_name,
            fingerprints=self.begins.fingerprints,
            config=as_dict(self.config),
            segments=(*self.segments, self._segment(state)),
            scalars=scalars,
            log=partial(log_until, self.log_path, int(stamp.batch)) if self.carries_log else None,
        )

    def _data_state(self, state: State) -> dict[str, Any] | None:
        dataset = getattr(state.train_dataloader, "dataset", None)
        if not hasattr(dataset, "state_dict"):
            return None
        return dataset.state_dict(int(state.timestamp.sample_in_epoch), True)  # type: ignore[union-attr]

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
            changes=self.changes,
        )

    def _users_callbacks(self, state: State) -> list[Callback]:
        wanted = {name.rsplit(":", 1)[-1] for name in self.config.callbacks.extra}
        return [c for c in state.callbacks if type(c).__name__ in wanted]

    def _elapsed_in_launch(self, state: State) -> float:
        assert self.stop_after is not None
        return elapsed(state, self.stop_after.unit) - elapsed(state, self.stop_after.unit, self.started_at)

    def _say(self, *lines: str) -> None:
        if dist.get_rank() == 0:
            for line in lines:
                print(printable(line), flush=True)


def _name(callback: Callback) -> str:
    return f"{type(callback).__module__}:{type(callback).__qualname__}"


def is_inside(folder: Folder, outer: Path) -> bool:
    return isinstance(folder, LocalFolder) and folder.path.resolve().is_relative_to(outer.resolve())


def chosen_options(group: dict[str, Any]) -> dict[str, Any]:
    """What the configuration says of a group of the optimizer, whatever a checkpoint says: see `config.changes`."""
    chosen = {key: group[key] for key in ("lr", "weight_decay") if key in group}
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in chosen.items()}
    return {**values, "initial_lr": values["lr"]}
