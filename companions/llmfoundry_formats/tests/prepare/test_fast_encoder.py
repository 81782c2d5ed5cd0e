"""`gigatoken` is used only where it makes the tokens that `tokenizers` makes."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llmfoundry_formats import fast_encoder
from llmfoundry_formats.fast_encoder import FastEncoder
from llmfoundry_lite.data.tokenizer import Tokenizer, build_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.documents import Document, split_key
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.token_files import DISTRUST_FILE, Unequal
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.preparing import request, write_jsonl
from tests.helpers.present import leave_out_companions

needs_gigatoken = pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken is not installed")


def documents_of(*texts: str) -> list[Document]:
    return [Document(text, len(text.encode()), split_key(text.encode()), 0) for text in texts]


def gpt4_like() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    digits = tokenizers.Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(digits, "isolated"), byte_level])
    return trained(backend)


def lower_case() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return trained(backend)


def words() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def trained(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(make_documents(300, seed=1), trainer)
    return backend


@needs_gigatoken
def test_the_tokenizers_trained_here_prove_equal(tokenizer: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fast_encoder, "RECYCLE_BYTES", 1000)
    encoder = FastEncoder(tokenizer, tmp_path / DISTRUST_FILE)
    encoder.prove()
    backends = {id(encoder.backend): encoder.backend}
    texts = [*make_documents(120), "a<|endoftext|>b", "<|endoftext|>"]
    for document in documents_of(*texts):
        assert encoder.encode(document).tolist() == tokenizer.encode(document.text)
        backends[id(encoder.backend)] = encoder.backend
    assert encoder.num_checked == fast_encoder.FIRST_CHECKED
    assert len(backends) > 1, "it begins anew before its memory grows"
    assert not (tmp_path / DISTRUST_FILE).exists()


@needs_gigatoken
@pytest.mark.parametrize("make", [gpt4_like, lower_case, words])
def test_other_tokenizers_are_used_only_if_they_prove_equal(make, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("test", make(), {"eos_token": "<|endoftext|>"})
    try:
        encoder = FastEncoder(tokenizer, tmp_path / DISTRUST_FILE)
        encoder.prove()
    except Unequal as error:
        assert (tmp_path / DISTRUST_FILE).read_text() == f"{error}\n"
        return
    texts = ["".join(chr(code) for code in range(start, start + 100)) for start in range(0, 0xD700, 100)]
    assert [encoder.encode(document).tolist() for document in documents_of(*texts)] == tokenizer.encode_batch(texts)


@needs_gigatoken
def test_marks_that_the_two_order_otherwise_are_found_in_the_proof(tmp_path: Path) -> None:
    """By a tokenizer like GPT-NeoX's, which normalises to NFC."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = build_tokenizer("test", trained(backend), {"eos_token": "<|endoftext|>"})
    encoder = FastEncoder(tokenizer, tmp_path / DISTRUST_FILE)
    texts = [f"a{chr(code)}\u0323\u0301b" for code in range(0x300, 0x1B00)]
    differing = [text for text in texts if encoder.tokenizer.encode_batch([text]) != [encoder.ids_of(text).tolist()]]
    assert all(any(text in probe for probe in fast_encoder.marks()) for text in differing)
    if differing:
        with pytest.raises(Unequal, match="differ on"):
            encoder.prove()


LIBRARY = """
import os
import sys
import numpy as np
import tokenizers

class Encoder:
    def __init__(self, stored):
        self.backend = tokenizers.Tokenizer.from_str(stored)

    def encode(self, text):
        wrong = text.startswith(os.environ["LIE_ABOUT"])
        return np.array(self.backend.encode(text, add_special_tokens=False).ids + [5] * wrong, np.uint32)

def load_hf_json(stored):
    if os.environ["LIE_ABOUT"] == "abort":
        os.abort()
    if os.environ["LIE_ABOUT"] == "panic":
        raise type("Panic", (BaseException,), {})("not a model")
    return Encoder(stored)
"""


