"""Weights of the last outer step of local steps, their momentum, and what rounding has dropped, on the host."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from llmfoundry_islands.block import SyncConfig
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.changes import Swap
from llmfoundry_islands.tensors.encoding import Encoded, encode
from llmfoundry_islands.tensors.exchange import Exchange
from llmfoundry_islands.tensors.summing import sum_weighted
from llmfoundry_islands.training.held_parts import HeldParts
from llmfoundry_islands.training.local_steps import divide_into_fragments, take_outer_step
from llmfoundry_lite.checkpoint.state import local_tensor
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.exchange import all_gather_distinct
from llmfoundry_lite.training.partners import OUTER_MOMENTUM


class OuterWeights:
    """This rank's part of the weights, by parameter, in fragments that are exchanged in turn."""

    def __init__(self, sync: SyncConfig, held: HeldParts, optimizer: torch.optim.Optimizer):
        """Set up, as yet without weights. Every rank must call it together. Raises ConfigError."""
        self.sync, self.held, self.optimizer = sync, held, optimizer
        sizes: dict[str, int] = {}
        for own in all_gather_distinct({name: parameter.numel() for name, parameter in held.parameters.items()}):
            sizes |= own[0]
        if sync.fragments > len(sizes):
            raise ConfigError(f"islands.sync.fragments: {sync.fragments} given, the model has {len(sizes)} parameters")
        self.fragments = divide_into_fragments(sizes, sync.fragments)
        self.dropped: Tensors = {}
        """Sum of what rounding has dropped from the changes of this rank's pieces."""
        self.pending = [0] * sync.fragments
        """Weight of what each fragment has been trained on since it was last exchanged."""
        self.start: Tensors = {}
        """Weights after the last outer step: the same bits on all islands. Empty until `take_over`."""
        self.velocity: Tensors = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the weights, which are the same on all islands."""
        self.start = {name: on_host(parameter) for name, parameter in self.held.parameters.items()}
        self.pending = [0] * len(self.fragments)

    def count(self, weight: int) -> None:
        """Add a batch."""
        self.pending = [pending + weight for pending in self.pending]

    # --------------------------------------------------------------------------------------------- the outer step

    @torch.no_grad()
    def depart(self, numbers: Sequence[int], exchange: Exchange, label: int) -> "Departure":
        """Begin to exchange the change of these fragments."""
        names = {name for i in numbers for name in self.fragments[i] if name in self.held.parameters}
        changes = self._changes(names)
        parts, inside = self.held.views(changes)
        whole = {key: part + self.dropped.get(key, 0.0) for key, part in inside.items()}
        encoded = {key: encode(values, self.sync.dtype) for key, values in whole.items()}
        rounded = encoded if self.sync.dtype != "fp32" else {}
        dropped = {key: whole[key] - one.values for key, one in rounded.items()}
        fragments = {name: place for place, i in enumerate(numbers) for name in self.fragments[i]}
        weights = [self.pending[i] for i in numbers]
        departure = Departure(numbers, fragments, weights, label, changes, parts, inside, encoded, dropped)
        departure.send(exchange, self.held.pieces, self.sync.dtype)
        return departure

    def _changes(self, names: Collection[str]) -> Tensors:
        parameters = self.held.parameters
        return {name: self.start[name] - on_host(parameters[name]) for name in parameters if name in names}

    @torch.no_grad()
    def land(self, departure: "Departure", label: int) -> bool:
        """Take the outer step of what was exchanged. Returns whether all weights are now the same on all islands.

        `label` is this batch's. Weights that have been trained since the departure are mixed in by `sync.alpha`.
        """
        is_late = departure.label != label
        self.dropped |= departure.dropped
        self._step(departure.changes, self.sync.alpha if is_late else 0.0)
        if len(departure.numbers) == len(self.fragments) and not is_late:
            self.begin()
            return True
        for i, weight in zip(departure.numbers, departure.weights, strict=True):
            self.pending[i] -= weight
        return False

    @torch.no_grad()
    def step_alone(self) -> None:
        """Take an outer step with this island's change."""
        self._step(self._changes(self.held.parameters), 0.0)
        self.begin()

    def _step(self, changes: Tensors, alpha: float) -> None:
        for name, change in changes.items():
            start, here = self.start[name], local_tensor(self.held.parameters[name])
            take_outer_step(start, self.velocity[name], change, self.sync.lr, self.sync.momentum)
            here.copy_(alpha * here + (1 - alpha) * start.to(here.device) if alpha else start)

    # ------------------------------------------------------------------------------------- the optimizer's state

    def take_over(self) -> None:
        """Copy weights and momentum from a restored or received state; without a momentum, begin with zeros."""
        self.begin()
        slots, parameters = self.optimizer.state, self.held.parameters
        kept = {name: slots.get(parameter, {}).get(OUTER_MOMENTUM) for name, parameter in parameters.items()}
        self.velocity = {
            name: torch.zeros_like(on_host(parameters[name])) if slot is None else on_host(slot)
            for name, slot in kept.items()
        }
        self.show_momentum()

    def show_momentum(self) -> None:
        """Make the momentum a slot of the optimizer's state, where it is saved and sent to joiners."""
        slots = self.optimizer.state
        for name, parameter in self.held.parameters.items():
            if slots.get(parameter) or parameter.grad is not None:  # the first step sets up a state that is empty
                slots[parameter][OUTER_MOMENTUM] = _like(self.velocity[name], parameter)

    def hide_momentum(self) -> None:
        """Free the device's memory while batches compute."""
        for parameter in self.held.parameters.values():
            self.optimizer.state.get(parameter, {}).pop(OUTER_MOMENTUM, None)


