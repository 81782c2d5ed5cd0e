"""`lf.load`: probabilities and text of a model, whatever it was saved as."""

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import llmfoundry_lite as lf
from llmfoundry_lite.evaluation import loaded
from llmfoundry_lite.evaluation.loaded import LoadedModel
from tests.helpers.launch import ROOT
from tests.helpers.present import needs

pytestmark = pytest.mark.multiprocess

TEXTS = ["def one():\n    return", "", "é漢字🙂", "<|endoftext|>", "x = [1, 2]\n" * 20]


@pytest.fixture
def model(here) -> LoadedModel:
    return lf.load("runs/tiny")


@torch.no_grad()
def plainly(module, context: list[int], ids: list[int]) -> np.ndarray:
    """Log-probabilities of `ids` after `context`, by one forward pass over one row."""
    logits = module(torch.tensor([[*context, *ids[:-1]]]))
    logits_tv = getattr(logits, "logits", logits)[0, len(context) - 1 :].float()
    return logits_tv.log_softmax(-1)[range(len(ids)), ids].numpy()


def test_probabilities_are_those_of_a_forward_pass_over_each_text(model, monkeypatch):
    monkeypatch.setattr(loaded, "MAX_BATCH_TOKENS", 64)
    found = model.logprobs(TEXTS)
    for text, values in zip(TEXTS[:4], found, strict=False):
        ids = model.tokenizer.encode(text)
        assert len(values) == len(ids)
        if ids:
            expected = plainly(model.model, [model.tokenizer.eos_token_id], ids)
            np.testing.assert_allclose(values, expected, atol=1e-5)


def test_a_text_longer_than_the_context_is_read_in_windows(model):
    ids, (values,) = model.tokenizer.encode(TEXTS[-1]), model.logprobs([TEXTS[-1]])
    assert len(ids) == len(values) > 2 * 32
    np.testing.assert_allclose(values[:32], plainly(model.model, [model.tokenizer.eos_token_id], ids[:32]), atol=1e-5)
    np.testing.assert_allclose(values[32:64], plainly(model.model, [ids[31]], ids[32:64]), atol=1e-5)
    last = plainly(model.model, [ids[-33]], ids[-32:])  # as much before the last ones as fits
    rest = len(ids) % 32
    np.testing.assert_allclose(values[-rest:], last[-rest:], atol=1e-5)


def test_a_text_gives_one_answer_and_a_list_a_list_of_the_same(model):
    prompts = ["def ", "import "]
    one, two = (model.generate(prompt, max_new_tokens=8) for prompt in prompts)
    assert isinstance(one, str) and model.generate(prompts, max_new_tokens=8) == [one, two]
    assert model.generate(np.array(prompts), max_new_tokens=8) == [one, two] and model.generate([]) == []
    for text, values in zip(prompts, model.logprobs(tuple(prompts)), strict=True):
        np.testing.assert_allclose(model.logprobs(text), values, atol=1e-5)  # other rows beside it


@pytest.mark.parametrize("name", ["logprobs", "generate"])
@pytest.mark.parametrize("wrong", [7, b"def", Path("a"), None, [["def"]], ["def", 7]])
def test_another_thing_than_text_is_refused_in_one_line(model, name, wrong):
    with pytest.raises(lf.UserError, match=rf"{name}: .* given \(\w+\), expected a text or a list of texts"):
        getattr(model, name)(wrong)


@pytest.mark.parametrize("ask", [lambda model, text: model.logprobs([text]), lambda model, text: model.generate(text)])
def test_text_that_is_no_unicode_is_refused(model, ask):
    with pytest.raises(lf.UserError, match="cannot be written in UTF-8"):
        ask(model, "a\ud800")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            ("temperature", -1),
            ("temperature", math.nan),
            ("top_k", 0),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("max_new_tokens", -1),
        ],
        *[("max_new_tokens", "8"), ("max_new_tokens", 8.0), ("top_k", 5.0), ("seed", None), ("seed", 2**64)],
    ],
)
def test_sampling_that_cannot_be_is_refused(model, name, value):
    with pytest.raises(lf.UserError, match="generate: max_new_tokens"):
        model.generate("a", **{name: value})


def test_numbers_of_numpy_are_numbers(model):
    found = model.generate("a", np.int64(4), temperature=np.float32(0.5), top_k=np.int32(5), seed=np.uint8(3))
    assert found == model.generate("a", 4, temperature=0.5, top_k=5, seed=3)


def test_two_models_in_four_threads_write_what_each_writes_alone(model):
    models = [model, lf.load("runs/tiny/checkpoints/ba3")]
    alone = [one.generate("def ", 12, seed=1) for one in models]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: models[i % 2].generate("def ", 12, seed=1), range(12)))
    assert found == alone * 6


@needs("llmfoundry_formats")
def test_gpt_2_becomes_ours_with_the_probabilities_of_transformers(model, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model.tokenizer.save(tmp_path)
    ours, ids = lf.load(tmp_path), model.tokenizer.encode(TEXTS[0])
    assert ours.manifest is None and type(ours.model).__name__ == "MPT"
    np.testing.assert_allclose(ours.logprobs([TEXTS[0]])[0], plainly(theirs, [0], ids), atol=1e-5)
    assert len(ours.generate("def " * 30, 40)) > 0  # both beyond the context


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning_and_two_are_refused(here, tmp_path):
    run = shutil.copytree(here / "runs/tiny", tmp_path / "tiny")
    (run / "checkpoints/ba6/manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="ba6"):
        found = lf.load(run)
    assert found.manifest is not None and found.manifest.timestamp.batch == 3
    shard = next((run / "checkpoints/ba3").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(lf.UserError, match="damaged"):
        lf.load(run / "checkpoints/ba3")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model, tmp_path):
    from llmfoundry_lite.data.tokenizer import train_tokenizer

    larger = train_tokenizer([path.read_text() for path in (ROOT / "llmfoundry_lite/data").glob("*.py")], 2000)
    model.tokenizer = larger
    with pytest.raises(lf.UserError, match=r"gives token \d+, and the model has 320; give the model's own"):
        model.logprobs(["import numpy as np"])


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", torch.bfloat16])
def test_a_dtype_has_its_names_and_torch_has_it_too(here, dtype):
    model = lf.load(Path("runs/tiny"), dtype=dtype, tokenizer=Path("data/mine/tokenizer"), device=torch.device("cpu"))
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "fp8"}, "dtype 'fp8' given, expected float32, bfloat16 or float16"),
        ({"device": "gpu"}, "device 'gpu' cannot be used: "),
        ({"device": "mps"}, "device 'mps' cannot be used: "),
    ],
)
def test_a_dtype_or_device_that_is_none_is_refused(here, given, message):
    with pytest.raises(lf.UserError, match=message):
        lf.load("runs/tiny", **given)
