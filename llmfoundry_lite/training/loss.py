"""Cross-entropy of the next token, without holding the logits of a whole batch.

The logits of a sample of 2,048 tokens take 400 MB in fp32 with a vocabulary of 50,000, and a plain loss keeps several
such tensors until the backward pass. Here the forward pass computes logits, loss and gradient for one chunk of tokens
after the other, and keeps only the gradients of the hidden states and of the embedding. Value and gradient are exact,
and no product is computed twice. If the step is compiled, a chunk's logits become their gradient in one pass over them.

A loss of the user's own (`OwnLoss`) takes the place of the cross-entropy in training, for the same chunks. Evaluations
keep the cross-entropy.

Where tensor parallelism divides the vocabulary, the logits stay divided, and ranks exchange two numbers per token.

Suffixes of tensors are their dimensions: b samples, t tokens of a sample, n tokens (b * t), c tokens of a chunk, d
model width, v vocabulary or this rank's part of it.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from llmfoundry_lite.config.schema import LOSS_CHUNK_MIB
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import MIB
from llmfoundry_lite.models.products import matmul_transposed

IGNORED = -100
"""The label of a token that has no loss."""

CHUNK_BYTES = LOSS_CHUNK_MIB * MIB
"""Default size of a chunk's fp32 logits."""

CPU_ROWS = 8192
"""On a CPU, rows of the embedding's gradient that one product computes. A single product for all rows takes a quarter
longer."""

CHUNK_MULTIPLE = 128
"""Chunks are multiples of this many tokens. Other sizes take half as long again on a CPU."""


