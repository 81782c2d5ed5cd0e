"""`gigatoken` is used only where it makes the tokens that `tokenizers` makes."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llmfoundry_lite.data.tokenizer import Tokenizer, build_tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare import fast_encoder, token_files
from llmfoundry_lite.prepare.fast_encoder import FastEncoder, Unequal
from llmfoundry_lite.prepare.prepare import prepare
from llmfoundry_lite.prepare.units import Document, split_key
from tests.helpers.data import folder_bytes, make_documents
from tests.helpers.preparing import request, write_jsonl

needs_gigatoken = pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken is not installed")


def documents_of(*texts: str) -> list[Document]:
    return [Document(text, len(text.encode()), split_key(text.encode())) for text in texts]


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
def test_the_tokenizers_trained_here_prove_equal(tokenizer: Tokenizer) -> None:
    encoder = FastEncoder(tokenizer)
    encoder.prove()
    texts = [*make_documents(120), "a<|endoftext|>b", "<|endoftext|>"]
    encoded = encoder.encode(documents_of(*texts))
    assert [ids.tolist() for ids in encoded] == tokenizer.encode_batch(texts)
    assert encoder.num_checked == fast_encoder.FIRST_CHECKED


@needs_gigatoken
@pytest.mark.parametrize("make", [gpt4_like, lower_case, words])
def test_other_tokenizers_are_used_only_if_they_prove_equal(make, monkeypatch) -> None:
    tokenizer = build_tokenizer("test", make(), {"eos_token": "<|endoftext|>"}, {})
    try:
        encoder = FastEncoder(tokenizer)
        encoder.prove()
    except Unequal:
        return
    texts = ["".join(chr(code) for code in range(start, start + 100)) for start in range(0, 0xD700, 100)]
    assert [ids.tolist() for ids in encoder.encode(documents_of(*texts))] == tokenizer.encode_batch(texts)


@needs_gigatoken
def test_the_encoder_begins_anew_before_its_memory_grows(tokenizer: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(fast_encoder, "RECYCLE_BYTES", 1000)
    encoder = FastEncoder(tokenizer)
    texts = make_documents(40)
    backends = set()
    for document in documents_of(*texts):
        ids = encoder.encode([document])[0]
        assert ids.tolist() == tokenizer.encode(document.text)
        backends.add(id(encoder.backend))
    assert len(backends) > 1


class Liar:
    """A fast encoder's backend that is right but for texts with a certain beginning."""

    def __init__(self, tokenizer: Tokenizer, wrong: str) -> None:
        self.tokenizer, self.wrong = tokenizer, wrong

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text) + [5] * text.startswith(self.wrong), np.uint32)


@pytest.fixture
def lying(monkeypatch):
    """Makes every fast encoder of this process a Liar."""

    def lie_about(wrong: str) -> None:
        monkeypatch.setattr(fast_encoder, "is_installed", lambda: True)
        monkeypatch.setattr(token_files, "is_installed", lambda: True)
        monkeypatch.setattr(fast_encoder, "version", lambda: "0")
        monkeypatch.setattr(token_files, "WORTH_PROVING_BYTES", 0)
        monkeypatch.setattr("llmfoundry_lite.prepare.sources.SMALLEST_UNIT_BYTES", 4000)

        def load(encoder: FastEncoder) -> None:
            encoder.backend, encoder.encoded_bytes = Liar(encoder.tokenizer, wrong), 0

        monkeypatch.setattr(FastEncoder, "load", load)

    return lie_about


def test_a_difference_in_a_late_document_is_named_and_all_is_made_again(
    tmp_path: Path, tokenizer_folder: Path, lying, monkeypatch
) -> None:
    documents = make_documents(300)
    wanted = request(write_jsonl(tmp_path / "a.jsonl", documents), tokenizer_folder)
    prepare(wanted, tmp_path / "expected", num_workers=1)
    checked = [d for d in documents_of(*documents[100:]) if d.split_key % 50 == 0]
    monkeypatch.setattr(fast_encoder, "CHECKED_ONE_IN", 50)
    lying(checked[-1].text[:6])
    wrong_but_unseen = checked[-1].text  # the others that it lies about, if any, are made again too
    said: list[str] = []
    prepare(wanted, tmp_path / "out", num_workers=1, notify=said.append)
    assert said == [
        f"gigatoken 0 and tokenizers differ on the document that begins with {wrong_but_unseen[:60]!r}: tokenising by "
        "tokenizers alone, and again what was not"
    ]
    for name in ("train", "val"):
        assert folder_bytes(tmp_path / "out" / name) == folder_bytes(tmp_path / "expected" / name)


