"""Make checkpoints that are wrong on purpose: read one, change it, and publish it again with hashes that match.

    republish("runs/a/checkpoints/ba60", "runs/b/checkpoints", zero_moments)

Such a checkpoint looks intact, so verification of its files cannot find the mistake. A check that claims to notice a
wrongly continued run has to find it in the run itself. Each `Change` below is one mistake, or prepares a timing.
Everything happens in one process without a launcher.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmfoundry_lite.checkpoint import state
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.state import Tensors
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint

Url = str | os.PathLike[str]


@dataclass(slots=True)
class Content:
    """State that a checkpoint restores. A `Change` modifies it in place."""

    tensors: Tensors
    """Full, unsharded tensors: `model/<parameter>` and `optim/<parameter>/<slot>`."""
    optimizer: dict[str, Any]
    """Optimizer as in `Manifest`: class, parameter groups, and slots that are single numbers."""
    scalars: dict[str, Any]
    """Run state as in `Manifest`, such as the timestamp and the position in the data."""


Change = Callable[[Content], None]


def republish(checkpoint: Url, folder: Url, change: Change) -> str:
    """Publish a changed copy of `checkpoint` in the local `folder`, and return its name, `ba<batch>`.

    The optimizer must be AdamW, which is what the benchmark trains with. Any run of the same configuration can continue
    from the copy, whatever its name. Raises CheckpointError.
    """
    manifest = open_checkpoint(checkpoint).manifest
    assert manifest.optimizer is not None and manifest.optimizer["class"] == "AdamW"
    content = Content(load_full_tensors(checkpoint, prefix=""), manifest.optimizer, manifest.scalars)
    change(content)

    # A Saver takes a model and an optimizer, so build ones that hold the changed state.
    model = _module(content.tensors)
    optimizer = _optimizer(model, content)
    timestamp = content.scalars["timestamp"]
    metadata = SaveMetadata(
        timestamp=Timestamp(**{name: timestamp[name] for name in ("epoch", "batch", "sample", "token")}),
        run_name=None,  # a run of any name may carry it on
        fingerprints=manifest.fingerprints,
        config=manifest.config,
        segments=manifest.segments,
        scalars=content.scalars,
    )

    # Publish into a temporary folder, then move the checkpoint. Publishing needs the lease of the folder, and the run
    # that continues has to take the lease of `folder` itself.
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary_folder:
        saver = Saver(CheckpointStore(temporary_folder), parent_save_id=manifest.save_id)
        saver.take_lease()
        saver.save(model, optimizer, metadata)
        published = saver.wait()
        assert published is not None
        os.rename(Path(temporary_folder) / published.name, Path(folder) / published.name)
    return published.name


def zero_moments(content: Content) -> None:
    """Zero the optimizer's moments, as a restore does that forgets the optimizer."""
    for name, tensor in content.tensors.items():
        if name.startswith("optim/"):
            tensor.zero_()


def round_weights(content: Content) -> None:
    """Round the weights to bf16, as a checkpoint does that keeps no fp32 master weights."""
    for name, tensor in content.tensors.items():
        if name.startswith("model/"):
            tensor.copy_(tensor.bfloat16())


def nudge(seed: int) -> Change:
    """Return a change that moves each weight by one step of its floating-point format, up, down or not at all.

    `seed` determines the draw. The result is the same model except for rounding.
    """

    def change(content: Content) -> None:
        """Draw a direction for each weight, in the order of the names, and move it."""
        generator = torch.Generator().manual_seed(seed)
        # Tied weights have several names, and are moved once.
        weights = {id(tensor): tensor for name, tensor in sorted(content.tensors.items()) if name.startswith("model/")}
        for tensor in weights.values():
            direction = torch.randint(-1, 2, tensor.shape, generator=generator)
            tensor.copy_(torch.nextafter(tensor, tensor + direction))

    return change


def reset_steps(content: Content) -> None:
    """Reset AdamW's step counter to 0, so that its bias correction starts again."""
    for scalar_slots in content.optimizer["state"].values():
        scalar_slots["step"]["value"] = 0.0


def move_data(num_batches: int) -> Change:
    """Return a change that moves the position in the data ahead by `num_batches`, or back if negative. The run's batch
    stays."""

    def change(content: Content) -> None:
        """Change the number of samples that have been read in this epoch."""
        position = content.scalars["data"]
        position["sample_in_epoch"] += num_batches * position["global_batch_size"]

    return change


def move_run(batch: int, batches_in_epoch: int, seq_len: int) -> Change:
    """Return a change that sets the run and its data to the end of batch `batch`. The weights stay as they are.

    Used to measure how long a resume takes late in a run, without training that long. `seq_len` is in tokens.
    """

    def change(content: Content) -> None:
        """Set all counters of the timestamp, and the position in the data."""
        batch_size = content.scalars["data"]["global_batch_size"]
        epoch, batch_in_epoch = divmod(batch, batches_in_epoch)
        units_per_batch = {"batch": 1, "sample": batch_size, "token": batch_size * seq_len}

        # The timestamp counts in three units, in all and within the epoch.
        content.scalars["timestamp"] |= {
            "epoch": epoch,
            "epoch_in_iteration": epoch,
            "token_in_iteration": batch * units_per_batch["token"],
            **{name: batch * num_units for name, num_units in units_per_batch.items()},
            **{f"{name}_in_epoch": batch_in_epoch * num_units for name, num_units in units_per_batch.items()},
        }
        content.scalars["data"] |= {"epoch": epoch, "sample_in_epoch": batch_in_epoch * batch_size}

    return change


def _module(tensors: Tensors) -> nn.Module:
    """Build a module whose parameters have the names and values of the checkpoint's `model/` tensors.

    For example, "model/blocks.0.norm.weight" becomes the parameter `weight` of the submodule `blocks.0.norm`.
    """
    root = nn.Module()
    for key, tensor in tensors.items():
        if not key.startswith("model/"):
            continue
        *module_names, parameter_name = key.removeprefix("model/").split(".")
        # Create the submodules on the way to the parameter.
        parent = root
        for module_name in module_names:
            if module_name not in parent._modules:
                parent.add_module(module_name, nn.Module())
            parent = parent.get_submodule(module_name)
        parent.register_parameter(parameter_name, nn.Parameter(tensor))
    return root


def _optimizer(model: nn.Module, content: Content) -> torch.optim.Optimizer:
    """Build an AdamW over the model's parameters that has the checkpoint's groups and state."""
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name] for name in group["params"]]} for group in content.optimizer["groups"]]
    optimizer = torch.optim.AdamW(groups)
    slots = {name: tensor for name, tensor in content.tensors.items() if name.startswith("optim/")}
    state.write_optimizer(optimizer, parameters, content.optimizer, slots, slots)
    return optimizer
