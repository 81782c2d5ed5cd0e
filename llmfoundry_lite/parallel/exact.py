"""Sums of gradients that do not depend on their order, and so not on the number of ranks.

A sum of floating-point numbers depends on the order of its terms. Multiples of 2^-q below 2^(53-q) are added in float64
without any rounding. So each microbatch's gradient is rounded to such multiples, microbatches and ranks are added in
float64, and the sum is rounded once, to fp32.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

GRID_BITS = 46
"""q: microbatches' gradients are multiples of 2^-q."""

LARGEST_SUM = 2.0 ** (53 - GRID_BITS)
"""Below it float64 holds every multiple of 2^-q."""

SHIFT = 1.5 * 2.0 ** (52 - GRID_BITS)
"""Adding it to a float64 rounds that to a multiple of 2^-q, if it is smaller than a third of this."""


class ExactSums:
    """Makes the parameters of a model collect exact gradients, in float64, and knows the largest number added."""

    def __init__(self) -> None:
        self.largest_element = 0.0
        """No element of a microbatch's gradient may be this large."""
        self._largest: list[Tensor] = []

    def watch(self, module: nn.Module) -> None:
        """Collect the gradients of the parameters that the module sees when it runs. After `fully_shard`, if at all."""
        module.register_forward_pre_hook(self._prepare)

    def begin(self, parameters: Iterable[nn.Parameter], num_microbatches: int) -> None:
        """Begin a batch of `num_microbatches` over all ranks: parameters without a gradient accept one in float64."""
        self._largest = []
        self.largest_element = min(SHIFT / 3, LARGEST_SUM / max(num_microbatches, 1))
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad_dtype = torch.float64  # type: ignore[attr-defined]

    def count_out_of_range(self) -> Tensor:
        """Count gradients with an element that is too large for its sum to be exact, or not finite: float64 [1]."""
        largest = torch.stack(self._largest) if self._largest else torch.zeros(1)
        return (~(largest < self.largest_element)).sum().double()

    def finish(self, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> None:
        """Round each sum, times `scale`, to fp32 for the optimizer."""
        for parameter in parameters:
            total, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
            parameter.grad = None if total is None else (total * scale if scale != 1.0 else total).float()

    @torch.no_grad()
    def _prepare(self, module: nn.Module, _: Any) -> None:
        if isinstance(module, FSDPModule):
            # FSDP would round each sum over ranks to the parameters' dtype; without a dtype it keeps the sums.
            group: Any = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._orig_dtype = None
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not hasattr(parameter, "is_watched"):
                parameter.is_watched = True  # type: ignore[attr-defined]
                parameter.grad_dtype = torch.float64  # type: ignore[attr-defined]
                parameter.register_hook(self._round_to_grid)

    def _round_to_grid(self, gradient: Tensor) -> None:
        """Round in place: autograd has just made this float64 copy, dense in any order of dimensions."""
        pieces = split_by_device(gradient.as_strided((gradient.numel(),), (1,)))
        extremes = [extreme for piece in pieces for extreme in piece.add_(SHIFT).sub_(SHIFT).aminmax()]
        self._largest.append(torch.stack(extremes).abs().amax())


PIECE, CPU_PIECE = 1 << 22, 1 << 17
"""Elements that are handled at a time: few temporaries, and on a CPU all passes over them in its cache."""


def split_by_device(numbers: Tensor) -> tuple[Tensor, ...]:
    return numbers.split(CPU_PIECE if numbers.device.type == "cpu" else PIECE)


class _RoundGradient(torch.autograd.Function):
    """A parameter as one of its uses sees it, whose gradient is rounded before other uses' are added."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # type: ignore[override]
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return (gradient * 2.0**GRID_BITS).round_().mul_(2.0**-GRID_BITS)


def round_tied_gradients(wte: nn.Embedding) -> None:
    """Round the embedding's part of a gradient that it shares with the unembedding, possibly on another rank."""
    wte.forward = lambda tokens_bt: F.embedding(tokens_bt, _RoundGradient.apply(wte.weight))  # type: ignore[method-assign]


def round_unembedding(sum_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Round the unembedding's part of that gradient; it is the second argument of the loss."""

    def rounded(hidden_btd: Tensor, unembedding_vd: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return sum_loss(hidden_btd, _RoundGradient.apply(unembedding_vd), *arguments, **options)

    return rounded


def round_loss(loss: Tensor, *, bits: int = 32) -> Tensor:
    """Round losses to multiples of 2^-bits, in float64: their sums are exact below 2^(53-bits)."""
    return (loss.double() * 2.0**bits).round_().mul_(2.0**-bits)


# ------------------------------------------------------------------------------------------------------- the norm

LIMB_BITS = 26
"""Bits of a summand: float64 adds 2^27 of them exactly."""


def is_first_copy(gradient: Tensor | None) -> bool:
    """Return whether this rank's part of the gradient counts; of equal parts on several ranks, one does."""
    if not isinstance(gradient, DTensor):
        return gradient is not None
    place = gradient.device_mesh.get_coordinate()
    assert place is not None
    return not any(index for index, kind in zip(place, gradient.placements, strict=True) if kind.is_replicate())


def sum_squares(gradients: Iterable[Tensor], exponent: Tensor) -> Tensor:
    """Add up squares exactly, in units of 2^(2 * exponent - 52): int64 [2], of which the first counts 2^26.

    `exponent`, an integer on the device, is such that no number is 2^exponent or larger. Of a square, what is below the
    unit is dropped. The gradients are fp32: their squares have 48 bits, which float64 holds.
    """
    total = torch.zeros(2, dtype=torch.int64, device=exponent.device)
    unit = torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), -exponent)
    for gradient in gradients:
        for numbers in split_by_device(gradient.reshape(-1)):
            squares = (numbers.to(exponent.device).double() * unit).square_().mul_(2.0**LIMB_BITS)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**LIMB_BITS).floor_()
            total += torch.stack([high.sum(), low.sum()]).long()
    return total


def as_summands(total: Tensor) -> Tensor:
    """Divide `sum_squares` into float64 [3] that ranks can add exactly, up to 2^27 of them: 2^52, 2^26, 1."""
    high, low = total.unbind()
    mask = (1 << LIMB_BITS) - 1
    high = high + (low >> LIMB_BITS)
    return torch.stack([high >> LIMB_BITS, high & mask, low & mask]).double()


def norm_of(summands: Iterable[float], exponent: int) -> float:
    """Return the root of the sum over ranks of `as_summands`, rounded to fp32."""
    total = 0
    for summand in summands:
        total = (total << LIMB_BITS) + int(summand)
    return round_to_fp32(math.ldexp(math.sqrt(total), exponent - LIMB_BITS))


def round_to_fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).float().item()