@dataclass
class Departure:
    """The change of some weights on its way to other islands, and then the islands' mean."""

    numbers: Sequence[int]
    """Fragments by number."""
    fragments: dict[str, int]
    """Parameter -> place of its fragment in `numbers`."""
    weights: Sequence[int]
    """Weight of each fragment's change."""
    label: int
    changes: Tensors
    """This rank's parts by parameter. They become the mean."""
    parts: Tensors
    inside: Tensors
    """Views of `changes`: this rank's parts, and its pieces, by key."""
    encoded: dict[str, Encoded]
    dropped: Tensors
    """The rest of each piece that rounding drops."""

    def send(self, exchange: Exchange, pieces: Boxes, dtype: str) -> None:
        """Begin the exchange with the islands of the view, or begin it again after it has failed."""
        self.swap = Swap(exchange, pieces, self.encoded, dtype, self.label, list(map(float, self.weights)))

    @torch.no_grad()
    def take_mean(self, held: HeldParts, own: str) -> float:
        """Replace `changes` by their mean over islands. Returns the sum of squares of this rank's pieces. Every rank
        must call it together."""
        swapped = self.swap.unpack()
        shares: list[dict[str, float]] = []
        for place, weight in enumerate(self.weights):
            weights = {own: float(weight)} | {name: theirs[place] for name, theirs in swapped.weights.items()}
            whole = max(sum(weights[name] for name in sorted(weights)), 1.0)
            shares.append({name: weight / whole for name, weight in weights.items()})
        for key, part in self.inside.items():
            theirs = {island: tensors[key] for island, tensors in swapped.tensors.items()} if part.numel() else {}
            share = shares[self.fragments[held.parts[key].name]]
            part.copy_(sum_weighted(self.encoded[key].values, own, theirs, share))
        held.completion.apply(self.inside, self.parts, torch.float32)
        return sum(float(part.double().square().sum()) for part in self.inside.values())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of this rank's part in the host's memory, in fp32."""
    return local_tensor(tensor).to("cpu", torch.float32, copy=True)


def _like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided as `parameter` is, on its device."""
    local = local.to(local_tensor(parameter).device, copy=True)
    if not isinstance(parameter, DTensor):
        return local
    layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **layout)
