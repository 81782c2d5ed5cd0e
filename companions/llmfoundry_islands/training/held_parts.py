"""This rank's parts of parameters and optimizer state, and their transfer between islands of different layouts.

Islands may shard the same model differently, so they name what they exchange by boxes of whole tensors (see
`tensors.boxes`):

- A *part* is a box of one matrix that this rank holds. A parameter that stacks several matrices, such as q, k and v,
  has one part for each. The key of a part is the parameter's name, followed by `/` and the matrix's number if there
  are several.
- A *slot box* is the part that this rank's optimizer state covers. It differs from the part with ZeRO-1 only.
- A *piece* is this rank's share of a part that several ranks of the island hold. Pieces of an island do not overlap, so
  nothing crosses the link between islands twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_islands.tensors.boxes import (
    Box,
    Boxes,
    Part,
    Redistribution,
    Tensors,
    divide_replicas,
    parts_of,
)
from llmfoundry_lite.checkpoint.planning import check_local_tensors
from llmfoundry_lite.checkpoint.state import (
    join_optimizers,
    local_tensor,
    parameter_names,
    read_state,
    row_orders,
    write_optimizer,
)
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.models.mpt import has_attention_of_ours
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.exchange import all_gather_distinct, all_gather_json, all_reduce_sum

StateKinds = dict[str, list[str]]
"""Kind of state -> names of the parameters that have it. A kind is WEIGHTS, or a slot of the optimizer: `exp_avg`."""
WEIGHTS = ""
"""The kind of state that is the parameters themselves. No slot of an optimizer has this name."""


@dataclass(frozen=True)
class GatheredState:
    """An island's state, as one of its ranks sends it to ranks of an island that joins."""

    kinds: StateKinds
    """Kinds of all ranks, sorted, so that both islands transfer them in the same order."""
    optimizer: dict[str, Any]
    """The optimizer's hyperparameters and numbers, of all ranks."""
    pieces: dict[str, Tensors]
    """Kind of state -> this rank's pieces of it."""


