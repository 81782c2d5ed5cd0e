"""Products by oneDNN are those of F.linear, to rounding, wherever the model and the loss take them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.models import products
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels
from tests.helpers.models import FAMILY, random_model

pytestmark = pytest.mark.skipif(not products.has_onednn(), reason="a torch without oneDNN")
SMALL = ModelConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=32, vocab_size=97)


@pytest.fixture
def by_onednn(monkeypatch):
    monkeypatch.setattr(products, "MKL_IS_SLOW", True)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 0)


@pytest.mark.parametrize("shape", [(3, 5, 64), (1, 1, 64), (2, 130, 64)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_and_its_gradients(shape, has_bias, by_onednn):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, generator=generator, requires_grad=True) for size in (shape, (200, shape[-1]), (200,))
    )
    grad = torch.randn(*shape[:-1], 200, generator=generator)
    wanted = [x, weight, *([bias] if has_bias else [])]
    results = []
    for function in (F.linear, products.linear):
        y = function(x, weight, bias if has_bias else None)
        results.append([y, *torch.autograd.grad(y, wanted, grad)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["learned", "no bias", "grouped rope", "gated", "untied", "three matrices"])
def test_a_model_its_loss_and_all_gradients(name, by_onednn, monkeypatch):
    model = random_model(FAMILY[name])
    tokens_bt = torch.randint(model.config.vocab_size, (3, 29), generator=torch.Generator().manual_seed(1))
    head = partial(cross_entropy_sum, labels_bt=next_token_labels(tokens_bt))
    found = []
    for is_slow in (False, True):
        monkeypatch.setattr(products, "MKL_IS_SLOW", is_slow)
        loss = model(tokens_bt, head=head)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm().clamp(min=1)


def test_the_digits_do_not_depend_on_where_numbers_lie_in_memory(by_onednn):
    """Otherwise a run could not be repeated to the bit."""
    generator = torch.Generator().manual_seed(0)
    a_ni, b_oi = torch.randn(130, 96, generator=generator), torch.randn(200, 96, generator=generator)
    expected = products.matmul_transposed(a_ni, b_oi)
    for offset in range(1, 17):
        elsewhere_ni = torch.empty(a_ni.numel() + offset)[offset:].view_as(a_ni).copy_(a_ni)
        assert torch.equal(products.matmul_transposed(elsewhere_ni, b_oi), expected)


def test_other_types_and_devices_and_autocast_are_left_alone(by_onednn, monkeypatch):
    monkeypatch.setattr(products, "onednn_matmul", lambda *_: pytest.fail("oneDNN was asked"))
    x, weight = torch.ones(4, 8), torch.ones(16, 8)
    assert products.linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    assert products.linear(x.to("meta"), weight.to("meta")).shape == (4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 4 * 8 * 16 + 1)
    assert products.linear(x, weight).shape == (4, 16)


def test_a_compiler_sees_one_operation(by_onednn):
    model = MPT(SMALL).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens_bt = torch.arange(40).view(2, 20)
    expected = model(tokens_bt)
    model.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(tokens_bt), expected)
