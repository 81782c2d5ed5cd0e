"""Mistakes that only a device or a compiler notices, for `test_rehearse.py`."""

from collections.abc import Callable
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger


class AddsHostTensor(Callback):
    def after_forward(self, state: State, logger: Logger) -> None:
        outputs: Any = state.outputs
        outputs["loss_sum"] = (outputs["loss_sum"] + torch.ones(2)).sum()


class Changes(Callback):
    """Changes the input of each feed-forward layer."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def fit_start(self, state: State, logger: Logger) -> None:
        model: Any = state.model
        for block in model.model.transformer.blocks:
            block.ffn.forward = self.changed(block.ffn.forward)

    def changed(self, forward: Callable) -> Callable:
        return lambda x: forward(type(self).change(x))


class MixesTypes(Changes):
    change = staticmethod(torch.Tensor.double)


class CutsColumn(Changes):
    change = staticmethod(lambda x: x[..., :-1])


class BreaksGraph(Changes):
    @staticmethod
    def change(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break("for a test")
        return x


class ShortensBatch(Callback):
    """Shortens every second microbatch."""

    def before_forward(self, state: State, logger: Logger) -> None:
        self.is_second = not getattr(self, "is_second", True)
        if self.is_second:
            state.batch["input_ids"] = state.batch["input_ids"][:, :1024].contiguous()
