"""Optimizers over sharded parameters: torch's fused AdamW, and Lion. `config/optimizers.py` has the table of all."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from llmfoundry_lite.companions import import_address
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.config.optimizers import LION_BETAS, OPTIMIZERS


class ParameterGroup(NamedTuple):
    """Parameters that an optimizer updates with the same settings."""

    parameters: dict[str, torch.nn.Parameter]
    """By name, as this rank has them: whole, sharded, or some rows of each."""
    settings: OptimizerConfig
    """Those of the run, with the group's own learning rate and weight decay."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerContext:
    """Everything that a builder may need to know besides the parameters and their settings."""

    model: torch.nn.Module
    """This rank's part of the model."""
    model_config: ModelConfig
    layout: Layout
    """How the run is divided among ranks."""
    fused: bool = True
    """Whether a step may be one kernel. On a CPU, the fused kernel's last digits depend on where a shard ends."""


class Builder(Protocol):
    """The function that a row of the table names: it builds an optimizer with a group of torch's for each group."""

    def __call__(self, groups: Sequence[ParameterGroup], context: OptimizerContext) -> Optimizer:
        """Build the optimizer. Every rank calls this, with its part of each parameter."""
        ...


def find_builder(name: str) -> Builder:
    """Import the builder of one of our optimizers, which the table of optimizers names."""
    return import_address(OPTIMIZERS[name].builder)


def build_adamw(groups: Sequence[ParameterGroup], context: OptimizerContext) -> Optimizer:
    """Build torch's AdamW, in one fused kernel, or operation by operation."""
    torch_groups = [adamw_group(parameters, settings) for parameters, settings in groups]
    return AdamW(torch_groups, fused=context.fused or None)  # None lets torch choose another fast one; False would not


def adamw_group(parameters: dict[str, torch.nn.Parameter], settings: OptimizerConfig) -> dict[str, Any]:
    """Return a group of parameters as torch's AdamW takes it."""
    return {
        "params": list(parameters.values()),
        "lr": settings.lr,
        "betas": settings.moment_betas,
        "eps": settings.eps,
        "weight_decay": settings.decay_by_rate,
    }


def build_lion(groups: Sequence[ParameterGroup], context: OptimizerContext) -> Optimizer:
    """Build Lion."""
    torch_groups: list[dict[str, Any]] = []
    for parameters, settings in groups:
        torch_groups.append(
            {
                "params": list(parameters.values()),
                "lr": settings.lr,
                "betas": settings.moment_betas,
                "weight_decay": settings.decay_by_rate,
            }
        )
    return Lion(torch_groups, lr=groups[0].settings.lr)


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2). It keeps one moment for each parameter."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: Any = LION_BETAS,
        weight_decay=0.0,
    ):
        """Prepare to update `params`, which may be in groups. A step shrinks weights by lr * `weight_decay`."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Each rank updates its own shards, and exchanges nothing.

        The update is the sign of beta1 * moment + (1 - beta1) * gradient. Afterwards the moment becomes
        beta2 * moment + (1 - beta2) * gradient. All parameters of a group go through each kernel together.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue

            for parameter in parameters:
                if not self.state[parameter]:  # the first step
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            weights = [local(parameter) for parameter in parameters]
            gradients = [local(parameter.grad) for parameter in parameters]
            moments = [local(self.state[parameter]["exp_avg"]) for parameter in parameters]

            lr = group["lr"]
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - beta2)  # after the update, which uses the old moments


def clear_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of all parameters that an optimizer updates to None.

    The parameters are the optimizer's and not the model's, because after a forward pass without a gradient FSDP shows
    other parameters in the model. A ZeRO-1 optimizer has only rows of them, so the whole parameters are cleared too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for parameter in whole_parameters(optimizer):
        parameter.grad = None


def whole_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the model's parameters that an optimizer updates: its own, or those of which it has rows (ZeRO-1)."""
    parameters: list[torch.nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += [getattr(parameter, "share_of", parameter) for parameter in group["params"]]
    return parameters


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor, or a plain tensor itself. Writing to it changes `tensor`.

    `tensor` must not be None; the type allows that because gradients may be.
    """
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
