"""Composer's `early_stopper` and LLM Foundry's `kill_loss_spike`: callbacks that end a run by its losses.

The losses are the same on every rank, so that every rank comes to the same decision without a collective. Neither
callback saves a state of its own: a launch that resumes reads the earlier losses from the run's log (`read_losses`).
"""

import math
from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger

from llmfoundry_lite.checkpoint.run_log import METRICS, read_lines
from llmfoundry_lite.config.schema import TrainConfig, data_label
from llmfoundry_lite.errors import ConfigError, DivergedError, join_with_or
from llmfoundry_lite.ranks.exchange import broadcast_json
from llmfoundry_lite.training.checkpointing import Checkpointing
from llmfoundry_lite.training.gradient_step import LOSS
from llmfoundry_lite.training.mirrors import MAX_EXPONENT, in_order
from llmfoundry_lite.training.run_folder import log_until
from llmfoundry_lite.training.schedule import progress_of

SHARE_OF_RUN = 0.05
"""Share of the run in the window of `kill_loss_spike`, if the user has not set a size and the share is larger."""
DEFAULT_WINDOW = 100
DEFAULT_CAP = 10.0
"""LLM Foundry's defaults. A user who gives these values is taken not to have set them."""


class LoggedLoss(NamedTuple):
    """A loss of an earlier launch. Numbers are floats, because they come from JSON."""

    batch: float
    epoch: float
    loss: float


def read_losses(config: TrainConfig, checkpointing: Checkpointing, state: State, key: str) -> list[LoggedLoss]:
    """Return the losses under `key` in the run's log, up to the batch from which this launch resumes.

    Collective: rank 0 reads the log and sends the losses to the others. Empty at the beginning of a run.
    """
    batch = int(state.timestamp.batch)
    losses: list[list[float]] = []
    if dist.get_rank() == 0 and batch:
        content = checkpointing.history or log_until(Path(config.run_folder) / METRICS, batch)
        for record in in_order(record for _, record in read_lines(content)):
            if record.get(key) is not None and "time/epoch" in record:
                losses.append([record["batch"], record["time/epoch"], record[key]])
    return [LoggedLoss(*loss) for loss in broadcast_json(losses)]


