"""A mistake that only a device refuses, for `test_rehearse.py`."""

import torch
from composer.core import Callback, State
from composer.loggers import Logger


class AddsHostTensor(Callback):
    def after_forward(self, state: State, logger: Logger) -> None:
        assert isinstance(state.outputs, dict)
        state.outputs["loss_sum"] = (state.outputs["loss_sum"] + torch.ones(2)).sum()
