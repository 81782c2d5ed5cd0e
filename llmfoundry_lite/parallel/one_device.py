"""A model that one device holds without FSDP2, which copies parameters and gradients even where nobody shares them.

Parameters are plain and fp32. Each block sees them in the compute precision: cast in each forward pass, or once a batch
(`fsdp_config.plain_on_one_device`). Their gradients are added up in fp32 either way.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmfoundry_lite.config.schema import FSDPConfig
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.parallel.recompute import checkpoint_activations


def prepare_for_one_device(
    model: MPT,
    fsdp: FSDPConfig,
    precision: Precision,
    compile_config: dict[str, Any] | None = None,
    *,
    casts_once: bool = False,
) -> None:
    """Compile blocks, cast parameters and checkpoint activations. In place.

    With `casts_once` call `renew_copies` when a batch begins. torch cannot compile the replacement of parameters, so
    compiled blocks lie within it. Recomputation replaces them again, which a compiled block does not allow.
    """
    assert compile_config is None or not fsdp.activation_checkpointing, "`shard_model` keeps FSDP2 for it"
    inside = {module for block in model.transformer.blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    copies: list[HeldCopies] = []

    def cast_parameters(module: nn.Module, owners: Iterable[nn.Module]) -> None:
        if precision.parameters == torch.float32:
            return
        if casts_once:
            copies.append(HeldCopies(precision.parameters))
        _compute_with(copies[-1] if casts_once else partial(_cast, precision.parameters), module, owners)

    for block in model.transformer.blocks:
        if compile_config is not None:
            block.forward = torch.compile(block.forward, **compile_config)
        cast_parameters(block, block.modules())
        if fsdp.activation_checkpointing:
            checkpoint_activations(block, fsdp)
    cast_parameters(model, outside)
    cast(Any, model).held_copies = copies


def renew_copies(model: nn.Module) -> None:
    """Cast the parameters of a model that does so once a batch. Without effect on others."""
    for copies in getattr(model, "held_copies", ()):
        copies.renew()


class HeldCopies:
    """Copies of some parameters in 16 bits, which all microbatches of a batch use.

    `renew` must be called when a batch begins: nothing else tells that parameters have changed. torch's fused
    optimizers and checkpoints write into their memory without counting it as a change.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.masters: list[nn.Parameter] = []
        self.copies: list[Tensor] = []
        self.have_gradients = False

    def __call__(self, masters: list[nn.Parameter]) -> Sequence[Tensor]:
        """Return the copies, through which gradients reach the parameters; without gradients, casts of this moment."""
        if not torch.is_grad_enabled():
            return _cast(self.dtype, masters)
        if not self.copies:
            self.masters = masters
            self.copies = [torch.empty_like(master, dtype=self.dtype, requires_grad=False) for master in masters]
            for master in masters:
                master.grad_dtype = None  # type: ignore[attr-defined] - it takes gradients of either dtype
            self.renew()
        are_cleared = self.have_gradients and all(master.grad is None for master in masters)
        assert not are_cleared, "renew_copies was not called, though gradients were cleared for another batch"
        return cast(Any, _UseCopies).apply(self, *masters)

    @torch.no_grad()
    def renew(self) -> None:
        self.have_gradients = False
        if self.copies:
            torch._foreach_copy_(self.copies, cast(Any, self.masters))


class _UseCopies(torch.autograd.Function):
    """Parameters as copies that exist already."""

    @staticmethod
    def forward(ctx: Any, held: HeldCopies, *masters: nn.Parameter) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.held = held
        ctx.set_materialize_grads(False)
        return tuple(copy.detach() for copy in held.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The first gradient becomes the sum, in fp32. Autograd adds 16-bit ones to it without casting them before."""
        ctx.held.have_gradients = True
        pairs = zip(gradients, ctx.held.masters, strict=True)
        return None, *(g if g is None or master.grad is not None else g.to(master.dtype) for g, master in pairs)


def _cast(dtype: torch.dtype, masters: list[nn.Parameter]) -> Sequence[Tensor]:
    """Cast parameters; autograd casts their gradients back."""
    return [master.to(dtype) for master in masters]


def _compute_with(
    cast_all: Callable[[list[nn.Parameter]], Sequence[Tensor]], module: nn.Module, owners: Iterable[nn.Module]
) -> None:
    """Replace `module.forward` with one that sees the parameters of `owners` as `cast_all` returns them."""
    forward = module.forward
    places = [(owner, name) for owner in owners for name, p in owner._parameters.items() if p is not None]

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        masters = [cast(nn.Parameter, owner._parameters[name]) for owner, name in places]
        try:
            for (owner, name), seen in zip(places, cast_all(masters), strict=True):
                owner._parameters[name] = cast(Any, seen)
            return forward(*args, **kwargs)
        finally:
            for (owner, name), master in zip(places, masters, strict=True):
                owner._parameters[name] = master

    module.forward = cast_forward
