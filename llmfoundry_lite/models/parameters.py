"""Names and shapes of an MPT's parameters, without building more than one block of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.models.flops import find_excess
from llmfoundry_lite.models.mpt import MPT

FIRST_BLOCK = "transformer.blocks.0."


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return name -> shape of every parameter, in the order of `MPT.state_dict()`."""
    with torch.device("meta"):
        one_block = MPT(replace(config, n_layers=1)).state_dict()
    of_block = {name: tensor.shape for name, tensor in one_block.items() if name.startswith(FIRST_BLOCK)}

    shapes: dict[str, torch.Size] = {}
    for name, tensor in one_block.items():
        if name not in of_block:
            shapes[name] = tensor.shape
        elif name not in shapes:  # the first of the block's: here all blocks follow each other
            for layer in range(config.n_layers):
                shapes |= {_in_layer(each, layer): shape for each, shape in of_block.items()}
    return shapes


def _in_layer(name: str, layer: int) -> str:
    return f"transformer.blocks.{layer}.{name.removeprefix(FIRST_BLOCK)}"


def find_misfit(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Describe the first difference between a model's parameters and tensors by name; None if they are the same.

    The time this takes is bounded by the number of tensors, whatever sizes the configuration has.
    """
    if problem := find_excess(config, shapes):
        return problem
    expected = parameter_shapes(config)
    for name in expected:
        if name not in shapes:
            return f"{name} is missing"
        if tuple(shapes[name]) != tuple(expected[name]):
            return f"{name} is {list(shapes[name])}, and the configuration says {list(expected[name])}"
    if unknown := next((name for name in shapes if name not in expected), None):
        return f"{unknown} has no place in the configuration"
    return None
