"""Tensor parallelism: each layer's heads and feed-forward width, divided among neighbouring ranks."""

import logging
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmfoundry_lite.models.mpt import MPT


def divide_layers(model: MPT, tensor_mesh: DeviceMesh) -> None:
    """Shoeybi et al. 2019, "Megatron-LM": each rank has some heads and some of the feed-forward layer's width.

    One sum over ranks for each attention and feed-forward layer, in the forward pass of its last matrix and in the
    backward pass of its input. Norms, embeddings and the loss are computed by every rank.
    """
    # Whole matrices are gathered for an export alone; that it takes two steps, torch would warn of on every rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank, degree = tensor_mesh.get_local_rank(), tensor_mesh.size()
    transformer = model.transformer
    if transformer.slopes is not None:
        num_heads = len(transformer.slopes) // degree
        transformer.slopes = transformer.slopes[rank * num_heads : (rank + 1) * num_heads]
    for block in transformer.blocks:
        # The input is made a tensor of all ranks before the first matrices, or each of them would sum its gradient.
        whole = Replicate()
        plan: dict[str, ParallelStyle] = {
            "attn": PrepareModuleInput(
                input_layouts=(whole, None, None, None), desired_input_layouts=(whole, None, None, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            **{f"attn.{name}": ColwiseParallel() for name in ("Wq", "Wk", "Wv")},
            **{f"ffn.{name}": ColwiseParallel() for name in ("up_proj", "gate_proj") if hasattr(block.ffn, name)},
            "attn.out_proj": RowwiseParallel(),
            "ffn.down_proj": RowwiseParallel(),
        }
        if hasattr(block.attn, "q_ln"):  # one norm for all heads, which are the third dimension
            over_heads = {"sequence_dim": 2, "use_local_output": True}
            plan |= {f"attn.{name}": SequenceParallel(**over_heads) for name in ("q_ln", "k_ln")}
        parallelize_module(block, tensor_mesh, plan)
        if model.config.attn_config.attn_pdrop:
            _drop_apart(cast(nn.Module, block.attn), rank)


def _drop_apart(attention: nn.Module, tensor_rank: int) -> None:
    """Dropout is the same on all ranks of a tensor group, as the residual stream is; but other heads drop others."""
    forward = attention.forward

    def seeded(*args: Any) -> Any:
        if not attention.training:
            return forward(*args)
        seed = int(torch.randint(1 << 48, ()))  # everywhere the same
        with torch.random.fork_rng(devices=[args[0].device] if args[0].is_cuda else []):
            torch.manual_seed(seed + tensor_rank)
            return forward(*args)

    attention.forward = seeded
