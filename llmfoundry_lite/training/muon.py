"""Muon for the matrices of the blocks, AdamW for the rest: embeddings, head, norms and biases.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the mathematics of torch.optim.Muon.
Each step replaces a matrix's momentum by a nearby matrix whose singular values are about 1. That takes the whole
matrix, and ranks have parts of it: they divide the matrices among them, send each to its owner, and get their parts of
the result back. q, k and v are matrices of their own where one parameter holds all three, as the authors advise: so a
fused model takes the same steps as one that is not, also where tensor parallelism divides it by heads.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from llmfoundry_lite.checkpoint.grid import Box
from llmfoundry_lite.checkpoint.planning import NO_ORDERS, box_of
from llmfoundry_lite.config.layout import RowRanges
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import NEWTON_SCHULZ_STEPS, OptimizerConfig
from llmfoundry_lite.ranks.exchange import all_gather_json, rank_and_size
from llmfoundry_lite.training.optimizers import local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's for Newton and Schulz' iteration: steepest at 0, at the price of singular values between 0.7 and 1.2."""
EPS = 1e-7
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Matrix(NamedTuple):
    parameter: Parameter
    heights: tuple[int, ...]
    """Rows of each matrix that the parameter holds, one below the other."""
    row_order: RowRanges | None = None
    """The order in which ranks have the rows, if not in the parameter's."""


def build_muon(
    named: Mapping[str, Parameter],
    config: OptimizerConfig,
    model: ModelConfig,
    group: dist.ProcessGroup | None = None,
    row_orders: Mapping[str, RowRanges] = NO_ORDERS,
    *,
    fused: bool = True,
) -> "Muon":
    """Build Muon for `named`, all parameters or this rank's rows of them.

    `group`: the ranks that have the same blocks; None: all. `row_orders`: by name, the order in which ranks have a
    parameter's rows, if not in its own. `fused`: of AdamW, as in `build_adamw`.
    """
    matrices, others = [], []
    for name, parameter in named.items():
        if "blocks" not in name.split(".") or parameter.ndim != 2:
            others.append(parameter)
            continue
        heights = model.stacked_rows(name) or (parameter.size(0),)
        matrices.append(Matrix(parameter, heights, row_orders.get(name)))
    return Muon(matrices, others, config, group, fused=fused)


class Muon(Optimizer):
    """Muon, with a state of one moment for a matrix, and AdamW's two for any other parameter."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        others: Sequence[Parameter],
        config: OptimizerConfig,
        group: dist.ProcessGroup | None = None,
        *,
        fused: bool = True,
    ):
        self.matrices = matrices
        self.dtype = DTYPES[config.ns_dtype or "bf16"]
        self.group = group
        self._owners: Owners | None = None
        options = {
            "lr": config.lr,
            "weight_decay": config.decay,
            "momentum": 0.95 if config.momentum is None else config.momentum,
            "ns_steps": config.ns_steps or NEWTON_SCHULZ_STEPS,
            "adjust_lr_fn": config.adjust_lr_fn or "match_rms_adamw",
        }
        self.adamw = AdamW(
            others,
            lr=config.adamw_lr or config.lr,
            betas=config.betas or (0.9, 0.95),
            eps=config.eps,
            weight_decay=config.decay,
            fused=fused or None,
        )
        super().__init__([{"params": [m.parameter for m in matrices], **options}, *self.adamw.param_groups], {})
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if any(matrix.parameter.grad is not None for matrix in self.matrices):
            self._step_matrices()
        self.adamw.step()

    def _step_matrices(self) -> None:
        options = self.param_groups[0]
        lr, momentum = options["lr"], options["momentum"]
        if self._owners is None:
            self._owners = Owners([matrix.parameter for matrix in self.matrices], self.group)

        def direction(index: int) -> torch.Tensor:
            """Return this rank's part of the momentum, with Nesterov's look-ahead."""
            parameter = self.matrices[index].parameter
            assert parameter.grad is not None
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            gradient, moment = local(parameter.grad), local(self.state[parameter]["momentum_buffer"])
            moment.lerp_(gradient, 1 - momentum)
            return gradient.lerp(moment, momentum).to(self.dtype)

        def orthogonalise(index: int, whole: torch.Tensor) -> torch.Tensor:
            _, heights, row_order = self.matrices[index]
            parts = (whole if row_order is None else to_parameter_order(whole, row_order)).split(heights)
            scaled = [newton_schulz(p, options["ns_steps"]) * scale_of(p, options["adjust_lr_fn"]) for p in parts]
            result = torch.cat(scaled) if len(scaled) > 1 else scaled[0]
            return result if row_order is None else to_rank_order(result, row_order)

        for index, update in self._owners.apply(direction, orthogonalise):
            weight = local(self.matrices[index].parameter)
            weight.mul_(1 - lr * options["weight_decay"]).add_(update, alpha=-lr)


def newton_schulz(matrix: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T, in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def scale_of(matrix: torch.Tensor, adjust_lr_fn: str) -> float:
    """Scale an update as torch.optim.Muon does. `original` is Jordan's; with `match_rms_adamw` updates are as large as
    AdamW's, whose learning rate and weight decay then serve (Liu et al. 2025, "Muon is Scalable for LLM Training")."""
    rows, columns = matrix.shape
    is_matched = adjust_lr_fn == "match_rms_adamw"
    return 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))


