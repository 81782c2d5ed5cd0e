"""Cross-entropy of the next token without ever holding the logits of a whole batch.

The logits of a 2048-token sample are 200 MB in fp32, and a plain loss keeps several such tensors alive until
the backward pass. Here the forward pass walks over chunks of tokens, computes each chunk's logits, loss and
gradient, and keeps only the gradients of hidden states and embedding. Exact in value and gradient, and no
product is computed twice. Compiled, a chunk's logits become its gradient in one pass over them.

Where tensor parallelism divides the vocabulary, the logits stay divided: ranks exchange two numbers per token.

Legend: b batch, t time, n tokens (b*t), c tokens of a chunk, d model width, v vocabulary or this rank's part of it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from llmfoundry_lite.config.schema import LOSS_CHUNK_MIB
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.models.products import matmul_transposed

IGNORED = -100
"""The label of a token that has no loss."""

CHUNK_BYTES = LOSS_CHUNK_MIB * MIB
"""Size of a chunk's fp32 logits, unless told otherwise."""

CPU_ROWS = 8192
"""Rows of the embedding's gradient in one product on a CPU, where a single product takes a quarter longer."""


def next_token_labels(tokens_bt: torch.Tensor) -> torch.Tensor:
    """Label each token [b, t] with the next one; IGNORED for the last one and before padding (ids below 0)."""
    labels_bt = torch.roll(tokens_bt, shifts=-1, dims=1)
    labels_bt[:, -1] = IGNORED
    return labels_bt.masked_fill(labels_bt < 0, IGNORED)


def row_weights(labels_bt: torch.Tensor) -> torch.Tensor:
    """Weights of tokens [b, t] that make each row with a loss count as much as a full one, whose weights are 1."""
    counts_b1 = (labels_bt != IGNORED).sum(dim=1, keepdim=True)
    return ((labels_bt.size(1) - 1) / counts_b1.clamp(min=1).float()).expand(labels_bt.shape)


