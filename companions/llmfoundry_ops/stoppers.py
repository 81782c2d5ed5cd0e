"""Composer's `early_stopper` and LLM Foundry's `kill_loss_spike`, by losses that are the same on every rank.

Neither has state to save: a launch that carries on reads the losses before it from the run's log.
"""

import math
from collections import deque
from pathlib import Path

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger

from llmfoundry_lite.checkpoint.run_log import METRICS, read_lines
from llmfoundry_lite.config.schema import TrainConfig, data_label
from llmfoundry_lite.errors import ConfigError, DivergedError, join_with_or
from llmfoundry_lite.ranks.exchange import broadcast_json
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradient_step import LOSS
from llmfoundry_lite.training.mirrors import in_order
from llmfoundry_lite.training.run_folder import log_until
from llmfoundry_lite.training.schedule import progress_of

SHARE_OF_RUN = 0.05
"""Share of the run in the window of `kill_loss_spike`, where none is given and that is more than the default."""
DEFAULT_WINDOW, DEFAULT_CAP = 100, 10.0


def read_losses(config: TrainConfig, checkpointing: Checkpointing, state: State, key: str) -> list[list[float]]:
    """Return batch, epoch and loss of each record with a `key`, up to the batch that this launch carries on from."""
    batch, found = int(state.timestamp.batch), list[list[float]]()
    if dist.get_rank() == 0 and batch:
        content = checkpointing.history or log_until(Path(config.run_folder) / METRICS, batch)
        records = in_order(record for _, record in read_lines(content))
        found = [[r["batch"], r["time/epoch"], r[key]] for r in records if r.get(key) is not None and "time/epoch" in r]
    return broadcast_json(found)


class EarlyStopper(Callback):
    """Ends the run, saved, once a validation loss has not fallen by `min_delta` for more than `patience`."""

    def __init__(self, config: TrainConfig, checkpointing: Checkpointing):
        block = config.callbacks.early_stopper
        assert block is not None
        self.config, self.checkpointing, self.block = config, checkpointing, block
        self.label, self.patience = block.dataloader_label, block.patience
        labels = [data_label(key) for key in config.validation if config.evaluates]
        if self.label not in ("train", *labels):
            raise ConfigError(
                f"callbacks.early_stopper.dataloader_label: {self.label!r} given, expected "
                f"{join_with_or([*labels, 'train'])}"
            )
        self.best, self.best_at = math.inf, (0, 0)
        self.epoch, self.losses = 0, list[float]()

    def after_load(self, state: State, logger: Logger) -> None:
        key = LOSS if self.label == "train" else f"{self.label}/loss"
        for batch, epoch, loss in read_losses(self.config, self.checkpointing, state, key):
            self._see(int(batch), int(epoch), loss)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.label == "train":
            loss = float(state.total_loss_dict[LOSS])
            self._see(int(state.timestamp.batch), int(state.timestamp.epoch), loss)
            self.tell()

    def eval_end(self, state: State, logger: Logger) -> None:
        if state.dataloader_label == self.label:
            loss = float(state.eval_metrics[self.label]["loss"].compute())
            self._see(int(state.timestamp.batch), int(state.timestamp.epoch), loss)
            self.tell()

    def _see(self, batch: int, epoch: int, loss: float) -> None:
        if self.label == "train":
            self.losses.append(loss)
            if epoch == self.epoch:
                return
            *done, last = self.losses
            self.epoch, self.losses = epoch, [last]
            if not done:  # the log of the previous epoch is lost
                return
            loss = sum(done) / len(done)
        value = math.exp(loss) if self.block.monitor == "LanguagePerplexity" else loss
        if value < self.best and self.best - value > self.block.min_delta:
            self.best, self.best_at = value, (batch, epoch)
        since = epoch - self.best_at[1] if self.patience.unit == "ep" else batch - self.best_at[0]
        why = f"early_stopper: {self.label}/loss has not fallen for more than {self.patience} since batch"
        self.checkpointing.policy.stop_reason = f"{why} {self.best_at[0]}" if since > self.patience.value else ""

    def tell(self) -> None:
        if self.checkpointing.policy.stop_reason:
            self.checkpointing.print_on_rank_0(self.checkpointing.policy.stop_reason)


class KillLossSpike(Callback):
    """Warns, or raises DivergedError, when the loss has been an outlier for more than `patience` batches, or half of a
    window is high (from the second window on). A loss that is not finite is skipped."""

    def __init__(self, config: TrainConfig, checkpointing: Checkpointing):
        block = config.callbacks.kill_loss_spike
        assert block is not None
        self.config, self.checkpointing, self.block = config, checkpointing, block
        self.max_duration = config.max_duration
        self.window = deque[float]()
        self.size, self.num_outliers, self.loss_cap, self.problem = 0, 0, math.inf, ""

    def after_load(self, state: State, logger: Logger) -> None:
        for batch, _, loss in read_losses(self.config, self.checkpointing, state, LOSS):
            self._see(state, int(batch), loss)

    def batch_end(self, state: State, logger: Logger) -> None:
        before = self.problem
        self._see(state, int(state.timestamp.batch), float(state.total_loss_dict[LOSS]))
        if not self.problem:
            return
        if not self.block.log_only:
            for destination in logger.destinations:
                destination.batch_checkpoint(state, logger)
            raise DivergedError(f"{self.problem}; lower the learning rate, and carry on from a checkpoint before it")
        if not before:
            self.checkpointing.print_on_rank_0(f"warning: {self.problem}")

    def _see(self, state: State, batch: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        if not self.size:
            given = self.block.window_size
            num_batches = int(state.timestamp.batch) / progress_of(state, self.max_duration)
            self.size = max(given, round(SHARE_OF_RUN * num_batches)) if given == DEFAULT_WINDOW else given
            self.window = deque(maxlen=self.size)
        size = self.size
        if len(self.window) == size:
            if math.isinf(self.loss_cap):
                cap, highest = self.block.loss_cap, max(self.window)
                self.loss_cap = min(highest, cap) if cap == DEFAULT_CAP else cap
            limit = sum(self.window) / size * self.block.outlier_multiplier
            self.num_outliers = self.num_outliers + 1 if loss >= limit else 0
            num_high = sum(one > self.loss_cap for one in self.window)
            self.problem, where = "", f"kill_loss_spike: batch {batch}: the loss, {loss:.4f},"
            if self.num_outliers > self.block.patience:
                self.problem = f"{where} has been above {limit:.4f} for {self.num_outliers} batches"
            elif batch >= 2 * size and num_high >= size / 2:
                self.problem = f"{where} is high: {num_high} of {size} before it are above {self.loss_cap:.4f}"
        self.window.append(loss)
