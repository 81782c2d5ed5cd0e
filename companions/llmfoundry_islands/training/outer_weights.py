"""The outer state of local steps, on the host: the weights of the last outer step, and their momentum.

`OuterWeights` has this rank's part of that state. It computes the changes that islands exchange, and takes the outer
step with their mean. `FragmentExchange` is one such exchange: `OuterWeights.begin_exchange` starts it, its `take_mean`
replaces the island's change by the mean, and `OuterWeights.finish_exchange` takes the outer step. `local_islands.py`
decides when.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from llmfoundry_islands.block import SyncConfig
from llmfoundry_islands.tensors.boxes import Boxes, Tensors
from llmfoundry_islands.tensors.changes import ChangeExchange
from llmfoundry_islands.tensors.encoding import Encoded, encode
from llmfoundry_islands.tensors.exchange import Exchange
from llmfoundry_islands.tensors.summing import sum_weighted
from llmfoundry_islands.training.held_parts import HeldParts
from llmfoundry_islands.training.local_steps import divide_into_fragments, take_outer_step
from llmfoundry_lite.checkpoint.state import local_tensor
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.exchange import all_gather_distinct
from llmfoundry_lite.training.launch_role import OUTER_MOMENTUM


class OuterWeights:
    """This rank's part of the outer weights and momentum, divided into fragments that are exchanged in turn.

    `load_state` has to be called before the first exchange.
    """

    def __init__(self, sync: SyncConfig, held: HeldParts, optimizer: torch.optim.Optimizer):
        """Divide the parameters into fragments. Raises ConfigError for more fragments than parameters. Collective."""
        self.sync = sync
        self.held = held
        self.optimizer = optimizer
        sizes: dict[str, int] = {}
        # A rank of a pipeline has the parameters of its stage only.
        for sizes_of_ranks, _ in all_gather_distinct({name: p.numel() for name, p in held.parameters.items()}):
            sizes |= sizes_of_ranks
        if sync.fragments > len(sizes):
            raise ConfigError(f"islands.sync.fragments: {sync.fragments} given, the model has {len(sizes)} parameters")
        self.fragments = divide_into_fragments(sizes, sync.fragments)
        """Names of the parameters in each fragment."""
        self.rounding_errors: Tensors = {}
        """What rounding has dropped from the changes of this rank's pieces, by key. The next change gets it."""
        self.pending_weights = [0] * sync.fragments
        """For each fragment, the tokens or samples with a loss that it was trained on since its last exchange."""
        self.outer_weights: Tensors = {}
        """Weights after the last outer step, by parameter. They have the same bits on all islands."""
        self.velocity: Tensors = {}
        """Momentum of the outer steps, by parameter."""

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Make the model's weights, which are the same on all islands now, the outer weights."""
        self.outer_weights = {name: copy_to_host(parameter) for name, parameter in self.held.parameters.items()}
        self.pending_weights = [0] * len(self.fragments)

    def count_batch(self, weight: int) -> None:
        """Count a batch that this island has trained. `weight` is its number of tokens or samples with a loss."""
        self.pending_weights = [pending + weight for pending in self.pending_weights]

    # --------------------------------------------------------------------------------------------- the outer step

    @torch.no_grad()
    def begin_exchange(self, fragment_indices: Sequence[int], exchange: Exchange, label: int) -> "FragmentExchange":
        """Begin to exchange the change of these fragments with all other islands, and return the exchange.

        `label` identifies the batch after which the exchange begins. The other islands must pass the same one.
        """
        place_of_parameter: dict[str, int] = {}
        for place, index in enumerate(fragment_indices):
            for name in self.fragments[index]:
                place_of_parameter[name] = place
        changes = self._changes(place_of_parameter)
        parts, pieces = self.held.views(changes)

        # Error feedback: the sender keeps what rounding drops now, and adds it to the next change.
        encoded: dict[str, Encoded] = {}
        rounding_errors: Tensors = {}
        for key, piece in pieces.items():
            change = piece + self.rounding_errors.get(key, 0.0)
            encoded[key] = encode(change, self.sync.dtype)
            if self.sync.dtype != "fp32":
                rounding_errors[key] = change - encoded[key].values

        fragment_exchange = FragmentExchange(
            fragment_indices=fragment_indices,
            place_of_parameter=place_of_parameter,
            weights=[self.pending_weights[index] for index in fragment_indices],
            label=label,
            changes=changes,
            parts=parts,
            pieces=pieces,
            encoded=encoded,
            rounding_errors=rounding_errors,
        )
        fragment_exchange.begin(exchange, self.held.pieces, self.sync.dtype)
        return fragment_exchange

    def _changes(self, names: Collection[str]) -> Tensors:
        """Return the outer weights minus the model's weights, for the parameters in `names` that this rank holds."""
        changes = {}
        for name, parameter in self.held.parameters.items():
            if name in names:
                changes[name] = self.outer_weights[name] - copy_to_host(parameter)
        return changes

    @torch.no_grad()
    def finish_exchange(self, fragment_exchange: "FragmentExchange", label: int) -> bool:
        """Take the outer step with the mean change, which `FragmentExchange.take_mean` has computed.

        `label` is that of the current batch. If the exchange began at an earlier one, the model has been trained in the
        meantime, and keeps the share `sync.alpha` of its own weights.

        Returns whether all weights are the same on all islands now: all fragments were exchanged, without a delay.
        """
        is_delayed = fragment_exchange.label != label
        self.rounding_errors |= fragment_exchange.rounding_errors
        self._take_step(fragment_exchange.changes, self.sync.alpha if is_delayed else 0.0)

        is_of_all_weights = len(fragment_exchange.fragment_indices) == len(self.fragments)
        if is_of_all_weights and not is_delayed:
            self.copy_weights()
            return True

        # What was trained since the exchange began counts in the next one.
        exchanged_weights = zip(fragment_exchange.fragment_indices, fragment_exchange.weights, strict=True)
        for index, weight in exchanged_weights:
            self.pending_weights[index] -= weight
        return False

    @torch.no_grad()
    def step_alone(self) -> None:
        """Take an outer step of all weights with this island's change, as if there were no other island."""
        self._take_step(self._changes(self.held.parameters), alpha=0.0)
        self.copy_weights()

    def _take_step(self, mean_changes: Tensors, alpha: float) -> None:
        """Take an outer step, and write the new weights into the model.

        `mean_changes` are by parameter. `alpha` is the share of the model's own weights that is kept.
        """
        for name, mean_change in mean_changes.items():
            outer = self.outer_weights[name]
            take_outer_step(outer, self.velocity[name], mean_change, self.sync.lr, self.sync.momentum)
            model_weights = local_tensor(self.held.parameters[name])
            if alpha:
                mixed = alpha * model_weights + (1 - alpha) * outer.to(model_weights.device)
                model_weights.copy_(mixed)
            else:
                model_weights.copy_(outer)

    # ------------------------------------------------------------------------------------- the optimizer's state

    def load_state(self) -> None:
        """Copy weights and momentum from a state that was restored from a checkpoint, or sent by another island.

        If the state has no momentum, it begins with zeros. The momentum is then part of the optimizer's state.
        """
        self.copy_weights()
        self.velocity = {}
        for name, parameter in self.held.parameters.items():
            momentum = self.optimizer.state.get(parameter, {}).get(OUTER_MOMENTUM)
            if momentum is None:
                self.velocity[name] = torch.zeros_like(copy_to_host(parameter))
            else:
                self.velocity[name] = copy_to_host(momentum)
        self.add_momentum_to_optimizer()

    def add_momentum_to_optimizer(self) -> None:
        """Put the momentum into the optimizer's state, from which it is saved and sent to islands that join."""
        slots = self.optimizer.state
        for name, parameter in self.held.parameters.items():
            # An optimizer sets up an empty state in its first step, so nothing may be added before. A parameter with a
            # gradient has been through a step, even if the optimizer keeps no state for it.
            has_been_stepped = bool(slots.get(parameter)) or parameter.grad is not None
            if has_been_stepped:
                slots[parameter][OUTER_MOMENTUM] = _distribute_like(parameter, self.velocity[name])

    def remove_momentum_from_optimizer(self) -> None:
        """Take the momentum out of the optimizer's state, to free the device's memory while batches are trained."""
        for parameter in self.held.parameters.values():
            self.optimizer.state.get(parameter, {}).pop(OUTER_MOMENTUM, None)


