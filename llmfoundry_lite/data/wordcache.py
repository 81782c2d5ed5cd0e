"""GPT-2-style byte-level BPE, three times as fast: the ids of every word that was seen are remembered.

The ids are exactly those of the `tokenizers` library. `build_word_cache` returns None for other kinds of tokenizers.

A byte-level BPE tokenizer splits a text into words by GPT-2's regular expression, then merges within each word. So the
ids of a text are the joined ids of its words, and most words have been seen before. The library caches words too, but
spends most of its time on character offsets and copies.

The expression asks whether characters are letters, digits or spaces. Python's version of Unicode differs from the
library's, so only characters whose class never changed are split here (LETTERS, DIGITS, OTHERS, SPACES). Where a word
touches any other character, the text up to the next certain boundary is one long "word", which the library splits. A
boundary is certain between a character that is certainly not a space and an ASCII space: no alternative of GPT-2's
expression crosses it.
"""

import re
from collections.abc import Iterator

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

LETTERS = r"A-Za-zÀ-ÖØ-öø-ſΑ-ΡΣ-ώА-яёЁ"
DIGITS = r"0-9"
OTHERS = r"\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f«»‐-‟…"
SPACES = r"\t-\r "
KNOWN = LETTERS + DIGITS + OTHERS + SPACES

# GPT-2's expression is  's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# Here each run is taken whole (`++`) and refused if an unknown character could continue it. A run of spaces leaves its
# last one to the word after it. A single one is a word only if it is not a blank, which joins what follows.
FIND_WORDS = re.compile(
    rf"""
    '(?:s|t|re|ve|m|ll|d)
    | [ ]?[{LETTERS}]++(?![^{KNOWN}])
    | [ ]?[{DIGITS}]++(?![^{KNOWN}])
    | [ ]?[{OTHERS}]++(?![^{KNOWN}])
    | (?=[{SPACES}]++(?:[{KNOWN}]|\Z)) (?: [{SPACES}]+(?![^{SPACES}]) | [\t-\r] )
    | .+? (?: (?<=[{LETTERS}{DIGITS}{OTHERS}]) (?=[{SPACES}]) | \Z )
    """,
    re.VERBOSE | re.DOTALL,
).findall
CERTAIN_BOUNDARY = re.compile(rf"[{LETTERS}{DIGITS}{OTHERS}][{SPACES}]")

MAX_CACHED_WORDS = 2**18
"""Words remembered per process, about 50 MB. The first stay, which are the frequent ones."""
MAX_WORD_CHARACTERS = 32
"""Characters. Longer words hardly come back."""
SLICE_CHARACTERS = 1_000_000
"""Longer documents are split at a certain boundary first, to bound memory."""


class WordCache(dict[str, bytes]):
    """Words to the bytes of their ids (uint32), filled as they come."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self.backend = backend

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, uint32."""
        ids_of = self.__getitem__
        joined = b"".join(b"".join(map(ids_of, FIND_WORDS(part))) for part in slices(text))
        return np.frombuffer(joined, np.uint32)

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self.backend.encode(word, add_special_tokens=False).ids, np.uint32).tobytes()
        if len(word) <= MAX_WORD_CHARACTERS and len(self) < MAX_CACHED_WORDS:
            self[word] = ids
        return ids


def build_word_cache(backend: tokenizers.Tokenizer) -> WordCache | None:
    """Build a cache for a tokenizer that splits exactly as GPT-2's does; None for all others.

    Besides the pre-tokenizer, that needs: no normalizer, no random dropout of merges, and no added tokens but special
    ones, which are not looked for in documents.
    """
    pre_tokenizer = backend.pre_tokenizer
    splits_like_gpt2 = (
        isinstance(backend.model, models.BPE)
        and not backend.model.dropout
        and isinstance(pre_tokenizer, pre_tokenizers.ByteLevel)
        and pre_tokenizer.use_regex
        and not pre_tokenizer.add_prefix_space
        and backend.normalizer is None
        and backend.encode_special_tokens
        and all(token.special for token in backend.get_added_tokens_decoder().values())
    )
    return WordCache(backend) if splits_like_gpt2 else None


def slices(text: str) -> Iterator[str]:
    """Cut a text into parts of about SLICE_CHARACTERS that can be encoded one by one."""
    start = 0
    while boundary := CERTAIN_BOUNDARY.search(text, start + SLICE_CHARACTERS):
        yield text[start : boundary.start() + 1]
        start = boundary.start() + 1
    yield text[start:]
