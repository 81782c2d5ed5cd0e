"""This rank's parts of parameters and optimizer state, for islands whose ranks divide them in other ways."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_islands.tensors.boxes import Box, Boxes, Part, Redistribution, Tensors, parts_of, share_out
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
from llmfoundry_lite.ranks.codec import decode_value, encode_value
from llmfoundry_lite.ranks.exchange import all_gather_distinct, all_gather_json, all_reduce_sum

Kinds = dict[str, list[str]]
"""Kind of state, WEIGHTS or such as `exp_avg` -> the parameters that have it."""
WEIGHTS = ""


class HeldParts:
    """Parts by key: a parameter's name, with a number behind it where the parameter stacks several matrices.

    The pieces, which this rank exchanges with other islands, are its share of the parts that several ranks hold.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: ModelConfig):
        """Find this rank's parts. Raises CheckpointError for a sharding that is not a grid."""
        self.model, self.optimizer = model, optimizer
        names = parameter_names(model, optimizer)
        self.rows = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        """Tensors that the optimizer updates: parameters or, with ZeRO-1, this rank's rows of them."""
        self.parameters = {name: getattr(rows, "share_of", rows) for name, rows in self.rows.items()}
        check_local_tensors(self.parameters)
        orders = row_orders(model, {f"model/{name}": parameter for name, parameter in self.parameters.items()})

        def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
            parts: dict[str, Part] = {}
            for name, tensor in tensors.items():
                heights = config.stacked_rows(name) or tensor.shape[:1]
                parts |= parts_of(name, tensor, heights, orders.get(f"model/{name}"))
            return parts

        self.parts, self.slots = cut(self.parameters), cut(self.rows)
        self.boxes: Boxes = {key: part.box for key, part in self.parts.items()}

    def begin_view(self, boxes_of_ranks: Sequence[Boxes], pieces_of_ranks: Sequence[Boxes], rank: int) -> None:
        """Note the boxes and pieces of this island's ranks."""
        self.rank, self.pieces_of_ranks, self.pieces = rank, pieces_of_ranks, pieces_of_ranks[rank]
        self.completion = Redistribution(pieces_of_ranks, boxes_of_ranks, rank)
        """Redistribution from pieces to all that ranks hold."""

    def views(self, held: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Return views of parts, and of pieces, of what this rank holds of these parameters."""
        parts = {key: part.of(held[part.name]) for key, part in self.parts.items() if part.name in held}
        inside = {key: piece.within(self.boxes[key]) for key, piece in self.pieces.items() if key in parts}
        return parts, {key: parts[key][place] for key, place in inside.items()}

    def digest(self, weights: Tensors | None = None) -> str:
        """Hash the weights of all ranks, by default the model's, the same for any layout. Every rank must call it
        together."""
        _, pieces = self.views(weights or self._weights)
        sums = [
            sum_keyed(name, pieces[key], self.pieces[key].offset, self.parameters[name].shape)
            for key, name in ((key, self.parts[key].name) for key in pieces)
        ]
        return format_digest(all_reduce_sum([sum(sums)])[0])

    def pieces_with(self, names: Iterable[str]) -> Boxes:
        """Return the pieces of these parameters."""
        wanted = set(names)
        return {key: piece for key, piece in self.pieces.items() if self.parts[key].name in wanted}

    # ------------------------------------------------------------------------------ state (every rank, together)

    @property
    def _weights(self) -> Tensors:
        return {name: local_tensor(parameter) for name, parameter in self.parameters.items()}

    def read_state(self, weights: Tensors | None) -> tuple[Kinds, dict[str, Any], dict[str, Tensors]]:
        """Return the kinds of state of all ranks in order, the optimizer's numbers, and this rank's pieces by kind.

        `weights` take the place of the model's."""
        state = read_state(self.model, self.optimizer)
        own: Kinds = {WEIGHTS: [*self.parameters]}
        for key in state.tensors:
            if key.startswith("optim/"):
                name, kind = key.removeprefix("optim/").rsplit("/", 1)
                own.setdefault(kind, []).append(name)
        described = all_gather_distinct([own, encode_value(state.optimizer)])
        names: dict[str, set[str]] = {}
        for (found, _), _ in described:
            for kind in found:
                names.setdefault(kind, set()).update(found[kind])
        kinds = {kind: sorted(names[kind]) for kind in sorted(names)}
        optimizer = join_optimizers([decode_value(numbers) for (_, numbers), _ in described])
        assert optimizer is not None
        shares = share_out(self._gather_slots())
        plan = Redistribution(shares, self.pieces_of_ranks, self.rank)
        pieces = {WEIGHTS: self.views(weights or self._weights)[1]}
        for kind in [kind for kind in kinds if kind != WEIGHTS]:  # collectives, so in the same order
            pieces[kind] = self._read_pieces(kind, names[kind], state.tensors, plan)
        return kinds, optimizer, pieces

    def _read_pieces(self, kind: str, names: set[str], tensors: Tensors, plan: Redistribution) -> Tensors:
        """Return this rank's pieces of one kind of optimizer state, of which ranks have the boxes `plan.have`."""
        slots = {key: part for key, part in self.slots.items() if part.name in names}
        held = {key: part.of(local_tensor(tensors[f"optim/{part.name}/{kind}"])) for key, part in slots.items()}
        source = {key: held[key][plan.have[key].within(part.box)] for key, part in slots.items()}
        if plan.is_idle:
            return source
        target = {key: torch.empty(piece.lengths) for key, piece in self.pieces_with(names).items()}
        plan.apply(source, target, torch.float32)
        return target

    def write_state(self, kinds: Kinds, pieces: Mapping[str, Tensors], optimizer: dict[str, Any]) -> None:
        """Replace the weights and the optimizer's state by pieces of other islands."""
        weights, _ = self.views(self._weights)
        self.completion.apply(pieces[WEIGHTS], weights, torch.float32)
        plan = Redistribution(self.pieces_of_ranks, self._gather_slots(), self.rank)
        slots: Tensors = {}
        for kind, names in kinds.items():
            if kind == WEIGHTS:
                continue
            held = {name: torch.zeros_like(local_tensor(self.rows[name])) for name in names if name in self.rows}
            target = {key: part.of(held[part.name]) for key, part in self.slots.items() if part.name in held}
            plan.apply(pieces[kind], target, torch.float32)
            slots |= {f"optim/{name}/{kind}": values for name, values in held.items()}
        like = {key: self.rows[key.removeprefix("optim/").rsplit("/", 1)[0]].detach() for key in slots}
        write_optimizer(self.optimizer, self.rows, optimizer, slots, like)

    def _gather_slots(self) -> list[Boxes]:
        """Return the boxes of all ranks' optimizer state."""
        boxes = all_gather_json({key: part.box for key, part in self.slots.items()})
        return [read_boxes(one) for one in boxes]


def read_boxes(described: Mapping[str, Any]) -> Boxes:
    """Read boxes from JSON."""
    return {key: Box(tuple(offset), tuple(lengths)) for key, (offset, lengths) in described.items()}
