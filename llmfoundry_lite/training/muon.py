"""Muon for the matrices of the blocks, AdamW for the rest: embeddings, head, norms and biases.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the mathematics of torch.optim.Muon.
Each step replaces a matrix's momentum by a nearby matrix whose singular values are about 1. That needs the whole
matrix, but each rank has only a part of it. So the ranks assign each matrix to one of them, send that rank their parts,
and receive their parts of the result. If one parameter holds q, k and v, these count as three matrices, as the authors
advise. So a fused model takes the same steps as one that is not fused, also if tensor parallelism divides it by heads.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.grid import Box
from llmfoundry_lite.checkpoint.planning import NO_ORDERS, box_of
from llmfoundry_lite.checkpoint.state import row_orders
from llmfoundry_lite.config.layout import RowRanges
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizer_schema import NEWTON_SCHULZ_STEPS, OptimizerConfig
from llmfoundry_lite.models.mpt import has_attention_of_ours
from llmfoundry_lite.models.names import is_matrix_of_block
from llmfoundry_lite.parallel.mesh import build_stage_group
from llmfoundry_lite.ranks.exchange import all_gather_json, rank_and_size
from llmfoundry_lite.training.optimizers import OptimizerContext, ParameterGroup, adamw_group, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients for the iteration of Newton and Schulz: steepest at 0, at the price of singular values between
0.7 and 1.2."""
MOMENTUM = 0.95
"""Jordan's default."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""
MATCHED_RMS = 0.2
"""RMS of AdamW's updates, which Muon's get with `match_rms_adamw` (Liu et al. 2025)."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Matrix(NamedTuple):
    """A parameter of two dimensions that Muon updates, which may hold several matrices, one below the other."""

    parameter: Parameter
    heights: tuple[int, ...]
    """Number of rows of each matrix that the parameter holds, one below the other, such as those of q, k and v."""
    row_order: RowRanges | None = None
    """The order in which ranks have the parameter's rows; None for its own order."""


class MuonGroup(NamedTuple):
    """A group of parameters, divided into those that Muon updates and those that AdamW updates."""

    matrices: Sequence[Matrix]
    others: dict[str, Parameter]
    settings: OptimizerConfig


def build_muon(groups: Sequence[ParameterGroup], context: OptimizerContext) -> "Muon":
    """Build Muon for this rank's part of a model. Collective: the ranks that have the same blocks form a group."""
    parameters: dict[str, Parameter] = {}
    for group in groups:
        parameters |= group.parameters

    # Muon works on whole matrices, so it has to know in which order ranks hold the rows of those that they divide.
    # `row_orders` takes names as checkpoints have them, with the prefix model/.
    state_names = {f"model/{name}": parameter for name, parameter in parameters.items()}
    orders = row_orders(context.model, state_names)
    orders_by_name = {name.removeprefix("model/"): row_ranges for name, row_ranges in orders.items()}
    return muon_of_groups(
        groups,
        context.model_config,
        build_stage_group(context.layout, devices.device_type()),
        orders_by_name,
        fused=context.fused,
        has_attention_of_ours=has_attention_of_ours(context.model),
    )


def muon_of_groups(
    groups: Sequence[ParameterGroup],
    model: ModelConfig,
    process_group: dist.ProcessGroup | None = None,
    row_orders: Mapping[str, RowRanges] = NO_ORDERS,
    *,
    fused: bool = True,
    has_attention_of_ours: bool = True,
) -> "Muon":
    """Build Muon, which updates the matrices of the model's blocks itself and all other parameters by AdamW.

    `process_group` has the ranks that have the same blocks; None for all. `row_orders` has, by name, the order in which
    ranks have a parameter's rows, if it is not the parameter's own. `fused` asks for AdamW's step in one kernel.
    `has_attention_of_ours` says that a matrix named Wqkv stacks those of q, k and v.
    """
    muon_groups: list[MuonGroup] = []
    for parameters, settings in groups:
        matrices: list[Matrix] = []
        other_parameters: dict[str, Parameter] = {}
        for name, parameter in parameters.items():
            if is_matrix_of_block(name, parameter.ndim):
                stacked_rows = model.stacked_rows(name) if has_attention_of_ours else ()
                heights = stacked_rows or (parameter.size(0),)  # of q, k and v, if one parameter holds them
                matrices.append(Matrix(parameter, heights, row_orders.get(name)))
            else:
                other_parameters[name] = parameter
        muon_groups.append(MuonGroup(matrices, other_parameters, settings))
    return Muon(muon_groups, process_group, fused=fused)


