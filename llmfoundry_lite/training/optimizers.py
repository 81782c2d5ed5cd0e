"""Optimizers over sharded parameters: torch's fused AdamW, and Lion."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from llmfoundry_lite.config.schema import OptimizerConfig


def build_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, fused: bool = True) -> Optimizer:
    """Build AdamW, fused into one kernel (whose last digits on a CPU depend on where a shard ends) or operation by
    operation.

    `decoupled_adamw` shrinks weights by weight_decay * (lr / initial lr) a step (Loshchilov and Hutter 2019, with
    the schedule alone as multiplier), which is torch's lr * weight_decay with weight_decay / initial lr in its place.
    """
    decay = config.decay / config.lr if config.name == "decoupled_adamw" else config.decay
    return AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas or (0.9, 0.95),
        eps=config.eps,
        weight_decay=decay,
        fused=fused or None,
    )


def build_lion(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Build Lion; `decoupled_lionw` takes weight_decay as `decoupled_adamw` does."""
    decay = config.decay / config.lr if config.name == "decoupled_lionw" else config.decay
    return Lion(parameters, lr=config.lr, betas=config.betas or (0.9, 0.99), weight_decay=decay)


class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023, algorithm 2). One moment of state per parameter."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, betas: Any = (0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            weights = [local(p) for p in parameters]
            gradients = [local(p.grad) for p in parameters]
            moments = [local(self.state[p]["exp_avg"]) for p in parameters]
            updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - beta2)


def clear_gradients(optimizer: Optimizer) -> None:
    """Drop all gradients, also those of whole parameters of which the optimizer has rows (ZeRO-1). The model cannot be
    asked: after a forward pass without a gradient FSDP shows other parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    for parameter in whole_parameters(optimizer):
        parameter.grad = None


def whole_parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return the model's parameters, where the optimizer has rows of them (ZeRO-1) or themselves."""
    return [getattr(one, "share_of", one) for group in optimizer.param_groups for one in group["params"]]


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's share of a sharded tensor, as memory that can be written."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
