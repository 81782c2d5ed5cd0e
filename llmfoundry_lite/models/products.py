"""Matrix products in fp32 by oneDNN on AMD's processors, where it is twice as fast as MKL.

MKL keeps to AVX2 on processors that are not Intel's. oneDNN, which is in the same build of PyTorch and as exact, uses
AVX-512. On all other devices, in other dtypes and for small products, the functions below are PyTorch's own.

Legend: n rows, i inputs, o outputs, d model width, v vocabulary, w part of the vocabulary.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LOGITS_BYTES = 1 << 28
"""Size of the fp32 logits that `logits_in_parts` computes at a time."""
CPU_LOGITS_BYTES = 1 << 23
"""The same on a CPU: what its cache holds."""
MIN_LOGITS_ROWS = 256
"""Rows of the output embedding in a part, however many tokens there are."""

MIN_MULTIPLICATIONS = 1 << 22
"""Multiplications of a product below which calling oneDNN costs more than it gains."""


class Linear(nn.Linear):
    """`nn.Linear`, computed by the faster library."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute input weight^T + bias, [..., o]; the input is [..., i]."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Compute x weight^T + bias, [..., o], by the faster library. x is [..., i]. Same arguments as `F.linear`."""
    if not _is_onednn_faster(x, weight_oi):
        return F.linear(x, weight_oi, bias_o)
    y_no = onednn_matmul(x.flatten(0, -2), weight_oi)  # which takes matrices only
    y = y_no.unflatten(0, x.shape[:-1])
    return y if bias_o is None else y + bias_o


def matmul_transposed(a_ni: Tensor, b_oi: Tensor) -> Tensor:
    """Compute a b^T, [n, o], by the faster library."""
    if _is_onednn_faster(a_ni, b_oi):
        return onednn_matmul(a_ni, b_oi)
    return a_ni @ b_oi.T


def logits_in_parts(hidden_nd: Tensor, unembedding_vd: Tensor) -> Iterator[Tensor]:
    """Yield the fp32 logits of fp32 hidden states for one part of the vocabulary after another: [n, w] each.

    Callers that need no more than a part at a time never hold all n*v logits.

    Collective where ranks have divided the vocabulary: each rank gathers the whole output embedding, and computes the
    same logits.
    """
    if isinstance(unembedding_vd, DTensor):
        unembedding_vd = unembedding_vd.full_tensor()
    part_bytes = CPU_LOGITS_BYTES if hidden_nd.device.type == "cpu" else LOGITS_BYTES
    num_rows = max(MIN_LOGITS_ROWS, part_bytes // (4 * hidden_nd.size(0)))  # 4 bytes in each fp32 logit
    for part_wd in unembedding_vd.split(num_rows):
        yield matmul_transposed(hidden_nd, part_wd.float())


# ------------------------------------------------------------------------------------------ which library is faster


def _is_onednn_faster(x: Tensor, weight_oi: Tensor) -> bool:
    """Return whether oneDNN can compute this product, and is faster than the library that PyTorch chooses.

    The answer depends on nothing that differs between equal machines, because the two libraries round differently.
    """
    return (
        x.device.type == "cpu"
        and x.dtype == weight_oi.dtype == torch.float32
        and x.numel() * weight_oi.size(0) >= MIN_MULTIPLICATIONS
        and not torch.is_autocast_enabled("cpu")
        and not isinstance(weight_oi, DTensor)
        and MKL_IS_SLOW
    )


def _is_mkl_slow() -> bool:
    """Return whether PyTorch uses MKL on an AMD processor with AVX-512, and has oneDNN as well."""
    try:
        cpu_info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    is_amd_with_avx512 = "AuthenticAMD" in cpu_info and " avx512f " in cpu_info
    return is_amd_with_avx512 and torch.backends.mkl.is_available() and has_onednn()


def has_onednn() -> bool:
    """Return whether this build of PyTorch has oneDNN and the operation that `onednn_matmul` calls."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


MKL_IS_SLOW = _is_mkl_slow()
"""Decided by the processor's maker and not by a clock, so that equal machines choose alike. It is a constant because a
compiler cannot read a file."""


# ----------------------------------------------------------------------------------------- oneDNN as one operation


@torch.library.custom_op("llmfoundry_lite::onednn_matmul", mutates_args=())
def onednn_matmul(a_ni: Tensor, b_oi: Tensor) -> Tensor:
    """Compute a b^T in fp32 by oneDNN, [n, o]."""
    return torch.ops.mkldnn._linear_pointwise(a_ni, _make_dense(b_oi), None, "none", [], "")


def _make_dense(x_ab: Tensor) -> Tensor:
    """Return x, copied unless x or its transpose is contiguous. oneDNN's kernel is 1,000 times as slow for others."""
    return x_ab if x_ab.is_contiguous() or x_ab.T.is_contiguous() else x_ab.contiguous()


@onednn_matmul.register_fake
def _(a_ni, b_oi):
    return a_ni.new_empty(a_ni.size(0), b_oi.size(0))


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_no):
    """Compute the gradients of a and b where they are needed; y = a b^T gives dy b and dy^T a."""
    a_ni, b_oi = ctx.saved_tensors
    grad_a_ni, grad_b_oi = None, None
    if ctx.needs_input_grad[0]:
        grad_a_ni = matmul_transposed(grad_no, b_oi.T)
    if ctx.needs_input_grad[1]:
        grad_b_oi = matmul_transposed(grad_no.T, a_ni.T)
    return grad_a_ni, grad_b_oi


onednn_matmul.register_autograd(_backward, setup_context=_keep_for_backward)
