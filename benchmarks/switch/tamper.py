"""Checkpoints that are wrong on purpose: read, changed, and published again with hashes that fit.

republish("runs/a/checkpoints/ba60", "runs/b/checkpoints", zero_moments)

Nothing that only looks at a checkpoint can tell such a one from a sound one; whoever claims to notice when a run was
not carried on as it was must notice it in the run. One process, no launcher.
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
    """State that a checkpoint restores, to be changed in place."""

    tensors: Tensors
    """`model/<parameter>` and `optim/<parameter>/<slot>`, whole."""
    optimizer: dict[str, Any]
    """Optimizer as in `Manifest`: class, groups, and slots that are single numbers."""
    scalars: dict[str, Any]
    """Run state as in `Manifest`: timestamp, place in the data, ..."""


Change = Callable[[Content], None]


def republish(checkpoint: Url, folder: Url, change: Change) -> str:
    """Publish `checkpoint`, changed, as one of the local `folder`, which has none yet. Returns its name (`ba<batch>`).

    AdamW alone, which is what the benchmark trains with. Raises CheckpointError.
    """
    manifest = open_checkpoint(checkpoint).manifest
    assert manifest.optimizer is not None and manifest.optimizer["class"] == "AdamW"
    content = Content(load_full_tensors(checkpoint, prefix=""), manifest.optimizer, manifest.scalars)
    change(content)
    model = _module(content.tensors)
    optimizer = _optimizer(model, content)
    place = content.scalars["timestamp"]
    about = SaveMetadata(
        timestamp=Timestamp(**{name: place[name] for name in ("epoch", "batch", "sample", "token")}),
        run_name=None,  # a run of any name may carry it on
        fingerprints=manifest.fingerprints,
        config=manifest.config,
        segments=manifest.segments,
        scalars=content.scalars,
    )
    # Elsewhere first: this process holds the lease of the folder that it publishes in.
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as there:
        saver = Saver(CheckpointStore(there), parent_save_id=manifest.save_id)
        saver.take_lease()
        saver.save(model, optimizer, about)
        saved = saver.wait()
        assert saved is not None
        os.rename(Path(there) / saved.name, Path(folder) / saved.name)
    return saved.name


def zero_moments(content: Content) -> None:
    """Zero the optimizer's moments."""
    for name, tensor in content.tensors.items():
        if name.startswith("optim/"):
            tensor.zero_()


def round_weights(content: Content) -> None:
    """Round the weights to bf16, as a checkpoint does that keeps no master weights."""
    for name, tensor in content.tensors.items():
        if name.startswith("model/"):
            tensor.copy_(tensor.bfloat16())


def nudge(seed: int) -> Change:
    """Move each weight to the next fp32 number, the one before, or not at all, as `seed` draws."""

    def change(content: Content) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Tied weights have several names, and are moved once.
        weights = {id(tensor): tensor for name, tensor in sorted(content.tensors.items()) if name.startswith("model/")}
        for tensor in weights.values():
            step = torch.randint(-1, 2, tensor.shape, generator=generator)
            tensor.copy_(torch.nextafter(tensor, tensor + step))

    return change


def reset_steps(content: Content) -> None:
    """Reset AdamW's step: its bias correction starts again."""
    for numbers in content.optimizer["state"].values():
        numbers["step"]["value"] = 0.0


def move_data(num_batches: int) -> Change:
    """Move the data `num_batches` ahead of the run, or back."""

    def change(content: Content) -> None:
        data = content.scalars["data"]
        data["sample_in_epoch"] += num_batches * data["global_batch_size"]

    return change


def move_run(batch: int, batches_in_epoch: int, seq_len: int) -> Change:
    """Set the run and its data to `batch`; the weights stay as they are."""

    def change(content: Content) -> None:
        batch_size = content.scalars["data"]["global_batch_size"]
        epoch, batch_in_epoch = divmod(batch, batches_in_epoch)
        counts = {"batch": 1, "sample": batch_size, "token": batch_size * seq_len}
        content.scalars["timestamp"] |= {
            "epoch": epoch,
            "epoch_in_iteration": epoch,
            "token_in_iteration": batch * counts["token"],
            **{name: batch * size for name, size in counts.items()},
            **{f"{name}_in_epoch": batch_in_epoch * size for name, size in counts.items()},
        }
        content.scalars["data"] |= {"epoch": epoch, "sample_in_epoch": batch_in_epoch * batch_size}

    return change


def _module(tensors: Tensors) -> nn.Module:
    """A module whose parameters have the checkpoint's names and values."""
    root = nn.Module()
    for key, tensor in tensors.items():
        if not key.startswith("model/"):
            continue
        *path, last = key.removeprefix("model/").split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(tensor))
    return root


def _optimizer(model: nn.Module, content: Content) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name] for name in group["params"]]} for group in content.optimizer["groups"]]
    optimizer = torch.optim.AdamW(groups)
    slots = {name: tensor for name, tensor in content.tensors.items() if name.startswith("optim/")}
    state.write_optimizer(optimizer, parameters, content.optimizer, slots, slots)
    return optimizer
