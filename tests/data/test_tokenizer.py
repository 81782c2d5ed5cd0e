import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import models, processors

from llmfoundry_lite.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer, train_tokenizer
from llmfoundry_lite.data.tokenizer_files import is_local_or_cached
from llmfoundry_lite.errors import DataError
from tests.helpers.data import make_documents
from tests.helpers.present import leave_out_companions


def copy_with(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a tokenizer folder with parts of its tokenizer.json replaced."""
    shutil.copytree(source, target)
    content = json.loads((target / "tokenizer.json").read_text())
    content.update(changes)
    (target / "tokenizer.json").write_text(json.dumps(dict(reversed(content.items()))))
    return target


def test_decoding_gives_back_any_text(tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 \t\n  x<|endoftext|>\x00🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_special_token_spelled_in_a_text_does_not_end_the_document(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id not in tokenizer.encode("a <|endoftext|> b")


@pytest.mark.parametrize(
    ("template", "beginning"),
    [(None, []), ("{0} $A", [0]), ("{0} $A {0}", [0]), ("$A {0}", []), ("{0} {0} $A", [0, 0])],
)
def test_what_a_template_puts_before_a_text_is_known_and_not_put_there(
    tokenizer: Tokenizer, template: str | None, beginning: list[int]
) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    if template is not None:
        end = tokenizer.eos_token
        backend.post_processor = processors.TemplateProcessing(single=template.format(end), special_tokens=[(end, 0)])
    changed = replace(tokenizer, backend=backend)
    assert changed.beginning == beginning
    assert changed.encode("a text") == tokenizer.encode("a text")


def test_a_batch_gets_the_ids_of_its_single_texts(tokenizer: Tokenizer) -> None:
    texts = make_documents(5)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_the_fingerprint_does_not_depend_on_folder_padding_truncation_or_key_order(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    changed = load_tokenizer(copy_with(tokenizer_folder, tmp_path / "other", truncation=truncation))
    assert changed.fingerprint == tokenizer.fingerprint
    assert len(changed.encode("the same ids, however long the text")) > 4


def test_the_fingerprint_reads_merges_in_either_notation(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path
) -> None:
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())["model"]
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    assert load_tokenizer(copy_with(tokenizer_folder, tmp_path / "old", model=model)).fingerprint == (
        tokenizer.fingerprint
    )


@pytest.mark.parametrize("change", [{"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}}])
def test_the_fingerprint_changes_with_what_decides_the_ids(
    tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    assert load_tokenizer(copy_with(tokenizer_folder, tmp_path / "t", **change)).fingerprint != tokenizer.fingerprint


def test_training_twice_gives_the_same_tokenizer_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = make_documents(200)
    with_threads = train_tokenizer(documents, 500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train_tokenizer(documents, 500).fingerprint == with_threads.fingerprint


def test_the_vocabulary_size_is_the_largest_id_plus_one_and_may_be_less_than_asked_for() -> None:
    tokenizer = train_tokenizer(["ab ab"], 5000)
    assert 257 < tokenizer.vocab_size < 300
    tokenizer.backend.add_tokens(["<extra>"])
    tokenizer.backend.add_special_tokens(["<more>"])
    assert max(tokenizer.backend.get_vocab().values()) == tokenizer.vocab_size + 1


def test_tokens_that_were_added_count_in_the_vocabulary(tmp_path: Path) -> None:
    """A model needs a row for each id that a text may become, and added ones are no part of the BPE's own table."""
    tokenizer = train_tokenizer(["ab ab"], 5000)
    tokenizer.backend.add_tokens(["<extra>"])
    tokenizer.backend.add_special_tokens(["<more>"])
    tokenizer.save(tmp_path)
    read = load_tokenizer(tmp_path)
    assert read.vocab_size == tokenizer.vocab_size + 2
    assert read.encode("<extra>") == [tokenizer.vocab_size]


def test_transformers_loads_what_is_saved(tokenizer: Tokenizer, tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.eos_token_id, tokenizer.vocab_size)
    text = "the quick brown fox é漢"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    theirs.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_the_end_of_text_token_is_found_where_the_files_name_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = copy_with(tokenizer_folder, tmp_path / "t")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "e", "lstrip": false}}')
    assert load_tokenizer(folder).eos_token == "e"
    (folder / "special_tokens_map.json").unlink()  # GPT-2's own files name no end of text
    assert load_tokenizer(folder).eos_token == "<|endoftext|>"


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"names no eos_token.*tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)


