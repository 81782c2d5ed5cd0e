import pytest
import torch
import torch.nn.functional as F

from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.training.loss import (
    IGNORED,
    cross_entropy_sum,
    log_p_and_gradient,
    next_token_labels,
    row_weights,
)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden_btd = torch.randn(3, 50, 16, generator=generator, requires_grad=True)
    unembedding_vd = torch.randn(37, 16, generator=generator, requires_grad=True)
    tokens_bt = torch.randint(37, (3, 50), generator=generator)
    tokens_bt[1, 20:] = IGNORED
    return hidden_btd, unembedding_vd, next_token_labels(tokens_bt)


def plain(hidden_btd, unembedding_vd, labels_bt):
    logits_btv = hidden_btd @ unembedding_vd.T
    return F.cross_entropy(logits_btv.flatten(0, 1), labels_bt.flatten(), reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("compiled", [None, log_p_and_gradient, torch.compile(log_p_and_gradient, backend="aot_eager")])
def test_chunks_are_exact_in_value_and_gradient(problem, compiled):
    hidden, unembedding, labels = problem
    expected = plain(hidden, unembedding, labels)
    wanted = torch.autograd.grad(expected * 0.37, (hidden, unembedding))
    # 150 tokens in two chunks, the second one short
    total = cross_entropy_sum(hidden, unembedding, labels, chunk_bytes=128 * 37 * 4, compiled=compiled)
    got = torch.autograd.grad(total * 0.37, (hidden, unembedding))
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_loss_of_bf16_states_is_fp32(problem):
    hidden, unembedding, labels = (x.detach().bfloat16() if x.is_floating_point() else x for x in problem)
    total = cross_entropy_sum(hidden, unembedding, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, plain(hidden.float(), unembedding.float(), labels), rtol=5e-3, atol=0)


def test_labels_are_the_next_tokens_and_padding_has_none():
    labels = next_token_labels(torch.tensor([[5, 6, 7], [5, IGNORED, IGNORED]]))
    assert labels.tolist() == [[6, 7, IGNORED], [IGNORED, IGNORED, IGNORED]]


def test_a_batch_without_tokens_has_no_loss_and_no_gradient(problem):
    hidden, unembedding, labels = problem
    total = cross_entropy_sum(hidden, unembedding, torch.full_like(labels, IGNORED))
    assert total == 0
    assert all(not grad.any() for grad in torch.autograd.grad(total, (hidden, unembedding)))


def test_weights_multiply_the_losses_of_their_tokens(problem):
    hidden, unembedding, labels = problem
    weights_bt = row_weights(labels)
    assert weights_bt[:, 0].tolist() == [1.0, pytest.approx(49 / 19), 1.0]
    means = [
        F.cross_entropy(h @ unembedding.T, row, ignore_index=IGNORED) for h, row in zip(hidden, labels, strict=True)
    ]
    expected = 49 * torch.stack(means).sum()
    wanted = torch.autograd.grad(expected, (hidden, unembedding))
    total = cross_entropy_sum(hidden, unembedding, labels, weights_bt=weights_bt, chunk_bytes=128 * 37 * 4)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(torch.autograd.grad(total, (hidden, unembedding)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


SMOOTHED = torch.nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("weights", [None, "rows"])
def test_a_loss_of_ones_own_is_summed_over_chunks_exactly(problem, weights):
    hidden, unembedding, labels = problem
    weights_bt = None if weights is None else row_weights(labels)
    logits_nv = (hidden @ unembedding.T).flatten(0, 1)
    losses_n = F.cross_entropy(logits_nv, labels.flatten(), reduction="none", label_smoothing=0.1, ignore_index=IGNORED)
    expected = losses_n.sum() if weights_bt is None else (losses_n * weights_bt.flatten()).sum()
    wanted = torch.autograd.grad(expected * 0.37, (hidden, unembedding))

    options = {"chunk_bytes": 128 * 37 * 4, "weights_bt": weights_bt, "own_loss": SMOOTHED}
    total = cross_entropy_sum(hidden, unembedding, labels, **options)
    got = torch.autograd.grad(total * 0.37, (hidden, unembedding))
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [None, "rows"])
def test_an_infinite_loss_where_there_is_no_label_is_not_counted(problem, weights):
    """The loss of token 0 is infinite, and its gradient too. Tokens without a label get that target."""
    hidden, unembedding, labels = problem
    labels = labels.where(labels != 0, 1)

    def own_loss(logits_nv, targets_n):
        losses_n = F.cross_entropy(logits_nv, targets_n, reduction="none")
        return losses_n * torch.where(targets_n == 0, torch.inf, 1.0)

    weights_bt = None if weights is None else row_weights(labels)
    expected = cross_entropy_sum(hidden, unembedding, labels, weights_bt=weights_bt)
    wanted = torch.autograd.grad(expected, (hidden, unembedding))
    total = cross_entropy_sum(hidden, unembedding, labels, weights_bt=weights_bt, own_loss=own_loss)
    torch.testing.assert_close(total, expected)
    for ours, theirs in zip(torch.autograd.grad(total, (hidden, unembedding)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_evaluation_keeps_the_cross_entropy(problem):
    with torch.no_grad():
        assert cross_entropy_sum(*problem, own_loss=SMOOTHED) == cross_entropy_sum(*problem)


@pytest.mark.parametrize(
    ("own_loss", "words"),
    [
        (torch.nn.CrossEntropyLoss(), r"the loss of 150 tokens is \[\], expected a tensor with one number for each"),
        (lambda logits, targets: logits, r"the loss of 150 tokens is \[150, 37\], expected"),
        (lambda logits, targets: 1.0, "the loss of 150 tokens is float, expected"),
        (lambda logits, targets: torch.ones(150), "the loss does not depend on the logits"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(problem, own_loss, words):
    with pytest.raises(ConfigError, match=rf"^model\.loss_fn: {words}"):
        cross_entropy_sum(*problem, own_loss=own_loss)
