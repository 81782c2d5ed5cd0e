"""Cross-entropy of the next token without ever holding the logits of a whole batch.

The logits of a 2048-token sample are 200 MB in fp32, and a plain loss keeps several such tensors alive until
the backward pass. Here the forward pass walks over chunks of tokens, computes each chunk's logits, loss and
gradient, and keeps only the gradients of hidden states and embedding. Exact in value and gradient, and no
product is computed twice.

Legend: b batch, t time, n tokens (b*t), c tokens of a chunk, d model width, v vocabulary.
"""

import torch

IGNORED = -100
"""The label of a token that has no loss."""

CHUNK_BYTES = 1 << 26
"""Of fp32 logits at a time."""


def next_token_labels(tokens_bt: torch.Tensor) -> torch.Tensor:
    """The token that follows each; IGNORED for the last one and where there is no next token (ids below 0)."""
    labels_bt = torch.roll(tokens_bt, shifts=-1, dims=1)
    labels_bt[:, -1] = IGNORED
    return labels_bt.masked_fill(labels_bt < 0, IGNORED)


def cross_entropy_sum(hidden_btd: torch.Tensor, unembedding_vd: torch.Tensor, labels_bt: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of -log p(label), in nats, fp32, whatever the dtype of its arguments."""
    return _ChunkedCrossEntropy.apply(hidden_btd.flatten(0, 1), unembedding_vd, labels_bt.flatten())  # type: ignore


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_nd, unembedding_vd, labels_n):
        needs_gradient = hidden_nd.requires_grad or unembedding_vd.requires_grad
        chunk = max(128, CHUNK_BYTES // (4 * unembedding_vd.size(0)))
        total = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        grad_hidden_nd = torch.empty_like(hidden_nd) if needs_gradient else None
        grad_unembedding_vd = torch.zeros_like(unembedding_vd, dtype=torch.float32) if needs_gradient else None
        for start in range(0, hidden_nd.size(0), chunk):
            part = slice(start, start + chunk)
            hidden_cd, labels_c = hidden_nd[part], labels_n[part]
            logits_cv = (hidden_cd @ unembedding_vd.T).float()
            counted_c = labels_c != IGNORED
            rows_c, columns_c = torch.arange(labels_c.numel(), device=labels_c.device), labels_c.clamp(min=0)
            log_norm_c = torch.logsumexp(logits_cv, dim=-1)
            total += ((log_norm_c - logits_cv[rows_c, columns_c]) * counted_c).sum()
            if grad_hidden_nd is None or grad_unembedding_vd is None:
                continue
            # d loss / d logits = softmax - one_hot, in the memory of the logits.
            grad_cv = logits_cv.sub_(log_norm_c[:, None]).exp_()
            grad_cv[rows_c, columns_c] -= 1.0
            grad_cv = grad_cv.mul_(counted_c[:, None]).to(hidden_nd.dtype)
            torch.mm(grad_cv, unembedding_vd, out=grad_hidden_nd[part])
            if grad_cv.dtype == torch.float32:
                grad_unembedding_vd.addmm_(grad_cv.T, hidden_cd)
            else:
                grad_unembedding_vd += grad_cv.T @ hidden_cd
        ctx.save_for_backward(grad_hidden_nd, grad_unembedding_vd)
        return total

    @staticmethod
    def backward(ctx, grad_total):  # type: ignore[override]
        grad_hidden_nd, grad_unembedding_vd = ctx.saved_tensors
        return (
            grad_hidden_nd * grad_total.to(grad_hidden_nd.dtype),
            (grad_unembedding_vd * grad_total).to(grad_hidden_nd.dtype),
            None,
        )
