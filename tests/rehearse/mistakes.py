"""A mistake that only a device refuses, for `test_rehearse.py`."""

from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger


class AddsHostTensor(Callback):
    def after_forward(self, state: State, logger: Logger) -> None:
        outputs: Any = state.outputs
        outputs["loss_sum"] = (outputs["loss_sum"] + torch.ones(2)).sum()
