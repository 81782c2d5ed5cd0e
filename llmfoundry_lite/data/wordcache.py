"""GPT-2-style byte-level BPE, three times as fast: the ids of every word that was seen are remembered.

Owns one idea and the proof obligation that comes with it: the ids are exactly those of the `tokenizers` library.
Leaves every other kind of tokenizer to the library (`build_word_cache` returns None).

A byte-level BPE tokenizer first splits a text into words by the regular expression of GPT-2 and then merges within
each word. So the ids of a text are the ids of its words, joined, and most words of a text have been seen before. The
library looks words up as well, but spends most of its time on character offsets and copies that nobody needs here.

The regular expression asks whether characters are letters, digits or spaces, and Python's answer depends on another
version of Unicode than the library's. So only characters whose class never changed are split here (LETTERS, DIGITS,
OTHERS, SPACES). Where a word touches any other character, the text from there up to the next certain boundary is one
long "word", which the library splits. A boundary is certain between a character that is certainly no space and an
ASCII space: no alternative of GPT-2's expression reaches across.
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
# last one to the word behind it; alone it is a word only if it is no blank, for a blank joins whatever follows.
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

LARGEST_CACHE = 2**18
"""Words remembered per process, about 50 MB. The first ones stay, which are the frequent ones."""
LONGEST_CACHED = 32
"""Characters; longer words hardly come back."""
SLICE_CHARACTERS = 1_000_000
"""Longer documents are split at a certain boundary first, so that memory does not grow with them."""


class WordCache(dict[str, bytes]):
    """Words to the bytes of their ids (uint32), filled as they come."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self.backend = backend

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, uint32."""
        ids_of = self.__getitem__
        joined = b"".join(b"".join(map(ids_of, FIND_WORDS(part))) for part in slices(text))
        return np.frombuffer(joined, np.uint32)

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self.backend.encode(word, add_special_tokens=False).ids, np.uint32).tobytes()
        if len(word) <= LONGEST_CACHED and len(self) < LARGEST_CACHE:
            self[word] = ids
        return ids


def build_word_cache(backend: tokenizers.Tokenizer) -> WordCache | None:
    """A cache for tokenizers that split exactly as GPT-2's does; None for all others.

    Beside the pre-tokenizer that means: no normalizer, no random dropout of merges, and no added token but special
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
    """A text in parts of about SLICE_CHARACTERS that can be encoded one by one."""
    start = 0
    while boundary := CERTAIN_BOUNDARY.search(text, start + SLICE_CHARACTERS):
        yield text[start : boundary.start() + 1]
        start = boundary.start() + 1
    yield text[start:]