class OwnLoss(Protocol):
    """A loss of the user's own, as torch's losses with `reduction="none"`: `Thing(**loss_kwargs)` returns one."""

    def __call__(self, logits_nv: torch.Tensor, targets_n: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, [n].

        logits_nv: [n, v] in fp32, for n tokens and v tokens of the vocabulary.
        targets_n: the id of each token's next one, int64. Tokens without one, before padding and at a sample's end,
            have any id, and their losses are not counted.

        The n tokens are a chunk of a microbatch, so a token's loss must not depend on other tokens.
        """
        ...


def next_token_labels(tokens_bt: torch.Tensor) -> torch.Tensor:
    """Return the label of each token: the id of the next token in its sample. Shape [b, t], for b samples of t tokens.

    The label is IGNORED for the last token of a sample and before padding, whose ids are below 0.
    """
    labels_bt = torch.roll(tokens_bt, shifts=-1, dims=1)
    labels_bt[:, -1] = IGNORED
    return labels_bt.masked_fill(labels_bt < 0, IGNORED)


def row_weights(labels_bt: torch.Tensor) -> torch.Tensor:
    """Return weights [b, t] of tokens with which a short sample counts as much in a sum of losses as a full one.

    `labels_bt` are the labels of b samples of t tokens, IGNORED where there is none. A full sample has t - 1 labels,
    because its last token has none, and weights of 1. A sample with half as many labels has weights of 2.
    """
    num_labels_b1 = (labels_bt != IGNORED).sum(dim=1, keepdim=True)
    num_labels_of_full_row = labels_bt.size(1) - 1
    weights_b1 = num_labels_of_full_row / num_labels_b1.clamp(min=1).float()
    return weights_b1.expand(labels_bt.shape)


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
    own_loss: OwnLoss | None = None,
) -> torch.Tensor:
    """Return the sum over tokens of -log p(label) in nats: a scalar in fp32, whatever the dtypes of the arguments are.

    With `own_loss` it is the sum of that loss, if hidden states or embedding require a gradient. Raises ConfigError for
    a result of it that is not one number for each token.

    Args:
        hidden_btd: the model's last hidden states, for b samples of t tokens, of width d.
        unembedding_vd: the matrix that makes logits of them, for v tokens of the vocabulary.
        labels_bt: token ids, IGNORED where a token has no loss.
        weights_bt: factors of the tokens' losses; None for 1.
        backward_runs_once: the backward pass may scale the embedding's gradient in place. Zero-bubble schedules of a
            pipeline run it twice, for the hidden states and again for the embedding.
        chunk_bytes: size of the fp32 logits that are computed at once.
        compiled: a compiler's `log_p_and_gradient`. It is not used if ranks divide the vocabulary, because they
            exchange numbers between its steps.
        divide_vocabulary: a companion's function that takes this rank's rows out of the embedding, which is a DTensor
            then. All ranks return the whole sum, and each its part of the hidden states' gradient, which the model adds
            up.
        own_loss: a loss of the user's own to train with. Evaluations, which compute no gradients, do not use it.
    """
    vocabulary = None  # this rank's part of the vocabulary, if ranks divide it
    if divide_vocabulary is not None:
        unembedding_vd, vocabulary = divide_vocabulary(unembedding_vd)
    if vocabulary is not None:
        compiled = None
    if not torch.is_grad_enabled():
        own_loss = None

    # From here on, the tokens of all samples are in one dimension.
    weights_n = None if weights_bt is None else weights_bt.flatten()
    return _ChunkedCrossEntropy.apply(  # type: ignore
        hidden_btd.flatten(0, 1),
        unembedding_vd,
        labels_bt.flatten(),
        weights_n,
        backward_runs_once,
        chunk_bytes,
        vocabulary,
        compiled,
        own_loss,
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The autograd function of `cross_entropy_sum`, for n tokens in one dimension.

    The forward pass computes the gradients.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_nd,
        unembedding_vd,
        labels_n,
        weights_n,
        backward_runs_once,
        chunk_bytes,
        vocabulary,
        compiled,
        own_loss,
    ):
        """Return the sum of the losses, and keep the gradients of hidden states and embedding for the backward pass.

        For one chunk of c tokens after the other, this computes the logits [c, v], the losses, and the gradients of the
        chunk, and then releases the logits. So only one chunk's logits are in memory at a time. The gradients are those
        of the sum; `backward` multiplies them by the gradient that arrives there.

        `vocabulary` is this rank's part of a divided vocabulary, or None. The other arguments are those of
        `cross_entropy_sum`, with the n tokens of all samples in one dimension.
        """
        needs_gradient = hidden_nd.requires_grad or unembedding_vd.requires_grad
        num_tokens = hidden_nd.size(0)
        # Ranks that divide a vocabulary exchange numbers for each chunk, so all of them choose by the largest part.
        vocabulary_size = vocabulary.num_rows if vocabulary else unembedding_vd.size(0)
        chunk_size = choose_chunk_size(num_tokens, vocabulary_size, chunk_bytes)
        total = torch.zeros((), dtype=torch.float32, device=hidden_nd.device)
        grad_hidden_nd = torch.empty_like(hidden_nd) if needs_gradient else None
        grad_unembedding_vd = None

        for start in range(0, num_tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            hidden_cd, labels_c = hidden_nd[chunk], labels_n[chunk]

            # A token without a label has weight 0, which removes its loss and its gradient.
            weights_c1 = (labels_c != IGNORED)[:, None]
            if weights_n is not None:
                weights_c1 = weights_c1 * weights_n[chunk][:, None]

            log_p_c, grad_cv = _log_p_of_chunk(
                hidden_cd, unembedding_vd, labels_c, vocabulary, compiled, own_loss, needs_gradient
            )
            total -= (log_p_c * weights_c1[:, 0]).sum()
            if grad_hidden_nd is None or grad_cv is None:  # an evaluation
                continue

            # Gradients of the two factors of the logits, hidden states and embedding. `grad_cv` is not weighted yet,
            # because it is much larger than what the weights are applied to here.
            grad_cv = grad_cv.to(hidden_nd.dtype)
            grad_hidden_nd[chunk] = matmul_transposed(grad_cv, unembedding_vd.T) * weights_c1
            if grad_unembedding_vd is None:  # not before the first chunk's logits have been released
                grad_unembedding_vd = torch.zeros_like(unembedding_vd, dtype=torch.float32)
            _add_unembedding_gradient(grad_unembedding_vd, grad_cv, (hidden_cd * weights_c1).to(hidden_nd.dtype))
            del grad_cv  # before the next chunk's logits need the memory

        ctx.save_for_backward(grad_hidden_nd, grad_unembedding_vd)
        ctx.scale = torch.Tensor.mul_ if backward_runs_once else torch.Tensor.mul
        return total

    @staticmethod
    def backward(ctx, grad_total):  # type: ignore[override]
        """Return the gradients that the forward pass has kept, times `grad_total`, the scalar gradient of the sum.

        The other seven arguments of `forward` have no gradient.
        """
        grad_hidden_nd, grad_unembedding_vd = ctx.saved_tensors
        return (
            grad_hidden_nd * grad_total.to(grad_hidden_nd.dtype),
            ctx.scale(grad_unembedding_vd, grad_total).to(grad_hidden_nd.dtype),
            *(None, None, None, None, None, None, None),
        )


def choose_chunk_size(num_tokens: int, vocabulary_size: int, chunk_bytes: int) -> int:
    """Return how many of `num_tokens` tokens to compute at once, so that their fp32 logits take about `chunk_bytes`.

    All chunks have that size, except for the last one, which may be shorter. The size is a multiple of CHUNK_MULTIPLE,
    and the chunks are about equal. For example, 256 MiB hold the logits of 1,310 tokens with a vocabulary of 51,200;
    4,096 tokens then take four chunks of 1,024.
    """
    bytes_per_token = 4 * vocabulary_size
    max_chunk_size = max(CHUNK_MULTIPLE, chunk_bytes // bytes_per_token)
    num_chunks = math.ceil(num_tokens / max_chunk_size)
    return math.ceil(num_tokens / num_chunks / CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def _log_p_of_chunk(
    hidden_cd: torch.Tensor,
    unembedding_vd: torch.Tensor,
    labels_c: torch.Tensor,
    vocabulary: Any,
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None,
    own_loss: OwnLoss | None,
    needs_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities [c] of a chunk's c labels, and the gradient [c, v] of -log p by the logits.

    The gradient is softmax - one_hot, not weighted, or None unless the caller `needs_gradient`. Values of tokens whose
    label is IGNORED have no meaning; the caller gives them the weight 0. `vocabulary` is this rank's part of a divided
    vocabulary, or None. `compiled` is a compiled `log_p_and_gradient`, or None to compute step by step.

    With `own_loss` the result is minus that loss, and its gradient. That is only for training, so without
    `needs_gradient` these are the log-probabilities.
    """
    if own_loss is not None and needs_gradient:
        return own_loss_and_gradient(own_loss, matmul_transposed(hidden_cd, unembedding_vd), labels_c)

    columns_c = labels_c.clamp(min=0)  # IGNORED is negative, and is no index
    if compiled is not None and needs_gradient:
        logits_cv = matmul_transposed(hidden_cd, unembedding_vd)
        for tensor in (logits_cv, columns_c):  # the last chunk is shorter, and would be compiled again
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits_cv, columns_c)

    rows_c = torch.arange(labels_c.numel(), device=labels_c.device)
    is_on_this_rank_c: Any = 1.0
    if vocabulary is None:
        log_p_cv = torch.log_softmax(matmul_transposed(hidden_cd, unembedding_vd), dim=-1, dtype=torch.float32)
        log_p_c = log_p_cv[rows_c, columns_c]
    else:
        # Other ranks have the other columns, and each label's column is on one rank. The ranks exchange two numbers for
        # each token: the logsumexp of their logits, and the label's logit.
        log_p_cv = matmul_transposed(hidden_cd, unembedding_vd).float()
        log_p_c, columns_c, is_on_this_rank_c = vocabulary.normalise(log_p_cv, columns_c)
    if not needs_gradient:
        return log_p_c, None

    # softmax - one_hot, in the memory of the logits.
    grad_cv = log_p_cv.exp_()
    grad_cv[rows_c, columns_c] -= is_on_this_rank_c
    return log_p_c, grad_cv


