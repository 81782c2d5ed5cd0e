"""Matrix products in fp32 by oneDNN on AMD's processors, where it is twice as fast as MKL.

MKL keeps to AVX2 on processors that are not Intel's. oneDNN, in the same build of PyTorch and as exact, uses AVX-512.
Elsewhere, and for small products, this is F.linear.

Legend: n rows, i inputs, o outputs, d model width, v vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

CPU_LOGITS_BYTES, LOGITS_BYTES = 1 << 23, 1 << 28
"""Size of the fp32 logits that are computed at a time: on a CPU, what its cache holds."""

MIN_MULTIPLICATIONS = 1 << 22
"""Multiplications of a product below which calling oneDNN costs more than it gains."""


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias, [..., o], by the faster library; x is [..., i]."""
    if not _gains(x, weight_oi):
        return F.linear(x, weight_oi, bias_o)
    y = product(x.flatten(0, -2), weight_oi).unflatten(0, x.shape[:-1])
    return y if bias_o is None else y + bias_o


def multiply(a_ni: Tensor, b_oi: Tensor) -> Tensor:
    """Compute a b^T by the faster library, [n, o]."""
    return product(a_ni, b_oi) if _gains(a_ni, b_oi) else a_ni @ b_oi.T


def logits_in_parts(hidden_nd: Tensor, unembedding_vd: Tensor) -> Iterator[Tensor]:
    """Yield fp32 logits of fp32 hidden states, [n, w], for a part w of the vocabulary v at a time.

    Ranks that have divided the vocabulary all compute the same.
    """
    if isinstance(unembedding_vd, DTensor):
        unembedding_vd = unembedding_vd.full_tensor()
    room_bytes = CPU_LOGITS_BYTES if hidden_nd.device.type == "cpu" else LOGITS_BYTES
    for part_wd in unembedding_vd.split(max(256, room_bytes // (4 * hidden_nd.size(0)))):
        yield multiply(hidden_nd, part_wd.float())


def _gains(x: Tensor, weight_oi: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight_oi.dtype == torch.float32
        and x.numel() * weight_oi.size(0) >= MIN_MULTIPLICATIONS
        and not torch.is_autocast_enabled("cpu")
        and not isinstance(weight_oi, DTensor)
        and MKL_IS_SLOW
    )


def _mkl_is_slow() -> bool:
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "AuthenticAMD" in cpu and " avx512f " in cpu and torch.backends.mkl.is_available() and has_onednn()


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


MKL_IS_SLOW = _mkl_is_slow()
"""Decided by the processor's maker, not by a clock: equal machines must choose alike. A constant, for compilers."""


@torch.library.custom_op("llmfoundry_lite::product", mutates_args=())
def product(a_ni: Tensor, b_oi: Tensor) -> Tensor:
    """Compute a b^T in fp32 by oneDNN, [n, o]."""
    return torch.ops.mkldnn._linear_pointwise(a_ni, dense(b_oi), None, "none", [], "")


def dense(x_ab: Tensor) -> Tensor:
    """Return x, copied unless it or its transpose is contiguous: else oneDNN's kernel is 1,000 times as slow."""
    return x_ab if x_ab.is_contiguous() or x_ab.T.is_contiguous() else x_ab.contiguous()


@product.register_fake
def _(a_ni, b_oi):
    return a_ni.new_empty(a_ni.size(0), b_oi.size(0))


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_no):
    a_ni, b_oi = ctx.saved_tensors
    grad_a_ni = multiply(grad_no, b_oi.T) if ctx.needs_input_grad[0] else None
    grad_b_oi = multiply(grad_no.T, a_ni.T) if ctx.needs_input_grad[1] else None
    return grad_a_ni, grad_b_oi


product.register_autograd(_backward, setup_context=_keep_for_backward)