def test_the_end_of_the_longest_documents_alone_goes_unchecked(tokenizer: Tokenizer, lying, monkeypatch) -> None:
    monkeypatch.setattr(fast_encoder, "LONGEST_CHECKED", 1000)
    monkeypatch.setattr(fast_encoder, "FIRST_CHECKED", 0)
    lying("wrong")
    encoder = FastEncoder(tokenizer)
    texts = [f"wrong {'word ' * 400}{number}" for number in range(3000)]
    chosen = [d for d in documents_of(*texts) if d.split_key % fast_encoder.CHECKED_ONE_IN == 0]
    assert chosen
    with pytest.raises(fast_encoder.Unequal, match="differ on the document that begins with 'wrong word"):
        encoder.encode(chosen)


def test_a_worker_remembers_a_difference_before_it_tells_of_it(tmp_path: Path, tokenizer, lying, monkeypatch) -> None:
    monkeypatch.setattr(token_files, "_worker_context", (tokenizer, None, tmp_path / "units", True))
    lying("I'm we'll")
    token_files.fast_encoder_of_worker.cache_clear()
    with pytest.raises(fast_encoder.Unequal):
        token_files.prove_encoder()
    token_files.fast_encoder_of_worker.cache_clear()
    assert (tmp_path / token_files.DISTRUSTED).read_text().startswith("gigatoken 0 and tokenizers differ on")


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch) -> None:
    """A library of that name which ends the process, as no exception does; here and in processes begun here."""
    library = tmp_path / "library/gigatoken"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "gigatoken_rs.py").write_text("import os\ndef load_hf_json(text): os.abort()\n")
    monkeypatch.syspath_prepend(library.parent)
    monkeypatch.setenv("PYTHONPATH", str(library.parent), prepend=os.pathsep)
    monkeypatch.setattr(token_files, "is_installed", lambda: True)
    monkeypatch.setattr(token_files, "WORTH_PROVING_BYTES", 0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_encoder_whose_workers_are_killed_twice_is_done_without(
    tmp_path: Path, tokenizer_folder: Path, crashing
) -> None:
    wanted = request(write_jsonl(tmp_path / "a.jsonl", make_documents(60)), tokenizer_folder)
    with pytest.raises(DataError, match="a worker process was killed, perhaps for want of memory"):
        prepare(wanted, tmp_path / "out", num_workers=2)
    said: list[str] = []
    prepare(wanted, tmp_path / "out", num_workers=2, notify=said.append)
    assert said[-1].startswith("a process that encodes by gigatoken was killed twice: tokenising by tokenizers alone")


PREPARE_IN_ONE_PROCESS = """
import sys
from pathlib import Path
from llmfoundry_lite.prepare import token_files
from llmfoundry_lite.prepare.prepare import prepare
from tests.helpers.preparing import request

token_files.WORTH_PROVING_BYTES, token_files.is_installed = 0, lambda: True
text, tokenizer, out = map(Path, sys.argv[1:])
prepare(request(text, tokenizer), out, num_workers=1, notify=print)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_one_that_takes_the_only_process_down_is_done_without_the_third_time(
    tmp_path: Path, tokenizer_folder: Path, crashing
) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", make_documents(60))
    command = [sys.executable, "-c", PREPARE_IN_ONE_PROCESS, str(text), str(tokenizer_folder), str(tmp_path / "out")]
    launches = [subprocess.run(command, capture_output=True, text=True) for _ in range(3)]
    assert [launch.returncode for launch in launches] == [-signal.SIGABRT, -signal.SIGABRT, 0], launches[-1].stderr
    assert "a process that encodes by gigatoken was killed twice: tokenising by tokenizers alone" in launches[2].stdout


def test_a_death_after_a_token_file_is_the_first_again(tmp_path: Path) -> None:
    (tmp_path / "units").mkdir()
    token_files.count_deaths(tmp_path, token_files.num_deaths(tmp_path) + 1)
    assert token_files.num_deaths(tmp_path) == 1
    (tmp_path / "units/00000000.npz").touch()
    assert token_files.num_deaths(tmp_path) == 0
    token_files.count_deaths(tmp_path, token_files.num_deaths(tmp_path) + 1)
    assert token_files.num_deaths(tmp_path) == 1


@needs_gigatoken
def test_marks_that_the_two_order_otherwise_are_found_in_the_proof() -> None:
    """Of the kind of GPT-NeoX's tokenizer, which normalises to NFC."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder = FastEncoder(build_tokenizer("test", trained(backend), {"eos_token": "<|endoftext|>"}, {}))
    texts = [f"a{chr(code)}\u0323\u0301b" for code in range(0x300, 0x1B00)]
    differing = [text for text in texts if encoder.tokenizer.encode_batch([text]) != [encoder.ids_of(text).tolist()]]
    assert all(any(text in probe for probe in fast_encoder.marks()) for text in differing)
    if differing:
        with pytest.raises(Unequal, match="differ on"):
            encoder.prove()


def test_a_process_that_ends_in_order_counts_as_no_death(tmp_path: Path, tokenizer_folder: Path, lying) -> None:
    lying("said by nobody")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 17}\n')
    wanted = request(tmp_path / "a.jsonl", tokenizer_folder)
    for _ in range(token_files.MOST_DEATHS + 1):
        with pytest.raises(DataError, match="text"):
            prepare(wanted, tmp_path / "out", num_workers=1)
    assert token_files.num_deaths(tmp_path / "out/.partial") == 0
    assert (tmp_path / "out/.partial" / token_files.KILLED).exists()