class EarlyStopper(Callback):
    """Ends the run, with a save, once a loss has not fallen by `min_delta` for more than `patience`.

    The loss is computed on the validation data with the label `dataloader_label`. With the label `train`, it is the
    mean training loss of each epoch.
    """

    def __init__(self, config: TrainConfig, checkpointing: Checkpointing):
        """Raises ConfigError for a label that the run does not evaluate."""
        block = config.callbacks.early_stopper
        assert block is not None
        self.config = config
        self.checkpointing = checkpointing
        self.block = block
        self.label = block.dataloader_label
        self.patience = block.patience
        labels = [data_label(key) for key in config.validation if config.evaluates]
        if self.label not in ("train", *labels):
            raise ConfigError(
                f"callbacks.early_stopper.dataloader_label: {self.label!r} given, expected "
                f"{join_with_or([*labels, 'train'])}"
            )
        self.best = math.inf
        """The lowest value so far, of those that were lower by `min_delta` than the one before."""
        self.best_batch = 0
        self.best_epoch = 0
        """Time at which the best value was reached."""
        self.epoch = 0
        """Epoch of the newest loss. Used for the label `train`, as is `losses_of_epoch`."""
        self.losses_of_epoch: list[float] = []

    def after_load(self, state: State, logger: Logger) -> None:
        """Take the losses of earlier launches. Collective."""
        key = LOSS if self.label == "train" else f"{self.label}/loss"
        for logged in read_losses(self.config, self.checkpointing, state, key):
            self._add_loss(int(logged.batch), int(logged.epoch), logged.loss)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the training loss of a batch, if that is the one to watch."""
        if self.label == "train":
            self._add_loss_now(state, float(state.total_loss_dict[LOSS]))

    def eval_end(self, state: State, logger: Logger) -> None:
        """Take the loss of an evaluation, if that is the one to watch."""
        if state.dataloader_label == self.label:
            self._add_loss_now(state, float(state.eval_metrics[self.label]["loss"].compute()))

    def _add_loss_now(self, state: State, loss: float) -> None:
        """Take a loss of this launch, and print the reason if it ends the run."""
        self._add_loss(int(state.timestamp.batch), int(state.timestamp.epoch), loss)
        if self.checkpointing.policy.stop_reason:
            self.checkpointing.print_on_rank_0(self.checkpointing.policy.stop_reason)

    def _add_loss(self, batch: int, epoch: int, loss: float) -> None:
        """Update the best value, and set or clear the policy's `stop_reason`, which ends the run.

        `batch` and `epoch` are those after which the loss was computed.
        """
        if self.label == "train":
            self.losses_of_epoch.append(loss)
            if epoch == self.epoch:
                return
            # This loss is the first one after the end of an epoch, whose mean is now known.
            *finished_losses, first_loss = self.losses_of_epoch
            self.epoch = epoch
            self.losses_of_epoch = [first_loss]
            if not finished_losses:  # the log of the previous epoch is lost
                return
            loss = sum(finished_losses) / len(finished_losses)

        value = math.exp(min(loss, MAX_EXPONENT)) if self.block.monitor == "LanguagePerplexity" else loss
        if value < self.best and self.best - value > self.block.min_delta:
            self.best = value
            self.best_batch = batch
            self.best_epoch = epoch

        time_since_best = epoch - self.best_epoch if self.patience.unit == "ep" else batch - self.best_batch
        if time_since_best > self.patience.value:
            self.checkpointing.policy.stop_reason = (
                f"early_stopper: {self.label}/loss has not fallen for more than {self.patience} since batch "
                f"{self.best_batch}"
            )
        else:
            self.checkpointing.policy.stop_reason = ""


class KillLossSpike(Callback):
    """Warns, or ends the run with DivergedError, when the training loss has become too high.

    There are two signs. Either more than `patience` batches in a row had a loss of at least `outlier_multiplier` times
    the mean of the window, which has the losses of the batches before. Or, from the second window on, half of the
    losses in the window are above a cap: `loss_cap`, or the highest loss of the first window if that is lower and the
    user has not set a cap. Losses that are not finite are skipped.
    """

    def __init__(self, config: TrainConfig, checkpointing: Checkpointing):
        block = config.callbacks.kill_loss_spike
        assert block is not None
        self.config = config
        self.checkpointing = checkpointing
        self.block = block
        self.max_duration = config.max_duration
        self.window_size = 0
        """Batches in the window; 0 until the first loss, because it depends on the length of the run."""
        self.window: deque[float] = deque()
        """The losses of the last batches, without the newest one."""
        self.loss_cap = math.inf
        """Infinite until the window is full for the first time."""
        self.num_outliers = 0
        """Number of outliers in a row."""
        self.problem = ""
        """Why the loss of the newest batch is too high; empty if it is not."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Take the losses of earlier launches. Collective."""
        for logged in read_losses(self.config, self.checkpointing, state, LOSS):
            self._add_loss(state, int(logged.batch), logged.loss)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the loss of a batch. Warns at the first one of several with a problem, or raises DivergedError."""
        had_problem = bool(self.problem)
        self._add_loss(state, int(state.timestamp.batch), float(state.total_loss_dict[LOSS]))
        if not self.problem:
            return
        if not self.block.log_only:
            # The batch whose loss ends the run would not be logged otherwise.
            for destination in logger.destinations:
                destination.batch_checkpoint(state, logger)
            raise DivergedError(f"{self.problem}; lower the learning rate, and carry on from a checkpoint before it")
        if not had_problem:
            self.checkpointing.print_on_rank_0(f"warning: {self.problem}")

    def _add_loss(self, state: State, batch: int, loss: float) -> None:
        """Compare a batch's loss with the window, then add it to the window.

        Sets `problem` to a text if the loss shows one of the two signs of the class, and clears it otherwise. Nothing
        is compared before the window is full. Also counts outliers in a row (`num_outliers`), and sets `window_size`
        at the first loss and `loss_cap` when the first window is full.
        """
        if not math.isfinite(loss):
            return
        if not self.window_size:
            self.window_size = self._choose_window_size(state)
            self.window = deque(maxlen=self.window_size)

        if len(self.window) == self.window_size:
            # The first full window decides the cap, unless the user has set one.
            if math.isinf(self.loss_cap):
                is_default_cap = self.block.loss_cap == DEFAULT_CAP
                self.loss_cap = min(max(self.window), DEFAULT_CAP) if is_default_cap else self.block.loss_cap

            # First sign: this loss, and those right before it, are far above the mean of the window.
            limit = sum(self.window) / self.window_size * self.block.outlier_multiplier
            self.num_outliers = self.num_outliers + 1 if loss >= limit else 0
            # Second sign: half of the window is above the cap.
            num_high = sum(earlier_loss > self.loss_cap for earlier_loss in self.window)

            self.problem = ""
            subject = f"kill_loss_spike: batch {batch}: the loss, {loss:.4f},"
            if self.num_outliers > self.block.patience:
                self.problem = f"{subject} has been above {limit:.4f} for {self.num_outliers} batches"
            elif batch >= 2 * self.window_size and num_high >= self.window_size / 2:
                self.problem = (
                    f"{subject} is high: {num_high} of {self.window_size} before it are above {self.loss_cap:.4f}"
                )
        self.window.append(loss)

    def _choose_window_size(self, state: State) -> int:
        """Return the user's window, or for the default one at least SHARE_OF_RUN of the run's batches."""
        window_size = self.block.window_size
        if window_size != DEFAULT_WINDOW:
            return window_size
        num_batches = int(state.timestamp.batch) / progress_of(state, self.max_duration)
        return max(window_size, round(SHARE_OF_RUN * num_batches))
