"""Activation checkpointing: recompute blocks in the backward pass, either whole or all but matrix products."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmfoundry_lite.config.schema import FSDPConfig


def checkpoint_activations(block: nn.Module, fsdp: FSDPConfig) -> None:
    """Recompute the block in backward. Replacing `forward` keeps parameter names; wrapping the module would not."""
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": fsdp.activation_checkpointing_reentrant}
    if fsdp.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)

    is_pinned = torch.cuda.is_available()  # pageable memory would be copied synchronously

    def checkpointed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        with save_on_cpu(pin_memory=is_pinned) if fsdp.activation_cpu_offload else nullcontext():
            return checkpoint(forward, *args, **options)

    block.forward = checkpointed


PRODUCTS = {
    *("mm", "addmm", "bmm", "onednn_matmul"),
    *("_flash_attn_forward", "_flash_attn_varlen_forward"),  # the flash-attn package's
    "inductor_compiled_code",  # FlexAttention, compiled to one operation
}


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep results of matrix products; recompute norms, activations and rotations, which memory bandwidth bounds."""
    name = operation.__name__.partition(".")[0]
    is_product = name in PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
