"""Sums of gradients, losses and squares that do not depend on their order, and so not on the number of ranks.

A sum of floating-point numbers depends on the order of its terms, because each addition rounds. Multiples of 2^-q are
added in float64 without any rounding, as long as their sum stays below 2^(53-q), because float64 has 53 significant
bits. So each microbatch's gradient is rounded to such multiples ("the grid"), microbatches and ranks are added in
float64, and the sum is rounded once, to fp32.

`ExactSums` does this for gradients. `training/gradient_step.py` calls it in each batch, and measures the norm by the
functions at the end of this module. `parallel/fsdp.py` attaches it to the model.
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
"""q: gradients of microbatches are multiples of 2^-q."""

LARGEST_SUM = 2.0 ** (53 - GRID_BITS)
"""Sums of multiples of 2^-q below this limit are exact in float64."""

SHIFT = 1.5 * 2.0 ** (52 - GRID_BITS)
"""Adding this to a float64, and subtracting it again, rounds the number to a multiple of 2^-q, if it is smaller than a
third of this: the sum then has an exponent at which its last bit is worth 2^-q."""


class ExactSums:
    """Makes the parameters of a model collect exact gradients, in float64.

    `attach` is called once for each module. Then each batch calls `begin_batch`, runs its microbatches forward and
    backward, and calls `finish_batch`.
    """

    def __init__(self) -> None:
        """Begin without a batch. `begin_batch` sets both attributes anew."""
        self.element_limit = 0.0
        """No element of a microbatch's gradient may reach this, or the batch's sum might not be exact. Set by
        `begin_batch`."""
        self._largest_elements: list[Tensor] = []
        """The largest absolute element of each gradient of this batch, appended by `_round_to_grid`."""

    def attach(self, module: nn.Module) -> None:
        """Collect the gradients of all parameters that the module has when it runs.

        Call this after `fully_shard`, which replaces parameters.
        """
        module.register_forward_pre_hook(self._register_rounding)

    def begin_batch(self, parameters: Iterable[nn.Parameter], num_microbatches: int) -> None:
        """Begin a batch: let parameters without a gradient take one in float64, and set `element_limit`.

        `num_microbatches` is their number over all ranks.
        """
        self._largest_elements = []
        self.element_limit = min(SHIFT / 3, LARGEST_SUM / max(num_microbatches, 1))
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad_dtype = torch.float64  # type: ignore[attr-defined]

    def count_out_of_range(self) -> Tensor:
        """Count this rank's gradients with an element that reaches `element_limit` or is not finite: float64, [1]."""
        if self._largest_elements:
            largest = torch.stack(self._largest_elements)
        else:
            largest = torch.zeros(1)
        is_out_of_range = ~(largest < self.element_limit)  # true for NaN, too
        return is_out_of_range.sum().double()

    def finish_batch(self, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> None:
        """Replace the gradient of each parameter by its sum times `scale`, rounded to fp32 for the optimizer."""
        for parameter in parameters:
            total = parameter.grad
            # torch refuses a grad_dtype that is not that of the gradient, so the gradient goes first.
            parameter.grad = None
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
            if total is not None:
                if scale != 1.0:
                    total = total * scale
                parameter.grad = total.float()

    @torch.no_grad()
    def _register_rounding(self, module: nn.Module, _: Any) -> None:
        """Register a hook on each parameter of a module that rounds its gradient to the grid, in float64.

        This is a forward pre-hook. FSDP2's own pre-hook runs before it, so the module has its gathered parameters here,
        which are new tensors whenever FSDP2 has freed and gathered them. `has_rounding_hook` marks those that have been
        prepared already.
        """
        if isinstance(module, FSDPModule):
            # After the reduction, FSDP2 casts a gradient to the parameter's original dtype, fp32, which would round the
            # float64 sum. It skips the cast where it knows no original dtype. This is private to torch 2.13.
            param_group: Any = cast(Any, module)._get_fsdp_state()._fsdp_param_group
            if param_group is not None:
                param_group._orig_dtype = None

        for parameter in module.parameters():
            is_sharded = isinstance(parameter, DTensor)  # the gathered parameters are plain tensors
            if is_sharded or hasattr(parameter, "has_rounding_hook"):
                continue
            parameter.has_rounding_hook = True  # type: ignore[attr-defined]
            parameter.grad_dtype = torch.float64  # type: ignore[attr-defined] - autograd casts to it before the hook
            parameter.register_hook(self._round_to_grid)

    def _round_to_grid(self, gradient: Tensor) -> None:
        """Round a gradient in place, and note its largest element. A hook of each parameter.

        In place, because autograd has just made this copy in float64. It is dense, with its dimensions in any order, so
        that its elements can be read as one vector.
        """
        elements = gradient.as_strided((gradient.numel(),), (1,))
        extremes: list[Tensor] = []
        for chunk in split_into_chunks(elements):
            extremes += chunk.add_(SHIFT).sub_(SHIFT).aminmax()
        self._largest_elements.append(torch.stack(extremes).abs().amax())


CHUNK_ELEMENTS = 1 << 22
"""Elements that are handled at a time, so that temporary tensors stay small."""
CPU_CHUNK_ELEMENTS = 1 << 17
"""The same on a CPU, so that all passes over a chunk find it in the cache."""


def split_into_chunks(vector: Tensor) -> tuple[Tensor, ...]:
    """Split a vector into views with as many elements as its device should handle at a time."""
    return vector.split(CPU_CHUNK_ELEMENTS if vector.device.type == "cpu" else CHUNK_ELEMENTS)


# ------------------------------------------------------------------------------------------- tied embeddings


class _RoundGradient(torch.autograd.Function):
    """The identity of a parameter, whose gradient is rounded to the grid.

    A tied embedding is used twice, at the input and at the output. Autograd adds the gradients of both uses before the
    hook of `ExactSums` sees them, and in a pipeline the uses are on different ranks. Therefore each use rounds its own.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:  # type: ignore[override]
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return (gradient * 2.0**GRID_BITS).round_().mul_(2.0**-GRID_BITS)


def round_embedding_gradient(wte: nn.Embedding) -> None:
    """Make a tied embedding round the gradient of its use at the input. In place."""

    def forward(tokens_bt: Tensor) -> Tensor:
        return F.embedding(tokens_bt, _RoundGradient.apply(wte.weight))

    wte.forward = forward  # type: ignore[method-assign]


def round_unembedding_gradient(sum_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss function that rounds the gradient of the output embedding, its second argument."""

    def rounded(hidden_btd: Tensor, unembedding_vd: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return sum_loss(hidden_btd, _RoundGradient.apply(unembedding_vd), *arguments, **options)

    return rounded


# ------------------------------------------------------------------------------------------------------- the loss


def round_loss(loss: Tensor, *, bits: int = 32) -> Tensor:
    """Round losses to multiples of 2^-bits, in float64. Their sums are exact below 2^(53-bits)."""
    return (loss.double() * 2.0**bits).round_().mul_(2.0**-bits)


# ------------------------------------------------------------------------------------------------------- the norm

# The sum of squares is an integer of many bits, held as limbs of LIMB_BITS bits, the highest first. Each rank calls
# `sum_squares` and `split_sum`, an all-reduce adds the results, and `norm_of_sum` puts the limbs together.

LIMB_BITS = 26
"""Bits of a limb. float64 adds 2^27 numbers of 26 bits exactly."""


def is_first_copy(gradient: Tensor | None) -> bool:
    """Return whether this rank counts its part of a gradient. If several ranks hold the same part, one of them does."""
    if gradient is None:
        return False
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    for index, placement in zip(coordinate, gradient.placements, strict=True):
        if placement.is_replicate() and index > 0:
            return False
    return True


def sum_squares(gradients: Iterable[Tensor], exponent: Tensor) -> Tensor:
    """Add up the squares of fp32 gradients exactly, so that the sum does not depend on the order of additions.

    `exponent` is an integer on the device, such that every number is smaller than 2^exponent. A square is counted in
    units of 2^(2 * exponent - 52), and what is below the unit is dropped. fp32 has 24 significant bits, so that float64
    holds its squares, of 48 bits, without rounding.

    Returns the sum in units as two limbs, int64 [2]: it is high * 2^26 + low. The limbs may exceed 26 bits; `split_sum`
    divides them.
    """
    total = torch.zeros(2, dtype=torch.int64, device=exponent.device)
    scale = torch.ldexp(torch.ones((), dtype=torch.float64, device=exponent.device), -exponent)  # 2^-exponent
    for gradient in gradients:
        for chunk in split_into_chunks(gradient.reshape(-1)):
            # Squares below 1, times 2^26. What is before the point is the high limb, and the next 26 bits the low one.
            squares = (chunk.to(exponent.device).double() * scale).square_().mul_(2.0**LIMB_BITS)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**LIMB_BITS).floor_()
            total += torch.stack([high.sum(), low.sum()]).long()
    return total


def split_sum(total: Tensor) -> Tensor:
    """Divide the result of `sum_squares` into three limbs of 26 bits, which up to 2^27 ranks can add exactly.

    Returns float64, [3], worth 2^52, 2^26 and 1.
    """
    high, low = total.unbind()
    mask = (1 << LIMB_BITS) - 1
    high = high + (low >> LIMB_BITS)
    return torch.stack([high >> LIMB_BITS, high & mask, low & mask]).double()


def norm_of_sum(limbs: Iterable[float], exponent: int) -> float:
    """Return the square root of a sum of squares, rounded to fp32.

    `limbs` are the sum over ranks of what `split_sum` returned, and `exponent` is that of `sum_squares`.
    """
    total = 0
    for limb in limbs:
        total = (total << LIMB_BITS) + int(limb)
    # The unit of `total` is 2^(2 * exponent - 52), and the root of the unit is 2^(exponent - 26).
    return round_to_fp32(math.ldexp(math.sqrt(total), exponent - LIMB_BITS))


def round_to_fp32(number: float) -> float:
    """Round a number to the nearest one that fp32 has."""
    return torch.tensor(number, dtype=torch.float64).float().item()