class Muon(Optimizer):
    """Muon, which keeps one moment for each matrix, and AdamW, which keeps two for each other parameter."""

    def __init__(
        self,
        groups: Sequence[MuonGroup],
        process_group: dist.ProcessGroup | None = None,
        *,
        fused: bool = True,
    ):
        """Prepare to update the matrices of all groups by Muon, and their other parameters by AdamW.

        `process_group` are the ranks that divide the matrices among them; None for all. The first half of
        `param_groups` has the matrices of each group, and is Muon's. The second half has the other parameters of each
        group, and is AdamW's, which shares this optimizer's `param_groups` and `state`.
        """
        self.dtype = DTYPES[groups[0].settings.ns_dtype or "bf16"]  # the same for all groups
        self.process_group = process_group
        self._owners: Owners | None = None
        """None before the first step, because building it is collective."""
        self.matrices: list[Matrix] = []
        self._group_of_matrix: list[int] = []
        """Number of each matrix's group."""
        for number, group in enumerate(groups):
            self.matrices += group.matrices
            self._group_of_matrix += [number] * len(group.matrices)

        # None lets torch choose another fast implementation; False would not.
        self.adamw = AdamW([others_group(group) for group in groups], fused=fused or None)
        super().__init__([*map(matrices_group, groups), *self.adamw.param_groups], {})
        # Both see the same options and moments, so that schedules and checkpoints need to know one optimizer.
        self.adamw.param_groups = self.param_groups[len(groups) :]
        self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Collective over the group.

        Without gradients, as after a batch that was skipped because it was not finite, this changes nothing.
        """
        if any(matrix.parameter.grad is not None for matrix in self.matrices):
            self._step_matrices()
        self.adamw.step()

    def _step_matrices(self) -> None:
        """Update the momentum and the weights of all matrices by Muon. Collective over the group.

        All of them have gradients. Each rank adds its part of the gradient to its part of the momentum. The rank that
        owns a matrix receives all parts of its momentum, orthogonalises the whole, and sends each rank its part of the
        update. Every rank then applies its parts to its weights.
        """
        if self._owners is None:
            self._owners = Owners([matrix.parameter for matrix in self.matrices], self.process_group)

        def orthogonalise(index: int, momentum: torch.Tensor) -> torch.Tensor:
            """Return the update of matrix `index`, given its whole momentum, with rows in the order of the ranks."""
            _, heights, row_order = self.matrices[index]
            options = self._options_of(index)
            if row_order is not None:
                momentum = to_parameter_order(momentum, row_order)
            # A parameter that holds q, k and v is orthogonalised as three matrices.
            updates = [
                newton_schulz(part, options["ns_steps"]) * scale_of(part, options["adjust_lr_fn"])
                for part in momentum.split(heights)
            ]
            update = torch.cat(updates) if len(updates) > 1 else updates[0]
            return update if row_order is None else to_rank_order(update, row_order)

        for index, update in self._owners.apply(self._update_momentum, orthogonalise):
            options = self._options_of(index)
            lr = options["lr"]
            weight = local(self.matrices[index].parameter)
            weight.mul_(1 - lr * options["weight_decay"]).add_(update, alpha=-lr)

    def _options_of(self, index: int) -> dict[str, Any]:
        """Return the options of the group that matrix `index` is in."""
        return self.param_groups[self._group_of_matrix[index]]

    def _update_momentum(self, index: int) -> torch.Tensor:
        """Add the gradient of matrix `index` to its momentum, in place, and return what is to be orthogonalised.

        The momentum is an exponential moving average of gradients. With m its coefficient, the result is (1 - m) times
        the gradient plus m times the new momentum: Nesterov's look-ahead by one step. Gradient, momentum and result are
        this rank's parts of the matrix. The result has the dtype of the Newton-Schulz iteration.
        """
        momentum = self._options_of(index)["momentum"]
        parameter = self.matrices[index].parameter
        assert parameter.grad is not None
        if not self.state[parameter]:  # the first step
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = local(parameter.grad)
        moving_average = local(self.state[parameter]["momentum_buffer"])
        moving_average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(moving_average, momentum).to(self.dtype)


def matrices_group(group: MuonGroup) -> dict[str, Any]:
    """Return the matrices of a group, with their options, as a group of torch's."""
    settings = group.settings
    return {
        "params": [matrix.parameter for matrix in group.matrices],
        "lr": settings.lr,
        "weight_decay": settings.decay,
        "momentum": MOMENTUM if settings.momentum is None else settings.momentum,
        "ns_steps": settings.ns_steps or NEWTON_SCHULZ_STEPS,
        "adjust_lr_fn": settings.adjust_lr_fn or "match_rms_adamw",
    }


