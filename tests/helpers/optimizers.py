"""Optimizers as a run builds them, for tests without a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.training.builders import build_optimizer_of
from llmfoundry_lite.training.optimizers import OptimizerContext

SMALL_MODEL = ModelConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=95)


def build_small_optimizer(
    parameters: Sequence[torch.nn.Parameter] | Mapping[str, torch.nn.Parameter], **settings: Any
) -> Optimizer:
    """Build the optimizer that `settings`, the block `optimizer`, describes. `parameters` may have names."""
    if not isinstance(parameters, Mapping):
        parameters = {f"weight{index}": parameter for index, parameter in enumerate(parameters)}
    context = OptimizerContext(model=torch.nn.Module(), model_config=SMALL_MODEL, layout=Layout())
    return build_optimizer_of(OptimizerConfig(**settings), dict(parameters), context)
