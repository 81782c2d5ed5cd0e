"""Names and shapes of an MPT's parameters, without building more than one block of ours."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.models.flops import find_size_mismatch
from llmfoundry_lite.models.mpt import MPT

BLOCKS = "transformer.blocks."
FIRST_BLOCK = f"{BLOCKS}0."


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return name -> shape of every parameter, in the order of `MPT.state_dict()`.

    A model of one block is built without memory for its weights, and the shapes of that block are repeated. With parts
    of the user's own all blocks are built, because the shape of a part may depend on the number of blocks.
    """
    if config.own_parts:
        with torch.device("meta"):
            return {name: tensor.shape for name, tensor in MPT(config).state_dict().items()}

    with torch.device("meta"):
        state_of_one_block = MPT(replace(config, n_layers=1)).state_dict()
    block_shapes = {
        name.removeprefix(FIRST_BLOCK): tensor.shape
        for name, tensor in state_of_one_block.items()
        if name.startswith(FIRST_BLOCK)
    }

    shapes_of_all_blocks: dict[str, torch.Size] = {}
    for layer in range(config.n_layers):
        for name_in_block, shape in block_shapes.items():
            shapes_of_all_blocks[f"{BLOCKS}{layer}.{name_in_block}"] = shape

    # All blocks take the place of the one block: after the embeddings, before the last norm.
    shapes: dict[str, torch.Size] = {}
    for name, tensor in state_of_one_block.items():
        if name.startswith(FIRST_BLOCK):
            shapes.update(shapes_of_all_blocks)
        else:
            shapes[name] = tensor.shape
    return shapes


def find_mismatch(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Describe the first difference between a model's parameters and the tensors of a file; None if there is none.

    `shapes` maps the tensors' names to their shapes. For example, "lm_head.weight is missing". A file of a stranger may
    claim any size, so the time that this takes depends on the number of tensors alone.
    """
    problem = find_size_mismatch(config, shapes)
    if problem is not None:
        return problem

    expected = parameter_shapes(config)
    for name in expected:
        if name not in shapes:
            return f"{name} is missing"
        if tuple(shapes[name]) != tuple(expected[name]):
            return f"{name} is {list(shapes[name])}, and the configuration says {list(expected[name])}"
    # All expected tensors are there. Others must not be.
    for name in shapes:
        if name not in expected:
            return f"{name} has no place in the configuration"
    return None