def test_a_difference_in_the_probes_is_seen_before_a_document(tmp_path: Path, tokenizer_folder: Path, lying) -> None:
    lying("I'm we'll")
    said: list[str] = []
    wanted = request(write_jsonl(tmp_path / "a.jsonl", make_documents(60)), tokenizer_folder)
    prepare(wanted, tmp_path / "out", num_workers=1, notify=said.append)
    assert said[0].startswith("gigatoken 0 and tokenizers differ on \"I'm we'll THEY'RE")


def test_a_fast_encoder_that_cannot_load_the_tokenizer_is_done_without(
    tmp_path: Path, tokenizer_folder: Path, lying, monkeypatch
) -> None:
    lying("\0")
    monkeypatch.undo()
    monkeypatch.setattr(token_files, "WORTH_PROVING_BYTES", 0)
    monkeypatch.setattr(token_files, "is_installed", lambda: True)

    class Panic(BaseException):
        pass

    def fail(encoder: FastEncoder) -> None:
        raise fast_encoder.unequal(Panic("not a model"), "the tokenizer")

    monkeypatch.setattr(fast_encoder, "version", lambda: "0")
    monkeypatch.setattr(FastEncoder, "load", fail)
    said: list[str] = []
    wanted = request(write_jsonl(tmp_path / "a.jsonl", make_documents(60)), tokenizer_folder)
    prepare(wanted, tmp_path / "out", num_workers=1, notify=said.append)
    assert said == [
        "gigatoken 0 fails on the tokenizer (not a model): tokenising by tokenizers alone, and again what was not"
    ]


@needs_gigatoken
@pytest.mark.multiprocess
def test_with_and_without_it_the_shards_are_the_same(tmp_path: Path, tokenizer_folder: Path, monkeypatch) -> None:
    wanted = request(write_jsonl(tmp_path / "a.jsonl", make_documents(3000)), tokenizer_folder)
    prepare(wanted, tmp_path / "plain", num_workers=1)
    monkeypatch.setattr(token_files, "WORTH_PROVING_BYTES", 0)
    used = []
    encode = FastEncoder.encode
    monkeypatch.setattr(FastEncoder, "encode", lambda self, docs: used.append(len(docs)) or encode(self, docs))
    for num_workers in (1, 2):
        prepare(wanted, tmp_path / str(num_workers), num_workers=num_workers)
        for name in ("train", "val"):
            assert folder_bytes(tmp_path / str(num_workers) / name) == folder_bytes(tmp_path / "plain" / name)
    assert sum(used) == 3000
