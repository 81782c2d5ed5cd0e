"""Optimizers over sharded parameters: torch's fused AdamW, and Lion."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from llmfoundry_lite.config.optimizer_schema import OptimizerConfig

ADAMW_BETAS = (0.9, 0.95)
"""LLM Foundry's default for its AdamW."""
LION_BETAS = (0.9, 0.99)
"""The default of Chen et al. 2023."""


def build_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, fused: bool = True) -> Optimizer:
    """Build torch's AdamW, in one fused kernel, or operation by operation.

    On a CPU, the fused kernel's last digits depend on where a shard ends. `decoupled_adamw` shrinks weights by
    weight_decay * (lr / initial lr) in a step (Loshchilov and Hutter 2019, with the schedule alone as multiplier).
    torch shrinks them by lr * weight_decay, so it gets weight_decay / initial lr.
    """
    decay = config.decay / config.lr if config.name == "decoupled_adamw" else config.decay
    return AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas or ADAMW_BETAS,
        eps=config.eps,
        weight_decay=decay,
        fused=fused or None,  # None lets torch choose another fast implementation; False would not
    )


def build_lion(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Build Lion. `decoupled_lionw` means by weight_decay what `decoupled_adamw` does; see `build_adamw`."""
    decay = config.decay / config.lr if config.name == "decoupled_lionw" else config.decay
    return Lion(parameters, lr=config.lr, betas=config.betas or LION_BETAS, weight_decay=decay)


class Lion(Optimizer):
    """The sign of an interpolated momentum (Chen et al. 2023, algorithm 2). It keeps one moment for each parameter."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, betas: Any = LION_BETAS, weight_decay=0.0):
        """Prepare to update `params`. A step shrinks weights by lr * `weight_decay`."""
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