@pytest.fixture
def lying(tmp_path: Path, monkeypatch):
    """A library of that name, here and in processes begun here: right but for texts with a certain beginning."""
    library = tmp_path / "library"
    for name, text in (
        ("gigatoken/__init__.py", ""),
        ("gigatoken/gigatoken_rs.py", LIBRARY),
        ("gigatoken-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gigatoken\nVersion: 0\n"),
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gigatoken"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(library)
    monkeypatch.setenv("PYTHONPATH", str(library), prepend=os.pathsep)
    monkeypatch.setattr(fast_encoder, "WORTH_PROVING_BYTES", 0)
    monkeypatch.setattr("llmfoundry_lite.prepare.sources.MIN_UNIT_BYTES", 4000)
    yield lambda wrong: monkeypatch.setenv("LIE_ABOUT", wrong)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gigatoken"]:
        del sys.modules[name]


def said_by_preparing(text: Path, tokenizer_folder: Path, out: Path, num_workers: int = 1) -> list[str]:
    said: list[str] = []
    prepare(request(text, tokenizer_folder), out, num_workers=num_workers, notify=said.append)
    return said


AGAIN = ": tokenising by tokenizers alone, and again what was not"


@pytest.mark.slow
def test_a_difference_in_a_late_document_is_named_and_all_is_made_again(
    tmp_path: Path, tokenizer_folder: Path, lying, monkeypatch
) -> None:
    documents = make_documents(300)
    text = write_jsonl(tmp_path / "a.jsonl", documents)
    lying("said by nobody")
    assert said_by_preparing(text, tokenizer_folder, tmp_path / "expected") == []
    checked = [document for document in documents_of(*documents[100:]) if document.split_key % 50 == 0][-1].text
    monkeypatch.setattr(fast_encoder, "CHECKED_ONE_IN", 50)
    lying(checked[:6])  # the others that it lies about, if any, are made again too
    beginning = f"gigatoken 0 and tokenizers differ on the document that begins with {checked[:60]!r}"
    assert said_by_preparing(text, tokenizer_folder, tmp_path / "out") == [beginning + AGAIN]
    for name in ("train", "val"):
        assert folder_bytes(tmp_path / "out" / name) == folder_bytes(tmp_path / "expected" / name)


def test_a_difference_outlives_an_error_of_another_unit(tmp_path: Path, tokenizer: Tokenizer, lying) -> None:
    lying("I'm we'll")
    with pytest.raises(Unequal, match="differ on \"I'm we'll THEY'RE"):
        FastEncoder(tokenizer, tmp_path / DISTRUST_FILE).prove()
    assert (tmp_path / DISTRUST_FILE).read_text().startswith("gigatoken 0 and tokenizers differ on")
    assert not FastEncoder.may_be_used(None, tmp_path / DISTRUST_FILE)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("I'm we'll", "gigatoken 0 and tokenizers differ on \"I'm we'll THEY'RE it'S 'tis o'clock don't\""),
        ("panic", "gigatoken 0 fails on the tokenizer (not a model)"),
    ],
)
def test_an_encoder_that_fails_its_proof_is_done_without(tmp_path, tokenizer_folder, lying, wrong, said) -> None:
    lying(wrong)
    text = write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    assert said_by_preparing(text, tokenizer_folder, tmp_path / "out", num_workers=2) == [said + AGAIN]


def test_the_end_of_the_longest_documents_alone_goes_unchecked(
    tokenizer: Tokenizer, tmp_path: Path, lying, monkeypatch
) -> None:
    monkeypatch.setattr(fast_encoder, "MAX_CHECKED_CHARACTERS", 1000)
    monkeypatch.setattr(fast_encoder, "FIRST_CHECKED", 0)
    lying("wrong")
    encoder = FastEncoder(tokenizer, tmp_path / DISTRUST_FILE)
    texts = [f"wrong {'word ' * 400}{number}" for number in range(3000)]
    chosen = [d for d in documents_of(*texts) if d.split_key % fast_encoder.CHECKED_ONE_IN == 0]
    assert chosen
    with pytest.raises(Unequal, match="differ on the document that begins with 'wrong word"):
        encoder.encode(chosen[0])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_that_its_encoder_kills_is_told_of(tmp_path: Path, tokenizer_folder: Path, lying) -> None:
    lying("abort")
    text = write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    with pytest.raises(DataError, match=r"killed, perhaps for lack of memory; .*; if it was not, uninstall gigatoken"):
        said_by_preparing(text, tokenizer_folder, tmp_path / "out", num_workers=2)


@needs_gigatoken
@pytest.mark.multiprocess
def test_with_and_without_it_the_shards_are_the_same(tmp_path: Path, tokenizer_folder: Path, monkeypatch) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", make_documents(3000))
    monkeypatch.setattr(fast_encoder, "WORTH_PROVING_BYTES", 0)
    used = []
    encode = FastEncoder.encode
    monkeypatch.setattr(FastEncoder, "encode", lambda self, document: used.append(1) or encode(self, document))
    with monkeypatch.context() as core:
        leave_out_companions(core)
        said_by_preparing(text, tokenizer_folder, tmp_path / "plain")
    assert not used
    for num_workers in (1, 2):
        said_by_preparing(text, tokenizer_folder, tmp_path / str(num_workers), num_workers)
        for name in ("train", "val"):
            assert folder_bytes(tmp_path / str(num_workers) / name) == folder_bytes(tmp_path / "plain" / name)
    assert sum(used) == 3000