def cross_entropy_sum(
    hidden_btd: torch.Tensor,
    unembedding_vd: torch.Tensor,
    labels_bt: torch.Tensor,
    *,
    weights_bt: torch.Tensor | None = None,
    backward_runs_once: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    divide_vocabulary: Callable[[torch.Tensor], tuple[torch.Tensor, Any]] | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log p(label) in nats, weighted if there are weights; fp32, whatever its arguments are.

    Where ranks divide the embedding's rows (a DTensor), `divide_vocabulary` is a companion's. All of them get the sum,
    and each its part of the hidden states' gradient, which the model adds up.

    `compiled`: `log_p_and_gradient` by a compiler. Where ranks divide the vocabulary they exchange numbers between its
    steps, and it is not used.

    A backward pass that runs once may scale the embedding's gradient in place. Zero-bubble schedules run it for the
    hidden states, and again for the embedding.
    """
    part = None
    if divide_vocabulary is not None:
        unembedding_vd, part = divide_vocabulary(unembedding_vd)
    return _ChunkedCrossEntropy.apply(  # type: ignore
        *(hidden_btd.flatten(0, 1), unembedding_vd, labels_bt.flatten()),
        *(None if weights_bt is None else weights_bt.flatten(), backward_runs_once, chunk_bytes, part),
        None if part else compiled,
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden_nd, unembedding_vd, labels_n, weights_n, backward_runs_once, chunk_bytes, vocabulary, compiled
    ):
        needs_gradient = hidden_nd.requires_grad or unembedding_vd.requires_grad
        num_tokens = hidden_nd.size(0)
        # All ranks that share a vocabulary need as many chunks as the others.
        most = max(128, chunk_bytes // (4 * (vocabulary.num_rows if vocabulary else unembedding_vd.size(0))))
        # Equal chunks in multiples of 128: other sizes take half as long again on a CPU.
        chunk = math.ceil(num_tokens / math.ceil(num_tokens / most) / 128) * 128
        rows = CPU_ROWS if hidden_nd.device.type == "cpu" else unembedding_vd.size(0)
        total = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        grad_hidden_nd = torch.empty_like(hidden_nd) if needs_gradient else None
        grad_unembedding_vd = None
        for start in range(0, num_tokens, chunk):
            part = slice(start, start + chunk)
            hidden_cd, labels_c = hidden_nd[part], labels_n[part]
            counted_c1 = (labels_c != IGNORED)[:, None]
            if weights_n is not None:
                counted_c1 = counted_c1 * weights_n[part][:, None]
            rows_c, columns_c = torch.arange(labels_c.numel(), device=labels_c.device), labels_c.clamp(min=0)
            # In one piece of memory: logits' log-probabilities, then their gradient.
            if compiled is not None and needs_gradient:
                logits_cv = matmul_transposed(hidden_cd, unembedding_vd)
                for tensor in (logits_cv, columns_c):  # the last chunk is shorter, and would be compiled again
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                log_p_c, grad_cv = compiled(logits_cv, columns_c)
                del logits_cv  # not while the next chunk's are computed
            elif vocabulary is None:
                grad_cv = torch.log_softmax(matmul_transposed(hidden_cd, unembedding_vd), dim=-1, dtype=torch.float32)
                log_p_c, is_here_c = grad_cv[rows_c, columns_c], 1.0
            else:
                grad_cv = matmul_transposed(hidden_cd, unembedding_vd).float()
                log_p_c, columns_c, is_here_c = vocabulary.normalise(grad_cv, columns_c)
            total -= (log_p_c * counted_c1[:, 0]).sum()
            if grad_hidden_nd is None:
                del grad_cv  # not while the next chunk's are computed
                continue
            # d loss / d logits = softmax - one_hot; tokens without a loss are masked in what is made of it, which is
            # much smaller.
            if compiled is None:
                grad_cv.exp_()
                grad_cv[rows_c, columns_c] -= is_here_c
            grad_cv = grad_cv.to(hidden_nd.dtype)
            grad_hidden_nd[part] = matmul_transposed(grad_cv, unembedding_vd.T) * counted_c1
            hidden_cd = (hidden_cd * counted_c1).to(hidden_nd.dtype)
            if grad_unembedding_vd is None:
                grad_unembedding_vd = torch.zeros_like(unembedding_vd, dtype=torch.float32)
            for grad_cr, sum_rd in zip(grad_cv.split(rows, dim=1), grad_unembedding_vd.split(rows), strict=True):
                sum_rd += matmul_transposed(grad_cr.T, hidden_cd.T)
            del grad_cv, grad_cr, hidden_cd  # not while the next chunk's are computed
        ctx.save_for_backward(grad_hidden_nd, grad_unembedding_vd)
        ctx.scale = torch.Tensor.mul_ if backward_runs_once else torch.Tensor.mul
        return total

    @staticmethod
    def backward(ctx, grad_total):  # type: ignore[override]
        grad_hidden_nd, grad_unembedding_vd = ctx.saved_tensors
        return (
            grad_hidden_nd * grad_total.to(grad_hidden_nd.dtype),
            ctx.scale(grad_unembedding_vd, grad_total).to(grad_hidden_nd.dtype),
            *(None, None, None, None, None, None),
        )


def log_p_and_gradient(logits_cv: torch.Tensor, columns_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the labels, fp32, and the logits' gradients. Eager, this takes more memory than
    steps in place; a compiler makes one pass of it."""
    log_p_cv = torch.log_softmax(logits_cv, dim=-1, dtype=torch.float32)
    is_label_cv = torch.arange(logits_cv.size(1), device=logits_cv.device) == columns_c[:, None]
    grad_cv = (log_p_cv.exp() - is_label_cv.float()).to(logits_cv.dtype)
    return log_p_cv.gather(1, columns_c[:, None])[:, 0], grad_cv