def others_group(group: MuonGroup) -> dict[str, Any]:
    """Return the other parameters of a group, with their options, as AdamW takes them."""
    settings = group.settings
    return adamw_group(group.others, replace(settings, lr=settings.adamw_lr or settings.lr))


def newton_schulz(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Approximate the nearest matrix whose singular values are all 1, by `num_steps` Newton-Schulz iterations.

    If U S V^T is the singular value decomposition of `matrix`, that is U V^T. The result has the same dtype. Each
    iteration applies the polynomial a x + b (x x^T) x + c (x x^T)^2 x, which changes singular values alone: it moves
    those between 0 and 1 towards 1. It needs matrix products only, which GPUs compute fast in bf16.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix  # so that x x^T is the smaller product
    x = x / x.norm().clamp(min=EPS)  # no singular value is larger than the Frobenius norm, so all are at most 1 now
    for _ in range(num_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b (x x^T) + c (x x^T)^2
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def scale_of(matrix: torch.Tensor, adjust_lr_fn: str) -> float:
    """Return the factor by which the update of a matrix is multiplied, as torch.optim.Muon does.

    An orthogonalised matrix has singular values of about 1, so the size of its elements depends on its shape.
    `original` is Jordan's factor for that. With `match_rms_adamw`, updates are as large as AdamW's, so that its
    learning rate and weight decay can be used (Liu et al. 2025, "Muon is Scalable for LLM Training").
    """
    num_rows, num_columns = matrix.shape
    if adjust_lr_fn == "match_rms_adamw":
        return MATCHED_RMS * math.sqrt(max(num_rows, num_columns))
    return math.sqrt(max(1, num_rows / num_columns))


class Owners:
    """Assigns whole matrices to ranks, and exchanges the parts that ranks have of them.

    In each round, every rank owns one matrix. The largest matrices come first, so that those of a round have about the
    same size. The assignment is the same on all ranks.
    """

    def __init__(self, parameters: Sequence[Parameter], group: dist.ProcessGroup | None):
        """Gather which part of each matrix every rank of the group holds, and assign the matrices to ranks.

        Collective over the group. `parameters` are the matrices, in the same order on all ranks.
        """
        self.group = group
        self.rank, self.size = rank_and_size(group)
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.boxes: list[list[Box]] = []
        """`boxes[rank][index]` is the part of matrix `index` that a rank holds."""
        own_boxes = [box_of(parameter) for parameter in parameters]
        for boxes_of_rank in all_gather_json(own_boxes, group):
            self.boxes.append([Box(tuple(offset), tuple(lengths)) for offset, lengths in boxes_of_rank])

        # Matrices of one round are computed at the same time, so they should be about equally large. The index decides
        # between equal ones, so that all ranks have the same order.
        indices = range(len(parameters))
        largest_first = sorted(indices, key=lambda index: (-math.prod(self.shapes[index]), index))
        self.rounds = [largest_first[begin : begin + self.size] for begin in indices[:: self.size]]
        """Indices of the matrices of each round. Rank r owns the r-th one."""

    def apply(
        self, read_part: Callable[[int], torch.Tensor], compute: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute a function of each whole matrix on the rank that owns it, and return every rank its part.

        Collective over the group: every rank must exhaust the iterator. `read_part(index)` returns this rank's part of
        a matrix. `compute(index, whole)` returns the result, of the same shape as the whole matrix.

        Yields, for each matrix, its index and this rank's part of the result. With 2 ranks and 5 matrices, there are
        three rounds: in each of the first two, both ranks own a matrix, and in the last one only rank 0 does.
        """
        for indices in self.rounds:
            # Send this rank's part of each matrix to its owner.
            parts = [read_part(index) for index in indices]
            owned = indices[self.rank] if self.rank < len(indices) else None  # None in the last round, on some ranks
            pieces = self._send_parts(indices, parts, owned)

            # The owner puts the parts together, computes the result, and cuts it into the parts of all ranks.
            empty = parts[0].new_empty(0)
            results_to_send = [empty] * self.size
            if owned is not None:
                whole = parts[0].new_empty(self.shapes[owned])
                for rank, box in self._find_senders(owned).items():
                    _view_box(whole, box).copy_(pieces[rank].view(box.lengths))
                result = compute(owned, whole)
                results_to_send = [_view_box(result, boxes[owned]) for boxes in self.boxes]

            # Receive this rank's part of each result. Ranks that own no matrix have sent nothing.
            num_elements_by_owner = [part.numel() for part in parts]
            results = self._exchange(results_to_send, num_elements_by_owner)
            for index, part, result_part in zip(indices, parts, results, strict=False):
                yield index, result_part.view_as(part)

    def _send_parts(
        self, indices: Sequence[int], parts: Sequence[torch.Tensor], owned: int | None
    ) -> list[torch.Tensor]:
        """Send this rank's parts of a round's matrices to their owners, and receive the parts of the owned matrix.

        Collective over the group. `indices` are the matrices of the round, `parts` this rank's parts of them, and
        `owned` the matrix that this rank owns, or None. If several ranks hold the same part, only the first of them
        sends it. Returns the parts of matrix `owned` by the rank that has sent them, flat; empty from other ranks.
        """
        # The r-th matrix of a round is owned by rank r.
        parts_to_send: list[torch.Tensor] = []
        for index, part in zip(indices, parts, strict=True):
            is_sender = self.rank in self._find_senders(index)
            parts_to_send.append(part if is_sender else part[:0])

        # How much this rank receives as an owner.
        num_elements_by_rank = [0] * self.size
        if owned is not None:
            for rank, box in self._find_senders(owned).items():
                num_elements_by_rank[rank] = math.prod(box.lengths)
        return self._exchange(parts_to_send, num_elements_by_rank)

    def _find_senders(self, index: int) -> dict[int, Box]:
        """Return which ranks send a part of matrix `index` to its owner, and which part.

        Several ranks may hold the same part, if parameters are replicated. The first of them sends it. A rank whose
        part is empty sends nothing.
        """
        first_ranks: dict[Box, int] = {}
        for rank, boxes in enumerate(self.boxes):
            box = boxes[index]
            if math.prod(box.lengths):
                first_ranks.setdefault(box, rank)
        return {rank: box for box, rank in first_ranks.items()}

    def _exchange(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Send `pieces[r]` to rank r, and receive `counts[r]` elements from it, for each rank r of the group.

        Collective over the group (all-to-all). Both lists may be shorter than the group; the ranks after their end are
        sent nothing, or send nothing. Returns what was received, by rank, as flat tensors.
        """
        if self.size == 1:
            return [piece.flatten() for piece in pieces]

        # torch takes one tensor with all pieces, and a number of elements for each rank.
        counts_received = [*counts, *[0] * (self.size - len(counts))]
        counts_sent = [piece.numel() for piece in pieces]
        counts_sent += [0] * (self.size - len(counts_sent))
        received = pieces[0].new_empty(sum(counts_received))
        flat = torch.cat([piece.flatten() for piece in pieces])
        dist.all_to_all_single(received, flat, counts_received, counts_sent, group=self.group)
        return list(received.split(counts_received))


def _view_box(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the part of a tensor that `box` describes, as a view."""
    for dim, (begin, length) in enumerate(zip(box.offset, box.lengths, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole


def to_parameter_order(tensor: torch.Tensor, row_ranges: RowRanges) -> torch.Tensor:
    """Return a tensor with its rows in the parameter's own order, given one with rows in the order of the ranks.

    Tensor parallelism gives each rank its heads' rows of q, k and v, so a tensor that is put together from the ranks'
    parts has another order. `row_ranges` are ranges of the parameter's rows, (first, count), in the order of the ranks.
    For example, with [(0, 2), (4, 2), (2, 2), (6, 2)], rows 2 and 3 of `tensor` become rows 4 and 5 of the result.
    """
    result = torch.empty_like(tensor)
    begin = 0
    for first, count in row_ranges:
        result[first : first + count] = tensor[begin : begin + count]
        begin += count
    return result


def to_rank_order(tensor: torch.Tensor, row_ranges: RowRanges) -> torch.Tensor:
    """Return a tensor with its rows in the order of the ranks, given one with rows in the parameter's own order.

    This undoes `to_parameter_order`, which explains `row_ranges`.
    """
    return torch.cat([tensor[first : first + count] for first, count in row_ranges])
