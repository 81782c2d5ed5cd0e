"""State of a run besides tensors, and the segment, which describes where a launch runs.

The state is clocks, place in the data, loss scale, a missing evaluation, and the state of users' callbacks. It has no
random generator's state, because everything random is a function of seed and position.
"""

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State, Timestamp

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import HIDDEN, Segment
from llmfoundry_lite.config.layout import layout_here
from llmfoundry_lite.config.scalars import FromEnvironment
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import is_secret_name
from llmfoundry_lite.own_code import errors_named
from llmfoundry_lite.ranks.codec import encode_value
from llmfoundry_lite.ranks.rank import this_rank
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.gradient_step import GradientStep
from llmfoundry_lite.training.mirrors import wandb_run_id

COUNTS = (
    *("iteration", "epoch", "batch", "sample", "token", "epoch_in_iteration", "token_in_iteration"),
    *("batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
)
"""Fields of Composer's timestamp that count something."""
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
"""Fields of Composer's timestamp that are wall-clock times."""


@dataclass
class RunState:
    """Converts Composer's state to the scalars of a checkpoint's manifest, and back. The ranks exchange nothing."""

    config: TrainConfig
    gradient_step: GradientStep
    callbacks: dict[str, Callback] = field(default_factory=dict)
    """The user's own callbacks and those of companions' blocks, by the names under which checkpoints keep their state:
    the import path `package.module:Thing`, or the key of the block."""
    owes_evaluation: bool = False
    """The evaluation that is due after the checkpoint's batch is missing or incomplete."""
    _wandb_run_id: str | None = None
    """Id of the run at wandb, as it was read last; None if there is none."""

    def collect(self, state: State) -> dict[str, Any]:
        """Return the state of a run besides tensors, as values that a checkpoint's manifest can hold.

        `restore` takes the result. The timestamp holds counts as integers and wall-clock times in seconds. Call it
        between two batches; the ranks exchange nothing.
        """
        timestamp: dict[str, float] = {name: int(getattr(state.timestamp, name)) for name in COUNTS}
        timestamp |= {name: getattr(state.timestamp, name).total_seconds() for name in CLOCKS}
        scaler = self.gradient_step.scaler
        return {
            "timestamp": timestamp,
            "data": _collect_data_state(state),
            "loss_scaler": scaler.state_dict() if scaler else None,
            "seed": self.config.seed,
            "owes_evaluation": self.owes_evaluation,
            "wandb_run_id": self._read_wandb_run_id(),
            "callbacks": {name: callback.state_dict() for name, callback in self.callbacks.items()},
        }

    def restore(self, scalars: dict[str, Any], state: State) -> None:
        """Set Composer's state, the data set, the loss scaler and the users' callbacks to what `collect` has returned.

        Changes `owes_evaluation`, too. The state of a callback that this launch does not have is ignored, with a note,
        and a callback that the checkpoint does not have keeps its own. The ranks exchange nothing.
        """
        # The run's clock.
        saved_timestamp = scalars["timestamp"]
        clocks = {name: datetime.timedelta(seconds=saved_timestamp[name]) for name in CLOCKS}
        counts = {name: saved_timestamp[name] for name in COUNTS}
        state.timestamp = Timestamp(**counts, **clocks)  # pyright: ignore[reportArgumentType]

        # The place in the data. A user's own loader may have no state.
        dataset = getattr(state.train_dataloader, "dataset", None)
        if scalars["data"] is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(scalars["data"])  # type: ignore[union-attr]
            if isinstance(dataset, TextDataset) and dataset.joins_batches:
                dataset.check_position(scalars["data"], int(state.timestamp.batch))
            # Otherwise Composer's Trainer would skip again the batches that the data set has skipped.
            state.dataset_resumption["train"] = True

        self.owes_evaluation = scalars["owes_evaluation"]
        if self.gradient_step.scaler is not None and scalars["loss_scaler"] is not None:
            self.gradient_step.scaler.load_state_dict(scalars["loss_scaler"])
        self._restore_callbacks(scalars["callbacks"])

    def check_callbacks(self) -> None:
        """Raise CheckpointError if a callback has a state that no checkpoint can hold, such as a tensor.

        Call it before the first batch. Otherwise the first save would find it, and the batches before it would be lost.
        """
        for name, callback in self.callbacks.items():
            with errors_named(f"callbacks: {name}: state_dict"):
                callback_state = callback.state_dict()
            encode_value(callback_state, f"scalars.callbacks.{name}")

    def _restore_callbacks(self, saved_states: dict[str, Any]) -> None:
        """Give each callback the state that a checkpoint has of it, and print a note for states that nobody takes.

        A checkpoint has the name by which the YAML names a class. Earlier ones have the name of the module that defines
        it, which differs for a class that a package imports from one of its modules.
        """
        remaining = {name: state for name, state in saved_states.items() if state}
        for name, callback in self.callbacks.items():
            defined_as = f"{type(callback).__module__}:{type(callback).__qualname__}"
            for known_name in (name, defined_as):
                if known_name in remaining:
                    with errors_named(f"callbacks: {name}: load_state_dict"):
                        callback.load_state_dict(remaining.pop(known_name))
                    break
        if remaining and this_rank().rank == 0:
            print(
                f"warning: callbacks: the checkpoint has the state of {', '.join(sorted(remaining))}, which this "
                "launch does not have; it is left out",
                file=sys.stderr,
                flush=True,
            )

    def _read_wandb_run_id(self) -> str | None:
        """Return the id of the run at wandb, which the run folder holds; None if it holds none.

        While somebody refuses access to the folder, it is the id that was read last.
        """
        with contextlib.suppress(PermissionError):
            self._wandb_run_id = wandb_run_id(Path(self.config.run_folder))
        return self._wandb_run_id


def chosen_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the options of an optimizer's group that the configuration decides, not a checkpoint.

    These are the learning rate, also as `initial_lr`, which schedules multiply, and the weight decay. `config.changes`
    lets them change during a run. Call it before the optimizer is restored, and update its group with the result
    afterwards.
    """
    options: dict[str, Any] = {}
    for key in ("lr", "weight_decay"):
        if key in group:
            value = group[key]
            options[key] = value.clone() if isinstance(value, torch.Tensor) else value
    options["initial_lr"] = options["lr"]
    return options


def _collect_data_state(state: State) -> dict[str, Any] | None:
    """Return the place in the training data, as the data set describes it; None if it has no state.

    The place is the number of samples that the run has taken from this epoch, over all ranks.
    """
    dataset = getattr(state.train_dataloader, "dataset", None)
    if not hasattr(dataset, "state_dict"):
        return None
    num_samples = int(state.timestamp.sample_in_epoch)
    if isinstance(dataset, TextDataset) and dataset.joins_batches:
        has_begun = int(state.timestamp.batch_in_epoch) > 0
        epoch, num_samples = dataset.position_after(int(state.timestamp.batch), as_end=has_begun)
        return dataset.state_dict(num_samples, epoch=epoch)
    if isinstance(dataset, TextDataset):  # an epoch's last batch may have rows of padding, which are no samples
        num_samples = int(state.timestamp.batch_in_epoch) * dataset.global_batch_size
    return dataset.state_dict(num_samples, True)  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------- the segment

DIGITS_DEPEND_ON = {
    "device": "device",
    "devices": "num_devices",
    "runtime": "runtime",
    "torch": "torch",
    "sharding": "sharding",
    "shard degree": "shard_degree",
    "tensor parallel degree": "tensor_parallel_degree",
    "context parallel": "context",
    "pipeline": "pipeline",
    "microbatch": "device_train_microbatch_size",
    "precision": "precision",
    "attention": "attention",
    "reduction after": "reduction",
    "compile_config": "compile_config",
    "sync": "sync",
    "threads of a rank": "num_threads",
}
"""Name in messages -> field of a segment that changes the last digits of results. `sync` changes more than those."""


def build_segment(
    config: TrainConfig, model: LanguageModel, first_batch: int, last_batch: int, **measured: Any
) -> Segment:
    """Describe where and how this launch has trained batches `first_batch` to `last_batch`, for a manifest.

    A checkpoint has such a segment for each launch of its run: devices, software, layout, precision, and other settings
    that change the last digits of results. `measured` are fields of the segment that the configuration does not
    determine, such as `tokens_per_second`. The ranks exchange nothing.
    """
    fsdp, layout = config.sharding, layout_here(config)
    if config.exact_sums:
        reduction = "each batch, exactly"  # the sums are the same whenever they are made
    elif config.reduces_every_microbatch:
        reduction = "each microbatch"
    else:
        reduction = "each batch"

    # A field is None if it does not apply, so that it makes no difference between two launches.
    return Segment(
        first_batch=first_batch,
        last_batch=last_batch,
        vendor=devices.vendor(),
        device=devices.device_name(),
        num_devices=dist.get_world_size(),
        driver=devices.driver_release(),
        runtime=devices.runtime_release(),
        torch=str(torch.__version__),
        world_size=dist.get_world_size(),
        sharding=fsdp.sharding_strategy,
        shard_degree=layout.shard if fsdp.sharding_strategy == "HYBRID_SHARD" else None,
        tensor_parallel_degree=layout.tensor if layout.tensor > 1 else None,
        context=f"{layout.context}, {config.context.kind}" if layout.context > 1 else None,
        pipeline=f"{layout.pipeline} stages, {config.pipeline.schedule}" if layout.pipeline > 1 else None,
        precision=f"{devices.computed_precision(config.precision)} {fsdp.mixed_precision}",
        attention=model.attn_impl,
        reduction=reduction,
        num_threads=torch.get_num_threads() if devices.device_type() == "cpu" else None,
        compile_config=config.compile_config,
        environment={name: recorded_variable(name, value) for name, value in config.environment.items()},
        **measured,
    )


def recorded_variable(name: str, value: str) -> str:
    """Return the value of a configured environment variable as checkpoints record it.

    `value` is the configured one. A reference, such as `${oc.env:HOME}`, stays a reference. A secret, which is known by
    its variable's name, is hidden. Otherwise the process's own value is recorded, which differs from the configured one
    if the shell has set the variable.
    """
    if isinstance(value, FromEnvironment):
        return value.written
    if is_secret_name(name):
        return HIDDEN
    return os.environ.get(name, value)


def with_references(segments: Iterable[Segment], config: TrainConfig) -> tuple[Segment, ...]:
    """Return segments of earlier launches without the values of variables that `config` takes from the environment.

    Such values may be secrets. A checkpoint of an earlier release may have recorded them, so they are replaced by the
    references that `config` has, such as `${oc.env:TOKEN}`, before they go into the next checkpoint.
    """
    references: dict[str, str] = {}
    for name, value in config.environment.items():
        if isinstance(value, FromEnvironment):
            references[name] = value.written

    # A segment is frozen, so each is copied with another environment.
    replaced: list[Segment] = []
    for segment in segments:
        environment = {name: references.get(name, value) for name, value in segment.environment.items()}
        replaced.append(replace(segment, environment=environment))
    return tuple(replaced)


def find_differences(before: Segment, now: Segment) -> list[str]:
    """List what may change the last digits of results between two launches, in words.

    For example, `["devices 8 -> 4", "attention sdpa -> flash"]`. Compares the fields in DIGITS_DEPEND_ON and the
    configured environment variables. A microbatch size of None in `now` was not chosen yet, and is not compared.
    """
    pairs = {name: (getattr(before, key), getattr(now, key)) for name, key in DIGITS_DEPEND_ON.items()}
    if now.device_train_microbatch_size is None:
        del pairs["microbatch"]

    for name in sorted({*before.environment, *now.environment}):
        values = (before.environment.get(name), now.environment.get(name))
        # If one launch has only a reference, nobody can tell whether the values differ.
        has_reference = any("${oc." in str(value) for value in values)
        if not has_reference:
            pairs[name] = values

    differences: list[str] = []
    for name, (old, new) in pairs.items():
        if old != new:
            differences.append(f"{name} {_describe_value(old)} -> {_describe_value(new)}")
    return differences


def _describe_value(value: Any) -> str:
    """Return a field of a segment in words."""
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, dict) else str(value)
