"""`precision` x `fsdp_config.mixed_precision` -> the dtypes of parameters, reduction, products and loss."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a training step. Master weights, optimizer state and loss are always fp32."""

    parameters: torch.dtype
    """Dtype of gathered parameters, activations and the residual stream."""
    reduction: torch.dtype
    """Dtype in which gradients are summed over devices."""
    autocast: torch.dtype | None = None
    """Dtype of matrix products, where parameters and residual stream stay fp32."""
    tf32: bool = False
    """fp32 products may be computed in TF32, where the device has it."""
    loss_scaling: bool = False
    """fp16 gradients underflow unless the loss is scaled."""


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

PRECISIONS = {
    **{("fp32", mixed): Precision(parameters=FP32, reduction=FP32) for mixed in ("PURE", "DEFAULT", "FULL")},
    **{("tf32", mixed): Precision(parameters=FP32, reduction=FP32, tf32=True) for mixed in ("PURE", "DEFAULT", "FULL")},
    ("amp_bf16", "PURE"): Precision(parameters=BF16, reduction=BF16),
    ("amp_bf16", "DEFAULT"): Precision(parameters=BF16, reduction=FP32),
    ("amp_bf16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=BF16),
    ("amp_fp16", "PURE"): Precision(parameters=FP16, reduction=FP16, loss_scaling=True),
    ("amp_fp16", "DEFAULT"): Precision(parameters=FP16, reduction=FP32, loss_scaling=True),
    ("amp_fp16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=FP16, loss_scaling=True),
}
"""`precision` x `fsdp_config.mixed_precision`."""