def test_a_folder_of_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(DataError, match=rf"{tmp_path} holds no vocabulary, expected one of tokenizer.json, vocab.jso"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_has_to_be_converted_names_the_companion(tmp_path: Path, monkeypatch) -> None:
    leave_out_companions(monkeypatch)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    name = "tokenizers without tokenizer.json"
    assert str(error.value) == f"tokenizer {tmp_path}: {name}: needs the companion llmfoundry_formats"


def test_a_missing_folder_is_not_mistaken_for_a_hub_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist; give a folder with a tokenizer.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_without_a_network_the_message_names_the_tokenizer_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    assert not is_local_or_cached("nobody/nothing")
    with pytest.raises(DataError, match=r"nobody/nothing is not in the local cache.*give a local folder"):
        load_tokenizer("nobody/nothing")


def test_a_cached_tokenizer_needs_no_network(
    tokenizer: Tokenizer, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = {name: str(tokenizer_folder / name) for name in ("tokenizer.json", "tokenizer_config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file: cached.get(file, object()))
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    assert is_local_or_cached("somebody/something")
    assert load_tokenizer("somebody/something").fingerprint == tokenizer.fingerprint


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(DataError, match=r"train:256 is too small.*at least train:257"):
        train_tokenizer(["text"], 256)


# Long texts

AWKWARD = [*"aZ09 \t\n'_.\xa0ß漢²\u0301\u2028\u3000", "'s", " a", "  ", "\n\n", "don't", "x<|endoftext|>", "naïve été"]


@hypothesis.given(text=st.lists(st.sampled_from(AWKWARD), max_size=14).map("".join) | st.text(max_size=30))
@hypothesis.settings(max_examples=300, deadline=None)
def test_the_parts_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmfoundry_lite.data.tokenizer.PART_CHARACTERS", 1)
        ids = tokenizer.encode_to_array(text)
        assert "".join(tokenizer._split_long_text(text)) == text
    assert ids.dtype == np.uint32 and ids.tolist() == tokenizer.encode(text)


def test_a_long_text_is_cut_between_a_letter_and_a_space(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("llmfoundry_lite.data.tokenizer.PART_CHARACTERS", 1)
    assert list(tokenizer._split_long_text("ab cd  ef\n 12 x 漢 y")) == ["ab", " cd", "  ef\n 12 x", " 漢 y"]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"added_tokens": [{"id": 0, "content": "<|endoftext|>", "special": True}, {"id": 600, "content": "  "}]},
    ],
)
def test_a_long_text_is_whole_to_other_kinds_of_tokenizers(
    change: dict[str, list[dict[str, object]]], tokenizer_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("llmfoundry_lite.data.tokenizer.PART_CHARACTERS", 1)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    if "added_tokens" in change:
        change = {"added_tokens": [flags | token for token in change["added_tokens"]]}
    other = load_tokenizer(copy_with(tokenizer_folder, tmp_path / "other", **change))
    texts = make_documents(3)
    assert all(list(other._split_long_text(text)) == [text] for text in texts)
    assert [other.encode_to_array(text).tolist() for text in texts] == other.encode_batch(texts)


@pytest.mark.parametrize(
    ("model", "config", "unknown"),
    [
        (models.Unigram([("<eos>", 0.0), ("a", -1.0), ("<u>", -2.0)], unk_id=2), {}, 2),
        (models.WordLevel({"<eos>": 0, "a": 1, "<u>": 2}, unk_token="<u>"), {}, 2),
        (models.WordLevel({"<eos>": 0, "a": 1, "<u>": 2}, unk_token="<u>"), {"unk_token": {"content": "a"}}, 1),
        (models.BPE({"<eos>": 0, "a": 1}, []), {}, None),
    ],
)
def test_the_unknown_token_is_the_one_that_the_files_name_or_else_the_model_s(model, config, unknown) -> None:
    backend = tokenizers.Tokenizer(model)
    assert build_tokenizer("some", backend, {"eos_token": "<eos>", **config}).unk_token_id == unknown


def test_text_that_a_model_has_no_token_for_is_an_error_of_one_line() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"alpha": 0, "<eos>": 1}, unk_token="[UNK]"))
    backend.add_special_tokens(["<eos>"])
    tokenizer = build_tokenizer("words", backend, {"eos_token": "<eos>"})
    assert tokenizer.encode("alpha") == [0]
    for encode in (tokenizer.encode, tokenizer.encode_to_array):
        with pytest.raises(
            DataError, match=r"^tokenizer words cannot encode a text \(WordLevel .*name its unknown token"
        ):
            encode("beta")


def test_a_text_has_the_same_tokens_each_time_whatever_dropout_a_file_names(tokenizer_folder: Path, tmp_path: Path):
    shutil.copytree(tokenizer_folder, tmp_path / "random")
    stored = json.loads((tmp_path / "random/tokenizer.json").read_text())
    stored["model"]["dropout"] = 0.5
    (tmp_path / "random/tokenizer.json").write_text(json.dumps(stored))
    plain, random = load_tokenizer(tokenizer_folder), load_tokenizer(tmp_path / "random")
    texts = make_documents(3)
    assert random.encode_batch(texts) == plain.encode_batch(texts)
    assert random.fingerprint == plain.fingerprint