class HeldParts:
    """The parts, slot boxes and pieces of one rank, and the methods that read and write them.

    `begin_view` must be called before any method that uses pieces.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: ModelConfig):
        """Find this rank's parts. Raises CheckpointError if the sharding is not a grid of boxes."""
        self.model = model
        self.optimizer = optimizer
        names = parameter_names(model, optimizer)
        self.rows = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        """Tensors that the optimizer updates: parameters or, with ZeRO-1, this rank's rows of them."""
        self.parameters = {name: getattr(rows, "share_of", rows) for name, rows in self.rows.items()}
        check_local_tensors(self.parameters)
        orders = row_orders(model, {f"model/{name}": parameter for name, parameter in self.parameters.items()})

        is_stacked_by_name = has_attention_of_ours(model)

        def find_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
            parts: dict[str, Part] = {}
            for name, tensor in tensors.items():
                stacked_rows = config.stacked_rows(name) if is_stacked_by_name else ()
                matrix_heights = stacked_rows or tensor.shape[:1]
                parts |= parts_of(name, tensor, matrix_heights, orders.get(f"model/{name}"))
            return parts

        self.parts = find_parts(self.parameters)
        self.slot_parts = find_parts(self.rows)
        self.boxes: Boxes = {key: part.box for key, part in self.parts.items()}

    def begin_view(self, boxes_of_ranks: Sequence[Boxes], pieces_of_ranks: Sequence[Boxes], rank: int) -> None:
        """Set the boxes and pieces of this island's ranks, in order of ranks. This rank has the index `rank`.

        Sets `rank`, `pieces_of_ranks`, `pieces` (this rank's) and `completion`.
        """
        self.rank = rank
        self.pieces_of_ranks = pieces_of_ranks
        self.pieces = pieces_of_ranks[rank]
        self.completion = Redistribution(pieces_of_ranks, boxes_of_ranks, rank)
        """Sends pieces to all ranks of this island that hold them, after other islands have been heard."""

    def views(self, local_tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Return views of this rank's parts, and of its pieces, by key.

        `local_tensors` maps parameter names to what this rank holds of a tensor of that parameter's shape: its weights,
        its gradient, or its change. Parameters that are missing have no views. Writing to a view changes the tensor.
        """
        parts = {}
        for key, part in self.parts.items():
            if part.name in local_tensors:
                parts[key] = part.view_of(local_tensors[part.name])
        pieces = {}
        for key, piece in self.pieces.items():
            if key in parts:
                pieces[key] = parts[key][piece.slices_in(self.boxes[key])]
        return parts, pieces

    def digest(self, weights: Tensors | None = None) -> str:
        """Return a digest of the weights of all ranks, which is the same for every layout.

        `weights` maps parameter names to what this rank holds of them. By default it is the model's weights.
        Collective.
        """
        _, pieces = self.views(weights or self._weights)
        digest = 0
        for key, piece in pieces.items():
            name = self.parts[key].name
            digest += sum_keyed(name, piece, self.pieces[key].offset, self.parameters[name].shape)
        return format_digest(all_reduce_sum([digest])[0])

    def pieces_with(self, names: Iterable[str]) -> Boxes:
        """Return this rank's pieces of the parameters with these names."""
        wanted_names = set(names)
        return {key: piece for key, piece in self.pieces.items() if self.parts[key].name in wanted_names}

    # ------------------------------------------------------------------------------------------ state for joiners

    @property
    def _weights(self) -> Tensors:
        return {name: local_tensor(parameter) for name, parameter in self.parameters.items()}

    def read_state(self, weights: Tensors | None) -> GatheredState:
        """Read this island's weights and optimizer state. Collective.

        `weights`, by parameter name, are sent instead of the model's, if they are given. Every rank gets the kinds and
        the optimizer's numbers of all ranks, and its own pieces.
        """
        state = read_state(self.model, self.optimizer)

        # A rank of a pipeline has the state of its stage only.
        kinds_of_rank: StateKinds = {WEIGHTS: [*self.parameters]}
        for key in state.tensors:
            if key.startswith("optim/"):
                name, kind = key.removeprefix("optim/").rsplit("/", 1)
                kinds_of_rank.setdefault(kind, []).append(name)
        descriptions = [value for value, _ in all_gather_distinct([kinds_of_rank, encode_value(state.optimizer)])]
        names_of_kind: dict[str, set[str]] = {}
        for kinds_of_a_rank, _ in descriptions:
            for kind, names in kinds_of_a_rank.items():
                names_of_kind.setdefault(kind, set()).update(names)
        kinds = {kind: sorted(names_of_kind[kind]) for kind in sorted(names_of_kind)}
        optimizer = join_optimizers([decode_value(numbers) for _, numbers in descriptions])
        assert optimizer is not None

        slots_to_pieces = Redistribution(divide_replicas(self._gather_slot_boxes()), self.pieces_of_ranks, self.rank)
        pieces = {WEIGHTS: self.views(weights or self._weights)[1]}
        for kind in kinds:  # sorted: reading a kind is collective
            if kind != WEIGHTS:
                pieces[kind] = self._read_slot(kind, names_of_kind[kind], state.tensors, slots_to_pieces)
        return GatheredState(kinds, optimizer, pieces)

    def _read_slot(self, slot: str, names: set[str], tensors: Tensors, slots_to_pieces: Redistribution) -> Tensors:
        """Return this rank's pieces of one slot of the optimizer, such as `exp_avg`. Collective.

        `names` are the parameters that have the slot, and `tensors` this rank's state by checkpoint key.
        """
        source = {}
        for key, part in self.slot_parts.items():
            if part.name in names:
                held = part.view_of(local_tensor(tensors[f"optim/{part.name}/{slot}"]))
                source[key] = held[slots_to_pieces.held[key].slices_in(part.box)]
        if slots_to_pieces.is_identity:
            return source
        target = {key: torch.empty(piece.lengths) for key, piece in self.pieces_with(names).items()}
        slots_to_pieces.apply(source, target, torch.float32)
        return target

    def write_state(self, kinds: StateKinds, pieces: Mapping[str, Tensors], optimizer: dict[str, Any]) -> None:
        """Replace the weights and the optimizer's state by those of another island. Collective.

        `kinds` and `optimizer` are the other island's, as `read_state` returns them. `pieces` are this rank's, by kind.
        """
        parts, _ = self.views(self._weights)
        self.completion.apply(pieces[WEIGHTS], parts, torch.float32)

        pieces_to_slots = Redistribution(self.pieces_of_ranks, self._gather_slot_boxes(), self.rank)
        slots: Tensors = {}  # by checkpoint key
        rows_of_slot = {}  # the tensor that a slot belongs to, whose shape it has
        for kind, names in kinds.items():
            if kind == WEIGHTS:
                continue
            held = {name: torch.zeros_like(local_tensor(self.rows[name])) for name in names if name in self.rows}
            target = {key: part.view_of(held[part.name]) for key, part in self.slot_parts.items() if part.name in held}
            pieces_to_slots.apply(pieces[kind], target, torch.float32)
            for name, values in held.items():
                slots[f"optim/{name}/{kind}"] = values
                rows_of_slot[f"optim/{name}/{kind}"] = self.rows[name].detach()
        write_optimizer(self.optimizer, self.rows, optimizer, slots, rows_of_slot)

    def _gather_slot_boxes(self) -> list[Boxes]:
        """Return the boxes that the optimizer state of each rank covers, in order of ranks. Collective."""
        described = all_gather_json({key: part.box for key, part in self.slot_parts.items()})
        return [read_boxes(boxes) for boxes in described]


def read_boxes(described: Mapping[str, Any]) -> Boxes:
    """Decode boxes from JSON: `{"wte": [[0, 0], [4, 3]]}` has the offset (0, 0) and the lengths (4, 3)."""
    return {key: Box(tuple(offset), tuple(lengths)) for key, (offset, lengths) in described.items()}
