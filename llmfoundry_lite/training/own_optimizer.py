"""Compares what an optimizer of the user's own keeps with what its class says, by which memory was estimated."""

from typing import Any

import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor
from torch.optim import Optimizer

from llmfoundry_lite.estimate.own_optimizer import read_told_state
from llmfoundry_lite.training.optimizers import local

TOLERANCE = 0.01
"""Relative difference that is not worth a line. Counters of steps make a small one."""


class CompareOptimizerState(Callback):
    """Prints once what the user's own optimizer keeps, if its class does not say so or says something else."""

    def __init__(self, name: str):
        """Compare the optimizer with the import path `name`."""
        self.name = name
        self.has_stepped = False
        self.is_compared = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note the first step that updates a parameter. Composer steps, without gradients, for a skipped batch too."""

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            if not self.has_stepped:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                self.has_stepped = any(parameter.grad is not None for parameter in parameters)

        state.optimizers[0].register_step_pre_hook(note_step)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Compare after the first batch in which the optimizer has made a step. Rank 0 prints."""
        if self.is_compared or not self.has_stepped or dist.get_rank() != 0:
            return
        self.is_compared = True
        kept = measure_bytes_per_parameter(state.optimizers[0])
        if kept is None:
            return
        line = describe_difference(self.name, kept)
        if line:
            print(line, flush=True)


def measure_bytes_per_parameter(optimizer: Optimizer) -> float | None:
    """Return the bytes that an optimizer keeps for each element of this rank's parameters, 0 before its first step.

    None for a rank without parameters. Only tensors count. Numbers, such as a counter of steps, are small.
    """
    num_elements = 0
    state_bytes = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            num_elements += local(parameter).numel()
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    state_bytes += local(value).numel() * value.element_size()
    return state_bytes / num_elements if num_elements else None


def describe_difference(name: str, kept: float) -> str:
    """Return a line about an optimizer that keeps `kept` bytes for each parameter; empty if its class says the same."""
    told = read_told_state(name)
    fact = f"optimizer: {name} keeps {kept:.3g} bytes for each parameter"
    if told.bytes_per_parameter is None:
        return f"{fact}; a dry run could know it: bytes_per_parameter = {kept:.3g} in its class"
    if abs(kept - told.bytes_per_parameter) <= TOLERANCE * kept:
        return ""
    return f"{fact}, and its class says {told.bytes_per_parameter:g}, by which memory was estimated; correct it there"
