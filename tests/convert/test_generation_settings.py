"""Special tokens, chat templates and generation_config.json come unchanged through import, export, `data prepare`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llmfoundry_lite.cli import main
from llmfoundry_lite.convert.huggingface import export_model
from llmfoundry_lite.convert.to_checkpoint import import_checkpoint
from llmfoundry_lite.data.tokenizer import build_tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation import harness, loaded
from tests.helpers.models import ALIBI, random_model

MODEL = replace(ALIBI, vocab_size=320)
EXTRA = ["<|bos|>", "<|eot|>", "<|eom|>", "<|pad|>", "<|cls|>", "<|sep|>", "<|mask|>"]
GENERATION = {"eos_token_id": [0, 301, 302], "bos_token_id": 300, "pad_token_id": 303, "do_sample": True}
GENERATION |= {"temperature": 0.6, "top_p": 0.9, "max_length": 4096, "suppress_tokens": [5], "forced_eos_token_id": 0}
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NAMES = {"bos_token": "<|bos|>", "unk_token": "<|pad|>", "cls_token": "<|cls|>"}
NAMES |= {"pad_token": {"content": "<|pad|>", **FLAGS}, "eos_token": {"content": "<|endoftext|>", **FLAGS}}
NAMES |= {"sep_token": "<|sep|>", "mask_token": "<|mask|>", "additional_special_tokens": ["<|eot|>", "<|eom|>"]}
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32, "padding_side": "left"}
SETTINGS |= {"clean_up_tokenization_spaces": True, "add_bos_token": True, "add_prefix_space": True}


def write(path: Path, content) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """The folder of a chat model as transformers 4 and 5 leave it, special tokens named in the map alone."""
    tokenizer, folder = train_tokenizer(["abc"] * 9, 300), tmp_path / "chat"
    tokenizer.backend.add_tokens([f"<fill{i}>" for i in range(300 - tokenizer.vocab_size)])
    tokenizer.backend.add_special_tokens(EXTRA)
    tokenizer.save(tmp_path / "plain")
    export_model(random_model(MODEL).state_dict(), MODEL, folder, tokenizer_folder=tmp_path / "plain")
    write(folder / "tokenizer_config.json", SETTINGS)
    write(folder / "special_tokens_map.json", NAMES)
    write(folder / "generation_config.json", GENERATION)
    config = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", config | {key: GENERATION[key] for key in GENERATION if key.endswith("s_token_id")})
    write(folder / "chat_template.jinja", "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}")
    write(folder / "additional_chat_templates/tool_use.jinja", "TOOLS {{ messages }}")
    return folder


def assert_same_tokenizer(one: Path, other: Path) -> None:
    ours, theirs = AutoTokenizer.from_pretrained(other), AutoTokenizer.from_pretrained(one)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert set(theirs.chat_template) == {"default", "tool_use"} and ours.chat_template == theirs.chat_template
    for name in ("padding_side", "model_max_length", "clean_up_tokenization_spaces"):
        assert getattr(ours, name) == getattr(theirs, name)
    texts = ["a bc <|eot|>d .", "a"]
    assert ours(texts, padding=True)["input_ids"] == theirs(texts, padding=True)["input_ids"]
    ids = theirs(texts[0])["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)


def generation_of(folder: Path) -> dict:
    found = GenerationConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in found.items() if key != "transformers_version"}


def test_import_and_export_give_the_folder_of_a_chat_model_again(chat: Path, tmp_path: Path) -> None:
    imported = import_checkpoint(str(chat), str(tmp_path / "imported"))
    assert imported.notes == []
    assert main.run(["checkpoint", "export", imported.checkpoint.url, str(tmp_path / "out")]) == 0
    assert_same_tokenizer(chat, tmp_path / "out")
    assert generation_of(tmp_path / "out") == generation_of(chat)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = (theirs.config.eos_token_id, theirs.config.bos_token_id, theirs.config.pad_token_id)
    assert ids == ([0, 301, 302], 300, 303)
    # A URL or another machine has the copy beside the checkpoint alone.
    (tmp_path / "imported" / "tokenizer").rename(tmp_path / "moved")
    command = ["checkpoint", "export", imported.checkpoint.url, str(tmp_path / "two"), "--tokenizer"]
    assert main.run([*command, str(tmp_path / "moved")]) == 0
    assert_same_tokenizer(chat, tmp_path / "two")


def test_what_data_prepare_writes_is_the_tokenizer_it_was_given(chat: Path, tmp_path: Path) -> None:
    load_tokenizer(chat).save(tmp_path / "tokenizer")
    assert_same_tokenizer(chat, tmp_path / "tokenizer")
    assert generation_of(tmp_path / "tokenizer") == generation_of(chat)
    assert load_tokenizer(tmp_path / "tokenizer").files() == load_tokenizer(chat).files()


def test_without_generation_config_json_the_stop_tokens_of_config_json_are_carried(chat: Path, tmp_path: Path) -> None:
    (chat / "generation_config.json").unlink()
    assert load_tokenizer(chat).stop_token_ids == {0, 301, 302}
    imported = import_checkpoint(str(chat), str(tmp_path / "imported"))
    assert main.run(["checkpoint", "export", imported.checkpoint.url, str(tmp_path / "out")]) == 0
    assert generation_of(tmp_path / "out")["eos_token_id"] == [0, 301, 302]


def test_what_is_not_carried_is_named(chat: Path, tmp_path: Path) -> None:
    write(chat / "generation_config.json", GENERATION | {"eos_token_id": [0, 301]})
    assert import_checkpoint(str(chat), str(tmp_path / "one")).notes == [
        "eos_token_id is [0, 301, 302] in config.json and [0, 301] in generation_config.json, which is what generate "
        "obeys; config.json's is not carried"
    ]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (chat / name).unlink()
    assert import_checkpoint(str(chat), str(tmp_path / "two")).notes == [
        "generation_config.json and the stop tokens are not carried, as they lie with a tokenizer and there is none"
    ]


@pytest.mark.parametrize("value", ["x", [0, "x"], True, -1, 1.5, {"a": 1}])
def test_stop_tokens_that_are_no_ids_are_refused(chat: Path, value) -> None:
    write(chat / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(DataError, match=r"generation_config.json: eos_token_id is .*, expected the number of a token"):
        load_tokenizer(chat)


@pytest.mark.parametrize(("content", "words"), [("{", "cannot be read"), (" " * (1 << 20) + "{}", "expected at most")])
def test_a_generation_config_that_is_none_is_refused(chat: Path, content: str, words: str) -> None:
    write(chat / "generation_config.json", content)
    with pytest.raises(DataError, match=words):
        load_tokenizer(chat)


@pytest.mark.parametrize("stop", [0, 301, 302])
def test_text_ends_at_every_one_of_several_stop_tokens(chat: Path, monkeypatch, stop: int) -> None:
    tokenizer = load_tokenizer(chat)
    ids = [*tokenizer.encode("abc"), stop, *tokenizer.encode("more")]
    monkeypatch.setattr(loaded, "generate", lambda *_, **options: iter(ids))
    assert "".join(loaded.generate_text(None, tokenizer, "a", 9, device=torch.device("cpu"))) == "abc"  # type: ignore[arg-type]
    model = SimpleNamespace(generate=lambda context, num_tokens: iter(ids))
    assert harness.generate_answer(model, tokenizer, harness.Prompt([1], 9)) == "abc"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("decoder", "tokens"),
    [
        (decoders.Metaspace(), ["▁alpha", "▁beta", "gamma"]),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            ["▁alpha", "▁beta", "gamma"],
        ),
        (decoders.WordPiece(), ["alpha", "beta", "##gamma"]),
    ],
)
def test_a_space_between_the_prompt_and_what_is_written_stays(monkeypatch, decoder, tokens: list[str]) -> None:
    backend = Backend(models.WordLevel({token: i for i, token in enumerate([*tokens, "<eos>"])}, unk_token="<eos>"))
    backend.decoder = decoder
    backend.normalizer = normalizers.Prepend("▁") if "▁" in tokens[0] else None
    tokenizer = build_tokenizer("words", backend, {"eos_token": "<eos>"})
    monkeypatch.setattr(loaded, "generate", lambda *_, **options: iter([1, 2]))
    for prompt, written in (("alpha", [" beta", "gamma"]), ("", ["beta", "gamma"])):
        assert [*filter(None, loaded.generate_text(None, tokenizer, prompt, 2))] == written  # type: ignore[arg-type]


def test_the_map_counts_more_than_the_config_unless_the_tokens_stand_there(chat: Path) -> None:
    write(chat / "tokenizer_config.json", SETTINGS | {"eos_token": "<|eom|>", "pad_token": None})
    assert load_tokenizer(chat).eos_token == AutoTokenizer.from_pretrained(chat).eos_token == "<|endoftext|>"
    write(chat / "tokenizer_config.json", SETTINGS | {"eos_token": "<|eom|>", "added_tokens_decoder": {}})
    assert load_tokenizer(chat).eos_token == AutoTokenizer.from_pretrained(chat).eos_token == "<|eom|>"
