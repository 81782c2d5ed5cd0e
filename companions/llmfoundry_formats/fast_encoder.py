"""The `gigatoken` library as an encoder: many times as fast as `tokenizers`, used only where it proves equal.

The rule: token files that it made count only while no difference from `tokenizers` is known. Before use, both
libraries encode a set of probes; then each process's first documents; then one document in a thousand. The first
difference is written to a file and raised as `Unequal`. From then on, this folder is tokenised without the library,
and its earlier token files are made again.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.prepare.documents import Document
from llmfoundry_lite.prepare.token_files import Unequal

WORTH_PROVING_BYTES = 32 * 1024 * 1024
"""Size below which an input is tokenised in about the time that the proof takes."""
FIRST_CHECKED = 50
"""Documents that every process encodes by both libraries before it trusts the fast one."""
CHECKED_ONE_IN = 1000
"""After the first ones, a document is checked if this number divides its split key."""
MAX_CHECKED_CHARACTERS = 1024 * 1024
"""Characters of a document that are checked at most: `tokenizers` takes 170 bytes of memory for each."""
RECYCLE_BYTES = 64 * 1024 * 1024
"""Bytes of text after which the library is loaded again: its cache of words grows by up to 4 bytes for each."""

PROBED_SEED = 17
NUM_RANDOM_PROBES = 500
ALPHABET = [*"aBéß漢😀's1²_-\n\r\t  \xa0\u3000\u0301\u200d\u200b\u2028.<|>"]


class FastEncoder:
    """Encodes documents by `gigatoken`, and checks some of them by `tokenizers`."""

    @staticmethod
    def may_be_used(total_bytes: int | None, verdict: Path) -> bool:
        """Return whether the library is installed, worth its proof for this size, and not known to differ."""
        is_worth_it = total_bytes is None or total_bytes >= WORTH_PROVING_BYTES
        return is_worth_it and not verdict.exists() and importlib.util.find_spec("gigatoken") is not None

    def __init__(self, tokenizer: Tokenizer, verdict: Path) -> None:
        """Load the library's tokenizer. `verdict` is the file that a difference is written to. Raises Unequal."""
        self.tokenizer = tokenizer
        self.verdict = verdict
        stored = json.loads(tokenizer.backend.to_str())
        # Special tokens that a document spells out are ordinary text, so this encoder must not know them.
        stored["added_tokens"] = [token for token in stored.get("added_tokens") or [] if not token["special"]]
        self.stored = json.dumps(stored)
        self.num_checked = 0
        self.load()

    def load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json

            self.backend: Any = load_hf_json(self.stored)
        except BaseException as error:
            raise self.failure("the tokenizer", error) from error
        self.encoded_bytes = 0

    def prove(self) -> None:
        """Encode the probes by both libraries. Raises Unequal."""
        added = [token.content for token in self.tokenizer.backend.get_added_tokens_decoder().values()]
        for probe in itertools.chain(probes(added), marks() if self.tokenizer.backend.normalizer else ()):
            self.check(probe, self.ids_of(probe), repr(probe[:60]))

    def encode(self, document: Document) -> np.ndarray:
        """Return the token ids of a document, uint32. Some are checked by the other library. Raises Unequal."""
        self.encoded_bytes += document.num_bytes
        if self.encoded_bytes > RECYCLE_BYTES:
            self.load()
        ids = self.ids_of(document.text)
        if self.num_checked < FIRST_CHECKED or document.split_key % CHECKED_ONE_IN == 0:
            self.num_checked += 1
            beginning = document.text[:MAX_CHECKED_CHARACTERS]
            checked = ids if beginning == document.text else self.ids_of(beginning)
            self.check(beginning, checked, f"the document that begins with {document.text[:60]!r}")
        return ids

    def ids_of(self, text: str) -> np.ndarray:
        try:
            return self.backend.encode(text)
        except BaseException as error:
            raise self.failure(repr(text[:60]), error) from error

    def check(self, text: str, ids: np.ndarray, name: str) -> None:
        if self.tokenizer.encode_batch([text]) != [ids.tolist()]:
            raise self.unequal(f"and tokenizers differ on {name}")

    def failure(self, name: str, error: BaseException) -> BaseException:
        """Return the exception to raise for a failure of the library, whose panics are no Exception."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            return error
        return self.unequal(f"fails on {name} ({' '.join(str(error).split())})")

    def unequal(self, reason: str) -> Unequal:
        """Write the verdict at once, as another unit's error or a kill may come first. Returns it as an exception."""
        sentence = f"gigatoken {importlib.metadata.version('gigatoken')} {reason}"
        write_atomically(self.verdict, f"{sentence}\n")
        return Unequal(sentence)


def probes(added_tokens: Sequence[str]) -> Iterator[str]:
    """Yield texts on which tokenizers are likely to differ."""
    yield from ("", "\0", "a\0b", "\ufeffa", "\ufffd\ufffe\uffff", "e\u0301\u0301\u0301", "\r\n\r\n \t\n  x  ", "  ")
    yield from ("I'm we'll THEY'RE it'S 'tis o'clock don't", "1234567 3.14 1,000,000 ²½Ⅷ٣", "a  b   c    d\n\n\n\te")
    for token in added_tokens:
        yield from (token, f"a{token}b {token} {token}{token}\n", token[:-1])
    yield from in_texts("a{0}b {0}1", step=4)
    for letter in ("a", "é", "漢", "😀", " ", "\n", "=", "7"):
        yield letter * 3000
    generator = random.Random(PROBED_SEED)
    for _ in range(NUM_RANDOM_PROBES):
        yield "".join(generator.choices([*ALPHABET, *added_tokens], k=generator.randint(1, 40)))
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(2000)]
    yield " ".join(generator.choices(words, k=10_000))


def marks() -> Iterator[str]:
    """Yield texts of every character with combining marks, which NFC reorders by the library's version of Unicode."""
    yield from in_texts("a{0}\u0323\u0301b c\u0301{0}\u0323d ", step=1)


def in_texts(template: str, *, step: int) -> Iterator[str]:
    """Put characters into a template, 200 a text: all up to U+3400, one in `step` up to U+20000, some others."""
    codes = itertools.chain(range(0x3400), range(0x3400, 0x20000, step), range(0x20000, sys.maxunicode + 1, 1024))
    characters = (chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    while group := list(itertools.islice(characters, 200)):
        yield "".join(template.format(character) for character in group)
