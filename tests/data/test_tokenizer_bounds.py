"""A tokenizer of somebody else may be a few bytes that make gigabytes of a line: it is refused, unused."""

import base64
import json
from pathlib import Path

import pytest

from llmfoundry_lite.data.tokenizer import load_tokenizer, train_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.preparing import request

SPLIT_ALL = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
SLOW_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORD_PIECE = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##"}
WORD_PIECE |= {"max_input_chars_per_word": 10**6}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def replace(pattern: str, content: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict) -> dict:
    return {"normalizer": {"type": "Sequence", "normalizers": [*steps]}}


def pre_tokenizers(*steps: dict) -> dict:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps]}}


def charsmap(text: str) -> dict:
    """SentencePiece's map with an empty index."""
    content = (4).to_bytes(4, "little") + bytes(4) + text.encode() + b"\0"
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}}


def template(*pieces: dict, ids: int = 1) -> dict:
    tokens = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}}
    pair = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": pair, "special_tokens": tokens}


def added(content: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 300, "content": content, "special": True, **flags}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train_tokenizer(["the cat sat on a mat"] * 3, 300).save(folder)
    return folder


def changed(plain: Path, folder: Path, **parts: object) -> Path:
    folder.mkdir()
    stored = json.loads((plain / "tokenizer.json").read_text())
    model = stored["model"] | parts.pop("model", {})  # pyright: ignore[reportOperatorIssue]
    (folder / "tokenizer.json").write_text(json.dumps({**stored, **parts, "model": model}))
    (folder / "tokenizer_config.json").write_bytes((plain / "tokenizer_config.json").read_bytes())
    return folder


REFUSED = {
    "replaced-four-times": (
        normalizers(*[replace("a", "a" * 1000)] * 4),
        "make 1,000,000,000,000 characters of one",
    ),
    "doubled-again": (normalizers(*[replace("ab", "abab")] * 5), "may make 32 characters of one, expected at most 16"),
    "between-all": (normalizers(*[replace("", "aaaa", "Regex")] * 2), "may make 25 characters of one"),
    "unicode-in-between": (normalizers(replace(".", "\ufdfa", "Regex"), {"type": "NFKD"}), "may make 19 characters of"),
    "prepended": ({"normalizer": {"type": "Prepend", "prepend": "x" * 50_000}}, "may make 50,001 characters of one"),
    "precompiled": (charsmap("x" * 5000), "its steps of encoding may make 278 characters of one"),
    "bytes-of-bytes": (pre_tokenizers(*[BYTE_LEVEL] * 6), "may make 32 characters of one"),
    "spaces-of-parts": (pre_tokenizers(*[SPLIT_ALL, METASPACE] * 5), "may make 32 characters of one"),
    "decoded": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 100)]}},
        "its steps of decoding may make 100 characters of one",
    ),
    "repeated-text": ({"post_processor": template(TEXT, TEXT)}, "a text that it repeats 2 times"),
    "many-ids": ({"post_processor": template({"SpecialToken": {"id": "<s>", "type_id": 0}}, TEXT, ids=65)}, "65 ids"),
    "long-token": ({"added_tokens": [added("x" * 20_000)]}, "a token has 20,000 characters, expected at most 16,384"),
    "long-word": (
        {
            "model": {
                "type": "WordPiece",
                "unk_token": "a",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 10**6,
            }
        },
        "its max_input_chars_per_word is 1,000,000, expected at most 1,000",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_makes_far_more_of_a_text_is_refused(name, plain, tmp_path):
    parts, message = REFUSED[name]
    folder = changed(plain, tmp_path / "theirs", **parts)
    with pytest.raises(DataError) as refused:
        load_tokenizer(folder)
    assert str(refused.value).startswith(f"tokenizer {folder}: ") and message in str(refused.value)
    assert str(refused.value).endswith("; choose another tokenizer")


def test_ids_far_above_the_number_of_tokens_are_refused(plain, tmp_path):
    """The library writes a list up to the largest id, for which the fingerprint asks."""
    vocabulary = json.loads((plain / "tokenizer.json").read_text())["model"]["vocab"]
    folder = changed(plain, tmp_path / "theirs", model={"vocab": {**vocabulary, "zz": 2**31}})
    with pytest.raises(DataError, match="its tokens need 2,147,483,649 ids, expected at most 4,194,304"):
        load_tokenizer(folder)


USUAL = {
    "llama-2": normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
    "xlm-roberta": {**normalizers(replace(" {2,}", " ", "Regex")), **pre_tokenizers(METASPACE)},
    "longest-of-nfkc": charsmap(
        "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644"
    ),
    "albert": normalizers(replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
    "deepseek": pre_tokenizers(SPLIT_ALL, SPLIT_ALL, SPLIT_ALL, BYTE_LEVEL),
    "llama-3": {"post_processor": template({"SpecialToken": {"id": "<s>", "type_id": 0}}, TEXT)},
}


@pytest.mark.parametrize("name", USUAL)
def test_steps_of_well_known_tokenizers_are_within_the_bounds(name, plain, tmp_path):
    assert load_tokenizer(changed(plain, tmp_path / "theirs", **USUAL[name])).fingerprint


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_panic_of_the_library_is_a_line(num_workers, plain, tmp_path, capfd):
    """pyo3's PanicException is no Exception: it would pass every handler."""
    folder = changed(plain, tmp_path / "theirs", **pre_tokenizers(SLOW_SPLIT))
    tokenizer = load_tokenizer(folder)
    message = rf"tokenizer {folder} fails on a text \(Onig: .*retry-limit.*\); choose another tokenizer"
    with pytest.raises(DataError, match=message):
        tokenizer.encode("a" * 60 + "c")
    (tmp_path / "in.txt").write_text("a" * 60 + "c")
    with pytest.raises(DataError, match=r"fails on a text \(Onig: "):
        prepare(request(tmp_path / "in.txt", folder, val_fraction=0), tmp_path / "out", num_workers=num_workers)
