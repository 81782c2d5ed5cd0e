"""What a save holds besides tensors: clocks, place in the data, loss scale, what evaluation runs on, users' callbacks.

No generator's state is among it: everything random is a function of seed and position. Leaves tensors and files to
`checkpoint`, and when to save to `save_policy`.
"""

import datetime
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Evaluator, State, Timestamp

from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.training.gradients import GradientStep
from llmfoundry_lite.training.loggers import wandb_run_id

COUNTS = ("iteration", "epoch", "batch", "sample", "token")
COUNTS_WITHIN = (
    *("epoch_in_iteration", "token_in_iteration"),
    *("batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
)
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")


class RunState:
    """Composer's state <-> the scalars of a manifest."""

    def __init__(self, config: TrainConfig, gradient_step: GradientStep):
        self.config = config
        self.gradient_step = gradient_step
        self.owes_evaluation = False
        """The evaluation that was due after the batch of the checkpoint was not made, or not to its end."""
        self.eval_subset_samples: int | None = None
        """What the run has evaluated on elsewhere; None: what the configuration says here."""

    def collect(self, state: State) -> dict[str, Any]:
        stamp = state.timestamp
        return {
            "timestamp": {
                **{name: int(getattr(stamp, name)) for name in (*COUNTS, *COUNTS_WITHIN)},
                **{name: getattr(stamp, name).total_seconds() for name in CLOCKS},
            },
            "data": _data_state(state),
            "loss_scaler": self.gradient_step.scaler.state_dict() if self.gradient_step.scaler else None,
            "seed": self.config.seed,
            "owes_evaluation": self.owes_evaluation,
            "eval_subset": self._eval_subset(state),
            "wandb_run_id": wandb_run_id(Path(self.config.run_folder)),
            "callbacks": {_name(c): c.state_dict() for c in self._users_callbacks(state)},
        }

    def restore(self, scalars: dict[str, Any], state: State) -> list[str]:
        """Lines for the user about what could not be restored as it was."""
        clocks = {name: datetime.timedelta(seconds=scalars["timestamp"][name]) for name in CLOCKS}
        counts = {name: scalars["timestamp"][name] for name in (*COUNTS, *COUNTS_WITHIN)}
        state.timestamp = Timestamp(**counts, **clocks)  # pyright: ignore[reportArgumentType]
        dataset = getattr(state.train_dataloader, "dataset", None)
        if scalars["data"] is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(scalars["data"])  # type: ignore[union-attr]
            # Without this the Trainer would skip the batches that the data set has skipped already.
            state.dataset_resumption["train"] = True
        self.owes_evaluation = scalars["owes_evaluation"]
        if self.gradient_step.scaler is not None and scalars["loss_scaler"] is not None:
            self.gradient_step.scaler.load_state_dict(scalars["loss_scaler"])
        for callback in self._users_callbacks(state):
            saved = scalars["callbacks"].get(_name(callback))
            if saved:
                callback.load_state_dict(saved)
        return self._restore_eval_subset(scalars["eval_subset"], state)

    def _restore_eval_subset(self, saved: list[int] | None, state: State) -> list[str]:
        """As many samples as before, though a batch of evaluation has as many more as there are devices."""
        here = self._eval_subset(state)
        if saved is None or here is None or saved[0] != here[0]:  # the user has asked for something else now
            return []
        (count, num_samples), batch_size = saved, here[1] // here[0]
        self.eval_subset_samples = num_samples
        num_batches = max(1, round(num_samples / batch_size))
        for evaluator in state.evaluators:
            if _rows_of_batch(evaluator):
                evaluator.subset_num_batches = num_batches
        if num_batches * batch_size == num_samples:
            return []
        return [
            f"eval_subset_num_batches: {count} were {num_samples} samples, here {num_batches * batch_size} are "
            f"evaluated, until device_eval_batch_size x devices divides {num_samples}"
        ]

    def _eval_subset(self, state: State) -> list[int] | None:
        """[eval_subset_num_batches, samples of so many batches]; None if all are evaluated."""
        count = self.config.eval_subset_num_batches
        batch_size = next(filter(None, map(_rows_of_batch, state.evaluators)), None)  # the same for each
        return [count, self.eval_subset_samples or count * batch_size] if count > 0 and batch_size else None

    def _users_callbacks(self, state: State) -> list[Callback]:
        wanted = {name.rsplit(":", 1)[-1] for name in self.config.callbacks.extra}
        return [c for c in state.callbacks if type(c).__name__ in wanted]


def chosen_options(group: dict[str, Any]) -> dict[str, Any]:
    """What the configuration says of a group of the optimizer, whatever a checkpoint says: see `config.changes`."""
    chosen = {key: group[key] for key in ("lr", "weight_decay") if key in group}
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in chosen.items()}
    return {**values, "initial_lr": values["lr"]}


def _rows_of_batch(evaluator: Evaluator) -> int | None:
    """Return the rows of a global batch; None for a user's own loader."""
    loader = getattr(evaluator.dataloader, "dataloader", None)
    return getattr(getattr(loader, "dataset", None), "global_batch_size", None)


def _data_state(state: State) -> dict[str, Any] | None:
    dataset = getattr(state.train_dataloader, "dataset", None)
    if not hasattr(dataset, "state_dict"):
        return None
    num_samples = int(state.timestamp.sample_in_epoch)
    if isinstance(dataset, TextDataset):  # rows that fill up the last batch of an epoch are no samples, but places
        num_samples = int(state.timestamp.batch_in_epoch) * dataset.global_batch_size
    return dataset.state_dict(num_samples, True)  # type: ignore[union-attr]


def _name(callback: Callback) -> str:
    return f"{type(callback).__module__}:{type(callback).__qualname__}"
