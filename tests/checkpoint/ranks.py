"""Functions that real ranks run for the tests beside this file: a small model, a few steps, a save, a load.

A rank proves what it holds by writing whole tensors: `state.safetensors` next to the checkpoints.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.restore import load
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.state import read_state
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.training.optimizers import Lion

WIDTH = 6
"""Odd enough that most shards of 4 ranks are of unequal size, and some empty."""


class TinyModel(nn.Module):
    """A model with tied and frozen parameters, buffers, and parameters smaller than the world."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x * self.gain[0] + self.gain[1])


def build(sharding: str, optimizer: str = "adamw", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = TinyModel()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if sharding != "plain":
        shapes = {"HYBRID_SHARD": (world_size // 2, 2), "NO_SHARD": (world_size, 1)}
        if shape := shapes.get(sharding):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=sharding == "FULL_SHARD")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer == "lion":
        return model, Lion(parameters, lr=0.01)
    return model, torch.optim.AdamW(
        [{"params": parameters[:2], "weight_decay": 0.3}, {"params": parameters[2:]}], lr=0.01, fused=True
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """The same tokens on every rank: gradients, and thus the run, do not depend on the world size but in rounding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (4, 7), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.count += 1
    return float(loss.detach())


def start() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def about(batch: int, **scalars: Any) -> SaveMetadata:
    return SaveMetadata(timestamp=Timestamp(batch=batch), run_name="tiny", scalars=scalars)


def save_now(saver: Saver, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: int) -> None:
    if not saver.has_lease:
        saver.take_lease()
    saver.save(model, optimizer, about(batch))
    saver.wait()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    found = read_state(model, optimizer)
    tensors = {}
    for name, tensor in found.tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name] = whole.clone().contiguous()
    for name, slots in (found.optimizer or {"state": {}})["state"].items():
        for slot, number in slots.items():
            tensors[f"number/{name}/{slot}"] = torch.tensor(float(number["value"]))
    return tensors


def write_state(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: Path) -> None:
    tensors = whole_state(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_file(tensors, path)


def train_and_save(folder: str, sharding: str, optimizer_name: str = "adamw", num_steps: int = 3) -> None:
    start()
    model, optimizer = build(sharding, optimizer_name)
    for i in range(num_steps):
        step(model, optimizer, i)
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()
    save_now(saver, model, optimizer, num_steps)
    write_state(model, optimizer, Path(folder) / "saved.safetensors")
    losses = [step(model, optimizer, 100 + i) for i in range(2)]
    if dist.get_rank() == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


def save_at_odd_moments(folder: str, sharding: str) -> None:
    """Before any step; after a forward pass without gradients; with gradients at hand."""
    start()
    model, optimizer = build(sharding)
    saver = Saver(CheckpointStore(folder))
    saver.take_lease()
    for batch, prepare in enumerate((lambda: None, lambda: evaluate(model), lambda: gradients(model))):
        prepare()
        saver.save(model, optimizer, about(batch))
        saver.wait()
        optimizer.zero_grad()
        write_state(model, optimizer, Path(folder) / f"saved{batch}.safetensors")
        step(model, optimizer, batch)


def evaluate(model: nn.Module) -> None:
    """FSDP2 leaves the root's parameters whole afterwards."""
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))


def gradients(model: nn.Module) -> None:
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def load_all(folder: str, sharding: str, names: list[str], out: str) -> None:
    """Load each in turn into the same model, which is trained in between."""
    start()
    model, optimizer = build(sharding, seed=1)
    for name in names:
        step(model, optimizer, 7)
        load(f"{folder}/{name}", model, optimizer)
        write_state(model, optimizer, Path(out) / f"{name}.safetensors")


def load_and_continue(folder: str, name: str, sharding: str, optimizer_name: str, out: str) -> None:
    start()
    model, optimizer = build(sharding, optimizer_name, seed=1)
    load(f"{folder}/{name}", model, optimizer)
    write_state(model, optimizer, Path(out) / "loaded.safetensors")
    losses = [step(model, optimizer, 100 + i) for i in range(2)]
    if dist.get_rank() == 0:
        (Path(out) / "losses.json").write_text(json.dumps(losses))


class Stages(nn.Module):
    """`stages` of a model of three, which share a tensor: each rank of a pipeline has some."""

    def __init__(self, stages: list[int], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 3) for _ in range(3)]
        self.shared = nn.Parameter(torch.randn(5))
        self.layers = nn.ModuleDict({str(i): layers[i] for i in stages})


def build_stages(stages: list[int], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Stages(stages, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float(len(name)))
    optimizer.step()
    return model, optimizer


def load_another_stage(url: str) -> None:
    """The last rank has one that the checkpoint lacks."""
    start()
    model, _ = build_stages([0] if dist.get_rank() == 0 else [1, 2], seed=1)
    before = whole_state(model, None)
    load(url, model, ignore_keys=["model/layers.2.*"])
    changed = {name for name, tensor in whole_state(model, None).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".2." not in name}


def save_and_load_stages(folder: str) -> None:
    start()
    model, optimizer = build_stages([dist.get_rank()])
    before = whole_state(model, optimizer)
    save_now(Saver(CheckpointStore(folder)), model, optimizer, 1)
    other, other_optimizer = build_stages([dist.get_rank()], seed=1)
    load(f"{folder}/ba1", other, other_optimizer)
    after = whole_state(other, other_optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