class Owners:
    """Assignment of whole matrices to ranks, and the parts that ranks have of each. The same on all ranks. In each
    round every rank owns one matrix, the largest first, so that the matrices of a round are about equal."""

    def __init__(self, parameters: Sequence[Parameter], group: dist.ProcessGroup | None):
        self.group = group
        self.rank, self.size = rank_and_size(group)
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        places = all_gather_json([box_of(parameter) for parameter in parameters], group)
        self.boxes: list[list[Box]] = [[Box(tuple(begin), tuple(count)) for begin, count in boxes] for boxes in places]
        order = sorted(range(len(parameters)), key=lambda index: (-math.prod(self.shapes[index]), index))
        self.rounds = [order[i : i + self.size] for i in range(0, len(order), self.size)]

    def apply(
        self, part: Callable[[int], torch.Tensor], compute: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (matrix, this rank's part of what `compute` makes of the whole), given this rank's `part` of each."""
        for indices in self.rounds:
            parts = [part(index) for index in indices]
            owned = indices[self.rank] if self.rank < len(indices) else None
            sent = [p if self.rank in self._senders(i) else p[:0] for i, p in zip(indices, parts, strict=True)]
            senders = self._senders(owned) if owned is not None else {}
            pieces = self._exchange(sent, [math.prod(senders[r][1]) if r in senders else 0 for r in range(self.size)])
            answers = [parts[0].new_empty(0)] * self.size
            if owned is not None:
                whole = parts[0].new_empty(self.shapes[owned])
                for rank, box in senders.items():
                    _cell(whole, box).copy_(pieces[rank].view(box[1]))
                whole = compute(owned, whole)
                answers = [_cell(whole, boxes[owned]) for boxes in self.boxes]
            results = self._exchange(answers, [p.numel() for p in parts])
            yield from ((i, found.view_as(p)) for i, found, p in zip(indices, results, parts, strict=False))

    def _senders(self, index: int) -> dict[int, Box]:
        """Return the first rank that has each distinct part, and the part."""
        found: dict[Box, int] = {}
        for rank, boxes in enumerate(self.boxes):
            if math.prod(boxes[index][1]):
                found.setdefault(boxes[index], rank)
        return {rank: box for box, rank in found.items()}

    def _exchange(self, pieces: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Send each rank its piece, and receive `counts` elements from each (all-to-all)."""
        if self.size == 1:
            return [piece.flatten() for piece in pieces]
        counts = [*counts, *[0] * (self.size - len(counts))]
        sizes = [piece.numel() for piece in pieces]
        received = pieces[0].new_empty(sum(counts))
        flat = torch.cat([piece.flatten() for piece in pieces])
        dist.all_to_all_single(received, flat, counts, [*sizes, *[0] * (self.size - len(sizes))], group=self.group)
        return list(received.split(counts))


def _cell(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (begin, count) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, begin, count)
    return whole


def to_parameter_order(tensor: torch.Tensor, runs: RowRanges) -> torch.Tensor:
    """Reorder a whole tensor whose rows come in the ranks' order."""
    result, at = torch.empty_like(tensor), 0
    for first, count in runs:
        result[first : first + count] = tensor[at : at + count]
        at += count
    return result


def to_rank_order(tensor: torch.Tensor, runs: RowRanges) -> torch.Tensor:
    """Undo `to_parameter_order`."""
    return torch.cat([tensor[first : first + count] for first, count in runs])
