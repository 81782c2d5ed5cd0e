"""Encoding with the `gigatoken` library, which is many times as fast as `tokenizers`, where both give the same tokens.

Before use, both libraries encode a set of texts that are likely to differ (`prove`). Then every process checks the
first documents that it encodes, and one document in a thousand after that. The first difference is written to a file
in the folder of work in progress, and raised as `Unequal`. From then on, this folder is tokenized without gigatoken,
and token files that it has made are made again. So a token file counts only as long as no difference is known.
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
"""Size of a source below which tokenizing it takes no longer than the proof."""
FIRST_CHECKED = 50
"""Number of documents that every process encodes by both libraries first."""
CHECKED_ONE_IN = 1000
"""After these, a document is checked if this number divides its split key, which is a hash of the document."""
MAX_CHECKED_CHARACTERS = 1024 * 1024
"""Number of characters of a document that are checked: `tokenizers` takes 170 bytes of memory for each."""
RECYCLE_BYTES = 64 * 1024 * 1024
"""Bytes of text after which the library is loaded again: its cache of words grows by up to 4 bytes for each."""

PROBE_SEED = 17
NUM_RANDOM_PROBES = 500
ALPHABET = [*"aBéß漢😀's1²_-\n\r\t  \xa0\u3000\u0301\u200d\u200b\u2028.<|>"]


class FastEncoder:
    """Encodes documents by `gigatoken`, and checks some of them by `tokenizers`.

    `gigatoken` loads the tokenizer that `tokenizers` has stored. Every method raises Unequal as soon as the two
    differ, or if gigatoken fails.
    """

    @staticmethod
    def may_be_used(total_bytes: int | None, difference_file: Path) -> bool:
        """Return whether gigatoken is installed, not known to differ, and worth its proof.

        total_bytes: size of the source; None if it is not known, and then it may be large.
        difference_file: the file that a difference is written to.
        """
        is_large = total_bytes is None or total_bytes >= WORTH_PROVING_BYTES
        return is_large and not difference_file.exists() and importlib.util.find_spec("gigatoken") is not None

    def __init__(self, tokenizer: Tokenizer, difference_file: Path) -> None:
        """Load the tokenizer into gigatoken. A difference is written to `difference_file`. Raises Unequal."""
        self.tokenizer = tokenizer
        self.difference_file = difference_file
        tokenizer_json = json.loads(tokenizer.backend.to_str())
        # Special tokens that a document spells out are ordinary text, so this encoder must not know them.
        added_tokens = tokenizer_json.get("added_tokens") or []
        tokenizer_json["added_tokens"] = [token for token in added_tokens if not token["special"]]
        self.tokenizer_json = json.dumps(tokenizer_json)
        self.num_checked = 0
        """Number of documents that this process has checked."""
        self.load()

    def load(self) -> None:
        """Load the library's encoder anew, with an empty cache of words. Raises Unequal."""
        try:
            from gigatoken.gigatoken_rs import load_hf_json

            self.backend: Any = load_hf_json(self.tokenizer_json)
        except BaseException as error:
            raise self.failure("the tokenizer", error) from error
        self.encoded_bytes = 0
        """Bytes of text since the encoder was loaded."""

    def prove(self) -> None:
        """Encode all probes by both libraries. Raises Unequal at the first difference."""
        backend = self.tokenizer.backend
        added_tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
        # Only a normalizer reorders combining marks.
        mark_probes = marks() if backend.normalizer else ()
        for probe in itertools.chain(probes(added_tokens), mark_probes):
            self.check(probe, self.ids_of(probe), repr(probe[:60]))

    def encode(self, document: Document) -> np.ndarray:
        """Return the token ids of a document, uint32. Raises Unequal if it is checked and differs."""
        self.encoded_bytes += document.num_bytes
        if self.encoded_bytes > RECYCLE_BYTES:
            self.load()
        ids = self.ids_of(document.text)

        is_checked = self.num_checked < FIRST_CHECKED or document.split_key % CHECKED_ONE_IN == 0
        if is_checked:
            self.num_checked += 1
            beginning = document.text[:MAX_CHECKED_CHARACTERS]
            ids_of_beginning = ids if beginning == document.text else self.ids_of(beginning)
            self.check(beginning, ids_of_beginning, f"the document that begins with {document.text[:60]!r}")
        return ids

    def ids_of(self, text: str) -> np.ndarray:
        """Return the token ids of a text by gigatoken alone. Raises Unequal if it fails."""
        try:
            return self.backend.encode(text)
        except BaseException as error:
            raise self.failure(repr(text[:60]), error) from error

    def check(self, text: str, ids: np.ndarray, description: str) -> None:
        """Raise Unequal unless `tokenizers` gives a text the same ids. `description` says which text it is."""
        if self.tokenizer.encode_batch([text]) != [ids.tolist()]:
            raise self.unequal(f"and tokenizers differ on {description}")

    def failure(self, description: str, error: BaseException) -> BaseException:
        """Return the exception to raise for an error of gigatoken while it encoded what `description` says.

        Its Rust code panics with an exception that is not an Exception, so callers catch BaseException. Ctrl-C,
        SystemExit and a lack of memory are returned unchanged.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            return error
        one_line = " ".join(str(error).split())
        return self.unequal(f"fails on {description} ({one_line})")

    def unequal(self, reason: str) -> Unequal:
        """Write a difference to its file, and return the exception to raise.

        It is written at once, because the preparation may end by a kill, or by another process's error, before it
        handles this one.
        """
        sentence = f"gigatoken {importlib.metadata.version('gigatoken')} {reason}"
        write_atomically(self.difference_file, f"{sentence}\n")
        return Unequal(sentence)


def probes(added_tokens: Sequence[str]) -> Iterator[str]:
    """Yield texts on which tokenizers are likely to differ. `added_tokens` are the tokenizer's."""
    # Control characters, combining marks, line ends, and lengths 0 and 1.
    yield from ("", "\0", "a\0b", "\ufeffa", "\ufffd\ufffe\uffff", "e\u0301\u0301\u0301", "\r\n\r\n \t\n  x  ", "  ")
    # What regular expressions of pre-tokenizers treat apart: contractions, numbers, runs of spaces.
    yield from ("I'm we'll THEY'RE it'S 'tis o'clock don't", "1234567 3.14 1,000,000 ²½Ⅷ٣", "a  b   c    d\n\n\n\te")
    for token in added_tokens:
        yield from (token, f"a{token}b {token} {token}{token}\n", token[:-1])

    yield from fill_template("a{0}b {0}1", step=4)
    # Long runs, which some libraries cut.
    for letter in ("a", "é", "漢", "😀", " ", "\n", "=", "7"):
        yield letter * 3000

    generator = random.Random(PROBE_SEED)
    for _ in range(NUM_RANDOM_PROBES):
        yield "".join(generator.choices([*ALPHABET, *added_tokens], k=generator.randint(1, 40)))
    # A long text of words that occur again and again, for the library's cache.
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(2000)]
    yield " ".join(generator.choices(words, k=10_000))


def marks() -> Iterator[str]:
    """Yield texts of every character with combining marks.

    NFC reorders marks by the version of Unicode that a library knows, so that two libraries may order them differently.
    """
    yield from fill_template("a{0}\u0323\u0301b c\u0301{0}\u0323d ", step=1)


def fill_template(template: str, *, step: int) -> Iterator[str]:
    """Yield texts in which characters of Unicode are put into a template, 200 characters in each text.

    All characters up to U+3400 are used, one in `step` up to U+20000, and one in 1024 of the rest. For example,
    "a{0}b" gives texts such as "aab" + "abb" + "acb" + …
    """
    code_points = itertools.chain(range(0x3400), range(0x3400, 0x20000, step), range(0x20000, sys.maxunicode + 1, 1024))
    # Surrogates are not characters.
    characters = (chr(code_point) for code_point in code_points if not 0xD800 <= code_point < 0xE000)
    while True:
        group = list(itertools.islice(characters, 200))
        if not group:
            return
        yield "".join(template.format(character) for character in group)
