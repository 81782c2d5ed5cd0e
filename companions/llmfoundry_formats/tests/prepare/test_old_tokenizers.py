"""Tokenizers that transformers converts."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import DataError
from tests.helpers.folders import OWN_CODE


@pytest.mark.parametrize("writes", [True, False])
def test_converting_keeps_the_hubs_generation_config_and_says_when_there_is_nothing_to_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [0, 7]}')
    monkeypatch.setattr("llmfoundry_lite.data.tokenizer.download_from_hub", lambda name: {generation.name: generation})
    converter = SimpleNamespace(save_pretrained=tokenizer.save if writes else lambda folder: None)
    automatic = SimpleNamespace(from_pretrained=lambda name, **_: converter)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=automatic))
    if writes:
        assert load_tokenizer("somebody/old").stop_token_ids == {0, 7}
        return
    with pytest.raises(
        DataError, match=r"old has no tokenizer\.json, and transformers writes none .*; choose a tokenizer"
    ):
        load_tokenizer("somebody/old")


def test_a_vocabulary_without_its_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=rf"{tmp_path} has no ids but those of special and added tokens"):
        load_tokenizer(tmp_path)


def test_a_tokenizers_own_code_is_never_run(tokenizer: Tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "tokenizer"
    tokenizer.save(folder)
    (folder / "mine.py").write_text(OWN_CODE.format(path=str(tmp_path / "ran")))
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    tokens = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.MyTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "eos_token": "<|endoftext|>"}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    with pytest.raises(DataError) as error:
        load_tokenizer(folder)
    assert str(error.value) == (
        f"tokenizer {folder} needs its own code, which is not run; expected a folder with a tokenizer.json"
    )
    assert not (tmp_path / "ran").exists()


MANY = {"2147483646": {"content": "<x>", "special": True}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"<x>": 2**31 - 1}, "added_tokens.json: its tokens need 2,147,483,648 ids, expected at"),
        ("vocab.json", {"a": 0, "b": 2**31}, "vocab.json: its tokens need 2,147,483,649 ids, expected at most"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": MANY},
            "tokenizer_config.json: its tokens need 2,147,483,647",
        ),
        ("vocab.txt", "\n" * 4_200_000, "vocab.txt has more than 4,194,304 lines"),
        ("spiece.model", None, "spiece.model cannot be read"),
    ],
    ids=["added", "vocabulary", "decoder", "lines", "size"],
)
def test_files_without_a_bound_are_refused_before_they_are_converted(name, content, message, tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("a\n[UNK]\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    if content is None:  # a hole that is larger than any tokenizer, and takes no room on the disk
        with (tmp_path / name).open("wb") as file:
            file.truncate(300 << 20)
    else:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is an error
    with pytest.raises(DataError) as refused:
        load_tokenizer(tmp_path)
    assert str(refused.value).startswith(f"tokenizer {tmp_path}: ") and message in str(refused.value)
