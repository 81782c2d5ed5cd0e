"""A model on one device without FSDP2, which would copy parameters and gradients though there is nobody to share them.

Parameters are plain tensors in fp32, the masters. Each block computes with copies of them in the precision of the run,
which are made in each forward pass, or once a batch (`fsdp_config.plain_on_one_device`). Gradients are added up in fp32
either way.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.parallel.recompute import checkpoint_activations

Cast = Callable[[list[nn.Parameter]], Sequence[Tensor]]
"""Maps masters to the tensors that a module computes with."""


def prepare_for_one_device(
    model: MPT,
    fsdp: FSDPConfig,
    precision: Precision,
    compile_config: dict[str, Any] | None = None,
    *,
    casts_once: bool = False,
) -> None:
    """Prepare a model for training on one device, where FSDP2 would only cost memory. Changes the model in place.

    Each block is compiled and its activations are checkpointed, as far as `compile_config` and `fsdp` ask for it. The
    parameters stay fp32, and the forward pass computes with copies of them in the dtype that `precision` names.

    casts_once: make the copies once per batch instead of once per forward pass. The caller then has to call
        `renew_copies(model)` at the beginning of each batch.

    A compiled block cannot also checkpoint its activations here; `shard_model` uses FSDP2 for that combination.
    """
    assert compile_config is None or not fsdp.activation_checkpointing, "FSDP2 has to be used for this combination"
    dtype = precision.parameters
    all_copies: list[ParameterCopies] = []

    # The order matters. torch cannot compile the code that swaps parameters for their copies, so that code wraps the
    # compiled block. Checkpointing runs the block again in the backward pass, when the fp32 parameters are back in
    # place. It therefore wraps the swap, so that the second run swaps them, too.
    modules_in_blocks: set[nn.Module] = set()
    for block in model.transformer.blocks:
        modules_in_blocks.update(block.modules())
        if compile_config is not None:
            block.forward = torch.compile(block.forward, **compile_config)
        all_copies += _compute_with_copies(block, block.modules(), dtype, casts_once)
        if fsdp.activation_checkpointing:
            checkpoint_activations(block, fsdp)

    # The embeddings and the last norm are swapped around the forward pass of the whole model.
    modules_outside_blocks = [module for module in model.modules() if module not in modules_in_blocks]
    all_copies += _compute_with_copies(model, modules_outside_blocks, dtype, casts_once)
    cast(Any, model).parameter_copies = all_copies  # `renew_copies` reads this


def _compute_with_copies(
    module: nn.Module, owners: Iterable[nn.Module], dtype: torch.dtype, casts_once: bool
) -> list["ParameterCopies"]:
    """Make `module.forward` compute with the parameters of `owners` cast to `dtype`. Changes the module in place.

    `owners` are the modules below `module` that own these parameters. Returns the copies that have to be renewed once a
    batch: none unless `casts_once`, and none in fp32, in which the parameters themselves are used.
    """
    if dtype == torch.float32:
        return []
    if not casts_once:
        _replace_parameters_in_forward(module, owners, partial(_cast, dtype))
        return []
    copies = ParameterCopies(dtype)
    _replace_parameters_in_forward(module, owners, copies)
    return [copies]


def renew_copies(model: nn.Module) -> None:
    """Copy the parameters of a model into their 16-bit copies again. Call it when a batch begins.

    Does nothing for a model that was not prepared with `casts_once`.
    """
    for copies in getattr(model, "parameter_copies", ()):
        copies.renew()


class ParameterCopies:
    """16-bit copies of some fp32 parameters (the masters), which all microbatches of a batch use.

    In each batch, `renew` is called first, and copies the masters' present values. Each forward pass then calls the
    object for the copies. Gradients of the copies are added up in the masters' `grad`.

    `renew` has to be called by hand, because nothing tells this object that the masters have changed: torch's fused
    optimizers and the loading of checkpoints write into their memory without raising autograd's version counter.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.masters: list[nn.Parameter] = []
        """The parameters. Empty until the first forward pass with gradients."""
        self.copies: list[Tensor] = []
        """A copy of each of them."""
        self.has_gradients = False
        """A backward pass has run since the copies were renewed. Set by `_UseCopies.backward`."""

    def __call__(self, masters: list[nn.Parameter]) -> Sequence[Tensor]:
        """Return 16-bit tensors to compute with in place of `masters`. Pass the same parameters in every call.

        In training these are the copies, connected with the masters in autograd's graph, so that the backward pass
        gives the masters their gradients. The first call makes the copies. Without gradients, as in an evaluation, the
        masters are cast anew, because the copies still have the values of the last batch.
        """
        if not torch.is_grad_enabled():
            return _cast(self.dtype, masters)

        # Not in the constructor, because the parameters have no memory yet when the model is prepared.
        if not self.copies:
            self.masters = masters
            self.copies = [torch.empty_like(master, dtype=self.dtype, requires_grad=False) for master in masters]
            for master in masters:
                master.grad_dtype = None  # type: ignore[attr-defined] - it takes gradients of either dtype
            self.renew()

        # Gradients that are gone since the last backward pass mean that a new batch has begun.
        has_new_batch_begun = self.has_gradients and all(master.grad is None for master in masters)
        assert not has_new_batch_begun, "renew_copies was not called, though gradients were cleared for another batch"
        return cast(Any, _UseCopies).apply(self, *masters)

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the present values of the parameters into their 16-bit copies, for a new batch."""
        self.has_gradients = False
        if self.copies:
            torch._foreach_copy_(self.copies, cast(Any, self.masters))


class _UseCopies(torch.autograd.Function):
    """Stands for a cast from masters, the fp32 parameters, to 16-bit copies of them that exist already.

    The forward pass returns the copies. The backward pass hands their gradients on to the masters.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, copies: ParameterCopies, *masters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        ctx.copies = copies
        ctx.set_materialize_grads(False)
        return tuple(copy.detach() for copy in copies.copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the copies as those of the masters, which autograd adds to `master.grad`.

        A batch's first gradient of a parameter becomes its sum, so it is cast to fp32 here. Later ones stay in 16 bits:
        autograd adds them to the fp32 sum without a copy in fp32. None stands for a parameter that was not used.
        """
        ctx.copies.has_gradients = True
        results: list[Tensor | None] = [None]  # for the argument `copies`
        for gradient, master in zip(gradients, ctx.copies.masters, strict=True):
            is_first_of_batch = master.grad is None
            if gradient is not None and is_first_of_batch:
                gradient = gradient.to(master.dtype)
            results.append(gradient)
        return tuple(results)


def _cast(dtype: torch.dtype, masters: list[nn.Parameter]) -> Sequence[Tensor]:
    """Return the parameters in `dtype`. Autograd casts the gradients of the results back to fp32."""
    return [master.to(dtype) for master in masters]


def _replace_parameters_in_forward(module: nn.Module, owners: Iterable[nn.Module], cast_parameters: Cast) -> None:
    """Make `module.forward` compute with what `cast_parameters` returns for the parameters of `owners`. In place.

    `owners` are modules that the forward pass calls. Their parameters are replaced while it runs, and put back after
    it, also if it fails. So the optimizer and checkpoints only ever see the parameters themselves.
    """
    forward = module.forward
    owners_and_names: list[tuple[nn.Module, str]] = []
    for owner in owners:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners_and_names.append((owner, name))

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        # Read the parameters in each call, because `to_empty` replaces them after the model is prepared.
        masters = [cast(nn.Parameter, owner._parameters[name]) for owner, name in owners_and_names]
        try:
            for (owner, name), replacement in zip(owners_and_names, cast_parameters(masters), strict=True):
                owner._parameters[name] = cast(Any, replacement)
            return forward(*args, **kwargs)
        finally:
            for (owner, name), master in zip(owners_and_names, masters, strict=True):
                owner._parameters[name] = master

    module.forward = cast_forward
