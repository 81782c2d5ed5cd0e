"""The `gigatoken` library as an encoder: many times as fast as `tokenizers`, used only where it proves equal.

Owns the proof. Before use, both libraries encode a set of probes; then a process's first documents; then one document
in a thousand. At the first difference `Unequal` names the document. Leaves falling back to `token_files.py`, which
makes everything again that this encoder has made. Where the library is not installed, or cannot load a tokenizer,
nobody notices but by the clock.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.prepare.units import Document

WORTH_PROVING_BYTES = 32 * 1024 * 1024
"""A smaller input is tokenised in about the time that the proof takes."""
FIRST_CHECKED = 50
"""Documents that every process encodes by both libraries before it trusts the fast one."""
CHECKED_ONE_IN = 1000
"""Afterwards: documents whose split key this divides."""
LONGEST_CHECKED = 1024 * 1024
"""Characters of a document. What follows is not checked: `tokenizers` takes 170 bytes of memory for each."""
RECYCLE_BYTES = 64 * 1024 * 1024
"""Its cache of words grows for as long as it lives, by up to 4 bytes a byte of text: begin anew after so much text."""

PROBED_SEED = 17
NUM_RANDOM_PROBES = 500


class Unequal(Exception):
    """The two libraries made different tokens of one document, or the fast one failed."""


class FastEncoder:
    """Encodes documents by `gigatoken`, and checks some of them by `tokenizers`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises Unequal when the library cannot load the tokenizer."""
        self.tokenizer = tokenizer
        stored = json.loads(tokenizer.backend.to_str())
        # A special token that a document spells out is text for us, and so none that this encoder has to know.
        stored["added_tokens"] = [token for token in stored.get("added_tokens") or [] if not token["special"]]
        self.stored = json.dumps(stored)
        self.num_checked = 0
        self.load()

    def load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json

            self.backend: Any = load_hf_json(self.stored)
        except BaseException as error:
            raise unequal(error, "the tokenizer") from error
        self.encoded_bytes = 0

    def prove(self) -> None:
        """Encode the probes by both libraries. Raises Unequal."""
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        normalizes = self.tokenizer.backend.normalizer is not None
        for probe in itertools.chain(probes(tuple(token.content for token in added)), marks() if normalizes else ()):
            self.check(probe, self.ids_of(probe), repr(probe[:60]))

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """Token ids of documents, uint32. Raises Unequal."""
        return [self.encode_one(document) for document in documents]

    def encode_one(self, document: Document) -> np.ndarray:
        self.encoded_bytes += document.num_bytes
        if self.encoded_bytes > RECYCLE_BYTES:
            self.load()
        ids = self.ids_of(document.text)
        name = f"the document that begins with {document.text[:60]!r}"
        if self.num_checked < FIRST_CHECKED or document.split_key % CHECKED_ONE_IN == 0:
            self.num_checked += 1
            beginning = document.text[:LONGEST_CHECKED]
            self.check(beginning, ids if beginning == document.text else self.ids_of(beginning), name)
        return ids

    def ids_of(self, text: str) -> np.ndarray:
        try:
            return self.backend.encode(text)
        except BaseException as error:
            raise unequal(error, repr(text[:60])) from error

    def check(self, text: str, ids: np.ndarray, name: str) -> None:
        if self.tokenizer.encode_batch([text]) != [ids.tolist()]:
            raise Unequal(f"gigatoken {version()} and tokenizers differ on {name}")


def is_installed() -> bool:
    return importlib.util.find_spec("gigatoken") is not None


def unequal(error: BaseException, what: str) -> Unequal:
    """What to raise for a failure of the library, whose panics are no Exception."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
        raise error
    return Unequal(f"gigatoken {version()} fails on {what} ({' '.join(str(error).split())})")


@cache
def version() -> str:
    return importlib.metadata.version("gigatoken")


def probes(added_tokens: tuple[str, ...]) -> Iterator[str]:
    """Texts that tell tokenizers apart."""
    yield from ("", "\0", "a\0b", "\ufeffa", "\ufffd\ufffe\uffff", "e\u0301\u0301\u0301", "\r\n\r\n \t\n  x  ", "  ")
    yield from ("I'm we'll THEY'RE it'S 'tis o'clock don't", "1234567 3.14 1,000,000 ²½Ⅷ٣", "a  b   c    d\n\n\n\te")
    for token in added_tokens:
        yield from (token, f"a{token}b {token} {token}{token}\n", token[:-1])
    for characters in runs_of(probed_characters(), 200):
        yield "".join(f"a{character}b {character}1" for character in characters)
    for letter in ("a", "é", "漢", "😀", " ", "\n", "=", "7"):
        yield letter * 3000
    generator = random.Random(PROBED_SEED)
    alphabet = [
        "a",
        "B",
        "é",
        "ß",
        "漢",
        "😀",
        "'",
        "s",
        "1",
        "²",
        "_",
        "-",
        "\n",
        "\r",
        "\t",
        " ",
        " ",
        "\xa0",
        "\u3000",
    ]
    alphabet += ["\u0301", "\u200d", "\u200b", "\u2028", ".", "<", "|", ">", *added_tokens]
    for _ in range(NUM_RANDOM_PROBES):
        yield "".join(generator.choices(alphabet, k=generator.randint(1, 40)))
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(2000)]
    yield " ".join(generator.choices(words, k=10_000))


def marks() -> Iterator[str]:
    """Every combining mark beside others, whose order NFC changes; also characters that may be marks in a newer Unicode
    than Python's, since the two libraries have tables of different years."""
    codes = (chr(code) for code in range(0x20000) if unicodedata.category(chr(code)) in ("Mn", "Mc", "Me", "Cn"))
    for characters in runs_of(codes, 200):
        yield "".join(f"a{mark}\u0323\u0301b c\u0301{mark}\u0323d " for mark in characters)


def probed_characters() -> Iterator[str]:
    """Characters of every plane: both sides of each border between categories, and some in between."""
    before = ""
    for code in itertools.chain(range(0x20000), range(0x20000, sys.maxunicode + 1, 1024)):
        character = chr(code)
        category = unicodedata.category(character)
        if category != "Cs" and (category != before or code % 64 == 0):
            if code and unicodedata.category(chr(code - 1)) != "Cs":
                yield chr(code - 1)
            yield character
        before = category


def runs_of(items: Iterator[str], length: int) -> Iterator[list[str]]:
    run: list[str] = []
    for item in items:
        run.append(item)
        if len(run) == length:
            yield run
            run = []
    yield run
