"""State of a run besides tensors, and the segment, which describes where a launch runs.

The state is clocks, place in the data, loss scale, samples of an evaluation and users' callbacks. It has no random
generator's state: everything random is a function of seed and position.
"""

import datetime
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.gradient_step import GradientStep
from llmfoundry_lite.training.mirrors import wandb_run_id

COUNTS = (
    *("iteration", "epoch", "batch", "sample", "token", "epoch_in_iteration", "token_in_iteration"),
    *("batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
)
CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")


@dataclass
class RunState:
    """Composer's state <-> the scalars of a manifest."""

    config: TrainConfig
    gradient_step: GradientStep
    owes_evaluation: bool = False
    """The evaluation due after the checkpoint's batch is missing or incomplete."""

    def collect(self, state: State) -> dict[str, Any]:
        stamp = state.timestamp
        return {
            "timestamp": {
                **{name: int(getattr(stamp, name)) for name in COUNTS},
                **{name: getattr(stamp, name).total_seconds() for name in CLOCKS},
            },
            "data": _data_state(state),
            "loss_scaler": self.gradient_step.scaler.state_dict() if self.gradient_step.scaler else None,
            "seed": self.config.seed,
            "owes_evaluation": self.owes_evaluation,
            "wandb_run_id": wandb_run_id(Path(self.config.run_folder)),
            "callbacks": {name: callback.state_dict() for name, callback in self._users_callbacks(state).items()},
        }

    def restore(self, scalars: dict[str, Any], state: State) -> None:
        """Restore `scalars` into Composer's state."""
        clocks = {name: datetime.timedelta(seconds=scalars["timestamp"][name]) for name in CLOCKS}
        counts = {name: scalars["timestamp"][name] for name in COUNTS}
        state.timestamp = Timestamp(**counts, **clocks)  # pyright: ignore[reportArgumentType]
        dataset = getattr(state.train_dataloader, "dataset", None)
        if scalars["data"] is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(scalars["data"])  # type: ignore[union-attr]
            # Otherwise Composer's Trainer would skip again what the data set has skipped.
            state.dataset_resumption["train"] = True
        self.owes_evaluation = scalars["owes_evaluation"]
        if self.gradient_step.scaler is not None and scalars["loss_scaler"] is not None:
            self.gradient_step.scaler.load_state_dict(scalars["loss_scaler"])
        for name, callback in self._users_callbacks(state).items():
            if scalars["callbacks"].get(name):
                callback.load_state_dict(scalars["callbacks"][name])

    def _users_callbacks(self, state: State) -> dict[str, Callback]:
        wanted = {name.rsplit(":", 1)[-1] for name in self.config.callbacks.extra}
        kinds = ((type(callback), callback) for callback in state.callbacks)
        return {f"{kind.__module__}:{kind.__qualname__}": c for kind, c in kinds if kind.__name__ in wanted}


def chosen_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer group's options that the configuration overrides in a checkpoint (`config.changes`)."""
    chosen = {key: group[key] for key in ("lr", "weight_decay") if key in group}
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in chosen.items()}
    return {**values, "initial_lr": values["lr"]}


def _data_state(state: State) -> dict[str, Any] | None:
    dataset = getattr(state.train_dataloader, "dataset", None)
    if not hasattr(dataset, "state_dict"):
        return None
    num_samples = int(state.timestamp.sample_in_epoch)
    if isinstance(dataset, TextDataset):  # an epoch's last batch may have padding rows, which are no samples
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
"""Display name -> field of a segment that changes the last digits of results; `sync` changes more."""


def build_segment(
    config: TrainConfig, model: LanguageModel, first_batch: int, last_batch: int, **measured: Any
) -> Segment:
    """Describe where this launch runs."""
    fsdp, layout = config.sharding, layout_here(config)
    reduction = "each microbatch" if config.reduces_every_microbatch else "each batch"
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
        reduction="each batch, exactly" if config.exact_sums else reduction,  # whenever it happens
        num_threads=torch.get_num_threads() if devices.device_type() == "cpu" else None,
        compile_config=config.compile_config,
        environment={name: recorded_variable(name, value) for name, value in config.environment.items()},
        **measured,
    )


def recorded_variable(name: str, value: str) -> str:
    """Return the value of a configured environment variable as checkpoints record it.

    That is the process's own, which the shell may have set otherwise. But a reference stays a reference, and of a
    variable that holds a secret by its name, no value is recorded.
    """
    if isinstance(value, FromEnvironment):
        return value.written
    return HIDDEN if is_secret_name(name) else os.environ.get(name, value)


def with_references(segments: Iterable[Segment], config: TrainConfig) -> tuple[Segment, ...]:
    """Return segments of earlier launches with references to the variables that this launch only refers to. Earlier
    releases recorded their values, which may be secrets."""
    references = {
        name: value.written for name, value in config.environment.items() if isinstance(value, FromEnvironment)
    }

    def recorded(environment: dict[str, str]) -> dict[str, str]:
        return {name: references.get(name, value) for name, value in environment.items()}

    return tuple(replace(segment, environment=recorded(segment.environment)) for segment in segments)


def find_differences(last: Segment, here: Segment) -> list[str]:
    """List what may change the last digits between two launches, such as `devices 8 -> 4`."""

    def describe(value: Any) -> str:
        return "none" if value is None else json.dumps(value) if isinstance(value, dict) else str(value)

    pairs = {name: (getattr(last, field), getattr(here, field)) for name, field in DIGITS_DEPEND_ON.items()}
    names = sorted({*last.environment, *here.environment})
    variables = {name: (last.environment.get(name), here.environment.get(name)) for name in names}
    # Where one side has only a reference, nobody can tell whether the values differ.
    pairs |= {name: both for name, both in variables.items() if not any("${oc." in str(value) for value in both)}
    if here.device_train_microbatch_size is None:  # not chosen yet
        del pairs["microbatch"]
    return [f"{name} {describe(before)} -> {describe(now)}" for name, (before, now) in pairs.items() if before != now]
