"""Activation checkpointing: recompute a block's activations in the backward pass instead of keeping them.

Either all of them are recomputed, or all but the results of matrix products (`selective`).
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmfoundry_lite.config.sharding_schema import FSDPConfig


def checkpoint_activations(block: nn.Module, fsdp: FSDPConfig) -> None:
    """Make a block recompute its activations in the backward pass instead of keeping them, as `fsdp` says. In place.

    `activation_checkpointing` is true to recompute all of them, or "selective" to keep the results of matrix products
    and attention. With `activation_cpu_offload`, the block's input waits on the host meanwhile.

    This replaces `block.forward`, because wrapping the block in a module would change the names of its parameters.
    """
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": fsdp.activation_checkpointing_reentrant}
    if fsdp.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)

    is_pinned = torch.cuda.is_available()  # the copy from pageable memory would be synchronous

    def checkpointed_forward(*args: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation keeps no activations
            return forward(*args)
        # What checkpointing keeps, the block's input, can move to the host until the backward pass.
        offload = save_on_cpu(pin_memory=is_pinned) if fsdp.activation_cpu_offload else nullcontext()
        with offload:
            return checkpoint(forward, *args, **options)

    block.forward = checkpointed_forward


KEPT_OPERATIONS = {
    *("mm", "addmm", "bmm", "onednn_matmul"),
    *("_flash_attn_forward", "_flash_attn_varlen_forward"),  # of the package flash-attn
    "inductor_compiled_code",  # FlexAttention, compiled to one operation
}
"""Operations whose results selective checkpointing keeps, beside those with `attention` in their name."""


def _choose_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of matrix products and of attention, which take most of a block's time.

    Norms, activation functions and rotations are recomputed, because memory bandwidth bounds them.
    """
    name = operation.__name__.partition(".")[0]
    is_kept = name in KEPT_OPERATIONS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
