"""Which dtypes a training step uses, by `precision` and `fsdp_config.mixed_precision`."""

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
    """Dtype of matrix products if parameters and residual stream stay fp32; None if products use `parameters`."""
    tf32: bool = False
    """Products of fp32 may be computed in TF32, on devices that have it."""
    loss_scaling: bool = False
    """The loss is scaled, because gradients in fp16 would underflow."""


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

PRECISIONS = {
    ("fp32", "PURE"): Precision(parameters=FP32, reduction=FP32),
    ("fp32", "DEFAULT"): Precision(parameters=FP32, reduction=FP32),
    ("fp32", "FULL"): Precision(parameters=FP32, reduction=FP32),
    ("tf32", "PURE"): Precision(parameters=FP32, reduction=FP32, tf32=True),
    ("tf32", "DEFAULT"): Precision(parameters=FP32, reduction=FP32, tf32=True),
    ("tf32", "FULL"): Precision(parameters=FP32, reduction=FP32, tf32=True),
    ("amp_bf16", "PURE"): Precision(parameters=BF16, reduction=BF16),
    ("amp_bf16", "DEFAULT"): Precision(parameters=BF16, reduction=FP32),
    ("amp_bf16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=BF16),
    ("amp_fp16", "PURE"): Precision(parameters=FP16, reduction=FP16, loss_scaling=True),
    ("amp_fp16", "DEFAULT"): Precision(parameters=FP16, reduction=FP32, loss_scaling=True),
    ("amp_fp16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=FP16, loss_scaling=True),
}
"""By (`precision`, `fsdp_config.mixed_precision`)."""
