"""Every option of the family: implementations of attention agree, decoding with a cache changes nothing, and no
option is without effect. The yardstick is `reference`; on a CPU flex has a forward pass only.
"""

import sys
from dataclasses import replace

import pytest
import torch

from llmfoundry_lite.config.model_schema import AttentionConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models import blocked_attention
from llmfoundry_lite.models.attention import choose_implementation, number_documents
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.models.generate import generate
from llmfoundry_lite.models.mpt import MPT, KeyValueCache
from tests.helpers import flash_attn as plain_flash_attn
from tests.helpers.models import BASE, EOS, FAMILY, GQA, attention, random_model, random_tokens, with_implementation

FP32, BF16 = torch.float32, torch.bfloat16


def documents_of(tokens_bt: torch.Tensor) -> torch.Tensor:
    tokens_bt[0, 7], tokens_bt[1, [3, 4, 20]] = EOS, EOS
    return number_documents(tokens_bt, EOS)


@pytest.fixture
def flash_attn(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", plain_flash_attn)


@pytest.fixture(autouse=True)
def several_blocks_in_a_sample(monkeypatch):
    monkeypatch.setattr(blocked_attention, "BLOCK_SIZE", 11)


@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", FAMILY)
@torch.no_grad()
def test_all_implementations_compute_the_same(name, with_documents, flash_attn):
    model = random_model(FAMILY[name])
    tokens_bt = random_tokens(BASE)
    documents_bt = documents_of(tokens_bt) if with_documents else None
    expected_btv = with_implementation(model, "reference")(tokens_bt, documents_bt=documents_bt)
    for attn_impl in ("sdpa", "blocked", "flex", "flash"):
        logits_btv = with_implementation(model, attn_impl)(tokens_bt, documents_bt=documents_bt)
        torch.testing.assert_close(logits_btv, expected_btv, rtol=1e-4, atol=1e-4, msg=attn_impl)


@pytest.mark.parametrize("attn_impl", ["sdpa", "blocked"])
@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("name", FAMILY)
def test_gradients_are_those_of_the_definition(name, with_documents, attn_impl):
    model = random_model(FAMILY[name])
    tokens_bt = random_tokens(BASE)
    documents_bt = documents_of(tokens_bt) if with_documents else None
    gradients = {}
    for implementation in ("reference", attn_impl):
        other = with_implementation(model, implementation)
        other(tokens_bt, documents_bt=documents_bt).logsumexp(-1).sum().backward()
        gradients[implementation] = {name: parameter.grad for name, parameter in other.named_parameters()}
    for key, expected in gradients["reference"].items():
        error = (gradients[attn_impl][key] - expected).abs().max() / expected.abs().max()
        # Nothing can be learnt about a bias of keys when nothing but its own softmax sees it: rounding remains.
        assert error < 1e-4 or expected.abs().max() < 1e-3, f"{key}: {error:.1e}"


@pytest.mark.parametrize("attn_impl", ["reference", "sdpa", "blocked", "flex", "flash"])
@pytest.mark.parametrize("name", FAMILY)
@torch.no_grad()
def test_decoding_with_a_cache_changes_nothing(name, attn_impl, flash_attn):
    model = with_implementation(random_model(FAMILY[name]), attn_impl)
    tokens_bt = random_tokens(BASE)
    cache = KeyValueCache(model, 3, 29)
    parts = [model(part_bt, cache=cache) for part_bt in tokens_bt.split([11, 1, 1, 9, 7], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens_bt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILY)
def test_parameters_are_counted(name):
    model = MPT(FAMILY[name])
    assert count_parameters(FAMILY[name]) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in FAMILY if name not in ("learned", "three matrices", "untied")])
@torch.no_grad()
def test_each_option_changes_what_is_computed(name):
    """From the same weights where the shapes allow it; otherwise the shapes are the change."""
    plain = random_model(BASE)
    model = MPT(FAMILY[name])
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if shapes == {key: tensor.shape for key, tensor in plain.state_dict().items()}:
        model.load_state_dict(plain.state_dict())
        assert not torch.allclose(model(random_tokens(BASE)), plain(random_tokens(BASE)), atol=1e-3)
    else:
        assert shapes != {key: tensor.shape for key, tensor in plain.state_dict().items()}


@torch.no_grad()
def test_one_matrix_and_three_are_the_same_model():
    model = random_model(FAMILY["grouped"])
    other = MPT(replace(BASE, attn_config=AttentionConfig(**GQA, fused_qkv=False)))
    weights = dict(model.state_dict())
    for key in [key for key in weights if ".Wqkv." in key]:
        for part, tensor in zip("qkv", weights.pop(key).split([48, 16, 16]), strict=True):
            weights[key.replace("Wqkv", f"W{part}")] = tensor
    other.load_state_dict(weights)
    torch.testing.assert_close(other(random_tokens(BASE)), model(random_tokens(BASE)))


@torch.no_grad()
def test_documents_packed_in_a_sample_are_as_samples_of_their_own():
    """With positions that know distances alone, a document's logits do not depend on where it stands."""
    model = random_model(FAMILY["alibi"])
    first_t, second_t = random_tokens(BASE)[0, :9], random_tokens(BASE)[1, :13]
    for document_t in (first_t, second_t):
        document_t[document_t == EOS] = EOS + 1
        document_t[-1] = EOS
    packed_bt = torch.cat([first_t, second_t])[None]
    logits_btv = model(packed_bt, documents_bt=number_documents(packed_bt, EOS))
    torch.testing.assert_close(logits_btv[:, :9], model(first_t[None]))
    torch.testing.assert_close(logits_btv[:, 9:], model(second_t[None]))