@dataclass
class FragmentExchange:
    """An exchange of the changes of some fragments, and afterwards the islands' mean changes. Seen from one rank."""

    fragment_indices: Sequence[int]
    """The fragments that are exchanged."""
    place_of_parameter: dict[str, int]
    """Parameter -> the place of its fragment in `fragment_indices`."""
    weights: Sequence[int]
    """Weight in the mean of this island's change, for each fragment in `fragment_indices`."""
    label: int
    """Label of the batch after which the exchange began."""
    changes: Tensors
    """Changes of what this rank holds, by parameter. `take_mean` replaces them by the means."""
    parts: Tensors
    """Views of `changes`: this rank's parts, by key."""
    pieces: Tensors
    """Views of `changes`: this rank's pieces, by key."""
    encoded: dict[str, Encoded]
    """The pieces as they are sent, by key."""
    rounding_errors: Tensors
    """What rounding has dropped from each piece. Empty for fp32."""

    def begin(self, exchange: Exchange, pieces: Boxes, dtype: str) -> None:
        """Begin to send and receive, or begin again after a failure and a new view. Sets `transfer`."""
        weights = [float(weight) for weight in self.weights]
        self.transfer = ChangeExchange(exchange, pieces, self.encoded, dtype, self.label, weights)

    @torch.no_grad()
    def take_mean(self, held: HeldParts, own_island: str) -> float:
        """Replace `changes` by their mean over islands, once `transfer.wait()` has returned True. Collective.

        Returns the sum of the squares of this rank's pieces. The sum over ranks is the squared norm of the mean change.
        """
        received = self.transfer.unpack()

        # Each fragment has its own shares: an island that joined later has trained some fragments less.
        shares_of_fragments: list[dict[str, float]] = []
        for place, weight in enumerate(self.weights):
            weights = {own_island: float(weight)}
            for island, their_weights in received.weights.items():
                weights[island] = their_weights[place]
            total_weight = sum(weights[island] for island in sorted(weights))
            total_weight = max(total_weight, 1.0)  # 0 if all rows were padding
            shares_of_fragments.append({island: weight / total_weight for island, weight in weights.items()})

        for key, piece in self.pieces.items():
            their_changes = {}
            if piece.numel():
                their_changes = {island: tensors[key] for island, tensors in received.tensors.items()}
            shares = shares_of_fragments[self.place_of_parameter[held.parts[key].name]]
            piece.copy_(sum_weighted(self.encoded[key].values, own_island, their_changes, shares))
        held.completion.apply(self.pieces, self.parts, torch.float32)
        return sum(float(piece.double().square().sum()) for piece in self.pieces.values())


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this rank holds of a tensor, in fp32 in host memory."""
    return local_tensor(tensor).to("cpu", torch.float32, copy=True)


def _distribute_like(parameter: torch.Tensor, local_part: torch.Tensor) -> torch.Tensor:
    """Return a tensor on `parameter`'s device which is sharded like it, and of which this rank has `local_part`."""
    local_part = local_part.to(local_tensor(parameter).device, copy=True)
    if not isinstance(parameter, DTensor):
        return local_part
    return DTensor.from_local(
        local_part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