def _add_unembedding_gradient(
    grad_unembedding_vd: torch.Tensor, grad_cv: torch.Tensor, hidden_cd: torch.Tensor
) -> None:
    """Add the part of the embedding's gradient [v, d] that comes from a chunk of c tokens, in place.

    That part is the product of `grad_cv`, the gradient of the chunk's logits, transposed, and `hidden_cd`, the chunk's
    hidden states times the weights of their tokens. On a CPU it is computed for CPU_ROWS rows of the vocabulary after
    the other.
    """
    rows_at_once = CPU_ROWS if hidden_cd.device.type == "cpu" else grad_unembedding_vd.size(0)
    parts = zip(grad_cv.split(rows_at_once, dim=1), grad_unembedding_vd.split(rows_at_once), strict=True)
    for grad_cr, sum_rd in parts:  # r rows of the vocabulary
        sum_rd += matmul_transposed(grad_cr.T, hidden_cd.T)


def log_p_and_gradient(logits_cv: torch.Tensor, columns_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [c] of c labels in fp32, and the gradient [c, v] of -log p by the logits.

    `columns_c` are the labels as columns of the vocabulary, from 0 on. The gradient is softmax - one_hot, in the dtype
    of the logits. This function is written for a compiler, which makes one pass over the logits of it. Without one it
    needs several tensors of their size, so `_log_p_of_chunk` then computes the same in place.
    """
    log_p_cv = torch.log_softmax(logits_cv, dim=-1, dtype=torch.float32)

    # A comparison instead of an indexed write, which a compiler could not fuse with the other steps.
    is_label_cv = torch.arange(logits_cv.size(1), device=logits_cv.device) == columns_c[:, None]
    grad_cv = (log_p_cv.exp() - is_label_cv.float()).to(logits_cv.dtype)

    log_p_c = log_p_cv.gather(1, columns_c[:, None])[:, 0]
    return log_p_c, grad_cv


def own_loss_and_gradient(
    own_loss: OwnLoss, logits_cv: torch.Tensor, labels_c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what stands for `log_p_and_gradient` with a loss of the user's own: minus the losses [c], and a gradient.

    The gradient [c, v] is that of the losses' sum by the logits. Both are in fp32, and 0 for tokens whose label is
    IGNORED. Raises ConfigError for a result that is not one number for each of the c tokens.
    """
    is_ignored_c = labels_c == IGNORED
    columns_c = labels_c.clamp(min=0)
    with torch.enable_grad(), torch.autocast(logits_cv.device.type, enabled=False):
        logits_cv = logits_cv.detach().float().requires_grad_()
        loss_c = own_loss(logits_cv, columns_c)
        if not isinstance(loss_c, torch.Tensor) or loss_c.shape != columns_c.shape:
            found = list(loss_c.shape) if isinstance(loss_c, torch.Tensor) else type(loss_c).__name__
            raise ConfigError(
                f"model.loss_fn: the loss of {columns_c.numel()} tokens is {found}, expected a tensor with one number "
                'for each token; a loss of torch returns that with reduction: "none"'
            )
        if not loss_c.requires_grad:
            raise ConfigError("model.loss_fn: the loss does not depend on the logits, so nothing would be trained")
        (grad_cv,) = torch.autograd.grad(loss_c.sum(), logits_cv)

    # A loss without meaning may be infinite, and a weight of 0 would make NaN of it.
    losses_c = loss_c.detach().float().masked_fill(is_ignored_c, 0.0)
    return -losses_c, grad_cv.masked_fill_(is_ignored_c[:, None], 0.0)