def test_documents_end_with_their_separator_or_begin_with_it():
    """LLM Foundry's sequence_id, of eos_token_id and of bos_token_id."""
    tokens_bt = torch.tensor([[5, 9, 6, 7, 9, 8], [9, 5, 6, 9, 9, 7]])
    assert number_documents(tokens_bt, 9).tolist() == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 3]]
    assert number_documents(tokens_bt, 9, begins=True).tolist() == [[0, 1, 1, 1, 2, 2], [1, 1, 1, 2, 3, 3]]


@torch.no_grad()
def test_a_window_hides_what_is_further_back_than_its_size():
    model = random_model(replace(FAMILY["window"], n_layers=1))
    tokens_bt = random_tokens(BASE)
    changed_bt = tokens_bt.clone()
    changed_bt[:, 10] = (changed_bt[:, 10] + 1) % BASE.vocab_size
    differs_t = (model(tokens_bt) != model(changed_bt)).any(-1).any(0)
    assert differs_t.nonzero().flatten().tolist() == [10, 11, 12, 13]


def test_a_share_of_the_embeddings_gradient():
    gradients = []
    for share in (1.0, 0.25):
        model = random_model(replace(BASE, embedding_fraction=share, tie_word_embeddings=False))
        model(random_tokens(BASE)).logsumexp(-1).sum().backward()
        gradients.append(model.transformer.wte.weight.grad)
    torch.testing.assert_close(gradients[1], 0.25 * gradients[0])


@pytest.mark.parametrize("name", ["learned", "alibi", "grouped rope", "window"])
@torch.no_grad()
def test_greedy_decoding_takes_the_likeliest_token_each_time_also_beyond_the_models_length(name):
    model = random_model(FAMILY[name])
    tokens = random_tokens(BASE)[0, :25].tolist()
    written = list(generate(model, torch.tensor(tokens), 12, temperature=0))
    for token in written:
        assert token == int(model(torch.tensor([tokens[-BASE.max_seq_len :]]))[0, -1].argmax())
        tokens.append(token)
    assert len(tokens) > BASE.max_seq_len


def test_sampling_is_seeded_and_keeps_to_the_likely():
    model = random_model(BASE).eval()
    prompt_t = random_tokens(BASE)[0, :8]
    logits_v = model(prompt_t[None])[0, -1].detach()
    order = logits_v.argsort(descending=True).tolist()
    draws = [next(generate(model, prompt_t, 1, top_k=3, seed=seed)) for seed in range(40)]
    assert set(draws) == set(order[:3])
    smallest_p = float(logits_v.softmax(-1)[order[:2]].sum()) - 1e-4
    assert {next(generate(model, prompt_t, 1, top_p=smallest_p, seed=seed)) for seed in range(40)} == set(order[:2])
    assert list(generate(model, prompt_t, 6, seed=3)) == list(generate(model, prompt_t, 6, seed=3))


@pytest.mark.parametrize(
    ("model", "device", "precision", "expected"),
    [
        (BASE, "cpu", FP32, "sdpa"),
        (BASE, "cpu", torch.float16, "sdpa"),
        (FAMILY["alibi"], "cpu", BF16, "blocked"),
        (attention(attn_pdrop=0.1), "cpu", BF16, "sdpa"),
        (BASE, "cuda", BF16, "sdpa"),
        (FAMILY["alibi"], "cuda", BF16, "sdpa"),  # 8 dimensions in a head
        (replace(FAMILY["alibi"], d_model=96), "cuda", BF16, "flex"),
        (replace(FAMILY["window"], d_model=96), "cuda", FP32, "flex"),
        (attention(alibi=True, attn_pdrop=0.1), "cuda", BF16, "sdpa"),
        (attention(attn_impl="flash"), "cpu", BF16, "blocked"),
        (replace(attention(attn_impl="flash", alibi=True), d_model=96), "cuda", BF16, "flex"),
        (attention(attn_impl="torch"), "cuda", BF16, "sdpa"),
        (attention(attn_impl="reference"), "cpu", FP32, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can_and_says_why(model, device, precision, expected):
    chosen, why = choose_implementation(model, device, precision)
    assert chosen == expected and why
    if model.attn_config.attn_impl == "flash":
        assert "flash-attn cannot be used here" in why


@pytest.mark.parametrize(("d_model", "expected"), [(256, "flash"), (288, "sdpa")])
def test_heads_that_are_too_wide_for_flash_attn_are_not_given_to_it(monkeypatch, d_model, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn" or None)
    model = replace(attention(attn_impl="flash"), d_model=d_model, n_heads=1)
    assert choose_implementation(model, "cuda", BF16)[0] == expected


def test_flex_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="attn_impl: flex cannot be used for training on a cpu; use auto or sdpa"):
        choose_implementation(attention(attn_impl="flex"), "cpu", FP32)
    assert choose_implementation(attention(attn_impl="flex"), "cuda", BF16)[0] == "flex"
