"""`init --like`: from a Hugging Face folder to a run that trains on, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors
from llmfoundry_lite.cli import main
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.convert.huggingface import import_model
from llmfoundry_lite.data.tokenizer import train_tokenizer
from tests.helpers.launch import train
from tests.helpers.present import needs
from tests.helpers.tiny import read_metrics, values

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "vocab_size": 320,
}
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA_3),
    "mistral": MistralConfig(**SHAPE, sliding_window=6),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}
TEMPLATE = "{% for message in messages %}{{ message.content }};{% endfor %}"
pytestmark = needs("llmfoundry_formats")
WORDS = ["import", "return", "for", "in", "def", "range", "class", "self", "None", "list"]


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """One model is enough for the first tier, because they share all but the names of their tensors."""
    return [] if name == "llama" else [pytest.mark.slow]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(60):
        text = " ".join(WORDS[(number * place * place + place) % len(WORDS)] for place in range(200))
        (folder / f"{number}.txt").write_text(text)
    return folder


def make_model(name: str, folder: Path, texts: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder)
    train_tokenizer((path.read_text() for path in sorted(texts.iterdir())), 300).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def prepare(texts: Path, tokenizer: str, length: int = 32, out: str = "data") -> None:
    words = ["--tokenizer", tokenizer, "--max-seq-len", str(length), "--val-fraction", "0.2", "--num-workers", "1"]
    assert main.run(["data", "prepare", str(texts), "--out", out, *words]) == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in MODELS])
def test_a_folder_of_transformers_is_trained_on_and_written_in_its_layout(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    theirs = make_model(name, tmp_path / name, texts)
    prepare(texts, name)
    assert main.run(["init", "data", "--like", name]) == 0
    assert f"wrote {name}-data-weights and {name}-data.yaml; next: " in capsys.readouterr().out

    model, tensors = import_model(theirs)
    assert load_train_config([f"{name}-data.yaml"], {}).config.model == model
    begun = load_full_tensors(f"{name}-data-weights/ba0")
    assert all(torch.equal(begun[key], tensor) for key, tensor in tensors.items())

    words = [f"{name}-data.yaml", "max_duration=4ba", "eval_interval=0", "eval_first=true", "precision=fp32"]
    train([*words, "save_interval=2ba", "stop_after=2ba"], tmp_path, 2).check()
    train(words, tmp_path, 1).check()
    run = tmp_path / f"runs/{name}-data"
    assert len(values(read_metrics(run), "loss/train/total")) == 4

    plain = AutoModelForCausalLM.from_pretrained(run / "huggingface")
    there, here = (json.loads((folder / "config.json").read_text()) for folder in (theirs, run / "huggingface"))
    # transformers would cut texts for a qwen2 folder by Qwen2's own rules, which this tokenizer does not have.
    expected = ("llama", ["LlamaForCausalLM"]) if name == "qwen2" else (name, there["architectures"])
    assert (here["model_type"], here["architectures"]) == expected
    talk = [{"role": "user", "content": "import"}]
    tokenizer = AutoTokenizer.from_pretrained(run / "huggingface")
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "import;"
    before = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
    after = plain.state_dict()
    added = [after[key] for key in after.keys() - before.keys()]
    assert before.keys() <= after.keys() and bool(added) == (name == "qwen2")
    assert not any(bias.any() for bias in added), "Llama's biases that Qwen2 lacks"
    assert 0 < max((after[key] - tensor).abs().max() for key, tensor in before.items()) < 1e-3


def test_a_folder_that_does_not_fit_the_data_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    make_model("llama", tmp_path / "llama", texts)
    prepare(texts, "train:280")
    prepare(texts, "llama", length=128, out="long")
    capsys.readouterr()
    refused = {
        ("data", "--like", "llama"): "data was prepared with another tokenizer (",
        ("long", "--like", "llama"): "long has samples of 128 tokens, and llama takes 64; prepare the data with --max-",
        (
            "long",
            "--like",
            "no",
        ): "--like: no has no config.json; expected the folder of a Hugging Face model, hf:NAME, or a .yaml file",
        ("long", "--like", "llama", "--size", "125m"): "--size: 125m given with --like llama, which has a size; leave",
    }
    for words, said in refused.items():
        assert main.run(["init", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}") and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "llama", "long", "texts"]


def test_odd_names_and_folders_are_taken_as_they_are_or_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts")
    odd = make_model("llama", tmp_path / "a [b] ${c}\n#{d}", texts)
    prepare(texts, str(odd))
    monkeypatch.chdir(odd)
    assert main.run(["init", "../data", "--like", "."]) == 0
    out = "a [b] ${c}\n#{d}-data.yaml"
    assert load_train_config([out], {}).config.load_path == "a [b] ${c}\n#{d}-data-weights/ba0"
    assert Path("a [b] ${c}\n#{d}-data-weights/ba0").is_dir()
    assert "train 'a [b] ${c}\\n#{d}-data.yaml' --dry-run" in capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    small = shutil.copytree(odd, "small", ignore=shutil.ignore_patterns("*-data*"))
    model = AutoModelForCausalLM.from_pretrained(small)
    shutil.copytree(small, "taken-weights")
    shutil.copytree(small, "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(model.state_dict(), "pickled/pytorch_model.bin")
    model.resize_token_embeddings(256)
    model.save_pretrained(small)
    capsys.readouterr()
    for words, said in {
        (
            "taken-weights",
            "--out",
            "taken.yaml",
        ): "taken-weights: already exists, and holds no checkpoints; ch",
        (
            "small",
        ): "small has embeddings of 256 ids, and its tokenizer has 297; give it more with transformers' resize",
        ("pickled",): "pickled: pytorch_model.bin is a pickle, which can run code when it is read; if you trust where",
        (
            "hf:",
        ): "--like: hf: has no config.json; expected the folder of a Hugging Face model, hf:NAME, or a .yaml file",
    }.items():
        assert main.run(["init", "data", "--like", *words]) == 2
        assert capsys.readouterr().err.startswith(f"error: {said}")
    assert not list(tmp_path.glob("*.yaml")) and not list(tmp_path.glob("taken-weights/ba*"))
    assert main.run(["init", "data", "--like", "pickled", "--trust-pickle"]) == 0
