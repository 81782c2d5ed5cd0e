"""transformers finds with an exported folder the ids that the run trained on, whatever class it chooses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmfoundry_lite.cli import main
from llmfoundry_lite.convert.huggingface import export_model, import_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from llmfoundry_lite.errors import ExportError
from tests.helpers.data import make_documents
from tests.helpers.models import ALIBI, LLAMA, QWEN2, QWEN3, SMALL, random_model, random_tokens, with_attention
from tests.helpers.present import needs

READS_OTHERS = needs("llmfoundry_formats")
MODELS = {
    "mpt": ALIBI,
    "gpt2": SMALL,
    "llama": LLAMA,
    "mistral": with_attention(LLAMA, sliding_window_size=8),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
MODELS = {name: replace(config, n_layers=1, vocab_size=512) for name, config in MODELS.items()}
LINES = [f"In {year}, they'll pay ${100 * year}.\n\n  Don't  wait: cafe\u0301, ﬁne!" for year in range(1900, 2030)]
DOCUMENTS = [*make_documents(100, seed=1), *LINES]


def byte_level() -> tokenizers.Tokenizer:
    """Numbers stay whole and nothing is normalized, where Qwen2 and GPT-NeoX have it otherwise."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(DOCUMENTS, trainer)
    return backend


def like_sentencepiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<end>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=["<end>"], show_progress=False)
    backend.train_from_iterator(DOCUMENTS, trainer)
    return backend


def like_qwen2() -> tokenizers.Tokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    backend = byte_level()
    split = pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.normalizer = normalizers.NFC()
    return backend


def written(backend: tokenizers.Tokenizer, folder: Path, of_class: str | None) -> Tokenizer:
    """Write a tokenizer whose tokenizer_config.json names a class, as somebody's folder does, and load it."""
    build_tokenizer("trained", backend, {"eos_token": "<end>"}).save(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if of_class is not None:
        config["tokenizer_class"] = of_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def assert_same_ids(folder: Path, ours: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    found = theirs(DOCUMENTS, add_special_tokens=False, verbose=False)["input_ids"]
    assert found == [ours.encode(document) for document in DOCUMENTS]
    assert theirs.eos_token_id == ours.eos_token_id


@pytest.mark.parametrize(
    ("backend", "of_class"),
    [
        (byte_level, None),
        (like_sentencepiece, None),
        (byte_level, "Qwen2Tokenizer"),
        (like_sentencepiece, "GPT2Tokenizer"),
    ],
    ids=["byte-level", "sentencepiece", "byte-level-called-qwen2", "sentencepiece-called-gpt2"],
)
def test_transformers_finds_the_ids_of_the_run_in_every_layout(backend, of_class, tmp_path):
    ours = written(backend(), tmp_path / "tokenizer", of_class)
    for name, config in MODELS.items():
        export_model(
            random_model(config).state_dict(), config, tmp_path / name, tokenizer_folder=tmp_path / "tokenizer"
        )
        assert_same_ids(tmp_path / name, ours)


def test_a_tokenizer_of_qwen2_keeps_its_class_and_its_layout(tmp_path):
    config, ours = MODELS["qwen2"], written(like_qwen2(), tmp_path / "tokenizer", "Qwen2Tokenizer")
    note = export_model(
        random_model(config).state_dict(), config, tmp_path / "out", tokenizer_folder=tmp_path / "tokenizer"
    )
    assert note is None
    assert_same_ids(tmp_path / "out", ours)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen2"
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == "Qwen2Tokenizer"


@READS_OTHERS
def test_qwen2_with_another_tokenizer_is_written_as_llama_and_read_back(tmp_path, capsys):
    """The biases that Llama has besides are zeros: the logits stay, and an import finds the model as it was."""
    config, ours = MODELS["qwen2"], written(byte_level(), tmp_path / "tokenizer", None)
    model, out = random_model(config), tmp_path / "out"
    export_model(model.state_dict(), config, out, tokenizer_folder=tmp_path / "tokenizer")

    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    theirs, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_bt = random_tokens(config)
    assert (theirs.eval()(tokens_bt).logits - model(tokens_bt)).abs().max() < 1e-5
    read_config, state_dict = import_model(out)
    assert read_config.no_bias and read_config.attn_config.qkv_bias
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in model.state_dict().items())

    # The command says it, and makes the same folder of the imported checkpoint.
    imported = import_checkpoint(str(out), str(tmp_path / "imported"))
    assert main.run(["checkpoint", "export", imported.checkpoint.url, str(tmp_path / "again")]) == 0
    assert "written as llama, with zeros for biases that qwen2 does not have; as qwen2, " in capsys.readouterr().out
    assert_same_ids(tmp_path / "again", ours)


@READS_OTHERS
def test_llama_with_a_bias_of_the_output_alone_is_still_refused(tmp_path):
    config = MODELS["qwen2"]
    written(byte_level(), tmp_path / "tokenizer", None)
    export_model(random_model(config).state_dict(), config, tmp_path / "out", tokenizer_folder=tmp_path / "tokenizer")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.nn.init.ones_(theirs.model.layers[0].self_attn.o_proj.bias)
    theirs.save_pretrained(tmp_path / "trained")
    with pytest.raises(ExportError, match=r"attention_bias is true in config\.json and mlp_bias is not"):
        import_model(tmp_path / "trained")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12345", "makes 1 tokens of '"),
        (None, "AutoTokenizer cannot use it (no such class)"),
    ],
)
def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(text, message, tmp_path, monkeypatch):
    """No class of transformers 5.23 is known that does so for MPT; another release may have one."""
    written(byte_level(), tmp_path / "tokenizer", None)
    config = MODELS["mpt"]

    def load_another(*_, **__):
        if text is None:
            raise ValueError("no such class\nand a second line")
        return lambda *_, **__: {"input_ids": [7]}

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_another)
    with pytest.raises(ExportError, match="would be read otherwise by transformers than by the run") as refused:
        export_model(
            random_model(config).state_dict(), config, tmp_path / "out", tokenizer_folder=tmp_path / "tokenizer"
        )
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).endswith("export the weights without it (--tokenizer none)")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("of_class", ["Qwen2Tokenizer", "GPTNeoXTokenizer", "MyTokenizer"])
def test_the_copy_beside_checkpoints_and_data_is_read_as_it_is(of_class, tmp_path):
    ours = written(byte_level(), tmp_path / "tokenizer", of_class)
    ours.save(tmp_path / "copy")
    assert_same_ids(tmp_path / "copy", ours)
